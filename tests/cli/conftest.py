"""Small images, and runs that are made once and read by many tests."""

import contextlib
import functools
import io
import shutil
import sys

import pytest

from tests.cli import runs

KINDS = {
    "one": ["--epsilon", "2"],
    "plain": [*runs.THREE, runs.PLAIN],
    "fixed": [runs.FIXED, "--max-norm", "0.8"],
}
"""Runs of two epochs: of one model, of three without privacy, of one again."""


@pytest.fixture(scope="module", autouse=True)
def quick():
    with runs.quickly():
        yield


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """The small data set, for reading only."""
    return runs.write_data(tmp_path_factory.mktemp("data") / "images.npz")


@pytest.fixture(scope="session")
def finished(images, tmp_path_factory):
    """Return folder and output of a finished run of a kind, for reading only."""
    folder = tmp_path_factory.mktemp("finished") / "new"

    @functools.cache
    def run(kind):
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            assert runs.train(images, folder / kind, *KINDS[kind]) == 0
        return folder / kind, screen.getvalue()

    return run


@pytest.fixture
def copied(finished, tmp_path):
    """Copy a finished run."""
    return lambda kind: shutil.copytree(finished(kind)[0], tmp_path / "run")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module where the user is, and forget it afterwards."""

    def write(name, source):
        (tmp_path / f"{name}.py").write_text("import torch\n" + source)
        monkeypatch.chdir(tmp_path)
        names.append(name)
        return f"{name}:make"

    names = []
    yield write
    for name in names:
        sys.modules.pop(name, None)

"""What every test of a command runs with: small images, and nothing that takes long."""

import sys

import pytest

from tests.cli import runs
from vgrad.cli import report
from vgrad.dp import accounting


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Ask the accountant once only, and draw no pictures."""
    with pytest.MonkeyPatch.context() as patch:
        for name, cached in runs.ACCOUNTANT.items():
            patch.setattr(accounting, name, cached)
        patch.setattr(report, "write_picture", runs.picture)
        yield


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """The small data set, for reading only."""
    return runs.write_data(tmp_path_factory.mktemp("data") / "images.npz")


@pytest.fixture(scope="module")
def finished(images, tmp_path_factory):
    """The folder of a finished run of one model, for reading only."""
    out = tmp_path_factory.mktemp("finished") / "new" / "run"
    assert runs.train(images, out, "--epsilon", "2", epochs=3) == 0
    return out


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

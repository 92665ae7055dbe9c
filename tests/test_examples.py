"""Every tutorial runs to its last assert, and every example whose library is here."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS, EXAMPLES = (
    sorted((ROOT / folder).glob("*.py")) for folder in ("tutorials", "examples")
)


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@each(TUTORIALS)
def test_a_tutorial_is_short(path):
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sphinx_gallery") is not None, reason="the site runs it")
@each(TUTORIALS)
def test_a_tutorial_runs(path):
    assert run("-W", "error", path)


def missing(path):
    """Name the packages that a script imports and that are not here."""
    names = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), flags=re.M))
    # What is imported by transformers alone, when its trainer is made.
    names |= {"accelerate"} if "transformers" in names else set()
    return sorted(name for name in names if find_spec(name) is None)


@pytest.mark.slow
@each(EXAMPLES)
def test_an_example_runs(path):
    if absent := missing(path):
        pytest.skip(f"not installed: {', '.join(absent)} (extra `examples`)")
    assert "with epsilon" in run(path)


def test_there_are_tutorials_and_an_example_for_each_library():
    assert TUTORIALS[0].stem.startswith("01_")
    assert len(EXAMPLES) == 3

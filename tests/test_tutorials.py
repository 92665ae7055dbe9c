"""Every tutorial runs to its last assert."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATHS = pytest.mark.parametrize(
    "path", sorted((ROOT / "tutorials").glob("*.py")), ids=lambda path: path.stem
)


@PATHS
def test_it_is_short(path):
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("sphinx_gallery") is not None,
    reason="test_site.py runs them",
)
@PATHS
def test_it_runs(path):
    done = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_tutorials():
    assert list((ROOT / "tutorials").glob("01_*.py"))

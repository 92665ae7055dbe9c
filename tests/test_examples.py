"""Every example runs to its last assert where what it shows is installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def missing(path):
    """Name the packages that a script imports and that are not here."""
    names = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), flags=re.M))
    # What is imported by transformers alone, when its trainer is made.
    names |= {"accelerate"} if "transformers" in names else set()
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path):
    if absent := missing(path):
        pytest.skip(f"not installed: {', '.join(absent)} (extra `examples`)")
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "with epsilon" in done.stdout


def test_there_is_one_for_each_library():
    assert len(EXAMPLES) == 3

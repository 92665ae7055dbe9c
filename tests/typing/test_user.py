"""What type checkers say of a user's script, given the wheel alone."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("user.py")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None,
    reason='pyright is not installed: pip install ".[dev]"',
)
def test_good_lines_have_no_error_and_each_wrong_one_has_one(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    text = SCRIPT.read_text()
    (tmp_path / "user.py").write_text(text)
    (tmp_path / "pyrightconfig.json").write_text('{"include": ["user.py"]}')
    command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    told: dict[int, str] = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        told.setdefault(each["range"]["start"]["line"] + 1, each["message"])
    lines = enumerate(text.splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("  # wrong")}
    assert {n: why for n, why in told.items() if n not in wrong} == {}
    assert wrong - told.keys() == set()

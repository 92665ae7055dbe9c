"""Errors that the tests must see, each planted in a copy of the package.

    python -m tests.golden.planted [ROOM ...]

`planted.json` has a line of the code, the line that replaces it, the error in words and
the tests that see it. A line that stands nowhere is "gone": plant its error again, by
hand, in the code of today.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ERRORS = Path(__file__).with_name("planted.json")


def place(error):
    """Return the file and the number of the line, or None: once is enough."""
    places = []
    for path in sorted((ROOT / "vgrad").rglob("*.py")):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for number, line in enumerate(lines):
            if line == error["old"]:
                exact = number and lines[number - 1] == error["before"]
                places.append((not exact, path.relative_to(ROOT), number))
    return min(places)[1:] if places else None


def plant(error, path, number):
    """Return the text of the file with the error in it."""
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = indent + error["new"] + "\n"
    return "".join(lines)


def outcome(error, copy):
    """Return "seen", "not seen" or "gone"."""
    where = place(error)
    if where is None or not all((ROOT / test).exists() for test in error["tests"]):
        return "gone"
    path, number = where
    (copy / path).write_text(plant(error, path, number))
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    # Bytecode is taken for current where size and second of its source are the same.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not large"]
    command = [sys.executable, "-m", "pytest", *arguments, *error["tests"]]
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=600
        )
        seen = run.returncode == 1
    except subprocess.TimeoutExpired:
        seen = True
    shutil.copy(ROOT / path, copy / path)
    return "seen" if seen else "not seen"


def main():
    errors = json.loads(ERRORS.read_text())
    rooms = sys.argv[1:] or sorted({error["room"] for error in errors})
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(
            ".venv*", ".git", "runs", "build", "__pycache__"
        )
        shutil.copytree(ROOT, copy, ignore=ignored)
        for error in errors:
            if error["room"] in rooms:
                outcomes.append(outcome(error, copy))
                if outcomes[-1] != "seen":
                    print(f"{outcomes[-1]}: {error['words']}", flush=True)
    seen, gone = outcomes.count("seen"), outcomes.count("gone")
    print(f"{seen} of {len(outcomes)} seen, {gone} gone")
    return seen != len(outcomes)


if __name__ == "__main__":
    sys.exit(main())

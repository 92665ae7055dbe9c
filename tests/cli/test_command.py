"""The command `vgrad`: help, the version and mistakes, all without torch."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vgrad_command
from tests.cli.runs import error, resume, train
from vgrad.cli import commands, models, report
from vgrad_command import COMMANDS, PRECISIONS

ROOT = Path(__file__).parents[2]

# Runs commands one after the other, and prints how each ended.
WITHOUT_TORCH = """
import contextlib, io, json, sys
import vgrad_command
ends = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = vgrad_command.main(argv)
        except SystemExit as leaving:
            status = leaving.code
    ends.append((status, out.getvalue(), err.getvalue()))
assert not {"torch", "numpy", "vgrad"} & set(sys.modules)
print(json.dumps(ends))
"""
HELPS = [["--help"], ["-h"], ["help"]]
HELPS += [[name, "--help"] for name in COMMANDS] + [["help", name] for name in COMMANDS]
MISTAKES = [
    ("trian", "COMMAND: invalid choice: 'trian' (choose from "),
    ("", "the following arguments are required: COMMAND. See vgrad --help."),
    ("evaluate a --zzz", "unrecognized arguments: --zzz. See vgrad"),
    ("train --out a --eps 1", "unrecognized arguments: --eps 1. See vgrad"),
    ("train --out", "--out: expected one argument. See vgrad train --help."),
    ("train", "one of the arguments --out --resume is required. See vgrad train"),
    ("train --out a --resume a", "not allowed with argument"),
]


@pytest.fixture(scope="module")
def answer():
    """Return status, output and errors of a command in a process without torch."""
    argvs = [*HELPS, *(text.split() for text, _ in MISTAKES), ["--version"]]
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(argvs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = dict(zip(map(tuple, argvs), json.loads(done.stdout), strict=True))
    return lambda *argv: ends[argv]


@pytest.mark.parametrize("argv", HELPS, ids=" ".join)
def test_help_needs_no_torch(argv, answer):
    status, out, err = answer(*argv)
    assert (status, err) == (0, "")
    named = [word for word in argv if word in COMMANDS]
    if named:
        assert out.startswith(f"usage: vgrad {named[0]} ")
    else:
        assert all(f"    {name}" in out for name in COMMANDS)
    if named == ["train"]:
        text = " ".join(out.split())
        assert "the only file meant for release" in text
        assert "from the private data without noise" in text


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_needs_no_torch(text, message, answer):
    status, out, err = answer(*text.split())
    assert (status, out) == (2, "")
    assert err.startswith("vgrad: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_version_is_told_without_torch(answer):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    status, out, err = answer("--version")
    assert (status, err) == (0, "")
    assert out.startswith(f"vgrad {project['version']}, torch ")
    assert out.endswith(f", Python {sys.version.split()[0]}\n")
    assert project["scripts"] == {"vgrad": "vgrad_command:main"}


WRONG = {
    "members": ["0", "-1", "2.5", "10001", "many", ""],
    "epsilon": ["0", "-1", "nan", "inf", "1e999", "much", ""],
    "delta": ["0", "1", "-1e-5", "2", "nan", "small"],
    "max_norm": ["0", "-1", "inf", "nan", "wide"],
    "noise": ["bands", "band-mf", "bisr:0", "blt:x", "independent:2", ""],
    "max_batch_size": ["0", "-1", "2.5", "all", ""],
    "epochs": ["0", "-3", "0.5", "1000001", "1e3", "all"],
    "batch_size": ["0", "-8", "7.5", "2147483648", "half"],
    "lr": ["0", "-1", "nan", "inf", "fast"],
    "precision": ["half", "float64", "Float32", ""],
    "compile": ["yes", "Inductor", ""],
    "seed": ["-1", "4294967296", "0.5", "today"],
}
"""Values that an option may not have."""


def test_names_that_stand_as_text_are_those_of_the_package():
    assert PRECISIONS == tuple(models.POLICIES)
    options = dataclasses.fields(vgrad_command.Options)
    ranged = {each.name for each in options if each.metadata["read"] not in (None, str)}
    assert ranged == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_a_value_outside_its_range_names_the_option_that_was_typed(name, capsys):
    option = f"--{name.replace('_', '-')}"
    for text in WRONG[name]:
        message = error(capsys, "train", "--out", "none", f"{option}={text}")
        assert message.startswith(f"vgrad: {option}: expected ")
        assert message.endswith(f", got {text!r}. See vgrad train --help.\n")
    assert not os.path.exists("none")


def test_an_interrupt_has_its_own_status(images, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for owner, name in ((report, "write_picture"), (commands, "run")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            assert train(images, tmp_path / name) == 130
        assert capsys.readouterr().err.startswith("vgrad: interrupted")
    assert resume(tmp_path / "write_picture") == 0


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    tmp_path, monkeypatch, capsys, package
):
    def missing(given):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("vgrad.cli.run.train", missing)
    message = error(capsys, "train", "--out", tmp_path / "run")
    assert 'pip install "vgrad[demo]"' in message
    monkeypatch.setitem(sys.modules, "vgrad.cli.commands", None)
    assert "import of vgrad.cli.commands" in error(capsys, "evaluate", "run")

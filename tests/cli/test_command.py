"""The command `vgrad`: help, the version and mistakes, answered without torch."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import vgrad_command
from bench.experiments import __main__ as experiments
from tests.cli.runs import arguments, error
from vgrad.__main__ import main
from vgrad.cli import commands, models
from vgrad_command import COMMANDS, EXPERIMENTS, KINDS, PRECISIONS, RATES

ROOT = Path(__file__).parents[2]

# Runs commands one after the other, and says for each how it ended.
WITHOUT_TORCH = """
import contextlib, io, json, sys
import vgrad_command
found = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = vgrad_command.main(argv)
        except SystemExit as leaving:
            status = leaving.code
    found.append((status, out.getvalue(), err.getvalue()))
assert not {"torch", "numpy", "vgrad"} & set(sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answer():
    """Return status, output and errors of a command in a process without torch."""
    asked = [*HELPS, *(argv for argv, _ in MISTAKES), [], ["--version"]]
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(zip(map(tuple, asked), json.loads(done.stdout), strict=True))
    return lambda argv: found[tuple(argv)]


HELPS = [["--help"], ["-h"], ["help"]]
HELPS += [[name, "--help"] for name in COMMANDS] + [["help", name] for name in COMMANDS]
MISTAKES = [
    (["trian"], "there is no command trian, but there is train. See vgrad --help."),
    (["help", "benhc"], "there is no command benhc, but there is bench. See vgrad"),
    (["zzz"], "there is no command zzz. See vgrad --help."),
    (["--verison"], "there is no option --verison, but there is --version. See vgrad"),
    (["-v"], "unrecognized arguments: -v. See vgrad --help."),
    (
        ["train", "--eps", "1"],
        "there is no option --eps, but there is --epsilon. See vgrad train --help.",
    ),
    (
        ["train", "--otu=runs"],
        "there is no option --otu, but there is --out. See vgrad",
    ),
    (["evaluate", "--zzz"], "there is no option --zzz. See vgrad evaluate --help."),
    (["train", "--out"], "--out: expected one argument. See vgrad train --help."),
    (["train"], "one of the arguments --out --resume is required. See vgrad train"),
    (["train", "--out", "a", "--resume", "a"], "not allowed with argument"),
    (
        ["train", "--out", "a", "b"],
        "unrecognized arguments: b. See vgrad train --help.",
    ),
    (["experiment"], "the following arguments are required: NAME. See vgrad exp"),
    (["experiment", "privat"], "NAME: expected one of per-sample, ensembles, jmp, mob"),
    (["experiment", "jmp", "speed"], "private, all, got 'speed'. See vgrad exp"),
]


@pytest.mark.parametrize("argv", HELPS, ids=" ".join)
def test_help_needs_no_torch(argv, answer):
    status, out, err = answer(argv)
    assert (status, err) == (0, "")
    named = [word for word in argv if word in COMMANDS and word != "help"]
    if named:
        assert out.startswith(f"usage: vgrad {named[0]} ")
    elif argv == ["help", "--help"] or argv == ["help", "help"]:
        assert out.startswith("usage: vgrad help [-h] [COMMAND]")
    else:
        assert all(f"    {name}" in out for name in COMMANDS)
    if named == ["train"]:
        text = " ".join(out.split())
        assert "the only file meant for release" in text
        assert "from the private data without noise" in text


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_needs_no_torch(argv, message, answer):
    status, out, err = answer(argv)
    assert (status, out) == (2, "")
    assert err.startswith("vgrad: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_command_has_to_be_given(answer):
    status, out, err = answer([])
    assert (status, out) == (2, "")
    assert all(f"    {name}" in err for name in COMMANDS)


def test_the_version_is_that_of_the_package(answer):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    status, out, err = answer(["--version"])
    assert (status, err) == (0, "")
    assert out.startswith(f"vgrad {project['version']}, torch ")
    assert out.endswith(f", Python {sys.version.split()[0]}\n")
    assert project["scripts"] == {"vgrad": "vgrad_command:main"}


def test_a_checkout_that_is_not_installed_has_a_version_too(monkeypatch, capsys):
    def none(name):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("vgrad, not installed, torch, not inst")


def test_names_that_stand_as_text_are_those_of_the_package():
    assert PRECISIONS == tuple(models.POLICIES)
    assert set(RATES) == {*models.MODELS, "a factory"}
    assert EXPERIMENTS == (*experiments.NAMES, "all")
    texts = {each.name: each.metadata["help"] for each in OPTIONS}
    assert texts["model"].startswith(f"{', '.join(models.MODELS)}, or module:factory")


OPTIONS = dataclasses.fields(vgrad_command.Options)
WRONG = {
    "members": ["0", "-1", "2.5", "10001", "many", ""],
    "epsilon": ["0", "-1", "nan", "inf", "1e999", "much", ""],
    "delta": ["0", "1", "-1e-5", "2", "nan", "small"],
    "max_norm": ["0", "-1", "inf", "nan", "1e-31", "1e31", "wide"],
    "epochs": ["0", "-3", "0.5", "1000001", "1e3", "all"],
    "batch_size": ["0", "-8", "7.5", "2147483648", "half"],
    "lr": ["0", "-1", "nan", "inf", "fast"],
    "precision": ["half", "float64", "Float32", ""],
    "compile": ["yes", "Inductor", ""],
    "seed": ["-1", "4294967296", "0.5", "today"],
}
"""Values that an option may not have."""

BEST = {"delta": "5e-324", "max_norm": "1e29", "seed": "4294967295", "members": "10000"}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_outside_its_range_names_the_option_that_was_typed(name, capsys):
    option = f"--{name.replace('_', '-')}"
    for text in WRONG[name]:
        message = error(capsys, "train", "--out", "none", f"{option}={text}")
        assert message == (
            f"vgrad: {option}: expected {KINDS[name].words}, got {text!r}. See vgrad "
            f"train --help.\n"
        )
    assert not os.path.exists("none")


def test_every_option_that_has_a_range_has_wrong_values():
    ranged = {n for n, k in KINDS.items() if k is not vgrad_command.TEXT}
    assert ranged - {"without_privacy", "reproducible_noise"} == set(WRONG)


def test_what_is_inside_the_range_is_read(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "run", lambda name, given: seen.append(given))
    more = [f"--{name.replace('_', '-')}={text}" for name, text in BEST.items()]
    main(["train", "--out", "none", *more])
    assert {name: vars(seen[0])[name] for name in BEST} == {
        **{"delta": 5e-324, "max_norm": 1e29, "seed": 2**32 - 1, "members": 10**4}
    }
    assert not {"epsilon", "lr"} & vars(seen[0]).keys()


LATER = {
    "a device to evaluate on": (
        ["evaluate", "{run}", "--device", "teapot"],
        "--device",
    ),
    "data to evaluate": (["evaluate", "{run}", "--data", "none.npz"], "--data"),
    "a model to evaluate": (
        ["evaluate", "{run}", "--model", "cnn"],
        "expected the mod",
    ),
    "a folder to evaluate": (["evaluate", ""], "evaluate '': expected the name"),
    "a file of figures": (
        ["bench", "clipped", "--out", "no/a.json"],
        "--out no/a.json",
    ),
    "a device": (["experiment", "jmp", "--device", "teapot"], "--device teapot"),
    "a folder of figures": (["experiment", "jmp", "--out", "{data}"], "--out "),
    "a large batch": (["train", "--batch-size", "49"], "--batch-size 49: expected at"),
    "a budget of nothing": (
        ["train", "--delta", "1e-320", "--epsilon", "1.5"],
        "--epsilon 1.5 --delta 1e-320: expected a budget that some noise multiplier",
    ),
    "a delta beyond all use": (
        ["train", "--delta", "0.999", "--epochs", "1", "--batch-size", "8"],
        "--epsilon 3.0 --delta 0.999: expected delta below",
    ),
    "extending nothing": (["train", "--extend"], "--extend: expected --resume DIR and"),
}


@pytest.mark.filterwarnings("ignore:Plan.delta")
@pytest.mark.parametrize("name", LATER)
def test_a_value_that_does_not_fit_names_the_option_too(
    name, images, finished, tmp_path, capsys
):
    argv, message = LATER[name]
    argv = [word.format(run=finished, data=images) for word in argv]
    if argv[0] == "train":
        own, out = ["--epsilon", "3"], tmp_path / "run"
        argv = ["train", "--out", out, *arguments(images, *own, epochs=1), *argv[1:]]
    found = error(capsys, *argv)
    assert message in found
    assert "(" not in found.partition(": expected")[0]
    assert not (tmp_path / "run").exists()


def test_warnings_are_lines_without_source_and_come_once(monkeypatch, capsys):
    def run(name, given):
        for text in ("one\n thing", "one\n thing", "another\x1b"):
            shown = warnings.formatwarning(text, UserWarning, "plan.py", 3, "source")
            sys.stderr.write(shown)
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr(commands, "run", run)
    assert main(["bench"]) == 0
    assert capsys.readouterr().err == (
        "vgrad: warning: one thing\nvgrad: warning: another\\x1b\n"
    )
    assert warnings.formatwarning is before


@pytest.mark.slow
def test_a_large_delta_is_warned_of_in_one_line(images, tmp_path):
    more = ["--out", tmp_path / "run", *arguments(images, "--delta", "0.2", epochs=1)]
    command = [sys.executable, "-m", "vgrad", "train", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("vgrad: warning: Plan(delta=0.2): expected at most 1")


def test_an_interrupt_while_torch_is_imported_is_one_line(monkeypatch, capsys):
    def run(name, given):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run", run)
    assert main(["bench"]) == 130
    assert capsys.readouterr().err.startswith("vgrad: interrupted")


def test_a_package_that_torch_lacks_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vgrad.cli.commands", None)
    assert main(["bench"]) == 2
    assert capsys.readouterr().err.startswith("vgrad: import of vgrad.cli.commands")

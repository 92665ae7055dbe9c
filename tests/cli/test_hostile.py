"""Folders that are not as a run left them: no code, no other file, one line of error.

A forger can seal a changed file, so these files are sealed rightly.
"""

import json
import os
import re
import shutil
import sys

import pytest
import torch

import vgrad.cli
from tests import oracle
from tests.cli.runs import error, forge, net, refuse, resume, said
from vgrad import files
from vgrad.__main__ import main
from vgrad.cli import checkpoint, report


def unfinished(*kinds):
    """Make a fixture: a copy of a run that still has to draw its pictures."""

    @pytest.fixture(params=kinds)
    def run(request, copied):
        out = copied(request.param)
        for name in (*report.PICTURES, report.PAGE):
            (out / name).unlink(missing_ok=True)
        return out

    return run


either, one, three = unfinished("one", "plain"), unfinished("one"), unfinished("plain")


def forge_model(folder, **changed):
    """Change entries of the model, or of the text of the ensemble."""
    if (folder / "ensemble.json").exists():
        text = json.dumps(said(folder, "ensemble.json") | changed)
        (folder / "ensemble.json").write_text(text)
        return
    path = folder / "model.safetensors"
    tensors, description = files.read_tensors(path, "model")
    files.write_tensors(path, tensors, description | changed)


def test_nothing_is_cut_before_all_is_checked(one, capsys):
    with (one / "metrics.jsonl").open("a") as file:
        file.write("of a lost step")
    (one / "plain.jsonl").write_bytes((one / "plain.jsonl").read_bytes()[:-1])
    refuse(capsys, one, "bytes of the saved state")


@pytest.mark.parametrize(
    "name", ["state.json", ".state.json.partial", "curves.png", "report.html"]
)
def test_no_link_is_followed(one, tmp_path, name):
    (one / name).unlink(missing_ok=True)
    os.symlink(tmp_path / "victim", one / name)
    assert resume(one) == 0
    assert not (tmp_path / "victim").exists()
    assert not (one / name).is_symlink()


@pytest.fixture
def evil(tmp_path, module):
    code = 'import pathlib\npathlib.Path(__file__).with_name("sprung").touch()\n'
    layers = "torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, classes)"
    module("evil", code + net(layers))
    return tmp_path / "sprung"


def test_no_model_chooses_the_code_that_runs(either, images, capsys, evil):
    forge_model(either, model="evil:make")
    judge = ["evaluate", either, "--data", images]
    other = "expected the model 'math:sqrt', got 'evil:make'"
    assert "name it: with --model" in error(capsys, *judge)
    assert other in error(capsys, *judge, "--model", "math:sqrt")
    with pytest.raises(ValueError, match="a file may not choose the code that runs"):
        vgrad.cli.load(either)
    with pytest.raises(ValueError, match=other):
        vgrad.cli.load(either, model="math:sqrt")
    assert not evil.exists()
    assert "evil" not in sys.modules
    vgrad.cli.load(either, model="evil:make")
    assert evil.exists()
    assert main([*map(str, judge), "--model", "evil:make"]) == 0


def test_no_state_chooses_the_code_that_runs(either, capsys, evil):
    forge(either, given(model="evil:make"))
    command = ["train", "--resume", either]
    assert "name it: with --model" in error(capsys, *command)
    message = error(capsys, *command, "--model", "mlp")
    assert "expected --model evil:make, which the run was started with" in message
    assert not evil.exists()
    # Named again, it is imported, and is not the model that the run was started with.
    assert "source_sha256" in error(capsys, *command, "--model", "evil:make")
    assert evil.exists()


def test_an_ensemble_and_its_members_are_loaded_from_their_folder(three, finished):
    fmodel, params, buffers = vgrad.cli.load(three)
    state, _ = checkpoint.read_state(three)
    assert not fmodel.training
    assert buffers == {}
    for name, value in params.items():
        assert value.is_leaf
        assert value.requires_grad
        oracle.assert_exact(value, state[f".plain.params['{name}']"], 0)
    x = torch.randn(5, 1, 1, 6)
    scores = vgrad.ensemble_forward(fmodel)(params, buffers, x)
    for i in range(3):
        model = vgrad.cli.load(three, member=i)
        assert not model.training
        assert all(value.requires_grad for value in model.parameters())
        oracle.assert_exact(model(x), scores[i], 1e-6)
    single = finished("one")[0]
    for folder, member, message in (
        *((three, member, "a whole number >= 0") for member in (-1, True, 1.0, "0")),
        (three, 3, "expected a file with member 3, got 3 mem"),
        (single, 0, "which holds one model. Leave member out."),
        (three / "none", 0, "got no file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            vgrad.cli.load(folder, member=member)


def test_a_folder_of_two_runs_is_no_guess(one, finished, images, capsys):
    for name in ("ensemble.json", "ensemble.safetensors"):
        shutil.copy(finished("three")[0] / name, one / name)
    with pytest.raises(ValueError, match=r"one run, got model\.safetensors and ens"):
        vgrad.cli.load(one)
    message = error(capsys, "evaluate", one, "--data", images)
    assert "expected the folder of one run" in message


def shape(**changed):
    sizes = {"channels": 1, "height": 1, "width": 6, "classes": 3}
    return {"shape": {**sizes, **changed}}


COUNTS = [2**62, 0, -3, True, 3.0, "3", None, [3]]
SIZES = "a factory module:name that takes channels, height, width and classes, got "
WRONG = [
    ({"model": 3}, "expected text in 'model', got 3"),
    ({"model": "cnn"}, "expected at least 2 x 2 pixels"),
    ({"shape": None}, "expected a dictionary in 'shape'"),
    ({"shape": {"height": 1}}, "in 'channels', got no such entry"),
    *(
        (shape(classes=count), "a whole number from 1 to 65536 in 'classes'")
        for count in [*COUNTS, 2**31 - 4, 1e300]
    ),
    (shape(height=2**40), f"{SIZES}RuntimeError: "),  # no such memory
    (shape(width=2**58), f"{SIZES}RuntimeError: "),
    (shape(channels=2**62), f"{SIZES}TypeError: "),
    ({"seed": -1}, "in 'seed', got -1"),
    ({"seed": 2**32}, "in 'seed', got 4294967296"),
    ({"seed": None}, "in 'seed', got None"),
    ({"precision": "int8"}, "expected one of float32, bfloat16, float16, or null"),
    ({"precision": ["float32"]}, "in 'precision'"),
    ({"plan": 3}, "expected a dictionary, or null in 'plan', got 3"),
    ({"epsilon": "1"}, "in 'epsilon', got '1'"),
    ({"epsilon": -1.0}, "in 'epsilon', got -1.0"),
    ({"epsilon": 10**400}, "in 'epsilon', got a int"),
    ({"plan": {}, "delta": None}, "in 'delta', got None"),
    ({"plan": {}, "delta": 2}, "expected a finite number from 0 to 1 in 'delta'"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_a_description_that_cannot_be_is_refused(
    either, images, capsys, changed, message
):
    forge_model(either, **changed)
    assert message in error(capsys, "evaluate", either, "--data", images)
    if {"model", "shape"} & changed.keys():
        with pytest.raises(ValueError, match=re.escape(message)):
            vgrad.cli.load(either)


@pytest.mark.parametrize("count", [*COUNTS, 10**9, -1])
def test_an_ensemble_of_any_number_of_members_is_refused(three, count):
    forge_model(three, members=count)
    message = "expected (a whole number|[0-9]+ members)|in 'members'"
    if count == 3.0:
        message = "in 'members', got 3.0"
    with pytest.raises(ValueError, match=message):
        vgrad.cli.load(three)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"members": NaN}', "\xff\xfe", "3"])
def test_a_text_that_is_no_description_is_refused(three, images, capsys, text):
    (three / "ensemble.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"ensemble\.json: expected"):
        vgrad.cli.load(three)
    error(capsys, "evaluate", three, "--data", images)


def test_a_message_is_one_short_line_whatever_is_in_a_file(one, images, capsys):
    forge_model(one, model="\x1b[31m\n\ud83d\ude00" + "x" * 10_000)
    message = error(capsys, "evaluate", one, "--data", images)
    assert message[:-1].isprintable()
    assert len(message) < 2100


def given(**changed):
    return lambda description: description["arguments"].update(changed)


def told(**changed):
    return lambda description: description.update(changed)


def length(value):
    return lambda description: description["lengths"].update({"plain.jsonl": value})


def without(section, name):
    return lambda description: (description[section] if section else description).pop(
        name
    )


RATE = "expected a finite number above 0 in 'lr'"
MEMBERS = "expected a whole number from 1 to 10000 in 'members'"
FORGED = [
    (without("", "arguments"), "in 'arguments', got no such"),
    (told(arguments=[1]), "expected a dictionary in 'arguments'"),
    (given(evil=1), "belongs to another version"),
    (given(members=10**9), MEMBERS),
    (given(members=-1), MEMBERS),
    (given(epochs=10**9), "from 1 to 1000000 in 'epochs'"),
    (given(lr="fast"), RATE),
    (given(lr=10**400), RATE),
    (given(lr=-(10**400)), RATE),
    (given(reproducible_noise=0), "expected true or false in 'reproducible_noise'"),
    (given(seed=True), "in 'seed', got True"),
    (given(data=["a"]), "text in 'data'"),
    (told(plan=None), "in 'plan', got None"),
    (told(forms=[]), "in 'forms', got []"),
    (told(step=-4), "in 'step', got -4"),
    (told(step=4), "got some after [8]"),
    (told(lengths=[0]), "in 'lengths', got [0]"),
    (without("lengths", "plain.jsonl"), "in 'plain.jsonl', got no such entry"),
    *((length(n), "'plain.jsonl', got") for n in (-1, True, 1.0, "1", None, 2**63)),
    (length(2**62), "bytes of the saved state, got"),
    (length(0), "expected one line for each of 2 epochs"),
    (length(9), "line 1: expected JSON"),
]


@pytest.mark.parametrize(("change", "message"), FORGED)
def test_a_state_that_cannot_be_changes_nothing(either, capsys, change, message):
    forge(either, change)
    refuse(capsys, either, message)


MEMBER = ".private.members[1]"
TENSORS = [
    *(
        ("one", {f"{run}.step": torch.tensor(step)}, "after the 8 steps that it claims")
        for run in (".private", ".plain")
        for step in (-(2**62), 0, 4, 9)
    ),
    ("three", {f"{MEMBER}.step": torch.tensor(4)}, "got some after [4, 8]"),
    (
        *("one", {".private.plan_digest": torch.ones(32, dtype=torch.uint8)}),
        "expected a state whose private steps were taken",
    ),
    ("one", {".private.plan_digest": torch.ones(3)}, "expected shape (32,)"),
    ("one", {"other": torch.ones(3)}, "got unexpected: 'other'"),
]


@pytest.mark.parametrize(("kind", "tensors", "message"), TENSORS)
def test_tensors_that_cannot_be_change_nothing(copied, capsys, kind, tensors, message):
    out = copied(kind)
    forge(out, tensors=tensors)
    refuse(capsys, out, message)


FIGURES = '{"step": 8, "test_accuracy": 0.5, "samples_per_second": '


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 200, "line 2: expected JSON"),
        ("[]", "line 2: expected a dictionary of step, loss"),
        ('{"step": 8}', "line 2: expected a finite number from 0 to 1 in 'test_acc"),
        (FIGURES + "1e999}", "in 'samples_per_second'"),
        (FIGURES.replace("8", "7") + "1}", "expected one line for each of 2 epochs"),
        (
            FIGURES + '1, "member_accuracies": [0.5, "x"]}',
            "a list, each a finite number from 0 to 1, or null in 'member_acc",
        ),
    ],
)
def test_figures_that_are_none_are_refused(either, capsys, line, message):
    path = either / "plain.jsonl"
    first = path.read_text().splitlines()[0]
    path.write_text(f"{first}\n{line}\n")
    forge(either, length(path.stat().st_size))
    refuse(capsys, either, message)

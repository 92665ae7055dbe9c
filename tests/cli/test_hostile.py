"""Files that anybody may have written: no code, no other file, no memory, no traceback.

A forger can seal what he changed, so these files are sealed rightly.
"""

import contextlib
import copy
import json
import os
import random
import shutil
import stat
import sys

import pytest
import torch

import vgrad.cli
from tests import oracle
from tests.cli.runs import (
    PICTURES,
    PLAIN,
    THREE,
    WRITE,
    arguments,
    contents,
    error,
    interrupted,
    lines,
    net,
    resume,
    said,
    status,
    train,
)
from vgrad import files
from vgrad.__main__ import main
from vgrad.cli import checkpoint, models, report

OWN = {"metrics.jsonl", "plain.jsonl", "state.json", "state.safetensors"}
OWN |= {"curves.png", "report.html"}


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Two runs that still have to draw their curves, of one model and of three."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in (("one", []), ("three", [*THREE, PLAIN])):
        interrupted(images, folder / name, *more, where=PICTURES)
    return folder


def copied(*names):
    """Make a fixture: a copy of one of the runs."""

    @pytest.fixture(params=names)
    def copy_of(request, runs, tmp_path):
        return shutil.copytree(runs / request.param, tmp_path / "run")

    return copy_of


either, one, three = copied("one", "three"), copied("one"), copied("three")


def forge(folder, change, tensors=None):
    """Change what the state says, and seal it."""
    held, description = checkpoint.read_state(folder)
    change(description)
    values = {**held, **(tensors or {})}
    files.write_tensors(folder / "state.safetensors", values, description)


def forge_model(folder, **changed):
    """Change what the model, or the text of the ensemble, says."""
    if (folder / "ensemble.json").exists():
        told = said(folder, "ensemble.json") | changed
        (folder / "ensemble.json").write_text(json.dumps(told))
        return
    path = folder / "model.safetensors"
    tensors, told = files.read_tensors(path, "model")
    files.write_tensors(path, tensors, told | changed)


# Other files.


@pytest.mark.parametrize("name", ["../victim", "{}/victim", "notes", "state.json"])
def test_a_state_can_name_no_file_to_be_cut(either, tmp_path, capsys, name):
    name = name.format(tmp_path)
    for victim in (tmp_path / "victim", either / "notes"):
        victim.write_text("mine")
    forge(either, lambda told: told["lengths"].update({name: 0}))
    before = contents(either)
    message = error(capsys, "train", "--resume", either)
    assert f"got '{name}', which no run writes to" in message
    assert contents(either) == before
    assert (tmp_path / "victim").read_text() == "mine"


def test_nothing_is_cut_before_all_is_checked(one, capsys):
    with (one / "metrics.jsonl").open("a") as file:
        file.write("of a lost step")
    (one / "plain.jsonl").write_bytes((one / "plain.jsonl").read_bytes()[:-1])
    (one / "metrics.jsonl").chmod(0o640)
    before = contents(one)
    assert "bytes of the saved state" in error(capsys, "train", "--resume", one)
    assert contents(one) == before
    assert stat.S_IMODE((one / "metrics.jsonl").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "plain.jsonl"])
def test_figures_are_written_to_a_file_of_the_folder(one, tmp_path, capsys, name, kind):
    victim = tmp_path / "victim"
    if kind == "link":
        shutil.copy(one / name, victim)
    before = victim.read_bytes() if victim.exists() else None
    (one / name).unlink()
    os.mkfifo(one / name) if kind == "pipe" else os.symlink(victim, one / name)
    assert name in error(capsys, "train", "--resume", one)
    assert (victim.read_bytes() if victim.exists() else None) == before


@pytest.mark.parametrize(
    "name", ["state.json", ".state.json.partial", "curves.png", "report.html"]
)
def test_no_link_is_followed(one, tmp_path, name):
    victim = tmp_path / "victim"
    (one / name).unlink(missing_ok=True)
    os.symlink(victim, one / name)
    assert resume(one) == 0
    assert not victim.exists()
    assert not (one / name).is_symlink()


@pytest.mark.parametrize("name", sorted(OWN | {"model.safetensors"}))
def test_a_dangling_link_is_a_part_of_a_run_too(images, tmp_path, capsys, name):
    out = tmp_path / "run"
    out.mkdir()
    os.symlink(tmp_path / "victim", out / name)
    command = ["train", "--out", out, *arguments(images)]
    assert f"got one with {name}" in error(capsys, *command)
    assert os.listdir(out) == [name]
    assert not (tmp_path / "victim").exists()


@pytest.mark.slow
def test_only_what_is_for_release_can_be_read_by_others(images, tmp_path, monkeypatch):
    # So that figures are private from the first byte, and not from a later change.
    monkeypatch.setattr(os, "fchmod", lambda *given: None)
    monkeypatch.setattr(report, "write_picture", WRITE)
    before = os.umask(0)
    try:
        assert train(images, tmp_path / "one") == 0
        last = (report, "write_page")
        interrupted(images, tmp_path / "three", *THREE, where=last)
    finally:
        os.umask(before)
    released = {"ensemble.json", "ensemble.safetensors", "model.safetensors"}
    for name in ("one", "three"):
        found = private(tmp_path / name)
        assert found == set(os.listdir(tmp_path / name)) - released
    assert private(tmp_path / "one") == OWN


def private(folder):
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    return {name for name, mode in modes.items() if mode == 0o600}


def test_what_others_could_read_becomes_private_when_the_run_goes_on(one):
    for path in one.iterdir():
        path.chmod(0o644)
    assert resume(one) == 0
    assert private(one) == OWN


# Code.

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("sprung").touch()
"""
EVIL += net("torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, classes)")


@pytest.fixture
def evil(tmp_path, module):
    module("evil", EVIL)
    return tmp_path / "sprung"


def test_no_model_chooses_the_code_that_runs(either, images, capsys, evil):
    forge_model(either, model="evil:make")
    judge = ["evaluate", either, "--data", images]
    assert "name it: with --model" in error(capsys, *judge)
    with pytest.raises(ValueError, match="a file may not choose the code that runs"):
        vgrad.cli.load(either)
    other = "expected the model 'math:sqrt', got 'evil:make'"
    assert other in error(capsys, *judge, "--model", "math:sqrt")
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


def test_a_net_of_this_package_may_be_named_again(one, images, capsys):
    assert isinstance(vgrad.cli.load(one, model="mlp"), torch.nn.Module)
    with pytest.raises(ValueError, match="expected the model 'cnn', got 'mlp'"):
        vgrad.cli.load(one, model="cnn")
    assert main(["evaluate", str(one), "--data", str(images), "--model", "mlp"]) == 0


def test_the_path_is_that_of_the_user_unless_a_factory_is_named(one, monkeypatch):
    paths = []

    def mlp(**sizes):
        paths.append(list(sys.path))
        return models.mlp(**sizes)

    monkeypatch.setitem(models.MODELS, "mlp", mlp)
    vgrad.cli.load(one)
    assert paths == [sys.path]


# Ensembles.


def test_an_ensemble_is_loaded_from_its_folder(three):
    fmodel, params, buffers = vgrad.cli.load(three)
    state, _ = checkpoint.read_state(three)
    assert not fmodel.training
    assert buffers == {}
    for name, value in params.items():
        assert value.is_leaf
        assert value.requires_grad
        oracle.assert_exact(value, state[f".plain.params['{name}']"], 0)
    scores = vgrad.ensemble_forward(fmodel)(params, buffers, torch.zeros(5, 1, 1, 6))
    assert scores.shape == (3, 5, 3)


def test_a_member_is_loaded_alone_as_a_module(three, runs):
    x = torch.randn(5, 1, 1, 6, generator=torch.Generator().manual_seed(0))
    fmodel, params, buffers = vgrad.cli.load(three)
    scores = vgrad.ensemble_forward(fmodel)(params, buffers, x)
    for i in range(3):
        model = vgrad.cli.load(three, member=i)
        assert not model.training
        assert all(value.requires_grad for value in model.parameters())
        oracle.assert_exact(model(x), scores[i], 1e-6)
    for member in (-1, True, 1.0, "0"):
        with pytest.raises(ValueError, match="expected a whole number >= 0"):
            vgrad.cli.load(three, member=member)
    with pytest.raises(ValueError, match="expected a file with member 3, got 3 mem"):
        vgrad.cli.load(three, member=3)
    with pytest.raises(ValueError, match="which holds one model. Leave member out."):
        vgrad.cli.load(runs / "one", member=0)
    with pytest.raises(FileNotFoundError, match="got no file"):
        vgrad.cli.load(three / "none", member=0)


def test_a_folder_of_two_runs_is_no_guess(one, three_too, images, capsys):
    with pytest.raises(ValueError, match=r"one run, got model\.safetensors and ens"):
        vgrad.cli.load(one)
    message = error(capsys, "evaluate", one, "--data", images)
    assert "expected the folder of one run" in message


@pytest.fixture
def three_too(one, runs):
    for name in ("ensemble.json", "ensemble.safetensors"):
        shutil.copy(runs / "three" / name, one / name)


# Descriptions.

WRONG = {
    "a model that is a number": ({"model": 3}, "expected text in 'model', got 3"),
    "no shape": ({"shape": None}, "expected a dictionary in 'shape'"),
    "half a shape": ({"shape": {"height": 1}}, "in 'channels', got no such entry"),
    **{
        f"{size} classes": (
            {"shape": {"channels": 1, "height": 1, "width": 6, "classes": size}},
            "expected a whole number from 1 to 65536 in 'classes'",
        )
        for size in (2**62, 2**31 - 4, 0, -3, True, 3.0, "3", None, [3], float("1e300"))
    },
    "a large image": (
        {"shape": {"channels": 2**20, "height": 2**20, "width": 1, "classes": 3}},
        "expected images of at most 2147483648 numbers",
    ),
    "a large model": (
        {"shape": {"channels": 2**15, "height": 2**8, "width": 1, "classes": 3}},
        r"expected images and classes for which it has at most 536870912 parameters",
    ),
    "a larger model than that of the file": (
        {"shape": {"channels": 100, "height": 100, "width": 100, "classes": 3}},
        r"expected shape .*1000000\)",
    ),
    "a small image": (
        {"model": "cnn"},
        "expected at least 2 x 2 pixels",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_says_what_cannot_be_is_refused(
    either, images, monkeypatch, capsys, name
):
    changed, message = WRONG[name]
    forge_model(either, **changed)

    def build(*given, **more):
        raise AssertionError("something was made of what the file says")

    monkeypatch.setattr(models, "build", build)
    with pytest.raises(ValueError, match=message):
        vgrad.cli.load(either)
    assert "vgrad: " in error(capsys, "evaluate", either, "--data", images)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
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
    ],
)
def test_evaluate_believes_nothing_that_cannot_be(
    either, images, capsys, changed, message
):
    forge_model(either, **changed)
    assert message in error(capsys, "evaluate", either, "--data", images)


@pytest.mark.parametrize("count", [10**9, 2**62, 0, -1, True, 3.0, "3", None, [3]])
def test_an_ensemble_of_any_number_of_members_is_refused(three, count):
    forge_model(three, members=count)
    with pytest.raises(
        ValueError, match="expected (a whole number|10000)|in 'members'"
    ):
        vgrad.cli.load(three)


DEEP = "[" * 100_000
TEXTS = [DEEP, '{"members": ' + DEEP, '{"members": NaN}', "\xff\xfe", "", "3"]
TEXTS += ['{"members": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_no_description_is_refused(three, images, capsys, text):
    (three / "ensemble.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"ensemble\.json: expected"):
        vgrad.cli.load(three)
    error(capsys, "evaluate", three, "--data", images)


def test_a_text_that_has_no_end_is_refused(three, images, capsys):
    path = three / "ensemble.json"
    os.truncate(path, 2**40)
    with pytest.raises(ValueError, match="got a damaged file"):
        vgrad.cli.load(three)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileNotFoundError, match=r"ensemble\.json: .*, got no file"):
        vgrad.cli.load(three)
    assert "got no file" in error(capsys, "evaluate", three, "--data", images)


def test_a_message_is_one_short_line_whatever_a_file_says(one, images, capsys):
    forge_model(one, model="\x1b[31m\n\ud83d\ude00" + "x" * 10_000)
    message = error(capsys, "evaluate", one, "--data", images)
    assert message[:-1].isprintable()
    assert len(message) < 2100


# States.


def given(**changed):
    return lambda told: told["arguments"].update(changed)


def told(**changed):
    return lambda told: told.update(changed)


def length(value):
    return lambda told: told["lengths"].update({"plain.jsonl": value})


RATE = "expected a finite number above 0 in 'lr'"
MEMBERS = "expected a whole number from 1 to 10000 in 'members'"
FORGED = {
    "no arguments": (lambda told: told.pop("arguments"), "in 'arguments', got no such"),
    "a list": (told(arguments=[1]), "expected a dictionary in 'arguments'"),
    "one too many": (given(evil=1), "belongs to another version"),
    "members": (given(members=10**9), MEMBERS),
    "fewer members": (given(members=-1), MEMBERS),
    "other members": (given(members=9_999), "expected 9999 members, got another numb"),
    "epochs": (given(epochs=10**9), "from 1 to 1000000 in 'epochs'"),
    "a rate that is text": (given(lr="fast"), RATE),
    "a large rate": (given(lr=10**400), RATE),
    "a negative rate": (given(lr=-(10**400)), RATE),
    "a flag that is a number": (
        given(reproducible_noise=0),
        "expected true or false in 'reproducible_noise'",
    ),
    "a seed that is true": (given(seed=True), "in 'seed', got True"),
    "data": (given(data=["a"]), "text in 'data'"),
    "a plan": (told(plan=None), "in 'plan', got None"),
    "forms": (told(forms=[]), "in 'forms', got []"),
    "negative steps": (told(step=-4), "in 'step', got -4"),
    "other steps": (told(step=4), "got some after [8]"),
    "lengths": (told(lengths=[0]), "in 'lengths', got [0]"),
    "no length": (
        lambda told: told["lengths"].pop("plain.jsonl"),
        "in 'plain.jsonl', got no such entry",
    ),
    **{
        f"length {value}": (length(value), "in 'plain.jsonl', got")
        for value in (-1, True, 1.0, "1", None, 2**63)
    },
    "a length too long": (length(2**62), "bytes of the saved state, got"),
    "a length of no line": (length(0), "expected one line for each of 2 epochs"),
    "half a line": (length(9), "line 1: expected JSON"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_state_that_says_what_cannot_be_changes_nothing(either, capsys, name):
    change, message = FORGED[name]
    forge(either, change)
    before = contents(either)
    assert message in error(capsys, "train", "--resume", either)
    assert contents(either) == before


@pytest.mark.parametrize("value", [-(2**62), 0, 4, 9])
@pytest.mark.parametrize("which", [".private", ".plain"])
def test_states_after_other_steps_are_refused(one, capsys, which, value):
    forge(one, told(), {f"{which}.step": torch.tensor(value)})
    assert "after the 8 steps that it claims, got some" in error(
        capsys, "train", "--resume", one
    )


def test_a_state_that_has_spent_under_another_plan_changes_nothing(one, capsys):
    forge(one, told(), {".private.plan_digest": torch.ones(32, dtype=torch.uint8)})
    before = contents(one)
    message = error(capsys, "train", "--resume", one)
    assert f"--resume {one}: expected a state whose private steps were taken" in message
    assert contents(one) == before


def test_a_state_that_does_not_say_its_plan_is_refused(one, capsys):
    held, description = checkpoint.read_state(one)
    held = {name: each for name, each in held.items() if "digest" not in name}
    files.write_tensors(one / "state.safetensors", held, description)
    assert "got missing: '.plain.plan_digest'" in error(
        capsys, "train", "--resume", one
    )


@pytest.mark.slow
def test_the_states_of_members_are_all_after_the_same_steps(images, tmp_path, capsys):
    out = tmp_path / "run"
    interrupted(images, out, "--members", "2")
    name = ".private.members[1].step"
    forge(out, told(), {name: torch.tensor(4)})
    assert "got some after [4, 8]" in error(capsys, "train", "--resume", out)


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
    assert message in error(capsys, "train", "--resume", either)


# Random changes.

ODD = [None, True, 0, -1, 1, 2**31 - 5, 2**62, 2**64, 1e308, 0.5, "", "mlp"]
ODD += ["os:system", "x" * 5000, "\x1b[0m\n", [], [[]], {}, {"a": 1}, "../x", "meta"]
ODD += ["float16", json.loads("[" * 300 + "]" * 300)]


def mutated(said, chance):
    """Change one entry at any depth."""
    said = copy.deepcopy(said)
    node = said
    while True:
        key = chance.choice(list(node))
        if not (isinstance(node[key], dict) and node[key]) or chance.random() < 0.2:
            break
        node = node[key]
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice(ODD)
    return said


@pytest.mark.parametrize("seed", range(40))
def test_any_change_of_a_model_is_refused_or_harmless(either, images, capsys, seed):
    chance, text = random.Random(seed), either / "ensemble.json"
    if text.exists() and seed % 2 == 0:
        text.write_text(json.dumps(mutated(json.loads(text.read_text()), chance)))
    else:
        kind = "ensemble" if text.exists() else "model"
        path = either / f"{kind}.safetensors"
        held, said = files.read_tensors(path, kind)
        files.write_tensors(path, held, mutated(said, chance))
    status(capsys, "evaluate", either, "--data", images)
    with contextlib.suppress(ValueError):
        vgrad.cli.load(either)


@pytest.mark.parametrize("seed", range(40))
def test_any_change_of_a_state_is_refused_or_harmless(either, capsys, seed):
    chance = random.Random(seed)

    def change(said):
        new = mutated(said, chance)
        said.clear()
        said.update(new)

    forge(either, change)
    before = contents(either)
    if status(capsys, "train", "--resume", either)[0]:
        assert contents(either) == before
    else:
        assert len(lines(either / "plain.jsonl")) == 2

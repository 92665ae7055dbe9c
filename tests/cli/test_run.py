"""The main job from end to end: what a run writes, survives and refuses."""

import fcntl
import io
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.cli.runs import (
    BATCH,
    FIXED,
    KEYS,
    PLAIN,
    SIZE,
    THREE,
    Killed,
    arguments,
    built,
    contents,
    error,
    held_out,
    interrupted,
    lines,
    net,
    results,
    resume,
    said,
    stop,
    train,
    watch_noise,
    write_data,
)
from vgrad import dp, files
from vgrad.__main__ import main
from vgrad.cli import checkpoint, data, models, report, settings

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def test_a_run_writes_what_it_promises(finished):
    names = {"curves.png", "report.html", "metrics.jsonl", "plain.jsonl"}
    names |= {"model.safetensors", "state.json", "state.safetensors"}
    assert set(os.listdir(finished)) == names
    for name in ("metrics.jsonl", "plain.jsonl"):
        records = lines(finished / name)
        assert [list(each) for each in records] == [KEYS] * 3
        assert [each["step"] for each in records] == [4, 8, 12]
    assert all(each["epsilon"] is None for each in lines(finished / "plain.jsonl"))
    for name in ("state.json", "state.safetensors"):
        assert stat.S_IMODE((finished / name).stat().st_mode) == 0o600


def test_epsilon_is_what_the_accountant_says_and_ends_at_the_target(finished):
    plan = said(finished)["plan"]
    run = {"sampling_rate": BATCH / SIZE, "delta": 1e-5}
    run |= {"noise_multiplier": plan["noise_multiplier"]}
    spent = [each["epsilon"] for each in lines(finished / "metrics.jsonl")]
    assert spent == [dp.epsilon(**run, steps=steps) for steps in (4, 8, 12)]
    assert 1.98 < spent[-1] <= 2
    *_, description = checkpoint.read_model(finished)
    assert description["epsilon"] == spent[-1]


def test_only_the_model_is_for_release(finished):
    path = finished / "model.safetensors"
    tensors, description = files.read_tensors(path, "model")
    assert tensors.keys() == checkpoint.load(finished).state_dict().keys()
    assert description.keys() == {
        *("kind", "model", "precision", "shape"),
        *("seed", "step", "epsilon", "delta", "plan"),
    }


def test_evaluate_counts_right_answers_of_the_model_on_held_out_data(
    images, finished, capsys
):
    assert main(["evaluate", str(finished), "--data", str(images)]) == 0
    model, (x, y) = checkpoint.load(finished), held_out(images)
    guesses = [int(model(x[row : row + 1]).argmax()) for row in range(30)]
    share = np.mean(np.array(guesses) == y)
    last = lines(finished / "metrics.jsonl")[-1]
    assert last["test_accuracy"] == pytest.approx(share)
    assert capsys.readouterr().out == (
        f"accuracy {100 * share:.2f} % on 30 held-out samples (epsilon "
        f"{last['epsilon']:.3f} at delta 1e-05)\n"
    )


def test_evaluate_refuses_data_that_the_model_was_not_made_for(
    finished, tmp_path, capsys
):
    wide = {"x_train": np.zeros((SIZE, 7)), "x_test": np.zeros((30, 7))}
    other = write_data(tmp_path / "wide.npz", **wide)
    message = error(capsys, "evaluate", finished, "--data", other)
    assert "expected images of 1 x 1 x 6 in 3 classes" in message
    more = write_data(tmp_path / "more.npz", classes=np.array(4))
    assert "in 4 classes" in error(capsys, "evaluate", finished, "--data", more)
    labels = {"y_train": np.arange(SIZE) % 2, "y_test": np.arange(30) % 2}
    fewer = write_data(tmp_path / "fewer.npz", **labels, classes=np.array(2))
    assert main(["evaluate", str(finished), "--data", str(fewer)]) == 0


def test_a_finished_run_stays_as_it_is_and_its_folder_is_taken(
    images, finished, tmp_path, capsys
):
    before = {path: (path.read_bytes(), path.stat()) for path in finished.iterdir()}
    assert resume(finished) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out
    command = ["train", "--out", finished, *arguments(images)]
    assert "expected a folder without a run" in error(capsys, *command)
    after = {path: (path.read_bytes(), path.stat()) for path in finished.iterdir()}
    assert after == before
    for name in (*checkpoint.FILES, "metrics.jsonl", *report.PICTURES, report.PAGE):
        other = tmp_path / f"only {name}"
        other.mkdir()
        (other / name).write_text("mine")
        command = ["train", "--out", other, *arguments(images)]
        assert f"got one with {name}" in error(capsys, *command)
        assert contents(other) == {name: b"mine"}


def test_the_noise_has_the_size_that_the_arguments_ask_for(
    images, tmp_path, monkeypatch
):
    # Where every batch is empty, noise is all that moves the parameters.
    empty = torch.zeros(0, dtype=torch.int64)
    monkeypatch.setattr(dp.Plan, "sample", lambda *args, **kwargs: empty)
    out = tmp_path / "run"
    assert train(images, out, "--max-norm", "0.25", epochs=4) == 0
    start, end = (
        torch.cat([value.flatten() for value in model.parameters()])
        for model in (built(images), checkpoint.load(out))
    )
    multiplier = said(out)["plan"]["noise_multiplier"]
    expected = 0.5 * multiplier * 0.25 / BATCH * math.sqrt(16)
    # 643 normal numbers: five standard errors are 14 %.
    assert (end - start).detach().std() == pytest.approx(expected, rel=0.14)
    assert [each["loss"] for each in lines(out / "metrics.jsonl")] == [None] * 4


KINDS = pytest.mark.parametrize(
    "kind",
    [pytest.param([], id="one"), pytest.param(THREE, id="three", marks=SLOW)],
)


@KINDS
def test_the_seed_fixes_the_start_and_never_the_noise(images, tmp_path, kind):
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert train(images, tmp_path / name, *kind, "--seed", seed) == 0
    a, b, c = (results(tmp_path / name) for name in "abc")
    assert a["plain.jsonl"] == b["plain.jsonl"] != c["plain.jsonl"]
    assert a["metrics.jsonl"] != b["metrics.jsonl"]
    released = "ensemble" if kind else "model"
    assert a[released] != b[released]
    keys = [name for name in a["state"][0] if ".private" in name and ".key" in name]
    assert len(keys) == (3 if kind else 1)
    assert all(a["state"][0][key] != b["state"][0][key] for key in keys)


@KINDS
def test_reproducible_noise_repeats_the_run_and_claims_nothing(
    images, tmp_path, capsys, kind
):
    for name, more in (("a", []), ("b", []), ("c", ["--seed", "1"])):
        assert train(images, tmp_path / name, *kind, FIXED, *more) == 0
    a, b, c = (results(tmp_path / name) for name in "abc")
    assert a == b
    assert a["metrics.jsonl"] != c["metrics.jsonl"]
    assert capsys.readouterr().out.count("epsilon of this run may not be claimed") == 6
    out = tmp_path / "a"
    told = said(out, "ensemble.json") if kind else checkpoint.read_model(out)[-1]
    assert told["epsilon"] is None
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    assert "no claim of privacy" in capsys.readouterr().out


@SLOW
@pytest.mark.parametrize(
    ("more", "every"),
    [([FIXED], 1), ([*THREE, FIXED], 4), ([*THREE, PLAIN], 4)],
    ids=["one", "three", "three, plain"],
)
def test_killed_at_any_write_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, monkeypatch, more, every
):
    more = [*more, "--batch-size", "24"]
    sync, calls = os.fsync, []

    def killing(descriptor):
        if len(calls) == moment:
            raise Killed
        calls.append(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", killing)
    moment = math.inf
    assert train(images, tmp_path / "whole", *more) == 0
    expected, writes = results(tmp_path / "whole"), len(calls)
    assert writes > 20
    for number in range(0, writes, every):
        calls.clear()
        moment = number
        out = tmp_path / f"killed{number}"
        with pytest.raises(Killed):
            train(images, out, *more)
        moment = math.inf
        # No model may come from steps that are lost and taken again.
        if (out / "model.safetensors").exists():
            model, state = checkpoint.read_model(out), checkpoint.read_state(out)
            assert model[-1]["step"] <= state[-1]["step"]
        if (out / "ensemble.safetensors").exists():
            step = checkpoint.read_state(out)[1]["step"]
            assert said(out, "ensemble.json")["step"] <= step
        if (out / "state.safetensors").exists():
            assert resume(out) == 0
        else:
            assert train(images, out, *more) == 0
        assert results(out) == expected


# A run that kills itself as it writes for the n-th time, wherever that is.
KILLED = """
import itertools, os, signal, sys
from vgrad.__main__ import main
sync, calls = os.fsync, itertools.count(1)
def killing(descriptor):
    sync(descriptor)
    if next(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killing
main(sys.argv[2:])
"""


@SLOW
def test_killed_by_a_signal_a_run_goes_on_with_the_same_numbers(images, tmp_path):
    more = arguments(images, FIXED, epochs=3)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", KILLED, "17", "train", "--out", str(out), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    assert 0 < len(lines(out / "metrics.jsonl")) < 3
    assert not (out / "report.html").exists()
    assert resume(out) == 0
    assert main(["train", "--out", str(whole), *more]) == 0
    assert results(out) == results(whole)


def test_noise_is_drawn_again_for_the_same_step_only(images, tmp_path, monkeypatch):
    seen = watch_noise(monkeypatch, killed_at=7)  # in the second of three epochs
    with pytest.raises(Killed):
        train(images, tmp_path / "run", epochs=3)
    before = seen[:7]
    assert resume(tmp_path / "run") == 0
    after = seen[7:]
    assert after[:3] == before[4:]
    assert len(set(before[:4] + after)) == len(before[:4] + after) == 12


def test_the_figures_of_lost_steps_are_cut_off(images, tmp_path):
    out = tmp_path / "run"
    assert train(images, out, FIXED) == 0
    expected = results(out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 0.1')
    (out / "report.html").unlink()
    assert resume(out) == 0
    assert results(out) == expected


def test_arguments_given_again_have_to_be_the_same(images, tmp_path, capsys):
    out = tmp_path / "run"
    interrupted(images, out)
    before = results(out)
    command = ["train", "--resume", out]
    assert "expected --lr 0.5, which" in error(capsys, *command, "--lr", "0.7")
    assert "--seed 0, which" in error(capsys, *command, "--seed", "1")
    assert "--reproducible-noise False" in error(capsys, *command, FIXED)
    assert "--members 1, which" in error(capsys, *command, "--members", "4")
    assert "--without-privacy False, which" in error(capsys, *command, PLAIN)
    for other in ("bfloat16", "float16"):
        message = error(capsys, *command, "--precision", other)
        told = f"which the run was started with, got {other}. Leave it out"
        assert f"expected --precision float32, {told}" in message
    assert results(out) == before
    assert resume(out, "--lr", "0.5", "--seed", "0", "--members", "1") == 0


def test_what_would_change_the_numbers_is_refused(tmp_path, monkeypatch, capsys):
    images, out = write_data(tmp_path / "images.npz"), tmp_path / "run"
    interrupted(images, out, "--precision", "bfloat16")
    before = results(out)
    for place, value, message in (
        ("torch.get_num_threads", lambda: 77, "threads (OMP_NUM_THREADS) in"),
        ("vgrad.cli.setup._MOST_ROWS", 5, "chunk_size in forms to be 512"),
        ("vgrad.cli.setup.STRATEGY", "loop", "strategy in forms to be 'auto'"),
        ("vgrad.cli.models.instructions", lambda: ["x"], "instructions in low prec"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            assert f"expected {message}" in error(capsys, "train", "--resume", out)
    write_data(images, seed=1)
    message = error(capsys, "train", "--resume", out)
    assert "expected sha256 in data to be" in message
    assert results(out) == before


def test_a_factory_whose_source_has_changed_is_refused(
    images, tmp_path, capsys, module
):
    out, own = tmp_path / "run", ["--model", module("own_model", net())]
    interrupted(images, out, *own)
    module("own_model", net() + "# changed\n")
    message = error(capsys, "train", "--resume", out, *own)
    assert "expected source_sha256 in model" in message


def test_files_of_other_names_are_left_alone(images, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    assert train(images, tmp_path / "run") == 0
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def test_no_two_processes_train_in_one_folder(images, tmp_path, monkeypatch, capsys):
    out, refused = tmp_path / "run", []

    def meanwhile(*given):
        monkeypatch.setattr(report, "write_page", lambda *given: None)
        refused.append(error(capsys, "train", "--resume", out))

    monkeypatch.setattr(report, "show_table", meanwhile)
    assert train(images, out) == 0
    # What locks the folder keeps out another run, and not foreign locks alone.
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    refused.append(error(capsys, "train", "--resume", out))
    os.close(descriptor)
    assert all("no other process is training" in each for each in refused)
    assert len(refused) == 2


@pytest.mark.parametrize(
    ("given", "samples", "side", "batch", "lr"),
    [
        ({}, 1438, 8, 720, 1.0),
        ({}, 60_000, 28, 720, 0.082),
        ({}, 50_000, 32, 720, 0.062),
        ({"model": "mlp"}, 500, 8, 256, 0.089),
        ({"model": "mlp"}, 60_000, 28, 720, 0.25),
        ({"model": "resnet"}, 2_000, 8, 720, 0.1),
        ({"model": "resnet"}, 2_000, 4, 720, 0.1),
        ({"model": "resnet"}, 2_000, 28, 720, 0.0082),
        ({"model": "own:make"}, 2_000, 28, 720, 0.1),
        ({"model": "own:make"}, 72, 28, 40, 0.0056),
        ({"batch_size": 36}, 500, 8, 36, 0.05),
        ({"batch_size": 2_000}, 60_000, 8, 2_000, 1.0),
        ({"lr": 0.7}, 500, 28, 256, 0.7),
        ({"lr": 0.7, "batch_size": 3}, 3, 28, 3, 0.7),
        ({}, 3, 8, 3, 0.0042),
        ({}, 1, 8, 1, 0.0014),
    ],
)
def test_the_batch_and_the_rate_fit_the_data(given, samples, side, batch, lr):
    shape = models.Shape(3, side, side, 10)
    found = settings.Settings(**given).fitted(samples, shape)
    assert (found.batch_size, found.lr) == (batch, lr)


def test_what_was_chosen_is_recorded_and_may_be_given_again(images, tmp_path, capsys):
    out, more = tmp_path / "run", ["--model", "mlp", "--epochs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_page", stop)
        with pytest.raises(Killed):
            main(["train", "--out", str(out), "--data", str(images), *more])
    chosen = said(out)["arguments"]
    assert (chosen["batch_size"], chosen["lr"]) == (24, 0.0083)
    message = error(capsys, "train", "--resume", out, "--batch-size", "720")
    assert "expected --batch-size 24, which the run was started with" in message
    assert resume(out, "--batch-size", "24", "--lr", "0.0083") == 0


@SLOW
@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet"])
def test_no_model_diverges_as_it_is_by_default(tmp_path, model):
    drawn = data.load("digits", seed=0)
    names = ("x_train", "y_train", "x_test", "y_test")
    few = {name: value[:300].numpy() for name, value in zip(names, drawn, strict=False)}
    np.savez(tmp_path / "few.npz", **few)
    out, more = tmp_path / "run", ["--model", model, "--epochs", "20"]
    given = ["--data", str(tmp_path / "few.npz"), *more, "--reproducible-noise"]
    assert main(["train", "--out", str(out), *given]) == 0
    for name in ("metrics", "plain"):
        first, *_, last = lines(out / f"{name}.jsonl")
        assert last["loss"] < first["loss"] < 2.5
        assert last["test_accuracy"] > 0.3


BAD = {
    "no such data": (["--data", "none.npz"], "none.npz: expected a file"),
    "no such set": (["--data", "imagenet"], "expected digits, mnist, cifar10"),
    "no such model": (["--model", "lenet"], "expected one of cnn, mlp, resnet or a"),
    "cnn on features": (["--model", "cnn"], "Use --model mlp"),
    "batch too large": (
        ["--batch-size", "49"],
        "at most the 48 training samples that there are. Leave it out for",
    ),
    "unknown device": (["--device", "teapot"], "--device teapot: expected cpu"),
    "other device": (["--device", "meta"], "--device meta: expected cpu"),
    "absent device": (["--device", "cuda:99"], "--device cuda:99: expected cpu"),
    "plain alone": ([PLAIN], "--without-privacy: expected --members 2 or more"),
    "plain epsilon": ([*THREE, PLAIN, "--epsilon", "3"], "training, got --epsilon."),
    "plain delta": ([*THREE, PLAIN, "--delta", "1e-5"], "training, got --delta."),
    "plain norm": ([*THREE, PLAIN, "--max-norm", "1"], "training, got --max-norm."),
    "plain noise": ([*THREE, PLAIN, FIXED], "training, got --reproducible-noise."),
    "no such members": ([*THREE, "--model", "net"], "expected one of cnn, mlp, resnet"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_and_leave_no_trace(images, tmp_path, capsys, name):
    more, message = BAD[name]
    out = tmp_path / "run"
    command = ["train", "--out", out, *arguments(images, *more)]
    assert message in error(capsys, *command)
    assert not out.exists()


@SLOW
def test_a_tiny_budget_is_planned_for(images, tmp_path, capsys):
    assert train(images, tmp_path / "run", "--epsilon", "1e-300") == 0
    shown = capsys.readouterr().out
    assert "noise multiplier" in shown
    assert "members" not in shown
    assert all(line["epsilon"] == 0 for line in lines(tmp_path / "run/metrics.jsonl"))


def test_a_folder_has_a_name_and_is_no_file(tmp_path, monkeypatch, capsys):
    images = write_data(tmp_path / "images.npz")
    monkeypatch.chdir(tmp_path)
    before = os.listdir(tmp_path)
    for start in (["--out", "", *arguments(images)], ["--resume", ""]):
        message = error(capsys, "train", *start)
        assert f"{start[0]} '': expected the name of a folder, got none" in message
    assert "evaluate '': expected the name" in error(capsys, "evaluate", "")
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    for name in ("images.npz", "images.npz/run", "link", "link/run"):
        message = error(capsys, "train", "--out", name, *arguments(images))
        assert f"--out {name}: expected a folder, got" in message
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "link"])


def test_bad_data_is_one_line_and_leaves_no_trace(tmp_path, capsys):
    out = tmp_path / "run"
    changes = [({"x_train": np.full((SIZE, 6), np.nan)}, "got NaN or infinity")]
    for classes in (2, -1, 2**62, 2**31 - 4):
        message = "expected labels from 0 to classes - 1"
        changes.append(({"classes": np.array(classes)}, message))
    for changed, message in changes:
        images = write_data(tmp_path / "bad.npz", **changed)
        command = ["train", "--out", out, *arguments(images)]
        assert message in error(capsys, *command)
    assert not out.exists()


LAST = "torch.nn.Linear(6, 3)"
FACTORIES = {
    "batch norm": ("torch.nn.BatchNorm1d(6), " + LAST, "vgrad.replace_batch_norm"),
    "wrong output": ("torch.nn.Linear(6, 4)", "got ValueError: scores of shape (2, 4)"),
    "wrong input": ("torch.nn.Linear(99, 6), " + LAST, "got RuntimeError: mat1"),
    "nothing to train": (LAST + ").requires_grad_(False", "expected at least one"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_written(
    images, tmp_path, capsys, module, name
):
    layers, message = FACTORIES[name]
    out, spec = tmp_path / "run", module("bad_model", net(layers))
    command = ["train", "--out", out, *arguments(images, "--model", spec)]
    assert message in error(capsys, *command)
    assert not out.exists()


GOING_ON = {
    "dropout": ["--model", "dropping:make"],
    "bfloat16": ["--precision", "bfloat16"],
    "float16": ["--precision", "float16"],
    "members in bfloat16": [*THREE, "--precision", "bfloat16"],
    "members in float16": [*THREE, "--precision", "float16"],
    "replayed": ["--compile", "replay"],
    "members, replayed": [*THREE, "--compile", "replay"],
}


LONG = [pytest.mark.slow, pytest.mark.compiled]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=LONG if n == "members, replayed" else ()) for n in GOING_ON],
)
def test_killed_after_an_epoch_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, monkeypatch, module, name
):
    monkeypatch.setattr("vgrad.cli.models.warn_if_slow", lambda *given: None)
    module("dropping", net("torch.nn.Dropout(), " + LAST))
    more, killed = GOING_ON[name], tmp_path / "killed"
    assert train(images, tmp_path / "whole", FIXED, *more) == 0
    where = (checkpoint, "save_model")
    interrupted(images, killed, FIXED, *more, where=where, after=1)
    assert said(killed)["step"] == 4
    assert resume(killed, *more) == 0
    whole = results(tmp_path / "whole")
    assert results(killed) == whole
    assert said(killed)["arguments"][more[-2][2:]] == more[-1]
    assert all(record["loss"] < 2 for record in whole["plain.jsonl"])
    scaled = ["loss_scale" in record for record in whole["plain.jsonl"]]
    assert scaled == [more[-1] == "float16"] * 2


def test_checkpoints_that_are_missing_damaged_or_foreign_are_one_line(
    images, tmp_path, capsys
):
    none = tmp_path / "none"
    command = ["train", "--resume", none]
    assert "expected the folder of a run" in error(capsys, *command)
    none.mkdir()
    assert "state of a run, got no file" in error(capsys, *command)
    assert "model of a run, got no file" in error(capsys, "evaluate", none)
    (none / "state.safetensors").write_text("not one of ours")
    assert "got a damaged file" in error(capsys, *command)
    assert os.listdir(none) == ["state.safetensors"]
    out = tmp_path / "run"
    interrupted(images, out)
    tensors, description = checkpoint.read_state(out)
    del description["arguments"]["epsilon"]
    files.write_tensors(out / "state.safetensors", tensors, description)
    message = error(capsys, "train", "--resume", out)
    assert "belongs to another version of vgrad" in message


def test_a_folder_is_given_once(tmp_path, capsys):
    assert "one of the arguments --out --resume" in error(capsys, "train")
    both = ["train", "--out", tmp_path, "--resume", tmp_path]
    assert "not allowed with argument" in error(capsys, *both)


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    tmp_path, monkeypatch, capsys, package
):
    def missing(given):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("vgrad.cli.run.train", missing)
    message = error(capsys, "train", "--out", tmp_path / "run")
    assert 'pip install "vgrad[demo]"' in message


def test_an_interrupt_has_its_own_status(images, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "write_page", interrupt)
        assert train(images, tmp_path / "run") == 130
    assert capsys.readouterr().err.startswith("vgrad: interrupted")
    assert resume(tmp_path / "run") == 0


ONE = ([], ["private SGD", "plain SGD", "epsilon"], "member")
MEMBERS = ([*THREE, PLAIN], ["plain SGD", "member 0", "member 2"], "private SGD")


@pytest.mark.parametrize(
    ("more", "texts", "absent"), [ONE, pytest.param(*MEMBERS, marks=SLOW)]
)
def test_on_a_terminal_there_is_a_bar_and_a_table(
    images, tmp_path, monkeypatch, capsys, more, texts, absent
):
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    monkeypatch.setattr(
        report, "Console", lambda: Console(file=screen, force_terminal=True)
    )
    assert train(images, tmp_path / "run", *more) == 0
    shown = screen.getvalue()
    assert all(text in shown for text in ("epoch 2/2", "8/8 steps", *texts))
    assert absent not in shown
    assert capsys.readouterr().out.count(NO_NOISE) == (PLAIN not in more)


NO_NOISE = (
    "The figures of each epoch are computed from the private data without noise: they "
    "are not for release.\n"
)


@pytest.mark.parametrize("kind", [[], pytest.param(THREE, marks=SLOW)])
def test_the_figures_of_the_epochs_are_said_to_have_no_noise(
    images, tmp_path, capsys, kind
):
    out = tmp_path / "run"
    interrupted(images, out, *kind, where=(checkpoint, "save_state"), after=2)
    for shown in (capsys.readouterr().out, resume(out) or capsys.readouterr().out):
        before, _, after = shown.partition(NO_NOISE)
        assert "epoch " not in before
        assert after.startswith("epoch ")
        assert NO_NOISE not in after


@SLOW
def test_the_digits_train_in_silence_but_for_a_line_an_epoch(tmp_path, capfd):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vgrad", "train", "--out", out]
    more = ["--epochs", "2", "--seed", "4", "--model", "mlp"]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\nepoch ") == 2
    assert len(done.stdout.splitlines()) == 9
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert main(["evaluate", str(out)]) == 0
    judged, share = capfd.readouterr(), lines(out / "metrics.jsonl")[-1]
    told = f"accuracy {100 * share['test_accuracy']:.2f} % on 359 held-out"
    assert judged.out.startswith(told)
    assert judged.err == ""

"""The main job from end to end: what a run writes, survives and refuses."""

import fcntl
import functools
import io
import json
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

import vgrad
from tests import streams
from vgrad import dp, files
from vgrad.__main__ import COMMANDS, main
from vgrad.cli import checkpoint, data, report
from vgrad.dp import accounting

ROOT = Path(__file__).parents[2]
KEYS = ["step", "loss", "test_accuracy", "epsilon", "samples_per_second"]
SIZE, BATCH = 48, 12


@pytest.fixture(autouse=True)
def fast_accountant(monkeypatch):
    """Ask the accountant the same question once only."""
    for name in ("epsilon", "noise_multiplier_for"):
        monkeypatch.setattr(accounting, name, cached(name))


@functools.cache
def cached(name):
    return functools.cache(getattr(accounting, name))


def write_data(path, seed=0, **changed):
    rng = np.random.default_rng(seed)
    y_train, y_test = rng.integers(0, 3, SIZE), rng.integers(0, 3, 30)
    centres = rng.normal(size=(3, 6)).astype(np.float32)
    found = {
        "x_train": centres[y_train] + rng.normal(size=(SIZE, 6)),
        "y_train": y_train,
        "x_test": centres[y_test] + rng.normal(size=(30, 6)),
        "y_test": y_test,
        "classes": np.array(3),
        **changed,
    }
    np.savez(path, **found)
    return path


@pytest.fixture
def images(tmp_path):
    return write_data(tmp_path / "images.npz")


def arguments(images, *more, epochs=2):
    sizes = ["--batch-size", str(BATCH), "--epochs", str(epochs)]
    return ["--data", str(images), "--model", "mlp", "--lr", "0.5", *sizes, *more]


def train(images, out, *more, epochs=2):
    return main(["train", "--out", str(out), *arguments(images, *more, epochs=epochs)])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(folder):
    """Everything that a run leaves, apart from how long it took, as bytes."""
    found = {}
    for name in ("metrics.jsonl", "plain.jsonl"):
        records = lines(folder / name)
        found[name] = [{**each, "samples_per_second": None} for each in records]
    for name, kind in (("state", "training state"), ("model", "model")):
        tensors, description = files.read_tensors(folder / f"{name}.safetensors", kind)
        description.pop("lengths", None)
        found[name] = {key: value.numpy().tobytes() for key, value in tensors.items()}
        found[f"{name} description"] = description
    return found


class Killed(BaseException):
    """Stands for a signal that no handler sees."""


def stop(*args, **kwargs):
    raise Killed


def test_a_run_writes_what_it_promises(images, tmp_path):
    out = tmp_path / "new" / "run"
    assert train(images, out, epochs=3) == 0
    assert sorted(os.listdir(out)) == [
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
        "plain.jsonl",
        "state.json",
        "state.safetensors",
    ]
    for name in ("metrics.jsonl", "plain.jsonl"):
        records = lines(out / name)
        assert [list(each) for each in records] == [KEYS] * 3
        assert [each["step"] for each in records] == [4, 8, 12]
    assert all(each["epsilon"] is None for each in lines(out / "plain.jsonl"))
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    for name in ("state.json", "state.safetensors"):
        assert stat.S_IMODE((out / name).stat().st_mode) == 0o600


def test_epsilon_is_what_the_accountant_says_and_ends_at_the_target(images, tmp_path):
    assert train(images, tmp_path / "run", "--epsilon", "2", epochs=3) == 0
    plan = json.loads((tmp_path / "run/state.json").read_text())["plan"]
    spent = [each["epsilon"] for each in lines(tmp_path / "run/metrics.jsonl")]
    assert spent == [
        dp.epsilon(
            sampling_rate=BATCH / SIZE,
            noise_multiplier=plan["noise_multiplier"],
            steps=steps,
            delta=1e-5,
        )
        for steps in (4, 8, 12)
    ]
    assert 1.98 < spent[-1] <= 2
    _, description = checkpoint.read_model(tmp_path / "run")
    assert description["epsilon"] == spent[-1]


def reference(images, key, plan, private, *, lr, max_norm, steps):
    """Train in plain torch, sample by sample, from the key of the state."""
    held = np.load(images)
    x = torch.from_numpy(held["x_train"]).float()[:, None, None]
    y = torch.from_numpy(held["y_train"])
    model = vgrad.cli.models.build("mlp", data.load(str(images), seed=0).shape, seed=0)
    params = list(model.parameters())
    own = streams.of_plan(key, plan)
    sizes = {
        "multiplier": plan["noise_multiplier"],
        "sensitivity": max_norm / BATCH,
    }
    for step in range(steps):
        if private:
            index = streams.batch(own, step, SIZE, BATCH / SIZE)
        else:
            order = torch.randperm(SIZE, generator=streams.shuffle(key, step))
            index = order[:BATCH].tolist()
        total = [torch.zeros_like(param) for param in params]
        for row in index:
            scores = model(x[row : row + 1])
            loss = torch.nn.functional.cross_entropy(scores, y[row : row + 1])
            grads = torch.autograd.grad(loss, params)
            norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
            factor = min(1.0, max_norm / norm) if private else 1.0
            total = [
                sum_ + factor * grad for sum_, grad in zip(total, grads, strict=True)
            ]
        with torch.no_grad():
            for (name, param), sum_ in zip(
                model.named_parameters(), total, strict=True
            ):
                mean = sum_ / BATCH
                if private:
                    mean += streams.noise(own, step, name, param.shape, **sizes)
                param -= lr * mean
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("which", ["private", "plain"])
def test_both_runs_are_what_plain_torch_computes_sample_by_sample(
    images, tmp_path, monkeypatch, which
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(report, "display", stop)
        with pytest.raises(Killed):
            train(images, out, "--reproducible-noise", "--max-norm", "0.8", epochs=3)
    before, description = checkpoint.read_state(out)
    assert main(["train", "--resume", str(out)]) == 0
    after, _ = checkpoint.read_state(out)
    expected = reference(
        images,
        before[f".{which}.key"].tolist(),
        description["plan"],
        which == "private",
        lr=0.5,
        max_norm=0.8,
        steps=12,
    )
    for name, value in expected.items():
        found = after[f".{which}.params['{name}']"]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def test_the_noise_has_the_size_that_the_arguments_ask_for(
    images, tmp_path, monkeypatch
):
    # Where every batch is empty, noise is all that moves the parameters.
    empty = torch.zeros(0, dtype=torch.int64)
    monkeypatch.setattr(dp.Plan, "sample", lambda *args, **kwargs: empty)
    out = tmp_path / "run"
    assert train(images, out, "--max-norm", "0.25", epochs=4) == 0
    start = vgrad.cli.models.build("mlp", data.load(str(images), seed=0).shape, seed=0)
    end = dict(checkpoint.load(out).named_parameters())
    moved = [(end[key] - start).flatten() for key, start in start.named_parameters()]
    multiplier = json.loads((out / "state.json").read_text())["plan"][
        "noise_multiplier"
    ]
    expected = 0.5 * multiplier * 0.25 / BATCH * math.sqrt(16)
    # 643 normal numbers: five standard errors are 14 %.
    assert torch.cat(moved).detach().std() == pytest.approx(expected, rel=0.14)
    assert [each["loss"] for each in lines(out / "metrics.jsonl")] == [None] * 4


def test_only_the_model_is_for_release(images, tmp_path):
    assert train(images, tmp_path / "run") == 0
    tensors, description = files.read_tensors(
        tmp_path / "run/model.safetensors", "model"
    )
    model = checkpoint.load(tmp_path / "run")
    assert tensors.keys() == model.state_dict().keys()
    assert description.keys() == {
        *("kind", "model", "precision", "shape"),
        *("seed", "step", "epsilon", "delta", "plan"),
    }


def test_the_seed_fixes_the_start_and_never_the_noise(images, tmp_path):
    for name in "ab":
        assert train(images, tmp_path / name, "--seed", "5") == 0
    a, b = results(tmp_path / "a"), results(tmp_path / "b")
    assert a["plain.jsonl"] == b["plain.jsonl"]
    assert a["metrics.jsonl"] != b["metrics.jsonl"]
    assert a["state"][".private.key"] != b["state"][".private.key"]
    assert train(images, tmp_path / "c", "--seed", "6") == 0
    assert results(tmp_path / "c")["plain.jsonl"] != a["plain.jsonl"]


def test_reproducible_noise_repeats_the_run_and_claims_nothing(
    images, tmp_path, capsys
):
    for name in "ab":
        assert train(images, tmp_path / name, "--reproducible-noise") == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert "epsilon of this run may not be claimed" in capsys.readouterr().out
    assert checkpoint.read_model(tmp_path / "a")[1]["epsilon"] is None
    assert main(["evaluate", str(tmp_path / "a"), "--data", str(images)]) == 0
    assert "no claim of privacy" in capsys.readouterr().out
    other = ["--reproducible-noise", "--seed", "1"]
    assert train(images, tmp_path / "c", *other) == 0
    assert results(tmp_path / "a")["metrics.jsonl"] != lines(
        tmp_path / "c/metrics.jsonl"
    )


def test_killed_at_any_write_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, monkeypatch
):
    fixed = "--reproducible-noise"
    sync, calls = os.fsync, []

    def counting(descriptor):
        calls.append(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    assert train(images, tmp_path / "whole", fixed) == 0
    expected, writes = results(tmp_path / "whole"), len(calls)
    assert writes > 20
    for moment in range(writes):
        calls.clear()

        def killing(descriptor, moment=moment):
            if len(calls) == moment:
                raise Killed
            counting(descriptor)

        out = tmp_path / f"killed{moment}"
        monkeypatch.setattr(os, "fsync", killing)
        with pytest.raises(Killed):
            train(images, out, fixed)
        monkeypatch.setattr(os, "fsync", counting)
        if (out / "model.safetensors").exists():
            # No model may come from steps that are lost and taken again.
            model, state = checkpoint.read_model(out), checkpoint.read_state(out)
            assert model[1]["step"] <= state[1]["step"]
        if (out / "state.safetensors").exists():
            assert main(["train", "--resume", str(out)]) == 0
        else:
            assert train(images, out, fixed) == 0
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


def test_killed_by_a_signal_a_run_goes_on_with_the_same_numbers(images, tmp_path):
    more = arguments(images, "--reproducible-noise", epochs=5)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    for start, writes in ((["--out", out, *more], 17), (["--resume", out], 20)):
        command = [sys.executable, "-c", KILLED, str(writes), "train", *map(str, start)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )
        assert done.returncode == -signal.SIGKILL
        assert 0 < len(lines(out / "metrics.jsonl")) < 5
        assert not (out / "curves.png").exists()
    assert main(["train", "--resume", str(out)]) == 0
    assert main(["train", "--out", str(whole), *more]) == 0
    assert results(out) == results(whole)


def test_noise_is_drawn_again_for_the_same_step_only(images, tmp_path, monkeypatch):
    seen, add_noise = [], dp.Plan.add_noise

    def watched(self, sums, sensitivity, *, key, step):
        zeros = {name: torch.zeros_like(value) for name, value in sums.items()}
        noise = add_noise(self, zeros, sensitivity, key=key, step=step)
        seen.append(noise["1.weight"].numpy().tobytes())
        if len(seen) == 7:  # in the middle of the second of three epochs
            raise Killed
        return add_noise(self, sums, sensitivity, key=key, step=step)

    monkeypatch.setattr(dp.Plan, "add_noise", watched)
    with pytest.raises(Killed):
        train(images, tmp_path / "run", epochs=3)
    before = seen[:7]
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    after = seen[7:]
    assert after[:3] == before[4:]
    assert len(set(before[:4] + after)) == len(before[:4] + after) == 12


def test_the_figures_of_lost_steps_are_cut_off(images, tmp_path):
    out = tmp_path / "run"
    assert train(images, out, "--reproducible-noise") == 0
    expected = results(out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 0.1')
    (out / "curves.png").unlink()
    assert main(["train", "--resume", str(out)]) == 0
    assert results(out) == expected


def test_a_finished_run_stays_as_it_is(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(images, out) == 0
    before = {path: (path.read_bytes(), path.stat()) for path in out.iterdir()}
    assert main(["train", "--resume", str(out)]) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out
    assert before == {path: (path.read_bytes(), path.stat()) for path in out.iterdir()}


def interrupted(images, out, monkeypatch, *more):
    """Leave a run that still has an epoch to go."""
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_curves", stop)
        with pytest.raises(Killed):
            train(images, out, *more)


def error(capsys, *command):
    """Run a command that has to fail, and return the one line it prints."""
    capsys.readouterr()
    try:
        status = main([str(each) for each in command])
    except SystemExit as leaving:
        status = leaving.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("vgrad: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_arguments_given_again_have_to_be_the_same(
    images, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch)
    before = results(out)
    resume = ["train", "--resume", out]
    assert "expected --lr 0.5, which" in error(capsys, *resume, "--lr", "0.7")
    assert "--seed 0, which" in error(capsys, *resume, "--seed", "1")
    message = error(capsys, *resume, "--reproducible-noise")
    assert "--reproducible-noise False" in message
    assert results(out) == before
    assert main(["train", "--resume", str(out), "--lr", "0.5", "--seed", "0"]) == 0


def test_what_would_change_the_numbers_is_refused(
    images, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch)
    before = results(out)
    resume = ["train", "--resume", out]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert "expected threads (OMP_NUM_THREADS) in" in error(capsys, *resume)
    with monkeypatch.context() as patch:
        patch.setattr("vgrad.cli.setup._MOST_ROWS", 5)
        assert "expected chunk_size in forms to be 512" in error(capsys, *resume)
    with monkeypatch.context() as patch:
        patch.setattr("vgrad.cli.setup.STRATEGY", "loop")
        assert "expected strategy in forms to be 'auto'" in error(capsys, *resume)
    write_data(images, seed=1)
    assert "expected sha256 in data to be" in error(capsys, *resume)
    assert results(out) == before


def test_a_factory_whose_source_has_changed_is_refused(
    images, tmp_path, monkeypatch, capsys
):
    source = (
        "import torch\n"
        "def make(*, channels, height, width, classes):\n"
        "    layers = torch.nn.Flatten(), torch.nn.Linear(width, classes)\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    (tmp_path / "own_model.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch, "--model", "own_model:make")
    (tmp_path / "own_model.py").write_text(source + "# changed\n")
    message = error(capsys, "train", "--resume", out, "--model", "own_model:make")
    assert "expected source_sha256 in model" in message
    sys.modules.pop("own_model")


def test_metrics_that_were_shortened_are_refused(images, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch)
    (out / "plain.jsonl").write_bytes((out / "plain.jsonl").read_bytes()[:-1])
    assert "bytes that the checkpoint knows of" in error(
        capsys, "train", "--resume", out
    )


def test_a_folder_with_a_run_or_a_part_of_one_is_not_written_to(
    images, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train(images, out) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    command = ["train", "--out", out, *arguments(images)]
    assert "expected a folder without a run" in error(capsys, *command)
    assert before == {path: path.read_bytes() for path in out.iterdir()}
    for name in ("metrics.jsonl", "curves.png", "model.safetensors"):
        other = tmp_path / f"only {name}"
        other.mkdir()
        (other / name).write_text("mine")
        command = ["train", "--out", other, *arguments(images)]
        assert f"got one with {name}" in error(capsys, *command)
        assert (other / name).read_text() == "mine"
        assert os.listdir(other) == [name]


def test_files_of_other_names_are_left_alone(images, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    assert train(images, tmp_path / "run") == 0
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def test_two_processes_do_not_train_in_one_folder(
    images, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch)
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    message = error(capsys, "train", "--resume", out)
    os.close(descriptor)
    assert "no other process is training" in message


def test_no_two_processes_train_in_one_folder_at_once(
    images, tmp_path, monkeypatch, capsys
):
    """What locks the folder keeps out another run, and not foreign locks alone."""
    out = tmp_path / "run"
    refused = []

    def resume_meanwhile(*given):
        monkeypatch.setattr(report, "write_curves", lambda *given, **more: None)
        refused.append(error(capsys, "train", "--resume", out))

    monkeypatch.setattr(report, "show_table", resume_meanwhile)
    assert train(images, out) == 0
    (message,) = refused
    assert "no other process is training" in message


BAD = {
    "no such data": (["--data", "none.npz"], "none.npz: expected a file"),
    "no such set": (["--data", "imagenet"], "expected digits, mnist, cifar10"),
    "no such model": (["--model", "lenet"], "expected one of cnn, mlp, resnet"),
    "cnn on features": (["--model", "cnn"], "Use --model mlp"),
    "epsilon zero": (["--epsilon", "0"], "expected epsilon > 0"),
    "epsilon negative": (["--epsilon", "-1"], "expected epsilon > 0"),
    "epsilon NaN": (["--epsilon", "nan"], "expected epsilon > 0"),
    "epsilon infinite": (["--epsilon", "inf"], "expected a finite number"),
    "epsilon a word": (["--epsilon", "much"], "argument --epsilon: invalid float"),
    "delta one": (["--delta", "1"], "expected 0 < delta < 1"),
    "max-norm zero": (["--max-norm", "0"], "expected max_norm > 0"),
    "too many epochs": (
        ["--epochs", "1000000000"],
        "at most 1000000, as the run is sav",
    ),
    "too many members": (["--members", "1000000000"], "at most 10000, as all of them"),
    "no epochs": (["--epochs", "0"], "expected a whole number >= 1"),
    "half an epoch": (["--epochs", "0.5"], "argument --epochs: invalid int"),
    "batch too large": (["--batch-size", "49"], "at most the 48 training samples"),
    "learning rate": (["--lr", "-1"], "expected lr > 0"),
    "seed": (["--seed", "-1"], "< seed <"),
    "unknown device": (["--device", "teapot"], "--device teapot: expected cpu"),
    "other device": (["--device", "meta"], "--device meta: expected cpu"),
    "absent device": (["--device", "cuda:99"], "--device cuda:99: expected cpu"),
    "unknown argument": (["--learning-rate", "1"], "unrecognized arguments"),
    "abbreviation": (["--eps", "1"], "unrecognized arguments: --eps"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_and_leave_no_trace(images, tmp_path, capsys, name):
    more, message = BAD[name]
    out = tmp_path / "run"
    command = ["train", "--out", out, *arguments(images, *more)]
    assert message in error(capsys, *command)
    assert not out.exists()


def test_a_tiny_budget_is_planned_for(images, tmp_path, capsys):
    assert train(images, tmp_path / "run", "--epsilon", "1e-300") == 0
    assert "noise multiplier" in capsys.readouterr().out
    assert all(line["epsilon"] == 0 for line in lines(tmp_path / "run/metrics.jsonl"))


def test_a_folder_has_a_name_and_is_no_file(images, tmp_path, monkeypatch, capsys):
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
    x_train = np.full((SIZE, 6), np.nan)
    images = write_data(tmp_path / "nan.npz", x_train=x_train)
    command = ["train", "--out", out, *arguments(images)]
    assert "got NaN or infinity" in error(capsys, *command)
    for classes in (2, -1, 2**62, 2**31 - 4):
        images = write_data(tmp_path / "labels.npz", classes=np.array(classes))
        command = ["train", "--out", out, *arguments(images)]
        assert "expected labels from 0 to classes - 1" in error(capsys, *command)
    assert not out.exists()


FACTORIES = {
    "batch norm": ("torch.nn.BatchNorm1d(width), ", "", "vgrad.replace_batch_norm"),
    "wrong output": ("", " + 1", "got ValueError: scores of shape (2, 4)"),
    "wrong input": ("torch.nn.Linear(99, width), ", "", "got RuntimeError: mat1"),
    "nothing to train": ("", ").requires_grad_(False", "expected at least one"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_written(
    images, tmp_path, monkeypatch, capsys, name
):
    before, after, message = FACTORIES[name]
    (tmp_path / "bad_model.py").write_text(
        "import torch\n"
        "def make(*, channels, height, width, classes):\n"
        f"    return torch.nn.Sequential(torch.nn.Flatten(), {before}"
        f"torch.nn.Linear(width, classes{after}))\n"
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    command = ["train", "--out", out, *arguments(images, "--model", "bad_model:make")]
    assert message in error(capsys, *command)
    assert not out.exists()
    sys.modules.pop("bad_model")


def test_dropout_trains_and_resumes_with_the_same_masks(images, tmp_path, monkeypatch):
    (tmp_path / "dropping.py").write_text(
        "import torch\n"
        "def make(*, channels, height, width, classes):\n"
        "    layers = torch.nn.Flatten(), torch.nn.Dropout(), "
        "torch.nn.Linear(width, classes)\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    monkeypatch.chdir(tmp_path)
    more = ["--model", "dropping:make", "--reproducible-noise"]
    assert train(images, tmp_path / "whole", *more) == 0
    save, saved = checkpoint.save_model, []

    def killing(*args):
        save(*args)
        saved.append(args)
        if len(saved) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_model", killing)
        with pytest.raises(Killed):
            train(images, tmp_path / "killed", *more)
    assert main(["train", "--resume", str(tmp_path / "killed"), *more[:2]]) == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    sys.modules.pop("dropping")


def test_checkpoints_that_are_missing_damaged_or_foreign_are_one_line(
    images, tmp_path, monkeypatch, capsys
):
    none = tmp_path / "none"
    assert "expected the folder of a run" in error(capsys, "train", "--resume", none)
    none.mkdir()
    assert "state of a run, got no file" in error(capsys, "train", "--resume", none)
    assert "model of a run, got no file" in error(capsys, "evaluate", none)
    (none / "state.safetensors").write_text("not one of ours")
    assert "got a damaged file" in error(capsys, "train", "--resume", none)
    assert os.listdir(none) == ["state.safetensors"]
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch)
    tensors, description = checkpoint.read_state(out)
    del description["arguments"]["epsilon"]
    files.write_tensors(out / "state.safetensors", tensors, description)
    message = error(capsys, "train", "--resume", out)
    assert "belongs to another version of vgrad" in message


def test_a_folder_is_given_once(tmp_path, capsys):
    assert "one of the arguments --out --resume" in error(capsys, "train")
    both = ["train", "--out", tmp_path, "--resume", tmp_path]
    assert "not allowed with argument" in error(capsys, *both)


def test_a_command_has_to_be_given(capsys):
    assert main([]) == 2
    help_text = capsys.readouterr().err
    assert all(name in help_text for name in COMMANDS)
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--help"])
    assert leaving.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the only file meant for release" in text
    assert "from the private data without noise" in text


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    images, tmp_path, monkeypatch, capsys, package
):
    def missing(given):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("vgrad.cli.run.train", missing)
    message = error(capsys, "train", "--out", tmp_path / "run")
    assert 'pip install "vgrad[demo]"' in message


def test_an_interrupt_has_its_own_status(images, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write_curves", interrupt)
    assert train(images, tmp_path / "run") == 130
    assert capsys.readouterr().err.startswith("vgrad: interrupted")
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_evaluate_counts_right_answers_of_the_model_on_held_out_data(
    images, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train(images, out) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    model, held = checkpoint.load(out), np.load(images)
    x = torch.from_numpy(held["x_test"]).float()[:, None, None]
    guesses = [int(model(x[row : row + 1]).argmax()) for row in range(30)]
    share = np.mean(np.array(guesses) == held["y_test"])
    last = lines(out / "metrics.jsonl")[-1]
    assert last["test_accuracy"] == pytest.approx(share)
    assert capsys.readouterr().out == (
        f"accuracy {100 * share:.2f} % on 30 held-out samples (epsilon "
        f"{last['epsilon']:.3f} at delta 1e-05)\n"
    )


def test_evaluate_refuses_data_that_the_model_was_not_made_for(
    images, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train(images, out) == 0
    wide = {"x_train": np.zeros((SIZE, 7)), "x_test": np.zeros((30, 7))}
    other = write_data(tmp_path / "wide.npz", **wide)
    message = error(capsys, "evaluate", out, "--data", other)
    assert "expected images of 1 x 1 x 6 in 3 classes" in message
    more = write_data(tmp_path / "more.npz", classes=np.array(4))
    assert "in 4 classes" in error(capsys, "evaluate", out, "--data", more)
    fewer = write_data(
        tmp_path / "fewer.npz",
        y_train=np.arange(SIZE) % 2,
        y_test=np.arange(30) % 2,
        classes=np.array(2),
    )
    assert main(["evaluate", str(out), "--data", str(fewer)]) == 0


def test_on_a_terminal_there_is_a_bar_and_a_table_of_both_runs(
    images, tmp_path, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    monkeypatch.setattr(
        report, "Console", lambda: Console(file=screen, force_terminal=True)
    )
    assert train(images, tmp_path / "run") == 0
    shown = screen.getvalue()
    for text in ("epoch 2/2", "8/8 steps", "private SGD", "plain SGD", "epsilon"):
        assert text in shown


def test_the_digits_train_in_silence_but_for_a_line_an_epoch(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vgrad"]
    more = ["--epochs", "2", "--seed", "4"]
    done = subprocess.run(
        [*command, "train", "--out", out, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\nepoch ") == 2
    assert len(done.stdout.splitlines()) == 7
    judged = subprocess.run(
        [*command, "evaluate", out], cwd=ROOT, capture_output=True, text=True
    )
    share = lines(out / "metrics.jsonl")[-1]["test_accuracy"]
    assert (judged.returncode, judged.stderr) == (0, "")
    assert judged.stdout.startswith(f"accuracy {100 * share:.2f} % on 359 held-out")

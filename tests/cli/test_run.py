"""The main job from end to end, of one model and of an ensemble."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli import runs
from tests.cli.runs import FIXED, PLAIN, THREE, arguments, error, lines, results, train
from vgrad.__main__ import main
from vgrad.cli import checkpoint, data, models, report, settings
from vgrad.ensemble import member_seed
from vgrad.training import saved

ROOT = Path(__file__).parents[2]
NO_NOISE = (
    "The figures of each epoch are computed from the private data without noise: they "
    "are not for release.\n"
)
LAST = "torch.nn.Linear(6, 3)"


@pytest.mark.parametrize("kind", ["one", "plain"])
def test_the_files_of_a_run_and_its_lines(finished, kind):
    out, shown = finished(kind)
    one, figures = kind == "one", {"metrics.jsonl", "plain.jsonl"}
    before, said_so, after = shown.partition(NO_NOISE)
    assert bool(said_so) == one
    assert not said_so or ("epoch " not in before and after.startswith("epoch "))
    released = {"model.safetensors"}
    if not one:
        figures, released = {"plain.jsonl"}, {"ensemble.safetensors"}
    secret = {"state", "curves.png", *figures}
    assert set(os.listdir(out)) == released | secret
    assert runs.private(out) == secret
    assert runs.private(out / "state") == set(os.listdir(out / "state"))
    for name in figures:
        records = lines(out / name)
        keys = runs.KEYS if one else [*runs.KEYS, "member_accuracies"]
        assert [list(record) for record in records] == [keys] * 2
        assert [record["step"] for record in records] == [4, 8]
        assert all(len(each.get("member_accuracies", "abc")) == 3 for each in records)
        printed = [line for line in shown.splitlines() if line[:6] == "epoch "]
        for line, record in zip(printed, records, strict=True):
            assert f"{100 * record['test_accuracy']:.1f} %" in line
            shares = record.get("member_accuracies", [0])
            share = f"{100 * min(shares):.1f} % to {100 * max(shares):.1f} %"
            assert one or share in line
    assert all(each["epsilon"] is None for each in lines(out / "plain.jsonl"))
    description = checkpoint.read_model(out)[-1]
    entries = {"model", "precision", "shape", "seed", "step", "epsilon"}
    entries |= {"plan", "kind", "members"}
    assert description.keys() == entries


def test_the_budget_is_spent(finished):
    out, shown = finished("one")
    assert runs.said(out)["plan"]["steps"] == 8
    epsilons = [record["epsilon"] for record in lines(out / "metrics.jsonl")]
    assert epsilons == [runs.spent(out, steps) for steps in (4, 8)]
    assert 1.98 < epsilons[-1] <= 2
    description = checkpoint.read_model(out)[-1]
    assert (description["epsilon"], description["plan"]["delta"]) == (
        epsilons[-1],
        1e-5,
    )
    assert f"with epsilon {epsilons[-1]:.3f} at delta 1e-05" in shown


def test_without_privacy_nothing_claims_any(finished):
    out, shown = finished("plain")
    state = runs.state_of(out)
    assert runs.said(out)["plan"] is None
    assert all(name.startswith(".plain") for name in state)
    _, params, _ = checkpoint.load(out)
    for name, value in params.items():
        assert torch.equal(value, state[f".plain.params['{name}']"])
    model = checkpoint.read_model(out)[-1]
    assert (model["epsilon"], model["plan"]) == (None, None)
    assert "trained without privacy" in shown
    assert "For release" not in shown


@pytest.mark.parametrize("kind", ["one", "plain"])
def test_evaluate_counts_right_answers_on_held_out_data(images, finished, capsys, kind):
    out, _ = finished(kind)
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    x, y = runs.held_out(images)
    members = [checkpoint.load(out)]
    if kind != "one":
        members = [checkpoint.load(out, member=i) for i in range(3)]
    scores = torch.stack([model(x).softmax(1) for model in members])
    shares = (scores.argmax(2) == y).double().mean(1).tolist()
    share = (scores.mean(0).argmax(1) == y).double().mean().item()
    last = lines(out / f"{'plain' if kind == 'plain' else 'metrics'}.jsonl")[-1]
    assert last["test_accuracy"] == pytest.approx(share)
    assert last.get("member_accuracies", [share]) == pytest.approx(shares)
    privacy = "trained without privacy"
    if kind != "plain":
        privacy = f"epsilon {last['epsilon']:.3f} at delta 1e-05, add_or_remove_one"
    shown = [f"accuracy {100 * share:.2f} % on 30 held-out samples ({privacy})"]
    if kind != "one":
        numbered = enumerate(shares)
        shown += [f"member {i}: accuracy {100 * share:.2f} %" for i, share in numbered]
    assert capsys.readouterr().out.splitlines() == shown


def test_evaluate_refuses_data_that_the_model_was_not_made_for(
    finished, tmp_path, capsys
):
    for more, message in (
        (["--device", "teapot"], "--device teapot: expected"),
        (["--data", "none.npz"], "--data none.npz: expected"),
        (["--model", "cnn"], "expected the mod"),
    ):
        assert message in error(capsys, "evaluate", finished("one")[0], *more)
    assert "evaluate '': expected the name" in error(capsys, "evaluate", "")
    command = ["evaluate", finished("one")[0], "--data"]
    wide = {"x_train": np.zeros((runs.SIZE, 7)), "x_test": np.zeros((30, 7))}
    labels = {"y_train": np.arange(runs.SIZE) % 2, "y_test": np.arange(30) % 2}
    wide = runs.write_data(tmp_path / "wide.npz", **wide)
    message = error(capsys, *command, wide)
    assert "expected images of 1 x 1 x 6 in 3 classes" in message
    more = runs.write_data(tmp_path / "more.npz", classes=np.array(4))
    assert "in 4 classes" in error(capsys, *command, more)
    fewer = runs.write_data(tmp_path / "fewer.npz", **labels, classes=np.array(2))
    assert main([*map(str, command), str(fewer)]) == 0


def test_a_finished_run_stays_as_it_is_and_its_folder_is_taken(
    images, finished, tmp_path, capsys
):
    out, _ = finished("one")
    paths = [path for path in out.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat()) for path in paths}
    assert runs.resume(out) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out
    command = ["train", "--out", out, *arguments(images)]
    assert "expected a folder without a run" in error(capsys, *command)
    assert before == {path: (path.read_bytes(), path.stat()) for path in before}
    for number, name in enumerate((*checkpoint.FILES, report.CURVES)):
        other, linked = tmp_path / f"only {number}", tmp_path / f"a link {number}"
        (other / name).parent.mkdir(parents=True)
        (linked / name).parent.mkdir(parents=True)
        (other / name).write_text("mine")
        os.symlink(tmp_path / "victim", linked / name)
        for folder in (other, linked):
            command = ["train", "--out", folder, *arguments(images)]
            assert f"got one with {name}" in error(capsys, *command)
        assert runs.contents(other) == {name: b"mine"}
        assert [path.name for path in linked.iterdir()] == [name.partition("/")[0]]
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("precision", "members"),
    [("float32", 1), ("bfloat16", 1), ("float32", 3)],
)
@pytest.mark.filterwarnings("ignore:--precision")
def test_both_runs_are_computed_by_plain_torch_sample_by_sample(
    images, tmp_path, precision, members
):
    out, low = tmp_path / "run", precision != "float32"
    more = [*THREE, PLAIN] if members > 1 else [FIXED, "--max-norm", "0.8"]
    assert train(images, out, *more, "--precision", precision) == 0
    state, plan = runs.state_of(out), runs.said(out)["plan"]
    # One rounding in bfloat16 is 2**-8; gradients are of order one.
    atol = {"float32": 1e-5, "bfloat16": 0.01}[precision]
    options = {"members": members, "dtype": getattr(torch, precision) if low else None}
    for i in range(members):
        seed = member_seed(0, i) if members > 1 else 0
        loaded = checkpoint.load(out, member=i if members > 1 else None)
        for run in ("plain",) if members > 1 else ("private", "plain"):
            key = state[f".{run}.key"].tolist()
            expected = runs.reference(
                images, key, plan, run == "private", seed=seed, member=i, **options
            )
            for name, value in expected.items():
                param = state[f".{run}.params['{name}']"]
                param = param[i] if members > 1 else param
                rtol = 0 if low else 1e-4
                torch.testing.assert_close(param, value, rtol=rtol, atol=atol)
                if run == "private" or members > 1:
                    assert torch.equal(loaded.get_parameter(name), param)


def test_the_seed_fixes_the_start_and_never_the_noise(images, tmp_path):
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert train(images, tmp_path / name, "--seed", seed) == 0
    a, b, c = (results(tmp_path / name) for name in "abc")
    assert a["plain.jsonl"] == b["plain.jsonl"] != c["plain.jsonl"]
    assert a["metrics.jsonl"] != b["metrics.jsonl"]
    assert a["model"] != b["model"]
    assert a["state"][".private.key"] != b["state"][".private.key"]


def test_reproducible_noise_repeats_the_run_and_claims_nothing(
    images, tmp_path, capsys
):
    for name, more in (("a", []), ("b", []), ("c", ["--seed", "1"])):
        assert train(images, tmp_path / name, FIXED, *more) == 0
    a, b, c = (results(tmp_path / name) for name in "abc")
    assert a == b
    assert a["metrics.jsonl"] != c["metrics.jsonl"]
    assert capsys.readouterr().out.count("epsilon of this run may not be claimed") == 6
    assert checkpoint.read_model(tmp_path / "a")[-1]["epsilon"] is None
    assert main(["evaluate", str(tmp_path / "a"), "--data", str(images)]) == 0
    assert "no claim of privacy" in capsys.readouterr().out


@runs.SLOW
@pytest.mark.parametrize(
    ("more", "every"),
    [
        pytest.param([FIXED], 4, id="one"),
        pytest.param([FIXED], 1, id="one, at each", marks=pytest.mark.more),
        pytest.param([*THREE, PLAIN], 4, id="three, plain", marks=pytest.mark.more),
    ],
)
def test_killed_at_any_write_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, monkeypatch, more, every
):
    more = [*more, "--batch-size", "24"]
    writes = []
    with monkeypatch.context() as patch:
        runs.watched(
            patch, os, "fsync", lambda done, descriptor: writes.append(descriptor)
        )
        assert train(images, tmp_path / "whole", *more) == 0
    expected = results(tmp_path / "whole")
    assert len(writes) > 20
    for number in range(0, len(writes), every):
        out = tmp_path / f"killed{number}"
        with runs.killed(os, "fsync", after=number):
            train(images, out, *more)
        # No model may come from steps that are lost and taken again.
        begun = (out / "state" / saved.META).exists()
        if any(out.glob("*.safetensors")):
            step = int(runs.state_of(out)[".plain.step"])
            assert checkpoint.read_model(out)[-1]["step"] <= step
        if begun:
            assert runs.resume(out) == 0
        else:
            assert train(images, out, *more) == 0
        assert results(out) == expected


GOING_ON = {
    "dropout": [FIXED, "--model", "dropping:make"],
    "bfloat16": [FIXED, "--precision", "bfloat16"],
    "members in float16": [*THREE, PLAIN, "--precision", "float16"],
    "replayed": [FIXED, "--compile", "replay"],
    "truncated": [FIXED, "--max-batch-size", "auto"],
    "in a fixed order": [FIXED, "--noise", "bisr:3"],
}
LONGER = {"bfloat16", "replayed", "in a fixed order"}
"""Runs of `make more`."""


@pytest.mark.filterwarnings("ignore:--precision")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.more] if n in LONGER else [])
        for n in GOING_ON
    ],
)
def test_killed_after_an_epoch_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, module, name
):
    module("dropping", runs.net("torch.nn.Dropout(), " + LAST))
    more, out = GOING_ON[name], tmp_path / "killed"
    assert train(images, tmp_path / "whole", *more) == 0
    with runs.killed(checkpoint, "save_model", after=1):
        train(images, out, *more)
    assert int(runs.state_of(out)[".plain.step"]) == 4
    assert runs.resume(out, *more) == 0
    whole = results(tmp_path / "whole")
    assert results(out) == whole
    assert runs.said(out)["arguments"][more[-2][2:].replace("-", "_")] == more[-1]
    assert all(record["loss"] < 2 for record in whole["plain.jsonl"])
    scaled = ["loss_scale" in record for record in whole["plain.jsonl"]]
    assert scaled == [more[-1] == "float16"] * 2


def test_noise_is_drawn_again_for_the_same_step_only(images, tmp_path, monkeypatch):
    seen = runs.watch_noise(monkeypatch, killed_at=7)  # in the second of three epochs
    with pytest.raises(runs.Killed):
        train(images, tmp_path / "run", epochs=3)
    before = seen[:7]
    assert runs.resume(tmp_path / "run") == 0
    after = seen[7:]
    assert after[:3] == before[4:]
    assert len(set(before[:4] + after)) == len(before[:4] + after) == 12


def test_changes_of_the_numbers_are_refused(tmp_path, monkeypatch, capsys, module):
    images, out = runs.write_data(tmp_path / "images.npz"), tmp_path / "run"
    spec = ["--model", module("own_model", runs.net()), "--precision", "bfloat16"]
    monkeypatch.setattr(models, "warn_if_slow", lambda *given: None)
    assert train(images, out, *spec) == 0
    for place, value, message in (
        ("torch.get_num_threads", lambda: 77, "threads (OMP_NUM_THREADS) = 77, got"),
        ("vgrad.cli.setup._MOST_ROWS", 5, "chunk_size = 5, got one with 512"),
        ("vgrad.cli.models.instructions", lambda: ["x"], "instructions in low prec"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            runs.refuse(capsys, out, f"expected a state saved with {message}", *spec)
    runs.write_data(images, seed=1)
    runs.refuse(capsys, out, "expected a state saved with sha256 of the data =", *spec)
    runs.write_data(images)
    sys.modules.pop("own_model")
    module("own_model", runs.net() + "# changed\n")
    runs.refuse(capsys, out, "with sha256 of the model's file =", *spec)


def test_no_two_processes_train_in_one_folder(images, tmp_path, monkeypatch, capsys):
    out, refused = tmp_path / "run", []

    def meanwhile(*given, **more):
        refused.append(error(capsys, "train", "--resume", out))

    monkeypatch.setattr(report, "curves", meanwhile)
    assert train(images, out) == 0
    # The lock of the folder keeps out another run, and not foreign locks alone.
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    refused.append(error(capsys, "train", "--resume", out))
    os.close(descriptor)
    assert all("no other process is training" in message for message in refused)
    assert len(refused) == 2


@pytest.mark.parametrize(
    ("options", "samples", "side", "batch", "lr"),
    [
        ({}, 1438, 8, 720, 1.0),
        ({}, 60_000, 28, 720, 0.082),
        ({"model": "mlp"}, 500, 8, 256, 0.089),
        ({"model": "resnet"}, 2_000, 4, 720, 0.1),
        ({"model": "resnet"}, 2_000, 28, 720, 0.0082),
        ({"model": "own:make"}, 2_000, 28, 720, 0.1),
        ({"model": "own:make"}, 72, 28, 40, 0.0056),
        ({"batch_size": 36}, 500, 8, 36, 0.05),
        ({"batch_size": 2_000}, 60_000, 8, 2_000, 1.0),
        ({"lr": 0.7, "batch_size": 3}, 3, 28, 3, 0.7),
        ({}, 1, 8, 1, 0.0014),
    ],
)
def test_the_batch_and_the_rate_fit_the_data(options, samples, side, batch, lr):
    shape = models.Shape(3, side, side, 10)
    fitted = settings.Settings(**options).fitted(samples, shape)
    assert (fitted.batch_size, fitted.lr) == (batch, lr)


def test_the_choice_is_recorded_and_may_be_given_again(images, tmp_path, capsys):
    out, more = tmp_path / "run", ["--model", "mlp", "--epochs", "1"]
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with runs.killed(report, "write_picture"):
        main(["train", "--out", str(out), "--data", str(images), *more])
    chosen = runs.said(out)["arguments"]
    assert (chosen["batch_size"], chosen["lr"]) == (24, 0.0083)
    message = error(capsys, "train", "--resume", out, "--batch-size", "720")
    assert "expected --batch-size 24, which the run was started with" in message
    assert runs.resume(out, "--batch-size", "24", "--lr", "0.0083") == 0
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.more
@runs.SLOW
@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet"])
def test_no_model_diverges_as_it_is_by_default(tmp_path, model):
    few = [values[:300].numpy() for values in data.load("digits", seed=0)[:4]]
    np.savez(tmp_path / "few.npz", **dict(zip(data.KEYS, few, strict=True)))
    out, more = tmp_path / "run", ["--model", model, "--epochs", "20", FIXED]
    more += ["--data", str(tmp_path / "few.npz"), "--out", str(out)]
    assert main(["train", *more]) == 0
    for name in ("metrics", "plain"):
        first, *_, last = lines(out / f"{name}.jsonl")
        assert last["loss"] < first["loss"] < 2.5
        assert last["test_accuracy"] > 0.3


BUDGET = "expected a budget that some noise multiplier"
BAD = [
    (["--data", "none.npz"], "none.npz: expected a file"),
    (["--delta", "1e-320", "--epsilon", "1.5"], BUDGET),
    (["--delta", "0.999"], "--epsilon 3.0 --delta 0.999 --max-norm 2.0 --noise "),
    (["--model", "lenet"], "expected one of cnn, mlp, resnet or a"),
    (["--model", "cnn"], "Use --model mlp"),
    (["--batch-size", "49"], "the 48 training samples that there are. Leave it out"),
    (
        ["--noise", "blt:2", "--max-batch-size", "12"],
        "account, got one of which no eps",
    ),
    (["--noise", "band-mf:9"], "expected a rate of at most 1 / 9"),
    (["--device", "teapot"], "--device teapot: expected cpu"),
    (["--device", "meta"], "--device meta: expected cpu"),
    (["--device", "cuda:99"], "--device cuda:99: expected cpu"),
    ([PLAIN], "--without-privacy --members 1: expected --without-privacy for an"),
    (THREE, "--members 3: expected --without-privacy for an ensemble, and only"),
    ([*THREE, PLAIN, "--epsilon", "3"], "training, got --epsilon."),
    ([*THREE, PLAIN, "--delta", "1e-5"], "training, got --delta."),
    ([*THREE, PLAIN, "--max-norm", "1"], "training, got --max-norm."),
    ([*THREE, PLAIN, FIXED], "training, got --reproducible-noise."),
    ({"x_train": np.full((runs.SIZE, 6), np.nan)}, "got NaN or infinity"),
    ("torch.nn.BatchNorm1d(6), " + LAST, "vgrad.replace_batch_norm"),
    ("torch.nn.Linear(6, 4)", "got ValueError: scores of shape (2, 4)"),
    ("torch.nn.Linear(99, 6), " + LAST, "mat1 and mat2 shapes"),
    (LAST + ").requires_grad_(False", "expected at least one"),
]
"""Arguments, arrays of the data or layers of a factory."""


@pytest.mark.filterwarnings("ignore:Plan.delta")
@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_a_run_that_cannot_be_leaves_no_trace(
    images, tmp_path, capsys, module, wrong, message
):
    more = wrong if isinstance(wrong, list) else []
    if isinstance(wrong, dict):
        images = runs.write_data(tmp_path / "bad.npz", **wrong)
    if isinstance(wrong, str):
        more = ["--model", module("bad_model", runs.net(wrong))]
    out = tmp_path / "run"
    assert message in error(capsys, "train", "--out", out, *arguments(images, *more))
    assert not out.exists()


NORMED = "torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, classes)"
IN_NUMPY = """
class InNumPy(torch.nn.Linear):
    def forward(self, x):
        scale = 2 if abs(self.bias.detach().numpy()).sum() > 1e6 else 1
        return scale * super().forward(x.flatten(1))

def make(*, channels, height, width, classes):
    return InNumPy(6, classes)
"""


@pytest.mark.parametrize(
    ("source", "normed"), [(runs.net(NORMED), True), (IN_NUMPY, False)]
)
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_without_privacy_models_need_no_per_sample_gradients(
    images, tmp_path, capsys, module, source, normed
):
    model = ["--model", module("own_members", source)]
    if normed:
        refused = arguments(images, *model)
        message = error(capsys, "train", "--out", tmp_path / "private", *refused)
        assert "has per-sample gradients" in message
    assert train(images, tmp_path / "run", *THREE, *model, PLAIN) == 0
    state = runs.state_of(tmp_path / "run")
    if normed:
        means = state[".plain.buffers['2.running_mean']"]
        assert len({tuple(row.tolist()) for row in means}) == 3
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(images), *model]) == 0
    last = lines(tmp_path / "run/plain.jsonl")[-1]["test_accuracy"]
    assert f"accuracy {100 * last:.2f} %" in capsys.readouterr().out


@runs.SLOW
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
    printed, last = capfd.readouterr(), lines(out / "metrics.jsonl")[-1]
    share = f"accuracy {100 * last['test_accuracy']:.2f} % on 359 held-out"
    assert printed.out.startswith(share)
    assert printed.err == ""

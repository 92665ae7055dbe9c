"""The main job for deep ensembles: what it trains, spends, writes and survives."""

import io
import json
import os
import stat
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console
from torch.nn import functional as F

import vgrad
from tests import streams
from tests.cli.test_run import (
    BATCH,
    KEYS,
    SIZE,
    Killed,
    arguments,
    cached,
    error,
    lines,
    stop,
    train,
    write_data,
)
from vgrad import dp, files
from vgrad.__main__ import main
from vgrad.cli import checkpoint, data, models, report, run
from vgrad.dp import accounting
from vgrad.ensemble import load_ensemble, load_member, member_seed

FIXED = "--reproducible-noise"
PLAIN = "--without-privacy"
THREE = ["--members", "3"]
DRAW = run._draw


@pytest.fixture(autouse=True)
def fast_accountant(monkeypatch):
    """Ask the accountant the same question once only."""
    for name in ("epsilon", "noise_multiplier_for"):
        monkeypatch.setattr(accounting, name, cached(name))


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch):
    """Write files in the place of pictures, which take longer than a run."""

    def write(job, folder, states):
        for name in (report.RELIABILITY, report.UNCERTAIN):
            files.replace(folder / name, b"picture")

    monkeypatch.setattr(run, "_draw", write)


@pytest.fixture(autouse=True)
def one_thread():
    """Let no thread wait for another: the models are that small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def images(tmp_path):
    return write_data(tmp_path / "images.npz")


def results(folder):
    """Everything that a run leaves, apart from how long it took, as bytes."""
    found = {}
    for name in ("metrics.jsonl", "plain.jsonl"):
        if (folder / name).exists():
            records = lines(folder / name)
            found[name] = [{**each, "samples_per_second": None} for each in records]
    state, description = checkpoint.read_state(folder)
    description.pop("lengths")
    found["state"] = {key: value.numpy().tobytes() for key, value in state.items()}
    found["description"] = description
    found["ensemble.json"] = (folder / "ensemble.json").read_bytes()
    # The format keeps no order of what it says about its tensors.
    tensors = safetensors.torch.load_file(folder / "ensemble.safetensors")
    found["ensemble"] = {key: each.numpy().tobytes() for key, each in tensors.items()}
    return found


def interrupted(images, out, monkeypatch, *more, where=(report, "write_curves"), **how):
    """Leave a run that has not come to its end."""
    with monkeypatch.context() as patch:
        patch.setattr(*where, stop)
        with pytest.raises(Killed):
            train(images, out, *THREE, *more, **how)


def shape_of(images):
    return data.load(str(images), seed=0).shape


def templates(images, spec="mlp"):
    model = models.build(spec, shape_of(images), seed=0)
    return vgrad.make_functional_with_buffers(model)[1:]


@pytest.mark.parametrize("more", [[], [PLAIN]], ids=["private", "plain"])
def test_a_run_draws_its_pictures(images, tmp_path, monkeypatch, more):
    monkeypatch.setattr(run, "_draw", DRAW)
    out = tmp_path / "run"
    assert train(images, out, *THREE, *more, epochs=1) == 0
    for name in ("curves", "reliability", "uncertain"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_run_writes_what_it_promises(images, tmp_path):
    out = tmp_path / "run"
    assert train(images, out, *THREE) == 0
    assert sorted(os.listdir(out)) == [
        "curves.png",
        "ensemble.json",
        "ensemble.safetensors",
        "metrics.jsonl",
        "plain.jsonl",
        "reliability.png",
        "state.json",
        "state.safetensors",
        "uncertain.png",
    ]
    for name in ("metrics.jsonl", "plain.jsonl"):
        records = lines(out / name)
        assert [list(each) for each in records] == [[*KEYS, "member_accuracies"]] * 2
        assert [each["step"] for each in records] == [4, 8]
        assert [len(each["member_accuracies"]) for each in records] == [3, 3]
    for name in ("state.json", "state.safetensors"):
        assert stat.S_IMODE((out / name).stat().st_mode) == 0o600


def test_the_budget_is_that_of_all_members_together(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(images, out, *THREE, "--epsilon", "2") == 0
    plan = json.loads((out / "state.json").read_text())["plan"]
    assert plan["steps"] == 3 * 8

    def spent(steps):
        return dp.epsilon(
            sampling_rate=BATCH / SIZE,
            noise_multiplier=plan["noise_multiplier"],
            steps=steps,
            delta=1e-5,
        )

    found = [each["epsilon"] for each in lines(out / "metrics.jsonl")]
    assert found == [spent(3 * 4), spent(3 * 8)]
    assert 1.98 < found[-1] <= 2
    assert all(each["epsilon"] is None for each in lines(out / "plain.jsonl"))
    said = json.loads((out / "ensemble.json").read_text())
    assert (said["epsilon"], said["delta"]) == (found[-1], 1e-5)
    assert said["members"] == 3
    shown = capsys.readouterr().out
    assert "24 steps on the same data" in shown
    assert f"with epsilon {found[-1]:.3f} at delta 1e-05" in shown
    # One model has the budget for itself.
    assert train(images, tmp_path / "one", "--epsilon", "2") == 0
    one = json.loads((tmp_path / "one/state.json").read_text())["plan"]
    assert one["noise_multiplier"] < plan["noise_multiplier"]


def reference(images, member, private, key, plan):
    """Train one member in plain torch, sample by sample, for eight steps."""
    held = np.load(images)
    x = torch.from_numpy(held["x_train"]).float()[:, None, None]
    y = torch.from_numpy(held["y_train"])
    model = models.build("mlp", shape_of(images), seed=member_seed(0, member))
    params = list(model.parameters())
    own = streams.of_plan(key, plan)
    sizes = {"multiplier": plan["noise_multiplier"], "sensitivity": 0.8 / BATCH}
    for step in range(8):
        if private:
            index = streams.batch(own, step, SIZE, BATCH / SIZE)
        else:
            shuffles = streams.shuffle(key, step)
            orders = [torch.randperm(SIZE, generator=shuffles) for _ in range(3)]
            index = orders[member][:BATCH].tolist()
        total = [torch.zeros_like(param) for param in params]
        for row in index:
            loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            grads = torch.autograd.grad(loss, params)
            norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
            factor = (0.8 / norm).clamp(max=1) if private else 1.0
            for sum_, grad in zip(total, grads, strict=True):
                sum_ += factor * grad
        with torch.no_grad():
            for (name, param), sum_ in zip(
                model.named_parameters(), total, strict=True
            ):
                mean = sum_ / BATCH
                if private:
                    mean += streams.noise(own, step, name, param.shape, **sizes)
                param -= 0.5 * mean
    return {name: param.detach() for name, param in model.named_parameters()}


def test_members_are_what_plain_torch_computes_for_each_of_them(
    images, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    more = [FIXED, "--max-norm", "0.8"]
    interrupted(images, out, monkeypatch, *more, where=(report, "display"))
    before, description = checkpoint.read_state(out)
    plan = description["plan"]
    assert main(["train", "--resume", str(out)]) == 0
    after, _ = checkpoint.read_state(out)
    for i in range(3):
        own = f".private.members[{i}]"
        key = before[f"{own}.key"].tolist()
        expected = reference(images, i, True, key, plan)
        params, _ = load_member(out / "ensemble.safetensors", i, *templates(images))
        for name, value in expected.items():
            found = after[f"{own}.params['{name}']"]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
            assert torch.equal(params[name], found)
        key = before[".plain.key"].tolist()
        expected = reference(images, i, False, key, plan)
        for name, value in expected.items():
            found = after[f".plain.params['{name}']"][i]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def test_every_member_has_noise_and_batches_of_its_own(images, tmp_path, monkeypatch):
    seen, add_noise = [], dp.Plan.add_noise

    def watched(self, sums, sensitivity, *, key, step):
        zeros = {name: torch.zeros_like(value) for name, value in sums.items()}
        noise = add_noise(self, zeros, sensitivity, key=key, step=step)
        seen.append(noise["1.weight"].numpy().tobytes())
        return add_noise(self, sums, sensitivity, key=key, step=step)

    batches, sample = [], dp.Plan.sample

    def drawing(self, **place):
        batches.append(tuple(sample(self, **place).tolist()))
        return torch.tensor(batches[-1], dtype=torch.int64)

    monkeypatch.setattr(dp.Plan, "add_noise", watched)
    monkeypatch.setattr(dp.Plan, "sample", drawing)
    for more in ([], [FIXED]):
        seen.clear()
        batches.clear()
        assert train(images, tmp_path / f"run{len(more)}", *THREE, *more) == 0
        assert len(set(seen)) == len(seen) == 3 * 8
        assert len(set(batches)) == len(batches) == 3 * 8


def test_the_seed_fixes_the_start_and_never_the_noise(images, tmp_path):
    for name in "ab":
        assert train(images, tmp_path / name, *THREE, "--seed", "5") == 0
    a, b = results(tmp_path / "a"), results(tmp_path / "b")
    assert a["plain.jsonl"] == b["plain.jsonl"]
    assert a["ensemble"] != b["ensemble"]
    for i in range(3):
        name = f".private.members[{i}].key"
        assert a["state"][name] != b["state"][name]


def test_reproducible_noise_repeats_the_run_and_claims_nothing(
    images, tmp_path, capsys
):
    for name in "ab":
        assert train(images, tmp_path / name, *THREE, FIXED) == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert "epsilon of this run may not be claimed" in capsys.readouterr().out
    said = json.loads((tmp_path / "a/ensemble.json").read_text())
    assert said["epsilon"] is None
    assert main(["evaluate", str(tmp_path / "a"), "--data", str(images)]) == 0
    assert "no claim of privacy" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[FIXED], [PLAIN]], ids=["private", "plain"])
def test_killed_at_any_write_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, monkeypatch, more
):
    sync, calls = os.fsync, []

    def counting(descriptor):
        calls.append(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    assert train(images, tmp_path / "whole", *THREE, *more) == 0
    expected, writes = results(tmp_path / "whole"), len(calls)
    assert writes > 20
    for moment in range(0, writes, 4):
        calls.clear()

        def killing(descriptor, moment=moment):
            if len(calls) == moment:
                raise Killed
            counting(descriptor)

        out = tmp_path / f"killed{moment}"
        monkeypatch.setattr(os, "fsync", killing)
        with pytest.raises(Killed):
            train(images, out, *THREE, *more)
        monkeypatch.setattr(os, "fsync", counting)
        if (out / "ensemble.safetensors").exists():
            said = json.loads((out / "ensemble.json").read_text())
            assert said["step"] <= checkpoint.read_state(out)[1]["step"]
        if (out / "state.safetensors").exists():
            assert main(["train", "--resume", str(out)]) == 0
        else:
            assert train(images, out, *THREE, *more) == 0
        assert results(out) == expected


def test_the_text_tells_what_was_spent_before_the_values_do(
    images, tmp_path, monkeypatch
):
    out, written = tmp_path / "run", []
    swap = os.replace

    def replace(source, target):
        swap(source, target)
        written.append(os.path.basename(target))

    monkeypatch.setattr(os, "replace", replace)
    assert train(images, out, *THREE, PLAIN) == 0
    released = [name for name in written if name.startswith("ensemble.")]
    # Before the first epoch and after each.
    assert released == ["ensemble.json", "ensemble.safetensors"] * 3


def test_a_finished_run_stays_as_it_is_and_its_folder_is_taken(
    images, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train(images, out, *THREE, PLAIN) == 0
    before = {path: (path.read_bytes(), path.stat()) for path in out.iterdir()}
    assert main(["train", "--resume", str(out)]) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out
    assert before == {path: (path.read_bytes(), path.stat()) for path in out.iterdir()}
    for name in ("ensemble.safetensors", "ensemble.json", "reliability.png"):
        other = tmp_path / f"only {name}"
        other.mkdir()
        (other / name).write_text("mine")
        message = error(capsys, "train", "--out", other, *arguments(images))
        assert f"got one with {name}" in message


def test_without_privacy_there_is_nothing_of_it(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(images, out, *THREE, PLAIN) == 0
    assert not (out / "metrics.jsonl").exists()
    state, description = checkpoint.read_state(out)
    assert description["plan"] == {}
    assert all(name.startswith(".plain") for name in state)
    params, _ = load_ensemble(
        out / "ensemble.safetensors",
        *(
            {n: v.expand(3, *v.shape) for n, v in one.items()}
            for one in templates(images)
        ),
    )
    for name, value in params.items():
        assert torch.equal(value, state[f".plain.params['{name}']"])
    said = json.loads((out / "ensemble.json").read_text())
    assert (said["epsilon"], said["delta"], said["plan"]) == (None, None, None)
    shown = capsys.readouterr().out
    assert "trained without privacy" in shown
    assert "For release" not in shown
    # It is the same run that is beside a private one.
    assert train(images, tmp_path / "both", *THREE) == 0
    assert results(tmp_path / "both")["plain.jsonl"] == results(out)["plain.jsonl"]
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    assert "(trained without privacy)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([PLAIN], "--without-privacy: expected --members 2 or more"),
        ([*THREE, PLAIN, "--epsilon", "3"], "private training, got --epsilon."),
        ([*THREE, PLAIN, "--delta", "1e-5"], "private training, got --delta."),
        ([*THREE, PLAIN, "--max-norm", "1"], "private training, got --max-norm."),
        ([*THREE, PLAIN, FIXED], "private training, got --reproducible-noise."),
        (["--members", "0"], "members=0): expected a whole number >= 1"),
        (["--members", "2.5"], "argument --members: invalid int value"),
        ([*THREE, "--model", "transformer"], "expected one of cnn, mlp, resnet or a"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(
    images, tmp_path, capsys, more, message
):
    command = ["train", "--out", tmp_path / "run", *arguments(images), *more]
    assert message in error(capsys, *command)
    assert not (tmp_path / "run").exists()


def test_arguments_given_again_have_to_be_the_same(
    images, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch)
    resume = ["train", "--resume", out]
    assert "expected --members 3, which" in error(capsys, *resume, "--members", "4")
    message = error(capsys, *resume, PLAIN)
    assert "expected --without-privacy False, which" in message
    assert main(["train", "--resume", str(out), *THREE]) == 0


FACTORY = """
import torch

def normed(*, channels, height, width, classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(channels * height * width, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Linear(8, classes),
    )

class Branching(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.linear = torch.nn.LazyLinear(classes)
        self.linear(torch.zeros(1, 6))

    def forward(self, x):
        if float(self.linear.bias.detach().abs().sum()) > 1e6:
            x = 2 * x
        return self.linear(x.flatten(1))

def branching(*, channels, height, width, classes):
    return Branching(classes)
"""


@pytest.mark.parametrize("name", ["normed", "branching"])
def test_without_privacy_models_need_no_per_sample_gradients(
    images, tmp_path, monkeypatch, capsys, name
):
    (tmp_path / "own_members.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    more = [*THREE, "--model", f"own_members:{name}"]
    refused = ["train", "--out", tmp_path / "private", *arguments(images), *more]
    if name == "normed":
        message = error(capsys, *refused)
        assert "has per-sample gradients" in message
    assert train(images, tmp_path / "run", *more, PLAIN) == 0
    state, description = checkpoint.read_state(tmp_path / "run")
    strategy = description["forms"]["strategy of members"]
    assert strategy == ("auto" if name == "normed" else "loop")
    if name == "normed":
        means = state[".plain.buffers['2.running_mean']"]
        assert len({tuple(row.tolist()) for row in means}) == 3
    again = ["--data", str(images), *more[-2:]]
    assert main(["evaluate", str(tmp_path / "run"), *again]) == 0
    last = lines(tmp_path / "run/plain.jsonl")[-1]["test_accuracy"]
    assert f"accuracy {100 * last:.2f} %" in capsys.readouterr().out
    sys.modules.pop("own_members", None)


def test_evaluate_counts_right_answers_of_ensemble_and_members(
    images, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train(images, out, *THREE) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    shown = capsys.readouterr().out.splitlines()
    held = np.load(images)
    x = torch.from_numpy(held["x_test"]).float()[:, None, None]
    model = models.build("mlp", shape_of(images), seed=0)
    each = []
    for i in range(3):
        params, buffers = load_member(
            out / "ensemble.safetensors", i, *templates(images)
        )
        model.load_state_dict({**params, **buffers})
        each.append(model(x).softmax(1).detach().numpy())
    shares = [np.mean(one.argmax(1) == held["y_test"]) for one in each]
    together = np.mean(sum(each).argmax(1) == held["y_test"])
    last = lines(out / "metrics.jsonl")[-1]
    assert last["test_accuracy"] == pytest.approx(together)
    assert last["member_accuracies"] == pytest.approx(shares)
    assert shown == [
        f"accuracy {100 * together:.2f} % on 30 held-out samples (epsilon "
        f"{last['epsilon']:.3f} at delta 1e-05)",
        *(f"member {i}: accuracy {100 * one:.2f} %" for i, one in enumerate(shares)),
    ]


def test_damaged_and_missing_files_are_one_line(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(images, out, *THREE, PLAIN) == 0
    path = out / "ensemble.json"
    good = path.read_text()
    path.write_text(good[:-9])
    assert "got a damaged file" in error(capsys, "evaluate", out, "--data", images)
    path.write_text(good.replace('"members": 3', '"members": 4'))
    assert "expected 4 members, got 3" in error(
        capsys, "evaluate", out, "--data", images
    )
    path.unlink()
    assert "ensemble.json" in error(capsys, "evaluate", out, "--data", images)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_members_train_in_low_precision_and_go_on(
    images, tmp_path, monkeypatch, precision
):
    monkeypatch.setattr("vgrad.cli.models.warn_if_slow", lambda *given: None)
    more = [FIXED, "--precision", precision]
    assert train(images, tmp_path / "whole", *THREE, *more) == 0
    whole = results(tmp_path / "whole")
    assert all(record["loss"] < 2 for record in whole["plain.jsonl"])
    interrupted(
        images,
        tmp_path / "cut",
        monkeypatch,
        *more,
        where=(checkpoint, "save_members"),
    )
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    assert results(tmp_path / "cut") == whole
    scaled = ["loss_scale" in record for record in whole["plain.jsonl"]]
    assert scaled == [precision == "float16"] * 2


def test_on_a_terminal_the_table_has_a_line_for_every_member(
    images, tmp_path, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    monkeypatch.setattr(
        report, "Console", lambda: Console(file=screen, force_terminal=True)
    )
    assert train(images, tmp_path / "run", *THREE, PLAIN) == 0
    shown = screen.getvalue()
    for text in ("epoch 2/2", "8/8 steps", "plain SGD", "member 0", "member 2"):
        assert text in shown
    assert "private SGD" not in shown


def test_a_line_an_epoch_has_the_ensemble_and_the_range_of_its_members(
    images, tmp_path, capsys
):
    assert train(images, tmp_path / "run", *THREE) == 0
    shown = [
        line for line in capsys.readouterr().out.splitlines() if line[:6] == "epoch "
    ]
    for line, *records in zip(
        shown,
        lines(tmp_path / "run/metrics.jsonl"),
        lines(tmp_path / "run/plain.jsonl"),
        strict=True,
    ):
        for record in records:
            shares = record["member_accuracies"]
            assert f"{100 * record['test_accuracy']:.1f} %" in line
            assert f"{100 * min(shares):.1f} % to {100 * max(shares):.1f} %" in line


def drawn(monkeypatch):
    """Keep the figures instead of writing them."""
    kept = []
    monkeypatch.setattr(report, "_write", lambda figure, path: kept.append(figure))
    return kept


def test_the_diagram_shows_accuracy_over_confidence(monkeypatch, tmp_path):
    kept = drawn(monkeypatch)
    sure = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.65, 0.35], [0.35, 0.65]]).log()
    lost = torch.full((1, 2), torch.nan)
    logits = torch.cat([sure, lost]).expand(2, 5, 2)
    labels = torch.tensor([0, 1, 0, 1, 0])
    report.write_reliability(tmp_path, {"plain SGD": logits}, labels)
    above, below = kept[0].axes
    line = next(one for one in above.lines if one.get_label() == "plain SGD")
    np.testing.assert_allclose(line.get_xdata(), [0.65, 0.95], rtol=1e-6)
    np.testing.assert_allclose(line.get_ydata(), [1.0, 0.5], rtol=1e-6)
    assert list(below.lines[0].get_ydata()) == [2, 2]


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_the_most_uncertain_samples_come_first(monkeypatch, tmp_path, channels):
    kept = drawn(monkeypatch)
    sure = torch.linspace(3, 0, 40)
    logits = torch.stack([sure, torch.zeros(40)], 1).expand(2, 40, 2).clone()
    logits[:, 7] = torch.nan
    images = torch.rand(40, channels, 2, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 2
    report.write_uncertain(tmp_path, logits, images, labels)
    titles = [axes.get_title() for axes in kept[0].axes if axes.get_title()]
    assert len(titles) == 24
    assert "nan" in titles[0]
    assert titles[1].startswith("0 (is 1)\nentropy 0.69")
    shown = np.asarray(kept[0].axes[1].images[0].get_array())
    assert shown.shape == ((2, 3, 3) if channels == 3 else (2, 3))
    expected = images[39].permute(1, 2, 0) if channels == 3 else images[39].mean(0)
    scaled = (shown - shown.min()) / (shown.max() - shown.min())
    expected = (expected - expected.min()) / (expected.max() - expected.min())
    np.testing.assert_allclose(scaled, expected, atol=1e-5)


def test_only_whole_files_are_left(images, tmp_path, monkeypatch):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch, PLAIN, where=(files, "replace"))
    assert main(["train", "--resume", str(out)]) == 0
    assert not [name for name in os.listdir(out) if name.endswith(".partial")]

"""The main job for deep ensembles: what it trains, spends, writes and shows."""

import contextlib
import io
import os
import stat

import numpy as np
import pytest
import torch

import vgrad.cli
from tests.cli.runs import (
    BATCH,
    FIXED,
    KEYS,
    PLAIN,
    SIZE,
    THREE,
    arguments,
    built,
    error,
    held_out,
    interrupted,
    lines,
    reference,
    results,
    resume,
    said,
    train,
    watch_noise,
    watched,
)
from vgrad import dp
from vgrad.__main__ import main
from vgrad.cli import checkpoint, report
from vgrad.ensemble import member_seed


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Folders of two finished runs, one of them without privacy, and what they said."""
    folder, shown = tmp_path_factory.mktemp("runs"), {}
    for name, more in (("private", ["--epsilon", "2"]), ("plain", [PLAIN])):
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            assert train(images, folder / name, *THREE, *more) == 0
        shown[name] = screen.getvalue()
    return folder, shown


def templates(images):
    return vgrad.make_functional_with_buffers(built(images))[1:]


def test_a_run_writes_what_it_promises(runs):
    out = runs[0] / "private"
    pictures = ["curves.png", "reliability.png", "uncertain.png", "report.html"]
    parts = ["ensemble.json", "ensemble.safetensors", "state.json", "state.safetensors"]
    assert set(os.listdir(out)) == {*pictures, *parts, "metrics.jsonl", "plain.jsonl"}
    for name in ("metrics.jsonl", "plain.jsonl"):
        records = lines(out / name)
        assert [list(each) for each in records] == [[*KEYS, "member_accuracies"]] * 2
        assert [each["step"] for each in records] == [4, 8]
        assert [len(each["member_accuracies"]) for each in records] == [3, 3]
    for name in ("state.json", "state.safetensors"):
        assert stat.S_IMODE((out / name).stat().st_mode) == 0o600


def test_the_budget_is_that_of_all_members_together(images, runs, tmp_path):
    out, shown = runs[0] / "private", runs[1]["private"]
    plan = said(out)["plan"]
    assert plan["steps"] == 3 * 8
    run = {"sampling_rate": BATCH / SIZE, "delta": 1e-5}
    run |= {"noise_multiplier": plan["noise_multiplier"]}
    found = [each["epsilon"] for each in lines(out / "metrics.jsonl")]
    assert found == [dp.epsilon(**run, steps=3 * 4), dp.epsilon(**run, steps=3 * 8)]
    assert 1.98 < found[-1] <= 2
    assert all(each["epsilon"] is None for each in lines(out / "plain.jsonl"))
    told = said(out, "ensemble.json")
    assert (told["epsilon"], told["delta"], told["members"]) == (found[-1], 1e-5, 3)
    assert "24 steps on the same data" in shown
    assert f"with epsilon {found[-1]:.3f} at delta 1e-05" in shown
    # One model has the budget for itself.
    assert train(images, tmp_path / "one", "--epsilon", "2") == 0
    assert said(tmp_path / "one")["plan"]["noise_multiplier"] < plan["noise_multiplier"]


def test_members_are_what_plain_torch_computes_for_each_of_them(images, tmp_path):
    out = tmp_path / "run"
    more = [*THREE, FIXED, "--max-norm", "0.8"]
    interrupted(images, out, *more, where=(report, "display"))
    before, description = checkpoint.read_state(out)
    plan = description["plan"]
    assert resume(out) == 0
    after, _ = checkpoint.read_state(out)
    for i in range(3):
        own, member = f".private.members[{i}]", {"member": i, "seed": member_seed(0, i)}
        key = before[f"{own}.key"].tolist()
        expected = reference(images, key, plan, True, **member)
        params = dict(vgrad.cli.load(out, member=i).named_parameters())
        for name, value in expected.items():
            found = after[f"{own}.params['{name}']"]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
            assert torch.equal(params[name], found)
        key = before[".plain.key"].tolist()
        expected = reference(images, key, plan, False, **member, members=3)
        for name, value in expected.items():
            found = after[f".plain.params['{name}']"][i]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("more", [[], [FIXED]], ids=["secret", "fixed"])
def test_every_member_has_noise_and_batches_of_its_own(
    images, tmp_path, monkeypatch, more
):
    noise, batches = watch_noise(monkeypatch), []

    def drawn(index, plan, **place):
        batches.append(tuple(index.tolist()))

    watched(monkeypatch, dp.Plan, "sample", drawn)
    assert train(images, tmp_path / "run", *THREE, *more) == 0
    assert len(set(noise)) == len(noise) == 3 * 8
    assert len(set(batches)) == len(batches) == 3 * 8


def test_the_text_tells_what_was_spent_before_the_values_do(
    images, tmp_path, monkeypatch
):
    written = []

    def replaced(done, source, target):
        written.append(os.path.basename(target))

    watched(monkeypatch, os, "replace", replaced)
    assert train(images, tmp_path / "run", *THREE, PLAIN) == 0
    released = [name for name in written if name.startswith("ensemble.")]
    # Before the first epoch and after each.
    assert released == ["ensemble.json", "ensemble.safetensors"] * 3


def test_without_privacy_there_is_nothing_of_it(images, runs, tmp_path, capsys):
    out, shown = runs[0] / "plain", runs[1]["plain"]
    assert not (out / "metrics.jsonl").exists()
    state, description = checkpoint.read_state(out)
    assert description["plan"] == {}
    assert all(name.startswith(".plain") for name in state)
    _, params, _ = vgrad.cli.load(out)
    for name, value in params.items():
        assert torch.equal(value, state[f".plain.params['{name}']"])
    told = said(out, "ensemble.json")
    assert (told["epsilon"], told["delta"], told["plan"]) == (None, None, None)
    assert "trained without privacy" in shown
    assert "For release" not in shown
    # It is the same run that is beside a private one.
    both = results(runs[0] / "private")
    assert both["plain.jsonl"] == results(out)["plain.jsonl"]
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    assert "(trained without privacy)" in capsys.readouterr().out


FACTORY = """
def normed(*, channels, height, width, classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(channels * height * width, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Linear(8, classes),
    )

class InNumPy(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.linear = torch.nn.LazyLinear(classes)
        self.linear(torch.zeros(1, 6))

    def forward(self, x):
        if abs(self.linear.bias.detach().numpy()).sum() > 1e6:
            x = 2 * x
        return self.linear(x.flatten(1))

def in_numpy(*, channels, height, width, classes):
    return InNumPy(classes)
"""


@pytest.mark.parametrize("name", ["normed", "in_numpy"])
def test_without_privacy_models_need_no_per_sample_gradients(
    images, tmp_path, capsys, module, name
):
    module("own_members", FACTORY)
    more = [*THREE, "--model", f"own_members:{name}"]
    if name == "normed":
        refused = ["train", "--out", tmp_path / "private", *arguments(images), *more]
        assert "has per-sample gradients" in error(capsys, *refused)
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


def test_evaluate_counts_right_answers_of_ensemble_and_members(images, runs, capsys):
    out = runs[0] / "private"
    assert main(["evaluate", str(out), "--data", str(images)]) == 0
    shown = capsys.readouterr().out.splitlines()
    x, y = held_out(images)
    model, each = built(images), []
    for i in range(3):
        model.load_state_dict(vgrad.cli.load(out, member=i).state_dict())
        each.append(model(x).softmax(1).detach().numpy())
    shares = [np.mean(one.argmax(1) == y) for one in each]
    together = np.mean(sum(each).argmax(1) == y)
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
    path, judge = out / "ensemble.json", ["evaluate", out, "--data", images]
    good = path.read_text()
    path.write_text(good[:-9])
    assert "got a damaged file" in error(capsys, *judge)
    path.write_text(good.replace('"members": 3', '"members": 4'))
    assert "expected 4 members, got 3" in error(capsys, *judge)
    path.unlink()
    assert "ensemble.json" in error(capsys, *judge)


def test_a_line_an_epoch_has_the_ensemble_and_the_range_of_its_members(runs):
    shown = runs[1]["private"].splitlines()
    figures = (
        lines(runs[0] / f"private/{name}.jsonl") for name in ("metrics", "plain")
    )
    for line, *records in zip(
        [line for line in shown if line[:6] == "epoch "], *figures, strict=True
    ):
        for record in records:
            shares = record["member_accuracies"]
            assert f"{100 * record['test_accuracy']:.1f} %" in line
            assert f"{100 * min(shares):.1f} % to {100 * max(shares):.1f} %" in line

"""The main job in each precision: its passes, its files, its warnings."""

import sys

import numpy as np
import pytest
import torch

from tests.cli import runs
from vgrad.__main__ import main
from vgrad.cli import checkpoint, report

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
EVERY = pytest.mark.parametrize("name", DTYPES)


def supported(monkeypatch, **answers):
    """Set the abilities of oneDNN."""
    for name, answer in answers.items():
        op = f"_is_mkldnn_{name}_supported"
        monkeypatch.setattr(torch.ops.mkldnn, op, lambda answer=answer: answer)


@pytest.fixture(scope="module", autouse=True)
def fast():
    """Have a CPU that no one is warned of."""
    with pytest.MonkeyPatch.context() as patch:
        supported(patch, bf16=True, fp16=True)
        yield


OWN = """
SEEN = []
class Own(torch.nn.Linear):
    def forward(self, x):
        scores = super().forward(x.flatten(1))
        SEEN.append(scores.dtype)
        return scores
def make(*, channels, height, width, classes):
    return Own(width, classes)
"""


@EVERY
def test_every_forward_pass_runs_in_the_precision(images, tmp_path, module, name):
    out, own = tmp_path / "run", ["--model", module("own_dtype", OWN)]
    assert runs.train(images, out, "--precision", name, *own) == 0
    seen = sys.modules["own_dtype"].SEEN
    assert len(seen) > 16
    assert {*seen} - {torch.float64} == {DTYPES[name]}  # in which two samples compare
    judge = ["evaluate", str(out), "--data", str(images), *own]
    seen.clear()
    assert main(judge) == 0
    assert seen == [DTYPES[name]]


def test_skipped_steps_are_counted_and_the_scale_has_followed(images, tmp_path):
    held = dict(np.load(images))
    images = tmp_path / "large.npz"
    np.savez(images, **{**held, "x_train": 100 * held["x_train"]})
    out = tmp_path / "run"
    assert runs.train(images, out, "--precision", "float16", epochs=4) == 0
    records = runs.lines(out / "plain.jsonl")
    skipped = [each["skipped"] for each in records]
    assert 0 < skipped[0] <= 4
    assert [each["loss_scale"] for each in records] == [
        2.0**15 / 2.0 ** sum(skipped[: number + 1]) for number in range(4)
    ]
    private = runs.lines(out / "metrics.jsonl")
    assert {(each["loss_scale"], each["skipped"]) for each in private} == {(2**10, 0)}
    parameters = checkpoint.load(out).parameters()
    assert all(bool(value.isfinite().all()) for value in parameters)


@pytest.mark.parametrize(
    ("name", "bf16", "advice"),
    [
        ("float16", True, "bfloat16, or a GPU"),
        ("float16", False, "float32, or a GPU"),
        ("bfloat16", False, "float32, or a GPU"),
    ],
)
def test_a_cpu_without_the_instructions_is_warned_of_once_before_the_first_step(
    images, tmp_path, monkeypatch, name, bf16, advice
):
    supported(monkeypatch, bf16=bf16, fp16=False)
    text = f"--precision {name}: this CPU lacks .* 50 times as long .* {advice}"
    out = tmp_path / "run"
    with pytest.warns(UserWarning, match=text), runs.killed(report, "show_epoch"):
        runs.train(images, out, "--precision", name)
    assert int(runs.state_of(out)[".private.step"]) == 4
    with pytest.warns(UserWarning, match=text) as warned:
        assert runs.resume(out) == 0
    assert len(warned) == 1

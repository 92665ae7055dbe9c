"""The main job in each precision: what computes in it, what is kept, what is said."""

import json
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

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
    interrupted,
    lines,
    results,
    stop,
    train,
    write_data,
)
from vgrad import files, optim
from vgrad.__main__ import main
from vgrad.cli import checkpoint, data, models, report
from vgrad.cli.arguments import Settings
from vgrad.cli.setup import prepare
from vgrad.dp import accounting
from vgrad.training import TrainState, private_step, train_step

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SCALE = ["loss_scale", "skipped"]
FIXED = "--reproducible-noise"


def supported(monkeypatch, **answers):
    """Let oneDNN say what it can do."""
    for name, answer in answers.items():
        op = f"_is_mkldnn_{name}_supported"
        monkeypatch.setattr(torch.ops.mkldnn, op, lambda answer=answer: answer)


def quicken(monkeypatch):
    """Ask the accountant once only, and have a CPU that no one is warned of."""
    for name in ("epsilon", "noise_multiplier_for"):
        monkeypatch.setattr(accounting, name, cached(name))
    supported(monkeypatch, bf16=True, fp16=True)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quicken(monkeypatch)


@pytest.fixture
def images(tmp_path):
    return write_data(tmp_path / "images.npz")


def train_in(name, images, out, *more, epochs=2):
    return train(images, out, "--precision", name, *more, epochs=epochs)


def killed(images, out, monkeypatch, *more):
    """Leave a run of which one epoch of two is done."""
    save, saved = checkpoint.save_model, []

    def killing(*args):
        save(*args)
        saved.append(args)
        if len(saved) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_model", killing)
        with pytest.raises(Killed):
            train(images, out, *more)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folders of one short run on the digits in each precision."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        for name in DTYPES:
            out = ["--out", str(folder / name), "--precision", name, FIXED]
            sizes = ["--model", "mlp", "--batch-size", "240", "--epochs", "4"]
            assert main(["train", *out, *sizes]) == 0
    return folder


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("which", ["metrics", "plain"])
def test_digits_are_learned_as_well_as_in_float32(digits, name, which):
    first, *_, last = lines(digits / name / f"{which}.jsonl")
    full = lines(digits / "float32" / f"{which}.jsonl")[-1]
    assert last["loss"] < first["loss"]
    assert last["loss"] == pytest.approx(full["loss"], rel=0.02)
    assert last["loss"] != full["loss"]
    assert last["test_accuracy"] == pytest.approx(full["test_accuracy"], abs=0.03)
    assert last["epsilon"] == full["epsilon"]


@pytest.mark.parametrize("name", DTYPES)
def test_only_runs_with_a_loss_scale_have_it_in_their_figures(digits, name):
    more = SCALE if name == "float16" else []
    for which, scale in (("metrics", 2.0**10), ("plain", 2.0**15)):
        for each in lines(digits / name / f"{which}.jsonl"):
            assert list(each) == KEYS + more
            if more:
                assert (each["loss_scale"], each["skipped"]) == (scale, 0)


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_saved_is_float32(digits, name):
    state, _ = checkpoint.read_state(digits / name)
    floating = {key: value for key, value in state.items() if value.is_floating_point()}
    assert len([key for key in floating if ".params" in key]) == 8
    assert {value.dtype for value in floating.values()} == {torch.float32}
    parameters = checkpoint.load(digits / name).parameters()
    assert {value.dtype for value in parameters} == {torch.float32}


OWN = """
import torch
SEEN = []
class Own(torch.nn.Linear):
    def forward(self, x):
        scores = super().forward(x.flatten(1))
        SEEN.append(scores.dtype)
        return scores
def make(*, channels, height, width, classes):
    return Own(width, classes)
"""


@pytest.mark.parametrize("name", DTYPES)
def test_every_forward_pass_runs_in_the_precision(images, tmp_path, monkeypatch, name):
    (tmp_path / "own_dtype.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert train_in(name, images, out, "--model", "own_dtype:make") == 0
    seen = sys.modules["own_dtype"].SEEN
    assert len(seen) > 16
    assert set(seen) == {DTYPES[name]}
    seen.clear()
    again = ["--data", str(images), "--model", "own_dtype:make"]
    assert main(["evaluate", str(out), *again]) == 0
    assert seen == [DTYPES[name]]
    sys.modules.pop("own_dtype")


@pytest.mark.parametrize("name", DTYPES)
def test_evaluate_finds_the_accuracy_that_the_run_had(digits, capsys, name):
    assert main(["evaluate", str(digits / name)]) == 0
    share = lines(digits / name / "metrics.jsonl")[-1]["test_accuracy"]
    assert capsys.readouterr().out.startswith(f"accuracy {100 * share:.2f} % on 359")


def test_a_model_that_does_not_say_its_precision_is_of_float32(
    images, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_dtype.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert train_in("bfloat16", images, out, "--model", "own_dtype:make") == 0
    path = out / "model.safetensors"
    tensors, description = files.read_tensors(path, "model")
    del description["precision"]
    files.write_tensors(path, tensors, description)
    seen = sys.modules["own_dtype"].SEEN
    seen.clear()
    again = ["--data", str(images), "--model", "own_dtype:make"]
    assert main(["evaluate", str(out), *again]) == 0
    assert seen == [torch.float32]
    sys.modules.pop("own_dtype")


def reference(images, key, plan, private, dtype, steps):
    """Train in plain torch under its own autocast, sample by sample."""
    held = np.load(images)
    x = torch.from_numpy(held["x_train"]).float()[:, None, None]
    y = torch.from_numpy(held["y_train"])
    shape = data.load(str(images), seed=0).shape
    model = models.build("mlp", shape, seed=0)
    params = list(model.parameters())
    own = streams.of_plan(key, plan)
    sizes = {"multiplier": plan["noise_multiplier"], "sensitivity": 0.8 / BATCH}
    for step in range(steps):
        if private:
            index = streams.batch(own, step, SIZE, BATCH / SIZE)
        else:
            order = torch.randperm(SIZE, generator=streams.shuffle(key, step))
            index = order[:BATCH].tolist()
        total = [torch.zeros_like(param) for param in params]
        for row in index:
            with torch.autocast("cpu", dtype=dtype):
                scores = model(x[row : row + 1])
                loss = torch.nn.functional.cross_entropy(scores, y[row : row + 1])
            grads = torch.autograd.grad(1024 * loss, params)
            grads = [grad / 1024 for grad in grads]
            norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
            factor = min(1.0, 0.8 / norm) if private else 1.0
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
    return {key: param.detach() for key, param in model.named_parameters()}


@pytest.mark.parametrize("which", ["private", "plain"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_both_runs_are_what_torch_computes_under_autocast(
    images, tmp_path, monkeypatch, name, which
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(report, "display", stop)
        with pytest.raises(Killed):
            train_in(name, images, out, FIXED, "--max-norm", "0.8")
    before, description = checkpoint.read_state(out)
    key = before[f".{which}.key"].tolist()
    assert main(["train", "--resume", str(out)]) == 0
    after, _ = checkpoint.read_state(out)
    rest = which == "private", DTYPES[name], 8
    expected = reference(images, key, description["plan"], *rest)
    # One rounding in bfloat16 is 2**-8, in float16 2**-11; gradients are of order one.
    error = {"bfloat16": 0.01, "float16": 0.001}[name]
    for key, value in expected.items():
        found = after[f".{which}.params['{key}']"]
        torch.testing.assert_close(found, value, rtol=0, atol=error)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_killed_a_run_goes_on_with_the_same_numbers(
    images, tmp_path, monkeypatch, name
):
    more = ["--precision", name, FIXED]
    assert train(images, tmp_path / "whole", *more) == 0
    killed(images, tmp_path / "killed", monkeypatch, *more)
    assert main(["train", "--resume", str(tmp_path / "killed")]) == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_a_checkpoint_has_the_loss_scales_from_the_start(images, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(report, "display", stop)
        with pytest.raises(Killed):
            train_in("float16", images, out)
    before, _ = checkpoint.read_state(out)
    assert main(["train", "--resume", str(out)]) == 0
    after, _ = checkpoint.read_state(out)
    assert before.keys() == after.keys()
    scales = {key: value.item() for key, value in after.items() if "scale" in key}
    assert scales == {
        ".private.loss_scale.loss_scale": 2.0**10,
        ".plain.loss_scale.loss_scale": 2.0**15,
        ".plain.loss_scale.counter": 8,
    }


def test_the_scales_are_those_that_the_steps_take_by_themselves(images):
    sizes = {"data": str(images), "model": "mlp", "batch_size": BATCH}
    job = prepare(Settings(**sizes, precision="float16"))
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(torch.nn.Linear(2, 3))
    tx, loss, policy = optim.sgd(0.1), torch.nn.functional.cross_entropy, "c=float16"
    steps = (
        private_step(vgrad.sample_loss(fmodel, loss), tx, job.plan, policy=policy),
        train_step(vgrad.batch_loss(fmodel, loss), tx, policy=policy),
    )
    state = TrainState.create(tx, params, buffers)
    for step, start in zip(steps, job.start, strict=True):
        own, _ = step(state, torch.ones(4, 2), torch.arange(4) % 3)
        found, expected = start.loss_scale, own.loss_scale
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
        assert found.loss_scale == expected.loss_scale


def test_skipped_steps_are_counted_and_the_scale_has_followed(images, tmp_path):
    held = dict(np.load(images))
    images = tmp_path / "large.npz"
    np.savez(images, **{**held, "x_train": 100 * held["x_train"]})
    out = tmp_path / "run"
    assert train_in("float16", images, out, epochs=4) == 0
    records = lines(out / "plain.jsonl")
    skipped = [each["skipped"] for each in records]
    assert 0 < skipped[0] <= 4
    assert [each["loss_scale"] for each in records] == [
        2.0**15 / 2.0 ** sum(skipped[: number + 1]) for number in range(4)
    ]
    private = lines(out / "metrics.jsonl")
    assert {(each["loss_scale"], each["skipped"]) for each in private} == {(2**10, 0)}
    parameters = checkpoint.load(out).parameters()
    assert all(bool(value.isfinite().all()) for value in parameters)


def test_a_run_goes_on_in_its_own_precision_only(images, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    interrupted(images, out, monkeypatch, "--precision", "bfloat16")
    before = results(out)
    resume = ["train", "--resume", out]
    for other in ("float32", "float16"):
        message = error(capsys, *resume, "--precision", other)
        told = f"which the run was started with, got {other}. Leave it out"
        assert f"expected --precision bfloat16, {told}" in message
    assert results(out) == before
    with monkeypatch.context() as patch:
        patch.setattr("vgrad.cli.models.instructions", lambda: ["another"])
        assert "instructions in low precision in machine" in error(capsys, *resume)
    assert json.loads((out / "state.json").read_text())["arguments"]["precision"] == (
        "bfloat16"
    )
    assert main(["train", "--resume", str(out), "--precision", "bfloat16"]) == 0


def test_an_unknown_precision_is_one_line_and_leaves_no_trace(images, tmp_path, capsys):
    more = ["--precision", "half"]
    command = ["train", "--out", tmp_path / "run", *arguments(images, *more)]
    message = error(capsys, *command)
    assert "precision='half'): expected one of 'float32', 'bfloat16', 'flo" in message
    assert not (tmp_path / "run").exists()


WARNED = {
    "float16, bfloat16 is fast": ("float16", True, "bfloat16, or a GPU"),
    "float16, nothing is fast": ("float16", False, "float32 .bfloat16 is as slow here"),
    "bfloat16, nothing is fast": ("bfloat16", False, "float32, or a GPU"),
}


@pytest.mark.parametrize("case", WARNED)
def test_a_cpu_without_the_instructions_is_warned_of_once_before_the_first_step(
    images, tmp_path, monkeypatch, case
):
    name, bf16, advice = WARNED[case]
    supported(monkeypatch, bf16=bf16, fp16=False)
    told = f"--precision {name}: this CPU lacks .* 50 times as long .* {advice}"
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(report, "display", stop)
        with pytest.warns(UserWarning, match=told), pytest.raises(Killed):
            train_in(name, images, out)
    assert int(checkpoint.read_state(out)[0][".private.step"]) == 0
    with pytest.warns(UserWarning, match=told) as said:
        assert main(["train", "--resume", str(out)]) == 0
    assert len(said) == 1


def test_nothing_is_said_where_there_is_no_reason_to(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supported(monkeypatch, bf16=False, fp16=False)
        models.warn_if_slow("float32", "cpu")
        models.warn_if_slow("float16", "cuda:0")
        supported(monkeypatch, bf16=True, fp16=True)
        models.warn_if_slow("float16", "cpu")
        # A torch that cannot tell.
        monkeypatch.setattr(models, "_SUPPORTED", {"float16": "_no_such_op"})
        models.warn_if_slow("float16", "cpu")


def test_instructions_are_those_that_torch_finds(monkeypatch):
    found = {"avx512_bf16": True, "amx_fp16": False, "f16c": True, "avx_vnni_int16": 1}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert models.instructions() == ["avx512_bf16", "f16c"]
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert models.instructions() == []

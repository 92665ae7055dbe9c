"""The main job in each precision: what computes in it, what is kept, what is said."""

import sys
import warnings

import numpy as np
import pytest
import torch

import vgrad
from tests import oracle
from tests.cli import runs
from vgrad import files, optim
from vgrad.__main__ import main
from vgrad.cli import checkpoint, models, report, settings, setup
from vgrad.torch_private import kernels
from vgrad.training import TrainState, private_step, train_step

SCALE = ["loss_scale", "skipped"]
LOW = pytest.mark.parametrize("name", ["bfloat16", "float16"])
EVERY = pytest.mark.parametrize("name", runs.DTYPES)


def supported(monkeypatch, **answers):
    """Let oneDNN say what it can do."""
    for name, answer in answers.items():
        op = f"_is_mkldnn_{name}_supported"
        monkeypatch.setattr(torch.ops.mkldnn, op, lambda answer=answer: answer)


@pytest.fixture(scope="module", autouse=True)
def fast():
    """Have a CPU that no one is warned of."""
    with pytest.MonkeyPatch.context() as patch:
        supported(patch, bf16=True, fp16=True)
        yield


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folders of one short run on the digits in each precision."""
    folder = tmp_path_factory.mktemp("digits")
    for name in runs.DTYPES:
        out = ["--out", str(folder / name), "--precision", name, runs.FIXED]
        sizes = ["--model", "mlp", "--batch-size", "240", "--epochs", "4"]
        assert main(["train", *out, *sizes]) == 0
    return folder


@LOW
@pytest.mark.parametrize("which", ["metrics", "plain"])
def test_digits_are_learned_as_well_as_in_float32(digits, name, which):
    first, *_, last = runs.lines(digits / name / f"{which}.jsonl")
    full = runs.lines(digits / "float32" / f"{which}.jsonl")[-1]
    assert last["loss"] < first["loss"]
    assert last["loss"] == pytest.approx(full["loss"], rel=0.02)
    assert last["loss"] != full["loss"]
    assert last["test_accuracy"] == pytest.approx(full["test_accuracy"], abs=0.03)
    assert last["epsilon"] == full["epsilon"]


@EVERY
def test_only_runs_with_a_loss_scale_have_it_in_their_figures(digits, name):
    more = SCALE if name == "float16" else []
    for which, scale in (("metrics", 2.0**10), ("plain", 2.0**15)):
        for each in runs.lines(digits / name / f"{which}.jsonl"):
            assert list(each) == runs.KEYS + more
            if more:
                assert (each["loss_scale"], each["skipped"]) == (scale, 0)


@EVERY
def test_what_is_saved_is_float32(digits, name):
    state, _ = checkpoint.read_state(digits / name)
    floating = {key: value for key, value in state.items() if value.is_floating_point()}
    assert len([key for key in floating if ".params" in key]) == 8
    assert {value.dtype for value in floating.values()} == {torch.float32}
    parameters = checkpoint.load(digits / name).parameters()
    assert {value.dtype for value in parameters} == {torch.float32}


@EVERY
def test_evaluate_finds_the_accuracy_that_the_run_had(digits, capsys, name):
    assert main(["evaluate", str(digits / name)]) == 0
    share = runs.lines(digits / name / "metrics.jsonl")[-1]["test_accuracy"]
    assert capsys.readouterr().out.startswith(f"accuracy {100 * share:.2f} % on 359")


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
    assert set(seen) == {runs.DTYPES[name]}
    judge = ["evaluate", str(out), "--data", str(images), *own]
    seen.clear()
    assert main(judge) == 0
    assert seen == [runs.DTYPES[name]]
    # A model that does not say its precision is of float32.
    path = out / "model.safetensors"
    tensors, description = files.read_tensors(path, "model")
    del description["precision"]
    files.write_tensors(path, tensors, description)
    seen.clear()
    assert main(judge) == 0
    assert seen == [torch.float32]


@EVERY
def test_both_runs_are_what_torch_computes_sample_by_sample(images, tmp_path, name):
    out = tmp_path / "run"
    more = ["--precision", name, runs.FIXED, "--max-norm", "0.8"]
    runs.interrupted(images, out, *more, where=(report, "display"))
    before, description = checkpoint.read_state(out)
    assert runs.resume(out) == 0
    after, _ = checkpoint.read_state(out)
    # One rounding in bfloat16 is 2**-8, in float16 2**-11; gradients are of order one.
    rtol = 1e-4 if name == "float32" else 0
    atol = {"float32": 1e-5, "bfloat16": 0.01, "float16": 0.001}[name]
    for which in ("private", "plain"):
        key, private = before[f".{which}.key"].tolist(), which == "private"
        dtype = None if name == "float32" else runs.DTYPES[name]
        expected = runs.reference(
            images, key, description["plan"], private, dtype=dtype
        )
        for key, value in expected.items():
            found = after[f".{which}.params['{key}']"]
            torch.testing.assert_close(found, value, rtol=rtol, atol=atol)


def test_a_checkpoint_has_the_loss_scales_from_the_start(images, tmp_path):
    out = tmp_path / "run"
    runs.interrupted(images, out, "--precision", "float16", where=(report, "display"))
    before, _ = checkpoint.read_state(out)
    assert runs.resume(out) == 0
    after, _ = checkpoint.read_state(out)
    assert before.keys() == after.keys()
    scales = {key: value.item() for key, value in after.items() if "scale" in key}
    assert scales == {
        ".private.loss_scale.loss_scale": 2.0**10,
        ".plain.loss_scale.loss_scale": 2.0**15,
        ".plain.loss_scale.counter": 8,
    }


def test_the_scales_are_those_that_the_steps_take_by_themselves(images):
    sizes = {"data": str(images), "model": "mlp", "batch_size": runs.BATCH}
    job = setup.prepare(settings.Settings(**sizes, precision="float16"))
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(torch.nn.Linear(2, 3))
    tx, loss, policy = optim.sgd(0.1), torch.nn.functional.cross_entropy, "c=float16"
    steps = (
        private_step(vgrad.sample_loss(fmodel, loss), tx, job.plan, policy=policy),
        train_step(vgrad.batch_loss(fmodel, loss), tx, policy=policy),
    )
    state = TrainState.create(tx, params, buffers)
    for step, trainer in zip(steps, job.trainers.values(), strict=True):
        own, _ = step(state, torch.ones(4, 2), torch.arange(4) % 3)
        found, expected = trainer.start.loss_scale, own.loss_scale
        assert type(found) is type(expected)
        oracle.assert_exact(found.loss_scale, expected.loss_scale, 0)


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
        patch.setattr(report, "display", runs.stop)
        with pytest.warns(UserWarning, match=told), pytest.raises(runs.Killed):
            runs.train(images, out, "--precision", name)
    assert int(checkpoint.read_state(out)[0][".private.step"]) == 0
    with pytest.warns(UserWarning, match=told) as warned:
        assert runs.resume(out) == 0
    assert len(warned) == 1


def test_nothing_is_said_where_there_is_no_reason_to(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supported(monkeypatch, bf16=False, fp16=False)
        models.warn_if_slow("float32", "cpu")
        models.warn_if_slow("float16", "cuda:0")
        supported(monkeypatch, bf16=True, fp16=True)
        models.warn_if_slow("float16", "cpu")
        # A torch that cannot tell.
        monkeypatch.setattr(kernels, "_ON_CPU", {"float16": "_no_such_op"})
        models.warn_if_slow("float16", "cpu")


def test_instructions_are_those_that_torch_finds(monkeypatch):
    found = {"avx512_bf16": True, "amx_fp16": False, "f16c": True, "avx_vnni_int16": 1}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert models.instructions() == ["avx512_bf16", "f16c"]
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert models.instructions() == []

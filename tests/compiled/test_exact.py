"""A capture that is replayed has the bits of eager mode: one contract, three tables."""

import contextlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.compiled.problems import ran, same_calls, same_steps
from vgrad import optim
from vgrad.precision import DynamicLossScale, StaticLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

pytestmark = pytest.mark.compiled
slow = pytest.mark.slow


# Quantities of single samples.


class Row(NamedTuple):
    net: str = "mlp"
    options: dict = {}  # noqa: RUF012
    quick: tuple[str, ...] = ()  # quantities; without them, one that is slow
    dtype: torch.dtype = torch.float32
    size: int = 5
    around: Callable = contextlib.nullcontext
    masked: bool = False


SCALE = StaticLossScale(2.0**7)
DIFFERENT, SAME = {"randomness": "different"}, {"randomness": "same"}


def mixed():
    return torch.autocast("cpu", torch.bfloat16)


def chunked(net="mlp", quick=(), around=contextlib.nullcontext, **options):
    return Row(net, {"chunk_size": 3, **options}, quick, size=7, around=around)


ROWS = {
    "mlp": Row(quick=("flat", "gram, cross")),
    "cnn": Row("cnn", quick=("norm",)),
    "lstm": Row("lstm"),
    "tied": Row("tied"),
    "transformer": Row("transformer"),
    "torch.func inside": Row("inside", quick=("grad",)),
    "float64": Row(dtype=torch.float64, quick=("weighted",)),
    "bfloat16": Row(dtype=torch.bfloat16, quick=("weighted",)),
    "recorded": Row(options={"strategy": "recorded"}, quick=("flat",)),
    "vmap": Row(options={"strategy": "vmap"}, quick=("flat",)),
    "dropout": Row("dropout", DIFFERENT, ("flat",)),
    "the same dropout": Row("dropout", SAME, ("flat",)),
    "chunks": chunked(quick=("flat", "moments")),
    "chunks of the same dropout": chunked("dropout", **SAME),
    "chunks of tied": chunked("tied"),
    "chunks of torch.func": chunked("inside"),
    "chunks that suit the memory": Row(options={"chunk_size": "auto"}),
    "autocast": Row(around=mixed, quick=("per_layer",)),
    "autocast of cnn": Row("cnn", around=mixed),
    "autocast of tied": Row("tied", around=mixed),
    "autocast of lstm": Row("lstm", around=mixed),
    "loss scale": Row("mlp", {"loss_scale": SCALE}, ("automatic",), torch.float16),
    "all options": chunked("lstm, dropout", (), mixed, loss_scale=SCALE, **DIFFERENT),
    "aux": Row(options={"has_aux": True}, quick=("norm", "flat")),
    "aux of chunks": chunked(has_aux=True),
    "masks": Row(masked=True, quick=("gram, cross", "weighted")),
}
EVERY = ("mlp", "all options", "aux", "masks")
"""Rows of every quantity."""


def contract():
    for key, row in ROWS.items():
        for name in problems.TRANSFORMS if key in EVERY else row.quick or ("flat",):
            if not row.options.get("has_aux") or name in problems.HAS_AUX:
                marks = () if name in row.quick else slow
                yield pytest.param(key, name, marks=marks)


@pytest.mark.parametrize(("row", "name"), [*contract()])
def test_captured_quantities_are_those_of_eager_mode(row, name):
    net, options, _, dtype, size, around, masked = ROWS[row]
    loss, params, buffers, draw = problems.built(net, dtype)
    if options.get("has_aux"):
        plain = loss
        loss = lambda p, b, x, y: (plain(p, b, x, y), {"x": x * 2, "y": [y]})  # noqa: E731
    eager = problems.TRANSFORMS[name](loss, **options)
    compiled = vgrad.compile(eager, fallback="error")
    masks = [torch.arange(size) % 2 == n % 2 if masked else None for n in range(3)]
    calls = [(mask, params, buffers, *draw(size)) for mask in masks]
    # Inputs are read at each call: parameters may have moved.
    calls[2] = (masks[2], {n: p * 1.5 for n, p in params.items()}, *calls[2][2:])

    def run(compute):
        def of(mask, *given):
            with around():
                return problems.call(name, compute, given, mask)

        return of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vgrad.FallbackWarning)
        same_calls(run(compiled), run(eager), calls)
    assert {each.backend for each in compiled.reports()} == {"replay"}
    if "chunk_size" not in options:
        ran(compiled, calls=2)
    elif options["chunk_size"] == 3 and size == 7 and not name.startswith("gram"):
        # Of three samples, and of the one that is left.
        assert [each.calls for each in compiled.reports()] == [5, 2]


def test_a_scale_that_moves_is_an_input():
    loss, params, buffers, draw = problems.built("mlp")
    eager = vgrad.clipped_grad(loss, max_norm=0.7, loss_scale=StaticLossScale(2.0))
    compiled = vgrad.compile(eager, fallback="error")

    def scaled(compute):
        return lambda scale, *given: compute.with_loss_scale(scale)(*given)

    scales = [StaticLossScale(torch.tensor(2.0**power)) for power in (1, 4, 30)]
    calls = [(scale, params, buffers, *draw(4)) for scale in scales]
    same_calls(scaled(compiled), scaled(eager), calls)
    ran(compiled, calls=2)


# Steps.


def normed():
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def batch_loss(make=problems.mlp):
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(make())
    return vgrad.batch_loss(fmodel, F.cross_entropy), params, buffers


def members(make=problems.mlp, shared=()):
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.stack([make() for _ in range(3)])
    return fmodel, *vgrad.ensemble.share(params, buffers, shared)


def cloned(*trees):
    return [{name: x.clone() for name, x in each.items()} for each in trees]


FLOAT16 = {"policy": "float16", "loss_scale": DynamicLossScale(2.0**20, period=2)}
TRAIN = {
    "plain": (normed, {}),
    "donated": (normed, {"donate": True}),
    "bfloat16": (problems.mlp, {"policy": "bfloat16"}),
    "float16": (problems.mlp, FLOAT16),
    "float16, donated": (problems.mlp, {"donate": True, **FLOAT16}),
}


@pytest.mark.parametrize(
    "name",
    [n if n.startswith("float16") else pytest.param(n, marks=slow) for n in TRAIN],
)
def test_train_step(name):
    make, options = TRAIN[name]
    loss, params, buffers = batch_loss(make)
    tx, draw = optim.adam(1e-2), losses.vectors(5)
    batches = [draw(6) for _ in range(5)]
    if "loss_scale" in options:
        batches[2][0][0, 0] = 1e9
    compiled, metrics = same_steps(
        lambda: train_step(loss, tx, **options),
        lambda: TrainState.create(tx, *cloned(params, buffers), seed=1),
        batches,
    )
    assert any(each.calls == 4 for each in compiled.reports())
    assert not any(each.redos for each in compiled.reports())
    if "loss_scale" in options:
        skipped = [float(each["skipped"]) for each in metrics]
        assert 0.0 in skipped
        assert skipped[2] == 1.0


def test_train_step_of_single_samples_on_buckets():
    loss, params, buffers, draw = problems.built("mlp", torch.float64)
    tx = optim.adam(1e-2)
    step = train_step(loss, tx, loss_scale=StaticLossScale(2.0**8))
    compiled = vgrad.compile(step, batch_sizes=(4, 8))
    start, batches = (
        TrainState.create(tx, params, buffers, seed=1),
        [*map(draw, (6, 3))],
    )
    batches += map(draw, (7, 9))
    found, expected = (problems.taken(f, start, batches) for f in (compiled, step))
    for (_, metrics), (_, exact) in zip(found, expected, strict=True):
        oracle.assert_exact(metrics["loss"], exact["loss"])
    oracle.assert_exact(found[-1][0].params, expected[-1][0].params)
    assert sum(each.calls for each in compiled.reports()) > 1


def test_a_write_into_a_result_stays_with_the_caller():
    def loss(params, buffers, x):
        aux = {"two": torch.scalar_tensor(2.0), "three": torch.tensor(3.0)}
        return (params["w"] * x).sum(), aux | {"row": torch.scalar_tensor(2.0)[None]}

    tx = optim.sgd(0.1)
    step = vgrad.compile(train_step(loss, tx, has_aux=True), fallback="error")
    state = TrainState.create(tx, {"w": torch.ones(2)}, {})
    for _ in range(4):
        state, metrics = step(state, torch.ones(2))
        assert [each.item() for each in metrics["aux"].values()] == [2.0, 3.0, 2.0]
        for each in metrics["aux"].values():
            each.add_(7)


PLAN = problems.plan(dataset_size=60, sampling_rate=0.2, steps=50)


PRIVATE = {
    "plain": ("mlp", {}),
    "donated": ("mlp", {"donate": True}),
    "dropout": ("dropout", DIFFERENT),
    "the same dropout": ("dropout", SAME),
    "bfloat16": ("mlp", {"policy": "bfloat16"}),
    "float16": ("mlp", {"policy": "float16"}),
    "a dynamic scale": (
        "mlp",
        {"policy": "float16", "loss_scale": DynamicLossScale(2.0**8, period=3)},
    ),
}


@pytest.mark.parametrize(
    "name", [n if n == "dropout" else pytest.param(n, marks=slow) for n in PRIVATE]
)
def test_private_step(name):
    net, options = PRIVATE[name]
    loss, params, buffers, draw = problems.built(net)
    tx = optim.sgd(0.1, momentum=0.9)
    batches = [draw(6) for _ in range(6)]
    batches[3] = tuple(x[:0] for x in batches[3])
    compiled, _ = same_steps(
        lambda: private_step(loss, tx, PLAN, **options),
        lambda: TrainState.create(tx, *cloned(params), buffers, seed=1),
        batches,
        batch_sizes=[6, 12],
    )
    report = next(x for x in compiled.reports() if x.name == "private_step")
    assert report.calls == 4
    # A scale that grows overflows at last.
    assert not report.redos or name == "a dynamic scale"


def poisson(draw, state):
    """Return the batches of a run: those of the plan's sampler, of one data set."""
    torch.manual_seed(3)
    data = draw(PLAN.dataset_size)
    return [tuple(x[list(rows)] for x in data) for rows in PLAN.sampler(state)]


@slow
def test_sizes_follow_from_the_plan():
    loss, params, buffers, draw = problems.built("mlp")
    tx = optim.sgd(0.1)
    start = TrainState.create(tx, params, buffers, seed=1)
    batches, step = poisson(draw, start), private_step(loss, tx, PLAN)
    compiled = vgrad.compile(step, fallback="error")
    found, expected = (problems.taken(f, start, batches) for f in (compiled, step))
    # A batch that is filled up may be rounded in another way.
    for (state, metrics), (exact, others) in zip(found, expected, strict=True):
        oracle.assert_exact(state.params, exact.params, 1e-5)
        for each in ("samples", "clipped", "nonfinite"):
            oracle.assert_exact(metrics[each], others[each], 0)
    assert sum(each.name == "private_step" for each in compiled.reports()) <= 4


ENSEMBLES = {
    "plain": {},
    "donated": {"donate": True},
    "all active": {},
    "all active, donated": {"donate": True},
    "shared": {"shared": ("0.*",)},
    "bfloat16": {"policy": "bfloat16"},
    "float16": {"policy": "float16"},
    "loop": {"strategy": "loop"},
}


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("float16", "all active") else pytest.param(n, marks=slow)
        for n in ENSEMBLES
    ],
)
def test_ensemble_train_step(name):
    options = ENSEMBLES[name]
    shared = options.get("shared", ())
    fmodel, params, buffers = members(lambda: problems.mlp(0.5), shared)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    rates = torch.tensor([0.01, 0.1, 0.2])
    tx = optim.adam(1e-2) if shared else vgrad.for_members(optim.adam, lr=rates)
    draw = losses.vectors(5)
    batches = [[x.expand(3, *x.shape).clone() for x in draw(6)] for _ in range(5)]
    active = torch.tensor([True, True, "all active" in name])
    if not active.all():
        batches[3][0][1] = 1e30  # gradients overflow, for the second member alone

    def start():
        own = cloned(params, buffers)
        state = EnsembleState.create(tx, *own, shared=shared, seed=1)
        return state._replace(active=active)

    compiled, metrics = same_steps(
        lambda: ensemble_train_step(loss, tx, in_dims=0, **options), start, batches
    )
    ran(compiled, calls=4)
    assert float(metrics[3]["skipped"][0]) == float(metrics[3]["skipped"][2]) == 0


# Functions of ensembles.


def forward(strategy, make=problems.mlp, evaluated=True, own=False, **options):
    fmodel, params, buffers = members(make)
    fmodel = fmodel.eval() if evaluated else fmodel
    shape = (3, 4, 5) if own else (4, 5)
    calls = [(params, buffers, torch.randn(*shape)) for _ in range(3)]
    in_dims = 0 if own else None
    eager = vgrad.ensemble_forward(
        fmodel, strategy=strategy, in_dims=in_dims, **options
    )
    return eager, calls


def gradients(strategy, shared=(), aux=False):
    fmodel, params, buffers = members(lambda: problems.mlp(0 if aux else 0.5), shared)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    with_aux = lambda p, b, x, y: (loss(p, b, x, y), {"x": x + 1})  # noqa: E731
    eager = vgrad.ensemble_grad(
        with_aux if aux else loss, strategy=strategy, shared=shared, has_aux=aux
    )
    draw = losses.vectors(5)
    return eager, [(params, buffers, *draw(4)) for _ in range(3)]


FUNCTIONS = {
    "forward": forward,
    "forward of own batches": lambda strategy: forward(strategy, own=True),
    "forward in chunks": lambda strategy: forward(strategy, chunk_size=3),
    "forward with buffers": lambda strategy: forward(strategy, normed, False),
    "grad": gradients,
    "grad of shared parameters": lambda strategy: gradients(strategy, ("0.*",)),
    "grad with aux and loss scales": lambda strategy: gradients(strategy, aux=True),
}


@pytest.mark.parametrize(
    "strategy", ["vmap", *(pytest.param(n, marks=slow) for n in ("hybrid", "loop"))]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_ensembles(name, strategy):
    eager, calls = FUNCTIONS[name](strategy)
    compiled = vgrad.compile(eager, fallback="error")
    if "scales" in name:

        def scaled(compute):
            return lambda scale, *given: compute(*given, loss_scale=scale)

        calls = [(torch.rand(3), *given) for given in calls]
        same_calls(scaled(compiled), scaled(eager), calls)
    elif "buffers" in name:
        same_calls(compiled.with_buffers, eager.with_buffers, calls)
    else:
        same_calls(compiled, eager, calls)
    ran(compiled, calls=2)


def test_a_detached_result_requires_no_grad():
    class Own(torch.nn.Linear):
        def forward(self, x):
            detached = self.weight.detach()
            return super().forward(x), detached, detached.view(-1)

    fmodel, params, buffers = vgrad.combine_state_for_ensemble([Own(2, 2)] * 3)
    eager = vgrad.ensemble_forward(fmodel)
    compiled = vgrad.compile(eager, fallback="error")
    assert params["weight"].requires_grad
    with torch.no_grad():
        for _ in range(3):
            for compute in (eager, compiled):
                found = compute(params, buffers, torch.ones(4, 2))
                assert not any(each.requires_grad for each in found)
    ran(compiled, calls=2)


def test_a_model_of_transformers_is_captured():
    """Its classes hold objects that cannot be compared, which no forward pass uses."""
    library = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = library.BertConfig(vocab_size=20, intermediate_size=16, **sizes)
    torch.manual_seed(0)
    model = library.BertForSequenceClassification(config).eval()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    criterion = lambda output, y: F.cross_entropy(output.logits, y)  # noqa: E731
    eager = vgrad.clipped_grad(vgrad.sample_loss(fmodel, criterion), max_norm=0.5)
    compiled = vgrad.compile(eager, fallback="error")
    for seed in range(2):
        x = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))
        given = params, buffers, x, torch.tensor([0, 1, 0, 1])
        oracle.assert_exact(compiled(*given).grads, eager(*given).grads, 0)
    ran(compiled, calls=1)

"""The recorder, on losses as users write them; the reference is `oracle`'s loop.

Last come losses that cannot be recorded, and what calls and errors leave behind.
"""

import contextlib
import functools
import gc

import pytest
import torch
import torch._dynamo  # whose first import, by an op, keeps the frames around it
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import wrap_torch_function
from torch.utils import _pytree as pytree

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.losses import (
    STRATEGIES,
    Peak,
    assert_gradients,
    assert_quantities,
    every_strategy,
    randn,
    state_of_torch,
)
from tests.persample.test_losses import GRAD_AT_WEIGHTS, W, fixed
from vgrad.factors import Dense
from vgrad.ops import OPS, Op

B, X = 4, randn(4, 3, 4, seed=20)
RECORDED = {"strategy": "recorded"}
# Torch says where it loops over the samples.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def given(shapes):
    named = enumerate(shapes.items(), 1)
    return {name: randn(*shape, seed=n) for n, (name, shape) in named}, (X.clone(),)


def written(text):
    """Make a function of parameters and a sample from an expression or statements."""
    loss = losses.written(text, globals())
    return lambda p, x: loss(p, {}, x)


def out_of(value):
    return value.sin().sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_parameter_in_another_dtype_keeps_its_factor(dtype):
    def run(p, x):
        return F.linear(x.to(dtype), p["w"].to(dtype)).float()

    def reference(params, x):
        return oracle.loss_gradients(
            lambda p, b, x: out_of(F.linear(x, p["w"])), params, {}, (x,)
        )

    params, x = {"w": randn(5, 4).float()}, randn(B, 4).float()
    compute = vgrad.per_sample_norm(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    (row,) = vgrad.explain(compute)(params, {}, x).rows
    assert (row.op, row.factor, row.form) == ("linear", "Outer", "both sides")
    tolerance = max(1e-6, 2 * oracle.rounding(reference, params, x, dtype=dtype))
    options = {"expected": reference(params, x), "tolerance": tolerance}
    losses.assert_quantities(
        lambda p, b, x: out_of(run(p, x)), params, (x,), **options, **RECORDED
    )


def test_parameters_without_a_gradient_have_zeros():
    def run(p, x):
        h = F.linear(x, p["used"])
        F.linear(h, p["dead"])
        return h + (F.linear(x, p["flat"]) * 0).sum() + (x @ p["rounded"]).round().sum()

    shapes = {"used": (5, 4), "dead": (5, 5), "flat": (5, 4), "rounded": (4, 5)}
    shapes |= {"unused": (2, 3, 4), "scalar": ()}
    params, batch = given(shapes)
    assert_quantities(lambda p, b, x: out_of(run(p, x)), params, batch, **RECORDED)
    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    for name, grad in compute(params, {}, *batch).items():
        assert (grad == 0).all() == (name != "used")
        assert (grad.shape, grad.dtype) == ((B, *shapes[name]), torch.float64)


@every_strategy
def test_a_loss_without_any_parameter_has_zeros(strategy):
    compute = vgrad.clipped_grad(
        lambda p, b, x: x.sum(), max_norm=1.0, strategy=strategy
    )
    params, batch = given(W)
    found = compute(params, {}, *batch)
    assert torch.equal(found.grads["w"], torch.zeros(5, 4, dtype=torch.float64))
    assert not found.norms.any()


SAVED = {
    "linear": ("F.linear(x, w)", (5, 4)),
    "matmul": ("x @ w", (4, 5)),
    "einsum": ("torch.einsum('ti,io->to', x, w)", (4, 5)),
    "bilinear": ("F.bilinear(x, x, w)", (5, 4, 4)),
    "conv1d": ("F.conv1d(x[None], w)", (2, 3, 2)),
    "conv2d": ("F.conv2d(x[None], w)", (2, 1, 3, 2)),
    "conv_transpose1d": ("F.conv_transpose1d(x[None], w)", (3, 2, 2)),
    "layer_norm": ("F.layer_norm(x, (4,), w)", (4,)),
    "rms_norm": ("F.rms_norm(x, (4,), w)", (4,)),
    "group_norm": ("F.group_norm(x[None], 3, w)", (3,)),
    "instance_norm": ("F.instance_norm(x[None], weight=w)", (3,)),
    "embedding": ("F.embedding(x, w)", (5, 4)),
    "embedding_bag": ("F.embedding_bag(x, w)", (5, 4)),
    "multiplication": ("w * x", (3, 4)),
    "prelu": ("F.prelu(x, w)", (4,)),
    "lstm": (
        "torch.lstm(x[:, None], (fixed(1, 1, 2),) * 2, [w[:, :4], w[:, 4:]], "
        "False, 1, 0.0, False, False, False)[0]",
        (8, 6),
    ),
}
"""Ops that keep their input, of `x` and of a weight of this shape."""
WRITES = [
    lambda a: a.mul_(2),
    lambda a: a.view(-1)[:3].add_(1),
    lambda a: a.__setitem__(0, 1),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("leads_on", [False, True])
@pytest.mark.parametrize("name", SAVED)
def test_an_input_that_is_changed_in_place_raises(name, leads_on, write):
    text, shape = SAVED[name]

    def loss(params, buffers, x):
        a = x * params["first"] if leads_on else x * 1
        a = a.abs().mul(2).long().clamp(max=4) if "embedding" in name else a.tanh()
        h = written(text)(params, a)
        write(a)
        return out_of(h)

    params, batch = given({"w": shape, "first": (4,)})
    ours = f"^{name}: expected an input that stays as it is until the backward pass"
    with pytest.raises(RuntimeError, match=f"{ours}|modified by an inplace operation"):
        vgrad.per_sample_grad(loss, **RECORDED)(params, {}, *batch)


HOLDERS = [
    lambda x: lambda g: Dense(g * x),
    lambda x: lambda g, x=x[:]: Dense(g * x),
    lambda x: functools.partial(lambda x, g: Dense(g * x), x),
    lambda x: functools.partial(lambda g, x: Dense(g * x), x=x),
    lambda x: lambda g, *, x=x: Dense(g * x),
    lambda x: (lambda inner: lambda g: inner(g))(lambda g: Dense(g * x)),
    lambda x: (lambda held: lambda g: Dense(g * held["x"][0][0]))({"x": [(x,)]}),
]


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_rule_may_hold_its_input_in_any_way(holder, changed, monkeypatch):
    @wrap_torch_function(lambda x, weight: (x, weight))
    def scaled(x, weight):
        return x * weight

    monkeypatch.setitem(OPS, scaled, Op())  # and taken out again
    vgrad.ops.rule(scaled, weights=("weight",), replace=True)(
        lambda x, weight: {"weight": holder(x)}
    )

    def loss(params, buffers, x):
        a = x * 1
        h = scaled(a, params["w"])
        if changed:
            a.mul_(2)
        return h.sum()

    message = "^scaled: expected an input that stays"
    fails = pytest.raises(RuntimeError, match=message)
    with fails if changed else contextlib.nullcontext():
        assert_gradients(loss, {"w": fixed(3)}, (randn(B, 3),), **RECORDED)


def test_switches_of_precision_are_read_and_autocast_leaves_float64_alone():
    def normed(params, buffers, x):
        return F.layer_norm(x, (4,), params["w"]).sin().sum()

    params = {"w": torch.ones(4, dtype=torch.float64)}
    expected = oracle.loss_gradients(normed, params, {}, (randn(3, 4),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_gradients(normed, params, (randn(3, 4),), expected=expected)

    def linear(params, buffers, x):
        return F.linear(x, params["w"]).square().sum()

    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        params, x = {"w": torch.ones(2, 3)}, torch.ones(4, 5, 3)
        norms = vgrad.per_sample_norm(linear, **RECORDED)(params, {}, x)
    finally:
        matmul.fp32_precision = before
    exact = oracle.norms(oracle.loss_gradients(linear, params, {}, (x,)))
    torch.testing.assert_close(norms.double(), exact, rtol=1e-5, atol=0)


def test_a_call_inside_a_transform_is_refused_where_recording_was_asked_for():
    params, (x,) = given(W)
    compute = vgrad.per_sample_norm(lambda p, b, x: (x @ p["w"].t()).sum(), **RECORDED)
    with pytest.raises(vgrad.UnsupportedOp, match='outside of transforms.*"vmap"'):
        torch.vmap(lambda x: compute(params, {}, x))(x)


def test_auto_draws_as_if_it_had_not_tried_to_record():
    """A loss that cannot be recorded runs twice, and draws once."""

    def loss(params, buffers, x):
        return out_of(written(GRAD_AT_WEIGHTS)(params, F.dropout(x, 0.5)))

    params, batch = given(W)
    found = []
    for strategy in ("auto", "vmap"):
        torch.manual_seed(3)
        options = {"strategy": strategy, "randomness": "different"}
        compute = vgrad.per_sample_grad(loss, **options)
        assert vgrad.explain(compute)(params, {}, *batch).strategy == "vmap"
        found.append((compute(params, {}, *batch), torch.get_rng_state()))
    oracle.assert_exact(*found, 0)


def every_kind(p, x):
    """Ops of all kinds of factors, expanded ones and computed values."""
    h = F.linear(x, p["w"], p["b"]).relu_()
    h = h + F.embedding(torch.arange(3), p["table"]) * p["scale"]
    h = F.conv1d(h.mT[None], p["kernel"].view(5, 5, 1))[0].mT
    h = F.layer_norm(h, (5,), p["scale"].exp(), p["b"])
    h = F.linear(h, p["w"].t()) + F.scaled_dot_product_attention(x, x, x)
    states = torch.zeros(1, 3, 1, dtype=x.dtype)
    weights = [p["lstm"][:, :4], p["lstm"][:, 4:]]
    options = (False, 1, 0.0, False, False, False)
    return torch.lstm(h[None], (states, states), weights, *options)[0]


KINDS = {"w": (5, 4), "b": (5,), "table": (3, 5), "scale": (5,)}
KINDS |= {"kernel": (5, 5), "lstm": (4, 5)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_off_outside_are_on_inside(mode, strategy):
    def loss(params, buffers, x):
        return out_of(every_kind(params, x))

    params, batch = given(KINDS)
    expected = oracle.loss_gradients(loss, params, {}, batch)
    with mode():
        params, batch = given(KINDS)
        grads = vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, *batch)
        assert not any(grad.requires_grad for grad in grads.values())
        assert_quantities(loss, params, batch, expected=expected, strategy=strategy)


def fails(ctx, grad):
    raise ZeroDivisionError


Fails = losses.new_function(
    "Fails",
    torch.clone,
    fails,
    vmap=lambda info, axes, x: (Fails.apply(x), axes[0]),
)


def late(p, x):
    return F.linear(x, p["w"].exp()).relu_().sum() + (p["w"] * 2).sum() / (1 // 0)


def under_modes(p, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return late(p, x)


def fails_backward(p, x):
    return F.linear(Fails.apply(F.linear(x, p["w"])), p["w"].t()).sum()


def inside(p, x):
    return torch.vmap(torch.func.grad(lambda row: late(p, row)))(x)


def state_of(tensor):
    return (
        tensor._version,
        tensor.requires_grad,
        tensor.grad,
        tensor.is_leaf,
        tensor._backward_hooks,
        dict(tensor.__dict__),
        tensor.tolist(),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "run", [lambda p, x: 1 // 0, late, inside, fails_backward, under_modes, None]
)
def test_nothing_stays_behind_after_a_call_or_an_error(run, requires_grad, strategy):
    params, batch = given(W)
    tensors = [params["w"].requires_grad_(requires_grad), *batch]
    before = state_of_torch(), [state_of(each) for each in tensors]
    run, fails = run or written("F.linear(x, w * 2)"), run is not None
    options = {"max_norm": 1.0, "strategy": strategy}
    compute = vgrad.clipped_grad(lambda p, b, x: out_of(run(p, x)), **options)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        compute(params, {}, *batch)
    assert (state_of_torch(), [state_of(each) for each in tensors]) == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("transform", "options"),
    [(name, {}) for name in (*problems.TRANSFORMS, "explain")]
    + [(name, {"chunk_size": "auto"}) for name in ("flat", "explain")],
)
def test_nothing_is_alive_after_a_call(transform, options, fails):
    """Neither inputs, nor factors, nor the graph, without help of the collector."""

    def loss(params, buffers, x):
        h = every_kind(params, F.linear(x, params["in"]).exp())
        return out_of(Fails.apply(h) if fails else h)

    params, batch = given(KINDS | {"in": (4, 4)})
    make = problems.TRANSFORMS.get(transform, vgrad.per_sample_norm)
    compute, result = make(loss, **RECORDED, **options), None
    compute = vgrad.explain(compute) if transform == "explain" else compute
    gc.collect()
    gc.disable()
    try:
        with Peak() as peak, contextlib.suppress(ZeroDivisionError):
            result = problems.call(transform, compute, (params, {}, *batch))
        compute = None  # which keeps the directions of projections
        results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in results)
        assert peak.left(results, params, batch) == 0
        assert peak.most > 1000
    finally:
        gc.enable()
    assert fails == (result is None)


@pytest.mark.parametrize("which", ["params", "buffers", "batch"])
@pytest.mark.parametrize("transform", problems.TRANSFORMS)
def test_results_say_that_they_are_constants_of_whatever_requires_grad(
    transform, which
):
    params, (x,) = given(W)
    buffers = {"scale": fixed(5)}
    wanted = {"params": params["w"], "buffers": buffers["scale"], "batch": x}[which]
    wanted.requires_grad_()
    compute = problems.TRANSFORMS[transform](
        lambda p, b, x: out_of(F.linear(x, p["w"]) * b["scale"]), **RECORDED
    )
    results = problems.call(transform, compute, (params, buffers, x))
    for value in pytree.tree_leaves(results):
        if value.is_floating_point():
            with pytest.raises(RuntimeError, match='without a graph.*strategy="vmap"'):
                torch.autograd.grad(value.sum(), wanted)
    assert params["w"].grad is None
    with torch.no_grad():
        results = problems.call(transform, compute, (params, buffers, x))
    assert not any(value.requires_grad for value in pytree.tree_leaves(results))


def test_what_surrounds_the_loss_gets_no_gradient():
    """The caller's graph does not run, and what the loss closes over is a constant."""
    params, (x,) = given(W)
    outer = randn(5, 4, seed=3).requires_grad_()
    root = x.clone().requires_grad_()
    middle = root.exp()
    middle.register_hook(lambda grad: pytest.fail("the caller's graph ran"))

    def loss(p, b, x):
        return out_of(F.linear(x, p["w"]) + F.linear(x, outer))

    vgrad.per_sample_grad(loss, **RECORDED)(params, {}, middle)
    assert_quantities(loss, params, (middle.detach(),), **RECORDED)
    assert root.grad is None
    assert outer.grad is None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "product", [lambda x, w: x @ w.sum(), lambda x, w: w.sum() @ x, lambda x, w: w @ x]
)
def test_products_that_torch_refuses_have_its_error(product, strategy):
    loss = lambda p, b, x: product(x, p["w"]).sum()  # noqa: E731
    compute = vgrad.per_sample_norm(loss, strategy=strategy)
    with pytest.raises(RuntimeError, match="at least 1D"):
        compute({"w": torch.tensor(2.0)}, {}, torch.ones(3, 4))

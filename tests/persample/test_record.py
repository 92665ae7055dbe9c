"""The recorder, on losses as users write them; the reference is `oracle`'s loop."""

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vgrad
from tests import cases, oracle
from tests.cases import STRATEGIES, every_strategy, randn
from vgrad.persample import EXPANDED

B = 4
RECORDED = {"strategy": "recorded"}
# Torch says where it loops over the samples.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def fixed(*shape):
    """Make a tensor that is the same for all samples."""
    count = math.prod(shape)
    return torch.linspace(-1, 2, count, dtype=torch.float64).exp().cos().view(shape)


def given(shapes, sample=(3, 4)):
    """Make parameters of these shapes, and a batch."""
    named = enumerate(shapes.items(), 1)
    return {name: randn(*shape, seed=n) for n, (name, shape) in named}, (
        randn(B, *sample, seed=20),
    )


def out_of(value):
    """Make a scalar of an output, whose gradient differs everywhere."""
    return value.sin().sum()


def check(run, params, batch, *, buffers=None, strategy="recorded"):
    """Compare every quantity of `out_of(run(params, *sample))` with the oracle."""

    def loss(params, buffers, *sample):
        return out_of(run({**params, **buffers}, *sample))

    cases.assert_quantities(loss, params, batch, buffers=buffers, strategy=strategy)


def rows_of(run, params, batch):
    """Return what `explain` says of a recorded loss."""
    compute = vgrad.per_sample_norm(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    return vgrad.explain(compute)(params, {}, *batch).rows


class View(NamedTuple):
    """A function of one parameter, which then multiplies inputs of four features."""

    shape: tuple[int, ...]
    of: Callable[[Tensor], Tensor]


MOVED = {
    "t": View((4, 5), lambda w: w.t()),
    "T": View((4, 5), lambda w: w.T),
    "mT": View((4, 5), lambda w: w.mT),
    "transpose": View((4, 5), lambda w: w.transpose(0, -1)),
    "transpose, keywords": View((4, 5), lambda w: w.transpose(dim0=1, dim1=0)),
    "swapaxes": View((4, 5), lambda w: torch.swapaxes(w, 0, 1)),
    "permute": View((4, 5), lambda w: w.permute(1, 0)),
    "permute, nothing": View((5, 4), lambda w: w.permute(0, 1)),
    "permute of a cube": View((4, 2, 3), lambda w: w.permute(2, 1, 0).reshape(6, 4)),
    "t twice": View((5, 4), lambda w: w.t().t()),
    "t of a square": View((4, 4), lambda w: w.t()),
    "t of a part": View((4, 5), lambda w: w[:, 1:4].t()),
    "part of t": View((4, 5), lambda w: w.t()[1:4]),
    "slice": View((5, 4), lambda w: w[1:3]),
    "slice with a step": View((5, 4), lambda w: w[::2]),
    "slice of columns": View((3, 6), lambda w: w[:, 1:5]),
    "slice, empty": View((5, 4), lambda w: w[2:2]),
    "ellipsis": View((3, 6), lambda w: w[..., 2:]),
    "new axis": View((5, 4), lambda w: w[None][0]),
    "row": View((5, 4), lambda w: w[1]),
    "row from behind": View((5, 4), lambda w: w[-1]),
    "chunk": View((6, 4), lambda w: w.chunk(3)[1]),
    "chunk of columns": View((3, 8), lambda w: w.chunk(2, dim=1)[1]),
    "split": View((6, 4), lambda w: w.split([1, 3, 2])[1]),
    "split by size": View((6, 4), lambda w: torch.split(w, 4)[1]),
    "tensor_split": View((7, 4), lambda w: w.tensor_split(3)[0]),
    "unbind": View((2, 5, 4), lambda w: w.unbind()[1]),
    "iteration": View((2, 5, 4), lambda w: [*w][1]),
    "narrow": View((5, 4), lambda w: w.narrow(0, 1, 3)),
    "select": View((5, 3, 4), lambda w: w.select(1, 2)),
    "view": View((5, 8), lambda w: w.view(10, 4)),
    "view, unknown size": View((2, 5, 4), lambda w: w.view(-1, 4)),
    "view_as": View((2, 5, 4), lambda w: w.view_as(fixed(10, 4))),
    "reshape_as": View((2, 5, 4), lambda w: w.reshape_as(fixed(10, 4))),
    "reshape": View((40,), lambda w: w.reshape(10, 4)),
    "reshape of t": View((8, 5), lambda w: w.t().reshape(10, 4)),
    "flatten": View((2, 5, 4), lambda w: w.flatten(0, 1)),
    "flatten of a matrix": View((2, 2), lambda w: w.flatten()),
    "unflatten": View((20,), lambda w: w.unflatten(0, (5, 4))),
    "unsqueeze": View((4,), lambda w: w.unsqueeze(0)),
    "squeeze": View((1, 5, 1, 4), lambda w: w.squeeze()),
    "squeeze one": View((1, 5, 4), lambda w: w.squeeze(0)),
    "movedim": View((4, 5), lambda w: w.movedim(0, 1)),
    "double": View((5, 4), lambda w: w.double()),
    "type_as": View((5, 4), lambda w: w.type_as(fixed(1))),
    "clone": View((5, 4), lambda w: w.clone()),
    "contiguous t": View((4, 5), lambda w: w.t().contiguous()),
}
DERIVED = {
    "rows by a list": View((5, 4), lambda w: w[[0, 2, 2]]),
    "rows by a tensor": View((5, 4), lambda w: w[torch.tensor([[0, 2], [2, 4]])[0]]),
    "rows by a mask": View((5, 4), lambda w: w[torch.arange(5) != 1]),
    "expand": View((1, 4), lambda w: w.expand(5, 4)),
    "expand_as": View((4,), lambda w: w.expand_as(fixed(5, 4))),
    "repeat": View((4,), lambda w: w.repeat(3, 1)),
    "broadcast_to": View((4,), lambda w: torch.broadcast_to(w, (3, 4))),
    "as_strided": View((9,), lambda w: w.as_strided((6, 4), (1, 1))),
    "unfold": View((9,), lambda w: w.unfold(0, 4, 1)),
    "diagonal": View((4, 4, 3), lambda w: w.diagonal()),
    "diag_embed": View((4,), lambda w: torch.diag_embed(w)),
    "flip": View((5, 4), lambda w: w.flip(0)),
    "tril": View((4, 4), lambda w: w.tril()),
    "index_select": View((5, 4), lambda w: w.index_select(0, torch.tensor([1, 1, 3]))),
    "cat with itself": View((5, 4), lambda w: torch.cat([w, w])),
    "stack of itself": View((4,), lambda w: torch.stack([w, w, 2 * w])),
    "pad": View((5, 2), lambda w: F.pad(w, (1, 1))),
    "sort": View((5, 4), lambda w: w.sort(0).values),
    "topk": View((5, 4), lambda w: w.topk(2, dim=0)[0]),
    "svd": View((5, 4), lambda w: torch.linalg.svd(w, full_matrices=False).S[None]),
    "where": View((5, 4), lambda w: torch.where(w > 0, w, 0.1 * w)),
    "standardised": View((5, 4), lambda w: (w - w.mean()) / w.std(1, keepdim=True)),
    "orthogonal": View((4, 4), lambda w: torch.matrix_exp(w - w.T)),
    "quotient": View((5, 4), lambda w: w / w.abs().max()),
    "by a number of its own": View((5, 4), lambda w: w * w.sum().item()),
    "if positive": View((5, 4), lambda w: w if w.sum() > 0 else 2 * w),
}


@pytest.mark.parametrize("name", MOVED | DERIVED)
def test_a_function_of_a_parameter_is_exact_and_keeps_its_factor(name):
    shape, of = (MOVED | DERIVED)[name]
    batched = []

    def run(p, x):
        value = of(p["w"])
        batched.append(torch._C._functorch.is_batchedtensor(value))
        return F.linear(x, value)

    params, batch = given({"w": shape})
    check(run, params, batch)
    row, *rest = rows_of(run, params, batch)
    assert not any(batched)  # computed once, for no sample
    assert (row.names, row.op, row.factor) == (("w",), "linear", "Outer")
    assert EXPANDED not in row.why
    if name in MOVED:
        assert not rest


TO = {
    "to": lambda w, dtype: w.to(dtype),
    "type": lambda w, dtype: w.type(dtype),
    "to like": lambda w, dtype: w.to(torch.zeros((), dtype=dtype)),
    "method": lambda w, dtype: {
        torch.bfloat16: w.bfloat16,
        torch.float16: w.half,
        torch.float64: w.double,
    }[dtype](),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how", TO)
def test_a_parameter_in_another_dtype_keeps_its_factor(how, dtype):
    def run(p, x):
        return F.linear(x.to(dtype), TO[how](p["w"], dtype)).float()

    def loss(params, buffers, x):
        return out_of(run(params, x))

    params, x = {"w": randn(5, 4).float()}, randn(B, 4).float()
    (row,) = rows_of(run, params, (x,))
    assert (row.op, row.factor, row.form) == ("linear", "Outer", "both sides")

    def reference(params, x):
        return oracle.loss_gradients(
            lambda p, b, x: out_of(F.linear(x, p["w"])), params, {}, (x,), B
        )

    expected = reference(params, x)
    tolerance = max(1e-6, 2 * oracle.rounding(reference, params, x, dtype=dtype))
    grads = vgrad.per_sample_grad(loss, **RECORDED)(params, {}, x)
    clipped = vgrad.clipped_grad(loss, max_norm=1.0, **RECORDED)(params, {}, x).grads
    assert grads["w"].dtype == clipped["w"].dtype == torch.float32
    oracle.assert_exact(grads, expected, tolerance)
    oracle.assert_exact(clipped, oracle.clipped(expected, 1.0), tolerance)


def spectral_norm(p, x):
    w = p["w"]
    with torch.no_grad():
        left, right = fixed(5), fixed(4)
        for _ in range(3):
            right = F.normalize(w.t() @ left, dim=0)
            left = F.normalize(w @ right, dim=0)
    return F.linear(x, w / torch.dot(left, w @ right))


def in_two_stages(p, x):
    half = p["w"] * p["g"]
    return F.linear(x, half) + F.linear(x.cos(), half + p["v"]) + (half * p["v"]).sum()


W, WV = {"w": (5, 4)}, {"w": (5, 4), "v": (5, 4)}
BIASED = {**WV, "b": (5,), "c": (5,)}
THIN = {"w": (5, 4), "b": (5,), "down": (2, 4), "up": (5, 2)}
KEEP_A_FACTOR = {
    "weight norm": (
        {"w": (5, 4), "g": (5, 1)},
        lambda p, x: F.linear(x, p["g"] * p["w"] / p["w"].norm(dim=1, keepdim=True)),
    ),
    "fused weight norm": (
        {"w": (5, 4), "g": (5, 1)},
        lambda p, x: F.linear(x, torch._weight_norm(p["w"], p["g"], 0)),
    ),
    "spectral norm": (W, spectral_norm),
    "low rank, merged": (
        THIN,
        lambda p, x: F.linear(x, p["w"] + 0.5 * p["up"] @ p["down"], p["b"]),
    ),
    "one scale of all": (
        {**W, "b": (5,), "s": ()},
        lambda p, x: F.linear(x, p["w"] * p["s"].exp(), p["b"] * p["s"].exp()),
    ),
    "mixture": (
        {"k": (3,), "bank": (3, 5, 4)},
        lambda p, x: F.linear(
            x, torch.einsum("k,koi->oi", p["k"].softmax(0), p["bank"])
        ),
    ),
    "joined": (
        BIASED,
        lambda p, x: F.linear(
            x, torch.cat([p["w"], p["v"]]), torch.cat([p["b"], p["c"]])
        ),
    ),
    "joined, keywords": (
        WV,
        lambda p, x: F.linear(
            input=x, weight=torch.cat(tensors=(p["w"], p["v"]), dim=0)
        ),
    ),
    "summed": (WV, lambda p, x: F.linear(x, sum([p["w"], p["v"]]))),
    "blocks": (
        WV,
        lambda p, x: F.linear(torch.cat([x, x], 1), torch.block_diag(p["w"], p["v"])),
    ),
    "a part": (W, lambda p, x: F.linear(x, p["w"].exp()[1:3].t().t())),
}


@pytest.mark.parametrize("name", KEEP_A_FACTOR)
def test_what_is_computed_from_parameters_is_exact_and_keeps_a_factor(name):
    shapes, run = KEEP_A_FACTOR[name]
    params, batch = given(shapes)
    check(run, params, batch)
    rows = rows_of(run, params, batch)
    assert not any(EXPANDED in row.why for row in rows)
    assert "Outer" in [row.factor for row in rows if row.op == "linear"]


USES = {
    "merged and plain": (
        WV,
        lambda p, x: F.linear(x, p["w"] + p["v"]) + F.linear(x.cos(), p["w"]),
    ),
    "in two stages": ({**WV, "g": (5, 1)}, in_two_stages),
    "low rank, beside": (
        THIN,
        lambda p, x: F.linear(x, p["w"], p["b"]) + x @ p["down"].t() @ p["up"].t(),
    ),
    "stacked": (WV, lambda p, x: torch.stack([p["w"], p["v"]]) @ x.mT),
    "joined with data": (
        {**W, "token": (1, 4)},
        lambda p, x: torch.cat([x, p["token"], x]) @ p["w"].t(),
    ),
    "stacked with data": (
        {**W, "token": (1, 4)},
        lambda p, x: torch.stack([p["token"][0], x[0]]) @ p["w"].t(),
    ),
    "chained": (
        {"down": (2, 4), "up": (5, 2)},
        lambda p, x: torch.linalg.multi_dot([x, p["down"].t(), p["up"].t()]),
    ),
    "all chunks": (
        {"w": (6, 4)},
        lambda p, x: sum(n * F.linear(x, a) for n, a in enumerate(p["w"].chunk(3))),
    ),
    "the same part, cut twice": (
        W,
        lambda p, x: F.linear(x, p["w"][:3]) * F.linear(x.cos(), p["w"][:3]),
    ),
    "overlapping parts": (
        W,
        lambda p, x: F.linear(x[:, :2], p["w"][:, :2]).sum() * F.linear(x, p["w"][1:3]),
    ),
    "a matrix and its transpose": (
        {"w": (4, 4)},
        lambda p, x: F.linear(F.linear(x, p["w"]).sin(), p["w"].t()),
    ),
    "a matrix, its row and its sum": (
        W,
        lambda p, x: F.linear(x, p["w"]) * p["w"].sum() + (x * p["w"][0]).sum(),
    ),
    "a kernel from a matrix": (
        {"w": (2, 12)},
        lambda p, x: F.conv1d(x.mT[None], p["w"].view(2, 4, 3)),
    ),
    "a transposed kernel": (
        {"w": (4, 2, 2)},
        lambda p, x: F.conv1d(x.mT[None], p["w"].transpose(0, 1)),
    ),
    "half a kernel": ({"w": (4, 4, 2)}, lambda p, x: F.conv1d(x.mT[None], p["w"][1:3])),
    "scale and shift in one": (
        {"w": (2, 4)},
        lambda p, x: F.layer_norm(x, (4,), p["w"][0], p["w"][1]),
    ),
    "scale and shift, unbound": (
        {"w": (4, 2)},
        lambda p, x: F.layer_norm(x, (4,), *p["w"].unbind(1)),
    ),
    "a part of a bias": (
        {**W, "b": (8,)},
        lambda p, x: F.linear(x, p["w"], p["b"][2:7]),
    ),
    "a transposed table": (
        {"w": (4, 7)},
        lambda p, x: F.embedding(x.abs().mul(3).long().clamp(max=6), p["w"].t()),
    ),
    "half a table and a head": (
        {"w": (7, 4)},
        lambda p, x: F.linear(
            F.embedding(x.abs().long().clamp(max=2), p["w"][1:5]), p["w"]
        ),
    ),
    "a parameter by another": (WV, lambda p, x: F.linear(p["w"], p["v"]) * x.sum()),
    "nothing but a parameter": (
        {**W, "b": (5,)},
        lambda p, x: F.linear(x, p["w"]) + p["b"].square(),
    ),
    # What is the same for all samples: constants, positions, buffers.
    "constants": (W, lambda p, x: F.linear(fixed(3, 4), p["w"]) + x.sum()),
    "constants, then data": (
        {"w": (4, 4), "v": (5, 4)},
        lambda p, x: F.linear(F.linear(fixed(3, 4), p["w"]).sin() * x, p["v"]),
    ),
    "constants, then another op": (
        {"w": (4, 4), "v": (3, 4)},
        lambda p, x: (F.linear(fixed(3, 4), p["w"]).exp() * p["v"]).sin() * x,
    ),
    "constants through two layers": (
        {"w": (5, 4), "v": (2, 5)},
        lambda p, x: F.linear(F.linear(fixed(3, 4), p["w"]).sin(), p["v"]),
    ),
    "positions": (
        {"w": (7, 4), "v": (5, 4)},
        lambda p, x: F.linear(F.embedding(torch.arange(3), p["w"]) + x, p["v"]),
    ),
    "a convolution of constants": (
        {"w": (2, 3, 3)},
        lambda p, x: F.conv1d(fixed(1, 3, 6), p["w"]) * x.sum(),
    ),
    "a norm of constants": (
        {"w": (4,), "v": (4,)},
        lambda p, x: F.layer_norm(fixed(3, 4), (4,), p["w"], p["v"]) * x,
    ),
    "a buffer": (W, lambda p, x: F.linear(p["buffer"], p["w"]) * x.sum()),
    "nothing of the sample": (W, lambda p, x: F.linear(fixed(3, 4), p["w"])),
    "attention to constants": (
        {"w": (4, 4)},
        lambda p, x: F.scaled_dot_product_attention(
            x[None], F.linear(fixed(1, 6, 4), p["w"]), fixed(1, 6, 4)
        ),
    ),
}


@pytest.mark.parametrize("name", USES)
def test_uses_of_parameters_and_of_their_parts_add_up(name):
    shapes, run = USES[name]
    params, batch = given(shapes)
    check(run, params, batch, buffers={"buffer": fixed(3, 4)})


IN_PLACE = {
    "relu": lambda h, x: F.relu(h, inplace=True),
    "leaky_relu": lambda h, x: F.leaky_relu_(h, 0.1),
    "sigmoid": lambda h, x: h.sigmoid_(),
    "add": lambda h, x: h.add_(1),
    "multiply by data": lambda h, x: operator.imul(h, x.sum(-1, keepdim=True)),
    "set a column": lambda h, x: operator.setitem(h, (..., 0), 0.5) or h,
    "set a row to data": lambda h, x: operator.setitem(h, 1, x.sum()) or h,
    "through a view": lambda h, x: (h.mT[1:3].tanh_(), h)[1],
    "through parts": lambda h, x: (h.narrow(-1, 0, 2).sin_(), h[1:].exp_(), h)[2],
    "fill": lambda h, x: h.masked_fill_(torch.arange(5) > 2, 0.0),
    "several": lambda h, x: h.neg_().add_(x.mean()).mul_(0.5).exp_(),
    "clamp": lambda h, x: h.clamp_(-0.5, 0.5),
    "addcmul": lambda h, x: h.addcmul_(h.detach().clone(), h.detach().clone()),
}
BEFORE = {
    "linear": ({**W, "b": (5,)}, lambda p, x: F.linear(x, p["w"], p["b"])),
    "matmul": ({"w": (4, 5)}, lambda p, x: x @ p["w"]),
    "product of a view": ({"w": (4, 10)}, lambda p, x: x @ p["w"][:, 5:]),
    "computed": (W, lambda p, x: F.linear(x, p["w"].tanh())),
    "convolution": (
        {"w": (5, 4, 1), "b": (5,)},
        lambda p, x: F.conv1d(x.mT[None], p["w"], p["b"])[0].mT,
    ),
    "layer norm": (
        {"w": (5,), "b": (5,)},
        lambda p, x: F.layer_norm(F.pad(x, (0, 1)), (5,), p["w"], p["b"]),
    ),
    "embedding": (
        {"w": (3, 5)},
        lambda p, x: F.embedding((x[:, 0] > 0).long(), p["w"]),
    ),
    "elementwise": ({"w": (3, 5)}, lambda p, x: p["w"] * F.pad(x, (0, 1))),
    "einsum": ({"w": (4, 5)}, lambda p, x: torch.einsum("ti,io->to", x, p["w"])),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("before", BEFORE)
def test_outputs_may_be_changed_in_place(before, change):
    """As autograd allows it: none of these ops needs its output."""
    shapes, run = BEFORE[before]

    def changed(p, x):
        x = x.tanh()
        return F.linear(IN_PLACE[change](run(p, x), x), p["last"])

    params, batch = given({**shapes, "last": (2, 5)})
    check(changed, params, batch)


def under_no_grad(p, x):
    with torch.no_grad():
        h = F.linear(x, p["w"])
    return F.linear(h, p["v"])


def derived_under_no_grad(p, x):
    with torch.no_grad():
        w, part, gram = p["w"].exp(), p["w"][:2], p["w"] @ p["w"].t()
    h = F.linear(x, w) @ gram + F.linear(x, part).sum()
    return h + F.linear(x, p["v"].t()).sum()


def switched(p, x):
    with torch.set_grad_enabled(False):
        h = F.linear(x, p["w"])
        with torch.enable_grad():
            k = F.linear(x, p["w"])
    return h * k


def op_without_rule_under_no_grad(p, x):
    with torch.no_grad():
        h = p["w"] * x.sum()
    return h + F.linear(x, p["w"]).sum()


def stopped_and_passed(p, x):
    h = F.linear(x, p["w"])
    return F.linear(h, p["v"]).sum() * h.detach()


DETACHED = {
    "a layer under no_grad": under_no_grad,
    "views and values under no_grad": derived_under_no_grad,
    "an op without rule under no_grad": op_without_rule_under_no_grad,
    "off and on": switched,
    "used once more": stopped_and_passed,
    "a value of it": lambda p, x: (
        F.linear(x, p["w"]) + F.linear(x.cos(), p["w"].detach() * 2)
    ),
    "a view of it": lambda p, x: (
        F.linear(x, p["w"].detach().t().t()) + x.sum() * p["s"]
    ),
    "data": lambda p, x: F.linear(x, p["w"].data) + x.sum() * p["s"],
    "a value of data": lambda p, x: x @ p["w"].data.exp().t() + x.sum() * p["s"],
    "the output": lambda p, x: F.linear(x, p["w"]).detach() @ p["v"].t(),
    "straight through": lambda p, x: F.linear(
        x, p["w"] + (p["w"].round() - p["w"]).detach()
    ),
    "the last layer": lambda p, x: F.linear(F.linear(x, p["w"]), p["v"].detach()),
}


@pytest.mark.parametrize("name", DETACHED)
def test_what_is_detached_or_without_autograd_is_a_constant(name):
    params, batch = given({"w": (5, 4), "v": (4, 5), "s": ()})
    check(DETACHED[name], params, batch)


def test_parameters_without_a_gradient_have_zeros():
    def run(p, x):
        h = F.linear(x, p["used"])
        F.linear(h, p["dead"])
        return h + (F.linear(x, p["flat"]) * 0).sum() + (x @ p["rounded"]).round().sum()

    shapes = {"used": (5, 4), "dead": (5, 5), "flat": (5, 4), "rounded": (4, 5)}
    shapes |= {"unused": (2, 3, 4), "scalar": ()}
    params, batch = given(shapes)
    check(run, params, batch)
    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    for name, grad in compute(params, {}, *batch).items():
        assert (grad == 0).all() == (name != "used")
        assert (grad.shape, grad.dtype) == ((B, *shapes[name]), torch.float64)


@every_strategy
def test_a_loss_without_any_parameter_has_zeros(strategy):
    params, batch = given(W)
    options = {"strategy": strategy, "max_norm": 1.0}
    found = vgrad.clipped_grad(lambda p, b, x: x.sum(), **options)(params, {}, *batch)
    assert torch.equal(found.grads["w"], torch.zeros(5, 4, dtype=torch.float64))
    assert not found.norms.any()


class Scaled(torch.autograd.Function):
    """A function of data and a weight, as torch.func wants it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class Rounded(torch.autograd.Function):
    """A straight-through estimator, whose vmap is plain or calls `apply`."""

    applies = False

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 3

    @classmethod
    def vmap(cls, info, in_dims, x):
        return (cls.apply(x) if cls.applies else x.round()), in_dims[0]


class Unlinked(Rounded):
    """Its vmap has no graph at all."""

    @classmethod
    def vmap(cls, info, in_dims, x):
        return x.detach().round(), in_dims[0]


class Applied(Rounded):
    applies = True


CUSTOM = {
    "an activation": lambda f: lambda p, b, x: f(F.linear(x, p["w"])).square().sum(),
    "both": lambda f: lambda p, b, x: f(x * f(p["w"][:3])).square().sum(),
}


@pytest.mark.parametrize("where", CUSTOM)
@pytest.mark.parametrize("function", [Rounded, Unlinked, Applied])
def test_functions_with_a_vmap_of_their_own_have_their_own_gradients(function, where):
    params, (x,) = given(W)
    loss = CUSTOM[where](function.apply)
    expected = oracle.loss_gradients(loss, params, {}, (x,), len(x))
    for strategy in ("auto", "vmap", "loop"):
        found = vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, x)
        oracle.assert_exact(found, expected, 1e-12)
    recorded = vgrad.per_sample_grad(loss, strategy="recorded")
    if function is Applied:
        oracle.assert_exact(recorded(params, {}, x), expected, 1e-12)
        return
    with pytest.raises(vgrad.UnsupportedOp, match="whose vmap calls apply"):
        recorded(params, {}, x)


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize("function", [Rounded, Applied])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_function_of_a_parameter_or_mapped_by_the_loss(mapped, function, strategy):
    params, (x,) = given(W)

    def loss(p, b, x):
        w = torch.vmap(function.apply)(x * p["w"][:3]) if mapped else None
        return (w if mapped else F.linear(x, function.apply(p["w"]))).square().sum()

    expected = oracle.loss_gradients(loss, params, {}, (x,), len(x))
    found = vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, x)
    oracle.assert_exact(found, expected, 1e-12)


def by_grad(p, x):
    grad = torch.func.grad(lambda x: F.linear(x, p["w"]).tanh().sum())(x)
    return F.linear(x, p["w"]).sum() + grad.square().sum()


def by_grad_of_a_view(p, x):
    grad = torch.func.grad(lambda x: F.linear(x, p["w"].t().t()).tanh().sum())(x)
    return grad.square().sum() + F.linear(x, p["w"][:2]).sum()


def by_vjp(p, x):
    value, pull = torch.func.vjp(lambda x: F.linear(x, p["w"]).tanh(), x)
    return pull(value)[0]


def by_autograd_of_parameters_alone(p, x):
    value = p["w"].sin().sum()
    return F.linear(x, torch.autograd.grad(value, p["w"], create_graph=True)[0])


INSIDE = {
    "grad": by_grad,
    "grad of a view": by_grad_of_a_view,
    "vjp": by_vjp,
    "jvp": lambda p, x: torch.func.jvp(
        lambda x: F.linear(x, p["w"]).tanh(), (x,), (x.cos(),)
    )[1],
    "hessian": lambda p, x: torch.func.hessian(
        lambda x: F.linear(x, p["w"]).tanh().sum()
    )(x[0]),
    "jacobian": lambda p, x: torch.func.jacrev(lambda x: F.linear(x, p["w"]).tanh())(
        x[0]
    ),
    "vmap": lambda p, x: torch.vmap(lambda row: F.linear(row, p["w"]).sin())(x),
    "vmap with weights": lambda p, x: torch.vmap(torch.matmul, (0, None))(
        x, p["w"].t()
    ),
    "autograd of parameters alone": by_autograd_of_parameters_alone,
    "function of data": lambda p, x: Scaled.apply(F.linear(x, p["w"]), fixed(3, 5)),
    "function of data and a parameter": lambda p, x: Scaled.apply(x, p["w"][:3]),
    "function of a parameter": lambda p, x: F.linear(
        x, Scaled.apply(p["w"], fixed(5, 4))
    ),
    "function of a computed value": lambda p, x: (
        Scaled.apply(x, p["w"].exp()[:3]) + F.linear(x, p["w"])[:, :4]
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_transforms_and_functions_inside_the_loss_are_exact(name):
    params, batch = given(W)
    check(INSIDE[name], params, batch)


@pytest.mark.parametrize("how", [torch.vmap, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_around_find_what_vmap_finds(how):
    """The recorder stands back there; norms are functions of the parameters again."""
    (batch,) = given(W)[1]

    def norms(w):
        loss = vgrad.per_sample_norm(lambda p, b, x: out_of(F.linear(x, p["w"])))
        return loss({"w": w}, {}, batch)

    def plainly(w):
        rows = [
            torch.func.grad(lambda w, x=x: out_of(F.linear(x, w)))(w) for x in batch
        ]
        return torch.stack(rows).flatten(1).norm(dim=1)

    w = randn(2, 5, 4, seed=7) if how is torch.vmap else randn(5, 4, seed=7)
    torch.testing.assert_close(how(norms)(w), how(plainly)(w), rtol=1e-10, atol=1e-12)


def complexified(x):
    return torch.complex(x, x.cos())


COMPLEX = {
    "linear": lambda p, x: F.linear(complexified(x), p["w"], p["b"]).abs().square(),
    "view": lambda p, x: (complexified(x) @ p["w"].t()[:, 1:3]).real.sin(),
    "conjugate": lambda p, x: F.linear(
        complexified(x), p["w"].conj() * p["b"][:, None]
    ).abs(),
    "real parts": lambda p, x: F.linear(x, torch.view_as_real(p["w"])[..., 1]),
    "cast from real": lambda p, x: F.linear(
        complexified(x), p["real"].to(torch.complex128)
    ).abs(),
    "real times complex": lambda p, x: (p["real"][:3] * complexified(x)).abs(),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters_have_the_gradients_of_their_parts(name):
    parts, (x,) = given({"w": (5, 4, 2), "b": (5, 2), "real": (5, 4)})

    def composed(p):
        return {n: v if n == "real" else torch.view_as_complex(v) for n, v in p.items()}

    def apart(p):
        return {
            n: torch.view_as_real(v.resolve_conj()) if v.is_complex() else v
            for n, v in p.items()
        }

    def loss(params, buffers, x):
        return out_of(COMPLEX[name](params, x))

    expected = oracle.loss_gradients(
        lambda p, b, x: loss(composed(p), b, x), parts, {}, (x,), B
    )
    params, norms = composed(parts), oracle.norms(expected)
    bound = 0.9 * float(norms.mean())
    grads = vgrad.per_sample_grad(loss, **RECORDED)(params, {}, x)
    clipped = vgrad.clipped_grad(loss, max_norm=bound, **RECORDED)(params, {}, x)
    oracle.assert_exact(apart(grads), expected)
    torch.testing.assert_close(clipped.norms, norms, rtol=1e-10, atol=1e-12)
    oracle.assert_exact(apart(clipped.grads), oracle.clipped(expected, bound))

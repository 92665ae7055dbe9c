"""Derivatives inside of a loss, by torch.autograd: exact, and recorded where they can.

The reference is the float64 loop of plain autograd over the same loss.
"""

import gc
import weakref
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses, oracle
from tests.losses import assert_quantities, new_function, randn
from vgrad.persample import EXPANDED

B, D = 5, 3
grad = partial(torch.autograd.grad, create_graph=True)
P = {
    "w": randn(4, D, seed=1),
    "b": randn(4, seed=2),
    "v": randn(4, 4, seed=3),
    "s": randn(4, seed=4),
    "u": randn(4, seed=5),
}
X = randn(B, D, seed=6)
SEQUENCES = randn(B, 2, D, seed=7)
IMAGES = randn(B, 2, 4, 4, seed=8)
CONSTANT = randn(4, seed=9)
OUTER = randn(4, seed=10).requires_grad_()
KERNELS = {"w": randn(4, 2, 2, 2, seed=11), "b": P["b"], "u": P["u"]}
GATES = {"i": randn(16, D, seed=12), "h": randn(16, 4, seed=13), "u": P["u"]}
Cubes = new_function(
    "Cubes",
    lambda x: x**3,
    lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g,
    generate_vmap_rule=True,
)


def net(p, x):
    """A number for each row of `[..., D]`."""
    h = F.linear(x, p["w"], p["b"]).tanh()
    return F.linear(h, p["v"], p["s"]).sin() @ p["u"]


def lstm(x, i, h, **others):
    """The outputs [T, 4] of `x [T, D]`."""
    zero, no = x.new_zeros(1, 1, 4), False
    net = torch.lstm(x[:, None], (zero, zero), [i, h], no, 1, 0.0, no, no, no)
    return net[0][:, 0]


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def stepped(p, slopes):
    pairs = zip(p.items(), slopes, strict=True)
    return {n: w if g is None else w - 0.1 * g for (n, w), g in pairs}


@dataclass
class Row:
    text: str
    route: str = "recorded"
    why: str = ""  # of a loop
    params: dict[str, Tensor] = field(default_factory=lambda: P)
    batch: tuple = (X,)
    copied: str | None = ""  # parameters with a copy for each sample; None for any


LEAF = "x = leaf(x); "
SHARED = "one that all samples share"
ROWS = {
    "gradient penalty": Row(
        "value = net(p, x); x = (x * 0.3).requires_grad_();"
        "value = value + (grad(net(p, x), x)[0].norm() - 1).square()"
    ),
    "derivatives by matmul, einsum, addmm and a product on the left": Row(
        LEAF + "h = (x @ w.t() + b).tanh(); h = torch.einsum('i,oi->o', h, v).sin();"
        "h = torch.addmm(s, h[None], v)[0].exp(); h = (v @ h).cos();"
        "value = grad((h * u).sum(), x)[0].square().sum()",
        copied="b, u",
    ),
    "third derivatives, of a stack of products": Row(
        LEAF + "h = torch.einsum('ti,goi->tgo', x, w.view(2, 2, D)).sin().sum((0, 1))"
        "\ny = h.prod()"
        "\nfor _ in range(3): y = grad(y, x)[0].sin().sum()\nvalue = y",
        batch=(SEQUENCES,),
    ),
    "by an intermediate value, past a tied weight": Row(
        "h = F.linear(x, w, b).tanh(); y = F.linear(F.linear(h, v).sin(), v) @ u;"
        "value = grad(y, h)[0].square().sum() + y"
    ),
    "past convolutions with steps, gaps, groups and ends, three times": Row(
        LEAF + "y = F.conv2d(x[None], w[:, :1], b, (2, 1), (1, 0), (1, 2), 2).sin()"
        "\ny = F.conv_transpose2d(y, v[..., None, None], s, (3, 2), 0, (2, 1)).sin()"
        "\ny = F.conv2d(y, w.view(2, 4, 2, 2), padding='same', dilation=2).sin()"
        "\ny = F.conv_transpose1d(y.flatten(2), h, None, 1, 0, 1, 1, 2).sin().sum()"
        "\nfor _ in range(2): y = grad(y, x)[0].sin().sum()\nvalue = y",
        params=KERNELS | {"v": P["v"], "s": P["s"], "h": randn(2, 3, 2, seed=14)},
        batch=(IMAGES,),
        copied="h",  # whose output is padded by more than its step
    ),
    "past a norm": Row(
        LEAF + "h = F.layer_norm(F.linear(x, w), (4,), b, s); y = F.linear(h, v) @ u;"
        "value = grad(y.sin(), x)[0].square().sum()",
        copied="b, s",
    ),
    "past a weight that is computed": Row(
        LEAF + "value = grad((F.linear(x, w / w.norm()).tanh() @ v).sin() @ u, x)[0]"
        ".square().sum()",
    ),
    "past an LSTM": Row(
        LEAF + "y = lstm(x, **p).sum(0) @ u;value = grad(y, x)[0].square().sum() + y",
        params=GATES,
        batch=(SEQUENCES,),
    ),
    "past an LSTM of constants": Row(
        LEAF + "y = lstm(F.linear(x, w)[:, :3], **GATES).sum();"
        "value = grad(y, x)[0].square().sum()",
        batch=(SEQUENCES,),
    ),
    "past functions of autograd, mapped and not": Row(
        LEAF
        + "h = F.linear(x, w); value = grad((Cubes.apply(h) + losses_cubes(h)) @ u,"
        "x)[0].square().sum()",
    ),
    "one step by hand": Row(
        "slopes = grad(net(p, x).square(), [*p.values()]); q = stepped(p, slopes);"
        "value = net(q, x.sin()).square()",
        copied="w, b, v, s, u",
    ),
    "three steps of first order, of some parameters": Row(
        """
q = dict(p)
for _ in range(3):
    slopes = torch.autograd.grad(net(q, x).square(), [q["v"], q["b"]])
    q["v"], q["b"] = q["v"] - 0.1 * slopes[0], q["b"] - 0.1 * slopes[1]
value = net(q, x.sin()).square()""",
        copied="w, b, v, s",  # the others at ops with those
    ),
    "by a buffer": Row(
        "y = leaf(shift); h = net(p, x + y[:3]);"
        "value = grad(h.square(), y)[0].square().sum() + h",
    ),
    "by a constant, under a view and another name": Row(
        "c = CONSTANT.detach(); c.requires_grad_(); y = c[:3]; h = net(p, x * y);"
        "value = grad(h, c)[0].square().sum() + c.sin() @ u",
        "loop",
        SHARED,
    ),
    "by tensors that the loss has made": Row(
        "y = torch.zeros(3, dtype=x.dtype, requires_grad=True);"
        "z = torch.ones(3).double(); z.mul_(2); z.requires_grad = True;"
        "h = net(p, x + y * z);"
        "g = grad(h, (y, z)); value = (g[0] * (g[1] + 1)).sum()"
    ),
    "by a tensor of the caller's": Row(
        "value = grad(net(p, x * OUTER[:3]), OUTER)[0].square().sum()", "loop", SHARED
    ),
    "by a tensor that is written into": Row(
        "y = torch.zeros(3, dtype=x.dtype, requires_grad=True); z = y.detach()\n"
        "for _ in range(2):\n"
        "    step, = torch.autograd.grad(net(p, x + y), y)\n"
        "    with torch.no_grad(): y.add_(step)\n"
        "value = net(p, x + y.detach()) + z @ x"
    ),
    "seeds of each sample and shared ones": Row(
        LEAF + "h = F.linear(x, w); seed = x.sin()[0] * u;"
        "value = grad((h.tanh(), h.sin()), x, (seed, CONSTANT))[0].square().sum()",
        copied="u",
    ),
    "no derivative by some": Row(
        LEAF + "y = leaf(x); y, other = grad(net(p, x), (x, y), allow_unused=True);"
        "assert other is None; value = y.square().sum();"
        "_, zero = grad(net(p, x), (x, leaf(x)), materialize_grads=True);"
        "value = value + zero.sum() + x.sum()"
    ),
    "a Jacobian, its rows at once": Row(
        LEAF + "h = F.linear(x, w, b).tanh(); rows = torch.eye(4, dtype=x.dtype);"
        "jacobian, = grad(h, x, rows, is_grads_batched=True);"
        "assert jacobian.shape == (4, D); value = jacobian.square().sum();"
        "rows = rows * x.sin().sum(); more, = grad(h, x, rows, is_grads_batched=True);"
        "value = value + (more @ x).sin() @ u"
    ),
    "constant derivatives, and rows of a Jacobian": Row(
        LEAF + "y = lstm(x, **p).sum()\n"
        "with torch.no_grad(): step, = torch.autograd.grad(y, x)\n"
        "y = lstm(x + step, **p)[-1]; eye = torch.eye(4, dtype=x.dtype);"
        "rows, = torch.autograd.grad(y, x, eye, is_grads_batched=True);"
        "assert not rows.requires_grad; value = (lstm(x * rows.sum(0), **p) @ u).sum()",
        params=GATES,
        batch=(SEQUENCES,),
    ),
    "of a graph that is freed": Row(
        LEAF + "h = net(p, x); torch.autograd.grad(h, x); value = h",
        "error",
        "second time",
    ),
    "backward": Row(
        LEAF + "assert x.grad is None; net(p, x).backward(create_graph=True);"
        "value = (x.grad * x).sum().square()"
    ),
    "backward several times, and once more from zero": Row(
        """
x = leaf(x)
h = net(p, x)
h.backward(retain_graph=True)
first = x.grad
h.backward(retain_graph=True, gradient=h.detach())
value = net(p, first)
x.grad = None
h.sin().backward(inputs=[x], create_graph=True)
h.cos().backward(create_graph=True)
value = value + x.grad.square().sum()
del x.grad
assert x.grad is None
net(p, x).backward(create_graph=True)
value = value + x.grad.sin().sum()""",
    ),
    "backward to parameters": Row(
        "net(p, x).square().backward(create_graph=True);"
        "value = net(stepped(p, [each.grad for each in p.values()]), x.sin())",
        copied="w, b, v, s, u",
    ),
    "backward to a buffer's copy": Row(
        "y = leaf(shift); net(p, x * y[:3]).backward(create_graph=True);"
        "value = y.grad.square().sum()",
    ),
    "backward past a tensor of the caller's": Row(
        LEAF + "(net(p, x * OUTER[:3])).backward(create_graph=True);"
        "value = x.grad.square().sum()",
    ),
    "both transforms of torch.func and of autograd": Row(
        LEAF + "slope = torch.func.grad(lambda y: net(p, y))(x);"
        "value = grad(slope.square().sum(), x)[0].square().sum()",
        copied=None,
    ),
    "inside of a transform": Row(
        LEAF + "value = torch.vmap(lambda y: grad(net(p, y), x)[0])(x[None]).sum()",
        "error",
        "does not require grad",
    ),
    "backward to a parameter that it makes": Row(
        "y = torch.nn.Parameter(x.detach().clone()); step = torch.optim.SGD([y]).step;"
        "net(p, y).backward(); step(); value = net(p, y.detach())",
        "loop",
        "differs from plain autograd",
    ),
    "backward to a parameter of what all share": Row(
        "y = torch.nn.Parameter(torch.zeros_like(x[:3])); net(p, x * y).backward();"
        "value = net(p, x if y.grad is None else y.grad)",
        "loop",
        "differs from plain autograd",
    ),
    "behind a checkpoint": Row(
        LEAF
        + "h = checkpoint(lambda y: F.linear(y, w).tanh(), x, use_reentrant=False);"
        "step, = torch.autograd.grad(h @ u, x); value = net(p, step)",
        "loop",
        "checkpoint",
    ),
    "in front of a checkpoint": Row(
        LEAF + "slope, = grad(net(p, x), x);"
        "value = checkpoint(lambda y: net(p, y), slope, use_reentrant=False)",
        "loop",
        "checkpoint",
    ),
    "a parameter that no derivative reaches": Row(
        LEAF + "value = grad(F.linear(x, w, b).tanh() @ u, x)[0].square().sum()",
    ),
    "behind a branch on the derivative": Row(
        LEAF + "slope, = grad(net(p, x), x);"
        "value = slope.square().sum() * (2 if slope[0] > 0 else 3)"
    ),
}


def losses_cubes(h):
    return h * h.abs().square()


def loss_of(row):
    scope = globals() | {"checkpoint": checkpoint}
    run = losses.written(row.text, scope, "x")
    return lambda p, b, *sample: run(p, b, *sample)


BUFFERS = {"shift": randn(4, seed=20)}


def expected(loss, row):
    """Gradients of samples that do not see each other's `.grad`."""
    rows = list(oracle.rows(row.batch, B))
    found = [oracle.loss_gradients(loss, row.params, BUFFERS, each) for each in rows]
    OUTER.grad = None
    return {name: torch.cat([each[name] for each in found]) for name in row.params}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("name", ROWS)
def test_derivatives_inside_are_exact_by_the_route_that_is_named(name):
    row = ROWS[name]
    loss, given = loss_of(row), (row.params, BUFFERS, *row.batch)
    if row.route == "error":
        with pytest.raises(RuntimeError, match=row.why):
            vgrad.per_sample_grad(loss)(*given)
        return
    exact = expected(loss, row)
    assert oracle.norms(exact).all()
    assert_quantities(loss, row.params, row.batch, buffers=BUFFERS, expected=exact)
    report = vgrad.explain(vgrad.per_sample_grad(loss))(*given)
    assert report.strategy == row.route
    assert row.why in report.why
    if row.route == "recorded" and row.copied is not None:
        copied = {each.names[0] for each in report.rows if EXPANDED in each.why}
        assert copied == {*row.copied.split(", ")} - {""}
    if row.route == "recorded":
        assert OUTER.grad is None
    tensors = *row.params.values(), *BUFFERS.values(), CONSTANT
    assert all(each.grad is None and not each.requires_grad for each in tensors)


def penalty(p, b, x):
    """A gradient penalty, and a draw of each sample."""
    x = leaf(F.dropout(x, 0.5))
    value = net(p, x)
    return value + (grad(value, x)[0].norm() - 1).square()


def laplacian(p, b, x):
    x = leaf(x)
    (slope,) = grad(net(p, x), x)
    second = [grad(slope[n], x)[0][n] for n in range(D)]
    return torch.stack(second).sum().square()


def meta(p, b, x):
    return net(stepped(p, grad(net(p, x).square(), [*p.values()])), x.sin()).square()


LOSSES = [laplacian, meta]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("passes", [1, 2])
def test_chunks_masks_passes_and_loss_scales_change_no_number(loss, passes):
    exact = expected(loss, Row(""))
    kept = torch.tensor([True, True, False, True, True])
    exact = {name: each[kept] for name, each in exact.items()}
    bound = float(oracle.norms(exact).mean())
    scale = vgrad.precision.StaticLossScale(2.0**10)
    options = {"passes": passes, "chunk_size": 2, "loss_scale": scale}
    compute = vgrad.clipped_grad(loss, max_norm=bound, strategy="recorded", **options)
    for _ in range(2):
        found = compute(P, {}, X, mask=kept)
        oracle.assert_exact(found.grads, oracle.clipped(exact, bound))


@pytest.mark.parametrize("loss", LOSSES)
def test_derivatives_inside_are_captured(loss):
    compute = vgrad.compile(vgrad.per_sample_norm(loss), fallback="error")
    for scale in (1.0, 0.5, 2.0):
        params = {name: scale * each for name, each in P.items()}
        exact = oracle.norms(oracle.loss_gradients(loss, params, {}, (X,)))
        torch.testing.assert_close(compute(params, {}, X), exact)
    assert [each.calls for each in compute.reports()] == [2]


def test_autocast_is_on_in_inner_passes_as_in_a_loop():
    def back(ctx, g):
        cast.append(torch.is_autocast_enabled("cpu"))
        return 3 * ctx.saved_tensors[0] ** 2 * g

    def loss(p, b, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = leaf(x)
            h = F.linear(cubed(x), p["w"], p["b"])
            (slope,) = grad((h.tanh() @ p["v"]).sum(), x)
        return slope.float().square().sum() + h.float().square().sum()

    cast = []
    cubed = new_function("Cubed", lambda x: x**3, back, generate_vmap_rule=True).apply
    given = {n: w.float() for n, w in P.items()}, {}, X.float()
    exact = vgrad.per_sample_grad(loss, strategy="loop")(*given)
    assert all(cast)
    cast.clear()
    found = vgrad.per_sample_grad(loss, strategy="recorded")(*given)
    assert cast[:2] == [True, False]  # the second pass is outside of the loss
    oracle.assert_exact(found, exact, 2e-2)


def test_nothing_is_alive_after_a_backward_pass_inside():
    def loss(p, b, x):
        x = leaf(x)
        net(p, x).backward(create_graph=True)
        alive.append(weakref.ref(x.grad))
        return x.grad.square().sum()

    alive = []
    gc.disable()
    try:
        options = {"strategy": "recorded", "verify": False}
        vgrad.per_sample_norm(loss, **options)(P, {}, X)
        assert [each() for each in alive] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_loss_that_runs_again_draws_the_same_numbers(randomness):
    """The first call runs again where the loss differentiates, the second does not."""
    compute = vgrad.per_sample_grad(penalty, strategy="recorded", randomness=randomness)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append((compute(P, {}, X), torch.rand(1)))
    oracle.assert_exact(*found, 0)


def test_draws_of_a_generator_of_the_loss_are_not_repeated():
    def loss(p, b, x):
        noise = torch.rand(D, generator=generator, dtype=x.dtype)
        return meta(p, b, x + noise)

    generator = torch.Generator().manual_seed(1)
    with pytest.raises(vgrad.UnsupportedOp, match="of a generator"):
        vgrad.per_sample_grad(loss, strategy="recorded", randomness="same")(P, {}, X)


def test_the_grad_of_the_callers_tensors_is_not_read():
    def loss(p, b, x):
        net(p, x * OUTER[:3]).backward(retain_graph=True)
        return net(p, x) * (1 if OUTER.grad is None else OUTER.grad.sum())

    with pytest.raises(vgrad.UnsupportedOp, match=f"backward: .*{SHARED}"):
        vgrad.per_sample_grad(loss, strategy="recorded")(P, {}, X)
    assert OUTER.grad is None


@pytest.mark.filterwarnings("ignore")  # of torch, on graphs of gradients
@pytest.mark.parametrize("read", [False, True])
def test_the_grad_of_the_callers_tensors_is_as_before(read):
    """Also where a sample by itself shows whether a parameter has a gradient."""

    def loss(p, b, x):
        x = leaf(x)
        net(p, x * outer).backward(create_graph=not read)
        return net(p, x.grad + (outer.grad.sum() if read else 0))

    outer = OUTER[:3].detach().requires_grad_()
    before, exact = randn(3, seed=12), []
    for row in oracle.rows(X, B):
        outer.grad = before.clone()
        exact.append(oracle.loss_gradients(loss, P, {}, (row,)))
    outer.grad = given = before.clone()
    found = vgrad.per_sample_grad(loss)(P | {"no": X}, {}, X)
    for name in P:
        oracle.assert_exact(found[name], torch.cat([each[name] for each in exact]))
    assert outer.grad is given
    assert given.equal(before)

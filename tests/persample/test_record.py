"""The recorder, on losses as users write them; the reference is `oracle`'s loop.

Last come losses that cannot be recorded, and what calls and errors leave behind.
"""

import contextlib
import functools
import gc
import math

import pytest
import torch
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
from vgrad.factors import Dense
from vgrad.ops import OPS, Op
from vgrad.persample import EXPANDED

B = 4
RECORDED = {"strategy": "recorded"}
# Torch says where it loops over the samples.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def fixed(*shape):
    count = math.prod(shape)
    return torch.linspace(-1, 2, count, dtype=torch.float64).exp().cos().view(shape)


def given(shapes, sample=(3, 4)):
    named = enumerate(shapes.items(), 1)
    return {name: randn(*shape, seed=n) for n, (name, shape) in named}, (
        randn(B, *sample, seed=20),
    )


def written(text):
    """Make a function of parameters and a sample from an expression or statements."""
    loss = losses.written(text, globals())
    return lambda p, x: loss(p, {}, x)


def out_of(value):
    return value.sin().sum()


def check(run, params, batch, *, buffers=None, strategy="recorded"):
    """Compare every quantity of `out_of(run(params, *sample))` with the oracle."""

    def loss(params, buffers, *sample):
        return out_of(run({**params, **buffers}, *sample))

    losses.assert_quantities(loss, params, batch, buffers=buffers, strategy=strategy)


def rows_of(run, params, batch):
    compute = vgrad.per_sample_norm(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    return vgrad.explain(compute)(params, {}, *batch).rows


MOVED = {
    (40,): "w.reshape(10, 4)",
    (20,): "w.unflatten(0, (5, 4))",
    (4,): "w.unsqueeze(0)",
    (2, 2): "w.flatten()",
    (4, 4): "w.t()",
    (4, 5): "w.t(); w.T; w.mT; w.transpose(0, -1); w.transpose(dim0=1, dim1=0); "
    "torch.swapaxes(w, 0, 1); w.movedim(0, 1); w.permute(1, 0); w[:, 1:4].t(); "
    "w.t()[1:4]; w.t().contiguous()",
    (5, 4): "w.t().t(); w.permute(0, 1); w[1:3]; w[::2]; w[2:2]; w[None][0]; w[1]; "
    "w[-1]; w.narrow(0, 1, 3); w.double(); w.type_as(fixed(1)); w.clone()",
    (3, 6): "w[:, 1:5]; w[..., 2:]",
    (3, 8): "w.chunk(2, dim=1)[1]",
    (6, 4): "w.chunk(3)[1]; w.split([1, 3, 2])[1]; torch.split(w, 4)[1]",
    (7, 4): "w.tensor_split(3)[0]",
    (5, 8): "w.view(10, 4)",
    (8, 5): "w.t().reshape(10, 4); w.t().contiguous().view(10, 4); "
    "w.permute(1, 0).contiguous().view(-1, 4); w[:, ::2].contiguous().view(6, 4)",
    (1, 5, 4): "w.squeeze(0)",
    (2, 5, 4): "w.unbind()[1]; [*w][1]; w.view(-1, 4); w.view_as(fixed(10, 4)); "
    "w.reshape_as(fixed(10, 4)); w.flatten(0, 1)",
    (4, 2, 3): "w.permute(2, 1, 0).reshape(6, 4)",
    (5, 3, 4): "w.select(1, 2)",
    (1, 5, 1, 4): "w.squeeze()",
}
"""Views and copies of a parameter `w` of a shape, which inputs are multiplied by."""
DERIVED = {
    (4,): "w.expand_as(fixed(5, 4)); w.repeat(3, 1); torch.broadcast_to(w, (3, 4)); "
    "torch.diag_embed(w); torch.stack([w, w, 2 * w])",
    (9,): "w.as_strided((6, 4), (1, 1)); w.unfold(0, 4, 1)",
    (1, 4): "w.expand(5, 4)",
    (4, 4): "w.tril(); torch.matrix_exp(w - w.T)",
    (5, 2): "F.pad(w, (1, 1))",
    (5, 4): "w[[0, 2, 2]]; w[torch.tensor([[0, 2], [2, 4]])[0]]; "
    "w[torch.arange(5) != 1]; w.flip(0); w.index_select(0, torch.tensor([1, 1, 3])); "
    "torch.cat([w, w]); w.sort(0).values; w.topk(2, dim=0)[0]; "
    "torch.linalg.svd(w, full_matrices=False).S[None]; torch.where(w > 0, w, 0.1 * w); "
    "(w - w.mean()) / w.std(1, keepdim=True); w / w.abs().max(); "
    "w * w.sum().item(); w if w.sum() > 0 else 2 * w",
    (8, 5): "w.t().contiguous().view_as(w.reshape(10, 4))",
    (4, 4, 3): "w.diagonal()",
}
"""What is computed from a parameter in other ways."""


@pytest.mark.parametrize(
    ("shape", "text", "moved"),
    [
        (shape, text, table is MOVED)
        for table in (MOVED, DERIVED)
        for shape, texts in table.items()
        for text in texts.split("; ")
    ],
)
def test_a_function_of_a_parameter_is_exact_and_keeps_its_factor(shape, text, moved):
    batched = []

    def run(p, x):
        value = written(text)(p, x)
        batched.append(torch._C._functorch.is_batchedtensor(value))
        return F.linear(x, value)

    params, batch = given({"w": shape})
    check(run, params, batch)
    row, *rest = rows_of(run, params, batch)
    assert not any(batched)  # computed once, for no sample
    assert (row.names, row.op, row.factor) == (("w",), "linear", "Outer")
    assert EXPANDED not in row.why
    if moved:
        assert not rest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_parameter_in_another_dtype_keeps_its_factor(dtype):
    def run(p, x):
        return F.linear(x.to(dtype), p["w"].to(dtype)).float()

    def reference(params, x):
        return oracle.loss_gradients(
            lambda p, b, x: out_of(F.linear(x, p["w"])), params, {}, (x,)
        )

    params, x = {"w": randn(5, 4).float()}, randn(B, 4).float()
    (row,) = rows_of(run, params, (x,))
    assert (row.op, row.factor, row.form) == ("linear", "Outer", "both sides")
    tolerance = max(1e-6, 2 * oracle.rounding(reference, params, x, dtype=dtype))
    options = {"expected": reference(params, x), "tolerance": tolerance}
    losses.assert_quantities(
        lambda p, b, x: out_of(run(p, x)), params, (x,), **options, **RECORDED
    )


def spectral_norm(w):
    with torch.no_grad():
        left, right = fixed(5), fixed(4)
        for _ in range(3):
            right = F.normalize(w.t() @ left, dim=0)
            left = F.normalize(w @ right, dim=0)
    return w / torch.dot(left, w @ right)


def in_two_stages(x, w, v, half):
    return F.linear(x, half) + F.linear(x.cos(), half + v) + (half * v).sum()


W, WV, SQUARE = {"w": (5, 4)}, {"w": (5, 4), "v": (5, 4)}, {"w": (4, 4)}
WB, WG, TOKEN = W | {"b": (5,)}, W | {"g": (5, 1)}, W | {"token": (1, 4)}
LOW_RANK = {"down": (2, 4), "up": (5, 2)}
KEEP_A_FACTOR = {
    "F.linear(x, g * w / w.norm(dim=1, keepdim=True))": WG,
    "F.linear(x, torch._weight_norm(w, g, 0))": WG,
    "F.linear(x, spectral_norm(w))": W,
    "F.linear(x, w + 0.5 * up @ down, b)": WB | LOW_RANK,
    "F.linear(x, w * s.exp(), b * s.exp())": WB | {"s": ()},
    "F.linear(x, torch.einsum('k,koi->oi', k.softmax(0), bank))": {
        "k": (3,),
        "bank": (3, 5, 4),
    },
    "F.linear(x, torch.cat([w, v]), torch.cat([b, c]))": WV | {"b": (5,), "c": (5,)},
    "F.linear(input=x, weight=torch.cat(tensors=(w, v), dim=0))": WV,
    "F.linear(x, sum([w, v]))": WV,
    "F.linear(torch.cat([x, x], 1), torch.block_diag(w, v))": WV,
    "F.linear(x, w.exp()[1:3].t().t())": W,
}


@pytest.mark.parametrize("text", KEEP_A_FACTOR)
def test_what_is_computed_from_parameters_is_exact_and_keeps_a_factor(text):
    run, (params, batch) = written(text), given(KEEP_A_FACTOR[text])
    check(run, params, batch)
    rows = rows_of(run, params, batch)
    assert not any(EXPANDED in row.why for row in rows)
    assert "Outer" in [row.factor for row in rows if row.op == "linear"]


USES = {
    "F.linear(x, w + v) + F.linear(x.cos(), w)": WV,
    "in_two_stages(x, w, v, w * g)": WV | WG,
    "F.linear(x, w, b) + x @ down.t() @ up.t()": WB | LOW_RANK,
    "torch.stack([w, v]) @ x.mT": WV,
    "torch.cat([x, token, x]) @ w.t()": TOKEN,
    "torch.stack([token[0], x[0]]) @ w.t()": TOKEN,
    "torch.linalg.multi_dot([x, down.t(), up.t()])": LOW_RANK,
    "sum(n * F.linear(x, a) for n, a in enumerate(w.chunk(3)))": {"w": (6, 4)},
    "F.linear(x, w[:3]) * F.linear(x.cos(), w[:3])": W,
    "F.linear(x[:, :2], w[:, :2]).sum() * F.linear(x, w[1:3])": W,
    "F.linear(F.linear(x, w).sin(), w.t())": SQUARE,
    "F.linear(x, w) * w.sum() + (x * w[0]).sum()": W,
    "F.conv1d(x.mT[None], w.view(2, 4, 3))": {"w": (2, 12)},
    "F.conv1d(x.mT[None], w.transpose(0, 1))": {"w": (4, 2, 2)},
    "F.conv1d(x.mT[None], w[1:3])": {"w": (4, 4, 2)},
    "F.layer_norm(x, (4,), w[0], w[1])": {"w": (2, 4)},
    "F.layer_norm(x, (4,), *w.unbind(1))": {"w": (4, 2)},
    "F.linear(x, w, b[2:7])": W | {"b": (8,)},
    "F.embedding(x.abs().mul(3).long().clamp(max=6), w.t())": {"w": (4, 7)},
    "F.linear(F.embedding(x.abs().long().clamp(max=2), w[1:5]), w)": {"w": (7, 4)},
    "F.linear(w, v) * x.sum()": WV,
    "w.square()": W,
    "torch.embedding(w, (x[:, 0] > 0).long(), 0)": {"w": (3, 2)},
    "torch.addmm(b, x, w, beta=0)": {"w": (4, 5), "b": (5,)},
    "F.linear(x, w) + b.square()": WB,
    # What is the same for all samples: constants, positions, buffers.
    "F.linear(fixed(3, 4), w) + x.sum()": W,
    "F.linear(F.linear(fixed(3, 4), w).sin() * x, v)": SQUARE | {"v": (5, 4)},
    "(F.linear(fixed(3, 4), w).exp() * v).sin() * x": SQUARE | {"v": (3, 4)},
    "F.linear(F.linear(fixed(3, 4), w).sin(), v)": W | {"v": (2, 5)},
    "F.linear(F.embedding(torch.arange(3), w) + x, v)": {"w": (7, 4), "v": (5, 4)},
    "F.conv1d(fixed(1, 3, 6), w) * x.sum()": {"w": (2, 3, 3)},
    "F.layer_norm(fixed(3, 4), (4,), w, v) * x": {"w": (4,), "v": (4,)},
    "F.linear(buffer, w) * x.sum()": W,
    "F.linear(fixed(3, 4), w)": W,
    "attention(x[None], F.linear(fixed(1, 6, 4), w), fixed(1, 6, 4))": SQUARE,
}
attention = F.scaled_dot_product_attention


@pytest.mark.parametrize("text", USES)
def test_uses_of_parameters_and_of_their_parts_add_up(text):
    params, batch = given(USES[text])
    check(written(text), params, batch, buffers={"buffer": fixed(3, 4)})


IN_PLACE = """
    F.relu(h, inplace=True); F.leaky_relu_(h, 0.1); h.sigmoid_(); h.add_(1);
    h.__imul__(x.sum(-1, keepdim=True)); (h.mT[1:3].tanh_(), h)[1];
    h.__setitem__((..., 0), 0.5) or h; h.__setitem__(1, x.sum()) or h;
    (h.narrow(-1, 0, 2).sin_(), h[1:].exp_(), h)[2]; h.clamp_(-0.5, 0.5);
    h.masked_fill_(torch.arange(5) > 2, 0.0); h.neg_().add_(x.mean()).mul_(0.5).exp_();
    h.addcmul_(h.detach().clone(), h.detach().clone())
"""
BEFORE = {
    "F.linear(x, w, b)": WB,
    "x @ w": {"w": (4, 5)},
    "x @ w[:, 5:]": {"w": (4, 10)},
    "F.linear(x, w.tanh())": W,
    "F.conv1d(x.mT[None], w, b)[0].mT": {"w": (5, 4, 1), "b": (5,)},
    "F.layer_norm(F.pad(x, (0, 1)), (5,), w, b)": {"w": (5,), "b": (5,)},
    "F.embedding((x[:, 0] > 0).long(), w)": {"w": (3, 5)},
    "w * F.pad(x, (0, 1))": {"w": (3, 5)},
    "torch.einsum('ti,io->to', x, w)": {"w": (4, 5)},
}


@pytest.mark.parametrize("change", [each.strip() for each in IN_PLACE.split(";")])
@pytest.mark.parametrize("before", BEFORE)
def test_outputs_may_be_changed_in_place(before, change):
    def changed(p, x):
        x = x.tanh()
        h = written(before)(p, x)
        return F.linear(written(change)({"h": h}, x), p["last"])

    params, batch = given({**BEFORE[before], "last": (2, 5)})
    check(changed, params, batch)


def without_grad(function, *args):
    with torch.no_grad():
        return function(*args)


DETACHED = [
    """
with torch.no_grad(): e, part, gram = w.exp(), w[:2], w @ w.t()
h = F.linear(x, e) @ gram + F.linear(x, part).sum()
value = h + F.linear(x, v.t()).sum()""",
    """
with torch.set_grad_enabled(False):
    h = F.linear(x, w)
    with torch.enable_grad(): k = F.linear(x, w)
value = h * k""",
    "h = F.linear(x, w); value = F.linear(h, v).sum() * h.detach()",
    "F.linear(without_grad(F.linear, x, w), v)",
    "without_grad(torch.mul, w[0], x.sum()) + F.linear(x, w).sum()",
    "F.linear(x, w) + F.linear(x.cos(), w.detach() * 2)",
    "F.linear(x, w.detach().t().t()) + x.sum() * s",
    "F.linear(x, w.data) + x.sum() * s",
    "x @ w.data.exp().t() + x.sum() * s",
    "F.linear(x, w).detach() @ v.t()",
    "F.linear(x, w + (w.round() - w).detach())",  # straight through
    "F.linear(F.linear(x, w), v.detach())",
]


@pytest.mark.parametrize("text", DETACHED)
def test_what_is_detached_or_without_autograd_is_a_constant(text):
    check(written(text), *given({"w": (5, 4), "v": (4, 5), "s": ()}))


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
    compute = vgrad.clipped_grad(
        lambda p, b, x: x.sum(), max_norm=1.0, strategy=strategy
    )
    params, batch = given(W)
    found = compute(params, {}, *batch)
    assert torch.equal(found.grads["w"], torch.zeros(5, 4, dtype=torch.float64))
    assert not found.norms.any()


class Scaled(torch.autograd.Function):
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
    @classmethod
    def vmap(cls, info, in_dims, x):
        return x.detach().round(), in_dims[0]


class Applied(Rounded):
    applies = True


CUSTOM = {
    "an activation": lambda f: lambda p, b, x: f(F.linear(x, p["w"])).square().sum(),
    "both": lambda f: lambda p, b, x: f(x * f(p["w"][:3])).square().sum(),
    "a parameter": lambda f: lambda p, b, x: F.linear(x, f(p["w"])).square().sum(),
    "mapped": lambda f: lambda p, b, x: torch.vmap(f)(x * p["w"][:3]).square().sum(),
}


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize(
    ("where", "function"),
    [
        *((where, function) for where in CUSTOM for function in (Rounded, Applied)),
        *((where, Unlinked) for where in ("an activation", "both")),
    ],
)
def test_functions_with_a_vmap_of_their_own_have_their_own_gradients(
    where, function, strategy
):
    loss, (params, batch) = CUSTOM[where](function.apply), given(W)
    options = {"tolerance": 1e-12, "strategy": strategy}
    losses.assert_gradients(loss, params, batch, **options)


def layer(w):
    return lambda x: F.linear(x, w).tanh()


def total(w):
    return lambda x: F.linear(x, w).tanh().sum()


def by_vjp(x, w):
    value, pull = torch.func.vjp(layer(w), x)
    return pull(value)[0]


def slope_of_sines(w):
    return torch.autograd.grad(w.sin().sum(), w, create_graph=True)[0]


INSIDE = [
    "F.linear(x, w).sum() + torch.func.grad(total(w))(x).square().sum()",
    "torch.func.grad(total(w.t().t()))(x).square().sum() + F.linear(x, w[:2]).sum()",
    "by_vjp(x, w)",
    "torch.func.jvp(layer(w), (x,), (x.cos(),))[1]",
    "torch.func.hessian(total(w))(x[0])",
    "torch.func.jacrev(layer(w))(x[0])",
    "torch.vmap(lambda row: F.linear(row, w).sin())(x)",
    "torch.vmap(torch.matmul, (0, None))(x, w.t())",
    "F.linear(x, slope_of_sines(w))",
    "Scaled.apply(F.linear(x, w), fixed(3, 5))",
    "Scaled.apply(x, w[:3])",
    "F.linear(x, Scaled.apply(w, fixed(5, 4)))",
    "Scaled.apply(x, w.exp()[:3]) + F.linear(x, w)[:, :4]",
]


@pytest.mark.parametrize("text", INSIDE)
def test_transforms_and_functions_inside_the_loss_are_exact(text):
    check(written(text), *given(W))


def complexified(x):
    return torch.complex(x, x.cos())


COMPLEX = [
    "F.linear(complexified(x), w, b).abs().square()",
    "(complexified(x) @ w.t()[:, 1:3]).real.sin()",
    "F.linear(complexified(x), w.conj() * b[:, None]).abs()",
    "F.linear(x, torch.view_as_real(w)[..., 1])",
    "F.linear(complexified(x), real.to(torch.complex128)).abs()",
    "(real[:3] * complexified(x)).abs()",
]


@pytest.mark.parametrize("text", COMPLEX)
def test_complex_parameters_have_the_gradients_of_their_parts(text):
    parts, (x,) = given({"w": (5, 4, 2), "b": (5, 2), "real": (5, 4)})

    def composed(p):
        return {n: v if n == "real" else torch.view_as_complex(v) for n, v in p.items()}

    def apart(p):
        whole = {n: v.resolve_conj() for n, v in p.items()}
        return {
            n: torch.view_as_real(v) if n != "real" else v for n, v in whole.items()
        }

    def loss(params, buffers, x):
        return out_of(written(text)(params, x))

    expected = oracle.loss_gradients(
        lambda p, b, x: loss(composed(p), b, x), parts, {}, (x,)
    )
    bound = 0.9 * float(oracle.norms(expected).mean())
    grads = vgrad.per_sample_grad(loss, **RECORDED)(composed(parts), {}, x)
    found = losses.clipped(loss, bound, composed(parts), x, **RECORDED)
    oracle.assert_exact(apart(grads), expected)
    oracle.assert_exact(found.norms, oracle.norms(expected))
    oracle.assert_exact(apart(found.grads), oracle.clipped(expected, bound))


def kernel():
    return randn(4, 3, 2, 2).to(memory_format=torch.channels_last)


STRIDES = {
    "of stride zero": lambda: torch.full((1, 1), 0.3).double().expand(4, 4),
    "of equal strides": lambda: randn(7).as_strided((4, 4), (1, 1)),
    "of swapped strides": lambda: randn(8, 5)[:4, :4].t(),
}
ORDERS = [
    "w.permute(0, 1)",
    "w.transpose(0, 0)",
    "w.swapaxes(0, 1).swapaxes(-1, -2)",
    "w.t()",
    "torch.permute(w, dims=(-1, 0))",
]


@pytest.mark.parametrize(
    ("make", "order", "width"),
    [
        *((make, order, 4) for make in STRIDES.values() for order in ORDERS),
        (kernel, "w.permute(0, 2, 3, 1).view(4, -1)", 12),
    ],
)
def test_a_parameter_of_any_strides_is_reordered_where_the_loss_says_so(
    make, order, width
):
    check(written(f"F.linear(x, {order})"), {"w": make()}, (randn(3, width),))


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


AT_WEIGHTS = """
value = {}.tanh().sum()
grad = torch.autograd.grad(value, w, create_graph=True, allow_unused=True)[0]
value = value + grad.square().sum()"""
FILLS = "value = F.linear(x, w).tanh().sum(); {}(value, retain_graph=True)"
GRAD_AT_WEIGHTS = """
grad = torch.func.grad(lambda w: F.linear(x, w).tanh().sum())(w)
value = F.linear(x, w).sum() + grad.square().sum()"""
WRITES_IN_PLACE = '^mul_: .*from w, got one that changes such a tensor in place.*"vmap'
OWN = 'runs no backward pass of its own.*torch.func.grad.*strategy="loop"'
OVER = 'got w in one that it does not, such as a transform of torch.func.*"vmap"'
UNRECORDED = [  # and a strategy that runs such a loss
    ("w = w * 1; w.mul_(2); value = F.linear(x, w)", WRITES_IN_PLACE, "auto"),
    (
        """
x = x.detach().requires_grad_()
value = F.linear(x, w).tanh().sum()
value = torch.autograd.grad(value, x, create_graph=True)[0].square().sum()""",
        OWN,
        "loop",
    ),
    *(
        (AT_WEIGHTS.format(each), OWN, "auto")
        for each in ("F.linear(x, w)", "(x @ w.exp().t())", "(w[0] * x)")
    ),
    (FILLS.format("torch.Tensor.backward"), OWN, "loop"),
    (FILLS.format("torch.autograd.backward"), OWN, "loop"),
    *(
        (text, OVER, "auto")
        for text in (
            GRAD_AT_WEIGHTS,
            # The norms of the samples of a sample.
            "vgrad.per_sample_norm(lambda p, b, row: total(p['w'])(row), "
            "strategy='vmap')({'w': w}, {}, x)",
            "torch.vmap(torch.func.grad(lambda x, w: total(w)(x)), (0, None))(x, w)",
            "torch.vmap(torch.vmap(torch.mul, (0, None)), (None, 0))(w[0], x[:, 0])",
            "torch.vmap(lambda w: F.linear(x, w[None]).sin())(w)",
            "v = w * 2; value = torch.func.grad(lambda w: w.sin().sum())(v) * v * x[0]",
            "torch.vmap(torch.sin)(w[:2]) * w.exp()[:2] * x[0]",
        )
    ),
    (
        "w.data = torch.renorm(w.data, 2, 0, 1.0); value = F.linear(x, w)",
        *('strategy="loop"', "loop"),
    ),
]


@pytest.mark.parametrize(("text", "message", "strategy"), UNRECORDED)
def test_what_cannot_be_recorded_is_refused_and_runs_otherwise(text, message, strategy):
    run, (params, batch) = written(text), given(W)
    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    with pytest.raises(vgrad.UnsupportedOp, match=message):
        compute(params, {}, *batch)
    check(run, params, batch, strategy=strategy)
    assert params["w"].grad is None


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


RANDOM = {
    "dropout": "F.dropout(F.linear(x, w), 0.5)",
    "dropout in place": "F.dropout(F.linear(x, w), 0.5, inplace=True)",
    "dropout of features": "F.dropout1d(F.linear(x, w)[None], 0.5)",
    "alpha dropout": "F.alpha_dropout(F.linear(x, w), 0.5, True)",
    "dropout of weights": "F.linear(x, F.dropout(w, 0.5))",
    "noise like data": "F.linear(x + torch.randn_like(x), w)",
    "noise": "F.linear(x, w) + torch.randn(3, 5, dtype=x.dtype)",
    "noise on weights": "F.linear(x, w + torch.randn_like(w))",
    "noise in place": "F.linear(torch.empty_like(x).uniform_() * x, w)",
    "bernoulli": "torch.bernoulli(x / x.abs().max() / 4 + 0.5) @ w.t()",
    "gumbel": "F.gumbel_softmax(F.linear(x, w))",
    "attention": "attention(F.linear(x, w[:4])[None], x[None], x[None], dropout_p=0.5)",
    "several": "F.dropout(F.linear(F.dropout(x, 0.3), w).sin(), 0.5) "
    "+ torch.rand((), dtype=x.dtype)",
}
BY_DATA = "expected random numbers that all samples can share"
OF_WEIGHTS = "dropout: expected values computed from w alone to be the same"


def drawn(name, params, x, **options):
    torch.manual_seed(5)
    compute = vgrad.per_sample_grad(
        lambda p, b, x: out_of(written(RANDOM[name])(p, x)), **options
    )
    return compute(params, {}, x)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", RANDOM)
def test_all_strategies_draw_the_same_shared_numbers(name, chunk_size):
    params, (x,) = given(W)
    options = {"randomness": "same", "chunk_size": chunk_size}
    expected = drawn(name, params, x, strategy="loop", **options)
    for strategy in ("recorded", "vmap"):
        if name == "bernoulli":  # torch cannot share what depends on the sample
            with pytest.raises(vgrad.UnsupportedOp, match=BY_DATA):
                drawn(name, params, x, strategy=strategy, **options)
            continue
        oracle.assert_exact(
            drawn(name, params, x, strategy=strategy, **options), expected
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_refused_or_differ_between_equal_samples(name, strategy):
    params, (x,) = given(W)
    x, options = x[:1].expand(B, -1, -1), {"strategy": strategy}
    with pytest.raises(RuntimeError, match='randomness="different"'):
        drawn(name, params, x, randomness="error", **options)
    options["randomness"] = "different"
    if name == "dropout of weights" and strategy == "recorded":
        with pytest.raises(vgrad.UnsupportedOp, match=OF_WEIGHTS):
            drawn(name, params, x, **options)
        return
    found = drawn(name, params, x, **options)["w"]
    assert len(found.flatten(1).unique(dim=0)) == B
    assert torch.equal(found, drawn(name, params, x, **options)["w"])


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


class Fails(Rounded):
    applies = True

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


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
@pytest.mark.parametrize("options", [{}, {"chunk_size": "auto"}], ids=str)
@pytest.mark.parametrize("transform", [*problems.TRANSFORMS, "explain"])
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
            with pytest.raises(RuntimeError, match='was recorded.*strategy="vmap"'):
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

    def run(p, x):
        return F.linear(x, p["w"]) + F.linear(x, outer)

    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    compute(params, {}, middle)
    check(run, params, (middle.detach(),))
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

"""The contract of losses: every quantity is exact under every strategy, or refused.

A loss is a text of parameters by name, of `p` with all of them, and of a sample. The
reference is the loop of plain autograd in float64 of `oracle`.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import Function, _SingleLevelFunction
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import vgrad
from tests import losses, oracle
from tests.losses import (
    STRATEGIES,
    assert_quantities,
    new_function,
    old_function,
    randn,
)
from vgrad.persample import EXPANDED

checkpoint = partial(checkpointing.checkpoint, use_reentrant=False)
attention = F.scaled_dot_product_attention
TABLE_OF_ROWS = randn(7, 3, seed=3)


def fixed(*shape):
    count = math.prod(shape)
    return torch.linspace(-1, 2, count, dtype=torch.float64).exp().cos().view(shape)


def of_sines(p, value):
    return value.sin().sum()


@dataclass
class Row:
    """A loss, what it is made of, and its outcome."""

    text: str
    shapes: dict[str, Any]  # of parameters, or the parameters themselves
    batch: tuple = (randn(4, 3, 4, seed=20),)
    letters: str = "xy"  # of what is in the batch
    end: Callable = of_sines
    refused: dict[str, str] = field(default_factory=dict)  # errors, by strategy
    warns: str = ""  # what "auto" says
    keeps: int | None = None  # uses that keep a factor, if all of them do; 0 for any
    parts: list[int] | None = None  # into which the samples fall
    strategies: tuple[str, ...] = ("auto", *STRATEGIES)

    def given(self):
        """Return the loss, its parameters and buffers."""
        run = losses.written(self.text, globals(), self.letters)
        params = {
            name: shape if isinstance(shape, torch.Tensor) else randn(*shape, seed=n)
            for n, (name, shape) in enumerate(self.shapes.items(), 1)
        }
        buffers = {"buffer": fixed(3, 4), "shift": fixed(4), "scale": fixed()}

        def loss(params, buffers, *sample):
            return self.end(params, run(params, buffers, *sample))

        return loss, params, buffers

    @cached_property
    def expected(self):
        """The gradients of the reference, for all strategies."""
        return oracle.loss_gradients(*self.given(), self.batch)


ROWS: dict[str, Row] = {}


def add(texts: Iterable[str], shapes: dict, **fields: Any) -> None:
    for text in texts:
        name = f"{text}, {shapes}" if text in ROWS else text
        ROWS[name] = Row(text, shapes, **fields)


# What is computed from parameters alone is computed once, and keeps its factor.

MOVED = {
    (40,): "w.reshape(10, 4)",
    (4, 5): "w.t(); w.movedim(0, 1); w[:, 1:4].t(); w.t()[1:4]; w.t().contiguous()",
    (5, 4): "w.t().t(); w[1:3]; w[::2]; w[2:2]; w[-1]; w.narrow(0, 1, 3); w.double(); "
    "w.clone()",
    (3, 8): "w.chunk(2, dim=1)[1]",
    (8, 5): "w.t().contiguous().view(10, 4)",
    (2, 5, 4): "w.unbind()[1]; [*w][1]; w.flatten(0, 1)",
    (4, 2, 3): "w.permute(2, 1, 0).reshape(6, 4)",
    (1, 5, 1, 4): "w.squeeze()",
}
"""Views and copies of a parameter `w` of a shape, which inputs are multiplied by."""
DERIVED = {
    (4,): "w.expand_as(fixed(5, 4)); w.repeat(3, 1); torch.stack([w, w, 2 * w])",
    (9,): "w.as_strided((6, 4), (1, 1))",
    (4, 4): "torch.matrix_exp(w - w.T)",
    (5, 2): "F.pad(w, (1, 1))",
    (5, 4): "w[[0, 2, 2]]; w[torch.arange(5) != 1]; torch.cat([w, w]); "
    "w.sort(0).values; torch.linalg.svd(w, full_matrices=False).S[None]; "
    "torch.where(w > 0, w, 0.1 * w); (w - w.mean()) / w.std(1, keepdim=True); "
    "w * w.sum().item(); w if w.sum() > 0 else 2 * w",
    (4, 4, 3): "w.diagonal()",
}
"""What is computed from a parameter in other ways."""

RECORDED = ("auto", "recorded")
"""For what vmap and a loop do by torch's own ops alone."""
AT_ONCE = (*RECORDED, "vmap")
"""For what a loop does by torch's own ops alone."""

for table, keeps in ((MOVED, 1), (DERIVED, 0)):
    for shape, texts in table.items():
        texts = [f"F.linear(x, {each})" for each in texts.split("; ")]
        add(texts, {"w": shape}, keeps=keeps, strategies=RECORDED)


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

for text, shapes in KEEP_A_FACTOR.items():
    add([text], shapes, keeps=0, strategies=RECORDED)


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
for text, shapes in USES.items():
    add([text], shapes, strategies=AT_ONCE)


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

FULL = ("F.linear(x, w, b)", "x @ w[:, 5:]")
for text, shapes in BEFORE.items():
    changes = IN_PLACE.split(";")
    # Of other ops than these a change of all numbers, and one of some.
    for change in changes if text in FULL else changes[3:6:2]:
        both = f"x = x.tanh(); h = {text}; value = F.linear({change.strip()}, last)"
        add([both], shapes | {"last": (2, 5)}, strategies=("recorded",))


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
add(DETACHED, {"w": (5, 4), "v": (4, 5), "s": ()})


# Functions of autograd, with and without a vmap, and transforms inside the loss.


def of_product(ctx, grad):
    x, w = ctx.saved_tensors
    return grad * w, grad * x


def thrice(ctx, grad):
    return 3 * grad


Scaled = new_function("Scaled", torch.mul, of_product, generate_vmap_rule=True)
ROUNDINGS = {
    "Rounded": torch.round,
    "Unlinked": lambda x: x.detach().round(),
    "Applied": lambda x: Applied.apply(x),
}
Rounded, Unlinked, Applied = (
    new_function(
        name, torch.round, thrice, vmap=lambda info, axes, x, f=f: (f(x), axes[0])
    )
    for name, f in ROUNDINGS.items()
)
INNER = ["F.linear(x, {}(w)).square()", "torch.vmap({})(x * w[:3]).square()"]
OUTER = ["{}(F.linear(x, w)).square()", "{}(x * {}(w[:3])).square()"]
for name, texts in {"Rounded": INNER, "Applied": INNER + OUTER}.items():
    add([text.replace("{}", f"{name}.apply") for text in texts], W)
for name in ("Rounded", "Unlinked"):  # whose gradients no vmap links
    texts = [text.replace("{}", f"{name}.apply") for text in OUTER]
    add(texts, W, warns=f"vmap cannot run {name}.apply, which runs sample by sample")


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
add(INSIDE, W)


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
PAIRS = {name: torch.view_as_complex(randn(*n, 2)) for name, n in WB.items()}
add(COMPLEX, PAIRS | {"real": (5, 4)}, strategies=AT_ONCE)


# Parameters of any strides are reordered where the loss says so.

STRIDES = [
    "torch.full((1, 1), 0.3).double().expand(4, 4)",
    "randn(7).as_strided((4, 4), (1, 1))",
    "randn(8, 5)[:4, :4].t()",
]
ORDERS = [
    "w.permute(0, 1)",
    "w.transpose(0, 0)",
    "w.swapaxes(0, 1).swapaxes(-1, -2)",
    "w.t()",
    "torch.permute(w, dims=(-1, 0))",
]
for strides in STRIDES:
    texts, shapes = (
        [f"F.linear(x, {each})  # {strides}" for each in ORDERS],
        eval(strides),
    )
    add(texts, {"w": shapes}, strategies=AT_ONCE)
KERNEL = randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
BY_PIXELS = "F.linear(x, w.permute(0, 2, 3, 1).view(4, -1))"
add([BY_PIXELS], {"w": KERNEL}, batch=(randn(4, 3, 12),))


# What a recorded pass cannot see, or must not change.

AT_WEIGHTS = """
value = {}.tanh().sum()
grad = torch.autograd.grad(value, w, create_graph=True, allow_unused=True)[0]
value = value + grad.square().sum()"""
FILLS = "value = F.linear(x, w).tanh().sum(); {}(value, retain_graph=True)"
OWN = 'runs no backward pass of its own.*torch.func.grad.*strategy="loop"'
OVER = 'got w in one that it does not, such as a transform of torch.func.*"vmap"'
GRAD_AT_WEIGHTS = """
grad = torch.func.grad(lambda w: F.linear(x, w).tanh().sum())(w)
value = F.linear(x, w).sum() + grad.square().sum()"""
UNRECORDED = {
    '^mul_: .*from w, got one that changes such a tensor in place.*"vmap': [
        "w = Scaled.apply(w, w); w.mul_(2); value = F.linear(x, w)"
    ],
    OVER: [
        GRAD_AT_WEIGHTS,
        # The norms of the samples of a sample.
        "vgrad.per_sample_norm(lambda p, b, row: total(p['w'])(row), "
        "strategy='vmap')({'w': w}, {}, x)",
        "torch.vmap(torch.func.grad(lambda x, w: total(w)(x)), (0, None))(x, w)",
        "torch.vmap(torch.vmap(torch.mul, (0, None)), (None, 0))(w[0], x[:, 0])",
        "torch.vmap(lambda w: F.linear(x, w[None]).sin())(w)",
        "v = w * 2; value = torch.func.grad(lambda w: w.sin().sum())(v) * v * x[0]",
        "torch.vmap(torch.sin)(w[:2]) * w.exp()[:2] * x[0]",
        "back = torch.func.vjp(torch.mul, w.sin(), w)[1]; value = back(w)[0] * x[0]",
    ],
}
for message, texts in UNRECORDED.items():
    add(texts, W, refused={"recorded": message})
for each in ("F.linear(x, w)", "(x @ w.exp().t())", "(w[0] * x)"):
    add([AT_WEIGHTS.format(each)], W)
BY_LOOP = dict.fromkeys(("recorded", "vmap"), 'strategy="loop"')
add([FILLS.format("torch.Tensor.backward")], W, refused={"vmap": OWN})
fills = FILLS.format("torch.autograd.backward")
add([fills], W, refused=dict.fromkeys(BY_LOOP, OWN))
add(["w.data = torch.renorm(w.data, 2, 0, 1.0); value = x @ w.t()"], W, refused=BY_LOOP)
for op, text in {
    "numpy": "(w * x).sum() * x.numpy().item(0)",
    "resize_": "x.clone().resize_(2)[0] * (w * x).sum()",
    "retain_grad": "h = x * w; h.retain_grad(); value = h.sin().sum()",
}.items():
    refused = dict.fromkeys(BY_LOOP, f'^{op}: .*"loop"')
    add([text], {"w": (3, 4)}, refused=refused, warns=f"one sample after.*: {op}:")


# Reads of values: one for all samples, or parts that run apart. Shapes that depend on
# values are such reads: samples of one count stay together.


def net(p, x):
    return (p["w"] @ x).tanh() @ p["v"]


BRANCHES = [
    "net(p, x.sin() if x.sum() > 0 else x * 2).square()",
    """
h = net(p, x)
if h > 0: h = h * 2 if x[0] > x[1] else h.exp()
value = h.square()""",
    """
h = x
for _ in range(1 + int(x[0].abs() * 3)): h = (w.t() @ (w @ h) / 4).sin()
value = h.square().sum()""",
    """
try: positive = bool(x.sum() > 0)
except Exception: positive = True
value = net(p, x) * (2 if positive else 3)""",
    "net(p, x) * x.sum().item() + float(x[0]) * net(p, x.sin())",
    """
chosen = [n for n, each in enumerate(x.tolist()) if each > 0]
value = net(p, x) + sum(w[:, n].sin().sum() * x[n] for n in chosen)""",
    "same = torch.equal(x.relu(), x) or torch.allclose(x, x.abs(), atol=0.5);"
    "value = net(p, x) * (2 if same or 0.5 in x.round(decimals=1) else 1)",
    "bad = float(torch.where(x[0] > 0, x[0], torch.nan));"
    "value = net(p, x) * (3 if bad != bad else 1)",
    "zero = float(x[0].sign() * 0);"  # -0.0 for some, which is another number
    "value = net(p, x) * (1 + torch.tensor(zero).signbit())",
    "net(p, x) * (2 if v.sum() > 0 else 3) * float(scale)",
]
SIZE, T, D = 12, 5, 4
NET = {"w": (3, D), "v": (3,)}
add(BRANCHES, NET, batch=(randn(SIZE, D, seed=2),))

ORDER = torch.Generator().manual_seed(0)
MASK = torch.arange(T) < torch.tensor([5, 3, 3, 0, 1, 5, 3, 2, 0, 3, 3, 5])[:, None]
MASK = torch.stack([row[torch.randperm(T, generator=ORDER)] for row in MASK])
WORDS = torch.randint(4, (SIZE, T), generator=torch.Generator().manual_seed(3))
BATCH = (randn(SIZE, T, D, seed=2), MASK, WORDS)


def of_rows(p, x):
    """A number for the rows [..., D] that are there, and one if there are none."""
    table = (p["table"] * 0.1).sum()
    return ((x @ p["w"].t()).tanh() @ p["v"]).square().sum() + table


def put(x, index, value):
    x = x * 1
    x[index] = value
    return x


def placed(x, mask, w, v):
    h = (x @ w.t()).tanh() * 1
    h[mask] = h[mask] * 2 + v
    h[mask] += 1
    return h


def in_groups(x, words, w, v):
    names, group, counts = words.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(names), 3, dtype=x.dtype).index_add(0, group, x @ w.t())
    return (sums / counts[:, None]).tanh() @ v


def experts(x, words, w):
    h = torch.zeros_like(x)
    for number in range(3):
        (token,) = torch.where(words == number)
        if token.numel():
            h.index_add_(0, token, (x[token] * w[number]).sin())
    return h


NO_COUNT = ["put(x @ w.t() @ w, m, 0.5)", "put(x, m[0], w[0])"]
READS = [
    *NO_COUNT,
    "x[m]",
    "(x @ w.t())[m] @ w",
    "x[(x > 0) & m[:, None]].sin()[:, None] * w[0]",
    "x[m, 2][:, None] * w[0]",
    "F.pad(x[m, 1:], (0, 1))",
    "x.t()[:, m].t()",
    "x.t()[..., m].t()",
    "x[None, m, None][0, :, 0]",
    "x.t()[1, m][:, None] * w[0]",
    "x.t()[i[:1], m][:, None] * w[0]",
    "(x @ x.t())[m, m][:, None] * w[0]",
    "(x @ x.t())[:, None][m, :, m] * w[0]",
    "x[m.byte()]",
    "x[m[0]].flatten(0, 1)",
    "i[m].to(x.dtype)[:, None] * w[0]",
    "x[torch.arange(T) > 1]",
    "table[m]",
    "table[m] * x[m] + table[i[m]]",
    "table.exp()[m]",
    "x.masked_select(m[:, None])[:, None] * w[0]",
    "torch.masked_select(x[0], m[:, None])[:, None] * w[0]",
    "x[m.nonzero()[:, 0]]",
    "(x > 0).nonzero().to(x) @ w[:2]",
    "x[torch.nonzero(x > 0, as_tuple=True)][:, None] * w[0]",
    "x[m.nonzero(as_tuple=True)]",
    "x[i.nonzero().flatten()]",
    "x[torch.argwhere(m)[:, 0]] + x[m.argwhere()[:, 0]]",
    "x[torch.where(m)]",
    "x[torch.where(condition=m)]",
    "torch.repeat_interleave(x, i, dim=0)",
    "(x @ w.t()).repeat_interleave(i, 0) @ w",
    "x[:, 0].repeat_interleave(i)[:, None] * w[0]",
    "x.repeat_interleave(i[:1], 0)",
    "table.repeat_interleave(i, 0)",
    "x[i.repeat_interleave(i)]",
    "x[torch.repeat_interleave(i)]",
    "F.one_hot(i).to(x).t() @ x",
    "x[: i.max()]",
    "x.t()[:, i[0] : m.sum() : 2].t()",
    "x[torch.arange(m.sum()) % i[:3].max().clamp(1)]",
    "torch.cat([torch.zeros(i[0], D).to(x), x])",
    "x.new_full((i[0], D), 2) * w[0]",
    "x[1:].reshape(i[0] % 2 + 1, -1, D).flatten(0, 1)",
    "x.split([i[0], T - i[0]])[0]",
    "x.repeat(i[1], 1) @ w.t() @ w",
    "put(x, slice(i[0]), v[0])",
    "torch.bincount(i).to(x)[:, None] * x[:1]",
    "i.bincount(x[:, 0], minlength=2)[:, None] * w[0]",
    "in_groups(x, i, w, v)[:, None] * w[0]",
    "x[i.unique_consecutive()]",
    "x.index_put((m,), x[m].sin())",
    "torch.index_put(x, (m, i[m] % D), x[m, 0], accumulate=True)",
    "experts(x, i, w)",
    "placed(x, m, w, v) @ w",
    "put(x, m, w[1])",
    "put(x, m, (x * w[0]).sum())",
    "put(x, m, x[:1] * w[0])",
    "put(x.t(), (..., m), x[0, :, None]).t()",
    "put(x, x > w[0], v[0])",
    "put(x, (m, 1), v[0])",
    "put(i, m, 2.7).to(x)[:, None] * w[0]",
    "torch.func.grad(lambda x: x[m].sin().square().sum())(x)",
]
OF_ROWS = {"batch": BATCH, "letters": "xmi", "end": of_rows, "strategies": AT_ONCE}
PARTS = {text: [SIZE] for text in NO_COUNT} | {"x[m]": [1, 1, 2, 3, 5]}
for text in READS:
    add([text], NET | {"table": (T, D)}, parts=PARTS.get(text), **OF_ROWS)


# Criteria that read values, or whose workspaces have sizes of their own.

OUTPUTS = randn(6, 9, 4, seed=5), torch.arange(24).view(6, 4) * 5 % 2 + 1
FRAMES = torch.tensor([[9, 8], [7, 9], [9, 9], [8, 7], [9, 6], [7, 7]])
TARGETS = torch.tensor([[2, 1], [1, 2], [2, 2], [1, 1], [0, 2], [1, 2]])


def frames(h):
    return h.unflatten(-1, (2, 3)).log_softmax(-1)


CTC = [
    "F.ctc_loss(h, y.view(2, 2), n, m, reduction='sum')",
    "F.ctc_loss(h, y.view(2, 2), n, m)",
    "F.ctc_loss(h, y.view(2, 2), n, m.clamp(min=1), reduction='none')",
    "F.ctc_loss(h[:3], y.view(2, 2), n.clamp(max=3), m, zero_infinity=True)",
    "F.ctc_loss(h[:, 0], y[:2], n[0], m[0] * 0 + 2)",
    "F.ctc_loss(h, y, (9, 8), (3, 1))",
    "F.ctc_loss(h, y, n, torch.stack([m[0] + 1, 3 - m[0]]))",
]
of_outputs = {"end": lambda p, value: value.sum(), "strategies": AT_ONCE}
for text in CTC:
    add(
        [text.replace("(h", "(frames(x @ w)")],
        {"w": (4, 6)},
        batch=(*OUTPUTS, FRAMES, TARGETS),
        letters="xynm",
        warns="no batching rule for aten::ctc_loss",
        **of_outputs,
    )
CRITERIA = [
    "F.gaussian_nll_loss(x @ w, v, v.exp())",
    "F.gaussian_nll_loss(x @ w, v, (x @ w).exp(), full=True, reduction='sum')",
    "F.gaussian_nll_loss(x @ w, v, 0.5)",
    "((x @ w).softmax(-1) - F.one_hot(y, 3)[:1]).square()",
    "((x @ w).softmax(-1) - F.one_hot(input=y, num_classes=3)[:1]).square()",
    "((x @ w).softmax(-1) - F.one_hot(y[0], num_classes=3)).square()",
    "((x @ w).softmax(-1) - F.one_hot(y[None, :2], 3)[0, 0]).square()",
    "((x @ w).softmax(-1) * F.one_hot(y)[:, :2].sum()).square()",
    "((x @ w).softmax(-1) * torch.bincount(y, minlength=3)).square()",
]
for text in CRITERIA:
    add(
        [text],
        {"w": (4, 3)},
        batch=(*OUTPUTS, randn(6, 9, 3, seed=6)),
        letters="xyv",
        **of_outputs,
    )


# Functions of autograd that vmap cannot run: they alone run sample by sample.


def saving(function):
    def forward(ctx, x, *others):
        ctx.save_for_backward(x)
        return function(x, *others)

    return forward


def squared(ctx, grad):
    """Not the derivative: whatever leaves it out has other numbers."""
    return 3 * ctx.saved_tensors[0] * grad


square = old_function(saving(torch.square), squared).apply  # before any is watched


class Linear(Function):
    """Several inputs and outputs, and what is no tensor among both."""

    @staticmethod
    def forward(ctx, x, weight, bias, options, scale=2.0):
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.with_bias = scale, bias is not None
        y = scale * x @ weight.t()
        y = y + bias if bias is not None else y
        signs, unused = y.sign(), y * 2
        ctx.mark_non_differentiable(signs)
        ctx.set_materialize_grads(False)
        return y, signs, y.argmax(-1), 3, None, unused

    @staticmethod
    def backward(ctx, grad, *others):
        assert all(each is None for each in others)  # what nobody uses is not made up
        x, weight = ctx.saved_tensors
        bias = grad if ctx.with_bias else None
        of_weight = torch.outer(grad, x) if ctx.needs_input_grad[1] else None
        return ctx.scale * grad @ weight, ctx.scale * of_weight, bias, None, None


def masked(ctx, grad):
    grad = grad.clone()
    grad[ctx.saved_tensors[0].abs() > 1] = 0
    return grad


Sparing = old_function(  # reads values, and writes into its gradient by a mask
    saving(lambda x: x.sign() if x.sum() > 0 else x.round()), masked
)


def by_numpy(x, y):
    return torch.from_numpy(x.detach().numpy() * y.detach().numpy())


def of_both(ctx, grad):
    x, y = ctx.saved_tensors
    return 2 * y * grad, x * grad


def sharing(info, in_dims, x, y):
    assert in_dims[1] is None  # taken for granted
    return Shared.apply(x, y), in_dims[0]


Unmapped = new_function("Unmapped", by_numpy, of_both)
Generated = new_function("Generated", by_numpy, of_both, generate_vmap_rule=True)
Shared = new_function("Shared", by_numpy, of_both, vmap=sharing)
Reversed = old_function(lambda ctx, x: x.view_as(x), lambda ctx, grad: -grad)


def positive(ctx, x, y):
    ctx.positive = bool(x.sum() > 0)
    return x + y


Partly = old_function(  # has a gradient for some samples only
    positive, lambda ctx, grad: ((grad if ctx.positive else None), grad)
)

LAYER = """
y, signs, which, three, nothing, _ = Linear.apply(x, w, b, ["o"])
assert (three, nothing, signs.requires_grad) == (3, None, False)
value = (three * y * signs).sum() + y.gather(0, which[None]).sin().sum()"""
CONSTANTS = """
with torch.no_grad(): target = square(F.linear(x, w))
value = (F.linear(square(x), w, b) - target).square().sum()"""
ACTIVATION = "square(F.linear(x, w, b)).sin().sum()"
MAPPED = [
    LAYER,
    CONSTANTS,
    ACTIVATION,
    "square(b * square(F.linear(square(x), w))).sum()",
    "(b * Sparing.apply(F.linear(x, w))).sum()",
    "F.linear(Reversed.apply(x * w[0]), Reversed.apply(w)).sin().sum()",
    "Linear.apply(x, w, None, [b, x])[0].tanh().sum()",
    "(square(shift) * F.linear(x, w)).sum()",
    "square(x[:, None] * w.t()).sin().sum()",
]
OF_PARAMETERS = [  # or of buffers: once for all samples
    "F.linear(x, square(w), square(square(b[1:2]))).sin().sum()",
    "F.linear(x, Sparing.apply(w), b).sin().sum()",
    "(Unmapped.apply(b, shift) * F.linear(x, w)).sum()",
]
for kind in ("Unmapped", "Generated", "Shared"):
    MAPPED.append(f"{kind}.apply(F.linear(x, w), b).sin().sum()")
    MAPPED.append(f"{kind}.apply(b * x.sum(), b.sin()).sin().sum()")
ALONE = "vmap cannot run .*apply, which runs sample by sample at"
VECTORS = {"batch": (randn(5, 3, seed=4),)}
PARTLY = {"recorded": "None for some", "vmap": "a recorded pass|function_call.*loop"}
add(
    ["Partly.apply(F.linear(x, w), b).sin().sum()"],
    {"w": (4, 3), "b": (4,)},
    refused=PARTLY,
    warns=ALONE,
    **VECTORS,
)
for text in MAPPED + OF_PARAMETERS:
    refused = (
        {} if "Shared" in text else {"vmap": "a recorded pass|function_call.*loop"}
    )
    warns = "" if text in OF_PARAMETERS else ALONE
    add([text], {"w": (4, 3), "b": (4,)}, refused=refused, warns=warns, **VECTORS)


def marks_dirty(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(2)


def same(ctx, x, mask):
    ctx.mark_non_differentiable(mask)
    return x * mask, mask


def scattered(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.zeros_like(x).masked_scatter(x > 0, grad)


Written = old_function(marks_dirty, lambda ctx, grad: 2 * grad)
Ragged = old_function(saving(lambda x: x[x > 0]), scattered)
Counted = old_function(
    lambda ctx, x: (x * 2, int((x > 0).sum())), lambda ctx, grad, _: 2 * grad
)
Same = old_function(same, lambda ctx, grad, _: (grad, None))


class Captured(Function):
    """Runs a function again in the backward pass, with parameters that it captures."""

    @staticmethod
    def forward(ctx, x, function, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ends = [x, *weights]
            output = ctx.function(x)
        found = torch.autograd.grad(output, ends, grad, allow_unused=True)
        return found[0], None, *found[1:]


REFUSED = {
    "Written.apply(x * w[0]).sum()": "one written in",
    "Ragged.apply(x * w[0]).sum()": "of one shape",
    "y, n = Counted.apply(x * w[0]); value = n * y.sum()": "values that all",
    "y, kept = Same.apply(x * w[0], x); value = (y * kept).sum()": "memory of their",
    "Captured.apply(x, lambda y: (y * w[0]).sum(), w)": "a captured one",
    "h = x * w[1]; value = Captured.apply(w[0], lambda w: (w * h).sum())": "a captured",
}
for text, message in REFUSED.items():
    refused = {"recorded": f"apply: .*{message}.*loop", "vmap": "a recorded pass.*loop"}
    warns = f"one sample after.*{message}"
    add([text], {"w": (4, 3)}, refused=refused, warns=warns, **VECTORS)


# Activation checkpoints.

LINEAR = """
h = checkpoint(lambda x: F.linear(x.tanh(), v, s).sin(), F.linear(x, w))
value = h.square().sum()"""
CHECKPOINTS = {
    "linear": LINEAR,
    "to the end": f"with checkpointing.set_checkpoint_early_stop(False):"
    f"{LINEAR.replace(chr(10), chr(10) + '    ')}",
    "as arguments": """
h = checkpoint(lambda x, w, s: F.linear(x, w).tanh() * s, x, w, s)
value = F.linear(h, v).square().sum()""",
    "one weight outside, in two regions, and twice in one of them": """
h = F.linear(x, w).tanh()
for _ in range(2): h = checkpoint(lambda x: F.linear(F.linear(x, w).sin(), w), h)
value = F.linear(h, w).square().sum()""",
    "computed of parameters alone, inside and outside": """
normed = w / w.norm()
def region(x):
    return F.linear(F.linear(x, normed).tanh(), (v * s).t()) @ v.t()
value = checkpoint(region, checkpoint(region, x)).square().sum()""",
    "without a rule": """
value = checkpoint(lambda x: torch.cdist(x, w).sin() * s, x.sin()).sum()""",
    "norms and attention": """
def region(x):
    x = F.layer_norm(x, (4,), s, None)
    return F.scaled_dot_product_attention(F.linear(x, w), F.linear(x, v), x)
value = checkpoint(region, x.tanh()).square().sum()""",
    "several outputs": """
def region(x, *, scale):
    y = F.linear(x, w).tanh()
    return {"y": y * scale, "rest": [y.detach(), 3, F.linear(x, v)]}
found = checkpoint(region, x, scale=2.0)
value = (found["y"] * found["rest"][2] * found["rest"][1]).sum()""",
    "without parameters": "checkpoint(lambda x: x.sin().exp(), F.linear(x, w)).sum()",
    "of a constant": "checkpoint(lambda x: F.linear(x, w).tanh(), x).square().sum()",
    "in place": """
def region(x):
    return F.linear(F.linear(x, w).mul_(2.0).relu_(), v)
value = checkpoint(region, x).square().sum()""",
    "reads a value": """
region = lambda x: F.linear(x, w if x.sum() > 0 else v).tanh()
value = checkpoint(region, F.linear(x, w)).square().sum()""",
    "a step of an LSTM": """
gates = torch.cat([w, v, w.sin(), v * s])
value = checkpoint(lambda x: torch.lstm_cell(x, (x, x), gates, gates)[0], x.tanh())
value = value.square().sum()""",
    "inputs that require grad, as behind frozen layers": """
constant = scale * 2
for each in (x, constant):
    assert not each.requires_grad
    each.requires_grad_()
    assert each.requires_grad
h = F.linear(x, w).requires_grad_(True)
value = checkpoint(lambda x: F.linear(x * constant, v).tanh(), h).sum()""",
}


SAMPLES = {"batch": (randn(6, 3, 4, seed=3),)}
SQUARES = {"w": (4, 4), "v": (4, 4), "s": (4,)}
for name, text in CHECKPOINTS.items():
    shapes = {n: SQUARES[n] for n in SQUARES if (n, name) != ("v", "without a rule")}
    add([text], shapes, refused={"vmap": '"loop"'}, **SAMPLES)
PACKS = """
hooks = torch.autograd.graph.saved_tensors_hooks
with hooks(lambda t: t * 1, lambda t: t): value = F.linear(x, w).tanh().sum()"""
NESTED = """
def outer(x):
    return checkpoint(lambda x: F.linear(x, w).tanh(), x.sin()).exp()
value = checkpoint(outer, F.linear(x, w)).sum()"""
refused = {"vmap": "got activation checkpointing"}
add([PACKS], {"w": (4, 4)}, refused=refused, **SAMPLES)
refused = refused | {"recorded": 'strategy="loop"'}
warns = "one sample after another"
add([NESTED], {"w": (4, 4)}, refused=refused, warns=warns, **SAMPLES)


# What code can ask a tensor, and then take another way.


def hidden(p, x):
    return F.linear(x, p["w"])


def out(p, h, y):
    return F.cross_entropy(F.linear(h, p["v"]), y)


def columns(p, x):
    return p["w"] @ (x[:, None] * torch.arange(1.0, 4))  # [5, 3]


def marked(h):
    return (h * torch.arange(1.0 * h.numel()).reshape(h.shape)).sum().square()


ENCODER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)
for each in (ENCODER, ATTENTION):
    each.double().eval().requires_grad_(False)


class Doubled(_SingleLevelFunction):
    """Differentiates as functions of C++ do: on the tensor that they are given."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def compiled(x):
    with enable_single_level_autograd_function():
        return Doubled.apply(x)


BRANCHES = "h = F.relu(h) if h.requires_grad else h.detach().relu_()"
BOTH = ("recorded", "members")
FROZEN = "f = (x * w).sin()[None]; "
OF_COLUMNS = "h = columns(p, x); {}; value = marked(h)"
TEXTS = {  # who refuses; all others are exact
    (): [
        BRANCHES,
        "w = w * 2; h = F.linear(x, w.sin() if w.requires_grad else w.detach())",
        """
with torch.no_grad(): scale = h.square(); assert not scale.requires_grad
h = h * scale""",
        """
f = torch.zeros_like(x * w[0].detach()); assert not f.requires_grad
f += x * w[0]; value = (f.sin() if f.requires_grad else f.detach()).sum()""",
        """
h = (x[:, None] * w.t()).T  # lies as that of one sample does
for each in (h.contiguous(), (h * 2).flatten(), h.sin().reshape(-1)):
    h = h + each.mul_(2).sum() * h
h = columns(p, x).clone(); h += 1; value = marked(h)""",
        FROZEN + "value = (ENCODER(f) * torch.arange(4.0)).square().sum()",
        FROZEN + "f = ATTENTION(f, f, f, need_weights=False)[0]; value = marked(f)",
        "bag = F.embedding_bag(torch.tensor([[0, 1, 2, 3, 1]]), TABLE_OF_ROWS, "
        "mode='sum', per_sample_weights=h.sigmoid()[None]); value = bag.square().sum()",
    ],
    BOTH: [
        "h = h.sin() if h.is_leaf else h.cos(); w = w.t();"
        "h = h + (x.sin() if w.is_leaf else x.cos()) @ w",
        "w = w * 2; h = F.linear(x, w); w.detach_(); h = h * F.linear(x, w)",
        "value = compiled(out(p, h, y))",
        "h = torch.vmap(lambda k: compiled(h) + k)(x[:2]).sum(0)",
        "if h.grad_fn: h.grad_fn.register_prehook(lambda grads: (10 * grads[0],))",
        "h = h.sin() if h.grad_fn is None else h.cos()",
        "h.mul_(2); h = h.cos() if h._version else h.sin()",
        "h = h.detach_()",
        "h = compiled(h)",
    ],
    ("members",): [
        "if h.requires_grad: h.register_hook(lambda grad: 10 * grad)",
        "h = h.detach(); h.requires_grad = True",
        "h = torch.autograd.grad(h.square().sum(), h, create_graph=True)[0]",
        "if h.requires_grad: h = h * (1 + torch.autograd.grad(h, h, h.new_ones(5))[0])",
        "h = F.conv1d(torch.stack([x, x.sin()])[:, None], w[:, None, :2]);"  # [2, 5, 3]
        "h.flatten().mul_(2); value = marked(h)",
    ],
    ("recorded",): [
        OF_COLUMNS.format("h = h.as_strided((4,), (1,))"),
        OF_COLUMNS.format("h = h.view(-1)"),
        OF_COLUMNS.format("h.reshape(-1).mul_(2)"),
        OF_COLUMNS.format("flat = h.flatten(); F.relu(h, True); h = flat"),
    ],
    ("recorded", "vmap"): [
        OF_COLUMNS.format(
            "h.T.contiguous().T.contiguous()[0] = 0; h.contiguous()[0] = 0"
        ),
    ],
}

if hasattr(F, "linear_cross_entropy"):
    fused = "F.linear_cross_entropy(h{0}, p['v'], y{0}, options=OPTIONS)"
    TEXTS[("vmap",)] = ["value = " + fused.format(each) for each in ("", "[None]")]
    OPTIONS = nn.LinearCrossEntropyOptions()
OF_MEMBERS: dict[str, bool] = {}  # losses, and whether those of members are refused


def of_classes(text):
    """Complete a text about the activation `h` to a loss of `x` and its class `y`."""
    end = "" if "value =" in text else "\nvalue = out(p, h, y)"
    return f"h = hidden(p, x)\n{text}{end}"


CLASSES = {
    "batch": (randn(3, 4), torch.tensor([0, 3, 2])),
    "end": lambda p, value: value,
}
for refused, texts in TEXTS.items():
    for text in map(of_classes, texts):
        why = dict.fromkeys(refused, 'strategy="(vmap|loop)"')
        add([text], {"w": (5, 4), "v": (5, 5)}, refused=why, **CLASSES)
        OF_MEMBERS[text] = "members" in refused


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, each) for name, row in ROWS.items() for each in row.strategies],
)
def test_a_loss_is_exact_under_every_strategy_or_refused(name, strategy):
    row = ROWS[name]
    loss, params, buffers = row.given()
    given = params, buffers, *row.batch
    if strategy in row.refused:
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        with pytest.raises(vgrad.UnsupportedOp, match=row.refused[strategy]):
            compute(*given)
        return
    size = len(row.batch[0]) // 2 + 1 if strategy == "auto" else None
    options = {"strategy": strategy, "chunk_size": size}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exact = {"buffers": buffers, "expected": row.expected}
        assert_quantities(loss, params, row.batch, **exact, **options)
        if strategy == "auto":
            found = vgrad.explain(vgrad.per_sample_norm(loss))(*given)
        if strategy == "recorded":
            clip = partial(vgrad.clipped_grad, loss, max_norm=1.0, **options)
            oracle.assert_exact(clip(passes=2)(*given), clip()(*given))
    assert all(each.grad is None for each in params.values())
    if strategy != "auto":
        return
    apart = found.why.startswith("one sample costs least")
    ways = ["loop"] if apart else [x for x in STRATEGIES if x not in row.refused]
    assert found.strategy == ways[0]
    texts = [str(x.message) for x in caught if x.category is vgrad.FallbackWarning]
    warns = row.warns or "one sample after" * (found.strategy == "loop" and not apart)
    assert bool(texts) == bool(warns)
    assert not texts or any(re.search(warns, text) for text in texts)
    if row.parts is not None:
        assert sorted(found.parts) == row.parts
    if row.keeps is not None:
        assert "Outer" in [each.factor for each in found.rows if each.op == "linear"]
        assert not any(EXPANDED in each.why for each in found.rows)
        assert row.keeps in (0, len(found.rows))

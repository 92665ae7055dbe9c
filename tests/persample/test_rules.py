"""Every op of the table: recorded as its rule says, with the numbers of a loop,
in every form that a factor has.

The reference is the loop over samples in float64 of `oracle`.
"""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import vgrad
from tests import oracle
from tests.examples import examples
from tests.losses import assert_gradients, assert_quantities
from tests.persample.test_quantities import (
    clipped_sum,
    directions,
    flat,
    gram,
    projected,
)
from vgrad.factors import Conv, conv, costs
from vgrad.ops import OPS
from vgrad.persample import EXPANDED

# Torch says that an even kernel may cost a copy of its input, and where it loops.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning"),
]


class Index(NamedTuple):
    high: int
    shape: tuple[int, ...]


class Case(NamedTuple):
    """An op of parameters and a sample, and what each use of a parameter leaves."""

    op: Callable
    params: dict[str, tuple[int, ...]]
    sample: list
    kinds: dict[str, str]

    def loss(self, params, buffers, *sample):
        out = self.op(*params.values(), *sample)
        return out.sin().sum() / (1 + out.numel())  # zeros too many count as well

    def data(self, size, dtype=torch.float64):
        random = {"generator": torch.Generator().manual_seed(0)}
        params = {
            name: torch.randn(shape, **random).to(dtype)
            for name, shape in self.params.items()
        }
        sample = [
            torch.randint(each.high, (size, *each.shape), **random)
            if isinstance(each, Index)
            else torch.randn(size, *each, **random).to(dtype)
            for each in self.sample
        ]
        return params, sample


def case(op, params, sample, kinds="Outer Dense"):
    """Make a case for parameters and samples of these shapes.

    `op` is a function of them, or an expression of `w`, `b`, `x` and `y`. A parameter
    whose uses have no rule that fits is `expanded`.
    """
    if isinstance(op, str):
        names = "wb"[: len(params)] + "xy"[: len(sample)]
        op = eval(f"lambda {','.join(names)}: {op}")
    names = ["layer.w", "layer.b"][: len(params)]
    kinds = dict(zip(names, kinds.split(), strict=False))
    return Case(op, dict(zip(names, params, strict=True)), sample, kinds)


def fixed(like, *shape):
    return torch.linspace(-1, 1, math.prod(shape), dtype=like.dtype).view(shape)


PRODUCTS = {
    "F.linear(x, w, b)": ([(5, 4), (5,)], [(1, 4)]),
    "F.linear(x, w)  # a vector": ([(5, 4)], [(4,)]),
    "F.linear(x, w)  # long": ([(5, 4)], [(2, 3, 7, 4)]),
    "F.linear(x, w)  # to a number": ([(4,)], [(3, 4)]),
    "F.linear(x, w, b)  # a number": ([(4,), ()], [(2, 3, 4)]),
    "F.linear(x, w).exp()  # of nothing": ([(5, 4)], [(0, 4)]),
    "F.linear(x, w, b)  # without inputs": ([(5, 0), (5,)], [(3, 0)]),
    "F.linear(fixed(x, 3, 4), w) * x": ([(5, 4)], [(5,)]),
    "F.linear(x, fixed(x, 5, 4), w)": ([(5,)], [(3, 4)], "Dense"),
    "F.linear(x, w, fixed(x, 5))": ([(5, 4)], [(3, 4)]),
    "F.linear(bias=b, input=x, weight=w)": ([(5, 4), (5,)], [(3, 4)]),
    "F.linear(x, w.t())": ([(4, 5)], [(3, 4)]),
    "F.linear(x, w.view(10, 2))": ([(5, 4)], [(3, 2)]),
    "F.linear(x, w[:2]).sum() + F.linear(x, w[2:])": ([(5, 4)], [(3, 4)]),
    "sum(F.linear(x, each) for each in w.chunk(2))": ([(6, 4)], [(3, 4)]),
    "F.linear(x, w[:3]) + F.linear(x, w[2:])": ([(5, 4)], [(3, 4)]),
    "F.linear(x, w[:0]).sum() + F.linear(x, w)": ([(5, 4)], [(3, 4)]),
    "F.linear(x, w[:, ::2]) + F.linear(x, w[:, 1::2])": ([(5, 4)], [(3, 2)]),
    "F.linear(x, w.t()[:2]).sum() + F.linear(y, w[:, 2:])": ([(4, 3)], [(2, 4), (1,)]),
    "F.linear(x, w.t().reshape(-1)[:4]).sum() + F.linear(y, w[:, 1:])": (
        [(4, 3)],
        [(3, 4), (5, 2)],
    ),
    "F.linear(F.linear(x, w, b).tanh(), w, b)": ([(4, 4), (4,)], [(3, 4)]),
    "F.linear(x, w).tanh() @ w": ([(5, 4)], [(3, 4)]),
    "F.linear(x, fixed(x, 5, 4), w)  # one": ([(1,)], [(3, 4)], "expanded"),
    "torch.cdist(x, w)": ([(5, 4)], [(2, 4)], "expanded"),
    "F.bilinear(x, y, w, b)": ([(5, 3, 4), (5,)], [(2, 3), (2, 4)]),
    "F.bilinear(x, y, w)  # vectors": ([(5, 3, 4)], [(3,), (4,)]),
    "F.bilinear(x, x.tanh(), w)  # long": ([(2, 3, 3)], [(4, 6, 3)]),
    "x @ w": ([(4, 5)], [(3, 4)]),
    "x @ w  # long": ([(4, 5)], [(2, 17, 4)]),
    "x @ w  # to numbers": ([(4,)], [(2, 3, 4)]),
    "x @ w  # a vector": ([(4, 5)], [(4,)]),
    "x @ w  # vectors": ([(4,)], [(4,)]),
    "w @ x": ([(5, 4)], [(4, 3)]),
    "w @ x  # long": ([(5, 4)], [(2, 4, 17)]),
    "w @ x  # a vector": ([(5, 4)], [(4,)]),
    "w @ x  # to numbers": ([(4,)], [(2, 4, 3)]),
    "x @ w  # a stack": ([(2, 4, 5)], [(2, 3, 4)]),
    "x @ w  # a stack, batched": ([(2, 4, 5)], [(6, 2, 3, 4)]),
    "x @ w  # a stack, broadcast": ([(2, 4, 5)], [(6, 1, 3, 4)]),
    "x @ w  # a stack, shared": ([(2, 4, 5)], [(3, 4)]),
    "x @ w  # a stack of one": ([(1, 4, 5)], [(3, 2, 6, 4)], "expanded"),
    "x @ w  # stacks": ([(3, 2, 4, 5)], [(3, 2, 6, 4)]),
    "x @ w  # a vector and a stack": ([(2, 4, 5)], [(4,)]),
    "w @ x  # a stack": ([(2, 5, 4)], [(2, 4, 3)]),
    "w @ x  # a stack, batched": ([(2, 5, 4)], [(3, 1, 4, 3)]),
    "w @ x  # a stack and a vector": ([(2, 5, 4)], [(4,)]),
    "w.__rmatmul__(x)": ([(4, 5)], [(3, 4)]),
    "x.matmul(w)": ([(4, 5)], [(2, 3, 4)]),
    "torch.matmul(x, w)": ([(4, 5)], [(2, 3, 4)]),
    "torch.matmul(x, other=w)": ([(4, 5)], [(3, 4)], "expanded"),
    "torch.linalg.matmul(w, x)": ([(5, 4)], [(4, 3)]),
    "torch.mm(x, w)": ([(4, 5)], [(3, 4)]),
    "w.mm(x)": ([(5, 4)], [(4, 3)]),
    "torch.mv(w, x)": ([(5, 4)], [(4,)]),
    "x.mv(w)": ([(4,)], [(3, 4)]),
    "torch.bmm(x, w)": ([(2, 4, 5)], [(2, 3, 4)]),
    "w.bmm(x)": ([(2, 5, 4)], [(2, 4, 3)]),
    "torch.addmm(b, x, w)": ([(4, 5), (5,)], [(3, 4)]),
    "torch.addmm(w, x, fixed(x, 4, 5))": ([(5,)], [(3, 4)], "Dense"),
    "torch.addmm(x[:, :1], x, w, beta=0.5, alpha=2)": ([(4, 5)], [(3, 4)]),
    "torch.addmm(x / 0, w, x, beta=0)": ([(4, 4)], [(4, 4)]),
    "torch.addmm(x[:1, :1], x, mat2=w)": ([(4, 5)], [(3, 4)], "expanded"),
    "x.addmm(w, x)": ([(4, 4)], [(4, 3)]),
    "torch.addmv(x[:1], w, x)": ([(5, 4)], [(4,)]),
    "x[:, 0].addmv(x, w)": ([(4,)], [(3, 4)]),
    "torch.baddbmm(x[..., :1], x, w)": ([(2, 4, 5)], [(2, 3, 4)]),
    "x[:, :1].baddbmm(w, x)": ([(2, 5, 4)], [(2, 4, 3)]),
    "torch.einsum('oi,ti->to', w, x)": ([(5, 4)], [(3, 4)]),
    "torch.einsum('gio,gti->tgo', w, x)": ([(2, 4, 5)], [(2, 3, 4)]),
    "torch.einsum('ti,oi->to', x, w.t())": ([(4, 5)], [(3, 4)]),
    "torch.einsum('t,op->top', x, w.t())": ([(4, 5)], [(3,)], "Dense"),
    "torch.einsum('ti,io->to', [x, w])": ([(4, 5)], [(3, 4)]),
    "torch.tensordot(x, w, 1).cumsum(0)": ([(4, 5)], [(2, 3, 4)]),
    "torch.tensordot(x, w, dims=([1], [-1]))": ([(5, 4)], [(3, 4)]),
    "torch.tensordot(w, x, ((0, 2), (1, 0)))": ([(3, 5, 4)], [(4, 3)], "Dense"),
    "torch.tensordot(x, w, 0)": ([(5,)], [(3,)]),
    "torch.tensordot(x, w, torch.tensor([[1], [0]]))": ([(4, 5)], [(3, 4)]),
    "torch.tensordot(x, w[:1], 1)": ([(1, 5)], [(3, 4)], "expanded"),
    "torch.einsum(x, [0, 1], w, [1, 2], [0, 2])": ([(4, 5)], [(3, 4)]),
}

EINSUMS = {
    "ti,io->to": ((3, 4), (4, 5)),
    "bti,oi->bto": ((1, 20, 4), (5, 4)),
    "ti,io": ((3, 4), (4, 5)),
    "... i, i o -> ... o": ((2, 3, 4), (4, 5)),
    "i...,io->o...": ((4, 3), (4, 5)),
    "ti,i->t": ((3, 4), (4,)),
    "t,o->to": ((3,), (5,)),
    "ti,o->tio": ((3, 4), (5,)),
    "btd,dhk->bthk": ((1, 5, 4), (4, 2, 3)),
    "bthk,hkd->btd": ((1, 5, 2, 3), (2, 3, 4)),
    "btkh,hkd->btd": ((1, 5, 3, 2), (2, 3, 4)),
    "gti,gio->gto": ((2, 3, 4), (2, 4, 5)),
    "gti,goi->tgo": ((2, 3, 4), (2, 5, 4)),
    "...i,...io->...o": ((2, 4), (2, 4, 5)),
    "a...i,...io->a...o": ((3, 2, 4), (2, 4, 5)),
    # The weight's axes are not in blocks, or a matrix has one: gradients are formed.
    "gti,igo->tgo": ((2, 3, 4), (4, 2, 5), "Dense"),
    "tih,igh->tg": ((3, 4, 2), (4, 5, 2), "Dense"),
    "tij,ij->t": ((3, 4, 2), (4, 2), "Dense"),
    "t,op->top": ((3,), (2, 5), "Dense"),
    # There is no factor: elementwise, sums of each alone, a diagonal, broadcast.
    "ti,i->ti": ((3, 4), (4,), "expanded"),
    "ti,jo->to": ((3, 4), (2, 5), "expanded"),
    "ti,io->o": ((3, 4), (4, 5), "expanded"),
    "tii,io->to": ((3, 4, 4), (4, 5), "expanded"),
    "...i,...io->...o  ": ((2, 4), (1, 4, 5), "expanded"),
    "ti,io->to  ": ((3, 4), (1, 5), "expanded"),
}


def einsum_case(equation, x, w, kinds="Outer"):
    return case(lambda w, x: torch.einsum(equation, x, w), [w], [x], kinds)


bag = F.embedding_bag
TABLES = {
    "F.embedding(x, w)": (1, 6),
    "F.embedding(x, w)  # a number": (),
    "F.embedding(x, w)  # long": (2, 3, 4),
    "F.embedding(x, w)  # nothing": (0,),
    "F.embedding(x, w, padding_idx=2)": (2, 8),
    "F.embedding(x, w, padding_idx=-3)": (2, 8),
    "F.embedding(x, w, padding_idx=1, scale_grad_by_freq=True)": (2, 9),
    "F.embedding(x.int(), w)": (4,),
    "bag(x, w, mode='max')  # long": (3, 40),
    "bag(x, w, at(0, 1, 1, 6), include_last_offset=True)": (6,),
}
TABLES |= {
    f"{start}, mode={mode!r}{padded})": shape
    for start, shape in [("bag(x, w", (2, 5)), ("bag(x, w, at(0, 2, 2, 4)", (6,))]
    for mode in ("sum", "mean", "max")
    for padded in ("", ", padding_idx=-2")
}
TABLE, LOOKUPS, BAGS = [(7, 3)], [Index(7, (6,))], [Index(7, (2, 5))]
TABLES = {name: (TABLE, [Index(7, shape)], "Rows") for name, shape in TABLES.items()}
TABLES |= {
    "F.embedding(torch.arange(5), w) * x": (TABLE, [(5, 3)], "Rows"),
    "F.embedding(x, w.t())": ([(3, 7)], LOOKUPS, "Rows"),
    "F.linear(F.embedding(x, w), w)": (TABLE, LOOKUPS, "Rows|Outer"),
    "torch.embedding(w, x)": (TABLE, LOOKUPS, "expanded"),
    "bag(x, w, y.cumsum(0) - y[0])": (TABLE, [*LOOKUPS, Index(2, (4,))], "Rows"),
    "bag(x % 4, w[:4]).sin() + bag(x % 4, w[3:], mode='max')": (TABLE, BAGS, "Rows"),
    "scaled(x, w, b)": ([*TABLE, (2, 5)], BAGS, "Rows expanded"),
    "scaled(x, w, b, at(0, 1, 4))": ([*TABLE, (6,)], LOOKUPS, "Rows expanded"),
    "scaled(x, w, y)": (TABLE, [*BAGS, (2, 5)], "Rows"),
    "scaled(x, fixed(w, 7, 3), w)": ([(2, 5)], BAGS, "expanded"),
    "by_frequency(x, w, at(0, 2, 2, 4))": (TABLE, LOOKUPS, "expanded"),
    "bag(x, w, at(0, 0)).exp()": (TABLE, [Index(7, (0,))], "expanded"),
}


def at(*offsets):
    return torch.tensor(offsets)


def scaled(index, table, scales, offsets=None):
    options = {"per_sample_weights": scales, "padding_idx": 1}
    return bag(index, table, offsets, mode="sum", **options)


def by_frequency(index, table, offsets):
    return bag(index, table, offsets, mode="sum", scale_grad_by_freq=True)


CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SPACE = (7, 6, 5)


def conv_case(dims, lead, kernel, *, space=SPACE, channels=4, transposed=False, **kw):
    groups = kw.get("groups", 1)
    kernel = (kernel,) * dims if isinstance(kernel, int) else kernel
    weight = (channels, 6 // groups) if transposed else (6, channels // groups)
    op = (TRANSPOSED if transposed else CONVOLUTIONS)[dims]
    kinds = "Outer Dense" if set(kernel) == {1} else "Conv Dense"
    return case(
        lambda w, b, x: op(x, w, b, **kw),
        [(*weight, *kernel), (6,)],
        [(*lead, channels, *space[:dims])],
        kinds,
    )


wide = partial(conv_case, transposed=True)
CONVOLVED = {
    f"conv{dims}d{', transposed' * transposed}, {text}": conv_case(
        dims, lead, kernel, transposed=transposed, **options
    )
    for transposed in (False, True)
    for dims in (1, 2, 3)
    for text, lead, kernel, options in [
        ("plain", (1,), 3, {}),
        ("unbatched", (), 2, {"stride": 2}),
        ("in images", (3,), 3, {"stride": 2, "padding": 1}),
        ("dilated", (2,), 2, {"dilation": 2, "padding": 1}),
        ("in groups", (1,), 3, {"groups": 2, "padding": (1,) * dims}),
        ("of numbers", (2,), 1, {"stride": 2, "padding": 1, "groups": 2}),
    ]
}
CONVOLVED |= {
    "conv2d, same": conv_case(2, (1,), 3, padding="same"),
    "conv2d, same and even": conv_case(2, (2,), (2, 4), padding="same"),
    "conv2d, same and dilated": conv_case(2, (), (2, 3), padding="same", dilation=3),
    "conv2d, valid": conv_case(2, (1,), 3, padding="valid"),
    "conv2d, uneven": conv_case(2, (1,), (3, 1), stride=(1, 2), padding=(0, 2)),
    "conv2d, by depth": conv_case(2, (2,), 3, channels=6, groups=6),
    "conv2d, large": conv_case(2, (1,), 3, space=(18, 18), channels=1),
    "conv1d, wide output": wide(1, (2,), 3, stride=2, padding=1, output_padding=1),
    "conv2d, wider output": wide(
        2, (1,), 2, dilation=3, stride=2, output_padding=(2, 1)
    ),
    "conv3d, wide output": wide(3, (), 1, stride=3, output_padding=2, groups=2),
    "conv2d, transposed by depth": wide(2, (1,), 3, channels=6, groups=6),
}
CONVOLVED |= {
    name: case(name, [weight], [x], kind)
    for name, weight, x, kind in [
        ("F.conv2d(x, fixed(x, 5, 4, 3, 3), w)", (5,), (4, 6, 6), "Dense"),
        ("F.conv2d(fixed(x, 2, 4, 6, 6), w) * x", (5, 4, 3, 3), (), "Conv"),
        ("F.conv2d(F.conv2d(x, w).tanh(), w)", (4, 4, 2, 2), (4, 5, 5), "Conv"),
        ("F.conv2d(wrapped(x), w)", (5, 4, 3, 2), (1, 4, 7, 6), "Conv"),
        ("F.conv2d(mirrored(x), w)", (5, 4, 3, 2), (1, 4, 7, 6), "Conv"),
    ]
}


def wrapped(x):
    return F.pad(x, (2, 1, 1, 2), "circular")


def mirrored(x):
    return F.pad(x, (2, 1, 1, 2), "reflect")


CASES = {name: case(name, *each) for name, each in (PRODUCTS | TABLES).items()}
CASES |= {name: einsum_case(name, *each) for name, each in EINSUMS.items()}
CASES |= CONVOLVED
FEW = [
    "F.linear(x, w, b)",
    "F.linear(x, w)  # long",
    "F.linear(F.linear(x, w, b).tanh(), w, b)",
    "F.linear(x, w[:2]).sum() + F.linear(x, w[2:])",
    "F.bilinear(x, y, w, b)",
    "w @ x  # long",
    "x @ w  # a stack, batched",
    "torch.addmm(b, x, w)",
    "btd,dhk->bthk",
    "tih,igh->tg",
    "F.embedding(x, w, padding_idx=2)",
    "F.embedding(x, w, padding_idx=1, scale_grad_by_freq=True)",
    "F.linear(F.embedding(x, w), w)",
    "bag(x, w, mode='sum')",
    "bag(x, w, at(0, 2, 2, 4), mode='max')",
    "scaled(x, w, b)",
    "conv1d, in images",
    "conv2d, in groups",
    "conv2d, of numbers",
    "conv2d, large",
    "conv3d, plain",
    "conv2d, transposed, in images",
    "conv2d, wider output",
]
"""Each kind of factor, in several forms."""
BAGGED = [name for name in CASES if name.startswith(("bag(", "scaled("))]
"""Torch's own vmap lacks these."""


def check_quantities(case, size, strategy="recorded", dtype=torch.float64, **tolerance):
    """Compare all quantities; inner products are of the batch and its first sample."""
    params, batch = case.data(size, dtype)
    given, options = (params, {}, *batch), {"strategy": strategy}
    grads = assert_quantities(case.loss, params, batch, **options, **tolerance)
    norms = {"parameter": {n: oracle.norms({n: grad}) for n, grad in grads.items()}}
    norms["layer"] = {"layer": oracle.norms(grads)}
    for groups, expected in norms.items():
        found = vgrad.per_sample_norm(case.loss, groups=groups, **options)(*given)
        oracle.assert_exact(found, expected, **tolerance)
    bound = max(1e-3, 0.8 * float(oracle.norms(grads).mean()))
    for clipping in ("per_layer", "automatic"):
        clip = vgrad.clipped_grad(
            case.loss, max_norm=bound, clipping=clipping, **options
        )
        expected, _ = clipped_sum(grads, clipping, bound)
        oracle.assert_exact(clip(*given).grads, expected, **tolerance)
    compute = vgrad.per_sample_gram(case.loss, **options)
    oracle.assert_exact(compute(*given), gram(grads, grads), **tolerance)
    first = tuple(each[:1] for each in batch)
    one = {name: grad[:1] for name, grad in grads.items()}
    oracle.assert_exact(compute(*given, cross=first), gram(grads, one), **tolerance)
    compute = vgrad.per_sample_projection(case.loss, 5, seed=4, **options)
    oracle.assert_exact(compute(*given), projected(grads, 4), **tolerance)
    compute = vgrad.per_sample_projection(case.loss, (2, 3), seed=4, **options)
    exact = {
        n: flat(g) @ directions(n, g.shape[1:], (2, 3), seed=4).T
        for n, g in grads.items()
    }
    oracle.assert_exact(compute(*given), exact, **tolerance)


@contextlib.contextmanager
def forced(form):
    """Let costs choose a form wherever there is more than one; None leaves them."""
    choices = {
        "gram": {"outer_by_gram": True, "cross_by_gram": True, "wide_table": True},
        "gradients": {"outer_by_gram": False, "cross_by_gram": False},
        "alone": {"project_factors": True, "wide_table": False},
        "swapped": {"project_factors": False},
    }.get(form, {})
    of_windows = form == "products of windows"
    if form not in (None, "gradients"):
        choices["conv_form"] = "gram" if of_windows else form
    with pytest.MonkeyPatch.context() as patch:
        if of_windows or form == "windows":
            patch.setattr(Conv, "plain", False)
            patch.setattr(conv, "_AT_ONCE", 100)
        for name, choice in choices.items():
            patch.setattr(costs, name, lambda *_, choice=choice: choice)
        patch.setattr(costs, "FEW_LOOKUPS", 1 if form == "alone" else 128)
        patch.setattr(costs, "FEW_POSITIONS", 3 if form == "swapped" else 256)
        yield


OF_ALL = ("gradients", "gram", "alone", "swapped")
OF_IMAGES = ("groups", "offsets", "windows", "products of windows")
FORMS = OF_ALL + OF_IMAGES


def forms_of(name):
    """Return the forms that costs choose among: those of images for convolutions."""
    return FORMS if "conv" in name else OF_ALL


@pytest.mark.parametrize(
    ("name", "size", "form"),
    [
        *((name, 2, None) for name in CASES),
        *((name, size, None) for name in FEW for size in (1, 5)),
        *((name, 3, form) for name in FEW for form in forms_of(name)),
    ],
)
def test_every_quantity_of_an_op_equals_that_of_a_loop(name, size, form):
    with forced(form):
        check_quantities(CASES[name], size)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("name", dict.fromkeys(FEW + BAGGED))
def test_the_other_strategies_have_the_same_numbers(name, strategy):
    check_quantities(CASES[name], 2, strategy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_quantities_are_right_in_lower_precision(name, dtype):
    case = CASES[name]

    def reference(params, *batch):
        return oracle.loss_gradients(case.loss, params, {}, batch, 2)

    params, batch = case.data(2, dtype)
    rounding = oracle.rounding(reference, params, *batch, dtype=dtype)
    # Norms from products of positions square the condition number of float32.
    check_quantities(case, 2, dtype=dtype, tolerance=max(2e-5, 3 * rounding))


def rows_of(case, size=2):
    params, batch = case.data(size)
    norm = vgrad.per_sample_norm(case.loss, strategy="recorded")
    return [row for row in vgrad.explain(norm)(params, {}, *batch).rows if row.op]


def kinds_of(case, size=2):
    found = {}
    for row in rows_of(case, size):
        assert row.why in ("has a rule", EXPANDED)
        kind = "expanded" if row.why == EXPANDED else row.factor
        for param in row.names:
            found.setdefault(param, set()).add(kind)
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_recorded_as_its_rule_says(name):
    kinds = CASES[name].kinds.items()
    assert kinds_of(CASES[name]) == {param: {*kind.split("|")} for param, kind in kinds}


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def test_every_op_of_these_rooms_has_a_case():
    ops = {
        op
        for op, record in OPS.items()
        for body in [record.rule.factors if record.rule else record.recorded]
        if body
        if getattr(body, "__module__", "").endswith((".linear", "traction", ".conv"))
        or getattr(op, "__name__", "").startswith("embedding")
        if not (getattr(op, "__module__", None) or "").startswith("vgrad.")
    }
    with Seen() as seen:
        for case in CASES.values():
            params, batch = case.data(1)
            case.loss(params, {}, *(each[0] for each in batch))
    assert ops <= seen.ops


def test_cases_take_norms_from_products_and_from_gradients():
    forms = {(row.factor, row.form) for each in CASES.values() for row in rows_of(each)}
    assert {form for factor, form in forms if factor == "Conv" and form} == {
        "gram",
        "gradients by groups",
        "gradients by offsets",
    }
    assert forms >= {("Outer", "gram"), ("Outer", "gradients")}


def test_a_sparse_table_has_the_gradients_of_a_dense_one():
    params, batch = CASES["F.embedding(x, w)"].data(3)
    found, expected = (
        vgrad.per_sample_grad(made.loss, strategy="recorded")(params, {}, *batch)
        for each in (True, False)
        for made in [case(f"F.embedding(x, w, sparse={each})", [(7, 3)], [(1, 6)])]
    )
    oracle.assert_exact(found, expected, 0)


def test_of_equal_rows_the_first_has_the_gradient_of_the_largest():
    def loss(params, buffers, i):
        return F.embedding_bag(i, params["w"], mode="max").exp().sum()

    params = {"w": torch.zeros(7, 3, dtype=torch.float64)}
    batch = (torch.randint(7, (3, 2, 5)),)
    assert_gradients(loss, params, batch, tolerance=0, strategy="recorded")


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("i,io->o", "number of subscripts in the equation"),
        ("ti,io,o->t", "fewer operands were provided"),
        ("ti,io->tq", "output subscript q does not appear"),
        ("ti,oi->to", "does not broadcast"),
    ],
)
def test_a_wrong_equation_raises_the_error_of_torch(equation, message):
    made = einsum_case(equation, (3, 4), (4, 5))
    params, batch = made.data(2)
    compute = vgrad.per_sample_grad(made.loss, strategy="recorded")
    with pytest.raises(RuntimeError, match=message):
        compute(params, {}, *batch)


SIZES = st.sampled_from([1, 2, 5])
MADE = st.sampled_from([None, *FORMS])
SHORT = examples(15)


@SHORT
@given(
    form=MADE,
    size=SIZES,
    lead=st.lists(st.integers(0, 4), max_size=3),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    by_matmul=st.booleans(),
)
def test_linear_maps_of_any_shape(form, size, lead, widths, bias, by_matmul):
    inputs, outputs = widths
    weight = (inputs, outputs) if by_matmul else (outputs, inputs)

    def op(w, *rest):
        *bias, x = rest
        return x @ w + sum(bias) if by_matmul else F.linear(x, w, *bias)

    shifts = [(outputs,)] * bias
    with forced(form):
        check_quantities(case(op, [weight, *shifts], [(*lead, inputs)]), size)


@st.composite
def einsums(draw):
    groups, rest, inputs, outputs = (
        "".join(draw(st.lists(st.sampled_from(axes), unique=True)))
        for axes in ("gh", "tu", "ij", "op")
    )

    def mixed(*axes):
        return "".join(draw(st.permutations("".join(axes))))

    x, w = mixed(groups, rest, inputs), mixed(groups, inputs, outputs)
    equation = f"{x},{w}->{mixed(groups, rest, outputs)}"
    sizes = dict(zip("ghtuijop", (1, 2, 3, 1, 2, 3, 2, 1), strict=True))
    shapes = (tuple(sizes[axis] for axis in axes) for axes in (x, w))
    return einsum_case(equation, *shapes), bool(inputs or outputs)


@SHORT
@given(drawn=einsums(), size=SIZES, form=MADE)
def test_einsums_of_any_axes(drawn, size, form):
    made, ruled = drawn
    with forced(form):
        check_quantities(made, size)
    assert kinds_of(made, size)["layer.w"].isdisjoint({"expanded"}) is ruled


@st.composite
def convolutions(draw):
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())

    def each(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * dims))

    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    padding = each(0, 2)
    options = {"stride": stride, "dilation": dilation, "padding": padding}
    space = [gap * (k - 1) + 1 for gap, k in zip(dilation, kernel, strict=True)]
    space = [a + b for a, b in zip(space, each(0, 3), strict=True)]
    if transposed:
        most = map(max, stride, dilation)
        more = st.tuples(*(st.integers(0, each - 1) for each in most))
        options["output_padding"] = draw(more)
        space = [1 + n + 2 * p for n, p in zip(space, padding, strict=True)]
    lead = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    options["groups"] = draw(st.sampled_from([1, 2, 6]))
    return conv_case(
        dims, lead, kernel, space=space, channels=6, transposed=transposed, **options
    )


@examples(30)
@given(made=convolutions(), size=SIZES, form=MADE)
def test_convolutions_of_any_shape(made, size, form):
    with forced(form):
        check_quantities(made, size)


@SHORT
@given(
    form=MADE,
    size=SIZES,
    high=st.integers(1, 9),
    shape=st.lists(st.integers(0, 5), max_size=3),
    padding=st.integers(-9, 8),
    by_frequency=st.booleans(),
)
def test_lookups_of_any_shape(form, size, high, shape, padding, by_frequency):
    padding_idx = padding if -high <= padding < high else None

    def op(w, i):
        return F.embedding(
            i, w, padding_idx=padding_idx, scale_grad_by_freq=by_frequency
        )

    made = case(op, [(high, 3)], [Index(high, tuple(shape))], "Rows")
    with forced(form):
        check_quantities(made, size)


USES = {
    "linear": lambda w, x, i: F.linear(x, w),
    "x @ w": lambda w, x, i: x @ w,
    "w @ x": lambda w, x, i: w @ x.mT,
    "transposed": lambda w, x, i: F.linear(x, w.t()),
    "a vector": lambda w, x, i: F.linear(x, w[1]),
    "a part": lambda w, x, i: x @ w[:, :2],
    "a view": lambda w, x, i: x @ w.view(2, 2, 4).mT,
    "groups": lambda w, x, i: torch.einsum("ti,ih->thi", x, w),
    "groups, mixed": lambda w, x, i: torch.einsum("ti,hi->tih", x, w),
    "outputs": lambda w, x, i: torch.einsum("t,hk->thk", x[:, 0], w),
    "inputs": lambda w, x, i: torch.einsum("tij,ij->t", x[..., None] * x[:, None], w),
    "rows": lambda w, x, i: F.embedding(i, w),
    "columns": lambda w, x, i: F.embedding(i, w.t(), padding_idx=1),
    "bags": lambda w, x, i: F.embedding_bag(i[None], w, mode="max"),
    "a kernel": lambda w, x, i: F.conv1d(x.mT, w[..., None]),
    "kernels": lambda w, x, i: F.conv_transpose1d(x, w.view(4, 2, 2)[:3]),
    "elements": lambda w, x, i: x * w[0] + w.diagonal(),
}


@pytest.mark.slow
@examples(40)
@given(names=st.lists(st.sampled_from(sorted(USES)), min_size=2, max_size=3))
def test_several_uses_of_one_parameter(names):
    def op(w, x, i):
        return torch.stack([USES[name](w, x, i).sin().sum() for name in names])

    check_quantities(case(op, [(4, 4)], [(3, 4), Index(4, (5,))]), 2)


@SHORT
@given(
    size=SIZES,
    mode=st.sampled_from(["sum", "mean", "max"]),
    starts=st.lists(st.integers(0, 6), max_size=4),
    padding=st.sampled_from([None, 0, 3, -1]),
    last=st.booleans(),
)
def test_bags_of_any_lengths(size, mode, starts, padding, last):
    offsets = at(0, *sorted(starts), *[6] * last)
    options = {"padding_idx": padding, "include_last_offset": last}

    def op(w, i):
        return bag(i, w, offsets, mode=mode, **options)

    check_quantities(case(op, TABLE, LOOKUPS, "Rows"), size)

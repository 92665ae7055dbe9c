"""Every op of the table: recorded without expansion, with the numbers of a loop.

The reference is the loop over samples in float64 of `oracle`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, wrap_torch_function

import vgrad
from tests import oracle
from tests.examples import examples
from vgrad.persample.engine import STRATEGIES, Factors, Problem
from vgrad.persample.factors import Conv, Dense, Outer, Probes, Rows, Tied
from vgrad.persample.rules import RULES, Rule

# Torch says that an even kernel may cost a copy of its input, and where it loops.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Let small ops run alone: several threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Index(NamedTuple):
    """Integers below `high`."""

    high: int
    shape: tuple[int, ...]


class Case(NamedTuple):
    """An op of parameters and a sample, and the factor of every use of a parameter."""

    op: Callable
    params: dict[str, tuple[int, ...]]
    sample: list
    kinds: dict[str, str]

    def loss(self, params, buffers, *sample):
        out = self.op(*params.values(), *sample)
        return out.sin().sum() / (1 + out.numel())  # zeros too many count as well

    def data(self, size, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        random = {"generator": generator}
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
    """Make a case of an op whose first arguments are parameters of these shapes."""
    names = ["layer.w", "layer.b", "other.v"][: len(params)]
    kinds = dict(zip(names, kinds.split(), strict=False))
    return Case(op, dict(zip(names, params, strict=True)), sample, kinds)


def fixed(like, *shape):
    """Make a tensor that is the same for all samples."""
    return torch.linspace(-1, 1, math.prod(shape), dtype=like.dtype).view(shape)


PRODUCTS = {
    "linear": case(lambda w, b, x: F.linear(x, w, b), [(5, 4), (5,)], [(1, 4)]),
    "linear of a vector": case(lambda w, x: F.linear(x, w), [(5, 4)], [(4,)]),
    "linear, long": case(lambda w, x: F.linear(x, w), [(5, 4)], [(2, 3, 7, 4)]),
    "linear to a number": case(lambda w, x: F.linear(x, w), [(4,)], [(3, 4)]),
    "linear of nothing": case(lambda w, x: F.linear(x, w).exp(), [(5, 4)], [(0, 4)]),
    "linear without inputs": case(
        lambda w, b, x: F.linear(x, w, b), [(5, 0), (5,)], [(3, 0)]
    ),
    "linear of a constant": case(
        lambda w, x: F.linear(fixed(x, 3, 4), w) * x, [(5, 4)], [(5,)]
    ),
    "linear, bias alone": case(
        lambda b, x: F.linear(x, fixed(x, 5, 4), b), [(5,)], [(3, 4)], "Dense"
    ),
    "linear, bias frozen": case(
        lambda w, x: F.linear(x, w, fixed(x, 5)), [(5, 4)], [(3, 4)]
    ),
    "linear, by keyword": case(
        lambda w, b, x: F.linear(bias=b, input=x, weight=w), [(5, 4), (5,)], [(3, 4)]
    ),
    "linear, transposed": case(lambda w, x: F.linear(x, w.t()), [(4, 5)], [(3, 4)]),
    "linear, viewed": case(lambda w, x: F.linear(x, w.view(10, 2)), [(5, 4)], [(3, 2)]),
    "linear, in parts": case(
        lambda w, x: F.linear(x, w[:2]).sum() + F.linear(x, w[2:]), [(5, 4)], [(3, 4)]
    ),
    "linear, in chunks": case(
        lambda w, x: sum(F.linear(x, each) for each in w.chunk(2)), [(6, 4)], [(3, 4)]
    ),
    "linear, overlapping": case(
        lambda w, x: F.linear(x, w[:3]) + F.linear(x, w[2:]), [(5, 4)], [(3, 4)]
    ),
    "linear, twice": case(
        lambda w, b, x: F.linear(F.linear(x, w, b).tanh(), w, b),
        [(4, 4), (4,)],
        [(3, 4)],
    ),
    "linear, both ways": case(
        lambda w, x: F.linear(x, w).tanh() @ w, [(5, 4)], [(3, 4)]
    ),
    "bilinear": case(
        lambda w, b, x, y: F.bilinear(x, y, w, b), [(5, 3, 4), (5,)], [(2, 3), (2, 4)]
    ),
    "bilinear of vectors": case(
        lambda w, x, y: F.bilinear(x, y, w), [(5, 3, 4)], [(3,), (4,)]
    ),
    "bilinear, long": case(
        lambda w, x: F.bilinear(x, x.tanh(), w), [(2, 3, 3)], [(4, 6, 3)]
    ),
    "x @ w": case(lambda w, x: x @ w, [(4, 5)], [(3, 4)]),
    "x @ w, long": case(lambda w, x: x @ w, [(4, 5)], [(2, 17, 4)]),
    "x @ v": case(lambda w, x: x @ w, [(4,)], [(2, 3, 4)]),
    "vector @ w": case(lambda w, x: x @ w, [(4, 5)], [(4,)]),
    "vector @ v": case(lambda w, x: x @ w, [(4,)], [(4,)]),
    "w @ x": case(lambda w, x: w @ x, [(5, 4)], [(4, 3)]),
    "w @ x, long": case(lambda w, x: w @ x, [(5, 4)], [(2, 4, 17)]),
    "w @ vector": case(lambda w, x: w @ x, [(5, 4)], [(4,)]),
    "v @ x": case(lambda w, x: w @ x, [(4,)], [(2, 4, 3)]),
    "x @ stack": case(lambda w, x: x @ w, [(2, 4, 5)], [(2, 3, 4)]),
    "x @ stack, batched": case(lambda w, x: x @ w, [(2, 4, 5)], [(6, 2, 3, 4)]),
    "x @ stack, broadcast": case(lambda w, x: x @ w, [(2, 4, 5)], [(6, 1, 3, 4)]),
    "x @ stack, shared": case(lambda w, x: x @ w, [(2, 4, 5)], [(3, 4)]),
    "x @ stacks": case(lambda w, x: x @ w, [(3, 2, 4, 5)], [(3, 2, 6, 4)]),
    "vector @ stack": case(lambda w, x: x @ w, [(2, 4, 5)], [(4,)]),
    "stack @ x": case(lambda w, x: w @ x, [(2, 5, 4)], [(2, 4, 3)]),
    "stack @ x, batched": case(lambda w, x: w @ x, [(2, 5, 4)], [(3, 1, 4, 3)]),
    "stack @ vector": case(lambda w, x: w @ x, [(2, 5, 4)], [(4,)]),
    "rmatmul": case(lambda w, x: w.__rmatmul__(x), [(4, 5)], [(3, 4)]),
    "Tensor.matmul": case(lambda w, x: x.matmul(w), [(4, 5)], [(2, 3, 4)]),
    "torch.matmul": case(lambda w, x: torch.matmul(x, w), [(4, 5)], [(2, 3, 4)]),
    "linalg.matmul": case(lambda w, x: torch.linalg.matmul(w, x), [(5, 4)], [(4, 3)]),
    "torch.mm": case(lambda w, x: torch.mm(x, w), [(4, 5)], [(3, 4)]),
    "Tensor.mm": case(lambda w, x: w.mm(x), [(5, 4)], [(4, 3)]),
    "torch.mv": case(lambda w, x: torch.mv(w, x), [(5, 4)], [(4,)]),
    "Tensor.mv": case(lambda w, x: x.mv(w), [(4,)], [(3, 4)]),
    "torch.bmm": case(lambda w, x: torch.bmm(x, w), [(2, 4, 5)], [(2, 3, 4)]),
    "Tensor.bmm": case(lambda w, x: w.bmm(x), [(2, 5, 4)], [(2, 4, 3)]),
    "torch.addmm": case(lambda w, b, x: torch.addmm(b, x, w), [(4, 5), (5,)], [(3, 4)]),
    "torch.addmm, bias alone": case(
        lambda b, x: torch.addmm(b, x, fixed(x, 4, 5)), [(5,)], [(3, 4)], "Dense"
    ),
    "torch.addmm of data": case(
        lambda w, x: torch.addmm(x[:, :1], x, w, beta=0.5, alpha=2), [(4, 5)], [(3, 4)]
    ),
    "torch.addmm of nothing": case(
        lambda w, x: torch.addmm(x / 0, w, x, beta=0), [(4, 4)], [(4, 4)]
    ),
    "Tensor.addmm": case(lambda w, x: x.addmm(w, x), [(4, 4)], [(4, 3)]),
    "torch.addmv": case(lambda w, x: torch.addmv(x[:1], w, x), [(5, 4)], [(4,)]),
    "Tensor.addmv": case(lambda w, x: x[:, 0].addmv(x, w), [(4,)], [(3, 4)]),
    "torch.baddbmm": case(
        lambda w, x: torch.baddbmm(x[..., :1], x, w), [(2, 4, 5)], [(2, 3, 4)]
    ),
    "Tensor.baddbmm": case(
        lambda w, x: x[:, :1].baddbmm(w, x), [(2, 5, 4)], [(2, 4, 3)]
    ),
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
    "tij,ij->t": ((3, 4, 2), (4, 2)),
    "t,op->top": ((3,), (2, 5)),
    "btd,dhk->bthk": ((1, 5, 4), (4, 2, 3)),
    "bthk,hkd->btd": ((1, 5, 2, 3), (2, 3, 4)),
    "btkh,hkd->btd": ((1, 5, 3, 2), (2, 3, 4)),
    "gti,gio->gto": ((2, 3, 4), (2, 4, 5)),
    "gti,goi->tgo": ((2, 3, 4), (2, 5, 4)),
    "gti,igo->tgo": ((2, 3, 4), (4, 2, 5)),
    "tih,igh->tg": ((3, 4, 2), (4, 5, 2)),
    "...i,...io->...o": ((2, 4), (2, 4, 5)),
    "a...i,...io->a...o": ((3, 2, 4), (2, 4, 5)),
}
FORMED = {"gti,igo->tgo", "tih,igh->tg", "tij,ij->t", "t,op->top"}
"""The weight's axes are not in blocks, or a matrix has one: gradients are formed."""


def einsum_case(equation, x, w):
    kinds = "Dense" if equation in FORMED else "Outer"
    return case(lambda w, x: torch.einsum(equation, x, w), [w], [x], kinds)


PRODUCTS |= {name: einsum_case(name, *shapes) for name, shapes in EINSUMS.items()}
PRODUCTS |= {
    "einsum, weight first": case(
        lambda w, x: torch.einsum("oi,ti->to", w, x), [(5, 4)], [(3, 4)]
    ),
    "einsum, blocks first": case(
        lambda w, x: torch.einsum("gio,gti->tgo", w, x), [(2, 4, 5)], [(2, 3, 4)]
    ),
    "einsum, transposed": case(
        lambda w, x: torch.einsum("ti,oi->to", x, w.t()), [(4, 5)], [(3, 4)]
    ),
    "einsum, transposed on one side": case(
        lambda w, x: torch.einsum("t,op->top", x, w.t()), [(4, 5)], [(3,)], "Dense"
    ),
    "einsum of a list": case(
        lambda w, x: torch.einsum("ti,io->to", [x, w]), [(4, 5)], [(3, 4)]
    ),
    "einsum of numbers": case(
        lambda w, x: torch.einsum(x, [0, 1], w, [1, 2], [0, 2]), [(4, 5)], [(3, 4)]
    ),
}


def lookup(shape, kinds="Rows", **options):
    def op(w, i):
        return F.embedding(i, w, **options)

    return case(op, [(7, 3)], [Index(7, shape)], kinds)


TABLES = {
    "embedding": lookup((1, 6)),
    "embedding of a number": lookup(()),
    "embedding of a matrix": lookup((2, 3, 4)),
    "embedding of nothing": lookup((0,)),
    "embedding, padded": lookup((2, 8), padding_idx=2),
    "embedding, padded from the end": lookup((2, 8), padding_idx=-3),
    "embedding by frequency": lookup((2, 9), padding_idx=1, scale_grad_by_freq=True),
    "embedding of int32": case(
        lambda w, i: F.embedding(i.int(), w), [(7, 3)], [Index(7, (4,))], "Rows"
    ),
    "embedding of a constant": case(
        lambda w, x: F.embedding(torch.arange(5), w) * x, [(7, 3)], [(5, 3)], "Rows"
    ),
    "embedding, transposed": case(
        lambda w, i: F.embedding(i, w.t()), [(3, 7)], [Index(7, (6,))], "Rows"
    ),
}

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


def padded(mode):
    def op(w, x):
        return F.conv2d(F.pad(x, (2, 1, 1, 2), mode), w)

    return case(op, [(5, 4, 3, 2)], [(1, 4, 7, 6)], "Conv")


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
    "conv2d, circular": padded("circular"),
    "conv2d, reflected": padded("reflect"),
    "conv2d, bias alone": case(
        lambda b, x: F.conv2d(x, fixed(x, 5, 4, 3, 3), b), [(5,)], [(4, 6, 6)], "Dense"
    ),
    "conv2d of a constant": case(
        lambda w, x: F.conv2d(fixed(x, 2, 4, 6, 6), w) * x, [(5, 4, 3, 3)], [()], "Conv"
    ),
    "conv2d, twice": case(
        lambda w, x: F.conv2d(F.conv2d(x, w).tanh(), w),
        [(4, 4, 2, 2)],
        [(4, 5, 5)],
        "Conv",
    ),
    "conv1d, wide output": conv_case(
        1, (2,), 3, transposed=True, stride=2, padding=1, output_padding=1
    ),
    "conv2d, wider output": conv_case(
        2, (1,), 2, transposed=True, dilation=3, stride=2, output_padding=(2, 1)
    ),
    "conv3d, wide output": conv_case(
        3, (), 1, transposed=True, stride=3, output_padding=2, groups=2
    ),
    "conv2d, transposed by depth": conv_case(
        2, (1,), 3, transposed=True, channels=6, groups=6
    ),
}

CASES = PRODUCTS | TABLES | CONVOLVED
FEW = [
    "linear",
    "linear, long",
    "linear, twice",
    "linear, in parts",
    "bilinear",
    "w @ x, long",
    "x @ stack, batched",
    "torch.addmm",
    "btd,dhk->bthk",
    "tih,igh->tg",
    "embedding, padded",
    "embedding by frequency",
    "conv1d, in images",
    "conv2d, in groups",
    "conv2d, of numbers",
    "conv2d, large",
    "conv3d, plain",
    "conv2d, transposed, in images",
    "conv2d, wider output",
]
"""Each kind of factor, in several forms."""


def by_layer(params):
    layers = {}
    for name in params:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def clipped(grads, parts, factor):
    """Sum gradients, with factors of the norm over each part."""
    found = {}
    for names in parts:
        part = {name: grads[name] for name in names}
        found |= oracle.weighted(part, factor(oracle.norms(part)))
    return found


def check_quantities(case, strategy, size, dtype=torch.float64, tolerance=1e-10):
    """Compare all that can be had from the gradients of a case with the reference."""
    params, batch = case.data(size, dtype)
    given, options = (params, {}, *batch), {"strategy": strategy}
    grads = oracle.loss_gradients(case.loss, params, {}, batch, size)
    found = vgrad.per_sample_grad(case.loss, **options)(*given)
    assert oracle.error(found, grads) <= tolerance

    def check_norms(groups, members):
        found = vgrad.per_sample_norm(case.loss, groups=groups, **options)(*given)
        expected = {
            group: oracle.norms({name: grads[name] for name in names})
            for group, names in members.items()
        }
        found = {"": found} if groups is None else found
        assert oracle.error(found, expected) <= tolerance

    layers = by_layer(params)
    check_norms(None, {"": list(params)})
    check_norms("parameter", {name: [name] for name in params})
    check_norms("layer", layers)

    weights = torch.linspace(-1, 2, size)
    found = vgrad.weighted_grad(case.loss, **options)(weights, *given)
    assert oracle.error(found, oracle.weighted(grads, weights)) <= tolerance

    bound = max(1e-3, 0.8 * float(oracle.norms(grads).mean()))
    each = bound / math.sqrt(len(layers))
    for clipping, parts, factor in [
        ("flat", [list(params)], lambda norms: (bound / norms).clamp(max=1)),
        ("per_layer", layers.values(), lambda norms: (each / norms).clamp(max=1)),
        ("automatic", [list(params)], lambda norms: bound / (norms + 0.01)),
    ]:
        compute = vgrad.clipped_grad(
            case.loss, max_norm=bound, clipping=clipping, **options
        )
        assert oracle.error(compute(*given).grads, clipped(grads, parts, factor)) <= (
            tolerance
        )


def check_low_precision(case, size, dtype):
    """Compare with the reference, which takes the rounded parameters in float64."""

    def reference(params, *batch):
        return oracle.loss_gradients(case.loss, params, {}, batch, size)

    params, batch = case.data(size, dtype)
    rounding = oracle.rounding(reference, params, *batch, dtype=dtype)
    # Norms from products of positions square the condition number of float32.
    check_quantities(case, "recorded", size, dtype, max(2e-5, 3 * rounding))


def check_gradients(case, size):
    """Compare gradients and their norms alone, which all else is made of."""
    params, batch = case.data(size)
    given, options = (params, {}, *batch), {"strategy": "recorded"}
    grads = oracle.loss_gradients(case.loss, params, {}, batch, size)
    found = vgrad.per_sample_grad(case.loss, **options)(*given)
    assert oracle.error(found, grads) <= 1e-10
    norms = {name: oracle.norms({name: grad}) for name, grad in grads.items()}
    compute = vgrad.per_sample_norm(case.loss, groups="parameter", **options)
    assert oracle.error(compute(*given), norms) <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_every_quantity_of_an_op_equals_that_of_a_loop(name):
    check_quantities(CASES[name], "recorded", 2)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("name", FEW)
def test_the_other_strategies_have_the_same_numbers(name, strategy):
    check_quantities(CASES[name], strategy, 2)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", FEW)
def test_quantities_are_right_for_any_number_of_samples(name, size):
    check_quantities(CASES[name], "recorded", size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_quantities_are_right_in_lower_precision(name, dtype):
    check_low_precision(CASES[name], 2, dtype)


@pytest.mark.parametrize("name", FEW)
def test_no_samples_have_no_gradients(name):
    case = CASES[name]
    params, batch = case.data(0)
    given = (params, {}, *batch)
    for key, grad in vgrad.per_sample_grad(case.loss)(*given).items():
        assert grad.shape == (0, *params[key].shape)
    result = vgrad.clipped_grad(case.loss, max_norm=1.0)(*given)
    assert all(not grad.any() for grad in result.grads.values())


class Told(Factors):
    """Keeps the uses of parameters as well."""

    def __init__(self):
        super().__init__()
        self.uses = []

    def tell(self, use):
        self.uses.append(use)


def recorded(case, size=2):
    """Return what a recorder finds out about a case."""
    params, batch = case.data(size)
    problem = Problem("test", case.loss).on(params, {}, batch)
    return STRATEGIES["recorded"](problem, Told, 0, size).collected


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_recorded_without_expanding_its_parameters(name):
    case = CASES[name]
    found = {}
    for use in recorded(case).uses:
        assert use.ruled, use
        assert not use.computed
        for param in use.names:
            found.setdefault(param, set()).add(type(use.factor).__name__)
    assert found == {param: {kind} for param, kind in case.kinds.items()}


def ops_of(*modules):
    """Return the ops of torch that have their rules in these modules."""
    found = set()
    for op, entry in RULES.items():
        body = entry.factors if isinstance(entry, Rule) else entry.run
        own = getattr(op, "__module__", None) or ""
        if body.__module__ in modules and not own.startswith("vgrad."):
            found.add(op)
    return found


class Seen(TorchFunctionMode):
    """Notes the ops that were called."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def called(cases):
    """Return the ops that cases call."""
    with Seen() as seen:
        for case in cases:
            params, batch = case.data(1)
            case.loss(params, {}, *(each[0] for each in batch))
    return seen.ops


def test_every_op_of_the_table_has_a_case():
    here = ops_of("vgrad.persample.rules.products", "vgrad.persample.rules.convolution")
    assert here <= called(CASES.values())


def test_cases_take_norms_from_products_and_from_gradients():
    outers, convs = set(), set()
    for case in CASES.values():
        for factor in recorded(case).factors.values():
            if isinstance(factor, Outer) and factor.inputs.shape[2] > 1:
                outers.add(factor.by_gram)
            if isinstance(factor, Conv):
                convs.add(factor.form)
    assert outers == {True, False}
    assert convs == {"gram", "groups", "offsets"}


def test_a_sparse_table_has_the_gradients_of_a_dense_one():
    sparse, dense = lookup((2, 5), sparse=True), lookup((2, 5))
    params, batch = dense.data(3)
    given = (params, {}, *batch)
    found = vgrad.per_sample_grad(sparse.loss, strategy="recorded")(*given)
    expected = vgrad.per_sample_grad(dense.loss, strategy="recorded")(*given)
    assert oracle.error(found, expected) == 0


@pytest.mark.parametrize(
    ("equation", "x", "w"),
    [
        ("ti,i->ti", (3, 4), (4,)),  # elementwise
        ("ti,jo->to", (3, 4), (2, 5)),  # sums of each alone
        ("ti,io->o", (3, 4), (4, 5)),
        ("tii,io->to", (3, 4, 4), (4, 5)),  # a diagonal
        ("...i,...io->...o", (2, 4), (1, 4, 5)),  # broadcast
        ("ti,io->to", (3, 4), (1, 5)),
    ],
)
def test_what_an_einsum_has_no_factor_for_is_expanded(equation, x, w):
    made = einsum_case(equation, x, w)
    assert [use.ruled for use in recorded(made).uses] == [False]
    check_quantities(made, "recorded", 2)


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


def test_other_calls_that_no_rule_fits_are_expanded():
    for made in (
        case(lambda b, x: F.linear(x, fixed(x, 5, 4), b), [(1,)], [(3, 4)], "Dense"),
        case(lambda w, x: torch.matmul(x, other=w), [(4, 5)], [(3, 4)], "Dense"),
        case(lambda w, x: torch.addmm(x[:1, :1], x, mat2=w), [(4, 5)], [(3, 4)]),
        case(lambda w, x: x @ w, [(1, 4, 5)], [(3, 2, 6, 4)], "Dense"),
    ):
        assert not any(use.ruled for use in recorded(made).uses)
        check_quantities(made, "recorded", 2)


SIZES = st.sampled_from([1, 2, 5])
SHORT = examples(15)


@SHORT
@given(
    size=SIZES,
    lead=st.lists(st.integers(0, 4), max_size=3),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    by_matmul=st.booleans(),
)
def test_linear_maps_of_any_shape(size, lead, widths, bias, by_matmul):
    inputs, outputs = widths
    weight = (inputs, outputs) if by_matmul else (outputs, inputs)

    def op(w, *rest):
        *bias, x = rest
        return x @ w + sum(bias) if by_matmul else F.linear(x, w, *bias)

    shifts = [(outputs,)] * bias
    check_gradients(case(op, [weight, *shifts], [(*lead, inputs)]), size)


@st.composite
def einsums(draw):
    """Draw axes of groups, positions, inputs and outputs, in any order."""
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
@given(drawn=einsums(), size=SIZES)
def test_einsums_of_any_axes(drawn, size):
    made, ruled = drawn
    check_gradients(made, size)
    assert [use.ruled for use in recorded(made, size).uses] == [ruled]


@st.composite
def convolutions(draw):
    """Draw a convolution, transposed or not, with few pixels."""
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())

    def each(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * dims))

    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    padding = each(0, 2)
    options = {"stride": stride, "dilation": dilation, "padding": padding}
    space = [gap * (k - 1) + 1 for gap, k in zip(dilation, kernel, strict=True)]
    space = [a + b for a, b in zip(space, each(0, 3), strict=True)]
    if transposed:
        wide = zip(stride, dilation, strict=True)
        options["output_padding"] = draw(
            st.tuples(*(st.integers(0, max(pair) - 1) for pair in wide))
        )
        space = [1 + n + 2 * p for n, p in zip(space, padding, strict=True)]
    lead = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    options["groups"] = draw(st.sampled_from([1, 2, 6]))
    return conv_case(
        dims, lead, kernel, space=space, channels=6, transposed=transposed, **options
    )


@examples(30)
@given(made=convolutions(), size=SIZES)
def test_convolutions_of_any_shape(made, size):
    check_gradients(made, size)


@SHORT
@given(
    size=SIZES,
    high=st.integers(1, 9),
    shape=st.lists(st.integers(0, 5), max_size=3),
    padding=st.integers(-9, 8),
    by_frequency=st.booleans(),
)
def test_lookups_of_any_shape(size, high, shape, padding, by_frequency):
    padding_idx = padding if -high <= padding < high else None

    def op(w, i):
        return F.embedding(
            i, w, padding_idx=padding_idx, scale_grad_by_freq=by_frequency
        )

    made = case(op, [(high, 3)], [Index(high, tuple(shape))], "Rows")
    check_gradients(made, size)


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


@examples(40)
@given(names=st.lists(st.sampled_from(sorted(USES)), min_size=2, max_size=3))
def test_several_uses_of_one_parameter(names):
    def op(w, x, i):
        return torch.stack([USES[name](w, x, i).sin().sum() for name in names])

    check_quantities(case(op, [(4, 4)], [(3, 4), Index(4, (5,))]), "recorded", 2)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def numbers(high, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator)


def check_factor(make, reference):
    """Compare a factor of 4 samples, and one of 3, with the gradients themselves."""
    factor, other = make(4, seed=0), make(3, seed=1)
    dense, other_dense = Dense(reference(factor)), Dense(reference(other))
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    rows = torch.tensor([2, 0])

    def close(found, expected):
        assert oracle.error({"": found}, {"": expected}) <= 1e-10

    assert (factor.size, factor.shape) == (4, dense.shape)
    close(factor.grad(), dense.g)
    settled, settled_norm = factor.settled()
    for norm in (factor.norm(), settled_norm):
        close(norm.value, dense.norm().value)
        assert bool((norm.upper >= norm.value * (1 - 1e-12)).all())
        close(norm.upper, dense.norm().value)
    for each in (factor, settled):
        close(each.grad(), dense.g)
        close(each.weighted(weights), dense.weighted(weights))
        close(each.take(rows).grad(), dense.g[rows])
        close(
            each.take(rows).weighted(weights[:2]),
            dense.take(rows).weighted(weights[:2]),
        )
    close(factor.gram(other), dense.gram(other_dense))
    close(factor.gram(other_dense), dense.gram(other_dense))
    close(dense.gram(other), dense.gram(other_dense))
    first, *rest = dense.shape
    probes = Probes(normal(7, first, seed=2), normal(7, math.prod(rest), seed=3))
    close(factor.project(probes), dense.project(probes))


def outer_gradients(factor):
    grads = torch.einsum("bgto,bgti->bgoi", factor.outputs, factor.inputs)
    return grads.reshape(factor.size, *factor.shape)


def rows_gradients(factor):
    grads = factor.outputs.new_zeros(factor.size, *factor.shape)
    for sample in range(factor.size):
        for index, row in zip(
            factor.index[sample], factor.outputs[sample], strict=True
        ):
            grads[sample, index] += row
    return grads


def conv_gradients(factor):
    op = CONVOLUTIONS[len(factor.stride)]
    grads = []
    for x, g in zip(factor.inputs, factor.outputs, strict=True):
        weight = g.new_zeros(factor.shape, requires_grad=True)
        out = op(
            F.pad(x, factor.pads)[None],
            weight,
            None,
            factor.stride,
            0,
            factor.dilation,
            factor.groups,
        )
        grads += torch.autograd.grad(out, weight, g[None])
    return torch.stack(grads)


@pytest.mark.parametrize("by_gram", [True, False])
@SHORT
@given(
    groups=st.integers(1, 3),
    positions=st.integers(0, 6),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
)
def test_both_forms_of_an_outer_factor(by_gram, groups, positions, inputs, outputs):
    shape = torch.Size([outputs, inputs] if groups == 1 else [groups, outputs, inputs])

    def make(size, seed):
        a = normal(size, groups, positions, inputs, seed=seed)
        return Outer(a, normal(size, groups, positions, outputs, seed=seed + 9), shape)

    with mock.patch.object(Outer, "by_gram", by_gram or positions == 1):
        check_factor(make, outer_gradients)


@SHORT
@given(positions=st.integers(0, 9), high=st.integers(1, 6), width=st.integers(1, 4))
def test_a_factor_of_rows(positions, high, width):
    def make(size, seed):
        index = numbers(high, size, positions, seed=seed)
        outputs = normal(size, positions, width, seed=seed)
        return Rows(index, outputs, torch.Size([high, width]))

    check_factor(make, rows_gradients)


@pytest.mark.parametrize("by_gram", [True, False])
@SHORT
@given(positions=st.integers(1, 6), lookups=st.integers(0, 6), high=st.integers(1, 5))
def test_both_forms_of_a_tied_factor(by_gram, positions, lookups, high):
    shape = torch.Size([high, 3])

    def make(size, seed):
        a = normal(size, 1, positions, 3, seed=seed)
        outer = Outer(a, normal(size, 1, positions, high, seed=seed + 9), shape)
        index = numbers(high, size, lookups, seed=seed)
        return Tied(outer, Rows(index, normal(size, lookups, 3, seed=seed), shape))

    def gradients(factor):
        return outer_gradients(factor.outer) + rows_gradients(factor.rows)

    with mock.patch.object(Outer, "by_gram", by_gram or positions == 1):
        check_factor(make, gradients)


@pytest.mark.parametrize("form", ["gram", "groups", "offsets"])
@examples(8)
@given(data=st.data())
def test_all_forms_of_a_convolution(form, data):
    dims = data.draw(st.integers(1, 3))

    def each(low, high):
        return data.draw(st.tuples(*[st.integers(low, high)] * dims))

    kernel, stride, dilation, count = each(1, 3), each(1, 3), each(1, 2), each(1, 3)
    pads = tuple(
        data.draw(st.lists(st.integers(0, 2), min_size=2 * dims, max_size=2 * dims))
    )
    groups = data.draw(st.integers(1, 3))
    around = [sum(pair) for pair in zip(pads[::2], pads[1::2], strict=True)][::-1]
    space = [
        max(1, (n - 1) * step + gap * (k - 1) + 1 - extra)
        for n, step, gap, k, extra in zip(
            count, stride, dilation, kernel, around, strict=True
        )
    ]
    count = [
        (n + extra - gap * (k - 1) - 1) // step + 1
        for n, step, gap, k, extra in zip(
            space, stride, dilation, kernel, around, strict=True
        )
    ]
    shape = torch.Size([2 * groups, 2, *kernel])

    def make(size, seed):
        inputs = normal(size, 2 * groups, *space, seed=seed)
        outputs = normal(size, 2 * groups, *count, seed=seed + 9)
        return Conv(inputs, outputs, shape, stride, pads, dilation, groups)

    with mock.patch.object(Conv, "form", form):
        check_factor(make, conv_gradients)


def test_a_rule_that_leaves_a_weight_out_is_named():
    @wrap_torch_function(lambda x, weight, bias: (x, weight, bias))
    def affine(x, weight, bias):
        return x * weight + bias

    @vgrad.rule(affine, weights=("weight", "bias"))
    def half_a_rule(x, weight, bias):
        return {"weight": lambda g: Dense(g * x)}

    params = {"w": torch.ones(2), "b": torch.ones(2)}
    try:
        with pytest.raises(TypeError, match=r"rule\(affine\).*none for 'bias'"):
            vgrad.per_sample_grad(lambda p, b, x: affine(x, p["w"], p["b"]).sum())(
                params, {}, torch.ones(3, 2)
            )
    finally:
        del RULES[affine]

"""Sums at indices under vmap: torch's numbers, by one kernel for all samples."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from vgrad.ops import OPS

B, N, E = 3, 4, 6
INDEX = torch.tensor([[0, 1, 1, 3, 0, 1], [3, 3, 3, 3, 3, 3], [2, 0, 1, 3, 1, 2]])
ADD, ADD_ = OPS[torch.index_add].mapped, OPS[Tensor.index_add_].mapped


def values(dim, dtype=torch.float64):
    """Samples whose axis `dim` has N rows, and E rows to add."""
    sizes = {0: (N, 2, 5), 1: (2, N, 5), -1: (2, 5, N)}[dim]
    x = losses.randn(B, *sizes, dtype=dtype)
    more = [E if size == N else size for size in sizes]
    return x, losses.randn(B, *more, dtype=dtype, seed=1)


def derivatives(add, dim):
    """Functions of a sample: a sum, two derivatives, and one in forward mode."""

    def total(x, source, index):
        return add(x.sin(), dim, index, source.exp(), alpha=3)

    def value(x, index, source):
        return (total(x, source, index),)

    def slope(x, index, source):
        run = lambda x, s: (total(x, s, index) ** 3).sum()  # noqa: E731
        return torch.func.grad(run, (0, 1))(x, source)

    def second(x, index, source):
        run = lambda x, s: sum(g.sum() for g in slope(x, index, s))  # noqa: E731
        return torch.func.grad(run, (0, 1))(x, source)

    def forward(x, index, source):
        run = lambda x, s: total(x, s, index)  # noqa: E731
        return torch.func.jvp(run, (x, source), (x.cos(), source.cos()))

    return value, slope, second, forward


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    "mapped",
    [
        each
        for each in itertools.product([0, None], repeat=3)
        if any(axis == 0 for axis in each)
    ],
)
def test_sums_and_derivatives_are_those_of_single_samples(dim, mapped):
    x, source = values(dim)
    given = [
        each if axis == 0 else each[0]
        for each, axis in zip((x, INDEX, source), mapped, strict=True)
    ]

    def alone(function):
        found = []
        for n in range(B):
            axes = zip(given, mapped, strict=True)
            found.append(function(*[x[n] if axis == 0 else x for x, axis in axes]))
        return [torch.stack(each) for each in zip(*found, strict=True)]

    pairs = zip(derivatives(ADD, dim), derivatives(torch.index_add, dim), strict=True)
    for ours, theirs in pairs:
        found = torch.vmap(ours, in_dims=mapped)(*given)
        oracle.assert_exact(list(found), alone(theirs))


def test_an_index_out_of_range_reaches_no_other_sample():
    x, source = values(0)
    for wrong in (N, -1, N + 1):
        index = INDEX.clone()
        index[0, 2] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
            torch.vmap(ADD, in_dims=(0, None, 0, 0))(x, 0, index, source)


def test_a_sum_in_place_writes_where_it_is_told():
    x, source = values(0)
    expected = torch.stack(
        [each.index_add(0, i, s) for each, i, s in zip(x, INDEX, source, strict=True)]
    )
    given = x.clone()
    found = torch.vmap(lambda x, i, s: ADD_(x, 0, i, s))(given, INDEX, source)
    assert torch.equal(given, expected)
    assert torch.equal(found, expected)


WRONG = {
    "cdist, of parameters": (
        (2, 2),
        "value = torch.cdist(w[:, None], w[:, None].sin())[:2, 1:3] * x",
    ),
    "squeeze_": ((1, 4), "h = x * w; h.squeeze_(); value = h * h.ndim"),
    "squeeze_, of numbers alone": ((1,), "h = x.clone(); h.squeeze_(); value = h * w"),
    "roll": ((), "value = (x * w.sum()).roll(1) * x"),
    "roll, a method": ((), "value = w.sum().roll(shifts=2) * x"),
    "roll, along no axes": ((), "value = (x * w.sum()).roll(1, ()) * x"),
    "roll, an empty list": ((), "value = torch.roll(x * w.sum(), 1, dims=[]) * x"),
    "solve, an axis of right sides": (
        (1, 2, 1),
        "value = torch.linalg.solve(w.view(2, 2), x)",
    ),
    "solve, an axis of matrices": (
        (2, 2),
        "value = torch.linalg.solve(w.view(1, 2, 2), x, left=False)",
    ),
    "solve_ex, of vectors": ((2,), "value = torch.linalg.solve_ex(w.view(2, 2), x)[0]"),
    "select_scatter": ((5, 4), "value = x.select_scatter(w, -2, 1) * x"),
    "select_scatter, of x": (
        (4, 5),
        "value = torch.select_scatter(x, x[:, 0] * w, 1, index=-2) * x",
    ),
} | {
    f"cdist, p = {p}": (
        (2, 3),
        f"value = torch.cdist(w.view(2, 2), w.view(2, 2)[:, [0, 0]].mT.sin(), {p})"
        "[:, [0, 1, 0]] * x",
    )
    for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, "float('inf')")
}
"""Ops that torch's rules of vmap, or their derivatives, get wrong, without an error."""


def gradients(strategy, text, size, *shape):
    """Return the gradients of a loss that is a text about `x` and `w`."""

    def loss(params, buffers, x):
        names = {"x": x, "w": params["w"], "torch": torch}
        exec(text, names)
        return names["value"].sum()

    params, x = {"w": losses.randn(4)}, losses.randn(size, *shape, seed=1)
    return vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, x)


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_ops_that_torch_maps_wrongly_are_right(strategy, size, text):
    shape, text = text
    oracle.assert_exact(
        gradients(strategy, text, size, *shape), gradients("loop", text, size, *shape)
    )


SYSTEMS = {
    "lstsq": "value = torch.linalg.lstsq(w.view(1, 2, 2), x.view(1, 2, 2))[0]",
    "lu_solve": "f = torch.linalg.lu_factor(w.view(2, 2)); "
    "value = torch.linalg.lu_solve(*f, x.view(1, 2, 2))",
}
"""Systems with axes of batches, for which torch's derivatives are wrong under vmap."""


@pytest.mark.parametrize("text", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_systems_with_axes_of_batches_leave_the_vmap(text):
    oracle.assert_exact(gradients("auto", text, 3, 4), gradients("loop", text, 3, 4))
    with pytest.raises(NotImplementedError, match="without axes of batches"):
        gradients("vmap", text, 3, 4)


ODD = {
    "addbmm_, enlarging": (
        "h = x * w[:1]; h.addbmm_(x.expand(2, 3, 1), x.expand(2, 1, 3)); value = h * h"
    ),
    "as_strided_": (
        "h = x * w; r = h.as_strided_((2, 2), (1, 2), 0); value = h * h + r.sum()"
    ),
}
"""Ops in place that give a tensor another shape, which vmap does not see."""


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore:.*resized", "ignore::vgrad.FallbackWarning")
def test_ops_that_change_a_shape_in_place_leave_the_vmap(text):
    axes = (1,) if "addbmm" in text else (4,)
    oracle.assert_exact(
        gradients("auto", text, 3, *axes), gradients("loop", text, 3, *axes)
    )
    with pytest.raises(RuntimeError):
        gradients("vmap", text, 3, *axes)


class Graph(nn.Module):
    """Sends messages along the edges of a graph, which each sample has of its own."""

    def __init__(self, in_place=False):
        super().__init__()
        self.message = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.in_place = in_place

    def forward(self, x):
        nodes, edges = x[0, :, :3], x[0, :, 3:].long()
        start, end = edges[:, 0], edges[:, 1]
        sent = torch.relu(self.message(torch.cat([nodes[start], nodes[end]], 1)))
        total = torch.zeros_like(sent[: len(nodes)])
        if self.in_place:
            total.index_add_(0, end, sent)
        else:
            total = total.index_add(0, end, sent)
        return self.head(total.tanh().mean(0, keepdim=True))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_graph_nets_have_the_gradients_of_a_loop(strategy, in_place):
    x = torch.cat([losses.randn(7, 5, 3), torch.randint(5, (7, 5, 2)).double()], 2)
    y = torch.randint(3, (7,))
    loss, params, buffers = losses.of_model(
        Graph(in_place), F.cross_entropy, torch.float64
    )
    batch = (x, y)
    losses.assert_quantities(loss, params, batch, buffers=buffers, strategy=strategy)
    if strategy == "recorded":
        options = {"strategy": strategy, "verify": False}
        compute = vgrad.clipped_grad(loss, max_norm=0.3, **options)
        with losses.Ops() as ops:
            compute(params, buffers, *batch)
        assert ops.count("scatter_add") == 1

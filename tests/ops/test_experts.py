"""Mixtures of experts: grouped products, counts, and rows of parameters by index."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

import vgrad
from tests import losses, oracle
from tests.losses import randn
from vgrad.factors import Experts, costs, norms
from vgrad.ops import OPS
from vgrad.torch_private import kernels

pytestmark = pytest.mark.filterwarnings("error:.*:vgrad.FallbackWarning")

B, S, IN, OUT, E = 5, 9, 4, 8, 3

ENDS = torch.tensor([[3, 3, 9], [9, 9, 9], [0, 0, 9], [2, 4, 7], [0, 0, 0]])
"""Experts without rows, of all rows, of some; rows of no expert; nothing at all."""


@wrap_torch_function(lambda rows, matrices, offs: (rows, matrices))
def grouped(rows, matrices, offs):
    """Multiply as `F.grouped_mm`, of every dtype; other rows hold anything."""
    start, parts = 0, []
    for end, each in zip(offs.tolist(), matrices, strict=True):
        parts.append(rows[start:end] @ each)
        start = end
    rest = rows.new_full((len(rows) - start, matrices.shape[2]), torch.nan)
    return torch.cat([*parts, rest])


@pytest.fixture
def doubled(monkeypatch):
    """Have the record of torch's function, which has no kernel for float64."""
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, *, offs: grouped(x, w, offs))
    monkeypatch.setitem(OPS, grouped, OPS[kernels.grouped_mm])


def factor(seed=0):
    shape = torch.Size([E, IN, OUT])
    return Experts(
        randn(B, S, IN, seed=seed), randn(B, S, OUT, seed=seed + 1), shape, ENDS
    )


def gradients(each):
    grads = each.inputs.new_zeros(each.size, *each.shape)
    for sample, ends in enumerate(each.ends.tolist()):
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            a, b = (x[sample, start:end] for x in each.sides)
            grads[sample, expert] = a.T @ b
    return grads


def joint(each):
    found = norms.recomputed(norms.settled({"": each.settled()[1]}))
    made = norms.Joint(found, [[""]], each.inputs.dtype)
    return made.value[0], made.upper[0], made.reach[0]


@pytest.mark.parametrize("by_gram", [False, True])
def test_quantities_of_a_factor_are_those_of_its_gradients(by_gram, monkeypatch):
    each, weights = factor(), torch.linspace(-1, 2, B, dtype=torch.float64)
    exact = gradients(each)
    monkeypatch.setattr(costs, "outer_by_gram", lambda *sizes: by_gram)
    oracle.assert_exact(each.grad(), exact)
    found = torch.einsum("b,beio->eio", weights, exact)
    oracle.assert_exact(each.weighted(weights), found)
    monkeypatch.setattr("vgrad.factors.reductions.ROWS_AT_ONCE", 2 * S)
    oracle.assert_exact(each.weighted(weights), found)
    assert isinstance(each.settled()[0], Experts) is by_gram
    oracle.assert_exact(joint(each)[0], exact.flatten(1).norm(dim=1))
    some = torch.tensor([3, 0])
    oracle.assert_exact(each.take(some).grad(), exact[some])
    other = gradients(factor(7))
    oracle.assert_exact(
        each.gram(factor(7)), torch.einsum("aeio,beio->ab", exact, other)
    )


def test_norms_take_no_more_products_than_experts_have_rows():
    """One expert of many rows fills no others up."""
    ends = torch.tensor([[64, *range(65, 96)]]).expand(2, -1)
    rows = randn(2, 95, IN), randn(2, 95, OUT)
    each = Experts(*rows, torch.Size([32, IN, OUT]), ends)
    with (
        mock.patch.object(costs, "outer_by_gram", return_value=True) as cheap,
        mock.patch(
            "vgrad.factors.products.self_products", wraps=lambda x: x @ x.mT
        ) as p,
    ):
        found = joint(each)[0]
    oracle.assert_exact(found, gradients(each).flatten(1).norm(dim=1))
    assert sum(call.args[0][..., 0].numel() for call in p.call_args_list) == 4 * 95
    cheap.assert_called_once()


@pytest.mark.parametrize("scale", [1.0, 1e18, 1e-25])
def test_rows_that_cancel_leave_what_is_left(scale, monkeypatch):
    each = factor()
    a, b = (x.float() for x in each.sides)
    b[1, 1::2], a[1, 1::2] = -b[1, ::2][:4], a[1, ::2][:4]
    b[1, 8] *= 1e-5
    each = Experts(a * scale, b, each.shape, ENDS)
    exact = gradients(each.double()).flatten(1).norm(dim=1)
    monkeypatch.setattr(costs, "outer_by_gram", lambda *sizes: True)
    value, upper, _ = joint(each)
    oracle.assert_exact(value / scale, exact / scale, 1e-6)
    assert bool((upper >= exact * (1 - 1e-12)).all())
    assert exact[4] == value[4] == 0


class Mixture(nn.Module):
    """A mixture as of transformers: the rows of each sample sorted by expert."""

    def __init__(self, turned=False, past=0):
        super().__init__()
        self.inner = nn.Linear(3, IN)
        self.router = nn.Linear(IN, E + past)
        shape = (E, OUT, IN) if turned else (E, IN, OUT)
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(E, OUT))
        self.turned, self.past = turned, past

    def forward(self, x):
        x = self.inner(x.flatten(0, 1))
        scores, ids = self.router(x).softmax(1).topk(2, 1)
        ids, order = ids.flatten().sort()
        counts = torch.histc(ids.to(x.dtype), bins=E, min=0, max=E - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        past = (ids >= E)[:, None]
        rows = x[order // 2].masked_fill(past, 0)
        weight = self.weight.mT if self.turned else self.weight
        out = grouped(rows, weight, ends) + self.bias[ids.clamp(max=E - 1)]
        out = out.masked_fill(past, 0).sin() * scores.flatten()[order][:, None]
        return out[order.argsort()].view(len(x), 2, OUT).sum(1).sum(0, keepdim=True)


@pytest.mark.parametrize("kind", [{}, {"turned": True}, {"past": 1}])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("inner.weight", "inner.bias")])
def test_mixtures_have_the_quantities_of_a_loop(kind, frozen, doubled):
    torch.manual_seed(1)
    loss, params, buffers = losses.of_model(
        Mixture(**kind), F.cross_entropy, torch.float64
    )
    fixed = {name: params.pop(name) for name in frozen}
    batch = randn(6, 5, 3), torch.randint(OUT, (6,))

    def partial(params, buffers, x, y):
        return loss({**params, **fixed}, buffers, x, y)

    losses.assert_quantities(partial, params, batch, buffers=buffers)
    told = vgrad.explain(vgrad.per_sample_norm(partial))(params, buffers, *batch)
    assert all(row.why.startswith("has a rule") for row in told.rows)
    kinds = {row.factor for row in told.rows if row.names == ("weight",)}
    assert kinds == (set() if "weight" in frozen else {"Experts"})

"""Mixtures of experts: grouped products, counts, and rows of parameters by index."""

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


@wrap_torch_function(lambda input, mat2, offs: (input, mat2))
def grouped(input, mat2, offs):
    """Multiply as `F.grouped_mm`, of every dtype; other rows hold anything."""
    start, parts = 0, []
    for end, each in zip(offs.tolist(), mat2, strict=True):
        parts.append(input[start:end] @ each)
        start = end
    rest = input.new_full((len(input) - start, mat2.shape[2]), torch.nan)
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
    found = norms.recomputed(norms.computed({"": each.with_norms()[1]}))
    made = norms.Joint(found, [[""]], each.inputs.dtype)
    return made.value[0], made.upper[0]


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
    assert isinstance(each.with_norms()[0], Experts) is by_gram
    oracle.assert_exact(joint(each)[0], exact.flatten(1).norm(dim=1))
    narrow = Experts(*(x.bfloat16() for x in each.sides), each.shape, ENDS)
    length = gradients(narrow.double()).flatten(1).norm(dim=1)
    oracle.assert_exact(joint(narrow)[0], length, 1e-6)
    some = torch.tensor([3, 0])
    oracle.assert_exact(each.select(some).grad(), exact[some])
    other = gradients(factor(7))
    oracle.assert_exact(
        each.gram(factor(7)), torch.einsum("aeio,beio->ab", exact, other)
    )


@pytest.mark.parametrize("scale", [1.0, 1e18, 1e-25])
def test_rows_that_cancel_leave_what_is_left(scale, monkeypatch):
    each = factor()
    a, b = (x.float() for x in each.sides)
    b[1, 1::2], a[1, 1::2] = -b[1, ::2][:4], a[1, ::2][:4]
    b[1, 8] *= 1e-5
    each = Experts(a * scale, b, each.shape, ENDS)
    exact = gradients(each.double()).flatten(1).norm(dim=1)
    monkeypatch.setattr(costs, "outer_by_gram", lambda *sizes: True)
    value, upper = joint(each)
    oracle.assert_exact(value / scale, exact / scale, 1e-6)
    assert bool((upper >= exact * (1 - 1e-12)).all())
    assert exact[4] == value[4] == 0


HISTC = OPS[torch.histc].mapped


class Mixture(nn.Module):
    """A mixture as of transformers: the rows of each sample sorted by expert."""

    def __init__(self, turned=False, past=0, run=grouped):
        super().__init__()
        self.inner = nn.Linear(3, IN)
        self.router = nn.Linear(IN, E + past)
        shape = (E, OUT, IN) if turned else (E, IN, OUT)
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(E, OUT))
        self.turned, self.past, self.run = turned, past, run

    def forward(self, x):
        x = self.inner(x.flatten(0, 1))
        scores, ids = self.router(x).softmax(1).topk(2, 1)
        ids, order = ids.flatten().sort()
        counts = torch.histc(ids.to(x.dtype), bins=E, min=0, max=E - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        past = (ids >= E)[:, None]
        rows = x[order // 2].masked_fill(past, torch.nan)
        weight = self.weight.mT if self.turned else self.weight
        out = self.run(rows, weight, offs=ends) + self.bias[ids.clamp(max=E - 1)]
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


@pytest.mark.parametrize("turned", [False, True])
def test_torchs_own_products_are_those_of_a_loop_in_double(turned):
    def made(run, dtype):
        torch.manual_seed(1)
        return losses.of_model(Mixture(turned, run=run), F.cross_entropy, dtype)

    loss, params, buffers = made(F.grouped_mm, torch.float32)
    batch = randn(6, 5, 3).float(), torch.randint(OUT, (6,))
    plain, *_ = made(grouped, torch.float64)
    exact = oracle.loss_gradients(plain, params, buffers, batch)
    same = {"buffers": buffers, "expected": exact, "tolerance": 2e-5}
    losses.assert_quantities(loss, params, batch, **same)


OTHERS = {
    "ends that all share": "f(x, w, o[0]) * g",
    "rows that all share": "f(a, w, e)[:7] * g[:7]",
    "rows and ends that all share": "f(a, w, o[0]) * g",
    "two uses": "f(f(x, w, e), w.mT, e)[:7].sin()",
    "an expert for all": "f(x, w[1:2], e[1:2])[:2] * g[:2]",
    "twice the weights": "f(x, 2 * w, e)[:7].sin() * g[:7]",
    "in place": "f(x.clone().mul_(2), w, e).relu_()[:7] * g[:7]",
    "a derivative": "d(f(x, w, e)[:7].sin().sum(), x, create_graph=True)[0].square()",
    "no weights of ours": "f(x * w.sum(), a[None].mT, e[-1:])[:2, :8] * g[:2]",
}
"""Losses of samples with ends of 7 rows or more, about grouped products `f`."""


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_other_uses_have_the_gradients_of_a_loop(text, doubled):
    scope = {"f": grouped, "d": torch.autograd.grad}
    scope |= {"a": randn(S, IN, seed=3), "o": ENDS[:4].int()}
    loss = losses.written(f"({text}).sum()", scope, "xge")

    def differentiable(params, buffers, x, *rest):
        return loss(params, buffers, x.requires_grad_(), *rest)

    batch = randn(3, S, IN), randn(3, S, OUT), ENDS[[0, 1, 3]].int()
    own = differentiable if "d(" in text else loss
    losses.assert_quantities(own, {"w": randn(E, IN, OUT)}, batch)


def test_counts_are_those_of_single_samples():
    """Of numbers on the edges, between them and outside."""
    for count, low, high in ((5, 0, 2), (13, -1.7, 2.3), (1, 0, 1)):
        edges = torch.linspace(low, high, count + 1).expand(6, -1)
        for x in (torch.cat([randn(6, 40), edges], 1), torch.cat([edges, edges], 1)):
            found = torch.vmap(lambda x, n=count, a=low, b=high: HISTC(x, n, a, b))(x)
            expected = [torch.histc(each, count, low, high) for each in x]
            oracle.assert_exact(found, torch.stack(expected), 0)


LOOKUPS = {
    "rows": "w[i] * x",
    "rows, from the end": "w[i - 5] * x",
    "one row": "w[i[0, 0]] * x",
    "numbers": "w[:, 1][i] * x[..., 0]",
    "many of few": "w[i.repeat(4, 1)].sin().sum((0, 1)) * x",
}


@pytest.mark.parametrize("text", LOOKUPS.values(), ids=LOOKUPS)
def test_rows_of_a_parameter_are_taken_by_index(text):
    loss = losses.written(f"({text}).sum()", {}, "xi")
    params, index = {"w": randn(5, 3)}, torch.randint(5, (4, 6, 2))
    given = params, (randn(4, 6, 2, 3), index)
    losses.assert_quantities(loss, *given)
    told = vgrad.explain(vgrad.per_sample_norm(loss))(given[0], {}, *given[1])
    assert {row.why for row in told.rows} == {"has a rule"}
    wrong = index.clone()
    wrong[2] = 7 if "-" not in text else -1
    with pytest.raises(IndexError):
        losses.norms(loss, params, given[1][0], wrong, strategy="recorded")


def test_a_mixture_is_captured():
    torch.manual_seed(1)
    model = Mixture(turned=True, run=F.grouped_mm)
    loss, *given = losses.of_model(model, F.cross_entropy, torch.float32)
    compute = vgrad.clipped_grad(loss, max_norm=0.3)
    captured = vgrad.compile(compute, fallback="error")
    for seed in range(3):
        batch = randn(6, 5, 3, seed=seed).float(), torch.arange(6)
        found, expected = (f(*given, *batch) for f in (captured, compute))
        oracle.assert_exact(found.grads, expected.grads, 1e-6)
        oracle.assert_exact(found.norms, expected.norms, 1e-6)
    (report,) = captured.reports()
    assert report.calls == 2

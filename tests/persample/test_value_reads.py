"""Losses that read values: one read for all samples, or parts that run apart.

Shapes that depend on values are such reads: samples of one count stay together.
"""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import assert_gradients, randn, written
from tests.persample.test_losses import BATCH, D, T, net, of_rows, placed, put

EXACT = 1e-12
PARAMS = {"w": randn(3, 4), "v": randn(3, seed=1)}
TABLE = PARAMS | {"table": randn(T, D, seed=6)}
X, ROWS = randn(12, 4, seed=2), BATCH[0]


def asks_once(params, buffers, x):
    return net(params, x.sin() if x.sum() > 0 else x * 2).square()


by_vmap = pytest.mark.parametrize("strategy", ["recorded", "vmap"])


@pytest.mark.parametrize(
    "read", [lambda row: row * 2 if row > 0 else row, lambda row: row[row > 0].sum()]
)
@by_vmap
def test_inside_of_a_vmap_of_its_own_it_is_refused(strategy, read):
    def loss(params, buffers, x):
        return torch.vmap(read)(x * params["v"][0]).sum()

    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    with pytest.raises(vgrad.UnsupportedOp, match="outside of a vmap of its own"):
        compute(PARAMS, {}, X)


def test_a_transform_inside_of_a_transform_reads_in_turn():
    def inner(params, buffers, row, mask):
        return (row * params["v"][0])[mask].sin().sum()

    def loss(params, buffers, x):
        x = x * params["w"][0]
        norms = vgrad.per_sample_norm(inner, strategy="vmap")
        return norms(params, buffers, x, x.detach() > 0).sum()

    assert_gradients(loss, TABLE, (ROWS,), tolerance=EXACT, strategy="vmap")


@pytest.mark.parametrize(
    "read", [lambda x: x.sum() * x[0, 0].item(), lambda x: x[x > -0.5].square().sum()]
)
def test_a_warning_names_the_line_where_parts_are_small(read):
    def loss(params, buffers, x):
        return read(x * params["w"][0])

    x, compute = randn(16, 40, 4), vgrad.per_sample_grad(loss)
    text = (
        r"^per_sample_grad: samples take different branches at .*test_value_reads.py:"
    )
    with pytest.warns(vgrad.FallbackWarning, match=text + r"\d+; 16 of"):
        found = compute(PARAMS, {}, x)
    oracle.assert_exact(found, oracle.loss_gradients(loss, PARAMS, {}, (x,)), EXACT)
    compute(PARAMS, {}, x)  # without a second warning
    vgrad.per_sample_grad(loss)(PARAMS, {}, x[:15])  # nor for so few


BY_DATA = [
    "h * torch.bernoulli(h.detach().sigmoid())",
    "h * torch.normal(h.detach(), 1.0)",
]
DRAWS = [
    *BY_DATA,
    "F.dropout(h, 0.5)",
    "F.dropout(h * 1, 0.5, inplace=True)",
    "F.dropout1d(h[None, :, None], 0.5).flatten()",
    "F.alpha_dropout(h, 0.5, True)",
    "F.feature_alpha_dropout(h[None], 0.5, True)[0]",
    "h * torch.rand(3, dtype=h.dtype)",
    "h + torch.randn(3, dtype=h.dtype)",
    "h * torch.rand_like(h)",
    "h + torch.randn_like(h)",
    "h * torch.randint(3, (3,))",
    "h * (0.5 + torch.empty_like(h).bernoulli_(0.3))",
    "h * torch.empty_like(h).uniform_(-1, 2)",
    "h * torch.empty_like(h).normal_()",
    "h * torch.empty_like(h).exponential_()",
    "(h.outer(h).t() * torch.rand_like(h.outer(h).t())).sum(0)",  # another layout
    "h * torch.rand((), dtype=h.dtype)",
    "F.gumbel_softmax(h)",
]


@pytest.mark.filterwarnings("ignore:.*no batching rule:vgrad.FallbackWarning")
@by_vmap
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("draw", DRAWS)
def test_parts_see_the_numbers_that_the_chunk_drew(draw, randomness, strategy):
    if randomness == "same" and draw in BY_DATA:
        pytest.skip("samples cannot share what depends on them")
    reads = "h = h + 0 if x.sum() > 0 else 0 + h; h = h + 0 if x[0] > x[1] else 0 + h;"
    found = []
    for read in (reads, ""):
        text = f"h = w @ x; h = {draw}; {read} value = (h * v).square().sum()"
        options = {"strategy": strategy, "randomness": randomness}
        compute = vgrad.per_sample_grad(written(text, globals()), **options)
        torch.manual_seed(0)
        found.append(compute(PARAMS, {}, X))
    oracle.assert_exact(*found, 1e-14)
    assert found[0]["w"].any()


@by_vmap
def test_no_number_is_drawn_twice(strategy):
    drawn = []

    def loss(params, buffers, x):
        torch.rand(2)
        if x.sum() > 0:
            torch.rand(3)
        value = torch.rand((), dtype=torch.float64)
        return net(params, x) * value, value

    compute = vgrad.per_sample_grad(
        loss, strategy=strategy, randomness="different", has_aux=True, chunk_size=4
    )
    torch.manual_seed(0)
    for _ in range(2):
        drawn.append(compute(PARAMS, {}, X)[1])
    drawn.append(torch.rand(24, dtype=torch.float64))
    everything = torch.cat(drawn)
    assert len(everything.unique()) == len(everything)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda x, m: x[m[:3]], "shape of the mask"),
        (lambda x, m: x[:, m], "shape of the mask"),
        (lambda x, m: x[m, m, m], "too many indices"),
        (lambda x, m: put(x, m, torch.ones(2).to(x)), "shape mismatch"),
        (lambda x, m: put(x, m, torch.ones(D)), "dtypes match"),
        (lambda x, m: x.masked_select(m), "must match"),
        (lambda x, m: x.repeat_interleave(-m.long(), 0), "can not be negative"),
        (lambda x, m: x.repeat_interleave(m[1:].long(), 0), "same size"),
        (lambda x, m: F.one_hot(-1 - m.long()), "non-negative"),
        (lambda x, m: x.unique(), "not implemented"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:vgrad.FallbackWarning")
def test_what_torch_refuses_is_refused_in_its_words(read, words):
    def loss(params, buffers, x, mask):
        return (read(x * params["w"][0], mask) * params["v"].sum()).sum()

    mask = torch.tensor([True, True, False, True, False]).expand(4, T)
    with pytest.raises((RuntimeError, IndexError), match=words):
        vgrad.per_sample_grad(loss)(TABLE, {}, ROWS[:4], mask)


SHAPED = {  # as functions, which compile can read
    "rows": lambda p, x, m, i: x[m],
    "numbers": lambda p, x, m, i: x[(x > 0) & m[:, None]].sin()[:, None] * p["w"][0],
    "where": lambda p, x, m, i: x[torch.where(m)],
    "written": lambda p, x, m, i: placed(x, m, p["w"], p["v"]) @ p["w"],
    "repeat_interleave": lambda p, x, m, i: torch.repeat_interleave(x, i, dim=0),
    "one_hot": lambda p, x, m, i: F.one_hot(i).to(x).t() @ x,
}


def clipped(loss):
    return vgrad.clipped_grad(loss, max_norm=1.0)


def few_and_many():
    one = tuple(each[[1] * 4] for each in BATCH)
    few = (one[0], one[1] & (torch.arange(T) < 2), one[2].clamp(max=1))
    many = (one[0].abs(), one[1] | True, one[2] + 3)
    return one, one, few, many, one


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["branches", *SHAPED])
def test_a_graph_reads_again_and_gives_way(name):
    if name == "branches":
        loss, params, x = asks_once, PARAMS, X.abs()
        batches, counts = [(x,), (2 * x,), (-x,), (x,)], (3, 1)
    else:
        read, params = SHAPED[name], TABLE
        loss = lambda p, b, *sample: of_rows(p, read(p, *sample))  # noqa: E731
        batches, counts = few_and_many(), (4, 2)
    eager, found = clipped(loss), vgrad.compile(clipped(loss))
    for batch in batches:
        grads, expected = (each(params, {}, *batch).grads for each in (found, eager))
        oracle.assert_exact(grads, expected, 0)
    (report,) = found.reports()
    assert (report.backend, report.calls, report.redos) == ("replay", *counts)


@pytest.mark.compiled
def test_a_graph_of_samples_that_split_is_eager():
    found, expected = vgrad.compile(clipped(asks_once)), clipped(asks_once)
    with pytest.warns(vgrad.CompileWarning, match="samples take different branches at"):
        grads = found(PARAMS, {}, X).grads
    oracle.assert_exact(grads, expected(PARAMS, {}, X).grads, 0)

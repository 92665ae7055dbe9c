"""Losses that read values: one read for all samples, or parts that run apart.

Shapes that depend on values are such reads: samples of one count stay together.
"""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import assert_gradients, assert_quantities, randn, written

EXACT = 1e-12
PARAMS = {"w": randn(3, 4), "v": randn(3, seed=1)}
X = randn(12, 4, seed=2)
BUFFERS = {"b": torch.tensor(1.5, dtype=torch.float64)}
branching = pytest.mark.filterwarnings("ignore:.*different branches")


def net(params, x):
    return (params["w"] @ x).tanh() @ params["v"]


def asks_once(params, buffers, x):
    return net(params, x.sin() if x.sum() > 0 else x * 2).square()


def asks_twice(params, buffers, x):
    h = net(params, x)
    if h > 0:
        h = h * 2 if x[0] > x[1] else h.exp()
    return h.square()


REPEATS = """
h = x
for _ in range(1 + int(x[0].abs() * 3)): h = (w.t() @ (w @ h) / 4).sin()
value = h.square().sum()"""
CATCHES = """
try: positive = bool(x.sum() > 0)
except Exception: positive = True
value = net(p, x) * (2 if positive else 3)"""
BRANCHES = [
    asks_once,
    asks_twice,
    *(
        written("p = {'w': w, 'v': v}\n" + text, globals())
        for text in (
            REPEATS,
            CATCHES,
            "value = net(p, x) * x.sum().item() + float(x[0]) * net(p, x.sin())",
            "chosen = [n for n, each in enumerate(x.tolist()) if each > 0];"
            "value = net(p, x) + sum(w[:, n].sin().sum() * x[n] for n in chosen)",
            "same = torch.equal(x.relu(), x) or torch.allclose(x, x.abs(), atol=0.5);"
            "value = net(p, x) * (2 if same or 0.5 in x.round(decimals=1) else 1)",
            "bad = float(torch.where(x[0] > 0, x[0], torch.nan));"
            "value = net(p, x) * (3 if bad != bad else 1)",
            "zero = float(x[0].sign() * 0);"  # -0.0 for some, which is another number
            "value = net(p, x) * (1 + torch.tensor(zero).signbit())",
            "value = net(p, x) * (2 if v.sum() > 0 else 3) * float(b)",
        )
    ),
]


SIZE, T, D = 12, 5, 4
TABLE = PARAMS | {"table": randn(T, D, seed=6)}
ROWS = randn(SIZE, T, D, seed=2)
MASK = torch.arange(T) < torch.tensor([5, 3, 3, 0, 1, 5, 3, 2, 0, 3, 3, 5])[:, None]
_ORDER = torch.Generator().manual_seed(0)
MASK = torch.stack([row[torch.randperm(T, generator=_ORDER)] for row in MASK])
WORDS = torch.randint(4, (SIZE, T), generator=torch.Generator().manual_seed(3))
BATCH = (ROWS, MASK, WORDS)


def of_rows(params, x):
    """A number for the rows [..., D] that are there, and one if there are none."""
    table = (params["table"] * 0.1).sum()
    return ((x @ params["w"].t()).tanh() @ params["v"]).square().sum() + table


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


def reading(text):
    def loss(params, buffers, x, mask, words):
        scope = {**globals(), **params, "x": x, "m": mask, "i": words}
        return of_rows(params, eval(text, scope))

    return loss


every_strategy = pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
by_vmap = pytest.mark.parametrize("strategy", ["recorded", "vmap"])


@branching
@pytest.mark.parametrize("loss", BRANCHES)
@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_every_quantity_is_that_of_a_loop(loss, strategy, chunk_size):
    options = {"strategy": strategy, "chunk_size": chunk_size, "buffers": BUFFERS}
    assert_quantities(loss, PARAMS, (X,), tolerance=EXACT, **options)


@pytest.mark.filterwarnings("error:.*:vgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("text", READS)
@pytest.mark.parametrize(("strategy", "chunk_size"), [("auto", 5), ("vmap", None)])
def test_shapes_by_value_are_those_of_a_loop(text, strategy, chunk_size):
    loss, options = reading(text), {"strategy": strategy, "chunk_size": chunk_size}
    assert_quantities(loss, TABLE, BATCH, tolerance=EXACT, **options)
    if strategy == "vmap":
        return
    told = vgrad.explain(vgrad.per_sample_norm(loss))(TABLE, {}, *BATCH)
    assert told.strategy == "recorded"
    assert sum(told.parts) == SIZE
    if text in NO_COUNT:
        assert told.parts == (SIZE,)
    if text == "x[m]":
        assert sorted(told.parts) == [1, 1, 2, 3, 5]
        ((line, times),) = told.splits
        assert line == "<string>:1"
        assert times == 1


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

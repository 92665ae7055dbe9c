"""Losses with shapes that depend on values: equal counts together, the others apart."""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import randn

EXACT = 1e-12
SIZE, T, D = 12, 5, 4
PARAMS = {"w": randn(3, D), "v": randn(3, seed=1), "table": randn(T, D, seed=6)}
X = randn(SIZE, T, D, seed=2)
MASK = torch.arange(T) < torch.tensor([5, 3, 3, 0, 1, 5, 3, 2, 0, 3, 3, 5])[:, None]
_ORDER = torch.Generator().manual_seed(0)
MASK = torch.stack([row[torch.randperm(T, generator=_ORDER)] for row in MASK])
WORDS = torch.randint(4, (SIZE, T), generator=torch.Generator().manual_seed(3))
BATCH = (X, MASK, WORDS)


def net(params, x):
    """A number for the rows [..., D] that are there, and one if there are none."""
    table = (params["table"] * 0.1).sum()
    return ((x @ params["w"].t()).tanh() @ params["v"]).square().sum() + table


def written(x, index, value):
    x = x * 1
    x[index] = value
    return x


def placed(params, x, mask):
    h = (x @ params["w"].t()).tanh() * 1
    h[mask] = h[mask] * 2 + params["v"]
    h[mask] += 1
    return h


def in_groups(params, x, words):
    names, group, counts = words.unique(return_inverse=True, return_counts=True)
    h = x @ params["w"].t()
    sums = torch.zeros(len(names), 3, dtype=x.dtype).index_add(0, group, h)
    return (sums / counts[:, None]).tanh() @ params["v"]


def experts(params, x, words):
    h = torch.zeros_like(x)
    for number in range(3):
        (token,) = torch.where(words == number)
        if token.numel():
            h.index_add_(0, token, (x[token] * params["w"][number]).sin())
    return h


READS = {
    "rows": lambda p, x, m, i: x[m],
    "rows of what has a gradient": lambda p, x, m, i: (x @ p["w"].t())[m] @ p["w"],
    "numbers": lambda p, x, m, i: x[(x > 0) & m[:, None]].sin()[:, None] * p["w"][0],
    "a mask and a number": lambda p, x, m, i: x[m, 2][:, None] * p["w"][0],
    "a mask and a slice": lambda p, x, m, i: F.pad(x[m, 1:], (0, 1)),
    "a later axis": lambda p, x, m, i: x.t()[:, m].t(),
    "an ellipsis": lambda p, x, m, i: x.t()[..., m].t(),
    "a new axis": lambda p, x, m, i: x[None, m, None][0, :, 0],
    "a number and a mask": lambda p, x, m, i: x.t()[1, m][:, None] * p["w"][0],
    "an index and a mask": lambda p, x, m, i: (
        x.t()[i[:1], m][:, None] * p["w"][0]
    ),
    "two masks": lambda p, x, m, i: (x @ x.t())[m, m][:, None] * p["w"][0],
    "masks apart": lambda p, x, m, i: (x @ x.t())[:, None][m, :, m] * p["w"][0],
    "bytes": lambda p, x, m, i: x[m.byte()],
    "a flag": lambda p, x, m, i: x[m[0]].flatten(0, 1),
    "integers": lambda p, x, m, i: i[m].to(x.dtype)[:, None] * p["w"][0],
    "a mask that all share": lambda p, x, m, i: x[torch.arange(T) > 1],
    "a parameter": lambda p, x, m, i: p["table"][m],
    "a parameter twice": lambda p, x, m, i: p["table"][m] * x[m] + p["table"][i[m]],
    "what is computed of a parameter": lambda p, x, m, i: p["table"].exp()[m],
    "masked_select": lambda p, x, m, i: (
        x.masked_select(m[:, None])[:, None] * p["w"][0]
    ),
    "masked_select of a row": lambda p, x, m, i: (
        torch.masked_select(x[0], m[:, None])[:, None] * p["w"][0]
    ),
    "nonzero": lambda p, x, m, i: x[m.nonzero()[:, 0]],
    "nonzero of two axes": lambda p, x, m, i: (x > 0).nonzero().to(x) @ p["w"][:2],
    "nonzero as a tuple": lambda p, x, m, i: (
        x[torch.nonzero(x > 0, as_tuple=True)][:, None] * p["w"][0]
    ),
    "nonzero as its method": lambda p, x, m, i: x[m.nonzero(as_tuple=True)],
    "nonzero numbers": lambda p, x, m, i: x[i.nonzero().flatten()],
    "argwhere": lambda p, x, m, i: x[torch.argwhere(m)[:, 0]] + x[m.argwhere()[:, 0]],
    "where": lambda p, x, m, i: x[torch.where(m)],
    "where by name": lambda p, x, m, i: x[torch.where(condition=m)],
    "repeat_interleave": lambda p, x, m, i: torch.repeat_interleave(x, i, dim=0),
    "repeat_interleave as its method": lambda p, x, m, i: (
        (x @ p["w"].t()).repeat_interleave(i, 0) @ p["w"]
    ),
    "repeat_interleave of numbers": lambda p, x, m, i: (
        x[:, 0].repeat_interleave(i)[:, None] * p["w"][0]
    ),
    "repeat_interleave by one number": lambda p, x, m, i: x.repeat_interleave(i[:1], 0),
    "repeat_interleave of a parameter": lambda p, x, m, i: (
        p["table"].repeat_interleave(i, 0)
    ),
    "repeat_interleave of places": lambda p, x, m, i: x[i.repeat_interleave(i)],
    "places repeated": lambda p, x, m, i: x[torch.repeat_interleave(i)],
    "one_hot": lambda p, x, m, i: F.one_hot(i).to(x).t() @ x,
    "a slice": lambda p, x, m, i: x[: i.max()],
    "a slice of a later axis": lambda p, x, m, i: x.t()[:, i[0] : m.sum() : 2].t(),
    "arange": lambda p, x, m, i: x[torch.arange(m.sum()) % i[:3].max().clamp(1)],
    "zeros": lambda p, x, m, i: torch.cat([torch.zeros(i[0], D).to(x), x]),
    "new_full": lambda p, x, m, i: x.new_full((i[0], D), 2) * p["w"][0],
    "views": lambda p, x, m, i: x[1:].reshape(i[0] % 2 + 1, -1, D).flatten(0, 1),
    "split": lambda p, x, m, i: x.split([i[0], T - i[0]])[0],
    "repeat": lambda p, x, m, i: x.repeat(i[1], 1) @ p["w"].t() @ p["w"],
    "written to a slice": lambda p, x, m, i: written(x, slice(i[0]), p["v"][0]),
    "bincount": lambda p, x, m, i: torch.bincount(i).to(x)[:, None] * x[:1],
    "bincount of weights": lambda p, x, m, i: (
        i.bincount(x[:, 0], minlength=2)[:, None] * p["w"][0]
    ),
    "unique": lambda p, x, m, i: in_groups(p, x, i)[:, None] * p["w"][0],
    "unique_consecutive": lambda p, x, m, i: x[i.unique_consecutive()],
    "index_put": lambda p, x, m, i: x.index_put((m,), x[m].sin()),
    "index_put, added": lambda p, x, m, i: torch.index_put(
        x, (m, i[m] % D), x[m, 0], accumulate=True
    ),
    "experts": lambda p, x, m, i: experts(p, x, i),
    "written rows": lambda p, x, m, i: placed(p, x, m) @ p["w"],
    "a written number": lambda p, x, m, i: written(x @ p["w"].t() @ p["w"], m, 0.5),
    "a written parameter": lambda p, x, m, i: written(x, m, p["w"][1]),
    "a written sum": lambda p, x, m, i: written(x, m, (x * p["w"][0]).sum()),
    "a written row of each": lambda p, x, m, i: written(x, m, x[:1] * p["w"][0]),
    "written later": lambda p, x, m, i: written(x.t(), (..., m), x[0, :, None]).t(),
    "written at two axes": lambda p, x, m, i: written(x, x > p["w"][0], p["v"][0]),
    "written in a column": lambda p, x, m, i: written(x, (m, 1), p["v"][0]),
    "written by flag": lambda p, x, m, i: written(x, m[0], p["w"][0]),
    "integers written": lambda p, x, m, i: (
        written(i, m, 2.7).to(x)[:, None] * p["w"][0]
    ),
    "in a gradient of its own": lambda p, x, m, i: torch.func.grad(
        lambda x: x[m].sin().square().sum()
    )(x),
}  # fmt: skip


def loss_of(name):
    def loss(params, buffers, x, mask, words):
        return net(params, READS[name](params, x, mask, words))

    return loss


def plainly(name):
    return oracle.loss_gradients(loss_of(name), PARAMS, {}, BATCH, SIZE)


every_read = pytest.mark.parametrize("name", READS)


@pytest.mark.filterwarnings("error:.*:vgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@every_read
@pytest.mark.parametrize(("strategy", "chunk_size"), [("auto", 5), ("vmap", None)])
def test_every_quantity_is_that_of_a_loop(name, strategy, chunk_size):
    options = {"strategy": strategy, "chunk_size": chunk_size}
    losses.assert_quantities(loss_of(name), PARAMS, BATCH, tolerance=EXACT, **options)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@every_read
def test_it_is_recorded(name):
    told = vgrad.explain(vgrad.per_sample_norm(loss_of(name)))(PARAMS, {}, *BATCH)
    assert told.strategy == "recorded"
    assert sum(told.parts) == SIZE


def test_samples_of_one_count_stay_together():
    told = vgrad.explain(vgrad.per_sample_norm(loss_of("rows")))(PARAMS, {}, *BATCH)
    assert sorted(told.parts) == [1, 1, 2, 3, 5]
    ((line, times),) = told.splits
    assert "test_shapes_by_value.py:" in line
    assert times == 1


@pytest.mark.parametrize("name", ["a written number", "written by flag"])
def test_what_needs_no_count_splits_nothing(name):
    told = vgrad.explain(vgrad.per_sample_norm(loss_of(name)))(PARAMS, {}, *BATCH)
    assert told.parts == (SIZE,)


def test_results_keep_the_order_of_the_samples():
    def loss(params, buffers, x, mask, words):
        rows = x[mask]
        return net(params, rows), {"sum": rows.sum().detach(), "x": x}

    clip = vgrad.clipped_grad(loss, max_norm=0.5, has_aux=True, chunk_size=7)
    found, aux = clip(PARAMS, {}, *BATCH)
    assert torch.equal(aux["x"], X)
    sums = (X * MASK[:, :, None]).sum((1, 2))
    torch.testing.assert_close(aux["sum"], sums, rtol=1e-12, atol=1e-14)
    expected = plainly("rows")
    oracle.assert_exact({"": found.norms}, {"": oracle.norms(expected)}, EXACT)
    oracle.assert_exact(found.grads, oracle.clipped(expected, 0.5), EXACT)


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_parts_see_the_numbers_that_the_chunk_drew(strategy):
    def drawn(params, buffers, x, mask, words):
        h = F.dropout(x @ params["w"].t(), 0.5)
        kept = torch.rand(T) < 0.5
        return (h[kept | mask] * params["v"]).square().sum(), (h != 0, kept)

    def known(params, buffers, x, mask, drops, kept):
        h = (x @ params["w"].t()) * drops * 2
        return (h[kept | mask] * params["v"]).square().sum()

    options = {"strategy": strategy, "randomness": "different", "has_aux": True}
    torch.manual_seed(0)
    found, aux = vgrad.per_sample_grad(drawn, **options)(PARAMS, {}, *BATCH)
    assert len({tuple(row.tolist()) for row in aux[1]}) > 6
    batch = (X, MASK, *aux)
    expected = oracle.loss_gradients(known, PARAMS, {}, batch, SIZE)
    oracle.assert_exact(found, expected, EXACT)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda x, m: x[m[:3]], "shape of the mask"),
        (lambda x, m: x[:, m], "shape of the mask"),
        (lambda x, m: x[m, m, m], "too many indices"),
        (lambda x, m: written(x, m, torch.ones(2).to(x)), "shape mismatch"),
        (lambda x, m: written(x, m, torch.ones(D)), "dtypes match"),
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
        vgrad.per_sample_grad(loss)(PARAMS, {}, X[:4], mask)


def test_inside_of_a_vmap_of_its_own_it_is_refused():
    def loss(params, buffers, x):
        return torch.vmap(lambda row: row[row > 0].sum())(x @ params["w"].t()).sum()

    for strategy in ("recorded", "vmap"):
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        with pytest.raises(vgrad.UnsupportedOp, match="outside of a vmap of its own"):
            compute(PARAMS, {}, X)


def test_a_transform_inside_of_a_transform_asks_in_turn():
    def inner(params, buffers, row, mask):
        return (row * params["v"][0])[mask].sin().sum()

    def loss(params, buffers, x):
        x = x * params["w"][0]
        norms = vgrad.per_sample_norm(inner, strategy="vmap")
        return norms(params, buffers, x, x.detach() > 0).sum()

    expected = oracle.loss_gradients(loss, PARAMS, {}, (X,), SIZE)
    found = vgrad.per_sample_grad(loss, strategy="vmap")(PARAMS, {}, X)
    oracle.assert_exact(found, expected, EXACT)


def test_a_warning_names_the_line_where_parts_are_small():
    def loss(params, buffers, x):
        return net(params, x[x > -0.5][:, None] * params["w"][0])

    x = randn(16, 40, D)
    text = r"samples take different branches at .*test_shapes_by_value.py:\d+; 16 of"
    with pytest.warns(vgrad.FallbackWarning, match=text):
        found = vgrad.per_sample_grad(loss)(PARAMS, {}, x)
    expected = oracle.loss_gradients(loss, PARAMS, {}, (x,), 16)
    oracle.assert_exact(found, expected, EXACT)


SHAPED = ["rows", "numbers", "written rows", "where", "repeat_interleave", "one_hot"]


@pytest.mark.compiled
@pytest.mark.parametrize("name", SHAPED)
def test_a_graph_asks_again_and_gives_way(name):
    eager = vgrad.clipped_grad(loss_of(name), max_norm=1.0)
    found = vgrad.compile(vgrad.clipped_grad(loss_of(name), max_norm=1.0))
    one = tuple(each[[1] * 4] for each in BATCH)
    few = (one[0], one[1] & (torch.arange(T) < 2), one[2].clamp(max=1))
    many = (one[0].abs(), one[1] | True, one[2] + 3)
    for batch in (one, one, few, many, one):
        oracle.assert_exact(
            found(PARAMS, {}, *batch).grads, eager(PARAMS, {}, *batch).grads, 0
        )
    (report,) = found.reports()
    assert (report.backend, report.calls, report.redos) == ("replay", 4, 2)

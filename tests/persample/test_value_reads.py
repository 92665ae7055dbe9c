"""Losses that read values: one read for all samples, or parts that run apart.

Shapes that depend on values are such reads: samples of one count stay together.
"""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import assert_gradients, randn
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
    "read",
    [
        lambda h, y: (h.softmax(0) - F.one_hot(y[0], 3)).square().sum(),
        lambda h, y: (h.softmax(0) * F.one_hot(y, 3).sum(0)).square().sum(),
        lambda h, y: (h * torch.bincount(y, minlength=3)).square().sum(),
        lambda h, y: F.gaussian_nll_loss(h, y[:3].to(h), h.exp()),
    ],
)
def test_labels_are_read_inside_of_transforms(read):
    def loss(params, buffers, x, y):
        return read(x @ params["w"].t(), y)

    def plain(params):
        runs = [
            torch.func.grad(loss)(params, {}, *one)["w"]
            for one in zip(X, y, strict=True)
        ]
        return torch.stack(runs).flatten(1).norm(dim=1).sum()

    y = torch.arange(48).view(12, 4) * 5 % 7 % 3
    norms = vgrad.per_sample_norm(loss)
    found = vgrad.grad(lambda params: norms(params, {}, X, y).sum())(PARAMS)
    params = {"w": PARAMS["w"].clone().requires_grad_()}
    plain(params).backward()
    oracle.assert_exact(found["w"], params["w"].grad, 1e-10)


def test_a_call_that_takes_tensors_alone_is_refused_by_name():
    def loss(params, buffers, x, y):
        return (x @ params["w"].t() - F.one_hot(y, y + 1).sum()).square().sum()

    compute = vgrad.per_sample_grad(loss, strategy="vmap")
    with pytest.raises(vgrad.UnsupportedOp, match="one_hot: expected ops that vmap"):
        compute(PARAMS, {}, X, torch.full((12,), 2))


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
        (lambda x, m: F.one_hot(m.long() + 4, 5), "smaller than num_classes"),
        (lambda x, m: F.gaussian_nll_loss(x, x, -x.exp()), "negative entry"),
        (lambda x, m: x.unique(), "not implemented"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:vgrad.FallbackWarning")
def test_what_torch_refuses_is_refused_in_its_words(read, words):
    def loss(params, buffers, x, mask):
        return (read(x * params["w"][0], mask) * params["v"].sum()).sum()

    mask = torch.tensor([True, True, False, True, False]).expand(4, T)
    with pytest.raises((RuntimeError, IndexError, ValueError), match=words):
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
        batches = [(x,), (2 * x,), (-x,), (x,)]
    else:
        read, params = SHAPED[name], TABLE
        loss = lambda p, b, *sample: of_rows(p, read(p, *sample))  # noqa: E731
        batches = few_and_many()
    eager, found = clipped(loss), vgrad.compile(clipped(loss))
    for batch in batches:
        grads, expected = (each(params, {}, *batch).grads for each in (found, eager))
        oracle.assert_exact(grads, expected)
    first, *groups = found.reports()
    assert first.backend == "replay"
    assert first.redos == (1 if name == "branches" else 2)  # few rows, and many
    assert not any(each.redos for each in groups)

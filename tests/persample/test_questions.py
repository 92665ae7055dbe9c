"""Losses that ask for values: one answer of all samples, or parts that run apart."""

import threading

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import randn

EXACT = 1e-12
PARAMS = {"w": randn(3, 4), "v": randn(3, seed=1)}
X = randn(12, 4, seed=2)


def net(params, x):
    return (params["w"] @ x).tanh() @ params["v"]


def asks_once(params, buffers, x):
    return net(params, x.sin() if x.sum() > 0 else x * 2).square()


def asks_twice(params, buffers, x):
    h = net(params, x)
    if h > 0:
        h = h * 2 if x[0] > x[1] else h.exp()
    return h.square()


def repeats(params, buffers, x):
    h = x
    for _ in range(1 + int(x[0].abs() * 3)):
        h = (params["w"].t() @ (params["w"] @ h) / 4).sin()
    return h.square().sum()


def weighs(params, buffers, x):
    return net(params, x) * x.sum().item() + float(x[0]) * net(params, x.sin())


def by_lists(params, buffers, x):
    chosen = [n for n, each in enumerate(x.tolist()) if each > 0]
    return net(params, x) + sum(params["w"][:, n].sin().sum() * x[n] for n in chosen)


def compares(params, buffers, x):
    same = torch.equal(x.relu(), x) or torch.allclose(x, x.abs(), atol=0.5)
    return net(params, x) * (2 if same or 0.5 in x.round(decimals=1) else 1)


def of_nan(params, buffers, x):
    bad = float(torch.where(x[0] > 0, x[0], torch.nan))
    return net(params, x) * (3 if bad != bad else 1)


def of_zeros(params, buffers, x):
    zero = float(x[0].sign() * 0)  # -0.0 for some, which is another number
    return net(params, x) * (1 + torch.tensor(zero).signbit())


def shared(params, buffers, x):
    return net(params, x) * (2 if params["v"].sum() > 0 else 3) * float(buffers["b"])


def catches(params, buffers, x):
    try:
        positive = bool(x.sum() > 0)
    except Exception:
        positive = True
    return net(params, x) * (2 if positive else 3)


LOSSES = {
    each.__name__: each
    for each in [
        *(asks_once, asks_twice, repeats, weighs, by_lists, compares, of_nan),
        *(of_zeros, shared, catches),
    ]
}
BUFFERS = {"b": torch.tensor(1.5, dtype=torch.float64)}
every_loss = pytest.mark.parametrize("name", LOSSES)
every_strategy = pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])


@pytest.mark.filterwarnings("ignore:.*different branches:vgrad.FallbackWarning")
@every_loss
@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_every_quantity_is_that_of_a_loop(name, strategy, chunk_size):
    options = {"strategy": strategy, "chunk_size": chunk_size, "buffers": BUFFERS}
    losses.assert_quantities(LOSSES[name], PARAMS, (X,), tolerance=EXACT, **options)


def grads_of(loss, x=X):
    return oracle.loss_gradients(loss, PARAMS, BUFFERS, (x,), len(x))


@every_strategy
def test_results_of_samples_keep_their_order(strategy):
    def loss(params, buffers, x):
        value = asks_twice(params, buffers, x)
        return value, {"x": x, "value": value.detach()}

    values = torch.stack([asks_twice(PARAMS, {}, x) for x in X])
    options = {"strategy": strategy, "has_aux": True}
    clip = vgrad.clipped_grad(loss, max_norm=0.5, chunk_size=5, **options)
    found, aux = clip(PARAMS, BUFFERS, X)
    assert torch.equal(aux["x"], X)
    torch.testing.assert_close(aux["value"], values, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.losses, values, rtol=1e-12, atol=0)
    expected = grads_of(asks_twice)
    oracle.assert_exact({"": found.norms}, {"": oracle.norms(expected)}, EXACT)
    oracle.assert_exact(found.grads, oracle.clipped(expected, 0.5), EXACT)
    mask = torch.arange(len(X)) % 3 > 0
    found, aux = clip(PARAMS, BUFFERS, X, mask=mask)
    assert torch.equal(aux["x"], X[mask])
    kept = {name: grad[mask] for name, grad in expected.items()}
    oracle.assert_exact(found.grads, oracle.clipped(kept, 0.5), EXACT)


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_rows_and_columns_of_inner_products_keep_their_order(strategy, chunk_size):
    other = randn(7, 4, seed=5)
    rows, columns = (
        torch.cat([g.flatten(1) for g in grads_of(asks_once, x).values()], 1)
        for x in (X, other)
    )
    compute = vgrad.per_sample_gram(asks_once, strategy=strategy, chunk_size=chunk_size)
    for found, expected in (
        (compute(PARAMS, {}, X), rows @ rows.T),
        (compute(PARAMS, {}, X, cross=(other,)), rows @ columns.T),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_weights_go_with_their_samples():
    weights = randn(12, seed=7)
    found = vgrad.weighted_grad(asks_twice, chunk_size=5)(weights, PARAMS, {}, X)
    expected = oracle.weighted(grads_of(asks_twice), weights)
    oracle.assert_exact(found, expected, EXACT)


def test_one_sample_and_none():
    compute = vgrad.per_sample_grad(asks_twice, strategy="recorded")
    oracle.assert_exact(compute(PARAMS, {}, X[:1]), grads_of(asks_twice, X[:1]), EXACT)
    assert compute(PARAMS, {}, X[:0])["w"].shape == (0, 3, 4)


def test_a_question_inside_of_a_vmap_of_its_own_is_refused():
    def loss(params, buffers, x):
        return (
            torch.vmap(lambda row: row * 2 if row > 0 else row)(x).sum()
            * params["v"][0]
        )

    for strategy in ("recorded", "vmap"):
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        with pytest.raises(vgrad.UnsupportedOp, match="outside of a vmap of its own"):
            compute(PARAMS, {}, X)


def test_a_warning_names_the_line_where_parts_are_small():
    def loss(params, buffers, x):
        return net(params, x) * x[0].item()

    x = randn(16, 4)
    compute = vgrad.per_sample_grad(loss)
    text = r"^per_sample_grad: samples take different branches at .*test_questions.py:"
    with pytest.warns(vgrad.FallbackWarning, match=text + r"\d+; 16 of them run in 16"):
        found = compute(PARAMS, {}, x)
    oracle.assert_exact(found, grads_of(loss, x), EXACT)
    compute(PARAMS, {}, x)  # without a second warning
    vgrad.per_sample_grad(loss)(PARAMS, {}, x[:15])  # nor for so few


def test_threads_split_apart():
    compute = vgrad.per_sample_grad(asks_twice)
    expected, found = grads_of(asks_twice), {}

    def run(number):
        found[number] = compute(PARAMS, {}, X)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number in range(4):
        oracle.assert_exact(found[number], expected, EXACT)


DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "dropout in place": lambda h: F.dropout(h * 1, 0.5, inplace=True),
    "dropout of features": lambda h: F.dropout1d(h[None, :, None], 0.5).flatten(),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h[None], 0.5, True)[0],
    "rand": lambda h: h * torch.rand(3, dtype=h.dtype),
    "randn": lambda h: h + torch.randn(3, dtype=h.dtype),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h + torch.randn_like(h),
    "randint": lambda h: h * torch.randint(3, (3,)),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli_": lambda h: h * (0.5 + torch.empty_like(h).bernoulli_(0.3)),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(-1, 2),
    "normal_": lambda h: h * torch.empty_like(h).normal_(),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(),
    "normal": lambda h: h * torch.normal(h.detach(), 1.0),
    "another order in memory": lambda h: (
        h.outer(h).t() * torch.rand_like(h.outer(h).t())
    ).sum(0),
    "a scalar": lambda h: h * torch.rand((), dtype=h.dtype),
    "gumbel softmax": lambda h: F.gumbel_softmax(h),
}


def drawing(draw, asks):
    """Draw before a question and, as often, after it."""

    def loss(params, buffers, x):
        h = draw(params["w"] @ x)
        if asks:
            h = h + 0 if x.sum() > 0 else 0 + h
            h = h + 0 if x[0] > x[1] else 0 + h
        return (h * params["v"]).square().sum()

    return loss


@pytest.mark.filterwarnings("ignore:.*no batching rule:vgrad.FallbackWarning")
@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("name", DRAWS)
def test_parts_see_the_numbers_that_the_chunk_drew(name, randomness, strategy):
    if randomness == "same" and name in ("bernoulli", "normal"):
        pytest.skip("what is drawn depends on the sample")
    found = []
    for asks in (True, False):
        loss = drawing(DRAWS[name], asks)
        options = {"strategy": strategy, "randomness": randomness}
        torch.manual_seed(0)
        found.append(vgrad.per_sample_grad(loss, **options)(PARAMS, {}, X))
    oracle.assert_exact(*found, 1e-14)
    assert found[0]["w"].any()


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
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


def test_samples_drop_layers_of_their_own():
    def loss(params, buffers, x):
        h, used = x, []
        for _ in range(4):
            kept = torch.rand((), dtype=torch.float64)
            used.append(kept)
            if kept > 0.5:
                h = h + (params["w"].t() @ (params["w"] @ h)).tanh()
        return h.square().sum(), torch.stack(used)

    torch.manual_seed(0)
    compute = vgrad.per_sample_grad(
        loss, strategy="recorded", randomness="different", has_aux=True
    )
    found, used = compute(PARAMS, {}, X)

    def known(params, buffers, x, used):
        h = x
        for kept in used:
            if kept > 0.5:
                h = h + (params["w"].t() @ (params["w"] @ h)).tanh()
        return h.square().sum()

    params = {"w": PARAMS["w"]}
    expected = oracle.loss_gradients(known, params, {}, (X, used), len(X))
    oracle.assert_exact({"w": found["w"]}, expected, EXACT)
    assert len({tuple(row.tolist()) for row in used > 0.5}) > 4


@pytest.mark.compiled
def test_a_graph_asks_again_and_gives_way():
    positive = X.abs()
    eager = vgrad.clipped_grad(asks_once, max_norm=1.0)
    found = vgrad.compile(vgrad.clipped_grad(asks_once, max_norm=1.0))
    for x in (positive, positive * 2, -positive, positive):
        oracle.assert_exact(found(PARAMS, {}, x).grads, eager(PARAMS, {}, x).grads, 0)
    (report,) = found.reports()
    assert (report.backend, report.calls, report.redos) == ("replay", 3, 1)
    split = vgrad.compile(vgrad.clipped_grad(asks_once, max_norm=1.0))
    with pytest.warns(vgrad.CompileWarning, match="samples take different branches at"):
        oracle.assert_exact(split(PARAMS, {}, X).grads, eager(PARAMS, {}, X).grads, 0)


def test_auto_does_not_hide_what_plain_autograd_refuses():
    def wrong(params, buffers, x):
        return (params["w"] @ x[:2]).sum()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|size"):
        vgrad.per_sample_grad(wrong)(PARAMS, {}, X)

    def writes(params, buffers, x):
        params["w"].data.mul_(1)
        buffers["b"].add_(1)
        return net(params, x)

    with pytest.raises((RuntimeError, ValueError), match="changes nothing it is given"):
        vgrad.per_sample_grad(writes)(PARAMS, {"b": torch.zeros(())}, X)

    def draws(params, buffers, x):
        return net(params, x) * torch.rand(())

    with pytest.raises(RuntimeError, match='randomness="error"'):
        vgrad.per_sample_grad(draws)(PARAMS, {}, X)

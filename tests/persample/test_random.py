"""Random numbers of a loss: shared, of each sample, and from keys of samples."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses, oracle
from tests.losses import STRATEGIES
from vgrad.generators import sample_keys
from vgrad.persample.engine import FallbackWarning, UnsupportedOp

B = 6
X = torch.rand(B, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.1
KEYS = sample_keys(11, 3, B)


SHARED = [
    "F.dropout(x, 0.5)",
    "F.dropout(x.clone(), 0.3, inplace=True)",
    "F.dropout(F.dropout(F.dropout(x, 0.0), 1.0) + x, 0.5)",
    "F.dropout(x.T, 0.5).T",
    "F.dropout(x.flatten()[:7], 0.5).sum() + x",  # an odd size
    "F.dropout(x, 0.5) + F.dropout(x[:0], 0.5).sum()",
    "x + F.dropout(x.sum(), 0.5)",
    "x + F.dropout(torch.ones(5), 0.5)",
    "F.dropout1d(x, 0.5)",
    "F.dropout2d(x[None, None], 0.5)[0, 0]",
    "F.dropout3d(x.view(2, 2, 5, 1)).view(4, 5)",
    "F.alpha_dropout(x, 0.5, training=True)",
    "F.feature_alpha_dropout(x, 0.5, training=True)",
    "torch.native_dropout(x, 0.5, True)[0]",
    "F.dropout(torch.native_dropout(x, 0.5, False)[0])",
    "x.clone().bernoulli_(0.3)",
    "x.clone().bernoulli_(torch.full((5,), 0.4))",
    "torch.rand(4, 5) + x",
    "torch.rand(4, 5, dtype=torch.bfloat16) + x",
    "torch.rand_like(x)",
    "x.clone().uniform_(-1.0, 3.0)",
    "torch.randn(4, 5) + x",
    "torch.randn(4, 5, dtype=torch.complex64).abs() + x",
    "torch.randn_like(x) * torch.randn_like(x[0])",
    "x.clone().normal_(1.0, 2.0)",
    "torch.normal(0.0, 1.0, (4, 5)) + x",
    "torch.randint(0, 9, (4, 5)) + x",
    "torch.randint_like(x, 9)",
    "x.clone().random_(0, 9)",
    "x.clone().exponential_()",
    "x.clone().cauchy_()",
    "x.clone().log_normal_()",
    "x.clone().geometric_(0.3)",
    "torch.multinomial(torch.ones(5), 3).sum() + x",
    "F.gumbel_softmax(x)",
    "F.gumbel_softmax(x, hard=True)",
    "F.fractional_max_pool2d(x[None], 2, (2, 2)).sum()",
    "torch.vmap(F.dropout, randomness='different')(x)",
    "torch.vmap(F.dropout, randomness='same')(x)",
    "torch.vmap(by_column, 1, 1, randomness='different')(x)",
    "F.dropout(x) * (2 if torch.rand(()) < 0.5 else torch.rand(4, 5))",
    "F.dropout(x[x > 0.6].sum() * x)",
    "(y := x.clone(), y[:, 1:3].normal_(), y[1:].cauchy_(), y)[3]",
    "(torch.manual_seed(0), torch.randn(4, 5) + x)[1]",  # a seed of its own
    "x + torch.zeros_like(x, dtype=torch.int).random_(0, 7)",
    CHECKPOINT := "F.dropout(checkpoint(two, F.dropout(x), use_reentrant=False))",
]
BY_DATA = [  # no numbers that samples can share
    "torch.bernoulli(x.clamp(0, 1))",
    "torch.bernoulli(x.detach(), 0.3)",
    "(y := x.clamp(0, 1)).bernoulli_(y)",
    "torch.normal(x, 1.0)",
    "torch.normal(1.0, x)",
    "torch.normal(x, x)",
    "torch.normal(torch.arange(5.0), x)",
    "torch.normal(x[:, :1].expand(4, 5), x)",
    "torch.poisson(x * 5)",
    "torch.binomial((x.detach() * 9).round(), x.detach().clamp(0, 1))",
    "torch._standard_gamma(x)",
    "torch._sample_dirichlet(x.detach())",
    "torch.multinomial(x, 3).sum() + x",
    "torch.multinomial(x, 9, True).sum(1)[:, None] + x",
    "torch.multinomial(x[0], 3).sum() + x",
    "torch.distributions.Categorical(x).sample()[:, None] + x",
    "torch.poisson(torch.ones(2, 3, 4, 5).mT * x.T).sum() * x",
]
OPS = SHARED + BY_DATA
ATTENTION = [
    "F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)",
    "F.multi_head_attention_forward(*[x[:, None]] * 3, 5, 1, torch.ones(15, 5) / 9, "
    "*[None] * 3, False, 0.5, torch.eye(5), None)[0][:, 0]",
]
ALONE = [
    "x[torch.randperm(4)]",
    "F.rrelu(x - 0.5, training=True)",
    "F.rrelu(x - 0.5, training=True, inplace=True)",
    "torch.rand(4, 5, out=torch.empty(4, 5)) + x",
    "torch.bernoulli(x.detach().clamp(0, 1), out=torch.empty(4, 5))",
    "torch.normal(x.detach(), 1.0, out=torch.empty(4, 5))",
    "torch.empty(4, 5).uniform_() + x",
    "torch.distributions.Normal(x, 1.0).rsample()",
    "losses.Dropping.apply(x)",
    "losses.Unruled.apply(x)",
]
"""Ops that run one sample after another, whatever the strategy, or not at all."""


def by_column(r):
    return F.dropout(r) * torch.rand(4) + torch.poisson(torch.ones(4))


def two(x):
    return F.dropout(F.dropout(x.sin()).exp())


OF_WEIGHTS = ["x * F.dropout(w, 0.5)", "x * (w + torch.randn_like(w))"]


def of(text, branches=0):
    """Make a loss whose gradient shows what an op drew, and what one after it did."""

    def loss(params, buffers, x):
        first = eval(text, globals() | params | {"x": x * params["b"]})
        for row in range(branches):
            first = first + 0 if x[row].sum() > x[row + 1].sum() else 0 + first
        return (first * params["w"]).sum() + (F.dropout(x) * params["v"]).sum()

    ones = {"w": torch.ones(4, 5), "v": torch.ones(4, 5), "b": torch.tensor(1.0)}
    return loss, ones, {}, (X,)


def recurrent(kind, **options):
    torch.manual_seed(3)
    net = kind(5, 3, num_layers=3, dropout=0.5, **options)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net)

    def loss(params, buffers, x):
        return fmodel(params, buffers, x)[0].square().sum()

    return loss, params, buffers, (X,)


def packed():
    torch.manual_seed(3)
    net = nn.GRU(5, 3, num_layers=2, dropout=0.5, batch_first=True)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net)

    def loss(params, buffers, x, lengths):
        pair = torch.stack([x, x * 2])
        rows = pack_padded_sequence(pair, lengths, batch_first=True)
        found, _ = fmodel(params, buffers, rows)
        return pad_packed_sequence(found, batch_first=True)[0].square().sum()

    lengths = torch.tensor([[4, 2], [3, 3], [4, 2], [4, 4], [3, 1], [4, 2]])
    return loss, params, buffers, (X, lengths)


def transformer():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True)
    model = nn.Sequential(nn.Linear(5, 4), nn.TransformerEncoder(layer, 2))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)

    def loss(params, buffers, x):
        return fmodel(params, buffers, x[None]).square().sum()

    return loss, params, buffers, (X,)


CASES = {text: partial(of, text) for text in OPS + ATTENTION + ALONE}
NETS = {
    "LSTM": partial(recurrent, nn.LSTM),
    "GRU, both ways": partial(recurrent, nn.GRU, bidirectional=True, batch_first=True),
    "LSTM with projections": partial(recurrent, nn.LSTM, proj_size=2),
    "packed": packed,
    "transformer": transformer,
}
CASES |= NETS
CLOSE = {*ATTENTION, *NETS}
"""What other kernels round in another way; a number drawn otherwise is far off."""


def same(found, expected, name):
    for key, value in expected.items():
        if name in CLOSE:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(found[key], value), (name, key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_sample_draws_the_same_in_every_part_and_strategy(name):
    loss, params, buffers, batch = CASES[name]()

    def grads(rows=slice(None), keys=KEYS, **options):
        grad = vgrad.per_sample_grad(loss, randomness="different", **options)
        return grad.keyed(keys[rows])(params, buffers, *(each[rows] for each in batch))

    state = torch.get_rng_state()
    whole = grads()
    assert torch.equal(torch.get_rng_state(), state)
    parts = [grads(slice(*each)) for each in ((0, 1), (1, 4), (4, 6))]
    same({key: torch.cat([each[key] for each in parts]) for key in whole}, whole, name)
    same(grads(chunk_size=2), whole, name)
    same(grads(strategy="loop"), whole, name)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    same(grads(order), {key: value[order] for key, value in whole.items()}, name)
    for strategy in ("recorded", "vmap"):
        try:
            found = grads(strategy=strategy)
        except (UnsupportedOp, RuntimeError):
            repeated = name == CHECKPOINT and strategy == "vmap"
            assert repeated or name in ALONE, strategy
        else:
            same(found, whole, name)
    assert torch.equal(torch.get_rng_state(), state)
    others = grads(keys=KEYS + 1)
    assert any(not torch.allclose(others[key], whole[key]) for key in whole)
    shown = next(iter(whole.values()))
    assert len({repr(row.tolist()) for row in shown}) == B or " if " in name


def drawn_by(text, x=X, branches=0, **options):
    loss, params, _, _ = of(text, branches)
    torch.manual_seed(5)
    return vgrad.per_sample_grad(loss, **options)(params, {}, x)["w"]


LAYOUT = "F.dropout(x.T, 0.5).T"  # by memory, where samples lie side by side


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "chunk_size"), [("recorded", None), ("recorded", 4), ("vmap", 4)]
)
@pytest.mark.parametrize("text", [*OPS, *ATTENTION, *OF_WEIGHTS])
def test_all_strategies_draw_the_same_shared_numbers(text, strategy, chunk_size):
    options = {"randomness": "same", "chunk_size": chunk_size}
    again = (text, strategy) == (CHECKPOINT, "vmap")
    if text in BY_DATA or again:
        message = "activation" if again else "numbers that all samples can share"
        with pytest.raises(UnsupportedOp, match=message):
            drawn_by(text, strategy=strategy, **options)
        return
    found = drawn_by(text, strategy=strategy, **options)
    expected = drawn_by(text, strategy="loop", **options)
    assert text == LAYOUT or oracle.error(found, expected) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("text", [*OPS, *ATTENTION, *OF_WEIGHTS])
def test_random_numbers_are_refused_or_differ_between_equal_samples(text, strategy):
    x = X[:1].expand(B, -1, -1)
    with pytest.raises(RuntimeError, match='randomness="different"'):
        drawn_by(text, x, strategy=strategy, randomness="error")
    options = {"strategy": strategy, "randomness": "different"}
    again = (text, strategy) == (CHECKPOINT, "vmap")
    if again or (strategy == "recorded" and text == OF_WEIGHTS[0]):
        own = "expected values computed from w alone to be the same"
        with pytest.raises(UnsupportedOp, match="activation" if again else own):
            drawn_by(text, x, **options)
        return
    found = drawn_by(text, x, **options)
    alike = text.startswith(("F.fractional", "(torch.manual_seed"))
    assert alike or len(found.flatten(1).unique(dim=0)) > 1
    assert torch.equal(found, drawn_by(text, x, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "randomness"),
    [("recorded", "different"), ("recorded", "same"), ("vmap", "different")],
)
@pytest.mark.parametrize("text", [*OPS, *ATTENTION])
def test_parts_see_the_same_numbers(text, randomness, strategy):
    split = text == CHECKPOINT or "x[x > 0.6]" in text  # before numbers are drawn
    if split or (randomness == "same" and text in BY_DATA):
        pytest.skip("drawn anew, or refused")
    options = {"strategy": strategy, "randomness": randomness}
    found = drawn_by(text, branches=2, **options)
    if randomness == "same":
        expected = drawn_by(text, **options)
    else:  # by keys, from a number of torch's generator
        torch.manual_seed(5)
        keys = sample_keys(int(torch.randint(2**62, ())), 0, B)
        loss, params, _, _ = of(text, 0)
        compute = vgrad.per_sample_grad(loss, randomness="different", strategy="loop")
        expected = compute.keyed(keys)(params, {}, X)["w"]
    oracle.assert_exact(found, expected, 1e-5)


def keyed_grad(loss, params, x, keys=KEYS, **options):
    options = {"randomness": "different", **options}
    return vgrad.per_sample_grad(loss, **options).keyed(keys)(params, {}, x)["w"]


def drawn(op, keys):
    params, x = {"w": torch.ones(200, 50)}, torch.ones(len(keys), 200, 50)
    return keyed_grad(lambda p, b, x: (op(x) * p["w"]).sum(), params, x, keys)


@pytest.mark.parametrize(
    ("op", "mean", "deviation"),
    [
        (lambda x: F.dropout(x, 0.3), 1, (0.3 / 0.7) ** 0.5),
        (lambda x: torch.native_dropout(x, 0.3, True)[0], 1, (0.3 / 0.7) ** 0.5),
        (lambda x: torch.bernoulli(x * 0.7), 0.7, 0.21**0.5),
        (torch.rand_like, 0.5, 12**-0.5),
        (torch.randn_like, 0, 1),
        (lambda x: torch.normal(x * 3, 2.0), 3, 2),
        (lambda x: x.clone().exponential_(), 1, 1),
        (lambda x: x.clone().random_(0, 3), 1, (2 / 3) ** 0.5),
    ],
)
def test_what_is_drawn_has_its_distribution_and_is_independent(op, mean, deviation):
    keys = sample_keys(5, 0, 8)
    second = drawn(lambda x: (op(x), op(x))[1], keys)
    found = (torch.stack([drawn(op, keys), second]) - mean) / deviation
    rows = found.flatten(2).double()  # places, samples, numbers
    count = rows.shape[-1]
    assert rows.mean(-1).abs().max() < 5 * count**-0.5
    assert (rows.square().mean(-1) - 1).abs().max() < 15 * count**-0.5
    every = rows.flatten(0, 1)
    between = every @ every.T / count - torch.eye(len(every))
    between.fill_diagonal_(0)
    assert between.abs().max() < 5 * count**-0.5
    for lag in (1, 2, 50):
        follows = (every[:, lag:] * every[:, :-lag]).mean(-1)
        assert follows.abs().max() < 5 * count**-0.5


def test_uniform_numbers_fill_their_interval():
    found = drawn(torch.rand_like, sample_keys(1, 0, 20)).flatten()
    counts = torch.histc(found, 100, 0, 1)
    chi = ((counts - 2000).square() / 2000).sum()
    assert 55 < chi < 155
    assert found.min() >= 0
    assert found.max() < 1
    half = drawn(lambda x: torch.rand_like(x, dtype=torch.half), sample_keys(1, 0, 20))
    assert half.max() < 1


def test_normal_numbers_have_the_tails_of_a_normal_distribution():
    found = drawn(torch.randn_like, sample_keys(2, 0, 20)).flatten()
    for bound, share in ((1, 0.31731), (2, 0.0455), (3, 0.0027)):
        room = 5 * (share / len(found)) ** 0.5
        assert abs((found.abs() > bound).double().mean() - share) < room


def weighted(op):
    return lambda p, b, x: (op(x) * p["w"]).sum()


W, ONES = {"w": torch.ones(3)}, torch.ones(2, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap", "loop"])
def test_a_generator_of_the_loss_is_refused(strategy):
    own = torch.Generator()
    loss = weighted(lambda x: torch.rand(3, generator=own) * x)
    with pytest.raises(RuntimeError, match="torch.Generator of the loss's own in rand"):
        keyed_grad(loss, W, ONES, KEYS[:2], strategy=strategy)


@pytest.mark.parametrize("kept", [None, torch.zeros(8, dtype=torch.uint8)])
def test_dropout_that_cudnn_draws_by_itself_is_refused(kept):
    weights, h = [torch.ones(8, 3), torch.ones(8, 2)], torch.zeros(1, 1, 2)

    def loss(p, b, x):  # as torch.lstm calls it on a GPU
        options = (2, 2, 0, 1, False, 0.5, True, False, [], kept)
        net = torch.ops.aten._cudnn_rnn
        return net(x[:, None] * p["w"], weights, 2, None, h, h, *options)[0].sum()

    own = "draws that cuDNN keeps to itself in _cudnn_rnn. Give the net dropout=0"
    # Without such a state it is torch that refuses, on a CPU.
    with pytest.raises(RuntimeError, match="Could not run" if kept is None else own):
        keyed_grad(loss, W, torch.ones(2, 4, 3), KEYS[:2], strategy="loop")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_random_numbers_of_a_backward_pass_are_refused(strategy):
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="some that a backward pass"):
            keyed_grad(
                lambda p, b, x: losses.Noisy.apply(x * p["w"]).sum(),
                *(W, ONES, KEYS[:2]),
                strategy=strategy,
            )
    assert torch.equal(torch.get_rng_state(), state)


def test_keys_that_fit_no_batch_are_refused():
    loss, params, _, (x,) = of("F.dropout(x)")
    for keys in (KEYS[:5], KEYS.int(), KEYS[None]):
        with pytest.raises(ValueError, match=r"per_sample_grad\(keys\): expected one"):
            keyed_grad(loss, params, x, keys)
    with pytest.raises(ValueError, match="outside of transforms"):
        torch.vmap(lambda x: keyed_grad(loss, params, x), randomness="different")(
            X[None]
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [*SHARED, *ATTENTION])
def test_all_samples_share_the_numbers_of_the_first_key(text):
    loss, params, _, (x,) = of(text)
    x, options = x[:1].expand(B, -1, -1), {"randomness": "same"}
    torch.manual_seed(0)
    expected = keyed_grad(loss, params, x, strategy="loop", **options)
    torch.manual_seed(1)  # on which nothing depends
    assert len(expected.flatten(1).unique(dim=0)) == 1
    assert text in ATTENTION or torch.equal(
        expected[:1], keyed_grad(loss, params, x[:1], KEYS[:1], strategy="loop")
    )
    for given in ({}, {"chunk_size": 2}):
        found = keyed_grad(loss, params, x, **options, **given)
        torch.testing.assert_close(found, expected)


def test_numbers_that_are_refused_have_no_keys_either():
    loss, params, _, batch = of("F.dropout(x)")
    with pytest.raises(RuntimeError, match="without random numbers"):
        keyed_grad(loss, params, *batch, randomness="error")


CAPTURED = [
    *("F.dropout(x, 0.5)", "torch.native_dropout(x, 0.5, True)[0]"),
    *("torch.rand(4, 5) + x", "torch.randn_like(x)", "x.clone().normal_(1.0, 2.0)"),
    *("torch.normal(x, x)", "(y := x.clamp(0, 1)).bernoulli_(y)"),
    *("torch.normal(x[:, :1].expand(4, 5), x)", "torch.bernoulli(x.detach(), 0.3)"),
    ATTENTION[0],
]


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("text", CAPTURED)
def test_a_graph_takes_keys_and_draws_what_eager_mode_draws(text, randomness):
    if randomness == "same" and text in BY_DATA:
        pytest.skip("runs in a loop")
    loss, params, buffers, batch = of(text)
    grad = vgrad.per_sample_grad(loss, randomness=randomness)
    graph = vgrad.compile(grad, fallback="error")
    for keys in (KEYS, KEYS, KEYS + 1):
        state = torch.get_rng_state()
        found = graph.keyed(keys)(params, buffers, *batch)
        expected = grad.keyed(keys)(params, buffers, *batch)
        oracle.assert_exact(found, expected, 0)
        assert torch.equal(torch.get_rng_state(), state)
    assert all(each.backend == "replay" for each in graph.reports())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "text",
    ["torch.poisson(x)", "torch.randn(4, dtype=torch.cfloat).abs()[:, None] * x"],
)
def test_a_graph_cannot_draw_for_one_sample_after_another(text):
    loss, params, buffers, batch = of(text)
    grad = vgrad.per_sample_grad(loss, randomness="different").keyed(KEYS)
    expected = grad(params, buffers, *batch)
    oracle.assert_exact(vgrad.compile(grad)(params, buffers, *batch), expected, 0)
    with pytest.raises(RuntimeError, match="one sample after another"):
        vgrad.compile(grad, fallback="error")(params, buffers, *batch)


@pytest.mark.parametrize("strategy", ["auto", "recorded", "loop"])
def test_a_checkpoint_sees_the_same_numbers_again(strategy):
    def loss(run):
        def dropped(p, b, x):
            first = run(two, F.dropout(x * p["w"]))
            return (F.dropout(run(two, first)) * p["w"]).sum()

        return dropped

    params, again = {"w": torch.rand(4, 5)}, partial(checkpoint, use_reentrant=False)
    found, expected = (
        keyed_grad(loss(run), params, X, strategy=strategy)
        for run in (again, lambda run, x: run(x))
    )
    torch.testing.assert_close(found, expected)


def test_samples_that_run_alone_are_told_of():
    loss, params, _, batch = of("x[torch.randperm(4)]")
    with pytest.warns(FallbackWarning, match=r"a random op .* at <string>:1"):
        keyed_grad(loss, params, *batch)


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_no_number_is_drawn_twice(strategy):
    drawn = []

    def loss(params, buffers, x):
        torch.rand(2)
        if x[0].sum() > x[1].sum():
            torch.rand(3)
        value = torch.rand((), dtype=torch.float64)
        return (params["w"] * x).sum() * value, value

    compute = vgrad.per_sample_grad(
        loss, strategy=strategy, randomness="different", has_aux=True, chunk_size=4
    )
    torch.manual_seed(0)
    for _ in range(2):
        drawn.append(compute({"w": torch.ones(4, 5)}, {}, X.double())[1])
    drawn.append(torch.rand(2 * B, dtype=torch.float64))
    everything = torch.cat(drawn)
    assert len(everything.unique()) == len(everything)


def test_a_branch_on_a_number_does_not_change_its_distribution():
    """To draw again where samples differ would favour the branch that all take."""

    def loss(params, buffers, x):
        value = torch.rand(())
        return (params["w"] * (2 if value < 0.2 else 1)).sum(), value

    torch.manual_seed(0)
    numbers, w, x = [], {"w": torch.ones(1)}, torch.ones(2)
    for _ in range(600):  # a transform that has learnt nothing, each time
        compute = vgrad.per_sample_grad(
            loss, randomness="different", has_aux=True, verify=False
        )
        numbers.append(compute(w, {}, x)[1])
    share = (torch.cat(numbers) < 0.2).double().mean()
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / 1200) ** 0.5


def test_a_graph_of_samples_that_read_after_they_drew_has_keys():
    def loss(params, buffers, x):
        dropped = F.dropout(x * params["w"])
        return dropped.sum() * (2 if x.sum() > 0 else 1)

    compute = vgrad.per_sample_grad(loss, randomness="different", verify=False)
    compiled = vgrad.compile(compute, fallback="error", verify=False)
    params, x = {"w": torch.ones(4)}, torch.rand(3, 4)
    torch.manual_seed(0)
    found = [compiled(params, {}, x)["w"] for _ in range(4)]
    torch.manual_seed(0)
    fresh = vgrad.per_sample_grad(loss, randomness="different", verify=False)
    expected = [fresh(params, {}, x)["w"] for _ in range(4)]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert compiled.reports()[-1].calls

"""Ranks whose transforms, steps or losses have other options raise, all of them."""

import random
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.distributed.processes import mesh_of
from vgrad import distributed, optim
from vgrad.distributed import RankError, data_parallel
from vgrad.dp import Plan
from vgrad.training import (
    TrainState,
    private_step,
    train_step,
)

PARAMS = {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)}
X = torch.linspace(-2, 1, 24, dtype=torch.float64).view(6, 4)


def plain(params, buffers, x):
    return (params["w"] @ x).square().sum()


def clipped(loss=plain, **options):
    return vgrad.clipped_grad(loss, **{"max_norm": 0.5, **options})


def scaled(scale):
    return lambda p, b, x: plain(p, b, x) * scale


class Scaled:
    """A loss with a number."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, params, buffers, x):
        return plain(params, buffers, x) * self.scale


def dropping(p):
    return lambda params, buffers, x: plain(params, buffers, F.dropout(x, p))


def within(value):
    """Return a loss that closes over something that has a number in it."""
    return lambda p, b, x: plain(p, b, x) if value else None


def by_layer(bound):
    return clipped(clipping="per_layer", max_norm={"w": bound})


replay = partial(vgrad.compile, backend="replay")
projection = partial(vgrad.per_sample_projection, plain, dim=2)
bound = clipped(max_norm=0.7)
BOUNDS = r"rule \[\S*ClipRule\(.*max_norm=0.5\), .*max_norm=0.7\)\]"
# A function of the first rank, one of all others, and the difference in the error.
TRANSFORMS = {
    "max_norm": (clipped(), bound, BOUNDS),
    "normalize_by": (clipped(), clipped(normalize_by=2), r"normalize_by \[1.0, 2.0"),
    "clipping": (clipped(), clipped(clipping="automatic"), r"kind='flat'.*'automatic'"),
    "several bounds": (by_layer(0.5), by_layer(0.25), r"\(w=0.5\).*\(w=0.25\)"),
    "rescale": (clipped(), clipped(rescale=True), r"normalize_by \[1.0, 0.5"),
    "passes": (clipped(), clipped(passes=2), r"passes \[1, 2"),
    "randomness": (
        clipped(randomness="same"), clipped(randomness="different"),
        r"randomness \['same', 'different'",
    ),
    "aux": (clipped(), clipped(has_aux=True), r"has_aux \[False, True"),
    "compiled": (replay(clipped()), replay(bound), BOUNDS),
    "compiled and not": (clipped(), replay(bound), BOUNDS),
    "seeds": (projection(seed=1), projection(seed=2), r"directions \[.*seed=2"),
}  # fmt: skip
PROBE = r"loss: expected the same number on all ranks, got \["
RATES = r"optimizer: expected the same number on all ranks, got \["
LOSSES = {
    "number": (scaled(1.0), scaled(2.0), PROBE),
    "object": (Scaled(1.0), Scaled(2.0), PROBE),
    "name": (plain, Scaled(1.0).__call__, r"loss \[\S*plain, \S*__call__\] on ranks"),
    "dropout": (dropping(0.1), dropping(0.2), PROBE),
    "refused": (within(None), within(1), r"got \['\w+Error', [\d.]+\]"),
}

PLAN = Plan(40, 0.1, 1.0, max_norm=0.5, steps=9, delta=1e-5)
SGD = optim.sgd(0.1)


def decaying(rate):
    return optim.sgd(lambda count: rate / (1 + count.double()))


def of_batch(scale):
    return lambda params, buffers, x: plain(params, buffers, x.mean(0)) * scale


def private(tx=SGD, loss=plain, **options):
    return private_step(loss, tx, PLAN, **options)


def train(tx=SGD, scale=1.0, **options):
    return train_step(of_batch(scale), tx, **options)


STEPS = {
    "rate": (private(), private(optim.sgd(0.2)), RATES),
    "schedule": (private(decaying(0.1)), private(decaying(0.2)), RATES),
    "optimizer": (
        private(), private(optim.chain(optim.clip_by_global_norm(1.0), SGD)), RATES,
    ),
    "donate": (private(), private(donate=True), r"donate \[False, True"),
    "loss": (
        private(loss=scaled(1.0)), private(loss=scaled(2.0)), PROBE,
    ),
    "loss of a batch": (train(), train(scale=2.0), PROBE),
    "policy": (
        train(policy="float32"), train(policy="bfloat16"), PROBE,
    ),
    "rate of a compiled step": (
        replay(train()), replay(train(optim.sgd(0.2))), RATES,
    ),
}  # fmt: skip
ROOMS = {"transforms": TRANSFORMS, "losses": LOSSES, "steps": STEPS}


def text_of(call):
    """Return the text of the error that all ranks raise; None if none does."""
    try:
        call()
    except RankError as error:
        return str(error)
    return None


def fresh(tx):
    params = {name: value.clone() for name, value in PARAMS.items()}
    return TrainState.create(tx, params, {}, seed=1)


def _refused(size):
    """Call functions that differ, and after each of them one that does not."""
    (mesh, rank), texts = mesh_of(size), {}
    x = X[rank::size]
    grads = oracle.loss_gradients(plain, PARAMS, {}, (X,), len(X))
    right, expected = data_parallel(clipped(), mesh), oracle.clipped(grads, 0.5)
    after, _ = private()(fresh(SGD), X)
    for room, cases in ROOMS.items():
        for name, pair in cases.items():
            function = clipped(pair[rank]) if room == "losses" else pair[rank]
            wrong = data_parallel(function, mesh)
            if room == "steps":
                state = fresh(SGD)
                texts[name] = text_of(lambda: wrong(state, x))  # noqa: B023
                state, _ = data_parallel(private(), mesh)(fresh(SGD), x)
                oracle.assert_exact(state.params, after.params)
            else:
                texts[name] = text_of(lambda: wrong(PARAMS, {}, x))  # noqa: B023
                oracle.assert_exact(right(PARAMS, {}, x).grads, expected)
    # So are those of ranks that hold shards.
    params = distributed.shard(PARAMS, mesh)
    wrong = data_parallel((clipped(), bound)[rank], mesh)
    texts["shards"] = text_of(lambda: wrong(params, {}, x))
    sums = distributed.gather(right(params, {}, x).grads, mesh)
    oracle.assert_exact(sums, expected)
    return texts


CASES = {name: case for room in ROOMS.values() for name, case in room.items()}
assert len(CASES) == sum(map(len, ROOMS.values()))
CASES["shards"] = (None, None, BOUNDS + " on ranks 0 to 1")


@pytest.fixture(scope="module")
def texts(ranks):
    return ranks(2).run(_refused, 2)


@pytest.mark.parametrize("name", CASES)
def test_functions_with_other_options_are_refused(texts, name):
    for each in texts:
        text = each[name]
        assert text is not None, "nothing was refused"
        assert re.search(CASES[name][2], text), text
        assert re.search(r" on ranks 0 to 1.*\. Make it of the same values", text), text


def _one_of_four():
    mesh, rank = mesh_of(4)
    wrong = data_parallel(clipped(max_norm=0.7 if rank == 2 else 0.5), mesh)
    return text_of(lambda: wrong(PARAMS, {}, X[rank::4]))


def test_four_ranks_say_the_values_of_all(ranks):
    for text in ranks(4).run(_one_of_four):
        assert re.search(r"=0.5\), \S+ \S+=0.5\), \S+ \S+=0.7\), \S+ \S+=0.5\)\]", text)


# Routes of private steps.


def doubled(saved):
    return torch.where(saved > 1.5, 2 * saved, saved)


def hooked(params, buffers, x):
    """Save tensors by hooks that keep all values but large ones: such samples loop."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, doubled):
        return plain(params, buffers, x)


def _routes(size):
    mesh, rank = mesh_of(size)
    step = private_step(hooked, SGD, PLAN, verify=False)
    apart = X * 0.1 if rank == 0 else X.abs() * 9
    empty = X[: 0 if rank == 0 else 6].abs() * 9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = text_of(lambda: data_parallel(step, mesh)(fresh(SGD), apart))
        state, _ = data_parallel(step, mesh)(fresh(SGD), empty)
        alone, _ = step(fresh(SGD), X.abs() * 9)
    oracle.assert_exact(state.params, alone.params)
    return text, int(state.route), int(alone.route)


def test_ranks_agree_on_the_route_of_a_private_step(ranks):
    for text, *routes in ranks(2).run(_routes, 2):
        assert re.search(r"by one strategy.*\['recorded', 'loop'\] on ranks", text), (
            text
        )
        assert routes == [3, 3]


# Values that may differ, or change after a function was made.


class Placed(Scaled):
    """A loss with a device and a generator of its own."""

    def __init__(self, rank):
        super().__init__(2.0)
        self.device, self.other = torch.device("cpu", 0), f"cuda:{rank}"
        self.generator = torch.Generator().manual_seed(rank)
        self.tensor, self.array = torch.full((2,), rank), np.full(2, rank)


def of_rank(rank):
    """Return functions that may be others on each rank, with the same sums."""
    weight = torch.tensor(2.0, dtype=torch.float64)
    unused, calls = clipped(scaled(2.0)), []
    if rank:
        unused(PARAMS, {}, X)  # which it may remember

    def counting(params, buffers, x):
        calls.append(len(calls))
        return plain(params, buffers, x) * 2

    return {
        "chunks": clipped(scaled(2.0), chunk_size=rank + 1),
        "strategies": clipped(scaled(2.0), strategy=("recorded", "vmap")[rank]),
        "tensors": clipped(lambda p, b, x: plain(p, b, x) * (weight + 0 * ZERO[0])),
        "objects": clipped(Placed(rank)),
        "lists that grow": clipped(counting),
        "graphs": replay(unused) if rank else unused,
    }


ZERO = torch.zeros(1)


def _allowed_and_changing(size):
    mesh, rank = mesh_of(size)
    x, scale, own = X[rank::size], 1.0, Scaled(1.0)
    grads = oracle.loss_gradients(scaled(2.0), PARAMS, {}, (X,), len(X))
    expected = oracle.clipped(grads, 0.5)
    states = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    for function in of_rank(rank).values():
        function = data_parallel(function, mesh)
        for _ in range(2):
            oracle.assert_exact(function(PARAMS, {}, x).grads, expected)

    def loss(params, buffers, x):
        return plain(params, buffers, x) * scale

    # A probe leaves no trace in the generators.
    assert states[0] == random.getstate()
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2].equal(torch.get_rng_state())
    texts = []
    cells, objects = (data_parallel(clipped(each), mesh) for each in (loss, own))
    for now in (1.0, 1.0 + rank, 2.0):
        own.scale = scale = now
        for each in (cells, objects):
            texts.append(text_of(lambda: each(PARAMS, {}, x)))  # noqa: B023
    for each in (cells, objects):
        oracle.assert_exact(each(PARAMS, {}, x).grads, expected)
    return texts


def test_some_values_may_differ_and_losses_are_compared_at_calls_1_2_4(ranks):
    for texts in ranks(2).run(_allowed_and_changing, 2):
        assert texts[:2] == texts[4:] == [None] * 2
        assert re.search(PROBE, texts[2])
        assert re.search(PROBE, texts[3])


# Members.


def _of_members(size):
    (mesh, rank), texts = mesh_of(size, "members"), {}
    models = [nn.Linear(4, 3).double() for _ in range(size)]
    linear, *whole = vgrad.stack(models)
    own = distributed.shard_members(whole, mesh)
    norm = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, eps=0.1 + rank)).double()
    normed, *whole = vgrad.stack([norm] * size)
    own_norms = distributed.shard_members(whole, mesh)
    calls = {
        "quantiles": lambda: vgrad.ensemble.predict(
            *(linear, *own, X), mesh=mesh, kind="value", quantiles=[0.5, 0.1 + rank / 2]
        ),
        "model": lambda: vgrad.ensemble.predict(normed, *own_norms, X, mesh=mesh),
    }
    for name, call in calls.items():
        texts[name] = text_of(call)
    return texts


MEMBERS = {
    "quantiles": r"quantiles \[\[0.5, 0.1\], \[0.5, 0.6\]",
    "model": r"fmodel.1.eps \[0.1, 1.1",
}


def test_predictions_of_members_with_other_options_are_refused(ranks):
    for texts in ranks(2).run(_of_members, 2):
        assert texts.keys() == MEMBERS.keys()
        for name, text in texts.items():
            assert text is not None, f"{name}: nothing was refused"
            assert re.search(MEMBERS[name], text), text

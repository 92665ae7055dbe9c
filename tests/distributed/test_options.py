"""Ranks whose transforms, steps or losses have other options raise, all of them."""

import re
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad import distributed, optim
from vgrad.distributed import RankError, data_parallel, member_parallel
from vgrad.dp import Plan
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

PARAMS = {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)}
X = torch.linspace(-2, 1, 24, dtype=torch.float64).view(6, 4)


def plain(params, buffers, x):
    return (params["w"] @ x).square().sum()


def clipped(loss=plain, **options):
    return vgrad.clipped_grad(loss, **{"max_norm": 0.5, **options})


# One value of each pair is that of the first rank, the other that of all others.


def scaled(scale):
    return lambda p, b, x: plain(p, b, x) * scale


def with_scale(params, buffers, x, scale=1.0, power=1):
    return plain(params, buffers, x) * scale**power


def with_default(value):
    def loss(params, buffers, x, *, scale=value):
        return plain(params, buffers, x) * scale

    return loss


class Scaled:
    """A loss with a number, and a method that is one."""

    def __init__(self, scale, rank=0):
        self.scale, self.rank = scale, rank

    def __call__(self, params, buffers, x):
        return plain(params, buffers, x) * self.scale

    def method(self, params, buffers, x):
        return plain(params, buffers, x) * self.scale


def within(held):
    """Return a loss that closes over something that has a number in it."""
    return lambda p, b, x: plain(p, b, x) if held else None


def net(criterion=None, p=0.1, eps=1e-5, training=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, eps=eps), nn.Dropout(p))
    fmodel, _, _ = vgrad.make_functional_with_buffers(model.double().train(training))
    return vgrad.sample_loss(fmodel, criterion or nn.MSELoss())


TRANSFORMS = {
    "max_norm": (clipped(), clipped(max_norm=0.7), r"max_norm \[0.5, 0.7"),
    "normalize_by": (
        clipped(),
        clipped(normalize_by=2),
        r"normalize_by \[1.0, 2.0",
    ),
    "clipping": (
        clipped(),
        clipped(clipping="automatic"),
        r"clipping \['flat', 'automatic'",
    ),
    "several bounds": (
        clipped(clipping="per_layer", max_norm={"w": 0.5}),
        clipped(clipping="per_layer", max_norm={"w": 0.25}),
        r"max_norm.'w' \[0.5, 0.25",
    ),
    "rescale": (clipped(), clipped(rescale=True), r"normalize_by \[1.0, 0.5"),
    "passes": (clipped(), clipped(passes=2), r"passes \[1, 2"),
    "randomness": (
        clipped(randomness="same"),
        clipped(randomness="different"),
        r"randomness \['same', 'different'",
    ),
    "aux": (clipped(), clipped(has_aux=True), r"has_aux \[False, True"),
    "compiled": (
        vgrad.compile(clipped(), backend="replay"),
        vgrad.compile(clipped(max_norm=0.7), backend="replay"),
        r"max_norm \[0.5, 0.7",
    ),
    "compiled and not": (
        clipped(),
        vgrad.compile(clipped(max_norm=0.7), backend="replay"),
        r"max_norm \[0.5, 0.7",
    ),
    "seeds of projections": (
        vgrad.per_sample_projection(plain, dim=2, seed=1),
        vgrad.per_sample_projection(plain, dim=2, seed=2),
        r"seed \[1, 2",
    ),
    "norms": (
        vgrad.per_sample_norm(scaled(1.0)),
        vgrad.per_sample_norm(scaled(2.0)),
        r"loss.scale \[1.0, 2.0",
    ),
    "moments": (
        vgrad.gradient_moments(scaled(1.0)),
        vgrad.gradient_moments(scaled(2.0)),
        r"loss.scale \[1.0, 2.0",
    ),
}

LOSSES = {
    "closure": (scaled(1.0), scaled(2.0), r"loss.scale \[1.0, 2.0"),
    "whole number": (scaled(1), scaled(np.int64(2)), r"loss.scale \[1, 2"),
    "boolean": (scaled(True), scaled(False), r"loss.scale \[True, False"),
    "text": (within("a"), within("b"), r"loss.held \['a', 'b'"),
    "nothing": (within(None), within(0), r"loss.held \[None, 0"),
    "dtype": (
        within(torch.float32),
        within(torch.float64),
        r"loss.held \[torch.float32, torch.float64",
    ),
    "name": (plain, with_scale, r"loss \[\S*plain, \S*with_scale\] on ranks"),
    "constant": (
        lambda p, b, x: plain(p, b, x) * 3,
        lambda p, b, x: plain(p, b, x) * 4,
        r"loss.code.constants.\d \[3, 4",
    ),
    "op": (
        lambda p, b, x: p["w"].sin().sum(),
        lambda p, b, x: p["w"].cos().sum(),
        r"loss.code.names.0 \['sin', 'cos'",
    ),
    "default": (
        with_default(1.0),
        with_default(2.0),
        r"loss.keyword defaults.'scale' \[1.0, 2.0",
    ),
    "keyword": (
        partial(with_scale, scale=1.0),
        partial(with_scale, scale=2.0),
        r"loss.scale \[1.0, 2.0",
    ),
    "partials of a partial": (
        partial(partial(with_scale, scale=2.0), power=1),
        partial(partial(with_scale, scale=2.0), power=2),
        r"loss.power \[1, 2",
    ),
    "object": (Scaled(1.0), Scaled(2.0), r"loss.scale \[1.0, 2.0"),
    "method": (Scaled(1.0).method, Scaled(2.0).method, r"loss.self.scale \[1.0, 2.0"),
    "dictionary": (
        within({"a": 1, "b": (2, 3)}),
        within({"a": 1, "b": (2, 4)}),
        r"loss.held.'b'.1 \[3, 4",
    ),
    "length": (within([1, 2]), within([1, 2, 3]), r"loss.held.2 \[nothing, 3"),
    "many": (
        within([1.0] * 2000),
        within([1.0] * 2001),
        r"list of 2000, list of 2001",
    ),
    "set": (within({1, 2}), within({1, 3}), r"loss.held.1 \[2, 3"),
    "settings": (
        within(types.SimpleNamespace(alpha=1)),
        within(types.SimpleNamespace(alpha=2)),
        r"loss.held.alpha \[1, 2",
    ),
    "a loss within": (within(scaled(1.0)), within(scaled(2.0)), r"held.scale \[1.0, 2"),
    "a transform within": (
        within(clipped(max_norm=1.0)),
        within(clipped(max_norm=2.0)),
        r"loss.held.max_norm \[1.0, 2.0",
    ),
    "criterion": (
        net(nn.CrossEntropyLoss(label_smoothing=0.1)),
        net(nn.CrossEntropyLoss(label_smoothing=0.2)),
        r"loss.criterion.label_smoothing \[0.1, 0.2",
    ),
    "another criterion": (
        net(F.mse_loss),
        net(F.l1_loss),
        r"loss.criterion \[.*mse_loss, .*l1_loss",
    ),
    "dropout": (net(p=0.1), net(p=0.2), r"loss.fmodel.2.p \[0.1, 0.2"),
    "epsilon": (net(eps=0.1), net(eps=0.2), r"loss.fmodel.1.eps \[0.1, 0.2"),
    "mode": (net(), net(training=False), r"training \[True, False"),
}


def on_mesh(size, axis="dp"):
    return init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))


def text_of(call):
    """Return the text of the error that all ranks raise; None if none does."""
    try:
        call()
    except RankError as error:
        return str(error)
    return None


def _refused(size, room):
    """Call functions that differ, and after each of them one that does not."""
    mesh, found = on_mesh(size), {}
    rank = mesh.get_local_rank("dp")
    grads = oracle.loss_gradients(plain, PARAMS, {}, (X,), len(X))
    right = data_parallel(clipped(), mesh)
    for name, pair in {"transforms": TRANSFORMS, "losses": LOSSES}[room].items():
        function = pair[1 if rank else 0]
        if room == "losses":
            function = vgrad.clipped_grad(function, max_norm=0.5)
        wrong = data_parallel(function, mesh)
        found[name] = text_of(lambda: wrong(PARAMS, {}, X[rank::size]))  # noqa: B023
        sums = right(PARAMS, {}, X[rank::size]).grads
        oracle.assert_exact(sums, oracle.clipped(grads, 0.5))
    return found


@pytest.fixture(scope="module")
def texts(ranks):
    """Return what two ranks raised, by room and case."""
    return {room: ranks(2).run(_refused, 2, room) for room in ("transforms", "losses")}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_with_other_options_are_refused(texts, name):
    for found in texts["transforms"]:
        check_text(found[name], TRANSFORMS[name][2])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_other_values_are_refused(texts, name):
    for found in texts["losses"]:
        check_text(found[name], LOSSES[name][2])


def check_text(text, pattern):
    assert text is not None, "nothing was refused"
    expected = (
        r", 1: expected the same options, loss and optimizer on all ranks, got .*"
    )
    assert re.search(expected + pattern, text), text
    assert re.search(r"\] on ranks 0 to \d\. Make it of the same values", text), text


def test_four_ranks_say_the_values_of_all(ranks):
    for text in ranks(4).run(_one_of_four):
        assert "got max_norm [0.5, 0.5, 0.7, 0.5] on ranks 0 to 3" in text


def _one_of_four():
    mesh = on_mesh(4)
    rank = mesh.get_local_rank("dp")
    wrong = data_parallel(clipped(max_norm=0.7 if rank == 2 else 0.5), mesh)
    return text_of(lambda: wrong(PARAMS, {}, X[rank::4]))


# Values that may differ.


class Trainer:
    """An object with more in it than its loss names."""

    def __init__(self, rank):
        self.rank, self.weight = rank, 2.0
        self.device, self.folder = f"cuda:{rank}", f"/run/{rank}"

    def loss(self, params, buffers, x):
        return plain(params, buffers, x) * self.weight


class Placed(Scaled):
    """A loss with a device and a generator of its own."""

    def __init__(self, rank):
        super().__init__(2.0)
        self.device, self.other = torch.device("cpu", 0), f"cuda:{rank}"
        self.generator = torch.Generator().manual_seed(rank)
        self.held, self.array = torch.full((2,), rank), np.full(2, rank)


def of_rank(rank):
    """Return functions that may be others on each rank, with the same sums."""
    weight = torch.tensor(2.0, dtype=torch.float64)
    unused = vgrad.clipped_grad(scaled(2.0), max_norm=0.5)
    if rank:
        unused(PARAMS, {}, X)  # which it may remember
    calls = []

    def counting(params, buffers, x):
        calls.append(len(calls))
        return plain(params, buffers, x) * 2

    yield "chunks", clipped(scaled(2.0), chunk_size=rank + 1)
    yield "strategies", clipped(scaled(2.0), strategy=("recorded", "vmap")[rank])
    yield "tensors", clipped(lambda p, b, x: plain(p, b, x) * (weight + 0 * rank_of[0]))
    yield "trainers", clipped(Trainer(rank).loss)
    yield "objects", clipped(Placed(rank))
    yield "transforms that ran", unused
    yield "lists that grow", clipped(counting)
    yield "graphs", vgrad.compile(unused, backend="replay") if rank else unused


rank_of = torch.zeros(1)


def _allowed(size):
    mesh = on_mesh(size)
    rank, found = mesh.get_local_rank("dp"), {}
    grads = oracle.loss_gradients(scaled(2.0), PARAMS, {}, (X,), len(X))
    for name, function in of_rank(rank):
        function = data_parallel(function, mesh)
        for _ in range(2):
            sums = function(PARAMS, {}, X[rank::size]).grads
            found[name] = oracle.error(sums, oracle.clipped(grads, 0.5))
    return found


def test_chunks_strategies_tensors_and_devices_may_differ(ranks):
    for found in ranks(2).run(_allowed, 2):
        assert max(found.values()) < 1e-12, found
        assert len(found) == 8


# Values that change after a function was made.


def _changing(size):
    mesh = on_mesh(size)
    rank, scale = mesh.get_local_rank("dp"), 1.0
    own = Scaled(1.0)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(params, buffers, x):
        return plain(params, buffers, x) * scale

    found = []
    cells, objects = (data_parallel(clipped(each), mesh) for each in (loss, own))
    _, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(4, 3).double())
    model = nn.Linear(4, 3).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    smooth = data_parallel(clipped(vgrad.sample_loss(fmodel, criterion)), mesh)
    y, part = torch.arange(6) % 3, slice(rank, None, size)
    for now in (1.0, 1.0 + rank, 2.0):
        own.scale = scale = now
        criterion.label_smoothing = now / 10
        for each in (cells, objects):
            found.append(text_of(lambda: each(PARAMS, {}, X[part])))  # noqa: B023
        found.append(text_of(lambda: smooth(params, buffers, X[part], y[part])))
    grads = oracle.loss_gradients(scaled(2.0), PARAMS, {}, (X,), len(X))
    expected = oracle.clipped(grads, 0.5)
    for each in (cells, objects):
        oracle.assert_exact(each(PARAMS, {}, X[part]).grads, expected)
    return found


def test_values_that_change_between_calls_are_compared(ranks):
    for found in ranks(2).run(_changing, 2):
        assert found[:3] == found[6:] == [None] * 3
        assert "got loss.scale [1.0, 2.0] on" in found[3]
        assert "got loss.scale [1.0, 2.0] on" in found[4]
        assert "got loss.criterion.label_smoothing [0.1, 0.2] on" in found[5]


# Steps.

PLAN = Plan(
    dataset_size=40,
    sampling_rate=0.1,
    noise_multiplier=1.0,
    max_norm=0.5,
    steps=9,
    delta=1e-5,
)


def decaying(rate):
    return lambda count: rate / (1 + count.double())


def of_batch(scale):
    return lambda params, buffers, x: plain(params, buffers, x.mean(0)) * scale


def private(tx, loss=plain, **options):
    return private_step(loss, tx, PLAN, **options)


STEPS = {
    "rate": (private(optim.sgd(0.1)), private(optim.sgd(0.2)), r"tx.*lr \[0.1, 0.2"),
    "schedule": (
        private(optim.sgd(decaying(0.1))),
        private(optim.sgd(decaying(0.2))),
        r"tx.*rate \[0.1, 0.2",
    ),
    "optimizer": (
        private(optim.sgd(0.1)),
        private(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))),
        r"got tx.donated \[\S*fused\S*, None\]; tx.update.transformations",
    ),
    "betas": (
        private(optim.adam(0.1)),
        private(optim.adam(0.1, betas=(0.8, 0.9))),
        r"tx.*\[0.9, 0.8",
    ),
    "donate": (
        private(optim.sgd(0.1)),
        private(optim.sgd(0.1), donate=True),
        r"donate \[False, True",
    ),
    "loss": (
        private(optim.sgd(0.1), scaled(1.0)),
        private(optim.sgd(0.1), scaled(2.0)),
        r"loss.scale \[1.0, 2.0",
    ),
    "passes": (
        private(optim.sgd(0.1)),
        private(optim.sgd(0.1), passes=2),
        r"passes \[1, 2",
    ),
    "loss of a batch": (
        train_step(of_batch(1.0), optim.sgd(0.1)),
        train_step(of_batch(2.0), optim.sgd(0.1)),
        r"loss.*scale \[1.0, 2.0",
    ),
    "policy": (
        train_step(of_batch(1.0), optim.sgd(0.1), policy="float32"),
        train_step(of_batch(1.0), optim.sgd(0.1), policy="bfloat16"),
        r"loss.*\[torch.float32, torch.bfloat16",
    ),
    "rate of a plain step": (
        train_step(of_batch(1.0), optim.sgd(0.1)),
        train_step(of_batch(1.0), optim.sgd(0.2)),
        r"tx.*lr \[0.1, 0.2",
    ),
    "rate of a compiled step": (
        vgrad.compile(train_step(of_batch(1.0), optim.sgd(0.1)), backend="replay"),
        vgrad.compile(train_step(of_batch(1.0), optim.sgd(0.2)), backend="replay"),
        r"tx.*lr \[0.1, 0.2",
    ),
}


def _stepped(size):
    mesh, found = on_mesh(size), {}
    rank = mesh.get_local_rank("dp")
    part = slice(rank, None, size)
    expected, _ = private(optim.sgd(0.1))(fresh(optim.sgd(0.1)), X)
    for name, pair in STEPS.items():
        wrong = data_parallel(pair[1 if rank else 0], mesh)
        # Of one shape on all ranks, since it is the same as far as anyone can see.
        state = fresh(optim.adam(0.1) if name == "betas" else optim.sgd(0.1))
        found[name] = text_of(lambda: wrong(state, X[part]))  # noqa: B023
        right = data_parallel(private(optim.sgd(0.1)), mesh)
        state, _ = right(fresh(optim.sgd(0.1)), X[part])
        oracle.assert_exact(state.params, expected.params)
    return found


def fresh(tx):
    params = {name: value.clone() for name, value in PARAMS.items()}
    return TrainState.create(tx, params, {}, seed=1)


@pytest.fixture(scope="module")
def of_steps(ranks):
    return ranks(2).run(_stepped, 2)


@pytest.mark.parametrize("name", STEPS)
def test_steps_with_other_options_are_refused(of_steps, name):
    for found in of_steps:
        text = found[name]
        assert text is not None, "nothing was refused"
        assert re.search(STEPS[name][2], text), text
        assert "expected the same options, loss and optimizer on all ranks" in text


# Members.


def _of_members(size):
    mesh, found = on_mesh(size, "members"), {}
    rank = mesh.get_local_rank("members")
    params = {**PARAMS, "own": torch.ones(1, 2)}

    def state(tx=None):
        tx = tx or optim.sgd(0.1)
        return EnsembleState.create(tx, dict(params), {}, shared=["w"], seed=1)

    def step(**options):
        function = ensemble_train_step(
            of_batch(options.pop("scale", 1.0)),
            optim.sgd(options.pop("lr", 0.1)),
            shared=["w"],
            **options,
        )
        return member_parallel(function, mesh, members=size)

    def called(name, run):
        found[name] = text_of(run)
        right, _ = step()(state(), X)
        oracle.assert_exact(right.params["w"], expected)

    grads = oracle.loss_gradients(plain, PARAMS, {}, (X.mean(0)[None],), 1)
    expected = PARAMS["w"] - 0.1 * size * grads["w"][0]
    called("lr", lambda: step(lr=0.1 + rank)(state(), X))
    called("scale", lambda: step(scale=1.0 + rank)(state(), X))
    called("donate", lambda: step(donate=bool(rank))(state(), X))
    gradient = vgrad.ensemble_grad(of_batch(1.0 + rank), shared=["w"])
    gradient = member_parallel(gradient, mesh, members=size)
    called("gradient", lambda: gradient(params, {}, X))
    torch.manual_seed(0)
    models = [nn.Linear(4, 3).double() for _ in range(size)]
    fmodel, *whole = vgrad.stack(models)
    own = distributed.own_members(whole, mesh)
    drawn = vgrad.ensemble_forward(fmodel, randomness=("same", "different")[rank])
    drawn = member_parallel(drawn, mesh, members=size)
    called("draws", lambda: drawn(*own, X))
    quantiles = [0.5, 0.1 + rank / 2]
    predict = partial(vgrad.ensemble.predict, fmodel, *own, X, mesh=mesh)
    called("quantiles", lambda: predict(kind="value", quantiles=quantiles))
    norm = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, eps=0.1 + rank)).double()
    fmodel, *whole = vgrad.stack([norm, norm][:size])
    own = distributed.own_members(whole, mesh)
    predict = partial(vgrad.ensemble.predict, fmodel, *own, X, mesh=mesh)
    called("model", predict)
    return found


MEMBERS = {
    "lr": r"tx.*lr \[0.1, 1.1",
    "scale": r"loss.scale \[1.0, 2.0",
    "donate": r"donate \[False, True",
    "gradient": r"loss.scale \[1.0, 2.0",
    "draws": r"randomness \['same', 'different'",
    "quantiles": r"quantiles \[\[0.5, 0.1\], \[0.5, 0.6",
    "model": r"fmodel.1.eps \[0.1, 1.1",
}


def test_steps_and_predictions_of_members_with_other_options_are_refused(ranks):
    for found in ranks(2).run(_of_members, 2):
        assert found.keys() == MEMBERS.keys()
        for name, text in found.items():
            assert text is not None, f"{name}: nothing was refused"
            assert re.search(MEMBERS[name], text), text


def test_ranks_that_hold_shards_are_compared(ranks):
    for text in ranks(2).run(_sharded):
        assert "got max_norm [0.5, 0.7] on ranks 0 to 1" in text


def _sharded():
    mesh = on_mesh(2)
    rank = mesh.get_local_rank("dp")
    params = distributed.shard(PARAMS, mesh)
    wrong = data_parallel(clipped(max_norm=0.7 if rank else 0.5), mesh)
    text = text_of(lambda: wrong(params, {}, X[rank::2]))
    sums = data_parallel(clipped(), mesh)(params, {}, X[rank::2]).grads
    grads = oracle.loss_gradients(plain, PARAMS, {}, (X,), len(X))
    sums = distributed.gather(sums, mesh)
    oracle.assert_exact(sums, oracle.clipped(grads, 0.5))
    return text

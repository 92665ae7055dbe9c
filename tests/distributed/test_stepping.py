"""Steps of all ranks move parameters as one process does on the whole batch."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from tests import oracle
from tests.distributed.nets import NETS, mlp, problem
from tests.distributed.processes import mesh_of
from vgrad import distributed, optim
from vgrad.distributed import RankError, data_parallel, gather, local_batches, shard
from vgrad.dp import (
    Plan,
    Units,
    collate,
    noising,
    quantile_clip,
    unit_loader,
)
from vgrad.training import TrainState, load, private_step, save, train_step

SAMPLES = 40
SGD = optim.sgd(0.1)


def plan_of(steps, rate=0.2, noise=0.8, scheme=None, **others):
    given = {"max_norm": 0.5, "steps": steps, "delta": 1e-5} | others
    given |= {} if scheme is None else {"noise": scheme}
    return Plan(SAMPLES, rate, noise, **given)


MOMENTUM = optim.sgd(0.2, momentum=0.9)
SCALED = optim.scale_then_privatize(MOMENTUM, decay=0.9)


def private(
    size, name, dtype, plan, *, compiled=False, shards=False, drop=0, tx=MOMENTUM
):
    """Take the plan's steps on ranks, 0 for a plain process; return state, metrics."""
    mesh = mesh_of(size)[0] if size else None
    loss, params, buffers, data = problem(name, dtype, SAMPLES)

    def dropping(params, buffers, x, y):
        return loss(params, buffers, F.dropout(x, drop), y)

    options: dict = {"donate": shards}
    options["randomness"] = "different" if drop else "error"
    step = private_step(dropping if drop else loss, tx, plan, **options)
    step = vgrad.compile(step) if compiled else step
    state = TrainState.create(
        tx, shard(params, mesh) if shards else params, buffers, seed=5
    )
    batches = plan.sampler(state)
    if mesh:
        step, batches = data_parallel(step, mesh), local_batches(batches, mesh)
    dataset, metrics = TensorDataset(*data), {}
    for batch in DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate(dataset)
    ):
        state, metrics = step(state, *batch)
    if shards:
        held = sum(each.to_local().numel() for each in state.params.values())
        assert held < sum(each.numel() for each in state.params.values())
        state = state._replace(params=gather(state.params, mesh), optimizer=())
    return state, metrics


def equal(states):
    first, *others = (state.params for state in states)
    return all(torch.equal(first[n], other[n]) for other in others for n in first)


PLAIN, SHARDS, COMPILED = {}, {"shards": True}, {"compiled": True}
FORMS = [(torch.float32, PLAIN), (torch.float64, PLAIN), (torch.float64, SHARDS)]


def _forms(size, name):
    forms = [*FORMS, (torch.float32, COMPILED)] if name == "mlp" else FORMS
    return [(x, private(size, name, x, plan_of(6), **form)) for x, form in forms]


@pytest.mark.parametrize("name", NETS)
def test_private_steps_are_those_of_one_process(some, name):
    """Parameters on all ranks, and in shards; compiled."""
    for results in zip(*some.run(_forms, some.size, name), strict=True):
        dtype, _ = results[0]
        expected, metrics = private(0, name, dtype, plan_of(6))
        for _, (state, found) in results:
            limit = 1e-12 if dtype == torch.float64 else 2e-6
            oracle.assert_exact(state.params, expected.params, limit)
            assert found["samples"] == metrics["samples"]
            assert found["clipped"] == metrics["clipped"]
            torch.testing.assert_close(found["loss"], metrics["loss"])
        assert equal(state for _, (state, _) in results)


CLIP = quantile_clip(rate=0.5, start=0.2, count_deviation=2.0)
CORRELATED = noising.bisr(3), noising.band_mf(2), noising.blt(2)
OPTIONS = {
    "scaled gradients": ({"tx": SCALED}, {}, 1e-10),
    "a bound that adapts": ({"tx": optim.adam(0.01)}, {"max_norm": CLIP}, 1e-4),
    "dropout": ({"drop": 0.5}, {}, 1e-12),
    # Rounding of sums may move a number by a step of the grid.
    "integers": ({}, {"discrete": "sum"}, 1e-6),
    **{each.scheme: ({}, {"scheme": each}, 1e-12) for each in CORRELATED},
}
"""Options of a step, fields of its plan, and the largest difference."""


def _with_options(size, name):
    options, fields, _ = OPTIONS[name]
    dtype, forms = torch.float64, [PLAIN, SHARDS, COMPILED]
    if name == "integers":
        dtype, forms = torch.float32, [PLAIN, COMPILED]
    given = "mlp", dtype, plan_of(4, **fields)
    return [
        private(size, *given, **form, **options)[0]
        for form in (forms if size > 1 else [PLAIN])
    ]


@pytest.mark.filterwarnings("ignore:.*runs in eager mode")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.more] if n in ("blt", "band_mf") else [])
        for n in OPTIONS
    ],
)
def test_so_are_steps_with_options(ranks, name):
    with distributed.single_process_mesh("dp"):
        [expected] = _with_options(0, name)
    results = ranks(2).run(_with_options, 2, name)
    for state in (state for states in results for state in states):
        oracle.assert_exact(state.params, expected.params, OPTIONS[name][-1])
        oracle.assert_exact(state.max_norm, expected.max_norm, 1e-12)
    assert all(map(equal, zip(*results, strict=True)))


def _of_noise(size, scheme, folder):
    """Release noise alone, in the first rank's sums bit for bit, saved in between."""
    mesh = mesh_of(size)[0] if size else None
    plan, states = plan_of(6, noise=1.0, scheme=scheme), []
    params = {"w": torch.zeros(8, 3), "b": torch.zeros(4)}
    batch = torch.ones(8 // (size or 1), 1)
    step = private_step(
        lambda params, buffers, x: 0 * params["w"].sum() * x.sum(), SGD, plan
    )
    step = data_parallel(step, mesh) if mesh else step
    for sharded in (False, True) if size else (False,):
        start = shard(params, mesh) if sharded else params
        state, path = (
            TrainState.create(SGD, start, {}, seed=5),
            folder / f"{size}{sharded}",
        )
        for number in range(5):
            if number == 3:
                save(path, state, mesh)
                state = load(path, state, mesh)
            state, _ = step(state, batch)
        states.append(
            {n: gather(p, mesh) if sharded else p for n, p in state.params.items()}
        )
    return states


@pytest.mark.parametrize("scheme", CORRELATED, ids=lambda each: each.scheme)
def test_correlated_noise_is_the_same_bits_on_any_number_of_ranks(
    some, scheme, tmp_path
):
    [expected] = _of_noise(0, scheme, tmp_path)
    for number, states in enumerate(some.run(_of_noise, some.size, scheme, tmp_path)):
        assert len(states) == 2, number
        for params in states:
            for name, value in params.items():
                assert torch.equal(value, expected[name])
    assert all(value.any() for value in expected.values())


def units(size):
    """Take steps on units of three samples, 0 for a plain process."""
    mesh = mesh_of(size)[0] if size else None
    loss, params, buffers, data = problem("mlp", torch.float64, SAMPLES)
    owners = Units([row * row % 11 for row in range(SAMPLES)])
    numbers = {"max_norm": 0.5, "steps": 4, "delta": 1e-2, "samples_per_unit": 3}
    plan = Plan(len(owners), 0.6, 0.8, **numbers)
    step = private_step(loss, SGD, plan)
    state = TrainState.create(SGD, params, buffers, seed=5)
    batches = plan.sampler(state, units=owners)
    if mesh:
        step, batches = data_parallel(step, mesh), local_batches(batches, mesh)
    for batch in unit_loader(TensorDataset(*data), batches, 3):
        state, _ = step(state, *batch)
    return state


def test_whole_units_are_cut_among_ranks(some):
    expected = units(0)
    states = some.run(units, some.size)
    assert equal(states)
    oracle.assert_exact(states[0].params, expected.params, 1e-12)


ORDERS = {
    "compiled first": lambda step, mesh: data_parallel(vgrad.compile(step), mesh),
    "parallel first": lambda step, mesh: vgrad.compile(data_parallel(step, mesh)),
}


@pytest.mark.compiled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["batch", "samples", "private"])
def test_a_step_is_compiled_and_parallel_in_either_order(kind, order):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(4, 3))
    make = vgrad.batch_loss if kind == "batch" else vgrad.sample_loss
    loss, plan = make(fmodel, F.cross_entropy), [plan_of(3)] * (kind == "private")
    step = (private_step if plan else train_step)(loss, SGD, *plan)
    x, y, ends = torch.randn(6, 4), torch.arange(6) % 3, []
    with distributed.single_process_mesh("dp") as mesh:
        for taken in (step, ORDERS[order](step, mesh)):
            state = TrainState.create(SGD, params, buffers, seed=1)
            for _ in range(3):
                state, _ = taken(state, x, y)
            ends.append(state)
    assert equal(ends)
    assert {each.calls for each in taken.reports()} == {2}


def _one_step(size, plan):
    tx = optim.sgd(1.0)
    loss, params, buffers, (x, y) = problem("language", torch.float64)
    step = private_step(loss, tx, plan)
    step = data_parallel(step, mesh_of(size)[0]) if size else step
    state = TrainState.create(tx, params, buffers, seed=1)
    return step(state, x[:0], y[:0])[0].params, params


def test_noise_is_one_draw_of_the_planned_size(some):
    """The same bits, however many ranks add it."""
    plan = plan_of(1, 0.05, 2.0)
    expected, params = _one_step(0, plan)
    for found, _ in some.run(_one_step, some.size, plan):
        oracle.assert_exact(found, expected, 0)
    moved = torch.cat([(expected[n] - params[n]).flatten() for n in params])
    planned = 2.0 * plan.max_norm / plan.expected_batch_size
    assert abs(moved.std().item() / planned - 1) < 0.1


# Plain steps.


def _of_batches(size):
    """Steps with the loss of a batch: eager, and compiled."""
    (mesh, rank), ends = mesh_of(size), []
    torch.manual_seed(1)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(mlp())
    x, y, tx = torch.randn(16, 4), torch.randint(3, (16,)), optim.adam(0.01)
    plain = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
    own = slice(16 // size * rank, 16 // size * (rank + 1))
    for wrap in (lambda step: step, vgrad.compile):
        step = data_parallel(wrap(plain), mesh)
        state = expected = TrainState.create(tx, params, buffers, seed=1)
        for _ in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("error", vgrad.CompileWarning)
                state, metrics = step(state, x[own], y[own])
            expected, one = plain(expected, x, y)
        torch.testing.assert_close(metrics["loss"], one["loss"])
        with pytest.raises(ValueError, match=r"as many samples on every rank.*\[8, 7"):
            step(state, x[: 8 - rank], y[: 8 - rank])
        ends.append((state, oracle.error(state.params, expected.params)))
    return ends


def _of_samples(size):
    """Steps with a loss of one sample: eager, compiled, and on shards."""
    (mesh, rank), ends = mesh_of(size), []
    tx = optim.sgd(0.1, momentum=0.9)
    loss, params, buffers, (x, y) = problem("language", torch.float64, 13)
    plain = train_step(loss, tx)
    replay = partial(vgrad.compile, batch_sizes=(8, 16), fallback="error")
    # One rank has most of the samples, the last one none.
    cuts = [0, 2, *[13] * (size - 1)]
    own = slice(cuts[rank], cuts[rank + 1])
    for form in ("eager", "replay", "shards"):
        step = data_parallel(replay(plain) if form == "replay" else plain, mesh)
        state = expected = TrainState.create(tx, params, buffers, seed=1)
        if form == "shards":
            state = TrainState.create(tx, shard(params, mesh), buffers, seed=1)
        for _ in range(3):
            state, metrics = step(state, x[own], y[own])
            expected, one = plain(expected, x, y)
        torch.testing.assert_close(metrics["loss"], one["loss"])
        with pytest.raises(ValueError, match="a sample at least, got a batch of"):
            step(state, x[:0], y[:0])
        if form == "shards":
            params_of_all = gather(state.params, mesh)
            state = state._replace(params=params_of_all, optimizer=())
        ends.append((state, oracle.error(state.params, expected.params)))
    return ends


@pytest.mark.parametrize(("run", "limit"), [(_of_batches, 1e-6), (_of_samples, 1e-12)])
def test_plain_steps_take_the_mean_over_ranks(some, run, limit):
    """With a loss of one sample each rank is weighted by its number of them."""
    for ends in zip(*some.run(run, some.size), strict=True):
        assert max(error for _, error in ends) < limit
        assert equal(state for state, _ in ends)


def _masks(size):
    def loss(params, buffers, x):
        return (params["w"] * x).sum(), torch.rand(3)

    state = TrainState.create(SGD, {"w": torch.ones(1)}, {}, seed=4)
    step = data_parallel(train_step(loss, SGD, has_aux=True), mesh_of(size)[0])
    return step(state, torch.ones(2))[1]["aux"]


def test_plain_steps_draw_other_numbers_on_other_ranks(ranks):
    assert not torch.equal(*ranks(2).run(_masks, 2))


# Refusals, and plans.


def _refused(size):
    mesh, rank = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp", samples=SAMPLES)
    step = data_parallel(private_step(loss, SGD, plan_of(2)), mesh)
    other = data_parallel(private_step(loss, SGD, plan_of(2 + rank)), mesh)
    state = TrainState.create(SGD, params, buffers, seed=1)
    own_key = TrainState.create(SGD, params, buffers, seed=rank)
    changed = {name: value + rank for name, value in params.items()}
    changed, late = state._replace(params=changed), state._replace(step=torch.tensor(2))
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fmodel, *entries = vgrad.make_functional_with_buffers(model)
    normed = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), SGD)
    normed, normed_state = data_parallel(normed, mesh), TrainState.create(SGD, *entries)
    normed_state = distributed.replicated(normed_state, mesh)
    few = (x[:3], y[:3])
    for call, kind, message in [
        (lambda: step(own_key, x, y), RankError, "expected the same key on all ranks"),
        (lambda: step(changed, x, y), RankError, "expected the same state on all rank"),
        (lambda: step(state, *few), None, ""),
        (lambda: step(changed, *few), RankError, "expected the same state on all rank"),
        (lambda: other(state, x, y), RankError, "expected the same plan on all ranks"),
        (lambda: step(state, x, y), ValueError, "at most the 40 samples that a batch"),
        (lambda: step(late, *few), RuntimeError, "fewer than the 2 steps that the pl"),
        (lambda: step(state, *((x, y[:3]) if rank else (x, y))),
         ValueError if rank else RankError,
         "tensors of one batch" if rank else "rank 1 s"),
        (lambda: normed(normed_state, x, y), ValueError, "leaves buffers as they are"),
    ]:  # fmt: skip
        if kind is None:
            call()
            continue
        with pytest.raises(kind, match=message):
            call()


def test_what_would_part_the_ranks_is_refused(ranks):
    ranks(2).run(_refused, 2)


def _iterated(size, kind):
    """Train a spectral norm; all samples on one rank, or none anywhere."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net.double())
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    step = private_step(loss, SGD, plan_of(8, noise=0.0))
    if kind == "plain":
        step = train_step(loss, SGD)
    mesh, rank = mesh_of(size) if size else (None, 0)
    params = shard(params, mesh) if kind == "shards" else params
    state = TrainState.create(SGD, params, buffers, seed=5)
    step = data_parallel(step, mesh) if mesh else step
    for count in (3, 5) if kind == "plain" else (3, 0, 5):
        x, y = torch.randn(count, 4).double(), torch.randint(3, (count,))
        own = slice(None) if rank == 1 or not size else slice(0)
        state, _ = step(state, x[own], y[own])
    return {**state.params, **state.buffers}


@pytest.mark.parametrize("kind", ["private", "plain"])
def test_power_iterations_advance_on_all_ranks(some, kind):
    right = _iterated(0, kind)
    for found in some.run(_iterated, some.size, kind):
        oracle.assert_exact(found, right)


def test_power_iterations_of_shards_are_refused(some):
    with pytest.raises(AssertionError, match="or gather parameters that are DTensors"):
        some.run(_iterated, some.size, "shards")

"""Steps of all ranks move parameters as one process does on the whole batch."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from tests.distributed.nets import MODELS, problem
from vgrad import distributed, optim
from vgrad import ranks as collectives
from vgrad.distributed import RankError, data_parallel
from vgrad.dp import Plan, collate
from vgrad.training import TrainState, private_step, train_step

SAMPLES = 40


def mesh_of(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def plan_of(steps, rate=0.2, noise=0.8):
    return Plan(
        dataset_size=SAMPLES,
        sampling_rate=rate,
        noise_multiplier=noise,
        max_norm=0.5,
        steps=steps,
        delta=1e-5,
    )


def step_of(loss, tx, plan, drop, **options):
    """Return a private step, with a loss that drops a part of its input."""

    def dropping(params, buffers, x, y):
        return loss(params, buffers, F.dropout(x, drop), y)

    if drop:
        return private_step(dropping, tx, plan, randomness="different", **options)
    return private_step(loss, tx, plan, **options)


def private(size, name, dtype, steps, compiled=None, rate=0.2, noise=0.8, drop=0):
    """Take private steps on all ranks, and return this rank's state and metrics."""
    mesh = mesh_of(size)
    loss, params, buffers, data = problem(name, dtype, SAMPLES)
    plan, tx = plan_of(steps, rate, noise), optim.sgd(0.2, momentum=0.9)
    step = step_of(loss, tx, plan, drop)
    if compiled:
        step = vgrad.compile(step, backend=compiled)
    step = data_parallel(step, mesh)
    state = TrainState.create(tx, params, buffers, seed=5)
    dataset = TensorDataset(*data)
    sampler = distributed.local_batches(plan.sampler(state), mesh)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate(dataset))
    metrics = {}
    for batch in loader:
        state, metrics = step(state, *batch)
    return state, metrics


def sharded(size, name, dtype, steps, drop=0):
    """Take private steps on a state of which each rank holds a part."""
    mesh = mesh_of(size)
    loss, params, buffers, data = problem(name, dtype, SAMPLES)
    plan, tx = plan_of(steps), optim.sgd(0.2, momentum=0.9)
    step = data_parallel(step_of(loss, tx, plan, drop, donate=True), mesh)
    params = distributed.shard(params, mesh)
    state = TrainState.create(tx, params, buffers, seed=5)
    metrics = {}
    for indices in distributed.local_batches(plan.sampler(state), mesh):
        state, metrics = step(state, *(each[indices] for each in data))
    held = sum(each.to_local().numel() for each in state.params.values())
    assert held < sum(each.numel() for each in params.values())
    return state._replace(
        params=distributed.gather(state.params, mesh), optimizer=()
    ), metrics


def alone(name, dtype, steps):
    loss, params, buffers, data = problem(name, dtype, SAMPLES)
    plan, tx = plan_of(steps), optim.sgd(0.2, momentum=0.9)
    step = private_step(loss, tx, plan)
    state = TrainState.create(tx, params, buffers, seed=5)
    metrics = {}
    for indices in plan.sampler(state):
        state, metrics = step(state, *(each[indices] for each in data))
    return state, metrics


def distance(state, other):
    return max(
        ((state.params[name] - each).abs().max() / each.abs().max()).item()
        for name, each in other.params.items()
    )


def equal(state, other):
    return all(torch.equal(state.params[n], other.params[n]) for n in other.params)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_private_steps_are_those_of_one_process(some, name, dtype):
    expected, told = alone(name, dtype, 6)
    first, *others = some.run(private, some.size, name, dtype, 6)
    assert distance(first[0], expected) < (2e-6 if dtype == torch.float32 else 1e-12)
    assert all(equal(first[0], state) for state, _ in others)
    for _, metrics in [first, *others]:
        assert metrics["samples"] == told["samples"]
        assert metrics["clipped"] == told["clipped"]
        torch.testing.assert_close(metrics["loss"], told["loss"])


@pytest.mark.filterwarnings("ignore:.*runs in eager mode")
@pytest.mark.parametrize("compiled", [None, "replay"])
def test_private_steps_with_dropout_are_those_of_one_rank(some, compiled):
    given = "mlp", torch.float64, 4, compiled, 0.2, 0.8, 0.5
    with distributed.alone("dp"):
        expected, _ = private(1, *given)
    found = some.run(private, some.size, *given)
    if not compiled:
        found += some.run(sharded, some.size, *given[:3], 0.5)
    for state, _ in found:
        assert distance(state, expected) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_private_steps_on_shards_are_those_of_one_process(some, name):
    expected, told = alone(name, torch.float64, 6)
    for state, metrics in some.run(sharded, some.size, name, torch.float64, 6):
        assert distance(state, expected) < 1e-12
        assert metrics["samples"] == told["samples"]
        assert metrics["clipped"] == told["clipped"]
        torch.testing.assert_close(metrics["loss"], told["loss"])


@pytest.mark.compiled
def test_compiled_steps_keep_parameters_alike(ranks):
    expected, _ = alone("mlp", torch.float32, 12)
    results = ranks(2).run(private, 2, "mlp", torch.float32, 12, "replay")
    assert all(equal(results[0][0], state) for state, _ in results)
    assert distance(results[0][0], expected) < 2e-6


def test_a_thousand_steps_most_of_them_on_nothing(ranks):
    results = ranks(2).run(private, 2, "mlp", torch.float32, 1000, None, 0.01)
    assert equal(results[0][0], results[1][0])
    assert results[0][0].step == 1000


def _planted(size, fault):
    """Plant a fault, and return how far it takes the parameters."""
    finished, give = collectives.Summing.finished, collectives.Summing.give
    add_noise, parts = Plan.add_noise, distributed.LocalBatches.__iter__
    rank = mesh_of(size).get_local_rank("dp")

    def own_noise(self, sums, sensitivity, *, key, step, member=0):
        return add_noise(self, sums, sensitivity, key=key, step=step, member=rank)

    def noise_before(self, name, value):
        give(self, name, value + rank)

    def noise_on_one(self, sums, sensitivity, **given):
        return add_noise(self, sums, sensitivity, **given) if rank else sums

    def summed_twice(self, tensors):
        found = finished(self, tensors)
        for each in found.values():
            torch.distributed.all_reduce(each)
        return found

    def not_summed(self, tensors):
        finished(self, tensors)
        return tensors

    def same_part(self):
        for batch in self._sampler:
            yield batch[: len(batch) // size]

    try:
        if fault in ("own_noise", "noise_on_one"):
            Plan.add_noise = locals()[fault]
        elif fault == "same_part":
            distributed.LocalBatches.__iter__ = same_part
        elif fault == "noise_before":
            collectives.Summing.give = noise_before
        elif fault is not None:
            collectives.Summing.finished = locals()[fault]
        state, _ = private(size, "mlp", torch.float32, 3)
        return state
    finally:
        collectives.Summing.finished, collectives.Summing.give = finished, give
        Plan.add_noise, distributed.LocalBatches.__iter__ = add_noise, parts


FAULTS = ["own_noise", "noise_on_one", "noise_before", "summed_twice", "not_summed"]


@pytest.mark.parametrize("fault", [None, *FAULTS, "same_part"])
def test_planted_faults_show(ranks, fault):
    expected, _ = alone("mlp", torch.float32, 3)
    states = ranks(2).run(_planted, 2, fault)
    seen = max(distance(state, expected) for state in states)
    assert seen > 1e-3 if fault else seen < 1e-6


def test_noise_is_one_draw_of_the_planned_size(some):
    """The same bits, however many ranks add it."""
    plan, tx = plan_of(1, 0.05, 2.0), optim.sgd(1.0)
    loss, params, buffers, (x, y) = problem("language", torch.float64)
    state = TrainState.create(tx, params, buffers, seed=1)
    alone = private_step(loss, tx, plan)(state, x[:0], y[:0])[0].params
    for found in some.run(_one_step, some.size, plan):
        assert all(torch.equal(found[name], alone[name]) for name in alone)
    moved = torch.cat([(alone[n] - params[n]).flatten() for n in params])
    planned = 2.0 * plan.max_norm / plan.expected_batch_size
    assert abs(moved.std().item() / planned - 1) < 0.1


def _one_step(size, plan):
    mesh, tx = mesh_of(size), optim.sgd(1.0)
    loss, params, buffers, (x, y) = problem("language", torch.float64)
    step = data_parallel(private_step(loss, tx, plan), mesh)
    state = TrainState.create(tx, params, buffers, seed=1)
    return step(state, x[:0], y[:0])[0].params


def _trained(size, compiled):
    mesh = mesh_of(size)
    rank = mesh.get_local_rank("dp")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    tx = optim.adam(0.01)
    step = plain = train_step(loss, tx)
    if compiled:
        step = vgrad.compile(step)
    step = data_parallel(step, mesh)
    state = expected = TrainState.create(tx, params, buffers, seed=1)
    own = slice(16 // size * rank, 16 // size * (rank + 1))
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("error", vgrad.CompileWarning)
            state, metrics = step(state, x[own], y[own])
        expected, told = plain(expected, x, y)
    torch.testing.assert_close(metrics["loss"], told["loss"])
    with pytest.raises(ValueError, match=r"as many samples on every rank.*\[8, 7"):
        step(state, x[: 8 - rank], y[: 8 - rank])
    return state.params, distance(state, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_plain_steps_take_the_mean_over_ranks(some, compiled):
    results = some.run(_trained, some.size, compiled)
    for params, error in results:
        assert error < 1e-6
        assert all(torch.equal(params[name], results[0][0][name]) for name in params)


def _mean(size, form):
    mesh, tx = mesh_of(size), optim.sgd(0.1, momentum=0.9)
    rank = mesh.get_local_rank("dp")
    loss, params, buffers, (x, y) = problem("language", torch.float64, 13)
    step = plain = train_step(loss, tx)
    if form == "replay":
        step = vgrad.compile(step, batch_sizes=(8, 16), fallback="error")
    step = data_parallel(step, mesh)
    state = expected = TrainState.create(tx, params, buffers, seed=1)
    if form == "shards":
        state = TrainState.create(tx, distributed.shard(params, mesh), buffers, seed=1)
    # One rank has most of the samples, the last one none.
    cuts = [0, 2, *[13] * (size - 1)]
    for _ in range(3):
        own = slice(cuts[rank], cuts[rank + 1])
        state, metrics = step(state, x[own], y[own])
        expected, told = plain(expected, x, y)
    torch.testing.assert_close(metrics["loss"], told["loss"])
    with pytest.raises(ValueError, match="expected a sample at least, got a batch of"):
        step(state, x[:0], y[:0])
    if form == "shards":
        state = state._replace(params=distributed.gather(state.params, mesh))
    return state.params, distance(state, expected)


@pytest.mark.parametrize("form", ["eager", "replay", "shards"])
def test_a_loss_of_one_sample_is_weighted_by_counts(some, form):
    results = some.run(_mean, some.size, form)
    for params, error in results:
        assert error < 1e-12
        assert all(torch.equal(params[name], results[0][0][name]) for name in params)


def _refused(size):
    mesh = mesh_of(size)
    rank = mesh.get_local_rank("dp")
    loss, params, buffers, (x, y) = problem("mlp", samples=SAMPLES)
    tx, plan = optim.sgd(0.1), plan_of(2)
    step = data_parallel(private_step(loss, tx, plan), mesh)
    other = TrainState.create(tx, params, buffers, seed=rank)
    with pytest.raises(RankError, match="expected the same key on all ranks"):
        step(other, x, y)
    state = TrainState.create(tx, params, buffers, seed=1)
    changed = {name: value + rank for name, value in params.items()}
    with pytest.raises(RankError, match="expected the same state on all ranks"):
        step(state._replace(params=changed), x, y)
    step(state, x[:3], y[:3])
    with pytest.raises(RankError, match="expected the same state on all ranks"):
        step(state._replace(params=changed), x[:3], y[:3])
    own = data_parallel(private_step(loss, tx, plan_of(2 + rank)), mesh)
    with pytest.raises(RankError, match="expected the same plan on all ranks"):
        own(state, x, y)
    with pytest.raises(ValueError, match="at most the 40 samples of the plan's data"):
        step(state, x, y)
    late = state._replace(step=torch.tensor(2))
    with pytest.raises(RuntimeError, match="fewer than the 2 steps that the plan"):
        step(late, x[:3], y[:3])
    wrong = (x, y[:3]) if rank else (x, y)
    expected = (ValueError, "tensors of one batch") if rank else (RankError, "rank 1 s")
    with pytest.raises(expected[0], match=expected[1]):
        step(state, *wrong)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    state = TrainState.create(tx, params, buffers, seed=1)
    state = state._replace(params={n: torch.ones_like(p) for n, p in params.items()})
    with pytest.raises(ValueError, match="that leaves buffers as they are, got one"):
        data_parallel(train_step(loss, tx), mesh)(state, x, y)


def test_what_would_part_the_ranks_is_refused(ranks):
    ranks(2).run(_refused, 2)


def test_the_whole_batch_is_the_plan_s_own_draw(some):
    plan = plan_of(9)
    for part in some.run(_drawn, some.size):
        assert len(part) == 9
    parts = some.run(_drawn, some.size)
    for step in range(9):
        whole = sorted(index for part in parts for index in part[step])
        state = TrainState.create(optim.sgd(0.1), {"w": torch.ones(1)}, {}, seed=5)
        assert whole == plan.sample(key=state.key, step=step).tolist()


def _drawn(size):
    state = TrainState.create(optim.sgd(0.1), {"w": torch.ones(1)}, {}, seed=5)
    return list(distributed.local_batches(plan_of(9).sampler(state), mesh_of(size)))


def _masks(size):
    mesh = mesh_of(size)
    tx = optim.sgd(0.1)

    def loss(params, buffers, x):
        return (params["w"] * x).sum(), torch.rand(3)

    state = TrainState.create(tx, {"w": torch.ones(1)}, {}, seed=4)
    step = data_parallel(train_step(loss, tx, has_aux=True), mesh)
    return step(state, torch.ones(2))[1]["aux"]


def test_plain_steps_draw_other_numbers_on_other_ranks(ranks):
    first, second = ranks(2).run(_masks, 2)
    assert not torch.equal(first, second)


def _after(mesh, shards, folder):
    """Take steps under a plan and under one after it; return the steps' parameters."""
    loss, params, buffers, data = problem("mlp", torch.float64, SAMPLES)
    first, second, tx = plan_of(2), plan_of(2, 0.4, 1.5), optim.sgd(0.1)
    both = second.after(first, 2)
    if shards:
        params = distributed.shard(params, mesh)
    state = TrainState.create(tx, params, buffers, seed=5)
    for plan in (first, both):
        step = private_step(loss, tx, plan)
        batches = plan.sampler(state)
        if mesh is not None:
            step = data_parallel(step, mesh)
            batches = distributed.local_batches(batches, mesh)
        for rows in batches:
            state, _ = step(state, *(each[rows] for each in data))
        assert torch.equal(state.plan_digest, plan.digest)
        if plan is first:
            vgrad.training.save(folder, state, mesh)
            state = vgrad.training.load(folder, state.fork(), mesh)
            wrong = private_step(loss, tx, second)
            if mesh is not None:
                wrong = data_parallel(wrong, mesh)
            with pytest.raises(
                ValueError, match="got one that has spent under another"
            ):
                wrong(state, *(each[:0] for each in data))
    return distributed.gather(state.params, mesh)


def _after_on_ranks(size, shards, folder):
    return _after(mesh_of(size), shards, folder)


@pytest.mark.parametrize("shards", [False, True])
def test_another_plan_is_refused_on_all_ranks_unless_it_counts_both(
    ranks, shards, tmp_path
):
    expected = _after(None, False, tmp_path / "one")
    for found in ranks(2).run(_after_on_ranks, 2, shards, str(tmp_path / "two")):
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each)

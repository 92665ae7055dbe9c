"""Persons and groups as units of privacy, against loops over their samples."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import vgrad
from tests import oracle, streams
from tests.dp import runs
from tests.dp.runs import KEY, data, first, functional, grads, net
from tests.losses import every_strategy
from vgrad import clipped_grad, optim, per_sample_grad
from vgrad.dp import PrivateGradients, Units, unit_loader, unit_loss
from vgrad.training import TrainState, private_step

IDS = [7, 7, 3, 7, 7, 9, 3, 7, 1, 1, 1, 9, 7, 2, 8, 8, 8, 8, 3, 5]
ROWS = {name: [row for row, other in enumerate(IDS) if other == name] for name in IDS}
"""Units in the order of their first samples: the dictionary has it."""

COUNT = 3
PLAN = runs.plan(len(ROWS), 0.6, 0.4, steps=12, samples_per_unit=COUNT)


def own_key(plan=PLAN):
    return bytes(plan._subkey(KEY).tolist())


def chosen(unit, step, plan=PLAN):
    """Return the samples of a unit as the documents say: the least numbers of some."""
    rows = ROWS[unit]
    if len(rows) <= COUNT:
        return rows
    place = "unit", step, unit
    numbers = streams.filled(len(rows), lambda g, n: g.random(n), own_key(plan), *place)
    return [rows[i] for i in sorted(np.argsort(numbers)[:COUNT])]


def units_of(step, plan=PLAN):
    """Return the samples of each unit of a batch."""
    numbers = plan.sample(key=KEY, step=step).tolist()
    return [chosen([*ROWS][number], step, plan) for number in numbers]


def of_units(model, drawn, bound=PLAN.max_norm, expected=PLAN.expected_batch_size):
    """Clip the gradient of the mean loss of each unit, and divide the sum."""
    total = {}
    for rows in drawn:
        found = oracle.model_gradients(model, runs.loss, data()[rows], len(rows))
        mean = {name: each.mean(0, keepdim=True) for name, each in found.items()}
        for name, each in oracle.clipped(mean, bound).items():
            total[name] = total.get(name, 0) + each / expected
    return total


# Losses of units.


def ragged():
    """Return units of one to three samples, filled with samples of other units."""
    x = torch.randn(4, COUNT, 6, dtype=torch.float64)
    y = torch.randint(3, (4, COUNT))
    sizes = torch.tensor([3, 1, 2, 3])
    return x, y, torch.arange(COUNT) < sizes.unsqueeze(1)


@every_strategy
@pytest.mark.parametrize("single", [False, True])
def test_the_loss_of_a_unit_is_the_mean_over_its_samples(single, strategy):
    model = net()
    loss, params, buffers = functional(model)
    x, y, present = ragged()
    own = (lambda *args: loss(*args)) if single else loss  # runs once for each sample
    units = per_sample_grad(unit_loss(own), strategy=strategy)
    found = units(params, buffers, x, y, present)

    def run(net, x, y, present):
        rows = present[0].nonzero().flatten()
        losses = [F.cross_entropy(net(x[:, i]), y[:, i]) for i in rows]
        return sum(losses) / len(losses)

    expected = oracle.model_gradients(model, run, (x, y, present), 4)
    oracle.assert_exact(found, expected)


def test_a_unit_is_clipped_once():
    model = net()
    loss, params, buffers = functional(model)
    x, y, present = ragged()
    clipped = clipped_grad(unit_loss(loss), max_norm=0.2, strategy="recorded")
    found = clipped(params, buffers, x, y, present)
    assert found.losses.shape == (4,)
    expected = per_sample_grad(unit_loss(loss))(params, buffers, x, y, present)
    oracle.assert_exact(found.grads, oracle.clipped(expected, 0.2))
    assert clipped.sensitivity.value == 0.2


# Which samples are drawn.


def test_units_are_numbered_as_their_first_samples_are():
    units = Units(torch.tensor(IDS))
    assert len(units) == len(ROWS) == 7
    numbers = [units.drawn(i, 20, key=KEY, step=0).rows for i in range(7)]
    assert numbers == [tuple(rows) for rows in ROWS.values()]
    assert units.chosen == [*range(20)]


def test_the_sampler_draws_units_and_of_each_some_samples():
    state = SimpleNamespace(key=KEY, step=torch.tensor(2))
    batches = list(PLAN.sampler(state, units=IDS))
    assert len(batches) == PLAN.steps - 2
    for step, batch in enumerate(batches, start=2):
        assert [[*unit.rows] for unit in batch] == units_of(step)
    again = list(PLAN.sampler(state, units=Units(np.array(IDS))))
    assert again == batches


def test_samples_of_a_unit_depend_on_no_other_unit():
    """A unit more, or another order of units, leaves the samples of the rest."""
    place = {"key": KEY, "step": 5}
    before = Units(IDS).drawn(0, COUNT, **place).rows
    assert Units([*IDS, 6, 6, 6, 6]).drawn(0, COUNT, **place).rows == before
    # Two more samples of another unit in front.
    later = Units([3, 3, *IDS]).drawn(1, COUNT, **place).rows
    assert tuple(row - 2 for row in later) == before
    # Other units, and other steps, have others.
    drawn = Units([f"u{name}" for name in IDS])
    rows = {drawn.drawn(0, COUNT, key=KEY, step=step).rows for step in range(40)}
    assert len(rows) > 10


def test_each_sample_of_a_unit_is_drawn_equally_often():
    units, counts = Units(IDS), np.zeros(20)
    for step in range(3000):
        counts[[*units.drawn(0, COUNT, key=KEY, step=step).rows]] += 1
    rows = ROWS[7]
    mean = 3000 * COUNT / len(rows)
    deviation = math.sqrt(mean * (1 - COUNT / len(rows)))
    assert (abs(counts[rows] - mean) < 4 * deviation).all()
    assert counts.sum() == counts[rows].sum() == 3000 * COUNT


# In steps.


def test_a_private_step_takes_batches_of_units():
    loss, params, buffers = functional(net())
    tx = optim.sgd(1.0)
    step = private_step(loss, tx, PLAN, strategy="recorded")
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    sampler = PLAN.sampler(state, units=IDS)
    seen = 0
    for number, batch in enumerate(unit_loader(data(), sampler, COUNT)):
        x, _, present = batch
        drawn = units_of(number)
        assert present.sum(1).tolist() == [len(rows) for rows in drawn]
        for row, rows in enumerate(drawn):
            assert torch.equal(x[row, : len(rows)], data().tensors[0][rows])
            filling = data().tensors[0][rows[:1]].expand(COUNT - len(rows), -1)
            assert torch.equal(x[row, len(rows) :], filling)
        new, metrics = step(state, *batch)
        expected = of_units(model_at(state.params), drawn)
        change = {n: state.params[n] - new.params[n] for n in new.params}
        if drawn:
            oracle.assert_exact(change, expected, tolerance=1e-9)
        assert metrics["samples"] == len(drawn)
        state, seen = new, seen + len(drawn)
    assert seen


def model_at(params):
    model = net()
    model.load_state_dict(params)
    return model


@pytest.mark.parametrize("physical", [None, 1, 2])
def test_private_gradients_are_those_of_units(physical):
    model = net()
    private = runs.private(PLAN, model, data(), units=IDS, physical_batch_size=physical)
    steps = 0
    for x, y in private.loader:
        assert x.shape[1:] == (COUNT, 6)
        step = private.step
        private.backward(x, y)
        if private.ready:
            drawn, steps = units_of(step), steps + 1
            if drawn:
                oracle.assert_exact(grads(model), of_units(model, drawn))
    assert steps == PLAN.steps_per_epoch == 2


def test_a_captured_step_fills_batches_of_units_up():
    loss, params, buffers = functional(net())
    tx = optim.sgd(1.0)
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    plain = private_step(loss, tx, PLAN)
    compiled = vgrad.compile(private_step(loss, tx, PLAN), backend="replay")
    ours, theirs = state, state
    for batch in unit_loader(data(), PLAN.sampler(state, units=IDS), COUNT):
        ours, _ = compiled(ours, *batch)
        theirs, _ = plain(theirs, *batch)
    oracle.assert_exact(ours.params, theirs.params)
    assert {report.backend for report in compiled.reports()} == {"replay"}


def test_augmented_samples_of_units_are_averaged_twice():
    model = net()
    private = runs.private(
        PLAN, model, data(), units=IDS, augment=lambda item: item, augmentations=2
    )
    drawn = units_of(0)
    batch = first(private)
    assert batch[0].shape == (len(drawn), COUNT, 2, 6)
    private.backward(*batch)
    oracle.assert_exact(grads(model), of_units(model, drawn))


def test_a_budget_counts_units():
    budget = {"epsilon": 3.0, "delta": 1e-2, "epochs": 2, "batch_size": 2}
    run = {"max_norm": 1.0, "units": IDS, "samples_per_unit": 2, "key": KEY}
    private = PrivateGradients(net(), F.cross_entropy, data(), **budget, **run)
    plan = private.plan
    assert (plan.dataset_size, plan.samples_per_unit) == (7, 2)
    assert plan.sampling_rate == 2 / 7
    assert plan.neighbours == "add_or_remove_one"
    owners = [[name] for name in IDS]
    own = {**run, "units": owners, "samples_per_unit": 1}
    private = PrivateGradients(net(), F.cross_entropy, data(), **budget, **own)
    assert private.plan.neighbours == "fixed_graph"
    assert private.plan.dataset_size == 7


# Several owners of a sample.

# google-deepmind/jax_privacy 8967688, tests/_multi_owner_test.py: owners of samples,
# the most owners, and the samples or their number.
CHOSEN = {
    "test_single_owner_examples": ([[0]] * 3 + [[1]] * 3, None, 2),
    "test_disjoint_users_selects_all": ([[0], [1], [2]], None, 3),
    "test_max_degree_boundary": ([[0], [1], [2, 3], [4, 5]], 1, [0, 1]),
    "test_max_degree_boundary of two": ([[0], [1], [2, 3], [4, 5]], 2, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_samples_of_several_owners_are_chosen_as_jax_privacy_does(name):
    owners, most, expected = CHOSEN[name]
    units = Units(owners, most_owners=most)
    assert units.several_owners
    if isinstance(expected, int):
        assert len(units) == expected
    else:
        assert units.chosen == expected


def test_samples_of_few_owners_come_first():
    assert Units([[1, 2], [1], [2], [3, 4]]).chosen == [1, 2, 3]
    assert Units([["a", "b"], ["b", "c", "d"], ["c"]]).chosen == [0, 2]


def test_no_owner_occurs_twice_and_no_sample_could_be_added():
    generator = np.random.default_rng(0)
    for most in (None, 1, 2, 3):
        owners = [
            sorted({*generator.integers(30, size=generator.integers(1, 5)).tolist()})
            for _ in range(100)
        ]
        chosen = Units(owners, most_owners=most).chosen
        used = [owner for row in chosen for owner in owners[row]]
        assert len(used) == len({*used})
        for row in {*range(100)} - {*chosen}:
            fits = len(owners[row]) <= (most or 100)
            assert not fits or not {*used}.isdisjoint(owners[row])


# Refusals.


def test_other_units_than_the_plans_are_refused():
    state = SimpleNamespace(key=KEY, step=torch.tensor(0))
    plain = runs.plan(20, 0.5)
    with pytest.raises(ValueError, match=r"got samples_per_unit alone.*units=ids"):
        PLAN.sampler(state)
    with pytest.raises(ValueError, match=r"got units alone.*samples_per_unit=k"):
        plain.sampler(state, units=IDS)
    with pytest.raises(ValueError, match=r"for 6 units, got one for 7"):
        PLAN.sampler(state, units=IDS[:-1])
    with pytest.raises(ValueError, match=r"got samples_per_unit alone"):
        runs.private(PLAN, net(), data())
    with pytest.raises(ValueError, match=r"each of the 20 samples .*got 19"):
        runs.private(PLAN, net(), data(), units=IDS[:-1])
    with pytest.raises(ValueError, match="a plan in their place, got both"):
        runs.private(PLAN, net(), data(), units=IDS, samples_per_unit=2)


def test_more_samples_of_an_owner_would_need_an_account_of_groups():
    state = SimpleNamespace(key=KEY, step=torch.tensor(0))
    owners = [[name] for name in IDS]
    plan = runs.plan(7, 0.5, samples_per_unit=2)
    with pytest.raises(ValueError, match="several owners.*account of groups"):
        plan.sampler(state, units=owners)
    one = runs.plan(7, 0.5, samples_per_unit=1, neighbours="fixed_graph")
    assert len(list(one.sampler(state, units=owners))) == one.steps
    with pytest.raises(ValueError, match="one owner, and a plan of 'fixed_graph'"):
        one.sampler(state, units=IDS)


def test_loaders_that_split_units_are_refused():
    loss, params, buffers = functional(net())
    tx = optim.sgd(1.0)
    step = private_step(loss, tx, PLAN)
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    x, y = data().tensors
    batch = x[:6].view(2, 3, 6), y[:6].view(2, 3), torch.ones(2, 3, dtype=torch.bool)
    step(state, *batch)
    for wrong in (
        (x[:2], y[:2]),
        batch[:2],
        (x[:6], y[:6], torch.ones(6, dtype=torch.bool)),
        (batch[0][:, :2], batch[1][:, :2], batch[2][:, :2]),
        (*batch[:2], torch.ones(2, 3)),
        (batch[0], batch[1][:, 0], batch[2]),
    ):
        with pytest.raises(ValueError, match=r"whole units of 3.*unit_loader"):
            step(state, *wrong)
    with pytest.raises(ValueError, match="expected a loss without aux"):
        private_step(loss, tx, PLAN, has_aux=True)
    # The data set itself has no such index.
    sampler = PLAN.sampler(state, units=IDS)
    with pytest.raises((TypeError, IndexError)):
        list(DataLoader(data(), batch_sampler=sampler))
    private = runs.private(PLAN, net(), data(), units=IDS)
    x, y = first(private)
    with pytest.raises(ValueError, match="whole units of 3"):
        private.backward(x.flatten(1), y)

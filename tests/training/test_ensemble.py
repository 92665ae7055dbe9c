"""Members trained together are what each of them becomes alone."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import losses
from tests.ensemble.test_contract import normed
from tests.examples import examples
from tests.optim.optimizers import each_list, every
from tests.optim.problems import double, member, random_gradients, stacked
from tests.optim.problems import train as train_one
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.ensemble import for_members, share, stack
from vgrad.precision import DynamicLossScale, StaticLossScale
from vgrad.training import (
    EarlyStopping,
    EnsembleState,
    TrainState,
    ensemble_train_step,
    train_step,
)

E = 3
FIRST = ["0.*"]
SGD = optim.sgd(0.1)
every_strategy = pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])


def mlp(p=0.0):
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3)
    ).double()


def encoder():
    """A transformer that reads tokens."""
    body = losses.CASES["transformer"].model()
    return nn.Sequential(nn.Embedding(9, 8), *body).double()


randn = partial(torch.randn, dtype=torch.float64)
MODELS = {
    "mlp": (mlp, lambda size: randn(*size, 4)),
    "normed": (lambda: normed().double(), lambda size: randn(*size, 2, 6, 6)),
    "encoder": (encoder, lambda size: torch.randint(9, (*size, 5))),
}


def begun(tx, name="mlp", own=False, make=None, shared=(), seed=None, **options):
    """Models, a step of all of them, its first state, and five batches of five."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    models = [(make or model)() for _ in range(E)]
    fmodel, params, buffers = stack(models)
    size = (E, 5) if own else (5,)
    data = [(inputs(size), torch.randint(3, size)) for _ in range(5)]
    if shared:
        params, buffers = share(params, buffers, shared)
    loss, dims = vgrad.batch_loss(fmodel, F.cross_entropy), 0 if own else None
    step = ensemble_train_step(loss, tx, in_dims=dims, shared=shared, **options)
    state = EnsembleState.create(tx, params, buffers, shared=shared, seed=seed)
    return models, step, state, data


def without_one(state):
    """Let the second member rest."""
    return state._replace(active=torch.tensor([True, False, True]))


def train(step, state, data, steps):
    """Run steps over the batches in turn; return the state and all losses `[T, E]`."""
    values = []
    for number in range(steps):
        state, metrics = step(state, *data[number % len(data)])
        values.append(metrics["loss"])
    return state, torch.stack(values)


def alone(models, txs, data, steps, own=False):
    """The separate runs: `train_step` for each model; states and losses `[T, E]`."""
    runs = []
    for i, (model, tx) in enumerate(zip(models, txs, strict=True)):
        fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        step = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
        state = TrainState.create(tx, params, buffers)
        batches = [(x[i], y[i]) for x, y in data] if own else data
        runs.append(train(step, state, batches, steps))
    return [state for state, _ in runs], torch.stack([x for _, x in runs], 1)


def entries(models):
    """The state of modules, stacked."""
    return stacked([dict(model.state_dict()) for model in models])


def assert_members_are(state, states):
    assert_exact(tuple(state[:2]), stacked([tuple(each[:2]) for each in states]))


RATES = [0.003, 0.01, 0.03]
BETAS = [(0.9, 0.999), (0.8, 0.99), (0.5, 0.9)]
DECAYS = [0.0, 0.1, 0.01]
ADAMS = for_members(optim.adam, lr=double(RATES))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "hybrid") for name in MODELS]
    + [("mlp", "vmap"), ("normed", "loop"), ("encoder", "loop")],
)
def test_fifty_steps_together_are_fifty_steps_alone(name, strategy):
    own, betas = name != "encoder", tuple(double(BETAS).mT)
    numbers = {"lr": double(RATES), "betas": betas, "weight_decay": double(DECAYS)}
    # The gradient of a bias of keys is rounding, to be kept small.
    make = partial(optim.adamw, eps=1e-5)
    tx = for_members(make, **numbers)
    models, step, state, data = begun(tx, name, own, strategy=strategy)
    state, losses = train(step, state, data, 50)
    rows = zip(RATES, BETAS, DECAYS, strict=True)
    txs = [make(lr=lr, betas=b, weight_decay=decay) for lr, b, decay in rows]
    states, expected = alone(models, txs, data, 50, own)
    assert_exact(losses, expected)
    assert losses[-5:].mean() < losses[:5].mean()
    assert_members_are(state, states)
    assert int(state.step) == 50


@every
def test_every_optimizer_runs_for_each_member_by_itself(case):
    """Norms, counters and factors are those of one member, whatever the numbers."""
    start, loss = case.problem()
    starts = [random_gradients(start, seed=seed) for seed in range(E)]
    tx = for_members(case.make, **each_list(double, case.numbers))
    step = ensemble_train_step(lambda params, buffers: loss(params), tx)
    state = EnsembleState.create(tx, stacked(starts), {})
    for _ in range(8):
        state, _ = step(state)
    for i in range(E):
        expected, last = train_one(case.tx(i), starts[i], loss, 8)
        assert_exact(member(state.params, i), expected)
        if all(pytree.tree_leaves(case.of(i))):  # the number zero needs no state
            assert_exact(member(state.optimizer.members, i), last, 1e-9)


def test_members_of_scalars_and_gradients_that_are_none():
    make = lambda lr: optim.chain(optim.clip_by_global_norm(lr), optim.sgd(lr))  # noqa: E731
    shapes = {"scalar": (E,), "cube": (E, 1, 2, 3), "none": (E, 2)}
    params = {name: randn(*shape) for name, shape in shapes.items()}
    grads = {name: randn(*shape) for name, shape in shapes.items()} | {"none": None}
    tx = for_members(make, lr=double(RATES))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert list(updates) == list(grads)
    assert updates.pop("none") is None
    del grads["none"]
    for i, rate in enumerate(RATES):
        one, mine = make(rate), member(grads, i)
        expected, _ = one.update(mine, one.init(mine))
        assert_exact(member(updates, i), expected, 1e-12)


# Members that rest, or whose gradients are not finite.


def test_members_that_are_not_active_stay_as_they_are():
    models, step, state, data = begun(ADAMS, "normed")
    before, _ = train(step, state, data, 5)
    state, _ = train(step, without_one(before), data, 5)
    txs = [optim.adam(rate) for rate in RATES]
    states, _ = alone(models, txs, data, 10)
    states[1] = alone(models, txs, data, 5)[0][1]
    assert_members_are(state, states)
    assert_exact(member(tuple(state[:3]), 1), member(tuple(before[:3]), 1), 0)
    assert state.active.tolist() == [True, False, True]
    assert int(state.step) == 10


def test_a_member_that_is_not_active_is_not_skipped_and_keeps_its_loss_scale():
    scale = DynamicLossScale(2.0**10, period=1)
    _, step, state, data = begun(SGD, own=True, loss_scale=scale)
    x, y = data[0]
    x[1] = torch.nan
    state, metrics = step(without_one(state), x, y)
    assert metrics["skipped"].tolist() == [0, 0, 0]
    assert metrics["loss"].isnan().tolist() == [False, True, False]
    assert state.loss_scale.loss_scale.tolist() == [2.0**11, 2.0**10, 2.0**11]


def test_a_parameter_without_entries_trains_and_is_skipped():
    def loss(params, buffers, x):
        return (params["w"] @ x).sum() + params["empty"].sum()

    params, x = {"w": torch.ones(E, 2), "empty": torch.ones(E, 0)}, torch.ones(E, 2)
    x[1] = torch.nan
    state = EnsembleState.create(SGD, params, {})
    state, metrics = ensemble_train_step(loss, SGD, in_dims=0)(state, x)
    assert metrics["skipped"].tolist() == [0, 1, 0]
    assert state.params["w"].isfinite().all()


@given(
    values=st.lists(
        st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, float("nan"), float("inf")])] * 3),
        max_size=8,
    ),
    patience=st.integers(1, 3),
    min_delta=st.sampled_from([0.0, 0.4]),
)
@examples(60)
def test_early_stopping_counts_values_that_are_no_better(values, patience, min_delta):
    stopping = EarlyStopping.create(3, patience=patience, min_delta=min_delta)
    best, waited = [float("inf")] * 3, [0] * 3
    for row in values:
        stopping = stopping.update(torch.tensor(row))
        for i, value in enumerate(row):
            if waited[i] < patience and value < best[i] - min_delta:
                best[i], waited[i] = value, 0
            else:
                waited[i] += 1
        assert stopping.active.tolist() == [each < patience for each in waited]
        assert stopping.best.tolist() == best
    assert all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(stopping))


# Shared entries.


def shared_by_torch(models, data, steps, make, active=(0, 1, 2)):
    """One optimizer of torch for all, of the sum of the members' losses."""
    for model in models[1:]:
        model[0] = models[0][0]
    unique = {id(p): p for i in active for p in models[i].parameters()}
    optimizer = make(list(unique.values()))
    for number in range(steps):
        x, y = data[number % len(data)]
        optimizer.zero_grad()
        sum(F.cross_entropy(models[i](x), y) for i in active).backward()
        optimizer.step()
    found = entries(models)
    return {n: v[0] if n.startswith("0.") else v for n, v in found.items()}


@every_strategy
@pytest.mark.parametrize("name", ["mlp", "normed"])
def test_what_members_share_follows_the_sum_of_their_losses(name, strategy):
    tx, options = optim.adamw(0.01), {"strategy": strategy, "shared": FIRST}
    models, step, state, data = begun(tx, name, **options)
    state, _ = train(step, state, data, 20)
    make = partial(torch.optim.AdamW, lr=0.01)
    expected = shared_by_torch(models, data, 20, make)
    assert_exact({**state.params, **state.buffers}, expected)


def test_what_members_share_may_have_an_optimizer_of_its_own():
    rates, trunk = [0.1, 0.2, 0.3], optim.sgd(0.05, momentum=0.9)
    tx = for_members(optim.sgd, lr=double(rates), shared=FIRST, shared_tx=trunk)
    models, step, state, data = begun(tx, shared=FIRST)
    state, _ = train(step, state, data, 10)

    def make(parameters):
        heads = [[*model[3].parameters()] for model in models]
        taken = {id(each) for head in heads for each in head}
        first = [p for p in parameters if id(p) not in taken]
        groups = [{"params": first, "momentum": 0.9}]
        groups += [{"params": heads[i], "lr": rates[i]} for i in range(E)]
        return torch.optim.SGD(groups, lr=0.05)

    assert_exact(state.params, shared_by_torch(models, data, 10, make))


@every_strategy
@pytest.mark.parametrize("bad", [False, True])
def test_members_that_are_not_active_give_nothing_to_what_is_shared(strategy, bad):
    """Not even a NaN, which zero times a loss would."""
    models, step, start, data = begun(SGD, strategy=strategy, shared=FIRST)
    if bad:
        start.params["3.weight"] = start.params["3.weight"].clone()
        start.params["3.weight"][1] = float("nan")
    start = without_one(start)
    state, losses = train(step, start, data, 10)
    make = partial(torch.optim.SGD, lr=0.1)
    for key, expected in shared_by_torch(models, data, 10, make, (0, 2)).items():
        value, whole = state.params[key], key.startswith("0.")
        if not whole:
            assert_exact(value[1], start.params[key][1], 0)
        rows = slice(None) if whole else [0, 2]
        assert_exact(value[rows], expected[rows])
    assert losses.isnan().all(0).tolist() == [False, True, False]
    off = start._replace(active=torch.zeros(E, dtype=torch.bool))
    new, _ = step(off, *data[0])
    assert_exact(new.params, start.params, 0)


def test_a_shared_gradient_that_is_not_finite_is_left_out():
    _, step, state, data = begun(optim.adam(0.1), own=True, shared=FIRST)
    state, _ = step(state, *data[0])
    x, y = data[1]
    x[1] = float("nan")
    new, metrics = step(state, x, y)
    assert metrics["skipped"].tolist() == [0, 1, 0]
    assert_exact(new.optimizer.shared, state.optimizer.shared, 0)
    for key, value in state.params.items():
        if key.startswith("0."):
            assert_exact(new.params[key], value, 0)
        else:
            moved = (new.params[key] != value).flatten(1).any(1)
            assert moved.tolist() == [True, False, True]


def positions():
    """A constant that all members share, and a trunk that is frozen."""
    model = losses.Net(
        lambda self, x: self.head(torch.tanh(self.trunk(x)) + self.shift),
        trunk=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )
    model.register_buffer("shift", torch.arange(4.0))
    return model.double()


@every_strategy
@pytest.mark.parametrize("scale", [None, StaticLossScale(4.0)])
def test_shared_buffers_and_frozen_trunks_stay_without_a_member_axis(strategy, scale):
    models, _, _, data = begun(SGD, make=positions)
    patterns, tx = ["trunk.*", "shift"], optim.adam(0.01)
    fmodel, *entries = stack(models)
    params, buffers = vgrad.freeze(*share(*entries, patterns), ["trunk.*"])
    options = {"strategy": strategy, "shared": patterns, "loss_scale": scale}
    step = ensemble_train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx, **options)
    state = EnsembleState.create(tx, params, buffers, shared=patterns)
    state, found = train(step, state, data, 5)
    assert_exact(state.buffers, buffers, 0)
    for model in models:
        model.trunk = models[0].trunk
        model.trunk.requires_grad_(False)
    states, expected = alone(models, [tx] * E, data, 5)
    assert_exact(found, expected)
    assert_exact(state.params, stacked([each.params for each in states]))


# Random numbers, and optimizers of members.


COPIES = [copy.copy, copy.deepcopy, lambda tx: tx._replace(donated=None)]
COPIES += [lambda tx: type(tx)(*tx), lambda tx: tx._make(tx)]


@pytest.mark.parametrize("again", COPIES)
def test_an_optimizer_of_members_stays_one_however_it_is_copied(again):
    copied = again(for_members(SGD, shared=FIRST))
    _, step, start, data = begun(copied, shared=FIRST)
    state, _ = step(start, *data[0])
    assert state.params["0.weight"].shape == start.params["0.weight"].shape

"""Members that are copied go on as deep copies of modules and optimizers do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.ensemble.test_contract import named, normed
from tests.oracle import assert_exact
from vgrad import dp, optim, training
from vgrad.ensemble import share, stack, take
from vgrad.precision import DynamicLossScale
from vgrad.training import EarlyStopping, EnsembleState, TrainState
from vgrad.tree import tensors

RATES, CHOSEN = [0.003, 0.01, 0.03], [2, 0, 2, 1]


def begun(make, tx, loss_scale=None, **options):
    torch.manual_seed(0)
    models = [make().double() for _ in range(3)]
    fmodel, params, buffers = stack(copy.deepcopy(models))
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    step = training.ensemble_train_step(loss, tx, **options)
    state = EnsembleState.create(tx, params, buffers, loss_scale=loss_scale)
    return models, step, state


@pytest.mark.parametrize("way", ["loop", "hybrid", "compiled", "donated"])
def test_copies_go_on_as_copied_modules_and_optimizers(way, tmp_path):
    tx = vgrad.for_members(optim.inject_hyperparams(optim.adam, lr=0.1))
    strategy = way if way == "loop" else "hybrid"
    options = {"in_dims": 0, "strategy": strategy, "donate": way == "donated"}
    models, step, state = begun(normed, tx, **options)
    step = vgrad.compile(step, fallback="error") if way == "compiled" else step
    rates = optim.with_hyperparams(state.optimizer.members, lr=torch.tensor(RATES))
    state = state._replace(optimizer=state.optimizer._replace(members=rates))
    rates = rates.hyperparams["lr"].tolist()
    pairs = [
        (model, torch.optim.Adam(model.parameters(), lr=rate))
        for model, rate in zip(models, rates, strict=True)
    ]
    for turn in range(6):
        if turn == 3:
            before, whole = state, copy.deepcopy(state)
            state = take(state, torch.tensor(CHOSEN))
            training.save(tmp_path / "state", state)
            state = training.load(tmp_path / "state", take(before, [0] * 4))
            pairs = [copy.deepcopy(pairs[i]) for i in CHOSEN]
        x = torch.randn(len(pairs), 4, 2, 6, 6, dtype=torch.float64)
        y = torch.randint(3, (len(pairs), 4))
        state, _ = step(state, x, y)
        for (model, optimizer), own, target in zip(pairs, x, y, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(own), target).backward()
            optimizer.step()
    models = [model for model, _ in pairs]
    expected = named(models), named(models, "buffers")
    assert_exact((state.params, state.buffers), expected)
    assert_exact(before, whole, 0)  # not even a donated step has written into it


def dropped():
    return nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.Linear(9, 3))


@pytest.mark.parametrize("strategy", ["loop", "hybrid"])
def test_a_copy_draws_its_own_numbers_and_its_parent_goes_on(strategy):
    _, step, state = begun(dropped, optim.sgd(0.1), strategy=strategy)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    copies = take(state, [0, 1, 1, 0])
    for _ in range(2):
        state, expected = step(state, x, y)
        copies, found = step(copies, x, y)
        assert_exact(found["loss"][:2], expected["loss"][:2], 0)
        assert len({*found["loss"].tolist(), *expected["loss"].tolist()}) == 5


def test_scales_limits_and_shared_entries_are_of_the_members():
    tx, shared = optim.adam(0.1), ["0.weight"]
    *_, state = begun(dropped, tx, DynamicLossScale())
    state.loss_scale.loss_scale.copy_(torch.tensor([1.0, 2.0, 4.0]))
    taken = take(state._replace(active=torch.tensor([True, False, True])), CHOSEN)
    assert taken.loss_scale.loss_scale.tolist() == [4, 1, 4, 2]
    assert taken.active.tolist() == [True, True, True, False]
    state = EnsembleState.create(tx, *share(*state[:2], shared), shared=shared)
    stopping = EarlyStopping.create(3, patience=1).update(torch.tensor([1.0, 2.0, 3.0]))
    taken, limits = take((state, stopping), CHOSEN, shared=shared)
    square = {"0.weight": torch.ones(3, 3)}  # as many rows as members
    alike = EnsembleState.create(tx, {**state.params, **square}, {}, shared=shared)
    with pytest.raises(ValueError, match="all shared entries, got none for '0.weight'"):
        take((alike, stopping), CHOSEN)
    assert limits.best.tolist() == [3, 1, 3, 2]
    assert_exact(taken.params["2.weight"], state.params["2.weight"][CHOSEN], 0)
    for old, new in zip(tensors(state), tensors(taken), strict=True):
        assert old.data_ptr() != new.data_ptr()
    assert_exact(taken.params["0.weight"], state.params["0.weight"], 0)
    assert_exact(taken.optimizer.shared, state.optimizer.shared, 0)


def test_private_copies_need_a_fork_or_their_noise_cancels():
    fields = {"sampling_rate": 0.2, "dataset_size": 10, "steps": 9, "delta": 1e-5}
    plan = dp.Plan(noise_multiplier=2.0, max_norm=1.0, **fields)
    tx, w = optim.sgd(1.0), {"w": torch.zeros(5, dtype=torch.float64)}
    loss = lambda params, buffers, x: params["w"] @ x  # noqa: E731
    step = training.private_step(loss, tx, plan)
    states = [TrainState.create(tx, w, {}) for _ in range(2)]
    with pytest.raises(ValueError, match=r"take\(states, \[1, 0, 1\].*fork\(\)"):
        take(states, [1, 0, 1])
    [one] = take(states, [1])
    batches = torch.eye(5, dtype=torch.float64)[:2].unsqueeze(1)
    exact = (batches[1] - batches[0])[0] / 2  # of the private data
    for other, cancels in ((states[1], True), (states[1].fork(), False)):
        pairs = zip((one, other), batches, strict=True)
        left, right = (step(state, x)[0].params["w"] for state, x in pairs)
        assert bool((left - right - exact).abs().max() < 1e-6) is cancels

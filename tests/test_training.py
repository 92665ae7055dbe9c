import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import cases, oracle
from vgrad.training import TrainState, private_step, train_step


def plan(**changes):
    fields = {
        "dataset_size": 100,
        "sampling_rate": 0.08,
        "noise_multiplier": 1.0,
        "max_norm": 0.5,
        "steps": 5,
        "delta": 1e-5,
    }
    return vgrad.dp.Plan(**{**fields, **changes})


def build(name="mlp", seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    case = cases.CASES[name]
    model = case.model().to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x, y = case.batch(6)
    return model, fmodel, case.criterion, params, buffers, x.to(dtype), y


def test_a_train_step_equals_torch():
    model, fmodel, criterion, params, buffers, x, y = build()
    tx = vgrad.optim.sgd(0.1, momentum=0.9)
    step = train_step(vgrad.batch_loss(fmodel, criterion), tx)
    state = TrainState.create(tx, params, buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        state, metrics = step(state, x, y)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"], loss.detach())
    assert int(state.step) == 4
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state.params[name], parameter.detach())


def test_a_train_step_updates_buffers_and_draws_dropout_from_the_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    tx = vgrad.optim.sgd(0.1)
    step = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
    state = TrainState.create(tx, params, buffers)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    outside = torch.get_rng_state()
    one, _ = step(state, x, y)
    again, _ = step(state, x, y)
    following, _ = step(one, x, y)
    assert torch.equal(torch.get_rng_state(), outside)
    for left, right in zip(
        pytree.tree_leaves(one), pytree.tree_leaves(again), strict=True
    ):
        assert torch.equal(left, right)
    assert not torch.equal(one.generators["cpu"], following.generators["cpu"])
    assert int(one.buffers["0.num_batches_tracked"]) == 1
    assert not state.buffers["0.running_mean"].any()


def test_a_private_step_without_noise_is_clipped_sgd():
    model, fmodel, criterion, params, buffers, x, y = build()
    chosen = plan(noise_multiplier=0.0)
    tx = vgrad.optim.sgd(0.1)
    step = private_step(vgrad.sample_loss(fmodel, criterion), tx, chosen)
    state, metrics = step(TrainState.create(tx, params, buffers), x, y)
    grads = oracle.model_gradients(model, cases.CASES["mlp"].run, (x, y), 6)
    expected = {
        name: params[name] - 0.1 * total / 8
        for name, total in oracle.clipped(grads, 0.5).items()
    }
    assert oracle.error(state.params, expected) < 1e-12
    assert int(metrics["samples"]) == 6
    torch.testing.assert_close(metrics["loss"], criterion(model(x), y).detach())


def test_noise_has_the_level_of_the_plan_and_is_drawn_once_a_step():
    def loss(params, buffers, x):
        return (params["w"] * x).sum() * 0

    chosen = plan(noise_multiplier=2.0, max_norm=0.5)
    tx = vgrad.optim.sgd(1.0)
    params = {"w": torch.zeros(200_000)}
    deviation = 2.0 * 0.5 / chosen.expected_batch_size
    for chunk_size in (None, 1):
        step = private_step(loss, tx, chosen, chunk_size=chunk_size)
        state = TrainState.create(tx, params, {}, seed=1)
        new, _ = step(state, torch.zeros(4, 1))
        found = float(new.params["w"].std())
        assert found == pytest.approx(deviation, rel=0.006)


def test_steps_do_not_depend_on_the_physical_batch():
    _, fmodel, criterion, params, buffers, x, y = build()
    tx = vgrad.optim.adam(0.01)
    loss = vgrad.sample_loss(fmodel, criterion)
    results = []
    for chunk_size in (None, 1, 4):
        step = private_step(loss, tx, plan(), chunk_size=chunk_size)
        state, _ = step(TrainState.create(tx, params, buffers, seed=3), x, y)
        results.append(state.params)
    for other in results[1:]:
        assert oracle.error(other, results[0]) < 1e-12


def test_an_empty_batch_is_a_step_of_pure_noise():
    _, fmodel, criterion, params, buffers, x, y = build()
    tx = vgrad.optim.sgd(0.1)
    step = private_step(vgrad.sample_loss(fmodel, criterion), tx, plan())
    state, metrics = step(TrainState.create(tx, params, buffers), x[:0], y[:0])
    assert int(state.step) == 1
    assert int(metrics["samples"]) == 0
    assert all(not torch.equal(state.params[n], params[n]) for n in params)


def test_a_run_cannot_outlast_its_plan():
    _, fmodel, criterion, params, buffers, x, y = build()
    tx = vgrad.optim.sgd(0.1)
    step = private_step(vgrad.sample_loss(fmodel, criterion), tx, plan(steps=2))
    state = TrainState.create(tx, params, buffers)
    for _ in range(2):
        state, _ = step(state, x, y)
    with pytest.raises(RuntimeError, match="fewer than the 2 steps"):
        step(state, x, y)


def test_noise_differs_between_runs_unless_a_seed_says_otherwise():
    tx = vgrad.optim.sgd(0.1)
    params = {"w": torch.zeros(3)}
    first, second = (TrainState.create(tx, params, {}) for _ in range(2))
    assert not torch.equal(first.generators["noise"], second.generators["noise"])
    first, second = (TrainState.create(tx, params, {}, seed=1) for _ in range(2))
    assert torch.equal(first.generators["noise"], second.generators["noise"])


def test_steps_continue_from_a_copied_state_with_the_same_numbers():
    _, fmodel, criterion, params, buffers, x, y = build()
    tx = vgrad.optim.adam(0.01)
    step = private_step(vgrad.sample_loss(fmodel, criterion), tx, plan())
    state = TrainState.create(tx, params, buffers)
    state, _ = step(state, x, y)
    kept = pytree.tree_map(torch.clone, copy.deepcopy(state))
    state, _ = step(state, x, y)
    resumed, _ = step(kept, x, y)
    for left, right in zip(
        pytree.tree_leaves(state), pytree.tree_leaves(resumed), strict=True
    ):
        assert torch.equal(left, right)


def test_results_keep_no_graph():
    _, fmodel, criterion, params, buffers, x, y = build()
    tx = vgrad.optim.sgd(0.1)
    state = TrainState.create(tx, params, buffers)
    private = private_step(vgrad.sample_loss(fmodel, criterion), tx, plan())
    plain = train_step(vgrad.batch_loss(fmodel, criterion), tx)
    for step in (private, plain):
        new, metrics = step(state, x, y)
        leaves = pytree.tree_leaves((new, metrics))
        assert not any(leaf.requires_grad for leaf in leaves)


def test_a_state_without_parameters_is_refused():
    with pytest.raises(ValueError, match="at least one parameter"):
        TrainState.create(vgrad.optim.sgd(0.1), {}, {})

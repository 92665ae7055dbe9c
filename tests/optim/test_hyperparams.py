"""Hyperparameters that the state holds, and rates that fall on a plateau."""

import math
from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.optim.problems import double, gradients, leaves_of, perceptron, train, values
from tests.oracle import assert_exact
from vgrad.optim import (
    adam,
    adamw,
    chain,
    clip_by_value,
    inject_hyperparams,
    reduce_on_plateau,
    sgd,
    step,
    with_hyperparams,
)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(sgd, nesterov=True), dict(lr=0.1, momentum=0.9)),
        (adam, dict(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)),
        (adamw, dict(lr=lambda count: 0.1 * 0.9 ** count.double())),
        (adamw, dict(lr=lambda count: 0.1, weight_decay=1)),
    ],
)
def test_injected_hyperparameters_give_the_numbers_of_the_optimizer(make, options):
    params, loss = perceptron()
    found, state = train(inject_hyperparams(make, **options), params, loss, 10)
    assert_exact(found, train(make(**options), params, loss, 10)[0], 1e-12)
    assert {v.dtype for v in pytree.tree_leaves(state.hyperparams)} == {torch.float64}


def test_a_tensor_given_as_a_rate_is_copied_and_keeps_its_gradient():
    rate = double(0.1).requires_grad_()
    params, loss = perceptron()
    tx = inject_hyperparams(sgd, lr=rate)
    held = tx.init(params).hyperparams["lr"]
    assert held.data_ptr() != rate.data_ptr()
    found, _ = train(tx, params, loss, 3)
    (slope,) = torch.autograd.grad(loss(found), rate)
    assert slope < 0


def test_a_rate_can_be_read_and_set():
    params, loss = perceptron()
    tx = inject_hyperparams(adam, lr=0.1, betas=(0.9, 0.999))
    found, state = train(tx, params, loss, 3)
    assert state.hyperparams["lr"].item() == 0.1
    state = with_hyperparams(state, lr=0.01, betas=(0.5, 0.9))
    grads = gradients(loss, found)
    expected, _ = step(adam(0.01, betas=(0.5, 0.9)), grads, state.inner, found)
    found, state = step(tx, grads, state, found)
    assert_exact(found, expected, 1e-12)
    assert state.hyperparams["lr"].item() == 0.01


def test_the_rate_of_a_schedule_is_that_of_the_last_step():
    params, loss = perceptron()
    tx = inject_hyperparams(sgd, lr=lambda count: 1.0 / (count + 1))
    assert tx.init(params).hyperparams["lr"].item() == 1.0
    _, state = train(tx, params, loss, 4)
    assert state.hyperparams["lr"].item() == 0.25


def test_members_take_their_rates_from_a_stacked_state():
    params, loss = perceptron()
    tx = inject_hyperparams(sgd, lr=0.1)
    many = {key: torch.stack([p, p]) for key, p in params.items()}
    grads = gradients(loss, params)
    state = torch.vmap(tx.init)(many)
    assert with_hyperparams(state, lr=0.5).hyperparams["lr"].tolist() == [0.5, 0.5]
    rates = torch.tensor([0.25, 0.75])
    state = with_hyperparams(state, lr=rates)
    found, _ = torch.vmap(lambda s, p: step(tx, grads, s, p))(state, many)
    for member, rate in enumerate(rates.tolist()):
        expected, _ = step(sgd(rate), grads, sgd(rate).init(params), params)
        assert_exact({key: p[member] for key, p in found.items()}, expected, 1e-12)


# Rates that fall on a plateau.

CURVES = {
    "falling": [1.0 / k for k in range(1, 31)],
    "flat": [1.0] * 30,
    "noisy": [1 + math.sin(3.0 * k) / k for k in range(1, 31)],
    "bad": [1.0, math.nan, math.inf, -math.inf, math.nan] * 6,
    "creeping": [1 - 3e-5 * k for k in range(30)],
    "negative": [-1.0 - 0.01 * (k % 7) for k in range(30)],
}
PLATEAUS = [
    dict(patience=2),
    dict(patience=0, factor=0.5),
    dict(patience=1, cooldown=3, min_lr=0.01, factor=0.3),
    dict(patience=2, mode="max", threshold=0.01),
    dict(patience=2, threshold_mode="abs", threshold=0.05),
    dict(patience=2, mode="max", threshold_mode="abs", threshold=0.05),
    dict(patience=0, factor=0.5, eps=0.02),
    dict(patience=0, factor=0.5, min_lr=0.3),
    dict(),
]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("options", PLATEAUS)
def test_rates_fall_where_those_of_torch_fall(curve, options):
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    expected = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    tx, observe = reduce_on_plateau(sgd, 0.1, **options)
    state = tx.init({"w": torch.zeros(1)})
    for value in CURVES[curve]:
        expected.step(value)
        state = observe(state, value)
        assert state.rate.item() == pytest.approx(expected.get_last_lr()[0], rel=1e-15)


def test_steps_take_the_rate_of_the_plateau():
    params, loss = perceptron()
    leaves = leaves_of(params)
    optimizer = torch.optim.AdamW(list(leaves.values()), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    tx, observe = reduce_on_plateau(adamw, 0.1, patience=1)
    tx = chain(clip_by_value(1e6), tx)
    found, state = params, tx.init(params)
    for count in range(20):
        optimizer.zero_grad()
        loss(leaves).backward()
        optimizer.step()
        plateau.step(1.0)
        found, state = step(tx, gradients(loss, found), state, found)
        state = observe(state, 1.0 if count % 2 else double(1.0))
    assert_exact(found, values(leaves), 1e-12)
    assert state[1].rate < 1e-6


@pytest.mark.parametrize("inside", [True, False])
def test_members_have_plateaus_of_their_own(inside):
    tx, observe = reduce_on_plateau(sgd, 0.1, patience=1, cooldown=1)
    state = torch.vmap(tx.init)({"w": torch.zeros(3, 2)})
    alone = [tx.init({"w": torch.zeros(2)}) for _ in range(3)]
    for k in range(8):
        values = [1.0 / (k + 1), 1.0, 1.0 - k % 2]
        observed = torch.vmap(observe) if inside else observe
        state = observed(state, double(values))
        alone = [observe(s, v) for s, v in zip(alone, values, strict=True)]
    assert state.rate.tolist() == [s.rate.item() for s in alone]
    assert len(set(state.rate.tolist())) > 1


def test_members_may_differ_in_the_options_of_a_plateau():
    patience, factor = torch.tensor([0, 2]), double([0.5, 0.1])

    def run(patience, factor):
        tx, observe = reduce_on_plateau(sgd, 0.1, patience=patience, factor=factor)
        state = tx.init({"w": torch.zeros(2)})
        for _ in range(4):
            state = observe(state, 1.0)
        return state.rate

    found = torch.vmap(run)(patience, factor)
    expected = [run(0, 0.5).item(), run(2, 0.1).item()]
    torch.testing.assert_close(found, double(expected), rtol=1e-15, atol=0)


@pytest.mark.slow
def test_an_observation_compiles_and_keeps_no_graph():
    tx, observe = reduce_on_plateau(sgd, 0.1, patience=0)
    state = tx.init({"w": torch.zeros(2)})
    torch.compiler.reset()
    compiled = torch.compile(observe, fullgraph=True, backend="aot_eager")
    value = torch.tensor(1.0, requires_grad=True)
    assert_exact(compiled(state, value), observe(state, value), 0)
    leaves = pytree.tree_leaves(observe(state, value))
    assert not any(leaf.requires_grad for leaf in leaves)

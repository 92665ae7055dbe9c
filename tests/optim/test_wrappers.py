"""Transformations around others: groups, skipped steps, averages, hyperparameters."""

import math

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.utils import _pytree as pytree

from tests.optim.problems import (
    double,
    go_on,
    gradients,
    leaves_of,
    member,
    perceptron,
    random_gradients,
    stacked,
    train,
    train_with_torch,
    values,
)
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.optim import adam, adamw, chain, multi_steps, partition, scale, sgd, step

PARAMS, LOSS = perceptron()
GRADS = gradients(LOSS, PARAMS)


def steps(tx, grads, params=None, state=None):
    """Return the updates of each of some gradients, and the last state."""
    params = params or {name: torch.zeros_like(g) for name, g in grads[0].items()}
    state, updates = state or tx.init(params), []
    for grad in grads:
        update, state = tx.update(grad, state, params)
        updates.append(update)
    return updates, state


# Groups.


def groups(kind, rows, **options):
    """Make an optimizer of torch, in which each parameter has options of its own."""

    def make(leaves):
        pairs = zip(leaves, rows, strict=True)
        return kind([{"params": [leaf], **row} for leaf, row in pairs], **options)

    return make


@pytest.mark.parametrize(("tx", "make"), [
    (partition({"*.bias": adam(0.1), "1.*": adam(0.03), "*": adam(0.01)}),
     groups(torch.optim.Adam, [dict(lr=0.01), dict(lr=0.1), dict(lr=0.03)])),
    (chain(optim.add_decayed_weights(0.1, mask=("0.weight", "1.*")), sgd(0.1)),
     groups(torch.optim.SGD, [dict(weight_decay=0.1), {}, dict(weight_decay=0.1)],
            lr=0.1)),
])  # fmt: skip
def test_partitions_and_masks_have_the_numbers_of_parameter_groups(tx, make):
    expected = train_with_torch(make, PARAMS, LOSS, 20)
    assert_exact(train(tx, PARAMS, LOSS, 20)[0], expected, 1e-12)


def test_the_first_selection_that_matches_wins():
    params = {"a.weight": torch.ones(1), "a.bias": torch.ones(1), "b": torch.ones(1)}
    first, second = ("b", "*.bias"), lambda name: name.startswith("a.")
    tx = partition({first: scale(1.0), second: scale(2.0), "*": scale(3.0)})
    updates, _ = tx.update(params, tx.init(params))
    found = [(key, update.item()) for key, update in updates.items()]
    assert found == [("a.weight", 2.0), ("a.bias", 1.0), ("b", 1.0)]


@pytest.mark.parametrize("tx", [
    chain(optim.set_to_zero(["0.*"]), adamw(0.1)),
    partition({"0.*": optim.set_to_zero(), "*": adamw(0.1)}),
])  # fmt: skip
def test_kept_parameters_stay_the_same_tensors_without_moments_or_decay(tx):
    found, state = train(tx, PARAMS, LOSS, 3)
    assert found["0.weight"] is PARAMS["0.weight"]
    assert found["0.bias"] is PARAMS["0.bias"]
    moments = state[1][0].slots["exp_avg"]
    assert not moments.get("0.bias", torch.zeros(1)).any()
    last = {"1.weight": PARAMS["1.weight"]}
    expected, _ = train(adamw(0.1), last, lambda p: LOSS({**PARAMS, **p}), 3)
    assert torch.equal(found["1.weight"], expected["1.weight"])


# Steps that are left out.


def poisoned(grads, value=math.nan):
    return {**grads, "0.bias": torch.full_like(grads["0.bias"], value)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    tx = optim.apply_if_finite(adamw(0.1), max_consecutive_errors=3)
    params, state = train(tx, PARAMS, LOSS, 2)
    grads = gradients(LOSS, params)
    found, new = step(tx, poisoned(grads, value), state, params)
    assert_exact((found, new.inner), (params, state.inner), 0)
    assert [int(n) for n in new[:3]] == [1, 1, False]
    found, new = step(tx, grads, new, found)
    expected = step(adamw(0.1), grads, state.inner, params)
    assert_exact((found, new.inner), expected, 0)
    assert [int(n) for n in new[:3]] == [0, 1, True]


def test_errors_in_a_row_are_let_through_after_the_last_that_is_allowed():
    tx = optim.apply_if_finite(sgd(0.1), max_consecutive_errors=2)
    bad = (True, True, False, True, True, True, True)
    grads = [poisoned(GRADS) if b else GRADS for b in bad]
    updates, state = steps(tx, grads, PARAMS)
    finite = [bool(update["0.bias"].isfinite().all()) for update in updates]
    assert finite == [True, True, True, True, True, False, False]
    assert (int(state.errors), int(state.total_errors)) == (4, 6)


# Accumulation.


@pytest.mark.parametrize("parts", [1, 3])
def test_steps_of_several_gradients_are_those_of_accumulated_training(parts):
    leaves = leaves_of(PARAMS)
    optimizer = torch.optim.AdamW(list(leaves.values()), lr=0.1)
    tx = multi_steps(adamw(0.1), parts)
    found, state = PARAMS, tx.init(PARAMS)
    for number in range(4):
        optimizer.zero_grad()
        for part in range(parts):
            grads = random_gradients(PARAMS, seed=parts * number + part)
            sum((leaves[k] * grads[k]).sum() / parts for k in leaves).backward()
            before = found
            found, state = step(tx, grads, state, found)
            if part < parts - 1:
                assert_exact(found, before, 0)
        optimizer.step()
        assert_exact(found, values(leaves), 1e-12)
    assert (int(state.count), int(state.inner[0].count)) == (0, 4)


def test_means_keep_what_half_precision_drops_and_none_waits_for_the_next_round():
    grads = [
        {"w": torch.tensor([256.0 if k == 0 else 1.0]).bfloat16()} for k in range(256)
    ]
    updates, _ = steps(multi_steps(scale(1.0), 256), grads)
    assert updates[-1]["w"].item() == (256 + 255) / 256
    numbers = (None, 4.0, 6.0, None, 2.0, 2.0)
    grads = [{"w": None if n is None else double([n])} for n in numbers]
    updates, _ = steps(multi_steps(scale(1.0), 2), grads, {"w": double([0.0])})
    found = [u["w"] if u["w"] is None else u["w"].item() for u in updates]
    assert found == [None, 2.0, 0.0, None, 0.0, 3.0 + 1.0 + 1.0]


# Averages.


def averaged_by_torch(count, **options):
    """Train with SGD and average with `AveragedModel`."""
    model = torch.nn.ParameterList(p.clone() for p in PARAMS.values())
    average = swa_utils.AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leaves = dict(zip(PARAMS, model, strict=True))
    for _ in range(count):
        go_on(optimizer, leaves, LOSS, 1)
        average.update_parameters(model)
    return values(dict(zip(PARAMS, average.module, strict=True)))


@pytest.mark.parametrize("count", [1, 2, 20])
@pytest.mark.parametrize("decay", [None, 0.0, 0.9, 0.999])
def test_averages_of_parameters_are_those_of_torch(decay, count):
    average, options = optim.polyak_average(), {}
    if decay is not None:
        average = optim.ema_parameters(decay)
        options["multi_avg_fn"] = swa_utils.get_ema_multi_avg_fn(decay)
    _, state = train(chain(sgd(0.1), average), PARAMS, LOSS, count)
    expected = averaged_by_torch(count, **options)
    assert_exact(optim.averaged_parameters(state), expected, 1e-12)


def test_a_mean_that_starts_late_is_that_of_the_steps_since():
    tx = chain(sgd(0.1), optim.polyak_average(start=3))
    path, state = [PARAMS], tx.init(PARAMS)
    for _ in range(8):
        moved, state = step(tx, gradients(LOSS, path[-1]), state, path[-1])
        path.append(moved)
        expected = {k: p.mean(0) for k, p in stacked(path[4:] or path[-1:]).items()}
        assert_exact(optim.averaged_parameters(state), expected, 1e-12)


def test_averages_are_found_wherever_they_are_and_keep_small_moves():
    inner = multi_steps(chain(adam(0.1), optim.ema_parameters(0.9)), 2)
    tx = optim.apply_if_finite(inner, max_consecutive_errors=1)
    _, state = train(tx, PARAMS, LOSS, 4)
    assert_exact(optim.averaged_parameters(state), state.inner.inner[1].slots["ax"], 0)

    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    tx = optim.ema_parameters(0.999)
    state = tx.init(params)
    for _ in range(2):
        params, state = step(tx, {"w": torch.full((1,), 0.5)}, state, params)
    expected = torch.tensor([1.5 + 0.001 * 0.5])
    torch.testing.assert_close(optim.averaged_parameters(state)["w"], expected)


@pytest.mark.parametrize("debias", [True, False])
def test_the_average_of_gradients_is_the_first_moment_of_adam(debias):
    grads = [random_gradients(PARAMS, seed=t) for t in range(10)]
    updates, _ = steps(chain(optim.ema(0.9, debias=debias), scale(-0.1)), grads)
    mean = {key: torch.zeros_like(p) for key, p in PARAMS.items()}
    for t, (grad, update) in enumerate(zip(grads, updates, strict=True), 1):
        mean = {key: 0.9 * mean[key] + 0.1 * grad[key] for key in PARAMS}
        bias = 1 - 0.9**t if debias else 1.0
        assert_exact(update, {k: -0.1 * m / bias for k, m in mean.items()}, 1e-12)


@pytest.mark.parametrize(("options", "period", "alpha"), [
    (dict(sync_period=1, slow_step_size=0.5), 1, 0.5),
    (dict(sync_period=3, slow_step_size=0.8), 3, 0.8),
    ({}, 5, 0.5),
])  # fmt: skip
def test_lookahead_follows_its_two_loops(options, period, alpha):
    tx = optim.lookahead(adam(0.1), **options)
    found, _ = train(tx, PARAMS, LOSS, 3 * period + 1)
    leaves, slow = leaves_of(PARAMS), values(PARAMS)
    optimizer = torch.optim.Adam(list(leaves.values()), lr=0.1)
    for count in range(1, 3 * period + 2):
        go_on(optimizer, leaves, LOSS, 1)
        if count % period == 0:
            for key, leaf in leaves.items():
                slow[key] += alpha * (leaf.detach() - slow[key])
                leaf.data.copy_(slow[key])
    assert_exact(found, values(leaves), 1e-12)


# Hyperparameters in the state.


def test_a_rate_can_be_read_and_set():
    tx = optim.inject_hyperparams(adam, lr=0.1, betas=(0.9, 0.999))
    params, state = train(tx, PARAMS, LOSS, 3)
    assert_exact(params, train(adam(0.1), PARAMS, LOSS, 3)[0], 1e-12)
    assert {v.dtype for v in pytree.tree_leaves(state.hyperparams)} == {torch.float64}
    assert state.hyperparams["lr"].item() == 0.1
    state, grads = optim.with_hyperparams(state, lr=0.01, betas=(0.5, 0.9)), GRADS
    expected, _ = step(adam(0.01, betas=(0.5, 0.9)), grads, state.inner, params)
    found, state = step(tx, grads, state, params)
    assert_exact(found, expected, 1e-12)
    assert state.hyperparams["lr"].item() == 0.01
    tx = optim.inject_hyperparams(sgd, lr=lambda count: 1.0 / (count + 1))
    assert tx.init(PARAMS).hyperparams["lr"].item() == 1.0
    assert train(tx, PARAMS, LOSS, 4)[1].hyperparams["lr"].item() == 0.25


def test_members_take_their_rates_from_a_stacked_state():
    tx, many = optim.inject_hyperparams(sgd, lr=0.1), stacked([PARAMS] * 2)
    state = torch.vmap(tx.init)(many)
    same = optim.with_hyperparams(state, lr=0.5)
    assert same.hyperparams["lr"].tolist() == [0.5, 0.5]
    state = optim.with_hyperparams(state, lr=torch.tensor([0.25, 0.75]))
    found, _ = torch.vmap(lambda s, p: step(tx, GRADS, s, p))(state, many)
    for index, rate in enumerate([0.25, 0.75]):
        expected, _ = step(sgd(rate), GRADS, sgd(rate).init(PARAMS), PARAMS)
        assert_exact(member(found, index), expected, 1e-12)


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
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    expected = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    tx, observe = optim.reduce_on_plateau(sgd, 0.1, **options)
    state = tx.init({"w": torch.zeros(1)})
    for value in CURVES[curve]:
        expected.step(value)
        updates, state = tx.update({"w": torch.ones(1)}, observe(state, value))
        (rate,) = expected.get_last_lr()
        assert state.rate.item() == pytest.approx(rate, rel=1e-15)
        assert updates["w"].item() == pytest.approx(-rate, rel=1e-6)


@pytest.mark.parametrize("inside", [True, False])
def test_members_have_plateaus_of_their_own_inside_of_any_state(inside):
    tx, observe = optim.reduce_on_plateau(sgd, 0.1, patience=1, cooldown=1)
    tx = chain(scale(1.0), tx)
    state = torch.vmap(tx.init)({"w": torch.zeros(3, 2)})
    alone = [tx.init({"w": torch.zeros(2)}) for _ in range(3)]
    for k in range(8):
        numbers = [1.0 / (k + 1), 1.0, 1.0 - k % 2]
        observed = torch.vmap(observe) if inside else observe
        state = observed(state, double(numbers))
        alone = [observe(s, v) for s, v in zip(alone, numbers, strict=True)]
    assert state[1].rate.tolist() == [s[1].rate.item() for s in alone]
    assert len(set(state[1].rate.tolist())) > 1

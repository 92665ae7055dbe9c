"""Transformations around others: groups, skipped steps, averages, hyperparameters."""

import math
from functools import partial

import pytest
import torch
from torch.optim import swa_utils
from torch.utils import _pytree as pytree

from tests.optim.problems import (
    double,
    gradients,
    leaves_of,
    perceptron,
    random_gradients,
    train,
    train_with_torch,
    values,
)
from tests.oracle import assert_exact
from vgrad import optim
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

# Groups.


def adams(first, bias, second):
    rates = ((bias, 0.1), (second, 0.03), (first, 0.01))
    return torch.optim.Adam([{"params": [leaf], "lr": rate} for leaf, rate in rates])


def decayed_sgd(first, bias, second):
    groups = [{"params": [first, second], "weight_decay": 0.1}, {"params": [bias]}]
    return torch.optim.SGD(groups, lr=0.1)


ADAMS = {"*.bias": optim.adam(0.1), "1.*": optim.adam(0.03), "*": optim.adam(0.01)}
DECAY = optim.add_decayed_weights(0.1, mask=("0.weight", "1.*"))


@pytest.mark.parametrize(
    ("tx", "make"),
    [
        (optim.partition(ADAMS), adams),
        (optim.chain(DECAY, optim.sgd(0.1)), decayed_sgd),
    ],
)
def test_partitions_and_masks_have_the_numbers_of_parameter_groups(tx, make):
    params, loss = perceptron()
    found, _ = train(tx, params, loss, 20)
    expected = train_with_torch(lambda leaves: make(*leaves), params, loss, 20)
    assert_exact(found, expected, 1e-12)


def test_the_first_selection_that_matches_wins():
    params = {"a.weight": torch.ones(1), "a.bias": torch.ones(1), "b": torch.ones(1)}
    tx = optim.partition(
        {
            ("b", "*.bias"): optim.scale(1.0),
            (lambda name: name.startswith("a.")): optim.scale(2.0),
            "*": optim.scale(3.0),
        }
    )
    updates, _ = tx.update(params, tx.init(params))
    assert {key: u.item() for key, u in updates.items()} == {
        "a.weight": 2.0,
        "a.bias": 1.0,
        "b": 1.0,
    }
    assert list(updates) == list(params)


def test_a_mask_hides_all_but_its_names_from_the_inner_transformation():
    params = {"w": double([1.0]), "b": double([2.0])}
    seen = []

    def update(grads, state, params=None):
        seen.append((list(grads), list(params)))
        return {name: None for name in grads}, state

    inner = optim.trace(0.9)._replace(update=update)
    tx = optim.masked(inner, lambda name: name == "w")
    updates, state = tx.update(params, tx.init(params), params)
    assert seen == [(["w"], ["w"])]
    assert updates["w"] is None
    assert updates["b"] is params["b"]
    assert list(state.slots["momentum_buffer"]) == ["w"]


def test_kept_parameters_stay_the_same_tensors_without_moments_or_decay():
    params, loss = perceptron()
    tx = optim.chain(optim.set_to_zero(["0.*"]), optim.adamw(0.1))
    found, state = train(tx, params, loss, 3)
    assert found["0.weight"] is params["0.weight"]
    assert found["0.bias"] is params["0.bias"]
    assert not state[1][0].slots["exp_avg"]["0.bias"].any()

    def last(p):
        return loss({**params, "1.weight": p["1.weight"]})

    expected, _ = train(optim.adamw(0.1), {"1.weight": params["1.weight"]}, last, 3)
    assert torch.equal(found["1.weight"], expected["1.weight"])


def test_a_group_that_is_kept_needs_no_selection():
    params, loss = perceptron()
    tx = optim.partition({"0.*": optim.set_to_zero(), "*": optim.sgd(0.1)})
    found, _ = train(tx, params, loss, 1)
    assert found["0.weight"] is params["0.weight"]
    assert not torch.equal(found["1.weight"], params["1.weight"])


# Steps that are left out.


def poisoned(grads, value=math.nan):
    return {**grads, "0.bias": torch.full_like(grads["0.bias"], value)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    params, loss = perceptron()
    tx = optim.apply_if_finite(optim.adamw(0.1), max_consecutive_errors=3)
    params, state = train(tx, params, loss, 2)
    grads = poisoned(gradients(loss, params), value)
    found, new = optim.step(tx, grads, state, params)
    assert_exact((found, new.inner), (params, state.inner), 0)
    assert (int(new.errors), int(new.total_errors)) == (1, 1)
    assert not new.last_finite
    grads = gradients(loss, params)
    found, new = optim.step(tx, grads, new, found)
    expected, inner = optim.step(optim.adamw(0.1), grads, state.inner, params)
    assert_exact((found, new.inner), (expected, inner), 0)
    assert (int(new.errors), int(new.total_errors)) == (0, 1)
    assert new.last_finite


def test_errors_in_a_row_are_let_through_after_the_last_that_is_allowed():
    params, loss = perceptron()
    tx = optim.apply_if_finite(optim.sgd(0.1), max_consecutive_errors=2)
    grads, state = gradients(loss, params), tx.init(params)
    finite = []
    for bad in (True, True, False, True, True, True, True):
        given = poisoned(grads) if bad else grads
        updates, state = tx.update(given, state, params)
        finite.append(bool(updates["0.bias"].isfinite().all()))
    assert finite == [True, True, True, True, True, False, False]
    assert (int(state.errors), int(state.total_errors)) == (4, 6)


def test_one_members_error_skips_that_member_alone():
    params, loss = perceptron()
    tx = optim.apply_if_finite(optim.adam(0.1), max_consecutive_errors=3)
    grads = gradients(loss, params)
    stacked = {key: torch.stack([g, g, g]) for key, g in grads.items()}
    stacked["1.weight"][1, 0, 0] = math.inf
    many = {key: torch.stack([p, p, p]) for key, p in params.items()}
    state = torch.vmap(tx.init)(many)
    found, state = torch.vmap(partial(optim.step, tx))(stacked, state, many)
    expected, expected_state = optim.step(tx, grads, tx.init(params), params)
    assert state.errors.tolist() == [0, 1, 0]
    assert state.inner[1].count.tolist() == [1, 0, 1]
    for member in (0, 2):
        one = pytree.tree_map(lambda leaf, i=member: leaf[i], (found, state.inner))
        assert_exact(one, (expected, expected_state.inner), 0)
    one = pytree.tree_map(lambda leaf: leaf[1], (found, state.inner))
    assert_exact(one, (params, tx.init(params).inner), 0)


def test_a_step_that_was_left_out_has_finite_gradients():
    def result(rate):
        params = {"w": torch.tensor([1.0, 2.0])}
        tx = optim.apply_if_finite(optim.adam(rate), max_consecutive_errors=3)
        state = tx.init(params)
        for bad in (0.0, math.inf, 0.0):
            grads = {"w": params["w"] + bad}
            params, state = optim.step(tx, grads, state, params)
        return params["w"].sum()

    slope = torch.func.grad(result)(torch.tensor(0.1))
    torch.testing.assert_close(slope, torch.tensor(-4.0), rtol=0.05, atol=0)


# Accumulation.


@pytest.mark.parametrize("parts", [1, 3])
def test_steps_of_several_gradients_are_those_of_accumulated_training(parts):
    params, _ = perceptron()
    rounds = [
        [random_gradients(params, seed=parts * r + k) for k in range(parts)]
        for r in range(4)
    ]
    leaves = leaves_of(params)
    optimizer = torch.optim.AdamW(list(leaves.values()), lr=0.1)
    tx = optim.multi_steps(optim.adamw(0.1), parts)
    found, state = params, tx.init(params)
    for grads in rounds:
        optimizer.zero_grad()
        for part in grads:
            sum((leaves[k] * part[k]).sum() / parts for k in leaves).backward()
            before = found
            found, state = optim.step(tx, part, state, found)
            if part is not grads[-1]:
                assert_exact(found, before, 0)
        optimizer.step()
        assert_exact(found, values(leaves), 1e-12)
    assert int(state.count) == 0
    assert int(state.inner[0].count) == 4


def test_members_may_accumulate_different_numbers_of_gradients():
    params, _ = perceptron()
    grads = [random_gradients(params, seed=seed) for seed in range(6)]
    many = {key: torch.stack([p, p]) for key, p in params.items()}
    parts = torch.tensor([2, 3])
    state = torch.vmap(optim.multi_steps(optim.adam(0.1), 1).init)(many)
    for part in grads:
        many, state = torch.vmap(
            lambda k, state, params, part=part: optim.step(
                optim.multi_steps(optim.adam(0.1), k), part, state, params
            )
        )(parts, state, many)
    for member, k in enumerate(parts.tolist()):
        tx = optim.multi_steps(optim.adam(0.1), k)
        expected, alone = params, tx.init(params)
        for part in grads:
            expected, alone = optim.step(tx, part, alone, expected)
        assert_exact({key: p[member] for key, p in many.items()}, expected, 1e-12)


def test_the_mean_of_half_precision_gradients_keeps_what_half_precision_drops():
    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    tx = optim.multi_steps(optim.scale(1.0), 256)
    state = tx.init(params)
    for k in range(256):
        grads = {"w": torch.tensor([256.0 if k == 0 else 1.0], dtype=torch.bfloat16)}
        updates, state = tx.update(grads, state)
    assert updates["w"].item() == (256 + 255) / 256


def test_a_gradient_of_none_counts_as_zero_and_may_wait_for_the_next_round():
    params = {"w": double([0.0])}
    tx = optim.multi_steps(optim.scale(1.0), 2)
    state, updates = tx.init(params), []
    for value in (None, 4.0, 6.0, None, 2.0, 2.0):
        grads = {"w": None if value is None else double([value])}
        update, state = tx.update(grads, state)
        updates.append(update["w"] if update["w"] is None else update["w"].item())
    assert updates == [None, 2.0, 0.0, None, 0.0, 3.0 + 1.0 + 1.0]


# Averages.


def averaged_by_torch(params, loss, steps, **options):
    """Train with SGD and average with `AveragedModel`."""
    module = torch.nn.Module()
    for key, p in params.items():
        module.register_parameter(key.replace(".", "_"), torch.nn.Parameter(p.clone()))
    average = swa_utils.AveragedModel(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss({key: getattr(module, key.replace(".", "_")) for key in params}).backward()
        optimizer.step()
        average.update_parameters(module)
    found = dict(average.module.named_parameters())
    return {key: found[key.replace(".", "_")].detach() for key in params}


EMA = swa_utils.get_ema_multi_avg_fn


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize(
    ("average", "options"),
    [
        (optim.polyak_average(), {}),
        *(
            (optim.ema_parameters(decay), dict(multi_avg_fn=EMA(decay)))
            for decay in (0.0, 0.9, 0.999)
        ),
    ],
)
def test_averages_of_parameters_are_those_of_torch(average, options, steps):
    params, loss = perceptron()
    _, state = train(optim.chain(optim.sgd(0.1), average), params, loss, steps)
    expected = averaged_by_torch(params, loss, steps, **options)
    assert_exact(optim.averaged_parameters(state), expected, 1e-12)


def test_a_mean_that_starts_late_is_that_of_the_steps_since():
    params, loss = perceptron()
    tx = optim.chain(optim.sgd(0.1), optim.polyak_average(start=3))
    path, state = [params], tx.init(params)
    for _ in range(8):
        grads = gradients(loss, path[-1])
        moved, state = optim.step(tx, grads, state, path[-1])
        path.append(moved)
        since = path[4:] or path[-1:]
        expected = {key: torch.stack([p[key] for p in since]).mean(0) for key in params}
        assert_exact(optim.averaged_parameters(state), expected, 1e-12)


def test_averages_are_found_wherever_they_are():
    params, loss = perceptron()
    tx = optim.apply_if_finite(
        optim.multi_steps(optim.chain(optim.adam(0.1), optim.ema_parameters(0.9)), 2),
        max_consecutive_errors=1,
    )
    _, state = train(tx, params, loss, 4)
    assert_exact(optim.averaged_parameters(state), state.inner.inner[1].slots["ax"], 0)


def test_the_average_of_small_moves_is_not_lost_to_half_precision():
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    tx = optim.ema_parameters(0.999)
    state = tx.init(params)
    for _ in range(2):
        updates = {"w": torch.full((1,), 0.5)}
        params, state = optim.step(tx, updates, state, params)
    expected = torch.tensor([1.5 + 0.001 * 0.5])
    torch.testing.assert_close(optim.averaged_parameters(state)["w"], expected)


def test_the_average_of_gradients_is_the_first_moment_of_adam():
    params, _ = perceptron()
    tx = optim.chain(optim.ema(0.9), optim.scale(-0.1))
    raw = optim.chain(optim.ema(0.9, debias=False), optim.scale(-0.1))
    state, raw_state = tx.init(params), raw.init(params)
    mean = {key: torch.zeros_like(p) for key, p in params.items()}
    for t in range(1, 11):
        grads = random_gradients(params, seed=t)
        mean = {key: 0.9 * mean[key] + 0.1 * grads[key] for key in params}
        updates, state = tx.update(grads, state)
        plain, raw_state = raw.update(grads, raw_state)
        assert_exact(
            updates, {k: -0.1 * m / (1 - 0.9**t) for k, m in mean.items()}, 1e-12
        )
        assert_exact(plain, {k: -0.1 * m for k, m in mean.items()}, 1e-12)


@pytest.mark.parametrize(("period", "alpha"), [(1, 0.5), (3, 0.8), (5, 1.0)])
def test_lookahead_follows_its_two_loops(period, alpha):
    params, loss = perceptron()
    tx = optim.lookahead(optim.adam(0.1), sync_period=period, slow_step_size=alpha)
    found, _ = train(tx, params, loss, 3 * period + 1)
    leaves = leaves_of(params)
    optimizer = torch.optim.Adam(list(leaves.values()), lr=0.1)
    slow = {key: p.clone() for key, p in params.items()}
    for count in range(1, 3 * period + 2):
        optimizer.zero_grad()
        loss(leaves).backward()
        optimizer.step()
        if count % period == 0:
            for key, leaf in leaves.items():
                slow[key] += alpha * (leaf.detach() - slow[key])
                leaf.data.copy_(slow[key])
    assert_exact(found, values(leaves), 1e-12)


def test_the_defaults_of_lookahead_are_those_of_the_paper():
    params, loss = perceptron()
    found, state = train(optim.lookahead(optim.sgd(0.1)), params, loss, 5)
    fast, _ = train(optim.sgd(0.1), params, loss, 5)
    expected = {key: (params[key] + fast[key]) / 2 for key in params}
    assert_exact(found, expected, 1e-12)
    assert_exact(state.slow, expected, 1e-12)


# Hyperparameters in the state.


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

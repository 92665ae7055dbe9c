"""Wrappers, groups, averages, rates and noise, against torch and against formulas."""

import copy
import math
from functools import partial

import pytest
import torch
from torch.optim import swa_utils
from torch.utils import _pytree as pytree

from tests.optim.test_optim import (
    assert_close,
    assert_same_tree,
    double,
    gradients,
    perceptron,
    random_gradients,
    train,
    train_with_torch,
)
from vgrad.optim import (
    adam,
    adamw,
    adaptive_grad_clip,
    add_decayed_weights,
    add_noise,
    apply_if_finite,
    averaged_parameters,
    centralize,
    chain,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_value,
    ema,
    ema_parameters,
    inject_hyperparams,
    keep,
    lookahead,
    masked,
    multi_steps,
    partition,
    polyak_average,
    reduce_on_plateau,
    scale,
    scale_by_schedule,
    sgd,
    step,
    trace,
    with_hyperparams,
    zero_nans,
)
from vgrad.optim.noise import philox

# Each makes an optimizer from one hyperparameter around one.
CASES = {
    "clip_by_value": lambda h: chain(clip_by_value(0.1 * h), sgd(0.1)),
    "clip_by_global_norm": lambda h: chain(clip_by_global_norm(0.2 * h), sgd(0.1)),
    "clip_by_block_rms": lambda h: chain(clip_by_block_rms(0.1 * h), sgd(0.1)),
    "adaptive_grad_clip": lambda h: chain(adaptive_grad_clip(0.1 * h), sgd(0.1)),
    "centralize": lambda h: chain(centralize(), sgd(0.1 * h)),
    "zero_nans": lambda h: chain(zero_nans(), sgd(0.1 * h)),
    "scale": lambda h: scale(-0.1 * h),
    "scale_by_schedule": lambda h: scale_by_schedule(
        lambda t: -h * 0.1 / (t.double() + 1)
    ),
    "masked": lambda h: chain(masked(trace(0.5 * h), ["*.weight"]), sgd(0.1)),
    "decay mask": lambda h: chain(
        add_decayed_weights(0.1 * h, mask=["*.weight"]), sgd(0.1)
    ),
    "partition": lambda h: partition({"*.bias": sgd(0.1 * h), "*": adamw(0.1 * h)}),
    "keep": lambda h: chain(keep(("*.bias",)), adam(0.1 * h)),
    "apply_if_finite": lambda h: apply_if_finite(
        adam(0.1 * h), max_consecutive_errors=3
    ),
    "multi_steps": lambda h: multi_steps(adam(0.1 * h), 2),
    "ema": lambda h: chain(ema(0.5 * h), sgd(0.1)),
    "ema_parameters": lambda h: chain(sgd(0.1), ema_parameters(0.5 * h)),
    "polyak_average": lambda h: chain(sgd(0.1 * h), polyak_average(start=1)),
    "lookahead": lambda h: lookahead(adam(0.1), sync_period=2, slow_step_size=0.5 * h),
    "inject_hyperparams": lambda h: inject_hyperparams(
        adamw,
        lr=0.1 * h,
        betas=(0.5 * h, 0.9),
        weight_decay=lambda t: h / (t.double() + 1),
    ),
    "reduce_on_plateau": lambda h: reduce_on_plateau(adam, 0.1 * h)[0],
    "add_noise": lambda h: chain(add_noise(0.1 * h, 0.55 * h, seed=7), sgd(0.1)),
}
EVERY = pytest.mark.parametrize("name", CASES)
AVERAGES = ("ema_parameters", "polyak_average")


def outcome(name, params, state):
    """What a hyperparameter moves: the parameters, or their average."""
    return averaged_parameters(state) if name in AVERAGES else params


# What holds for all of them.


@EVERY
def test_members_train_as_they_do_alone(name):
    make = CASES[name]
    start, loss = perceptron()
    values = double([0.5, 1.0, 1.5])
    alone = [random_gradients(start, seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([m[key] for m in alone]) for key in start}
    state = torch.vmap(lambda h, params: make(h).init(params))(values, stacked)

    def one(h, params, state):
        return step(make(h), torch.func.grad(loss)(params), state, params)

    for _ in range(5):
        stacked, state = torch.vmap(one)(values, stacked, state)
    for member, params in enumerate(alone):
        found = pytree.tree_map(lambda leaf, i=member: leaf[i], (stacked, state))
        expected = train(make(values[member].item()), params, loss, 5)
        leaves, form = pytree.tree_flatten(found)
        others, other_form = pytree.tree_flatten(expected)
        assert form == other_form
        for a, b in zip(leaves, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@EVERY
def test_members_differ_by_the_hyperparameter(name):
    make = CASES[name]
    start, loss = perceptron()
    one = outcome(name, *train(make(0.5), start, loss, 3))
    other = outcome(name, *train(make(1.5), start, loss, 3))
    assert not torch.equal(one["1.weight"], other["1.weight"])


@EVERY
def test_members_whose_optimizers_are_made_inside_compile_to_one_graph(name):
    make = CASES[name]
    start, loss = perceptron()
    stacked = {key: torch.stack([p, 2 * p]) for key, p in start.items()}
    values = double([0.5, 1.5])
    state = torch.vmap(lambda h, params: make(h).init(params))(values, stacked)

    def one(h, params, state):
        return step(make(h), torch.func.grad(loss)(params), state, params)

    torch.compiler.reset()
    members = torch.vmap(one)
    compiled = torch.compile(members, fullgraph=True, backend="aot_eager")
    arguments = (values, stacked, state)
    assert_same_tree(compiled(*arguments), members(*arguments))


@pytest.mark.parametrize(
    "name",
    [
        "partition",
        "apply_if_finite",
        "multi_steps",
        "lookahead",
        "inject_hyperparams",
        "reduce_on_plateau",
        "add_noise",
    ],
)
def test_a_step_compiles_to_one_graph(name):
    tx = CASES[name](1.0)
    params, loss = perceptron()
    state, grads = tx.init(params), gradients(loss, params)
    torch.compiler.reset()
    compiled = torch.compile(partial(step, tx), fullgraph=True, backend="aot_eager")
    expected = (params, state)
    found = (params, state)
    for _ in range(2):
        found = compiled(grads, found[1], found[0])
        expected = step(tx, grads, expected[1], expected[0])
    assert_same_tree(found, expected)


@EVERY
def test_a_parameter_without_gradients_is_as_good_as_absent(name):
    tx = CASES[name](1.0)
    params, loss = perceptron()
    spare = {**params, "spare.weight": double([1.0, 2.0])}
    expected, found = params, spare
    expected_state, state = tx.init(params), tx.init(spare)
    for _ in range(3):
        grads = gradients(loss, expected)
        expected, expected_state = step(tx, grads, expected_state, expected)
        updates, _ = tx.update({**grads, "spare.weight": None}, state, found)
        assert updates["spare.weight"] is None
        found, state = step(tx, {**grads, "spare.weight": None}, state, found)
    assert found.pop("spare.weight") is spare["spare.weight"]
    assert_same_tree(found, expected)
    fresh = tx.init(spare)
    for tree, before in zip(dictionaries(state), dictionaries(fresh), strict=True):
        if "spare.weight" in tree:
            assert_same_tree(tree["spare.weight"], before["spare.weight"])


def dictionaries(state):
    """Every dictionary by parameter name that a state holds."""
    found = []
    pytree.tree_leaves(
        state, is_leaf=lambda n: isinstance(n, dict) and (found.append(n) or True)
    )
    return found


@EVERY
def test_half_precision_is_widened_and_nothing_else(name):
    tx = CASES[name](1.0)
    wide, _ = perceptron()
    params = {key: p.bfloat16() for key, p in wide.items()}
    grads = random_gradients(params, seed=1)
    updates, state = tx.update(grads, tx.init(params), params)
    exact = [pytree.tree_map(torch.Tensor.float, tree) for tree in (grads, params)]
    expected, expected_state = tx.update(exact[0], tx.init(exact[1]), exact[1])
    assert {u.dtype for u in updates.values() if u is not None} <= {torch.float32}
    given = {key: u for key, u in updates.items() if u is not None}
    assert_same_tree(given, {key: expected[key] for key in given})
    if name not in AVERAGES:
        # The average is that of the parameters after they were rounded.
        assert_same_tree(state, expected_state)
    found = pytree.tree_leaves(state)
    assert not any(leaf.dtype == torch.bfloat16 for leaf in found)
    assert {p.dtype for p in step(tx, grads, state, params)[0].values()} == {
        torch.bfloat16
    }


@EVERY
def test_inputs_stay_as_they_are(name):
    tx = CASES[name](1.0)
    params, loss = perceptron()
    params, state = train(tx, params, loss, 3)
    arguments = (gradients(loss, params), state, params)
    copies = copy.deepcopy(arguments)
    leaves = pytree.tree_leaves(arguments)
    versions = [leaf._version for leaf in leaves]
    first, second = step(tx, *arguments), step(tx, *arguments)
    assert [leaf._version for leaf in leaves] == versions
    assert_same_tree(arguments, copies)
    assert_same_tree(first, second)


@EVERY
def test_the_state_shares_no_memory_with_the_parameters(name):
    tx = CASES[name](1.0)
    params, _ = perceptron()
    owned = {p.data_ptr() for p in params.values()}
    assert not owned & {leaf.data_ptr() for leaf in pytree.tree_leaves(tx.init(params))}


@EVERY
def test_the_state_is_a_tree_of_tensors_that_survives_tree_map(name):
    tx = CASES[name](1.0)
    params, loss = perceptron()
    params, state = train(tx, params, loss, 3)
    assert all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(state))
    mapped = pytree.tree_map(torch.clone, state)
    grads = gradients(loss, params)
    assert_same_tree(step(tx, grads, mapped, params), step(tx, grads, state, params))


@EVERY
def test_no_value_is_read_and_state_lives_where_the_parameters_do(name):
    tx = CASES[name](1.0)
    start, _ = perceptron()
    params = {key: p.to("meta") for key, p in start.items()}
    results = step(tx, params, tx.init(params), params)
    assert {leaf.device.type for leaf in pytree.tree_leaves(results)} == {"meta"}


@EVERY
def test_an_empty_dictionary_is_a_model_without_parameters(name):
    tx = CASES[name](1.0)
    assert step(tx, {}, tx.init({}), {})[0] == {}


@EVERY
def test_gradients_through_training_match_finite_differences(name):
    make = CASES[name]
    start, loss = perceptron()

    def result(h, bias):
        params = {**start, "0.bias": bias}
        state = make(h).init(params)
        for _ in range(3):
            grads = torch.func.grad(loss)(params)
            params, state = step(make(h), grads, state, params)
        return loss(outcome(name, params, state))

    h, bias = double(0.9), start["0.bias"]
    by_h, by_bias = torch.func.grad(result, argnums=(0, 1))(h, bias)
    assert by_h != 0
    nudge = 1e-6
    expected = (result(h + nudge, bias) - result(h - nudge, bias)) / (2 * nudge)
    torch.testing.assert_close(by_h, expected, rtol=1e-5, atol=1e-9)
    for index, way in enumerate(nudge * torch.eye(len(bias)).double()):
        expected = (result(h, bias + way) - result(h, bias - way)) / (2 * nudge)
        torch.testing.assert_close(by_bias[index], expected, rtol=1e-5, atol=1e-8)


@EVERY
def test_gradients_through_training_are_finite_where_gradients_are_zero(name):
    make = CASES[name]
    zeros = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(2)}

    def result(h):
        params = zeros
        state = make(h).init(params)
        for _ in range(2):
            grads = {key: h * p for key, p in params.items()}
            params, state = step(make(h), grads, state, params)
        total = outcome(name, params, state)
        return sum(p.sum() for p in total.values())

    slope = torch.func.grad(result)
    assert slope(torch.tensor(0.9)).isfinite()
    assert torch.func.grad(slope)(torch.tensor(0.9)).isfinite()


# Groups.


def test_a_partition_has_the_numbers_of_parameter_groups():
    params, loss = perceptron()
    tx = partition({"*.bias": adam(0.1), "1.*": adam(0.03), "*": adam(0.01)})

    def make(leaves):
        first, bias, second = leaves
        return torch.optim.Adam(
            [
                {"params": [bias], "lr": 0.1},
                {"params": [second], "lr": 0.03},
                {"params": [first], "lr": 0.01},
            ]
        )

    found, _ = train(tx, params, loss, 20)
    assert_close(found, train_with_torch(make, params, loss, 20))


def test_the_first_selection_that_matches_wins():
    params = {"a.weight": torch.ones(1), "a.bias": torch.ones(1), "b": torch.ones(1)}
    tx = partition(
        {
            ("b", "*.bias"): scale(1.0),
            (lambda name: name.startswith("a.")): scale(2.0),
            "*": scale(3.0),
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

    inner = trace(0.9)._replace(update=update)
    tx = masked(inner, lambda name: name == "w")
    updates, state = tx.update(params, tx.init(params), params)
    assert seen == [(["w"], ["w"])]
    assert updates["w"] is None
    assert updates["b"] is params["b"]
    assert list(state.momentum) == ["w"]


def test_masked_decay_is_that_of_torch_with_two_groups():
    params, loss = perceptron()
    tx = chain(add_decayed_weights(0.1, mask=("0.weight", "1.*")), sgd(0.1))

    def make(leaves):
        first, bias, second = leaves
        groups = [{"params": [first, second], "weight_decay": 0.1}, {"params": [bias]}]
        return torch.optim.SGD(groups, lr=0.1)

    found, _ = train(tx, params, loss, 20)
    assert_close(found, train_with_torch(make, params, loss, 20))


def test_kept_parameters_stay_the_same_tensors_without_moments_or_decay():
    params, loss = perceptron()
    tx = chain(keep(["0.*"]), adamw(0.1))
    found, state = train(tx, params, loss, 3)
    assert found["0.weight"] is params["0.weight"]
    assert found["0.bias"] is params["0.bias"]
    assert not state[1][0].mean["0.bias"].any()

    def last(p):
        return loss({**params, "1.weight": p["1.weight"]})

    expected, _ = train(adamw(0.1), {"1.weight": params["1.weight"]}, last, 3)
    assert torch.equal(found["1.weight"], expected["1.weight"])


def test_a_group_that_is_kept_needs_no_selection():
    params, loss = perceptron()
    tx = partition({"0.*": keep(), "*": sgd(0.1)})
    found, _ = train(tx, params, loss, 1)
    assert found["0.weight"] is params["0.weight"]
    assert not torch.equal(found["1.weight"], params["1.weight"])


# Steps that are left out.


def poisoned(grads, value=math.nan):
    return {**grads, "0.bias": torch.full_like(grads["0.bias"], value)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    params, loss = perceptron()
    tx = apply_if_finite(adamw(0.1), max_consecutive_errors=3)
    params, state = train(tx, params, loss, 2)
    grads = poisoned(gradients(loss, params), value)
    found, new = step(tx, grads, state, params)
    assert_same_tree((found, new.inner), (params, state.inner))
    assert (int(new.errors), int(new.total_errors)) == (1, 1)
    assert not new.last_finite
    grads = gradients(loss, params)
    found, new = step(tx, grads, new, found)
    expected, inner = step(adamw(0.1), grads, state.inner, params)
    assert_same_tree((found, new.inner), (expected, inner))
    assert (int(new.errors), int(new.total_errors)) == (0, 1)
    assert new.last_finite


def test_errors_in_a_row_are_let_through_after_the_last_that_is_allowed():
    params, loss = perceptron()
    tx = apply_if_finite(sgd(0.1), max_consecutive_errors=2)
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
    tx = apply_if_finite(adam(0.1), max_consecutive_errors=3)
    grads = gradients(loss, params)
    stacked = {key: torch.stack([g, g, g]) for key, g in grads.items()}
    stacked["1.weight"][1, 0, 0] = math.inf
    many = {key: torch.stack([p, p, p]) for key, p in params.items()}
    state = torch.vmap(tx.init)(many)
    found, state = torch.vmap(partial(step, tx))(stacked, state, many)
    expected, expected_state = step(tx, grads, tx.init(params), params)
    assert state.errors.tolist() == [0, 1, 0]
    assert state.inner[1].count.tolist() == [1, 0, 1]
    for member in (0, 2):
        one = pytree.tree_map(lambda leaf, i=member: leaf[i], (found, state.inner))
        assert_same_tree(one, (expected, expected_state.inner))
    one = pytree.tree_map(lambda leaf: leaf[1], (found, state.inner))
    assert_same_tree(one, (params, tx.init(params).inner))


def test_a_step_that_was_left_out_has_finite_gradients():
    def result(rate):
        params = {"w": torch.tensor([1.0, 2.0])}
        tx = apply_if_finite(adam(rate), max_consecutive_errors=3)
        state = tx.init(params)
        for bad in (0.0, math.inf, 0.0):
            grads = {"w": params["w"] + bad}
            params, state = step(tx, grads, state, params)
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
    leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
    optimizer = torch.optim.AdamW(list(leaves.values()), lr=0.1)
    tx = multi_steps(adamw(0.1), parts)
    found, state = params, tx.init(params)
    for grads in rounds:
        optimizer.zero_grad()
        for part in grads:
            sum((leaves[k] * part[k]).sum() / parts for k in leaves).backward()
            before = found
            found, state = step(tx, part, state, found)
            if part is not grads[-1]:
                assert_same_tree(found, before)
        optimizer.step()
        assert_close(found, {key: leaf.detach() for key, leaf in leaves.items()})
    assert int(state.count) == 0
    assert int(state.inner[0].count) == 4


def test_members_may_accumulate_different_numbers_of_gradients():
    params, _ = perceptron()
    grads = [random_gradients(params, seed=seed) for seed in range(6)]
    many = {key: torch.stack([p, p]) for key, p in params.items()}
    parts = torch.tensor([2, 3])
    state = torch.vmap(multi_steps(adam(0.1), 1).init)(many)
    for part in grads:
        many, state = torch.vmap(
            lambda k, state, params, part=part: step(
                multi_steps(adam(0.1), k), part, state, params
            )
        )(parts, state, many)
    for member, k in enumerate(parts.tolist()):
        tx = multi_steps(adam(0.1), k)
        expected, alone = params, tx.init(params)
        for part in grads:
            expected, alone = step(tx, part, alone, expected)
        assert_close({key: p[member] for key, p in many.items()}, expected)


def test_the_mean_of_half_precision_gradients_keeps_what_half_precision_drops():
    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    tx = multi_steps(scale(1.0), 256)
    state = tx.init(params)
    for k in range(256):
        grads = {"w": torch.tensor([256.0 if k == 0 else 1.0], dtype=torch.bfloat16)}
        updates, state = tx.update(grads, state)
    assert updates["w"].item() == (256 + 255) / 256


def test_a_gradient_of_none_counts_as_zero_and_may_wait_for_the_next_round():
    params = {"w": double([0.0])}
    tx = multi_steps(scale(1.0), 2)
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


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_the_moving_average_of_parameters_is_that_of_torch(steps, decay):
    params, loss = perceptron()
    _, state = train(chain(sgd(0.1), ema_parameters(decay)), params, loss, steps)
    expected = averaged_by_torch(
        params, loss, steps, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay)
    )
    assert_close(averaged_parameters(state), expected)


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_the_mean_of_parameters_is_that_of_torch(steps):
    params, loss = perceptron()
    _, state = train(chain(sgd(0.1), polyak_average()), params, loss, steps)
    assert_close(averaged_parameters(state), averaged_by_torch(params, loss, steps))


def test_a_mean_that_starts_late_is_that_of_the_steps_since():
    params, loss = perceptron()
    tx = chain(sgd(0.1), polyak_average(start=3))
    path, state = [params], tx.init(params)
    for _ in range(8):
        grads = gradients(loss, path[-1])
        moved, state = step(tx, grads, state, path[-1])
        path.append(moved)
        since = path[4:] or path[-1:]
        expected = {key: torch.stack([p[key] for p in since]).mean(0) for key in params}
        assert_close(averaged_parameters(state), expected)


def test_averages_leave_the_training_alone():
    params, loss = perceptron()
    found, _ = train(chain(adam(0.1), ema_parameters(0.9)), params, loss, 5)
    assert_same_tree(found, train(adam(0.1), params, loss, 5)[0])


def test_averages_are_found_wherever_they_are():
    params, loss = perceptron()
    tx = apply_if_finite(
        multi_steps(chain(adam(0.1), ema_parameters(0.9)), 2), max_consecutive_errors=1
    )
    _, state = train(tx, params, loss, 4)
    assert_same_tree(averaged_parameters(state), dict(state.inner.inner[1].average))


def test_the_average_of_small_moves_is_not_lost_to_half_precision():
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    tx = ema_parameters(0.999)
    state = tx.init(params)
    for _ in range(2):
        updates = {"w": torch.full((1,), 0.5)}
        params, state = step(tx, updates, state, params)
    expected = torch.tensor([1.5 + 0.001 * 0.5])
    torch.testing.assert_close(averaged_parameters(state)["w"], expected)


def test_the_average_of_gradients_is_the_first_moment_of_adam():
    params, _ = perceptron()
    tx = chain(ema(0.9), scale(-0.1))
    raw = chain(ema(0.9, debias=False), scale(-0.1))
    state, raw_state = tx.init(params), raw.init(params)
    mean = {key: torch.zeros_like(p) for key, p in params.items()}
    for t in range(1, 11):
        grads = random_gradients(params, seed=t)
        mean = {key: 0.9 * mean[key] + 0.1 * grads[key] for key in params}
        updates, state = tx.update(grads, state)
        plain, raw_state = raw.update(grads, raw_state)
        assert_close(updates, {k: -0.1 * m / (1 - 0.9**t) for k, m in mean.items()})
        assert_close(plain, {k: -0.1 * m for k, m in mean.items()})


@pytest.mark.parametrize(("period", "alpha"), [(1, 0.5), (3, 0.8), (5, 1.0)])
def test_lookahead_follows_its_two_loops(period, alpha):
    params, loss = perceptron()
    tx = lookahead(adam(0.1), sync_period=period, slow_step_size=alpha)
    found, _ = train(tx, params, loss, 3 * period + 1)
    leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
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
    assert_close(found, {key: leaf.detach() for key, leaf in leaves.items()})


def test_the_defaults_of_lookahead_are_those_of_the_paper():
    params, loss = perceptron()
    found, state = train(lookahead(sgd(0.1)), params, loss, 5)
    fast, _ = train(sgd(0.1), params, loss, 5)
    expected = {key: (params[key] + fast[key]) / 2 for key in params}
    assert_close(found, expected)
    assert_close(state.slow, expected)


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
    assert_close(found, train(make(**options), params, loss, 10)[0])
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
    assert_close(found, expected)
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
        assert_close({key: p[member] for key, p in found.items()}, expected)


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
    leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
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
    assert_close(found, {key: leaf.detach() for key, leaf in leaves.items()})
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


def test_an_observation_compiles_and_keeps_no_graph():
    tx, observe = reduce_on_plateau(sgd, 0.1, patience=0)
    state = tx.init({"w": torch.zeros(2)})
    torch.compiler.reset()
    compiled = torch.compile(observe, fullgraph=True, backend="aot_eager")
    value = torch.tensor(1.0, requires_grad=True)
    assert_same_tree(compiled(state, value), observe(state, value))
    leaves = pytree.tree_leaves(observe(state, value))
    assert not any(leaf.requires_grad for leaf in leaves)


# Noise.


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_generator_gives_the_known_answers_of_its_authors(counter, key, expected):
    words = philox(
        tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key)
    )
    assert [int(word) for word in words] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_normal(dtype):
    size = 100_003
    zeros = {"w": torch.zeros(size, dtype=dtype)}
    tx = add_noise(1.0, 0.0, seed=0)
    draws = tx.update(zeros, tx.init(zeros))[0]["w"].double().sort().values
    # Kolmogorov's distance, whose 1e-6 quantile is 2.7 over the root of the size.
    uniform = torch.special.ndtr(draws)
    steps = torch.arange(size + 1, dtype=torch.float64) / size
    distance = torch.maximum(uniform - steps[:-1], steps[1:] - uniform).max()
    assert distance < 2.7 / math.sqrt(size)
    assert (draws**4).mean().item() == pytest.approx(3.0, rel=0.1)


def test_no_two_draws_are_correlated():
    params = {"a": torch.zeros(4096), "b": torch.zeros(64, 64)}
    tx = add_noise(1.0, 0.0, seed=torch.tensor(0))
    first, state = tx.update(params, tx.init(params))
    second, _ = tx.update(params, state)
    other, _ = tx.update(params, state._replace(seed=torch.tensor(1 << 40)))
    rows = [u.flatten() for updates in (first, second, other) for u in updates.values()]
    quarters = torch.cat([row.reshape(4, 1024) for row in rows])
    correlation = torch.corrcoef(quarters) - torch.eye(len(quarters))
    assert correlation.abs().max() < 6 / math.sqrt(1024)


def test_the_variance_falls_as_in_the_paper():
    params = {"w": torch.zeros(20_000)}
    tx = add_noise(0.3, 0.55, seed=5)
    state = tx.init(params)
    for t in range(1, 6):
        updates, state = tx.update(params, state)
        expected = math.sqrt(0.3 / t**0.55)
        assert updates["w"].std().item() == pytest.approx(expected, rel=0.03)


def test_noise_goes_on_from_the_state_alone():
    params, _ = perceptron()
    tx = add_noise(1.0, 0.55, seed=5)
    _, state = tx.update(params, tx.init(params))
    restored = copy.deepcopy(state)
    expected = tx.update(params, state)
    assert_same_tree(add_noise(1.0, 0.55, seed=6).update(params, restored), expected)
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    noise, _ = tx.update(zeros, state)
    assert_close(expected[0], {key: params[key] + noise[key] for key in params})


def test_members_with_seeds_of_their_own_have_noise_of_their_own():
    zeros = {"w": torch.zeros(3, 5, dtype=torch.float64)}
    seeds = torch.tensor([1, 2, 1])

    def init(seed, params):
        return add_noise(1.0, 0.5, seed=seed).init(params)

    state = torch.vmap(init)(seeds, zeros)
    tx = add_noise(1.0, 0.5, seed=9)
    updates, _ = torch.vmap(tx.update)(zeros, state)
    for member, seed in enumerate(seeds.tolist()):
        alone = {"w": torch.zeros(5, dtype=torch.float64)}
        expected, _ = tx.update(alone, init(seed, alone))
        assert_close({"w": updates["w"][member]}, expected)
    assert not torch.equal(updates["w"][0], updates["w"][1])


def test_no_variance_is_no_noise_exactly():
    params, _ = perceptron()
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    for eta in (0.0, double(0.0)):
        tx = add_noise(eta, 0.55, seed=5)
        assert_same_tree(tx.update(zeros, tx.init(zeros))[0], zeros)
        assert_same_tree(tx.update(params, tx.init(params))[0], params)


# Factors.


def test_factors_and_schedules_multiply():
    params, _ = perceptron()
    updates, _ = scale(-0.3).update(params, ())
    assert_close(updates, {key: -0.3 * p for key, p in params.items()})
    tx = scale_by_schedule(lambda count: 0.5 ** count.double())
    state = tx.init(params)
    for t in range(3):
        updates, state = tx.update(params, state)
        assert_close(updates, {key: 0.5**t * p for key, p in params.items()})


# Errors.

PARAMS = {"w": torch.zeros(2), "b": torch.zeros(2)}
PLATEAU, OBSERVE = reduce_on_plateau(sgd, 0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masked(sgd(), ["c*"]).init(PARAMS), r"masked\('c\*'\).*'b', 'w'"),
        (lambda: masked(sgd(), ("w", "c")).init(PARAMS), r"masked\('c'\): expected a"),
        (
            lambda: masked(sgd(), lambda n: False).init(PARAMS),
            "masked.*expected a function that selects a parameter, got none.*'b', 'w'",
        ),
        (lambda: keep(["c"]).init(PARAMS), r"keep\('c'\): expected a pattern that"),
        (lambda: partition({}), r"partition\(\{\}\): expected at least one group"),
        (
            lambda: partition({"w": sgd()}).init(PARAMS),
            r"partition\('b'\): expected a group that selects every name",
        ),
        (
            lambda: partition({"w": sgd(), "c": sgd(), "*": sgd()}).init(PARAMS),
            r"partition\('c'\): expected a pattern that matches",
        ),
        (
            lambda: partition({"*": sgd()}).update(PARAMS, ((), ()), PARAMS),
            r"partition\(state of 2 groups\): expected one of 1",
        ),
        (
            lambda: partition({"*": sgd()}).update({}, ((),), PARAMS),
            r"partition\(grads\): expected the names.*missing: 'b', 'w'",
        ),
        (
            lambda: masked(sgd(), ["w"]).update({"w": None}, ((),), PARAMS),
            r"masked\(grads\).*missing: 'b'",
        ),
        (
            lambda: apply_if_finite(sgd(), max_consecutive_errors=-1),
            r"apply_if_finite\(max_consecutive_errors=-1\): expected a whole",
        ),
        (lambda: multi_steps(sgd(), 0), r"multi_steps\(steps=0\): expected a whole"),
        (
            lambda: multi_steps(sgd(), 2).update(
                {}, multi_steps(sgd(), 2).init(PARAMS)
            ),
            r"multi_steps\(grads\).*missing: 'b', 'w'",
        ),
        (
            lambda: multi_steps(sgd(), torch.tensor([2, 3])).update(
                PARAMS, multi_steps(sgd(), 2).init(PARAMS)
            ),
            r"hyperparameter of shape \(2,\).*torch.vmap",
        ),
        (lambda: ema(1.0), r"ema\(decay=1.0\): expected 0 <= decay < 1"),
        (lambda: ema(0.5).update({}, ema(0.5).init(PARAMS)), r"ema\(grads\).*missing"),
        (lambda: ema_parameters(-0.1), r"ema_parameters\(decay=-0.1\): expected 0 <="),
        (lambda: polyak_average(start=-1), r"polyak_average\(start=-1\): expected a"),
        (
            lambda: polyak_average().update(PARAMS, polyak_average().init(PARAMS)),
            r"polyak_average\(params=None\): expected the parameters, got none",
        ),
        (
            lambda: ema_parameters(0.5).update(
                {}, ema_parameters(0.5).init(PARAMS), {}
            ),
            r"ema_parameters\(grads\).*missing: 'b', 'w'",
        ),
        (
            lambda: averaged_parameters(adam().init(PARAMS)),
            r"averaged_parameters\(state with 0 averages\): expected the state of one",
        ),
        (lambda: lookahead(sgd(), sync_period=0), r"lookahead\(sync_period=0\)"),
        (
            lambda: lookahead(sgd(), slow_step_size=0.0),
            r"lookahead\(slow_step_size=0.0\): expected slow_step_size > 0",
        ),
        (
            lambda: lookahead(sgd()).update(PARAMS, lookahead(sgd()).init(PARAMS)),
            r"lookahead\(params=None\): expected the parameters, got none",
        ),
        (
            lambda: lookahead(sgd()).update({}, lookahead(sgd()).init(PARAMS), PARAMS),
            r"lookahead\(grads\).*missing",
        ),
        (lambda: scale(math.inf), r"scale\(factor=inf\): expected a finite number"),
        (lambda: inject_hyperparams(sgd, lr=-1.0), r"sgd\(lr=-1.0\): expected lr >= 0"),
        (
            lambda: inject_hyperparams(sgd, lr=1.0).update(
                PARAMS, inject_hyperparams(adam, eps=1.0).init(PARAMS)
            ),
            r"inject_hyperparams\(state.hyperparams\).*missing: 'lr'; unexp",
        ),
        (
            lambda: with_hyperparams(inject_hyperparams(sgd, lr=1.0).init({}), eps=1.0),
            r"with_hyperparams\('eps'\): expected names among 'lr'",
        ),
        (
            lambda: with_hyperparams(
                inject_hyperparams(sgd, lr=1.0).init({}), lr=torch.ones(2)
            ),
            r"with_hyperparams\(lr of shape \(2,\)\): expected a number",
        ),
        (
            lambda: with_hyperparams(
                inject_hyperparams(adam, betas=(0.9, 0.9)).init({}), betas=0.5
            ),
            r"with_hyperparams\(betas=0.5\): expected a tuple of 2",
        ),
        (lambda: reduce_on_plateau(sgd, -0.1), r"reduce_on_plateau\(lr=-0.1\)"),
        (lambda: reduce_on_plateau(sgd, 0.1, mode="least"), "expected one of 'min'"),
        (
            lambda: reduce_on_plateau(sgd, 0.1, threshold_mode="both"),
            r"threshold_mode='both'\): expected one of 'rel', 'abs'",
        ),
        (lambda: reduce_on_plateau(sgd, 0.1, factor=1.0), "expected 0 < factor < 1"),
        (lambda: reduce_on_plateau(sgd, 0.1, patience=-1), "patience=-1.: expected a"),
        (lambda: reduce_on_plateau(sgd, 0.1, cooldown=0.5), "cooldown=0.5.: expected"),
        (lambda: reduce_on_plateau(sgd, 0.1, min_lr=-1.0), "expected min_lr >= 0"),
        (
            lambda: OBSERVE(PLATEAU.init(PARAMS), torch.ones(2)),
            r"observe\(value of shape \(2,\)\): expected a number or a tensor of",
        ),
        (
            lambda: OBSERVE(sgd().init(PARAMS), 1.0),
            r"observe\(state with 0 plateaus\): expected the state of one",
        ),
        (lambda: add_noise(-1.0, 0.5, seed=0), r"add_noise\(eta=-1.0\): expected eta"),
        (lambda: add_noise(1.0, math.inf, seed=0), r"add_noise\(gamma=inf\): expected"),
        (lambda: add_noise(1.0, 0.5, seed=-1), r"add_noise\(seed=-1\): expected a"),
        (lambda: add_noise(1.0, 0.5, seed=2**63), r"add_noise\(seed=9.*\): expected"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: masked(sgd(), "*.weight"),
            r"masked\(selection='\*.weight'\): .*a string. Write \['\*.weight'\]",
        ),
        (lambda: keep("w"), r"keep\(selection='w'\): .*got a string"),
        (lambda: keep(3), r"keep\(selection=3\): expected a list or tuple.*got a int"),
        (lambda: partition({3: sgd()}), r"partition\(key=3\): expected .*got a int"),
        (
            lambda: partition({("w", 3): sgd()}),
            r"partition\(key=\('w', 3\)\): expected patterns that are strings",
        ),
        (
            lambda: add_decayed_weights(0.0, mask="w"),
            r"add_decayed_weights\(mask='w'\): .*got a string",
        ),
        (
            lambda: inject_hyperparams(sgd, momentum=0.9, nesterov=True),
            r"inject_hyperparams\(nesterov=True\): expected a number.*partial\(make, n",
        ),
        (
            lambda: with_hyperparams(sgd().init(PARAMS), lr=0.1),
            r"with_hyperparams\(state\): expected the state of inject_hyperparams",
        ),
        (
            lambda: scale_by_schedule(0.1),
            r"scale_by_schedule\(schedule=0.1\): expected a function.*use scale",
        ),
        (
            lambda: add_noise(1.0, 0.5, seed=0).init({"w": torch.zeros(2).long()}),
            r"add_noise\(params\): expected real floating-point parameters",
        ),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()

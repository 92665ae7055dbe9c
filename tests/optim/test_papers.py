"""Optimizers by sign, trust ratio, factors, orthogonal updates and averages.

What torch does not have is held against loops that spell out the algorithm of the
paper, one parameter after the other.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.examples import examples
from tests.optim.problems import (
    double,
    gradients,
    matrices,
    perceptron,
    random_gradients,
    random_tensors,
    train,
)
from tests.oracle import assert_exact
from vgrad.optim import (
    adafactor,
    chain,
    evaluation_parameters,
    lamb,
    lars,
    lion,
    muon,
    orthogonalize,
    partition,
    scale_by_factored_rms,
    scale_by_trust_ratio,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
    step,
)

OPTIONS = {
    lion: dict(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    lamb: dict(lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
    lars: dict(lr=2.0, momentum=0.8, weight_decay=0.1, trust_coefficient=0.01),
    adafactor: dict(lr=0.05, beta2_decay=-0.7, d=2.0, weight_decay=0.1),
    muon: dict(lr=0.02, weight_decay=0.2, momentum=0.8, dtype=torch.float64),
    schedule_free_sgd: dict(lr=0.2, momentum=0.8, weight_lr_power=1.5),
    schedule_free_adamw: dict(lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_lr_power=1.5),
}


def warming(lr):
    """A rate that rises to a constant, as schedule-free training wants it."""
    return lambda count: lr * ((count + 1).double() / 10).clamp(max=1.0)


# The algorithms of the papers, with Python loops and numbers.


def norm(tensor):
    return sum(entry**2 for entry in tensor.flatten().tolist()) ** 0.5


def lion_step(t, p, g, memory, *, lr, betas, weight_decay):
    m = memory.get("m", torch.zeros_like(p))
    update = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    memory["m"] = betas[1] * m + (1 - betas[1]) * g
    return p - lr * (update + weight_decay * p)


def lamb_step(t, p, g, memory, *, lr, betas, eps, weight_decay):
    zero = torch.zeros_like(p)
    m = memory["m"] = betas[0] * memory.get("m", zero) + (1 - betas[0]) * g
    v = memory["v"] = betas[1] * memory.get("v", zero) + (1 - betas[1]) * g**2
    ratio = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    update = ratio + weight_decay * p
    return p - lr * norm(p) / norm(update) * update


def lars_step(t, p, g, memory, *, lr, momentum, weight_decay, trust_coefficient):
    local = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))
    v = momentum * memory.get("v", 0.0) + lr * local * (g + weight_decay * p)
    memory["v"] = v
    return p - v


def averaged(params, loss, *, lr, beta, power, direction):
    """Return `y` and `x` of the paper of schedule-free training, after 30 steps."""
    z, x = dict(params), dict(params)
    weights, memory = 0.0, {name: {} for name in params}
    for t in range(1, 31):
        y = {name: (1 - beta) * z[name] + beta * x[name] for name in params}
        rate = float(lr(torch.tensor(t - 1))) if callable(lr) else lr
        weights += rate**power
        share = rate**power / weights
        for name, g in gradients(loss, y).items():
            z[name] = z[name] - rate * direction(t, y[name], g, memory[name])
            x[name] = (1 - share) * x[name] + share * z[name]
    return {name: (1 - beta) * z[name] + beta * x[name] for name in params}, x


def decayed(t, y, g, memory, *, weight_decay):
    return g + weight_decay * y


def decayed_scaled(t, y, g, memory, *, beta, eps, weight_decay):
    v = beta * memory.get("v", torch.zeros_like(y)) + (1 - beta) * g**2
    memory["v"] = v
    return g / ((v / (1 - beta**t)).sqrt() + eps) + weight_decay * y


STEPS = {lion: lion_step, lamb: lamb_step, lars: lars_step}


def stepped(make, params, loss, *, lr, **options):
    """Return the parameters of the paper, after 30 steps."""
    memory = {key: {} for key in params}
    for t in range(1, 31):
        rate = float(lr(torch.tensor(t - 1))) if callable(lr) else lr
        grads = gradients(loss, params)
        params = {
            key: STEPS[make](t, p, grads[key], memory[key], lr=rate, **options)
            for key, p in params.items()
        }
    return params


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("make", [*STEPS, schedule_free_sgd, schedule_free_adamw])
def test_steps_agree_with_the_paper(make, schedule, weight_decay):
    options = OPTIONS[make] | dict(weight_decay=weight_decay)
    if schedule:
        options["lr"] = warming(options["lr"])
    params, loss = perceptron()
    found, state = train(make(**options), params, loss, 30)
    if make in STEPS:
        assert_exact(found, stepped(make, params, loss, **options), 1e-11)
        return
    power, decay = options["weight_lr_power"], dict(weight_decay=weight_decay)
    if make is schedule_free_sgd:
        beta, direction = options["momentum"], partial(decayed, **decay)
    else:
        beta, beta2 = options["betas"]
        direction = partial(decayed_scaled, beta=beta2, eps=options["eps"], **decay)
    y, x = averaged(
        params, loss, lr=options["lr"], beta=beta, power=power, direction=direction
    )
    assert_exact(found, y, 1e-11)
    assert_exact(evaluation_parameters(state, found), x, 1e-11)


def test_steps_of_no_rate_have_no_weight():
    params, loss = perceptron()
    tx = schedule_free_sgd(lambda count: 0.1 * (count > 1).double())
    found, state = train(tx, params, loss, 2)
    assert_exact(found, params, 1e-12)
    assert_exact(evaluation_parameters(state, found), params, 1e-12)
    found, state = train(tx, params, loss, 3)
    grads = gradients(loss, params)
    expected = {name: p - 0.1 * grads[name] for name, p in params.items()}
    assert_exact(evaluation_parameters(state, found), expected, 1e-12)


@pytest.mark.parametrize("make", OPTIONS)
def test_maximizing_is_descending_along_the_negative_gradient(make):
    problem = matrices if make is muon else perceptron
    (params, loss), (_, negative) = problem(), problem(sign=-1.0)
    found, _ = train(make(maximize=True, **OPTIONS[make]), params, loss, 3)
    expected, _ = train(make(**OPTIONS[make]), params, negative, 3)
    assert_exact(found, expected, 0)


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3),
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
        max_size=4,
    ),
    st.sampled_from(list(OPTIONS)),
)
@examples(80)
def test_updates_of_every_shape_are_finite_and_per_parameter(shapes, make):
    if make is muon:
        shapes = {key: shape for key, shape in shapes.items() if len(shape) == 2}
    tx = make(**OPTIONS[make])

    def run(shapes):
        params, *grads = (
            {key: random_tensors({key: s}, seed=seed)[key] for key, s in shapes.items()}
            for seed in range(4)
        )
        state = tx.init(params)
        for each in grads:
            params, state = step(tx, each, state, params)
        return params, state

    together, state = run(shapes)
    assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves((together, state)))
    assert {key: p.shape for key, p in together.items()} == shapes
    for key, shape in shapes.items():
        assert_exact({key: together[key]}, run({key: shape})[0], 1e-12)


# Muon.


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_orthogonal_updates_have_the_directions_and_singular_values_near_one(shape):
    grads = random_gradients({"w": torch.zeros(shape).double()}, seed=0)
    left, _, right = torch.linalg.svd(grads["w"], full_matrices=False)
    tx = orthogonalize(
        ns_coefficients=(2.0, -1.5, 0.5), ns_steps=20, dtype=torch.float64
    )
    found, _ = tx.update(grads, tx.init(grads))
    torch.testing.assert_close(found["w"], left @ right, rtol=1e-10, atol=1e-10)


def test_default_coefficients_bring_singular_values_near_one():
    values = torch.logspace(0, -1.9, 8, dtype=torch.float64)
    grads = {"w": (values / values.norm()).diag()}
    for dtype, slack in [(torch.float64, 0.0), (torch.bfloat16, 0.05)]:
        tx = orthogonalize(dtype=dtype)
        found, _ = tx.update(grads, tx.init(grads))
        ends = found["w"].diagonal()
        assert (ends > 0.6 - slack).all()
        assert (ends < 1.2 + slack).all()


def test_members_of_members_have_orthogonal_updates_of_their_own():
    grads = random_gradients({"w": torch.zeros(2, 3, 4, 5)}, seed=0)["w"]
    tx = orthogonalize()

    def one(grad):
        return tx.update({"w": grad}, ())[0]["w"]

    nested = torch.vmap(torch.vmap(one))(grads)
    inner = torch.vmap(torch.vmap(one), in_dims=1, out_dims=1)(grads)
    expected = torch.stack([torch.stack([one(g) for g in row]) for row in grads])
    assert torch.equal(nested, expected)
    assert torch.equal(inner, expected)


def test_tangents_pass_through_orthogonal_updates_as_gradients_do():
    grads = random_gradients({"w": torch.zeros(3, 4).double()}, seed=0)["w"]
    tangent, cotangent = (
        random_gradients({"w": grads}, seed=seed)["w"] for seed in (1, 2)
    )

    def one(grad):
        return orthogonalize(dtype=torch.float64).update({"w": grad}, ())[0]["w"]

    _, forward = torch.func.jvp(one, (grads,), (tangent,))
    (backward,) = torch.func.vjp(one, grads)[1](cotangent)
    torch.testing.assert_close((forward * cotangent).sum(), (backward * tangent).sum())
    numbers = (one(grads + 1e-6 * tangent) - one(grads - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(forward, numbers, rtol=1e-6, atol=1e-8)


def test_autocast_around_the_update_does_not_reach_the_products():
    params, _ = matrices()
    params = {name: p.float() for name, p in params.items()}
    grads = random_gradients(params, seed=0)
    tx = orthogonalize(dtype=torch.float32)
    expected, _ = tx.update(grads, ())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = tx.update(grads, ())
    assert_exact(found, expected, 0)


# Adafactor, trust ratios, signs.


def test_factored_moments_are_a_row_and_a_column():
    params = {"w": torch.zeros(5, 7, 3), "m": torch.zeros(4, 6), "b": torch.zeros(6)}
    state = scale_by_factored_rms().init(params)
    assert {name: row.shape for name, row in state.slots["row_var"].items()} == {
        "w": (5, 7, 1),
        "m": (4, 1),
    }
    assert {name: column.shape for name, column in state.slots["col_var"].items()} == {
        "w": (5, 1, 3),
        "m": (1, 6),
    }
    assert {name: square.shape for name, square in state.slots["variance"].items()} == {
        "b": (6,)
    }


def test_the_trust_ratio_is_one_for_parameters_of_zero():
    params = {"zero": torch.zeros(2), "one": torch.tensor([3.0, 4.0])}
    grads = {"zero": torch.tensor([0.5, 0.0]), "one": torch.tensor([0.0, 2.0])}
    updates, _ = scale_by_trust_ratio(0.1, weight_decay=0.2).update(grads, (), params)
    assert torch.equal(updates["zero"], grads["zero"])
    expected = 0.1 * 5 / (2 + 0.2 * 5) * torch.tensor([0.6, 2.8])
    torch.testing.assert_close(updates["one"], expected)
    updates, _ = scale_by_trust_ratio(0.1, weight_decay=0.2).update(
        {name: torch.zeros(2) for name in params}, (), params
    )
    torch.testing.assert_close(updates["one"], 0.1 * params["one"])


def test_lars_treats_a_complex_parameter_as_a_pair_of_real_ones():
    pair = torch.tensor([[1.0, 2.0], [0.0, -0.5]], dtype=torch.float64)
    tx = lars(2.0, weight_decay=double(0.1))
    real, complex_ = {"w": pair}, {"w": torch.view_as_complex(pair)}
    states = tx.init(real), tx.init(complex_)
    for _ in range(3):
        real, first = step(tx, real, states[0], real)
        complex_, second = step(tx, complex_, states[1], complex_)
        states = first, second
    torch.testing.assert_close(torch.view_as_real(complex_["w"]), real["w"])


@pytest.mark.parametrize("make", [lamb, lars, lion, adafactor, schedule_free_adamw])
def test_only_adafactor_leaves_parameters_of_zero_where_they_are(make):
    start, _ = perceptron()
    params = {name: torch.zeros_like(p) for name, p in start.items()}
    eps = {"eps": (0.0, 0.0)} if make is adafactor else {}
    grads, tx = random_gradients(params, seed=0), make(**OPTIONS[make] | eps)
    state = tx.init(params)
    for _ in range(3):
        params, state = step(tx, grads, state, params)
    moved = {bool((p != 0).all()) for p in params.values()}
    assert moved == {make is not adafactor}


# Parameters to evaluate.


def test_schedule_free_iterates_keep_what_bfloat16_parameters_lose():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    tx = schedule_free_sgd(1e-4, momentum=0.0)
    state = tx.init(params)
    for _ in range(100):
        params, state = step(tx, {"w": torch.ones(3)}, state, params)
    assert torch.equal(params["w"], torch.full((3,), 0.99).bfloat16())
    x = evaluation_parameters(state, params)["w"]
    assert x.dtype == torch.bfloat16
    torch.testing.assert_close(state.average["w"], torch.full((3,), 0.99495))


def test_evaluation_parameters_are_found_inside_a_partition():
    params, loss = perceptron()
    tx = chain(partition({"0.*": schedule_free_sgd(0.1), "*": sgd(0.1)}))
    params, state = train(tx, params, loss, 3)
    found = evaluation_parameters(state, params)
    assert list(found) == list(params)
    assert found["1.weight"] is params["1.weight"]
    inner = state[0][0]
    assert torch.equal(found["0.bias"], inner.average["0.bias"])
    assert not torch.equal(found["0.bias"], params["0.bias"])


def test_evaluation_parameters_of_members_come_from_the_stacked_state():
    start, loss = perceptron()
    stacked = {key: torch.stack([p, 2 * p]) for key, p in start.items()}
    tx = schedule_free_sgd(0.1)

    def one(params, state):
        return step(tx, torch.func.grad(loss)(params), state, params)

    state = torch.vmap(tx.init)(stacked)
    for _ in range(3):
        stacked, state = torch.vmap(one)(stacked, state)
    expected, alone = train(tx, start, loss, 3)
    found = {n: x[0] for n, x in evaluation_parameters(state, stacked).items()}
    assert_exact(found, evaluation_parameters(alone, expected), 1e-12)

"""Optimizers by sign, trust ratio, factors, orthogonal updates and averages.

What torch does not have is held against loops that spell out the algorithm of the
paper, one parameter after the other.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.examples import examples
from tests.optim.optimizers import OPTIMIZERS
from tests.optim.problems import (
    gradients,
    member,
    perceptron,
    random_tensors,
    stacked,
    train,
)
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.optim import chain, orthogonalize, sgd, step

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


def free_step(t, y, memory, g, *, lr, beta, power, direction):
    """Return the next `y` of schedule-free training; `x` and `z` are in the memory."""
    z, x = memory.get("z", y), memory.get("x", y)
    memory["weights"] = memory.get("weights", 0.0) + lr**power
    share = lr**power / memory["weights"]
    z = memory["z"] = z - lr * direction(t, y, g, memory)
    x = memory["x"] = (1 - share) * x + share * z
    return (1 - beta) * z + beta * x


def free_sgd_step(t, y, g, memory, *, momentum, weight_lr_power, weight_decay, lr):
    def direction(t, y, g, memory):
        return g + weight_decay * y

    options = dict(lr=lr, beta=momentum, power=weight_lr_power, direction=direction)
    return free_step(t, y, memory, g, **options)


def free_adamw_step(t, y, g, memory, *, betas, eps, weight_lr_power, weight_decay, lr):
    def direction(t, y, g, memory):
        zero = torch.zeros_like(y)
        v = memory["v"] = betas[1] * memory.get("v", zero) + (1 - betas[1]) * g**2
        return g / ((v / (1 - betas[1] ** t)).sqrt() + eps) + weight_decay * y

    options = dict(lr=lr, beta=betas[0], power=weight_lr_power, direction=direction)
    return free_step(t, y, memory, g, **options)


def bc_step(t, p, g, memory, *, lr, deviation, betas, floor, weight_decay):
    g = g + weight_decay * p
    m = memory["m"] = betas[0] * memory.get("m", 0.0) + (1 - betas[0]) * g
    v = memory["v"] = betas[1] * memory.get("v", 0.0) + (1 - betas[1]) * g**2
    square = v / (1 - betas[1] ** t) - deviation**2
    return p - lr * m / (1 - betas[0] ** t) / square.clamp(min=floor).sqrt()


STEPS = {
    "adam_bc": bc_step,
    "lion": lion_step,
    "lamb": lamb_step,
    "lars": lars_step,
    "schedule_free_sgd": free_sgd_step,
    "schedule_free_adamw": free_adamw_step,
}
NAMES = [*STEPS, "adafactor", "muon"]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_steps_agree_with_the_paper(name, schedule, weight_decay):
    case = OPTIMIZERS[name]
    options = case.of() | dict(weight_decay=weight_decay)
    lr = options.pop("lr")

    def rising(count):
        return lr * ((count + 1).double() / 10).clamp(max=1.0)

    expected, loss = perceptron()
    tx = case.make(rising if schedule else lr, **options)
    found, state = train(tx, expected, loss, 30)
    memory = {key: {} for key in expected}
    for t in range(1, 31):
        options["lr"] = float(rising(torch.tensor(t - 1))) if schedule else lr
        grads = gradients(loss, expected)
        expected = {
            key: STEPS[name](t, p, grads[key], memory[key], **options)
            for key, p in expected.items()
        }
    assert_exact(found, expected, 1e-11)
    if name.startswith("schedule_free"):
        x = {key: kept["x"] for key, kept in memory.items()}
        assert_exact(optim.evaluation_parameters(state, found), x, 1e-11)


def test_steps_of_no_rate_have_no_weight():
    params, loss = perceptron()
    tx = optim.schedule_free_sgd(lambda count: 0.1 * (count > 1).double())
    found, state = train(tx, params, loss, 2)
    assert_exact(found, params, 1e-12)
    assert_exact(optim.evaluation_parameters(state, found), params, 1e-12)
    found, state = train(tx, params, loss, 3)
    grads = gradients(loss, params)
    expected = {name: p - 0.1 * grads[name] for name, p in params.items()}
    assert_exact(optim.evaluation_parameters(state, found), expected, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_maximizing_is_descending_along_the_negative_gradient(name):
    case = OPTIMIZERS[name]
    (params, loss), (_, negative) = case.problem(), case.problem(sign=-1.0)
    found, _ = train(case.make(maximize=True, **case.of()), params, loss, 3)
    assert_exact(found, train(case.tx(), params, negative, 3)[0], 0)


SIZES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(st.lists(SIZES, max_size=4), st.sampled_from(NAMES))
@examples(80)
def test_updates_of_every_shape_are_finite_and_per_parameter(sizes, name):
    shapes, tx = dict(zip("abcd", sizes, strict=False)), OPTIMIZERS[name].tx()
    if name == "muon":
        shapes = {key: shape for key, shape in shapes.items() if len(shape) == 2}

    def run(shapes):
        params, *grads = (
            {key: random_tensors({key: s}, seed=seed)[key] for key, s in shapes.items()}
            for seed in range(4)
        )
        state = tx.init(params)
        for grad in grads:
            params, state = step(tx, grad, state, params)
        return params, state

    together, state = run(shapes)
    assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves((together, state)))
    assert {key: p.shape for key, p in together.items()} == shapes
    for key, shape in shapes.items():
        assert_exact({key: together[key]}, run({key: shape})[0], 1e-12)


# Muon.


def orthogonal(grad, **options):
    return orthogonalize(**options).update({"w": grad}, ())[0]["w"]


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_orthogonal_updates_have_the_directions_and_singular_values_near_one(shape):
    grad = random_tensors({"w": shape})["w"]
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    options = dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=20, dtype=torch.float64)
    expected = left @ right
    torch.testing.assert_close(
        orthogonal(grad, **options), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_steps_of_muon_are_scaled_by_the_shape(shape):
    grads = random_tensors({"w": shape})
    n, m = shape
    scales = {
        "original": max(1, n / m) ** 0.5,
        "match_rms_adamw": 0.2 * max(n, m) ** 0.5,
        "spectral_unclamped": (n / m) ** 0.5,
    }
    for kind, scale in scales.items():
        tx = optim.muon(0.1, weight_decay=0.0, adjust_lr_fn=kind, dtype=torch.float64)
        updates, _ = tx.update(grads, tx.init(grads), grads)
        assert_exact(
            updates["w"],
            -0.1 * scale * orthogonal(grads["w"], dtype=torch.float64),
            1e-12,
        )


def test_default_coefficients_bring_singular_values_near_one():
    values = torch.logspace(0, -1.9, 8, dtype=torch.float64)
    for dtype, slack in [(torch.float64, 0.0), (torch.bfloat16, 0.05)]:
        ends = orthogonal((values / values.norm()).diag(), dtype=dtype).diagonal()
        assert (ends > 0.6 - slack).all()
        assert (ends < 1.2 + slack).all()


def test_autocast_around_the_update_does_not_reach_the_products():
    grad = random_tensors({"w": (4, 3)}, dtype=torch.float32)["w"]
    expected = orthogonal(grad, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(orthogonal(grad, dtype=torch.float32), expected)


# Adafactor, trust ratios, signs.


def test_the_trust_ratio_is_one_for_parameters_of_zero():
    params = {"zero": torch.zeros(2), "one": torch.tensor([3.0, 4.0])}
    grads = {"zero": torch.tensor([0.5, 0.0]), "one": torch.tensor([0.0, 2.0])}
    tx = optim.scale_by_trust_ratio(0.1, weight_decay=0.2)
    updates, _ = tx.update(grads, (), params)
    assert torch.equal(updates["zero"], grads["zero"])
    expected = 0.1 * 5 / (2 + 0.2 * 5) * torch.tensor([0.6, 2.8])
    torch.testing.assert_close(updates["one"], expected)
    updates, _ = tx.update({name: torch.zeros(2) for name in params}, (), params)
    torch.testing.assert_close(updates["one"], 0.1 * params["one"])


# Parameters to evaluate.


def test_evaluation_parameters_are_found_inside_a_partition_and_of_members():
    start, loss = perceptron()
    tx = chain(optim.partition({"0.*": optim.schedule_free_sgd(0.1), "*": sgd(0.1)}))
    params, state = train(tx, start, loss, 3)
    found = optim.evaluation_parameters(state, params)
    assert list(found) == list(params)
    assert found["1.weight"] is params["1.weight"]
    half = {name: p.bfloat16() for name, p in params.items()}
    assert optim.evaluation_parameters(state, half)["0.bias"].dtype == torch.bfloat16
    assert torch.equal(found["0.bias"], state[0][0].average["0.bias"])
    assert not torch.equal(found["0.bias"], params["0.bias"])

    advance = torch.vmap(lambda p, s: step(tx, torch.func.grad(loss)(p), s, p))
    many = stacked([start, {key: 2 * p for key, p in start.items()}])
    states = torch.vmap(tx.init)(many)
    for _ in range(3):
        many, states = advance(many, states)
    assert_exact(member(optim.evaluation_parameters(states, many), 0), found, 1e-12)

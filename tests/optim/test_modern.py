"""Optimizers by sign, trust ratio, factors, orthogonal updates and averages.

Adafactor and Muon are held against `torch.optim`, all others against loops below that
spell out the algorithm of the paper, one parameter after the other.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.examples import examples
from tests.optim.test_optim import (
    assert_close,
    assert_same_tree,
    double,
    gradients,
    perceptron,
    random_gradients,
    rosenbrock,
    train,
    train_with_torch,
)
from vgrad.optim import (
    adafactor,
    adamw,
    apply_updates,
    chain,
    evaluation_parameters,
    lamb,
    lars,
    lion,
    muon,
    orthogonalize,
    partition,
    scale_by_factored_rms,
    scale_by_lion,
    scale_by_trust_ratio,
    schedule_free,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
    step,
)

exact_muon = partial(muon, dtype=torch.float64)
"""Muon whose iteration is not rounded to bfloat16."""

MODERN = {
    "lion": (lion, dict(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)),
    "lamb": (lamb, dict(lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)),
    "lars": (
        lars,
        dict(lr=2.0, momentum=0.8, weight_decay=0.1, trust_coefficient=0.01),
    ),
    "adafactor": (
        adafactor,
        dict(lr=0.05, beta2_decay=-0.7, eps=(1e-4, 1e-2), d=2.0, weight_decay=0.1),
    ),
    "muon": (
        exact_muon,
        dict(lr=0.02, weight_decay=0.2, momentum=0.8, eps=1e-6),
    ),
    "schedule_free_sgd": (
        schedule_free_sgd,
        dict(lr=0.2, momentum=0.8, weight_decay=0.1, weight_lr_power=1.5),
    ),
    "schedule_free_adamw": (
        schedule_free_adamw,
        dict(
            lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, weight_lr_power=1.5
        ),
    ),
}
EVERY = [pytest.param(*case, id=name) for name, case in MODERN.items()]


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small take less time than handing them to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(make):
    """A perceptron; for Muon, which takes matrices only, with a constant bias."""
    start, loss = perceptron()
    if make not in (muon, exact_muon):
        return start, loss
    bias = start.pop("0.bias")
    return start, lambda params: loss({**params, "0.bias": bias})


def warming(lr):
    """A rate that rises to a constant, as schedule-free training wants it."""
    return lambda count: lr * ((count + 1).double() / 10).clamp(max=1.0)


def tensors(options):
    return pytree.tree_map_only(float, double, options)


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


def schedule_free_loop(params, loss, steps, *, lr, beta, power, direction):
    """Return `y` and `x` of the paper after a number of steps."""
    z, x = dict(params), dict(params)
    weights, memory = 0.0, {name: {} for name in params}
    for t in range(1, steps + 1):
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


LOOPS = {"lion": lion_step, "lamb": lamb_step, "lars": lars_step}


def loop(name, params, loss, steps, *, lr, **options):
    memory = {key: {} for key in params}
    for t in range(1, steps + 1):
        rate = float(lr(torch.tensor(t - 1))) if callable(lr) else lr
        grads = gradients(loss, params)
        params = {
            key: LOOPS[name](t, p, grads[key], memory[key], lr=rate, **options)
            for key, p in params.items()
        }
    return params


# The numbers of torch.optim.


@pytest.mark.parametrize("make_problem", [rosenbrock, perceptron])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lr=0.005, d=2.0),
        dict(lr=1e-3, beta2_decay=-0.5),
        dict(eps=(1e-2, 0.5)),
        dict(maximize=True, lr=1e-4),
    ],
)
def test_100_steps_of_adafactor_agree_with_torch(make_problem, weight_decay, options):
    params, loss = make_problem()
    options = dict(weight_decay=weight_decay, **options)
    found, _ = train(adafactor(**options), params, loss, 100)
    expected = train_with_torch(
        lambda p: torch.optim.Adafactor(p, **options), params, loss, 100
    )
    assert not torch.equal(found[next(iter(found))], params[next(iter(found))])
    assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lr=0.02, momentum=0.5),
        dict(lr=0.02, nesterov=False, weight_decay=0.0),
        dict(lr=0.02, adjust_lr_fn="match_rms_adamw"),
        dict(lr=0.02, adjust_lr_fn="original", ns_steps=3, eps=0.1),
        dict(lr=0.02, ns_coefficients=(2.0, -1.5, 0.5)),
    ],
)
def test_100_steps_of_muon_agree_with_torch(options):
    # Both round to bfloat16 in the same places, and the float64 around it differs by
    # less than the rounding lets through.
    params, loss = problem(muon)
    found, _ = train(muon(**options), params, loss, 100)
    expected = train_with_torch(
        lambda p: torch.optim.Muon(p, **options), params, loss, 100
    )
    assert not torch.equal(found["0.weight"], params["0.weight"])
    assert_close(found, expected)


def test_one_step_of_muon_has_the_bits_of_torch():
    params = {"tall": torch.zeros(33, 20), "wide": torch.zeros(20, 33)}
    params |= {"row": torch.zeros(1, 7), "square": torch.zeros(16, 16)}
    grads = random_gradients(params, seed=0)
    found, _ = step(muon(0.1), grads, muon().init(params), params)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.Muon(list(leaves.values()), lr=0.1)
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    optimizer.step()
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.detach(), rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(adafactor, torch.optim.Adafactor), (muon, torch.optim.Muon)],
)
def test_a_schedule_of_the_rate_moves_the_decay_as_in_torch(ours, theirs):
    params, loss = problem(ours)
    tx = ours(lambda count: 0.01 * 0.9 ** count.double(), weight_decay=0.5)
    expected = train_with_torch(
        lambda p: theirs(p, lr=0.01, weight_decay=0.5),
        params,
        loss,
        20,
        lambda k: 0.9**k,
    )
    assert_close(train(tx, params, loss, 20)[0], expected)


# The formulas of the papers.


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_steps_agree_with_the_paper(name, schedule, weight_decay):
    make, options = MODERN[name]
    options = options | dict(weight_decay=weight_decay)
    if schedule:
        options["lr"] = warming(options["lr"])
    params, loss = perceptron()
    found, _ = train(make(**options), params, loss, 50)
    assert_close(found, loop(name, params, loss, 50, **options), rtol=1e-11)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_100_schedule_free_steps_agree_with_the_paper(scaled, schedule, weight_decay):
    make, options = MODERN["schedule_free_adamw" if scaled else "schedule_free_sgd"]
    options = options | dict(weight_decay=weight_decay)
    if schedule:
        options["lr"] = warming(options["lr"])
    beta = options["betas"][0] if scaled else options["momentum"]
    direction = partial(decayed, weight_decay=weight_decay)
    if scaled:
        direction = partial(
            decayed_scaled,
            beta=options["betas"][1],
            eps=options["eps"],
            weight_decay=weight_decay,
        )
    params, loss = perceptron()
    tx = make(**options)
    found, state = train(tx, params, loss, 100)
    y, x = schedule_free_loop(
        params,
        loss,
        100,
        lr=options["lr"],
        beta=beta,
        power=options["weight_lr_power"],
        direction=direction,
    )
    assert_close(found, y, rtol=1e-11)
    assert_close(evaluation_parameters(state, found), x, rtol=1e-11)


@pytest.mark.parametrize(
    ("found", "stated"),
    [
        (lion(), lion(1e-4, betas=(0.9, 0.99), weight_decay=0.0)),
        (lamb(), lamb(1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=1e-2)),
        (lars(), lars(1.0, momentum=0.9, weight_decay=0.0, trust_coefficient=1e-3)),
        (
            schedule_free_sgd(),
            schedule_free(sgd(1.0), 1.0, beta=0.9, weight_lr_power=2.0),
        ),
        (
            schedule_free_adamw(),
            schedule_free_adamw(2.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
        ),
    ],
    ids=["lion", "lamb", "lars", "schedule_free_sgd", "schedule_free_adamw"],
)
def test_defaults_are_those_of_the_signature(found, stated):
    params, loss = perceptron()
    found, expected = (train(tx, params, loss, 3)[0] for tx in (found, stated))
    assert_close(found, expected)


def test_schedule_free_adamw_is_adamw_without_momentum_wrapped():
    params, loss = perceptron()
    options = dict(eps=1e-4, weight_decay=0.1)
    tx = schedule_free_adamw(0.02, betas=(0.8, 0.9), **options)
    wrapped = schedule_free(adamw(0.02, betas=(0.0, 0.9), **options), beta=0.8)
    found, expected = (train(each, params, loss, 20)[0] for each in (tx, wrapped))
    assert_close(found, expected)


def test_a_constant_rate_gives_the_plain_mean_of_the_iterates():
    params, loss = perceptron()
    tx = schedule_free(sgd(0.1), 0.1)
    state, iterates = tx.init(params), []
    for _ in range(5):
        params, state = step(tx, gradients(loss, params), state, params)
        iterates.append(state.iterate)
    expected = {name: sum(z[name] for z in iterates) / 5 for name in params}
    assert_close(evaluation_parameters(state, params), expected)


def test_steps_of_no_rate_have_no_weight():
    params, loss = perceptron()
    tx = schedule_free_sgd(lambda count: 0.1 * (count > 1).double())
    found, state = train(tx, params, loss, 2)
    assert_close(found, params)
    assert_close(evaluation_parameters(state, found), params)
    found, state = train(tx, params, loss, 3)
    grads = gradients(loss, params)
    expected = {name: p - 0.1 * grads[name] for name, p in params.items()}
    assert_close(evaluation_parameters(state, found), expected)


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


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_maximizing_is_descending_along_the_negative_gradient(make, options):
    params, loss = problem(make)
    found, _ = train(make(maximize=True, **options), params, loss, 3)
    expected, _ = train(make(**options), params, lambda p: -loss(p), 3)
    assert_same_tree(found, expected)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_tensor_hyperparameters_give_the_numbers_of_numbers(make, options):
    params, loss = problem(make)
    expected, _ = train(make(**options), params, loss, 10)
    found, _ = train(make(**tensors(options)), params, loss, 10)
    assert_close(found, expected)


# Shapes.

names = st.text("abcdef", min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(st.dictionaries(names, shapes, max_size=4), st.sampled_from(sorted(MODERN)))
@examples(80)
def test_updates_of_every_shape_are_finite_and_per_parameter(shapes, name):
    make, options = MODERN[name]
    if make is exact_muon:
        shapes = {key: shape for key, shape in shapes.items() if len(shape) == 2}
    zeros = {key: torch.zeros(s, dtype=torch.float64) for key, s in shapes.items()}
    params = random_gradients(zeros, seed=1)
    tx = make(**options)

    def run(params):
        state = tx.init(params)
        for seed in range(3):
            grads = {
                key: random_gradients({key: p}, seed=seed)[key]
                for key, p in params.items()
            }
            params, state = step(tx, grads, state, params)
        return params, state

    together, state = run(params)
    assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves((together, state)))
    for key, p in params.items():
        alone, _ = run({key: p})
        assert together[key].shape == p.shape
        torch.testing.assert_close(together[key], alone[key], rtol=1e-12, atol=1e-14)


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple))
@examples(30)
def test_every_shape_agrees_with_the_adafactor_of_torch(shape):
    zeros = {"w": torch.zeros(shape, dtype=torch.float64)}
    params = random_gradients(zeros, seed=1)
    tx = adafactor(0.1, weight_decay=0.1)
    state, leaf = tx.init(params), params["w"].clone().requires_grad_()
    optimizer = torch.optim.Adafactor([leaf], lr=0.1, weight_decay=0.1)
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        params, state = step(tx, grads, state, params)
        leaf.grad = grads["w"].clone()
        optimizer.step()
    torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-12, atol=1e-14)


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)))
@examples(30)
def test_every_shape_agrees_with_the_muon_of_torch(shape):
    zeros = {"w": torch.zeros(shape, dtype=torch.float64)}
    params = random_gradients(zeros, seed=1)
    tx = muon(0.1)
    state, leaf = tx.init(params), params["w"].clone().requires_grad_()
    optimizer = torch.optim.Muon([leaf], lr=0.1)
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        params, state = step(tx, grads, state, params)
        leaf.grad = grads["w"].clone()
        optimizer.step()
    torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-12, atol=1e-14)


def test_factored_moments_are_a_row_and_a_column():
    params = {"w": torch.zeros(5, 7, 3), "m": torch.zeros(4, 6), "b": torch.zeros(6)}
    state = scale_by_factored_rms().init(params)
    assert {name: row.shape for name, row in state.rows.items()} == {
        "w": (5, 7, 1),
        "m": (4, 1),
    }
    assert {name: column.shape for name, column in state.columns.items()} == {
        "w": (5, 1, 3),
        "m": (1, 6),
    }
    assert {name: square.shape for name, square in state.squares.items()} == {"b": (6,)}


# Precision.


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_bfloat16_parameters_step_in_float32_and_round_once(make, options):
    make = muon if make is exact_muon else make
    params, _ = problem(make)
    params = {name: p.bfloat16() for name, p in params.items()}
    tx = make(**options)
    state, wide_state = tx.init(params), None
    for seed in range(3):
        grads = random_gradients(params, seed=seed, dtype=torch.bfloat16)
        wide = {name: p.float() for name, p in params.items()}
        wide_state = tx.init(wide) if wide_state is None else wide_state
        expected, wide_state = tx.update(
            {name: g.float() for name, g in grads.items()}, wide_state, wide
        )
        updates, state = tx.update(grads, state, params)
        assert_same_tree(updates, expected)
        params = apply_updates(params, updates)
        assert all(p.dtype == torch.bfloat16 for p in params.values())
    assert_same_tree(state, wide_state)
    moments = [s for s in pytree.tree_leaves(state) if s.ndim > 0]
    assert all(moment.dtype == torch.float32 for moment in moments)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_float64_scalars_widen_neither_parameters_nor_state(make, options):
    make = muon if make is exact_muon else make
    params, _ = problem(make)
    params = {name: p.float() for name, p in params.items()}
    if make is not muon:
        params["scale"] = torch.tensor(2.0)
    tx = make(**tensors(options))
    state = tx.init(params)
    before = pytree.tree_map(lambda s: s.dtype, (params, state))
    for seed in range(2):
        grads = random_gradients(params, seed=seed, dtype=torch.float64)
        params, state = step(tx, grads, state, params)
    assert pytree.tree_map(lambda s: s.dtype, (params, state)) == before


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


def test_autocast_around_the_update_does_not_reach_the_products():
    params, _ = problem(muon)
    params = {name: p.float() for name, p in params.items()}
    grads = random_gradients(params, seed=0)
    tx = orthogonalize(dtype=torch.float32)
    expected, _ = tx.update(grads, ())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = tx.update(grads, ())
    assert_same_tree(found, expected)


# Zeros.


@pytest.mark.parametrize("zero", ["gradients", "parameters", "both"])
@pytest.mark.parametrize(("make", "options"), EVERY)
def test_zeros_make_no_nan_and_their_slopes_are_finite(make, options, zero):
    params, _ = problem(make)
    grads = random_gradients(params, seed=0)
    nothing = {name: torch.zeros_like(p) for name, p in params.items()}
    grads = grads if zero == "parameters" else nothing
    params = params if zero == "gradients" else nothing
    options = options | ({"eps": (0.0, 0.0)} if make is adafactor else {})
    if make in (lamb, schedule_free_adamw):
        options = options | {"eps": 0.0}

    def outcome(lr, params, grads):
        tx = make(**options | {"lr": lr})
        state = tx.init(params)
        for _ in range(3):
            params, state = step(tx, grads, state, params)
        return sum(p.sum() for p in params.values()), params

    arguments = (double(options["lr"]), params, grads)
    slopes, found = torch.func.grad(outcome, argnums=(0, 1, 2), has_aux=True)(
        *arguments
    )
    assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves((slopes, found)))
    if zero == "both":
        assert_same_tree(found, nothing)
    elif zero == "parameters":
        moved = {name: bool((p != 0).all()) for name, p in found.items()}
        assert moved == dict.fromkeys(found, make is not adafactor)


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


def test_lion_does_not_move_what_never_had_a_gradient():
    grads = {"w": torch.tensor([0.0, -2.0])}
    updates, _ = scale_by_lion().update(grads, scale_by_lion().init(grads))
    assert updates["w"].tolist() == [0.0, -1.0]


# Purity and state.


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_gradients_state_and_parameters_are_never_changed(make, options):
    params, loss = problem(make)
    tx = make(**options | {"lr": warming(options["lr"])})
    params, state = train(tx, params, loss, 2)
    arguments = (gradients(loss, params), state, params)
    leaves = pytree.tree_leaves(arguments)
    copies = pytree.tree_map(torch.clone, arguments)
    versions = [leaf._version for leaf in leaves]
    first, second = step(tx, *arguments), step(tx, *arguments)
    assert [leaf._version for leaf in leaves] == versions
    assert_same_tree(arguments, copies)
    assert_same_tree(first, second)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_state_is_a_tree_of_tensors_that_shares_none_with_the_parameters(make, options):
    params, _ = problem(make)
    state = make(**options).init(params)
    leaves = pytree.tree_leaves(state)
    assert leaves
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    pointers = [leaf.data_ptr() for leaf in (*leaves, *params.values())]
    assert len(set(pointers)) == len(pointers)
    assert_same_tree(pytree.tree_map(torch.clone, state), state)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_no_value_is_read_and_state_lives_where_the_parameters_do(make, options):
    tx = make(**options | {"lr": warming(0.1)})
    params = {"w": torch.zeros(3, 2, device="meta")}
    params, state = step(tx, params, tx.init(params), params)
    leaves = pytree.tree_leaves((params, state))
    assert {leaf.device.type for leaf in leaves} == {"meta"}


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_training_without_a_graph_records_none(make, options):
    params, _ = problem(make)
    trained = {name: p.requires_grad_() for name, p in params.items()}
    tx = make(**options)
    state = tx.init(trained)
    with torch.no_grad():
        results = step(tx, trained, state, trained)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(results))


def kept(tree, name):
    """Collect what a state holds under the name of a parameter."""
    if isinstance(tree, dict):
        return [tree[name]] if name in tree else []
    if isinstance(tree, tuple):
        return [found for each in tree for found in kept(each, name)]
    return []


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_a_none_gradient_keeps_parameter_and_state_while_others_move(make, options):
    params, loss = problem(make)
    tx = make(**options)
    params, state = train(tx, params, loss, 2)
    grads = gradients(loss, params)
    updates, partial_state = tx.update({**grads, "1.weight": None}, state, params)
    all_updates, full_state = tx.update(grads, state, params)
    assert updates["1.weight"] is None
    assert apply_updates(params, updates)["1.weight"] is params["1.weight"]
    assert torch.equal(updates["0.weight"], all_updates["0.weight"])
    before, after = kept(state, "1.weight"), kept(partial_state, "1.weight")
    assert before
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
    for old, new in zip(before, kept(full_state, "1.weight"), strict=True):
        assert not torch.equal(old, new)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_an_empty_dictionary_is_a_model_without_parameters(make, options):
    tx = make(**options | {"lr": warming(0.1)})
    params, _ = step(tx, {}, tx.init({}), {})
    assert params == {}


# Transforms.

MEMBERS = [0.5, 1.0, 2.0]


def varied(options, by):
    """Scale every number but the betas, which are taken to a power."""

    def vary(value):
        return value**by if 0.5 < value < 1 else value * by

    return pytree.tree_map_only(float, vary, options)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_members_with_hyperparameters_of_their_own_train_as_they_do_alone(
    make, options
):
    start, loss = problem(make)
    alone = [random_gradients(start, seed=seed) for seed in range(len(MEMBERS))]
    stacked = {key: torch.stack([m[key] for m in alone]) for key in start}
    values = [varied(options, by) for by in MEMBERS]
    leaves, form = pytree.tree_flatten(values[0])
    columns = zip(*(pytree.tree_leaves(value) for value in values), strict=True)
    per_member = [double(column) for column in columns]
    assert len(leaves) == len(per_member) >= 4

    def one(numbers, params, state):
        tx = make(**pytree.tree_unflatten(numbers, form))
        grads = torch.func.grad(loss)(params)
        return step(tx, grads, state, params)

    state = torch.vmap(make(**options).init)(stacked)
    for _ in range(5):
        stacked, state = torch.vmap(one)(per_member, stacked, state)
    for member, params in enumerate(alone):
        expected, expected_state = train(make(**values[member]), params, loss, 5)
        assert_close({key: p[member] for key, p in stacked.items()}, expected)
        found = pytree.tree_map(lambda s, i=member: s[i], state)
        for a, b in zip(
            pytree.tree_leaves(found), pytree.tree_leaves(expected_state), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_members_of_muon_in_bfloat16_train_as_they_do_alone():
    start, loss = problem(muon)
    alone = [random_gradients(start, seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([m[key] for m in alone]) for key in start}
    rates = double([0.1, 0.01, 0.02])

    def one(rate, params, state):
        return step(muon(rate), torch.func.grad(loss)(params), state, params)

    state = torch.vmap(muon().init)(stacked)
    for _ in range(10):
        stacked, state = torch.vmap(one)(rates, stacked, state)
    for member, params in enumerate(alone):
        expected, _ = train(muon(rates[member].item()), params, loss, 10)
        assert_close({key: p[member] for key, p in stacked.items()}, expected)


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


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_a_step_compiles_to_one_graph(make, options):
    tx = make(**options | {"lr": warming(options["lr"])})
    params, loss = problem(make)
    state = tx.init(params)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda grads, state, params: step(tx, grads, state, params),
        fullgraph=True,
        backend="aot_eager",
    )
    expected, expected_state = params, state
    for _ in range(2):
        params, state = compiled(gradients(loss, params), state, params)
        expected, expected_state = step(
            tx, gradients(loss, expected), expected_state, expected
        )
    assert_close(params, expected)
    leaves = zip(
        pytree.tree_leaves(state), pytree.tree_leaves(expected_state), strict=True
    )
    for a, b in leaves:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_members_whose_optimizers_are_made_inside_compile_to_one_graph(make, options):
    start, loss = problem(make)
    stacked = {key: torch.stack([p, 2 * p]) for key, p in start.items()}
    state = torch.vmap(make(**options).init)(stacked)

    def one(rate, params, state):
        tx = make(**options | {"lr": rate})
        return step(tx, torch.func.grad(loss)(params), state, params)

    torch.compiler.reset()
    members = torch.vmap(one)
    compiled = torch.compile(members, fullgraph=True, backend="aot_eager")
    arguments = (double([0.1, 0.01]), stacked, state)
    assert_close(compiled(*arguments)[0], members(*arguments)[0])


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_gradients_through_ten_steps_match_finite_differences(make, options):
    start, loss = problem(make)

    def outcome(rate, weight):
        params = {**start, "1.weight": weight}
        tx = make(**options | {"lr": rate})
        state = tx.init(params)
        for _ in range(10):
            grads = torch.func.grad(loss)(params)
            params, state = step(tx, grads, state, params)
        return loss(params)

    arguments = (double(options["lr"] / 3), start["1.weight"])
    by_rate, by_weight = torch.func.grad(outcome, argnums=(0, 1))(*arguments)
    generator = torch.Generator().manual_seed(0)
    way = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    h = 1e-6
    for slope, nudge in [
        (by_rate, (h, 0.0)),
        ((by_weight * way).sum(), (0.0, h * way)),
    ]:
        high, low = (
            outcome(*(a + sign * n for a, n in zip(arguments, nudge, strict=True)))
            for sign in (1, -1)
        )
        torch.testing.assert_close(slope, (high - low) / (2 * h), rtol=1e-5, atol=1e-8)
    assert by_rate != 0
    assert (by_weight != 0).all()


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


# Parameters to evaluate.


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
    assert_close(found, evaluation_parameters(alone, expected))


# Errors.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lion(-1.0), r"lion\(lr=-1.0\): expected lr >= 0"),
        (lambda: lion(weight_decay=-1), r"lion\(weight_decay=-1\): expected"),
        (lambda: lion(betas=(1.0, 0.9)), r"lion\(betas=\(1.0, 0.9\)\): expected 0 <="),
        (lambda: lamb(-1.0), r"lamb\(lr=-1.0\): expected lr >= 0"),
        (lambda: lamb(eps=-1.0), r"lamb\(eps=-1.0\): expected eps >= 0"),
        (lambda: lamb(weight_decay=-1), r"lamb\(weight_decay=-1\): expected"),
        (lambda: lamb(betas=(0.9, 1.0)), r"lamb\(betas=\(0.9, 1.0\)\): expected 0 <="),
        (lambda: lars(-1.0), r"lars\(lr=-1.0\): expected lr >= 0"),
        (lambda: lars(momentum=-1.0), r"lars\(momentum=-1.0\): expected momentum >="),
        (lambda: lars(weight_decay=-1), r"lars\(weight_decay=-1\): expected"),
        (lambda: lars(trust_coefficient=-1), r"lars\(trust_coefficient=-1\): expected"),
        (lambda: adafactor(-1.0), r"adafactor\(lr=-1.0\): expected lr >= 0"),
        (lambda: adafactor(weight_decay=-1), r"adafactor\(weight_decay=-1\): expected"),
        (
            lambda: adafactor(eps=(-1.0, 1e-3)),
            r"adafactor\(eps\[0\]=-1.0\): expected eps\[0\] >= 0",
        ),
        (
            lambda: adafactor(eps=(None, -1.0)),
            r"adafactor\(eps\[1\]=-1.0\): expected eps\[1\] >= 0",
        ),
        (
            lambda: adafactor(beta2_decay=0.8),
            r"adafactor\(beta2_decay=0.8\): expected beta2_decay <= 0",
        ),
        (lambda: adafactor(d=0.5), r"adafactor\(d=0.5\): expected d >= 1"),
        (lambda: muon(-1.0), r"muon\(lr=-1.0\): expected lr >= 0"),
        (lambda: muon(momentum=-1.0), r"muon\(momentum=-1.0\): expected momentum >="),
        (lambda: muon(weight_decay=-1), r"muon\(weight_decay=-1\): expected"),
        (lambda: muon(eps=-1.0), r"muon\(eps=-1.0\): expected eps >= 0"),
        (
            lambda: muon(adjust_lr_fn="rms"),
            r"muon\(adjust_lr_fn='rms'\): expected one of None, 'original', 'match_rms",
        ),
        (
            lambda: muon(ns_coefficients=(1.0, 2.0)),
            r"orthogonalize\(ns_coefficients=\(1.0, 2.0\)\): expected three numbers",
        ),
        (
            lambda: muon(ns_steps=100),
            r"orthogonalize\(ns_steps=100\): expected less than 100",
        ),
        (
            lambda: muon(ns_steps=-1),
            r"orthogonalize\(ns_steps=-1\): expected a whole number >= 0",
        ),
        (
            lambda: muon(dtype=torch.int64),
            r"orthogonalize\(dtype=torch.int64\): expected a real floating-point dtype",
        ),
        (
            lambda: schedule_free(sgd(), -1.0),
            r"schedule_free\(lr=-1.0\): expected lr >= 0",
        ),
        (
            lambda: schedule_free(sgd(), beta=1.0),
            r"schedule_free\(beta=1.0\): expected 0 <= beta < 1",
        ),
        (
            lambda: schedule_free(sgd(), weight_lr_power=-2.0),
            r"schedule_free\(weight_lr_power=-2.0\): expected weight_lr_power >= 0",
        ),
        (
            lambda: schedule_free_sgd(momentum=-0.5),
            r"schedule_free_sgd\(momentum=-0.5\): expected 0 <= momentum < 1",
        ),
        (lambda: schedule_free_sgd(-1.0), r"schedule_free_sgd\(lr=-1.0\): expected lr"),
        (
            lambda: schedule_free_sgd(weight_decay=-1),
            r"schedule_free_sgd\(weight_decay=-1\): expected",
        ),
        (
            lambda: schedule_free_sgd(weight_lr_power=-1),
            r"schedule_free_sgd\(weight_lr_power=-1\): expected",
        ),
        (
            lambda: schedule_free_adamw(-1.0),
            r"schedule_free_adamw\(lr=-1.0\): expected",
        ),
        (
            lambda: schedule_free_adamw(eps=-1),
            r"schedule_free_adamw\(eps=-1\): expected",
        ),
        (
            lambda: schedule_free_adamw(weight_decay=-1),
            r"schedule_free_adamw\(weight_decay=-1\): expected",
        ),
        (
            lambda: schedule_free_adamw(weight_lr_power=-1),
            r"schedule_free_adamw\(weight_lr_power=-1\): expected",
        ),
        (
            lambda: schedule_free_adamw(betas=(0.9, 1.0)),
            r"schedule_free_adamw\(betas=\(0.9, 1.0\)\): expected 0 <= betas\[1\] < 1",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_coefficients_are_numbers():
    coefficients = (2.0, torch.tensor(-1.5), 0.5)
    message = r"orthogonalize\(ns_coefficients\[1\]=.*expected a number, got a Tensor"
    with pytest.raises(TypeError, match=message):
        muon(ns_coefficients=coefficients)


def test_muon_takes_matrices_alone_and_names_the_way_out():
    params = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    message = r"orthogonalize\(params\): .*shape \(3,\) in 'b'.*vgrad.optim.partition"
    with pytest.raises(ValueError, match=message):
        muon().init(params)
    with pytest.raises(ValueError, match=r"\(grads\): .*shape \(5, 2, 3\) in 'w'"):
        orthogonalize().update({"w": torch.zeros(5, 2, 3), "b": None}, ())
    tx = partition({"w": muon(), "*": adamw()})
    updated, _ = step(tx, params, tx.init(params), params)
    assert_same_tree(updated, params)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (scale_by_trust_ratio(), r"scale_by_trust_ratio\(params=None\): expected the"),
        (adafactor(), r"adafactor\(params=None\): expected the parameters"),
        (schedule_free_sgd(), r"schedule_free\(params=None\): expected the parameters"),
    ],
)
def test_missing_parameters_are_refused(tx, message):
    params = {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize(
    ("tx", "function"),
    [
        (lion(), "scale_by_lion"),
        (lamb(), "scale_by_adam"),
        (lars(), "scale_by_trust_ratio"),
        (adafactor(), "scale_by_factored_rms"),
        (muon(), "muon"),
        (schedule_free_sgd(), "schedule_free"),
    ],
)
def test_names_that_differ_are_listed(tx, function):
    params = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}
    grads = {"a": torch.zeros(2, 2), "c": torch.zeros(2, 2)}
    message = rf"{function}\(grads\).*missing: 'b'; unexpected: 'c'"
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
@pytest.mark.parametrize(
    ("tx", "function"),
    [
        (lion(), "scale_by_lion"),
        (lamb(), "scale_by_adam"),
        (adafactor(), "scale_by_factored_rms"),
        (muon(), "orthogonalize"),
        (schedule_free_adamw(), "schedule_free_adamw"),
    ],
)
def test_parameters_that_are_not_real_are_refused(tx, function, dtype):
    with pytest.raises(TypeError, match=rf"{function}\(params\): expected real.*'w'"):
        tx.init({"w": torch.zeros(2, 2, dtype=dtype)})


def test_a_state_without_averages_has_no_parameters_to_evaluate():
    params = {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"evaluation_parameters\(state\): expected"):
        evaluation_parameters(adamw().init(params), params)
    state = schedule_free_sgd().init({**params, "b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"evaluation_parameters\(params\).*'b'"):
        evaluation_parameters(state, params)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_gradients_with_a_batch_dimension_are_refused(make, options):
    params, _ = problem(make)
    tx = make(**options)
    grads = {name: torch.zeros(5, *p.shape).double() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"expected (shape|matrices).*got"):
        step(tx, grads, tx.init(params), params)


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_hyperparameters_per_member_are_refused_outside_vmap(make, options):
    params, _ = problem(make)
    for name in options:
        values = pytree.tree_map_only(float, lambda v: double([v, v]), options[name])
        tx = make(**options | {name: values})
        with pytest.raises(ValueError, match=r"of shape \(2,\).*without dimensions"):
            step(tx, params, tx.init(params), params)

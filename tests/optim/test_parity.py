"""Every optimizer of `torch.optim` against it."""

import inspect
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.optim.optimizers import OPTIONS, TORCH
from tests.optim.problems import (
    double,
    go_on,
    leaves_of,
    matrices,
    perceptron,
    random_gradients,
    random_tensors,
    rosenbrock,
    stepped_with_torch,
    train,
    train_with_torch,
    values,
)
from tests.oracle import assert_exact
from vgrad import optim

MOVES = {
    "plain": dict(weight_decay=0.0),
    "decayed": dict(weight_decay=0.1),
    "maximized": dict(weight_decay=0.0, maximize=True),
    "decayed, maximized": dict(weight_decay=0.1, maximize=True),
}
LACKING = {"rprop": "weight_decay", "muon": "maximize"}
GRID = [
    pytest.param(name, move | options, id=f"{name}-{number}-{moved}")
    for name, choices in OPTIONS.items()
    for number, options in enumerate(choices)
    for moved, move in MOVES.items()
    if not move.get(LACKING.get(name))
    # For the sake of time, each alone with the first options only.
    if number == 0 or moved in ("plain", "decayed, maximized") or name == "muon"
]
EVERY = [
    pytest.param(name, dict(weight_decay=0.1) | choices[-1], id=name)
    for name, choices in OPTIONS.items()
]


def without_lacking(name, options):
    return {key: v for key, v in options.items() if key != LACKING.get(name)}


@pytest.fixture
def _double_by_default():
    """Make torch keep its scalar states, and their rounding, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def both_problems(*, sign=1.0):
    """The valley of Rosenbrock and a small regression, as one model."""
    (start, valley), (weights, regression) = rosenbrock(), perceptron(sign=sign)

    def loss(params):
        return sign * valley(params) + regression(params)

    return {**start, **weights}, loss


def problem(name, options):
    make = matrices if name == "muon" else both_problems
    return make(sign=-1.0 if options.get("maximize") else 1.0)


@pytest.mark.usefixtures("_double_by_default")
@pytest.mark.parametrize(("name", "options"), GRID)
def test_100_steps_agree_with_torch(name, options):
    options = without_lacking(name, options)
    ours, theirs = TORCH[name]
    params, loss = problem(name, options)
    found, _ = train(ours(**options), params, loss, 100)
    # Not `foreach`, which Adafactor and RAdam compute in another order.
    expected = train_with_torch(
        lambda p: theirs(p, **options | single(theirs)), params, loss, 100
    )
    assert all(not torch.equal(found[key], start) for key, start in params.items())
    assert_exact(found, expected, 1e-12)


def single(theirs):
    takes = "foreach" in inspect.signature(theirs).parameters
    return {"foreach": False} if takes else {}


@pytest.mark.parametrize("name", TORCH)
def test_names_order_and_defaults_of_arguments_are_those_of_torch(name):
    ours, theirs = (inspect.signature(make).parameters for make in TORCH[name])
    machinery = {"params", "foreach", "capturable", "differentiable", "fused"}
    if name == "adam":
        machinery.add("decoupled_weight_decay")  # which makes an AdamW of it
    expected = {key: p.default for key, p in theirs.items() if key not in machinery}
    own = {"maximize", "dtype"} - set(theirs)
    assert {key: p.default for key, p in ours.items() if key not in own} == expected
    kinds = [p.kind for p in ours.values()]
    assert kinds[1:] == [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - 1)
    shared = [key for key in theirs if key in ours and key != "maximize"]
    assert [key for key in ours if key in shared] == shared


@pytest.mark.usefixtures("_double_by_default")
@pytest.mark.parametrize(("name", "options"), [e for e in EVERY if e.id != "rprop"])
def test_schedules_start_at_zero_and_move_the_decay_as_in_torch(name, options):
    options = without_lacking(name, options | dict(lr=1e-3))
    ours, theirs = TORCH[name]
    params, loss = problem(name, options)
    tx = ours(**options | dict(lr=lambda count: 1e-3 * 0.9 ** count.double()))
    expected = train_with_torch(
        lambda p: theirs(p, **options), params, loss, 20, lambda k: 0.9**k
    )
    assert_exact(train(tx, params, loss, 20)[0], expected, 1e-12)


def test_a_schedule_may_return_a_number():
    params, loss = perceptron()
    expected, _ = train(optim.sgd(0.1), params, loss, 3)
    assert_exact(train(optim.sgd(lambda count: 0.1), params, loss, 3)[0], expected, 0)


SHAPES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    max_size=4,
)


@pytest.mark.usefixtures("_double_by_default")
@given(SHAPES, st.sampled_from([e.values for e in EVERY]))
@examples(80)
def test_every_shape_agrees_with_torch_empty_ones_too(shapes, case):
    name, options = case
    if name == "muon":
        shapes = {key: (1 + 2 * len(s), 1 + sum(s)) for key, s in shapes.items()}
    if name == "adafactor":  # torch divides by the sizes
        shapes = {key: tuple(size + 1 for size in s) for key, s in shapes.items()}
    options = without_lacking(name, options | dict(lr=0.1))
    ours, theirs = TORCH[name]
    params = random_tensors(shapes, seed=1)
    tx = ours(**options)
    found, state = params, tx.init(params)
    leaves = leaves_of(params)
    # torch.optim refuses an empty list, hence one more tensor without a gradient.
    optimizer = theirs([*leaves.values(), torch.zeros(1, 1)], **options)
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        found, state = optim.step(tx, grads, state, found)
        stepped_with_torch(optimizer, leaves, grads)
    assert_exact(found, values(leaves), 1e-12)


@pytest.mark.usefixtures("_double_by_default")
@pytest.mark.parametrize("t0", [0.0, 3.5, 1e6])
def test_asgd_keeps_the_average_of_torch_in_its_state(t0):
    params, loss = perceptron()
    _, state = train(optim.asgd(0.1, t0=t0), params, loss, 10)
    leaves = leaves_of(params)
    optimizer = torch.optim.ASGD(list(leaves.values()), lr=0.1, t0=t0, foreach=False)
    go_on(optimizer, leaves, loss, 10)
    expected = {key: optimizer.state[leaf]["ax"] for key, leaf in leaves.items()}
    assert_exact(optim.averaged_parameters(state), expected, 1e-12)
    averages = [torch.equal(expected[key], leaf) for key, leaf in leaves.items()]
    assert all(averages) if t0 == 1e6 else not any(averages)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.6])
def test_radam_is_not_rectified_where_the_mean_square_never_is_reliable(beta2):
    params, loss = perceptron()
    options = dict(lr=0.01, betas=(0.9, beta2))
    expected = train_with_torch(
        lambda p: torch.optim.RAdam(p, **options), params, loss, 20
    )
    found, _ = train(optim.radam(**options), params, loss, 20)
    assert_exact(found, expected, 1e-12)

    def outcome(bias, beta2):
        tx, start = optim.radam(0.01, betas=(0.9, beta2)), {**params, "0.bias": bias}
        grads = torch.func.grad(loss)(start)
        return loss(optim.step(tx, grads, tx.init(start), start)[0])

    slopes = torch.func.grad(outcome, argnums=(0, 1))(params["0.bias"], double(beta2))
    assert slopes[0].isfinite().all()
    assert slopes[1] == 0


def test_one_step_of_muon_in_float32_has_the_bits_of_torch():
    shapes = {"tall": (33, 20), "wide": (20, 33), "row": (1, 7), "square": (16, 16)}
    params = {key: torch.zeros(shape) for key, shape in shapes.items()}
    grads, leaves = random_gradients(params, seed=0), leaves_of(params)
    found, _ = optim.step(optim.muon(0.1), grads, optim.muon().init(params), params)
    stepped_with_torch(torch.optim.Muon(list(leaves.values()), lr=0.1), leaves, grads)
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.detach(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), EVERY)
def test_float32_updates_are_those_of_torch(name, options, dtype):
    """Of parameters in bfloat16 too, where torch is given the widened ones."""
    options = without_lacking(name, options | dict(lr=0.1))
    ours, theirs = TORCH[name]
    params = {"w": torch.linspace(-3, 3, 64).reshape(8, 8).to(dtype)}
    tx = ours(**options)
    state, leaves = tx.init(params), leaves_of({"w": params["w"].float()})
    optimizer = theirs(list(leaves.values()), **options)
    for seed in range(7):
        grads = random_gradients(params, seed=seed)
        before = leaves["w"].detach().clone()
        updates, state = tx.update(grads, state, params)
        stepped_with_torch(optimizer, leaves, {"w": grads["w"].float()})
        moved = leaves["w"].detach() - before
        torch.testing.assert_close(updates["w"], moved, rtol=1e-5, atol=1e-6)
        params = optim.apply_updates(params, updates)
        with torch.no_grad():
            leaves["w"].copy_(params["w"])


def test_bias_corrections_are_exact_in_late_steps():
    tx = optim.scale_by_adam()
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    state = tx.init(params)._replace(count=torch.tensor(999))
    updates, _ = tx.update({"w": torch.ones(1).double()}, state)
    mean, square = 0.1 / (1 - 0.9**1000), 0.001 / (1 - 0.999**1000)
    assert_exact(updates, {"w": double([mean / (square**0.5 + 1e-8)])}, 1e-12)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_square_that_overflows_stays_infinite_as_in_torch(name):
    ours, theirs = TORCH[name]
    tx, params = ours(0.1), {"w": torch.ones(1)}
    leaves, state = leaves_of(params), tx.init(params)
    optimizer = theirs(list(leaves.values()), lr=0.1)
    for number in (1e20, 1.0, -2.0):
        grads = {"w": torch.tensor([number])}
        stepped_with_torch(optimizer, leaves, grads)
        params, state = optim.step(tx, grads, state, params)
    assert params["w"].isfinite().all()
    assert_exact(params, values(leaves), 0)


def test_sgd_with_momentum_takes_complex_parameters():
    start = {"w": torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128)}

    def loss(params):
        return (params["w"] - 1j).abs().square().sum()

    options = dict(lr=0.1, momentum=0.9, weight_decay=0.1)
    expected = train_with_torch(partial(torch.optim.SGD, **options), start, loss, 10)
    assert_exact(train(optim.sgd(**options), start, loss, 10)[0], expected, 1e-12)

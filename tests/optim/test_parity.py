"""Every optimizer of `torch.optim` against it."""

import inspect

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


def both(name, options):
    """Return our optimizer, and that of torch as a function of its parameters."""
    ours, theirs = TORCH[name]
    options = {key: v for key, v in options.items() if key != LACKING.get(name)}
    # Not `foreach`, which Adafactor and RAdam compute in another order.
    takes = "foreach" in inspect.signature(theirs).parameters
    single = {"foreach": False} if takes else {}
    return ours(**options), lambda params: theirs(params, **options, **single)


@pytest.fixture
def _double_by_default():
    """Make torch keep its scalar states, and their rounding, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


in_double = pytest.mark.usefixtures("_double_by_default")


def problem(name, options):
    """The valley of Rosenbrock and a small regression, as one model."""
    sign = -1.0 if options.get("maximize") else 1.0
    if name == "muon":
        return matrices(sign=sign)
    start, regression = perceptron(sign=sign)
    start |= {"x": double(-1.2), "y": double(1.0)}
    return start, lambda params: sign * rosenbrock(params) + regression(params)


@in_double
@pytest.mark.parametrize(("name", "options"), GRID)
def test_100_steps_agree_with_torch(name, options):
    (tx, make), (params, loss) = both(name, options), problem(name, options)
    found, _ = train(tx, params, loss, 100)
    assert all(not torch.equal(found[key], start) for key, start in params.items())
    assert_exact(found, train_with_torch(make, params, loss, 100), 1e-12)


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


@in_double
@pytest.mark.parametrize(("name", "options"), [e for e in EVERY if e.id != "rprop"])
def test_schedules_start_at_zero_and_move_the_decay_as_in_torch(name, options):
    params, loss = problem(name, options)
    falling = dict(lr=lambda count: 1e-3 * 0.9 ** count.double())
    tx, _ = both(name, options | falling)
    _, make = both(name, options | dict(lr=1e-3))
    expected = train_with_torch(make, params, loss, 20, lambda k: 0.9**k)
    assert_exact(train(tx, params, loss, 20)[0], expected, 1e-12)


NAMES = st.text("abcdef", min_size=1, max_size=3)
SIZES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@in_double
@given(
    st.dictionaries(NAMES, SIZES, max_size=4),
    st.sampled_from([e.values for e in EVERY]),
)
@examples(80)
def test_every_shape_agrees_with_torch_empty_ones_too(shapes, case):
    name, options = case
    if name == "muon":
        shapes = {key: (1 + 2 * len(s), 1 + sum(s)) for key, s in shapes.items()}
    if name == "adafactor":  # torch divides by the sizes
        shapes = {key: tuple(size + 1 for size in s) for key, s in shapes.items()}
    params = random_tensors(shapes, seed=1)
    tx, make = both(name, options | dict(lr=0.1))
    state, leaves = tx.init(params), leaves_of(params)
    # torch.optim refuses an empty list, hence one more tensor without a gradient.
    optimizer = make([*leaves.values(), torch.zeros(1, 1)])
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        params, state = optim.step(tx, grads, state, params)
        stepped_with_torch(optimizer, leaves, grads)
    assert_exact(params, values(leaves), 1e-12)


@in_double
@pytest.mark.parametrize("t0", [0.0, 3.5, 1e6])
def test_asgd_keeps_the_average_of_torch_in_its_state(t0):
    params, loss = perceptron()
    (tx, make), leaves = both("asgd", dict(lr=0.1, t0=t0)), leaves_of(params)
    optimizer = make(list(leaves.values()))
    go_on(optimizer, leaves, loss, 10)
    expected = {key: optimizer.state[leaf]["ax"] for key, leaf in leaves.items()}
    _, state = train(tx, params, loss, 10)
    assert_exact(optim.averaged_parameters(state), expected, 1e-12)
    averages = [torch.equal(expected[key], leaf) for key, leaf in leaves.items()]
    assert all(averages) if t0 == 1e6 else not any(averages)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.6])
def test_radam_is_not_rectified_where_the_mean_square_never_is_reliable(beta2):
    params, loss = perceptron()
    tx, make = both("radam", dict(lr=0.01, betas=(0.9, beta2)))
    expected = train_with_torch(make, params, loss, 20)
    assert_exact(train(tx, params, loss, 20)[0], expected, 1e-12)

    def outcome(bias, beta2):
        tx, start = optim.radam(0.01, betas=(0.9, beta2)), {**params, "0.bias": bias}
        grads = torch.func.grad(loss)(start)
        return loss(optim.step(tx, grads, tx.init(start), start)[0])

    slopes = torch.func.grad(outcome, argnums=(0, 1))(params["0.bias"], double(beta2))
    assert slopes[0].isfinite().all()
    assert slopes[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), EVERY)
def test_float32_updates_are_those_of_torch(name, options, dtype):
    """Of parameters in bfloat16 too, where torch is given the widened ones."""
    tx, make = both(name, options | dict(lr=0.1))
    params = {"w": torch.linspace(-3, 3, 64).reshape(8, 8).to(dtype)}
    state, leaves = tx.init(params), leaves_of({"w": params["w"].float()})
    optimizer = make(list(leaves.values()))
    for seed in range(7):
        grads = random_gradients(params, seed=seed)
        before = values(leaves)["w"]
        updates, state = tx.update(grads, state, params)
        stepped_with_torch(optimizer, leaves, {"w": grads["w"].float()})
        moved = leaves["w"].detach() - before
        torch.testing.assert_close(updates["w"], moved, rtol=1e-5, atol=1e-6)
        params = optim.apply_updates(params, updates)
        leaves["w"].data.copy_(params["w"])


def test_sgd_with_momentum_takes_complex_parameters():
    start = {"w": torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128)}
    tx, make = both("sgd", dict(lr=0.1, momentum=0.9, weight_decay=0.1))

    def loss(params):
        return (params["w"] - 1j).abs().square().sum()

    expected = train_with_torch(make, start, loss, 10)
    assert_exact(train(tx, start, loss, 10)[0], expected, 1e-12)

"""Optimizers against `torch.optim`, alone, per member, and under the transforms."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.examples import examples
from vgrad import optim

SGD = [
    dict(momentum=0.9),
    dict(momentum=0.9, nesterov=True),
    dict(momentum=0.9, dampening=0.5),
    dict(dampening=0.5),
    dict(),
]
ADAM = [dict(), dict(betas=(0.5, 0.9), eps=1e-4), dict(betas=(0.0, 0.99))]
OPTIMIZERS = {
    "sgd": (optim.sgd, torch.optim.SGD),
    "adam": (optim.adam, torch.optim.Adam),
    "adamw": (optim.adamw, torch.optim.AdamW),
}
GRID = [("sgd", lr, case) for case in SGD for lr in (1e-4, 1e-3)]
GRID += [("adam", lr, case) for case in ADAM for lr in (1e-3, 1e-2)]
GRID += [("adamw", lr, case) for case in ADAM for lr in (1e-3, 1e-2)]
DEFAULTS = [("sgd", {}), ("adam", {}), ("adamw", {})]
EVERY = [
    ("sgd", {}),
    ("sgd", dict(momentum=0.9, dampening=0.5, weight_decay=0.1)),
    ("sgd", dict(momentum=0.9, nesterov=True)),
    ("adam", dict(weight_decay=0.1)),
    ("adamw", {}),
]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def rosenbrock():
    """The valley of Rosenbrock, from the customary start."""

    def loss(params):
        x, y = params["x"], params["y"]
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2

    return {"x": double(-1.2), "y": double(1.0)}, loss


def perceptron():
    """A regression with one hidden layer."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs, targets = normal(8, 3), normal(8, 2)

    def loss(params):
        hidden = torch.tanh(inputs @ params["0.weight"].T + params["0.bias"])
        return (hidden @ params["1.weight"].T - targets).square().mean()

    shapes = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4)}
    return {name: normal(*shape) for name, shape in shapes.items()}, loss


PROBLEMS = {"rosenbrock": rosenbrock, "perceptron": perceptron}


def gradients(loss, params):
    """The gradients of plain autograd."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    values = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return dict(zip(leaves, values, strict=True))


def train(tx, params, loss, steps):
    """Run an optimizer of the package."""
    state = tx.init(params)
    for _ in range(steps):
        params, state = optim.step(tx, gradients(loss, params), state, params)
    return params, state


def train_with_torch(make, params, loss, steps, schedule=None):
    """Run an optimizer of `torch.optim` on copies."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = make(list(leaves.values()))
    rates = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(leaves).backward()
        optimizer.step()
        if rates:
            rates.step()
    return {name: p.detach() for name, p in leaves.items()}


def random_gradients(params, *, seed, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(
            dtype or p.dtype
        )
        for name, p in params.items()
    }


def assert_close(found, expected, *, rtol=1e-12):
    assert list(found) == list(expected)
    for name, value in expected.items():
        difference = (found[name] - value).abs().max()
        assert difference <= rtol * value.abs().max(), (name, difference)


def assert_same_tree(found, expected):
    left, left_form = pytree.tree_flatten(found)
    right, right_form = pytree.tree_flatten(expected)
    assert left_form == right_form
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# The numbers of torch.optim.


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "lr", "options"), GRID)
def test_100_steps_agree_with_torch(problem, name, lr, options, weight_decay):
    params, loss = PROBLEMS[problem]()
    ours, theirs = OPTIMIZERS[name]
    options = dict(lr=lr, weight_decay=weight_decay, **options)
    found, _ = train(ours(**options), params, loss, 100)
    expected = train_with_torch(lambda p: theirs(p, **options), params, loss, 100)
    assert not torch.equal(found[next(iter(found))], params[next(iter(found))])
    assert_close(found, expected)


@pytest.mark.parametrize(("name", "options"), DEFAULTS)
def test_defaults_are_those_of_torch(name, options):
    params, loss = perceptron()
    ours, theirs = OPTIMIZERS[name]
    found, _ = train(ours(**options), params, loss, 5)
    assert_close(found, train_with_torch(theirs, params, loss, 5))


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_schedule_starts_at_zero_and_moves_the_decay_too(name, options):
    params, loss = perceptron()
    ours, theirs = OPTIMIZERS[name]
    tx = ours(lambda count: 0.01 * 0.9 ** count.double(), **options)
    expected = train_with_torch(
        lambda p: theirs(p, lr=0.01, **options), params, loss, 20, lambda k: 0.9**k
    )
    assert_close(train(tx, params, loss, 20)[0], expected)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_tensor_hyperparameters_give_the_numbers_of_numbers(name, options):
    params, loss = perceptron()
    ours, _ = OPTIMIZERS[name]
    options = dict(lr=0.01, weight_decay=0.1) | options
    numbers = options if name == "sgd" else options | dict(betas=(0.8, 0.9), eps=1e-3)
    tensors = pytree.tree_map_only(float, double, numbers)
    expected, _ = train(ours(**numbers), params, loss, 10)
    assert_close(train(ours(**tensors), params, loss, 10)[0], expected)


def test_a_schedule_may_return_a_number():
    params, loss = perceptron()
    expected, _ = train(optim.sgd(0.1), params, loss, 3)
    found, _ = train(optim.sgd(lambda count: 0.1), params, loss, 3)
    assert_same_tree(found, expected)


names = st.text("abcdef", min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(st.dictionaries(names, shapes, max_size=4), st.sampled_from(EVERY))
@examples(40)
def test_every_shape_agrees_with_torch(shapes, case):
    name, options = case
    ours, theirs = OPTIMIZERS[name]
    zeros = {key: torch.zeros(s, dtype=torch.float64) for key, s in shapes.items()}
    params = random_gradients(zeros, seed=1)
    tx = ours(0.1, **options)
    found, state = params, tx.init(params)
    leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
    # torch.optim refuses an empty list, hence one more tensor without a gradient.
    optimizer = theirs([*leaves.values(), torch.zeros(1)], lr=0.1, **options)
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        found, state = optim.step(tx, grads, state, found)
        for key, leaf in leaves.items():
            leaf.grad = grads[key].clone()
        optimizer.step()
    assert found.keys() == shapes.keys()
    for key, leaf in leaves.items():
        torch.testing.assert_close(found[key], leaf.detach(), rtol=1e-12, atol=1e-14)


# Precision.


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "options"), EVERY)
def test_bfloat16_parameters_step_in_float32_and_round_once(name, options, grad_dtype):
    ours, theirs = OPTIMIZERS[name]
    params = {"w": torch.linspace(-3, 3, 64).bfloat16()}
    tx = ours(0.1, **options)
    state = tx.init(params)
    leaf = params["w"].float().requires_grad_()
    optimizer = theirs([leaf], lr=0.1, **options)
    for seed in range(5):
        grads = random_gradients(params, seed=seed, dtype=grad_dtype)
        updates, state = tx.update(grads, state, params)
        assert updates["w"].dtype == torch.float32
        before = leaf.detach().clone()
        leaf.grad = grads["w"].float()
        optimizer.step()
        torch.testing.assert_close(
            updates["w"], leaf.detach() - before, rtol=1e-5, atol=1e-6
        )
        params = optim.apply_updates(params, updates)
        assert params["w"].dtype == torch.bfloat16
        assert torch.equal(params["w"], (before + updates["w"]).bfloat16())
        with torch.no_grad():
            leaf.copy_(params["w"])
    floating = [s for s in pytree.tree_leaves(state) if s.is_floating_point()]
    assert all(s.dtype == torch.float32 for s in floating)


def test_squares_of_float16_gradients_do_not_overflow():
    params = {"w": torch.zeros(2, dtype=torch.float16)}
    grads = {"w": torch.tensor([3e4, -3e4], dtype=torch.float16)}
    tx = optim.adam(0.5)
    updates, state = tx.update(grads, tx.init(params), params)
    torch.testing.assert_close(updates["w"], torch.tensor([-0.5, 0.5]))
    expected = torch.full((2,), 0.001 * 3e4**2)
    torch.testing.assert_close(state[1].square["w"], expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_float64_scalars_widen_neither_parameters_nor_state(name, options):
    ours, _ = OPTIMIZERS[name]
    params = {"scale": torch.tensor(2.0), "w": torch.ones(3)}
    tx = ours(torch.tensor(0.1, dtype=torch.float64), **options)
    state = tx.init(params)
    before = pytree.tree_map(lambda s: s.dtype, (params, state))
    for seed in range(2):
        grads = random_gradients(params, seed=seed, dtype=torch.float64)
        params, state = optim.step(tx, grads, state, params)
    assert pytree.tree_map(lambda s: s.dtype, (params, state)) == before


def test_bias_corrections_are_exact_in_late_steps():
    tx = optim.scale_by_adam()
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    state = tx.init(params)._replace(count=torch.tensor(999))
    updates, _ = tx.update({"w": torch.ones(1).double()}, state)
    mean, square = 0.1 / (1 - 0.9**1000), 0.001 / (1 - 0.999**1000)
    expected = double([mean / (square**0.5 + 1e-8)])
    torch.testing.assert_close(updates["w"], expected, rtol=1e-12, atol=0)


# Purity and state.


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize(("name", "options"), EVERY)
def test_gradients_state_and_parameters_are_never_changed(name, options, schedule):
    ours, _ = OPTIMIZERS[name]
    tx = ours((lambda count: 0.1) if schedule else 0.1, **options)
    params, loss = perceptron()
    params, state = train(tx, params, loss, 2)
    arguments = (gradients(loss, params), state, params)
    leaves = pytree.tree_leaves(arguments)
    copies = pytree.tree_map(torch.clone, arguments)
    versions = [leaf._version for leaf in leaves]
    first = optim.step(tx, *arguments)
    second = optim.step(tx, *arguments)
    assert [leaf._version for leaf in leaves] == versions
    assert_same_tree(arguments, copies)
    assert_same_tree(first, second)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_state_is_a_tree_of_tensors_that_survives_tree_map(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(lambda count: 0.1 / (1 + count), **options)
    params, loss = perceptron()
    _, state = train(tx, params, loss, 3)
    leaves = pytree.tree_leaves(state)
    assert leaves
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    mapped = pytree.tree_map(torch.clone, state)
    assert type(mapped[-1]) is optim.states.ScheduleState
    grads = gradients(loss, params)
    assert_same_tree(
        optim.step(tx, grads, mapped, params), optim.step(tx, grads, state, params)
    )


def test_each_transformation_counts_its_steps_once_for_all_parameters():
    tx = optim.adam(lambda count: 0.1)
    params, loss = perceptron()
    _, state = train(tx, params, loss, 3)
    counts = [leaf for leaf in pytree.tree_leaves(state) if leaf.dtype == torch.int64]
    assert [count.shape for count in counts] == [(), ()]
    assert [int(count) for count in counts] == [3, 3]


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_no_value_is_read_and_state_lives_where_the_parameters_do(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(lambda count: 0.1 / (count + 1), **options)
    params = {"w": torch.zeros(3, device="meta")}
    params, state = optim.step(tx, params, tx.init(params), params)
    leaves = pytree.tree_leaves((params, state))
    assert {leaf.device.type for leaf in leaves} == {"meta"}


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_nothing_requires_grad_where_inputs_do_not(name, options):
    ours, _ = OPTIMIZERS[name]
    params, loss = perceptron()
    tx = ours(0.1, **options)
    results = train(tx, params, loss, 2)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(results))
    trained = {name: p.requires_grad_() for name, p in params.items()}
    state = tx.init(trained)
    with torch.no_grad():
        results = optim.step(tx, trained, state, trained)
    leaves = pytree.tree_leaves((state, results))
    assert not any(leaf.requires_grad for leaf in leaves)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_none_gradient_keeps_parameter_and_moments_while_counters_run(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(lambda count: 0.1, **options)
    params, loss = perceptron()
    params, state = train(tx, params, loss, 2)
    grads = gradients(loss, params)
    updates, partial = tx.update({**grads, "0.bias": None}, state, params)
    assert updates["0.bias"] is None
    assert optim.apply_updates(params, updates)["0.bias"] is params["0.bias"]
    _, full = tx.update(grads, state, params)
    for one, other, old in zip(partial, full, state, strict=True):
        for kept, new, before in zip(one, other, old, strict=True):
            if isinstance(kept, dict):
                assert torch.equal(kept.pop("0.bias"), before["0.bias"])
                assert not torch.equal(new.pop("0.bias"), before["0.bias"])
            assert_same_tree(kept, new)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_an_empty_dictionary_is_a_model_without_parameters(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(lambda count: 0.1, **options)
    params, state = optim.step(tx, {}, tx.init({}), {})
    assert params == {}
    assert int(state[-1].count) == 1


# Transforms.


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_members_under_vmap_train_as_they_do_alone(name, options):
    ours, _ = OPTIMIZERS[name]
    start, loss = perceptron()
    alone = [random_gradients(start, seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([m[key] for m in alone]) for key in start}
    rates = double([0.1, 0.01, 0.001])

    def step(rate, params, state):
        grads = torch.func.grad(loss)(params)
        return optim.step(ours(rate, **options), grads, state, params)

    state = torch.vmap(ours(0.1, **options).init)(stacked)
    for _ in range(5):
        stacked, state = torch.vmap(step)(rates, stacked, state)
    for member, params in enumerate(alone):
        expected, expected_state = train(
            ours(rates[member].item(), **options), params, loss, 5
        )
        assert_close({key: p[member] for key, p in stacked.items()}, expected)
        found = pytree.tree_map(lambda s, i=member: s[i], state)
        for a, b in zip(
            pytree.tree_leaves(found), pytree.tree_leaves(expected_state), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_members_may_differ_in_every_hyperparameter():
    start, loss = perceptron()
    betas = (double([0.9, 0.5]), double([0.99, 0.9]))
    decays = double([0.0, 0.1])

    def run(beta1, beta2, decay):
        tx = optim.adamw(0.1, betas=(beta1, beta2), weight_decay=decay)
        params, state = start, tx.init(start)
        for _ in range(3):
            grads = torch.func.grad(loss)(params)
            params, state = optim.step(tx, grads, state, params)
        return params

    found = torch.vmap(run)(*betas, decays)
    for member, decay in enumerate(decays.tolist()):
        pair = (betas[0][member].item(), betas[1][member].item())
        tx = optim.adamw(0.1, betas=pair, weight_decay=decay)
        expected, _ = train(tx, start, loss, 3)
        assert_close({key: p[member] for key, p in found.items()}, expected)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_step_compiles_to_one_graph(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(lambda count: 0.1 * 0.9 ** count.double(), **options)
    params, loss = perceptron()
    state = tx.init(params)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def step(grads, state, params):
        return optim.step(tx, grads, state, params)

    expected, expected_state = params, state
    for _ in range(2):
        params, state = step(gradients(loss, params), state, params)
        expected, expected_state = optim.step(
            tx, gradients(loss, expected), expected_state, expected
        )
    assert_same_tree((params, state), (expected, expected_state))


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_members_whose_optimizers_are_made_inside_compile_to_one_graph(name, options):
    ours, _ = OPTIMIZERS[name]
    start, loss = perceptron()
    stacked = {key: torch.stack([p, 2 * p]) for key, p in start.items()}
    state = torch.vmap(ours(0.1, **options).init)(stacked)

    def step(rate, params, state):
        grads = torch.func.grad(loss)(params)
        return optim.step(ours(rate, **options), grads, state, params)

    torch.compiler.reset()
    members = torch.vmap(step)
    compiled = torch.compile(members, fullgraph=True, backend="eager")
    arguments = (double([0.1, 0.01]), stacked, state)
    assert_same_tree(compiled(*arguments), members(*arguments))


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_gradients_through_training_match_finite_differences(name, options):
    ours, _ = OPTIMIZERS[name]
    start, loss = perceptron()

    def outcome(rate, bias):
        params = {**start, "0.bias": bias}
        tx = ours(rate, **options)
        state = tx.init(params)
        for _ in range(3):
            grads = torch.func.grad(loss)(params)
            params, state = optim.step(tx, grads, state, params)
        return loss(params)

    rate, bias = double(0.05), start["0.bias"]
    by_rate, by_bias = torch.func.grad(outcome, argnums=(0, 1))(rate, bias)
    h = 1e-6
    expected = (outcome(rate + h, bias) - outcome(rate - h, bias)) / (2 * h)
    torch.testing.assert_close(by_rate, expected, rtol=1e-6, atol=1e-9)
    for index, nudge in enumerate(h * torch.eye(len(bias)).double()):
        expected = (outcome(rate, bias + nudge) - outcome(rate, bias - nudge)) / (2 * h)
        torch.testing.assert_close(by_bias[index], expected, rtol=1e-6, atol=1e-8)


def test_gradients_through_adam_are_finite_where_gradients_are_zero():
    def outcome(rate):
        params = {"w": torch.tensor([1.0, 2.0])}
        tx = optim.adam(rate)
        state = tx.init(params)
        for _ in range(2):
            grads = {"w": params["w"] * rate * torch.tensor([0.0, 1.0])}
            params, state = optim.step(tx, grads, state, params)
        return params["w"].sum()

    # Both steps move the second entry by the rate, as good as independent of its size.
    slope = torch.func.grad(outcome)(torch.tensor(0.1))
    torch.testing.assert_close(slope, torch.tensor(-2.0), rtol=0.05, atol=0)


def test_entries_without_gradient_stay_for_any_eps():
    params = {"w": torch.ones(2)}
    updated, _ = train(optim.adam(0.1, eps=0.0), params, lambda p: p["w"][1], 3)
    torch.testing.assert_close(updated["w"], torch.tensor([1.0, 0.7]))


# Chains.


def test_a_chain_of_nothing_is_the_identity():
    grads = {"a": torch.ones(2, dtype=torch.bfloat16), "b": None}
    updates, state = optim.chain().update(grads, optim.chain().init({}))
    assert updates == grads
    assert state == ()


def test_a_chain_applies_its_transformations_in_order():
    params = {"w": torch.tensor([2.0])}
    decay, scale = optim.add_decayed_weights(1.0), optim.scale_by_learning_rate(0.5)
    for tx, expected in [
        (optim.chain(decay, scale), -1.5),
        (optim.chain(scale, decay), 1.5),
        (optim.chain(optim.chain(decay), scale), -1.5),
    ]:
        updates, _ = tx.update({"w": torch.ones(1)}, tx.init(params), params)
        assert updates["w"].item() == expected


def test_optimizers_without_decay_need_no_parameters():
    params, loss = perceptron()
    grads = gradients(loss, params)
    for tx in (optim.sgd(0.1, momentum=0.9), optim.adam(), optim.adamw(weight_decay=0)):
        state = tx.init(params)
        assert_same_tree(tx.update(grads, state), tx.update(grads, state, params))


# Errors.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.sgd(-0.1), r"sgd\(lr=-0.1\): expected lr >= 0"),
        (lambda: optim.sgd(float("nan")), r"sgd\(lr=nan\): expected lr >= 0"),
        (lambda: optim.sgd(momentum=-1.0), r"sgd\(momentum=-1.0\): expected momentum"),
        (lambda: optim.sgd(weight_decay=-1), r"sgd\(weight_decay=-1\): expected"),
        (lambda: optim.adam(-0.1), r"adam\(lr=-0.1\): expected lr >= 0"),
        (lambda: optim.adam(eps=-1e-8), r"adam\(eps=-1e-08\): expected eps >= 0"),
        (lambda: optim.adam(weight_decay=-1), r"adam\(weight_decay=-1\): expected"),
        (
            lambda: optim.adam(betas=(1.0, 0.9)),
            r"adam\(betas=\(1.0, 0.9\)\): expected 0 <= betas\[0\] < 1, got 1.0",
        ),
        (
            lambda: optim.adamw(betas=(0.9, -0.1)),
            r"adamw\(betas=\(0.9, -0.1\)\): expected 0 <= betas\[1\] < 1, got -0.1",
        ),
        (lambda: optim.adamw(-0.1), r"adamw\(lr=-0.1\): expected lr >= 0"),
        (lambda: optim.adamw(eps=-1.0), r"adamw\(eps=-1.0\): expected eps >= 0"),
        (lambda: optim.adamw(weight_decay=-1), r"adamw\(weight_decay=-1\): expected"),
        (
            lambda: optim.sgd(nesterov=True),
            r"sgd\(nesterov=True, momentum=0.0, dampening=0.0\): expected momentum > 0",
        ),
        (
            lambda: optim.sgd(momentum=0.9, dampening=0.5, nesterov=True),
            r"sgd\(nesterov=True, momentum=0.9, dampening=0.5\): expected momentum > 0",
        ),
    ],
)
def test_numbers_that_torch_refuses_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_rate_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match=r"adam\(lr='0.1'\): expected a number, got a"):
        optim.adam("0.1")


@pytest.mark.parametrize("tx", [optim.sgd(), optim.sgd(momentum=0.9), optim.adam()])
def test_names_that_differ_are_listed(tx):
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    grads = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(ValueError, match="missing: 'b'; unexpected: 'c'"):
        optim.step(tx, grads, tx.init(params), params)
    with pytest.raises(ValueError, match=r"apply_updates\(updates\).*missing: 'b'"):
        optim.apply_updates(params, {"a": torch.zeros(2)})


def test_names_of_gradients_and_decayed_parameters_must_agree():
    params = {"a": torch.zeros(2)}
    decay = optim.add_decayed_weights(0.1)
    with pytest.raises(ValueError, match=r"add_decayed_weights\(grads\).*'b'"):
        decay.update({**params, "b": torch.zeros(2)}, decay.init(params), params)


@pytest.mark.parametrize("tx", [optim.sgd(), optim.sgd(momentum=0.9), optim.adamw()])
def test_gradients_with_a_batch_dimension_are_refused(tx):
    params = {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"apply_updates.*shape \(2,\).*got \(4, 2\)"):
        optim.step(tx, {"w": torch.zeros(4, 2)}, tx.init(params), params)


@pytest.mark.parametrize(
    "make",
    [
        lambda values: optim.sgd(values),
        lambda values: optim.sgd(lambda count: values),
        lambda values: optim.sgd(momentum=values),
        lambda values: optim.adam(eps=values),
        lambda values: optim.adamw(weight_decay=values),
    ],
)
def test_hyperparameters_per_member_are_refused_outside_vmap(make):
    tx, params = make(torch.tensor([0.1, 0.2])), {"w": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"of shape \(2,\).*without dimensions"):
        optim.step(tx, params, tx.init(params), params)


def test_decay_without_parameters_is_refused():
    tx = optim.adamw()
    params = {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"add_decayed_weights\(params=None\)"):
        tx.update(params, tx.init(params))


def test_the_state_of_another_chain_is_refused():
    params = {"w": torch.zeros(2)}
    tx = optim.chain(optim.trace(0.9))
    with pytest.raises(ValueError, match="of 3 transformations.: expected one of 1"):
        tx.update(params, optim.sgd().init(params), params)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_adam_refuses_parameters_that_are_not_real(dtype):
    with pytest.raises(TypeError, match=r"scale_by_adam\(params\): expected real.*'w'"):
        optim.adam().init({"w": torch.zeros(2, dtype=dtype)})


def test_sgd_with_momentum_takes_complex_parameters():
    start = {"w": torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128)}

    def loss(params):
        return (params["w"] - 1j).abs().square().sum()

    options = dict(lr=0.1, momentum=0.9, weight_decay=0.1)
    found, _ = train(optim.sgd(**options), start, loss, 10)
    expected = train_with_torch(
        lambda p: torch.optim.SGD(p, **options), start, loss, 10
    )
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(optim.adam, torch.optim.Adam), (optim.rmsprop, torch.optim.RMSprop)],
)
def test_a_square_that_overflows_stays_infinite_as_in_torch(ours, theirs):
    param = torch.ones(1, requires_grad=True)
    reference, tx = theirs([param], lr=0.1), ours(0.1)
    params = {"w": torch.ones(1)}
    state = tx.init(params)
    for number in (1e20, 1.0, -2.0):
        param.grad = torch.tensor([number])
        reference.step()
        params, state = optim.step(tx, {"w": param.grad}, state, params)
    assert params["w"].isfinite().all()
    assert torch.equal(params["w"], param.detach())


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_steps_with_the_rate_it_is_given():
    params, grads = {"w": torch.zeros(20)}, {"w": torch.ones(20)}
    state = optim.adamw(0.1).init(params)

    def step(base):
        rates = base * 2  # of which one is a view
        tx = optim.adamw(rates[1], betas=(0.9, 0.99))
        return optim.step(tx, grads, state, params)

    torch.compiler.reset()
    base = torch.tensor([1.0, 0.25])
    found, expected = torch.compile(step, fullgraph=True)(base), step(base)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][0].square, expected[1][0].square)

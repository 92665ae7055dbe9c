"""Every optimizer that `torch.optim` has against it, and under every transform."""

import inspect
from itertools import product

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
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    apply_updates,
    asgd,
    averaged_parameters,
    chain,
    nadam,
    radam,
    rmsprop,
    rprop,
    scale_by_adadelta,
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_nadam,
    scale_by_radam,
    scale_by_rms,
    scale_by_rprop,
    scale_by_rss,
    scale_by_stddev,
    sgd,
    step,
)

OPTIMIZERS = {
    "sgd": (sgd, torch.optim.SGD),
    "adam": (adam, torch.optim.Adam),
    "adamw": (adamw, torch.optim.AdamW),
    "nadam": (nadam, torch.optim.NAdam),
    "radam": (radam, torch.optim.RAdam),
    "adamax": (adamax, torch.optim.Adamax),
    "adagrad": (adagrad, torch.optim.Adagrad),
    "adadelta": (adadelta, torch.optim.Adadelta),
    "rmsprop": (rmsprop, torch.optim.RMSprop),
    "rprop": (rprop, torch.optim.Rprop),
    "asgd": (asgd, torch.optim.ASGD),
}

# Rates and options, to be multiplied by weight decay and direction. Long steps are left
# out where a change of the start by one rounding changes torch by more than 1e-12.
OPTIONS = {
    "sgd": (
        (1e-4, 1e-3),
        [
            dict(),
            dict(momentum=0.9),
            dict(momentum=0.9, dampening=0.5),
            dict(momentum=0.5, nesterov=True),
        ],
    ),
    "adam": ((1e-3, 1e-2), [dict(), dict(amsgrad=True, betas=(0.8, 0.9), eps=1e-6)]),
    "adamw": ((1e-3, 1e-2), [dict(), dict(amsgrad=True, betas=(0.8, 0.9), eps=1e-6)]),
    "nadam": (
        (2e-3, 5e-3),
        [
            dict(decoupled_weight_decay=decoupled, **more)
            for decoupled in (False, True)
            for more in (dict(), dict(betas=(0.8, 0.9), momentum_decay=0.1, eps=1e-6))
        ],
    ),
    "radam": (
        (1e-3, 1e-4),
        [
            dict(decoupled_weight_decay=decoupled, **more)
            for decoupled in (False, True)
            for more in (dict(), dict(betas=(0.8, 0.9), eps=1e-6))
        ],
    ),
    "adamax": ((2e-3, 1e-2), [dict(), dict(betas=(0.8, 0.9), eps=1e-3)]),
    "adagrad": (
        (1e-2, 1e-1),
        [dict(), dict(lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3)],
    ),
    "adadelta": ((1.0, 0.1), [dict(), dict(rho=0.5, eps=1e-7)]),
    "rmsprop": (
        (1e-3, 1e-2),
        [
            dict(centered=centered, **more)
            for centered in (False, True)
            for more in (dict(), dict(momentum=0.9, alpha=0.9, eps=1e-4))
        ],
    ),
    "rprop": (
        (1e-2, 1e-3),
        [dict(), dict(etas=(0.3, 1.5), step_sizes=(1e-4, 0.02))],
    ),
    "asgd": ((1e-4, 1e-3), [dict(), dict(lambd=0.1, alpha=0.5, t0=20.0)]),
}
GRID = [
    pytest.param(name, dict(lr=lr, maximize=maximize, **decay, **more))
    for name, (rates, options) in OPTIONS.items()
    for lr, more, maximize, decay in product(
        rates,
        options,
        (False, True),
        [dict()] if name == "rprop" else [dict(), dict(weight_decay=0.1)],
    )
    # Of the second rate a part, for the sake of time.
    if lr == rates[0] or (maximize and decay)
]

# What the tests under transforms run: between them all branches.
EVERY = [
    ("sgd", dict(momentum=0.9, weight_decay=0.1, maximize=True)),
    ("adam", dict(weight_decay=0.1, amsgrad=True)),
    ("adamw", dict(amsgrad=True, maximize=True)),
    ("nadam", dict(weight_decay=0.1)),
    ("radam", dict(weight_decay=0.1, decoupled_weight_decay=True)),
    ("adamax", dict(weight_decay=0.1, maximize=True)),
    ("adagrad", dict(weight_decay=0.1, lr_decay=0.1)),
    ("adadelta", dict(weight_decay=0.1)),
    ("rmsprop", dict(weight_decay=0.1, momentum=0.9, centered=True)),
    ("rmsprop", dict(maximize=True)),
    ("rprop", dict()),
    ("asgd", dict(weight_decay=0.1, lambd=0.1, t0=2.0)),
]
SCHEDULED = [case for case in EVERY if case[0] != "rprop"]
# Those whose rate, state or choices have a form of their own.
UNLIKE = [case for case in EVERY if case[0] in {"nadam", "radam", "rprop", "asgd"}]


@pytest.fixture
def _double_by_default():
    """Make torch keep its scalar states, and their rounding, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def both_problems(*, sign=1.0):
    """The valley of Rosenbrock and a small regression, as one model."""
    (start, valley), (weights, regression) = rosenbrock(), perceptron()

    def loss(params):
        return sign * (valley(params) + regression(params))

    return {**start, **weights}, loss


# The numbers of torch.optim.


@pytest.mark.usefixtures("_double_by_default")
@pytest.mark.parametrize(("name", "options"), GRID)
def test_100_steps_agree_with_torch(name, options):
    ours, theirs = OPTIMIZERS[name]
    params, loss = both_problems(sign=-1.0 if options["maximize"] else 1.0)
    found, _ = train(ours(**options), params, loss, 100)
    expected = train_with_torch(
        lambda p: theirs(p, foreach=False, **options), params, loss, 100
    )
    assert all(not torch.equal(found[key], start) for key, start in params.items())
    assert_close(found, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_order_and_defaults_of_arguments_are_those_of_torch(name):
    ours, theirs = (inspect.signature(make).parameters for make in OPTIMIZERS[name])
    machinery = {"params", "foreach", "capturable", "differentiable", "fused"}
    if name == "adam":
        machinery.add("decoupled_weight_decay")  # which makes an AdamW of it
    expected = {key: p.default for key, p in theirs.items() if key not in machinery}
    assert {key: p.default for key, p in ours.items()} == expected
    kinds = [p.kind for p in ours.values()]
    assert kinds[1:] == [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - 1)
    positional = [key for key in theirs if key in ours and key != "maximize"]
    assert [key for key in ours if key != "maximize"] == positional


@pytest.mark.usefixtures("_double_by_default")
@pytest.mark.parametrize(("name", "options"), SCHEDULED)
def test_schedules_agree_with_those_of_torch(name, options):
    ours, theirs = OPTIMIZERS[name]
    params, loss = both_problems(sign=-1.0 if options.get("maximize") else 1.0)
    tx = ours(lambda count: 1e-3 * 0.9 ** count.double(), **options)
    expected = train_with_torch(
        lambda p: theirs(p, lr=1e-3, **options), params, loss, 20, lambda k: 0.9**k
    )
    assert_close(train(tx, params, loss, 20)[0], expected)


@pytest.mark.usefixtures("_double_by_default")
@pytest.mark.parametrize("t0", [0.0, 3.5, 1e6])
def test_asgd_keeps_the_average_of_torch_in_its_state(t0):
    params, loss = perceptron()
    _, state = train(asgd(0.1, t0=t0), params, loss, 10)
    leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
    optimizer = torch.optim.ASGD(list(leaves.values()), lr=0.1, t0=t0, foreach=False)
    for _ in range(10):
        optimizer.zero_grad()
        loss(leaves).backward()
        optimizer.step()
    expected = {key: optimizer.state[leaf]["ax"] for key, leaf in leaves.items()}
    assert_close(averaged_parameters(state), expected)
    last = {key: leaf.detach() for key, leaf in leaves.items()}
    averages = [torch.equal(expected[key], last[key]) for key in last]
    assert all(averages) if t0 == 1e6 else not any(averages)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_tensor_hyperparameters_give_the_numbers_of_numbers(name, options):
    ours, _ = OPTIMIZERS[name]
    params, loss = perceptron()
    numbers = dict(lr=0.01, **options)
    tensors = pytree.tree_map_only(float, double, numbers)
    expected, _ = train(ours(**numbers), params, loss, 10)
    assert_close(train(ours(**tensors), params, loss, 10)[0], expected)


names = st.text("abcdef", min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@pytest.mark.usefixtures("_double_by_default")
@given(st.dictionaries(names, shapes, max_size=4), st.sampled_from(EVERY))
@examples(60)
def test_every_shape_agrees_with_torch_empty_ones_too(shapes, case):
    name, options = case
    ours, theirs = OPTIMIZERS[name]
    params = random_gradients(
        {key: torch.zeros(shape) for key, shape in shapes.items()}, seed=1
    )
    tx = ours(0.1, **options)
    found, state = params, tx.init(params)
    leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
    # torch.optim refuses an empty list, hence one more tensor without a gradient.
    optimizer = theirs([*leaves.values(), torch.zeros(1)], lr=0.1, **options)
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        found, state = step(tx, grads, state, found)
        for key, leaf in leaves.items():
            leaf.grad = grads[key].clone()
        optimizer.step()
    assert found.keys() == shapes.keys()
    for key, leaf in leaves.items():
        torch.testing.assert_close(found[key], leaf.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.6])
def test_radam_is_not_rectified_where_the_mean_square_never_is_reliable(beta2):
    params, loss = perceptron()
    options = dict(lr=0.01, betas=(0.9, beta2))
    expected = train_with_torch(
        lambda p: torch.optim.RAdam(p, **options), params, loss, 20
    )
    assert_close(train(radam(**options), params, loss, 20)[0], expected)

    def outcome(bias, beta2):
        tx, start = radam(0.01, betas=(0.9, beta2)), {**params, "0.bias": bias}
        return loss(step(tx, torch.func.grad(loss)(start), tx.init(start), start)[0])

    slopes = torch.func.grad(outcome, argnums=(0, 1))(params["0.bias"], double(beta2))
    assert slopes[0].isfinite().all()
    assert slopes[1] == 0


# Zeros and precision.


@pytest.mark.parametrize("transformation", [
    scale_by_amsgrad(eps=0.0),
    scale_by_nadam(eps=0.0),
    scale_by_radam(eps=0.0),
    scale_by_adamax(eps=0.0),
    scale_by_rss(eps=0.0),
    scale_by_rms(eps=0.0),
    scale_by_stddev(eps=0.0),
    scale_by_adadelta(eps=0.0),
    scale_by_rprop(),
])  # fmt: skip
def test_entries_without_gradient_stay_for_any_eps_and_have_finite_slopes(
    transformation,
):
    def outcome(size):
        state = transformation.init({"w": torch.ones(2)})
        updates = {"w": torch.ones(2)}
        for _ in range(7):
            grads = {"w": size * torch.tensor([0.0, 1.0])}
            updates, state = transformation.update(grads, state)
        return updates["w"].sum(), updates["w"]

    slope, updates = torch.func.grad(outcome, has_aux=True)(torch.tensor(0.3))
    assert updates[0] == 0
    assert updates[1].isfinite()
    assert slope.isfinite()


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_bfloat16_parameters_step_in_float32_and_round_once(name, options):
    ours, theirs = OPTIMIZERS[name]
    params = {"w": torch.linspace(-3, 3, 64).bfloat16()}
    tx = ours(0.1, **options)
    state = tx.init(params)
    leaf = params["w"].float().requires_grad_()
    optimizer = theirs([leaf], lr=0.1, **options)
    for seed in range(7):
        grads = random_gradients(params, seed=seed, dtype=torch.bfloat16)
        updates, state = tx.update(grads, state, params)
        assert updates["w"].dtype == torch.float32
        before = leaf.detach().clone()
        leaf.grad = grads["w"].float()
        optimizer.step()
        torch.testing.assert_close(
            updates["w"], leaf.detach() - before, rtol=1e-5, atol=1e-6
        )
        params = apply_updates(params, updates)
        assert params["w"].dtype == torch.bfloat16
        with torch.no_grad():
            leaf.copy_(params["w"])
    floating = [s for s in pytree.tree_leaves(state) if s.ndim > 0]
    assert all(s.dtype == torch.float32 for s in floating)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_squares_of_float16_gradients_do_not_overflow(name, options):
    ours, _ = OPTIMIZERS[name]
    tx, wide = ours(1e-3, **options), {"w": torch.tensor([1.0, 2.0])}
    grads = {"w": torch.tensor([3e4, -3e4])}
    half = {key: p.half() for key, p in wide.items()}
    updates, _ = tx.update({"w": grads["w"].half()}, tx.init(half), half)
    expected, _ = tx.update({"w": grads["w"].half().float()}, tx.init(wide), wide)
    assert_same_tree(updates, expected)
    assert updates["w"].isfinite().all()


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_float64_scalars_widen_neither_parameters_nor_state(name, options):
    ours, _ = OPTIMIZERS[name]
    params = {"scale": torch.tensor(2.0), "w": torch.ones(3)}
    tx = ours(**pytree.tree_map_only(float, double, dict(lr=0.1, **options)))
    state = tx.init(params)
    before = pytree.tree_map(lambda s: s.dtype, (params, state))
    for seed in range(2):
        grads = random_gradients(params, seed=seed, dtype=torch.float64)
        params, state = step(tx, grads, state, params)
    assert pytree.tree_map(lambda s: s.dtype, (params, state)) == before


# Purity and state.


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_gradients_state_and_parameters_are_never_changed(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(0.01, **options)
    params, loss = perceptron()
    params, state = train(tx, params, loss, 6)
    arguments = (gradients(loss, params), state, params)
    leaves = pytree.tree_leaves(arguments)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    copies = pytree.tree_map(torch.clone, arguments)
    versions = [leaf._version for leaf in leaves]
    first = step(tx, *arguments)
    second = step(tx, *arguments)
    assert [leaf._version for leaf in leaves] == versions
    assert_same_tree(arguments, copies)
    assert_same_tree(first, second)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_no_value_is_read_and_state_lives_where_the_parameters_do(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(0.01, **options)
    params = {"w": torch.zeros(3, device="meta")}
    params, state = step(tx, params, tx.init(params), params)
    leaves = pytree.tree_leaves((params, state))
    assert {leaf.device.type for leaf in leaves} == {"meta"}


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_none_gradient_keeps_parameter_and_moments(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(0.01, **options)
    params, loss = perceptron()
    params, state = train(tx, params, loss, 6)
    grads = gradients(loss, params)
    updates, partial = tx.update({**grads, "0.bias": None}, state, params)
    assert updates["0.bias"] is None
    assert apply_updates(params, updates)["0.bias"] is params["0.bias"]
    whole_updates, whole = tx.update(grads, state, params)
    assert_same_tree(
        {key: updates[key] for key in grads if key != "0.bias"},
        {key: whole_updates[key] for key in grads if key != "0.bias"},
    )

    def of_bias(tree):
        leaves = pytree.tree_flatten_with_path(tree)[0]
        return [leaf for path, leaf in leaves if "0.bias" in str(path[-1])]

    # The average of asgd is that of parameters, which count as they stand.
    if name != "asgd":
        assert of_bias(state)
        assert_same_tree(of_bias(partial), of_bias(state))

    def others(tree):
        leaves = pytree.tree_flatten_with_path(tree)[0]
        return [leaf for path, leaf in leaves if "0.bias" not in str(path[-1])]

    assert_same_tree(others(partial), others(whole))


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_an_empty_dictionary_is_a_model_without_parameters(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(0.01, **options)
    params, state = step(tx, {}, tx.init({}), {})
    assert params == {}
    assert_same_tree(state, step(tx, {}, tx.init({}), {})[1])


# Transforms.

DECAY = double([0.0, 0.1, 0.2])
BETAS = (double([0.9, 0.5, 0.8]), double([0.99, 0.9, 0.7]))
RATE, EPS = double([0.1, 0.01, 0.001]), double([1e-8, 1e-4, 1e-2])
MEMBERS = [
    ("sgd", dict(momentum=double([0.9, 0.5, 0.0]), dampening=double([0.0, 0.5, 0.9]))),
    ("adam", dict(betas=BETAS, eps=EPS)),
    ("adam", dict(betas=BETAS, eps=EPS, amsgrad=True)),
    ("adamw", dict(betas=BETAS, eps=EPS)),
    ("nadam", dict(betas=BETAS, eps=EPS, momentum_decay=double([4e-3, 0.1, 0.0]))),
    ("radam", dict(betas=(BETAS[0], double([0.999, 0.9, 0.5])), eps=EPS)),
    ("radam", dict(betas=BETAS, eps=EPS, decoupled_weight_decay=True)),
    ("adamax", dict(betas=BETAS, eps=EPS)),
    ("adagrad", dict(lr_decay=DECAY, initial_accumulator_value=DECAY, eps=EPS)),
    ("adadelta", dict(rho=BETAS[0], eps=EPS)),
    ("rmsprop", dict(alpha=BETAS[1], eps=EPS, momentum=BETAS[0], centered=True)),
    ("rmsprop", dict(alpha=BETAS[1], eps=EPS, maximize=True)),
    (
        "rprop",
        dict(
            etas=(double([0.5, 0.3, 0.9]), double([1.2, 1.5, 3.0])),
            step_sizes=(double([1e-6, 1e-3, 0.0]), double([50.0, 0.1, 0.01])),
        ),
    ),
    ("asgd", dict(lambd=DECAY, alpha=BETAS[0], t0=double([0.0, 2.0, 1e6]))),
]


@pytest.mark.parametrize(("name", "options"), MEMBERS)
def test_members_that_differ_in_every_number_train_as_they_do_alone(name, options):
    ours, _ = OPTIMIZERS[name]
    start, loss = perceptron()
    decay = {} if name == "rprop" else dict(weight_decay=DECAY)
    options = dict(lr=RATE, **decay, **options)
    stacked = pytree.tree_map_only(torch.Tensor, lambda t: 0, options)
    in_dims = pytree.tree_map_only(bool, lambda flag: None, stacked)
    alone = [random_gradients(start, seed=seed) for seed in range(3)]
    params = {key: torch.stack([m[key] for m in alone]) for key in start}

    def begin(options, params):
        return ours(**options).init(params)

    def advance(options, params, state):
        grads = torch.func.grad(loss)(params)
        return step(ours(**options), grads, state, params)

    state = torch.vmap(begin, in_dims=(in_dims, 0))(options, params)
    together = torch.vmap(advance, in_dims=(in_dims, 0, 0))
    for _ in range(8):
        params, state = together(options, params, state)
    for member, begun in enumerate(alone):
        numbers = pytree.tree_map_only(
            torch.Tensor, lambda t, i=member: t[i].item(), options
        )
        expected, last = train(ours(**numbers), begun, loss, 8)
        assert_close({key: p[member] for key, p in params.items()}, expected)
        if not any(number == 0 for number in pytree.tree_leaves(numbers)):
            found = pytree.tree_map(lambda s, i=member: s[i], state)
            for a, b in zip(
                pytree.tree_leaves(found), pytree.tree_leaves(last), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_step_compiles_to_one_graph(name, options):
    ours, _ = OPTIMIZERS[name]
    tx = ours(0.01, **options)
    params = {"w": torch.linspace(-1, 1, 6).double().reshape(2, 3)}
    state = tx.init(params)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(grads, state, params):
        return step(tx, grads, state, params)

    expected, expected_state = params, state
    for seed in range(2):
        grads = random_gradients(params, seed=seed)
        params, state = compiled(grads, state, params)
        expected, expected_state = step(tx, grads, expected_state, expected)
    found = pytree.tree_leaves((params, state))
    for a, b in zip(found, pytree.tree_leaves((expected, expected_state)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "options"), UNLIKE)
def test_members_whose_optimizers_are_made_inside_compile_to_one_graph(name, options):
    ours, _ = OPTIMIZERS[name]
    params = {"w": torch.linspace(-1, 1, 6).reshape(2, 3)}
    state = torch.vmap(ours(0.1, **options).init)(params)

    def advance(rate, grads, state, params):
        return step(ours(rate, **options), grads, state, params)

    torch.compiler.reset()
    members = torch.vmap(advance)
    compiled = torch.compile(members, fullgraph=True, backend="eager")
    arguments = (torch.tensor([0.1, 0.01]), params, state, params)
    assert_same_tree(compiled(*arguments), members(*arguments))


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_gradients_through_ten_updates_match_finite_differences(name, options):
    ours, _ = OPTIMIZERS[name]
    start, loss = perceptron()

    def outcome(rate, bias):
        params = {**start, "0.bias": bias}
        tx = ours(rate, **options)
        state = tx.init(params)
        for _ in range(10):
            grads = torch.func.grad(loss)(params)
            params, state = step(tx, grads, state, params)
        return loss(params)

    rate, bias = double(0.01), start["0.bias"]
    by_rate, by_bias = torch.func.grad(outcome, argnums=(0, 1))(rate, bias)
    h = 1e-6
    expected = (outcome(rate + h, bias) - outcome(rate - h, bias)) / (2 * h)
    torch.testing.assert_close(by_rate, expected, rtol=1e-5, atol=1e-8)
    for index, nudge in enumerate(h * torch.eye(len(bias)).double()):
        expected = (outcome(rate, bias + nudge) - outcome(rate, bias - nudge)) / (2 * h)
        torch.testing.assert_close(by_bias[index], expected, rtol=1e-5, atol=1e-8)


# Errors.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nadam(-0.1), r"nadam\(lr=-0.1\): expected lr >= 0"),
        (lambda: nadam(eps=-1.0), r"nadam\(eps=-1.0\): expected eps >= 0"),
        (lambda: nadam(weight_decay=-1), r"nadam\(weight_decay=-1\): expected"),
        (lambda: nadam(momentum_decay=-1), r"nadam\(momentum_decay=-1\): expected"),
        (lambda: nadam(betas=(1.0, 0.9)), r"nadam\(betas=.*0 <= betas\[0\] < 1, got"),
        (lambda: radam(-0.1), r"radam\(lr=-0.1\): expected lr >= 0"),
        (lambda: radam(eps=-1.0), r"radam\(eps=-1.0\): expected eps >= 0"),
        (lambda: radam(weight_decay=-1), r"radam\(weight_decay=-1\): expected"),
        (lambda: radam(betas=(0.9, 1.0)), r"radam\(betas=.*0 <= betas\[1\] < 1, got"),
        (lambda: adamax(-0.1), r"adamax\(lr=-0.1\): expected lr >= 0"),
        (lambda: adamax(eps=-1.0), r"adamax\(eps=-1.0\): expected eps >= 0"),
        (lambda: adamax(weight_decay=-1), r"adamax\(weight_decay=-1\): expected"),
        (lambda: adamax(betas=(-0.1, 0.9)), r"adamax\(betas=.*<= betas\[0\] < 1, got"),
        (lambda: adagrad(-0.1), r"adagrad\(lr=-0.1\): expected lr >= 0"),
        (lambda: adagrad(lr_decay=-1), r"adagrad\(lr_decay=-1\): expected"),
        (lambda: adagrad(weight_decay=-1), r"adagrad\(weight_decay=-1\): expected"),
        (
            lambda: adagrad(initial_accumulator_value=-1),
            r"adagrad\(initial_accumulator_value=-1\): expected",
        ),
        (lambda: adagrad(eps=-1.0), r"adagrad\(eps=-1.0\): expected eps >= 0"),
        (lambda: adadelta(-0.1), r"adadelta\(lr=-0.1\): expected lr >= 0"),
        (lambda: adadelta(rho=1.5), r"adadelta\(rho=1.5\): expected 0 <= rho <= 1"),
        (lambda: adadelta(eps=-1.0), r"adadelta\(eps=-1.0\): expected eps >= 0"),
        (lambda: adadelta(weight_decay=-1), r"adadelta\(weight_decay=-1\): expected"),
        (lambda: rmsprop(-0.1), r"rmsprop\(lr=-0.1\): expected lr >= 0"),
        (lambda: rmsprop(alpha=-0.5), r"rmsprop\(alpha=-0.5\): expected 0 <= alpha"),
        (lambda: rmsprop(eps=-1.0), r"rmsprop\(eps=-1.0\): expected eps >= 0"),
        (lambda: rmsprop(weight_decay=-1), r"rmsprop\(weight_decay=-1\): expected"),
        (lambda: rmsprop(momentum=-1), r"rmsprop\(momentum=-1\): expected"),
        (lambda: rprop(-0.1), r"rprop\(lr=-0.1\): expected lr >= 0"),
        (lambda: rprop(etas=(0.5, 1.0)), r"rprop\(etas=.*: expected 0 < etas\[0\] < 1"),
        (
            lambda: rprop(step_sizes=(2.0, 1.0)),
            r"rprop\(step_sizes=\(2.0, 1.0\)\): expected 0 <= step_sizes\[0\]",
        ),
        (lambda: asgd(-0.1), r"asgd\(lr=-0.1\): expected lr >= 0"),
        (lambda: asgd(lambd=-1), r"asgd\(lambd=-1\): expected lambd >= 0"),
        (lambda: asgd(alpha=-1), r"asgd\(alpha=-1\): expected alpha >= 0"),
        (lambda: asgd(t0=-1), r"asgd\(t0=-1\): expected t0 >= 0"),
        (lambda: asgd(weight_decay=-1), r"asgd\(weight_decay=-1\): expected"),
    ],
)
def test_numbers_without_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_of_rprop_is_refused():
    with pytest.raises(TypeError, match=r"rprop\(lr=schedule\): expected a number"):
        rprop(lambda count: 0.1)


def test_asgd_without_parameters_is_refused():
    tx, params = asgd(lambd=0.0), {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"asgd\(params=None\)"):
        tx.update(params, tx.init(params))


TRANSFORMATIONS = {
    "scale_by_amsgrad": scale_by_amsgrad,
    "scale_by_nadam": scale_by_nadam,
    "scale_by_radam": scale_by_radam,
    "scale_by_adamax": scale_by_adamax,
    "scale_by_rss": scale_by_rss,
    "scale_by_rms": scale_by_rms,
    "scale_by_stddev": scale_by_stddev,
    "scale_by_adadelta": scale_by_adadelta,
    "scale_by_rprop": scale_by_rprop,
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_parameters_that_are_not_real_are_refused(name, dtype):
    with pytest.raises(TypeError, match=rf"{name}\(params\): expected real.*'w'"):
        TRANSFORMATIONS[name]().init({"w": torch.zeros(2, dtype=dtype)})


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_names_that_differ_are_listed(name):
    tx = chain(TRANSFORMATIONS[name]())
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    message = rf"{name}\(grads\).*missing: 'b'; unexpected: 'c'"
    with pytest.raises(ValueError, match=message):
        tx.update({"a": torch.zeros(2), "c": torch.zeros(2)}, tx.init(params))

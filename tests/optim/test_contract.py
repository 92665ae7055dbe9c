"""What every optimizer and every transformation around one promises."""

import copy
import inspect

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.optim.optimizers import OPTIMIZERS, each, each_list, every
from tests.optim.problems import (
    double,
    gradients,
    matrices,
    member,
    perceptron,
    random_gradients,
    stacked,
    train,
)
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.optim import chain, step


def test_every_optimizer_and_wrapper_is_in_the_table():
    """But for the parts of which these are made."""
    makers = {
        name
        for name, value in vars(optim).items()
        if inspect.isfunction(value)
        and "GradientTransformation" in str(inspect.signature(value).return_annotation)
    }
    parts = {name for name in makers if name.startswith("scale_by_")}
    parts |= {"add_decayed_weights", "chain", "orthogonalize", "schedule_free", "trace"}
    table = {name.split(",")[0] for name in OPTIMIZERS}
    assert makers - parts == table - parts


def tensors(case):
    return pytree.tree_map(double, case.of())


def leaves(tree):
    leaves = pytree.tree_leaves(tree)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    return leaves


def zeros(tree):
    return pytree.tree_map(torch.zeros_like, tree)


# Members.


@every
def test_members_that_differ_in_every_number_train_as_they_do_alone(case):
    numbers, (start, loss) = each_list(double, case.numbers), case.problem()
    starts = [random_gradients(start, seed=seed) for seed in range(3)]
    params = stacked(starts)
    state = torch.vmap(lambda n, p: case.make(**n).init(p))(numbers, params)
    advance = torch.vmap(lambda g, n, p, s: step(case.make(**n), g, s, p))
    for _ in range(8):
        grads = torch.vmap(torch.func.grad(loss))(params)
        params, state = advance(grads, numbers, params, state)
    for index, start in enumerate(starts):
        expected, last = train(case.tx(index), start, loss, 8)
        assert_exact(member(params, index), expected, 1e-12)
        if all(pytree.tree_leaves(case.of(index))):  # the number zero needs no state
            assert_exact(member(state, index), last, 1e-12)


COMPILED = [name for name, case in OPTIMIZERS.items() if case.compiles]
GROUPS = [COMPILED[start : start + 7] for start in range(0, len(COMPILED), 7)]
"""Cases in groups, since a chain of them compiles in half the time."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        GROUPS[0],
        *(pytest.param(g, marks=pytest.mark.more) for g in [*GROUPS[1:], ["muon"]]),
    ],
    ids=" ".join,
)
def test_members_whose_optimizers_are_made_inside_compile_to_one_graph(names):
    cases = [OPTIMIZERS[name] for name in names]
    numbers = [each_list(double, case.numbers) for case in cases]
    start = dict(list(cases[0].problem()[0].items())[:2])
    params = {key: torch.stack([p, 2 * p, 3 * p]) for key, p in start.items()}

    def make(numbers):
        return chain(*(c.make(**n) for c, n in zip(cases, numbers, strict=True)))

    state = torch.vmap(lambda numbers, p: make(numbers).init(p))(numbers, params)
    advance = torch.vmap(lambda n, p, s: step(make(n), p, s, p))
    torch.compiler.reset()
    compiled = torch.compile(advance, fullgraph=True, backend="eager")
    expected = advance(numbers, params, state)
    assert_exact(compiled(numbers, params, state), expected, 1e-12)


# Purity and state.


@every
def test_a_step_changes_nothing_and_its_state_survives_a_dictionary(case):
    (start, loss), tx = case.problem(), case.tx()
    places = [leaf.data_ptr() for leaf in (*leaves(tx.init(start)), *start.values())]
    assert len(set(places)) == len(places)  # no memory is shared
    params, state = train(tx, start, loss, 3)
    arguments = (grads := gradients(loss, params)), state, params
    before, copies = leaves(arguments), copy.deepcopy(arguments)
    versions = [leaf._version for leaf in before]
    expected = step(tx, *arguments)
    saved = {key: leaf.clone() for key, leaf in optim.state_dict(state).items()}
    again = optim.load_state_dict(tx.init(params), saved)
    assert pytree.tree_structure(again) == pytree.tree_structure(state)
    assert_exact(step(tx, grads, again, params), expected, 0)
    assert [leaf._version for leaf in before] == versions
    assert_exact(arguments, copies, 0)


@every
def test_a_donated_step_has_the_numbers_of_a_pure_one(case):
    (params, loss), tx = case.problem(), case.tx()
    donated, state = copy.deepcopy(params), tx.init(params)
    pure = tx.init(params)
    for _ in range(4):
        grads, old = gradients(loss, params), donated
        kept = copy.deepcopy(grads)
        donated, state = step(tx, grads, state, donated, donate=True)
        params, pure = step(tx, kept, pure, params)
        assert_exact(grads, kept, 0)
        assert not old
    assert_exact((donated, state), (params, pure), 1e-12)


@every
def test_no_value_is_read_and_results_are_where_the_parameters_are(case):
    params = pytree.tree_map(lambda t: t.to("meta"), case.problem()[0])
    on_device = pytree.tree_map(lambda t: t.to("meta"), tensors(case))
    for tx in (case.tx(), case.make(**on_device)):
        results = step(tx, params, tx.init(params), params)
        assert {leaf.device.type for leaf in leaves(results)} == {"meta"}


@every
def test_no_graph_is_recorded_where_none_is_wanted(case):
    (params, loss), tx = case.problem(), case.tx()
    assert not any(leaf.requires_grad for leaf in leaves(train(tx, params, loss, 2)))
    trained = {name: p.requires_grad_() for name, p in params.items()}
    with torch.no_grad():
        state = tx.init(trained)
        updates, after = tx.update(trained, state, trained)
    updates = [u for u in updates.values() if u is not None]
    assert not any(leaf.requires_grad for leaf in leaves((state, updates, after)))


def mixed(tree):
    """Turn around every dictionary of a state."""
    if isinstance(tree, dict):
        return {name: mixed(tree[name]) for name in reversed(tree)}
    if isinstance(tree, tuple):
        parts = map(mixed, tree)
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "add_noise"])
def test_names_decide_in_any_order_and_in_inference_mode(name):
    """But for noise, which is drawn for all gradients at once, in their order."""
    case = OPTIMIZERS[name]
    (params, loss), tx = case.problem(), case.tx()
    other, state = params, tx.init(params)
    turned = mixed(state)
    for _ in range(3):
        grads = gradients(loss, params)
        params, state = step(tx, grads, state, params)
        with torch.inference_mode():
            other, turned = step(tx, mixed(grads), mixed(turned), mixed(other))
    assert_exact((other, turned), (params, state), 1e-12)


# Gradients of None, and no parameters at all.


def dictionaries(state):
    """Every dictionary by parameter name that a state holds."""
    if isinstance(state, dict) and not any(isinstance(v, dict) for v in state.values()):
        return [state]
    nodes = state.values() if isinstance(state, dict) else state
    inner = [dictionaries(n) for n in nodes if not isinstance(n, Tensor)]
    return [tree for trees in inner for tree in trees]


@every
def test_a_parameter_without_gradients_is_as_good_as_absent(case):
    (expected, loss), tx = case.problem(), case.tx()
    params = spare = {**expected, "spare.weight": torch.ones(2, 2).double()}
    expected_state, state = tx.init(expected), tx.init(spare)
    fresh = dictionaries(tx.init(spare))
    for _ in range(7):
        grads = gradients(loss, expected)
        expected, expected_state = step(tx, grads, expected_state, expected)
        params, state = step(tx, {**grads, "spare.weight": None}, state, params)
    assert params.pop("spare.weight") is spare["spare.weight"]
    assert_exact(params, expected, 0)
    for tree, before in zip(dictionaries(state), fresh, strict=True):
        if "spare.weight" in tree:
            assert_exact(tree.pop("spare.weight"), before["spare.weight"], 0)
    assert_exact(state, expected_state, 0)


@every
def test_a_gradient_of_none_keeps_a_parameter_and_its_moments(case):
    (params, loss), tx = case.problem(), case.tx()
    params, state = train(tx, params, loss, 6)
    grads = gradients(loss, params)
    updates, after = tx.update({**grads, "1.weight": None}, state, params)
    assert updates["1.weight"] is None
    assert optim.apply_updates(params, updates)["1.weight"] is params["1.weight"]
    _, moved = tx.update(grads, state, params)
    trees = zip(*map(dictionaries, (state, after, moved)), strict=True)
    rows = [[t["1.weight"] for t in row] for row in trees if "1.weight" in row[0]]
    if not case.averages:
        for before, kept, _ in rows:
            assert_exact(kept, before, 0)
        floating = [row for row in rows if row[0].is_floating_point()]
        moved = [not torch.equal(before, other) for before, _, other in floating]
        assert any(moved) or not floating


# Precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every
def test_half_precision_is_widened_once_and_rounded_once(case, dtype):
    def floats(tree):
        return {key: leaf.float() for key, leaf in tree.items()}

    tx, (start, _) = case.tx(), case.problem()
    params = {key: p.to(dtype) for key, p in start.items()}
    state, wide_state = tx.init(params), tx.init(floats(params))
    for seed in range(3):
        grads = random_gradients(params, seed=seed)
        if dtype == torch.float16:  # the square of which has more than a float16 holds
            grads = {key: 3e4 * g.sign() for key, g in grads.items()}
        wide = floats(params)
        updates, state = tx.update(grads, state, params)
        expected, wide_state = tx.update(floats(grads), wide_state, wide)
        present = {key: u for key, u in updates.items() if u is not None}
        assert {u.dtype for u in present.values()} <= {torch.float32}
        assert_exact(present, {key: expected[key] for key in present}, 0)
        assert all(u.isfinite().all() for u in present.values())
        new = optim.apply_updates(params, updates)
        rounded = {key: (wide[key] + u).to(dtype) for key, u in present.items()}
        assert_exact(new, {**params, **rounded}, 0)
        params = new
    assert not any(leaf.dtype == dtype for leaf in leaves(state))
    if not case.averages:  # which is that of the parameters after they were rounded
        assert_exact(state, wide_state, 0)


@every
def test_float64_numbers_and_gradients_widen_neither_parameters_nor_state(case):
    params = {key: p.float() for key, p in case.problem()[0].items()}
    if case.problem is perceptron:
        params["scale.weight"] = torch.tensor(2.0)
    tx = case.make(**tensors(case))
    state = tx.init(params)
    before = pytree.tree_map(lambda s: s.dtype, (params, state))
    for seed in range(2):
        grads = random_gradients(params, seed=seed, dtype=torch.float64)
        params, state = step(tx, grads, state, params)
    assert pytree.tree_map(lambda s: s.dtype, (params, state)) == before


# Derivatives.


@each(smooth=True)
def test_gradients_through_training_match_finite_differences(case):
    start, loss = case.problem()

    def outcome(numbers, params):
        tx = case.make(**numbers)
        state = tx.init(params)
        for _ in range(7):
            grads = torch.func.grad(loss)(params)
            params, state = step(tx, grads, state, params)
        return loss(case.outcome(params, state))

    arguments = numbers, _ = tensors(case), start
    torch.testing.assert_close(
        outcome(*arguments), outcome(case.of(), start), rtol=1e-12, atol=0
    )
    slopes = torch.func.grad(outcome, argnums=(0, 1))(*arguments)
    assert next(iter(slopes[0].values())) != 0
    assert all((slope != 0).any() for slope in slopes[1].values())
    h = 1e-6
    drawn = {key: h * g for key, g in random_gradients(start, seed=1).items()}
    ways = [(zeros(numbers), drawn)]
    for key, number in numbers.items():
        way = {**zeros(numbers), key: pytree.tree_map(lambda v: h * v, number)}
        ways.append((way, zeros(start)))
    for way in ways:  # the slope along it, and what the function does on it
        high, low = (
            outcome(*pytree.tree_map(lambda a, w, s=sign: a + s * w, arguments, way))
            for sign in (1, -1)
        )
        along = pytree.tree_map(lambda s, w: (s * w).sum(), slopes, way)
        total = sum(pytree.tree_leaves(along))
        torch.testing.assert_close(total, (high - low) / 2, rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize("zero", ["gradients", "parameters", "both"])
@each(smooth=True)
def test_slopes_are_finite_where_there_are_zeros(case, zero):
    params, _ = case.problem()
    grads = random_gradients(params, seed=0) if zero == "parameters" else zeros(params)
    params = params if zero == "gradients" else zeros(params)
    numbers, options = tensors(case), {}
    # Without eps Adam's step has no slope where all that it saw was zero.
    make = getattr(case.make, "func", case.make)
    bare = zero != "both" or make not in (optim.adam, optim.nadam, optim.adamax)
    if "eps" in numbers and bare and case.problem is not matrices:
        options["eps"] = pytree.tree_map(lambda _: 0.0, numbers.pop("eps"))

    def outcome(numbers, params, grads):
        tx = case.make(**numbers, **options)
        state = tx.init(params)
        for _ in range(3):
            params, state = step(tx, grads, state, params)
        return sum(p.sum() for p in case.outcome(params, state).values()), params

    slope = torch.func.grad(outcome, argnums=(0, 1, 2), has_aux=True)
    slopes, trained = slope(numbers, params, grads)
    assert all(leaf.isfinite().all() for leaf in leaves((slopes, trained)))


# Chains and states.


def test_a_chain_applies_its_transformations_in_order():
    grads = {"a": torch.ones(2, dtype=torch.bfloat16), "b": None}
    assert chain().update(grads, chain().init({})) == (grads, ())
    params = {"w": torch.tensor([2.0])}
    decay, scale = optim.add_decayed_weights(1.0), optim.scale_by_learning_rate(0.5)
    for tx, expected in [
        (chain(decay, scale), -1.5),
        (chain(scale, decay), 1.5),
        (chain(chain(decay), scale), -1.5),
    ]:
        updates, _ = tx.update({"w": torch.ones(1)}, tx.init(params), params)
        assert updates["w"].item() == expected

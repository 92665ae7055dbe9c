"""Steps that may write into what they are given: same numbers, no memory."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.optim.problems import random_tensors
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.tree import load_state_dict, state_dict

SHAPES = {"w": (3, 4), "b": (5,), "c": ()}
KNOWN = [
    optim.sgd(0.1),
    optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    optim.sgd(0.1, momentum=0.9, nesterov=True, maximize=True),
    optim.adam(0.01, weight_decay=0.1),
    optim.adam(0.01, amsgrad=True, maximize=True),
    optim.adam(optim.schedules.cosine(0.01, 20)),
    optim.adamw(0.01, betas=(0.8, 0.99)),
    optim.adamw(torch.tensor(0.01, dtype=torch.float64)),
    optim.adamw(0.01, amsgrad=True),
]
OTHERS = [optim.adam(0.1, eps=0.0), optim.adam(0.1, weight_decay=torch.tensor(0.1))]
HALF = (torch.bfloat16, torch.float16)


def tensors(seed, dtype=torch.float64):
    return random_tensors(SHAPES, seed=seed, dtype=dtype)


def both(tx, grads, params):
    """Return the parameters after a pure step, and after a donated one."""
    pure, _ = optim.step(tx, grads, tx.init(params), params)
    return pure, optim.step(tx, grads, tx.init(params), params, donate=True)[0]


@pytest.mark.parametrize(("tx", "dtype", "tolerance"), [
    *((tx, torch.float64, 1e-12) for tx in KNOWN),
    *((tx, torch.float64, 0) for tx in OTHERS),
    *((optim.adam(0.01, weight_decay=0.1), dtype, 0) for dtype in HALF),
])  # fmt: skip
def test_donated_steps_have_the_numbers_of_pure_ones(tx, dtype, tolerance):
    """Bit by bit where the kernel cannot be used; else in the old memory."""

    def run(donate):
        params = tensors(0, dtype)
        state = tx.init(params)
        places = {name: value.data_ptr() for name, value in params.items()}
        for number in range(30):
            grads = tensors(number + 1, dtype) | ({"b": None} if number == 3 else {})
            params, state = optim.step(tx, grads, state, params, donate=donate)
        return (params, state), places == {n: x.data_ptr() for n, x in params.items()}

    donated, in_place = run(True)
    assert in_place or not tolerance
    assert_exact(donated, run(False)[0], tolerance)


@pytest.mark.parametrize("tx", [optim.adam(0.1), optim.lion(0.1)])
def test_dictionaries_that_were_given_away_are_empty(tx):
    params = tensors(0)
    state = tx.init(params)
    new, new_state = optim.step(tx, tensors(1), state, params, donate=True)
    assert not params
    assert set(new) == set(SHAPES)
    assert all(state_dict(new_state))
    with pytest.raises(ValueError, match="got unexpected: 'b', 'c', 'w'"):
        optim.step(tx, tensors(1), tx.init(new), params)
    with pytest.raises(ValueError, match="expected the names of the model"):
        optim.step(tx, tensors(1), state, new)


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_other_layouts_are_not_handed_to_the_kernel(layout):
    """It walks through memory and would mix the entries up."""
    weight = tensors(0, torch.float32)["w"].t()
    params = {"w": weight if layout == "transposed" else torch.ones(1).expand(4, 3)}
    grads = {"w": torch.arange(12.0).reshape(4, 3)}
    pure, donated = both(optim.sgd(0.1, momentum=0.9), grads, params)
    assert_exact(donated, pure, 0)


def test_channels_last_is_stepped_in_place():
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    params = {"w": weight.clone(memory_format=torch.preserve_format)}
    place = params["w"].data_ptr()
    pure, donated = both(optim.adam(0.1), {"w": torch.randn_like(weight)}, params)
    assert_exact(donated, pure, 1e-6)
    assert donated["w"].data_ptr() == place


LAYOUTS = {
    "transposed": {"w": torch.arange(4.0).reshape(2, 2).t()},
    "strided": {"b": torch.arange(6.0)[::2]},
    "of another dtype": {"w": torch.ones(2, 2, dtype=torch.float64)},
    "with a graph": {"w": torch.ones(2, 2, requires_grad=True)},
}


@pytest.mark.parametrize("other", ["params", "grads"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_unlike_those_of_the_last_step_are_checked_again(layout, other):
    tx = optim.adam(0.5)

    def step(donate, **changed):
        usual = {"w": torch.ones(2, 2), "b": torch.ones(3)}
        trees = {"params": {**usual}, "grads": usual} | changed
        state, params = tx.init(trees["params"]), {**trees["params"]}
        return optim.step(tx, trees["grads"], state, params, donate=donate)[0], usual

    step(True)
    changed = step(True)[1] | LAYOUTS[layout]
    pure = step(False, **{other: changed})[0]
    donated = step(True, **{other: changed})[0]
    assert_exact(donated, pure, 1e-6)
    assert donated["w"].requires_grad == pure["w"].requires_grad
    assert_exact(step(True)[0], step(False)[0], 1e-6)


def test_inside_a_transform_and_with_a_graph_a_donated_step_is_pure():
    def outcome(params):
        tx, params = optim.adam(0.1), dict(params)
        new, _ = optim.step(tx, tensors(1), tx.init(params), params, donate=True)
        return sum(value.sum() for value in new.values())

    params, kept = tensors(0), tensors(0)
    slopes = torch.func.grad(outcome)(params)
    assert all((slope == 1).all() for slope in slopes.values())
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    assert outcome(leaves).requires_grad
    assert_exact(params, kept, 0)
    rate, kept = torch.tensor(0.1, requires_grad=True), {"w": torch.ones(2)}
    for tx in (optim.sgd(rate), optim.adam(lambda count: rate)):
        grads, state = {"w": torch.ones(2)}, tx.init(kept)
        new, _ = optim.step(tx, grads, state, dict(kept), donate=True)
        assert new["w"].requires_grad
        assert torch.equal(kept["w"], torch.ones(2))


def test_a_state_that_does_not_fit_is_named():
    state = optim.adam(0.1).init(tensors(0))
    saved = state_dict(state)
    with pytest.raises(ValueError, match="load_state_dict: expected the names"):
        load_state_dict(optim.sgd(0.1).init(tensors(0)), saved)
    with pytest.raises(ValueError, match="got torch.float32. Was it saved"):
        load_state_dict(state, {n: v.float() for n, v in saved.items()})
    with pytest.raises(TypeError, match=r"expected a tensor at \['n'\], got a int"):
        state_dict({"n": 3})


@pytest.mark.parametrize("other", [torch.ones(2), None])
def test_one_tensor_under_two_names_is_stepped_once_for_each_gradient(other):
    tensor, tx = torch.ones(2), optim.sgd(0.5)
    params, grads = {"a": tensor, "b": tensor}, {"a": torch.ones(2), "b": other}
    params, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert params["a"].tolist() == [0.5, 0.5]
    assert params["b"].tolist() == ([1, 1] if other is None else [0.5, 0.5])


# Memory that tensors share: parameters, gradients, and a change of the state.

FUSED = {
    "sgd": optim.sgd(0.1, weight_decay=0.5),
    "momentum": optim.sgd(0.1, momentum=0.9, weight_decay=0.5),
    "adamw": optim.adamw(0.1, weight_decay=0.5),
}
fused = pytest.mark.parametrize("name", FUSED)


def flat():
    return torch.arange(12.0, dtype=torch.float64)


def ones(**changes):
    return {name: torch.ones(4).double() for name in "ab"} | changes


def apart(change):
    """Parameters side by side in one memory, with `change(flat, params)`."""
    whole = flat()
    params = {"a": whole[:4], "b": whole[4:8]}
    return params, *change(whole, params)


SHARED = {
    "a gradient is a parameter": lambda f, p: (p, {}),
    "a gradient is another parameter": lambda f, p: ({"a": p["b"], "b": p["a"]}, {}),
    "a gradient overlaps": lambda f, p: (ones(b=f[6:10]), {}),
    "the state is a parameter": lambda f, p: (ones(), {"a": p["b"]}),
    "the state overlaps": lambda f, p: (ones(), {"b": f[2:6]}),
    "the state is a gradient": lambda f, p: ((g := ones()), {"b": g["a"]}),
}


@fused
@pytest.mark.parametrize("kind", SHARED)
def test_gradients_and_states_in_the_memory_of_parameters_are_read_in_time(name, kind):
    tx = FUSED[name]

    def started(params, changed):
        state = tx.init(params)
        for part in state:
            for tensors in [*part.slots.values()][:1] if part else []:
                tensors.update(changed)
        return state

    copied = pytree.tree_map(torch.clone, apart(SHARED[kind]))
    expected = optim.step(tx, copied[1], started(copied[0], copied[2]), copied[0])
    params, grads, changed = apart(SHARED[kind])
    kept, grads = pytree.tree_map(torch.clone, grads), dict(grads)
    state = started(params, changed)
    assert_exact(optim.step(tx, grads, state, params, donate=True), expected, 1e-12)
    assert_exact(grads, kept, 0)


def two_storages():
    array = flat().numpy()
    return {"a": torch.from_numpy(array[:4]), "b": torch.from_numpy(array[2:6])}


@fused
@pytest.mark.parametrize(("params", "grads"), [
    (lambda f: {"a": f[:4], "b": f[2:6]}, ones()),
    (lambda f: {"a": f[:8], "b": f[2:4]}, {"a": flat()[4:].exp(), "b": None}),
    (lambda f: two_storages(), ones()),
    (lambda f: {"a": f[:4], "b": f[2:6]}, ones(b=None)),
])  # fmt: skip
def test_parameters_that_overlap_in_part_are_refused_before_a_kernel_writes(
    name, params, grads
):
    tx, params = FUSED[name], params(flat())
    kept = {n: param.clone() for n, param in params.items()}
    message = r"step\(donate=True\).*'a' and 'b', which ove"
    with pytest.raises(ValueError, match=message):
        optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(params, kept, 0)
    pure, _ = optim.step(tx, grads, tx.init(params), params)
    assert_exact(both(tx, grads, kept)[1], pure, 1e-12)


@fused
def test_parameters_side_by_side_in_one_memory_are_stepped_there(name):
    """But for columns, through which the kernel would not walk."""
    flat = torch.arange(12.0)
    params = {"a": flat[4:8], "b": flat[:4], "none": flat[4:4], "c": flat[8:]}
    columns = {"left": flat.view(3, 4)[:, :2], "right": flat.view(3, 4)[:, 2:]}
    for named, in_place in ((columns, False), (params, True)):
        grads = {n: torch.ones_like(param) for n, param in named.items()}
        places = [param.data_ptr() for param in named.values()]
        pure, donated = both(FUSED[name], grads, named)
        assert_exact(donated, pure, 1e-6 if in_place else 0)
        found = [param.data_ptr() for param in donated.values()]
        assert (found == places) is in_place
        assert torch.equal(flat, torch.arange(12.0)) is not in_place

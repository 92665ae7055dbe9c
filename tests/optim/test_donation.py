"""Steps that may write into what they are given: same numbers, no memory."""

import pytest
import torch

from tests.optim.problems import random_tensors
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.tree import load_state_dict, state_dict

SHAPES = {"w": (3, 4), "b": (5,), "c": ()}

KNOWN = {
    "sgd": lambda: optim.sgd(0.1),
    "sgd, momentum": lambda: optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "sgd, nesterov": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda: optim.adam(0.01, weight_decay=0.1),
    "adam, amsgrad": lambda: optim.adam(0.01, amsgrad=True, maximize=True),
    "adam, schedule": lambda: optim.adam(optim.schedules.cosine(0.01, 20)),
    "adamw": lambda: optim.adamw(0.01, betas=(0.8, 0.99)),
    "adamw, tensor": lambda: optim.adamw(torch.tensor(0.01, dtype=torch.float64)),
    "adamw, amsgrad": lambda: optim.adamw(0.01, amsgrad=True),
}

OTHERS = {
    "dampened": lambda: optim.sgd(0.1, momentum=0.9, dampening=0.5),
    "no eps": lambda: optim.adam(0.1, eps=0.0),
    "tensor": lambda: optim.adam(0.1, weight_decay=torch.tensor(0.1)),
    "another": lambda: optim.lion(0.1),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1)),
}


def tensors(seed, dtype=torch.float64):
    return random_tensors(SHAPES, seed=seed, dtype=dtype)


def run(tx, dtype, *, donate):
    params = tensors(0, dtype)
    state = tx.init(params)
    places = {name: value.data_ptr() for name, value in params.items()}
    for number in range(30):
        grads = tensors(number + 1, dtype) | ({"b": None} if number == 3 else {})
        params, state = optim.step(tx, grads, state, params, donate=donate)
    moved = {n for n, value in params.items() if value.data_ptr() != places[n]}
    return params, state, moved


@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [
        *((make, torch.float64, 1e-12) for make in KNOWN.values()),
        *((make, torch.float64, 0) for make in OTHERS.values()),
        *((KNOWN["adam"], low, 0) for low in (torch.bfloat16, torch.float16)),
    ],
)
def test_donated_steps_have_the_numbers_of_pure_ones(make, dtype, tolerance):
    """Bit by bit where the kernel cannot be used; else in the old memory."""
    pure, pure_state, _ = run(make(), dtype, donate=False)
    params, state, moved = run(make(), dtype, donate=True)
    assert not (moved and tolerance)
    assert_exact((params, state), (pure, pure_state), tolerance)


@pytest.mark.parametrize("make", [KNOWN["adam"], OTHERS["another"]])
def test_dictionaries_that_were_given_away_are_empty(make):
    tx, params = make(), tensors(0)
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
    tx, grads = optim.sgd(0.1, momentum=0.9), {"w": torch.arange(12.0).reshape(4, 3)}
    given = tensors(0, torch.float32)["w"].t()
    params = {"w": given if layout == "transposed" else torch.ones(1).expand(4, 3)}
    expected, _ = optim.step(tx, grads, tx.init(params), params)
    found, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(found, expected, 0)


def test_channels_last_is_stepped_in_place():
    tx = optim.adam(0.1)
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    grads = {"w": torch.randn_like(weight)}
    params = {"w": weight.clone(memory_format=torch.preserve_format)}
    expected, _ = optim.step(tx, grads, tx.init(params), params)
    place = params["w"].data_ptr()
    found, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(found, expected, 1e-6)
    assert found["w"].data_ptr() == place


def test_inside_a_transform_a_donated_step_is_pure():
    tx = optim.adam(0.1)

    def outcome(params):
        new, _ = optim.step(tx, tensors(1), tx.init(params), dict(params), donate=True)
        return sum(value.sum() for value in new.values())

    params = tensors(0)
    slopes = torch.func.grad(outcome)(params)
    assert all((slope == 1).all() for slope in slopes.values())
    assert_exact(params, tensors(0), 0)


def test_parameters_with_a_graph_are_not_written_to():
    tx = optim.sgd(0.1)
    params = {name: value.requires_grad_() for name, value in tensors(0).items()}
    kept = dict(params)
    new, _ = optim.step(tx, tensors(1), tx.init(params), params, donate=True)
    assert new["w"].requires_grad
    assert_exact(kept, tensors(0), 0)


@pytest.mark.slow
def test_compiled_a_donated_step_is_the_pure_one():
    tx, params, grads = optim.adam(0.1), tensors(0), tensors(1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(grads, state, params):
        return optim.step(tx, grads, state, dict(params), donate=True)[0]

    expected, _ = optim.step(tx, grads, tx.init(params), params)
    assert_exact(compiled(grads, tx.init(params), params), expected, 1e-12)


def test_a_state_that_does_not_fit_is_named():
    state = optim.adam(0.1).init(tensors(0))
    saved = state_dict(state)
    with pytest.raises(ValueError, match="load_state_dict: expected the names"):
        load_state_dict(optim.sgd(0.1).init(tensors(0)), saved)
    with pytest.raises(ValueError, match="got torch.float32. Was it saved"):
        load_state_dict(state, {n: v.float() for n, v in saved.items()})
    with pytest.raises(TypeError, match=r"expected a tensor at \['n'\], got a int"):
        state_dict({"n": 3})


def test_a_rate_that_is_learned_keeps_its_graph():
    rate = torch.tensor(0.1, requires_grad=True)
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    for tx in (optim.sgd(rate), optim.adam(lambda count: rate)):
        new, _ = optim.step(tx, grads, tx.init(params), dict(params), donate=True)
        assert new["w"].requires_grad
        assert torch.equal(params["w"], torch.ones(2))


@pytest.mark.parametrize("other", [torch.ones(2), None])
def test_one_tensor_under_two_names_is_stepped_once_for_each_gradient(other):
    tensor, tx = torch.ones(2), optim.sgd(0.5)
    params, grads = {"a": tensor, "b": tensor}, {"a": torch.ones(2), "b": other}
    params, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert params["a"].tolist() == [0.5, 0.5]
    assert params["b"].tolist() == ([1, 1] if other is None else [0.5, 0.5])


def overlapping(kind):
    """Return parameters, gradients and a change of the state, of one memory in part."""
    flat = torch.arange(12.0, dtype=torch.float64)
    ones = {name: torch.ones(4, dtype=torch.float64) for name in "ab"}
    params = {"a": flat[:4], "b": flat[4:8]}
    if kind == "parameters":
        return {"a": flat[:4], "b": flat[2:6]}, ones, {}
    if kind == "one in the other":
        return {"a": flat[:8], "b": flat[2:4]}, {"a": flat[4:].exp(), "b": None}, {}
    if kind == "two storages":
        array = flat.numpy()
        parts = {"a": torch.from_numpy(array[:4]), "b": torch.from_numpy(array[2:6])}
        return parts, ones, {}
    if kind == "one without a gradient":
        return {"a": flat[:4], "b": flat[2:6]}, {**ones, "b": None}, {}
    if kind == "a gradient is a parameter":
        return params, params, {}
    if kind == "a gradient is another parameter":
        return params, {"a": params["b"], "b": params["a"]}, {}
    if kind == "a gradient overlaps":
        return params, {**ones, "b": flat[6:10]}, {}
    if kind == "the state is a parameter":
        return params, ones, {"a": params["b"]}
    if kind == "the state overlaps":
        return params, ones, {"b": flat[2:6]}
    if kind == "the state is a gradient":
        return params, ones, {"b": ones["a"]}
    raise ValueError(kind)


FUSED = {
    "sgd": lambda: optim.sgd(0.1, weight_decay=0.5),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9, weight_decay=0.5),
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.5),
}


def started(tx, params, changed):
    """Return the state of a transformation, its first moment changed."""
    state = tx.init(params)
    for part in state:
        for tensors in [*part.slots.values()][:1] if part else []:
            tensors.update(changed)
    return state


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    "kind",
    [
        "a gradient is a parameter",
        "a gradient is another parameter",
        "a gradient overlaps",
        "the state is a parameter",
        "the state overlaps",
        "the state is a gradient",
    ],
)
def test_gradients_and_states_in_the_memory_of_parameters_are_read_in_time(name, kind):
    tx, copied = FUSED[name](), overlapping(kind)
    own = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, copied)
    expected = optim.step(tx, own[1], started(tx, own[0], own[2]), own[0])
    params, grads, changed = overlapping(kind)
    kept = {n: grad.clone() for n, grad in grads.items()}
    grads = dict(grads)  # the dictionary of parameters is given away
    state = started(tx, params, changed)
    found = optim.step(tx, grads, state, params, donate=True)
    assert_exact(found, expected, 1e-12)
    assert_exact(grads, kept, 0)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    "kind",
    ["parameters", "one in the other", "two storages", "one without a gradient"],
)
def test_parameters_that_overlap_in_part_are_refused_before_a_kernel_writes(name, kind):
    tx, (params, grads, _) = FUSED[name](), overlapping(kind)
    kept = {n: param.clone() for n, param in params.items()}
    with pytest.raises(
        ValueError, match=r"step\(donate=True\).*'a' and 'b', which ove"
    ):
        optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(params, kept, 0)
    pure, _ = optim.step(tx, grads, tx.init(params), params)
    owned = {n: param.clone() for n, param in params.items()}
    assert_exact(
        optim.step(tx, grads, tx.init(owned), owned, donate=True)[0], pure, 1e-12
    )


@pytest.mark.parametrize("name", FUSED)
def test_parameters_side_by_side_in_one_memory_are_stepped_there(name):
    tx, flat = FUSED[name](), torch.arange(12.0)
    params = {"a": flat[4:8], "b": flat[:4], "none": flat[4:4], "c": flat[8:]}
    grads = {n: torch.ones_like(param) for n, param in params.items()}
    places = [param.data_ptr() for param in params.values()]
    expected, _ = optim.step(tx, grads, tx.init(params), params)
    found, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(found, expected, 1e-6)
    assert [param.data_ptr() for param in found.values()] == places


@pytest.mark.parametrize("name", FUSED)
def test_columns_of_one_matrix_are_not_handed_to_the_kernel(name):
    tx, whole = FUSED[name](), torch.arange(12.0).reshape(3, 4)
    params = {"left": whole[:, :2], "right": whole[:, 2:]}
    grads = {n: torch.ones(3, 2) for n in params}
    expected, _ = optim.step(tx, grads, tx.init(params), params)
    found, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(found, expected, 0)
    assert torch.equal(whole, torch.arange(12.0).reshape(3, 4))

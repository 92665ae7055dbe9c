"""Loss scales against `torch.amp.GradScaler` and jmp, and what a skipped step keeps."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.cli import checkpoint
from vgrad.precision import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)
from vgrad.tree import state_dict

YES, NO = torch.tensor(True), torch.tensor(False)
FIXED = {"period": 3, "factor": 4.0, "min": 2.0**-20, "max": 2.0**20}
WIDEST = {"min": 2.0**-126, "max": 2.0**127}
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]

sequences = st.lists(st.booleans(), min_size=1, max_size=50)
mostly_finite = st.lists(
    st.integers(0, 9).map(lambda number: number > 0), min_size=1, max_size=50
)


def trace(scale, finite):
    """Return the scale and the count after each step."""
    seen = []
    for each in finite:
        scale = scale.adjust(torch.tensor(each))
        seen.append((scale.loss_scale.item(), scale.counter.item()))
    return seen


def grad_scaler_trace(finite, *, period, factor):
    """Do the same with a GradScaler, by gradients that are finite or not."""
    scaler = torch.amp.GradScaler("cpu", 1.0, factor, 1 / factor, period)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = []
    for each in finite:
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([1.0 if each else math.inf])
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


def jmp_trace(finite, *, period, factor, min, max):
    """Do the same by the formula of jmp 0.0.4 and a largest scale, in float32."""
    scale, counter, factor = np.float32(1.0), 0, np.float32(factor)
    seen = []
    for each in finite:
        if not each:
            scale = np.maximum(np.float32(min), scale / factor)
        elif counter == period - 1:
            scale = np.minimum(np.float32(max), scale * factor)
        counter = (counter + 1) % period * int(each)
        seen.append((float(scale), counter))
    return seen


def stacked(scales):
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *scales)


def assert_same(a, b):
    """Compare kind and fields, tensors bit by bit."""
    assert type(a) is type(b)
    assert_exact(vars(a), vars(b), 0)


class Unseen(TorchDispatchMode):
    """Fails where a value of a tensor becomes a Python number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value was looked at")
        return func(*args, **(kwargs or {}))


def worn():
    """Return a scale with every field away from its default."""
    return DynamicLossScale(2.0**5, **FIXED).adjust(NO).adjust(YES)


# The moves of a dynamic scale.


def test_the_defaults_are_those_that_the_documentation_names():
    scale = DynamicLossScale()
    kept = (scale.period, scale.factor, scale.min, scale.max)
    assert kept == (2000, 2.0, 2.0**-14, 2.0**24)
    tensors = (scale.loss_scale, scale.counter)
    assert_exact(tensors, (torch.tensor(2.0**15), torch.tensor(0)), 0)


@given(mostly_finite, st.integers(1, 6), st.sampled_from([2.0, 4.0]))
@examples(40)
def test_between_the_limits_the_trace_is_that_of_a_grad_scaler(finite, period, factor):
    options = {"period": period, "factor": factor}
    scale = DynamicLossScale(1.0, **options, **WIDEST)
    assert trace(scale, finite) == grad_scaler_trace(finite, **options)


@given(
    sequences,
    st.fixed_dictionaries(
        dict(
            period=st.integers(1, 6),
            factor=st.floats(1.1, 5.0),
            min=st.floats(1e-3, 1.0),
            max=st.floats(1.0, 1e3),
        )
    ),
)
def test_the_trace_is_that_of_jmp_within_the_limits(finite, options):
    values, counts = zip(*trace(DynamicLossScale(1.0, **options), finite), strict=True)
    expected, expected_counts = zip(*jmp_trace(finite, **options), strict=True)
    assert counts == expected_counts
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("finite", [True, False])
def test_the_scale_stays_a_number_above_zero_at_the_limits_of_float32(finite):
    limits = torch.finfo(torch.float32)
    ends = {"min": limits.tiny, "max": limits.max}
    scale = DynamicLossScale(1.0, period=1, factor=2.0**100, **ends)
    assert trace(scale, [finite] * 3)[-1][0] == ends["max" if finite else "min"]


def test_adjust_returns_a_new_scale_and_leaves_the_old_one():
    old = DynamicLossScale(8.0, **FIXED)
    new = old.adjust(NO)
    assert new.loss_scale.item() == 2.0
    assert_same(old, DynamicLossScale(8.0, **FIXED))
    with pytest.raises(dataclasses.FrozenInstanceError):
        new.loss_scale = torch.tensor(1.0)


def test_a_scale_that_is_given_as_a_tensor_becomes_float32_without_history():
    given = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    for scale in (StaticLossScale(given), DynamicLossScale(given, **FIXED)):
        assert scale.loss_scale.dtype == torch.float32
        assert not scale.loss_scale.requires_grad
        assert scale.loss_scale.item() == 8.0


@pytest.mark.parametrize("kind", [NoOpLossScale(), StaticLossScale(8.0)])
def test_the_other_scales_stay(kind):
    assert kind.adjust(NO) is kind
    assert kind.adjust(YES) is kind


# Scaling and unscaling.


def both(value):
    return pytest.mark.parametrize(
        "scale", [StaticLossScale(value), DynamicLossScale(value)]
    )


@both(2.0**15)
@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_scaled_and_unscaled_are_float32_or_wider(scale, dtype, shape):
    leaf = torch.full(shape, 3.0, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    assert_exact(scale.scale(leaf), torch.full(shape, 98304.0, dtype=wide), 0)
    assert_exact(scale.unscale(leaf), torch.full(shape, 3 / 2**15, dtype=wide), 0)


@both(3.0)
def test_autocast_around_a_scale_changes_nothing(scale):
    leaf = torch.tensor([1.001, 2.0])
    with torch.autocast("cpu", torch.bfloat16):
        inside = (scale.scale(leaf), scale.unscale(leaf))
        assert scale.adjust(YES).loss_scale.dtype == torch.float32
    assert_exact(inside, (leaf * 3, leaf / 3), 0)


@both(2.0)
def test_what_is_no_floating_tensor_is_returned_as_it_is(scale):
    ids, mask = torch.arange(3), torch.tensor([True, False])
    tree = {"ids": ids, "mask": [mask, None], "number": (3, 0.5, "name"), "none": None}
    for result in (scale.scale(tree), scale.unscale(tree)):
        assert result["ids"] is ids
        assert result["mask"][0] is mask
        assert result["mask"][1] is None
        assert result["number"] == (3, 0.5, "name")
        assert result["none"] is None
        for empty in ({}, [], (), None, {"a": {}}):
            assert scale.scale(empty) == scale.unscale(empty) == empty


def test_the_scale_of_no_scaling_returns_the_tree_itself():
    scale, tree = NoOpLossScale(), {"w": torch.ones(2)}
    assert scale.loss_scale == 1.0
    assert scale.scale(tree) is scale.unscale(tree) is tree
    x = torch.arange(3.0)
    assert torch.equal(torch.vmap(lambda s, x: s.scale(x))(scale, x), x)


@both(2.0**15)
def test_gradients_that_float16_cannot_hold_survive(scale):
    weight = torch.tensor(1.0, dtype=torch.float16)

    def loss(weight):
        return weight * 2.0**-13 * 2.0**-13

    grad = torch.func.grad(lambda weight: scale.scale(loss(weight)))(weight)
    assert torch.func.grad(loss)(weight).item() == 0.0
    assert grad.dtype == torch.float16
    assert scale.unscale(grad).item() == 2.0**-26


# A scale is a tree: of tensors that change, with the rest as its structure.


@pytest.mark.parametrize("scale", [NoOpLossScale(), StaticLossScale(8.0), worn()])
def test_every_field_survives_trees_and_copies(scale):
    leaves, structure = pytree.tree_flatten(scale)
    copied = copy.deepcopy(scale)
    assert_same(pytree.tree_unflatten(leaves, structure), scale)
    assert_same(pytree.tree_map(torch.clone, scale), scale)
    assert_same(copied, scale)
    for one, other in zip(leaves, pytree.tree_leaves(copied), strict=True):
        assert one.data_ptr() != other.data_ptr()


def test_a_mapped_scale_goes_on_as_the_one_it_came_from():
    finite = [True, False, False, True, True, True, True]
    mapped = pytree.tree_map(torch.clone, worn())
    assert {name: getattr(mapped, name) for name in FIXED} == FIXED
    assert trace(mapped, finite) == trace(worn(), finite)
    dtypes = pytree.tree_map(lambda leaf: leaf.dtype, worn())  # which are no tensors
    assert (dtypes.loss_scale, dtypes.counter) == (torch.float32, torch.int64)


@pytest.mark.parametrize("name", FIXED)
def test_scales_of_different_options_have_different_structures(name):
    other = {**FIXED, name: FIXED[name] * 2}
    a, b = DynamicLossScale(8.0, **FIXED), DynamicLossScale(8.0, **other)
    assert pytree.tree_structure(a) != pytree.tree_structure(b)
    assert pytree.tree_structure(a) == pytree.tree_structure(worn())
    with pytest.raises(ValueError, match="select_tree\\(a, b\\): expected two trees"):
        select_tree(YES, a, b)


def test_a_run_goes_on_from_the_scale_that_it_wrote(tmp_path):
    fresh = DynamicLossScale(1.0, **FIXED), StaticLossScale(1.0), NoOpLossScale()
    state = {"scales": (worn(), StaticLossScale(2.0), NoOpLossScale()), "w": YES}
    assert set(state_dict(state)) == {
        "['scales'][0].loss_scale",
        "['scales'][0].counter",
        "['scales'][1].loss_scale",
        "['w']",
    }
    checkpoint.save_state(tmp_path, state, {})
    tensors, _ = checkpoint.read_state(tmp_path)
    read = checkpoint.restored({"scales": fresh, "w": NO}, tensors)
    for one, other in zip(read["scales"], state["scales"], strict=True):
        assert_same(one, other)


# One scale for each member.


@given(st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=20))
@examples(40)
def test_vmapped_scales_move_as_each_would_alone(finite):
    alone = [DynamicLossScale(2.0**power, **FIXED) for power in (-20, 0, 20)]
    scales, seen = stacked(alone), []
    adjust = torch.vmap(lambda scale, finite: scale.adjust(finite))
    for each in finite:
        scales = adjust(scales, torch.tensor(each))
        pairs = (scales.loss_scale.tolist(), scales.counter.tolist())
        seen.append(list(zip(*pairs, strict=True)))
    for member, scale in enumerate(alone):
        expected = trace(scale, [each[member] for each in finite])
        assert [each[member] for each in seen] == expected


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
@pytest.mark.parametrize("dtype", FLOATING)
def test_vmapped_scales_multiply_and_divide_each_their_own(kind, dtype):
    scales = kind(torch.tensor([2.0, 4.0, 8.0]))
    factor = scales.loss_scale.to(torch.promote_types(dtype, torch.float32))
    leaf, ids = torch.arange(6.0).reshape(3, 2).to(dtype), torch.arange(3)
    tree = {"leaf": leaf, "loss": torch.ones(3, dtype=dtype), "ids": ids}
    shared = torch.tensor(3.0, dtype=dtype)
    for name, power in (("scale", 1), ("unscale", -1)):
        call = torch.vmap(lambda s, tree, n=name: getattr(s, n)([tree, shared]))
        by = factor**power
        expected = {"leaf": leaf.to(by.dtype) * by[:, None], "loss": by, "ids": ids}
        assert_exact(call(scales, tree), [expected, 3 * by], 0)


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
@pytest.mark.parametrize("call", ["scale", "unscale"])
def test_scales_of_members_are_refused_without_vmap(kind, call):
    message = "loss_scale: expected a scale without .*, got shape \\(3,\\)"
    with pytest.raises(ValueError, match=message):
        getattr(kind(torch.ones(3)), call)(torch.ones(2, 3))
    with pytest.raises(ValueError, match=message + ".*use torch.vmap"):
        DynamicLossScale(torch.ones(3)).adjust(YES)


# No value is looked at.


def a_step(scale, grads, new, old):
    """Do all that this module can in one step."""
    finite = all_finite(scale.unscale(scale.scale(grads)))
    return select_tree(finite, new, old), scale.adjust(finite)


def test_the_guard_of_these_tests_notices_a_look():
    with pytest.raises(AssertionError, match="looked at"), Unseen():
        bool(torch.ones(()))


@pytest.mark.parametrize("make", [NoOpLossScale, StaticLossScale, DynamicLossScale])
def test_a_step_looks_at_no_value(make):
    init = () if make is NoOpLossScale else (torch.tensor(8.0),)
    grads = {"w": torch.tensor([1.0, math.inf]), "n": torch.tensor(3)}
    with Unseen():
        chosen, new = a_step(make(*init), grads, [torch.ones(2)], [torch.zeros(2)])
    assert torch.equal(chosen[0], torch.zeros(2))
    assert type(new) is make


def test_a_step_is_traced_into_a_graph_that_serves_either_answer():
    def step(scale, grad):
        return a_step(scale, {"w": grad}, {"w": grad}, {"w": torch.zeros(2)})

    scale = DynamicLossScale(8.0, period=1)
    graph = make_fx(step, tracing_mode="fake")(scale, torch.ones(2))
    targets = {node.target for node in graph.graph.nodes}
    assert torch.ops.aten._local_scalar_dense.default not in targets
    for grad, value in ((torch.ones(2), 16.0), (torch.tensor([1.0, math.nan]), 4.0)):
        chosen, new = graph(scale, grad)
        assert new.loss_scale.item() == value
        assert torch.equal(chosen["w"], grad.nan_to_num(0).floor() * (value == 16.0))


def test_a_step_runs_without_values_and_brings_the_scale_where_the_answer_is():
    meta = {"w": torch.ones(3, 2, device="meta")}
    on_cpu = DynamicLossScale(8.0, **FIXED)
    one = a_step(on_cpu, meta, meta, meta)
    many = torch.vmap(a_step)(stacked([on_cpu] * 3), meta, meta, meta)
    for (chosen, new), shape in ((one, ()), (many, (3,))):
        assert chosen["w"].is_meta
        assert chosen["w"].shape == (3, 2)
        for each in (new.loss_scale, new.counter):
            assert (each.shape, each.device.type) == (shape, "meta")


# What is refused.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, -1.0, math.nan], "expected"),
        ([1e39, math.inf, 1e-40], "expected a number within float32, 1.2e-38"),
    ],
)
def test_a_scale_above_zero_that_float32_holds_is_expected(values, message):
    for value in values:
        with pytest.raises(ValueError, match=f"StaticLossScale.loss_scale=.*{message}"):
            StaticLossScale(value)
        for name in ("init", "factor", "min", "max"):
            with pytest.raises(
                ValueError, match=f"DynamicLossScale.{name}=.*{message}"
            ):
                DynamicLossScale(**{name: value})


@pytest.mark.parametrize("value", ["8", True, None, [8.0]])
def test_a_scale_that_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="StaticLossScale\\(loss_scale=.*a number"):
        StaticLossScale(value)
    with pytest.raises(TypeError, match="DynamicLossScale\\(init=.*a number"):
        DynamicLossScale(value)


LIMITS = "expected min <= init <= max"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"factor": f}, "factor=.*expected factor > 1") for f in (1.0, 0.5)),
        *(
            ({"period": each}, "period=.*expected a whole number >= 1")
            for each in (0, -1, 2.0, True, None)
        ),
        ({"init": 2.0**25}, LIMITS),
        ({"init": 2.0**-15}, LIMITS),
        ({"min": 4.0, "max": 2.0, "init": 4.0}, LIMITS),
        (
            {"init": torch.tensor(3.0), "min": 4.0, "max": 2.0},
            f"min=4.0, max=2.0.*{LIMITS}",
        ),
    ],
)
def test_other_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**options)
    with pytest.raises(TypeError, match="positional"):
        DynamicLossScale(8.0, 3)


WRONG = [
    (True, "got bool"),
    (None, "got NoneType"),
    (torch.tensor(1), "got torch.int64 \\(\\)"),
    (torch.tensor([True]), "got torch.bool \\(1,\\).*use torch.vmap"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_an_answer_that_is_no_bool_tensor_without_dimensions_is_refused(wrong, message):
    with pytest.raises(TypeError, match=f"adjust\\(finite\\): expected.*{message}"):
        DynamicLossScale().adjust(wrong)
    with pytest.raises(TypeError, match=f"select_tree\\(pred\\): expected.*{message}"):
        select_tree(wrong, {}, {})


# all_finite


BAD = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", range(3))
def test_one_number_anywhere_that_is_not_finite_is_found(dtype, bad, place):
    leaves = [torch.ones(()), torch.ones(2, 3), torch.ones(0)]
    leaves = [leaf.to(dtype) for leaf in [*leaves, torch.ones(4)]]
    tree = {"a": leaves[0], "b": (leaves[1], [leaves[2]]), "n": 3, "d": leaves[3]}
    finite = all_finite(tree)
    assert (finite.dtype, finite.shape, finite.item()) == (torch.bool, (), True)
    (leaves[0], leaves[1], leaves[3])[place].view(-1)[-1] = bad
    assert all_finite(tree).item() is False


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("bad", BAD)
def test_either_part_of_a_complex_number_counts(dtype, bad):
    assert all_finite(torch.tensor([1 + 2j], dtype=dtype)).item()
    for number in (complex(bad, 1.0), complex(1.0, bad)):
        assert not all_finite(torch.tensor([1, number], dtype=dtype)).item()


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_largest_and_smallest_numbers_of_a_dtype_are_finite(dtype):
    limits = torch.finfo(dtype)
    ends = [limits.max, limits.min, limits.tiny, -0.0]
    assert all_finite(torch.tensor(ends, dtype=dtype)).item()


@pytest.mark.parametrize(
    "tree",
    [{}, None, [None, {}], 3, torch.tensor(7), [torch.tensor([True])], torch.ones(0)],
    ids=str,
)
def test_a_tree_without_floating_numbers_is_finite(tree):
    finite = all_finite(tree)
    assert (finite.dtype, finite.shape, finite.item()) == (torch.bool, (), True)


@given(st.lists(st.lists(st.floats(width=32), max_size=4), max_size=4))
def test_all_finite_agrees_with_python(rows):
    tree = {str(place): torch.tensor(row) for place, row in enumerate(rows)}
    expected = all(math.isfinite(number) for row in rows for number in row)
    assert all_finite(tree).item() is expected


def test_all_finite_answers_for_each_member():
    tree = {
        "batched": torch.tensor([[1.0, 2.0], [math.nan, 0.0], [1.0, 1.0]]),
        "complex": torch.tensor([1.0, 1.0, complex(0.0, math.inf)]),
        "ids": torch.arange(3),
    }
    shared = torch.ones(2)
    result = torch.vmap(lambda tree: all_finite([tree, shared]))(tree)
    assert result.tolist() == [True, False, False]
    assert torch.vmap(lambda x: all_finite({}), out_dims=None)(shared).item()


# select_tree


@pytest.mark.parametrize("pred", [YES, NO])
def test_one_tree_or_the_other_is_selected_bit_by_bit(pred):
    new = {"w": torch.tensor([1.0, math.nan]), "n": (torch.tensor(2), None, 3, "text")}
    old = {"w": torch.tensor([-0.0, math.inf]), "n": (torch.tensor(5), None, 3, "text")}
    result, expected = select_tree(pred, new, old), new if pred else old
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)
    assert_exact(result, expected, 0)
    for dtype in (*FLOATING, *COMPLEX, torch.int64, torch.uint8, torch.bool):
        new, old = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)
        kept = new if pred else old
        assert_exact(
            select_tree(pred, [new, new[0]], [old, old[0]]), [kept, kept[0]], 0
        )
    for empty in ({}, [], None, {"a": ()}):
        assert select_tree(pred, empty, empty) == empty


def test_dictionaries_are_selected_by_name_in_whatever_order():
    new = {"a": torch.tensor(1), "b": torch.tensor(2)}
    old = {"b": torch.tensor(20), "a": torch.tensor(10)}
    assert select_tree(NO, new, old) == {"a": torch.tensor(10), "b": torch.tensor(20)}
    assert select_tree(YES, new, old) == new


def test_loss_scales_are_selected():
    new, old = worn().adjust(NO), worn()
    assert_same(select_tree(YES, new, old), new)
    assert_same(select_tree(NO, {"scale": new}, {"scale": old})["scale"], old)
    assert_same(select_tree(NO, NoOpLossScale(), NoOpLossScale()), NoOpLossScale())


X = torch.ones(2)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ({"a": X}, {"b": X}, "two trees of one structure, got a dict and a dict"),
        ({"a": X}, {"a": X, "b": X}, "two trees of one structure"),
        ({"a": X, "b": X}, {"a": X}, "two trees of one structure"),
        ([X], (X,), "two trees of one structure, got a list and a tuple"),
        ([X, X], [X], "two trees of one structure"),
        ([X], {}, "two trees of one structure, got a list and a dict"),
        (worn(), StaticLossScale(1.0), "one structure, got a DynamicLossScale and a"),
        ([X], [[X]], "tensors or equal values"),
        ([X], [None], "tensors or equal values"),
        ([None], [X], "tensors or equal values, got None and tensor"),
        ([torch.tensor(3)], [3], "tensors or equal values, got tensor\\(3\\) and 3"),
        ([3], [torch.tensor(3)], "tensors or equal values, got 3 and tensor\\(3\\)"),
        ([3], [4], "tensors or equal values, got 3 and 4"),
        ([X], [torch.ones(3)], "one shape and dtype.*\\(2,\\).*\\(3,\\)"),
        ([X], [torch.ones(())], "one shape and dtype.*\\(2,\\).*\\(\\)"),
        ([X], [X.double()], "one shape and dtype, got torch.float32.*torch.float64"),
    ],
)
def test_trees_that_do_not_match_are_refused(a, b, message):
    with pytest.raises(
        ValueError, match=f"select_tree\\(a, b\\): expected (?s:.*){message}"
    ):
        select_tree(YES, a, b)


@pytest.mark.parametrize("pred", [True, False])
def test_gradients_reach_the_selected_tree_alone(pred):
    new = torch.tensor([math.inf, math.nan, 1.0], requires_grad=True)
    old = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    result = select_tree(torch.tensor(pred), {"w": new}, {"w": old})["w"]
    grads = torch.autograd.grad((result * 2).sum(), (new, old))
    assert_exact(grads, tuple(torch.full((3,), 2.0 * on) for on in (pred, not pred)), 0)


def test_select_answers_for_each_member():
    pred, shared = torch.tensor([True, False, True]), torch.ones(())
    new = {"w": torch.full((3, 2), math.nan), "n": torch.arange(3), "s": shared}
    old = {"w": torch.zeros(3, 2), "n": torch.arange(3) * 10, "s": -shared}
    dims = {"w": 0, "n": 0, "s": None}
    result = torch.vmap(select_tree, (0, dims, dims))(pred, new, old)
    assert result["w"].isnan().all(dim=1).tolist() == [True, False, True]
    assert torch.equal(result["w"][1], torch.zeros(2))
    assert result["n"].tolist() == [0, 10, 2]
    assert result["s"].tolist() == [1.0, -1.0, 1.0]


def test_a_member_whose_gradients_overflow_skips_its_step_alone():
    tx = optim.adamw(0.1)
    params = {"w": torch.ones(3, 2)}
    state = torch.vmap(tx.init)(params)
    scales = stacked([DynamicLossScale(2.0**10, period=1)] * 3)
    x = torch.tensor([1.0, 65504.0, 2.0])

    def step(params, state, scale, x):
        def loss(params):
            low = params["w"].half() * x.half()
            return scale.scale(low.sum() ** 2)

        grads = scale.unscale(torch.func.grad(loss)(params))
        finite = all_finite(grads)
        new = optim.step(tx, grads, state, params)
        return *select_tree(finite, new, (params, state)), scale.adjust(finite)

    new_params, new_state, new_scales = torch.vmap(step)(params, state, scales, x)
    assert new_scales.loss_scale.tolist() == [2.0**11, 2.0**9, 2.0**11]
    moved = (new_params["w"] != params["w"]).any(dim=1)
    assert moved.tolist() == [True, False, True]
    pairs = zip(pytree.tree_leaves(new_state), pytree.tree_leaves(state), strict=True)
    for new, old in pairs:
        assert torch.equal(new[1], old[1])
        assert not torch.equal(new[0], old[0])

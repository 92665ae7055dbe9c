"""Loss scales against those of jmp, and the skipping of steps."""

import copy
import dataclasses
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.oracle import assert_exact
from vgrad.precision import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)

YES, NO = torch.tensor(True), torch.tensor(False)
FIXED = {"period": 3, "factor": 4.0, "min": 2.0**-20, "max": 2.0**20}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_kind = pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def stacked(scales):
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *scales)


def assert_same(a, b):
    """Compare kind and fields, tensors bit by bit."""
    assert type(a) is type(b)
    assert_exact(vars(a), vars(b), 0)


def worn():
    """Return a scale with every field away from its default."""
    return DynamicLossScale(2.0**5, **FIXED).adjust(NO).adjust(YES)


# The next scale.


def test_the_defaults_are_as_documented():
    scale, numbers = DynamicLossScale(), (2000, 2.0, 2.0**-14, 2.0**24)
    assert (scale.period, scale.factor, scale.min, scale.max) == numbers
    tensors = (scale.loss_scale, scale.counter)
    assert_exact(tensors, (torch.tensor(2.0**15), torch.tensor(0)), 0)


def jmp_trace(finite, scale, period, factor, min, max):
    """Trace the formula of jmp 0.0.4 with a largest scale, in float32."""
    scale, counter, factor = np.float32(scale), 0, np.float32(factor)
    for value in finite:
        if not value:
            scale = np.maximum(np.float32(min), scale / factor)
        elif counter == period - 1:
            scale = np.minimum(np.float32(max), scale * factor)
        counter = (counter + 1) % period * int(value)
        yield float(scale), counter


def trace(scale, finite):
    for value in finite:
        scale = scale.adjust(torch.tensor(value))
        yield scale.loss_scale.item(), scale.counter.item()


MOSTLY = st.integers(0, 9).map(bool)


@given(
    st.lists(st.tuples(*[MOSTLY] * 3), min_size=1, max_size=50),
    st.fixed_dictionaries(
        dict(
            period=st.integers(1, 6),
            factor=st.floats(1.1, 5.0),
            min=st.floats(1e-3, 1.0),
            max=st.floats(1.0, 1e3),
        )
    ),
)
def test_scales_of_members_move_independently_as_those_of_jmp(finite, options):
    inits = options["min"], 1.0, options["max"]
    scales, traces = stacked([DynamicLossScale(x, **options) for x in inits]), []
    adjust = torch.vmap(lambda scale, finite: scale.adjust(finite))
    for values in finite:
        scales = adjust(scales, torch.tensor(values))
        traces.append(torch.stack([scales.loss_scale, scales.counter], 1).tolist())
    for member, init in enumerate(inits):
        steps = [values[member] for values in finite]
        found = np.array([each[member] for each in traces])
        one = [*trace(DynamicLossScale(init, **options), steps)]
        assert np.array_equal(found, np.array(one))
        expected = np.array([*jmp_trace(steps, init, **options)])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert np.array_equal(found[:, 1], expected[:, 1])


def test_a_scale_is_float32_without_history_and_never_changed():
    init = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    for scale in (StaticLossScale(init), DynamicLossScale(init, **FIXED)):
        assert_exact(scale.loss_scale, torch.tensor(8.0), 0)
        assert not scale.loss_scale.requires_grad
    assert scale.adjust(NO).loss_scale.item() == 2.0
    assert_same(scale, DynamicLossScale(8.0, **FIXED))
    with pytest.raises(dataclasses.FrozenInstanceError):
        scale.loss_scale = torch.tensor(1.0)
    for constant in (NoOpLossScale(), StaticLossScale(8.0)):
        assert constant.adjust(NO) is constant.adjust(YES) is constant


# Scaling and unscaling.


@every_kind
@every_dtype
@pytest.mark.parametrize("shape", [(), (3,)])
def test_scaled_and_unscaled_are_float32_or_wider(kind, dtype, shape):
    scale, leaf = kind(2.0**15), torch.full(shape, 3.0, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):  # changes nothing
        found = scale.scale(leaf), scale.unscale(leaf)
    expected = (torch.full(shape, x, dtype=wide(dtype)) for x in (98304.0, 3 / 2**15))
    assert_exact(found, tuple(expected), 0)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_vmapped_scales_apply_per_member(kind, dtype):
    scales = kind(torch.tensor([2.0, 4.0, 8.0]))
    leaf, ids = torch.arange(6.0).reshape(3, 2).to(dtype), torch.arange(3)
    tree = {"leaf": leaf, "loss": torch.ones(3, dtype=dtype), "ids": ids}
    shared = torch.tensor(3.0, dtype=dtype)
    for name, power in (("scale", 1), ("unscale", -1)):
        call = torch.vmap(lambda s, tree, n=name: getattr(s, n)([tree, shared]))
        by = scales.loss_scale.to(wide(dtype)) ** power
        expected = {"leaf": leaf.to(by.dtype) * by[:, None], "loss": by, "ids": ids}
        assert_exact(call(scales, tree), [expected, 3 * by], 0)


# A scale is a tree: its tensors are leaves, the rest is its structure.


@pytest.mark.parametrize("scale", [NoOpLossScale(), StaticLossScale(8.0), worn()])
def test_every_field_survives_trees_and_copies(scale):
    leaves, structure = pytree.tree_flatten(scale)
    copied = copy.deepcopy(scale)
    assert_same(pytree.tree_unflatten(leaves, structure), scale)
    assert_same(pytree.tree_map(torch.clone, scale), scale)
    assert_same(copied, scale)
    for one, other in zip(leaves, pytree.tree_leaves(copied), strict=True):
        assert one.data_ptr() != other.data_ptr()
    dtypes = pytree.tree_map(lambda leaf: leaf.dtype, worn())  # leaves may be anything
    assert (dtypes.loss_scale, dtypes.counter) == (torch.float32, torch.int64)


@pytest.mark.parametrize("name", FIXED)
def test_scales_of_different_options_have_different_structures(name):
    other = {**FIXED, name: FIXED[name] * 2}
    a, b = DynamicLossScale(8.0, **FIXED), DynamicLossScale(8.0, **other)
    assert pytree.tree_structure(a) != pytree.tree_structure(b)
    assert pytree.tree_structure(a) == pytree.tree_structure(worn())
    with pytest.raises(ValueError, match="select_tree\\(a, b\\): expected two trees"):
        select_tree(YES, a, b)


# No value is read: tensors on meta have none.


def a_step(scale, grads, new, old):
    """Call every function of a step with a loss scale."""
    finite = all_finite(scale.unscale(scale.scale(grads)))
    return select_tree(finite, new, old), scale.adjust(finite)


def test_a_step_runs_on_meta_and_moves_the_scale_to_the_device_of_the_gradients():
    meta = {"w": torch.ones(3, 2, device="meta")}
    on_cpu = DynamicLossScale(8.0, **FIXED)
    one = a_step(on_cpu, meta, meta, meta)
    many = torch.vmap(a_step)(stacked([on_cpu] * 3), meta, meta, meta)
    for (chosen, new), shape in ((one, ()), (many, (3,))):
        assert chosen["w"].is_meta
        assert chosen["w"].shape == (3, 2)
        for tensor in (new.loss_scale, new.counter):
            assert (tensor.shape, tensor.device.type) == (shape, "meta")


# all_finite and select_tree


@every_dtype
def test_all_finite_finds_one_number_anywhere(dtype):
    for place, bad in product(range(3), (math.inf, -math.inf, math.nan)):
        leaves = [torch.ones(shape, dtype=dtype) for shape in ((), (2, 3), 4, 0)]
        tree = {"a": leaves[0], "b": (leaves[1], [leaves[3]]), "n": 3, "d": leaves[2]}
        assert all_finite(tree).item() is True
        leaves[place].view(-1)[-1] = complex(0, bad) if dtype.is_complex else bad
        assert all_finite(tree).item() is False


@pytest.mark.parametrize("pred", [YES, NO])
def test_one_tree_or_the_other_is_selected_bit_by_bit(pred):
    new = {"w": torch.tensor([1.0, math.nan]), "n": (torch.tensor(2), None, 3, "text")}
    old = {"n": (torch.tensor(5), None, 3, "text"), "w": torch.tensor([-0.0, math.inf])}
    new["dtypes"] = [torch.ones(2, dtype=x) for x in (*DTYPES, torch.int64, torch.bool)]
    old["dtypes"] = [torch.zeros_like(x) for x in new["dtypes"]]
    result = select_tree(pred, new, old)  # dictionaries match by name
    assert pytree.tree_structure(result) == pytree.tree_structure(new)
    assert_exact(result, {name: (new if pred else old)[name] for name in new}, 0)
    scales = worn().adjust(NO), worn()
    assert_same(select_tree(pred, *scales), scales[0 if pred else 1])


def test_members_are_checked_and_selected_one_by_one():
    values = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [1.0, 1.0]])
    tree = {"values": values, "ids": torch.arange(3)}
    old, shared = {"values": torch.zeros(3, 2), "ids": -torch.arange(3)}, torch.ones(())

    def checked(new, old):
        pred = all_finite([new, shared])
        return pred, *select_tree(pred, (new, shared), (old, -shared))

    pred, found, chosen = torch.vmap(checked)(tree, old)
    assert pred.tolist() == [True, False, True]
    assert found["values"].tolist() == [[1, 2], [0, 0], [1, 1]]
    assert found["ids"].tolist() == [0, -1, 2]
    assert chosen.tolist() == [1, -1, 1]
    assert torch.vmap(lambda x: all_finite({}), out_dims=None)(values).item()


# Refusals.

RANGE = "expected a number within float32, 1.2e-38"
LIMITS = "expected min <= init <= max"
NUMBERS = [(0.0, ""), (-1.0, ""), (math.nan, ""), (1e39, RANGE), (math.inf, RANGE)]
NUMBERS += [(1e-40, RANGE)]
OPTIONS = [
    *(({name: v}, m) for name in ("init", "factor", "min", "max") for v, m in NUMBERS),
    *(({"factor": f}, "expected factor > 1") for f in (1.0, 0.5)),
    *(({"period": p}, "expected a whole number >= 1") for p in (0, 2.0, True, None)),
    ({"init": 2.0**25}, LIMITS),
    ({"init": 2.0**-15}, LIMITS),
    ({"init": YES * 3.0, "min": 4.0, "max": 2.0}, f"min=4.0, max=2.0.*{LIMITS}"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_out_of_range_are_refused(options, message):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"DynamicLossScale\\({name}=.*{message}"):
        DynamicLossScale(**options)
    if name == "init" and not message.endswith(LIMITS):
        with pytest.raises(ValueError, match=f"StaticLossScale.loss_scale=.*{message}"):
            StaticLossScale(options["init"])


X, SCALES = torch.ones(2), torch.ones(3)
MEMBERS = "loss_scale: expected a scale without .*, got shape \\(3,\\).*torch.vmap"
ONE = "select_tree\\(a, b\\): expected two trees of one structure"
EQUAL = "select_tree\\(a, b\\): expected tensors or equal values"
SAME = "select_tree\\(a, b\\): expected tensors of one shape and dtype"
REFUSED = [
    *((lambda k=k, c=c: getattr(k(SCALES), c)(YES if c == "adjust" else X), MEMBERS)
      for k in (StaticLossScale, DynamicLossScale) for c in ("scale", "unscale")),
    (lambda: DynamicLossScale(SCALES).adjust(YES), MEMBERS),
    *((lambda a=a, b=b: select_tree(YES, a, b), message) for a, b, message in (
        ({"a": X}, {"b": X}, f"{ONE}, got a dict and a dict"),
        ({"a": X}, {"a": X, "b": X}, ONE),
        ({"a": X, "b": X}, {"a": X}, ONE),
        ([X], (X,), f"{ONE}, got a list and a tuple"),
        (worn(), StaticLossScale(1.0), f"{ONE}, got a DynamicLossScale and a"),
        ([X], [[X]], EQUAL),
        ([X], [None], EQUAL),
        ([None], [X], f"{EQUAL}, got None and tensor"),
        ([torch.tensor(3)], [3], f"{EQUAL}, got tensor\\(3\\) and 3"),
        ([3], [torch.tensor(3)], f"{EQUAL}, got 3 and tensor\\(3\\)"),
        ([3], [4], f"{EQUAL}, got 3 and 4"),
        ([X], [torch.ones(3)], f"{SAME}.*\\(2,\\).*\\(3,\\)"),
        ([X], [torch.ones(())], f"{SAME}.*\\(2,\\).*\\(\\)"),
        ([X], [X.double()], f"{SAME}, got torch.float32.*torch.float64"))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_scales_of_members_and_trees_that_do_not_match_are_refused(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


PREDICATES = [(True, "got bool"), (None, "got NoneType")]
PREDICATES += [(torch.tensor(1), "got torch.int64 \\(\\)")]
PREDICATES += [(torch.tensor([True]), "got torch.bool \\(1,\\).*use torch.vmap")]
KINDS = [
    *((lambda v=v: StaticLossScale(v), "Scale\\(loss_scale=.*expected a number")
      for v in ("8", True, None, [8.0])),
    *((lambda v=v: DynamicLossScale(v), "Scale\\(init=.*expected a number")
      for v in ("8", True, None, [8.0])),
    (lambda: DynamicLossScale(8.0, 3), "positional"),
    *((lambda p=p: DynamicLossScale().adjust(p), f"adjust\\(finite\\): expected.*{m}")
      for p, m in PREDICATES),
    *((lambda p=p: select_tree(p, {}, {}), f"select_tree\\(pred\\): expected.*{m}")
      for p, m in PREDICATES),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), KINDS)
def test_objects_of_other_kinds_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()

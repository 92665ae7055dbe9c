import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from vgrad import checks

POSITIVE, FINITE = partial(checks.positive, "f"), partial(checks.finite, "f")
BETWEEN = partial(checks.between, "f", 0, 1)
WHOLE = partial(checks.integers, "f", minimum=1)
SET = {"head.*"}
REFUSED = [
    (POSITIVE, 0, ValueError, "f(x=0): expected x > 0."),
    (POSITIVE, math.nan, ValueError, "f(x=nan): expected x > 0."),
    (POSITIVE, "1", TypeError, "f(x='1'): expected a number, got a str."),
    (POSITIVE, None, TypeError, "f(x=None): expected a number, got a NoneType."),
    (POSITIVE, True, TypeError, "f(x=True): expected a number, got a bool."),
    (POSITIVE, [1.0], TypeError, "f(x=[1.0]): expected a number, got a list."),
    (POSITIVE, np.float32(0), ValueError, "expected x > 0."),
    (POSITIVE, np.bool_(True), TypeError, "expected a number, got a bool"),
    (POSITIVE, np.array(1.0), TypeError, "expected a number, got a ndarray."),
    (POSITIVE, torch.tensor(1.0), TypeError, "got a Tensor. Pass its .item()."),
    (partial(checks.non_negative, "f"), -1e-9, ValueError, "f(x=-1e-09): expected x >"),
    (FINITE, math.inf, ValueError, "f(x=inf): expected a finite number."),
    (FINITE, math.nan, ValueError, "f(x=nan): expected a finite number."),
    *((BETWEEN, bad, ValueError, "expected 0 < x < 1.") for bad in (0, 1, math.nan)),
    *(
        (WHOLE, bad, ValueError, f"f(x={checks.shown(bad)}): expected a whole number >")
        for bad in (0, -3, 1.0, True, "2", np.int64(0), np.float64(3), np.bool_(True))
    ),
    (WHOLE, np.array([3]), ValueError, "f(x=ndarray of int64 (1,)): expected a whole"),
    (WHOLE, torch.tensor([3]), ValueError, "f(x=Tensor of torch.int64 (1,)): expe"),
    (WHOLE, torch.tensor(True), ValueError, "f(x=Tensor of torch.bool ()): expected"),
    (WHOLE, torch.tensor(3.0), ValueError, "f(x=Tensor of torch.float32 ()): expec"),
    (WHOLE, torch.tensor(0), ValueError, "f(x=Tensor of torch.int64 ()): expected a"),
    (
        *(partial(checks.choice, "f", ("a", "b")), "c", ValueError),
        "f(x='c'): expected one of 'a', 'b'.",
    ),
    (
        *(partial(checks.patterns, "f"), "head.*", TypeError),
        "f(x='head.*'): expected a list or tuple of patterns, got a string. Write ['he",
    ),
    (
        *(partial(checks.patterns, "f"), SET, TypeError),
        f"f(x={SET}): expected a list or tuple of patterns of names, got a set.",
    ),
    (
        *(partial(checks.patterns, "f"), [1], TypeError),
        "f(x=[1]): expected patterns that are strings, got a int.",
    ),
]


@pytest.mark.parametrize(("check", "value", "error", "message"), REFUSED)
def test_a_value_is_refused_by_function_argument_and_value(
    check, value, error, message
):
    with pytest.raises(error) as raised:
        check(x=value)
    assert message in str(raised.value)


def test_other_values_pass():
    for value in (0.5, math.inf):
        POSITIVE(x=value)
    checks.non_negative("f", x=0)
    for value in (1e308, 0):
        FINITE(x=value)
    BETWEEN(x=0.5)


@pytest.mark.parametrize("kind", [float, np.float16, np.float32, np.float64, Fraction])
def test_real_numbers_come_back_as_floats(kind):
    for check in (POSITIVE, FINITE, BETWEEN, partial(checks.non_negative, "f")):
        found = check(x=kind(0.75), y=np.float32(0.1))
        assert found == [0.75, float(np.float32(0.1))]
        assert {type(each) for each in found} == {float}
    assert POSITIVE(x=2**60 + 1) == [2**60 + 1]


@pytest.mark.parametrize(
    "value",
    [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3).int()],
)
def test_whole_numbers_come_back_as_ints(value):
    found = WHOLE(x=value, y=4)
    assert found == [3, 4]
    assert {type(each) for each in found} == {int}


def test_names_are_listed():
    with pytest.raises(ValueError, match="missing: 'b'; unexpected: 'c'"):
        checks.names("f", {"a", "b"}, {"a", "c"})
    many = [f"name{number:02}" for number in range(12)]
    assert checks.listed(many).endswith("'name07' and 4 more")


NAMES = ["encoder.0.weight", "encoder.0.bias", "head.weight", "Head.bias"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["encoder.*"], NAMES[:2]),
        (("*.bias", "head.?eight"), NAMES[1:]),
        (["[hH]ead.bias"], NAMES[3:]),
        (["HEAD.*"], []),
        ([], []),
    ],
)
def test_selected_names_stay_in_their_order(patterns, expected):
    assert checks.selected(NAMES, patterns) == expected


def test_each_pattern_has_to_match():
    assert checks.all_matched("f", NAMES, ["head.*", "encoder.*"]) == NAMES[:3]
    with pytest.raises(ValueError, match=r"f\('tail.\*'\): .*matches a buffer.*Head"):
        checks.all_matched("f", NAMES, ["head.*", "tail.*"], kind="buffer")


def test_an_absent_package_is_named_with_the_extra_that_has_it():
    assert checks.package("collections.abc", "dp").Sized
    with pytest.raises(ImportError, match=r'package absent, .*install "vgrad\[dp\]"'):
        checks.package("absent.part", "dp")

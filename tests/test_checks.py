import math

import numpy as np
import pytest
import torch

from vgrad import checks


@pytest.mark.parametrize(
    ("check", "good", "bad", "message"),
    [
        (checks.positive, 0.5, 0, r"f\(x=0\): expected x > 0"),
        (checks.positive, math.inf, math.nan, r"f\(x=nan\): expected x > 0"),
        (checks.non_negative, 0, -1e-9, r"f\(x=-1e-09\): expected x >= 0"),
        (checks.finite, 1e308, math.inf, r"f\(x=inf\): expected a finite number"),
        (checks.finite, 0, math.nan, r"f\(x=nan\): expected a finite number"),
    ],
)
def test_numbers_outside_their_range_are_named(check, good, bad, message):
    check("f", x=good)
    with pytest.raises(ValueError, match=message):
        check("f", x=bad)


@pytest.mark.parametrize("value", ["1", None, True, [1.0]])
def test_what_is_no_number_is_named(value):
    with pytest.raises(TypeError, match=r"f\(x=.*\): expected a number, got a "):
        checks.positive("f", x=value)


def test_bounds_are_exclusive():
    checks.between("f", 0, 1, x=0.5)
    for bad in (0, 1, math.nan):
        with pytest.raises(ValueError, match="expected 0 < x < 1"):
            checks.between("f", 0, 1, x=bad)


@pytest.mark.parametrize("bad", [0, -3, 1.0, True, "2"])
def test_whole_numbers_have_a_least_value(bad):
    checks.whole("f", least=1, x=1)
    with pytest.raises(ValueError, match="expected a whole number >= 1"):
        checks.whole("f", least=1, x=bad)


@pytest.mark.parametrize(
    "value",
    [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3).int()],
)
def test_whole_numbers_come_back_as_ints(value):
    found = checks.whole("f", least=1, x=value, y=4)
    assert found == [3, 4]
    assert {type(each) for each in found} == {int}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (np.int64(0), "np.int64(0)"),
        (np.float64(3.0), "np.float64(3.0)"),
        (np.bool_(True), "bool"),
        (np.array([3]), "ndarray of int64 (1,)"),
        (torch.tensor([3]), "Tensor of torch.int64 (1,)"),
        (torch.tensor(True), "Tensor of torch.bool ()"),
        (torch.tensor(3.0), "Tensor of torch.float32 ()"),
        (torch.tensor(0), "Tensor of torch.int64 ()"),
    ],
)
def test_what_is_no_whole_number_of_numpy_or_torch_is_named(bad, told):
    message = "expected a whole number >= 1"
    with pytest.raises(ValueError, match=message) as caught:
        checks.whole("f", least=1, x=bad)
    if told.startswith(("nd", "Te")):
        assert told in str(caught.value)


def test_messages_show_no_values_of_tensors_and_arrays():
    for value, told in [
        (torch.ones(2, 3), "Tensor of torch.float32 (2, 3)"),
        ([torch.ones(2), 3, "a"], "[Tensor of torch.float32 (2,), 3, 'a']"),
        ({"a": (np.ones(1),)}, "{'a': [ndarray of float64 (1,)]}"),
        (range(3), "range(0, 3)"),
        ([*range(10)], "[0, 1, 2, 3, 4, 5, 6, 7, 2 more]"),
    ]:
        assert checks.shown(value) == told


def test_choices_and_names_are_listed():
    with pytest.raises(ValueError, match=r"f\(x='c'\): expected one of 'a', 'b'"):
        checks.choice("f", ("a", "b"), x="c")
    with pytest.raises(ValueError, match="missing: 'b'; unexpected: 'c'"):
        checks.names("f", {"a", "b"}, {"a", "c"})
    many = [f"name{number:02}" for number in range(12)]
    assert checks.listed(many).endswith("'name07' and 4 more")

import math
import re

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
        *((bad, "") for bad in (0, -3, 1.0, True, "2", np.int64(0), np.float64(3.0))),
        (np.bool_(True), ""),
        (np.array([3]), "ndarray of int64 (1,)"),
        (torch.tensor([3]), "Tensor of torch.int64 (1,)"),
        (torch.tensor(True), "Tensor of torch.bool ()"),
        (torch.tensor(3.0), "Tensor of torch.float32 ()"),
        (torch.tensor(0), "Tensor of torch.int64 ()"),
    ],
)
def test_anything_but_a_whole_number_is_named(bad, told):
    message = rf"f\(x=.*{re.escape(told)}.*expected a whole number >= 1"
    with pytest.raises(ValueError, match=message):
        checks.whole("f", least=1, x=bad)


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


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("head.*", r"f\(shared='head.\*'\): .*a string. Write \['head.\*'\]"),
        ({"head.*"}, r"f\(shared=.*list or tuple of patterns of names, got a set"),
        ([1], r"f\(shared=\[1\]\): expected patterns that are strings, got a int"),
    ],
)
def test_what_is_no_list_of_patterns_is_refused(patterns, message):
    with pytest.raises(TypeError, match=message):
        checks.patterns("f", shared=patterns)


def test_the_compiler_takes_matches_for_constants():
    def scaled(x):
        return x * 2 if checks.matches("0.bias", "*.bias") else x

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))

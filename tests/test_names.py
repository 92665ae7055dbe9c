"""Patterns of names: one grammar, and what every function refuses."""

import pytest
import torch

from vgrad import checks

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

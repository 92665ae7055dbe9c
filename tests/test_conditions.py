"""Conditions are looked at where they arise, or collected."""

import torch

from vgrad.conditions import (
    checks_collected,
    collect_checks,
    numbers,
    occurs,
    static_values,
    surely,
)

SOME, NONE = torch.tensor([False, True]), torch.tensor([False])


def test_a_condition_is_looked_at_outside():
    assert occurs(SOME)
    assert not occurs(NONE)
    assert not checks_collected()


def test_values_are_read_where_that_is_allowed_and_costs_nothing():
    assert numbers(SOME) == [False, True]
    assert surely(~NONE)
    assert not surely(SOME)
    assert not surely(torch.ones((), dtype=torch.bool, device="meta"))
    with collect_checks():
        assert numbers(SOME) is None
        assert not surely(~NONE)
        with static_values():
            assert surely(~NONE)


def test_conditions_are_collected_inside_but_where_they_are_looked_at():
    with collect_checks() as found:
        assert not occurs(SOME)
        with static_values():
            assert occurs(SOME)
            assert not checks_collected()
        assert checks_collected()
        assert not occurs(NONE)
    assert [each.item() for each in found] == [True, False]
    assert not checks_collected()

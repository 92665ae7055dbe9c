"""Conditions are looked at where they arise, or collected."""

import torch

from vgrad.conditions import checks_collected, collect_checks, rare, static_values

SOME, NONE = torch.tensor([False, True]), torch.tensor([False])


def test_a_condition_is_looked_at_outside():
    assert rare(SOME)
    assert not rare(NONE)
    assert not checks_collected()


def test_conditions_are_collected_inside_but_where_they_are_looked_at():
    with collect_checks() as found:
        assert not rare(SOME)
        with static_values():
            assert rare(SOME)
            assert not checks_collected()
        assert checks_collected()
        assert not rare(NONE)
    assert [each.item() for each in found] == [True, False]
    assert not checks_collected()

"""Conditions are looked at where they arise, or collected."""

import pytest
import torch

from vgrad.conditions import are_collected, collected, looked_at, unlikely

SOME, NONE = torch.tensor([False, True]), torch.tensor([False])


def test_a_condition_is_looked_at_outside():
    assert unlikely(SOME)
    assert not unlikely(NONE)
    assert not are_collected()


def test_conditions_are_collected_inside_but_where_they_are_looked_at():
    with collected() as found:
        assert not unlikely(SOME)
        with looked_at():
            assert unlikely(SOME)
            assert not are_collected()
        assert are_collected()
        assert not unlikely(NONE)
    assert [each.item() for each in found] == [True, False]
    assert not are_collected()


@pytest.mark.parametrize("block", [collected, looked_at])
def test_an_exception_ends_a_block(block):
    with collected() as found:
        with pytest.raises(KeyError), block():
            raise KeyError
        assert not unlikely(SOME)
    assert len(found) == 1
    assert not are_collected()

"""No change of code moves a number, but one that says so and writes the file anew.

Bits are compared on the machine that wrote them, with one thread; elsewhere numbers, up
to rounding.
"""

import json

import pytest
from safetensors.torch import load_file

from tests.golden import calls, recorded

FACTS = json.loads(recorded.BITS.read_text())
SAME_MACHINE = FACTS["machine"] == recorded.fingerprint()
CALL, STEPS = 1e-6, 1e-4
"""Relative errors for one call and after some steps."""


@pytest.fixture(scope="module")
def values():
    return load_file(recorded.VALUES)


def check(case, result, values, tolerance):
    wrong = recorded.differences(result, case, values, tolerance)
    assert not wrong, wrong
    if SAME_MACHINE:
        assert recorded.hashed(result) == FACTS["bits"][case], f"{case}: other bits"


def marks(name):
    return [pytest.mark.slow, pytest.mark.compiled] * name.endswith("compiled")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in calls.CASES]
)
def test_results(name, values):
    steps = name.startswith(("optimizer|", "step|"))
    check(name, calls.CASES[name](), values, STEPS if steps else CALL)


def test_results_on_two_ranks(values):
    for name, found in calls.on_two_ranks().items():
        check(name, found, values, CALL)


def test_every_recorded_case_is_compared():
    ranks = map("|".join, calls.OF_RANKS)
    assert {*calls.CASES, *ranks} == FACTS["bits"].keys()


def test_a_number_that_moves_is_seen(values):
    case = ("norms", "recorded", "plain")
    moved = calls.call(*case) * (1 + 1e-5)
    with pytest.raises(AssertionError, match="off by"):
        check("|".join(case), moved, values, CALL)

"""No change of code moves a number, but one that says so and writes the file anew.

Bits are compared on the machine that wrote them, with one thread; elsewhere numbers, up
to rounding.
"""

import json

import pytest
from safetensors.torch import load_file

from tests.distributed.processes import Processes
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


def marks(variant):
    return [pytest.mark.slow, pytest.mark.compiled] * (variant == "compiled")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=", ".join(case), marks=marks(case[2]))
        for case in calls.calls()
        if case[2] != "two ranks"
    ],
)
def test_calls(case, values):
    check("|".join(case), calls.call(*case), values, CALL)


def test_calls_on_two_ranks(values):
    cases = [case for case in calls.calls() if case[2] == "two ranks"]
    processes = Processes(2)
    try:
        results = zip(*processes.run(calls.rank_calls, cases), strict=True)
    finally:
        processes.stop()
    for case, found in zip(cases, results, strict=True):
        check("|".join(case), list(found), values, CALL)


@pytest.mark.parametrize("name", calls.OPTIMIZERS)
def test_optimizers(name, values):
    check(f"optimizer|{name}", calls.optimizer(name), values, STEPS)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=marks(each[-8:])) for each in calls.KINDS]
)
def test_steps(name, values):
    check(f"step|{name}", calls.KINDS[name](), values, STEPS)


def test_every_recorded_case_is_compared():
    cases = {"|".join(case) for case in calls.calls()}
    cases |= {f"optimizer|{name}" for name in calls.OPTIMIZERS}
    cases |= {f"step|{name}" for name in calls.KINDS}
    assert cases == FACTS["bits"].keys()


def test_a_number_that_moves_is_seen(values):
    case = ("norms", "recorded", "plain")
    moved = calls.call(*case) * (1 + 1e-5)
    with pytest.raises(AssertionError, match="off by"):
        check("|".join(case), moved, values, CALL)

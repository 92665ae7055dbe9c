"""What is compared before a graph is trusted, and which backend is taken."""

import time
from types import SimpleNamespace

import pytest
import torch

from vgrad.compiled import backends, verification
from vgrad.conditions import Unrepeatable

pytestmark = pytest.mark.compiled
STEP = 2.0**-20
"""Between neighbours of 8 in float32."""

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [1.0, 0.0], False),
        ([1.0, 0.0], [1.0, NAN], False),
        ([1.0, 2.0], [1.0, 2.0 + 2**-22], False),
        ([INF], [INF], True),
        ([INF], [torch.finfo(torch.float32).max], False),
    ],
)
def test_a_replay_repeats_all_numbers(found, expected, same):
    found, expected = ({"x": torch.tensor(each)} for each in (found, expected))
    if same:
        verification.same_bits(found, expected)
    else:
        with pytest.raises(Unrepeatable, match="does not repeat the numbers of eager"):
            verification.same_bits(found, expected)


def close(found, expected, x, *, function=lambda x: x, draws=False):
    """Compare at one point, where eager mode is asked first, and then in float64."""
    found, expected, x = map(torch.as_tensor, (found, expected, x))
    answers = iter([lambda _: expected, function])
    verification.close(lambda _: found, lambda x: next(answers)(x), (x,), draws=draws)


@pytest.fixture(autouse=True)
def one_point(monkeypatch):
    monkeypatch.setattr(verification, "_POINTS", 1)


EIGHT = torch.tensor([8.0, 1.0])
ROUNDED = EIGHT + torch.tensor([0.0, 2 * STEP])
"""What eager mode may return for it."""

CLOSE = {
    "exact": (EIGHT, EIGHT, EIGHT),
    "four roundings of the largest": (EIGHT + 4 * STEP, EIGHT, EIGHT),
    "four roundings below": (EIGHT - 4 * STEP, EIGHT, EIGHT),
    "four times the error": (EIGHT + 12 * STEP, ROUNDED, EIGHT),
    "roundings of the least precise": (EIGHT * 1.03, EIGHT, EIGHT.bfloat16()),
    "complex numbers": (EIGHT * (1 + 1e-7j), EIGHT * (1 + 0j), EIGHT * (1 + 0j)),
    "nothing": (torch.ones(0), torch.ones(0), torch.ones(0)),
    "the same is not finite": ([INF, NAN], [NAN, -INF], [1.0, 1.0]),
    "whole numbers": (torch.tensor([3]), torch.tensor([3]), torch.tensor([3])),
}
FAR = {
    "five roundings": (EIGHT + 5 * STEP, EIGHT, EIGHT),
    "five roundings of one": (EIGHT + torch.tensor([0, 5 * STEP]), EIGHT, EIGHT),
    "more than four times the error": (EIGHT + 13 * STEP, ROUNDED, EIGHT),
    "more than the least precise": (EIGHT * 1.04, EIGHT, EIGHT.bfloat16()),
    "complex numbers": (EIGHT * (1 + 1e-5j), EIGHT * (1 + 0j), EIGHT * (1 + 0j)),
}


@pytest.mark.parametrize("name", CLOSE)
def test_compiled_code_may_have_four_times_the_error_of_eager_mode(name):
    close(*CLOSE[name])


@pytest.mark.parametrize("name", FAR)
def test_compiled_code_with_more_error_is_refused(name):
    with pytest.raises(Unrepeatable, match="is off by .* more than .* allows"):
        close(*FAR[name])


def test_random_results_are_compared_with_those_of_eager_mode():
    def function(x):
        raise AssertionError

    close(EIGHT * 1.0009, EIGHT, EIGHT, function=function, draws=True)
    with pytest.raises(Unrepeatable, match="is off by"):
        close(EIGHT * 1.0012, EIGHT, EIGHT, function=function, draws=True)


def test_other_results_of_compiled_code_are_refused():
    with pytest.raises(Unrepeatable, match="finite elsewhere"):
        close([INF, 1.0], [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(Unrepeatable, match="does not repeat"):
        close([1, 2], [1, 3], [1, 3])
    with pytest.raises(Unrepeatable, match="doubts samples that eager mode does not"):
        verification.close(lambda _: None, torch.sin, (EIGHT,), draws=False)


@pytest.mark.parametrize(("off", "points"), [(0.0, 1), (1e-7, 1), (1e-3, 4)])
def test_no_more_points_are_tried_than_are_needed(monkeypatch, off, points):
    monkeypatch.setattr(verification, "_POINTS", 4)
    tried = []

    def compiled(x):
        tried.append(x)
        return [torch.sin(x) * (1 + off)]

    arguments = [compiled, lambda x: [torch.sin(x)], (EIGHT,)]
    if points == 1:
        verification.close(*arguments, draws=False)
    else:
        with pytest.raises(Unrepeatable, match="is off by"):
            verification.close(*arguments, draws=False)
    assert len(tried) == points


def test_a_function_that_does_not_run_in_float64_is_refused():
    def function(x):
        assert not torch.is_grad_enabled()
        raise TypeError(f"{x.dtype}\nand more")

    text = r"float64, .* \(TypeError: torch.float64\). Pass verify=False"
    with pytest.raises(Unrepeatable, match=text):
        close(EIGHT, EIGHT, EIGHT, function=function)


@pytest.mark.parametrize(("taken", "backend"), [(1, "inductor"), (4, "replay")])
def test_the_faster_backend_is_taken(monkeypatch, taken, backend):
    """The first run of compiled code is slow, and is not what counts."""
    now, runs = [0.0], []

    def taking(*milliseconds):
        left = list(milliseconds)

        def run():
            now[0] += left.pop(0) / 1e3
            runs.append(run)
            return [torch.tensor(False)]

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    replay, compiled = taking(3, 3, 3, 3, 3), taking(90, *[taken] * 4)
    both = {"replay": replay, "inductor": compiled}
    found = backends.fastest(SimpleNamespace(closed=[]), [], both)
    assert found == (backend, f"replay took 3 ms, inductor took {taken} ms")
    assert runs == [replay, compiled] * 5

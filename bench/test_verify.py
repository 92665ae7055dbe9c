"""The price of verification: the first call of a clipped sum, with and without it.

A first call compares the gradients of two samples with plain autograd. Both are ratios
to the forward and backward pass of plain SGD, and make the function anew each time; the
later calls are timed in `bench/test_clipped.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vgrad
from bench.contenders import MAX_NORM, functional, plain
from bench.measure import DEVICES, interleaved
from bench.models import SETTINGS, TIMED, Problem
from bench.test_precision import CHECKED_SAMPLES, Grads, error, expected

SECONDS = 1.5

pytestmark = pytest.mark.filterwarnings("ignore")


def first_call(problem: Problem, verify: bool) -> Callable[[], Grads]:
    """Return the first call of a clipped sum on the batch of a problem."""
    loss, params, buffers = functional(problem)

    def run() -> Grads:
        compute = vgrad.clipped_grad(loss, max_norm=MAX_NORM, verify=verify)
        return compute(params, buffers, *problem.batch).grads

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", TIMED)
@pytest.mark.parametrize("name", ["verify=True", "verify=False"])
def test_verify(benchmark: Any, device: str, setting: str, name: str) -> None:
    benchmark.group = f"first call, {setting}, {device}"
    verify = name == "verify=True"
    chosen = SETTINGS[setting]
    small = chosen.problem(device, torch.float64, CHECKED_SAMPLES, small=True)
    difference = error(first_call(small, verify)(), expected("clipped sum", small))
    assert difference < 1e-8
    if benchmark.disabled:
        return
    problem = chosen.problem(device, torch.float32, chosen.samples)
    run, baseline = first_call(problem, verify), plain(problem)
    run()
    baseline(*problem.batch)
    interleaved(
        benchmark,
        run,
        lambda: baseline(*problem.batch),
        device=device,
        samples=chosen.samples,
        error=difference,
        seconds=SECONDS,
    )

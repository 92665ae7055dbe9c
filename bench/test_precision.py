"""Low precision against float32: plain SGD, the clipped step and a stacked ensemble.

Low precision is `vgrad.autocast`, which without a transform is `torch.autocast`; TF32
is torch's flag. Times are ratios to the float32 backward pass of plain SGD of the same
setting, interleaved with it, so that any two rows of a setting can be divided; times
of the ensemble are ratios to its own step in float32.

A CPU without the instructions computes bfloat16 and float16 in software, many times
slower than float32. There the smallest settings run alone, and nothing is claimed;
`has_instructions` stands beside every number.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import memory
from bench.contenders import CLIPPED, MAX_NORM, Grads, plain
from bench.measure import (
    DEVICES,
    DTYPES,
    has_instructions,
    in_precision,
    interleaved,
)
from bench.models import SETTINGS, Problem
from tests import oracle

pytestmark = pytest.mark.filterwarnings("ignore")

SECONDS = 1.5
MEMBERS = 4
CHECKED_SAMPLES = 4
SMALL = ("mlp",)
"""What a CPU without the instructions is asked to do."""
SOME = ("mlp", "simple-cnn", "cnn-128", "wrn-16-2", "transformer")
PRECISIONS = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 0.1, "float16": 0.1}
"""Largest difference from float64, relative to the norm of the whole result."""

Run = Callable[[Tensor, Tensor], Grads]
BUILDS = {"plain SGD": plain, "clipped sum": CLIPPED["vgrad"].build}


def ensemble(problem: Problem) -> Run:
    """Gradients of stacked members, each of its mean loss on the same batch."""
    model = problem.model
    params = {
        name: torch.stack([value.detach() * (1 + 0.01 * i) for i in range(MEMBERS)])
        for name, value in model.named_parameters()
    }

    def loss(params: Grads, x: Tensor, y: Tensor) -> Tensor:
        return problem.mean_loss(torch.func.functional_call(model, params, (x,)), y)

    mapped = torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))
    return lambda x, y: mapped(params, x, y)


def expected(kind: str, problem: Problem) -> Grads:
    """Compute the same in float64 by plain autograd, sample by sample."""

    def loss(model: torch.nn.Module, x: Tensor, y: Tensor) -> Any:
        return problem.mean_loss(model(x), y)

    grads = oracle.model_gradients(problem.model, loss, problem.batch, CHECKED_SAMPLES)
    if kind == "clipped sum":
        return oracle.clipped(grads, MAX_NORM)
    return {name: grad.mean(0) for name, grad in grads.items()}


def error(grads: Grads, exact: Grads) -> float:
    """Norm of the difference over the norm."""
    flat = [torch.cat([g[n].double().flatten() for n in exact]) for g in (grads, exact)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def chosen(device: str, setting: str, precision: str) -> None:
    """Skip what this device cannot do, or not in reasonable time."""
    if precision == "tf32" and device == "cpu":
        pytest.skip("TF32 is a precision of GPUs")
    if setting not in SMALL and not has_instructions(device, precision):
        pytest.skip(f"no instructions for {precision} on this CPU")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", SOME)
@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("name", PRECISIONS)
def test_precision(
    benchmark: Any, device: str, setting: str, kind: str, name: str
) -> None:
    benchmark.group = f"precision, {kind}, {setting}, {device}"
    chosen(device, setting, name)
    small = SETTINGS[setting].problem(
        device, torch.float32, CHECKED_SAMPLES, small=True
    )
    result = in_precision(BUILDS[kind](small), device, name)(*small.batch)
    difference = error(result, expected(kind, small))
    assert difference < PRECISIONS[name]
    if name in DTYPES:  # or it ran in float32
        assert difference > 1e-5
    if benchmark.disabled:
        return
    problem = SETTINGS[setting].problem(
        device, torch.float32, SETTINGS[setting].samples
    )
    run, baseline = BUILDS[kind](problem), plain(problem)
    timed(benchmark, device, name, run, baseline, problem, difference)
    benchmark.extra_info["setting"] = setting
    if memory.measurable(device) and has_instructions(device, name):
        contender = "plain" if kind == "plain SGD" else "vgrad"
        needed = memory.measure(setting, contender, device, precision=name)
        benchmark.extra_info["peak_bytes"] = needed["peak_bytes"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", ["mlp", "transformer"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_ensemble(benchmark: Any, device: str, setting: str, name: str) -> None:
    benchmark.group = f"precision, ensemble of {MEMBERS}, {setting}, {device}"
    chosen(device, setting, name)
    small = SETTINGS[setting].problem(
        device, torch.float32, CHECKED_SAMPLES, small=True
    )
    result = in_precision(ensemble(small), device, name)(*small.batch)
    first = {key: value[0] for key, value in result.items()}
    difference = error(first, expected("plain SGD", small))
    assert difference < PRECISIONS[name]
    if name in DTYPES:
        assert difference > 1e-5
    if benchmark.disabled:
        return
    problem = SETTINGS[setting].problem(
        device, torch.float32, SETTINGS[setting].samples
    )
    run = ensemble(problem)
    timed(benchmark, device, name, run, run, problem, difference)


def timed(
    benchmark: Any,
    device: str,
    precision: str,
    run: Run,
    baseline: Run,
    problem: Problem,
    difference: float,
) -> None:
    """Time, and say whether the device has the instructions."""
    low = in_precision(run, device, precision)
    low(*problem.batch)
    baseline(*problem.batch)
    interleaved(
        benchmark,
        lambda: low(*problem.batch),
        lambda: baseline(*problem.batch),
        device=device,
        samples=len(problem.batch[0]),
        error=difference,
        seconds=SECONDS,
    )
    supported = has_instructions(device, precision)
    benchmark.extra_info.update(precision=precision, has_instructions=supported)

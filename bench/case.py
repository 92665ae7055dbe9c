"""A setting on a device: what contenders are compared with, and who was refused."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import pytest
import torch

from bench import memory
from bench.compiling import captures
from bench.contenders import (
    MAX_NORM,
    STRATEGY,
    Build,
    Contender,
    Grads,
    clip_and_sum,
    plain,
)
from bench.measure import interleaved
from bench.memory import MEBIBYTE
from bench.models import SETTINGS, Problem
from tests import oracle

SECONDS = 1.5
CHECKED_SAMPLES = 4
EXACT = 1e-8
EXACT_IN_FLOAT32 = 1e-4
CLOSE = 1e-3
"""What float32 may differ by on a whole batch, where a ReLU's input may be a tie."""
CLIPPED_SUM, STORED = "clipped sum", "stored gradients"


class Case:
    """A setting on a device: the problem, the references and who was refused."""

    memory_after: int | None = 2
    """Samples on which memory is warmed up; None for the whole batch."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.setting = SETTINGS[name]
        self.refused: dict[str, dict[str, str]] = defaultdict(dict)

    @cached_property
    def problem(self) -> Problem:
        """What is timed."""
        return self.setting.problem(self.device, torch.float32, self.setting.samples)

    @cached_property
    def plain_peak(self) -> int:
        return self.peak("plain")

    def peak(self, name: str) -> int:
        """Measure a contender's memory in a process of its own."""
        measured = memory.measure(self.name, name, self.device, first=self.memory_after)
        return measured["peak_bytes"]

    @cached_property
    def close(self) -> Grads:
        """Clipped sum of the whole batch by a loop: gradients in float32, norms not.

        In float32 `vector_norm` is 0.3 % too small for the largest model's embedding.
        """
        model, (x, y) = self.problem.model, self.problem.batch
        params = dict(model.named_parameters())
        sums = {name: torch.zeros_like(value) for name, value in params.items()}
        for row in range(len(x)):
            loss = self.problem.mean_loss(model(x[row, None]), y[row, None])
            grads = torch.autograd.grad(loss, list(params.values()))
            factor = min(1.0, MAX_NORM / norm(grads))
            for total, grad in zip(sums.values(), grads, strict=True):
                total.add_(grad, alpha=factor)
        return sums

    @cached_property
    def exact(self) -> Grads:
        """Gradients of a few samples in float64."""
        problem = self.small(torch.float64)

        def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
            return problem.mean_loss(model(x), y)

        return oracle.model_gradients(
            problem.model, loss, problem.batch, CHECKED_SAMPLES
        )

    @cached_property
    def mean(self) -> Grads:
        """Gradient of plain SGD on the whole batch."""
        return plain(self.problem)(*self.problem.batch)

    def expected(self, contender: Contender) -> Grads:
        """Return the right result of a contender on the few samples, in float64."""
        if not contender.clips:
            return {name: grad.mean(0) for name, grad in self.exact.items()}
        norms = oracle.norms(self.exact) + contender.epsilon
        return oracle.weighted(self.exact, (MAX_NORM / norms).clamp(max=1))

    def small(self, dtype: torch.dtype) -> Problem:
        return self.setting.problem(self.device, dtype, CHECKED_SAMPLES, small=True)

    def check(
        self, kind: str, name: str, run: Callable[[torch.dtype], Any], expected: Any
    ) -> dict[str, Any]:
        """Return a contender's error on the few samples and the dtype it was found in.

        Torch and the peers have ops that work in float32 only; who raises in float64 is
        checked there.
        """
        try:
            try:
                dtype, allowed = torch.float64, EXACT
                result = run(dtype)
            except Exception:
                if ours(name):
                    raise
                dtype, allowed = torch.float32, EXACT_IN_FLOAT32
                result = run(dtype)
            error = oracle.error(result, expected)
        except ModuleNotFoundError as missing:
            pytest.skip(f"{missing.name} is not installed")
        except Exception as raised:
            if ours(name):
                raise
            said = str(raised).strip().splitlines() or [""]
            self.refuse(kind, name, f"raises: {type(raised).__name__}: {said[0][:100]}")
        if not error < allowed:
            assert not ours(name), f"relative error {error:.2g}"
            self.refuse(kind, name, f"wrong: relative error {error:.2g}")
        return {"error": error, "checked_in": str(dtype).removeprefix("torch.")}

    def check_batch(self, kind: str, name: str, result: Grads, close: Grads) -> float:
        """Return the distance to the float32 result of the whole batch, relative."""
        error = distance(result, close)
        if not error < CLOSE:
            assert not ours(name), f"relative error {error:.2g} on the whole batch"
            self.refuse(
                kind, name, f"wrong: relative error {error:.2g} on the whole batch"
            )
        return error

    def refuse(self, kind: str, name: str, reason: str) -> None:
        self.refused[kind][name] = reason
        pytest.skip(reason)

    def run_small(self, build: Build, dtype: torch.dtype) -> Grads:
        """Run a contender on the few samples."""
        problem = self.small(dtype)
        return build(problem)(*problem.batch)

    def described(self, kind: str, checked: dict[str, Any]) -> dict[str, Any]:
        """Return what `extra_info` says of every contender."""
        return {
            "setting": self.name,
            "title": self.setting.title,
            "batch": self.setting.samples,
            "parameters": self.setting.parameters,
            "checked_in": checked["checked_in"],
            # Filled by later tests too: it is written at the end of the session.
            "refused": self.refused[kind],
        }


def ours(name: str) -> bool:
    """Whether a contender must neither raise nor be wrong."""
    return name.startswith(("loop", "vgrad"))


def distance(result: Grads, expected: Grads) -> float:
    """Norm of the difference over the norm of the expected gradients."""
    return norm(result[name] - expected[name] for name in expected) / norm(
        expected.values()
    )


def norm(values: Iterable[torch.Tensor]) -> float:
    norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in values]
    return float(torch.stack(norms).norm())


def timed(
    benchmark: Any,
    case: Case,
    kind: str,
    name: str,
    contender: Contender,
    checked: dict[str, Any] | None,
    beside: Mapping[str, Callable[[], Any]] | None = None,
) -> None:
    """Check a contender on the whole batch, time it there and note the result.

    `checked` is its error on a few samples; None if there was no such check.
    """
    problem = case.problem
    run, run_plain = contender.build(problem), plain(problem)
    run_plain(*problem.batch)
    start = time.perf_counter()
    result = run(*problem.batch)
    first = time.perf_counter() - start
    result = clip_and_sum(result) if kind == STORED else result
    close = case.close if contender.clips else case.mean
    difference = case.check_batch(kind, name, result, close)
    checked = checked or {"error": difference, "checked_in": "float32"}
    interleaved(
        benchmark,
        partial(run, *problem.batch),
        partial(run_plain, *problem.batch),
        device=case.device,
        samples=case.setting.samples,
        error=checked["error"],
        seconds=SECONDS,
        beside=beside,
    )
    benchmark.extra_info.update(
        **case.described(kind, checked),
        float32_difference=difference,
        **captures(run),
    )
    if contender.per_shape:
        later = benchmark.stats.stats.median
        benchmark.extra_info["build_seconds"] = max(0.0, first - later)
    if name == "vgrad":
        benchmark.extra_info["strategy"] = STRATEGY


def memory_of(needed: int, plain: int) -> dict[str, float]:
    """Return what `extra_info` says of memory.

    Below a mebibyte there is no ratio: pages of the allocator are all that is seen.
    """
    info = {"peak_bytes": needed, "plain_peak_bytes": plain}
    return {**info, "memory_ratio": needed / plain} if plain >= MEBIBYTE else info

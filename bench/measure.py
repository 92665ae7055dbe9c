"""How a contender is timed: whole calls, interleaved with the plain step.

Every round runs the plain step and then the contender, each ending in a device sync
inside its timer, so that both see the same state of the machine and their ratio means
something where absolute times do not. The plain step's time goes into `extra_info`.
"""

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import vgrad

ROUNDS = {"cpu": 11, "cuda": 50}
WARMUP = {"cpu": 2, "cuda": 15}
FEWEST, MOST = 3, 100
"""Rounds of contenders that are given some seconds, which they fill or exceed."""

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason="no CUDA device here"
            ),
        ],
    ),
]


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def has_instructions(device: str, precision: str) -> bool:
    """Whether the device computes in this precision by itself."""
    if device == "cuda" or precision == "float32":
        return True
    supported = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return precision in supported and bool(supported[precision]())


def in_precision(
    run: Callable[..., Any], device: str, precision: str
) -> Callable[..., Any]:
    """Run in "float32", "tf32" (by torch's flag), or under autocast."""

    def inside(*args: Any) -> Any:
        before = torch.get_float32_matmul_precision()
        cast = precision in DTYPES
        low = vgrad.autocast(device, dtype=DTYPES[precision]) if cast else nullcontext()
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            with low:
                return run(*args)
        finally:
            torch.set_float32_matmul_precision(before)

    return inside


def sync(device: str) -> None:
    """Wait until a device has done what was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(
    benchmark: Any,
    contender: Callable[[], Any],
    plain: Callable[[], Any],
    *,
    device: str,
    samples: int,
    error: float,
    seconds: float | None = None,
) -> None:
    """Time `contender` by pytest-benchmark, and `plain` before each of its rounds.

    `error` is the contender's largest relative error against the float64 reference; the
    caller has checked it, and it is kept beside the times. With `seconds` there are as
    many rounds as fit into them, from `FEWEST` to `MOST`; both must have run before.
    """
    plain_seconds: list[float] = []

    def run_plain() -> None:
        start = time.perf_counter()
        plain()
        sync(device)
        plain_seconds.append(time.perf_counter() - start)

    def timed() -> Any:
        result = contender()
        sync(device)
        return result

    rounds, warmup = ROUNDS[device], WARMUP[device]
    if seconds is not None and benchmark.enabled:
        start = time.perf_counter()
        run_plain()
        timed()
        took = time.perf_counter() - start
        rounds = max(FEWEST, min(MOST, int(seconds / took)))
        warmup = min(warmup, rounds - FEWEST)  # that was one
        plain_seconds.clear()
    benchmark.pedantic(timed, setup=run_plain, rounds=rounds, warmup_rounds=warmup)
    if benchmark.stats is None:  # --benchmark-disable
        return
    median = benchmark.stats.stats.median
    plain_median = statistics.median(plain_seconds[warmup:])
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    benchmark.extra_info.update(
        device=device,
        device_name=name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        tf32=torch.backends.cuda.matmul.allow_tf32,
        plain_seconds=plain_median,
        ratio_to_plain=median / plain_median,
        samples_per_second=samples / median,
        oracle_error=error,
    )

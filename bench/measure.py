"""How a contender is timed: whole calls, interleaved with the plain step.

Every round runs the plain step and then the contender, each ending in a device sync
inside its timer, so that both see the same state of the machine and their ratio means
something where absolute times do not. The plain step's time goes into `extra_info`, as
does the time of whatever else runs beside it.

Two clocks run: wall time, and the time that the process has the CPU for. With one
thread (`OMP_NUM_THREADS=1`) the second tells more on a shared machine; with more it
counts threads that wait too.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

import vgrad
from tests.losses import DEVICES as DEVICES

ROUNDS = {"cpu": 11, "cuda": 50}
WARMUP = {"cpu": 2, "cuda": 15}
FEWEST, MOST = 3, 100
"""Rounds of contenders that are given some seconds, which they fill or exceed."""

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


class Clock:
    """Wall and CPU seconds of every run of a function."""

    def __init__(self, run: Callable[[], Any], device: str) -> None:
        self.run, self.device = run, device
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = self.run()
        sync(self.device)
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return result

    def medians(self, skipped: int) -> tuple[float, float]:
        """Return wall and CPU seconds without the first runs."""
        wall = statistics.median(self.wall[skipped:])
        return wall, statistics.median(self.cpu[skipped:])


def interleaved(
    benchmark: Any,
    contender: Callable[[], Any],
    plain: Callable[[], Any],
    *,
    device: str,
    samples: int,
    error: float,
    seconds: float | None = None,
    rounds: int | None = None,
    beside: Mapping[str, Callable[[], Any]] | None = None,
) -> None:
    """Time `contender` by pytest-benchmark, and `plain` before each of its rounds.

    `error` is the contender's largest relative error against the float64 reference; the
    caller has checked it, and it is kept beside the times. With `seconds` there are as
    many rounds as fit into them, from `FEWEST` to `MOST`; both must have run before.
    With `rounds` there are so many and no warm-up. Functions in `beside` run in each
    round too, and their ratios are kept as `ratio_to_` with the name.
    """
    others = {"plain": plain, **(beside or {})}
    clocks = {name: Clock(run, device) for name, run in others.items()}
    timed = Clock(contender, device)

    def setup() -> None:
        for clock in clocks.values():
            clock()

    warmup = 0 if rounds else WARMUP[device]
    if seconds is not None and benchmark.enabled:
        start = time.perf_counter()
        setup()
        timed()
        took = time.perf_counter() - start
        rounds = max(FEWEST, min(MOST, int(seconds / took)))
        warmup = min(warmup, rounds - FEWEST)  # that was one
        for clock in (timed, *clocks.values()):
            clock.wall.clear()
            clock.cpu.clear()
    rounds = rounds or ROUNDS[device]
    benchmark.pedantic(timed, setup=setup, rounds=rounds, warmup_rounds=warmup)
    if benchmark.stats is None:  # --benchmark-disable
        return
    median = benchmark.stats.stats.median
    _, cpu = timed.medians(warmup)
    for name, clock in clocks.items():
        other, other_cpu = clock.medians(warmup)
        benchmark.extra_info[f"{name}_seconds"] = other
        benchmark.extra_info[f"ratio_to_{name}"] = median / other
        benchmark.extra_info[f"cpu_ratio_to_{name}"] = cpu / other_cpu
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    benchmark.extra_info.update(
        device=device,
        device_name=name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        tf32=torch.backends.cuda.matmul.allow_tf32,
        samples_per_second=samples / median,
        cpu_seconds=cpu,
        oracle_error=error,
    )

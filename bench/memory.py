"""How much memory a contender needs: `python -m bench.memory SETTING CONTENDER`.

It runs in a process of its own, after a warm-up that loads what is loaded once: on two
samples, or on the whole batch where some are built for its size. The base is what
the process then holds, parameters and batch included; the peak is what three runs on
the whole batch need above it. On CUDA that is what torch's own allocator has handed
out, on the CPU resident memory as Linux counts it.

On the CPU every block of a mebibyte or more comes from the system and goes back to it
(`M_MMAP_THRESHOLD`), for all contenders alike. As it comes, the allocator moves that
limit while it runs, and holes in its heap made the peak of one and the same run differ
by half; so it differs by a few hundredths. It also takes longer, which is why the
seconds here are no benchmark. The result is one line of JSON.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from bench.compiling import COMPILED
from bench.contenders import CLIPPED, Contender, plain, vgrad_clipped
from bench.measure import in_precision, sync
from bench.models import SETTINGS

RUNS = 3
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
M_MMAP_THRESHOLD = -3
MEBIBYTE = 1 << 20

CONTENDERS = {"plain": Contender(plain, clips=False), **CLIPPED, **COMPILED}

Result = TypeVar("Result")


def measurable(device: str) -> bool:
    """Whether the peak of a process can be read here."""
    return device == "cuda" or platform.libc_ver()[0] == "glibc"


class Job(NamedTuple):
    """What is measured; None for the setting's own samples, and for one chunk.

    It warms up on `first` samples, None for all.
    """

    setting: str
    contender: str
    device: str
    precision: str = "float32"
    samples: int | None = None
    chunk_size: int | None = None
    first: int | None = 2


def measure(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run `peak` on a `Job` in a fresh process."""
    return in_fresh_process(peak, Job(*args, **kwargs))


def in_fresh_process(function: Callable[..., Result], *args: Any) -> Result:
    """Run a function in a process forked from one that only imported.

    Raises:
        BrokenProcessPool: the process was killed, for want of memory most likely.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.memory", "opacus", "backpack"])
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=prepare, initargs=(dict(os.environ),)
    ) as process:
        return process.submit(function, *args).result()


def prepare(environment: Mapping[str, str]) -> None:
    """Set the allocator's limit, before anything is allocated, and the caches' place.

    The server that forks may have started under another environment.
    """
    os.environ.update(environment)
    warnings.simplefilter("ignore")  # of vmap's fallbacks and of the peers' hooks
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MEBIBYTE)


def peak(job: Job) -> dict[str, Any]:
    """Measure in this process, which should have done nothing before."""
    device = job.device
    chosen = SETTINGS[job.setting]
    problem = chosen.problem(device, torch.float32, job.samples or chosen.samples)
    contender = CONTENDERS[job.contender]
    if job.chunk_size is not None:
        contender = Contender(partial(vgrad_clipped, chunk_size=job.chunk_size))
    run = in_precision(contender.build(problem), device, job.precision)
    run(*(item[: job.first] for item in problem.batch))
    return {
        "setting": job.setting,
        "contender": job.contender,
        **above_base(lambda: run(*problem.batch), device),
    }


def above_base(run: Callable[[], Any], device: str) -> dict[str, float]:
    """Measure some runs in a process that has warmed up."""
    sync(device)
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # or runs would need so much less
        CLEAR.write_text(RESET_PEAK)
        base = _status("VmRSS")
    start = time.perf_counter()
    for _ in range(RUNS):
        run()
        sync(device)
    seconds = (time.perf_counter() - start) / RUNS
    on_cuda = device == "cuda"
    highest = torch.cuda.max_memory_allocated() if on_cuda else _status("VmHWM")
    return {"base_bytes": base, "peak_bytes": highest - base, "seconds": seconds}


def _status(field: str) -> int:
    """Read a number of bytes from the status of this process."""
    lines = STATUS.read_text().splitlines()
    kibibytes = next(line for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes.split()[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    prepare({})
    job = Job(arguments.setting, arguments.contender, arguments.device)
    first = None if CONTENDERS[job.contender].per_shape else job.first
    print(json.dumps(peak(job._replace(first=first))))

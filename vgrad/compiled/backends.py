"""What runs a graph: its ops one by one, or compiled code, whichever is faster."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vgrad.compiled import recording
from vgrad.compiled.graph import Graph
from vgrad.conditions import Unrepeatable
from vgrad.torch_private import modes, tracing
from vgrad.tree import no_autocast

_SMALL = 2**15
"""Numbers in a tensor that a kernel goes through in microseconds, as Python calls it.

Calls from C++ take a third off the time of a graph of such tensors: 64-64-10 at a batch
of 32 takes 51 microseconds in place of 80. On larger ones nothing was gained. With one
thread for each kernel a call takes 2 to 4 percent less than with two.
"""


def compiled(graph: Graph, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph.

    Raises:
        Unrepeatable: there is no compiler, or it fails.
    """
    try:
        inputs = [*tensors, *graph.closed]
        small = graph.largest <= _SMALL
        return tracing.compiled(graph.module, inputs, small=small)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise Unrepeatable(f"Inductor fails: {line}") from error


def outputs(
    run: Callable[..., Sequence[Tensor]], graph: Graph, tensors: list[Tensor]
) -> Sequence[Tensor]:
    """Run a graph; casts of autocast are ops of it."""
    inputs = (*tensors, *graph.closed)
    with torch.no_grad():
        if modes.autocast_is_on():
            with no_autocast(inputs[0].device):
                return run(*inputs)
        return run(*inputs)


_ROUNDS = 5
"""Times that each backend runs before one is chosen."""


def tried(backend: str, tensors: list[Tensor]) -> tuple[str, ...]:
    """Return what is built beside a replay; a recording by itself on a GPU alone."""
    if backend != "auto":
        return () if backend == "replay" else (backend,)
    on_gpu = any(each.device.type == recording.OnCuda.device for each in tensors)
    return ("inductor", "cudagraph") if on_gpu else ("inductor",)


def fastest(
    graph: Graph, tensors: list[Tensor], runs: dict[str, Callable]
) -> tuple[str, str]:
    """Time backends in turns, choose, and say what each took."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            bool(outputs(run, graph, tensors)[-1])  # waits for a device
            times[name].append(time.perf_counter() - start)
    taken = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    best = min(taken, key=lambda name: taken[name])
    return best, ", ".join(f"{name} took {x:.3g} ms" for name, x in taken.items())

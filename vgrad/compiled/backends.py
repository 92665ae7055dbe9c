"""What runs a graph: its ops one by one, or compiled code, whichever is faster."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vgrad.compiled.graph import Graph
from vgrad.conditions import Unrepeatable
from vgrad.dtypes import no_autocast
from vgrad.torch_private import modes, tracing

_SMALL = 2**15
"""Numbers in a tensor that a kernel goes through in microseconds, as Python calls it.

Calls from C++ take a third off the time of a graph of such tensors: 64-64-10 at a batch
of 32 takes 51 microseconds in place of 80. On larger ones nothing was gained.
"""


def compiled(graph: Graph, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph.

    Raises:
        Unrepeatable: there is no compiler, or it fails.
    """
    try:
        inputs = [*tensors, *graph.closed]
        in_cpp = graph.largest <= _SMALL
        return tracing.compiled(graph.module, inputs, in_cpp=in_cpp)
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


def faster(
    graph: Graph, tensors: list[Tensor], replay: Callable, compiled: Callable
) -> tuple[str, str]:
    """Time both backends in turns, and choose."""
    times: dict[Callable, list[float]] = {replay: [], compiled: []}
    for _ in range(_ROUNDS):
        for run, taken in times.items():
            start = time.perf_counter()
            bool(outputs(run, graph, tensors)[-1])  # waits for a device
            taken.append(time.perf_counter() - start)
    slow, fast = (statistics.median(each) * 1e3 for each in times.values())
    backend = "inductor" if fast < slow else "replay"
    return backend, f"replay took {slow:.3g} ms, Inductor {fast:.3g} ms"

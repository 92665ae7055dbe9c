"""The code that runs a graph: compiled, a CUDA graph, and the fastest of them."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vgrad import overlaps
from vgrad.compiled.graph import Graph
from vgrad.conditions import Unrepeatable
from vgrad.torch_private import modes, tracing
from vgrad.torch_private.kernels import copy_all_
from vgrad.torch_private.tensors import may_draw
from vgrad.tree import no_autocast

Run = Callable[..., Sequence[Tensor]]

_SMALL = 2**15
"""Numbers in tensors so small that calls from C++ take a third off a graph's time."""


def result(run: Run, graph: Graph, tensors: list[Tensor]) -> Any:
    """Run a graph, of which casts are ops; None where its flag is up."""
    inputs = (*tensors, *graph.closed)
    casts = no_autocast(inputs[0].device) if modes.autocast_is_on() else nullcontext()
    try:
        with torch.no_grad(), casts:
            *outputs, flag = run(*inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError):
        return None  # of values that the flag would doubt, or eager mode raises it, too
    return None if bool(flag) else graph.result(outputs)


def tried(backend: str, tensors: list[Tensor]) -> tuple[str, ...]:
    """Return the backends to build beside a replay; `auto` records where it can."""
    if backend != "auto":
        return () if backend == "replay" else (backend,)
    records = any(map(records_graphs, {each.device for each in tensors}))
    return ("inductor", "cudagraph") if records else ("inductor",)


_ROUNDS = 5
"""Times that each backend runs before one is chosen."""


def fastest(
    graph: Graph, tensors: list[Tensor], runs: dict[str, Callable]
) -> tuple[str, str]:
    """Time backends in turns, and return the fastest one, and all times in words."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            result(run, graph, tensors)  # which waits for a device
            times[name].append(time.perf_counter() - start)
    taken = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    best = min(taken, key=lambda name: taken[name])
    return best, ", ".join(f"{name} took {x:.3g} ms" for name, x in taken.items())


_STEPS = 64
"""Writes into one tensor from which Inductor's time grows with their square."""


def compiled(graph: Graph, tensors: list[Tensor]) -> Run:
    """Compile a graph; `Unrepeatable` if it has no compiler, fails or takes minutes."""
    if (count := max(graph.written.values(), default=0)) > _STEPS:
        raise Unrepeatable(
            f"{count} ops write into one tensor, as the time steps of a recurrent net "
            f"do, and Inductor would need minutes to build them, for no gain. Pass "
            f'backend="replay", or "cudagraph" on a GPU; up to {_STEPS} are built'
        )
    try:
        inputs = [*tensors, *graph.closed]
        sizes = (place.shape.numel() for place in graph.places.values())
        return tracing.compiled(graph.module, inputs, small=max(sizes) <= _SMALL)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise Unrepeatable(f"Inductor fails: {line}") from error


# CUDA graphs.


def records_graphs(device: torch.device) -> bool:
    """Return whether torch records the launches of a device."""
    return hasattr(torch.get_device_module(device), "make_graphed_callables")


def recorded(run: Run, graph: Graph, tensors: Sequence[Tensor]) -> Run:
    """Record a replay as a CUDA graph, a function of arguments anywhere in memory."""
    inputs = [*tensors, *graph.closed]
    check_recordable(graph, inputs)
    layouts = [(each.shape, each.stride()) for each in inputs]
    place = inputs[0].device
    module = torch.get_device_module(place)

    def run_in(*memory: Tensor) -> Sequence[Tensor]:
        pairs = zip(memory, layouts, strict=True)
        return run(*(each.as_strided(*layout) for each, layout in pairs))

    try:
        with torch.no_grad(), no_autocast(place), module.device(place):
            own = [memory_of(each).clone() for each in inputs]
            launch: Any = module.make_graphed_callables(run_in, tuple(own))
            done, lock = module.Event(), threading.Lock()
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise Unrepeatable(f"recording it fails: {line}") from error

    def launched(*inputs: Tensor) -> Sequence[Tensor]:
        # The memory is the same each time: a call waits for the one before it.
        with lock, module.device(place):
            stream = module.current_stream()
            stream.wait_event(done)
            _copy(own, [*map(memory_of, inputs)])
            outputs = launch(*own)
            results = [*map(torch.empty_like, outputs)]
            _copy(results, outputs)
            done.record(stream)
        return results

    return launched


def _copy(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors of a device into others, one launch for each dtype."""
    kinds: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in zip(into, tensors, strict=True):
        kinds.setdefault(pair[0].dtype, []).append(pair)
    for pairs in kinds.values():
        ones, others = zip(*pairs, strict=True)
        copy_all_(ones, others)


def check_recordable(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Refuse graphs that torch records, but that a launch would not repeat."""
    places = {each.device for each in inputs}
    if len(places) != 1 or not records_graphs(*places):
        where = sorted(map(str, places)) or "none"
        raise Unrepeatable(
            f"recordings are of tensors that all are on one device that records "
            f"graphs, as cuda does, and its tensors are on {where}"
        )
    if any(each.is_conj() or each.is_neg() for each in inputs):
        raise Unrepeatable("an argument is a conjugate or negative view")
    if any(node.op == "placeholder" for node in graph.written):
        raise Unrepeatable("it writes into an argument")
    for node, place in graph.places.items():
        if may_draw(node.target) and place.device not in places:
            raise Unrepeatable(f"{node.target} draws on {place.device}")


def memory_of(tensor: Tensor) -> Tensor:
    """Return all numbers from the first of a tensor to its last, as they lie."""
    extent = overlaps.extent(tensor) // tensor.element_size()
    return tensor.detach().as_strided((extent,), (1,))

"""A graph as a recording of a GPU: all its kernels by one launch.

A recording reads and writes the same memory each time. So every call copies its
arguments into memory that the recording reads, launches it, and copies the results out.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from vgrad.compiled.graph import Graph
from vgrad.compiled.replay import written_to
from vgrad.conditions import Unrepeatable
from vgrad.torch_private.kernels import copy_all_
from vgrad.tree import no_autocast

Run = Callable[..., Sequence[Tensor]]


class Recording(Protocol):
    """What a device records: where the results lie, and what makes them anew."""

    outputs: Sequence[Tensor]

    def launch(self) -> None:
        """Do again all that was recorded."""
        ...

    def turn(self) -> Any:
        """Return a context in which one call runs behind the one before it."""
        ...


class OnCuda:
    """A CUDA graph.

    torch wants a few runs on another stream before, in which libraries choose their
    kernels and get their memory. Random numbers are those of the generator's state at
    each launch.
    """

    device = "cuda"

    def __init__(self, run: Run, inputs: Sequence[Tensor]) -> None:
        self._place = inputs[0].device
        self._done: Any = None
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._place):
            aside, now = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(now)
            with torch.cuda.stream(aside):
                for _ in range(_RUNS):
                    run(*inputs)
            now.wait_stream(aside)
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.outputs = run(*inputs)

    def launch(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait, on the GPU, for the call before, which may be on another stream."""
        with torch.cuda.device(self._place):
            stream = torch.cuda.current_stream()
            if self._done is not None:
                stream.wait_event(self._done)
            yield
            self._done = stream.record_event()


_RUNS = 3
"""Runs before a recording, as https://docs.pytorch.org/docs/stable/notes/cuda.html."""


def recorded(run: Run, graph: Graph, tensors: Sequence[Tensor]) -> Run:
    """Record what runs a graph, for inputs like these.

    Raises:
        Unrepeatable: a recording would not repeat something, or the device fails.
    """
    inputs = [*tensors, *graph.closed]
    check(graph.module, inputs, OnCuda.device)
    try:
        with torch.no_grad(), no_autocast(inputs[0].device):
            own = [memory_of(each).clone() for each in inputs]
            recording: Recording = OnCuda(run, [*map(_seen_as, own, inputs)])
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise Unrepeatable(f"recording it fails: {line}") from error
    return _Recorded(recording, own)


class _Recorded:
    """Runs a recording on arguments, and returns tensors that are the caller's."""

    def __init__(self, recording: Recording, own: Sequence[Tensor]) -> None:
        self._recording, self._own = recording, own
        self._into, self._out = _alike(own), _alike(recording.outputs)
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Copy in, launch, copy out."""
        outputs = self._recording.outputs
        with self._lock, self._recording.turn():
            _copy(self._into, self._own, [*map(memory_of, inputs)])
            self._recording.launch()
            found = [*map(torch.empty_like, outputs)]
            _copy(self._out, found, outputs)
        return found


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Number tensors in groups of a device and dtype, which one launch copies."""
    found: dict[Any, list[int]] = {}
    for number, each in enumerate(tensors):
        found.setdefault((each.device, each.dtype), []).append(number)
    return [*found.values()]


def _copy(
    groups: list[list[int]], into: Sequence[Tensor], given: Sequence[Tensor]
) -> None:
    for numbers in groups:
        copy_all_([into[n] for n in numbers], [given[n] for n in numbers])


def check(module: fx.GraphModule, inputs: Sequence[Tensor], device: str) -> None:
    """Refuse graphs of which a recording would repeat a part alone.

    What runs on the CPU would run once. That is right for what is always the same, as
    numbers that the function writes out.

    Raises:
        Unrepeatable: something runs elsewhere, or writes into an input.
    """
    places = {each.device for each in inputs}
    if {each.type for each in places} != {device} or len(places) > 1:
        found = sorted(map(str, places)) or "none"
        raise Unrepeatable(
            f"recordings are of tensors that all are on one {device} device, and its "
            f"tensors are on {found}"
        )
    if any(each.is_conj() or each.is_neg() for each in inputs):
        raise Unrepeatable("an argument is a conjugate or negative view")
    fixed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and fixed.issuperset(node.all_input_nodes)
            and torch.Tag.nondeterministic_seeded
            not in getattr(node.target, "tags", ())
        ):
            fixed.add(node)
        value = node.meta.get("val")
        here = not isinstance(value, Tensor) or value.device in places
        if not here and node not in fixed and node.op != "placeholder":
            raise Unrepeatable(f"{node.target} computes on {value.device}")
    if any(node.op == "placeholder" for node in written_to(module.graph)):
        raise Unrepeatable("it writes into an argument")


def memory_of(tensor: Tensor) -> Tensor:
    """Return all numbers from the first of a tensor to its last, as they lie.

    Those that several entries share are there once.
    """
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in axes)
    extent = 1 + last if tensor.numel() else 0
    return tensor.detach().as_strided((extent,), (1,))


def _seen_as(memory: Tensor, tensor: Tensor) -> Tensor:
    return memory.as_strided(tensor.shape, tensor.stride())

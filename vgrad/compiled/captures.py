"""The graphs of some functions, one for each kind of arguments and surroundings."""

import copy
import dataclasses
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vgrad import batches, checks, tree
from vgrad.compiled import backends, verification
from vgrad.compiled.graph import Graph, captured, replayed
from vgrad.compiled.guards import Signature, description, signature
from vgrad.conditions import Unrepeatable
from vgrad.dp.plan import Plan
from vgrad.generators import RNG_LOCK, RandomState, random_state, set_random_state
from vgrad.loss.values import DIFFER, SplitBatch
from vgrad.persample.engine import (
    Across,
    Call,
    Chunk,
    Inputs,
    Transform,
    at_a_time,
    constant,
    eager,
)
from vgrad.persample.grad import check_weights
from vgrad.report import Report, table
from vgrad.torch_private import modes, tracing
from vgrad.torch_private.tensors import like

Backend = Literal["replay", "inductor", "cudagraph", "auto"]
Fallback = Literal["eager", "error"]

_MOST = 16
"""Captures of one function; more would mean that shapes never repeat."""

_IN_A_ROW = 3
"""Results dropped one after the other until a graph is given up."""


class CompileWarning(UserWarning):
    """Something runs in eager mode that was to be compiled: right numbers, but slow."""


@dataclasses.dataclass(frozen=True)
class CaptureReport(Report):
    """One capture of a compiled function.

    Attributes:
        name: the function.
        kind: a hash of the shapes, dtypes and so on of its arguments.
        backend: the backend of the graph, or "eager" where there is none.
        why: the reason for that.
        nodes: how many ops the graph has.
        build_seconds: the time of the capture, compilation included.
        calls: how often the graph ran.
        redos: how often its result was dropped and computed in eager mode.
        key: dtypes and shapes of the last three arguments.
    """

    name: str
    kind: str
    backend: str
    why: str = ""
    nodes: int = 0
    build_seconds: float = 0.0
    calls: int = 0
    redos: int = 0
    key: str = ""


@dataclasses.dataclass(frozen=True)
class CompiledExplanation(Report):
    """The report of `explain` for a compiled function.

    Attributes:
        captures: every capture so far.
        eager: the report of the function in eager mode; None for a step.
    """

    captures: tuple[CaptureReport, ...]
    eager: Any

    def __str__(self) -> str:
        head = ("capture", "backend", "nodes", "build", "calls", "redos", "key", "why")
        cells = [
            (
                *(each.name, each.backend, each.nodes),
                *(f"{each.build_seconds:.1f} s", each.calls, each.redos),
                *(each.key, each.why),
            )
            for each in self.captures
        ]
        text = table([head, *cells], right={2, 3, 4, 5}) if cells else "no captures yet"
        return text if self.eager is None else f"{text}\n\n{self.eager}"


# Captures.


@dataclasses.dataclass(eq=False)
class _Capture:
    function: Callable
    key: list[Any]  # of its signature
    matches: Callable[..., bool]  # whether tensors are like the first ones
    report: dict[str, Any]  # entries of it
    differentiable: bool = False  # in eager mode, so that a derivative must raise
    graph: Graph | None = None  # None if there is none, or it was given up
    run: Any = None  # the backend's function
    verified: bool = False  # whether a result was compared
    calls: int = 0
    redos: int = 0
    in_a_row: int = 0  # results dropped, one after the other


@dataclasses.dataclass(eq=False)
class Captures:
    """Runs functions as graphs, each captured at its first call of a kind.

    Where `private`, a graph that no longer agrees with eager mode raises.
    """

    backend: Backend | Mapping[str, str]
    fallback: Fallback
    verify: bool = True
    private: bool = False

    def __post_init__(self) -> None:
        chosen = self.backend
        names = [*chosen.values()] if isinstance(chosen, Mapping) else [chosen]
        for name in names:
            checks.choice("compile", get_args(Backend), backend=name)
        checks.choice("compile", get_args(Fallback), fallback=self.fallback)
        self.compiles = not {"inductor", "auto"}.isdisjoint(names)
        self.clear()

    def __copy__(self) -> "Captures":
        return replace(self)

    def clear(self) -> None:
        """Forget all captures."""
        self._captures: list[_Capture] = []
        self._warned: set[str] = set()

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return a report of every capture."""
        return tuple(
            CaptureReport(**each.report, calls=each.calls, redos=each.redos)
            for each in self._captures
        )

    def explanation(self, eager: Any) -> CompiledExplanation:
        """Explain captures, beside the report of eager mode."""
        return CompiledExplanation(self.reports(), eager)

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        """Return the result of a function: of its graph, or in eager mode."""
        try:
            # The mode of `torch.set_default_device` only matters to new tensors.
            around = (type(each) for each in modes.function_modes())
            if (
                modes.inside_transform()
                or tracing.dispatch_modes()
                or torch.is_anomaly_enabled()
                or any(kind is not modes.DeviceMode for kind in around)
            ):  # of which a graph would run nothing
                raise Unrepeatable(
                    "a transform of torch.func or a mode is on around it"
                )
            call = signature(arguments)
        except Unrepeatable as error:
            self.refuse(function, error)
            return function(*arguments)
        capture = self._known(function, call)
        if capture is None:
            with RNG_LOCK:
                capture = self._known(function, call)  # of another thread
                if capture is None:
                    return self._first(function, call, arguments)
        if capture.graph is None:
            return function(*arguments)
        return self._run(capture, capture.graph, arguments, call.tensors)

    def _known(self, function: Callable, call: Signature) -> _Capture | None:
        """Return the capture of a kind, if all that it closes over is as it was."""
        for capture in self._captures:
            alike = capture.function == function and capture.key == call.key
            if alike and capture.matches(*call.distinct):
                if capture.graph is None or capture.graph.values.hold():
                    return capture
        return None

    def refuse(self, function: Callable, why: Unrepeatable | str) -> None:
        """Warn once that a function runs in eager mode, or raise."""
        text = f"compile({_name_of(function)}): runs in eager mode, since {why}."
        if self.fallback == "error":
            cause = why if isinstance(why, Unrepeatable) else None
            raise RuntimeError(
                f"{text} Expected something that can be captured. Change it, or pass "
                f'fallback="eager".'
            ) from cause
        self._warn(text)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, CompileWarning, stacklevel=2)

    def _run(
        self, capture: _Capture, graph: Graph, arguments: tuple, tensors: list[Tensor]
    ) -> Any:
        """Run a graph, and then the function itself where the result is dropped."""
        number = capture.calls + 1
        compares = not capture.verified or not number & (number - 1)  # a power of two
        compares &= self.verify
        with RNG_LOCK if graph.draws or compares else nullcontext():
            before = random_state(tensors) if graph.draws or compares else None
            result = backends.result(capture.run, graph, tensors)
            capture.calls = number
            agrees = result is not None
            if agrees and compares and before is not None:
                given = capture, graph, arguments, tensors
                agrees = self._agrees(*given, before, result)
            if agrees:
                capture.in_a_row = 0
                # A derivative of a constant raises.
                constants = capture.differentiable
                return constant("compile", result, tensors) if constants else result
            if before is not None:
                set_random_state(before)
            if result is None:
                capture.redos += 1
                capture.in_a_row += 1
                if capture.in_a_row == _IN_A_ROW:
                    text = f"{_IN_A_ROW} calls in a row had doubtful samples, or ones"
                    self._give_up(capture, f"{text} that {DIFFER}")
            return capture.function(*arguments)

    def _agrees(
        self,
        capture: _Capture,
        graph: Graph,
        arguments: tuple,
        tensors: list[Tensor],
        before: RandomState,
        result: Any,
    ) -> bool:
        """Return whether a result is eager mode's; if not, the graph is dropped."""
        after = random_state(tensors)

        def eager(*inputs: Any) -> Any:
            set_random_state(before)
            return capture.function(*inputs)

        both = result, eager(*arguments)
        try:
            if capture.report["backend"] == "inductor":
                verification.close(*both, eager, arguments)
            else:
                first = not capture.verified
                verification.replays(*both, eager, arguments, first=first)
        except Unrepeatable as error:
            self._drop(capture, graph, error)
            return False
        capture.verified = True
        set_random_state(after)
        return True

    def _drop(self, capture: _Capture, graph: Graph, error: Unrepeatable) -> None:
        """Give up a graph that does not agree with eager mode, or its backend."""
        name = capture.report["name"]
        if capture.verified:
            text = (
                f"at its call {capture.calls} {error}. A value that the loss reads has "
                f"changed where compile does not look for it, or the loss keeps "
                f"something from call to call. Make the value a buffer, or call "
                f".clear() after a change"
            )
            if self.private:
                raise RuntimeError(
                    f"compile({name}): expected a graph that agrees with eager mode, "
                    f"but {text}. Nothing of this step was released."
                ) from error
            self._give_up(capture, text)
        elif capture.report["backend"] == "replay":
            self._give_up(capture, error)
        else:
            self._warn(f"compile({name}): replays, since {error}.")
            capture.run = replayed(graph)
            capture.report |= {"backend": "replay", "why": str(error)}

    def _give_up(self, capture: _Capture, why: Unrepeatable | str) -> None:
        capture.graph = None
        capture.report |= {"backend": "eager", "why": str(why)}
        self.refuse(capture.function, why)

    def _first(self, function: Callable, call: Signature, arguments: tuple) -> Any:
        """Run a function in eager mode, and capture it for the next call."""
        tensors, before = call.tensors, random_state(call.tensors)
        kind = repr([*map(description, tensors)]).encode()
        report: dict[str, Any] = {
            "name": _name_of(function),
            "backend": "eager",
            "kind": hashlib.blake2b(kind, digest_size=8).hexdigest(),
            "key": ", ".join(f"{x.dtype} {[*x.shape]}" for x in tensors[-3:]),
        }
        capture = _Capture(function, call.key, like(call.distinct), report)
        try:
            expected = function(*arguments)
        except SplitBatch as error:
            if len(error.parts.rows) > 1:  # otherwise another strategy runs it
                self._captures.append(capture)
                self._give_up(capture, f"samples {DIFFER} at {error.parts.where}")
            raise
        known = [x for x in self._captures if x.graph and x.function == function]
        if len(known) >= _MOST:
            self.refuse(function, f"there are {_MOST} captures already")
            return expected
        wanted = [each.requires_grad for each in tree.tensors(expected)]
        capture.differentiable = any(wanted)
        self._captures.append(capture)
        after, start = random_state(tensors), time.perf_counter()
        try:
            set_random_state(before)
            graph = captured(function, arguments)
            report["nodes"] = graph.nodes
            set_random_state(before)
            self._choose(capture, graph, tensors)
            capture.graph = graph
        except SplitBatch:  # the next call has keys, and is one of another kind
            self._captures.remove(capture)
        except Unrepeatable as error:
            self._give_up(capture, error)
        finally:
            report["build_seconds"] = time.perf_counter() - start
            set_random_state(after)
        return expected

    def _choose(self, capture: _Capture, graph: Graph, tensors: list[Tensor]) -> None:
        """Choose the backend of a graph."""
        report, backend, why = capture.report, self.backend, "as asked for"
        if isinstance(backend, Mapping):
            backend, why = backend.get(report["kind"], "replay"), "as chosen before"
        runs: dict[str, backends.Run] = {"replay": replayed(graph)}
        tried = backends.tried(backend, tensors)
        for name in tried:
            try:
                if name == "cudagraph":
                    runs[name] = backends.recorded(runs["replay"], graph, tensors)
                else:
                    runs[name] = backends.compiled(graph, tensors)
            except Unrepeatable as error:
                why = str(error)
                does = f"does without {name}" if tried[1:] else "replays"
                self._warn(f"compile({report['name']}): {does}, since {why}.")
        if backend == "auto" and len(runs) > 1:
            backend, why = backends.fastest(graph, tensors, runs)
        backend = backend if backend in runs else "replay"
        capture.run = runs[backend]
        report |= {"backend": backend, "why": why}


def _name_of(function: Callable) -> str:
    """Return the name of a function for users."""
    owner: Any = getattr(function, "__self__", function)
    if hasattr(owner, "options"):
        return owner.options.function
    if hasattr(owner, "name"):
        return owner.name
    name = getattr(function, "__name__", type(function).__name__)
    parts = getattr(function, "__module__", "").split(".")
    return f"{parts[1]}.{name}" if parts[0] == "vgrad" and parts[1:] else name


# Per-sample transforms.


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """The execution of a per-sample transform as graphs, of batches or of chunks.

    Each size of a batch is a capture of its own, and a Poisson batch has another one at
    every step. So batches are filled up to `batch_sizes` by copies of the first sample,
    which a mask leaves out.
    """

    plain: Transform  # in eager mode
    captures: Captures
    batch_sizes: tuple[int, ...] | None

    def of(self, plain: Transform) -> "Captured":
        """Return the execution of another transform, with captures of its own."""
        return replace(self, plain=plain, captures=copy.copy(self.captures))

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return a report of every capture."""
        return self.captures.reports()

    def clear(self) -> None:
        """Forget all captures."""
        self.captures.clear()

    def explanation(self, eager: Any) -> CompiledExplanation:
        """Explain captures, beside the report of eager mode."""
        return self.captures.explanation(eager)

    def __call__(
        self,
        transform: Transform,
        inputs: Inputs,
        across: Across | None = None,
    ) -> Any:
        """Compute the quantity of a batch."""
        # Other ranks take part outside of the graphs: a graph is of one chunk, and the
        # batch the part of one of the ranks.
        plain, rows = self.plain, inputs.mask
        options = plain.options
        size = limit = batches.read(options.function, inputs.batch).size
        if rows is not None:
            batches.check_mask(options.function, rows, size)
        if not size or options.strategy == "loop":
            if size:
                self.captures.refuse(plain, 'strategy="loop" runs any Python')
            return eager(plain, inputs, across)
        if self.batch_sizes is not None:
            ranks = 1 if across is None else across.size
            sizes = sorted({-(-each // ranks) for each in self.batch_sizes})
            limit, total = sizes[-1], padded_size(size, sizes)
            if inputs.weights is not None:
                check_weights(inputs.weights, size)
            inputs = inputs.padded(size, total)
            rows = slice(size) if rows is None else inputs.mask
            size = total
        if options.chunk_size is not None:
            limit = min(limit, at_a_time(options.on(inputs)) or limit)
        if across is None and (size <= limit or not plain.quantity.chunked):
            result = self.captures(plain.run, inputs)
        else:
            call = replace(options, chunk_size=min(limit, size)).on(inputs)
            result = plain.evaluate(call, across, self._chunk)
        return result if inputs.mask is None else plain.selected(result, rows, inputs)

    def _chunk(self, call: Call) -> Chunk:
        batch = call.batch.sample(tuple(call.batch.tensors))
        tensors = call.params, call.buffers, batch, call.mask, call.weights, call.cross
        more = call.loss_scale, call.draws.keys, call.max_norm, call.scales
        return self.captures(self.plain.chunk, Inputs(*tensors, *more))


def checked_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Check and sort the sizes of buckets."""
    if not isinstance(batch_sizes, list | tuple) or not batch_sizes:
        raise ValueError(
            f"compile(batch_sizes={batch_sizes!r}): expected at least one size in a "
            f"list, such as [256, 320]."
        )
    sizes = (
        checks.integers("compile", minimum=1, batch_sizes=size) for size in batch_sizes
    )
    return tuple(sorted({number for numbers in sizes for number in numbers}))


def sizes_of_plan(plan: Plan) -> tuple[int, ...]:
    """Return sizes that hold all but one in about 10^4 batches of a plan.

    Batches that have a largest size are filled up to it, for one graph.
    """
    if plan.largest_batch is not None:
        return (plan.largest_batch,)
    # One and a half deviations apart: padding costs less than one on average.
    mean = plan.expected_batch_size
    deviation = math.sqrt(mean * (1 - plan.sampling_rate))
    sizes = [mean + place * deviation for place in (-1.0, 0.5, 2.0, 4.0)]
    return tuple(
        sorted({min(plan.dataset_size, max(1, math.ceil(size))) for size in sizes})
    )


def padded_size(size: int, buckets: Sequence[int]) -> int:
    """Return the size that a batch, or the rest beyond whole parts, is filled up to."""
    whole, rest = divmod(size, buckets[-1])
    if rest == 0:
        return size
    return whole * buckets[-1] + next(each for each in buckets if each >= rest)

"""The graphs of some functions, one for each kind of arguments and surroundings."""

import dataclasses
import hashlib
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.compiled import backends, verification
from vgrad.compiled.graph import Graph, captured, replayed
from vgrad.compiled.guards import Signature, description, in_words, signature
from vgrad.conditions import Unrepeatable
from vgrad.generators import RNG_LOCK, RandomState, random_state, set_random_state
from vgrad.loss.values import DIFFER, SplitBatch
from vgrad.persample.engine import constant
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
        key: dtypes and shapes in the order of arguments, and torch's switches.
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
                *(_shortened(each.key), each.why),
            )
            for each in self.captures
        ]
        text = table([head, *cells], right={2, 3, 4, 5}) if cells else "no captures yet"
        return text if self.eager is None else f"{text}\n\n{self.eager}"


def _shortened(key: str) -> str:
    tensors, *switches = key.split("; ")
    shown = tensors.split("], ")
    if len(shown) > 3:  # the last ones are the batch
        tensors = f"{len(shown) - 3} others, {'], '.join(shown[-3:])}"
    return "; ".join([tensors, *switches])


# Captures.


@dataclasses.dataclass(eq=False)
class _Capture:
    function: Callable
    signature: tuple
    matches: Callable[..., bool]  # whether tensors are like the first ones
    report: dict[str, Any]  # entries of it
    graph: Graph | None = None  # None if there is none, or it was given up
    run: backends.Run | None = None  # None if samples were in doubt: verify it later
    differentiable: bool = False  # in eager mode, so that a derivative must raise
    calls: int = 0
    redos: int = 0
    in_a_row: int = 0  # results dropped, one after the other

    def marked(self, result: Any, tensors: list[Tensor]) -> Any:
        """Mark a result as a constant, where eager mode has a graph of autograd."""
        return constant("compile", result, tensors) if self.differentiable else result


class Captures:
    """Runs functions as graphs, each captured at its first call of a kind.

    Where `private`, a graph that no longer agrees with eager mode raises.
    """

    def __init__(
        self,
        backend: Backend | Mapping[str, str],
        fallback: Fallback,
        *,
        verify: bool,
        private: bool = False,
    ) -> None:
        names = [*backend.values()] if isinstance(backend, Mapping) else [backend]
        for name in names:
            checks.choice("compile", get_args(Backend), backend=name)
        checks.choice("compile", get_args(Fallback), fallback=fallback)
        self._backend = backend
        self.compiles = not {"inductor", "auto"}.isdisjoint(names)
        self._fallback = fallback
        self._verify, self._private = verify, private
        self._captures: list[_Capture] = []
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple:
        options = self._backend, self._fallback
        more = {"verify": self._verify, "private": self._private}
        return partial(Captures, **more), options

    def clear(self) -> None:
        """Forget all captures."""
        self._captures, self._warned = [], set()

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
        tensors: list[Tensor] = []
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
            call = signature(arguments, tensors)
        except Unrepeatable as error:
            self.refuse(function, error)
            return function(*arguments)
        capture = self._known(function, call)
        if capture is None or (capture.run is None and capture.graph):
            with RNG_LOCK:
                capture = self._known(function, call)  # of another thread
                if capture is None or (capture.run is None and capture.graph):
                    return self._first(capture, function, call, arguments, tensors)
        return self._run(capture, arguments, tensors)

    def _known(self, function: Callable, call: Signature) -> _Capture | None:
        """Return the capture of a kind, if all that it closes over is as it was."""
        for capture in self._captures:
            if capture.signature == call.key and capture.matches(*call.distinct):
                if capture.function == function:
                    if capture.graph is None or capture.graph.values.hold():
                        return capture
        return None

    def refuse(self, function: Callable, why: Unrepeatable | str) -> None:
        """Warn once that a function runs in eager mode, or raise."""
        text = f"compile({_name_of(function)}): runs in eager mode, since {why}."
        if self._fallback == "error":
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

    def _run(self, capture: _Capture, arguments: tuple, tensors: list[Tensor]) -> Any:
        """Run a graph, and then the function itself where the flag is up."""
        graph, run = capture.graph, capture.run
        if graph is None or run is None:
            return capture.function(*arguments)
        # A power of two from the second on.
        calls = capture.calls + 1
        checks = self._verify and calls > 1 and not calls & (calls - 1)
        with RNG_LOCK if graph.draws or checks else nullcontext():
            before = random_state(tensors) if graph.draws or checks else None
            result = backends.result(run, graph, tensors)
            capture.calls = calls
            if result is None:
                if before is not None:
                    set_random_state(before)
                capture.redos += 1
                self._count_dropped(capture)
                return capture.function(*arguments)
            capture.in_a_row = 0
            if before is not None and checks:
                result = self._again(capture, arguments, tensors, before, result)
        return capture.marked(result, tensors)

    def _again(
        self,
        capture: _Capture,
        arguments: tuple,
        tensors: list[Tensor],
        before: RandomState,
        result: Any,
    ) -> Any:
        """Return a result if it agrees with eager mode; if not, eager mode's."""
        after = random_state(tensors)
        try:
            backend = capture.report["backend"]
            self._check(capture, backend, capture.run, arguments, before, result)
        except Unrepeatable as error:
            text = (
                f"at its call {capture.calls} {error}. A value that the loss reads has "
                f"changed where compile does not look for it, or the loss keeps "
                f"something from call to call. Make the value a buffer, or call "
                f".clear() after a change"
            )
            if self._private:
                raise RuntimeError(
                    f"compile({capture.report['name']}): expected a graph that agrees "
                    f"with eager mode, but {text}. Nothing of this step was released."
                ) from error
            self._give_up(capture, text)
            set_random_state(before)
            return capture.function(*arguments)
        set_random_state(after)
        return result

    def _check(
        self,
        capture: _Capture,
        backend: str,
        run: Any,
        arguments: tuple,
        before: RandomState,
        result: Any = None,
        expected: Any = None,
    ) -> None:
        """Refuse a graph that does not agree with eager mode."""
        graph: Any = capture.graph

        def fast(*given: Any) -> Any:
            set_random_state(before)
            return backends.result(run, graph, tree.tensors(given))

        def eager(*given: Any) -> Any:
            set_random_state(before)
            return capture.function(*given)

        own: Any = {"draws": graph.draws, "closed": graph.closed}
        if backend == "inductor":
            verification.close(fast, eager, arguments, **own)
            return
        first = expected is not None
        expected = expected if first else eager(*arguments)
        result = fast(*arguments) if result is None else result
        both = result, expected
        verification.replays(*both, fast, eager, arguments, first=first, **own)

    def _count_dropped(self, capture: _Capture) -> None:
        """Count a result that was dropped; after some in a row give up."""
        capture.in_a_row += 1
        if capture.in_a_row >= _IN_A_ROW:
            text = (
                f"{capture.in_a_row} calls in a row had doubtful samples, or samples "
                f"that {DIFFER}"
            )
            self._give_up(capture, text)

    def _give_up(self, capture: _Capture, why: Unrepeatable | str) -> None:
        capture.graph = capture.run = None
        capture.report |= {"backend": "eager", "why": str(why)}
        self.refuse(capture.function, why)

    def _first(
        self,
        capture: _Capture | None,
        function: Callable,
        call: Signature,
        arguments: tuple,
        tensors: list[Tensor],
    ) -> Any:
        """Run a function in eager mode, and capture it for the next call."""
        before, matches = random_state(tensors), like(call.distinct)
        described = repr((call.key[0], [*map(description, call.distinct)]))
        expected = split = None
        try:
            expected = function(*arguments)
        except SplitBatch as error:
            if len(error.parts.rows) == 1:  # another strategy runs it
                raise
            split = error
        if capture is None:
            known = [x for x in self._captures if x.graph and x.function == function]
            if len(known) >= _MOST and split is None:
                self.refuse(function, f"there are {_MOST} captures already")
                return expected
            kind = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
            report = {
                "name": _name_of(function),
                "kind": kind,
                "backend": "eager",
                "build_seconds": 0.0,
                "key": in_words(call.distinct),
            }
            capture = _Capture(function, call.key, matches, report)
            wanted = (each.requires_grad for each in tree.tensors(expected))
            capture.differentiable = any(wanted)
            self._captures.append(capture)
        if split is not None:
            self._give_up(capture, f"samples {DIFFER} at {split.parts.where}")
            raise split
        after = random_state(tensors)
        start = time.perf_counter()
        try:
            set_random_state(before)
            graph = capture.graph = capture.graph or captured(function, arguments)
            return self._verified(capture, graph, arguments, tensors, before, expected)
        except SplitBatch:  # the next call has keys, and is one of another kind
            self._captures.remove(capture)
            return expected
        except Unrepeatable as error:
            self._give_up(capture, error)
            return expected
        finally:
            capture.report["build_seconds"] += time.perf_counter() - start
            set_random_state(after)

    def _verified(
        self,
        capture: _Capture,
        graph: Graph,
        arguments: tuple,
        tensors: list[Tensor],
        before: RandomState,
        expected: Any,
    ) -> Any:
        """Choose the backend of a graph, and return its result.

        In doubt that is the result of eager mode, and the next call chooses.
        """

        def result_of(run: Callable) -> Any:
            set_random_state(before)
            return backends.result(run, graph, tensors)

        replay = replayed(graph)
        result = result_of(replay)
        if result is None:
            self._count_dropped(capture)
            return expected
        capture.in_a_row = 0
        if isinstance(self._backend, Mapping):
            backend = self._backend.get(capture.report["kind"], "replay")
            why = "as chosen before"
        else:
            backend, why = self._backend, "as asked for"
        runs: dict[str, Callable] = {"replay": replay}
        refused: dict[str, str] = {}
        for name in backends.tried(backend, tensors):
            try:
                if name == "cudagraph":
                    runs[name] = run = backends.recorded(replay, graph, tensors)
                else:
                    runs[name] = run = backends.compiled(graph, tensors)
                if self._verify:
                    given = arguments, before
                    self._check(capture, name, run, *given, expected=expected)
            except Unrepeatable as error:
                runs.pop(name, None)
                refused[name] = why = str(error)
        for name, text in refused.items():
            does = "replays" if len(runs) == 1 else f"does without {name}"
            self._warn(f"compile({capture.report['name']}): {does}, since {text}.")
        if backend == "auto" and len(runs) > 1:
            backend, why = backends.fastest(graph, tensors, runs)
        backend = backend if backend in runs else "replay"
        run = runs[backend]
        if run is not replay:
            result = result_of(run)
        elif self._verify:
            self._check(capture, backend, run, arguments, before, result, expected)
        capture.run = run
        capture.report |= {"backend": backend, "why": why, "nodes": graph.nodes}
        if run is replay or result is None:
            return expected
        return capture.marked(result, tensors)


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

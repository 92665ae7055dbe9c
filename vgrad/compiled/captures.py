"""The graphs of some functions, one for each kind of arguments and surroundings."""

import hashlib
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.compiled import verification
from vgrad.compiled.graph import Graph, captured
from vgrad.compiled.replay import replayed
from vgrad.compiled.signature import is_watched, signature, surroundings
from vgrad.conditions import Unrepeatable
from vgrad.dtypes import no_autocast
from vgrad.generators import ALONE, random_state, set_random_state
from vgrad.persample.engine import constant
from vgrad.torch_private import modes, tracing

Backend = Literal["replay", "inductor", "auto"]
BACKENDS = ("replay", "inductor", "auto")
Fallback = Literal["eager", "error"]

_MOST = 16
"""Captures of one object; more would mean that shapes never repeat."""

_IN_A_ROW = 3
"""Results dropped one after the other until a capture is given up."""


class CompileWarning(UserWarning):
    """Something runs in eager mode that was to be compiled: right numbers, but slow."""


class Report(NamedTuple):
    """What is known of one capture.

    Attributes:
        name: the function.
        kind: a hash of the shapes, dtypes and so on of its arguments.
        backend: what runs the graph, or "eager" where there is none.
        why: the reason for that.
        nodes: how many ops the graph has.
        build_seconds: what the capture took, compilation included.
        calls: how often the graph ran.
        redos: how often its result was dropped and computed in eager mode.
    """

    name: str
    kind: str
    backend: str
    why: str = ""
    nodes: int = 0
    build_seconds: float = 0.0
    calls: int = 0
    redos: int = 0


@dataclass(eq=False)
class _Capture:
    """One graph and what runs it; None if there is none, or it was given up."""

    function: Callable
    key: list
    report: Report
    graph: Graph | None = None
    run: Callable[..., Sequence[Tensor]] | None = None
    differentiable: bool = False  # in eager mode, so that a derivative must raise
    calls: int = 0
    redos: int = 0
    in_a_row: int = 0  # of these the last ones


class Captures:
    """Runs functions as graphs, each captured at its first call of a kind."""

    def __init__(
        self,
        backend: Backend | Mapping[str, str],
        fallback: Fallback,
        *,
        verify: bool,
    ) -> None:
        """Start without captures; a mapping has the backend by kind."""
        if not isinstance(backend, Mapping):
            checks.one_of("compile", BACKENDS, backend=backend)
        checks.one_of("compile", ("eager", "error"), fallback=fallback)
        self._backend = backend
        self._fallback = fallback
        self._verify = verify
        self._found: list[_Capture] = []
        self._lock = threading.RLock()
        self._told: set[str] = set()

    def reports(self) -> tuple[Report, ...]:
        """Return what is known of every capture."""
        return tuple(
            each.report._replace(calls=each.calls, redos=each.redos)
            for each in self._found
        )

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        """Return what the function returns: from its graph, or in eager mode."""
        tensors: list[Tensor] = []
        try:
            if is_watched():
                raise Unrepeatable(
                    "a transform of torch.func or a mode is on around it"
                )
            key = [signature(arguments, tensors), surroundings()]
        except Unrepeatable as error:
            self.refuse(function, error)
            return function(*arguments)
        for capture in self._found:
            if capture.key == key and capture.function == function:
                if capture.graph is None:
                    return function(*arguments)
                if capture.graph.guards.hold():
                    return self._run(capture, arguments, tensors)
        with self._lock, ALONE:
            return self._first(function, key, arguments, tensors)

    def refuse(self, function: Callable, why: Unrepeatable | str) -> None:
        """Warn once that a function runs in eager mode, or raise.

        Raises:
            RuntimeError: the fallback is an error.
        """
        text = f"compile({name_of(function)}): runs in eager mode, since {why}."
        if self._fallback == "error":
            cause = why if isinstance(why, Unrepeatable) else None
            raise RuntimeError(
                f"{text} Expected something that can be captured. Change it, or pass "
                f'fallback="eager".'
            ) from cause
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, CompileWarning, stacklevel=2)

    def _run(self, capture: _Capture, arguments: tuple, tensors: list[Tensor]) -> Any:
        """Run a graph, and the function itself where the graph says so."""
        graph, run = capture.graph, capture.run
        assert graph is not None
        assert run is not None
        if graph.draws:
            with ALONE:
                before = random_state(tensors)
                *outputs, flag = _outputs(run, graph, tensors)
                doubtful = bool(flag)
                if doubtful:
                    set_random_state(before)
        else:
            *outputs, flag = _outputs(run, graph, tensors)
            doubtful = bool(flag)
        calls, redos = capture.report.calls + 1, capture.report.redos + doubtful
        capture.report = capture.report._replace(calls=calls, redos=redos)
        capture.in_a_row = capture.in_a_row + 1 if doubtful else 0
        if capture.in_a_row == _IN_A_ROW:
            self._give_up(capture, f"{_IN_A_ROW} calls in a row had doubtful samples")
        if doubtful:
            return capture.function(*arguments)
        result = graph.result(outputs)
        return (
            constant("compile", result, tensors) if capture.differentiable else result
        )

    def _give_up(self, capture: _Capture, why: str) -> None:
        """Run in eager mode from now on."""
        capture.graph = capture.run = None
        capture.report = capture.report._replace(backend="eager", why=why)
        self.refuse(capture.function, why)

    def _first(
        self, function: Callable, key: list, arguments: tuple, tensors: list[Tensor]
    ) -> Any:
        """Run a function in eager mode, and capture it for the next call."""
        before = random_state(tensors)
        expected = function(*arguments)
        if sum(each.graph is not None for each in self._found) >= _MOST:
            self.refuse(function, f"there are {_MOST} captures already")
            return expected
        after = random_state(tensors)
        kind = hashlib.blake2b(repr(key[0]).encode(), digest_size=8).hexdigest()
        capture = _Capture(function, key, Report(name_of(function), kind, "eager"))
        capture.differentiable = any(x.requires_grad for x in tree.tensors(expected))
        try:
            set_random_state(before)
            self._build(capture, tensors, arguments)
            set_random_state(before)
            expected = self._checked(capture, arguments, tensors, expected)
        except Unrepeatable as error:
            capture.graph = capture.run = None
            capture.report = capture.report._replace(backend="eager", why=str(error))
            self.refuse(function, error)
        finally:
            set_random_state(after)
            self._found.append(capture)
        return expected

    def _build(
        self, capture: _Capture, tensors: list[Tensor], arguments: tuple
    ) -> None:
        """Capture a function, and choose what runs its graph."""
        start = time.perf_counter()
        graph = captured(capture.function, arguments)
        backend, why = self._backend, "as asked for"
        if isinstance(backend, Mapping):
            backend, why = (
                backend.get(capture.report.kind, "replay"),
                "as chosen before",
            )
        run: Any = replayed(graph.module)
        if backend != "replay":
            try:
                compiled = tracing.compiled(graph.module, [*tensors, *graph.closed])
                if backend == "auto":
                    backend, why = _faster(graph, tensors, run, compiled)
                run = compiled if backend == "inductor" else run
            except Exception as error:  # of a compiler that is not there, for one
                text = str(error).partition("\n")[0]
                backend, why = "replay", f"Inductor fails: {text}"
                text = f"compile({capture.report.name}): replays, since {why}"
                warnings.warn(text, CompileWarning, stacklevel=2)
        capture.graph, capture.run = graph, run
        seconds = time.perf_counter() - start
        capture.report = capture.report._replace(
            backend=str(backend), why=why, nodes=graph.nodes, build_seconds=seconds
        )

    def _checked(
        self,
        capture: _Capture,
        arguments: tuple,
        tensors: list[Tensor],
        expected: Any,
    ) -> Any:
        """Return what the graph finds, compared with what eager mode does.

        So the first call has the numbers of later ones. In doubt, eager mode has them.
        """
        graph, run = capture.graph, capture.run
        assert graph is not None
        assert run is not None
        *outputs, flag = _outputs(run, graph, tensors)
        if bool(flag):
            return expected
        found = graph.result(outputs)
        if self._verify and capture.report.backend == "replay":
            verification.same_bits(found, expected)
        elif self._verify:
            function = capture.function
            verification.close(found, expected, function, arguments, draws=graph.draws)
        if capture.differentiable:
            return constant("compile", found, tensors)
        return found


def name_of(function: Callable) -> str:
    """Return the name under which users know what is captured."""
    owner = getattr(function, "__self__", None)
    options = getattr(owner, "options", None)
    if options is not None:
        return options.function
    return getattr(function, "__name__", type(function).__name__)


def _outputs(
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


def _faster(
    graph: Graph, tensors: list[Tensor], replay: Callable, compiled: Callable
) -> tuple[str, str]:
    """Time both backends in turns, and choose."""
    times: dict[Callable, list[float]] = {replay: [], compiled: []}
    for _ in range(_ROUNDS):
        for run, taken in times.items():
            start = time.perf_counter()
            bool(_outputs(run, graph, tensors)[-1])  # waits for a device
            taken.append(time.perf_counter() - start)
    slow, fast = (statistics.median(each) * 1e3 for each in times.values())
    backend = "inductor" if fast < slow else "replay"
    return backend, f"replay took {slow:.3g} ms, Inductor {fast:.3g} ms"

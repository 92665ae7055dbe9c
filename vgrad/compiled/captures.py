"""The graphs of some functions, one for each kind of arguments and surroundings."""

import enum
import hashlib
import operator
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vgrad import checks, tree
from vgrad.compiled import backends, recording, verification
from vgrad.compiled.graph import Graph, captured
from vgrad.compiled.guards import description, is_plain
from vgrad.compiled.replay import replayed
from vgrad.compiled.reports import CaptureReport
from vgrad.conditions import Unrepeatable
from vgrad.generators import RNG_LOCK, RandomState, random_state, set_random_state
from vgrad.persample.engine import constant
from vgrad.persample.rules.table import RULES
from vgrad.torch_private import kernels, modes, tracing
from vgrad.torch_private.tensors import like

_KINDS = {Tensor, nn.Parameter, nn.Buffer}
_LAYOUT = operator.attrgetter("layout")


class Signature(NamedTuple):
    """What a graph is captured for.

    Attributes:
        key: the structure of the arguments, without shapes, and torch's switches.
        distinct: the tensors, each of them once.
    """

    key: tuple[list, tuple]
    distinct: list[Tensor]


def signature(arguments: Any, tensors: list[Tensor]) -> Signature:
    """Describe arguments, and append their tensors in the order of their leaves.

    Raises:
        Unrepeatable: a tensor is of another class than torch's own, or not strided.
    """
    found: list[Any] = []
    _describe(arguments, tensors, found)
    if [*map(_LAYOUT, tensors)].count(torch.strided) < len(tensors):
        raise Unrepeatable("an argument is a tensor that is not strided")
    if any(
        map(vars, tensors)
    ):  # attributes that users put there, which a loss can read
        found.append([[*map(_noted, vars(each).items())] for each in tensors])
    if not torch.is_grad_enabled():  # otherwise it is compared with the shapes
        found.append([tensor.requires_grad for tensor in tensors])
    distinct = dict(zip(map(id, tensors), tensors, strict=True))
    if len(distinct) < len(tensors):  # the loss may ask whether two are the same
        ids = [*distinct]
        found.append([ids.index(id(tensor)) for tensor in tensors])
    return Signature((found, _surroundings()), [*distinct.values()])


def _describe(value: Any, tensors: list[Tensor], found: list[Any]) -> None:
    kind = type(value)
    if kind in _KINDS:
        tensors.append(value)
        found.append(kind)
    elif kind is dict:
        found.append(tuple(value))
        kinds = [*map(type, value.values())]
        if _KINDS.issuperset(kinds):
            tensors += value.values()
            found += kinds
        else:
            for each in value.values():
                _describe(each, tensors, found)
    elif kind is tuple or kind is list or hasattr(kind, "_fields"):
        found.append((kind, len(value)))
        for each in value:
            _describe(each, tensors, found)
    elif value is None or kind is bool or kind is int or kind is str:
        found.append((kind, value))
    else:
        leaves, spec = tree.tree_flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            found.append(spec)
            for leaf in leaves:
                _describe(leaf, tensors, found)
        elif is_plain(value):  # as text: 0.0 is not -0.0, and nan is nan
            found.append((kind, repr(value)))
        elif callable(value) or isinstance(value, enum.Enum):  # followed by `Closed`
            parts = (getattr(value, name, value) for name in ("__self__", "__func__"))
            found.append([*map(id, parts)])
        else:
            raise Unrepeatable(
                f"an argument is a {kind.__module__}.{kind.__qualname__}"
            )


def _noted(item: tuple[str, Any]) -> tuple:
    """Describe an attribute of a tensor, which `Closed` follows if it is not plain."""
    name, value = item
    return name, type(value), repr(value) if is_plain(value) else id(value)


def in_words(distinct: Sequence[Tensor]) -> str:
    """Say what a capture is of: tensors in the order of arguments, torch's switches.

    Example:
        >>> in_words([torch.ones(2, 3), torch.tensor(1)]).partition(";")[0]
        'float32 [2, 3], int64 []'
    """
    tensors = [f"{_short(each.dtype)} {list(each.shape)}" for each in distinct]
    switches = [f"{torch.get_num_threads()} threads"]
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = _short(torch.get_autocast_dtype(device))
            switches.append(f"autocast of {device} to {dtype}")
    if torch.is_inference_mode_enabled():
        switches.append("inference mode")
    elif not torch.is_grad_enabled():
        switches.append("no grad")
    if torch.are_deterministic_algorithms_enabled():
        switches.append("deterministic")
    return "; ".join([", ".join(tensors), *switches])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _surroundings() -> tuple:
    """Return what else decides what an op does: torch's switches, and all rules."""
    casts = None
    if modes.autocast_is_on():
        casts = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        )
    return (
        casts,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mha.get_fastpath_enabled(),
        nn.Module.__call__,
        nn.Module.__getattr__,
        *[allowed() for allowed in _ATTENTION],
        *map(kernels.fp32_precision, *_ROUNDING),
        *modes.function_modes(),
        *RULES.values(),
    )


_ATTENTION = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
"""The forms of attention that `torch.nn.attention.sdpa_kernel` switches."""

_ROUNDING = ("cuda",) * 3 + ("mkldnn",) * 3, ("matmul", "conv", "rnn") * 2
"""The backends and ops for which torch has a switch that lets float32 be rounded."""


def is_watched() -> bool:
    """Tell whether transforms or modes are on, which a graph would not answer to.

    The mode of `torch.set_default_device` only matters to what makes tensors.
    """
    return bool(
        modes.inside_transform()
        or tracing.dispatch_modes()
        or torch.is_anomaly_enabled()
        or any(type(each) is not modes.DeviceMode for each in modes.function_modes())
    )


Backend = Literal["replay", "inductor", "cudagraph", "auto"]
Fallback = Literal["eager", "error"]

_MOST = 16
"""Captures of one object; more would mean that shapes never repeat."""

_IN_A_ROW = 3
"""Results dropped one after the other until a capture is given up."""


class CompileWarning(UserWarning):
    """Something runs in eager mode that was to be compiled: right numbers, but slow."""


@dataclass(eq=False)
class _Capture:
    """One graph and what runs it; None if there is none, or it was given up."""

    function: Callable
    key: tuple
    alike: Callable[..., bool]  # tells whether tensors are like those of the first call
    report: CaptureReport
    graph: Graph | None = None
    run: Callable[..., Sequence[Tensor]] | None = None
    differentiable: bool = False  # in eager mode, so that a derivative must raise
    build_seconds: float = 0.0
    calls: int = 0
    redos: int = 0
    in_a_row: int = 0  # results dropped, one after the other

    def marked(self, result: Any, tensors: list[Tensor]) -> Any:
        """Mark a result as a constant, where that of eager mode is one."""
        return constant("compile", result, tensors) if self.differentiable else result


class Captures:
    """Runs functions as graphs, each captured at its first call of a kind."""

    def __init__(
        self,
        backend: Backend | Mapping[str, str],
        fallback: Fallback,
        *,
        verify: bool,
    ) -> None:
        asked = backend.values() if isinstance(backend, Mapping) else [backend]
        for each in asked:
            checks.choice("compile", get_args(Backend), backend=each)
        checks.choice("compile", get_args(Fallback), fallback=fallback)
        self._backend = backend
        self._fallback = fallback
        self._verify = verify
        self._found: list[_Capture] = []
        self._lock = threading.RLock()
        self._told: set[str] = set()

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return what is known of every capture."""
        return tuple(
            replace(
                each.report,
                build_seconds=each.build_seconds,
                calls=each.calls,
                redos=each.redos,
            )
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
            given = signature(arguments, tensors)
        except Unrepeatable as error:
            self.refuse(function, error)
            return function(*arguments)
        capture = self._known(function, given)
        if capture is None or (capture.run is None and capture.graph):
            with self._lock, RNG_LOCK:
                capture = self._known(function, given)  # of another thread
                if capture is None or (capture.run is None and capture.graph):
                    return self._first(capture, function, given, arguments, tensors)
        return self._run(capture, arguments, tensors)

    def _known(self, function: Callable, given: Signature) -> _Capture | None:
        """Return the capture of a kind, if what it closes over is as it was."""
        for capture in self._found:
            if capture.key == given.key and capture.alike(*given.distinct):
                if capture.function == function:
                    graph = capture.graph
                    if graph is None or graph.guards.hold(given.distinct):
                        return capture
        return None

    def __reduce__(self) -> tuple:
        options = self._backend, self._fallback
        return partial(Captures, verify=self._verify), options

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
        self._warn(text)

    def _run(self, capture: _Capture, arguments: tuple, tensors: list[Tensor]) -> Any:
        """Run a graph, and the function itself where the graph says so."""
        graph, run = capture.graph, capture.run
        if graph is None or run is None:
            return capture.function(*arguments)
        with RNG_LOCK if graph.draws else nullcontext():
            before = random_state(tensors) if graph.draws else None
            *outputs, flag = backends.outputs(run, graph, tensors)
            capture.calls += 1
            if not bool(flag):
                capture.in_a_row = 0
                return capture.marked(graph.result(outputs), tensors)
            if before is not None:
                set_random_state(before)
            capture.redos += 1
            self._doubted(capture)
            return capture.function(*arguments)

    def _doubted(self, capture: _Capture) -> None:
        """Count a result that was dropped; give up after some in a row."""
        capture.in_a_row += 1
        if capture.in_a_row == _IN_A_ROW:
            self._give_up(capture, f"{_IN_A_ROW} calls in a row had doubtful samples")

    def _first(
        self,
        capture: _Capture | None,
        function: Callable,
        given: Signature,
        arguments: tuple,
        tensors: list[Tensor],
    ) -> Any:
        """Run a function in eager mode, and make ready what runs it next time.

        A capture that is there already was in doubt when it was made.
        """
        before, alike = random_state(tensors), like(given.distinct)
        described = repr((given.key[0], [*map(description, given.distinct)]))
        expected = function(*arguments)
        if capture is None:
            if sum(each.graph is not None for each in self._found) >= _MOST:
                self.refuse(function, f"there are {_MOST} captures already")
                return expected
            kind = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
            key = in_words(given.distinct)
            report = CaptureReport(name_of(function), kind, "eager", key=key)
            capture = _Capture(function, given.key, alike, report)
            wanted = (each.requires_grad for each in tree.tensors(expected))
            capture.differentiable = any(wanted)
            self._found.append(capture)
        after = random_state(tensors)
        start = time.perf_counter()
        try:
            set_random_state(before)
            if capture.graph is None:
                capture.graph = captured(function, arguments)
                capture.graph.guards.note_arguments(given.distinct)
            return self._verified(capture, arguments, tensors, before, expected)
        except Unrepeatable as error:
            self._give_up(capture, str(error), error)
            return expected
        finally:
            capture.build_seconds += time.perf_counter() - start
            set_random_state(after)

    def _verified(
        self,
        capture: _Capture,
        arguments: tuple,
        tensors: list[Tensor],
        before: RandomState,
        expected: Any,
    ) -> Any:
        """Choose what runs a graph, and return what that finds.

        So the first call has the numbers of later ones. In doubt, eager mode has them,
        and the next call chooses.
        """
        graph = capture.graph
        assert graph is not None

        def found(run: Callable, *given: Any) -> Any:
            set_random_state(before)
            *outputs, flag = backends.outputs(run, graph, tree.tensors(given))
            return None if bool(flag) else graph.result(outputs)

        def eager(*given: Any) -> Any:
            set_random_state(before)
            return capture.function(*given)

        replay = replayed(graph.module)
        result = found(replay, *arguments)
        if result is None:
            self._doubted(capture)
            return expected
        backend, why = self._asked_for(capture)
        runs: dict[str, Callable] = {"replay": replay}
        refused: dict[str, str] = {}
        for name in backends.tried(backend, tensors):
            try:
                if name == "cudagraph":
                    runs[name] = run = recording.recorded(replay, graph, tensors)
                    if self._verify:
                        verification.same_bits(found(run, *arguments), expected)
                else:
                    runs[name] = run = backends.compiled(graph, tensors)
                    if self._verify:
                        fast = partial(found, run)
                        verification.close(fast, eager, arguments, draws=graph.draws)
            except Unrepeatable as error:
                runs.pop(name, None)
                refused[name] = why = str(error)
        for name, text in refused.items():
            does = "replays" if len(runs) == 1 else f"does without {name}"
            self._warn(f"compile({capture.report.name}): {does}, since {text}.")
        if backend == "auto" and len(runs) > 1:
            backend, why = backends.fastest(graph, tensors, runs)
        backend = backend if backend in runs else "replay"
        run = runs[backend]
        if run is not replay:
            result = found(run, *arguments)
        elif self._verify:
            verification.same_bits(result, expected)
        capture.run = run
        capture.report = replace(
            capture.report, backend=backend, why=why, nodes=graph.nodes
        )
        if run is replay or result is None:
            return expected
        return capture.marked(result, tensors)

    def _asked_for(self, capture: _Capture) -> tuple[str, str]:
        if isinstance(self._backend, Mapping):
            return self._backend.get(capture.report.kind, "replay"), "as chosen before"
        return self._backend, "as asked for"

    def _give_up(
        self, capture: _Capture, why: str, error: Unrepeatable | None = None
    ) -> None:
        """Run in eager mode from now on."""
        capture.graph = capture.run = None
        capture.report = replace(capture.report, backend="eager", why=why)
        self.refuse(capture.function, error or why)

    def _warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, CompileWarning, stacklevel=2)


def name_of(function: Callable) -> str:
    """Return the name under which users know what is captured."""
    owner: Any = getattr(function, "__self__", function)
    if hasattr(owner, "options"):
        return owner.options.function
    if hasattr(owner, "name"):
        return owner.name
    name = getattr(function, "__name__", type(function).__name__)
    parts = getattr(function, "__module__", "").split(".")
    return f"{parts[1]}.{name}" if parts[0] == "vgrad" and parts[1:] else name

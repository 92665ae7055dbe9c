"""Reports of captures, alone and beside the report of the function in eager mode."""

import dataclasses
from typing import Any

from vgrad.report import Report, table


@dataclasses.dataclass(frozen=True)
class CaptureReport(Report):
    """One capture of a compiled function.

    Attributes:
        name: the function.
        kind: a hash of the shapes, dtypes and so on of its arguments.
        backend: what runs the graph, or "eager" where there is none.
        why: the reason for that.
        nodes: how many ops the graph has.
        build_seconds: what the capture took, compilation included.
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
    """Leave out all but the last tensors, which are those of the batch."""
    tensors, *switches = key.split("; ")
    each = tensors.split("], ")
    if len(each) > _MOST:
        tensors = f"{len(each) - _MOST} others, {'], '.join(each[-_MOST:])}"
    return "; ".join([tensors, *switches])


_MOST = 3
"""Tensors of a key that a table shows."""

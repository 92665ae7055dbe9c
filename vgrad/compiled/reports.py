"""What is known of captures, and what `explain` says of compiled functions."""

import dataclasses
from typing import Any, NamedTuple

from vgrad.persample.explain import aligned


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
        key: what it is of in words: dtypes and shapes in the order of arguments, and
            torch's switches.
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
class CompiledExplanation:
    """What `explain` finds of a compiled function; `str` makes tables of it.

    Attributes:
        captures: what is known of every capture so far.
        eager: what `explain` finds of the function in eager mode; None for a step.
    """

    captures: tuple[Report, ...]
    eager: Any

    def __str__(self) -> str:
        head = ("capture", "backend", "nodes", "build", "calls", "redos", "key", "why")
        cells = [
            (
                *(each.name, each.backend, f"{each.nodes:,}"),
                *(f"{each.build_seconds:.1f} s", f"{each.calls:,}", f"{each.redos:,}"),
                *(_shortened(each.key), each.why),
            )
            for each in self.captures
        ]
        right = {2, 3, 4, 5}
        table = aligned([head, *cells], right=right) if cells else "no captures yet"
        return table if self.eager is None else f"{table}\n\n{self.eager}"


def _shortened(key: str) -> str:
    """Leave out all but the last tensors, which are those of the batch."""
    tensors, *switches = key.split("; ")
    each = tensors.split("], ")
    if len(each) > _MOST:
        tensors = f"{len(each) - _MOST} others, {'], '.join(each[-_MOST:])}"
    return "; ".join([tensors, *switches])


_MOST = 3
"""Tensors of a key that a table shows."""

"""Reports: results whose text has tables."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vgrad.typing import Strategy


class Report:
    """A result to print: its text has tables, its fields have the same as values.

    `vgrad.explain`, `reports()` of a compiled function and
    `vgrad.precision.alignment_report` return reports, with fields of their own.
    """

    __slots__ = ()


class Row(NamedTuple):
    """One use of parameters, the sum of several, or an op of an ensemble."""

    names: tuple[str, ...] = ()  # of the parameters
    op: str = ""  # or all ops that took copies of the parameter, one a sample
    factor: str = ""  # the kind of factor that holds the gradients
    # How norms are computed: from norms of "both sides" of one outer product, from
    # inner products of positions ("gram"), from "rows" of a table or from "gradients".
    # Other transforms have "gradients", or a "weighted sum" without them.
    form: str = ""
    bytes: int = 0  # that this form takes for the samples that were run
    why: str = ""  # how the factor came about


class Cost(NamedTuple):
    """The cost of a way to compute the gradients of the first chunk."""

    strategy: Strategy
    passes: int  # forward and backward; the launches of each are nearly as many
    bytes: int  # that it keeps of gradients at once


@dataclass(frozen=True)
class Explanation(Report):
    """The report of `explain`; a field that does not apply is empty."""

    function: str
    strategy: str = ""  # the one that ran
    why: str = ""  # the reason for it
    samples: int = 0  # of the first chunk or, if it splits, of its largest part
    members: int = 0  # of an ensemble
    rows: tuple[Row, ...] = ()  # the uses of each parameter, or ops of an ensemble
    parts: tuple[int, ...] = ()  # sizes of the parts of the first chunk, or of members
    splits: tuple[tuple[str, int], ...] = ()  # lines with branches, and how often
    foreign: tuple[str, ...] = ()  # nodes and ops of others, which may write anywhere
    copied: int = 0  # bytes that factors hold as copies for that reason
    written: str = ""  # the line for which each sample has tensors of its own
    hooks: tuple[str, ...] = ()  # on gradients, which run under vmap
    costs: tuple[Cost, ...] = ()  # of the strategy that ran, and of slower ones
    verified: str = ""  # how gradients compare with plain autograd
    captures: tuple[Any, ...] = ()  # of a compiled function, named tuples

    def __str__(self) -> str:
        return "\n\n".join(self._sections())

    def _sections(self) -> Iterator[str]:
        kind, size = ("member", self.members) if self.members else ("sample", 0)
        size = size or self.samples
        yield (
            f"{self.function} of {size} {kind}{'s' * (size != 1)}, "
            f"strategy {self.strategy}: {self.why}"
        )
        if self.verified:
            yield self.verified
        if self.splits:
            lines = (f"{where} ({times} x)" for where, times in self.splits)
            yield _listed(
                f"{sum(self.parts)} {kind}s run in {len(self.parts)} parts, of which "
                f"the largest is shown. They take different branches at",
                lines,
            )
        if self.foreign:
            yield (
                f"Factors hold copies, {self.copied:,} bytes, since these are not "
                f"torch's own and may write in place: {', '.join(self.foreign)}"
            )
        if self.written:
            yield (
                f"Each sample has tensors of its own, into which its values are "
                f"written at {self.written}"
            )
        if self.hooks:
            yield _listed(
                "Hooks on gradients run under a vmap over samples:", self.hooks
            )
        for rows in (self.costs, self.rows, self.captures):
            if rows:
                yield table_of(rows)


def table_of(rows: Sequence[Any]) -> str:
    """Align named tuples of one kind in columns, and leave empty columns out."""
    names = rows[0]._fields
    kept = [n for n in range(len(names)) if any(row[n] for row in rows)]
    right = {at for at, n in enumerate(kept) if isinstance(rows[0][n], int)}
    cells = [[row[n] for n in kept] for row in rows]
    texts = [
        [", ".join(c) if isinstance(c, tuple) else c for c in row] for row in cells
    ]
    return table([[names[n] for n in kept], *texts], right=right)


def _listed(head: str, lines: Iterable[str]) -> str:
    return "\n".join([head, *(f"  {line}" for line in lines)])


def table(rows: Sequence[Sequence[str | int]], *, right: Collection[int] = ()) -> str:
    """Align cells in columns, those numbered in `right` at their right edge."""
    lines = [[f"{c:,}" if isinstance(c, int) else c for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

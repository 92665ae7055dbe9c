"""What `explain` finds, as a table."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One use of parameters, or the sum of several.

    Attributes:
        names: the parameters.
        op: the op, or those that asked for copies of the parameter, one a sample.
        factor: the kind of factor that holds the gradients.
        form: how norms are computed: from those of `"both sides"` of one outer
            product, from inner products of positions (`"gram"`), from the `"rows"` of a
            table or from the `"gradients"` themselves. Transforms that need no norms
            have `"gradients"`, or a `"weighted sum"` without them.
        bytes: memory that this form takes for the samples that were run.
        why: how the factor came about.
    """

    names: tuple[str, ...]
    op: str
    factor: str
    form: str
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` finds; `str` makes a table of it.

    Attributes:
        function: the transform's name.
        strategy: the strategy that ran.
        why: why it was that one.
        samples: how many samples the rows are of, those of the first chunk or, if it
            falls into parts, of the largest.
        rows: what happens to each parameter.
        parts: the sizes of the parts of the first chunk; one, if it does not split.
        splits: the lines that ask what its samples answer differently, and how often it
            or one of its parts splits there.
        foreign: the nodes of the graph and the ops that are not torch's own, which may
            write into any tensor that they reach.
        copied: bytes that factors hold as copies for that reason.
    """

    function: str
    strategy: str
    why: str
    samples: int
    rows: tuple[Row, ...]
    parts: tuple[int, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()
    foreign: tuple[str, ...] = ()
    copied: int = 0

    def __str__(self) -> str:
        """Return an aligned table in plain text."""
        head = ("parameter", *Row._fields[1:])
        cells = [
            (", ".join(row.names), *row[1:4], f"{row.bytes:,}", row.why)
            for row in self.rows
        ]
        samples = f"{self.samples} sample{'s' * (self.samples != 1)}"
        title = f"{self.function} of {samples}, strategy {self.strategy}: {self.why}"
        if self.splits:
            lines = [f"  {where} ({times} x)" for where, times in self.splits]
            title += (
                f"\n\n{sum(self.parts)} samples run in {len(self.parts)} parts, of "
                f"which this is the largest. They take different branches at\n"
            ) + "\n".join(lines)
        if self.foreign:
            title += (
                f"\n\nFactors hold copies, {self.copied:,} bytes, since these are not "
                f"torch's own and may write in place: {', '.join(self.foreign)}"
            )
        return f"{title}\n\n{aligned([head, *cells], right={4})}"


def aligned(lines: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Lay cells out in columns, those numbered in `right` at their right edge.

    Example:
        >>> print(aligned([("op", "bytes"), ("linear", "8")], right={1}))
        op      bytes
        linear      8
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

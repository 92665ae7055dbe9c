"""Reports: results whose text has tables."""

from collections.abc import Collection, Sequence


class Report:
    """A result to print: its text has tables, its fields have the same as values.

    `vgrad.explain`, `reports()` of a compiled function and
    `vgrad.precision.alignment_report` return reports, with fields of their own.
    """

    __slots__ = ()


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

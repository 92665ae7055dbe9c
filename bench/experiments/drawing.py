"""How figures and tables look: colours that all can tell apart, axes with units."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

from vgrad.cli.report import COLOURS as COLOURS

MARKERS = "osD^vPX"
MEBIBYTE = 2**20


def line(axes: Axes, at: list, values: list, label: str, number: int, **more) -> None:
    """Draw a line in the colour and with the marker of its number."""
    axes.plot(
        at,
        values,
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        label=label,
        **more,
    )


def by_powers(axes: Axes, at: list[int]) -> None:
    """Put ticks at the powers of two that were measured, as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(tick) for tick in at])
    axes.minorticks_off()


def finish(axes: Axes, title: str, x: str, y: str, *, legend: bool = True) -> None:
    """Set title and labels; the legend goes where it covers least."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize="small", framealpha=0.8)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)

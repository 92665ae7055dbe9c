"""What a run prints: a table that moves on a terminal, lines elsewhere."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vgrad.cli.metrics import RUNS, Record
from vgrad_command import printable

COLUMNS = ("loss", "held-out accuracy", "epsilon", "samples/s")


class _Lines:
    """One line after each epoch, for logs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def step(self, taken: int) -> None:
        """Say nothing."""

    def epoch(self, number: int, private: Record | None, plain: Record) -> None:
        """Print the figures, those of plain SGD in brackets if it is not alone."""
        own, beside = _figures([private or plain]), _figures([plain])
        if not plain.member_accuracies:
            del own["members"]
        words = [
            f"{name} {value} ({beside[name]})" if private else f"{name} {value}"
            for name, value in own.items()
        ]
        say("  ".join([f"epoch {number}/{self._epochs}", *words]))


class _Bar:
    """A bar below a table of the latest figures, for terminals."""

    def __init__(self, live: Live, bar: Progress, steps: int) -> None:
        self._live, self._bar = live, bar
        self._task = bar.add_task("", total=steps, epoch=0)

    def step(self, taken: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=taken)

    def epoch(self, number: int, private: Record | None, plain: Record) -> None:
        """Show the figures above the bar."""
        self._bar.update(self._task, epoch=number)
        figures = _table([private] if private else [], [plain])
        self._live.update(Group(figures, self._bar))


@contextmanager
def display(steps: int, epochs: int) -> Iterator[_Lines | _Bar]:
    """Show the progress of a run: a bar on a terminal, else one line per epoch.

    The training loop calls `step` with the number of steps taken, and `epoch` with the
    figures after one; the first figures are None without privacy.
    """
    console = Console()
    if not console.is_interactive:
        yield _Lines(epochs)
        return
    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeRemainingColumn(),
        console=console,
    )
    with Live(bar, console=console, transient=True) as live:
        yield _Bar(live, bar, steps)


def say(text: str) -> None:
    """Print a line at once, so that it stays in order on a terminal too."""
    print(printable(text), flush=True)


def show_table(private: Sequence[Record], plain: Sequence[Record]) -> None:
    """Print the figures at the end of two runs."""
    Console().print(_table(private, plain))


def _table(private: Sequence[Record], plain: Sequence[Record]) -> Table:
    """Make a table for a terminal."""
    made = Table("", box=None)
    for column in COLUMNS:
        made.add_column(column, justify="right")
    for cells in last_figures(private, plain):
        made.add_row(*cells)
    return made


def last_figures(
    private: Sequence[Record], plain: Sequence[Record]
) -> list[tuple[str, ...]]:
    """Return the last figures of two runs, of which one may have no records.

    The run of an ensemble has a line for each member too.
    """
    found: list[tuple[str, ...]] = []
    for title, records in zip(RUNS, (private, plain), strict=True):
        if not records:
            continue
        figures = _figures(records)
        del figures["members"]
        found.append((title, *figures.values()))
        for number, share in enumerate(records[-1].member_accuracies or []):
            found.append((f"  member {number}", "", percent(share), "", ""))
    return found


def _figures(records: Sequence[Record]) -> dict[str, str]:
    """Return the last figures of a run as text; the speed is the median of all."""
    last = records[-1]
    speeds = [each.samples_per_second for each in records]
    members = last.member_accuracies or [math.nan]
    return {
        "loss": decimals(last.loss),
        "accuracy": percent(last.test_accuracy),
        "members": f"{percent(min(members))} to {percent(max(members))}",
        "epsilon": decimals(last.epsilon),
        "samples/s": f"{statistics.median(speeds):.0f}",
    }


def decimals(value: float | None) -> str:
    """Write a figure with three decimals, a dash if there is none."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.1f} %"

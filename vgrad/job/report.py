"""What a run shows: a table that moves on a terminal, lines elsewhere, and curves."""

import io
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vgrad.job import files
from vgrad.job.metrics import Record

CURVES = "curves.png"


class Display(Protocol):
    """What the training loop tells, and when."""

    def step(self, taken: int) -> None:
        """Tell how many private steps have been taken."""
        ...

    def epoch(self, number: int, private: Record, plain: Record) -> None:
        """Tell the figures after an epoch."""
        ...


@contextmanager
def display(steps: int, epochs: int) -> Iterator[Display]:
    """Show the progress of a run: a bar on a terminal, else one line per epoch."""
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


class _Lines:
    """One line after each epoch, for logs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def step(self, taken: int) -> None:
        """Say nothing."""

    def epoch(self, number: int, private: Record, plain: Record) -> None:
        """Print the figures, those of plain SGD in brackets."""
        print(
            f"epoch {number}/{self._epochs}  "
            f"loss {_loss(private)} ({_loss(plain)})  "
            f"accuracy {_accuracy(private)} ({_accuracy(plain)})  "
            f"epsilon {_epsilon(private)} ({_epsilon(plain)})  "
            f"samples/s {_speed([private])} ({_speed([plain])})",
            flush=True,
        )


class _Bar:
    """A bar below a table of the latest figures, for terminals."""

    def __init__(self, live: Live, bar: Progress, steps: int) -> None:
        self._live, self._bar = live, bar
        self._task = bar.add_task("", total=steps, epoch=0)

    def step(self, taken: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=taken)

    def epoch(self, number: int, private: Record, plain: Record) -> None:
        """Show the figures above the bar."""
        self._bar.update(self._task, epoch=number)
        self._live.update(Group(table([private], [plain]), self._bar))


def table(private: Sequence[Record], plain: Sequence[Record]) -> Table:
    """Make a table of the last figures of two runs; the speeds are medians."""
    made = Table("", box=None)
    for title in ("loss", "test accuracy", "epsilon", "samples/s"):
        made.add_column(title, justify="right")
    for title, records in (("private SGD", private), ("plain SGD", plain)):
        last = records[-1]
        figures = _loss(last), _accuracy(last), _epsilon(last), _speed(records)
        made.add_row(title, *figures)
    return made


def show_table(private: Sequence[Record], plain: Sequence[Record]) -> None:
    """Print the figures at the end of two runs."""
    Console().print(table(private, plain))


def say(text: str) -> None:
    """Print a line at once, in the order of things on a terminal too."""
    print(text, flush=True)


def write_curves(
    folder: Path, private: Sequence[Record], plain: Sequence[Record], delta: float
) -> None:
    """Draw accuracy and epsilon over the steps."""
    # A Figure of its own needs no window system and leaves pyplot's state alone.
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for label, records in (("private SGD", private), ("plain SGD", plain)):
        steps = [record.step for record in records]
        above.plot(steps, [100 * each.test_accuracy for each in records], label=label)
    above.set_ylabel("test accuracy in %")
    above.legend(loc="lower right")
    below.plot([each.step for each in private], [each.epsilon for each in private])
    below.set_ylabel(f"epsilon spent at delta {delta:g}")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    files.replace(folder / CURVES, image.getvalue())


def _loss(record: Record) -> str:
    return "-" if record.loss is None else f"{record.loss:.3f}"


def _accuracy(record: Record) -> str:
    return f"{100 * record.test_accuracy:.1f} %"


def _epsilon(record: Record) -> str:
    return "-" if record.epsilon is None else f"{record.epsilon:.3f}"


def _speed(records: Sequence[Record]) -> str:
    return f"{statistics.median(each.samples_per_second for each in records):.0f}"

"""What a run shows: a table that moves on a terminal, lines elsewhere, and curves."""

import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vgrad.cli import files
from vgrad.cli.metrics import Record

CURVES = "curves.png"

RUNS = ("private SGD", "plain SGD")


class Display(Protocol):
    """What the training loop tells, and when."""

    def step(self, taken: int) -> None:
        """Tell how many steps have been taken."""
        ...

    def epoch(self, number: int, private: Record | None, plain: Record) -> None:
        """Tell the figures after an epoch; the first are None without privacy."""
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

    def epoch(self, number: int, private: Record | None, plain: Record) -> None:
        """Print the figures, those of plain SGD in brackets if it is not alone."""

        def both(show: Callable[[Record], str]) -> str:
            return f"{show(private)} ({show(plain)})" if private else show(plain)

        words = [
            f"epoch {number}/{self._epochs}",
            f"loss {both(_loss)}",
            f"accuracy {both(_accuracy)}",
        ]
        if plain.member_accuracies:
            words.append(f"members {both(_range)}")
        words.append(f"epsilon {both(_epsilon)}")
        words.append(f"samples/s {both(lambda record: _speed([record]))}")
        print("  ".join(words), flush=True)


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
        figures = table([private] if private else [], [plain])
        self._live.update(Group(figures, self._bar))


def table(private: Sequence[Record], plain: Sequence[Record]) -> Table:
    """Make a table of the last figures of two runs; the speeds are medians.

    A run without records is left out; those of an ensemble have a line for each member.
    """
    made = Table("", box=None)
    for title in ("loss", "test accuracy", "epsilon", "samples/s"):
        made.add_column(title, justify="right")
    for title, records in zip(RUNS, (private, plain), strict=True):
        if not records:
            continue
        last = records[-1]
        figures = _loss(last), _accuracy(last), _epsilon(last), _speed(records)
        made.add_row(title, *figures)
        for number, share in enumerate(last.member_accuracies or []):
            made.add_row(f"  member {number}", "", _percent(share), "", "")
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
    """Draw accuracy, members of an ensemble pale, and epsilon over the steps."""
    # A Figure of its own needs no window system and leaves pyplot's state alone.
    figure = Figure(figsize=(7, 6), layout="constrained")
    panels = figure.subplots(2 if private else 1, sharex=True, squeeze=False)[:, 0]
    for label, records in zip(RUNS, (private, plain), strict=True):
        if not records:
            continue
        steps = [record.step for record in records]
        shares = [100 * each.test_accuracy for each in records]
        (line,) = panels[0].plot(steps, shares, label=label)
        members = [each.member_accuracies or [] for each in records]
        for one in zip(*members, strict=True):
            pale = {"color": line.get_color(), "alpha": 0.25, "linewidth": 0.8}
            panels[0].plot(steps, [100 * share for share in one], **pale)
    panels[0].set_ylabel("test accuracy in %")
    panels[0].legend(loc="lower right")
    if private:
        steps = [record.step for record in private]
        panels[1].plot(steps, [record.epsilon for record in private])
        panels[1].set_ylabel(f"epsilon spent at delta {delta:g}")
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    files.replace(folder / CURVES, image.getvalue(), private=True)


def _loss(record: Record) -> str:
    return "-" if record.loss is None else f"{record.loss:.3f}"


def _accuracy(record: Record) -> str:
    return _percent(record.test_accuracy)


def _range(record: Record) -> str:
    shares = record.member_accuracies or [math.nan]
    return f"{_percent(min(shares))} to {_percent(max(shares))}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _epsilon(record: Record) -> str:
    return "-" if record.epsilon is None else f"{record.epsilon:.3f}"


def _speed(records: Sequence[Record]) -> str:
    return f"{statistics.median(each.samples_per_second for each in records):.0f}"

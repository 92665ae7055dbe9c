"""What a run shows: a table that moves on a terminal, lines elsewhere, and pictures.

`curves.png` shows accuracy and privacy over the steps. For an ensemble
`reliability.png` shows whether its confidence matches its accuracy, and `uncertain.png`
what it is least sure of. All are made from the private data, without noise: they are
not for release.
"""

import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from vgrad import files
from vgrad.cli.metrics import Record
from vgrad.ensemble.calibration import reliability
from vgrad.ensemble.prediction import class_prediction

CURVES = "curves.png"
RELIABILITY = "reliability.png"
UNCERTAIN = "uncertain.png"
PICTURES = (CURVES, RELIABILITY, UNCERTAIN)

RUNS = ("private SGD", "plain SGD")

_BINS = 10
_SHOWN = 24


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
    print(text, flush=True)


def show_table(private: Sequence[Record], plain: Sequence[Record]) -> None:
    """Print the figures at the end of two runs."""
    Console().print(_table(private, plain))


def _table(private: Sequence[Record], plain: Sequence[Record]) -> Table:
    """Make a table of the last figures of two runs; one may have no records.

    The run of an ensemble has a line for each member too.
    """
    made = Table("", box=None)
    for title in ("loss", "test accuracy", "epsilon", "samples/s"):
        made.add_column(title, justify="right")
    for title, records in zip(RUNS, (private, plain), strict=True):
        if not records:
            continue
        figures = _figures(records)
        del figures["members"]
        made.add_row(title, *figures.values())
        for number, share in enumerate(records[-1].member_accuracies or []):
            made.add_row(f"  member {number}", "", _percent(share), "", "")
    return made


def write_curves(
    folder: Path, private: Sequence[Record], plain: Sequence[Record], delta: float
) -> None:
    """Draw epsilon and accuracy, that of an ensemble's members pale, over the steps."""
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
    _write(figure, folder / CURVES)


def write_reliability(
    folder: Path, scores: Mapping[str, Tensor], labels: Tensor
) -> None:
    """Draw accuracy over confidence, and how many samples have that confidence.

    `scores` are logits `[E, N, C]` by name of the run. Samples are left out if a
    diverged member has no probabilities for them.
    """
    figure = Figure(figsize=(6, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="grey", linestyle=":", label="perfectly sure")
    for name, logits in scores.items():
        mean = class_prediction(logits).mean
        known = mean.isfinite().all(1)
        found = reliability(mean[known], labels[known], bins=_BINS)
        filled = (found.count > 0).cpu()
        sure, right, count = (each.cpu()[filled].tolist() for each in found)
        (line,) = above.plot(sure, right, marker="o", label=name)
        below.plot(sure, count, marker="o", color=line.get_color())
    above.set_ylabel("accuracy")
    above.legend(loc="upper left")
    below.set_ylabel("samples")
    below.set_xlabel("confidence")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    _write(figure, folder / RELIABILITY)


def write_uncertain(
    folder: Path, logits: Tensor, images: Tensor, labels: Tensor
) -> None:
    """Show the samples with the largest predictive entropy, `[N, C, H, W]`."""
    found = class_prediction(logits)
    # NaN is as uncertain as can be.
    entropy = found.predictive_entropy.nan_to_num(nan=math.inf)
    order = entropy.argsort(descending=True, stable=True)[:_SHOWN].tolist()
    columns = 6
    rows = math.ceil(len(order) / columns)
    figure = Figure(figsize=(1.5 * columns, 1.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid:
        axes.set_axis_off()
    for index, axes in zip(order, grid, strict=False):
        axes.imshow(_picture(images[index].cpu()), cmap="gray_r")
        guess = int(found.mean[index].argmax())
        axes.set_title(
            f"{guess} (is {int(labels[index])})\nentropy "
            f"{float(found.predictive_entropy[index]):.2f}",
            fontsize=8,
        )
    figure.suptitle("The most uncertain held-out samples: guess, truth, nats")
    _write(figure, folder / UNCERTAIN)


def _picture(image: Tensor) -> np.ndarray:
    """Bring `[C, H, W]` between zero and one; three channels are colours."""
    low, high = image.min(), image.max()
    image = (image - low) / torch.clamp(high - low, min=torch.finfo(image.dtype).tiny)
    image = image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)
    return image.numpy()


def _write(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    files.replace(path, image.getvalue(), private=True)


def _figures(records: Sequence[Record]) -> dict[str, str]:
    """Return the last figures of a run as text; the speed is the median of all."""
    last = records[-1]
    speeds = [each.samples_per_second for each in records]
    members = last.member_accuracies or [math.nan]
    return {
        "loss": "-" if last.loss is None else f"{last.loss:.3f}",
        "accuracy": _percent(last.test_accuracy),
        "members": f"{_percent(min(members))} to {_percent(max(members))}",
        "epsilon": "-" if last.epsilon is None else f"{last.epsilon:.3f}",
        "samples/s": f"{statistics.median(speeds):.0f}",
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

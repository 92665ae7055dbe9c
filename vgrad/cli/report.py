"""The report of a run: progress and a table, and then pictures and a page.

The pictures and the page are made from the private data, without noise: they are not
for release. `curves.png` shows accuracy and privacy over the steps. For an ensemble
`reliability.png` shows whether its confidence matches its accuracy, and `uncertain.png`
the samples of which it is least sure. `report.html` shows the whole run in a browser
and needs no other file. It has no script, and all names of the user's are escaped.
"""

import base64
import dataclasses
import io
import itertools
import math
import statistics
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
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
from vgrad.cli import checkpoint
from vgrad.cli.metrics import FIGURES, RUNS, Record
from vgrad.cli.setup import Job, Pair
from vgrad.ensemble.calibration import reliability
from vgrad.ensemble.prediction import EnsemblePrediction
from vgrad_command import printable, spelled

# The console.

COLUMNS = ("loss", "held-out accuracy", "epsilon", "samples/s")


class _Lines:
    """One line after each epoch, for logs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def step(self, taken: int) -> None:
        """Print nothing."""

    def epoch(self, number: int, private: Record | None, plain: Record) -> None:
        """Print the figures, with plain SGD in brackets beside private SGD."""
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
        figures = _console_table([private] if private else [], [plain])
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
    Console().print(_console_table(private, plain))


def _console_table(private: Sequence[Record], plain: Sequence[Record]) -> Table:
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


# Pictures.

CURVES = "curves.png"
RELIABILITY = "reliability.png"
UNCERTAIN = "uncertain.png"
PICTURES = (CURVES, RELIABILITY, UNCERTAIN)

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
"""For all pictures, with bench/: distinct under colour blindness.

Reference: Okabe and Ito, Color Universal Design, 2008.
"""

_LOOKS = {
    RUNS[0]: {"color": COLOURS[0], "linestyle": "-", "marker": "o"},
    RUNS[1]: {"color": COLOURS[1], "linestyle": "--", "marker": "s"},
}
"""Colour, dashes and marker of each run, so that grey prints differ too."""

_BINS = 10
_SHOWN = 24
_LONGEST = 60
"""Characters of a name in a title."""


def draw(
    job: Job, states: Pair, private: Sequence[Record], plain: Sequence[Record]
) -> dict[str, Figure]:
    """Draw the pictures of a run, by the names of their files.

    `uncertain.png` is of the private run, if there is one.
    """
    of_run = title(job)
    found = {CURVES: curves(of_run, private, plain, delta=job.settings.delta)}
    if job.settings.members > 1:
        images, labels = job.data.x_test, job.data.y_test
        with torch.no_grad():
            scores = {
                name: trainer.scores(state, images)
                for name, trainer, state in zip(RUNS, job.trainers, states, strict=True)
                if trainer
            }
        name, first = next(iter(scores.items()))
        found[RELIABILITY] = reliability_diagram(of_run, scores, labels)
        found[UNCERTAIN] = most_uncertain(of_run, name, first, images, labels)
    return found


def title(job: Job) -> str:
    """Say which run it is: data, model, members, privacy and seed."""
    settings = job.settings
    words = [_short(Path(settings.data).name), _short(settings.model)]
    if settings.members > 1:
        words.append(f"{settings.members} members")
    if settings.without_privacy:
        words.append("without privacy")
    elif settings.reproducible_noise:
        words.append("no claim of privacy")
    else:
        spent = f"{settings.epsilon:g}"
        if job.extended and job.plan:
            spent = f"{job.plan.epsilon():.3f}"
        words.append(f"epsilon {spent} at delta {settings.delta:g}")
    return ", ".join([*words, f"seed {settings.seed}"])


def _short(name: str) -> str:
    name, half = printable(name), _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]} ... {name[-half:]}"


def curves(
    title: str, private: Sequence[Record], plain: Sequence[Record], *, delta: float
) -> Figure:
    """Draw epsilon and accuracy over the steps, the members of an ensemble pale."""
    # A Figure of its own needs no window system and leaves pyplot's state alone.
    figure = Figure(figsize=(7, 6), layout="constrained")
    panels = figure.subplots(2 if private else 1, sharex=True, squeeze=False)[:, 0]
    for label, records in zip(RUNS, (private, plain), strict=True):
        if not records:
            continue
        steps = [record.step for record in records]
        shares = [100 * each.test_accuracy for each in records]
        panels[0].plot(steps, shares, label=label, markersize=3, **_LOOKS[label])
        members = [each.member_accuracies or [] for each in records]
        pale = {**_LOOKS[label], "alpha": 0.3, "linewidth": 0.8, "marker": ""}
        for i, one in enumerate(zip(*members, strict=True)):
            named = "" if i else f"{label}, each member"
            panels[0].plot(steps, [100 * each for each in one], label=named, **pale)
    panels[0].set_ylabel("held-out accuracy in %")
    if private:
        steps = [record.step for record in private]
        spent = [record.epsilon for record in private]
        panels[1].plot(steps, spent, **_LOOKS[RUNS[0]], markersize=3)
        panels[1].set_ylabel(f"epsilon spent at delta {delta:g}")
        panels[1].set_ylim(bottom=0)
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.grid(alpha=0.3)
    runs = "Private and plain SGD" if private else "Plain SGD"
    _head(figure, f"{runs}: {title}")
    # Below the panels, where it covers no line.
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def reliability_diagram(
    title: str, scores: Mapping[str, Tensor], labels: Tensor
) -> Figure:
    """Draw accuracy over confidence, and how many samples have that confidence.

    `scores` are logits `[E, N, C]` by name of the run. Samples are left out if a
    diverged member has no probabilities for them.
    """
    figure = Figure(figsize=(6, 6.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    perfect = {"color": "grey", "linestyle": ":", "label": "perfectly calibrated"}
    above.plot([0, 1], [0, 1], **perfect)
    for name, logits in scores.items():
        mean = EnsemblePrediction.from_logits(logits).mean
        known = mean.isfinite().all(1)
        found = reliability(mean[known], labels[known], bins=_BINS)
        filled = (found.count > 0).cpu()
        sure, right, count = (each.cpu()[filled].tolist() for each in found)
        above.plot(sure, right, label=name, **_LOOKS[name])
        below.plot(sure, count, **_LOOKS[name])
    above.set_ylabel("accuracy")
    below.set_ylabel("held-out samples")
    below.set_xlabel("confidence: probability of the guess")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    _head(figure, "Is the ensemble as accurate as it is confident?", title, width=70)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def most_uncertain(
    title: str, name: str, logits: Tensor, images: Tensor, labels: Tensor
) -> Figure:
    """Show the samples with the largest predictive entropy, `[N, C, H, W]`."""
    found = EnsemblePrediction.from_logits(logits)
    # NaN is as uncertain as can be.
    entropy = found.predictive_entropy.nan_to_num(nan=math.inf)
    order = entropy.argsort(descending=True, stable=True)[:_SHOWN].tolist()
    columns = 6
    rows = math.ceil(len(order) / columns)
    figure = Figure(figsize=(1.5 * columns, 1.9 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid:
        axes.set_axis_off()
    for index, axes in zip(order, grid, strict=False):
        axes.imshow(_pixels(images[index].cpu()), cmap="gray_r")
        guess, nats = int(found.mean[index].argmax()), found.predictive_entropy[index]
        axes.set_title(
            f"guess {guess}, is {int(labels[index])}\n{float(nats):.2f} nats",
            fontsize=8,
        )
    _head(
        figure,
        f"The {len(order)} of {len(labels)} held-out samples that the ensemble trained "
        f"by {name} is least sure of",
        "Above each: its guess, its label, and the entropy of the mean prediction",
        title,
        width=105,
    )
    return figure


def _pixels(image: Tensor) -> np.ndarray:
    """Bring `[C, H, W]` between zero and one; three channels are colours."""
    low, high = image.min(), image.max()
    image = (image - low) / torch.clamp(high - low, min=torch.finfo(image.dtype).tiny)
    image = image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)
    return image.numpy()


def _head(figure: Figure, *lines: str, width: int = 85) -> None:
    """Set the title of a picture; a dollar sign in it stays one."""
    text = "\n".join(textwrap.fill(line, width) for line in lines)
    figure.suptitle(text, fontsize="medium", parse_math=False)


def write_picture(figure: Figure, path: Path) -> bytes:
    """Write a picture as PNG, and return its bytes."""
    image = io.BytesIO()
    with warnings.catch_warnings():
        # The font may lack letters of a name, and draws boxes then.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(image, format="png", dpi=120)
    files.replace(path, image.getvalue(), private=True)
    return image.getvalue()


# The page.

PAGE = "report.html"

NO_CLAIM = (
    "The noise can be reproduced from the seed: the epsilon of this run may not be "
    "claimed."
)

_MOST_LINES = 100
"""Epochs in the table of a page; of more some are left out."""

_SHOWS = {
    CURVES: (
        "Accuracy and privacy over the steps",
        "How often each run is right on the held-out samples and, with privacy, how "
        "much of epsilon has been spent.",
    ),
    RELIABILITY: (
        "Confidence",
        "On the dotted line the ensemble is right as often as it is confident; below "
        "it the ensemble is overconfident.",
    ),
    UNCERTAIN: (
        "The most uncertain samples",
        "Held-out samples as they are in the data, the largest entropy first.",
    ),
}
"""Heading and caption of each picture."""

_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; line-height: 1.5; color: #1a1a1a;
  background: #fff; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
th {{ overflow-wrap: normal; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; height: auto; }}
.warning {{ border-left: .4rem solid #D55E00; padding: .4rem 1rem;
  background: #fdf1e9; }}
</style>
</head>
<body>
"""


def release(job: Job, folder: Path) -> str:
    """Name the files of a finished run for release."""
    if job.settings.reproducible_noise:
        return NO_CLAIM
    if not job.plan:
        return (
            f"Saved: {folder / checkpoint.ENSEMBLE}, trained without privacy. Nothing "
            f"here hides the training data."
        )
    names = checkpoint.MODEL
    if job.settings.members > 1:
        names = f"{checkpoint.ENSEMBLE} and {checkpoint.ENSEMBLE_TEXT}"
    return (
        f"For release: {folder / names}, with epsilon {job.plan.epsilon():.3f} at "
        f"delta {job.plan.delta:g}. The other files reveal more of the training data."
    )


def extensions(job: Job) -> list[str]:
    """Return a line for each extension of a run, with the rise of epsilon."""
    lines = []
    for before, after in itertools.pairwise([job.settings.epochs, *job.extended]):
        line = f"Extended from {before} to {after} epochs"
        if job.plan:
            spent = [
                job.trainers.private.epsilon(job.ends[n - 1]) for n in (before, after)
            ]
            line += (
                f" with noise multiplier {job.plan.noise_multiplier:.4g} as before: "
                f"epsilon rises from {spent[0]:.3f} to {spent[1]:.3f} at delta "
                f"{job.plan.delta:g}"
            )
        lines.append(f"{line}.")
    return lines


def write_page(
    folder: Path,
    job: Job,
    private: Sequence[Record],
    plain: Sequence[Record],
    images: Mapping[str, bytes],
) -> None:
    """Write the page of a finished run; `images` are its pictures by file name."""
    name = _text(title(job))
    parts = [
        _HEAD.format(title=name),
        f"<h1>{name}</h1>\n",
        '<p class="warning"><strong>This page is not for release.</strong> Its figures '
        "and pictures come from the private data without noise.</p>\n",
        f"<h2>What may be released</h2>\n<p>{_text(release(job, folder))}</p>\n",
        *(f"<p>{_text(line)}</p>\n" for line in extensions(job)),
        _withheld(images) if job.plan else "",
        "<h2>At the end</h2>\n",
        _table(("", *COLUMNS), last_figures(private, plain)),
        *(_picture(name, image) for name, image in images.items()),
        "<h2>Epsilon and accuracy, epoch by epoch</h2>\n",
        _epochs(private, plain),
        "<h2>Settings</h2>\n",
        _table(("", "value"), _settings(job)),
        "<p>Made by <code>python -m vgrad train</code>.</p>\n</body>\n</html>\n",
    ]
    files.replace(folder / PAGE, "".join(parts).encode(), private=True)


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _withheld(images: Iterable[str]) -> str:
    """List the files that are not for release, and why."""
    secret, figures = (
        ", ".join(f"<code>{name}</code>" for name in names)
        for names in (checkpoint.STATES, (*FIGURES, *images, PAGE))
    )
    return (
        f"<ul>\n<li>{secret}: keep them secret. The key in them reveals the noise.</li>"
        f"\n<li>{figures}: not for release. They were computed from the private data "
        f"without noise.</li>\n</ul>\n"
    )


def _picture(name: str, image: bytes) -> str:
    heading, caption = _SHOWS[name]
    data = base64.b64encode(image).decode()
    return (
        f"<h2>{heading}</h2>\n<figure>\n"
        f'<img alt="{heading}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{caption}</figcaption>\n</figure>\n"
    )


def _epochs(private: Sequence[Record], plain: Sequence[Record]) -> str:
    """Show the figures after each epoch, or after some of many."""
    count = len(plain)
    every = -(-count // _MOST_LINES)
    # The last one always, whichever are left out.
    shown = [*range(every - 1, count - 1, every), count - 1]
    head, runs = ["epoch", "step"], []
    if private:
        head.append("epsilon spent")
    for name, records in zip(RUNS, (private, plain), strict=True):
        if records:
            head += [f"accuracy, {name}", f"loss, {name}"]
            runs.append(records)
    lines = []
    for i in shown:
        line: list[object] = [i + 1, plain[i].step]
        if private:
            line.append(decimals(private[i].epsilon))
        for records in runs:
            one = records[i]
            line += [percent(one.test_accuracy), decimals(one.loss)]
        lines.append(line)
    return _table(head, lines)


def _settings(job: Job) -> list[tuple[object, ...]]:
    found: dict[str, object] = {
        spelled(name): value for name, value in dataclasses.asdict(job.settings).items()
    }
    found["training samples"] = len(job.data.y_train)
    found["held-out samples"] = len(job.data.y_test)
    found["steps of each model"] = job.ends[-1]
    if job.plan:
        found["sampling rate"] = f"{job.plan.sampling_rate:.4g}"
        found["noise multiplier"] = f"{job.plan.noise_multiplier:.4g}"
    found |= job.description["machine"]
    return list(found.items())


def _table(head: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    rows = [_row("th", head), *(_row("td", line) for line in lines)]
    return f"<table>\n{''.join(rows)}</table>\n"


def _row(kind: str, cells: Iterable[object]) -> str:
    inner = "".join(f"<{kind}>{_text(cell)}</{kind}>" for cell in cells)
    return f"<tr>{inner}</tr>\n"

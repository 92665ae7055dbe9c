"""The report of a run: progress and a table, and then pictures and a page.

The pictures and the page are made from the private data, without noise: they are not
for release. The page needs no other file, has no script, and escapes the user's names.
"""

import base64
import dataclasses
import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

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
from vgrad.cli.checkpoint import FIGURES, Record
from vgrad.cli.setup import Job
from vgrad.dp import Plan
from vgrad.ensemble.prediction import EnsemblePrediction
from vgrad_command import printable, spelled

TITLES = {"private": "private SGD", "plain": "plain SGD"}

Figures = Mapping[str, Sequence[Record]]
"""The records of the private and of the plain run, if each is trained."""

# The console.

COLUMNS = ("loss", "held-out accuracy", "epsilon", "samples/s")

NO_CLAIM = (
    "The noise can be reproduced from the seed: the epsilon of this run may not be "
    "claimed."
)


def say(text: str) -> None:
    """Print a line at once, so that it stays in order on a terminal too."""
    print(printable(text), flush=True)


def announce(job: Job, ranks: int) -> None:
    """Print data, model, steps and privacy of a run before its first step."""
    settings, plan, count = job.settings, job.plan, job.settings.members
    sizes = f"{len(job.data.y_train)} training and {len(job.data.y_test)} held-out"
    start = job.trainers["plain"].start.params.values()
    params = sum(value.numel() for value in start) // count
    members = f", {count} members" if count > 1 else ""
    steps = f"{job.ends[-1]} steps" + f" on {ranks} ranks" * (ranks > 1)
    noise = "without privacy."
    if plan:
        noise = (
            f"sampling rate {plan.sampling_rate:.4g} and noise multiplier "
            f"{plan.noise_multiplier:.4g}{_kinds(plan)}. In brackets: without privacy."
        )
    say(
        f"{settings.data}: {sizes} samples. {settings.model}: {params} "
        f"parameters{members}. {steps} at learning rate {settings.lr:g}, {noise}"
    )
    if settings.reproducible_noise:
        say(NO_CLAIM)
    if plan:
        say(
            "The figures of each epoch are computed from the private data without "
            "noise: they are not for release."
        )


def _kinds(plan: Plan) -> str:
    """Name what the batches and the noise of a plan have beyond Poisson sampling."""
    words = ""
    if plan.noise.correlated:
        words += f", noise {plan.noise.scheme} of size {plan.noise.size}"
    if plan.sampling != "poisson":
        words += f", {plan.sampling} sampling"
    if plan.max_batch_size is not None:
        words += f", batches of at most {plan.max_batch_size}"
    return words


Display = tuple[Callable[[int], None], Callable[[int, Mapping[str, Record]], None]]
"""Functions of the steps taken, and of the number of an epoch and its figures."""


@contextmanager
def display(steps: int, epochs: int) -> Iterator[Display]:
    """Show the progress of a run: a bar on a terminal, else one line per epoch."""
    console = Console()

    def line(number: int, records: Mapping[str, Record]) -> None:
        first, *beside = (_texts([record]) for record in records.values())
        words = [f"epoch {number}/{epochs}"]
        for name, text in first.items():
            brackets = "".join(f" ({texts[name]})" for texts in beside)
            words.append(f"{name} {text}{brackets}")
        say("  ".join(words))

    if not console.is_interactive:
        yield lambda done: None, line
        return
    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task("", total=steps, epoch=0)

    def above(number: int, records: Mapping[str, Record]) -> None:
        bar.update(task, epoch=number)
        latest = {run: [record] for run, record in records.items()}
        live.update(Group(_console_table(latest), bar))

    with Live(bar, console=console, transient=True) as live:
        yield lambda done: bar.update(task, completed=done), above


def _console_table(figures: Figures) -> Table:
    table = Table("", box=None)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for cells in last_figures(figures):
        table.add_row(*cells)
    return table


def last_figures(figures: Figures) -> list[tuple[str, ...]]:
    """Return a row of the last figures of each run, and of each member."""
    rows: list[tuple[str, ...]] = []
    for run, records in figures.items():
        texts = _texts(records)
        texts.pop("members", None)
        rows.append((TITLES[run], *texts.values()))
        for number, share in enumerate(records[-1].member_accuracies or []):
            rows.append((f"  member {number}", "", percent(share), "", ""))
    return rows


def _texts(records: Sequence[Record]) -> dict[str, str]:
    last = records[-1]
    texts = {"loss": decimals(last.loss), "accuracy": percent(last.test_accuracy)}
    if members := last.member_accuracies:
        texts["members"] = f"{percent(min(members))} to {percent(max(members))}"
    speed = statistics.median(record.samples_per_second for record in records)
    return texts | {"epsilon": decimals(last.epsilon), "samples/s": f"{speed:.0f}"}


def decimals(value: float | None) -> str:
    """Write a figure with three decimals, a dash if there is none."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.1f} %"


def finish(folder: Path, job: Job, states: Mapping[str, Any], figures: Figures) -> None:
    """Draw the pictures, print the table, and write the page, the last of all files."""
    images = {
        name: write_picture(figure, folder / name)
        for name, figure in draw(job, states, figures).items()
    }
    Console().print(_console_table(figures))
    write_page(folder, job, figures, images)
    say(release(job, folder))
    say(f"The run in pictures, not for release: {folder / PAGE}")


# Pictures.

CURVES, RELIABILITY = "curves.png", "reliability.png"
UNCERTAIN = "uncertain.png"
PICTURES = {
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
"""Heading and caption of each."""

COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()
"""For all pictures, with bench/: distinct under colour blindness.

Reference: Okabe and Ito, Color Universal Design, 2008.
"""

_LOOKS = {
    "private": {"color": COLOURS[0], "linestyle": "-", "marker": "o"},
    "plain": {"color": COLOURS[1], "linestyle": "--", "marker": "s"},
}
"""Colour, dashes and marker of each run, so that grey prints differ too."""

_BINS = 10
_SHOWN = 24
_LONGEST = 60
"""Characters of a name in a title."""


def draw(job: Job, states: Mapping[str, Any], figures: Figures) -> dict[str, Figure]:
    """Draw the pictures of a run, by the names of their files."""
    of_run = title(job)
    pictures = {CURVES: curves(of_run, figures, delta=job.settings.delta)}
    if job.settings.members > 1:
        images, labels = job.data.x_test, job.data.y_test
        state = states["plain"]
        with torch.no_grad():
            logits = job.scores(state.params, state.buffers, images)
        pictures[RELIABILITY] = reliability_diagram(of_run, logits, labels)
        pictures[UNCERTAIN] = most_uncertain(of_run, logits, images, labels)
    return pictures


def title(job: Job) -> str:
    """Name a run by its data, model, members, privacy and seed."""
    settings = job.settings
    words = [_short(Path(settings.data).name), _short(settings.model)]
    if settings.members > 1:
        words.append(f"{settings.members} members")
    if settings.without_privacy:
        words.append("without privacy")
    elif settings.reproducible_noise:
        words.append("no claim of privacy")
    else:
        words.append(f"epsilon {settings.epsilon:g} at delta {settings.delta:g}")
    return ", ".join([*words, f"seed {settings.seed}"])


def _short(name: str) -> str:
    name, half = printable(name), _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]} ... {name[-half:]}"


def curves(title: str, figures: Figures, *, delta: float) -> Figure:
    """Draw epsilon and accuracy over the steps, the members of an ensemble pale."""
    private = figures.get("private")
    # A Figure of its own needs no window system and leaves pyplot's state alone.
    figure = Figure(figsize=(7, 6), layout="constrained")
    panels = figure.subplots(2 if private else 1, sharex=True, squeeze=False)[:, 0]
    for run, records in figures.items():
        steps, label = [record.step for record in records], TITLES[run]
        shares = [100 * record.test_accuracy for record in records]
        panels[0].plot(steps, shares, label=label, markersize=3, **_LOOKS[run])
        members = [record.member_accuracies or [] for record in records]
        pale = {**_LOOKS[run], "alpha": 0.3, "linewidth": 0.8, "marker": ""}
        for i, shares in enumerate(zip(*members, strict=True)):
            named = "" if i else f"{label}, each member"
            panels[0].plot(steps, 100 * np.array(shares), label=named, **pale)
    panels[0].set_ylabel("held-out accuracy in %")
    if private:
        steps = [record.step for record in private]
        spent = [record.epsilon for record in private]
        panels[1].plot(steps, spent, **_LOOKS["private"], markersize=3)
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


def reliability_diagram(title: str, logits: Tensor, labels: Tensor) -> Figure:
    """Draw accuracy and number of samples over confidence, for logits `[E, N, C]`."""
    figure = Figure(figsize=(6, 6.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    perfect = {"color": "grey", "linestyle": ":", "label": "perfectly calibrated"}
    above.plot([0, 1], [0, 1], **perfect)
    mean = EnsemblePrediction.from_logits(logits).mean
    finite = mean.isfinite().all(1)  # not where a member has diverged
    confidence, guess = mean[finite].double().cpu().max(1)
    right = (guess == labels[finite].cpu()).double()
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    count = torch.bincount(bins, minlength=_BINS)
    filled = count > 0
    mean_confidence, accuracy = (
        (torch.bincount(bins, values, minlength=_BINS) / count)[filled]
        for values in (confidence, right)
    )
    above.plot(mean_confidence, accuracy, label=TITLES["plain"], **_LOOKS["plain"])
    below.plot(mean_confidence, count[filled], **_LOOKS["plain"])
    above.set_ylabel("accuracy")
    below.set_ylabel("held-out samples")
    below.set_xlabel("confidence: probability of the guess")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    _head(figure, "Is the ensemble as accurate as it is confident?", title, width=70)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def most_uncertain(
    title: str, logits: Tensor, images: Tensor, labels: Tensor
) -> Figure:
    """Show the samples with the largest predictive entropy, `[N, C, H, W]`."""
    prediction = EnsemblePrediction.from_logits(logits)
    # NaN is as uncertain as can be.
    entropy = prediction.predictive_entropy.nan_to_num(nan=math.inf)
    order = entropy.argsort(descending=True, stable=True)[:_SHOWN].tolist()
    columns = 6
    rows = math.ceil(len(order) / columns)
    figure = Figure(figsize=(1.5 * columns, 1.9 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid:
        axes.set_axis_off()
    for index, axes in zip(order, grid, strict=False):
        axes.imshow(pixels(images[index].cpu()), cmap="gray_r")
        guess = int(prediction.mean[index].argmax())
        nats = float(prediction.predictive_entropy[index])
        text = f"guess {guess}, is {int(labels[index])}\n{nats:.2f} nats"
        axes.set_title(text, fontsize=8)
    _head(
        figure,
        f"The {len(order)} of {len(labels)} held-out samples that the ensemble is "
        f"least sure of",
        "Above each: its guess, its label, and the entropy of the mean prediction",
        title,
        width=105,
    )
    return figure


def pixels(image: Tensor) -> np.ndarray:
    """Return an image [C, H, W] between zero and one; three channels are colours."""
    low, high = image.min(), image.max()
    image = (image - low) / torch.clamp(high - low, min=torch.finfo(image.dtype).tiny)
    image = image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)
    return image.numpy()


def _head(figure: Figure, *lines: str, width: int = 85) -> None:
    text = "\n".join(textwrap.fill(line, width) for line in lines)
    figure.suptitle(text, fontsize="medium", parse_math=False)  # a dollar stays one


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

_MOST_LINES = 100
"""Epochs in the table of a page; of more some are left out."""

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
    epsilon = job.plan.epsilon()
    return (
        f"For release: {folder / checkpoint.MODEL}, with epsilon {epsilon:.3f} at "
        f"delta {job.plan.delta:g} ({job.plan.neighbours}). The other files reveal "
        f"more of the training data."
    )


def write_page(
    folder: Path, job: Job, figures: Figures, images: Mapping[str, bytes]
) -> None:
    """Write the page of a finished run; `images` are its pictures by file name."""
    parts = [
        '<p class="warning"><strong>This page is not for release.</strong> Its figures '
        "and pictures come from the private data without noise.</p>\n",
        f"<h2>What may be released</h2>\n<p>{text(release(job, folder))}</p>\n",
    ]
    if job.plan:
        secret, shown = (
            ", ".join(f"<code>{name}</code>" for name in names)
            for names in (checkpoint.STATES, (*FIGURES.values(), *images, PAGE))
        )
        parts.append(
            f"<ul>\n<li>{secret}: keep them secret. The key in them reveals the noise."
            f"</li>\n<li>{shown}: not for release. They were computed from the private "
            f"data without noise.</li>\n</ul>\n"
        )
    parts += ["<h2>At the end</h2>\n", table(("", *COLUMNS), last_figures(figures))]
    for name, image in images.items():
        heading, caption = PICTURES[name]
        parts.append(
            f"<h2>{heading}</h2>\n<figure>\n"
            f'<img alt="{heading}" src="data:image/png;base64,'
            f'{base64.b64encode(image).decode()}">\n'
            f"<figcaption>{caption}</figcaption>\n</figure>\n"
        )
    parts += [
        "<h2>Epsilon and accuracy, epoch by epoch</h2>\n",
        _epochs(figures),
        "<h2>Settings</h2>\n",
        table(("", "value"), _settings(job)),
        "<p>Made by <code>python -m vgrad train</code>.</p>\n",
    ]
    save_page(folder / PAGE, title(job), parts)


def save_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write a page of HTML, whose title is not escaped yet, for its owner alone."""
    head = _HEAD.format(title=text(title)) + f"<h1>{text(title)}</h1>\n"
    content = "".join([head, *parts, "</body>\n</html>\n"])
    files.replace(path, content.encode(), private=True)


def _epochs(figures: Figures) -> str:
    plain, private = figures["plain"], figures.get("private")
    count = len(plain)
    every = -(-count // _MOST_LINES)
    head = ["epoch", "step", *(["epsilon spent"] if private else [])]
    for run in figures:
        head += [f"accuracy, {TITLES[run]}", f"loss, {TITLES[run]}"]
    lines = []
    # The last one always, whichever are left out.
    for i in [*range(every - 1, count - 1, every), count - 1]:
        line: list[object] = [i + 1, plain[i].step]
        if private:
            line.append(decimals(private[i].epsilon))
        for records in figures.values():
            line += [percent(records[i].test_accuracy), decimals(records[i].loss)]
        lines.append(line)
    return table(head, lines)


def _settings(job: Job) -> list[tuple[str, object]]:
    lines: dict[str, object] = {
        spelled(name): value for name, value in dataclasses.asdict(job.settings).items()
    }
    lines["training samples"] = len(job.data.y_train)
    lines["held-out samples"] = len(job.data.y_test)
    lines["steps of each model"] = job.ends[-1]
    if job.plan:
        lines["sampling rate"] = f"{job.plan.sampling_rate:.4g}"
        lines["noise multiplier"] = f"{job.plan.noise_multiplier:.4g}"
    return [*lines.items(), *job.description["machine"].items()]


def table(head: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """Return a table of a page."""
    rows = []
    for kind, cells in (("th", head), *(("td", line) for line in lines)):
        inner = "".join(f"<{kind}>{text(cell)}</{kind}>" for cell in cells)
        rows.append(f"<tr>{inner}</tr>\n")
    return f"<table>\n{''.join(rows)}</table>\n"


def text(value: object) -> str:
    """Return a value as text of a page."""
    return escape(printable(str(value)))

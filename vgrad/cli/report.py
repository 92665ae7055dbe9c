"""The report of a run: a line an epoch, a table, and a picture.

Figures and the picture are made from the private data, without noise: they are not for
release.
"""

import io
import statistics
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from vgrad import files
from vgrad.cli import checkpoint
from vgrad.cli.checkpoint import Figures, Record
from vgrad.cli.setup import Job
from vgrad.dp import Plan
from vgrad.report import table
from vgrad_command import printable

TITLES = {"private": "private SGD", "plain": "plain SGD"}

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


def show_epoch(number: str, figures: Figures) -> None:
    """Print a line of the latest figures, in brackets without privacy."""
    first, *beside = (_texts(records[-1:]) for records in figures.values())
    words = [f"epoch {number}"]
    for name, text in first.items():
        brackets = "".join(f" ({texts[name]})" for texts in beside)
        words.append(f"{name} {text}{brackets}")
    say("  ".join(words))


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


def finish(folder: Path, job: Job, figures: Figures) -> None:
    """Print a table of the last figures, and draw the picture, the last file."""
    rows = [("", *COLUMNS), *last_figures(figures)]
    for line in table(rows, right=range(1, 5)).splitlines():
        say(line)
    say(release(job, folder))
    figure = curves(title(job), figures, delta=job.settings.delta)
    write_picture(figure, folder / CURVES)
    say(f"The run in a picture, not for release: {folder / CURVES}")


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


# The picture.

CURVES = "curves.png"

COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()
"""For all pictures, with bench/: distinct under colour blindness.

Reference: Okabe and Ito, Color Universal Design, 2008.
"""

_LOOKS = {
    "private": {"color": COLOURS[0], "linestyle": "-", "marker": "o"},
    "plain": {"color": COLOURS[1], "linestyle": "--", "marker": "s"},
}
"""Colour, dashes and marker of each run, so that grey prints differ too."""


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
    name = printable(name)
    return name if len(name) <= 60 else f"{name[:30]} ... {name[-30:]}"


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
    text = textwrap.fill(f"{runs}: {title}", 85)
    figure.suptitle(text, fontsize="medium", parse_math=False)  # a dollar stays one
    # Below the panels, where it covers no line.
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def write_picture(figure: Figure, path: Path) -> None:
    """Write a picture as PNG."""
    image = io.BytesIO()
    with warnings.catch_warnings():
        # The font may lack letters of a name, and draws boxes then.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(image, format="png", dpi=120)
    files.replace(path, image.getvalue(), private=True)

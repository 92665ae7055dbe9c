"""The pictures of a run, each with a title that says what it shows and of which run.

`curves.png` shows accuracy and privacy over the steps. For an ensemble
`reliability.png` shows whether its confidence matches its accuracy, and `uncertain.png`
what it is least sure of.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vgrad import files
from vgrad.cli.metrics import RUNS, Record
from vgrad.cli.setup import Job, Pair
from vgrad.ensemble.calibration import reliability
from vgrad.ensemble.prediction import class_prediction
from vgrad_command import printable

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
"""For all pictures, with bench/: whoever is colour-blind can tell them apart.

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

    Of an ensemble's two runs the private one, if any, shows what it is unsure of.
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
    """Return a name of the user's in a form that fits into a title."""
    name, half = printable(name), _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]} ... {name[-half:]}"


def curves(
    title: str, private: Sequence[Record], plain: Sequence[Record], *, delta: float
) -> Figure:
    """Draw epsilon and accuracy, that of an ensemble's members pale, over the steps."""
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
        mean = class_prediction(logits).mean
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
    found = class_prediction(logits)
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
        axes.imshow(_picture(images[index].cpu()), cmap="gray_r")
        guess, nats = int(found.mean[index].argmax()), found.predictive_entropy[index]
        axes.set_title(
            f"guess {guess}, is {int(labels[index])}\n{float(nats):.2f} nats",
            fontsize=8,
        )
    _head(
        figure,
        f"The {len(order)} of {len(labels)} held-out samples that the ensemble trained "
        f"by {name} is least sure of",
        "Above each: its guess, what it is, and the entropy of the mean prediction",
        title,
        width=105,
    )
    return figure


def _picture(image: Tensor) -> np.ndarray:
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
    """Write a picture as PNG, and return what was written."""
    image = io.BytesIO()
    with warnings.catch_warnings():
        # The font may lack letters of a name, and draws boxes then.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(image, format="png", dpi=120)
    files.replace(path, image.getvalue(), private=True)
    return image.getvalue()

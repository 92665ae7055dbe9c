"""Two pictures of an ensemble: whether it is as sure as it is right, and of what least.

Both are made of held-out samples, without noise: they are not for release.
"""

import io
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vgrad.cli import files
from vgrad.ensemble.calibration import reliability
from vgrad.ensemble.prediction import class_prediction

RELIABILITY = "reliability.png"
UNCERTAIN = "uncertain.png"

_BINS = 10
_SHOWN = 24


def write_reliability(
    folder: Path, scores: Mapping[str, Tensor], labels: Tensor
) -> None:
    """Draw accuracy over confidence, and how many samples have that confidence.

    `scores` are logits `[E, N, C]` by name of the run. Samples that a diverged member
    has no probabilities for are left out.
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
    # What is not a number is as uncertain as can be.
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

"""Images for experiments: real ones that ship with packages, made ones, the user's own.

N samples, C channels, S the side of an image in pixels. Labels are int64 `[N]`.
"""

import importlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.cli import data as sources

CLASSES = 10
_ENDINGS = (".jpeg", ".jpg", ".png", ".ppm", ".webp")


class Images(NamedTuple):
    """Images `[N, C, S, S]` in float32, and labels.

    Attributes:
        title: their name in figures.
    """

    title: str
    x: Tensor
    y: Tensor
    classes: int

    def split(self, held_out: int) -> tuple["Images", "Images"]:
        """Return all but the last samples, and these."""
        first = Images(self.title, self.x[:-held_out], self.y[:-held_out], self.classes)
        last = Images(self.title, self.x[-held_out:], self.y[-held_out:], self.classes)
        return first, last


def images(source: str | None, n: int, side: int, *, channels: int = 3) -> Images:
    """Return N images of a source, in an order that does not change.

    `source` is a folder with a folder of pictures for each class, an .npz file or a
    name as `python -m vgrad train --data` takes them, or None: made images.

    Raises:
        FileNotFoundError, ValueError: it cannot be read, or has fewer samples.
    """
    if source is None:
        return make_images(n, side, channels=channels)
    if Path(source).is_dir():
        return _folder(Path(source), n, side, channels)
    loaded = sources.load(source, seed=0)
    x = torch.cat([loaded.x_train, loaded.x_test])
    y = torch.cat([loaded.y_train, loaded.y_test])
    return _resized(source, x, y, loaded.classes, n, side, channels)


def make_images(n: int, side: int, *, channels: int = 3, seed: int = 0) -> Images:
    """Make images that can be learned: gratings under noise, one angle for each class.

    Frequency, phase and colours vary from sample to sample, so that no single pixel
    tells the class.
    """
    source = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    angle = (y + 0.3 * torch.randn(n, generator=source)) * math.pi / CLASSES
    waves = 2 + 2 * torch.rand(n, generator=source)
    phase = 2 * math.pi * torch.rand(n, generator=source)
    at = torch.linspace(0, 2 * math.pi, side)
    across = angle.cos()[:, None, None] * at + angle.sin()[:, None, None] * at[:, None]
    gratings = (waves[:, None, None] * across + phase[:, None, None]).sin()
    colours = 0.5 + torch.rand(n, channels, 1, 1, generator=source)
    noise = torch.randn(n, channels, side, side, generator=source)
    order = torch.randperm(n, generator=source)
    x = gratings[:, None] * colours + 0.5 * noise
    return Images(f"made gratings, {side} x {side}", x[order], y[order], CLASSES)


def _folder(path: Path, n: int, side: int, channels: int) -> Images:
    """Read as many pictures of each class as there are to be, scaled to the side."""
    pictures = importlib.import_module("PIL.Image")
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir())
    named = [
        (file, label)
        for label, folder in enumerate(classes)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in _ENDINGS
    ]
    if len(classes) < 2 or len(named) < n:
        raise ValueError(
            f"--data {path}: expected a folder for each class with {n} pictures in "
            f"all ({', '.join(_ENDINGS)}), got {len(classes)} folders and "
            f"{len(named)} pictures."
        )
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(0))
    rows, labels = [], []
    for at in order[:n].tolist():
        file, label = named[at]
        try:
            with pictures.open(file) as picture:
                scaled = picture.convert("RGB" if channels == 3 else "L")
                rows.append(np.array(scaled.resize((side, side)), np.float32) / 255)
        except OSError as error:
            raise ValueError(f"--data {path}: {file.name} is no picture.") from error
        labels.append(label)
    x = torch.from_numpy(np.stack(rows)).reshape(n, side, side, channels)
    x, y = x.permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)
    return Images(path.name, x, y, len(classes))


def _resized(
    source: str, x: Tensor, y: Tensor, classes: int, n: int, side: int, channels: int
) -> Images:
    """Take the first samples, scaled to the side, grey ones in all channels."""
    if len(x) < n:
        raise ValueError(f"--data {source}: expected {n} images, got {len(x)}.")
    x = F.interpolate(x[:n], (side, side), mode="bilinear", antialias=True)
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    title = f"{Path(source).name}, {side} x {side}"
    return Images(title, x.contiguous(), y[:n], classes)

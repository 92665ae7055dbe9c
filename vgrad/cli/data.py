"""Labelled images for the main job, from a package, a file or torchvision.

N samples, C channels, H height, W width. Nothing is divided by statistics of the data,
which are private.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vgrad import files
from vgrad.cli.models import Shape

Arrays = dict[str, np.ndarray]

KEYS = ("x_train", "y_train", "x_test", "y_test")
"""The arrays of an .npz file; `classes`, one number, is optional."""

_MOST_CLASSES = 2**16

_PUBLIC_CLASSES = 10
"""Of digits, MNIST and CIFAR-10, by their public descriptions."""


class Dataset(NamedTuple):
    """Images as float32 `[N, C, H, W]` and labels as int64 `[N]`; sizes are public."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    @property
    def shape(self) -> Shape:
        """The size of the images and the number of classes."""
        channels, height, width = self.x_train.shape[1:]
        return Shape(channels, height, width, self.classes)


def load(source: str, *, seed: int) -> Dataset:
    """Read the data set that `source` names: a key of `SOURCES` or an .npz file.

    Bytes are divided by 255, other numbers taken as they are; features become images
    of one row. `seed` fixes how scikit-learn's digits are split.
    """
    try:
        if source in SOURCES:
            return _checked({**SOURCES[source](seed), "classes": _PUBLIC_CLASSES})
        if not source.endswith(".npz"):
            raise ValueError(f"expected {', '.join(SOURCES)} or a file named *.npz.")
        if not Path(source).is_file():
            raise FileNotFoundError(f"--data {source}: expected a file, got none.")
        return _checked(_read_npz(Path(source)))
    except ValueError as error:
        raise ValueError(f"--data {source}: {error}") from error


def digest(data: Dataset) -> str:
    """Hash every pixel and label, SHA-256 in hexadecimal."""
    return files.digest({**data._asdict(), "classes": torch.tensor(data.classes)})


def _digits(seed: int) -> Arrays:
    bunch: Any = importlib.import_module("sklearn.datasets").load_digits()
    images, labels = (bunch.images / 16).astype(np.float32), bunch.target
    source = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=source).numpy()
    test, train = np.split(order, [len(images) // 5])  # a fifth is held out
    parts = images[train], labels[train], images[test], labels[test]
    return dict(zip(KEYS, parts, strict=True))


def _torchvision(name: str, _: int) -> Arrays:
    try:
        datasets: Any = importlib.import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--data {name.lower()}: expected torchvision to be installed. Run "
            f"pip install torchvision."
        ) from error
    folder, read = Path.home() / ".cache" / "vgrad", getattr(datasets, name)
    arrays: Arrays = {}
    for split in ("train", "test"):
        dataset = read(folder, train=split == "train", download=True)
        images = np.asarray(dataset.data)
        if images.ndim == 4:  # torchvision keeps colours last
            images = images.transpose(0, 3, 1, 2)
        arrays[f"x_{split}"] = images
        arrays[f"y_{split}"] = np.asarray(dataset.targets)
    return arrays


SOURCES: dict[str, Callable[[int], Arrays]] = {
    "digits": _digits,
    "mnist": partial(_torchvision, "MNIST"),
    "cifar10": partial(_torchvision, "CIFAR10"),
}


def _read_npz(path: Path) -> Arrays:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            names = [key for key in (*KEYS, "classes") if key in archive]
            arrays = {key: np.asarray(archive[key]) for key in names}
    except Exception as error:
        # A damaged archive or header raises errors of many types.
        raise ValueError(
            f"expected arrays of numbers as numpy.savez writes them, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if missing := [key for key in KEYS if key not in arrays]:
        raise ValueError(
            f"expected the keys {', '.join(KEYS)}, but {', '.join(missing)} is missing."
        )
    return arrays


def _checked(arrays: Mapping[str, Any]) -> Dataset:
    x_train, y_train, x_test, y_test = (
        _images(key, arrays[key]) if key[0] == "x" else _labels(key, arrays[key])
        for key in KEYS
    )
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if len(x) != len(y):
            raise ValueError(
                f"expected as many labels as images, got {len(y)} in y_{split} and "
                f"{len(x)} in x_{split}."
            )
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"expected images of one size, got {tuple(x_train.shape[1:])} in x_train "
            f"and {tuple(x_test.shape[1:])} in x_test."
        )
    largest = max(int(y_train.max()), int(y_test.max()))
    count = np.asarray(arrays.get("classes", largest + 1))
    if count.ndim != 0 or count.dtype.kind not in "iu":
        raise ValueError(
            f"expected one whole number in classes, got {count.dtype} of shape "
            f"{count.shape}."
        )
    classes = int(count)
    if not 2 <= classes <= _MOST_CLASSES or largest >= classes:
        raise ValueError(
            f"expected labels from 0 to classes - 1 of at least two classes and at "
            f"most {_MOST_CLASSES}, got the label {largest} and {classes} classes."
        )
    return Dataset(x_train, y_train, x_test, y_test, classes)


def _images(key: str, array: np.ndarray) -> Tensor:  # float32 [N, C, H, W]
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise ValueError(
            f"expected floating-point numbers or bytes (uint8) in {key}, got "
            f"{array.dtype}."
        )
    if array.ndim not in (2, 3, 4) or array.size == 0:
        raise ValueError(
            f"expected images [N, H, W] or [N, C, H, W], or features [N, F], with no "
            f"size of zero, in {key}, got shape {array.shape}."
        )
    with np.errstate(over="ignore"):  # numbers that do not fit become infinite
        images = torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8:
        images /= 255
    if not images.isfinite().all():
        raise ValueError(
            f"expected finite float32 numbers in {key}, got NaN or infinity."
        )
    while images.ndim < 4:
        images = images.unsqueeze(1)
    return images


def _labels(key: str, array: np.ndarray) -> Tensor:  # int64 [N]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"expected whole numbers [N] in {key}, got {array.dtype} of shape "
            f"{array.shape}."
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError(
            f"expected labels from 0 on in {key}, got {array.min()} to {array.max()}."
        )
    return torch.from_numpy(array.astype(np.int64))

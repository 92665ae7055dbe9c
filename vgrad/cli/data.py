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
    missing = ", ".join(key for key in KEYS if key not in arrays)
    _check(not missing, f"the keys {', '.join(KEYS)}", f"none of {missing}")
    return arrays


def _check(holds: bool, expected: str, actual: object) -> None:
    if not holds:
        raise ValueError(f"expected {expected}, got {actual}.")


def _checked(arrays: Mapping[str, Any]) -> Dataset:
    x_train, x_test = (_images(key, arrays[key]) for key in ("x_train", "x_test"))
    y_train, y_test = (_labels(key, arrays[key]) for key in ("y_train", "y_test"))
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        counts = f"{len(y)} in y_{split} and {len(x)} in x_{split}"
        _check(len(x) == len(y), "as many labels as images", counts)
    sizes = tuple(x_train.shape[1:]), tuple(x_test.shape[1:])
    _check(sizes[0] == sizes[1], "images of one size", f"{sizes[0]} and {sizes[1]}")
    largest = max(int(y_train.max()), int(y_test.max()))
    count = np.asarray(arrays.get("classes", largest + 1))
    scalar = count.ndim == 0 and count.dtype.kind in "iu"
    _check(scalar, "one whole number in classes", f"{count.dtype} of {count.shape}")
    classes = int(count)
    _check(
        2 <= classes <= _MOST_CLASSES and largest < classes,
        f"labels from 0 to classes - 1 of at least two classes and at most "
        f"{_MOST_CLASSES}",
        f"the label {largest} and {classes} classes",
    )
    return Dataset(x_train, y_train, x_test, y_test, classes)


def _images(key: str, array: np.ndarray) -> Tensor:  # float32 [N, C, H, W]
    numbers = array.dtype == np.uint8 or array.dtype.kind == "f"
    expected = f"floating-point numbers or bytes (uint8) in {key}"
    _check(numbers, expected, array.dtype)
    shaped = array.ndim in (2, 3, 4) and array.size > 0
    expected = "images [N, H, W] or [N, C, H, W], or features [N, F], with no size of"
    _check(shaped, f"{expected} zero, in {key}", f"shape {array.shape}")
    with np.errstate(over="ignore"):  # numbers that do not fit become infinite
        images = torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8:
        images /= 255
    finite = bool(images.isfinite().all())
    _check(finite, f"finite float32 numbers in {key}", "NaN or infinity")
    while images.ndim < 4:
        images = images.unsqueeze(1)
    return images


def _labels(key: str, array: np.ndarray) -> Tensor:  # int64 [N]
    integers = array.dtype.kind in "iu" and array.ndim == 1
    _check(integers, f"whole numbers [N] in {key}", f"{array.dtype} of {array.shape}")
    if array.size:
        low, high = array.min(), array.max()
        valid = 0 <= low and high < 2**31
        _check(valid, f"labels from 0 on in {key}", f"{low} to {high}")
    return torch.from_numpy(array.astype(np.int64))

"""Labelled images for the main job, from a package, a file or torchvision.

N samples, C channels, H height, W width. Preprocessing divides by constants of the
format and never by statistics of the data, which are private.
"""

import hashlib
import importlib
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vgrad.cli.models import MOST_CLASSES, Shape

Arrays = dict[str, np.ndarray]

KEYS = ("x_train", "y_train", "x_test", "y_test")
"""What an .npz file must hold; `classes`, one number, is optional."""

_PUBLIC_CLASSES = 10
"""How many classes digits, MNIST and CIFAR-10 have by their public descriptions."""


_UNPACKED = 2**24
_RATIO = 100
"""A file unpacks to so many bytes, or to so many times its size, and not to more."""


class Dataset(NamedTuple):
    """Images as float32 `[N, C, H, W]` and labels as int64 `[N]`.

    The sizes, and how many classes there are, count as public.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    @property
    def shape(self) -> Shape:
        """What a model for these images is made for."""
        channels, height, width = self.x_train.shape[1:]
        return Shape(channels, height, width, self.classes)

    def to(self, device: torch.device) -> "Dataset":
        """Move the tensors to a device."""
        moved = [tensor.to(device) for tensor in self[:4]]
        return Dataset(*moved, classes=self.classes)


def load(source: str, *, seed: int) -> Dataset:
    """Read the data set that `source` names: a key of `SOURCES` or an .npz file.

    A file holds `x_train` and `x_test`, `[N, H, W]`, `[N, C, H, W]` or `[N, features]`
    (which become images of one row), and the labels `y_train` and `y_test`, whole
    numbers `[N]` from 0 on. Bytes are divided by 255, other numbers taken as they are.
    The number of classes is the file's `classes`, or else the largest label plus one
    over both splits; either way it counts as public. `seed` fixes how scikit-learn's
    digits are split, the others come split.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or holds something else than described here.
        ModuleNotFoundError: the package that has the data is not installed.

    Example:
        >>> data = load("digits", seed=0)
        >>> data.x_train.shape, data.x_test.shape, data.classes
        (torch.Size([1438, 1, 8, 8]), torch.Size([359, 1, 8, 8]), 10)
    """
    if source in SOURCES:
        return _checked(source, SOURCES[source](seed), _PUBLIC_CLASSES)
    if not source.endswith(".npz"):
        raise ValueError(
            f"--data {source}: expected {', '.join(SOURCES)} or a file named *.npz."
        )
    arrays = _read_npz(source)
    given = arrays.pop("classes", None)
    return _checked(source, arrays, None if given is None else _count(source, given))


def digest(data: Dataset) -> str:
    """Hash every pixel and label, SHA-256 in hexadecimal."""
    found = hashlib.sha256(str(data.classes).encode())
    for tensor in data[:4]:
        array = tensor.contiguous().numpy()
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.data)
    return found.hexdigest()


def _digits(seed: int) -> Arrays:
    """Scikit-learn's 1797 digits of 8 x 8 pixels; a fifth of them is held out."""
    bunch: Any = importlib.import_module("sklearn.datasets").load_digits()
    images, labels = (bunch.images / 16).astype(np.float32), bunch.target
    order = torch.randperm(
        len(images), generator=torch.Generator().manual_seed(seed)
    ).numpy()
    test, train = np.split(order, [len(images) // 5])
    return dict(
        zip(
            KEYS,
            (images[train], labels[train], images[test], labels[test]),
            strict=True,
        )
    )


def _torchvision(name: str) -> Callable[[int], Arrays]:
    """Make a reader of one of torchvision's data sets, downloaded once."""

    def read(_: int) -> Arrays:
        try:
            datasets: Any = importlib.import_module("torchvision.datasets")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"--data {name.lower()}: expected torchvision to be installed. Run "
                f"pip install torchvision."
            ) from error
        arrays: Arrays = {}
        for split in ("train", "test"):
            folder = Path.home() / ".cache" / "vgrad"
            found = getattr(datasets, name)(
                folder, train=split == "train", download=True
            )
            images = np.asarray(found.data)
            if images.ndim == 4:  # torchvision keeps colours last
                images = images.transpose(0, 3, 1, 2)
            arrays[f"x_{split}"] = images
            arrays[f"y_{split}"] = np.asarray(found.targets)
        return arrays

    return read


SOURCES: dict[str, Callable[[int], Arrays]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST"),
    "cifar10": _torchvision("CIFAR10"),
}


def _read_npz(source: str) -> Arrays:
    """Read the arrays of a file, without pickle."""
    if not Path(source).is_file():
        raise FileNotFoundError(f"--data {source}: expected a file, got none there.")
    try:
        with zipfile.ZipFile(source) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers of old or odd writers
            members = {each.filename: each for each in archive.infolist()}
            wanted = [key for key in (*KEYS, "classes") if f"{key}.npy" in members]
            _refuse_bomb(source, [members[f"{key}.npy"] for key in wanted])
            arrays = {key: _read_npy(archive, members[f"{key}.npy"]) for key in wanted}
    except Exception as error:
        # A forged archive or header may lead zipfile and numpy anywhere.
        raise ValueError(
            f"--data {source}: expected arrays of numbers as numpy.savez writes them, "
            f"got {type(error).__name__}: {error}"
        ) from error
    missing = [key for key in KEYS if key not in arrays]
    if missing:
        raise ValueError(
            f"--data {source}: expected the keys {', '.join(KEYS)}, but "
            f"{', '.join(missing)} is missing."
        )
    return arrays


def _refuse_bomb(source: str, members: list[zipfile.ZipInfo]) -> None:
    """Refuse what would fill the memory; a member cannot unpack to more than it says.

    Raises:
        ValueError: there is little in the file, and it unpacks to much.
    """
    packed = Path(source).stat().st_size  # the archive may say what it likes
    size = sum(each.file_size for each in members)
    if size > max(_UNPACKED, _RATIO * packed):
        raise ValueError(
            f"{packed} bytes that unpack to {size}, more than {_RATIO} times as many. "
            f"If that is right, write them with numpy.savez, which does not compress."
        )


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read an array, without pickle."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed in another way")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked(source: str, arrays: Arrays, classes: int | None) -> Dataset:
    """Check arrays from anywhere and make tensors of them."""
    images, labels = {}, {}
    for split in ("train", "test"):
        x, y = f"x_{split}", f"y_{split}"
        images[split] = _images(source, x, arrays[x])
        labels[split] = _labels(source, y, arrays[y])
        if len(images[split]) != len(labels[split]):
            raise ValueError(
                f"--data {source}: expected as many labels as images, got "
                f"{len(labels[split])} in {y} and {len(images[split])} in {x}."
            )
    if images["train"].shape[1:] != images["test"].shape[1:]:
        raise ValueError(
            f"--data {source}: expected images of one size, got "
            f"{tuple(images['train'].shape[1:])} in x_train and "
            f"{tuple(images['test'].shape[1:])} in x_test."
        )
    largest = max(int(each.max()) for each in labels.values())
    classes = largest + 1 if classes is None else classes
    if not 2 <= classes <= MOST_CLASSES or largest >= classes:
        raise ValueError(
            f"--data {source}: expected labels from 0 to classes - 1 of at least two "
            f"classes and at most {MOST_CLASSES}, got the label {largest} and "
            f"{classes} classes."
        )
    return Dataset(
        images["train"], labels["train"], images["test"], labels["test"], classes
    )


def _images(source: str, key: str, array: np.ndarray) -> Tensor:
    """Turn an array into images, float32 [N, C, H, W]."""
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise ValueError(
            f"--data {source}: expected floating-point numbers or bytes (uint8) in "
            f"{key}, got {array.dtype}."
        )
    if array.ndim not in (2, 3, 4) or array.size == 0:
        raise ValueError(
            f"--data {source}: expected images [N, H, W] or [N, C, H, W], or features "
            f"[N, F], with no size of zero, in {key}, got shape {array.shape}."
        )
    with np.errstate(over="ignore"):  # what does not fit is infinite, and refused
        images = torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8:
        images /= 255
    if not images.isfinite().all():
        raise ValueError(
            f"--data {source}: expected finite float32 numbers in {key}, got NaN or "
            f"infinity."
        )
    while images.ndim < 4:
        images = images.unsqueeze(1)
    return images


def _labels(source: str, key: str, array: np.ndarray) -> Tensor:
    """Turn an array into labels, int64 [N]."""
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"--data {source}: expected whole numbers [N] in {key}, got {array.dtype} "
            f"of shape {array.shape}."
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError(
            f"--data {source}: expected labels from 0 on in {key}, got "
            f"{array.min()} to {array.max()}."
        )
    return torch.from_numpy(array.astype(np.int64))


def _count(source: str, array: np.ndarray) -> int:
    """Read the optional key `classes`."""
    if array.ndim != 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"--data {source}: expected one whole number in classes, got {array.dtype} "
            f"of shape {array.shape}."
        )
    return int(array)

"""The files of a checkpoint: pieces of tensors, and an index that is written last.

A piece is a box of a tensor. Each is in one file, whose name belongs to one checkpoint.
The index says which files make up the checkpoint and is replaced as a whole: until the
new one is there, the checkpoint before is complete.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks, files

INDEX = "index.safetensors"
KIND = "index of a checkpoint"
PIECES = "file of pieces of a checkpoint"
CALLED = "a checkpoint as save_checkpoint writes it"

DTYPES = {str(each): each for each in vars(torch).values() if type(each) is torch.dtype}
"""The dtypes by name."""

_OWN = re.compile(r"\.?pieces-[0-9a-f]{16}-\d+\.safetensors(\.partial)?")


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, offsets: Iterable[int], sizes: Iterable[int]) -> "Box":
        """Return a box that can be a key."""
        return cls(tuple(map(int, offsets)), tuple(map(int, sizes)))

    def common(self, other: "Box") -> "Box | None":
        """Return what is in both, None if that is nothing."""
        pairs = list(zip(*self, *other, strict=True))
        offsets = [max(a, b) for a, _, b, _ in pairs]
        ends = [min(a + m, b + n) for a, m, b, n in pairs]
        sizes = [end - low for low, end in zip(offsets, ends, strict=True)]
        return Box.of(offsets, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, part: "Box") -> tuple[slice, ...]:
        """Say where in a tensor of this box a part of it is."""
        lows = [a - b for a, b in zip(part.offsets, self.offsets, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(lows, part.sizes, strict=True))


class Index(NamedTuple):
    """What a checkpoint consists of.

    Attributes:
        checkpoint: its name, which the names of its files contain.
        settings: those of the run.
        tensors: their shapes and dtypes; they have no memory.
        pieces: the number of the file that each piece is in.
    """

    checkpoint: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    pieces: dict[str, dict[Box, int]]

    def file(self, number: int) -> str:
        """Name one of the files."""
        return f"pieces-{self.checkpoint}-{number}.safetensors"

    def files(self) -> set[str]:
        """Name all of the files."""
        return {self.file(n) for boxes in self.pieces.values() for n in boxes.values()}


def is_whole(shape: Collection[int], boxes: Collection[Box]) -> bool:
    """Say whether boxes, all of them different, make up a grid that fills a shape."""
    if 0 in shape:
        return not boxes
    cells = 1
    for dim, size in enumerate(shape):
        intervals = {(box.offsets[dim], box.sizes[dim]) for box in boxes}
        end = 0
        for start, length in sorted(intervals):
            if start != end or length < 1:
                return False
            end += length
        if end != size:
            return False
        cells *= len(intervals)
    return len(boxes) == cells


def parsed(folder: Path, description: Mapping[str, Any]) -> Index:
    """Check what an index says, which may be anything."""
    tensors, pieces = {}, {}
    try:
        checkpoint, settings = description["checkpoint"], description["settings"]
        fine = re.fullmatch("[0-9a-f]{16}", checkpoint) and isinstance(settings, dict)
        for name, (dtype, shape, boxes) in description["tensors"].items():
            tensors[name] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            pieces[name] = {Box.of(*box): int(number) for number, box in boxes}
            fine = fine and is_whole(shape, pieces[name])
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        fine = False
    if not fine:
        raise ValueError(f"{folder / INDEX}: expected {CALLED}, got a damaged file.")
    return Index(checkpoint, settings, tensors, pieces)


def read_index(folder: Path) -> Index:
    """Read the index in a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or something else.
    """
    _, description = files.read_parts(folder / INDEX, KIND, [""], called=CALLED)
    return parsed(folder, description)


def prepare(folder: Path) -> None:
    """Make a folder for its owner alone, if there is none; remove what a kill left."""
    folder.mkdir(mode=0o700, exist_ok=True)
    files.sync_folder(folder.parent)
    _remove_left_overs(folder)


def write(folder: Path, index: Index, number: int, own: Mapping[str, Tensor]) -> None:
    """Write one of the files of a checkpoint."""
    path = folder / index.file(number)
    files.write_tensors(path, own, {"kind": PIECES, "name": path.name}, private=True)


def complete(folder: Path, index: Index, description: Mapping[str, Any]) -> None:
    """Make files the checkpoint in a folder, and remove those of the one before."""
    lost = index.files() - {path.name for path in folder.iterdir()}
    if lost:
        raise FileNotFoundError(
            f"{folder}: expected a folder that all ranks share, got none of "
            f"{checks.listed(lost)} on rank 0. Pass a folder on a shared file system."
        )
    text = {**description, "kind": KIND}
    files.write_tensors(folder / INDEX, {}, text, private=True)
    _remove_left_overs(folder)


def fill(folder: Path, index: Index, targets: Mapping[str, tuple[Box, Tensor]]) -> None:
    """Write what is in the files to parts of tensors, one file after the other.

    Raises:
        ValueError: a file is missing, damaged, or belongs to another checkpoint.
    """
    wanted: dict[int, list[tuple[str, Box, Box]]] = defaultdict(list)
    for name, (target, _) in targets.items():
        for box, number in index.pieces[name].items():
            common = target.common(box)
            if common is not None:
                wanted[number].append((name, box, common))
    for number, boxes in wanted.items():
        path = folder / index.file(number)
        try:
            parts, found = files.read_parts(path, PIECES, [""], called=CALLED)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error
        for name, box, common in boxes:
            target, local = targets[name]
            piece = parts[""].get(name)
            if (
                found.get("name") != path.name
                or piece is None
                or (tuple(piece.shape), piece.dtype) != (box.sizes, local.dtype)
            ):
                raise ValueError(
                    f"{path}: expected {CALLED}, got another of its files, "
                    f"or one of another checkpoint."
                )
            local[target.slices(common)].copy_(piece[box.slices(common)])


def _remove_left_overs(folder: Path) -> None:
    """Remove files of checkpoints that were replaced, or never completed."""
    try:
        kept = read_index(folder).files()
    except FileNotFoundError:
        kept = set()
    except ValueError:
        return  # which files a damaged index names is not known
    for path in folder.iterdir():
        if _OWN.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)

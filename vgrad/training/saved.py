"""States in folders: each rank writes its shards, any number of ranks reads.

A folder has files of pieces, which are boxes of tensors, and `meta.json`, which lists
them. It is written last and as a whole: until then the checkpoint before is complete.
"""

# The storage of safetensors of `torch.distributed.checkpoint` reads every file of the
# folder, leaves memory as it was where one is missing, seals nothing, lets everybody
# read, and its ranks send each other pickles.

import hashlib
import json
import math
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks, files, tree
from vgrad.ranks import RankError, Ranks
from vgrad.torch_private import shards
from vgrad.training.state import with_history
from vgrad.typing import T, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

META = "meta.json"
PIECES = "file of pieces of a checkpoint"
CALLED = "a checkpoint as vgrad.training.save writes it"
DTYPES = {str(x): x for x in vars(torch).values() if type(x) is torch.dtype}

_OWN_FILE = re.compile(
    r"\.?(pieces-[0-9a-f]{16}-\d+\.safetensors|meta\.json)(\.partial)?"
)


class Box(NamedTuple):
    """A part of a tensor: its offset in each dimension, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, offsets: Iterable[int], sizes: Iterable[int]) -> "Box":
        """Return a box that can be a key."""
        return cls(tuple(map(int, offsets)), tuple(map(int, sizes)))

    def common(self, other: "Box") -> "Box | None":
        """Return the intersection, None if it is empty."""
        pairs = list(zip(*self, *other, strict=True))
        offsets = [max(a, b) for a, _, b, _ in pairs]
        ends = [min(a + m, b + n) for a, m, b, n in pairs]
        sizes = [end - low for low, end in zip(offsets, ends, strict=True)]
        return Box.of(offsets, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, part: "Box") -> tuple[slice, ...]:
        """Return the index of a part in a tensor of this box."""
        lows = [a - b for a, b in zip(part.offsets, self.offsets, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(lows, part.sizes, strict=True))


Pieces = Mapping[str, tuple[Box, Tensor]]
"""The pieces on this rank, by the names of their tensors."""


class Meta(NamedTuple):
    """The content of `meta.json`."""

    checkpoint: str  # its name, which the names of its files contain
    settings: dict[str, Any]
    tensors: dict[str, Tensor]  # shapes and dtypes, without memory
    pieces: dict[str, dict[Box, int]]  # the number of the file that each is in

    def file(self, number: int) -> str:
        """Return the name of a file."""
        return f"pieces-{self.checkpoint}-{number}.safetensors"

    def files(self) -> set[str]:
        """Return the names of all files of pieces."""
        return {self.file(n) for boxes in self.pieces.values() for n in boxes.values()}


def save(
    folder: Path | str,
    state: Tree,
    mesh: "DeviceMesh | None" = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a state, an ensemble or any other tree of tensors to a folder.

    Called on every rank of the mesh, with a folder that all ranks share; without a
    mesh by a single process. Each rank writes its shards of DTensors. Plain tensors are
    the same on all ranks, which is checked, and are written once, each by one of them.

    At any moment the old checkpoint is there or the new one; files left by a kill are
    removed by the next call. The folder belongs to one run at a time. Only the owner
    can read the files, since a state holds a secret key. Nothing is pickled. While
    writing, a rank holds two more copies of its tensors.

    Args:
        folder: its parent has to be there.
        settings: values of JSON that have to be the same when the run goes on.

    Raises:
        TypeError: a leaf is no tensor, or has a dtype that the format lacks.
        ValueError: a DTensor is a partial sum, the mesh lacks some of its shards, or
            JSON has no such settings.
        RankError: settings, names, shapes, dtypes or plain tensors differ between
            ranks, or another rank has failed.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.ones(2), "step": torch.tensor(7)}
        >>> start = {"w": torch.zeros(2), "step": torch.tensor(0)}
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     save(f"{parent}/run", state, settings={"lr": 0.1})
        ...     load(f"{parent}/run", start, settings={"lr": 0.1})
        {'w': tensor([1., 1.]), 'step': tensor(7)}
    """
    function, folder = "save", Path(folder)
    ranks = Ranks.of_all(function, mesh)
    pieces, plans = _planned(function, ranks, state, settings, sealed=True)
    description = {
        "checkpoint": plans[0]["name"],
        "settings": plans[0]["setting"],
        "tensors": _writers(function, plans),
    }
    meta = _parsed(folder, description)
    with ranks.together(function):
        if ranks.rank == 0:
            folder.mkdir(mode=0o700, exist_ok=True)
            files.sync_folder(folder.parent)
            _remove_other_files(folder)
    with ranks.together(function):
        written = {
            name: piece
            for name, (box, piece) in pieces.items()
            if meta.pieces[name][box] == ranks.rank
        }
        if written:
            path = folder / meta.file(ranks.rank)
            about = {"kind": PIECES, "name": path.name}
            files.write_tensors(path, written, about, private=True)
    with ranks.together(function):
        if ranks.rank == 0:
            lost = meta.files() - {path.name for path in folder.iterdir()}
            if lost:
                raise FileNotFoundError(
                    f"{folder}: expected a folder that all ranks share, got none of "
                    f"{checks.listed(lost)} on rank 0. Pass a folder on a shared file "
                    f"system."
                )
            content = {"checkpoint": description, "sha256": _digest(description)}
            files.replace(folder / META, json.dumps(content).encode(), private=True)
            _remove_other_files(folder)


def load(
    folder: Path | str,
    like: T,
    mesh: "DeviceMesh | None" = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> T:
    """Read a checkpoint of `save`: the tree of `like`, with the tensors saved.

    Called on every rank of the mesh, of which there may be more or fewer than at
    saving; without a mesh by a single process. `like` is the state of the run before
    its first step, and is left unchanged. Devices, layouts in memory, `requires_grad`
    and shards of DTensors are those in `like`, so that a run goes on with the same
    kernels and bits. A rank reads the files that hold parts of its shards, one at a
    time. Only the settings of this call are compared. `save` has an example.

    Raises:
        FileNotFoundError: there is no checkpoint in the folder.
        ValueError: a file is damaged or missing, names, shapes or dtypes are not as in
            `like`, or a setting was another one. A rank that fails makes all fail.
        RankError: settings differ between ranks, or ranks are at different places.
    """
    function, folder = "load", Path(folder)
    ranks = Ranks.of_all(function, mesh)
    _, plans = _planned(function, ranks, like, settings)
    _writers(function, plans)
    with _all_refuse(function, ranks):
        meta = read_meta(folder)
        for name, value in plans[0]["setting"].items():
            if name not in meta.settings or meta.settings[name] != value:
                saved = meta.settings
                before = repr(saved[name]) if name in saved else "no such setting"
                raise ValueError(
                    f"{folder}: expected a state saved with {name} = {value!r}, got "
                    f"one with {before}. Its run would go on with other numbers: keep "
                    f"the setting, or save to another place."
                )
        like = with_history(like, meta.tensors)
        tree.check_fit(str(folder), tree.state_dict(like), meta.tensors)
    ranks.check_same(function, checkpoint=meta.checkpoint)
    with _all_refuse(function, ranks), torch.no_grad():
        loaded = tree.tree_map(
            lambda x: torch.empty_like(x).requires_grad_(x.requires_grad), like
        )
        _fill(folder, meta, _local_pieces(function, tree.state_dict(loaded)))
    return loaded


@contextmanager
def _all_refuse(function: str, ranks: Ranks) -> Iterator[None]:
    """As `Ranks.together`; an error of another rank is a ValueError on this one."""
    try:
        with ranks.together(function):
            yield
    except RankError as error:
        raise ValueError(str(error)) from error


def _local_pieces(function: str, tensors: Mapping[str, Tensor]) -> Pieces:
    """Return the pieces on this rank, without empty ones."""
    pieces = {}
    for name, tensor in tensors.items():
        piece, box = tensor, Box.of([0] * tensor.dim(), tensor.shape)
        if shards.is_distributed(tensor):
            sharded: Any = tensor
            if any(placement.is_partial() for placement in sharded.placements):
                raise ValueError(
                    f"{function}: expected shards or replicas in {name!r}, got a "
                    f"partial sum, {sharded.placements}. Redistribute it first."
                )
            piece = sharded.to_local().detach()
            (chunk,) = sharded.__create_chunk_list__()
            box = Box.of(chunk.offsets, chunk.sizes)
            if piece.numel() and tuple(piece.shape) != box.sizes:
                raise ValueError(
                    f"{function}: expected shape {box.sizes} of this rank's shard of "
                    f"{name!r}, got {tuple(piece.shape)}. Shards are as torch.chunk "
                    f"cuts the whole."
                )
        if piece.numel():
            pieces[name] = box, piece
    return pieces


def _planned(
    function: str,
    ranks: Ranks,
    state: Tree,
    settings: Mapping[str, Any] | None,
    *,
    sealed: bool = False,
) -> tuple[Pieces, list[dict[str, Any]]]:
    """Return own pieces, and settings, names, shapes and pieces of all ranks."""
    with ranks.together(function):
        tensors = tree.state_dict(state)
        pieces = _local_pieces(function, tensors)
        plan = {
            "name": secrets.token_hex(8),
            "setting": dict(settings or {}),
            "tensor": {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()},
            "pieces": {
                name: [box, _seal(name, tensors[name], piece, ranks) if sealed else ""]
                for name, (box, piece) in pieces.items()
            },
        }
        try:
            text = json.dumps(plan, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{function}(settings): expected values of JSON, got another one "
                f"({error}). Give a number that is not finite as text."
            ) from error
    plans = ranks.exchanged(function, text)
    for rank, plan in enumerate(plans):
        for kind in ("setting", "tensor"):
            for name in plans[0][kind] | plan[kind]:
                first, other = (
                    repr(planned[kind][name]) if name in planned[kind] else "none"
                    for planned in (plans[0], plan)
                )
                if first != other:
                    raise RankError(
                        f"{function}: expected the same {kind} {name!r} on all ranks, "
                        f"got {first} on rank 0 and {other} on rank {rank}."
                    )
    return pieces, plans


def _seal(name: str, tensor: Tensor, piece: Tensor, ranks: Ranks) -> str:
    """Hash a piece that other ranks have too; empty if no other rank has it."""
    if ranks.size == 1:
        return ""
    if shards.is_distributed(tensor):
        sharded: Any = tensor
        replicated = any(placement.is_replicate() for placement in sharded.placements)
        if sharded.device_mesh.size() == ranks.size and not replicated:
            return ""
    return files.digest({name: piece})


def _writers(
    function: str, plans: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, list[int], list[tuple[int, Box]]]]:
    """Return dtype and shape of each tensor, and the rank that writes each piece."""
    writers, loads = {}, [0] * len(plans)
    for name, (dtype, shape) in plans[0]["tensor"].items():
        holders: dict[Box, dict[int, str]] = defaultdict(dict)
        for rank, plan in enumerate(plans):
            if name in plan["pieces"]:
                box, seal = plan["pieces"][name]
                holders[Box.of(*box)][rank] = seal
        if not _is_whole(shape, holders):
            raise ValueError(
                f"{function}(mesh): expected all pieces of {name!r}, got shapes "
                f"{[list(box.sizes) for box in holders]} of {shape}. Pass the mesh "
                f"that the state is sharded over."
            )
        boxes = []
        for box, seals in holders.items():
            first, *others = seals
            for rank in others:
                if seals[rank] != seals[first]:
                    raise RankError(
                        f"{function}: expected the same values in {name!r} on all "
                        f"ranks, got some on rank {rank} that rank {first} has not. "
                        f"Begin with the same state on every rank."
                    )
            writer = min(seals, key=lambda rank: loads[rank])
            loads[writer] += math.prod(box.sizes) * DTYPES[dtype].itemsize
            boxes.append((writer, box))
        writers[name] = dtype, shape, boxes
    return writers


def _is_whole(shape: Collection[int], boxes: Collection[Box]) -> bool:
    """Return whether different boxes make up a grid that fills a shape."""
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


def _digest(description: Any) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _parsed(folder: Path, description: Mapping[str, Any]) -> Meta:
    """Check a description, which may hold anything."""
    tensors, pieces = {}, {}
    try:
        checkpoint, settings = description["checkpoint"], description["settings"]
        valid = re.fullmatch("[0-9a-f]{16}", checkpoint) and isinstance(settings, dict)
        for name, (dtype, shape, boxes) in description["tensors"].items():
            tensors[name] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            pieces[name] = {Box.of(*box): int(number) for number, box in boxes}
            valid = valid and _is_whole(shape, pieces[name])
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        valid = False
    if not valid:
        raise ValueError(f"{folder / META}: expected {CALLED}, got a damaged file.")
    return Meta(checkpoint, settings, tensors, pieces)


def read_meta(folder: Path) -> Meta:
    """Read `meta.json`."""
    path = folder / META
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {CALLED}, got no file.")
    try:
        content = files.from_json(path.read_bytes())
        description = content["checkpoint"]
        if content["sha256"] != _digest(description):
            raise ValueError("its checksum does not match")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected {CALLED}, got a damaged file ({error})."
        ) from error
    return _parsed(folder, description)


def _fill(folder: Path, meta: Meta, targets: Pieces) -> None:
    """Copy pieces of files to pieces in memory, one file after the other."""
    boxes_of: dict[int, list[tuple[str, Box, Box]]] = defaultdict(list)
    for name, (target, _) in targets.items():
        for box, number in meta.pieces[name].items():
            common = target.common(box)
            if common is not None:
                boxes_of[number].append((name, box, common))
    for number, boxes in boxes_of.items():
        path = folder / meta.file(number)
        try:
            pieces, about = files.read_tensors(path, PIECES, called=CALLED)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error
        for name, box, common in boxes:
            target, local = targets[name]
            piece = pieces.get(name)
            if (
                about.get("name") != path.name
                or piece is None
                or (tuple(piece.shape), piece.dtype) != (box.sizes, local.dtype)
            ):
                raise ValueError(
                    f"{path}: expected {CALLED}, got another of its files, "
                    f"or one of another checkpoint."
                )
            local[target.slices(common)].copy_(piece[box.slices(common)])


def _remove_other_files(folder: Path) -> None:
    try:
        needed = read_meta(folder).files()
    except FileNotFoundError:
        needed = set()
    except ValueError:
        return  # the files of a damaged one are not known
    for path in folder.iterdir():
        if _OWN_FILE.fullmatch(path.name) and path.name not in needed | {META}:
            path.unlink(missing_ok=True)

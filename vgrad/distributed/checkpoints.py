"""A state of all ranks in a folder: every rank writes its shards, any number reads.

`torch.distributed.checkpoint` is not used, since its storage of safetensors reads
whatever files are in the folder, leaves memory as it was where one is missing, seals
nothing, lets everybody read, and its ranks send each other pickles.
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vgrad import files, tree
from vgrad.distributed import pieces
from vgrad.distributed.pieces import Box
from vgrad.distributed.ranks import RankError, Ranks
from vgrad.training.saved_states import check_fit, check_settings
from vgrad.typing import T, Tree

Held = Mapping[str, tuple[Box, Tensor]]
"""The pieces on this rank, by the names of their tensors."""


def save_checkpoint(
    folder: Path | str,
    state: Tree,
    mesh: DeviceMesh | None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a state, or any other tree of tensors, to a folder that all ranks share.

    Called on every rank of the mesh; `None` is a process alone. Each rank writes its
    shards of DTensors. Plain tensors are the same on all ranks, which is checked, and
    are written once, each by one of them. At any moment the old checkpoint is there or
    the new one, and what a kill leaves is removed by the next call. The folder belongs
    to one run at a time. Only the owner can read the files, since a state holds a
    secret key. `settings` are as for `vgrad.training.save_state`. While writing, a rank
    holds two more copies of what it writes.

    Raises:
        TypeError: a leaf is no tensor, or has a dtype that the format lacks.
        ValueError: a DTensor is a partial sum, the mesh lacks some of its shards, or
            JSON has no such settings.
        RankError: settings, names, shapes, dtypes or plain tensors differ between
            ranks, or another rank has failed.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.ones(2), "step": torch.tensor(7)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/run", state, None, settings={"lr": 0.1})
    """
    what, folder = "save_checkpoint", Path(folder)
    ranks = _everyone(what, mesh)
    with ranks.together(what):
        tensors = tree.state_dict(state)
        held = _held(what, tensors)
    plans = _told(what, ranks, settings, tensors, held, sealed=True)
    description = {
        "checkpoint": ranks.agree(what, name=secrets.token_hex(8))[0]["name"],
        "settings": plans[0]["setting"],
        "tensors": _shared_out(what, plans),
    }
    index = pieces.parsed(folder, description)
    with ranks.together(what):
        if ranks.rank == 0:
            pieces.prepare(folder)
    with ranks.together(what):
        own = {
            name: local
            for name, (box, local) in held.items()
            if index.pieces[name][box] == ranks.rank
        }
        if own:
            pieces.write(folder, index, ranks.rank, own)
    with ranks.together(what):
        if ranks.rank == 0:
            pieces.complete(folder, index, description)


def load_checkpoint(
    folder: Path | str,
    like: T,
    mesh: DeviceMesh | None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> T:
    """Read what `save_checkpoint` wrote: the tree of `like`, with the tensors saved.

    Called on every rank of the mesh, of which there may be more or fewer than at
    saving; `None` is a process alone. `like` is a state as the run starts with, which
    stays as it is. Devices, layouts in memory and how DTensors are sharded are its own,
    whatever they were at saving. A rank reads the files that hold parts of its shards,
    one at a time. Only the settings given here are compared.

    Raises:
        FileNotFoundError: there is no checkpoint in the folder.
        ValueError: a file is damaged or missing, names, shapes or dtypes are not those
            of `like`, or a setting was another one. A rank that fails makes all fail.
        RankError: settings differ between ranks, or ranks are at different places.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.ones(2), "step": torch.tensor(7)}
        >>> start = {"w": torch.zeros(2), "step": torch.tensor(0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/run", state, None, settings={"lr": 0.1})
        ...     load_checkpoint(f"{folder}/run", start, None, settings={"lr": 0.1})
        {'w': tensor([1., 1.]), 'step': tensor(7)}
    """
    what, folder = "load_checkpoint", Path(folder)
    ranks = _everyone(what, mesh)
    with ranks.together(what):
        tensors = tree.state_dict(like)
        held = _held(what, tensors)
    _holders(what, _told(what, ranks, settings, tensors, held))
    with _all_refuse(what, ranks):
        index = pieces.read_index(folder)
        check_settings(folder, index.settings, settings)
        check_fit(folder, tensors, index.tensors)
    ranks.check_same(what, checkpoint=index.checkpoint)
    with _all_refuse(what, ranks), torch.no_grad():
        loaded = tree.tree_map(torch.empty_like, like)
        pieces.fill(folder, index, _held(what, tree.state_dict(loaded)))
    return loaded


def gather(state: T, mesh: DeviceMesh | None) -> T:
    """Return a tree with plain tensors in the place of DTensors, on every rank.

    Called on every rank of the mesh. One of them can write the result, or a part such
    as the parameters, with `vgrad.training.save_state`, for a process without ranks.
    The file of a state has the secret key; `vgrad.training.release` writes what may be
    published. Plain tensors stay as they are.

    Raises:
        RankError: names, shapes or dtypes differ between ranks.

    Example:
        >>> gather({"w": torch.ones(2)}, None)
        {'w': tensor([1., 1.])}
    """
    ranks = _everyone("gather", mesh)
    with ranks.together("gather"):
        tensors = tree.state_dict(state)
    _told("gather", ranks, None, tensors, {})
    with torch.no_grad():
        return tree.map_tensors(
            lambda each: each.full_tensor() if isinstance(each, DTensor) else each,
            state,
        )


def _everyone(function: str, mesh: DeviceMesh | None) -> Ranks:
    """Return all ranks of a mesh, along whatever axes."""
    if mesh is None:
        return Ranks(None, 0, 1, torch.device("cpu"))
    names = getattr(mesh, "mesh_dim_names", None) or ("",)
    ranks = Ranks.of(function, mesh, names[0])
    if mesh.ndim == 1:
        return ranks
    if mesh.size() != distributed.get_world_size():
        raise ValueError(
            f"{function}(mesh): expected a mesh of one axis, or of all "
            f"{distributed.get_world_size()} ranks, got {mesh.ndim} axes and "
            f"{mesh.size()} ranks. Pass the mesh that init_device_mesh made."
        )
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return ranks._replace(group=distributed.group.WORLD, rank=rank, size=size)


@contextmanager
def _all_refuse(what: str, ranks: Ranks) -> Iterator[None]:
    """As `Ranks.together`; what stops another rank is a ValueError on this one."""
    try:
        with ranks.together(what):
            yield
    except RankError as error:
        raise ValueError(str(error)) from error


def _held(function: str, tensors: Mapping[str, Tensor]) -> Held:
    """Return the parts of tensors that are on this rank, but those that are empty."""
    held = {}
    for name, tensor in tensors.items():
        local, box = tensor, Box.of([0] * tensor.dim(), tensor.shape)
        if isinstance(tensor, DTensor):
            if any(each.is_partial() for each in tensor.placements):
                raise ValueError(
                    f"{function}: expected shards or replicas in {name!r}, got a "
                    f"partial sum, {tensor.placements}. Redistribute it first."
                )
            local = tensor.to_local().detach()
            (chunk,) = tensor.__create_chunk_list__()
            box = Box.of(chunk.offsets, chunk.sizes)
            if local.numel() and tuple(local.shape) != box.sizes:
                raise ValueError(
                    f"{function}: expected shape {box.sizes} of this rank's shard of "
                    f"{name!r}, got {tuple(local.shape)}. Shards are as torch.chunk "
                    f"cuts the whole."
                )
        if local.numel():
            held[name] = box, local
    return held


def _told(
    function: str,
    ranks: Ranks,
    settings: Mapping[str, Any] | None,
    tensors: Mapping[str, Tensor],
    held: Held,
    *,
    sealed: bool = False,
) -> list[dict[str, Any]]:
    """Tell each other what ranks have; return that of all of them.

    What several of them hold is `sealed` by a hash.

    Raises:
        RankError: settings, names, shapes or dtypes differ between ranks.
    """
    with ranks.together(function):
        own = {
            "setting": dict(settings or {}),
            "tensor": {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()},
            "pieces": {
                name: [box, _seal(name, tensors[name], local, ranks) if sealed else ""]
                for name, (box, local) in held.items()
            },
        }
        try:
            text = bytearray(json.dumps(own, allow_nan=False).encode())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{function}(settings): expected what JSON can hold, got another "
                f"value ({error})."
            ) from error
    sent = torch.frombuffer(text, dtype=torch.uint8).to(ranks.device)
    sizes = [note["size"] for note in ranks.agree(function, size=len(sent))]
    texts = ranks.joined(sent, sizes).cpu().split(sizes)
    plans = [json.loads(bytes(each.numpy())) for each in texts]
    for rank, plan in enumerate(plans):
        for kind in ("setting", "tensor"):
            for name in plans[0][kind] | plan[kind]:
                first, other = (
                    repr(each[kind][name]) if name in each[kind] else "none"
                    for each in (plans[0], plan)
                )
                if first != other:
                    raise RankError(
                        f"{function}: expected the same {kind} {name!r} on all ranks, "
                        f"got {first} on rank 0 and {other} on rank {rank}."
                    )
    return plans


def _seal(name: str, tensor: Tensor, local: Tensor, ranks: Ranks) -> str:
    """Hash what other ranks hold too; empty if no other one does."""
    if ranks.size == 1:
        return ""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == ranks.size:
        if not any(each.is_replicate() for each in tensor.placements):
            return ""
    return files.digest({name: local})


def _holders(
    function: str, plans: Sequence[Mapping[str, Any]]
) -> dict[str, dict[Box, dict[int, str]]]:
    """Return which ranks hold each piece of each tensor, and their seals.

    Raises:
        ValueError: pieces do not make up a tensor.
    """
    found: dict[str, dict[Box, dict[int, str]]] = {}
    for name, (_, shape) in plans[0]["tensor"].items():
        found[name] = defaultdict(dict)
        for rank, plan in enumerate(plans):
            if name in plan["pieces"]:
                box, seal = plan["pieces"][name]
                found[name][Box.of(*box)][rank] = seal
        if not pieces.is_whole(shape, found[name]):
            raise ValueError(
                f"{function}(mesh): expected all pieces of {name!r}, got shapes "
                f"{[list(box.sizes) for box in found[name]]} of {shape}. Pass the mesh "
                f"that the state is sharded over."
            )
    return found


def _shared_out(
    function: str, plans: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, list[int], list[tuple[int, Box]]]]:
    """Return dtype and shape of each tensor, and the rank that writes each piece of it.

    Of the ranks that hold a piece it is one that has the least to write so far.
    """
    shared_out, loads = {}, [0] * len(plans)
    for name, holders in _holders(function, plans).items():
        dtype, shape = plans[0]["tensor"][name]
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
            loads[writer] += math.prod(box.sizes) * pieces.DTYPES[dtype].itemsize
            boxes.append((writer, box))
        shared_out[name] = dtype, shape, boxes
    return shared_out

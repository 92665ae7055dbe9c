"""What is saved over ranks is what is loaded, over as many ranks or others."""

import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import vgrad
from tests.distributed.processes import SERVER
from vgrad import files, optim, tree
from vgrad.distributed import (
    RankError,
    gathered,
    load_checkpoint,
    save_checkpoint,
)
from vgrad.training import TrainState, load_state, save_state

SETTINGS = {"lr": 0.1, "sizes": (3, 2), "name": None}


def meshed(*shape):
    """Return a mesh of that shape, None for a process without ranks."""
    if not shape:
        return None
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def made(seed=0):
    """Make a state whose tensors no number of ranks divides, some with fewer rows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 3, generator=generator)
    params = {
        "weight": weight,
        "half": weight[:5, 0].bfloat16(),
        "turned": weight.t(),
        "scale": weight[0, 0],
        "row": weight[:1],
        "none": torch.zeros(0, 2),
    }
    state = TrainState.create(optim.adam(0.1), params, {}, seed=seed)
    others = {
        "mask": weight > 0,
        "bytes": (weight * 9).to(torch.uint8),
        "counts": (weight * 1e9).long(),
        "waves": torch.complex(weight, -weight),
        "strange": torch.tensor([float("nan"), -0.0, 1e-45]),
    }
    return {"state": state, "others": others}


def spread(state, mesh, *placements):
    """Turn tensors into DTensors, but those without dimensions."""
    if mesh is None or not placements:
        return state
    return tree.map_tensors(
        lambda each: (
            distribute_tensor(each, mesh, placements[: mesh.ndim])
            if each.dim()
            else each
        ),
        state,
    )


def same(a, b):
    """Compare two trees bit by bit."""
    a, b = tree.state_dict(a), tree.state_dict(b)
    return list(a) == list(b) and files.digest(a) == files.digest(b)


def zeros():
    return tree.map_tensors(torch.zeros_like, made())


def _save(folder, shape, placements, seed=0):
    mesh = meshed(*shape)
    save_checkpoint(
        folder, spread(made(seed), mesh, *placements), mesh, settings=SETTINGS
    )


def _load(folders, size):
    mesh = meshed(*size)

    def refuse(*_, **__):
        raise AssertionError("a pickle")

    for placements in ([], [Shard(0)]):
        like = spread(zeros(), mesh, *placements)
        for folder in folders:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("load", "loads", "Unpickler", "_Unpickler"):
                    patch.setattr(pickle, name, refuse)
                found = load_checkpoint(folder, like, mesh, settings=SETTINGS)
            for a, b in zip(tree.tensors(found), tree.tensors(like), strict=True):
                assert type(a) is type(b)
                assert getattr(a, "placements", 0) == getattr(b, "placements", 0)
            whole = gathered(found, mesh)
            assert same(whole, made()), folder
            assert whole["state"].params["turned"].stride() == (1, 3)
            assert same(gathered(like, mesh), zeros())


def test_any_ranks_resume_what_any_ranks_saved(ranks, tmp_path):
    folders = []
    for size in (2, 4):
        for placements in ([], [Shard(0)]):
            folders.append(tmp_path / f"{size}{len(placements)}")
            ranks(size).run(_save, folders[-1], [size], placements)
    folders.append(tmp_path / "alone")
    _save(folders[-1], [], [])
    for size in (2, 4):
        ranks(size).run(_load, folders, [size])
    _load(folders, [])


def test_what_ranks_share_is_written_once(ranks, tmp_path):
    """And shared out among them."""
    for size, placements in ((2, []), (4, []), (4, [Shard(0)])):
        folder = tmp_path / f"{size}{len(placements)}"
        ranks(size).run(_save, folder, [size], placements)
        found = [torch.tensor(0)]
        sizes = []
        for path in sorted(folder.glob("pieces-*")):
            parts, _ = files.read_parts(
                path, "file of pieces of a checkpoint", [""], called="it"
            )
            found += parts[""].values()
            sizes.append(sum(each.nbytes for each in parts[""].values()))
        total = sum(each.nbytes for each in tree.tensors(made()))
        assert sum(sizes) == total
        assert len(sizes) == size
        assert max(sizes) < 2 * total / size

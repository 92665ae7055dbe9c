"""A state saved over ranks is the state loaded, over as many ranks or others."""

import hashlib
import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor

from tests.distributed.processes import SERVER
from vgrad import files, optim, tree
from vgrad.distributed import RankError, gather
from vgrad.training import TrainState, load, save

SETTINGS = {"lr": 0.1, "sizes": (3, 2), "name": None}


def meshed(*shape):
    """Return a mesh of that shape, None for a process without ranks."""
    if not shape:
        return None
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def made():
    """Make a state whose tensors no number of ranks divides, some with fewer rows."""
    weight = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    params = {
        "weight": weight,
        "half": weight[:5, 0].bfloat16(),
        "turned": weight.t(),
        "scale": weight[0, 0],
        "row": weight[:1],
        "none": torch.zeros(0, 2),
    }
    others = {
        "mask": weight > 0,
        "bytes": (weight * 9).to(torch.uint8),
        "counts": (weight * 1e9).long(),
        "waves": torch.complex(weight, -weight),
        "strange": torch.tensor([float("nan"), -0.0, 1e-45]),
    }
    state = TrainState.create(optim.adam(0.1), params, {}, seed=0)
    return {"state": state, "others": others}


def zeros(like=None):
    return tree.map_tensors(torch.zeros_like, made() if like is None else like)


def spread(state, mesh, *placements):
    """Turn tensors into DTensors, but scalars."""
    if mesh is None or not placements:
        return state

    def cut(x):
        return distribute_tensor(x, mesh, placements[: mesh.ndim]) if x.dim() else x

    return tree.map_tensors(cut, state)


def same(a, b):
    """Compare two trees bit by bit."""
    a, b = tree.state_dict(a), tree.state_dict(b)
    return list(a) == list(b) and files.digest(a) == files.digest(b)


def _save(folder, shape, placements):
    mesh = meshed(*shape)
    save(folder, spread(made(), mesh, *placements), mesh, settings=SETTINGS)


def _load(folders, shape):
    mesh = meshed(*shape)

    def refuse(*_, **__):
        raise AssertionError("a pickle")

    for placements in ([], [Shard(0)]):
        like = spread(zeros(), mesh, *placements)
        for folder in folders:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("load", "loads", "Unpickler", "_Unpickler"):
                    patch.setattr(pickle, name, refuse)
                loaded = load(folder, like, mesh, settings=SETTINGS)
            for a, b in zip(tree.tensors(loaded), tree.tensors(like), strict=True):
                assert type(a) is type(b)
                assert getattr(a, "placements", 0) == getattr(b, "placements", 0)
                assert a.stride() == b.stride()
            assert same(gather(loaded, mesh), made()), folder
            assert same(gather(like, mesh), zeros())


def test_any_ranks_resume_what_any_ranks_saved(ranks, tmp_path):
    """Shared tensors are written once, and shared out among the ranks."""
    folders = []
    for size in (2, 4):
        for placements in ([], [Shard(0)]):
            folders.append(tmp_path / f"{size}{len(placements)}")
            ranks(size).run(_save, folders[-1], [size], placements)
            sizes = []
            for path in sorted(folders[-1].glob("pieces-*")):
                tensors, _ = files.read_tensors(path, "file of pieces of a checkpoint")
                sizes.append(sum(each.nbytes for each in tensors.values()))
            assert sum(sizes) == sum(each.nbytes for each in tree.tensors(made()))
            assert len(sizes) == size
            assert max(sizes) < 2 * sum(sizes) / size
    folders.append(tmp_path / "alone")
    _save(folders[-1], [], [])
    for size in (2, 4):
        ranks(size).run(_load, folders, [size])
    _load(folders, [])


# Ranks and processes that stop at one of their writes.


def counted(patch, call, stop):
    """Call `stop` instead of one of the calls by which files are written."""
    left = [call]

    def counting(own):
        def counted(*arguments, **options):
            left[0] -= 1
            return stop() if left[0] == -1 else own(*arguments, **options)

        return counted

    for name in ("open", "fsync", "replace", "unlink"):
        patch.setattr(os, name, counting(getattr(os, name)))


def small(seed):
    return {"w": torch.arange(5.0) + seed, "step": torch.tensor(seed)}


def _full(*_):
    raise OSError("no space left")


def _stopped(folder, bad, call):
    """Stop a rank at one of its writes: did a save come through, is it the new one?"""
    mesh = meshed(2)
    old, new = (spread(small(seed), mesh, Shard(0)) for seed in (0, 1))
    save(folder, old, mesh)
    done = True
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == bad:
            counted(patch, call, _full)
        try:
            save(folder, new, mesh)
        except (OSError, RankError) as error:
            done = "no space left" not in str(error)
    loaded = gather(load(folder, old, mesh), mesh)
    assert same(loaded, small(0)) or same(loaded, small(1))
    return done, same(loaded, small(1))


@pytest.mark.parametrize("bad", [0, 1])
def test_when_a_rank_stops_the_last_complete_one_is_good(ranks, bad, tmp_path):
    seen = [(False, False)]
    while not seen[-1][0]:
        first, second = ranks(2).run(_stopped, tmp_path, bad, len(seen) - 1)
        assert first == second
        seen.append(first)
    assert seen[-1] == (True, True)
    assert seen == sorted(seen)
    assert seen.count((False, False)) > 5
    # After the index, rank 0 waits for its name to be on the disk, and tidies up.
    assert ((False, True) in seen) == (bad == 0)
    assert len(list(tmp_path.iterdir())) == 3


def _killed(folder, call):
    """End the process at one of the calls by which it writes."""
    counted(pytest.MonkeyPatch(), call, lambda: os._exit(9))
    save(folder, small(1))


def test_a_kill_leaves_the_last_complete_one_and_no_rest(tmp_path, monkeypatch):
    save(tmp_path, small(0))
    code, seen = 9, []
    while code == 9:
        process = SERVER.Process(target=_killed, args=(tmp_path, len(seen)))
        process.start()
        process.join()
        code = process.exitcode
        loaded = load(tmp_path, small(2))
        seen.append(same(loaded, small(1)))
        assert seen[-1] or same(loaded, small(0))
    assert code == 0
    assert seen == sorted(seen)
    assert seen.count(False) > 6

    def names():
        return {path.name for path in tmp_path.iterdir()}

    rest = tmp_path / f".pieces-{'0' * 16}-12.safetensors.partial"
    rest.touch()
    (tmp_path / "notes.safetensors").touch()
    save(tmp_path, small(1))
    (piece,) = tmp_path.glob("*pieces-*")
    assert names() == {"meta.json", "notes.safetensors", piece.name}
    # Files left by a kill go before writing, where the good ones are known.
    monkeypatch.setattr(os, "replace", _full)
    for damaged in (False, True):
        rest.touch()
        if damaged:
            (tmp_path / "meta.json").write_bytes(b"{}")
        before = names()
        with pytest.raises(OSError, match="no space left"):
            save(tmp_path, small(1))
        assert names() == (before if damaged else before - {rest.name})


def _under_an_open_mask(folder):
    before = os.umask(0)
    try:
        _save(folder, [2], [Shard(0)])
    finally:
        os.umask(before)


def test_only_the_owner_can_read(ranks, tmp_path):
    folder = tmp_path / "run"
    ranks(2).run(_under_an_open_mask, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o600}


# Refusals. Those of a single process are in tests/training/test_saved.py.


def refused(folder, match, like, kind=ValueError, mesh=None, **settings):
    with pytest.raises(kind, match=match):
        load(folder, like, mesh, settings=settings)


def test_damage_is_refused(tmp_path):
    state, good, path = {"w": torch.arange(4.0)}, tmp_path / "good", tmp_path / "bad"
    save(good, state)
    save(tmp_path / "other", state)
    index, (piece,) = "meta.json", [p.name for p in good.glob("pieces-*")]
    (other,) = (tmp_path / "other").glob("pieces-*")

    def cut(name):
        name.write_bytes(name.read_bytes()[:-1])

    def flipped(name):
        content = bytearray(name.read_bytes())
        content[-1] ^= 1
        name.write_bytes(content)

    for name, change, match in [
        (index, cut, "got a damaged file"),
        (index, lambda name: name.write_bytes(b"{}"), "got a damaged file"),
        (index, lambda name: name.write_bytes(b"[]"), "got a damaged file"),
        (piece, cut, "got a damaged file"),
        (piece, flipped, "its checksum does not match"),
        (piece, Path.unlink, f"{piece}: expected a checkpoint .* got no file"),
        (piece, lambda name: shutil.copy(other, name), "or one of another checkpoint"),
        (piece, lambda name: shutil.copy(good / index, name), "got a damaged file"),
    ]:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
        change(path / name)
        refused(path, match, state)
        # The next one takes its place.
        save(path, state)
        refused(path, "expected torch.int64 in ", {"w": torch.ones(4).long()})
        assert same(load(path, zeros(state)), state)


W, FLOAT = "['w']", "torch.float32"
EMPTY_TOO = [[0, [[0], [0]]], [0, [[0], [4]]]]
DIAGONAL = [[0, [[0, 0], [1, 1]]], [0, [[1, 1], [1, 1]]]]
NO_TENSORS = [
    3,
    {W: ["torch.load", [4], [[0, [[0], [4]]]]]},
    {W: [FLOAT, [-4], [[0, [[0], [4]]]]]},
    {W: [FLOAT, [4], [[0, [[0], [3]]]]]},
    {W: [FLOAT, [4], [[0, [[1], [3]]]]]},
    {W: [FLOAT, [4], []]},
    {W: [FLOAT, [4], EMPTY_TOO]},
    {W: [FLOAT, [2, 2], DIAGONAL]},
    {W: [FLOAT, [2**80], []]},
]
GOOD = {"checkpoint": "0" * 16, "settings": {}}


@pytest.mark.parametrize(
    "description",
    [
        {},
        GOOD,
        *({**GOOD, "tensors": tensors} for tensors in NO_TENSORS),
        {**GOOD, "tensors": {}, "settings": []},
        {**GOOD, "tensors": {}, "checkpoint": "../../../../etc"},
    ],
)
def test_an_index_that_nobody_writes_is_refused(description, tmp_path):
    seal = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    content = {"checkpoint": description, "sha256": seal}
    (tmp_path / "meta.json").write_text(json.dumps(content))
    refused(tmp_path, "meta.json: expected .* got a damaged file", zeros())


def _one_is_refused(folder):
    mesh = meshed(4)
    rank, weight = mesh.get_rank(), torch.arange(7.0)
    state = {"w": distribute_tensor(weight, mesh, [Shard(0)])}
    more = {"more": weight} if rank == 2 else {}
    partial = state["w"].from_local(weight, mesh, [Partial()])
    uneven = {"shape": weight.shape, "stride": (1,)}
    shards = state["w"].from_local(weight[:2], mesh, [Shard(0)], **uneven)
    shape = r"shape \(1,\) of this rank's shard of .*'w'.*, got \(2,\)"
    either = TypeError, RankError
    save(folder, state, mesh, settings={"lr": 0.1})
    for kind, match, tensors, settings in [
        (RankError, "the same setting 'lr' on all ranks, got 0 on rank 0 and 1 on",
         state, {"lr": rank}),
        (RankError, "same setting 'more' .* got none on rank 0", state,
         {"more": 1} if rank else {}),
        (RankError, r"same tensor .*more.* got none on rank 0 .* rank 2",
         {**state, **more}, {}),
        (RankError, r"same values in .*'v'.* rank 3 that rank 0 has not",
         {"v": weight + (rank == 3)}, {}),
        (RankError, "the same tensor .*int64.* on rank 1",
         {"w": weight if rank else weight.long()}, {}),
        (ValueError, r"\(settings\): expected values of JSON, got", state,
         {"lr": float("nan")}),
        (ValueError, r"or replicas in .*'w'.*partial sum", {"w": partial}, {}),
        (ValueError if rank == 3 else RankError, shape, {"w": shards}, {}),
        (either, "complex128", {"w": weight.to(torch.complex128)}, {}),
        (either, "expected a tensor at", {"w": 3 if rank == 3 else weight}, {}),
    ]:  # fmt: skip
        with pytest.raises(kind, match=match):
            save(folder, tensors, mesh, settings=settings)
    refused(folder, "lr = 0.2, got one with 0.1", state, ValueError, mesh, lr=0.2)
    refused(folder, "the same setting 'lr'", state, RankError, mesh, lr=rank)
    with pytest.raises(RankError, match="same tensor"):
        gather({**state, **more}, mesh)
    with pytest.raises(
        ValueError, match=r"all pieces of .*'w'.* got shapes \[\[[12]\]\] of"
    ):
        save(folder / "alone", state, None)
    refused(folder, r"load\(mesh\): expected all piece", state)
    refused(folder, "expected a DeviceMesh", state, TypeError, "dp")
    # A folder of one rank alone.
    match = "expected a folder that all ranks share, got none of 'pieces-"
    with pytest.raises((FileNotFoundError, RankError), match=match):
        save(folder.with_name(f"of rank {rank}"), state, mesh)
    torch.distributed.barrier()
    assert not (folder.with_name("of rank 0") / "meta.json").exists()
    assert same(gather(load(folder, state, mesh), mesh), {"w": weight})
    (path,) = folder.glob("pieces-*-2.safetensors")
    torch.distributed.barrier()
    if rank == 0:
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    match = "rank 2 stopped with ValueError: .*damaged" if rank != 2 else "got a damag"
    refused(folder, match, state, ValueError, mesh)
    if rank == 0:
        path.unlink()
    torch.distributed.barrier()
    refused(folder, "got no file", state, ValueError, mesh)


def test_what_one_rank_refuses_all_refuse(ranks, tmp_path):
    for rank in range(1, 4):
        (tmp_path / f"of rank {rank}").mkdir()
    ranks(4).run(_one_is_refused, tmp_path / "run")


def test_files_in_the_place_of_each_other_are_refused(ranks, tmp_path):
    ranks(2).run(_save, tmp_path, [2], [Shard(0)])
    one, other = tmp_path.glob("pieces-*")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    refused(tmp_path, "got another of its files, or one of", zeros())

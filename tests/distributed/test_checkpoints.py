"""What is saved over ranks is what is loaded, over as many ranks or others."""

import hashlib
import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

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
    save(folder, spread(made(seed), mesh, *placements), mesh, settings=SETTINGS)


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
                found = load(folder, like, mesh, settings=SETTINGS)
            for a, b in zip(tree.tensors(found), tree.tensors(like), strict=True):
                assert type(a) is type(b)
                assert getattr(a, "placements", 0) == getattr(b, "placements", 0)
                assert a.stride() == b.stride()
            whole = gather(found, mesh)
            assert same(whole, made()), folder
            assert same(gather(like, mesh), zeros())


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
            read, _ = files.read_tensors(path, "file of pieces of a checkpoint")
            found += read.values()
            sizes.append(sum(each.nbytes for each in read.values()))
        total = sum(each.nbytes for each in tree.tensors(made()))
        assert sum(sizes) == total
        assert len(sizes) == size
        assert max(sizes) < 2 * total / size


GRIDS = [
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
]


def _over_a_grid(folder):
    mesh, line, weight = meshed(2, 2), meshed(4), made()["others"]["counts"]
    for number, placements in enumerate(GRIDS):
        state = {"w": distribute_tensor(weight, mesh, placements)}
        # Replicated along the other axis of the mesh, though its own does not say so.
        state["half"] = distribute_tensor(weight, mesh["tp"], [Shard(0)])
        path = folder / str(number)
        save(path, state, mesh)
        assert sum(each.stat().st_size for each in path.iterdir()) < 9000
        for like in (
            {name: torch.zeros_like(weight) for name in state},
            {name: distribute_tensor(-weight, line, [Shard(0)]) for name in state},
            tree.map_tensors(torch.zeros_like, state),
        ):
            found = gather(load(path, like, mesh), mesh)
            assert same(found, {"w": weight, "half": weight})
    part = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    if mesh.get_rank() < 2:
        with pytest.raises(ValueError, match="one axis, or of all 4 ranks, got 2 axes"):
            save(folder, state, part)


def test_tensors_are_sharded_over_grids(ranks, tmp_path):
    ranks(4).run(_over_a_grid, tmp_path)
    for number in range(len(GRIDS)):
        weight = made()["others"]["counts"]
        like = {name: torch.zeros_like(weight) for name in ("w", "half")}
        found = load(tmp_path / str(number), like, None)
        assert same(found, {"w": weight, "half": weight})


def counted(patch, call, stop):
    """Call `stop` in the place of one of the calls by which files are written."""
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


def _full():
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
    found = gather(load(folder, old, mesh), mesh)
    assert same(found, small(0)) or same(found, small(1))
    return done, same(found, small(1))


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
    save(folder, small(1), None)


def test_a_kill_leaves_the_last_complete_one_and_no_rest(tmp_path):
    save(tmp_path, small(0), None)
    code, seen = 9, []
    while code == 9:
        process = SERVER.Process(target=_killed, args=(tmp_path, len(seen)))
        process.start()
        process.join()
        code = process.exitcode
        found = load(tmp_path, small(2), None)
        seen.append(same(found, small(1)))
        assert seen[-1] or same(found, small(0))
    assert code == 0
    assert seen == sorted(seen)
    assert seen.count(False) > 6
    (tmp_path / f"pieces-{'0' * 16}-12.safetensors").touch()
    (tmp_path / "notes.safetensors").touch()
    save(tmp_path, small(1), None)
    (piece,) = tmp_path.glob("*pieces-*")
    names = {"meta.json", "notes.safetensors", piece.name}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("damaged", [False, True])
def test_rests_are_removed_before_writing_where_it_is_known_what_they_are(
    damaged, tmp_path, monkeypatch
):
    save(tmp_path, small(0), None)
    rest = tmp_path / f".pieces-{'0' * 16}-1.safetensors.partial"
    rest.touch()
    if damaged:
        (tmp_path / "meta.json").write_bytes(b"{}")
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "replace", lambda *_: _full())
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path, small(1), None)
    after = {path.name for path in tmp_path.iterdir()}
    assert after == (before if damaged else before - {rest.name})


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
    found = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert found == {0o600}


def refused(folder, match, like=None, kind=ValueError, mesh=None, **settings):
    like = zeros() if like is None else like
    with pytest.raises(kind, match=match):
        load(folder, like, mesh, settings=settings)


def test_another_state_is_refused(tmp_path):
    refused(tmp_path, "a checkpoint as vgrad.training.save", kind=FileNotFoundError)
    state = {"w": torch.ones(3), "step": torch.tensor(1)}
    save(tmp_path, state, None, settings=SETTINGS)
    path = str(tmp_path)
    refused(path, f"{path}: expected a state saved with lr = 0.2, got .* 0.1", lr=0.2)
    refused(path, r"sizes = \[3\], got one with \[3, 2\]", state, sizes=[3])
    refused(path, "with more = None, got one with no such setting", state, more=None)
    refused(path, r"got missing: .*\['state'\]")
    refused(path, r"expected shape \(4,\) in ", {**state, "w": torch.ones(4)})
    refused(path, "expected torch.int64 in ", {**state, "w": torch.ones(3).long()})
    refused(path, "expected a tensor at .*'step'", {**state, "step": 3}, TypeError)


def test_damage_is_refused(tmp_path):
    state, good, path = {"w": torch.arange(4.0)}, tmp_path / "good", tmp_path / "bad"
    save(good, state, None)
    save(tmp_path / "other", state, None)
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
        save(path, state, None)
        assert same(load(path, {"w": torch.zeros(4)}, None), state)


GOOD = {"checkpoint": "0" * 16, "settings": {}}
EMPTY_TOO = [[0, [[0], [0]]], [0, [[0], [4]]]]
DIAGONAL = [[0, [[0, 0], [1, 1]]], [0, [[1, 1], [1, 1]]]]


@pytest.mark.parametrize(
    "description",
    [
        {},
        GOOD,
        {**GOOD, "tensors": 3},
        {**GOOD, "tensors": {"['w']": ["torch.load", [4], [[0, [[0], [4]]]]]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [-4], [[0, [[0], [4]]]]]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [4], [[0, [[0], [3]]]]]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [4], [[0, [[1], [3]]]]]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [4], []]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [4], EMPTY_TOO]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [2, 2], DIAGONAL]}},
        {**GOOD, "tensors": {"['w']": ["torch.float32", [2**80], []]}},
        {**GOOD, "tensors": {}, "settings": []},
        {**GOOD, "tensors": {}, "checkpoint": "../../../../etc"},
    ],
)
def test_an_index_that_says_what_none_says_is_refused(description, tmp_path):
    seal = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    content = {"checkpoint": description, "sha256": seal}
    (tmp_path / "meta.json").write_text(json.dumps(content))
    refused(tmp_path, "meta.json: expected .* got a damaged file", zeros())


def _one_is_refused(folder):
    mesh = meshed(4)
    rank, weight = mesh.get_rank(), torch.arange(7.0)
    state = {"w": distribute_tensor(weight, mesh, [Shard(0)])}

    def kept(match, kind=RankError, given=state, **settings):
        with pytest.raises(kind, match=match):
            save(folder, given, mesh, settings=settings)

    save(folder, state, mesh, settings={"lr": 0.1})
    refused(folder, "lr = 0.2, got one with 0.1", state, ValueError, mesh, lr=0.2)
    kept("the same setting 'lr' on all ranks, got 0 on rank 0 and 1 on rank 1", lr=rank)
    kept("same setting 'more' .* got none on rank 0", **({"more": 1} if rank else {}))
    refused(folder, "the same setting 'lr'", state, RankError, mesh, lr=rank)
    more = {"more": weight} if rank == 2 else {}
    kept(r"same tensor .*more.* got none on rank 0 .* rank 2", given={**state, **more})
    kept(
        r"same values in .*'v'.* rank 3 that rank 0 has not",
        given={"v": weight + (rank == 3)},
    )
    kept(
        "the same tensor .*int64.* on rank 1",
        given={"w": weight if rank else weight.long()},
    )
    kept(r"\(settings\): expected values of JSON, got", ValueError, lr=float("nan"))
    partial = state["w"].from_local(weight, mesh, [Partial()])
    kept(r"or replicas in .*'w'.*partial sum", ValueError, {"w": partial})
    uneven = {"shape": weight.shape, "stride": (1,)}
    shards = {"w": state["w"].from_local(weight[:2], mesh, [Shard(0)], **uneven)}
    match = r"shape \(1,\) of this rank's shard of .*'w'.*, got \(2,\)"
    kept(match, ValueError if rank == 3 else RankError, shards)
    kept("complex128", (TypeError, RankError), {"w": weight.to(torch.complex128)})
    kept(
        "expected a tensor at",
        (TypeError, RankError),
        {"w": 3 if rank == 3 else weight},
    )
    with pytest.raises(RankError, match="same tensor"):
        gather({**state, **more}, mesh)
    with pytest.raises(
        ValueError, match=r"all pieces of .*'w'.* got shapes \[\[[12]\]\] of"
    ):
        save(folder / "alone", state, None)
    with pytest.raises(ValueError, match=r"load\(mesh\): expected all piece"):
        load(folder, state, None)
    with pytest.raises(TypeError, match="expected a DeviceMesh"):
        save(folder, state, "dp")
    torch.distributed.barrier()
    assert same(gather(load(folder, state, mesh), mesh), {"w": weight})
    if rank == 0:
        (path,) = folder.glob("pieces-*-2.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    match = (
        "got a damaged file"
        if rank == 2
        else "rank 2 stopped with ValueError: .*damaged"
    )
    refused(folder, match, state, ValueError, mesh)
    if rank == 0:
        path.unlink()
    torch.distributed.barrier()
    refused(folder, "got no file", state, ValueError, mesh)


def test_what_one_rank_refuses_all_refuse(ranks, tmp_path):
    ranks(4).run(_one_is_refused, tmp_path)


def _halves(folder):
    mesh = meshed(2)
    state = {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    save(folder, state, mesh)


def test_files_in_the_place_of_each_other_are_refused(ranks, tmp_path):
    ranks(2).run(_halves, tmp_path)
    one, other = tmp_path.glob("pieces-*")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    refused(tmp_path, "got another of its files, or one of", {"w": torch.zeros(4)})


def test_files_are_on_the_disk_in_the_order_that_keeps_them(tmp_path, monkeypatch):
    """A file, then the names in its folder, and all of that before the index."""
    folder, seen, names = tmp_path / "run", [], {}

    def opened(path, *arguments, own=os.open, **options):
        found = own(path, *arguments, **options)
        names[found] = Path(path).name
        return found

    def synced(descriptor, own=os.fsync):
        seen.append(("synced", names[descriptor].strip(".").split("-")[0]))
        own(descriptor)

    def replaced(path, target, own=os.replace):
        seen.append(("replaced", Path(target).name.split("-")[0]))
        own(path, target)

    for name, call in {"open": opened, "fsync": synced, "replace": replaced}.items():
        monkeypatch.setattr(os, name, call)
    save(folder, small(0), None)
    index = "meta.json"
    assert seen == [
        ("synced", tmp_path.name.split("-")[0]),
        *[("synced", "pieces"), ("replaced", "pieces"), ("synced", "run")],
        *[("synced", f"{index}.partial"), ("replaced", index), ("synced", "run")],
    ]


def _elsewhere(folders):
    mesh = meshed(2)
    state = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    match = "expected a folder that all ranks share, got none of 'pieces-"
    with pytest.raises((FileNotFoundError, RankError), match=match):
        save(folders[mesh.get_rank()], state, mesh)


def test_a_folder_of_one_rank_alone_is_refused(ranks, tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    folders[1].mkdir()
    ranks(2).run(_elsewhere, folders)
    assert not (folders[0] / "meta.json").exists()


def _released(path):
    mesh = meshed(4)
    state = spread(made(), mesh, Shard(0))
    params = gather(state["state"].params, mesh)
    if mesh.get_rank() == 0:
        save(path, params)


def test_parameters_are_released_for_a_process_without_ranks(ranks, tmp_path):
    path = tmp_path / "params"
    ranks(4).run(_released, path)
    assert not torch.distributed.is_initialized()
    params = made()["state"].params
    like = tree.map_tensors(torch.zeros_like, params)
    assert same(load(path, like), params)

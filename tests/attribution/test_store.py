"""A store has each sample's features once, after faults at any moment, or refuses."""

import os
import shutil
import stat
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.distributed.processes import SERVER
from vgrad import curvature, files
from vgrad.attribution import Store, influence
from vgrad.tree import map_values

N, SIZE, INDEX = 43, 16, "index.safetensors"
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
FMODEL, PARAMS, BUFFERS = vgrad.make_functional_with_buffers(MODEL)
X, Y = torch.randn(N + 20, 3).double(), torch.randint(2, (N + 20,))
LOSS = vgrad.sample_loss(FMODEL, F.cross_entropy)
PROJECTION = vgrad.per_sample_projection(LOSS, (2, 3), seed=0)


def cut(start, stop, size=7):
    return [*zip(X[start:stop].split(size), Y[start:stop].split(size), strict=True)]


def write(folder, batches=None, projection=PROJECTION, params=PARAMS, **options):
    batches = cut(0, N) if batches is None else batches
    options = {"samples_per_file": SIZE} | options
    return Store.write(folder, projection, params, BUFFERS, batches, **options)


def whole(store):
    parts = [*store]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def content(folder):
    return {each.name: each.read_bytes() for each in Path(folder).iterdir()}


def sides():
    matrix = curvature.empirical_fisher(FMODEL, "categorical")
    return curvature.ekfac(matrix, PARAMS, BUFFERS, [(X, Y)]).sides((2, 2))


@pytest.fixture(scope="module")
def _original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "store"
    write(folder)
    return folder


@pytest.fixture
def folder(_original, tmp_path):
    """A store of N samples."""
    return Path(shutil.copytree(_original, tmp_path / "store"))


@pytest.mark.parametrize("kind", ["pairs", "joined", "sides"])
def test_it_has_the_projections_of_all_samples_in_order(kind, tmp_path):
    dim = {"pairs": (2, 3), "joined": 8, "sides": sides()}[kind]
    options = {} if kind == "sides" else {"seed": 3, "kind": "gaussian"}
    project = vgrad.per_sample_projection(LOSS, dim, **options)
    expected = project(PARAMS, BUFFERS, X[:N], Y[:N])
    expected = {"": expected} if kind == "joined" else expected
    found = write(tmp_path / "new" / "store", projection=project)
    store = Store(tmp_path / "new" / "store")
    for each in (found, store):
        assert len(each) == N
        assert each.ids == [*range(N)]
        assert [len(next(iter(part.values()))) for part in each] == [16, 16, 11]
        oracle.assert_exact(whole(each), expected)
    store.check(LOSS, PARAMS, BUFFERS)
    again = store.project(LOSS, PARAMS, BUFFERS, X[:N], Y[:N], chunk_size=9)
    oracle.assert_exact(again, expected)
    for each in (tmp_path / "new" / "store").iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new" / "store").stat().st_mode) == 0o700


def test_tensors_are_mapped_and_writing_into_them_changes_no_file(folder):
    store, before = Store(folder), content(folder)
    [first, *_] = store
    with open("/proc/self/maps") as maps:
        assert str(folder / "00000000.safetensors") in maps.read()
    kept = first["0.weight"].clone()
    first["0.weight"].zero_()
    assert next(iter(store))["0.weight"].equal(kept)
    assert content(folder) == before


def product(params, buffers, x, y):
    """A loss that is quick, and cannot be described."""
    return (params["w"] * x).sum()


class Killed(BaseException):
    """The end of a process."""


def faults(monkeypatch, number):
    """Stop at a system call, counted from 1; then nothing can be cleaned up."""
    calls, killed = 0, []

    def stop(before, of, *args, **options):
        nonlocal calls
        if killed:
            raise Killed
        calls += 1
        if calls != number:
            return of(*args, **options)
        killed.append(before or of(*args, **options))
        raise Killed

    # Half of the calls have done their work, of which nobody hears.
    for place, name in enumerate(("open", "fsync", "replace", "mkdir")):
        changed = partial(stop, (number + place) % 2 == 0, getattr(os, name))
        monkeypatch.setattr(files.os, name, changed)
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda *a, **k: None if killed else unlink(*a, **k)
    )


def test_a_store_that_was_stopped_at_any_moment_is_completed(tmp_path):
    """At every system call that writes, at first and while samples are appended."""
    names = [f"sample {number}" for number in range(N + 20)]
    project = vgrad.per_sample_projection(product, 2, seed=0)
    options = {"params": {"w": PARAMS["0.bias"][:3]}, "projection": project}
    options |= {"description": "a product"}
    first = options | {"batches": cut(0, N, 30), "ids": names[:N]}
    new = options | {"batches": cut(N, N + 20, 30), "first": N, "ids": names[N:]}
    one = write(tmp_path / "one", **first)
    features, before = whole(one), content(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert write(tmp_path / "two", **new).ids == names
    moments = 0
    for given, expected in ((first, before), (new, content(tmp_path / "two"))):
        for number in range(1, 99):
            folder = tmp_path / f"{len(given)} {number}"
            if given is new:
                shutil.copytree(tmp_path / "one", folder)
            with pytest.MonkeyPatch.context() as patch:
                faults(patch, number)
                try:
                    write(folder, **given)
                except Killed:
                    moments += 1
                else:
                    break
            if given is new:  # the first samples are there at any moment
                store = Store(folder)
                found = whole(store)
                assert len(store) == len(store.ids) == len(found[""])
                assert all(found[n][:N].equal(each) for n, each in features.items())
            write(folder, **given)
            assert content(folder) == expected
    assert moments > 40


def test_samples_are_skipped_where_they_are_the_same(tmp_path):
    store = write(tmp_path, ids=range(100, 100 + N))
    before = content(tmp_path)
    wrong = vgrad.per_sample_projection(LOSS, (2, 3), seed=0)
    for batches, ids, first in (
        (cut(0, N, 5), range(100, 100 + N), 0),
        (cut(0, 20), range(100, 120), 0),
        (cut(20, 25), torch.arange(120, 125), 20),
    ):
        write(tmp_path, batches, wrong, ids=ids, first=first)
        assert content(tmp_path) == before
    assert store.ids == [*range(100, 100 + N)]
    for batches, options, text in (
        (
            cut(0, N),
            {},
            "sample 0 to be 100 as in .*, got 0 or other data",
        ),
        (
            cut(0, N)[::-1],
            {"ids": range(100, 100 + N)},
            "sample 0 to be 100 as in .*, got 100 or other data",
        ),
        (cut(0, 9), {"first": 44}, r"first=44\): expected at most 43"),
        (cut(0, 9), {"first": N, "ids": range(140, 149)}, "none that the store has"),
        (cut(0, 9), {"first": N}, r"first=43\): expected ids, which the samples"),
        (cut(0, 2), {"first": N, "ids": [1, 1]}, "no two the same"),
        (cut(0, 2), {"first": N, "ids": [True, None]}, "whole numbers or texts"),
        (cut(0, 20, 20), {"first": N, "ids": [1]}, "one for each of the"),
        (cut(0, 2), {"first": N, "ids": [1, 2, 3]}, "one for each of the"),
    ):
        with pytest.raises(ValueError, match=text):
            write(tmp_path, batches, **options)
    ids = write(tmp_path, cut(N, N + 20), first=N, ids=range(20)).ids
    assert ids == [*range(100, 100 + N), *range(20)]
    write(tmp_path, cut(0, N + 20), ids=ids)  # with all batches


def test_one_sample_twice_or_left_out_is_noticed(folder):
    """Also within a file, and by whatever batches."""
    for order in ([1, 0, *range(2, N)], [0, *range(N - 1)], [*range(N - 1), N]):
        with pytest.raises(ValueError, match="or other data"):
            write(folder, [(X[order], Y[order])])
    labels = Y[:N].clone()
    labels[20] = 1 - labels[20]
    with pytest.raises(
        ValueError, match="sample 20 to be 20 as in .*00000001.safetensors"
    ):
        write(folder, [(X[:N], labels)])


def test_items_that_are_no_tensors_and_shapes_are_data(tmp_path):
    def loss(params, buffers, x, y, factor):
        return LOSS(params, buffers, x.flatten(), y) * factor

    given = {"projection": vgrad.per_sample_projection(loss, 2, seed=0)}
    given |= {"description": "times a factor"}
    write(tmp_path, [(X[:9], Y[:9], 1.0)], **given)
    for x, factor in ((X[:20], 2.0), (X[:20, None], 1.0)):
        with pytest.raises(ValueError, match="sample 0 to be 0 as in .* other data"):
            write(tmp_path, [(x, Y[:20], factor)], **given)


def changed(name, value):
    return PARAMS | {name: PARAMS[name] + value}


def other_loss(criterion):
    return vgrad.sample_loss(FMODEL, criterion)


WEIGHTED = nn.CrossEntropyLoss(weight=torch.ones(2).double(), reduction="sum")
TRAINED = vgrad.make_functional_with_buffers(
    nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
)[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": changed("0.bias", 1e-12)}, r"params \[.*\], in the store and now"),
        ({"dim": (2, 2)}, r"projection.dim \[\[2, 3\], \[2, 2\]\]"),
        ({"seed": 1}, r"projection.seed \[0, 1\]"),
        ({"kind": "gaussian"}, r"projection.kind \[rademacher, gaussian\]"),
        ({"samples_per_file": 8}, r"samples_per_file \[16, 8\]"),
        ({"params": {n: x.float() for n, x in PARAMS.items()}}, "features.0.bias.*32"),
        ({"loss": other_loss(F.mse_loss)}, r"loss.criterion \[.*cross.*, .*mse_loss\]"),
        ({"loss": vgrad.sample_loss(TRAINED, F.cross_entropy)}, "Tanh, .*ReLU"),
        ({"description": "mine"}, r"loss \[.*, 'mine'\]"),
        ({"sides": True}, "projection.sides"),
    ],
)
def test_another_model_loss_or_projection_is_refused(options, text, folder):
    store, options = Store(folder), dict(options)
    loss = options.pop("loss", LOSS)
    params = options.get("params", PARAMS)
    if options.pop("sides", False):
        projection = vgrad.per_sample_projection(loss, sides())
    else:
        names = {"dim": (2, 3), "seed": 0, "kind": "rademacher"}
        given = {n: options.pop(n, default) for n, default in names.items()}
        projection = vgrad.per_sample_projection(loss, **given)
    before = content(folder)
    batches = [(X[:N].to(params["0.bias"].dtype), Y[:N])]
    with pytest.raises(ValueError, match=text):
        write(folder, batches, projection, **options)
    assert content(folder) == before
    if loss is not LOSS or params is not PARAMS:
        with pytest.raises(ValueError, match="Store.check: expected the model, loss"):
            store.check(loss, params, BUFFERS)


def test_the_tensors_of_a_criterion_count(tmp_path):
    weights = torch.tensor([1.0, 2.0]).double()
    other = nn.CrossEntropyLoss(weight=weights, reduction="sum")
    for one, two in (
        (WEIGHTED, other),
        (
            partial(F.cross_entropy, weight=WEIGHTED.weight, reduction="sum"),
            partial(F.cross_entropy, weight=weights, reduction="sum"),
        ),
    ):
        folder = tmp_path / type(one).__name__
        project = vgrad.per_sample_projection(other_loss(one), (2, 3), seed=0)
        store = write(folder, projection=project)
        store.check(other_loss(one), PARAMS, BUFFERS)
        with pytest.raises(ValueError, match="criterion"):
            store.check(other_loss(two), PARAMS, BUFFERS)


def test_a_loss_of_ones_own_code_takes_a_description(tmp_path):
    def criterion(output, target):
        return F.cross_entropy(output, target)

    for loss in (other_loss(criterion), lambda *args: LOSS(*args), other_loss(product)):
        project = vgrad.per_sample_projection(loss, (2, 3), seed=0)
        with pytest.raises(ValueError, match="code of your own.* description="):
            write(tmp_path / "store", projection=project)
        assert not (tmp_path / "store").exists()
    project = vgrad.per_sample_projection(other_loss(criterion), (2, 3), seed=0)
    write(tmp_path, projection=project, description="cross entropy")
    Store(tmp_path, description="cross entropy").check(LOSS, PARAMS, BUFFERS)
    for text in (None, "cross entropy 2"):
        with pytest.raises(ValueError, match=r"loss \['cross entropy', "):
            Store(tmp_path, description=text).check(LOSS, PARAMS, BUFFERS)
    other = nn.Sequential(MODEL[0], nn.ReLU(), MODEL[2])  # of the same parameters
    fmodel, *_ = vgrad.make_functional_with_buffers(other)
    loss = vgrad.sample_loss(fmodel, criterion)
    with pytest.raises(ValueError, match=r"Store.check: .* others: loss.fmodel.1 \["):
        Store(tmp_path, description="cross entropy").check(loss, PARAMS, BUFFERS)


def test_another_index_than_ones_own_is_refused(tmp_path, monkeypatch):
    """A process may be overtaken by one that writes another store."""
    own = files.replace

    def overtaken(path, *content, **options):
        own(path, *content, **options)
        monkeypatch.undo()
        project = vgrad.per_sample_projection(LOSS, (2, 3), seed=1)
        shutil.rmtree(tmp_path / "store")
        write(tmp_path / "store", projection=project)

    monkeypatch.setattr(files, "replace", overtaken)
    with pytest.raises(ValueError, match=r"projection.seed \[1, 0\]"):
        write(tmp_path / "store")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-8])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def resealed(path, change=dict, kind="features of a store", **description):
    """Write a file again, with a hash that fits."""
    found, own = files.read_tensors(path, kind)
    files.write_tensors(path, change(found), own | description)


def edited(path, **changes):
    resealed(path, kind="index of a store", **changes)


def swap(one, two):
    kept = one.read_bytes()
    shutil.copy(two, one)
    two.write_bytes(kept)


def first_file(folder):
    return folder / "00000000.safetensors"


DAMAGE = {
    "an index cut off": (lambda index, _: truncate(index), "damaged file"),
    "an index with another bit": (lambda index, _: flip(index), "damaged file"),
    "features for an index": (
        lambda index, first: shutil.copy(first, index),
        "expected the index of a store, got a features",
    ),
    "no index": (lambda index, _: index.unlink(), "index of a store, got no file"),
    "an index with more samples": (
        lambda index, _: edited(index, samples=N + 1),
        "expected 12 samples",
    ),
    "an index of other facts": (
        lambda index, _: edited(index, facts={"params": "0"}),
        "another store",
    ),
    "an index of fewer features": (
        lambda index, _: edited(index, features={"0.bias": ["torch.float64", 4]}),
        "another store",
    ),
    "a file cut off": (lambda _, first: truncate(first), "damaged file"),
    "a file with another bit": (lambda _, first: flip(first), "checksum does not"),
    "a file that is gone": (lambda _, first: first.unlink(), "got no file"),
    "two files swapped": (
        lambda _, first: swap(first, first.with_name("00000001.safetensors")),
        "another place",
    ),
    "a folder for a file": (
        lambda _, first: (first.unlink(), first.mkdir()),
        "got no file",
    ),
    "fewer samples": (
        lambda _, first: resealed(
            first,
            partial(map_values, lambda x: x[:9]),
            samples=[[n, ""] for n in range(9)],
        ),
        "an earlier time",
    ),
    "a file of another store": (
        lambda _, first: resealed(first, store="0" * 64),
        "of another store",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name, folder):
    damage, text = DAMAGE[name]
    damage(folder / INDEX, first_file(folder))
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        whole(Store(folder))


def test_a_file_that_is_gone_is_written_again(folder):
    before = content(folder)
    first_file(folder).unlink()
    write(folder)
    assert content(folder) == before
    first_file(folder).unlink()
    with pytest.raises(FileNotFoundError, match="00000000.safetensors"):
        write(folder, cut(N, N + 2), first=N)  # without the samples that are missing


def test_two_processes_do_not_write_one_store(folder):
    before = content(folder)
    with files.locked(folder, "writing a store"):  # as of any other open file
        with pytest.raises(BlockingIOError, match="no other process is writing a sto"):
            write(folder, cut(N, N + 2), first=N)
        assert len(whole(Store(folder))["0.bias"]) == N
    assert content(folder) == before
    assert len(write(folder, cut(N, N + 2), first=N)) == N + 2


def test_names_of_parameters_are_no_paths(tmp_path):
    params = {"../../w": torch.ones(3).double(), "": torch.ones(3).double()}

    def loss(params, buffers, x, y):
        return sum((each * x).sum() for each in params.values())

    projection = vgrad.per_sample_projection(loss, {n: (None, None) for n in params})
    folder = tmp_path / "a" / "b" / "store"
    store = write(folder, None, projection, params, description="a sum")
    assert {each.name for each in folder.iterdir()} == {
        INDEX,
        *(f"0000000{number}.safetensors" for number in range(3)),
    }
    assert [each.name for each in tmp_path.rglob("*") if each.is_dir()] == [
        "a",
        "b",
        "store",
    ]
    assert whole(store)["../../w"].equal(X[:N])


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    numbers = sum(x.shape[1] for x in PROJECTION(PARAMS, BUFFERS, X, Y).values())
    room = {"free": 49 * numbers * 8 - 1}  # seven batches of seven, at most
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), room))
    with pytest.raises(OSError, match="MB on the disk for features of 49 samples, got"):
        write(tmp_path / "store")
    assert not (tmp_path / "store").exists()
    room["free"] += 1
    write(tmp_path / "store")
    room["free"] = 0  # what is there needs no more
    write(tmp_path / "store", cut(0, 42))


def test_a_bar_shows_the_size(tmp_path, capsys):
    pytest.importorskip("rich")
    write(tmp_path, progress=True)
    assert "49 samples, 0.00706 MB" in capsys.readouterr().out


def test_what_cannot_be_stored_is_refused(tmp_path):
    project, call = vgrad.per_sample_projection, partial(write, tmp_path / "store")
    for projection in (
        vgrad.per_sample_grad(LOSS),
        LOSS,
        project(LOSS, (2, 3), seed=0, has_aux=True),
        project(LOSS, (2, 3), seed=0, randomness="same"),
        PROJECTION.with_scales({"0.bias": (torch.ones(4),)}),
    ):
        with pytest.raises(
            ValueError, match=r"projection\): expected a vgrad.per_sample"
        ):
            call(projection=projection)
    for batches in ([], iter(cut(0, N)), [X]):
        with pytest.raises(TypeError, match=r"batches\): expected a list or a loader"):
            call(batches)
    with pytest.raises(ValueError, match=r"samples_per_file=0\): expected a whole"):
        call(samples_per_file=0)
    with pytest.raises(ValueError, match=r"first=-1\): expected a whole"):
        call(first=-1)
    assert not (tmp_path / "store").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"got other files and no index"):
        write(tmp_path)
    with pytest.raises(FileNotFoundError, match="index of a store, got no file"):
        Store(tmp_path)
    call()
    with pytest.raises(RuntimeError):  # as a user's code may
        write(tmp_path / "half", [*cut(9, 40), (X[:2, :1], Y[:2])])
    for use in (len, list, lambda each: each.ids):
        with pytest.raises(ValueError, match="whose writing was stopped"):
            use(Store(tmp_path / "half"))
    write(tmp_path / "half")
    assert content(tmp_path / "half") == content(tmp_path / "store")


@pytest.mark.parametrize("kind", ["pairs", "joined", "sides"])
def test_curvature_of_features_is_that_of_the_parameters_along_directions(
    kind, tmp_path
):
    """Against dense matrices of all parameters."""
    dim = {"pairs": (2, 3), "joined": 8, "sides": sides()}[kind]
    options = {} if kind == "sides" else {"seed": 3}
    project = vgrad.per_sample_projection(LOSS, dim, **options)
    store = write(tmp_path, projection=project)
    ggn, batches = curvature.ggn(FMODEL, "categorical"), [(X[:9],), (X[9:N],)]
    sizes = [each.numel() for each in PARAMS.values()]
    units = torch.eye(sum(sizes)).double()
    parts = zip(PARAMS.items(), units.split(sizes, 1), strict=True)
    grads = {n: part.reshape(-1, *each.shape) for (n, each), part in parts}
    dense = curvature.full(ggn, PARAMS, BUFFERS, batches).product(grads)
    dense = torch.cat([each.flatten(1) for each in dense.values()], 1)

    def directional(params, buffers, grads):
        return sum((params[n] * each).sum() for n, each in grads.items())

    directions = store.project(directional, PARAMS, {}, grads)
    found = store.curvature(ggn, PARAMS, BUFFERS, batches)
    fisher = store.empirical_fisher()
    for name, along in directions.items():
        vector = {n: torch.ones(each.shape[1]) for n, each in directions.items()}
        features = whole(store)[name]
        for matrix, expected in (
            (found, along.T @ dense @ along),
            (fisher, features.T @ features / N),
        ):
            damped = expected + 0.1 * torch.eye(len(expected)).double()
            solved = torch.linalg.solve(damped, vector[name].double())
            oracle.assert_exact(matrix.solve(vector, damping=0.1)[name], solved)


def test_along_eigenvectors_a_store_has_the_scores_of_ekfac(tmp_path):
    ggn, inputs = curvature.ggn(FMODEL, "categorical"), [(X[:N],)]
    blocks = curvature.ekfac(ggn, PARAMS, BUFFERS, inputs)
    project = vgrad.per_sample_projection(LOSS, blocks.sides((99, 99)))
    store, queries = write(tmp_path, projection=project), (X[N:], Y[N:])
    matrix = store.curvature(ggn, PARAMS, BUFFERS, inputs, diagonal=True)
    given = LOSS, PARAMS, BUFFERS, queries
    expected = influence(*given, cut(0, N), curvature=blocks, damping=0.01)
    found = influence(*given, store, curvature=matrix, damping=0.01)
    oracle.assert_exact(found, expected)


def test_a_curvature_is_of_the_same_model_and_store(folder, tmp_path):
    store, other = Store(folder), write(tmp_path / "other", samples_per_file=8)
    ggn, matrix = curvature.ggn(FMODEL, "categorical"), other.empirical_fisher()
    given = LOSS, PARAMS, BUFFERS, (X[N:], Y[N:])
    with pytest.raises(ValueError, match="OfFeatures of another store"):
        influence(*given, store, curvature=matrix, damping=0.1)
    with pytest.raises(ValueError, match=r"Store.curvature: .* others: params \["):
        store.curvature(ggn, changed("0.bias", 1.0), BUFFERS, [(X,)])


def writes(folder, names):
    """Write a store, slowly."""
    torch.set_num_threads(1)
    return write(folder, cut(0, N, 1) * 15, ids=names, samples_per_file=8)


@pytest.mark.large
def test_a_killed_process_leaves_a_store_that_is_completed(tmp_path):
    names = [*range(15 * N)]
    whole = 0.0
    for folder in "first", "whole":  # the first one starts the server
        started = time.monotonic()
        process = SERVER.Process(target=writes, args=(tmp_path / folder, names))
        process.start()
        process.join()
        whole = time.monotonic() - started
    kept, kills = set(), 0
    for moment in range(1, 21):
        process = SERVER.Process(target=writes, args=(tmp_path / "killed", names))
        process.start()
        process.join(timeout=whole * moment / 21)
        killed = process.exitcode is None
        process.kill()
        process.join()
        found = {path.name for path in (tmp_path / "killed").glob("0*")}
        assert kept <= found
        kept, kills = found, kills + killed
        if not killed:
            shutil.rmtree(tmp_path / "killed")
            kept = set()
    assert kills > 5
    assert writes(tmp_path / "killed", names).ids == names
    assert content(tmp_path / "killed") == content(tmp_path / "whole")

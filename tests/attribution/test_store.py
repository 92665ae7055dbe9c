"""A store has the features of samples, knows its loss again, and refuses damage."""

import os
import shutil
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad import curvature, files
from vgrad.attribution import Store, influence

N, INDEX = 43, "index.safetensors"
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
FMODEL, PARAMS, BUFFERS = vgrad.make_functional_with_buffers(MODEL)
X, Y = torch.randn(N + 20, 3).double(), torch.randint(2, (N + 20,))
LOSS = vgrad.sample_loss(FMODEL, F.cross_entropy)
PROJECTION, OTHER = (
    vgrad.per_sample_projection(LOSS, (2, 3), seed=seed) for seed in (0, 1)
)


def cut(start, stop, size=7):
    return [*zip(X[start:stop].split(size), Y[start:stop].split(size), strict=True)]


def add(folder, batches, projection=PROJECTION, params=PARAMS, **options):
    return Store.write(folder, projection, params, BUFFERS, batches, **options)


def write(folder, projection=PROJECTION, params=PARAMS, **options):
    """Write N samples by three calls."""
    for start in (0, 16, 32):
        batches = cut(start, min(N, start + 16))
        store = add(folder, batches, projection, params, **options)
    return store


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
    found = write(tmp_path / "new" / "store", project)
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


def test_a_call_that_was_stopped_at_any_moment_adds_all_samples_or_none(tmp_path):
    one = add(tmp_path / "one", cut(0, N))
    features, moments = whole(one), 0
    two = shutil.copytree(tmp_path / "one", tmp_path / "two")
    expected = whole(add(two, cut(N, N + 20)))
    for first in (True, False):
        for number in range(1, 99):
            folder = tmp_path / f"{first} {number}"
            if not first:
                shutil.copytree(tmp_path / "one", folder)
            batches = cut(0, N) if first else cut(N, N + 20)
            with pytest.MonkeyPatch.context() as patch:
                faults(patch, number)
                try:
                    add(folder, batches)
                except Killed:
                    moments += 1
                else:
                    break
            there = len(Store(folder)) if (folder / INDEX).exists() else 0
            assert there in ({0, N} if first else {N, N + 20})
            if there:
                found = whole(Store(folder))
                assert all(found[n][:N].equal(each) for n, each in features.items())
            if there < (N if first else N + 20):
                add(folder, batches)
            right = features if first else expected
            assert all(whole(Store(folder))[n].equal(x) for n, x in right.items())
    assert moments > 20


def changed(name, value):
    return PARAMS | {name: PARAMS[name] + value}


def other_loss(criterion):
    return vgrad.sample_loss(FMODEL, criterion)


def nearly(output, target):
    return F.cross_entropy(output, target) * (1 + 1e-6)


RELU = vgrad.make_functional_with_buffers(
    nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
)[0]
OF_PROBE = "expected the loss of the store, got one whose features of the probe differ"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": changed("0.bias", 1e-12)}, r"params \[.*\], in the store and now"),
        ({"dim": (2, 2)}, r"projection.dim \[\[2, 3\], \[2, 2\]\]"),
        ({"seed": 1}, r"projection.seed \[0, 1\]"),
        ({"kind": "gaussian"}, r"projection.kind \[rademacher, gaussian\]"),
        ({"params": {n: x.float() for n, x in PARAMS.items()}}, "features.0.bias.*32"),
        ({"loss": other_loss(lambda x, y: F.cross_entropy(x, y) ** 2)}, OF_PROBE),
        ({"loss": vgrad.sample_loss(RELU, F.cross_entropy)}, OF_PROBE),
        ({"sides": True}, "projection.sides"),
    ],
)
def test_another_model_loss_or_projection_is_refused(options, text, folder):
    store, options, before = Store(folder), dict(options), content(folder)
    loss, params = options.pop("loss", LOSS), options.pop("params", PARAMS)
    if options.pop("sides", False):
        projection = vgrad.per_sample_projection(loss, sides())
    else:
        given = {"dim": (2, 3), "seed": 0, "kind": "rademacher"} | options
        projection = vgrad.per_sample_projection(loss, given.pop("dim"), **given)
    batches = cut(0, N)
    if params["0.bias"].dtype == torch.float32:
        batches = [(x.float(), y) for x, y in batches]
    with pytest.raises(ValueError, match=f"Store.write: .*{text}"):
        add(folder, batches, projection, params)
    assert content(folder) == before
    if loss is not LOSS or params is not PARAMS:
        with pytest.raises(ValueError, match=r"Store.check: "):
            store.check(loss, params, BUFFERS)


def test_a_loss_is_known_by_what_it_computes(folder):
    """Rounding and code that computes the same pass."""
    for criterion in (nearly, lambda x, y: -x.log_softmax(-1).gather(-1, y[..., None])):
        same = other_loss(lambda x, y, own=criterion: own(x, y).mean())
        Store(folder).check(same, PARAMS, BUFFERS)


def test_a_caller_has_a_probe_for_samples_that_no_seed_gives(tmp_path):
    def loss(params, buffers, x, y, factor):
        assert bool((y < 0).all())
        return LOSS(params, buffers, x, -y - 1) * factor

    projection = vgrad.per_sample_projection(loss, 2, seed=0)
    batches, probe = [(X[:9], -1 - Y[:9], 2.0)], (X[:2], -1 - Y[:2], 2.0)
    with pytest.raises(ValueError, match="samples of tensors.* Pass probe="):
        add(tmp_path, batches, projection)
    plain = vgrad.per_sample_projection(partial(of_two, loss), 2, seed=0)
    with pytest.raises(
        ValueError, match="expected a loss that takes numbers of a seed"
    ):
        add(tmp_path, [batch[:2] for batch in batches], plain)
    add(tmp_path, batches, projection, probe=probe)
    assert X[:2].numpy().tobytes() not in b"".join(content(tmp_path).values())
    Store(tmp_path, probe=probe).check(loss, PARAMS, BUFFERS)
    with pytest.raises(ValueError, match="the probe that Store.write had, got none"):
        Store(tmp_path).check(loss, PARAMS, BUFFERS)
    other = (*probe[:2], 3.0)
    with pytest.raises(ValueError, match=OF_PROBE):
        Store(tmp_path, probe=other).check(loss, PARAMS, BUFFERS)
    none = (X[:2] * torch.nan, *probe[1:])
    with pytest.raises(ValueError, match="finite features of the probe"):
        add(tmp_path / "new", batches, projection, probe=none)


def of_two(loss, params, buffers, x, y):
    return loss(params, buffers, x, y, 1.0)


def test_ids_are_numbers_by_default_or_given(tmp_path):
    add(tmp_path, cut(0, 5))
    assert add(tmp_path, cut(5, 8), ids=torch.arange(3)).ids == [0, 1, 2, 3, 4, 0, 1, 2]
    assert add(tmp_path, cut(8, 10), ids=["a", "b"]).ids[-2:] == ["a", "b"]
    assert add(tmp_path, cut(10, 11)).ids[-1] == 10
    for ids in ([1, 1], [True, None], [1]):
        with pytest.raises(ValueError, match="expected 2 whole numbers or texts"):
            add(tmp_path, cut(0, 2), ids=ids)


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
        lambda index, _: edited(index, samples=[16, 16, 12]),
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
            lambda found: {n: x[:9] for n, x in found.items()},
            ids=[*range(9)],
        ),
        "expected 16 samples",
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


def test_two_processes_do_not_write_one_store(folder):
    before = content(folder)
    with files.locked(folder, "writing a store"):  # as of any other open file
        with pytest.raises(BlockingIOError, match="no other process is writing a sto"):
            add(folder, cut(N, N + 2))
        assert len(whole(Store(folder))["0.bias"]) == N
    assert content(folder) == before
    assert len(add(folder, cut(N, N + 2))) == N + 2


def test_what_cannot_be_stored_is_refused(tmp_path):
    project, batches = vgrad.per_sample_projection, cut(0, N)
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
            add(tmp_path / "store", batches, projection)
    with pytest.raises(ValueError, match="expected a batch at least"):
        add(tmp_path / "store", [])
    assert not (tmp_path / "store").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"got other files and no index"):
        add(tmp_path, batches)
    with pytest.raises(FileNotFoundError, match="index of a store, got no file"):
        Store(tmp_path)
    with pytest.raises(RuntimeError):  # as a user's code may
        add(tmp_path / "half", [*batches, (X[:2, :1], Y[:2])])
    assert not (tmp_path / "half").exists()


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
    store, other = Store(folder), write(tmp_path / "other", OTHER)
    ggn, matrix = curvature.ggn(FMODEL, "categorical"), other.empirical_fisher()
    given = LOSS, PARAMS, BUFFERS, (X[N:], Y[N:])
    with pytest.raises(ValueError, match="OfFeatures of another store"):
        influence(*given, store, curvature=matrix, damping=0.1)
    with pytest.raises(ValueError, match=r"Store.curvature: .* others: params \["):
        store.curvature(ggn, changed("0.bias", 1.0), BUFFERS, [(X,)])

"""Ensembles in files: back bit for bit, one member alone, damage is noticed."""

import json
import os
import pickle
from functools import partial

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.examples import examples
from tests.oracle import assert_exact
from vgrad import files
from vgrad.ensemble import (
    init_ensemble,
    load_ensemble,
    load_member,
    member,
    save_ensemble,
    share,
)
from vgrad.functional import make_functional_with_buffers

SHARED = ["0.*", "*.running_mean"]


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def ensemble(seed=0, shared=()):
    _, params, buffers = init_ensemble(model, 3, seed=seed)
    return share(params, buffers, shared)


def single():
    return make_functional_with_buffers(model())[1:]


refused = partial(pytest.raises, ValueError)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ensemble.safetensors"


@pytest.mark.parametrize("shared", [(), SHARED])
def test_an_ensemble_comes_back_bit_for_bit(path, shared):
    params, buffers = ensemble(0, shared)
    save_ensemble(path, params, buffers, shared=shared)
    templates = ensemble(1, shared)
    found = load_ensemble(str(path), *templates, shared=shared)
    assert_exact(found, (params, buffers), 0)
    assert [*map(list, found)] == [list(params), list(buffers)]
    assert all(each.is_leaf and each.requires_grad for each in found[0].values())
    assert not any(each.requires_grad for each in found[1].values())
    assert not torch.equal(templates[0]["0.weight"], found[0]["0.weight"])


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("shared", [(), SHARED])
def test_a_member_comes_back_alone(path, shared, i):
    params, buffers = ensemble(0, shared)
    save_ensemble(path, params, buffers, shared=shared)
    found = load_member(path, i, *single())
    own = {**params, **buffers}
    expected = member(own, i, shared=shared)
    assert_exact({**found[0], **found[1]}, expected, 0)
    assert all(each.is_leaf and each.requires_grad for each in found[0].values())


def test_a_shared_entry_is_written_once(path):
    params, buffers = ensemble(0, SHARED)
    save_ensemble(path, params, buffers, shared=SHARED)
    with safetensors.safe_open(path, framework="pt") as file:
        names = set(file.keys())
    assert {"shared/0.weight", "0/2.weight", "2/1.running_var"} <= names
    assert len(names) == 3 + 3 * 6


def test_only_the_wanted_member_is_read(path):
    """Damage in member 2 is no concern of member 0."""
    params, buffers = ensemble()
    save_ensemble(path, params, buffers)
    content = path.read_bytes()
    damaged = params["2.weight"].detach()[2].numpy().tobytes()
    assert content.count(damaged) == 1
    path.write_bytes(content.replace(damaged, bytes(len(damaged))))
    assert_exact(load_member(path, 0, *single())[0], member(params, 0), 0)
    with refused(match="expected a model ensemble, got a damaged file"):
        load_member(path, 2, *single())
    with refused(match="expected a model ensemble, got a damaged file"):
        load_ensemble(path, params, buffers)


def test_members_cannot_change_places_unnoticed(path):
    save_ensemble(path, *ensemble())
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, tensors = (
            file.metadata(),
            {k: file.get_tensor(k) for k in file.keys()},
        )
    order = {"0": "1", "1": "0", "2": "2"}
    swapped = {order[name[0]] + name[1:]: value for name, value in tensors.items()}
    seals = {f"{order[i]}/sha256": metadata[f"{i}/sha256"] for i in order}
    safetensors.torch.save_file(swapped, path, metadata | seals)
    with refused(match="its checksum does not match"):
        load_member(path, 0, *single())


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
DTYPES += [torch.bool, torch.uint8, torch.complex64]


@examples(30)
@given(
    st.integers(1, 12),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(["weight", "a/b", "0/c", "shared/d", "a.b", "äöü"]),
    st.booleans(),
)
def test_any_shape_dtype_and_name_comes_back(
    tmp_path_factory, count, shape, dtype, name, shared
):
    path = tmp_path_factory.mktemp("store") / "file"
    generator = torch.Generator().manual_seed(0)
    value = torch.randint(0, 2, (count, *shape), generator=generator).to(dtype)
    params, buffers = {name: value}, {"count": torch.arange(count)}
    patterns = [name] if shared else []
    params, buffers = share(params, buffers, patterns)
    save_ensemble(path, params, buffers, shared=patterns)
    templates = [
        {key: torch.zeros_like(each) for key, each in values.items()}
        for values in (params, buffers)
    ]
    found = load_ensemble(path, *templates, shared=patterns)
    assert_exact(found, (params, buffers), 0)
    last = load_member(
        path, count - 1, member(params, 0, shared=patterns), {"count": torch.tensor(0)}
    )
    assert_exact(last[0], member(params, count - 1, shared=patterns), 0)
    assert last[1]["count"].item() == count - 1


def test_values_that_are_no_numbers_come_back(path):
    odd = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])
    save_ensemble(path, {"a": odd}, {"b": odd.t()})
    params, buffers = load_ensemble(path, {"a": odd * 0}, {"b": odd * 0})
    assert_exact({**params, **buffers}, {"a": odd, "b": odd.t()}, 0)


def test_parameters_may_come_back_as_buffers(path):
    params, buffers = ensemble()
    save_ensemble(path, params, buffers)
    frozen = {name: value.detach() for name, value in params.items()}
    found = load_ensemble(path, {}, {**frozen, **buffers})
    assert_exact(found[1], {**frozen, **buffers}, 0)
    assert not any(each.requires_grad for each in found[1].values())


def test_what_was_given_stays_as_it_was(path):
    params, buffers = ensemble()
    before = [
        {n: t.detach().clone() for n, t in each.items()} for each in (params, buffers)
    ]
    save_ensemble(path, params, buffers)
    found = load_ensemble(path, params, buffers)
    with torch.no_grad():
        found[0]["0.weight"].zero_()
    assert_exact([params, buffers], before, 0)


def test_a_failure_while_writing_leaves_the_old_file(path, monkeypatch):
    params, buffers = ensemble()
    save_ensemble(path, params, buffers)

    def fail(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            save_ensemble(path, *ensemble(1))
    assert_exact(load_ensemble(path, params, buffers)[0], params, 0)
    assert os.listdir(path.parent) == [path.name]


def test_nothing_is_pickled(path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    save_ensemble(path, *ensemble())
    load_ensemble(path, *ensemble())
    load_member(path, 0, *single())


# Files and templates that do not fit.


@pytest.mark.parametrize("share_of_file", [0.0, 0.02, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("change", ["flip", "cut"])
def test_damage_is_noticed(path, change, share_of_file):
    params, buffers = ensemble()
    save_ensemble(path, params, buffers)
    content = bytearray(path.read_bytes())
    at = int(share_of_file * len(content))
    if change == "flip":
        content[at] ^= 1
    else:
        del content[at:]
    path.write_bytes(content)
    with refused(match=r"ensemble\.safetensors: expected a model ens"):
        load_ensemble(path, params, buffers)


def test_a_description_cannot_be_changed_unnoticed(path):
    params, buffers = ensemble()
    save_ensemble(path, params, buffers)
    content = path.read_bytes()
    path.write_bytes(content.replace(rb"\"members\": 3", rb"\"members\": 2"))
    assert path.read_bytes() != content
    with refused(match="its checksum does not match"):
        load_member(path, 0, *single())


@pytest.mark.parametrize("description", ["no text of JSON", "[]", "{}"])
def test_a_description_that_is_none_is_damage(path, description):
    safetensors.torch.save_file({"a": torch.ones(1)}, path, {"vgrad": description})
    with refused(match="expected a model ensemble, got a damaged file"):
        load_member(path, 0, *single())


def test_a_file_without_one_of_its_members_is_refused(path):
    params, buffers = ensemble()
    description = {"kind": "model ensemble", "members": 3, "shared": []}
    parts = {"shared": {}, "0": member({**params, **buffers}, 0)}
    files.write_parts(path, parts, description)
    assert_exact(load_member(path, 0, *single())[0], member(params, 0), 0)
    with refused(match="got a damaged file"):
        load_ensemble(path, params, buffers)


@pytest.mark.parametrize("count", [0, -1, True, 3.0, "3", None, [3]])
def test_a_number_of_members_that_is_none_is_damage(path, count):
    files.write_parts(
        path, {"shared": {}}, {"kind": "model ensemble", "members": count}
    )
    message = r"got a damaged file \(members: "
    with refused(match=message):
        load_ensemble(path, *ensemble())
    with refused(match=message):
        load_member(path, 0, *single())


def test_members_that_a_file_only_claims_are_not_looked_for(path):
    count = 2**40
    files.write_parts(
        path, {"shared": {}}, {"kind": "model ensemble", "members": count}
    )
    template = {"a": torch.zeros(()).expand(count)}
    with refused(match="got a damaged file"):
        load_ensemble(path, template, {})


def test_foreign_and_missing_files_are_refused(path):
    message = "expected a model ensemble, got no file"
    with pytest.raises(FileNotFoundError, match=message):
        load_ensemble(path, *ensemble())
    safetensors.torch.save_file({"w": torch.ones(1)}, path)
    with refused(match="got a file not made by vgrad"):
        load_ensemble(path, *ensemble())
    path.write_text(json.dumps({"weight": [1.0]}))
    with refused(match="expected a model ensemble, got a damaged file"):
        load_ensemble(path, *ensemble())
    files.write_parts(path, {"": {"w": torch.ones(1)}}, {"kind": "model"})
    with refused(match="expected a model ensemble, got a model"):
        load_member(path, 0, *single())


def narrower():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


TEMPLATES = {
    "init_ensemble(model, 4, seed=0)": (
        "ensemble.safetensors: expected 4 members, got 3"
    ),
    "init_ensemble(partial(nn.Linear, 3, 4), 3, seed=0)": (
        "member 0: expected the names of the model, got missing: 'bias', 'weight'"
    ),
    "init_ensemble(narrower, 3, seed=0)": (
        r"member 0: expected shape \(5, 3\) in '0.weight', got \(4, 3\)"
    ),
    "init_ensemble(lambda: model().double(), 3, seed=0)": (
        "member 0: expected torch.float64 in '0.weight', got torch.float32"
    ),
}


@pytest.mark.parametrize("templates", TEMPLATES)
def test_templates_that_do_not_fit_are_refused(path, templates):
    save_ensemble(path, *ensemble())
    with refused(match=TEMPLATES[templates]):
        load_ensemble(path, *eval(templates)[1:])


def test_a_member_of_another_model_is_refused(path):
    save_ensemble(path, *ensemble())
    _, params, buffers = make_functional_with_buffers(narrower())
    with refused(match=r"member 2: expected shape \(5, 3\) in '0.wei"):
        load_member(path, 2, params, buffers)
    with refused(match="a file with member 3, got 3 members"):
        load_member(path, 3, *single())
    with refused(match=r"load_member\(i=-1\): expected a whole number"):
        load_member(path, -1, *single())


def test_shared_entries_are_loaded_as_such(path):
    """Three members of four entries have the shape of one shared entry `[3, 4]`."""
    save_ensemble(path, {"a": torch.ones(3, 4), "b": torch.ones(3)}, {})
    templates = {"a": torch.zeros(3, 4), "b": torch.zeros(3)}
    with refused(match=r"names \['a'\], got a file that shares \[\]"):
        load_ensemble(path, templates, {}, shared=["a"])
    save_ensemble(path, {"a": torch.ones(3, 4), "b": torch.ones(3)}, {}, shared=["a"])
    with refused(match=r"names \[\], got a file that shares \['a'\]"):
        load_ensemble(path, templates, {})
    wrong = {"a": torch.zeros(4, 3), "b": torch.zeros(3)}
    with refused(match=r"expected shape \(4, 3\) in 'a', got \(3, 4\)"):
        load_ensemble(path, wrong, {}, shared=["a"])


def test_entries_that_cannot_be_written_are_refused(path):
    one = {"a": torch.ones(3)}
    with refused(match=r"save_ensemble\(params, buffers\): .*'a' in bot"):
        save_ensemble(path, one, one)
    with refused(match="expected 3 members in 'b' as in 'a', got 2"):
        save_ensemble(path, one, {"b": torch.ones(2)})
    with refused(match=r"save_ensemble\('b'\): expected a pattern"):
        save_ensemble(path, one, {}, shared=["b"])
    wide = {"a": torch.ones(3, dtype=torch.complex128)}
    for params, message in [
        (wide, "dtypes that the safetensors format has, got tor"),
        ([torch.ones(3)], r"save_ensemble\(params\): expected a dictionary"),
    ]:
        with pytest.raises(TypeError, match=message):
            save_ensemble(path, params, {})
    assert not path.exists()

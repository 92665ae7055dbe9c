"""The files of a run: whole files, private states, models to release."""

import _pickle
import json
import os
import pickle
import shutil
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import vgrad
from tests import oracle
from tests.cli.runs import error, forge, net, state_of
from vgrad import files
from vgrad.__main__ import main
from vgrad.cli import checkpoint, models

SHAPE = models.Shape(channels=1, height=8, width=8, classes=4)
TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3).t(),
    "odd": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}


def save_model(folder, params, buffers=None, spec="mlp", shape=SHAPE):
    description = {"model": spec, "shape": shape._asdict(), "members": 1}
    checkpoint.save_model(folder, params, buffers or {}, description)


def test_tensors_come_back_bit_by_bit_aligned_and_apart(tmp_path):
    path, shared = tmp_path / "some.safetensors", torch.arange(4.0)
    held = {**TENSORS, "a": shared, "b": shared[1:3], "c": torch.ones(1)}
    files.write_tensors(path, held, {"kind": "thing", "rate": 0.1})
    read, description = files.read_tensors(path, "thing")
    assert description == {"kind": "thing", "rate": 0.1}
    oracle.assert_exact(read, held, 0)
    # As torch aligns its own memory.
    assert all(read[name].data_ptr() % 64 == 0 for name in "abc")


@pytest.mark.parametrize("broken", ["open", "fsync", "replace"])
def test_a_failure_while_writing_leaves_the_old_file_alone(
    tmp_path, monkeypatch, broken
):
    path = tmp_path / "file"
    files.replace(path, b"old")

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="no space left"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_damaged_file_is_refused(tmp_path, share, change):
    path = tmp_path / "some.safetensors"
    files.write_tensors(path, TENSORS, {"kind": "thing"})
    content = bytearray(path.read_bytes())
    at = int(share * len(content))
    if change == "flip":
        content[at] ^= 1
    else:
        del content[at:]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some\.safetensors: expected the thing of"):
        files.read_tensors(path, "thing")


def as_written(path, change):
    """Change tensors and leave the metadata of the file."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        held = {key: file.get_tensor(key) for key in file.keys()}
    safetensors.torch.save_file(change(held), path, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held | {"matrix": held["matrix"].reshape(2, 3)},
        lambda held: held | {"empty": held["empty"].reshape(3, 0)},
        lambda held: held | {"odd": held["odd"].view(torch.float16)},
        lambda held: {"other" if k == "odd" else k: v for k, v in held.items()},
        lambda held: {k: v for k, v in held.items() if k != "empty"},
        None,
    ],
    ids=["shape", "shape of nothing", "dtype", "name", "one fewer", "description"],
)
def test_the_seal_is_on_names_dtypes_shapes_and_description(tmp_path, change):
    path = tmp_path / "some.safetensors"
    files.write_tensors(path, TENSORS, {"kind": "thing", "epsilon": 3.0})
    as_written(path, dict)
    files.read_tensors(path, "thing")
    content = path.read_bytes().replace(rb"\"epsilon\": 3.0", rb"\"epsilon\": 1.0")
    as_written(path, change) if change else path.write_bytes(content)
    with pytest.raises(ValueError, match="checksum does not match"):
        files.read_tensors(path, "thing")


DEEP, NINES = "[" * 100_000, "9" * 5000
UNREADABLE = {
    "open": DEEP,
    "deep": f'{{"kind": "thing", "deep": {DEEP}{"]" * 100_000}}}',
    "no number": '{"kind": "thing", "rate": NaN}',
    "too many digits": f'{{"kind": "thing", "rate": {NINES}}}',
    "a list": '{"kind": ["thing"]}',
    "text": '"kind"',
    "a size beyond 64 bits": None,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_description_that_cannot_be_read_is_damage(tmp_path, name):
    path, text = tmp_path / "some.safetensors", UNREADABLE[name]
    if text is None:
        entry = {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}
        header = json.dumps({"a": entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    else:
        safetensors.torch.save_file({"a": torch.ones(1)}, path, {"vgrad": text})
    with pytest.raises(ValueError, match="expected the thing of a run, got a damaged"):
        files.read_tensors(path, "thing")


def test_foreign_and_missing_files_are_refused(tmp_path):
    path, foreign = tmp_path / "model.safetensors", {"w": torch.ones(1)}
    with pytest.raises(FileNotFoundError, match=r"expected the model of a run, got no"):
        checkpoint.load(tmp_path)
    safetensors.torch.save_file(foreign, path)
    with pytest.raises(ValueError, match="got a file not made by vgrad"):
        checkpoint.load(tmp_path)
    files.write_tensors(path, foreign, {"kind": "thing"})
    with pytest.raises(ValueError, match="expected the model of a run, got a thing"):
        checkpoint.load(tmp_path)


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
        monkeypatch.setattr(_pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    values = dict(models.build("cnn", SHAPE, seed=0).named_parameters())
    states = checkpoint.States(plain={"w": torch.ones(2)})
    checkpoint.save(tmp_path, states, {}, {"note": "text"})
    checkpoint.load_states(tmp_path, states, {"note": "text"})
    save_model(tmp_path, values, spec="cnn")
    checkpoint.load(tmp_path)


FACTORY = """
def make(*, channels, height, width, classes):
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    second.weight = first.weight
    last = torch.nn.Dropout(), torch.nn.Linear(64, classes)
    net = torch.nn.Sequential(torch.nn.Flatten(), first, second, torch.nn.Tanh(), *last)
    net.register_buffer("scale", torch.tensor(3.0))
    return net
"""


@pytest.mark.parametrize("spec", ["cnn", "mlp", "resnet", "tied_model:make"])
def test_a_loaded_model_is_the_one_that_was_saved(tmp_path, module, spec):
    module("tied_model", FACTORY)
    model = models.build(spec, SHAPE, seed=0)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(torch.arange(float(value.numel())).reshape(value.shape) / 1e3)
    save_model(tmp_path, *vgrad.make_functional_with_buffers(model)[1:], spec)
    loaded = checkpoint.load(tmp_path, model=spec if ":" in spec else None)
    assert isinstance(loaded, nn.Module)
    assert not loaded.training
    oracle.assert_exact(dict(loaded.state_dict()), dict(model.state_dict()), 0)
    x = torch.rand(3, 1, 8, 8)
    oracle.assert_exact(loaded(x), model.eval()(x), 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": SHAPE._replace(classes=5)}, r"expected shape \(5, 64\)"),
        ({"spec": "cnn"}, "expected the names of the model"),
    ],
)
def test_a_model_whose_code_has_changed_is_not_loaded(tmp_path, changed, message):
    values = dict(models.build("mlp", SHAPE, seed=0).named_parameters())
    save_model(tmp_path, values, **changed)
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        checkpoint.load(tmp_path)


def forge_model(folder, **changed):
    """Change entries of a model, and seal it."""
    path = folder / "model.safetensors"
    tensors, description = files.read_tensors(path, "model")
    files.write_tensors(path, tensors, description | changed)


@pytest.fixture
def evil(tmp_path, module):
    code = 'import pathlib\npathlib.Path(__file__).with_name("sprung").touch()\n'
    layers = "torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, classes)"
    module("evil", code + net(layers))
    return tmp_path / "sprung"


def test_no_model_chooses_the_code_that_runs(copied, images, capsys, evil):
    run = copied("one")
    forge_model(run, model="evil:make")
    judge = ["evaluate", run, "--data", images]
    other = "expected the model 'math:sqrt', got 'evil:make'"
    assert "name it: with --model" in error(capsys, *judge)
    assert other in error(capsys, *judge, "--model", "math:sqrt")
    with pytest.raises(ValueError, match="a file may not choose the code that runs"):
        checkpoint.load(run)
    with pytest.raises(ValueError, match=other):
        checkpoint.load(run, model="math:sqrt")
    assert not evil.exists()
    assert "evil" not in sys.modules
    checkpoint.load(run, model="evil:make")
    assert evil.exists()
    assert main([*map(str, judge), "--model", "evil:make"]) == 0


def test_no_state_chooses_the_code_that_runs(copied, capsys, evil):
    run = copied("one")
    (run / "curves.png").unlink()
    forge(run, lambda entries: entries["arguments"].update(model="evil:make"))
    command = ["train", "--resume", run]
    assert "name it: with --model" in error(capsys, *command)
    message = error(capsys, *command, "--model", "mlp")
    assert "expected --model evil:make, which the run was started with" in message
    assert not evil.exists()
    # Named again, it is imported, and is not the model that the run was started with.
    assert "sha256 of the model's file" in error(
        capsys, *command, "--model", "evil:make"
    )
    assert evil.exists()


def test_an_ensemble_and_its_members_are_loaded_from_their_folder(finished):
    three, single = (finished(kind)[0] for kind in ("plain", "one"))
    fmodel, params, buffers = checkpoint.load(three)
    state = state_of(three)
    assert not fmodel.training
    assert buffers == {}
    for name, value in params.items():
        assert value.is_leaf
        assert value.requires_grad
        oracle.assert_exact(value, state[f".plain.params['{name}']"], 0)
    x = torch.randn(5, 1, 1, 6)
    scores = vgrad.ensemble_forward(fmodel)(params, buffers, x)
    for i in range(3):
        model = checkpoint.load(three, member=i)
        assert not model.training
        assert all(value.requires_grad for value in model.parameters())
        oracle.assert_exact(model(x), scores[i], 1e-6)
    for folder, member, message in (
        *((three, member, "a whole number >= 0") for member in (-1, True, 1.0, "0")),
        (three, 3, "member=3.*which holds 3"),
        (single, 0, "which holds 1. Leave member out."),
        (three / "none", 0, "got no file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            checkpoint.load(folder, member=member)


def test_a_folder_of_two_runs_is_no_guess(copied, finished, images, capsys):
    one = copied("one")
    shutil.copy(finished("plain")[0] / "ensemble.safetensors", one)
    with pytest.raises(ValueError, match=r"one run, got model\.safetensors and ens"):
        checkpoint.load(one)
    message = error(capsys, "evaluate", one, "--data", images)
    assert "expected the folder of one run" in message


@pytest.mark.parametrize("name", ["file", ".file.partial"])
def test_no_link_is_followed(tmp_path, name):
    os.symlink(tmp_path / "victim", tmp_path / name)
    files.replace(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]

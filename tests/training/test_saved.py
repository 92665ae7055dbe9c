"""A loaded state is the saved one, or an error names the difference."""

import math
import stat

import pytest
import torch
from torch import nn

import vgrad
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.precision import DynamicLossScale
from vgrad.training import EnsembleState, TrainState, load, save, train_step

SETTINGS = {"lr": 0.1, "sizes": (3, 2), "name": None}


def begun(create=TrainState.create, width=2, tx=None, **options):
    model = nn.Sequential(nn.Conv2d(4, width, 3), nn.BatchNorm2d(width), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    entries = vgrad.make_functional_with_buffers(model)[1:]
    if create == EnsembleState.create:
        entries = vgrad.stack([model, model])[1:]
    return create(tx or optim.adam(0.1), *entries, **options)


@pytest.mark.parametrize("create", [TrainState.create, EnsembleState.create])
@pytest.mark.parametrize("scale", [None, DynamicLossScale(2.0**5)])
def test_a_state_comes_back_with_its_layout(create, scale, tmp_path):
    state = begun(create, seed=1, loss_scale=scale)
    other = begun(create, loss_scale=scale)
    save(tmp_path / "state", state, settings=SETTINGS)
    found = load(str(tmp_path / "state"), other, settings=SETTINGS)
    assert_exact(found, state, 0)
    assert type(found) is type(state)
    for name, value in state.params.items():
        assert found.params[name].stride() == value.stride()
    assert not torch.equal(other.key, state.key)
    found = [path.stat().st_mode for path in (tmp_path / "state").iterdir()]
    assert {stat.S_IMODE(mode) for mode in found} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_donated_step_after_loading_leaves_the_template(tmp_path):
    state = begun(seed=1)
    save(tmp_path / "state", state)
    found = load(tmp_path / "state", state)
    step = train_step(
        lambda params, _: params["0.bias"].sum(), optim.adam(0.1), donate=True
    )
    step(found)
    assert_exact(load(tmp_path / "state", state), state, 0)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"lr": 0.2}, {}, "saved with lr = 0.2, got one with 0.1. Its run would"),
        ({"sizes": [3]}, {}, r"saved with sizes = \[3\], got one with \[3, 2\]"),
        ({"more": None}, {}, "saved with more = None, got one with no such setting"),
        ({}, {"width": 3}, r"expected shape \(3, 4, 3, 3\) in "),
        ({}, {"tx": optim.sgd(0.1)}, "got unexpected: "),
        ({}, {"loss_scale": DynamicLossScale()}, "got missing: '.loss_scale.counter'"),
    ],
)
def test_another_state_is_refused(settings, options, message, tmp_path):
    save(tmp_path / "state", begun(), settings=SETTINGS)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "state", begun(**options), settings=settings)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_setting_that_json_lacks_is_refused_before_anything_is_written(
    value, tmp_path
):
    save(tmp_path / "state", begun())
    before = (tmp_path / "state" / "meta.json").read_bytes()
    with pytest.raises(ValueError, match="expected values of JSON.*finite as text"):
        save(tmp_path / "state", begun(), settings={"max_norm": value})
    assert (tmp_path / "state" / "meta.json").read_bytes() == before


def test_other_content_is_refused(tmp_path):
    path, state = tmp_path / "state", begun()
    message = "a checkpoint as vgrad.training.save writes it, got no file"
    with pytest.raises(FileNotFoundError, match=message):
        load(path, state)
    path.mkdir()
    (path / "index.safetensors").touch()
    with pytest.raises(ValueError, match="Finish a run with the version that began"):
        load(path, state)
    save(path, state)  # beside files of an older version
    assert_exact(load(path, state), state, 0)
    (path / "index.safetensors").rename(tmp_path / "file")
    with pytest.raises(ValueError, match="Finish a run with the version that began"):
        load(tmp_path / "file", state)
    with pytest.raises(TypeError, match="expected a tensor at "):
        save(path, {"steps": 3})


def test_a_meta_file_whose_checksum_is_wrong_is_refused(tmp_path):
    save(tmp_path / "run", begun(), settings=SETTINGS)
    path = tmp_path / "run" / "meta.json"
    path.write_text(path.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    with pytest.raises(ValueError, match="got a damaged file .its checksum does not"):
        load(tmp_path / "run", begun(), settings={"lr": 0.2})


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
DTYPES += [torch.bool, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["weight", "a/b", "../../c", "/d", "a.b", "\u00e4", ""]
)
def test_names_of_entries_are_no_names_of_files(name, dtype, tmp_path):
    values = {name: torch.tensor([[1, 0, 1]]).to(dtype), "empty": torch.zeros(2, 0)}
    save(tmp_path / "run", values)
    found = load(tmp_path / "run", vgrad.tree.tree_map(torch.zeros_like, values))
    assert_exact(found, values, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_an_ensemble_comes_back_with_parameters_that_require_grad(tmp_path):
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    _, params, buffers = vgrad.stack(models)
    save(tmp_path / "ensemble", (params, buffers))
    like = vgrad.stack(models[::-1])[1:]
    found = load(tmp_path / "ensemble", like)
    assert_exact(found, (params, buffers), 0)
    assert all(each.is_leaf and each.requires_grad for each in found[0].values())
    assert not any(each.requires_grad for each in found[1].values())
    fewer = vgrad.stack(models[:2])[1:]
    with pytest.raises(ValueError, match=r"expected shape \(2, 4, 3\) in "):
        load(tmp_path / "ensemble", fewer)

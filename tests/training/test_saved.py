"""A loaded state is the saved one, or an error names the difference."""

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
    loaded = load(str(tmp_path / "state"), other, settings=SETTINGS)
    assert_exact(loaded, state, 0)
    assert type(loaded) is type(state)
    for name, value in state.params.items():
        assert loaded.params[name].stride() == value.stride()
    assert not torch.equal(other.key, state.key)
    modes = {path.stat().st_mode for path in (tmp_path / "state").iterdir()}
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_donated_step_after_loading_leaves_the_template(tmp_path):
    state = begun(seed=1)
    save(tmp_path / "state", state)
    loss = lambda params, _: params["0.bias"].sum()  # noqa: E731
    train_step(loss, optim.adam(0.1), donate=True)(load(tmp_path / "state", state))
    assert_exact(load(tmp_path / "state", state), state, 0)


REFUSED = [
    ({"lr": 0.2}, {}, "saved with lr = 0.2, got one with 0.1. Its run would"),
    ({"sizes": [3]}, {}, r"saved with sizes = \[3\], got one with \[3, 2\]"),
    ({"more": None}, {}, "saved with more = None, got one with no such setting"),
    ({}, {"width": 3}, r"expected shape \(3, 4, 3, 3\) in "),
    ({}, {"tx": optim.sgd(0.1)}, "got unexpected: "),
    ({}, {"loss_scale": DynamicLossScale()}, "got missing: '.loss_scale.counter'"),
    ({"lr": float("nan")}, {}, "expected values of JSON.*finite as text"),
]


@pytest.mark.parametrize(("settings", "options", "message"), REFUSED)
def test_another_state_is_refused(settings, options, message, tmp_path):
    save(tmp_path / "state", begun(), settings=SETTINGS)
    before = (tmp_path / "state" / "meta.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "state", begun(**options), settings=settings)
    if settings.get("lr", 0) != settings.get("lr", 0):
        with pytest.raises(ValueError, match=message):
            save(tmp_path / "state", begun(), settings=settings)
    assert (tmp_path / "state" / "meta.json").read_bytes() == before


def test_other_content_is_refused(tmp_path):
    path, state = tmp_path / "state", begun()
    message = "a checkpoint as vgrad.training.save writes it, got no file"
    with pytest.raises(FileNotFoundError, match=message):
        load(path, state)
    with pytest.raises(TypeError, match="expected a tensor at "):
        save(path, {"steps": 3})


def test_a_damaged_meta_file_is_refused(tmp_path):
    save(tmp_path / "run", begun(), settings=SETTINGS)
    path = tmp_path / "run" / "meta.json"
    text = path.read_text()
    for changed in (text[:-100], text.replace('"lr": 0.1', '"lr": 0.2')):
        path.write_text(changed)
        with pytest.raises(ValueError, match="got a damaged file"):
            load(tmp_path / "run", begun(), settings={"lr": 0.2})


@pytest.mark.parametrize("name", ["weight", "a/b", "../../c", "/d", "a.b", "ä", ""])
def test_names_of_entries_are_no_names_of_files(name, tmp_path):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
    dtypes += [torch.bool, torch.uint8, torch.complex64]
    values = {f"{name}{x}": torch.tensor([[1, 0, 1]]).to(x) for x in dtypes}
    values |= {name: torch.ones(2), "empty": torch.zeros(2, 0)}
    save(tmp_path / "run", values)
    loaded = load(tmp_path / "run", vgrad.tree.tree_map(torch.zeros_like, values))
    assert_exact(loaded, values, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_an_ensemble_comes_back_with_parameters_that_require_grad(tmp_path):
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    _, params, buffers = vgrad.stack(models)
    save(tmp_path / "ensemble", (params, buffers))
    loaded = load(tmp_path / "ensemble", vgrad.stack(models[::-1])[1:])
    assert_exact(loaded, (params, buffers), 0)
    assert all(x.is_leaf and x.requires_grad for x in loaded[0].values())
    assert not any(x.requires_grad for x in loaded[1].values())

"""A state in a file is the state, or an error says what is wrong with it."""

import math
import stat

import pytest
import torch
from torch import nn

import vgrad
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.precision import DynamicLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    load_state,
    save_state,
    train_step,
)

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
    save_state(tmp_path / "state", state, settings=SETTINGS)
    found = load_state(str(tmp_path / "state"), other, settings=SETTINGS)
    assert_exact(found, state, 0)
    assert type(found) is type(state)
    for name, value in state.params.items():
        assert found.params[name].stride() == value.stride()
    assert not torch.equal(other.key, state.key)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_donated_step_after_loading_leaves_the_template(tmp_path):
    state = begun(seed=1)
    save_state(tmp_path / "state", state)
    found = load_state(tmp_path / "state", state)
    step = train_step(
        lambda params, _: params["0.bias"].sum(), optim.adam(0.1), donate=True
    )
    step(found)
    assert_exact(load_state(tmp_path / "state", state), state, 0)


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
    save_state(tmp_path / "state", begun(), settings=SETTINGS)
    with pytest.raises(ValueError, match=message):
        load_state(tmp_path / "state", begun(**options), settings=settings)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_setting_that_json_lacks_is_refused_before_anything_is_written(
    value, tmp_path
):
    save_state(tmp_path / "state", begun())
    before = (tmp_path / "state").read_bytes()
    with pytest.raises(ValueError, match="settings that JSON has.*not finite as text"):
        save_state(tmp_path / "state", begun(), settings={"max_norm": value})
    assert (tmp_path / "state").read_bytes() == before


def test_what_is_no_state_is_refused(tmp_path):
    path, state = tmp_path / "state", begun()
    with pytest.raises(FileNotFoundError, match="a state as save_state writes it, got"):
        load_state(path, state)
    save_state(path, state)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="got a damaged file"):
        load_state(path, state)
    vgrad.ensemble.save_ensemble(path, {"w": torch.ones(2, 1)}, {})
    with pytest.raises(ValueError, match="as save_state writes it, got a model ens"):
        load_state(path, state)
    with pytest.raises(TypeError, match="expected a tensor at "):
        save_state(path, {"steps": 3})

"""Noise where the gradients are: the words of the host, and nothing that is copied."""

import pytest
import torch

import vgrad
from tests.accelerator import device
from tests.dp.runs import KEY
from vgrad.dp import noise, noising

HERE = device.NAME
SIZES = {"noise_multiplier": 1.5, "key": KEY}
SHAPES = {"a": (700, 11), "b": (7,), "c": (), "d": (3, 0), "e": (50, 3, 3)}


def sums(where, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(where, dtype)
        for name, shape in SHAPES.items()
    }


def at(step, held=None):
    size = vgrad.Sensitivity(0.4)
    return noise.gaussian_noise("f", size, step=step, streams=held, **SIZES)


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_noise_is_that_of_the_host(dtype):
    held = noise.Streams()
    for step in (0, 1, 2, 3, 900, 901, 5):
        found = at(step, held).added(sums(HERE, dtype))
        expected = at(step).added(sums("cpu", dtype))
        alone = at(step).added(sums(HERE, dtype))
        for name, value in expected.items():
            assert found[name].device.type == HERE
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].cpu(), value)
            assert torch.equal(alone[name].cpu(), value)


@pytest.mark.more
def test_a_graph_draws_words_where_its_tensors_are():
    drawn = at(7).drawn(sums(HERE))
    assert drawn.words is None
    assert {each.device.type for each in drawn.stream} == {HERE}
    found, _ = drawn.advanced(sums(HERE))
    for name, value in at(7).added(sums("cpu")).items():
        assert torch.equal(found[name].cpu(), value)


def test_steps_in_a_row_copy_nothing_and_launch_little():
    held, here = noise.Streams(), sums(HERE)
    for step in range(2):
        at(step, held).added(here)
    with device.counted() as counts:
        at(2, held).added(here)
    assert counts.of("launch") < 24, counts.lines()
    assert not counts.of("to_host")
    assert not counts.of("to_device")
    assert not counts.of("wait")


@pytest.mark.more
def test_a_device_without_float64_has_its_noise_from_the_host():
    empty = torch.empty

    def without(*sizes, dtype=None, device=None, **others):
        if dtype == torch.float64 and torch.device(device).type == HERE:
            raise TypeError("no float64")
        return empty(*sizes, dtype=dtype, device=device, **others)

    here = sums(HERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", without)
        assert at(0).drawn(here) is None
        found = at(0).added(here)
    for name, value in at(0).added(sums("cpu")).items():
        assert found[name].device.type == HERE
        assert torch.equal(found[name].cpu(), value)


@pytest.mark.more
def test_integers_of_a_step_are_those_of_the_host():
    plan = vgrad.dp.Plan(20, 0.25, 1.0, 1.0, 10, 1e-3, discrete="sum")
    loss = lambda params, buffers, x: (params["w"] * x).sum()  # noqa: E731
    x, ends = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)), []
    for where in ("cpu", HERE):
        tx, params = vgrad.optim.sgd(0.1), {"w": torch.zeros(300, device=where)}
        state = vgrad.training.TrainState.create(tx, params, {}, seed=0)
        for _ in range(2):
            state, _ = vgrad.training.private_step(loss, tx, plan)(state, x.to(where))
        assert state.params["w"].device.type == torch.device(where).type
        ends.append(state.params["w"].cpu())
    assert torch.equal(*ends)


FILTERS = [
    noising.Filter(draws=(1.0, -0.5, -0.125, -0.0625)),
    noising.Filter(draws=(1.0, -0.5, -0.125, -0.0625), cached=True),
    noising.Filter(feedback=(0.8, 0.4, 0.3, 0.1)),
    noising.Filter(decays=(0.9, 0.3), scales=(0.2, 0.4)),
    noise.INDEPENDENT,
]


def taken(here, steps, kind, held=None, history=()):
    """Take steps with correlated noise, of a deviation that is a tensor."""
    found, place = [], {"dtype": torch.float64, "device": here["a"].device}
    bound = torch.full((), 0.4, **place)
    own = {"filter": kind, "streams": held or noise.Streams()}
    for step in steps:
        own |= {"step": step, "history": history, **SIZES}
        noise_of = noise.gaussian_noise("f", vgrad.Sensitivity(bound), **own)
        noisy, history = noise_of.advanced(here)
        found.append(noisy)
    return found, history


@pytest.mark.more
@pytest.mark.parametrize("kind", FILTERS, ids=str)
@pytest.mark.parametrize("small", [False, True])
def test_correlated_noise_is_that_of_the_host(kind, small):
    with pytest.MonkeyPatch.context() as patch:
        if small:  # groups of numbers, and each step for itself
            patch.setattr(noise, "ON_DEVICE", 2**12)
            patch.setattr(noise, "_MOST_ON_DEVICE", 2**13)
        found, history = taken(sums(HERE), range(8), kind)
    expected, last = taken(sums("cpu"), range(8), kind)
    for noisy, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert noisy[name].device.type == HERE
            assert torch.equal(noisy[name].cpu(), value)
    for buffer, other in zip(
        getattr(history, "buffers", ()), getattr(last, "buffers", ()), strict=True
    ):
        for name, value in other.items():
            assert buffer[name].device.type == HERE
            torch.testing.assert_close(buffer[name].cpu(), value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", FILTERS, ids=str)
def test_correlated_steps_in_a_row_copy_nothing_and_launch_little(kind):
    held, here = noise.Streams(), sums(HERE)
    _, history = taken(here, range(6), kind, held)
    with device.counted() as counts:
        taken(here, [6], kind, held, history)
    assert not counts.of("to_host")
    assert not counts.of("to_device")
    assert not counts.of("wait")
    assert counts.of("launch") < 48, counts.lines()

"""Noise that is correlated over steps: its numbers, its history, and its parts."""

import math

import numpy as np
import pytest
import torch

from tests import oracle, streams
from tests.dp.runs import KEY
from tests.dp.test_noise import as_rank, placed, placements
from vgrad import Sensitivity
from vgrad.dp import noise as gaussian
from vgrad.dp.noising import Filter

MULTIPLIER, SENSITIVITY = 1.5, 0.4
SIGMA = MULTIPLIER * SENSITIVITY

# The first columns of C^-1, and filters that have them.
FILTERS = {
    "draws": Filter(draws=(1.0, -0.5, -0.125, -0.0625)),
    "draws, scaled": Filter(draws=(0.75, -0.5, 0.25)),
    "feedback": Filter(feedback=(0.8, 0.4, 0.3, 0.1)),
    "one before": Filter(feedback=(1.0, 0.5)),
    "decays": Filter(draws=(), decays=(0.9, 0.3), scales=(0.2, 0.4)),
}
KINDS = [(name, False) for name in FILTERS]
KINDS += [("draws", True), ("draws, scaled", True)]


def inverse(filter, count):
    """Return C^-1, by the definition of each kind of filter."""
    column = np.zeros(count)
    if filter.feedback:
        column[: len(filter.feedback)] = filter.feedback[:count]
    elif filter.decays:
        powers = np.arange(count - 1)
        sums = zip(filter.scales, filter.decays, strict=True)
        column[0] = 1
        column[1:] = sum(scale * decay**powers for scale, decay in sums)
    else:
        column[: len(filter.draws)] = filter.draws[:count]
    rows, columns = np.indices((count, count))
    matrix = np.where(rows >= columns, column[rows - columns], 0)
    return matrix if filter.draws else np.linalg.inv(matrix)


def noise_at(step, name="draws", cached=False, **changed):
    options = {"noise_multiplier": MULTIPLIER, "key": KEY, "history": ()}
    options |= {"filter": FILTERS[name], "cached": cached, "step": step} | changed
    size = Sensitivity(options.pop("sensitivity", SENSITIVITY))
    return gaussian.gaussian_noise("f", size, **options)


def run(sums, steps, *kind, start=(), **changed):
    """Return the noisy sums of some steps of a run, and its last history."""
    held, found, history = gaussian.Streams(), [], start
    for step in steps:
        own = {"streams": held, "history": history} | changed
        noisy, history = noise_at(step, *kind, **own).advanced(sums)
        found.append(noisy)
    return found, history


SHAPES = {"a": (700, 3), "b": (7,), "c": (), "d": (3, 0)}


def sums_of(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }


def draws(name, shape, steps):
    """Return the unit normal numbers of steps, `[steps, *shape]`."""
    own = {"multiplier": MULTIPLIER, "sensitivity": SENSITIVITY, "tags": ["unit"]}
    found = (streams.noise(KEY.tolist(), s, name, shape, **own) for s in steps)
    return torch.stack([*found]).numpy() / SIGMA


def graph(noise, sums):
    drawn = noise.drawn(sums)
    noisy, made = drawn.added(sums)
    return noisy, noise.after(drawn, sums, made)


def by_tensors(noise, sums):
    """Draw as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "is_host", lambda device: False)
        return noise.advanced(sums)


WAYS = {"host": gaussian.Noise.advanced, "graph": graph, "device": by_tensors}


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_noise_is_the_inverse_of_c_times_all_draws(kind, way, first, monkeypatch):
    """Before it is rounded: the grid is much finer here."""
    monkeypatch.setattr(gaussian, "_GRID", 2.0**-45)
    sums, held, history, found = sums_of(), gaussian.Streams(), (), []
    steps = range(first, first + 50)
    for step in steps:
        own = {"streams": held, "history": history, "first": first}
        noisy, history = WAYS[way](noise_at(step, *kind, **own), sums)
        found.append(noisy)
    matrix = inverse(FILTERS[kind[0]], len(steps))
    for name, total in sums.items():
        expected = np.tensordot(matrix, draws(name, total.shape, steps), 1) * SIGMA
        added = torch.stack([each[name] - total for each in found])
        assert np.allclose(added, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_grid_is_that_of_independent_noise(kind):
    for noisy in run(sums_of(), range(6), *kind)[0]:
        for value in noisy.values():
            steps = value / 2.0**-17
            assert torch.equal(steps.round(), steps)

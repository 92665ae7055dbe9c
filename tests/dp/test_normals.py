"""Normal numbers in pairs: what the formula of Box and Muller promises."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tests import streams
from vgrad.dp import noise as normals


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def pairs(count):
    """Draw the first and the second numbers of pairs, from so many blocks."""
    blocks = [normals.draw(1, step, 2**16, 1.0).reshape(2, -1) for step in range(count)]
    return torch.from_numpy(np.concatenate(blocks, 1))


def test_moments_up_to_the_fourth_are_those_of_a_normal_number():
    noise = pairs(16)
    # The mean and the variance of the first powers of a normal number.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        for each in noise:
            bound = 4 * math.sqrt(variance / noise.shape[1])
            assert abs(float((each**power).mean()) - mean) < bound


def test_the_two_numbers_of_a_pair_are_independent():
    first, second = noise = pairs(16)
    size = noise.shape[1]
    for a in (first, first**2, first.abs() > 2):
        for b in (second, second**2, second.abs() > 2):
            assert abs(correlation(a.double(), b.double())) < 5 / math.sqrt(size)
    # Radius and angle are uniform, each in its way, and independent too.
    radius, angle = noise.norm(dim=0), torch.atan2(second, first)
    assert stats.kstest((-(radius**2) / 2).exp().numpy(), "uniform").pvalue > 0.001
    turns = (angle / (2 * math.pi) + 0.5).numpy()
    assert stats.kstest(turns, "uniform").pvalue > 0.001
    assert abs(correlation(radius, angle)) < 5 / math.sqrt(size)


class Given:
    """A generator whose numbers are given."""

    def __init__(self, *numbers):
        self._numbers = list(numbers)

    def random(self, size=None, out=None):
        found = np.array([self._numbers.pop(0) for _ in range(size or len(out))])
        if out is not None:
            out[:] = found
        return found


def test_small_numbers_under_the_logarithm_are_drawn_until_their_bits_count(
    monkeypatch,
):
    # Radii, then angles, then what is drawn again: two numbers, one of them twice.
    source = Given(0.5, 0.0, 2.0**-11, *[0.0] * 3, 2.0**-30, 0.75, 0.25)
    monkeypatch.setattr(normals.generators, "block", lambda stream, number: source)
    found = normals.draw(0, 0, 6, 2.0)
    expected = [0.5, 2.0**-20 * 0.25, 2.0**-10 * 0.75]
    assert np.allclose(found[:3], 2 * np.sqrt(-2 * np.log(expected)), rtol=1e-15)
    assert not found[3:].any()
    assert not source._numbers


@pytest.mark.parametrize("turn", [0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53])
@pytest.mark.parametrize("under", [2.0**-10, 1 - 2.0**-53])
def test_the_ends_of_what_is_uniform_give_numbers_on_the_circle(
    monkeypatch, turn, under
):
    """A right angle has no tangent."""
    source = Given(under, turn)
    monkeypatch.setattr(normals.generators, "block", lambda stream, number: source)
    radius, angle = math.sqrt(-2 * math.log(under)), 2 * math.pi * turn
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    assert np.allclose(normals.draw(0, 0, 2, 1.0), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_numbers_are_those_of_the_formula(count):
    (source,) = zip(streams.philox([0] * 32, "a"), range(1), strict=False)
    expected = streams.normal(source[0], count)
    stream = int.from_bytes(bytes(streams.digest([0] * 32, ["a"], 16)), "little")
    found = normals.draw(stream, 0, count, 1.0)
    assert found.shape == (count,)
    assert np.allclose(found, expected, rtol=0, atol=1e-14)

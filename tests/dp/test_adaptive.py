"""Bounds that follow a quantile of norms, against TF Privacy's numbers."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from vgrad.dp import adaptive, quantile_clip

EXPECTED = 2.0
"""Records of a step in TF's tests."""


def fraction(clip, bound, norms, expected=EXPECTED):
    """Return the part of norms below a bound, from a sum without noise."""
    counted = sum(0.5 if norm <= bound else -0.5 for norm in norms)
    return clip.fraction(torch.tensor(counted, dtype=torch.float64), expected)


# tensorflow/privacy 03035d5, quantile_adaptive_clip_sum_query_test.py.
ARITHMETIC = {
    "test_adaptation_target_zero": (10, 0, (8.5, 7.25), (9, 8, 7.5, 7, 7)),
    "test_adaptation_target_one": (0, 1, (1.5, 2.75), (1, 2, 2.5, 3, 3)),
}
GEOMETRIC = {
    "test_adaptation_target_zero_geometric": (
        *(16, 0, (5, 2.5)),
        (8, 4, 4 / math.sqrt(2), 2, 2),
    ),
    "test_adaptation_target_one_geometric": (
        *(0.5, 1, (1.5, 3)),
        (1, 2, 2 * math.sqrt(2), 4, 4),
    ),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_fractions_are_tfs(name):
    bound, quantile, norms, expected = ARITHMETIC[name]
    for right in expected:
        bound -= float(fraction(quantile_clip(), bound, norms)) - quantile
        assert bound == right


@pytest.mark.parametrize("name", GEOMETRIC)
def test_geometric_bounds_are_tfs(name):
    start, quantile, norms, expected = GEOMETRIC[name]
    clip = quantile_clip(quantile=quantile, rate=math.log(2), start=start)
    bound = torch.tensor(clip.start, dtype=torch.float64)
    for right in expected:
        bound = clip.after(bound, fraction(clip, bound, norms))
        assert bound.item() == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("start", [1.0, 10.0])
def test_the_bound_finds_the_median_as_tfs_does(start):
    """`test_adaptation_linspace`: within 0.25 of 5 after 40 steps."""
    norms = [number / 2 for number in range(21)]
    clip = quantile_clip(rate=1.0, start=start)
    bound = torch.tensor(start, dtype=torch.float64)
    for step in range(50):
        bound = clip.after(bound, fraction(clip, bound, norms, 21))
        if step > 40:
            assert abs(bound - 5) <= 0.25


def test_fractions_and_bounds_stay_between_their_ends():
    clip = quantile_clip(rate=1.0, start=2.0, least=1.5, most=3.0)
    counts = torch.tensor([-50.0, 0.0, 50.0], dtype=torch.float64)
    fractions = clip.fraction(counts, 10.0)
    assert fractions.tolist() == [0, 0.5, 1]
    start = torch.tensor(2.0, dtype=torch.float64)
    assert clip.after(start, fractions).tolist() == [3.0, 2.0, 1.5]


@pytest.mark.parametrize("multiplier", [0.0, 0.5, 1.0, 7.9])
def test_both_releases_together_have_the_multiplier_of_the_plan(multiplier):
    """Andrew et al., 1905.03871: z^-2 = z_g^-2 + (2 s_b)^-2."""
    clip = quantile_clip(count_deviation=4.0)
    own = clip.gradient_multiplier(multiplier, 100)
    if multiplier == 0:
        assert own == 0
        return
    # Gradients move by C and the count by 1/2, in deviations of each.
    assert math.hypot(1 / own, 0.5 / 4.0) == pytest.approx(1 / multiplier, rel=1e-12)


def test_the_count_has_a_twentieth_of_the_batch_by_default():
    assert quantile_clip().deviation(500.0) == 25
    assert quantile_clip(count_deviation=3).deviation(500.0) == 3
    with pytest.raises(ValueError, match=r"noise_multiplier < 2 .*Raise count_dev"):
        quantile_clip().gradient_multiplier(1.0, 10.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": -0.1}, "quantile >= 0"),
        ({"quantile": 1.1}, "at most 1"),
        ({"rate": 0}, "rate > 0"),
        ({"start": math.inf}, "start=inf"),
        ({"start": 5, "most": 4}, "start between"),
        ({"start": 5, "least": 6}, "start between"),
        ({"count_deviation": 0.0}, "count_deviation > 0"),
        ({"least": 1e-31}, "least"),
        ({"most": 1e31}, "most"),
    ],
)
def test_numbers_outside_of_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantile_clip(**options)


def test_a_clip_is_numbers_alone():
    clip = quantile_clip(quantile=0, start=2, count_deviation=7)
    again = adaptive.QuantileClip(**json.loads(json.dumps(asdict(clip))))
    assert again == clip == quantile_clip(quantile=0.0, start=2.0, count_deviation=7.0)

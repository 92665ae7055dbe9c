"""Bounds that follow a quantile of norms, against TF Privacy's numbers."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import every_strategy
from vgrad import clipped_grad
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


# A bound that is a tensor.


def clip_case(dtype=torch.float32):
    """Return a loss and tensors, of which some samples are large, tiny or infinite."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x = torch.randn(9, 6, dtype=dtype)
    x[1] *= 1e-12
    x[2] *= 1e17
    x[3] = torch.inf
    return vgrad.sample_loss(fmodel, F.mse_loss), params, buffers, x, 2 * x[:, :3]


def tensor(number):
    return torch.tensor(number, dtype=torch.float64)


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1e-8, 0.1, 3.7, 1e8])
def test_a_tensor_bounds_as_the_number_does(bound, dtype, strategy):
    loss, *call = clip_case(dtype)
    for options in ({}, {"passes": 2}, {"chunk_size": 2}):
        options |= {"strategy": strategy, "normalize_by": 7.0}
        expected = clipped_grad(loss, max_norm=bound, **options)
        # The number does not count.
        found = clipped_grad(loss, max_norm=2.0, **options).with_max_norm(tensor(bound))
        # A number is divided by norms as the product with their reciprocals.
        rounding = 4 * torch.finfo(dtype).eps
        oracle.assert_exact(found(*call), expected(*call), tolerance=rounding)
        assert found.sensitivity.value == expected.sensitivity.value


def test_one_sample_never_adds_more_than_the_tensor():
    loss, params, buffers, x, y = clip_case()
    for bound in (1e-6, 0.3, 11.0):
        clipped = clipped_grad(loss, max_norm=1.0).with_max_norm(tensor(bound))
        for row in range(len(x)):
            sums = clipped(params, buffers, x[row : row + 1], y[row : row + 1]).grads
            total = torch.cat([each.double().flatten() for each in sums.values()])
            assert total.norm() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("batch_sizes", [None, [12]])
def test_one_graph_takes_every_bound(batch_sizes):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    call = params, buffers, torch.randn(9, 6), torch.randn(9, 3)
    compiled = vgrad.compile(
        clipped_grad(loss, max_norm=1.0), backend="replay", batch_sizes=batch_sizes
    )
    for bound in (0.1, 0.2, 5.0):
        expected = clipped_grad(loss, max_norm=bound)(*call)
        found = compiled.with_max_norm(tensor(bound))(*call)
        oracle.assert_exact(found.grads, expected.grads, tolerance=1e-6)
        assert found.clipped == expected.clipped
    [report] = compiled.reports()
    assert (report.backend, report.calls, report.redos) == ("replay", 2, 0)


def test_other_bounds_and_clippings_are_refused():
    loss, *_ = clip_case()
    flat = clipped_grad(loss, max_norm=1.0)
    for wrong in (1.0, torch.tensor(1.0), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"without dimensions in float64.*A number"
        ):
            flat.with_max_norm(wrong)
    for kind in ("per_layer", "automatic"):
        other = clipped_grad(loss, max_norm=1.0, clipping=kind)
        with pytest.raises(ValueError, match=r'expected clipping="flat"'):
            other.with_max_norm(tensor(1.0))

"""Calibration: bins counted by hand, scores by their formulas, torchmetrics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from tests.examples import examples
from vgrad.ensemble import calibration, reliability


def predictions(samples, classes, seed=0, dtype=torch.float64):
    """Probabilities, and targets that are right about half of the time."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    probabilities = (3 * torch.randn(samples, classes, **options)).softmax(1)
    targets = torch.randint(classes, (samples,), generator=generator)
    right = torch.rand(samples, **options) < 0.5
    return probabilities.to(dtype), torch.where(right, probabilities.argmax(1), targets)


@examples(50)
@given(
    samples=st.integers(0, 40),
    classes=st.integers(2, 6),
    bins=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_reliability_equals_counting_by_hand(samples, classes, bins, seed):
    probabilities, targets = predictions(samples, classes, seed)
    found = reliability(probabilities, targets, bins=bins)
    assert all(value.shape == (bins,) for value in found)
    counted = [[] for _ in range(bins)]
    for row, target in zip(probabilities.tolist(), targets.tolist(), strict=True):
        confidence = max(row)
        index = min(int(confidence * bins), bins - 1)
        counted[index].append((confidence, row.index(confidence) == target))
    for index, pairs in enumerate(counted):
        size = len(pairs)
        assert found.count[index] == size
        confidence, right = map(sum, zip(*pairs, strict=True)) if pairs else (0, 0)
        expected = torch.tensor([confidence, right], dtype=torch.float64) / size
        actual = torch.stack([found.confidence[index], found.accuracy[index]])
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "bins", "count"),
    [  # an edge belongs to the bin above, one and rounding above it to the last
        ([[0.5, 0.5], [0.0, 1.0], [0.25, 0.75], [0.3, 0.7]], 4, [0, 0, 2, 2]),
        ([[1 + 1e-6, 0.0], [0.97, 0.03]], 3, [0, 0, 2]),
    ],
)
def test_edges_belong_to_the_bin_above(rows, bins, count):
    probabilities, targets = torch.tensor(rows), torch.ones(len(rows)).long()
    assert reliability(probabilities, targets, bins=bins).count.tolist() == count


@pytest.mark.parametrize("bins", [1, 2, 5, 15, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_calibration_error_is_that_of_the_bins_and_of_torchmetrics(bins, dtype):
    for seed in range(5):
        probabilities, targets = predictions(200, 3, seed, dtype)
        shown = reliability(probabilities, targets, bins=bins)
        found = calibration(probabilities, targets, bins=bins)
        wide = torch.promote_types(dtype, torch.float32)
        assert {value.dtype for value in (*found, *shown[:2])} == {wide}
        assert {value.shape for value in found} == {()}
        assert shown.count.dtype == torch.int64
        error = found.expected_calibration_error
        gaps = (shown.accuracy - shown.confidence).abs() * shown.count / 200
        torch.testing.assert_close(error, gaps.nansum(), rtol=0, atol=1e-6)
        if dtype == torch.float64:
            peer = multiclass_calibration_error(probabilities, targets, 3, bins)
            torch.testing.assert_close(error.float(), peer, rtol=0, atol=1e-6)


def test_the_calibration_error_keeps_its_digits_over_millions_of_samples():
    probabilities = torch.tensor([[0.97, 0.03]]).expand(4_000_000, 2)
    targets = torch.zeros(4_000_000, dtype=torch.int64)
    found = calibration(probabilities, targets).expected_calibration_error
    assert found.item() == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_brier_score_and_likelihood_equal_their_formulas(kind):
    probabilities, targets = predictions(25, 4)
    probabilities.requires_grad_()
    found = calibration(probabilities, targets.to(kind), bins=7)
    rows = list(zip(probabilities.tolist(), targets.tolist(), strict=True))
    brier = [
        sum((p - (c == target)) ** 2 for c, p in enumerate(row)) for row, target in rows
    ]
    likelihood = [-math.log(row[target]) for row, target in rows]
    assert found.brier_score.item() == pytest.approx(sum(brier) / 25)
    assert found.negative_log_likelihood.item() == pytest.approx(sum(likelihood) / 25)
    shown = reliability(probabilities, targets)
    assert not any(value.requires_grad for value in (*found, *shown))


def test_the_worst_the_best_and_no_scores():
    certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    worst = calibration(certain, torch.tensor([1, 1]))
    assert (worst.brier_score, worst.negative_log_likelihood) == (2, math.inf)
    best = calibration(certain, torch.tensor([0, 0]))
    assert (best.brier_score, best.negative_log_likelihood) == (0, 0)
    assert all(value.isnan() for value in calibration(*predictions(0, 3)))


HALVES, RIGHT = [[0.5, 0.5]] * 3, [0, 0, 0]
REFUSED = [  # probabilities, targets, bins
    (HALVES, RIGHT, 0, r"\(bins=0\): .*whole number >= 1"),
    (HALVES, RIGHT, 1.5, r"\(bins=1.5\): .*whole number >= 1"),
    (HALVES, RIGHT, True, r"\(bins=True\): .*whole number >= 1"),
    ([[2.0, -1.0]], [0], 1, r"\(probabilities\): .*not negative.*softmax"),
    ([[0.7, 0.7]], [0], 1, "sum to one, got others.*softmax"),
    ([[math.nan, 0.5]], [0], 1, "sum to one"),
    ([[1.0]], [0], 1, "two classes or more, got shape .1, 1."),
    ([1.0], [0], 1, "two classes or more, got shape .1,."),
    ([[1, 0]], [0], 1, "floating point.*int64"),
    (HALVES, [0, 2, 1], 1, r"\(targets\): .*from 0 to 1, got 0 to 2"),
    (HALVES, [0, -1, 1], 1, "from 0 to 1, got -1 to 1"),
    (HALVES, [0, 1], 1, "each of the 3 samples.*shape .2,."),
    (HALVES, [[1, 0]] * 3, 1, "got shape .3, 2."),
    (HALVES, [0.0, 1.0, 1.0], 1, "class.*float32"),
    (HALVES, [True, False, True], 1, "class.*bool"),
]


@pytest.mark.parametrize("function", [calibration, reliability])
@pytest.mark.parametrize(("probabilities", "targets", "bins", "message"), REFUSED)
def test_bad_arguments_are_refused(function, probabilities, targets, bins, message):
    arguments = torch.tensor(probabilities), torch.tensor(targets)
    with pytest.raises((ValueError, TypeError), match=message):
        function(*arguments, bins=bins)

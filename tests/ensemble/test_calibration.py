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


def by_hand(probabilities, targets, bins):
    """The bins, sample by sample: `(confidence, right)` of those in each."""
    found = [[] for _ in range(bins)]
    for row, target in zip(probabilities.tolist(), targets.tolist(), strict=True):
        confidence = max(row)
        index = min(int(confidence * bins), bins - 1)
        found[index].append((confidence, row.index(confidence) == target))
    return found


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
    for index, members in enumerate(by_hand(probabilities, targets, bins)):
        size = len(members)
        assert found.count[index] == size
        confidence, right = map(sum, zip(*members, strict=True)) if members else (0, 0)
        expected = torch.tensor([confidence, right], dtype=torch.float64) / size
        actual = torch.stack([found.confidence[index], found.accuracy[index]])
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_an_edge_belongs_to_the_bin_above_and_one_to_the_last():
    probabilities = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.25, 0.75], [0.3, 0.7]])
    found = reliability(probabilities, torch.tensor([0, 1, 1, 1]), bins=4)
    assert found.count.tolist() == [0, 0, 2, 2]


def test_rounding_above_one_stays_in_the_last_bin():
    probabilities = torch.tensor([[1 + 1e-6, 0.0]])
    found = reliability(probabilities, torch.tensor([0]), bins=3)
    assert found.count.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_results_are_float32_or_wider(dtype, expected):
    probabilities, targets = predictions(30, 3, dtype=dtype)
    found = reliability(probabilities, targets)
    assert found.confidence.dtype == found.accuracy.dtype == expected
    assert found.count.dtype == torch.int64
    found = calibration(probabilities, targets)
    assert {value.dtype for value in found} == {expected}
    assert {value.shape for value in found} == {()}


def test_no_graph_is_kept():
    probabilities, targets = predictions(5, 3)
    probabilities.requires_grad_()
    found = [*calibration(probabilities, targets), *reliability(probabilities, targets)]
    assert not any(value.requires_grad for value in found)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_brier_score_and_likelihood_equal_their_formulas(kind):
    probabilities, targets = predictions(25, 4)
    found = calibration(probabilities, targets.to(kind), bins=7)
    rows = list(zip(probabilities.tolist(), targets.tolist(), strict=True))
    brier = [
        sum((p - (c == target)) ** 2 for c, p in enumerate(row)) for row, target in rows
    ]
    likelihood = [-math.log(row[target]) for row, target in rows]
    assert found.brier_score.item() == pytest.approx(sum(brier) / 25)
    assert found.negative_log_likelihood.item() == pytest.approx(sum(likelihood) / 25)


def test_the_worst_and_the_best_scores():
    certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    worst = calibration(certain, torch.tensor([1, 1]))
    assert worst.brier_score == 2
    assert worst.negative_log_likelihood == math.inf
    best = calibration(certain, torch.tensor([0, 0]))
    assert best.brier_score == best.negative_log_likelihood == 0


def summed(found):
    """The calibration error by the formula over the bins."""
    gaps = (found.accuracy - found.confidence).abs() * found.count / found.count.sum()
    return gaps.nansum()


@pytest.mark.parametrize("bins", [1, 2, 15])
def test_the_calibration_error_is_that_of_torchmetrics(bins):
    probabilities, targets = predictions(200, 3)
    found = calibration(probabilities, targets, bins=bins).expected_calibration_error
    expected = multiclass_calibration_error(probabilities, targets, 3, bins)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-6)


def test_the_calibration_error_keeps_its_digits_over_millions_of_samples():
    probabilities = torch.tensor([[0.97, 0.03]]).expand(4_000_000, 2)
    targets = torch.zeros(4_000_000, dtype=torch.int64)
    found = calibration(probabilities, targets).expected_calibration_error
    assert found.item() == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize("bins", [1, 2, 5, 15, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_calibration_error_is_that_of_the_bins_shown(bins, dtype):
    for seed in range(5):
        batch = predictions(200, 3, seed, dtype)
        found = calibration(*batch, bins=bins).expected_calibration_error
        expected = summed(reliability(*batch, bins=bins))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_certain_predictions_share_the_last_bin():
    probabilities = torch.tensor([[1 + 1e-6, 0.0], [0.97, 0.03]])
    targets = torch.tensor([1, 0])
    found = calibration(probabilities, targets).expected_calibration_error
    assert found.item() == pytest.approx(abs(1.97 / 2 - 1 / 2), abs=1e-6)


def test_no_samples_have_no_scores():
    found = calibration(*predictions(0, 3))
    assert all(value.isnan() for value in found)


CALLS = pytest.mark.parametrize("function", [calibration, reliability])


@CALLS
@pytest.mark.parametrize("bins", [0, -3, 1.5, True])
def test_bins_are_a_whole_number(function, bins):
    with pytest.raises(ValueError, match="bins=.*whole number >= 1"):
        function(*predictions(4, 3), bins=bins)


@CALLS
@pytest.mark.parametrize(
    ("probabilities", "error", "message"),
    [
        (torch.tensor([[2.0, -1.0]]), ValueError, "not negative.*softmax"),
        (torch.tensor([[0.7, 0.7]]), ValueError, "sum to one.*softmax"),
        (torch.tensor([[math.nan, 0.5]]), ValueError, "sum to one"),
        (torch.ones(1, 1), ValueError, "two classes or more, got shape .1, 1."),
        (torch.ones(1), ValueError, "two classes or more, got shape .1,."),
        (torch.tensor([[1, 0]]), TypeError, "floating point.*int64"),
    ],
)
def test_probabilities_are_probabilities(function, probabilities, error, message):
    where = rf"{function.__name__}\(probabilities\)"
    with pytest.raises(error, match=f"{where}.*{message}"):
        function(probabilities, torch.tensor([0]))


@CALLS
@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (torch.tensor([0, 2, 1]), ValueError, "from 0 to 1, got 0 to 2"),
        (torch.tensor([0, -1, 1]), ValueError, "from 0 to 1, got -1 to 1"),
        (torch.tensor([0, 1]), ValueError, "each of the 3 samples.*shape .2,."),
        (torch.eye(3, 2, dtype=torch.long), ValueError, "got shape .3, 2."),
        (torch.tensor([0.0, 1.0, 1.0]), TypeError, "class.*float32"),
        (torch.tensor([True, False, True]), TypeError, "class.*bool"),
    ],
)
def test_targets_are_classes(function, targets, error, message):
    where = rf"{function.__name__}\(targets\)"
    with pytest.raises(error, match=f"{where}.*{message}"):
        function(torch.full((3, 2), 0.5), targets)

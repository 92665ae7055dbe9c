"""Whether predicted probabilities come true: calibration of a classifier.

N samples, C classes. Probabilities are a model's, or the mean of an ensemble's.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vgrad import checks
from vgrad.tree import wide

_BELOW_ONE = 1 - 2**-24
"""The largest number of float32 below one."""

_TOLERANCE = 0.01
"""How far from one the probabilities of a sample may sum: bfloat16 has few digits."""


class Calibration(NamedTuple):
    """The result of `calibration`; each is a scalar, and lower is better.

    Attributes:
        expected_calibration_error: `sum_k n_k / N |accuracy_k - confidence_k|` over the
            bins of `reliability`, between 0 and 1.
        brier_score: `sum_n |p_n - onehot(y_n)|^2 / N`, between 0 and 2.
        negative_log_likelihood: `-sum_n log p_n[y_n] / N` in nats; infinite where a
            true class was given probability zero.
    """

    expected_calibration_error: Tensor
    brier_score: Tensor
    negative_log_likelihood: Tensor


class Reliability(NamedTuple):
    """The result of `reliability` for each of the bins, `[bins]`.

    Attributes:
        confidence: mean probability of the most probable class; NaN in an empty bin.
        accuracy: share of samples whose most probable class is the true one; NaN in an
            empty bin.
        count: how many samples are in the bin.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def calibration(
    probabilities: Tensor, targets: Tensor, *, bins: int = 15
) -> Calibration:
    """Calibration error, Brier score and likelihood: `[N, C], [N] -> three scalars`.

    Sums are float64. Results are float32, or float64 where the probabilities are; for
    no samples they are NaN.

    Reference: Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599;
    Brier, Verification of Forecasts Expressed in Terms of Probability, 1950.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> found = calibration(probabilities, torch.tensor([0, 1]))
        >>> found.expected_calibration_error, found.brier_score
        (tensor(0.3500), tensor(0.3700))
    """
    bins = _check("calibration", probabilities, targets, bins)
    p, targets = probabilities.detach().double(), targets.long()
    shown = _in_bins(p, targets, bins)
    gaps = (shown.accuracy - shown.confidence).abs() * shown.count / len(p)
    calibration_error = gaps.nansum() if len(p) else gaps.sum()
    brier_score = (p - one_hot(targets, p.shape[1])).square().sum(1).mean()
    likelihood = p.gather(1, targets[:, None]).log().mean()
    found = Calibration(calibration_error, brier_score, -likelihood)
    return Calibration(*(value.to(wide(probabilities.dtype)) for value in found))


def reliability(
    probabilities: Tensor, targets: Tensor, *, bins: int = 15
) -> Reliability:
    """Confidence and accuracy in each bin, `[N, C], [N] -> [bins]`, for a diagram.

    The confidence of a sample is the probability of its most probable class. Bin k of K
    holds confidences in `[k / K, (k + 1) / K)`, the last one also those equal to one,
    compared in float32 as in torchmetrics. Dtypes and reference as for `calibration`.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]])
        >>> found = reliability(probabilities, torch.tensor([0, 1, 1]), bins=4)
        >>> found.confidence
        tensor([   nan,    nan, 0.6500, 0.9000])
        >>> found.accuracy
        tensor([   nan,    nan, 0.5000, 1.0000])
        >>> found.count
        tensor([0, 0, 2, 1])
    """
    bins = _check("reliability", probabilities, targets, bins)
    return _in_bins(probabilities, targets, bins)


def _in_bins(probabilities: Tensor, targets: Tensor, bins: int) -> Reliability:
    confidence, predicted = probabilities.detach().double().max(1)
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    below_one = confidence.clamp(max=_BELOW_ONE).float()
    index = torch.bucketize(below_one, edges, right=True) - 1
    count = torch.bincount(index, minlength=bins)

    def mean(values: Tensor) -> Tensor:
        total = torch.bincount(index, values.double(), minlength=bins)
        return (total / count).to(wide(probabilities.dtype))

    return Reliability(mean(confidence), mean(predicted == targets), count)


def _check(function: str, probabilities: Tensor, targets: Tensor, bins: int) -> int:
    """Accept probabilities `[N, C]` and classes among the C, `[N]`; return `bins`."""
    [bins] = checks.whole(function, least=1, bins=bins)
    if not probabilities.is_floating_point():
        raise TypeError(
            f"{function}(probabilities): expected floating point numbers, got "
            f"{probabilities.dtype}."
        )
    dtype = targets.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(
            f"{function}(targets): expected the number of a class for each sample, got "
            f"{dtype}."
        )
    if probabilities.ndim != 2 or probabilities.shape[1] < 2:
        raise ValueError(
            f"{function}(probabilities): expected [samples, classes] of two classes or "
            f"more, got shape {tuple(probabilities.shape)}. Two classes have "
            f"probabilities 1 - p and p."
        )
    samples, classes = probabilities.shape
    if targets.shape != (samples,):
        raise ValueError(
            f"{function}(targets): expected a class for each of the {samples} samples, "
            f"got shape {tuple(targets.shape)}."
        )
    sums = probabilities.detach().double().sum(1)
    if not ((probabilities >= 0).all() and ((sums - 1).abs() <= _TOLERANCE).all()):
        raise ValueError(
            f"{function}(probabilities): expected rows that are not negative and sum "
            f"to one, got others. Logits go through softmax(1) first."
        )
    if not ((targets >= 0) & (targets < classes)).all():
        raise ValueError(
            f"{function}(targets): expected classes from 0 to {classes - 1}, got "
            f"{int(targets.min())} to {int(targets.max())}."
        )
    return bins

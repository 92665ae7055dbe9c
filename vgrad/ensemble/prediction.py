"""What an ensemble predicts, and how far its members disagree.

E members, N samples, C classes, Q quantiles.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.checks import Patterns
from vgrad.ensemble.axes import Here, means
from vgrad.ensemble.forward import EnsembleForward, ensemble_forward
from vgrad.functional.model import FunctionalModel
from vgrad.persample.engine.guard import LossGuard
from vgrad.tree import wide
from vgrad.typing import Buffers, EnsembleStrategy, Params, Tree


class EnsemblePrediction(NamedTuple):
    """What an ensemble of classifiers says, with `p_e` the probabilities of member e.

    Entropies are in nats, `H(p) = -sum_c p_c log p_c` with `0 log 0 = 0`.

    Attributes:
        mean: `m = sum_e p_e / E`, the ensemble's probabilities; `[N, C]`.
        variance: `sum_e (p_e - m)^2 / E`; `[N, C]`.
        predictive_entropy: `H(m)`, the whole uncertainty; `[N]`.
        expected_entropy: `sum_e H(p_e) / E`, the part on which the members agree, as
            noise in the data has it; `[N]`.
        mutual_information: the difference of the two, never negative: the part on
            which the members do not agree, and which more data could settle; `[N]`.
        disagreement: share of the members whose most probable class is not that of
            the ensemble; `[N]`.
    """

    mean: Tensor
    variance: Tensor
    predictive_entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    disagreement: Tensor


class ValuePrediction(NamedTuple):
    """What an ensemble of regressors says, with `f_e` the output of member e.

    Attributes:
        mean: `m = sum_e f_e / E`; `[N, ...]`.
        variance: `sum_e (f_e - m)^2 / E`; `[N, ...]`.
        quantiles: those asked for, in that order, linear between two members;
            `[Q, N, ...]`.
    """

    mean: Tensor
    variance: Tensor
    quantiles: Tensor


def predict(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    chunk_size: int | None = None,
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
) -> EnsemblePrediction:
    """Probabilities and uncertainty of an ensemble: `inputs [N, ...] -> [N, C]`, `[N]`.

    The model takes inputs by position and returns logits `[N, C]` alone; wrap it in a
    module of your own if it does not. `params` and `buffers` have a member axis in
    front, except for entries that match the patterns in `shared`; all members see the
    same inputs. The ensemble counts as a mixture of its members in equal parts, so
    variances are over E and those of one member are zero. A sample for which a member's
    logits hold NaN or are infinite above gets NaN.

    The model runs in evaluation mode, whatever mode `fmodel` is in: no dropout, batch
    norm by its running statistics. For Monte-Carlo dropout stack the logits of several
    passes in training mode to `[E, N, C]` and pass them to `class_prediction`. A model
    that also draws random numbers in evaluation mode draws them for each member.

    No graph is kept. Arithmetic after the model is float64; results are float32, or
    float64 where the logits are.

    Cost: one forward pass of each member. `chunk_size` samples are run at a time, so
    the outputs of all members take `[E, chunk_size, C]`. With `strategy="auto"`, as in
    `ensemble_forward`, one member runs once more on a CPU, to count its work.

    Reference: Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty
    Estimation using Deep Ensembles, arXiv 1612.01474; Houlsby et al., Bayesian Active
    Learning for Classification and Preference Learning, arXiv 1112.5745.

    Args:
        chunk_size: samples at a time; None for all.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: the outputs are not `[N, C]` with two classes or more, or sizes do
            not fit.
        TypeError: the model returns something else than a tensor of floating point
            numbers.
        UnsupportedOp: as `ensemble_forward`.

    Example:
        >>> from vgrad import make_functional_with_buffers
        >>> fmodel, _, _ = make_functional_with_buffers(torch.nn.Linear(1, 2))
        >>> weight = torch.tensor([[[9.0], [0.0]], [[0.0], [9.0]]])  # two members
        >>> params = {"weight": weight, "bias": torch.zeros(2, 2)}
        >>> found = predict(fmodel, params, {}, torch.tensor([[0.0], [1.0]]))
        >>> found.mean
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        >>> found.expected_entropy, found.mutual_information
        (tensor([0.6931, 0.0012]), tensor([0.0000, 0.6919]))
    """
    forward = ensemble_forward(fmodel.eval(), strategy=strategy, shared=shared)
    chunks = outputs_of("predict", forward, params, buffers, inputs, chunk_size)
    parts = [class_prediction(logits) for logits in chunks]
    return EnsemblePrediction(*(torch.cat(each) for each in zip(*parts, strict=True)))


def predict_values(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    quantiles: Sequence[float] = (),
    chunk_size: int | None = None,
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
) -> ValuePrediction:
    """Mean, variance and quantiles of an ensemble: `inputs [N, ...] -> [N, ...]`.

    The model returns numbers `[N, ...]`; all else is as for `predict`. `quantiles` are
    numbers from 0 to 1; those of one member are its output. Where an output is not
    finite, the variance is NaN.

    Args:
        chunk_size: samples at a time; None for all.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: a quantile is outside 0 to 1, the outputs are not `[N, ...]`, or
            sizes do not fit.
        TypeError: as `predict`.
        UnsupportedOp: as `ensemble_forward`.

    Example:
        >>> from vgrad import make_functional_with_buffers
        >>> fmodel, _, _ = make_functional_with_buffers(torch.nn.Linear(1, 1))
        >>> weight = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1)  # three members
        >>> params = {"weight": weight, "bias": torch.zeros(3, 1)}
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> found = predict_values(fmodel, params, {}, x, quantiles=[0.5, 0.75])
        >>> found.mean.T, found.variance.T
        (tensor([[3., 6.]]), tensor([[ 4.6667, 18.6667]]))
        >>> found.quantiles.squeeze(2)
        tensor([[2., 4.],
                [4., 8.]])
    """
    function = "predict_values"
    _check_quantiles(function, quantiles)
    forward = ensemble_forward(fmodel.eval(), strategy=strategy, shared=shared)
    chunks = outputs_of(function, forward, params, buffers, inputs, chunk_size)
    parts = [value_prediction(outputs, quantiles=quantiles) for outputs in chunks]
    each, variances, found = zip(*parts, strict=True)
    return ValuePrediction(
        torch.cat(each), torch.cat(variances), torch.cat(found, dim=1)
    )


def class_prediction(logits: Tensor) -> EnsemblePrediction:
    """Summarise logits `[E, N, C]` that were computed in any way.

    Raises:
        TypeError: they are not a tensor of floating point numbers.
        ValueError: there are fewer than two classes, or no members.

    Example:
        >>> logits = torch.tensor([[[0.0, 9.0]], [[9.0, 0.0]], [[0.0, 9.0]]])
        >>> class_prediction(logits).disagreement
        tensor([0.3333])
    """
    return summarised(logits, Here())


def summarised(logits: Tensor, members: "Here") -> EnsemblePrediction:
    """Summarise logits of the members here, `[E, N, C]`, with those elsewhere."""
    _check("class_prediction", logits)
    if logits.ndim != 3 or logits.shape[2] < 2:
        raise ValueError(
            f"class_prediction(logits): expected logits [members, samples, classes] of "
            f"two classes or more, got shape {tuple(logits.shape)}. A model of one "
            f"logit needs a second one of zero beside it."
        )
    each = logits.detach().double().softmax(2)
    (mean, expected), (apart, _) = means(members, each, _entropy(each))
    predictive, differs = _entropy(mean), (each.argmax(2) != mean.argmax(1)).double()
    variance, differs = members.means(apart.square(), differs)
    found = EnsemblePrediction(
        mean=mean,
        variance=variance,
        predictive_entropy=predictive,
        expected_entropy=expected,
        mutual_information=(predictive - expected).clamp(min=0),
        # The largest of several NaN is some class, on which all would seem to agree.
        disagreement=differs.masked_fill(predictive.isnan(), torch.nan),
    )
    dtype = wide(logits.dtype)
    return EnsemblePrediction(*(value.to(dtype) for value in found))


def value_prediction(
    outputs: Tensor, *, quantiles: Sequence[float] = ()
) -> ValuePrediction:
    """Summarise outputs `[E, N, ...]` that were computed in any way.

    Raises:
        TypeError: they are not a tensor of floating point numbers.
        ValueError: a quantile is outside 0 to 1, or there are no members.

    Example:
        >>> outputs = torch.tensor([[1.0], [3.0]])
        >>> mean, variance, found = value_prediction(outputs, quantiles=[0.25])
        >>> mean, variance, found
        (tensor([2.]), tensor([1.]), tensor([[1.5000]]))
    """
    return summarised_values(outputs, quantiles, Here())


def summarised_values(
    outputs: Tensor, quantiles: Sequence[float], members: "Here"
) -> ValuePrediction:
    """Summarise outputs of the members here, `[E, N, ...]`, with those elsewhere."""
    _check("value_prediction", outputs)
    _check_quantiles("value_prediction", quantiles)
    each = outputs.detach().double()
    (mean,), (apart,) = means(members, each)
    (variance,) = members.means(apart.square())
    everyone = members.gathered(each) if quantiles else each
    found = ValuePrediction(mean, variance, _quantiles(everyone, quantiles))
    dtype = wide(outputs.dtype)
    return ValuePrediction(*(value.to(dtype) for value in found))


def outputs_of(
    function: str,
    forward: EnsembleForward,
    params: Params,
    buffers: Buffers,
    inputs: tuple[Tree, ...],
    chunk_size: int | None,
) -> Iterator[Tensor]:
    """Yield what all members say about each chunk of samples, `[E, chunk, ...]`."""
    if chunk_size is not None:
        [chunk_size] = checks.whole(function, least=1, chunk_size=chunk_size)
    batch = batches.read(function, inputs)
    # An empty batch is run too: it knows the shape of its outputs.
    for start, stop in list(batches.chunks(batch.size, chunk_size)) or [(0, 0)]:
        # Statistics of a chunk would not be those of the batch.
        guard = nullcontext() if chunk_size is None else LossGuard(given={})
        with torch.no_grad(), guard:
            rows = batch.sample(batch.part(start, stop).inputs)
            outputs = forward(params, buffers, *rows)
        _check(function, outputs)
        if outputs.ndim < 2 or outputs.shape[1] != stop - start:
            raise ValueError(
                f"{function}(fmodel): expected an output for each of the "
                f"{stop - start} samples, [members, samples, ...], got shape "
                f"{tuple(outputs.shape)}."
            )
        yield outputs


def _check(function: str, outputs: Tensor) -> None:
    """Accept floating point outputs of one member or more."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        is_tensor = isinstance(outputs, Tensor)
        kind = outputs.dtype if is_tensor else f"a {type(outputs).__name__}"
        raise TypeError(
            f"{function}: expected one tensor of floating point outputs, got {kind}. "
            f"Let the model return that tensor alone."
        )
    if outputs.ndim < 2 or len(outputs) == 0:
        raise ValueError(
            f"{function}: expected outputs [members, samples, ...] of one member or "
            f"more, got shape {tuple(outputs.shape)}."
        )


def _check_quantiles(function: str, quantiles: Sequence[float]) -> None:
    """Accept numbers from 0 to 1."""
    for quantile in quantiles:
        checks.finite(function, quantiles=quantile)
        if not 0 <= quantile <= 1:
            raise ValueError(
                f"{function}(quantiles={list(quantiles)}): expected numbers from 0 to "
                f"1, got {quantile}."
            )


def _entropy(probabilities: Tensor) -> Tensor:
    """Entropy of `[..., C]` in nats; `entr` has the limit at zero."""
    return torch.special.entr(probabilities).sum(-1)


def _quantiles(each: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Quantiles over members `[E, ...]`.

    `torch.quantile` refuses empty tensors, and in some versions those of 2^24 numbers.
    """
    ordered = each.sort(0).values
    missing = ordered[-1].isnan()  # NaN is sorted to the end
    found = each.new_empty((len(quantiles), *each.shape[1:]))
    for row, quantile in zip(found, quantiles, strict=True):
        place = quantile * (len(each) - 1)
        low, high = math.floor(place), math.ceil(place)
        below, above = ordered[low], ordered[high]
        between = torch.lerp(below, above, place - low)
        row.copy_(torch.where(below == above, below, between))  # infinite ones too
        row.masked_fill_(missing, torch.nan)
    return found

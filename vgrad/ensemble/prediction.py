"""The outputs of all members, their predictions, and how far they disagree.

E members, N samples, C classes, Q quantiles.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypedDict,
    Unpack,
    overload,
)

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.checks import Patterns
from vgrad.contents import portable
from vgrad.ensemble import execution
from vgrad.ensemble.execution import EnsembleExplanation, EnsembleFn
from vgrad.ensemble.layout import EnsembleOptions, MemberCall, shows_member_options
from vgrad.functional.model import FunctionalModel
from vgrad.generators import fold_in
from vgrad.loss.mode import SINGLE, LossMode
from vgrad.loss.randomness import Draws
from vgrad.persample.engine.call import check_options
from vgrad.ranks import RankError, Ranks, Values
from vgrad.tree import map_tensors, tensors, tree_map, wide
from vgrad.typing import Buffers, EnsembleStrategy, Params, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class EnsembleForward(EnsembleFn):
    """The function that `ensemble_forward` returns, with its `fmodel`."""

    name: ClassVar = "ensemble_forward"
    fmodel: FunctionalModel
    chunk_size: int | None

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Tree:
        """Return the outputs, each tensor with the member axis in front."""
        return self.execute(self.outputs, params, buffers, batch)

    def outputs(self, params: Params, buffers: Buffers, batch: tuple) -> Tree:
        """Run the members in this process, in chunks."""
        call = self.options.on(params, buffers, batch, self.keys)
        if self.chunk_size is None:
            return execution.run(self._of_member, call)[0]
        parts = []
        with LossMode(handlers=SINGLE):  # statistics of a chunk are not the batch's
            for number, part in enumerate(_chunks(call, self.chunk_size)):
                if (keys := part.draws.keys) is not None:
                    part = part.replaced(draws=Draws(keys=fold_in(keys, number)))
                parts.append(execution.run(self._of_member, part)[0])
        return tree_map(lambda *leaves: torch.cat(leaves, 1), *parts)

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tree, Buffers]:
        """Return the outputs and the buffers after each member's forward pass."""
        if self.chunk_size is not None:
            raise ValueError(
                f"ensemble_forward(chunk_size={self.chunk_size}).with_buffers: "
                f"expected chunk_size=None, since buffers depend on the whole batch."
            )
        return self.execute(self.outputs_and_buffers, params, buffers, batch)

    def outputs_and_buffers(
        self, params: Params, buffers: Buffers, batch: tuple
    ) -> tuple[Tree, Buffers]:
        """Run the members in this process, and return their buffers too."""
        call = self.options.on(params, buffers, batch, self.keys)
        return execution.run(self.fmodel.call_and_update, call)

    def explain(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> EnsembleExplanation:
        """Return the strategy, the reason for it and the form of each op."""
        call = self.options.on(params, buffers, batch)
        if self.chunk_size is not None:
            call, *_ = _chunks(call, self.chunk_size)
        return self._explained(self._of_member, call)

    def _of_member(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tree, Buffers]:
        return self.fmodel(params, buffers, *batch), {}


def _chunks(call: MemberCall, chunk_size: int) -> list[MemberCall]:
    """Split the batch along the axis of samples, behind the member axis."""
    items = [
        (item, int(dim is not None))
        for item, dim in zip(call.items, call.dims, strict=True)
    ]
    cut = [(x, axis) for item, axis in items for x in tensors(item) if x.ndim > axis]
    sizes = {leaf.shape[axis] for leaf, axis in cut}
    if len(sizes) != 1:
        raise ValueError(
            f"ensemble_forward(chunk_size={chunk_size}): expected batches of one size, "
            f"got {sorted(sizes)}."
        )

    def chunk(start: int) -> MemberCall:
        rows = slice(start, start + chunk_size)

        def part(item: Tree, axis: int) -> Tree:
            index = (slice(None), rows) if axis else rows
            return map_tensors(lambda x: x[index] if x.ndim > axis else x, item)

        return call.replaced(items=tuple(part(*pair) for pair in items))

    # An empty batch is one chunk.
    return [chunk(start) for start in range(0, max(*sizes, 1), chunk_size)]


@shows_member_options
def ensemble_forward(
    fmodel: FunctionalModel,
    *,
    chunk_size: int | None = None,
    **options: Unpack[EnsembleOptions],
) -> EnsembleForward:
    """Run all members: `(params, buffers, *batch) -> [E, B, ...]`.

    `params` and `buffers` have a member axis in front, as `stack` makes them, except
    for entries that match the patterns in `shared`. With `in_dims=None` all members get
    the same batch, with `0` each its own (`x[indices]` with indices `[E, B]` for a
    bootstrap); a sequence has an entry for each item. `.with_buffers(...)` returns
    `(output, new_buffers)`, for batch statistics. The arguments stay as they are.

    `randomness="different"` draws dropout masks for every member, `"same"` one for all;
    masks depend on the strategy.

    Args:
        chunk_size: samples at a time; None for all. Others as in `ensemble_grad`.

    Raises:
        TypeError: the model returns something else than tensors.
        UnsupportedOp: an op cannot run for all members at once, as the strategy says.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(3, 2) for _ in range(4)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> ensemble_forward(fmodel)(params, buffers, torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    check_options(ensemble_forward, options, EnsembleOptions)
    call = MemberCall.of("ensemble_forward", **options)
    if chunk_size is not None:
        [chunk_size] = checks.integers(
            "ensemble_forward", minimum=1, chunk_size=chunk_size
        )
    return EnsembleForward(options=call, fmodel=fmodel, chunk_size=chunk_size)


# Predictions.


class EnsemblePrediction(NamedTuple):
    """The prediction of classifiers, with `p_e` the probabilities of member e.

    Entropies are in nats, `H(p) = -sum_c p_c log p_c` with `0 log 0 = 0`.

    Attributes:
        mean: `m = sum_e p_e / E`, the ensemble's probabilities; `[N, C]`.
        variance: `sum_e (p_e - m)^2 / E`; `[N, C]`.
        predictive_entropy: `H(m)`, the whole uncertainty; `[N]`.
        expected_entropy: `sum_e H(p_e) / E`, the part on which the members agree, such
            as noise in the data; `[N]`.
        mutual_information: the difference of the two, never negative: the part on
            which the members do not agree, and which more data could settle; `[N]`.
        disagreement: share of the members whose most probable class is not the
            ensemble's; `[N]`.
    """

    mean: Tensor
    variance: Tensor
    predictive_entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    disagreement: Tensor

    @classmethod
    def from_logits(cls, logits: Tensor) -> "EnsemblePrediction":
        """Summarise logits `[E, N, C]` of any origin, such as passes with dropout.

        Example:
            >>> logits = torch.tensor([[[0.0, 9.0]], [[9.0, 0.0]], [[0.0, 9.0]]])
            >>> EnsemblePrediction.from_logits(logits).disagreement
            tensor([0.3333])
        """
        function = "EnsemblePrediction.from_logits"
        _check_outputs(function, logits)
        return _of_logits(function, logits, _Members())


class ValuePrediction(NamedTuple):
    """The prediction of regressors, with `f_e` the output of member e.

    Attributes:
        mean: `m = sum_e f_e / E`; `[N, ...]`.
        variance: `sum_e (f_e - m)^2 / E`; `[N, ...]`.
        quantiles: in the order of the levels, linear between two members;
            `[Q, N, ...]`.
    """

    mean: Tensor
    variance: Tensor
    quantiles: Tensor

    @classmethod
    def from_outputs(
        cls, outputs: Tensor, *, quantiles: Sequence[float] = ()
    ) -> "ValuePrediction":
        """Summarise outputs `[E, N, ...]` of any origin.

        Example:
            >>> outputs = torch.tensor([[1.0], [3.0]])
            >>> ValuePrediction.from_outputs(outputs, quantiles=[0.25])[1:]
            (tensor([1.]), tensor([[1.5000]]))
        """
        function = "ValuePrediction.from_outputs"
        _check_outputs(function, outputs)
        _check_quantiles(function, quantiles)
        return _of_values(outputs, quantiles, _Members())


class _Options(TypedDict, total=False):
    mesh: "DeviceMesh | None"
    axis: str
    chunk_size: int | None
    strategy: EnsembleStrategy
    shared: Patterns


@overload
def predict(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    kind: Literal["class"] = "class",
    **options: Unpack[_Options],
) -> EnsemblePrediction: ...
@overload
def predict(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    kind: Literal["value"],
    quantiles: Sequence[float] = (),
    **options: Unpack[_Options],
) -> ValuePrediction: ...
def predict(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    kind: Literal["class", "value"] = "class",
    quantiles: Sequence[float] = (),
    mesh: "DeviceMesh | None" = None,
    axis: str = "members",
    chunk_size: int | None = None,
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
) -> EnsemblePrediction | ValuePrediction:
    """Predict, and say how far members disagree: `inputs [N, ...] -> [N, ...]`.

    With `kind="class"` the model returns logits `[N, C]`, and the result is an
    `EnsemblePrediction`; with `kind="value"` it returns numbers `[N, ...]`, and the
    result is a `ValuePrediction` with these `quantiles`, levels from 0 to 1. The model
    takes inputs by position and returns one tensor. All members see the same inputs.
    The ensemble counts as a mixture of its members in equal parts, so variances are
    over E and zero for one member. A sample with a logit that is NaN or
    infinite above has NaN, and a value that is not finite a variance of NaN.

    The model runs in evaluation mode, whatever mode `fmodel` is in: no dropout, batch
    norm by its running statistics. For Monte-Carlo dropout stack the logits of several
    passes in training mode and pass them to `EnsemblePrediction.from_logits`.

    With a `mesh` the members are cut among its ranks along `axis`: `params` and
    `buffers` are this rank's members, as `distributed.shard_members` cuts them, inputs
    are the same on all ranks, and so is the result.

    No graph is kept. Arithmetic after the model is float64; results are float32, or
    float64 where the outputs are.

    Cost: one forward pass of each member, with outputs `[E, chunk_size, ...]`. Ranks
    sum about `5 N C` numbers; for quantiles each holds the outputs of all members.

    Reference: Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty
    Estimation using Deep Ensembles, arXiv 1612.01474; Houlsby et al., Bayesian Active
    Learning for Classification and Preference Learning, arXiv 1112.5745.

    Args:
        chunk_size: samples at a time; None for all. Others as in `ensemble_grad`.

    Raises:
        ValueError: the outputs are not of this kind, or sizes do not fit.
        UnsupportedOp: as `ensemble_forward`.
        RankError: another rank failed, or has other options, samples or outputs.

    Example:
        >>> from vgrad import make_functional_with_buffers
        >>> fmodel, _, _ = make_functional_with_buffers(torch.nn.Linear(1, 2))
        >>> weight = torch.tensor([[[9.0], [0.0]], [[0.0], [9.0]]])  # two members
        >>> params = {"weight": weight, "bias": torch.zeros(2, 2)}
        >>> classes = predict(fmodel, params, {}, torch.tensor([[0.0], [1.0]]))
        >>> classes.expected_entropy, classes.mutual_information
        (tensor([0.6931, 0.0012]), tensor([0.0000, 0.6919]))
    """
    ranks = None if mesh is None else Ranks.of("predict", mesh, axis)

    def chunks() -> Iterator[Tensor]:  # nothing runs, or fails, before the first one
        checks.choice("predict", ("class", "value"), kind=kind)
        if kind == "class" and quantiles:
            raise ValueError(
                'predict(kind="class", quantiles): expected quantiles of values, got '
                'some of classes. Pass kind="value".'
            )
        _check_quantiles("predict", quantiles)
        size = chunk_size
        if size is not None:
            [size] = checks.integers("predict", minimum=1, chunk_size=size)
        forward = ensemble_forward(fmodel.eval(), strategy=strategy, shared=shared)
        batch = batches.read("predict", inputs)
        # An empty batch is run too, for the shape of its outputs.
        for samples in list(batches.chunks(batch.size, size)) or [slice(0)]:
            # Statistics of a chunk are not the batch's.
            guard = nullcontext() if size is None else LossMode(handlers=SINGLE)
            with torch.no_grad(), guard:
                rows = batch.sample(batch.select(samples).inputs)
                outputs = forward(params, buffers, *rows)
            _check_outputs("predict", outputs)
            expected = samples.stop - (samples.start or 0)
            if outputs.shape[1] != expected:
                raise ValueError(
                    f"predict(fmodel): expected an output for each of the {expected} "
                    f"samples, [members, samples, ...], got shape "
                    f"{tuple(outputs.shape)}."
                )
            yield outputs

    def summary(outputs: Tensor, members: _Members) -> tuple[Tensor, ...]:
        if kind == "class":
            return _of_logits("predict", outputs, members)
        return _of_values(outputs, quantiles, members)

    if ranks is None:
        parts = [summary(outputs, _Members()) for outputs in chunks()]
    else:
        facts = Values(kind=kind, quantiles=f"{[*quantiles]}", shared=f"{[*shared]}")
        if isinstance(fmodel, FunctionalModel):  # else it is refused later
            facts |= portable(fmodel=dict(fmodel.eval().named_modules())[""])
        parts = _over_ranks(ranks, facts, chunks(), summary)
    if kind == "class":
        return EnsemblePrediction(*map(torch.cat, zip(*parts, strict=True)))
    means, variances, levels = zip(*parts, strict=True)
    return ValuePrediction(
        torch.cat(means), torch.cat(variances), torch.cat(levels, dim=1)
    )


class _Members(NamedTuple):
    """The members of one process, or of all ranks: sums of tensors `[E, ...]`."""

    ranks: Ranks | None = None
    counts: Sequence[int] = ()  # of each rank

    def sum(self, *values: Tensor) -> list[Tensor]:
        sums = [value.sum(0) for value in values]
        if self.ranks is None:
            return sums
        named = {str(number): value for number, value in enumerate(sums)}
        return [*self.ranks.summed("predict", named).values()]

    def mean(self, *values: Tensor) -> list[Tensor]:
        count = sum(self.counts) or len(values[0])
        return [value / count for value in self.sum(*values)]

    def first(self, *values: Tensor) -> list[Tensor]:
        count = 0 if self.ranks is not None and self.ranks.rank else 1
        return self.sum(*[value[:count] for value in values])

    def gather(self, value: Tensor) -> Tensor:
        if self.ranks is None:
            return value
        return self.ranks.joined(value.contiguous(), self.counts)


def _over_ranks(
    ranks: Ranks, facts: Values, chunks: Iterator[Tensor], summary: Callable
) -> list[Any]:
    """Summarise chunks of outputs `[E of the rank, chunk, ...]` one by one."""
    parts = []
    while True:
        with ranks.together("predict") as note:
            outputs = next(chunks, None)
            kind = None
            if outputs is not None:
                summary(outputs[:, :0], _Members())  # raises before the exchange
                kind = [str(outputs.dtype), *outputs.shape[1:]]
            note.same["options"] = facts
            count = 0 if outputs is None else len(outputs)
            note.own |= {"outputs": kind, "members": count}
        kinds = [entry["outputs"] for entry in note.notes]
        if any(other != kind for other in kinds):
            raise RankError(
                f"predict: expected the same samples on all ranks, and outputs of one "
                f"dtype and shape, got {kinds} on ranks 0 to {ranks.size - 1}."
            )
        if outputs is None:
            return parts
        counts = [entry["members"] for entry in note.notes]
        parts.append(summary(outputs, _Members(ranks, counts)))


def _of_logits(function: str, logits: Tensor, members: _Members) -> EnsemblePrediction:
    if logits.ndim != 3 or logits.shape[2] < 2:
        raise ValueError(
            f"{function}(logits): expected logits [members, samples, classes] of two "
            f"classes or more, got shape {tuple(logits.shape)}. A model of one logit "
            f"needs a second one of zero beside it."
        )
    probabilities = logits.detach().double().softmax(2)
    (mean, expected), (deviations, _) = _means(
        members, probabilities, _entropy(probabilities)
    )
    predictive = _entropy(mean)
    differs = (probabilities.argmax(2) != mean.argmax(1)).double()
    variance, differs = members.mean(deviations.square(), differs)
    prediction = EnsemblePrediction(
        mean=mean,
        variance=variance,
        predictive_entropy=predictive,
        expected_entropy=expected,
        mutual_information=(predictive - expected).clamp(min=0),
        # The largest of several NaN is some class, on which all would seem to agree.
        disagreement=differs.masked_fill(predictive.isnan(), torch.nan),
    )
    dtype = wide(logits.dtype)
    return EnsemblePrediction(*(value.to(dtype) for value in prediction))


def _of_values(
    outputs: Tensor, levels: Sequence[float], members: _Members
) -> ValuePrediction:
    values = outputs.detach().double()
    (mean,), (deviations,) = _means(members, values)
    (variance,) = members.mean(deviations.square())
    everyone = members.gather(values) if levels else values
    dtype = wide(outputs.dtype)
    quantiles = _quantiles(everyone, levels)
    return ValuePrediction(*(x.to(dtype) for x in (mean, variance, quantiles)))


def _means(members: _Members, *values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return means over members `[E, ...]`, and the deviations from them."""
    # Differences from the first member are exactly zero where all members agree: no
    # rounding of a sum makes members disagree with their own mean.
    firsts = members.first(*values)
    apart = [value - first for value, first in zip(values, firsts, strict=True)]
    means = members.mean(*apart, *values)
    shifts, plain = means[: len(values)], means[len(values) :]
    triples = zip(shifts, firsts, plain, strict=True)
    centres = [torch.where(s.isfinite(), first + s, mean) for s, first, mean in triples]
    return centres, [x - shift for x, shift in zip(apart, shifts, strict=True)]


def _check_outputs(function: str, outputs: Tensor) -> None:
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


def _quantiles(values: Tensor, levels: Sequence[float]) -> Tensor:
    # `torch.quantile` refuses empty tensors, and in some versions 2^24 numbers.
    ordered = values.sort(0).values
    missing = ordered[-1].isnan()  # NaN is sorted to the end
    quantiles = values.new_empty((len(levels), *values.shape[1:]))
    for row, level in zip(quantiles, levels, strict=True):
        place = level * (len(values) - 1)
        low, high = math.floor(place), math.ceil(place)
        below, above = ordered[low], ordered[high]
        between = torch.lerp(below, above, place - low)
        row.copy_(torch.where(below == above, below, between))  # infinite ones too
        row.masked_fill_(missing, torch.nan)
    return quantiles

"""Sums of clipped per-sample gradients, and their sensitivity.

B samples.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Required, Unpack, get_args, overload

import torch
from torch import Tensor

from vgrad import checks
from vgrad.batches import Sensitivity
from vgrad.conditions import rare
from vgrad.factors import Norm, Sums, reductions
from vgrad.factors.reductions import ordinary, rounded_down
from vgrad.persample.engine import (
    Call,
    ClipCollector,
    Evaluation,
    Options,
    Quantity,
    Transform,
    TwoPassCollector,
    joined,
    members,
)
from vgrad.torch_private import modes
from vgrad.tree import no_autocast
from vgrad.typing import Clipping, LossFn, Params, Passes, Result, Tree

_GAMMA = 0.01
"""The number that automatic clipping adds to a norm, as its authors do."""

LEAST, MOST = 1e-30, 1e30
"""Between these a sum in float32 keeps a bound."""

_FAR = 1e25
"""This many bounds times the smallest float32 are nothing next to the bound."""

_ROUNDING = 1e-6
"""How much more than its bound a sample may add, relative to the bound."""

_OTHER = 1e-3
"""Relative to the weight of a sample, a difference that rounding does not make.

Two backward passes of one graph differ by the order in which a device adds up.
"""

Parts = list[tuple[list[str], float]]
"""Names of parameters that are clipped together, and their bound."""


def check_bounds(
    bounds: Mapping[str, float], normalize_by: float, clipping: Clipping
) -> None:
    """Refuse bounds that a sum in float32 cannot keep, for want of digits or range.

    An infinite one is no bound.
    """
    for name, bound in bounds.items():
        checks.positive("clipped_grad", **{name: bound})
        if clipping != "automatic" and math.isinf(bound):
            continue
        sizes = {name: bound, f"{name} / normalize_by": bound / normalize_by}
        checks.between("clipped_grad", LEAST, MOST, **sizes)


class ClipWeights(NamedTuple):
    """The weights of B samples, and which samples they are right for."""

    norms: Tensor
    weights: dict[str, Tensor]  # by which each parameter's gradients are multiplied
    finite: Tensor  # which samples count
    clipped: Tensor  # which of these have a norm above a bound
    safe: Tensor  # which can be summed from factors, far from the ends of float32

    @property
    def direct(self) -> Tensor:
        """Which samples need nothing but their weights."""
        return self.finite & self.safe


@dataclass(frozen=True)
class ClipRule:
    """How gradients are clipped."""

    kind: Clipping
    max_norm: float | Mapping[str, float]

    @property
    def total(self) -> float:
        """The largest norm of a clipped gradient."""
        if isinstance(self.max_norm, Mapping):
            return math.hypot(*self.max_norm.values())
        return self.max_norm

    def parts(self, params: Params) -> Parts:
        """Return the names of parameters that are clipped together, and the bound."""
        if isinstance(self.max_norm, Mapping):
            groups = {pattern: [pattern] for pattern in self.max_norm}
            matched = members("clipped_grad", groups, params)
            covered = {name for names in matched.values() for name in names}
            if missing := sorted(params.keys() - covered):
                raise ValueError(
                    f"clipped_grad(max_norm={dict(self.max_norm)!r}): expected every "
                    f"parameter to match a pattern, but {missing} match none."
                )
            return [(matched[each], self.max_norm[each]) for each in matched]
        if self.kind != "per_layer":
            return [(list(params), self.max_norm)]
        layers = members("clipped_grad", "layer", params)
        bound = self.max_norm / math.sqrt(len(layers))
        return [(names, bound) for names in layers.values()]

    def factors(self, norms: Tensor, bound: float) -> Tensor:
        """Factors [B] in float64; numbers too small for all digits become zero."""
        if self.kind == "automatic":
            exact = bound / (norms + _GAMMA)
        else:
            exact = (bound / norms).clamp(max=1)
        return torch.where(exact < torch.finfo(exact.dtype).tiny, 0.0, exact)

    def weigh(
        self,
        norms: Mapping[str, Norm],
        parts: Parts,
        dtype: torch.dtype,
        mask: Tensor | None = None,
    ) -> ClipWeights:
        """Compute the weights of each sample from its norms, in `dtype`."""
        joint = [Norm.joint([norms[name] for name in names]) for names, _ in parts]
        finite = torch.stack([norm.upper for norm in joint]).isfinite().all(0)
        clipped, safe = torch.zeros_like(finite), torch.ones_like(finite)
        weights: dict[str, Tensor] = {}
        for (names, bound), norm in zip(parts, joint, strict=True):
            factors = self.factors(torch.where(finite, norm.upper, 1), bound)
            if mask is not None:
                factors = torch.where(mask, factors, 0.0)
            # Rounded down, so that no product is above the bound.
            rounded = rounded_down(factors, dtype)
            weights.update(dict.fromkeys(names, rounded))
            clipped |= finite & (norm.value > bound)
            # A product with a number on the edge of zero must not count either.
            safe &= ordinary(norm.reach, factors) & (norm.reach <= bound * _FAR)
        if mask is not None:
            clipped &= mask
        return ClipWeights(Norm.joint(joint).value, weights, finite, clipped, safe)


class ClippedGrad(NamedTuple):
    """The result of `clipped_grad`. Only `grads`, with noise, is private.

    Attributes:
        grads: sum over samples of the clipped gradients, divided by `normalize_by`;
            `{name: shape}` in float32 or wider.
        norms: L2 norm of each sample's gradient before clipping, `[B]`.
        losses: loss of each sample, `[B]`.
        clipped: how many finite samples had a norm, with `"per_layer"` one of any
            layer, above the bound. Automatic clipping scales every sample, and counts
            norms above `max_norm`.
        nonfinite: how many samples had an infinite or NaN gradient; they add zero.
    """

    grads: Params
    norms: Tensor
    losses: Tensor
    clipped: Tensor
    nonfinite: Tensor


class ClippingOptions(Options, total=False):
    """The options of `clipped_grad`."""

    max_norm: Required[float | Mapping[str, float]]
    clipping: Clipping
    normalize_by: float
    rescale: bool
    passes: Passes


@overload
def clipped_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[ClippingOptions]
) -> "ClippedGradFn[ClippedGrad]": ...
@overload
def clipped_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[ClippingOptions]
) -> "ClippedGradFn[tuple[ClippedGrad, Tree]]": ...
def clipped_grad(
    loss: LossFn,
    *,
    max_norm: float | Mapping[str, float],
    clipping: Clipping = "flat",
    normalize_by: float = 1.0,
    rescale: bool = False,
    passes: Passes = 1,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> "ClippedGradFn[Any]":
    """Sum of clipped gradients: `(params, buffers, *batch) -> ClippedGrad`.

    Each sample's gradient g is scaled by a factor, and the sum is divided by
    `normalize_by`, for which private training takes the expected batch size, a public
    constant. `.sensitivity` of the function is the number that noise has to hide.
    `clipping` is

    * `"flat"`: the factor is `min(1, max_norm / |g|)`;
    * `"per_layer"`: each of K layers (the parameters of one module) has a factor of its
      own with the bound `max_norm / sqrt(K)`. A dictionary from shell-style patterns of
      parameters' names to numbers clips the parameters of each pattern together, with
      its own bound; the sensitivity is the root of the sum of their squares;
    * `"automatic"`: the factor is `max_norm / (|g| + 0.01)`, so that all samples count
      alike.

    With `rescale` the sum is divided by `max_norm`, too (by the sensitivity of the sum,
    where there are several bounds): clipped gradients have a norm of one at most, and
    the learning rate need not follow the bound.

    With `passes=2` a recorded backward pass keeps norms alone, and a second one sums
    with the weights that follow from them: more time, and no factors in memory. That
    pays where the loss checkpoints its activations, which otherwise take more. The
    second pass measures the norms again. Where they differ, as for checkpoints that
    draw new random numbers, the samples run once more and factors are kept. Factors of
    samples close to overflow or underflow are kept anyway. A loss with nodes that are
    not torch's own runs forward before each pass. The other options are in
    `vgrad.persample.Options`.

    Guarantee: no sample adds more than `max_norm (1 + 1e-6) / normalize_by` in L2 norm,
    or with `rescale` `(1 + 1e-6) / normalize_by`, in the arithmetic that ran, with
    parameters of any dtype, under autocast, and for numbers of any size that the dtype
    holds. A sample whose gradient is not finite adds exactly zero. An empty batch gives
    zeros without running the loss. Chunks are added up in float64.

    Cost: recorded, about the backward pass of plain SGD. The gradient of a sample with
    inputs or gradients beyond 1e15 is formed in float64, by itself.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133;
    Bu et al., Automatic Clipping, arXiv 2206.07136.

    Raises:
        ValueError: `max_norm` or `normalize_by` is not positive; a bound, or a bound
            divided by `normalize_by`, is not between 1e-30 and 1e30 (infinity, which
            clips nothing, passes unless clipping is automatic or the sum rescaled);
            when called, a pattern of `max_norm` matches no parameter, or a parameter
            not exactly one.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> clipped = clipped_grad(loss, max_norm=1.0)
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.5], [torch.inf, 0.0]])
        >>> result = clipped({"w": torch.ones(2)}, {}, x)
        >>> result.grads
        {'w': tensor([0.6000, 1.3000])}
        >>> result.clipped, result.nonfinite, clipped.sensitivity.value
        (tensor(1), tensor(1), 1.0)
    """
    checks.choice("clipped_grad", get_args(Clipping), clipping=clipping)
    checks.positive("clipped_grad", normalize_by=normalize_by)
    if isinstance(max_norm, Mapping):
        if clipping != "per_layer" or not max_norm:
            raise ValueError(
                f"clipped_grad(max_norm={dict(max_norm)!r}, clipping={clipping!r}): "
                f'expected a number, or with clipping="per_layer" a dictionary that is '
                f"not empty."
            )
        named = {f"max_norm[{each!r}]": bound for each, bound in max_norm.items()}
        check_bounds(named, normalize_by, clipping)
        max_norm = {pattern: float(bound) for pattern, bound in max_norm.items()}
    else:
        check_bounds({"max_norm": max_norm}, normalize_by, clipping)
        max_norm = float(max_norm)
    call = Call.of(clipped_grad, loss, options, has_aux)
    rule = ClipRule(clipping, max_norm)
    if rescale:
        checks.between("clipped_grad", LEAST, MOST, max_norm=rule.total)
        normalize_by = normalize_by * rule.total
    checks.choice("clipped_grad", get_args(Passes), passes=passes)
    return ClippedGradFn(call, ClippedSum(rule, float(normalize_by), passes))


class ClippedGradFn(Transform[Result]):
    """The function of `clipped_grad`, with its sensitivity."""

    @property
    def sensitivity(self) -> Sensitivity:
        """How far adding or removing one sample can move the sum."""
        quantity: Any = self.quantity
        return Sensitivity(quantity.rule.total / quantity.normalize_by)


@dataclass(frozen=True)
class ClippedSum(Quantity):
    """The sum of clipped gradients, divided by a number."""

    rule: ClipRule
    normalize_by: float
    passes: int = 1

    def mapped(
        self, function: Callable[[Tensor], Tensor], value: ClippedGrad
    ) -> ClippedGrad:
        """Apply a function to norms and losses."""
        norms, losses = function(value.norms), function(value.losses)
        return value._replace(norms=norms, losses=losses)

    def collector(self, call: Call) -> ClipCollector:
        """Return a collector of norms, and of factors or of sums in a second pass."""
        if self.passes == 1:
            return ClipCollector(call.mask)
        reducer, weigh = call.reducer, self._weigh(call)

        def decide(collector: TwoPassCollector) -> Mapping[str, Tensor] | None:
            clip = weigh(collector.norms)
            careful = rare(torch.cat([~clip.direct, *collector.uncertain]))
            return None if reducer.any_rank(careful) else clip.weights

        def fit(collector: TwoPassCollector, weights: Mapping[str, Tensor]) -> bool:
            with no_autocast(call.device):
                clip = weigh(collector.norms)
                fits = [clip.direct]
                for names, bound in self.rule.parts(call.params):
                    weight = weights[names[0]].double()
                    norm = Norm.joint([collector.norms[name] for name in names]).upper
                    fits.append(weight * norm <= bound * (1 + _ROUNDING))
                    fits.append(weight >= clip.weights[names[0]] * (1 - _OTHER))
                other = [~torch.stack(fits).all(0), *collector.uncertain]
                differs = rare(torch.cat(other))
            return not reducer.any_rank(differs)

        summed = reducer.summed
        return TwoPassCollector(call.mask, decide=decide, fit=fit, summed=summed)

    def _weigh(self, call: Call) -> Callable[[Mapping[str, Norm]], ClipWeights]:
        dtype = reductions.norm_dtype(call.params)
        parts = self.rule.parts(call.params)
        return partial(self.rule.weigh, parts=parts, dtype=dtype, mask=call.mask)

    def partial(self, collector: ClipCollector, call: Call) -> tuple:
        """Return the sums of a chunk, its norms, and which are above a bound."""
        weigh, sums = self._weigh(call), Sums()
        with no_autocast(call.device):
            clip = weigh(collector.norms)
            if isinstance(collector, TwoPassCollector) and collector.sums:
                sums.add(collector.sums)
            elif modes.inside_transform():
                sums.add(collector.weighted(clip.weights, clip.finite))
            elif not rare(torch.cat([~clip.direct, *collector.uncertain])):
                settled = call.reducer.settled
                sums.add(collector.weighted(clip.weights, None, settled))
            else:
                collector.recompute()
                clip = weigh(collector.norms)
                for some in self._careful(collector, clip, call):
                    sums.add(some)
                for name, value in sums.totals.items():
                    sums.totals[name] = call.reducer.settled(name, value)
        return sums.totals, clip.norms, clip.clipped

    def _careful(
        self, collector: ClipCollector, clip: ClipWeights, call: Call
    ) -> Iterator[Params]:
        """Yield the sums of clipped gradients, in parts that are to be added."""
        keep: Tensor | None = None
        if rare(~clip.direct):
            keep, hard = clip.direct, clip.finite & ~clip.safe
            if collector.mask is not None:
                keep, hard = keep & collector.mask, hard & collector.mask
            # The norms of the very numbers that are summed, in float64.
            parts = self.rule.parts(call.params)
            for some in collector.gradients(hard):
                again = self.rule.weigh(some.norms, parts, torch.float64)
                yield some.weighted(again.weights, again.finite)
        yield collector.weighted(clip.weights, keep)

    def total(self, partials: Iterator[tuple], run: Evaluation) -> ClippedGrad:
        """Return the sum of the batch, its norms and counts."""
        sums, chunk_norms, above = Sums(), [], []
        for some, norms, clipped in partials:
            sums.add(some)
            chunk_norms.append(norms)
            above.append(clipped)
        if not chunk_norms:
            self.rule.parts(run.params)  # which may not be as the bounds say
        norms = joined(reductions.no_norms(run.params, torch.float64), chunk_norms)
        nonfinite, mask, places = ~norms.isfinite(), run.call.mask, run.places
        if mask is not None:  # in the order of the batch
            nonfinite = (nonfinite if places is None else nonfinite[places]) & mask
        clipped, nonfinite = run.summed(
            sums, joined(norms > 0, above).sum(), nonfinite.sum()
        )
        sums.divide(self.normalize_by)
        return ClippedGrad(
            grads=sums.rounded(run.params),
            norms=norms.to(run.dtype),
            losses=run.losses,
            clipped=clipped,
            nonfinite=nonfinite,
        )

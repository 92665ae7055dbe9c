"""Sums of clipped per-sample gradients, and their sensitivity.

B samples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Required, Unpack, get_args, overload

import torch
from torch import Tensor

from vgrad import checks
from vgrad.batches import Sensitivity
from vgrad.conditions import occurs
from vgrad.factors import Dense, Factor, Sums
from vgrad.factors.norms import LIMIT, Gathered, Joint, computed, gathered, recomputed
from vgrad.factors.reductions import normal_rounded_down, rounded_down
from vgrad.persample.engine import (
    LOCAL,
    Call,
    Collector,
    Concatenated,
    Counts,
    Join,
    Joined,
    Options,
    Quantity,
    Reducer,
    Summed,
    Transform,
    masked,
    members,
    shows_options,
)
from vgrad.torch_private import modes
from vgrad.tree import cast, double, no_autocast
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

    def parts(
        self, function: str, params: Params
    ) -> tuple[list[list[str]], list[float]]:
        """Return the names of parameters that are clipped together, and the bounds."""
        if isinstance(self.max_norm, Mapping):
            groups = {pattern: [pattern] for pattern in self.max_norm}
            matched = members(function, groups, params)
            covered = {name for names in matched.values() for name in names}
            if missing := sorted(params.keys() - covered):
                raise ValueError(
                    f"{function}(max_norm={dict(self.max_norm)!r}): expected every "
                    f"parameter to match a pattern, but {missing} match none."
                )
            return [*matched.values()], [self.max_norm[pattern] for pattern in matched]
        if self.kind != "per_layer":
            return [list(params)], [self.max_norm]
        layers = members(function, "layer", params)
        bound = self.max_norm / math.sqrt(len(layers))
        return [*layers.values()], [bound] * len(layers)

    def factors(self, norms: Tensor, bound: float | Tensor) -> Tensor:
        """Factors in float64."""
        if self.kind == "automatic":
            return bound / (norms + _GAMMA)
        return (bound / norms).clamp(max=1)

    def limit(self, bounds: Sequence[float | Tensor]) -> float | Tensor:
        """Return the largest norm, and number of a layer, of a sample that counts."""
        if isinstance(bounds[0], Tensor):  # one bound, of flat clipping
            return (bounds[0] * _FAR).clamp(max=LIMIT)
        # No factor is then below 1e-30, where float32 has all digits. Next to a bound,
        # 1e25 times the smallest float32 are nothing, so no product's rounding counts.
        smallest, largest = min(bounds), max(bounds)
        sizes = LIMIT, smallest * _FAR
        if self.kind == "automatic" and largest > _GAMMA:  # factors may be above one
            sizes += (LIMIT * math.sqrt(_GAMMA / largest),)
        return min(sizes)


class ClipWeights(NamedTuple):
    """The weights of B samples in P parts, and which samples they are right for."""

    norms: Tensor  # over all parameters, [B]
    upper: Tensor  # bounds of the norms of each part, [P, B]
    factors: Tensor  # by which gradients of each part are multiplied, [P, B]
    weights: dict[str, Tensor]  # the same for each parameter, [B]
    clipped: Tensor  # which samples that count have a norm above a bound, [B]
    uncertain: Any = None  # whether a sample is not finite or a norm may have cancelled
    finite: Any = None  # which samples count, [B]; None for all

    def nonfinite(self, mask: Tensor | None) -> Tensor:
        """Count samples that are not finite among samples of a mask."""
        if self.finite is None:
            return self.norms.new_zeros((), dtype=torch.int64)
        bad = ~(self.norms < math.inf)
        return (bad if mask is None else bad & mask).sum()


@dataclass
class _ClipCollector(Collector):
    """Keeps the factors of a sum that is weighted by norms, with weights in `dtype`."""

    rule: ClipRule
    parts: Sequence[Sequence[str]]  # names of parameters that are clipped together
    bounds: Sequence[Any]  # of the norms of each part, numbers or one tensor
    dtype: torch.dtype
    mask: Tensor | None
    factors: dict[str, Factor] = field(default_factory=dict)
    norms: dict[str, Any] = field(default_factory=dict)
    small: list[Gathered] | None = None  # factors of which some are together

    def add(self, name: str, factor: Factor) -> None:
        self.factors[name], self.norms[name] = factor.with_norms()

    def joint(self) -> Joint:
        """Return the norms of all parts."""
        if self.small is None:
            self.small = gathered(self.factors, self.norms, self.parts)
        self.norms = computed(self.norms)
        return Joint(self.norms, self.parts, self.dtype)

    def bound(self, like: Tensor) -> float | Tensor:
        """Return one bound for all parts, or bounds [P, 1]."""
        if len({*self.bounds}) == 1:
            return self.bounds[0]
        # No copy from the host, for which a device would wait.
        return torch.stack([like.new_full((1,), bound) for bound in self.bounds])

    def weigh(self) -> ClipWeights:
        """Return the weights; they are right unless `uncertain` is true."""
        norms = self.joint()
        value, upper, bound = norms.value, norms.upper, self.bound(norms.value)
        factors, clipped = self.rule.factors(upper, bound), value > bound
        clipped = clipped.any(0) if len(clipped) > 1 else clipped[0]
        factors = normal_rounded_down(factors, self.dtype)
        if self.mask is not None:
            factors, clipped = factors * self.mask, clipped & self.mask
        uncertain = ~(norms.largest() <= self.rule.limit(self.bounds))
        weights = self._columns(factors)
        return ClipWeights(norms.total, upper, factors, weights, clipped, uncertain)

    def weigh_each(self) -> ClipWeights:
        """Return weights, and which samples count: the ones up to the limit."""
        norms = self.joint()
        value, upper, bound = norms.value, norms.upper, self.bound(norms.value)
        # Samples that are not finite need some number.
        factors = self.rule.factors(upper.nan_to_num(1.0, 1.0), bound)
        finite, total = norms.largest(0) <= self.rule.limit(self.bounds), norms.total
        total = total.masked_fill(~finite & ~total.isnan(), math.inf)
        clipped = finite & (value > bound).any(0)
        if self.mask is not None:
            factors = torch.where(self.mask, factors, 0.0)
            clipped &= self.mask
        # Rounded down, so that no product is above the bound.
        rounded = rounded_down(factors, self.dtype)
        weights = self._columns(rounded)
        return ClipWeights(total, upper, rounded, weights, clipped, None, finite)

    def _columns(self, factors: Tensor) -> dict[str, Tensor]:
        weights = {}
        for names, column in zip(self.parts, factors.unbind(), strict=True):
            weights |= dict.fromkeys(names, column)
        return weights

    def summed(
        self, clip: ClipWeights, keep: Tensor | None, reducer: Reducer = LOCAL
    ) -> Params:
        """Sum samples; those not to keep add exactly zero, whatever they hold."""
        rows = None
        if keep is not None and not modes.inside_transform():
            rows, keep = keep.nonzero().flatten(), None
        small, self.small, sums = self.small or [], [], {}
        joint_sums: Params = {}
        for group in small if rows is None and keep is None else ():
            joint_sums |= group.weighted(clip.weights[next(iter(group.shapes))])
        # In one order on all ranks, whose gradients may be small on some of them.
        for name in list(self.factors):
            factor, weight = self.factors.pop(name), clip.weights[name]
            if rows is not None:
                factor, weight = factor.select(rows), weight[rows]
            elif keep is not None:
                factor = masked(factor, keep)
            value = joint_sums[name] if name in joint_sums else factor.weighted(weight)
            sums[name] = reducer.reduced(name, value)
        return sums

    def summed_with_care(self, reducer: Reducer) -> tuple[Params, ClipWeights]:
        """Compute cancelled norms again, and sum the samples that count."""
        self.norms = recomputed(self.norms)
        clip = self.weigh_each()
        keep = clip.finite if occurs(~clip.finite) else None
        return self.summed(clip, keep, reducer), clip


@dataclass
class _TwoPassCollector(_ClipCollector):
    """Computes norms in a first pass and sums in a second; factors are not kept.

    The second pass measures the norms of the very factors that it sums, with which the
    weights must agree: a loss that runs again in it may have other values.
    """

    reducer: Reducer = LOCAL
    sums: Params = field(default_factory=dict)
    _clip: ClipWeights | None = None

    def first_pass(self, name: str, factor: Factor) -> Factor:
        """Keep norms, and return the form of a factor for a sum."""
        form, norms = factor.with_norms()
        self.norms[name] = [
            part if isinstance(part, Dense) else part._replace(factor=None)
            for part in norms
        ]
        return form

    def between_passes(self) -> None:
        clip = self.weigh()
        careful = self.reducer.any_rank(occurs(clip.uncertain))
        self._clip = None if careful else clip

    def add(self, name: str, factor: Factor) -> None:
        if self._clip is None:
            return super().add(name, factor)
        form = self.first_pass(name, factor)
        weighted = form.weighted(self._clip.weights[name])
        self.sums[name] = self.reducer.summed(name, weighted)

    def single_pass(self) -> _ClipCollector | None:
        if self._clip is None:
            return None
        factors = double(self._clip.factors)
        with no_autocast(factors.device):
            measured = self.weigh()
            bounds = self.bound(factors) * (1 + _ROUNDING)
            fits = factors * measured.upper <= bounds
            fits &= factors >= measured.factors * (1 - _OTHER)
            differs = occurs(measured.uncertain | ~fits.all())
        if not self.reducer.any_rank(differs):
            return None
        fields = self.rule, self.parts, self.bounds, self.dtype, self.mask
        return _ClipCollector(*fields)


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
        nonfinite: how many samples had an infinite or NaN gradient, or numbers beyond
            1e15; they add zero.
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
@shows_options
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
    draw new random numbers, or a sample is not finite, the samples run once more and
    factors are kept. A loss with nodes that are not torch's own runs forward before
    each pass. The other options are in `vgrad.persample.Options`.

    Guarantee: no sample adds more than `max_norm (1 + 1e-6) / normalize_by` in L2 norm,
    or with `rescale` `(1 + 1e-6) / normalize_by`, in the arithmetic that ran, with
    parameters of any dtype and under autocast. A sample adds exactly zero and counts as
    not finite, with an infinite norm, if its gradient is not finite, or if its norm, or
    the one of an input or a gradient of a layer, is beyond 1e15, where products could
    leave the range of float32. The limit is `1e25 max_norm` for bounds below 1e-10, and
    `1e14 / max_norm ** 0.5` for automatic clipping by more than 0.01. Small and zero
    gradients are ordinary ones. An empty batch gives zeros without running the loss.
    Chunks are added up in float64.

    Cost: recorded, about the backward pass of plain SGD.

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
    total = ClippedSum.of("clipped_grad", max_norm, clipping, normalize_by, rescale)
    call = Call.of(clipped_grad, loss, options, has_aux)
    checks.choice("clipped_grad", get_args(Passes), passes=passes)
    return ClippedGradFn(call, replace(total, passes=passes))


class ClippedGradFn(Transform[Result]):
    """The function of `clipped_grad`, with its sensitivity."""

    @property
    def sensitivity(self) -> Sensitivity:
        """How far adding or removing one sample can move the sum."""
        quantity: Any = self.quantity
        bound, divisor = self.options.max_norm, quantity.normalize_by
        if bound is None:
            made_of = quantity.rule.max_norm, divisor
            return Sensitivity(quantity.rule.total / divisor, made_of=made_of)
        return Sensitivity(bound / divisor, made_of=(bound, divisor))

    def with_max_norm(self, max_norm: Tensor) -> "ClippedGradFn[Result]":
        """Return the same function with a bound that is a tensor, float64 `[]`.

        It is positive, and between 1e-30 and 1e30, for which the caller answers: no
        function looks at its value, so that a device need not wait. A compiled function
        takes every bound by one graph. The divisor stays.

        Raises:
            ValueError: clipping is not `"flat"`, or the bound is another tensor.
        """
        quantity: Any = self.quantity
        name = self.options.function
        if quantity.rule.kind != "flat":
            raise ValueError(
                f"{name}(clipping={quantity.rule.kind!r}).with_max_norm(...): "
                f'expected clipping="flat", whose bound alone can be a tensor.'
            )
        kind = getattr(max_norm, "dtype", None), getattr(max_norm, "shape", None)
        if not isinstance(max_norm, Tensor) or kind != (torch.float64, ()):
            raise ValueError(
                f"{name}(...).with_max_norm(max_norm={checks.shown(max_norm)}): "
                f"expected a tensor without dimensions in float64. A number goes to "
                f"{name}(max_norm=...)."
            )
        return replace(self, options=replace(self.options, max_norm=max_norm))


@dataclass(frozen=True)
class ClippedSum(Quantity):
    """The sum of clipped gradients, divided by a number."""

    rule: ClipRule
    normalize_by: float
    passes: int = 1

    @classmethod
    def of(
        cls,
        function: str,
        max_norm: float | Mapping[str, float],
        clipping: Clipping,
        normalize_by: float,
        rescale: bool,
    ) -> "ClippedSum":
        """Check the options of a sum."""
        checks.choice(function, get_args(Clipping), clipping=clipping)
        [normalize_by] = checks.positive(function, normalize_by=normalize_by)
        if isinstance(max_norm, Mapping):
            if clipping != "per_layer" or not max_norm:
                raise ValueError(
                    f"{function}(max_norm={dict(max_norm)!r}, clipping={clipping!r}): "
                    f'expected a number, or with clipping="per_layer" a dictionary '
                    f"that is not empty."
                )
            bounds = {f"max_norm[{key!r}]": bound for key, bound in max_norm.items()}
        else:
            bounds = {"max_norm": max_norm}
        for name, bound in bounds.items():
            [bound] = checks.positive(function, **{name: bound})
            if clipping == "automatic" or not math.isinf(bound):
                # A sum in float32 cannot keep others, for want of digits or range.
                sizes = {name: bound, f"{name} / normalize_by": bound / normalize_by}
                checks.between(function, LEAST, MOST, **sizes)
        if isinstance(max_norm, Mapping):
            max_norm = {pattern: float(bound) for pattern, bound in max_norm.items()}
        else:
            max_norm = float(max_norm)
        rule = ClipRule(clipping, max_norm)
        if rescale:
            checks.between(function, LEAST, MOST, max_norm=rule.total)
            normalize_by = normalize_by * rule.total
        return cls(rule, float(normalize_by))

    def options(self) -> dict[str, Any]:
        kind, number = self.rule.kind, self.normalize_by
        shown: dict[str, Any] = {"max_norm": self.rule.max_norm}
        shown |= {"clipping": kind} if kind != "flat" else {}
        return shown | ({"normalize_by": number} if number != 1 else {})

    def joins(self) -> dict[str, Join]:
        return {"grads": Summed(), "norms": Concatenated(), "counts": Counts(2)}

    def check(self, call: Call) -> None:
        self.rule.parts(call.function, call.params)

    def mapped(
        self, function: Callable[[Tensor], Tensor], value: ClippedGrad
    ) -> ClippedGrad:
        norms, losses = function(value.norms), function(value.losses)
        return value._replace(norms=norms, losses=losses)

    def collector(self, call: Call) -> _ClipCollector:
        bounds: Sequence[Any]
        parts, bounds = self.rule.parts(call.function, call.params)
        if call.max_norm is not None:
            bounds = [call.max_norm]
        fields = self.rule, parts, bounds, call.dtype, call.mask
        if self.passes == 1:
            return _ClipCollector(*fields)
        return _TwoPassCollector(*fields, reducer=call.reducer)

    def partial(self, collector: _ClipCollector, call: Call) -> dict[str, Any]:
        clip: ClipWeights
        if isinstance(collector, _TwoPassCollector) and collector.sums:
            clip, sums = collector.weigh(), collector.sums
        elif modes.inside_transform():
            clip = collector.weigh_each()
            sums = collector.summed(clip, clip.finite)
        elif not occurs((clip := collector.weigh()).uncertain):
            sums = collector.summed(clip, None, call.reducer)
        else:
            sums, clip = collector.summed_with_care(call.reducer)
        counts = clip.clipped.sum(), clip.nonfinite(call.mask)
        return {"grads": sums, "norms": {"": clip.norms}, "counts": counts}

    def total(self, parts: Joined) -> ClippedGrad:
        call, losses = parts.call, parts.losses
        values = parts.values
        sums, norms, counts = Sums(values["grads"]), values["norms"], values["counts"]
        sums.divide(self.normalize_by)
        if not norms:
            counts = [torch.as_tensor(count, device=call.device) for count in counts]
        clipped, nonfinite = counts
        return ClippedGrad(
            grads=sums.rounded(call.params),
            norms=cast(norms[""], call.dtype) if norms else losses.new_zeros(0),
            losses=losses,
            clipped=clipped,
            nonfinite=nonfinite,
        )

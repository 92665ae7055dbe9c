"""Mean and spread of gradients over samples, and the gradient noise scale.

N samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from vgrad.conditions import occurs
from vgrad.factors import Dense, Factor, Outer, Scaled, products
from vgrad.factors.columns import Appended, Columns, inner_products, squares
from vgrad.persample.engine import (
    Call,
    Collector,
    Join,
    Joined,
    Options,
    Quantity,
    Reduce,
    Summed,
    Transform,
    shows_options,
)
from vgrad.tree import double, map_values, promoted, wide
from vgrad.typing import LossFn, Params

_WIDENED = 2**18
"""Numbers that are widened at once."""

_IN_FLOAT32 = range(32, 1025)
"""How many samples' products float32 sums up: of fewer, some mean is always large."""

_LOST = {torch.float32: 0.25, torch.float64: 2.0**-10}
"""Parts of sums of squares below which deviations from the mean have lost digits."""


class GradientMoments(NamedTuple):
    """The result of `gradient_moments` over N samples, with g the gradient of one.

    Attributes:
        mean: `E[g]`, the gradient of the mean loss; `{name: shape}`.
        variance: `sum_b |g_b - mean|^2 / (N - 1)`, unbiased; `{name: shape}`.
        second_moment: `E[|g|^2]`, the diagonal of the empirical Fisher matrix;
            `{name: shape}`.
        noise_scale: the gradient noise scale `trace / squared_norm`; a scalar. Over
            many batches take `NoiseScale`.
        signal_to_noise: `|mean|^2 / variance` (GSNR); `{name: shape}`.
        losses: loss of each sample, `[N]`.
        trace: the sum of `variance` over all parameters, an unbiased estimate of
            `tr(Sigma)`, with Sigma the covariance of g; a scalar in float64.
        squared_norm: `|mean|^2 - trace / N`, an unbiased estimate of `|G|^2`, with G
            the gradient over the whole distribution; a scalar in float64.
    """

    mean: Params
    variance: Params
    second_moment: Params
    noise_scale: Tensor
    signal_to_noise: Params
    losses: Tensor
    trace: Tensor
    squared_norm: Tensor


class NoiseScale(NamedTuple):
    """The gradient noise scale over many batches, for a training log.

    A single batch gives two estimates, each right on average, but not so their ratio:
    `squared_norm` comes out near zero, or below. This sums `trace` and `squared_norm`
    of `GradientMoments` over batches of any sizes, and divides at the end. It is a tree
    of tensors, which starts at zero: `noise = noise.add(moments)` after each batch. A
    batch of one sample or none has no variance; it makes the sums NaN.

    Reference: McCandlish et al., arXiv 1812.06162, appendix A.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> moments, noise = gradient_moments(loss), NoiseScale()
        >>> for x in torch.tensor([[[1.0], [3.0]], [[0.0], [2.0]]]):
        ...     noise = noise.add(moments({"w": torch.ones(1)}, {}, x))
        >>> noise.value  # (2 + 2) / (3 + 0)
        tensor(1.3333, dtype=torch.float64)
    """

    trace: Tensor = torch.zeros((), dtype=torch.float64)
    squared_norm: Tensor = torch.zeros((), dtype=torch.float64)

    def add(self, moments: GradientMoments) -> "NoiseScale":
        """Return the sums with one more batch, constants for autograd."""
        return NoiseScale(
            self.trace + moments.trace.detach(),
            self.squared_norm + moments.squared_norm.detach(),
        )

    @property
    def value(self) -> Tensor:
        """The batch size at which noise and signal are alike; NaN for no batches."""
        return self.trace / self.squared_norm


@shows_options
def gradient_moments(
    loss: LossFn, **options: Unpack[Options]
) -> Transform[GradientMoments]:
    """Moments of gradients: `(params, buffers, *batch) -> GradientMoments`.

    Results are float32 or wider. Deviations are taken from the mean and summed in
    float64, chunk by chunk, so that variances are right, and never negative, where the
    mean is much larger. Squares of outer products are products of squares, and are not
    formed unless digits would be lost. The options are in `vgrad.persample.Options`.

    Undefined moments are NaN: the variance of a single sample and all that follows from
    it, all moments of no samples, the signal-to-noise ratio without any gradient. For
    small batches `squared_norm` and the noise scale may be negative; `NoiseScale`
    averages over batches. A gradient that is not finite spoils its parameters.

    Cost: recorded, the weight of a linear layer at one position takes two products of
    matrices; other parameters take a gradient for every sample, formed for one of them
    and some samples at a time. Sums take up to 32 bytes for each number.

    Reference: McCandlish et al., An Empirical Model of Large-Batch Training,
    arXiv 1812.06162; Liu et al., Understanding Why Neural Networks Generalize Well
    Through GSNR of Parameters, arXiv 2001.07384; for the sums Chan, Golub and LeVeque,
    Algorithms for Computing the Sample Variance, 1983.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
        >>> moments = gradient_moments(loss)({"w": torch.ones(2)}, {}, x)
        >>> moments.mean, moments.variance
        ({'w': tensor([2., 5.])}, {'w': tensor([2., 0.])})
        >>> moments.trace.item(), moments.squared_norm.item()  # 29 - 2 / 2
        (2.0, 28.0)
        >>> moments.noise_scale
        tensor(0.0714)
    """
    call = Call.of(gradient_moments, loss, options)
    return Transform(call, MomentsOfGrads())


@dataclass
class _Moments(Collector):
    """Means and sums of squared deviations over the samples, in float64."""

    count: Tensor | int
    mask: Tensor | None = None
    means: Params = field(default_factory=dict)
    squares: Params = field(default_factory=dict)

    def add(self, name: str, factor: Factor) -> None:
        moments = self._by_sides(factor)
        if moments is None:
            # Some samples at a time, so that few gradients are in memory.
            parts = [factor] if isinstance(factor, Dense) else factor.in_cache()
            moments, start = (0, {}, {}), 0
            for part in parts:
                keep = None if self.mask is None else self.mask[start:][: part.size]
                moments, start = (
                    _joined(*moments, *_formed(part, keep)),
                    start + part.size,
                )
        self.means[name], self.squares[name] = (
            moment[""].view(factor.shape) for moment in moments[1:]
        )

    def _by_sides(self, factor: Factor) -> tuple[Any, Params, Params] | None:
        """Sum products and their squares, which are products of squares of sides."""
        outer = isinstance(factor, Outer) and factor.inputs.shape[1:3] == (1, 1)
        if not outer or factor.size < 8 or not factor.shape.numel():
            return None
        narrow = factor.size in _IN_FLOAT32
        first = products.exact_dtype(*factor.sides) if narrow else torch.float64
        for dtype in dict.fromkeys((first, torch.float64)):
            sides = (_mask(side[:, 0, 0].to(dtype), self.mask) for side in factor.sides)
            (a, b), size = sides, _at_least_one(self.count)
            mean, (a2, b2) = (b / size).mT @ a, (a.square(), b.square())
            sums = b2.mT @ a2
            squares = torch.addcmul(sums, mean * size, mean, value=-1)
            # It loses digits where the mean is larger, and at the ends of the range.
            info = torch.finfo(dtype)
            lows = [
                torch.where(side == 0, 1.0, square).amin()
                for side, square in ((a, a2), (b, b2))
            ]
            smallest = torch.where(sums == 0, 1.0, sums).amin()
            lost = torch.sub(squares, sums, alpha=_LOST[dtype]).amin()
            fine = (smallest > info.tiny / info.eps**2) & (sums.sum() < torch.inf)
            fine &= torch.minimum(*lows) >= info.tiny
            # A product may be zero by underflow, if not for lack of one in common.
            fine &= (sums != 0).all() | (lows[0] * lows[1] >= info.tiny)
            if not occurs(~(fine & (lost >= 0))):
                return size, {"": mean}, {"": squares}
        return None


def _formed(factor: Factor, keep: Tensor | None) -> tuple[Any, Params, Params]:
    """Return how many gradients count, their means and sums of squared deviations."""
    # Two passes, since the difference of two large sums has no digits left where
    # the deviations are small. Some columns at a time are wide, so that they stay
    # in the processor's cache.
    flat = factor.grad().reshape(factor.size, math.prod(factor.shape))
    count = _counted(factor.size, keep)
    means, squares = [], []
    for columns in flat.split(max(1, _WIDENED // factor.size), dim=1):
        wide = _mask(double(columns), keep)
        means.append(wide.sum(0) / _at_least_one(count))
        rest = _mask(wide - means[-1], keep)
        squares.append((rest * rest.conj()).real.sum(0))
    return count, {"": torch.cat(means)}, {"": torch.cat(squares)}


def _counted(size: int, keep: Tensor | None) -> Tensor | int:
    return size if keep is None else keep.sum(dtype=torch.float64)


def _at_least_one(count: Any) -> Any:
    """Return the divisor of a mean; a chunk without samples adds zero."""
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def _mask(rows: Tensor, keep: Tensor | None) -> Tensor:
    return rows if keep is None else torch.where(keep[:, None], rows, 0)


class _Merged(Join):
    """How many gradients count, their means and sums of squared deviations."""

    def __init__(self) -> None:
        self.value: tuple[Any, Params, Params] = (0, {}, {})

    def add(self, value: tuple, rows: Sequence[int], size: int) -> None:
        self.value = _joined(*self.value, *value)

    def reduce(self, reduce: Reduce, call: Call) -> None:
        size, means, squares = self.value
        means = means or map_values(torch.zeros_like, _undefined(call.params))
        squares = squares or map_values(_squared, means)
        means, squares = (map_values(double, values) for values in (means, squares))
        size = torch.as_tensor(size, dtype=torch.float64, device=call.device)
        self.value = _of_all_ranks(size, means, squares, reduce)


class MomentsOfGrads(Quantity):
    """Means and sums of squared deviations, merged over chunks."""

    def joins(self) -> dict[str, Join]:
        return {"moments": _Merged()}

    def collector(self, call: Call) -> _Moments:
        return _Moments(_counted(call.batch.size, call.mask), call.mask)

    def partial(self, collector: _Moments, call: Call) -> dict[str, Any]:
        return {"moments": (collector.count, collector.means, collector.squares)}

    def total(self, parts: Joined) -> GradientMoments:
        size, means, squares = parts.values["moments"]
        params, losses = parts.call.params, parts.losses
        if not means:
            means = _undefined(params)
            squares = map_values(_squared, means)
        # 0 / 0 is NaN where there are too few samples.
        rest = torch.as_tensor(size - 1, dtype=torch.float64).clamp(min=0)
        trace = square = losses.new_zeros((), dtype=torch.float64)
        moments = GradientMoments({}, {}, {}, trace, {}, losses, trace, square)
        for name, value in params.items():
            mean, deviations = means.pop(name), squares.pop(name)
            if isinstance(size, Tensor):  # of a mask, which may leave none
                mean = torch.where(size > 0, mean, torch.nan)
            signal, variance = _squared(mean), deviations / rest
            trace = trace + variance.sum(dtype=torch.float64)
            square = square + signal.sum(dtype=torch.float64)
            dtype = wide(value.dtype)
            real = dtype.to_real()
            moments.mean[name] = mean.to(dtype)
            moments.variance[name] = variance.to(real)
            moments.second_moment[name] = (deviations / size).add_(signal).to(real)
            moments.signal_to_noise[name] = signal.div_(variance).to(real)
        square = square - trace / size
        scale = (trace / square).to(parts.call.dtype)
        return moments._replace(noise_scale=scale, trace=trace, squared_norm=square)

    def mapped(self, function: Any, value: GradientMoments) -> GradientMoments:
        return value._replace(losses=function(value.losses))


Sides = dict[str, tuple[Tensor | None, Tensor | None]]
"""Matrices on both sides of each gradient, None for the identity."""


Pairs = dict[str, tuple[str, ...]]
"""The names of a weight and a bias that is a column of it, by either of them."""


@dataclass
class _Blocks(Collector):
    call: Call
    pairs: Pairs
    compute: Callable[[str, Factor], dict[str, Any]]
    values: dict[str, Any] = field(default_factory=dict, init=False)
    _pending: dict[str, Factor] = field(default_factory=dict, init=False)

    def add(self, name: str, factor: Factor) -> None:
        names, scale = self.pairs.get(name, (name,)), 1.0
        if isinstance(factor, Scaled):  # the values are quadratic
            factor, scale = factor.factor, double(factor.scale).square()
        self._pending[name] = factor if self.call.columns else Columns.one(factor)
        if all(partner in self._pending for partner in names):
            factors = [self._pending.pop(partner) for partner in names]
            factor = Appended(*factors) if factors[1:] else factors[0]
            for key, value in self.compute(names[0], factor).items():
                value = value if value is None else value / scale
                previous = self.values.get(key)
                self.values[key] = value if previous is None else previous + value


class OfBlocks(Quantity):
    """A quantity of the factors [B, K, O, I] of blocks of one or two parameters."""

    pairs: Pairs

    def of_block(self, name: str, factor: Factor) -> dict[str, Any]:
        """Return values of a block by the name of its first parameter, or to add up."""
        raise NotImplementedError

    def collector(self, call: Call) -> _Blocks:
        return _Blocks(call, self.pairs, self.of_block)

    def partial(self, collector: _Blocks, call: Call) -> dict[str, Any]:
        return {"values": collector.values}


@dataclass(frozen=True)
class Squares(OfBlocks):
    """Sums of squares of `left^T G right` over samples and columns, {name: [O, I]}."""

    sides: Sides = field(default_factory=dict)
    pairs: Pairs = field(default_factory=dict)

    def joins(self) -> dict[str, Join]:
        return {"values": Summed()}

    def of_block(self, name: str, factor: Factor) -> Params:
        return {name: squares(factor, *self.sides.get(name, ()))}

    def total(self, parts: Joined) -> Params:
        return parts.values["values"]

    def mapped(self, function: Any, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class InnerProducts(OfBlocks):
    """Inner products of `left^T G right` between the columns of a sample, [B, K, K].

    Each of the [O, I] products of a parameter has its weight, {name: [O, I]}.
    """

    sides: Sides
    pairs: Pairs
    weights: Params

    def of_block(self, name: str, factor: Factor) -> Params:
        return {"": inner_products(factor, *self.sides[name], self.weights[name])}

    def total(self, parts: Joined) -> Tensor:
        if (products := parts.values["values"]) is None:
            return parts.losses.double().view(0, 1, 1)
        return products[""]


def _joined(
    size: Any, means: Params, squares: Params, more: Any, others: Params, added: Params
) -> tuple[Any, Params, Params]:
    """Join the moments of two parts by the formula of Chan, Golub and LeVeque."""
    if not means:
        return more, others, added
    total = size + more
    divisor = _at_least_one(total)
    for name in means:
        shift = double(others.pop(name)) - double(means[name])
        between = _squared(shift) * (size * more / divisor)
        squares[name] = double(squares[name]) + added.pop(name) + between
        means[name] = means[name] + shift * (more / divisor)
    return total, means, squares


def _of_all_ranks(
    size: Tensor, means: Params, squares: Params, reduce: Reduce
) -> tuple[Tensor, Params, Params]:
    """Join the moments of all ranks, by sums over them."""
    total = reduce({"": size})[""]
    joint = reduce(map_values(lambda mean: mean * (size / total), means))
    shifts = map_values(torch.sub, means, joint)
    between = map_values(lambda shift: size * _squared(shift), shifts)
    return total, joint, reduce(map_values(torch.add, squares, between))


def _squared(tensor: Tensor) -> Tensor:
    return (tensor * tensor.conj()).real


def _undefined(params: Params) -> Params:
    def undefined(value: Tensor) -> Tensor:
        dtype = promoted(value.dtype, torch.float64)
        return torch.full_like(value, torch.nan, dtype=dtype, requires_grad=False)

    return map_values(undefined, params)

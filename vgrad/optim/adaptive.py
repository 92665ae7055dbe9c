"""Gradients over the root of past squares: AdaGrad, RMSprop, AdaDelta and Adafactor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vgrad.optim.arithmetic import (
    Number,
    Rate,
    counter,
    filled,
    is_zero,
    lerp,
    map_grads,
    mean_of_squares,
    norm,
    over_root,
    plus,
    rate_at,
    root,
    scalar,
)
from vgrad.optim.base import (
    GradientTransformation,
    State,
    chain,
    check_numbers,
    check_shares,
    per_parameter,
    required,
)
from vgrad.optim.clipping import clip_by_block_rms
from vgrad.optim.sgd import trace
from vgrad.optim.transforms import ascent, descent
from vgrad.torch_private import shards
from vgrad.tree import widened


def scale_by_rss(
    initial_accumulator_value: Number = 0.0, eps: Number = 1e-10
) -> GradientTransformation:
    """Divide gradients by the root of the sum of all their squares, as in `adagrad`."""

    def rule(g, total):
        total = plus(widened(g).square().to(total.dtype), 1, total)
        return over_root(g, total, eps), total

    slots = {"sum": initial_accumulator_value}
    return per_parameter("scale_by_rss", slots, lambda count: rule)


def scale_by_rms(alpha: Number = 0.99, eps: Number = 1e-8) -> GradientTransformation:
    """Divide gradients by the root of the mean of their squares, as in `rmsprop`."""

    def rule(g, square):
        square = mean_of_squares(square, g, alpha)
        return over_root(g, square, eps), square

    return per_parameter("scale_by_rms", {"square_avg": 0}, lambda count: rule)


def scale_by_stddev(alpha: Number = 0.99, eps: Number = 1e-8) -> GradientTransformation:
    """Divide by the standard deviation over the steps, as in `rmsprop`, `centered`."""

    def rule(g, square, mean):
        square = mean_of_squares(square, g, alpha)
        mean = lerp(mean, g, 1 - alpha)
        return over_root(g, square - mean * mean, eps), square, mean

    slots = {"square_avg": 0, "grad_avg": 0}
    return per_parameter("scale_by_stddev", slots, lambda count: rule)


def scale_by_adadelta(rho: Number = 0.9, eps: Number = 1e-6) -> GradientTransformation:
    """Scale gradients to the size of earlier directions, as in `adadelta`."""

    def rule(g, square, delta):
        square = mean_of_squares(square, g, rho)
        least = scalar(eps, square)
        update = root(delta + least) / root(square + least) * g.to(square.dtype)
        return update, square, mean_of_squares(delta, update, rho)

    slots = {"square_avg": 0, "acc_delta": 0}
    return per_parameter("scale_by_adadelta", slots, lambda count: rule)


def adagrad(
    lr: Rate = 1e-2,
    *,
    lr_decay: Number = 0.0,
    weight_decay: Number = 0.0,
    initial_accumulator_value: Number = 0.0,
    eps: Number = 1e-10,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient over the root of the sum of all its squares.

    `g += weight_decay * p; s += g * g`, then, with the number `t` of steps taken
    before, `p -= lr / (1 + t * lr_decay) * g / (sqrt(s) + eps)`. State: one tensor per
    parameter.

    Reference: Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 12 (2011).
    """
    decays = {"lr_decay": lr_decay, "weight_decay": weight_decay}
    first = {"initial_accumulator_value": initial_accumulator_value}
    check_numbers("adagrad", lr, **decays, **first, eps=eps)

    def decaying(count):
        return rate_at(lr, count) / (1 + count.double() * lr_decay)

    sums = scale_by_rss(initial_accumulator_value, eps)
    rate = lr if is_zero(lr_decay) else decaying
    return descent(rate, sums, weight_decay=weight_decay, maximize=maximize)


def adadelta(
    lr: Rate = 1.0,
    *,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient, scaled to the size of earlier steps.

    `g += weight_decay * p`, then `p -= lr * g * sqrt(d + eps) / sqrt(v + eps)` with the
    mean squares, of decay `rho`, `d` of the directions before and `v` of the gradients.
    State: two tensors per parameter.

    Reference: Zeiler, arXiv 1212.5701.
    """
    check_numbers("adadelta", lr, eps=eps, weight_decay=weight_decay)
    check_shares("adadelta", one=True, rho=rho)
    scaled = scale_by_adadelta(rho, eps)
    return descent(lr, scaled, weight_decay=weight_decay, maximize=maximize)


def rmsprop(
    lr: Rate = 1e-2,
    *,
    alpha: Number = 0.99,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum: Number = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient over the root of its mean square.

    `g += weight_decay * p`, then `p -= lr * g / (sqrt(v) + eps)` with the mean `v` of
    `g * g` of decay `alpha`, without correction, less the square of the mean of `g` if
    `centered`. A variance that rounding makes negative counts as zero, where torch
    gives NaN. With momentum, the quotients add up as
    `b = momentum * b + g / (sqrt(v) + eps); p -= lr * b`. State: one tensor per
    parameter, and one more for each of both options.

    Reference: Tieleman and Hinton, lecture 6.5, 2012; Graves, arXiv 1308.0850, for the
    centered form.
    """
    check_numbers("rmsprop", lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_shares("rmsprop", one=True, alpha=alpha)
    moments = scale_by_stddev if centered else scale_by_rms
    scaled = (moments(alpha, eps), trace(momentum))
    return descent(lr, *scaled, weight_decay=weight_decay, maximize=maximize)


def scale_by_factored_rms(
    beta2_decay: Number = -0.8, eps: Number | None = None
) -> GradientTransformation:
    """Divide gradients by the root of a mean square kept as a row and a column.

    See `adafactor`. Parameters of many members go through `torch.vmap`: stacked, they
    would be taken for larger tensors.
    """

    def start(dim):
        def mean(param):
            if param.ndim < 2:
                return None
            shape = [*param.shape]
            shape[dim] = 1
            return filled(_shard(param.new_empty(shape), param, dim))

        return mean

    def at(count):
        share = count.double() ** beta2_decay

        def rule(g, row, column, whole):
            square = widened(g).square()
            if row is not None:
                row = lerp(row, _mean(square, -1), share)
                column = lerp(column, _mean(square, -2), share)
                least = _least(eps, row)
                mean = row * column / row.mean(-2, keepdim=True).clamp_min(least)
            else:
                mean = whole = lerp(whole, square, share)
                least = _least(eps, whole)
            update = widened(g) * mean.clamp_min(least * least).rsqrt()
            update = shards.placed(update, g) if shards.is_distributed(g) else update
            return update, row, column, whole

        return rule

    def variance(param):
        return filled(param) if param.ndim < 2 else None

    slots = {"row_var": start(-1), "col_var": start(-2), "variance": variance}
    return per_parameter("scale_by_factored_rms", slots, at)


def _mean(square: Tensor, dim: int) -> Tensor:
    """Return the mean over a dimension; over one of no length it is zero."""
    mean = square.sum(dim, keepdim=True) / max(square.shape[dim], 1)
    return _shard(mean, square, dim)


def _shard(mean: Tensor, square: Tensor, dim: int) -> Tensor:
    """Shard a mean over a dimension as the squares are sharded.

    torch would shard some of one row along their columns, or replicate them.
    """
    return shards.reduced(mean, square, dim) if shards.is_distributed(square) else mean


def _least(eps: Number | None, like: Tensor) -> Any:
    """Return the smallest root of a mean square, whose square is a normal number."""
    finite = torch.finfo(like.dtype)
    least = scalar(finite.eps if eps is None else eps, like)
    tiny = finite.tiny**0.5
    return least.clamp_min(tiny) if isinstance(least, Tensor) else max(least, tiny)


def adafactor(
    lr: Rate = 1e-2,
    *,
    beta2_decay: Number = -0.8,
    eps: tuple[Number | None, Number] = (None, 1e-3),
    d: Number = 1.0,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by a share of the size of each parameter, with almost no state.

    `p -= lr * weight_decay * p + min(lr, 1 / sqrt(t)) * max(eps[1], rms(p)) * u` at
    step `t`, with `u = g / max(sqrt(v), eps[0])` divided by `max(1, rms(u) / d)`. With
    `b = 1 - t ** beta2_decay`, both `row = b * row + (1 - b) * mean(g * g, -1)` and
    `column`, over dimension -2, are moving averages, and
    `v = row * column / max(mean(row), eps[0])`. Tensors of fewer than two dimensions
    keep `v` whole. `eps[0]=None` is the resolution of their dtype. State: n + m numbers
    for a matrix of n by m.

    Reference: Shazeer and Stern, arXiv 1804.04235; as in `torch.optim.Adafactor`, with
    means instead of sums, and `eps` as a bound instead of a term added to the squares.
    """
    floors = {"eps[0]": 0.0 if eps[0] is None else eps[0], "eps[1]": eps[1]}
    check_numbers("adafactor", lr, **floors, weight_decay=weight_decay)
    if not isinstance(beta2_decay, Tensor) and not beta2_decay <= 0:
        raise ValueError(
            f"adafactor(beta2_decay={beta2_decay!r}): expected beta2_decay <= 0."
        )
    if not isinstance(d, Tensor) and not d >= 1:
        raise ValueError(f"adafactor(d={d!r}): expected d >= 1.")

    def by_size(grads, state, params=None):
        params = required("adafactor", params, grads)
        count = state.count + 1
        rate = rate_at(lr, state.count)
        bound = count.double().rsqrt()
        bound = bound.clamp_max(scalar(rate, bound))

        def descend(grad, param):
            grad, param = widened(grad), widened(param)
            rms = norm(param) / max(param.numel(), 1) ** 0.5
            size = rms.clamp_min(scalar(eps[1], rms)) * scalar(bound, rms)
            decay = scalar(rate, param) * scalar(weight_decay, param)
            return -(size * grad + decay * param)

        return map_grads(descend, grads, params), State(count, {})

    return chain(
        *ascent(maximize),
        scale_by_factored_rms(beta2_decay, eps[0]),
        clip_by_block_rms(d),
        GradientTransformation(lambda params: State(counter(params), {}), by_size),
    )

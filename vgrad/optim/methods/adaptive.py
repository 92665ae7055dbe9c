"""Gradients over the root of their past squares: AdaGrad, RMSprop and AdaDelta."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from vgrad.optim.arguments import (
    Number,
    check_numbers,
    check_shares,
    is_zero,
    rate_at,
)
from vgrad.optim.arithmetic import (
    blend,
    blend_squares,
    filled,
    lerp,
    map_grads,
    of_history,
    root,
    scalar,
    squared,
    zeros,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.optim.methods.sgd import trace
from vgrad.optim.transforms import descent
from vgrad.tree import map_values
from vgrad.typing import Params, Schedule


class RssState(NamedTuple):
    """State of `scale_by_rss`: the sum of the squared gradients."""

    total: Params


class RmsState(NamedTuple):
    """State of `scale_by_rms`: the mean of the squared gradients."""

    square: Params


class StddevState(NamedTuple):
    """State of `scale_by_stddev`: the means of the gradients and of their squares."""

    mean: Params
    square: Params


class AdadeltaState(NamedTuple):
    """State of `scale_by_adadelta`: the means of squared gradients and directions."""

    square: Params
    moved: Params


def scale_by_rss(
    initial_accumulator_value: Number = 0.0, eps: Number = 1e-10
) -> GradientTransformation:
    """Divide gradients by the root of the sum of all squared gradients so far.

    `s = s + g * g` from `initial_accumulator_value`; the update is
    `g / (sqrt(s) + eps)`. State: one tensor of the size of each parameter.

    Example:
        >>> rss, grads = scale_by_rss(), {"w": torch.tensor([3.0, -0.1])}
        >>> updates, state = rss.update(grads, rss.init(grads))
        >>> updates, state.total
        ({'w': tensor([ 1., -1.])}, {'w': tensor([9.0000, 0.0100])})
    """

    def start(params: Params) -> RssState:
        return RssState(filled(params, initial_accumulator_value))

    def move(grads: Grads, state: RssState) -> tuple[Updates, RssState]:
        total = blend(state.total, 1, squared(grads), 1)
        return map_grads(_divided(eps), grads, total), RssState(total)

    return of_history("scale_by_rss", start, move)


def scale_by_rms(alpha: Number = 0.99, eps: Number = 1e-8) -> GradientTransformation:
    """Divide gradients by the root of the mean of their squares.

    `v = alpha * v + (1 - alpha) * g * g` from zero and without correction; the update
    is `g / (sqrt(v) + eps)`. State: one tensor of the size of each parameter.

    Example:
        >>> rms, grads = scale_by_rms(0.75), {"w": torch.tensor([3.0, -0.1])}
        >>> rms.update(grads, rms.init(grads))[0]
        {'w': tensor([ 2.0000, -2.0000])}
    """

    def move(grads: Grads, state: RmsState) -> tuple[Updates, RmsState]:
        square = blend_squares(state.square, alpha, grads)
        return map_grads(_divided(eps), grads, square), RmsState(square)

    return of_history("scale_by_rms", lambda params: RmsState(zeros(params)), move)


def scale_by_stddev(alpha: Number = 0.99, eps: Number = 1e-8) -> GradientTransformation:
    """Divide gradients by their standard deviation, estimated over the steps.

    With the means `m` of the gradients and `v` of their squares, both with the decay
    `alpha` and without correction, the update is `g / (sqrt(v - m * m) + eps)`. A
    variance that rounding makes negative counts as zero, where torch gives NaN. State:
    two tensors of the size of each parameter.

    Example:
        >>> stddev, grads = scale_by_stddev(0.5), {"w": torch.tensor([3.0, -0.1])}
        >>> stddev.update(grads, stddev.init(grads))[0]
        {'w': tensor([ 2.0000, -2.0000])}
    """

    def start(params: Params) -> StddevState:
        return StddevState(zeros(params), zeros(params))

    def move(grads: Grads, state: StddevState) -> tuple[Updates, StddevState]:
        mean = lerp(state.mean, grads, 1 - alpha)
        square = blend_squares(state.square, alpha, grads)
        variance = map_values(lambda m, v: v - m * m, mean, square)
        updates = map_grads(_divided(eps), grads, variance)
        return updates, StddevState(mean, square)

    return of_history("scale_by_stddev", start, move)


def scale_by_adadelta(rho: Number = 0.9, eps: Number = 1e-6) -> GradientTransformation:
    """Scale gradients to the size of earlier directions.

    With the mean `v` of the squared gradients and the mean `d` of the squared
    directions before this one, both with the decay `rho`, the direction is
    `g * sqrt(d + eps) / sqrt(v + eps)`. State: two tensors of the size of each
    parameter.

    Example:
        >>> adadelta, grads = scale_by_adadelta(0.75), {"w": torch.tensor([3.0, -3.0])}
        >>> adadelta.update(grads, adadelta.init(grads))[0]
        {'w': tensor([ 0.0020, -0.0020])}
    """

    def start(params: Params) -> AdadeltaState:
        return AdadeltaState(zeros(params), zeros(params))

    def move(grads: Grads, state: AdadeltaState) -> tuple[Updates, AdadeltaState]:
        square = blend_squares(state.square, rho, grads)

        def direction(grad: Tensor, v: Tensor, d: Tensor) -> Tensor:
            least = scalar(eps, v)
            return root(d + least) / root(v + least) * grad.to(v.dtype)

        updates = map_grads(direction, grads, square, state.moved)
        moved = blend_squares(state.moved, rho, updates)
        return updates, AdadeltaState(square, moved)

    return of_history("scale_by_adadelta", start, move)


def adagrad(
    lr: Number | Schedule = 1e-2,
    *,
    lr_decay: Number = 0.0,
    weight_decay: Number = 0.0,
    initial_accumulator_value: Number = 0.0,
    eps: Number = 1e-10,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient over the root of the sum of all its squares.

    `g += weight_decay * p; s += g * g`, then, with the number `t` of steps taken
    before, `p -= lr / (1 + t * lr_decay) * g / (sqrt(s) + eps)`. State: one tensor of
    the size of each parameter.

    Reference: Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization, JMLR 12 (2011).

    Example:
        >>> tx, params = adagrad(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers(
        "adagrad",
        lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        initial_accumulator_value=initial_accumulator_value,
        eps=eps,
    )

    def decaying(count: Tensor) -> Tensor:
        return rate_at(lr, count) / (1 + count.double() * lr_decay)

    sums = scale_by_rss(initial_accumulator_value, eps)
    rate = lr if is_zero(lr_decay) else decaying
    return descent(rate, sums, weight_decay=weight_decay, maximize=maximize)


def adadelta(
    lr: Number | Schedule = 1.0,
    *,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient, scaled to the size of earlier steps.

    `g += weight_decay * p`, then `p -= lr * g * sqrt(d + eps) / sqrt(v + eps)` with
    the mean squares `d` of the directions and `v` of the gradients. State: two tensors
    of the size of each parameter.

    Raises:
        ValueError: rho is above one.

    Reference: Zeiler, arXiv 1212.5701.

    Example:
        >>> tx, params = adadelta(rho=0.75), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.0020, -0.0020])}
    """
    check_numbers("adadelta", lr, eps=eps, weight_decay=weight_decay)
    check_shares("adadelta", one=True, rho=rho)
    scaled = scale_by_adadelta(rho, eps)
    return descent(lr, scaled, weight_decay=weight_decay, maximize=maximize)


def rmsprop(
    lr: Number | Schedule = 1e-2,
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
    `g * g`, less the square of the mean of `g` if `centered`. With momentum, the
    quotients add up as `b = momentum * b + g / (sqrt(v) + eps); p -= lr * b`. State:
    one tensor of the size of each parameter, and one more for each of both options.

    Raises:
        ValueError: alpha is above one.

    Reference: Tieleman and Hinton, RMSprop, lecture 6.5 of Neural Networks for Machine
    Learning, 2012; Graves, arXiv 1308.0850, for the centered form.

    Example:
        >>> tx, params = rmsprop(0.1, alpha=0.75), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.2000, -0.2000])}
    """
    check_numbers("rmsprop", lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_shares("rmsprop", one=True, alpha=alpha)
    moments = scale_by_stddev if centered else scale_by_rms
    scaled = (moments(alpha, eps), trace(momentum))
    return descent(lr, *scaled, weight_decay=weight_decay, maximize=maximize)


def _divided(eps: Number) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the function that divides a gradient by the root of its square, plus eps."""
    return lambda grad, square: (
        grad.to(square.dtype) / (root(square) + scalar(eps, square))
    )

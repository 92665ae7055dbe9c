"""Directions scaled by the size of past gradients: AdaGrad, AdaDelta, RMSprop, Rprop.

Every number may also be a tensor without dimensions, which `torch.vmap` can batch and
gradients can flow to. Its value is then not checked. States are kept in
`promote_types(param dtype, float32)`, and an entry whose gradients were all zero has an
update of zero, for `eps=0` too.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Params | None`.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Number,
    blend,
    blend_squares,
    check_real,
    lerp,
    root,
    scalar,
    squared,
    zeros,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.tree import map_values
from vgrad.typing import Params


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


class RpropState(NamedTuple):
    """State of `scale_by_rprop`: the last gradients and the size of the next step."""

    previous: Params
    size: Params


def scale_by_rss(
    initial_accumulator_value: Number = 0.0, eps: Number = 1e-10
) -> GradientTransformation:
    """Divide gradients by the root of the sum of all squared gradients so far.

    `s = s + g * g` from `initial_accumulator_value`; the update is
    `g / (sqrt(s) + eps)`. State: one tensor of the size of each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization, JMLR 12 (2011).

    Example:
        >>> rss, grads = scale_by_rss(), {"w": torch.tensor([3.0, -0.1])}
        >>> updates, state = rss.update(grads, rss.init(grads))
        >>> updates, state.total
        ({'w': tensor([ 1., -1.])}, {'w': tensor([9.0000, 0.0100])})
    """

    def init(params: Params) -> RssState:
        check_real("scale_by_rss", params)
        start = zeros(params)
        return RssState(
            map_values(lambda z: z + scalar(initial_accumulator_value, z), start)
        )

    def update(
        grads: Grads, state: RssState, params: Params | None = None
    ) -> tuple[Updates, RssState]:
        checks.same_names("scale_by_rss(grads)", state.total, grads)
        total = blend(state.total, 1, squared(grads), 1)
        return map_values(_divider(eps), grads, total), RssState(total)

    return GradientTransformation(init, update)


def scale_by_rms(alpha: Number = 0.99, eps: Number = 1e-8) -> GradientTransformation:
    """Divide gradients by the root of the mean of their squares.

    `v = alpha * v + (1 - alpha) * g * g` from zero and without correction; the update
    is `g / (sqrt(v) + eps)`. State: one tensor of the size of each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Tieleman and Hinton, RMSprop, lecture 6.5 of Neural Networks for Machine
    Learning, 2012.

    Example:
        >>> rms, grads = scale_by_rms(0.75), {"w": torch.tensor([3.0, -0.1])}
        >>> rms.update(grads, rms.init(grads))[0]
        {'w': tensor([ 2.0000, -2.0000])}
    """

    def init(params: Params) -> RmsState:
        check_real("scale_by_rms", params)
        return RmsState(zeros(params))

    def update(
        grads: Grads, state: RmsState, params: Params | None = None
    ) -> tuple[Updates, RmsState]:
        checks.same_names("scale_by_rms(grads)", state.square, grads)
        square = blend_squares(state.square, alpha, grads)
        return map_values(_divider(eps), grads, square), RmsState(square)

    return GradientTransformation(init, update)


def scale_by_stddev(alpha: Number = 0.99, eps: Number = 1e-8) -> GradientTransformation:
    """Divide gradients by their standard deviation, estimated over the steps.

    With the means `m` of the gradients and `v` of their squares, both with the decay
    `alpha` and without correction, the update is `g / (sqrt(v - m * m) + eps)`. A
    variance that rounding makes negative counts as zero, where torch gives NaN. State:
    two tensors of the size of each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Graves, Generating Sequences With Recurrent Neural Networks,
    arXiv 1308.0850.

    Example:
        >>> stddev, grads = scale_by_stddev(0.5), {"w": torch.tensor([3.0, -0.1])}
        >>> stddev.update(grads, stddev.init(grads))[0]
        {'w': tensor([ 2.0000, -2.0000])}
    """

    def init(params: Params) -> StddevState:
        check_real("scale_by_stddev", params)
        return StddevState(zeros(params), zeros(params))

    def update(
        grads: Grads, state: StddevState, params: Params | None = None
    ) -> tuple[Updates, StddevState]:
        checks.same_names("scale_by_stddev(grads)", state.mean, grads)
        mean = lerp(state.mean, grads, 1 - alpha)
        square = blend_squares(state.square, alpha, grads)
        variance = map_values(lambda m, v: v - m * m, mean, square)
        updates = map_values(_divider(eps), grads, variance)
        return updates, StddevState(mean, square)

    return GradientTransformation(init, update)


def scale_by_adadelta(rho: Number = 0.9, eps: Number = 1e-6) -> GradientTransformation:
    """Scale gradients to the size that directions had before.

    With the mean `v` of the squared gradients and the mean `d` of the squared
    directions before this one, both with the decay `rho`, the direction is
    `g * sqrt(d + eps) / sqrt(v + eps)`. State: two tensors of the size of each
    parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Zeiler, ADADELTA: An Adaptive Learning Rate Method, arXiv 1212.5701.

    Example:
        >>> adadelta, grads = scale_by_adadelta(0.75), {"w": torch.tensor([3.0, -3.0])}
        >>> adadelta.update(grads, adadelta.init(grads))[0]
        {'w': tensor([ 0.0020, -0.0020])}
    """

    def init(params: Params) -> AdadeltaState:
        check_real("scale_by_adadelta", params)
        return AdadeltaState(zeros(params), zeros(params))

    def update(
        grads: Grads, state: AdadeltaState, params: Params | None = None
    ) -> tuple[Updates, AdadeltaState]:
        checks.same_names("scale_by_adadelta(grads)", state.square, grads)
        square = blend_squares(state.square, rho, grads)

        def direction(grad: Tensor | None, v: Tensor, d: Tensor) -> Tensor | None:
            if grad is None:
                return None
            least = scalar(eps, v)
            return root(d + least) / root(v + least) * grad.to(v.dtype)

        updates = map_values(direction, grads, square, state.moved)
        moved = blend_squares(state.moved, rho, updates)
        return updates, AdadeltaState(square, moved)

    return GradientTransformation(init, update)


def scale_by_rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
) -> GradientTransformation:
    """Replace gradients by their signs, times a size that each entry adapts by itself.

    The size starts at `lr`. It grows by the factor `etas[1]` where the sign is that of
    the step before and shrinks by `etas[0]` where it is the other one; in the latter
    case the entry stays for this step and counts as zero in the next. Sizes are kept
    within `step_sizes`. No gradient flows through a sign. State: two tensors of the
    size of each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation
    Learning: The RPROP Algorithm, ICNN 1993.

    Example:
        >>> rprop, grads = scale_by_rprop(0.5), {"w": torch.tensor([3.0, -0.1])}
        >>> updates, state = rprop.update(grads, rprop.init(grads))
        >>> updates, rprop.update({"w": torch.tensor([3.0, 0.1])}, state)[0]
        ({'w': tensor([ 0.5000, -0.5000])}, {'w': tensor([0.6000, 0.0000])})
    """
    shrink, grow = etas
    least, most = step_sizes

    def init(params: Params) -> RpropState:
        check_real("scale_by_rprop", params)
        start = zeros(params)
        return RpropState(start, map_values(lambda z: z + scalar(lr, z), start))

    def update(
        grads: Grads, state: RpropState, params: Params | None = None
    ) -> tuple[Updates, RpropState]:
        checks.same_names("scale_by_rprop(grads)", state.size, grads)

        def resize(grad: Tensor | None, before: Tensor, size: Tensor) -> Tensor:
            if grad is None:
                return size
            agreement = (grad.to(size.dtype) * before).sign()
            grown = torch.where(agreement > 0, scalar(grow, size) * size, size)
            moved = torch.where(agreement < 0, scalar(shrink, size) * size, grown)
            low: Any = scalar(least, size)
            high: Any = scalar(most, size)
            # One bound at a time: one may be a number and the other a tensor.
            return moved.clamp(min=low).clamp(max=high)

        def keep(grad: Tensor | None, before: Tensor) -> Tensor:
            if grad is None:
                return before
            grad = grad.to(before.dtype)
            return grad.masked_fill((grad * before).sign() < 0, 0)

        def direction(grad: Tensor | None, kept: Tensor, size: Tensor) -> Tensor | None:
            return None if grad is None else kept.sign() * size

        size = map_values(resize, grads, state.previous, state.size)
        kept = map_values(keep, grads, state.previous)
        return map_values(direction, grads, kept, size), RpropState(kept, size)

    return GradientTransformation(init, update)


def _divider(eps: Number) -> Callable[[Tensor | None, Tensor], Tensor | None]:
    """Make the function that divides a gradient by the root of its square, plus eps."""

    def divide(grad: Tensor | None, square: Tensor) -> Tensor | None:
        if grad is None:
            return None
        return grad.to(square.dtype) / (root(square) + scalar(eps, square))

    return divide

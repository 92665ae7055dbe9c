"""The transformations that optimizers are chains of.

Every number may also be a tensor without dimensions, which `torch.vmap` can batch and
gradients can flow to. Its value is then not checked.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Params | None`.
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Number,
    blend,
    blend_squares,
    check_real,
    counter,
    is_zero,
    lerp,
    placed,
    plus,
    root,
    scalar,
    zeros,
)
from vgrad.optim.base import (
    GradientTransformation,
    Grads,
    Updates,
    cast,
    chain,
    widened,
)
from vgrad.optim.grouping import Selection, check_selection, masked
from vgrad.tree import map_values
from vgrad.typing import Params, Schedule, Tree


class TraceState(NamedTuple):
    """State of `trace`: the number of steps taken and the momentum."""

    count: Tensor
    momentum: Params


class AdamState(NamedTuple):
    """State of `scale_by_adam`: the number of steps taken and both moments."""

    count: Tensor
    mean: Params
    square: Params


class ScheduleState(NamedTuple):
    """State of `scale_by_learning_rate` with a schedule: the number of steps taken."""

    count: Tensor


def add_decayed_weights(
    weight_decay: Number, *, mask: Selection | None = None
) -> GradientTransformation:
    """Add the parameters, times a factor, to the gradients: `g + weight_decay * p`.

    Before the moments of an optimizer this is a penalty of the squared norm, after them
    it is decoupled weight decay. A decay of the number zero is the identity and needs
    no parameters. There is no state. The result is in `promote_types(dtype, float32)`.

    `mask` says which parameters decay: a list or tuple of patterns of their names, or a
    function of the name. Gradients of all others pass unchanged.

    Raises:
        TypeError: the mask is neither.
        ValueError: when updating, if no parameters are given; in `init`, a pattern of
            the mask matches no parameter.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization,
    arXiv 1711.05101.

    Example:
        >>> decay = add_decayed_weights(0.5)
        >>> params = {"w": torch.tensor([2.0, 4.0])}
        >>> decay.update({"w": torch.zeros(2)}, decay.init(params), params)
        ({'w': tensor([1., 2.])}, ())
    """
    if mask is not None:
        check_selection("add_decayed_weights", "mask", mask)
    if is_zero(weight_decay):
        return chain()
    if mask is not None:
        return masked(add_decayed_weights(weight_decay), mask)

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        if params is None:
            raise ValueError(
                "add_decayed_weights(params=None): expected the parameters, got none. "
                "Call update(grads, state, params)."
            )
        checks.same_names("add_decayed_weights(grads)", params, grads)

        def decay(grad: Tensor | None, param: Tensor) -> Tensor | None:
            if grad is None:
                return None
            return plus(widened(grad), weight_decay, widened(param))

        return map_values(decay, grads, params), state

    return GradientTransformation(lambda params: (), update)


def trace(
    momentum: Number, *, dampening: Number = 0.0, nesterov: bool = False
) -> GradientTransformation:
    """Replace gradients by their decaying sum, as `torch.optim.SGD` does.

    `b = momentum * b + (1 - dampening) * g`, where the first step takes `b = g`; the
    update is `b`, or `g + momentum * b` for `nesterov`. A momentum of the number zero
    is the identity. The sum is kept in `promote_types(param dtype, float32)`.

    The first step is that of the transformation: a parameter whose first gradient comes
    later is dampened, where `torch.optim.SGD` would not.

    Reference: Sutskever et al., On the importance of initialization and momentum in
    deep learning, ICML 2013.

    Example:
        >>> heavy_ball = trace(0.5)
        >>> grads = {"w": torch.ones(2)}
        >>> updates, state = heavy_ball.update(grads, heavy_ball.init(grads))
        >>> heavy_ball.update(grads, state)[0]
        {'w': tensor([1.5000, 1.5000])}
    """
    if is_zero(momentum):
        return chain()

    def init(params: Params) -> TraceState:
        return TraceState(counter(params), zeros(params))

    def update(
        grads: Grads, state: TraceState, params: Params | None = None
    ) -> tuple[Updates, TraceState]:
        checks.same_names("trace(grads)", state.momentum, grads)
        taken: Number = 1
        if not is_zero(dampening):
            # As for the number zero, no momentum is no dampening.
            dampened = (state.count > 0) & (momentum != 0)
            taken = 1 - dampening * dampened.double()
        sums = blend(state.momentum, momentum, grads, taken)

        def direction(grad: Tensor | None, total: Tensor) -> Tensor | None:
            if grad is None:
                return None
            if not nesterov:
                return total
            return plus(cast(grad, total.dtype), momentum, total)

        return map_values(direction, grads, sums), TraceState(state.count + 1, sums)

    return GradientTransformation(init, update)


def scale_by_adam(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean of the gradients by the root of the mean of their squares.

    With `m` and `v` the exponential moving averages of `g` and `g * g`, and `t` the
    number of the step, `m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)`. The
    moments are kept in `promote_types(param dtype, float32)`, twice the memory of the
    parameters in that dtype; the corrections are computed in float64.

    An entry whose gradients were all zero has an update of zero, for `eps=0` too where
    `torch.optim.Adam` gives NaN, and gradients through the update stay finite there.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization,
    arXiv 1412.6980.

    Example:
        >>> adam = scale_by_adam()
        >>> grads = {"w": torch.tensor([3.0, -0.1])}
        >>> adam.update(grads, adam.init(grads))[0]["w"].round(decimals=5)
        tensor([ 1., -1.])
    """
    beta1, beta2 = betas

    def init(params: Params) -> AdamState:
        check_real("scale_by_adam", params)
        return AdamState(counter(params), zeros(params), zeros(params))

    def update(
        grads: Grads, state: AdamState, params: Params | None = None
    ) -> tuple[Updates, AdamState]:
        checks.same_names("scale_by_adam(grads)", state.mean, grads)
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - beta1)
        square = blend_squares(state.square, beta2, grads)
        steps = count.double()
        # Both corrections go into the denominator, by which there are fewer passes.
        correction = 1 - beta1**steps
        factor = correction / (1 - beta2**steps).sqrt()
        least = correction * scalar(eps, correction)

        def direction(grad: Tensor | None, m: Tensor, v: Tensor) -> Tensor | None:
            if grad is None:
                return None
            return m / torch.addcmul(placed(least, v), root(v), placed(factor, v))

        updates = map_values(direction, grads, mean, square)
        return updates, AdamState(count, mean, square)

    return GradientTransformation(init, update)


def scale_by_learning_rate(rate: Number | Schedule) -> GradientTransformation:
    """Turn gradients into updates that descend: `-rate * g`.

    `rate` is a number, a tensor without dimensions, or a schedule: a function of the
    number of steps taken so far, an int64 tensor without dimensions that is zero at the
    first step. A schedule that wants float64 computes with `count.double()`. Only a
    schedule needs state. The result is in `promote_types(dtype, float32)`.

    Example:
        >>> descend = scale_by_learning_rate(lambda count: 1.0 / (count + 1))
        >>> grads = {"w": torch.ones(2)}
        >>> updates, state = descend.update(grads, descend.init(grads))
        >>> descend.update(grads, state)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """

    def scaled(grads: Grads, rate: Number) -> Updates:
        def scale(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            grad = widened(grad)
            return -scalar(rate, grad) * grad

        return map_values(scale, grads)

    if isinstance(rate, Tensor) or not callable(rate):
        return GradientTransformation(
            lambda params: (),
            lambda grads, state, params=None: (scaled(grads, rate), state),
        )

    def init(params: Params) -> ScheduleState:
        return ScheduleState(counter(params))

    def update(
        grads: Grads, state: ScheduleState, params: Params | None = None
    ) -> tuple[Updates, ScheduleState]:
        return scaled(grads, rate(state.count)), ScheduleState(state.count + 1)

    return GradientTransformation(init, update)

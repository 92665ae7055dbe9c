"""Directions that the other optimizers of the Adam family take from their moments.

Every number may also be a tensor without dimensions, which `torch.vmap` can batch and
gradients can flow to. Its value is then not checked. Moments are kept in
`promote_types(param dtype, float32)`, bias corrections are computed in float64, and an
entry whose gradients were all zero has an update of zero, for `eps=0` too.
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
    blend_squares,
    check_real,
    counter,
    lerp,
    root,
    scalar,
    zeros,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.optim.transforms import AdamState
from vgrad.tree import map_values
from vgrad.typing import Params


class AmsgradState(NamedTuple):
    """State of `scale_by_amsgrad`: that of Adam and the largest second moments."""

    count: Tensor
    mean: Params
    square: Params
    largest: Params


class NadamState(NamedTuple):
    """State of `scale_by_nadam`: that of Adam and the product of all momenta."""

    count: Tensor
    product: Tensor
    mean: Params
    square: Params


class AdamaxState(NamedTuple):
    """State of `scale_by_adamax`: steps taken, first moment and decaying maximum."""

    count: Tensor
    mean: Params
    largest: Params


def scale_by_amsgrad(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean of the gradients by the root of their largest mean square.

    This is `scale_by_adam` with the entrywise maximum of all second moments so far,
    taken before the correction as torch does, in the place of the last one. State:
    three tensors of the size of each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Reddi et al., On the Convergence of Adam and Beyond, arXiv 1904.09237.

    Example:
        >>> amsgrad = scale_by_amsgrad((0.0, 0.5))
        >>> grads = {"w": torch.tensor([4.0])}
        >>> updates, state = amsgrad.update(grads, amsgrad.init(grads))
        >>> for _ in range(9):
        ...     updates, state = amsgrad.update({"w": torch.zeros(1)}, state)
        >>> state.square, state.largest
        ({'w': tensor([0.0156])}, {'w': tensor([8.])})
    """
    beta1, beta2 = betas

    def init(params: Params) -> AmsgradState:
        check_real("scale_by_amsgrad", params)
        return AmsgradState(
            counter(params), zeros(params), zeros(params), zeros(params)
        )

    def update(
        grads: Grads, state: AmsgradState, params: Params | None = None
    ) -> tuple[Updates, AmsgradState]:
        checks.same_names("scale_by_amsgrad(grads)", state.mean, grads)
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - beta1)
        square = blend_squares(state.square, beta2, grads)
        largest = map_values(torch.maximum, state.largest, square)
        steps = count.double()
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps

        def direction(grad: Tensor | None, m: Tensor, v: Tensor) -> Tensor | None:
            if grad is None:
                return None
            size = root(v / scalar(correction2, v)) + scalar(eps, v)
            return m / scalar(correction1, m) / size

        updates = map_values(direction, grads, mean, largest)
        return updates, AmsgradState(count, mean, square, largest)

    return GradientTransformation(init, update)


def scale_by_nadam(
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    *,
    momentum_decay: Number = 4e-3,
) -> GradientTransformation:
    """Divide a look ahead of the mean gradient by the root of the mean square.

    With the moments `m` and `v` of Adam and the momentum of step `t`,
    `mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2)`, the numerator is
    `(1 - mu_t) * g / (1 - mu_1 ... mu_t) + mu_(t+1) * m / (1 - mu_1 ... mu_(t+1))`, the
    denominator `sqrt(v / (1 - beta2^t)) + eps`. State: two tensors of the size of each
    parameter, and the product of the momenta in float64. torch keeps the product in its
    default dtype; the numbers are the same where that is float64.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop.

    Example:
        >>> nadam = scale_by_nadam((0.0, 0.999))
        >>> grads = {"w": torch.tensor([3.0, -0.1])}
        >>> nadam.update(grads, nadam.init(grads))[0]
        {'w': tensor([ 1.0000, -1.0000])}
    """
    beta1, beta2 = betas

    def init(params: Params) -> NadamState:
        check_real("scale_by_nadam", params)
        count = counter(params)
        return NadamState(count, count.double() + 1, zeros(params), zeros(params))

    def momentum(steps: Tensor) -> Tensor:
        return beta1 * (1 - 0.5 * 0.96 ** (steps * momentum_decay))

    def update(
        grads: Grads, state: NadamState, params: Params | None = None
    ) -> tuple[Updates, NadamState]:
        checks.same_names("scale_by_nadam(grads)", state.mean, grads)
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - beta1)
        square = blend_squares(state.square, beta2, grads)
        steps = count.double()
        now, ahead = momentum(steps), momentum(steps + 1)
        product = state.product * now
        by_grad, by_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
        correction = 1 - beta2**steps

        def direction(grad: Tensor | None, m: Tensor, v: Tensor) -> Tensor | None:
            if grad is None:
                return None
            mixed = scalar(by_grad, m) * grad.to(m.dtype) + scalar(by_mean, m) * m
            return mixed / (root(v / scalar(correction, v)) + scalar(eps, v))

        updates = map_values(direction, grads, mean, square)
        return updates, NadamState(count, product, mean, square)

    return GradientTransformation(init, update)


def scale_by_radam(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean gradient by the root of the mean square where that is reliable.

    The number of gradients that the mean square stands for grows with the step `t` as
    `n = N - 2 * t * beta2^t / (1 - beta2^t)` towards `N = 2 / (1 - beta2) - 1`. While
    it is 5 or less the update is `m / (1 - beta1^t)`; then it is that times
    `r * sqrt(1 - beta2^t) / (sqrt(v) + eps)`, where `r` is the root of
    `(n - 4) * (n - 2) * N / ((N - 4) * (N - 2) * n)`. State: two tensors of the size of
    each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond,
    arXiv 1908.03265.

    Example:
        >>> radam = scale_by_radam()
        >>> grads = {"w": torch.tensor([3.0, -0.1])}
        >>> radam.update(grads, radam.init(grads))[0]
        {'w': tensor([ 3.0000, -0.1000])}
    """
    beta1, beta2 = betas

    def init(params: Params) -> AdamState:
        check_real("scale_by_radam", params)
        return AdamState(counter(params), zeros(params), zeros(params))

    def update(
        grads: Grads, state: AdamState, params: Params | None = None
    ) -> tuple[Updates, AdamState]:
        checks.same_names("scale_by_radam(grads)", state.mean, grads)
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - beta1)
        square = blend_squares(state.square, beta2, grads)
        steps = count.double()
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        limit = 2 / (1 - scalar(beta2, steps)) - torch.ones_like(steps)
        length = limit - 2 * steps * beta2**steps / correction2
        reliable = length > 5
        # Lengths for which all is finite, because gradients flow through both branches.
        n, most = torch.where(reliable, length, 6), torch.where(reliable, limit, 6)
        ratio = (n - 4) * (n - 2) * most / ((most - 4) * (most - 2) * n)
        rectified = torch.where(reliable, (ratio * correction2).sqrt(), 0)
        plain = torch.where(reliable, 0, torch.ones_like(ratio))

        def direction(grad: Tensor | None, m: Tensor, v: Tensor) -> Tensor | None:
            if grad is None:
                return None
            scale = scalar(rectified, v) / (root(v) + scalar(eps, v))
            return m / scalar(correction1, m) * (scale + scalar(plain, v))

        updates = map_values(direction, grads, mean, square)
        return updates, AdamState(count, mean, square)

    return GradientTransformation(init, update)


def scale_by_adamax(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean of the gradients by the decaying maximum of their sizes.

    `u = max(beta2 * u, abs(g) + eps)`, and the update is `m / (1 - beta1^t) / u`.
    State: two tensors of the size of each parameter.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization,
    arXiv 1412.6980, section 7.1.

    Example:
        >>> adamax = scale_by_adamax()
        >>> grads = {"w": torch.tensor([3.0, -0.1])}
        >>> adamax.update(grads, adamax.init(grads))[0]
        {'w': tensor([ 1., -1.])}
    """
    beta1, beta2 = betas

    def init(params: Params) -> AdamaxState:
        check_real("scale_by_adamax", params)
        return AdamaxState(counter(params), zeros(params), zeros(params))

    def update(
        grads: Grads, state: AdamaxState, params: Params | None = None
    ) -> tuple[Updates, AdamaxState]:
        checks.same_names("scale_by_adamax(grads)", state.mean, grads)
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - beta1)
        correction = 1 - beta1 ** count.double()

        def grow(before: Tensor, grad: Tensor | None) -> Tensor:
            if grad is None:
                return before
            size = grad.to(before.dtype).abs() + scalar(eps, before)
            return torch.maximum(scalar(beta2, before) * before, size)

        largest = map_values(grow, state.largest, grads)

        def direction(grad: Tensor | None, m: Tensor, u: Tensor) -> Tensor | None:
            if grad is None:
                return None
            # Without eps the maximum is zero where the mean is.
            return m / scalar(correction, m) / u.clamp_min(torch.finfo(u.dtype).tiny)

        updates = map_values(direction, grads, mean, largest)
        return updates, AdamaxState(count, mean, largest)

    return GradientTransformation(init, update)

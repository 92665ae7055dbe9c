"""NAdam, RAdam and Adamax: other directions from the moments of Adam.

With `decoupled_weight_decay` the decay stays apart from the moments, as in `adamw`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vgrad.optim.arguments import Number, check_numbers
from vgrad.optim.arithmetic import (
    advance,
    counter,
    lerp,
    map_grads,
    of_history,
    root,
    scalar,
    zeros,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.optim.methods.adam import AdamState, first_moments, next_moments
from vgrad.optim.transforms import descent
from vgrad.typing import Params, Schedule


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
    parameter, and the product of the momenta in float64, where torch keeps it in its
    default dtype.

    Example:
        >>> nadam, grads = scale_by_nadam((0.0, 0.9)), {"w": torch.tensor([3.0, -0.1])}
        >>> nadam.update(grads, nadam.init(grads))[0]
        {'w': tensor([ 1.0000, -1.0000])}
    """
    beta1, beta2 = betas

    def start(params: Params) -> NadamState:
        count, mean, square = first_moments(params)
        return NadamState(count, count.double() + 1, mean, square)

    def momentum(steps: Tensor) -> Tensor:
        return beta1 * (1 - 0.5 * 0.96 ** (steps * momentum_decay))

    def move(grads: Grads, state: NadamState) -> tuple[Updates, NadamState]:
        count, mean, square = next_moments(betas, state, grads)
        steps = count.double()
        now, ahead = momentum(steps), momentum(steps + 1)
        product = state.product * now
        by_grad, by_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
        correction = 1 - beta2**steps

        def direction(grad: Tensor, m: Tensor, v: Tensor) -> Tensor:
            mixed = scalar(by_grad, m) * grad.to(m.dtype) + scalar(by_mean, m) * m
            return mixed / (root(v / scalar(correction, v)) + scalar(eps, v))

        updates = map_grads(direction, grads, mean, square)
        return updates, NadamState(count, product, mean, square)

    return of_history("scale_by_nadam", start, move)


def scale_by_radam(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean gradient by the root of the mean square once that is reliable.

    The number of gradients that the mean square represents grows with the step `t` as
    `n = N - 2 * t * beta2^t / (1 - beta2^t)` towards `N = 2 / (1 - beta2) - 1`. While
    it is 5 or less the update is `m / (1 - beta1^t)`; later it is that times
    `r * sqrt(1 - beta2^t) / (sqrt(v) + eps)`, where `r` is the root of
    `(n - 4) * (n - 2) * N / ((N - 4) * (N - 2) * n)`. State: two tensors of the size of
    each parameter.

    Example:
        >>> radam, grads = scale_by_radam(), {"w": torch.tensor([3.0, -0.1])}
        >>> radam.update(grads, radam.init(grads))[0]
        {'w': tensor([ 3.0000, -0.1000])}
    """
    beta1, beta2 = betas

    def move(grads: Grads, state: AdamState) -> tuple[Updates, AdamState]:
        new = next_moments(betas, state, grads)
        steps = new.count.double()
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        limit = 2 / (1 - scalar(beta2, steps)) - torch.ones_like(steps)
        length = limit - 2 * steps * beta2**steps / correction2
        reliable = length > 5
        # Lengths for which all is finite, because gradients flow through both branches.
        n, most = torch.where(reliable, length, 6), torch.where(reliable, limit, 6)
        ratio = (n - 4) * (n - 2) * most / ((most - 4) * (most - 2) * n)
        rectified = torch.where(reliable, (ratio * correction2).sqrt(), 0)
        plain = torch.where(reliable, 0, torch.ones_like(ratio))

        def direction(grad: Tensor, m: Tensor, v: Tensor) -> Tensor:
            scale = scalar(rectified, v) / (root(v) + scalar(eps, v))
            return m / scalar(correction1, m) * (scale + scalar(plain, v))

        return map_grads(direction, grads, new.mean, new.square), new

    return of_history("scale_by_radam", first_moments, move)


def scale_by_adamax(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean of the gradients by the decaying maximum of their sizes.

    `u = max(beta2 * u, abs(g) + eps)`, and the update is `m / (1 - beta1^t) / u`.
    State: two tensors of the size of each parameter.

    Example:
        >>> adamax, grads = scale_by_adamax(), {"w": torch.tensor([3.0, -0.1])}
        >>> adamax.update(grads, adamax.init(grads))[0]
        {'w': tensor([ 1., -1.])}
    """
    beta1, beta2 = betas

    def start(params: Params) -> AdamaxState:
        return AdamaxState(counter(params), zeros(params), zeros(params))

    def move(grads: Grads, state: AdamaxState) -> tuple[Updates, AdamaxState]:
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - beta1)
        correction = 1 - beta1 ** count.double()

        def grow(before: Tensor, grad: Tensor) -> Tensor:
            size = grad.to(before.dtype).abs() + scalar(eps, before)
            return torch.maximum(scalar(beta2, before) * before, size)

        def direction(grad: Tensor, m: Tensor, u: Tensor) -> Tensor:
            # Without eps the maximum is zero where the mean is.
            return m / scalar(correction, m) / u.clamp_min(torch.finfo(u.dtype).tiny)

        largest = advance(grow, state.largest, grads)
        updates = map_grads(direction, grads, mean, largest)
        return updates, AdamaxState(count, mean, largest)

    return of_history("scale_by_adamax", start, move)


def nadam(
    lr: Number | Schedule = 2e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum_decay: Number = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, with the momentum of Nesterov.

    `g += weight_decay * p`, then `p -= lr * u` with the direction `u` of
    `scale_by_nadam`. State: two tensors of the size of each parameter.

    Reference: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop.

    Example:
        >>> tx, params = nadam(0.1, betas=(0.0, 0.999)), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    decays = {"weight_decay": weight_decay, "momentum_decay": momentum_decay}
    check_numbers("nadam", lr, betas, eps=eps, **decays)
    moments = scale_by_nadam(betas, eps, momentum_decay=momentum_decay)
    options = {"decoupled": decoupled_weight_decay, "maximize": maximize}
    return descent(lr, moments, weight_decay=weight_decay, **options)


def radam(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, once the mean square is reliable.

    `g += weight_decay * p`, then `p -= lr * u` with the direction `u` of
    `scale_by_radam`: the plain mean of the gradients in the first steps. State: two
    tensors of the size of each parameter.

    Reference: Liu et al., arXiv 1908.03265.

    Example:
        >>> tx, params = radam(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers("radam", lr, betas, eps=eps, weight_decay=weight_decay)
    options = {"decoupled": decoupled_weight_decay, "maximize": maximize}
    return descent(lr, scale_by_radam(betas, eps), weight_decay=weight_decay, **options)


def adamax(
    lr: Number | Schedule = 2e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the mean gradient over the decaying maximum of its size.

    `g += weight_decay * p`, then `p -= lr * m / u` with the moment `m` and the maximum
    `u` of `scale_by_adamax`. State: two tensors of the size of each parameter.

    Reference: Kingma and Ba, arXiv 1412.6980, section 7.1.

    Example:
        >>> tx, params = adamax(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers("adamax", lr, betas, eps=eps, weight_decay=weight_decay)
    moments = scale_by_adamax(betas, eps)
    return descent(lr, moments, weight_decay=weight_decay, maximize=maximize)

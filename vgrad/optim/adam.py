"""Adam and its relatives: AMSGrad, AdamW, NAdam, RAdam, Adamax and LAMB."""

from __future__ import annotations

from typing import Any

import torch

from vgrad.optim.arithmetic import (
    Number,
    Rate,
    lerp,
    mean_of_squares,
    placed,
    root,
    scalar,
)
from vgrad.optim.base import (
    GradientTransformation,
    State,
    chain,
    check_numbers,
    per_parameter,
)
from vgrad.optim.fused import donated_adam
from vgrad.optim.sgd import scale_by_trust_ratio
from vgrad.optim.transforms import (
    add_decayed_weights,
    ascent,
    descent,
    scale_by_learning_rate,
)

Betas = tuple[Number, Number]

_MOMENTS = {"exp_avg": 0, "exp_avg_sq": 0}


def scale_by_adam(
    betas: Betas = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean gradient by the root of its mean square, as `adam` does."""
    beta1, beta2 = betas
    share = 1 - beta1

    def at(count):
        t = count.double()
        # Both corrections go into the denominator, by which there are fewer passes.
        correction = 1 - beta1**t
        factor = correction / (1 - beta2**t).sqrt()
        least = correction * scalar(eps, correction)

        def rule(g, m, v):
            m, v = lerp(m, g, share), mean_of_squares(v, g, beta2)
            size = torch.addcmul(placed(least, v), root(v), placed(factor, v))
            return m / size, m, v

        return rule

    return per_parameter("scale_by_adam", _MOMENTS, at)


def scale_by_amsgrad(
    betas: Betas = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide by the root of the largest mean square so far, as `adam` with `amsgrad`.

    As in torch, the entrywise maximum is taken before the correction.
    """
    beta1, beta2 = betas
    share = 1 - beta1

    def at(count):
        t = count.double()
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t

        def rule(g, m, v, largest):
            m, v = lerp(m, g, share), mean_of_squares(v, g, beta2)
            largest = torch.maximum(largest, v)
            size = root(largest / scalar(correction2, v)) + scalar(eps, v)
            return m / scalar(correction1, m) / size, m, v, largest

        return rule

    slots = {**_MOMENTS, "max_exp_avg_sq": 0}
    return per_parameter("scale_by_amsgrad", slots, at)


def scale_by_nadam(
    betas: Betas = (0.9, 0.999), eps: Number = 1e-8, *, momentum_decay: Number = 4e-3
) -> GradientTransformation:
    """Look ahead of the mean gradient, over the root of the mean square, as `nadam`."""
    beta1, beta2 = betas
    share = 1 - beta1

    def momentum(t):
        return beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    def moments(now: Any, product: Any) -> GradientTransformation:
        def at(count):
            t = count.double()
            ahead = momentum(t + 1)
            by_grad, by_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
            correction = 1 - beta2**t

            def rule(g, m, v):
                m, v = lerp(m, g, share), mean_of_squares(v, g, beta2)
                mixed = scalar(by_grad, m) * g.to(m.dtype) + scalar(by_mean, m) * m
                size = root(v / scalar(correction, v)) + scalar(eps, v)
                return mixed / size, m, v

            return rule

        return per_parameter("scale_by_nadam", _MOMENTS, at)

    def init(params):
        # One product of all momenta for all parameters, in float64.
        count, slots = moments(0.0, 1.0).init(params)
        return State(count, {"mu_product": count.double() + 1, **slots})

    def update(grads, state, params=None):
        now = momentum((state.count + 1).double())
        product = state.slots["mu_product"] * now
        updates, new = moments(now, product).update(grads, state)
        return updates, State(new.count, {"mu_product": product, **new.slots})

    return GradientTransformation(init, update)


def scale_by_radam(
    betas: Betas = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide by the root of the mean square once that is reliable, as `radam` does."""
    beta1, beta2 = betas
    share = 1 - beta1

    def at(count):
        t = count.double()
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t
        limit = 2 / (1 - scalar(beta2, t)) - torch.ones_like(t)
        length = limit - 2 * t * beta2**t / correction2
        reliable = length > 5
        # Lengths for which all is finite, because gradients flow through both branches.
        n, most = torch.where(reliable, length, 6), torch.where(reliable, limit, 6)
        ratio = (n - 4) * (n - 2) * most / ((most - 4) * (most - 2) * n)
        rectified = torch.where(reliable, (ratio * correction2).sqrt(), 0)
        plain = torch.where(reliable, 0, torch.ones_like(ratio))

        def rule(g, m, v):
            m, v = lerp(m, g, share), mean_of_squares(v, g, beta2)
            scale = scalar(rectified, v) / (root(v) + scalar(eps, v))
            return m / scalar(correction1, m) * (scale + scalar(plain, v)), m, v

        return rule

    return per_parameter("scale_by_radam", _MOMENTS, at)


def scale_by_adamax(
    betas: Betas = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean gradient by the decaying maximum of its size, as `adamax`."""
    beta1, beta2 = betas
    share = 1 - beta1

    def at(count):
        correction = 1 - beta1 ** count.double()

        def rule(g, m, u):
            m = lerp(m, g, share)
            size = g.to(u.dtype).abs() + scalar(eps, u)
            u = torch.maximum(scalar(beta2, u) * u, size)
            # Without eps the maximum is zero where the mean is.
            tiny = torch.finfo(u.dtype).tiny
            return m / scalar(correction, m) / u.clamp_min(tiny), m, u

        return rule

    return per_parameter("scale_by_adamax", {"exp_avg": 0, "exp_inf": 0}, at)


def adam(
    lr: Rate = 1e-3,
    *,
    betas: Betas = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the mean gradient over the root of its mean square.

    `g += weight_decay * p`, then
    `p -= lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)` at step `t`, with
    the exponential moving averages `m` of `g` and `v` of `g * g`, or with `amsgrad` the
    entrywise maximum of all `v` so far. State: two tensors per parameter, three with
    `amsgrad`.

    Reference: Kingma and Ba, arXiv 1412.6980; Reddi et al., arXiv 1904.09237.

    Example:
        >>> tx, params = adam(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    options = {"weight_decay": weight_decay, "maximize": maximize}
    return _adam("adam", lr, betas, eps, amsgrad, decoupled=False, **options)


def adamw(
    lr: Rate = 1e-3,
    *,
    betas: Betas = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, with weight decay apart from the moments.

    `p -= lr * (u + weight_decay * p)` with the direction `u` of `adam`: a schedule
    moves the decay together with the rate. State: as in `adam`.

    Reference: Loshchilov and Hutter, arXiv 1711.05101.
    """
    options = {"weight_decay": weight_decay, "maximize": maximize}
    return _adam("adamw", lr, betas, eps, amsgrad, decoupled=True, **options)


def _adam(function, lr, betas, eps, amsgrad, **options) -> GradientTransformation:
    check_numbers(function, lr, betas, eps=eps, weight_decay=options["weight_decay"])
    direction = scale_by_amsgrad if amsgrad else scale_by_adam
    donated = donated_adam(lr, betas=betas, eps=eps, amsgrad=amsgrad, **options)
    return descent(lr, direction(betas, eps), **options)._replace(donated=donated)


def nadam(
    lr: Rate = 2e-3,
    *,
    betas: Betas = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum_decay: Number = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, with the momentum of Nesterov.

    With `m` and `v` of `adam` and `mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2)`,
    the numerator is
    `(1 - mu_t) * g / (1 - mu_1 ... mu_t) + mu_(t+1) * m / (1 - mu_1 ... mu_(t+1))`.
    With `decoupled_weight_decay` the decay stays apart from the moments, as in `adamw`.
    State: two tensors per parameter, and the product of the momenta in float64, where
    torch keeps it in its default dtype.

    Reference: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop.
    """
    decays = {"weight_decay": weight_decay, "momentum_decay": momentum_decay}
    check_numbers("nadam", lr, betas, eps=eps, **decays)
    moments = scale_by_nadam(betas, eps, momentum_decay=momentum_decay)
    options = {"decoupled": decoupled_weight_decay, "maximize": maximize}
    return descent(lr, moments, weight_decay=weight_decay, **options)


def radam(
    lr: Rate = 1e-3,
    *,
    betas: Betas = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, once the mean square is reliable.

    The number of gradients that the mean square represents grows with the step `t` as
    `n = N - 2 * t * beta2^t / (1 - beta2^t)` towards `N = 2 / (1 - beta2) - 1`. While
    it is 5 or less the direction is `m / (1 - beta1^t)`, with the moments of `adam`;
    later it is that times `r * sqrt(1 - beta2^t) / (sqrt(v) + eps)`, where `r` is the
    root of `(n - 4) * (n - 2) * N / ((N - 4) * (N - 2) * n)`. Decay as in `nadam`.
    State: two tensors per parameter.

    Reference: Liu et al., arXiv 1908.03265.
    """
    check_numbers("radam", lr, betas, eps=eps, weight_decay=weight_decay)
    options = {"decoupled": decoupled_weight_decay, "maximize": maximize}
    return descent(lr, scale_by_radam(betas, eps), weight_decay=weight_decay, **options)


def adamax(
    lr: Rate = 2e-3,
    *,
    betas: Betas = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the mean gradient over the decaying maximum of its size.

    `g += weight_decay * p; u = max(beta2 * u, abs(g) + eps)`, then
    `p -= lr * m / (1 - beta1^t) / u` with the moment `m` of `adam`. State: two tensors
    per parameter.

    Reference: Kingma and Ba, arXiv 1412.6980, section 7.1.
    """
    check_numbers("adamax", lr, betas, eps=eps, weight_decay=weight_decay)
    moments = scale_by_adamax(betas, eps)
    return descent(lr, moments, weight_decay=weight_decay, maximize=maximize)


def lamb(
    lr: Rate = 1e-3,
    *,
    betas: Betas = (0.9, 0.999),
    eps: Number = 1e-6,
    weight_decay: Number = 1e-2,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adamw` does, by a share of the norm of each parameter.

    `u` is the direction of `adam` plus `weight_decay * p`, and then
    `p -= lr * norm(p) / norm(u) * u`. The ratio of the norms is one for a parameter of
    zeros. State: two tensors per parameter.

    Reference: You et al., arXiv 1904.00962, algorithm 2 with the identity for phi.
    """
    check_numbers("lamb", lr, betas, eps=eps, weight_decay=weight_decay)
    return chain(
        *ascent(maximize),
        scale_by_adam(betas, eps),
        add_decayed_weights(weight_decay),
        scale_by_trust_ratio(),
        scale_by_learning_rate(lr),
    )

"""Optimizers and their directions."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from vgrad import checks
from vgrad.optim.base import (
    SHARE,
    GradientTransformation,
    Grads,
    Number,
    Rate,
    State,
    chain,
    check_numbers,
    check_range,
    check_real,
    counting,
    filled,
    is_schedule,
    is_zero,
    length,
    lerp,
    map_grads,
    of_gradient,
    of_gradient_and_parameter,
    per_parameter,
    placed,
    plain,
    plus,
    rate_at,
    required,
    root,
    scalar,
)
from vgrad.optim.fused import donated_adam, donated_sgd
from vgrad.optim.transforms import (
    add_decayed_weights,
    ascent,
    average_after,
    clip_by_block_rms,
    descent,
    scale_by_learning_rate,
    schedule_free,
)
from vgrad.torch_private import shards
from vgrad.tree import cast, no_autocast, widened

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adam_bc",
    "adamax",
    "adamw",
    "asgd",
    "lamb",
    "lars",
    "lion",
    "muon",
    "nadam",
    "orthogonalize",
    "radam",
    "rmsprop",
    "rprop",
    "scale_by_adam",
    "scale_by_trust_ratio",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sgd",
    "trace",
]

Betas = tuple[Number, Number]


def _mean_of_squares(old: Tensor, grad: Tensor, decay: Number) -> Tensor:
    # As in torch: in this form a square that overflows stays infinite.
    decayed = scalar(decay, old) * old
    # Widened before the product: the square of a float16 overflows from 256 on.
    grad = cast(grad, decayed.dtype)
    if isinstance(decay, Tensor):
        return decayed + scalar(1 - decay, old) * grad.square()
    return torch.addcmul(decayed, grad, grad, value=1 - decay)


def _over_root(grad: Tensor, square: Tensor, eps: Number) -> Tensor:
    return cast(grad, square.dtype) / (root(square) + scalar(eps, square))


def _norm(value: Tensor) -> Tensor:
    return length(value.abs().square().sum())


def trace(
    momentum: Number, *, dampening: Number = 0.0, nesterov: bool = False
) -> GradientTransformation:
    """Replace gradients by their decaying sum, as `torch.optim.SGD` does.

    `b = momentum * b + (1 - dampening) * g`, where the first step takes `b = g`; the
    update is `b`, or `g + momentum * b` for `nesterov`. A momentum of the number zero
    is the identity. Reference: Sutskever et al., ICML 2013.

    Example:
        >>> heavy_ball = chain(trace(0.9), scale_by_learning_rate(0.1))
    """
    if is_zero(momentum):
        return chain()

    def at(count):
        share: Any = 1
        if not is_zero(dampening):
            # As for the number zero, no momentum is no dampening.
            share = 1 - dampening * ((count > 1) & (momentum != 0)).double()

        def rule(g, total):
            g = cast(g, total.dtype)
            if isinstance(share, Tensor):
                total = plus(scalar(momentum, total) * total, share, g)
            else:
                total = plus(g, momentum, total)
            return plus(g, momentum, total) if nesterov else total, total

        return rule

    options = {"real": False, "counted": not is_zero(dampening)}
    return per_parameter("trace", {"momentum_buffer": 0}, at, **options)


def sgd(
    lr: Rate = 1e-3,
    *,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient or, with momentum, along its decaying sum.

    `g += weight_decay * p; p -= lr * b` with the sum `b` of `trace`. State: with
    momentum, one tensor per parameter.

    Example:
        >>> tx, params = sgd(0.1, momentum=0.9), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers("sgd", lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (is_zero(momentum) or not is_zero(dampening)):
        raise ValueError(
            f"sgd(nesterov=True, momentum={momentum!r}, dampening={dampening!r}): "
            f"expected momentum > 0 and dampening = 0."
        )
    options = {"dampening": dampening, "nesterov": nesterov}
    tx = descent(lr, weight_decay, maximize, trace(momentum, **options))
    options |= {"weight_decay": weight_decay, "maximize": maximize}
    return tx._replace(donated=donated_sgd(lr, momentum=momentum, **options))


def asgd(
    lr: Rate = 1e-2,
    *,
    lambd: Number = 1e-4,
    alpha: Number = 0.75,
    t0: Number = 1e6,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient with a decaying rate, and average the parameters.

    `g += (weight_decay + lambd) * p; p -= lr / (1 + lambd * lr * t)^alpha * g`, with
    the number `t` of steps taken before. `averaged_parameters` reads the mean of the
    parameters after each step later than `t0 + 1`. A schedule moves the rate one step
    late, as in torch. State: one tensor per parameter. Reference: Polyak and Juditsky,
    SIAM J. Control and Optimization 30 (1992).
    """
    options = {"lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay}
    check_numbers("asgd", lr, **options)

    def decaying(count):
        rate = rate_at(lr, (count - 1).clamp_min(0))
        return rate / (1 + lambd * rate * count.double()) ** alpha

    def share(count):
        steps = (count - 1).double()
        return 1 / (steps - scalar(t0, steps)).clamp_min(1)

    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay + lambd),
        scale_by_learning_rate(decaying),
        average_after("asgd", share),
    )._replace(counted=True)


def lion(
    lr: Rate = 1e-4,
    *,
    betas: Betas = (0.9, 0.99),
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of a mix of the gradient and the mean of those before.

    `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)`, and then
    `m = beta2 * m + (1 - beta2) * g`. The paper takes a third to a tenth of the rate of
    AdamW, and a decay larger by that factor. State: one tensor per parameter.
    Reference: Chen et al., arXiv 2302.06675.
    """
    check_numbers("lion", lr, betas, weight_decay=weight_decay)
    beta1, beta2 = betas

    def rule(g, mean):
        return lerp(mean, g, 1 - beta1).sign(), lerp(mean, g, 1 - beta2)

    signs = per_parameter("lion", {"exp_avg": 0}, lambda count: rule)
    return descent(lr, weight_decay, maximize, signs, decoupled=True)


def rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of the gradient, with a step size for each entry.

    `p -= sign(g) * s`. The size `s` starts at `lr` and stays within `step_sizes`. It
    grows by the factor `etas[1]` where the sign stays and shrinks by `etas[0]` where it
    changes; then the entry stays for this step and counts as zero in the next. It is
    meant for gradients of all the data at once. State: two tensors per parameter.
    Reference: Riedmiller and Braun, The RPROP Algorithm, ICNN 1993.
    """
    checks.non_negative("rprop", **plain(lr=lr))
    expected = "0 < {0}[0] < 1 < {0}[1]"
    check_range("rprop", expected, lambda e: 0 < e[0] < 1 < e[1], etas=etas)
    expected, sizes = "0 <= {0}[0] <= {0}[1]", {"step_sizes": step_sizes}
    check_range("rprop", expected, lambda s: 0 <= s[0] <= s[1], **sizes)

    def rule(g, previous, size):
        g = g.to(size.dtype)
        agreement = (g * previous).sign()
        grown = torch.where(agreement > 0, scalar(etas[1], size) * size, size)
        size = torch.where(agreement < 0, scalar(etas[0], size) * size, grown)
        # One bound at a time: one may be a number and the other a tensor.
        size = size.clamp(min=scalar(step_sizes[0], size))
        size = size.clamp(max=scalar(step_sizes[1], size))
        previous = g.masked_fill(agreement < 0, 0)
        return previous.sign() * size, previous, size

    signs = per_parameter("rprop", {"prev": 0, "step_size": lr}, lambda count: rule)
    return chain(*ascent(maximize), signs, scale_by_learning_rate(1.0))


def scale_by_trust_ratio(
    trust_coefficient: Number = 1.0, *, weight_decay: Number = 0.0
) -> GradientTransformation:
    """Make the size of an update a share of the size of its parameter.

    The update of each parameter is `r * (g + weight_decay * p)` with the trust ratio
    `r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))`, or one for a
    parameter of zeros. After `add_decayed_weights` it is the ratio of `lamb`.
    """

    def scaled(grad, param):
        size, slope = _norm(param), _norm(grad)
        decay: Any = scalar(weight_decay, size)
        divisor = slope + decay * size
        still = (size == 0) | (divisor == 0)
        ratio = scalar(trust_coefficient, size) * size / divisor.masked_fill(still, 1)
        return ratio.masked_fill(still, 1) * (grad + decay * param)

    return of_gradient_and_parameter("scale_by_trust_ratio", scaled)


def lars(
    lr: Rate = 1.0,
    *,
    momentum: Number = 0.9,
    weight_decay: Number = 0.0,
    trust_coefficient: Number = 1e-3,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend with momentum, by a share of the norm of each parameter.

    `b = momentum * b + lr * u; p -= b` with the update `u` of `scale_by_trust_ratio`.
    Biases and the scales of norms usually go to another optimizer, see `partition`.
    State: with momentum, one tensor per parameter. Reference: You et al., arXiv
    1708.03888.
    """
    decays = {"momentum": momentum, "weight_decay": weight_decay}
    check_numbers("lars", lr, **decays, trust_coefficient=trust_coefficient)
    return chain(
        *ascent(maximize),
        scale_by_trust_ratio(trust_coefficient, weight_decay=weight_decay),
        scale_by_learning_rate(lr),
        trace(momentum),
    )


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
        offset = correction * scalar(eps, correction)

        def rule(g, m, v):
            m, v = lerp(m, g, share), _mean_of_squares(v, g, beta2)
            size = torch.addcmul(placed(offset, v), root(v), placed(factor, v))
            return m / size, m, v

        return rule

    return per_parameter("scale_by_adam", _MOMENTS, at, counted=True)


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
    `amsgrad`. Reference: Kingma and Ba, arXiv 1412.6980; Reddi et al., arXiv
    1904.09237.
    """
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize)


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
    moves the decay together with the rate. State: as in `adam`. Reference: Loshchilov
    and Hutter, arXiv 1711.05101.
    """
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize)


def _adam(function, lr, betas, eps, weight_decay, amsgrad, maximize):
    check_numbers(function, lr, betas, eps=eps, weight_decay=weight_decay)
    direction = (_amsgrad if amsgrad else scale_by_adam)(betas, eps)
    decoupled = function == "adamw"
    tx = descent(lr, weight_decay, maximize, direction, decoupled=decoupled)
    options = {"eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    options |= {"betas": betas, "amsgrad": amsgrad, "decoupled": decoupled}
    return tx._replace(donated=donated_adam(lr, **options))


def _amsgrad(betas: Betas, eps: Number) -> GradientTransformation:
    beta1, beta2 = betas
    share = 1 - beta1

    def at(count):
        t = count.double()
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t

        def rule(g, m, v, largest):
            m, v = lerp(m, g, share), _mean_of_squares(v, g, beta2)
            largest = torch.maximum(largest, v)
            size = root(largest / scalar(correction2, v)) + scalar(eps, v)
            return m / scalar(correction1, m) / size, m, v, largest

        return rule

    slots = {**_MOMENTS, "max_exp_avg_sq": 0}
    return per_parameter("amsgrad", slots, at, counted=True)


def adam_bc(
    lr: Rate = 1e-3,
    *,
    deviation: Rate,
    betas: Betas = (0.9, 0.999),
    floor: Number | None = None,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, with the noise taken out of the mean square.

    `g += weight_decay * p`, then
    `p -= lr * m / (1 - beta1^t) / sqrt(max((v - n) / (1 - beta2^t), floor))` at step
    `t`, with the moments `m` and `v` of `adam` and the same moving average `n` of
    squares of `deviation`, the standard deviation of the noise in each entry of `g`:
    the root is of an unbiased estimate of the mean square without noise, of which `v`
    has little in private training. That estimate varies, and is kept from zero by the
    `floor`, a number to be tuned; by default it is a tenth of `n / (1 - beta2^t)`.
    `deviation` is a number, or a function of the steps taken so far such as
    `plan.deviation`. A `private_step` sets it to the deviation of its own noise, at
    every step, and refuses a plan of correlated noise. State: two tensors per
    parameter, the deviation and `n` in float64. Reference: Tang et al., arXiv
    2312.14334.

    Example:
        >>> tx, params = adam_bc(0.1, deviation=0.6), {"w": torch.zeros(1)}
        >>> tx.update({"w": torch.ones(1)}, tx.init(params), params)[0]
        {'w': tensor([-0.1250])}
    """
    numbers = {"floor": 0.0 if floor is None else floor, "weight_decay": weight_decay}
    check_numbers("adam_bc", lr, betas, **numbers)
    if not is_schedule(deviation):
        checks.non_negative("adam_bc", **plain(deviation=deviation))
    beta1, beta2 = betas

    def moments(noise):
        def at(count):
            t = count.double()
            correction1, correction2 = 1 - beta1**t, 1 - beta2**t
            lower = 0.1 * noise / correction2 if floor is None else floor

            def rule(g, m, v):
                m, v = lerp(m, g, 1 - beta1), _mean_of_squares(v, g, beta2)
                square = (v - scalar(noise, v)) / scalar(correction2, v)
                size = root(square.clamp(min=scalar(lower, v)))
                return m / scalar(correction1, m) / size, m, v

            return rule

        return per_parameter("adam_bc", _MOMENTS, at)

    def init(params):
        # One deviation for all parameters, which is NaN until it is set or computed.
        count, slots = moments(0.0).init(params)
        noise, first = count.double(), math.nan if is_schedule(deviation) else deviation
        first = noise + scalar(first, noise)
        return State(count, {"deviation": first, "noise_sq": noise, **slots})

    def update(grads, state, params=None):
        now, noise = state.slots["deviation"], state.slots["noise_sq"]
        if is_schedule(deviation):
            now = torch.where(now.isnan(), deviation(state.count), now)
        noise = noise + (1 - scalar(beta2, noise)) * (now**2 - noise)
        updates, new = moments(noise).update(grads, state)
        slots = {"deviation": state.slots["deviation"], "noise_sq": noise}
        return updates, State(new.count, {**slots, **new.slots})

    tx = GradientTransformation(init, update, counted=True)
    return descent(lr, weight_decay, maximize, tx)


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
    State: two tensors per parameter, and the product of the momenta in float64.
    Reference: Dozat, ICLR 2016 workshop.
    """
    decays = {"weight_decay": weight_decay, "momentum_decay": momentum_decay}
    check_numbers("nadam", lr, betas, eps=eps, **decays)
    beta1, beta2 = betas
    share = 1 - beta1

    def momentum(t):
        return beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    def moments(now, product):
        def at(count):
            t = count.double()
            ahead = momentum(t + 1)
            by_grad, by_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
            correction = 1 - beta2**t

            def rule(g, m, v):
                m, v = lerp(m, g, share), _mean_of_squares(v, g, beta2)
                mixed = scalar(by_grad, m) * g.to(m.dtype) + scalar(by_mean, m) * m
                size = root(v / scalar(correction, v)) + scalar(eps, v)
                return mixed / size, m, v

            return rule

        return per_parameter("nadam", _MOMENTS, at)

    def init(params):
        # One product of all momenta for all parameters, in float64.
        count, slots = moments(0.0, 1.0).init(params)
        return State(count, {"mu_product": count.double() + 1, **slots})

    def update(grads, state, params=None):
        now = momentum((state.count + 1).double())
        product = state.slots["mu_product"] * now
        updates, new = moments(now, product).update(grads, state)
        return updates, State(new.count, {"mu_product": product, **new.slots})

    tx = GradientTransformation(init, update, counted=True)
    return descent(lr, weight_decay, maximize, tx, decoupled=decoupled_weight_decay)


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
    State: two tensors per parameter. Reference: Liu et al., arXiv 1908.03265.
    """
    check_numbers("radam", lr, betas, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = betas
    share = 1 - beta1

    def at(count):
        t = count.double()
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t
        limit = 2 / (1 - scalar(beta2, t)) - torch.ones_like(t)
        length = limit - 2 * t * beta2**t / correction2
        reliable = length > 5
        # Lengths for which all is finite, because gradients flow through both branches.
        n, longest = torch.where(reliable, length, 6), torch.where(reliable, limit, 6)
        ratio = (n - 4) * (n - 2) * longest / ((longest - 4) * (longest - 2) * n)
        rectified = torch.where(reliable, (ratio * correction2).sqrt(), 0)
        plain = torch.where(reliable, 0, torch.ones_like(ratio))

        def rule(g, m, v):
            m, v = lerp(m, g, share), _mean_of_squares(v, g, beta2)
            scale = scalar(rectified, v) / (root(v) + scalar(eps, v))
            return m / scalar(correction1, m) * (scale + scalar(plain, v)), m, v

        return rule

    tx = per_parameter("radam", _MOMENTS, at, counted=True)
    return descent(lr, weight_decay, maximize, tx, decoupled=decoupled_weight_decay)


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
    per parameter. Reference: Kingma and Ba, arXiv 1412.6980, section 7.1.
    """
    check_numbers("adamax", lr, betas, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = betas

    def at(count):
        correction = 1 - beta1 ** count.double()

        def rule(g, m, u):
            m = lerp(m, g, 1 - beta1)
            size = g.to(u.dtype).abs() + scalar(eps, u)
            u = torch.maximum(scalar(beta2, u) * u, size)
            # Without eps the maximum is zero where the mean is.
            tiny = torch.finfo(u.dtype).tiny
            return m / scalar(correction, m) / u.clamp_min(tiny), m, u

        return rule

    moments = per_parameter("adamax", {"exp_avg": 0, "exp_inf": 0}, at, counted=True)
    return descent(lr, weight_decay, maximize, moments)


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
    zeros. State: two tensors per parameter. Reference: You et al., arXiv 1904.00962,
    algorithm 2 with the identity for phi.
    """
    check_numbers("lamb", lr, betas, eps=eps, weight_decay=weight_decay)
    return chain(
        *ascent(maximize),
        scale_by_adam(betas, eps),
        add_decayed_weights(weight_decay),
        scale_by_trust_ratio(),
        scale_by_learning_rate(lr),
    )


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
    parameter. Reference: Duchi et al., JMLR 12 (2011).
    """
    decays = {"lr_decay": lr_decay, "weight_decay": weight_decay}
    first = {"initial_accumulator_value": initial_accumulator_value}
    check_numbers("adagrad", lr, **decays, **first, eps=eps)

    def decaying(count):
        return rate_at(lr, count) / (1 + count.double() * lr_decay)

    def rule(g, total):
        total = plus(widened(g).square().to(total.dtype), 1, total)
        return _over_root(g, total, eps), total

    slots = {"sum": initial_accumulator_value}
    sums = per_parameter("adagrad", slots, lambda count: rule)
    rate, counted = (lr, False) if is_zero(lr_decay) else (decaying, True)
    return descent(rate, weight_decay, maximize, sums)._replace(counted=counted)


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
    State: two tensors per parameter. Reference: Zeiler, arXiv 1212.5701.
    """
    check_numbers("adadelta", lr, eps=eps, weight_decay=weight_decay)
    check_range("adadelta", "0 <= {} <= 1", lambda rho: 0 <= rho <= 1, rho=rho)

    def rule(g, square, delta):
        square = _mean_of_squares(square, g, rho)
        floor = scalar(eps, square)
        update = root(delta + floor) / root(square + floor) * g.to(square.dtype)
        return update, square, _mean_of_squares(delta, update, rho)

    slots = {"square_avg": 0, "acc_delta": 0}
    scaled = per_parameter("adadelta", slots, lambda count: rule)
    return descent(lr, weight_decay, maximize, scaled)


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
    `centered`; a negative variance counts as zero, where torch gives NaN. With
    momentum, `b = momentum * b + g / (sqrt(v) + eps); p -= lr * b`. State: one tensor
    per parameter, and one more for each of both options. Reference: Tieleman and
    Hinton, lecture 6.5, 2012; Graves, arXiv 1308.0850.
    """
    check_numbers("rmsprop", lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_range("rmsprop", "0 <= {} <= 1", lambda a: 0 <= a <= 1, alpha=alpha)

    def rule(g, square, *mean):
        square = _mean_of_squares(square, g, alpha)
        if not centered:
            return _over_root(g, square, eps), square
        mean = lerp(mean[0], g, 1 - alpha)
        return _over_root(g, square - mean * mean, eps), square, mean

    slots = {"square_avg": 0} | ({"grad_avg": 0} if centered else {})
    scaled = per_parameter("rmsprop", slots, lambda count: rule)
    return descent(lr, weight_decay, maximize, scaled, trace(momentum))


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
    for a matrix of n by m. Reference: Shazeer and Stern, arXiv 1804.04235.
    """
    floors = {"eps[0]": 0.0 if eps[0] is None else eps[0], "eps[1]": eps[1]}
    check_numbers("adafactor", lr, **floors, weight_decay=weight_decay)
    check_range("adafactor", "{} <= 0", lambda p: p <= 0, beta2_decay=beta2_decay)
    check_range("adafactor", "{} >= 1", lambda d: d >= 1, d=d)

    def at(count):
        share = count.double() ** beta2_decay

        def rule(g, row, column, variance):
            row, column, variance = mean_squares(g, row, column, variance, share)
            if row is not None:
                floor = _floor(eps[0], row)
                mean = row * column / row.mean(-2, keepdim=True).clamp_min(floor)
            else:
                mean, floor = variance, _floor(eps[0], variance)
            update = widened(g) * mean.clamp_min(floor * floor).rsqrt()
            return shards.placed(update, g), row, column, variance

        return rule

    def by_size(grads, params, count):
        params = required("adafactor", params, grads)
        rate = rate_at(lr, count)
        bound = (count + 1).double().rsqrt()
        bound = bound.clamp_max(scalar(rate, bound))

        def descend(grad, param):
            grad, param = widened(grad), widened(param)
            rms = _norm(param) / max(param.numel(), 1) ** 0.5
            size = rms.clamp_min(scalar(eps[1], rms)) * scalar(bound, rms)
            decay = scalar(rate, param) * scalar(weight_decay, param)
            return -(size * grad + decay * param)

        return map_grads(descend, grads, params)

    return chain(
        *ascent(maximize),
        per_parameter("adafactor", FACTORED, at, counted=True),
        clip_by_block_rms(d),
        counting(by_size),
    )


def _start(dim: int) -> Callable:
    def mean(param):
        if param.ndim < 2:
            return None
        shape = [*param.shape]
        shape[dim] = 1
        return filled(shards.reduced(param.new_empty(shape), param, dim))

    return mean


FACTORED = {
    "row_var": _start(-1),
    "col_var": _start(-2),
    "variance": lambda param: filled(param) if param.ndim < 2 else None,
}
"""Slots of mean squares: of the rows and columns of a matrix, else whole."""


def mean_squares(
    grad: Tensor, row: Any, column: Any, variance: Any, share: Number
) -> Any:
    """Mix a share of the squares of a gradient into the mean squares of `FACTORED`."""
    square = widened(grad).square()
    if row is None:
        return None, None, lerp(variance, square, share)
    row = lerp(row, _mean(square, -1), share)
    return row, lerp(column, _mean(square, -2), share), None


def _mean(square: Tensor, dim: int) -> Tensor:
    # torch would shard some of one row along their columns, or replicate them.
    mean = square.sum(dim, keepdim=True) / max(square.shape[dim], 1)
    return shards.reduced(mean, square, dim)


def _floor(eps: Number | None, like: Tensor) -> Any:
    """Return the smallest root of a mean square, whose square is a normal number."""
    finite = torch.finfo(like.dtype)
    floor = scalar(finite.eps if eps is None else eps, like)
    tiny = finite.tiny**0.5
    return floor.clamp_min(tiny) if isinstance(floor, Tensor) else max(floor, tiny)


def schedule_free_sgd(
    lr: Rate = 1.0,
    *,
    momentum: Number = 0.9,
    weight_decay: Number = 0.0,
    weight_lr_power: Number = 2.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient, without a schedule of the rate.

    `schedule_free` around plain `sgd`, with `momentum` for its beta. A schedule for
    `lr` should rise to a constant and not fall. State: two tensors per parameter.
    Reference: Defazio et al., arXiv 2405.15682, algorithm 1 without the scale of Adam.
    """
    decays = {"weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
    check_numbers("schedule_free_sgd", lr, **decays)
    check_range("schedule_free_sgd", *SHARE, momentum=momentum)
    inner = chain(*ascent(maximize), sgd(lr, weight_decay=weight_decay))
    return schedule_free(inner, lr, beta=momentum, weight_lr_power=weight_lr_power)


def schedule_free_adamw(
    lr: Rate = 2.5e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    weight_lr_power: Number = 2.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adamw` does, without a schedule of the rate.

    `schedule_free` with `beta1`, around `adamw` without its first moment, which is not
    kept: `z -= lr * (g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y)`, where
    `v` is the moving average of `g * g`. Schedules as in `schedule_free_sgd`. State:
    three tensors per parameter. Reference: Defazio et al., arXiv 2405.15682, algorithm
    1.
    """
    decays = {"weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
    check_numbers("schedule_free_adamw", lr, betas, eps=eps, **decays)

    def at(count):
        correction = 1 - betas[1] ** count.double()

        def rule(g, square):
            square = _mean_of_squares(square, g, betas[1])
            return _over_root(g, square / scalar(correction, square), eps), square

        return rule

    squares = per_parameter("schedule_free_adamw", {"square": 0}, at)
    inner = descent(lr, weight_decay, maximize, squares, decoupled=True)
    return schedule_free(inner, lr, beta=betas[0], weight_lr_power=weight_lr_power)


# Muon: updates of matrices whose singular values are all about one.

Coefficients = tuple[float, float, float]

Adjustment = Literal["original", "match_rms_adamw", "spectral_unclamped"]
"""How the size of an update follows from the shape of its matrix."""


def orthogonalize(
    *,
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    eps: Number = 1e-7,
    ns_steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> GradientTransformation:
    """Set all singular values of each matrix to about one and keep its directions.

    With `x = g / max(norm(g), eps)`, each of `ns_steps` iterations takes
    `s = x @ x.T; x = a * x + (b * s + c * s @ s) @ x`, on the transpose of a tall
    matrix. By default, singular values of a hundredth of the norm and more end in 0.6
    to 1.2. The iteration runs in `dtype`: bfloat16, as in `torch.optim.Muon`, is right
    to two or three digits; take float32 for gradients through training. Reference: as
    for `muon`; Bernstein and Newhouse, arXiv 2409.20325.

    Example:
        >>> even = orthogonalize(ns_coefficients=(2, -1.5, 0.5), ns_steps=9)
        >>> even.update({"w": torch.tensor([[4.0, 0.0]])}, ())[0]["w"].round(decimals=1)
        tensor([[1., 0.]])
    """
    function, coefficients = "orthogonalize", {"ns_coefficients": ns_coefficients}
    check_range(function, "three numbers", lambda c: len(c) == 3, **coefficients)
    for index, value in enumerate(ns_coefficients):
        checks.finite(function, **{f"ns_coefficients[{index}]": value})
    checks.integers(function, minimum=0, ns_steps=ns_steps)
    checks.between(function, -1, 100, ns_steps=ns_steps)
    expected = "a real floating-point dtype"
    check_range(function, expected, lambda d: d.is_floating_point, dtype=dtype)
    a, b, c = ns_coefficients

    def init(params):
        check_real("orthogonalize", params)
        _check_matrices("orthogonalize(params)", params)
        return ()

    def iterate(grad):
        if hasattr(grad, "full_tensor"):
            # Sums of parts would round in another way, in bfloat16 at the third digit.
            return shards.cut(iterate(grad.full_tensor()), grad)
        tall = grad.shape[0] > grad.shape[1]
        x = grad.to(dtype).mT if tall else grad.to(dtype)
        with no_autocast(x.device):
            x = x / x.norm().clamp(min=scalar(eps, x))
            for _ in range(ns_steps):
                gram = x @ x.mT
                x = _addmm(x, _addmm(gram, gram, gram, b, c), x, a, 1.0)
        return widened(x.mT if tall else x).to(widened(grad).dtype)

    def update(grads, state, params=None):
        _check_matrices("orthogonalize(grads)", grads)
        return map_grads(iterate, grads), state

    return GradientTransformation(init, update)


def _check_matrices(argument: str, tensors: Grads) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.ndim != 2:
            raise ValueError(
                f"{argument}: expected matrices, got shape {tuple(tensor.shape)} in "
                f"{name!r}. Use vgrad.optim.partition to give other parameters another "
                f"optimizer."
            )


def _addmm(added, left, right, beta, alpha) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    return _Addmm.apply(added, left, right, beta, alpha)


class _Addmm(Function):
    """`torch.addmm` that is one kernel, which rounds once, under vmap too."""

    @staticmethod
    def forward(added, left, right, beta, alpha):
        if left.ndim == 2:
            return torch.addmm(added, left, right, beta=beta, alpha=alpha)
        flat = (matrices.flatten(0, -3) for matrices in (added, left, right))
        product = torch.baddbmm(*flat, beta=beta, alpha=alpha)
        return product.unflatten(0, left.shape[:-2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, left, right, ctx.beta, ctx.alpha = inputs
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        d_left, d_right = grad @ right.mT, left.mT @ grad
        return ctx.beta * grad, ctx.alpha * d_left, ctx.alpha * d_right, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        left, right = ctx.saved_tensors
        d_added, d_left, d_right, _, _ = tangents
        return ctx.beta * d_added + ctx.alpha * (d_left @ right + left @ d_right)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> Any:
        *tensors, beta, alpha = inputs
        # All of them are products of the same matrix, so all are mapped.
        stacked = (t.movedim(dim, 0) for t, dim in zip(tensors, in_dims, strict=False))
        return _Addmm.apply(*stacked, beta, alpha), 0


def muon(
    lr: Rate = 1e-3,
    *,
    weight_decay: Number = 0.1,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    eps: Number = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Adjustment | None = None,
    maximize: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> GradientTransformation:
    """Descend along the mean gradient of each matrix, made orthogonal.

    `m = momentum * m + (1 - momentum) * g`, then
    `p -= lr * (weight_decay * p + s * o)`, with the result `o` of `orthogonalize` for
    `m`, or for `momentum * m + (1 - momentum) * g` again with `nesterov`. For a matrix
    of n by m, `s` is `sqrt(max(1, n / m))`, also with `adjust_lr_fn="original"`,
    `sqrt(n / m)` with `"spectral_unclamped"`, and `0.2 * sqrt(max(n, m))` with
    `"match_rms_adamw"`, for the rates of AdamW. State: one tensor per parameter.
    Biases, embeddings, kernels of convolutions and the last layer go to another
    optimizer, see `partition`. Reference: Jordan et al., Muon, 2024; Liu et al., arXiv
    2502.16982; Bernstein, Deriving Muon, 2025.
    """
    check_numbers("muon", lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
    checks.choice("muon", (None, *get_args(Adjustment)), adjust_lr_fn=adjust_lr_fn)
    options = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}

    def average(g, mean):
        mean = lerp(mean, g, 1 - momentum)
        ahead: Any = scalar(momentum, mean)
        return g.to(mean.dtype).lerp(mean, ahead) if nesterov else mean, mean

    def by_shape(grad):
        n, m = grad.shape
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(n, m)) * grad
        lower = 0.0 if adjust_lr_fn == "spectral_unclamped" else 1.0
        return math.sqrt(max(lower, n / max(m, 1))) * grad

    slots = {"momentum_buffer": 0}
    direction = (
        per_parameter("muon", slots, lambda count: average, real=False),
        orthogonalize(**options, dtype=dtype),
        of_gradient(by_shape),
    )
    return descent(lr, weight_decay, maximize, *direction, decoupled=True)

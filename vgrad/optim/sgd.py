"""Gradient descent with momentum or averages, by signs, and by trust ratios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vgrad.optim.base import (
    GradientTransformation,
    Number,
    Rate,
    State,
    apply_updates,
    chain,
    check_numbers,
    copies,
    counter,
    is_zero,
    lerp,
    norm,
    of_gradient_and_parameter,
    per_parameter,
    plus,
    rate_at,
    required,
    scalar,
)
from vgrad.optim.fused import donated_sgd
from vgrad.optim.transforms import (
    add_decayed_weights,
    ascent,
    descent,
    scale_by_learning_rate,
)
from vgrad.tree import cast, map_values


def trace(
    momentum: Number, *, dampening: Number = 0.0, nesterov: bool = False
) -> GradientTransformation:
    """Replace gradients by their decaying sum, as `torch.optim.SGD` does.

    `b = momentum * b + (1 - dampening) * g`, where the first step takes `b = g`; the
    update is `b`, or `g + momentum * b` for `nesterov`. A momentum of the number zero
    is the identity. A parameter whose first gradient comes after the first step is
    dampened, unlike in `torch.optim.SGD`.

    Reference: Sutskever et al., On the importance of initialization, ICML 2013.

    Example:
        >>> heavy_ball, grads = trace(0.5), {"w": torch.ones(2)}
        >>> updates, state = heavy_ball.update(grads, heavy_ball.init(grads))
        >>> heavy_ball.update(grads, state)[0]
        {'w': tensor([1.5000, 1.5000])}
    """
    if is_zero(momentum):
        return chain()

    def at(count):
        taken: Any = 1
        if not is_zero(dampening):
            # As for the number zero, no momentum is no dampening.
            taken = 1 - dampening * ((count > 1) & (momentum != 0)).double()

        def rule(g, total):
            g = cast(g, total.dtype)
            if isinstance(taken, Tensor):
                total = plus(scalar(momentum, total) * total, taken, g)
            else:
                total = plus(g, momentum, total)
            return plus(g, momentum, total) if nesterov else total, total

        return rule

    return per_parameter("trace", {"momentum_buffer": 0}, at, real=False)


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
    of_sum = {"dampening": dampening, "nesterov": nesterov}
    options = {"weight_decay": weight_decay, "maximize": maximize}
    donated = donated_sgd(lr, momentum=momentum, **of_sum, **options)
    pure = descent(lr, trace(momentum, **of_sum), **options)
    return pure._replace(donated=donated)


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
    the number `t` of steps taken before. `averaged_parameters` reads from the state the
    mean of the parameters after each step later than `t0 + 1`, `ax` in torch; until the
    first of these it is the parameters themselves. A schedule moves the rate one step
    late, as in `torch.optim.ASGD`. State: one tensor per parameter.

    Reference: Polyak and Juditsky, SIAM J. Control and Optimization 30 (1992).
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
    )


def average_after(
    function: str, share: Callable[[Tensor], Tensor]
) -> GradientTransformation:
    """Move an average by a share of the way to the parameters after each step."""

    def update(grads, state, params=None):
        params = required(function, params, grads, state.slots["ax"])
        count = state.count + 1
        after, taken = apply_updates(params, grads), share(count)
        average = map_values(lambda x, p: lerp(x, p, taken), state.slots["ax"], after)
        return dict(grads), State(count, {"ax": average})

    return GradientTransformation(
        lambda params: State(counter(params), {"ax": copies(params)}), update
    )


def scale_by_lion(betas: tuple[Number, Number] = (0.9, 0.99)) -> GradientTransformation:
    """Replace gradients by the sign of their mix with those before, as in `lion`."""
    beta1, beta2 = betas

    def rule(g, mean):
        return lerp(mean, g, 1 - beta1).sign(), lerp(mean, g, 1 - beta2)

    return per_parameter("scale_by_lion", {"exp_avg": 0}, lambda count: rule)


def lion(
    lr: Rate = 1e-4,
    *,
    betas: tuple[Number, Number] = (0.9, 0.99),
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of a mix of the gradient and the mean of those before.

    `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)`, and then
    `m = beta2 * m + (1 - beta2) * g`. Every entry moves by `lr`, and no gradient flows
    through its sign: the paper takes a third to a tenth of the rate of AdamW, and a
    decay larger by that factor. State: one tensor per parameter.

    Reference: Chen et al., arXiv 2302.06675.
    """
    check_numbers("lion", lr, betas, weight_decay=weight_decay)
    options = {"weight_decay": weight_decay, "decoupled": True, "maximize": maximize}
    return descent(lr, scale_by_lion(betas), **options)


def scale_by_rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
) -> GradientTransformation:
    """Replace gradients by their signs, times a size for each entry, as in `rprop`."""

    def rule(g, previous, size):
        g = g.to(size.dtype)
        agreement = (g * previous).sign()
        grown = torch.where(agreement > 0, scalar(etas[1], size) * size, size)
        size = torch.where(agreement < 0, scalar(etas[0], size) * size, grown)
        # One bound at a time: one may be a number and the other a tensor.
        size = size.clamp(min=scalar(step_sizes[0], size))
        size = size.clamp(max=scalar(step_sizes[1], size))
        kept = g.masked_fill(agreement < 0, 0)
        return kept.sign() * size, kept, size

    slots = {"prev": 0, "step_size": lr}
    return per_parameter("scale_by_rprop", slots, lambda count: rule)


def rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of the gradient, with a step size for each entry.

    `p -= sign(g) * s`. The size `s` starts at `lr`. It grows by the factor `etas[1]`
    where the sign stays and shrinks by `etas[0]` where it changes; then the entry stays
    for this step and counts as zero in the next. Sizes are kept within `step_sizes`. No
    gradient flows through a sign. It is meant for gradients of all the data at once.
    Changing the rate later, in a state of `inject_hyperparams`, has no effect. State:
    two tensors per parameter.

    Reference: Riedmiller and Braun, The RPROP Algorithm, ICNN 1993.
    """
    if callable(lr):
        raise TypeError(
            "rprop(lr=schedule): expected a number, got a function. The rate is the "
            "size of the first step only; later ones adapt."
        )
    check_numbers("rprop", lr)
    if not any(isinstance(eta, Tensor) for eta in etas):
        if not 0 < etas[0] < 1 < etas[1]:
            raise ValueError(f"rprop(etas={etas}): expected 0 < etas[0] < 1 < etas[1].")
    if not any(isinstance(size, Tensor) for size in step_sizes):
        if not 0 <= step_sizes[0] <= step_sizes[1]:
            raise ValueError(
                f"rprop(step_sizes={step_sizes}): expected "
                f"0 <= step_sizes[0] <= step_sizes[1]."
            )
    return chain(
        *ascent(maximize),
        scale_by_rprop(lr, etas=etas, step_sizes=step_sizes),
        scale_by_learning_rate(1.0),
    )


def scale_by_trust_ratio(
    trust_coefficient: Number = 1.0, *, weight_decay: Number = 0.0
) -> GradientTransformation:
    """Make the size of an update a share of the size of its parameter.

    The update of each parameter is `r * (g + weight_decay * p)` with the trust ratio
    `r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))`. The ratio is
    one for a parameter of zeros, which could otherwise never change. Norms are of one
    parameter; under `torch.vmap` each member has its own. With `add_decayed_weights` in
    front, instead of the decay here, the ratio is as in LAMB,
    `norm(p) / norm(g + weight_decay * p)`.
    """

    def scaled(grad, param):
        size, slope = norm(param), norm(grad)
        decay: Any = scalar(weight_decay, size)
        whole = slope + decay * size
        still = (size == 0) | (whole == 0)
        ratio = scalar(trust_coefficient, size) * size / whole.masked_fill(still, 1)
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
    The rate is inside the momentum, so that changing it reaches the parameters over
    several steps. Biases and the scales of norms usually go to another optimizer, see
    `partition`. State: with momentum, one tensor per parameter.

    Reference: You et al., arXiv 1708.03888, algorithm 1.
    """
    decays = {"momentum": momentum, "weight_decay": weight_decay}
    check_numbers("lars", lr, **decays, trust_coefficient=trust_coefficient)
    return chain(
        *ascent(maximize),
        scale_by_trust_ratio(trust_coefficient, weight_decay=weight_decay),
        scale_by_learning_rate(lr),
        trace(momentum),
    )

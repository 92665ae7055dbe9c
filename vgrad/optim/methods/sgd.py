"""Stochastic gradient descent: plain, with momentum, and averaged."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vgrad.optim.arguments import Number, check_numbers, is_zero, rate_at
from vgrad.optim.arithmetic import (
    blend,
    counter,
    map_grads,
    of_history,
    plus,
    scalar,
    zeros,
)
from vgrad.optim.averaging import average_after
from vgrad.optim.base import GradientTransformation, Grads, Updates, chain
from vgrad.optim.fused import donated_sgd
from vgrad.optim.transforms import (
    add_decayed_weights,
    ascent,
    descent,
    scale_by_learning_rate,
)
from vgrad.tree import cast
from vgrad.typing import Params, Schedule


class TraceState(NamedTuple):
    """State of `trace`: the number of steps taken and the momentum."""

    count: Tensor
    momentum: Params


def trace(
    momentum: Number, *, dampening: Number = 0.0, nesterov: bool = False
) -> GradientTransformation:
    """Replace gradients by their decaying sum, as `torch.optim.SGD` does.

    `b = momentum * b + (1 - dampening) * g`, where the first step takes `b = g`; the
    update is `b`, or `g + momentum * b` for `nesterov`. A momentum of the number zero
    is the identity. A parameter whose first gradient comes after the first step is
    dampened, unlike in `torch.optim.SGD`.

    Reference: Sutskever et al., On the importance of initialization and momentum in
    deep learning, ICML 2013.

    Example:
        >>> heavy_ball, grads = trace(0.5), {"w": torch.ones(2)}
        >>> updates, state = heavy_ball.update(grads, heavy_ball.init(grads))
        >>> heavy_ball.update(grads, state)[0]
        {'w': tensor([1.5000, 1.5000])}
    """
    if is_zero(momentum):
        return chain()

    def start(params: Params) -> TraceState:
        return TraceState(counter(params), zeros(params))

    def move(grads: Grads, state: TraceState) -> tuple[Updates, TraceState]:
        taken: Number = 1
        if not is_zero(dampening):
            # As for the number zero, no momentum is no dampening.
            dampened = (state.count > 0) & (momentum != 0)
            taken = 1 - dampening * dampened.double()
        sums = blend(state.momentum, momentum, grads, taken)

        def direction(grad: Tensor, total: Tensor) -> Tensor:
            return plus(cast(grad, total.dtype), momentum, total) if nesterov else total

        return map_grads(direction, grads, sums), TraceState(state.count + 1, sums)

    return of_history("trace", start, move, real=False)


def sgd(
    lr: Number | Schedule = 1e-3,
    *,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient or, with momentum, along its decaying sum.

    `g += weight_decay * p; b = momentum * b + (1 - dampening) * g; p -= lr * b`, with
    `b = g` at the first step and `g + momentum * b` in the place of `b` for `nesterov`.
    State: with momentum, one tensor of the size of each parameter.

    Raises:
        ValueError: `nesterov` comes without momentum or with dampening.

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
    sums = trace(momentum, dampening=dampening, nesterov=nesterov)
    pure = descent(lr, sums, weight_decay=weight_decay, maximize=maximize)
    donated = donated_sgd(
        TraceState,
        lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    return pure._replace(donated=donated)


def asgd(
    lr: Number | Schedule = 1e-2,
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
    late, as in `torch.optim.ASGD`. State: one tensor of the size of each parameter.

    Reference: Polyak and Juditsky, Acceleration of Stochastic Approximation by
    Averaging, SIAM Journal on Control and Optimization 30 (1992).

    Example:
        >>> from vgrad.optim import averaged_parameters, step
        >>> tx, params = asgd(1.0, lambd=0.0, t0=0), {"w": torch.zeros(1)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     params, state = step(tx, {"w": torch.ones(1)}, state, params)
        >>> params, averaged_parameters(state)
        ({'w': tensor([-3.])}, {'w': tensor([-2.5000])})
    """
    check_numbers(
        "asgd", lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay
    )

    def decaying(count: Tensor) -> Tensor:
        rate = rate_at(lr, (count - 1).clamp_min(0))
        return rate / (1 + lambd * rate * count.double()) ** alpha

    def share(count: Tensor) -> Tensor:
        steps = (count - 1).double()
        return 1 / (steps - scalar(t0, steps)).clamp_min(1)

    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay + lambd),
        scale_by_learning_rate(decaying),
        average_after("asgd", share),
    )

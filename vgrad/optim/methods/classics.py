"""The classics of `torch.optim`: AdaGrad, AdaDelta, RMSprop, Rprop and averaged SGD.

Arguments, defaults and numbers are those of torch. Every number may also be a tensor
without dimensions, whose value is not checked, and `lr` may be a schedule as
`scale_by_learning_rate` takes it. Arithmetic is in `promote_types(dtype, float32)`.
`maximize` turns the gradients around and leaves the decay of weights a decay.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Number | Schedule`.
from __future__ import annotations

from torch import Tensor

from vgrad.optim.arithmetic import Number, is_zero, scalar
from vgrad.optim.averaging import average_after
from vgrad.optim.base import GradientTransformation, chain
from vgrad.optim.methods.optimizers import ascent, check_numbers
from vgrad.optim.methods.scaling import (
    scale_by_adadelta,
    scale_by_rms,
    scale_by_rprop,
    scale_by_rss,
    scale_by_stddev,
)
from vgrad.optim.transforms import add_decayed_weights, scale_by_learning_rate, trace
from vgrad.typing import Schedule


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

    Raises:
        ValueError: a number is negative.

    Reference: Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization, JMLR 12 (2011).

    Example:
        >>> import torch
        >>> tx, params = adagrad(0.1), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
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

    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        scale_by_rss(initial_accumulator_value, eps),
        scale_by_learning_rate(lr if is_zero(lr_decay) else decaying),
    )


def adadelta(
    lr: Number | Schedule = 1.0,
    *,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient, scaled to the size of the steps before.

    `g += weight_decay * p`, then `p -= lr * g * sqrt(d + eps) / sqrt(v + eps)` with
    the mean squares `d` of the directions and `v` of the gradients. State: two tensors
    of the size of each parameter.

    Raises:
        ValueError: a number is negative, or rho is above one.

    Reference: Zeiler, ADADELTA: An Adaptive Learning Rate Method, arXiv 1212.5701.

    Example:
        >>> import torch
        >>> tx, params = adadelta(rho=0.75), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.0020, -0.0020])}
    """
    check_numbers("adadelta", lr, eps=eps, weight_decay=weight_decay)
    _check_share("adadelta", rho=rho)
    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        scale_by_adadelta(rho, eps),
        scale_by_learning_rate(lr),
    )


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
        ValueError: a number is negative, or alpha is above one.

    Reference: Tieleman and Hinton, RMSprop, lecture 6.5 of Neural Networks for Machine
    Learning, 2012; Graves, Generating Sequences With Recurrent Neural Networks,
    arXiv 1308.0850, for the centered form.

    Example:
        >>> import torch
        >>> tx, params = rmsprop(0.1, alpha=0.75), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.2000, -0.2000])}
    """
    check_numbers("rmsprop", lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    _check_share("rmsprop", alpha=alpha)
    moments = scale_by_stddev if centered else scale_by_rms
    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        moments(alpha, eps),
        trace(momentum),
        scale_by_learning_rate(lr),
    )


def rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of the gradient, with a step size of its own for each entry.

    `p -= sign(g) * s`, where the step size `s` starts at `lr` and grows or shrinks by
    `etas` as `scale_by_rprop` describes. It is meant for gradients of all the data at
    once. A rate that changes later, in a state of `inject_hyperparams`, changes
    nothing. State: two tensors of the size of each parameter.

    Raises:
        TypeError: the rate is a schedule, which step sizes that adapt cannot follow.
        ValueError: the rate is negative, or not `0 < etas[0] < 1 < etas[1]`, or not
            `0 <= step_sizes[0] <= step_sizes[1]`.

    Reference: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation
    Learning: The RPROP Algorithm, ICNN 1993.

    Example:
        >>> import torch
        >>> tx, params = rprop(0.1), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    if callable(lr):
        raise TypeError(
            "rprop(lr=schedule): expected a number, got a function. The rate is the "
            "size of the first step only; later ones adapt."
        )
    check_numbers("rprop", lr)
    _check_rprop(etas, step_sizes)
    return chain(
        *ascent(maximize),
        scale_by_rprop(lr, etas=etas, step_sizes=step_sizes),
        scale_by_learning_rate(1.0),
    )


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
    mean of the parameters after each step later than `t0 + 1`, until the first of these
    the parameters themselves: `ax` in torch. State: one tensor of the size of each
    parameter.

    A schedule moves the rate one step late, as it does in `torch.optim.ASGD`.

    Raises:
        ValueError: a number is negative; when updating, if no parameters are given.

    Reference: Polyak and Juditsky, Acceleration of Stochastic Approximation by
    Averaging, SIAM Journal on Control and Optimization 30 (1992).

    Example:
        >>> import torch
        >>> from vgrad.optim.averaging import averaged_parameters
        >>> from vgrad.optim.base import step
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


def rate_at(lr: Number | Schedule, count: Tensor) -> Number:
    """Return a rate, which may be a schedule, after `count` steps."""
    return lr if isinstance(lr, Tensor) or not callable(lr) else lr(count)


def _check_share(function: str, **values: Number) -> None:
    """Each number is at least zero and at most one; tensors pass."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and not 0 <= value <= 1:
            raise ValueError(
                f"{function}({name}={value!r}): expected 0 <= {name} <= 1."
            )


def _check_rprop(
    etas: tuple[Number, Number], step_sizes: tuple[Number, Number]
) -> None:
    """The factors are around one and the sizes in order; tensors pass."""
    if not any(isinstance(eta, Tensor) for eta in etas):
        if not 0 < etas[0] < 1 < etas[1]:
            raise ValueError(f"rprop(etas={etas}): expected 0 < etas[0] < 1 < etas[1].")
    if not any(isinstance(size, Tensor) for size in step_sizes):
        if not 0 <= step_sizes[0] <= step_sizes[1]:
            raise ValueError(
                f"rprop(step_sizes={step_sizes}): expected "
                f"0 <= step_sizes[0] <= step_sizes[1]."
            )

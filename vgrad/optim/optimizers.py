"""The optimizers of `torch.optim` as chains: the same arguments, defaults and numbers.

Every number may also be a tensor without dimensions, whose value is not checked, and
`lr` may be a schedule as `scale_by_learning_rate` takes it. Arithmetic is in
`promote_types(dtype, float32)` where `torch.optim` stays in the dtype of the parameter.
Step counters belong to the optimizer and not to each parameter: where gradients of None
make a parameter miss steps, bias corrections and dampening go by the steps of all.
"""

from torch import Tensor

from vgrad import checks
from vgrad.optim.base import GradientTransformation, chain
from vgrad.optim.transforms import (
    Number,
    add_decayed_weights,
    scale_by_adam,
    scale_by_learning_rate,
    trace,
)
from vgrad.typing import Schedule


def sgd(
    lr: Number | Schedule = 1e-3,
    *,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    nesterov: bool = False,
    weight_decay: Number = 0.0,
) -> GradientTransformation:
    """Descend along the gradient or, with momentum, along its decaying sum.

    `g += weight_decay * p; b = momentum * b + (1 - dampening) * g; p -= lr * b`, with
    `b = g` at the first step and `g + momentum * b` in the place of `b` for `nesterov`.
    State: with momentum, one tensor of the size of each parameter.

    Raises:
        ValueError: a number is negative, or `nesterov` comes without momentum or with
            dampening.

    Example:
        >>> import torch
        >>> tx, params = sgd(0.1, momentum=0.9), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    _check("sgd", lr, momentum=momentum, weight_decay=weight_decay)
    still = not isinstance(momentum, Tensor) and momentum == 0
    dampened = isinstance(dampening, Tensor) or dampening != 0
    if nesterov and (still or dampened):
        raise ValueError(
            f"sgd(nesterov=True, momentum={momentum!r}, dampening={dampening!r}): "
            f"expected momentum > 0 and dampening = 0."
        )
    return chain(
        add_decayed_weights(weight_decay),
        trace(momentum, dampening=dampening, nesterov=nesterov),
        scale_by_learning_rate(lr),
    )


def adam(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
) -> GradientTransformation:
    """Descend along the mean gradient over the root of its mean square.

    `g += weight_decay * p`, then `p -= lr * m / (sqrt(v) + eps)` with the moments `m`
    and `v` of `scale_by_adam`, both corrected for their start at zero. State: two
    tensors of the size of each parameter.

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization,
    arXiv 1412.6980.

    Example:
        >>> import torch
        >>> tx, params = adam(0.1), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    _check("adam", lr, eps=eps, weight_decay=weight_decay)
    _check_betas("adam", betas)
    return chain(
        add_decayed_weights(weight_decay),
        scale_by_adam(betas, eps),
        scale_by_learning_rate(lr),
    )


def adamw(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 1e-2,
) -> GradientTransformation:
    """Descend as `adam` does, with weight decay apart from the moments.

    `p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)`: a schedule moves the decay
    together with the rate. State: two tensors of the size of each parameter.

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization,
    arXiv 1711.05101.

    Example:
        >>> import torch
        >>> tx, params = adamw(0.1, weight_decay=0.5), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1500, -0.1500])}
    """
    _check("adamw", lr, eps=eps, weight_decay=weight_decay)
    _check_betas("adamw", betas)
    return chain(
        scale_by_adam(betas, eps),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )


def _check(function: str, lr: Number | Schedule, **values: Number) -> None:
    """Each number is zero or more; tensors and schedules pass."""
    named = values if callable(lr) else {"lr": lr, **values}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            checks.non_negative(function, **{name: value})


def _check_betas(function: str, betas: tuple[Number, Number]) -> None:
    """Each number is at least zero and below one; tensors pass."""
    for index, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(
                f"{function}(betas={betas}): expected 0 <= betas[{index}] < 1, "
                f"got {beta}."
            )

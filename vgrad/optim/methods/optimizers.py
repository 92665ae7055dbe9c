"""The optimizers of `torch.optim` as chains: the same arguments, defaults and numbers.

Every number may also be a tensor without dimensions, whose value is not checked, and
`lr` may be a schedule as `scale_by_learning_rate` takes it. Arithmetic is in
`promote_types(dtype, float32)` where `torch.optim` stays in the dtype of the parameter.
`maximize` turns the gradients around and leaves the decay of weights a decay.
Step counters belong to the optimizer and not to each parameter: where gradients of None
make a parameter miss steps, bias corrections and dampening go by the steps of all.
"""

from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import Number, is_zero
from vgrad.optim.base import GradientTransformation, chain
from vgrad.optim.fused import donated_adam, donated_sgd
from vgrad.optim.hyperparams import scale
from vgrad.optim.methods.moments import scale_by_amsgrad
from vgrad.optim.transforms import (
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
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
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
    check_numbers("sgd", lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (is_zero(momentum) or not is_zero(dampening)):
        raise ValueError(
            f"sgd(nesterov=True, momentum={momentum!r}, dampening={dampening!r}): "
            f"expected momentum > 0 and dampening = 0."
        )
    pure = chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        trace(momentum, dampening=dampening, nesterov=nesterov),
        scale_by_learning_rate(lr),
    )
    donated = donated_sgd(
        lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    return pure._replace(donated=donated)


def adam(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the mean gradient over the root of its mean square.

    `g += weight_decay * p`, then `p -= lr * m / (sqrt(v) + eps)` with the moments `m`
    and `v` of `scale_by_adam`, both corrected for their start at zero. With `amsgrad`
    the largest `v` so far stands for the last one. State: two tensors of the size of
    each parameter, three with `amsgrad`.

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization,
    arXiv 1412.6980; Reddi et al., On the Convergence of Adam and Beyond,
    arXiv 1904.09237.

    Example:
        >>> import torch
        >>> tx, params = adam(0.1), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers("adam", lr, eps=eps, weight_decay=weight_decay)
    check_betas("adam", betas)
    moments = scale_by_amsgrad if amsgrad else scale_by_adam
    pure = chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        moments(betas, eps),
        scale_by_learning_rate(lr),
    )
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    donated = donated_adam(
        lr, **options, amsgrad=amsgrad, maximize=maximize, decoupled=False
    )
    return pure._replace(donated=donated)


def adamw(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, with weight decay apart from the moments.

    `p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)`: a schedule moves the decay
    together with the rate. State: two tensors of the size of each parameter, three with
    `amsgrad`.

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
    check_numbers("adamw", lr, eps=eps, weight_decay=weight_decay)
    check_betas("adamw", betas)
    moments = scale_by_amsgrad if amsgrad else scale_by_adam
    pure = chain(
        *ascent(maximize),
        moments(betas, eps),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    donated = donated_adam(
        lr, **options, amsgrad=amsgrad, maximize=maximize, decoupled=True
    )
    return pure._replace(donated=donated)


def ascent(maximize: bool) -> list[GradientTransformation]:
    """List what turns gradients around, if anything is to."""
    return [scale(-1.0)] if maximize else []


def check_numbers(function: str, lr: Number | Schedule, **values: Number) -> None:
    """Each number is zero or more; tensors and schedules pass."""
    named = values if callable(lr) else {"lr": lr, **values}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            checks.non_negative(function, **{name: value})


def check_betas(function: str, betas: tuple[Number, Number]) -> None:
    """Each number is at least zero and below one; tensors pass."""
    for index, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(
                f"{function}(betas={betas}): expected 0 <= betas[{index}] < 1, "
                f"got {beta}."
            )

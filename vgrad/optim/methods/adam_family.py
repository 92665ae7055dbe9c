"""The other optimizers of the Adam family in `torch.optim`: NAdam, RAdam, Adamax.

Arguments, defaults and numbers are those of torch. Every number may also be a tensor
without dimensions, whose value is not checked, and `lr` may be a schedule as
`scale_by_learning_rate` takes it. Arithmetic is in `promote_types(dtype, float32)`.
`maximize` turns the gradients around and leaves the decay of weights a decay. With
`decoupled_weight_decay` the decay stays apart from the moments, as in `adamw`.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Number | Schedule`.
from __future__ import annotations

from vgrad.optim.arithmetic import Number
from vgrad.optim.base import GradientTransformation, chain
from vgrad.optim.methods.moments import scale_by_adamax, scale_by_nadam, scale_by_radam
from vgrad.optim.methods.optimizers import ascent, check_betas, check_numbers
from vgrad.optim.transforms import add_decayed_weights, scale_by_learning_rate
from vgrad.typing import Schedule


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

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop.

    Example:
        >>> import torch
        >>> tx, params = nadam(0.1, betas=(0.0, 0.999)), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers(
        "nadam", lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay
    )
    check_betas("nadam", betas)
    moments = scale_by_nadam(betas, eps, momentum_decay=momentum_decay)
    decay = add_decayed_weights(weight_decay)
    return chain(
        *ascent(maximize),
        *((moments, decay) if decoupled_weight_decay else (decay, moments)),
        scale_by_learning_rate(lr),
    )


def radam(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adam` does, as far as the mean square can be relied on.

    `g += weight_decay * p`, then `p -= lr * u` with the direction `u` of
    `scale_by_radam`: the plain mean of the gradients in the first steps. State: two
    tensors of the size of each parameter.

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond,
    arXiv 1908.03265.

    Example:
        >>> import torch
        >>> tx, params = radam(0.1), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers("radam", lr, eps=eps, weight_decay=weight_decay)
    check_betas("radam", betas)
    moments, decay = scale_by_radam(betas, eps), add_decayed_weights(weight_decay)
    return chain(
        *ascent(maximize),
        *((moments, decay) if decoupled_weight_decay else (decay, moments)),
        scale_by_learning_rate(lr),
    )


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

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization,
    arXiv 1412.6980, section 7.1.

    Example:
        >>> import torch
        >>> tx, params = adamax(0.1), {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """
    check_numbers("adamax", lr, eps=eps, weight_decay=weight_decay)
    check_betas("adamax", betas)
    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        scale_by_adamax(betas, eps),
        scale_by_learning_rate(lr),
    )

"""Optimizers by sign and by trust ratio: Lion, LAMB, LARS, and their transformations.

Every number may also be a tensor without dimensions, whose value is not checked, and
`lr` may be a schedule as `scale_by_learning_rate` takes it. Arithmetic is in
`promote_types(dtype, float32)`. `maximize` ascends the gradient, and leaves the decay
of weights a decay. Norms are those of one parameter; under `torch.vmap` each member has
its own.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Params | None`.
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import Number, check_real, length, lerp, scalar, zeros
from vgrad.optim.averaging import required
from vgrad.optim.base import GradientTransformation, Grads, Updates, chain, widened
from vgrad.optim.methods.optimizers import ascent, check_betas, check_numbers
from vgrad.optim.transforms import (
    add_decayed_weights,
    scale_by_adam,
    scale_by_learning_rate,
    trace,
)
from vgrad.tree import map_values
from vgrad.typing import Params, Schedule, Tree


class LionState(NamedTuple):
    """State of `scale_by_lion`: the mean of the gradients."""

    mean: Params


def scale_by_lion(
    betas: tuple[Number, Number] = (0.9, 0.99),
) -> GradientTransformation:
    """Replace gradients by the sign of their mix with the mean of those before.

    The update is `sign(beta1 * m + (1 - beta1) * g)`, and then
    `m = beta2 * m + (1 - beta2) * g`: every entry is -1, 0 or 1, and no gradient flows
    through it. The mean is kept in `promote_types(param dtype, float32)`.

    Raises:
        TypeError: in `init`, if a parameter is complex or integer.

    Reference: Chen et al., Symbolic Discovery of Optimization Algorithms,
    arXiv 2302.06675.

    Example:
        >>> import torch
        >>> lion = scale_by_lion()
        >>> grads = {"w": torch.tensor([3.0, -0.1, 0.0])}
        >>> lion.update(grads, lion.init(grads))[0]
        {'w': tensor([ 1., -1.,  0.])}
    """
    beta1, beta2 = betas

    def init(params: Params) -> LionState:
        check_real("scale_by_lion", params)
        return LionState(zeros(params))

    def update(
        grads: Grads, state: LionState, params: Params | None = None
    ) -> tuple[Updates, LionState]:
        checks.same_names("scale_by_lion(grads)", state.mean, grads)
        mixed = lerp(state.mean, grads, 1 - beta1)
        mean = lerp(state.mean, grads, 1 - beta2)

        def direction(grad: Tensor | None, mix: Tensor) -> Tensor | None:
            return None if grad is None else mix.sign()

        return map_values(direction, grads, mixed), LionState(mean)

    return GradientTransformation(init, update)


def scale_by_trust_ratio(
    trust_coefficient: Number = 1.0, *, weight_decay: Number = 0.0
) -> GradientTransformation:
    """Make the size of an update a share of the size of its parameter.

    The update of each parameter is `r * (g + weight_decay * p)` with the trust ratio
    `r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))`. The ratio is
    one where the parameter is zero, which could never leave it otherwise. There is no
    state.

    Raises:
        ValueError: when updating, if no parameters are given.

    Reference: You et al., Large Batch Training of Convolutional Networks,
    arXiv 1708.03888, algorithm 1. A decay in front, by `add_decayed_weights`, instead
    of in here gives the ratio of LAMB, `norm(p) / norm(g + weight_decay * p)`.

    Example:
        >>> import torch
        >>> trust = scale_by_trust_ratio(0.5)
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> trust.update({"w": torch.tensor([0.0, 0.1])}, trust.init(params), params)[0]
        {'w': tensor([0.0000, 2.5000])}
    """

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        params = required("scale_by_trust_ratio", params)
        checks.same_names("scale_by_trust_ratio(grads)", params, grads)

        def scale(grad: Tensor | None, param: Tensor) -> Tensor | None:
            if grad is None:
                return None
            grad, param = widened(grad), widened(param)
            size, slope = _norm(param), _norm(grad)
            decay = scalar(weight_decay, size)
            whole = slope + decay * size
            still = (size == 0) | (whole == 0)
            ratio = scalar(trust_coefficient, size) * size / whole.masked_fill(still, 1)
            return ratio.masked_fill(still, 1) * (grad + decay * param)

        return map_values(scale, grads, params), state

    return GradientTransformation(lambda params: (), update)


def lion(
    lr: Number | Schedule = 1e-4,
    *,
    betas: tuple[Number, Number] = (0.9, 0.99),
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of a mix of the gradient and the mean of those before.

    `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)`, and then
    `m = beta2 * m + (1 - beta2) * g`. Every entry moves by `lr`, for which the paper
    takes a third to a tenth of the rate of AdamW and a decay as much larger. State: one
    tensor of the size of each parameter.

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: Chen et al., Symbolic Discovery of Optimization Algorithms,
    arXiv 2302.06675.

    Example:
        >>> import torch
        >>> tx, params = lion(0.1), {"w": torch.ones(2)}
        >>> grads = {"w": torch.tensor([5.0, -1.0])}
        >>> tx.update(grads, tx.init(params), params)[0]
        {'w': tensor([-0.1000,  0.1000])}
    """
    check_numbers("lion", lr, weight_decay=weight_decay)
    check_betas("lion", betas)
    return chain(
        *ascent(maximize),
        scale_by_lion(betas),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )


def lamb(
    lr: Number | Schedule = 1e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-6,
    weight_decay: Number = 1e-2,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adamw` does, by a share of the norm of each parameter.

    `u = m / (sqrt(v) + eps) + weight_decay * p; p -= lr * norm(p) / norm(u) * u` with
    the moments `m` and `v` of `scale_by_adam`. The ratio of the norms is one where
    the parameter is zero. State: two tensors of the size of each parameter.

    Raises:
        ValueError: a number is negative, or a beta is not below one.

    Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in
    76 minutes, arXiv 1904.00962, algorithm 2 with the identity for phi.

    Example:
        >>> import torch
        >>> tx, params = lamb(0.1), {"w": torch.tensor([3.0, 3.0])}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.3000, -0.3000])}
    """
    check_numbers("lamb", lr, eps=eps, weight_decay=weight_decay)
    check_betas("lamb", betas)
    return chain(
        *ascent(maximize),
        scale_by_adam(betas, eps),
        add_decayed_weights(weight_decay),
        scale_by_trust_ratio(),
        scale_by_learning_rate(lr),
    )


def lars(
    lr: Number | Schedule = 1.0,
    *,
    momentum: Number = 0.9,
    weight_decay: Number = 0.0,
    trust_coefficient: Number = 1e-3,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend with momentum, by a share of the norm of each parameter.

    `r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))`, then
    `b = momentum * b + lr * r * (g + weight_decay * p); p -= b`. The ratio `r` is one
    where the parameter is zero. The rate is inside the momentum, so a change of it
    reaches the parameters over several steps. State: with momentum, one tensor of the
    size of each parameter.

    Biases and the scales of norms are usually given to another optimizer, see
    `partition`.

    Raises:
        ValueError: a number is negative.

    Reference: You et al., Large Batch Training of Convolutional Networks,
    arXiv 1708.03888, algorithm 1.

    Example:
        >>> import torch
        >>> tx, params = lars(10.0), {"w": torch.tensor([3.0, 4.0])}
        >>> tx.update({"w": torch.tensor([0.0, 9.0])}, tx.init(params), params)[0]
        {'w': tensor([ 0.0000, -0.0500])}
    """
    check_numbers(
        "lars",
        lr,
        momentum=momentum,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
    )
    return chain(
        *ascent(maximize),
        scale_by_trust_ratio(trust_coefficient, weight_decay=weight_decay),
        scale_by_learning_rate(lr),
        trace(momentum),
    )


def _norm(value: Tensor) -> Tensor:
    """Return the norm of all entries; its gradient is zero where the norm is."""
    return length(value.abs().square().sum())

"""LARS and LAMB: updates whose norm is a share of that of their parameter.

Norms are those of one parameter; under `torch.vmap` each member has its own.
"""

from __future__ import annotations

from torch import Tensor

from vgrad.optim.arguments import Number, check_numbers
from vgrad.optim.arithmetic import norm, of_gradient_and_parameter, scalar
from vgrad.optim.base import GradientTransformation, chain
from vgrad.optim.methods.adam import scale_by_adam
from vgrad.optim.methods.sgd import trace
from vgrad.optim.transforms import add_decayed_weights, ascent, scale_by_learning_rate
from vgrad.typing import Schedule


def scale_by_trust_ratio(
    trust_coefficient: Number = 1.0, *, weight_decay: Number = 0.0
) -> GradientTransformation:
    """Make the size of an update a share of the size of its parameter.

    The update of each parameter is `r * (g + weight_decay * p)` with the trust ratio
    `r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))`. The ratio is
    one for a parameter of zeros, which could otherwise never change. There is no state.
    With `add_decayed_weights` in front, instead of the decay here, the ratio is that of
    LAMB, `norm(p) / norm(g + weight_decay * p)`.

    Example:
        >>> trust = scale_by_trust_ratio(0.5)
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> trust.update({"w": torch.tensor([0.0, 0.1])}, trust.init(params), params)[0]
        {'w': tensor([0.0000, 2.5000])}
    """

    def scaled(grad: Tensor, param: Tensor) -> Tensor:
        size, slope = norm(param), norm(grad)
        decay = scalar(weight_decay, size)
        whole = slope + decay * size
        still = (size == 0) | (whole == 0)
        ratio = scalar(trust_coefficient, size) * size / whole.masked_fill(still, 1)
        return ratio.masked_fill(still, 1) * (grad + decay * param)

    return of_gradient_and_parameter("scale_by_trust_ratio", scaled)


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
    the moments `m` and `v` of `scale_by_adam`. The ratio of the norms is one for a
    parameter of zeros. State: two tensors of the size of each parameter.

    Reference: You et al., arXiv 1904.00962, algorithm 2 with the identity for phi.

    Example:
        >>> tx, params = lamb(0.1), {"w": torch.tensor([3.0, 3.0])}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.3000, -0.3000])}
    """
    check_numbers("lamb", lr, betas, eps=eps, weight_decay=weight_decay)
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
    for a parameter of zeros. The rate is inside the momentum, so that changing it
    reaches the parameters over several steps. Biases and the scales of norms usually go
    to another optimizer, see `partition`. State: with momentum, one tensor of the size
    of each parameter.

    Reference: You et al., arXiv 1708.03888, algorithm 1.

    Example:
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

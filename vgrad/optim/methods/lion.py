"""Lion: steps by the sign of a mix of the gradient and the mean of those before."""

from __future__ import annotations

from typing import NamedTuple

from vgrad import checks
from vgrad.optim.arguments import Number, check_betas, check_numbers, check_real
from vgrad.optim.arithmetic import lerp, map_grads, zeros
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.optim.transforms import descent
from vgrad.typing import Params, Schedule


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

    Reference: Chen et al., Symbolic Discovery of Optimization Algorithms,
    arXiv 2302.06675.

    Example:
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

        return map_grads(lambda _, mix: mix.sign(), grads, mixed), LionState(mean)

    return GradientTransformation(init, update)


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
        >>> tx, params = lion(0.1), {"w": torch.ones(2)}
        >>> grads = {"w": torch.tensor([5.0, -1.0])}
        >>> tx.update(grads, tx.init(params), params)[0]
        {'w': tensor([-0.1000,  0.1000])}
    """
    check_numbers("lion", lr, weight_decay=weight_decay)
    check_betas("lion", betas)
    options = {"weight_decay": weight_decay, "decoupled": True, "maximize": maximize}
    return descent(lr, scale_by_lion(betas), **options)

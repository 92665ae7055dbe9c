"""Lion: steps by the sign of a mix of the gradient and the mean of those before."""

from __future__ import annotations

from typing import NamedTuple

from vgrad.optim.arguments import Number, check_numbers
from vgrad.optim.arithmetic import lerp, map_grads, of_history, zeros
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.optim.transforms import descent
from vgrad.typing import Params, Schedule


class LionState(NamedTuple):
    """State of `scale_by_lion`: the mean of the gradients."""

    mean: Params


def scale_by_lion(betas: tuple[Number, Number] = (0.9, 0.99)) -> GradientTransformation:
    """Replace gradients by the sign of their mix with the mean of those before.

    The update is `sign(beta1 * m + (1 - beta1) * g)`, and then
    `m = beta2 * m + (1 - beta2) * g`: every entry is -1, 0 or 1, and no gradient flows
    through it. State: one tensor of the size of each parameter.

    Example:
        >>> lion, grads = scale_by_lion(), {"w": torch.tensor([3.0, -0.1, 0.0])}
        >>> lion.update(grads, lion.init(grads))[0]
        {'w': tensor([ 1., -1.,  0.])}
    """
    beta1, beta2 = betas

    def move(grads: Grads, state: LionState) -> tuple[Updates, LionState]:
        mixed = lerp(state.mean, grads, 1 - beta1)
        mean = lerp(state.mean, grads, 1 - beta2)

        return map_grads(lambda _, mix: mix.sign(), grads, mixed), LionState(mean)

    return of_history("scale_by_lion", lambda params: LionState(zeros(params)), move)


def lion(
    lr: Number | Schedule = 1e-4,
    *,
    betas: tuple[Number, Number] = (0.9, 0.99),
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of a mix of the gradient and the mean of those before.

    `p -= lr * (u + weight_decay * p)` with the signs `u` of `scale_by_lion`. Every
    entry moves by `lr`: the paper takes a third to a tenth of the rate of AdamW, and a
    decay larger by that factor. State: one tensor of the size of each parameter.

    Reference: Chen et al., arXiv 2302.06675.

    Example:
        >>> tx, params = lion(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.tensor([5.0, -1.0])}, tx.init(params), params)[0]
        {'w': tensor([-0.1000,  0.1000])}
    """
    check_numbers("lion", lr, betas, weight_decay=weight_decay)
    options = {"weight_decay": weight_decay, "decoupled": True, "maximize": maximize}
    return descent(lr, scale_by_lion(betas), **options)

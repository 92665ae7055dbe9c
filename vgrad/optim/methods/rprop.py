"""Rprop: steps by the sign of the gradient, of a size that each entry adapts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.optim.arguments import Number, check_numbers
from vgrad.optim.arithmetic import advance, filled, map_grads, of_history, scalar, zeros
from vgrad.optim.base import GradientTransformation, Grads, Updates, chain
from vgrad.optim.transforms import ascent, scale_by_learning_rate
from vgrad.typing import Params


class RpropState(NamedTuple):
    """State of `scale_by_rprop`: the last gradients and the size of the next step."""

    previous: Params
    size: Params


def scale_by_rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
) -> GradientTransformation:
    """Replace gradients by their signs, times a size that adapts for each entry.

    The size starts at `lr`. It grows by the factor `etas[1]` where the sign stays and
    shrinks by `etas[0]` where it changes; then the entry stays for this step and counts
    as zero in the next. Sizes are kept within `step_sizes`. No gradient flows through a
    sign. State: two tensors of the size of each parameter.

    Example:
        >>> rprop, grads = scale_by_rprop(0.5), {"w": torch.tensor([3.0, -0.1])}
        >>> updates, state = rprop.update(grads, rprop.init(grads))
        >>> updates, rprop.update({"w": torch.tensor([3.0, 0.1])}, state)[0]
        ({'w': tensor([ 0.5000, -0.5000])}, {'w': tensor([0.6000, 0.0000])})
    """
    shrink, grow = etas
    least, most = step_sizes

    def start(params: Params) -> RpropState:
        return RpropState(zeros(params), filled(params, lr))

    def move(grads: Grads, state: RpropState) -> tuple[Updates, RpropState]:

        def resize(size: Tensor, grad: Tensor, before: Tensor) -> Tensor:
            agreement = (grad.to(size.dtype) * before).sign()
            grown = torch.where(agreement > 0, scalar(grow, size) * size, size)
            moved = torch.where(agreement < 0, scalar(shrink, size) * size, grown)
            low: Any = scalar(least, size)
            high: Any = scalar(most, size)
            # One bound at a time: one may be a number and the other a tensor.
            return moved.clamp(min=low).clamp(max=high)

        def keep(before: Tensor, grad: Tensor) -> Tensor:
            grad = grad.to(before.dtype)
            return grad.masked_fill((grad * before).sign() < 0, 0)

        def direction(grad: Tensor, kept: Tensor, size: Tensor) -> Tensor:
            return kept.sign() * size

        size = advance(resize, state.size, grads, state.previous)
        kept = advance(keep, state.previous, grads)
        return map_grads(direction, grads, kept, size), RpropState(kept, size)

    return of_history("scale_by_rprop", start, move)


def rprop(
    lr: Number = 1e-2,
    *,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by the sign of the gradient, with a step size for each entry.

    `p -= sign(g) * s`, where the step size `s` starts at `lr` and grows or shrinks by
    `etas` as in `scale_by_rprop`. It is meant for gradients of all the data at once.
    Changing the rate later, in a state of `inject_hyperparams`, has no effect. State:
    two tensors of the size of each parameter.

    Raises:
        TypeError: the rate is a schedule, which step sizes that adapt cannot follow.
        ValueError: not `0 < etas[0] < 1 < etas[1]`, or not
            `0 <= step_sizes[0] <= step_sizes[1]`.

    Reference: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation
    Learning: The RPROP Algorithm, ICNN 1993.

    Example:
        >>> tx, params = rprop(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
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

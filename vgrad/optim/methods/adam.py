"""Adam, AMSGrad and AdamW: the mean gradient over the root of its mean square.

NAdam, RAdam and Adamax, which share the moments, are in `nadam_radam_adamax.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.optim.arguments import Number, check_numbers
from vgrad.optim.arithmetic import (
    blend_squares,
    counter,
    lerp,
    map_grads,
    of_history,
    placed,
    root,
    scalar,
    zeros,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.optim.fused import donated_adam
from vgrad.optim.transforms import descent
from vgrad.tree import map_values
from vgrad.typing import Params, Schedule


class AdamState(NamedTuple):
    """State of `scale_by_adam`: the number of steps taken and both moments."""

    count: Tensor
    mean: Params
    square: Params


class AmsgradState(NamedTuple):
    """State of `scale_by_amsgrad`: that of Adam and the largest second moments."""

    count: Tensor
    mean: Params
    square: Params
    largest: Params


def first_moments(params: Params) -> AdamState:
    """Make the moments before the first step."""
    return AdamState(counter(params), zeros(params), zeros(params))


def next_moments(betas: tuple[Number, Number], state: Any, grads: Grads) -> AdamState:
    """Make one step of the moments; `state` has the fields of `AdamState`."""
    return AdamState(
        state.count + 1,
        lerp(state.mean, grads, 1 - betas[0]),
        blend_squares(state.square, betas[1], grads),
    )


def scale_by_adam(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean of the gradients by the root of the mean of their squares.

    With `m` and `v` the exponential moving averages of `g` and `g * g`, and `t` the
    number of the step, `m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)`. State:
    two tensors of the size of each parameter.

    Example:
        >>> adam, grads = scale_by_adam(), {"w": torch.tensor([3.0, -0.1])}
        >>> adam.update(grads, adam.init(grads))[0]["w"].round(decimals=5)
        tensor([ 1., -1.])
    """
    beta1, beta2 = betas

    def move(grads: Grads, state: AdamState) -> tuple[Updates, AdamState]:
        new = next_moments(betas, state, grads)
        steps = new.count.double()
        # Both corrections go into the denominator, by which there are fewer passes.
        correction = 1 - beta1**steps
        factor = correction / (1 - beta2**steps).sqrt()
        least = correction * scalar(eps, correction)

        def direction(grad: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return m / torch.addcmul(placed(least, v), root(v), placed(factor, v))

        return map_grads(direction, grads, new.mean, new.square), new

    return of_history("scale_by_adam", first_moments, move)


def scale_by_amsgrad(
    betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8
) -> GradientTransformation:
    """Divide the mean of the gradients by the root of their largest mean square.

    This is `scale_by_adam` with the entrywise maximum of all second moments so far in
    the place of the last one. As in torch, the maximum is taken before the correction.
    State: three tensors of the size of each parameter.

    Example:
        >>> amsgrad, grads = scale_by_amsgrad((0.0, 0.5)), {"w": torch.tensor([4.0])}
        >>> updates, state = amsgrad.update(grads, amsgrad.init(grads))
        >>> for _ in range(9):
        ...     updates, state = amsgrad.update({"w": torch.zeros(1)}, state)
        >>> state.square, state.largest
        ({'w': tensor([0.0156])}, {'w': tensor([8.])})
    """
    beta1, beta2 = betas

    def start(params: Params) -> AmsgradState:
        return AmsgradState(*first_moments(params), zeros(params))

    def move(grads: Grads, state: AmsgradState) -> tuple[Updates, AmsgradState]:
        new = next_moments(betas, state, grads)
        largest = map_values(torch.maximum, state.largest, new.square)
        steps = new.count.double()
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps

        def direction(grad: Tensor, m: Tensor, v: Tensor) -> Tensor:
            size = root(v / scalar(correction2, v)) + scalar(eps, v)
            return m / scalar(correction1, m) / size

        updates = map_grads(direction, grads, new.mean, largest)
        return updates, AmsgradState(*new, largest)

    return of_history("scale_by_amsgrad", start, move)


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

    `g += weight_decay * p`, then `p -= lr * m / (sqrt(v) + eps)` with the corrected
    moments `m` and `v` of `scale_by_adam` or, with `amsgrad`, of `scale_by_amsgrad`.
    State: two tensors of the size of each parameter, three with `amsgrad`.

    Reference: Kingma and Ba, arXiv 1412.6980; Reddi et al., arXiv 1904.09237.

    Example:
        >>> tx, params = adam(0.1), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize)


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

    Reference: Loshchilov and Hutter, arXiv 1711.05101.

    Example:
        >>> tx, params = adamw(0.1, weight_decay=0.5), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.1500, -0.1500])}
    """
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize)


def _adam(
    function: str,
    lr: Number | Schedule,
    betas: tuple[Number, Number],
    eps: Number,
    weight_decay: Number,
    amsgrad: bool,
    maximize: bool,
) -> GradientTransformation:
    """Make `adam` or `adamw`, by the name of the function."""
    check_numbers(function, lr, betas, eps=eps, weight_decay=weight_decay)
    moments = scale_by_amsgrad if amsgrad else scale_by_adam
    options = {
        "weight_decay": weight_decay,
        "decoupled": function == "adamw",
        "maximize": maximize,
    }
    kind = AmsgradState if amsgrad else AdamState
    donated = donated_adam(kind, lr, betas=betas, eps=eps, amsgrad=amsgrad, **options)
    return descent(lr, moments(betas, eps), **options)._replace(donated=donated)

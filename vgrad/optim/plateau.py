"""A rate that falls when a measured value no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Grads,
    Number,
    Updates,
    counter,
    expanded,
    scalar,
)
from vgrad.optim.base import GradientTransformation, plain, states_of
from vgrad.tree import tree_map
from vgrad.typing import Params, Tree

Observe = Callable[[Tree, Number], Tree]
"""`observe(state, value)` returns the state after a value was measured."""

Mode = Literal["min", "max"]
MODES = get_args(Mode)
ThresholdMode = Literal["rel", "abs"]
THRESHOLD_MODES = get_args(ThresholdMode)


class PlateauState(NamedTuple):
    """State of `reduce_on_plateau`: the rate, its conditions, and the inner state.

    `best` is the best value observed, `bad` the number of observations without a better
    one, `cooldown` the number of observations still to ignore.
    """

    rate: Tensor
    best: Tensor
    bad: Tensor
    cooldown: Tensor
    inner: Tree


def reduce_on_plateau(
    make: Callable[[Tensor], GradientTransformation],
    lr: Number,
    *,
    mode: Mode = "min",
    factor: Number = 0.1,
    patience: int | Tensor = 10,
    threshold: Number = 1e-4,
    threshold_mode: ThresholdMode = "rel",
    cooldown: int | Tensor = 0,
    min_lr: Number = 0.0,
    eps: Number = 1e-8,
) -> tuple[GradientTransformation, Observe]:
    """Make the steps of `make(rate)`, and lower the rate when a value stagnates.

    Returns the optimizer and `observe(state, value) -> state`, to be called, for
    example, after each epoch. The state may be any tree with the optimizer's
    inside, also stacked for members: then a value `[E]` is one per member.

    The numbers are as in `torch.optim.lr_scheduler.ReduceLROnPlateau`. A value is
    better than the best one, for `mode="min"`, if it is below `best * (1 - threshold)`
    for `"rel"`, `best - threshold` for `"abs"`; NaN never is. After more than
    `patience` values in a row that are not better, `rate = max(rate * factor, min_lr)`,
    if that lowers it by more than `eps`, and the next `cooldown` values do not count.
    The rate is `state.rate`, in float64.

    Example:
        >>> from functools import partial
        >>> from vgrad.optim import sgd
        >>> tx, observe = reduce_on_plateau(partial(sgd, momentum=0.9), 0.5, patience=1)
        >>> state = tx.init({"w": torch.ones(2)})
        >>> for loss in (1.0, 1.0, 1.0):
        ...     state = observe(state, loss)
        >>> state.rate
        tensor(0.0500, dtype=torch.float64)
    """
    checks.choice("reduce_on_plateau", MODES, mode=mode)
    checks.choice("reduce_on_plateau", THRESHOLD_MODES, threshold_mode=threshold_mode)
    checks.between("reduce_on_plateau", 0, 1, **plain(factor=factor))
    lengths = plain(patience=patience, cooldown=cooldown)
    checks.whole("reduce_on_plateau", least=0, **lengths)
    numbers = plain(lr=lr, threshold=threshold, min_lr=min_lr, eps=eps)
    checks.non_negative("reduce_on_plateau", **numbers)
    sign = 1 if mode == "min" else -1

    def init(params: Params) -> PlateauState:
        zero = counter(params)
        rate = zero.double() + scalar(lr, zero.double())
        best = torch.full_like(rate, sign * math.inf)
        inner = make(rate).init(params)
        return PlateauState(rate, best, zero, zero.clone(), inner)

    def update(
        grads: Grads, state: PlateauState, params: Params | None = None
    ) -> tuple[Updates, PlateauState]:
        updates, inner = make(state.rate).update(grads, state.inner, params)
        return updates, state._replace(inner=inner)

    def after(state: PlateauState, value: Number) -> PlateauState:
        best = state.best
        # No gradient flows through a comparison.
        value = expanded("observe", "value", value, best).detach()
        margin = sign * scalar(threshold, best)
        bound = best * (1 - margin) if threshold_mode == "rel" else best - margin
        better = sign * value < sign * bound
        cooling = state.cooldown > 0
        bad = torch.where(better | cooling, 0, state.bad + 1)
        lowering = bad > scalar(patience, bad)
        least: Any = scalar(min_lr, best)
        lower = (state.rate * scalar(factor, best)).clamp(min=least)
        lowered = lowering & (state.rate - lower > scalar(eps, best))
        left = torch.where(cooling, state.cooldown - 1, state.cooldown)
        return PlateauState(
            torch.where(lowered, lower, state.rate),
            torch.where(better, value, best),
            torch.where(lowering, 0, bad),
            torch.where(lowering, scalar(cooldown, left), left),
            state.inner,
        )

    def observe(state: Tree, value: Number) -> Tree:
        plateaus = len(states_of(state, PlateauState))
        if plateaus != 1:
            raise ValueError(
                f"observe(state with {plateaus} plateaus): expected the state of one "
                f"reduce_on_plateau. Pass that part of it."
            )

        def is_plateau(node: Tree) -> bool:
            return isinstance(node, PlateauState)

        def observed(node: Tree) -> Tree:
            return after(node, value) if is_plateau(node) else node

        return tree_map(observed, state, is_leaf=is_plateau)

    return GradientTransformation(init, update), observe

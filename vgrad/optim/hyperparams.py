"""Hyperparameters that live in the state of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Grads,
    Number,
    Updates,
    counter,
    expanded,
    is_schedule,
    rate_at,
)
from vgrad.optim.base import GradientTransformation
from vgrad.tree import map_values, tree_map
from vgrad.typing import Params, Schedule, Tree

Hyperparam = Number | Schedule | tuple["Hyperparam", ...]
"""A number, a tensor without dimensions, a schedule, or a tuple of these."""


class HyperparamsState(NamedTuple):
    """State of `inject_hyperparams`: the steps taken, the values, the inner state."""

    count: Tensor
    hyperparams: dict[str, Tree]
    inner: Tree


def inject_hyperparams(
    make: Callable[..., GradientTransformation], /, **hyperparams: Hyperparam
) -> GradientTransformation:
    """Keep the hyperparameters of an optimizer in its state, where they can be set.

    `inject_hyperparams(adam, lr=1e-3)` makes the steps of `adam(lr=1e-3)`. The values
    are in `state.hyperparams` as float64 tensors; `with_hyperparams` sets them. A
    schedule is evaluated at every step, and overwrites a value set by hand. Bind all
    other options before: `inject_hyperparams(partial(sgd, nesterov=True), lr=0.1)`. For
    members, put `init` under `torch.vmap` with one value per member, or set a tensor
    `[E]` in the stacked state.

    Example:
        >>> from vgrad.optim import sgd
        >>> tx, params = inject_hyperparams(sgd, lr=0.5), {"w": torch.ones(2)}
        >>> state = with_hyperparams(tx.init(params), lr=0.25)
        >>> tx.update({"w": torch.ones(2)}, state, params)[0]
        {'w': tensor([-0.2500, -0.2500])}
    """
    for name, value in hyperparams.items():
        _check_hyperparam(name, value)
    # This call checks the numbers: as tensors of the state they never are.
    unchecked = torch.zeros(())  # instead of a schedule
    make(**tree_map(lambda v: unchecked if is_schedule(v) else v, hyperparams))

    def init(params: Params) -> HyperparamsState:
        count = counter(params)
        values = tree_map(lambda value: _in_state(value, count), hyperparams)
        return HyperparamsState(count, values, make(**values).init(params))

    def update(
        grads: Grads, state: HyperparamsState, params: Params | None = None
    ) -> tuple[Updates, HyperparamsState]:
        checks.names(
            "inject_hyperparams(state.hyperparams)", hyperparams, state.hyperparams
        )

        def now(value: Any, last: Tensor) -> Tensor:
            return _in_state(value, state.count) if is_schedule(value) else last

        values = map_values(partial(tree_map, now), hyperparams, state.hyperparams)
        updates, inner = make(**values).update(grads, state.inner, params)
        return updates, HyperparamsState(state.count + 1, values, inner)

    return GradientTransformation(init, update)


def with_hyperparams(
    state: HyperparamsState, **hyperparams: Number | tuple
) -> HyperparamsState:
    """Return a state of `inject_hyperparams` with other values.

    In a stacked state, a number is set for all members, and a tensor `[E]` has one
    value per member. The values are not checked.

    Example:
        >>> from vgrad.optim import adam
        >>> state = inject_hyperparams(adam, lr=0.5).init({"w": torch.ones(2)})
        >>> with_hyperparams(state, lr=0.25).hyperparams
        {'lr': tensor(0.2500, dtype=torch.float64)}
    """
    if not isinstance(state, HyperparamsState):
        raise TypeError(
            f"with_hyperparams(state): expected the state of inject_hyperparams, got a "
            f"{type(state).__name__}. Pass that part of it."
        )
    old = state.hyperparams
    unknown = set(hyperparams) - set(old)
    if unknown:
        raise ValueError(
            f"with_hyperparams({checks.listed(unknown)}): expected names among "
            f"{checks.listed(old)}."
        )
    new = {name: _like(name, value, old[name]) for name, value in hyperparams.items()}
    return state._replace(hyperparams={**old, **new})


def _in_state(value: Any, count: Tensor) -> Tensor:
    """Make a float64 tensor on the device of the count, not shared with the caller."""
    value = rate_at(value, count)
    if isinstance(value, Tensor):
        return value.to(count.device, torch.float64, copy=True)
    return torch.full_like(count, value, dtype=torch.float64)


def _like(name: str, value: Any, old: Tree) -> Tree:
    """Make tensors of the shape, dtype and device of the old ones."""
    if isinstance(old, tuple):
        if not isinstance(value, tuple) or len(value) != len(old):
            raise ValueError(
                f"with_hyperparams({name}={value!r}): expected a tuple of {len(old)}."
            )
        return tuple(_like(name, v, o) for v, o in zip(value, old, strict=True))
    return expanded("with_hyperparams", name, value, old).clone()


def _check_hyperparam(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for each in value:
            _check_hyperparam(name, each)
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number and not isinstance(value, Tensor) and not callable(value):
        raise TypeError(
            f"inject_hyperparams({name}={value!r}): expected a number, a tensor, a "
            f"schedule or a tuple of these, got a {type(value).__name__}. Bind it "
            f"before: partial(make, {name}={value!r})."
        )

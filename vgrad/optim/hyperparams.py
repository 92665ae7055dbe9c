"""Hyperparameters and rates that live in the state of an optimizer."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.base import (
    GradientTransformation,
    Number,
    counter,
    is_schedule,
    plain,
    rate_at,
    scalar,
    states_of,
)
from vgrad.tree import map_values, tree_map
from vgrad.typing import Schedule, Tree

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
    other options before: `inject_hyperparams(partial(sgd, nesterov=True), lr=0.1)`.

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

    def in_state(value, count):
        """Make a float64 tensor on the device of the count, of memory of its own."""
        value = rate_at(value, count)
        if isinstance(value, Tensor):
            return value.to(count.device, torch.float64, copy=True)
        return torch.full_like(count, value, dtype=torch.float64)

    def init(params):
        count = counter(params)
        values = tree_map(lambda value: in_state(value, count), hyperparams)
        return HyperparamsState(count, values, make(**values).init(params))

    def update(grads, state, params=None):
        checks.names(
            "inject_hyperparams(state.hyperparams)", hyperparams, state.hyperparams
        )

        def now(value, last):
            return in_state(value, state.count) if is_schedule(value) else last

        values = map_values(partial(tree_map, now), hyperparams, state.hyperparams)
        updates, inner = make(**values).update(grads, state.inner, params)
        return updates, HyperparamsState(state.count + 1, values, inner)

    return GradientTransformation(init, update)


def _check_hyperparam(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for part in value:
            _check_hyperparam(name, part)
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number and not isinstance(value, Tensor) and not callable(value):
        raise TypeError(
            f"inject_hyperparams({name}={value!r}): expected a number, a tensor, a "
            f"schedule or a tuple of these, got a {type(value).__name__}. Bind it "
            f"before: partial(make, {name}={value!r})."
        )


def with_hyperparams(
    state: HyperparamsState, **hyperparams: Number | tuple
) -> HyperparamsState:
    """Return a state of `inject_hyperparams` with other values, unchecked.

    In a stacked state, a number is set for all members, and a tensor `[E]` has one
    value per member.

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


def _like(name: str, value: Any, old: Tree) -> Tree:
    """Make tensors of the shape, dtype and device of the old ones."""
    if isinstance(old, tuple):
        if not isinstance(value, tuple) or len(value) != len(old):
            raise ValueError(
                f"with_hyperparams({name}={value!r}): expected a tuple of {len(old)}."
            )
        return tuple(_like(name, v, o) for v, o in zip(value, old, strict=True))
    return _expanded("with_hyperparams", name, value, old).clone()


def _expanded(function: str, name: str, value: Number, like: Tensor) -> Tensor:
    """Bring a number, or a tensor of one or all values, to the shape of `like`."""
    if not isinstance(value, Tensor):
        return torch.full_like(like, value)
    if value.shape not in ((), like.shape):
        raise ValueError(
            f"{function}({name} of shape {tuple(value.shape)}): expected a number or a "
            f"tensor of shape {tuple(like.shape)}."
        )
    return value.to(like.device, like.dtype).expand(like.shape)


Observe = Callable[[Tree, Number], Tree]
"""`observe(state, value)` returns the state after a value was measured."""

Mode = Literal["min", "max"]
ThresholdMode = Literal["rel", "abs"]


class PlateauState(NamedTuple):
    """State of `reduce_on_plateau`: the rate, its conditions, and the inner state.

    `bad` is the number of observations without a better one than `best`, `cooldown` of
    those to ignore.
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

    Returns the optimizer and `observe(state, value) -> state`. The state may be any
    tree with the optimizer's inside, also stacked for members, with a value `[E]`.

    The numbers are as in `torch.optim.lr_scheduler.ReduceLROnPlateau`. A value is
    better than the best one, for `mode="min"`, if it is below `best * (1 - threshold)`
    for `"rel"`, `best - threshold` for `"abs"`; NaN never is. After more than
    `patience` values in a row that are not better, `rate = max(rate * factor, min_lr)`,
    if that lowers it by more than `eps`, and the next `cooldown` values do not count.
    The rate is `state.rate`, in float64.

    Example:
        >>> from vgrad.optim import sgd
        >>> tx, observe = reduce_on_plateau(sgd, 0.5, patience=0)
        >>> state = tx.init({"w": torch.ones(2)})
        >>> observe(observe(state, 1.0), 1.0).rate
        tensor(0.0500, dtype=torch.float64)
    """
    function = "reduce_on_plateau"
    checks.choice(function, get_args(Mode), mode=mode)
    checks.choice(function, get_args(ThresholdMode), threshold_mode=threshold_mode)
    checks.between(function, 0, 1, **plain(factor=factor))
    checks.whole(function, least=0, **plain(patience=patience, cooldown=cooldown))
    numbers = plain(lr=lr, threshold=threshold, min_lr=min_lr, eps=eps)
    checks.non_negative(function, **numbers)
    sign = 1 if mode == "min" else -1

    def init(params):
        zero = counter(params)
        rate = zero.double() + scalar(lr, zero.double())
        best = torch.full_like(rate, sign * math.inf)
        return PlateauState(rate, best, zero, zero.clone(), make(rate).init(params))

    def update(grads, state, params=None):
        updates, inner = make(state.rate).update(grads, state.inner, params)
        return updates, state._replace(inner=inner)

    def after(state, value):
        best = state.best
        # No gradient flows through a comparison.
        value = _expanded("observe", "value", value, best).detach()
        margin = sign * scalar(threshold, best)
        bound = best * (1 - margin) if threshold_mode == "rel" else best - margin
        better = sign * value < sign * bound
        cooling = state.cooldown > 0
        bad = torch.where(better | cooling, 0, state.bad + 1)
        lowering = bad > scalar(patience, bad)
        lower = (state.rate * scalar(factor, best)).clamp(min=scalar(min_lr, best))
        lowered = lowering & (state.rate - lower > scalar(eps, best))
        left = torch.where(cooling, state.cooldown - 1, state.cooldown)
        return PlateauState(
            torch.where(lowered, lower, state.rate),
            torch.where(better, value, best),
            torch.where(lowering, 0, bad),
            torch.where(lowering, scalar(cooldown, left), left),
            state.inner,
        )

    def is_plateau(node):
        return isinstance(node, PlateauState)

    def observe(state, value):
        plateaus = len(states_of(state, is_plateau))
        if plateaus != 1:
            raise ValueError(
                f"observe(state with {plateaus} plateaus): expected the state of one "
                f"reduce_on_plateau. Pass that part of it."
            )
        return tree_map(
            lambda node: after(node, value) if is_plateau(node) else node,
            state,
            is_leaf=is_plateau,
        )

    return GradientTransformation(init, update), observe

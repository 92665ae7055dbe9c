"""Factors, and hyperparameters that live in the state of an optimizer."""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Params | None`.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import Number, counter, scalar
from vgrad.optim.base import GradientTransformation, Grads, Updates, widened
from vgrad.optim.transforms import ScheduleState
from vgrad.tree import map_values
from vgrad.typing import Params, Schedule, Tree

Hyperparam = Number | Schedule | tuple["Hyperparam", ...]
"""A number, a tensor without dimensions, a schedule, or a tuple of these."""


class HyperparamsState(NamedTuple):
    """State of `inject_hyperparams`: the steps taken, the values, the inner state."""

    count: Tensor
    hyperparams: dict[str, Tree]
    inner: Tree


def scale(factor: Number) -> GradientTransformation:
    """Multiply gradients by a factor: `factor * g`.

    There is no state. The result is in `promote_types(dtype, float32)`.

    Raises:
        ValueError: the factor is infinite or NaN.

    Example:
        >>> scale(-0.5).update({"w": torch.ones(2)}, ())
        ({'w': tensor([-0.5000, -0.5000])}, ())
    """
    if not isinstance(factor, Tensor):
        checks.finite("scale", factor=factor)
    return GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None: (_scaled(grads, factor), state),
    )


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiply gradients by a factor that changes: `schedule(t) * g`.

    `t` is the number of steps taken so far, an int64 tensor without dimensions that is
    zero at the first step. The sign is that of the schedule; `scale_by_learning_rate`
    is the same with a minus.

    Raises:
        TypeError: the schedule is not a function.

    Example:
        >>> tx = scale_by_schedule(lambda count: 0.5 ** count.double())
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init({}))
        >>> tx.update({"w": torch.ones(2)}, state)[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    if not callable(schedule):
        raise TypeError(
            f"scale_by_schedule(schedule={schedule!r}): expected a function of the "
            f"step count, got a {type(schedule).__name__}. For a number, use scale."
        )

    def init(params: Params) -> ScheduleState:
        return ScheduleState(counter(params))

    def update(
        grads: Grads, state: ScheduleState, params: Params | None = None
    ) -> tuple[Updates, ScheduleState]:
        factor = schedule(state.count)
        return _scaled(grads, factor), ScheduleState(state.count + 1)

    return GradientTransformation(init, update)


def inject_hyperparams(
    make: Callable[..., GradientTransformation], /, **hyperparams: Hyperparam
) -> GradientTransformation:
    """Keep the hyperparameters of an optimizer in its state, where they can be set.

    `inject_hyperparams(adam, lr=1e-3)` makes the steps of `adam(lr=1e-3)`. Each value
    is a number, a tensor without dimensions, a schedule, or a tuple of these. They are
    in `state.hyperparams` as float64 tensors; `with_hyperparams` sets them. A schedule
    is evaluated at every step, the state holds the rate of the last one, and what is
    set by hand is overwritten. Bind all other options before:
    `inject_hyperparams(partial(sgd, nesterov=True), lr=0.1, momentum=0.9)`.

    Members: put `init` under `torch.vmap` with one value per member, or set a tensor of
    shape [E] in the stacked state. `update` needs no such care, since the values come
    from the state.

    Raises:
        TypeError: a value is neither a number nor a tensor, schedule or tuple.
        ValueError: `make` refuses a number. Values set later are not checked.

    Example:
        >>> from vgrad.optim.methods.optimizers import sgd
        >>> tx, params = inject_hyperparams(sgd, lr=0.5), {"w": torch.ones(2)}
        >>> state = with_hyperparams(tx.init(params), lr=0.25)
        >>> tx.update({"w": torch.ones(2)}, state, params)[0]
        {'w': tensor([-0.2500, -0.2500])}
    """
    for name, value in hyperparams.items():
        _check_hyperparam(name, value)
    # The numbers are checked by this call, since tensors never are.
    make(**{name: _without_schedules(value) for name, value in hyperparams.items()})

    def init(params: Params) -> HyperparamsState:
        count = counter(params)
        values = {n: _in_state(v, count) for n, v in hyperparams.items()}
        return HyperparamsState(count, values, make(**values).init(params))

    def update(
        grads: Grads, state: HyperparamsState, params: Params | None = None
    ) -> tuple[Updates, HyperparamsState]:
        checks.same_names(
            "inject_hyperparams(state.hyperparams)", hyperparams, state.hyperparams
        )
        values = {
            name: _evaluated(value, state.hyperparams[name], state.count)
            for name, value in hyperparams.items()
        }
        updates, inner = make(**values).update(grads, state.inner, params)
        return updates, HyperparamsState(state.count + 1, values, inner)

    return GradientTransformation(init, update)


def with_hyperparams(
    state: HyperparamsState, **hyperparams: Number | tuple
) -> HyperparamsState:
    """Return a state of `inject_hyperparams` with other values.

    A number or a tensor without dimensions is set for all members of a stacked state, a
    tensor of shape [E] one by one. The values are not checked.

    Raises:
        TypeError: the state is not one of `inject_hyperparams`.
        ValueError: it has no hyperparameter of a name, or a value has another shape.

    Example:
        >>> from vgrad.optim.methods.optimizers import adam
        >>> state = inject_hyperparams(adam, lr=0.5).init({"w": torch.ones(2)})
        >>> with_hyperparams(state, lr=0.25).hyperparams
        {'lr': tensor(0.2500, dtype=torch.float64)}
    """
    if not isinstance(state, HyperparamsState):
        raise TypeError(
            f"with_hyperparams(state): expected the state of inject_hyperparams, got a "
            f"{type(state).__name__}. Hand on its part."
        )
    held = state.hyperparams
    unknown = set(hyperparams) - set(held)
    if unknown:
        raise ValueError(
            f"with_hyperparams({checks.listed(unknown)}): expected names among "
            f"{checks.listed(held)}."
        )
    new = {name: _like(name, value, held[name]) for name, value in hyperparams.items()}
    return state._replace(hyperparams={**held, **new})


def _scaled(grads: Grads, factor: Number) -> Updates:
    def multiply(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        grad = widened(grad)
        return scalar(factor, grad) * grad

    return map_values(multiply, grads)


def _without_schedules(value: Any) -> Any:
    """Put a tensor, whose value is not looked at, in the place of each schedule."""
    if isinstance(value, tuple):
        return tuple(_without_schedules(each) for each in value)
    scheduled = not isinstance(value, Tensor) and callable(value)
    return torch.zeros(()) if scheduled else value


def _in_state(value: Any, count: Tensor) -> Tree:
    """Make float64 tensors on the device of the count, none shared with the caller."""
    if isinstance(value, tuple):
        return tuple(_in_state(each, count) for each in value)
    if not isinstance(value, Tensor) and callable(value):
        value = value(count)
    if isinstance(value, Tensor):
        return value.to(count.device, torch.float64, copy=True)
    return torch.full_like(count, value, dtype=torch.float64)


def _evaluated(value: Any, held: Tree, count: Tensor) -> Tree:
    """Return what the state holds, and the rates of schedules at this step."""
    if isinstance(value, tuple):
        pairs = zip(value, held, strict=True)
        return tuple(_evaluated(each, old, count) for each, old in pairs)
    if not isinstance(value, Tensor) and callable(value):
        return _in_state(value, count)
    return held


def _like(name: str, value: Any, held: Tree) -> Tree:
    """Make tensors of the shape, dtype and device of those held."""
    if isinstance(held, tuple):
        if not isinstance(value, tuple) or len(value) != len(held):
            raise ValueError(
                f"with_hyperparams({name}={value!r}): expected a tuple of {len(held)}."
            )
        return tuple(_like(name, v, h) for v, h in zip(value, held, strict=True))
    if not isinstance(value, Tensor):
        return torch.full_like(held, value)
    if value.shape not in ((), held.shape):
        raise ValueError(
            f"with_hyperparams({name} of shape {tuple(value.shape)}): expected a "
            f"number or a tensor of shape {tuple(held.shape)}."
        )
    return value.to(held.device, held.dtype).expand(held.shape).clone()


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

"""The transformations that optimizers are chains of: decay of weights, and factors."""

from __future__ import annotations

from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Grads,
    Number,
    Updates,
    counter,
    is_schedule,
    is_zero,
    map_grads,
    plus,
    scalar,
)
from vgrad.optim.base import (
    GradientTransformation,
    State,
    chain,
    of_gradient_and_parameter,
    plain,
    stateless,
)
from vgrad.optim.grouping import Selection, checked, masked
from vgrad.tree import widened
from vgrad.typing import Params, Schedule


def add_decayed_weights(
    weight_decay: Number, *, mask: Selection | None = None
) -> GradientTransformation:
    """Add the parameters, times a factor, to the gradients: `g + weight_decay * p`.

    Before the moments of an optimizer this is a penalty of the squared norm, after them
    it is decoupled weight decay. A decay of the number zero is the identity and needs
    no parameters. Gradients of parameters that `mask` does not select pass unchanged.

    Args:
        mask: the parameters that decay: a list or tuple of patterns of their names, or
            a function of the name.

    Reference: Loshchilov and Hutter, arXiv 1711.05101.

    Example:
        >>> decay = add_decayed_weights(0.5)
        >>> params = {"w": torch.tensor([2.0, 4.0])}
        >>> decay.update({"w": torch.zeros(2)}, decay.init(params), params)
        ({'w': tensor([1., 2.])}, ())
    """
    if mask is not None:
        mask = checked("add_decayed_weights", "mask", mask)
    if is_zero(weight_decay):
        return chain()
    if mask is not None:
        return masked(add_decayed_weights(weight_decay), mask)
    return of_gradient_and_parameter(
        "add_decayed_weights", lambda grad, param: plus(grad, weight_decay, param)
    )


def scale(factor: Number) -> GradientTransformation:
    """Multiply gradients by a factor: `factor * g`.

    Example:
        >>> scale(-0.5).update({"w": torch.ones(2)}, ())
        ({'w': tensor([-0.5000, -0.5000])}, ())
    """
    checks.finite("scale", **plain(factor=factor))
    return _multiplied(factor)


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiply gradients by a factor that changes: `schedule(t) * g`.

    `t` is the number of steps taken so far, an int64 tensor without dimensions that is
    zero at the first step. `scale_by_learning_rate` is the same with a minus.

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
    return _multiplied(schedule)


def scale_by_learning_rate(rate: Number | Schedule) -> GradientTransformation:
    """Turn gradients into updates that descend: `-rate * g`.

    `rate` is a number, a tensor without dimensions, or a schedule: a function of the
    number of steps taken so far, an int64 tensor without dimensions that is zero at the
    first step. A schedule that needs float64 computes with `count.double()`. Only a
    schedule needs state, a count.

    Example:
        >>> descend = scale_by_learning_rate(lambda count: 1.0 / (count + 1))
        >>> grads = {"w": torch.ones(2)}
        >>> updates, state = descend.update(grads, descend.init(grads))
        >>> descend.update(grads, state)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """
    return _multiplied(rate, negate=True)


def descent(
    lr: Number | Schedule,
    *direction: GradientTransformation,
    weight_decay: Number = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Make the chain that most optimizers are: sign, decay, direction and rate.

    Decoupled decay is added after the direction, so the direction does not scale it.
    """
    decay = add_decayed_weights(weight_decay)
    return chain(
        *ascent(maximize),
        *((*direction, decay) if decoupled else (decay, *direction)),
        scale_by_learning_rate(lr),
    )


def ascent(maximize: bool) -> list[GradientTransformation]:
    """List the change of sign that turns descent into ascent, where one maximizes."""
    return [scale(-1.0)] if maximize else []


def _multiplied(
    factor: Number | Schedule, *, negate: bool = False
) -> GradientTransformation:
    def scaled(grads: Grads, factor: Number) -> Updates:
        def multiply(grad: Tensor) -> Tensor:
            grad = widened(grad)
            value = scalar(factor, grad)
            return (-value if negate else value) * grad

        return map_grads(multiply, grads)

    if not is_schedule(factor):
        return stateless(lambda grads, params: scaled(grads, factor))

    def update(
        grads: Grads, state: State, params: Params | None = None
    ) -> tuple[Updates, State]:
        return scaled(grads, factor(state.count)), State(state.count + 1, {})

    return GradientTransformation(lambda params: State(counter(params), {}), update)

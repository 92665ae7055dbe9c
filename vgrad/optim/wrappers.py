"""Optimizers around optimizers that decide, on the device, which steps are taken.

Both run the inner update at every call, and `torch.where` chooses whether to keep its
result: nothing waits for the device, and `torch.vmap` decides for each member alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import plain
from vgrad.optim.arithmetic import advance, blend, counter, map_grads, scalar, zeros
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.tree import tree_map, widened
from vgrad.typing import Params, Tree


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`: errors in a row and in total, and the inner state."""

    errors: Tensor
    total_errors: Tensor
    last_finite: Tensor
    inner: Tree


class MultiStepsState(NamedTuple):
    """State of `multi_steps`: calls and mean since the last step, the inner state."""

    count: Tensor
    mean: Params
    inner: Tree


def apply_if_finite(
    inner: GradientTransformation, *, max_consecutive_errors: int | Tensor
) -> GradientTransformation:
    """Leave out steps with a gradient that is infinite or NaN, as optax does.

    Such a step has updates of zero and leaves the inner state as it is. After
    `max_consecutive_errors` of them in a row the next one is made all the same, so that
    a training run beyond repair shows. The state counts the errors in a row, which a
    finite step sets to zero, and all errors, and holds whether the last step was
    finite.

    Raises:
        ValueError: the number is not whole or is negative.

    Example:
        >>> from vgrad.optim import trace
        >>> tx = apply_if_finite(trace(0.9), max_consecutive_errors=3)
        >>> grads = {"w": torch.tensor([1.0, float("inf")])}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, state.errors
        ({'w': tensor([0., 0.])}, tensor(1))
    """
    numbers = plain(max_consecutive_errors=max_consecutive_errors)
    checks.whole("apply_if_finite", least=0, **numbers)

    def init(params: Params) -> ApplyIfFiniteState:
        count = counter(params)
        return ApplyIfFiniteState(
            count, count.clone(), torch.ones_like(count).bool(), inner.init(params)
        )

    def update(
        grads: Grads, state: ApplyIfFiniteState, params: Params | None = None
    ) -> tuple[Updates, ApplyIfFiniteState]:
        finite = torch.ones_like(state.last_finite)
        for grad in grads.values():
            if grad is not None:
                finite = finite & grad.isfinite().all().to(finite.device)
        errors = torch.where(finite, 0, state.errors + 1)
        taken = finite | (errors > scalar(max_consecutive_errors, errors))

        # What is discarded is computed from zeros: if it were NaN, gradients through
        # the branch that is kept would be NaN too.
        safe = _kept_or_zero(taken, grads)
        updates, new = inner.update(safe, state.inner, params)
        return _kept_or_zero(taken, updates), ApplyIfFiniteState(
            errors,
            state.total_errors + (~finite),
            finite,
            _select(taken, new, state.inner),
        )

    return GradientTransformation(init, update)


def multi_steps(
    inner: GradientTransformation, steps: int | Tensor
) -> GradientTransformation:
    """Make one inner step of the mean gradient of every `steps` calls.

    All calls but the last of a round have updates of zero and leave the inner state as
    it is. The inner update is computed at every call, which takes time but avoids
    waiting for the device. State: the inner one and one tensor of the size of each
    parameter.

    The mean is over all calls of a round: a gradient of None counts as zero, as when
    torch accumulates. A parameter whose gradient is None at the last call is not
    updated, and what it accumulated waits for the next round.

    Raises:
        ValueError: `steps` is not a whole number of at least one.

    Example:
        >>> from vgrad.optim import sgd
        >>> tx = multi_steps(sgd(1.0), 2)
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params))
        >>> updates
        {'w': tensor([0., 0.])}
        >>> tx.update({"w": torch.tensor([1.0, 3.0])}, state)[0]
        {'w': tensor([-1., -2.])}
    """
    checks.whole("multi_steps", least=1, **plain(steps=steps))

    def init(params: Params) -> MultiStepsState:
        return MultiStepsState(counter(params), zeros(params), inner.init(params))

    def update(
        grads: Grads, state: MultiStepsState, params: Params | None = None
    ) -> tuple[Updates, MultiStepsState]:
        checks.names("multi_steps(grads)", state.mean, grads)
        count = state.count + 1
        last = count >= scalar(steps, count)
        share = 1 / scalar(steps, count.double())
        mean = blend(state.mean, 1.0, grads, share)

        present = map_grads(lambda _, total: total, grads, mean)
        updates, new = inner.update(present, state.inner, params)

        def waiting(total: Tensor, grad: Tensor) -> Tensor:
            return torch.where(last.to(total.device), 0.0, total)

        return _kept_or_zero(last, updates), MultiStepsState(
            torch.where(last, 0, count),
            advance(waiting, mean, grads),
            _select(last, new, state.inner),
        )

    return GradientTransformation(init, update)


def _kept_or_zero(kept: Tensor, values: Grads) -> Updates:
    """Return the values if `kept`, a tensor without dimensions, and zeros otherwise."""

    def choose(value: Tensor) -> Tensor:
        value = widened(value)
        return torch.where(kept.to(value.device), value, 0.0)

    return map_grads(choose, values)


def _select(taken: Tensor, new: Tree, old: Tree) -> Tree:
    """Return the new tree if `taken`, a tensor without dimensions, or else the old."""

    def choose(after: Tensor, before: Tensor) -> Tensor:
        return torch.where(taken.to(after.device), after, before)

    return tree_map(choose, new, old)

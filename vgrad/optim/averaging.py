"""Averages of gradients and parameters, and optimizers around optimizers.

These run the inner update at every call, and `torch.where` chooses, on the device,
whether its result is kept: nothing waits, and under `torch.vmap` each member has its
own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Grads,
    Number,
    Updates,
    advance,
    copies,
    counter,
    filled,
    lerp,
    map_grads,
    plus,
    scalar,
)
from vgrad.optim.base import (
    GradientTransformation,
    State,
    apply_updates,
    check_shares,
    per_parameter,
    plain,
    required,
    states_of,
)
from vgrad.tree import cast, map_values, tree_map, widened
from vgrad.typing import Params, Tree


class LookaheadState(NamedTuple):
    """State of `lookahead`: the steps taken, the slow weights and the inner state."""

    count: Tensor
    slow: Params
    inner: Tree


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


def ema(decay: Number, *, debias: bool = True) -> GradientTransformation:
    """Replace gradients by their exponential moving average.

    `m = decay * m + (1 - decay) * g` from zero; the update is `m`, divided by
    `1 - decay^t` at step `t` for `debias`. State: one tensor per parameter.

    Reference: Kingma and Ba, arXiv 1412.6980, section 3.

    Example:
        >>> tx, grads = ema(0.5), {"w": torch.ones(2)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, state.slots["ema"]
        ({'w': tensor([1., 1.])}, {'w': tensor([0.5000, 0.5000])})
    """
    check_shares("ema", decay=decay)

    def at(count: Tensor) -> Any:
        correction = 1 - decay ** count.double()

        def rule(g: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            mean = lerp(mean, g, 1 - decay)
            return mean / scalar(correction, mean) if debias else mean, mean

        return rule

    return per_parameter("ema", {"ema": 0}, at, real=False)


def ema_parameters(decay: Number) -> GradientTransformation:
    """Keep an exponential moving average of the parameters; updates pass unchanged.

    `average = decay * average + (1 - decay) * p` with the parameters `p` after each
    step, and `average = p` after the first: the numbers of
    `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`. Put it
    last in a chain, and read it by `averaged_parameters`. State: one tensor per
    parameter.

    Reference: Tarvainen and Valpola, arXiv 1703.01780.

    Example:
        >>> from vgrad.optim import chain, sgd, step
        >>> tx, params = chain(sgd(1.0), ema_parameters(0.5)), {"w": torch.ones(1)}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     params, state = step(tx, {"w": torch.ones(1)}, state, params)
        >>> params, averaged_parameters(state)
        ({'w': tensor([-1.])}, {'w': tensor([-0.5000])})
    """
    check_shares("ema_parameters", decay=decay)

    def share(count: Tensor) -> Tensor:
        first = (count == 1).double()
        return first + (1 - first) * (1 - decay)

    return average_after("ema_parameters", share)


def polyak_average(*, start: int | Tensor = 0) -> GradientTransformation:
    """Keep the mean of the parameters over all steps; updates pass unchanged.

    The mean is over the parameters after each step later than `start`; until then it is
    the parameters themselves. With `start=0` these are the numbers of
    `torch.optim.swa_utils.AveragedModel`. Use and state are as in `ema_parameters`.

    Reference: Polyak and Juditsky, SIAM J. Control and Optimization 30 (1992); Izmailov
    et al., arXiv 1803.05407.

    Example:
        >>> from vgrad.optim import chain, sgd, step
        >>> tx, params = chain(sgd(1.0), polyak_average()), {"w": torch.zeros(1)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     params, state = step(tx, {"w": torch.ones(1)}, state, params)
        >>> params, averaged_parameters(state)
        ({'w': tensor([-3.])}, {'w': tensor([-2.])})
    """
    checks.whole("polyak_average", least=0, **plain(start=start))

    def share(count: Tensor) -> Tensor:
        return 1 / (count - scalar(start, count)).clamp(min=1).double()

    return average_after("polyak_average", share)


def averaged_parameters(state: Tree) -> Params:
    """Return the average that `ema_parameters` or `polyak_average` keeps in a state.

    `state` may also be of an optimizer with one average inside. The tensors are in
    `promote_types(param dtype, float32)`.

    Example:
        >>> from vgrad.optim import adam, chain
        >>> tx = chain(adam(), ema_parameters(0.999))
        >>> averaged_parameters(tx.init({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
    """
    averages = states_of(state, State, lambda node: "ax" in node.slots)
    if len(averages) != 1:
        raise ValueError(
            f"averaged_parameters(state with {len(averages)} averages): expected the "
            f"state of one ema_parameters or polyak_average. Pass that part of it."
        )
    return dict(averages[0].slots["ax"])


def lookahead(
    inner: GradientTransformation,
    *,
    sync_period: int | Tensor = 5,
    slow_step_size: Number = 0.5,
) -> GradientTransformation:
    """Let fast weights run ahead, and return part of the way every few steps.

    At every `sync_period`-th step of the inner optimizer the slow weights, which start
    as the parameters, move by `slow_step_size * (p - slow)` towards the parameters `p`,
    which become the slow weights. State: the inner one, which is kept, and one tensor
    per parameter.

    Reference: Zhang et al., arXiv 1907.08610.

    Example:
        >>> from vgrad.optim import sgd, step
        >>> tx, params = lookahead(sgd(1.0), sync_period=2), {"w": torch.zeros(1)}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     params, state = step(tx, {"w": torch.ones(1)}, state, params)
        >>> params
        {'w': tensor([-1.])}
    """
    checks.whole("lookahead", least=1, **plain(sync_period=sync_period))
    checks.positive("lookahead", **plain(slow_step_size=slow_step_size))

    def init(params: Params) -> LookaheadState:
        return LookaheadState(counter(params), copies(params), inner.init(params))

    def update(
        grads: Grads, state: LookaheadState, params: Params | None = None
    ) -> tuple[Updates, LookaheadState]:
        params = required("lookahead", params)
        checks.names("lookahead(params)", state.slow, params)
        count = state.count + 1
        synced = count % scalar(sync_period, count) == 0
        updates, new = inner.update(grads, state.inner, params)
        checks.names("lookahead(grads)", state.slow, updates)

        def forward(slow: Tensor, update: Tensor, param: Tensor) -> Tensor:
            fast = widened(param) + update
            moved = slow + scalar(slow_step_size, slow) * (fast - slow)
            return torch.where(synced.to(slow.device), moved, slow)

        def back(update: Tensor, slow: Tensor, param: Tensor) -> Tensor:
            return torch.where(synced.to(slow.device), slow - param, update)

        slow = advance(forward, state.slow, updates, params)
        updates = map_grads(back, updates, slow, params)
        return updates, LookaheadState(count, slow, new)

    return GradientTransformation(init, update)


def average_after(
    function: str, share: Callable[[Tensor], Tensor]
) -> GradientTransformation:
    """Move an average by a share of the way to the parameters after each step."""

    def init(params: Params) -> State:
        return State(counter(params), {"ax": copies(params)})

    def update(
        grads: Grads, state: State, params: Params | None = None
    ) -> tuple[Updates, State]:
        params = required(function, params)
        checks.names(f"{function}(grads)", state.slots["ax"], grads)
        count = state.count + 1
        after, taken = apply_updates(params, grads), share(count)
        average = map_values(lambda x, p: lerp(x, p, taken), state.slots["ax"], after)
        return dict(grads), State(count, {"ax": average})

    return GradientTransformation(init, update)


def apply_if_finite(
    inner: GradientTransformation, *, max_consecutive_errors: int | Tensor
) -> GradientTransformation:
    """Leave out steps with a gradient that is infinite or NaN, as optax does.

    Such a step has updates of zero and leaves the inner state as it is. After
    `max_consecutive_errors` of them in a row the next one is made anyway, so that a
    training run beyond repair shows.

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

        # A discarded update is computed from zeros: if it were NaN, gradients through
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

    All other calls have updates of zero and leave the inner state as it is. A gradient
    of None counts as zero, as when torch accumulates; a parameter whose gradient is
    None at the last call is not updated, and its sum waits for the next round. State:
    the inner one and one tensor per parameter.

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
        return MultiStepsState(
            counter(params), map_values(filled, params), inner.init(params)
        )

    def update(
        grads: Grads, state: MultiStepsState, params: Params | None = None
    ) -> tuple[Updates, MultiStepsState]:
        checks.names("multi_steps(grads)", state.mean, grads)
        count = state.count + 1
        last = count >= scalar(steps, count)
        share = 1 / scalar(steps, count.double())
        mean = advance(
            lambda total, g: plus(total, share, cast(g, total.dtype)), state.mean, grads
        )

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

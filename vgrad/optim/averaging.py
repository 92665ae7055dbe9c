"""Averages over the steps: of gradients, of parameters, and slow weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, check_shares, plain, required
from vgrad.optim.arithmetic import (
    advance,
    copies,
    counter,
    lerp,
    map_grads,
    of_history,
    scalar,
    zeros,
)
from vgrad.optim.base import (
    GradientTransformation,
    Grads,
    Updates,
    apply_updates,
    states_of,
)
from vgrad.tree import widened
from vgrad.typing import Params, Tree


class EmaState(NamedTuple):
    """State of `ema`: the number of steps taken and the mean of the gradients."""

    count: Tensor
    mean: Params


class AverageState(NamedTuple):
    """State of averages of parameters: the number of steps taken and the average."""

    count: Tensor
    average: Params


class LookaheadState(NamedTuple):
    """State of `lookahead`: the steps taken, the slow weights and the inner state."""

    count: Tensor
    slow: Params
    inner: Tree


def ema(decay: Number, *, debias: bool = True) -> GradientTransformation:
    """Replace gradients by their exponential moving average.

    `m = decay * m + (1 - decay) * g` from zero; the update is `m`, divided by
    `1 - decay^t` at step `t` for `debias`. State: one tensor of the size of each
    parameter.

    Reference: Kingma and Ba, arXiv 1412.6980, section 3.

    Example:
        >>> tx, grads = ema(0.5), {"w": torch.ones(2)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, state.mean
        ({'w': tensor([1., 1.])}, {'w': tensor([0.5000, 0.5000])})
    """
    check_shares("ema", decay=decay)

    def start(params: Params) -> EmaState:
        return EmaState(counter(params), zeros(params))

    def move(grads: Grads, state: EmaState) -> tuple[Updates, EmaState]:
        count = state.count + 1
        mean = lerp(state.mean, grads, 1 - decay)
        correction = 1 - decay ** count.double()

        def direction(grad: Tensor, m: Tensor) -> Tensor:
            return m / scalar(correction, m) if debias else m

        return map_grads(direction, grads, mean), EmaState(count, mean)

    return of_history("ema", start, move, real=False)


def ema_parameters(decay: Number) -> GradientTransformation:
    """Keep an exponential moving average of the parameters; updates pass unchanged.

    `average = decay * average + (1 - decay) * p` with the parameters `p` after each
    step, and `average = p` after the first: the numbers of
    `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`. Put it
    last in a chain, where updates are what is added to the parameters, and read it by
    `averaged_parameters`. A parameter whose update is None enters unchanged. State: one
    tensor of the size of each parameter.

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

    The mean is over the parameters after each step later than `start`; until the first
    of these it is the parameters themselves. With `start=0` these are the numbers
    of `torch.optim.swa_utils.AveragedModel`. Use and state are those of
    `ema_parameters`.

    Raises:
        ValueError: `start` is not a whole number of zero or more.

    Reference: Polyak and Juditsky, Acceleration of Stochastic Approximation by
    Averaging, SIAM Journal on Control and Optimization 30 (1992); Izmailov et al.,
    arXiv 1803.05407.

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

    `state` is that of the average itself or of an optimizer that holds one. The tensors
    are in `promote_types(param dtype, float32)`; before the first step they are the
    parameters given to `init`.

    Raises:
        ValueError: there is not exactly one average in the state.

    Example:
        >>> from vgrad.optim import adam, chain
        >>> tx = chain(adam(), ema_parameters(0.999))
        >>> averaged_parameters(tx.init({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
    """
    found = states_of(state, AverageState)
    if len(found) != 1:
        raise ValueError(
            f"averaged_parameters(state with {len(found)} averages): expected the "
            f"state of one ema_parameters or polyak_average. Pass that part of it."
        )
    return dict(found[0].average)


def lookahead(
    inner: GradientTransformation,
    *,
    sync_period: int | Tensor = 5,
    slow_step_size: Number = 0.5,
) -> GradientTransformation:
    """Let fast weights run ahead, and return part of the way every few steps.

    The inner optimizer moves the parameters. At every `sync_period`-th step the slow
    weights, which start as the parameters, move by `slow_step_size * (p - slow)`
    towards the parameters `p` after the inner step, and the parameters become the slow
    weights. The inner state is kept. Nothing waits for the device. State: the inner one
    and one tensor of the size of each parameter.

    Raises:
        ValueError: the period is not a whole number of at least one, or the step size
            is not positive.

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

    def init(params: Params) -> AverageState:
        return AverageState(counter(params), copies(params))

    def update(
        grads: Grads, state: AverageState, params: Params | None = None
    ) -> tuple[Updates, AverageState]:
        params = required(function, params)
        checks.names(f"{function}(grads)", state.average, grads)
        count = state.count + 1
        average = lerp(state.average, apply_updates(params, grads), share(count))
        return dict(grads), AverageState(count, average)

    return GradientTransformation(init, update)

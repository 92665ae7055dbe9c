"""Averages of gradients and parameters, and optimizers around optimizers.

The inner update runs at every call, and `torch.where` chooses, on the device, whether
its result is kept: nothing waits, and under `torch.vmap` each member has its choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.base import (
    SHARE,
    GradientTransformation,
    Number,
    Rate,
    State,
    advance,
    chain,
    check_numbers,
    check_range,
    copies,
    counter,
    filled,
    lerp,
    map_grads,
    mean_of_squares,
    over_root,
    per_parameter,
    plain,
    plus,
    rate_at,
    required,
    scalar,
    states_of,
)
from vgrad.optim.methods import average_after, sgd
from vgrad.optim.transforms import ascent, descent
from vgrad.tree import cast, map_values, tree_map, widened
from vgrad.typing import Params, Tree


def ema(decay: Number, *, debias: bool = True) -> GradientTransformation:
    """Replace gradients by their exponential moving average.

    `m = decay * m + (1 - decay) * g` from zero; the update is `m`, divided by
    `1 - decay^t` at step `t` for `debias`. State: one tensor per parameter. Reference:
    Kingma and Ba, arXiv 1412.6980, section 3.

    Example:
        >>> tx, grads = ema(0.5, debias=False), {"w": torch.ones(2)}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    check_range("ema", *SHARE, decay=decay)

    def at(count):
        correction = 1 - decay ** count.double()

        def rule(g, mean):
            mean = lerp(mean, g, 1 - decay)
            return mean / scalar(correction, mean) if debias else mean, mean

        return rule

    return per_parameter("ema", {"ema": 0}, at, real=False)


def ema_parameters(decay: Number) -> GradientTransformation:
    """Keep an exponential moving average of the parameters; updates pass unchanged.

    `average = decay * average + (1 - decay) * p` with the parameters `p` after each
    step, and `average = p` after the first, as in `torch.optim.swa_utils.AveragedModel`
    with `get_ema_multi_avg_fn(decay)`. Put it last in a chain, and read it by
    `averaged_parameters`. State: one tensor per parameter. Reference: Tarvainen and
    Valpola, arXiv 1703.01780.

    Example:
        >>> tx = chain(sgd(1.0), ema_parameters(0.999))
        >>> averaged_parameters(tx.init({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
    """
    check_range("ema_parameters", *SHARE, decay=decay)

    def share(count):
        first = (count == 1).double()
        return first + (1 - first) * (1 - decay)

    return average_after("ema_parameters", share)


def polyak_average(*, start: int | Tensor = 0) -> GradientTransformation:
    """Keep the mean of the parameters over all steps; updates pass unchanged.

    The mean is over the parameters after each step later than `start`; until then it is
    the parameters themselves. `start=0` is torch's `AveragedModel`. Use and state are
    as in `ema_parameters`. Reference: Izmailov et al., arXiv 1803.05407.

    Example:
        >>> tx = chain(sgd(1.0), polyak_average())
    """
    checks.whole("polyak_average", least=0, **plain(start=start))

    def share(count):
        return 1 / (count - scalar(start, count)).clamp(min=1).double()

    return average_after("polyak_average", share)


def averaged_parameters(state: Tree) -> Params:
    """Return the average of `ema_parameters`, `polyak_average` or `asgd` in a state.

    `state` may also be of an optimizer with one average inside. The tensors are in
    `promote_types(param dtype, float32)`.

    Example:
        >>> state = chain(sgd(), polyak_average()).init({"w": torch.ones(2)})
        >>> averaged_parameters(state)
        {'w': tensor([1., 1.])}
    """
    averages = states_of(state, lambda x: isinstance(x, State) and "ax" in x.slots)
    if len(averages) != 1:
        raise ValueError(
            f"averaged_parameters(state with {len(averages)} averages): expected one, "
            f"of ema_parameters, polyak_average or asgd. Pass that part of it."
        )
    return dict(averages[0].slots["ax"])


class LookaheadState(NamedTuple):
    """State of `lookahead`: the steps taken, the slow weights and the inner state."""

    count: Tensor
    slow: Params
    inner: Tree


def lookahead(
    inner: GradientTransformation,
    *,
    sync_period: int | Tensor = 5,
    slow_step_size: Number = 0.5,
) -> GradientTransformation:
    """Let fast weights run ahead, and return part of the way every few steps.

    At every `sync_period`-th step of the inner optimizer the slow weights, which start
    as the parameters, move by `slow_step_size * (p - slow)` towards the parameters `p`,
    which become the slow weights. State: the inner one, which is kept, and the slow
    weights. Reference: Zhang et al., arXiv 1907.08610.

    Example:
        >>> tx, params = lookahead(sgd(1.0), sync_period=1), {"w": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """
    checks.whole("lookahead", least=1, **plain(sync_period=sync_period))
    checks.positive("lookahead", **plain(slow_step_size=slow_step_size))

    def init(params):
        return LookaheadState(counter(params), copies(params), inner.init(params))

    def update(grads, state, params=None):
        params = required("lookahead", params, grads, state.slow)
        checks.names("lookahead(params)", state.slow, params)
        count = state.count + 1
        synced = count % scalar(sync_period, count) == 0
        updates, new = inner.update(grads, state.inner, params)

        def forward(slow, update, param):
            fast = widened(param) + update
            moved = slow + scalar(slow_step_size, slow) * (fast - slow)
            return torch.where(synced.to(slow.device), moved, slow)

        def back(update, slow, param):
            return torch.where(synced.to(slow.device), slow - param, update)

        slow = advance(forward, state.slow, updates, params)
        updates = map_grads(back, updates, slow, params)
        return updates, LookaheadState(count, slow, new)

    return GradientTransformation(init, update)


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`: errors in a row and in total, and the inner state."""

    errors: Tensor
    total_errors: Tensor
    last_finite: Tensor
    inner: Tree


def apply_if_finite(
    inner: GradientTransformation, *, max_consecutive_errors: int | Tensor
) -> GradientTransformation:
    """Leave out steps with a gradient that is infinite or NaN, as optax does.

    Such a step has updates of zero and keeps the inner state. After
    `max_consecutive_errors` of them in a row the next one is made anyway. The state
    counts `errors` and `total_errors`.

    Example:
        >>> tx = apply_if_finite(sgd(), max_consecutive_errors=3)
        >>> grads = {"w": torch.tensor([1.0, float("inf")])}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, state.errors
        ({'w': tensor([0., 0.])}, tensor(1))
    """
    numbers = plain(max_consecutive_errors=max_consecutive_errors)
    checks.whole("apply_if_finite", least=0, **numbers)

    def init(params):
        count = counter(params)
        finite = torch.ones_like(count).bool()
        return ApplyIfFiniteState(count, count.clone(), finite, inner.init(params))

    def update(grads, state, params=None):
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
        total, new = state.total_errors + (~finite), _select(taken, new, state.inner)
        state = ApplyIfFiniteState(errors, total, finite, new)
        return _kept_or_zero(taken, updates), state

    return GradientTransformation(init, update)


class MultiStepsState(NamedTuple):
    """State of `multi_steps`: calls and mean since the last step, the inner state."""

    count: Tensor
    mean: Params
    inner: Tree


def multi_steps(
    inner: GradientTransformation, steps: int | Tensor
) -> GradientTransformation:
    """Make one inner step of the mean gradient of every `steps` calls.

    All other calls have updates of zero and keep the inner state. A gradient of None
    counts as zero; a parameter whose gradient is None at the last call is not updated,
    and its sum waits for the next round. State: the inner one, and the mean.

    Example:
        >>> tx, grads = multi_steps(sgd(1.0), 2), {"w": torch.ones(1)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, tx.update(grads, state)[0]
        ({'w': tensor([0.])}, {'w': tensor([-1.])})
    """
    checks.whole("multi_steps", least=1, **plain(steps=steps))

    def init(params):
        mean = map_values(filled, params)
        return MultiStepsState(counter(params), mean, inner.init(params))

    def update(grads, state, params=None):
        checks.names("multi_steps(grads)", state.mean, grads)
        count = state.count + 1
        last = count >= scalar(steps, count)
        share = 1 / scalar(steps, count.double())

        def restart(total, grad):
            return torch.where(last.to(total.device), 0.0, total)

        mean = advance(
            lambda total, g: plus(total, share, cast(g, total.dtype)), state.mean, grads
        )
        present = map_grads(lambda _, total: total, grads, mean)
        updates, new = inner.update(present, state.inner, params)
        new, rest = _select(last, new, state.inner), advance(restart, mean, grads)
        state = MultiStepsState(torch.where(last, 0, count), rest, new)
        return _kept_or_zero(last, updates), state

    return GradientTransformation(init, update)


def _kept_or_zero(kept, values):
    return map_grads(lambda x: torch.where(kept.to(x.device), widened(x), 0.0), values)


def _select(taken, new, old):
    return tree_map(lambda x, y: torch.where(taken.to(x.device), x, y), new, old)


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`: steps taken, their weight, inner state, `z` and `x`."""

    count: Tensor
    weight: Tensor
    inner: Tree
    iterate: Params
    average: Params


def schedule_free(
    inner: GradientTransformation,
    lr: Rate = 1.0,
    *,
    beta: Number = 0.9,
    weight_lr_power: Number = 2.0,
) -> GradientTransformation:
    """Average the iterates instead of using momentum and a falling rate.

    With `y` the parameters, where gradients are taken, `z` the iterate that the inner
    optimizer moves and `x` its average, all three of which start as the parameters:
    `z += inner(gradient at y); x = (1 - c) * x + c * z; y = (1 - beta) * z + beta * x`.
    The share `c` is `w / (sum of w so far)` with `w = lr ** weight_lr_power` of the
    step. `lr` is the rate of the inner optimizer, which should have no momentum; here
    it only weighs the average. Evaluate the model at `x`, which `evaluation_parameters`
    returns. State: `inner`'s, and `z` and `x`, from which the parameters are
    overwritten. Reference: Defazio et al., arXiv 2405.15682.

    Example:
        >>> tx, params = schedule_free(sgd(1.0)), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-1., -1.])}
    """
    check_numbers("schedule_free", lr, weight_lr_power=weight_lr_power)
    check_range("schedule_free", *SHARE, beta=beta)

    def init(params):
        count, both = counter(params), (copies(params), copies(params))
        return ScheduleFreeState(count, count.double(), inner.init(params), *both)

    def update(grads, state, params=None):
        params = required("schedule_free", params, grads, state.iterate)
        moves, new = inner.update(grads, state.inner, params)
        rate = scalar(rate_at(lr, state.count), state.weight)
        weight = rate ** scalar(weight_lr_power, state.weight)
        total = state.weight + weight
        share = weight / total.masked_fill(total == 0, 1.0)

        def mix(update, z, x, y):
            kept = scalar(beta, z)
            return (1 - kept) * z + kept * x - widened(y)

        iterate = advance(lambda z, u: z + u.to(z.dtype), state.iterate, moves)
        average = advance(
            lambda x, _, z: lerp(x, z, share), state.average, moves, iterate
        )
        updates = map_grads(mix, moves, iterate, average, params)
        new_state = ScheduleFreeState(state.count + 1, total, new, iterate, average)
        return updates, new_state

    return GradientTransformation(init, update)


def evaluation_parameters(state: Tree, params: Params) -> Params:
    """Return the parameters to evaluate: `{name: shape} -> {name: shape}`.

    They are the averages of `schedule_free` anywhere in `state`, in the dtypes of
    `params`; parameters without an average are returned as they are.

    Example:
        >>> tx, params = schedule_free_sgd(0.5), {"w": torch.ones(2)}
        >>> evaluation_parameters(tx.init(params), params)
        {'w': tensor([1., 1.])}
    """
    states = states_of(state, lambda node: isinstance(node, ScheduleFreeState))
    if not states:
        raise ValueError(
            "evaluation_parameters(state): expected the state of a schedule_free "
            "optimizer, got one without its averages."
        )
    averages = {name: x for free in states for name, x in free.average.items()}
    checks.names("evaluation_parameters(params)", {**params, **averages}, params)
    return {name: averages.get(name, p).to(p.dtype) for name, p in params.items()}


def schedule_free_sgd(
    lr: Rate = 1.0,
    *,
    momentum: Number = 0.9,
    weight_decay: Number = 0.0,
    weight_lr_power: Number = 2.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient, without a schedule of the rate.

    `schedule_free` around plain `sgd`, with `momentum` for its beta. A schedule for
    `lr` should rise to a constant and not fall. State: two tensors per parameter.
    Reference: Defazio et al., arXiv 2405.15682, algorithm 1 without the scale of Adam.
    """
    decays = {"weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
    check_numbers("schedule_free_sgd", lr, **decays)
    check_range("schedule_free_sgd", *SHARE, momentum=momentum)
    inner = chain(*ascent(maximize), sgd(lr, weight_decay=weight_decay))
    return schedule_free(inner, lr, beta=momentum, weight_lr_power=weight_lr_power)


def schedule_free_adamw(
    lr: Rate = 2.5e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    weight_lr_power: Number = 2.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adamw` does, without a schedule of the rate.

    `schedule_free` with `beta1`, around `adamw` without its first moment, which is not
    kept: `z -= lr * (g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y)`, where
    `v` is the moving average of `g * g`. Schedules as in `schedule_free_sgd`. State:
    three tensors per parameter. Reference: Defazio et al., arXiv 2405.15682, algorithm
    1.
    """
    decays = {"weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
    check_numbers("schedule_free_adamw", lr, betas, eps=eps, **decays)
    options = {"weight_decay": weight_decay, "decoupled": True, "maximize": maximize}

    def at(count):
        correction = 1 - betas[1] ** count.double()

        def rule(g, square):
            square = mean_of_squares(square, g, betas[1])
            return over_root(g, square / scalar(correction, square), eps), square

        return rule

    squares = per_parameter("schedule_free_adamw", {"square": 0}, at)
    inner = descent(lr, squares, **options)
    return schedule_free(inner, lr, beta=betas[0], weight_lr_power=weight_lr_power)

"""Schedule-free training: gradients at one point, steps from another, averages."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import (
    Grads,
    Number,
    Updates,
    advance,
    copies,
    counter,
    lerp,
    map_grads,
    mean_of_squares,
    over_root,
    rate_at,
    scalar,
)
from vgrad.optim.base import (
    GradientTransformation,
    chain,
    check_numbers,
    check_shares,
    per_parameter,
    required,
    states_of,
)
from vgrad.optim.sgd import sgd
from vgrad.optim.transforms import ascent, descent
from vgrad.tree import widened
from vgrad.typing import Params, Schedule, Tree


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`: steps taken, their weight, inner state, `z` and `x`."""

    count: Tensor
    weight: Tensor
    inner: Tree
    iterate: Params
    average: Params


def schedule_free(
    inner: GradientTransformation,
    lr: Number | Schedule = 1.0,
    *,
    beta: Number = 0.9,
    weight_lr_power: Number = 2.0,
) -> GradientTransformation:
    """Average the iterates instead of using momentum and a falling rate.

    With `y` the parameters, where gradients are taken, `z` the iterate that the inner
    optimizer moves and `x` its average, all three of which start as the parameters:
    `z += inner(gradient at y); x = (1 - c) * x + c * z; y = (1 - beta) * z + beta * x`.
    The share `c` is `w / (sum of w so far)` with `w = lr ** weight_lr_power` of the
    step. `lr` is the rate of the inner optimizer, which only weighs the average; it
    should have no momentum, and its weight decay acts on `y`. Evaluate the model at
    `x`, which `evaluation_parameters` returns. State: `inner`'s, and `z` and `x`
    in `promote_types(param dtype, float32)`: parameters of bfloat16 lose no small
    updates, and changes made to them by hand are overwritten.

    Reference: Defazio et al., arXiv 2405.15682.

    Example:
        >>> from vgrad.optim import step
        >>> tx, params = schedule_free(sgd(1.0), beta=0.5), {"w": torch.zeros(1)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     params, state = step(tx, {"w": torch.ones(1)}, state, params)
        >>> params, evaluation_parameters(state, params)
        ({'w': tensor([-2.5000])}, {'w': tensor([-2.])})
    """
    check_numbers("schedule_free", lr, weight_lr_power=weight_lr_power)
    check_shares("schedule_free", beta=beta)

    def init(params: Params) -> ScheduleFreeState:
        count, both = counter(params), (copies(params), copies(params))
        return ScheduleFreeState(count, count.double(), inner.init(params), *both)

    def update(
        grads: Grads, state: ScheduleFreeState, params: Params | None = None
    ) -> tuple[Updates, ScheduleFreeState]:
        params = required("schedule_free", params)
        checks.names("schedule_free(grads)", state.iterate, grads)
        moves, new = inner.update(grads, state.inner, params)
        rate = scalar(rate_at(lr, state.count), state.weight)
        weight = rate ** scalar(weight_lr_power, state.weight)
        total = state.weight + weight
        share = weight / total.masked_fill(total == 0, 1.0)

        def mix(update: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
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

    They are the averages of `schedule_free` in `state`, which may be anywhere inside,
    in the dtypes of `params`; parameters without an average are returned as they are.

    Example:
        >>> tx, params = schedule_free_sgd(0.5), {"w": torch.ones(2)}
        >>> evaluation_parameters(tx.init(params), params)
        {'w': tensor([1., 1.])}
    """
    states = states_of(state, ScheduleFreeState)
    if not states:
        raise ValueError(
            "evaluation_parameters(state): expected the state of a schedule_free "
            "optimizer, got one without its averages."
        )
    averages = {name: x for free in states for name, x in free.average.items()}
    checks.names("evaluation_parameters(params)", {**params, **averages}, params)
    return {name: averages.get(name, p).to(p.dtype) for name, p in params.items()}


def schedule_free_sgd(
    lr: Number | Schedule = 1.0,
    *,
    momentum: Number = 0.9,
    weight_decay: Number = 0.0,
    weight_lr_power: Number = 2.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend along the gradient, without a schedule of the rate.

    `schedule_free` around plain `sgd`, with `momentum` for its beta:
    `z -= lr * (g + weight_decay * y)`. A schedule for `lr` should rise to a constant
    and not fall. State: two tensors per parameter.

    Reference: Defazio et al., arXiv 2405.15682, algorithm 1 without the scale of Adam.

    Example:
        >>> tx, params = schedule_free_sgd(0.5), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """
    decays = {"weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
    check_numbers("schedule_free_sgd", lr, **decays)
    check_shares("schedule_free_sgd", momentum=momentum)
    inner = chain(*ascent(maximize), sgd(lr, weight_decay=weight_decay))
    return schedule_free(inner, lr, beta=momentum, weight_lr_power=weight_lr_power)


def schedule_free_adamw(
    lr: Number | Schedule = 2.5e-3,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    weight_lr_power: Number = 2.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend as `adamw` does, without a schedule of the rate.

    `schedule_free` with `beta1`, around `adamw` without its first moment:
    `z -= lr * (g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y)`, where `v` is
    the moving average of `g * g`. A schedule for `lr` should rise to a constant and not
    fall. State: three tensors per parameter.

    Reference: Defazio et al., arXiv 2405.15682, algorithm 1.

    Example:
        >>> tx, params = schedule_free_adamw(0.5), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """
    decays = {"weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
    check_numbers("schedule_free_adamw", lr, betas, eps=eps, **decays)
    options = {"weight_decay": weight_decay, "decoupled": True, "maximize": maximize}

    def at(count: Tensor) -> Any:
        correction = 1 - betas[1] ** count.double()

        def rule(g: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
            square = mean_of_squares(square, g, betas[1])
            corrected = square / scalar(correction, square)
            return over_root(g, corrected, eps), square

        return rule

    # `scale_by_adam` without the first moment, which is not kept either.
    squares = per_parameter("schedule_free_adamw", {"square": 0}, at)
    inner = descent(lr, squares, **options)
    return schedule_free(inner, lr, beta=betas[0], weight_lr_power=weight_lr_power)

"""Rates that change from step to step: the schedules of `torch.optim.lr_scheduler`.

A schedule is a function of the number of steps taken so far, an int64 tensor or a
number, and returns the rate entry by entry in float64: `cosine(0.1, 100)(50)` is one
rate and `cosine(0.1, 100)(torch.arange(200))` the whole curve. Optimizers take one as
`lr`.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.base import Number, check_range, check_scalars, is_schedule, plain
from vgrad.typing import Schedule

__all__ = [
    "constant",
    "cosine",
    "cosine_with_restarts",
    "cyclic",
    "exponential",
    "join",
    "linear",
    "multi_step",
    "one_cycle",
    "piecewise_constant",
    "polynomial",
    "step",
    "warmup",
]

Length = int | Tensor
Curve = Callable[[Length], Tensor]
"""A schedule that always returns a tensor."""

Anneal = Literal["cos", "linear"]
Mode = Literal["triangular", "triangular2", "exp_range"]


def __dir__() -> list[str]:
    return __all__


def constant(lr: Number, steps: Length = 0, *, factor: Number = 1 / 3) -> Curve:
    """Keep one rate: `lr * factor` for the first `steps` steps, then `lr`.

    Example:
        >>> constant(0.5, 2, factor=0.5)(torch.arange(4)).tolist()
        [0.25, 0.25, 0.5, 0.5]
    """

    def formula(t, lr, factor, steps):
        return torch.where(t < steps, lr * factor, lr)

    rates = {"lr": lr, "factor": factor}
    return _curve("constant", formula, rates, minimum=0, steps=steps)


def linear(
    lr: Number, steps: Length, *, start_factor: Number = 1 / 3, end_factor: Number = 1.0
) -> Curve:
    """Go along a line from `lr * start_factor` to `lr * end_factor`, and stay there.

    `lr * (start_factor + (end_factor - start_factor) * t / steps)` with
    `t = min(count, steps)`. Factors may be zero or above one, other than in `LinearLR`.

    Example:
        >>> linear(1.0, 4, start_factor=0.0)(torch.arange(6)).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    rates = {"lr": lr, "start_factor": start_factor, "end_factor": end_factor}
    return _curve("linear", lambda t, lr, *to: lr * _rise(t, *to), rates, steps=steps)


def polynomial(lr: Number, steps: Length, *, power: Number = 1.0) -> Curve:
    """Fall to zero like a power: `lr * (1 - min(count, steps) / steps) ** power`.

    Example:
        >>> polynomial(1.0, 4, power=2.0)(torch.arange(6)).tolist()
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """

    def formula(t, lr, power, steps):
        # Not clamped: the slope of a root is infinite at zero and would make NaN there.
        return lr * torch.where(t < steps, 1 - t / steps, 0.0) ** power

    return _curve("polynomial", formula, {"lr": lr, "power": power}, steps=steps)


def exponential(lr: Number, gamma: Number) -> Curve:
    """Multiply the rate by `gamma` at every step: `lr * gamma ** count`.

    Example:
        >>> exponential(1.0, 0.5)(torch.arange(4)).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """
    return _curve("exponential", lambda t, lr, g: lr * g**t, {"lr": lr, "gamma": gamma})


def step(lr: Number, step_size: Length, *, gamma: Number = 0.1) -> Curve:
    """Multiply the rate every `step_size` steps: `lr * gamma ** (count // step_size)`.

    Example:
        >>> step(1.0, 2, gamma=0.5)(torch.arange(5)).tolist()
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    def formula(t, lr, gamma, size):
        return lr * gamma ** torch.floor(t / size)

    return _curve("step", formula, {"lr": lr, "gamma": gamma}, step_size=step_size)


def multi_step(
    lr: Number, milestones: Sequence[Length], *, gamma: Number = 0.1
) -> Curve:
    """Multiply the rate at every milestone: `lr * gamma ** k` once `k` are reached.

    A milestone is reached where it is `<= count`; if listed twice, it counts twice.

    Example:
        >>> multi_step(1.0, [1, 3], gamma=0.5)(torch.arange(5)).tolist()
        [1.0, 0.5, 0.5, 0.25, 0.25]
    """

    def formula(t, lr, gamma, *milestones):
        passed = torch.zeros_like(t)
        for place in milestones:
            passed = passed + (t >= place)
        return lr * gamma**passed

    lengths: Any = {f"milestones[{i}]": place for i, place in enumerate(milestones)}
    return _curve("multi_step", formula, {"lr": lr, "gamma": gamma}, **lengths)


def cosine(lr: Number, steps: Length, *, eta_min: Number = 0.0) -> Curve:
    """Swing between `lr` and `eta_min`, which is reached after `steps` steps.

    `eta_min + (lr - eta_min) * (1 + cos(pi * count / steps)) / 2`, which rises again
    later, as in `CosineAnnealingLR`. To hold it,
    `join([cosine(0.1, 100), constant(0.0)], [100])`. Reference: Loshchilov and Hutter,
    arXiv 1608.03983.

    Example:
        >>> cosine(1.0, 3)(torch.arange(7)).round(decimals=2).tolist()
        [1.0, 0.75, 0.25, 0.0, 0.25, 0.75, 1.0]
    """

    def formula(t, lr, eta_min, steps):
        return _half_cosine(lr, eta_min, t / steps)

    return _curve("cosine", formula, {"lr": lr, "eta_min": eta_min}, steps=steps)


def cosine_with_restarts(
    lr: Number, steps: Length, *, T_mult: int = 1, eta_min: Number = 0.0
) -> Curve:
    """Fall from `lr` towards `eta_min` over and over, each time `T_mult` times as long.

    `eta_min + (lr - eta_min) * (1 + cos(pi * s / T)) / 2`, where period number `n` has
    the length `T = steps * T_mult ** n`, and `s` is the number of steps taken in it.
    Restarts are exact for counts of up to 1e12. Reference: as for `cosine`.

    Example:
        >>> cosine_with_restarts(1.0, 1, T_mult=2)(torch.arange(4)).round(decimals=3)
        tensor([1.0000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    [T_mult] = checks.integers("cosine_with_restarts", minimum=1, T_mult=T_mult)

    def formula(t, lr, eta_min, steps):
        if T_mult == 1:
            return _half_cosine(lr, eta_min, t % steps / steps)
        # Period n starts where `reached` is steps * T_mult^n. Both are whole, so that
        # half a step more changes no n, and keeps the logarithm off the edge.
        reached = t * (T_mult - 1) + steps
        n = torch.floor(torch.log((reached + 0.5) / steps) / math.log(T_mult))
        # Rounded, because some devices compute powers of whole numbers inexactly.
        power = torch.round(T_mult**n)
        start = steps * (power - 1) / (T_mult - 1)
        return _half_cosine(lr, eta_min, (t - start) / (steps * power))

    rates = {"lr": lr, "eta_min": eta_min}
    return _curve("cosine_with_restarts", formula, rates, steps=steps)


def cyclic(
    base_lr: Number,
    max_lr: Number,
    *,
    step_size_up: Length = 2000,
    step_size_down: Length | None = None,
    mode: Mode = "triangular",
    gamma: Number = 1.0,
) -> Curve:
    """Go up and down between two rates along lines, over and over.

    `base_lr + (max_lr - base_lr) * height * scale`, where `height` rises from zero to
    one in `step_size_up` steps and falls back in `step_size_down`, by default as many.
    `scale` is one, or `2 ** -n` in cycle number `n` for `"triangular2"`, or
    `gamma ** count` for `"exp_range"`. Reference: Smith, arXiv 1506.01186.

    Example:
        >>> rate = cyclic(0.0, 1.0, step_size_up=2, mode="triangular2")
        >>> rate(torch.arange(8)).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    step_size_down = step_size_up if step_size_down is None else step_size_down
    checks.choice("cyclic", get_args(Mode), mode=mode)

    def formula(t, low, high, gamma, up, down):
        phase = t % (up + down)
        height = torch.minimum(phase / up, (up + down - phase) / down)
        scale = torch.ones_like(t)
        if mode == "triangular2":
            scale = 2 ** -torch.floor(t / (up + down))
        elif mode == "exp_range":
            scale = gamma**t
        return low + (high - low) * height * scale

    rates = {"base_lr": base_lr, "max_lr": max_lr, "gamma": gamma}
    lengths: Any = {"step_size_up": step_size_up, "step_size_down": step_size_down}
    return _curve("cyclic", formula, rates, **lengths)


def one_cycle(
    max_lr: Number,
    steps: Length,
    *,
    pct_start: Number = 0.3,
    anneal_strategy: Anneal = "cos",
    div_factor: Number = 25.0,
    final_div_factor: Number = 1e4,
    three_phase: bool = False,
) -> Curve:
    """Rise to `max_lr`, then fall far below the rate of the start.

    The corners are `max_lr / div_factor` at the first step, `max_lr` after
    `pct_start * steps - 1` steps, and `max_lr / div_factor / final_div_factor` after
    `steps - 1`. `three_phase` adds the rate of the start, twice as far as `max_lr`.
    Between them the rate follows half a cosine or, with `"linear"`, a line; then it
    stays, where `OneCycleLR` goes on. Reference: Smith and Topin, arXiv 1708.07120.

    Example:
        >>> rate = one_cycle(1.0, 6, pct_start=0.5, anneal_strategy="linear")
        >>> rate(torch.arange(3)).tolist()
        [0.04, 0.52, 1.0]
    """
    check_range("one_cycle", "{} <= 1", lambda p: p <= 1, pct_start=pct_start)
    divisors = {"div_factor": div_factor, "final_div_factor": final_div_factor}
    checks.positive("one_cycle", **_plain_numbers("one_cycle", **divisors))
    checks.choice("one_cycle", ANNEAL, anneal_strategy=anneal_strategy)
    anneal = ANNEAL[anneal_strategy]

    def formula(t, top, warm, first, last, steps):
        start, peak, done = top / first, warm * steps - 1, steps - 1
        corners = [(torch.zeros_like(peak), start), (peak, top)]
        if three_phase:
            corners.append((2 * peak, start))
        corners.append((done, start / last))
        t = torch.minimum(t, done)
        phases = []
        for (begin, high), (end, low) in pairwise(corners):
            span = (end - begin).masked_fill(end == begin, 1)  # zero, not NaN, then
            phases.append((end, anneal(high, low, (t - begin) / span)))
        *earlier, (_, rate) = phases
        for end, phase in reversed(earlier):
            rate = torch.where(t <= end, phase, rate)
        return rate

    rates = {"max_lr": max_lr, "pct_start": pct_start, **divisors}
    return _curve("one_cycle", formula, rates, steps=steps)


def join(schedules: Sequence[Schedule], boundaries: Sequence[Length]) -> Curve:
    """Follow one schedule after the other, as `SequentialLR` does.

    From step `boundaries[i - 1]` on the rate follows `schedules[i]`, which counts its
    own steps from there.

    Example:
        >>> rate = join([exponential(1.0, 0.5), constant(2.0)], [3])
        >>> rate(torch.arange(5)).tolist()
        [1.0, 0.5, 0.25, 2.0, 2.0]
    """
    _check_boundaries("join", "schedules", schedules, boundaries)
    for index, schedule in enumerate(schedules):
        _check_schedule("join", f"schedules[{index}]", schedule)

    def joined(count):
        count = torch.as_tensor(count)
        starts = [_tensor(place, count) for place in (0, *boundaries)]
        rate = zero = torch.zeros_like(count, dtype=torch.float64)
        for index, schedule in enumerate(schedules):
            start = starts[index]
            inside = torch.maximum(count, start)
            if index + 1 < len(starts):
                inside = torch.minimum(inside, starts[index + 1] - 1)
            rate = torch.where(count < start, rate, zero + schedule(inside - start))
        return rate

    return joined


def warmup(schedule: Schedule, steps: Length, *, start_factor: Number = 1 / 3) -> Curve:
    """Rise along a line to where a schedule starts, then follow it from its start.

    `schedule(0) * (start_factor + (1 - start_factor) * t / steps)` before step `steps`,
    then `schedule(t - steps)`, as `LinearLR` first in `SequentialLR`. Reference: Goyal
    et al., arXiv 1706.02677.

    Example:
        >>> warmup(polynomial(1.0, 2), 2, start_factor=0.5)(torch.arange(5)).tolist()
        [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    _check_schedule("warmup", "schedule", schedule)
    rates = {"start_factor": start_factor, "end_factor": 1.0}
    ramp = _curve("warmup", _rise, rates, steps=steps)
    return join([lambda t: schedule(torch.zeros_like(t)) * ramp(t), schedule], [steps])


def piecewise_constant(values: Sequence[Number], boundaries: Sequence[Length]) -> Curve:
    """Take `values[i]`, where `i` of the boundaries are `<= count`.

    Example:
        >>> piecewise_constant([1.0, 0.5, 2.0], [1, 3])(torch.arange(5)).tolist()
        [1.0, 0.5, 0.5, 2.0, 2.0]
    """
    rates = {f"values[{index}]": value for index, value in enumerate(values)}
    _check_rates("piecewise_constant", rates)
    _check_boundaries("piecewise_constant", "values", values, boundaries)
    return join([constant(value) for value in values], boundaries)


def _line(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    return start + (end - start) * share


def _rise(t: Tensor, start: Tensor, end: Tensor, steps: Tensor) -> Tensor:
    return _line(start, end, (t / steps).clamp(max=1))


def _half_cosine(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    return end + (start - end) * (1 + torch.cos(math.pi * share)) / 2


ANNEAL: dict[Anneal, Callable] = {"cos": _half_cosine, "linear": _line}
"""How `one_cycle` gets from corner to corner."""


def _curve(function, formula, rates, *, minimum=1, **lengths) -> Curve:
    """Make a schedule of `formula(count, *rates, *lengths)`, all in float64."""
    _check_rates(function, rates)
    checks.integers(function, minimum=minimum, **_plain_numbers(function, **lengths))

    def schedule(count):
        t = torch.as_tensor(count).double()
        numbers = (*rates.values(), *lengths.values())
        return formula(t, *(_tensor(number, t) for number in numbers))

    return schedule


def _tensor(value: Number, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype)
    return like.new_full((), value)


def _check_rates(function: str, rates: dict[str, Number]) -> None:
    numbers = _plain_numbers(function, **rates)
    checks.non_negative(function, **numbers)
    checks.finite(function, **numbers)


def _plain_numbers(function: str, **values: Number) -> dict[str, Any]:
    check_scalars(function, "make the schedule", **values)
    return plain(**values)


def _check_schedule(function: str, name: str, schedule: Any) -> None:
    if not is_schedule(schedule):
        raise TypeError(
            f"{function}({name}={schedule!r}): expected a function of the step count, "
            f"got a {type(schedule).__name__}. For a number, use constant."
        )


def _check_boundaries(function, name, pieces, boundaries) -> None:
    """There is one more piece than boundaries; boundaries that are numbers increase."""
    if len(pieces) != len(boundaries) + 1:
        got = f"{len(pieces)} {name}, {len(boundaries)} boundaries"
        raise ValueError(f"{function}({got}): expected one of {name} more.")
    places = {f"boundaries[{index}]": place for index, place in enumerate(boundaries)}
    numbers = _plain_numbers(function, **places)
    checks.integers(function, minimum=1, **numbers)
    if any(earlier >= later for earlier, later in pairwise(numbers.values())):
        raise ValueError(
            f"{function}(boundaries={list(boundaries)}): expected them to increase."
        )

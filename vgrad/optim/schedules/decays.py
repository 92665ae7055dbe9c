"""Schedules of one formula: constant, a line, a power, stairs, half a cosine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vgrad.optim.arguments import Number
from vgrad.optim.schedules.arguments import (
    Curve,
    Length,
    check_lengths,
    check_rates,
    curve,
)


def constant(lr: Number, steps: Length = 0, *, factor: Number = 1 / 3) -> Curve:
    """Keep one rate: `lr * factor` for the first `steps` steps, then `lr`.

    Example:
        >>> constant(0.5, 2, factor=0.5)(torch.arange(4)).tolist()
        [0.25, 0.25, 0.5, 0.5]
    """
    check_lengths("constant", 0, steps=steps)
    check_rates("constant", lr=lr, factor=factor)

    def formula(t: Tensor, base: Tensor, length: Tensor, share: Tensor) -> Tensor:
        return torch.where(t < length, base * share, base)

    return curve(formula, lr, steps, factor)


def linear(
    lr: Number, steps: Length, *, start_factor: Number = 1 / 3, end_factor: Number = 1.0
) -> Curve:
    """Go along a line from `lr * start_factor` to `lr * end_factor`, and stay there.

    With `t = min(count, steps)`, the rate is
    `lr * (start_factor + (end_factor - start_factor) * t / steps)`. The factors may be
    zero or above one, which the recursion of `LinearLR` cannot start from.

    Example:
        >>> linear(1.0, 4, start_factor=0.0)(torch.arange(6)).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    check_lengths("linear", steps=steps)
    check_rates("linear", lr=lr, start_factor=start_factor, end_factor=end_factor)

    def formula(t: Tensor, *values: Tensor) -> Tensor:
        base, length, start, end = values
        return base * line(start, end, (t / length).clamp(max=1))

    return curve(formula, lr, steps, start_factor, end_factor)


def polynomial(lr: Number, steps: Length, *, power: Number = 1.0) -> Curve:
    """Fall to zero like a power: `lr * (1 - min(count, steps) / steps) ** power`.

    Example:
        >>> polynomial(1.0, 4, power=2.0)(torch.arange(6)).tolist()
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    check_lengths("polynomial", steps=steps)
    check_rates("polynomial", lr=lr, power=power)

    def formula(t: Tensor, base: Tensor, length: Tensor, exponent: Tensor) -> Tensor:
        # Not clamped: the slope of a root is infinite at zero and would make NaN there.
        left = torch.where(t < length, 1 - t / length, 0.0)
        return base * left**exponent

    return curve(formula, lr, steps, power)


def exponential(lr: Number, gamma: Number) -> Curve:
    """Multiply the rate by `gamma` at every step: `lr * gamma ** count`.

    Example:
        >>> exponential(1.0, 0.5)(torch.arange(4)).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """
    check_rates("exponential", lr=lr, gamma=gamma)

    return curve(lambda t, base, ratio: base * ratio**t, lr, gamma)


def step(lr: Number, step_size: Length, *, gamma: Number = 0.1) -> Curve:
    """Multiply the rate every `step_size` steps: `lr * gamma ** (count // step_size)`.

    Example:
        >>> step(1.0, 2, gamma=0.5)(torch.arange(5)).tolist()
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    check_lengths("step", step_size=step_size)
    check_rates("step", lr=lr, gamma=gamma)

    def formula(t: Tensor, base: Tensor, size: Tensor, ratio: Tensor) -> Tensor:
        return base * ratio ** torch.floor(t / size)

    return curve(formula, lr, step_size, gamma)


def multi_step(
    lr: Number, milestones: Sequence[Length], *, gamma: Number = 0.1
) -> Curve:
    """Multiply the rate at every milestone: `lr * gamma ** k` once `k` are reached.

    A milestone is reached where it is `<= count`. They may come in any order, and one
    that is listed twice counts twice.

    Example:
        >>> multi_step(1.0, [1, 3], gamma=0.5)(torch.arange(5)).tolist()
        [1.0, 0.5, 0.5, 0.25, 0.25]
    """
    for index, milestone in enumerate(milestones):
        check_lengths("multi_step", **{f"milestones[{index}]": milestone})
    check_rates("multi_step", lr=lr, gamma=gamma)

    def formula(t: Tensor, base: Tensor, ratio: Tensor, *places: Tensor) -> Tensor:
        passed = torch.zeros_like(t)
        for place in places:
            passed = passed + (t >= place)
        return base * ratio**passed

    return curve(formula, lr, gamma, *milestones)


def cosine(lr: Number, steps: Length, *, eta_min: Number = 0.0) -> Curve:
    """Swing between `lr` and `eta_min`, which is reached after `steps` steps.

    `eta_min + (lr - eta_min) * (1 + cos(pi * count / steps)) / 2`. After `steps` steps
    the rate rises again, as it does in `CosineAnnealingLR`, and is back at `lr` after
    twice as many. To hold it, `join([cosine(0.1, 100), constant(0.0)], [100])`.

    The recursion of `CosineAnnealingLR` is the same function but accumulates rounding
    errors; the formula itself has none to accumulate.

    Reference: Loshchilov and Hutter, arXiv 1608.03983.

    Example:
        >>> cosine(1.0, 3)(torch.arange(7)).round(decimals=2).tolist()
        [1.0, 0.75, 0.25, 0.0, 0.25, 0.75, 1.0]
    """
    check_lengths("cosine", steps=steps)
    check_rates("cosine", lr=lr, eta_min=eta_min)

    def formula(t: Tensor, high: Tensor, length: Tensor, low: Tensor) -> Tensor:
        return half_cosine(high, low, t / length)

    return curve(formula, lr, steps, eta_min)


def line(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """Go from `start` to `end` while `share` goes from zero to one."""
    return start + (end - start) * share


def half_cosine(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """Do the same along half a period of a cosine."""
    return end + (start - end) * (1 + torch.cos(math.pi * share)) / 2

"""Schedules put one after the other: joined, after a warm-up, or constant pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vgrad.optim.arguments import Number
from vgrad.optim.schedules.arguments import Curve, Length, check_lengths, check_rates
from vgrad.optim.schedules.decays import constant, linear
from vgrad.typing import Schedule


def join(schedules: Sequence[Schedule], boundaries: Sequence[Length]) -> Curve:
    """Follow one schedule after the other, as `SequentialLR` does.

    From step `boundaries[i - 1]` on the rate is that of `schedules[i]`, which counts
    its own steps from there. No schedule is evaluated outside its own steps, so one
    that overflows beyond its end leaves the gradients finite.

    Raises:
        TypeError: a schedule is not a function.
        ValueError: there is not one schedule more than boundaries, or these do not
            increase.

    Example:
        >>> from vgrad.optim.schedules import exponential
        >>> rate = join([exponential(1.0, 0.5), constant(2.0)], [3])
        >>> rate(torch.arange(5)).tolist()
        [1.0, 0.5, 0.25, 2.0, 2.0]
    """
    _check_boundaries("join", "schedules", schedules, boundaries)
    for index, schedule in enumerate(schedules):
        _check_schedule("join", f"schedules[{index}]", schedule)

    def joined(count: Tensor) -> Tensor:
        def whole(value: Length) -> Tensor:
            if isinstance(value, Tensor):
                return value.to(count.device, count.dtype)
            return count.new_full((), value)

        starts = [whole(0), *map(whole, boundaries)]
        zero = torch.zeros_like(count, dtype=torch.float64)
        rate = zero
        for index, schedule in enumerate(schedules):
            start = starts[index]
            own = torch.maximum(count, start)
            if index + 1 < len(starts):
                own = torch.minimum(own, starts[index + 1] - 1)
            rate = torch.where(count < start, rate, zero + schedule(own - start))
        return rate

    return joined


def warmup(schedule: Schedule, steps: Length, *, start_factor: Number = 1 / 3) -> Curve:
    """Rise along a line to where a schedule starts, then follow it from its start.

    With `t` the count, the rate is
    `schedule(0) * (start_factor + (1 - start_factor) * t / steps)` before step `steps`,
    and `schedule(t - steps)` from there on: a `LinearLR` first in `SequentialLR`.

    Raises:
        TypeError: the schedule is not a function.

    Reference: Goyal et al., arXiv 1706.02677.

    Example:
        >>> from vgrad.optim.schedules import polynomial
        >>> warmup(polynomial(1.0, 2), 2, start_factor=0.5)(torch.arange(5)).tolist()
        [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    _check_schedule("warmup", "schedule", schedule)
    check_lengths("warmup", steps=steps)
    check_rates("warmup", start_factor=start_factor)
    ramp = linear(1.0, steps, start_factor=start_factor)

    def rise(count: Tensor) -> Tensor:
        return schedule(torch.zeros_like(count)) * ramp(count)

    return join([rise, schedule], [steps])


def piecewise_constant(values: Sequence[Number], boundaries: Sequence[Length]) -> Curve:
    """Take `values[i]`, where `i` of the boundaries are `<= count`.

    Raises:
        ValueError: there is not one value more than boundaries, or these do not
            increase.

    Example:
        >>> piecewise_constant([1.0, 0.5, 2.0], [1, 3])(torch.arange(5)).tolist()
        [1.0, 0.5, 0.5, 2.0, 2.0]
    """
    for index, value in enumerate(values):
        check_rates("piecewise_constant", **{f"values[{index}]": value})
    _check_boundaries("piecewise_constant", "values", values, boundaries)
    return join([constant(value) for value in values], boundaries)


def _check_schedule(function: str, name: str, schedule: Any) -> None:
    """The schedule is a function; a number is a frequent mistake."""
    if isinstance(schedule, Tensor) or not callable(schedule):
        raise TypeError(
            f"{function}({name}={schedule!r}): expected a function of the step count, "
            f"got a {type(schedule).__name__}. For a number, use constant."
        )


def _check_boundaries(
    function: str, name: str, pieces: Sequence[Any], boundaries: Sequence[Length]
) -> None:
    """There is one more piece than boundaries; those that are numbers increase."""
    if len(pieces) != len(boundaries) + 1:
        raise ValueError(
            f"{function}({len(pieces)} {name}, {len(boundaries)} boundaries): expected "
            f"one of {name} more than boundaries."
        )
    for index, boundary in enumerate(boundaries):
        check_lengths(function, **{f"boundaries[{index}]": boundary})
    numbers = [each for each in boundaries if not isinstance(each, Tensor)]
    if any(left >= right for left, right in pairwise(numbers)):
        raise ValueError(
            f"{function}(boundaries={list(boundaries)}): expected them to increase."
        )

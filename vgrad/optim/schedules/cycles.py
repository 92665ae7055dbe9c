"""Schedules of several phases: restarts, triangles, and one cycle over all steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number
from vgrad.optim.schedules.arguments import (
    Curve,
    Length,
    check_lengths,
    check_rates,
    curve,
    plain_numbers,
)
from vgrad.optim.schedules.decays import half_cosine, line

Anneal = Literal["cos", "linear"]
ANNEAL: dict[Anneal, Callable] = {"cos": half_cosine, "linear": line}
"""How `one_cycle` gets from corner to corner."""

Mode = Literal["triangular", "triangular2", "exp_range"]
MODES = get_args(Mode)
"""How the triangles of `cyclic` shrink."""


def cosine_with_restarts(
    lr: Number, steps: Length, *, T_mult: int = 1, eta_min: Number = 0.0
) -> Curve:
    """Fall from `lr` towards `eta_min` over and over, each time `T_mult` times as long.

    `eta_min + (lr - eta_min) * (1 + cos(pi * s / T)) / 2`, where period number `n` has
    the length `T = steps * T_mult ** n`, and `s` is the number of steps taken in it.
    Restarts are at the exact step for counts of up to 1e12. This is
    `CosineAnnealingWarmRestarts`.

    Reference: Loshchilov and Hutter, arXiv 1608.03983.

    Example:
        >>> cosine_with_restarts(1.0, 1, T_mult=2)(torch.arange(4)).round(decimals=3)
        tensor([1.0000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    check_lengths("cosine_with_restarts", steps=steps)
    [T_mult] = checks.whole("cosine_with_restarts", least=1, T_mult=T_mult)
    check_rates("cosine_with_restarts", lr=lr, eta_min=eta_min)

    def formula(t: Tensor, high: Tensor, first: Tensor, low: Tensor) -> Tensor:
        if T_mult == 1:
            return half_cosine(high, low, t % first / first)
        # Period n starts where `reached` is steps * T_mult^n. Both are whole, so that
        # half a step more changes no n, and keeps the logarithm off the edge.
        reached = t * (T_mult - 1) + first
        n = torch.floor(torch.log((reached + 0.5) / first) / math.log(T_mult))
        # Rounded, because some devices compute powers of whole numbers inexactly.
        power = torch.round(T_mult**n)
        start = first * (power - 1) / (T_mult - 1)
        return half_cosine(high, low, (t - start) / (first * power))

    return curve(formula, lr, steps, eta_min)


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
    `gamma ** count` for `"exp_range"`. This is `CyclicLR`.

    Raises:
        ValueError: the mode is unknown.

    Reference: Smith, arXiv 1506.01186.

    Example:
        >>> rate = cyclic(0.0, 1.0, step_size_up=2, mode="triangular2")
        >>> rate(torch.arange(8)).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    step_size_down = step_size_up if step_size_down is None else step_size_down
    check_lengths("cyclic", step_size_up=step_size_up, step_size_down=step_size_down)
    check_rates("cyclic", base_lr=base_lr, max_lr=max_lr, gamma=gamma)
    checks.choice("cyclic", MODES, mode=mode)

    def formula(t: Tensor, *values: Tensor) -> Tensor:
        up, down, low, high, ratio = values
        own = t % (up + down)
        height = torch.minimum(own / up, (up + down - own) / down)
        scale = torch.ones_like(t)
        if mode == "triangular2":
            scale = 2 ** -torch.floor(t / (up + down))
        elif mode == "exp_range":
            scale = ratio**t
        return low + (high - low) * height * scale

    return curve(formula, step_size_up, step_size_down, base_lr, max_lr, gamma)


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
    Between them the rate follows half a cosine or, with `"linear"`, a line.

    Then the rate stays. `OneCycleLR` goes on at step `steps`, to rates that may be
    negative, and raises an error after it, which a function of tensors cannot do.

    Raises:
        ValueError: a divisor is not above zero, `pct_start` is not in [0, 1], or the
            strategy is unknown.

    Reference: Smith and Topin, arXiv 1708.07120.

    Example:
        >>> rate = one_cycle(
        ...     1.0, 6, pct_start=0.5, anneal_strategy="linear",
        ...     div_factor=2.0, final_div_factor=2.0,
        ... )
        >>> rate(torch.arange(7)).tolist()
        [0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.25]
    """
    check_lengths("one_cycle", steps=steps)
    check_rates("one_cycle", max_lr=max_lr, pct_start=pct_start)
    if not isinstance(pct_start, Tensor) and pct_start > 1:
        raise ValueError(f"one_cycle(pct_start={pct_start!r}): expected at most 1.")
    divisors = dict(div_factor=div_factor, final_div_factor=final_div_factor)
    checks.positive("one_cycle", **plain_numbers("one_cycle", **divisors))
    checks.choice("one_cycle", ANNEAL, anneal_strategy=anneal_strategy)
    anneal = ANNEAL[anneal_strategy]

    def formula(t: Tensor, *values: Tensor) -> Tensor:
        top, length, warm, first, last = values
        start, peak, done = top / first, warm * length - 1, length - 1
        corners = [(torch.zeros_like(peak), start), (peak, top)]
        if three_phase:
            corners.append((2 * peak, start))
        corners.append((done, start / last))
        t = torch.minimum(t, done)

        *earlier, final = [
            (end, anneal(high, low, _share(t, begin, end)))
            for (begin, high), (end, low) in pairwise(corners)
        ]
        rate = final[1]
        for end, phase in reversed(earlier):
            rate = torch.where(t <= end, phase, rate)
        return rate

    return curve(formula, max_lr, steps, pct_start, div_factor, final_div_factor)


def _share(t: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Return the share of a phase that is over; zero for a phase without steps.

    The NaN of such a phase would reach the gradients of the others.
    """
    span = end - begin
    return (t - begin) / torch.where(span == 0, torch.ones_like(span), span)

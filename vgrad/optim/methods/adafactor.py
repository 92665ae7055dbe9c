"""Adafactor: mean squares of a matrix kept as one row and one column.

Parameters of many members go through `torch.vmap`: stacked, they would be taken for
larger tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, check_numbers, check_real, rate_at, required
from vgrad.optim.arithmetic import (
    counter,
    lerp,
    map_grads,
    norm,
    scalar,
    squared,
    zeros,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates, chain
from vgrad.optim.clipping import clip_by_block_rms
from vgrad.optim.transforms import ScheduleState, ascent
from vgrad.torch_private import shards
from vgrad.tree import widened
from vgrad.typing import Params, Schedule


class FactoredState(NamedTuple):
    """State of `scale_by_factored_rms`: steps taken, means of squared gradients.

    Tensors of two dimensions or more are in `rows` and `columns`, others in `squares`.
    """

    count: Tensor
    rows: Params
    columns: Params
    squares: Params


def scale_by_factored_rms(
    beta2_decay: Number = -0.8, eps: Number | None = None
) -> GradientTransformation:
    """Divide gradients by the root of their mean square, kept as a row and a column.

    With `b = 1 - t ** beta2_decay` at step `t`, both `row = b * row + (1 - b) *
    mean(g * g, -1)` and `column`, over dimension -2, are moving averages, and
    `v = row * column / max(mean(row), eps)` stands for the mean square. The update is
    `g / max(sqrt(v), eps)`. Tensors of fewer than two dimensions keep `v` whole. State:
    n + m numbers for a matrix of n by m. `eps=None` is the resolution of their dtype.

    Reference: Shazeer and Stern, arXiv 1804.04235; as in `torch.optim.Adafactor`, with
    means instead of sums, and `eps` as a bound instead of a term added to the squares.

    Example:
        >>> factored = scale_by_factored_rms()
        >>> grads = {"w": torch.tensor([[3.0, -3.0], [0.5, -0.5]])}
        >>> updates, state = factored.update(grads, factored.init(grads))
        >>> updates
        {'w': tensor([[ 1., -1.],
                [ 1., -1.]])}
        >>> state.rows["w"].shape, state.columns["w"].shape
        (torch.Size([2, 1]), torch.Size([1, 2]))
    """

    def init(params: Params) -> FactoredState:
        check_real("scale_by_factored_rms", params)
        wide = {name: p for name, p in params.items() if p.ndim > 1}

        def empty(dim: int) -> Params:
            shapes = {n: [*p.shape] for n, p in wide.items()}
            for shape in shapes.values():
                shape[dim] = 1
            return {n: _cut(p.new_empty(shapes[n]), p, dim) for n, p in wide.items()}

        rows, columns = empty(-1), empty(-2)
        rest = {name: p for name, p in params.items() if p.ndim < 2}
        return FactoredState(counter(params), zeros(rows), zeros(columns), zeros(rest))

    def update(
        grads: Grads, state: FactoredState, params: Params | None = None
    ) -> tuple[Updates, FactoredState]:
        names = [*state.rows, *state.squares]
        checks.names("scale_by_factored_rms(grads)", names, grads)
        count = state.count + 1
        take = count.double() ** beta2_decay
        now = squared(grads)

        def averaged(old: Params, dim: int | None) -> Params:
            means = {name: _mean(now[name], dim) for name in old}
            return lerp(old, means, take)

        rows, columns = averaged(state.rows, -1), averaged(state.columns, -2)
        squares = averaged(state.squares, None)

        def direction(name: str, grad: Tensor) -> Tensor:
            if name in squares:
                square = squares[name]
                least = _least(eps, square)
            else:
                row, column = rows[name], columns[name]
                least = _least(eps, row)
                square = row * column / row.mean(-2, keepdim=True).clamp_min(least)
            found = widened(grad) * square.clamp_min(least * least).rsqrt()
            return shards.placed(found, grad) if shards.is_distributed(grad) else found

        updates = {n: g if g is None else direction(n, g) for n, g in grads.items()}
        return updates, FactoredState(count, rows, columns, squares)

    return GradientTransformation(init, update)


def adafactor(
    lr: Number | Schedule = 1e-2,
    *,
    beta2_decay: Number = -0.8,
    eps: tuple[Number | None, Number] = (None, 1e-3),
    d: Number = 1.0,
    weight_decay: Number = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Descend by a share of the size of each parameter, with almost no state.

    `p -= lr * weight_decay * p + min(lr, 1 / sqrt(t)) * max(eps[1], rms(p)) * u` with
    `u` the update of `scale_by_factored_rms(beta2_decay, eps[0])`, divided by
    `max(1, rms(u) / d)`, at step `t`. State: n + m numbers for a matrix of n by m.

    Raises:
        ValueError: `beta2_decay` is positive, or `d` is below one.

    Reference: Shazeer and Stern, arXiv 1804.04235; with the decay and the rate of
    `torch.optim.Adafactor`.

    Example:
        >>> tx, params = adafactor(0.1), {"w": torch.full((2, 2), 3.0)}
        >>> tx.update({"w": torch.ones(2, 2)}, tx.init(params), params)[0]
        {'w': tensor([[-0.3000, -0.3000],
                [-0.3000, -0.3000]])}
    """
    floors = {"eps[0]": 0.0 if eps[0] is None else eps[0], "eps[1]": eps[1]}
    check_numbers("adafactor", lr, **floors, weight_decay=weight_decay)
    if not isinstance(beta2_decay, Tensor) and not beta2_decay <= 0:
        raise ValueError(
            f"adafactor(beta2_decay={beta2_decay!r}): expected beta2_decay <= 0."
        )
    if not isinstance(d, Tensor) and not d >= 1:
        raise ValueError(f"adafactor(d={d!r}): expected d >= 1.")
    return chain(
        *ascent(maximize),
        scale_by_factored_rms(beta2_decay, eps[0]),
        clip_by_block_rms(d),
        _descend_by_size(lr, eps[1], weight_decay),
    )


def _descend_by_size(
    lr: Number | Schedule, least: Number, weight_decay: Number
) -> GradientTransformation:
    """Scale by the rate, which falls step by step, and by the size of parameters."""

    def init(params: Params) -> ScheduleState:
        return ScheduleState(counter(params))

    def update(
        grads: Grads, state: ScheduleState, params: Params | None = None
    ) -> tuple[Updates, ScheduleState]:
        params = required("adafactor", params)
        checks.names("adafactor(grads)", params, grads)
        count = state.count + 1
        rate = rate_at(lr, state.count)
        bound = count.double().rsqrt()
        bound = bound.clamp_max(scalar(rate, bound))

        def descend(grad: Tensor, param: Tensor) -> Tensor:
            grad, param = widened(grad), widened(param)
            rms = norm(param) / max(param.numel(), 1) ** 0.5
            size = rms.clamp_min(scalar(least, rms)) * scalar(bound, rms)
            decay = scalar(rate, param) * scalar(weight_decay, param)
            return -(size * grad + decay * param)

        return map_grads(descend, grads, params), ScheduleState(count)

    return GradientTransformation(init, update)


def _mean(square: Tensor | None, dim: int | None) -> Tensor | None:
    """Return the mean over a dimension, zero over none of length; `None` takes none."""
    if square is None or dim is None:
        return square
    return _cut(square.sum(dim, keepdim=True) / max(square.shape[dim], 1), square, dim)


def _cut(mean: Tensor, square: Tensor, dim: int) -> Tensor:
    """Cut a mean over a dimension among the ranks that the squares are cut among.

    torch would cut some of one row along their columns, or leave them whole.
    """
    return shards.reduced(mean, square, dim) if shards.is_distributed(square) else mean


def _least(eps: Number | None, like: Tensor) -> Number:
    """Return the smallest root of a mean square, whose square is a normal number."""
    finite = torch.finfo(like.dtype)
    least = scalar(finite.eps if eps is None else eps, like)
    tiny = finite.tiny**0.5
    return least.clamp_min(tiny) if isinstance(least, Tensor) else max(least, tiny)

"""How much samples count at the rows of tables, where they have gradients.

A sample with a gradient at k rows counts 1 / sqrt(k) at each: a vector of L2 norm 1, or
of zeros. Numbers are integers, multiples of 2^-31 that are rounded down, so the norm is
at most 1 in memory, and sums have the same bits in any order.

B samples, T positions, V rows of a table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vgrad.factors import Factor, Scaled
from vgrad.factors.rows import Rows

UNIT = 2**31
"""The integer for a count of one."""

Touched = tuple[Tensor, Tensor]
"""Rows [B, T] at which samples may have gradients, and whether they do, each once."""


def touched(factor: Factor) -> Touched:
    """Return the rows of a table at which the gradients of samples are not zero."""
    if isinstance(factor, Scaled):
        return touched(factor.factor)
    if not isinstance(factor, Rows):
        some = (factor.grad() != 0).unsqueeze(-1).flatten(2).any(2)
        rows = torch.arange(some.shape[1], device=some.device)
        return rows.expand_as(some), some
    # Positions without a gradient, such as padding, come last.
    some = (factor.outputs != 0).any(2)
    rows = torch.where(some, factor.index, factor.shape[0]).sort(1).values
    before = torch.cat([rows[:, :1] - 1, rows[:, :-1]], 1)[:, : rows.shape[1]]
    first = (rows != before) & (rows < factor.shape[0])
    return torch.where(first, rows, 0), first


def counted(
    tables: Sequence[Touched], sizes: Sequence[int], keep: Tensor
) -> list[Tensor]:
    """Sum the counts of samples to keep at the rows of all tables, int64 [V] each."""
    count = torch.stack([some.sum(1) for _, some in tables]).sum(0).clamp(min=1)
    part = (UNIT / count.double().sqrt()).long()
    # However that was rounded, the sum of squares is now at most 1.
    part = part - (part * part * count > UNIT**2).long()
    part = torch.where(keep, part, 0)
    pairs = zip(tables, sizes, strict=True)
    return [
        part.new_zeros(size).index_add(
            0, rows.flatten(), (some * part[:, None]).flatten()
        )
        for (rows, some), size in pairs
    ]

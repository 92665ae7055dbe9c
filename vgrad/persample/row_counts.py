"""Sums of how much samples count at the rows of tables, where they have gradients.

A sample with a gradient at k rows counts 1 / sqrt(k) at each: a vector of L2 norm 1, or
of zeros. Numbers are integers, multiples of 2^-31 that are rounded down, so the norm is
at most 1 in memory, and sums have the same bits in any order.

B samples, T positions, V rows of a table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vgrad.factors import Factor, Scaled
from vgrad.factors.rows import Rows

UNIT = 2**31
"""The integer for a count of one."""


class Touched(NamedTuple):
    """The rows at which samples have gradients, one entry for each of a sample."""

    index: Tensor  # number of a row, int64 [B, T]
    counts: Tensor  # which positions count, bool [B, T]
    rows: int  # of the table


def touched(factor: Factor) -> Touched:
    """Return the rows of a table at which the gradients of samples are not zero."""
    if isinstance(factor, Scaled):
        return touched(factor.factor)
    rows = factor.shape[0]
    if not isinstance(factor, Rows):
        grad = factor.grad()
        some = (grad != 0).unsqueeze(-1).flatten(2).any(2)
        return Touched(
            torch.arange(rows, device=grad.device).expand_as(some), some, rows
        )
    # The row past the last one is for positions without a gradient, such as padding.
    some = (factor.outputs != 0).any(2)
    index = torch.where(some, factor.index, rows).sort(1).values
    first = torch.ones_like(index[:, :1], dtype=torch.bool)
    first = torch.cat([first, index[:, 1:] != index[:, :-1]], 1)[:, : index.shape[1]]
    return Touched(index, first & (index < rows), rows)


def counted(tables: Sequence[Touched], keep: Tensor) -> list[Tensor]:
    """Sum the vectors of samples, of one norm over all tables, int64 [V] of each."""
    count = torch.stack([each.counts.sum(1) for each in tables]).sum(0).clamp(min=1)
    part = (UNIT / count.double().sqrt()).long()
    # In integers, whatever was rounded: the sum of squares is at most 1.
    part = torch.where(keep, part - (part * part * count > UNIT**2).long(), 0)
    sums = []
    for index, counts, rows in tables:
        total = part.new_zeros(rows + 1)
        total = total.index_add(0, index.flatten(), (counts * part[:, None]).flatten())
        sums.append(total[:rows])
    return sums

"""Sums of per-sample gradients, exact where plain code is not.

B samples. Sums are float32 or wider, whatever the dtype of the gradients.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vgrad.persample.factors.reductions import memory_order, products
from vgrad.tree import double, wide
from vgrad.typing import Params

ROWS_AT_ONCE = 65536
"""Rows of one matrix product in float32; sums over more are kept in float64."""

_SAMPLES = 32
"""Samples that are summed in float32 before float64 takes over."""

_LARGE = 1e15
"""Size up to which numbers and their products stay far from the ends of float32."""


class Sums:
    """Sums over samples for each parameter, added up chunk by chunk.

    One chunk is left as it is; more are added in float64 and rounded once at the end,
    so that the sum does not drift as the batch grows.

    Attributes:
        totals: the sums so far.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.totals: Params = {}

    def add(self, part: Params) -> None:
        """Add the sums of one chunk."""
        if not self.totals:
            self.totals = part
            return
        for name, value in part.items():
            self.totals[name] = double(self.totals[name]) + value

    def divide(self, by: float) -> None:
        """Divide the sums by a number."""
        if by != 1:
            self.totals = {name: each / by for name, each in self.totals.items()}

    def rounded(self, params: Params) -> Params:
        """Return sums in `promote_types(dtype, float32)`, zeros if there are none."""
        return {
            name: self.totals[name].to(wide(value.dtype))
            if self.totals
            else torch.zeros_like(value, dtype=wide(value.dtype), requires_grad=False)
            for name, value in params.items()
        }


def total(parts: Sequence[Tensor]) -> Tensor:
    """Add parts of a sum in float64, and round once."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([double(part) for part in parts]).sum(0).to(parts[0].dtype)


def reach(tensors: Sequence[Tensor]) -> Tensor:
    """Return [B], no less than any number of a sample, infinite where that is large."""
    sizes = [
        torch.linalg.vector_norm(
            each, dim=[*range(1, each.ndim)], dtype=wide(each.dtype)
        )
        for each in tensors
    ]
    return torch.stack(sizes).sum(0)


def ordinary(reach: Tensor, weights: Tensor) -> Tensor:
    """Tell for which samples a weighted sum of products stays far from float32's ends.

    Numbers are at most `reach` [B]. For others a weight may take one side of a product
    past the end, or to where there are few digits, before it meets the other side.
    """
    sizes = weights.double().abs()
    fine = (reach <= _LARGE) & (sizes * reach.square() <= _LARGE**2)
    return fine & ((sizes >= 1 / _LARGE**2) | (sizes == 0))


def rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive numbers to a dtype so that none becomes larger."""
    found = numbers.to(dtype)
    fixed = found.detach()  # nextafter has a derivative from torch 2.13 on
    step = fixed - torch.nextafter(fixed, torch.zeros_like(fixed))
    return torch.where(found > numbers, found - step, found)


def weighted_rows(grad: Tensor, weights: Tensor) -> Tensor:
    """Sum rows with weights, [B, ...] and [B] -> [...] in float32 or wider."""
    axes = list(range(grad.ndim)) if grad.is_contiguous() else memory_order(grad)
    grad = grad.permute(axes)
    flat = grad.reshape(len(grad), math.prod(grad.shape[1:]))
    rows, row = products(flat, weights[None])
    whole = len(rows) // _SAMPLES * _SAMPLES
    if len(rows) <= _SAMPLES:
        found = row @ rows
    else:
        left = row[:, :whole].reshape(-1, 1, _SAMPLES)
        parts = torch.bmm(left, rows[:whole].unflatten(0, (-1, _SAMPLES)))
        found = double(parts).sum(0) + double(row[:, whole:] @ rows[whole:])
    found = found.to(wide(grad.dtype)).reshape(grad.shape[1:])
    return found.permute([axes.index(axis) - 1 for axis in range(1, len(axes))])

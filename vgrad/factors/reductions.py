"""Norms and sums of per-sample gradients, exact where plain code is not.

B samples, P numbers in one sample's gradient of one parameter, T positions. Everything
runs in float32 or wider, with autocast off, whatever the dtype of the gradients.
"""

import functools
import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from vgrad.conditions import checks_collected, occurs
from vgrad.devices import is_host
from vgrad.factors import products
from vgrad.torch_private import kernels, modes
from vgrad.tree import cast, double, promoted, wide
from vgrad.typing import Params

_BLOCK = 256
"""Numbers whose squares are summed in float32 before float64 takes over.

A single float32 norm loses up to 2e-3 over 3e7 numbers on a CPU; blocks of this length
lose 1e-7 and cost the same.
"""

_SMALL = 2**16
"""Numbers whose squares are summed in float64 at once, which takes one op."""

_LOW = 1e-10
"""Norms from which on no square that matters is lost in float32."""

_SPOILED = 1e10
"""Size of both sides up to which float32 loses little of the product of four numbers.
"""


def norm_dtype(params: Params) -> torch.dtype:
    """Return the dtype of norms over all parameters: real, float32 or wider."""
    kinds = {*map(attrgetter("dtype"), params.values())}
    return functools.reduce(promoted, kinds, torch.float32).to_real()


def together(numbers: Tensor) -> Tensor:
    """Root of the sum of squares, [..., K] -> [...] in float64, of any size."""
    numbers = double(numbers)
    if numbers.shape[-1] == 0:
        return numbers.sum(-1)
    if numbers.shape[-1] == 1:
        return numbers.abs()[..., 0]
    # The root has no slope at zero; zero is taken, as torch does for its norms.
    tiny = torch.finfo(torch.float64).tiny
    scale = numbers.detach().abs().amax(-1).clamp(min=tiny)
    squares = (numbers / scale[..., None]).square().sum(-1)
    if not squares.requires_grad and not modes.inside_transform():
        return scale * squares.sqrt()
    zero = squares == 0
    return scale * torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())


def root(norms: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """Root of the sum of squares of norms in float64, of gradients of a dtype."""
    if norms.shape[axis] == 1:
        return norms.squeeze(axis)
    wide = dtype in (torch.float64, torch.complex128)
    if wide or norms.requires_grad or modes.inside_transform():
        return together(norms.movedim(axis, -1))
    # Squares of products of float32 have room in float64.
    return torch.linalg.vector_norm(norms, dim=axis)


def row_norms(grad: Tensor) -> Tensor:
    """L2 norm over all but the first dimension, [B, ...] -> [B] in float64."""
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    exact = real.dtype == torch.float64 or real.requires_grad
    if exact or modes.inside_transform():
        return together(_rows(real))
    if real.numel() <= _SMALL or not is_host(real.device):
        # Squares of float32 have room in float64; on a CPU this is slow.
        flat = real if real.ndim > 1 else _rows(real)
        axes = [*range(1, flat.ndim)]
        return torch.linalg.vector_norm(flat, dim=axes, dtype=torch.float64)
    flat = _rows(real)
    norms = _block_norms(flat.float())
    small = norms <= _LOW
    if checks_collected():  # a graph that doubts zeros would never be used
        small &= ~zeros(flat)
    if occurs(small):
        norms[small] = torch.linalg.vector_norm(flat[small].double(), dim=1)
    return norms


def _rows(numbers: Tensor) -> Tensor:
    """View `[B, ...]` as `[B, P]`, with its other axes as they lie in memory."""
    sizes = numbers.shape[0], math.prod(numbers.shape[1:])
    if numbers.is_contiguous():
        return numbers if numbers.ndim == 2 else numbers.view(sizes)
    return numbers.permute(memory_order(numbers)).reshape(sizes)


def zeros(numbers: Tensor) -> Tensor:
    """Mark the samples with nothing but zeros, [B, ...] -> [B]."""
    if not numbers.numel():
        return torch.ones(len(numbers), dtype=torch.bool, device=numbers.device)
    axes = [*range(1, numbers.ndim)]
    if numbers.is_complex():
        return numbers.abs().amax(axes) == 0
    # Two readings, where sizes would be written first, as large as the numbers.
    return torch.maximum(numbers.amax(axes), -numbers.amin(axes)) == 0


def _block_norms(flat: Tensor) -> Tensor:
    """Norms [B, P] -> [B] in float64, by blocks in float32."""
    blocks, left = divmod(flat.shape[1], _BLOCK)
    head = flat[:, : blocks * _BLOCK] if left else flat
    norms = torch.linalg.vector_norm(head.unflatten(1, (blocks, _BLOCK)), dim=2)
    if left:
        rest = torch.linalg.vector_norm(flat[:, -left:], dim=1, keepdim=True)
        norms = torch.cat([norms, rest], 1)
    return torch.linalg.vector_norm(norms, dim=1, dtype=torch.float64)


def memory_order(grad: Tensor) -> list[int]:
    """Return the axes as they lie in memory, so that flattening copies nothing."""
    strides = grad.stride()
    return [0, *sorted(range(1, grad.ndim), key=lambda axis: -strides[axis])]


ROWS_AT_ONCE = 65536
"""Rows of one matrix product in float32; sums over more are kept in float64."""

_SAMPLES = 32
"""Samples that are summed in float32 before float64 takes over."""


class Sums:
    """Sums over samples for each parameter, added up chunk by chunk in float64."""

    def __init__(self, totals: Params | None = None) -> None:
        self.totals: Params = totals or {}

    def add(self, part: Params) -> None:
        """Add the sums of one chunk."""
        if not self.totals:
            self.totals = part
            return
        for name, value in part.items():
            self.totals[name] = double(self.totals[name]) + value

    def divide(self, by: float) -> None:
        """Divide the sums by a number."""
        values = [*self.totals.values()]
        if by == 1 or not values:
            return
        if modes.inside_transform():  # which has no rule for lists
            divided = [value / by for value in values]
        else:
            divided = kernels.divide_all(values, by)
        self.totals = dict(zip(self.totals, divided, strict=True))

    def rounded(self, params: Params) -> Params:
        """Return sums in `promote_types(dtype, float32)`, zeros if there are none."""
        return {
            name: cast(self.totals[name], wide(value.dtype))
            if self.totals
            else torch.zeros_like(value, dtype=wide(value.dtype), requires_grad=False)
            for name, value in params.items()
        }


def total(parts: Sequence[Tensor]) -> Tensor:
    """Add parts of a sum in float64, and round once."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([double(part) for part in parts]).sum(0).to(parts[0].dtype)


def spoils(sides: Sequence[Tensor]) -> Tensor:
    """Zeros [B], and NaN where products of products of two sides are not finite.

    Nor are they taken where one side of a sample is so large that float32 may have
    lost the other one.
    """
    bad = []
    for side in sides:
        dtype, axes = wide(side.dtype), [*range(1, side.ndim)]
        norms = torch.linalg.vector_norm(side, dim=axes, dtype=dtype)
        narrow = dtype in (torch.float32, torch.complex64)
        bad.append(~(norms <= _SPOILED) if narrow else ~norms.isfinite())
    return torch.where(bad[0] | bad[1], torch.nan, 0.0)


def rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive numbers to a dtype so that none becomes larger."""
    if numbers.dtype == dtype:
        return numbers
    result = numbers.to(dtype)
    fixed = result.detach()  # nextafter has a derivative from torch 2.13 on
    step = fixed - torch.nextafter(fixed, torch.zeros_like(fixed))
    return torch.where(result > numbers, result - step, result)


def normal_rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive float64 numbers that are normal in the dtype, by fewer ops."""
    if dtype != torch.float32 or numbers.requires_grad:
        return rounded_down(numbers, dtype)
    # Without the bits that float32 lacks, nothing is left to be rounded.
    return (numbers.view(torch.int64) & -(2**29)).view(torch.float64).to(dtype)


def weighted_rows(grad: Tensor, weights: Tensor) -> Tensor:
    """Sum rows with weights, [B, ...] and [B] -> [...] in float32 or wider."""
    order = None if grad.is_contiguous() else memory_order(grad)
    rows = _rows(grad)
    grad = grad if order is None else grad.permute(order)
    result_dtype = wide(grad.dtype)
    dtype = promoted(result_dtype, weights.dtype)
    size = grad.shape[0]
    rows, row = cast(rows, dtype), cast(weights, dtype).unsqueeze(0)
    split = size // _SAMPLES * _SAMPLES
    single = dtype in (torch.float32, torch.complex64)
    if single and products.bits(rows.device) < 24:
        sums = (rows * row.mT).sum(0)
    elif size <= _SAMPLES:
        sums = torch.mm(row, rows)
    else:
        left = row[:, :split].reshape(-1, 1, _SAMPLES)
        parts = torch.bmm(left, rows[:split].unflatten(0, (-1, _SAMPLES)))
        sums = parts.sum(0, dtype=promoted(dtype, torch.float64))
        if split < size:
            sums = sums + row[:, split:] @ rows[split:]
    sums = cast(sums, result_dtype).view(grad.shape[1:])
    if order is None:
        return sums
    return sums.permute([order.index(axis) - 1 for axis in range(1, grad.ndim)])

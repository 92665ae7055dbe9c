"""Products of matrices of factors, and their rounding on each kind of device.

Products of two bfloat16 or two float16 numbers are exact in float32. Where a device
multiplies such numbers into float32 sums, factors go there as they are, and factors
scaled by weights as sums of two bfloat16 terms. Everything else runs in
`promote_types(dtype, float32)`, or in float64 where torch may round float32.

Matrix units cut sums instead of rounding them: on an H100, by 1.5e-9 (bfloat16) and
6e-9 (float16) of the sum for each term, so that squares come out too small.
"""

import functools
import math
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from vgrad.torch_private import kernels, modes
from vgrad.tree import cast, promoted, wide

_DTYPE = attrgetter("dtype")

_BLOCK = {torch.bfloat16: 1024, torch.float16: 256}
"""Terms that units sum up before float32 does, in products that norms are made of."""

_BLOCKS = 16
"""Blocks of a product of rows beyond which float32 takes fewer launches."""

CUT = 2**-17
"""Error of inner products of two such products, relative to the sizes of terms."""

_FEW = 2**24
"""Products of a sum that float32 takes in the time of one more launch in a graph."""

ROWS = 8192
"""Rows of one product in terms: of a sum, units lose 1e-5 at most."""

_LOST = 2**-16
"""Relative error of two bfloat16 terms, and of a product without its small terms."""


def exact_dtype(*factors: Tensor) -> torch.dtype:
    """Return the dtype in which a product of these matrices is exact."""
    # Float64 where torch may round float32 to TF32 or bfloat16, which would break the
    # bound on clipped gradients.
    dtype = functools.reduce(promoted, map(_DTYPE, factors), torch.float32)
    single = dtype in (torch.float32, torch.complex64)
    if single and bits(factors[0].device) < 24:
        dtype = promoted(dtype, torch.float64)
    return dtype


def exact(*factors: Tensor) -> list[Tensor]:
    """Bring the factors of a matrix product to the dtype in which it is exact."""
    dtype = exact_dtype(*factors)
    return [cast(factor, dtype) for factor in factors]


def times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of factors, not scaled: `[N, M, K]` and `[N, K, L]`."""
    if in_halves(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    # Numbers of few bits stay as they are where float32 is rounded to so many.
    few = {torch.bfloat16: 8, torch.float16: 11}.get(a.dtype, 24)
    if a.dtype == b.dtype and few < 24 and few <= bits(a.device):
        return a.float() @ b.float()
    a, b = exact(a, b)
    return a @ b


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows, [B, ...] and [C, ...] -> [B, C]."""
    dtype = wide(promoted(a.dtype, b.dtype))
    a, b = (x.reshape(len(x), math.prod(x.shape[1:])) for x in (a, b))
    if in_halves(a, b) and a.shape[1] <= _BLOCKS * _BLOCK[a.dtype]:
        return _by_blocks(a[None], b.mT[None])[0]
    a, b = exact(a, b)
    return (a @ b.mH).to(dtype)


def self_products(rows: Tensor) -> Tensor:
    """Inner products of the positions of each sample, [N, T, I] -> [N, T, T]."""
    return _by_blocks(rows, rows.transpose(1, 2))


def _by_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as `times`, with sums that units hardly cut."""
    block = _BLOCK.get(a.dtype, a.shape[2])
    if a.shape[2] <= block or not in_halves(a, b):
        return times(a, b)
    parts = map(times, a.split(block, 2), b.split(block, 1))
    return functools.reduce(torch.add, parts)


def in_halves(a: Tensor, b: Tensor) -> bool:
    """Return whether a device multiplies these factors in half precision."""
    halves = a.dtype == b.dtype and a.dtype in _BLOCK
    return halves and kernels.multiplies_halves(a.device) and _is_plain(a, b)


def rounding(a: Tensor, b: Tensor) -> float:
    """Return how much of its terms a weighted sum `[..., I] x [..., O]` may lose.

    Zero is for sums in `exact` dtypes, anything else for those `by_terms`.
    """
    if a.numel() * b.shape[-1] < _FEW or not kernels.multiplies_halves(a.device):
        return 0.0
    # Torch rounds float32 to 11 bits if it may, of which terms keep 16.
    dtype = promoted(a.dtype, b.dtype)
    fits = dtype == torch.float32 and bits(a.device) == 11
    if not (fits or dtype in _BLOCK) or not _is_plain(a, b):
        return 0.0
    # As much again for how matrix units add up.
    return 2 * _LOST if dtype == torch.bfloat16 else 4 * _LOST


def scaled(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Sum outer products of `[B, G, T, I]` and `[B, G, T, O]` with weights [B]."""
    dtype = exact_dtype(a, b)
    weights = cast(weights, dtype)
    if rows := a.shape[1] == a.shape[2] == 1:
        # Views, which cost less than to flatten what is one position.
        a, b = (side.view(side.shape[0], side.shape[3]) for side in (a, b))
        column = weights.unsqueeze(1)
    else:
        column = weights.view(-1, 1, 1, 1)
    # The smaller factor is scaled, then one product runs over samples and positions.
    a, b = (a * column, b) if a.shape[-1] <= b.shape[-1] else (a, b * column)
    a, b = cast(a, dtype), cast(b, dtype)
    if rows:
        return torch.mm(b.t(), a)
    order = _order(a)
    a, b = a.permute(order), b.permute(order)
    if len(a) == 1:
        a, b = a.squeeze(0), b.squeeze(0)
    return b.flatten(-3, -2).mT @ a.flatten(-3, -2)


def by_terms(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Sum outer products with weights in two bfloat16 terms a number, float32 sums."""
    order, is_left = _order(a), b.shape[3] < a.shape[3]
    column = weights.float().view(-1, 1, 1, 1).permute(order)
    a, b = a.permute(order), b.permute(order)
    few, (large, *small) = (b, _terms(a)) if is_left else (a, _terms(b))
    groups, *rows, width = few.shape

    def product(few: Tensor, many: Tensor) -> Tensor:
        pair = (few.mT, many) if is_left else (many.mT, few)
        return torch.bmm(*pair, out_dtype=torch.float32)

    # Terms follow each other in the sum, or in its result where that is less to add.
    joined = math.prod(rows) < min(2 * width, ROWS // 2)
    sizes = (groups, 2, *rows, width) if joined else (groups, *rows, 2, width)
    terms = few.new_empty(sizes, dtype=torch.bfloat16)
    first, second = terms.unbind(1 if joined else 3)
    torch.mul(few, column, out=first)
    torch.addcmul(first, few, column, value=-1, out=second)  # the rest with a minus
    if joined:
        total = product(terms.flatten(1, 3), torch.cat([large, -large], 1))
    else:
        total = product(terms.flatten(3).flatten(1, 2), large)
        axis = 1 if is_left else 2
        total = torch.sub(*total.unflatten(axis, (2, width)).unbind(axis))
    # Only the product of the two small ones is left out.
    return total + product(first.flatten(1, 2), small[0]) if small else total


def _order(a: Tensor) -> tuple[int, ...]:
    """Return the axes `[G, B, T, I]` of `[B, G, T, I]` as they lie in memory."""
    # Factors of recurrent nets are flattened without a copy if time comes first.
    swapped = a.shape[1] == 1 and a.stride(0) < a.stride(2)
    return (1, 2, 0, 3) if swapped else (1, 0, 2, 3)


def _terms(numbers: Tensor) -> list[Tensor]:
    """Split `[G, B, T, I]` into a bfloat16 and the rest, if any. -> [G, B * T, I]"""
    numbers = numbers.flatten(1, 2)
    if numbers.dtype == torch.bfloat16:
        return [numbers]
    large = numbers.bfloat16()
    return [large, torch.sub(numbers, large, out=torch.empty_like(large))]


def _is_plain(*factors: Tensor) -> bool:
    """Return whether neither autograd nor vmap follows: `out_dtype` has no rules."""
    return not (modes.inside_transform() or any(side.requires_grad for side in factors))


_BITS = {"none": 24, "ieee": 24, "tf32": 11}
"""Significant bits that float32 keeps by torch's switches, 8 where not named here."""


def bits(device: torch.device, op: Literal["conv", "matmul"] = "matmul") -> int:
    """Return how many significant bits of float32 torch keeps in an op."""
    backend = "cuda" if device.type == "cuda" else "mkldnn"
    return _BITS.get(kernels.fp32_precision(backend, op), 8)

"""Products of matrices of factors: how a device multiplies, and what it rounds.

Products of two bfloat16 or two float16 numbers are exact in float32. Where a device
multiplies such numbers into float32 sums, factors go there as they are, and factors
scaled by weights as sums of two bfloat16 terms. Everything else runs in
`promote_types(dtype, float32)`, or in float64 where torch may round float32.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from vgrad.torch_private import kernels, modes
from vgrad.tree import wide

_HALVES = (torch.bfloat16, torch.float16)

_FEW = 2**28
"""Products of a sum that float32 takes in the time of the launches of terms."""

_LOST = 2**-16
"""What two bfloat16 terms leave of a number, relative to it, and their product too."""


def exact_dtype(*factors: Tensor) -> torch.dtype:
    """Return the dtype in which a product of these matrices is exact."""
    # Float64 where torch may round float32 to TF32 or bfloat16, which would break the
    # bound on clipped gradients.
    dtype = torch.float32
    for factor in factors:
        dtype = torch.promote_types(dtype, factor.dtype)
    single = dtype in (torch.float32, torch.complex64)
    if single and rounded(factors[0].device, "matmul"):
        dtype = torch.promote_types(dtype, torch.float64)
    return dtype


def exact(*factors: Tensor) -> list[Tensor]:
    """Bring the factors of a matrix product to the dtype in which it is exact."""
    dtype = exact_dtype(*factors)
    return [factor.to(dtype) for factor in factors]


def times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of factors, not scaled: `[..., M, K]`, `[..., K, N]`."""
    if in_halves(a, b):
        product = torch.mm if a.ndim == 2 else torch.bmm
        return product(a, b, out_dtype=torch.float32)
    # Numbers of few bits stay as they are where float32 is rounded to so many.
    bits = {torch.bfloat16: 8, torch.float16: 11}.get(a.dtype, 24)
    if a.dtype == b.dtype and bits < 24 and bits <= _bits(a.device):
        return a.float() @ b.float()
    a, b = exact(a, b)
    return a @ b


def in_halves(a: Tensor, b: Tensor) -> bool:
    """Return whether a device multiplies these factors in half precision."""
    halves = a.dtype == b.dtype and a.dtype in _HALVES
    return halves and kernels.multiplies_halves(a.device) and _is_plain(a, b)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows, [B, ...] and [C, ...] -> [B, C]."""
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    a, b = (x.reshape(len(x), math.prod(x.shape[1:])) for x in (a, b))
    return times(a, b.mH).to(dtype)


def self_products(rows: Tensor) -> Tensor:
    """Inner products of the positions of each sample, [N, T, I] -> [N, T, T]."""
    return times(rows, rows.transpose(1, 2))


def rounding(a: Tensor, b: Tensor) -> float:
    """Return how much of its terms a weighted sum `[..., I] x [..., O]` may lose.

    Zero is for sums in `exact` dtypes, anything else for those `by_terms`.
    """
    if a.numel() * b.shape[-1] < _FEW or not kernels.multiplies_halves(a.device):
        return 0.0
    # Torch rounds float32 to 11 bits if it may, of which terms keep 16.
    dtype = torch.promote_types(a.dtype, b.dtype)
    fits = dtype == torch.float32 and _bits(a.device) == 11
    if not (fits or dtype in _HALVES) or not _is_plain(a, b):
        return 0.0
    # As much again for how matrix units add up.
    return 2 * _LOST if dtype == torch.bfloat16 else 4 * _LOST


def by_terms(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in terms, `[..., M, K]` and `[..., K, N]`, in float32 sums."""
    total: Any = None
    product, add = (
        (torch.mm, torch.addmm) if a.ndim == 2 else (torch.bmm, torch.baddbmm)
    )
    right = _terms(b)
    for i, left in enumerate(_terms(a)):
        for term in right[: 2 - i]:  # but for the product of the two small ones
            if total is None:
                total = product(left, term, out_dtype=torch.float32)
            else:
                total = add(total, left, term, out_dtype=torch.float32)
    return total


def _terms(numbers: Tensor) -> list[Tensor]:
    """Split numbers into a bfloat16 and what it leaves, if it leaves anything."""
    if numbers.dtype == torch.bfloat16:
        return [numbers]
    large = numbers.bfloat16()
    return [large, (numbers - large).bfloat16()]


def _is_plain(*factors: Tensor) -> bool:
    """Return whether neither autograd nor vmap follows: `out_dtype` has no rules."""
    return not (modes.inside_transform() or any(each.requires_grad for each in factors))


_BITS = {"none": 24, "ieee": 24, "tf32": 11}
"""Significant bits that float32 keeps by torch's switches, 8 where not named here."""


def _bits(device: torch.device, op: Literal["conv", "matmul"] = "matmul") -> int:
    backend = "cuda" if device.type == "cuda" else "mkldnn"
    return _BITS.get(kernels.fp32_precision(backend, op), 8)


def rounded(device: torch.device, op: Literal["conv", "matmul"]) -> bool:
    """Return whether torch may round the float32 factors of an op."""
    return _bits(device, op) < 24

"""Which form is cheaper: operations against bytes of memory, from shapes alone.

The rates are constants and never measured as a program runs, so that the same call
takes the same form: a resumed run has to repeat its numbers.
"""

import math
from collections.abc import Sequence
from typing import Literal

ConvForm = Literal["gram", "groups", "offsets"]

OPERATIONS_PER_BYTE = 8
"""Floating-point operations that take as long as writing or reading one byte.

Two cores of an x86 server do 100 Gflop/s and move 12 GB/s; accelerators have a higher
ratio, and would rather compute than store.
"""

_FEW_POSITIONS = 256
"""Up to here products for every offset of a kernel beat one grouped convolution."""


def outer_by_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Say whether norms from products of positions beat forming the gradients.

    Gradients take no operations of their own, since they are the summands of the
    weighted sum; they take three passes over their memory.
    """
    products = 2 * positions**2 * (inputs + outputs)
    return products < OPERATIONS_PER_BYTE * 12 * inputs * outputs


def conv_form(pixels: int, positions: int, weight: Sequence[int]) -> ConvForm:
    """Choose how the norms of a convolution's gradients are computed."""
    outputs, inputs, *kernel = weight
    products = 2 * pixels**2 * inputs + 2 * positions**2 * outputs
    sums = OPERATIONS_PER_BYTE * 4 * positions**2 * math.prod(kernel)
    if products + sums < OPERATIONS_PER_BYTE * 8 * math.prod(weight):
        return "gram"
    return "offsets" if positions <= _FEW_POSITIONS else "groups"


def cross_by_gram(inputs: Sequence[int], outputs: Sequence[int], other: int) -> bool:
    """Say whether inner products between samples are cheaper from factors.

    Shapes [B, G, T, I] and [B, G, T, O], and how many samples are on the other side.
    """
    size, _, positions, i = inputs
    o = outputs[3]
    gram = 2 * size * other * positions**2 * (i + o)
    direct = 2 * (size + other) * positions * i * o + 2 * size * other * i * o
    return gram < direct


def project_factors(positions: int, inputs: int, outputs: int, dim: int) -> bool:
    """Say whether projecting both factors beats projecting gradients."""
    direct = (positions + dim) * inputs * outputs
    return positions * dim * (inputs + outputs) < direct

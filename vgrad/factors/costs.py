"""Which form is cheaper: operations against bytes of memory, from shapes alone.

The rates are constants and never measured as a program runs, so that the same call
takes the same form: a resumed run has to repeat its numbers.
"""

import math
from collections.abc import Sequence
from typing import Literal

ConvForm = Literal["alone", "gram", "groups", "offsets", "swapped", "windows"]

OPERATIONS_PER_BYTE = 8
"""Floating-point operations that take as long as writing or reading one byte.

Two cores of an x86 server do 100 Gflop/s and move 12 GB/s; accelerators have a higher
ratio, and would rather compute than store.
"""

_HALVES_PER_BYTE = 256
"""The same on the matrix units of an accelerator, for factors in half precision."""

_SMALL_MATRIX = 2**12
"""Numbers of a sample's gradient that stay in a processor's cache for a whole batch."""

FEW_POSITIONS = 256
"""Positions up to which products for every offset may beat a grouped convolution.

As many are summed in float32 by one convolution that has outputs for kernels.
"""

_CHANNELS = 32
"""Pairs of channels for each position up to which a grouped convolution is cheaper."""

_SMALL_KERNEL = 9
"""Numbers in a kernel up to which grouped convolutions of single channels are fast."""

_BLOCK = 8
"""Channels in whose multiples grouped convolutions were measured to be fast."""

_WORTH_A_CALL = 4 * 10**6
"""Floating-point operations of a sample that outlast a call for it alone."""

_GATHERED = 2**15
"""Bytes of a tensor up to which a CPU copies it to save two ops."""

_GATHERED_ON_DEVICES = 2**22
"""The same where an op is a launch, and memory is fast."""

FEW_LOOKUPS = 128
"""Positions of a sample up to which lookups are compared in pairs, and not sorted."""

_SMALL_TABLE = 2**17
"""Numbers of a table that is made in float64 however few of its rows are used."""


_PER_PARAMETER = 2**19
"""Bytes of a gradient that take as long as Python takes to keep a parameter's factor.

A perceptron of matrices of 2**19 bytes takes 0.7 of the time without factors, one of
2**22 bytes twice as long (one thread of an x86 server).
"""


def without_factors(sizes: Sequence[int]) -> bool:
    """Return whether one sample costs less by plain autograd, from bytes of gradients.

    It takes fewer launches, and writes and reads all gradients.
    """
    return sum(sizes) <= _PER_PARAMETER * len(sizes)


def outer_by_gram(
    positions: int, inputs: int, outputs: int, halves: bool = False
) -> bool:
    """Return whether norms from products of positions beat forming the gradients.

    `halves` are factors in half precision on a device that multiplies them as such.
    """
    # Gradients take no operations of their own, since they are the summands of the
    # weighted sum; they take three passes over their memory, unless it is in a cache.
    numbers = inputs * outputs
    if halves:  # and two terms of each sum, and products that pass through memory
        operations = 2 * positions**2 * (inputs + outputs) + 2 * positions * numbers
        return operations / _HALVES_PER_BYTE + 16 * positions**2 < 12 * numbers
    traffic = 1 if numbers <= _SMALL_MATRIX else 12
    products = 2 * positions**2 * (inputs + outputs)
    return products < OPERATIONS_PER_BYTE * traffic * numbers


def gathers(size: int, on_host: bool) -> bool:
    """Return whether a tensor of so many bytes joins others for ops on all of them."""
    return size <= (_GATHERED if on_host else _GATHERED_ON_DEVICES)


def conv_form(
    pixels: int,
    positions: int,
    weight: Sequence[int],
    groups: int,
    plain: bool,
    halves: bool = False,
) -> ConvForm:
    """Choose how norms are computed, by `plain` convolutions of a host or by products.

    Kernels of accelerators for grouped convolutions are fast or slow by accident.
    """
    # On a CPU one grouped convolution wins but for many channels of small maps, and for
    # groups of few channels; it has a good kernel for small windows of single channels.
    # For few channels of a large image an ordinary one for each sample takes less.
    outputs, inputs, *kernel = weight
    if not plain and inputs == 1 and groups > 1:  # for which devices have a kernel
        return "groups"
    if not plain:
        sizes = positions, inputs * math.prod(kernel), outputs // groups, halves
        return "gram" if positions == 1 or outer_by_gram(*sizes) else "windows"
    products = 2 * pixels**2 * inputs * groups + 2 * positions**2 * outputs
    sums = OPERATIONS_PER_BYTE * 4 * positions**2 * math.prod(kernel) * groups
    if products + sums < OPERATIONS_PER_BYTE * 8 * math.prod(weight):
        return "gram"
    few = positions <= FEW_POSITIONS
    if inputs == 1 and _swaps(few, kernel, outputs // groups):
        return "swapped"
    operations = 2 * positions * math.prod(weight)
    if groups == 1 and inputs % _BLOCK and operations > _WORTH_A_CALL:
        return "alone"
    by_itself = groups == 1 or inputs == 1
    enough = by_itself and _CHANNELS * positions >= inputs * outputs // groups
    return "offsets" if few and (len(kernel) == 1 or not enough) else "groups"


def _swaps(few: bool, kernel: Sequence[int], outputs: int) -> bool:
    """Return whether the outputs should be the kernels over a single channel."""
    if len(kernel) == 1:
        return few
    return math.prod(kernel) > _SMALL_KERNEL and (few or outputs == 1)


def wide_table(rows: int, width: int, lookups: int) -> bool:
    """Return whether adding to a table in float64 beats sorting the lookups."""
    return rows <= 4 * lookups or rows * width <= _SMALL_TABLE


def cross_by_gram(
    inputs: Sequence[int], outputs: Sequence[int], others: Sequence[int]
) -> bool:
    """Return whether factors [B, G, T, I], [B, G, T, O] give cheaper inner products."""
    (size, _, positions, i), o, (count, _, length, _) = inputs, outputs[3], others
    gram = 2 * size * count * positions * length * (i + o)
    formed = size * positions + count * length
    return gram < 2 * (formed + size * count) * i * o


def project_factors(
    positions: int, left: Sequence[int], right: Sequence[int], pairs: bool
) -> bool:
    """Return whether projecting both factors, by [k, O] and [k, I], beats gradients."""
    (k, outputs), (m, inputs) = left, right
    sides, formed = k * outputs + m * inputs, positions * inputs * outputs
    if pairs:
        return positions * (sides + k * m) < formed + outputs * m * (inputs + k)
    return positions * sides < formed + k * inputs * outputs

"""Which numbers of a tensor's blocks belong to a part of it.

The numbers of a tensor are those of its blocks, one after the other, in row-major
order. Who holds a part draws each block of which it has any number, as a whole: all
parts, wherever they are, then have the very numbers of the whole.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

_Index = TypeVar("_Index", int, np.ndarray)


class Part(NamedTuple):
    """A hyperrectangle of a tensor of some shape, its entries in row-major order."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Share(NamedTuple):
    """What a part holds of one block of `count` numbers: `part[own] = block[places]`.

    `places` are a slice, or ascending indices.
    """

    number: int
    count: int
    places: slice | np.ndarray
    own: slice


def shares(part: Part, size: int) -> Iterator[Share]:
    """Yield what a part holds of each block of `size` numbers that it has any of."""
    total, held = math.prod(part.shape), math.prod(part.sizes)
    if held == 0:
        return
    if held == total:
        for number, start in enumerate(range(0, total, size)):
            own = slice(start, min(start + size, total))
            count = own.stop - start
            yield Share(number, count, slice(0, count), own)
        return
    low = 0
    first, last = (_places(part, own) // size for own in (0, held - 1))
    for number in range(first, last + 1):
        start, stop = number * size, min((number + 1) * size, total)
        high = _before(part, stop)
        if low < high:
            begin, end = _places(part, low), _places(part, high - 1) + 1
            places: slice | np.ndarray = slice(begin - start, end - start)
            if end - begin > high - low:
                places = _places(part, np.arange(low, high)) - start
            yield Share(number, stop - start, places, slice(low, high))
        low = high


def _places(part: Part, own: _Index) -> _Index:
    """Return where entries of a part stand in the tensor."""
    found, stride = 0 * own, 1
    for length, offset, size in reversed(list(zip(*part, strict=True))):
        found = found + (own % size + offset) * stride
        own = own // size
        stride *= length
    return found


def _before(part: Part, place: int) -> int:
    """Count the entries of a part that stand before a place in the tensor."""
    found, stride, rest = 0, math.prod(part.shape), math.prod(part.sizes)
    for length, offset, size in zip(*part, strict=True):
        stride, rest = stride // length, rest // size
        index, place = divmod(place, stride)
        found += min(max(index - offset, 0), size) * rest
        if not offset <= index < offset + size:
            return found
    return found

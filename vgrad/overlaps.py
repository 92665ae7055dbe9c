"""Memory that tensors share; of a DTensor it is the part of this process."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from operator import add, le
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrad.torch_private import shards

_STEPS: Any = 10**6
"""Steps of numpy's search, far more than ordinary views need."""


def apart(places: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether no two blocks of memory, of places and sizes in bytes, overlap."""
    starts, ends = sorted(places), sorted(map(add, places, sizes))
    return all(map(le, ends, starts[1:]))


def disjoint(tensors: Sequence[Tensor]) -> bool:
    """Return whether no two tensors overlap, by their first and last entries."""
    local = list(map(shards.local, tensors))
    return apart([x.data_ptr() for x in local], list(map(extent, local)))


def sharing(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield each two names, or one twice, with entries in the same place in memory."""
    local = {name: shards.local(tensor) for name, tensor in tensors.items()}
    local = {name: x for name, x in local.items() if x.numel() and not x.is_meta}
    yield from ((name, name) for name, x in local.items() if _is_folded(x))
    yield from overlapping({name: Bytes(x, x.data_ptr()) for name, x in local.items()})


class Bytes:
    """The bytes of a tensor from a place on, for numpy, which reads no number."""

    def __init__(self, tensor: Tensor, start: int) -> None:
        size = tensor.element_size()
        self.start, self.stop = start, start + extent(tensor)
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (1 + start, True),
        }


def overlapping(blocks: Mapping[str, Bytes]) -> Iterator[tuple[str, str]]:
    """Yield each two names whose tensors, none of which is empty, share a byte."""
    ordered = sorted(blocks.items(), key=lambda item: (item[1].start, item[1].stop))
    for number, (name, block) in enumerate(ordered, 1):
        later = takewhile(lambda x, end=block.stop: x[1].start < end, ordered[number:])
        for other_name, other in later:
            try:
                shared = np.shares_memory(np.asarray(block), np.asarray(other), _STEPS)
            except RuntimeError:  # too hard
                shared = True
            if shared:
                yield name, other_name


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first entry to the end of the last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (1 + last) * tensor.element_size() if tensor.numel() else 0


def _is_folded(tensor: Tensor) -> bool:
    # Whether two entries of one tensor are in the same place.
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                break
            span += (size - 1) * stride
    else:
        return False  # each stride reaches beyond all entries of smaller ones
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return len(places.unique()) < len(places)

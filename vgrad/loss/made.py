"""Tensors that a loss makes for all samples, and then writes single ones' values into.

`out = torch.zeros(n)` in a loss is one tensor for all samples, with no room for the
numbers that `out[0] = x.sum()` writes. So the samples run again, and calls that make
tensors return one for each of them.

A sample may be a member of an ensemble as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vgrad.ops.record import register
from vgrad.torch_private import modes

_NAMES = "zeros ones empty full empty_strided"
_LIKE = "zeros_like ones_like empty_like full_like clone"
_OF_TENSORS = "new_zeros new_ones new_empty new_full new_tensor new_empty_strided clone"

MAKERS: set[Callable] = {
    *(getattr(torch, name) for name in [*_NAMES.split(), *_LIKE.split()]),
    *(getattr(Tensor, name) for name in _OF_TENSORS.split()),
    *(torch.tensor, torch.arange, torch.linspace, torch.eye),
}
"""Functions whose results have memory of their own."""


@dataclass
class Rooms:
    """Whether the loss of a transform needs a tensor for each sample, and where."""

    line: str = ""  # that writes values of single samples; none so far


def is_mapped(tensor: Tensor, level: int) -> bool:
    """Return whether the vmap of a level maps over a tensor."""
    while (tensor_level := modes.level_of(tensor)) > level:
        tensor = modes.unwrapped(tensor)
    return tensor_level == level


def copied(mode: Any, tensor: Tensor) -> Tensor:
    """Return a copy for each sample, in the same layout, where that is exact."""
    level, size = mode.vmap.level, mode.size
    with modes.without_modes():
        if is_mapped(tensor, level):
            return tensor.clone()  # it may be expanded over the samples
        stored = modes.unwrap_all(tensor)
        count = stored.numel()
        dense = stored.untyped_storage().nbytes() == count * stored.element_size()
        plain = type(stored) is Tensor or mode.captured  # nor of a subclass
        if not dense or not plain or stored.is_nested or stored.shape != tensor.shape:
            return tensor
        if any(alias.requires_grad and alias.is_leaf for alias in (tensor, stored)):
            return tensor
        with modes.exit_to(level):
            shape, strides = (size, *stored.shape), (max(count, 1), *stored.stride())
            copies = stored.detach().new_empty_strided(shape, strides)
        copies = modes.add_batch_axis(copies, 0, level)
        if (modes.current_level() or 0) > level:
            # Made inside of that transform, as the tensor, and not written to so far.
            return copies.clone().copy_(tensor).clone()
        return copies.copy_(tensor)


def _data(tensor: Tensor) -> Tensor:
    """Return the same memory without a graph, and with a version of its own."""
    if not modes.is_batched(tensor):
        return tensor.data
    level = modes.level_of(tensor)
    below, axis = modes.split_batch_axis(tensor, level)
    return modes.add_batch_axis(_data(below), axis, level)


register(Tensor.data.__get__, mapped=_data)  # pyright: ignore[reportAttributeAccessIssue]

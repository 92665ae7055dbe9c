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

from vgrad.conditions import checks_collected
from vgrad.loss.grad_flags import UnsupportedOp, among
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
    while (own := modes.level_of(tensor)) > level:
        tensor = modes.unwrapped(tensor)
    return own == level


def copied(tensor: Tensor, level: int, size: int) -> Tensor:
    """Return a copy for each sample, in the same layout, where that is exact."""
    with modes.without_modes():
        if is_mapped(tensor, level):
            return tensor.clone()  # it may be expanded over the samples
        stored = modes.unwrap_all(tensor)
        count = stored.numel()
        dense = stored.untyped_storage().nbytes() == count * stored.element_size()
        plain = type(stored) is Tensor or checks_collected()  # nor of a subclass
        if not dense or not plain or stored.is_nested or stored.shape != tensor.shape:
            return tensor
        if any(each.requires_grad and each.is_leaf for each in (tensor, stored)):
            return tensor
        with modes.exit_to(level):
            shape, strides = (size, *stored.shape), (max(count, 1), *stored.stride())
            copies = stored.detach().new_empty_strided(shape, strides)
        copies = modes.add_batch_axis(copies, 0, level)
        if (modes.current_level() or 0) > level:
            # Made inside of that transform, as the tensor, and not written to so far.
            return copies.clone().copy_(tensor).clone()
        return copies.copy_(tensor)


def into_out(run: Callable[..., Any], args: tuple, kwargs: dict, name: str) -> Any:
    """Run an op that has no rule of vmap for its `out`, and write its results there."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in among(args, kwargs)):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic "
            f"differentiation, but one of the arguments requires grad."
        )
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    targets = [out] if isinstance(out, Tensor) else [*out]
    results = run(*args, **kwargs)
    results = [results] if isinstance(results, Tensor) else [*results]
    for target, result in zip(targets, results, strict=True):
        if (target.shape, target.dtype) != (result.shape, result.dtype):
            raise UnsupportedOp(
                f"{name}: expected an out= of the shape and dtype of the result, got "
                f'another. Leave it out, or use strategy="loop".'
            )
        target.copy_(result)
    return out


def _data(tensor: Tensor) -> Tensor:
    """Return the same memory without a graph, and with a version of its own."""
    if not modes.is_batched(tensor):
        return tensor.data
    level = modes.level_of(tensor)
    below, axis = modes.split_batch_axis(tensor, level)
    return modes.add_batch_axis(_data(below), axis, level)


def _resized(func: Callable) -> Callable:
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if modes.is_wrapped(tensor):  # torch resizes the tensor of all samples
            raise UnsupportedOp(
                f"{func.__name__}: expected a loss that leaves the memory of its "
                f"tensors alone, got one that changes its size where one tensor stands "
                f'for all samples. Use strategy="loop".'
            )
        return func(tensor, *args, **kwargs)

    return run


for _op in (Tensor.resize_, Tensor.resize_as_, torch.resize_as_):
    register(_op, mapped=_resized(_op))
register(Tensor.data.__get__, mapped=_data)  # pyright: ignore[reportAttributeAccessIssue]

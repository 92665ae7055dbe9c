"""Which functions of a parameter only move its numbers, so that norms are kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.tree import tree_map_only

_CASTS = {"to", "type", "float", "double", "half", "bfloat16", "type_as"}
_COPIES = {"clone", "contiguous", "alias", "cpu", "cuda"}
_TRANSPOSES = {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"}
_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim"}
_VIEWS |= {"view_as", "reshape_as"}
_PARTS = {"chunk", "split", "unbind", "tensor_split", "narrow", "select", "__getitem__"}
_PARTS |= {"split_with_sizes", "unsafe_chunk", "unsafe_split"}

_READS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size"}
_READS |= {"storage_offset", "get_device", "is_contiguous", "is_floating_point"}
_READS |= {"is_complex", "is_inference", "is_signed", "is_same_size", "__len__"}
_TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data", "grad"}
"""Attributes that are tensors; the others say something about one."""


class View(NamedTuple):
    """How numbers were moved; `replay` does the same to another tensor."""

    replay: Callable[[Tensor], Tensor]
    same_numbers: bool  # each stayed in its place
    transposes: bool  # it is the transpose of a matrix


def only_reads(func: Callable) -> bool:
    """Tell whether a call asks for sizes and the like, and computes nothing."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _TENSORS
    return name in _READS


def describe(
    func: Callable,
    args: tuple,
    kwargs: dict,
    source: Tensor,
    output: Tensor,
    place: int | None,
) -> View | None:
    """Describe a call that made `output` of numbers of `source`; None for any other.

    `place` is the number of the tensor among several that the call returned.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    cast = name in _CASTS | _COPIES
    if not cast and name not in _TRANSPOSES | _VIEWS | _PARTS:
        return None
    if name == "__getitem__" and not _basic(args[1]):
        return None
    if output.is_complex() != source.is_complex():
        return None  # the way back drops imaginary parts

    shape = output.shape

    def replay(tensor: Tensor) -> Tensor:
        if cast:
            return tensor
        if name in ("view", "view_as"):
            return tensor.reshape(shape)  # it may not lie in memory as the source did
        given, named = tree_map_only(
            Tensor, lambda leaf: tensor if leaf is source else leaf, (args, kwargs)
        )
        moved = func(*given, **named)
        return moved if place is None else moved[place]

    if cast:
        return View(replay, same_numbers=True, transposes=False)
    transposes = name in _TRANSPOSES and source.ndim == 2 and _swaps(replay)
    return View(replay, same_numbers=False, transposes=transposes)


def _swaps(replay: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether two axes change places; strides of data cannot say, nor its shape.

    Both orders of a square look alike, and so do those of equal strides.
    """
    return replay(torch.empty(2, 3, device="meta")).shape == (3, 2)


def _basic(index: Any) -> bool:
    """Tell whether an index takes parts without repeating any."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is Ellipsis or isinstance(part, int | slice)
        for part in parts
    )

"""Proxies of the parameters inside a loss, and the ways to them from their views."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from vgrad.factors.base import Factor
from vgrad.factors.combined import Replay
from vgrad.torch_private.tensors import memory, version_of
from vgrad.tree import tree_map_only


@dataclass(eq=False)
class ParamProxy:
    """A tensor that the loss takes for a parameter, or for a function of some."""

    names: tuple[str, ...]  # the parameters that it is computed from
    proxy: Tensor  # the tensor inside the loss, a leaf that requires grad
    value: Tensor  # the same for ops that need no gradient of it
    origin: Tensor  # the value with the graph that leads to the parameters' leaves
    replay: Replay | None = None  # for a view of a parameter, the way to it
    parent: "ParamProxy | None" = None  # of which it is a transpose or a cast
    transposed: bool = False
    copies: Tensor | None = None  # one copy for each sample, without memory
    copied_by: dict[str, bool] = field(default_factory=dict)  # ops: do rules fit?


class Use(NamedTuple):
    """One use of parameters, reported as soon as its gradients are known."""

    names: tuple[str, ...]
    ops: tuple[str, ...]  # the op, or all ops that take copies for the samples
    factor: Factor  # the gradients at the inputs of the ops
    ruled: bool  # the ops have rules that fit
    computed: bool  # the input was computed from parameters and is no view of one
    copied: int  # bytes of the factor that it holds as copies of its own


class Stamp(NamedTuple):
    """The version of a tensor that an op needs unchanged."""

    op: str
    tensor: ref[Tensor]
    version: int


def stamped(op: str, values: Iterable[Any]) -> list[Stamp]:
    """Stamp the tensors among some values."""
    return [
        Stamp(op, ref(value), version_of(value))
        for value in values
        if isinstance(value, Tensor)
    ]


def check_unchanged(stamps: Iterable[Stamp]) -> None:
    """Refuse tensors that were written into since they were stamped."""
    for stamp in stamps:
        tensor = stamp.tensor()
        if tensor is not None and version_of(tensor) != stamp.version:
            raise RuntimeError(
                f"{stamp.op}: expected an input that stays as it is until the backward "
                f"pass is over, but an op of the loss wrote into it in place."
            )


def place(tensor: Tensor) -> tuple:
    """Return the memory of a tensor, and how it lies there."""
    offset, shape = tensor.storage_offset(), tensor.shape
    return memory(tensor), tensor.dtype, offset, shape, tensor.stride()


def copy_on_arrival(tensor: Tensor) -> None:
    """Copy the gradient of a tensor as it comes there, before another node writes."""
    tensor.register_hook(lambda grad: None if grad is None else grad.clone())


def replaced(tree: Any, by: Mapping[int, Tensor]) -> Any:
    """Replace tensors, which `by` has by their ids."""
    return tree_map_only(Tensor, lambda tensor: by.get(id(tensor), tensor), tree)


_COPIES = {
    *("to", "type", "float", "double", "half", "bfloat16", "type_as"),
    *("clone", "contiguous", "alias", "cpu", "cuda"),
}
_TRANSPOSES = {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"}
_MOVES = _TRANSPOSES | {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim"),
    *("view_as", "reshape_as", "chunk", "split", "unbind", "tensor_split", "narrow"),
    *("select", "__getitem__", "split_with_sizes", "unsafe_chunk", "unsafe_split"),
}


class View(NamedTuple):
    """How numbers were moved; `replay` does the same to another tensor."""

    replay: Callable[[Tensor], Tensor]
    same_numbers: bool = False  # each stayed in its place
    transposes: bool = False  # it is the transpose of a matrix


def describe_view(
    func: Callable,
    args: tuple,
    kwargs: dict,
    source: Tensor,
    output: Tensor,
    number: int | None,
) -> View | None:
    """Describe a call that only moved numbers of `source`; None for any other."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    if output.is_complex() != source.is_complex():
        return None  # the way back drops imaginary parts
    if name in _COPIES:
        return View(lambda tensor: tensor, same_numbers=True)
    if name not in _MOVES or (name == "__getitem__" and not _is_basic(args[1])):
        return None
    shape = output.shape

    def replay(tensor: Tensor) -> Tensor:
        if name in ("view", "view_as"):
            return tensor.reshape(shape)  # it may have other strides than the source
        other, named = replaced((args, kwargs), {id(source): tensor})
        moved = func(*other, **named)
        return moved if number is None else moved[number]

    if name in _TRANSPOSES and source.ndim == 2:
        # Whether two axes change places, which a square or its strides hide.
        swapped = replay(torch.empty(2, 3, device="meta")).shape == (3, 2)
        return View(replay, transposes=swapped)
    return View(replay)


def _is_basic(index: Any) -> bool:
    """Return whether an index takes parts without repeating any."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is Ellipsis or isinstance(part, int | slice)
        for part in parts
    )

"""Tensors that a loss makes for all samples, and then writes single ones' values into.

`out = torch.zeros(n)` in a loss is one tensor for all samples, with no room for the
numbers that `out[0] = x.sum()` writes. So the samples run again, and the call that made
the tensor returns a copy for each of them: views, reads before the write and versions
for the backward pass are torch's own then. The call is known by its place in the code.

A sample may be a member of an ensemble as well.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from vgrad.conditions import checks_collected
from vgrad.loss.grad_flags import UnsupportedOp, among, only_reads
from vgrad.loss.values import loss_frame
from vgrad.ops.record import register
from vgrad.overlaps import Bytes, overlapping
from vgrad.torch_private import modes
from vgrad.torch_private.autograd import is_foreign_op
from vgrad.torch_private.tensors import memory, storage

Place = tuple[CodeType, int]
"""The code of a call, and the instruction in it."""

_OUTSIDE = {"as_tensor", "asarray", "__get__"}
"""Calls that may return a tensor on memory from outside of the loss."""


@dataclass
class Places:
    """The memory of one transform: calls of its loss that make tensors, with lines."""

    copied: dict[Place, str] = field(default_factory=dict)  # results have copies
    kept: dict[Place, str] = field(default_factory=dict)  # results outlive the loss


class Made:
    """The tensors that one run of a loss makes, as a block around the run."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._shared: dict[Any, Place] = {}  # by memory
        self.copied: dict[Any, Place] = {}  # one for each sample
        self._copies: dict[int, tuple[ref[Tensor], Place]] = {}  # and their views

    def __enter__(self) -> "Made":
        return self

    def __exit__(self, *raised: Any) -> None:
        """Refuse copies that the loss has kept; none can be used after the run."""
        if not (copies := self._copies.values()):
            return
        for generation in (1, 2):  # of cycles
            if raised[1] is None and any(each() is not None for each, _ in copies):
                gc.collect(generation)
        places = {}
        for each, place in copies:
            if (tensor := each()) is not None:
                tensor.__class__ = _Kept
                places[place] = _line(place)
        if places and raised[1] is None:
            for place in places:
                self._places.copied.pop(place, None)
            self._places.kept.update(places)
            raise _outlives(next(iter(places.values())))

    def copies_here(self) -> bool:
        """Return whether results of the call that runs now get copies."""
        return bool(self._places.copied) and _here() in self._places.copied

    def needs_copies(self, tensors: Sequence[Tensor]) -> bool:
        """Have a tensor among these that a call made be copied from now on, if any."""
        for tensor in tensors:
            stored = modes.unwrap_all(tensor)
            if memory(stored) is None or storage(stored) not in self._shared:
                continue
            place = self._shared[storage(stored)]
            if place in self._places.kept:
                raise _outlives(self._places.kept[place])
            if place not in self._places.copied:
                self._places.copied[place] = _line(place)
                return True
        return False

    def note(
        self,
        func: Callable,
        tensors: Sequence[Tensor],
        output: Any,
        level: int,
        size: int,
    ) -> Any:
        """Return the result of a call on these tensors, copied if need be."""
        if any(map(is_mapped, tensors, repeat(level))):
            if self.copied:
                several = isinstance(output, tuple | list)
                for each in output if several else (output,):
                    self._follow(each)
            return output
        if isinstance(output, tuple | list):
            own = [self.note(func, tensors, each, level, size) for each in output]
            changed = any(x is not y for x, y in zip(own, output, strict=True))
            return type(output)(own) if changed else output
        if not isinstance(output, Tensor) or not _makes(func):
            return output
        stored = modes.unwrap_all(output)
        if (here := memory(stored)) is None:
            return output
        given = {memory(modes.unwrap_all(each)) for each in tensors}
        if None in given or here in given:  # of a sparse tensor it is unknown
            return output
        place = _here()
        if place in self._places.copied:
            if (copies := _copies(output, level, size)) is not None:
                self.copied[storage(modes.unwrap_all(copies))] = place
                self._follow(copies)
                return copies
        self._shared[storage(stored)] = place
        return output

    def _follow(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and memory(stored := modes.unwrap_all(tensor)):
            if (place := self.copied.get(storage(stored))) is not None:
                self._copies[id(tensor)] = ref(tensor), place


def is_mapped(tensor: Tensor, level: int) -> bool:
    """Return whether the vmap of a level maps over a tensor."""
    while (own := modes.level_of(tensor)) > level:
        tensor = modes.unwrapped(tensor)
    return own == level


def _copies(tensor: Tensor, level: int, size: int) -> Tensor | None:
    """Copy a tensor for each sample, in the same layout; None if that is not exact."""
    with modes.without_modes():
        if is_mapped(tensor, level):
            return tensor.clone()  # it may be expanded over the samples
        stored = modes.unwrap_all(tensor)
        count = stored.numel()
        dense = stored.untyped_storage().nbytes() == count * stored.element_size()
        plain = type(stored) is Tensor or checks_collected()  # nor of a subclass
        if not dense or not plain or stored.is_nested or stored.shape != tensor.shape:
            return None
        if any(each.requires_grad and each.is_leaf for each in (tensor, stored)):
            return None
        with modes.exit_to(level):
            shape, strides = (size, *stored.shape), (max(count, 1), *stored.stride())
            copies = stored.detach().new_empty_strided(shape, strides)
        copies = modes.add_batch_axis(copies, 0, level)
        if (modes.current_level() or 0) > level:
            # Made inside of that transform, as the tensor, and not written to so far.
            return copies.clone().copy_(tensor).clone()
        return copies.copy_(tensor)


def _here() -> Place:
    frame = loss_frame(sys._getframe(1))
    return frame.f_code, frame.f_lasti


def _line(place: Place) -> str:
    code, last = place
    lines = (line for start, end, line in code.co_lines() if start <= last < end)
    return f"{code.co_filename}:{next(lines, None) or code.co_firstlineno}"


@lru_cache(maxsize=4096)
def _makes(func: Callable) -> bool:
    """Return whether results of a function lie on memory of arguments or on new one."""
    module = getattr(func, "__module__", None) or ""
    own = isinstance(func, FunctionType) and not module.startswith("torch")
    if own or func is modes.custom_function_call or is_foreign_op(func):
        return False
    return getattr(func, "__name__", "") not in _OUTSIDE


class _Kept(Tensor):
    """A tensor that stood for all samples of a run that is over."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if only_reads(func) or func.__name__.startswith("is_"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _outlives("an earlier run")


def _outlives(line: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"loss: expected tensors that it writes values of single samples into to end "
        f"with it, got one that is kept beyond, made at {line}. Return it in aux, or "
        f'use strategy="loop".'
    )


def check_apart(
    targets: Sequence[Tensor], tensors: Sequence[Tensor], name: str
) -> None:
    """Refuse a write over a part of an operand, as torch does for one sample."""

    def block(tensor: Tensor) -> tuple[Any, Bytes]:
        stored = modes.unwrap_all(tensor)
        start = int(stored.storage_offset())
        place = memory(stored), start, tensor.shape, tensor.stride()
        return place, Bytes(tensor, start * tensor.element_size())

    blocks = [*map(block, tensors)]
    for place, written in map(block, filter(modes.is_wrapped, targets)):
        for other, read in blocks:
            if other[0] == place[0] and other != place:
                if any(overlapping({"written": written, "read": read})):
                    raise UnsupportedOp(
                        f"{name}: expected a loss that writes beside the operands, got "
                        f"a write over a part of one. Clone it, or use "
                        f'strategy="loop".'
                    )


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

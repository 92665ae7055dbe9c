"""Reads of values, where one tensor stands for all samples, or all members.

An `if` on a tensor, `.item()` and the like hand one value to Python. Where all samples
of a chunk have the same, that is the value. Where they differ, the chunk is split by
their values, and each part runs again: exact, and at worst one sample at a time.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable, occurs, static_values
from vgrad.loss.grad_flags import UnsupportedOp, among
from vgrad.ops.record import ITSELF, OPS
from vgrad.torch_private import modes
from vgrad.tree import tree_map, tree_map_only
from vgrad.typing import Strategy

DIFFER = "take different branches, and run part by part"
"""Why samples have no graph in common."""

NONE = object()
"""Returned in place of a value where all samples share the tensors of a call."""


class Partition(NamedTuple):
    """The parts of a chunk that run again."""

    rows: Sequence[Tensor]  # the samples of each part
    where: str  # the line that reads a value
    strategy: Strategy | None = None  # of the parts; None for the one that ran
    why: str = ""  # the error of that one, if the strategy is another
    keyed: bool = False  # whether values were read after numbers had been drawn


class SplitBatch(BaseException):
    """The samples of a chunk cannot go on together; they must run in several parts."""

    # Not an `Exception`, which a loss could catch.

    def __init__(self, parts: Partition, level: int | None = None) -> None:
        super().__init__(parts.where)
        self.parts = parts
        self.level = level  # of the vmap over the samples; None for the innermost call


def read_value(mode: Any, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the value that a call reads, the same for all samples, or all members.

    `SplitBatch` if they have different ones; `UnsupportedOp` inside a vmap of the loss.
    """
    level, one = mode.vmap.level, mode.vmap.one
    with modes.without_modes():
        mapped = _mapped(args, kwargs, level)
        if mode.captured:
            for tensor in () if mapped else among(args, kwargs):  # as of one sample
                mapped[id(tensor)] = modes.unwrap_all(tensor).detach()[None]
            with static_values():
                values = _values(func, args, kwargs, mapped)
            if any(repr(value) != repr(values[0]) for value in values):
                raise Unrepeatable(f"{one}s {DIFFER}:")
            occurs(_differing(func, mapped, values[0]))
            return values[0]
        if not mapped:
            return NONE
    # The mode of a vmap around this one reads the value in turn.
    return unanimous(_values(func, args, kwargs, mapped), level)


def with_numbers(
    mode: Any, func: Callable, args: tuple, kwargs: dict
) -> tuple[tuple, dict] | None:
    """Put the numbers that all samples have in the place of tensors `[]` of integers.

    For a call that takes numbers of Python, as `x[:n]` and `torch.zeros(n)` do. None
    if there are no such tensors.
    """
    replaced = False

    def number(argument: Any) -> Any:
        nonlocal replaced
        if isinstance(argument, slice):
            return slice(*map(number, (argument.start, argument.stop, argument.step)))
        if not isinstance(argument, Tensor) or argument.ndim:
            return argument
        if argument.is_floating_point() or argument.is_complex():
            return argument
        value = read_value(mode, Tensor.item, (argument,), {})
        replaced |= value is not NONE
        return argument if value is NONE else value

    is_method = getattr(Tensor, getattr(func, "__name__", ""), None) is func
    changed = *args[:is_method], *tree_map(number, args[is_method:])
    named = tree_map(number, kwargs)
    return (changed, named) if replaced else None


def of_each(func: Callable, args: tuple, kwargs: dict, level: int) -> list | None:
    """Return the result of a call for each sample; None if all share its tensors."""
    with modes.without_modes():
        mapped = _mapped(args, kwargs, level)
    return _values(func, args, kwargs, mapped) if mapped else None


def unanimous(values: Sequence[Any], level: int) -> Any:
    """Return the one value of all samples; `SplitBatch` if they have different ones."""
    parts: dict[str, list[int]] = {}
    for row, value in enumerate(values):  # as text: nan is nan, and 0.0 is not -0.0
        parts.setdefault(repr(value), []).append(row)
    if len(parts) > 1:
        rows = [torch.tensor(indices) for indices in parts.values()]
        raise SplitBatch(Partition(rows, where(sys._getframe(1))), level)
    return values[0]


def _mapped(args: tuple, kwargs: dict, level: int) -> dict[int, Tensor]:
    """Return the values of all samples, for each tensor that differs among them."""
    return {
        id(tensor): values
        for tensor in among(args, kwargs)
        if (values := physical(tensor, level)) is not None
    }


def _differing(func: Callable, mapped: dict[int, Tensor], value: Any) -> Tensor:
    """Return which samples have another value, `[B]`."""
    read = OPS[func].read
    if read is None or (dtype := read.compared) is None:
        raise Unrepeatable(f"{modes.op_name(func)} hands values to Python")
    (tensor,) = mapped.values()
    tensor = tensor if dtype is ITSELF else tensor.to(dtype)
    negative = repr(value)[0] == "-"
    if isinstance(value, list):
        value = torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
        negative = value.signbit()
    differs = tensor != value
    if tensor.is_floating_point():
        differs |= tensor.signbit() != negative
    return differs.flatten(1).any(1) if differs.ndim > 1 else differs


def physical(tensor: Tensor, level: int) -> Tensor | None:
    """Return the values of all samples, [B, ...]; None if all share one."""
    while modes.level_of(tensor) > level:
        if modes.is_batched(tensor):
            raise UnsupportedOp(
                "loss: expected questions about values outside of a vmap of its own, "
                'got one inside of it. Use strategy="loop".'
            )
        tensor = modes.unwrapped(tensor)
    if modes.level_of(tensor) != level:
        return None
    with modes.exit_to(level):  # else the transforms inside wrap the result
        rows = modes.in_front(tensor, level)
        return None if rows is None else rows.detach()


def _values(
    func: Callable, args: tuple, kwargs: dict, mapped: dict[int, Tensor]
) -> list:
    read = OPS[func].read
    if read is not None and read.convert is not None and len(mapped) == 1:
        (values,) = mapped.values()
        if values.numel() == len(values) and not values.is_complex():
            return [*map(read.convert, values.reshape(len(values)).tolist())]
    rows = {key: values.cpu().unbind() for key, values in mapped.items()}

    def of(number: int) -> Any:
        def row(tensor: Tensor) -> Tensor:
            return rows[id(tensor)][number] if id(tensor) in rows else tensor

        own_args, own_kwargs = tree_map_only(Tensor, row, (args, kwargs))
        return func(*own_args, **own_kwargs)

    return [of(number) for number in range(len(next(iter(rows.values()))))]


def where(frame: FrameType) -> str:
    """Name the innermost line around a frame that belongs to the loss."""
    frame = loss_frame(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def loss_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame around one, itself included, that is the loss's."""
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def stopped_at(error: BaseException) -> str:
    """Name the last such line that an error came from."""
    line, step = "", error.__traceback__
    while step is not None:
        if not is_library(step.tb_frame.f_code.co_filename):
            line = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return line or where(sys._getframe(1))


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file belongs to this package, to torch or to Python."""
    of_python = file.startswith(_PYTHON) and not file.startswith(_PACKAGES)
    return of_python or file.startswith(_OWN)


_OWN = tuple(
    f"{Path(file).parent}{os.sep}" for file in (Path(__file__).parent, torch.__file__)
)
_PYTHON = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
_PACKAGES = tuple(
    f"{sysconfig.get_path('stdlib')}{os.sep}{name}{os.sep}"
    for name in ("site-packages", "dist-packages")
)

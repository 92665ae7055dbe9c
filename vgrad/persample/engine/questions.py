"""Questions of a loss about values, where one tensor stands for all samples.

An `if` on a tensor, `.item()` and the like want one value for Python. Where all samples
of a chunk have the same, that is the answer. Where they differ, the chunk is split by
their answers, and each part runs again by itself: exact, and at worst one sample at a
time.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable, are_collected, looked_at, unlikely
from vgrad.lowering.truthful import UnsupportedOp, among
from vgrad.torch_private import levels, modes
from vgrad.tree import tree_map_only

NONE = object()
"""Returned in place of an answer where all samples share what is asked."""


class Split(BaseException):
    """The samples of a chunk have different answers; they must run in several parts.

    Not an `Exception`, which a loss could catch.

    Attributes:
        parts: the rows of the samples of one answer each.
        where: the line that asks.
        strategy: the one for the parts; None for the one that ran.
    """

    def __init__(
        self, parts: Sequence[Tensor], where: str, strategy: str | None = None
    ) -> None:
        """Take the rows of each part."""
        super().__init__(where)
        self.parts = parts
        self.where = where
        self.strategy = strategy


def answer(func: Callable, args: tuple, kwargs: dict, level: int) -> Any:
    """Return what all samples answer, which the vmap of a level maps over.

    Raises:
        Split: they have different answers.
    """
    with modes.without_modes():
        mapped = {
            id(each): values
            for each in among(args, kwargs)
            if (values := physical(each, level)) is not None
        }
        if not mapped:
            return NONE
        if are_collected():
            with looked_at():
                answers = [*_answers(func, args, kwargs, mapped)]
            return _kept(func, mapped, answers)
        answers = [*_answers(func, args, kwargs, mapped)]
    parts: dict[str, list[int]] = {}
    for row, each in enumerate(answers):  # as text: nan is nan, and 0.0 is not -0.0
        parts.setdefault(repr(each), []).append(row)
    if len(parts) > 1:
        raise Split([torch.tensor(rows) for rows in parts.values()], where())
    return answers[0]


def _kept(func: Callable, mapped: dict[int, Tensor], answers: list) -> Any:
    """Bake an answer into a graph, which must see that it still is the same."""
    if any(repr(each) != repr(answers[0]) for each in answers):
        raise Unrepeatable(f"samples take different branches at {where()}")
    (values,) = mapped.values()
    if func not in _COMPARED:
        raise Unrepeatable(f"{modes.op_name(func)} hands values to Python")
    dtype = _COMPARED[func]
    unlikely((values if dtype is None else values.to(dtype)) != answers[0])
    return answers[0]


def physical(tensor: Tensor, level: int) -> Tensor | None:
    """Return the values of all samples, [B, ...]; None if all share one."""
    while levels.level_of(tensor) > level:
        if levels.is_batched(tensor):
            raise UnsupportedOp(
                "loss: expected questions about values outside of a vmap of its own, "
                'got one inside of it. Use strategy="loop".'
            )
        tensor = levels.unwrapped(tensor)
    if levels.level_of(tensor) != level or not levels.is_batched(tensor):
        return None
    return levels.unwrapped(tensor).movedim(levels.batch_axis(tensor), 0).detach()


def _answers(
    func: Callable, args: tuple, kwargs: dict, mapped: dict[int, Tensor]
) -> Iterator[Any]:
    """Ask each sample by itself."""
    rows = {key: values.cpu().unbind() for key, values in mapped.items()}
    for number in range(len(next(iter(rows.values())))):

        def own(tensor: Tensor, number: int = number) -> Tensor:
            return rows[id(tensor)][number] if id(tensor) in rows else tensor

        own_args, own_kwargs = tree_map_only(Tensor, own, (args, kwargs))
        yield func(*own_args, **own_kwargs)


def where() -> str:
    """Name the line of the loss that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_OWN = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
"""Where code lies that is nobody's loss."""


_COMPARED: dict[Callable, torch.dtype | None] = {
    Tensor.__bool__: torch.bool,
    Tensor.is_nonzero: torch.bool,
    torch.is_nonzero: torch.bool,
    Tensor.__int__: torch.int64,
    Tensor.__index__: torch.int64,
    Tensor.__float__: torch.float64,
    Tensor.item: None,
}
"""Questions that a graph can ask again, and what they convert numbers to."""

QUESTIONS = {
    *_COMPARED,
    *(Tensor.__complex__, Tensor.tolist, Tensor.__contains__),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
}
"""Calls that hand values to Python."""

"""Questions about values, where one tensor stands for all samples, or all members.

An `if` on a tensor, `.item()` and the like want one value for Python. Where all samples
of a chunk have the same, that is the answer. Where they differ, the chunk is split by
their answers, and each part runs again by itself: exact, and at worst one sample at a
time.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable, are_collected, looked_at, unlikely
from vgrad.functional.untouched import Promise, Untouched
from vgrad.generators import drawn_since, random_state, set_random_state
from vgrad.lowering.draws import Draws, Undrawn
from vgrad.lowering.limits import in_place, raise_clearly
from vgrad.lowering.truthful import Truth, UnsupportedOp, among
from vgrad.torch_private import levels, modes
from vgrad.tree import tree_map_only

NONE = object()
"""Returned in place of an answer where all samples share what is asked."""


class Parts(NamedTuple):
    """How the samples of a chunk run again.

    Attributes:
        rows: those of the samples of each part.
        where: the line that asks.
        strategy: the one for the parts; None for the one that ran.
        why: what stopped that one, if the strategy is another.
    """

    rows: Sequence[Tensor]
    where: str
    strategy: str | None = None
    why: str = ""


class Split(BaseException):
    """The samples of a chunk cannot go on together; they must run in several parts.

    Not an `Exception`, which a loss could catch.

    Attributes:
        parts: the parts.
        level: that of the vmap over the samples; None for the innermost call.
    """

    def __init__(self, parts: Parts, level: int | None = None) -> None:
        """Take the parts."""
        super().__init__(parts.where)
        self.parts = parts
        self.level = level


def tried(
    run: Callable[[Draws], Any],
    draws: Draws,
    tensors: Sequence[Tensor],
    *,
    differ: bool,
    again: Callable[[Draws], Any] | None = None,
) -> tuple[Any, Draws]:
    """Run samples; return what that gives, or the `Parts` they fall into, and draws.

    These have the random numbers that the samples of the parts must see once more. If
    they `differ` from sample to sample and there were some, all samples run `again` for
    that.

    Raises:
        Undrawn: they came from another generator, whose state is not known.
    """
    before = random_state(tensors) if differ else None
    found = _parted(run, draws)
    if not isinstance(found, Parts):
        return found, draws
    if draws.own and draws.asked:
        raise Undrawn("some of a torch.Generator of the loss's own")
    if before is not None and draws.known is None and drawn_since(before, tensors):
        set_random_state(before)
        draws = Draws(known=[])
        found = _parted(again or run, draws)
    return found, draws


def _parted(run: Callable[[Draws], Any], draws: Draws) -> Any:
    """Return what a function does, or the parts into which its samples fall.

    So nothing is left of the exception, which would keep all tensors.
    """
    around = levels.current_level() or 0
    try:
        return run(draws)
    except Split as split:
        if split.level is not None and split.level <= around:
            raise  # a vmap around this call maps over these samples
        return split.parts


class Answering(Untouched):
    """The function mode that answers questions about values, with a `truth`.

    That says what the vmap maps over. What a loss asks and draws is noted in `draws`.
    """

    def __init__(
        self, *promises: Promise, truth: Truth | None, draws: Draws | None
    ) -> None:
        """Start where nothing was asked."""
        super().__init__(*promises)
        self._truth = truth
        self._draws = draws or Draws()
        self._stopped: BaseException | None = None

    def __exit__(self, *raised: Any) -> None:
        """Raise what stopped the loss, even if it went on all the same.

        A single sample would not have been stopped, so what a loss does in answer is
        not what it does with one.
        """
        super().__exit__(*raised)
        stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped is not raised[1]:
            raise stopped

    def note(self, kwargs: dict) -> None:
        """Note whether a call draws from a generator of the loss's own."""
        if kwargs.get("generator") is not None:
            self._draws.own = True

    def asked(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Answer one of the `QUESTIONS`, if all samples have the same answer."""
        if self._truth is None:
            return NONE
        found = answer(func, args, kwargs, self._truth)
        self._draws.asked |= found is not NONE
        return found

    def stop(
        self, error: Split | RuntimeError, func: Callable, kwargs: dict
    ) -> NoReturn:
        """Raise what stops the loss, in words that say what to do, and remember it."""
        try:
            if isinstance(error, Split):
                self._draws.asked = True
                raise error
            one = self._truth.one if self._truth else "sample"
            writes = in_place(func, kwargs)
            raise_clearly(error, modes.op_name(func), in_place=writes, one=one)
        except (Split, UnsupportedOp) as stopped:
            self._stopped = stopped
            raise


def answer(func: Callable, args: tuple, kwargs: dict, truth: Truth) -> Any:
    """Return what all samples answer, or all members: what a vmap maps over.

    Raises:
        Split: they have different answers.
        UnsupportedOp: the question is about what a vmap of the loss's own maps over.
    """
    with modes.without_modes():
        mapped = {
            id(each): values
            for each in among(args, kwargs)
            if (values := physical(each, truth.level)) is not None
        }
        if not mapped:
            return NONE
        if are_collected():
            with looked_at():
                answers = _answers(func, args, kwargs, mapped)
            return _kept(func, mapped, answers, truth.one)
    # A vmap around this one is asked in turn, by its own mode.
    answers = _answers(func, args, kwargs, mapped)
    parts: dict[str, list[int]] = {}
    for row, each in enumerate(answers):  # as text: nan is nan, and 0.0 is not -0.0
        parts.setdefault(repr(each), []).append(row)
    if len(parts) > 1:
        rows = [torch.tensor(each) for each in parts.values()]
        raise Split(Parts(rows, where(sys._getframe(1))), truth.level)
    return answers[0]


def _kept(func: Callable, mapped: dict[int, Tensor], answers: list, one: str) -> Any:
    """Bake an answer into a graph, which must see that it still is the same."""
    first = answers[0]
    if any(repr(each) != repr(first) for each in answers):
        place = where(sys._getframe(1))
        raise Unrepeatable(f"{one}s take different branches at {place}")
    if func not in _COMPARED:
        raise Unrepeatable(f"{modes.op_name(func)} hands values to Python")
    (values,) = mapped.values()
    dtype = _COMPARED[func]
    values = values if dtype is None else values.to(dtype)
    differs = values != first
    if isinstance(first, float):
        differs |= values.signbit() != (repr(first)[0] == "-")
    unlikely(differs)
    return first


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
) -> list:
    """Ask each sample by itself."""
    if func in _AT_ONCE and len(mapped) == 1:
        (values,) = mapped.values()
        if values.numel() == len(values) and not values.is_complex():
            return [*map(_AT_ONCE[func], values.reshape(len(values)).tolist())]
    rows = {key: values.cpu().unbind() for key, values in mapped.items()}

    def asked() -> Iterator[Any]:
        for number in range(len(next(iter(rows.values())))):

            def own(tensor: Tensor, number: int = number) -> Tensor:
                return rows[id(tensor)][number] if id(tensor) in rows else tensor

            own_args, own_kwargs = tree_map_only(Tensor, own, (args, kwargs))
            yield func(*own_args, **own_kwargs)

    return [*asked()]


def where(frame: FrameType) -> str:
    """Name the innermost line around a frame that belongs to the loss."""
    while frame.f_back is not None and _is_nobodys(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def stopped_at(error: BaseException) -> str:
    """Name the last such line that an error came from."""
    found, step = "", error.__traceback__
    while step is not None:
        if not _is_nobodys(step.tb_frame):
            found = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return found or where(sys._getframe(1))


def _is_nobodys(frame: FrameType) -> bool:
    """Tell whether code belongs to this package, to torch or to Python."""
    file = frame.f_code.co_filename
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

_AT_ONCE: dict[Callable, Callable] = {
    **dict.fromkeys((Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero), bool),
    Tensor.__float__: float,
    Tensor.item: lambda value: value,
}
"""Questions about one number, and what makes an answer of it."""

QUESTIONS = {
    *_COMPARED,
    *(Tensor.__complex__, Tensor.tolist, Tensor.__contains__, Tensor.__format__),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
}
"""Calls that hand values to Python."""

"""Random numbers that samples have drawn before, handed out again.

A chunk that falls into parts runs again from the start, part by part. Until the
question that split it, each sample has to see the numbers that it saw before: one that
went the other way for having drawn others would spoil their distribution. So the chunk
runs once more up to the question, what its random ops return is noted, and every part
takes its rows of that. From there on each part draws numbers of its own.

Samples with keys need none of this: their numbers follow from the keys. Here and in
`keyed.py` a sample may be a member of an ensemble as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrad.generators import drawn_since, random_state
from vgrad.lowering.keyed import Keyed
from vgrad.lowering.truthful import among
from vgrad.torch_private.tensors import SHOWN, may_draw, op_name, shown_results
from vgrad.torch_private.tracing import DispatchMode


class Undrawn(RuntimeError):
    """Random numbers cannot be had once more."""

    def __init__(self, got: str) -> None:
        """Say which ones."""
        super().__init__(
            f"random numbers: expected some that a part of the samples can see again, "
            f'since their branches differ, got {got}. Use strategy="loop".'
        )


@dataclass(frozen=True)
class _Drawn:
    """What one random op returned, or wrote."""

    op: str
    results: list[Tensor]
    size: int  # the samples for which it drew
    rows: Tensor  # those among them that run now

    def put(self, op: str, results: Sequence[Tensor], *, alone: bool) -> None:
        """Write the numbers of the samples that run now over others."""
        if (op, len(results)) != (self.op, len(self.results)):
            raise Undrawn(f"{self.op} the first time and {op} the second")
        for result, known in zip(results, self.results, strict=True):
            own = _alone(self, known, result) if alone else _own(self, known, result)
            if own is None:
                raise Undrawn(
                    f"{op} of shape {tuple(known.shape)} the first time, for "
                    f"{self.size} samples, and of shape {tuple(result.shape)} the "
                    f"second, for {1 if alone else len(self.rows)}"
                )
            result.copy_(own)


@dataclass(eq=False)
class Draws:
    """What is known of the random numbers of samples that run together.

    Attributes:
        asked: whether a question about values was answered.
        own: whether they came from a `torch.Generator`, too.
        known: what random ops returned, in order; None if nobody takes notes.
        keys: those from which the random numbers follow, int64 `[B]`.
        place: how many random ops of the loss ran before, where there are keys.
        axis: where what they draw has its samples; None if nobody knows.
        drew: whether there were random ops, where there are keys.
        idle: whether nobody looks for them.
    """

    asked: bool = False
    own: bool = False
    known: list[_Drawn] | None = None
    keys: Tensor | None = None
    place: int = 0
    axis: int | None = 0
    drew: bool = False
    idle: bool = False

    def of(self, rows: Tensor) -> "Draws":
        """Return the same for some of the samples."""
        if self.keys is not None:
            return Draws(keys=self.keys[rows])
        if self.known is None:
            return Draws()
        known = [replace(each, rows=each.rows[rows]) for each in self.known]
        return Draws(known=known)

    def each(self) -> Iterator["Draws"]:
        """Yield those of one sample after another, where there are keys."""
        for row in range(0 if self.keys is None else len(self.keys)):
            yield self.of(torch.tensor([row]))

    def watched(
        self, size: int, *, alone: bool = False, repeated: bool = False
    ) -> AbstractContextManager:
        """Hand out what is known, and note the rest, while a loss runs once.

        `alone` is a sample without a batch dimension; its numbers are not noted. Those
        that a part of a loss draws when it is `repeated` have no place in the order.
        """
        if self.keys is not None:
            self.place = self.place if repeated else 0
            return nullcontext() if self.idle else Keyed(self, alone=alone)
        if self.known is None:
            return nullcontext()
        return _Watch(self.known, size, alone=alone, repeated=repeated)

    @contextmanager
    def samples_at(self, axis: int | None) -> Iterator[None]:
        """Say where random ops have the samples in this block; None for nowhere.

        What a block says holds in all blocks inside of it, if it is that.
        """
        before = self.axis
        self.axis = None if before is None else axis
        try:
            yield
        finally:
            self.axis = before

    def again(self) -> Callable[[], AbstractContextManager]:
        """Return what puts the place of now in place once more, for a repetition."""
        place = self.place

        @contextmanager
        def at() -> Iterator[None]:
            before, self.place = self.place, place
            try:
                yield
            finally:
                self.place = before

        return at


class _Watch(DispatchMode):
    """Sees the random ops of one run, on the tensors of all samples."""

    def __init__(
        self, known: list[_Drawn], size: int, *, alone: bool, repeated: bool
    ) -> None:
        """Start with the first op."""
        super().__init__()
        self._repeated = repeated
        self._known = known
        self._size = size
        self._alone = alone
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one op, and put the numbers in place that are known."""
        kwargs = kwargs or {}
        name = op_name(func)
        shown = name in SHOWN
        if not shown:
            if not may_draw(func):
                return func(*args, **kwargs)
            tensors = among(args, kwargs)
            before = random_state(tensors)
        found = func(*args, **kwargs)
        if not shown:
            if drawn_since(before, tensors):
                raise Undrawn(f"{name}, which keeps them to itself")
            return found
        if self._repeated:
            raise Undrawn(f"{name} in an activation checkpoint")
        results = shown_results(func, args, kwargs, found)
        if self._place < len(self._known):
            self._known[self._place].put(name, results, alone=self._alone)
        elif not self._alone:
            kept = [each.clone() for each in results]
            rows = torch.arange(self._size)
            self._known.append(_Drawn(name, kept, self._size, rows))
        self._place += 1
        return found


def _own(drawn: _Drawn, known: Tensor, like: Tensor) -> Tensor | None:
    """Return the numbers of the samples that run now; None if that is unclear.

    One axis is that of samples: [B, ...], or [B * k, ...] where a rule of vmap folds
    another into it. Lowerings have it elsewhere, and fold nothing.
    """
    if len(drawn.rows) == drawn.size:
        return known if known.shape == like.shape else None
    if known.ndim != like.ndim:
        return None
    pairs = enumerate(zip(known.shape, like.shape, strict=True))
    axes = [axis for axis, sizes in pairs if sizes[0] != sizes[1]]
    if len(axes) != 1:
        return None
    (axis,) = axes
    count, rest = divmod(known.shape[axis], drawn.size)
    if rest or like.shape[axis] != count * len(drawn.rows) or (axis and count > 1):
        return None
    each = known.unflatten(axis, (drawn.size, count))
    rows = drawn.rows.to(known.device)
    return each.index_select(axis, rows).flatten(axis, axis + 1)


def _alone(drawn: _Drawn, known: Tensor, like: Tensor) -> Tensor | None:
    """Return the numbers of the first sample that runs now, without the axis."""
    for axis, size in enumerate(known.shape):
        if size % drawn.size == 0 and (not axis or size == drawn.size):
            each = known.unflatten(axis, (drawn.size, -1))
            own = each.select(axis, int(drawn.rows[0]))
            if own.shape == like.shape:
                return own
            if size == drawn.size and own.squeeze(axis).shape == like.shape:
                return own.squeeze(axis)
    return None

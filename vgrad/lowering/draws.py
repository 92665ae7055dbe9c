"""Random numbers that samples have drawn before, handed out again.

A chunk that falls into parts runs again from the start, part by part. Until the
question that split it, each sample has to see the numbers that it saw before: one that
went the other way for having drawn others would spoil their distribution. So the chunk
runs once more up to the question, what its random ops return is noted, and every part
takes its rows of that. From there on each part draws numbers of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrad.generators import drawn_since, random_state
from vgrad.lowering.member_draws import MemberDraws
from vgrad.lowering.truthful import among
from vgrad.torch_private.tensors import written
from vgrad.torch_private.tracing import DispatchMode

Seeds = Sequence[int] | None
"""That of each sample's or member's own stream; None if all draw from one."""


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
        seeds: that of each sample's own stream; None if all draw from one.
    """

    asked: bool = False
    own: bool = False
    known: list[_Drawn] | None = None
    seeds: Seeds = None

    def of(self, rows: Tensor) -> "Draws":
        """Return the same for some of the samples."""
        known, seeds = self.known, self.seeds
        if known is not None:
            known = [replace(each, rows=each.rows[rows]) for each in known]
        if seeds is not None:
            seeds = [seeds[row] for row in rows.tolist()]
        return Draws(known=known, seeds=seeds)

    def watched(
        self, size: int, *, alone: bool = False, repeated: bool = False
    ) -> AbstractContextManager:
        """Hand out what is known, and note the rest, while a loss runs once.

        `alone` is a sample without a batch dimension; its numbers are not noted. Those
        that a part of a loss draws when it is `repeated` have no place in the order.
        """
        streams: AbstractContextManager = nullcontext()
        if self.seeds is not None and not alone:
            streams = MemberDraws(self.seeds, _SHOWN, repeated=repeated)
        if self.known is None:
            return streams
        watch = _Watch(self.known, size, alone=alone, repeated=repeated)
        return _both(streams, watch)


@contextmanager
def _both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator:
    with outer, inner:
        yield


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
        name = getattr(func, "overloadpacket", func).__name__.rstrip("_")
        shown = name in _SHOWN
        if not shown:
            if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
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
        given = [*_written(func, args, kwargs), *among((found,), {})]
        results = [*{id(each): each for each in given}.values()]
        if self._place < len(self._known):
            self._known[self._place].put(name, results, alone=self._alone)
        elif not self._alone:
            kept = [each.clone() for each in results]
            rows = torch.arange(self._size)
            self._known.append(_Drawn(name, kept, self._size, rows))
        self._place += 1
        return found


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """Yield the tensors that an op writes into."""
    for place, name, by_keyword in written(func):
        if not by_keyword and place < len(args):
            yield args[place]
        elif isinstance(kwargs.get(name), Tensor):
            yield kwargs[name]


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


_SHOWN = {
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal"),
    *("multinomial", "native_dropout", "normal", "normal_functional", "poisson"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random"),
    *("randperm", "rrelu_with_noise", "rrelu_with_noise_functional", "uniform"),
    *("_fused_dropout", "_sample_dirichlet", "_standard_gamma"),
}
"""Random ops whose results, or what they write, show all the numbers they drew."""

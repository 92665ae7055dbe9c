"""Failures of a loss, and warnings about strategies."""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vgrad.conditions import Unrepeatable
from vgrad.functional.guards import WriteError
from vgrad.generators import RNG_LOCK
from vgrad.loss.grad_flags import UnsupportedOp as UnsupportedOp
from vgrad.loss.made import Rooms
from vgrad.loss.randomness import Unkeyed
from vgrad.loss.values import Partition, stopped_at
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import version_of
from vgrad.typing import Strategy


@contextmanager
def own_backward_passes(params: Collection[Tensor]) -> Iterator[None]:
    """Explain errors of an autograd.Function; refuse backward passes inside it."""
    before = _accumulated(params)
    try:
        yield
    except Exception as error:
        frames = walk_tb(error.__traceback__)
        if any(frame.f_code is BackwardCFunction.apply.__code__ for frame, _ in frames):
            error.add_note(
                "This happened in the backward pass of an autograd.Function, which is "
                "expected to need nothing but its context: after its call a functional "
                "model has no parameters, and its attributes are restored. Models "
                "whose layers run again in a backward pass, such as reversible ones, "
                "need plain autograd."
            )
        raise
    if before != _accumulated(params):
        raise UnsupportedOp(
            "loss: expected a graph that leads to the parameters, got an "
            "autograd.Function that runs a backward pass of its own, which added to "
            "the .grad of the caller's and has no derivative. Call under "
            "torch.no_grad(), or with detached parameters."
        )


def _accumulated(params: Collection[Tensor]) -> list[tuple[int, int]]:
    grads = [param.grad for param in params if param.is_leaf]
    return [(id(grad), version_of(grad)) for grad in grads if grad is not None]


class FallbackWarning(UserWarning):
    """Samples or members run one after another: right numbers, but slow."""


_MANY = 16
"""Samples of a chunk whose parts are worth a warning."""


NON_RETRYABLE = (torch.OutOfMemoryError, Unrepeatable, Unkeyed, Warning, WriteError)
"""Errors that no other strategy could avoid, or should."""


class Failure(NamedTuple):
    """The text of an error; the error itself would keep all tensors alive."""

    where: str  # the line of the loss
    why: str  # the first line of the message
    refused: bool  # by vgrad, and for a reason

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        refused = isinstance(error, UnsupportedOp)
        why = str(error).partition("\n")[0]
        why = why if refused else f"{type(error).__name__}: {why}"
        return cls(stopped_at(error), why, refused)


@dataclass
class History:
    """What a transform has learnt of a signature."""

    calls: int = 0  # that may compare gradients with plain autograd
    times: int = 0  # comparisons that agreed
    largest: float = 0.0  # of their differences, relative to a gradient's norm
    where: str = ""  # the parameter of that one
    unseen: frozenset[str] = frozenset()  # parameters of which all gradients were zero
    why: str = ""  # why the last comparison did not take place
    way: Strategy = "recorded"  # that "auto" took last
    failure: Failure | None = None  # why that is not "recorded"
    lasting: bool = False  # whether later calls take that way at once
    first: Strategy = "recorded"  # that "auto" tries; those before it were wrong
    refuted: Failure | None = None  # why that is not "recorded"
    compared: frozenset[str] = frozenset()  # strategies of which some numbers agreed

    def __str__(self) -> str:
        if not self.times:
            return f"not verified: {self.why or 'no call so far'}"
        text = (
            f"verified against plain autograd on 2 samples, "
            f"{self.times} time{'s' * (self.times > 1)}; largest difference "
            f"{self.largest:.0e}"
        )
        text += f" ({self.where})" if self.where else ""
        rest = ", ".join(sorted(self.unseen))
        return f"{text}; not yet: {rest}" if rest else text


class Fallbacks:
    """The memory of one transform: each warning is shown once."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent  # about other strategies
        # Ops without a batching rule, of which torch warns. Its warnings are caught
        # only while there may be new ones: then Python forgets those it has shown.
        self._unruled: set[str] | None = None
        self._shown: set[str] = set()
        self.histories: dict[Any, History] = {}  # by signature
        # Of a private run, found in its first step; its state keeps it.
        self.route: Strategy = "auto"
        self.split: Failure | None = None  # why samples ran one after another
        self.draws: bool | None = None  # whether a loss with keys has drawn so far
        self.keyed = False  # whether samples read values after they drew, without keys
        self.splits: Counter[str] = Counter()  # chunks that fell into parts, by line
        self.looped: dict[str, str] = {}  # functions that no vmap ran, and their lines
        self.hooks: dict[str, str] = {}  # on gradients, and their lines
        self.rooms = Rooms()  # for values of single samples
        self.foreign: set[str] = set()  # nodes and ops that are not torch's own
        # Buffers that samples of a step write: whether alike, or a value to compare
        # with; None for buffers written in earlier steps alone.
        self.written: dict[str, bool | Tensor | None] = {}
        # Parameters that get copies since the loss differentiates by or past them, and
        # why; None for a loss that has not done so.
        self.inner: dict[str, str] | None = None

    def warn_of_split(
        self, parts: Partition, function: str, one: str = "sample"
    ) -> None:
        """Note that a chunk falls into parts; warn once where these are small."""
        if len(parts.rows) == 1:
            return  # it runs again, but not in parts
        self.splits[parts.where] += 1
        count, size = len(parts.rows), sum(map(len, parts.rows))
        if size >= _MANY and 2 * count > size:
            self.warn(
                f"{function}: {one}s take different branches at {parts.where}; {size} "
                f"of them run in {count} parts. The numbers are right, but slow."
            )

    def fell_back(self, text: str) -> None:
        """Warn of another strategy, whose reason is in `failure`."""
        if not self._silent:
            self.warn(text)

    def warn(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            warnings.warn(text, FallbackWarning, stacklevel=_frames_here() + 1)

    @contextmanager
    def reported(self, function: str) -> Iterator[None]:
        """Run a block, then warn about ops and functions that ran sample by sample."""
        self.looped.clear()
        self.hooks.clear()
        caught: Any = ()
        ops: set[str] = set()
        try:
            with ExitStack() as stack:
                if self._unruled is None or self._unruled:  # there may be something new
                    stack.enter_context(RNG_LOCK)
                    caught = stack.enter_context(warnings.catch_warnings(record=True))
                    warnings.simplefilter("always")
                yield
        finally:
            for warning in caught:
                if op := modes.op_without_rule(str(warning.message)):
                    ops.add(op)
                else:
                    place = warning.filename, warning.lineno
                    warnings.warn_explicit(warning.message, warning.category, *place)
        before = self._unruled or set()
        self._unruled = before | ops
        if new := ops - before:
            self.warn(
                f"{function}: torch has no batching rule for {', '.join(sorted(new))} "
                f"and loops over the samples there; the numbers are right, but slow."
            )
        for name in self.looped.keys() - self._shown:
            self._shown.add(name)
            self.warn(
                f"{function}: vmap cannot run {name}.apply, which runs sample by "
                f"sample at {self.looped[name]}; the numbers are right, but slow."
            )


def _frames_here() -> int:
    """Count the frames of this package that a warning should not point at."""
    here = f"{Path(__file__).parents[2]}{os.sep}"
    frame, count = sys._getframe(1), 0
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(here)
        or frame.f_code.co_filename == contextlib.__file__
    ):
        frame, count = frame.f_back, count + 1
    return count

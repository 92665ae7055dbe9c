"""The mode under which a loss runs, and its failures and warnings."""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vgrad.conditions import Unrepeatable
from vgrad.functional.batch_norm import mended, refuse_batch_statistics
from vgrad.functional.guards import Protected
from vgrad.generators import RNG_LOCK
from vgrad.lowering.functions import for_samples
from vgrad.lowering.grad_flags import (
    REQUIRES_GRAD,
    GradFlags,
    among,
)
from vgrad.lowering.grad_flags import UnsupportedOp as UnsupportedOp
from vgrad.lowering.mode import ValueReadMode
from vgrad.lowering.packed import PACKED
from vgrad.lowering.randomness import Draws
from vgrad.lowering.value_reads import (
    NONE,
    VALUE_READS,
    Partition,
    SplitBatch,
    physical,
    stopped_at,
    where,
    with_numbers,
)
from vgrad.lowering.vmap import SELECTING, VMAPPED
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.tensors import version_of


class LossGuard(ValueReadMode):
    """The function mode that refuses ops, and corrects vmap where it has `flags`.

    The loss must not write into tensors of `given`. Its value reads and random numbers
    are noted in `draws`. `again` says that the loss has run under vmap before, where
    batch statistics were checked.
    """

    def __init__(
        self,
        flags: GradFlags | None = None,
        *,
        given: Mapping[str, Tensor],
        draws: Draws | None = None,
        looped: dict[str, str] | None = None,
        again: bool = False,
    ) -> None:
        expected = "loss: expected one that changes nothing it is given"
        arguments = Protected(given, expected, "Copy it first.")
        super().__init__(arguments, flags=flags, draws=draws)
        self._looped = {} if looped is None else looped
        self._again = again

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.look_at_hooks()
        if getattr(func, "__name__", "") != "__get__":
            refuse_batch_statistics(func, args, kwargs, self._is_shared)
            self.check(func, args, kwargs)
        if func is modes.custom_function_call:
            if args[0] is autograd.Reentrant:
                raise UnsupportedOp(autograd.REENTRANT_ERROR)
            if args[0] is autograd.SAVES_ARGUMENTS:
                return autograd.SavedArguments(*args[2:])
        if self._flags is None:
            if func is Tensor.requires_grad_ and not modes.is_wrapped(args[0]):
                with modes.exit_all():  # inside of transforms it raises
                    return func(*args, **kwargs)
            return mended(func, func(*args, **kwargs))
        if kwargs:
            self.note(kwargs)
        try:
            return self._run_with_numbers(func, args, kwargs)
        except (SplitBatch, RuntimeError) as error:
            self.stop(error, func, kwargs)

    def _run_with_numbers(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        assert self._flags is not None
        try:
            return self.run(func, args, kwargs)
        except RuntimeError as error:
            if modes.ITEM_ERROR not in str(error):
                raise
            arguments = with_numbers(func, args, kwargs, self._flags.level)
            if arguments is None:
                raise
        self._draws.values_read = True
        return self._run_with_numbers(func, *arguments)

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call for all samples at once."""
        assert self._flags is not None  # else there is one sample
        if func in ASKING and (value := self.value_of(func, args, kwargs)) is not NONE:
            return value
        tensors = among(args, kwargs)
        # A loss around this one has modes of its own.
        with modes.without_modes():
            self._flags.before(func, tensors)
        output = self.op(func, args, kwargs)
        with modes.without_modes():
            self._flags.after(func, tensors, output)
            reads = output is False and func == REQUIRES_GRAD
            hidden = reads and self._flags.hides(tensors[0])
        if hidden:
            raise UnsupportedOp(
                "requires_grad: expected a loss that reads it of tensors that depend "
                "on its parameters, got one that only the caller differentiates. "
                'Detach samples and buffers, or use strategy="loop".'
            )
        return output

    def _is_shared(self, tensor: Tensor) -> bool:
        if self._flags is None:
            return self._again
        with modes.without_modes():
            return physical(tensor, self._flags.level) is None

    def value_of(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a call that reads values, if they agree for all samples."""
        if (form_of := _FORMS.get(func)) is None:
            return super().value_of(func, args, kwargs)
        if self._flags is None:
            return NONE
        if (form := form_of(self._flags.level, *args, **kwargs)) is None:
            return NONE
        self._draws.values_read = True
        # Packed sequences draw in another order than one sample.
        axis = None if func in PACKED else self._draws.axis
        with self, self._draws.samples_at(axis):
            return form()

    def op(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one op in the form that it has under vmap."""
        if func is not modes.custom_function_call:
            return VMAPPED.get(func, func)(*args, **kwargs)
        with self._draws.samples_at(None):  # its random numbers have any layout
            output, looped = for_samples(args[0], args[1:], kwargs, self.is_parameter)
        if looped:
            self._looped.setdefault(args[0].__name__, where(sys._getframe()))
        return output

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the proxy of a parameter."""
        return False


_FORMS = SELECTING | PACKED
"""Calls whose results may have shapes that depend on values."""

ASKING = VALUE_READS | _FORMS.keys()
"""Calls that read values."""


@contextmanager
def own_backward_passes(params: Collection[Tensor]) -> Iterator[None]:
    """Explain errors of an autograd.Function, and refuse backward passes inside it.

    `params` may be differentiated by the caller.
    """
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
    grads = [each.grad for each in params if each.is_leaf]
    return [(id(each), version_of(each)) for each in grads if each is not None]


class FallbackWarning(UserWarning):
    """An op has no batching rule in torch: right numbers, one sample at a time."""


_MANY = 16
"""Samples of a chunk whose parts are worth a warning."""


NON_RETRYABLE = (torch.OutOfMemoryError, Unrepeatable, Warning)
"""Errors that no other strategy could avoid, or should."""


class Failure(NamedTuple):
    """The text of an error; the error itself would keep all tensors alive."""

    where: str  # the line of the loss
    why: str  # the first line of the message
    refused: bool  # by vgrad, and for a reason

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Describe an error."""
        refused = isinstance(error, UnsupportedOp)
        why = str(error).partition("\n")[0]
        why = why if refused else f"{type(error).__name__}: {why}"
        return cls(stopped_at(error), why, refused)


class Fallbacks:
    """The memory of one transform: each warning is shown once.

    torch's warnings about missing batching rules become one that names the ops. They
    are caught only while there is something new: catching warnings makes Python forget
    which ones it has shown.
    """

    def __init__(self) -> None:
        self._known: set[str] | None = None
        self._told: set[str] = set()
        self.failure: Failure | None = None  # why the last loss was not recorded
        self.split: Failure | None = None  # why samples ran one after another
        self.draws: bool | None = None  # whether a loss with keys has drawn so far
        self.splits: Counter[str] = Counter()  # chunks that fell into parts, by line
        self.looped: dict[str, str] = {}  # functions that no vmap ran, and their lines
        self.foreign: set[str] = set()  # nodes and ops that are not torch's own

    def tell(self, parts: Partition, function: str, one: str = "sample") -> None:
        """Note that a chunk falls into parts; warn once where these are small."""
        self.splits[parts.where] += 1
        count, size = len(parts.rows), sum(map(len, parts.rows))
        if size >= _MANY and 2 * count > size:
            self.warn(
                f"{function}: {one}s take different branches at {parts.where}; {size} "
                f"of them run in {count} parts. The numbers are right, but slow."
            )

    def fell_back(self, text: str) -> None:
        """Warn of another strategy, whose reason is in `failure`."""
        self.warn(text)

    def warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, FallbackWarning, stacklevel=_frames_here() + 1)

    @contextmanager
    def reported(self, function: str) -> Iterator[None]:
        """Run a block, then warn about functions that ran sample by sample."""
        self.looped.clear()
        with self._ops_reported(function):
            yield
        for name in self.looped.keys() - self._told:
            self._told.add(name)
            self.warn(
                f"{function}: vmap cannot run {name}.apply, which runs sample by "
                f"sample at {self.looped[name]}; the numbers are right, but slow."
            )

    @contextmanager
    def _ops_reported(self, function: str) -> Iterator[None]:
        if self._known == set():
            yield
            return
        caught: list[warnings.WarningMessage] = []
        try:
            with RNG_LOCK, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            ops: set[str] = set()
            for each in caught:
                if op := modes.op_without_rule(str(each.message)):
                    ops.add(op)
                else:
                    warnings.warn_explicit(
                        each.message, each.category, each.filename, each.lineno
                    )
        new = ops - (self._known or set())
        self._known = (self._known or set()) | ops
        if new:
            warnings.warn(
                f"{function}: torch has no batching rule for {', '.join(sorted(new))} "
                f"and loops over the samples there; the numbers are right, but slow.",
                FallbackWarning,
                stacklevel=_frames_here() + 1,
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

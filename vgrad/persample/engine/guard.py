"""What watches a loss while it runs: refused ops, clear errors, one warning."""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from vgrad.functional.batch_norm import mended, refuse_batch_statistics
from vgrad.functional.untouched import Promise, Untouched
from vgrad.generators import ALONE
from vgrad.lowering.draws import Draws
from vgrad.lowering.packed import PACKED
from vgrad.lowering.questions import (
    NONE,
    QUESTIONS,
    Parts,
    Split,
    answer,
    physical,
    with_numbers,
)
from vgrad.lowering.selecting import SELECTING
from vgrad.lowering.truthful import (
    REQUIRES_GRAD,
    Truth,
    among,
    own_backward_pass,
)
from vgrad.lowering.truthful import UnsupportedOp as UnsupportedOp
from vgrad.lowering.vmapped import VMAPPED
from vgrad.torch_private import messages, modes


class LossGuard(Untouched):
    """Refuses batch statistics at the op; with `truth`, what vmap lacks or misreports.

    A function mode sees every torch function that a loss calls, in a module or not.
    `given` is what the loss must not write into; what it asks and draws is noted in
    `draws`. `again` is a loss that was watched before, under vmap, where one can tell
    which statistics are those of a weight.
    """

    def __init__(
        self,
        truth: Truth | None = None,
        *,
        given: Mapping[str, Tensor],
        draws: Draws | None = None,
        again: bool = False,
    ) -> None:
        """Take the answers of the vmap over samples, if the loss runs in one."""
        expected = "loss: expected one that changes nothing it is given"
        super().__init__(Promise(given, expected, "Copy it first."))
        self._truth = truth
        self._draws = draws or Draws()
        self._stopped: BaseException | None = None
        self._again = again

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            refuse_batch_statistics(func, args, kwargs, self._is_shared)
            self.check(func, args, kwargs)
        if self._truth is None:
            return mended(func, func(*args, **kwargs))
        if kwargs and kwargs.get("generator") is not None:
            self._draws.own = True
        try:
            return self._run_clearly(func, args, kwargs)
        except (Split, UnsupportedOp) as error:
            self._stopped = error
            raise

    def __exit__(self, *raised: Any) -> None:
        """Raise what stopped the loss, even if it went on all the same.

        A single sample would not have been stopped, so what a loss does in answer is
        not what it does with one.
        """
        super().__exit__(*raised)
        stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped is not raised[1]:
            raise stopped

    def _run_clearly(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call; an error says what to do."""
        try:
            return self.run(func, args, kwargs)
        except RuntimeError as error:
            given = None
            if messages.OF_A_NUMBER in str(error) and self._truth is not None:
                given = with_numbers(func, args, kwargs, self._truth.level)
            if given is None:
                in_place = _in_place(func, kwargs)
                raise_clearly(error, modes.op_name(func), in_place=in_place)
        self._draws.asked = True
        return self._run_clearly(func, *given)

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call for all samples at once."""
        assert self._truth is not None  # else there is one sample
        if (found := self.asked(func, args, kwargs)) is not NONE:
            return found
        tensors = among(args, kwargs)
        # A loss around this one, which has modes of its own, is not asked.
        with modes.without_modes():
            self._truth.before(func, tensors)
        output = self.op(func, args, kwargs)
        with modes.without_modes():
            self._truth.after(func, tensors, output)
            asks = output is False and func == REQUIRES_GRAD
            hidden = asks and self._truth.hides(tensors[0])
        if hidden:
            raise UnsupportedOp(
                "requires_grad: expected a loss that asks this of what depends on its "
                "parameters, got one that asks where only the caller differentiates. "
                'Detach samples and buffers, or use strategy="loop".'
            )
        return output

    def _is_shared(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the same for all samples; a loop cannot know."""
        if self._truth is None:
            return self._again
        with modes.without_modes():
            return physical(tensor, self._truth.level) is None

    def asked(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a call that has to know values, if they say the same of all samples."""
        truth = self._truth
        if func not in _ASKING or truth is None:
            return NONE
        if func in QUESTIONS:
            found = answer(func, args, kwargs, truth.level)
            self._draws.asked |= found is not NONE
            return found
        if (form := _FORMS[func](truth.level, *args, **kwargs)) is None:
            return NONE
        self._draws.asked = True
        with self:
            return form()

    @staticmethod
    def op(func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one op in the form that it has under vmap."""
        return VMAPPED.get(func, func)(*args, **kwargs)


_FORMS = SELECTING | PACKED
"""Calls whose results may have shapes that depend on values."""

_ASKING = QUESTIONS | _FORMS.keys()
"""Calls that have to know values."""


def raise_clearly(
    error: RuntimeError, op: str, *, in_place: bool = False, one: str = "sample"
) -> NoReturn:
    """Raise an error of vmap again in words that say what to do; others as they are.

    `one` is what vmap maps over.
    """
    if isinstance(error, torch.OutOfMemoryError | UnsupportedOp):
        raise error
    if messages.RANDOM in str(error):
        raise RuntimeError(
            f'{op}: expected a loss without random numbers, since randomness="error". '
            f'Pass randomness="different" (each {one} draws its own) or "same".'
        ) from error
    if (limit := _limit(str(error), op, in_place=in_place, one=one)) is not None:
        raise limit from error
    error.add_note(
        f"This happened in {op} while one {one} stood for all {one}s at once. If it "
        f'works for a single {one}, strategy="loop" can run it.'
    )
    raise error


def _limit(message: str, op: str, *, in_place: bool, one: str) -> UnsupportedOp | None:
    """Say which limit of vmap an error is about, and what to do; None for others."""
    differentiable = "expected ops that transforms of torch.func can differentiate, got"
    if messages.RANDOM_OF_EACH in message:
        limit = (
            f"expected random numbers that all {one}s can share, since "
            f'randomness="same", got some whose distribution depends on the {one}. '
            f'Pass randomness="different", or use strategy="loop".'
        )
    elif any(each in message for each in messages.HOOKS_ON_SAVED):
        limit = (
            f"{differentiable} activation checkpointing (or other hooks on saved "
            f"tensors). Take it out and save memory with chunk_size, or use "
            f'strategy="loop" if the loss needs no functional model.'
        )
    elif messages.NO_SETUP_CONTEXT in message:
        limit = (
            f"{differentiable} an autograd.Function without setup_context, as "
            f"re-entrant activation checkpointing has one. Give your own one "
            f"setup_context and a vmap rule, save memory with chunk_size instead of "
            f'checkpointing, or use strategy="loop".'
        )
    elif op == "retain_grad":
        limit = (
            f"expected a loss that leaves the graph of its tensors alone, got one that "
            f"asks a tensor to keep its gradient, where one tensor stands for all "
            f'{one}s. Leave it out, or use strategy="loop".'
        )
    elif op in _AUTOGRAD or any(each in message for each in messages.OWN_BACKWARD):
        return own_backward_pass(op)
    elif (
        in_place
        or (op in _RECURRENT and messages.SHAPES in message)
        or any(each in message for each in messages.NOT_MAPPED)
    ):
        shared = f"writes in place into a tensor that all {one}s share, or is too small"
        values = "looks at values or has shapes that depend on them"
        limit = (
            f"expected ops that vmap can run for all {one}s at once, got one that "
            f'{shared if in_place else values}. Use strategy="loop", which runs it '
            f"{one} by {one}."
        )
    else:
        return None
    return UnsupportedOp(f"{op}: {limit}")


_AUTOGRAD = {"grad", "backward", "requires_grad_", "requires_grad"}
"""What a loss calls only if it differentiates on its own."""

_RECURRENT = {"rnn_tanh", "rnn_relu", "lstm", "gru"}
_RECURRENT |= {"rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell"}
"""What torch's vmap stumbles over with an error about shapes."""


class FallbackWarning(UserWarning):
    """An op has no batching rule in torch: right numbers, one sample at a time."""


_MANY = 16
"""Samples of a chunk whose parts are worth a warning."""


class Fallbacks:
    """Turns torch's warnings about missing batching rules into one that names the ops.

    It remembers, for one transform, which ops were reported, and looks on only while
    there is something to report: catching warnings makes Python forget which ones it
    has already shown.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: set[str] | None = None
        self._told: set[str] = set()
        self.mapped = False  # whether the last loss could not be recorded
        self.splits: Counter[str] = Counter()  # chunks that fell into parts, by line

    def tell(self, parts: Parts, function: str, one: str = "sample") -> None:
        """Note that a chunk falls into parts; warn once where these are small."""
        self.splits[parts.where] += 1
        count, size = len(parts.rows), sum(map(len, parts.rows))
        if size >= _MANY and 2 * count > size:
            self.warn(
                f"{function}: {one}s take different branches at {parts.where}; {size} "
                f"of them run in {count} parts. The numbers are right, but slow."
            )

    def warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, FallbackWarning, stacklevel=_frames_here() + 1)

    @contextmanager
    def reported(self, function: str) -> Iterator[None]:
        """Run a block, then warn about the ops that were not known before."""
        if self._known == set():
            yield
            return
        caught: list[warnings.WarningMessage] = []
        try:
            with ALONE, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            found: set[str] = set()
            for each in caught:
                if op := messages.op_without_rule(str(each.message)):
                    found.add(op)
                else:
                    warnings.warn_explicit(
                        each.message, each.category, each.filename, each.lineno
                    )
        new = found - (self._known or set())
        self._known = (self._known or set()) | found
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


def _in_place(func: Callable, kwargs: dict) -> bool:
    """Tell whether a call writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    return ends or name == "__setitem__" or kwargs.get("out") is not None

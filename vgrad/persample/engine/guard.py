"""What watches a loss while it runs: refused ops, clear errors, one warning."""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vgrad.functional.batch_norm import mended, refuse_batch_statistics
from vgrad.functional.guards import Protected
from vgrad.generators import RNG_LOCK
from vgrad.lowering.functions import for_samples
from vgrad.lowering.grad_flags import (
    REQUIRES_GRAD,
    Truth,
    among,
)
from vgrad.lowering.grad_flags import UnsupportedOp as UnsupportedOp
from vgrad.lowering.mode import Answering
from vgrad.lowering.packed import PACKED
from vgrad.lowering.randomness import Draws
from vgrad.lowering.value_reads import (
    NONE,
    QUESTIONS,
    Parts,
    Split,
    physical,
    where,
    with_numbers,
)
from vgrad.lowering.vmap import SELECTING, VMAPPED
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.tensors import version_of


class LossGuard(Answering):
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
        looped: dict[str, str] | None = None,
        again: bool = False,
    ) -> None:
        """Take the answers of the vmap over samples, if the loss runs in one."""
        expected = "loss: expected one that changes nothing it is given"
        promise = Protected(given, expected, "Copy it first.")
        super().__init__(promise, truth=truth, draws=draws)
        self._looped = {} if looped is None else looped
        self._again = again

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one call."""
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
        if self._truth is None:
            if func is Tensor.requires_grad_ and not modes.is_wrapped(args[0]):
                with modes.exit_all():  # inside of transforms it raises
                    return func(*args, **kwargs)
            return mended(func, func(*args, **kwargs))
        if kwargs:
            self.note(kwargs)
        try:
            return self._run_with_numbers(func, args, kwargs)
        except (Split, RuntimeError) as error:
            self.stop(error, func, kwargs)

    def _run_with_numbers(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call; where it needs a number for a tensor, that is a question."""
        assert self._truth is not None
        try:
            return self.run(func, args, kwargs)
        except RuntimeError as error:
            if modes.ITEM_ERROR not in str(error):
                raise
            given = with_numbers(func, args, kwargs, self._truth.level)
            if given is None:
                raise
        self._draws.asked = True
        return self._run_with_numbers(func, *given)

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call for all samples at once."""
        assert self._truth is not None  # else there is one sample
        if func in ASKING and (found := self.asked(func, args, kwargs)) is not NONE:
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
        if (form_of := _FORMS.get(func)) is None:
            return super().asked(func, args, kwargs)
        if self._truth is None:
            return NONE
        if (form := form_of(self._truth.level, *args, **kwargs)) is None:
            return NONE
        self._draws.asked = True
        # What is packed draws in another order than for one sample.
        axis = None if func in PACKED else self._draws.axis
        with self, self._draws.samples_at(axis):
            return form()

    def op(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one op in the form that it has under vmap."""
        if func is not modes.custom_function_call:
            return VMAPPED.get(func, func)(*args, **kwargs)
        with self._draws.samples_at(None):  # what it draws in is its own affair
            output, looped = for_samples(args[0], args[1:], kwargs, self.knows)
        if looped:
            self._looped.setdefault(args[0].__name__, where(sys._getframe()))
        return output

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether a tensor stands for a parameter."""
        return False


_FORMS = SELECTING | PACKED
"""Calls whose results may have shapes that depend on values."""

ASKING = QUESTIONS | _FORMS.keys()
"""Calls that have to know values."""


@contextmanager
def own_backward_passes(params: Collection[Tensor]) -> Iterator[None]:
    """Say what an autograd.Function may lack in its backward pass, or may not do.

    `params` are those of a caller who can differentiate.
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
                "model has no parameters, and what its forward pass has set is undone. "
                "Models whose layers run again in a backward pass, as reversible ones "
                "do, need plain autograd."
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
    """Tell apart what parameters have in `.grad`."""
    grads = [each.grad for each in params if each.is_leaf]
    return [(id(each), version_of(each)) for each in grads if each is not None]


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
        self.draws: bool | None = None  # whether a loss with keys has drawn so far
        self.splits: Counter[str] = Counter()  # chunks that fell into parts, by line
        self.looped: dict[str, str] = {}  # functions that no vmap ran, and their lines
        self.foreign: set[str] = set()  # nodes and ops that are not torch's own

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
        """Run a block, then warn about what ran sample by sample."""
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
        """Do the same for the ops of torch that were not known before."""
        if self._known == set():
            yield
            return
        caught: list[warnings.WarningMessage] = []
        try:
            with RNG_LOCK, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            found: set[str] = set()
            for each in caught:
                if op := modes.op_without_rule(str(each.message)):
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

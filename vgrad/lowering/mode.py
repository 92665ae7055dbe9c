"""The function mode that reads values for all samples, and runs that may split."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from vgrad.functional.guards import Protected, WriteGuard
from vgrad.generators import drawn_since, random_state, set_random_state
from vgrad.lowering.grad_flags import GradFlags, UnsupportedOp, in_place, raise_clearly
from vgrad.lowering.randomness import Draws, Undrawn
from vgrad.lowering.value_reads import NONE, Partition, SplitBatch, read_value
from vgrad.torch_private import modes


def run_or_split(
    run: Callable[[Draws], Any],
    draws: Draws,
    tensors: Sequence[Tensor],
    *,
    differ: bool,
    again: Callable[[Draws], Any] | None = None,
) -> tuple[Any, Draws]:
    """Run samples; return the result, or the `Partition` they fall into, and draws.

    The draws have the random numbers that the samples of the parts must be given again.
    If they `differ` from sample to sample and there were some, all samples run `again`
    for that. `Undrawn` if they came from another generator, whose state is unknown.
    """
    if draws.keys is not None:
        return _run_or_parts(run, draws), draws
    before = random_state(tensors) if differ else None
    result = _run_or_parts(run, draws)
    if not isinstance(result, Partition):
        return result, draws
    if draws.own and draws.values_read:
        raise Undrawn("some of a torch.Generator of the loss's own")
    if before is not None and draws.known is None and drawn_since(before, tensors):
        set_random_state(before)
        draws = Draws(known=[])
        result = _run_or_parts(again or run, draws)
    return result, draws


def _run_or_parts(run: Callable[[Draws], Any], draws: Draws) -> Any:
    """Return the result of a function, or the parts into which its samples fall.

    So nothing is left of the exception, which would keep all tensors.
    """
    around = modes.current_level() or 0
    try:
        return run(draws)
    except SplitBatch as split:
        if split.level is not None and split.level <= around:
            raise  # a vmap around this call maps over these samples
        return split.parts


class ValueReadMode(WriteGuard):
    """The function mode that reads values for all samples of a vmap, by their `flags`.

    Reads and random numbers of a loss are noted in `draws`.
    """

    def __init__(
        self, *protected: Protected, flags: GradFlags | None, draws: Draws | None
    ) -> None:
        self._draws = draws = draws or Draws()
        if draws.keys is not None:  # a checkpoint draws by its place in the loss
            protected += (Protected({}, "", "", draws.again),)
        super().__init__(*protected)
        self._flags = flags
        self._stopped: BaseException | None = None
        self._watched: Callable[..., AbstractContextManager] = nullcontext
        self._casts: Callable[[], AbstractContextManager] = nullcontext
        self.size = 1
        self.randomness = "error"

    @contextmanager
    def inside(
        self,
        size: int,
        randomness: str,
        casts: Callable[[], AbstractContextManager],
        *,
        alone: bool = False,
    ) -> Iterator[None]:
        """Watch a loss of as many samples or members at once, or of one `alone`.

        `casts` makes the mode for autocast.
        """
        self.size, self.randomness = size, randomness
        self._watched = partial(self._draws.watched, size, alone=alone)
        self._casts = casts
        with self, self._watched(), self._casts():
            yield

    @contextmanager
    def repeating(self, *args: Any) -> Iterator[None]:
        """Restore the mode of the beginning of a checkpoint, under a vmap like it."""
        flags, again = self._flags, self._watched(repeated=True)
        with ExitStack() as stack:
            if flags is not None:
                level = stack.enter_context(
                    modes.vmap_level(self.size, self.randomness)
                )
                if level != flags.level:
                    raise UnsupportedOp(
                        "checkpoint: expected a region that runs again by itself, got "
                        "one inside of another or of a transform. Use "
                        'strategy="loop".'
                    )
                self._flags = flags.afresh()
            for block in (super().repeating(*args), again, self._casts()):
                stack.enter_context(block)
            try:
                yield
            finally:
                self._flags = flags

    def __exit__(self, *raised: Any) -> None:
        """Raise the error that stopped the loss, even if the loss caught it.

        A single sample would not have been stopped, so the loss may go on differently.
        """
        super().__exit__(*raised)
        stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped is not raised[1]:
            raise stopped

    def note(self, kwargs: dict) -> None:
        """Note whether a call draws from a generator of the loss's own."""
        if kwargs.get("generator") is not None:
            self._draws.own = True

    def value_of(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the value of a read, if all samples have the same."""
        if self._flags is None:
            return NONE
        value = read_value(func, args, kwargs, self._flags.level, self._flags.one)
        self._draws.values_read |= value is not NONE
        return value

    def stop(
        self, error: SplitBatch | RuntimeError, func: Callable, kwargs: dict
    ) -> NoReturn:
        """Raise an error of the loss in words that say what to do, and remember it."""
        try:
            if isinstance(error, SplitBatch):
                self._draws.values_read = True
                raise error
            one = self._flags.one if self._flags else "sample"
            writes = in_place(func, kwargs)
            raise_clearly(error, modes.op_name(func), in_place=writes, one=one)
        except (SplitBatch, UnsupportedOp) as stopped:
            self._stopped = stopped
            raise

"""What a module holds during a call, for the parts of it that run again later."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from vgrad.functional.slots import Slots, State, restore, taken
from vgrad.torch_private import levels, modes
from vgrad.torch_private.tensors import with_attributes


class Held:
    """The containers of a module during one call, which ends with them as they were.

    A checkpoint runs a part of the forward pass again in the backward pass. It must
    find what the call has left then, as it would in a module that keeps its values.
    """

    def __init__(
        self,
        slots: Slots,
        marked: State,
        lock: AbstractContextManager,
        written: Sequence[Tensor],
    ) -> None:
        """Take the slots of the module, which hold no values outside of calls.

        `marked` are the attributes of the call's tensors before it, and `written` the
        tensors that its forward pass may write into.
        """
        self._slots, self._marked = slots, marked
        self._written = {id(each) for each in written}
        self._lock = lock
        self._wanted = False
        self._left: State = []

    def again(self) -> Callable[[], AbstractContextManager]:
        """Ask for what puts in place, after the call, what it has left."""
        self._wanted = True
        return self._in_place

    def end(self) -> None:
        """Make the containers what they were before the call."""
        if self._wanted:
            changing = [*self._slots.state, *self._marked]
            self._left = [(each, taken(each)) for each, _ in changing]
            with modes.without_modes():
                _exchanged([values for _, values in self._left], self._kept)
        self._slots.end()
        restore(self._marked)

    def _kept(self, value: Tensor) -> Tensor:
        """Return what a repetition finds in the place of a tensor.

        It may write into buffers, of which the caller has those of the call. Results
        are leaves, since it is not differentiated: their graphs refer to the
        checkpoint, a cycle that Python cannot see and that would stay where no backward
        pass follows.
        """
        if id(value) in self._written:
            return with_attributes(value.detach().clone(), value)
        if levels.inside_transform() or value.grad_fn is None:
            return value
        return with_attributes(value.detach().requires_grad_(), value)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with self._lock:
            before = [(each, taken(each)) for each, _ in self._left]
            restore(self._left)
            try:
                yield
            finally:
                restore(before)


def _exchanged(copies: Sequence[Any], change: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of some, the same one wherever one is held."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # the first is kept for its id
    for values in copies:
        if not isinstance(values, dict | list):
            continue
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in [*pairs]:
            if not isinstance(value, Tensor):
                continue
            if id(value) not in known:
                known[id(value)] = value, change(value)
            if (new := known[id(value)][1]) is not value:
                values[key] = new

"""What a module holds during a call, for the parts of it that run again later."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from vgrad.functional import slots
from vgrad.functional.slots import Container
from vgrad.torch_private import levels, modes
from vgrad.torch_private.tensors import with_attributes

State = list[tuple[Any, Any]]
"""Containers, and copies of what they held."""


class Held:
    """The containers of a module during one call, which ends with them as they were.

    A checkpoint runs a part of the forward pass again in the backward pass. It must
    find what the call has left then, as it would in a module that keeps its values.
    """

    def __init__(
        self,
        pristine: State,
        unhooked: Sequence[Container],
        lock: AbstractContextManager,
        written: Sequence[Tensor],
    ) -> None:
        """Take what the containers hold outside of calls; some hold nothing.

        `written` are the tensors of the call that its forward pass may write into.
        """
        self._written = {id(each) for each in written}
        self._pristine = pristine
        self._unhooked = unhooked
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
            self._left = [(each, copy.copy(each)) for each, _ in self._pristine]
            with modes.without_modes():
                _exchanged([values for _, values in self._left], self._kept)
        _restore(self._pristine)
        if any(self._unhooked):  # asked first, since there are many
            for each in self._unhooked:
                each.clear()

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
            before = [(each, copy.copy(each)) for each, _ in self._left]
            _restore(self._left)
            try:
                yield
            finally:
                _restore(before)


def _restore(state: State) -> None:
    for container, values in state:
        slots.restore(container, values)


def _exchanged(copies: Sequence[Container], change: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of some, the same one wherever one is held."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # the first is kept for its id
    for values in copies:
        is_dict = isinstance(values, dict)
        put: Any = dict.__setitem__ if is_dict else list.__setitem__
        for key, value in [*values.items()] if is_dict else [*enumerate(values)]:
            if not isinstance(value, Tensor):
                continue
            if id(value) not in known:
                known[id(value)] = value, change(value)
            if (new := known[id(value)][1]) is not value:
                put(values, key, new)

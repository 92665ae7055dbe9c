"""Refuses calls that write into protected tensors, before they run.

A function mode sees every call of torch, custom ops included. It cannot see NumPy,
DLPack or compiled code write into the same memory.

The same mode sees where a checkpoint begins, which runs its function again in the
backward pass, and has the values put in place for it that the call had.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vgrad.torch_private import levels, modes, saving
from vgrad.torch_private import tensors as private
from vgrad.tree import tree_leaves


class Promise(NamedTuple):
    """Tensors that stay as they are, and the error for a call that writes into one.

    Attributes:
        given: the tensors, by name.
        expected: the first words of the error, `function(what): expected ...`.
        advice: the last ones.
        again: called where a checkpoint begins; returns what puts in place, once more,
            what the call that made the promise works with.
    """

    given: Mapping[str, Tensor]
    expected: str
    advice: str
    again: Callable[[], Callable[[], AbstractContextManager]] | None = None


class Untouched(TorchFunctionMode):
    """The function mode that keeps promises."""

    def __init__(self, *promises: Promise) -> None:
        """Keep these, and more in the blocks of `also`."""
        super().__init__()
        self._promises = [*promises]
        self._saved: WeakSet[Callable] = WeakSet()  # hooks that were seen

    def __enter__(self) -> "Untouched":
        """Begin; a checkpoint around the block is not a part of it."""
        if (found := saving.hooks()) is not None:
            self._saved.add(found[0])
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """End; no checkpoint that an exception has passed is left open."""
        super().__exit__(*raised)
        if raised[1] is not None:
            saving.close(raised[1])

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        self.look_at_hooks()
        self.check(func, args, kwargs)
        return func(*args, **kwargs)

    def look_at_hooks(self) -> None:
        """See whether a checkpoint has begun."""
        found = saving.hooks()
        if found is not None and found[0] not in self._saved:
            self._saved.add(found[0])
            self.saves(found[0])

    def saves(self, pack: Callable) -> None:
        """Have a checkpoint run again under this mode, with the values of now."""
        promises = tuple(self._promises)
        blocks = [each.again() for each in promises if each.again is not None]
        saving.repeats(pack, self.until_later(lambda: self.repeating(promises, blocks)))

    def until_later(
        self, around: Callable[[], AbstractContextManager]
    ) -> Callable[[], AbstractContextManager]:
        """Return what a checkpoint keeps until it runs again."""
        return around

    @contextmanager
    def repeating(
        self,
        promises: Sequence[Promise],
        blocks: Sequence[Callable[[], AbstractContextManager]],
    ) -> Iterator[None]:
        """Be what the mode was when these were its promises."""
        before, self._promises = self._promises, [*promises]
        try:
            with ExitStack() as stack:
                for block in blocks:
                    stack.enter_context(block())
                stack.enter_context(self)
                yield
        finally:
            self._promises = before

    def check(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Raise a RuntimeError if a call writes into one of the tensors."""
        written = _written(func, args, kwargs)
        if not written:
            return
        name = getattr(func, "__name__", "").partition(".")[0]
        # What only changes the object in hand leaves others on the same memory alone.
        key = id if name in _OF_THE_OBJECT else _where
        places = {key(tensor) for tensor in written} - {None}
        for promise in self._promises:
            for entry, tensor in promise.given.items():
                if key(tensor) in places:
                    raise RuntimeError(
                        f"{promise.expected}, got {name}, which writes into {entry!r} "
                        f"in place. {promise.advice}"
                    )

    @contextmanager
    def also(self, promise: Promise) -> Iterator[None]:
        """Keep one more promise while a block runs."""
        self.look_at_hooks()  # the block may lie in a checkpoint
        self._promises.append(promise)
        try:
            yield
        finally:
            self._promises.pop()


def untouched(promise: Promise) -> AbstractContextManager:
    """Keep a promise while a block runs, by the current mode or a new one."""
    if not promise.given and promise.again is None:
        return nullcontext()
    for mode in reversed(modes.function_modes()):
        if isinstance(mode, Untouched):
            return mode.also(promise)
    return Untouched(promise)


_OF_THE_OBJECT = {"__set__", "set_", "requires_grad_", "detach_", "rename_"}
_OF_THE_OBJECT |= {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_"}
_OF_THE_OBJECT |= {"unsqueeze_", "as_strided_"}
"""Calls that leave the numbers in memory as they are."""

_STATISTICS = {F.batch_norm: 1, F.instance_norm: 1}
_STATISTICS |= {torch.batch_norm: 3, torch.instance_norm: 3}
"""The place of the first of two running statistics, which training writes into."""

_TABLES = {F.embedding, F.embedding_bag}
"""Functions that rewrite their second argument, if there is a `max_norm`."""


def _written(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that a call writes into."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return []
    found: list[Any] = []
    if isinstance(func, private.OPS):
        found += _by_schema(func, args, kwargs)
    elif (name.endswith("_") and not name.endswith("__")) or name in _BY_SIGN:
        found += args[:1] or list(kwargs.values())[:1]
    if kwargs and (out := kwargs.get("out")) is not None:
        found.append(out)
    if (place := _INPLACE.get(func)) is not None:
        if args[place] if len(args) > place else kwargs.get("inplace"):
            found += args[:1] or [kwargs["input"]]
    if func in _STATISTICS:
        training = args[5] if len(args) > 5 else kwargs.get("training")
        if training or kwargs.get("use_input_stats"):
            first = _STATISTICS[func]
            found += args[first : first + 2]
            found += [kwargs.get("running_mean"), kwargs.get("running_var")]
    elif func in _TABLES and kwargs.get("max_norm") is not None:
        found += args[1:2] or [kwargs["weight"]]
    if not found:
        return []
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


_BY_SIGN = {"__setitem__", "__set__", "__delitem__"}

_INPLACE = {
    func: func.__code__.co_varnames.index("inplace")
    for func in vars(F).values()
    if isinstance(func, FunctionType)
    and "inplace" in func.__code__.co_varnames[: func.__code__.co_argcount]
}
"""The place of the argument that says to write into the first one."""


def _by_schema(op: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """Yield the arguments that an op's schema marks as written."""
    for place, name, by_keyword in private.written(op):
        yield kwargs.get(name)
        if not by_keyword:
            yield args[place : place + 1]


def _where(tensor: Tensor) -> int | None:
    """Identify memory, inside transforms too."""
    return private.memory(levels.stored(tensor))

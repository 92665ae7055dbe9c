"""Conditions that hardly ever hold: looked at where they arise, or at the end.

Code that looks at a value and goes another way makes a device wait, and a capture of
it as one graph impossible. Where the other way is for rare cases, it asks `unlikely`.
Inside of `collected` the answer is no, and the block knows in the end whether that was
true; if it was not, what it computed is dropped and computed again outside. Inside of
`postponed` the answer is no as well, and the block itself looks at many conditions at
once and mends what was wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from vgrad.torch_private.tracing import untraced


class Unrepeatable(Exception):
    """A graph of ops cannot repeat what happened while it was captured."""


_COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)
_POSTPONED: ContextVar[list[Tensor] | None] = ContextVar("postponed", default=None)


def unlikely(where: Tensor) -> bool:
    """Tell whether a condition holds anywhere; collected or postponed, answer no.

    Example:
        >>> import torch
        >>> unlikely(torch.tensor([False, True]))
        True
    """
    if (conditions := _POSTPONED.get()) is not None:
        conditions.append(where.detach())
        return False
    conditions = _COLLECTED.get()
    if conditions is None:
        return bool(where.any())
    conditions.append(where.detach().any())
    return False


def are_collected() -> bool:
    """Tell whether conditions are collected, so that no value may be looked at."""
    return _COLLECTED.get() is not None


@contextmanager
def collected() -> Iterator[list[Tensor]]:
    """Collect the conditions of a block, each a boolean without dimensions.

    Example:
        >>> import torch
        >>> with collected() as conditions:
        ...     unlikely(torch.tensor([False, True]))
        False
        >>> conditions
        [tensor(True)]
    """
    conditions: list[Tensor] = []
    token = _COLLECTED.set(conditions)
    try:
        yield conditions
    finally:
        _COLLECTED.reset(token)


@contextmanager
def postponed() -> Iterator[list[Tensor]]:
    """Gather the conditions of a block as they are, to be looked at after it.

    Example:
        >>> import torch
        >>> with postponed() as conditions:
        ...     unlikely(torch.tensor([False, True]))
        False
        >>> unlikely(torch.cat(conditions))
        True
    """
    conditions: list[Tensor] = []
    token = _POSTPONED.set(conditions)
    try:
        yield conditions
    finally:
        _POSTPONED.reset(token)


@contextmanager
def at_once() -> Iterator[None]:
    """Postpone nothing in this block, whose results are kept for other blocks."""
    token = _POSTPONED.set(None)
    try:
        yield
    finally:
        _POSTPONED.reset(token)


@contextmanager
def looked_at() -> Iterator[None]:
    """Look at values in this block, which depend on shapes and options alone."""
    token = _COLLECTED.set(None)
    try:
        with at_once(), untraced():
            yield
    finally:
        _COLLECTED.reset(token)

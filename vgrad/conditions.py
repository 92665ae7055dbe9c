"""Conditions that hardly ever hold: checked where they arise, or at the end.

Reading a value makes a device wait, and a capture of the code as one graph impossible.
Use `rare(mask)` for a branch that is almost never taken. Inside `collect_checks` it
returns False and records the mask; if any recorded mask turns out true, the caller
discards the result and recomputes it eagerly. Inside `defer_checks` it returns False as
well, and the block itself checks many masks at once and corrects its result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from vgrad.torch_private.tracing import untraced


class Unrepeatable(Exception):
    """A graph of ops cannot repeat something that happened during its capture."""


class _Lists(NamedTuple):
    collected: list[Tensor] | None = None
    deferred: list[Tensor] | None = None


_NONE = _Lists()
_LISTS: ContextVar[_Lists] = ContextVar("lists", default=_NONE)


def rare(where: Tensor) -> bool:
    """Return whether a condition holds anywhere; False where it is only recorded."""
    collected, deferred = _LISTS.get()
    if deferred is not None:
        deferred.append(where.detach())
    elif collected is not None:
        collected.append(where.detach().any())
    return collected is None and deferred is None and bool(where.any())


def checks_collected() -> bool:
    """Return whether conditions are collected, so that no value may be read."""
    return _LISTS.get().collected is not None


@contextmanager
def collect_checks() -> Iterator[list[Tensor]]:
    """Collect the conditions of a block, each a boolean without dimensions."""
    conditions: list[Tensor] = []
    with _set(_LISTS.get()._replace(collected=conditions)):
        yield conditions


@contextmanager
def defer_checks() -> Iterator[list[Tensor]]:
    """Gather the conditions of a block as they are, to be checked after it."""
    conditions: list[Tensor] = []
    with _set(_LISTS.get()._replace(deferred=conditions)):
        yield conditions


@contextmanager
def check_now() -> Iterator[None]:
    """Defer nothing in this block, whose results are kept for other blocks."""
    with _set(_LISTS.get()._replace(deferred=None)):
        yield


@contextmanager
def static_values() -> Iterator[None]:
    """Read values in this block, which depend on shapes and options alone."""
    with _set(_NONE), untraced():
        yield


@contextmanager
def _set(lists: _Lists) -> Iterator[None]:
    token = _LISTS.set(lists)
    try:
        yield
    finally:
        _LISTS.reset(token)

"""Conditions that hardly ever hold: checked where they arise, or at the end.

Reading a value makes a device wait, and prevents a capture. Inside `collect_checks` a
mask is only recorded; if it turns out true, the caller computes once more, eagerly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class Unrepeatable(Exception):
    """A graph of ops cannot repeat something that happened during its capture."""


_CHECKS: ContextVar[list[Tensor] | None] = ContextVar("checks", default=None)


def occurs(where: Tensor) -> bool:
    """Return whether a condition holds anywhere; False where it is only recorded."""
    checks = _CHECKS.get()
    where = where.any() if where.ndim else where
    if checks is None:
        return bool(where)
    checks.append(where.detach())
    return False


def checks_collected() -> bool:
    """Return whether conditions are collected, so that no value may be read."""
    return _CHECKS.get() is not None


def numbers(tensor: Tensor) -> list | None:
    """Return the values of a tensor for Python; None where no value may be read."""
    return None if checks_collected() else tensor.tolist()


def surely(mask: Tensor) -> bool:
    """Return whether a mask is true everywhere; False where to look would be a wait."""
    return mask.is_cpu and not checks_collected() and bool(mask.all())


@contextmanager
def collect_checks() -> Iterator[list[Tensor]]:
    """Collect the conditions of a block, each a boolean without dimensions."""
    checks: list[Tensor] = []
    with _set(checks):
        yield checks


@contextmanager
def static_values() -> Iterator[None]:
    """Read values in this block, which depend on shapes and options alone."""
    with _set(None):
        yield


def literal(tensor: Tensor) -> Tensor:
    """Make a tensor that `static_values` has computed a constant of a graph."""
    return torch.ops.aten.lift_fresh(tensor)


@contextmanager
def _set(checks: list[Tensor] | None) -> Iterator[None]:
    token = _CHECKS.set(checks)
    try:
        yield
    finally:
        _CHECKS.reset(token)

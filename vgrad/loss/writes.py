"""Calls of torch that write into their arguments."""

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vgrad.functional.batch_norm import STATISTICS, updated_statistics
from vgrad.torch_private import tensors as private
from vgrad.tree import tensors

_TABLES = {F.embedding, F.embedding_bag}
"""Functions that rewrite their second argument, if there is a `max_norm`."""


@lru_cache(maxsize=4096)
def may_write(func: Callable) -> bool:
    """Return whether some calls of a function write into arguments other than `out`."""
    name = getattr(func, "__name__", "")
    if isinstance(func, private.OPS):
        return private.writes(func)
    in_place = name.endswith("_") and not name.endswith("__")
    tables = (_INPLACE, STATISTICS, _TABLES)
    return in_place or name in _BY_SIGN or any(func in table for table in tables)


def written(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that a call writes into."""
    arguments: list[Any] = [kwargs["out"]] if "out" in kwargs else []
    if (place := _INPLACE.get(func)) is not None:
        if args[place] if len(args) > place else kwargs.get("inplace"):
            arguments += args[:1] or [kwargs["input"]]
    elif isinstance(func, private.OPS):
        arguments += private.arguments_written(func, args, kwargs)
    elif func in _TABLES:
        if kwargs.get("max_norm") is not None:
            arguments += args[1:2] or [kwargs["weight"]]
    elif func in STATISTICS:
        arguments += updated_statistics(func, args, kwargs)
    elif may_write(func):
        arguments += args[:1] or list(kwargs.values())[:1]
    return tensors(arguments) if arguments else []


_BY_SIGN = {"__setitem__", "__set__", "__delitem__"}
_BY_SIGN |= {"__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"}
"""Writes without an underscore; for `+=` and the like torch calls `add_`."""

_INPLACE = {
    func: func.__code__.co_varnames.index("inplace")
    for func in vars(F).values()
    if isinstance(func, FunctionType)
    and "inplace" in func.__code__.co_varnames[: func.__code__.co_argcount]
}
"""The place of the argument `inplace`."""

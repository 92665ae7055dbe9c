"""The parts of functions, containers and objects: one table of kinds, for two uses.

`compile` compares them from call to call, `data_parallel` from rank to rank.
"""

import functools
import operator
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from vgrad.functional.model import FunctionalModel
from vgrad.tree import TreeSpec

CACHE = type(functools.cache(len))

INNER: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    CACHE: ("__wrapped__",),
}
"""Parts of objects written in C that are no attributes of their own."""

_PLAIN = {
    *(bool, int, float, complex, str, bytes, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(TreeSpec, types.NotImplementedType),
}

GONE = ...
"""The value of a name that is not there; it is as plain as others."""


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change, and can be compared."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a function, a container or an object, with their names."""
    if isinstance(value, FunctionalModel):  # without what it caches
        yield "constants", (*value.constants,)
        yield from value.named_modules()
        return
    kind = type(value)
    for name in INNER.get(kind, ()):
        yield name.strip("_"), getattr(value, name)
    if kind is types.FunctionType:
        cells = contents(value.__closure__ or ())
        yield from zip(value.__code__.co_freevars, cells, strict=True)
    elif isinstance(value, weakref.ref):
        yield "object", value()
    elif isinstance(value, dict | types.MappingProxyType):
        for key, entry in value.items():
            yield "key", key
            yield repr(key), entry
    elif isinstance(value, list | tuple | set | frozenset | deque):
        names = getattr(value, "_fields", range(len(value)))
        yield from (
            (str(name), entry) for name, entry in zip(names, value, strict=True)
        )
    yield from attributes(value).items()
    for name in slots(kind):
        yield name, getattr(value, name, None)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object's own, without code of its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def slots(kind: type) -> list[str]:
    """Name the attributes that objects of a class have outside of `__dict__`."""
    names = ["default_factory"] if issubclass(kind, defaultdict) else []
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            members = types.MemberDescriptorType
            names += [n for n, each in vars(base).items() if type(each) is members]
    return names


def contents(cells: Collection[types.CellType]) -> list:
    """Return the contents of a closure, `GONE` where a cell is empty."""
    try:
        return [*map(_CONTENTS, cells)]
    except ValueError:
        return [*map(_content, cells)]


_CONTENTS = operator.attrgetter("cell_contents")


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE

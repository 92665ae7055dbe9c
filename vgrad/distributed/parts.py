"""The parts of functions, containers and objects, with their names."""

import functools
import gc
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from vgrad.functional.model import FunctionalModel

INNER: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    type(functools.cache(len)): ("__wrapped__",),
    slice: ("start", "stop", "step"),
}
"""Parts of objects written in C that are no attributes of their own."""

_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)

GONE = ...
"""The value of a name that is not there."""


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
        cells = value.__closure__ or ()
        yield from zip(value.__code__.co_freevars, map(_content, cells), strict=True)
    elif isinstance(value, weakref.ref):
        yield "object", value()
    elif isinstance(value, types.MappingProxyType):
        yield "mapping", *gc.get_referents(value)
    elif isinstance(value, dict):
        for key, entry in dict.items(value):
            yield "key", key
            yield repr(key), entry
    for base in _SEQUENCES:
        if isinstance(value, base):  # whose own class may show others
            names = getattr(value, "_fields", range(base.__len__(value)))
            yield from zip(map(str, names), base.__iter__(value), strict=True)
    yield from _attributes(value).items()
    yield from _slots(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes outside of a dictionary, `GONE` for each without a value."""
    for base in type(value).__mro__:
        if "__slots__" in vars(base) or base is defaultdict:
            for name, each in vars(base).items():
                if type(each) is types.MemberDescriptorType:
                    try:
                        yield name, each.__get__(value)
                    except AttributeError:
                        yield name, GONE


def _content(cell: types.CellType) -> Any:
    return next(iter(gc.get_referents(cell)), GONE)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object's own, without code of its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}

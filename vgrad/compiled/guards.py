"""The parts of Python values, and all that a graph bakes in, compared at every call.

A comparison takes tens of nanoseconds for each value: all of them are read by code in C
and compared by identity. Python only compares values that are other objects.
"""

import functools
import gc
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrad.functional.model import FunctionalModel
from vgrad.torch_private.tensors import like, versions_of
from vgrad.tree import TreeSpec

# The parts of functions, containers and objects, which `data_parallel` compares too.

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
    slice: ("start", "stop", "step"),
}
"""Parts of objects written in C that are no attributes of their own."""

_PLAIN = {
    *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(TreeSpec, types.NotImplementedType),
}

_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)

GONE = ...
"""The value of a name that is not there; it is as plain as others."""


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change, and can be compared."""
    if type(value) is slice:
        value = value.start, value.stop, value.step
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
    yield from attributes(value).items()
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


def unset(value: Any) -> list[str]:
    """Name the attributes of an object that have no value, and no place in an order."""
    return [name for name, each in _slots(value) if each is GONE]


def _content(cell: types.CellType) -> Any:
    return next(iter(gc.get_referents(cell)), GONE)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object's own, without code of its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


# Comparisons.

_FALSE_IF_EMPTY = dict, OrderedDict, list, set, deque

_END = (object(),)
"""An object with one part, between the parts of two others."""


class Guards:
    """All values that a function can reach, as they were.

    The parts of `holders` are the objects that Python's garbage collector finds in
    them, and keys and values of dictionaries, which it finds in another order.
    `entries` are arguments of `dict.get`, and `calls` functions with their arguments.
    """

    def __init__(
        self,
        holders: Iterable[Any],
        entries: Iterable[tuple],
        calls: Iterable[tuple],
        tensors: Mapping[int, Tensor],
    ) -> None:
        self._empty: list[Any] = []  # as most containers of a module are
        self._holders: list[Any] = []
        self._texts: list[Iterable] = []  # keys of dictionaries
        self._items: list[Iterable] = []  # values of dictionaries, and other keys
        for each in holders:
            if type(each) in _FALSE_IF_EMPTY and not each:
                self._empty.append(each)
                continue
            if type(each) is not dict:
                self._holders += each, _END
            if isinstance(each, dict):
                kind: Any = OrderedDict if isinstance(each, OrderedDict) else dict
                keys = kind.keys(each)
                texts = {str}.issuperset(map(type, keys))
                (self._texts if texts else self._items).append(keys)
                self._items += kind.values(each), _END
        self._entries, self._calls = [*entries], [*calls]
        self._values, self._results = self._read()
        self._tensors = tensors
        self._described = [*map(description, tensors.values())]
        self._versions = versions_of(tensors.values())
        self._alike: Callable[..., bool] | None = None  # the same in one go
        if all(each.layout is torch.strided for each in tensors.values()):
            self._alike = like([*tensors.values()])
        self._shared: list[int | None] = []

    def _read(self) -> tuple[list, list]:
        """Return values to compare by identity, and values to compare by `==`."""
        values = chain(
            gc.get_referents(*self._holders),
            chain.from_iterable(self._items),
            starmap(dict.get, self._entries),
        )
        calls = starmap(operator.call, self._calls)
        return [*values], [*chain.from_iterable(self._texts), *calls]

    def hold(self, arguments: Sequence[Tensor] = ()) -> bool:
        """Return whether all values are as they were, for a call of these tensors."""
        if any(self._empty):
            return False
        (values, results), shared = self._read(), self._closed_over(arguments)
        return (
            results == self._results
            and _same(values, self._values)
            and self._tensors_hold()
            # A graph is traced with other tensors in the place of arguments, so that it
            # is right where none is closed over.
            and (not any(shared) or shared == self._shared)
        )

    def _tensors_hold(self) -> bool:
        tensors = self._tensors.values()
        if self._alike is not None and torch.is_grad_enabled():
            return self._alike(*tensors)
        return [*map(description, tensors)] == self._described

    def written(self) -> bool:
        """Return whether a tensor has been written to since it was noted."""
        return versions_of(self._tensors.values()) != self._versions

    def note_arguments(self, arguments: Sequence[Tensor]) -> None:
        """Note which arguments are closed over too, as their identity can be compared.

        The function may take another branch where one is the tensor of its closure.
        """
        self._shared = self._closed_over(arguments)

    def _closed_over(self, arguments: Sequence[Tensor]) -> list[int | None]:
        if not self._tensors:
            return []
        return [id(each) if id(each) in self._tensors else None for each in arguments]


def description(tensor: Tensor) -> tuple:
    """Return all that the choice of kernels depends on."""
    return (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _same(values: list, noted: list) -> bool:
    """Return whether these are the same objects, or equal where that is enough."""
    if len(values) != len(noted):
        return False
    return all(map(operator.is_, values, noted)) or all(map(_is_same, values, noted))


def _is_same(value: Any, noted: Any) -> bool:
    if value is noted:
        return True
    # Numbers that are equal may differ: 0.0 and -0.0, 1 and True.
    return type(value) is type(noted) and is_plain(value) and repr(value) == repr(noted)

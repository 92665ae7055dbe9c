"""The parts of Python values, and all that a graph bakes in, compared at every call.

A comparison takes tens of nanoseconds for each value: all of them are read by code in C
and compared by identity. Python only compares values that are other objects.
"""

import functools
import operator
import types
import weakref
from abc import get_cache_token
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable
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
        cells = _contents(value.__closure__ or ())
        yield from zip(value.__code__.co_freevars, cells, strict=True)
    elif isinstance(value, weakref.ref):
        yield "object", value()
    elif isinstance(value, dict | types.MappingProxyType):
        for key, entry in value.items():
            yield "key", key
            yield repr(key), entry
    elif isinstance(value, list | tuple | set | frozenset | deque):
        names = getattr(value, "_fields", range(len(value)))
        yield from zip(map(str, names), value, strict=True)
    yield from _attributes(value).items()
    for name in _slots(kind):
        yield name, getattr(value, name, None)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object's own, without code of its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _slots(kind: type) -> list[str]:
    """Name the attributes that objects of a class have outside of `__dict__`."""
    names = ["default_factory"] if issubclass(kind, defaultdict) else []
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            members = types.MemberDescriptorType
            names += [n for n, each in vars(base).items() if type(each) is members]
    return names


def _contents(cells: Collection[types.CellType]) -> list:
    """Return the contents of a closure, `GONE` where a cell is empty."""
    try:
        return [*map(operator.attrgetter("cell_contents"), cells)]
    except ValueError:
        return [*map(_content, cells)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


# Comparisons.

_FALSE_IF_EMPTY = dict, OrderedDict, list, set, deque

_MOST_BYTES = 2**14
"""Of an array whose values are compared, which takes about a microsecond."""


class _Reads:
    """Values as they were, of places that code in C reads in one go."""

    def __init__(self, read: Callable[[list], Iterable], same: Callable) -> None:
        self._read = read
        self._same = same
        self._places: list[Any] = []
        self._values: list[Any] = []

    def note(self, *places: Any) -> None:
        self._places += places
        self._values += self._read([*places])

    def hold(self) -> bool:
        return self._same([*self._read(self._places)], self._values)


class Guards:
    """All values that a function can reach, as they were."""

    def __init__(self) -> None:
        self._empty: list[Collection] = []  # as most containers of a module are
        self._sizes = _Reads(partial(map, len), operator.eq)
        self._keys = _Reads(chain.from_iterable, operator.eq)  # texts alone
        self._items = _Reads(chain.from_iterable, _same)
        self._cells = _Reads(_contents, _same)
        self._entries = _Reads(partial(starmap, dict.get), _same)
        self._attributes = _Reads(partial(starmap, getattr), _same)
        self._results = _Reads(partial(starmap, operator.call), operator.eq)
        self._reads = [self._sizes, self._keys, self._items, self._cells]
        self._reads += [self._entries, self._attributes, self._results]
        self._named: set[tuple[int, int, Any]] = set()  # entries and attributes noted
        self._tensors: dict[int, Tensor] = {}
        self._described: list[tuple] = []
        self._alike: Callable[..., bool] | None = None
        self._versions: list[int] = []
        self._shared: list[int | None] = []

    def hold(self, arguments: Sequence[Tensor] = ()) -> bool:
        """Return whether all values are as they were, for a call of these tensors."""
        shared = self._closed_over(arguments)
        return (
            not any(self._empty)
            and all(map(_Reads.hold, self._reads))
            and self._tensors_hold()
            # A graph is traced with other tensors in the place of arguments, so that it
            # is right where none is closed over.
            and (not any(shared) or shared == self._shared)
        )

    def _tensors_hold(self) -> bool:
        """Compare the descriptions of tensors the first time, and then in one go."""
        tensors = self._tensors.values()
        if self._alike is None or not torch.is_grad_enabled():
            if [*map(description, tensors)] != self._described:
                return False
            if all(tensor.layout is torch.strided for tensor in tensors):
                self._alike = like([*tensors])
            return True
        return self._alike(*tensors)

    def written(self) -> bool:
        """Return whether a tensor has been written to since it was noted."""
        return versions_of(self._tensors.values()) != self._versions

    def note(self, value: Any) -> None:
        """Note all parts of a function, a container or an object, and its class."""
        kind = type(value)
        self.note_attributes(value, *INNER.get(kind, ()), *_slots(kind))
        if kind is types.FunctionType:
            self._cells.note(*(value.__closure__ or ()))
        elif isinstance(value, dict | types.MappingProxyType | list | set | deque):
            self.note_items(value)
        if kind.__dictoffset__:
            self.note_items(_attributes(value))

    def note_items(self, holder: Mapping | list | set | deque) -> None:
        """Note the entries of a container, and their order."""
        if not holder and type(holder) in _FALSE_IF_EMPTY:
            self._empty.append(holder)
            return
        self.note_size(holder)
        texts = isinstance(holder, Mapping) and {str}.issuperset(map(type, holder))
        (self._keys if texts else self._items).note(holder)
        if isinstance(holder, Mapping):
            self._items.note(holder.values())

    def note_size(self, holder: Collection) -> None:
        """Note the number of entries of a container."""
        self._sizes.note(holder)

    def note_entries(self, holder: dict[Any, Any], names: Iterable[Any]) -> None:
        """Note some entries of a dictionary, or that there are none of these names."""
        self._note_named(self._entries, holder, names)

    def note_attributes(self, owner: Any, *names: str) -> None:
        """Note some attributes, or that there are none of these names."""
        self._note_named(self._attributes, owner, names)

    def _note_named(self, reads: _Reads, owner: Any, names: Iterable[Any]) -> None:
        for name in names:  # a dictionary may have an attribute and an entry of a name
            place = id(reads), id(owner), name
            if place not in self._named:
                self._named.add(place)
                reads.note((owner, name, GONE))

    def note_registrations(self) -> None:
        """Note which classes are registered with abstract ones, all over Python."""
        self._results.note((get_cache_token,))

    def note_tensor(self, tensor: Tensor) -> None:
        """Note everything about a tensor but its values."""
        self._tensors[id(tensor)] = tensor
        self._described.append(description(tensor))
        self._versions += versions_of([tensor])

    def note_arguments(self, arguments: Sequence[Tensor]) -> None:
        """Note which arguments are closed over too, as their identity can be compared.

        The function may take another branch where one is the tensor of its closure.
        """
        self._shared = self._closed_over(arguments)

    def _closed_over(self, arguments: Sequence[Tensor]) -> list[int | None]:
        if not self._tensors:
            return []
        return [id(each) if id(each) in self._tensors else None for each in arguments]

    def note_array(self, array: np.ndarray) -> None:
        """Note the values of an array of numpy; large ones raise `Unrepeatable`."""
        if array.nbytes > _MOST_BYTES or array.dtype.hasobject:
            raise Unrepeatable(
                f"it closes over an array of numpy with {array.nbytes} bytes, which "
                f"are too many to compare. Make it a tensor"
            )
        self._results.note((_copy, array))


def _copy(array: np.ndarray) -> tuple:
    return array.shape, array.dtype, array.tobytes()


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
    return all(map(operator.is_, values, noted)) or all(map(_is_same, values, noted))


def _is_same(value: Any, noted: Any) -> bool:
    if value is noted:
        return True
    # Numbers that are equal may differ: 0.0 and -0.0, 1 and True.
    return type(value) is type(noted) and is_plain(value) and repr(value) == repr(noted)

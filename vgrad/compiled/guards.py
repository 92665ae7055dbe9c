"""Values as they were when a graph was captured, compared at every call.

A comparison takes tens of nanoseconds for each value: all of them are read by code in C
and compared by identity. Python only compares values that are other objects.
"""

import operator
import types
from abc import get_cache_token
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrad.compiled.parts import GONE, INNER, attributes, contents, is_plain, slots
from vgrad.conditions import Unrepeatable
from vgrad.torch_private.tensors import like, version_of

Holder = Mapping | list | set | deque

_FALSE_IF_EMPTY = dict, OrderedDict, list, set, deque

_MOST_BYTES = 2**14
"""Of an array whose values are compared, which takes about a microsecond."""


class Guards:
    """All values that a function can reach, as they were."""

    def __init__(self) -> None:
        self._empty: list[Holder] = []
        self._holders: list[Holder] = []
        self._sizes: list[int] = []
        self._named: list[Iterable] = []
        self._names: list[str] = []
        self._views: list[Iterable] = []
        self._items: list[Any] = []
        self._entries = _Lookups(dict.get)
        self._attributes = _Lookups(getattr)
        self._cells: list[types.CellType] = []
        self._contents: list[Any] = []
        self._tensors: dict[int, Tensor] = {}
        self._described: list[tuple] = []
        self._alike: Callable[..., bool] | None = None
        self._versions: list[int] = []
        self._shared: list[int | None] = []
        self._arrays: list[np.ndarray] = []
        self._copies: list[tuple] = []
        self._registrations: Any = None

    def hold(self, arguments: Sequence[Tensor] = ()) -> bool:
        """Return whether all values are as they were, for a call of these tensors."""
        shared = self._closed_over(arguments)
        return (
            not any(self._empty)
            and [*map(len, self._holders)] == self._sizes
            and [*chain.from_iterable(self._named)] == self._names
            and _unchanged([*chain.from_iterable(self._views)], self._items)
            and self._entries.hold()
            and self._attributes.hold()
            and _unchanged(contents(self._cells), self._contents)
            and self._tensors_hold()
            and [*map(_copy, self._arrays)] == self._copies
            and self._registrations in (None, get_cache_token())
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
        return [*map(_version, self._tensors.values())] != self._versions

    def note(self, value: Any) -> None:
        """Note all parts of a function, a container or an object, and its class."""
        kind = type(value)
        self.note_attributes(value, *INNER.get(kind, ()), *slots(kind))
        if kind is types.FunctionType:
            cells = value.__closure__ or ()
            self._cells += cells
            self._contents += contents(cells)
        elif isinstance(value, dict | types.MappingProxyType | list | set | deque):
            self.note_items(value)
        if kind.__dictoffset__:
            self.note_items(attributes(value))

    def note_items(self, holder: Holder) -> None:
        """Note the entries of a container, and their order."""
        if not holder and type(holder) in _FALSE_IF_EMPTY:
            self._empty.append(holder)
            return
        self.note_size(holder)
        views: list[Any] = [holder]
        if isinstance(holder, Mapping):
            views.append(holder.values())
            if all(type(name) is str for name in holder):  # so equal ones are the same
                self._named.append(views.pop(0))
                self._names += holder
        for view in views:
            self._views.append(view)
            self._items += view

    def note_size(self, holder: Holder) -> None:
        """Note the number of entries of a container."""
        self._holders.append(holder)
        self._sizes.append(len(holder))

    def note_entries(self, holder: dict[Any, Any], names: Iterable[Any]) -> None:
        """Note some entries of a dictionary, or that there are none of these names."""
        self._entries.note(holder, names)

    def note_attributes(self, owner: Any, *names: str) -> None:
        """Note some attributes, or that there are none of these names."""
        self._attributes.note(owner, names)

    def note_registrations(self) -> None:
        """Note which classes are registered with abstract ones, all over Python."""
        self._registrations = self._registrations or get_cache_token()

    def note_tensor(self, tensor: Tensor) -> None:
        """Note everything about a tensor but its values."""
        self._tensors[id(tensor)] = tensor
        self._described.append(description(tensor))
        self._versions.append(_version(tensor))

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
        self._arrays.append(array)
        self._copies.append(_copy(array))


class _Lookups:
    """Values by name, of dictionaries or of other objects; each is noted once."""

    def __init__(self, read: Callable[[Any, Any, Any], Any]) -> None:
        self._read = read
        self._owners: list[Any] = []
        self._names: list[Any] = []
        self._values: list[Any] = []
        self._noted: set[tuple[int, Any]] = set()

    def note(self, owner: Any, names: Iterable[Any]) -> None:
        for name in names:
            if (id(owner), name) not in self._noted:
                self._noted.add((id(owner), name))
                self._owners.append(owner)
                self._names.append(name)
                self._values.append(self._read(owner, name, GONE))

    def hold(self) -> bool:
        places = self._owners, self._names, repeat(GONE)
        return _unchanged([*map(self._read, *places)], self._values)


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


def _unchanged(values: list, noted: list) -> bool:
    """Return whether these are the same objects, or equal where that is enough."""
    return all(map(operator.is_, values, noted)) or all(map(_same, values, noted))


def _same(value: Any, noted: Any) -> bool:
    if value is noted:
        return True
    # Numbers that are equal may differ: 0.0 and -0.0, 1 and True.
    return type(value) is type(noted) and is_plain(value) and repr(value) == repr(noted)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _copy(array: np.ndarray) -> tuple:
    return array.shape, array.dtype, array.tobytes()

"""Values as they were when a graph was captured, compared at every call.

A comparison takes tens of nanoseconds for each value: all of them are read by code in C
and compared by identity. Only what is another object is looked at in Python.
"""

import operator
import types
from abc import get_cache_token
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable
from vgrad.torch_private.tensors import like, version_of
from vgrad.tree import TreeSpec

Holder = Mapping | list | set | deque

_SIZED = (dict, OrderedDict, list, set, deque)
"""Holders that are not true when they are empty."""


class Guards:
    """Values as they were, wherever a function could reach them."""

    def __init__(self) -> None:
        self._empty: list[Holder] = []
        self._sized: list[Holder] = []
        self._sizes: list[int] = []
        self._named: list[Iterable] = []
        self._held_names: list[str] = []
        self._views: list[Iterable] = []
        self._items: list[Any] = []
        self._dicts: list[dict] = []
        self._keys: list[str] = []
        self._entries: list[Any] = []
        self._noted: set[tuple[int, str]] = set()
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._attributes: list[Any] = []
        self._cells: list[types.CellType] = []
        self._contents: list[Any] = []
        self._tensors: list[Tensor] = []
        self._ids: set[int] = set()
        self._described: list[tuple] = []
        self._alike: Callable[..., bool] | None = None
        self._versions: list[int] = []
        self._arrays: list[np.ndarray] = []
        self._copies: list[tuple] = []
        self._shared: list[int | None] = []
        self._registrations: Any = None

    def hold(self, arguments: Sequence[Tensor] = ()) -> bool:
        """Tell whether everything still is what it was, for a call of these."""
        return (
            not any(self._empty)
            and [*map(len, self._sized)] == self._sizes
            and [*chain.from_iterable(self._named)] == self._held_names
            and _unchanged([*chain.from_iterable(self._views)], self._items)
            and _unchanged([*map(dict.get, *self._places())], self._entries)
            and _unchanged([*map(getattr, *self._slots())], self._attributes)
            and _unchanged(contents(self._cells), self._contents)
            and self._tensors_hold()
            and [*map(_copy, self._arrays)] == self._copies
            and self._registrations in (None, get_cache_token())
            and self._arguments_hold(arguments)
        )

    def _arguments_hold(self, arguments: Sequence[Tensor]) -> bool:
        """Tell whether arguments are closed over as they were, or not at all.

        A graph is traced with others, so that it holds for those.
        """
        found = self._closed_over(arguments)
        return not any(found) or found == self._shared

    def _tensors_hold(self) -> bool:
        """Compare tensors once by what is known of them, and then in one go."""
        if self._alike is None or not torch.is_grad_enabled():
            if [*map(description, self._tensors)] != self._described:
                return False
            if all(each.layout is torch.strided for each in self._tensors):
                self._alike = like(self._tensors)
            return True
        return self._alike(*self._tensors)

    def _places(self) -> tuple[Iterable, ...]:
        return self._dicts, self._keys, repeat(_GONE)

    def _slots(self) -> tuple[Iterable, ...]:
        return self._owners, self._names, repeat(_GONE)

    def written(self) -> bool:
        """Tell whether a tensor has been written to since it was noted."""
        return [*map(_version, self._tensors)] != self._versions

    def note(self, holder: Holder) -> None:
        """Note all that a container holds, and in which order."""
        if not holder and type(holder) in _SIZED:
            self._empty.append(holder)
            return
        self.note_size(holder)
        views: list[Iterable] = [holder]
        if isinstance(holder, Mapping):
            views.append(holder.values())
            if all(type(name) is str for name in holder):  # so equal ones are the same
                self._named.append(views.pop(0))
                self._held_names += holder
        for view in views:
            self._views.append(view)
            self._items += view

    def note_size(self, holder: Holder) -> None:
        """Note how many entries a container has."""
        self._sized.append(holder)
        self._sizes.append(len(holder))

    def note_entries(self, holder: dict[str, Any], names: Collection[str]) -> None:
        """Note some entries of a dictionary, or that there are none of these names."""
        names = self._new(holder, names)
        self._dicts += [holder] * len(names)
        self._keys += names
        self._entries += [holder.get(name, _GONE) for name in names]

    def note_attributes(self, owner: Any, *names: str) -> None:
        """Note some attributes, or that there are none of these names."""
        new = self._new(owner, names)
        self._owners += [owner] * len(new)
        self._names += new
        self._attributes += [getattr(owner, name, _GONE) for name in new]

    def _new(self, owner: Any, names: Collection[str]) -> list[str]:
        """Return the names under which nothing of an object was noted before."""
        new = [name for name in names if (id(owner), name) not in self._noted]
        self._noted.update((id(owner), name) for name in new)
        return new

    def note_registrations(self) -> None:
        """Note which classes are registered with abstract ones, all over Python."""
        self._registrations = self._registrations or get_cache_token()

    def note_cells(self, cells: Collection[types.CellType]) -> None:
        """Note what a closure holds."""
        self._cells += cells
        self._contents += contents(cells)

    def note_tensor(self, tensor: Tensor) -> None:
        """Note everything about a tensor but its values."""
        self._tensors.append(tensor)
        self._ids.add(id(tensor))
        self._described.append(description(tensor))
        self._alike = None
        self._versions.append(_version(tensor))

    def note_arguments(self, arguments: Sequence[Tensor]) -> None:
        """Note which arguments are closed over, too: a function may ask that."""
        self._shared = self._closed_over(arguments)

    def _closed_over(self, arguments: Sequence[Tensor]) -> list[int | None]:
        if not self._ids:
            return []
        return [id(each) if id(each) in self._ids else None for each in arguments]

    def note_array(self, array: np.ndarray) -> None:
        """Note the values of an array of numpy.

        Raises:
            Unrepeatable: there are too many to compare them at every call.
        """
        if array.nbytes > _MOST_BYTES or array.dtype.hasobject:
            raise Unrepeatable(
                f"it closes over an array of numpy with {array.nbytes} bytes, which "
                f"are too many to compare. Make it a tensor"
            )
        self._arrays.append(array)
        self._copies.append(_copy(array))


def description(tensor: Tensor) -> tuple:
    """Return all that ops ask of a tensor but its values."""
    return (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def is_plain(value: Any) -> bool:
    """Tell whether a value cannot change, and can be compared."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


_PLAIN = {
    *(bool, int, float, complex, str, bytes, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(TreeSpec, types.NotImplementedType),
}

_GONE = ...
"""Stands for a value that is not there, and is as plain as others."""

_MOST_BYTES = 2**14
"""Of an array whose values are compared, which takes about a microsecond."""


def _unchanged(found: list, values: list) -> bool:
    """Tell whether these are the same objects, or equal where that is enough."""
    return all(map(operator.is_, found, values)) or all(map(_same, found, values))


def _same(found: Any, value: Any) -> bool:
    if found is value:
        return True
    # Numbers that are equal may differ: 0.0 and -0.0, 1 and True.
    return type(found) is type(value) and is_plain(found) and repr(found) == repr(value)


def contents(cells: Collection[types.CellType]) -> list:
    """Return what a closure holds."""
    try:
        return [*map(_CONTENTS, cells)]
    except ValueError:  # one of them is not bound
        return [*map(_content, cells)]


_CONTENTS = operator.attrgetter("cell_contents")


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _copy(array: np.ndarray) -> tuple:
    return array.shape, array.dtype, array.tobytes()

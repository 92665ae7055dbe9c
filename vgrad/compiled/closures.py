"""What a function closes over: values that a graph bakes in, and tensors that it reads.

A graph repeats what Python did while it was captured. So every plain value that a loss
can reach (in closures, default arguments, `functools.partial`, attributes of objects
and modules, globals of the functions that ran) is noted, and compared at each call.
Tensors are inputs of the graph, as they are at each call; which tensor it is, is noted.
"""

import enum
import functools
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable
from vgrad.functional.model import FunctionalModel
from vgrad.torch_private.tensors import OPS
from vgrad.tree import TreeSpec

Reached = Mapping[types.CodeType, dict[str, Any]]
"""The code that ran, with its globals."""


class Guards:
    """Values as they were, wherever a function could reach them."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self._plain: list[tuple[Any, tuple, tuple, list]] = []
        self._others: list[tuple[Any, tuple, list]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._items: list[tuple[Any, Any]] = []

    def hold(self) -> bool:
        """Tell whether everything still is what it was."""
        for holder, names, values, kinds in self._plain:
            found = tuple(map(holder.get, names))
            if found != values or list(map(type, found)) != kinds:
                return False
        for holder, names, values in self._others:
            for name, value in zip(names, values, strict=True):
                if holder.get(name) is not value:
                    return False
        for holder, size in self._sizes:
            if len(holder) != size:
                return False
        for cell, value in self._cells:
            if not _same(cell.cell_contents, value):
                return False
        for holder, items in self._items:
            same = len(holder) == len(items) and (
                all(map(_same, holder, items))
                if isinstance(holder, list)
                else holder == items
            )
            if not same:
                return False
        return True

    def note_cell(self, cell: types.CellType) -> None:
        """Note what a closure holds."""
        self._cells.append((cell, cell.cell_contents))

    def note_items(self, holder: list | set) -> None:
        """Note what a list or a set holds."""
        self._items.append((holder, holder.copy()))

    def note(self, holder: Any, names: Any, *, whole: bool = False) -> None:
        """Note entries of a dictionary, of an object say, and with `whole` how many."""
        if whole:
            self._sizes.append((holder, len(holder)))
        plain = tuple(name for name in names if _is_plain(holder[name]))
        others = tuple(name for name in names if not _is_plain(holder[name]))
        if plain:
            values = tuple(holder[name] for name in plain)
            self._plain.append((holder, plain, values, list(map(type, values))))
        if others:
            self._others.append((holder, others, [holder[name] for name in others]))


class Closed(NamedTuple):
    """What a function closes over."""

    guards: Guards
    tensors: dict[int, Tensor]  # by id


def closed_over(function: Any, reached: Reached) -> Closed:
    """Follow everything that a function can reach, and what ran while it was called.

    Raises:
        Unrepeatable: an object is of a kind that can change without notice.
    """
    walk = _Walk()
    walk.left.append((function, "the function"))
    for code, names in reached.items():
        walk.follow_globals(code, names)
    while walk.left:
        walk.follow(*walk.left.pop())
    return Closed(walk.guards, walk.tensors)


class _Walk:
    """A walk through objects, each of which is visited once."""

    def __init__(self) -> None:
        self.guards = Guards()
        self.tensors: dict[int, Tensor] = {}
        self.left: list[tuple[Any, str]] = []
        self._seen: dict[int, Any] = {}

    def follow(self, value: Any, path: str) -> None:
        """Note what an object holds, and put that on the way."""
        if _is_plain(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept, so that no other gets its id
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, types.FunctionType):
            self._follow_function(value, path)
        elif isinstance(value, types.MethodType):
            self._add(value.__self__, path)
            self._add(value.__func__, path)
        elif isinstance(value, functools.partial):
            self._add((value.func, value.args, value.keywords), path)
        elif isinstance(value, tuple | frozenset):
            self._add_all(enumerate(value), path)
        elif isinstance(value, list | set):
            self.guards.note_items(value)
            self._add_all(enumerate(value), path)
        elif isinstance(value, dict):
            self.guards.note(value, list(value), whole=True)
            self._add_all(value.items(), path)
        elif isinstance(value, FunctionalModel):
            self._follow_model(value, path)
        elif isinstance(value, types.ModuleType | type) or _is_constant(value):
            return
        elif hasattr(value, "__wrapped__"):  # functools.cache and the like
            self._add(value.__wrapped__, path)
        elif type(value).__flags__ & _HEAP and hasattr(value, "__dict__"):
            self._follow_object(value, path)
        elif not path.startswith(_LIBRARY):
            raise Unrepeatable(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, "
                f"whose values cannot be compared"
            )

    def follow_globals(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Note the globals that a function names, and what it names of modules."""
        if not _is_users(names.get("__name__", "")):
            return
        used = [name for name in code.co_names if name in names]
        self.guards.note(names, used)
        library = _LIBRARY if "site-packages" in code.co_filename else ""
        for name in used:
            value = names[name]
            if isinstance(value, types.ModuleType):
                if _is_users(value.__name__):
                    held = [n for n in code.co_names if n in vars(value)]
                    self.guards.note(vars(value), held)
                    self._add_all([(n, vars(value)[n]) for n in held], library + name)
            else:
                self._add(value, f"{library}the global {name!r}")

    def _follow_function(self, function: types.FunctionType, path: str) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self.guards.note_cell(cell)
            except ValueError:  # bound later, or never
                continue
            self._add(cell.cell_contents, f"{name!r} in {function.__name__}")
        self._add((function.__defaults__, function.__kwdefaults__), path)
        if vars(function):
            self._add(vars(function), path)

    def _follow_model(self, model: FunctionalModel, path: str) -> None:
        """Note all of a functional model but the tensors it is given."""
        held = {n: value for n, value in vars(model).items() if n[0] != "_"}
        self._add_all(held.items(), path)
        for tensor in model.constants:
            self.tensors[id(tensor)] = tensor
        for name, module in model.named_modules():
            self._seen[id(module)] = module
            own = {n: each for n, each in vars(module).items() if n not in _GIVEN}
            self._follow_attributes(module, own, f"{path}.{name}")

    def _follow_object(self, value: Any, path: str) -> None:
        """Note the attributes of an object, and of its classes that users wrote.

        Objects of this package change nothing but what they remember.
        """
        if type(value).__module__.startswith("vgrad."):
            for name, held in vars(value).items():
                if isinstance(held, dict):
                    held = tuple(held.values())
                elif isinstance(held, list | set):
                    held = tuple(held)
                self._add(held, f"{path}.{name}")
            return
        self.guards.note(vars(value), (), whole=True)
        self._follow_attributes(value, vars(value), path)

    def _follow_attributes(
        self, value: Any, held: Mapping[str, Any], path: str
    ) -> None:
        """Note some attributes of an object, and all of its classes'."""
        self.guards.note(vars(value), list(held))
        self._add_all(held.items(), path)
        for kind in type(value).__mro__:
            if _is_users(kind.__module__):
                names = [n for n, each in vars(kind).items() if not n.startswith("__")]
                self.guards.note(vars(kind), names)
                self._add_all([(n, vars(kind)[n]) for n in names], path)

    def _add(self, value: Any, path: str) -> None:
        if not _is_plain(value):
            self.left.append((value, path))

    def _add_all(self, items: Any, path: str) -> None:
        for name, value in items:
            self._add(value, f"{path}[{name!r}]" if path else str(name))


_HEAP = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: a class that was written in Python."""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(enum.Enum, np.generic, TreeSpec),
)

_LIBRARY = "in a library: "
"""How the way to globals of installed code begins.

What cannot be compared there (a registry, a key of a cache) is taken to stay as it is.
"""

_GIVEN = {"_parameters", "_buffers"}
"""Where a module of a functional model holds what it is given at each call."""


def _is_plain(value: Any) -> bool:
    """Tell whether a value cannot change, and can be compared."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


_LOCK = type(threading.Lock()), type(threading.RLock())


def _is_constant(value: Any) -> bool:
    """Tell whether an object has no state that a result could depend on."""
    if isinstance(value, OPS):
        return True
    kinds = (logging.Logger, re.Pattern, weakref.ref, property, staticmethod, *_LOCK)
    if isinstance(value, kinds):
        return True
    # Functions of C, torch's ops among them.
    return callable(value) and not hasattr(value, "__dict__")


def _is_users(module: str) -> bool:
    """Tell whether a module is neither Python's, torch's nor this package's."""
    top = module.partition(".")[0]
    return top not in ("", "torch", "vgrad", "numpy", *sys.stdlib_module_names)


def _same(found: Any, value: Any) -> bool:
    """Tell whether two values are the same object, or equal where that is enough."""
    if found is value:
        return True
    return type(found) is type(value) and _is_plain(found) and found == value

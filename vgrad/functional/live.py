"""A module of the user's own as a function of its parameters, without a copy.

For each call the values of the caller take the place of parameters and buffers. They
stay there until the next call, or `restore`: a backward pass may run code of the module
again, or read what its forward pass has left. Then everything that the module holds is
put back, objects that are no modules included.
"""

import gc
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from vgrad.functional import guards
from vgrad.functional.model import FunctionalModel
from vgrad.functional.slots import (
    Fields,
    Origins,
    Placeholder,
    Slots,
    StaleParam,
    placeholder,
    put,
    same,
    taken,
)
from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private


class LiveModel(FunctionalModel):
    """A functional model that runs the module itself; `restore` ends its calls.

    Other code must not run the module between a call and `restore`.
    """

    _slots: "LiveSlots"

    def __init__(self, function: str, model: nn.Module) -> None:
        """Look at the module; `function` is named in errors.

        Raises:
            TypeError: the module is wrapped, scripted or lazy, or holds parameters
                where they cannot be exchanged.
        """
        guards.check_plain(function, model)
        self._function = function
        super().__init__(model, {})
        registered = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: registered[name] for name in self.names}
        self._facts = self.facts()

    def facts(self) -> list[tuple]:
        """Return dtypes, devices and shapes, which change in place."""
        return [
            (x.dtype, x.device, x.requires_grad, x.shape, private.has_hooks(x))
            for x in self.values.values()
        ]

    def is_current(self) -> bool:
        """Return whether the module holds the objects that it held at first."""
        return self._slots.unchanged() and self.facts() == self._facts

    def restore(self) -> None:
        """Put back the state of the module before its calls, if there were any."""
        self._slots.restore()

    def _find_slots(self, skeleton: nn.Module, firsts: dict[int, str]) -> Slots:
        return LiveSlots(self._function, skeleton, firsts)


_PLAIN = {bool, int, float, complex, str, bytes, NoneType, range, slice, type}
_PLAIN |= {torch.dtype, torch.device, torch.Size}
"""Classes of values that hold no others and never change."""

_CLEARED = (dict, OrderedDict, list, set, deque)
"""Classes of containers that are empty more often than not."""

_KNOWN = (dict, list, set, deque, tuple, frozenset, bytearray, array, np.ndarray)
_KNOWN += (FunctionType, BuiltinFunctionType, CellType, MethodType, partial, ref)
"""Classes whose contents are known."""

_APART = (type, ModuleType, Dataset, DataLoader, Optimizer, *private.OPS)
"""Classes of objects that no forward pass changes, though it may use them."""

_MACHINERY = ("vgrad.", "torch._", "torch.distributed.", "torch.fx.", "logging")
_MACHINERY += ("torch.optim.", "torch.utils.data.", "threading")
"""Where objects are from, other than modules, that keep their own state."""

_ORDINARY = (object.__getstate__, nn.Module.__getstate__)


class LiveSlots(Slots):
    """The places of tensors in whatever a module leads to, and all else in there."""

    def __init__(self, function: str, model: nn.Module, firsts: dict[int, str]) -> None:
        self.state, self.registered = [], {}
        self._empty = []
        self._function, self._model = function, model
        self._names, self._origins = firsts, Origins(model)
        self._exchanged: list[tuple[Any, Any, Any]] = []
        self._compiled: list[dict[str, Any]] = []
        self._stale: dict[int, Tensor] = {}
        self._detached: dict[int, Tensor] = {}
        self._marked: list[tuple[int, dict[str, Any]]] = []
        self._seen: dict[int, Any] = {}
        trained = (each for each in model.parameters() if each.requires_grad)
        self._trained = [(each, type(each)) for each in trained]
        self._filled = False
        with modes.without_modes():
            self._look(model)
        self.detached = [(None, None, each) for each in self._detached.values()]

    def unchanged(self) -> bool:
        """Return whether every container holds the objects that it held at first."""
        return not any(self._empty) and all(same(*each) for each in self.state)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put values in the place of tensors, once the last call is undone."""
        self.restore()
        self._filled = True
        by_id = {key: values[name] for key, name in self._names.items()}
        by_id.update(self._stale)
        for key, value in self._detached.items():
            by_id[key] = (value if value.is_leaf else value.detach()).clone()
        for container, key, value in self._exchanged:
            if isinstance(container, dict) and next(_tensors(key), None) is not None:
                container.pop(key)
                key = _rebuilt(key, by_id)
            put(container, key, _rebuilt(value, by_id))
        for attributes in self._compiled:  # whose code does not run inside of modes
            attributes["_compiled_call_impl"] = None
        for key, marks in self._marked:
            vars(by_id[key]).update(marks)
        for parameter, _ in self._trained:  # raises if it is used, as by a global
            parameter.__class__ = Placeholder

    def end(self) -> None:
        """Leave the module as the call has left it, for the backward pass."""

    def restore(self) -> None:
        """Restore everything; after an interrupt, call it again."""
        if self._filled:
            for parameter, kind in self._trained:
                parameter.__class__ = kind
            super().end()
            self._filled = False

    def _look(self, model: nn.Module) -> None:
        """Follow all that leads from the module, and hooks on all modules."""
        left: list[tuple[str, Any]] = [("", model)]
        left += [("a hook on all modules", each) for each in private.GLOBAL_HOOKS]
        while left:
            path, value = left.pop()
            if type(value) not in _PLAIN and id(value) not in self._seen:
                self._seen[id(value)] = value  # kept, so that its id stays its own
                left.extend(self._held(path, value))
        for module in model.modules():
            for registry in private.registered(module)[:2]:
                for key, tensor in registry.items():
                    if tensor is not None:
                        name = self._names[id(tensor)]
                        self.registered.setdefault(name, []).append((registry, key))

    def _held(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the values in an object, and note where they can be exchanged."""
        if isinstance(value, Tensor):
            if marks := vars(value):  # attributes that are the user's own
                self._marked.append((id(value), marks))
                yield path, marks
            return
        if isinstance(value, dict | list | set | deque):
            yield from self._entries(path, value)
        elif isinstance(value, tuple | frozenset):
            if isinstance(value, frozenset):
                self._check_fixed(path, value)
            yield from ((path, each) for each in value)
        elif isinstance(value, bytearray | array | np.ndarray):
            yield from self._numbers(path, value)
        elif isinstance(value, FunctionType):
            if next(_tensors(value.__defaults__), None) is not None:
                own: Any = FunctionType.__defaults__
                yield from self._entries(path, Fields(value, [own]))
            yield path, value.__kwdefaults__
            yield from ((path, each) for each in value.__closure__ or ())
        elif isinstance(value, CellType):
            own = CellType.cell_contents
            yield from self._entries(path, Fields(value, [own]))
        elif isinstance(value, MethodType):
            yield from ((path, each) for each in (value.__self__, value.__func__))
        elif isinstance(value, BuiltinFunctionType):
            self._check_fixed(path, [value.__self__])
            yield path, value.__self__
        elif isinstance(value, ref):
            self._check_fixed(path, [value()])
            yield path, value()
        elif isinstance(value, partial):
            self._check_fixed(path, value.args)
            yield from ((path, each) for each in (value.func, value.args))
            yield path, value.keywords
        yield from self._attributes(path, value)

    def _attributes(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        apart = isinstance(value, _APART) or kind.__module__.startswith(_MACHINERY)
        if apart and not isinstance(value, nn.Module):
            return
        attributes = getattr(value, "__dict__", None)
        slots = [
            member
            for each in kind.__mro__
            if "__slots__" in vars(each)
            for member in vars(each).values()
            if isinstance(member, MemberDescriptorType)
        ]
        if slots:
            yield from self._entries(path, Fields(value, slots))
        if isinstance(attributes, dict):
            if isinstance(value, nn.Module) and "_compiled_call_impl" in attributes:
                self._compiled.append(attributes)
            left_out = _left_out(value, attributes)
            if isinstance(value, nn.RNNBase):  # renewed where the weights are others
                left_out.add(id(attributes["_flat_weight_refs"]))
            for below, each in self._entries(path, attributes):
                if id(each) not in left_out:
                    yield below, each
        elif not slots and not isinstance(value, _KNOWN):
            referents = gc.get_referents(value)
            self._check_fixed(path, referents)
            yield from ((path, each) for each in referents)

    def _entries(self, path: str, container: Any) -> Iterator[tuple[str, Any]]:
        if not container and type(container) in _CLEARED:
            self._empty.append(container)
            return
        before = taken(container)
        self.state.append((container, before))
        if isinstance(before, dict):
            pairs: Any = before.items()
        elif isinstance(before, set):
            pairs = ((each, each) for each in before)
        else:
            pairs = enumerate(before)
        for key, value in pairs:
            found = [*_tensors(value), *_tensors(key)]
            for tensor in found:
                self._note(tensor)
            if found:
                self._exchanged.append((container, key, value))
            if type(key) not in _PLAIN and value is not key:
                yield path, key
            if type(value) not in _PLAIN:
                yield f"{path}.{key}".lstrip(".") if type(key) is str else path, value

    def _numbers(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note an array whose numbers a forward pass may write."""
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                self._check_fixed(path, value.flat)
                yield from ((path, each) for each in value.flat)
            if isinstance(value, np.memmap) or not value.flags.writeable:
                return
        self.state.append((value, taken(value)))

    def _note(self, tensor: Tensor) -> None:
        """Choose a stand-in for a tensor."""
        key = id(tensor)
        if key in self._names or key in self._stale or key in self._detached:
            return
        if self._origins.lead_to(tensor):
            self._stale[key] = placeholder(tensor, StaleParam)
        else:
            self._detached[key] = tensor

    def _check_fixed(self, path: str, values: Iterable[Any]) -> None:
        """Refuse parameters where they cannot be exchanged."""
        for value in values:
            for tensor in _tensors(value):
                if id(tensor) in self._names or self._origins.lead_to(tensor):
                    raise TypeError(
                        f"{self._function}({type(self._model).__name__}): expected "
                        f"parameters in modules, containers or attributes, got one, or "
                        f"a result of one, in {path!r}, held by an object that keeps "
                        f"it for good. Hold the module in its place."
                    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or those in a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)


def _rebuilt(value: Any, by_id: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_id[id(value)]
    if not isinstance(value, tuple):
        return value
    entries = [_rebuilt(each, by_id) for each in value]
    kind: Any = type(value)
    return kind._make(entries) if hasattr(kind, "_make") else kind(entries)


def _left_out(value: Any, attributes: dict[str, Any]) -> set[int]:
    """Return the ids of objects that a copy of their holder would not have.

    A module of Lightning has its trainer so, which holds all else there is.
    """
    state = None
    if type(value).__getstate__ not in _ORDINARY:
        with suppress(Exception):  # parametrized modules refuse to be pickled
            state = value.__getstate__()
    if not isinstance(state, dict):
        return set()
    kept = set(map(id, state.values()))
    known = (*_KNOWN, Tensor, nn.Module)
    objects = (each for each in attributes.values() if not isinstance(each, known))
    return {id(each) for each in objects} - kept

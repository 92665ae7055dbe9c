"""Where a module holds tensors, and how a call exchanges them and puts them back.

In eager mode a view of a parameter follows it, and so does a tensor that was computed
from it. A copy of either would be a constant: it raises until it is computed again.
"""

import copy
import gc
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain
from operator import is_
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

from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import memory, with_attributes


class Placeholder(nn.Parameter):
    """A placeholder of a value, on the device `meta`; reading a value raises."""

    # An ordinary tensor there would not do: some kernels take it together with real
    # ones and read memory outside of both.

    refusal = (
        "expected a tensor that is passed to the functional model, got one that is "
        "used outside of its call, or held where it cannot be exchanged. Register "
        "what holds parameters as a module."
    )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _ALLOWED:
            raise RuntimeError(f"{name}: {cls.refusal}")
        with modes.without_subclasses():
            value = func(*args, **(kwargs or {}))
            return value.as_subclass(cls) if isinstance(value, Tensor) else value

    def __deepcopy__(self, memo: dict) -> "Placeholder":
        memo[id(self)] = same = placeholder(self, type(self))
        vars(same).update(copy.deepcopy(vars(self), memo))
        return same

    def __reduce_ex__(self, protocol: Any) -> tuple:
        with modes.without_subclasses():
            return _unpickled, (self.as_subclass(Tensor), type(self), vars(self))


def _unpickled(tensor: Tensor, kind: type, attributes: dict[str, Any]) -> Tensor:
    with modes.without_subclasses():
        same = tensor.as_subclass(kind)
    vars(same).update(attributes)
    return same


class StaleParam(Placeholder):
    """A placeholder of a view or a result of registered tensors, until it is set."""

    refusal = (
        "expected a tensor that the forward pass computes before it uses it, got a "
        "view or a result of parameters or buffers that the module keeps in an "
        "attribute and that would not follow their values. Compute it in the forward "
        "pass, for example in a property."
    )


_ALLOWED = {"__get__", "clone", "detach", "dim"}
_ALLOWED |= {"is_floating_point", "is_complex", "numel", "requires_grad_", "size"}
_ALLOWED |= {"element_size", "__hash__", "stride"}


def placeholder(tensor: Tensor, kind: type[Placeholder] = Placeholder) -> Placeholder:
    """Return a placeholder of a tensor."""
    with modes.without_subclasses():
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        return empty.as_subclass(kind)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, then every buffer, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def own_buffers(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that are not parameters as well."""
    return set(map(id, model.buffers())) - set(map(id, model.parameters()))


def persistent(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that a `state_dict()` holds."""
    return {id(each) for m in model.modules() for each in private.persistent(m)}


def duplicate(model: nn.Module, placeholders: dict[int, Any]) -> nn.Module:
    """Copy a module with its tensors, by id, replaced wherever they are held."""
    # Views and results of them are placeholders until the forward pass computes them,
    # as the old `torch.nn.utils.weight_norm` does.
    slots = Slots(model, dict.fromkeys(placeholders, ""))
    memo = {**placeholders, **slots.stale}
    # Torch copies leaves only; other results are constants here.
    for key, tensor in slots.detached.items():
        if not tensor.is_leaf:
            memo[key] = with_attributes(tensor.detach().clone(), tensor)
    skeleton = copy.deepcopy(model, memo)
    for _, tensor in named_tensors(model):
        marks = copy.deepcopy(vars(tensor), memo)
        vars(placeholders[id(tensor)]).update(marks)
    return skeleton


State = list[tuple[Any, Any]]
"""Containers, and copies of their contents."""


class Fields:
    """Values that an object holds by descriptors, as slots and cells do."""

    def __init__(self, owner: Any, descriptors: Sequence[Any]) -> None:
        self.owner = owner
        self._descriptors = descriptors

    def contents(self) -> dict[Any, Any]:
        """Return the values that are set, by descriptor."""
        values = {}
        for descriptor in self._descriptors:
            with suppress(AttributeError, ValueError):  # not set
                values[descriptor] = descriptor.__get__(self.owner)
        return values

    def put_back(self, before: dict[Any, Any]) -> None:
        """Restore these values, and unset all others."""
        for descriptor in self.contents().keys() - before.keys():
            descriptor.__delete__(self.owner)
        for descriptor, value in before.items():
            descriptor.__set__(self.owner, value)


def taken(container: Any) -> Any:
    """Return a copy of the contents of a container, which `_restore` puts back."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, list | deque):
        return [*container]
    if isinstance(container, Fields):
        return container.contents()
    has_copy = isinstance(container, set | np.ndarray)
    return container.copy() if has_copy else container[:]


def _same(container: Any, before: Any) -> bool:
    """Return whether a container holds the objects, or the numbers, of before."""
    if isinstance(container, np.ndarray):
        same_kind = (container.dtype, container.shape) == (before.dtype, before.shape)
        return same_kind and container.tobytes() == before.tobytes()
    if isinstance(container, Fields):
        container = container.contents()
    if not isinstance(container, dict | list | deque):
        return container == before
    if isinstance(container, dict):
        container = [*container, *container.values()]
        before = [*before, *before.values()]
    return len(container) == len(before) and all(map(is_, container, before))


def _put(container: Any, key: Any, value: Any) -> None:
    """Exchange an entry of a container; the key of one in a set is its old value."""
    if isinstance(container, dict):
        _kind(container).__setitem__(container, key, value)
    elif isinstance(container, set):
        container.discard(key)
        container.add(value)
    elif isinstance(container, Fields):
        key.__set__(container.owner, value)
    else:
        container[key] = value


def _restore(state: State) -> None:
    """Restore the contents of containers; after an interrupt, call it again."""
    for container, before in state:
        if _same(container, before):
            continue
        if isinstance(container, dict):
            kind = _kind(container)
            if [*map(id, container)] != [*map(id, before)]:
                kind.clear(container)
            for key, value in before.items():
                kind.__setitem__(container, key, value)
        elif isinstance(container, Fields):
            container.put_back(before)
        elif isinstance(container, np.ndarray):
            container[...] = before
        elif isinstance(container, set | deque):
            container.clear()
            add = container.update if isinstance(container, set) else container.extend
            add(before)
        else:
            container[:] = before


def _kind(container: dict) -> Any:
    """Return the class that changes a dictionary whose own may forbid it."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


_PLAIN = {bool, int, float, complex, str, bytes, NoneType, range, slice, type}
_PLAIN |= {torch.dtype, torch.device, torch.Size}
"""Classes of values that hold no others and never change."""

_CLEARED = (dict, OrderedDict, list, set, deque)
"""Classes of containers that are empty more often than not."""

_SHARED = (FunctionType, BuiltinFunctionType, CellType, ref)
"""Classes of objects that a copy of their holder shares with it."""

_NUMBERS = (bytearray, array, np.ndarray)

_KNOWN = (dict, list, set, deque, tuple, frozenset, MethodType, partial)
_KNOWN += (*_SHARED, *_NUMBERS)
"""Classes whose contents are known."""

_APART = (type, ModuleType, Dataset, DataLoader, Optimizer, *private.OPS)
"""Classes of objects that no forward pass changes, though it may use them."""

_MACHINERY = ("vgrad.", "torch._", "torch.distributed.", "torch.fx.", "logging")
_MACHINERY += ("torch.optim.", "torch.utils.data.", "threading")
"""Where objects are from, other than modules, that keep their own state."""

_ORDINARY = (dict, OrderedDict, list)
_PLAIN_COPY = (object.__getstate__, nn.Module.__getstate__)


class Slots:
    """The places of tensors in all that a module leads to, and what else is there.

    `fill` exchanges the tensors for the values of a call, and `end` restores all.
    """

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.names = names  # of the registered tensors, by id
        self.detached: dict[int, Tensor] = {}  # tensors that do not come from those
        self.stale: dict[int, Tensor] = {}  # placeholders for tensors that do
        self.state: State = []  # what a call may change, as it is before
        self.marks: State = []  # attributes of a call's values, as they were before
        both = (*model.parameters(), *model.buffers())
        tensors = [each for each in both if not isinstance(each, Placeholder)]
        self._ids = {id(tensor) for tensor in tensors}
        self._memory = {memory(tensor) for tensor in tensors} - {None}
        self._model = model
        self._modules = set(map(id, model.modules()))
        self._recurrent = [x for x in model.modules() if isinstance(x, nn.RNNBase)]
        self._empty: list[Any] = []
        self._marked: list[tuple[int, dict[str, Any]]] = []
        self._places: list[tuple[Any, Any, Tensor]] = []
        self._odd_places: list[tuple[Any, Any, Any]] = []
        with modes.without_modes():
            self._follow([("", model)])
        self.registered = [
            (names[id(tensor)], registry, key)
            for module in model.modules()
            for registry in private.registered(module)[:2]
            for key, tensor in registry.items()
            if tensor is not None
        ]
        # Ordinary containers are compared all at once, without a call for each.
        ordinary = [each for each, _ in self.state if type(each) in _ORDINARY]
        self._dicts = [each for each in ordinary if isinstance(each, dict)]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._views = [x.values() if isinstance(x, dict) else x for x in ordinary]
        self._values = [*chain.from_iterable(self._views)]
        self._sizes = [*map(len, self._views)]
        self._others = [each for each in self.state if type(each[0]) not in _ORDINARY]

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put values, and copies of detached tensors, in the place of tensors."""
        by_id = {key: values[name] for key, name in self.names.items()}
        by_id |= self.stale
        for key, value in self.detached.items():
            by_id[key] = (value if value.is_leaf else value.detach()).clone()
        for container, key, value in self._places:
            container[key] = by_id[id(value)]
        for container, key, value in self._odd_places:
            if isinstance(container, dict) and next(tensors_of(key), None) is not None:
                container.pop(key)
                key = _rebuilt(key, by_id)
            _put(container, key, _rebuilt(value, by_id))
        for key, attributes in self._marked:
            own = vars(by_id[key])
            self.marks.append((own, dict(own)))
            own.update({**attributes, **own})
        if self._recurrent and (modes.function_modes() or modes.inside_transform()):
            for net in self._recurrent:
                # Otherwise they move weights to one block of memory, for cuDNN, by
                # addresses, which tensors of a recorded pass or a vmap have not.
                weights: Any = net._flat_weights
                refs = [None if each is None else ref(each) for each in weights]
                vars(net)["_flat_weight_refs"] = refs

    def left(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a call with `values` has left, by name."""
        left = dict(values)
        for name, registry, key in self.registered:
            new = registry.get(key)
            if new is values[name]:
                continue
            other = left[name] is not values[name] and left[name] is not new
            if other or not isinstance(new, Tensor):
                raise RuntimeError(
                    f"fmodel(params, buffers): expected one tensor to be left in "
                    f"{name!r} and the names tied to it, got "
                    f"{'several' if other else type(new).__name__}."
                )
            left[name] = new
        return left

    def end(self) -> None:
        """End a call: restore everything; after an interrupt, call it again."""
        for container, key, value in self._places:
            container[key] = value
        _restore(self._others if self._ordinary_unchanged() else self.state)
        if any(self._empty):  # asked first, since there are many
            for each in self._empty:
                each.clear()
        _restore(self.marks)
        self.marks = []

    def changing(self) -> list[Any]:
        """Return the containers that a call has changed or may change."""
        containers = [each for each, _ in (*self.state, *self.marks)]
        return containers + [each for each in self._empty if each]

    def unchanged(self) -> bool:
        """Return whether every container holds the objects that it held at first."""
        others = all(_same(*each) for each in self._others)
        return self._ordinary_unchanged() and others and not any(self._empty)

    def _ordinary_unchanged(self) -> bool:
        return (
            [*map(len, self._views)] == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._values))
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
        )

    def _follow(self, left: list[tuple[str, Any]]) -> None:
        """Follow all that values lead to."""
        seen: dict[int, Any] = {}  # kept, so that no other gets its id
        while left:
            path, value = left.pop()
            if type(value) not in _PLAIN and id(value) not in seen:
                seen[id(value)] = value
                left.extend(self._held(path, value))

    def _held(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the values in an object, and note where they can be exchanged."""
        if isinstance(value, Tensor):
            if attributes := vars(value):  # of the user's own
                self._marked.append((id(value), attributes))
            yield path, attributes
            return
        if isinstance(value, _SHARED):
            yield from self._shared(path, value)
            return
        if isinstance(value, dict | list | set | deque):
            yield from self._entries(path, value)
        elif isinstance(value, tuple | frozenset):
            if isinstance(value, frozenset):
                self._check_fixed(path, value)
            yield from ((path, each) for each in value)
        elif isinstance(value, _NUMBERS):
            yield from self._numbers(path, value)
        elif isinstance(value, MethodType):
            yield from ((path, each) for each in (value.__self__, value.__func__))
            return
        elif isinstance(value, partial):
            self._check_fixed(path, value.args)
            yield from ((path, x) for x in (value.func, value.args, value.keywords))
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
            left_out = _left_out(value, attributes)
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
            tensors = [*tensors_of(value), *tensors_of(key)]
            for tensor in tensors:
                self._note(tensor)
            if (
                isinstance(value, Tensor)
                and len(tensors) == 1
                and type(container) in _ORDINARY
            ):
                self._places.append((container, key, value))
            elif tensors:
                self._odd_places.append((container, key, value))
            if type(key) not in _PLAIN and value is not key:
                yield path, key
            if type(value) not in _PLAIN:
                named = type(key) is str and key not in private.REGISTRIES
                yield f"{path}.{key}".lstrip(".") if named else path, value

    def _shares(self, tensor: Tensor) -> bool:
        """Return whether a tensor is registered, or shares memory with one that is."""
        return id(tensor) in self._ids or memory(tensor) in self._memory

    def _follows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is, shares or was computed from a registered one."""
        return self._shares(tensor) or any(
            id(getattr(node, "variable", None)) in self._ids
            for node in graph_nodes([tensor])
        )

    def _note(self, tensor: Tensor) -> None:
        """Choose a stand-in for a tensor."""
        key = id(tensor)
        if key in self.names or key in self.stale or key in self.detached:
            return
        if isinstance(tensor, StaleParam):
            self.stale[key] = tensor
        elif self._follows(tensor):
            self.stale[key] = placeholder(tensor, StaleParam)
        else:
            self.detached[key] = tensor

    def _shared(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Refuse a function or reference that would lead to old values."""
        function = isinstance(value, FunctionType)
        if function:
            reaches = self._reaches(value)
        else:
            held = value() if isinstance(value, ref) else value.__self__
            reaches = isinstance(held, Tensor) and self._follows(held)
        if reaches:
            raise TypeError(
                f"make_functional_with_buffers(model): expected functions that get the "
                f"module as an argument, got one in {path!r} "
                f"{'whose closure' if function else 'that'} holds a part of the model "
                f"and would go on using its values. Make it a method."
            )
        return ()

    def _reaches(self, function: FunctionType) -> bool:
        """Return whether a function's closure or defaults hold a part of the module."""
        values = [*(function.__defaults__ or ())]
        values += (function.__kwdefaults__ or {}).values()
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a name that was never bound
                values.append(cell.cell_contents)
        groups = (each for each in values if isinstance(each, list | tuple | dict))
        inside = [
            each
            for group in groups
            for each in (group.values() if isinstance(group, dict) else group)
        ]
        held = values + inside
        held += [each.__self__ for each in held if isinstance(each, MethodType)]
        return (
            any(id(each) in self._modules for each in held)
            or any(isinstance(x, Tensor) and self._follows(x) for x in values)
            # Computed tensors do not count: hooks collect results that they do not use.
            or any(isinstance(x, Tensor) and self._shares(x) for x in inside)
        )

    def _numbers(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        return ()

    def _check_fixed(self, path: str, values: Iterable[Any]) -> None:
        """Accept tensors that cannot be exchanged: placeholders raise where used."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or those in a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_of(each)


def _rebuilt(value: Any, by_id: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_id[id(value)]
    if not isinstance(value, tuple):
        return value
    entries = [_rebuilt(each, by_id) for each in value]
    kind: Any = type(value)
    return kind._make(entries) if hasattr(kind, "_make") else kind(entries)


def _left_out(value: Any, attributes: dict[str, Any]) -> set[int]:
    """Return the ids of objects that a copy of their holder would not have."""
    left_out = {id(attributes.get("_compiled_call_impl"))}
    if isinstance(value, nn.RNNBase):  # renewed where the weights are others
        left_out.add(id(attributes.get("_flat_weight_refs")))
    state = None
    if type(value).__getstate__ not in _PLAIN_COPY:
        with suppress(Exception):  # parametrized modules refuse to be pickled
            state = value.__getstate__()
    if isinstance(state, dict):  # without the trainer of a module of Lightning
        known = (*_KNOWN, Tensor, nn.Module)
        objects = (each for each in attributes.values() if not isinstance(each, known))
        left_out |= {id(each) for each in objects} - set(map(id, state.values()))
    return left_out


class Rerun:
    """The state that a call has left, for parts of it that a checkpoint re-runs."""

    def __init__(
        self, slots: Slots, written: Iterable[Tensor], lock: AbstractContextManager
    ) -> None:
        self._slots, self._lock = slots, lock
        self._written = set(map(id, written))
        self._wanted = False
        self._left: State = []

    def again(self) -> Callable[[], AbstractContextManager]:
        """Return a block for a re-run, in which the call's last values are there."""
        self._wanted = True
        return self._in_place

    def keep(self) -> None:
        """Keep the state, if a checkpoint has begun."""
        if not self._wanted:
            return
        self._left = [(each, taken(each)) for each in self._slots.changing()]
        known: dict[int, tuple[Tensor, Tensor]] = {}  # the first is kept for its id
        with modes.without_modes():
            for _, contents in self._left:
                pairs: Any = ()
                if isinstance(contents, dict):
                    pairs = contents.items()
                elif isinstance(contents, list):
                    pairs = enumerate(contents)
                for key, value in pairs:
                    if isinstance(value, Tensor):
                        if id(value) not in known:
                            known[id(value)] = value, self._kept(value)
                        contents[key] = known[id(value)][1]

    def _kept(self, value: Tensor) -> Tensor:
        # Copies of buffers, which the run may write into; leaves for results, whose
        # graphs refer to the checkpoint, a cycle that Python cannot collect.
        if id(value) in self._written:
            return with_attributes(value.detach().clone(), value)
        if modes.inside_transform() or value.grad_fn is None:
            return value
        return with_attributes(value.detach().requires_grad_(), value)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with self._lock:
            before = [(container, taken(container)) for container, _ in self._left]
            _restore(self._left)
            try:
                yield
            finally:
                _restore(before)

"""The tensors and the plain state of a module, which a call exchanges and restores.

Plain state is what attributes of modules and of their tensors lead to through tuples,
lists, dictionaries, sets and modules that are not registered. A call runs the module
with copies of it; objects of other classes are not followed.
"""

import copy
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import memory, with_attributes


class Placeholder(nn.Parameter):
    """A placeholder of a value, on the device `meta`; reading a value raises."""

    # An ordinary tensor there would not do: some kernels take it together with real
    # ones and read memory outside of both.

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _ALLOWED:
            raise RuntimeError(
                f"{name}: expected a tensor that is passed to the functional model, or "
                f"computed in its call, got a parameter that is used outside of its "
                f"call or held where it cannot be exchanged, or a view or a result of "
                f"parameters or buffers that the module keeps in an attribute. "
                f"Register what holds parameters as a module. Compute it in the "
                f"forward pass."
            )
        with modes.without_subclasses():
            value = func(*args, **(kwargs or {}))
            return value.as_subclass(cls) if isinstance(value, Tensor) else value

    def __deepcopy__(self, memo: dict) -> "Placeholder":
        memo[id(self)] = same = placeholder(self)
        vars(same).update(copy.deepcopy(vars(self), memo))
        return same

    def __reduce_ex__(self, protocol: Any) -> tuple:
        with modes.without_subclasses():
            return _unpickled, (self.as_subclass(Tensor), vars(self))


def _unpickled(tensor: Tensor, attributes: dict[str, Any]) -> Tensor:
    with modes.without_subclasses():
        same = tensor.as_subclass(Placeholder)
    vars(same).update(attributes)
    return same


_ALLOWED = {"__get__", "clone", "detach", "dim"}
_ALLOWED |= {"is_floating_point", "is_complex", "numel", "requires_grad_", "size"}
_ALLOWED |= {"element_size", "__hash__", "stride"}


def placeholder(tensor: Tensor) -> Placeholder:
    """Return a placeholder of a tensor."""
    with modes.without_subclasses():
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        return empty.as_subclass(Placeholder)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, then every buffer, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def own_buffers(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that are not parameters as well."""
    return set(map(id, model.buffers())) - set(map(id, model.parameters()))


def persistent(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that a `state_dict()` holds."""
    return {id(buffer) for m in model.modules() for buffer in private.persistent(m)}


# Plain state.

_CONTAINERS = {dict, OrderedDict, list, deque, set}
"""Classes of containers that are followed; others may have rules of their own."""

_FIXED = {bool, int, float, str, type(None)}

_OF_MODULES = vars(nn.Module()).keys()
_REMADE = {"_compiled_call_impl", "_flat_weight_refs"}
"""Attributes of modules that torch makes again in a copy."""


def plain_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each object of the plain state of a module, and the name of its place."""
    seen: dict[int, Any] = {}  # kept, so that no other gets its id
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        path, value = pending.pop()
        if type(value) in _FIXED or id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if isinstance(value, nn.Module | Tensor):
            pending.append((path, vars(value)))
        elif isinstance(value, dict) and type(value) in _CONTAINERS:
            for key, entry in value.items():
                named = type(key) is str and key not in private.REGISTRIES
                below = f"{path}.{key}".lstrip(".") if named else path
                pending += [(below, entry)] if key not in _REMADE else []
        elif isinstance(value, tuple) or type(value) in _CONTAINERS:
            pending += [(path, entry) for entry in value]


def rebuilt(
    value: Any, stand_in: Callable[[Tensor], Tensor], memo: dict[int, Any]
) -> Any:
    """Copy plain containers, with stand-ins for tensors; `memo` is as of a deepcopy."""
    if id(value) in memo:
        return memo[id(value)]
    new: Any = value
    if isinstance(value, Tensor):
        new = stand_in(value)
    elif type(value) in _CONTAINERS:
        new = deque(maxlen=value.maxlen) if type(value) is deque else type(value)()
        memo[id(value)] = new
        if isinstance(value, dict):
            for key, entry in value.items():
                new[key] = rebuilt(entry, stand_in, memo)
        else:
            entries = [rebuilt(entry, stand_in, memo) for entry in value]
            (new.update if type(value) is set else new.extend)(entries)
    elif isinstance(value, tuple):
        entries = [rebuilt(entry, stand_in, memo) for entry in value]
        kind: Any = type(value)
        new = kind._make(entries) if hasattr(kind, "_make") else kind(entries)
    memo[id(value)] = new
    return new


class Registered(TorchFunctionMode):
    """The registered tensors of a module, and tensors that would not follow them.

    As a mode around a deepcopy it has placeholders in the place of such tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        both = (*model.parameters(), *model.buffers())
        tensors = [tensor for tensor in both if not isinstance(tensor, Placeholder)]
        self._ids = {id(tensor) for tensor in tensors}
        self._memory = {memory(tensor) for tensor in tensors} - {None}
        self._modules = set(map(id, model.modules()))

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            if self.leads_to(args[0]):
                return placeholder(args[0])
            if not args[0].is_leaf:  # a constant, which torch refuses to copy
                return _own_copy(args[0])
        return func(*args, **(kwargs or {}))

    def shares(self, tensor: Tensor) -> bool:
        """Return whether a tensor is registered, or shares memory with one that is."""
        return id(tensor) in self._ids or memory(tensor) in self._memory

    def leads_to(self, tensor: Tensor) -> bool:
        """Return whether a tensor is, shares or was computed from a registered one."""
        return self.shares(tensor) or any(
            id(getattr(node, "variable", None)) in self._ids
            for node in graph_nodes([tensor])
        )

    def held_by(self, function: Any) -> bool:
        """Return whether a function or a reference holds a part of the module."""
        referents: list[Any] = [function() if isinstance(function, ref) else None]
        if isinstance(function, FunctionType):
            referents = gc.get_referents(*(function.__closure__ or ()))
            referents += function.__defaults__ or ()
            referents += (function.__kwdefaults__ or {}).values()
        elif isinstance(function, BuiltinFunctionType):
            referents = [function.__self__]
        groups = [item.values() for item in referents if isinstance(item, dict)]
        groups += [item for item in referents if isinstance(item, list | tuple)]
        inside = [*chain.from_iterable(groups)]
        owners = [getattr(item, "__self__", item) for item in (*referents, *inside)]
        return (
            not self._modules.isdisjoint(map(id, owners))
            or any(isinstance(x, Tensor) and self.leads_to(x) for x in referents)
            # Computed tensors do not count: hooks collect results that they do not use.
            or any(isinstance(x, Tensor) and self.shares(x) for x in inside)
        )


def duplicate(model: nn.Module, placeholders: dict[int, Any]) -> nn.Module:
    """Copy a module with its tensors, by id, replaced wherever they are held."""
    registered = Registered(model)
    for path, value in plain_state(model):
        shared = isinstance(value, FunctionType | BuiltinFunctionType | ref)
        if shared and registered.held_by(value):  # which a copy would hold as well
            closes = isinstance(value, FunctionType)
            raise TypeError(
                f"make_functional_with_buffers(model): expected functions that get the "
                f"module as an argument, got one in {path!r} "
                f"{'whose closure' if closes else 'that'} holds a part of the model "
                f"and would go on using its values. Make it a method."
            )
    memo = {**placeholders}
    with registered:
        skeleton = copy.deepcopy(model, memo)
        for _, tensor in named_tensors(model):
            marks = copy.deepcopy(vars(tensor), memo)
            vars(placeholders[id(tensor)]).update(marks)
    return skeleton


State = tuple[list[tuple[nn.Module, dict]], list[tuple[dict, dict]]]
"""Modules and the dictionaries of their attributes; other dictionaries and contents."""


def _put(state: State) -> None:
    for module, attributes in state[0]:
        object.__setattr__(module, "__dict__", attributes)
    for attributes, before in state[1]:
        attributes.clear()
        attributes.update(before)


class Slots:
    """The places of a module's tensors, and its state between calls.

    `fill` gives all modules other dictionaries of attributes, with the values of a call
    and copies of the plain state; `end` puts back their own, which stay as they are.
    """

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.filled = False  # whether a call goes on, or was interrupted
        self.detached: list[Tensor] = []  # which do not come from registered tensors
        self._names = names  # of the registered tensors, by id
        self._stand_ins: dict[int, Any] = {}  # placeholders for tensors that do
        self._attributes: State = [], []  # of modules, and of a call's values
        self._copied: list[list[str]] = []  # of each module
        self._marked: list[Tensor] = []  # registered tensors that have attributes
        self._empty: list[Any] = []  # registries and hooks
        self._recurrent: list[nn.Module] = []
        registered = Registered(model)
        state = [value for _, value in plain_state(model)]
        containers = [value for value in state if type(value) in _CONTAINERS]
        self._dicts = [value for value in containers if isinstance(value, dict)]
        self._views = [x.values() if isinstance(x, dict) else x for x in containers]
        self._before = self._now()
        for value in state:
            if isinstance(value, nn.Module):
                self._follow(value)
            elif not isinstance(value, Tensor):
                continue
            elif id(value) in names:
                self._marked += [value] if vars(value) else []
            elif isinstance(value, Placeholder):
                self._stand_ins[id(value)] = value
            elif registered.leads_to(value):
                self._stand_ins[id(value)] = placeholder(value)
            else:
                self.detached.append(value)

    def _follow(self, module: nn.Module) -> None:
        attributes, copied = vars(module), list[str]()
        self._attributes[0].append((module, attributes))
        self._copied.append(copied)
        self._recurrent += [module] if isinstance(module, nn.RNNBase) else []
        for key, value in attributes.items():
            if key in _OF_MODULES and type(value) in _CONTAINERS and not value:
                self._empty.append(value)
            elif isinstance(value, tuple):
                copied += [] if _FIXED.issuperset(map(type, value)) else [key]
            elif type(value) in _CONTAINERS or isinstance(value, Tensor):
                copied.append(key)

    def unchanged(self) -> bool:
        """Return whether the plain state has the objects that it had at first."""
        now, before = self._now(), self._before
        same = len(now[0]) == len(before[0]) and all(map(is_, now[0], before[0]))
        return same and now[1] == before[1]

    def _now(self) -> tuple[list, list]:
        # All at once, without a call for each container.
        values = [*chain(*self._views), *chain(*self._dicts)]
        return values, [*map(len, self._views)]

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Give all modules these values, and copies of their plain state."""
        if self.filled:
            self.end()
        self.filled = True
        now = map(values.get, self._names.values())
        memo: dict[int, Any] = dict(zip(self._names, now, strict=True))
        memo |= self._stand_ins
        for tensor in self.detached:
            memo[id(tensor)] = _own_copy(tensor)
        pairs = zip(self._attributes[0], self._copied, strict=True)
        for (module, original), copied in pairs:
            attributes = dict(original)
            for key in copied:
                if key in private.REGISTRIES:  # without a call for each tensor
                    entries = original[key].values()
                    values_now = map(memo.get, map(id, entries), entries)
                    attributes[key] = dict(zip(original[key], values_now, strict=True))
                else:
                    attributes[key] = rebuilt(original[key], _own_copy, memo)
            object.__setattr__(module, "__dict__", attributes)
        for tensor in self._marked:
            marks = vars(values[self._names[id(tensor)]])
            self._attributes[1].append((marks, dict(marks)))
            marks.update({**rebuilt(vars(tensor), _own_copy, memo), **marks})
        if self._recurrent and (modes.function_modes() or modes.inside_transform()):
            for net in self._recurrent:
                # Otherwise they move weights to one block of memory, for cuDNN, by
                # addresses, which tensors of a recorded pass or a vmap have not.
                weights: Any = net._flat_weights
                refs = [None if weight is None else ref(weight) for weight in weights]
                vars(net)["_flat_weight_refs"] = refs

    def values_after(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a call with `values` has left, by name."""
        changed: dict[str, Any] = {}
        for module, original in self._attributes[0]:
            for registry in private.REGISTRIES[:2]:
                now = vars(module)[registry]
                for key, tensor in original[registry].items():
                    name, new = self._names.get(id(tensor)), now.get(key)
                    if name is None or new is values[name]:
                        continue
                    if not isinstance(new, Tensor) or changed.get(name, new) is not new:
                        raise RuntimeError(
                            f"fmodel(params, buffers): expected one tensor to be left "
                            f"in {name!r} and the names tied to it, got "
                            f"{'several' if name in changed else type(new).__name__}."
                        )
                    changed[name] = new
        return {**values, **changed} if changed else values

    def end(self) -> None:
        """End a call: restore everything; after an interrupt, call it again."""
        _put(self._attributes)
        if any(self._empty):
            for registry in self._empty:
                registry.clear()
        self._attributes[1].clear()
        self.filled = False

    # What a call has left, for parts of it that a checkpoint runs again.

    def snapshot(self, written: set[int]) -> State:
        """Return the state as it is now, with copies of written tensors, by id."""

        def copied(value: Tensor) -> Tensor:
            # Copies of buffers, which the run may write into; leaves for results, whose
            # graphs refer to the checkpoint, a cycle that Python cannot collect.
            if id(value) in written:
                return with_attributes(value.detach().clone(), value)
            if modes.inside_transform() or value.grad_fn is None:
                return value
            return with_attributes(value.detach().requires_grad_(), value)

        memo: dict[int, Any] = {}
        with modes.without_modes():
            modules, values = self._attributes
            state = [
                (module, rebuilt(vars(module), copied, memo)) for module, _ in modules
            ]
            return state, [(marks, rebuilt(marks, copied, memo)) for marks, _ in values]

    @contextmanager
    def restoring(self, state: State) -> Iterator[None]:
        """Restore a state that a call has left while a block runs."""
        modules, values = state
        before = [(x, vars(x)) for x, _ in modules], [(x, dict(x)) for x, _ in values]
        filled, self.filled = self.filled, True
        try:
            _put(state)
            yield
        finally:
            _put(before)
            self.filled = filled


def _own_copy(tensor: Tensor) -> Tensor:
    same = tensor if tensor.is_leaf else tensor.detach()
    return with_attributes(same.clone(), tensor)

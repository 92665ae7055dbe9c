"""The places of a module's tensors: registered, in plain attributes, or derived.

In eager mode a view of a parameter follows it, in memory and in gradients, and so does
a tensor that was computed from it. A copy of either would be a constant.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import memory, with_attributes


class Origins:
    """The registered tensors of a module, as the origins of others."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._ids = {id(tensor) for tensor in tensors}
        self._memory = {memory(tensor) for tensor in tensors} - {None}

    def hold(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of them, or shares memory with one."""
        return id(tensor) in self._ids or memory(tensor) in self._memory

    def lead_to(self, tensor: Tensor) -> bool:
        """Return whether a tensor is, shares or was computed from one of them."""
        return self.hold(tensor) or any(
            id(getattr(node, "variable", None)) in self._ids
            for node in graph_nodes([tensor])
        )


def check_apart(function: str, model: nn.Module) -> None:
    """Refuse two registered tensors that hold the same numbers in memory.

    In eager mode a step on one of them changes the other.
    """
    groups: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (where := memory(tensor)) is not None:
            groups.setdefault(where, {}).setdefault(id(tensor), (name, tensor))
    for group in groups.values():
        names, tensors = zip(*group.values(), strict=True)
        if len(tensors) > 1 and _overlap(tensors):
            raise TypeError(
                f"{function}({type(model).__name__}): expected parameters and buffers "
                f"with memory of their own, or one tensor under several names, got "
                f"several on one memory: {', '.join(map(repr, names))}. Tie them by "
                f"assigning the tensor itself (b.weight = a.weight), or clone one."
            )


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Return whether any two tensors on one memory have numbers in common."""
    views = sorted((_View(x) for x in tensors if x.numel()), key=lambda x: x.start)
    most: Any = 10**6  # steps, far more than ordinary views need
    for number, view in enumerate(views):
        for other in views[number + 1 :]:
            if other.start >= view.stop:
                break
            try:
                if np.shares_memory(np.asarray(view), np.asarray(other), most):
                    return True
            except RuntimeError:  # too hard
                return True
    return False


class _View:
    """The bytes of a tensor for numpy, which counts strides and reads no number."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        sides = [*zip(tensor.shape, tensor.stride(), strict=True)]
        self.start = tensor.storage_offset() * size
        self.stop = self.start + size * (1 + sum((n - 1) * step for n, step in sides))
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for _, step in sides),
            "typestr": f"|V{size}",
            "data": (1 + self.start, True),
        }


Container = dict[Any, Any] | list[Any]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch itself gives a module."""


class Placeholder(nn.Parameter):
    """A placeholder of a value, on the device `meta`; reading a value raises.

    An ordinary tensor there would not do: some kernels take it together with real ones
    and read memory outside of both.
    """

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


def renormalised(model: nn.Module) -> set[int]:
    """Return the ids of the tables that `max_norm` rewrites in the forward pass."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, tables) and module.max_norm is not None
    }


def only_of_torch(model: nn.Module) -> bool:
    """Return whether a forward pass runs modules of torch itself and nothing else."""
    return all(
        type(module).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and not private.has_forward_hooks(module)
        and not any(_is_others(each) for each in vars(module).values())
        for module in model.modules()
    )


def _is_others(value: Any) -> bool:
    """Return whether a value is a function of others than torch, as an activation."""
    written = callable(value) and not isinstance(value, type | nn.Module)
    return written and not str(getattr(value, "__module__", "")).startswith("torch")


def duplicate(model: nn.Module, placeholders: dict[int, Any]) -> nn.Module:
    """Copy a module with its tensors, by id, replaced wherever they are held.

    Views and results of them are placeholders until the forward pass computes them, as
    the old `torch.nn.utils.weight_norm` does.
    """
    origins, memo = Origins(model), dict(placeholders)
    for *_, value in entries(attributes(model, set())):
        # An unregistered parameter: its class copies it unseen.
        if isinstance(value, nn.Parameter) and origins.hold(value):
            memo.setdefault(id(value), placeholder(value, StaleParam))
    with _Copying(origins):
        skeleton = copy.deepcopy(model, memo)
        for _, tensor in named_tensors(model):
            marks = copy.deepcopy(vars(tensor), memo)
            vars(placeholders[id(tensor)]).update(marks)
    return skeleton


class _Copying(TorchFunctionMode):
    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        if self._origins.lead_to(tensor):
            return placeholder(tensor, StaleParam)
        # Torch copies leaves only; other results are constants here.
        if tensor.is_leaf:
            return func(*args)
        return with_attributes(tensor.detach().clone(), tensor)


def placeholder(tensor: Tensor, kind: type[Placeholder] = Placeholder) -> Placeholder:
    """Return a placeholder of a tensor."""
    with modes.without_subclasses():
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        return empty.as_subclass(kind)


class Slots:
    """The places of tensors in a module of placeholders, and its other containers.

    Attributes:
        registered: by first name, the registries and keys that hold a tensor.
        detached: tensors that are neither parameters nor buffers, and their places.
        state: the containers that a call may change, and their contents before it.
    """

    def __init__(self, skeleton: nn.Module, firsts: dict[int, str]) -> None:
        registries = [
            held for m in skeleton.modules() for held in private.registered(m)[:2]
        ]
        containers = attributes(skeleton, set(firsts))
        self.registered = _slot_paths(registries, firsts)
        self._referenced = _slot_paths(containers, firsts)
        self.detached = [
            (container, key, value)
            for container, key, value in entries(containers)
            if isinstance(value, Tensor)
            and id(value) not in firsts
            and not isinstance(value, StaleParam)
        ]
        hooked = [each for m in skeleton.modules() for each in private.hooks(m)]
        changing = registries + containers + [each for each in hooked if each]
        self.state: State = [(each, taken(each)) for each in changing]
        self._empty = [each for each in hooked if not each]

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put values wherever the module holds tensors, and copies of detached ones."""
        for places in (self.registered, self._referenced):
            for name, keys in places.items():
                for container, key in keys:
                    container[key] = values[name]
        for container, key, value in self.detached:
            container[key] = with_attributes(value.clone(), value)

    def end(self) -> None:
        """End a call: restore the containers."""
        restore(self.state)
        if any(self._empty):  # asked first, since there are many
            for each in self._empty:
                each.clear()


def attributes(model: nn.Module, tensors: set[int]) -> list[Container]:
    """Return the attributes of each module, and every list and dictionary below them.

    Attributes of parameters and buffers count, and modules that are not registered.

    Raises:
        TypeError: a tuple holds one of `tensors`: its entry cannot be exchanged.
    """
    containers: list[Container] = []
    seen = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        _look_into(module, name, tensors, seen, containers)
    for name, marks in of_tensors(model).items():
        _collect(marks, name, tensors, seen, containers)
    return containers


def of_tensors(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that users put on parameters and buffers, by name."""
    owned = {name: vars(tensor) for name, tensor in named_tensors(model)}
    return {name: attributes for name, attributes in owned.items() if attributes}


def _slot_paths(
    containers: Sequence[Any], names: dict[int, str]
) -> dict[str, list[tuple[Any, Any]]]:
    """Return, by name, each container and key (or index) that holds the tensor."""
    paths: dict[str, list[tuple[Any, Any]]] = {}
    for container, key, value in entries(containers):
        if id(value) in names:
            paths.setdefault(names[id(value)], []).append((container, key))
    return paths


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
    """Return a copy of the contents of a container, which `restore` puts back."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, list | deque):
        return [*container]
    if isinstance(container, Fields):
        return container.contents()
    has_copy = isinstance(container, set | np.ndarray)
    return container.copy() if has_copy else container[:]


def same(container: Any, before: Any) -> bool:
    """Return whether a container holds the objects, or the numbers, of before."""
    if isinstance(container, dict):
        return (
            len(container) == len(before)
            and all(map(is_, container.values(), before.values()))
            and all(map(is_, container, before))
        )
    if isinstance(container, list | deque):
        return len(container) == len(before) and all(map(is_, container, before))
    if isinstance(container, Fields):
        return same(container.contents(), before)
    if isinstance(container, np.ndarray):
        return container.dtype == before.dtype and _bits(container) == _bits(before)
    return container == before


def _bits(array: np.ndarray) -> tuple[Any, bytes]:
    return array.shape, array.tobytes()


def put(container: Any, key: Any, value: Any) -> None:
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


def restore(state: State) -> None:
    """Restore the contents of containers; after an interrupt, call it again."""
    for container, before in state:
        if same(container, before):
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


def entries(containers: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each entry of containers: the container, its key or index, the value."""
    for container in containers:
        is_dict = isinstance(container, dict)
        for key, value in container.items() if is_dict else enumerate(container):
            yield container, key, value


def children(value: Any) -> list[Any]:
    """Return the entries of a list or tuple, or the values of a dictionary."""
    return list(value.values() if isinstance(value, dict) else value)


def _look_into(
    module: nn.Module, path: str, tensors: set[int], seen: set[int], containers: list
) -> None:
    """Append the containers among the plain attributes of a module."""
    containers += [vars(module), private.registered(module)[2]]
    for key, value in vars(module).items():
        if key not in _OF_EVERY_MODULE:
            _collect(value, f"{path}.{key}".lstrip("."), tensors, seen, containers)


def _collect(
    value: Any, path: str, tensors: set[int], seen: set[int], containers: list
) -> None:
    """Append the lists and dictionaries that `value` is or holds."""
    if id(value) in seen:
        return
    if isinstance(value, nn.Module):
        for child in value.modules():
            seen.add(id(child))
            containers += private.registered(child)[:2]
            _look_into(child, path, tensors, seen, containers)
    if not isinstance(value, list | dict | tuple):
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        containers.append(value)
    elif any(id(child) in tensors for child in value):
        raise TypeError(
            f"make_functional_with_buffers(model): expected parameters in modules, "
            f"lists or dictionaries, got one in the tuple {path!r}. Make it a list."
        )
    for child in children(value):
        _collect(child, path, tensors, seen, containers)

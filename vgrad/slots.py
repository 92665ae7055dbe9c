"""Where a module holds its tensors: registered, or in a plain attribute."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vgrad import checks

Container = dict[Any, Any] | list[Any]


def check_plain(model: Any) -> None:
    """Refuse what cannot be copied or exchanged tensor by tensor."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if not isinstance(model, nn.Module) or isinstance(
        model, (torch.jit.ScriptModule, *wrappers)
    ):
        raise TypeError(
            f"make_functional_with_buffers({type(model).__name__}): expected a plain "
            f"torch.nn.Module. Pass the module itself, before it was scripted or "
            f"wrapped (`wrapped.module`)."
        )
    lazy = [
        name
        for name, tensor in named_tensors(model)
        if torch.nn.parameter.is_lazy(tensor)
    ]
    if lazy:
        raise TypeError(
            f"make_functional_with_buffers({type(model).__name__}): expected "
            f"initialised tensors, got lazy ones in {checks.listed(lazy)}. Run the "
            f"model once on a batch first."
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, then every buffer, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def persistent(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that a `state_dict()` holds."""
    return {
        id(tensor)
        for module in model.modules()
        for key, tensor in module._buffers.items()
        if key not in module._non_persistent_buffers_set
    }


def renormalised(model: nn.Module) -> set[int]:
    """Return the ids of the tables that `max_norm` rewrites in the forward pass."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, tables) and module.max_norm is not None
    }


def duplicate(model: nn.Module, placeholders: dict[int, Any]) -> nn.Module:
    """Copy a module with its tensors, by id, replaced wherever they are held.

    Results of a computation that a module keeps as an attribute, as the old
    `torch.nn.utils.weight_norm` does, cannot be copied by torch; they are cut off their
    graph, for the forward pass computes them anew.
    """
    memo = dict(placeholders)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    return copy.deepcopy(model, memo)


def registries(model: nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries in which the modules register tensors."""
    return [
        held
        for module in model.modules()
        for held in (module._parameters, module._buffers)
    ]


def attributes(model: nn.Module, tensors: set[int]) -> list[Container]:
    """Return each module's attributes, and the containers in them that hold a tensor.

    Raises:
        TypeError: a tuple holds one: its entry cannot be exchanged.
    """
    found: list[Container] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        found.append(vars(module))
        skipped = ("_parameters", "_buffers", "_modules")
        for key, value in vars(module).items():
            if key not in skipped:
                _collect(value, f"{name}.{key}".lstrip("."), tensors, seen, found)
    return found


def places(
    containers: Sequence[Any], names: dict[int, str]
) -> dict[str, list[tuple[Any, Any]]]:
    """Return, by name, each container and key (or index) that holds the tensor."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    for container in containers:
        is_dict = isinstance(container, dict)
        for key, value in container.items() if is_dict else enumerate(container):
            if id(value) in names:
                found.setdefault(names[id(value)], []).append((container, key))
    return found


def restore(container: Container, before: Container) -> None:
    """Make a container what it was, keeping the object."""
    if isinstance(container, dict):
        container.clear()
        container.update(before)
    else:
        container[:] = before


def _collect(
    value: Any, path: str, tensors: set[int], seen: set[int], found: list[Container]
) -> None:
    """Append the lists and dictionaries below `value` that hold one of `tensors`."""
    if not isinstance(value, list | dict | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    children = value.values() if isinstance(value, dict) else value
    if any(id(child) in tensors for child in children):
        if isinstance(value, tuple):
            raise TypeError(
                f"make_functional_with_buffers(model): expected parameters in modules, "
                f"lists or dictionaries, got one in the tuple {path!r}. Make it a list."
            )
        found.append(value)
    for child in children:
        _collect(child, path, tensors, seen, found)

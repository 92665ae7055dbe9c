"""What tensors, modules and ops keep to themselves.

Torch documents none of it, but its own Python code relies on all of it: on `_version`,
`_base` and the hooks of a tensor in torch/_tensor.py, on `_make_subclass` in
torch/nn/parameter.py, on storages in torch/multiprocessing/reductions.py, on the
registries and hooks of modules in torch/nn/modules/module.py, on the counter of cached
blocks in torch/nn/utils/parametrize.py, on the schemas of ops in torch/_ops.py, on
comparisons of tensors in torch/_dynamo/guards.py. Documented
attributes of the same meaning would end the need.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.utils import parametrize

from vgrad.torch_private.lazy import Lazy
from vgrad.torch_private.levels import outside

__all__ = ["GLOBAL_HOOKS", "GRAPH", "HOOKS", "IS_VIEW", "MEMORY", "OPS"]
__all__ += ["BatchNorm", "NormBase"]

GRAPH = ("_grad_fn", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Private attributes that tell of a tensor's graph."""

MEMORY = ("_version", "_base")
"""Private attributes that tell of a tensor's memory."""

IS_VIEW = Tensor._is_view
"""The method that does the same."""

OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""The classes of what `torch.ops` holds."""

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Where a module keeps the hooks on its calls."""

GLOBAL_HOOKS = tuple(getattr(modules, f"_global{name}") for name in HOOKS)
"""Hooks on the calls of all modules, by number."""


def version_of(tensor: Tensor) -> int:
    """Return how often the memory of a tensor was written to in place."""
    return tensor._version


def like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what tells whether other tensors are like these in all but their values.

    Compares classes, shapes, strides, dtypes, devices, and which of them require grad
    if grad mode is on, a tenth of a microsecond for each. No tensor may be there twice.
    """
    # None: no size is dynamic.
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


def with_attributes(stand_in: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the attributes that users put on the one it stands for.

    Example:
        >>> weight = torch.ones(2)
        >>> weight.tau = 3.0
        >>> with_attributes(weight.clone(), weight).tau
        3.0
    """
    if attributes := vars(tensor):
        vars(stand_in).update({**attributes, **vars(stand_in)})
    return stand_in


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the tensor that `tensor` is a view of; None if it is no view."""
    return tensor._base if tensor._is_view() else None


def leaf(value: Tensor) -> Tensor:
    """Return a leaf of the same memory that requires grad.

    Inside a transform `requires_grad_()` raises, even on tensors from outside.
    """
    with outside():
        return value.detach().requires_grad_()


def memory(tensor: Tensor) -> int | None:
    """Return an address that tells memory apart; None without ordinary storage."""
    if isinstance(tensor, Lazy):
        tensor = tensor.root
    if not torch._C._has_storage(tensor):
        return None
    return tensor.untyped_storage()._cdata


def storage(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to the memory, equal for all tensors that share it."""
    return StorageWeakRef(tensor.untyped_storage())


def has_hooks(tensor: Tensor) -> bool:
    """Tell whether hooks wait for the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def registered(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the very dictionaries of a module's parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def persistent(module: nn.Module) -> Iterator[Tensor | None]:
    """Yield the buffers of a module that its `state_dict()` holds."""
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield buffer


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module is what `torch.compile` makes of another one."""
    return "_orig_mod" in module._modules


def keeps_parametrized() -> bool:
    """Return whether a block of `parametrize.cached()` runs: results stay in there."""
    return parametrize._cache_enabled > 0


def copied_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that a copy has: compiled code is not one."""
    return {k: v for k, v in vars(module).items() if k != "_compiled_call_impl"}


def hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the very dictionaries of hooks on calls, and of what is known of each."""
    names = ("_forward_", "_backward_")
    return [held for name, held in vars(module).items() if name.startswith(names)]


def has_forward_hooks(module: nn.Module) -> bool:
    """Tell whether hooks run when a module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Tell whether hooks run when a gradient passes a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def makes_memory(op: Any) -> bool:
    """Tell whether an op returns nothing but memory of its own."""
    returns = getattr(getattr(op, "_schema", None), "returns", ())
    return bool(returns) and all(each.alias_info is None for each in returns)


def shared(op: Any) -> Iterator[tuple[int, str]]:
    """Yield place and name of what an op may return the memory of."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None:
            yield place, argument.name


def written(op: Any) -> Iterator[tuple[int, str, bool]]:
    """Yield place, name and whether by keyword only of what an op writes into."""
    packet = isinstance(op, torch._ops.OpOverloadPacket)
    for each in [getattr(op, name) for name in op.overloads()] if packet else [op]:
        for place, argument in enumerate(each._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield place, argument.name, argument.kwarg_only

"""What a graph was captured for: arguments without their values, torch's switches."""

from typing import Any

import torch
from torch import Tensor, nn

from vgrad import tree
from vgrad.conditions import Unrepeatable
from vgrad.persample.rules.table import RULES
from vgrad.torch_private import kernels, levels, modes, tracing

_KINDS = {Tensor, nn.Parameter, nn.Buffer}


def signature(arguments: Any, tensors: list[Tensor]) -> list[Any]:
    """Describe arguments, and append their tensors in the order of their leaves.

    Raises:
        Unrepeatable: a tensor is of another class than torch's own, or not strided.
    """
    found: list[Any] = []
    _describe(arguments, tensors, found)
    return found


def _describe(value: Any, tensors: list[Tensor], found: list[Any]) -> None:
    kind = type(value)
    if kind in _KINDS:
        tensors.append(value)
        if value.layout is not torch.strided:
            raise Unrepeatable(f"an argument is a tensor of layout {value.layout}")
        found.append(
            (
                value.shape,
                value.stride(),
                value.dtype,
                value.device,
                value.requires_grad,
                value.is_complex() and (value.is_conj(), value.is_neg()),
            )
        )
    elif kind is dict:
        found.append(tuple(value))
        for each in value.values():
            _describe(each, tensors, found)
    elif kind is tuple or kind is list or hasattr(kind, "_fields"):
        found.append((kind, len(value)))
        for each in value:
            _describe(each, tensors, found)
    elif isinstance(value, Tensor):
        raise Unrepeatable(f"an argument is a {kind.__module__}.{kind.__qualname__}")
    elif kind is float:
        found.append((kind, value.hex()))
    else:
        leaves, spec = tree.tree_flatten(value)
        found.append(spec)
        for leaf in leaves:
            if leaf is value:
                found.append((kind, value))
            else:
                _describe(leaf, tensors, found)


def surroundings() -> tuple:
    """Return what else decides what an op does: torch's switches, and all rules."""
    casts = None
    if modes.autocast_is_on():
        casts = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        )
    return (
        casts,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        *(kernels.fp32_precision(*op) for op in _ROUNDING),
        list(RULES.values()),
    )


_ROUNDING = tuple(
    (backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")
)
"""The ops for which torch has a switch that lets float32 be rounded."""


def is_watched() -> bool:
    """Tell whether transforms or modes are on, which a graph would not answer to."""
    return bool(
        levels.inside_transform() or modes.function_modes() or tracing.dispatch_modes()
    )

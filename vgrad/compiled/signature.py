"""What a graph was captured for: arguments without their values, torch's switches.

Switches that kernels read themselves are not part of it where a replay follows them:
reduced sums of half precision, cuDNN's choices, warnings.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vgrad import tree
from vgrad.compiled.guards import description, is_plain
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
    places: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(id(tensor), place)
    if len(places) < len(tensors):  # the loss may ask whether two are the same
        found.append([places[id(tensor)] for tensor in tensors])
    return found


def _describe(value: Any, tensors: list[Tensor], found: list[Any]) -> None:
    kind = type(value)
    if kind in _KINDS:
        tensors.append(value)
        if value.layout is not torch.strided:
            raise Unrepeatable(f"an argument is a tensor of layout {value.layout}")
        found.append(kind)
        found.append(description(value))
    elif kind is dict:
        found.append(tuple(value))
        for each in value.values():
            _describe(each, tensors, found)
    elif kind is tuple or kind is list or hasattr(kind, "_fields"):
        found.append((kind, len(value)))
        for each in value:
            _describe(each, tensors, found)
    elif value is None or kind is bool or kind is int or kind is str:
        found.append((kind, value))
    else:
        leaves, spec = tree.tree_flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            found.append(spec)
            for leaf in leaves:
                _describe(leaf, tensors, found)
        elif is_plain(value):  # as text: 0.0 is not -0.0, and nan is nan
            found.append((kind, repr(value)))
        elif callable(value):  # followed as what the function closes over is
            found.append(id(value))
        else:
            raise Unrepeatable(
                f"an argument is a {kind.__module__}.{kind.__qualname__}"
            )


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
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        *[allowed() for allowed in _ATTENTION],
        *[kernels.fp32_precision(*op) for op in _ROUNDING],
        *modes.function_modes(),
        *RULES.values(),
    )


_ATTENTION = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
"""The forms of attention that `torch.nn.attention.sdpa_kernel` switches."""

_ROUNDING = tuple(
    (backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")
)
"""The ops for which torch has a switch that lets float32 be rounded."""


def is_watched() -> bool:
    """Tell whether transforms or modes are on, which a graph would not answer to.

    The mode of `torch.set_default_device` only matters to what makes tensors.
    """
    return bool(
        levels.inside_transform()
        or tracing.dispatch_modes()
        or torch.is_anomaly_enabled()
        or any(type(each) is not modes.DeviceMode for each in modes.function_modes())
    )

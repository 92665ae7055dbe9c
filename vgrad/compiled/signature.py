"""What a graph was captured for: arguments without their values, torch's switches.

Switches that kernels read themselves are not part of it where a replay follows them:
reduced sums of half precision, cuDNN's choices, warnings.
"""

import enum
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vgrad import tree
from vgrad.compiled.guards import is_plain
from vgrad.conditions import Unrepeatable
from vgrad.persample.rules.table import RULES
from vgrad.torch_private import kernels, modes, tracing

_KINDS = {Tensor, nn.Parameter, nn.Buffer}
_LAYOUT = operator.attrgetter("layout")


class Signature(NamedTuple):
    """What a graph is captured for.

    Attributes:
        key: the structure of the arguments, without shapes, and torch's switches.
        distinct: the tensors, each of them once.
    """

    key: tuple[list, tuple]
    distinct: list[Tensor]


def signature(arguments: Any, tensors: list[Tensor]) -> Signature:
    """Describe arguments, and append their tensors in the order of their leaves.

    Raises:
        Unrepeatable: a tensor is of another class than torch's own, or not strided.
    """
    found: list[Any] = []
    _describe(arguments, tensors, found)
    if [*map(_LAYOUT, tensors)].count(torch.strided) < len(tensors):
        raise Unrepeatable("an argument is a tensor that is not strided")
    if any(
        map(vars, tensors)
    ):  # attributes that users put there, which a loss can read
        found.append([[*map(_noted, vars(each).items())] for each in tensors])
    if not torch.is_grad_enabled():  # otherwise it is compared with the shapes
        found.append([tensor.requires_grad for tensor in tensors])
    distinct = dict(zip(map(id, tensors), tensors, strict=True))
    if len(distinct) < len(tensors):  # the loss may ask whether two are the same
        ids = [*distinct]
        found.append([ids.index(id(tensor)) for tensor in tensors])
    return Signature((found, _surroundings()), [*distinct.values()])


def _describe(value: Any, tensors: list[Tensor], found: list[Any]) -> None:
    kind = type(value)
    if kind in _KINDS:
        tensors.append(value)
        found.append(kind)
    elif kind is dict:
        found.append(tuple(value))
        kinds = [*map(type, value.values())]
        if _KINDS.issuperset(kinds):
            tensors += value.values()
            found += kinds
        else:
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
        elif callable(value) or isinstance(value, enum.Enum):  # followed by `Closed`
            parts = (getattr(value, name, value) for name in ("__self__", "__func__"))
            found.append([*map(id, parts)])
        else:
            raise Unrepeatable(
                f"an argument is a {kind.__module__}.{kind.__qualname__}"
            )


def _noted(item: tuple[str, Any]) -> tuple:
    """Describe an attribute of a tensor, which `Closed` follows if it is not plain."""
    name, value = item
    return name, type(value), repr(value) if is_plain(value) else id(value)


def in_words(distinct: Sequence[Tensor]) -> str:
    """Say what a capture is of: tensors in the order of arguments, torch's switches.

    Example:
        >>> in_words([torch.ones(2, 3), torch.tensor(1)]).partition(";")[0]
        'float32 [2, 3], int64 []'
    """
    tensors = [f"{_short(each.dtype)} {list(each.shape)}" for each in distinct]
    switches = [f"{torch.get_num_threads()} threads"]
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = _short(torch.get_autocast_dtype(device))
            switches.append(f"autocast of {device} to {dtype}")
    if torch.is_inference_mode_enabled():
        switches.append("inference mode")
    elif not torch.is_grad_enabled():
        switches.append("no grad")
    if torch.are_deterministic_algorithms_enabled():
        switches.append("deterministic")
    return "; ".join([", ".join(tensors), *switches])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _surroundings() -> tuple:
    """Return what else decides what an op does: torch's switches, and all rules."""
    casts = None
    if modes.autocast_is_on():
        casts = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        )
    return (
        casts,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mha.get_fastpath_enabled(),
        nn.Module.__call__,
        nn.Module.__getattr__,
        *[allowed() for allowed in _ATTENTION],
        *map(kernels.fp32_precision, *_ROUNDING),
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

_ROUNDING = ("cuda",) * 3 + ("mkldnn",) * 3, ("matmul", "conv", "rnn") * 2
"""The backends and ops for which torch has a switch that lets float32 be rounded."""


def is_watched() -> bool:
    """Tell whether transforms or modes are on, which a graph would not answer to.

    The mode of `torch.set_default_device` only matters to what makes tensors.
    """
    return bool(
        modes.inside_transform()
        or tracing.dispatch_modes()
        or torch.is_anomaly_enabled()
        or any(type(each) is not modes.DeviceMode for each in modes.function_modes())
    )

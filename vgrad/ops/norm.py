"""Normalisations.

B samples, C channels, N the batch of each
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.devices import is_host
from vgrad.factors.base import Dense
from vgrad.functional.batch_norm import mended
from vgrad.ops.record import Kind, Recording, Rule, register
from vgrad.torch_private import kernels, modes


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> dict:
    """`out = normalised * weight + bias`; normalised again rather than kept."""
    count = len(normalized_shape)

    def scale(g: Tensor) -> Dense:
        args: tuple = (None, None, eps)
        if is_host(input.device):  # whose kernel takes twice as long without them
            ones = input.new_ones(normalized_shape)
            args = (ones, torch.zeros_like(ones), eps)
        normal = F.layer_norm(input, normalized_shape, *args)
        return _summed(_times(normal, g), count)

    return {"weight": scale, "bias": lambda g: _summed(g, count)}


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> dict:
    """`out = normalised * weight`."""
    count = len(normalized_shape)

    def scale(g: Tensor) -> Dense:
        return _summed(_times(F.rms_norm(input, normalized_shape, eps=eps), g), count)

    return {"weight": scale}


def _group_norm(
    record: Recording,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the groups of all samples as the groups of one."""

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, record.size * num_groups, weight, bias, eps)

    return _by_channels(record, run, input, weight, bias)


def _batch_norm(
    record: Recording,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Scale and shift the channels of all samples as the channels of one."""

    def run(x: Tensor, *channels: Tensor | None) -> Tensor:
        output = F.batch_norm(x, *channels, training=False, eps=eps)
        return mended(F.batch_norm, output)

    return _by_channels(record, run, input, running_mean, running_var, weight, bias)


def _instance_norm(
    record: Recording,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Normalise the channels of all samples as the channels of one."""
    if use_input_stats and running_mean is not None:
        return None  # updates its statistics, which have to be copied first

    def run(x: Tensor, *channels: Tensor | None) -> Tensor:
        use = use_input_stats
        output = F.instance_norm(x, *channels, use_input_stats=use, eps=eps)
        return mended(F.instance_norm, output)

    return _by_channels(record, run, input, running_mean, running_var, weight, bias)


def _by_channels(
    record: Recording, run: Callable, input: Tensor, *channels: Tensor | None
) -> Tensor:
    """Run a normalisation on `[n, B * C, ...]`, with values for each of B * C channels.

    The kernel's gradients of these values are then the gradients of each sample.
    """
    x = record.physical(input)
    copies = [None if values is None else record.copies(values) for values in channels]
    with record.below():
        folded = x.transpose(0, 1).flatten(1, 2)
        flat = [None if values is None else values.flatten() for values in copies]
        output = run(folded, *flat)
        sizes = (folded.shape[0], record.size, *x.shape[2:])
        output = kernels.unsafe_view(output, sizes)
        return record.logical(output.transpose(0, 1))


def _times(normal: Tensor, g: Tensor) -> Tensor:
    in_place = normal.dtype == g.dtype and not modes.is_batched(g)
    return normal.mul_(g) if in_place else normal * g


def _summed(tensor: Tensor, count: int) -> Dense:
    """Sum over all axes but the first, of the samples, and the last `count`."""
    axes = tuple(range(1, tensor.ndim - count))
    return Dense(tensor.sum(axes) if axes else tensor)


register(F.layer_norm, rule=Rule(_layer_norm, ("weight", "bias"), F.layer_norm))
register(F.rms_norm, rule=Rule(_rms_norm, ("weight",), F.rms_norm))
register(F.group_norm, recorded=_group_norm)
_of_channels = F.layer_norm, F.rms_norm, F.group_norm
register(*_of_channels, autocast=(Kind.NORM, Kind.FLOAT32))
register(F.batch_norm, recorded=_batch_norm, autocast=Kind.NORM)
register(F.instance_norm, recorded=_instance_norm, autocast=Kind.NORM)

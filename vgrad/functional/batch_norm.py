"""Batch normalisation has no per-sample gradient; GroupNorm replaces it.

With batch statistics the output for one sample depends on all the others. On a batch of
one the layer still runs, with wrong numbers. Members of an ensemble have batches of
their own, so batch norm runs there; new statistics come from
`FunctionalModel.call_and_update`, by `ensemble/gradients.py`.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgrad.functional import guards
from vgrad.generators import RNG_LOCK
from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private

_TRAINING = 5
"""The place of the argument `training` in each of these."""

_REFUSED = {"batch_norm", "native_batch_norm", "cudnn_batch_norm"}
_REFUSED |= {"miopen_batch_norm", "_native_batch_norm_legit", "_batch_norm_impl_index"}
_REFUSED |= {"_native_batch_norm_legit_functional"}
_ALWAYS_REFUSED = {"batch_norm_stats", "_batch_norm_with_update"}


STATISTICS = {F.batch_norm: 1, F.instance_norm: 1}
STATISTICS |= {torch.batch_norm: 3, torch.instance_norm: 3}
"""The place of the first of two running statistics, which training writes into."""


def updated_statistics(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the running statistics that a norm updates in place."""
    if func not in STATISTICS:
        return []
    by_default = func is F.instance_norm
    training = kwargs.get("training", kwargs.get("use_input_stats", by_default))
    if not (args[5] if len(args) > 5 else training):
        return []
    first = STATISTICS[func]
    running = [kwargs.get("running_mean"), kwargs.get("running_var")]
    running += args[first : first + 2]
    return [tensor for tensor in running if isinstance(tensor, Tensor)]


def normalises(function: Callable) -> bool:
    """Return whether a function of torch may normalise by statistics of its batch."""
    name = getattr(function, "__name__", "").partition(".")[0]
    return name in _REFUSED | _ALWAYS_REFUSED or function in STATISTICS


def refuse_batch_statistics(
    function: Callable,
    args: tuple,
    kwargs: dict,
    is_shared: Callable[[Tensor], bool] = lambda _: False,
) -> None:
    """Raise if a call of a torch function normalises by statistics of its batch.

    An input that all samples share, such as a weight, has statistics of its own.
    """
    name, _, overload = getattr(function, "__name__", "").partition(".")
    training = name in _ALWAYS_REFUSED or overload == "no_stats"
    if name in _REFUSED and overload != "no_stats":
        positional = args[_TRAINING] if len(args) > _TRAINING else False
        training = kwargs.get("training", positional)
    if training and not is_shared(args[0] if args else kwargs["input"]):
        raise ValueError(
            f"{name}(training=True): expected a loss that treats every sample by "
            f"itself, got batch normalisation with batch statistics, which has no "
            f"per-sample gradient. Use vgrad.replace_batch_norm(model) or, for layers "
            f"with running statistics, evaluation mode (fmodel.eval())."
        )


def mended(function: Callable, output: Any) -> Any:
    """Make the gradient of a normalisation's output contiguous."""
    # The kernel of torch 2.13 for fixed statistics on a CPU reads a transposed gradient
    # of a batch of one as a contiguous one: wrong numbers, in plain autograd too.
    if function in STATISTICS and output.requires_grad and not modes.is_wrapped(output):
        output.register_hook(Tensor.contiguous)
    return output


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Return a copy of a module with GroupNorm in the place of every BatchNorm.

    Weight, bias, `eps`, device, dtype and mode are kept, running statistics are not.
    A layer of C channels gets gcd(32, C) groups, or C / 2 where that would leave one
    channel each; `BatchNorm1d`, whose input may have no positions, gets one group.

    Raises:
        TypeError: a layer is lazy, has a forward pass of its own, or hooks, which would
            be lost.
        ValueError: one channel without positions, whose outputs would be the bias.

    Reference: Wu and He, Group Normalization, arXiv 1803.08494.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
        >>> replace_batch_norm(model)[1].num_groups
        32
    """
    guards.check_plain("replace_batch_norm", model)
    with RNG_LOCK:  # no other thread computes on the module
        copied = copy.deepcopy(model)
    memo: dict[int, nn.Module] = {}

    def replaced(module: nn.Module) -> nn.Module:
        if isinstance(module, private.BatchNorm):
            return memo.setdefault(id(module), _group_norm(module))
        children = private.registered(module)[2]
        for name, child in children.items():
            if child is not None:
                children[name] = replaced(child)
        return module

    return replaced(copied)


def _group_norm(layer: Any) -> nn.GroupNorm:
    kind, channels = type(layer), layer.num_features
    forward = getattr(layer.forward, "__func__", None)  # of the object, too
    plain = forward in (private.BatchNorm.forward, nn.SyncBatchNorm.forward)
    hooked = private.has_forward_hooks(layer) or private.has_backward_hooks(layer)
    if not plain or hooked or kind.__call__ is not nn.Module.__call__:
        raise TypeError(
            f"replace_batch_norm(model): expected layers of torch.nn without hooks, "
            f"got a {kind.__name__} that does more. Replace it by hand, as the page "
            f"docs/sharp_edges.md does."
        )
    if channels == 1 and not issubclass(kind, nn.BatchNorm2d | nn.BatchNorm3d):
        raise ValueError(
            f"replace_batch_norm(model): expected two channels at least, got a "
            f"{kind.__name__} of one, whose outputs would all be the bias. Put "
            f"nn.Identity() there, or nn.GroupNorm(1, 1) if inputs have positions."
        )
    groups = 1 if issubclass(kind, nn.BatchNorm1d) else math.gcd(32, channels)
    if groups == channels:  # a group of one channel and one pixel is always zero
        groups = channels // 2 if channels % 2 == 0 else 1
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    norm.weight, norm.bias = layer.weight, layer.bias
    return norm.train(layer.training)

"""Losses of classes, which vmap would take apart into many small ops.

B samples, N the batch of each, C classes
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vgrad.ops.record import Recording, register
from vgrad.torch_private import kernels

_REDUCTIONS = ("none", "mean", "sum")
"""The names of torch's numbers of reductions (torch/nn/_reduction.py)."""


def _by_name(op: Callable) -> Callable[..., Tensor | None]:
    """Return the form of a function of `torch.nn.functional`."""

    def form(
        record: Recording,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        **options: Any,
    ) -> Tensor | None:
        if size_average is not None or reduce is not None:
            return None
        options["ignore_index"] = ignore_index
        return _losses(op, record, input, target, weight, reduction, options)

    return form


def _by_number(op: Callable) -> Callable[..., Tensor | None]:
    """Return the form of the function of torch below, which autocast casts for."""

    def form(
        record: Recording,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        *smoothing: float,
    ) -> Tensor | None:
        options: Any = dict(zip(("label_smoothing",), smoothing, strict=False))
        options["ignore_index"], name = ignore_index, _REDUCTIONS[reduction]
        return _losses(op, record, input, target, weight, name, options)

    return form


def _losses(
    op: Callable,
    record: Recording,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    options: dict[str, Any],
) -> Tensor | None:
    """Run torch's own kernel on `[N, C, ...]` of all samples as one batch.

    The positions of each sample are added up then; for a mean they are divided by the
    sum of its own weights.
    """
    axis = min(1, input.ndim - 1)  # of classes
    shape = input.shape[:axis] + input.shape[axis + 1 :]
    by_class, positions = target.shape == shape, math.prod(shape)
    if not (by_class or target.shape == input.shape) or not positions:
        return None  # which torch refuses, or warns of
    tensors = [each for each in (input, target, weight) if each is not None]
    own = weight is not None and record.is_batched(weight)
    if own or any(map(record.is_parameter, tensors)) or reduction not in _REDUCTIONS:
        return None
    x, y = record.physical(input), record.physical(target)
    size = len(x)
    with record.below():
        if axis:
            x, y = x.flatten(0, 1), y.flatten(0, 1)
        losses = op(x, y, weight, reduction="none", **options)
        if reduction == "none":
            return record.logical(losses.view(size, *shape))
        # To select the only position would write a whole gradient of zeros.
        own = (size,) if positions == 1 else (size, positions)
        sums = losses.view(own) if positions == 1 else losses.view(own).sum(1)
        if reduction == "sum":
            return record.logical(sums)
        if not by_class:
            return record.logical(sums if positions == 1 else sums / positions)
        counts = (y != options["ignore_index"]).view(own)
        if weight is not None:
            counts = weight[y.view(own).where(counts, 0)] * counts
        counts = counts if positions == 1 else counts.sum(1)
        if weight is not None and options.get("label_smoothing"):
            # Torch's is a sum of two means, one of them NaN where weights are zero.
            return record.logical(sums / counts + 0 * sums / counts)
        return record.logical(sums / counts)


register(F.cross_entropy, recorded=_by_name(F.cross_entropy))
register(F.nll_loss, recorded=_by_name(F.nll_loss))
register(kernels.cross_entropy, recorded=_by_number(F.cross_entropy))
register(kernels.nll_loss, recorded=_by_number(F.nll_loss))

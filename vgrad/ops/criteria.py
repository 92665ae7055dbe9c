"""Losses of classes, which vmap would take apart into many small ops.

B samples, N the batch of each, C classes
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vgrad.ops.record import Kind, Recording, register


def _losses(
    op: Callable,
    record: Recording,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Run torch's own kernel on `[N, C, ...]` of all samples as one batch.

    The positions of each sample are added up then; for a mean they are divided by the
    sum of its own weights.
    """
    if not (size_average is None and reduce is None):
        return None
    axis = min(1, input.ndim - 1)  # of classes
    shape = input.shape[:axis] + input.shape[axis + 1 :]
    by_class, positions = target.shape == shape, math.prod(shape)
    if not (by_class or target.shape == input.shape) or not positions:
        return None  # which torch refuses, or warns of
    tensors = [each for each in (input, target, weight) if each is not None]
    own = weight is not None and record.is_batched(weight)
    own |= any(map(record.is_parameter, tensors))
    if own or reduction not in ("none", "mean", "sum"):
        return None
    options: Any = {"label_smoothing": label_smoothing} if label_smoothing else {}
    options["ignore_index"] = ignore_index
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
        counts = (y != ignore_index).view(own)
        if weight is not None:
            counts = weight[y.view(own).where(counts, 0)] * counts
        counts = counts if positions == 1 else counts.sum(1)
        if weight is not None and label_smoothing:
            # Torch's is a sum of two means, one of them NaN where weights are zero.
            return record.logical(sums / counts + 0.0 * sums / counts)
        return record.logical(sums / counts)


for _op in (F.cross_entropy, F.nll_loss):
    register(_op, recorded=partial(_losses, _op), autocast=Kind.FLOAT32)

"""Losses of classes, which vmap would take apart into many small ops.

B samples, N the batch of each, C classes
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.ops.record import Kind, Recording, register
from vgrad.torch_private import modes


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
    tensors = [tensor for tensor in (input, target, weight) if tensor is not None]
    per_sample = weight is not None and record.is_batched(weight)
    per_sample |= any(map(record.is_parameter, tensors))
    if per_sample or reduction not in ("none", "mean", "sum"):
        return None
    options: Any = {"label_smoothing": label_smoothing} if label_smoothing else {}
    options["ignore_index"] = ignore_index
    x, y = record.physical(input), record.physical(target)
    size = len(x)
    with record.below():
        if axis:
            single = x.shape[1] == 1  # for which a view takes less
            x, y = (t.squeeze(1) if single else t.flatten(0, 1) for t in (x, y))
        losses = op(x, y, weight, reduction="none", **options)
        if reduction == "none":
            return record.logical(losses.view(size, *shape))
        # To select the only position would write a whole gradient of zeros.
        sizes = (size,) if positions == 1 else (size, positions)
        sums = losses if losses.shape == sizes else losses.view(sizes)
        sums = sums if positions == 1 else sums.sum(1)
        if reduction == "sum":
            return record.logical(sums)
        if not by_class:
            return record.logical(sums if positions == 1 else sums / positions)
        counts = y != ignore_index
        counts = counts if counts.shape == sizes else counts.view(sizes)
        if weight is not None:
            counts = weight[y.view(sizes).where(counts, 0)] * counts
        counts = counts if positions == 1 else counts.sum(1)
        if weight is not None and label_smoothing:
            # Torch's is a sum of two means, one of them NaN where weights are zero.
            return record.logical(sums / counts + 0.0 * sums / counts)
        return record.logical(sums / counts)


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Run torch's op, whose workspace is as long as the longest target of a sample."""
    x = log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1)
    counts = input_lengths, target_lengths
    inputs, lengths = (torch.as_tensor(count).reshape(-1) for count in counts)
    # One more target, of no input, is as long as any, so all samples take as much.
    longest = torch.zeros_like(targets if targets.ndim == 1 else targets[:1])
    losses = F.ctc_loss(
        F.pad(x, (0, 0, 0, 1)),
        torch.cat([targets, longest]),
        F.pad(inputs, (0, 1)),
        F.pad(lengths, (0, 1), value=targets.shape[-1]),
        blank,
        "none",
        zero_infinity,
    )[:-1]
    if reduction == "mean":
        return (losses / lengths.clamp(min=1).to(losses.device)).mean()
    return losses.sum() if reduction == "sum" else losses.view(log_probs.shape[1:-1])


register(F.ctc_loss, mapped=_ctc)
register(  # in Python, where the mode sees that it reads variances
    F.gaussian_nll_loss,
    selected=lambda _, *x, **k: partial(modes.opened(F.gaussian_nll_loss), *x, **k),
)
for _op in (F.cross_entropy, F.nll_loss):
    register(_op, recorded=partial(_losses, _op), autocast=Kind.FLOAT32)

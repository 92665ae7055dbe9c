"""Norms and weighted sums of per-sample gradients, exact where plain code is not.

B samples, P numbers in one sample's gradient of one parameter. Everything here runs in
float32 or wider with autocast off, whatever the gradients' dtype, and uses no matrix
product, since TF32 and bfloat16 modes would round its factors.
"""

import torch
from torch import Tensor

from vgrad import checks
from vgrad.typing import Params

_BLOCK = 256
"""Numbers whose squares are summed in float32 before float64 takes over.

A single float32 norm loses up to 2e-3 over 3e7 numbers on a CPU; blocks of this length
lose 1e-7 and cost the same.
"""

_ROWS = 32
"""Samples that are summed in float32 before float64 takes over."""

_LOW, _HIGH = 1e-10, 1e15
"""Between these no square that matters has left float32's range."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of numbers of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def norm_dtype(params: Params) -> torch.dtype:
    """Return the dtype of norms over all parameters: real, float32 or wider."""
    dtype = torch.float32
    for value in params.values():
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype.to_real()


def no_norms(params: Params, dtype: torch.dtype) -> Tensor:
    """Return the norms of an empty batch, [0]."""
    return next(iter(params.values())).new_zeros(0, dtype=dtype)


def zero_sums(params: Params) -> Params:
    """Return sums over no samples, {name: shape}, in the dtype of `weighted_sum`."""
    return {
        name: torch.zeros_like(value, dtype=_widest(value.dtype), requires_grad=False)
        for name, value in params.items()
    }


def rounded(sums: Params, params: Params) -> Params:
    """Round sums once, to `promote_types(dtype, float32)` of the parameters."""
    return {name: each.to(wide(params[name].dtype)) for name, each in sums.items()}


def sample_norms(grads: Params) -> Tensor:
    """L2 norm of each sample's gradient over all parameters, float64. -> [B]."""
    flat = [_flat(grad) for grad in grads.values()]
    exact = any(each.dtype == torch.float64 or each.requires_grad for each in flat)
    with torch.autocast(flat[0].device.type, enabled=False):
        if exact or checks.inside_transform():
            return _scaled_norms(flat)
        norms = torch.stack([_square_norms(each) for each in flat]).sum(0).sqrt()
        doubtful = (~((norms > _LOW) & (norms < _HIGH))).nonzero().flatten()
        if len(doubtful):
            norms[doubtful] = _scaled_norms([each[doubtful] for each in flat])
        return norms


def weighted_sum(grads: Params, weights: Tensor, keep: Tensor | None = None) -> Params:
    """Sum gradients [B, ...] over samples with `weights [B]`, for every name. Float64.

    A sample that `keep [B]` leaves out adds exactly zero, whatever its gradient and its
    weight hold. Products are rounded to `promote_types(dtype, float32)`.
    """
    return {name: _weighted(grad, weights, keep) for name, grad in grads.items()}


def _weighted(grad: Tensor, weights: Tensor, keep: Tensor | None) -> Tensor:
    dtype, widest = wide(grad.dtype), _widest(grad.dtype)
    weights = weights.to(dtype)
    with torch.autocast(grad.device.type, enabled=False):
        if grad.device.type != "cpu" or checks.inside_transform():
            column = (-1,) + (1,) * (grad.ndim - 1)
            if keep is not None:
                grad = torch.where(keep.view(column), grad, 0)
                weights = torch.where(keep, weights, 0)
            return (weights.view(column) * grad.to(dtype)).sum(0, dtype=widest)
        # Row by row a sample stays in cache; the product as a whole would be written
        # to memory and read again, which takes ten times as long. Few rows are summed
        # before float64 takes over, so that the sum does not drift as the batch grows.
        total = torch.zeros(grad.shape[1:], dtype=widest, device=grad.device)
        rows = list(range(len(grad)))
        if keep is not None:
            rows = keep.nonzero().flatten().tolist()
        for start in range(0, len(rows), _ROWS):
            part = torch.zeros(grad.shape[1:], dtype=dtype, device=grad.device)
            for row in rows[start : start + _ROWS]:
                part = part.addcmul_(grad[row].to(dtype), weights[row])
            total = total.add_(part)
        return total


def _widest(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over samples are kept: float64, or complex."""
    return torch.promote_types(dtype, torch.float64)


def _flat(grad: Tensor) -> Tensor:
    """View a gradient as [B, P] of real numbers."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    return real.reshape(len(real), -1)


def _square_norms(flat: Tensor) -> Tensor:
    """Sum of squares, [B, P] -> [B] in float64, by blocks in float32."""
    flat = flat.float()
    whole = flat.shape[1] // _BLOCK * _BLOCK
    blocks = flat[:, :whole].unflatten(1, (-1, _BLOCK))
    parts = [torch.linalg.vector_norm(blocks, dim=2)] if whole else []
    parts.append(torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True))
    return torch.cat(parts, dim=1).double().square().sum(1)


def _scaled_norms(flat: list[Tensor]) -> Tensor:
    """Norms [B] in float64; a sample is divided by its largest entry, then squared."""
    largest = torch.stack([_largest(each) for each in flat]).amax(0).detach()
    scale = torch.where(largest > 0, largest, 1.0)
    parts = [(each.double() / scale[:, None]).square().sum(1) for each in flat]
    squares = torch.stack(parts).sum(0)
    # The root has no slope at zero; zero is taken, as torch does for its norms.
    zero = squares == 0
    roots = torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())
    return scale * roots


def _largest(flat: Tensor) -> Tensor:
    """Largest absolute value, [B, P] -> [B] in float64; zero for no numbers."""
    if flat.shape[1] == 0:
        return flat.new_zeros(len(flat), dtype=torch.float64)
    return flat.abs().amax(1).double()

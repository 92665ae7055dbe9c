"""Mixtures of experts: grouped products of the rows of all samples at once.

torch has no rule of vmap for a grouped product, and would multiply the rows of one
sample after another. Here the rows of all samples that one expert multiplies are
brought together, so that there are as many products as experts.

B samples, S rows of one sample, E experts, I inputs, O outputs
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

from vgrad.factors.experts import Experts, by_expert
from vgrad.ops.record import Rule, register
from vgrad.torch_private import kernels


def _grouped(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> dict | None:
    """Rows `input [B, S, I]` times matrices `[E, I, O]`, each up to `offs [B, E]`."""
    if offs is None or bias is not None or out_dtype is not None:
        return None
    if (input.ndim, mat2.ndim, offs.ndim) != (3, 3, 2):
        return None
    return {"mat2": lambda g: Experts(input, g, mat2.shape, offs.long())}


@wrap_torch_function(lambda input, mat2, offs: (input, mat2))
def grouped_back(input: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """Multiply by the transposes, as in the derivative of a grouped product."""
    return F.grouped_mm(input, mat2.mT, offs=offs)


def _grouped_back(input: Tensor, mat2: Tensor, offs: Tensor) -> dict:
    return {"mat2": lambda g: Experts(g, input, mat2.shape, offs.long())}


def _back_by(op: Callable) -> Callable:
    """Return the derivative of a grouped product, which is one by `op`."""

    def back(input: Tensor, mat2: Tensor, offs: Tensor, *_: Any, **rest: Any) -> Any:
        return op, {"mat2": mat2, "offs": offs}

    return back


def _run(
    input: Tensor, mat2: Tensor, offs: Any, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Multiply the rows of all samples by one grouped product."""
    if input.ndim == 2:  # the same for all samples
        return F.grouped_mm(input, mat2, offs=offs)
    order, counts = by_expert(offs.long(), input.shape[1])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    rows = _Permuted.apply(input.flatten(0, 1), order, inverse)
    ends = counts[:-1].cumsum(0, dtype=torch.int32)
    out = _Permuted.apply(F.grouped_mm(rows, mat2, offs=ends), inverse, order)
    return out.unflatten(0, input.shape[:2])


class _Permuted(Function):
    """Rows in another order; torch would add their gradients up, one by one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        order, inverse = ctx.saved_tensors
        return _Permuted.apply(grads[0], inverse, order), None, None


_rule = Rule(_grouped, ("mat2",), _run, _back_by(grouped_back))
register(kernels.grouped_mm, rule=_rule, fused=True)
_rule = Rule(
    _grouped_back,
    ("mat2",),
    lambda input, mat2, offs: _run(input, mat2.mT, offs),
    _back_by(kernels.grouped_mm),
)
register(grouped_back, rule=_rule)

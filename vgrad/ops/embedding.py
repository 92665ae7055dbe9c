"""Embeddings: rows of a table, and reductions of bags of rows.

B samples, L positions, N bags, D features of a row
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.factors.rows import Rows
from vgrad.ops.record import Kind, Recording, Rule, register


def _factors(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> dict | None:
    """`out = weight[input]`; the row of `padding_idx` has no gradient."""
    if max_norm is not None:
        return None
    shape = weight.shape
    padding = None if padding_idx is None else padding_idx % len(weight)

    def rows(g: Tensor) -> Rows:
        index = input.reshape(len(input), math.prod(input.shape[1:])).long()
        outputs = g.reshape(*index.shape, g.shape[-1])
        if padding is not None:
            outputs = outputs.masked_fill((index == padding)[..., None], 0)
        factor = Rows(index, outputs, shape)
        if not scale_grad_by_freq:
            return factor
        # Each row is divided by how often the sample looks it up.
        _, at, counts = factor.keys.unique(return_inverse=True, return_counts=True)
        return Rows(index, outputs / counts[at][..., None], shape)

    return {"weight": rows}


def _getitem(record: Recording, x: Tensor, index: Any) -> Tensor | None:
    """Look up rows, or numbers, of a parameter by an index of each sample's own."""
    if not isinstance(index, Tensor) or not record.is_parameter(x) or x.ndim > 2:
        return None
    if index.dtype not in (torch.int32, torch.int64):
        return None
    with record.watching():
        index = torch.where(index < 0, index + len(x), index)
        rows = F.embedding(index, x if x.ndim == 2 else x[:, None])
        return rows if x.ndim == 2 else rows.squeeze(-1)


def _bag(
    record: Recording,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    flat = input.ndim == 1
    wrong = flat != (offsets is not None) or input.shape[-1] == 0
    wrong |= per_sample_weights is not None and mode != "sum"
    wrong |= mode not in ("sum", "mean", "max") or weight.ndim != 2
    if wrong or max_norm is not None or scale_grad_by_freq:
        return None
    with record.watching():
        rows = F.embedding(input, weight)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        member = torch.ones_like(input, dtype=torch.bool)
        if padding_idx is not None:
            member = input != padding_idx % len(weight)
        if flat:
            rows = rows[None]
            member = member & _bags(offsets, len(input), include_last_offset)
        return _reduced(rows, member[..., None], mode)


def _bags(offsets: Any, length: int, include_last_offset: bool) -> Tensor:
    """Say which of the positions are in which bag, -> [N, L]; the last has the rest."""
    starts = offsets[:-1] if include_last_offset else offsets
    ends = torch.cat([starts[1:], starts.new_full((1,), length)])
    at = torch.arange(length, device=offsets.device)
    return (at >= starts[:, None]) & (at < ends[:, None])


def _reduced(rows: Tensor, member: Tensor, mode: str) -> Tensor:
    """Reduce the members of each bag, `[N or 1, L, D]` and `[N, L, 1]` -> [N, D]."""
    if mode == "max":
        largest = torch.where(member, rows, -torch.inf).max(1).values
        return torch.where(member.any(1), largest, 0.0)
    sums = torch.where(member, rows, 0.0).sum(1)
    return sums if mode == "sum" else sums / member.sum(1).clamp(min=1)


def _mapped(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows; torch's rule for one table a sample pads only the first table.

    For a table that all share it counts the lookups of all of them.
    """
    if scale_grad_by_freq:
        weight = weight * input.new_ones((), dtype=weight.dtype)  # a table for each
    rows = F.embedding(
        input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    if padding_idx is None:
        return rows
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def _lookup(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look rows up by `torch.embedding`, which `F.embedding` calls."""
    padding = None if padding_idx < 0 else padding_idx
    return _mapped(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


register(
    F.embedding,
    rule=Rule(_factors, ("weight",)),
    mapped=_mapped,
    autocast=Kind.OWN,
)
register(torch.embedding, mapped=_lookup)
register(Tensor.__getitem__, recorded=_getitem)
register(F.embedding_bag, recorded=_bag, autocast=Kind.OWN)

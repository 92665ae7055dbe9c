"""Ops that are taken apart into simpler ones, each with its own rule."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.persample.rules.table import Recording, lowered


@lowered(F.embedding_bag)
def embedding_bag(
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
    """Look rows up, and reduce those of each bag."""
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

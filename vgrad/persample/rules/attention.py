"""Attention: one kernel for all samples, and projections that are linear layers."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vgrad.lowering import attention
from vgrad.persample.rules.table import Recording, lowered
from vgrad.torch_private import modes


@lowered(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    record: Recording,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attend with the samples folded into the batch."""
    if dropout_p and record.randomness != "different":
        return None
    q, k, v = (record.copies(each) for each in (query, key, value))
    mask, where = attn_mask, None
    if mask is not None and (record.knows(mask) or record.is_batched(mask)):
        mask, where = record.copies(mask), 0
    with record.below():
        q, k, v, mask, unfold = attention.fold(
            (0, 0, 0, where), record.size, q, k, v, mask, enable_gqa=enable_gqa
        )
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return record.logical(unfold(output))


@lowered(F.multi_head_attention_forward)
def multi_head_attention_forward(
    record: Recording,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Take torch's one call apart into projections and attention."""
    attend = modes.opened_attention(_projections)
    with record.watching():
        if query.ndim != 2:
            return attend(query, key, value, *rest, **kwargs)
        # What was one tensor stays one, since it can be projected at once.
        made = {id(each): each.unsqueeze(1) for each in (query, key, value)}
        inputs = [made[id(each)] for each in (query, key, value)]
        if (padding := kwargs.get("key_padding_mask")) is not None:
            kwargs["key_padding_mask"] = padding.unsqueeze(0)
        output, weights = attend(*inputs, *rest, **kwargs)
        return output.squeeze(1), None if weights is None else weights.squeeze(0)


def _projections(
    query: Tensor, key: Tensor, value: Tensor, weight: Any, bias: Any
) -> tuple[Tensor, ...]:
    """Project by the parts of one weight, in as few products as the inputs allow."""
    if query is key and key is value:
        return _parts(F.linear(query, weight, bias), 3)
    size = query.shape[-1]
    sizes = (size, 2 * size) if key is value else (size,) * 3
    weights = weight.split(sizes)
    biases = (None,) * 3 if bias is None else bias.split(sizes)
    if key is not value:
        return tuple(map(F.linear, (query, key, value), weights, biases))
    q = F.linear(query, weights[0], biases[0])
    return (q, *_parts(F.linear(key, weights[1], biases[1]), 2))


def _parts(projected: Tensor, count: int) -> tuple[Tensor, ...]:
    """Take `[T, N, count * E]` apart, so that N and the heads can be viewed as one."""
    parts = projected.chunk(count, dim=-1)
    if projected.shape[1] == 1:
        return parts
    return tuple(part.contiguous() for part in parts)

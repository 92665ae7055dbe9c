"""Attention: no parameters of its own, but one kernel for all samples."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.lowering import attention
from vgrad.persample.rules.table import Recording, lowered


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
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Take torch's one call apart into projections and attention."""
    if static_k is not None or static_v is not None:
        return None
    if is_causal and attn_mask is None:
        return None  # which torch refuses in its own words
    with record.watching():
        alone = query.ndim == 2
        if alone:
            # What was one tensor stays one, since it can be projected at once.
            made = {id(each): each.unsqueeze(1) for each in (query, key, value)}
            query, key, value = (made[id(each)] for each in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        if use_separate_proj_weight:
            weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
            biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
            inputs = (query, key, value)
            q, k, v = map(F.linear, inputs, weights, biases)
        else:
            q, k, v = _projections(query, key, value, in_proj_weight, in_proj_bias)
        length, count, embed = q.shape
        mask = _additive(attn_mask, q)
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (count, num_heads))
        padding = _additive(key_padding_mask, q)
        if padding is not None:
            padding = padding[:, None, None, :]
        causal = is_causal and padding is None and not need_weights
        mask = None if causal else mask
        if bias_k is not None and bias_v is not None:
            k = torch.cat([k, bias_k.expand(1, count, -1)])
            v = torch.cat([v, bias_v.expand(1, count, -1)])
            mask, padding = _one_more(mask), _one_more(padding)
        q, k, v = (
            each.unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3) for each in (q, k, v)
        )
        if add_zero_attn:
            k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
            mask, padding = _one_more(mask), _one_more(padding)
        if padding is not None:
            mask = padding if mask is None else mask + padding
        dropout_p = dropout_p if training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout_p) if dropout_p else weights
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal)
        joined = attended.permute(2, 0, 1, 3).reshape(length, count, embed)
        output = F.linear(joined, out_proj_weight, out_proj_bias)
        if alone:
            output = output.squeeze(1)
            weights = weights if weights is None else weights.squeeze(0)
        return output, weights


def _projections(
    query: Tensor, key: Tensor, value: Tensor, weight: Any, bias: Any
) -> tuple[Tensor, ...]:
    """Project by the parts of one weight, in as few products as the inputs allow."""
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    size = query.shape[-1]
    sizes = (size, 2 * size) if key is value else (size,) * 3
    weights = weight.split(sizes)
    biases = (None,) * 3 if bias is None else bias.split(sizes)
    if key is not value:
        return tuple(map(F.linear, (query, key, value), weights, biases))
    q = F.linear(query, weights[0], biases[0])
    return (q, *F.linear(key, weights[1], biases[1]).chunk(2, dim=-1))


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what a mask adds to scores: minus infinity where a boolean one is set."""
    if mask is None or mask.is_floating_point():
        return mask
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device)
    return zeros.masked_fill(mask, float("-inf"))


def _one_more(mask: Tensor | None) -> Tensor | None:
    """Let a mask admit one more key."""
    return None if mask is None else F.pad(mask, (0, 1))

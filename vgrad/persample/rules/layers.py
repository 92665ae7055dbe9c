"""The rules of whole layers: embeddings, attention, recurrent nets, normalisation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.factors.base import Dense, Outer, Positions
from vgrad.factors.rows import Rows
from vgrad.functional.batch_norm import mended
from vgrad.lowering import attention, recurrent
from vgrad.persample.rules.table import Recording, lowered, rule
from vgrad.torch_private import kernels, modes


@rule(F.embedding, weights=("weight",))
def embedding(
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
        return _by_frequency(factor) if scale_grad_by_freq else factor

    return {"weight": rows}


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
    """Look rows up, and reduce the rows of each bag."""
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


def _by_frequency(rows: Rows) -> Rows:
    """Divide each row by how often the sample looks it up."""
    _, places, counts = rows.keys.unique(return_inverse=True, return_counts=True)
    return Rows(rows.index, rows.outputs / counts[places][..., None], rows.shape)


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
    if mask is not None and (record.is_parameter(mask) or record.is_batched(mask)):
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
        # One tensor given twice stays one, since it can be projected at once.
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


def _recurrent(
    mode: str,
    record: Recording,
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: bool,
    *options: Any,
) -> tuple[Tensor, ...] | None:
    """Fold the samples into the batch `n`, which is one for a single sequence."""
    hidden, layout = recurrent.parsed(hx, *options)
    drops = layout.dropout > 0 and layout.training and layout.num_layers > 1
    places = layout.num_layers * (2 if layout.bidirectional else 1)
    projected = len(params) != (4 if has_biases else 2) * places
    own = any(record.is_batched(weight) or weight.is_complex() for weight in params)
    if projected or own or (drops and record.randomness != "different"):
        with record.watching():
            return recurrent.steps(mode, input, hidden, params, layout)
    weights = [record.plain(weight) for weight in params]
    report = _reported(record, params, has_biases)
    x, *hidden = (record.copies(tensor) for tensor in (input, *hidden))
    with record.below(), record.drawing(1):
        time = 2 if layout.batch_first else 1
        x = x.movedim(time, 0)  # [T, B, n, I]
        sizes = x.shape[1:3]
        output, *final = recurrent.recurrent_net(
            mode,
            x.flatten(1, 2),
            tuple(each.transpose(0, 1).flatten(1, 2) for each in hidden),
            weights,
            report,
            record.anchor(x.new_zeros(())),
            layout._replace(batch_first=False),
        )
        output = output.unflatten(1, sizes).movedim(0, time)
        final = [each.unflatten(1, sizes).transpose(0, 1) for each in final]
        return tuple(record.logical(tensor) for tensor in (output, *final))


def _reported(record: Recording, params: Any, has_biases: bool) -> Callable:
    """Expect the uses of the weights, and return the function that gives factors.

    It is called for each layer, with the place of its first weight, the gradients at
    the gates to which inputs and states lead, and the inputs and states themselves,
    `[T, B * n, K]` each.
    """
    uses = [record.use(weight) for weight in params]
    shapes, size = [weight.shape for weight in params], record.size

    def report(first: int, d_ih: Tensor, d_hh: Tensor, x: Tensor, h: Tensor) -> None:
        for inputs, gates, place in ((x, d_ih, first), (h, d_hh, first + 1)):
            if place == first or d_hh is not d_ih:  # only a GRU has two
                outputs = Positions(_of_samples(gates, size))
                sums = outputs.tensor.sum((1, 2)) if has_biases else None
            if (use := uses[place]) is not None:
                a = _of_samples(inputs, size)
                use(Outer(a, outputs.tensor, shapes[place], outputs))
            if sums is not None and (use := uses[place + 2]) is not None:
                use(Dense(sums.clone()))  # each parameter gets its own

    return report


def _of_samples(tensor: Tensor, size: int) -> Tensor:
    """View `[T, B * n, K]` as `[B, 1, n * T, K]`."""
    parts = tensor.unflatten(1, (size, -1)).permute(1, 2, 0, 3)
    return parts.flatten(1, 2)[:, None]


def _cell(run: Callable, record: Recording, *args: Any, **kwargs: Any) -> Any:
    with record.watching():
        return run(*args, **kwargs)


for _net, _mode in recurrent.NETS.items():
    lowered(_net)(partial(_recurrent, _mode))
for _op, _run in recurrent.CELLS.items():
    lowered(_op)(partial(_cell, _run))


@rule(F.layer_norm, weights=("weight", "bias"), run=F.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> dict:
    """`out = normalised * weight + bias`; normalised again rather than kept."""
    count = len(normalized_shape)

    def scale(g: Tensor) -> Dense:
        # On a CPU the kernel takes twice as long without a weight.
        ones = input.new_ones(normalized_shape)
        args = (input, normalized_shape, ones, torch.zeros_like(ones), eps)
        return _summed(_times(F.layer_norm(*args), g), count)

    return {"weight": scale, "bias": lambda g: _summed(g, count)}


@rule(F.rms_norm, weights=("weight",), run=F.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> dict:
    """`out = normalised * weight`."""
    count = len(normalized_shape)

    def scale(g: Tensor) -> Dense:
        return _summed(_times(F.rms_norm(input, normalized_shape, eps=eps), g), count)

    return {"weight": scale}


@lowered(F.group_norm)
def group_norm(
    record: Recording,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the groups of all samples as the groups of one."""

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, record.size * num_groups, weight, bias, eps)

    return _by_channels(record, run, input, weight, bias)


@lowered(F.batch_norm)
def batch_norm(
    record: Recording,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Scale and shift the channels of all samples as the channels of one."""

    def run(x: Tensor, *channels: Tensor | None) -> Tensor:
        output = F.batch_norm(x, *channels, training=False, eps=eps)
        return mended(F.batch_norm, output)

    return _by_channels(record, run, input, running_mean, running_var, weight, bias)


@lowered(F.instance_norm)
def instance_norm(
    record: Recording,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Normalise the channels of all samples as the channels of one."""
    if use_input_stats and running_mean is not None:
        return None  # updates its statistics, which have to be copied first

    def run(x: Tensor, *channels: Tensor | None) -> Tensor:
        use = use_input_stats
        output = F.instance_norm(x, *channels, use_input_stats=use, eps=eps)
        return mended(F.instance_norm, output)

    return _by_channels(record, run, input, running_mean, running_var, weight, bias)


def _by_channels(
    record: Recording, run: Callable, input: Tensor, *channels: Tensor | None
) -> Tensor:
    """Run a normalisation on `[n, B * C, ...]`, with values for each of B * C channels.

    The kernel's gradients of these values are then the gradients of each sample.
    """
    x = record.physical(input)
    copies = [None if each is None else record.copies(each) for each in channels]
    with record.below():
        folded = x.transpose(0, 1).flatten(1, 2)
        flat = [None if each is None else each.flatten() for each in copies]
        output = run(folded, *flat)
        sizes = (folded.shape[0], record.size, *x.shape[2:])
        output = kernels.unsafe_view(output, sizes)
        return record.logical(output.transpose(0, 1))


def _times(normal: Tensor, g: Tensor) -> Tensor:
    return normal.mul_(g) if normal.dtype == g.dtype else normal * g


def _summed(tensor: Tensor, count: int) -> Dense:
    """Sum over all axes but the first, of the samples, and the last `count`."""
    axes = tuple(range(1, tensor.ndim - count))
    return Dense(tensor.sum(axes) if axes else tensor)

"""Scaled dot product attention as one fused kernel for all samples.

torch has no batching rule for its fused attention kernels: under `torch.vmap` it calls
them once per sample, forward and backward. Here the samples join the batch axis, and
the kernel runs once for all of them. The backward pass of a vmap runs the forward
kernel again and keeps only the inputs.

B samples of a vmap, N leading axes as one, H heads, L queries, S keys, E and V features
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vgrad.ops.record import Kind, Recording, expanded, register
from vgrad.torch_private import modes
from vgrad.torch_private.kernels import attention
from vgrad.tree import no_autocast

Kernel = Callable[..., Tensor]


class _Attention(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def kernel(self) -> Kernel:
        options = {"is_causal": self.is_causal, "scale": self.scale}
        return partial(attention, **options, enable_gqa=self.enable_gqa)


def _mapped(*args: Any, **kwargs: Any) -> Tensor:
    """Attend as torch does; in vmap one kernel serves the samples of all vmaps.

    Dropout takes torch's math backend, which has all modes of `randomness` but holds
    the weights `[B, ..., H, L, S]` of all samples.
    """
    call = _Attention(*args, **kwargs)
    tensors: Any = call[:4]
    if modes.current_level() is None:
        return call.kernel(*tensors, call.dropout_p)
    if call.is_causal and call.attn_mask is not None:  # some backends let it pass
        raise RuntimeError(
            "scaled_dot_product_attention(attn_mask, is_causal=True): expected one of "
            "the two, got both. Put the causal mask into attn_mask."
        )
    keys, values = call.key.shape, call.value.shape
    if keys[-2:-1] != values[-2:-1]:  # some kernels would read past the end
        raise RuntimeError(
            f"scaled_dot_product_attention(key {tuple(keys)}, value {tuple(values)}): "
            f"expected as many values as keys."
        )
    if call.dropout_p != 0.0:
        with sdpa_kernel(SDPBackend.MATH):
            return call.kernel(*tensors, call.dropout_p)
    dims = (None, None, None, None)
    *folded, unfold = fold(dims, 1, *tensors, enable_gqa=call.enable_gqa)
    return unfold(_attend(call.kernel, *folded)).squeeze(0)


def _recorded(record: Recording, *args: Any, **kwargs: Any) -> Tensor | None:
    """Attend with the samples folded into the batch."""
    call = _Attention(*args, **kwargs)
    if call.dropout_p and record.randomness != "different":
        return None
    mask, where = call.attn_mask, None
    q, k, v = (record.copies(tensor) for tensor in (call.query, call.key, call.value))
    if mask is not None and (record.is_parameter(mask) or record.is_batched(mask)):
        mask, where = record.copies(mask), 0
    dims = 0, 0, 0, where
    with record.below():
        *folded, unfold = fold(
            dims, record.size, q, k, v, mask, enable_gqa=call.enable_gqa
        )
        if record.columns and not call.dropout_p:
            output = _Attend.apply(call.kernel, *folded)
        else:
            output = call.kernel(*folded, call.dropout_p)
        return record.logical(unfold(output))


def fold(
    in_dims: Sequence[int | None],
    batch_size: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Join an axis of `batch_size` samples and all leading axes but the heads.

    `in_dims` says for each of the four tensors where its axis of samples is, or None
    where it has none. Returns `query`, `key` and `value` as `[N, H, L, E]`, the mask as
    `[N or 1, ...]`, and a function from the `[N, H, L, V]` of their attention to
    `[batch_size, *shape]`, of the shape of one sample's attention.
    """
    pairs = zip((query, key, value), in_dims[:3], strict=True)
    fronts = [expanded(x, dim, 1) for x, dim in pairs]
    ndim = max(x.dim() for x in fronts)
    rank = max(ndim, 4)  # of [B, ..., H, L, E]
    padded = [_padded(x, rank) for x in fronts]
    # Heads broadcast like the axes in front of them, unless they are grouped.
    end = -3 if enable_gqa else -2
    common = torch.broadcast_shapes(*(x.shape[1:end] for x in padded))
    rows = (batch_size, *common[: rank - 4])
    last = len(rows) - 1

    def flat(x: Tensor, *sizes: int) -> Tensor:
        return x.expand(*sizes, *x.shape[len(sizes) :]).flatten(0, last)

    def unfold(out: Tensor) -> Tensor:
        out = out.unflatten(0, rows)
        return out if ndim == rank else out.squeeze(-3)

    query, key, value = (flat(x, batch_size, *common) for x in padded)
    if attn_mask is None:
        return query, key, value, None, unfold
    mask = _padded(expanded(attn_mask, in_dims[3], 1), rank)
    shared = in_dims[3] is None and mask.shape[1 : last + 1].numel() == 1
    mask = mask.flatten(0, last) if shared else flat(mask, *rows)
    return query, key, value, mask, unfold


def _padded(tensor: Tensor, rank: int) -> Tensor:
    """Insert axes of size 1 behind the first until there are `rank`."""
    ones = [1] * (rank - tensor.dim())
    return tensor.unflatten(0, (tensor.shape[0], *ones)) if ones else tensor


def _attend(kernel: Kernel, *inputs: Tensor | None) -> Tensor:
    """Run the kernel if no transform is left, else pass on to the next one."""
    if modes.current_level() is None:
        return kernel(*inputs)
    return _Attend.apply(kernel, *inputs)


class _Refusing(Function):
    """A function without derivatives, unless a subclass has them."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "scaled_dot_product_attention(inside torch.func): expected one derivative, "
            "in reverse mode, got a second one or forward mode. Call "
            "torch.nn.functional.scaled_dot_product_attention inside "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )

    jvp = backward


class _Attend(_Refusing):
    """Attention on `[N, H, L, E]`; the samples of a vmap join the axis N."""

    @staticmethod
    def forward(kernel: Kernel, *inputs: Tensor | None) -> Tensor:
        return kernel(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.kernel, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        results = iter(_Gradient.apply(ctx.kernel, needed, *grads, *ctx.saved_tensors))
        return None, *(next(results) if need else None for need in needed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, kernel: Kernel, *inputs: Any) -> Any:
        # On [N, H, L, E] heads differ only where they are grouped.
        *folded, unfold = fold(in_dims[1:], info.batch_size, *inputs, enable_gqa=True)
        return unfold(_attend(kernel, *folded)), 0


class _Gradient(_Refusing):
    """The needed gradients of `_Attend`, from a second forward pass."""

    # Keeping what the first one returned would need code for each backend and device.

    @staticmethod
    def forward(
        kernel: Kernel, needed: Sequence[bool], grad: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        pairs = zip(inputs, needed, strict=True)
        leaves = [x if x is None else x.detach().requires_grad_(n) for x, n in pairs]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        with torch.enable_grad(), no_autocast(grad.device):
            out = kernel(*leaves)  # an empty output may not depend on its inputs
            return torch.autograd.grad(out, wanted, grad, materialize_grads=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        kernel, needed, grad, *tensors = args
        size, dims = info.batch_size, list(in_dims[3:])
        if needed[3]:  # each sample has its own gradient of a mask that all share
            tensors[3], dims[3] = expanded(tensors[3], dims[3], size), 0
        *folded, _ = fold(dims, size, *tensors, enable_gqa=True)
        grad = expanded(grad, in_dims[2], size)
        results = _Gradient.apply(kernel, needed, grad.flatten(0, 1), *folded)
        grads = [x.unflatten(0, grad.shape[:2]) for x in results]
        if needed[3]:
            grads[-1] = grads[-1].sum_to_size(tensors[3].shape)
        return tuple(grads), (0,) * len(grads)


def _multi_head(
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
        batched = {id(tensor): tensor.unsqueeze(1) for tensor in (query, key, value)}
        inputs = [batched[id(tensor)] for tensor in (query, key, value)]
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


register(
    F.scaled_dot_product_attention,
    mapped=_mapped,
    recorded=_recorded,
    autocast=Kind.LOW,
)
register(F.multi_head_attention_forward, recorded=_multi_head)

"""Sums at indices that stay one kernel under `torch.vmap`.

Where each sample has an index of its own, torch's rule for `index_add` loops over the
samples, forward and backward. Here the rows of all samples become those of one tensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vgrad.torch_private import modes


def index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any
) -> Tensor:
    """Add rows at an index as `torch.index_add` does, also in vmap.

    Example:
        >>> x, index = torch.zeros(2, 3), torch.tensor([[0, 0], [2, 1]])
        >>> torch.vmap(lambda x, index: index_add(x, 0, index, torch.ones(2)))(x, index)
        tensor([[2., 0., 0.],
                [0., 1., 1.]])
    """
    own = modes.is_batched(index) and index.dim() == 1 and input.dim() > 0
    if not own or options.keys() - {"alpha"}:
        return torch.index_add(input, dim, index, source, **options)
    alpha = options.get("alpha", 1)
    source = source if alpha == 1 else alpha * source
    return _IndexAdd.apply(input, dim % input.dim(), index, source)


def index_add_(
    input: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any
) -> Tensor:
    """Do the same in place."""
    return input.copy_(index_add(input, dim, index, source, **options))


def scatter_(input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Scatter in place; torch has a rule of vmap for `torch.scatter` alone."""
    return input.copy_(torch.scatter(input, *args, **options))


class _IndexAdd(Function):
    """The sum along an axis, which the samples of a vmap join."""

    @staticmethod
    def forward(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        return torch.index_add(input, dim, index, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.dim, index, _ = inputs
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (index,) = grads, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3]
        return grad, None, None, grad.index_select(ctx.dim, index) if wanted else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        input, _, _, source = tangents
        return _IndexAdd.apply(input, ctx.dim, *ctx.saved_tensors, source)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Tensor, int]:
        size, (input, dim, index, source) = info.batch_size, args
        input, source = (
            _front(input, in_dims[0], size),
            _front(source, in_dims[3], size),
        )
        if in_dims[2] is None:
            return _IndexAdd.apply(input, dim + 1, index, source), 0
        index, count = index.movedim(in_dims[2], 0).long(), input.shape[dim + 1]
        first = torch.arange(size, device=index.device) * count
        # What is out of range must not reach another sample.
        fits = (index >= 0) & (index < count)
        rows = torch.where(fits, index + first[:, None], -1).flatten()
        input, source = (
            each.movedim(dim + 1, 1).flatten(0, 1) for each in (input, source)
        )
        found = _IndexAdd.apply(input, 0, rows, source)
        return found.unflatten(0, (size, count)).movedim(1, dim + 1), 0


def _front(tensor: Tensor, place: int | None, size: int) -> Tensor:
    """Put the axis of samples in front."""
    if place is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(place, 0)

"""The gradient of every sample."""

from collections.abc import Iterator
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from vgrad.persample.engine import (
    Call,
    Gradients,
    Options,
    Problem,
    Quantity,
    Transform,
    joined,
)
from vgrad.precision.loss_scale import LossScale
from vgrad.tree import wide
from vgrad.typing import ChunkSize, LossFn, Params, Randomness, Strategy, Tree


@overload
def per_sample_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[Options]
) -> Transform[Params]: ...
@overload
def per_sample_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[Options]
) -> Transform[tuple[Params, Tree]]: ...
def per_sample_grad(
    loss: LossFn,
    *,
    strategy: Strategy = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> Transform[Any]:
    """Gradient of every sample: `(params, buffers, *batch) -> {name: [B, *shape]}`.

    The dtype is that of the parameters. It stores B gradients, so where a norm or a sum
    is wanted, use the transform that computes it. `vgrad.persample` says
    more of the options, which all transforms share.

    Args:
        strategy: how gradients come about: `"recorded"` in one backward pass, `"vmap"`,
            `"loop"` sample by sample; `"auto"` takes the first of these that can.
        chunk_size: samples at a time; None for all, `"auto"` for what fits into memory.
        randomness: of random ops: `"error"`, `"different"` for each sample, `"same"`.
        has_aux: the loss returns `(scalar, aux)`, and the result is a pair with aux.
        loss_scale: multiplies losses before the backward pass; results are without it.

    Raises:
        TypeError: the loss is no function, a model, or one of a whole batch.
        ValueError: an option or the batch is not what `vgrad.persample` says.
        UnsupportedOp: the strategy cannot run an op of the loss.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum() ** 2
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> per_sample_grad(loss)({"w": torch.ones(2)}, {}, x)
        {'w': tensor([[ 2.,  0.],
                [ 6., 12.]])}
    """

    options = Problem(
        "per_sample_grad", loss, strategy, chunk_size, randomness, has_aux, loss_scale
    )
    return Transform(options, Quantity(_collect, _measure, _joined))


def _collect(part: Problem) -> Gradients:
    return Gradients()


def _measure(found: Gradients, part: Problem) -> Params:
    return found.grads


def _joined(parts: Iterator[Params], call: Call) -> Params:
    """Join the gradients of all chunks."""
    found = list(parts)
    scale = call.problem.loss_scale
    return {
        name: _own_memory(
            joined(
                value.new_zeros((0, *value.shape)), [each[name] for each in found]
            ).to(_grad_dtype(value.dtype, scale))
        )
        for name, value in call.params.items()
    }


def _grad_dtype(dtype: torch.dtype, loss_scale: LossScale | None) -> torch.dtype:
    """Return the parameter's dtype, in which an unscaled gradient might be zero."""
    return dtype if loss_scale is None else wide(dtype)


def _own_memory(grad: Tensor) -> Tensor:
    """Give every entry memory of its own where vmap lets several share it."""
    sizes = zip(grad.stride(), grad.shape, strict=True)
    shared = any(step == 0 and size > 1 for step, size in sizes)
    return grad.clone(memory_format=torch.contiguous_format) if shared else grad

"""Gradients kept in bounds: clipping, centring, and NaN replaced by zero.

All of it acts on gradients that were already summed or averaged over a batch. It does
not bound the influence of single samples: that is what `vgrad.clipped_grad` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, plain
from vgrad.optim.arithmetic import (
    advance,
    length,
    map_grads,
    of_gradient,
    of_gradient_and_parameter,
    of_history,
    root,
    scalar,
)
from vgrad.optim.base import GradientTransformation, Grads, Updates, stateless
from vgrad.tree import map_values, widened
from vgrad.typing import Params


class ZeroNansState(NamedTuple):
    """State of `zero_nans`: by name, whether the last gradient had a NaN."""

    found: Params


def clip_by_value(clip_value: Number) -> GradientTransformation:
    """Clip every entry to `[-clip_value, clip_value]`, as `clip_grad_value_` does.

    There is no state. An entry that is NaN stays NaN.

    Raises:
        ValueError: the value is not positive.

    Example:
        >>> clip = clip_by_value(1.0)
        >>> clip.update({"w": torch.tensor([0.5, -3.0])}, ())
        ({'w': tensor([ 0.5000, -1.0000])}, ())
    """
    checks.positive("clip_by_value", **plain(clip_value=clip_value))

    def clip(grad: Tensor) -> Tensor:
        bound: Any = scalar(clip_value, grad)
        return grad.clamp(-bound, bound)

    return of_gradient(clip)


def clip_by_global_norm(max_norm: Number) -> GradientTransformation:
    """Shrink all gradients by one factor where their common norm exceeds `max_norm`.

    The factor is `min(max_norm / (norm + 1e-6), 1)` with the norm of `global_norm`: the
    formula of `torch.nn.utils.clip_grad_norm_`, by which the norm ends up a little
    below `max_norm`. There is no state. If the norm is infinite, entries that are not
    finite become NaN, and all others zero.

    Raises:
        ValueError: the norm is not positive.

    Reference: Pascanu et al., arXiv 1211.5063.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])}, ())[0]
        {'w': tensor([0.6000]), 'b': tensor([-0.8000])}
    """
    checks.positive("clip_by_global_norm", **plain(max_norm=max_norm))

    def update(grads: Grads, params: Params | None) -> Updates:
        norm = global_norm(grads)
        factor = (scalar(max_norm, norm) / (norm + 1e-6)).clamp(max=1.0)

        def shrink(grad: Tensor) -> Tensor:
            grad = widened(grad)
            return grad * factor.to(grad.device, grad.dtype)

        return map_grads(shrink, grads)

    return stateless(update)


def global_norm(grads: Grads) -> Tensor:
    """Compute the norm of all entries of all tensors together: `{name: shape} -> []`.

    The squares are summed in `promote_types(dtype, float32)`. The gradient of the norm
    is zero if all entries are. None counts as zero.

    Example:
        >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])})
        tensor(5.)
    """
    total = torch.zeros(())
    for grad in grads.values():
        if grad is not None:
            square = widened(grad).abs().square().sum()
            # Without dimensions on either side, the wider dtype of the two.
            total = total.to(square.device) + square
    return length(total)


def clip_by_block_rms(threshold: Number) -> GradientTransformation:
    """Divide each tensor by `max(rms / threshold, 1)`, with its root mean square.

    Tensors are clipped independently. There is no state.

    Raises:
        ValueError: the threshold is not positive.

    Reference: Shazeer and Stern, arXiv 1804.04235, section 6.

    Example:
        >>> clip = clip_by_block_rms(1.0)
        >>> clip.update({"w": torch.tensor([2.0, -2.0]), "b": torch.ones(1)}, ())[0]
        {'w': tensor([ 1., -1.]), 'b': tensor([1.])}
    """
    checks.positive("clip_by_block_rms", **plain(threshold=threshold))

    def clip(grad: Tensor) -> Tensor:
        rms = root(grad.abs().square().sum() / max(grad.numel(), 1))
        return grad / (rms / scalar(threshold, rms)).clamp(min=1.0)

    return of_gradient(clip)


def adaptive_grad_clip(
    clipping: Number, *, eps: Number = 1e-3
) -> GradientTransformation:
    """Clip the gradient of each unit relative to the norm of the unit's parameters.

    A gradient `g` of parameters `p` whose norm exceeds
    `bound = clipping * max(norm(p), eps)` becomes `g * bound / max(norm(g), 1e-6)`. The
    norms are those of the units: a unit is what belongs to one output, that is, one
    entry of the first dimension of a linear or convolution weight. A tensor with at
    most one dimension longer than one is a single unit. There is no state.

    Raises:
        ValueError: a number is not positive.

    Reference: Brock et al., arXiv 2102.06171.

    Example:
        >>> clip = adaptive_grad_clip(0.5)
        >>> params = {"w": torch.tensor([[3.0, 4.0], [30.0, 40.0]])}
        >>> grads = {"w": torch.tensor([[6.0, 8.0], [6.0, 8.0]])}
        >>> clip.update(grads, (), params)[0]
        {'w': tensor([[1.5000, 2.0000],
                [6.0000, 8.0000]])}
    """
    checks.positive("adaptive_grad_clip", **plain(clipping=clipping, eps=eps))

    def clip(grad: Tensor, param: Tensor) -> Tensor:
        norm = _unit_norm(grad)
        least: Any = scalar(eps, norm)
        size = _unit_norm(param).to(norm.dtype).clamp(min=least)
        bound = scalar(clipping, norm) * size
        clipped = grad * (bound / norm.clamp(min=1e-6))
        return torch.where(norm < bound, grad, clipped)

    return of_gradient_and_parameter("adaptive_grad_clip", clip)


def centralize() -> GradientTransformation:
    """Subtract the mean of each unit from its gradient: `g - mean(g)`.

    A unit is one entry of the first dimension, as in a linear or convolution weight.
    Tensors of fewer than two dimensions stay as they are. There is no state.

    Reference: Yong et al., arXiv 2004.01461.

    Example:
        >>> grads = {"w": torch.tensor([[1.0, 3.0]]), "b": torch.ones(1)}
        >>> centralize().update(grads, ())[0]
        {'w': tensor([[-1.,  1.]]), 'b': tensor([1.])}
    """

    def centre(grad: Tensor) -> Tensor:
        if grad.ndim < 2:
            return grad
        return grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)

    return of_gradient(centre)


def zero_nans() -> GradientTransformation:
    """Replace every entry that is NaN by zero, and note where there was one.

    Infinite entries stay. `state.found` tells for each name whether the last gradient
    had a NaN. To leave out the whole step instead, see `apply_if_finite`.

    Example:
        >>> grads = {"w": torch.tensor([1.0, float("nan")])}
        >>> zero_nans().update(grads, zero_nans().init(grads))
        ({'w': tensor([1., 0.])}, ZeroNansState(found={'w': tensor(True)}))
    """

    def start(params: Params) -> ZeroNansState:
        def none(param: Tensor) -> Tensor:
            return torch.zeros((), dtype=torch.bool, device=param.device)

        return ZeroNansState(map_values(none, params))

    def replace(grad: Tensor) -> Tensor:
        grad = widened(grad)
        return torch.where(grad.isnan(), 0.0, grad)

    def move(grads: Grads, state: ZeroNansState) -> tuple[Updates, ZeroNansState]:
        # Of a DTensor, a count is compared once its parts are added up; `any` is not.
        found = advance(lambda _, grad: grad.isnan().sum() > 0, state.found, grads)
        return map_grads(replace, grads), ZeroNansState(found)

    return of_history("zero_nans", start, move, real=False)


def _unit_norm(value: Tensor) -> Tensor:
    """Return the norm of each unit, in a shape that broadcasts against the tensor."""
    square = value.abs().square()
    if sum(size > 1 for size in value.shape) <= 1:
        return root(square.sum())
    return root(square.sum(dim=tuple(range(1, value.ndim)), keepdim=True))

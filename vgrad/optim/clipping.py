"""Gradients kept in bounds: clipping, centring, and NaN replaced by zero.

All of it is arithmetic on gradients that were already summed or averaged over a batch.
It bounds the influence of no single sample, for which there is `vgrad.clipped_grad`.

Every number may also be a tensor without dimensions, whose value is not checked.
Results are in `promote_types(dtype, float32)`.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Tensor | None`.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import Number, length, root, scalar
from vgrad.optim.base import GradientTransformation, Grads, Updates, widened
from vgrad.tree import map_values
from vgrad.typing import Params, Tree


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
    _check_positive("clip_by_value", clip_value=clip_value)

    def clip(grad: Tensor) -> Tensor:
        bound: Any = scalar(clip_value, grad)
        return grad.clamp(-bound, bound)

    return _each(clip)


def clip_by_global_norm(max_norm: Number) -> GradientTransformation:
    """Shrink all gradients by one factor where their common norm exceeds `max_norm`.

    The factor is `min(max_norm / (norm + 1e-6), 1)` with the norm of `global_norm`: the
    formula of `torch.nn.utils.clip_grad_norm_`, under which the norm ends up a little
    below `max_norm`. There is no state. Entries that are not finite become NaN, and
    an infinite norm makes zeros of the others.

    Raises:
        ValueError: the norm is not positive.

    Reference: Pascanu et al., On the difficulty of training recurrent neural networks,
    arXiv 1211.5063.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])}, ())[0]
        {'w': tensor([0.6000]), 'b': tensor([-0.8000])}
    """
    _check_positive("clip_by_global_norm", max_norm=max_norm)

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        norm = global_norm(grads)
        factor = (scalar(max_norm, norm) / (norm + 1e-6)).clamp(max=1.0)

        def shrink(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            grad = widened(grad)
            return grad * factor.to(grad.device, grad.dtype)

        return map_values(shrink, grads), state

    return GradientTransformation(lambda params: (), update)


def global_norm(grads: Grads) -> Tensor:
    """Compute the norm of all entries of all tensors together: `{name: shape} -> []`.

    The squares are summed in `promote_types(dtype, float32)`, and the gradient of the
    norm is zero where all entries are. What is None counts as zero.

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

    Tensors are clipped one by one, whatever the others are. There is no state.

    Raises:
        ValueError: the threshold is not positive.

    Reference: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear
    Memory Cost, arXiv 1804.04235, section 6.

    Example:
        >>> clip = clip_by_block_rms(1.0)
        >>> clip.update({"w": torch.tensor([2.0, -2.0]), "b": torch.ones(1)}, ())[0]
        {'w': tensor([ 1., -1.]), 'b': tensor([1.])}
    """
    _check_positive("clip_by_block_rms", threshold=threshold)

    def clip(grad: Tensor) -> Tensor:
        rms = root(grad.abs().square().sum() / max(grad.numel(), 1))
        return grad / (rms / scalar(threshold, rms)).clamp(min=1.0)

    return _each(clip)


def adaptive_grad_clip(
    clipping: Number, *, eps: Number = 1e-3
) -> GradientTransformation:
    """Clip the gradient of each unit relative to the norm of the unit's parameters.

    A gradient `g` of parameters `p` whose norm exceeds
    `bound = clipping * max(norm(p), eps)` becomes `g * bound / max(norm(g), 1e-6)`. The
    norms are those of the units: what belongs to one output, which is one entry of the
    first dimension of a linear or convolution weight. A tensor of which at most one
    dimension is longer than one is a single unit. There is no state.

    Raises:
        ValueError: a number is not positive; when updating, no parameters are given.

    Reference: Brock et al., High-Performance Large-Scale Image Recognition Without
    Normalization, arXiv 2102.06171.

    Example:
        >>> clip = adaptive_grad_clip(0.5)
        >>> params = {"w": torch.tensor([[3.0, 4.0], [30.0, 40.0]])}
        >>> grads = {"w": torch.tensor([[6.0, 8.0], [6.0, 8.0]])}
        >>> clip.update(grads, (), params)[0]
        {'w': tensor([[1.5000, 2.0000],
                [6.0000, 8.0000]])}
    """
    _check_positive("adaptive_grad_clip", clipping=clipping, eps=eps)

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        if params is None:
            raise ValueError(
                "adaptive_grad_clip(params=None): expected the parameters, got none. "
                "Call update(grads, state, params)."
            )
        checks.same_names("adaptive_grad_clip(grads)", params, grads)

        def clip(grad: Tensor | None, param: Tensor) -> Tensor | None:
            if grad is None:
                return None
            grad = widened(grad)
            norm = _unit_norm(grad)
            least: Any = scalar(eps, norm)
            size = _unit_norm(widened(param)).to(norm.dtype).clamp(min=least)
            bound = scalar(clipping, norm) * size
            clipped = grad * (bound / norm.clamp(min=1e-6))
            return torch.where(norm < bound, grad, clipped)

        return map_values(clip, grads, params), state

    return GradientTransformation(lambda params: (), update)


def centralize() -> GradientTransformation:
    """Take the mean of each unit off its gradient: `g - mean(g)`.

    A unit is one entry of the first dimension, as in a linear or convolution weight.
    Tensors of fewer than two dimensions stay as they are. There is no state.

    Reference: Yong et al., Gradient Centralization: A New Optimization Technique for
    Deep Neural Networks, arXiv 2004.01461.

    Example:
        >>> grads = {"w": torch.tensor([[1.0, 3.0]]), "b": torch.ones(1)}
        >>> centralize().update(grads, ())[0]
        {'w': tensor([[-1.,  1.]]), 'b': tensor([1.])}
    """

    def centre(grad: Tensor) -> Tensor:
        if grad.ndim < 2:
            return grad
        return grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)

    return _each(centre)


def zero_nans() -> GradientTransformation:
    """Replace every entry that is NaN by zero, and say where there was one.

    Infinite entries stay. `state.found` holds a boolean for each name: whether the last
    gradient had a NaN. To leave out the whole step instead, see `apply_if_finite`.

    Example:
        >>> grads = {"w": torch.tensor([1.0, float("nan")])}
        >>> zero_nans().update(grads, zero_nans().init(grads))
        ({'w': tensor([1., 0.])}, ZeroNansState(found={'w': tensor(True)}))
    """

    def init(params: Params) -> ZeroNansState:
        def none(param: Tensor) -> Tensor:
            return torch.zeros((), dtype=torch.bool, device=param.device)

        return ZeroNansState(map_values(none, params))

    def update(
        grads: Grads, state: ZeroNansState, params: Params | None = None
    ) -> tuple[Updates, ZeroNansState]:
        checks.same_names("zero_nans(grads)", state.found, grads)

        def replace(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            grad = widened(grad)
            return torch.where(grad.isnan(), 0.0, grad)

        def find(grad: Tensor | None, before: Tensor) -> Tensor:
            return before if grad is None else grad.isnan().any()

        found = map_values(find, grads, state.found)
        return map_values(replace, grads), ZeroNansState(found)

    return GradientTransformation(init, update)


def _each(function: Callable[[Tensor], Tensor]) -> GradientTransformation:
    """Make a transformation without state of a function of one widened gradient."""

    def apply(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else function(widened(grad))

    return GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None: (map_values(apply, grads), state),
    )


def _unit_norm(value: Tensor) -> Tensor:
    """Return the norm of each unit, in a shape that broadcasts against the tensor."""
    square = value.abs().square()
    if sum(size > 1 for size in value.shape) <= 1:
        return root(square.sum())
    return root(square.sum(dim=tuple(range(1, value.ndim)), keepdim=True))


def _check_positive(function: str, **values: Number) -> None:
    """Each number is above zero; tensors pass."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            checks.positive(function, **{name: value})

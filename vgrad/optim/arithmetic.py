"""Arithmetic on dictionaries of tensors that the transformations have in common.

Results are in `promote_types(dtype, float32)`, and a gradient of None is passed over.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `float | Tensor`.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vgrad.optim.base import Grads, Updates, cast, widened
from vgrad.tree import map_values
from vgrad.typing import Params

Number = float | Tensor
"""A hyperparameter: a number, or a tensor without dimensions."""


def is_zero(value: Number) -> bool:
    """Tell a number zero, which a tensor never counts as."""
    return not isinstance(value, Tensor) and value == 0


def check_real(function: str, params: Params) -> None:
    """Every parameter is a real floating-point tensor."""
    for name, param in params.items():
        if not param.is_floating_point():
            raise TypeError(
                f"{function}(params): expected real floating-point parameters, got "
                f"{param.dtype} in {name!r}. Keep it out of the parameters, or as a "
                f"pair of real ones."
            )


def counter(params: Params) -> Tensor:
    """Make a count of zero steps on the device of the parameters."""
    device = next(iter(params.values())).device if params else None
    return torch.zeros((), dtype=torch.int64, device=device)


def zeros(params: Params) -> Params:
    """Make a tensor of zeros, at least as wide as float32, for each parameter."""

    def zero(param: Tensor) -> Tensor:
        dtype = torch.promote_types(param.dtype, torch.float32)
        return torch.zeros_like(param, dtype=dtype)

    return map_values(zero, params)


def squared(grads: Grads) -> Updates:
    """Square gradients entry by entry."""
    # Widened before the product: the square of a float16 overflows from 256 on.
    return map_values(lambda g: None if g is None else widened(g).square(), grads)


def root(square: Tensor) -> Tensor:
    """Take the root of what is zero or more, with a slope that is finite at zero.

    The infinite slope of a root at zero would make NaN of a gradient through an update.
    The root of the smallest normal number, which stands for zero, vanishes beside eps.
    """
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def length(square: Tensor) -> Tensor:
    """Take the root of a squared norm; at zero it is zero, and so is its slope."""
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def blend(old: Params, keep: Number, new: Grads, take: Number) -> Params:
    """`keep * old + take * new` in the dtype of `old`; where `new` is None, `old`."""

    def mix(before: Tensor, value: Tensor | None) -> Tensor:
        if value is None:
            return before
        value = cast(value, before.dtype)
        if not isinstance(take, Tensor) and take == 1:
            return plus(value, keep, before)
        return plus(scalar(keep, before) * before, take, value)

    return map_values(mix, old, new)


def blend_squares(old: Params, keep: Number, grads: Grads) -> Params:
    """`keep * old + (1 - keep) * g * g` in the dtype of `old`; without `g`, `old`.

    In this form, torch's own, a square that overflows stays infinite.
    """

    def mix(before: Tensor, grad: Tensor | None) -> Tensor:
        if grad is None:
            return before
        kept = scalar(keep, before) * before
        # Widened before the product: the square of a float16 overflows from 256 on.
        grad = cast(grad, kept.dtype)
        if isinstance(keep, Tensor):
            return kept + scalar(1 - keep, before) * grad.square()
        return torch.addcmul(kept, grad, grad, value=1 - keep)

    return map_values(mix, old, grads)


def lerp(old: Params, new: Grads, share: Number) -> Params:
    """`(1 - share) * old + share * new`, in the dtype of `old`; without `new`, `old`.

    For `share = 1 - decay` the exponential moving average. One pass over the values,
    and exact where the share is 1 or both are the same.
    """

    def mix(before: Tensor, value: Tensor | None) -> Tensor:
        if value is None:
            return before
        weight: Any = scalar(share, before)
        return torch.lerp(before, cast(value, before.dtype), weight)

    return map_values(mix, old, new)


def plus(value: Tensor, factor: Number, other: Tensor) -> Tensor:
    """`value + factor * other`, in one pass if the factor is a number."""
    if isinstance(factor, Tensor):
        return value + scalar(factor, other) * other
    return torch.add(value, other, alpha=factor)


def scalar(value: Number, like: Tensor) -> Number:
    """Return a number as it is, a tensor in the dtype and on the device of `like`.

    A float64 hyperparameter would otherwise widen parameters without dimensions.
    """
    if not isinstance(value, Tensor):
        return value
    if value.ndim > 0:
        raise ValueError(
            f"vgrad.optim(hyperparameter of shape {tuple(value.shape)}): expected a "
            f"number or a tensor without dimensions. For one value per member, build "
            f"the optimizer inside the function that torch.vmap maps."
        )
    return placed(value, like)


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Bring a tensor without dimensions to the dtype and the device of `like`."""
    if torch.compiler.is_compiling() and not value.is_complex():
        # Inductor would compute what the scalar is made of, powers of the decays above
        # all, in every loop over a parameter, time and again: three times as slow. What
        # comes of a reduction (of so many that it is not unrolled) it writes to memory.
        value = value.expand(16).amax()
    return value.to(like.device, like.dtype)

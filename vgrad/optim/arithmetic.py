"""Arithmetic on tensors and dictionaries of them, in float32 or wider.

Hyperparameters are numbers or tensors without dimensions; gradients may be None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vgrad.tree import cast, map_values, wide, widened
from vgrad.typing import Params, Schedule

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Number = float | Tensor
"""A hyperparameter: a number, or a tensor without dimensions."""

Rate = Number | Schedule
"""A rate, or a function of the number of steps taken so far that returns one."""

Grads = Mapping[str, Tensor | None]
"""Gradients by name; `None` for a parameter that received none."""

Updates = dict[str, Tensor | None]
"""Tensors to be added to the parameters; `None` leaves one as it is."""


def is_zero(value: Number) -> bool:
    """Return whether a value is the number zero; a tensor never is."""
    return not isinstance(value, Tensor) and value == 0


def is_schedule(value: Any) -> TypeIs[Callable[..., Any]]:
    """Return whether a value is a schedule, and not a number or a tensor."""
    return not isinstance(value, Tensor) and callable(value)


def rate_at(lr: Rate, count: Tensor) -> Number:
    """Return a rate, which may be a schedule, after `count` steps."""
    return lr(count) if is_schedule(lr) else lr


def map_grads(function: Callable[..., Tensor], grads: Grads, *others: Any) -> Updates:
    """Apply a function name by name; where the gradient is None, so is the result."""

    def apply(grad, *rest):
        return None if grad is None else function(grad, *rest)

    return map_values(apply, grads, *others)


def advance(
    function: Callable[..., Tensor], old: Params, new: Grads, *others: Params
) -> Params:
    """Apply a function name by name; where `new` is None, keep the entry of `old`."""

    def apply(before, value, *rest):
        return before if value is None else function(before, value, *rest)

    return map_values(apply, old, new, *others)


def counter(params: Params) -> Tensor:
    """Make a count of zero steps on the device of the parameters."""
    device = next(iter(params.values())).device if params else None
    return torch.zeros((), dtype=torch.int64, device=device)


def filled(param: Tensor, value: Number = 0) -> Tensor:
    """Make a tensor like a parameter, float32 or wider, with one value everywhere."""
    zeros = torch.zeros_like(param, dtype=wide(param.dtype))
    return zeros if is_zero(value) else zeros + scalar(value, zeros)


def copies(params: Params) -> Params:
    """Copy parameters in the dtype of averages; the originals may be donated."""
    return map_values(lambda param: widened(param).clone(), params)


def root(square: Tensor) -> Tensor:
    """Take the root of numbers >= 0, with a slope that is finite at zero.

    The infinite slope of a root at zero would make gradients through an update NaN. The
    root of the smallest normal number, which replaces zero, is negligible beside eps.
    """
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def length(square: Tensor) -> Tensor:
    """Take the root of a squared norm; at zero it is zero, and so is its slope."""
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def norm(value: Tensor) -> Tensor:
    """Return the norm of all entries; its gradient is zero where the norm is."""
    return length(value.abs().square().sum())


def lerp(old: Tensor, new: Tensor, share: Number) -> Tensor:
    """`(1 - share) * old + share * new` in the dtype of `old`, in one pass.

    It is exact if the share is 1 or both are the same.
    """
    weight: Any = scalar(share, old)
    return torch.lerp(old, cast(new, old.dtype), weight)


def mean_of_squares(old: Tensor, grad: Tensor, decay: Number) -> Tensor:
    """`decay * old + (1 - decay) * g * g` in the dtype of `old`.

    In this form, torch's own, a square that overflows stays infinite.
    """
    kept = scalar(decay, old) * old
    # Widened before the product: the square of a float16 overflows from 256 on.
    grad = cast(grad, kept.dtype)
    if isinstance(decay, Tensor):
        return kept + scalar(1 - decay, old) * grad.square()
    return torch.addcmul(kept, grad, grad, value=1 - decay)


def over_root(grad: Tensor, square: Tensor, eps: Number) -> Tensor:
    """`g / (sqrt(square) + eps)`."""
    return cast(grad, square.dtype) / (root(square) + scalar(eps, square))


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
        # Inductor would recompute the scalar, such as powers of the decays, for every
        # entry of a parameter, three times as slow. The result of a reduction, over
        # too many entries to be unrolled, it writes to memory.
        value = value.expand(16).amax()
    return value.to(like.device, like.dtype)

"""Arithmetic on dictionaries of tensors that the transformations have in common.

Results are in `promote_types(dtype, float32)`, and gradients of None are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, check_real, required
from vgrad.optim.base import GradientTransformation, Grads, Updates, stateless
from vgrad.tree import cast, map_values, widened
from vgrad.typing import Params


def map_grads(
    function: Callable[..., Tensor], grads: Grads, *others: Mapping[str, Any]
) -> Updates:
    """Apply a function name by name; where the gradient is None, so is the result."""

    def apply(grad: Tensor | None, *rest: Any) -> Tensor | None:
        return None if grad is None else function(grad, *rest)

    return map_values(apply, grads, *others)


def advance(
    function: Callable[..., Tensor], old: Params, new: Grads, *others: Params
) -> Params:
    """Apply a function name by name; where `new` is None, keep what is in `old`."""

    def apply(before: Tensor, value: Tensor | None, *rest: Tensor) -> Tensor:
        return before if value is None else function(before, value, *rest)

    return map_values(apply, old, new, *others)


def of_gradient(function: Callable[[Tensor], Tensor]) -> GradientTransformation:
    """Make a transformation without state of a function of one widened gradient."""
    return stateless(
        lambda grads, params: map_grads(lambda g: function(widened(g)), grads)
    )


def of_gradient_and_parameter(
    name: str, function: Callable[[Tensor, Tensor], Tensor]
) -> GradientTransformation:
    """Do the same with a function of a gradient and its parameter, both widened."""

    def apply(grad: Tensor, param: Tensor) -> Tensor:
        return function(widened(grad), widened(param))

    def update(grads: Grads, params: Params | None) -> Updates:
        params = required(name, params)
        checks.names(f"{name}(grads)", params, grads)
        return map_grads(apply, grads, params)

    return stateless(update)


def of_history(
    function: str,
    start: Callable[[Params], Any],
    move: Callable[[Grads, Any], tuple[Updates, Any]],
    *,
    real: bool = True,
) -> GradientTransformation:
    """Make a transformation that keeps something of each parameter in its state.

    `start` makes the state, a NamedTuple, and `move` the updates and the next state.
    Parameters have to be `real`, and the names of gradients those of the state; errors
    begin with the name of the `function`.
    """

    def init(params: Params) -> Any:
        if real:
            check_real(function, params)
        return start(params)

    def update(
        grads: Grads, state: Any, params: Params | None = None
    ) -> tuple[Updates, Any]:
        held = next((field for field in state if isinstance(field, dict)), None)
        if held is None:
            raise TypeError(
                f"{function}(state): expected the state that its init made, got "
                f"{state!r}."
            )
        checks.names(f"{function}(grads)", held, grads)
        return move(grads, state)

    return GradientTransformation(init, update)


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


def filled(params: Params, value: Number) -> Params:
    """Fill tensors like those of `zeros` with one value."""
    return map_values(lambda start: start + scalar(value, start), zeros(params))


def copies(params: Params) -> Params:
    """Copy parameters in the dtype of averages; the originals may be given away."""
    return map_values(lambda param: widened(param).clone(), params)


def squared(grads: Grads) -> Updates:
    """Square gradients entry by entry."""
    # Widened before the product: the square of a float16 overflows from 256 on.
    return map_grads(lambda g: widened(g).square(), grads)


def root(square: Tensor) -> Tensor:
    """Take the root of what is zero or more, with a slope that is finite at zero.

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


def blend(old: Params, keep: Number, new: Grads, take: Number) -> Params:
    """`keep * old + take * new` in the dtype of `old`; where `new` is None, `old`."""

    def mix(before: Tensor, value: Tensor) -> Tensor:
        value = cast(value, before.dtype)
        if not isinstance(take, Tensor) and take == 1:
            return plus(value, keep, before)
        return plus(scalar(keep, before) * before, take, value)

    return advance(mix, old, new)


def blend_squares(old: Params, keep: Number, grads: Grads) -> Params:
    """`keep * old + (1 - keep) * g * g` in the dtype of `old`; without `g`, `old`.

    In this form, torch's own, a square that overflows stays infinite.
    """

    def mix(before: Tensor, grad: Tensor) -> Tensor:
        kept = scalar(keep, before) * before
        # Widened before the product: the square of a float16 overflows from 256 on.
        grad = cast(grad, kept.dtype)
        if isinstance(keep, Tensor):
            return kept + scalar(1 - keep, before) * grad.square()
        return torch.addcmul(kept, grad, grad, value=1 - keep)

    return advance(mix, old, grads)


def lerp(old: Params, new: Grads, share: Number) -> Params:
    """`(1 - share) * old + share * new`, in the dtype of `old`; without `new`, `old`.

    With `share = 1 - decay` the exponential moving average, in one pass over the values
    and exact if the share is 1 or both are the same.
    """

    def mix(before: Tensor, value: Tensor) -> Tensor:
        weight: Any = scalar(share, before)
        return torch.lerp(before, cast(value, before.dtype), weight)

    return advance(mix, old, new)


def plus(value: Tensor, factor: Number, other: Tensor) -> Tensor:
    """`value + factor * other`, in one pass if the factor is a number."""
    if isinstance(factor, Tensor):
        return value + scalar(factor, other) * other
    return torch.add(value, other, alpha=factor)


def expanded(function: str, name: str, value: Number, held: Tensor) -> Tensor:
    """Bring a number, or a tensor of one or all values, to the shape of `held`."""
    if not isinstance(value, Tensor):
        return torch.full_like(held, value)
    if value.shape not in ((), held.shape):
        raise ValueError(
            f"{function}({name} of shape {tuple(value.shape)}): expected a number or a "
            f"tensor of shape {tuple(held.shape)}."
        )
    return value.to(held.device, held.dtype).expand(held.shape)


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
        # Inductor would recompute what the scalar is made of, such as powers of the
        # decays, for every entry of a parameter, three times as slow. The result of a
        # reduction, over too many entries to be unrolled, it writes to memory.
        value = value.expand(16).amax()
    return value.to(like.device, like.dtype)

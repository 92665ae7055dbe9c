"""What schedules take: rates and lengths, as numbers or as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, plain

Length = int | Tensor
"""A number of steps."""

Curve = Callable[[Tensor], Tensor]
"""A schedule that always returns a tensor."""


def check_rates(function: str, **values: Number) -> None:
    """Each value is a number of zero or more and finite, or one tensor."""
    numbers = plain_numbers(function, **values)
    checks.non_negative(function, **numbers)
    checks.finite(function, **numbers)


def check_lengths(function: str, least: int = 1, /, **values: Length) -> None:
    """Each value is a whole number of at least `least`, or one tensor."""
    checks.whole(function, least=least, **plain_numbers(function, **values))


def plain_numbers(function: str, **values: Number) -> dict[str, Any]:
    """Return the values that are no tensors; a tensor must have no dimensions."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            raise ValueError(
                f"{function}({name} of shape {tuple(value.shape)}): expected a number "
                f"or a tensor without dimensions. For one value per member, make the "
                f"schedule inside the function that torch.vmap maps."
            )
    return plain(**values)


def curve(formula: Callable[..., Tensor], *values: Number) -> Curve:
    """Make a schedule of a formula of the count and of values, all of them float64."""

    def schedule(count: Tensor) -> Tensor:
        t = count.double()

        def cast(value: Number) -> Tensor:
            if isinstance(value, Tensor):
                return value.to(t.device, t.dtype)
            return t.new_full((), value)

        return formula(t, *map(cast, values))

    return schedule

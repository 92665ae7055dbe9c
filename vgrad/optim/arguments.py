"""What optimizers take: numbers, schedules and parameters, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vgrad import checks
from vgrad.typing import Params, Schedule

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Number = float | Tensor
"""A hyperparameter: a number, or a tensor without dimensions."""


def is_zero(value: Number) -> bool:
    """Tell a number zero, which a tensor never counts as."""
    return not isinstance(value, Tensor) and value == 0


def is_schedule(value: Any) -> TypeIs[Callable[..., Any]]:
    """Tell a schedule from a number or a tensor."""
    return not isinstance(value, Tensor) and callable(value)


def rate_at(lr: Number | Schedule, count: Tensor) -> Number:
    """Return a rate, which may be a schedule, after `count` steps."""
    return lr(count) if is_schedule(lr) else lr


def plain(**values: Any) -> dict[str, Any]:
    """Return the values that are not tensors: a check of a tensor would read it."""
    return {name: v for name, v in values.items() if not isinstance(v, Tensor)}


def check_numbers(
    function: str,
    lr: Number | Schedule,
    betas: tuple[Number, ...] = (),
    /,
    **values: Number,
) -> None:
    """Each number is zero or more, and a beta below one; tensors and schedules pass."""
    named = values if is_schedule(lr) else {"lr": lr, **values}
    checks.non_negative(function, **plain(**named))
    for index, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(
                f"{function}(betas={betas}): expected 0 <= betas[{index}] < 1, "
                f"got {beta}."
            )


def check_shares(function: str, *, one: bool = False, **values: Number) -> None:
    """Each number is at least zero and below one, or one if allowed; tensors pass."""
    for name, value in plain(**values).items():
        if not (0 <= value < 1 or (one and value == 1)):
            least = f"0 <= {name} {'<=' if one else '<'} 1"
            raise ValueError(f"{function}({name}={value!r}): expected {least}.")


def check_real(function: str, params: Params) -> None:
    """Every parameter is a real floating-point tensor."""
    for name, param in params.items():
        if not param.is_floating_point():
            raise TypeError(
                f"{function}(params): expected real floating-point parameters, got "
                f"{param.dtype} in {name!r}. Keep it out of the parameters, or as a "
                f"pair of real ones."
            )


def required(function: str, params: Params | None) -> Params:
    """Return the parameters, which `update` has to be given."""
    if params is None:
        raise ValueError(
            f"{function}(params=None): expected the parameters, got none. "
            f"Call update(grads, state, params)."
        )
    return params

"""How the first result of a graph is compared with that of eager mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vgrad import tree
from vgrad.conditions import Unrepeatable
from vgrad.dtypes import double

_WORSE = 4.0
"""How many times the error of eager mode compiled code may have."""

_APART = 1e-3
"""How far random results may be apart, against the largest number of a tensor."""


def same_bits(found: Any, expected: Any) -> None:
    """Refuse a replay that is not equal to eager mode.

    Raises:
        Unrepeatable: a number differs.
    """
    pairs = zip(tree.tensors(found), tree.tensors(expected), strict=True)
    for one, other in pairs:
        numbers = (
            x.nan_to_num(posinf=torch.inf, neginf=-torch.inf) for x in (one, other)
        )
        if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(*numbers):
            raise Unrepeatable("its replay does not repeat the numbers of eager mode")


def close(
    found: Any, expected: Any, function: Callable, arguments: tuple, *, draws: bool
) -> None:
    """Refuse compiled code whose error is many times that of eager mode.

    Both are compared with the function in float64. With random numbers, which are
    others in float64, they are compared with each other.

    Raises:
        Unrepeatable: a number is too far off, or the function does not run in float64.
    """
    if found is None:
        raise Unrepeatable("compiled code doubts samples that eager mode does not")
    exact = expected if draws else _exact(function, arguments)
    rounding = _rounding((expected, arguments))
    parts = map(tree.tensors, (found, expected, exact))
    for one, other, right in zip(*parts, strict=True):
        if not one.is_floating_point() and not one.is_complex():
            same_bits(one, other)
            continue
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()):
            raise Unrepeatable("compiled code is finite elsewhere than eager mode")
        one, other, right = (double(each)[finite] for each in (one, other, right))
        if not one.numel():
            continue
        size = right.abs().amax()
        allowed = _WORSE * ((other - right).abs().amax() + rounding * size)
        if draws:
            allowed = allowed + _APART * size
        if (error := (one - right).abs().amax()) > allowed:
            raise Unrepeatable(
                f"compiled code is off by {float(error):.1e}, which is more than the "
                f"{float(allowed):.1e} that eager mode's own error allows"
            )


def _rounding(tensors: Any) -> float:
    """Return the spacing of the least precise numbers in a tree."""
    real = [x for x in tree.tensors(tensors) if x.is_floating_point() or x.is_complex()]
    return max((torch.finfo(each.dtype).eps for each in real), default=0.0)


def _exact(function: Callable, arguments: tuple) -> Any:
    def widened(value: Tensor) -> Tensor:
        real = value.is_floating_point() or value.is_complex()
        return double(value) if real else value

    try:
        with torch.no_grad():
            return function(*tree.map_tensors(widened, arguments))
    except Exception as error:
        raise Unrepeatable(
            f"it does not run in float64, with which compiled code is compared "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Pass "
            f"verify=False to do without"
        ) from error

"""The comparison of results of a graph with eager mode."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vgrad import checks, tree
from vgrad.compiled.backends import memory_of
from vgrad.conditions import Unrepeatable
from vgrad.tree import double

_WORSE = 4.0
"""How many times the error of eager mode compiled code may have."""

_APART = 1e-3
"""How far random results may be apart, against the largest number of a tensor."""

_POINTS = 4
"""At how many points both are run at most: at the arguments, and close by."""

_SEEN = 1e-4
"""An error, against the largest number of a tensor, that has to be seen."""


def same_bits(result: Any, expected: Any) -> None:
    """Refuse a replay that is not equal to eager mode; None is one in doubt."""
    if result is None:
        raise Unrepeatable("its replay doubts samples that eager mode does not")
    pairs = zip(tree.tensors(result), tree.tensors(expected), strict=True)
    for one, other in pairs:
        if one.dtype != other.dtype or not checks.same_values(one, other):
            raise Unrepeatable("its replay does not repeat the numbers of eager mode")


def replays(
    result: Any,
    expected: Any,
    replay: Callable,
    eager: Callable,
    arguments: tuple,
    *,
    first: bool = True,
    **options: Any,
) -> None:
    """Refuse a replay without the bits of eager mode.

    Kernels of a device may add up in another order each time, and kernels of the host
    may later than at the `first` call: with other threads for instance. There the
    replay must be as close to the function in float64 as eager mode; `options` go
    to `close`.
    """
    try:
        same_bits(result, expected)
    except Unrepeatable as error:
        on_host = all(each.is_cpu for each in tree.tensors(expected))
        repeats = (on_host and first) or torch.are_deterministic_algorithms_enabled()
        if result is None or repeats:
            raise
        try:
            close(replay, eager, arguments, **options)
        except Unrepeatable:
            raise error from None


def close(
    compiled: Callable,
    eager: Callable,
    arguments: tuple,
    *,
    draws: bool = False,
    closed: Sequence[Tensor] = (),
) -> None:
    """Refuse compiled code whose error is many times the error of eager mode.

    Both are compared with the function in float64, or with each other if it draws.
    `closed` are the tensors that it closes over.
    """
    # Where a slope jumps, as of ReLU at zero, rounding decides on which side a number
    # falls, and one of both may be thousands of times farther from float64. Of millions
    # of activations one often is that close to zero; at a point close by it is another
    # one, or none, but wrong code is wrong there too. So the smallest errors count.
    smallest: list[tuple[float, ...]] = []
    for number in range(_POINTS):
        point = _moved(arguments, number) if number else arguments
        try:
            expected = eager(*point)
            exact = expected if draws else _exact(eager, point, closed)
        except Exception:
            if not number:
                raise
            continue  # it need not be defined there
        try:
            result = compiled(*point)
        except Exception as error:
            raise Unrepeatable(f"compiled code fails: {_first_line(error)}") from error
        if result is not None:
            errors = _errors(result, expected, exact, arguments, draws)
            pairs = zip(smallest or errors, errors, strict=True)
            smallest = [tuple(map(min, *pair)) for pair in pairs]
            if all(error <= most <= _SEEN * size for error, most, size in smallest):
                break
        elif not number:
            raise Unrepeatable("compiled code doubts samples that eager mode does not")
    for error, allowed, _ in smallest:
        if error > allowed:
            raise Unrepeatable(
                f"compiled code is off by {error:.1e}, which is more than the "
                f"{allowed:.1e} that eager mode's own error allows"
            )


def _errors(
    result: Any, expected: Any, exact: Any, arguments: Any, draws: bool
) -> list[tuple[float, ...]]:
    """Return the largest error of each tensor, the error allowed, and its size."""
    real = filter(_is_rounded, tree.tensors((expected, arguments)))
    rounding = max((torch.finfo(each.dtype).eps for each in real), default=0.0)
    errors = []
    tensors = map(tree.tensors, (result, expected, exact))
    for one, other, right in zip(*tensors, strict=True):
        if not _is_rounded(one):
            same_bits(one, other)
            continue
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()):
            raise Unrepeatable("compiled code is finite elsewhere than eager mode")
        three = (one, other, right)
        one, other, right = (double(each.detach())[finite] for each in three)
        if not one.numel():
            errors.append((0.0, 0.0, 0.0))
            continue
        size = right.abs().amax()
        allowed = _WORSE * ((other - right).abs().amax() + rounding * size)
        if draws:
            allowed = allowed + _APART * size
        error = (one - right).abs().amax().nan_to_num(torch.inf)
        errors.append((float(error), float(allowed), float(size)))
    return errors


def _moved(arguments: tuple, number: int) -> tuple:
    """Make all numbers a little smaller, by random parts; zeros stay zeros."""
    generator = torch.Generator().manual_seed(number)

    def move(tensor: Tensor) -> Tensor:
        if not _is_rounded(tensor) or not tensor.numel():
            return tensor
        memory = memory_of(tensor)
        part = torch.rand(len(memory), generator=generator).to(tensor.device)
        part *= math.sqrt(torch.finfo(tensor.dtype).eps)
        smaller = (memory * (1 - part)).to(tensor.dtype)
        return smaller.as_strided(tensor.shape, tensor.stride())

    return tree.map_once(move, arguments)


class _Wide(TorchFunctionMode):
    """Hands others to functions of torch in the place of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._others = {id(each): _wide(each.detach()) for each in tensors}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = args, kwargs or {}
        given = tree.map_tensors(lambda x: self._others.get(id(x), x), given)
        return func(*given[0], **given[1])


def _wide(tensor: Tensor) -> Tensor:
    return double(tensor) if _is_rounded(tensor) else tensor


def _exact(function: Callable, arguments: tuple, closed: Sequence[Tensor]) -> Any:
    try:
        with torch.no_grad(), _Wide(closed):
            return function(*tree.map_once(_wide, arguments))
    except Exception as error:
        raise Unrepeatable(
            f"it does not run in float64, with which compiled code is compared "
            f"({_first_line(error)}). Pass verify=False to do without"
        ) from error


def _is_rounded(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are rounded, real or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

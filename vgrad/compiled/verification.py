"""The comparison of results of a graph with eager mode."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.compiled.backends import memory_of
from vgrad.conditions import Unrepeatable
from vgrad.torch_private import modes
from vgrad.tree import double

_ROUNDINGS = 2.0**9
"""How many roundings of the largest number compiled code may be off by."""

_MOST = 0.1
"""The largest share of that number, in any dtype."""

_SPREAD = 8.0
"""How many times as far as eager mode moves with arguments that differ by rounding."""

_POINTS = 8
"""At how many such arguments eager mode runs at most."""


def same_bits(result: Any, expected: Any) -> None:
    """Refuse a replay that is not equal to eager mode; None is one in doubt."""
    if result is None:
        raise Unrepeatable("its replay doubts samples that eager mode does not")
    pairs = zip(tree.tensors(result), tree.tensors(expected), strict=True)
    for one, other in pairs:
        if one.dtype != other.dtype or not checks.same_values(one, other):
            raise Unrepeatable("its replay does not repeat the numbers of eager mode")


def replays(
    result: Any, expected: Any, eager: Callable, arguments: tuple, *, first: bool = True
) -> None:
    """Refuse a replay without the bits of eager mode.

    Kernels of a device may add up in another order each time, and kernels of the host
    may later than at the `first` call: with other threads for instance. There the
    replay must be as close to eager mode as compiled code.
    """
    try:
        same_bits(result, expected)
    except Unrepeatable as error:
        on_host = all(each.is_cpu for each in tree.tensors(expected))
        repeats = (on_host and first) or torch.are_deterministic_algorithms_enabled()
        if result is None or repeats:
            raise
        try:
            close(result, expected, eager, arguments)
        except Unrepeatable:
            raise error from None


def close(result: Any, expected: Any, eager: Callable, arguments: tuple) -> None:
    """Refuse a result that is farther from eager mode's than rounding explains."""
    # Where a slope jumps, as of ReLU at zero, rounding decides on which side a number
    # falls, and of millions of activations one often is that close to zero. There, and
    # where a gradient is made of rounding errors, eager mode moves as far by itself.
    found, right = tree.tensors(result), tree.tensors(expected)
    errors = [*map(_error, found, right)]
    allowed = [_rounding(each, arguments) for each in right]
    for number in range(_POINTS + 1):
        if number:
            try:
                near = tree.tensors(eager(*_moved(arguments, number)))
            except Exception:
                continue  # it need not be defined there
            steps = [_SPREAD * each for each in map(_error, near, right)]
            pairs = zip(allowed, steps, strict=True)
            allowed = [max(x, y) if y < math.inf else x for x, y in pairs]
        excess = [x > y for x, y in zip(errors, allowed, strict=True)]
        if not any(excess):
            return
    worst = excess.index(True)
    raise Unrepeatable(
        f"compiled code is off by {errors[worst]:.1e}, which is more than the "
        f"{allowed[worst]:.1e} that rounding explains"
    )


def _rounding(tensor: Tensor, arguments: tuple) -> float:
    """Return by how much rounding alone may move the numbers of a result."""
    kinds = {x.dtype for x in tree.tensors((tensor, arguments)) if _is_rounded(x)}
    if not _is_rounded(tensor):
        return 0.0
    if modes.autocast_is_on():
        kinds.add(torch.bfloat16)
    share = min(_MOST, _ROUNDINGS * max(torch.finfo(kind).eps for kind in kinds))
    return share * _largest(tensor[tensor.isfinite()])


def _error(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; infinity where it has none."""
    if not _is_rounded(one):
        return 0.0 if torch.equal(one, other) else math.inf
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()):
        return math.inf
    one, other = (double(each.detach())[finite] for each in (one, other))
    return _largest(one - other)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def _moved(arguments: tuple, number: int) -> tuple:
    """Make all numbers a little smaller, by random parts; zeros stay zeros."""
    generator = torch.Generator().manual_seed(number)

    def move(tensor: Tensor) -> Tensor:
        if not _is_rounded(tensor) or not tensor.numel():
            return tensor
        memory = memory_of(tensor)
        part = torch.rand(len(memory), generator=generator).to(tensor.device)
        part *= 16 * torch.finfo(tensor.dtype).eps
        smaller = (memory * (1 - part)).to(tensor.dtype)
        return smaller.as_strided(tensor.shape, tensor.stride())

    return tree.map_once(move, arguments)


def _is_rounded(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are rounded, real or complex."""
    return tensor.is_floating_point() or tensor.is_complex()

"""What optimizers take: numbers, schedules and parameters, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from operator import add, le
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.torch_private import shards
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


def apart(places: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether no two blocks of memory, of places and sizes in bytes, overlap."""
    starts, ends = sorted(places), sorted(map(add, places, sizes))
    return all(map(le, ends, starts[1:]))


def disjoint(tensors: Sequence[Tensor]) -> bool:
    """Return whether no two tensors overlap, as far as first and last entries tell.

    Of a DTensor it is the part of this process.
    """
    local = list(map(_local, tensors))
    return apart([x.data_ptr() for x in local], list(map(_extent, local)))


def _local(tensor: Tensor) -> Tensor:
    return shards.local(tensor) if shards.is_distributed(tensor) else tensor


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first entry of a tensor to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (1 + last) * tensor.element_size() if tensor.numel() else 0


def sharing(params: Params) -> Iterator[tuple[str, str]]:
    """Yield each two names whose tensors have entries in the same memory.

    A name comes with itself if two entries of its tensor are in the same place. Of a
    DTensor it is the part of this process.
    """
    params = {name: _local(param) for name, param in params.items()}
    blocks: list[tuple[int, int, str]] = []
    for name, param in params.items():
        if param.numel() and not param.is_meta:
            start = param.data_ptr()
            blocks.append((start, start + _extent(param), name))
            if not _nested(param) and _overlap(param):
                yield name, name
    blocks.sort(key=lambda block: block[:2])
    for number, (_, end, name) in enumerate(blocks, 1):
        later = takewhile(lambda block, end=end: block[0] < end, blocks[number:])
        for _, _, other in later:
            pair = params[name], params[other]
            # Blocks without gaps have entries wherever they overlap.
            if all(map(Tensor.is_contiguous, pair)) or _overlap(*pair):
                yield name, other


def check_parts(params: Params) -> None:
    """Refuse, in a step that may write in place, parameters that overlap in part."""
    for first, second in sharing(params):
        one, two = params[first], params[second]
        places = [(x.data_ptr(), x.shape, x.stride()) for x in (one, two)]
        if places[0] != places[1]:  # else each update is added to the same parameter
            raise ValueError(
                f"step(donate=True)(params): expected parameters with memory of their "
                f"own, got {first!r} and {second!r}, which overlap: each would be "
                f"stepped in part by the other's gradient. Pass clones, or leave "
                f"donate out."
            )


def _overlap(*tensors: Tensor) -> bool:
    """Return whether two entries of these tensors are in the same place."""
    if len({each.element_size() for each in tensors}) > 1:
        return True  # an entry of one may lie between the places of two of the other
    places = torch.cat([_places(each) for each in tensors])
    return len(places.unique()) < len(places)


def _places(tensor: Tensor) -> Tensor:
    """Return the addresses of all entries of a tensor."""
    found = torch.tensor([tensor.data_ptr()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(size) * (stride * tensor.element_size())
        found = (found[:, None] + steps).flatten()
    return found


def _nested(tensor: Tensor) -> bool:
    """Return whether each stride reaches beyond all entries of smaller strides."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True

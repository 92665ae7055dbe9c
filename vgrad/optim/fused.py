"""Steps in place, for callers that give the old parameters and state away.

torch has one kernel for a whole step of SGD, Adam and AdamW. It reads and writes every
value once, where pure functions make new tensors for each intermediate result. For what
the kernel does not support these steps return None, before anything has changed, and
leave it to the pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, apart, check_parts, is_schedule, is_zero
from vgrad.optim.base import Donated, Grads
from vgrad.optim.transforms import ScheduleState
from vgrad.torch_private import kernels, modes
from vgrad.typing import Params, Schedule, Tree

_DEVICE, _DTYPE, _SHAPE = map(attrgetter, ("device", "dtype", "shape"))
_IS_CPU = attrgetter("is_cpu")
_BYTES, _REQUIRES_GRAD = map(attrgetter, ("nbytes", "requires_grad"))


def donated_sgd(
    kind: type,
    lr: Number | Schedule,
    *,
    momentum: Number,
    dampening: Number,
    nesterov: bool,
    weight_decay: Number,
    maximize: bool,
) -> Donated:
    """Make the step in place of `sgd`, whose sums are in a state of that kind."""
    # The first step of dampened momentum differs: its number would have to be read.
    plain = _numbers(momentum, dampening, weight_decay) and is_zero(dampening)

    def launch(group: list[list[Tensor]], rate: Any, count: Tensor | None) -> None:
        own, given, *sums = group
        kernels.fused_sgd_(
            own,
            given,
            *(sums or [[]]),
            weight_decay=weight_decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=nesterov,
            maximize=maximize,
            is_first_step=False,
        )

    # Without momentum there are no sums, and the kernel refuses them.
    return _donated(kind, lr, launch, plain=plain, keeps=not is_zero(momentum))


def donated_adam(
    kind: type,
    lr: Number | Schedule,
    *,
    betas: tuple[Number, Number],
    eps: Number,
    weight_decay: Number,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
) -> Donated:
    """Make the step in place of `adam`, or `adamw`, with a state of that kind."""
    kernel = kernels.fused_adamw_ if decoupled else kernels.fused_adam_
    # Without eps the kernel divides zero by zero where scale_by_adam does not.
    plain = _numbers(*betas, eps, weight_decay) and not is_zero(eps)

    def launch(group: list[list[Tensor]], rate: Any, count: Tensor) -> None:
        own, given, means, squares, *largest = group
        kernel(
            own,
            given,
            means,
            squares,
            *(largest or [[]]),
            [count.to(own[0].device, torch.float32)] * len(own),
            lr=rate,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
        )

    return _donated(kind, lr, launch, plain=plain, keeps=True)


def _donated(
    kind: type,
    lr: Number | Schedule,
    launch: Callable[..., None],
    *,
    plain: bool,
    keeps: bool,
) -> Donated:
    """Make a step in place of a kernel that `launch` runs for each group of tensors.

    The step returns None unless the hyperparameters are `plain` numbers, and the state
    of a chain has a part of that kind exactly where the optimizer `keeps` something.
    """

    def step(
        grads: Grads, state: Tree, params: Params
    ) -> tuple[Params, tuple[Any, ...]] | None:
        index, moments = _own(state, kind)
        if not plain or (moments is not None) != keeps:
            return None
        kept = list(moments[1:]) if moments else []  # all but the count
        groups = _groups(params, grads, kept)
        if groups is None:
            return None
        rate, last = _rate(lr, state[-1])
        if not _taken(rate, params):
            return None
        count = moments.count + 1 if moments else None
        for group in groups:
            launch(group, _on(rate, group[0][0].device), count)
        new = [*state[:-1], last]
        if moments:
            new[index] = kind(count, *map(dict, kept))
        return dict(params), tuple(new)

    return step


def _numbers(*values: Number) -> bool:
    return not any(isinstance(value, Tensor) for value in values)


def _own(state: Tree, kind: type) -> tuple[int, Any]:
    """Find the state of one transformation in that of a chain."""
    for index, each in enumerate(state):
        if isinstance(each, kind):
            return index, each
    return -1, None


def _groups(
    params: Params, grads: Grads, moments: list[Params]
) -> list[list[list[Tensor]]] | None:
    """Make lists of parameters, gradients and moments, for each device and dtype.

    Returns None if a tensor is not plain or not alone in its memory: the kernels walk
    through memory and check neither strides nor dtypes. For a thousand small tensors
    checking one by one costs more than the step, so the checks go through whole lists.

    Raises:
        ValueError: two parameters overlap without being one.
    """
    if modes.inside_transform() or torch.compiler.is_compiling():
        return None
    checks.names("step(grads)", params, grads)
    if any(hasattr(param, "to_local") for param in params.values()):
        parts = _parts([params, grads, *moments])
        if parts is None:
            return None
        params, grads, *moments = parts
    names = [name for name, grad in grads.items() if grad is not None]
    trees: list[Any] = [params, grads, *moments]
    columns: list[list[Tensor]] = [list(map(each.__getitem__, names)) for each in trees]
    own, given, *_ = columns
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, itertools.chain(*columns))):
        return None

    def alike(of: Callable[[Tensor], Any]) -> list[Any] | None:
        first, *others = (list(map(of, each)) for each in columns)
        return first if all(each == first for each in others) else None

    shapes, dtypes = alike(_SHAPE), alike(_DTYPE)
    if shapes is None or dtypes is None:
        return None
    on_cpu = all(map(_IS_CPU, itertools.chain(*columns)))
    if not on_cpu and alike(_DEVICE) is None:
        return None
    idle = [params[name] for name, grad in grads.items() if grad is None]
    if not all(map(Tensor.is_contiguous, itertools.chain(*columns, idle))):
        columns[1] = list(map(_like, own, given))
        if alike(Tensor.stride) is None or not all(map(_dense, [*own, *idle])):
            return None
    sizes = list(map(_BYTES, own)) * len(columns) + list(map(_BYTES, idle))
    held = itertools.chain(*columns, idle)
    if not apart(list(map(Tensor.data_ptr, held)), sizes):
        check_parts(params)
        return None
    if not {*dtypes} <= {torch.float32, torch.float64}:
        return None
    if on_cpu and len({*dtypes}) == 1:
        return [columns]
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, ...]]] = {}
    for row in zip(*columns, strict=True):
        groups.setdefault((row[0].device, row[0].dtype), []).append(row)
    return [list(map(list, zip(*rows, strict=True))) for rows in groups.values()]


def _parts(trees: list[Any]) -> list[Any] | None:
    """Return what this process holds of DTensors; None if they are not cut alike."""
    cuts = {name: getattr(each, "placements", None) for name, each in trees[0].items()}
    found = []
    for tree in trees:
        given = {name: each for name, each in tree.items() if each is not None}
        if any(getattr(t, "placements", None) != cuts[n] for n, t in given.items()):
            return None
        parts = {n: t.to_local() if cuts[n] else t for n, t in given.items()}
        found.append({name: parts.get(name) for name in tree})
    return found


def _like(param: Tensor, grad: Tensor) -> Tensor:
    """Give a gradient the memory layout of its parameter."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)


def _dense(tensor: Tensor) -> bool:
    """Tell whether a tensor is contiguous in one of the usual layouts."""
    if tensor.is_contiguous():
        return True
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _rate(lr: Number | Schedule, state: Any) -> tuple[Number, Any]:
    """Return the rate of this step and the state of `scale_by_learning_rate` after."""
    if not is_schedule(lr):
        return lr, state
    return lr(state.count), ScheduleState(state.count + 1)


def _taken(rate: Number, params: Params) -> bool:
    """Tell whether a kernel takes a rate: without graph, and on a device in float32."""
    if not isinstance(rate, Tensor):
        return True
    if rate.requires_grad and torch.is_grad_enabled():
        return False
    on_cpu = rate.device.type == "cpu"
    return on_cpu or all(each.dtype == torch.float32 for each in params.values())


def _on(rate: Number, device: torch.device) -> Any:
    """Give the kernel a number, or a tensor that it reads without waiting for it."""
    if not isinstance(rate, Tensor):
        return float(rate)
    return float(rate) if rate.device.type == "cpu" else rate.to(device, torch.float32)

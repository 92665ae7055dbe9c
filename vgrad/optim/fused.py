"""Steps in place by torch's kernels, for callers that donate parameters and state."""

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks, overlaps
from vgrad.devices import is_host
from vgrad.optim.base import Donated, Grads, Rate, State, is_schedule, is_zero
from vgrad.torch_private import kernels, modes
from vgrad.torch_private.tensors import like
from vgrad.tree import tensors
from vgrad.typing import Params

_DEVICE, _DTYPE, _SHAPE = map(attrgetter, ("device", "dtype", "shape"))
_BYTES, _REQUIRES_GRAD = map(attrgetter, ("nbytes", "requires_grad"))


def donated_sgd(lr: Rate, *, momentum, dampening, **options: Any) -> Donated | None:
    """Make the step in place of `sgd`; None if there is none."""
    # The first step of dampened momentum differs: its number would have to be read.
    if not is_zero(dampening) or tensors((momentum, options["weight_decay"])):
        return None

    def launch(rate, count, params, grads, *sums):
        numbers = {"momentum": momentum, "dampening": 0.0, "lr": rate, **options}
        sums = sums or [[]]
        kernels.fused_sgd_(params, grads, *sums, is_first_step=False, **numbers)

    # Without momentum there are no sums, and the kernel refuses them.
    return _donated(lr, launch, () if is_zero(momentum) else ("momentum_buffer",))


def donated_adam(lr: Rate, *, betas, decoupled, **options: Any) -> Donated | None:
    """Make the step in place of `adam` or `adamw`; None if there is none."""
    # Without eps the kernel divides zero by zero where scale_by_adam does not.
    eps = options["eps"]
    if is_zero(eps) or tensors((*betas, eps, options["weight_decay"])):
        return None
    kernel = kernels.fused_adamw_ if decoupled else kernels.fused_adam_

    def launch(rate, count, params, grads, means, squares, *largest):
        steps = [count.to(params[0].device, torch.float32)] * len(params)
        numbers = {"beta1": betas[0], "beta2": betas[1], "lr": rate, **options}
        kernel(params, grads, means, squares, *(largest or [[]]), steps, **numbers)

    slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return _donated(lr, launch, slots if options["amsgrad"] else slots[:2])


def _donated(lr: Rate, launch: Callable, slots: tuple[str, ...]) -> Donated:
    checked = _Checks()

    def step(grads, state, params):
        # The state of the rate, the last one, has no slots.
        with_slots = [
            i for i, part in enumerate(state) if isinstance(part, State) and part.slots
        ]
        moments = [state[i] for i in with_slots]
        if [tuple(part.slots) for part in moments] != ([slots] if slots else []):
            return None  # a state of other transformations, chained with the rate
        columns = [part.slots[slot] for part in moments for slot in slots]
        groups = checked.groups(params, grads, columns)
        if groups is None:
            return None
        rate: Any = lr
        last = state[-1]
        if is_schedule(rate):
            rate, last = rate(last.count), State(last.count + 1, {})
        on_device = isinstance(rate, Tensor) and not is_host(rate.device)
        if isinstance(rate, Tensor):
            if rate.requires_grad and torch.is_grad_enabled():
                return None
            if on_device and any(p.dtype != torch.float32 for p in params.values()):
                return None
        count: Any = moments[0].count + 1 if moments else None
        for group in groups:
            # A tensor on a device is read there, without waiting for it.
            device = group[0][0].device
            number = rate.to(device, torch.float32) if on_device else float(rate)
            launch(number, count, *group)
        new = [*state[:-1], last]
        for index in with_slots:
            new[index] = State(count, dict(zip(slots, map(dict, columns), strict=True)))
        return dict(params), tuple(new)

    return step


class _Layout(NamedTuple):
    sizes: list[int]
    groups: list[list[int]] | None
    """The places of the parameters of each device and dtype; None without a kernel."""
    requires_grad: bool
    is_same: Callable[..., bool]


def _layout(columns: list[list[Tensor]], idle: list[Tensor]) -> _Layout | None:
    """Describe columns of parameters, gradients and moments; None if they differ.

    Gradients in another memory layout than their parameters are replaced by copies.
    """
    stepped = columns[0]

    def alike(of):
        first, *others = (list(map(of, column)) for column in columns)
        return all(other == first for other in others)

    if not all(map(alike, (_SHAPE, _DTYPE, _DEVICE))):
        return None
    if not all(map(Tensor.is_contiguous, itertools.chain(*columns, idle))):
        columns[1] = [
            g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(stepped, columns[1], strict=True)
        ]
        if not alike(Tensor.stride) or not all(map(_dense, [*stepped, *idle])):
            return None
    groups: dict[Any, list[int]] = {}
    for place, param in enumerate(stepped):
        groups.setdefault((param.device, param.dtype), []).append(place)
    supported = {dtype for _, dtype in groups} <= {torch.float32, torch.float64}
    present = [*itertools.chain(*columns), *idle]
    return _Layout(
        list(map(_BYTES, present)),
        [*groups.values()] if supported else None,
        any(map(_REQUIRES_GRAD, itertools.chain(*columns))),
        like(present),
    )


class _Checks:
    """The checks before a kernel, which looks neither at strides nor at dtypes.

    For many small tensors they would cost more than the step. So tensors in the layout
    of the last step are not checked again, except for shared memory.
    """

    __slots__ = ("_last",)  # which is no option

    def __init__(self) -> None:
        self._last: _Layout | None = None

    def __reduce__(self) -> tuple:
        return _Checks, ()  # the test of torch cannot be pickled

    def groups(self, params: Params, grads: Grads, moments: list) -> list | None:
        """Make the columns of each device and dtype, if all tensors suit a kernel."""
        if modes.inside_transform() or torch.compiler.is_compiling():
            return None
        if params.keys() != grads.keys():
            checks.names("step(grads)", params, grads)
        trees: list[Any] = [params, grads, *moments]
        if any(hasattr(param, "to_local") for param in params.values()):
            trees = _local_parts(trees)
            if not trees:
                return None
            params, grads = trees[:2]
        names = [name for name, grad in grads.items() if grad is not None]
        columns = [list(map(tree.__getitem__, names)) for tree in trees]
        idle = [params[name] for name, grad in grads.items() if grad is None]
        present, layout = [*itertools.chain(*columns), *idle], self._last
        same = layout and len(present) == len(layout.sizes) and layout.is_same(*present)
        if not same:
            self._last = layout = _layout(columns, idle)
            present = [*itertools.chain(*columns), *idle]
        if not layout or (layout.requires_grad and torch.is_grad_enabled()):
            return None
        if not overlaps.apart(list(map(Tensor.data_ptr, present)), layout.sizes):
            check_parts(params)
            return None
        if layout.groups is None:
            return None
        if len(layout.groups) == 1:
            return [columns]
        return [[[c[i] for i in rows] for c in columns] for rows in layout.groups]


def _local_parts(trees: list[Any]) -> list[Any]:
    # Nothing, if they are not sharded alike.
    cuts = {n: getattr(param, "placements", None) for n, param in trees[0].items()}
    local = []
    for tree in trees:
        present = {name: tensor for name, tensor in tree.items() if tensor is not None}
        if any(getattr(t, "placements", None) != cuts[n] for n, t in present.items()):
            return []
        parts = {n: t.to_local() if cuts[n] else t for n, t in present.items()}
        local.append({name: parts.get(name) for name in tree})
    return local


def _dense(tensor: Tensor) -> bool:
    channels_last = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=channels_last)


def check_parts(params: Params) -> None:
    """Refuse, in a step that may write in place, parameters that overlap in part."""
    for first, second in overlaps.sharing(params):
        one, two = params[first], params[second]
        same = one.data_ptr() == two.data_ptr() and one.stride() == two.stride()
        if not same or one.shape != two.shape:
            raise ValueError(
                f"step(donate=True)(params): expected parameters with memory of their "
                f"own, got {first!r} and {second!r}, which overlap. Pass clones, or "
                f"leave donate out."
            )

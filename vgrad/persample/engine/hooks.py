"""Hooks on gradients, and on saved tensors, in recorded passes.

A gradient in such a pass is one of all samples, `[B, ...]`. A hook is any function of
one sample's: it may clip by a norm, read values, or keep some for itself. So it is
called for one sample after another, as a loop calls it, with plain tensors. Tensors of
the loss that it closes over are those of the sample as well.

Autograd saves other tensors in such a pass than for one sample. So hooks on them have
to keep all values as they are.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from vgrad.conditions import Unrepeatable, checks_collected
from vgrad.loss.grad_flags import UnsupportedOp
from vgrad.loss.values import NONE
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tensors, tree_map_only

_GRAD_FN: Any = Tensor.grad_fn
_GET_GRAD_FN = _GRAD_FN.__get__

Grads = tuple[Tensor | None, ...]


def run_hooks(recorder: Any, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a call that puts hooks on gradients of all samples; `NONE` for others."""
    if func is Tensor.register_hook:
        return _on_tensor(recorder, *args, **kwargs)
    if func is modes.custom_function_call and args[0] is autograd.ModuleHooks:
        return _on_module(recorder, args[1:])
    if func == _GET_GRAD_FN and autograd.hooked_call() is not None:
        return modes.unwrap_all(args[0]).grad_fn
    return NONE


def _on_tensor(recorder: Any, tensor: Tensor, hook: Callable) -> Any:
    if recorder.repeats:  # and no gradient comes there
        return RemovableHandle(OrderedDict())
    if not modes.is_mapped_here(tensor):
        if tensor.requires_grad:
            recorder.inner.needs_copies(tensor, "register_hook")
        return NONE
    axis = modes.batch_axis(tensor)
    each = partial(_each, recorder.size, modes.current_level(), axis)

    def of_one(grads: Grads, _: Grads) -> Grads | None:
        new = hook(*grads)
        return None if new is None else (new,)

    def hooked(grad: Tensor) -> Tensor | None:
        new = each(of_one, (grad,), ())
        return None if new is None else new[0]

    return modes.unwrapped(tensor).register_hook(hooked)


def _on_module(recorder: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run the identity on whose nodes torch puts the backward hooks of a module."""
    call = autograd.hooked_call()
    recorder.watching().note_hook(f"backward hooks of {type(call.module).__name__}")
    each = partial(_each, recorder.size, modes.current_level(), 0)

    def full(hook: Callable) -> Callable:
        return lambda module, inputs, outputs: each(
            lambda into, out: hook(module, into, out), inputs, outputs
        )

    def pre(hook: Callable) -> Callable:
        return lambda module, outputs: each(
            lambda out, _: hook(module, out), outputs, ()
        )

    if type(call.user_hooks) is list:  # torch comes for inputs, and for outputs
        call.user_hooks = tuple(map(full, call.user_hooks))
        call.user_pre_hooks = tuple(map(pre, call.user_pre_hooks))
    with recorder.below():
        outputs = autograd.ModuleHooks.apply(*map(recorder.copies, tensors))
    return tuple(
        recorder.logical(output)
        if modes.is_batched(tensor) or tensor.requires_grad
        else tensor
        for tensor, output in zip(tensors, outputs, strict=True)
    )


def _each(
    size: int, level: int, axis: int, hook: Callable, grads: Grads, others: Grads
) -> Grads | None:
    """Return what a hook makes of the gradients of all samples, None for no change."""
    own, more = tree_map_only(
        Tensor, lambda grad: grad.movedim(axis, 0).clone(), (grads, others)
    )
    versions = [*map(version_of, tensors((own, more)))]
    rows, results = [], []
    for number in range(size):
        row, rest = tree_map_only(
            Tensor, lambda grad, n=number: grad.select(0, n), (own, more)
        )
        with _OfSample(level, number):
            results.append(hook(row, rest))
        rows.append(row)
    if versions != [*map(version_of, tensors((own, more)))]:
        raise _refusal("writes into one, where others may be in that memory")
    if all(result is None for result in results):
        return None
    pairs = zip(rows, results, strict=True)
    results = [row if result is None else result for row, result in pairs]
    if any(map(_differ, rows, results)):
        raise _refusal("returns others")
    columns = zip(*results, strict=True)
    return tuple(
        None if each[0] is None else torch.stack(each, axis) for each in columns
    )


def _refusal(got: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"hook: expected one that returns a gradient of the same shape for each that "
        f'it gets, or None, got one that {got}. Use strategy="loop".'
    )


def _differ(row: Grads, result: Any) -> bool:
    shapes = ([getattr(g, "shape", None) for g in each] for each in (row, result))
    return next(shapes) != next(shapes)


class _OfSample(TorchFunctionMode):
    """Takes tensors of all samples, of a vmap that has ended, for those of one."""

    def __init__(self, level: int, number: int) -> None:
        super().__init__()
        self._level, self._number = level, number

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._own, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _own(self, tensor: Tensor) -> Tensor:
        if not modes.is_wrapped(tensor):
            return tensor
        own = modes.in_front(tensor, self._level)
        return tensor if own is None else own.select(0, self._number)


def check_saved(tensor: Tensor, unpacked: Tensor) -> None:
    """Refuse hooks on saved tensors that change values."""
    if checks_collected():
        raise Unrepeatable("hooks on saved tensors are Python")
    same = (tensor == unpacked) | (tensor.isnan() & unpacked.isnan())
    if tensor.dtype != unpacked.dtype or not same.all():
        raise UnsupportedOp(
            "loss: expected hooks on saved tensors that return the values they get, as "
            "those of save_on_cpu do, got some that change them, which in a recorded "
            'pass would be other tensors. Use strategy="loop".'
        )

"""Hooks on gradients, and on saved tensors, in recorded passes.

A gradient in such a pass is one of all samples, `[B, ...]`. A hook is any function of
one sample's: it may clip by a norm, read values, or keep some for itself. So it is
called for one sample after another, with plain tensors, as a loop calls it. But a loop
calls all hooks of one sample before any hook of the next, so tensors that one call
keeps for another may be of another sample here, and are refused.

Autograd saves other tensors in such a pass than for one sample. So hooks on them have
to keep all values.
"""

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
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

Grads = tuple[Tensor | None, ...]
Owners = MutableMapping[Tensor, int]
"""The samples that tensors of hooks are of."""


def run_hooks(recorder: Any, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a call that puts hooks on gradients of all samples; `NONE` for others."""
    if func is Tensor.register_hook:
        return _on_tensor(recorder, *args, **kwargs)
    if func is modes.custom_function_call and args[0] is autograd.ModuleHooks:
        return _on_module(recorder, args[1:])
    if func == _GRAD_FN.__get__ and autograd.hooked_call() is not None:
        return modes.unwrap_all(args[0]).grad_fn
    return NONE


def _on_tensor(recorder: Any, tensor: Tensor, hook: Callable) -> Any:
    if recorder.repeats:  # no gradient comes there
        return RemovableHandle(OrderedDict())
    if not modes.is_mapped_here(tensor):
        if tensor.requires_grad:
            recorder.inner.needs_copies(tensor, "register_hook")
        return NONE
    axis, level = modes.batch_axis(tensor), modes.current_level()

    def of_one(grads: Grads) -> Grads | None:
        new = hook(*grads)
        return None if new is None else (new,)

    each = partial(_each, recorder.size, recorder.of_hooks, level, axis, of_one)
    return modes.unwrapped(tensor).register_hook(lambda grad: each((grad,))[0])


def _on_module(recorder: Any, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run the identity on whose nodes torch puts the backward hooks of a module."""
    call = autograd.hooked_call()
    recorder.watching().note_hook(f"backward hooks of {type(call.module).__name__}")
    of, level = recorder.of_hooks, modes.current_level()
    each = partial(_each, recorder.size, of, level, 0)

    def of_samples(hook: Callable) -> Callable:
        return lambda module, *grads: each(partial(hook, module), *grads)

    if type(call.user_hooks) is list:  # torch comes for inputs, and for outputs
        call.user_hooks = tuple(map(of_samples, call.user_hooks))
        call.user_pre_hooks = tuple(map(of_samples, call.user_pre_hooks))
    with recorder.below():
        outputs = autograd.ModuleHooks.apply(*map(recorder.copies, given))
    return tuple(
        recorder.logical(new) if modes.is_batched(x) or x.requires_grad else x
        for x, new in zip(given, outputs, strict=True)
    )


def _each(
    size: int, of: Owners, level: int, axis: int, hook: Callable, *grads: Grads
) -> Grads:
    """Return the first of some gradients, replaced by a hook for one sample's."""
    for grad in tensors(grads):
        if modes.is_wrapped(grad) and modes.in_front(grad, level) is not None:
            raise UnsupportedOp(
                "hook: expected one backward pass for each sample, got several "
                'together, as of a Jacobian. Use strategy="loop".'
            )
    own = tree_map_only(Tensor, lambda g: g.movedim(axis, 0).clone(), grads)
    versions, results = [*map(version_of, tensors(own))], []
    for number in range(size):
        row = tree_map_only(Tensor, lambda g, n=number: g.select(0, n), own)
        of.update(dict.fromkeys(tensors(row), number))
        with _OfSample(of, level, number) as mode:
            new = hook(*row)
        mode.check(tensors(new))
        results.append(row[0] if new is None else new)
        shapes = [[getattr(g, "shape", g) for g in x] for x in (row[0], results[-1])]
        if shapes[0] != shapes[1] or versions != [*map(version_of, tensors(own))]:
            raise UnsupportedOp(
                "hook: expected one that returns None, or a gradient of the same shape "
                "for each that it gets, got one that returns others, or that writes in "
                'place. Use strategy="loop".'
            )
    columns = zip(*results, strict=True)
    return tuple(None if x[0] is None else torch.stack(x, axis) for x in columns)


class _OfSample(TorchFunctionMode):
    """Takes tensors of the loss, which a hook may close over, for one sample's."""

    def __init__(self, of: Owners, level: int, number: int) -> None:
        super().__init__()
        self._of, self._level, self._number = of, level, number

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        def row(tensor: Tensor) -> Tensor:
            wrapped = modes.is_wrapped(tensor)
            own = modes.in_front(tensor, self._level) if wrapped else None
            if own is None:
                return tensor
            own = own.select(0, self._number)
            self._of[own] = self._number
            return own

        args, named = tree_map_only(Tensor, row, (args, kwargs or {}))
        given = tensors((args, named))
        versions = [*map(version_of, given)]
        result = func(*args, **named)
        if self.check(given):
            pairs = zip(given, versions, strict=True)
            same = {id(each) for each, version in pairs if version_of(each) == version}
            made = [each for each in tensors((result, given)) if id(each) not in same]
            self._of.update(dict.fromkeys(made, self._number))
        return result

    def check(self, given: Sequence[Tensor]) -> bool:
        """Return whether some are of this sample; refuse some of another one."""
        numbers = {self._of.get(each) for each in given} - {None}
        if numbers <= {self._number}:
            return bool(numbers)
        raise UnsupportedOp(
            "hook: expected one that uses no tensor of another call of a hook, which "
            "in a recorded pass may be of another sample, got one that does. Use "
            'strategy="loop".'
        )


def check_saved() -> bool:
    """Check hooks on saved tensors that begin; return whether they are to be."""
    active = autograd.hooks()
    if active is None or autograd.keeps_values(active[0]):
        return False
    autograd.unpack_at_once(_check_unpacked)
    return True


def _check_unpacked(tensor: Tensor, unpacked: Tensor) -> None:
    """Refuse hooks on saved tensors that change values."""
    if checks_collected():
        raise Unrepeatable("hooks on saved tensors are Python")
    same = (tensor == unpacked) | (tensor.isnan() & unpacked.isnan())
    if tensor.dtype != unpacked.dtype or not same.all():
        raise UnsupportedOp(
            "loss: expected hooks on saved tensors that return the values they get, as "
            "save_on_cpu does, got some that change them, which in a recorded "
            'pass would be other tensors. Use strategy="loop".'
        )

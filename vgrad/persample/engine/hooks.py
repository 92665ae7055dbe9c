"""Hooks on gradients, and on saved tensors, in recorded passes.

A gradient in such a pass is one of all samples, `[B, ...]`. A hook is a function of one
sample's, so it runs under a vmap over the samples.

Autograd saves other tensors in such a pass than for one sample. So hooks on them have
to keep all values.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from vgrad.conditions import Unrepeatable
from vgrad.loss.grad_flags import UnsupportedOp
from vgrad.loss.values import NONE
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tensors, tree_map_only

_GRAD_FN: Any = Tensor.grad_fn

Grads = tuple[Tensor | None, ...]


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

    mapped = partial(_mapped, recorder.size, level, axis, of_one)
    return modes.unwrapped(tensor).register_hook(lambda grad: mapped((grad,))[0])


def _on_module(recorder: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run the identity on whose nodes torch puts the backward hooks of a module."""
    call = autograd.hooked_call()
    recorder.watching().note_hook(f"backward hooks of {type(call.module).__name__}")
    mapped = partial(_mapped, recorder.size, modes.current_level(), 0)

    def of_samples(hook: Callable) -> Callable:
        return lambda module, *grads: mapped(partial(hook, module), *grads)

    if type(call.user_hooks) is list:  # torch comes for inputs, and for outputs
        call.user_hooks = tuple(map(of_samples, call.user_hooks))
        call.user_pre_hooks = tuple(map(of_samples, call.user_pre_hooks))
    with recorder.below():
        outputs = autograd.ModuleHooks.apply(*map(recorder.copies, tensors))
    return tuple(
        recorder.logical(new) if modes.is_batched(x) or x.requires_grad else x
        for x, new in zip(tensors, outputs, strict=True)
    )


def _mapped(size: int, level: int, axis: int, hook: Callable, *grads: Grads) -> Grads:
    """Return the first of some gradients, replaced by a hook under vmap."""
    for grad in tensors(grads):
        if modes.is_wrapped(grad) and modes.in_front(grad, level) is not None:
            raise UnsupportedOp(
                "hook: expected one backward pass for each sample, got several "
                'together, as of a Jacobian. Use strategy="loop".'
            )
    with modes.vmapped(size) as (inside, outside):
        if modes.current_level() != level:  # of tensors that the hook closes over
            raise UnsupportedOp(
                "hook: expected a backward pass outside of transforms, got one inside "
                'of another. Use strategy="loop".'
            )
        copies = tree_map_only(Tensor, lambda g: g.movedim(axis, 0).clone(), grads)
        versions = [*map(version_of, tensors(copies))]
        samples = tree_map_only(Tensor, inside, copies)
        new = hook(*samples)
        new = samples[0] if new is None else new
        results = (new,) if isinstance(new, Tensor) else tuple(new)
        shapes = [
            [getattr(g, "shape", g) for g in grads] for grads in (samples[0], results)
        ]
        if shapes[0] != shapes[1] or versions != [*map(version_of, tensors(copies))]:
            raise UnsupportedOp(
                "hook: expected one that returns None, or a gradient of the same shape "
                "for each that it gets, got one that returns others, or that writes in "
                'place. Use strategy="loop".'
            )
        return tuple(
            None if grad is None else outside(grad).movedim(0, axis) for grad in results
        )


def check_saved(*, captured: bool) -> bool:
    """Check hooks on saved tensors that begin; return whether they are to be."""
    active = autograd.hooks()
    if active is None or autograd.keeps_values(active[0]):
        return False
    if captured:
        raise Unrepeatable("hooks on saved tensors are Python")
    autograd.unpack_at_once(_check_unpacked)
    return True


def _check_unpacked(tensor: Tensor, unpacked: Tensor) -> None:
    """Refuse hooks on saved tensors that change values."""
    same = (tensor == unpacked) | (tensor.isnan() & unpacked.isnan())
    if tensor.dtype != unpacked.dtype or not same.all():
        raise UnsupportedOp(
            "loss: expected hooks on saved tensors that return the values they get, as "
            "save_on_cpu does, got some that change them, which in a recorded "
            'pass would be other tensors. Use strategy="loop".'
        )

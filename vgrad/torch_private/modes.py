"""Function modes, autocast's state, and the transforms of `torch.func`.

Torch hands a mode `F.multi_head_attention_forward` or `F.interpolate` as one call and
switches the mode off while it runs. The ops inside matter to modes that handle
individual ops; calling the function again with the mode on would only hand it over
again. So `opened` makes a copy of it that skips the test for a mode.

Rests on torch/overrides.py (the stack of modes, innermost last, and the three tests at
the start of functions of `torch.nn.functional`), on `torch._C` (blocks without modes
and subclasses, and autocast's state over all devices), and on
torch/utils/flop_counter.py (the tracker of modules). A mode that stays on inside of
such functions, a public stack, and an option to count without modules would end the
need.

Each running transform has a level; the innermost has the highest. A vmap wraps each
tensor that it maps over, a gradient each one that it follows.

From torch/csrc/functorch/init.cpp, which `torch._C._functorch` binds:

    current_level     the innermost level, None outside of transforms
    level_of          the level of the outermost wrapper of a tensor, -1 without one
    batch_axis        the axis that a vmap took away there, -1 if none did
    is_batched        whether the outermost wrapper is a vmap's
    is_wrapped        whether there is a wrapper
    unwrapped         the tensor in the outermost wrapper; raises if there is none
    split_batch_axis  the tensor in the wrapper of a level, and its axis, None if there
                      is none
    add_batch_axis    wrap for a level, as `torch.vmap` does with its inputs
    remove_batch_axis unwrap, as `torch.vmap` does with its outputs
    interpreters      the running transforms, outermost first; None without one

From torch/_functorch/pyfunctorch.py, autograd_function.py and vmap.py:

    innermost             the running transform: `level()`, and `lower()`, a block below
                          it; a vmap has `batch_size()`
    without_innermost     a block without the innermost level
    custom_function_call  the call of an autograd.Function, as function modes see it
    vmap_level            a block with a vmap of its own, whose level it gives
    load_decompositions   the set-up by the first vmap, which no two threads may run

`torch.autograd.forward_ad._current_level` is -1 outside of forward mode. Public names
for all of this in `torch.func` would end the need.

Torch raises plain `RuntimeError` for most failures, so their texts stand here. Texts
about vmap come from torch/_functorch and aten/src/ATen/functorch, about autograd from
torch/autograd/__init__.py and torch/_functorch/eager_transforms.py. Errors of classes
of their own would end the need.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction as without_modes
from torch._C import DisableTorchFunctionSubclass as without_subclasses
from torch._C import _is_any_autocast_enabled as autocast_is_on
from torch._C._functorch import _add_batch_dim as add_batch_axis
from torch._C._functorch import _remove_batch_dim as remove_batch_axis
from torch._C._functorch import _unwrap_batched as split_batch_axis
from torch._C._functorch import get_interpreter_stack as interpreters
from torch._C._functorch import get_unwrapped as unwrapped
from torch._C._functorch import is_batchedtensor as is_batched
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._C._functorch import maybe_current_level
from torch._C._functorch import maybe_get_bdim as batch_axis
from torch._C._functorch import maybe_get_level as level_of
from torch._functorch.autograd_function import (
    custom_function_call as custom_function_call,
)
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter as innermost,
)
from torch._functorch.pyfunctorch import (
    temporarily_pop_interpreter_stack as without_innermost,
)
from torch._functorch.vmap import (
    lazy_load_decompositions as load_decompositions,  # pyright: ignore[reportPrivateImportUsage]
)
from torch._functorch.vmap import vmap_increment_nesting as vmap_level
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext as DeviceMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["DeviceMode", "autocast_is_on", "function_modes"]
__all__ += ["without_modes", "without_subclasses"]
__all__ += ["add_batch_axis", "batch_axis", "custom_function_call", "innermost"]
__all__ += ["is_batched", "is_wrapped", "level_of", "load_decompositions"]
__all__ += ["remove_batch_axis", "split_batch_axis", "unwrapped", "vmap_level"]
__all__ += ["without_innermost"]


current_level: Any = maybe_current_level  # an int, or None outside of transforms


def inside_transform() -> bool:
    """Return whether a transform of `torch.func` is running around the caller.

    Forward mode counts, which `linearize` uses without a level of its own.
    """
    return current_level() is not None or forward_ad._current_level >= 0


def active_transforms() -> tuple[str, ...]:
    """Return the kinds of the running transforms, as `("Vmap", "Grad")`."""
    return tuple(each.key().name for each in interpreters() or ())


def is_mapped_here(tensor: Tensor) -> bool:
    """Return whether the innermost transform is a vmap that maps over a tensor.

    If an outer vmap does, the transforms in between have to see torch's own op.
    """
    level = current_level()
    return is_batched(tensor) and level_of(tensor) == level


def exit_to(level: int) -> AbstractContextManager[None]:
    """Leave the transform of a level, and those inside of it, in a block."""
    inside = (current_level() or 0) - level
    if inside < 0:
        return nullcontext()
    return without_innermost() if inside == 0 else _exit(inside + 1)


@contextmanager
def _exit(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(without_innermost())
        yield


def exit_all() -> AbstractContextManager[None]:
    """Leave all transforms in a block; their levels count from 1."""
    return exit_to(1)


def unwrap_all(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory, all wrappers taken off."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


_HANDED_ON = [f"has_torch_function{kind}" for kind in ("", "_unary", "_variadic")]
"""The tests by which torch's Python functions hand a call to modes."""

ASKING = frozenset(
    func
    for func in vars(F).values()
    if isinstance(func, FunctionType) and "requires_grad" in func.__code__.co_names
)
"""Functions that read `requires_grad` of tensors, some of them their own."""


def is_python(func: Callable) -> bool:
    """Return whether `torch.nn.functional` defines a function, in Python."""
    return isinstance(func, FunctionType) and func.__globals__ is vars(F)


def op_name(func: Any) -> str:
    """Return the name of an op or an attribute in messages: `mm`, `grad_fn`."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


@cache
def opened(func: FunctionType, **others: Callable) -> Callable:
    """Return the same function, which does not hand itself to function modes.

    Functions that it calls still do, so run it where the mode is on. `others` replace
    functions that it calls by these names.
    """
    off = dict.fromkeys(_HANDED_ON, lambda *_: False)
    names = {**func.__globals__, **off, **others}
    copy = FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def opened_attention(projections: Callable) -> Callable:
    """Return `F.multi_head_attention_forward`, opened, with other projections.

    `projections(query, key, value, weight, bias)` replaces torch's own function, which
    copies the three to be contiguous, forward and backward:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py#L6191
    """
    return opened(F.multi_head_attention_forward, _in_projection_packed=projections)


class _NoModules(nullcontext):
    """A tracker of modules that tracks none."""

    parents = frozenset({"Global"})


def flop_counter(formulas: Mapping[Any, Any] | None = None) -> FlopCounterMode:
    """Return torch's counter of operations, without its tracker of modules.

    The tracker puts hooks on all modules, which fail inside of gradients and stop a
    recorded pass. `formulas` are for ops that it does not know.
    """
    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas or {}))
    counter.mod_tracker = _NoModules()  # pyright: ignore[reportAttributeAccessIssue]
    return counter


def unoptimized_scripts() -> AbstractContextManager:
    """Run functions of TorchScript op by op; optimized ones differentiate themselves.

    Nor may they specialize on tensors without memory. The end of TorchScript would end
    the need (torch/jit/_fuser.py).
    """
    return torch.jit.optimized_execution(False)  # pyright: ignore[reportPrivateImportUsage]


RANDOM_ERROR = "randomness error mode"
"""A random op under `randomness="error"`."""

SAME_RANDOM_ERROR = "does not currently support same randomness"
"""A draw from a mapped distribution, under `randomness="same"`."""

SAVED_HOOKS_ERRORS = ("saved tensor hooks",)
"""Activation checkpointing, or another use of hooks on saved tensors."""

SETUP_CONTEXT_ERROR = "setup_context"
"""An autograd.Function in the old style, which transforms cannot run."""

HIDDEN_FUNCTION_ERROR = "HigherOrderOperator custom_function_call"
"""The same in a custom op of torch's own, where no function mode sees it."""

BACKWARD_ERRORS = (
    "backward() called inside",
    "attempting to call Tensor.requires_grad_()",
)
"""A backward pass inside a transform."""

ITEM_ERROR = "calling .item() on a Tensor"
"""A call that takes a number of Python and got a tensor."""

VMAP_ERRORS = (
    "vmap:",
    "Batching rule not implemented",
    "vmap over",
    "under vmap",
    "inside of vmap",
    "doesn't have storage",
    "Cannot access storage",
    "mutating directly with `.data`",
    "view size is not compatible",
)
"""An op that vmap cannot run, or not for tensors that are mapped over."""

_NO_RULE = "batching rule for"


def op_without_rule(warning: str) -> str:
    """Return the op that vmap warns of running sample by sample, or nothing."""
    _, found, rest = warning.partition(_NO_RULE)
    return rest.split()[0].rstrip(".") if found else ""

"""Function modes, autocast's state, and the transforms of `torch.func`.

Each running transform has a level; the innermost has the highest. A vmap wraps each
tensor that it maps over, a gradient each one that it follows.
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
from torch._functorch.autograd_function import (
    custom_function_call as custom_function_call,
)
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter as innermost,
)
from torch._functorch.vmap import (
    lazy_load_decompositions as load_decompositions,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as _leave_innermost
from torch.utils._device import DeviceContext as DeviceMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["DeviceMode", "autocast_is_on", "custom_function_call", "function_modes"]
__all__ += ["innermost", "load_decompositions"]
__all__ += ["without_modes", "without_subclasses"]

# `function_modes` has the innermost last. The running transform is `innermost()`: it
# has a `level()`, a block below it, `lower()`, and of a vmap the `batch_size()`. The
# first vmap runs `load_decompositions`, which no two threads may run.

# From torch/csrc/functorch/init.cpp.
_FUNCTORCH: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
current_level = _FUNCTORCH.maybe_current_level  # None outside of transforms
interpreters = _FUNCTORCH.get_interpreter_stack  # outermost first, None without one
# Of the outermost wrapper of a tensor: its level, and the axis that a vmap took away
# there; -1 without one. `unwrapped` raises without a wrapper.
level_of = _FUNCTORCH.maybe_get_level
batch_axis = _FUNCTORCH.maybe_get_bdim
is_wrapped = _FUNCTORCH.is_functorch_wrapped_tensor
is_batched = _FUNCTORCH.is_batchedtensor  # whether it is a vmap's
unwrapped = _FUNCTORCH.get_unwrapped
# As `torch.vmap` does with inputs and outputs, and the tensor in the wrapper of a level
# with its axis, None without one.
add_batch_axis = _FUNCTORCH._add_batch_dim
remove_batch_axis = _FUNCTORCH._remove_batch_dim
split_batch_axis = _FUNCTORCH._unwrap_batched


def leave(mode: Any) -> None:
    """Leave a mode, if it is the innermost, where an interrupt came as it was left."""
    if function_modes()[-1:] == [mode]:
        _leave_innermost()


def inside_transform() -> bool:
    """Return whether a transform of `torch.func` is running around the caller."""
    # Forward mode counts, which `linearize` uses without a level of its own.
    return current_level() is not None or forward_ad._current_level >= 0


def active_transforms() -> tuple[str, ...]:
    """Return the kinds of the running transforms, as `("Vmap", "Grad")`."""
    return tuple(interpreter.key().name for interpreter in interpreters() or ())


def is_mapped_here(tensor: Tensor) -> bool:
    """Return whether the innermost transform is a vmap that maps over a tensor."""
    # If an outer vmap does, the transforms in between have to see torch's own op.
    return is_batched(tensor) and level_of(tensor) == current_level()


def in_front(tensor: Tensor, level: int) -> Tensor | None:
    """Return `[B, ...]` of a tensor that the vmap of a level maps over, else None."""
    below, axis = split_batch_axis(tensor, level)
    return below.movedim(axis, 0) if axis else None if axis is None else below


Change = Callable[[Tensor], Tensor]


class vmap_level:
    """Run a block under a vmap, whose level it yields."""

    # Classes, since a generator for each block takes as long as a small op.
    def __init__(self, size: int, randomness: str = "error") -> None:
        self._size, self._randomness = size, randomness

    def __enter__(self) -> int:
        self._level = _FUNCTORCH._vmap_increment_nesting(self._size, self._randomness)
        return self._level

    def __exit__(self, *raised: object) -> None:
        _FUNCTORCH._vmap_decrement_nesting()


class vmapped(vmap_level):
    """Run a block under a vmap; yield functions that put tensors into it, and back.

    As `torch.vmap`, which treats trees in general, but that costs as much as a small
    model.
    """

    def __enter__(self) -> tuple[Change, Change]:
        load_decompositions()
        super().__enter__()
        return self._inside, self._outside

    def _inside(self, x: Tensor) -> Tensor:
        return add_batch_axis(x, 0, self._level)

    def _outside(self, x: Tensor) -> Tensor:
        return remove_batch_axis(x, self._level, self._size, 0)


class without_innermost:
    """Leave the innermost transform in a block."""

    def __enter__(self) -> None:
        self._innermost = _FUNCTORCH.pop_dynamic_layer_stack()

    def __exit__(self, *raised: object) -> None:
        _FUNCTORCH.push_dynamic_layer_stack(self._innermost)


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
"""The tests by which torch's Python functions hand a call to modes.

A mode gets `F.interpolate` as one call and is off while it runs. The ops inside matter
to modes that handle individual ops.
"""

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
    """Return a copy of a function that does not hand itself to function modes.

    Functions that it calls still do; `others` replace some of them by name.
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


CONVOLUTIONS: Any = (torch.ops.aten.convolution, torch.ops.aten._convolution)
"""The ops by which convolutions reach `flop_counter`, on a CPU."""


class _NoModules(nullcontext):
    parents = frozenset({"Global"})


def flop_counter(formulas: Mapping[Any, Any] | None = None) -> FlopCounterMode:
    """Return torch's counter of operations, with `formulas` of more ops."""
    # Its tracker puts hooks on all modules, which fail inside of gradients and stop a
    # recorded pass.
    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas or {}))
    counter.mod_tracker = _NoModules()  # pyright: ignore[reportAttributeAccessIssue]
    return counter


def unoptimized_scripts() -> AbstractContextManager:
    """Run functions of TorchScript op by op; optimized, they have own derivatives."""
    # Nor may they specialize on tensors without memory (torch/jit/_fuser.py).
    return torch.jit.optimized_execution(False)  # pyright: ignore[reportPrivateImportUsage]


# Torch raises plain `RuntimeError` for most failures, so their texts stand here. Texts
# about vmap come from torch/_functorch and aten/src/ATen/functorch, about autograd from
# torch/autograd/__init__.py and torch/_functorch/eager_transforms.py.

LIMITS = {
    "random numbers": ("randomness error mode",),  # under `randomness="error"`
    # A draw from a mapped distribution, under `randomness="same"`.
    "same random numbers": ("does not currently support same randomness",),
    # Of checkpoints, or other hooks on them; on nodes of all samples.
    "saved tensors": ("saved tensor hooks", "node_creation_hook"),
    # An autograd.Function in the old style; the second in a custom op of torch's own,
    # where no function mode sees it.
    "setup_context": ("setup_context", "HigherOrderOperator custom_function_call"),
    "backward pass": (
        "backward() called inside",
        "attempting to call Tensor.requires_grad_()",
    ),
    "vmap": (
        "vmap:",
        "Batching rule not implemented",
        "vmap over",
        "under vmap",
        "inside of vmap",
        "doesn't have storage",
        "Cannot access storage",
        "mutating directly with `.data`",
        "view size is not compatible",
    ),
}
"""Texts of errors, by the limit of the transforms that they are about."""


def limit_of(message: str) -> str | None:
    """Return the limit that an error is about, None if it is about none."""
    kinds = (kind for kind, texts in LIMITS.items() if any(t in message for t in texts))
    return next(kinds, None)


ITEM_ERRORS = "calling .item() on a Tensor", "value out of a tracing tensor"
"""A call that takes a number of Python and got a tensor, under vmap or in a trace."""

_NO_RULE = "batching rule for"


def op_without_rule(warning: str) -> str:
    """Return the op that vmap warns of running sample by sample, or nothing."""
    _, separator, rest = warning.partition(_NO_RULE)
    return rest.split()[0].rstrip(".") if separator else ""

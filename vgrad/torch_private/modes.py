"""Function modes, autocast's state, and the functions of torch that hide their insides.

Torch hands a mode `F.multi_head_attention_forward` or `F.interpolate` as one call and
switches the mode off while it runs. What happens inside matters to modes that handle
individual ops; calling the function again with the mode on would only hand it over
again. So `opened` makes a copy of it that does not ask whether a mode is there.

Rests on torch/overrides.py (the stack of modes, innermost last, and the three questions
that `torch.nn.functional` asks first), on `torch._C` (blocks without modes and
subclasses, and autocast's state over all devices), and on torch/utils/flop_counter.py
(what tells modules apart). A mode that stays on inside of such functions, a public
stack, and an option to count without modules would end the need.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction as without_modes
from torch._C import DisableTorchFunctionSubclass as without_subclasses
from torch._C import _is_any_autocast_enabled as autocast_is_on
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import resolve_name
from torch.utils._device import DeviceContext as DeviceMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "ASKING",
    "DeviceMode",
    "autocast_is_on",
    "flop_counter",
    "function_modes",
    "is_python",
    "op_name",
    "opened",
    "opened_attention",
    "unoptimized_scripts",
    "without_modes",
    "without_subclasses",
]


_HANDED_ON = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)
"""The questions by which torch's Python functions learn whether a mode wants a call."""

ASKING = frozenset(
    func
    for func in vars(F).values()
    if isinstance(func, FunctionType) and "requires_grad" in func.__code__.co_names
)
"""Functions that ask whether tensors require grad, some of them their own."""


def is_python(func: Callable) -> bool:
    """Tell whether `torch.nn.functional` defines a function, in Python."""
    return isinstance(func, FunctionType) and func.__globals__ is vars(F)


def op_name(func: Any, *, full: bool = False) -> str:
    """Return the name under which users know an op or an attribute, as messages do.

    With `full` it says where torch has the op, so that no two have the same name.

    Example:
        >>> op_name(Tensor.mm), op_name(Tensor.grad_fn.__get__)
        ('mm', 'grad_fn')
        >>> [op_name(op, full=True) for op in (F.linear, torch.mm, Tensor.mm)]
        ['F.linear', 'torch.mm', 'Tensor.mm']
    """
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if not full:
        return name
    for place, holder in {"F": F, "torch": torch, "Tensor": Tensor}.items():
        if getattr(holder, name, None) is func:
            return f"{place}.{name}"
    return resolve_name(func) or f"{func.__module__}.{name}"


@cache
def opened(func: FunctionType, **others: Callable) -> Callable:
    """Return the same function, which does not hand itself to function modes.

    What it calls does, so run it where the mode is on. `others` take the place of
    functions that it calls by these names.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> from torch.overrides import TorchFunctionMode
        >>> class Listing(TorchFunctionMode):
        ...     def __torch_function__(self, func, types, args=(), kwargs=None):
        ...         print(func.__name__)
        ...         return func(*args, **(kwargs or {}))
        >>> logits, target = torch.zeros(2), torch.tensor(0)
        >>> with Listing():
        ...     _ = opened(F.cross_entropy)(logits, target)
        cross_entropy_loss
    """

    def handed_on(*_: Any) -> bool:
        return False

    names = {**func.__globals__, **dict.fromkeys(_HANDED_ON, handed_on), **others}
    copy = FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def opened_attention(projections: Callable) -> Callable:
    """Return `F.multi_head_attention_forward`, opened, which projects in this way.

    `projections(query, key, value, weight, bias)` take the place of those of torch,
    which copy the three to be contiguous, forward and backward:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py#L6191
    """
    return opened(F.multi_head_attention_forward, _in_projection_packed=projections)


class _NoModules(nullcontext):
    """In the place of what tells modules apart."""

    parents = frozenset({"Global"})


def flop_counter(formulas: Mapping[Any, Any] | None = None) -> FlopCounterMode:
    """Return torch's counter of operations, which tells no modules apart.

    For that it puts hooks on all modules, which fail inside of gradients and stop a
    recorded pass. `formulas` are for ops that it does not know.
    """
    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas or {}))
    counter.mod_tracker = _NoModules()  # pyright: ignore[reportAttributeAccessIssue]
    return counter


def unoptimized_scripts() -> AbstractContextManager:
    """Run functions of TorchScript op by op; optimized ones differentiate themselves.

    Nor may they specialize on what they see here: tensors without memory. The end of
    TorchScript would end the need (torch/jit/_fuser.py).
    """
    return torch.jit.optimized_execution(False)  # pyright: ignore[reportPrivateImportUsage]

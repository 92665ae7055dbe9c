"""Run a Python function of torch so that a function mode sees the calls inside it.

A mode is handed `F.multi_head_attention_forward` or `F.interpolate` as one call and is
off while that runs. What happens inside matters to who treats single ops; calling the
function once more with the mode on would only hand it the same call again.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from torch.nn import functional as F

_HANDED_ON = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)
"""What torch's Python functions ask whether a mode wants the call."""


ASKING = frozenset(
    func
    for func in vars(F).values()
    if isinstance(func, FunctionType) and "requires_grad" in func.__code__.co_names
)
"""Functions that go by whether tensors require grad, some of which they make."""


def is_python(func: Callable) -> bool:
    """Tell whether `torch.nn.functional` defines a function, in Python."""
    return isinstance(func, FunctionType) and func.__globals__ is vars(F)


@cache
def opened(func: FunctionType) -> Callable:
    """Return the same function, which does not hand itself to function modes.

    What it calls does, so run it where the mode is on.

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

    names = {**func.__globals__, **dict.fromkeys(_HANDED_ON, handed_on)}
    copy = FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy

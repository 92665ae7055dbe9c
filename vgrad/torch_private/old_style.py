"""Calls of autograd.Functions in the old style, shown to function modes.

Under transforms `Function.apply` hands a call to `custom_function_call`, which modes
see, but raises for a class without `setup_context`. It asks for that one once, and
tests the answer twice: whether to bind arguments to the signature of `forward`, which
in the old style begins with a context, and then whether to raise.

Rests on `Function.apply` of torch/autograd/function.py. Its end, or a call that modes
see for both styles, would end the need.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.autograd import function as _functions

_NAME = "_is_setup_context_defined"
_DEFINED = getattr(_functions, _NAME)
_LOCK = threading.Lock()
_BLOCKS: list[None] = []
_HERE: ContextVar[bool] = ContextVar("shown", default=False)


@contextmanager
def shown() -> Iterator[None]:
    """Show such calls to the modes of this thread while a block runs."""
    with _LOCK:
        _BLOCKS.append(None)
        setattr(_functions, _NAME, _defined)
    token = _HERE.set(True)
    try:
        yield
    finally:
        _HERE.reset(token)
        with _LOCK:
            _BLOCKS.pop()
            if not _BLOCKS:
                setattr(_functions, _NAME, _DEFINED)


def _defined(setup_context: Callable) -> Any:
    return _DEFINED(setup_context) or (_HERE.get() and _SecondTime())


class _SecondTime:
    """Is false when tested for the first time, and true from then on."""

    _tested = False

    def __bool__(self) -> bool:
        tested, self._tested = self._tested, True
        return tested

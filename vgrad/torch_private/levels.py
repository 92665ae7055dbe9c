"""The levels of the transforms of `torch.func`, and the tensors that they wrap.

Each running transform has a level; the innermost has the highest. A vmap wraps each
tensor that it maps over, a gradient each one that it follows.

From torch/csrc/functorch/init.cpp, which `torch._C._functorch` binds:

    current_level     the innermost level, None outside of transforms
    level_of          the level of the outermost wrapper of a tensor, -1 without one
    batch_axis        the axis that a vmap took away there, -1 if none did
    is_batched        whether the outermost wrapper is a vmap's
    is_wrapped        whether there is a wrapper
    unwrapped         what the outermost wrapper wraps; raises if there is none
    split_batch_axis  what the wrapper of a level wraps, and its axis, None if there
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
    load_decompositions   what the first vmap does, which threads must not do at once

`torch.autograd.forward_ad._current_level` is -1 outside of forward mode. Public names
for all of this in `torch.func` would end the need.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor
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

__all__ = [
    "add_batch_axis",
    "batch_axis",
    "below",
    "current_level",
    "custom_function_call",
    "innermost",
    "inside_transform",
    "is_batched",
    "is_wrapped",
    "level_of",
    "load_decompositions",
    "outside",
    "remove_batch_axis",
    "running",
    "split_batch_axis",
    "stored",
    "unwrapped",
    "vmap_level",
    "without_innermost",
]


current_level: Any = maybe_current_level  # an int, or None outside of transforms


def inside_transform() -> bool:
    """Tell whether a transform of `torch.func` is running around the caller.

    Forward mode counts, which `linearize` uses without a level of its own.
    """
    return current_level() is not None or forward_ad._current_level >= 0


def running() -> tuple[str, ...]:
    """Return the kinds of the running transforms, as `("Vmap", "Grad")`."""
    return tuple(each.key().name for each in interpreters() or ())


@contextmanager
def below(level: int) -> Iterator[None]:
    """Leave the transform of a level, and those inside of it, in this block."""
    with ExitStack() as stack:
        while (current_level() or 0) >= level:
            stack.enter_context(without_innermost())
        yield


def outside() -> AbstractContextManager[None]:
    """Leave all transforms in a block; their levels count from 1."""
    return below(1)


def stored(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory, all wrappers taken off."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor

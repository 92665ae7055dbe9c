"""The levels of the transforms of `torch.func`, and the tensors that they wrap.

Each running transform has a level; the innermost has the highest. A vmap wraps each
tensor that it maps over, a gradient each one that it follows. `unwrapped` takes one
wrapper off. Public `torch.func` does not let code ask for any of this
(torch/_functorch/pyfunctorch.py, torch/csrc/functorch/init.cpp); it could end here if
torch made `torch._C._functorch` public.
"""

from typing import Any

from torch import Tensor
from torch._C._functorch import _add_batch_dim as add_batch_axis
from torch._C._functorch import _remove_batch_dim as remove_batch_axis
from torch._C._functorch import _unwrap_batched as split_batch_axis
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
    "current_level",
    "custom_function_call",
    "innermost",
    "inside_transform",
    "is_batched",
    "is_wrapped",
    "level_of",
    "load_decompositions",
    "remove_batch_axis",
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


def stored(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory, all wrappers taken off."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor

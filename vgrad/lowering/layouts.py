"""Which tensors share memory, where torch decides that by their strides.

`reshape`, `flatten` and `contiguous` return a view where they can, else a copy. Under
vmap the result of an op may have other strides than for one sample, and then one is a
view and the other a copy: writing into either gives other numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vgrad.torch_private import modes
from vgrad.torch_private.tensors import storage, version_of

RESHAPES = {torch.reshape, torch.flatten, torch.ravel}
RESHAPES |= {Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel}
RESHAPES |= {Tensor.contiguous}
"""Functions that may return a view or a copy."""


class Layouts:
    """The memory of one run of a function under vmap."""

    def __init__(self) -> None:
        """Know of no odd layout yet."""
        self._odd: set[Any] = set()
        self._doubtful: list[tuple[Tensor, int]] = []

    def after(self, func: Callable, tensors: Sequence[Tensor], output: Any) -> None:
        """Note results that are not contiguous, and copies of them.

        A view has the layout of its base; a result with the layout of an operand would
        have it for one sample, too.
        """
        if func in RESHAPES:
            if not tensors[0].is_contiguous() and self.is_odd(tensors[0]):
                for each in (tensors[0], output):
                    below = modes.unwrap_all(each)
                    self._doubtful.append((below, version_of(below)))
            return
        for each in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(each, Tensor) or not modes.is_wrapped(each):
                continue
            if not each.is_contiguous() and not any(
                _memory(each) == _memory(tensor)
                or (_lie_alike(each, tensor) and not self.is_odd(tensor))
                for tensor in tensors
            ):
                self._odd.add(_memory(each))

    def is_odd(self, tensor: Tensor) -> bool:
        """Tell whether a tensor may have another layout than for one sample."""
        return bool(self._odd) and _memory(tensor) in self._odd

    def disturbed(self) -> bool:
        """Tell whether something was written where it may have two meanings."""
        return any(version_of(each) != version for each, version in self._doubtful)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride()


def _memory(tensor: Tensor) -> Any:
    return storage(modes.unwrap_all(tensor))

"""The types that every module of vgrad shares."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

Params = dict[str, Tensor]
"""What is differentiated: `name -> tensor`."""

Buffers = dict[str, Tensor]
"""What is not: running statistics, masks, frozen parameters."""

Tree = Any
"""Any nesting of dictionaries, lists and tuples with tensors at the leaves."""

Schedule = Callable[[Tensor], Tensor | float]
"""A rate as a function of the number of steps taken so far."""


class LossFn(Protocol):
    """A function of one sample: every tensor comes without the batch dimension."""

    def __call__(self, params: Params, buffers: Buffers, /, *sample: Tree) -> Any:
        """Return a scalar, or `(scalar, aux)` where the caller says `has_aux=True`."""
        ...


class BatchLossFn(Protocol):
    """A function of a whole batch, for steps that need no single samples."""

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Tensor:
        """Return a scalar."""
        ...

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tensor, Buffers]:
        """Return the scalar and the buffers as the forward pass left them."""
        ...

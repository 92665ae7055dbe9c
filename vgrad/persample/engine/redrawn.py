"""Random numbers that samples have drawn before, drawn again for some of them.

A chunk that falls into parts runs again from the start, part by part. Until the
question that split it, each sample has to see the numbers that it saw before. So random
ops run for the whole chunk again, from the same state of the generators, and each part
takes its rows. From there on every part draws numbers of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrad.generators import RandomState, drawn_since, random_state, set_random_state
from vgrad.lowering.truthful import UnsupportedOp
from vgrad.torch_private.tensors import named_arguments
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import tree_map_only


@dataclass(frozen=True)
class Drawn:
    """What a chunk drew before it was split.

    Attributes:
        start: the state of the generators before.
        stop: their state after.
        size: samples of the chunk.
        rows: those among them that run now.
    """

    start: RandomState
    stop: RandomState
    size: int
    rows: Tensor

    def of(self, rows: Tensor) -> "Drawn":
        """Return the same for some of the samples that run now."""
        return replace(self, rows=self.rows[rows])


class Redraw(DispatchMode):
    """Runs a part of a chunk that was split, once or several times."""

    def __init__(
        self, drawn: Sequence[Drawn], tensors: Sequence[Tensor], *, alone: bool
    ) -> None:
        """Start where the chunk did; `alone` is a sample without a batch dimension."""
        super().__init__()
        self._alone = alone
        self._left = list(drawn)
        self._tensors = tensors

    def __enter__(self) -> Any:
        """Go back to the numbers that were drawn first."""
        self._fresh = random_state(self._tensors)
        set_random_state(self._left[0].start)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Go on behind the numbers that all others have drawn."""
        super().__exit__(*error)
        if self._left:
            set_random_state(self._fresh)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an op on the tensors of all samples of the part."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        while self._left and not drawn_since(self._left[0].stop, self._tensors):
            self._left.pop(0)
            follows = self._left[0].start if self._left else self._fresh
            set_random_state(follows)
        if not self._left:
            return func(*args, **kwargs)
        return _drawn(func, args, kwargs, self._left[0], alone=self._alone)


def _drawn(func: Any, args: tuple, kwargs: dict, drawn: Drawn, *, alone: bool) -> Any:
    """Run a random op for a whole chunk, and keep the rows of some samples."""
    name = func.overloadpacket.__name__
    given = named_arguments(func, args, kwargs)
    if name not in _ROW_BY_ROW:
        raise UnsupportedOp(
            f"{name}: expected random numbers that can be drawn once more for some of "
            f"the samples, since the loss takes different branches for them, got some "
            f'whose number depends on values. Use strategy="loop".'
        )
    if "size" in given:
        size = [*given["size"]] if alone else [*given["size"]][1:]
        whole = {**given, "size": [drawn.size, *size]}
    else:
        whole = tree_map_only(
            Tensor, lambda each: _whole(each, drawn, alone=alone), given
        )
    found = func(**whole)
    rows = drawn.rows[0] if alone else drawn.rows
    if name.endswith("_"):
        return given["self"].copy_(found[rows])
    return tree_map_only(Tensor, lambda each: each[rows], found)


_ROW_BY_ROW = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "bernoulli_", "native_dropout", "normal_functional", "normal_"),
    *("uniform_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_"),
}
"""Random ops that draw one number for each of their output, whatever is in it."""


def _whole(tensor: Tensor, drawn: Drawn, *, alone: bool) -> Tensor:
    """Put rows for all samples of the chunk in the place of those that run now.

    In the same order of dimensions in memory, in which numbers are drawn.
    """
    rows = torch.zeros(drawn.size, dtype=torch.int64, device=tensor.device)
    if alone:
        tensor = tensor.unsqueeze(0)
    elif tensor.ndim == 0 or len(tensor) != len(drawn.rows):
        raise UnsupportedOp(
            f"random numbers: expected some for each sample, which can be drawn once "
            f"more, got shape {tuple(tensor.shape)} for {len(drawn.rows)} samples. Use "
            f'strategy="loop".'
        )
    rows[drawn.rows.to(tensor.device)] = torch.arange(len(tensor), device=tensor.device)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    back = [order.index(axis) for axis in range(tensor.ndim)]
    return tensor[rows].permute(order).contiguous().permute(back)

"""A batch of samples: its size, its chunks, and the sensitivity of a sum over it.

B is the number of samples; every tensor of a batch is `[B, ...]`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.tree import map_tensors, with_leaves
from vgrad.typing import ChunkSize, Tree

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Batch:
    """The tensors of a batch, and a tree of as many, to be put together again."""

    size: int
    tree: Tree
    tensors: list[Tensor]
    plain: tuple[Any, ...] = ()  # leaves that are no tensors

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors for a loss, which require no grad under no_grad."""
        if torch.is_grad_enabled():
            return tuple(self.tensors)
        return tuple(tensor.detach() for tensor in self.tensors)

    def select(self, rows: slice | Tensor) -> "Batch":
        """Return the batch of these samples, in this order."""
        size = len(range(self.size)[rows] if isinstance(rows, slice) else rows)
        tensors = [select_rows(tensor, rows) for tensor in self.tensors]
        return Batch(size, self.tree, tensors, self.plain)

    def one(self, number: int) -> tuple[Tensor, ...]:
        """Return the tensors of one sample, without the batch dimension."""
        part = self.select(slice(number, number + 1))
        return tuple(tensor.squeeze(0) for tensor in part.inputs)

    def sample(self, tensors: Iterable[Tensor]) -> Tree:
        """Put the tensors of one sample where they are in the batch."""
        # There are as many: `next` never returns the tensor of the batch, its default.
        return map_tensors(partial(next, iter(tensors)), self.tree)


def select_rows(values: Tensor, rows: slice | Tensor) -> Tensor:
    """Return the values of some samples, whose numbers may be on another device."""
    return values[rows if isinstance(rows, slice) else rows.to(values.device)]


NONE = Batch(0, (), [])
"""Before there is a batch."""


def read(function: str, batch: Tree) -> Batch:
    """Check a batch and find its size."""
    batch, leaves = with_leaves(batch)
    sizes: set[int] = set()
    tensors: list[Tensor] = []
    plain: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.ndim == 0:
                raise ValueError(
                    f"{function}(params, buffers, *batch): expected tensors with a "
                    f"batch dimension in front, got one without dimensions."
                )
            sizes.add(leaf.shape[0])
            tensors.append(leaf)
        elif not isinstance(leaf, _PLAIN):
            raise TypeError(
                f"{function}(params, buffers, *batch): expected tensors in tuples, "
                f"lists and dictionaries, got a {type(leaf).__name__}. Convert it, for "
                f"example with dict(...) or torch.as_tensor(...), or leave it out in "
                f"the loader's collate_fn."
            )
        else:
            plain.append(leaf)
    if len(sizes) != 1:
        got = f"sizes {sorted(sizes)}" if sizes else "no tensor"
        raise ValueError(
            f"{function}(params, buffers, *batch): expected tensors of one batch size, "
            f"got {got}."
        )
    return Batch(sizes.pop(), batch, tensors, tuple(plain))


def each(function: str, batches: Iterable[Any]) -> Iterator[tuple[Tree, ...]]:
    """Yield batches of samples; refuse none, an empty one, and other things."""
    size = 0
    for batch in batches:
        if not isinstance(batch, tuple | list):
            raise TypeError(
                f"{function}(batches): expected tuples of a sample's items, such as "
                f"[(x, y)], got a {type(batch).__name__}."
            )
        if not (size := read(function, batch).size):
            raise ValueError(
                f"{function}(batches): expected a sample at least in each batch, got "
                f"an empty one. Leave it out."
            )
        yield tuple(batch)
    if not size:
        raise ValueError(
            f"{function}(batches): expected a batch at least, got none. Pass a list of "
            f"batches, since an iterator is used up after its first use."
        )


def check_mask(function: str, mask: Any, size: int) -> None:
    """Refuse a mask that is not boolean: a 2 would count a sample twice."""
    tensor = isinstance(mask, Tensor)
    if not tensor or mask.dtype != torch.bool or mask.shape != (size,):
        got = f"{mask.dtype} {tuple(mask.shape)}" if tensor else type(mask).__name__
        raise ValueError(
            f"{function}(params, buffers, *batch, mask): expected a boolean tensor of "
            f"shape ({size},), True for the samples that count, got {got}."
        )


def chunks(size: int, chunk_size: int | None) -> Iterator[slice]:
    """Yield consecutive chunks of a batch; none of an empty one."""
    step = chunk_size or max(size, 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def checked_chunk_size(function: str, chunk_size: ChunkSize) -> ChunkSize:
    """Return None, "auto" or a whole number above zero; refuse anything else."""
    if chunk_size is None:
        return None
    if isinstance(chunk_size, str):
        checks.choice(function, ("auto",), chunk_size=chunk_size)
        return "auto"
    [number] = checks.integers(function, minimum=1, chunk_size=chunk_size)
    return number


Neighbours = Literal["add_or_remove_one"]


@dataclass(frozen=True)
class Sensitivity:
    """The L2 sensitivity of a sum and the neighbouring relation it holds for.

    `value` bounds the L2 norm of `f(D) - f(D')` over all data sets D and D' that differ
    by exactly one added sample, except for the rounding errors of the other samples
    (figures are in `vgrad/dp/noise.py`). Noise is added by handing this object on,
    never by repeating its number.

    Raises:
        ValueError: `value` is not positive.

    Example:
        >>> Sensitivity(0.5).value
        0.5
    """

    value: Any  # a number, or a tensor where the bound is one
    neighbours: Neighbours = "add_or_remove_one"
    # The bounds and the divisor of the sum. A tensor is compared without a wait.
    made_of: tuple[Any, float] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor):
            [value] = checks.positive("Sensitivity", value=self.value)
            object.__setattr__(self, "value", value)
        allowed = get_args(Neighbours)
        checks.choice("Sensitivity", allowed, neighbours=self.neighbours)

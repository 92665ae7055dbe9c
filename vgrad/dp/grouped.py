"""Data sets whose items are groups of items of another one, each group one sample.

A group is a sample and its augmented copies, or the samples of a unit of privacy.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from vgrad.generators import RNG_LOCK, random_state, set_random_state, set_seed
from vgrad.tree import map_tensors
from vgrad.typing import Tree

Augment = Callable[[Any], Any]
"""Returns another version of an item of a data set."""


@dataclass(frozen=True)
class Drawn:
    """The index of a sample in `Grouped`: its rows, and a seed for each of them.

    No other data set takes it for a row.
    """

    rows: tuple[int, ...]
    seeds: tuple[int, ...] = ()


class Grouped(Dataset[list]):
    """A data set whose items are lists of items of another one, maybe augmented.

    A whole number stands for one item by itself, of which the shapes of a batch follow.
    """

    def __init__(
        self, dataset: Dataset[Any], augment: Augment | None, shape: tuple[int, ...]
    ) -> None:
        self.dataset, self._augment, self._shape = dataset, augment, shape

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, drawn: Drawn | int) -> Any:
        if not isinstance(drawn, Drawn):
            return self._items(drawn, 0, 1)[0]
        count = 1 if self._augment is None else self._shape[-1]
        pairs = zip_longest(drawn.rows, drawn.seeds, fillvalue=0)
        return [item for row, seed in pairs for item in self._items(row, seed, count)]

    def _items(self, row: int, seed: int, count: int) -> list[Any]:
        item = self.dataset[row]
        if self._augment is None:
            return [item]
        with seeded(seed):
            return [self._augment(item) for _ in range(count)]

    def collate(self, collate_fn: Callable[[list], Tree]) -> Callable[[list], Tree]:
        """Return a function that collates all items, and gives each group an axis."""
        return partial(_collated, collate_fn, self._shape)


def _collated(
    collate_fn: Callable[[list], Tree], shape: tuple[int, ...], groups: list[list]
) -> Tree:
    count, items = math.prod(shape), []
    for group in groups:
        items += group + group[:1] * (count - len(group))  # a mask leaves these out

    def grouped(leaf: Tensor) -> Tensor:
        if len(leaf) != len(items):
            raise TypeError(
                f"PrivateGradients(collate_fn): expected tensors with one row for each "
                f"of {len(items)} items, got one of shape {tuple(leaf.shape)}."
            )
        return leaf.reshape(len(groups), *shape, *leaf.shape[1:])

    return map_tensors(grouped, collate_fn(items))


@contextmanager
def seeded(seed: int, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Seed all generators, of the tensors' devices too, and restore them."""
    with RNG_LOCK:
        before = random.getstate(), np.random.get_state(), random_state(tensors)
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            set_seed(seed, tensors)
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            set_random_state(before[2])

"""The batches that an account is for, as functions of a key and the step.

* Poisson sampling: every sample is in a batch independently, with one probability, and
  of a batch that is too large a random part is left.
* Cyclic Poisson sampling: step t samples from group t mod b of b groups.
* Fixed order: batches of one size, in an order that is the same in every epoch.

Epsilon of shuffled batches of a fixed size can be above 10 where Poisson sampling gives
about 1 (arXiv 2403.17673, 2405.20769).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, default_collate

from vgrad import checks, generators
from vgrad.dp.grouped import Grouped
from vgrad.tree import map_tensors, tree_leaves
from vgrad.typing import Tree


def poisson_sample(
    dataset_size: int,
    sampling_rate: float,
    *,
    key: Tensor,
    step: int,
    max_batch_size: int | None = None,
    among: np.ndarray | None = None,
) -> Tensor:
    """Draw a batch: each index with probability `sampling_rate`. -> [B], B varies.

    B is binomial with mean `sampling_rate * dataset_size` and may be zero. Of more than
    `max_batch_size` indices a uniform subset of so many is left; `among`, bool `[N]`,
    leaves indices out. The indices are int64, ascending, on the CPU, and a function of
    the arguments. Cost: one float64 number per sample of the data set.

    Example:
        >>> from vgrad.dp import secret_key
        >>> poisson_sample(10, 0.3, key=secret_key(seed=0), step=0)
        tensor([0, 4])
    """
    [dataset_size] = checks.integers(
        "poisson_sample", minimum=1, dataset_size=dataset_size
    )
    [step] = checks.integers("poisson_sample", minimum=0, step=step)
    sampling_rate = check_rate("poisson_sample", sampling_rate)
    generators.check_key("poisson_sample", key)
    numbers = _uniform(dataset_size, key, "batch", step)
    drawn = numbers < sampling_rate
    rows = (drawn if among is None else drawn & among).nonzero()[0]
    if max_batch_size is not None and len(rows) > max_batch_size:
        smallest = np.argsort(numbers[rows], kind="stable")[:max_batch_size]
        rows = np.sort(rows[smallest])
    return torch.from_numpy(rows)


def _uniform(count: int, key: Tensor, *place: Any) -> np.ndarray:
    stream = generators.stream(key, *place)
    return generators.drawn(np.random.Generator.random, stream, count)


def random_groups(
    dataset_size: int, count: int, *, key: Tensor, equal: bool
) -> np.ndarray:
    """Draw a group for each index, int64 `[N]`: independently, or of equal sizes.

    An independent draw does not depend on the other samples. Sizes of equal groups do,
    by one at most.
    """
    numbers = _uniform(dataset_size, key, "groups")
    if equal:
        return np.argsort(np.argsort(numbers, kind="stable")) % count
    return (numbers * count).astype(np.int64)


def random_order(dataset_size: int, *, key: Tensor) -> Tensor:
    """Draw an order of all indices, int64 `[N]`."""
    return torch.from_numpy(np.argsort(_uniform(dataset_size, key, "order")))


def in_order(order: Tensor, batch_size: int, step: int) -> Tensor:
    """Return the batch of a step: parts of an order, the last of which may be short."""
    per_epoch = -(-len(order) // batch_size)
    start = step % per_epoch * batch_size
    return order[start : start + batch_size].sort().values


class StepBatches:
    """The batches of the steps from `start` to `steps`, lists of indices.

    They depend on a key and the step only: workers may read ahead, and a run resumed at
    step `start` gets the same batches.
    """

    def __init__(
        self,
        draw: Callable[[int], list[Any]],
        dataset_size: int,
        steps: int,
        start: int,
        *,
        key: Tensor,
        place: tuple[Any, ...],
    ) -> None:
        function = type(self).__name__
        [self.start] = checks.integers(function, minimum=0, start=start)
        if self.start > steps:
            raise ValueError(
                f"{function}(start={start}, steps={steps}): expected a start of at "
                f"most the number of steps. All of them have been taken; make a plan "
                f"with more."
            )
        self.dataset_size, self.steps = dataset_size, steps
        self._draw, self._key, self._place = draw, key, place
        self._served = False

    def __len__(self) -> int:
        return self.steps - self.start

    @property
    def digest(self) -> str:
        """A hash of the batches, which does not reveal the key."""
        place = "sampler", self.dataset_size, *self._place
        return f"{generators.stream(self._key, *place, self.start, self.steps):032x}"

    def __iter__(self) -> Iterator[list[Any]]:
        check_drawer(self)
        # A DataLoader with workers makes two iterators, but draws from one.
        if self._served:
            raise RuntimeError(
                f"{type(self).__name__}: expected one pass over the batches of a run, "
                f"got a second one, which would draw the same batches again. Make a "
                f"sampler from the state that the run has reached, plan.sampler(state)."
            )
        self._served = True
        yield from map(self._draw, range(self.start, self.steps))


class PoissonBatchSampler(StepBatches):
    """Poisson batches of indices for a `DataLoader`, from step `start` to `steps`.

    Pass it as `DataLoader(dataset, batch_sampler=..., collate_fn=collate(dataset))`,
    where `collate` makes empty batches. Batches are drawn by `poisson_sample`, as lists
    of indices. They depend on the key and the step only: workers may read ahead, and a
    run resumed at step `start` gets the same batches.

    Raises:
        ValueError: `start` is above `steps`, or an argument is out of range.
        TypeError: when a pass begins, if a `DataLoader` has it as `sampler=`, which
            would take each batch for one sample.
        RuntimeError: when a second pass begins, which would repeat released batches.

    Example:
        >>> from vgrad.dp import secret_key
        >>> list(PoissonBatchSampler(4, 0.25, steps=3, key=secret_key(seed=0)))
        [[0], [3], []]
    """

    def __init__(
        self,
        dataset_size: int,
        sampling_rate: float,
        steps: int,
        *,
        key: Tensor,
        start: int = 0,
        max_batch_size: int | None = None,
    ) -> None:
        function, run = "PoissonBatchSampler", {"dataset_size": dataset_size}
        cap = {} if max_batch_size is None else {"max_batch_size": max_batch_size}
        size, steps, *rest = checks.integers(
            function, minimum=1, **run, steps=steps, **cap
        )
        cap: Any = dict(zip(cap, rest, strict=True))
        rate = check_rate(function, sampling_rate)
        generators.check_key(function, key)

        def draw(step: int) -> list[int]:
            return poisson_sample(size, rate, key=key, step=step, **cap).tolist()

        place = repr(rate), *cap.values()
        super().__init__(draw, size, steps, start, key=key, place=place)


def check_drawer(sampler: Any) -> None:
    """Refuse a sampler of batches if a `BatchSampler` draws single indices from it."""
    drawer = sys._getframe(2).f_locals.get("self")  # of the caller's caller
    single = getattr(drawer, "sampler", None) is sampler
    if isinstance(drawer, BatchSampler) and single:
        raise TypeError(
            f"DataLoader(sampler): expected single indices, got a "
            f"{type(sampler).__name__}, each of whose batches would be one sample. "
            f"Pass it as batch_sampler=, with collate_fn=vgrad.dp.collate(dataset)."
        )


def collate(
    dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Tree] = default_collate
) -> Callable[[list[Any]], Tree]:
    """Make a collate function that turns an empty batch into tensors without samples.

    Batches with samples go to `collate_fn`. An empty batch has the tree, trailing
    shapes and dtypes of `collate_fn([dataset[0]])`, which is called once, now.

    Raises:
        TypeError: `collate_fn` does not return a tree of tensors with the batch
            dimension in front.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.ones(4, 2), torch.arange(4))
        >>> x, y = collate(dataset)([])
        >>> x.shape, y.dtype
        (torch.Size([0, 2]), torch.int64)
    """
    one = collate_fn([dataset[0]])
    for leaf in tree_leaves(one):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != 1:
            got = f"a {type(leaf).__name__}"
            if isinstance(leaf, Tensor):  # without its value, which is private
                got = f"a tensor of {leaf.dtype} {tuple(leaf.shape)}"
            raise TypeError(
                f"collate(collate_fn): expected tensors with one row for one sample, "
                f"got {got}. Return a tree of tensors with the batch dimension in "
                f"front, and nothing else: leave out names and other texts."
            )
    empty = map_tensors(lambda leaf: leaf[:0], one)
    # A partial, unlike a closure, can be pickled for the workers of a DataLoader.
    collated = partial(_collate, collate_fn, empty)
    return dataset.collate(collated) if isinstance(dataset, Grouped) else collated


def _collate(collate_fn: Callable, empty: Tree, samples: list[Any]) -> Tree:
    return collate_fn(samples) if samples else map_tensors(torch.clone, empty)


def check_rate(function: str, sampling_rate: Any) -> float:
    """Return a probability above zero, and refuse anything else."""
    [sampling_rate] = checks.positive(function, sampling_rate=sampling_rate)
    if sampling_rate > 1:
        raise ValueError(
            f"{function}(sampling_rate={sampling_rate!r}): expected a probability, at "
            "most 1. It is the expected batch size over the size of the data set."
        )
    return sampling_rate

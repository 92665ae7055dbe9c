"""Poisson sampling: every sample is in a batch with the same probability, on its own.

The batches vary in size and may be empty; both are part of the guarantee, and an empty
batch gets noise and counts as a step like any other. Shuffled batches of a fixed size
are not offered, because the accounting of Poisson batches does not bound their privacy,
which may be considerably worse (arXiv 2403.17673): for sampling without replacement
epsilon was found above 10 where Poisson sampling gives about 1 (arXiv 2405.20769).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, default_collate

from vgrad import checks, generators
from vgrad.tree import tree_leaves, tree_map
from vgrad.typing import Tree


def poisson_sample(
    dataset_size: int, sampling_rate: float, *, key: Tensor, step: int
) -> Tensor:
    """Draw a batch: each index with probability `sampling_rate`. -> [B], B varies.

    B is binomial with mean `sampling_rate * dataset_size` and may be zero. The indices
    are int64, ascending, on the CPU. They are a function of the arguments: the batch of
    a step can be drawn again, and those of two steps are independent. One float64
    number is drawn per sample of the data set, because float32 draws are multiples of
    2^-24, too coarse for small rates.

    Raises:
        TypeError: `key` is not what `secret_key` returns.
        ValueError: `dataset_size` is not a whole number of at least one, `step` not one
            of zero or more, or `sampling_rate` is not in (0, 1].

    Example:
        >>> from vgrad.dp import secret_key
        >>> poisson_sample(10, 0.3, key=secret_key(seed=0), step=0)
        tensor([0, 4])
    """
    [dataset_size] = checks.whole("poisson_sample", least=1, dataset_size=dataset_size)
    [step] = checks.whole("poisson_sample", least=0, step=step)
    check_rate("poisson_sample", sampling_rate)
    generators.check_key("poisson_sample", key)
    stream = generators.stream(key, "batch", step)
    drawn = generators.drawn(np.random.Generator.random, stream, dataset_size)
    return torch.from_numpy((drawn < sampling_rate).nonzero()[0])


class PoissonBatchSampler:
    """Poisson batches of indices for a `DataLoader`, from step `start` to `steps`.

    Pass it as `DataLoader(dataset, batch_sampler=..., collate_fn=collate(dataset))`,
    since `collate` knows what an empty batch looks like. Batches are those of
    `poisson_sample`, lists of indices, some maybe empty: a worker may read ahead, and a
    run that goes on at step `start` gets the batches that it would have had.

    It serves one pass. A second one would repeat batches that have been released.

    Raises:
        TypeError, ValueError: as `poisson_sample`, or `steps` is not a whole number of
            at least one, or `start` not one from zero to `steps`.
        TypeError: when a pass begins, if a `DataLoader` has it as `sampler=`, which
            would take each batch for one sample.
        RuntimeError: when a second pass begins.

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
    ) -> None:
        """Check the arguments."""
        function = "PoissonBatchSampler"
        dataset_size, steps = checks.whole(
            function, least=1, dataset_size=dataset_size, steps=steps
        )
        [start] = checks.whole(function, least=0, start=start)
        check_rate(function, sampling_rate)
        generators.check_key(function, key)
        if start > steps:
            raise ValueError(
                f"PoissonBatchSampler(start={start}, steps={steps}): expected a start "
                f"of at most the number of steps. All of them have been taken; make a "
                f"plan with more."
            )
        self.dataset_size, self.sampling_rate = dataset_size, sampling_rate
        self.start, self.steps = start, steps
        self._key, self._served = key, False

    def __len__(self) -> int:
        """Return the number of batches, empty ones included."""
        return self.steps - self.start

    @property
    def digest(self) -> str:
        """Tell samplers of different batches apart, and nothing of the key."""
        place = ("sampler", self.dataset_size, repr(self.sampling_rate))
        return f"{generators.stream(self._key, *place, self.start, self.steps):032x}"

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the batches one by one."""
        check_drawer(self, sys._getframe(1))
        # Checked when the first batch is drawn: a DataLoader with workers makes two
        # iterators and uses one.
        if self._served:
            raise RuntimeError(
                "PoissonBatchSampler: expected one pass over the batches of a run, got "
                "a second one, which would draw the same batches again. Make a sampler "
                "from the state that the run has reached, plan.sampler(state)."
            )
        self._served = True
        size, rate = self.dataset_size, self.sampling_rate
        for step in range(self.start, self.steps):
            yield poisson_sample(size, rate, key=self._key, step=step).tolist()


def check_drawer(sampler: Any, frame: FrameType) -> None:
    """Refuse a sampler of batches in the place of a sampler of single indices.

    `frame` is that which draws from it. A `DataLoader` tells a sampler nothing, but
    draws from one of single indices by a `BatchSampler`.
    """
    drawer = frame.f_locals.get("self")
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

    Batches with samples go to `collate_fn`. The tree, the trailing shapes and the
    dtypes of an empty batch are learned now, from `collate_fn([dataset[0]])`; where
    samples differ in shape, those of the first one are taken.

    Raises:
        TypeError: `collate_fn` returns something other than a tree of tensors with one
            row per sample.

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
            raise TypeError(
                f"collate(collate_fn): expected tensors with one row for one sample, "
                f"got {_described(leaf)}. Return a tree of tensors with the batch "
                f"dimension in front, and nothing else."
            )
    empty = tree_map(lambda leaf: leaf[:0], one)
    # A partial, unlike a closure, can be sent to the workers of a DataLoader.
    return partial(_collate, collate_fn, empty)


def _described(leaf: Any) -> str:
    """Return the kind of a leaf, and nothing of its value, which is private."""
    if isinstance(leaf, Tensor):
        return f"a tensor of {leaf.dtype} {tuple(leaf.shape)}"
    return f"a {type(leaf).__name__}"


def _collate(
    collate_fn: Callable[[list[Any]], Tree], empty: Tree, samples: list[Any]
) -> Tree:
    """Collate the samples, or make a new copy of the empty batch."""
    if len(samples) > 0:
        return collate_fn(samples)
    return tree_map(torch.clone, empty)


def check_rate(function: str, sampling_rate: Any) -> None:
    """Refuse what is not a probability above zero."""
    checks.positive(function, sampling_rate=sampling_rate)
    if sampling_rate > 1:
        raise ValueError(
            f"{function}(sampling_rate={sampling_rate!r}): expected a probability, at "
            "most 1. It is the expected batch size over the size of the data set."
        )

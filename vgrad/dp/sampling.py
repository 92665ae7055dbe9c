"""Poisson sampling: every sample is in a batch independently, with one probability.

The batches vary in size and may be empty; both are part of the guarantee, and an empty
batch gets noise and counts as a step like any other. Shuffled batches of a fixed size
are not offered, because the accounting of Poisson batches does not bound their privacy,
which may be considerably worse (arXiv 2403.17673): for sampling without replacement
epsilon was found above 10 where Poisson sampling gives about 1 (arXiv 2405.20769).
"""

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from vgrad import checks, generators
from vgrad.tree import map_tensors, tree_leaves
from vgrad.typing import Tree

if TYPE_CHECKING:
    from vgrad.dp.plan import Plan


def poisson_sample(
    dataset_size: int, sampling_rate: float, *, key: Tensor, step: int
) -> Tensor:
    """Draw a batch: each index with probability `sampling_rate`. -> [B], B varies.

    B is binomial with mean `sampling_rate * dataset_size` and may be zero. The indices
    are int64, ascending, on the CPU. They are a function of the arguments: the batch of
    a step can be drawn again, and the batches of two steps are independent. One float64
    number is drawn per sample of the data set, because float32 draws are multiples of
    2^-24, too coarse for small rates.

    Raises:
        ValueError: `sampling_rate` is not in (0, 1].

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
    where `collate` makes empty batches. Batches are drawn by `poisson_sample`, as lists
    of indices, some possibly empty. They depend on the key and the step only: workers
    may read ahead, and a run resumed at step `start` gets the same batches.

    It can be iterated once. A second pass would repeat batches that have been released.

    Raises:
        ValueError: `start` is above `steps`, or an argument is out of range.
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
        return self.steps - self.start

    @property
    def digest(self) -> str:
        """A hash of the batches, which does not reveal the key."""
        place = ("sampler", self.dataset_size, repr(self.sampling_rate))
        return f"{generators.stream(self._key, *place, self.start, self.steps):032x}"

    def __iter__(self) -> Iterator[list[int]]:
        check_drawer(self, sys._getframe(1))
        # A DataLoader with workers makes two iterators, but draws from one.
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
    """Refuse a sampler of batches that is used as a sampler of single indices.

    `frame` is the frame that draws from it: a `DataLoader` draws single indices from a
    `BatchSampler`.
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
            raise TypeError(
                f"collate(collate_fn): expected tensors with one row for one sample, "
                f"got {_described(leaf)}. Return a tree of tensors with the batch "
                f"dimension in front, and nothing else."
            )
    empty = map_tensors(lambda leaf: leaf[:0], one)
    # A partial, unlike a closure, can be pickled for the workers of a DataLoader.
    return partial(_collate, collate_fn, empty)


def _described(leaf: Any) -> str:
    """Describe a leaf without its value, which is private."""
    if isinstance(leaf, Tensor):
        return f"a tensor of {leaf.dtype} {tuple(leaf.shape)}"
    return f"a {type(leaf).__name__}"


def _collate(
    collate_fn: Callable[[list[Any]], Tree], empty: Tree, samples: list[Any]
) -> Tree:
    """Collate the samples, or copy the empty batch."""
    if len(samples) > 0:
        return collate_fn(samples)
    return map_tensors(torch.clone, empty)


def check_rate(function: str, sampling_rate: Any) -> None:
    """Refuse anything but a probability above zero."""
    checks.positive(function, sampling_rate=sampling_rate)
    if sampling_rate > 1:
        raise ValueError(
            f"{function}(sampling_rate={sampling_rate!r}): expected a probability, at "
            "most 1. It is the expected batch size over the size of the data set."
        )


class PhysicalBatch(NamedTuple):
    """The physical batch `number` of a logical batch; `last` if it ends it.

    Attributes:
        rows: indices of the samples.
    """

    number: int
    last: bool
    rows: list[int]


@dataclass
class RunState:
    """The steps that a run has taken, and the key of its batches and noise.

    Attributes:
        process: the process that may use the key. A fork of it has the key, too.
    """

    key: Tensor = field(repr=False)
    step: int = 0
    process: int = field(default_factory=os.getpid)


_CHOOSING = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_CHOOSING += ("in_order",)
"""Options of a DataLoader that choose the samples of a batch, or reorder batches."""


class PoissonLoader:
    """Loads the batches of a run. A pass is an epoch, or the rest of one.

    Its length is the number of physical batches of the current epoch, empty ones
    included. After a `break` the next pass resumes after the last batch used.

    Attributes:
        dataset: the data set.
        pending: the batch that was yielded last, until it is used.
        keeps_yielded: whether `yielded` holds the tensors of that batch.
    """

    def __init__(
        self,
        plan: "Plan",
        state: RunState,
        dataset: Dataset[Any],
        *,
        physical_batch_size: int | None,
        options: dict[str, Any],
    ) -> None:
        for name in _CHOOSING:
            if name in options:
                raise ValueError(
                    f"PrivateGradients({name}={checks.shown(options[name])}): expected "
                    f"options of a DataLoader that do not choose samples (the plan "
                    f"does), such as collate_fn, num_workers or pin_memory."
                )
        if physical_batch_size is not None:
            [physical_batch_size] = checks.whole(
                "PrivateGradients", least=1, physical_batch_size=physical_batch_size
            )
        self.dataset = dataset
        self.pending: PhysicalBatch | None = None
        self.keeps_yielded = False
        self.yielded: Tree = None
        self._passes = 0
        self._batches = _PhysicalBatches(plan, state, physical_batch_size)
        collate_fn = collate(dataset, options.get("collate_fn") or default_collate)
        options = {**options, "collate_fn": collate_fn}
        self._loader = DataLoader(dataset, batch_sampler=self._batches, **options)

    def __len__(self) -> int:
        return self._batches.count()

    def __iter__(self) -> Iterator[Tree]:
        self._batches.check_left()
        self.restart()
        number, drawn = self._passes, self._batches.drawn
        for batch in self._loader:
            self.pending = drawn.popleft()
            self.yielded = batch if self.keeps_yielded else None
            yield batch
            if number != self._passes:
                raise RuntimeError(
                    "PrivateGradients.loader: expected one pass at a time, got a "
                    "second one that began before this one ended. Finish one loop "
                    "first."
                )
            if self.pending is not None:
                raise RuntimeError(
                    "PrivateGradients.loader: expected backward(*batch) on every "
                    "batch, empty ones too, got the next one drawn without it. "
                    "Skipping batches reveals data: remove any code that skips them "
                    "or reads ahead."
                )

    def restart(self) -> None:
        """Drop the pending batch, and end a running pass."""
        self._passes += 1
        self.pending = None
        self._batches.drawn = deque()


class _PhysicalBatches:
    """The batch sampler of the `DataLoader`, whose workers may be some batches ahead.

    It has no reference to the loader: a `DataLoader` in a reference cycle would wait
    seconds for its workers when the cycle is collected.
    """

    def __init__(self, plan: "Plan", state: RunState, size: int | None) -> None:
        self.drawn: deque[PhysicalBatch] = deque()
        self._plan, self._state, self._size = plan, state, size

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self.drawn
        for step in range(self._state.step, self._epoch().stop):
            for batch in self._of_step(step):
                drawn.append(batch)
                yield batch.rows

    def count(self) -> int:
        """Count the physical batches of the current epoch."""
        if self._size is None:
            return len(self._epoch())
        return sum(1 for step in self._epoch() for _ in self._of_step(step))

    def check_left(self) -> None:
        """Refuse a pass after the last step of the plan, or before its first one."""
        if self._state.step >= self._plan.steps:
            raise RuntimeError(
                f"PrivateGradients.loader: expected a run with steps left, got one "
                f"that has taken the {self._plan.steps} steps of its plan. Plan more "
                f"epochs from the start."
            )
        if self._state.step < self._plan.earlier_steps:
            raise RuntimeError(
                f"PrivateGradients.loader: expected a run that has taken the "
                f"{self._plan.earlier_steps} steps that plan.after(other, steps) "
                f"counts, got one that has taken {self._state.step}. Load its state "
                f"with load_state_dict."
            )

    def _of_step(self, step: int) -> Iterator[PhysicalBatch]:
        """Yield the physical batches of a step, at least one."""
        rows = self._plan.sample(key=self._state.key, step=step).tolist()
        size = self._size or max(1, len(rows))
        count = max(1, math.ceil(len(rows) / size))
        for number in range(count):
            some = rows[number * size : (number + 1) * size]
            yield PhysicalBatch(number, number == count - 1, some)

    def _epoch(self) -> range:
        """Return the steps of the current epoch."""
        length, last = self._plan.steps_per_epoch, self._plan.steps - 1
        first = self._plan.earlier_steps
        taken = max(0, min(self._state.step, last) - first)
        start = first + taken // length * length
        return range(start, min(start + length, last + 1))

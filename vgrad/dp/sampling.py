"""The batches that an account is for, as functions of a key and the step.

* Poisson sampling: every sample is in a batch independently, with one probability, and
  of a batch that is too large a random part is left.
* Cyclic Poisson sampling: step t samples from group t mod b of b groups.
* Fixed order: batches of one size, in an order that is the same in every epoch.

Epsilon of shuffled batches of a fixed size can be above 10 where Poisson sampling gives
about 1 (arXiv 2403.17673, 2405.20769).
"""

import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from vgrad import checks, generators
from vgrad.dp.grouped import Drawn, Grouped
from vgrad.tree import map_tensors, tree_leaves
from vgrad.typing import Tree

if TYPE_CHECKING:
    from vgrad.dp.plan import Plan
    from vgrad.dp.units import Units


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
    [dataset_size] = checks.whole("poisson_sample", least=1, dataset_size=dataset_size)
    [step] = checks.whole("poisson_sample", least=0, step=step)
    sampling_rate = check_rate("poisson_sample", sampling_rate)
    generators.check_key("poisson_sample", key)
    numbers = _uniform(dataset_size, key, "batch", step)
    drawn = numbers < sampling_rate
    rows = (drawn if among is None else drawn & among).nonzero()[0]
    if max_batch_size is not None and len(rows) > max_batch_size:
        least = np.argsort(numbers[rows], kind="stable")[:max_batch_size]
        rows = np.sort(rows[least])
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
        [self.start] = checks.whole(function, least=0, start=start)
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
        most = {} if max_batch_size is None else {"max_batch_size": max_batch_size}
        size, steps, *rest = checks.whole(function, least=1, **run, steps=steps, **most)
        most: Any = dict(zip(most, rest, strict=True))
        rate = check_rate(function, sampling_rate)
        generators.check_key(function, key)

        def draw(step: int) -> list[int]:
            return poisson_sample(size, rate, key=key, step=step, **most).tolist()

        place = repr(rate), *most.values()
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


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that are none of a `DataLoader`, or choose samples."""
    for name, value in options.items():
        if name not in inspect.signature(DataLoader).parameters:
            raise TypeError(
                f"PrivateGradients({name}=...): expected options of its own or of a "
                f"DataLoader, got another one. For one of Opacus see the page "
                f"docs/from_opacus.md; numbers of the run can be a plan=Plan(...)."
            )
        if name in "shuffle sampler batch_sampler drop_last in_order".split():
            raise ValueError(
                f"PrivateGradients({name}={checks.shown(value)}): expected options of "
                f"a DataLoader that do not choose samples (the plan does), such as "
                f"collate_fn, num_workers or pin_memory."
            )


class PhysicalBatch(NamedTuple):
    """The samples `rows`, a part of a logical batch, which it ends if it is `last`."""

    number: int
    last: bool
    rows: list[Any]  # or units
    loaded: Tree = None  # as the loader yields it


class Run:
    """A key and the steps taken with it: the batch sampler of a `DataLoader`.

    Attributes:
        process: the process that may use the key. A fork of it has the key, too.
        drawn: batches that workers of the loader may be ahead.
    """

    def __init__(
        self,
        plan: "Plan",
        key: Tensor,
        size: int | None,
        units: "Units | None" = None,
        *,
        seeded: bool = False,
    ) -> None:
        if size is not None:
            [size] = checks.whole("PrivateGradients", least=1, physical_batch_size=size)
        # No reference to the loader, since a DataLoader in a cycle waits seconds for
        # its workers when the cycle is collected.
        self.plan, self.key, self._size = plan, key, size
        self.units, self._seeded = units, seeded
        self.step, self.process = 0, os.getpid()
        self.drawn: deque[PhysicalBatch] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        drawn = self.drawn
        for step, batch in self._parts(range(self.step, self._epoch().stop)):
            drawn.append(batch)
            seeds = partial(self._seeds, step)
            yield [*(map(seeds, batch.rows) if self._seeded else batch.rows)]

    def _seeds(self, step: int, index: int | Drawn) -> Drawn:
        rows = index.rows if isinstance(index, Drawn) else (index,)
        place = self.key, "augment", step
        return Drawn(rows, tuple(generators.torch_seed(*place, row) for row in rows))

    def count(self) -> int:
        """Count the physical batches of the current epoch."""
        if self._size is None:
            return len(self._epoch())  # no batch is drawn
        return sum(1 for _ in self._parts(self._epoch()))

    def _parts(self, steps: range) -> Iterator[tuple[int, PhysicalBatch]]:
        draw = self.plan.drawing(self.key, self.units)
        for step in steps:
            rows = draw(step)
            size = self._size or max(1, len(rows))
            for number, start in enumerate(range(0, max(1, len(rows)), size)):
                end = start + size
                yield step, PhysicalBatch(number, end >= len(rows), rows[start:end])

    def _epoch(self) -> range:
        length, last = self.plan.steps_per_epoch, self.plan.steps - 1
        first = self.plan.earlier_steps
        taken = max(0, min(self.step, last) - first)
        start = first + taken // length * length
        return range(start, min(start + length, last + 1))


class PoissonLoader:
    """Loads the batches of a run. A pass is an epoch, or the rest of one.

    Its length is the number of physical batches of the current epoch, empty ones
    included. After a `break` the next pass resumes after the last batch used.

    Attributes:
        pending: the batch that was yielded last, until it is used.
    """

    def __init__(self, run: Run, dataset: Dataset[Any], options: dict) -> None:
        self.dataset, self._run, self._passes = dataset, run, 0
        self.pending: PhysicalBatch | None = None
        collated = collate(dataset, options.get("collate_fn") or default_collate)
        options = {**options, "collate_fn": collated}
        self._loader = DataLoader(dataset, batch_sampler=run, **options)

    @property
    def sampler(self) -> None:
        """No sampler, by which trainers would skip the first batches of an epoch."""
        raise AttributeError(
            "PrivateGradients.loader: expected no code that skips batches, since it "
            "resumes by itself. Pass TrainingArguments(ignore_data_skip=True)."
        )

    def __len__(self) -> int:
        return self._run.count()

    def __iter__(self) -> Iterator[Tree]:
        plan, step = self._run.plan, self._run.step
        if step >= plan.steps:
            raise RuntimeError(
                f"PrivateGradients.loader: expected steps left, got a run that has "
                f"taken the {plan.steps} steps of its plan. Plan more epochs."
            )
        if step < plan.earlier_steps:
            raise RuntimeError(
                f"PrivateGradients.loader: expected a run that has taken the "
                f"{plan.earlier_steps} steps that plan.after(other, steps) counts, got "
                f"one that has taken {step}. Call load_state_dict(state)."
            )
        self.restart()
        number, drawn = self._passes, self._run.drawn
        for batch in self._loader:
            self.pending = drawn.popleft()._replace(loaded=batch)
            yield batch
            if number != self._passes:
                raise RuntimeError(
                    "PrivateGradients.loader: expected one pass at a time, got a "
                    "second that began before this one ended. Finish one loop first."
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
        self._run.drawn = deque()

"""The batches of a `PrivateGradients`, loaded in physical parts."""

import inspect
import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from vgrad import checks, generators
from vgrad.dp.grouped import Drawn
from vgrad.dp.plan import Plan
from vgrad.dp.sampling import collate
from vgrad.dp.units import Units
from vgrad.typing import Tree


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
        plan: Plan,
        key: Tensor,
        size: int | None,
        units: Units | None = None,
        *,
        seeded: bool = False,
    ) -> None:
        if size is not None:
            [size] = checks.integers(
                "PrivateGradients", minimum=1, physical_batch_size=size
            )
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
        elapsed = max(0, min(self.step, last) - first)
        start = first + elapsed // length * length
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

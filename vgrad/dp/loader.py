"""The Poisson batches of a run, loaded as a `DataLoader` loads them."""

import difflib
import inspect
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from vgrad import checks
from vgrad.dp.padding import padded
from vgrad.dp.plan import Plan
from vgrad.dp.sampling import collate
from vgrad.typing import Tree

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")
"""Options of a DataLoader that say what is in a batch, or mix the batches."""


_ELSEWHERE = {
    "module": "model",
    "data_loader": "the dataset of that",
    "max_grad_norm": "max_norm",
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "expected_batch_size": "batch_size",
    "max_physical_batch_size": "physical_batch_size",
    "noise_multiplier": "plan=Plan(noise_multiplier=...)",
    "sample_rate": "plan=Plan(sampling_rate=...)",
    "sampling_rate": "plan=Plan(sampling_rate=...)",
    "steps": "plan=Plan(steps=...)",
    "accountant": "plan=Plan(accountant=...)",
    "noise_generator": "key",
    "optimizer": "it to .watch(optimizer)",
}
"""What takes the place of options of Opacus, and of what a plan says."""


class Piece(NamedTuple):
    """A physical batch: the part `number` of a logical batch, and whether it ends it.

    Attributes:
        rows: indices of the samples.
    """

    number: int
    last: bool
    rows: list[int]


@dataclass
class Progress:
    """How far a run has come, and the key that its batches and noise follow from.

    Attributes:
        process: the one that may use the key. A fork of it has the key, too.
    """

    key: Tensor = field(repr=False)
    step: int = 0
    process: int = field(default_factory=os.getpid)


class PoissonLoader:
    """Yields the batches of a run. A pass is an epoch, or what is left of one.

    Its length is that of the epoch which the run has reached, in physical batches,
    empty ones included. A pass that was left early is not lost: the next one goes on
    behind the last batch that was used.

    Attributes:
        dataset: the data set.
        given: the batch that was yielded last, until it is used.
        padded: samples by which `backward` looks at padding, until it has.
        shown: the tensors that were yielded last, until then.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        dataset: Dataset[Any],
        *,
        physical_batch_size: int | None,
        check_collate: bool,
        options: dict[str, Any],
    ) -> None:
        """Check the options, and learn what an empty batch looks like."""
        _check(options)
        if physical_batch_size is not None:
            [physical_batch_size] = checks.whole(
                "PrivateGradients", least=1, physical_batch_size=physical_batch_size
            )
        self.dataset = dataset
        self.given: Piece | None = None
        self._turn = 0
        self._draws = _Draws(plan, progress, physical_batch_size)
        own = options.get("collate_fn") or default_collate
        options = {**options, "collate_fn": collate(dataset, own)}
        looks = check_collate and own is not default_collate
        self.padded = padded(dataset, own) if looks else None
        self.shown: Tree = None
        self._batches = DataLoader(dataset, batch_sampler=self._draws, **options)

    def __len__(self) -> int:
        """Return how many batches the epoch has that the run has reached."""
        return self._draws.count()

    def __iter__(self) -> Iterator[Tree]:
        """Load the batches from the step that the run has reached to the epoch's end.

        Raises:
            RuntimeError: the plan's steps have all been taken, a batch was not used
                before the next one is drawn, or another pass has begun.
        """
        self._draws.check_left()
        self.restart()
        turn, expected = self._turn, self._draws.drawn
        for batch in self._batches:
            self.given = expected.popleft()
            self.shown = None if self.padded is None else batch
            yield batch
            if turn != self._turn:
                raise RuntimeError(
                    "PrivateGradients.loader: expected one pass at a time, got a batch "
                    "asked of a pass after another one began. Finish one loop first."
                )
            if self.given is not None:
                raise RuntimeError(
                    "PrivateGradients.loader: expected backward(*batch) on every "
                    "batch, empty ones too, got the next one drawn without it. A "
                    "batch that is skipped tells of the data: remove what skips or "
                    "reads ahead."
                )

    def restart(self) -> None:
        """Forget the batch that was given, and end a pass that runs."""
        self._turn += 1
        self.given = None
        self._draws.drawn = deque()


class _Draws:
    """What the `DataLoader` draws from; its workers may be some batches ahead.

    It knows nothing of the loader: a `DataLoader` in a cycle of references would wait
    seconds for its workers when the cycle is collected.
    """

    def __init__(self, plan: Plan, progress: Progress, physical: int | None) -> None:
        self.drawn: deque[Piece] = deque()
        self._plan, self._progress, self._physical = plan, progress, physical

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self.drawn
        for step in range(self._progress.step, self._epoch().stop):
            for piece in self._pieces(step):
                drawn.append(piece)
                yield piece.rows

    def count(self) -> int:
        """Count the physical batches of the epoch that the run has reached."""
        if self._physical is None:
            return len(self._epoch())
        return sum(1 for step in self._epoch() for _ in self._pieces(step))

    def check_left(self) -> None:
        """Refuse a pass after the last step."""
        if self._progress.step >= self._plan.steps:
            raise RuntimeError(
                f"PrivateGradients.loader: expected a run with steps left, got one "
                f"that has taken the {self._plan.steps} steps which its plan accounts "
                f"for. Plan more epochs from the start."
            )
        if self._progress.step < self._plan.earlier_steps:
            raise RuntimeError(
                f"PrivateGradients.loader: expected a run that has taken the "
                f"{self._plan.earlier_steps} steps that plan.after(other, steps) "
                f"counts, got one that has taken {self._progress.step}. Hand on its "
                f"state with load_state_dict."
            )

    def _pieces(self, step: int) -> Iterator[Piece]:
        """Yield the physical batches of a step, one at least."""
        rows = self._plan.sample(key=self._progress.key, step=step).tolist()
        size = self._physical or max(1, len(rows))
        count = max(1, math.ceil(len(rows) / size))
        for number in range(count):
            part = rows[number * size : (number + 1) * size]
            yield Piece(number, number == count - 1, part)

    def _epoch(self) -> range:
        """Return the steps of the epoch that the run has reached."""
        length, last = self._plan.steps_per_epoch, self._plan.steps - 1
        first = self._plan.earlier_steps
        taken = max(0, min(self._progress.step, last) - first)
        start = first + taken // length * length
        return range(start, min(start + length, last + 1))


def planned(plan: Plan | None, budget: dict[str, Any], dataset: Any) -> Plan:
    """Return the plan that was given for a data set, or make one for the budget."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        raise TypeError(
            f"PrivateGradients(dataset): expected a data set with a length and a "
            f"sample for each index, got a {type(dataset).__name__}. Of a DataLoader "
            f"pass its `.dataset`; make a list of a stream."
        )
    if not isinstance(plan, Plan | None):
        raise TypeError(
            f"PrivateGradients(plan): expected a vgrad.dp.Plan, got a "
            f"{type(plan).__name__}."
        )
    missing = [name for name, value in budget.items() if value is None]
    if plan is None and not missing:
        return Plan.for_epsilon(dataset_size=len(dataset), **budget)
    if plan is None or len(missing) < len(budget):
        got = "both" if plan is not None else f"no {', '.join(missing)}"
        raise ValueError(
            f"PrivateGradients: expected {', '.join(budget)}, or a plan in their "
            f"place, got {got}."
        )
    if len(dataset) != plan.dataset_size:
        raise ValueError(
            f"PrivateGradients(plan): expected a plan for the {len(dataset)} samples "
            f"of the data set, got one for {plan.dataset_size}."
        )
    return plan


def check_names(own: Callable, options: dict[str, Any]) -> None:
    """Refuse options that neither the function `own` nor a `DataLoader` has."""
    loading = inspect.signature(DataLoader).parameters
    for name in options.keys() - loading:
        known = [*inspect.signature(own).parameters, *loading]
        near = [_ELSEWHERE.get(name), *difflib.get_close_matches(name, known, 1)]
        right = next(filter(None, near), None)
        raise TypeError(
            f"PrivateGradients({name}=...): expected options of its own or of a "
            f"DataLoader, got {name!r}.{f' Pass {right}.' if right else ''}"
        )


def _check(options: dict[str, Any]) -> None:
    """Refuse options that choose samples."""
    if taken := [name for name in _OURS if name in options]:
        raise ValueError(
            f"PrivateGradients({taken[0]}={checks.shown(options[taken[0]])}): expected "
            f"options of a DataLoader that do not choose samples, which is the plan's "
            f"part: collate_fn, num_workers, pin_memory and such."
        )

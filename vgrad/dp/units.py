"""Units of privacy: persons or groups, all samples of which count as one.

A unit has one loss, the mean over its samples, whose gradient is clipped. U units, k
samples of each.
"""

import hashlib
import math
from collections.abc import Callable, Collection
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from vgrad import batches, checks, generators
from vgrad.dp.grouped import Drawn, Grouped
from vgrad.dp.sampling import collate
from vgrad.functional.losses import SampleLoss, check_loss
from vgrad.tree import map_tensors
from vgrad.typing import Buffers, LossFn, Params, Tree


class Units:
    """The units of privacy of a data set, and the samples of each.

    `len(units)` is the `dataset_size` of their plan, and `units` goes to
    `plan.sampler(state, units=units)` or `PrivateGradients(units=units)`. Ids are
    integers or strings, one for each sample of the data set.

    A sample with several owners has a list of ids. Then a set of samples is chosen in
    which no owner occurs twice, in the order of the numbers of owners, and nobody else
    could be added; each of them is a unit. The relation of such a plan is
    `"fixed_graph"`, with one sample of a unit: who owns which sample is public.

    Args:
        ids: `[N]`, or N lists of owners.
        most_owners: leaves out samples of more owners.

    Raises:
        TypeError: an id is no integer or string.
        ValueError: there is no sample, or one without an owner.

    Reference: Ganesh et al., arXiv 2503.03622 (the greedy choice).

    Example:
        >>> len(Units(["ann", "bob", "ann"]))
        2
        >>> Units([[1], [1, 2], [2, 3]]).chosen
        [0, 2]
    """

    def __init__(self, ids: Any, *, most_owners: int | None = None) -> None:
        ids = ids.tolist() if hasattr(ids, "tolist") else [*ids]
        self.size = len(ids)  # of the data set
        self.several_owners = any(isinstance(item, list | tuple | set) for item in ids)
        owners = [set(item) for item in ids] if self.several_owners else []
        for owner in set().union(*owners) if owners else ids:
            if isinstance(owner, bool) or not isinstance(owner, int | str):
                raise TypeError(
                    f"Units(ids): expected integers or strings, got a "
                    f"{type(owner).__name__}. Pass ids.tolist(), or lists of owners."
                )
        if not ids or (self.several_owners and not all(owners)):
            raise ValueError(
                "Units(ids): expected a sample at least, and an owner of each, got "
                f"{'one without' if ids else 'none'}."
            )
        rows: dict[int | str, list[int]] = {}
        if self.several_owners:
            rows = {row: [row] for row in _independent(owners, most_owners)}
        elif most_owners is not None:
            raise ValueError(
                f"Units(ids, most_owners={most_owners!r}): expected lists of owners, "
                f"got one id a sample. Leave most_owners out."
            )
        else:
            for row, owner in enumerate(ids):
                rows.setdefault(owner, []).append(row)
        self._ids, self._rows = [*rows], [*rows.values()]

    @classmethod
    def of(cls, units: Any) -> "Units":
        """Return units, made of ids where it has to be."""
        return units if isinstance(units, Units) else cls(units)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def chosen(self) -> list[int]:
        """The samples that belong to a unit, ascending."""
        return sorted(row for rows in self._rows for row in rows)

    @property
    def digest(self) -> str:
        """A hash of the ids."""
        text = repr([self._ids, self._rows]).encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def drawn(self, unit: int, count: int, *, key: Tensor, step: int) -> Drawn:
        """Draw at most `count` samples of a unit, by its id, the key and the step."""
        rows = self._rows[unit]
        if len(rows) > count:
            stream = generators.stream(key, "unit", step, self._ids[unit])
            uniform = np.random.Generator.random
            numbers = generators.drawn(uniform, stream, len(rows))
            places = np.sort(np.argsort(numbers, kind="stable")[:count])
            rows = [rows[place] for place in places]
        return Drawn(tuple(rows))


def _independent(owners: list[set], limit: int | None) -> list[int]:
    """Choose samples in which no owner occurs twice; fewest owners come first."""
    if limit is not None:
        [limit] = checks.integers("Units", minimum=1, most_owners=limit)
    seen: set = set()
    chosen = []
    for row in sorted(range(len(owners)), key=lambda row: len(owners[row])):
        if seen.isdisjoint(owners[row]) and len(owners[row]) <= (limit or math.inf):
            seen |= owners[row]
            chosen.append(row)
    return sorted(chosen)


def unit_loss(loss: LossFn) -> LossFn:
    """Make the loss of a unit: `(params, buffers, *samples, present) -> scalar`.

    It is the mean of `loss` over the samples that are present, of k samples `[k, ...]`
    and a mask, bool `[k]`. A loss from `sample_loss` runs its model once on all of
    them, any other one runs k times. A step with a plan of units makes it itself.

    Example:
        >>> loss = unit_loss(lambda params, buffers, x: params["w"] * x)
        >>> x = torch.tensor([1.0, 3.0, 9.0])
        >>> present = torch.tensor([True, True, False])
        >>> loss({"w": torch.tensor(2.0)}, {}, x, present)
        tensor(4.)
    """
    check_loss("unit_loss", loss)
    return UnitLoss(loss)


class UnitLoss(LossFn):
    """The result of `unit_loss`."""

    def __init__(self, loss: LossFn) -> None:
        self._loss = loss

    def __call__(self, params: Params, buffers: Buffers, /, *unit: Tree) -> Tensor:
        """Return the mean loss of the samples that are present."""
        loss, (*samples, present) = self._loss, unit
        if isinstance(loss, SampleLoss):
            losses = loss.of_each(params, buffers, *samples)
        else:
            singles = (map_tensors(itemgetter(i), samples) for i in range(len(present)))
            losses = torch.stack([loss(params, buffers, *sample) for sample in singles])
        weights = present.to(losses.dtype)
        return (losses * weights).sum() / weights.sum().clamp(min=1)


def check_units(function: str, batch: tuple, count: int) -> None:
    """Refuse a batch that is not of whole units with a mask."""
    read = batches.read(function, batch)
    *_, mask = batch
    fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 2
    shape = read.size, count
    if not fits or any(tuple(tensor.shape[:2]) != shape for tensor in read.tensors):
        got = [f"{str(x.dtype)[6:]} {[*x.shape]}" for x in read.tensors]
        raise ValueError(
            f"{function}(*samples, present): expected whole units of {count}, tensors "
            f"[U, {count}, ...] and last a mask, bool [U, {count}], of the samples "
            f"that are present, got {', '.join(got)}. Load them with "
            f"dp.unit_loader(dataset, plan.sampler(state, units=units), {count})."
        )


def unit_loader(
    dataset: Dataset[Any],
    sampler: Collection[list[Drawn]],
    samples_per_unit: int,
    **options: Any,
) -> DataLoader:
    """Load batches of whole units: `(*tensors [U, k, ...], present [U, k])`.

    `sampler` is `plan.sampler(state, units=units)`, or the part of it that
    `local_batches` leaves for a rank. A unit of fewer than k samples is filled up with
    copies of its first one, which `present` leaves out. Options are a `DataLoader`'s;
    `collate_fn` gets all samples as one list, and returns tensors with a row for each.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from vgrad import dp, optim, training
        >>> dataset = TensorDataset(torch.arange(6.0))
        >>> units = dp.Units([7, 7, 7, 8, 9, 9])
        >>> run = {"noise_multiplier": 1.0, "max_norm": 1.0, "steps": 9, "delta": 1e-2}
        >>> plan = dp.Plan(len(units), 0.7, **run, samples_per_unit=2)
        >>> state = training.TrainState.create(optim.sgd(0.1), {"w": torch.ones(1)}, {})
        >>> loader = unit_loader(dataset, plan.sampler(state, units=units), 2)
        >>> x, present = next(iter(loader))
        >>> x.shape[1:] == present.shape[1:] == (2,)
        True
    """
    [count] = checks.integers(
        "unit_loader", minimum=1, samples_per_unit=samples_per_unit
    )
    grouped = Grouped(dataset, None, (count,))
    collated = collate(grouped, options.get("collate_fn") or default_collate)
    options["collate_fn"] = partial(_with_mask, collated, count)
    batch_sampler: Any = sampler
    return DataLoader(grouped, batch_sampler=batch_sampler, **options)


def _with_mask(collate_fn: Callable, count: int, units: list[list]) -> tuple:
    batch = collate_fn(units)
    rest = batch if isinstance(batch, tuple | list) else (batch,)
    return *rest, present([*map(len, units)], count)


def present(sizes: list[int], count: int) -> Tensor:
    """Return the mask of the samples that are no filling, bool `[U, k]`."""
    return torch.arange(count) < torch.tensor(sizes, dtype=torch.int64).unsqueeze(1)

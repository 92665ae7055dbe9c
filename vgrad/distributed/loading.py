"""Logical batches, cut among ranks."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from vgrad import checks
from vgrad.dp.grouped import Drawn
from vgrad.dp.sampling import check_drawer
from vgrad.ranks import Ranks


class BatchSampler(Protocol):
    """Batches of indices, such as `PoissonBatchSampler` draws them."""

    def __iter__(self) -> Iterator[list[Any]]: ...

    def __len__(self) -> int: ...


def local_batches(
    sampler: BatchSampler,
    mesh: DeviceMesh,
    *,
    data: str = "dp",
    own: range | None = None,
) -> "LocalBatches":
    """Cut each batch of a sampler among the ranks along an axis of a mesh.

    Pass the result as `DataLoader(dataset, batch_sampler=..., collate_fn=...)` with
    `collate(dataset)` for Poisson batches, of which a part may be empty. All ranks need
    the same sampler, `plan.sampler(state)` of the same state: they draw the same
    logical batch without communication, and every rank takes as many steps. The parts
    follow each other in the order of ranks and differ by one sample at most.

    Where the data set is cut among ranks, `own` is the range of indices that this rank
    has: its part of a batch is the indices in this range, many or none, counted from
    its start.

    Raises:
        ValueError: `own` is no range of step one, or the ranges overlap or leave gaps.
        RankError: the samplers differ.

    Example:
        >>> from vgrad.dp import PoissonBatchSampler, secret_key
        >>> def on_each_rank(mesh):
        ...     sampler = PoissonBatchSampler(60, 0.1, steps=9, key=secret_key(seed=0))
        ...     return local_batches(sampler, mesh)
    """
    ranks = Ranks.of("local_batches", mesh, data)
    with ranks.together("local_batches") as facts:
        if own is not None and (not isinstance(own, range) or own.step != 1):
            raise ValueError(
                f"local_batches(own={checks.shown(own)}): expected the range of "
                f"indices that this rank has, such as range(0, 1000)."
            )
        facts.own["own"] = None if own is None else [own.start, own.stop]
        facts.same["batches"] = len(sampler)
        facts.same["draws"] = getattr(sampler, "digest", None)
    _check_ranges([note["own"] for note in facts.notes], sampler)
    return LocalBatches(sampler, ranks.rank, ranks.size, own)


def _check_ranges(ranges: list[list[int] | None], sampler: BatchSampler) -> None:
    """Refuse ranges in which a sample would count twice, or never, on all ranks."""
    if all(bounds is None for bounds in ranges):
        return
    size, place = getattr(sampler, "dataset_size", None), 0
    for start, stop in sorted(bounds or [-1, 0] for bounds in ranges):
        if start >= 0 and start == stop:
            continue  # a rank without samples
        if start != place:
            break
        place = stop
    else:
        if size in (None, place):
            return
    full = "all samples" if size is None else f"range(0, {size})"
    raise ValueError(
        f"local_batches(own): expected ranges of all ranks that make up {full}, each "
        f"index once, got {ranges}. A sample on two ranks would count twice, and its "
        f"noise would not hide it."
    )


class LocalBatches:
    """This rank's part of every batch, from `local_batches`."""

    def __init__(
        self, sampler: BatchSampler, rank: int, size: int, indices: range | None
    ) -> None:
        self._sampler = sampler
        self._place = rank, size
        self._indices = indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        check_drawer(self)
        for batch in self._sampler:
            yield self._part(batch)

    def _part(self, batch: Sequence[Any]) -> list[Any]:
        if (indices := self._indices) is not None:
            if any(isinstance(index, Drawn) for index in batch):
                raise TypeError(
                    "local_batches(own): expected a sampler of single samples, got one "
                    "of units, whose samples may be on several ranks. Leave own out: "
                    "every rank needs the whole data set."
                )
            return [index - indices.start for index in batch if index in indices]
        rank, size = self._place
        return list(batch[len(batch) * rank // size : len(batch) * (rank + 1) // size])

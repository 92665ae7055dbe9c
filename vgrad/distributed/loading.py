"""Logical batches, cut among ranks."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from vgrad.distributed.ranks import Ranks


class BatchSampler(Protocol):
    """Batches of indices, such as `PoissonBatchSampler` draws them."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after another."""
        ...

    def __len__(self) -> int:
        """Return the number of batches."""
        ...


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
    logical batch without asking each other, and every rank takes as many steps. The
    parts follow each other in the order of ranks and differ by one sample at most.

    Where the data set is cut among ranks, `own` is the range of indices that this rank
    has: its part is what the batch has of them, many or none, and is counted from the
    start of the range.

    Raises:
        TypeError, ValueError: as `data_parallel`, or `own` is no range of step one.

    Example:
        >>> from vgrad.dp import PoissonBatchSampler, secret_key
        >>> def on_each_rank(mesh):
        ...     sampler = PoissonBatchSampler(60, 0.1, steps=9, key=secret_key(seed=0))
        ...     return local_batches(sampler, mesh)
    """
    ranks = Ranks.of("local_batches", mesh, data)
    if own is not None and (not isinstance(own, range) or own.step != 1):
        raise ValueError(
            f"local_batches(own={own!r}): expected the range of indices that this rank "
            f"has, such as range(0, 1000)."
        )
    return LocalBatches(sampler, ranks.rank, ranks.size, own)


class LocalBatches:
    """What `local_batches` returns: this rank's part of every batch."""

    def __init__(
        self, sampler: BatchSampler, rank: int, size: int, own: range | None
    ) -> None:
        """Keep the sampler."""
        self._sampler = sampler
        self._place = rank, size
        self._own = own

    def __len__(self) -> int:
        """Return the number of batches, which is that of the sampler."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one part after another."""
        for batch in self._sampler:
            yield self._part(batch)

    def _part(self, batch: Sequence[int]) -> list[int]:
        if (own := self._own) is not None:
            return [index - own.start for index in batch if index in own]
        rank, size = self._place
        return list(batch[len(batch) * rank // size : len(batch) * (rank + 1) // size])

"""Batches of any size, filled up to one of a few sizes.

Each size is a capture of its own. A Poisson batch has another size at every step; it is
filled up to the next of a few sizes, the buckets, with copies of its first sample,
which a mask takes out again.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.dp.plan import Plan
from vgrad.tree import map_tensors
from vgrad.typing import Tree


def check(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Sort the sizes of buckets.

    Raises:
        TypeError: it is no list or tuple of whole numbers.
        ValueError: there is none, or one is not positive.
    """
    if not isinstance(batch_sizes, list | tuple) or not batch_sizes:
        raise ValueError(
            f"compile(batch_sizes={batch_sizes!r}): expected at least one size in a "
            f"list, such as [256, 320]."
        )
    sizes = {
        number
        for size in batch_sizes
        for number in checks.whole("compile", least=1, batch_sizes=size)
    }
    return tuple(sorted(sizes))


def of_plan(plan: Plan) -> tuple[int, ...]:
    """Return sizes that hold all but one in about 10^4 batches of a plan.

    One and a half deviations apart, from one below the mean to four above it, so that
    padding costs less than a deviation on average.
    """
    mean = plan.expected_batch_size
    deviation = math.sqrt(mean * (1 - plan.sampling_rate))
    sizes = [mean + place * deviation for place in (-1.0, 0.5, 2.0, 4.0)]
    held = {min(plan.dataset_size, max(1, math.ceil(size))) for size in sizes}
    return tuple(sorted(held))


def padded_size(size: int, buckets: Sequence[int]) -> int:
    """Return the size that a batch is filled up to.

    Beyond the largest bucket the batch is split; its rest is filled up.
    """
    whole, rest = divmod(size, buckets[-1])
    if rest == 0:
        return size
    return whole * buckets[-1] + next(each for each in buckets if each >= rest)


def filled(samples: Tree, size: int, total: int) -> Any:
    """Fill up `[B, ...]` with copies of the first sample, -> `[total, ...]`."""

    def fill(tensor: Tensor) -> Tensor:
        copies = tensor[:1].expand(total - size, *tensor.shape[1:])
        return torch.cat([tensor, copies])

    return map_tensors(fill, samples) if total > size else samples


def counted(size: int, total: int, device: torch.device) -> Tensor:
    """Return the mask of the samples that are no copies, `[total]`."""
    return torch.arange(total, device=device) < size

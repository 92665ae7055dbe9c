"""The samples of cross-validation: which ones each fold is trained and judged on.

K folds, E of them at once, n samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vgrad import files
from vgrad.generators import secret_key, torch_seed
from vgrad.tree import map_tensors, tensors
from vgrad.typing import Tree


@dataclass(frozen=True)
class Folds:
    """Data `[n, ...]` and the indices of `fold_indices`, `[K, ...]` each."""

    data: tuple[Tree, ...]
    train: Tensor
    validation: Tensor
    batch_size: int
    seed: int

    def training(
        self, which: range, epoch: int, device: torch.device
    ) -> Iterator[tuple]:
        """Yield the batches `[E, B, ...]` of an epoch, those of each fold shuffled."""
        orders = []
        for fold in which:
            seed = torch_seed(secret_key(seed=self.seed, member=fold), "epoch", epoch)
            source = torch.Generator().manual_seed(seed)
            orders.append(torch.randperm(self.train.shape[1], generator=source))
        rows = self.train[which.start : which.stop].gather(1, torch.stack(orders))
        return self._batches(rows, device)

    def held_out(self, which: range, device: torch.device) -> Iterator[tuple]:
        """Yield batches `[E, B, ...]` of the samples that each fold is judged on."""
        return self._batches(self.validation[which.start : which.stop], device)

    def described(self) -> dict[str, Any]:
        """Say which samples and batches these are, as JSON has it; hashes the data."""
        given = {str(i): each for i, each in enumerate(tensors(self.data))}
        return {
            "folds": len(self.train),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "data": [f"{each.dtype} {tuple(each.shape)}" for each in given.values()],
            "sha256 of data": files.digest(given),
        }

    def _batches(self, rows: Tensor, device: torch.device) -> Iterator[tuple]:
        for part in rows.split(self.batch_size, 1):
            yield map_tensors(
                lambda x, part=part: x[part.to(x.device)].to(device), self.data
            )

"""Per-sample gradients of tables from which a sample uses some rows.

B samples, T positions of one sample, O numbers in a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vgrad.dtypes import double, wide
from vgrad.persample.factors import reductions
from vgrad.persample.factors.base import Factor, Probes
from vgrad.persample.factors.reductions import Norm


@dataclass(frozen=True)
class Rows(Factor):
    """Rows of a table, `sum_t e(index_t) x out_t`.

    `index [B, T]` numbers the rows, `outputs [B, T, O]` is added to them.
    """

    index: Tensor
    outputs: Tensor
    shape: torch.Size

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.index)

    @property
    def bytes(self) -> int:
        """Memory of the index and of the rows."""
        return self.index.nbytes + self.outputs.nbytes

    @property
    def keys(self) -> Tensor:
        """The index, where the rows of all samples' tables are numbered, [B, T]."""
        start = torch.arange(self.size, device=self.index.device) * self.shape[0]
        return self.index + start[:, None]

    def grad(self) -> Tensor:
        """Add the rows up in tables of zeros."""
        rows = self.outputs.flatten(0, 1).to(wide(self.outputs.dtype))
        table = rows.new_zeros((self.size * self.shape[0], self.shape[1]))
        table.index_add_(0, self.keys.flatten(), rows)
        return table.to(self.outputs.dtype).view(self.size, *self.shape)

    def norm(self) -> Norm:
        """Add up rows of one index, then norms: the table is never formed."""
        if self.index.numel() == 0:
            return Norm.exactly(self.outputs.new_zeros(self.size, dtype=torch.float64))
        # Those of one sample stay side by side when they are sorted.
        _, sums = _summed(self.keys.flatten(), double(self.outputs.flatten(0, 1)))
        norms = reductions.row_norms(sums)
        value = reductions.together(norms.view(self.size, -1))
        eps = torch.finfo(wide(self.outputs.dtype)).eps
        return Norm(value, value * (1 + eps), value)

    def weighted(self, weights: Tensor) -> Tensor:
        """Scale the rows, add up those of one index, and write them into a table."""
        rows = double(self.outputs) * weights.double().view(-1, 1, 1)
        keys, sums = _summed(self.index.flatten(), rows.flatten(0, 1))
        dtype = wide(self.outputs.dtype)
        table = self.outputs.new_zeros(self.shape, dtype=dtype)
        return table.index_add_(0, keys, sums.to(dtype))

    def take(self, rows: Tensor) -> "Rows":
        """Return the factor of these samples."""
        return Rows(self.index[rows], self.outputs[rows], self.shape)

    def double(self) -> "Rows":
        """Widen the rows."""
        return Rows(self.index, double(self.outputs), self.shape)

    def gram(self, other: Factor) -> Tensor:
        """Inner products of rows of equal index."""
        if not isinstance(other, Rows):
            return super().gram(other)
        sizes = (self.size, self.index.shape[1], other.size, other.index.shape[1])
        k = reductions.inner(self.outputs.flatten(0, 1), other.outputs.flatten(0, 1))
        equal = self.index.reshape(-1, 1) == other.index.reshape(1, -1)
        found = torch.where(equal, k, 0).view(sizes).sum((1, 3))
        # A sample that is not finite shows in every product, as it does for gradients.
        return found + self._spoils()[:, None] + other._spoils()

    def project(self, probes: Probes) -> Tensor:
        """Look the probes up, `sum_t left[index_t] <out_t, right>`."""
        if probes.left is None:
            return super().project(probes)
        rows, right = reductions.products(self.outputs, probes.right)
        left = probes.left.T[self.index].to(rows.dtype)
        return (left * (rows @ right.T)).sum(1)

    def _spoils(self) -> Tensor:
        """Zeros [B], and NaN where a sample's gradient is not finite."""
        return (self.outputs * 0).sum((1, 2))


def _summed(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Add up rows of one key: sorted keys, and sums at the first of each, else zero.

    Many equal rows drift in float32, by more than what a clip bound allows; so these
    are wider.
    """
    keys, order = keys.sort()
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    place = first.cumsum(0) - 1
    sums = torch.zeros_like(rows).index_add_(0, place, rows[order])
    return keys, torch.where(first[:, None], sums[place], 0)

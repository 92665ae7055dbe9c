"""Per-sample gradients of tables from which a sample uses some rows.

B samples, T positions of one sample, O numbers in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vgrad.factors import costs, products, reductions
from vgrad.factors.base import Factor, Norm, Norms, Probes
from vgrad.tree import double, wide

_AT_ONCE = 2**22
"""Numbers of other tables that are looked up at once."""


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
        return len(self.index)

    @property
    def bytes(self) -> int:
        return self.index.nbytes + self.outputs.nbytes

    @property
    def keys(self) -> Tensor:
        """The index, where the rows of all samples' tables are numbered, [B, T]."""
        start = torch.arange(self.size, device=self.index.device) * self.shape[0]
        return self.index + start[:, None]

    def grad(self) -> Tensor:
        rows = self.outputs.flatten(0, 1).to(wide(self.outputs.dtype))
        table = rows.new_zeros((self.size * self.shape[0], self.shape[1]))
        table.index_add_(0, self.keys.flatten(), rows)
        return table.to(self.outputs.dtype).view(self.size, *self.shape)

    def with_norms(self) -> tuple[Factor, Norms]:
        """Add up rows of one index, then norms: the table is never formed."""
        if self.index.numel() == 0:
            norms = self.outputs.new_zeros(self.size, dtype=torch.float64)
        elif self.shape[0] <= self.index.shape[1] // 4:  # tables are the smaller ones
            norms = reductions.row_norms(self.double().grad())
        elif self.index.shape[1] == 1:
            norms = reductions.row_norms(self.outputs)
        elif self.index.shape[1] <= costs.FEW_LOOKUPS:
            norms = self._norms_by_mask()
        else:
            norms = self._norms_by_sorting()
        eps = torch.finfo(wide(self.outputs.dtype)).eps
        return self, [Norm(norms, (norms,), norms * (1 + eps))]

    def weighted(self, weights: Tensor) -> Tensor:
        """Scale the rows, and add them up in a table by their index."""
        dtype = wide(self.outputs.dtype)
        if costs.wide_table(self.shape[0], self.shape[1], self.index.numel()):
            rows = self._scaled(weights)
            table = rows.new_zeros(self.shape)
            return table.index_add_(0, self.index.flatten(), rows).to(dtype)
        table = self.outputs.new_zeros(self.shape, dtype=dtype)
        return self.add_weighted(weights, table)

    def add_weighted(self, weights: Tensor, table: Tensor) -> Tensor:
        """Add up scaled rows of one index, and write the sums into a table."""
        keys, sums, *_ = _summed(self.index.flatten(), self._scaled(weights))
        return table.index_add_(0, keys, sums.to(table.dtype))

    def select(self, rows: Tensor) -> "Rows":
        return Rows(self.index[rows], self.outputs[rows], self.shape)

    def times(self, scales: Sequence[Tensor]) -> "Rows":
        rows, columns = (scale.flatten() for scale in scales)
        outputs = self.outputs * rows[self.index][..., None] * columns
        return Rows(self.index, outputs, self.shape)

    def double(self) -> "Rows":
        return Rows(self.index, double(self.outputs), self.shape)

    def gram(self, other: Factor) -> Tensor:
        """Inner products of rows of equal index, or with rows that are looked up."""
        if not isinstance(other, Rows):
            return self.by_position(other.grad()).sum(2) + self._spoils()[:, None]
        sizes = (self.size, self.index.shape[1], other.size, other.index.shape[1])
        k = products.inner(self.outputs.flatten(0, 1), other.outputs.flatten(0, 1))
        equal = self.index.reshape(-1, 1) == other.index.reshape(1, -1)
        sums = torch.where(equal, k, 0).view(sizes).sum((1, 3))
        # A sample that is not finite shows in every product, as it does for gradients.
        return sums + self._spoils()[:, None] + other._spoils()

    def by_position(self, others: Tensor) -> Tensor:
        """Look the other tables up at the rows of the index."""
        rows, others = products.exact(self.outputs, others)
        step = max(1, _AT_ONCE // max(1, len(others) * rows[:1].numel()))
        parts = [
            torch.einsum("bto,qbto->bqt", chunk, others[:, index].conj())
            for chunk, index in zip(
                rows.split(step), self.index.split(step), strict=True
            )
        ]
        return torch.cat(parts)

    def project(self, probes: Probes) -> Tensor:
        """Look the probes up, `sum_t left[index_t] <out_t, right>`."""
        if probes.left is None:
            return super().project(probes)
        rows, right = products.exact(self.outputs, probes.right)
        left = probes.left.T[self.index].to(rows.dtype)
        return probes.summed(left, rows @ right.T)

    def _scaled(self, weights: Tensor) -> Tensor:
        return (double(self.outputs) * weights.double().view(-1, 1, 1)).flatten(0, 1)

    def _spoils(self) -> Tensor:
        """Zeros [B], and NaN where a sample's gradient is not finite."""
        # Inductor of torch 2.13 takes products with an integer zero for zero.
        return (self.outputs * 0.0).sum((1, 2))

    def _norms_by_mask(self) -> Tensor:
        """Norms by a product with a mask of equal indices."""
        # Rows of one index are added at each of their positions, which share the norm.
        rows = double(self.outputs)
        equal = (self.index[:, :, None] == self.index[:, None, :]).to(rows.dtype)
        norms = self._lengths(torch.bmm(equal, rows).flatten(0, 1))
        return self._lengths(norms.view(self.index.shape) / equal.sum(2).real.sqrt())

    def _norms_by_sorting(self) -> Tensor:
        rows = double(self.outputs.flatten(0, 1))
        _, sums, place, first = _summed(self.keys.flatten(), rows)
        # Keys of one sample stay side by side when they are sorted.
        norms = torch.where(first, self._lengths(sums)[place], 0)
        return self._lengths(norms.view(self.index.shape))

    def _lengths(self, rows: Tensor) -> Tensor:
        """Norms of wide rows, `[N, O]` -> [N] in float64."""
        if self.outputs.dtype in (torch.float64, torch.complex128):
            return reductions.row_norms(rows)
        # Squares of float32 have room in float64.
        return torch.linalg.vector_norm(rows, dim=1)


def _summed(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add up the rows of each key; return keys, sums, places of sorted rows, firsts."""
    # Many equal rows drift in float32 by more than a clip bound allows: rows are wider.
    keys, order = keys.sort()
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    place = first.cumsum(0) - 1
    sums = torch.zeros_like(rows).index_add_(0, place, rows[order])
    return torch.zeros_like(keys).scatter_(0, place, keys), sums, place, first

"""Per-sample gradients of a stack of matrices, each of which multiplies some rows.

B samples, S rows of one sample, E matrices (experts), I inputs, O outputs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.conditions import Unrepeatable, numbers
from vgrad.factors import costs, products, reductions
from vgrad.factors.base import Dense, Factor, Norms, Pair, Products, multiplied


@dataclass(frozen=True)
class Experts(Pair):
    """Sums of outer products over the rows of each matrix, `sum_s in_s x out_s`.

    `inputs [B, S, I]` and `outputs [B, S, O]`; matrix e has the rows from
    `ends[:, e - 1]` to `ends[:, e]`, and none has the rows past the last end. The
    gradient is `[B, E, I, O]`.
    """

    ends: Tensor

    @property
    def counts(self) -> Tensor:
        """The number of rows of each matrix, and of none, [B, E + 1]."""
        first = torch.zeros_like(self.ends[:, :1])
        return self.ends.diff(dim=1, prepend=first, append=first + self.rows)

    @property
    def rows(self) -> int:
        return self.inputs.shape[1]

    def select(self, rows: Tensor) -> "Experts":
        inputs, outputs, ends = (tensor[rows] for tensor in (*self.sides, self.ends))
        return Experts(inputs, outputs, self.shape, ends)

    def grad(self) -> Tensor:
        return self._formed().to(self.inputs.dtype)

    def _formed(self) -> Tensor:
        a, b = (side.flatten(0, 1) for side in products.exact(*self.sides))
        grads = _sums(a, b, self.counts.flatten()).unflatten(0, (self.size, -1))
        return grads[:, :-1]

    def weighted(self, weights: Tensor) -> Tensor:
        """Scale the rows, and add up products, some samples at a time."""
        step = max(1, reductions.ROWS_AT_ONCE // max(1, self.rows))
        parts = (tensor.split(step) for tensor in (*self.sides, self.ends, weights))
        return reductions.total([*map(_weighted, *parts)])

    @property
    def by_gram(self) -> bool:
        """Whether norms are computed without gradients."""
        return bool(self._alike()[0])

    def _alike(self) -> tuple[dict[tuple[int, int], int], Tensor]:
        """Sort the matrices of each sample by their rows, and cut where those halve.

        -> the rows of matrices from one place to another, none where gradients are
        cheaper; the matrices at these places, [B, E].
        """
        sizes, which = self.counts[:, :-1].sort(1, descending=True)
        largest = numbers(sizes.amax(0)) if self.rows else None
        if largest is None:
            return {}, which
        blocks, start = {}, 0
        for place, size in enumerate([*largest, 0]):
            if 2 * size < (first := largest[start]) or not size:
                if first:
                    blocks[start, place] = first
                start = place
        pairs = sum((end - start) * n**2 for (start, end), n in blocks.items())
        count, i, o = self.shape
        fits = costs.outer_by_gram(math.isqrt(pairs // count), i, o)
        return blocks if fits else {}, which

    def with_norms(self) -> tuple[Factor, Norms]:
        """Multiply the rows of each matrix, of several with about as many at once."""
        blocks, which = self._alike()
        if not blocks:
            return Dense(self._formed()).with_norms()
        squares, padded = torch.zeros((), device=which.device), []
        largest, length = max(blocks.values()), max(self.shape[1:])
        for (start, end), n in blocks.items():
            a, b = self._products(which[:, start:end], n)
            sums, positions = multiplied(a, b)
            squares = squares + sums
            padded.append(F.pad(positions, (0, largest - n)))
        sizes = torch.cat(padded, 2)
        return self, [Products(squares, sizes, length, self, 0.0, 0.0)]

    def _products(self, which: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Multiply the first rows of matrices [B, G]. -> 2 x [B, G, count, count]"""
        place = torch.arange(count, device=which.device)
        inside = place < self.counts.gather(1, which)[..., None]
        start = (self.ends - self.counts[:, :-1]).gather(1, which)[..., None]
        # Other rows of the same sample fill matrices up, and their products are zero.
        first = torch.arange(self.size, device=which.device) * self.rows
        rows = (start + place).clamp(max=self.rows - 1) + first[:, None, None]
        sides = (x.flatten(0, 1).index_select(0, rows.flatten()) for x in self.sides)
        sides = (x.unflatten(0, (-1, count)) for x in products.exact(*sides))
        a, b = (products.self_products(x).view(*which.shape, count, -1) for x in sides)
        return a * (inside[..., None] & inside[..., None, :]), b


def by_expert(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sort the rows of all samples by their matrix, rows of none last.

    `ends [B, E]` -> the places of the rows, [B * rows], and counts of each, [E + 1].
    """
    place = torch.arange(rows, device=ends.device).expand(len(ends), rows)
    experts = torch.searchsorted(ends, place.contiguous(), right=True)
    counts = torch.cat([ends[:, :1], ends.diff(dim=1), rows - ends[:, -1:]], 1)
    return experts.flatten().argsort(stable=True), counts.sum(0)


def _weighted(inputs: Tensor, outputs: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    a, b = products.exact(inputs, outputs)
    column = weights.to(a.dtype).view(-1, 1, 1)
    a, b = (a * column, b) if a.shape[2] <= b.shape[2] else (a, b * column)
    order, counts = by_expert(ends, inputs.shape[1])
    a, b = (side.flatten(0, 1).index_select(0, order) for side in (a, b))
    return _sums(a, b, counts)[:-1]


def _sums(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Sum outer products over `counts [G]` rows each. -> [G, I, O]"""
    sizes = numbers(counts)
    if sizes is None:
        return _grouped(a, b, counts)
    sums = a.new_zeros(len(counts), a.shape[1], b.shape[1])
    for sum, left, right in zip(sums, a.split(sizes), b.split(sizes), strict=True):
        if len(left):
            torch.mm(left.mT, right, out=sum)
    return sums


def _grouped(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Sum outer products by torch's own op, which hands no value to Python."""
    if a.dtype != torch.float32 or a.shape[1] % 4 or b.shape[1] % 4:
        raise Unrepeatable(f"grouped_mm has no kernel for {a.dtype} of these sizes")
    return F.grouped_mm(a.mT, b, offs=counts.cumsum(0, dtype=torch.int32))

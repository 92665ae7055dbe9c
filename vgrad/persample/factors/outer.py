"""The factor of matrices: sums over positions of outer products.

B samples, G groups, T positions of one sample, I inputs, O outputs.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vgrad.conditions import rare
from vgrad.persample.factors import costs, reductions
from vgrad.persample.factors.base import Factor, Pair, Positions, Probes
from vgrad.persample.factors.reductions import Norm

_APART = 1e8
"""Size up to which float32 holds the product of four numbers."""


@dataclass(frozen=True)
class Outer(Pair):
    """Sums over positions of outer products, `sum_t out_t x in_t` in every group.

    `inputs [B, G, T, I]` and `outputs [B, G, T, O]`; the gradient is `[B, G, O, I]`,
    viewed as `shape`. `shared` are the outputs if another parameter has the same ones.
    """

    shared: Positions | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether outputs and inputs are the two axes of the parameter."""
        sizes = (self.outputs.shape[3], self.inputs.shape[3])
        return self.inputs.shape[1] == 1 and sizes == tuple(self.shape)

    @property
    def by_gram(self) -> bool:
        """Whether norms are computed without gradients."""
        _, _, positions, i = self.inputs.shape
        return positions == 1 or costs.outer_by_gram(
            positions, i, self.outputs.shape[3]
        )

    def grad(self) -> Tensor:
        """Multiply the factors."""
        a, b = reductions.products(self.inputs, self.outputs)
        if a.shape[2] == 1:
            found = b.transpose(2, 3) * a
        else:
            found = torch.matmul(b.transpose(2, 3), a)
        return found.to(self.inputs.dtype).reshape(self.size, *self.shape)

    def norm(self) -> Norm:
        """Norms without gradients where they are cheaper so."""
        outputs = self.shared or Positions(self.outputs)
        if self.inputs.shape[2] == 1:
            a, b = Positions(self.inputs).norms, outputs.norms
            return Norm.exactly(reductions.together(a * b), (a + b).sum(1))
        if self.by_gram:
            return reductions.gram_norm(
                reductions.self_products(self.inputs.flatten(0, 1)),
                outputs.products,
                self.size,
                max(self.inputs.shape[3], self.outputs.shape[3]),
                lambda rows: self.take(rows).double().grad(),
                lambda: reductions.zeros(self.inputs) | outputs.zeros,
            )
        return super().norm()

    def weighted(self, weights: Tensor) -> Tensor:
        """Scale the smaller factor, then one product over samples and positions."""
        a, b = reductions.products(self.inputs, self.outputs)
        column = weights.to(a.dtype).view(-1, 1, 1, 1)
        a, b = (a * column, b) if a.shape[3] <= b.shape[3] else (a, b * column)
        step = max(1, reductions.ROWS_AT_ONCE // max(1, a.shape[2]))
        parts = zip(a.split(step), b.split(step), strict=True)
        found = [_summed_outer(*part) for part in parts]
        return reductions.total(found).reshape(self.shape)

    def gram(self, other: Factor) -> Tensor:
        """Inner products of factors where that is cheaper than of gradients."""
        if not isinstance(other, Outer) or self.inputs.shape[1] != 1:
            return super().gram(other)
        if not costs.cross_by_gram(self.inputs.shape, self.outputs.shape, other.size):
            return super().gram(other)
        if self.inputs.dtype not in (torch.float64, torch.complex128):
            far = [reductions.reach(each.sides) > _APART for each in (self, other)]
            if rare(torch.cat(far)):
                return self.double().gram(other.double())
        sizes = (self.size, self.inputs.shape[2], other.size, other.inputs.shape[2])
        k = reductions.inner(self.inputs.flatten(0, 2), other.inputs.flatten(0, 2))
        k *= reductions.inner(self.outputs.flatten(0, 2), other.outputs.flatten(0, 2))
        return k.view(sizes).sum((1, 3))

    def project(self, probes: Probes) -> Tensor:
        """Project both factors, `sum_t <out_t, left> <in_t, right>`, where cheaper."""
        left, o = probes.left, self.outputs.shape[3]
        _, groups, positions, i = self.inputs.shape
        if left is None or groups > 1 or left.shape[1] != o:
            return super().project(probes)
        if not costs.project_factors(positions, i, o, len(left)):
            return super().project(probes)
        a, right = reductions.products(self.inputs[:, 0], probes.right)
        b, left = reductions.products(self.outputs[:, 0], left)
        return ((a @ right.T) * (b @ left.T)).sum(1)

    def _of(self, inputs: Tensor, outputs: Tensor) -> Self:
        return replace(self, inputs=inputs, outputs=outputs, shared=None)


def _summed_outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum of outer products over samples and positions, -> [G, O, I]."""
    if a.shape[1] == 1:
        a, b = a.squeeze(1), b.squeeze(1)
        if a.stride(0) < a.stride(1):  # of recurrent nets: flattened without a copy
            a, b = a.transpose(0, 1), b.transpose(0, 1)
        return (b.flatten(0, 1).T @ a.flatten(0, 1))[None]
    a, b = (each.transpose(0, 1).flatten(1, 2) for each in (a, b))
    return torch.bmm(b.transpose(1, 2), a)

"""Compact forms of per-sample gradients, and what can be computed from each.

B samples, T positions of one sample, G groups, I inputs, O outputs, P numbers in a
parameter. Every use of a parameter in the loss leaves a factor; from it a quantity is
computed without the gradients where that is cheaper. Products of matrices run in
`promote_types(dtype, float32)`, or wider where torch is allowed to round their factors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vgrad.dtypes import double, wide
from vgrad.persample.factors import costs, reductions, sums
from vgrad.persample.factors.reductions import Norm

_APART = 1e8
"""Up to which float32 holds the products of four numbers."""


class Probes(NamedTuple):
    """Random directions in the space of one parameter, `dim` of them.

    Direction k is the outer product of `left[k]` and `right[k]`. A parameter with fewer
    than two dimensions has no `left`. Those of a complex parameter are of its view as
    real numbers. -> left [dim, O], right [dim, P / O].
    """

    left: Tensor | None
    right: Tensor


class Factor(ABC):
    """The gradients of one parameter for `size` samples, in some form."""

    size: int
    shape: torch.Size
    """The parameter's shape."""

    @abstractmethod
    def grad(self) -> Tensor:
        """Return the gradients, [B, *shape]."""

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """Sum over samples with weights [B], in float32 or wider. -> [*shape]."""

    @abstractmethod
    def take(self, rows: Tensor) -> "Factor":
        """Return the factor of these samples."""

    @abstractmethod
    def double(self) -> "Factor":
        """Return the same gradients, made of float64 numbers."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory that the factor holds."""

    @property
    def sides(self) -> tuple[Tensor, ...]:
        """What a weighted sum multiplies in float32 before it adds, [B, ...] each."""
        return ()

    def norm(self) -> Norm:
        """Return the norms of the gradients, [B]."""
        return Dense(self.grad()).norm()

    def settled(self) -> tuple["Factor", Norm]:
        """Return the form to keep until the weights are known, and the norms."""
        return self, self.norm()

    def gram(self, other: "Factor") -> Tensor:
        """Return all inner products with other samples' gradients, [B, B']."""
        grads = self.grad()
        return reductions.inner(grads, grads if other is self else other.grad())

    def project(self, probes: Probes) -> Tensor:
        """Return the inner products with probes, [B, dim]."""
        return Dense(self.grad()).project(probes)


@dataclass(frozen=True)
class Dense(Factor):
    """The gradients themselves, `g [B, *shape]`."""

    g: Tensor

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.g)

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.g.shape[1:]

    @property
    def bytes(self) -> int:
        """Memory of the gradients."""
        return self.g.numel() * self.g.element_size()

    def grad(self) -> Tensor:
        """Return the gradients."""
        return self.g

    def norm(self) -> Norm:
        """Return their norms."""
        return Norm.exactly(reductions.row_norms(self.g))

    def weighted(self, weights: Tensor) -> Tensor:
        """Sum over samples."""
        return sums.weighted_rows(self.g, weights)

    def take(self, rows: Tensor) -> "Dense":
        """Return the gradients of these samples."""
        return Dense(self.g[rows])

    def double(self) -> "Dense":
        """Widen the gradients."""
        return Dense(double(self.g))

    def project(self, probes: Probes) -> Tensor:
        """Contract the longer side of the gradients, then the other."""
        g = torch.view_as_real(self.g) if self.g.is_complex() else self.g
        g, right = reductions.products(g, probes.right)
        if probes.left is None:
            return g.reshape(self.size, right.shape[1]) @ right.T
        g, left = g.reshape(*g.shape[:2], right.shape[1]), probes.left.to(g.dtype)
        if left.shape[1] > right.shape[1]:
            return torch.einsum("bki,ki->bk", left @ g, right)
        return torch.einsum("bok,ko->bk", g @ right.T, left)


@dataclass(frozen=True)
class Zero(Factor):
    """The gradients of a parameter that the loss did not use."""

    size: int
    like: Tensor

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.like.shape

    @property
    def bytes(self) -> int:
        """Nothing is kept."""
        return 0

    def grad(self) -> Tensor:
        """Return zeros."""
        return self.like.new_zeros((self.size, *self.shape))

    def norm(self) -> Norm:
        """Return zeros."""
        return Norm.exactly(self.like.new_zeros(self.size, dtype=torch.float64))

    def weighted(self, weights: Tensor) -> Tensor:
        """Return zeros."""
        return self.like.new_zeros(self.shape, dtype=wide(self.like.dtype))

    def take(self, rows: Tensor) -> "Zero":
        """Return the zeros of these samples."""
        return Zero(len(rows), self.like)

    def double(self) -> "Zero":
        """Widen the zeros."""
        return Zero(self.size, double(self.like))

    def gram(self, other: Factor) -> Tensor:
        """Return zeros."""
        dtype = wide(self.like.dtype)
        return self.like.new_zeros((self.size, other.size), dtype=dtype)

    def project(self, probes: Probes) -> Tensor:
        """Return zeros."""
        return probes.right.new_zeros(self.size, len(probes.right))


class Positions:
    """What two parameters of one op have in common, `[B, G, T, O]`."""

    def __init__(self, tensor: Tensor) -> None:
        """Compute nothing yet."""
        self.tensor = tensor

    @cached_property
    def products(self) -> Tensor:
        """Inner products between the positions of a sample, [B * G, T, T]."""
        return reductions.self_products(self.tensor.flatten(0, 1))


@dataclass(frozen=True)
class Outer(Factor):
    """Sums over positions of outer products, `sum_t out_t x in_t` in every group.

    `inputs [B, G, T, I]` and `outputs [B, G, T, O]`; the gradient is `[B, G, O, I]`,
    viewed as `shape`. `shared` are the outputs if another parameter has the same ones.
    """

    inputs: Tensor
    outputs: Tensor
    shape: torch.Size
    shared: Positions | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.inputs)

    @property
    def bytes(self) -> int:
        """Memory of both factors."""
        return sum(each.numel() * each.element_size() for each in self.sides)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Both factors."""
        return self.inputs, self.outputs

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
        if self.inputs.shape[2] == 1:
            a = reductions.row_norms(self.inputs.flatten(0, 1)).view(self.size, -1)
            b = reductions.row_norms(self.outputs.flatten(0, 1)).view(self.size, -1)
            return Norm.exactly(reductions.together(a * b), (a + b).sum(1))
        if self.by_gram:
            outputs = self.shared or Positions(self.outputs)
            return reductions.gram_norm(
                reductions.self_products(self.inputs.flatten(0, 1)),
                outputs.products,
                self.size,
                max(self.inputs.shape[3], self.outputs.shape[3]),
                lambda rows: self.take(rows).double().grad(),
            )
        return Dense(self.grad()).norm()

    def settled(self) -> tuple[Factor, Norm]:
        """Keep the gradients where the norms need them."""
        if self.by_gram:
            return self, self.norm()
        return Dense(self.grad()).settled()

    def weighted(self, weights: Tensor) -> Tensor:
        """Scale the smaller factor, then one product over samples and positions."""
        a, b = reductions.products(self.inputs, self.outputs)
        column = weights.to(a.dtype).view(-1, 1, 1, 1)
        a, b = (a * column, b) if a.shape[3] <= b.shape[3] else (a, b * column)
        step = max(1, sums.ROWS_AT_ONCE // max(1, a.shape[2]))
        parts = zip(a.split(step), b.split(step), strict=True)
        found = [_summed_outer(*part) for part in parts]
        return sums.total(found).reshape(self.shape)

    def take(self, rows: Tensor) -> "Outer":
        """Return the factor of these samples."""
        return Outer(self.inputs[rows], self.outputs[rows], self.shape)

    def double(self) -> "Outer":
        """Widen both factors."""
        inputs, outputs = map(double, self.sides)
        return Outer(inputs, outputs, self.shape)

    def gram(self, other: Factor) -> Tensor:
        """Inner products of factors where that is cheaper than of gradients."""
        if not isinstance(other, Outer) or self.inputs.shape[1] != 1:
            return super().gram(other)
        if not costs.cross_by_gram(self.inputs.shape, self.outputs.shape, other.size):
            return super().gram(other)
        far = any(
            bool((sums.reach(each.sides) > _APART).any()) for each in (self, other)
        )
        if far and self.inputs.dtype not in (torch.float64, torch.complex128):
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


def _summed_outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum of outer products over samples and positions, -> [G, O, I]."""
    if a.shape[1] == 1:
        a, b = a.squeeze(1), b.squeeze(1)
        if a.stride(0) < a.stride(1):  # of recurrent nets: flattened without a copy
            a, b = a.transpose(0, 1), b.transpose(0, 1)
        return (b.flatten(0, 1).T @ a.flatten(0, 1))[None]
    a, b = (each.transpose(0, 1).flatten(1, 2) for each in (a, b))
    return torch.bmm(b.transpose(1, 2), a)

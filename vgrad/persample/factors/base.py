"""Compact forms of per-sample gradients, and what can be computed from each.

B samples, P numbers in a parameter, O of them along its first axis. Every use of a
parameter in the loss leaves a factor; quantities are computed from it, without the
gradients where that is cheaper. Products of matrices run in
`promote_types(dtype, float32)`, or wider where torch may round their factors.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vgrad.conditions import check_now
from vgrad.persample.factors import reductions
from vgrad.persample.factors.reductions import Norm
from vgrad.torch_private.tensors import memory
from vgrad.tree import double, wide


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


class Positions:
    """Gradients `[B, G, T, O]` at an output that two parameters of one op have."""

    def __init__(self, tensor: Tensor) -> None:
        """Compute nothing yet."""
        self.tensor = tensor

    @cached_property
    def norms(self) -> Tensor:
        """Norms over the positions and numbers of each group, [B, G] in float64."""
        with check_now():
            norms = reductions.row_norms(self.tensor.flatten(0, 1))
        return norms.view(self.tensor.shape[:2])

    @cached_property
    def products(self) -> Tensor:
        """Inner products between the positions of a sample, [B * G, T, T]."""
        return reductions.self_products(self.tensor.flatten(0, 1))

    @cached_property
    def zeros(self) -> Tensor:
        """Whether a sample has nothing but zeros, [B]."""
        return reductions.zeros(self.tensor)


@dataclass(frozen=True)
class Dense(Factor):
    """The gradients themselves, `g [B, *shape]`.

    `shared` are the same numbers, in one group, if another parameter has them too.
    """

    g: Tensor
    shared: Positions | None = None

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
        return self.g.nbytes

    def grad(self) -> Tensor:
        """Return the gradients."""
        return self.g

    def norm(self) -> Norm:
        """Return their norms."""
        if self.shared is not None:
            return Norm.exactly(self.shared.norms[:, 0])
        return Norm.exactly(reductions.row_norms(self.g))

    def weighted(self, weights: Tensor) -> Tensor:
        """Sum over samples."""
        return reductions.weighted_rows(self.g, weights)

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


@dataclass(frozen=True)
class Pair(Factor):
    """Gradients made of products of two tensors, `inputs` and `outputs` `[B, ...]`."""

    inputs: Tensor
    outputs: Tensor
    shape: torch.Size

    @property
    @abstractmethod
    def by_gram(self) -> bool:
        """Whether norms are computed without gradients."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.inputs)

    @property
    def bytes(self) -> int:
        """Memory of both tensors."""
        return self.inputs.nbytes + self.outputs.nbytes

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Both tensors."""
        return self.inputs, self.outputs

    def settled(self) -> tuple[Factor, Norm]:
        """Keep the gradients where the norms need them."""
        if self.by_gram:
            return self, self.norm()
        return Dense(self.grad()).settled()

    def take(self, rows: Tensor) -> Self:
        """Return the factor of these samples."""
        return self._of(self.inputs[rows], self.outputs[rows])

    def double(self) -> Self:
        """Widen both tensors."""
        return self._of(*map(double, self.sides))

    def _of(self, inputs: Tensor, outputs: Tensor) -> Self:
        return replace(self, inputs=inputs, outputs=outputs)


def owned(factor: Factor, but: Tensor | None = None) -> Factor:
    """Return the same gradients, in memory that only the factor refers to.

    Tensors on the memory of `but` are kept as they are.
    """
    if isinstance(factor, Zero):  # whose tensor has no values that count
        return factor
    spared = None if but is None else memory(but)
    values = {name: _owned(each, spared) for name, each in vars(factor).items()}
    if any(each is ... for each in values.values()):  # of a kind that is not known
        return Dense(factor.grad().clone())
    same = copy.copy(factor)
    vars(same).update(values)
    return same


def _owned(value: Any, spared: int | None) -> Any:
    """Copy an attribute of a factor; an ellipsis where that cannot be done."""
    match value:
        case Tensor():
            own = spared is not None and memory(value) == spared
            return value if own else value.clone()
        case Positions():  # which another parameter's factor refers to as well
            return value if _owned(value.tensor, spared) is value.tensor else None
        case Factor():
            return owned(value)
        case None | bool() | int() | float() | str() | torch.dtype():
            return value
        case tuple() if all(isinstance(each, int) for each in value):
            return value
    return ...

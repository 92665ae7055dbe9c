"""Compact forms of per-sample gradients, and the quantities computed from them.

B samples, P numbers in a parameter, O of them along its first axis; in products of
matrices G groups, T positions of one sample, I inputs and O outputs. Products of
matrices are in `factors/products.py`.
"""

import copy
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from vgrad.devices import is_host
from vgrad.factors import costs, products, reductions
from vgrad.torch_private.tensors import memory
from vgrad.tree import double, wide

_AT_ONCE = 2**22
"""Numbers of gradients formed at once for inner products and squares."""


class Probes(NamedTuple):
    """Directions in the space of one parameter, `dim` of them.

    Direction k is the outer product of `left[k]` and `right[k]`, or with `pairs` there
    is one for each pair of a left and a right vector, in rows. A parameter with fewer
    than two dimensions has no `left`. For a complex parameter they are directions of
    its view as real numbers. -> left [k, O], right [k, P / O].
    """

    left: Tensor | None
    right: Tensor
    pairs: bool = False

    @property
    def dim(self) -> int:
        """The number of directions."""
        if self.left is None or not self.pairs:
            return len(self.right)
        return len(self.left) * len(self.right)

    def cheaper_by_sides(self, positions: int) -> bool:
        """Return whether to project both sides of a factor, and not its gradients."""
        left: Any = self.left
        sizes = left.shape, self.right.shape
        return costs.project_factors(positions, *sizes, self.pairs)

    def summed(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum products of two sides at T positions, [B, T, k] each. -> [B, dim]."""
        return (left.mT @ right).flatten(1) if self.pairs else (left * right).sum(1)


class Norm(NamedTuple):
    """Norms of B gradients in float64, [B], all to be divided by `scale`.

    No number that is multiplied for a weighted sum is larger than the `operands`, and
    no norm larger than `upper`, despite rounding. Where `cancellation`, which grows
    with the size of the `terms` relative to the norm, is above `norms.LIMIT`, or NaN,
    norms are to be computed again, from gradients of `factor`. A weighted sum loses up
    to `eps * terms` of each.
    """

    value: Tensor
    operands: Sequence[Tensor]
    upper: Tensor
    cancellation: Tensor | None = None
    terms: Tensor | None = None
    eps: float = 0.0
    factor: Any = None
    scale: Tensor | None = None


class Products(NamedTuple):
    """Products a, b [B * G, T, T] of positions, from which norms are taken.

    The squares of the norms are `<a, b>`, [B]; the diagonals, [2, B, G, T], are squares
    of the sizes of positions. All are sums of up to `length` products. Relative to the
    sizes of their terms, squares lose up to `cut`, and a weighted sum up to `rounding`.
    A small `pair` of products [B, G, T, T] has to be multiplied yet, together with
    others.
    """

    squares: Any
    sizes: Any
    length: int
    factor: Any
    cut: float
    rounding: float
    pair: tuple[Tensor, ...] = ()
    scale: Tensor | None = None

    @classmethod
    def of(cls, a: Tensor, b: Tensor, factor: "Pair", length: int) -> "Products":
        # Of factors of two dtypes, one product may be wider than the other is precise.
        dtype = a.dtype if a.dtype == b.dtype else torch.float32
        a, b = (side.to(dtype).unflatten(0, (factor.size, -1)) for side in (a, b))
        lost = 0.0, 0.0
        if isinstance(factor, Outer):
            cuts = any(products.in_halves(side, side) for side in factor.sides)
            lost = products.CUT if cuts else 0.0, factor.rounding
        if costs.gathers(a.nbytes, is_host(a.device)):
            return cls(None, None, length, factor, *lost, (a, b))
        return cls(*multiplied(a, b), length, factor, *lost)


def multiplied(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squares of norms, [...], and the sizes [2, ..., G, T] of positions."""
    squares = torch.linalg.vecdot(a.flatten(-3), b.flatten(-3))
    return squares, torch.stack((a.diagonal(0, -2, -1), b.diagonal(0, -2, -1)))


Norms = Sequence["Norm | Products | Dense"]
"""Of parts of a parameter whose squares add up; of small gradients to be taken yet."""


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
    def select(self, rows: Tensor) -> "Factor":
        """Return the factor of these samples."""

    @abstractmethod
    def double(self) -> "Factor":
        """Return the factor with float64 numbers."""

    def times(self, scales: Sequence[Tensor]) -> "Factor":
        """Return the gradients times tensors, for a matrix a column and a row."""
        g = self.grad()
        return Dense(functools.reduce(operator.mul, scales, g.to(wide(g.dtype))))

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory that the factor holds."""

    @property
    def sides(self) -> tuple[Tensor, ...]:
        """Operands that a weighted sum multiplies in float32, [B, ...] each."""
        return ()

    def with_norms(self) -> tuple["Factor", Norms]:
        """Return the form to keep until the weights are known, and its norms."""
        return Dense(self.grad()).with_norms()

    def gram(self, other: "Factor") -> Tensor:
        """Return all inner products with other samples' gradients, [B, B']."""
        right = other.grad()
        if other is self:
            return products.inner(right, right)
        parts = [products.inner(part.grad(), right) for part in self.in_cache()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def by_position(self, others: Tensor) -> Tensor | None:
        """Return inner products of each position with gradients, [B, B', T].

        None for gradients that are no sums over positions.
        """
        return None

    def in_cache(self) -> "Iterator[Factor]":
        """Yield factors of some samples each, whose gradients fit into a cache."""
        step = max(1, _AT_ONCE // max(1, self.shape.numel()))
        rows = torch.arange(self.size).split(step)
        return iter([self]) if len(rows) == 1 else map(self.select, rows)

    def project(self, probes: Probes) -> Tensor:
        """Return the inner products with probes, [B, dim]."""
        return Dense(self.grad()).project(probes)


class Positions:
    """Gradients `[B, G, T, O]` at an output that two parameters of one op have."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @cached_property
    def norms(self) -> Tensor:
        return _norms(self.tensor)

    @cached_property
    def products(self) -> Tensor:
        """Inner products between the positions of a sample, [B * G, T, T]."""
        return products.self_products(self.tensor.flatten(0, 1))


def _norms(tensor: Tensor) -> Tensor:
    """Norms over positions, [B, G, T, O] -> [B, G] in float64; [B] of one group."""
    if tensor.shape[1] == 1:
        return reductions.row_norms(tensor)
    return reductions.row_norms(tensor.flatten(0, 1)).view(tensor.shape[:2])


@dataclass(frozen=True)
class Dense(Factor):
    """The gradients themselves, `g [B, *shape]`."""

    g: Tensor
    shared: Positions | None = None

    @property
    def size(self) -> int:
        return len(self.g)

    @property
    def shape(self) -> torch.Size:
        return self.g.shape[1:]

    @property
    def bytes(self) -> int:
        return self.g.nbytes

    def grad(self) -> Tensor:
        return self.g

    @property
    def is_small(self) -> bool:
        """Whether it joins others for ops on all of them."""
        gatherable = type(self) is Dense and not self.g.is_complex()
        return gatherable and costs.gathers(self.g.nbytes, is_host(self.g.device))

    def with_norms(self) -> tuple["Dense", Norms]:
        return self, [self if self.shared is None and self.is_small else self.norm()]

    def norm(self) -> Norm:
        """Take the norms of the gradients."""
        shared = self.shared
        norms = reductions.row_norms(self.g) if shared is None else shared.norms
        return Norm(norms, (norms,), norms)

    def weighted(self, weights: Tensor) -> Tensor:
        return reductions.weighted_rows(self.g, weights)

    def select(self, rows: Tensor) -> "Dense":
        return Dense(self.g[rows])

    def double(self) -> "Dense":
        return Dense(double(self.g))

    def project(self, probes: Probes) -> Tensor:
        """Contract the longer side of the gradients, then the other."""
        g = torch.view_as_real(self.g) if self.g.is_complex() else self.g
        g, right = products.exact(g, probes.right)
        if probes.left is None:
            return g.reshape(self.size, right.shape[1]) @ right.T
        g, left = g.reshape(*g.shape[:2], right.shape[1]), probes.left.to(g.dtype)
        if probes.pairs:
            return (left @ (g @ right.T)).flatten(1)
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
        return self.like.shape

    @property
    def bytes(self) -> int:
        return 0

    def grad(self) -> Tensor:
        return self.like.new_zeros((self.size, *self.shape))

    def with_norms(self) -> tuple["Zero", Norms]:
        norms = self.like.new_zeros(self.size, dtype=torch.float64)
        return self, [Norm(norms, (norms,), norms)]

    def weighted(self, weights: Tensor) -> Tensor:
        return self.like.new_zeros(self.shape, dtype=wide(self.like.dtype))

    def select(self, rows: Tensor) -> "Zero":
        return Zero(len(rows), self.like)

    def times(self, scales: Sequence[Tensor]) -> "Zero":
        return self

    def double(self) -> "Zero":
        return Zero(self.size, double(self.like))

    def gram(self, other: Factor) -> Tensor:
        dtype = wide(self.like.dtype)
        return self.like.new_zeros((self.size, other.size), dtype=dtype)

    def project(self, probes: Probes) -> Tensor:
        return probes.right.new_zeros(self.size, probes.dim)


@dataclass(frozen=True)
class Pair(Factor):
    """Gradients made of products of two tensors, `inputs` and `outputs` `[B, ...]`."""

    inputs: Tensor
    outputs: Tensor
    shape: torch.Size

    @property
    def size(self) -> int:
        return len(self.inputs)

    @property
    def bytes(self) -> int:
        return self.inputs.nbytes + self.outputs.nbytes

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.outputs

    def zeros(self) -> Tensor:
        """Mark samples with nothing but zeros in one of the tensors, [B]."""
        return reductions.zeros(self.inputs) | reductions.zeros(self.outputs)

    def select(self, rows: Tensor) -> Self:
        return self._of(self.inputs[rows], self.outputs[rows])

    def double(self) -> Self:
        return self._of(*map(double, self.sides))

    def _of(self, inputs: Tensor, outputs: Tensor) -> Self:
        return replace(self, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class Outer(Pair):
    """Sums over positions of outer products, `sum_t out_t x in_t` in every group.

    `inputs [B, G, T, I]` and `outputs [B, G, T, O]`; the gradient is `[B, G, O, I]`,
    viewed as `shape`. `shared` are the outputs if another parameter has the same ones.
    """

    shared: Positions | None = None

    @property
    def rounding(self) -> float:
        """How much of its terms a weighted sum may lose."""
        return products.rounding(self.inputs, self.outputs)

    @property
    def is_matrix(self) -> bool:
        """Whether outputs and inputs are the two axes of the parameter."""
        sizes = (self.outputs.shape[3], self.inputs.shape[3])
        return self.inputs.shape[1] == 1 and sizes == tuple(self.shape)

    @property
    def by_gram(self) -> bool:
        """Whether norms are computed without gradients."""
        _, _, positions, i = self.inputs.shape
        o = self.outputs.shape[3]
        sizes = positions, i, o, products.in_halves(*self.sides)
        return positions == 1 or costs.outer_by_gram(*sizes)

    def grad(self) -> Tensor:
        return self.formed().to(self.inputs.dtype)

    def formed(self) -> Tensor:
        """Return the gradients in float32 or wider."""
        a, b = self.inputs, self.outputs.transpose(2, 3)
        if a.shape[2] == 1:
            a, b = products.exact(a, b)
            grads = b * a
        else:
            grads = products.times(b.flatten(0, 1), a.flatten(0, 1))
        return grads.reshape(self.size, *self.shape)

    def with_norms(self) -> tuple[Factor, Norms]:
        outputs = self.shared or Positions(self.outputs)
        if self.inputs.shape[2] == 1:
            a, b = _norms(self.inputs), outputs.norms
            norms, operands = a * b, (a, b)
            if a.ndim > 1:
                norms = reductions.root(norms, 1, self.inputs.dtype)
                operands = a.amax(1), b.amax(1)
            upper = norms * (1 + self.rounding) if self.rounding else norms
            return self, [Norm(norms, operands, upper)]
        if not self.by_gram:
            return Dense(self.formed()).with_norms()
        a, b = products.self_products(self.inputs.flatten(0, 1)), outputs.products
        length = max(self.inputs.shape[3], self.outputs.shape[3])
        return self, [Products.of(a, b, self, length)]

    def weighted(self, weights: Tensor) -> Tensor:
        """Add up products over samples and positions, some samples at a time."""
        run, rows = products.scaled, reductions.ROWS_AT_ONCE
        if self.rounding > 0:
            run, rows = products.by_terms, products.ROWS
        step = max(1, rows // max(1, self.inputs.shape[2]))
        if self.size <= step:
            total = run(*self.sides, weights)
            return total if total.shape == self.shape else total.reshape(self.shape)
        sides = self.inputs.split(step), self.outputs.split(step)
        parts = [*map(run, *sides, weights.split(step))]
        return reductions.total(parts).reshape(self.shape)

    def gram(self, other: Factor) -> Tensor:
        """Inner products of both sides, where gradients cost more."""
        if not isinstance(other, Outer) or not self.crosses(other):
            return self._products(other.grad())
        sizes = (self.size, self.inputs.shape[2], other.size, other.inputs.shape[2])
        k = products.inner(self.inputs.flatten(0, 2), other.inputs.flatten(0, 2))
        k *= products.inner(self.outputs.flatten(0, 2), other.outputs.flatten(0, 2))
        sums = k.view(sizes).sum((1, 3))
        rows, columns = (reductions.spoils(factor.sides) for factor in (self, other))
        return sums + rows[:, None] + columns

    def crosses(self, other: "Outer") -> bool:
        """Return whether inner products are to be taken of both sides."""
        a, b, others = self.inputs.shape, self.outputs.shape, other.inputs.shape
        return a[1] == others[1] == 1 and costs.cross_by_gram(a, b, others)

    def _products(self, others: Tensor) -> Tensor:
        """Inner products with gradients [B', *shape], by one side where cheaper."""
        _, groups, positions, i = self.inputs.shape
        if groups > 1 or positions > 1 or len(others) >= i:
            return super().gram(Dense(others))
        return cast(Tensor, self.by_position(others)).squeeze(2)

    def by_position(self, others: Tensor) -> Tensor | None:
        count, (size, groups, positions, i) = len(others), self.inputs.shape
        if groups > 1:
            return None
        a, b, others = products.exact(*self.sides, others.reshape(-1, i))
        step = max(1, _AT_ONCE // max(1, positions * len(others)))
        inner_products = others.new_empty(size, count, positions)
        for rows in map(slice, range(0, size, step), range(step, size + step, step)):
            seen = (a[rows, 0] @ others.mH).unflatten(2, (count, -1))
            inner_products[rows] = (seen @ b[rows, 0].unsqueeze(3))[..., 0].mT
        inner_products += reductions.spoils(self.sides)[:, None, None]
        return inner_products.to(wide(self.inputs.dtype))

    def times(self, scales: Sequence[Tensor]) -> Factor:
        """Multiply the two sides of a matrix."""
        if not self.is_matrix:
            return super().times(scales)
        rows, columns = (scale.flatten() for scale in scales)
        return self._of(self.inputs * columns, self.outputs * rows)

    def project(self, probes: Probes) -> Tensor:
        """Project both factors, `sum_t <out_t, left> <in_t, right>`, where cheaper."""
        left, (_, groups, positions, _) = probes.left, self.inputs.shape
        if left is None or groups > 1 or left.shape[1] != self.outputs.shape[3]:
            return super().project(probes)
        if not probes.cheaper_by_sides(positions):
            return super().project(probes)
        a, right = products.exact(self.inputs[:, 0], probes.right)
        b, left = products.exact(self.outputs[:, 0], left)
        return probes.summed(b @ left.T, a @ right.T)

    def _of(self, inputs: Tensor, outputs: Tensor) -> Self:
        return replace(self, inputs=inputs, outputs=outputs, shared=None)


class Compound(Factor):
    """A factor that is made of others, its `parts`."""

    parts: tuple[Factor, ...]

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def sides(self) -> tuple[Tensor, ...]:
        return tuple(side for part in self.parts for side in part.sides)

    def select(self, rows: Tensor) -> Factor:
        return self._of(*(part.select(rows) for part in self.parts))

    def double(self) -> Factor:
        return self._of(*(part.double() for part in self.parts))

    @abstractmethod
    def _of(self, *parts: Any) -> Factor: ...


@dataclass(frozen=True)
class Scaled(Compound):
    """The gradients of `factor`, divided by `scale` once they are float32 or wider."""

    factor: Factor
    scale: Tensor

    @property
    def parts(self) -> tuple[Factor]:
        return (self.factor,)

    @property
    def shape(self) -> torch.Size:
        return self.factor.shape

    def grad(self) -> Tensor:
        grad = self.factor.grad()
        return grad.to(wide(grad.dtype)) / self.scale

    def with_norms(self) -> tuple[Factor, Norms]:
        factor, norms = self.factor.with_norms()
        norms = (part.norm() if isinstance(part, Dense) else part for part in norms)
        return self._of(factor), [norm._replace(scale=self.scale) for norm in norms]

    def weighted(self, weights: Tensor) -> Tensor:
        # Divide the sum, which may be wider than weights.
        return self.factor.weighted(weights) / self.scale

    def gram(self, other: Factor) -> Tensor:
        if not isinstance(other, Scaled):
            return self.factor.gram(other) / self.scale
        return self.factor.gram(other.factor) / self.scale / other.scale

    def project(self, probes: Probes) -> Tensor:
        return self.factor.project(probes) / self.scale

    def by_position(self, others: Tensor) -> Tensor | None:
        inner_products = self.factor.by_position(others)
        return None if inner_products is None else inner_products / self.scale

    def _of(self, *parts: Any) -> Factor:
        return Scaled(parts[0], self.scale)


def owned(factor: Factor, but: Tensor | None = None) -> Factor:
    """Copy a factor, except for tensors in the memory of `but`."""
    if isinstance(factor, Zero):  # whose tensor has no values that count
        return factor
    spared = None if but is None else memory(but)
    values = {name: _owned(value, spared) for name, value in vars(factor).items()}
    if any(value is ... for value in values.values()):  # of another kind
        return Dense(factor.grad().clone())
    same = copy.copy(factor)
    vars(same).update(values)
    return same


def _owned(value: Any, spared: int | None) -> Any:
    match value:
        case Tensor():
            is_spared = spared is not None and memory(value) == spared
            return value if is_spared else value.clone()
        case Positions():  # which another parameter's factor refers to as well
            return value if _owned(value.tensor, spared) is value.tensor else None
        case Factor():
            return owned(value)
        case None | bool() | int() | float() | str() | torch.dtype():
            return value
        case tuple() if all(isinstance(number, int) for number in value):
            return value
    return ...

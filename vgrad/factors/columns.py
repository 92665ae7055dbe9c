"""One factor for K gradients of each sample, as of the K outputs of a model.

B samples, K columns, G groups, T positions of one sample, I inputs and O outputs.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.factors.base import Compound, Dense, Factor, Norms, Outer, Zero
from vgrad.factors.conv import Conv
from vgrad.factors.rows import Rows
from vgrad.torch_private import modes
from vgrad.tree import double, wide, widened

_WHOLE = 4096
"""Numbers of a parameter up to which the covariance of all of them is formed."""


@dataclass(frozen=True)
class Columns(Compound):
    """Gradients `[B, K, ...]` of a parameter, from one side for all columns.

    `factor` is of a parameter with the K inside, behind as many as `before` numbers.
    """

    factor: Factor
    shape: torch.Size
    before: int = 1

    @classmethod
    def one(cls, factor: Factor) -> "Columns":
        """Return the factor of a single column."""
        return cls(factor, torch.Size((1, *factor.shape)))

    @classmethod
    def of(
        cls, factor: Factor, count: int, outside: Callable[[Tensor], Tensor]
    ) -> "Columns":
        """Join the columns of a factor whose tensors a vmap maps over.

        `outside` takes a tensor out of it, with K in front.
        """

        def wide(tensor: Tensor, axis: int) -> Tensor:
            return outside(tensor).movedim(0, axis).flatten(axis, axis + 1)

        def flat(*sizes: int) -> torch.Size:
            return torch.Size(sizes)

        before, shape, mapped = 1, factor.shape, modes.is_batched
        match factor:
            case Zero():
                factor = Zero(factor.size, factor.like.expand(count, *shape))
            case Outer(inputs, outputs) if not mapped(inputs):
                outputs, before = wide(outputs, 3), outputs.shape[1]
                sizes = flat(before * outputs.shape[3], inputs.shape[3])
                factor = Outer(inputs, outputs, sizes)
            case Outer(inputs, outputs) if not mapped(outputs):
                inputs, before = wide(inputs, 3), outputs.shape[1] * outputs.shape[3]
                factor = Outer(inputs, outputs, flat(before, inputs.shape[3]))
            case Conv(inputs, outputs) if not mapped(inputs):
                before = factor.groups
                outputs = wide(outputs.unflatten(1, (before, -1)), 2).flatten(1, 2)
                sizes = flat(outputs.shape[1], *shape[1:])
                factor = replace(factor, outputs=outputs, shape=sizes)
            case Rows(index, outputs) if not mapped(index):
                outputs, before = wide(outputs, 2), shape[0]
                factor = Rows(index, outputs, flat(before, outputs.shape[2]))
            case _:
                factor = Dense(outside(factor.grad()).movedim(0, 1))
        return cls(factor, torch.Size((count, *shape)), before)

    @property
    def parts(self) -> tuple[Factor]:
        return (self.factor,)

    def grad(self) -> Tensor:
        return self._placed(self.factor.grad())

    def with_norms(self) -> tuple[Factor, Norms]:
        factor, norms = self.factor.with_norms()
        return self._of(factor), norms

    def weighted(self, weights: Tensor) -> Tensor:
        return self._placed(self.factor.weighted(weights)[None])[0]

    def _placed(self, grads: Tensor) -> Tensor:
        """Put the columns in front, [B, K, ...]."""
        grads = grads.reshape(len(grads), self.before, self.shape[0], -1)
        return grads.transpose(1, 2).reshape(len(grads), *self.shape)

    def _of(self, *parts: Factor) -> Factor:
        return replace(self, factor=parts[0])


@dataclass(frozen=True)
class Appended(Compound):
    """Gradients [B, K, O, I + 1] of a weight, and of a bias as the last column."""

    weight: Factor
    bias: Factor

    @property
    def parts(self) -> tuple[Factor, Factor]:
        return self.weight, self.bias

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.bias.shape, self.weight.shape[2:].numel() + 1))

    @cached_property
    def is_shared(self) -> bool:
        """Whether the bias has the sum of the gradients at the weight's outputs.

        Then it is a column of the weight, for one more input, which is 1.
        """
        grads, outputs = self.bias.grad(), _outputs(self.weight)
        if isinstance(_inner(self.weight), Zero):
            return not grads.any()
        if outputs is None or outputs.shape[2] != grads[0].numel():
            return False
        # Both sum up the same numbers, in some order, and at least in float32.
        eps, grad_eps = (torch.finfo(x).eps for x in (wide(grads.dtype), grads.dtype))
        grads, outputs = double(grads).flatten(1), double(outputs)
        room = 8 * eps * outputs.abs().sum(1) + 2 * grad_eps * grads.abs()
        return bool(((outputs.sum(1) - grads).abs() <= room).all())

    def grad(self) -> Tensor:
        columns = self.weight.grad().flatten(3), self.bias.grad().unsqueeze(3)
        return torch.cat(columns, 3)

    def weighted(self, weights: Tensor) -> Tensor:
        return Dense(self.grad()).weighted(weights)

    def _of(self, *parts: Factor) -> Factor:
        return Appended(*parts)


class Covariances(NamedTuple):
    """Sums over samples and positions of outer products of a factor's two sides.

    -> left [O, O] and right [I, I], their diagonals [O], [I] where the rest is zero.
    """

    left: Tensor
    right: Tensor
    positions: float

    def __truediv__(self, by: Any) -> "Covariances":
        return self._replace(left=self.left / by)

    def plus(self, other: "Covariances") -> "Covariances":
        """Add the sums over other samples, which may have no position at all."""
        if not (self.positions and other.positions):
            return self if self.positions else other
        left, right = map(_full_or_diagonal, self[:2], other[:2])
        return Covariances(left, right, self.positions + other.positions)


def _full_or_diagonal(one: Tensor, other: Tensor) -> Tensor:
    if one.ndim != other.ndim:
        one, other = (sums.diag() if sums.ndim == 1 else sums for sums in (one, other))
    return one + other


def covariances(factor: Factor, *, reduce: bool = False) -> Covariances | None:
    """Return sums of both sides; of the whole, [P, P] and [1, 1], if it has none.

    With `reduce` a sample has one position, the sum of its gradients and the mean of
    its inputs. None for so many numbers that the whole is not to be formed.
    """
    size = math.prod(factor.shape[1:])
    match _inner(factor):
        case Zero(like=like):
            zeros = like.new_zeros(factor.shape[1:], dtype=torch.float64)
            zeros = zeros.reshape(zeros.shape[:1].numel(), -1)
            return Covariances(zeros.sum(1), zeros.sum(0), 0)
        case Rows() as rows:  # whose lookups count, but for those without a gradient
            out = double(rows.outputs).unflatten(2, (factor.shape[0], -1)).flatten(0, 1)
            used = out.flatten(1).any(1).to(out.dtype)
            counts = out.new_zeros(rows.shape[0])
            counts.index_add_(0, rows.index.flatten(), used)
            out = out.flatten(0, 1)
            return Covariances(counts, out.mT @ out, float(used.sum()))
    if parts := [_of_sides(*sides, reduce) for sides in _sides(factor)]:
        return functools.reduce(Covariances.plus, parts)
    if size > _WHOLE:
        return None
    g = double(factor.grad()).reshape(-1, size)
    return Covariances(g.mT @ g, g.new_full((1, 1), factor.size), factor.size)


def _of_sides(b: Tensor, a: Tensor, reduce: bool) -> Covariances:
    b, a = double(b), double(a)
    if reduce:
        b, a = b.sum(1, keepdim=True), a.mean(1, keepdim=True)
    positions = math.prod(a.shape[:2])
    b, a = b.flatten(0, 2), a.flatten(0, 2)
    return Covariances(b.mT @ b, a.mT @ a, positions)


def squares(
    factor: Factor, left: Tensor | None = None, right: Tensor | None = None
) -> Tensor:
    """Sum squares of `left^T G right` over samples and columns. -> [O, I] in float64"""
    total: Any = 0.0
    for part in _rotated(factor, left, right):
        if isinstance(part, tuple):
            b, a = (double(side).square().sum(1) for side in part)
            total = total + b.mT @ a
        else:
            total = total + double(part).square().sum((0, 1))
    return total


def inner_products(
    factor: Factor, left: Tensor | None, right: Tensor | None, weights: Tensor
) -> Tensor:
    """Inner products of `R = left^T G right` between the columns of a sample.

    `sum_oi R_koi R_loi weights_oi`. -> [B, K, K] in float64
    """
    parts = []
    for part in _rotated(factor, left, right):
        if isinstance(part, tuple):
            # One side is the same for all columns, and is summed over first.
            (b, a), w = map(double, part), weights
            if b.shape[1] < a.shape[1]:
                b, a, w = a, b, w.mT
            rows, scales = b, a.square() @ w.mT
        else:
            rows, scales = double(part).flatten(2), weights.flatten()
        parts.append((rows * scales) @ rows.mT)
    return torch.cat(parts)


def _rotated(
    factor: Factor, left: Tensor | None, right: Tensor | None
) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    """Yield `left^T G right` of some samples after the other, [B, K, O, I].

    Of samples with one position they are two sides, [B, K, O] and [B, K, I], one of
    them with 1 for K. The dtype is the gradients', whose rounding is no smaller.
    """
    k, o, i = factor.shape[0], factor.shape[1:2].numel(), factor.shape[2:].numel()
    # Either both sides of each position are rotated, or the gradients are.
    cost = 0 if left is None or right is None else k * o**2 + i**2
    outputs = _outputs(factor)
    positions = 0 if outputs is None else outputs.shape[1]
    by_sides = positions == 1 or 0 < positions * cost < k * o * i * (o + i)
    if left is not None and len(left) != o:  # of the whole
        o, i, by_sides = len(left), 1, False

    def rotated(matrix: Tensor, columns: Tensor | None) -> Tensor:
        return matrix if columns is None else matrix @ columns.to(matrix.dtype)

    for part in factor.in_cache():
        for b, a in (sides := [*_sides(part)] if by_sides else []):
            b, a = rotated(b, left), rotated(a, right)
            if positions == 1:
                yield b[:, 0], a[:, 0]
            else:
                grads = b.flatten(2).mT @ a.flatten(2)
                grads = grads.unflatten(1, b.shape[2:]).unflatten(3, a.shape[2:])
                yield grads.transpose(2, 3).flatten(1, 2)
        if not sides:
            grads = widened(part.grad()).reshape(-1, k, o, i)
            yield rotated(rotated(grads, right).mT, left).mT


def _inner(factor: Factor) -> Factor:
    if isinstance(factor, Appended):
        factor = factor.weight
    return factor.factor if isinstance(factor, Columns) else factor


def _outputs(factor: Factor) -> Tensor | None:
    """Return one side of a product of two, [B, T, numbers]."""
    match _inner(factor):
        case Outer(outputs=outputs) if outputs.shape[1] == 1:
            return outputs[:, 0]
        case Conv(outputs=outputs, groups=1):
            return outputs.flatten(2).mT
    return None


def _sides(factor: Factor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both sides of some samples after the other, where a factor is a matrix.

    -> [B, T, K, O] and [B, T, K, I] in float32 or wider, one of them with 1 for K.
    """
    if isinstance(factor, Appended):
        for b, a in _sides(factor.weight) if factor.is_shared else ():
            yield b, F.pad(a, (0, 1), value=1.0)
        return
    (k, *_), o, i = factor.shape, factor.shape[1:2].numel(), factor.shape[2:].numel()
    inner = _inner(factor)
    outers = inner.outers() if isinstance(inner, Conv) else (inner,)
    before = factor.before if isinstance(factor, Columns) else 1
    for outer in outers:
        if not isinstance(outer, Outer) or outer.inputs.shape[1] != 1:
            return
        b, a = widened(outer.outputs[:, 0]), widened(outer.inputs[:, 0])
        sizes = b.shape[2], a.shape[2], before
        if sizes == (k * o, i, 1):
            yield b.unflatten(2, (k, o)), a.unsqueeze(2)
        elif sizes == (o, k * i, o):
            yield b.unsqueeze(2), a.unflatten(2, (k, i))

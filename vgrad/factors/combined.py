"""One factor for a parameter that was used several times, or through a function.

The squared norm of a sum is a double sum of inner products, so uses may not be taken
one by one: uses of one kind become one factor with more positions, tied embeddings have
a cross term, and all others are added up as gradients.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.conditions import static_values
from vgrad.factors.base import (
    Compound,
    Dense,
    Factor,
    Norm,
    Norms,
    Outer,
    Probes,
    Zero,
)
from vgrad.factors.norms import cancellation, computed
from vgrad.factors.rows import Rows
from vgrad.torch_private.tensors import viewed
from vgrad.tree import promoted, wide

Replay = Callable[[Tensor], Tensor]


def merged(factors: Sequence[Factor]) -> Factor:
    """Return one factor for the sum of several of one parameter."""
    if len(factors) > 1:
        factors = [part for part in factors if not isinstance(part, Zero)] or factors
    if len(factors) == 1 or isinstance(factors[0], Zero):
        return factors[0]
    outers = _joined_outers([part for part in factors if isinstance(part, Outer)])
    rows = _joined_rows([part for part in factors if isinstance(part, Rows)])
    others = [part for part in factors if not isinstance(part, Outer | Rows)]
    if len(outers) + len(rows) == 1 and not others:
        return (*outers, *rows)[0]
    if len(outers) == len(rows) == 1 and not others and outers[0].is_matrix:
        return Tied(outers[0], rows[0])
    grads = [part.grad() for part in (*outers, *rows, *others)]
    return Dense(torch.stack(grads).sum(0) if len(grads) > 2 else grads[0] + grads[1])


def _joined_outers(factors: Sequence[Outer]) -> list[Outer]:
    alike: dict[tuple, list[Outer]] = {}
    for outer in factors:
        sizes = (outer.inputs.shape[1], outer.inputs.shape[3], outer.outputs.shape[3])
        alike.setdefault(sizes, []).append(outer)
    for sizes, group in alike.items():
        if len(group) > 1:
            inputs = torch.cat([outer.inputs for outer in group], dim=2)
            outputs = torch.cat([outer.outputs for outer in group], dim=2)
            alike[sizes] = [Outer(inputs, outputs, group[0].shape)]
    return [outer for (outer,) in alike.values()]


def _joined_rows(factors: Sequence[Rows]) -> list[Rows]:
    if len(factors) < 2:
        return list(factors)
    index = torch.cat([rows.index for rows in factors], dim=1)
    outputs = torch.cat([rows.outputs for rows in factors], dim=1)
    return [Rows(index, outputs, factors[0].shape)]


@dataclass(frozen=True)
class Tied(Compound):
    """A table whose rows are looked up and that also multiplies, as a tied head."""

    outer: Outer
    rows: Rows

    @property
    def parts(self) -> tuple[Outer, Rows]:
        return self.outer, self.rows

    @property
    def shape(self) -> torch.Size:
        return self.outer.shape

    def grad(self) -> Tensor:
        return self.outer.grad() + self.rows.grad()

    def with_norms(self) -> tuple[Factor, Norms]:
        """Add the cross term `sum_ts outer_out_s[index_t] <row_t, in_s>` to squares."""
        if not self.outer.by_gram:
            return Dense(self.grad()).with_norms()
        parts = {"outer": self.outer.with_norms()[1], "rows": self.rows.with_norms()[1]}
        (outer,), (rows,) = computed(parts).values()
        rounded: Any = 0.0  # of the outer products: added as it is, whatever cancels
        if rounding := self.outer.rounding:
            terms = outer.value if outer.terms is None else outer.terms
            rounded = rounding * terms
            outer = outer._replace(upper=outer.upper - rounded)
        a, b = self.outer.inputs[:, 0].double(), self.outer.outputs[:, 0]
        index = self.rows.index[:, None, :].expand(-1, b.shape[1], -1)
        cross = torch.linalg.vecdot(
            b.gather(2, index).double().flatten(1),
            torch.bmm(a, self.rows.outputs.double().mT).flatten(1),
        )
        largest = (outer.upper + rows.upper).square()
        squares = outer.value.square() + 2 * cross + rows.value.square()
        uppers = outer.upper.square() + 2 * cross + rows.upper.square()
        uppers = uppers + 4 * torch.finfo(torch.float64).eps * largest
        norms, uppers = (square.clamp(min=0).sqrt() for square in (squares, uppers))
        uppers = uppers + rounded
        eps = torch.finfo(wide(self.outer.inputs.dtype)).eps
        lost = outer.upper - outer.value + rows.upper - rows.value
        lost = lost + eps * largest.sqrt() + rounded
        # Nothing is less than zero, of which both norms are sure.
        ratio = cancellation(largest.sqrt(), norms).masked_fill(largest == 0, 0.0)
        if outer.cancellation is not None:
            ratio = ratio + outer.cancellation
        operands = *outer.operands, *rows.operands
        return self, [Norm(norms, operands, uppers, ratio, lost, 1.0, self)]

    def zeros(self) -> Tensor:
        """Mark samples with nothing but zeros in one of the tensors of the product."""
        return self.outer.zeros()

    def weighted(self, weights: Tensor) -> Tensor:
        """Add the rows to the other sum, which is as large as the table."""
        return self.rows.add_weighted(weights, self.outer.weighted(weights))

    def gram(self, other: Factor) -> Tensor:
        other = Dense(other.grad())
        return self.outer.gram(other) + self.rows.gram(other)

    def project(self, probes: Probes) -> Tensor:
        return self.outer.project(probes) + self.rows.project(probes)

    def times(self, scales: Sequence[Tensor]) -> Factor:
        return self._of(*(part.times(scales) for part in self.parts))

    def _of(self, *parts: Any) -> Factor:
        return Tied(*parts)


@dataclass(frozen=True)
class Moved(Compound):
    """Gradients of parts or views of a parameter, each with the way to it.

    The ways only move numbers, no two of them the same one, so squares of norms add up.
    """

    parts: tuple[Factor, ...]
    replays: tuple[Replay, ...]
    shape: torch.Size

    def grad(self) -> Tensor:
        return self._moved([part.grad() for part in self.parts])

    def with_norms(self) -> tuple[Factor, Norms]:
        parts, norms = zip(*(part.with_norms() for part in self.parts), strict=True)
        return self._of(*parts), list(itertools.chain(*norms))

    def weighted(self, weights: Tensor) -> Tensor:
        return self._moved([part.weighted(weights)[None] for part in self.parts])[0]

    def _of(self, *parts: Any) -> Factor:
        return Moved(parts, self.replays, self.shape)

    def _moved(self, parts: Sequence[Tensor]) -> Tensor:
        """Add the parts `[B, ...]` to where in the parameter they belong."""
        dtype = functools.reduce(promoted, (part.dtype for part in parts))
        grads = parts[0].new_zeros((len(parts[0]), *self.shape), dtype=dtype)
        for part, replay in zip(parts, self.replays, strict=True):
            if _spots(replay, self.shape) is None:
                grads = grads + pulled(part, replay, self.shape)
            else:
                torch.vmap(replay)(grads).add_(part)
        return grads


def pulled(grads: Tensor, replay: Replay, shape: torch.Size) -> Tensor:
    """Take gradients [B, ...] of a view back to the parameter, [B, *shape]."""
    with torch.enable_grad():
        parameter = grads.new_zeros((len(grads), *shape)).requires_grad_()
        views = torch.vmap(replay)(parameter)
        return torch.autograd.grad(views, parameter, grads)[0]


def disjoint(replays: Sequence[Replay], like: Tensor) -> bool:
    """Return whether no number of a parameter is in two of its views."""
    with static_values():  # at no value of the parameter
        spots = [_spots(replay, like.shape) for replay in replays]
        if None not in spots:
            return _apart(like.numel(), tuple(filter(None, spots)))
        counts = torch.zeros(like.shape, device=like.device)
        for replay in replays:
            count = counts.new_ones(replay(counts).shape)[None]
            counts = counts + pulled(count, replay, like.shape)[0]
        return bool((counts <= 1).all())


class _Spots(NamedTuple):
    """Where in a contiguous tensor the numbers of a view are."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def _spots(replay: Replay, shape: torch.Size) -> _Spots | None:
    """Return where the numbers are that a function takes; None if it copies them."""
    parameter = torch.empty(shape, device="meta")
    view = replay(parameter)
    if view is not parameter and viewed(view) is not parameter:
        return None
    return _Spots(tuple(view.shape), view.stride(), int(view.storage_offset()))


@functools.cache
def _apart(count: int, views: tuple[_Spots, ...]) -> bool:
    counts = torch.zeros(count, dtype=torch.uint8)
    for view in views:
        counts.as_strided(*view).add_(1)
    return not bool((counts > 1).any())

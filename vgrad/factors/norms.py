"""Norms of all parameters at once: range, cancellation and rounding, decided once.

B samples, G groups of a matrix product, T positions.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.conditions import rare
from vgrad.factors.base import Dense, Factor, Norm, Norms, Products, multiplied
from vgrad.factors.reductions import reach, root, row_norms, weighted_rows
from vgrad.torch_private import kernels

FORMED_AT_ONCE = 2**24
"""Numbers of gradients formed at once where products cannot be trusted."""

SURE = 1e15
"""Doubt up to which a norm is taken as it is.

No square that matters has left float32's range for numbers of this size.
"""

_CANCELLED = 1e13
"""The doubt of a norm from products as large as all of its terms.

So a norm below a hundredth of them, which is mostly rounding, is computed again.
"""

_APART = 1e8
"""Size up to which float32 holds the product of four numbers."""


def settled(norms: Mapping[str, Norms]) -> dict[str, list[Norm]]:
    """Take norms from all products of positions, all products of one shape at once."""
    alike: dict[tuple, list[Products]] = {}
    taken: dict[int, Any] = {}
    for each in itertools.chain(*norms.values()):
        if isinstance(each, Dense):
            taken[id(each)] = each.norm()
        elif isinstance(each, Products):
            some = each.pair or (each.sizes,)
            key = len(some), some[0].shape, some[0].dtype, each.cut, each.rounding
            alike.setdefault(key, []).append(each)
    for some in alike.values():
        taken |= zip(map(id, some), _from_products(some), strict=True)
    found = {}
    for name, parts in norms.items():
        found[name] = [*map(taken.get, map(id, parts), parts)]
    return found


class Gathered(NamedTuple):
    """Small gradients of some parameters side by side, `g [B, P]`."""

    shapes: dict[str, torch.Size]
    g: Tensor

    def weighted(self, weights: Tensor) -> dict[str, Tensor]:
        """Sum over samples with weights [B], for every parameter."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        whole = weighted_rows(self.g, weights)
        parts = kernels.split_copy(whole, sizes)
        pairs = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in pairs}


def gathered(
    factors: dict[str, Any],
    norms: dict[str, Norms],
    groups: Iterable[Sequence[str]],
) -> list[Gathered]:
    """Bring the small gradients of a group together, and take one norm of them all."""
    found = []
    for names in groups:
        small: dict[torch.dtype, list[str]] = {}
        for name in names:
            factor = factors.get(name)
            if isinstance(factor, Dense) and factor.is_small:
                small.setdefault(factor.g.dtype, []).append(name)
        found += [
            _gathered(some, factors, norms) for some in small.values() if some[2:]
        ]
    return found


def _gathered(
    names: list[str], factors: dict[str, Any], norms: dict[str, Norms]
) -> Gathered:
    # Gradients whose norms are known already come last.
    names.sort(key=lambda name: not isinstance(norms[name][0], Dense))
    shapes = {name: factors[name].shape for name in names}
    sizes = [math.prod(shape) for shape in shapes.values()]
    rows = [factors[name].g for name in names]
    size = rows[0].shape[0]
    g = torch.cat([g.reshape(size, n) for g, n in zip(rows, sizes, strict=True)], 1)
    found, width = Gathered(shapes, g), 0
    for name, column in zip(names, g.split(sizes, 1), strict=True):
        factors[name] = Dense(column.view(size, *shapes[name]))
        if isinstance(norms[name][0], Dense):
            width, norms[name] = width + column.shape[1], []
    if width:
        norms[names[0]] = [Dense(g[:, :width]).norm()]
    return found


def _from_products(products: Sequence[Products]) -> Iterator[Norm]:
    if products[0].pair:
        a, b = map(torch.stack, zip(*(each.pair for each in products), strict=True))
        squares, sizes = multiplied(a, b)
    else:
        squares = torch.stack([each.squares for each in products])
        sizes = torch.stack([each.sizes for each in products], 1)
    squares, sizes, dtype = squares.double(), sizes.double(), sizes.dtype
    a, b = sizes  # [K, B, G, T]
    most = torch.linalg.vector_norm((a * b).sqrt_().sum(3), dim=2)
    number, positions = torch.finfo(dtype), max(1, a.shape[3])
    # Twice the worst that was measured, over kinds of inputs of all sizes and dtypes;
    # where positions or features are equal, so are their errors: none averages out.
    length = max(each.length for each in products)
    worst = max(4.0, 20 / positions, min(32.0, length / 12))
    slack = number.eps * worst + products[0].cut
    sizes, values = sizes.sum((0, 3, 4)), squares.sqrt()
    # A square that may include products on the edge of zero is not used:
    # where denormal numbers are flushed, all of a sum may be gone.
    edge = number.tiny * length * positions / number.eps
    doubts = torch.addcdiv(most, sizes, squares, value=SURE * edge)
    doubts = torch.addcdiv(doubts, most, values, value=_CANCELLED)
    uppers = torch.addcmul(squares, most, most, value=slack).sqrt_()
    eps = number.eps * max(1.0, positions / 16)
    if rounding := products[0].rounding:
        eps, uppers = rounding, uppers.add_(most, alpha=rounding)
    columns = values, sizes.sqrt_(), uppers, doubts, most
    rows = zip(products, *map(torch.unbind, columns), strict=True)
    for each, value, size, upper, doubt, own in rows:
        others = doubt, own, eps, each.factor, each.scale
        yield Norm(value, (size,), upper, *others)


def cancelled(most: Tensor, norms: Tensor) -> Tensor:
    """Return the doubt of norms of sums whose terms are as large as `most`."""
    return _CANCELLED * most / norms


def doubtful(norms: Mapping[str, Sequence[Norm]]) -> Tensor | None:
    """Mark doubtful norms, [N, B]; None where all are sure."""
    parts = itertools.chain(*norms.values())
    doubts = [norm.doubt for norm in parts if norm.doubt is not None]
    return ~(torch.stack(doubts) <= SURE) if doubts else None


def recomputed(norms: Mapping[str, Sequence[Norm]]) -> dict[str, list[Norm]]:
    """Compute doubtful norms from gradients in float64."""
    return {name: list(map(_recomputed, parts)) for name, parts in norms.items()}


def _recomputed(norm: Norm) -> Norm:
    value, upper, factor, most = norm.value, norm.upper, norm.factor, norm.most
    if norm.doubt is None or most is None:
        return norm
    lost = most * norm.eps
    rows = ~(norm.doubt <= SURE) & ~((upper == 0) & factor.zeros())
    rows = rows.nonzero().flatten()
    value, upper = value.clone(), upper.clone()
    step = 1  # the first one shows how many gradients are not too many
    while len(rows):
        some, rows = rows[:step], rows[step:]
        grads = factor.take(some).double().grad()
        step = max(1, FORMED_AT_ONCE * len(some) // max(1, grads.numel()))
        value[some] = exact = row_norms(grads)
        upper[some] = exact + lost[some]
    return norm._replace(value=value, upper=upper, doubt=None)


class Joint:
    """Norms of P groups of parameters of a dtype, [P, B], stacked once for all uses.

    They are wrong where one of `norms` is doubtful.
    """

    def __init__(
        self,
        norms: Mapping[str, Sequence[Norm]],
        groups: Iterable[Sequence[str]],
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        parts, self._lengths = [], []
        for names in groups:
            some = [*itertools.chain(*map(norms.__getitem__, names))]
            parts += some
            self._lengths.append(len(some))
        values, self._reaches, uppers, doubts, *_, scales = zip(*parts, strict=True)
        self._scale = scales[0]  # all factors of a call have the same
        self._exact = all(map(operator.is_, values, uppers))
        rows = self._filled(values)
        self._count, known = len(rows), {*map(id, rows)}
        if not self._exact:
            rows = rows + self._filled(uppers)
        rest = (*itertools.chain(*self._reaches), *doubts)
        rest = [each for each in rest if each is not None and id(each) not in known]
        self._rows = torch.stack([*rows, *rest])

    @cached_property
    def value(self) -> Tensor:
        """The norms."""
        return self._root(self._rows[: self._count])

    @property
    def upper(self) -> Tensor:
        """Bounds of the norms, despite rounding."""
        count = self._count
        return self.value if self._exact else self._root(self._rows[count : 2 * count])

    @property
    def total(self) -> Tensor:
        """Norms over all groups, [B]."""
        return root(self.value, 0, self._dtype)

    @property
    def most(self) -> Tensor:
        """The largest of all norms, numbers that are multiplied, and doubts; or NaN."""
        return self._multiplied(self._rows.amax())

    @property
    def reach(self) -> Tensor:
        """No less than any number that is multiplied for a sum, [P, B]."""
        sizes = [torch.stack(each).amax(0) for each in self._reaches]
        rows = torch.stack(self._filled(sizes)).unflatten(0, (len(self._lengths), -1))
        return self._multiplied(rows.amax(1))

    def _multiplied(self, reach: Tensor) -> Tensor:
        # One over the scale is multiplied as well, by the sum and by its error.
        scale = self._scale
        return reach if scale is None else reach.maximum(reach.clamp(min=1) / scale)

    def _root(self, rows: Tensor) -> Tensor:
        grouped = rows.unflatten(0, (len(self._lengths), -1))
        norms = root(grouped, 1, self._dtype)
        return norms if self._scale is None else norms / self._scale

    def _filled(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Add zeros where a group has fewer vectors [B] than others."""
        longest = max(self._lengths)
        if longest * len(self._lengths) == len(vectors):
            return [*vectors]
        zero, rest, filled = torch.zeros_like(vectors[0]), iter(vectors), []
        for length in self._lengths:
            filled += [*itertools.islice(rest, length), *[zero] * (longest - length)]
        return filled


def far(factors: Mapping[str, Sequence[Factor]]) -> set[str]:
    """Return the parameters whose inner products may leave the range of float32."""
    sided = {name: [x for x in some if x.sides] for name, some in factors.items()}
    masks = {
        name: torch.cat([reach(each.sides) for each in some]) > _APART
        for name, some in sided.items()
        if some
    }
    if not masks or not rare(torch.cat([*masks.values()])):
        return set()
    return {name for name, mask in masks.items() if bool(mask.any())}

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

from vgrad.devices import is_host
from vgrad.factors.base import Dense, Norm, Norms, Products, multiplied
from vgrad.factors.reductions import root, row_norms, weighted_rows
from vgrad.torch_private import kernels

FORMED_AT_ONCE = 2**24
"""Numbers of gradients formed at once where products cannot be trusted."""

LIMIT = 1e15
"""The largest number of a sample that counts in a clipped sum.

Products of two such numbers, and their squares' sums, are far from the ends of float32.
"""

_CANCELLATION = 1e13
"""The `cancellation` of a norm that is as large as all of its terms.

So a norm below a hundredth of them, which is mostly rounding, is above `LIMIT`.
"""


def computed(norms: Mapping[str, Norms]) -> dict[str, list[Norm]]:
    """Take norms from all products of positions, all products of one shape at once."""
    alike: dict[tuple, list[Products]] = {}
    by_id: dict[int, Any] = {}
    for part in itertools.chain(*norms.values()):
        if isinstance(part, Dense):
            by_id[id(part)] = part.norm()
        elif isinstance(part, Products):
            tensors = part.pair or (part.sizes,)
            shape, dtype = tensors[0].shape, tensors[0].dtype
            key = len(tensors), shape, dtype, part.cut, part.rounding
            alike.setdefault(key, []).append(part)
    for group in alike.values():
        by_id |= zip(map(id, group), _from_products(group), strict=True)
    return {
        name: [*map(by_id.get, map(id, parts), parts)] for name, parts in norms.items()
    }


class Gathered(NamedTuple):
    """Small gradients of some parameters side by side, `g [B, P]`."""

    shapes: dict[str, torch.Size]
    g: Tensor

    def weighted(self, weights: Tensor) -> dict[str, Tensor]:
        """Sum over samples with weights [B], for every parameter."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        sums = weighted_rows(self.g, weights)
        parts = kernels.split_copy(sums, sizes)
        pairs = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in pairs}


def gathered(
    factors: dict[str, Any],
    norms: dict[str, Norms],
    groups: Iterable[Sequence[str]],
) -> list[Gathered]:
    """Bring the small gradients of a group together, and take one norm of them all."""
    joined = []
    for names in groups:
        small: dict[torch.dtype, list[str]] = {}
        for name in names:
            factor = factors.get(name)
            if type(factor) is Dense and factor.is_small:
                known = type(norms[name][0]) is Norm
                if not (
                    known and is_host(factor.g.device)
                ):  # where sums alone cost less
                    small.setdefault(factor.g.dtype, []).append(name)
        joined += [
            _gathered(alike, factors, norms) for alike in small.values() if alike[2:]
        ]
    return joined


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
    joined, width = Gathered(shapes, g), 0
    for name, column in zip(names, g.split(sizes, 1), strict=True):
        factors[name] = Dense(column.view(size, *shapes[name]))
        if isinstance(norms[name][0], Dense):
            width, norms[name] = width + column.shape[1], []
    if width:
        norms[names[0]] = [Dense(g[:, :width]).norm()]
    return joined


def _from_products(products: Sequence[Products]) -> Iterator[Norm]:
    if products[0].pair:
        a, b = map(torch.stack, zip(*(part.pair for part in products), strict=True))
        squares, sizes = multiplied(a, b)
    else:
        squares = torch.stack([part.squares for part in products])
        sizes = torch.stack([part.sizes for part in products], 1)
    squares, sizes, dtype = squares.double(), sizes.double(), sizes.dtype
    a, b = sizes  # [K, B, G, T]
    term_sums = torch.linalg.vector_norm((a * b).sqrt_().sum(3), dim=2)
    number, positions = torch.finfo(dtype), max(1, a.shape[3])
    # Twice the worst that was measured, over kinds of inputs of all sizes and dtypes;
    # where positions or features are equal, so are their errors: none averages out.
    length = max(part.length for part in products)
    worst = max(4.0, 20 / positions, min(32.0, length / 12))
    slack = number.eps * worst + products[0].cut
    sizes, values = sizes.sum((0, 3, 4)), squares.sqrt()
    # A square that may include products on the edge of zero is not used:
    # where denormal numbers are flushed, all of a sum may be gone.
    edge = number.tiny * length * positions / number.eps
    cancellations = torch.addcdiv(term_sums, sizes, squares, value=LIMIT * edge)
    cancellations = torch.addcdiv(cancellations, term_sums, values, value=_CANCELLATION)
    uppers = torch.addcmul(squares, term_sums, term_sums, value=slack).sqrt_()
    eps = number.eps * max(1.0, positions / 16)
    if rounding := products[0].rounding:
        eps, uppers = rounding, uppers.add_(term_sums, alpha=rounding)
    columns = values, sizes.sqrt_(), uppers, cancellations, term_sums
    rows = zip(products, *map(torch.unbind, columns), strict=True)
    for part, value, size, upper, cancellation, term_sum in rows:
        others = cancellation, term_sum, eps, part.factor, part.scale
        yield Norm(value, (size,), upper, *others)


def cancellation(term_sums: Tensor, norms: Tensor) -> Tensor:
    """Return the `cancellation` of norms of sums whose terms have these sizes."""
    return _CANCELLATION * term_sums / norms


def recomputed(norms: Mapping[str, Sequence[Norm]]) -> dict[str, list[Norm]]:
    """Compute norms that may have cancelled from gradients in float64."""
    return {name: list(map(_recomputed, parts)) for name, parts in norms.items()}


def _recomputed(norm: Norm) -> Norm:
    value, upper, factor = norm.value, norm.upper, norm.factor
    if norm.cancellation is None or norm.terms is None:
        return norm
    lost = norm.terms * norm.eps
    rows = ~(norm.cancellation <= LIMIT) & ~((upper == 0) & factor.zeros())
    rows = rows.nonzero().flatten()
    value, upper = value.clone(), upper.clone()
    step = 1  # the first one shows how many gradients are not too many
    while len(rows):
        chunk, rows = rows[:step], rows[step:]
        grads = factor.select(chunk).double().grad()
        step = max(1, FORMED_AT_ONCE * len(chunk) // max(1, grads.numel()))
        value[chunk] = exact = row_norms(grads)
        upper[chunk] = exact + lost[chunk]
    return norm._replace(value=value, upper=upper, cancellation=None)


class Joint:
    """Norms of P groups of parameters of a dtype, [P, B], stacked once for all uses.

    They are wrong where one of `norms` may have cancelled.
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
            group = [*itertools.chain(*map(norms.__getitem__, names))]
            parts += group
            self._lengths.append(len(group))
        columns = zip(*parts, strict=True)
        values, operands, uppers, cancellations, *_, scales = columns
        self._scale = scales[0]  # all factors of a call have the same
        self._exact = all(map(operator.is_, values, uppers))
        rows = self._filled(values)
        self._count, stacked = len(rows), {*map(id, rows)}
        if not self._exact:
            rows = rows + self._filled(uppers)
        rest = (*itertools.chain(*operands), *cancellations)
        rest = [row for row in rest if row is not None and id(row) not in stacked]
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

    def largest(self, axis: int | tuple[int, ...] = ()) -> Tensor:
        """Return the largest of all norms, operands and cancellations; [B] for axis 0.

        It is NaN where one of them is.
        """
        sizes, scale = self._rows.amax(axis), self._scale
        # One over the scale is multiplied as well, by the sum and by its error.
        return sizes if scale is None else sizes.maximum(sizes.clamp(min=1) / scale)

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

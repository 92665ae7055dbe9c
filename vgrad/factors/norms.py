"""Norms of all parameters at once: range, cancellation and rounding, decided once.

B samples, G groups of a matrix product, T positions.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vgrad.conditions import rare
from vgrad.factors.base import Factor, Norm, Norms, Products
from vgrad.factors.reductions import reach, root, row_norms

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
    for each in itertools.chain(*norms.values()):
        if isinstance(each, Products):
            kind = each.sizes.shape, each.sizes.dtype, each.cut, each.rounding
            alike.setdefault(kind, []).append(each)
    taken: dict[int, Any] = {}
    for some in alike.values():
        taken |= zip(map(id, some), _from_products(some), strict=True)
    found = {}
    for name, parts in norms.items():
        found[name] = [*map(taken.get, map(id, parts), parts)]
    return found


def _from_products(products: Sequence[Products]) -> Iterator[Norm]:
    squares = torch.stack([each.squares for each in products]).double()
    sizes = torch.stack([each.sizes for each in products]).double()
    a, b = sizes.unbind(1)  # [K, B, G, T]
    most = torch.linalg.vector_norm((a * b).sqrt_().sum(3), dim=2)
    number, positions = torch.finfo(products[0].sizes.dtype), max(1, a.shape[3])
    # Twice the worst that was measured, over kinds of inputs of all sizes and dtypes;
    # where positions are equal, so are their errors, and do not average out.
    slack = number.eps * max(4.0, 20 / positions) + products[0].cut
    sizes, values = sizes.sum((1, 3, 4)), squares.sqrt()
    # A square that may include products on the edge of zero is not used:
    # where denormal numbers are flushed, all of a sum may be gone.
    length = max(each.length for each in products)
    edge = number.tiny * length * positions / number.eps
    doubts = torch.addcdiv(most, sizes, squares, value=SURE * edge)
    doubts = torch.addcdiv(doubts, most, values, value=_CANCELLED)
    if zeros := [each.zero for each in products if each.zero is not None]:
        doubts = doubts.masked_fill(torch.stack(zeros) & (most == 0), 0.0)
    uppers = torch.addcmul(squares, most, most, value=slack).sqrt_()
    eps = number.eps
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
    """Compute doubtful norms from gradients in float64, which no size leaves."""
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
        # If it is not finite, gradients will be summed in float64.
        upper[some] = exact + torch.where(lost[some].isfinite(), lost[some], 0)
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
        found = [[*itertools.chain(*map(norms.__getitem__, own))] for own in groups]
        parts = [*itertools.chain(*found)]
        self._scale = parts[0].scale  # all factors of a call have the same
        self._reach = [[size for one in own for size in one.reach] for own in found]
        self._exact = all(one.value is one.upper for one in parts)
        rows = values = _filled([[one.value for one in own] for own in found])
        if not self._exact:
            rows = values + _filled([[one.upper for one in own] for own in found])
        known, self._count, self._groups = set(map(id, values)), len(values), len(found)
        rest = [*itertools.chain(*self._reach), *(one.doubt for one in parts)]
        rest = [each for each in rest if each is not None and id(each) not in known]
        self._rows = torch.stack([*rows, *rest])

    @cached_property
    def value(self) -> Tensor:
        """The norms."""
        return self._root(self._rows[: self._count])

    @cached_property
    def upper(self) -> Tensor:
        """Bounds of the norms, despite rounding."""
        count = self._count
        return self.value if self._exact else self._root(self._rows[count : 2 * count])

    @cached_property
    def total(self) -> Tensor:
        """Norms over all groups, [B]."""
        return root(self.value, 0, self._dtype)

    @cached_property
    def most(self) -> Tensor:
        """The largest of all norms, numbers that are multiplied, and doubts; or NaN."""
        return self._multiplied(self._rows.amax())

    @cached_property
    def reach(self) -> Tensor:
        """No less than any number that is multiplied for a sum, [P, B]."""
        sizes = torch.stack(_filled(self._reach))
        return self._multiplied(sizes.unflatten(0, (self._groups, -1)).amax(1))

    def _multiplied(self, reach: Tensor) -> Tensor:
        # One over the scale is multiplied as well, by the sum and by its error.
        scale = self._scale
        return reach if scale is None else reach.maximum(reach.clamp(min=1) / scale)

    def _root(self, rows: Tensor) -> Tensor:
        norms = root(rows.unflatten(0, (self._groups, -1)), 1, self._dtype)
        return norms if self._scale is None else norms / self._scale


def _filled(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """List the vectors [B] of all groups, and zeros where a group has fewer."""
    longest = max(map(len, groups))
    if all(len(group) == longest for group in groups):
        return [*itertools.chain(*groups)]
    zero = torch.zeros_like(groups[0][0])
    filled = ([*group, *[zero] * (longest - len(group))] for group in groups)
    return [*itertools.chain(*filled)]


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

"""Norms of all parameters at once: range, cancellation and rounding, decided once.

B samples, G groups of a matrix product, T positions.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vgrad.conditions import rare
from vgrad.factors.base import Factor, Norm, Norms, Products
from vgrad.factors.reductions import HIGH, LOW, reach, row_norms, together

FORMED_AT_ONCE = 2**24
"""Numbers of gradients formed at once where products cannot be trusted."""

_DOUBTFUL = 1e-4
"""Cancellation below which a norm from products is computed again, from gradients."""

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
    largest = (a * b).sqrt_().sum(3).square_().sum(2)
    number, positions = torch.finfo(products[0].sizes.dtype), max(1, a.shape[3])
    # Twice the worst that was measured, over kinds of inputs of all sizes and dtypes;
    # where positions are equal, so are their errors, and do not average out.
    slack = (number.eps * max(4.0, 20 / positions) + products[0].cut) * largest
    # A square that may include products on the edge of zero is not used:
    # where denormal numbers are flushed, all of a sum may be gone.
    sizes, length = (a + b).sum((2, 3)), max(each.length for each in products)
    edge = number.tiny * length * positions * sizes
    squares = torch.where(edge < number.eps * squares, squares, 0.0)
    doubtful = in_doubt(squares, largest)
    if zeros := [each.zero for each in products if each.zero is not None]:
        doubtful &= ~(torch.stack(zeros) & (largest == 0))
    uppers, lost = (squares + slack).sqrt(), number.eps * largest.sqrt()
    if rounding := products[0].rounding:
        lost = rounding * largest.sqrt()
        uppers = uppers + lost
    columns = squares.sqrt(), sizes.sqrt(), uppers, doubtful, lost
    rows = zip(products, *map(torch.unbind, columns), strict=True)
    for each, value, size, upper, doubtful, lost in rows:
        others = doubtful, lost, each.factor, each.scale
        yield Norm(value, (size,), upper, *others)


def in_doubt(squares: Tensor, largest: Tensor) -> Tensor:
    """Mark squares that are mostly rounding, or of which terms have left the range."""
    fine = squares > _DOUBTFUL * largest
    return ~(fine & (largest > LOW**2) & (largest < HIGH**2))


def doubts(norms: Mapping[str, Sequence[Norm]]) -> list[Tensor]:
    """Return the masks [B] of doubtful samples."""
    parts = itertools.chain(*norms.values())
    return [norm.doubtful for norm in parts if norm.doubtful is not None]


def recomputed(norms: Mapping[str, Sequence[Norm]]) -> dict[str, list[Norm]]:
    """Compute doubtful norms from gradients in float64, which no size leaves."""
    return {name: list(map(_recomputed, parts)) for name, parts in norms.items()}


def _recomputed(norm: Norm) -> Norm:
    value, _, upper, doubtful, lost, factor, _ = norm
    if doubtful is None or lost is None:
        return norm
    rows = (doubtful & ~((upper == 0) & factor.zeros())).nonzero().flatten()
    value, upper = value.clone(), upper.clone()
    step = 1  # the first one shows how many gradients are not too many
    while len(rows):
        some, rows = rows[:step], rows[step:]
        grads = factor.take(some).double().grad()
        step = max(1, FORMED_AT_ONCE * len(some) // max(1, grads.numel()))
        value[some] = exact = row_norms(grads)
        # If it is not finite, gradients will be summed in float64.
        upper[some] = exact + torch.where(lost[some].isfinite(), lost[some], 0)
    return norm._replace(value=value, upper=upper, doubtful=None)


def joint(
    norms: Mapping[str, Sequence[Norm]], groups: Iterable[Sequence[str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `value`, `reach` and `upper` of P groups of parameters, [B, P] each."""
    values, reaches, uppers, scales = [], [], [], [None]
    for names in groups:
        parts = itertools.chain(*map(norms.__getitem__, names))
        value, sizes, upper, *_, scales = zip(*parts, strict=True)
        values.append(value)
        reaches.append([*itertools.chain(*sizes)])
        uppers.append(upper)
    value, most = together(_stacked(values)), _stacked(reaches).amax(2)
    exact = all(map(operator.is_, itertools.chain(*values), itertools.chain(*uppers)))
    upper = value if exact else together(_stacked(uppers))
    if (scale := scales[0]) is not None:  # all factors of a call have the same
        # One over the scale is multiplied as well, by the sum and by its error.
        most = torch.maximum(most, most.clamp(min=1) / scale)
        value, upper = value / scale, upper / scale
    return value, most, upper


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


def _stacked(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack vectors [B] of P groups, to which zeros are added, to [B, P, most]."""
    even = len(set(map(len, groups))) == 1
    zero = None if even else torch.zeros_like(groups[0][0])
    filled = zip(*itertools.zip_longest(*groups, fillvalue=zero), strict=True)
    return torch.stack([*itertools.chain(*filled)], 1).unflatten(1, (len(groups), -1))

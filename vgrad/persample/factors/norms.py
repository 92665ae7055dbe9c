"""Norms of all parameters at once: range, cancellation and rounding, decided once.

B samples, P groups of parameters with joint norms. Factors leave raw numbers, [B] each.
They are stacked here, and a single mask says which samples are to be computed again.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from vgrad.persample.factors.base import Doubt, Norm, Norms, Products
from vgrad.persample.factors.reductions import HIGH, LOW, row_norms, together

_AT_ONCE = 2**24
"""Numbers of gradients formed at once where norms from products are in doubt."""

_DOUBTFUL = 1e-4
"""Cancellation below which a norm from products is computed again, from gradients."""


def settled(norms: Mapping[str, Norms]) -> dict[str, list[Norm]]:
    """Take norms from all products of positions, those of one shape at once."""
    alike: dict[tuple, list[Products]] = {}
    for each in itertools.chain(*norms.values()):
        if isinstance(each, Products):
            alike.setdefault((each.sizes.shape, each.sizes.dtype), []).append(each)
    taken = {
        id(products): norm
        for some in alike.values()
        for products, norm in zip(some, _from_products(some), strict=True)
    }
    return {
        name: [each if isinstance(each, Norm) else taken[id(each)] for each in parts]
        for name, parts in norms.items()
    }


def _from_products(products: Sequence[Products]) -> Iterator[Norm]:
    """Take roots of squares, whose rounding is large where their terms cancel."""
    squares = torch.stack([each.squares for each in products]).double()
    sizes = torch.stack([each.sizes for each in products]).double()
    a, b = sizes.unbind(1)  # [K, B, G, T]
    largest = (a * b).sqrt_().sum(3).square_().sum(2)
    number = torch.finfo(products[0].sizes.dtype)
    positions = max(1, a.shape[3])
    # Twice the worst that was measured, over kinds of inputs of all sizes and dtypes;
    # where positions are equal, so are their errors, and do not average out.
    slack = number.eps * max(4.0, 20 / positions) * largest
    sizes = (a + b).sum((2, 3))
    # A square that may include products on the edge of zero is not used:
    # where denormal numbers are flushed, all of a sum may be gone.
    length = max(each.length for each in products)
    edge = number.tiny * length * positions * sizes
    squares = torch.where(edge < number.eps * squares, squares, 0.0)
    doubtful, blank = in_doubt(squares, largest), largest == 0
    if zeros := [each.zero for each in products if each.zero is not None]:
        doubtful &= ~(blank & torch.stack(zeros))
    columns = (
        squares.sqrt(),
        (squares + slack).sqrt(),
        sizes.sqrt(),
        doubtful,
        blank,
        number.eps * largest.sqrt(),
    )
    rows = zip(products, *(column.unbind() for column in columns), strict=True)
    for each, value, upper, reach, doubtful, blank, lost in rows:
        doubt = Doubt(doubtful, blank, lost)
        yield Norm(value, upper, (reach,), doubt, each.factor, each.scale)


def in_doubt(squares: Tensor, largest: Tensor) -> Tensor:
    """Mark squares that are mostly rounding, or of which terms have left the range.

    `largest` are the squares of the sums of the sizes of their terms.
    """
    fine = squares > _DOUBTFUL * largest
    return ~(fine & (largest > LOW**2) & (largest < HIGH**2))


def doubts(norms: Mapping[str, Sequence[Norm]]) -> list[Tensor]:
    """Return the masks [B] of doubtful samples."""
    parts = itertools.chain(*norms.values())
    return [each.doubt.where for each in parts if each.doubt is not None]


def recomputed(norms: Mapping[str, Sequence[Norm]]) -> dict[str, list[Norm]]:
    """Compute doubtful norms again."""
    return {name: list(map(_recomputed, parts)) for name, parts in norms.items()}


def _recomputed(norm: Norm) -> Norm:
    """Compute doubtful norms from gradients in float64, where nothing is out of range."""
    if norm.doubt is None:
        return norm
    (where, blank, lost), factor = norm.doubt, norm.factor
    rows = (where & ~(blank & factor.zeros())).nonzero().flatten()
    value, upper = norm.value.clone(), norm.upper.clone()
    step = 1  # the first one shows how many gradients are not too many
    while len(rows):
        some, rows = rows[:step], rows[step:]
        grads = factor.take(some).double().grad()
        step = max(1, _AT_ONCE * len(some) // max(1, grads.numel()))
        value[some] = exact = row_norms(grads)
        # If it is not finite, gradients will be summed in float64.
        upper[some] = exact + torch.where(lost[some].isfinite(), lost[some], 0)
    return norm._replace(value=value, upper=upper, doubt=None)


class Joint:
    """Joint norms of P groups of parameters, [B, P] each, made where they are used."""

    def __init__(
        self, norms: Mapping[str, Sequence[Norm]], groups: Iterable[Sequence[str]]
    ) -> None:
        self.groups = [[n for name in names for n in norms[name]] for names in groups]
        self.scale = self.groups[0][0].scale  # all factors of a call have the same

    @cached_property
    def value(self) -> Tensor:
        """The norms."""
        return self._scaled(
            _together([[n.value for n in each] for each in self.groups])
        )

    @cached_property
    def upper(self) -> Tensor:
        """Upper bounds of the norms, which hold despite rounding."""
        if all(norm.upper is norm.value for each in self.groups for norm in each):
            return self.value
        return self._scaled(
            _together([[n.upper for n in each] for each in self.groups])
        )

    @cached_property
    def reach(self) -> Tensor:
        """Bounds of all numbers that are multiplied for a weighted sum."""
        sizes = [[size for norm in each for size in norm.reach] for each in self.groups]
        reach = _stacked(sizes).amax(2)
        if self.scale is None:
            return reach
        # One over the scale is multiplied as well, by the sum and by its error.
        return torch.maximum(reach, reach.clamp(min=1) / self.scale)

    def _scaled(self, norms: Tensor) -> Tensor:
        return norms if self.scale is None else norms / self.scale


def _together(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    norms = _stacked(groups)
    return norms[..., 0] if norms.shape[2] == 1 else together(norms)


def _stacked(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack vectors [B] of P groups, to which zeros are added, to [B, P, most]."""
    most = max(map(len, groups))
    if all(len(each) == most for each in groups):
        columns = [column for each in groups for column in each]
    else:
        zero = torch.zeros_like(groups[0][0])
        filled = [[*each, *[zero] * (most - len(each))] for each in groups]
        columns = [column for each in filled for column in each]
    return torch.stack(columns, 1).unflatten(1, (len(groups), most))

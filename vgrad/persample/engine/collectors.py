"""What is done with the factor of a parameter as soon as it is known.

A collector is made for every chunk of samples; its `take` is called once for every
parameter, as early as the backward pass allows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vgrad.conditions import defer_checks, rare
from vgrad.persample.engine.sites import Use
from vgrad.persample.factors.base import Dense, Factor, Probes, Zero
from vgrad.persample.factors.reductions import Norm, ordinary, reach, total
from vgrad.torch_private import modes
from vgrad.tree import double
from vgrad.typing import Params

_AT_ONCE = 2**18
"""Numbers that are widened at once."""

_FORMED = 2**24
"""Numbers of gradients formed at once where a sum of products cannot be trusted."""

Summed = Callable[[str, Tensor], Tensor]
"""Takes the sum of a parameter as soon as it is formed, and returns what is kept."""


def whole(name: str, value: Tensor) -> Tensor:
    """Keep all of a sum."""
    return value


class Collector(Protocol):
    """What a strategy hands the factors to.

    Attributes:
        tell: optional callback, invoked once per use while a loss is recorded.
        look: optional, takes the factors of a recorded backward pass after which a
            second one hands all of them to `take`. `again` is called in between, and
            `once` at the end.
    """

    tell: Callable[[Use], None] | None = None
    look: Callable[[str, Factor], None] | None = None

    def take(self, name: str, factor: Factor) -> None:
        """Accept the factor of one parameter."""
        ...

    def again(self) -> None:
        """Learn that a second backward pass begins."""

    def once(self) -> "Collector | None":
        """Return a collector for one pass, if the two did not fit together."""


@dataclass
class Gradients(Collector):
    """Forms the gradients."""

    grads: Params = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        """Form the gradients of one parameter."""
        self.grads[name] = factor.grad()


@dataclass
class Norms(Collector):
    """Computes norms and keeps nothing else."""

    norms: dict[str, Norm] = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        """Compute the norms of one parameter."""
        self.norms[name] = factor.norm()


@dataclass
class Weighted(Collector):
    """Sums with weights that are known beforehand, one for each sample or more."""

    weights: Tensor
    mask: Tensor | None = None
    sums: Params = field(default_factory=dict)
    summed: Summed = whole

    def take(self, name: str, factor: Factor) -> None:
        """Sum the gradients of one parameter."""
        self.sums[name] = self.summed(name, self._sum(factor))

    def _sum(self, factor: Factor) -> Tensor:
        weights, counts = self.weights, self.mask
        if counts is not None:
            weights = torch.where(counts, weights, 0)
        if not factor.sides:
            counted = factor if counts is None else masked(factor, counts)
            return counted.weighted(weights)
        fine = ordinary(reach(factor.sides), weights)
        if not rare(~fine):
            return factor.weighted(weights)
        counts = torch.ones_like(fine) if counts is None else counts
        rows = (fine & counts).nonzero().flatten()
        parts = [factor.take(rows).weighted(weights[rows])]
        for rows in _slices(~fine & counts, factor.shape):
            parts.append(_gradients(factor, rows).weighted(weights[rows]))
        return total(parts)


@dataclass
class Factors(Collector):
    """Keeps the factors as they are."""

    factors: dict[str, Factor] = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        """Keep the factor of one parameter."""
        self.factors[name] = factor


@dataclass
class Projections(Collector):
    """Adds up inner products with random directions, [B, dim] in float64."""

    probes: Mapping[str, Probes]
    sums: Any = 0.0

    def take(self, name: str, factor: Factor) -> None:
        """Project the gradients of one parameter."""
        self.sums = self.sums + double(factor.project(self.probes[name]))


@dataclass
class Moments(Collector):
    """Means and sums of squared deviations over the samples, in float64."""

    count: Tensor | int
    mask: Tensor | None = None
    means: Params = field(default_factory=dict)
    squares: Params = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        """Form the gradients of one parameter and drop them.

        Two passes, since the difference of two large sums has no digits left where the
        deviations are small. Some columns at a time are wide, so that they stay in the
        processor's cache.
        """
        flat = factor.grad().reshape(factor.size, math.prod(factor.shape))
        means, squares = [], []
        size: Tensor | int = self.count
        if self.mask is not None:
            self.count = self.mask.sum(dtype=torch.float64)
            size = self.count.clamp(min=1)  # a chunk without samples adds zero
        for columns in flat.split(max(1, _AT_ONCE // factor.size), dim=1):
            wide = self._counted(double(columns))
            means.append(wide.sum(0) / size)
            rest = self._counted(wide - means[-1])
            squares.append((rest * rest.conj()).real.sum(0))
        self.means[name] = torch.cat(means).view(factor.shape)
        self.squares[name] = torch.cat(squares).view(factor.shape)

    def _counted(self, rows: Tensor) -> Tensor:
        """Put zeros in the place of samples that do not count."""
        return rows if self.mask is None else torch.where(self.mask[:, None], rows, 0)


@dataclass
class Settled(Collector):
    """Computes norms and keeps what a sum weighted by them will need.

    Norms of which some are in doubt are wrong there until `mend` is called: the doubts
    of all parameters are looked at together.
    """

    mask: Tensor | None = None
    factors: dict[str, Factor] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    _doubts: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def doubts(self) -> list[Tensor]:
        """What must be false if all norms are right, [N] each."""
        return [each.flatten() for found in self._doubts.values() for each in found]

    def take(self, name: str, factor: Factor) -> None:
        """Settle on the form of one parameter."""
        with defer_checks() as self._doubts[name]:
            self.factors[name], self.norms[name] = factor.settled()

    def mend(self) -> None:
        """Compute the norms that are in doubt again, with care."""
        for name, doubts in self._doubts.items():
            factor, norm = self.factors[name], self.norms[name]
            found = [each.view(factor.size, -1).any(1) for each in doubts]
            if found and len(rows := torch.stack(found).any(0).nonzero().flatten()):
                again = factor.take(rows).norm()
                pairs = zip(norm, again, strict=True)
                self.norms[name] = Norm(*(a.index_copy(0, rows, b) for a, b in pairs))

    def gradients(self, keep: Tensor) -> Iterator["Settled"]:
        """Form the gradients of some samples in float64, a few samples at a time."""
        shapes = [factor.shape for factor in self.factors.values()]
        for rows in _slices(keep, *shapes):
            some = Settled()
            for name, factor in self.factors.items():
                some.take(name, _gradients(factor, rows))
            yield some

    def weighted(
        self,
        weights: Mapping[str, Tensor],
        keep: Tensor | None,
        summed: Summed = whole,
    ) -> Params:
        """Sum over the samples to keep, with weights [B] for every parameter.

        The others add exactly zero, whatever their gradients hold.
        """
        if keep is not None and modes.inside_transform():
            return {
                name: masked(factor, keep).weighted(weights[name])
                for name, factor in self.factors.items()
            }
        rows = None if keep is None else keep.nonzero().flatten()
        sums = {}
        for name in list(self.factors):
            factor, weight = self.factors.pop(name), weights[name]
            if rows is not None:
                factor, weight = factor.take(rows), weight[rows]
            sums[name] = summed(name, factor.weighted(weight))
        return sums


@dataclass
class Twice(Settled):
    """Does what `Settled` does in two backward passes, between which it keeps nothing.

    The first is for the norms, of which `decide` makes the weights of each parameter.
    The second sums, unless `decide` returns None: then factors are kept after all. It
    measures the norms of the very factors that it sums, with which the weights must
    `fit`: what runs again in a backward pass may have other values.
    """

    decide: Callable[["Twice"], Mapping[str, Tensor] | None] | None = None
    fit: Callable[["Twice", Mapping[str, Tensor]], bool] | None = None
    summed: Summed = whole
    sums: Params = field(default_factory=dict)
    _weights: Mapping[str, Tensor] | None = None

    def take(self, name: str, factor: Factor) -> None:
        """Compute the norms of one parameter, and perhaps sum its gradients."""
        super().take(name, factor)
        if self._weights is not None:
            form = self.factors.pop(name)
            self.sums[name] = self.summed(name, form.weighted(self._weights[name]))

    def look(self, name: str, factor: Factor) -> None:
        """Compute the norms of one parameter alone."""
        self.take(name, factor)
        del self.factors[name]

    def again(self) -> None:
        """Decide between the passes."""
        assert self.decide is not None
        self._weights = self.decide(self)

    def once(self) -> Settled | None:
        """Return a collector for one pass, if the sums are not to be used."""
        assert self.fit is not None
        if self._weights is None or self.fit(self, self._weights):
            return None
        return Settled(self.mask)


def _slices(keep: Tensor, *shapes: torch.Size) -> Sequence[Tensor]:
    """Return the numbers of samples to keep, as many as may have gradients at once."""
    numbers = sum(math.prod(shape) for shape in shapes)
    rows = keep.nonzero().flatten()
    return rows.split(max(1, _FORMED // max(1, numbers))) if len(rows) else ()


def _gradients(factor: Factor, rows: Tensor) -> Dense:
    """Form the gradients of some samples, of numbers of any size."""
    return Dense(factor.take(rows).double().grad())


def masked(factor: Factor, keep: Tensor) -> Factor:
    """Put zeros in the place of gradients that are not kept."""
    if isinstance(factor, Zero):
        return factor
    g = factor.grad()
    return Dense(torch.where(keep.view(-1, *(1,) * (g.ndim - 1)), g, 0))

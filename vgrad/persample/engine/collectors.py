"""Collectors: the use that a quantity makes of the factor of each parameter.

A collector is made for every chunk of samples; its `take` is called once for every
parameter, as early as the backward pass allows. Parameters may be grouped by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.conditions import defer_checks, rare
from vgrad.factors.base import Dense, Factor, Probes, Zero
from vgrad.factors.reductions import Norm, ordinary, reach, total
from vgrad.persample.engine.proxies import Use
from vgrad.torch_private import modes
from vgrad.tree import double
from vgrad.typing import Params

_WIDENED = 2**18
"""Numbers that are widened at once."""

_FORMED = 2**24
"""Numbers of gradients formed at once where a sum of products cannot be trusted."""

Summed = Callable[[str, Tensor], Tensor]
"""Takes the sum of a parameter as soon as it is formed, and returns the value to keep.
"""


def whole(name: str, value: Tensor) -> Tensor:
    """Keep all of a sum."""
    return value


class Collector(Protocol):
    """Takes the factors of all parameters.

    Attributes:
        callback: optional, called once per use while a loss is recorded.
        first_pass: optional, takes the factors of a recorded backward pass after which
            a second one passes all of them to `take`. `between_passes` is called in
            between, and `single_pass` at the end.
    """

    callback: Callable[[Use], None] | None = None
    first_pass: Callable[[str, Factor], None] | None = None

    def take(self, name: str, factor: Factor) -> None:
        """Accept the factor of one parameter."""

    def between_passes(self) -> None:
        """Prepare for a second backward pass."""

    def single_pass(self) -> "Collector | None":
        """Return a collector for one pass, if the two did not fit together."""


@dataclass
class Mapped(Collector):
    """Keeps one function of each factor."""

    function: Callable[[Factor], Any]
    values: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        self.values[name] = self.function(factor)


@dataclass
class Weighted(Collector):
    """Sums with weights `[B]` that are known beforehand."""

    weights: Tensor
    mask: Tensor | None = None
    sums: Params = field(default_factory=dict)
    summed: Summed = whole

    def take(self, name: str, factor: Factor) -> None:
        self.sums[name] = self.summed(name, self._sum(factor))

    def _sum(self, factor: Factor) -> Tensor:
        weights, counts = self.weights, self.mask
        if counts is not None:
            weights = torch.where(counts, weights, 0)
        if not factor.sides:
            counted = factor if counts is None else masked(factor, counts)
            return counted.weighted(weights)
        safe = ordinary(reach(factor.sides), weights)
        if not rare(~safe):
            return factor.weighted(weights)
        counts = torch.ones_like(safe) if counts is None else counts
        rows = (safe & counts).nonzero().flatten()
        parts = [factor.take(rows).weighted(weights[rows])]
        for rows in _slices(~safe & counts, factor.shape):
            parts.append(_gradients(factor, rows).weighted(weights[rows]))
        return total(parts)


@dataclass
class Projections(Collector):
    """Adds up inner products with random directions, [B, dim] in float64."""

    probes: Mapping[str, Probes]
    sums: Any = 0.0

    def take(self, name: str, factor: Factor) -> None:
        self.sums = self.sums + double(factor.project(self.probes[name]))


@dataclass
class Moments(Collector):
    """Means and sums of squared deviations over the samples, in float64."""

    count: Tensor | int
    mask: Tensor | None = None
    means: Params = field(default_factory=dict)
    squares: Params = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        # Two passes, since the difference of two large sums has no digits left where
        # the deviations are small. Some columns at a time are wide, so that they stay
        # in the processor's cache.
        flat = factor.grad().reshape(factor.size, math.prod(factor.shape))
        means, squares = [], []
        size: Tensor | int = self.count
        if self.mask is not None:
            self.count = self.mask.sum(dtype=torch.float64)
            size = self.count.clamp(min=1)  # a chunk without samples adds zero
        for columns in flat.split(max(1, _WIDENED // factor.size), dim=1):
            wide = self._counted(double(columns))
            means.append(wide.sum(0) / size)
            rest = self._counted(wide - means[-1])
            squares.append((rest * rest.conj()).real.sum(0))
        self.means[name] = torch.cat(means).view(factor.shape)
        self.squares[name] = torch.cat(squares).view(factor.shape)

    def _counted(self, rows: Tensor) -> Tensor:
        return rows if self.mask is None else torch.where(self.mask[:, None], rows, 0)


@dataclass
class ClipCollector(Collector):
    """Computes norms, and keeps the factors of a sum that is weighted by them.

    Norms of which some are uncertain are wrong there until `recompute` is called: the
    checks of all parameters are read together.
    """

    mask: Tensor | None = None
    factors: dict[str, Factor] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    _checks: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def uncertain(self) -> list[Tensor]:
        """Masks [N] that are False if all norms are right."""
        return [mask.flatten() for masks in self._checks.values() for mask in masks]

    def take(self, name: str, factor: Factor) -> None:
        with defer_checks() as self._checks[name]:
            self.factors[name], self.norms[name] = factor.settled()

    def recompute(self) -> None:
        """Compute uncertain norms again, with care."""
        for name, masks in self._checks.items():
            factor, norm = self.factors[name], self.norms[name]
            masks = [mask.view(factor.size, -1).any(1) for mask in masks]
            if masks and len(rows := torch.stack(masks).any(0).nonzero().flatten()):
                again = factor.take(rows).norm()
                pairs = zip(norm, again, strict=True)
                self.norms[name] = Norm(*(a.index_copy(0, rows, b) for a, b in pairs))

    def gradients(self, keep: Tensor) -> Iterator["ClipCollector"]:
        """Form the gradients of some samples in float64, a few samples at a time."""
        shapes = [factor.shape for factor in self.factors.values()]
        for rows in _slices(keep, *shapes):
            some = ClipCollector()
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

        The others add exactly zero, even if their gradients are not finite.
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
class TwoPassCollector(ClipCollector):
    """A `ClipCollector` of two backward passes, which keeps nothing in between.

    The first is for the norms, from which `decide` makes the weights of each parameter.
    The second sums, unless `decide` returns None: then factors are kept after all. It
    measures the norms of the very factors that it sums, with which the weights must
    `fit`: a loss that runs again in a backward pass may have other values.
    """

    decide: Callable[["TwoPassCollector"], Mapping[str, Tensor] | None] | None = None
    fit: Callable[["TwoPassCollector", Mapping[str, Tensor]], bool] | None = None
    summed: Summed = whole
    sums: Params = field(default_factory=dict)
    _weights: Mapping[str, Tensor] | None = None

    def take(self, name: str, factor: Factor) -> None:
        super().take(name, factor)
        if self._weights is not None:
            form = self.factors.pop(name)
            self.sums[name] = self.summed(name, form.weighted(self._weights[name]))

    def first_pass(self, name: str, factor: Factor) -> None:
        self.take(name, factor)
        del self.factors[name]

    def between_passes(self) -> None:
        assert self.decide is not None
        self._weights = self.decide(self)

    def single_pass(self) -> ClipCollector | None:
        assert self.fit is not None
        if self._weights is None or self.fit(self, self._weights):
            return None
        return ClipCollector(self.mask)


def _slices(keep: Tensor, *shapes: torch.Size) -> Sequence[Tensor]:
    """Return the numbers of samples to keep, as many as may have gradients at once."""
    numbers = sum(math.prod(shape) for shape in shapes)
    rows = keep.nonzero().flatten()
    return rows.split(max(1, _FORMED // max(1, numbers))) if len(rows) else ()


def _gradients(factor: Factor, rows: Tensor) -> Dense:
    return Dense(factor.take(rows).double().grad())


def masked(factor: Factor, keep: Tensor) -> Factor:
    """Replace gradients that are not kept by zeros."""
    if isinstance(factor, Zero):
        return factor
    g = factor.grad()
    return Dense(torch.where(keep.view(-1, *(1,) * (g.ndim - 1)), g, 0))


Partition = Literal["parameter", "layer"]
"""One group for each parameter, or for the parameters of each module."""

Grouping = Partition | Mapping[str, Patterns]
"""The same, or patterns by a group's name."""

Groups = Grouping | None
"""The same; None for one group of all parameters."""


def check_groups(function: str, groups: Groups) -> None:
    """Refuse other kinds of grouping.

    Raises:
        TypeError: the patterns of a group are no list or tuple of strings.
        ValueError: a string is neither `"parameter"` nor `"layer"`.
    """
    if isinstance(groups, Mapping):
        for group, patterns in groups.items():
            checks.patterns(function, **{f"groups[{group!r}]": patterns})
    elif groups is not None:
        checks.choice(function, get_args(Partition), groups=groups)


def members(function: str, groups: Groups, params: Params) -> dict[str, list[str]]:
    """Return the names in each group, each in one; all are in "" for None.

    Raises:
        ValueError: a pattern matches nothing, or two groups match one parameter.

    Example:
        >>> import torch
        >>> params = {"0.weight": torch.ones(1), "0.bias": torch.ones(1)}
        >>> members("per_sample_norm", "layer", params)
        {'0': ['0.weight', '0.bias']}
    """
    names: dict[str, list[str]] = {}
    if not isinstance(groups, Mapping):
        for name in params:
            layer = name.rpartition(".")[0]
            group = {None: "", "parameter": name, "layer": layer}[groups]
            names.setdefault(group, []).append(name)
        return names
    owner: dict[str, str] = {}
    for group, patterns in groups.items():
        names[group] = []
        for pattern in patterns:
            matched = checks.selected(params, [pattern])
            if not matched:
                raise ValueError(
                    f"{function}(groups): expected patterns of names of parameters, "
                    f"but {pattern!r} matches none of {list(params)}."
                )
            names[group] += [name for name in matched if name not in names[group]]
        for name in names[group]:
            if owner.setdefault(name, group) != group:
                raise ValueError(
                    f"{function}(groups): expected groups without common parameters, "
                    f"but {name!r} is in {owner[name]!r} and {group!r}."
                )
    return names

"""Collectors: the use that a quantity makes of the factor of each parameter.

A collector is made for every chunk of samples; its `take` is called once for every
parameter, as early as the backward pass allows. Parameters may be grouped by name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.factors.base import Dense, Factor, Zero
from vgrad.factors.norms import FORMED_AT_ONCE
from vgrad.persample.engine.proxies import Use
from vgrad.typing import Params


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


def slices(keep: Tensor, *shapes: torch.Size) -> Sequence[Tensor]:
    """Return the numbers of samples to keep, as many as may have gradients at once."""
    numbers = sum(math.prod(shape) for shape in shapes)
    rows = keep.nonzero().flatten()
    return rows.split(max(1, FORMED_AT_ONCE // max(1, numbers))) if len(rows) else ()


def gradients(factor: Factor, rows: Tensor) -> Dense:
    """Form the gradients of some samples in float64."""
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
        ValueError: a string is neither `"parameter"` nor `"layer"`; there is no group,
            or one without patterns.
    """
    if isinstance(groups, Mapping):
        if not groups or not all(len(patterns) for patterns in groups.values()):
            raise ValueError(
                f"{function}(groups={dict(groups)!r}): expected a group at least, and "
                f'a pattern in each, such as {{"head": ["head.*"]}}.'
            )
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

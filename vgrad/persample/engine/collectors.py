"""Collectors: the use that a quantity makes of the factor of each parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.devices import is_host
from vgrad.factors.base import Compound, Dense, Factor, Pair, Zero
from vgrad.persample.engine.proxies import Use


class Collector(Protocol):
    """Takes the factors of all parameters."""

    callback: Callable[[Use], None] | None = None  # once per use of a recorded loss
    first_pass: Callable[[str, Factor], Any] | None = None
    """Takes the factors of a first backward pass, before a second one for `add`.

    `between_passes` is called in between, and `single_pass` at the end.
    """

    def add(self, name: str, factor: Factor) -> None:
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

    def add(self, name: str, factor: Factor) -> None:
        self.values[name] = self.function(factor)


class Holding(Collector):
    """Holds values of many parameters, to read one condition for all of them."""

    def __init__(self, device: torch.device) -> None:
        # On the host a read takes no time, and there may be less memory.
        self._limit = 2**22 if is_host(device) else 2**28
        self._pending: dict[str, Any] = {}
        self._bytes = 0

    def hold(self, name: str, value: Any, size: int) -> None:
        """Hold a value that refers to so many bytes of factors."""
        self._pending[name] = value
        self._bytes += size
        if self._bytes > self._limit:
            self.flush()

    def flush(self) -> None:
        """Settle all values that are held, if there are some."""
        pending, self._pending, self._bytes = self._pending, {}, 0
        if pending:
            self.settle(pending)

    def settle(self, pending: dict[str, Any]) -> None:
        raise NotImplementedError


def masked(factor: Factor, keep: Tensor) -> Factor:
    """Replace gradients that are not kept by zeros."""

    def zeroed(x: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *(1,) * (x.ndim - 1)), x, 0)

    match factor:
        case Zero():
            return factor
        case Pair():
            return factor._of(*map(zeroed, factor.sides))
        case Compound():
            return factor._of(*(masked(part, keep) for part in factor.parts))
    return Dense(zeroed(factor.grad()))


Partition = Literal["parameter", "layer"]
"""One group for each parameter, or for the parameters of each module."""

Grouping = Partition | Mapping[str, Patterns]
"""The same, or patterns by a group's name."""

Groups = Grouping | None
"""The same; None for one group of all parameters."""


def check_groups(function: str, groups: Groups) -> None:
    """Refuse other kinds of grouping."""
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


def members(
    function: str, groups: Groups, params: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the names in each group, each in one; all are in "" for None."""
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

"""Parameters in named groups: whose norms are joint, and which share a clip bound."""

import fnmatch
from collections.abc import Mapping, Sequence

from vgrad import checks
from vgrad.typing import Params


class Grouping:
    """Which parameters belong together.

    `"parameter"` has a group for each, `"layer"` one for those of the same module, and
    a dictionary one for what each of its entries' shell-style patterns match.

    Raises:
        ValueError: the string is another.

    Example:
        >>> params = {"0.weight": torch.ones(1), "0.bias": torch.ones(1)}
        >>> Grouping("per_sample_norm", "layer").members(params)
        {'0': ['0.weight', '0.bias']}
    """

    def __init__(
        self, function: str, groups: str | Mapping[str, str | Sequence[str]]
    ) -> None:
        """Check the kind of grouping."""
        if not isinstance(groups, Mapping):
            checks.one_of(function, ("parameter", "layer"), groups=groups)
        self._function = function
        self._groups = groups

    def members(self, params: Params) -> dict[str, list[str]]:
        """Return the names in each group, each in one.

        Raises:
            ValueError: a pattern matches nothing, or two groups match one parameter.
        """
        if isinstance(self._groups, Mapping):
            return self._matched(self._groups, params)
        if self._groups == "parameter":
            return {name: [name] for name in params}
        found: dict[str, list[str]] = {}
        for name in params:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def _matched(
        self, groups: Mapping[str, str | Sequence[str]], params: Params
    ) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        owner: dict[str, str] = {}
        for group, patterns in groups.items():
            found[group] = []
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                names = fnmatch.filter(params, pattern)
                if not names:
                    raise ValueError(
                        f"{self._function}(groups): expected patterns of names of "
                        f"parameters, but {pattern!r} matches none of {list(params)}."
                    )
                for name in names:
                    if owner.setdefault(name, group) != group:
                        raise ValueError(
                            f"{self._function}(groups): expected groups without common "
                            f"parameters, but {name!r} is in {owner[name]!r} and "
                            f"{group!r}."
                        )
                found[group] += [name for name in names if name not in found[group]]
        return found

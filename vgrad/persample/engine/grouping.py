"""Parameters in named groups: whose norms are joint, and which share a clip bound."""

from collections.abc import Mapping

from vgrad import checks, names
from vgrad.names import Patterns
from vgrad.typing import Params

Groups = str | Mapping[str, Patterns] | None
"""`"parameter"`, `"layer"` (a module), or patterns by a group's name; None for all."""


class Grouping:
    """Which parameters belong together; all of them, in the group "", for None.

    Raises:
        TypeError: the patterns of a group are no list or tuple of strings.
        ValueError: a string is another than `"parameter"` and `"layer"`.

    Example:
        >>> import torch
        >>> params = {"0.weight": torch.ones(1), "0.bias": torch.ones(1)}
        >>> Grouping("per_sample_norm", "layer").members(params)
        {'0': ['0.weight', '0.bias']}
    """

    def __init__(self, function: str, groups: Groups) -> None:
        """Check the kind of grouping."""
        if isinstance(groups, Mapping):
            for group, patterns in groups.items():
                names.check(function, **{f"groups[{group!r}]": patterns})
        elif groups is not None:
            checks.one_of(function, ("parameter", "layer"), groups=groups)
        self._function = function
        self._groups = groups

    def members(self, params: Params) -> dict[str, list[str]]:
        """Return the names in each group, each in one.

        Raises:
            ValueError: a pattern matches nothing, or two groups match one parameter.
        """
        if self._groups is None:
            return {"": list(params)}
        if isinstance(self._groups, Mapping):
            return self._matched(self._groups, params)
        if self._groups == "parameter":
            return {name: [name] for name in params}
        found: dict[str, list[str]] = {}
        for name in params:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def _matched(
        self, groups: Mapping[str, Patterns], params: Params
    ) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        owner: dict[str, str] = {}
        for group, patterns in groups.items():
            found[group] = []
            for pattern in patterns:
                matched = names.selected(params, [pattern])
                if not matched:
                    raise ValueError(
                        f"{self._function}(groups): expected patterns of names of "
                        f"parameters, but {pattern!r} matches none of {list(params)}."
                    )
                found[group] += [each for each in matched if each not in found[group]]
            for name in found[group]:
                if owner.setdefault(name, group) != group:
                    raise ValueError(
                        f"{self._function}(groups): expected groups without common "
                        f"parameters, but {name!r} is in {owner[name]!r} and {group!r}."
                    )
        return found

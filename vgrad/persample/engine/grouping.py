"""Parameters in named groups: whose norms are joint, and which share a clip bound."""

from collections.abc import Mapping
from typing import Literal, get_args

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.typing import Params

Parts = Literal["parameter", "layer"]
"""Each parameter by itself, or those of a module together."""

Grouping = Parts | Mapping[str, Patterns]
"""Such parts, or patterns by a group's name."""

Groups = Grouping | None
"""The same, or all parameters as one with None."""


def check_groups(function: str, groups: Groups) -> None:
    """Refuse what is no kind of grouping.

    Raises:
        TypeError: the patterns of a group are no list or tuple of strings.
        ValueError: a string is another than `"parameter"` and `"layer"`.
    """
    if isinstance(groups, Mapping):
        for group, patterns in groups.items():
            checks.patterns(function, **{f"groups[{group!r}]": patterns})
    elif groups is not None:
        checks.choice(function, get_args(Parts), groups=groups)


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
    if isinstance(groups, Mapping):
        return _matched(function, groups, params)
    owner = {None: lambda _: "", "parameter": str, "layer": _module}[groups]
    found: dict[str, list[str]] = {}
    for name in params:
        found.setdefault(owner(name), []).append(name)
    return found


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _matched(
    function: str, groups: Mapping[str, Patterns], params: Params
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, patterns in groups.items():
        found[group] = []
        for pattern in patterns:
            matched = checks.selected(params, [pattern])
            if not matched:
                raise ValueError(
                    f"{function}(groups): expected patterns of names of parameters, "
                    f"but {pattern!r} matches none of {list(params)}."
                )
            found[group] += [each for each in matched if each not in found[group]]
        for name in found[group]:
            if owner.setdefault(name, group) != group:
                raise ValueError(
                    f"{function}(groups): expected groups without common parameters, "
                    f"but {name!r} is in {owner[name]!r} and {group!r}."
                )
    return found

"""The member axis: which entries of an ensemble have it, and how long it is.

E members. Every entry is a tensor `[E, *shape]`, the shared ones are `[*shape]`.
"""

import fnmatch
from collections.abc import Iterable

from vgrad import checks
from vgrad.typing import Buffers, Params


def shared_names(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the names that match any of the shell-style patterns.

    Raises:
        ValueError: a pattern matches none of them.
        TypeError: the patterns are one string.

    Example:
        >>> shared_names(["body.weight", "head.weight"], ["body.*"])
        {'body.weight'}
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"shared_names({patterns!r}): expected a list or tuple of patterns, got a "
            f"string. Write [{patterns!r}]."
        )
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ValueError(
                f"shared_names({pattern!r}): expected a pattern that matches an entry, "
                f"got none. The names are {checks.listed(names)}."
            )
        found.update(matched)
    return found


def split(values: Params, shared: Iterable[str]) -> tuple[Params, Params]:
    """Return the entries that have a member axis, and those that match a pattern.

    Raises:
        ValueError: a pattern matches nothing.

    Example:
        >>> import torch
        >>> stacked, whole = split({"a": torch.ones(3), "b": torch.ones(1)}, ["b"])
        >>> list(stacked), list(whole)
        (['a'], ['b'])
    """
    names = shared_names(values, shared)
    stacked = {name: value for name, value in values.items() if name not in names}
    return stacked, {name: values[name] for name in values if name in names}


def members(params: Params, buffers: Buffers, shared: Iterable[str] = ()) -> int:
    """Return E, the number of members of stacked entries.

    `shared` holds patterns of the entries without a member axis.

    Raises:
        ValueError: no entry has a member axis, two have axes of other lengths, or the
            length is zero.

    Example:
        >>> import torch
        >>> members({"weight": torch.ones(3, 2, 2), "bias": torch.ones(3, 2)}, {})
        3
    """
    checks.dictionaries("members", params=params, buffers=buffers)
    stacked, _ = split({**params, **buffers}, shared)
    if not stacked:
        raise ValueError(
            "members(params, buffers): expected an entry with a member axis, got none."
        )
    first = next(iter(stacked))
    for name, value in stacked.items():
        if value.ndim == 0:
            raise ValueError(
                f"members(params, buffers): expected a member axis in {name!r}, got a "
                f"scalar. If the members share it, name it in shared=."
            )
        if value.shape[0] != stacked[first].shape[0]:
            raise ValueError(
                f"members(params, buffers): expected {len(stacked[first])} members in "
                f"{name!r} as in {first!r}, got {len(value)}. If the members share one "
                f"of them, name it in shared=."
            )
    count = stacked[first].shape[0]
    if not count:
        raise ValueError(
            f"members(params, buffers): expected at least one member, got none in "
            f"{first!r}."
        )
    return count

"""Patterns of names: how parameters, buffers and modules are selected everywhere.

A pattern is shell-style: `*` stands for any letters, dots too, `?` for one, `[ab]` for
one of these; case counts. Functions take a list or tuple of patterns. A dictionary
that says something about names has one pattern, or a tuple of them, as a key.
"""

# Annotations stay text: torch.compile traces what makes an optimizer inside a mapped
# function.
from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from vgrad import checks

Patterns = list[str] | tuple[str, ...]
"""Names: those that match one of the patterns."""


def check(function: str, **arguments: Any) -> None:
    """Refuse what is no list or tuple of patterns.

    Raises:
        TypeError: it is something else. One string would be read letter by letter.
    """
    for argument, patterns in arguments.items():
        if isinstance(patterns, str):
            raise TypeError(
                f"{function}({argument}={patterns!r}): expected a list or tuple of "
                f"patterns, got a string. Write [{patterns!r}]."
            )
        if not isinstance(patterns, list | tuple):
            kind = type(patterns).__name__
            raise TypeError(
                f"{function}({argument}={patterns!r}): expected a list or tuple of "
                f"patterns of names, got a {kind}."
            )
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(
                    f"{function}({argument}={patterns!r}): expected patterns that are "
                    f"strings, got a {type(pattern).__name__}."
                )


def selected(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match any of the patterns, in their order.

    Example:
        >>> selected(["0.weight", "0.bias"], ["*.bias", "*.scale"])
        ['0.bias']
    """
    patterns = tuple(patterns)
    return [name for name in names if any(matches(name, each) for each in patterns)]


def all_matched(
    function: str,
    names: Iterable[str],
    patterns: Iterable[str],
    *,
    kind: str = "parameter",
) -> list[str]:
    """Return the names that match any of the patterns, each of which has to match one.

    A misspelt pattern would otherwise leave out what it was meant for.

    Raises:
        ValueError: a pattern matches none of the names.
    """
    names, patterns = list(names), tuple(patterns)
    for pattern in patterns:
        if not selected(names, [pattern]):
            raise ValueError(
                f"{function}({pattern!r}): expected a pattern that matches a {kind}, "
                f"got none. The names are {checks.listed(names)}."
            )
    return selected(names, patterns)


def matches(name: str, pattern: str) -> bool:
    """Tell whether a name matches one pattern."""
    return fnmatch.fnmatchcase(name, pattern)


# torch.compile (2.13) cannot trace fnmatch, and need not, since names and patterns are
# constants. `torch.compiler.assume_constant_result` sets just this, but imports the
# compiler, which takes seconds and changes the warning filters.
vars(matches)["_dynamo_marked_constant"] = True

"""Checks of arguments: `positive("clipped_grad", max_norm=max_norm)`.

Parameters, buffers and modules are selected by a list or tuple of shell-style patterns:
`*` stands for any letters, dots too, `?` for one, `[ab]` for one of these; case counts.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from vgrad.torch_private import modes, shards


def positive(function: str, **values: Any) -> list[float]:
    """Each value is a number above zero; infinity passes, NaN does not."""
    return _numbers(function, values, lambda value: value > 0, "{} > 0")


def non_negative(function: str, **values: Any) -> list[float]:
    """Each value is a number of zero or more; infinity passes, NaN does not."""
    return _numbers(function, values, lambda value: value >= 0, "{} >= 0")


def finite(function: str, **values: Any) -> list[float]:
    """Each value is a number that is neither infinite nor NaN."""
    return _numbers(function, values, math.isfinite, "a finite number")


def between(function: str, low: float, high: float, **values: Any) -> list[float]:
    """Each value is a number with `low < value < high`."""
    expected = f"{low} < {{}} < {high}"
    return _numbers(function, values, lambda value: low < value < high, expected)


def _numbers(
    function: str, values: dict[str, Any], holds: Callable, expected: str
) -> list[float]:
    """Return the values as Python's numbers: numpy's would compute in their dtype."""
    numbers = []
    for name, value in values.items():
        # Fractions and numbers of numpy are real, tensors are not.
        is_real = isinstance(value, int | float) or isinstance(value, Real)
        if isinstance(value, bool) or not is_real:
            kind = type(value).__name__
            advice = " Pass its .item()." if isinstance(value, Tensor) else ""
            raise TypeError(
                f"{function}({name}={shown(value)}): expected a number, got a {kind}."
                f"{advice}"
            )
        if not holds(value):
            said = expected.format(name)
            raise ValueError(f"{function}({name}={shown(value)}): expected {said}.")
        numbers.append(value if type(value) in (int, float) else float(value))
    return numbers


def integers(function: str, *, minimum: int, **values: Any) -> list[int]:
    """Each value is a whole number of at least `minimum`; all of them as ints."""
    numbers = []
    for name, value in values.items():
        array = isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool)
        try:  # whole numbers of numpy and of tensors without dimensions are among them
            number = None if array or isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < minimum:
            raise ValueError(
                f"{function}({name}={shown(value)}): expected a whole number >= "
                f"{minimum}."
            )
        numbers.append(number)
    return numbers


def shown(value: Any) -> str:
    """Return the text of an argument for a message, without values of tensors."""
    if isinstance(value, Mapping):
        items = [f"{key!r}: {shown(item)}" for key, item in [*value.items()][:_MOST]]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [shown(item) for item in [*value][:_MOST]]
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        # Private data, perhaps, which an error must not show.
        return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    else:
        return repr(value)
    more = [f"{len(value) - _MOST} more"] if len(value) > _MOST else []
    first, last = "{}" if isinstance(value, Mapping | set | frozenset) else "[]"
    return f"{first}{', '.join([*items, *more])}{last}"


_MOST = 8
"""Items of a list that a message shows."""


def choice(function: str, allowed: Collection[Any], **values: Any) -> None:
    """Each value is one of `allowed`; the message lists them."""
    for name, value in values.items():
        if value not in [*allowed]:  # which need not hash it
            names = ", ".join(repr(choice) for choice in allowed)
            raise ValueError(
                f"{function}({name}={shown(value)}): expected one of {names}."
            )


def package(module: str, extra: str) -> Any:
    """Import a module of a package that an extra installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(
            f"vgrad: expected the package {name}, which is not installed. Run "
            f'pip install "vgrad[{extra}]".'
        ) from error


def dictionaries(function: str, **values: Any) -> None:
    """Each value is a dictionary, as `make_functional_with_buffers` makes them."""
    for name, value in values.items():
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{function}({name}): expected a dictionary of tensors by name, got a "
                f"{type(value).__name__}."
            )


def whole_tensors(function: str, entries: Mapping[str, Any]) -> None:
    """No entry is a DTensor, of whose numbers each rank has a part."""
    for name, value in entries.items():
        if shards.is_distributed(value):
            raise TypeError(
                f"{function}: expected ordinary tensors, got a DTensor in {name!r}. "
                f"Pass the whole one on every rank: .full_tensor()."
            )


def listed(names: Iterable[str]) -> str:
    """Quote names for a message, the first eight of them."""
    quoted = [repr(name) for name in sorted(names)]
    more = f" and {len(quoted) - 8} more" if len(quoted) > 8 else ""
    return ", ".join(quoted[:8]) + more


def names(function: str, expected: Iterable[str], got: Iterable[str]) -> None:
    """The names are exactly those expected; the message lists the others."""
    missing = set(expected) - set(got)
    unexpected = set(got) - set(expected)
    problems = [f"missing: {listed(missing)}"] if missing else []
    problems += [f"unexpected: {listed(unexpected)}"] if unexpected else []
    if problems:
        raise ValueError(
            f"{function}: expected the names of the model, got {'; '.join(problems)}."
        )


def shapes(
    function: str, expected: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Each entry is a tensor of the shape, or of a tensor's, expected by its name."""
    for name, like in expected.items():
        shape, value = getattr(like, "shape", like), tensors[name]
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"{function}: expected a tensor in {name!r}, got a {kind}.")
        if value.shape != shape:
            raise ValueError(
                f"{function}: expected shape {tuple(shape)} in {name!r}, got "
                f"{tuple(value.shape)}. Stacked entries go through vgrad.vmap."
            )


def vectors(
    function: str, expected: Mapping[str, Any], got: Mapping[str, Tensor]
) -> torch.Size:
    """Names and shapes are those expected, behind the same axes, which are returned."""
    names(function, expected, got)
    whole_tensors(function, got)
    lead = torch.Size()
    for place, (name, like) in enumerate(expected.items()):
        shape, actual = getattr(like, "shape", like), got[name].shape
        lead = actual[: max(0, len(actual) - len(shape))] if place == 0 else lead
        if actual != lead + shape:
            raise ValueError(
                f"{function}: expected shape {tuple(shape)} in {name!r}, or several "
                f"such vectors in front in all names, got {tuple(actual)}."
            )
    return lead


def same_values(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors, NaN equal to NaN; unseen values, in a transform, pass."""
    if a is b or modes.inside_transform():
        return True
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# Annotations stay text: torch.compile traces what makes an optimizer inside a mapped
# function.


Patterns = list[str] | tuple[str, ...]
"""The names that match one of the patterns."""


def patterns(function: str, **arguments: Any) -> None:
    """Refuse anything but a list or tuple of patterns, a single string among others."""
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
    """Return the names that match any of the patterns, in their order."""
    patterns = tuple(patterns)
    return [name for name in names if any(matches(name, glob) for glob in patterns)]


def all_matched(
    function: str,
    names: Iterable[str],
    patterns: Iterable[str],
    *,
    kind: str = "parameter",
) -> list[str]:
    """Return the names that match any of the patterns, none of which may be idle."""
    names, patterns = list(names), tuple(patterns)
    for pattern in patterns:
        if not selected(names, [pattern]):
            raise ValueError(
                f"{function}({pattern!r}): expected a pattern that matches a {kind}, "
                f"got none. The names are {listed(names)}."
            )
    return selected(names, patterns)


def matches(name: str, pattern: str) -> bool:
    """Return whether a name matches one pattern."""
    return fnmatch.fnmatchcase(name, pattern)


# torch.compile (2.13) cannot trace fnmatch, and takes the result for a constant.
# `torch.compiler.assume_constant_result` sets just this, but imports the compiler,
# which takes seconds and changes the warning filters.
vars(matches)["_dynamo_marked_constant"] = True

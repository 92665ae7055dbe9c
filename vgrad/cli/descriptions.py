"""What the files of a run say about themselves, checked: anybody can write such a file.

A kind (`vgrad_command.Kind`) has words for the values that an entry may have, and a
test.
"""

import math
from collections.abc import Mapping
from typing import Any

from vgrad.cli.models import MOST_CLASSES, Shape
from vgrad_command import Kind, whole

_MOST_FEATURES = 2**31
"""Numbers in an image, beyond which a layer's size may not fit into 64 bits."""

TABLE = Kind("a dictionary", lambda value: isinstance(value, dict))


def optional(kind: Kind) -> Kind:
    """Of a kind, or None, or missing."""
    words, holds = kind
    return Kind(f"{words}, or null", lambda value: value is None or holds(value))


def several(kind: Kind) -> Kind:
    """A list of values of a kind."""
    words, holds = kind
    return Kind(
        f"a list, each {words}",
        lambda value: isinstance(value, list) and all(map(holds, value)),
    )


def check(where: str, found: Any, kinds: Mapping[str, Kind]) -> None:
    """Check the entries that have a kind; nobody reads any others.

    Raises:
        ValueError: there is no such dictionary, or an entry is of another kind.
    """
    if not isinstance(found, dict):
        raise ValueError(
            f"{where}: expected a dictionary of {', '.join(kinds)}, got a "
            f"{type(found).__name__}."
        )
    for name, (words, holds) in kinds.items():
        value = found.get(name)
        if not holds(value):
            shown = repr(value)
            shown = shown if len(shown) < 80 else f"a {type(value).__name__}"
            raise ValueError(
                f"{where}: expected {words} in {name!r}, got "
                f"{shown if name in found else 'no such entry'}. It was not written "
                f"by this version of vgrad, or was changed."
            )


def shape_of(where: str, found: Any) -> Shape:
    """Read what a model was made for.

    Raises:
        ValueError: as `check`, or an image of that size has too many numbers.
    """
    side = whole(1, _MOST_FEATURES)
    kinds = {name: side for name in Shape._fields} | {"classes": whole(1, MOST_CLASSES)}
    check(f"{where}, shape", found, kinds)
    shape = Shape(**{name: found[name] for name in Shape._fields})
    if math.prod(shape[:3]) > _MOST_FEATURES:
        raise ValueError(
            f"{where}, shape: expected images of at most {_MOST_FEATURES} numbers, got "
            f"{' x '.join(map(str, shape[:3]))}."
        )
    return shape

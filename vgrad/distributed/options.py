"""Options that ranks must have in common, and the plain values of their losses.

A sum over ranks with other clipping bounds or other losses is meaningless. Numbers,
text and booleans are compared; tensors, arrays, devices and generators may differ, as
may `chunk_size`, `strategy` and loss scales, on which results do not depend.
"""

import hashlib
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vgrad import files
from vgrad.distributed.parts import INNER, parts
from vgrad.functional.model import FunctionalModel
from vgrad.persample.clipped import ClipRule
from vgrad.persample.engine import Transform

_DEVICE = re.compile(r"(cpu|cuda|hpu|meta|mps|mtia|xla|xpu)(:\d+)?")

_UNCOMPARED = (Tensor, np.ndarray, torch.Generator, torch.device, str)
"""Values that may differ between ranks; text that is left is the name of a device."""

_PLAIN = bool | int | float | complex | str | bytes | range | slice

_CACHING = ("vgrad.compiled", "vgrad.ensemble.", "vgrad.functional.model")
_CACHING += (
    "vgrad.ops",
    "vgrad.optim.fused",
    "vgrad.loss",
    "vgrad.persample.engine",
    "vgrad.torch_private",
)
"""Modules whose objects cache calls, which differ between ranks."""

_LIBRARIES = {"torch", "numpy"} | sys.stdlib_module_names

_LONGEST = 1000
"""Entries of a list or a dictionary above which only their number is compared."""

_CONTAINERS = Mapping | Sequence | Set

_OF_MODULES = vars(nn.Module()).keys() - {"training"}
"""Attributes that every module has."""


class Options:
    """The options of a function, and the plain values that it reaches.

    All are read once; parts of functions and objects in the loss at every call as well,
    which may have changed.
    """

    def __init__(self, loss: Any = None, **options: Any) -> None:
        self._holders: list[tuple[str, Any, Set[str] | None]] = []
        self._facts: dict[str, str] = {}
        left: list[tuple[str, Any, bool, Set[str] | None]]
        left = [(name, value, False, None) for name, value in options.items()]
        left.append(("loss", loss, True, None))
        seen: dict[int, Any] = {}
        while left:
            path, value, live, named = left.pop()
            if (text := self.text(value)) is not None:
                self._facts[path] = text
                continue
            if id(value) in seen or isinstance(value, _UNCOMPARED):
                continue
            seen[id(value)] = value
            self._facts[path] = _name(value)
            live = live and not isinstance(value, FunctionalModel)
            if live and not isinstance(value, _CONTAINERS | types.CodeType):
                self._holders.append((path, value, named))
            found = [*_parts(value, named)]
            if isinstance(value, types.MethodType):
                named = _names_in(value.__func__)
            left += [(f"{path}.{name}", part, live, named) for name, part in found]
        now = self._now()
        fixed = {path: text for path, text in self._facts.items() if path not in now}
        self._fixed = json.dumps(fixed, sort_keys=True)

    @staticmethod
    def text(value: Any) -> str | None:
        """Return the text of a value that is compared; None of any other."""
        return _text(value)

    def digest(self) -> str:
        """Hash all facts."""
        text = self._fixed + json.dumps(self._now(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def facts(self) -> dict[str, str]:
        """Return the values by their places."""
        return {**self._facts, **self._now()}

    def _now(self) -> dict[str, str]:
        return {
            f"{path}.{name}": text
            for path, holder, named in self._holders
            for name, part in _parts(holder, named)
            if (text := self.text(part)) is not None
        }


class WithTensors(Options):
    """Options with the tensors and arrays that they reach, as hashes."""

    @staticmethod
    def text(value: Any) -> str | None:
        """Return the text of a value, or its hash."""
        if isinstance(value, Tensor | np.ndarray):
            return files.digest({"": torch.as_tensor(value)})
        return _text(value)


def of_transform(transform: Transform) -> dict[str, Any]:
    """Return the options of a per-sample transform on which its results depend."""
    options = transform.options
    facts: dict[str, Any] = {
        "function": options.function,
        "randomness": options.randomness,
        "has_aux": options.has_aux,
        "loss": options.loss,
    }
    for name, value in vars(transform.quantity).items():
        if isinstance(value, ClipRule):
            facts |= {"clipping": value.kind, "max_norm": value.max_norm}
        elif not name.startswith("_"):  # drawn directions of a projection
            facts[name] = value
    return facts


def _text(value: Any) -> str | None:
    """Return the text of a plain value; None of any other, and of a device's name."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return None
    if isinstance(value, Enum | torch.dtype):
        return str(value)
    if value is not None and not isinstance(value, _PLAIN):
        return None
    text = repr(value)
    if len(text) > 100:
        short = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        text = f"{text[:60]}... {short}"
    return text


def _parts(value: Any, named: Set[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that ranks must have in common.

    Of an object whose method is the loss, these are the attributes that its code names.
    """
    if isinstance(value, types.CodeType):
        yield "constants", value.co_consts
        yield "names", value.co_names
    elif isinstance(value, Transform):
        yield from of_transform(value).items()
    elif isinstance(value, _CONTAINERS) and len(value) > _LONGEST:
        return
    elif isinstance(value, Mapping):
        for number, (key, part) in enumerate(value.items()):
            yield _text(key) or str(number), part
    elif isinstance(value, Set):
        plain = sorted((each for each in value if _text(each) is not None), key=repr)
        yield from ((str(number), each) for number, each in enumerate(plain))
    elif isinstance(value, FunctionalModel | Sequence) or type(value) in INNER:
        if not (type(value) is types.FunctionType and _is_library(value.__module__)):
            yield from parts(value)
    elif _is_followed(value):
        for name, part in parts(value):
            if name not in _OF_MODULES and (named is None or name in named):
                yield name, part
        if isinstance(value, nn.Module) and named is None:
            yield from value.named_children()


def _names_in(function: Any) -> Set[str] | None:
    """Return the names in the code of a function and of those within it."""
    if not isinstance(function, types.FunctionType):
        return None
    names, codes = set(), [function.__code__]
    while codes:
        code = codes.pop()
        names |= {*code.co_names}
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return names


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES


def _is_followed(value: Any) -> bool:
    """Return whether the attributes of an object count: it is no library's own."""
    if isinstance(value, nn.Module | types.SimpleNamespace):
        return True
    kind = type(value).__module__
    caches = kind.startswith(_CACHING) and kind != "vgrad.ensemble.optimizer"
    return not isinstance(value, type) and not _is_library(kind) and not caches


def _name(value: Any) -> str:
    if isinstance(value, _CONTAINERS) and len(value) > _LONGEST:
        return f"{type(value).__qualname__} of {len(value)}"
    if isinstance(value, types.CodeType):
        return value.co_name
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    # Where processes are spawned, the main module has another name in them.
    module = str(getattr(named, "__module__", "")).replace("__mp_main__", "__main__")
    return f"{module}.{named.__qualname__}"

"""Options that ranks must have in common, and the plain values of their losses.

A sum over ranks with other clipping bounds or other losses is meaningless. Numbers,
text and booleans are compared: the options of a transform or a step, and everything
that its loss and its optimizer reach in closures, default arguments, constants and
names of code, `functools.partial`, attributes of objects and modules, lists and
dictionaries; of a bound method's object the attributes that its code names. Tensors,
arrays, devices and generators may differ, as may `chunk_size`, `strategy` and the loss
scale of a transform, on which results do not depend.

All of it is read once, where a function of all ranks is made. Values in the cells of a
loss and in attributes of the loss and its criterion are read at every call as well: a
number, text or a boolean there may have changed.
"""

import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vgrad.functional.model import FunctionalModel
from vgrad.persample.clipped import ClipRule
from vgrad.persample.engine import Transform

_DEVICE = re.compile(r"(cpu|cuda|hpu|meta|mps|mtia|xla|xpu)(:\d+)?")

_UNCOMPARED = (Tensor, np.ndarray, torch.Generator, torch.device, str)
"""Values that may differ between ranks."""

_CACHING = ("vgrad.compiled", "vgrad.ensemble.", "vgrad.functional.model")
_CACHING += ("vgrad.ops", "vgrad.loss", "vgrad.persample.engine", "vgrad.torch_private")
"""Modules whose objects cache calls, which differ between ranks."""

_LIBRARIES = {"torch", "numpy"} | sys.stdlib_module_names

_LONGEST = 1000
"""Entries of a list or a dictionary above which only their number is compared."""

_MODULE = frozenset(vars(nn.Module()))


class Options:
    """The options of a function, and the plain values that it reaches."""

    def __init__(self, loss: Any = None, **parts: Any) -> None:
        self._holders: list[tuple[str, Any, Set[str] | None]] = []
        self._facts: dict[str, str] = {}
        self._seen: dict[int, Any] = {}
        self._read({"loss": loss}, live=True)
        self._read(parts, live=False)
        self._seen = {}
        now = self._now()
        fixed = {path: text for path, text in self._facts.items() if path not in now}
        self._fixed = json.dumps(fixed, sort_keys=True)

    def digest(self) -> str:
        """Hash all facts."""
        text = self._fixed + json.dumps(self._now(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def facts(self) -> dict[str, str]:
        """Return the values by their places."""
        return {**self._facts, **self._now()}

    def _now(self) -> dict[str, str]:
        """Return the plain values that closures and attributes of the loss hold."""
        texts = {}
        for path, holder, spelled in self._holders:
            if isinstance(holder, types.CellType):
                values = [(path, each) for each in _content(holder)]
            else:
                values = [(f"{path}.{n}", x) for n, x in _attributes(holder, spelled)]
            for place, value in values:
                if (text := _plain(value)) is not None:
                    texts[place] = text
        return texts

    def _read(self, parts: Mapping[str, Any], *, live: bool) -> None:
        stack: list[tuple[str, Any, bool, Set[str] | None]]
        stack = [(path, value, live, None) for path, value in parts.items()]
        while stack:
            path, value, live, spelled = stack.pop()
            if (text := _plain(value)) is not None:
                self._facts[path] = text
                continue
            # Text here is the name of a device.
            if id(value) in self._seen or isinstance(value, _UNCOMPARED):
                continue
            self._seen[id(value)] = value
            self._facts[path] = _name(value)
            if live and _is_object(value):
                self._holders.append((path, value, spelled))
            live = live and not isinstance(value, FunctionalModel)
            for name, inner in _parts(value, spelled):
                place, names = f"{path}.{name}", spelled
                if isinstance(value, types.MethodType):
                    names = _spelled(value.__func__)
                if not isinstance(inner, types.CellType):
                    stack.append((place, inner, live, names))
                    continue
                if live:
                    self._holders.append((place, inner, None))
                stack += [(place, each, live, names) for each in _content(inner)]


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


def _plain(value: Any) -> str | None:
    """Return the text of a plain value; None of any other, and of a device's name."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return None
    if isinstance(value, Enum | torch.dtype):
        return str(value)
    if value is not None and not isinstance(
        value, bool | int | float | complex | str | bytes
    ):
        return None
    text = repr(value)
    if len(text) > 100:
        short = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        text = f"{text[:60]}... {short}"
    return text


def _parts(value: Any, spelled: Set[str] | None) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "function", value.func
        yield from _numbered(value.args)
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "function", value.__func__
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        if not _is_library(value.__module__):
            names = value.__code__.co_freevars
            yield from zip(names, value.__closure__ or (), strict=True)
            yield "defaults", value.__defaults__
            yield "keyword defaults", value.__kwdefaults__
            yield "code", value.__code__
    elif isinstance(value, types.CodeType):
        yield "constants", value.co_consts
        yield "names", value.co_names
    elif isinstance(value, Transform):
        yield from of_transform(value).items()
    elif isinstance(value, FunctionalModel):
        yield from value.named_modules()
    elif isinstance(value, Mapping | Sequence | Set):
        if len(value) > _LONGEST:
            return
        if isinstance(value, Mapping):
            for number, (key, each) in enumerate(value.items()):
                yield _plain(key) or str(number), each
        elif isinstance(value, Sequence):
            names = getattr(value, "_fields", None)
            yield from (
                _numbered(value) if names is None else zip(names, value, strict=True)
            )
        else:
            plain = (each for each in value if _plain(each) is not None)
            yield from _numbered(sorted(plain, key=repr))
    elif _is_object(value):
        yield from _attributes(value, spelled)
        if isinstance(value, nn.Module) and spelled is None:
            yield from value.named_children()


def _numbered(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(number), each) for number, each in enumerate(values))


def _attributes(value: Any, spelled: Set[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, without the ones that every module has."""
    for name, each in vars(value).items():
        if (spelled is None or name in spelled) and (
            name not in _MODULE or name == "training"
        ):
            yield name, each


def _spelled(function: Any) -> Set[str] | None:
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
    """Return whether a module belongs to torch, numpy or Python itself."""
    return (module or "").split(".")[0] in _LIBRARIES


def _is_object(value: Any) -> bool:
    """Return whether the attributes of an object count: it is no library's own."""
    if isinstance(
        value, type | types.ModuleType | types.FunctionType | FunctionalModel
    ):
        return False
    if isinstance(value, Transform | functools.partial | Mapping | Sequence | Set):
        return False
    if isinstance(value, nn.Module | types.SimpleNamespace):
        return True
    kind = type(value).__module__
    caches = kind.startswith(_CACHING) and kind != "vgrad.ensemble.optimizer"
    return hasattr(value, "__dict__") and not _is_library(kind) and not caches


def _name(value: Any) -> str:
    if isinstance(value, Mapping | Sequence | Set) and len(value) > _LONGEST:
        return f"{type(value).__qualname__} of {len(value)}"
    if isinstance(value, types.CodeType):
        return value.co_name
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    # Where processes are spawned, the main module has another name in them.
    module = str(getattr(named, "__module__", "")).replace("__mp_main__", "__main__")
    return f"{module}.{named.__qualname__}"


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []

"""What kinds of objects hold, whose code is a user's, and calls that cannot repeat."""

import abc
import datetime
import dis
import functools
import logging
import operator
import os
import random
import re
import sys
import sysconfig
import threading
import time
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable
from vgrad.torch_private.tensors import GRAPH, MEMORY, OPS

CACHE = type(functools.cache(len))

PARTS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    CACHE: ("__wrapped__",),
}
"""What is held by objects that do not show it in attributes of their own."""

CONSTANT = (
    *(*OPS, torch.jit.ScriptFunction, torch.finfo, torch.iinfo, np.ufunc),
    *(logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock())),
    *(operator.itemgetter, operator.attrgetter, types.GenericAlias, types.UnionType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.ClassMethodDescriptorType, type(vars(abc.ABC)["_abc_impl"])),
    *(type(vars(namedtuple("_", "item"))["item"]), TypeVar, ParamSpec),
)
"""Classes whose objects have no state that a result could depend on."""

RANDOM = getattr(random.random, "__self__", None)
"""Python's own generator, whose state is compared before and after a capture."""

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags `Py_TPFLAGS_...TYPE`: classes written in Python have the first one alone."""

_OPEN = {
    *(object, int, float, complex, str, bytes, tuple, frozenset, types.SimpleNamespace),
    *(dict, list, set, deque, OrderedDict, defaultdict, types.MappingProxyType),
}
"""Classes written in C that show all they hold."""


def is_open(kind: type) -> bool:
    """Tell whether objects of a class hold nothing but items and attributes."""
    if issubclass(kind, random.Random | threading.local):
        return False
    written = [each for each in kind.__mro__ if each not in _OPEN]
    shows = kind in _OPEN or kind.__dictoffset__ or any(map(_has_slots, written))
    return bool(shows) and all(map(may_change, written))


def may_change(kind: type) -> bool:
    """Tell whether a class can get other attributes, as all those of Python's can."""
    return kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP


def _has_slots(kind: type) -> bool:
    return "__slots__" in vars(kind)


def slots(kind: type) -> list[str]:
    """Name the attributes that objects of a class have outside of `__dict__`."""
    return [
        name
        for base in filter(_has_slots, kind.__mro__)
        for name, each in vars(base).items()
        if type(each) is types.MemberDescriptorType
    ]


def frozen(value: Any) -> Any:
    """Return what is followed of a container that may come to hold more."""
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list | set) else value


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without a call of its `__getattr__`."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


_SYSTEM = {"torch", "numpy", "vgrad", *sys.stdlib_module_names}

SYSTEM_PLACES = (
    *(str(Path(torch.__file__).parent), str(Path(np.__file__).parent)),
    *(str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]),
)


def is_users(module: str, file: str | None) -> bool:
    """Tell whether a module is neither Python's, torch's, numpy's nor this package's.

    It may have the name of one of these.
    """
    if module.startswith("namedtuple_") and file is None:  # made by Python
        return False
    if module.partition(".")[0] not in _SYSTEM:
        return True
    return os.path.isabs(file or "") and not str(file).startswith(SYSTEM_PLACES)


def file_of(code: types.CodeType, names: dict[str, Any]) -> str | None:
    """Return where code was written; what was made of text is its module's."""
    file = code.co_filename
    return names.get("__file__") if file.startswith("<") else file


def is_layers(code: types.CodeType) -> bool:
    """Return whether code is that of torch's layers and their functions."""
    return code.co_filename.startswith(_LAYERS)


_LAYERS = str(Path(torch.nn.__file__).parent)


def global_names(code: types.CodeType) -> list[str]:
    """Name the globals and builtins that code reads or sets.

    Example:
        >>> global_names(compile("abs(x.real)", "", "eval"))
        ['abs', 'x']
    """
    found = (each for each in dis.get_instructions(code) if each.opname in _GLOBAL)
    return [*dict.fromkeys(each.argval for each in found)]


_GLOBAL = {name for name in dis.opmap if name.endswith(("_GLOBAL", "_GLOBALS"))}
_GLOBAL |= {"LOAD_NAME", "STORE_NAME", "DELETE_NAME"}


def imported_names(code: types.CodeType) -> list[str]:
    """Name the modules that code imports, relative ones with their dots.

    Example:
        >>> imported_names(compile("import os.path; from ..a import b", "", "exec"))
        ['os.path', '..a']
    """
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    return [
        "." * steps[at - 2].argval + each.argval  # after the level and the names
        for at, each in enumerate(steps)
        if each.opname == "IMPORT_NAME"
    ]


_SEEDS = {"manual_seed", "seed", "set_state"}

_STATES = {"initial_seed", "get_state"}

_CLOCKS = {
    *(time.time, time.time_ns, time.perf_counter, time.perf_counter_ns),
    *(time.monotonic, time.monotonic_ns, time.process_time, time.process_time_ns),
    *(time.thread_time, time.thread_time_ns, time.localtime, time.gmtime, time.ctime),
    *(time.strftime, time.asctime, datetime.date.today),
    *(datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today),
}

_MEMORY = {"storage_offset", "untyped_storage", "is_set_to", "_is_view"}
"""What differs between tensors that are alike to a graph; this package asks, too."""

_GRAPH = {"grad", "grad_fn", "is_leaf", "output_nr", "retains_grad", "names", "name"}
_READ = {
    getattr(Tensor, name).__get__: name
    for name in (*_GRAPH, *GRAPH, *MEMORY)
    if hasattr(Tensor, name)
}
"""The same, and what changes with a graph, by the calls that read attributes."""

_DOUBTFUL = {"urandom", "_getframe", "__import__", *_SEEDS, *_STATES, *_MEMORY}
_DOUBTFUL |= {each.__name__ for each in _CLOCKS}


def check_call(called: Any, frame: types.FrameType) -> None:
    """Refuse calls of C whose results no value that could be noted decides."""
    if called.__name__ not in _DOUBTFUL:  # cheap, as most are asked no more
        return
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator):
        if called.__name__ in _SEEDS:
            raise Unrepeatable("it sets the seed or the state of a generator of torch")
        while frame.f_back and frame.f_code.co_filename.endswith(_RANDOM):
            frame = frame.f_back  # torch's functions of the same name
    if called is os.urandom:
        raise Unrepeatable("it draws random numbers from the operating system")
    if not _is_users(frame):
        return
    if called in _CLOCKS:
        raise Unrepeatable("it asks for the time")
    if isinstance(owner, torch.Generator):
        raise Unrepeatable("it reads the seed or the state of a generator of torch")
    if isinstance(owner, Tensor) and called.__name__ in _MEMORY:
        raise Unrepeatable(f"it asks a tensor for its memory ({called.__name__})")
    if called in (sys._getframe, __import__):
        raise Unrepeatable(f"it calls {called.__name__}, which finds any variable")


_RANDOM = f"{os.sep}random.py"


def check_read(frame: types.FrameType) -> None:
    """Refuse attributes of tensors whose values no graph keeps; a mode sees them."""
    name = _READ.get(frame.f_locals.get("func"))
    if name is not None and frame.f_back is not None and _is_users(frame.f_back):
        raise Unrepeatable(f"it reads `.{name}` of a tensor")


def _is_users(frame: types.FrameType) -> bool:
    code, names = frame.f_code, frame.f_globals
    return is_users(names.get("__name__", ""), file_of(code, names))

"""The closure of a function: values that a graph bakes in, and tensors that it reads.

One walk follows all that a function and the code that ran in eager mode can reach. Of
modules, and of classes of torch and Python, it follows the names in that code; modules
of users are compared whole where it computes names (`getattr`, `vars`).
"""

import abc
import builtins
import datetime
import dis
import functools
import gc
import importlib
import inspect
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
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vgrad import ops
from vgrad.compiled.guards import (
    CACHE,
    GONE,
    INNER,
    Guards,
    attributes,
    is_plain,
    parts,
    unset,
)
from vgrad.conditions import Unrepeatable
from vgrad.functional.slots import Placeholder
from vgrad.torch_private.control import as_written
from vgrad.torch_private.tensors import GLOBAL_HOOKS, OPS, TensorGuards

# Code.


class Code(NamedTuple):
    """Code that ran, and the variables that it names."""

    code: types.CodeType
    variables: dict[str, Any]
    builtins: dict[str, Any]

    @property
    def origin(self) -> str:
        """The author of the code."""
        file = self.code.co_filename
        if file.startswith("<"):  # it was made of text
            file = self.variables.get("__file__")
        return _origin(self.variables.get("__name__", ""), file)

    @property
    def names(self) -> set[str]:
        """All names in the code, and texts that may be names."""
        texts = (each for each in self.code.co_consts if type(each) is str)
        return {*self.code.co_names, *texts}

    def named(self) -> tuple[list[str], list[str]]:
        """Return the globals that the code names, and the modules that it imports."""
        variables, modules, level = {}, {}, 0
        for step in dis.get_instructions(self.code):
            name = step.argval
            if step.opname.endswith(_GLOBAL):
                variables[name] = None
            elif step.opname == "IMPORT_NAME":
                package = self.variables.get("__package__")
                if level and package:
                    name = resolve_name("." * level + name, package)
                if package or not level:  # others fail
                    modules[name] = None
            elif step.opname.startswith("LOAD_") and type(name) is int:
                level = name
        return [*variables], [*modules]


_GLOBAL = "_GLOBAL", "_GLOBALS", "LOAD_NAME", "STORE_NAME", "DELETE_NAME"


@contextmanager
def code_that_runs() -> Iterator[dict[Any, Code]]:
    """Collect the code of Python that runs in a block, backward passes included.

    Code of modules that are imported for the first time does not count.
    """
    ran: dict[Any, Code] = {}
    importing = 0

    def collect(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal importing
        code, variables = frame.f_code, frame.f_globals
        if code.co_name == "_find_and_load":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing:  # equal code may name other globals
            ran[id(code), id(variables)] = Code(code, variables, frame.f_builtins)

    around, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # which may call code that is not the function's
    try:
        with torch.autograd.set_multithreading_enabled(False):
            sys.setprofile(collect)
            yield ran
    finally:
        sys.setprofile(around if callable(around) else None)
        if around is not None and not callable(around):
            around.enable()  # cProfile's, which is no function
        if collects:
            gc.enable()


# The authors of code and of classes.

_USERS, _INSTALLED, SYSTEM = "users", "installed", "system"

SYSTEM_PLACES = (
    *(str(Path(torch.__file__).parent), str(Path(np.__file__).parent)),
    *(str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]),
)
_SYSTEM_NAMES = {"torch", "numpy", "vgrad", *sys.stdlib_module_names}

_LAYERS = str(Path(torch.nn.__file__).parent)
"""The layers of torch, and their functions."""


def _origin(module: str, file: str | None) -> str:
    """Return the author of a module: others may have the names of Python's."""
    if module.partition(".")[0] in _SYSTEM_NAMES:
        if not os.path.isabs(file or "") or str(file).startswith(SYSTEM_PLACES):
            return SYSTEM
    if module.startswith("namedtuple_") and file is None:  # made by Python
        return SYSTEM
    return _INSTALLED if "site-packages" in str(file) else _USERS


def _origin_of(value: Any) -> str:
    """Return the author of a function, a module, a class, or of an object's class."""
    if isinstance(value, types.FunctionType):
        return Code(value.__code__, value.__globals__, {}).origin
    if isinstance(value, types.ModuleType):
        return _origin(value.__name__, vars(value).get("__file__"))
    module = (value if isinstance(value, type) else type(value)).__module__
    return _origin(module, getattr(sys.modules.get(module), "__file__", None))


def _replaces(value: Any) -> bool:
    """Return whether a part of torch or Python may be a replacement by users.

    Modules and classes are followed for the parts of theirs that code names.
    """
    shown = type | types.ModuleType | functools.partial
    return isinstance(value, shown) or _origin_of(value) != SYSTEM


# The walk.


class Closure:
    """The closure of a function, followed to its end.

    An object whose values cannot be compared, or a function that reads the time, seeds
    or variables of any name, raises `Unrepeatable` where it is reached strictly, which
    is from users. Such objects of installed packages are taken to stay as they are; so
    are all objects of torch, numpy and Python, files, and the caches of this package.

    Attributes:
        guards: all values as they are.
        tensors: by id.
    """

    def __init__(self, function: Any, ran: Iterable[Code]) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._holders: list[Any] = []
        self._entries: dict[tuple, tuple] = {}
        self._calls: dict[tuple, tuple] = {}
        self._left: list[tuple[Any, str, bool]] = []
        # Dictionaries of which only entries that code names are followed, and objects,
        # which are kept, so that no other gets their ids; and whether strictly.
        self._seen = {id(x): (x, True) for x in (vars(builtins), sys.modules)}
        self._modules: list[types.ModuleType] = []  # of users
        self._computes_names = False
        self._names: dict[str, bool] = {}  # whether code of users has them
        ran = [
            each
            for each in ran
            if each.origin != SYSTEM or each.code.co_filename.startswith(_LAYERS)
        ]
        for each in ran:
            strict = each.origin == _USERS
            self._names |= {n: strict or self._names.get(n, False) for n in each.names}
        for each in ran:
            self._follow_code(each)
        rules = (*((op.recorded, op.rule) for op in ops.OPS.values()),)
        for value in (function, Tensor, rules, GLOBAL_HOOKS):
            self._add(value, "the function")
        while self._left or (self._modules and self._computes_names):
            if self._left:
                self._follow(*self._left.pop())
            else:
                module = self._modules.pop()
                self._follow_variables(vars(module), module.__name__)
        reads = self._entries.values(), self._calls.values()
        self.guards = Guards(self._holders, *reads, self.tensors)

    def _add(self, value: Any, path: str, strict: bool = True) -> None:
        if not is_plain(value):
            self._left.append((value, path, strict))

    def _note(self, holder: dict[Any, Any], name: Any) -> None:
        """Compare an entry of a dictionary, or that there is none."""
        self._entries[id(holder), name] = holder, name, GONE

    def _note_call(self, function: Any, *arguments: Any) -> None:
        self._calls[id(function), *map(id, arguments)] = function, *arguments

    def _follow(self, value: Any, path: str, strict: bool) -> None:
        """Note the parts of an object, and add them to the objects to follow."""
        value = as_written(value)  # which runs in a loss
        if strict:
            _check(value, path)
        _, before = self._seen.get(id(value), (None, None))
        if before or before is strict:
            return
        self._seen[id(value)] = value, strict
        kind = type(value)
        if isinstance(value, Tensor):
            if not isinstance(value, Placeholder):  # of an argument of a model
                self.tensors[id(value)] = value
            self._add(vars(value), path)
        elif isinstance(value, np.ndarray):
            if value.nbytes > _MOST_BYTES or value.dtype.hasobject:
                raise Unrepeatable(
                    f"it closes over an array of numpy with {value.nbytes} bytes, "
                    f"which are too many to compare. Make it a tensor"
                )
            self._note_call(_copy, value)
        elif isinstance(value, types.ModuleType):
            if _origin_of(value) == _USERS:
                self._note_call(len, vars(value))
                self._modules.append(value)
            self._follow_names(value)
        elif isinstance(value, type):
            self._follow_class(value)
        elif isinstance(value, _CONSTANT) or value is _RANDOM:
            self._computes_names |= isinstance(value, operator.attrgetter)
        elif kind in INNER or _is_open(kind):
            self._follow_parts(value, path, strict)
        elif strict:
            raise Unrepeatable(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, whose values "
                f"cannot be compared"
            )

    def _follow_parts(self, value: Any, path: str, strict: bool) -> None:
        kind, origin = type(value), _origin_of(value)
        if kind.__module__ == "vgrad.compiled.captures":
            return
        if kind is types.BuiltinMethodType and value.__name__ in _COMPUTE_NAMES:
            self._computes_names = True
        if kind is CACHE:  # it may come to have more entries
            for part in gc.get_referents(value):
                entries = part if type(part) is dict else {}
                for key in entries:
                    self._note(entries, key)
                for each in entries.values() if entries else (part,):
                    if type(each).__name__ != "_lru_list_elem":  # of a part beside
                        self._add(each, path, strict)
            return
        own = kind.__module__.startswith("vgrad.")  # it changes nothing but its caches
        if not own and not (kind is types.FunctionType and origin == SYSTEM):
            in_torch = kind.__module__.startswith("torch.")
            strict &= not in_torch or isinstance(value, nn.Module)
            strict |= origin == _USERS
            if kind not in _FIXED:
                self._holders.append(value)
            if kind.__dictoffset__:
                self._holders.append(attributes(value))
            if unset(value):
                self._note_call(unset, value)
            if isinstance(value, types.FunctionType):
                self._holders += value.__closure__ or ()
            if _may_change(kind):
                self._add(kind, path, False)
        for name, part in parts(value):
            if own and isinstance(part, dict | list | set):  # which may come to grow
                part = tuple(part.values() if isinstance(part, dict) else part)
            self._add(part, f"{path}.{name}", strict)

    def _follow_code(self, code: Code) -> None:
        """Follow the globals and builtins that code names, and modules it imports."""
        strict, variables = code.origin == _USERS, code.variables
        named, modules = code.named()
        if code.origin == SYSTEM:  # of which functions and modules can be replaced
            values = ((name, variables.get(name)) for name in named)
            named = [n for n, x in values if callable(x) or type(x) is types.ModuleType]
        for name in named:
            holder = variables if name in variables else code.builtins
            value = holder.get(name)
            self._note(variables, name)
            self._note(holder, name)
            if code.origin != SYSTEM or _replaces(value):
                self._add(value, f"the global {name!r}", strict)
            if strict and value is builtins.globals:
                self._follow_variables(variables, "globals()")
        for module in modules:
            packages = module.split(".")
            names = (".".join(packages[: n + 1]) for n in range(len(packages)))
            for name in names:
                self._note(sys.modules, name)
                self._add(sys.modules.get(name), name, strict)
        if not code.names.isdisjoint(("environ", "getenv")):
            self._add(os.environ, "os.environ", strict)
        self._computes_names |= strict and not code.names.isdisjoint(_COMPUTE_NAMES)

    def _follow_names(self, holder: type | types.ModuleType) -> None:
        """Follow the parts of a module or a class of the system that code names."""
        found, origin = _names_of(holder), _origin_of(holder)
        names = found.keys() & self._names.keys()
        if holder is Tensor:  # whose operators have no names in code
            names |= {name for name in found if name.startswith("__")}
        if isinstance(holder, types.ModuleType) and origin != SYSTEM:
            names.add("__getattr__")
            if origin == _USERS:
                names |= self._names.keys()  # of which some may come to be there
        for name in names:
            if holder is nn.Module and name in ("__call__", "__getattr__"):
                continue  # a trace replaces them; the signature has them
            value, path = found.get(name), f"{holder.__name__}.{name}"
            if isinstance(holder, types.ModuleType) or _may_change(holder):
                self._note(found, name)
            if origin != SYSTEM or _replaces(value):
                self._add(value, path, origin == _USERS)
            if self._names.get(name):
                _check(value, path)

    def _follow_variables(self, variables: dict[str, Any], path: str) -> None:
        """Follow all variables of a module, which code may name by any text."""
        for name in [each for each in variables if not each.startswith("__")]:
            self._note(variables, name)
            if _refusal(variables[name]) is None:  # which that code hardly calls
                self._add(variables[name], f"{path}.{name}")

    def _follow_class(self, kind: type) -> None:
        """Follow the attributes of a class written by users, and its bases."""
        if isinstance(kind, abc.ABCMeta):  # which all share their registrations
            self._note_call(abc.get_cache_token)
        for each in (*kind.__bases__, type(kind)):
            self._add(each, kind.__name__, False)
        origin, found = _origin_of(kind), _names_of(kind)
        if origin == SYSTEM:
            if _may_change(kind):
                self._note_call(len, found)
            self._follow_names(kind)
            return
        self._holders += kind, found
        for name, value in found.items():
            self._add(value, f"{kind.__name__}.{name}", origin == _USERS)


def _names_of(holder: type | types.ModuleType) -> dict[str, Any]:
    """Return the dictionary of a module or a class itself."""
    found = vars(holder)
    return found if type(found) is dict else gc.get_referents(found)[0]


_MOST_BYTES = 2**14
"""Of an array whose values are compared, which takes about a microsecond."""


def _copy(array: np.ndarray) -> tuple:
    return array.shape, array.dtype, array.tobytes()


# Kinds of objects.

_CONSTANT = (
    *(*OPS, torch.jit.ScriptFunction, torch.finfo, torch.iinfo, np.ufunc, TensorGuards),
    *(logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock())),
    *(operator.itemgetter, operator.attrgetter, types.GenericAlias, types.UnionType),
    *(types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.ClassMethodDescriptorType, type(vars(abc.ABC)["_abc_impl"])),
    *(type(vars(namedtuple("_", "item"))["item"]), TypeVar, ParamSpec),
)
"""Classes whose objects have no state that a result could depend on."""

_OPEN = {
    *(object, int, float, complex, str, bytes, tuple, frozenset, types.SimpleNamespace),
    *(dict, list, set, deque, OrderedDict, defaultdict, types.MappingProxyType),
    weakref.ref,
}
"""Classes written in C whose contents are all visible."""

_FIXED = {
    *(tuple, slice, types.MethodType, types.BuiltinMethodType),
    types.MethodWrapperType,
}
"""Classes whose objects keep the parts that they have."""

_RANDOM = getattr(random.random, "__self__", None)
"""Python's own generator, whose state is compared before and after a capture."""

_METHODS = types.FunctionType, types.MethodDescriptorType

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags `Py_TPFLAGS_...TYPE`: classes written in Python have the first one alone."""


def _is_open(kind: type) -> bool:
    """Return whether objects of a class have nothing but items and attributes."""
    if issubclass(kind, random.Random | threading.local):
        return False
    written = [each for each in kind.__mro__ if each not in _OPEN]
    slotted = any("__slots__" in vars(each) for each in written)
    visible = kind in _OPEN or kind.__dictoffset__ or slotted
    return bool(visible) and all(map(_may_change, written))


def _may_change(kind: type) -> bool:
    """Return whether a class can get other attributes, as any written in Python can."""
    return kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP


# Functions whose results no value that could be noted decides.

_COMPUTE_NAMES = {"__dict__", "__getattribute__", "attrgetter", "delattr", "dir"}
_COMPUTE_NAMES |= {"format", "format_map", "getattr", "getattr_static", "getmembers"}
_COMPUTE_NAMES |= {"hasattr", "setattr", "vars"}
"""Functions and attributes that find attributes of modules by any text."""

_CLOCKS = "time perf_counter monotonic process_time thread_time".split()
_CLOCKS += [f"{name}_ns" for name in _CLOCKS]
_CLOCKS += "localtime gmtime ctime strftime asctime".split()
_SEEDS = "fork_rng manual_seed seed initial_seed get_rng_state set_rng_state".split()
_SEEDS += [*(f"{name}_all" for name in _SEEDS), "thread_safe_generator"]
_CALLS: tuple[tuple[str, Any, list[str]], ...] = (
    ("reads the time", time, _CLOCKS),
    ("reads the time", datetime.date, ["today"]),
    ("reads the time", datetime.datetime, ["now", "today", "utcnow"]),
    ("draws random numbers from the operating system", os, ["urandom"]),
    ("draws random numbers from the operating system", random, ["SystemRandom"]),
    ("finds variables of any name", sys, ["_getframe"]),
    ("finds variables of any name", builtins, ["__import__"]),
    ("finds variables of any name", importlib, ["import_module"]),
    *(
        ("sets or reads the seed or the state of a generator of torch", owner, _SEEDS)
        for owner in (torch.random, torch.cuda, torch.xpu, torch.mps, torch.mtia)
    ),
)
_REFUSED = {
    function: reason
    for reason, owner, names in _CALLS
    for name in names
    for function in (getattr(owner, name, None), vars(owner).get(name))
    if function is not None  # of a class there are two, bound and in its dictionary
}


def _refusal(value: Any) -> str | None:
    """Return why a graph cannot repeat calls of a function, None if it can."""
    if value is sys.modules:
        return "leads to any module"
    if isinstance(value, types.FunctionType):
        value = inspect.unwrap(value)  # torch wraps some when Dynamo is imported
    kinds = type, types.ClassMethodDescriptorType, types.BuiltinMethodType
    return _REFUSED.get(value) if isinstance(value, (*kinds, *_METHODS)) else None


def _check(value: Any, path: str) -> None:
    reason = _refusal(value)
    if reason is not None:
        name = getattr(value, "__qualname__", "sys.modules")
        raise Unrepeatable(f"it can call {path}, and {name} {reason}")

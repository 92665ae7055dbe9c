"""The closure of a function: values that a graph bakes in, and tensors that it reads.

A graph repeats what Python did while it was captured. One walk follows all that a
function can reach: closures, default arguments, `functools.partial`, attributes and
items of objects, attributes of tensors, and of the code that ran in eager mode the
globals, builtins and imported modules that it names. Modules, and classes of torch and
Python, are followed by the names in that code; modules of users are compared whole
where it computes names (`getattr`, `vars`). Plain values are compared at each call.
Tensors are inputs of the graph: which tensor it is, and its shape, are compared.

An object whose values cannot be compared, or a function that reads the time, seeds or
variables of any name, is `Unrepeatable`. In code of installed packages such objects are
taken to stay as they are, and so are all other code and objects of torch, numpy and
Python itself, files, and the caches of objects of this package.
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vgrad import ops
from vgrad.compiled.guards import Guards, contents, is_plain
from vgrad.conditions import Unrepeatable
from vgrad.functional.model import FunctionalModel
from vgrad.functional.slots import Placeholder
from vgrad.torch_private.tensors import GLOBAL_HOOKS, OPS, TensorGuards, registered


class Code(NamedTuple):
    """Code that ran, and the variables that it names."""

    code: types.CodeType
    variables: dict[str, Any]
    builtins: dict[str, Any]


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


class Closure:
    """The closure of a function, followed to its end.

    Attributes:
        guards: all values as they are.
        tensors: by id.
    """

    def __init__(self, function: Any, ran: Iterable[Code]) -> None:
        self.guards = Guards()
        self.tensors: dict[int, Tensor] = {}
        self._left: list[tuple[Any, str, bool]] = []
        self._seen: dict[int, Any] = {id(each): each for each in _NAMED_ALONE}
        self._names: dict[str, bool] = {}  # whether code of users names them
        self._classes: dict[int, type] = {}
        self._holders: list[type | types.ModuleType] = []
        self._computes_names = False
        self._modules: list[types.ModuleType] = []
        for each in ran:
            self._follow_code(*each)
        self._add(function, "the function")
        self._follow_class(Tensor)
        for op in ops.OPS.values():
            rule = op.rule and (op.rule.run, op.rule.factors)
            self._add((op.recorded, rule), "a rule")
        for hooks in GLOBAL_HOOKS:
            self._add(hooks, "a hook of all modules")
        while self._left or (self._modules and self._computes_names):
            if self._left:
                self._follow(*self._left.pop())
            else:
                module = self._modules.pop()
                self._follow_variables(vars(module), module.__name__)

    def _add(self, value: Any, path: str, strict: bool = True) -> None:
        """Add an object to follow; one that cannot be compared raises if `strict`."""
        if not is_plain(value):
            self._left.append((value, path, strict))

    def _follow(self, value: Any, path: str, strict: bool) -> None:
        """Note the contents of an object, and add them to the objects to follow."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept, so that no other gets its id
        kind = type(value)
        if strict:
            _check(value, path)
        if isinstance(value, Tensor):
            if not isinstance(value, Placeholder):  # of an argument of a model
                self.tensors[id(value)] = value
                self.guards.note_tensor(value)
                self._add(vars(value), path)
        elif kind in _PARTS:
            for name in _PARTS[kind]:
                self._add(getattr(value, name), path, strict)
            if kind is types.FunctionType:
                self._follow_function(value, path, strict)
            elif kind is functools.partial:
                self.guards.note_attributes(value, "func", "args", "keywords")
            elif kind is _CACHE:
                self._follow_cache(value, path, strict)
            elif getattr(value, "__name__", None) in _COMPUTE_NAMES:
                self._computes_names = True
        elif isinstance(value, np.ndarray):
            self.guards.note_array(value)
        elif isinstance(value, weakref.ref):
            self._add(value(), path, strict)
        elif isinstance(value, FunctionalModel):
            self._follow_model(value, path)
        elif isinstance(value, types.ModuleType):
            self._follow_module(value)
        elif isinstance(value, type):
            self._follow_class(value)
        elif isinstance(value, _CONSTANT) or value is _RANDOM:
            self._computes_names |= isinstance(value, operator.attrgetter)
        elif _is_open(kind):
            self._follow_items(value, path, strict)
            self._follow_object(value, path, strict)
        elif strict:
            raise Unrepeatable(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, whose values "
                f"cannot be compared"
            )

    # Functions, and the names in their code.

    def _follow_function(
        self, function: types.FunctionType, path: str, strict: bool
    ) -> None:
        code, variables = function.__code__, function.__globals__
        cells = function.__closure__ or ()
        origin = _origin_of(variables.get("__name__", ""), _file_of(code, variables))
        strict |= origin == _USERS
        for name, value in zip(code.co_freevars, contents(cells), strict=True):
            self._add(value, f"{name!r} in {function.__name__}", strict)
        if origin == _SYSTEM:
            self._add(vars(function).get("__wrapped__"), path, strict)
        else:
            self.guards.note_cells(cells)  # which other code does not set
            parts = "__code__", "__defaults__", "__kwdefaults__"
            self.guards.note_attributes(function, *parts)
            self._add(vars(function), path, strict)

    def _follow_cache(self, cache: Any, path: str, strict: bool) -> None:
        """Follow the entries of `functools.cache`; it may come to have more."""
        for each in gc.get_referents(cache):
            for value in each.values() if type(each) is dict else (each,):
                if type(value).__name__ != "_lru_list_elem":  # which has another entry
                    self._add(value, path, strict)
        function = cache.__wrapped__
        if isinstance(function, types.FunctionType):  # which need not run
            code, variables = function.__code__, function.__globals__
            self._follow_code(code, variables, function.__builtins__)

    def _follow_code(
        self, code: types.CodeType, variables: dict[str, Any], named: dict[str, Any]
    ) -> None:
        """Note the globals and builtins that code names, and the modules it imports."""
        origin = _origin_of(variables.get("__name__", ""), _file_of(code, variables))
        strict, system = origin == _USERS, origin == _SYSTEM
        if system and not code.co_filename.startswith(_LAYERS):
            return
        used = global_names(code)
        if system:  # of which functions, classes and modules can be replaced
            values = ((name, variables.get(name)) for name in used)
            used = [n for n, x in values if callable(x) or type(x) is types.ModuleType]
        self.guards.note_entries(variables, used)
        hidden = [name for name in used if name not in variables]
        self.guards.note_entries(named, hidden)
        for name in used:
            value = (variables if name in variables else named).get(name)
            if not system or _replaces(value):
                self._add(value, f"the global {name!r}", strict)
            if strict and value is builtins.globals:
                self._follow_variables(variables, "globals()")
        for name in imported_names(code):
            self._follow_import(name, variables.get("__package__"), strict)
        names = {*code.co_names, *(x for x in code.co_consts if type(x) is str)}
        if "environ" in names or "getenv" in names:
            self._add(os.environ, "os.environ", strict)
        self._computes_names |= strict and not names.isdisjoint(_COMPUTE_NAMES)
        new = {x: strict for x in names if strict > self._names.get(x, -1)}
        self._names |= new
        for holder in self._holders:
            self._follow_names(holder, new)

    def _follow_import(self, name: str, package: Any, strict: bool) -> None:
        """Note a module that is imported, and its packages."""
        if name.startswith("."):
            name = resolve_name(name, package)
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            self.guards.note_entries(sys.modules, [path])
            self._add(sys.modules.get(path), path, strict)

    # Modules and classes, by the names in code.

    def _follow_module(self, module: types.ModuleType) -> None:
        variables = vars(module)
        origin = _origin_of(module.__name__, variables.get("__file__"))
        if origin != _SYSTEM:
            self.guards.note_entries(variables, ["__getattr__"])
            path = f"{module.__name__}.__getattr__"
            self._add(variables.get("__getattr__"), path, origin == _USERS)
        if origin == _USERS:
            self.guards.note_size(variables)
            self._modules.append(module)
        self._holders.append(module)
        self._follow_names(module, self._names)

    def _follow_names(
        self, holder: type | types.ModuleType, names: Mapping[str, bool]
    ) -> None:
        """Note the parts of a module or class that code names."""
        parts = vars(holder)
        module = holder.__module__ if isinstance(holder, type) else holder.__name__
        origin = _origin_of(module, parts.get("__file__"))
        for name in parts.keys() & names.keys():
            value, path = parts[name], f"{holder.__name__}.{name}"
            if isinstance(holder, types.ModuleType):
                self.guards.note_entries(parts, [name])
            elif holder is nn.Module and name in _TRACED:
                continue
            elif isinstance(value, _METHODS) and _may_change(holder):
                self.guards.note_attributes(holder, name)  # others are bound each time
            if origin == _USERS or _replaces(value):
                self._add(value, path, origin == _USERS)
            elif names[name]:
                _check(value, path)

    def _follow_variables(self, variables: dict[str, Any], path: str) -> None:
        """Note all variables of a module, which code may name by any text."""
        names = [name for name in variables if not name.startswith("__")]
        self.guards.note_entries(variables, names)
        for name in names:
            if _refusal(variables[name]) is None:  # which that code hardly calls
                self._add(variables[name], f"{path}.{name}")

    def _follow_class(self, kind: type) -> None:
        """Follow the attributes of a class written by users, and of its bases."""
        if isinstance(kind, abc.ABCMeta):
            self.guards.note_registrations()
        for each in (*kind.__mro__, *type.mro(type(kind))):
            if id(each) in self._classes:
                continue
            self._classes[id(each)] = each
            origin = _origin_of(each.__module__, _file_of_module(each.__module__))
            if origin != _SYSTEM:
                self.guards.note(vars(each))
                for name, value in vars(each).items():
                    self._add(value, f"{each.__name__}.{name}", origin == _USERS)
                continue
            self._holders.append(each)
            names = self._names
            if _may_change(each):
                self.guards.note_size(vars(each))
            if each is Tensor:  # whose operators have no names in code
                operators = (name for name in vars(each) if name.startswith("__"))
                names = {**dict.fromkeys(operators, False), **names}
            self._follow_names(each, names)

    # Objects.

    def _follow_model(self, model: FunctionalModel, path: str) -> None:
        """Follow a functional model but for the tensors that are its arguments."""
        self._add((*model.constants,), path)
        for name, module in model.named_modules():
            self._seen[id(module)] = module
            for tensors in registered(module)[:2]:
                self._seen[id(tensors)] = tensors
                for each in tensors.values():
                    self._add(vars(each) if each is not None else None, path)
            self._follow_object(module, f"{path}.{name}", strict=True)

    def _follow_items(self, value: Any, path: str, strict: bool) -> None:
        """Follow the entries of a container, if it is one."""
        kind = type(value)
        if strict and isinstance(value, dict | list | set | deque):
            base = next(x for x in kind.__mro__ if x.__module__ in _OF_CONTAINERS)
            views = "__iter__", "__len__", "keys", "values", "items"
            if any(getattr(kind, n, 0) is not getattr(base, n, 0) for n in views):
                raise Unrepeatable(
                    f"{path} is a {kind.__module__}.{kind.__qualname__}, which shows "
                    f"its entries in a way of its own"
                )
        if isinstance(value, dict | types.MappingProxyType):
            self.guards.note(value)
            for name, each in value.items():
                self._add(name, path, strict)
                self._add(each, f"{path}[{name!r}]", strict)
        elif isinstance(value, list | set | deque | tuple | frozenset):
            if not isinstance(value, tuple | frozenset):
                self.guards.note(value)
            for each in value:
                self._add(each, path, strict)
        if isinstance(value, defaultdict):
            self.guards.note_attributes(value, "default_factory")
            self._add(value.default_factory, path, strict)

    def _follow_object(self, value: Any, path: str, strict: bool) -> None:
        """Follow the attributes of an object, and its class.

        Objects of this package change nothing but their caches.
        """
        kind, attributes = type(value), _attributes(value)
        if kind.__module__.startswith("vgrad."):
            if kind.__module__ != "vgrad.compiled.captures":
                for name, each in attributes.items():
                    self._add(_frozen(each), f"{path}.{name}", strict)
            return
        if _origin_of(kind.__module__, _file_of_module(kind.__module__)) == _USERS:
            strict = True
        elif kind.__module__.startswith("torch.") and not isinstance(value, nn.Module):
            strict = False
        if _may_change(kind):
            self.guards.note_attributes(value, "__class__")
            self._follow_class(kind)
        if attributes or kind.__dictoffset__:
            self.guards.note(attributes)
        for name, each in attributes.items():
            self._add(each, f"{path}.{name}", strict)
        for name in _slots(kind):
            self.guards.note_attributes(value, name)
            self._add(getattr(value, name, None), f"{path}.{name}", strict)


# Kinds of objects.


_CACHE = type(functools.cache(len))

_OF_CONTAINERS = ("builtins", "collections")
"""Modules of containers whose entries Python shows as they are."""

_PARTS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    _CACHE: ("__wrapped__",),
}
"""Contents of objects that do not show them in attributes of their own."""

_CONSTANT = (
    *(*OPS, torch.jit.ScriptFunction, torch.finfo, torch.iinfo, np.ufunc, TensorGuards),
    *(logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock())),
    *(operator.itemgetter, operator.attrgetter, types.GenericAlias, types.UnionType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.ClassMethodDescriptorType, type(vars(abc.ABC)["_abc_impl"])),
    *(type(vars(namedtuple("_", "item"))["item"]), TypeVar, ParamSpec),
)
"""Classes whose objects have no state that a result could depend on."""

_OPEN = {
    *(object, int, float, complex, str, bytes, tuple, frozenset, types.SimpleNamespace),
    *(dict, list, set, deque, OrderedDict, defaultdict, types.MappingProxyType),
}
"""Classes written in C whose contents are all visible."""

_NAMED_ALONE = vars(builtins), sys.modules
"""Dictionaries that are only followed by the names in code."""

_RANDOM = getattr(random.random, "__self__", None)
"""Python's own generator, whose state is compared before and after a capture."""

_TRACED = {"__call__", "__getattr__"}
"""Methods of all modules that a trace replaces; the signature has them."""

_FUNCTIONS = types.FunctionType, types.BuiltinMethodType

_METHODS = types.FunctionType, types.MethodDescriptorType

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags `Py_TPFLAGS_...TYPE`: classes written in Python have the first one alone."""


def _is_open(kind: type) -> bool:
    """Return whether objects of a class have nothing but items and attributes."""
    if issubclass(kind, random.Random | threading.local):
        return False
    written = [each for each in kind.__mro__ if each not in _OPEN]
    visible = kind in _OPEN or kind.__dictoffset__ or any(map(_has_slots, written))
    return bool(visible) and all(map(_may_change, written))


def _may_change(kind: type) -> bool:
    """Return whether a class can get other attributes, as any written in Python can."""
    return kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP


def _has_slots(kind: type) -> bool:
    return "__slots__" in vars(kind)


def _slots(kind: type) -> list[str]:
    """Name the attributes that objects of a class have outside of `__dict__`."""
    return [
        name
        for base in filter(_has_slots, kind.__mro__)
        for name, each in vars(base).items()
        if type(each) is types.MemberDescriptorType
    ]


def _frozen(value: Any) -> Any:
    """Return the entries of a container that may come to have more."""
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list | set) else value


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _replaces(value: Any) -> bool:
    """Return whether a part of torch or Python may be a replacement by users.

    Modules and classes are followed for the parts of theirs that code names.
    """
    if isinstance(value, types.FunctionType):
        module, file = value.__module__ or "", value.__code__.co_filename
    elif isinstance(value, type | types.ModuleType | functools.partial):
        return True
    else:
        module = type(value).__module__
        file = _file_of_module(module)
    return _origin_of(module, file) != _SYSTEM


# Functions whose results no value that could be noted decides.


_COMPUTE_NAMES = {"__dict__", "__getattribute__", "attrgetter", "delattr", "dir"}
_COMPUTE_NAMES |= {"format", "format_map", "getattr", "getattr_static", "getmembers"}
_COMPUTE_NAMES |= {"hasattr", "setattr", "vars"}
"""Functions and attributes that find attributes of modules by any text."""


def _refused() -> Iterator[tuple[Any, str]]:
    text = "reads the time"
    names = "time perf_counter monotonic process_time thread_time".split()
    for name in (*names, *(f"{name}_ns" for name in names)):
        yield getattr(time, name), text
    for name in ("localtime", "gmtime", "ctime", "strftime", "asctime"):
        yield getattr(time, name), text
    for owner in (datetime.date, datetime.datetime):
        for name in vars(owner).keys() & {"now", "today", "utcnow"}:
            yield vars(owner)[name], text
            yield getattr(owner, name), text
    for module in (torch.random, torch.cuda.random):
        for name in module.__all__:
            yield (
                getattr(module, name),
                "sets or reads the seed or the state of a generator of torch",
            )
    yield os.urandom, "draws random numbers from the operating system"
    yield random.SystemRandom, "draws random numbers from the operating system"
    for function in (sys._getframe, builtins.__import__, importlib.import_module):
        yield function, "finds variables of any name"


_REFUSED = dict(_refused())


def _refusal(value: Any) -> str | None:
    """Return why a graph cannot repeat calls of a function, None if it can."""
    if value is sys.modules:
        return "leads to any module"
    if isinstance(value, types.FunctionType):
        value = inspect.unwrap(value)  # torch wraps some when Dynamo is imported
    kinds = type, types.ClassMethodDescriptorType, *_FUNCTIONS
    return _REFUSED.get(value) if isinstance(value, kinds) else None


def _check(value: Any, path: str) -> None:
    reason = _refusal(value)
    if reason is not None:
        name = getattr(value, "__qualname__", "sys.modules")
        raise Unrepeatable(f"it can call {path}, and {name} {reason}")


# Code of users, and the names in it.


_USERS, _INSTALLED, _SYSTEM = "users", "installed", "system"

SYSTEM_PLACES = (
    *(str(Path(torch.__file__).parent), str(Path(np.__file__).parent)),
    *(str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]),
)

_LAYERS = str(Path(torch.nn.__file__).parent)
"""The layers of torch, and their functions."""


def _origin_of(module: str, file: str | None) -> str:
    """Return whether a module is one of Python, torch, numpy or this package.

    Other modules may have the names of these.
    """
    if module.partition(".")[0] in {
        "torch",
        "numpy",
        "vgrad",
        *sys.stdlib_module_names,
    }:
        if not os.path.isabs(file or "") or str(file).startswith(SYSTEM_PLACES):
            return _SYSTEM
    if module.startswith("namedtuple_") and file is None:  # made by Python
        return _SYSTEM
    return _INSTALLED if "site-packages" in str(file) else _USERS


def is_code_of_users(code: types.CodeType, variables: dict[str, Any]) -> bool:
    """Return whether code is neither torch's, Python's nor this package's."""
    module = variables.get("__name__", "")
    return _origin_of(module, _file_of(code, variables)) != _SYSTEM


def _file_of(code: types.CodeType, variables: dict[str, Any]) -> str | None:
    """Return the file of code, or of its module if it was made of text."""
    file = code.co_filename
    return variables.get("__file__") if file.startswith("<") else file


def _file_of_module(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def global_names(code: types.CodeType) -> list[str]:
    """Name the globals and builtins that code reads or sets.

    Example:
        >>> global_names(compile("abs(x.real)", "", "eval"))
        ['abs', 'x']
    """
    steps = (each for each in dis.get_instructions(code) if each.opname in _GLOBAL)
    return [*dict.fromkeys(each.argval for each in steps)]


_GLOBAL = {name for name in dis.opmap if name.endswith(("_GLOBAL", "_GLOBALS"))}
_GLOBAL |= {"LOAD_NAME", "STORE_NAME", "DELETE_NAME"}


def imported_names(code: types.CodeType) -> list[str]:
    """Name the modules that code imports, relative ones with their dots.

    Example:
        >>> imported_names(compile("import os.path; from ..a import b", "", "exec"))
        ['os.path', '..a']
    """
    skipped = "CACHE", "EXTENDED_ARG"
    steps = [each for each in dis.get_instructions(code) if each.opname not in skipped]
    return [
        "." * steps[at - 2].argval + each.argval  # after the level and the names
        for at, each in enumerate(steps)
        if each.opname == "IMPORT_NAME"
    ]

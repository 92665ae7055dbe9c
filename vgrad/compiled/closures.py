"""The closure of a function: values that a graph bakes in, and tensors that it reads.

A graph repeats what Python did while it was captured. So every plain value that a loss
can reach (in closures, default arguments, `functools.partial`, attributes of objects,
classes and modules, globals of the functions that ran) is noted, and compared at each
call. Tensors are inputs of the graph, as they are at each call; which tensor it is, and
its shape, are noted.

Values are noted before the function runs, and globals before the first function runs
that names them, so that a change by the function itself is detected.

Attributes of modules are noted as they are read: while the function runs, each module
has a subclass of its class that observes them. Functions and methods of torch that the
function or the layers of torch name are noted too, since they can be replaced.

Not followed, and taken to stay as they are: all other code and objects of torch, numpy
and Python itself, files, and the caches of objects of this package. In other installed
packages, objects that cannot be compared are taken to stay as they are.
"""

import abc
import datetime
import dis
import functools
import gc
import importlib
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vgrad import ops
from vgrad.compiled.guards import Guards, contents, is_plain
from vgrad.conditions import Unrepeatable
from vgrad.functional.model import FunctionalModel
from vgrad.functional.slots import Placeholder
from vgrad.torch_private.tensors import (
    GLOBAL_HOOKS,
    GRAPH,
    MEMORY,
    OPS,
    TensorGuards,
    registered,
)

_CACHE = type(functools.cache(len))

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

_RANDOM = getattr(random.random, "__self__", None)
"""Python's own generator, whose state is compared before and after a capture."""

_LIBRARY = "in a library: "
"""The beginning of a path to an object of installed code.

An object that cannot be compared there (a registry, a key of a cache) is taken to stay
as it is.
"""

_TRACED = {"__call__", "__getattr__"}
"""Methods of all modules that a trace replaces; the signature has them."""

_METHODS = types.FunctionType, types.MethodDescriptorType

_IMPORT = importlib.import_module.__code__

_set = types.ModuleType.__setattr__


class Closed:
    """The closure of a function, followed to its end.

    Attributes:
        guards: all values, as they were before the function ran.
        tensors: by id.
    """

    def __init__(self, function: Any) -> None:
        """Follow a function; an object that can change unnoticed is `Unrepeatable`."""
        self.guards = Guards()
        self.tensors: dict[int, Tensor] = {}
        self._left: list[tuple[Any, str]] = [(function, "the function")]
        self._seen: dict[int, Any] = {}
        self._ran: dict[tuple[int, int], tuple[types.CodeType, dict]] = {}
        self._classes: set[type] = set()
        self._system: list[type | types.ModuleType] = []
        self._spelled: set[str] = set()
        self._modules: dict[int, tuple[types.ModuleType, type, dict, str]] = {}
        self._observed: dict[type, type] = {}
        self._running = self._following = False
        self._thread = threading.get_ident()
        self._error: Unrepeatable | None = None
        self._follow_class(Tensor, "a tensor")
        for op in ops.OPS.values():
            rule = op.rule and (op.rule.run, op.rule.factors)
            self._add((op.recorded, rule), "a rule")
        for hooks in GLOBAL_HOOKS:
            self._follow_items(hooks, "a hook of all modules")
        self._follow_all()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the names in functions that run in this block.

        At the end, `Unrepeatable` is raised if they did something that a graph does not
        repeat.
        """
        around, collecting = sys.getprofile(), gc.isenabled()
        gc.disable()  # which may call code that is not the function's
        self._running = True
        for module, *_ in [*self._modules.values()]:
            self._observe(module)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(around if callable(around) else None)
            self._running = False
            for module, kind, *_ in self._modules.values():
                _set(module, "__class__", kind)
            if around is not None and not callable(around):
                around.enable()  # cProfile's, which is no function
            if collecting:
                gc.enable()
        if self._error is not None:
            raise self._error
        if not self.guards.hold():
            raise Unrepeatable("it changes values that it closes over")
        if self.guards.written():
            raise Unrepeatable("it writes into a tensor that it closes over")

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Check a call before it happens; torch and Python make thousands."""
        try:
            if event == "call":
                code, names = frame.f_code, frame.f_globals
                ran = id(code), id(names)  # equal code may name other globals
                if ran not in self._ran:
                    self._ran[ran] = code, names
                    self._follow_names(code, names, frame.f_builtins)
                if code.co_name == "__torch_function__":
                    _check_read(frame)
                elif code is _IMPORT:
                    name, package = map(frame.f_locals.get, ("name", "package"))
                    self._follow_import(str(name), package)
                self._follow_all()
            elif event == "c_call":
                if called is globals:
                    self._add(frame.f_globals, "globals()")
                    self._follow_all()
                _check_call(called, frame)
        except Unrepeatable as error:  # raised here, the loss could catch it
            self._error = self._error or error

    def _add(self, value: Any, path: str) -> None:
        if not is_plain(value):
            self._left.append((value, path))

    def _add_all(self, values: Iterable[Any], path: str) -> None:
        for value in values:
            self._add(value, path)

    def _follow_all(self) -> None:
        self._following = True
        try:
            while self._left:
                self._follow(*self._left.pop())
        finally:
            self._following = False

    def _follow(self, value: Any, path: str) -> None:
        """Note the contents of an object, and add them to the objects to follow."""
        if is_plain(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept, so that no other gets its id
        kind = type(value)
        if isinstance(value, Placeholder):  # of an argument of a functional model
            return
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            self.guards.note_tensor(value)
            self._add(vars(value), path)
        elif kind in _PARTS:
            self._add_all([getattr(value, name) for name in _PARTS[kind]], path)
            if kind is types.FunctionType:
                self._follow_function(value, path)
            elif kind is _CACHE:
                self._follow_cache(value, path)
        elif isinstance(value, np.ndarray):
            self.guards.note_array(value)
        elif isinstance(value, weakref.ref):
            self._add(value(), path)
        elif isinstance(value, FunctionalModel):
            self._follow_model(value, path)
        elif isinstance(value, types.ModuleType):
            self._follow_module(value)
        elif isinstance(value, type):
            self._follow_class(value, path)
        elif isinstance(value, _CONSTANT) or value is _RANDOM:
            return
        elif _is_open(kind):
            self._follow_items(value, path)
            self._follow_object(value, path)
        elif not path.startswith(_LIBRARY):
            raise Unrepeatable(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, whose values "
                f"cannot be compared"
            )

    # Functions, and the names in their code.

    def _follow_function(self, function: types.FunctionType, path: str) -> None:
        code, names = function.__code__, function.__globals__
        cells = function.__closure__ or ()
        module, file = names.get("__name__", ""), _file_of(code, names)
        path = _left_library(path, module, file)
        library = _LIBRARY if path.startswith(_LIBRARY) else ""
        for name, value in zip(code.co_freevars, contents(cells), strict=True):
            self._add(value, f"{library}{name!r} in {function.__name__}")
        if _is_users(module, file):
            self.guards.note_cells(cells)  # which other code does not set
            parts = "__code__", "__defaults__", "__kwdefaults__"
            self.guards.note_attributes(function, *parts)
            self._add(vars(function), path)
        elif "__wrapped__" in vars(function):
            self._add(vars(function)["__wrapped__"], path)

    def _follow_cache(self, cache: Any, path: str) -> None:
        """Follow the entries of `functools.cache`; it may come to have more."""
        for each in gc.get_referents(cache):
            for value in each.values() if type(each) is dict else (each,):
                if type(value).__name__ != "_lru_list_elem":  # which has another entry
                    self._add(value, path)
        function = cache.__wrapped__
        if isinstance(function, types.FunctionType):  # which need not run
            code, names = function.__code__, function.__globals__
            self._follow_names(code, names, function.__builtins__)

    def _follow_names(
        self, code: types.CodeType, names: dict[str, Any], builtins: dict[str, Any]
    ) -> None:
        """Note the globals and builtins that code names, and the modules it imports."""
        users = _is_users(names.get("__name__", ""), _file_of(code, names))
        if not users and not code.co_filename.startswith(_LAYERS):
            return
        installed = not users or "site-packages" in code.co_filename
        library = _LIBRARY if installed else ""
        used = global_names(code)
        if not users:  # of which functions and classes can be replaced, or modules
            used = [
                name
                for name in used
                if callable(names.get(name))
                or isinstance(names.get(name), types.ModuleType)
            ]
        self.guards.note_entries(names, used)
        hidden = [name for name in used if name not in names]
        self.guards.note_entries(builtins, hidden)
        for name in used:
            value = (names if name in names else builtins).get(name)
            add = self._add if users else self._add_to_system
            add(value, f"{library}the global {name!r}")
        for name in imported_names(code):
            self._follow_import(name, names.get("__package__"))
        spelled = set(code.co_names) - self._spelled
        self._spelled |= spelled
        for kind in self._system:
            self._note_names(kind, spelled)
        if "environ" in spelled or "getenv" in spelled:
            self._add(os.environ, "os.environ")

    def _follow_import(self, name: str, package: Any) -> None:
        """Note a module that is imported, and its packages."""
        if name.startswith("."):
            name = resolve_name(name, package)
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            self.guards.note_entries(sys.modules, [path])
            self._add(sys.modules.get(path), path)

    # Torch, numpy and Python itself.

    def _note_names(
        self, holder: type | types.ModuleType, spelled: Iterable[str]
    ) -> None:
        """Note parts of torch's and Python's modules and classes that code names."""
        parts = vars(holder)
        for name in parts.keys() & spelled:
            if parts[name] is sys.modules:
                raise Unrepeatable("it reads sys.modules, which leads to any module")
            if isinstance(holder, types.ModuleType):
                self.guards.note_entries(parts, [name])
            elif name in _TRACED and holder is nn.Module:
                continue
            elif isinstance(parts[name], _METHODS):  # others are bound at each access
                self.guards.note_attributes(holder, name)
            self._add_to_system(parts[name], f"{_LIBRARY}{holder.__name__}.{name}")

    def _add_to_system(self, value: Any, path: str) -> None:
        """Follow replacements by users of parts of torch or Python; the rest stays.

        Modules and classes are followed, for the parts of theirs that code names.
        """
        if isinstance(value, types.FunctionType):
            users = _is_users(value.__module__ or "", value.__code__.co_filename)
        elif isinstance(value, type | types.ModuleType | functools.partial):
            users = True
        else:
            module = type(value).__module__
            users = _is_users(module, _file_of_module(module))
        if users:
            self._add(value, path)

    # Modules.

    def _follow_module(self, module: types.ModuleType) -> None:
        """Note attributes of a module: by name, or as they are read."""
        name, values = module.__name__, vars(module)
        if not _is_users(name, values.get("__file__")):
            self._system.append(module)
            self._note_names(module, self._spelled)
            return
        path = f"{_library_of(values.get('__file__'))}{name}"
        self._modules[id(module)] = module, type(module), values, path
        self.guards.note_entries(values, ["__getattr__"])
        self._add(values.get("__getattr__"), f"{path}.__getattr__")
        if self._running:
            self._observe(module)

    def _observe(self, module: types.ModuleType) -> None:
        """Note each attribute of a module from now on, before it is read or set."""
        _, kind, values, path = self._modules[id(module)]
        if kind not in self._observed:
            self._observed[kind] = _observed(kind, self._note_attribute)
        try:
            _set(module, "__class__", self._observed[kind])
        except TypeError:  # a class written in C, of which there are no others
            self._add(values, path)

    def _note_attribute(self, module: types.ModuleType, name: str) -> None:
        if self._following or threading.get_ident() != self._thread:
            return  # the walk itself reads some, and other threads run meanwhile
        _, _, values, path = self._modules[id(module)]
        if name == "__dict__":
            self._add(values, path)
        elif not name.startswith("__"):
            self.guards.note_entries(values, [name])
            self._add(values.get(name), f"{path}.{name}")
        try:
            self._follow_all()
        except Unrepeatable as error:
            self._error = self._error or error

    # Objects and classes.

    def _follow_model(self, model: FunctionalModel, path: str) -> None:
        """Follow a functional model but for the tensors that are its arguments."""
        self._add_all(model.constants, path)
        for name, module in model.named_modules():
            self._seen[id(module)] = module
            for tensors in registered(module)[:2]:
                self._seen[id(tensors)] = tensors
                attributes = (
                    vars(each) for each in tensors.values() if each is not None
                )
                self._add_all(attributes, path)
            self._follow_object(module, f"{path}.{name}")

    def _follow_items(self, value: Any, path: str) -> None:
        """Follow the entries of a container, if it is one."""
        if isinstance(value, dict | types.MappingProxyType):
            self.guards.note(value)
            self._add_all(value, path)
            for name, each in value.items():
                self._add(each, f"{path}[{name!r}]")
        elif isinstance(value, list | set | deque | tuple | frozenset):
            if not isinstance(value, tuple | frozenset):
                self.guards.note(value)
            self._add_all(value, path)
        if isinstance(value, defaultdict):
            self.guards.note_attributes(value, "default_factory")
            self._add(value.default_factory, path)

    def _follow_object(self, value: Any, path: str) -> None:
        """Follow the attributes of an object, and its class.

        Objects of this package change nothing but their caches.
        """
        kind, attributes = type(value), _attributes(value)
        if kind.__module__.startswith("vgrad."):
            if kind.__module__ != "vgrad.compiled.captures":
                for name, each in attributes.items():
                    self._add(_frozen(each), f"{path}.{name}")
            return
        if kind.__module__.startswith("torch.") and not isinstance(value, nn.Module):
            path = _LIBRARY + path
        path = _left_library(path, kind.__module__, _file_of_module(kind.__module__))
        if _may_change(kind):
            self.guards.note_attributes(value, "__class__")
            self._follow_class(kind, path)
        if attributes or kind.__dictoffset__:
            self.guards.note(attributes)
        for name, each in attributes.items():
            self._add(each, f"{path}.{name}")
        for name in _slots(kind):
            self.guards.note_attributes(value, name)
            self._add(getattr(value, name, None), f"{path}.{name}")

    def _follow_class(self, kind: type, path: str) -> None:
        """Follow the attributes of a class written by users, and of its bases."""
        if isinstance(kind, abc.ABCMeta):
            self.guards.note_registrations()
        for each in (*kind.__mro__, *type.mro(type(kind))):
            file = _file_of_module(each.__module__)
            if each in self._classes:
                continue
            self._classes.add(each)
            if _is_users(each.__module__, file):
                self.guards.note(vars(each))
                for name, value in vars(each).items():
                    self._add(value, f"{_library_of(file)}{each.__name__}.{name}")
            elif _may_change(each):
                # Operators and the number of methods; the others by name.
                self._system.append(each)
                self.guards.note_size(vars(each))
                operators = {name for name in vars(each) if name.startswith("__")}
                operators = operators if each is Tensor else set()
                self._note_names(each, self._spelled | operators)


def _observed(
    kind: type[types.ModuleType], note: Callable[[types.ModuleType, str], None]
) -> type[types.ModuleType]:
    """Return a class of modules that notes which attributes are read, set or deleted.

    So it sees `from ... import`, `getattr` and `operator.attrgetter` with any name.
    """

    def noted(method: Callable) -> Callable:
        def run(self: Any, name: str, *value: Any) -> Any:
            note(self, name)
            return method(self, name, *value)

        return run

    names = ("__getattribute__", "__setattr__", "__delattr__")
    methods = {name: noted(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


# Kinds of objects.


_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Flags `Py_TPFLAGS_...TYPE`: classes written in Python have the first one alone."""

_OPEN = {
    *(object, int, float, complex, str, bytes, tuple, frozenset, types.SimpleNamespace),
    *(dict, list, set, deque, OrderedDict, defaultdict, types.MappingProxyType),
}
"""Classes written in C whose contents are all visible."""


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


# Code of users, and the names in it.


_SYSTEM = {"torch", "numpy", "vgrad", *sys.stdlib_module_names}

SYSTEM_PLACES = (
    *(str(Path(torch.__file__).parent), str(Path(np.__file__).parent)),
    *(str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]),
)

_LAYERS = str(Path(torch.nn.__file__).parent)
"""The layers of torch, and their functions."""


def _is_users(module: str, file: str | None) -> bool:
    """Return whether a module is neither Python's, torch's, numpy's nor this package's.

    It may have the name of one of these.
    """
    if module.startswith("namedtuple_") and file is None:  # made by Python
        return False
    if module.partition(".")[0] not in _SYSTEM:
        return True
    return os.path.isabs(file or "") and not str(file).startswith(SYSTEM_PLACES)


def _file_of(code: types.CodeType, names: dict[str, Any]) -> str | None:
    """Return the file of code, or of its module if it was made of text."""
    file = code.co_filename
    return names.get("__file__") if file.startswith("<") else file


def _file_of_module(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _library_of(file: Any) -> str:
    return _LIBRARY if "site-packages" in str(file) else ""


def _left_library(path: str, module: str, file: str | None) -> str:
    """Return the path to an object of users, even if one of a library holds it."""
    users = _is_users(module, file) and not _library_of(file)
    return path.rpartition(_LIBRARY)[2] if users else path


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
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    return [
        "." * steps[at - 2].argval + each.argval  # after the level and the names
        for at, each in enumerate(steps)
        if each.opname == "IMPORT_NAME"
    ]


# Calls and attributes whose results no value that could be noted decides.


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
"""Differences of tensors that are alike to a graph; this package reads them too."""

_GRAPH = {"grad", "grad_fn", "is_leaf", "output_nr", "retains_grad", "names", "name"}
_READ = {
    getattr(Tensor, name).__get__: name
    for name in (*_GRAPH, *GRAPH, *MEMORY)
    if hasattr(Tensor, name)
}
"""The same, and attributes that change with a graph, by the calls that read them."""

_DOUBTFUL = {"urandom", "_getframe", "__import__", *_SEEDS, *_STATES, *_MEMORY}
_DOUBTFUL |= {each.__name__ for each in _CLOCKS}


def _check_call(called: Any, frame: types.FrameType) -> None:
    if called.__name__ not in _DOUBTFUL:  # cheap, as most calls end here
        return
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator):
        if called.__name__ in _SEEDS:
            raise Unrepeatable("it sets the seed or the state of a generator of torch")
        while frame.f_back and frame.f_code.co_filename.endswith(f"{os.sep}random.py"):
            frame = frame.f_back  # torch's functions of the same name
    if called is os.urandom:
        raise Unrepeatable("it draws random numbers from the operating system")
    if not _is_users_frame(frame):
        return
    if called in _CLOCKS:
        raise Unrepeatable("it reads the time")
    if isinstance(owner, torch.Generator):
        raise Unrepeatable("it reads the seed or the state of a generator of torch")
    if isinstance(owner, Tensor) and called.__name__ in _MEMORY:
        raise Unrepeatable(f"it reads the memory of a tensor ({called.__name__})")
    if called in (sys._getframe, __import__):
        raise Unrepeatable(f"it calls {called.__name__}, which finds any variable")


def _check_read(frame: types.FrameType) -> None:
    """Refuse attributes of tensors whose values no graph keeps; a mode sees them."""
    name = _READ.get(frame.f_locals.get("func"))
    if name is not None and frame.f_back is not None and _is_users_frame(frame.f_back):
        raise Unrepeatable(f"it reads `.{name}` of a tensor")


def _is_users_frame(frame: types.FrameType) -> bool:
    code, names = frame.f_code, frame.f_globals
    return _is_users(names.get("__name__", ""), _file_of(code, names))

"""What a function closes over: values that a graph bakes in, and tensors that it reads.

A graph repeats what Python did while it was captured. So every plain value that a loss
can reach (in closures, default arguments, `functools.partial`, attributes of objects,
classes and modules, globals of the functions that ran) is noted, and compared at each
call. Tensors are inputs of the graph, as they are at each call; which tensor it is, and
its shape, are noted.

Values are noted before the function runs, and globals before the first function runs
that names them. So a function that changes one of them is found out.

Attributes of modules are noted as they are read: while the function runs, each module
has a subclass of its class that observes them. Functions and methods of torch that the
function or the layers of torch name are noted too, since they can be replaced.

Not followed, and taken to stay as they are: all other code and objects of torch, numpy
and Python itself, files, and what objects of this package remember. In other installed
packages, objects that cannot be compared are taken to stay as they are.
"""

import abc
import functools
import gc
import importlib
import os
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import resolve_name
from typing import Any

import numpy as np
from torch import Tensor, nn

from vgrad.compiled.guards import Guards, contents, is_plain
from vgrad.compiled.kinds import (
    CACHE,
    CONSTANT,
    PARTS,
    RANDOM,
    attributes,
    check_call,
    check_read,
    file_of,
    frozen,
    global_names,
    imported_names,
    is_layers,
    is_open,
    is_users,
    may_change,
    slots,
)
from vgrad.conditions import Unrepeatable
from vgrad.functional.model import FunctionalModel
from vgrad.functional.slots import Placeholder
from vgrad.persample.rules.table import RULES
from vgrad.torch_private.tensors import GLOBAL_HOOKS, registered


class Closed:
    """What a function closes over.

    Attributes:
        guards: all values, as they were before the function ran.
        tensors: by id.
    """

    def __init__(self, function: Any) -> None:
        """Follow everything that a function can reach.

        Raises:
            Unrepeatable: an object is of a kind that can change without notice.
        """
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
        for each in RULES.values():
            self._add((each.run, getattr(each, "factors", None)), "a rule")
        for hooks in GLOBAL_HOOKS:
            self._follow_items(hooks, "a hook of all modules")
        self._follow_all()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow what the functions that run in this block name.

        Raises:
            Unrepeatable: at the end, if they did what a graph does not repeat.
        """
        around, collecting = sys.getprofile(), gc.isenabled()
        gc.disable()  # which may call code that is not the function's
        self._running = True
        for module, *_ in [*self._modules.values()]:
            self._observe(module)
        sys.setprofile(self._note)
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

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Look at a call before it happens; torch and Python make thousands."""
        try:
            if event == "call":
                code, names = frame.f_code, frame.f_globals
                ran = id(code), id(names)  # equal code may name other globals
                if ran not in self._ran:
                    self._ran[ran] = code, names
                    self._follow_names(code, names, frame.f_builtins)
                if code.co_name == "__torch_function__":
                    check_read(frame)
                elif code is _IMPORT:
                    name, package = map(frame.f_locals.get, ("name", "package"))
                    self._follow_import(str(name), package)
                self._follow_all()
            elif event == "c_call":
                if called is globals:
                    self._add(frame.f_globals, "globals()")
                    self._follow_all()
                check_call(called, frame)
        except Unrepeatable as error:  # raised here, the loss could catch it
            self._error = self._error or error

    def _follow_all(self) -> None:
        self._following = True
        try:
            while self._left:
                self._follow(*self._left.pop())
        finally:
            self._following = False

    def _follow(self, value: Any, path: str) -> None:
        """Note what an object holds, and put that on the way."""
        if is_plain(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept, so that no other gets its id
        kind = type(value)
        if isinstance(value, Placeholder):  # for what a functional model is given
            return
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            self.guards.note_tensor(value)
            self._add(vars(value), path)
        elif kind in PARTS:
            self._add_all([getattr(value, name) for name in PARTS[kind]], path)
            if kind is types.FunctionType:
                self._follow_function(value, path)
            elif kind is CACHE:
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
        elif isinstance(value, CONSTANT) or value is RANDOM:
            return
        elif is_open(kind):
            self._follow_items(value, path)
            self._follow_object(value, path)
        elif not path.startswith(_LIBRARY):
            raise Unrepeatable(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, whose values "
                f"cannot be compared"
            )

    def _follow_names(
        self, code: types.CodeType, names: dict[str, Any], builtins: dict[str, Any]
    ) -> None:
        """Note the globals and builtins that code names, and the modules it imports."""
        written = is_users(names.get("__name__", ""), file_of(code, names))
        if not written and not is_layers(code):
            return
        installed = not written or "site-packages" in code.co_filename
        library = _LIBRARY if installed else ""
        used = global_names(code)
        if not written:  # of which functions and classes can be replaced, or modules
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
            held = names if name in names else builtins
            follow = self._add if written else self._add_to_system
            follow(held.get(name), f"{library}the global {name!r}")
        for name in imported_names(code):
            self._follow_import(name, names.get("__package__"))
        spelled = set(code.co_names) - self._spelled
        self._spelled |= spelled
        for kind in self._system:
            self._note_names(kind, spelled)
        if "environ" in spelled or "getenv" in spelled:
            self._add(os.environ, "os.environ")

    def _follow_import(self, name: str, package: Any) -> None:
        """Note a module that is imported, and the packages that hold it."""
        if name.startswith("."):
            name = resolve_name(name, package)
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            self.guards.note_entries(sys.modules, [path])
            self._add(sys.modules.get(path), path)

    def _note_names(
        self, holder: type | types.ModuleType, spelled: Iterable[str]
    ) -> None:
        """Note parts of torch's and Python's modules and classes that code names."""
        held = vars(holder)
        for name in held.keys() & spelled:
            if held[name] is sys.modules:
                raise Unrepeatable("it reads sys.modules, which leads to any module")
            if isinstance(holder, types.ModuleType):
                self.guards.note_entries(held, [name])
            elif name in _TRACED and holder is nn.Module:
                continue
            elif isinstance(held[name], _METHODS):  # others are bound anew
                self.guards.note_attributes(holder, name)
            self._add_to_system(held[name], f"{_LIBRARY}{holder.__name__}.{name}")

    def _add_to_system(self, value: Any, path: str) -> None:
        """Follow what users put in place of a part of torch or Python; the rest stays.

        Modules and classes are followed, for the parts of theirs that code names.
        """
        if isinstance(value, types.FunctionType):
            own = is_users(value.__module__ or "", value.__code__.co_filename)
        elif isinstance(value, type | types.ModuleType):
            own = True
        else:
            kind = type(value)
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            own = kind is functools.partial or is_users(kind.__module__, file)
        if own:
            self._add(value, path)

    def _follow_system_class(self, kind: type) -> None:
        """Note operators and how many methods there are; the others by name."""
        self._system.append(kind)
        self.guards.note_size(vars(kind))
        operators = {name for name in vars(kind) if name.startswith("__")}
        self._note_names(kind, self._spelled | (operators if kind is Tensor else set()))

    def _follow_module(self, module: types.ModuleType) -> None:
        """Note attributes of a module: by name, or as they are read."""
        name, held = module.__name__, vars(module)
        if not is_users(name, held.get("__file__")):
            self._system.append(module)
            self._note_names(module, self._spelled)
            return
        library = _LIBRARY if "site-packages" in str(held.get("__file__")) else ""
        path = f"{library}{name}"
        self._modules[id(module)] = module, type(module), held, path
        self.guards.note_entries(held, ["__getattr__"])
        self._add(held.get("__getattr__"), f"{path}.__getattr__")
        if self._running:
            self._observe(module)

    def _observe(self, module: types.ModuleType) -> None:
        """Note each attribute of a module from now on, before it is read or set."""
        _, kind, held, path = self._modules[id(module)]
        if kind not in self._observed:
            self._observed[kind] = _observed(kind, self._note_attribute)
        try:
            _set(module, "__class__", self._observed[kind])
        except TypeError:  # a class of C's, of which there are no others
            self._add(held, path)

    def _note_attribute(self, module: types.ModuleType, name: str) -> None:
        if self._following or threading.get_ident() != self._thread:
            return  # the walk itself reads some, and other threads run meanwhile
        _, _, held, path = self._modules[id(module)]
        if name == "__dict__":
            self._add(held, path)
        elif not name.startswith("__"):
            self.guards.note_entries(held, [name])
            self._add(held.get(name), f"{path}.{name}")
        try:
            self._follow_all()
        except Unrepeatable as error:
            self._error = self._error or error

    def _follow_function(self, function: types.FunctionType, path: str) -> None:
        code, names = function.__code__, function.__globals__
        cells = function.__closure__ or ()
        path = _left_library(path, names.get("__name__", ""), file_of(code, names))
        library = _LIBRARY if path.startswith(_LIBRARY) else ""
        for name, held in zip(code.co_freevars, contents(cells), strict=True):
            self._add(held, f"{library}{name!r} in {function.__name__}")
        if is_users(names.get("__name__", ""), file_of(code, names)):
            self.guards.note_cells(cells)  # which other code does not set
            kept = "__code__", "__defaults__", "__kwdefaults__"
            self.guards.note_attributes(function, *kept)
            self._add(vars(function), path)
        elif "__wrapped__" in vars(function):
            self._add(vars(function)["__wrapped__"], path)

    def _follow_cache(self, cache: Any, path: str) -> None:
        """Follow what `functools.cache` keeps; it may come to keep more."""
        for each in gc.get_referents(cache):
            for held in each.values() if type(each) is dict else (each,):
                if type(held).__name__ != "_lru_list_elem":  # holds one of the others
                    self._add(held, path)
        function = cache.__wrapped__
        if isinstance(function, types.FunctionType):  # which need not run
            code, names = function.__code__, function.__globals__
            self._follow_names(code, names, function.__builtins__)

    def _follow_model(self, model: FunctionalModel, path: str) -> None:
        """Follow all of a functional model but the tensors it is given."""
        self._add_all(model.constants, path)
        for name, module in model.named_modules():
            self._seen[id(module)] = module
            for given in registered(module)[:2]:
                self._seen[id(given)] = given
                self._add_all(
                    [vars(each) for each in given.values() if each is not None], path
                )
            self._follow_object(module, f"{path}.{name}")

    def _follow_items(self, value: Any, path: str) -> None:
        """Follow what a container holds, if it is one."""
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

        Objects of this package change nothing but what they remember.
        """
        kind, held = type(value), attributes(value)
        if kind.__module__.startswith("vgrad."):
            if kind.__module__ != "vgrad.compiled.captures":
                for name, each in held.items():
                    self._add(frozen(each), f"{path}.{name}")
            return
        if kind.__module__.startswith("torch.") and not isinstance(value, nn.Module):
            path = _LIBRARY + path
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        path = _left_library(path, kind.__module__, file)
        if may_change(kind):
            self.guards.note_attributes(value, "__class__")
            self._follow_class(kind, path)
        if held or kind.__dictoffset__:
            self.guards.note(held)
        for name, each in held.items():
            self._add(each, f"{path}.{name}")
        for name in slots(kind):
            self.guards.note_attributes(value, name)
            self._add(getattr(value, name, None), f"{path}.{name}")

    def _follow_class(self, kind: type, path: str) -> None:
        """Follow the attributes of a class that users wrote, and of those above it."""
        if isinstance(kind, abc.ABCMeta):
            self.guards.note_registrations()
        for each in (*kind.__mro__, *type.mro(type(kind))):
            module = each.__module__
            file = getattr(sys.modules.get(module), "__file__", None)
            if each in self._classes:
                continue
            self._classes.add(each)
            if not is_users(module, file):
                if may_change(each):
                    self._follow_system_class(each)
                continue
            self.guards.note(vars(each))
            library = _LIBRARY if "site-packages" in str(file) else ""
            for name, value in vars(each).items():
                self._add(value, f"{library}{each.__name__}.{name}")

    def _add(self, value: Any, path: str) -> None:
        if not is_plain(value):
            self._left.append((value, path))

    def _add_all(self, values: Iterable[Any], path: str) -> None:
        for value in values:
            self._add(value, path)


_TRACED = {"__call__", "__getattr__"}
"""Methods of all modules that a trace replaces; the signature has them."""

_METHODS = types.FunctionType, types.MethodDescriptorType

_set = types.ModuleType.__setattr__


def _observed(
    kind: type[types.ModuleType], note: Callable[[types.ModuleType, str], None]
) -> type[types.ModuleType]:
    """Return a class of modules that notes which attributes are read, set or deleted.

    So it sees `from ... import`, `getattr` and `operator.attrgetter` with any name.
    """
    get, put, delete = kind.__getattribute__, kind.__setattr__, kind.__delattr__

    def noted_get(self: Any, name: str) -> Any:
        note(self, name)
        return get(self, name)

    def noted_put(self: Any, name: str, value: Any) -> None:
        note(self, name)
        put(self, name, value)

    def noted_delete(self: Any, name: str) -> None:
        note(self, name)
        delete(self, name)

    names = {
        "__module__": kind.__module__,
        "__getattribute__": noted_get,
        "__setattr__": noted_put,
        "__delattr__": noted_delete,
    }
    return type(kind.__name__, (kind,), names)


_IMPORT = importlib.import_module.__code__

_LIBRARY = "in a library: "
"""How the way to what installed code holds begins.

What cannot be compared there (a registry, a key of a cache) is taken to stay as it is.
"""


def _left_library(path: str, module: str, file: str | None) -> str:
    """Return the way to what is no library's, even if a library's object holds it."""
    users = is_users(module, file) and "site-packages" not in str(file)
    return path.rpartition(_LIBRARY)[2] if users else path

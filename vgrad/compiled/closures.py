"""What a function closes over: values that a graph bakes in, and tensors that it reads.

A graph repeats what Python did while it was captured. So every plain value that a loss
can reach (in closures, default arguments, `functools.partial`, attributes of objects,
classes and modules, globals of the functions that ran) is noted, and compared at each
call. Tensors are inputs of the graph, as they are at each call; which tensor it is, and
its shape, are noted.

Values are noted before the function runs, and globals before the first function runs
that names them. So a function that changes one of them is found out.

Not followed, and taken to stay as they are: code and objects of torch, numpy and Python
itself, files, and what objects of this package remember. In other installed packages,
objects that cannot be compared are taken to stay as they are. Attributes of modules are
found by their names, as the functions that ran spell them.
"""

import gc
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from vgrad.compiled.guards import Guards, contents, is_plain
from vgrad.compiled.kinds import (
    BY_NAME,
    CACHE,
    CONSTANT,
    PARTS,
    RANDOM,
    attributes,
    check_call,
    file_of,
    frozen,
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
        self._modules: list[types.ModuleType] = []
        self._spelled: set[str] = set()
        self._strings: set[str] = set()
        self._error: Unrepeatable | None = None
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
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(around if callable(around) else None)
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
                    self._follow_names(code, names)
                    self._follow_all()
            elif event == "c_call":
                check_call(called, frame)
        except Unrepeatable as error:  # raised here, the loss could catch it
            self._error = self._error or error

    def _follow_all(self) -> None:
        while self._left:
            self._follow(*self._left.pop())

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
            if is_users(value.__name__, getattr(value, "__file__", None)):
                self._modules.append(value)
                self._note_names(value, self._spelled, self._strings)
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

    def _follow_names(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Note the globals that a function names, and what it names of modules."""
        if not is_users(names.get("__name__", ""), file_of(code, names)):
            return
        spelled = code.co_names
        strings = []
        if BY_NAME.intersection(spelled):
            held = [each for each in code.co_consts if isinstance(each, str)]
            strings = [each for each in held if each.isidentifier()]
        library = _LIBRARY if "site-packages" in code.co_filename else ""
        used = [name for name in (*spelled, *strings) if name in names]
        self.guards.note_entries(names, used)
        for name in used:
            self._add(names[name], f"{library}the global {name!r}")
        for module in self._modules:
            self._note_names(module, spelled, strings)
        self._spelled.update(spelled)
        self._strings.update(strings)
        for name in spelled:  # modules that the function itself imports
            for each in (name, f"{names.get('__package__')}.{name}"):
                self._add(sys.modules.get(each), each)
        if "environ" in spelled or "getenv" in spelled:
            self._add(os.environ, "os.environ")

    def _note_names(
        self, module: types.ModuleType, spelled: Iterable[str], strings: Iterable[str]
    ) -> None:
        """Note attributes of a module; those in strings may come later."""
        held = vars(module)
        used = [*(name for name in spelled if name in held), *strings]
        self.guards.note_entries(held, used)
        library = _LIBRARY if "site-packages" in str(held.get("__file__")) else ""
        for name in used:
            self._add(held.get(name), f"{library}{module.__name__}.{name}")

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
            self._follow_names(function.__code__, function.__globals__)

    def _follow_model(self, model: FunctionalModel, path: str) -> None:
        """Follow all of a functional model but the tensors it is given."""
        self._add_all(model.constants, path)
        for name, module in model.named_modules():
            self._seen[id(module)] = module
            for given in registered(module)[:2]:
                self._seen[id(given)] = given
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
        for each in (*kind.__mro__, *type.mro(type(kind))):
            module = each.__module__
            file = getattr(sys.modules.get(module), "__file__", None)
            if each in self._classes or not is_users(module, file):
                continue
            self._classes.add(each)
            self.guards.note(vars(each))
            library = _LIBRARY if "site-packages" in str(file) else ""
            for name, value in vars(each).items():
                if not name.startswith("__") or callable(value):
                    self._add(value, f"{library}{each.__name__}.{name}")

    def _add(self, value: Any, path: str) -> None:
        if not is_plain(value):
            self._left.append((value, path))

    def _add_all(self, values: Iterable[Any], path: str) -> None:
        for value in values:
            self._add(value, path)


_LIBRARY = "in a library: "
"""How the way to what installed code holds begins.

What cannot be compared there (a registry, a key of a cache) is taken to stay as it is.
"""


def _left_library(path: str, module: str, file: str | None) -> str:
    """Return the way to what is no library's, even if a library's object holds it."""
    users = is_users(module, file) and "site-packages" not in str(file)
    return path.rpartition(_LIBRARY)[2] if users else path

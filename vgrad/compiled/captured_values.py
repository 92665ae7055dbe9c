"""The values that a function reads outside of its arguments, compared at every call.

Compared are plain values and containers, by content: in closure cells, default
arguments, globals, chains of attributes and constant subscripts that the code of a loss
spells (`config.beta`, `hp["beta"]`, `self.beta`), and in `vars` of modules. Functions
that a loss names are code of its own. Other objects are compared by identity: their
contents are constants of the capture. No comparison runs code of users.
"""

import dis
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, reduce
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vgrad.functional.model import FunctionalModel
from vgrad.loss.values import is_library
from vgrad.ops.record import OPS
from vgrad.torch_private.control import as_written
from vgrad.torch_private.tensors import GLOBAL_HOOKS, like
from vgrad.tree import TreeSpec

_PLAIN = {
    *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(TreeSpec, types.NotImplementedType),
}

GONE = ...
"""The value of a name that is not there; it is as plain as others."""


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change, and can be compared."""
    if type(value) is slice:
        value = value.start, value.stop, value.step
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


def description(tensor: Tensor) -> tuple:
    """Return all that the choice of kernels depends on."""
    return (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


# Contents.

_MOST_BYTES = 2**14
"""Of an array of numpy whose values are compared."""

_FALSE_IF_EMPTY = dict, OrderedDict, list, set, deque


def _parts(value: Any) -> tuple | None:
    """Return the parts of a container in their order; None of any other object."""
    if isinstance(value, dict):  # whose own class may show others
        return *dict.keys(value), *dict.values(value)
    for base in _SEQUENCES:
        if isinstance(value, base):
            return (*base.__iter__(value),)
    if isinstance(value, set | frozenset):
        return (*sorted(value, key=repr),)
    kind = type(value)
    if kind in _INNER:
        return (*(getattr(value, name) for name in _INNER[kind]),)
    if kind is np.ndarray and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    return None


_SEQUENCES: Any = list, tuple, deque

_INNER: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    partial: ("func", "args", "keywords"),
    slice: ("start", "stop", "step"),
}


class _Content:
    """A container as it was: its parts by identity, containers in it by content."""

    def __init__(self, value: Any, around: tuple[Any, ...] = ()) -> None:
        self.value, self.kind, self.parts = value, type(value), _parts(value) or ()
        around = *around, value
        self._empty: list[int] = []  # as most containers of a module are
        self.deep: dict[int, _Content] = {}
        for place, part in enumerate(self.parts):
            if type(part) in _FALSE_IF_EMPTY and not part:
                self._empty.append(place)
            elif _parts(part) is not None and not is_plain(part):
                if not any(part is each for each in around):
                    self.deep[place] = _Content(part, around)

    def holds(self, value: Any) -> bool:
        """Return whether a container has the same content."""
        parts = _parts(value) if type(value) is self.kind else None
        if parts is None or len(parts) != len(self.parts):
            return False
        if any([parts[place] for place in self._empty]):
            return False
        if not all(map(is_, parts, self.parts)):
            pairs = enumerate(zip(parts, self.parts, strict=True))
            if not all(n in self.deep or _is_same(*pair) for n, pair in pairs):
                return False
        return all([each.holds(parts[place]) for place, each in self.deep.items()])


def _is_same(value: Any, noted: Any) -> bool:
    """Return whether a value is the noted one: a content, a plain value, an object."""
    if value is noted:
        return True
    if type(noted) is _Content:
        return noted.holds(value)
    # Numbers that are equal may differ: 0.0 and -0.0, 1 and True.
    alike = type(value) is type(noted) and is_plain(value)
    return alike and repr(value) == repr(noted)


def _within(value: Any) -> Iterator[Any]:
    """Yield a value, and all that containers in it hold."""
    if type(value) is not _Content or value.kind is types.MethodType:
        yield value.value if type(value) is _Content else value
        return
    for place, part in enumerate(value.parts):
        yield from _within(value.deep.get(place, part))


# Places, which are read without running code of users.


def _itself(value: Any) -> Any:
    return value


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


def _global(variables: dict, builtins: dict, name: str) -> Any:
    return variables.get(name, builtins.get(name, GONE))


def _vars(owner: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute as it lies there; of a property, its function."""
    is_class = isinstance(owner, type)
    held = [{}] if is_class else [_vars(owner)]
    if isinstance(owner, nn.Module):
        names = ("_parameters", "_buffers", "_modules")
        held += [held[0].get(each, {}) for each in names]
    kinds = (owner if is_class else type(owner)).__mro__
    for each in held:
        if name in each:
            return each[name]
    own = (vars(each) for each in kinds)
    found: Any = next((each[name] for each in own if name in each), GONE)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, kinds[0])
    if isinstance(found, property):
        found = found.fget
    if is_class:
        return found
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, owner)
    if type(found) in _FIELDS:
        try:
            found = found.__get__(owner, kinds[0])
        except AttributeError:
            return GONE
    if found is GONE and hasattr(kinds[0], "__getattr__"):  # as configurations have it
        with suppress(Exception):
            return getattr(owner, name)
    return found


def _item(owner: Any, key: Any) -> Any:
    try:
        if isinstance(owner, dict):
            return dict.get(owner, key, GONE)
        base: Any = list if isinstance(owner, list) else tuple
        return base.__getitem__(owner, key)
    except (TypeError, IndexError):
        return GONE


_FIELDS = types.MemberDescriptorType, type(vars(namedtuple("_", "field"))["field"])


def _along(read: Callable[[], Any], steps: tuple) -> Any:
    return reduce(lambda owner, step: step[0](owner, step[1]), steps, read())


def _of_function(function: types.FunctionType) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__


# Code.


_Step = tuple[Callable[[Any, Any], Any], Any]


def _chains(code: types.CodeType) -> set[tuple[str, str, tuple[_Step, ...]]]:
    """Return all names in code, and the chains that it spells from them on.

    A chain is the scope of a name, the name and the steps from there. Each beginning of
    a chain is one, too.
    """
    found: set[Any] = set()
    spelled, constant = None, GONE
    for each in dis.get_instructions(code):
        op, value, step = each.opname, each.argval, None
        scope = next((scope for scope in _SCOPES if f"LOAD_{scope}" in op), None)
        if op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = value
            continue
        if op == "EXTENDED_ARG":
            continue
        if op in ("LOAD_ATTR", "LOAD_METHOD") and constant is GONE:
            step = _attribute, value
        elif op == "BINARY_SUBSCR" or each.argrepr == "[]":
            step = (_item, constant) if type(constant) in (int, str) else None
        if scope is not None:  # of two names in one instruction the last counts
            spelled = scope, value[-1] if isinstance(value, tuple) else value, ()
        elif spelled is not None:
            spelled = (*spelled[:2], (*spelled[2], step)) if step else None
        constant = GONE
        if spelled is not None:
            found.add(spelled)
    return found


_SCOPES = "GLOBAL", "NAME", "DEREF", "FAST"


# The walk.


class Closure:
    """The values that functions read outside of their arguments, as they were.

    `held` are dictionaries that are compared as well.
    """

    def __init__(self, functions: list[Any], held: list[dict[str, Any]]) -> None:
        self._notes: dict[tuple, tuple[Callable[[], Any], Any]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._seen: dict[tuple, Any] = {}  # kept, so that no other gets its id
        rules = ((op.recorded, op.rule) for op in OPS.values())
        self._left: list[tuple[Any, bool]] = [(each, True) for each in functions]
        self._left += ((each, True) for each in chain.from_iterable(rules))
        for each in (*GLOBAL_HOOKS, *held):
            self._note((id(each),), partial(_itself, each))
        while self._left:
            self._follow(*self._left.pop())
        self.also([])

    def also(self, tensors: list[Tensor]) -> None:
        """Compare all but the values of some further tensors."""
        self._tensors |= {id(each): each for each in tensors}
        own = [*self._tensors.values()]
        self._described = [*map(description, own)]
        strided = all(each.layout is torch.strided for each in own)
        self._alike = like(own) if strided else None  # the same in one go

    def hold(self) -> bool:
        """Return whether all values are as they were."""
        tensors = self._tensors.values()
        if self._alike is not None and torch.is_grad_enabled():
            alike = self._alike(*tensors)
        else:
            alike = [*map(description, tensors)] == self._described
        return alike and all(
            [_is_same(read(), noted) for read, noted in self._notes.values()]
        )

    def _note(self, key: tuple, read: Callable[[], Any], tensors: bool = True) -> None:
        value = read()
        noted = value if _parts(value) is None else _Content(value)
        self._notes[key] = read, noted
        for each in _within(noted):
            if not isinstance(each, Tensor):
                self._left.append((each, False))
                continue
            if tensors:
                self._tensors[id(each)] = each
            if vars(each) and (id(each),) not in self._notes:
                self._note((id(each),), partial(_itself, vars(each)), tensors)

    def _follow(self, value: Any, root: bool) -> None:
        """Note what code or a module reads; `root` if code of vgrad leads to it."""
        value = as_written(value)  # which runs in a loss
        method, kind = type(value) is types.MethodType, type(value)
        function, owner = (value.__func__, value.__self__) if method else (value, GONE)
        key = id(function), id(owner)
        ends = is_plain(value) or isinstance(value, Tensor) or key in self._seen
        if ends or kind.__module__.startswith("vgrad.compiled"):
            return
        self._seen[key] = value
        if isinstance(function, types.FunctionType):
            self._follow_function(function, owner, root)
        elif isinstance(value, FunctionalModel | nn.Module):
            own = not isinstance(value, FunctionalModel)  # whose tensors are arguments
            for _, module in value.named_modules():
                self._seen[id(module), id(GONE)] = module
                self._note((id(module),), partial(_itself, vars(module)), tensors=own)
        elif (parts := _parts(value)) is not None:
            self._left += ((each, root) for each in parts)
        else:
            if any(each.__module__.startswith("vgrad.") for each in kind.__mro__):
                self._left += ((each, True) for each in _vars(value).values())
            if isinstance(call := _attribute(value, "__call__"), types.MethodType):
                self._left.append((call, root))

    def _follow_function(
        self, function: types.FunctionType, owner: Any, root: bool
    ) -> None:
        code, variables = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._left.append((owner, root))
        installed = "site-packages" in code.co_filename and not root
        if installed or is_library(code.co_filename):
            self._left += ((_cell(each), root) for each in cells.values())
            return
        reads = {name: partial(_cell, each) for name, each in cells.items()}
        last = code.co_varnames[: code.co_argcount][::-1]
        defaults = dict(zip(last, (function.__defaults__ or ())[::-1], strict=False))
        for name, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
            reads[name] = partial(_itself, value)
        own = id(function), id(owner)
        self._note((*own, "function"), partial(_of_function, function))
        for name in cells:
            self._note((*own, "cell", name), reads[name])
        if owner is not GONE and last:
            reads[last[-1]] = partial(_itself, owner)
        codes = [code]
        for each in codes:
            codes += (x for x in each.co_consts if isinstance(x, types.CodeType))
            for scope, name, steps in _chains(each):
                key, read = (*own, name), reads.get(name)
                if scope in ("GLOBAL", "NAME"):
                    key = id(variables), name
                    read = partial(_global, variables, function.__builtins__, name)
                if read is None or (scope == "FAST" and each is not code):
                    continue
                if steps or scope in ("GLOBAL", "NAME"):
                    self._note((*key, *steps), partial(_along, read, steps))

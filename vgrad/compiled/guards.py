"""The conditions under which a graph holds, compared at every call.

Of arguments: structure, dtypes, shapes and so on. Of the surroundings: torch's
switches. Of a loss: plain values and containers, by content, in closure cells, default
arguments, globals, chains of attributes and constant subscripts that its code spells
(`config.beta`, `hp["beta"]`, `self.beta`), and `vars` of modules. Functions that a loss
names are code of its own. Other objects are compared by identity: their contents are
constants of the capture.
"""

import dis
import enum
import operator
import types
from collections import deque, namedtuple
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from inspect import getattr_static
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vgrad import devices, tree
from vgrad.conditions import Unrepeatable
from vgrad.functional.model import FunctionalModel
from vgrad.loss.values import is_library
from vgrad.ops.record import OPS
from vgrad.torch_private import autograd, kernels, modes
from vgrad.torch_private.control import as_written
from vgrad.torch_private.tensors import GLOBAL_HOOKS
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


# Arguments and surroundings.


_KINDS = {Tensor, nn.Parameter, nn.Buffer}
_LAYOUT = operator.attrgetter("layout")


class Signature(NamedTuple):
    """The arguments and surroundings of a call that decide on its graph."""

    key: tuple[list, tuple]  # structure without shapes, and torch's switches
    distinct: list[Tensor]  # each of them once


def signature(arguments: Any, tensors: list[Tensor]) -> Signature:
    """Describe arguments, and append their tensors in the order of their leaves."""
    key: list[Any] = []
    _describe(arguments, tensors, key)
    if [*map(_LAYOUT, tensors)].count(torch.strided) < len(tensors):
        raise Unrepeatable("an argument is a tensor that is not strided")
    if any(map(vars, tensors)):  # attributes set by users, which a loss can read
        key.append([[*map(_noted, vars(each).items())] for each in tensors])
    if not torch.is_grad_enabled():  # otherwise it is compared with the shapes
        key.append([tensor.requires_grad for tensor in tensors])
    distinct = dict(zip(map(id, tensors), tensors, strict=True))
    if len(distinct) < len(tensors):  # a loss can compare the identity of two
        ids = [*distinct]
        key.append([ids.index(id(tensor)) for tensor in tensors])
    return Signature((key, _surroundings()), [*distinct.values()])


def _describe(value: Any, tensors: list[Tensor], key: list[Any]) -> None:
    kind = type(value)
    if kind in _KINDS:
        tensors.append(value)
        key.append(kind)
    elif kind is dict:
        key.append(tuple(value))
        kinds = [*map(type, value.values())]
        if _KINDS.issuperset(kinds):
            tensors += value.values()
            key += kinds
        else:
            for each in value.values():
                _describe(each, tensors, key)
    elif kind is tuple or kind is list or hasattr(kind, "_fields"):
        key.append((kind, len(value)))
        for each in value:
            if each is None:
                key.append(None)
            else:
                _describe(each, tensors, key)
    elif kind is bool or kind is int or kind is str:
        key.append((kind, value))
    else:
        leaves, spec = tree.tree_flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            key.append(spec)
            for leaf in leaves:
                _describe(leaf, tensors, key)
        elif is_plain(value):  # as text: 0.0 is not -0.0, and nan is nan
            key.append((kind, repr(value)))
        elif callable(value) or isinstance(value, enum.Enum):
            parts = (getattr(value, name, value) for name in ("__self__", "__func__"))
            key.append([*map(id, parts)])
        else:
            raise Unrepeatable(
                f"an argument is a {kind.__module__}.{kind.__qualname__}"
            )


def _noted(item: tuple[str, Any]) -> tuple:
    """Describe an attribute of a tensor."""
    name, value = item
    return name, type(value), repr(value) if is_plain(value) else id(value)


def _surroundings() -> tuple:
    """Return torch's switches, all rules, and other state that decides on an op."""
    casts = None
    if modes.autocast_is_on():
        casts = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices.kinds()
        )
    return (
        casts,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mha.get_fastpath_enabled(),
        nn.Module.__call__,
        nn.Module.__getattr__,
        *[allowed() for allowed in _ATTENTION],
        *map(kernels.fp32_precision, *_ROUNDING),
        *modes.function_modes(),
        autograd.node_hooks(),
        *OPS.values(),
    )


_ATTENTION = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
"""The forms of attention that `torch.nn.attention.sdpa_kernel` switches."""

_ROUNDING = ("cuda",) * 3 + ("mkldnn",) * 3, ("matmul", "conv", "rnn") * 2
"""The backends and ops for which torch has a switch that lets float32 be rounded."""


def in_words(distinct: Sequence[Tensor]) -> str:
    """Describe a capture: the last tensors of its arguments, the batch; autocast."""

    def short(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    shown = [f"{short(each.dtype)} {list(each.shape)}" for each in distinct[-3:]]
    if others := len(distinct) - len(shown):
        shown = [f"{others} others", *shown]
    text = ", ".join(shown)
    for device in devices.kinds():
        if torch.is_autocast_enabled(device):
            dtype = short(torch.get_autocast_dtype(device))
            text = f"{text}; autocast of {device} to {dtype}"
    return text


# The values that a loss reads outside of its arguments, read without code of users.


def _parts(value: Any) -> tuple | None:
    """Return the parts of a container in their order; None of any other object."""
    if isinstance(value, dict):  # whose own class may show others
        return *dict.__iter__(value), *dict.values(value)
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

_MOST_BYTES = 2**14
"""Of an array of numpy whose values are compared."""


def _content(value: Any, containers: dict[int, Any]) -> Any:
    """Return a value in a form that can be compared, and note the containers in it."""
    if is_plain(value):  # numbers that are equal may differ: 0.0 and -0.0, 1 and True
        return type(value), repr(value)
    parts = _parts(value)
    if parts is None or id(value) in containers:
        return id(value)
    containers[id(value)] = value
    return type(value), [_content(each, containers) for each in parts]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


def _global(variables: dict, builtins: dict, name: str) -> Any:
    return variables.get(name, builtins.get(name, GONE))


def _vars(owner: Any) -> Any:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute as it lies there; of methods and properties, the function."""
    found = _vars(owner).get(name, GONE)
    if found is GONE:
        found = getattr_static(owner, name, GONE)
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    if isinstance(found, property):
        return found.fget
    if type(found) in _FIELDS:
        try:
            value = found.__get__(owner)
        except AttributeError:
            return GONE
        return found if isinstance(value, Tensor) else value
    if found is GONE and hasattr(type(owner), "__getattr__"):  # as configurations have
        with suppress(Exception):
            return getattr(owner, name)
    return found


_FIELDS = (
    *(types.MemberDescriptorType, types.GetSetDescriptorType),
    type(vars(namedtuple("_", "field"))["field"]),
)


def _item(owner: Any, key: Any) -> Any:
    try:
        if isinstance(owner, dict):
            return dict.get(owner, key, GONE)
        base: Any = list if isinstance(owner, list) else tuple
        return base.__getitem__(owner, key)
    except (TypeError, IndexError):
        return GONE


def _along(read: Callable[[], Any], steps: tuple) -> Any:
    return reduce(lambda owner, step: step[0](owner, step[1]), steps, read())


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


class Closure:
    """The values that functions read outside of their arguments, as they were.

    `tables` are dictionaries that are compared as well.
    """

    def __init__(self, functions: list[Any], tables: list[dict[str, Any]]) -> None:
        self._reads: dict[tuple, Callable[[], Any]] = {}
        self._fixed = [*GLOBAL_HOOKS, *tables]  # containers that are always the same
        self._seen: dict[tuple, Any] = {}  # kept, so that no other gets its id
        rules = chain.from_iterable((op.recorded, op.rule) for op in OPS.values())
        self._left: list[tuple[Any, bool]] = [(each, False) for each in self._fixed]
        self._left += ((each, True) for each in (*functions, *rules))
        while self._left:
            self._follow(*self._left.pop())
        containers: dict[int, Any] = {}
        values = [*self._fixed, *(read() for read in self._reads.values())]
        self._contents = [_content(each, containers) for each in values]
        self._keep(values, containers)
        self.also([])

    def also(self, tensors: list[Tensor]) -> None:
        """Compare all but the values of some tensors."""
        self._tensors, self._described = tensors, [*map(description, tensors)]

    def hold(self) -> bool:
        """Return whether all values are as they were."""
        if [*map(description, self._tensors)] != self._described:
            return False
        values = [*self._fixed, *[read() for read in self._reads.values()]]
        sizes, parts = self._flat()
        if sizes == self._sizes and all(map(is_, values, self._values)):
            if all(map(is_, parts, self._flat_parts)):
                return True
        containers: dict[int, Any] = {}
        if [_content(each, containers) for each in values] != self._contents:
            return False
        self._keep(values, containers)
        return True

    def _keep(self, values: list[Any], containers: dict[int, Any]) -> None:
        """Keep values and the parts of containers, of which most stay the same."""
        own = [*containers.values()]
        self._values, self._dicts = values, [x for x in own if isinstance(x, dict)]
        self._others = [x for x in own if not isinstance(x, dict)]
        self._sizes, self._flat_parts = self._flat()

    def _flat(self) -> tuple[list[int], list[Any]]:
        """Return the sizes and the parts of all containers, without calls of Python."""
        dicts, others = self._dicts, [_parts(each) or () for each in self._others]
        keys, entries = map(dict.__iter__, dicts), map(dict.values, dicts)
        sizes = [*map(len, dicts), *map(len, others)]
        return sizes, [*chain.from_iterable((*keys, *entries, *others))]

    def _note(self, key: tuple, read: Callable[[], Any]) -> None:
        """Compare the value of a read, and follow the code in it."""
        if key not in self._reads:
            self._reads[key] = read
            self._left.append((read(), False))

    def _follow(self, value: Any, root: bool) -> None:
        """Note what code or a module reads; `root` if code of vgrad leads to it."""
        value = as_written(value)  # which runs in a loss
        method, kind = type(value) is types.MethodType, type(value)
        function, owner = (value.__func__, value.__self__) if method else (value, GONE)
        key = id(function), id(owner)
        ends = is_plain(value) or key in self._seen
        if ends or kind.__module__.startswith("vgrad.compiled"):
            return
        self._seen[key] = value
        if isinstance(value, Tensor):
            if vars(value):  # attributes set by users
                self._fixed.append(vars(value))
                self._left.append((vars(value), False))
            return
        if isinstance(function, types.FunctionType):
            self._follow_function(function, owner, root)
        elif isinstance(value, FunctionalModel | nn.Module):
            for _, module in value.named_modules():
                self._seen[id(module), id(GONE)] = module
                self._fixed.append(vars(module))
                self._left.append((vars(module), False))
        elif (parts := _parts(value)) is not None:
            self._left += ((each, root) for each in parts)
        else:
            if any(each.__module__.startswith("vgrad.") for each in kind.__mro__):
                self._left += ((each, True) for each in _vars(value).values())
            call = getattr_static(value, "__call__", None)
            if isinstance(call, types.FunctionType):
                self._left.append((types.MethodType(call, value), root))

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
        own = id(function), id(owner)
        reads = {name: partial(_cell, each) for name, each in cells.items()}
        for name, read in reads.items():
            self._note((*own, "cell", name), read)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._note((*own, name), partial(getattr, function, name))
        last = code.co_varnames[: code.co_argcount][::-1]
        values = dict(zip(last, (function.__defaults__ or ())[::-1], strict=False))
        values |= function.__kwdefaults__ or {}
        if owner is not GONE and last:
            values[last[-1]] = owner
        reads |= {name: partial(lambda x: x, value) for name, value in values.items()}
        codes = [code]
        for each in codes:
            codes += (x for x in each.co_consts if isinstance(x, types.CodeType))
            for scope, name, steps in _chains(each):
                key, read = (*own, name), reads.get(name)
                if scope in ("GLOBAL", "NAME"):
                    key = id(variables), name
                    read = partial(_global, variables, function.__builtins__, name)
                    self._note(key, read)
                if read is None or not steps or (scope == "FAST" and each is not code):
                    continue
                self._note((*key, *steps), partial(_along, read, steps))
                self._bind(_along(read, steps[:-1]), *steps[-1])

    def _bind(self, owner: Any, step: Callable, name: Any) -> None:
        """Follow a method or property of an object, whose code reads its attributes."""
        found = _attribute(owner, name) if step is _attribute else None
        if isinstance(found, types.FunctionType) and name not in _vars(owner):
            self._left.append((types.MethodType(found, owner), False))

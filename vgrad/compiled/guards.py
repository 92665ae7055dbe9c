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
import types
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain, compress
from operator import eq, is_, is_not
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
from vgrad.torch_private.tensors import GLOBAL_HOOKS
from vgrad.tree import TreeSpec

_PLAIN = {
    *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(TreeSpec, types.NotImplementedType),
}

_GONE = ...
"""The value of a name that is not there; it is as plain as others."""


def _is_plain(value: Any) -> bool:
    """Return whether a value cannot change, and has a text that tells it apart."""
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_ | enum.Enum)


def description(tensor: Tensor) -> tuple:
    """Return all that the choice of kernels depends on."""
    layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    views = tensor.is_conj(), tensor.is_neg()
    return (
        tensor.shape,
        layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        views,
    )


# Arguments and surroundings.


_KINDS = {Tensor, nn.Parameter, nn.Buffer}


class Signature(NamedTuple):
    """The arguments and surroundings of a call that decide on its graph."""

    key: list[Any]  # structure without shapes, and torch's switches
    tensors: list[Tensor]  # of the arguments, in order
    distinct: list[Tensor]  # each of them once


def signature(arguments: Any) -> Signature:
    """Describe arguments, whose tensors are compared apart, and the surroundings."""
    leaves, spec = tree.tree_flatten(arguments)
    key, tensors = [spec, *_surroundings()], []
    for leaf in leaves:
        kind: type = type(leaf)
        if kind in _KINDS and leaf.layout is torch.strided:
            tensors.append(leaf)
            key.append(kind)
        elif _is_plain(leaf):  # as text: 0.0 is not -0.0, and nan is nan
            key.append((kind, repr(leaf)))
        elif callable(leaf):
            key.append(leaf)
        else:
            name = f"{kind.__module__}.{kind.__qualname__}"
            layout = f" of layout {leaf.layout}" if isinstance(leaf, Tensor) else ""
            raise Unrepeatable(f"an argument is a {name}{layout}")
    if any(map(vars, tensors)):  # attributes set by users, which a loss can read
        key += [_content(vars(tensor)) for tensor in tensors]
    if not torch.is_grad_enabled():  # otherwise it is compared with the shapes
        key += [tensor.requires_grad for tensor in tensors]
    distinct = dict(zip(map(id, tensors), tensors, strict=True))
    if len(distinct) < len(tensors):  # a graph reads a tensor that is there twice once
        places = {each: number for number, each in enumerate(distinct)}
        key += [places[id(tensor)] for tensor in tensors]
    return Signature(key, tensors, [*distinct.values()])


def _surroundings() -> tuple[Any, ...]:
    """Return torch's switches, all rules, and other state that decides on an op."""
    on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    kinds = devices.kinds() if modes.autocast_is_on() else ()
    return (
        *[(on(device), dtype(device)) for device in kinds],
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mha.get_fastpath_enabled(),
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


# The values that a loss reads outside of its arguments.


def _content(value: Any, containers: dict[int, Any] | None = None) -> Any:
    """Return a value in a form that can be compared, and note the containers in it."""
    containers = {} if containers is None else containers
    if _is_plain(value):  # numbers that are equal may differ: 0.0 and -0.0, 1 and True
        return type(value), repr(value)
    parts = _parts(value)
    if parts is None or id(value) in containers:
        return id(value)
    containers[id(value)] = value
    return type(value), [_content(each, containers) for each in parts]


def _parts(value: Any) -> Sequence[Any] | None:
    """Return the parts of a container in their order; None of any other object."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, types.MethodType):  # a new one at each read
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return [*value] if isinstance(value, list | tuple | deque) else None


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, _GONE)


def _item(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(key, _GONE)
    return owner[key] if isinstance(owner, list | tuple) else _GONE


_Step = tuple[Callable[[Any, Any], Any], Any]


def _along(owner: Any, *steps: _Step) -> Any:
    """Return the value at the end of a chain from an object on."""
    try:
        for step, name in steps:
            owner = step(owner, name)
    except Exception:  # of a branch that the loss does not take
        return _GONE
    return owner


def _chains(code: types.CodeType) -> set[tuple[str, str, tuple[_Step, ...]]]:
    """Return all names in code, and the chains that it spells from them on.

    A chain is the scope of a name, the name and the steps from there. Each beginning of
    a chain is one, too.
    """
    found: set[Any] = set()
    spelled, constant = None, _GONE
    for each in dis.get_instructions(code):
        op, value, step = each.opname, each.argval, None
        scope = next((scope for scope in _SCOPES if f"LOAD_{scope}" in op), None)
        if op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = value
            continue
        if op == "EXTENDED_ARG":
            continue
        if op in ("LOAD_ATTR", "LOAD_METHOD") and constant is _GONE:
            step = _attribute, value
        elif op == "BINARY_SUBSCR" or each.argrepr == "[]":
            step = (_item, constant) if type(constant) in (int, str) else None
        if scope is not None:  # of two names in one instruction the last counts
            spelled = scope, value[-1] if isinstance(value, tuple) else value, ()
        elif spelled is not None:
            spelled = (*spelled[:2], (*spelled[2], step)) if step else None
        constant = _GONE
        if spelled is not None:
            found.add(spelled)
    return found


_SCOPES = "GLOBAL", "NAME", "DEREF", "FAST"


class Closure:
    """The values that functions read outside of their arguments, as they were."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self._reads: dict[tuple, tuple] = {}  # chains: an object, and steps from there
        self._seen: dict[tuple, Any] = {}  # kept, so that no other gets its id
        self._left: list[tuple[Any, bool]] = [(each, True) for each in functions]
        for each in GLOBAL_HOOKS:
            self._compare(each)
        while self._left:
            self._follow(*self._left.pop())
        # A new object at every read is no value to compare.
        both = [[_along(*each) for each in self._reads.values()] for _ in range(2)]
        one, other = ([*map(_content, values)] for values in both)
        stable = [*map(eq, one, other)]
        self._chains = [*compress(self._reads.values(), stable)]
        self._contents = [*compress(one, stable)]
        self._keep([*compress(both[0], stable)])
        self.also([])

    def also(self, tensors: list[Tensor]) -> None:
        """Compare all but the values of some tensors."""
        self._tensors, self._described = tensors, [*map(description, tensors)]

    def hold(self) -> bool:
        """Return whether all values are as they were."""
        if [*map(description, self._tensors)] != self._described:
            return False
        values = [_along(*each) for each in self._chains]
        sizes, parts = self._flat()
        if sizes == self._sizes and all(map(is_, parts, self._flat_parts)):
            new = [*map(is_not, values, self._values)]
            contents = compress(self._contents, new)
            if all(map(eq, map(_content, compress(values, new)), contents)):
                return True
        elif [*map(_content, values)] == self._contents:
            self._keep(values)
            return True
        return False

    def _keep(self, values: list[Any]) -> None:
        """Keep values and the parts of containers, of which most stay the same."""
        containers: dict[int, Any] = {}
        for each in values:
            _content(each, containers)
        sized = [each for each in containers.values() if isinstance(each, Collection)]
        dicts = (each.values() for each in sized if isinstance(each, dict))
        self._values, self._views = values, [*sized, *dicts]  # views show changes
        self._sizes, self._flat_parts = self._flat()

    def _flat(self) -> tuple[list[int], list[Any]]:
        """Return the sizes and the parts of all containers, without calls of Python."""
        return [*map(len, self._views)], [*chain.from_iterable(self._views)]

    def _compare(self, owner: Any, *steps: _Step) -> None:
        """Compare the value at the end of a chain, and follow the code in it."""
        if (id(owner), *steps) not in self._reads:
            self._reads[id(owner), *steps] = owner, *steps
            self._left.append((_along(owner, *steps), False))

    def _follow(self, value: Any, root: bool) -> None:
        """Note the reads of code or of a module; `root` if vgrad's code leads to it."""
        kind, owner, function = type(value), _GONE, value
        if kind is types.MethodType:
            function, owner = value.__func__, value.__self__
        key = id(function), id(owner)
        ends = _is_plain(value) or isinstance(value, Tensor) or key in self._seen
        if ends or kind.__module__.startswith("vgrad.compiled"):
            return
        self._seen[key] = value
        if isinstance(function, types.FunctionType):
            self._left.append((owner, root))
            self._follow_function(function, owner, root)
        elif isinstance(value, FunctionalModel | nn.Module):
            for _, module in value.named_modules():
                self._seen[id(module), id(_GONE)] = module
                own = (*module.parameters(False), *module.buffers(False))
                for each in (module, *filter(vars, own)):
                    self._reads["vars", id(each)] = each, (_attribute, "__dict__")
        elif (parts := _parts(value)) is not None:
            if kind is partial:
                self._reads["partial", id(value)] = (value,)
            self._left += ((each, root) for each in parts)
        else:
            if any(each.__module__.startswith("vgrad.") for each in kind.__mro__):
                own = getattr(value, "__dict__", {})
                self._left += ((each, True) for each in own.values())
            if isinstance(kind.__call__, types.FunctionType):
                self._left.append((types.MethodType(kind.__call__, value), root))

    def _follow_function(
        self, function: types.FunctionType, owner: Any, root: bool
    ) -> None:
        code, variables = function.__code__, function.__globals__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        inside = _attribute, "cell_contents"
        starts: dict[str, tuple[Any, ...]] = {name: (x, inside) for name, x in cells}
        installed = "site-packages" in code.co_filename and not root
        if installed or is_library(code.co_filename):
            self._left += ((_along(*each), root) for each in starts.values())
            return
        for each in starts.values():
            self._compare(*each)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._compare(function, (_attribute, name))
        last = code.co_varnames[: code.co_argcount][::-1]
        values = dict(zip(last, (function.__defaults__ or ())[::-1], strict=False))
        values |= function.__kwdefaults__ or {}
        if owner is not _GONE and last:
            values[last[-1]] = owner
        starts |= {name: (value,) for name, value in values.items()}
        codes = [code]
        for each in codes:
            codes += (x for x in each.co_consts if isinstance(x, types.CodeType))
            for scope, name, steps in _chains(each):
                if scope in ("GLOBAL", "NAME"):
                    self._compare(variables, (_item, name), *steps)
                    if name not in variables:
                        self._compare(function.__builtins__, (_item, name), *steps)
                elif steps and name in starts and (scope == "DEREF" or each is code):
                    self._compare(*starts[name], *steps)

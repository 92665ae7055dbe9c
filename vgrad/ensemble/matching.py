"""Whether two models run the same code, so that one can run with the other's values.

An ensemble runs the module of its first member. So everything that a copy of a module
keeps is compared: classes, modes, plain attributes, functions and what they close over,
hooks, and all there is to know of registered tensors except their values: attributes
that users put on them, too.
"""

import reprlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from vgrad import checks
from vgrad.functional import slots
from vgrad.torch_private.tensors import HOOKS, registered

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch itself gives a module; those that matter are compared apart."""

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_WHOLE = (*_VALUES, type, types.CodeType, types.BuiltinFunctionType, types.ModuleType)
_OF_A_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")

_Facts = dict[str, list[tuple[str, Any]]]
"""What is known of each named part: texts, and what tells equal texts apart."""


class Difference(NamedTuple):
    """Where two models differ, and what is there in the first and in the other."""

    path: str
    first: str
    other: str


def check_alike(function: str, models: Sequence[nn.Module]) -> None:
    """Refuse models of which one differs from the first in more than its values.

    Raises:
        ValueError: the message names the member and the first entry, submodule or
            attribute that differs.
    """
    for index, model in enumerate(models):
        found = difference(models[0], model)
        if found is not None:
            where = f"'{found.path}' of " if found.path else ""
            raise ValueError(
                f"{function}: expected {found.first} in {where}member {index} as in "
                f"member 0, got {found.other}. All members run the code of member 0: "
                f"only the values of parameters and buffers may differ."
            )


def difference(first: nn.Module, other: nn.Module) -> Difference | None:
    """Return the first thing that keeps one model from running with another's values.

    It is None for models that are alike. Submodules and their classes come first, then
    the tensors, then modes, hooks and attributes.

    Example:
        >>> difference(nn.Dropout(0.1), nn.Dropout(0.5))
        Difference(path='p', first='0.1', other='0.5')
    """
    return next(_differences(first, other), None)


def _differences(first: nn.Module, other: nn.Module) -> Iterator[Difference]:
    """Yield what differs; each step relies on the ones before having found nothing."""
    yield from _entries(_submodules(first), _submodules(other), "submodules")
    yield from _entries(_tensors(first), _tensors(other), "entries")
    comparison = _Comparison(first, other)
    for name, module in first.named_modules():
        twin = other.get_submodule(name)
        yield from comparison.parts(name, _attributes(module), _attributes(twin))
    twins = dict(slots.named_tensors(other))
    for name, tensor in slots.named_tensors(first):
        yield from comparison.parts(name, _labelled(tensor), _labelled(twins[name]))


def _labelled(tensor: Tensor) -> dict[str, Any]:
    return {f".{key}": value for key, value in vars(tensor).items()}


def _entries(first: _Facts, other: _Facts, kind: str) -> Iterator[Difference]:
    """Yield the names that one of two lacks, the facts that differ, another order."""
    none: list = [("none", None)]
    for name in {**first, **other}:
        pairs = zip(first.get(name, none), other.get(name, none), strict=False)
        for (text, fact), (other_text, other_fact) in pairs:
            if (text, fact) != (other_text, other_fact):
                yield Difference(name, text, _another(text, other_text))
    if list(first) != list(other):
        orders = (f"{kind} in the order {list(each)}" for each in (first, other))
        yield Difference("", *orders)


def _facts(parts: Iterable, what: str, tell: Callable[[Any], list]) -> _Facts:
    """Tell of each part what it is and which earlier one it is the same as."""
    found: _Facts = {}
    names: dict[int, str] = {}
    for name, part in parts:
        at = names.setdefault(id(part), name)
        tied = f"a {what} of its own" if at == name else f"the {what} tied to {at!r}"
        kind, *rest = tell(part)
        found[name] = [kind, (tied, None), *rest]
    return found


def _submodules(model: nn.Module) -> _Facts:
    def tell(module: nn.Module) -> list:
        form, kind = "parametrized " if is_parametrized(module) else "", _kind(module)
        return [(f"a {form}{_shown(kind)}", kind)]

    return _facts(model.named_modules(remove_duplicate=False), "module", tell)


def _tensors(model: nn.Module) -> _Facts:
    buffers, persistent = slots.own_buffers(model), slots.persistent(model)

    def tell(tensor: Tensor) -> list:
        kind = "a buffer" if id(tensor) in buffers else "a parameter"
        if id(tensor) in buffers - persistent:
            kind = "a buffer that is not persistent"
        return [(text, None) for text in (kind, *_form(tensor))]

    return _facts(slots.named_tensors(model), "tensor", tell)


def _form(tensor: Tensor) -> tuple[str, ...]:
    """Return all there is to know of a tensor except its values."""
    return (
        f"shape {tuple(tensor.shape)}",
        f"dtype {tensor.dtype}",
        f"device {tensor.device}",
        f"requires_grad={tensor.requires_grad}",
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return mode, hooks and plain attributes of a module, by labels such as `.p`."""
    held = vars(module)
    computed = {  # anew in each call, from tensors that are registered
        hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
        for hook in held[HOOKS[0]].values()
        if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod)
    }
    found: dict[str, Any] = {".training": module.training}
    for key, value in held.items():
        is_computed = key in computed and isinstance(value, Tensor)
        if key not in _OF_EVERY_MODULE and not is_computed:
            found[f".{key}"] = value
    # The keys of hooks are numbers counted over all modules.
    for key in HOOKS:
        flagged = held.get(f"{key}_with_kwargs", {})
        found[f".{key}"] = [(hook, at in flagged) for at, hook in held[key].items()]
    return found | {".full_backward_hook": held["_is_full_backward_hook"]}


class _Comparison:
    """Compares what two models hold; the parts of the models themselves by name."""

    def __init__(self, *models: nn.Module) -> None:
        self._names: list[dict[int, str]] = []
        for model in models:
            parts = [*model.named_modules(), *slots.named_tensors(model)]
            # The first name of each is the last one written.
            self._names.append({id(part): name for name, part in reversed(parts)})
        # The objects are kept, since the id of a lost one is given to another.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}

    def parts(
        self, path: str, first: dict[str, Any], other: dict[str, Any]
    ) -> Iterator[Difference]:
        """Yield what differs between labelled parts."""
        for label in {**first, **other}:
            inner = f"{path}{label}".lstrip(".")
            if label not in other:
                yield Difference(inner, _shown(first[label]), "nothing")
            elif label not in first:
                yield Difference(inner, "nothing", _shown(other[label]))
            else:
                yield from self._values(inner, first[label], other[label])

    def _values(self, path: str, first: Any, other: Any) -> Iterator[Difference]:
        """Yield what differs between two values."""
        name, other_name = self._names[0].get(id(first)), self._names[1].get(id(other))
        if name != other_name:
            yield Difference(path, f"what is at {name!r}", f"what is at {other_name!r}")
        if name is not None or first is other or (id(first), id(other)) in self._seen:
            return
        self._seen[id(first), id(other)] = first, other
        if _kind(first) is not _kind(other):
            yield _differ(path, first, other)
        elif isinstance(first, Tensor):
            for fact, another in zip(_form(first), _form(other), strict=True):
                if fact != another:
                    yield Difference(path, fact, another)
            if not checks.same_values(first.detach(), other.detach()):
                yield Difference(path, "the values", "others")
        elif (inside := _parts(first)) is None or (others := _parts(other)) is None:
            if first != other and not (first != first and other != other):
                yield _differ(path, first, other)
        else:
            yield from self.parts(path, inside, others)
            if type(first) is dict and list(inside) != list(others):
                yield Difference(path, f"the order {list(first)}", f"{list(other)}")


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what an object is made of, by labels; None for one without parts.

    An object is taken apart as `copy` would do it, so that nothing is missed that the
    copy in an ensemble has.
    """
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, nn.Module):
        held = {f".{k}": v for each in registered(value) for k, v in each.items()}
        return _attributes(value) | held
    if isinstance(value, types.FunctionType):
        # The cell of a name that was never bound is empty.
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        return {f".{key}": getattr(value, key) for key in _OF_A_FUNCTION} | {
            ".__closure__": [cell.cell_contents for cell in cells],
            ".__globals__": id(value.__globals__),
        }
    if isinstance(value, types.MethodType):
        # By the protocol of `copy` the name of the function would stand for it.
        return {".__func__": value.__func__, ".__self__": value.__self__}
    if isinstance(value, weakref.ref):
        return {"()": value()}
    if type(value) in (list, tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    if type(value) in (dict, set, frozenset):
        if not all(isinstance(key, _VALUES) for key in value):
            return _parts(list(value.items())) if isinstance(value, dict) else None
        pairs = value if isinstance(value, dict) else {key: key for key in value}
        return {f"[{key!r}]": part for key, part in pairs.items()}
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # which one is up to the class of the object
        return None
    if isinstance(reduced, str):  # the name of something global
        return None
    make, args, state, items, pairs, *_ = (*reduced, None, None, None)
    named = state if isinstance(state, dict) else {"__state__": state}
    found = {".__class__": make, ".__args__": args}
    found |= {f".{key}": part for key, part in named.items()}
    return found | {".items": list(items or ()), ".pairs": list(pairs or ())}


def _kind(value: Any) -> type:
    """Return the class; of a parametrized module the one that it had before."""
    if isinstance(value, nn.Module) and is_parametrized(value):
        return type(value).__bases__[0]
    return type(value)


def _differ(path: str, first: Any, other: Any) -> Difference:
    text, other_text = _shown(first), _shown(other)
    return Difference(path, text, _another(text, other_text))


def _another(text: str, other: str) -> str:
    return f"another {other.removeprefix('a ')}" if text == other else other


def _shown(value: Any) -> str:
    """Describe a value in a few words, without addresses in memory."""
    if isinstance(value, types.CodeType):
        return f"the code of {value.co_qualname!r}"
    if isinstance(value, _VALUES):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    return getattr(value, "__qualname__", f"a {_shown(type(value))}")

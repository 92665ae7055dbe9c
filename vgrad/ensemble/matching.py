"""Whether two models run the same code, so that one can run with the other's values.

An ensemble runs the module of its first member. So everything that a copy of a module
keeps is compared: classes, plain attributes, functions and what they close over, hooks,
and all there is to know of the registered tensors except their values.
"""

import reprlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
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
_WHOLE = (*_VALUES, CodeType, type, BuiltinFunctionType, ModuleType)
_OF_A_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")


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
    """Yield what differs; a step relies on the ones before having found nothing."""
    yield from _entries(_submodules(first), _submodules(other), "submodules")
    yield from _entries(_tensors(first), _tensors(other), "entries")
    comparison = _Comparison(first, other)
    for name, module in first.named_modules():
        twin = other.get_submodule(name)
        yield from comparison.parts(name, _attributes(module), _attributes(twin))


def _entries(
    first: dict[str, dict], other: dict[str, dict], kind: str
) -> Iterator[Difference]:
    """Yield the names that one of two lacks, the facts that differ, another order."""
    for name in [*first, *(name for name in other if name not in first)]:
        if name not in other:
            yield Difference(name, next(iter(first[name])), "none")
        elif name not in first:
            yield Difference(name, "none", next(iter(other[name])))
        else:
            pairs = zip(first[name].items(), other[name].items(), strict=True)
            for (text, fact), (other_text, other_fact) in pairs:
                if fact != other_fact:
                    yield Difference(name, text, _another(text, other_text))
    if list(first) != list(other):
        orders = (f"{kind} in the order {list(each)}" for each in (first, other))
        yield Difference("", *orders)


def _submodules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Tell of each submodule its class and which earlier one it is the same as."""
    found: dict[str, dict[str, Any]] = {}
    first_names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = first_names.setdefault(id(module), name)
        form = "parametrized " if is_parametrized(module) else ""
        found[name] = {
            f"a {form}{_shown(_kind(module))}": (_kind(module), form),
            _tied(first, name, "module"): first,
        }
    return found


def _tensors(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Tell of each entry its kind, tie, shape, dtype, device and `requires_grad`."""
    own_buffers, persistent = slots.own_buffers(model), slots.persistent(model)
    found: dict[str, dict[str, Any]] = {}
    first_names: dict[int, str] = {}
    for name, tensor in slots.named_tensors(model):
        kind = "a buffer" if id(tensor) in own_buffers else "a parameter"
        if id(tensor) in own_buffers - persistent:
            kind = "a buffer that is not persistent"
        facts = [
            kind,
            _tied(first_names.setdefault(id(tensor), name), name, "tensor"),
            f"shape {tuple(tensor.shape)}",
            f"dtype {tensor.dtype}",
            f"device {tensor.device}",
            f"requires_grad={tensor.requires_grad}",
        ]
        found[name] = {fact: fact for fact in facts}
    return found


def _tied(first: str, name: str, kind: str) -> str:
    return f"a {kind} of its own" if first == name else f"the {kind} tied to {first!r}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return mode, hooks and plain attributes of a module, by labels such as `.p`."""
    held = vars(module)
    hooks = held[HOOKS[0]].values()
    computed = {hook.name for hook in hooks if isinstance(hook, WeightNorm)}
    computed |= {hook.name for hook in hooks if isinstance(hook, SpectralNorm)}
    computed |= {h._tensor_name for h in hooks if isinstance(h, BasePruningMethod)}
    found: dict[str, Any] = {".training": module.training}
    found |= {
        f".{key}": value
        for key, value in held.items()
        if key not in _OF_EVERY_MODULE
        and not (key in computed and isinstance(value, Tensor))  # anew in each call
    }
    # The keys of hooks are numbers counted over all modules.
    for key in HOOKS:
        flagged = held.get(f"{key}_with_kwargs", {})
        found[f".{key}"] = [(hook, at in flagged) for at, hook in held[key].items()]
    return found | {".full_backward_hook": held["_is_full_backward_hook"]}


class _Comparison:
    """Compares what two models hold; the parts of the models themselves by name."""

    def __init__(self, first: nn.Module, other: nn.Module) -> None:
        self._names = _names(first), _names(other)
        # The objects are kept, since the id of a lost one is given to another.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}

    def parts(
        self, path: str, first: Mapping[str, Any], other: Mapping[str, Any]
    ) -> Iterator[Difference]:
        """Yield what differs between labelled parts."""
        for label in [*first, *(label for label in other if label not in first)]:
            inner = f"{path}{label}".lstrip(".")
            if label not in other:
                yield Difference(inner, _shown(first[label]), "nothing")
            elif label not in first:
                yield Difference(inner, "nothing", _shown(other[label]))
            else:
                yield from self._values(inner, first[label], other[label])

    def _values(self, path: str, first: Any, other: Any) -> Iterator[Difference]:
        """Yield what differs between two values."""
        names = self._names[0].get(id(first)), self._names[1].get(id(other))
        if names != (None, None):
            if names[0] != names[1]:
                yield Difference(path, *(f"what is at {name!r}" for name in names))
            return
        if first is other or (id(first), id(other)) in self._seen:
            return
        self._seen[id(first), id(other)] = first, other
        if _kind(first) is not _kind(other):
            yield _differ(path, first, other)
        elif isinstance(first, Tensor):
            yield from self.parts(path, _facts(first), _facts(other))
            if not checks.same_values(first.detach(), other.detach()):
                yield Difference(path, "the values", "others")
        else:
            yield from self._objects(path, first, other)

    def _objects(self, path: str, first: Any, other: Any) -> Iterator[Difference]:
        """Yield what differs between two objects of one kind, part by part."""
        inside, other_inside = _parts(first), _parts(other)
        if inside is None or other_inside is None:
            unequal = first != other and not (first != first and other != other)
            if unequal:
                yield _differ(path, first, other)
            return
        yield from self.parts(path, inside, other_inside)
        if type(first) is dict and list(inside) != list(other_inside):
            yield Difference(path, f"the order {list(first)}", f"{list(other)}")


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what an object is made of, by labels; None for one without parts.

    An object is taken apart as `copy` would do it, so that nothing is missed that the
    copy in an ensemble has.
    """
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, nn.Module):
        held = {k: v for each in registered(value) for k, v in each.items()}
        return _attributes(value) | {f".{key}": part for key, part in held.items()}
    if isinstance(value, FunctionType):
        return {f".{key}": getattr(value, key) for key in _OF_A_FUNCTION} | {
            ".__closure__": [
                cell.cell_contents
                for cell in value.__closure__ or ()
                if cell != CellType()  # a name that was never bound
            ],
            ".__globals__": id(value.__globals__),
        }
    if isinstance(value, MethodType):
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
    return _reduced(value)


def _reduced(value: Any) -> dict[str, Any] | None:
    """Take an object apart by the protocol of `copy` and `pickle`."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # which one is up to the class of the object
        return None
    if isinstance(reduced, str):  # the name of something global
        return None
    make, args, state, items, pairs, *_ = (*reduced, None, None, None)
    found = {".__class__": make, ".__args__": args}
    if isinstance(state, dict):
        found |= {f".{key}": part for key, part in state.items()}
    else:
        found[".__state__"] = state
    return found | {".items": list(items or ()), ".pairs": list(pairs or ())}


def _facts(tensor: Tensor) -> dict[str, Any]:
    return {
        ".shape": tuple(tensor.shape),
        ".dtype": str(tensor.dtype),
        ".device": str(tensor.device),
        ".requires_grad": tensor.requires_grad,
    }


def _names(model: nn.Module) -> dict[int, str]:
    """Return the first name of each registered module and tensor, by id."""
    found: dict[int, str] = {}
    for name, part in [*model.named_modules(), *slots.named_tensors(model)]:
        found.setdefault(id(part), name)
    return found


def _kind(value: Any) -> type:
    """Return the class; of a parametrized module the one that it had before."""
    if isinstance(value, nn.Module) and is_parametrized(value):
        return type(value).__bases__[0]
    return type(value)


def _differ(path: str, first: Any, other: Any) -> Difference:
    return Difference(path, _shown(first), _another(_shown(first), _shown(other)))


def _another(text: str, other: str) -> str:
    return f"another {other.removeprefix('a ')}" if text == other else other


def _shown(value: Any) -> str:
    """Describe a value in a few words, without addresses in memory."""
    if isinstance(value, CodeType):
        return f"the code of {value.co_qualname!r}"
    if isinstance(value, _VALUES):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    return getattr(value, "__qualname__", f"a {_shown(type(value))}")

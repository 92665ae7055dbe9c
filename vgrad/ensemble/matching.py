"""Whether two models run the same code, so that one can run with the other's values.

Everything that a copy of a module keeps is compared: classes, modes, plain attributes,
functions and their closures, hooks, and of registered tensors all but their values.
"""

import reprlib
import types
import weakref
from collections.abc import Iterator
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
"""Attributes that torch itself gives a module; some of them are compared apart."""

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_WHOLE = (*_VALUES, type, types.CodeType, types.BuiltinFunctionType, types.ModuleType)
_OF_A_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")


class Difference(NamedTuple):
    """A place where two models differ, and both sides in words."""

    path: str
    first: str
    other: str


def difference(first: nn.Module, other: nn.Module) -> Difference | None:
    """Return the first thing that keeps one model from taking the other's values."""
    return next(_Comparison(first, other).values("", first, other, entry=True), None)


class _Comparison:
    """Compares the contents of two models; references to their own parts by name."""

    def __init__(self, *models: nn.Module) -> None:
        self._names: list[dict[int, str]] = []
        self._roles: dict[int, str] = {}
        for model in models:
            parts = [*model.named_modules(), *slots.named_tensors(model)]
            # The first name of each is the last one written.
            self._names.append({id(part): name for name, part in reversed(parts)})
            buffers = slots.own_buffers(model)
            self._roles |= dict.fromkeys(buffers, "a buffer")
            temporary = buffers - slots.persistent(model)
            self._roles |= dict.fromkeys(temporary, "a buffer that is not persistent")
        # The objects are kept, since the id of a lost one is given to another.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}

    def values(
        self, path: str, first: Any, other: Any, *, entry: bool = False
    ) -> Iterator[Difference]:
        """Yield differences of two values; an entry is registered under its path."""
        name, other_name = self._names[0].get(id(first)), self._names[1].get(id(other))
        if None not in (name, other_name) and name != other_name:
            parts = f"the part at {name!r}", f"the part at {other_name!r}"
            yield Difference(path, *parts)
        elif name != other_name:
            yield _differ(path, first, other)
        if name is not None and not (entry and name == path):
            return  # the part is compared under its first name
        if first is other or (id(first), id(other)) in self._seen:
            return
        self._seen[id(first), id(other)] = first, other
        if _kind(first) is not _kind(other):
            yield _differ(path, first, other)
        elif isinstance(first, Tensor):
            for fact, another in zip(self._form(first), self._form(other), strict=True):
                if fact != another:
                    yield Difference(path, fact, another)
            if entry:
                pair = [
                    {f".{k}": v for k, v in vars(x).items()} for x in (first, other)
                ]
                yield from self._parts(path, *pair)
            elif not checks.same_values(first.detach(), other.detach()):
                yield Difference(path, "the values", "others")
        elif isinstance(first, nn.Module):
            pair = [
                {k: v for named in registered(x) for k, v in named.items()}
                for x in (first, other)
            ]
            yield from self._parts(f"{path}.", *pair, entry=entry)
            yield from _order(path, *pair)
            yield from self._parts(path, _attributes(first), _attributes(other))
        elif (inside := _parts(first)) is None or (others := _parts(other)) is None:
            if first != other and not (first != first and other != other):
                yield _differ(path, first, other)
        else:
            yield from self._parts(path, inside, others)
            if type(first) is dict:
                yield from _order(path, first, other)

    def _parts(
        self, path: str, first: dict, other: dict, *, entry: bool = False
    ) -> Iterator[Difference]:
        for label in {**first, **other}:
            inner = f"{path}{label}".lstrip(".")
            if label not in other:
                yield Difference(inner, _shown(first[label]), "nothing")
            elif label not in first:
                yield Difference(inner, "nothing", _shown(other[label]))
            else:
                yield from self.values(inner, first[label], other[label], entry=entry)

    def _form(self, tensor: Tensor) -> tuple[str, ...]:
        """Return all facts of a tensor except its values."""
        return (
            self._roles.get(id(tensor), "a parameter"),
            f"shape {tuple(tensor.shape)}",
            f"dtype {tensor.dtype}",
            f"device {tensor.device}",
            f"requires_grad={tensor.requires_grad}",
        )


def _order(path: str, first: dict, other: dict) -> Iterator[Difference]:
    if list(first) != list(other):
        yield Difference(path, f"the order {list(first)}", f"{list(other)}")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return mode, hooks and plain attributes of a module, by labels such as `.p`."""
    variables = vars(module)
    computed = {  # again in each call, from tensors that are registered
        hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
        for hook in variables[HOOKS[0]].values()
        if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod)
    }
    attributes = {
        f".{key}": value
        for key, value in variables.items()
        if key not in _OF_EVERY_MODULE
        and not (key in computed and isinstance(value, Tensor))
    }
    attributes |= {
        ".training": module.training,
        ".full_backward_hook": variables["_is_full_backward_hook"],
    }
    for key in HOOKS:  # whose keys are numbers counted over all modules
        flagged, hooks = variables.get(f"{key}_with_kwargs", {}), variables[key]
        attributes[f".{key}"] = [(hook, at in flagged) for at, hook in hooks.items()]
    return attributes


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of an object, by labels; None for one without parts."""
    if isinstance(value, _WHOLE):
        return None
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
    parts = {".__class__": make, ".__args__": args}
    parts |= {f".{key}": part for key, part in named.items()}
    return parts | {".items": list(items or ()), ".pairs": list(pairs or ())}


def _kind(value: Any) -> type:
    if isinstance(value, nn.Module) and is_parametrized(value):
        return type(value).__bases__[0]
    return type(value)


def _differ(path: str, first: Any, other: Any) -> Difference:
    text, other_text = _shown(first), _shown(other)
    if text == other_text:
        other_text = f"another {text.removeprefix('a ')}"
    return Difference(path, text, other_text)


def _shown(value: Any) -> str:
    """Describe a value in a few words, without addresses in memory."""
    if isinstance(value, types.CodeType):
        return f"the code of {value.co_qualname!r}"
    if isinstance(value, _VALUES):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    return getattr(value, "__qualname__", f"a {_shown(type(value))}")

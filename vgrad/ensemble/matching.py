"""Whether models run the same code, so that one can run with the values of another.

Classes, modes, hooks and plain attributes are compared, and all of a registered tensor
but its values. Of an object its class counts, and the attributes in its `vars`, but of
an object within another one only the class.
"""

import functools
import types
from typing import Any

from torch import Tensor, dtype, nn

from vgrad import checks
from vgrad.torch_private.tensors import HOOKS, registered

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, dtype)
_OF_EVERY_MODULE = {f".{key}" for key in vars(nn.Module())} - {".training"}
_OF_CODE = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
}
_FOLLOWED = (nn.Module, Tensor, list, tuple, dict, set, frozenset, *_OF_CODE)


def contents(model: nn.Module) -> dict[str, Any]:
    """Return what all members have in common, by place and in the order of use."""
    first, found, left = dict[int, str](), dict[str, Any](), list[Any]([("", model, 0)])
    for named in model.named_modules(), model.named_parameters(), model.named_buffers():
        for name, part in named:
            first.setdefault(id(part), name)
    entries = {*first}
    for path, value, depth in left:
        kind = type(value)
        if isinstance(value, (*_PLAIN, types.ModuleType)):
            found[path] = repr(value)
        elif isinstance(value, types.CodeType):
            found[path] = value
        elif hasattr(value, "__dict__") and first.setdefault(id(value), path) != path:
            found[path] = f"the part at {first[id(value)]!r}"
        else:
            found[path] = f"a {kind.__module__}.{kind.__qualname__}"
            if isinstance(value, Tensor):
                found[f"{path}.shape"] = str((*value.shape,))
                facts = ("dtype", "device", "requires_grad")
                found |= {f"{path}.{x}": str(getattr(value, x)) for x in facts}
                found |= {} if id(value) in entries else {f"{path}.data": value.data}
            depth += not isinstance(value, _FOLLOWED)
            parts = _parts(value) if depth < 2 else {}
            left += [(f"{path}{at}".lstrip("."), x, depth) for at, x in parts.items()]
    return found


def difference(first: dict, other: dict) -> tuple[str, Any, Any] | None:
    """Return the first place where contents of models differ, and both in words."""
    for path in {**first, **other}:
        one, two = first.get(path, "nothing"), other.get(path, "nothing")
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if not checks.same_values(one, two):
                return path, "these values", "others"
        elif one != two:
            code = isinstance(one, types.CodeType)
            return (path, "this code", "other code") if code else (path, one, two)
    moved = (pair for pair in zip(first, other, strict=True) if pair[0] != pair[1])
    return next((("", f"{a!r} before {b!r}", "another order") for a, b in moved), None)


def _parts(value: Any) -> dict[str, Any]:
    """Return the parts of a value, by labels such as `.p`."""
    named = {f".{key}": part for key, part in getattr(value, "__dict__", {}).items()}
    if isinstance(value, nn.Module):
        hooks = {f".{key}": [*named[f".{key}"].values()] for key in HOOKS}
        # Old forms of normalized and pruned weights are computed in each call.
        before = hooks[f".{HOOKS[0]}"]
        old = {f".{getattr(x, 'name', getattr(x, '_tensor_name', ''))}" for x in before}
        plain = sorted(named.keys() - _OF_EVERY_MODULE - old)
        parts = {f".{key}": x for each in registered(value) for key, x in each.items()}
        return parts | {key: named[key] for key in plain} | hooks
    if isinstance(value, types.FunctionType):
        # The cell of a name that was never bound is empty.
        cells = [x for x in value.__closure__ or () if x != types.CellType()]
        named[".closure"] = [x.cell_contents for x in cells]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {f"[{key!r}]": part for key, part in value.items()} | named
    held = {f".{key}": getattr(value, key) for key in _OF_CODE.get(type(value), ())}
    return held | dict(sorted(named.items()))

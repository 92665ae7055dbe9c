"""What a model or another object holds, as facts by place, to be compared.

Classes, modes, hooks and plain attributes are read, names, code and closures of
functions, and all of a registered tensor but its values. Of an object its class counts,
and the attributes in its `vars`, but of an object within another one only the class.
"""

import functools
import re
import types
from typing import Any

from torch import Tensor, dtype, nn

from vgrad import checks
from vgrad.torch_private.tensors import HOOKS, registered

_PLAIN = bool, int, float, complex, str, bytes, range, slice, type(None), dtype
_OF_EVERY_MODULE = {f".{key}" for key in vars(nn.Module())} - {".training"}
_OF_CODE = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
}
_DEVICE = re.compile(r"\b(cpu|cuda|hpu|meta|mps|mtia|xla|xpu)(:\d+)?\b")
_DIFFERING = ".shape", ".device", ".requires_grad"  # of tensors, between processes
_FOLLOWED = (nn.Module, Tensor, list, tuple, dict, set, frozenset, *_OF_CODE)


def contents(root: Any) -> dict[str, Any]:
    """Return facts by place, in the order of use: texts, code and values of tensors."""
    first, facts, queue = dict[int, str](), dict[str, Any](), list[Any]([("", root, 0)])
    model = root if isinstance(root, nn.Module) else nn.Module()
    for named in model.named_modules(), model.named_parameters(), model.named_buffers():
        for name, part in named:
            first.setdefault(id(part), name)
    entries = {*first}
    for path, value, depth in queue:
        if isinstance(value, _PLAIN):
            facts[path] = repr(value)
        elif isinstance(value, types.CodeType):
            facts[path] = value
        elif hasattr(value, "__dict__") and first.setdefault(id(value), path) != path:
            facts[path] = f"the part at {first[id(value)]!r}"
        else:
            named = value if hasattr(value, "__qualname__") else type(value)
            facts[path] = f"{named.__module__}.{named.__qualname__}"
            if isinstance(value, Tensor):
                facts[f"{path}.shape"] = str((*value.shape,))
                attributes = ("dtype", "device", "requires_grad")
                facts |= {f"{path}.{x}": str(getattr(value, x)) for x in attributes}
                facts |= {} if id(value) in entries else {f"{path}.data": value.data}
            depth += not isinstance(value, _FOLLOWED)
            parts = _parts(value) if depth < 2 else {}
            queue += [(f"{path}{at}".lstrip("."), x, depth) for at, x in parts.items()]
    return facts


def portable(**roots: Any) -> dict[str, str]:
    """Return the facts, by place, that are the same in every process.

    Values and shapes of tensors, and devices, may differ.
    """
    facts = {
        f"{name}.{path}".strip(".").replace(".[", "["): fact
        for name, root in roots.items()
        for path, fact in contents(root).items()
    }
    # Where processes are spawned, the main module has another name in them.
    return {
        path: _DEVICE.sub("device", fact).replace("__mp_main__", "__main__")
        for path, fact in facts.items()
        if isinstance(fact, str) and not path.endswith(_DIFFERING)
    }


def difference(first: dict, other: dict) -> tuple[str, Any, Any] | None:
    """Return the first place where contents differ, and both in words."""
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
    if isinstance(value, type | types.ModuleType):
        return {}
    named = {f".{key}": part for key, part in getattr(value, "__dict__", {}).items()}
    if isinstance(value, nn.Module):
        hooks = {f".{key}": [*named[f".{key}"].values()] for key in HOOKS}
        # Old forms of normalized and pruned weights are computed in each call.
        before = hooks[f".{HOOKS[0]}"]
        old = {f".{getattr(x, 'name', getattr(x, '_tensor_name', ''))}" for x in before}
        plain = sorted(named.keys() - _OF_EVERY_MODULE - old)
        parts = {
            f".{key}": x for group in registered(value) for key, x in group.items()
        }
        return parts | {key: named[key] for key in plain} | hooks
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        # The cell of a name that was never bound is empty.
        bound = ((key, x) for key, x in cells if x != types.CellType())
        named |= {f".{key}": x.cell_contents for key, x in bound}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {f"[{key!r}]": part for key, part in value.items()} | named
    code = {f".{key}": getattr(value, key) for key in _OF_CODE.get(type(value), ())}
    return code | dict(sorted(named.items()))

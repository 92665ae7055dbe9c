"""The tensors that a rule keeps until the backward pass, and their versions."""

import gc
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from vgrad.persample.rules.table import Maker
from vgrad.torch_private.autograd import Hooks
from vgrad.torch_private.tensors import version_of


class Stamp(NamedTuple):
    """The version that a tensor had, which an op needs unchanged."""

    op: str
    tensor: ref[Tensor]
    version: int


def stamped(op: str, value: Any) -> list[Stamp]:
    """Stamp the tensors that a function or another object refers to."""
    return [Stamp(op, ref(each), version_of(each)) for each in captured(value)]


def check_unchanged(stamps: Iterable[Stamp]) -> None:
    """Compare the versions of tensors that are left with those that they had."""
    for stamp in stamps:
        tensor = stamp.tensor()
        if tensor is not None and version_of(tensor) != stamp.version:
            raise RuntimeError(
                f"{stamp.op}: expected an input that stays as it is until the backward "
                f"pass is over, but an op of the loss wrote into it in place."
            )


def captured(value: Any) -> list[Tensor]:
    """Return the tensors that an object refers to, itself or through others."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left: list[Any] = [value]
    while left:
        value = left.pop()
        known = id(value) in seen or isinstance(value, type | ModuleType)
        if known or not gc.is_tracked(value):  # numbers and the like refer to nothing
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):  # not to its globals
            held = (value.__defaults__, value.__kwdefaults__, vars(value))
            left += gc.get_referents(*(value.__closure__ or ()), *held)
        elif isinstance(value, Tensor):
            found.append(value)
        else:
            left += gc.get_referents(value)
    return found


def packed(
    factors: Callable[..., Mapping[str, Maker] | None],
    given: Mapping[str, Any],
    weights: Collection[str],
    hooks: Hooks,
) -> dict[str, Maker]:
    """Pack what a rule keeps as autograd packs what it saves; return its makers.

    Only when the first of them runs are the tensors unpacked, all of them, once in a
    backward pass.
    """
    pack, unpack = hooks
    handles = {
        name: pack(value)
        for name, value in given.items()
        if isinstance(value, Tensor) and name not in weights
    }
    rest = {name: value for name, value in given.items() if name not in handles}
    makers: dict[str, Maker] = {}

    def maker(name: str) -> Maker:
        def make(g: Tensor) -> Any:
            if not makers:
                unpacked = {name: unpack(each) for name, each in handles.items()}
                found = factors(**rest, **unpacked) or {}
                makers.update((name, found[name]) for name in weights)
            return makers.pop(name)(g)

        return make

    return {name: maker(name) for name in weights}

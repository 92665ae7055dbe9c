"""The tensors that a rule keeps until the backward pass, and their versions."""

import gc
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from vgrad.persample.rules.table import Maker
from vgrad.torch_private.tensors import version_of


def check_unchanged(op: str, kept: list[tuple[Tensor, int]]) -> None:
    """Compare the versions of tensors with those that they had."""
    for tensor, version in kept:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"{op}: expected an input that stays as it is until the backward pass, "
                f"but an op of the loss wrote into it in place."
            )


def captured(maker: Maker) -> list[Tensor]:
    """Return the tensors that a function refers to, itself or through other objects."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left: list[Any] = [maker]
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

"""Policies: the dtypes of parameters, computation and outputs.

A policy casts parameters and outputs around `autocast(compute_dtype)`, which decides op
by op what runs in the low dtype.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.tree import tree_map
from vgrad.typing import Tree

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""The dtypes that a policy may name."""

_SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_NAMED = {
    "mixed_float16": "params=float32,compute=float16,output=float32",
    "mixed_bfloat16": "params=float32,compute=bfloat16,output=float32",
}
_KEYS = {"p": "params", "c": "compute", "o": "output"}


@dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computation and outputs.

    `Policy.parse` reads `str(policy)`. The casts change floating tensors anywhere in a
    tree, and return the rest as it is.

    Raises:
        ValueError: a dtype other than float16, bfloat16, float32 and float64.

    Example:
        >>> policy = Policy.parse("mixed_bfloat16")
        >>> policy.compute_dtype
        torch.bfloat16
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
        >>> policy.cast_to_compute({"x": torch.ones(2), "ids": torch.arange(2)})
        {'x': tensor([1., 1.], dtype=torch.bfloat16), 'ids': tensor([0, 1])}
    """

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    output_dtype: torch.dtype

    def __post_init__(self) -> None:
        """Refuse other dtypes than floating ones."""
        for name, value in self.__dict__.items():
            if value not in DTYPES.values():
                allowed = ", ".join(f"torch.{known}" for known in DTYPES)
                raise ValueError(
                    f"Policy({name}={value!r}): expected one of {allowed}."
                )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a policy from a string.

        Either `params=DTYPE,compute=DTYPE,output=DTYPE` (short `p=`, `c=`, `o=`) in any
        order; by default parameters are float32, the computation is like the parameters
        and the output like the computation. Or one dtype for all three, or
        `mixed_float16` or `mixed_bfloat16`. Dtypes are `float16`, `bfloat16`,
        `float32`, `float64` or `f16`, `bf16`, `f32`, `f64`.

        Raises:
            TypeError: not a string.
            ValueError: an unknown key or dtype, or a key given twice.

        Example:
            >>> Policy.parse("c=f16").output_dtype
            torch.float16
        """
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"Policy.parse({text!r}): expected a string, got a {kind}.")
        given = _NAMED.get(text.strip(), text)
        if "=" not in given:
            dtype = _dtype(text, given)
            return cls(dtype, dtype, dtype)
        found: dict[str, torch.dtype] = {}
        for part in given.split(","):
            key, _, name = (piece.strip() for piece in part.partition("="))
            key = _KEYS.get(key, key)
            if key not in _KEYS.values() or key in found:
                raise ValueError(
                    f"Policy.parse({text!r}): expected each of params, compute and "
                    f"output (or p, c, o) once at most, got {part.strip()!r}."
                )
            found[key] = _dtype(text, name)
        params = found.get("params", torch.float32)
        compute = found.get("compute", params)
        return cls(params, compute, found.get("output", compute))

    def __str__(self) -> str:
        """Return the long form, which `parse` reads."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        values = zip(_KEYS.values(), self.__dict__.values(), strict=True)
        return ",".join(f"{key}={names[dtype]}" for key, dtype in values)

    def cast_to_param(self, tree: Tree) -> Tree:
        """Cast floating tensors to the dtype of parameters."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Cast floating tensors to the dtype of the computation."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Cast floating tensors to the dtype of outputs."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, dtype: torch.dtype) -> "Policy":
        """Return the policy with another dtype of outputs."""
        return replace(self, output_dtype=dtype)


def cast_to_full(tree: Tree) -> Tree:
    """Cast floating tensors to float32.

    Example:
        >>> cast_to_full([torch.ones(1, dtype=torch.float16), 3])
        [tensor([1.]), 3]
    """
    return cast_floating(tree, torch.float32)


def cast_to_half(tree: Tree, *, dtype: torch.dtype = torch.float16) -> Tree:
    """Cast floating tensors to float16 or bfloat16.

    Raises:
        ValueError: another dtype.

    Example:
        >>> cast_to_half(torch.ones(1))
        tensor([1.], dtype=torch.float16)
    """
    checks.choice("cast_to_half", (torch.float16, torch.bfloat16), dtype=dtype)
    return cast_floating(tree, dtype)


def cast_floating(tree: Tree, dtype: torch.dtype) -> Tree:
    """Cast the real floating tensors of a tree."""

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return tree_map(cast, tree)


def _dtype(text: str, name: str) -> torch.dtype:
    full = _SHORT.get(name.strip(), name.strip())
    if full not in DTYPES:
        allowed = ", ".join([*DTYPES, *_SHORT])
        raise ValueError(
            f"Policy.parse({text!r}): expected dtypes among {allowed}, or one of "
            f"{', '.join(_NAMED)}, got {name.strip()!r}."
        )
    return DTYPES[full]

"""Policies: the dtypes of parameters, computation and outputs.

A policy casts parameters and outputs around `autocast(compute_dtype)`, which chooses
the dtype of each op.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.tree import tree_map
from vgrad.typing import T

Role = Literal["compute", "param", "output"]

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
    """The dtypes of parameters, computation and outputs; `Policy.parse` reads its text.

    Raises:
        ValueError: a dtype other than float16, bfloat16, float32 and float64.

    Example:
        >>> policy = Policy.parse("mixed_bfloat16")
        >>> policy.compute_dtype
        torch.bfloat16
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
        >>> policy.cast({"x": torch.ones(2), "ids": torch.arange(2)}, to="compute")
        {'x': tensor([1., 1.], dtype=torch.bfloat16), 'ids': tensor([0, 1])}
    """

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    output_dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value not in DTYPES.values():
                allowed = ", ".join(f"torch.{dtype}" for dtype in DTYPES)
                raise ValueError(
                    f"Policy({name}={value!r}): expected one of {allowed}."
                )

    @classmethod
    def parse(cls, text: "str | Policy") -> "Policy":
        """Read a policy from a string; one that is read already is returned.

        Either `params=DTYPE,compute=DTYPE,output=DTYPE` (short `p=`, `c=`, `o=`) in any
        order; by default parameters are float32, the computation is like the parameters
        and the output like the computation. Or one dtype for all three, or
        `mixed_float16` or `mixed_bfloat16`. Dtypes may be `f16`, `bf16`, `f32`, `f64`.

        Raises:
            ValueError: an unknown key or dtype, or a repeated key.

        Example:
            >>> Policy.parse("c=f16").output_dtype
            torch.float16
        """
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"Policy.parse({text!r}): expected a string, got a {kind}.")
        long = _NAMED.get(text.strip(), text)
        if "=" not in long:
            dtype = _dtype(text, long)
            return cls(dtype, dtype, dtype)
        dtypes: dict[str, torch.dtype] = {}
        for item in long.split(","):
            key, _, name = (word.strip() for word in item.partition("="))
            key = _KEYS.get(key, key)
            if key not in _KEYS.values() or key in dtypes:
                raise ValueError(
                    f"Policy.parse({text!r}): expected each of params, compute and "
                    f"output (or p, c, o) once at most, got {item.strip()!r}."
                )
            dtypes[key] = _dtype(text, name)
        params = dtypes.get("params", torch.float32)
        compute = dtypes.get("compute", params)
        return cls(params, compute, dtypes.get("output", compute))

    def __str__(self) -> str:
        names = {dtype: name for name, dtype in DTYPES.items()}
        values = zip(_KEYS.values(), self.__dict__.values(), strict=True)
        return ",".join(f"{key}={names[dtype]}" for key, dtype in values)

    def cast(self, tree: T, *, to: Role) -> T:
        """Cast real floating tensors of a tree to the dtype of `to`; others stay."""
        checks.choice("Policy.cast", get_args(Role), to=to)
        dtype = getattr(self, f"{to}_dtype")

        def cast_leaf(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if floating else leaf

        return tree_map(cast_leaf, tree)

    def with_output_dtype(self, dtype: torch.dtype) -> "Policy":
        """Return the policy with another dtype of outputs."""
        return replace(self, output_dtype=dtype)


def _dtype(text: str, name: str) -> torch.dtype:
    full = _SHORT.get(name.strip(), name.strip())
    if full not in DTYPES:
        allowed = ", ".join([*DTYPES, *_SHORT])
        raise ValueError(
            f"Policy.parse({text!r}): expected dtypes among {allowed}, or one of "
            f"{', '.join(_NAMED)}, got {name.strip()!r}."
        )
    return DTYPES[full]

"""The types that every module of vgrad shares."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from torch import Tensor

__all__ = [
    "BatchLossFn",
    "Buffers",
    "ChunkSize",
    "Clipping",
    "EnsembleStrategy",
    "LossFn",
    "Params",
    "Randomness",
    "Schedule",
    "Strategy",
    "Tree",
]


def __dir__() -> list[str]:
    return __all__


Params = dict[str, Tensor]
"""The tensors that are differentiated: `name -> tensor`."""

Scales = Mapping[str, Sequence[Tensor]]
"""By name, tensors by all of which the gradient of each sample is multiplied."""

Buffers = dict[str, Tensor]
"""All other tensors: running statistics, masks, frozen parameters."""

Tree = Any
"""Any nesting of dictionaries, lists and tuples with tensors at the leaves."""

Schedule = Callable[[Tensor], Tensor | float]
"""A rate as a function of the number of steps taken so far."""

Strategy = Literal["auto", "recorded", "vmap", "loop"]
"""How per-sample gradients come about; `vgrad.persample` explains them."""

EnsembleStrategy = Literal["auto", "vmap", "loop", "hybrid"]
"""How members run; `vgrad.ensemble_forward` explains them."""

Randomness = Literal["error", "different", "same"]
"""Random ops raise, draw for each sample or member, or draw once for all."""

ChunkSize = int | Literal["auto"] | None
"""Samples at a time: all with None, as many as fit into memory with "auto"."""

Clipping = Literal["flat", "per_layer", "automatic"]
"""How gradients are clipped; `vgrad.clipped_grad` explains it."""

Passes = Literal[1, 2]
"""How many backward passes clip: two take more time, and less memory."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
T = TypeVar("T")
Found = TypeVar("Found", covariant=True)


class LossFn(Protocol):
    """A function of one sample: every tensor comes without the batch dimension.

    It is called as `loss(params, buffers, *sample)`.
    """

    # With keyword arguments of any kind the rest of the signature is open, so that
    # functions of `(params, buffers, x, y)` are of this type.
    def __call__(
        self, params: Params, buffers: Buffers, /, *sample: Any, **nothing: Any
    ) -> Any:
        """Return a scalar, or `(scalar, aux)` with `has_aux=True`."""
        ...


class BatchLossFn(Protocol):
    """A function of a whole batch, for steps that need no single samples."""

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Tensor:
        """Return a scalar."""
        ...

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tensor, Buffers]:
        """Return the scalar and the buffers as the forward pass left them."""
        ...


class Same(Protocol[Arguments, Found]):
    """A function that is called like another one, and has its attributes."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        """Return the result of the other one."""
        ...

    def __getattr__(self, name: str) -> Any: ...


def shows(options: type, defaults: Any) -> Callable[[T], T]:
    """Return a decorator: `help` lists the options that `**options` stands for.

    They are the keys of a TypedDict; `defaults` is a dataclass with their defaults.
    """
    values = {field.name: field.default for field in fields(defaults)}
    listed = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=values[name], annotation=kind)
        for name, kind in options.__annotations__.items()
    ]

    def shown(function: T) -> T:
        described: Any = function
        signature = inspect.signature(described)
        *own, _ = signature.parameters.values()
        described.__signature__ = signature.replace(parameters=[*own, *listed])
        return function

    return shown

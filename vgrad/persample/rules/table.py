"""The table: one rule per op, and how one is registered."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vgrad import checks
from vgrad.factors.base import Factor
from vgrad.torch_private.modes import op_name

Maker = Callable[[Tensor], Factor]


class Recording(Protocol):
    """The recorder, as a lowering uses it.

    A tensor of the loss has no samples; a physical one has them in front.
    """

    size: int
    randomness: str

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor stands for a parameter."""
        ...

    def is_batched(self, tensor: Tensor) -> bool:
        """Return whether a tensor differs from sample to sample."""
        ...

    def physical(self, tensor: Tensor) -> Tensor:
        """Return the physical tensor of one of the loss."""
        ...

    def logical(self, tensor: Tensor) -> Tensor:
        """Return the loss's tensor of a physical one."""
        ...

    def copies(self, tensor: Tensor) -> Tensor:
        """Return the same as `physical`; a parameter's copies lead to its gradients."""
        ...

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter, for an op that needs no gradient of it."""
        ...

    def anchor(self, value: Tensor) -> Tensor:
        """Return a leaf of these values at which the backward pass ends."""
        ...

    def use(self, tensor: Tensor) -> Callable[[Factor], None] | None:
        """Return a function for the factor of this use; None for other tensors."""
        ...

    def below(self) -> AbstractContextManager:
        """Compute with physical tensors in a block."""
        ...

    def drawing(self, axis: int) -> AbstractContextManager:
        """Draw numbers in a block with the samples at this axis, not in front."""
        ...

    def watching(self) -> AbstractContextManager:
        """Run ops in a block as if the loss had called them, each by its own rule."""
        ...


@dataclass(frozen=True)
class Rule:
    """The factors of one op's weights, and how the op runs."""

    weights: tuple[str, ...]
    factors: Callable[..., dict[str, Maker] | None]
    run: Callable[..., Tensor]
    names: tuple[str, ...]
    defaults: dict[str, Any]

    def bind(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """Name the arguments of a call, in order; None if rule or call lacks one."""
        if len(args) > len(self.names) or not kwargs.keys() <= set(self.names):
            return None
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given = {**self.defaults, **given}
        if len(given) < len(self.names):
            return None
        return {name: given[name] for name in self.names}


@dataclass(frozen=True)
class Lowering:
    """Another form of one op, which gets the recorder."""

    run: Callable[..., Any]


RULES: dict[Callable, Rule | Lowering] = {}


def lowered(*ops: Callable) -> Callable:
    """Register the decorated function as the form of these ops in recorded passes.

    It gets the recorder, and then the op's arguments as the loss passed them. It
    returns the op's output for the loss, or None where it does not fit the call.
    """

    def register(run: Callable) -> Callable:
        for op in ops:
            RULES[op] = Lowering(run)
        return run

    return register


def rule(
    *ops: Callable,
    weights: tuple[str, ...],
    run: Callable[..., Tensor] | None = None,
    replace: bool = False,
) -> Callable:
    """Register the decorated function as the rule of these ops.

    It has the parameters of the op. Tensors of a sample `[...]` come as `[B, ...]`,
    weights as they are. It returns `{weight: function from the gradient at the output
    [B, ...] to a Factor}`, or None where it does not fit the call: then the weights are
    expanded over the samples, which is exact and slower. Tensors that the functions
    refer to are kept until the backward pass. `run` computes the output from the same
    tensors, given by position, so that autograd finds the gradients at the inputs; it
    is the op itself by default.

    An op is a function that torch hands to a `torch.overrides.TorchFunctionMode`, such
    as `torch.nn.functional.linear` or `torch.Tensor.add`, or one of yours that goes
    through `torch.overrides.wrap_torch_function`. `vgrad.testing.check_rule` checks a
    rule.

    Args:
        weights: the parameters of the op that get a factor if the loss has a parameter
            there.
        replace: an op that has a rule already gets this one.

    Raises:
        TypeError: an op is no function that torch hands on; `weights` is no tuple of
            names; or the rule has parameters without a name or place.
        ValueError: the rule has no parameter of a weight's name, or an op has a rule.

    Example:
        >>> import vgrad
        >>> from torch.overrides import wrap_torch_function
        >>> @wrap_torch_function(lambda x, weight: (x, weight))
        ... def scale(x, weight):
        ...     return x * weight
        >>> @vgrad.rules.rule(scale, weights=("weight",))
        ... def scale_rule(x, weight):
        ...     return {"weight": lambda g: vgrad.rules.Dense(g * x)}
        >>> loss = lambda params, buffers, x: scale(x, params["w"]).sum()
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> vgrad.per_sample_norm(loss)({"w": torch.ones(2)}, {}, x)
        tensor([5., 1.])
    """
    _check_ops(ops)
    if not isinstance(weights, tuple) or not all(isinstance(w, str) for w in weights):
        raise TypeError(
            f"rule(weights={weights!r}): expected a tuple of names, such as "
            f'("weight",).'
        )

    def register(factors: Callable[..., dict[str, Maker] | None]) -> Callable:
        parameters = inspect.signature(factors).parameters
        _check_parameters(parameters, weights, by_position=run is None)
        defaults = {
            name: each.default
            for name, each in parameters.items()
            if each.default is not each.empty
        }
        for op in ops:
            if op in RULES and not replace:
                raise ValueError(
                    f"rule({op_name(op)}): expected an op without a rule, but it has "
                    f"one. Pass replace=True to put this one in its place."
                )
        for op in ops:
            RULES[op] = Rule(weights, factors, run or op, tuple(parameters), defaults)
        return factors

    return register


def _check_ops(ops: tuple[Callable, ...]) -> None:
    """Refuse callables that no function mode ever sees."""
    if not ops:
        raise TypeError("rule(): expected at least one op, got none.")
    for op in ops:
        if not callable(op) or isinstance(op, type | torch.nn.Module):
            raise TypeError(
                f"rule({op!r}): expected a function such as "
                f"torch.nn.functional.linear, got a {type(op).__name__}. A module's op "
                f"is the function that its forward pass calls."
            )
        owner = getattr(op, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            raise TypeError(
                f"rule({owner.__name__}.{op_name(op)}): expected a function that torch "
                f"hands to function modes, got a method of an autograd.Function. Call "
                f"it in a function under torch.overrides.wrap_torch_function, and "
                f"register that."
            )


def _check_parameters(
    parameters: Mapping[str, inspect.Parameter],
    weights: tuple[str, ...],
    *,
    by_position: bool,
) -> None:
    """Refuse a rule with arguments that have no name or place, or without a weight."""
    refused = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if by_position:  # as the op gets them
        refused.append(inspect.Parameter.KEYWORD_ONLY)
    for name, each in parameters.items():
        if each.kind in refused:
            raise TypeError(
                f"rule: expected a function with the parameters of the op, got {each}. "
                f"Name each, and pass run= where the op takes {name!r} by keyword only."
            )
    missing = [name for name in weights if name not in parameters]
    if missing or not weights:
        raise ValueError(
            f"rule(weights={weights!r}): expected names of the rule's parameters, "
            f"{checks.listed(parameters)}, got {', '.join(missing) or 'none'}."
        )

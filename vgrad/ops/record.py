"""The record of an op, which the file of its family fills; and ops that read values.

B samples, E members
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vgrad import checks
from vgrad.factors.base import Factor
from vgrad.torch_private import kernels, modes

Maker = Callable[[Tensor], Factor]

Transposed = tuple[Callable, dict[str, Any]]
"""An op that is linear in its first argument, and its other arguments."""

Form = Callable[[], Any]
"""Code that runs in the place of a call, as if the loss had written it."""


class Samples(Protocol):
    """The mode under which samples run at once, as a form of an op uses it."""

    # A tensor of the loss has no samples; a physical one has them in front: `values`
    # returns [B, ...] of the first, None if all samples share one, and `logical` the
    # tensor of the loss of the second. `outside` is a block for physical tensors.
    def values(self, tensor: Tensor) -> Tensor | None: ...
    def logical(self, tensor: Tensor) -> Tensor: ...
    def outside(self) -> AbstractContextManager: ...

    # The value that all samples have in a tensor of the loss; otherwise `SplitBatch`.
    def agreed(self, tensor: Tensor, read: Callable = Tensor.item) -> Any: ...

    # A block where random numbers have the samples at this axis, None for no axis.
    def drawing(self, axis: int | None) -> AbstractContextManager: ...

    # The form of a function without a derivative: one sample after another.
    def stacked(self, func: Callable, args: tuple, kwargs: dict) -> Form | None: ...


class Recording(Protocol):
    """The recorder, as a form of an op in recorded passes uses it."""

    size: int
    randomness: str
    columns: bool  # whether a vmap runs the backward pass

    # Whether the loss differentiates, so that ops need second derivatives.
    @property
    def twice(self) -> bool: ...

    def is_parameter(self, tensor: Tensor) -> bool: ...
    def is_batched(self, tensor: Tensor) -> bool: ...

    # The physical tensor of one of the loss, and back. The `copies` of a parameter lead
    # to its gradients; its `plain` values are for an op that needs none of them.
    def physical(self, tensor: Tensor) -> Tensor: ...
    def copies(self, tensor: Tensor) -> Tensor: ...
    def plain(self, tensor: Tensor) -> Tensor: ...
    def logical(self, tensor: Tensor) -> Tensor: ...

    # A leaf of these values at which the backward pass ends.
    def anchor(self, value: Tensor) -> Tensor: ...

    # The function for the factor of this use of a parameter; None for other tensors.
    def use(self, tensor: Tensor) -> Callable[[Factor], None] | None: ...

    # A block for physical tensors; one where random numbers have the samples at this
    # axis; and one where each op runs by its own record, as if the loss had called it.
    def below(self) -> AbstractContextManager: ...
    def drawing(self, axis: int) -> AbstractContextManager: ...
    def watching(self) -> AbstractContextManager: ...


@dataclass(frozen=True, eq=False)
class Rule:
    """The factors of an op's weights.

    Attributes:
        factors: has the parameters of the op, tensors of a sample as `[B, ...]`, and
            returns `{weight: function from the gradient at the output to a Factor}`, or
            None where it does not fit the call.
        weights: the parameters that get a factor where the loss has a parameter.
        run: computes the output, from arguments by position; None for the op itself.
        transposed: has the arguments of an op that is linear in the first, and returns
            the op from the gradient at the output to that at the first, which has such
            a rule as well; None where it does not fit the call.
    """

    factors: Callable[..., dict[str, Maker] | None]
    weights: tuple[str, ...]
    run: Callable[..., Tensor] | None = None
    transposed: Callable[..., Transposed | None] | None = None

    @cached_property
    def _signature(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        parameters = inspect.signature(self.factors).parameters
        values = {name: argument.default for name, argument in parameters.items()}
        empty = inspect.Parameter.empty
        defaults = {name: value for name, value in values.items() if value is not empty}
        return tuple(parameters), defaults

    def bind(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """Name the arguments of a call, in order; None if rule or call lacks one."""
        names, defaults = self._signature
        if not kwargs and len(args) == len(names):
            return dict(zip(names, args, strict=True))
        if len(args) > len(names) or not kwargs.keys() <= set(names):
            return None
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if len(arguments) < len(names):
            return None
        return {name: arguments[name] for name in names}


class Read(NamedTuple):
    """How a call hands a value to Python.

    Attributes:
        compared: the dtype in which a graph compares the number with the one that it
            was made for; `ITSELF` for the tensor's own, None if it cannot.
        convert: the conversion of one number to the value; None if the call itself has
            to run.
    """

    compared: Any = None
    convert: Callable | None = None


ITSELF = object()
"""The dtype of the tensor."""


class Kind(Enum):
    """The treatment of an op while autocast is on."""

    LOW = "inputs in the low dtype"
    PRODUCT = "inputs in the low dtype, unless they are summed up to one number"
    FLOAT32 = "inputs in float32"
    WIDEST = "inputs in the widest dtype among them"
    NORM = "computed in float32, in the dtype of its input afterwards"
    STEPS = "time steps of linear maps, each in the low dtype"
    INSIDE = "left to torch, which casts the ops inside"
    OWN = "inputs in dtypes of their own"
    REFUSED = "raises"


@dataclass(frozen=True, eq=False)
class Op:
    """The record of one op, which runs in torch's own way where a field is None.

    Attributes:
        rule: its factors in recorded passes.
        fused: whether the rule runs where no weight is a parameter, too.
        recorded: its form in recorded passes, a function of the recorder and the call's
            arguments. It returns the output for the loss, or None where it does not
            fit the call.
        mapped: its form under vmap, of samples or members, a function of the call's
            arguments.
        selected: its form under vmap where shapes depend on values, a function of
            `Samples` and the call's arguments that returns a `Form`. None is torch's
            own way, also for arguments that torch refuses, so that the error is
            torch's.
        per_member: its form for members whose weights differ, a function of the call's
            arguments that returns a `Form`, or None, and the name of that form.
        read: how it hands a value to Python.
        autocast: its treatment under autocast, or a pair, on a CPU and elsewhere; None
            for inputs in dtypes of their own, of a function in Python for the kinds of
            the ops inside.
    """

    rule: Rule | None = None
    fused: bool = False
    recorded: Callable[..., Any] | None = None
    mapped: Callable[..., Any] | None = None
    selected: Callable[..., Form | None] | None = None
    per_member: Callable[..., tuple[Form | None, str]] | None = None
    read: Read | None = None
    autocast: Kind | tuple[Kind | None, Kind | None] | None = None

    def kind(self, *, host: bool) -> Kind | None:
        """Return the treatment under autocast on a CPU, or elsewhere."""
        kinds = self.autocast
        return kinds[0 if host else 1] if isinstance(kinds, tuple) else kinds


OPS: dict[Callable, Op] = {}
"""The records, by the functions that torch hands to a `TorchFunctionMode`."""


def register(*functions: Callable, **fields: Any) -> None:
    """Fill these fields of the records of functions."""
    for function in functions:
        OPS[function] = dataclasses.replace(OPS.get(function, Op()), **fields)


def in_place(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Write the result of a form into its first argument."""
    return lambda input, *args, **options: input.copy_(form(input, *args, **options))


def expanded(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Put the axis of samples in front, of stride 0 where there is none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def below_members(form: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Call a form with the tensors of all members, below the level of the vmap.

    `form(E, stacked, *tensors)` gets which of them are `[E, ...]`; all members share
    the others. `torch.autograd.Function` does the same for a function with a rule for
    vmap, in several times the time: below the vmap, autograd sees the ops of the form.
    """
    interpreter: Any = modes.innermost()
    level = interpreter.level()
    fronts = [None if x is None else modes.in_front(x, level) for x in tensors]
    pairs = zip(tensors, fronts, strict=True)
    inputs = [x if front is None else front for x, front in pairs]
    stacked = [front is not None for front in fronts]
    with interpreter.lower():
        out = form(interpreter.batch_size(), stacked, *inputs)
    return modes.add_batch_axis(out, 0, level)


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
        >>> @vgrad.ops.rule(scale, weights=("weight",))
        ... def scale_rule(x, weight):
        ...     return {"weight": lambda g: vgrad.ops.Dense(g * x)}
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

    def registered(factors: Callable[..., dict[str, Maker] | None]) -> Callable:
        _check_parameters(
            inspect.signature(factors).parameters, weights, by_position=run is None
        )
        for op in ops:
            record = OPS.get(op, Op())
            if (record.rule or record.recorded) and not replace:
                raise ValueError(
                    f"rule({modes.op_name(op)}): expected an op without a rule, but it "
                    f"has one. Pass replace=True to put this one in its place."
                )
        register(*ops, rule=Rule(factors, weights, run), recorded=None)
        return factors

    return registered


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
                f"rule({owner.__name__}.{modes.op_name(op)}): expected a function that "
                f"torch hands to function modes, got a method of an autograd.Function. "
                f"Call it in a function under torch.overrides.wrap_torch_function, and "
                f"register that."
            )


def _check_parameters(
    parameters: Mapping[str, inspect.Parameter],
    weights: tuple[str, ...],
    *,
    by_position: bool,
) -> None:
    refused = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if by_position:  # as the op gets them
        refused.append(inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in parameters.items():
        if parameter.kind in refused:
            raise TypeError(
                f"rule: expected a function with the parameters of the op, got "
                f"{parameter}. Name each, and pass run= where the op takes {name!r} by "
                f"keyword only."
            )
    missing = [name for name in weights if name not in parameters]
    if missing or not weights:
        raise ValueError(
            f"rule(weights={weights!r}): expected names of the rule's parameters, "
            f"{checks.listed(parameters)}, got {', '.join(missing) or 'none'}."
        )


register(
    *(Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero),
    read=Read(compared=torch.bool, convert=bool),
)
register(Tensor.__int__, Tensor.__index__, read=Read(compared=torch.int64))
register(Tensor.__float__, read=Read(compared=torch.float64, convert=float))
register(Tensor.item, read=Read(compared=ITSELF, convert=lambda value: value))
register(Tensor.tolist, read=Read(compared=ITSELF))
register(
    *(Tensor.__complex__, Tensor.__contains__, Tensor.__format__),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
    kernels.is_left_aligned,
    read=Read(),
)

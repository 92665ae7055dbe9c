"""Optimizers as pairs of pure functions, made of rules for one parameter."""

# Functions inside of functions have no annotations, here and in every file of an
# optimizer: torch.compile, which traces the making of one inside a mapped function,
# cannot evaluate `Params | None`.
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks
from vgrad.tree import cast, map_values, tensors, wide, widened
from vgrad.typing import Params, Schedule, Tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Number = float | Tensor
"""A hyperparameter: a number, or a tensor without dimensions."""

Rate = Number | Schedule
"""A rate, or a function of the number of steps taken so far that returns one."""

Grads = Mapping[str, Tensor | None]
"""Gradients by name; `None` for a parameter that received none."""

Updates = dict[str, Tensor | None]
"""Tensors to be added to the parameters; `None` leaves one as it is."""

UpdateFn = Callable[..., tuple[Updates, Tree]]
"""`(grads, state, params=None) -> (updates, state)`; the arguments do not change."""

Donated = Callable[[Grads, Tree, Params], tuple[Params, Tree] | None]
"""A step in place; if it is not possible, None, before anything has changed."""


class GradientTransformation(NamedTuple):
    """Two pure functions, `init` and `update`: an optimizer, or a part of one.

    `init(params) -> state` makes the state, a tree whose leaves are all tensors.
    `update(grads, state, params=None) -> (updates, state)` makes one step. The updates
    of a whole optimizer, never narrower than float32, are added to the parameters.
    Neither changes anything in place or reads a value, so both run under `torch.vmap`,
    `torch.compile` and `torch.func.grad`; an optimizer whose rate differs from member
    to member is built inside the mapped function.

    `donated` is a faster whole step, for `step` with `donate=True`; a chain does not
    inherit it. `counted` is whether updates depend on steps that `torch.optim` counts
    for each parameter, and `settable` names numbers of `inject_hyperparams`.

    Example:
        >>> negate = GradientTransformation(
        ...     lambda params: (),
        ...     lambda grads, state, params=None: (map_values(torch.neg, grads), state),
        ... )
    """

    init: Callable[[Params], Tree]
    update: UpdateFn
    donated: Donated | None = None
    counted: bool = False
    settable: tuple[str, ...] = ()


class State(NamedTuple):
    """State of most transformations: the steps taken, and tensors by torch's names.

    A slot, such as `exp_avg`, has one tensor for each parameter, by name, or is one
    tensor for all of them.
    """

    count: Tensor
    slots: dict[str, Any]


def per_parameter(
    function: str, slots: Mapping[str, Any], at: Callable, *, real=True, counted=False
) -> GradientTransformation:
    """Make a transformation of rules `at(step)(grad, *slots) -> (update, *slots)`.

    A slot starts with one value, or as a function of the parameter, maybe as None.
    """

    def init(params):
        if real:
            check_real(function, params)
        first = {slot: {} for slot in slots}
        for slot, start in slots.items():
            for name, param in params.items():
                value = start(param) if callable(start) else filled(param, start)
                if value is not None:
                    first[slot][name] = value
        return State(counter(params), first)

    def update(grads, state, params=None):
        if not isinstance(state, State):
            raise TypeError(
                f"{function}(state): expected the state that its init made, got "
                f"{state!r}."
            )
        old = [state.slots.get(slot, {}) for slot in slots]
        checks.names(f"{function}(grads)", set().union(*old), grads)
        count = state.count + 1
        rule = at(count)
        columns = [map(column.get, grads) for column in old]
        rows = zip(grads, grads.values(), *columns, strict=True)
        results = {
            name: (grad, *before) if grad is None else rule(grad, *before)
            for name, grad, *before in rows
        }
        updates = {name: result[0] for name, result in results.items()}
        new = {
            slot: {name: results[name][place] for name in column}
            for place, (slot, column) in enumerate(zip(slots, old, strict=True), 1)
        }
        return updates, State(count, new)

    return GradientTransformation(init, update, counted=counted)


def stateless(update: Callable[[Grads, Any], Updates]) -> GradientTransformation:
    """Make a transformation without state of `(grads, params) -> updates`."""
    return GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None: (update(grads, params), state),
    )


def counting(update: Callable[[Grads, Any, Tensor], Updates]) -> GradientTransformation:
    """Make a transformation of `(grads, params, steps taken so far) -> updates`."""
    return GradientTransformation(
        lambda params: State(counter(params), {}),
        lambda grads, state, params=None: (
            update(grads, params, state.count),
            State(state.count + 1, {}),
        ),
    )


def of_gradient(function: Callable[[Tensor], Tensor]) -> GradientTransformation:
    """Make a transformation without state of a function of one gradient, widened."""
    return stateless(lambda grads, _: map_grads(lambda g: function(widened(g)), grads))


def of_gradient_and_parameter(name: str, function: Callable) -> GradientTransformation:
    """Make a transformation of a function of a gradient and its parameter, widened."""

    def update(grads, params):
        params = required(name, params, grads)
        return map_grads(lambda g, p: function(widened(g), widened(p)), grads, params)

    return stateless(update)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after the other; the state is the tuple of theirs.

    `chain()` of nothing is the identity.

    Example:
        >>> heavy_ball = chain(vgrad.optim.trace(0.9), vgrad.optim.scale(-0.5))
    """
    for tx in transformations:
        check_transformation("chain", tx)

    def update(grads, state, params=None):
        if len(state) != len(transformations):
            raise ValueError(
                f"chain(state of {len(state)} parts): expected {len(transformations)}, "
                f"as init of the same chain or partition makes it."
            )
        updates, states = dict(grads), []
        for tx, old in zip(transformations, state, strict=True):
            updates, new = tx.update(updates, old, params)
            states.append(new)
        return updates, tuple(states)

    return GradientTransformation(
        lambda params: tuple(tx.init(params) for tx in transformations),
        update,
        counted=any(tx.counted for tx in transformations),
    )


def apply_updates(params: Params, updates: Grads) -> Params:
    """Add updates to parameters: `{name: shape}, {name: shape} -> {name: shape}`.

    The sum is taken in `promote_types(dtype, float32)` and rounded once to the dtype of
    the parameter. Parameters whose update is `None` are returned as they are.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -1.0])})
        {'w': tensor([1.5000, 0.0000])}
    """
    checks.names("apply_updates(updates)", params, updates)
    present = {name: value for name, value in updates.items() if value is not None}
    checks.shapes("apply_updates(updates)", {n: params[n] for n in present}, present)

    def add(param, update):
        if update is None:
            return param
        wide = widened(param)
        return cast(wide + cast(update, wide.dtype), param.dtype)

    return map_values(add, params, updates)


def step(
    tx: GradientTransformation,
    grads: Grads,
    state: Tree,
    params: Params,
    *,
    donate: bool = False,
) -> tuple[Params, Tree]:
    """Update and apply: `(grads, state, params) -> (new params, new state)`.

    It records a graph if its inputs require grad. With `donate=True` the step may write
    into the old state, which must not be used again, and into the old parameters:
    `sgd`, `adam` and `adamw` make it by one kernel of torch. The dictionaries passed
    are left empty, so that using them again raises. Gradients are never changed: where
    one, or a part of the state, shares the memory of a parameter, the step is a pure
    one.

    Example:
        >>> tx, params = vgrad.optim.sgd(0.5), {"w": torch.ones(2)}
        >>> step(tx, {"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    check_transformation("step", tx)
    done = tx.donated(grads, state, params) if donate and tx.donated else None
    if done is None:
        updates, new_state = tx.update(grads, state, params)
        done = apply_updates(params, updates), new_state
    if donate:
        returned = {id(entries) for entries in _dictionaries(done)}
        for entries in _dictionaries((params, state)):
            if id(entries) not in returned:
                entries.clear()
    return done


def _dictionaries(tree: Tree) -> list[dict]:
    dictionaries, nodes = [], [tree]
    for node in nodes:
        if isinstance(node, dict):
            dictionaries.append(node)
            nodes += [value for value in node.values() if not isinstance(value, Tensor)]
        elif isinstance(node, list | tuple):
            nodes += node
    return dictionaries


def is_zero(value: Number) -> bool:
    """Return whether a value is the number zero, no tensor."""
    return not isinstance(value, Tensor) and value == 0


def is_schedule(value: Any) -> TypeIs[Callable[..., Any]]:
    """Return whether a value is a schedule, and not a number or a tensor."""
    return not isinstance(value, Tensor) and callable(value)


def rate_at(lr: Rate, count: Tensor) -> Number:
    """Return a rate, which may be a schedule, after `count` steps."""
    return lr(count) if is_schedule(lr) else lr


def map_grads(function: Callable[..., Tensor], grads: Grads, *others: Any) -> Updates:
    """Apply a function name by name; where the gradient is None, so is the result."""

    def apply(grad, *rest):
        return None if grad is None else function(grad, *rest)

    return map_values(apply, grads, *others)


def counter(params: Params) -> Tensor:
    """Make a count of zero steps on the device of the parameters."""
    device = next(iter(params.values())).device if params else None
    return torch.zeros((), dtype=torch.int64, device=device)


def filled(param: Tensor, value: Number = 0) -> Tensor:
    """Make a tensor like a parameter, float32 or wider, with one value everywhere."""
    zeros = torch.zeros_like(param, dtype=wide(param.dtype))
    return zeros if is_zero(value) else zeros + scalar(value, zeros)


def root(square: Tensor) -> Tensor:
    """Take the root of numbers >= 0, with a finite slope at zero."""
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def length(square: Tensor) -> Tensor:
    """Take the root of a squared norm; at zero it is zero, and so is its slope."""
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def lerp(old: Tensor, new: Tensor, share: Number) -> Tensor:
    """`(1 - share) * old + share * new` in the dtype of `old`, exactly `new` for 1."""
    weight: Any = scalar(share, old)
    return torch.lerp(old, cast(new, old.dtype), weight)


def plus(value: Tensor, factor: Number, other: Tensor) -> Tensor:
    """`value + factor * other`, in one pass if the factor is a number."""
    if isinstance(factor, Tensor):
        return value + scalar(factor, other) * other
    return torch.add(value, other, alpha=factor)


def scalar(value: Number, like: Tensor) -> Number:
    """Return a number as it is, a tensor in the dtype and on the device of `like`."""
    if not isinstance(value, Tensor):
        return value
    if value.ndim > 0:
        check_scalars("vgrad.optim", "build the optimizer", hyperparameter=value)
    return placed(value, like)


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Bring a tensor without dimensions to the dtype and the device of `like`."""
    if torch.compiler.is_compiling() and not value.is_complex():
        # Inductor would recompute the scalar, such as powers of the decays, for every
        # entry of a parameter, three times as slow. The result of a reduction, over
        # too many entries to be unrolled, it writes to memory.
        value = value.expand(16).amax()
    return value.to(like.device, like.dtype)


# Checks that optimizers share. A check of a tensor would read it, so tensors pass.


def plain(**values: Any) -> dict[str, Any]:
    """Return the values that are no tensors, and no tuples of some."""
    return {name: value for name, value in values.items() if not tensors(value)}


def check_scalars(function: str, advice: str, /, **values: Any) -> None:
    """Each tensor has no dimensions."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            raise ValueError(
                f"{function}({name} of shape {tuple(value.shape)}): expected a number "
                f"or a tensor without dimensions. For one value per member, {advice} "
                f"inside the function that torch.vmap maps."
            )


def check_numbers(function: str, lr: Rate, betas: tuple = (), /, **values: Number):
    """Each number is zero or more, and a beta below one; tensors and schedules pass."""
    named = values if is_schedule(lr) else {"lr": lr, **values}
    checks.non_negative(function, **plain(**named))
    named = {f"betas[{index}]": beta for index, beta in enumerate(betas)}
    check_range(function, *SHARE, **named)


def check_range(function: str, expected: str, holds: Callable, **values: Any) -> None:
    """Each number is in the range that is `expected`; tensors pass."""
    for name, value in plain(**values).items():
        if not holds(value):
            expected = expected.format(name)
            raise ValueError(f"{function}({name}={value!r}): expected {expected}.")


SHARE = ("0 <= {} < 1", lambda value: 0 <= value < 1)


def check_real(function: str, params: Params) -> None:
    """Every parameter is a real floating-point tensor."""
    for name, param in params.items():
        if not param.is_floating_point():
            raise TypeError(
                f"{function}(params): expected real floating-point parameters, got "
                f"{param.dtype} in {name!r}. Keep it out of the parameters, or as a "
                f"pair of real ones."
            )


def check_transformation(function: str, tx: Any) -> None:
    """Refuse everything without `init` and `update`, such as optimizers of torch."""
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return
    got, advice = f"a {type(tx).__name__}", "Pass, for example, vgrad.optim.sgd(0.1)."
    if isinstance(tx, Optimizer):
        got = f"an optimizer of torch, {type(tx).__name__}"
    elif callable(tx):
        advice = f"Call it: {getattr(tx, '__name__', 'make')}(lr, ...)."
    raise TypeError(
        f"{function}(tx): expected a transformation of vgrad.optim, got {got}. {advice}"
    )


def required(function: str, params: Any, grads: Grads, names: Any = None) -> Params:
    """Return the parameters, unless they are missing or gradients have other names."""
    if params is None:
        raise ValueError(
            f"{function}(params=None): expected the parameters, got none. "
            f"Call update(grads, state, params)."
        )
    checks.names(f"{function}(grads)", params if names is None else names, grads)
    return params

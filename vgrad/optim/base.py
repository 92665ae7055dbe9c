"""What an optimizer is: a pair of pure functions, and how pairs are put together."""

# Annotations stay text, here and in every file of an optimizer: torch.compile, which
# traces the making of one inside a mapped function, cannot evaluate `Params | None`.
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks
from vgrad.tree import cast, map_values, tree_leaves, widened
from vgrad.typing import Params, Tree

Grads = Mapping[str, Tensor | None]
"""Gradients by name; `None` stands for a parameter that received none."""

Updates = dict[str, Tensor | None]
"""What is added to the parameters; `None` leaves one as it is."""


class UpdateFn(Protocol):
    """How a transformation turns gradients into updates."""

    def __call__(
        self, grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        """Return the updates and the new state; the arguments stay as they are."""
        ...


Donated = Callable[[Grads, Tree, Params], tuple[Params, Tree] | None]
"""A step in place: `(grads, state, params) -> (params, state)`.

It returns None, before anything has changed, if it is not possible.
"""


class GradientTransformation(NamedTuple):
    """Two pure functions, `init` and `update`: an optimizer, or a part of one.

    `init(params) -> state` makes the state, a tree whose leaves are all tensors.
    `update(grads, state, params=None) -> (updates, state)` makes one step of it. The
    updates of a whole optimizer are added to the parameters: the sign of the rate is
    already in them. They are never narrower than float32.

    Neither function changes anything in place or reads a value, so both run under
    `torch.vmap`, `torch.compile` and `torch.func.grad`. For many members, put `init`
    and `update` under `torch.vmap`, and build the optimizer inside the mapped function
    if its rate differs from member to member.

    A gradient of `None` gives an update of `None` and leaves the state of that
    parameter as it is; step counters run on.

    `donated`, if given, is a faster way to make a whole step, for `step` with
    `donate=True`; a chain does not inherit it from its parts.

    Example:
        >>> negate = GradientTransformation(
        ...     lambda params: (),
        ...     lambda grads, state, params=None: (map_values(torch.neg, grads), state),
        ... )
        >>> negate.update({"w": torch.ones(2)}, negate.init({"w": torch.zeros(2)}))
        ({'w': tensor([-1., -1.])}, ())
    """

    init: Callable[[Params], Tree]
    update: UpdateFn
    donated: Donated | None = None


def check_transformation(function: str, tx: Any) -> None:
    """Refuse what has no `init` and `update`, such as an optimizer of `torch.optim`.

    Raises:
        TypeError: it has not.
    """
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return
    got, advice = f"a {type(tx).__name__}", "Pass, for example, vgrad.optim.sgd(0.1)."
    if isinstance(tx, Optimizer):
        got = f"an optimizer of torch, {type(tx).__name__}"
        advice = "Read it: tx, state = vgrad.optim.from_torch(optimizer)."
    elif callable(tx):
        advice = f"Call it: {getattr(tx, '__name__', 'make')}(lr, ...)."
    raise TypeError(
        f"{function}(tx): expected a transformation of vgrad.optim, got {got}. {advice}"
    )


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after the other; the state is the tuple of theirs.

    `chain()` of nothing is the identity.

    Raises:
        TypeError: one of them is no transformation.
        ValueError: when updating, if the state was made by another chain.

    Example:
        >>> from vgrad.optim import scale_by_learning_rate, trace
        >>> heavy_ball = chain(trace(0.9), scale_by_learning_rate(0.5))
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = heavy_ball.update(params, heavy_ball.init(params))
        >>> len(state)
        2
    """

    for each in transformations:
        check_transformation("chain", each)

    def init(params: Params) -> Tree:
        return tuple(each.init(params) for each in transformations)

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        if len(state) != len(transformations):
            raise ValueError(
                f"chain(state of {len(state)} transformations): expected one of "
                f"{len(transformations)}, as init of the same chain makes it."
            )
        updates, states = dict(grads), []
        for each, old in zip(transformations, state, strict=True):
            updates, new = each.update(updates, old, params)
            states.append(new)
        return updates, tuple(states)

    return GradientTransformation(init, update)


def stateless(
    update: Callable[[Grads, Params | None], Updates],
) -> GradientTransformation:
    """Make a transformation without state of `(grads, params) -> updates`."""
    return GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None: (update(grads, params), state),
    )


def apply_updates(params: Params, updates: Grads) -> Params:
    """Add updates to parameters: `{name: shape}, {name: shape} -> {name: shape}`.

    The sum is taken in `promote_types(dtype, float32)` and rounded once to the dtype of
    the parameter: less than half a unit in the last place of a bfloat16 is lost.
    Parameters whose update is `None` are returned as they are.

    Raises:
        ValueError: names or shapes differ, as when a gradient still has its batch
            dimension.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -1.0])})
        {'w': tensor([1.5000, 0.0000])}
    """
    checks.names("apply_updates(updates)", params, updates)
    given = {name: value for name, value in updates.items() if value is not None}
    shapes = {name: params[name].shape for name in given}
    checks.shapes("apply_updates(updates)", shapes, given)

    def add(param: Tensor, update: Tensor | None) -> Tensor:
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

    Like every function of tensors it records a graph if its inputs require grad, as
    gradients through the training need it. Ordinary training calls it under
    `torch.no_grad()`, or with gradients and parameters of `torch.func`.

    With `donate=True` the step may write into the old state, which must not be used
    again, and into the old parameters: `sgd`, `adam` and `adamw` make the step by one
    kernel of torch, at the speed of its fused optimizers. The given dictionaries are
    left empty, so that using them again raises; tensors that are also held elsewhere,
    for example by a module, may have changed. The gradients are never changed: where
    one, or a part of the state, has the memory of a parameter, the step is a pure one,
    as it is for one tensor under two names.

    Raises:
        TypeError: `tx` is no transformation, but, say, an optimizer of `torch.optim`.
        ValueError: parameters that a kernel would write overlap in part.

    Example:
        >>> from vgrad.optim import sgd
        >>> tx, params = sgd(0.5), {"w": torch.ones(2)}
        >>> params, state = step(tx, {"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    check_transformation("step", tx)
    done = tx.donated(grads, state, params) if donate and tx.donated else None
    if done is None:
        updates, new_state = tx.update(grads, state, params)
        done = apply_updates(params, updates), new_state
    if donate:
        kept = {id(each) for each in _dictionaries(done)}
        for each in _dictionaries((params, state)):
            if id(each) not in kept:
                each.clear()
    return done


def states_of(state: Tree, kind: type) -> list[Any]:
    """Collect the states of one kind of transformation from a tree."""
    nodes = tree_leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _dictionaries(tree: Tree) -> list[dict]:
    """Collect the dictionaries of a tree."""
    if isinstance(tree, dict):
        inner = [each for each in tree.values() if not isinstance(each, Tensor)]
        return [tree, *_dictionaries(inner)]
    if isinstance(tree, list | tuple):
        return [found for each in tree for found in _dictionaries(each)]
    return []

"""Decay of weights, factors, and transformations of a part of the parameters.

A selection is a list or tuple of patterns, of which one has to match (see
`vgrad.checks`), or a function of the name.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vgrad import checks
from vgrad.optim.base import (
    GradientTransformation,
    Number,
    Rate,
    State,
    chain,
    counter,
    is_schedule,
    is_zero,
    map_grads,
    of_gradient_and_parameter,
    plain,
    plus,
    scalar,
    stateless,
)
from vgrad.tree import widened
from vgrad.typing import Params, Schedule

Selection = checks.Patterns | Callable[[str], bool]
"""The names that match one of the patterns, or for which a function is true."""

Key = str | tuple[str, ...] | Callable[[str], bool]
"""A selection as the key of a dictionary, where one pattern needs no tuple."""


def add_decayed_weights(
    weight_decay: Number, *, mask: Selection | None = None
) -> GradientTransformation:
    """Add the parameters, times a factor, to the gradients: `g + weight_decay * p`.

    Before the moments of an optimizer this is a penalty of the squared norm, after them
    it is decoupled weight decay. A decay of the number zero is the identity. `mask` is
    a selection as in `masked`. Reference: Loshchilov and Hutter, arXiv 1711.05101.

    Example:
        >>> decay = add_decayed_weights(0.5)
        >>> decay.update({"w": torch.zeros(2)}, (), {"w": torch.tensor([2.0, 4.0])})
        ({'w': tensor([1., 2.])}, ())
    """
    if mask is not None:
        mask = _checked("add_decayed_weights", "mask", mask)
    if is_zero(weight_decay):
        return chain()
    if mask is not None:
        return masked(add_decayed_weights(weight_decay), mask)
    return of_gradient_and_parameter(
        "add_decayed_weights", lambda grad, param: plus(grad, weight_decay, param)
    )


def scale(factor: Number) -> GradientTransformation:
    """Multiply gradients by a factor: `factor * g`.

    Example:
        >>> scale(-0.5).update({"w": torch.ones(2)}, ())
        ({'w': tensor([-0.5000, -0.5000])}, ())
    """
    checks.finite("scale", **plain(factor=factor))
    return _multiplied(factor)


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiply gradients by a factor that changes: `schedule(t) * g`.

    `t` is the number of steps taken so far, an int64 tensor without dimensions that is
    zero at the first step. A schedule that needs float64 computes with `t.double()`.
    """
    if not callable(schedule):
        raise TypeError(
            f"scale_by_schedule(schedule={schedule!r}): expected a function of the "
            f"step count, got a {type(schedule).__name__}. For a number, use scale."
        )
    return _multiplied(schedule)


def scale_by_learning_rate(rate: Rate) -> GradientTransformation:
    """Turn gradients into updates that descend: `-rate * g`.

    `rate` is a number, a tensor without dimensions, or a schedule as for
    `scale_by_schedule`. Only a schedule needs state, a count.
    """
    return _multiplied(rate, negate=True)


def _multiplied(factor: Rate, *, negate: bool = False) -> GradientTransformation:
    def scaled(grads, factor):
        def multiply(grad):
            grad = widened(grad)
            value = scalar(factor, grad)
            return (-value if negate else value) * grad

        return map_grads(multiply, grads)

    if not is_schedule(factor):
        return stateless(lambda grads, params: scaled(grads, factor))
    return GradientTransformation(
        lambda params: State(counter(params), {}),
        lambda grads, state, params=None: (
            scaled(grads, factor(state.count)),
            State(state.count + 1, {}),
        ),
    )


def descent(
    lr: Rate,
    *direction: GradientTransformation,
    weight_decay: Number = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Make the chain that most optimizers are: sign, decay, direction and rate.

    Decoupled decay is added after the direction, so the direction does not scale it.
    """
    decay = add_decayed_weights(weight_decay)
    return chain(
        *ascent(maximize),
        *((*direction, decay) if decoupled else (decay, *direction)),
        scale_by_learning_rate(lr),
    )


def ascent(maximize: bool) -> list[GradientTransformation]:
    """List the change of sign that turns descent into ascent, where one maximizes."""
    return [scale(-1.0)] if maximize else []


def masked(
    inner: GradientTransformation, selection: Selection
) -> GradientTransformation:
    """Apply a transformation to the selected names; other gradients pass unchanged.

    `selection` is a list or tuple of patterns of names, or a function of the name.

    Example:
        >>> decay = masked(add_decayed_weights(0.5), ["*.weight"])
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> decay.update(params, decay.init(params), params)[0]
        {'0.weight': tensor([1.5000, 1.5000]), '0.bias': tensor([1., 1.])}
    """
    selection = _checked("masked", "selection", selection)

    def init(params):
        _check_matches("masked", selection, params)
        return inner.init(_part(params, _selected(params, selection)))

    def update(grads, state, params=None):
        chosen = _selected(grads, selection)
        updates, state = _update_part("masked", inner, chosen, grads, state, params)
        return {**grads, **updates}, state

    return GradientTransformation(init, update)


def partition(groups: Mapping[Key, GradientTransformation]) -> GradientTransformation:
    """Give each group of parameters its own transformation: parameter groups.

    A key is a pattern, a tuple of patterns or a function of the name. A name belongs to
    the first group that selects it, in the order of the dictionary, so that exceptions
    come first and `"*"` last. State: a tuple of the groups' states.

    Example:
        >>> from vgrad.optim import adamw, sgd
        >>> tx = partition({"*.bias": sgd(0.5), "*": adamw(0.1, weight_decay=0.0)})
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'0.weight': tensor([-0.1000, -0.1000]), '0.bias': tensor([-0.5000, -0.5000])}
    """
    if not groups:
        raise ValueError("partition({}): expected at least one group, got none.")
    transformations = list(groups.values())
    selections = [
        _checked("partition", "key", (key,) if isinstance(key, str) else key)
        for key in groups
    ]

    def init(params):
        for selection in selections:
            _check_matches("partition", selection, params)
        parts = zip(transformations, split(params), strict=True)
        return tuple(tx.init(_part(params, chosen)) for tx, chosen in parts)

    def update(grads, state, params=None):
        if len(state) != len(selections):
            raise ValueError(
                f"partition(state of {len(state)} groups): expected one of "
                f"{len(selections)}, as init of the same partition makes it."
            )
        updates, states = dict(grads), []
        for tx, chosen, old in zip(transformations, split(grads), state, strict=True):
            changed, new = _update_part("partition", tx, chosen, grads, old, params)
            updates.update(changed)
            states.append(new)
        return updates, tuple(states)

    def split(tree):
        """Return the names of each group; each name is in exactly one."""
        left, members = list(tree), []
        for selection in selections:
            members.append(_selected(left, selection))
            left = [name for name in left if name not in members[-1]]
        if left:
            raise ValueError(
                f"partition({checks.listed(left)}): expected a group that selects "
                f"every name, got none for these. End with a group of '*'."
            )
        return members

    return GradientTransformation(init, update)


def set_to_zero(selection: Selection = ("*",)) -> GradientTransformation:
    """Leave the selected parameters as they are; other gradients pass unchanged.

    Their updates are `None`, so that `apply_updates` returns the very same tensors. To
    compute no gradients for them either, see `vgrad.freeze`.

    Example:
        >>> freeze = set_to_zero(["encoder.*"])
        >>> freeze.update({"encoder.weight": torch.ones(2), "bias": torch.ones(1)}, ())
        ({'encoder.weight': None, 'bias': tensor([1.])}, ())
    """
    selection = _checked("set_to_zero", "selection", selection)

    def init(params):
        _check_matches("set_to_zero", selection, params)
        return ()

    return GradientTransformation(
        init,
        lambda grads, state, params=None: (
            {**grads, **dict.fromkeys(_selected(grads, selection))},
            state,
        ),
    )


def _selected(names: Iterable[str], selection: Selection) -> list[str]:
    if callable(selection):
        return [name for name in names if selection(name)]
    return checks.selected(names, selection)


def _part(tree: Mapping[str, Any], chosen: Iterable[str]) -> dict[str, Any]:
    return {name: tree[name] for name in chosen}


def _update_part(function, tx, chosen, grads, state, params):
    part = None
    if params is not None:
        checks.names(f"{function}(grads)", params, grads)
        part = _part(params, chosen)
    return tx.update(_part(grads, chosen), state, part)


def _checked(function: str, argument: str, selection: Any) -> Any:
    """Return an immutable copy of a selection, or refuse it."""
    if callable(selection):
        return selection
    if not isinstance(selection, str | list | tuple):
        raise TypeError(
            f"{function}({argument}={selection!r}): expected patterns of names or a "
            f"function of the name, got a {type(selection).__name__}."
        )
    checks.patterns(function, **{argument: selection})
    return tuple(selection)


def _check_matches(function: str, selection: Selection, params: Params) -> None:
    """Each pattern matches a parameter: a misspelt one would act on other names."""
    if not params:
        return
    if not callable(selection):
        checks.all_matched(function, params, selection)
    elif not _selected(params, selection):
        raise ValueError(
            f"{function}({selection!r}): expected a function that selects a parameter, "
            f"got none. The names are {checks.listed(params)}."
        )

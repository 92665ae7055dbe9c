"""Parts of the parameters, selected by name: masks, groups, frozen parameters.

A selection is a list or tuple of patterns, of which one has to match (see
`vgrad.checks`), or a function of the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vgrad import checks
from vgrad.optim.arithmetic import Grads, Updates
from vgrad.optim.base import GradientTransformation
from vgrad.typing import Params, Tree

Selection = checks.Patterns | Callable[[str], bool]
"""The names that match one of the patterns, or for which a function is true."""

Key = str | tuple[str, ...] | Callable[[str], bool]
"""A selection as the key of a dictionary, where one pattern needs no tuple."""


def masked(
    inner: GradientTransformation, selection: Selection
) -> GradientTransformation:
    """Apply a transformation to the selected names; other gradients pass unchanged.

    State: `inner`'s, for the selected parameters. For no update at all, see
    `set_to_zero`.

    Args:
        selection: a list or tuple of patterns of names, or a function of the name.

    Example:
        >>> from vgrad.optim import add_decayed_weights
        >>> decay = masked(add_decayed_weights(0.5), ["*.weight"])
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> decay.update(params, decay.init(params), params)[0]
        {'0.weight': tensor([1.5000, 1.5000]), '0.bias': tensor([1., 1.])}
    """
    selection = checked("masked", "selection", selection)

    def init(params: Params) -> Tree:
        _check_matches("masked", selection, params)
        return inner.init(_part(params, _selected(params, selection)))

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        chosen = _selected(grads, selection)
        part = _part_of_params("masked", params, grads, chosen)
        updates, state = inner.update(_part(grads, chosen), state, part)
        return {**grads, **updates}, state

    return GradientTransformation(init, update)


def partition(
    groups: Mapping[Key, GradientTransformation],
) -> GradientTransformation:
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
        checked("partition", "key", (key,) if isinstance(key, str) else key)
        for key in groups
    ]

    def init(params: Params) -> Tree:
        for selection in selections:
            _check_matches("partition", selection, params)
        parts = zip(transformations, _split(params), strict=True)
        return tuple(tx.init(_part(params, chosen)) for tx, chosen in parts)

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        if len(state) != len(selections):
            raise ValueError(
                f"partition(state of {len(state)} groups): expected one of "
                f"{len(selections)}, as init of the same partition makes it."
            )
        updates: Updates = dict(grads)
        states = []
        parts = zip(transformations, _split(grads), state, strict=True)
        for tx, chosen, old in parts:
            part = _part_of_params("partition", params, grads, chosen)
            changed, new = tx.update(_part(grads, chosen), old, part)
            updates.update(changed)
            states.append(new)
        return updates, tuple(states)

    def _split(tree: Iterable[str]) -> list[list[str]]:
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

    Their updates are `None`, so that `apply_updates` returns the very same tensors. Put
    first in a chain, no moments are computed for them either. To compute no gradients
    for them in the first place, see `vgrad.freeze`.

    Example:
        >>> from vgrad.optim import chain, sgd
        >>> tx = chain(set_to_zero(["encoder.*"]), sgd(0.5))
        >>> params = {"encoder.weight": torch.ones(2), "head.weight": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'encoder.weight': None, 'head.weight': tensor([-0.5000, -0.5000])}
    """
    selection = checked("set_to_zero", "selection", selection)

    def init(params: Params) -> Tree:
        _check_matches("set_to_zero", selection, params)
        return ()

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        return {**grads, **dict.fromkeys(_selected(grads, selection))}, state

    return GradientTransformation(init, update)


def _selected(tree: Iterable[str], selection: Selection) -> list[str]:
    """Return the names that belong to a selection, in their order."""
    if callable(selection):
        return [name for name in tree if selection(name)]
    return checks.selected(tree, selection)


def _part(tree: Mapping[str, Tensor | None], chosen: Sequence[str]) -> dict:
    return {name: tree[name] for name in chosen}


def _part_of_params(
    function: str, params: Params | None, grads: Grads, chosen: Sequence[str]
) -> Params | None:
    if params is None:
        return None
    checks.names(f"{function}(grads)", params, grads)
    return _part(params, chosen)


def checked(function: str, argument: str, selection: Any) -> Any:
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
            f"{function}({selection!r}): expected a function that selects a "
            f"parameter, got none. The names are {checks.listed(params)}."
        )

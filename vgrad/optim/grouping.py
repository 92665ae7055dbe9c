"""Parts of the parameters, chosen by name: masks, parameter groups, frozen parameters.

A selection says which names belong to a part. It is a shell-style pattern, a tuple of
patterns of which one has to match, or a function of the name. Case counts.
"""

# Annotations stay text: torch.compile, which traces the making of an optimizer inside a
# mapped function, cannot evaluate `Params | None`.
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from vgrad import checks
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.typing import Params, Tree

Selection = str | tuple[str, ...] | Callable[[str], bool]
"""Names: a shell-style pattern, a tuple of them, or a function of the name."""


def masked(
    inner: GradientTransformation, selection: Selection
) -> GradientTransformation:
    """Apply a transformation to the selected names; other gradients pass unchanged.

    `inner` sees the selected gradients and parameters alone. State: that of `inner` for
    them. What is not to be updated at all goes through `freeze`.

    Raises:
        TypeError: the selection is no pattern, tuple of patterns or function.
        ValueError: in `init`, a pattern matches no parameter, or the function none.

    Example:
        >>> from vgrad.optim import add_decayed_weights
        >>> decay = masked(add_decayed_weights(0.5), "*.weight")
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> decay.update(params, decay.init(params), params)[0]
        {'0.weight': tensor([1.5000, 1.5000]), '0.bias': tensor([1., 1.])}
    """
    _check_selection("masked", selection)

    def init(params: Params) -> Tree:
        _check_matches("masked", selection, params)
        return inner.init(_part(params, selected(params, selection)))

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        names = selected(grads, selection)
        updates, state = inner.update(
            _part(grads, names), state, _part_of_params("masked", params, grads, names)
        )
        return {**grads, **updates}, state

    return GradientTransformation(init, update)


def partition(
    groups: Mapping[Selection, GradientTransformation],
) -> GradientTransformation:
    """Give each group of parameters its own transformation: parameter groups.

    The keys are selections. A name belongs to the first group that selects it, in the
    order of the dictionary, so that exceptions come first and `"*"` last. State: the
    tuple of those of the groups, in their order.

    Raises:
        TypeError: a key is no selection.
        ValueError: there is no group; in `init`, a selection matches no parameter; in
            `init` or when updating, a name is in no group.

    Example:
        >>> from vgrad.optim import adamw, sgd
        >>> tx = partition({"*.bias": sgd(0.5), "*": adamw(0.1, weight_decay=0.0)})
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'0.weight': tensor([-0.1000, -0.1000]), '0.bias': tensor([-0.5000, -0.5000])}
    """
    groups = dict(groups)
    if not groups:
        raise ValueError("partition({}): expected at least one group, got none.")
    for selection in groups:
        _check_selection("partition", selection)

    def init(params: Params) -> Tree:
        for selection in groups:
            _check_matches("partition", selection, params)
        return tuple(
            tx.init(_part(params, names))
            for tx, names in zip(groups.values(), _shared_out(params), strict=True)
        )

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        if len(state) != len(groups):
            raise ValueError(
                f"partition(state of {len(state)} groups): expected one of "
                f"{len(groups)}, as init of the same partition makes it."
            )
        updates: Updates = dict(grads)
        states = []
        parts = zip(groups.values(), _shared_out(grads), state, strict=True)
        for tx, names, old in parts:
            given = _part_of_params("partition", params, grads, names)
            changed, new = tx.update(_part(grads, names), old, given)
            updates.update(changed)
            states.append(new)
        return updates, tuple(states)

    def _shared_out(names: Iterable[str]) -> list[list[str]]:
        """Return the names of each group; each name is in exactly one."""
        left, shares = list(names), []
        for selection in groups:
            shares.append(selected(left, selection))
            left = [name for name in left if name not in shares[-1]]
        if left:
            raise ValueError(
                f"partition({checks.listed(left)}): expected a group that selects "
                f"every name, got none for these. End with a group of '*'."
            )
        return shares

    return GradientTransformation(init, update)


def freeze(selection: Selection = "*") -> GradientTransformation:
    """Let the selected parameters stay as they are; other gradients pass unchanged.

    Their updates are `None`, so that `apply_updates` returns the very same tensors. Put
    first in a chain, no moments are computed for them either. There is no state. To
    compute no gradients for them in the first place, see `vgrad.freeze`.

    Raises:
        TypeError: the selection is no pattern, tuple of patterns or function.
        ValueError: in `init`, a pattern matches no parameter, or the function none.

    Example:
        >>> from vgrad.optim import chain, sgd
        >>> tx = chain(freeze("encoder.*"), sgd(0.5))
        >>> params = {"encoder.weight": torch.ones(2), "head.weight": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'encoder.weight': None, 'head.weight': tensor([-0.5000, -0.5000])}
    """
    _check_selection("freeze", selection)

    def init(params: Params) -> Tree:
        _check_matches("freeze", selection, params)
        return ()

    def update(
        grads: Grads, state: Tree, params: Params | None = None
    ) -> tuple[Updates, Tree]:
        return {**grads, **dict.fromkeys(selected(grads, selection))}, state

    return GradientTransformation(init, update)


def selected(names: Iterable[str], selection: Selection) -> list[str]:
    """Return those of the names that belong to a selection, in their order.

    Example:
        >>> selected(["0.weight", "0.bias"], ("*.bias", "*.scale"))
        ['0.bias']
    """
    return [name for name in names if _belongs(name, selection)]


def _belongs(name: str, selection: Selection) -> bool:
    if callable(selection):
        return bool(selection(name))
    patterns = (selection,) if isinstance(selection, str) else selection
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


# torch.compile (2.13) cannot trace fnmatch, and need not, since names and patterns are
# constants. `torch.compiler.assume_constant_result` sets just this, but imports the
# compiler, which takes seconds and changes the warning filters.
vars(_matches)["_dynamo_marked_constant"] = True


def _part(tree: Mapping[str, Tensor | None], names: Sequence[str]) -> dict:
    return {name: tree[name] for name in names}


def _part_of_params(
    function: str, params: Params | None, grads: Grads, names: Sequence[str]
) -> Params | None:
    if params is None:
        return None
    checks.same_names(f"{function}(grads)", params, grads)
    return _part(params, names)


def _check_selection(function: str, selection: Selection) -> None:
    patterns = selection if isinstance(selection, tuple) else (selection,)
    words = all(isinstance(pattern, str) for pattern in patterns)
    if not words and not callable(selection):
        raise TypeError(
            f"{function}({selection!r}): expected a pattern, a tuple of patterns or a "
            f"function of the name, got a {type(selection).__name__}."
        )


def _check_matches(function: str, selection: Selection, params: Params) -> None:
    """Each pattern matches a parameter: a misspelt one would act on other names."""
    patterns = selection if isinstance(selection, tuple) else (selection,)
    for pattern in patterns:
        if params and not selected(params, pattern):
            raise ValueError(
                f"{function}({pattern!r}): expected a selection that matches a "
                f"parameter, got none. The names are {checks.listed(params)}."
            )

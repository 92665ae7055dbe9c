"""One optimizer for every member: its own counter, norms, rates and decays.

E members
"""

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.ensemble.execution import check_patterns
from vgrad.optim.base import (
    Donated,
    GradientTransformation,
    Grads,
    UpdateFn,
    Updates,
    apply_updates,
)
from vgrad.torch_private import levels
from vgrad.tree import (
    map_tensors,
    tensors,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from vgrad.typing import Params, Tree


class MembersState(NamedTuple):
    """State of `for_members`: `[E, ...]` of the members, and of what they share."""

    members: Tree
    shared: Tree


class _Fields(NamedTuple):
    """Those of a transformation in their places, and one more, which copies keep."""

    init: Callable[[Params], Tree]
    update: UpdateFn
    donated: Donated | None
    shared: tuple[str, ...]


class MembersTransformation(  # pyright: ignore[reportGeneralTypeIssues]  # it is longer
    _Fields, GradientTransformation
):
    """What `for_members` returns.

    Attributes:
        shared: patterns of the parameters without a member axis.
    """


def for_members(
    make: GradientTransformation | Callable[..., GradientTransformation],
    /,
    *,
    shared: Iterable[str] = (),
    shared_tx: GradientTransformation | None = None,
    **hyperparams: Any,
) -> MembersTransformation:
    """Run an optimizer for every member by itself, on stacked parameters `[E, ...]`.

    `make` is a transformation, or what makes one: then `hyperparams` are its arguments,
    where a tensor `[E]` gives each member its own value (inside of tuples, like betas,
    too) and everything else is the same for all. Norms (clipping, lamb, muon), counters
    and steps that are skipped belong to one member. State: that of the transformation,
    E times.

    Parameters that match `shared` have no member axis and are stepped by `shared_tx`,
    by default the same transformation, which then must not differ between members.

    Raises:
        ValueError: members and hyperparameters are not equally many, or shared
            parameters would need several values of one.

    Example:
        >>> from vgrad import optim
        >>> tx = for_members(optim.sgd, lr=torch.tensor([0.5, 2.0]), momentum=0.9)
        >>> params = {"w": torch.ones(2, 3)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["w"]
        tensor([[-0.5000, -0.5000, -0.5000],
                [-2.0000, -2.0000, -2.0000]])
    """
    check_patterns("for_members", shared)
    patterns = tuple(shared)
    leaves, structure = tree_flatten(hyperparams)
    own = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
    if isinstance(make, GradientTransformation) and hyperparams:
        raise TypeError(
            f"for_members(transformation, {', '.join(hyperparams)}=...): expected a "
            f"function that makes a transformation of them, such as optim.sgd, got one "
            f"that is made."
        )
    if patterns and own and shared_tx is None:
        raise ValueError(
            "for_members(shared=..., [E] hyperparameters): expected shared_tx, the "
            "transformation of the shared parameters, since those of the members "
            "differ; got none."
        )

    def of(values: list[Tensor]) -> GradientTransformation:
        if isinstance(make, GradientTransformation):
            return make
        filled = list(leaves)
        for place, value in zip(own, values, strict=True):
            filled[place] = value
        return make(**tree_unflatten(filled, structure))

    values = [leaves[place] for place in own]
    common = shared_tx
    if common is None and patterns:
        common = of([])

    def check(params: Params) -> None:
        for name, value in params.items():
            if value.ndim == 0:
                raise ValueError(
                    f"for_members(params): expected a member axis in {name!r}, got a "
                    f"scalar. If the members share it, name it in shared=."
                )
        sizes = {name: len(value) for name, value in params.items()}
        sizes |= {f"hyperparameter {i}": len(value) for i, value in enumerate(values)}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"for_members(hyperparameters): expected one number of members, got "
                f"{sizes}."
            )

    def split(tree: Grads) -> tuple[dict, dict]:
        # A pattern may also be there for buffers alone.
        whole = {name for each in patterns for name in fnmatch.filter(tree, each)}
        mine = {name: value for name, value in tree.items() if name not in whole}
        return mine, {name: tree[name] for name in tree if name in whole}

    def on_device(tree: Tree) -> list[Tensor]:
        held = tensors(tree)
        return [value.to(held[0].device) if held else value for value in values]

    def init(params: Params) -> MembersState:
        mine, common_params = split(params)
        rest = common.init(common_params) if common is not None else ()
        if not mine:
            return MembersState((), rest)
        check(mine)
        made = torch.vmap(lambda params, *values: of(list(values)).init(params))(
            mine, *on_device(mine)
        )
        if any(map(_is_members, tree_leaves(made, is_leaf=_is_members))):
            raise ValueError(
                "for_members(transformation): expected one of a single member, got one "
                "that has for_members in it. Wrap the whole: for_members(chain(...))."
            )
        # What does not depend on the member comes as one value that all of them show.
        made = tree_map(torch.Tensor.contiguous, made)
        return MembersState(made, rest)

    def update(
        grads: Grads, state: MembersState, params: Params | None = None
    ) -> tuple[Updates, MembersState]:
        mine, common_grads = split(grads)
        given, common_params = (None, None) if params is None else split(params)
        present = {name: grad for name, grad in mine.items() if grad is not None}
        absent = dict.fromkeys(name for name in mine if name not in present)

        def one(grads: Grads, state: Tree, params: Any, *values: Tensor) -> tuple:
            tx = of(list(values))
            updates, state = tx.update({**absent, **grads}, state, params or None)
            some = {name: each for name, each in updates.items() if each is not None}
            return some, state

        mapped: tuple = {}, state.members
        if mine:
            check(given or present)
            mapped = torch.vmap(one)(
                present, state.members, given or {}, *on_device((given, present))
            )
        updates, rest = {}, state.shared
        if common is not None:
            updates, rest = common.update(common_grads, rest, common_params)
        found = {**mapped[0], **updates}
        ordered = {name: found.get(name) for name in grads}
        return ordered, MembersState(mapped[1], rest)

    # What members share would need a step of its own.
    donated = None if patterns else _donated(of, values, check)
    return MembersTransformation(init, update, donated, patterns)


LEAST = 20_000
"""Numbers of a member from which on a kernel call for each one pays, on a CPU."""


def _donated(
    of: Callable[[list], GradientTransformation],
    values: list[Tensor],
    check: Callable[[Params], None],
) -> Donated:
    """Step in place: all members as one if they are alike, else one by one."""
    common = None if values else of([])

    def step(
        grads: Grads, state: MembersState, params: Params
    ) -> tuple[Params, MembersState] | None:
        if levels.inside_transform() or torch.compiler.is_compiling():
            return None
        some = next(iter(params.values()), None)
        if some is None or any(grad is None for grad in grads.values()):
            return None
        if some.device.type != "cpu":  # where looking at values is free
            return None
        if torch.is_grad_enabled() and any(value.requires_grad for value in values):
            return None
        check(params)
        held = tensors((params, state.members))
        if not all(map(_apart, held)):
            return None
        counts = [each for each in held if _counts(each)]
        if common and all(bool((each == each[0]).all()) for each in counts):
            members = _as_one(common, grads, state.members, params)
        elif sum(value[0].numel() for value in params.values()) < LEAST:
            return None
        else:
            members = _one_by_one(of, values, grads, state.members, params)
        if members is None:
            return None
        return dict(params), MembersState(members, state.shared)

    return step


def _as_one(
    tx: GradientTransformation, grads: Grads, state: Tree, params: Params
) -> Tree | None:
    """Step all members as if they were one: they have taken equally many steps."""
    joint = map_tensors(lambda x: x[0] if _counts(x) else x, state)
    done = _in_place(tx, grads, joint, params)
    if done is None:
        return None
    members = len(next(iter(params.values())))
    return map_tensors(
        lambda x: x.expand(members, *x.shape).clone() if _counts(x) else x, done
    )


def _one_by_one(
    of: Callable[[list], GradientTransformation],
    values: list[Tensor],
    grads: Grads,
    state: Tree,
    params: Params,
) -> Tree | None:
    """Step each member in its part of the tensors; None if no kernel takes the first.

    One that takes the first may refuse another, for its numbers.
    """
    states = []
    # All are made before the first one writes, since making one may raise.
    numbers = zip(*(value.tolist() for value in values), strict=True)
    count = len(next(iter(params.values())))
    made = [of(list(own)) for own in numbers] if values else [of([])] * count
    for member, tx in enumerate(made):
        mine = map_tensors(lambda x, i=member: x[i], (dict(grads), state, params))
        done = _in_place(tx, *mine)
        if done is None and member == 0:
            return None
        if done is None:
            # As tensors, with which a state has the same parts whatever their values.
            pure = of([value[member] for value in values])
            done = _written(pure, *mine)
        states.append(done)

    def counted(old: Tensor, *new: Tensor) -> Tensor:
        return torch.stack(new) if _counts(old) else old

    return tree_map(counted, state, *states)


def _written(
    tx: GradientTransformation, grads: Grads, state: Tree, params: Params
) -> Tree:
    """Step by the pure functions, and write the result over what was given."""
    updates, new = tx.update(grads, state, params)
    results = tensors((apply_updates(params, updates), new))
    for old, value in zip(tensors((params, state)), results, strict=True):
        if not _counts(old):
            old.copy_(value)
    return new


def _in_place(
    tx: GradientTransformation, grads: Grads, state: Tree, params: Params
) -> Tree | None:
    """Return the new state, if the step could be made."""
    done = tx.donated(grads, state, params) if tx.donated is not None else None
    return None if done is None else done[1]


def _is_members(node: Any) -> bool:
    return isinstance(node, MembersState)


def _counts(leaf: Tensor) -> bool:
    """Tell a count of steps, which is new after a step, from what is written to."""
    return not leaf.is_floating_point()


def _apart(stacked: Tensor) -> bool:
    """Tell whether each member has memory of its own; those of an expansion share."""
    members = stacked.shape[0]
    return members < 2 or stacked.stride(0) >= stacked.numel() // members


def of_members(
    function: str, tx: GradientTransformation, shared: Iterable[str]
) -> MembersTransformation:
    """Return a transformation for members, `tx` itself if it is one already."""
    check_patterns(function, shared)
    if not isinstance(tx, MembersTransformation):
        return for_members(tx, shared=shared)
    if set(tx.shared) != set(shared):
        raise ValueError(
            f"{function}(shared={list(shared)!r}): expected the patterns of "
            f"for_members, got others: {list(tx.shared)!r} there."
        )
    return tx

"""The members of a tree: mapped, counted and taken."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.layout import count_members
from vgrad.ensemble.optimizer import MembersState
from vgrad.tree import map_tensors, state_dict, tree_flatten, tree_unflatten
from vgrad.typing import T, Tree

Change = Callable[[Tensor], Any]


def take(tree: T, indices: Iterable[int] | Tensor, *, shared: Patterns = ()) -> T:
    """Copy members, some of them several times: `[E, ...] -> [K, ...]`.

    `tree` is an `EnsembleState`, with the optimizer, loss scale and `active` of each
    member, an `EarlyStopping`, or a tree of tensors with the member axis in front;
    `shared` is as in `ensemble_grad`. Or it is a list of `TrainState`, of members that
    are trained one by one. Nothing of the result is memory of `tree`. Rates in a state
    (`optim.inject_hyperparams`) go along; rates in a transformation (`for_members(...,
    lr=rates)`) are of places: index them as well.

    Random numbers of an ensemble follow from key, step and place: a copy draws others
    than the member it is of, which goes on with its own where it stays in its place. If
    `tree` and the result are both trained, all but one need a `fork()`. In a list each
    state has a key, with which copies would draw one noise: repeat `state.fork()`.

    To choose members by scores on private data is a release that epsilon of the steps
    does not cover.

    Reference: Jaderberg et al., Population Based Training of Neural Networks, arXiv
    1711.09846; Jamieson and Talwalkar, Non-stochastic Best Arm Identification
    (successive halving), arXiv 1502.07943.

    Raises:
        ValueError: there is no such member, tensors differ in the number of members, a
            pattern matches nothing, or a list is to have one state twice.

    Example:
        >>> take({"lr": torch.tensor([0.1, 0.2, 0.3])}, [0, 2, 2])
        {'lr': tensor([0.1000, 0.3000, 0.3000])}
    """
    rows = indices.tolist() if isinstance(indices, Tensor) else indices
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"take(indices={checks.shown(rows)}): expected numbers of members in a "
            f"list or a tensor [K], got a {type(rows).__name__}. Take one as [1]."
        )
    places = [i for x in rows for i in checks.integers("take", minimum=0, index=x)]
    states: Any = tree
    # Members that are trained one by one have keys and counts of their own.
    apart = type(states) in (list, tuple) and any(
        hasattr(x, "plan_digest") for x in states
    )
    count = len(states) if apart else counted("take", tree, shared)
    if not places or max(places) >= count:
        raise ValueError(
            f"take(indices={places}): expected numbers of members, from 0 to "
            f"{count - 1}. Of a tree that is cut among ranks these are the members of "
            f"this rank: gather_members comes before, and shard_members after."
        )

    def common(value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    def stacked(value: Tensor) -> Tensor:
        return value.detach()[places].requires_grad_(value.requires_grad)

    if not apart:
        return mapped(tree, shared, stacked, common)
    if len({*places}) < len(places):
        raise ValueError(
            f"take(states, {places}): expected each state once, since copies with one "
            f"key add one noise to different sums, whose difference shows the data, "
            f"got one again. Take it once, and states[i].fork() for each copy."
        )
    return type(states)(map_tensors(common, states[i]) for i in places)


def mapped(tree: Tree, shared: Patterns, stacked: Change, common: Change) -> Tree:
    """Apply one function to tensors with a member axis, another to all others."""

    def entries(named: Mapping[str, Tree], fixed: Collection[str]) -> dict[str, Tree]:
        return {
            name: map_tensors(common, value)
            if name in fixed
            else mapped(value, shared, stacked, common)
            for name, value in named.items()
        }

    if hasattr(tree, "without_members"):
        _check_shared(tree, shared)
        return type(tree)(**entries(tree._asdict(), tree.without_members))
    if isinstance(tree, MembersState):
        return MembersState(
            map_tensors(stacked, tree.members), map_tensors(common, tree.shared)
        )
    if isinstance(tree, Mapping):
        return entries(tree, checks.selected(tree, shared))
    if type(tree) in (list, tuple):
        return type(tree)(mapped(part, shared, stacked, common) for part in tree)
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([map_tensors(stacked, leaf) for leaf in leaves], structure)


def _check_shared(state: Any, shared: Patterns) -> None:
    """Refuse to take the rows of a shared entry for members: there may be as many."""
    optimizer = getattr(state, "optimizer", MembersState((), ()))
    stepped = " ".join(state_dict(optimizer.shared))
    names = {name for name in _names(state) if f"[{name!r}]" in stepped}
    if missing := names.difference(checks.selected(names, shared)):
        raise ValueError(
            f"state(shared={list(shared)!r}): expected patterns of all shared entries, "
            f"got none for {checks.listed(missing)}."
        )


def split(tree: Tree, shared: Patterns) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that have a member axis, and all others."""
    stacked: list[Tensor] = []
    common: list[Tensor] = []
    mapped(tree, shared, stacked.append, common.append)
    return stacked, common


def counted(function: str, tree: Tree, shared: Patterns) -> int:
    """Return the number of members of a tree."""
    checks.patterns(function, shared=shared)
    kind = "parameter or buffer"
    checks.all_matched(function, _names(tree), shared, kind=kind)
    stacked, _ = split(tree, shared)
    named = {f"tensor {number}": value for number, value in enumerate(stacked)}
    return count_members(f"{function}(tree)", named)


def _names(tree: Tree) -> Iterator[str]:
    """Yield the names of entries, to which patterns apply."""
    if hasattr(tree, "without_members"):
        yield from (*getattr(tree, "params", ()), *getattr(tree, "buffers", ()))
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield name
            yield from _names(value)
    elif type(tree) in (list, tuple):
        for part in tree:
            yield from _names(part)

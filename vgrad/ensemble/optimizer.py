"""One optimizer for each of E members: its own counter, norms, rates and decays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.axes import mapped
from vgrad.optim.base import (
    Donated,
    GradientTransformation,
    Grads,
    UpdateFn,
    Updates,
    apply_updates,
    check_transformation,
)
from vgrad.optim.fused import check_parts, disjoint
from vgrad.torch_private import modes
from vgrad.tree import (
    map_tensors,
    tensors,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from vgrad.typing import Params, Tree

Make = GradientTransformation | Callable[..., GradientTransformation]


class MembersState(NamedTuple):
    """State of `for_members`: `[E, ...]` of the members, and of what they share."""

    members: Tree
    shared: Tree


class _Fields(NamedTuple):
    """The fields of a transformation, and one more that copies keep."""

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
    make: Make,
    /,
    *,
    shared: Patterns = (),
    shared_tx: GradientTransformation | None = None,
    **hyperparams: Any,
) -> MembersTransformation:
    """Run an optimizer for every member by itself, on stacked parameters `[E, ...]`.

    `make` is a transformation, or what makes one: then `hyperparams` are its arguments,
    where a tensor `[E]` gives each member its own value (inside of tuples, like betas,
    too) and everything else is the same for all. Norms (clipping, lamb, muon), counters
    and skipped steps belong to one member. State: that of the transformation, E times.

    Parameters that match `shared` have no member axis and are stepped by `shared_tx`,
    by default the same transformation, which then must not differ between members.

    Args:
        shared: patterns of the entries without a member axis.

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
    checks.patterns("for_members", shared=shared)
    if not callable(make):
        check_transformation("for_members", make)
    if isinstance(make, GradientTransformation) and hyperparams:
        raise TypeError(
            f"for_members(transformation, {', '.join(hyperparams)}=...): expected a "
            f"function that makes a transformation of them, such as optim.sgd, got one "
            f"that is made."
        )
    run = _Members(make, hyperparams, tuple(shared), shared_tx)
    # What members share would need a step of its own.
    donated = None if shared else run.in_place
    return MembersTransformation(run.init, run.update, donated, run.patterns)


def of_members(
    function: str, tx: GradientTransformation, shared: Patterns
) -> MembersTransformation:
    """Return a transformation for members, `tx` itself if it is one already."""
    checks.patterns(function, shared=shared)
    check_transformation(function, tx)
    if not isinstance(tx, MembersTransformation):
        return for_members(tx, shared=shared)
    if set(tx.shared) != set(shared):
        raise ValueError(
            f"{function}(shared={list(shared)!r}): expected the patterns of "
            f"for_members, got others: {list(tx.shared)!r} there."
        )
    return tx


LEAST = 20_000
"""On a CPU, the size of a member above which a kernel call for each one pays."""


class _Members:
    """What `for_members` was given, and the functions of its transformation."""

    def __init__(
        self,
        make: Make,
        hyperparams: dict[str, Any],
        patterns: tuple[str, ...],
        shared_tx: GradientTransformation | None,
    ) -> None:
        self.patterns = patterns
        self._make = make
        self._leaves, self._structure = tree_flatten(hyperparams)
        # The values `[E]` that differ between members, and where they are.
        places = enumerate(self._leaves)
        self._own = {i: x for i, x in places if isinstance(x, Tensor) and x.ndim}
        self._values = list(self._own.values())
        if patterns and self._own and shared_tx is None:
            raise ValueError(
                "for_members(shared=..., [E] hyperparameters): expected shared_tx, the "
                "transformation of the shared parameters, since those of the members "
                "differ; got none."
            )
        # The one transformation of all members, if they do not differ.
        self._alike = None if self._own else self._of([])
        self._shared_tx = shared_tx or (self._alike if patterns else None)

    def __deepcopy__(self, memo: dict) -> "_Members":
        return self  # as functions do, which transformations consist of

    def init(self, params: Params) -> MembersState:
        """Start each member, and what they share."""
        mine, common_params = self._split(params)
        rest = self._shared_tx.init(common_params) if self._shared_tx else ()
        if not mine:
            return MembersState((), rest)
        self._check(mine)
        made = torch.vmap(lambda params, *values: self._of(values).init(params))(
            mine, *self._on_device(mine)
        )
        inner = tree_leaves(made, is_leaf=lambda node: isinstance(node, MembersState))
        if any(isinstance(each, MembersState) for each in inner):
            raise ValueError(
                "for_members(transformation): expected one of a single member, got one "
                "that has for_members in it. Wrap the whole: for_members(chain(...))."
            )
        # What does not depend on the member comes as one value that all of them show.
        return MembersState(tree_map(Tensor.contiguous, made), rest)

    def update(
        self, grads: Grads, state: MembersState, params: Params | None = None
    ) -> tuple[Updates, MembersState]:
        """Return the updates of each member and of what they share."""
        mine, common_grads = self._split(grads)
        given, common_params = (None, None) if params is None else self._split(params)
        present = {name: grad for name, grad in mine.items() if grad is not None}
        absent = dict.fromkeys(name for name in mine if name not in present)

        def one(grads: Grads, state: Tree, params: Any, *values: Tensor) -> tuple:
            tx = self._of(values)
            updates, state = tx.update({**absent, **grads}, state, params or None)
            some = {name: each for name, each in updates.items() if each is not None}
            return some, state

        found, members, rest = {}, state.members, state.shared
        if mine:
            self._check(given or present)
            values = self._on_device((given, present))
            found, members = mapped(one, present, members, given or {}, *values)
        if self._shared_tx is not None:
            updates, rest = self._shared_tx.update(common_grads, rest, common_params)
            found = {**found, **updates}
        return {name: found.get(name) for name in grads}, MembersState(members, rest)

    def in_place(
        self, grads: Grads, state: MembersState, params: Params
    ) -> tuple[Params, MembersState] | None:
        """Step in place: all members as one if they are alike, else one by one."""
        if modes.inside_transform() or torch.compiler.is_compiling():
            return None
        if not params or any(grad is None for grad in grads.values()):
            return None
        if not next(iter(params.values())).is_cpu:  # where looking at values is free
            return None
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._values):
            return None
        self._check(params)
        held = tensors((params, state.members))
        if not all(map(_apart, held)):
            return None
        counts = [each for each in held if _counts(each)]
        if self._alike and all(bool((each == each[0]).all()) for each in counts):
            members = _as_one(self._alike, grads, state.members, params)
        elif sum(value[0].numel() for value in params.values()) < LEAST:
            return None
        elif not disjoint([*held, *tensors(dict(grads))]):
            check_parts(params)
            return None
        else:
            members = self._one_by_one(grads, state.members, params)
        done = MembersState(members, state.shared)
        return None if members is None else (dict(params), done)

    def _of(self, values: Any) -> GradientTransformation:
        """Return the transformation of a member that has these values."""
        if isinstance(self._make, GradientTransformation):
            return self._make
        own = dict(zip(self._own, values, strict=True))
        filled = [own.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        return self._make(**tree_unflatten(filled, self._structure))

    def _check(self, params: Params) -> None:
        """Refuse parameters and hyperparameters of other numbers of members."""
        for name, value in params.items():
            if value.ndim == 0:
                raise ValueError(
                    f"for_members(params): expected a member axis in {name!r}, got a "
                    f"scalar. If the members share it, name it in shared=."
                )
        sizes = {name: len(value) for name, value in params.items()}
        sizes |= {f"hyperparameter {i}": len(x) for i, x in enumerate(self._values)}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"for_members(hyperparameters): expected one number of members, got "
                f"{sizes}."
            )

    def _split(self, tree: Grads) -> tuple[dict, dict]:
        """Return the entries of the members, and those that they share."""
        # A pattern may also be there for buffers alone.
        whole = {name: tree[name] for name in checks.selected(tree, self.patterns)}
        return {name: tree[name] for name in tree if name not in whole}, whole

    def _on_device(self, tree: Tree) -> list[Tensor]:
        held = tensors(tree)
        return [x.to(held[0].device) for x in self._values] if held else self._values

    def _one_by_one(self, grads: Grads, state: Tree, params: Params) -> Tree | None:
        """Step each member in its part of the tensors; None if no kernel does.

        A kernel that takes the first may refuse another, for its numbers.
        """
        states = []
        # All are made before the first one writes, since making one may raise.
        numbers = zip(*(value.tolist() for value in self._values), strict=True)
        count = len(next(iter(params.values())))
        made = [self._of(own) for own in numbers] or [self._of([])] * count
        for member, tx in enumerate(made):
            mine = map_tensors(lambda x, i=member: x[i], (dict(grads), state, params))
            done = _donated(tx, *mine)
            if done is None and member == 0:
                return None
            if done is None:
                # With tensors a state has the same parts whatever their values.
                pure = self._of([value[member] for value in self._values])
                done = _written(pure, *mine)
            states.append(done)

        def counted(old: Tensor, *new: Tensor) -> Tensor:
            return torch.stack(new) if _counts(old) else old

        return tree_map(counted, state, *states)


def _as_one(
    tx: GradientTransformation, grads: Grads, state: Tree, params: Params
) -> Tree | None:
    """Step all members as if they were one: they have taken equally many steps."""
    count = len(next(iter(params.values())))
    joint = map_tensors(lambda x: x[0] if _counts(x) else x, state)
    done = _donated(tx, grads, joint, params)

    def of_each(x: Tensor) -> Tensor:
        return x.expand(count, *x.shape).clone() if _counts(x) else x

    return None if done is None else map_tensors(of_each, done)


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


def _donated(
    tx: GradientTransformation, grads: Grads, state: Tree, params: Params
) -> Tree | None:
    """Return the new state, if the step could be made in place."""
    done = tx.donated(grads, state, params) if tx.donated is not None else None
    return None if done is None else done[1]


def _counts(leaf: Tensor) -> bool:
    """Tell a count of steps, which is new after a step, from what is written to."""
    return not leaf.is_floating_point()


def _apart(stacked: Tensor) -> bool:
    """Tell whether each member has memory of its own; those of an expansion share."""
    members = stacked.shape[0]
    return members < 2 or stacked.stride(0) >= stacked.numel() // members

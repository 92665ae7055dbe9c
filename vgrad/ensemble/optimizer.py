"""One optimizer for each of E members: its own counter, norms, rates and decays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.layout import count_members
from vgrad.optim.base import (
    GradientTransformation,
    Grads,
    Updates,
    apply_updates,
    check_transformation,
)
from vgrad.optim.fused import check_parts
from vgrad.overlaps import disjoint
from vgrad.torch_private import modes
from vgrad.tree import (
    map_tensors,
    tensors,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from vgrad.typing import Params, Tree

Make = GradientTransformation | Callable[..., GradientTransformation]

LEAST = 20_000
"""On a CPU, the size of a member above which a kernel call for each one pays."""


class MembersState(NamedTuple):
    """State of `for_members`: of the members, `[E, ...]`, and of shared parameters."""

    members: Tree
    shared: Tree


class MembersTransformation(GradientTransformation):
    """The transformation that `for_members` returns, of all members."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of the parameters without a member axis."""
        members: Any = self.init
        return members.__self__.patterns


def for_members(
    make: Make,
    /,
    *,
    shared: Patterns = (),
    shared_tx: GradientTransformation | None = None,
    **hyperparams: Any,
) -> MembersTransformation:
    """Run an optimizer for every member by itself, on stacked parameters `[E, ...]`.

    `make` is a transformation, or a function that makes one of `hyperparams`, where a
    tensor `[E]` gives each member its own value (inside of tuples, like betas, too) and
    everything else is the same for all. Norms (clipping, lamb, muon), counters and
    skipped steps belong to one member. State: E times the transformation's.

    Parameters that match `shared`, patterns of the entries without a member axis, are
    stepped by `shared_tx`, by default the same transformation, which then must not
    differ between members.

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
    # Shared parameters would need a step of their own.
    donated = None if shared else run.in_place
    return MembersTransformation(run.init, run.update, donated, run.counted)


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


class _Members:
    """The arguments of `for_members`, and the functions of its transformation."""

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
        places = enumerate(self._leaves)
        varied = {i: x for i, x in places if isinstance(x, Tensor) and x.ndim}
        self._places, self._values = [*varied], [*varied.values()]  # those are `[E]`
        if patterns and varied and shared_tx is None:
            raise ValueError(
                "for_members(shared=..., [E] hyperparameters): expected shared_tx, the "
                "transformation of the shared parameters, since the members' "
                "differ; got none."
            )
        self._alike = None if varied else self._of([])
        one = self._alike or self._of([value[0] for value in self._values])
        self.counted = one.counted
        self._shared_tx = shared_tx or (self._alike if patterns else None)

    def __deepcopy__(self, memo: dict) -> "_Members":
        return self  # as functions do, which transformations consist of

    def init(self, params: Params) -> MembersState:
        stacked, common = self._split(params)
        rest = self._shared_tx.init(common) if self._shared_tx else ()
        if not stacked:
            return MembersState((), rest)
        with modes.vmapped(self._count(stacked)) as (wrapped, unwrapped):
            values = [wrapped(value) for value in self._on_device(stacked)]
            state = self._of(values).init(map_tensors(wrapped, stacked))
            inner = tree_leaves(state, is_leaf=lambda x: isinstance(x, MembersState))
            if any(isinstance(node, MembersState) for node in inner):
                raise ValueError(
                    "for_members(transformation): expected one of a single member, got "
                    "one that has for_members in it. Wrap the whole: "
                    "for_members(chain(...))."
                )
            _check_tensors(state)
            state = map_tensors(unwrapped, state)
        # A value that does not depend on the member comes expanded.
        return MembersState(map_tensors(Tensor.contiguous, state), rest)

    def update(
        self, grads: Grads, state: MembersState, params: Params | None = None
    ) -> tuple[Updates, MembersState]:
        stacked, common = self._split(grads)
        params, common_params = (None, None) if params is None else self._split(params)
        updates, members, rest = {}, state.members, state.shared
        if stacked:
            present = {name: grad for name, grad in stacked.items() if grad is not None}
            count = self._count(params or present, present, members)
            values = self._on_device((params, present))
            arguments = stacked, members, params or None, values
            with modes.vmapped(count) as (wrapped, unwrapped):
                *arguments, values = map_tensors(wrapped, arguments)
                updates, members = self._of(values).update(*arguments)
                updates = {n: x for n, x in updates.items() if x is not None}
                _check_tensors((updates, members))
                updates, members = map_tensors(unwrapped, (updates, members))
        if self._shared_tx is not None:
            more, rest = self._shared_tx.update(common, rest, common_params)
            updates = {**updates, **more}
        return {name: updates.get(name) for name in grads}, MembersState(members, rest)

    def in_place(
        self, grads: Grads, state: MembersState, params: Params
    ) -> tuple[Params, MembersState] | None:
        if modes.inside_transform() or torch.compiler.is_compiling():
            return None
        if not params or any(grad is None for grad in grads.values()):
            return None
        if not next(iter(params.values())).is_cpu:  # where looking at values is free
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in self._values):
            return None
        count, written = self._count(params), tensors((params, state.members))
        if not all(map(_apart, written)):
            return None
        counts = [x for x in written if _counts(x)]
        joint = self._alike is not None and all(bool((x == x[0]).all()) for x in counts)
        if joint:
            transforms: list[Any] = [self._alike]
        elif sum(value[0].numel() for value in params.values()) < LEAST:
            return None
        elif not disjoint([*written, *tensors(dict(grads))]):
            check_parts(params)
            return None
        else:  # all are made before the first one writes, since making one may raise
            numbers = zip(*(value.tolist() for value in self._values), strict=True)
            transforms = [*map(self._of, numbers)] or [self._of([])] * count
        states = []
        for member, tx in enumerate(transforms):
            arguments = map_tensors(
                lambda x, i=member: x[i] if not joint or _counts(x) else x,
                (dict(grads), state.members, params),
            )
            done = tx.donated(*arguments) if tx.donated is not None else None
            if done is None and member == 0:
                return None
            # A kernel that takes the first may refuse another, for its numbers.
            states.append(
                self._written(member, *arguments) if done is None else done[1]
            )

        def counted(old: Tensor, *new: Tensor) -> Tensor:
            if not _counts(old):
                return old
            return torch.stack(new if len(new) == count else new * count)

        rows = zip(tensors(state.members), *map(tensors, states), strict=True)
        new = iter([counted(*row) for row in rows])
        members = map_tensors(lambda _: next(new), state.members)
        return dict(params), MembersState(members, state.shared)

    def _written(self, member: int, grads: Grads, state: Tree, params: Params) -> Tree:
        """Step one member by the pure functions, and write over its tensors."""
        # With tensors a state has the same parts whatever their values.
        pure = self._of([value[member] for value in self._values])
        updates, new = pure.update(grads, state, params)
        results = tensors((apply_updates(params, updates), new))
        for old, value in zip(tensors((params, state)), results, strict=True):
            if not _counts(old):
                old.copy_(value)
        return new

    def _of(self, values: Any) -> GradientTransformation:
        if isinstance(self._make, GradientTransformation):
            return self._make
        leaves = list(self._leaves)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        return self._make(**tree_unflatten(leaves, self._structure))

    def _count(self, params: Params, *rest: Tree) -> int:
        """Return the number of members of parameters, hyperparameters and all else."""
        numbers = {f"hyperparameter {n}": x for n, x in enumerate(self._values)}
        more = enumerate(tensors(rest))
        named = {**params, **numbers, **{f"gradient or state {n}": x for n, x in more}}
        return count_members("for_members(transformation)", named)

    def _split(self, tree: Grads) -> tuple[Any, dict]:
        """Return stacked and shared entries; a pattern may match buffers alone."""
        if not self.patterns:
            return tree, {}
        common = {name: tree[name] for name in checks.selected(tree, self.patterns)}
        return {name: tree[name] for name in tree if name not in common}, common

    def _on_device(self, tree: Tree) -> list[Tensor]:
        if not self._values or not (leaves := tensors(tree)):
            return self._values
        return [value.to(leaves[0].device) for value in self._values]


def _check_tensors(tree: Tree) -> None:
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"for_members(transformation): expected tensors in gradients, updates "
                f"and state, got a {type(leaf).__name__}. Make it a tensor."
            )


def _counts(leaf: Tensor) -> bool:
    """Return whether a leaf counts steps: it is new after a step, not written to."""
    return not leaf.is_floating_point()


def _apart(stacked: Tensor) -> bool:
    """Return whether each member has memory of its own, unlike in an expansion."""
    members = stacked.shape[0]
    return members < 2 or stacked.stride(0) >= stacked.numel() // members

"""One optimizer for each of E members: its own counter, norms, rates and decays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
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

LEAST = 20_000
"""On a CPU, the size of a member above which a kernel call for each one pays."""


class MembersState(NamedTuple):
    """State of `for_members`: of the members, `[E, ...]`, and of shared parameters."""

    members: Tree
    shared: Tree


class _Fields(NamedTuple):
    """The fields of a transformation, and one more that copies keep."""

    init: Callable[[Params], Tree]
    update: UpdateFn
    donated: Donated | None
    counted: bool
    shared: tuple[str, ...]


class MembersTransformation(  # pyright: ignore[reportGeneralTypeIssues]  # it is longer
    _Fields, GradientTransformation
):
    """The transformation that `for_members` returns, with its `shared` patterns."""


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

    Parameters that match `shared` have no member axis and are stepped by `shared_tx`,
    by default the same transformation, which then must not differ between members.

    Args:
        shared: patterns of the entries without a member axis.

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
    return MembersTransformation(
        run.init, run.update, donated, run.counted, run.patterns
    )


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
    """The arguments of `for_members`, and the functions of its transformation.

    All members step under one vmap. In place they step as one if they are alike, else
    one by one.
    """

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
        self._check(stacked)
        state = torch.vmap(lambda params, *values: self._of(values).init(params))(
            stacked, *self._on_device(stacked)
        )
        inner = tree_leaves(state, is_leaf=lambda node: isinstance(node, MembersState))
        if any(isinstance(node, MembersState) for node in inner):
            raise ValueError(
                "for_members(transformation): expected one of a single member, got one "
                "that has for_members in it. Wrap the whole: for_members(chain(...))."
            )
        # A value that does not depend on the member comes expanded.
        return MembersState(tree_map(Tensor.contiguous, state), rest)

    def update(
        self, grads: Grads, state: MembersState, params: Params | None = None
    ) -> tuple[Updates, MembersState]:
        stacked, common = self._split(grads)
        own, common_params = (None, None) if params is None else self._split(params)
        present = {name: grad for name, grad in stacked.items() if grad is not None}
        absent = dict.fromkeys(name for name in stacked if name not in present)

        def one(grads: Grads, state: Tree, params: Any, *values: Tensor) -> tuple:
            tx = self._of(values)
            updates, state = tx.update({**absent, **grads}, state, params or None)
            return {n: x for n, x in updates.items() if x is not None}, state

        updates, members, rest = {}, state.members, state.shared
        if stacked:
            self._check(own or present)
            values = self._on_device((own, present))
            updates, members = _mapped(one, present, members, own or {}, *values)
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
        self._check(params)
        written = tensors((params, state.members))
        if not all(map(_apart, written)):
            return None
        counts = [x for x in written if _counts(x)]
        if self._alike and all(bool((x == x[0]).all()) for x in counts):
            joint = map_tensors(lambda x: x[0] if _counts(x) else x, state.members)
            members = _donated(self._alike, grads, joint, params)
            if members is not None:
                count = len(next(iter(params.values())))
                members = map_tensors(
                    lambda x: x.expand(count, *x.shape).clone() if _counts(x) else x,
                    members,
                )
        elif sum(value[0].numel() for value in params.values()) < LEAST:
            return None
        elif not disjoint([*written, *tensors(dict(grads))]):
            check_parts(params)
            return None
        else:
            members = self._one_by_one(grads, state.members, params)
        result = dict(params), MembersState(members, state.shared)
        return None if members is None else result

    def _one_by_one(self, grads: Grads, state: Tree, params: Params) -> Tree | None:
        """Step each member in its part of the tensors; None if no kernel does.

        A kernel that takes the first may refuse another, for its numbers. That one is
        stepped by the pure functions, whose results are written over its tensors.
        """
        states = []
        # All are made before the first one writes, since making one may raise.
        numbers = zip(*(value.tolist() for value in self._values), strict=True)
        count = len(next(iter(params.values())))
        made = [self._of(values) for values in numbers] or [self._of([])] * count
        for member, tx in enumerate(made):
            own = map_tensors(lambda x, i=member: x[i], (dict(grads), state, params))
            new = _donated(tx, *own)
            if new is None and member == 0:
                return None
            if new is None:
                # With tensors a state has the same parts whatever their values.
                pure = self._of([value[member] for value in self._values])
                updates, new = pure.update(*own)
                results = tensors((apply_updates(own[2], updates), new))
                for old, value in zip(tensors((own[2], own[1])), results, strict=True):
                    if not _counts(old):
                        old.copy_(value)
            states.append(new)

        def counted(old: Tensor, *new: Tensor) -> Tensor:
            return torch.stack(new) if _counts(old) else old

        return tree_map(counted, state, *states)

    def _of(self, values: Any) -> GradientTransformation:
        """Return the transformation of a member that has these values."""
        if isinstance(self._make, GradientTransformation):
            return self._make
        leaves = list(self._leaves)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        return self._make(**tree_unflatten(leaves, self._structure))

    def _check(self, params: Params) -> None:
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
        """Return stacked and shared entries; a pattern may match buffers alone."""
        common = {name: tree[name] for name in checks.selected(tree, self.patterns)}
        return {name: tree[name] for name in tree if name not in common}, common

    def _on_device(self, tree: Tree) -> list[Tensor]:
        leaves = tensors(tree)
        if not leaves:
            return self._values
        return [value.to(leaves[0].device) for value in self._values]


def _mapped(function: Callable, *arguments: Tree) -> Any:
    """Run a function under a vmap over the first axis of all tensors.

    `torch.vmap` treats trees in general, which costs as much as a small step.
    """
    sizes = {leaf.shape[:1] for leaf in _leaves(arguments)}
    if len(sizes) != 1 or not all(sizes):
        raise ValueError(
            f"for_members(transformation): expected parameters and a state of as many "
            f"members, got tensors whose first axes are {sorted(map(list, sizes))}. "
            f"Make the state with init(params)."
        )
    ((size,),) = sizes
    modes.load_decompositions()
    with modes.vmap_level(size, "error") as level:
        inputs = map_tensors(lambda x: modes.add_batch_axis(x, 0, level), arguments)
        outputs = function(*inputs)
        _leaves(outputs)
        return map_tensors(
            lambda x: modes.remove_batch_axis(x, level, size, 0), outputs
        )


def _leaves(tree: Tree) -> list[Tensor]:
    leaves = tree_leaves(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"for_members(transformation): expected tensors in gradients, updates "
                f"and state, got a {type(leaf).__name__}. Make it a tensor."
            )
    return leaves


def _donated(
    tx: GradientTransformation, grads: Grads, state: Tree, params: Params
) -> Tree | None:
    """Return the new state, if the step could be made in place."""
    result = tx.donated(grads, state, params) if tx.donated is not None else None
    return None if result is None else result[1]


def _counts(leaf: Tensor) -> bool:
    """Return whether a leaf counts steps: it is new after a step, not written to."""
    return not leaf.is_floating_point()


def _apart(stacked: Tensor) -> bool:
    """Return whether each member has memory of its own, unlike in an expansion."""
    members = stacked.shape[0]
    return members < 2 or stacked.stride(0) >= stacked.numel() // members

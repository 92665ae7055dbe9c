"""The ways to run a function for every member: same numbers, different cost.

The function takes parameters, buffers and a batch of one member. E members.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.axes import InDims, batch_dims, members, split
from vgrad.functional.guards import Protected, protect
from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.lowering.answering import tried
from vgrad.lowering.draws import Draws
from vgrad.lowering.limits import raise_clearly
from vgrad.lowering.members import Members, by_itself, mapped_here
from vgrad.lowering.questions import Parts, Split
from vgrad.lowering.truthful import Truth, UnsupportedOp
from vgrad.persample.engine.guard import NON_RETRYABLE, Failure
from vgrad.precision.autocasting import AutocastMode
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, tensors, tree_map
from vgrad.typing import Buffers, Params, Randomness, Tree

Told = Callable[[str, str], None] | None


class Call:
    """One call for all members: what each of them is given.

    Attributes:
        members: how many there are, E.
        args: parameters, buffers and the items of the batch.
        dims: their member axes, by name and for each item; None if they are shared.
    """

    def __init__(
        self,
        function: str,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        *,
        in_dims: InDims,
        shared: Patterns,
    ) -> None:
        """Check that all sizes fit."""
        self.members = members(params, buffers, shared, function=function)
        whole = split(function, {**params, **buffers}, shared)[1] if shared else ()
        self.args = (dict(params), dict(buffers), *batch)
        self.dims = (
            {name: None if name in whole else 0 for name in params},
            {name: None if name in whole else 0 for name in buffers},
            *batch_dims(function, in_dims, batch, self.members),
        )

    def of(self, member: int) -> tuple:
        """Return the arguments of one member."""
        return self._each(lambda value, dim: value.select(dim, member))

    def mapped(self, level: int) -> tuple:
        """Return the arguments as a vmap of that level sees them."""
        return self._each(lambda x, dim: modes.add_batch_axis(x, dim % x.ndim, level))

    def with_params(self, params: Params) -> "Call":
        """Return the same call with other parameters, of the same shapes."""
        other = copy.copy(self)
        other.args = (dict(params), *self.args[1:])
        return other

    def rows(self, rows: Tensor) -> "Call":
        """Return the call of these members, in this order."""
        other = copy.copy(self)
        other.members = len(rows)
        other.args = self._each(lambda x, dim: x.index_select(dim, rows.to(x.device)))
        return other

    def tensors(self) -> list[Tensor]:
        """Return all tensors that were given."""
        params, buffers, *batch = self.args
        return [*params.values(), *buffers.values(), *tensors(batch)]

    def promise(self) -> Protected:
        """Promise that all of them stay as they are."""
        params, buffers, *batch = self.args
        items = {f"tensor {n} of the batch": x for n, x in enumerate(tensors(batch))}
        expected = "ensemble: expected a function that changes nothing it is given"
        return Protected({**items, **buffers, **params}, expected, "Copy it first.")

    def stacked_with_buffers(self, pairs: Sequence[tuple[Tree, Buffers]]) -> tuple:
        """Join what the members returned and the buffers that they left.

        Raises:
            ValueError: they left different values in a buffer that they share.
        """
        values, buffers = zip(*pairs, strict=True)
        return stacked(values), self._buffers(buffers, lambda *each: torch.stack(each))

    def regrouped(
        self, found: Sequence[Any], rows: Sequence[Tensor], *, with_buffers: bool
    ) -> Any:
        """Join what groups of members returned, whose `rows` these are.

        Raises:
            ValueError: they left different values in a buffer that they share.
        """
        places = torch.cat([*rows]).argsort()

        def joined(*leaves: Tensor) -> Tensor:
            return torch.cat(leaves).index_select(0, places.to(leaves[0].device))

        if not with_buffers:
            return _map_leaves(joined, *found)
        values, buffers = zip(*found, strict=True)
        return _map_leaves(joined, *values), self._buffers(buffers, joined)

    def _buffers(self, left: Sequence[Buffers], join: Callable[..., Tensor]) -> Buffers:
        """Join the buffers of members, but for those that they share."""
        joined, dims = {}, {**self.dims[0], **self.dims[1]}
        for name, first in left[0].items():
            if dims.get(name, 0) is not None:
                joined[name] = join(*(each[name] for each in left))
            elif all(checks.same_values(each[name], first) for each in left):
                joined[name] = first
            else:
                raise _changed(name)
        return joined

    def _each(self, function: Callable[..., Tensor]) -> tuple:
        """Apply a function to what each member has its own of, in new containers."""
        named = [
            {
                name: value if dims[name] is None else function(value, dims[name])
                for name, value in values.items()
            }
            for values, dims in zip(self.args[:2], self.dims[:2], strict=True)
        ]
        items = [
            map_tensors(_itself if dim is None else partial(function, dim=dim), item)
            for item, dim in zip(self.args[2:], self.dims[2:], strict=True)
        ]
        return *named, *items


@dataclass(eq=False)
class Vmapped:
    """Runs a function once for all members; every result gains the axis 0.

    Members that answer a question about values differently run in groups.

    Attributes:
        with_buffers: the function returns a pair of its result and new buffers, in
            which those that the members share gain no axis.
        told: a callback, invoked with op and form.
        parted: a callback, invoked for members that were run in groups.
        or_loop: members that cannot run at once run one after the other.
    """

    function: Callable
    randomness: Randomness
    hybrid: bool
    with_buffers: bool
    told: Told
    parted: Callable[[Parts], None]
    or_loop: bool

    def __call__(self, call: Call, draws: Draws) -> Any:
        """Run all members; what they ask is noted in `draws`."""
        differ, same = self.randomness == "different", self.randomness == "same"
        with RNG_LOCK if differ or same else nullcontext():
            state = random_state(call.tensors()) if same else None
            once = partial(self._or_apart if self.or_loop else self._at_once, call)
            found, draws = tried(once, draws, call.tensors(), differ=differ)
            if not isinstance(found, Parts):
                return found
            if found.strategy is not None and not self.or_loop:
                raise UnsupportedOp(
                    f"ensemble: expected ops that run for all members at once, got "
                    f'{found.why}, at {found.where}. Use strategy="loop".'
                )
            groups = []
            for rows in found.rows:
                if state is not None:
                    set_random_state(state)
                run = self if found.strategy is None else self._alone
                groups.append(run(call.rows(rows), draws.of(rows)))
        joined = call.regrouped(groups, found.rows, with_buffers=self.with_buffers)
        self.parted(found)
        return joined

    def _alone(self, call: Call, draws: Draws) -> Any:
        """Run one member, which sees the numbers that it drew before."""
        found = looped(autocasting(self.function, [draws]), call, self.randomness)
        return (call.stacked_with_buffers if self.with_buffers else stacked)(found)

    def _or_apart(self, call: Call, draws: Draws) -> Any:
        """Run members at once; where that is not possible, each must run by itself."""
        try:
            return self._at_once(call, draws)
        except NON_RETRYABLE:
            raise
        except Exception as error:
            failure = Failure.of(error)
        rows = torch.arange(call.members).split(1)
        raise Split(Parts(rows, failure.where, "loop", failure.why))

    def _at_once(self, call: Call, draws: Draws) -> Any:
        """Run members who answer questions alike."""
        modes.load_decompositions()
        forms: list[tuple[str, str]] = []
        tell = None if self.told is None else lambda *form: forms.append(form)
        try:
            # What torch.vmap does, but for its general treatment of trees, which costs
            # as much as a small model.
            with modes.vmap_level(call.members, self.randomness) as level:
                params, buffers, *batch = call.mapped(level)
                truth = Truth(level, "member", 'strategy="loop"')
                with modes.without_modes():  # modes around it are not asked
                    for each in tensors((params, buffers, batch)):
                        truth.tell(each)
                promise, chosen = call.promise(), self.hybrid
                mode = Members(tell, promise, truth=truth, draws=draws, chosen=chosen)
                casts = partial(AutocastMode, [*params.values()])
                inside = mode.inside(call.members, self.randomness, casts)
                with inside, modes.unoptimized_scripts():
                    result = self.function(params, buffers, *batch)
                truth.end(tensors(result))
                found = self._unmapped(result, call, level)
        except RuntimeError as error:
            raise_clearly(error, "ensemble", one="member")
        if self.told is not None:
            for form in forms:
                self.told(*form)
        return found

    def _unmapped(self, result: Any, call: Call, level: int) -> Any:
        """Return what lies below the vmap of a level."""

        def joined(value: Any) -> Tensor:
            return modes.remove_batch_axis(_tensor(value), level, call.members, 0)

        if not self.with_buffers:
            return _map_leaves(joined, result)
        value, buffers = result
        dims = {**call.dims[0], **call.dims[1]}  # any entry may be a buffer
        new = {}
        for name, left in buffers.items():
            if dims.get(name, 0) is not None:
                new[name] = joined(left)
            elif mapped_here(left):
                raise _changed(name)
            else:
                new[name] = left
        return _map_leaves(joined, value), new


def looped(function: Callable, call: Call, randomness: Randomness) -> list[Any]:
    """Run the function for one member after the other; return their results.

    Under autocast weights are cast in a function made by `autocasting` alone.
    """
    # Each member draws from where the one before it stopped, unless told otherwise.
    given = () if randomness == "different" else call.tensors()
    results = []
    members = [*map(call.of, range(call.members))]
    with RNG_LOCK, protect(call.promise()):
        before = random_state(given)
        for member in members:
            if randomness == "same":
                set_random_state(before)
            results.append(function(*member))
            if randomness == "error" and drawn_since(before, given):
                set_random_state(before)
                raise RuntimeError(
                    'ensemble: expected no random numbers, since randomness="error". '
                    'Pass randomness="different" (each member draws its own) or "same".'
                )
    return results


def stacked(results: Sequence[Tree]) -> Tree:
    """Join trees of tensors `[...]` of the members to one of `[E, ...]`."""
    return _map_leaves(lambda *leaves: torch.stack([*map(_tensor, leaves)]), *results)


def autocasting(function: Callable, draws: Iterable[Draws] = ()) -> Callable:
    """Cast each weight of a member once; members come in the order of their `draws`."""
    turns = iter(draws)

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        casts = partial(AutocastMode, [*params.values()])
        one = partial(function, params, buffers, *batch)
        return by_itself(one, casts, next(turns, None))

    return run


def _changed(name: str) -> ValueError:
    """Return the error for a buffer that would need a value for each member."""
    return ValueError(
        f"ensemble(shared=...): expected members that leave one value in the buffer "
        f"{name!r}, which they share, got one of each. Give each member its own."
    )


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise TypeError(
        f"ensemble: expected a model that returns tensors, got a "
        f"{type(value).__name__} among its outputs."
    )


def _itself(value: Tensor) -> Tensor:
    return value


def _map_leaves(function: Callable, *trees: Tree) -> Tree:
    """Apply a function to leaves of trees of one structure, mostly single tensors."""
    if isinstance(trees[0], Tensor):
        return function(*trees)
    return tree_map(function, *trees)

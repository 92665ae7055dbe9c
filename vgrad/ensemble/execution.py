"""The ways to run a function for every member: same numbers, different cost.

The function takes parameters, buffers and a batch of one member. E members.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vgrad import checks
from vgrad.ensemble.axes import InDims, batch_dims, members, split
from vgrad.functional.untouched import Promise, untouched
from vgrad.generators import ALONE, drawn_since, random_state, set_random_state
from vgrad.lowering.draws import Draws
from vgrad.lowering.members import Members, mapped_here
from vgrad.lowering.questions import Parts, tried
from vgrad.lowering.truthful import Truth
from vgrad.names import Patterns
from vgrad.persample.engine.guard import raise_clearly
from vgrad.precision.autocasting import AutocastMode
from vgrad.torch_private import levels, modes
from vgrad.tree import map_tensors, tensors, tree_map
from vgrad.typing import Buffers, Params, Tree

Strategy = Literal["auto", "vmap", "loop", "hybrid"]
Randomness = Literal["error", "different", "same"]
Told = Callable[[str, str], None] | None

STRATEGIES = ("auto", "vmap", "loop", "hybrid")


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

    def instead(self, rows: Tensor) -> tuple:
        """Return the arguments with member `rows[i]` in the place of member i."""
        return self._each(lambda value, dim: value.index_select(dim, rows))

    def mapped(self, level: int) -> tuple:
        """Return the arguments as a vmap of that level sees them."""
        return self._each(lambda x, dim: levels.add_batch_axis(x, dim % x.ndim, level))

    def with_params(self, params: Params) -> "Call":
        """Return the same call with other parameters, of the same shapes."""
        other = copy.copy(self)
        other.args = (dict(params), *self.args[1:])
        return other

    def tensors(self) -> list[Tensor]:
        """Return all tensors that were given."""
        return tensors(self.args)

    def promise(self) -> Promise:
        """Promise that all of them stay as they are."""
        params, buffers, *batch = self.args
        items = {f"tensor {n} of the batch": x for n, x in enumerate(tensors(batch))}
        expected = "ensemble: expected a function that changes nothing it is given"
        return Promise({**items, **buffers, **params}, expected, "Copy it first.")

    def rows(self, rows: Tensor) -> "Call":
        """Return the call of these members, in this order."""
        other = copy.copy(self)
        other.members = len(rows)
        other.args = self._each(lambda x, dim: x.index_select(dim, rows.to(x.device)))
        return other

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


def vmapped(
    function: Callable,
    call: Call,
    randomness: Randomness,
    *,
    hybrid: bool,
    with_buffers: bool = False,
    told: Told = None,
    draws: Draws | None = None,
    parted: Callable[[Parts], None] | None = None,
) -> Any:
    """Run the function once for all members; every result gains the axis 0.

    With `with_buffers` the function returns a pair of its result and new buffers, in
    which those that the members share gain no axis. Members that answer a question
    about values differently run in groups, of which `parted` is told.
    """

    def run(call: Call, draws: Draws) -> Any:
        once = partial(_at_once, function, call, randomness, hybrid, with_buffers, told)
        differ = randomness == "different"
        found, draws = tried(once, draws, call.tensors(), differ=differ)
        if not isinstance(found, Parts):
            return found
        if parted is not None:
            parted(found)
        groups = []
        for rows in found.rows:
            if state is not None:
                set_random_state(state)
            groups.append(run(call.rows(rows), draws.of(rows)))
        return call.regrouped(groups, found.rows, with_buffers=with_buffers)

    with nullcontext() if randomness == "error" else ALONE:
        state = random_state(call.tensors()) if randomness == "same" else None
        return run(call, draws or Draws())


def _at_once(
    function: Callable,
    call: Call,
    randomness: Randomness,
    hybrid: bool,
    with_buffers: bool,
    told: Told,
    draws: Draws,
) -> Any:
    """Run the function once for all members, who must answer questions alike."""
    levels.load_decompositions()
    forms: list[tuple[str, str]] = []
    tell = told and (lambda *form: forms.append(form))
    try:
        # What torch.vmap does, but for its general treatment of trees, which costs as
        # much as a small model.
        with levels.vmap_level(call.members, randomness) as level:
            params, buffers, *batch = call.mapped(level)
            truth = Truth(level, "member", 'strategy="loop"')
            with modes.without_modes():  # modes around it are not asked
                for each in tensors((params, buffers, batch)):
                    truth.tell(each)
            mode = Members(
                tell, call.promise(), truth=truth, draws=draws, chosen=hybrid
            )
            seen = draws.watched(call.members)
            casts = AutocastMode(params.values())
            with mode, seen, casts, modes.unoptimized_scripts():
                result = function(params, buffers, *batch)
            truth.end(tensors(result))
            if told is not None:
                for form in forms:
                    told(*form)

            def joined(value: Any) -> Tensor:
                return levels.remove_batch_axis(_tensor(value), level, call.members, 0)

            if not with_buffers:
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
    except RuntimeError as error:
        raise_clearly(error, "ensemble", one="member")


def looped(function: Callable, call: Call, randomness: Randomness) -> list[Any]:
    """Run the function for one member after the other; return their results.

    Under autocast weights are cast in a function made by `autocasting` alone.
    """
    # Each member draws from where the one before it stopped, unless told otherwise.
    given = () if randomness == "different" else call.tensors()
    results = []
    with ALONE, untouched(call.promise()):
        before = random_state(given)
        for member in range(call.members):
            if randomness == "same":
                set_random_state(before)
            results.append(function(*call.of(member)))
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


def autocasting(function: Callable) -> Callable:
    """Run a member's function under the mode that casts each weight once."""

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        with AutocastMode(params.values()):
            return function(params, buffers, *batch)

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

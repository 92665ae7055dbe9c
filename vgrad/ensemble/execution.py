"""The ways to run a function for every member: same numbers, different cost.

The function takes parameters, buffers and a batch of one member. E members.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vgrad import checks
from vgrad.ensemble.axes import members, shared_names
from vgrad.lowering.members import Members, mapped_here
from vgrad.persample.guard import raise_clearly
from vgrad.persample.randomness import drawn_since, random_state, set_random_state
from vgrad.precision.autocast import Autocast
from vgrad.typing import Buffers, Params, Tree

Strategy = Literal["auto", "vmap", "loop", "hybrid"]
Randomness = Literal["error", "different", "same"]
InDims = int | None | Sequence[int | None]
Told = Callable[[str, str], None] | None

STRATEGIES = ("auto", "vmap", "loop", "hybrid")


class Call:
    """One call for all members: what each of them is given.

    Attributes:
        members: how many there are, E.
    """

    def __init__(
        self,
        function: str,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        *,
        in_dims: InDims,
        shared: Sequence[str],
    ) -> None:
        """Check that all sizes fit."""
        self.members = members(params, buffers, shared)
        whole = shared_names([*params, *buffers], shared)
        self.args = (dict(params), dict(buffers), *batch)
        self.dims = (
            {name: None if name in whole else 0 for name in params},
            {name: None if name in whole else 0 for name in buffers},
            *_batch_dims(function, in_dims, batch, self.members),
        )

    def of(self, member: int) -> tuple:
        """Return the arguments of one member."""
        return self._each(lambda value, dim: value.select(dim, member))

    def instead(self, rows: Tensor) -> tuple:
        """Return the arguments with member `rows[i]` in the place of member i."""
        return self._each(lambda value, dim: value.index_select(dim, rows))

    def with_params(self, params: Params) -> "Call":
        """Return the same call with other parameters, of the same shapes."""
        other = copy.copy(self)
        other.args = (dict(params), *self.args[1:])
        return other

    def tensors(self) -> list[Tensor]:
        """Return all tensors that were given."""
        leaves = pytree.tree_leaves(self.args)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def stacked_with_buffers(self, pairs: Sequence[tuple[Tree, Buffers]]) -> tuple:
        """Join what the members returned and the buffers that they left.

        Raises:
            ValueError: they left different values in a buffer that they share.
        """
        values, buffers = zip(*pairs, strict=True)
        joined, dims = {}, {**self.dims[0], **self.dims[1]}
        for name, first in buffers[0].items():
            if dims[name] is not None:
                joined[name] = torch.stack([each[name] for each in buffers])
            elif all(checks.same_values(each[name], first) for each in buffers):
                joined[name] = first
            else:
                raise _changed(name)
        return stacked(values), joined

    def _each(self, function: Callable[[Tensor, int], Tensor]) -> tuple:
        """Apply a function to what each member has its own of."""

        def apply(dim: int | None, value: Any) -> Any:
            return value if dim is None else function(value, dim)

        return pytree.tree_map(apply, self.dims, self.args)


def vmapped(
    function: Callable,
    call: Call,
    randomness: Randomness,
    *,
    hybrid: bool,
    with_buffers: bool = False,
    told: Told = None,
) -> Any:
    """Run the function once for all members; every result gains the axis 0.

    With `with_buffers` it returns a pair, the second of which are new buffers. There
    those that the members share stay as they are, without the axis.
    """

    def one(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        with ExitStack() as modes:
            modes.enter_context(Members(told, chosen=hybrid))
            modes.enter_context(Autocast(params.values()))
            result = function(params, buffers, *batch)
        for name in shared:
            if mapped_here(result[1][name]):
                raise _changed(name)
        return result

    dims = call.dims[1] if with_buffers else {}
    shared = [name for name, dim in dims.items() if dim is None]
    out_dims: Any = (0, dims) if shared else 0
    try:
        run = torch.vmap(one, call.dims, out_dims, randomness)
        return run(*call.args)
    except RuntimeError as error:
        raise_clearly(error, "ensemble", one="member")


def looped(function: Callable, call: Call, randomness: Randomness) -> list[Any]:
    """Run the function for one member after the other; return their results."""
    tensors = call.tensors()
    before = random_state(tensors)
    results = []
    for member in range(call.members):
        if randomness == "same":
            set_random_state(before)
        params, buffers, *batch = call.of(member)
        with Autocast(params.values()):
            results.append(function(params, buffers, *batch))
        if randomness == "error" and drawn_since(before, tensors):
            set_random_state(before)
            raise RuntimeError(
                'ensemble: expected no random numbers, since randomness="error". Pass '
                'randomness="different" (each member draws its own) or "same".'
            )
    return results


def stacked(results: Sequence[Tree]) -> Tree:
    """Join trees of tensors `[...]` of the members to one of `[E, ...]`."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *results)


def check_options(
    function: str, strategy: str, randomness: str, shared: Sequence[str]
) -> None:
    """Refuse what no strategy knows."""
    checks.one_of(function, STRATEGIES, strategy=strategy)
    kinds = ("error", "different", "same")
    checks.one_of(function, kinds, randomness=randomness)
    check_patterns(function, shared)


def check_patterns(function: str, shared: Iterable[str]) -> None:
    """Refuse one string, whose letters would be taken for patterns."""
    if isinstance(shared, str):
        raise TypeError(
            f"{function}(shared={shared!r}): expected a list or tuple of patterns, got "
            f"a string. Write [{shared!r}]."
        )


def _changed(name: str) -> ValueError:
    """Return the error for a buffer that would need a value for each member."""
    return ValueError(
        f"ensemble(shared=...): expected members that leave one value in the buffer "
        f"{name!r}, which they share, got one of each. Give each member its own."
    )


def _batch_dims(
    function: str, in_dims: InDims, batch: tuple[Tree, ...], count: int
) -> tuple[Tree, ...]:
    """Return the member axis of each tensor of the batch, checked."""
    if in_dims is None or isinstance(in_dims, int):
        in_dims = (in_dims,) * len(batch)
    if len(in_dims) != len(batch):
        raise ValueError(
            f"{function}(in_dims={tuple(in_dims)}): expected one axis for each of the "
            f"{len(batch)} items of the batch. None stands for one that all members "
            f"share."
        )
    for number, (dim, item) in enumerate(zip(in_dims, batch, strict=True)):
        for leaf in pytree.tree_leaves(item):
            if dim is None or not isinstance(leaf, Tensor):
                continue
            if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != count:
                raise ValueError(
                    f"{function}(in_dims={tuple(in_dims)}): expected {count} members "
                    f"along axis {dim} of item {number} of the batch, got shape "
                    f"{tuple(leaf.shape)}. in_dims=None gives all members the same."
                )
    return tuple(
        pytree.tree_map(
            lambda leaf, dim=dim: dim if isinstance(leaf, Tensor) else None, x
        )
        for dim, x in zip(in_dims, batch, strict=True)
    )

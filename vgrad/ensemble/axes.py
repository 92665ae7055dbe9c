"""The member axis: which entries of an ensemble have it, and how long it is.

E members. Every entry is a tensor `[E, *shape]`, the shared ones are `[*shape]`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, tensors, tree_leaves
from vgrad.typing import Buffers, Params, Tree

InDims = int | None | Sequence[int | None]


def split(function: str, values: Params, shared: Patterns) -> tuple[Params, Params]:
    """Return the entries that have a member axis, and those that match a pattern.

    Raises:
        ValueError: a pattern matches nothing.
        TypeError: the patterns are one string.

    Example:
        >>> import torch
        >>> entries = {"a": torch.ones(3), "b": torch.ones(1)}
        >>> stacked, whole = split("share", entries, ["b"])
        >>> list(stacked), list(whole)
        (['a'], ['b'])
    """
    checks.patterns(function, shared=shared)
    kind = "parameter or buffer"
    found = set(checks.all_matched(function, values, shared, kind=kind))
    stacked = {name: value for name, value in values.items() if name not in found}
    return stacked, {name: values[name] for name in values if name in found}


def members(
    params: Params,
    buffers: Buffers,
    shared: Patterns = (),
    *,
    function: str = "members",
) -> int:
    """Return E, the number of members of stacked entries.

    `shared` holds patterns of the entries without a member axis. An error about them
    names `function`.

    Raises:
        ValueError: no entry has a member axis, two have axes of other lengths, or the
            length is zero.

    Example:
        >>> import torch
        >>> members({"weight": torch.ones(3, 2, 2), "bias": torch.ones(3, 2)}, {})
        3
    """
    checks.dictionaries("members", params=params, buffers=buffers)
    stacked = {**params, **buffers}
    if shared != ():
        stacked, _ = split(function, stacked, shared)
    if not stacked:
        raise ValueError(
            "members(params, buffers): expected an entry with a member axis, got none."
        )
    first = next(iter(stacked))
    for name, value in stacked.items():
        if value.ndim == 0:
            raise ValueError(
                f"members(params, buffers): expected a member axis in {name!r}, got a "
                f"scalar. If the members share it, name it in shared=."
            )
        if value.shape[0] != stacked[first].shape[0]:
            raise ValueError(
                f"members(params, buffers): expected {len(stacked[first])} members in "
                f"{name!r} as in {first!r}, got {len(value)}. If the members share one "
                f"of them, name it in shared=."
            )
    count = stacked[first].shape[0]
    if not count:
        raise ValueError(
            f"members(params, buffers): expected at least one member, got none in "
            f"{first!r}."
        )
    return count


def batch_dims(
    function: str, in_dims: InDims, batch: tuple[Tree, ...], count: int
) -> tuple[int | None, ...]:
    """Return the member axis of each item of the batch, checked."""
    if in_dims is None or isinstance(in_dims, int):
        in_dims = (in_dims,) * len(batch)
    if len(in_dims) != len(batch):
        raise ValueError(
            f"{function}(in_dims={tuple(in_dims)}): expected one axis for each of the "
            f"{len(batch)} items of the batch. None stands for one that all members "
            f"share."
        )
    for number, (dim, item) in enumerate(zip(in_dims, batch, strict=True)):
        if dim is None:
            continue
        for leaf in tensors(item):
            if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != count:
                raise ValueError(
                    f"{function}(in_dims={tuple(in_dims)}): expected {count} members "
                    f"along axis {dim} of item {number} of the batch, got shape "
                    f"{tuple(leaf.shape)}. in_dims=None gives all members the same."
                )
    return tuple(in_dims)


class Here:
    """Members that are all in one place; each function takes tensors `[E, ...]`."""

    def firsts(self, *each: Tensor) -> list[Tensor]:
        """Return the values of the first member."""
        return [value[0] for value in each]

    def means(self, *each: Tensor) -> list[Tensor]:
        """Return the means over all members."""
        return [value.mean(0) for value in each]

    def gathered(self, each: Tensor) -> Tensor:
        """Return the values of all members."""
        return each


def means(members: Here, *each: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Means over members `[E, ...]`, and how far these are from them.

    Differences from the first member are exactly zero where all say the same, so that
    no rounding of a sum makes members disagree with their own mean.
    """
    firsts = members.firsts(*each)
    apart = [value - first for value, first in zip(each, firsts, strict=True)]
    found = members.means(*apart, *each)
    shifts, plain = found[: len(each)], found[len(each) :]
    triples = zip(shifts, firsts, plain, strict=True)
    centres = [torch.where(s.isfinite(), first + s, mean) for s, first, mean in triples]
    return centres, [x - shift for x, shift in zip(apart, shifts, strict=True)]


def mapped(function: Callable, *arguments: Tree) -> Any:
    """Run a function under a vmap over the first axis of all tensors.

    That is `torch.vmap` without its general treatment of trees, which costs as much as
    an optimizer's step on small members.
    """
    sizes = {each.shape[:1] for each in _leaves(arguments)}
    if len(sizes) != 1 or not all(sizes):
        found = sorted(map(list, sizes))
        raise ValueError(
            f"for_members(transformation): expected parameters and a state of as many "
            f"members, got tensors whose first axes are {found}. Make the state with "
            f"init(params)."
        )
    ((size,),) = sizes
    modes.load_decompositions()
    with modes.vmap_level(size, "error") as level:
        given = map_tensors(lambda x: modes.add_batch_axis(x, 0, level), arguments)
        found = function(*given)
        _leaves(found)
        return map_tensors(lambda x: modes.remove_batch_axis(x, level, size, 0), found)


def _leaves(tree: Tree) -> list[Tensor]:
    """Return the leaves of a tree of tensors, and refuse other leaves."""
    leaves = tree_leaves(tree)
    for each in leaves:
        if not isinstance(each, Tensor):
            raise ValueError(
                f"for_members(transformation): expected tensors in gradients, updates "
                f"and state, got a {type(each).__name__}. Make it a tensor."
            )
    return leaves

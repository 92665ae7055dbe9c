"""Which members of an ensemble a rank has, and the way there and back.

E members, W ranks along an axis of the mesh. The ranks have `E // W` members each, in
the order of their numbers, and the first `E % W` of them one more.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vgrad import checks, files
from vgrad.checks import Patterns
from vgrad.ensemble import MembersState
from vgrad.ranks import Ranks
from vgrad.training import EarlyStopping, EnsembleState
from vgrad.tree import map_tensors, tree_flatten, tree_unflatten
from vgrad.typing import T, Tree

Change = Callable[[Tensor], Any]

_BUCKET = 2**25
"""Bytes of small tensors that are gathered in one collective."""


def part(count: int, rank: int, size: int) -> range:
    """Return the numbers of the members of one of `size` ranks.

    Raises:
        ValueError: a rank would have none.

    Example:
        >>> [list(part(5, rank, 3)) for rank in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    [count] = checks.whole("part", least=1, members=count)
    if count < size:
        raise ValueError(
            f"part(members={count}): expected a member or more for each of the {size} "
            f"ranks, got {count}. Use a mesh of {count} ranks along the axis of the "
            f"members, and the other ranks for samples."
        )
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def member_range(count: int, mesh: DeviceMesh, *, axis: str = "members") -> range:
    """Return the numbers of this rank's members in an ensemble of `count`.

    `x[indices[which.start : which.stop]]` is the data of these members alone, and
    `member_seed(seed, i)` for i in the range the seeds of their models. Nothing is
    sent.

    Raises:
        ValueError: there are fewer members than ranks; else as `Ranks.of`.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from vgrad.distributed import alone
        >>> with alone("members") as mesh:
        ...     member_range(5, mesh)
        range(0, 5)
    """
    ranks = Ranks.of("member_range", mesh, axis)
    return part(count, ranks.rank, ranks.size)


def own_members(
    tree: T, mesh: DeviceMesh, *, shared: Patterns = (), axis: str = "members"
) -> T:
    """Return this rank's members of a tree: `[E, ...] -> [E of the rank, ...]`.

    `tree` is the same on all ranks: an `EnsembleState` or `EarlyStopping`, which come
    back as ordinary ones of the rank's members; parameters, buffers and the state of
    `for_members`; or any tree of tensors with the member axis in front, such as rates
    `[E]` and batches `[E, B, ...]`. Entries that match the patterns in `shared`
    have no member axis, and every rank has them, as it has the step and the key of a
    state. Results are copies; leaves that require grad still do.

    Args:
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: tensors differ in the number of members, there are fewer members
            than ranks, or a pattern matches nothing.
        RankError: that is so on another rank, or ranks have other numbers of members.

    Example:
        >>> from vgrad.distributed import alone
        >>> params = {"weight": torch.ones(4, 2, 3), "scale": torch.ones(2)}
        >>> with alone("members") as mesh:
        ...     own = own_members(params, mesh, shared=["scale"])
        >>> own["weight"].shape, own["scale"].shape
        (torch.Size([4, 2, 3]), torch.Size([2]))
    """
    function = "own_members"
    ranks = Ranks.of(function, mesh, axis)
    with ranks.together(function) as facts:
        facts["members"] = count = _count(function, tree, shared)
        which = part(count, ranks.rank, ranks.size)

    def own(value: Tensor) -> Tensor:
        mine = value.detach()[which.start : which.stop].clone()
        return mine.requires_grad_(value.requires_grad)

    def copied(value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    return _mapped(tree, shared, own, copied)


def all_members(
    tree: T, mesh: DeviceMesh, *, shared: Patterns = (), axis: str = "members"
) -> T:
    """Return the members of all ranks, on every rank: the way back of `own_members`.

    Every rank then holds the whole ensemble: save it on one of them, and another number
    of ranks can go on with `own_members` of what it reads. What all members share, and
    the step and the key of a state, must be the same on all ranks, bit by bit.

    Cost: each tensor is sent to all ranks.

    Args:
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: tensors differ in the number of members, or a pattern matches
            nothing.
        RankError: that is so on another rank, or what all members share differs.

    Example:
        >>> from vgrad.distributed import alone
        >>> with alone("members") as mesh:
        ...     all_members({"w": torch.tensor([1.0, 2.0])}, mesh)
        {'w': tensor([1., 2.])}
    """
    function = "all_members"
    ranks = Ranks.of(function, mesh, axis)
    with ranks.together(function) as facts:
        count = _count(function, tree, shared)
        own, common = _parted(tree, shared)
        kinds = str([(value.dtype, value.shape[1:]) for value in own])
        facts["tensors"] = hashlib.sha256(kinds.encode()).hexdigest()
        facts["shared"] = files.digest({str(n): x for n, x in enumerate(common)})
    sizes = [note["members"] for note in ranks.agree(function, members=count)]
    whole = _joined(ranks, own, sizes)
    return _mapped(tree, shared, lambda value: next(whole), _itself)


def _joined(
    ranks: Ranks, tensors: Sequence[Tensor], sizes: Sequence[int]
) -> Iterator[Tensor]:
    """Yield tensors of all ranks; small ones travel together."""
    left = list(tensors)
    while left:
        bucket, rows = [], 0
        while left and (not bucket or rows * max(sizes) < _BUCKET):
            bucket.append(left.pop(0))
            rows += bucket[-1][0].numel() * bucket[-1].element_size()
        flat = [x.detach().reshape(len(x), x[0].numel()) for x in bucket]
        flat = [x.to(ranks.device).contiguous().view(torch.uint8) for x in flat]
        found = ranks.joined(torch.cat(flat, 1), sizes)
        pieces = found.split([x.shape[1] for x in flat], 1)
        for value, piece in zip(bucket, pieces, strict=True):
            # Copied, since a part of other bytes may begin anywhere.
            whole = piece.clone(memory_format=torch.contiguous_format)
            whole = whole.view(-1).view(value.dtype)
            whole = whole.view(len(found), *value.shape[1:])
            yield whole.to(value.device).requires_grad_(value.requires_grad)


def _mapped(tree: Tree, shared: Patterns, own: Change, common: Change) -> Tree:
    """Apply one function to tensors with a member axis, another to all others."""
    if isinstance(tree, EnsembleState):
        entries = {"params": tree.params, "buffers": tree.buffers}
        split = {
            name: _mapped(value, shared, own, common) for name, value in entries.items()
        }
        return EnsembleState(
            **split,
            optimizer=_mapped(tree.optimizer, (), own, common),
            step=common(tree.step),
            key=common(tree.key),
            loss_scale=map_tensors(own, tree.loss_scale),
            active=own(tree.active),
        )
    if isinstance(tree, MembersState):
        mine, rest = map_tensors(own, tree.members), map_tensors(common, tree.shared)
        return MembersState(mine, rest)
    if isinstance(tree, EarlyStopping):
        limits = common(tree.patience), common(tree.min_delta)
        return EarlyStopping(own(tree.best), own(tree.waited), *limits)
    if isinstance(tree, Mapping):
        whole = set(checks.selected(tree, shared))
        return {
            name: map_tensors(common, value)
            if name in whole
            else _mapped(value, shared, own, common)
            for name, value in tree.items()
        }
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(each, shared, own, common) for each in tree)
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([map_tensors(own, leaf) for leaf in leaves], structure)


def _itself(value: Tensor) -> Tensor:
    return value


def _parted(tree: Tree, shared: Patterns) -> tuple[list[Tensor], list[Tensor]]:
    """List the tensors that have a member axis, and all others."""
    own: list[Tensor] = []
    common: list[Tensor] = []
    _mapped(tree, shared, own.append, common.append)
    return own, common


def _count(function: str, tree: Tree, shared: Patterns) -> int:
    """Return the number of members, on which all tensors agree."""
    checks.patterns(function, shared=shared)
    kind = "parameter or buffer"
    checks.all_matched(function, _names(tree), shared, kind=kind)
    found, _ = _parted(tree, shared)
    if not found:
        raise ValueError(
            f"{function}(tree): expected a tensor with a member axis, got none."
        )
    sizes = {len(value) if value.ndim else 0 for value in found}
    if len(sizes) > 1 or 0 in sizes:
        shapes = sorted({tuple(value.shape) for value in found})
        raise ValueError(
            f"{function}(tree): expected as many members in the first axis of every "
            f"tensor, got shapes {checks.listed(map(str, shapes))}. If the members "
            f"share an entry, name it in shared=."
        )
    return sizes.pop()


def _names(tree: Tree) -> Iterator[str]:
    """Yield the names of entries, to which patterns apply."""
    if isinstance(tree, EnsembleState):
        yield from (*tree.params, *tree.buffers)
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield name
            yield from _names(value)
    elif type(tree) in (list, tuple):
        for each in tree:
            yield from _names(each)

"""Ensembles whose members are cut among ranks: each rank takes ordinary steps."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vgrad import checks, files
from vgrad.checks import Patterns
from vgrad.ensemble.members import counted, mapped, split, take
from vgrad.generators import fold_in
from vgrad.ranks import Ranks
from vgrad.training.state import EnsembleState
from vgrad.tree import tree_map
from vgrad.typing import T


def member_range(count: int, mesh: DeviceMesh, *, axis: str = "members") -> range:
    """Return the numbers of this rank's members in an ensemble of `count`.

    `x[indices[which.start : which.stop]]` is the data of these members alone, and
    `member_seed(seed, i)` for i in the range the seeds of their models. Nothing is
    sent.

    Raises:
        ValueError: there are fewer members than ranks.

    Example:
        >>> from vgrad.distributed import single_process_mesh
        >>> with single_process_mesh("members") as mesh:
        ...     member_range(5, mesh)
        range(0, 5)
    """
    return _range_of(count, Ranks.of("member_range", mesh, axis))


def _range_of(count: int, ranks: Ranks) -> range:
    [count] = checks.integers("member_range", minimum=1, members=count)
    rank, size = ranks.rank, ranks.size
    if count < size:
        raise ValueError(
            f"member_range(members={count}): expected a member or more for each of the "
            f"{size} ranks, got {count}. Use a mesh of {count} ranks along the axis of "
            f"the members, and the other ranks for samples."
        )
    share, more = divmod(count, size)
    start = rank * share + min(rank, more)
    return range(start, start + share + (rank < more))


def shard_members(
    tree: T, mesh: DeviceMesh, *, shared: Patterns = (), axis: str = "members"
) -> T:
    """Return this rank's members of a tree: `[E, ...] -> [E of the rank, ...]`.

    `tree` is the same on all ranks: an `EnsembleState` or `EarlyStopping`, which come
    back as ordinary ones of the rank's members; parameters, buffers and the state of
    `for_members`; or any tree of tensors with the member axis in front, such as rates
    `[E]` and batches `[E, B, ...]`. `shared` is as in `ensemble_grad`: every rank has
    these entries, and the step of a state, whose key is another one on each rank, so
    that members draw apart. Results are copies; leaves that require grad still do.

    Each rank then takes steps of `ensemble_train_step` by itself, and nothing is sent.
    Train shared entries with all members in one place: no step sums their gradients
    over ranks, and `gather_members` refuses entries that are no longer the same.

    Raises:
        ValueError: tensors differ in the number of members, there are fewer members
            than ranks, or a pattern matches nothing.
        RankError: so it is on another rank, or ranks have other numbers of members.

    Example:
        >>> from vgrad.distributed import single_process_mesh
        >>> params = {"weight": torch.ones(4, 2, 3), "scale": torch.ones(2)}
        >>> with single_process_mesh("members") as mesh:
        ...     part = shard_members(params, mesh, shared=["scale"])
        ...     joint = gather_members(part, mesh, shared=["scale"])
        >>> part["weight"].shape, part["scale"].shape, joint["weight"].shape
        (torch.Size([4, 2, 3]), torch.Size([2]), torch.Size([4, 2, 3]))
    """
    function = "shard_members"
    ranks = Ranks.of(function, mesh, axis)
    with ranks.together(function) as facts:
        facts.same["members"] = count = counted(function, tree, shared)
        which = _range_of(count, ranks)
    members = take(tree, which, shared=shared)
    place = "members", which.start
    return _keyed(members, lambda key: fold_in(key, *place) if which.start else key)


def _keyed(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """Change the keys of the states in a tree."""

    def state_of(tree: T) -> bool:
        return isinstance(tree, EnsembleState)

    def with_key(leaf: T) -> T:
        if isinstance(leaf, EnsembleState):
            return leaf._replace(key=change(leaf.key))
        return leaf

    return tree_map(with_key, tree, is_leaf=state_of)


def gather_members(
    tree: T, mesh: DeviceMesh, *, shared: Patterns = (), axis: str = "members"
) -> T:
    """Return the members of all ranks, on every rank: the inverse of `shard_members`.

    Every rank then holds the whole ensemble: save it on one of them, and another number
    of ranks can go on with `shard_members` of the loaded one. Shared entries (`shared`
    is as in `ensemble_grad`), and the step of a state, must be the same on all ranks,
    bit by bit. The key is the one of the first rank, with which the state began.

    Cost: each tensor is sent to all ranks.

    Raises:
        ValueError: tensors differ in the number of members, or a pattern matches
            nothing.
        RankError: so it is on another rank, or shared entries differ.
    """
    function = "gather_members"
    ranks = Ranks.of(function, mesh, axis)
    with ranks.together(function) as facts:
        count = counted(function, tree, shared)
        stacked, common = split(_keyed(tree, torch.zeros_like), shared)
        kinds = str([(value.dtype, value.shape[1:]) for value in stacked])
        facts.same["tensors"] = hashlib.sha256(kinds.encode()).hexdigest()
        facts.same["shared"] = files.digest({str(n): x for n, x in enumerate(common)})
        facts.own["members"] = count
    sizes = [note["members"] for note in facts.notes]

    def of_first(value: Tensor) -> Tensor:
        return ranks.of_first(value.to(ranks.device)).to(value.device)

    def joined(value: Tensor) -> Tensor:
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        result = ranks.joined(copy.to(ranks.device), sizes).to(value.device)
        return result.requires_grad_(value.requires_grad)

    gathered = mapped(tree, shared, joined, lambda value: value)
    return _keyed(gathered, of_first)

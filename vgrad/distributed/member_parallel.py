"""Steps and functions of an ensemble whose members are cut among ranks.

Every rank calls them with its own members. They differ from those of an ensemble in one
place in two things: what a member draws follows from its number among all members, and
gradients of what the members share are sums over all of them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vgrad import checks, files
from vgrad.checks import Patterns
from vgrad.distributed.options import Options
from vgrad.ensemble import MembersState
from vgrad.ensemble.execution import members, split
from vgrad.ensemble.gradients import (
    EnsembleGradFn,
    EnsembleGrads,
    EnsemblePerSampleFn,
)
from vgrad.ensemble.prediction import EnsembleForward
from vgrad.generators import (
    kept_random_state,
    sample_keys,
    secret_key,
    set_seed,
    torch_seed,
)
from vgrad.ranks import Ranks
from vgrad.training import EarlyStopping
from vgrad.training.state import EnsembleState
from vgrad.training.steps import EnsembleStep, GradsAndAux
from vgrad.tree import map_tensors, tensors, tree_flatten, tree_unflatten, widened
from vgrad.typing import Arguments, Buffers, Params, Result, Same, T, Tree

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


def member_parallel(
    function: Callable[Arguments, Result],
    mesh: DeviceMesh,
    *,
    members: int,
    axis: str = "members",
) -> Same[Arguments, Result]:
    """Return a step or a function of an ensemble for ranks that have members each.

    `function` is what `ensemble_train_step`, `ensemble_forward`, `ensemble_grad`,
    `ensemble_per_sample_grad` or `ensemble_clipped_grad` returns, and the result is
    called as it is, with the members of this rank: a state, parameters and batches of
    their own that `own_members` cut, and batches that all members see as they are. So
    are the results: losses, skipped steps and loss scales are those of the rank's
    members. `members` says how many there are on all ranks. A step remains one that
    `vgrad.compile` takes.

    A member is trained as if all members were in one place. What it draws with
    `randomness="different"` follows from the state's key, the step and its number among
    all members, so that it is the same for any number of ranks (`alone` makes a mesh of
    one). A plain step draws other numbers, for all members from one stream; so does a
    compiled one here, for the members of a rank. Functions that have no state take
    their seed from torch's generator on the first rank.

    Gradients of parameters that match `shared` are summed over all ranks, and a step
    is skipped on all of them if the sum is not finite. Ranks that share nothing do not
    wait for each other in a step, nor do they notice when one of them fails.

    Cost: without `shared` nothing is sent in a step. With it two messages and a sum of
    those gradients; what buffers that are shared are left with is compared by a hash.
    Of members that draw random numbers together, most ops draw for all in one pass;
    those that follow neither uniform nor normal laws nor that of dropout run once for
    each member.

    Raises:
        TypeError: `function` is none of these.
        ValueError: there are fewer members than ranks; when called, if those given are
            not as many as this rank has.
        RankError: when called, if something is shared and another rank failed, is at
            another step or leaves other values in a buffer.

    Example:
        >>> import vgrad
        >>> from vgrad.distributed import all_members, alone, own_members
        >>> from vgrad.training import EnsembleState, ensemble_train_step
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.optim.sgd(0.1)
        >>> whole = EnsembleState.create(tx, params, buffers, seed=0)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> with alone("members") as mesh:
        ...     step = ensemble_train_step(loss, tx)
        ...     step = member_parallel(step, mesh, members=3)
        ...     state = own_members(whole, mesh)
        ...     state, metrics = step(state, x, y)
        ...     whole = all_members(state, mesh)
        >>> whole.params["weight"].shape, metrics["loss"].shape
        (torch.Size([3, 1, 2]), torch.Size([3]))
    """
    ranks = Ranks.of("member_parallel", mesh, axis)
    numbers = part(members, ranks.rank, ranks.size)
    return _of_some(function, OtherRanks(ranks, numbers, _options(function)))


def _options(function: Any) -> Options:
    """Read the options of a step or a function; clipping is that of each member."""
    if isinstance(function, EnsembleStep):
        parts: dict[str, Any] = {"tx": function.tx, "donate": function.donate}
        parts |= {"in_dims": function.in_dims, "loss_scale": function.scale}
        function = function.gradient
    else:
        parts = {"kind": type(function).__name__}
    for name in ("randomness", "shared", "has_aux", "fmodel"):
        parts[name] = getattr(function, name, None)
    return Options(getattr(function, "loss", None), **parts)


def _of_some(function: Any, others: "OtherRanks") -> Any:
    """Return a step or a function of the members of this rank."""
    if isinstance(function, EnsembleStep):
        return replace(function, reducer=others)
    if isinstance(function, EnsembleForward):
        return ParallelForward(function, others)
    if isinstance(function, EnsembleGradFn | EnsemblePerSampleFn):
        return ParallelFunction(function, others)
    raise TypeError(
        f"member_parallel(function): expected what ensemble_train_step, "
        f"ensemble_forward, ensemble_grad, ensemble_per_sample_grad or "
        f"ensemble_clipped_grad returns, got a {type(function).__name__}. A step is "
        f"compiled afterwards."
    )


@dataclass(frozen=True)
class OtherRanks:
    """The members on other ranks.

    Attributes:
        ranks: all ranks of the ensemble.
        numbers: the numbers of this rank's members.
        options: those of the step or the function.
    """

    ranks: Ranks
    numbers: range
    options: Options

    def check(self, given: int) -> None:
        """Refuse other members than those of this rank."""
        if given != len(self.numbers):
            raise ValueError(
                f"member_parallel: expected the {len(self.numbers)} members of rank "
                f"{self.ranks.rank}, got {given}. Pass what own_members returns."
            )

    def reduce(
        self,
        compute: Callable[[], GradsAndAux],
        state: EnsembleState,
        shared: Sequence[str],
    ) -> tuple[GradsAndAux, Tensor]:
        """Sum gradients of what is shared, and say whether any member is active."""
        with self.ranks.together("ensemble_train_step") as facts:
            self.check(len(state.active))
            result, aux = compute()
            facts["options"] = self.options
            facts["step"] = int(state.step)
            facts["buffers"] = _seen(result.buffers, shared)
        anyone = state.active.any()
        grads = {
            # A member stands in for those that are not active, who would all be here.
            name: torch.where(anyone, grad, 0)
            for name, grad in result.grads.items()
            if name in shared
        }
        grads, anyone = self.summed(grads, anyone)
        return (result._replace(grads={**result.grads, **grads}), aux), anyone

    def key(self, what: str) -> Tensor:
        """Draw a key on the first rank, which advances the generators of all ranks."""
        drawn = [int(each) for each in torch.randint(2**31, (2,))]
        notes = self.ranks.check_same(what, {"seed": drawn}, options=self.options)
        high, low = notes[0]["seed"]
        return secret_key(seed=high << 31 | low)

    def summed(self, grads: Params, anyone: Tensor) -> tuple[Params, Tensor]:
        """Sum gradients and count ranks, float32 or wider."""
        given = {f"grad {name}": widened(grad) for name, grad in grads.items()}
        given["ranks"] = anyone.to(self.ranks.device, torch.float32)
        found = self.ranks.summed("ensemble_train_step", given)
        sums = {name: found[f"grad {name}"].to(x.dtype) for name, x in grads.items()}
        return sums, (found["ranks"] > 0).to(anyone.device)


class ParallelFunction:
    """What `member_parallel` returns for a function of an ensemble."""

    def __init__(self, function: Any, others: OtherRanks) -> None:
        self._function = function
        self._others = others

    def __call__(
        self, params: Params, buffers: Buffers, /, *batch: Tree, **options: Any
    ) -> Any:
        """Run the members of this rank."""
        return self._run("__call__", params, buffers, batch, options)

    def _run(
        self,
        method: str,
        params: Params,
        buffers: Buffers,
        batch: tuple,
        options: dict[str, Any],
    ) -> Any:
        """Run the members of this rank; sum what is shared, if that is changed."""
        function, others, what = self._function, self._others, type(self).__name__
        sums = isinstance(function, EnsembleGradFn)
        drawing = function.randomness != "error"
        key = others.key(what) if drawing else None
        meets = function.shared and (sums or method == "with_buffers")
        with others.ranks.together(what) if meets else nullcontext({}) as facts:
            count = members(what, params, buffers, function.shared)
            others.check(count)
            found: Any = self._drawn(method, key, params, buffers, batch, options)
            whole = split(what, {**params, **buffers}, function.shared)[1]
            if meets:
                facts["options"] = others.options
                result: Any = found if isinstance(found, EnsembleGrads) else found[0]
                left: Any = result.buffers if sums else found[1]
                facts["buffers"] = _seen(left, [*whole])
        if not sums or not meets:
            return found
        grads = {name: x for name, x in result.grads.items() if name in whole}
        grads, _ = others.summed(grads, torch.tensor(True))
        result = result._replace(grads={**result.grads, **grads})
        return result if isinstance(found, EnsembleGrads) else (result, found[1])

    def _drawn(
        self,
        method: str,
        key: Tensor | None,
        params: Params,
        buffers: Buffers,
        batch: tuple,
        options: dict[str, Any],
    ) -> Any:
        """Run the members of this rank, from a key if they draw random numbers."""
        function, given = self._function, tensors((params, buffers))
        if key is None:
            return getattr(function, method)(params, buffers, *batch, **options)
        if function.randomness == "different":
            numbers = self._others.numbers
            seed = torch_seed(key, "members")
            keys = sample_keys(seed, numbers.start, len(numbers))
            function = function.keyed(keys)
        with kept_random_state(given):
            set_seed(torch_seed(key, "all"), given)
            return getattr(function, method)(params, buffers, *batch, **options)


class ParallelForward(ParallelFunction):
    """What `member_parallel` returns for `ensemble_forward`."""

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tree, Buffers]:
        """Return the outputs of this rank's members, and what they leave in buffers."""
        return self._run("with_buffers", params, buffers, batch, {})


def _seen(buffers: Buffers, shared: Sequence[str]) -> str:
    """Hash the buffers that are shared."""
    return files.digest({name: x for name, x in buffers.items() if name in shared})

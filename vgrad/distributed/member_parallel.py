"""Steps and functions of an ensemble whose members are cut among ranks.

Random numbers of a member follow from its number among all members, and gradients of
shared entries are summed over all of them.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vgrad import checks, files
from vgrad.checks import Patterns
from vgrad.distributed.options import options_of
from vgrad.ensemble.execution import EnsembleFn, local, run_eager
from vgrad.ensemble.gradients import (
    EnsembleGradFn,
    EnsembleGrads,
)
from vgrad.ensemble.layout import Layout
from vgrad.ensemble.members import counted, mapped, split, take
from vgrad.generators import (
    Tag,
    kept_random_state,
    sample_keys,
    secret_key,
    set_seed,
    torch_seed,
)
from vgrad.ranks import Ranks, Values
from vgrad.training.state import check_state
from vgrad.training.steps import (
    Gradients,
    MemberSource,
    StepReducer,
    TrainingStep,
)
from vgrad.tree import tensors, widened
from vgrad.typing import Arguments, Buffers, Params, Result, Same, T


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
    [count] = checks.whole("member_range", least=1, members=count)
    rank, size = ranks.rank, ranks.size
    if count < size:
        raise ValueError(
            f"member_range(members={count}): expected a member or more for each of the "
            f"{size} ranks, got {count}. Use a mesh of {count} ranks along the axis of "
            f"the members, and the other ranks for samples."
        )
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def shard_members(
    tree: T, mesh: DeviceMesh, *, shared: Patterns = (), axis: str = "members"
) -> T:
    """Return this rank's members of a tree: `[E, ...] -> [E of the rank, ...]`.

    `tree` is the same on all ranks: an `EnsembleState` or `EarlyStopping`, which come
    back as ordinary ones of the rank's members; parameters, buffers and the state of
    `for_members`; or any tree of tensors with the member axis in front, such as rates
    `[E]` and batches `[E, B, ...]`. `shared` is as in `ensemble_grad`: every rank has
    these entries, and the step and the key of a state. Results are copies; leaves that
    require grad still do.

    Raises:
        ValueError: tensors differ in the number of members, there are fewer members
            than ranks, or a pattern matches nothing.
        RankError: so it is on another rank, or ranks have other numbers of members.

    Example:
        >>> from vgrad.distributed import single_process_mesh
        >>> params = {"weight": torch.ones(4, 2, 3), "scale": torch.ones(2)}
        >>> with single_process_mesh("members") as mesh:
        ...     own = shard_members(params, mesh, shared=["scale"])
        ...     whole = gather_members(own, mesh, shared=["scale"])
        >>> own["weight"].shape, own["scale"].shape, whole["weight"].shape
        (torch.Size([4, 2, 3]), torch.Size([2]), torch.Size([4, 2, 3]))
    """
    function = "shard_members"
    ranks = Ranks.of(function, mesh, axis)
    with ranks.together(function) as facts:
        facts.same["members"] = count = counted(function, tree, shared)
        which = _range_of(count, ranks)
    return take(tree, which, shared=shared)


def gather_members(
    tree: T, mesh: DeviceMesh, *, shared: Patterns = (), axis: str = "members"
) -> T:
    """Return the members of all ranks, on every rank: the inverse of `shard_members`.

    Every rank then holds the whole ensemble: save it on one of them, and another number
    of ranks can go on with `shard_members` of the loaded one. Shared entries (`shared`
    is as in `ensemble_grad`), and the step and the key of a state, must be the same on
    all ranks, bit by bit.

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
        own, common = split(tree, shared)
        kinds = str([(value.dtype, value.shape[1:]) for value in own])
        facts.same["tensors"] = hashlib.sha256(kinds.encode()).hexdigest()
        facts.same["shared"] = files.digest({str(n): x for n, x in enumerate(common)})
        facts.own["members"] = count
    sizes = [note["members"] for note in facts.notes]

    def joined(value: Tensor) -> Tensor:
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        whole = ranks.joined(copy.to(ranks.device), sizes).to(value.device)
        return whole.requires_grad_(value.requires_grad)

    return mapped(tree, shared, joined, lambda value: value)


def member_parallel(
    function: Callable[Arguments, Result],
    mesh: DeviceMesh,
    *,
    members: int,
    axis: str = "members",
) -> Same[Arguments, Result]:
    """Return a step or a function of an ensemble for ranks that have members each.

    `function` is the result of `ensemble_train_step`, `ensemble_forward`,
    `ensemble_grad`, `ensemble_per_sample_grad` or `ensemble_clipped_grad`. Call it with
    the members of this rank: a state, parameters and batches of their own, cut by
    `shard_members`, and batches of all members as they are. Results are of these
    members: losses, skipped steps and loss scales. `members` is the number of members
    on all ranks. `vgrad.compile` may come before or after.

    A member is trained as if all members were in one place. Its random numbers with
    `randomness="different"` follow from the state's key, the step and its number among
    all members, so that they are the same for any number of ranks. A plain step draws
    other numbers, for all members from one stream; so does a compiled one here, for the
    members of a rank. Functions without a state take their seed from torch's generator
    on the first rank.

    Gradients of parameters that match `shared` are summed over all ranks, and a step
    is skipped on all of them if the sum is not finite. Ranks that share nothing do not
    wait for each other in a step, nor do they notice when one of them fails.

    Cost: without `shared` nothing is sent in a step. With it two messages and a sum of
    those gradients; new values of shared buffers are compared by a hash.

    Raises:
        ValueError: there are fewer members than ranks; when called, if there are not as
            many as this rank has.
        RankError: when called, if something is shared and another rank failed, is at
            another step or leaves other values in a buffer.

    Example:
        >>> import vgrad
        >>> from vgrad.distributed import single_process_mesh
        >>> from vgrad.training import EnsembleState, ensemble_train_step
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.optim.sgd(0.1)
        >>> whole = EnsembleState.create(tx, params, buffers, seed=0)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> with single_process_mesh("members") as mesh:
        ...     step = ensemble_train_step(loss, tx)
        ...     step = member_parallel(step, mesh, members=3)
        ...     state = shard_members(whole, mesh)
        ...     state, metrics = step(state, x, y)
        ...     whole = gather_members(state, mesh)
        >>> whole.params["weight"].shape, metrics["loss"].shape
        (torch.Size([3, 1, 2]), torch.Size([3]))
    """
    ranks = Ranks.of("member_parallel", mesh, axis)
    step: Any = function
    source = getattr(step, "source", None)
    if isinstance(source, MemberSource):
        facts: dict[str, Any] = {"tx": step.tx, "donate": step.donate}
        inner = source.gradient
        facts |= {"in_dims": inner.options.in_dims, "loss_scale": step.first_scale}
    else:
        facts, inner = {"kind": type(step).__name__}, step
    call = getattr(inner, "options", None)
    for name in ("randomness", "shared"):
        facts[name] = getattr(call, name, None)
    for name in ("has_aux", "fmodel"):
        facts[name] = getattr(inner, name, None)
    options = options_of(loss=getattr(inner, "loss", None), **facts)
    reducer = MemberReducer(ranks, _range_of(members, ranks), options)
    if isinstance(source, MemberSource):
        parallel: Any = replace(step, reduce=reducer)
    elif isinstance(step, EnsembleFn):
        parallel = replace(step, reduce=MembersOfRank(reducer))
    else:
        raise TypeError(
            f"member_parallel(function): expected the result of ensemble_train_step, "
            f"ensemble_forward, ensemble_grad, ensemble_per_sample_grad or "
            f"ensemble_clipped_grad, got a {type(step).__name__}."
        )
    return parallel


@dataclass(frozen=True, eq=False)
class MemberReducer(StepReducer):
    """Sums over the members on all ranks."""

    ranks: Ranks
    numbers: range  # of this rank's members
    options: Values

    def check(self, count: int) -> None:
        """Refuse another number of members than this rank has."""
        if count != len(self.numbers):
            raise ValueError(
                f"member_parallel: expected the {len(self.numbers)} members of rank "
                f"{self.ranks.rank}, got {count}. Pass the result of shard_members."
            )

    @contextmanager
    def together(
        self, step: TrainingStep, state: Any, batch: tuple
    ) -> Iterator[tuple[TrainingStep, tuple[Tag, ...]]]:
        """Yield a step whose members draw by their numbers, or tags for that."""
        source: Any = step.source
        check_state(f"{step.name}(...)", state, source.kind)
        shares, tags = bool(source.shared_names(state)), ()
        if not shares:  # else all processes check together
            self.check(len(state.active))
            step = step.of_one_process
        start, gradient = self.numbers.start, source.gradient
        if step.execute is run_eager:
            seed = torch_seed(state.key, "loss", int(state.step), "members")
            keys = sample_keys(seed, start, len(self.numbers))
            step = replace(step, source=replace(source, gradient=gradient.keyed(keys)))
        elif gradient.options.randomness == "different" and start:
            tags = "members", start  # a graph draws for all members at once
        yield step, tags

    def reduced(
        self, step: TrainingStep, compute: Callable[[], Gradients], state: Any
    ) -> Gradients:
        """Sum gradients of shared entries."""
        source: Any = step.source
        shared = source.shared_names(state)
        with self.ranks.together("ensemble_train_step") as facts:
            self.check(len(state.active))
            found = compute()
            facts.same |= self.common(found.buffers, shared)
            facts.same["step"] = int(state.step)
        any_active = state.active.any()
        grads = {
            # Without an active member here, inactive ones have been evaluated.
            name: torch.where(any_active, grad, 0)
            for name, grad in found.grads.items()
            if name in shared
        }
        grads, any_active = self.summed(grads, any_active)
        grads = {**found.grads, **grads}
        masks = found.masks[0], source.together(state, grads, any_active)
        return found._replace(grads=grads, masks=masks)

    def common(self, buffers: Buffers, shared: Collection[str]) -> dict[str, Any]:
        """Return facts that ranks have in common: options, new values of buffers."""
        values = {name: x for name, x in buffers.items() if name in shared}
        return {"options": self.options, "buffers": files.digest(values)}

    def key(self, what: str) -> Tensor:
        """Draw a key on the first rank, which advances the generators of all ranks."""
        drawn = [int(each) for each in torch.randint(2**31, (2,))]
        notes = self.ranks.check_same(what, {"seed": drawn}, options=self.options)
        high, low = notes[0]["seed"]
        return secret_key(seed=high << 31 | low)

    def summed(self, grads: Params, active: Tensor) -> tuple[Params, Tensor]:
        """Sum gradients, float32 or wider; also return whether any rank is active."""
        wider = {f"grad {name}": widened(grad) for name, grad in grads.items()}
        wider["ranks"] = active.to(self.ranks.device, torch.float32)
        sums = self.ranks.summed("ensemble_train_step", wider)
        grads = {name: sums[f"grad {name}"].to(x.dtype) for name, x in grads.items()}
        return grads, (sums["ranks"] > 0).to(active.device)


@dataclass(frozen=True, eq=False)
class MembersOfRank:
    """Runs a function of an ensemble for the members of this rank."""

    reducer: MemberReducer

    def __call__(
        self, method: Any, params: Params, buffers: Buffers, *rest: Any
    ) -> Any:
        """Run the members of this rank; sum gradients of shared entries."""
        function, what, reducer = method.__self__, "member_parallel", self.reducer
        options = function.options
        sums = isinstance(function, EnsembleGradFn)
        key = reducer.key(what) if options.randomness != "error" else None
        meets = options.shared and (sums or method.__name__ == "outputs_and_buffers")
        with reducer.ranks.together(what) if meets else nullcontext() as facts:
            count, whole = Layout.of(what, params, buffers, options.shared)
            reducer.check(count)
            result: Any = self._drawn(method, key, params, buffers, *rest)
            if facts is not None:
                first, *others = (
                    (result,) if isinstance(result, EnsembleGrads) else result
                )
                left: Any = first.buffers if sums else others[0]
                facts.same |= reducer.common(left, whole)
        if not sums or not meets:
            return result
        shared = {name: x for name, x in first.grads.items() if name in whole}
        shared, _ = reducer.summed(shared, torch.tensor(True))
        first = first._replace(grads={**first.grads, **shared})
        return (first, *others) if others else first

    def _drawn(
        self,
        method: Any,
        key: Tensor | None,
        params: Params,
        buffers: Buffers,
        *rest: Any,
    ) -> Any:
        """Run the members of this rank, from a key if they draw random numbers."""
        function, numbers = method.__self__.of_one_process, self.reducer.numbers
        tags: tuple[Tag, ...] = ("all",)
        if key is not None and function.options.randomness == "different":
            if function.execute is run_eager:
                seed = torch_seed(key, "members")
                keys = sample_keys(seed, numbers.start, len(numbers))
                function = function.keyed(keys)
            elif numbers.start:  # a graph draws for all members at once
                tags = "all", numbers.start
        compute = partial(local, getattr(function, method.__name__))
        if key is None:
            return compute(params, buffers, *rest)
        seeded = tensors((params, buffers))
        with kept_random_state(seeded):
            set_seed(torch_seed(key, *tags), seeded)
            return compute(params, buffers, *rest)

"""The training step of all members at once: `step(state, *batch) -> (state, metrics)`.

E members.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from vgrad import optim
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.ensemble.axes import InDims, members, split
from vgrad.ensemble.execution import Call
from vgrad.ensemble.gradients import EnsembleGradFn, EnsembleGrads, ensemble_grad
from vgrad.ensemble.optimizer import MembersState, of_members
from vgrad.functional.losses import check_loss
from vgrad.generators import Tag, sample_keys, secret_key, torch_seed
from vgrad.optim.base import GradientTransformation
from vgrad.precision import DynamicLossScale, LossScale, Policy
from vgrad.training.state import (
    Metrics,
    Run,
    Step,
    TrainState,
    check_state,
    device_of,
    initial_loss_scale,
    is_scaled,
    kept_dtypes,
    may_write,
    redacted,
    run_eager,
    scale_of,
    seeded_from,
    with_policy,
)
from vgrad.tree import map_tensors, tree_map, widened
from vgrad.typing import (
    BatchLossFn,
    Buffers,
    EnsembleStrategy,
    LossFn,
    Params,
    Randomness,
    Tree,
)


class EnsembleState(NamedTuple):
    """All that a step changes, a tree of tensors: save it and nothing is lost.

    Attributes:
        params: the parameters, `[E, ...]`, shared ones without member axis.
        buffers: the buffers, likewise.
        optimizer: the optimizer's state, of each member and of their shared entries.
        step: the number of steps taken, int64 without dimensions.
        key: the secret key, as in `TrainState`: all that a step draws follows from it.
        loss_scale: each member's loss scale of the next step.
        active: which members are trained, bool `[E]`. The others stay as they are; set
            it with `state._replace(active=...)`.
    """

    params: Params
    buffers: Buffers
    optimizer: Tree
    step: Tensor
    key: Tensor
    loss_scale: LossScale
    active: Tensor

    def __repr__(self) -> str:
        return redacted(self)

    @classmethod
    def create(
        cls,
        tx: GradientTransformation,
        params: Params,
        buffers: Buffers,
        *,
        shared: Patterns = (),
        seed: int | None = None,
        loss_scale: LossScale | None = None,
    ) -> "EnsembleState":
        """Start a run of all members, every one of them active.

        `tx` is a transformation of one member, or the result of `for_members`. The
        state holds detached tensors, not copies, which only donated steps change.
        `shared` holds patterns of the entries without a member axis. `loss_scale`
        multiplies losses before the backward pass; results are without it.

        Example:
            >>> from vgrad import optim
            >>> params = {"w": torch.zeros(3, 2)}
            >>> state = EnsembleState.create(optim.sgd(0.1), params, {})
            >>> state.active
            tensor([True, True, True])
        """
        function = "EnsembleState.create"
        count = members(params, buffers, shared, function=function)
        tx = of_members(function, tx, shared)
        start = TrainState.create(tx, params, buffers, seed=seed, loss_scale=loss_scale)
        return cls(
            *start[:5],  # all but the digest of a plan
            loss_scale=_for_each(start.loss_scale, count),
            active=torch.ones(count, dtype=torch.bool, device=device_of(params)),
        )

    def fork(self) -> "EnsembleState":
        """Return the same state with a new secret key, as `TrainState.fork` does."""
        return self._replace(key=secret_key())


def ensemble_train_step(
    loss: BatchLossFn | LossFn,
    tx: GradientTransformation,
    *,
    in_dims: InDims = None,
    randomness: Randomness = "different",
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    has_aux: bool = False,
) -> Step[EnsembleState]:
    """Make one step of all members: gradient of each one's loss, optimizer, buffers.

    `(state, *batch) -> (state, metrics)` with `loss` `[E]` and `skipped` `[E]`. `tx` is
    a transformation of one member, or the result of `for_members`, with which learning
    rates and all other numbers may differ between members. Each member has a loss scale
    of its own (and, if there is one, a metric `loss_scale`), as in `train_step`, and
    aux.

    A member that is not active, or whose gradients are not finite, keeps parameters,
    optimizer and buffers as they were; the other members do not notice. Shared entries
    get the sum of the active members' gradients, and are skipped when that is not
    finite. Inactive members are then evaluated with an active member's values and
    report a NaN loss. `zero_nans` and similar transformations never see non-finite
    gradients, because such steps are skipped first.

    Args:
        in_dims: 0 where each member has a batch of its own, None where all have one, or
            a sequence with an entry for each item.
        randomness: of random ops: `"error"`, `"different"` for each member, `"same"`.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.
        policy: dtypes of the passes, a `Policy` or its text; None for those given.
        loss_scale: multiplies losses before the backward pass; results are without it.
        donate: the step may write into the old state, which must not be used again.
        has_aux: the loss returns `(scalar, aux)`, and `metrics["aux"]` holds aux.

    Raises:
        ValueError: parameters are shared and losses scaled, which would weigh members
            by their scales; else as `ensemble_grad`.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.for_members(vgrad.optim.sgd, lr=torch.tensor([0.01, 0.1, 1.0]))
        >>> state = EnsembleState.create(tx, params, buffers)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> state, metrics = ensemble_train_step(loss, tx)(state, x, y)
        >>> metrics["loss"].shape
        torch.Size([3])
    """
    function = "ensemble_train_step"
    check_loss(function, loss, of_batch=True)
    scale = initial_loss_scale(function, loss_scale, policy, DynamicLossScale())
    tx = of_members(function, tx, shared)
    gradient = ensemble_grad(
        with_policy(policy, loss),
        in_dims=in_dims,
        randomness=randomness,
        strategy=strategy,
        shared=shared,
        has_aux=has_aux,
    )
    return EnsembleStep(gradient, tx, scale, in_dims, tuple(shared), donate, has_aux)


GradsAndAux = tuple[EnsembleGrads, Tree]
"""Gradients without the scale, and aux."""


class Reducer(Protocol):
    """Reduces over the members of an ensemble that other processes train."""

    @property
    def numbers(self) -> range:
        """The numbers of this process's members among all of them."""
        ...

    def check(self, count: int) -> None:
        """Refuse another number of members than this process has."""
        ...

    def reduce(
        self, compute: Callable[[], GradsAndAux], state: Any, shared: Sequence[str]
    ) -> tuple[GradsAndAux, Tensor]:
        """Sum gradients of shared entries; also return whether a member is active."""
        ...


@dataclass(frozen=True, eq=False)
class EnsembleStep:
    """The step of `ensemble_train_step`.

    Attributes:
        scale: the loss scale of the first step.
        run: how all but the random numbers of a step is computed.
        reducer: for members that other processes train, if there are any.
    """

    gradient: EnsembleGradFn
    tx: GradientTransformation
    scale: LossScale | None
    in_dims: InDims
    shared: Patterns
    donate: bool
    has_aux: bool
    run: Run = run_eager
    reducer: Reducer | None = None
    name: ClassVar = "ensemble_train_step"

    def __call__(
        self, state: EnsembleState, /, *batch: Tree
    ) -> tuple[EnsembleState, Metrics]:
        """Take a step."""
        check_state("ensemble_train_step(loss, tx)", state, EnsembleState)
        # Early stopping may count on the CPU.
        active = state.active.to(device_of(state.params))
        state = state._replace(active=active)
        scale = _for_each(scale_of(state, self.scale), len(active))
        # Neither the key nor the count is for a function of tensors.
        inputs = state._replace(loss_scale=scale, key=active, step=active)
        step, tags = self._with_members(state)
        with torch.no_grad(), seeded_from(state, *tags):
            if self.reducer is not None and (whole := [*self._shared_entries(state)]):
                compute = partial(self.run, step._gradients, inputs, batch)
                results, any_active = self.reducer.reduce(compute, state, whole)
                new, metrics = self._update(inputs, results, any_active)
            elif self.donate:  # a graph could not write into the state
                results = self.run(step._gradients, inputs, batch)
                new, metrics = self._update(inputs, results)
            else:
                new, metrics = self.run(step._step, inputs, batch)
        return new._replace(key=state.key, step=state.step + 1), metrics

    @cached_property
    def _without_reducer(self) -> "EnsembleStep":
        """The step of this process alone, since a capture cannot compare a reducer."""
        return replace(self, reducer=None)

    def _with_members(
        self, state: EnsembleState
    ) -> tuple["EnsembleStep", tuple[Tag, ...]]:
        """Return a step whose draws differ from other processes', or tags for that."""
        if self.reducer is None:
            return self, ()
        if not self._shared_entries(state):  # else all processes check together
            self.reducer.check(len(state.active))
        numbers = self.reducer.numbers
        if self.run is not run_eager:  # a graph draws for all members at once
            different = self.gradient.randomness == "different" and numbers.start
            tags = ("members", numbers.start) if different else ()
            return self._without_reducer, tags
        seed = torch_seed(state.key, "loss", int(state.step), "members")
        keys = sample_keys(seed, numbers.start, len(numbers))
        return replace(self, gradient=self.gradient.keyed(keys)), ()

    def _step(
        self, state: EnsembleState, batch: tuple
    ) -> tuple[EnsembleState, Metrics]:
        return self._update(state, self._gradients(state, batch))

    def _shared_entries(self, state: EnsembleState) -> Params:
        entries = {**state.params, **state.buffers} if self.shared else {}
        return split("ensemble_train_step", entries, self.shared)[1]

    def _gradients(self, state: EnsembleState, batch: tuple) -> GradsAndAux:
        scale, whole = state.loss_scale, self._shared_entries(state)
        scaled = is_scaled(scale)
        shares = bool(whole.keys() & state.params.keys())
        if scaled and shares:
            raise ValueError(
                f"ensemble_train_step(shared={list(self.shared)!r}, loss_scale): "
                f"expected one of the two, got both: each member has a scale of its "
                f"own. Compute in bfloat16, which needs no scale."
            )
        arguments, weights = (state.params, state.buffers, *batch), scale.loss_scale
        if shares:
            arguments, weights = self._of_active(state, batch), state.active
        result = self.gradient(*arguments, loss_scale=weights)
        result, aux = result if self.has_aux else (result, None)
        if self.donate:  # they may be parameters, which the step writes into
            losses = result.losses.clone()
            result, aux = result._replace(losses=losses), map_tensors(Tensor.clone, aux)
        if scaled:
            unscaled = torch.vmap(lambda scale, grads: scale.unscale(grads))
            result = result._replace(grads=unscaled(scale, result.grads))
        if shares:
            losses = result.losses.masked_fill(~state.active, torch.nan)
            result = result._replace(losses=losses)
        return result, aux

    def _of_active(self, state: EnsembleState, batch: tuple) -> tuple:
        """Return the arguments with an active member's values for each inactive one.

        Weighing by zero is not enough: zero times the NaN of a member is a NaN.
        """
        arguments = state.params, state.buffers, batch
        call = Call(
            "ensemble_train_step", *arguments, in_dims=self.in_dims, shared=self.shared
        )
        rows = torch.arange(call.members, device=state.active.device)
        rows = torch.where(state.active, rows, state.active.int().argmax())
        return call.rows(rows).args

    def _update(
        self,
        state: EnsembleState,
        results: GradsAndAux,
        any_active: Tensor | None = None,
    ) -> tuple[EnsembleState, Metrics]:
        """Return the state after the optimizer's step, with the same key and count."""
        active, scale = state.active, state.loss_scale
        whole = self._shared_entries(state)
        (grads, losses, buffers), aux = results
        with torch.no_grad():
            finite = _members_finite(
                [grads[n] for n in grads if n not in whole], active
            )
            trained = active & finite
            # Looking at values costs nothing on a CPU, and choosing a pass over all.
            looks = trained.is_cpu and not whole and not checks_collected()
            all_trained = looks and bool(trained.all())
            buffers = kept_dtypes(buffers, state.buffers)
            donate = self.donate and all_trained and may_write(state.params, buffers)
            params, optimizer = optim.step(
                self.tx, grads, state.optimizer, state.params, donate=donate
            )
            new = state._replace(params=params, buffers=buffers, optimizer=optimizer)
            if not all_trained:
                any_active = active.any() if any_active is None else any_active
                common = {name: grads.get(name) for name in whole}
                new = _restore_inactive(new, state, trained, common, any_active)
            metrics = {
                "loss": widened(losses),
                "skipped": (active & ~finite).float(),
            }
            if self.has_aux:
                metrics["aux"] = aux
            if is_scaled(scale):
                metrics["loss_scale"] = torch.as_tensor(scale.loss_scale).clone()
                adjusted = torch.vmap(lambda scale, ok: scale.adjust(ok))(scale, finite)
                scale = _select_members(active, adjusted, scale)
        return new._replace(loss_scale=scale), metrics


def _select_members(mask: Tensor, new: Tree, old: Tree) -> Tree:
    """Take `new` where a mask of members `[E]`, or one for all, is true, else `old`."""

    def choose(new: Tensor, old: Tensor) -> Tensor:
        aligned = mask.reshape((*mask.shape, *[1] * (new.ndim - mask.ndim)))
        return torch.where(aligned, new, old)

    return tree_map(choose, new, old)


def _restore_inactive(
    new: EnsembleState,
    old: EnsembleState,
    trained: Tensor,
    common: dict[str, Any],
    any_active: Tensor,
) -> EnsembleState:
    """Restore members that were not trained, and shared entries that are skipped.

    `common` has the gradients of all shared entries, None for buffers.
    """
    finite = [grad.isfinite().all() for grad in common.values() if grad is not None]
    together = torch.stack([any_active, *finite]).all()

    def select(new: Params, old: Params) -> Params:
        masks = {name: together if name in common else trained for name in new}
        return {n: _select_members(masks[n], new[n], old[n]) for n in new}

    optimizer = MembersState(
        _select_members(trained, new.optimizer.members, old.optimizer.members),
        _select_members(together, new.optimizer.shared, old.optimizer.shared),
    )
    return new._replace(
        params=select(new.params, old.params),
        buffers=select(new.buffers, old.buffers),
        optimizer=optimizer,
    )


def _for_each(scale: LossScale, count: int) -> LossScale:
    """Return a scale with a number for every member."""
    return map_tensors(lambda x: x if x.ndim else x.expand(count).contiguous(), scale)


def _members_finite(grads: list[Tensor], like: Tensor) -> Tensor:
    """Return whether each member's gradients are finite, `[E]`, without a sync."""
    finite = torch.ones_like(like)
    if like.device.type == "cpu" and not checks_collected():
        # A finite sum has finite terms, and takes a fraction of the time.
        if all(bool(grad.sum().isfinite()) for grad in grads):
            return finite
    for grad in grads:
        finite = finite & grad.isfinite().reshape(len(finite), grad[0].numel()).all(1)
    return finite

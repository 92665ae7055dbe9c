"""The training step of all members at once: `step(state, *batch) -> (state, metrics)`.

E members.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vgrad import optim
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.ensemble.execution import Call, InDims, members, split
from vgrad.ensemble.gradients import EnsembleGradFn, ensemble_grad
from vgrad.ensemble.optimizer import of_members
from vgrad.functional.losses import check_loss
from vgrad.generators import secret_key
from vgrad.optim.base import GradientTransformation
from vgrad.precision import DynamicLossScale, LossScale, NoOpLossScale, Policy
from vgrad.training import others
from vgrad.training.moving import finite_of_each, keep, of_each, put_back
from vgrad.training.others import Found, Others
from vgrad.training.state import (
    Metrics,
    Run,
    Step,
    TrainState,
    at_once,
    check_state,
    device_of,
    first_scale,
    kept_dtypes,
    may_write,
    own_randomness,
    scale_of,
    under,
    without_key,
)
from vgrad.tree import map_tensors, widened
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
        params: the parameters, `[E, ...]`, those that are shared without member axis.
        buffers: the buffers, likewise.
        optimizer: the optimizer's state, of each member and of what they share.
        step: how many steps were taken, int64 without dimensions.
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
        return without_key(self)

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

        `tx` is a transformation of one member, or what `for_members` returns. The state
        holds detached tensors, not copies, which only donated steps change. `shared`
        holds patterns of the entries without a member axis. `loss_scale` multiplies
        losses before the backward pass; results are without it.

        Example:
            >>> from vgrad import optim
            >>> params = {"w": torch.zeros(3, 2)}
            >>> state = EnsembleState.create(optim.sgd(0.1), params, {})
            >>> state.active
            tensor([True, True, True])
        """
        function = "EnsembleState.create"
        count = members(function, params, buffers, shared)
        tx = of_members(function, tx, shared)
        start = TrainState.create(tx, params, buffers, seed=seed, loss_scale=loss_scale)
        active = torch.ones(count, dtype=torch.bool, device=device_of(params))
        return cls(
            params=start.params,
            buffers=start.buffers,
            optimizer=start.optimizer,
            step=start.step,
            key=start.key,
            loss_scale=of_each(start.loss_scale, count),
            active=active,
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
    a transformation of one member, or what `for_members` returns: there learning rates
    and all other numbers may differ between members. Each member has a loss scale of
    its own (and, if there is one, a metric `loss_scale`), as in `train_step`, and aux.

    A member that is not active, or whose gradients are not finite, keeps parameters,
    optimizer and buffers as they were, and does so alone. What members share gets the
    sum of the active members' gradients, and is skipped when that is not finite. In
    that case an active member stands in for one that is not active, whose loss is NaN.
    Transformations that mend gradients which are not finite, such as `zero_nans`, thus
    never see any.

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
        >>> rates = torch.tensor([0.01, 0.1, 1.0])
        >>> tx = vgrad.for_members(vgrad.optim.sgd, lr=rates)
        >>> state = EnsembleState.create(tx, params, buffers)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> state, metrics = ensemble_train_step(loss, tx)(state, x, y)
        >>> metrics["loss"].shape
        torch.Size([3])
    """
    check_loss("ensemble_train_step", loss, of_batch=True)
    first = first_scale("ensemble_train_step", loss_scale, policy, DynamicLossScale())
    tx = of_members("ensemble_train_step", tx, shared)
    gradient = ensemble_grad(
        under(policy, loss),
        in_dims=in_dims,
        randomness=randomness,
        strategy=strategy,
        shared=shared,
        has_aux=has_aux,
    )
    return EnsembleStep(gradient, tx, first, in_dims, tuple(shared), donate, has_aux)


@dataclass(frozen=True, eq=False)
class EnsembleStep:
    """What `ensemble_train_step` returns.

    Attributes:
        run: how all but the random numbers of a step is computed.
        others: the members that are trained elsewhere, if there are any.
    """

    gradient: EnsembleGradFn
    tx: GradientTransformation
    first: LossScale | None
    in_dims: InDims
    shared: Patterns
    donate: bool
    has_aux: bool
    run: Run = at_once
    others: Others | None = None
    name: ClassVar = "ensemble_train_step"

    def __call__(
        self, state: EnsembleState, /, *batch: Tree
    ) -> tuple[EnsembleState, Metrics]:
        """Return the state after the step, and what the step found."""
        check_state("ensemble_train_step(loss, tx)", state, EnsembleState)
        # What stops members early may count on the CPU.
        active = state.active.to(device_of(state.params))
        state = state._replace(active=active)
        scale = scale_of(state, self.first)
        scaled = not isinstance(scale, NoOpLossScale)
        scale = of_each(scale, len(active)) if scaled else scale
        # Neither the key nor the count is for a function of tensors.
        given = state._replace(loss_scale=scale, key=active, step=active)
        step, place = self._among_others(state)
        with torch.no_grad(), own_randomness(state, *place):
            if self.others is not None and (whole := [*self._whole(state)]):
                compute = partial(self.run, step._gradient, given, batch)
                found, anyone = self.others.joined(compute, state, whole)
                new, metrics = self._moved(given, found, anyone)
            elif self.donate:  # a graph could not write into the state
                found = self.run(step._gradient, given, batch)
                new, metrics = self._moved(given, found)
            else:
                new, metrics = self.run(step._computed, given, batch)
        return new._replace(key=state.key, step=state.step + 1), metrics

    @cached_property
    def _alone(self) -> "EnsembleStep":
        """The step that knows of no others, whom a capture cannot compare."""
        return replace(self, others=None)

    def _among_others(self, state: EnsembleState) -> tuple["EnsembleStep", tuple]:
        """Return the step that draws what others do not, or a place for that."""
        if self.others is None:
            return self, ()
        if not self._whole(state):  # else all processes check together
            self.others.check(len(state.active))
        numbers = self.others.numbers
        if self.run is not at_once:  # a graph draws for all members at once
            return self._alone, others.place(self.gradient, numbers)
        return replace(self, gradient=others.keyed(self.gradient, state, numbers)), ()

    def _computed(
        self, state: EnsembleState, batch: tuple
    ) -> tuple[EnsembleState, Metrics]:
        """Return the state after the step, with the same key and count."""
        return self._moved(state, self._gradient(state, batch))

    def _whole(self, state: EnsembleState) -> Params:
        """Return what all members share."""
        entries = {**state.params, **state.buffers} if self.shared else {}
        return split("ensemble_train_step", entries, self.shared)[1]

    def _moved(
        self, state: EnsembleState, found: Found, anyone: Tensor | None = None
    ) -> tuple[EnsembleState, Metrics]:
        """Return the state after the optimizer's step."""
        active, scale = state.active, state.loss_scale
        scaled = not isinstance(scale, NoOpLossScale)
        whole = self._whole(state)
        (grads, losses, buffers), aux = found
        with torch.no_grad():
            finite = finite_of_each([grads[n] for n in grads if n not in whole], active)
            trained = active & finite
            # Looking at values costs nothing on a CPU, and choosing a pass over all.
            looks = trained.is_cpu and not whole and not checks_collected()
            everyone = looks and bool(trained.all())
            buffers = kept_dtypes(buffers, state.buffers)
            donate = self.donate and everyone and may_write(state.params, buffers)
            params, optimizer = optim.step(
                self.tx, grads, state.optimizer, state.params, donate=donate
            )
            new = state._replace(params=params, buffers=buffers, optimizer=optimizer)
            if not everyone:
                anyone = active.any() if anyone is None else anyone
                common = {name: grads.get(name) for name in whole}
                new = put_back(new, state, trained, common, anyone)
            metrics = {
                "loss": widened(losses),
                "skipped": (active & ~finite).float(),
            }
            if self.has_aux:
                metrics["aux"] = aux
            if scaled:
                metrics["loss_scale"] = torch.as_tensor(scale.loss_scale).clone()
                adjusted = torch.vmap(lambda scale, ok: scale.adjust(ok))(scale, finite)
                scale = keep(active, adjusted, scale)
        return new._replace(loss_scale=scale), metrics

    def _gradient(self, state: EnsembleState, batch: tuple) -> Found:
        """Return gradients without the scale, and aux."""
        scale, whole = state.loss_scale, self._whole(state)
        scaled = not isinstance(scale, NoOpLossScale)
        shares = bool(whole.keys() & state.params.keys())
        if scaled and shares:
            raise ValueError(
                f"ensemble_train_step(shared={list(self.shared)!r}, loss_scale): "
                f"expected one of the two, got both: each member has a scale of its "
                f"own. Compute in bfloat16, which needs no scale."
            )
        given, weights = (state.params, state.buffers, *batch), scale.loss_scale
        if shares:
            given, weights = self._of_active(state, batch), state.active
        found = self.gradient(*given, loss_scale=weights)
        result, aux = found if self.has_aux else (found, None)
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
        """Return the arguments with an active member in place of each other one.

        Weighing by zero is not enough: zero times the NaN of a member is a NaN.
        """
        function, given = "ensemble_train_step", (state.params, state.buffers, batch)
        call = Call(function, *given, in_dims=self.in_dims, shared=self.shared)
        rows = torch.arange(call.members, device=state.active.device)
        rows = torch.where(state.active, rows, state.active.int().argmax())
        return call.rows(rows).args

"""Training steps: `step(state, *batch) -> (new state, metrics)`. E members."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vgrad import batches, optim
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.dp.plan import Plan, as_digest, check_spent
from vgrad.ensemble.execution import Call, InDims, split
from vgrad.ensemble.gradients import (
    EnsembleGradFn,
    EnsembleGrads,
    ensemble_grad,
    returning_buffers,
)
from vgrad.ensemble.optimizer import MembersState, of_members
from vgrad.functional.losses import SampleLoss, check_loss, gradient
from vgrad.generators import Tag, sample_keys, torch_seed
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.persample.clipped import clipped_grad
from vgrad.persample.grad import weighted_grad
from vgrad.precision import (
    DynamicLossScale,
    LossScale,
    Policy,
    StaticLossScale,
    all_finite,
    select_tree,
)
from vgrad.precision.autocasting import AutocastMode
from vgrad.training.state import (
    EnsembleState,
    Metrics,
    Run,
    Step,
    TrainState,
    apply_optimizer,
    check_state,
    device_of,
    for_each,
    initial_loss_scale,
    is_scaled,
    kept_dtypes,
    may_write,
    run_eager,
    scale_of,
    seeded_from,
    with_policy,
)
from vgrad.tree import map_tensors, map_values, tree_map, widened
from vgrad.typing import (
    BatchLossFn,
    Buffers,
    ChunkSize,
    EnsembleStrategy,
    LossFn,
    Params,
    Passes,
    Randomness,
    Strategy,
    Tree,
)


def train_step(
    loss: BatchLossFn | LossFn,
    tx: GradientTransformation,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    has_aux: bool = False,
) -> Step[TrainState]:
    """Make an ordinary step: gradient of a batch loss, optimizer, new buffers.

    `(state, *batch) -> (state, {"loss": scalar})`. One forward and one backward pass.
    `loss` is the loss of a batch, from `batch_loss` or a function of your own
    `(params, buffers, *batch) -> scalar`. Without `.with_buffers` it changes none. A
    loss of one sample, from `sample_loss`, is averaged over the batch and changes no
    buffers.

    Under a `policy` the passes run in its dtypes, while parameters and the optimizer
    keep theirs: float32 parameters are master weights.

    With a loss scale the loss is multiplied by it before the backward pass and the
    gradients are divided by it in float32. A step whose gradients are not finite leaves
    parameters, optimizer and buffers as they were, without a device sync; the metrics
    then also have `loss_scale`, the one that was used, and `skipped`, 1 or 0. Metrics
    are float32 or wider. A state that has no scale yet starts with `loss_scale`, which
    for a policy that computes in float16 is a `DynamicLossScale()` by default.

    Args:
        policy: dtypes of the passes, a `Policy` or its text; None for those given.
        loss_scale: multiplies losses before the backward pass; results are without it.
        donate: the step may write into the old state, which must not be used again.
        has_aux: the loss returns `(scalar, aux)`, and `metrics["aux"]` holds aux.

    Raises:
        ValueError: when called, if the loss returns something else than a scalar, or a
            loss of one sample gets a batch without any.

    Example:
        >>> import vgrad
        >>> model = torch.nn.Linear(2, 1)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.optim.sgd(0.1)
        >>> state = TrainState.create(tx, params, buffers)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> state, metrics = train_step(loss, tx)(state, x, y)
        >>> state.step
        tensor(1)
    """
    scale = initial_loss_scale("train_step", loss_scale, policy, DynamicLossScale())
    check_transformation("train_step", tx)
    if isinstance(loss, SampleLoss):
        if has_aux:
            raise TypeError(
                "train_step(loss, has_aux=True): expected a loss that returns "
                "(scalar, aux), got one from sample_loss, which has no aux. Write a "
                "loss of a whole batch."
            )
        run = _with_value(with_policy(policy, loss))
        gradients = OfSamples(weighted_grad(run, randomness="different", has_aux=True))
    else:
        check_loss("train_step", loss, of_batch=True)
        run = with_policy(policy, loss)
        run = returning_buffers("train_step", run, has_aux=has_aux)
        gradients = OfBatch(run, has_aux, donate)
    return TrainStep(gradients, tx, scale, donate, has_aux)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """The step of `train_step`.

    Attributes:
        gradients: a function of gradients, loss, aux, buffers, and whether gradients
            are finite.
        scale: the loss scale of the first step.
        run: how gradients of batches are computed, and the optimizer run.
        reduce: sums over processes, from the function that computes gradients here, and
            the state.
    """

    gradients: "OfBatch | OfSamples"
    tx: GradientTransformation
    scale: LossScale | None
    donate: bool
    has_aux: bool
    run: Run = run_eager
    reduce: Callable[[Callable[[], tuple], TrainState], tuple] | None = None
    name: ClassVar = "train_step"

    def __call__(
        self, state: TrainState, /, *batch: Tree
    ) -> tuple[TrainState, Metrics]:
        """Take a step."""
        check_state("train_step(loss, tx)", state, TrainState)
        scale = scale_of(state, self.scale)
        scaled = is_scaled(scale)
        run = self.run if isinstance(self.gradients, OfBatch) else run_eager
        arguments = state.params, state.buffers, batch, scale
        compute = partial(run, self.gradients.compute, *arguments)
        with torch.no_grad(), seeded_from(state):
            results = compute() if self.reduce is None else self.reduce(compute, state)
            grads, value, aux, buffers, finite = results
            # A skipped step needs the old state; a look at a value is free on a CPU.
            taken = not scaled or (self.donate and finite.is_cpu and bool(finite))
            donate = self.donate and taken
            params, optimizer = apply_optimizer(
                self.run, self.tx, grads, state, buffers, donate=donate
            )
            new = (params, buffers, optimizer)
            if not taken:
                new = select_tree(finite, new, tuple(state[:3]))
        metrics = {"loss": value}
        if self.has_aux:
            metrics["aux"] = aux
        if scaled:
            metrics["loss_scale"] = torch.as_tensor(scale.loss_scale)
            metrics["skipped"] = (~finite).float()
            scale = scale.adjust(finite)
        new = dict(zip(("params", "buffers", "optimizer"), new, strict=True))
        return state._replace(**new, step=state.step + 1, loss_scale=scale), metrics


@dataclass(frozen=True, eq=False)
class OfBatch:
    """Gradients of the loss of a batch, in a forward and a backward pass.

    Attributes:
        loss: returns a loss, with aux if there is one, and new buffers.
    """

    loss: Callable[..., tuple[Any, Buffers]]
    has_aux: bool
    donate: bool
    name: ClassVar = "train_step"

    def compute(
        self, params: Params, buffers: Buffers, batch: tuple, scale: LossScale
    ) -> tuple:
        """Return gradients, loss, aux, new buffers, and whether all is finite."""

        def of_params(params: Params) -> tuple[Tensor, tuple]:
            with AutocastMode(params.values()):
                output, new = self.loss(params, buffers, *batch)
            value, aux = output if self.has_aux else (output, ())
            return scale.scale(value), (value, aux, new)

        with torch.no_grad():
            grads, (value, aux, new), _ = gradient(of_params, params)
            grads = scale.unscale(grads)
            finite = all_finite(grads) if is_scaled(scale) else torch.tensor(True)
            # Either may be a parameter, which a donated step writes into.
            kept = Tensor.clone if self.donate else Tensor.detach
            aux, value = map_tensors(kept, (aux, value))
            return grads, widened(value), aux, kept_dtypes(new, buffers), finite


@dataclass(frozen=True, eq=False)
class OfSamples:
    """Means of the gradients of single samples, here and wherever else there are some.

    Attributes:
        weighted: sums them, with the losses as aux.
    """

    weighted: Any

    def compute(
        self, params: Params, buffers: Buffers, batch: tuple, scale: LossScale
    ) -> tuple:
        """Return the same as `OfBatch.compute`."""
        samples = batches.read("train_step", batch)
        scaled = is_scaled(scale)
        compute = self.weighted.with_loss_scale(scale) if scaled else self.weighted
        ones = torch.ones(samples.size, device=samples.tensors[0].device)
        sums, losses = compute(ones, params, buffers, *batch)
        if losses is None:
            raise ValueError(
                "train_step(loss)(state, *batch): expected a sample at least, got a "
                "batch of none, which has no mean. Skip the step."
            )
        grads = map_values(lambda total: total / len(losses), sums)
        finite = all_finite(grads) if scaled else torch.tensor(True)
        return grads, widened(losses).mean(), (), buffers, finite


def _with_value(loss: LossFn) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a loss of one sample that has its value as aux."""

    def run(params: Params, buffers: Buffers, /, *sample: Tree) -> tuple:
        value = loss(params, buffers, *sample)
        return value, value

    return run


def private_step(
    loss: LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    passes: Passes = 1,
    strategy: Strategy = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    has_aux: bool = False,
) -> Step[TrainState]:
    """Make a step of DP-SGD: clip every sample, sum, add noise once, optimizer.

    `(state, *batch) -> (state, metrics)`, where the batch is one logical batch as the
    plan's sampler draws it, empty ones included; `chunk_size` only says how much of it
    is processed at a time, `passes` how often (see `clipped_grad`). The clipped sum is
    divided by the expected batch size. Buffers do not change: statistics of private
    data would be released without noise.

    Noise follows from the state's key and step. A step repeated from the same state on
    the same batch is the same release, so a run may resume from a checkpoint; batches
    must then come from `plan.sampler(state)`, which repeats them too. A step on another
    batch, or with another loss or optimizer, needs `state.fork()` first. A state that
    has spent under another plan needs one that accounts for both, `plan.after`.

    The metrics are `loss` (mean over the batch, NaN where it is empty), `samples`,
    `clipped` and `nonfinite`. They are computed from the private data without noise:
    publishing them voids the guarantee.

    Under a `policy` the loss runs in its dtypes; norms, sums, noise and the optimizer
    stay in float32 or wider. A loss scale (of a policy that computes in float16
    `StaticLossScale(2**10)` by default) is taken out of every sample before clipping,
    so neither the bound nor the noise depends on it. A sample that overflows adds zero
    and is counted; the step is never skipped, which would depend on the data. The
    history of a `DynamicLossScale` does depend on them, without noise: choose it where
    the state, which holds the scale, stays private.

    Aux is stacked over the samples (`None` for an empty batch): private data too.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133.

    Args:
        passes: backward passes that clip, 1 or 2 (see `clipped_grad`).
        strategy, chunk_size, randomness: see `vgrad.persample.Options`.
        policy, loss_scale, donate, has_aux: as in `train_step`.

    Raises:
        RuntimeError: when called, if the plan's steps have all been taken, or the state
            counts fewer than none.
        ValueError: when called, if the batch has more samples than the data set, or the
            state has spent under another plan.
    """
    check_loss("private_step", loss)
    check_transformation("private_step", tx)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"private_step(plan): expected a dp.Plan, got a {type(plan).__name__}. "
            f"Make one with dp.Plan.for_epsilon; train_step trains without privacy."
        )
    default = StaticLossScale(2.0**10)
    scale = initial_loss_scale("private_step", loss_scale, policy, default)
    clipped = clipped_grad(
        with_policy(policy, loss),
        max_norm=plan.max_norm,
        normalize_by=plan.expected_batch_size,
        passes=passes,
        strategy=strategy,
        chunk_size=chunk_size,
        randomness=randomness,
        has_aux=has_aux,
    )
    return PrivateStep(clipped, tx, plan, scale, donate, has_aux)


@dataclass(frozen=True, eq=False)
class PrivateStep:
    """The step of `private_step`.

    Attributes:
        clipped: computes the clipped sum.
        scale: the loss scale of the first step.
        run: how the optimizer is run.
    """

    clipped: Any
    tx: GradientTransformation
    plan: Plan
    scale: LossScale | None
    donate: bool
    has_aux: bool
    run: Run = run_eager

    def __call__(
        self, state: TrainState, /, *batch: Tree
    ) -> tuple[TrainState, Metrics]:
        """Take a step."""
        check_state("private_step(loss, tx, plan)", state, TrainState)
        function, plan, taken = "private_step(plan)(state)", self.plan, int(state.step)
        identity = check_spent(function, plan, state.plan_digest, taken)
        if not 0 <= taken < plan.steps:
            raise RuntimeError(
                f"{function}: expected a state of fewer than the {plan.steps} steps "
                f"that the plan accounts for, got {taken}."
            )
        size = batches.read("private_step", batch).size
        if size > plan.dataset_size:
            raise ValueError(
                f"private_step(plan)(state, *batch): expected a batch of at most the "
                f"{plan.dataset_size} samples of the plan's data set, got {size}. Draw "
                f"batches with plan.sampler(state)."
            )
        scale = scale_of(state, self.scale)
        scaled = is_scaled(scale)
        compute = self.clipped.with_loss_scale(scale) if scaled else self.clipped
        with torch.no_grad(), seeded_from(state):
            result = compute(state.params, state.buffers, *batch)
            result, aux = result if self.has_aux else (result, None)
            grads = plan.add_noise(
                result.grads, compute.sensitivity, key=state.key, step=taken
            )
            params, optimizer = apply_optimizer(
                self.run, self.tx, grads, state, state.buffers, donate=self.donate
            )
        metrics = {
            "loss": widened(result.losses).mean(),
            "samples": torch.tensor(len(result.losses)),
            "clipped": result.clipped,
            "nonfinite": result.nonfinite,
        }
        if self.has_aux:
            metrics["aux"] = aux
        new = state._replace(
            params=params,
            optimizer=optimizer,
            step=state.step + 1,
            plan_digest=as_digest(identity).to(state.plan_digest.device),
            loss_scale=scale.adjust(result.nonfinite == 0),
        )
        return new, metrics


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
        in_dims, randomness, strategy, shared: as in `ensemble_grad`.
        policy, loss_scale, donate, has_aux: as in `train_step`.

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


@dataclass(frozen=True, eq=False)
class EnsembleStep:
    """The step of `ensemble_train_step`.

    Attributes:
        scale: the loss scale of the first step.
        run: how all but the random numbers of a step is computed.
        reducer: sums over members that other processes train (`vgrad.distributed`).
    """

    gradient: EnsembleGradFn
    tx: GradientTransformation
    scale: LossScale | None
    in_dims: InDims
    shared: Patterns
    donate: bool
    has_aux: bool
    run: Run = run_eager
    reducer: Any = None
    name: ClassVar = "ensemble_train_step"

    def __call__(
        self, state: EnsembleState, /, *batch: Tree
    ) -> tuple[EnsembleState, Metrics]:
        """Take a step."""
        check_state("ensemble_train_step(loss, tx)", state, EnsembleState)
        # Early stopping may count on the CPU.
        active = state.active.to(device_of(state.params))
        state = state._replace(active=active)
        scale = for_each(scale_of(state, self.scale), len(active))
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

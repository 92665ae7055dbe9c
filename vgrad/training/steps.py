"""Ordinary and private steps: `step(state, *batch) -> (new state, metrics)`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vgrad import batches
from vgrad.dp.plan import Plan, as_digest, check_spent
from vgrad.ensemble.gradients import returning_buffers
from vgrad.functional.losses import SampleLoss, check_loss, gradient
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
    Metrics,
    Run,
    Step,
    TrainState,
    apply_optimizer,
    check_state,
    initial_loss_scale,
    is_scaled,
    kept_dtypes,
    run_eager,
    scale_of,
    seeded_from,
    with_policy,
)
from vgrad.tree import map_tensors, map_values, widened
from vgrad.typing import (
    BatchLossFn,
    Buffers,
    ChunkSize,
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
        strategy: how gradients come about: `"recorded"` in one backward pass, `"vmap"`,
            `"loop"` sample by sample; `"auto"` takes the first of these that can.
        chunk_size: samples at a time; None for all, `"auto"` for what fits into memory.
        randomness: of random ops: `"error"`, `"different"` for each sample, `"same"`.
        policy: dtypes of the passes, a `Policy` or its text; None for those given.
        loss_scale: multiplies losses before the backward pass; results are without it.
        donate: the step may write into the old state, which must not be used again.
        has_aux: the loss returns `(scalar, aux)`, and `metrics["aux"]` holds aux.

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
class TrainStep:
    """The step of `train_step`.

    Attributes:
        gradients: a function of gradients, loss, aux, buffers, and whether gradients
            are finite.
        scale: the loss scale of the first step.
        run: how gradients of batches are computed, and the optimizer run.
        reduce: makes gradients and loss those of all that take part in the step, from
            the function that computes them here, and the state.
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

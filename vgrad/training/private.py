"""The step of private training: DP-SGD as a pure function of a state."""

from dataclasses import dataclass
from typing import Any

import torch

from vgrad import batches
from vgrad.dp.plan import Plan, as_digest, check_spent
from vgrad.functional.losses import check_loss
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.persample.clipped import clipped_grad
from vgrad.precision import LossScale, NoOpLossScale, Policy, StaticLossScale
from vgrad.training.state import (
    Metrics,
    Run,
    Step,
    TrainState,
    at_once,
    check_state,
    first_scale,
    own_randomness,
    scale_of,
    under,
    updated,
)
from vgrad.tree import widened
from vgrad.typing import ChunkSize, LossFn, Passes, Randomness, Strategy, Tree


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
        TypeError: the loss is no function, a model, or one of a whole batch, `tx` is no
            transformation or `plan` no plan.
        RuntimeError: when called, if the plan's steps have all been taken, or the state
            says that fewer than none were.
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
    first = first_scale("private_step", loss_scale, policy, StaticLossScale(2.0**10))
    clipped = clipped_grad(
        under(policy, loss),
        max_norm=plan.max_norm,
        normalize_by=plan.expected_batch_size,
        passes=passes,
        strategy=strategy,
        chunk_size=chunk_size,
        randomness=randomness,
        has_aux=has_aux,
    )

    return PrivateStep(clipped, tx, plan, first, donate, has_aux)


@dataclass(frozen=True, eq=False)
class PrivateStep:
    """What `private_step` returns.

    Attributes:
        clipped: what computes the clipped sum.
        run: how the optimizer is run.
    """

    clipped: Any
    tx: GradientTransformation
    plan: Plan
    first: LossScale | None
    donate: bool
    has_aux: bool
    run: Run = at_once

    def __call__(
        self, state: TrainState, /, *batch: Tree
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the step, and what the step found."""
        check_state("private_step(loss, tx, plan)", state, TrainState)
        plan, taken = self.plan, int(state.step)
        digest, where = state.plan_digest, "private_step(plan)(state)"
        identity = check_spent(where, plan, digest, taken)
        _check(plan, taken, batches.read("private_step", batch).size)
        scale = scale_of(state, self.first)
        scaled = not isinstance(scale, NoOpLossScale)
        compute = self.clipped.with_loss_scale(scale) if scaled else self.clipped
        with torch.no_grad(), own_randomness(state):
            found = compute(state.params, state.buffers, *batch)
            result, aux = found if self.has_aux else (found, None)
            grads = plan.add_noise(
                result.grads, compute.sensitivity, key=state.key, step=taken
            )
            given = self.run, self.tx, grads, state, state.buffers
            params, optimizer = updated(*given, donate=self.donate)
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
            plan_digest=as_digest(identity).to(digest.device),
            loss_scale=scale.adjust(result.nonfinite == 0),
        )
        return new, metrics


def _check(plan: Plan, taken: int, size: int) -> None:
    """Refuse steps and samples that the plan does not account for."""
    if not 0 <= taken < plan.steps:
        raise RuntimeError(
            f"private_step(plan)(state): expected a state of fewer than the "
            f"{plan.steps} steps that the plan accounts for, got {taken}."
        )
    if size > plan.dataset_size:
        raise ValueError(
            f"private_step(plan)(state, *batch): expected a batch of at most the "
            f"{plan.dataset_size} samples of the plan's data set, got {size}. Draw "
            f"batches with plan.sampler(state)."
        )

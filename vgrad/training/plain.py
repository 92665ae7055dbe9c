"""The ordinary training step: `step(state, *batch) -> (new state, metrics)`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vgrad import batches
from vgrad.ensemble.gradients import returning_buffers
from vgrad.functional.losses import SampleLoss, check_loss, gradient
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.persample.grad import weighted_grad
from vgrad.precision import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    Policy,
    all_finite,
    select_tree,
)
from vgrad.precision.autocasting import AutocastMode
from vgrad.training.state import (
    Metrics,
    Run,
    Step,
    TrainState,
    at_once,
    check_state,
    first_scale,
    kept_dtypes,
    own_randomness,
    scale_of,
    under,
    updated,
)
from vgrad.tree import map_tensors, map_values, widened
from vgrad.typing import BatchLossFn, Buffers, LossFn, Params, Tree


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
    `(params, buffers, *batch) -> scalar`. Without `.with_buffers` it changes none.
    From `sample_loss` it is that of one sample: the step takes the mean over the batch
    and changes no buffers.

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
        TypeError: the loss is no function, a model, or has no aux, or `tx` is no
            transformation.
        ValueError: when called, if it returns something else than a scalar, or a loss
            of one sample gets a batch without any.

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
    first = first_scale("train_step", loss_scale, policy, DynamicLossScale())
    check_transformation("train_step", tx)
    if isinstance(loss, SampleLoss):
        if has_aux:
            raise TypeError(
                "train_step(loss, has_aux=True): expected a loss that returns "
                "(scalar, aux), got one from sample_loss, which has no aux. Write a "
                "loss of a whole batch."
            )
        run = _with_value(under(policy, loss))
        gradients = OfSamples(weighted_grad(run, randomness="different", has_aux=True))
    else:
        check_loss("train_step", loss, of_batch=True)
        run = returning_buffers("train_step", under(policy, loss), has_aux=has_aux)
        gradients = OfBatch(run, has_aux, donate)
    return TrainStep(gradients, tx, first, donate, has_aux)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """What `train_step` returns.

    Attributes:
        gradients: what computes gradients, loss, aux, buffers, and whether gradients
            are finite.
        run: how gradients of batches are computed, and the optimizer run.
        over: what makes gradients and loss those of all that take part in the step,
            given what computes them here and the state.
    """

    gradients: "OfBatch | OfSamples"
    tx: GradientTransformation
    first: LossScale | None
    donate: bool
    has_aux: bool
    run: Run = at_once
    over: Callable[[Callable[[], tuple], TrainState], tuple] | None = None
    name: ClassVar = "train_step"

    def __call__(
        self, state: TrainState, /, *batch: Tree
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the step, and what the step found."""
        check_state("train_step(loss, tx)", state, TrainState)
        scale = scale_of(state, self.first)
        scaled = not isinstance(scale, NoOpLossScale)
        given = state.params, state.buffers, batch, scale
        with torch.no_grad(), own_randomness(state):
            if isinstance(self.gradients, OfBatch):
                compute = partial(self.run, self.gradients.of, *given)
            else:
                compute = partial(self.gradients.of, *given)
            found = compute() if self.over is None else self.over(compute, state)
            grads, value, aux, buffers, finite = found
            # What is skipped needs the old state; to look is free on a CPU alone.
            taken = not scaled or (self.donate and finite.is_cpu and bool(finite))
            donate = self.donate and taken
            params, optimizer = updated(
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
        params, buffers, optimizer = new
        return state._replace(
            params=params,
            buffers=buffers,
            optimizer=optimizer,
            step=state.step + 1,
            loss_scale=scale,
        ), metrics


@dataclass(frozen=True, eq=False)
class OfBatch:
    """Gradients of the loss of a batch.

    Attributes:
        loss: what returns a loss, with aux if there is one, and new buffers.
    """

    loss: Callable[..., tuple[Any, Buffers]]
    has_aux: bool
    donate: bool
    name: ClassVar = "train_step"

    def of(
        self, params: Params, buffers: Buffers, batch: tuple, scale: LossScale
    ) -> tuple:
        """Compute them in a forward and a backward pass."""

        def of_params(params: Params) -> tuple[Tensor, tuple]:
            with AutocastMode(params.values()):
                found, new = self.loss(params, buffers, *batch)
            value, aux = found if self.has_aux else (found, ())
            return scale.scale(value), (value, aux, new)

        with torch.no_grad():
            grads, (value, aux, new), _ = gradient(of_params, params)
            grads = scale.unscale(grads)
            scaled = not isinstance(scale, NoOpLossScale)
            finite = all_finite(grads) if scaled else torch.tensor(True)
            # Either may be a parameter, which a donated step writes into.
            kept = Tensor.clone if self.donate else Tensor.detach
            aux, value = map_tensors(kept, (aux, value))
            value = widened(value)
            return grads, value, aux, kept_dtypes(new, buffers), finite


@dataclass(frozen=True, eq=False)
class OfSamples:
    """Means of the gradients of single samples.

    Attributes:
        weighted: what sums them, with the losses as aux.
    """

    weighted: Any

    def of(
        self, params: Params, buffers: Buffers, batch: tuple, scale: LossScale
    ) -> tuple:
        """Sum them, here and wherever else there are samples, and divide the sum."""
        read = batches.read("train_step", batch)
        scaled = not isinstance(scale, NoOpLossScale)
        compute = self.weighted.with_loss_scale(scale) if scaled else self.weighted
        ones = torch.ones(read.size, device=read.tensors[0].device)
        sums, losses = compute(ones, params, buffers, *batch)
        if losses is None:
            raise ValueError(
                "train_step(loss)(state, *batch): expected a sample at least, got a "
                "batch of none, which has no mean. Skip the step."
            )
        grads = map_values(lambda each: each / len(losses), sums)
        finite = all_finite(grads) if scaled else torch.tensor(True)
        return grads, widened(losses).mean(), (), buffers, finite


def _with_value(loss: LossFn) -> Callable[..., tuple[Tensor, Tensor]]:
    """Let a loss of one sample return itself as aux."""

    def run(params: Params, buffers: Buffers, /, *sample: Tree) -> tuple:
        value = loss(params, buffers, *sample)
        return value, value

    return run

"""K-fold cross-validation, from start to end or from where a killed run stopped.

K folds, E of them at once, n samples.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vgrad import batches, checks, tree
from vgrad.ensemble.resampling import fold_indices
from vgrad.ensemble.stacking import made, member_seed, stack
from vgrad.functional.losses import Criterion, batch_loss
from vgrad.functional.model import FunctionalModel
from vgrad.generators import secret_key
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.precision import DynamicLossScale, LossScale, Policy
from vgrad.training.ensemble import EnsembleState, ensemble_train_step
from vgrad.training.folds import Folds
from vgrad.training.saved import load, save
from vgrad.training.state import Step, device_of, first_scale
from vgrad.training.validation import Figures, Metric, Validation
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness, Tree


class FoldEpoch(NamedTuple):
    """What an epoch of some folds came to, `[E]`, in the terms of `CrossValidation`.

    Attributes:
        folds: which folds these are, those that are trained at once.
        epoch: its number, from 0 on.
    """

    folds: range
    epoch: int
    train_losses: Tensor
    losses: Tensor
    skipped: Tensor
    scores: Tensor | None = None


class CrossValidation(NamedTuple):
    """What `cross_validate` found; figures are float64, and all is on the CPU.

    Attributes:
        params: the parameters after the last epoch, `[K, ...]`.
        buffers: the buffers, likewise.
        train_losses: means over the batches of an epoch, each before its step,
            `[K, epochs]`.
        losses: those of the fold that was left out, after each epoch, `[K, epochs]`.
        skipped: how many steps of an epoch were skipped, as their gradients were not
            finite, `[K, epochs]`.
        scores: what the metric says of the fold that was left out, `[K, epochs]`; None
            without a metric.
    """

    params: Params
    buffers: Buffers
    train_losses: Tensor
    losses: Tensor
    skipped: Tensor
    scores: Tensor | None = None


def cross_validate(
    factory: Callable[[int], nn.Module],
    criterion: Criterion,
    tx: GradientTransformation,
    *data: Tree,
    folds: int,
    epochs: int,
    batch_size: int,
    seed: int,
    at_once: int | None = None,
    metric: Metric | None = None,
    randomness: Randomness = "different",
    strategy: EnsembleStrategy = "auto",
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    folder: Path | str | None = None,
    tell: Callable[[FoldEpoch], None] | None = None,
) -> CrossValidation:
    """Train K models, each on all but its fold of n samples, and judge it on the fold.

    Fold k is `validation[k]` of `vgrad.ensemble.fold_indices(folds, n, seed=seed)`.
    With `l` the criterion, `v` its samples and `f_k` the model trained on the others,
    the loss of fold k after an epoch is

        losses[k, epoch] = l(f_k(x[v]), y[v])

    computed `batch_size` samples at a time, weighted by their number: the criterion has
    to be a mean over samples. `factory(k)` makes the model of fold k, in training mode,
    after `torch.manual_seed(member_seed(seed, k))`; validation is in evaluation mode.
    `data` are tensors `[n, ...]`, inputs and then targets, as `batch_loss` takes them.
    Each batch is moved to where the parameters are, so the data may stay on the CPU.

    In each epoch fold k sees all of its samples once, in an order that follows from
    seed, k and epoch alone; the last batch may be smaller. `tx`, of one model, starts
    anew for each fold. The folds are members of an ensemble, `at_once` of them at a
    time, by default all: right for small models. Large ones run one after the other
    (`at_once=1`), each as fast as `train_step` runs it. Without random numbers in the
    model, all choices of `at_once` give the same result up to rounding; with them,
    masks are others. `metric(output, target)` gets all samples of a fold, the output in
    the output dtype of the policy, and returns a number.

    A `folder` holds the state of the folds, written after each epoch, before `tell` is
    called with what the epoch came to. If this process ends, the same call goes on from
    there; on a CPU with the bits of a run that was never interrupted. Functions cannot
    be compared: pass the same model, criterion, optimizer and metric.

    Cost: K runs of `epochs * n * (K - 1) / K` samples. Memory: that of `at_once` runs,
    and parameters and buffers of all K on the CPU at the end; with a metric the outputs
    of a whole fold. With a `folder` the data are hashed once.

    Reference: Stone, Cross-validatory choice and assessment of statistical predictions,
    Journal of the Royal Statistical Society B 36(2), 1974.

    Args:
        randomness: of random ops: `"error"`, `"different"` for each member, `"same"`.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        policy: dtypes of the passes, a `Policy` or its text; None for those given.
        loss_scale: multiplies losses before the backward pass; results are without it.

    Raises:
        ValueError: a number is too small, sizes do not fit, the models of two folds are
            not alike, or the folder holds a damaged file or one of another call; the
            message says in what it differs, and nothing is overwritten.
        UnsupportedOp: as `ensemble_train_step`.

    Example:
        >>> from vgrad import optim
        >>> x = torch.linspace(-1, 1, 30).reshape(30, 1)
        >>> found = cross_validate(
        ...     lambda fold: nn.Linear(1, 1), nn.functional.mse_loss, optim.sgd(0.3),
        ...     x, 2 * x + 1, folds=3, epochs=20, batch_size=5, seed=0,
        ... )
        >>> found.losses.shape
        torch.Size([3, 20])
        >>> bool(found.losses[:, -1].max() < 1e-3)
        True
    """
    function = "cross_validate"
    check_transformation(function, tx)
    size = batches.read(function, data).size
    epochs, batch_size = checks.whole(
        function, least=1, epochs=epochs, batch_size=batch_size
    )
    if at_once is not None:
        [at_once] = checks.whole(function, least=1, at_once=at_once)
    if metric is not None and criterion is None:
        raise ValueError(
            f"{function}(criterion=None, metric): expected a criterion, which takes an "
            f"output and a target as the metric does, got a model that returns its "
            f"loss. Leave out the metric."
        )
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    job = _Job(
        factory=factory,
        criterion=criterion,
        tx=tx,
        folds=Folds(data, *fold_indices(folds, size, seed=seed), batch_size, seed),
        epochs=epochs,
        at_once=at_once or folds,
        metric=metric,
        options={"in_dims": 0, "randomness": randomness, "strategy": strategy},
        policy=policy,
        scale=first_scale(function, loss_scale, policy, DynamicLossScale()),
        folder=None if folder is None else Path(folder),
        tell=tell,
    )
    found: list[_Trained] = []
    for start in range(0, folds, job.at_once):
        found.append(_trained(job, range(folds)[start : start + job.at_once], found))
    params, buffers, figures = tree.tree_map(lambda *each: torch.cat(each), *found)
    return CrossValidation(params, buffers, **figures)


_Trained = tuple[Params, Buffers, Figures]
"""What became of some folds, on the CPU."""


@dataclass(frozen=True)
class _Job:
    """What is the same for all folds."""

    factory: Callable[[int], nn.Module]
    criterion: Criterion
    tx: GradientTransformation
    folds: Folds
    epochs: int
    at_once: int
    metric: Metric | None
    options: dict[str, Any]
    policy: Policy | None
    scale: LossScale | None
    folder: Path | None
    tell: Callable[[FoldEpoch], None] | None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What has to be the same when the run goes on, as JSON has it."""
        return {
            **self.folds.described(),
            "epochs": self.epochs,
            "at_once": self.at_once,
            "metric": self.metric is not None,
            "policy": str(self.policy),
            **self.options,
        }

    def start(self, which: range) -> tuple[FunctionalModel, EnsembleState]:
        """Make the models of some folds, and their state before the first step."""
        seed = self.folds.seed
        makes = [partial(self.factory, fold) for fold in which]
        seeds = [member_seed(seed, fold) for fold in which]
        models = made("cross_validate(factory)", makes, seeds)
        fmodel, *entries = stack(models)
        state = EnsembleState.create(self.tx, *entries, loss_scale=self.scale)
        key = secret_key(seed=seed, member=which.start)
        return fmodel, state._replace(key=key)


def _trained(job: _Job, which: range, before: Sequence[_Trained]) -> _Trained:
    """Train the models of some folds, from where a file says they are."""
    fmodel, state = job.start(which)
    if before:
        shapes, given = (
            {name: each[0] for name, each in params.items()}
            for params in (before[0][0], state.params)
        )
        tree.check_fit("cross_validate(factory)", shapes, given)
    device = device_of(state.params)
    step = ensemble_train_step(
        batch_loss(fmodel, job.criterion),
        job.tx,
        policy=job.policy,
        loss_scale=job.scale,
        donate=True,
        **job.options,
    )
    judge = Validation(fmodel, job.criterion, job.metric, job.policy, job.options)
    names = ["train_losses", "skipped", "losses"]
    names += [] if job.metric is None else ["scores"]
    blank = torch.full((len(which), job.epochs), torch.nan, dtype=torch.float64)
    history, done = {name: blank.clone() for name in names}, torch.tensor(0)
    path = job.folder and job.folder / f"folds-{which.start}"
    if path is not None:
        start, old = (state, history, done), path.with_suffix(".safetensors")
        with suppress(FileNotFoundError):  # one of an older version is refused
            state, history, done = load(
                old if old.exists() else path, start, settings=job.settings
            )
    for epoch in range(int(done), job.epochs):
        state, figures = _epoch(step, state, job.folds.training(which, epoch, device))
        figures |= judge(state, job.folds.held_out(which, device))
        for name, values in figures.items():
            history[name][:, epoch] = values
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            reached = state, history, torch.tensor(epoch + 1)
            save(path, reached, settings=job.settings)
        if job.tell is not None:
            job.tell(FoldEpoch(which, epoch, **figures))
    return tree.to_device((state.params, state.buffers, history), "cpu")


def _epoch(
    step: Step[EnsembleState], state: EnsembleState, batches: Iterable[tuple]
) -> tuple[EnsembleState, Figures]:
    """Take a step on each of the batches; return what they came to, `[E]`."""
    losses, skipped, count = torch.zeros(()), torch.zeros(()), 0
    for batch in batches:
        size = tree.tensors(batch)[0].shape[1]
        state, metrics = step(state, *batch)
        losses, count = losses + metrics["loss"].double() * size, count + size
        skipped = skipped + metrics["skipped"].double()
    return state, {"train_losses": (losses / count).cpu(), "skipped": skipped.cpu()}

"""K-fold cross-validation, from start to end or from where a killed run stopped.

K folds, E of them at once, n samples.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vgrad import batches, checks, files, tree
from vgrad.ensemble.execution import Randomness, Strategy
from vgrad.ensemble.resampling import fold_indices
from vgrad.ensemble.stacking import made, stack
from vgrad.functional.losses import Criterion, batch_loss
from vgrad.functional.model import FunctionalModel
from vgrad.generators import secret_key, torch_seed
from vgrad.optim.base import GradientTransformation
from vgrad.precision import DynamicLossScale, LossScale, Policy
from vgrad.training.ensemble import EnsembleState, ensemble_train_step
from vgrad.training.saved_states import load_state, save_state
from vgrad.training.state import Step, device_of, first_scale
from vgrad.training.validation import Figures, Metric, Validation
from vgrad.typing import Buffers, Params, Tree


class FoldEpoch(NamedTuple):
    """What an epoch of the folds in training came to, `[E]` each, as `CrossValidation`.

    Attributes:
        folds: which folds these are.
        epoch: the number of the epoch, from 0 on.
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
    strategy: Strategy = "auto",
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
    masks are others. `metric(output, target)` gets all samples of a fold, and returns a
    number. The other options are those of `ensemble_train_step`.

    A `folder` holds the state of the folds, written after each epoch, before `tell` is
    called with what the epoch came to. If this process ends, the same call goes on from
    there; on a CPU with the bits of a run that was never interrupted. Functions cannot
    be compared: pass the same model, criterion, optimizer and metric.

    Cost: K runs of `epochs * n * (K - 1) / K` samples. Memory: that of `at_once` runs,
    and parameters and buffers of all K on the CPU at the end; with a metric the outputs
    of a whole fold. With a `folder` the data are hashed once.

    Reference: Stone, Cross-validatory choice and assessment of statistical predictions,
    Journal of the Royal Statistical Society B 36(2), 1974.

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
    size = batches.read(function, data).size
    train, validation = fold_indices(folds, size, seed=seed)
    at_once = folds if at_once is None else at_once
    checks.whole(
        function, least=1, epochs=epochs, batch_size=batch_size, at_once=at_once
    )
    if metric is not None and criterion is None:
        raise ValueError(
            f"{function}(criterion=None, metric): expected a criterion, which takes an "
            f"output and a target as the metric does, got a model that returns its "
            f"loss. Leave out the metric."
        )
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    job = _Job(
        *(factory, criterion, tx, data, train, validation, epochs, batch_size, seed),
        options={"in_dims": 0, "randomness": randomness, "strategy": strategy},
        metric=metric,
        policy=policy,
        scale=first_scale(function, loss_scale, policy, DynamicLossScale()),
    )
    settings = {} if folder is None else job.settings(at_once)
    found: list[tuple[Params, Buffers, Figures]] = []
    for start in range(0, folds, at_once):
        group = range(folds)[start : start + at_once]
        path = None if folder is None else Path(folder, f"folds-{start}.safetensors")
        found.append(_trained(job, group, path, settings, tell))
        first, last = ({n: p[0] for n, p in found[i][0].items()} for i in (0, -1))
        tree.check_fit(f"{function}(factory)", first, last)
    params, buffers, figures = tree.tree_map(lambda *each: torch.cat(each), *found)
    return CrossValidation(params, buffers, **figures)


@dataclass(frozen=True)
class _Job:
    """What is the same for all folds."""

    factory: Callable[[int], nn.Module]
    criterion: Criterion
    tx: GradientTransformation
    data: tuple[Tree, ...]
    train: Tensor
    validation: Tensor
    epochs: int
    batch_size: int
    seed: int
    options: dict[str, Any]
    metric: Metric | None
    policy: Policy | None
    scale: LossScale | None

    def settings(self, at_once: int) -> dict[str, Any]:
        """Return what has to be the same when the run goes on, as JSON has it."""
        given = {str(i): each for i, each in enumerate(tree.tensors(self.data))}
        return {
            "folds": len(self.train),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "at_once": at_once,
            **self.options,
            "metric": self.metric is not None,
            "policy": str(self.policy),
            "data": [f"{each.dtype} {tuple(each.shape)}" for each in given.values()],
            "sha256 of data": files.digest(given),
        }

    def start(self, folds: range) -> tuple[FunctionalModel, EnsembleState]:
        """Make the models of some folds, and their state before the first step."""
        models = made("cross_validate", self.factory, folds, seed=self.seed)
        fmodel, *entries = stack(models)
        state = EnsembleState.create(
            self.tx, *entries, seed=self.seed, loss_scale=self.scale
        )
        key = secret_key(seed=self.seed, member=folds.start)
        return fmodel, state._replace(key=key)

    def shuffled(self, folds: range, epoch: int) -> Tensor:
        """Shuffle the samples that each of the folds is trained on: `[E, n_train]`."""
        orders = []
        for fold in folds:
            key = secret_key(seed=self.seed, member=fold)
            source = torch.Generator().manual_seed(torch_seed(key, "epoch", epoch))
            orders.append(torch.randperm(self.train.shape[1], generator=source))
        return self.train[folds.start : folds.stop].gather(1, torch.stack(orders))

    def batches(self, rows: Tensor, device: torch.device) -> Iterator[tuple]:
        """Yield the samples of indices `[E, ...]` in batches `[E, B, ...]`."""
        for part in rows.split(self.batch_size, 1):
            yield tree.map_tensors(
                lambda x, part=part: x[part.to(x.device)].to(device), self.data
            )


def _trained(
    job: _Job,
    folds: range,
    path: Path | None,
    settings: dict[str, Any],
    tell: Callable[[FoldEpoch], None] | None,
) -> tuple[Params, Buffers, Figures]:
    """Train the models of some folds to the end, and return all to the CPU."""
    fmodel, state = job.start(folds)
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
    held_out = job.validation[folds.start : folds.stop]
    names = ["train_losses", "skipped", "losses"]
    names += [] if job.metric is None else ["scores"]
    blank = torch.full((len(folds), job.epochs), torch.nan, dtype=torch.float64)
    history = {name: blank.clone() for name in names}
    if path is not None and path.exists():
        state, history = load_state(path, (state, history), settings=settings)
    done = int(state.step) // math.ceil(job.train.shape[1] / job.batch_size)
    for epoch in range(done, job.epochs):
        rows = job.shuffled(folds, epoch)
        state, figures = _epoch(step, state, job.batches(rows, device))
        figures |= judge(state, job.batches(held_out, device))
        for name, values in figures.items():
            history[name][:, epoch] = values
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_state(path, (state, history), settings=settings)
        if tell is not None:
            tell(FoldEpoch(folds, epoch, **figures))
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

"""K-fold cross-validation, resumed after a kill, and early stopping of members.

K folds, E of them at once, n samples.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vgrad import batches, checks, files, tree
from vgrad.ensemble import execution
from vgrad.ensemble.layout import EnsembleOptions, MemberCall
from vgrad.ensemble.resampling import fold_indices
from vgrad.ensemble.stacking import made, member_seed, stack
from vgrad.functional.losses import Criterion, batch_loss
from vgrad.functional.model import FunctionalModel
from vgrad.generators import secret_key, torch_seed
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.precision import DynamicLossScale, LossScale, Policy
from vgrad.training.saved import load, save
from vgrad.training.state import (
    EnsembleState,
    device_of,
    initial_loss_scale,
    seeded_from,
    with_policy,
)
from vgrad.training.steps import ensemble_train_step
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness, Tree

Metric = Callable[[Any, Any], Tensor | float]
"""A number of all outputs of a member, and of their targets."""

Figures = dict[str, Tensor]
"""Numbers of each member by name, `[E]` or `[E, epochs]`."""


class FoldEpoch(NamedTuple):
    """The figures of some folds after an epoch, `[E]`, as in `CrossValidation`.

    Attributes:
        folds: the numbers of the folds, which are trained at once.
        epoch: its number, from 0 on.
    """

    folds: range
    epoch: int
    train_losses: Tensor
    losses: Tensor
    skipped: Tensor
    scores: Tensor | None = None


class CrossValidation(NamedTuple):
    """The result of `cross_validate`, on the CPU; figures are float64.

    Attributes:
        params: the parameters after the last epoch, `[K, ...]`.
        buffers: the buffers, likewise.
        train_losses: means over the batches of an epoch, each before its step,
            `[K, epochs]`.
        losses: losses on the fold that was left out, after each epoch, `[K, epochs]`.
        skipped: numbers of steps of an epoch that were skipped, as their gradients were
            not finite, `[K, epochs]`.
        scores: the metric on the fold that was left out, `[K, epochs]`; None without a
            metric.
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
    callback: Callable[[FoldEpoch], None] | None = None,
) -> CrossValidation:
    """Train K models, each on all but its fold of n samples, and evaluate it on that.

    Fold k is `validation[k]` of `vgrad.ensemble.fold_indices(folds, n, seed=seed)`.
    With `l` the criterion, `v` its samples and `f_k` the model trained on the others,

        losses[k, epoch] = l(f_k(x[v]), y[v])

    computed `batch_size` samples at a time, weighted by their number: the criterion has
    to be a mean over samples. `factory(k)` makes the model of fold k, in training mode,
    after `torch.manual_seed(member_seed(seed, k))`; it is evaluated in evaluation mode.
    `data` are tensors `[n, ...]`, inputs and then targets, as `batch_loss` takes them.
    Each batch is moved to the device of the parameters: the data may stay on the CPU.

    In each epoch fold k sees all of its samples once, in an order that follows from
    seed, k and epoch alone; the last batch may be smaller. `tx` is a transformation of
    one model. The folds are members of an ensemble, `at_once` of them at a time, by
    default all: right for small models. Large ones run one after the other
    (`at_once=1`), each as fast as `train_step` runs it. Without random numbers in the
    model, the result is the same up to rounding. `metric(output, target)` gets all
    samples of a fold, the output in the output dtype of the policy, and returns a
    number.

    A `folder` holds the state of the folds, written after each epoch, before `callback`
    is called with its figures. If this process ends, the same call goes on from there;
    on a CPU with the bits of a run that was never interrupted. Functions cannot be
    compared: pass the same model, criterion, optimizer and metric.

    `randomness` and `strategy` are as in `ensemble_grad`, `policy` and `loss_scale` as
    in `train_step`.

    Cost: K runs of `epochs * n * (K - 1) / K` samples. Memory: `at_once` runs, and
    parameters and buffers of all K on the CPU at the end; with a metric the outputs of
    a whole fold. With a `folder` the data are hashed once.

    Reference: Stone, Cross-validatory choice and assessment of statistical predictions,
    Journal of the Royal Statistical Society B 36(2), 1974.

    Raises:
        ValueError: a number is too small, sizes do not fit, the models of two folds are
            not alike, or the folder holds a damaged file or one of another call; the
            message names the difference, and nothing is overwritten.

    Example:
        >>> from vgrad import optim
        >>> x = torch.linspace(-1, 1, 30).reshape(30, 1)
        >>> result = cross_validate(
        ...     lambda fold: nn.Linear(1, 1), nn.functional.mse_loss, optim.sgd(0.3),
        ...     x, 2 * x + 1, folds=3, epochs=20, batch_size=5, seed=0,
        ... )
        >>> result.losses.shape, bool(result.losses[:, -1].max() < 1e-3)
        (torch.Size([3, 20]), True)
    """
    function = "cross_validate"
    check_transformation(function, tx)
    size = batches.read(function, data).size
    trained, held_out = fold_indices(folds, size, seed=seed)
    at_once = folds if at_once is None else at_once
    epochs, batch_size, at_once = checks.whole(
        function, least=1, epochs=epochs, batch_size=batch_size, at_once=at_once
    )
    if metric is not None and criterion is None:
        raise ValueError(
            f"{function}(criterion=None, metric): expected a criterion, which takes an "
            f"output and a target as the metric does, got a model that returns its "
            f"loss. Leave out the metric."
        )
    policy = None if policy is None else Policy.parse(policy)
    scale = initial_loss_scale(function, loss_scale, policy, DynamicLossScale())
    options: EnsembleOptions
    options = {"in_dims": 0, "randomness": randomness, "strategy": strategy}
    call = MemberCall.of(function, **options)
    settings: dict[str, Any] = {}
    if folder is not None:  # settings that have to be the same when the run goes on
        named = {str(i): x for i, x in enumerate(tree.tensors(data))}
        settings = {
            "folds": folds,
            "batch_size": batch_size,
            "seed": seed,
            "data": [f"{x.dtype} {tuple(x.shape)}" for x in named.values()],
            "sha256 of data": files.digest(named),
            "epochs": epochs,
            "at_once": at_once,
            "metric": metric is not None,
            "policy": str(policy),
            **options,
        }

    def shuffled(which: range, epoch: int) -> Tensor:
        """Return the samples of an epoch, `[E, samples]`, shuffled for each fold."""
        orders = []
        for fold in which:
            drawn = torch_seed(secret_key(seed=seed, member=fold), "epoch", epoch)
            source = torch.Generator().manual_seed(drawn)
            orders.append(torch.randperm(trained.shape[1], generator=source))
        return trained[which.start : which.stop].gather(1, torch.stack(orders))

    def batches_of(rows: Tensor, device: torch.device) -> Iterator[tuple[int, tuple]]:
        """Yield B and the batches `[E, B, ...]` of these samples."""
        for part in rows.split(batch_size, 1):
            yield (
                part.shape[1],
                tree.map_tensors(
                    lambda x, part=part: x[part.to(x.device)].to(device), data
                ),
            )

    def evaluated(
        fmodel: FunctionalModel, state: EnsembleState, rows: Tensor
    ) -> Figures:
        """Return mean `losses` and `scores` on samples, `[E]`, float64 on the CPU."""

        def of_member(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
            outputs: list[Tree] = []  # none without a metric

            def noted(output: Any, target: Any) -> Tensor:
                outputs.append(output)
                return criterion(output, target)  # pyright: ignore[reportOptionalCall]

            loss = batch_loss(fmodel, noted if metric else criterion)
            return (loss(params, buffers, *batch), outputs), {}

        run = with_policy(policy, of_member)
        total, outputs, scores = torch.zeros(()), [], []
        with torch.no_grad(), seeded_from(state):
            for count, batch in batches_of(rows, device_of(state.params)):
                part = call.on(state.params, state.buffers, batch)
                (losses, output), _ = execution.run(run, part)
                total = total + losses.double() * count
                outputs.append((output, batch[-1]) if output else ())
            figures = {"losses": (total / rows.shape[1]).cpu()}
            if metric is None:
                return figures
            (output,), target = tree.tree_map(lambda *x: torch.cat(x, 1), *outputs)
            if policy is not None:
                output = policy.cast(output, to="output")
            for member in range(len(rows)):
                one = tree.map_tensors(lambda x, i=member: x[i], (output, target))
                score = torch.as_tensor(metric(*one), dtype=torch.float64)
                if score.numel() != 1:
                    raise ValueError(
                        f"metric(output, target): expected one number for all samples, "
                        f"got shape {tuple(score.shape)}. Reduce it in the metric."
                    )
                scores.append(score.detach().cpu().reshape(()))
        return {**figures, "scores": torch.stack(scores)}

    results: list[tuple[Params, Buffers, Figures]] = []
    for first in range(0, folds, at_once):
        which = range(folds)[first : first + at_once]
        makes = [partial(factory, fold) for fold in which]
        seeds = [member_seed(seed, fold) for fold in which]
        fmodel, *entries = stack(made(f"{function}(factory)", makes, seeds))
        state = EnsembleState.create(tx, *entries, loss_scale=scale)
        state = state._replace(key=secret_key(seed=seed, member=first))
        if results:
            shapes, own = (
                {name: value[0] for name, value in params.items()}
                for params in (results[0][0], state.params)
            )
            tree.check_fit(f"{function}(factory)", shapes, own)
        loss, in_evaluation = batch_loss(fmodel, criterion), fmodel.eval()
        common = {"policy": policy, "loss_scale": scale, **options}
        step = ensemble_train_step(loss, tx, donate=True, **common)
        names = ["train_losses", "skipped", "losses"]
        names += [] if metric is None else ["scores"]
        blank = torch.full((len(which), epochs), torch.nan, dtype=torch.float64)
        history, done = {name: blank.clone() for name in names}, torch.tensor(0)
        path = None if folder is None else Path(folder) / f"folds-{first}"
        if path is not None:
            start, old = (state, history, done), path.with_suffix(".safetensors")
            with suppress(FileNotFoundError):  # one of an older version is refused
                state, history, done = load(
                    old if old.exists() else path, start, settings=settings
                )
        for epoch in range(int(done), epochs):
            total, skipped = torch.zeros(()), torch.zeros(())
            rows = shuffled(which, epoch)
            for count, batch in batches_of(rows, device_of(state.params)):
                state, metrics = step(state, *batch)
                total = total + metrics["loss"].double() * count
                skipped = skipped + metrics["skipped"].double()
            losses = (total / rows.shape[1]).cpu()
            figures = {"train_losses": losses, "skipped": skipped.cpu()}
            rows = held_out[which.start : which.stop]
            figures |= evaluated(in_evaluation, state, rows)
            for name, values in figures.items():
                history[name][:, epoch] = values
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                reached = state, history, torch.tensor(epoch + 1)
                save(path, reached, settings=settings)
            if callback is not None:
                callback(FoldEpoch(which, epoch, **figures))
        ended = state.params, state.buffers, history
        results.append(tree.to_device(ended, "cpu"))
    params, buffers, figures = tree.tree_map(lambda *x: torch.cat(x), *results)
    return CrossValidation(params, buffers, **figures)


class EarlyStopping(NamedTuple):
    """The members that still improve; a tree of tensors, one entry for each member.

    Attributes:
        best: each member's best value so far, `[E]`.
        waited: the number of values in a row that were no better, `[E]`.
        patience: the number of such values after which a member stops.
        min_delta: how much lower a value has to be to count as better.

    Example:
        >>> stopping = EarlyStopping.create(2, patience=1)
        >>> for values in ([1.0, 1.0], [0.5, 1.0]):
        ...     stopping = stopping.update(torch.tensor(values))
        >>> stopping.active
        tensor([ True, False])
    """

    best: Tensor
    waited: Tensor
    patience: Tensor
    min_delta: Tensor

    without_members = ("patience", "min_delta")

    @classmethod
    def create(
        cls, members: int, *, patience: int, min_delta: float = 0.0
    ) -> "EarlyStopping":
        """Start without values; a lower value is a better one."""
        function = "EarlyStopping.create"
        members, patience = checks.whole(
            function, least=1, members=members, patience=patience
        )
        checks.non_negative(function, min_delta=min_delta)
        return cls(
            torch.full((members,), torch.inf, dtype=torch.float64),
            torch.zeros(members, dtype=torch.int64),
            torch.tensor(patience),
            torch.tensor(min_delta, dtype=torch.float64),
        )

    def update(self, values: Tensor) -> "EarlyStopping":
        """Take each member's value, `[E]`; NaN is never better, and no member restarts.

        The best parameters are not kept: save them where `waited` is zero.
        """
        if values.shape != self.best.shape:
            raise ValueError(
                f"EarlyStopping.update(values of shape {tuple(values.shape)}): "
                f"expected one value a member, {tuple(self.best.shape)}."
            )
        values = values.to(self.best)
        better = self.active & (values < self.best - self.min_delta)
        return self._replace(
            best=torch.where(better, values, self.best),
            waited=torch.where(better, 0, self.waited + 1),
        )

    @property
    def active(self) -> Tensor:
        """Whether each member goes on, bool `[E]`, for `EnsembleState.active`."""
        return self.waited < self.patience

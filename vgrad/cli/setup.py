"""A training run before its first step: data, models, plan and two trainers.

Private and plain SGD start from the same weights and take the same number of steps at
the same rate and batch size. The members of a deep ensemble, which have no privacy,
differ in initialisation and in batches.

Reference: Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty
Estimation using Deep Ensembles, arXiv 1612.01474.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from vgrad import dp, optim, tree
from vgrad.cli import data, models
from vgrad.cli.checkpoint import States
from vgrad.cli.data import Dataset
from vgrad.cli.evaluate import ROWS
from vgrad.cli.models import Shape
from vgrad.cli.settings import Settings
from vgrad.compiled import compile
from vgrad.distributed import Ranks, data_parallel
from vgrad.ensemble.prediction import ensemble_forward
from vgrad.ensemble.stacking import member_seed, stack
from vgrad.files import Description
from vgrad.functional.losses import batch_loss, sample_loss
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.generators import fold_in, kept_random_state, torch_seed
from vgrad.persample.clipped import clipped_grad
from vgrad.precision import DynamicLossScale, StaticLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)
from vgrad.typing import Buffers, Params

_GRADIENT_BYTES = 2**28
_MOST_ROWS = 512


Model = tuple[FunctionalModel, Params, Buffers]


class Taken(NamedTuple):
    """The figures of a step."""

    loss: Tensor  # summed over the samples
    samples: int
    skipped: Tensor

    def plus(self, other: "Taken") -> "Taken":
        """Return the figures of both steps, whose tensors may be on two devices."""
        loss, samples = self.loss + other.loss, self.samples + other.samples
        return Taken(loss, samples, self.skipped + other.skipped)


Advance = Callable[[Any, Dataset], tuple[Any, Taken]]
"""A function that draws the batch that follows on a state, and takes a step on it."""


class Trainer(NamedTuple):
    """One way to train: a state, a step, and the epsilon of so many steps."""

    start: Any
    advance: Advance
    epsilon: Callable[[int], float | None]


class Job(NamedTuple):
    """Everything about a run that does not change while it runs."""

    settings: Settings
    data: Dataset
    plan: dp.Plan | None
    ends: list[int]  # the steps at the end of each epoch
    trainers: Mapping[str, Trainer]  # "private", unless without privacy, and "plain"
    scores: Callable[[Params, Buffers, Tensor], Tensor]  # -> [N, C] or [E, N, C]
    description: Description  # entries that must be the same when the run goes on

    def starts(self) -> States:
        """Return the states before the first step."""
        return States(**{run: x.start for run, x in self.trainers.items()})


def prepare(settings: Settings, mesh: DeviceMesh | None = None) -> Job:
    """Read the data, make the model or the members, plan the noise; write nothing."""
    dataset = data.load(settings.data, seed=settings.seed)
    settings = settings.fitted(len(dataset.y_train), dataset.shape)
    count, device = settings.members, torch.device(settings.device)
    epoch = len(dataset.y_train) / settings.batch_size
    if settings.noise.partition(":")[0] not in ("independent", "band-mf"):
        epoch = math.ceil(epoch)  # in a fixed order, whose last batch may be short
    ends = [round(number * epoch) for number in range(1, settings.epochs + 1)]

    seeds = [settings.seed]
    if count > 1:
        seeds = [member_seed(settings.seed, i) for i in range(count)]
    modules = [models.build(settings.model, dataset.shape, seed=seed) for seed in seeds]
    images = torch.zeros(2, *dataset.shape[:3], device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    model = _tried(settings, modules[0], dataset.classes, images, labels)
    if count > 1:
        model = stack(module.train().to(device) for module in modules)
    scores = models.under(settings.precision, model[0].eval())
    trainers = {"plain": _plain(settings, dataset, model, mesh)}
    plan, rows = None, None
    if count > 1:
        scores = ensemble_forward(scores, chunk_size=ROWS)
    else:
        # Others round differently. "auto" as a chunk size depends on free memory, which
        # may differ when a run goes on.
        gradient = sum(t.numel() * t.element_size() for t in model[1].values())
        rows = max(1, min(_MOST_ROWS, _GRADIENT_BYTES // gradient))
        plan = planned(settings, len(dataset.y_train), ends[-1])
        private = _private(settings, model, plan, rows, mesh)
        trainers = {"private": private, **trainers}
    description = {
        "arguments": dataclasses.asdict(settings),
        "plan": plan and dataclasses.asdict(plan),
        "sha256 of the data": data.digest(dataset),
        "held-out samples": len(dataset.y_test),
        "shape": dataset.shape._asdict(),
        "sha256 of the model's file": models.source_digest(settings.model),
        "chunk_size": rows,
        **_machine(settings),
    }
    description = json.loads(json.dumps(description))
    dataset = tree.to_device(dataset, device)
    return Job(settings, dataset, plan, ends, trainers, scores, description)


def planned(settings: Settings, size: int, steps: int) -> dp.Plan:
    """Plan the private steps."""
    scheme, _, bands = settings.noise.replace("-", "_").partition(":")
    noise = getattr(dp.noising, scheme)(*map(int, filter(None, [bands])))
    fields: dict[str, Any] = {"noise": noise}
    if (limit := settings.max_batch_size) != "none":
        fields["max_batch_size"] = int(limit) if limit.isdecimal() else limit
    try:
        return dp.Plan.for_epsilon(
            settings.epsilon,
            dataset_size=size,
            sampling_rate=settings.batch_size / size,
            max_norm=settings.max_norm,
            steps=steps,
            delta=settings.delta,
            **fields,
        )
    except ValueError as error:
        raise ValueError(f"{settings.of_plan()}: {error}") from error


def _tried(
    settings: Settings, module: nn.Module, classes: int, images: Tensor, labels: Tensor
) -> Model:
    # Two blank images show errors early.
    module = module.train().to(images.device)
    needs = "" if settings.without_privacy else " and has per-sample gradients"
    try:
        fmodel, params, buffers = make_functional_with_buffers(module)
        function = models.under(settings.precision, fmodel)
        with kept_random_state([images]):
            scores = function(params, buffers, images)
            if scores.shape != (2, classes):
                shape = tuple(scores.shape)
                raise ValueError(f"scores of shape {shape} for two images")
            if not settings.without_privacy:
                loss = sample_loss(function, F.cross_entropy)
                gradient = clipped_grad(loss, max_norm=1.0, randomness="different")
                gradient(params, buffers, images, labels)
    except Exception as error:
        # Code of the user's own may raise anything; the cause is kept.
        raise ValueError(
            f"--model {settings.model}: expected a model that scores {classes} classes "
            f"for images {list(images.shape[1:])}{needs}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    return fmodel, params, buffers


# The loss scales are the defaults of the steps. They are given here so that a state
# saved before the first step is the same tree as any other.


def _private(
    settings: Settings,
    model: Model,
    plan: dp.Plan,
    rows: int,
    mesh: DeviceMesh | None,
) -> Trainer:
    step, state = _private_start(settings, model, plan, rows)

    def draw(state: TrainState) -> Tensor:
        return plan.sample(key=state.key, step=int(state.step))

    # Without a seed the key is a secret.
    seed = settings.seed if settings.reproducible_noise else None
    state = state._replace(key=dp.secret_key(seed=seed))
    return Trainer(state, _advance(step, draw, mesh), plan.epsilon)


def _private_start(
    settings: Settings, model: Model, plan: dp.Plan, rows: int
) -> tuple[Any, TrainState]:
    (fmodel, *entries), tx = model, optim.sgd(settings.lr)
    step = private_step(
        sample_loss(fmodel, F.cross_entropy),
        tx,
        plan,
        chunk_size=rows,
        randomness="different",
        policy=models.POLICIES[settings.precision],
    )
    scale = StaticLossScale(2.0**10) if settings.precision == "float16" else None
    return _compiled(settings, step), TrainState.create(tx, *entries, loss_scale=scale)


def _compiled(settings: Settings, step: Any) -> Any:
    backend: Any = settings.compile
    return step if backend == "eager" else compile(step, backend=backend)


def audited(
    settings: Settings, shape: Shape, plan: dp.Plan, rows: int
) -> tuple[Any, TrainState]:
    """Return the step and a state of a private run, without its data."""
    module = models.build(settings.model, shape, seed=settings.seed)
    model = make_functional_with_buffers(module.train().to(settings.device))
    return _private_start(settings, model, plan, rows)


def _plain(
    settings: Settings,
    dataset: Dataset,
    model: Model,
    mesh: DeviceMesh | None,
) -> Trainer:
    fmodel, params, buffers = model
    tx, policy = optim.sgd(settings.lr), models.POLICIES[settings.precision]
    loss = batch_loss(fmodel, F.cross_entropy)
    create: Callable[..., Any] = TrainState.create
    step: Callable[..., Any] = train_step(loss, tx, policy=policy)
    size, members = len(dataset.y_train), settings.members
    if members > 1:
        create = EnsembleState.create
        step = ensemble_train_step(loss, tx, in_dims=0, policy=policy)

    def draw(state: Any) -> Tensor:
        seed = torch_seed(state.key, "batch", int(state.step))
        source = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(size, generator=source) for _ in range(members)]
        index = torch.stack([order[: settings.batch_size] for order in orders])
        return index if members > 1 else index[0]

    ranks = Ranks.of_all("train", mesh).size
    if members > 1 or buffers or settings.batch_size % ranks:
        mesh = None  # all of a batch on every rank
    scale = DynamicLossScale() if settings.precision == "float16" else None
    state = create(tx, params, buffers, loss_scale=scale)
    state = state._replace(key=fold_in(dp.secret_key(seed=settings.seed), "plain"))
    advance = _advance(_compiled(settings, step), draw, mesh)
    return Trainer(state, advance, lambda steps: None)


def _advance(
    step: Callable, draw: Callable[[Any], Tensor], mesh: DeviceMesh | None
) -> Advance:
    if mesh is not None:
        step = data_parallel(step, mesh)
    ranks = Ranks.of_all("train", mesh)
    rank, size = ranks.rank, ranks.size

    def run(state: Any, data: Dataset) -> tuple[Any, Taken]:
        index = draw(state)
        rows = index[len(index) * rank // size : len(index) * (rank + 1) // size]
        state, figures = step(state, data.x_train[rows], data.y_train[rows])
        samples, loss = index.numel(), torch.zeros(())
        if samples:  # the mean over no samples is no number
            loss = figures["loss"].double().mean() * samples
        skipped = figures.get("skipped", torch.zeros(())).sum()
        return state, Taken(loss, samples, skipped)

    return run


def _machine(settings: Settings) -> dict[str, Any]:
    """Describe the machine, on which rounding depends."""
    on_cuda = settings.device.startswith("cuda")
    machine = {
        "torch": torch.__version__,
        "threads (OMP_NUM_THREADS)": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(settings.device) if on_cuda else "cpu",
    }
    if settings.precision != "float32":
        machine["instructions in low precision"] = models.instructions()
    return machine

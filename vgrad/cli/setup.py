"""A training run before its first step: data, model, plan and two trainers.

Private and plain SGD start from the same weights and take the same number of steps at
the same rate and size of batch. They differ in clipping, in noise and in how batches
are drawn.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgrad import dp, optim
from vgrad.cli import data, models
from vgrad.cli.data import Dataset
from vgrad.cli.launched import World
from vgrad.cli.settings import Settings
from vgrad.compiled import compile
from vgrad.files import Description
from vgrad.functional.losses import batch_loss, sample_loss
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.generators import fold_in, kept_random_state, torch_seed
from vgrad.persample.clipped import clipped_grad
from vgrad.precision import DynamicLossScale, LossScale, StaticLossScale
from vgrad.training import TrainState, private_step, train_step
from vgrad.typing import Buffers, Params

STRATEGY = "auto"
_PRIVATE_SCALE = StaticLossScale(2.0**10)
_GRADIENT_BYTES = 2**28
_MOST_ROWS = 512


class Model(NamedTuple):
    """A model as a function, and the values that training starts from."""

    function: FunctionalModel
    params: Params
    buffers: Buffers


class Taken(NamedTuple):
    """What a step reports: the sum of its losses, samples taken and steps skipped."""

    loss: Tensor
    samples: int
    skipped: Tensor


class Trainer(NamedTuple):
    """One way to train.

    Attributes:
        advance: draws the batch that follows on a state, and takes a step on it.
        scores: logits of a state for some images, `[N, C]`; `[E, N, C]` of an ensemble.
        epsilon: the privacy spent after so many steps.
    """

    advance: Callable[[Any, Dataset], tuple[Any, Taken]]
    scores: Callable[[Any, Tensor], Tensor]
    epsilon: Callable[[int], float | None]


class Pair(NamedTuple):
    """The same thing for private and for plain SGD; `()` where there is no such run."""

    private: Any
    plain: Any


class Job(NamedTuple):
    """Everything about a run that does not change while it runs.

    Attributes:
        extended: the epochs to which the run was extended, one number for each time.
        ends: the number of steps at the end of each epoch.
        plan: of the private steps of all members together; None without privacy.
        trainers: a pair of `Trainer`.
        start: a pair of `TrainState`, or of the states of ensembles.
        description: what has to be the same when the run goes on.
    """

    settings: Settings
    data: Dataset
    plan: dp.Plan | None
    extended: Sequence[int]
    ends: list[int]
    trainers: Pair
    start: Pair
    description: Description


def prepare(settings: Settings, extended: Sequence[int] = ()) -> Job:
    """Read the data, make the model, plan the noise; nothing is written.

    Raises:
        FileNotFoundError, ValueError: as `data.load` and `models.build`; or the batch
            is larger than the data; or no noise meets the target; or the model takes
            no such images or has no per-sample gradients.
    """
    settings, found, ends = read(settings, extended)
    module = models.build(settings.model, found.shape, seed=settings.seed)
    model = tried(settings, found, module)
    plan = planned(settings, found, ends)
    run = models.under(settings.precision, model.function.eval())
    step = train_step(
        batch_loss(model.function, F.cross_entropy),
        optim.sgd(settings.lr),
        policy=models.POLICIES[settings.precision],
    )
    plain = Trainer(
        plain_advance(settings, found, *_on_ranks(settings, model, step)),
        lambda state, images: run(state.params, state.buffers, images),
        lambda step: None,
    )
    private = Trainer(
        private_advance(settings, model, plan), plain.scores, plan.epsilon
    )
    start = plain_state(settings, model, TrainState.create)
    return Job(
        settings,
        found.to(torch.device(settings.device)),
        plan,
        extended,
        ends,
        Pair(private, plain),
        Pair(private_state(settings, model), start),
        describe(settings, found, plan, forms(model.params)),
    )


def read(
    settings: Settings, extended: Sequence[int]
) -> tuple[Settings, Dataset, list[int]]:
    """Return settings that fit the data, the data, and the step each epoch ends at."""
    found = data.load(settings.data, seed=settings.seed)
    settings = settings.fitted(len(found.y_train), found.shape)
    epoch = len(found.y_train) / settings.batch_size
    *_, last = settings.epochs, *extended
    ends = [round(number * epoch) for number in range(1, last + 1)]
    return settings, found, ends


def planned(settings: Settings, found: Dataset, ends: Sequence[int]) -> dp.Plan:
    """Plan the private steps of all members together.

    The noise is the least that keeps the epochs that the run was started for within the
    budget. Later ones, of a run that was extended, have the same noise and spend more.
    """
    size = len(found.y_train)
    try:
        plan = dp.Plan.for_epsilon(
            settings.epsilon,
            dataset_size=size,
            sampling_rate=settings.batch_size / size,
            max_norm=settings.max_norm,
            steps=ends[settings.epochs - 1] * settings.members,
            delta=settings.delta,
        )
    except ValueError as error:
        reason = str(error).rpartition("): ")[2]
        budget = f"--epsilon {settings.epsilon} --delta {settings.delta}"
        raise ValueError(f"{budget}: {reason}") from error
    longer = dataclasses.replace(plan, steps=ends[-1] * settings.members)
    if longer != plan and longer.epsilon() == math.inf:
        raise ValueError(
            f"--extend: expected fewer epochs than {len(ends)}, for which no epsilon "
            f"can be given at delta {settings.delta}."
        )
    return longer


def tried(settings: Settings, found: Dataset, module: nn.Module) -> Model:
    """Try a model on blank images, so that errors show early."""
    module = module.train().to(settings.device)
    images, labels = blank(settings, found, 2)
    with models.tried(settings.model, found.shape, private=settings.private):
        model = Model(*make_functional_with_buffers(module))
        with kept_random_state([images]):
            function = models.under(settings.precision, model.function)
            scores = function(model.params, model.buffers, images)
            if scores.shape != (2, found.classes):
                raise ValueError(
                    f"scores of shape {tuple(scores.shape)} for two images"
                )
            if settings.private:
                loss = sample_loss(function, F.cross_entropy)
                gradient = clipped_grad(loss, max_norm=1.0, randomness="different")
                gradient(model.params, model.buffers, images, labels)
    return model


def blank(settings: Settings, found: Dataset, *sizes: int) -> tuple[Tensor, Tensor]:
    """Make blank images `[*sizes, C, H, W]` and labels `[*sizes]`."""
    device = torch.device(settings.device)
    images = torch.zeros(*sizes, *found.shape[:3], device=device)
    return images, torch.zeros(*sizes, dtype=torch.int64, device=device)


def private_advance(settings: Settings, model: Model, plan: dp.Plan) -> Callable:
    """Train on Poisson batches, with clipping and noise."""
    step = private_step(
        sample_loss(model.function, F.cross_entropy),
        optim.sgd(settings.lr),
        plan,
        strategy=STRATEGY,
        chunk_size=_rows_at_a_time(model.params),
        randomness="different",
        policy=models.POLICIES[settings.precision],
    )

    def draw(state: TrainState) -> Tensor:
        return plan.sample(key=state.key, step=int(state.step))

    world = World()
    return _advance(world.parallel(compiled(settings, step)), draw, world.part)


def compiled(settings: Settings, step: Callable) -> Callable:
    """Let captured graphs run a step, if asked for."""
    if settings.compile == "eager":
        return step
    backend: Any = settings.compile
    return compile(step, backend=backend)


def _on_ranks(settings: Settings, model: Model, step: Callable) -> tuple:
    """Return a plain step of all ranks, and which part of a batch each one takes."""
    step, world = compiled(settings, step), World()
    if model.buffers or settings.batch_size % world.size:
        return step, torch.detach  # all of it, on every rank
    return world.parallel(step), world.part


def plain_advance(
    settings: Settings,
    found: Dataset,
    step: Callable,
    part: Callable[[Tensor], Tensor] = torch.detach,
) -> Callable:
    """Train on batches of fixed size, one for each member of an ensemble."""
    size, members = len(found.y_train), settings.members

    def draw(state: Any) -> Tensor:
        seed = torch_seed(state.key, "batch", int(state.step))
        source = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(size, generator=source) for _ in range(members)]
        index = torch.stack([order[: settings.batch_size] for order in orders])
        return index if members > 1 else index[0]

    return _advance(step, draw, part)


def _advance(
    step: Callable[..., tuple[Any, dict[str, Tensor]]],
    draw: Callable[[Any], Tensor],
    part: Callable[[Tensor], Tensor],
) -> Callable[[Any, Dataset], tuple[Any, Taken]]:
    """Draw the batch that follows on a state, and take a step on this rank's part."""

    def run(state: Any, data: Dataset) -> tuple[Any, Taken]:
        index = draw(state)
        own = part(index)
        state, figures = step(state, data.x_train[own], data.y_train[own])
        samples, loss = index.numel(), torch.zeros(())
        if samples:  # the mean over no samples is no number
            loss = figures["loss"].double().mean() * samples
        skipped = figures.get("skipped", torch.zeros(())).sum()
        return state, Taken(loss, samples, skipped)

    return run


def private_state(settings: Settings, model: Model, member: int = 0) -> TrainState:
    """Make a private state; its key is no secret where noise is reproducible."""
    seed = settings.seed if settings.reproducible_noise else None
    key = dp.secret_key(seed=seed, member=member)
    return _first(settings, model, TrainState.create, key, _PRIVATE_SCALE)


def plain_state(settings: Settings, model: Model, create: Callable[..., Any]) -> Any:
    """Make a state of the run without privacy, whose key is no secret."""
    key = fold_in(dp.secret_key(seed=settings.seed), "plain")
    return _first(settings, model, create, key, DynamicLossScale())


def _first(
    settings: Settings,
    model: Model,
    create: Callable[..., Any],
    key: Tensor,
    scale: LossScale,
) -> Any:
    """Make a state before the first step.

    The scale is the one that the step would begin with by default. It is given here so
    that a state saved before the first step is the same tree as any other.
    """
    return create(
        optim.sgd(settings.lr),
        model.params,
        model.buffers,
        loss_scale=scale if settings.precision == "float16" else None,
    )._replace(key=key)


def forms(params: Params) -> Description:
    """Say how per-sample gradients are computed: other ways round differently."""
    return {"strategy": STRATEGY, "chunk_size": _rows_at_a_time(params)}


def _rows_at_a_time(params: Params) -> int:
    """Choose a chunk size from the model alone.

    `chunk_size="auto"` depends on free memory, which may differ when a run goes on; the
    sums would then be rounded differently.
    """
    gradient = sum(value.numel() * value.element_size() for value in params.values())
    return max(1, min(_MOST_ROWS, _GRADIENT_BYTES // gradient))


def describe(
    settings: Settings, found: Dataset, plan: dp.Plan | None, forms: Description
) -> Description:
    """Collect what has to be the same when the run goes on, as JSON has it."""
    on_cuda = settings.device.startswith("cuda")
    low = {}
    if settings.precision != "float32":
        low = {"instructions in low precision": models.instructions()}
    description = {
        "arguments": dataclasses.asdict(settings),
        "data": {
            "sha256": data.digest(found),
            "held_out_samples": len(found.y_test),
            "shape": found.shape._asdict(),
        },
        "plan": {} if plan is None else dataclasses.asdict(plan),
        "model": {"source_sha256": models.source_digest(settings.model)},
        "machine": {
            "torch": torch.__version__,
            "threads (OMP_NUM_THREADS)": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "device": torch.cuda.get_device_name(settings.device) if on_cuda else "cpu",
            **low,
        },
        "forms": forms,
    }
    return json.loads(json.dumps(description))

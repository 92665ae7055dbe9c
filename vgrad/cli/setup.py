"""What a training run is before its first step: data, model, plan and two trainers.

Private and plain SGD start from the same weights, take the same number of steps at the
same rate and size of batch, and differ in clipping, noise and how batches are drawn.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgrad import dp, optim
from vgrad.cli import data, models
from vgrad.cli.arguments import Settings
from vgrad.cli.data import Dataset
from vgrad.cli.files import Description
from vgrad.cli.precision import POLICIES, instructions, under
from vgrad.functional.losses import batch_loss, sample_loss
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.generators import subkey, torch_seed
from vgrad.persample.clipped import clipped_grad
from vgrad.precision import DynamicLossScale, LossScale, StaticLossScale
from vgrad.process import ALONE
from vgrad.training import TrainState, private_step, train_step
from vgrad.typing import Buffers, Params

STRATEGY = "auto"
PRIVATE_SCALE = StaticLossScale(2.0**10)
_GRADIENT_BYTES = 2**28
_MOST_ROWS = 512


class Model(NamedTuple):
    """A model as a function, and the values that training starts from."""

    function: FunctionalModel
    params: Params
    buffers: Buffers


class Taken(NamedTuple):
    """What a step tells: the sum of its losses, of how many samples, steps skipped."""

    loss: Tensor
    samples: int
    skipped: Tensor


class Trainer(NamedTuple):
    """One way to train.

    Attributes:
        advance: takes a step, on a batch that it draws, from one state to the next.
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
        ends: the number of steps at the end of each epoch.
        plan: of all private steps, those of all members; None without privacy.
        trainers: a pair of `Trainer`.
        start: a pair of `TrainState`, or of the states of ensembles.
        description: what has to be the same when the run goes on.
    """

    settings: Settings
    data: Dataset
    model: FunctionalModel
    plan: dp.Plan | None
    ends: list[int]
    trainers: Pair
    start: Pair
    description: Description


def prepare(settings: Settings) -> Job:
    """Read the data, make the model, plan the noise; nothing is written.

    Raises:
        FileNotFoundError, ValueError: as `data.load` and `models.build`; or the batch
            is larger than the data; or no noise meets the target; or the model takes
            no such images or has no per-sample gradients.
    """
    found, ends = read(settings)
    module = models.build(settings.model, found.shape, seed=settings.seed)
    model = tried(settings, found, module)
    plan = planned(settings, found, steps=ends[-1])
    scores = scorer(settings, model.function)
    return Job(
        settings,
        found.to(torch.device(settings.device)),
        model.function,
        plan,
        ends,
        Pair(
            Trainer(private_advance(settings, model, plan), scores, plan.epsilon),
            Trainer(_plain_advance(settings, model, found), scores, lambda step: None),
        ),
        _start(settings, model),
        describe(settings, found, plan, forms(model.params)),
    )


def read(settings: Settings) -> tuple[Dataset, list[int]]:
    """Return the data, and the number of steps at the end of each epoch."""
    found = data.load(settings.data, seed=settings.seed)
    size = len(found.y_train)
    if settings.batch_size > size:
        raise ValueError(
            f"--batch-size {settings.batch_size}: expected at most the {size} training "
            f"samples that there are."
        )
    epoch = size / settings.batch_size
    return found, [round(number * epoch) for number in range(1, settings.epochs + 1)]


def planned(settings: Settings, found: Dataset, *, steps: int) -> dp.Plan:
    """Plan so many private steps on one data set, within the budget."""
    size = len(found.y_train)
    return dp.Plan.for_epsilon(
        settings.epsilon,
        dataset_size=size,
        sampling_rate=settings.batch_size / size,
        max_norm=settings.max_norm,
        steps=steps,
        delta=settings.delta,
    )


def tried(settings: Settings, found: Dataset, module: nn.Module) -> Model:
    """Try a model on blank images, so that what is wrong shows early."""
    shape = found.shape
    device = torch.device(settings.device)
    on_cuda = device.type == "cuda"
    module = module.train().to(device)
    images = torch.zeros(2, *shape[:3], device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        model = Model(*make_functional_with_buffers(module))
        with ALONE, torch.random.fork_rng([device] if on_cuda else []):
            function = under(settings.precision, model.function)
            scores = function(model.params, model.buffers, images)
            if scores.shape != (2, shape.classes):
                raise ValueError(
                    f"scores of shape {tuple(scores.shape)} for two images"
                )
            if settings.private:
                loss = sample_loss(function, F.cross_entropy)
                gradient = clipped_grad(loss, max_norm=1.0, randomness="different")
                gradient(model.params, model.buffers, images, labels)
    except Exception as error:
        # Code of the user's own may raise anything; the cause is kept.
        needs = " and has per-sample gradients" if settings.private else ""
        raise ValueError(
            f"--model {settings.model}: expected a model that scores {shape.classes} "
            f"classes for images {list(shape[:3])}{needs}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    return model


def scorer(
    settings: Settings, fmodel: FunctionalModel
) -> Callable[[TrainState, Tensor], Tensor]:
    """Make the function that runs a state's model in evaluation mode."""
    model = under(settings.precision, fmodel.eval())
    return lambda state, images: model(state.params, state.buffers, images)


def private_advance(settings: Settings, model: Model, plan: dp.Plan) -> Callable:
    """Train on Poisson batches, with clipping and noise."""
    step = private_step(
        sample_loss(model.function, F.cross_entropy),
        optim.sgd(settings.lr),
        plan,
        strategy=STRATEGY,
        chunk_size=_rows_at_a_time(model.params),
        randomness="different",
        policy=POLICIES[settings.precision],
    )

    def draw(state: TrainState) -> Tensor:
        return plan.sample(key=state.key, step=int(state.step))

    return advance(step, draw)


def _plain_advance(settings: Settings, model: Model, found: Dataset) -> Callable:
    """Train on batches of fixed size, without clipping and noise."""
    size = len(found.y_train)
    step = train_step(
        batch_loss(model.function, F.cross_entropy),
        optim.sgd(settings.lr),
        policy=POLICIES[settings.precision],
    )

    def draw(state: TrainState) -> Tensor:
        return torch.randperm(size, generator=shuffles(state))[: settings.batch_size]

    return advance(step, draw)


def shuffles(state: Any) -> torch.Generator:
    """Return the generator of the batch that follows on a state without privacy."""
    seed = torch_seed(state.key, "batch", int(state.step))
    return torch.Generator().manual_seed(seed)


def advance(
    step: Callable[..., tuple[Any, dict[str, Tensor]]],
    draw: Callable[[Any], Tensor],
) -> Callable[[Any, Dataset], tuple[Any, Taken]]:
    """Draw the batch that follows on a state, and take a step on it."""

    def run(state: Any, data: Dataset) -> tuple[Any, Taken]:
        index = draw(state)
        state, figures = step(state, data.x_train[index], data.y_train[index])
        samples, loss = index.numel(), torch.zeros(())
        if samples:  # the mean over no samples is no number
            loss = figures["loss"].double().mean() * samples
        return state, Taken(
            loss, samples, figures.get("skipped", torch.zeros(())).sum()
        )

    return run


def _start(settings: Settings, model: Model) -> Pair:
    """Make the states before the first step; their keys are part of them."""
    return Pair(
        first(settings, TrainState.create, model, private_key(settings), PRIVATE_SCALE),
        first(
            settings, TrainState.create, model, plain_key(settings), DynamicLossScale()
        ),
    )


def private_key(settings: Settings, member: int = 0) -> Tensor:
    """Return the secret key of a private run; no secret where noise is reproducible."""
    seed = settings.seed if settings.reproducible_noise else None
    return dp.secret_key(seed=seed, member=member)


def plain_key(settings: Settings) -> Tensor:
    """Return the key of the run without privacy, which is no secret."""
    return subkey(dp.secret_key(seed=settings.seed), "plain")


def first(
    settings: Settings,
    create: Callable[..., Any],
    model: Model,
    key: Tensor,
    scale: LossScale,
) -> Any:
    """Make a state before the first step.

    The scale is the one that the step begins with of its own accord; it is given here,
    so that a state saved before the first step is the same tree as any other.
    """
    return create(
        optim.sgd(settings.lr),
        model.params,
        model.buffers,
        loss_scale=scale if settings.precision == "float16" else None,
    )._replace(key=key)


def forms(params: Params) -> Description:
    """Say how per-sample gradients are computed: another way rounds otherwise."""
    return {"strategy": STRATEGY, "chunk_size": _rows_at_a_time(params)}


def _rows_at_a_time(params: Params) -> int:
    """Choose a chunk size from the model alone.

    Free memory, which `chunk_size="auto"` looks at, is another when a run goes on; the
    sums would then be rounded otherwise.
    """
    gradient = sum(value.numel() * value.element_size() for value in params.values())
    return max(1, min(_MOST_ROWS, _GRADIENT_BYTES // gradient))


def describe(
    settings: Settings, found: Dataset, plan: dp.Plan | None, forms: Description
) -> Description:
    """Collect what has to be the same when the run goes on, as JSON has it."""
    on_cuda = settings.device.startswith("cuda")
    device = torch.device(settings.device)
    in_float32 = settings.precision == "float32"
    low = {} if in_float32 else {"instructions in low precision": instructions()}
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
            "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
            **low,
        },
        "forms": forms,
    }
    return json.loads(json.dumps(description))

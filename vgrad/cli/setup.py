"""A training run before its first step: data, model, plan and two trainers.

Private and plain SGD start from the same weights and take the same number of steps at
the same rate and size of batch. They differ in clipping, in noise and in how batches
are drawn.

The members of a deep ensemble, E of them, differ in initialisation and in batches.
Without privacy all of them take a step at once. With privacy each takes its own, on a
Poisson batch and with noise of its own. Every step uses the same data, so T steps of
each of E members spend as much as E * T steps of one model: the plan is for so many.

Reference: Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty
Estimation using Deep Ensembles, arXiv 1612.01474.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vgrad import dp, optim
from vgrad.cli import data, models
from vgrad.cli.data import Dataset
from vgrad.cli.evaluate import ROWS
from vgrad.cli.settings import Settings
from vgrad.compiled import compile
from vgrad.distributed import Ranks, data_parallel, replicated
from vgrad.ensemble.gradients import ensemble_grad
from vgrad.ensemble.prediction import ensemble_forward
from vgrad.ensemble.stacking import member, member_seed, stack
from vgrad.files import Description
from vgrad.functional.losses import batch_loss, sample_loss
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.generators import fold_in, kept_random_state, torch_seed
from vgrad.persample.clipped import clipped_grad
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.precision import DynamicLossScale, LossScale, StaticLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)
from vgrad.typing import Buffers, EnsembleStrategy, Params


class World:
    """The ranks of a run; without a launcher there is one."""

    def __init__(self) -> None:
        self._mesh = None
        if distributed.is_available() and distributed.is_initialized():
            size = distributed.get_world_size()
            self._mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._mesh is None else self._mesh.size()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self._mesh is None or self._mesh.get_rank() == 0

    def together(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Run a block that may fail on one rank, and raises on all then."""
        if self._mesh is None:
            return contextlib.nullcontext()
        return Ranks.of("train", self._mesh, "dp").together(what)

    def of_first(self, state: Any) -> Any:
        """Return the state of the first rank."""
        return state if self._mesh is None else replicated(state, self._mesh)

    def parallel(self, step: Callable) -> Callable:
        """Return a step of all ranks."""
        return step if self._mesh is None else data_parallel(step, self._mesh)

    def part(self, index: Tensor) -> Tensor:
        """Return this rank's part of a batch of indices."""
        if self._mesh is None:
            return index
        rank, size = self._mesh.get_rank(), self._mesh.size()
        return index[len(index) * rank // size : len(index) * (rank + 1) // size]


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
    """The figures of a step: the sum of its losses, samples taken and steps skipped."""

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
        description: entries that must be the same when the run goes on.
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
    """Read the data, make the model or the members, plan the noise; write nothing.

    Raises:
        FileNotFoundError, ValueError: as `data.load` and `models.build`; or the batch
            is larger than the data; or no noise meets the target; or the model takes
            no such images or has no per-sample gradients; or the members that a factory
            made are not alike.
    """
    if settings.members == 1:
        return _prepare_one(settings, extended)
    return _prepare_members(settings, extended)


def _prepare_one(settings: Settings, extended: Sequence[int] = ()) -> Job:
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
    """Compile a step, if --compile is not eager."""
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
    """Name the way of per-sample gradients, since others round differently."""
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
    """Collect the entries that must be the same when the run goes on, as JSON."""
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


# Ensembles.


class PrivateMembers(NamedTuple):
    """The states of members that take private steps, all equally many."""

    members: tuple[TrainState, ...]

    @property
    def params(self) -> Params:
        """Return the parameters, `[E, ...]`."""
        return _stacked([each.params for each in self.members])

    @property
    def buffers(self) -> Buffers:
        """Return the buffers, `[E, ...]`."""
        return _stacked([each.buffers for each in self.members])

    @property
    def step(self) -> Tensor:
        """Return how many steps each member has taken."""
        return self.members[0].step

    @property
    def loss_scale(self) -> LossScale:
        """Return the loss scale, which is constant and the same for all."""
        return self.members[0].loss_scale


def _prepare_members(settings: Settings, extended: Sequence[int] = ()) -> Job:
    settings, found, ends = read(settings, extended)
    count, device = settings.members, torch.device(settings.device)
    modules = [
        models.build(settings.model, found.shape, seed=member_seed(settings.seed, i))
        for i in range(count)
    ]
    one = tried(settings, found, modules[0])
    model = Model(*stack(module.train().to(device) for module in modules))
    strategy = _strategy(settings, model, found)
    plain = _members_trainer(settings, model, found, strategy)
    start = plain_state(settings, model, EnsembleState.create)
    trainers, starts = Pair((), plain), Pair((), start)
    plan, ways = None, {"strategy of members": strategy}
    if settings.private:
        plan = total = planned(settings, found, ends)
        of_one = dataclasses.replace(plan, steps=ends[-1])
        trainers = trainers._replace(
            private=Trainer(
                _each_in_turn(private_advance(settings, one, of_one)),
                plain.scores,
                lambda step: total.epsilon(step * count),
            )
        )
        starts = Pair(_members_start(settings, model), start)
        ways |= forms(one.params)
    return Job(
        settings,
        found.to(device),
        plan,
        extended,
        ends,
        trainers,
        starts,
        describe(settings, found, plan, ways),
    )


def _members_trainer(
    settings: Settings, model: Model, found: Dataset, strategy: EnsembleStrategy
) -> Trainer:
    step = ensemble_train_step(
        batch_loss(model.function, F.cross_entropy),
        optim.sgd(settings.lr),
        in_dims=0,
        strategy=strategy,
        policy=models.POLICIES[settings.precision],
    )
    forward = ensemble_forward(
        models.under(settings.precision, model.function.eval()),
        chunk_size=ROWS,
        strategy=strategy,
    )
    return Trainer(
        plain_advance(settings, found, compiled(settings, step)),
        lambda state, images: forward(state.params, state.buffers, images),
        lambda step: None,
    )


def _strategy(settings: Settings, model: Model, found: Dataset) -> EnsembleStrategy:
    """Choose a strategy: the cheapest, or the loop where an op cannot be batched."""
    images, labels = blank(settings, found, settings.members, 2)
    function = models.under(settings.precision, model.function)
    loss = batch_loss(function, F.cross_entropy)
    compute = ensemble_grad(loss, in_dims=0, strategy="hybrid")
    with kept_random_state([images]):
        try:
            compute(model.params, model.buffers, images, labels)
        except UnsupportedOp:
            return "loop"
    return "auto"


def _each_in_turn(advance: Callable) -> Callable:

    def run(state: PrivateMembers, data: Dataset) -> tuple[PrivateMembers, Taken]:
        results = [advance(each, data) for each in state.members]
        states, taken = zip(*results, strict=True)
        losses, samples, skipped = zip(*taken, strict=True)
        return PrivateMembers(states), Taken(
            # One by one: the count of an empty batch is on the CPU.
            sum((loss.double() for loss in losses), torch.zeros(())),
            sum(samples),
            sum(skipped, torch.zeros(())),
        )

    return run


def _members_start(settings: Settings, model: Model) -> PrivateMembers:
    values = [
        Model(model.function, member(model.params, i), member(model.buffers, i))
        for i in range(settings.members)
    ]
    states = [private_state(settings, one, i) for i, one in enumerate(values)]
    return PrivateMembers(tuple(states))


def _stacked(entries: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in entries]) for name in entries[0]}

"""The price of privacy: DP-SGD against plain training, in accuracy, time and memory.

All runs of a net draw Poisson batches of the same expected size, and differ in clipping
and noise alone. BatchNorm, which mixes samples, gives way to GroupNorm; one more run
keeps it, without privacy.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench.experiments import data, nets
from bench.experiments.data import Images
from bench.experiments.measuring import peak_bytes, side_by_side
from bench.experiments.reports import private as report
from bench.experiments.reports.private import TORCH
from bench.experiments.study import Piece, Place, Result, Show, Study, number
from tests import oracle
from vgrad.dp import Plan
from vgrad.training import TrainState, private_step, train_step

MAX_NORM, DELTA = 1.0, 1e-5
CHECKED_SAMPLES = 4
PLAIN, WITH_BATCH_NORM = "no privacy", "no privacy, batch norm"
STEP, PRIVATE, REPLAYED = "train_step", "private_step", "private_step, replayed"


class Course(NamedTuple):
    """How a net is trained for its accuracy.

    Attributes:
        budgets: epsilons of the private runs, the most telling first.
    """

    net: str
    build: Callable[[int], nn.Module]
    source: str | None
    side: int
    channels: int
    samples: int
    held_out: int
    budgets: tuple[float, ...]
    seeds: int
    steps: int
    batch: int

    def images(self) -> Images:
        return data.images(self.source, self.samples, self.side, channels=self.channels)


class Step(NamedTuple):
    """A net whose step is timed, on images with three channels."""

    net: str
    build: Callable[[int], nn.Module]
    side: int
    batch: int


def courses(place: Place) -> list[Course]:
    """Return the settings of all runs."""
    budgets = 8.0, 0.5, 2.0, 4.0, 1.0
    digits = place.data or "digits"
    grey = Course(
        "CNN",
        partial(nets.cnn, channels=1, width=place.pick(tiny=4, small=8, full=16)),
        digits,
        place.pick(tiny=8, small=16, full=16),
        1,
        place.pick(tiny=600, small=1797, full=1797),
        place.pick(tiny=200, small=360, full=360),
        place.pick(tiny=(8.0, 0.5), small=budgets, full=budgets),
        place.pick(tiny=2, small=3, full=3),
        place.pick(tiny=25, small=80, full=200),
        place.pick(tiny=100, small=240, full=240),
    )
    if place.size != "full":
        return [grey]
    colour = Course(
        "CNN, width 32",
        partial(nets.cnn, width=32),
        place.data,
        32,
        3,
        22_000,
        2_000,
        (8.0, 2.0),
        3,
        200,
        1_000,
    )
    return [grey, colour]


def timed(place: Place) -> list[Step]:
    """Return whose steps are timed."""
    width = place.pick(tiny=4, small=16, full=32)
    small = [
        Step(
            "CNN",
            partial(nets.cnn, width=width),
            place.pick(tiny=8, small=32, full=32),
            place.pick(tiny=8, small=64, full=512),
        )
    ]
    if place.size == "tiny":
        return small
    batch = place.pick(tiny=8, small=16, full=256)
    mobile = Step("MobileNet V2", partial(nets.mobile, 2), 32, batch)
    return [*small, mobile, Step("ResNet-50", nets.resnet_50, 32, batch)]


def pieces(place: Place) -> list[Piece]:
    """Return accuracies without privacy and by epsilon, and the times between them."""
    first, *others = courses(place)
    result = list(_trainings(place, first))
    for step in timed(place):
        run = partial(measure, place, step)
        result.append(Piece(f"{step.net}: time", run))
    for course in others:
        result += _trainings(place, course)
    return result


def _trainings(place: Place, course: Course) -> Iterator[Piece]:
    for name in (PLAIN, *course.budgets, WITH_BATCH_NORM):
        title = name if isinstance(name, str) else f"epsilon {name:g}"
        run = partial(train, place, course, name)
        yield Piece(f"{course.net}: {title}", run)


def plan_of(course: Course, epsilon: float | None) -> Plan:
    """Return batches, and the least noise for an epsilon; none without one."""
    size = course.samples - course.held_out
    common: Any = {
        "dataset_size": size,
        "sampling_rate": course.batch / size,
        "max_norm": MAX_NORM,
        "steps": course.steps,
        "delta": DELTA,
    }
    if epsilon is None:
        return Plan(noise_multiplier=0.0, **common)
    return Plan.for_epsilon(epsilon, **common)


def train(place: Place, course: Course, budget: float | str, show: Show) -> Result:
    """Train a net from each seed and return its accuracies on held-out images."""
    epsilon = None if isinstance(budget, str) else budget
    plan = plan_of(course, epsilon)
    images = course.images()
    normed = budget == WITH_BATCH_NORM
    accuracies, losses = [], []
    for seed in range(course.seeds):

        def so_far(share: float, done: int = seed) -> None:
            show((done + share) / course.seeds)

        module = _module(course.build, images.classes, seed, normed=normed)
        scores, y = _run(place, course, module.to(place.device), plan, seed, so_far)
        accuracies.append(float((scores.argmax(1) == y).double().mean()))
        losses.append(number(F.cross_entropy(scores, y)))
    return {
        "net": course.net,
        "data": images.title,
        "batch_norm": normed,
        "epsilon": epsilon,
        "spent": None if epsilon is None else plan.epsilon(),
        "delta": DELTA,
        "noise_multiplier": plan.noise_multiplier,
        "train": plan.dataset_size,
        "held_out": course.held_out,
        "classes": images.classes,
        "steps": plan.steps,
        "expected_batch": plan.expected_batch_size,
        "accuracies": accuracies,
        "losses": losses,
    }


def _module(
    build: Callable[[int], nn.Module], classes: int, seed: int, *, normed: bool = False
) -> nn.Module:
    """Build a net from a seed, with GroupNorm unless its BatchNorm is kept."""
    module = nets.seeded(partial(build, classes), seed)
    return module if normed else vgrad.replace_batch_norm(module)


def _run(
    place: Place, course: Course, module: nn.Module, plan: Plan, seed: int, show: Show
) -> tuple[Tensor, Tensor]:
    """Train by the plan; return scores and labels of the held-out images."""
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    private = plan.noise_multiplier > 0
    # Noise adds up over steps: the more of it, the smaller they are.
    rate = min(0.3, 1 / plan.noise_multiplier) if private else 0.2
    tx = vgrad.optim.sgd(rate, momentum=0.9)
    if private:
        loss = vgrad.sample_loss(fmodel, F.cross_entropy)
        step = private_step(loss, tx, plan, randomness="different")
    else:
        step = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
    state = TrainState.create(tx, params, buffers, seed=seed)
    seen, held_out = course.images().split(course.held_out)
    x, y = seen.x.to(place.device), seen.y.to(place.device)
    for count, index in enumerate(plan.sampler(state), 1):
        state, _ = step(state, x[index], y[index])
        show(count / plan.steps)
    score = fmodel.eval()
    with torch.no_grad():
        scores = [
            score(state.params, state.buffers, rows.to(place.device)).cpu()
            for rows in held_out.x.split(500)
        ]
    return torch.cat(scores), held_out.y


def measure(place: Place, step: Step, show: Show) -> Result:
    """Compare a private step with plain ones: numbers, then time, then memory."""
    images = data.make_images(step.batch, step.side)
    x, y = images.x.to(place.device), images.y.to(place.device)
    module = _module(step.build, images.classes, 0).to(place.device)
    error = _error(module, x[:CHECKED_SAMPLES], y[:CHECKED_SAMPLES])
    contenders = _contenders(module, x, y, compiled=place.size != "tiny")
    for name, run in [*contenders.items()]:
        try:
            run()
        except RuntimeError:
            if name != REPLAYED:
                raise
            del contenders[name]  # what the net does cannot be captured
    show(0.4)
    rounds = place.pick(tiny=3, small=5, full=30)
    times = side_by_side(contenders, place.device, rounds=rounds)
    memory = {
        name: peak_bytes(run, place.device)
        for name, run in contenders.items()
        if name != REPLAYED
    }
    return {
        "net": step.net,
        "data": images.title,
        "batch": step.batch,
        "parameters": sum(param.numel() for param in module.parameters()),
        "error": error,
        "times": times,
        "memory": memory,
    }


def _error(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return how far the clipped sum is from a loop in float64, relative.

    The norm is such that some samples are clipped and some are not.
    """
    exact = copy.deepcopy(module).double().eval()  # dropout draws at random

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    grads = oracle.model_gradients(exact, loss, (x, y), len(x))
    max_norm = float(oracle.norms(grads).median()) * 1.001
    fmodel, params, buffers = vgrad.make_functional_with_buffers(exact)
    clipped = vgrad.clipped_grad(
        vgrad.sample_loss(fmodel, F.cross_entropy), max_norm=max_norm
    )
    result = clipped(params, buffers, x.double(), y)
    assert 0 < int(result.clipped) < len(x), "expected some samples to be clipped"
    return oracle.error(result.grads, oracle.clipped(grads, max_norm))


def _contenders(
    module: nn.Module, x: Tensor, y: Tensor, *, compiled: bool
) -> dict[str, Callable[[], Any]]:
    """Return steps on one batch, which is as large as the plan expects."""
    trained = copy.deepcopy(module)
    optimizer = torch.optim.SGD(trained.parameters(), 0.01, momentum=0.9)

    def by_torch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()

    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    tx = vgrad.optim.sgd(0.01, momentum=0.9)
    plan = Plan(
        dataset_size=10 * len(x),
        sampling_rate=0.1,
        noise_multiplier=1.0,
        max_norm=MAX_NORM,
        steps=10_000,
        delta=DELTA,
    )
    batch, sample = (
        of(fmodel, F.cross_entropy) for of in (vgrad.batch_loss, vgrad.sample_loss)
    )
    private = private_step(sample, tx, plan, randomness="different", donate=True)
    steps: dict[str, Any] = {
        STEP: train_step(batch, tx, donate=True),
        PRIVATE: private,
    }
    if compiled:
        steps[REPLAYED] = vgrad.compile(private, batch_sizes=[len(x)], fallback="error")

    def going_on(step: Any) -> Callable[[], None]:
        start = {name: value.detach().clone() for name, value in params.items()}
        state = TrainState.create(tx, start, buffers, seed=0)

        def run() -> None:
            nonlocal state
            state, _ = step(state, x, y)

        return run

    return {TORCH: by_torch, **{name: going_on(step) for name, step in steps.items()}}


STUDY = Study(
    "The price of privacy, DP-SGD",
    pieces,
    report.check,
    report.table,
    report.draw,
    figsize=(14, 4.6),
)

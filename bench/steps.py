"""Who makes whole private steps: clipped sum, noise and optimizer, on Poisson draws.

A contender is built from a `Task` and gives a `Stepper`: a function of a batch that
moves its own parameters. The plain one is SGD with momentum on batches of the mean
size; noise and momentum of the others are the same, each drawn in the contender's way.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import vgrad
from bench import memory
from bench.compiling import (
    BACKENDS,
    PLAIN,
    Compiled,
    compile_plain,
    compiled,
    mean_gradient,
)
from bench.contenders import (
    MAX_NORM,
    STRATEGY,
    Grads,
    clip_and_sum,
    functional,
    opacus,
    vmap_gradients,
)
from bench.models import SETTINGS, Batch, Problem, Setting
from tests import oracle
from vgrad.dp import Plan
from vgrad.training import TrainState, private_step

RATE, MOMENTUM = 0.01, 0.9
CHECKED_RATE = 1.0
"""So that in float32, too, one sees how far parameters have moved."""

DRAWS = 50
BATCHES = 20
"""Batches of the mean size in the data set, of which one is drawn."""


@dataclass(frozen=True)
class Task:
    """A model, a data set and the batches that are drawn of it."""

    problem: Problem
    plan: Plan
    rate: float = RATE
    seed: int = 0

    @classmethod
    def of(
        cls,
        setting: Setting,
        device: str,
        dtype: torch.dtype,
        samples: int,
        *,
        small: bool = False,
        noise_multiplier: float = 1.0,
    ) -> "Task":
        """Make the task of a setting, whose batches have `samples` in the mean."""
        size = BATCHES * samples
        plan = Plan(
            dataset_size=size,
            sampling_rate=1 / BATCHES,
            noise_multiplier=noise_multiplier,
            max_norm=MAX_NORM,
            steps=10**6,
            delta=0.1 / size,
        )
        problem = setting.problem(device, dtype, size, small=small)
        return cls(problem, plan, CHECKED_RATE if small else RATE)

    @property
    def key(self) -> Tensor:
        return vgrad.dp.secret_key(seed=self.seed)

    @cached_property
    def draws(self) -> list[Batch]:
        """Poisson batches of the first steps."""
        rows = [self.plan.sample(key=self.key, step=step) for step in range(DRAWS)]
        x, y = self.problem.batch
        return [(x[indices], y[indices]) for indices in rows]

    @cached_property
    def fixed(self) -> Batch:
        """A batch of the mean size."""
        x, y = self.problem.batch
        return x[: len(x) // BATCHES], y[: len(x) // BATCHES]

    def batches(self, name: str) -> list[Batch]:
        """Return the batches of a contender's steps: draws, unless it is plain SGD."""
        return [self.fixed] * DRAWS if name == PLAIN else self.draws


class Stepper(NamedTuple):
    """A step, and the parameters that all steps so far have led to."""

    step: Callable[[Tensor, Tensor], Any]
    params: Callable[[], Grads]


def expected(task: Task, steps: int, epsilon: float = 0.0) -> Grads:
    """Return how far some private steps move the parameters, by a loop over samples.

    `epsilon` is added to a norm before it divides.
    """
    problem, size = task.problem, task.plan.expected_batch_size
    model = copy.deepcopy(problem.model)
    params = dict(model.named_parameters())
    optimizer = _sgd(params, task.rate)
    for step, (x, y) in enumerate(task.draws[:steps]):
        grads = oracle.model_gradients(
            model, lambda m, x, y: problem.mean_loss(m(x), y), (x, y), len(x)
        )
        factors = (MAX_NORM / (oracle.norms(grads) + epsilon)).clamp(max=1)
        sums = oracle.weighted(grads, factors)
        noisy = task.plan.add_noise(
            {name: total / size for name, total in sums.items()},
            vgrad.Sensitivity(MAX_NORM / size),
            key=task.key,
            step=step,
        )
        _move(params, noisy, optimizer)
    return moved(task, params)


def moved(task: Task, params: Grads) -> Grads:
    """Return how far parameters are from where the task starts."""
    start = dict(task.problem.model.named_parameters())
    return {name: (param - start[name]).detach() for name, param in params.items()}


def sgd(task: Task) -> Stepper:
    """Plain SGD, which every other time is divided by."""
    model = copy.deepcopy(task.problem.model)
    params = dict(model.named_parameters())
    optimizer = _sgd(params, task.rate)

    def step(x: Tensor, y: Tensor) -> None:
        task.problem.mean_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that its memory counts as the step's

    return Stepper(step, lambda: _detached(params))


def sgd_compiled(task: Task) -> Stepper:
    """Plain SGD as one graph, its update included."""
    named = task.problem.model.named_parameters()
    params = {name: p.detach().clone() for name, p in named}
    momenta = {name: torch.zeros_like(p) for name, p in params.items()}
    gradient = mean_gradient(task.problem)

    def sgd_step(params: Grads, momenta: Grads, x: Tensor, y: Tensor) -> None:
        for name, grad in gradient(params, x, y).items():
            momenta[name].mul_(MOMENTUM).add_(grad)
            params[name].sub_(momenta[name], alpha=task.rate)

    run = compile_plain(sgd_step)
    return Stepper(lambda x, y: run(params, momenta, x, y), lambda: params)


def by_hand(task: Task) -> Stepper:
    """`vmap(grad)`, clipping, `torch.randn` and torch's SGD."""
    model = copy.deepcopy(task.problem.model)
    params = dict(model.named_parameters())
    optimizer = _sgd(params, task.rate)
    plan = task.plan
    deviation = plan.noise_multiplier * plan.max_norm
    # Its parameters share the memory of the model's.
    gradients = vmap_gradients(replace(task.problem, model=model))

    def step(x: Tensor, y: Tensor) -> None:
        sums = clip_and_sum(gradients(x, y))
        for total in sums.values():
            noise = torch.randn_like(total)
            total.add_(noise, alpha=deviation).div_(plan.expected_batch_size)
        _move(params, sums, optimizer)

    return Stepper(step, lambda: _detached(params))


def in_opacus(mode: str) -> Callable[[Task], Stepper]:
    """Opacus with its own optimizer, whose rate divides the sum."""

    def build(task: Task) -> Stepper:
        peer = opacus(
            task.problem,
            mode,
            noise_multiplier=task.plan.noise_multiplier,
            lr=task.rate / task.plan.expected_batch_size,
            momentum=MOMENTUM,
        )

        def step(x: Tensor, y: Tensor) -> None:
            peer.backward(x, y)
            peer.optimizer.step()
            peer.optimizer.zero_grad()

        return Stepper(step, lambda: _detached(dict(peer.model.named_parameters())))

    return build


def in_vgrad(backend: str | None) -> Callable[[Task], Stepper]:
    """vgrad's step, eager or compiled; it may reuse the memory of the old state."""

    def build(task: Task) -> Stepper:
        loss, params, buffers = functional(task.problem)
        tx = vgrad.optim.sgd(task.rate, momentum=MOMENTUM)
        one = private_step(
            loss, tx, task.plan, strategy=STRATEGY, donate=True, verify=False
        )
        if backend is not None:
            one = compiled(one, backend)
        copies = {name: param.clone() for name, param in params.items()}
        state = TrainState.create(tx, copies, buffers, seed=task.seed)

        def step(x: Tensor, y: Tensor) -> None:
            nonlocal state
            state, _ = one(state, x, y)

        run = step if backend is None else Compiled(step, one)
        return Stepper(run, lambda: state.params)

    return build


STEPS = {
    PLAIN: sgd_compiled,
    "vgrad": in_vgrad(None),
    **{f"vgrad-{backend}": in_vgrad(backend) for backend in BACKENDS},
    "vmap": by_hand,
    "opacus-hooks": in_opacus("hooks"),
    "opacus-ghost": in_opacus("ghost"),
}


def peak(setting: str, name: str, device: str) -> int:
    """Measure the memory of a step on the largest batch, in this process."""
    chosen = SETTINGS[setting]
    task = Task.of(chosen, device, torch.float32, chosen.samples)
    if name == "plain":
        step, batch = sgd(task).step, task.fixed
    else:
        step = STEPS[name](task).step
        batch = max(task.batches(name), key=lambda drawn: len(drawn[0]))
    step(*batch)
    return memory.above_base(partial(step, *batch), device)["peak_bytes"]


def _sgd(params: Grads, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params.values()), lr=rate, momentum=MOMENTUM)


def _move(params: Grads, grads: Grads, optimizer: torch.optim.Optimizer) -> None:
    """Make a step of SGD along some gradients."""
    for name, param in params.items():
        param.grad = grads[name]
    optimizer.step()
    optimizer.zero_grad()


def _detached(params: Grads) -> Grads:
    return {name: param.detach().clone() for name, param in params.items()}

"""The training run of a deep ensemble: many members on the same data.

E members. They differ in initialisation and in batches. Without privacy all of them
take a step at once; with privacy each takes its own, on a Poisson batch and with noise
of its own. Every one of these steps uses the same data, so E members that take T steps
each spend what E * T steps of one model do: the plan is made for so many.

Reference: Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty
Estimation using Deep Ensembles, arXiv 1612.01474.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad import dp, optim
from vgrad.cli import models, setup
from vgrad.cli.arguments import Settings
from vgrad.cli.data import Dataset
from vgrad.cli.precision import POLICIES, under
from vgrad.cli.setup import Job, Model, Pair, Taken, Trainer
from vgrad.ensemble.execution import Strategy
from vgrad.ensemble.forward import ensemble_forward
from vgrad.ensemble.gradients import ensemble_grad
from vgrad.ensemble.stacking import member, member_seed, stack
from vgrad.functional.losses import batch_loss
from vgrad.functional.model import FunctionalModel
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.precision import DynamicLossScale, LossScale
from vgrad.process import ALONE
from vgrad.training import EnsembleState, TrainState, ensemble_train_step
from vgrad.typing import Buffers, Params

_ROWS = 1024
"""Images at a time, so that memory does not grow with the data."""


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


def prepare(settings: Settings) -> Job:
    """Do for an ensemble what `setup.prepare` does for one model.

    Raises:
        FileNotFoundError, ValueError: as `setup.prepare`, or the members that a factory
            made are not alike.
    """
    found, ends = setup.read(settings)
    device = torch.device(settings.device)
    modules = [
        models.build(settings.model, found.shape, seed=member_seed(settings.seed, i))
        for i in range(settings.members)
    ]
    one = setup.tried(settings, found, modules[0])
    model = Model(*stack(module.train().to(device) for module in modules))
    strategy = _strategy(settings, model, found)
    scores = _scorer(settings, model.function, strategy)
    forms: dict[str, Any] = {"strategy of members": strategy}
    plan, private = None, ()
    if settings.private:
        plan = setup.planned(settings, found, steps=ends[-1] * settings.members)
        of_one = dataclasses.replace(plan, steps=ends[-1])
        advance = _private_advance(setup.private_advance(settings, one, of_one))
        private = Trainer(advance, scores, _spent(plan, settings.members))
        forms |= setup.forms(one.params)
    return Job(
        settings,
        found.to(device),
        model.function,
        plan,
        ends,
        Pair(
            private,
            Trainer(
                _plain_advance(settings, model, found, strategy),
                scores,
                lambda step: None,
            ),
        ),
        _start(settings, model),
        setup.describe(settings, found, plan, forms),
    )


def _strategy(settings: Settings, model: Model, found: Dataset) -> Strategy:
    """Choose a strategy: the cheapest, or the loop where an op cannot be batched."""
    device = torch.device(settings.device)
    on_cuda = device.type == "cuda"
    count = settings.members
    images = torch.zeros(count, 2, *found.shape[:3], device=device)
    labels = torch.zeros(count, 2, dtype=torch.int64, device=device)
    function = under(settings.precision, model.function)
    loss = batch_loss(function, F.cross_entropy)
    compute = ensemble_grad(loss, in_dims=0, strategy="hybrid")
    with ALONE, torch.random.fork_rng([device] if on_cuda else []):
        try:
            compute(model.params, model.buffers, images, labels)
        except UnsupportedOp:
            return "loop"
    return "auto"


def _scorer(
    settings: Settings, fmodel: FunctionalModel, strategy: Strategy
) -> Callable[[Any, Tensor], Tensor]:
    """Make the function that runs all members of a state in evaluation mode."""
    forward = ensemble_forward(
        under(settings.precision, fmodel.eval()), chunk_size=_ROWS, strategy=strategy
    )
    return lambda state, images: forward(state.params, state.buffers, images)


def _spent(plan: dp.Plan, members: int) -> Callable[[int], float]:
    """Count the steps of all members."""
    return lambda step: plan.epsilon(step * members)


def _private_advance(advance: Callable) -> Callable:
    """Let one member after the other take its step."""

    def run(state: PrivateMembers, data: Dataset) -> tuple[PrivateMembers, Taken]:
        results = [advance(each, data) for each in state.members]
        states, taken = zip(*results, strict=True)
        losses, samples, skipped = zip(*taken, strict=True)
        return PrivateMembers(states), Taken(
            # One by one: what an empty batch counts is on the CPU.
            sum((loss.double() for loss in losses), torch.zeros(())),
            sum(samples),
            sum(skipped, torch.zeros(())),
        )

    return run


def _plain_advance(
    settings: Settings, model: Model, found: Dataset, strategy: Strategy
) -> Callable:
    """Let all members take a step at once, each on a batch of its own."""
    step = ensemble_train_step(
        batch_loss(model.function, F.cross_entropy),
        optim.sgd(settings.lr),
        in_dims=0,
        strategy=strategy,
        policy=POLICIES[settings.precision],
    )
    size = len(found.y_train)

    def draw(state: EnsembleState) -> Tensor:
        source = setup.shuffles(state)
        orders = [
            torch.randperm(size, generator=source)[: settings.batch_size]
            for _ in range(settings.members)
        ]
        return torch.stack(orders)

    return setup.advance(step, draw)


def _start(settings: Settings, model: Model) -> Pair:
    """Make the states before the first step, each with a key of its own."""
    plain = setup.first(
        settings,
        EnsembleState.create,
        model,
        setup.plain_key(settings),
        DynamicLossScale(),
    )
    if not settings.private:
        return Pair((), plain)
    states = [
        setup.first(
            settings,
            TrainState.create,
            Model(model.function, member(model.params, i), member(model.buffers, i)),
            setup.private_key(settings, i),
            setup.PRIVATE_SCALE,
        )
        for i in range(settings.members)
    ]
    return Pair(PrivateMembers(tuple(states)), plain)


def _stacked(entries: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Give entries of the same names a member axis."""
    return {name: torch.stack([each[name] for each in entries]) for name in entries[0]}

"""The training run of a deep ensemble: many members on the same data.

E members. They differ in initialisation and in batches. Without privacy all of them
take a step at once. With privacy each takes its own, on a Poisson batch and with noise
of its own. Every step uses the same data, so T steps of each of E members spend as much
as E * T steps of one model: the plan is made for so many.

Reference: Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty
Estimation using Deep Ensembles, arXiv 1612.01474.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad import optim
from vgrad.cli import models, setup
from vgrad.cli.data import Dataset
from vgrad.cli.evaluate import ROWS
from vgrad.cli.settings import Settings
from vgrad.cli.setup import Job, Model, Pair, Taken, Trainer
from vgrad.ensemble.forward import ensemble_forward
from vgrad.ensemble.gradients import ensemble_grad
from vgrad.ensemble.stacking import member, member_seed, stack
from vgrad.functional.losses import batch_loss
from vgrad.generators import kept_random_state
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.precision import LossScale
from vgrad.training import EnsembleState, TrainState, ensemble_train_step
from vgrad.typing import Buffers, EnsembleStrategy, Params


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


def prepare(settings: Settings, extended: Sequence[int] = ()) -> Job:
    """Do for an ensemble what `setup.prepare` does for one model.

    Raises:
        FileNotFoundError, ValueError: as `setup.prepare`, or the members that a factory
            made are not alike.
    """
    settings, found, ends = setup.read(settings, extended)
    count, device = settings.members, torch.device(settings.device)
    modules = [
        models.build(settings.model, found.shape, seed=member_seed(settings.seed, i))
        for i in range(count)
    ]
    one = setup.tried(settings, found, modules[0])
    model = Model(*stack(module.train().to(device) for module in modules))
    strategy = _strategy(settings, model, found)
    plain = _plain_trainer(settings, model, found, strategy)
    start = setup.plain_state(settings, model, EnsembleState.create)
    trainers, starts = Pair((), plain), Pair((), start)
    plan, forms = None, {"strategy of members": strategy}
    if settings.private:
        plan = total = setup.planned(settings, found, ends)
        of_one = dataclasses.replace(plan, steps=ends[-1])
        trainers = trainers._replace(
            private=Trainer(
                _private_advance(setup.private_advance(settings, one, of_one)),
                plain.scores,
                lambda step: total.epsilon(step * count),
            )
        )
        starts = Pair(_private_start(settings, model), start)
        forms |= setup.forms(one.params)
    return Job(
        settings,
        found.to(device),
        plan,
        extended,
        ends,
        trainers,
        starts,
        setup.describe(settings, found, plan, forms),
    )


def _plain_trainer(
    settings: Settings, model: Model, found: Dataset, strategy: EnsembleStrategy
) -> Trainer:
    """Let all members take a step at once, each on a batch of its own."""
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
        setup.plain_advance(settings, found, setup.compiled(settings, step)),
        lambda state, images: forward(state.params, state.buffers, images),
        lambda step: None,
    )


def _strategy(settings: Settings, model: Model, found: Dataset) -> EnsembleStrategy:
    """Choose a strategy: the cheapest, or the loop where an op cannot be batched."""
    images, labels = setup.blank(settings, found, settings.members, 2)
    function = models.under(settings.precision, model.function)
    loss = batch_loss(function, F.cross_entropy)
    compute = ensemble_grad(loss, in_dims=0, strategy="hybrid")
    with kept_random_state([images]):
        try:
            compute(model.params, model.buffers, images, labels)
        except UnsupportedOp:
            return "loop"
    return "auto"


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


def _private_start(settings: Settings, model: Model) -> PrivateMembers:
    """Make the states of the members before the first step, each with its own key."""
    values = [
        Model(model.function, member(model.params, i), member(model.buffers, i))
        for i in range(settings.members)
    ]
    states = [setup.private_state(settings, one, i) for i, one in enumerate(values)]
    return PrivateMembers(tuple(states))


def _stacked(entries: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Give entries of the same names a member axis."""
    return {name: torch.stack([each[name] for each in entries]) for name in entries[0]}

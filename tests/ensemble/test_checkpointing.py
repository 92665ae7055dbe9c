"""Activation checkpoints in members: regions run again in the backward pass."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import oracle
from tests.losses import randn
from vgrad.ensemble import ensemble_forward, ensemble_grad, stack
from vgrad.training import EnsembleState, ensemble_train_step

X, Y = randn(5, 4), randn(5, 2, seed=1)
every_strategy = pytest.mark.parametrize("strategy", ["auto", "vmap", "hybrid", "loop"])


class Net(nn.Module):
    def __init__(self, recomputed, drop=0.0):
        super().__init__()
        self.recomputed = recomputed
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(6, 2)
        self.register_buffer("scale", torch.tensor(2.0))
        self.double()

    def region(self, x):
        return self.drop(self.second(x.tanh()) * self.scale).sin()

    def forward(self, x):
        x = self.first(x)
        if self.recomputed:
            return self.head(checkpoint(self.region, x, use_reentrant=False))
        return self.head(self.region(x))


def members(recomputed, drop=0.0):
    torch.manual_seed(0)
    return [Net(recomputed, drop) for _ in range(3)]


@every_strategy
def test_gradients_are_those_of_the_modules(strategy):
    models = members(recomputed=True)
    fmodel, params, buffers = stack(copy.deepcopy(models))
    found = ensemble_grad(vgrad.batch_loss(fmodel, F.mse_loss), strategy=strategy)(
        params, buffers, X, Y
    )
    for member, model in enumerate(models):
        F.mse_loss(model(X), Y).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        own = {name: grad[member] for name, grad in found.grads.items()}
        oracle.assert_exact(own, expected, 1e-12)


@every_strategy
def test_outputs_can_be_differentiated(strategy):
    models = members(recomputed=True)
    fmodel, params, buffers = stack(copy.deepcopy(models))
    params = {name: each.detach().requires_grad_() for name, each in params.items()}
    output = ensemble_forward(fmodel, strategy=strategy)(params, buffers, X)
    grads = torch.autograd.grad(output.square().sum(), [*params.values()])
    for member, model in enumerate(models):
        model(X).square().sum().backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        own = {n: g[member] for n, g in zip(params, grads, strict=True)}
        oracle.assert_exact(own, expected, 1e-12)


@pytest.mark.parametrize("strategy", ["vmap", "hybrid", "loop"])
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_the_same_random_numbers_are_drawn_again(strategy, randomness):
    found = []
    for recomputed in (False, True):
        fmodel, params, buffers = stack(members(recomputed, 0.4))
        compute = ensemble_grad(
            vgrad.batch_loss(fmodel, F.mse_loss),
            strategy=strategy,
            randomness=randomness,
        )
        torch.manual_seed(3)
        found.append(compute(params, buffers, X, Y).grads)
    oracle.assert_exact(found[1], found[0], 1e-12)


def test_autocast_is_on_in_the_repetition():
    found = []
    for recomputed in (False, True):
        models = [model.float() for model in members(recomputed)]
        fmodel, params, buffers = stack(copy.deepcopy(models))
        compute = ensemble_grad(vgrad.batch_loss(fmodel, F.mse_loss), strategy="vmap")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(compute(params, buffers, X.float(), Y.float()).grads)
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def test_members_train_with_checkpoints():
    moved = []
    for recomputed in (False, True):
        fmodel, params, buffers = stack(members(recomputed))
        tx = vgrad.optim.adam(0.01)
        step = ensemble_train_step(vgrad.batch_loss(fmodel, F.mse_loss), tx)
        state = EnsembleState.create(tx, params, buffers, seed=1)
        for _ in range(3):
            state, _ = step(state, X, Y)
        moved.append(state.params)
    oracle.assert_exact(moved[1], moved[0], 1e-12)


class Nested(Net):
    def forward(self, x):
        def outer(x):
            return checkpoint(self.region, x, use_reentrant=False).sin()

        return self.head(checkpoint(outer, self.first(x), use_reentrant=False))


def test_a_checkpoint_inside_of_another_is_refused():
    fmodel, params, buffers = stack([Nested(recomputed=True) for _ in range(2)])
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    with pytest.raises(vgrad.UnsupportedOp, match='inside of another.*"loop"'):
        ensemble_grad(loss, strategy="vmap")(params, buffers, X, Y)

"""Keys, plans, data and private gradients for the tests of this folder."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests import oracle
from vgrad.dp import Plan, PrivateGradients, secret_key

KEY = secret_key(seed=0)


def plan(size, rate, bound=1.0, noise=0.0, steps=4, delta=1e-3, **others):
    return Plan(size, rate, noise, bound, steps, delta, **others)


def private(plan, model, dataset, criterion=F.cross_entropy, **options):
    options = {"plan": plan, "key": KEY} | options
    return PrivateGradients(model, criterion, dataset, **options)


def first(private):
    return next(iter(private.loader))


def grads(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def data(size=20, inputs=6, dtype=torch.float64):
    """Return vectors of three classes, the same ones at each call."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(size, inputs, dtype=dtype, generator=source)
    return TensorDataset(x, torch.randint(3, (size,), generator=source))


def net(inputs=6, hidden=4):
    torch.manual_seed(0)
    layers = nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3)
    return nn.Sequential(*layers).double()


def functional(model, criterion=F.cross_entropy, **options):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    return vgrad.sample_loss(fmodel, criterion, **options), params, buffers


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def mean(found, plan, bound=None):
    """Clip gradients of samples, and divide their sum as a plan does."""
    total = oracle.clipped(found, plan.max_norm if bound is None else bound)
    return {name: each / plan.expected_batch_size for name, each in total.items()}


def mean_of_loop(model, batch, plan, bound=None):
    """Return gradients of samples, by a loop of autograd over a batch."""
    found = oracle.model_gradients(model, loss, batch, len(batch[0]))
    return mean(found, plan, bound)

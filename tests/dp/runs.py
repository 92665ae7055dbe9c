"""Keys, plans and private gradients for the tests of this folder."""

from torch.nn import functional as F

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

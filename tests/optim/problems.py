"""Losses to train on, gradients of plain autograd, and runs of both libraries."""

import torch
from torch.utils import _pytree as pytree

from vgrad import optim


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def rosenbrock(params):
    """The valley of Rosenbrock, from the customary start at (-1.2, 1)."""
    x, y = params["x"], params["y"]
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def perceptron(*, sign=1.0):
    """A regression with one hidden layer, to be turned over where one maximizes."""
    shapes = [(8, 3), (8, 2), (4, 3), (4,), (2, 4)]
    drawn = random_tensors(dict(enumerate(shapes))).values()
    inputs, targets, *start = drawn

    def loss(params):
        hidden = torch.tanh(inputs @ params["0.weight"].T + params["0.bias"])
        return sign * (hidden @ params["1.weight"].T - targets).square().mean()

    return dict(zip(("0.weight", "0.bias", "1.weight"), start, strict=True)), loss


def matrices(*, sign=1.0):
    """The perceptron with a constant bias, for Muon, which takes matrices only."""
    start, loss = perceptron(sign=sign)
    bias = start.pop("0.bias")
    return start, lambda params: loss({**params, "0.bias": bias})


def random_tensors(shapes, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def random_gradients(params, *, seed, dtype=None):
    dtype = dtype or next(iter(params.values()), torch.ones(())).dtype
    shapes = {name: p.shape for name, p in params.items()}
    return random_tensors(shapes, seed=seed, dtype=dtype)


def leaves_of(params):
    """Copies of parameters that torch can train."""
    return {name: p.detach().clone().requires_grad_() for name, p in params.items()}


def values(leaves):
    return {name: p.detach().clone() for name, p in leaves.items()}


def gradients(loss, params):
    """The gradients of plain autograd."""
    leaves = leaves_of(params)
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def stacked(trees):
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def member(tree, index):
    return pytree.tree_map(lambda leaf: leaf[index], tree)


def train(tx, params, loss, steps, state=None):
    """Run an optimizer of the package, on from a state if there is one."""
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        params, state = optim.step(tx, gradients(loss, params), state, params)
    return params, state


def train_with_torch(make, params, loss, steps, schedule=None):
    """Run an optimizer of `torch.optim` on copies: `make(list of parameters)`."""
    leaves = leaves_of(params)
    optimizer = make(list(leaves.values()))
    rates = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    go_on(optimizer, leaves, loss, steps, rates)
    return values(leaves)


def go_on(optimizer, leaves, loss, steps, rates=None):
    """Take steps of an optimizer of torch."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(leaves).backward()
        optimizer.step()
        if rates:
            rates.step()


def stepped_with_torch(optimizer, leaves, grads):
    """Take one step of an optimizer of torch along given gradients."""
    for name, leaf in leaves.items():
        leaf.grad = None if grads[name] is None else grads[name].clone()
    optimizer.step()

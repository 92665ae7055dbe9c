"""Private gradients on the module itself: what is read late, and what stays as it was.

The reference is a loop of plain autograd over the module, sample by sample.
"""

import collections
import copy
import functools
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests import oracle
from vgrad import FallbackWarning, make_functional_with_buffers
from vgrad.dp import Plan, PrivateGradients, secret_key

KEY = secret_key(seed=0)
PLAN = Plan(
    dataset_size=24,
    sampling_rate=0.3,
    noise_multiplier=0.0,
    max_norm=0.5,
    steps=8,
    delta=1e-3,
)
SOURCE = torch.Generator().manual_seed(1)
X = 2 * torch.randn(24, 4, dtype=torch.float64, generator=SOURCE)
Y = torch.randint(3, (24,), generator=SOURCE)
STRATEGIES = ["recorded", "vmap", "loop"]


def expected(model, step, criterion=F.cross_entropy):
    """Return what a loop over samples gives on the module as it is."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for row in PLAN.sample(key=KEY, step=step).tolist():
        loss = criterion(model(X[row : row + 1]), Y[row : row + 1])
        grads = torch.autograd.grad(loss, [*params.values()], materialize_grads=True)
        norm = sum(each.square().sum() for each in grads).sqrt()
        for name, grad in zip(params, grads, strict=True):
            total[name] += grad * min(1.0, PLAN.max_norm / float(norm))
    return {name: each / PLAN.expected_batch_size for name, each in total.items()}


def bridge(model, criterion=F.cross_entropy, **options):
    dataset = TensorDataset(X, Y)
    given = {"plan": PLAN, "key": KEY} | options
    return PrivateGradients(model, criterion, dataset, **given)


def grads(model):
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def check_steps(model, change=lambda: None, steps=2, **options):
    """Compare steps, with a change before each but the first."""
    private = bridge(model, **options)
    for step, batch in zip(range(steps), private.loader, strict=False):
        if step:
            change()
        right = expected(copy.deepcopy(model) if options.get("copied") else model, step)
        private.backward(*batch)
        oracle.assert_exact(grads(model), right)
        model.zero_grad()


class Scaled(nn.Module):
    """A layer, and a function of its output and of what the module holds."""

    def __init__(self, held, read):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.held, self.read = held, read

    def forward(self, x):
        return self.read(self.held, self.layer(x), x)


class Factor:
    """An object that is called, with a state."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor

    def times(self, value):
        return value * self.factor


class Slotted:
    __slots__ = ("__private", "factor")

    def __init__(self, factor=1.0):
        self.factor = factor


def ema(modules):
    with torch.no_grad():
        modules[0].weight.mul_(5)


def teacher():
    return nn.Linear(4, 3).double().requires_grad_(False)


def closure():
    factor = 1.0

    def scaled(value):
        return value * factor

    def change(to):
        nonlocal factor
        factor = to

    scaled.change = change
    return scaled


def attribute(held):
    held.factor = 5.0


LATE = {
    "namespace": (types.SimpleNamespace, lambda c, h, x: h * c.factor, attribute),
    "callable": (Factor, lambda c, h, x: c(h), attribute),
    "method": (
        lambda: Factor().times,
        lambda c, h, x: c(h),
        lambda c: attribute(c.__self__),
    ),
    "partial": (
        lambda: functools.partial(Factor.times, Factor()),
        lambda c, h, x: c(h),
        lambda c: attribute(c.args[0]),
    ),
    "slots": (Slotted, lambda c, h, x: h * c.factor, attribute),
    "nested": (
        lambda: {"a": [(types.SimpleNamespace(b=Factor()),)]},
        lambda c, h, x: c["a"][0][0].b(h),
        lambda c: attribute(c["a"][0][0].b),
    ),
    "set": (lambda: {1}, lambda c, h, x: h * len(c), lambda c: c.update({2, 3})),
    "array": (
        lambda: np.ones(1),
        lambda c, h, x: h * float(c[0]),
        lambda c: c.fill(6.0),
    ),
    "bytes": (
        lambda: bytearray(b"\1"),
        lambda c, h, x: h * c[0],
        lambda c: c.extend(b"") or c.__setitem__(0, 3),
    ),
    "deque": (
        lambda: collections.deque([1.0], maxlen=1),
        lambda c, h, x: h * c[0],
        lambda c: c.append(4.0),
    ),
    "closure": (closure, lambda c, h, x: c(h), lambda c: c.change(4.0)),
    "attribute of a function": (
        lambda: setattr(f := lambda h: h, "factor", 1.0) or f,
        lambda c, h, x: h * c.factor,
        attribute,
    ),
    "tensor by data": (
        lambda: torch.ones(3).double(),
        lambda c, h, x: h * c,
        lambda c: c.data.mul_(5),
    ),
    "tensor in a set": (
        lambda: {torch.ones(3).double()},
        lambda c, h, x: h * next(iter(c)),
        lambda c: next(iter(c)).data.mul_(5),
    ),
    "tensor in a tuple": (
        lambda: (torch.ones(3).double(),),
        lambda c, h, x: h * c[0],
        lambda c: c[0].mul_(5),
    ),
    "attribute of a tensor": (
        lambda: setattr(t := torch.ones(3).double(), "tau", 1.0) or t,
        lambda c, h, x: h * c * c.tau,
        lambda c: setattr(c, "tau", 5.0),
    ),
    "teacher": (lambda: [teacher()], lambda c, h, x: h + c[0](x), ema),
    "teacher in an object": (
        lambda: types.SimpleNamespace(net=teacher()),
        lambda c, h, x: h + c.net(x),
        lambda c: ema([c.net]),
    ),
}
for name in ("namespace",):
    LATE[name] = (lambda: types.SimpleNamespace(factor=1.0), *LATE[name][1:])


@pytest.mark.parametrize("name", LATE)
def test_values_are_read_when_they_are_used(name):
    make, read, change = LATE[name]
    model = Scaled(make(), read)
    check_steps(model, lambda: change(model.held))


def test_the_state_of_a_hook_is_read_when_the_hook_runs():
    hook, before = Factor(), Factor()
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model[0].register_forward_hook(lambda module, args, out: hook(out))
    model[0].register_forward_pre_hook(lambda module, args: (before(args[0]),))

    def change():
        hook.factor, before.factor = 4.0, 0.5

    check_steps(model, change)


def test_marks_on_parameters_are_seen():
    class Marked(nn.Linear):
        def forward(self, x):
            return super().forward(x) * getattr(self.weight, "tau", 1.0)

    model = Marked(4, 3).double()
    model.weight.tau = 2.0
    check_steps(model, lambda: setattr(model.weight, "tau", 5.0))
    assert vars(model.weight) == {"tau": 5.0}


class Writing(nn.Module):
    """Writes into whatever it holds, as caches, counters and statistics do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.other = nn.Linear(3, 3).double()
        self.register_buffer("mean", torch.zeros(3).double())
        self.register_buffer("table", None, persistent=False)
        self.calls, self.box = 0, types.SimpleNamespace(calls=0)
        self.list, self.full, self.dict, self.set = [], [1], {}, set()
        self.deque = collections.deque([0], maxlen=2)
        self.array, self.bytes = np.zeros(2), bytearray(2)
        self.slotted, self.running = Slotted(), torch.zeros(3).double()
        self.function = lambda: None
        self.counter = closure()
        self.pair = (types.SimpleNamespace(last=None), [])
        self.teacher = [teacher()]

    def forward(self, x):
        out = self.other(torch.tanh(self.layer(x)))
        self.calls += 1
        self.box.calls += 1
        self.box.last = self.new = self.slotted.factor = out
        self.list.append(out)
        self.full[0] = out
        self.dict["last"] = out
        self.set.add(out)
        self.deque.append(out)
        self.array += 1
        self.bytes[0] += 1
        self.function.last = out
        self.counter.change(out)
        self.pair[0].last = out
        self.pair[1].append(out)
        self.layer.weight.last = out
        self.training = not self.training
        self.running += 1
        self.table = torch.arange(3).double() if self.table is None else self.table
        self.mean.add_(1)
        self.teacher[0].weight.data.add_(1)
        self.layer.register_forward_hook(lambda *_: None)
        self.other = nn.Identity()
        return out + self.table + self.running + self.calls


def snapshot(value, seen):
    """Return all that an object holds, as nested lists of identities and numbers."""
    if isinstance(value, torch.Tensor):
        return id(value), value.detach().clone().tolist(), id(value.grad), [*vars(value)]
    if isinstance(value, str | int | float | None):
        return value
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, np.ndarray | bytearray):
        return [*value]
    if isinstance(value, dict):
        return id(value), [(key, snapshot(each, seen)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | collections.deque):
        return id(value), [snapshot(each, seen) for each in value]
    parts = [vars(value)] if hasattr(value, "__dict__") else [value.factor]
    cells = getattr(value, "__closure__", None) or ()
    return id(value), [snapshot(x, seen) for x in parts], [
        snapshot(cell.cell_contents, seen) for cell in cells
    ]


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_all_that_a_forward_pass_writes_is_put_back(strategy, chunk_size):
    model = Writing()
    private = bridge(model, strategy=strategy, chunk_size=chunk_size)
    for step, batch in zip(range(2), private.loader, strict=False):
        right = expected_of_copies(model, step)
        before = snapshot(model, {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            private.backward(*batch)
        found = grads(model)
        oracle.assert_exact(found, right)
        model.zero_grad()
        assert snapshot(model, {}) == before


def expected_of_copies(model, step):
    """Return the gradients of a loop that begins each sample with the same module."""

    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            memo = {id(p): p for p in model.parameters()}
            return copy.deepcopy(model, memo)(x)

    # A closure is shared by copies.
    found = expected(Fresh(), step)
    model.counter.change(1.0)
    for parameter in model.parameters():
        vars(parameter).clear()
    vars(model.function).clear()
    return {name.removeprefix("model."): each for name, each in found.items()}

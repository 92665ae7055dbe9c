"""One table of small programs: before, the value that a loss reads, a change of it.

A row is a program `before => value => change --> outcome`, whose parts run inside of
one function; the value is a factor of the loss. The outcome is `captured again` (where
none is written), the `same capture`, a `constant` of the capture (until `.clear()`, or
until it is compared with eager mode), or why the function runs in eager mode. But for
constants the gradients are those of plain autograd, before and after. A program without
a change has state of its own: it is refused, or is the same capture.
"""

# ruff: noqa: F401

import abc
import builtins
import collections
import contextvars
import datetime
import enum
import functools
import itertools
import math
import operator
import os
import random
import re
import sys
import types
import warnings
from collections import deque
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import vgrad
from tests import oracle

pytestmark = pytest.mark.compiled

D = torch.float64
X = torch.tensor([[3.0, 4.0], [0.5, 1.0], [2.0, -1.0]], dtype=D)
W = {"w": torch.tensor([1.0, 2.0], dtype=D)}

TABLE = """
# Variables and functions.

beta = 2.0 => beta => beta = 3.0
=> attempt(lambda: beta) => beta = 3.0
beta = 3.0 => attempt(lambda: beta) => del beta
beta = 2.0, (1,) => len(repr(beta)) => beta = 2.0, (True,)
beta = slice([2.0], 1) => beta.start[0] => beta.start[0] = 3.0
beta = slice(2, 1) => float(beta.start) => beta = slice(3, 1)
beta = 0.0 => 2.0 + math.copysign(1.0, beta) => beta = -0.0
thing = Plain(math.nan) => 1.0 + math.isnan(thing.beta) => thing.beta = float("nan")
  --> same capture
Level = enum.Enum("Level", {"LOW": 2.0, "HIGH": 3.0}); beta = Level.LOW => beta.value
  => beta = Level.HIGH
f = lambda value=2.0: value => f() => f.__defaults__ = (3.0,)
f = lambda *, beta=2.0: beta => f() => f.__kwdefaults__.update(beta=3.0)
f = lambda: 2.0 => f() => f.__code__ = (lambda: 3.0).__code__
held = [2.0]; f = functools.partial(sum, held) => f() => held[0] = 3.0
thing = Plain(); f = functools.lru_cache(lambda: thing.beta) => f() => thing.beta = 7.0;
  f.cache_clear() --> constant
f = functools.cache(lambda size: torch.full((size,), 2.0)) => f(2).sum()
  --> same capture
f = functools.singledispatch(lambda thing: 2.0); thing = Plain() => f(thing)
  => f.register(Plain, lambda thing: 7.0) --> constant
f = counter() => f() --> changes values
count = itertools.count() => next(count) --> does not repeat
held = {"beta": 2.0}; get = operator.itemgetter("beta") => get(held) --> same capture

# Classes and objects.

thing = Plain(); f = thing.value => f() => thing.beta = 3.0
thing = Plain() => thing.double => thing.beta = 3.0
held = [2.0]; thing = kind(beta=property(lambda _: held[0]))() => thing.beta
  => held[0] = 3.0
held = [2.0]; thing = kind(beta=classmethod(lambda _: held[0]))() => thing.beta()
  => held[0] = 3.0
held = [2.0]; thing = kind(beta=staticmethod(lambda: held[0]))() => thing.beta()
  => held[0] = 3.0
thing = kind()() => perhaps(thing) => thing.beta = 3.0 --> constant
thing = Plain(Plain()) => thing.beta.beta => thing.beta.beta = 3.0
thing = Plain({"beta": 2.0}) => thing.beta["beta"] => thing.beta["beta"] = 3.0
thing = Plain([2.0]) => (lambda own: own.beta[0])(thing) => thing.beta[0] = 3.0
  --> constant
thing = kind(__getattr__=lambda *_: 2.0)() => thing.beta => thing.beta = 3.0
thing = kind(__getattr__=lambda self, name: vars(self)["held"][name])();
  thing.held = {"beta": 2.0} => thing.beta --> same capture
own = kind(beta=2.0); thing = own() => thing.beta => own.beta = 3.0
own = kind(__call__=lambda self: self.beta); thing = own(); thing.beta = 2.0 => thing()
  => thing.beta = 3.0
other = kind(Plain, value=lambda self: 3 * self.beta); thing = Plain() => thing.value()
  => thing.__class__ = other
thing = kind(__slots__=["beta"])(); thing.beta = 2.0 => thing.beta => thing.beta = 3.0
thing = kind(beta=functools.cached_property(lambda _: 2.0))() => thing.beta
  --> same capture
thing = kind(abc.ABC, value=lambda _: 2.0)() => thing.value() --> same capture
kinds = int | float, list[str] => 2.0 + isinstance(2, kinds[0]) --> same capture
thing = Plain() => counts(thing) --> does not repeat
held = contextvars.ContextVar("held", default=2.0) => held.get() => held.set(3.0)
  --> constant
thing = Plain(); thing.f = vgrad.compile(vgrad.per_sample_norm(lambda p, b, x: x))
  => thing.beta --> same capture

# Containers.

held = {"beta": 2.0} => held["beta"] => held["beta"] = 3.0
held = [2.0]; thing = collections.namedtuple("Named", "held")(held) => thing.held[0]
  => held[0] = 3.0
held = {"a": None} => 2.0 + ("a" in held) => held.clear(); held.update(b=None)
held = {"a": 2.0, "bc": 3.0} => len(first(held)) => held.update(a=held.pop("a"))
held = [0.0] => 2.0 + math.copysign(1.0, held[0]) => held[0] = -0.0
held = [7.0], [2.0, 5.0] => 1.0 + len(held[0]) => held[0].append(held[1].pop(0))
held = {2.0} => sum(held) => held.add(1.0)
held = deque([2.0]) => held[0] => held[0] = 3.0
held = {"beta": 2.0}; get = held.get => get("beta") => held.update(beta=3.0)
  --> constant
held = np.array([2.0, 5.0]) => float(held[0]) => held[0] = 3.0 --> constant

# Globals, builtins, modules and the environment.

global BETA; BETA = 2.0 => BETA => BETA = 3.0
global BETA => attempt(lambda: BETA) => BETA = 3.0
=> float(abs(-2.0)) => globals()["abs"] = lambda _: 7.0
names = {"beta": 2.0} => eval("beta", names) => names["beta"] = 3.0
one = {"beta": 2.0}; other = {"beta": 2.0};
  f, g = (eval("lambda: beta", names) for names in (one, other)) => f() * g()
  => other["beta"] = 3.0
held = module(beta=2.0, other=1) => held.beta => held.other = object() --> same capture
vars(builtins)["SCALE_OF_ALL"] = 2.0 => SCALE_OF_ALL
  => vars(builtins)["SCALE_OF_ALL"] = 3.0
held = module(beta=2.0) => held.beta => held.beta = 3.0
held = module(other=1) => attempt(lambda: held.beta) => held.beta = 3.0; del held.other
held = module(beta=2.0); name = "be" + "ta" => getattr(held, name) => held.beta = 3.0
  --> constant
held = module(beta=1.0) => counts(held) and 2.0 - (held.beta < 0) => held.beta = -99.0
  --> changes values
held = installed(beta=2.0); f = function("import state_b; return state_b.beta") => f()
  => held.beta = 3.0 --> constant
held = module(__file__=INSTALLED, table={"beta": 2.0}) => held.table["beta"]
  => held.table.update(beta=3.0)
f = installed_function() => f() --> same capture
os.environ["VGRAD_BETA"] = "2.0" => float(os.environ["VGRAD_BETA"])
  => os.environ["VGRAD_BETA"] = "3.0" --> constant

# Time and random numbers.

=> 2.0 + datetime.datetime(2000, 1, 1, 3).time().hour --> same capture
generator = torch.Generator().manual_seed(1) => torch.rand((), generator=generator)
  --> draws from a generator of its own
generator = random.Random(1) => generator.random() --> does not repeat
random.seed(1) => random.random() --> draws random numbers
np.random.seed(1) => np.random.rand() --> draws random numbers
=> random.SystemRandom().random() --> does not repeat
=> torch.manual_seed(3) and torch.rand(()) --> seed
torch.manual_seed(1) => 1.0 + (torch.initial_seed() == 1) => torch.manual_seed(2)
  --> constant

# Tensors.

t = torch.tensor(2.0) => t => t.fill_(3.0) --> same capture
t = torch.arange(6.0).reshape(2, 3).t(); order = torch.tensor([2, 0, 1])
  => parts(t, order) => t.mul_(2.0); order.copy_(order.roll(1)) --> same capture
held = {"t": torch.tensor(2.0)} => held["t"] => held.update(t=torch.tensor(3.0))
=> torch.tensor([2.0, 3.0]).sum() --> same capture
t = torch.ones(2) => t.sum() => t.data = torch.ones(3)
t = ones() => 1.0 + t.requires_grad => t.requires_grad_()
t = ones().requires_grad_() => 1.0 + (t.grad is None) => t.grad = ones()
t = ones() => 1.0 + bool(t._version) => t.mul_(1)
x = X[1:] => 1.0 + x.storage_offset() --> same capture
t = torch.zeros(()) => t.add_(1.0) --> writes
t = ones(tau=2.0) => t.sum() * t.tau => t.tau = 5.0
t = ones() => getattr(t, "tau", 2.0) => t.tau = 5.0 --> constant
epoch = torch.tensor(0); betas = torch.tensor([2.0, 3.0]) => betas[epoch]
  => epoch.fill_(1) --> value of a tensor for a number
slope = torch.tensor(0.1) => 1 + F.leaky_relu(-torch.ones(()), slope)
  => slope.fill_(0.5) --> value of a tensor for a number
epoch = torch.tensor(0); betas = torch.tensor([2.0, 3.0])
  => betas[torch.tensor(0).copy_(epoch)] => epoch.fill_(1)
  --> value of a tensor for a number
betas = torch.tensor([2.0, 3.0]) => betas[torch.tensor(1)] --> same capture
beta = torch.tensor(2.0) => torch.tensor([beta, beta]).sum() => beta.fill_(3.0)
  --> hands values to Python
place = torch.tensor(1) => torch.arange(4.0).tensor_split(place)[0].sum() + 1
  => place.fill_(3) --> hands values to Python
beta = torch.tensor(2.0) => float(repr(beta)[7:-1]) => beta.fill_(3.0)
  --> hands values to Python

# Modules and functions of torch.

f = nn.HuberLoss(delta=0.5) => f(X[0], X[1]) => f.delta = 0.1
f = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0], dtype=D))
  => f(X[:2], torch.tensor([0, 1]))
  => f.register_buffer("weight", torch.tensor([2.0, 1.0], dtype=D))
f = teacher() => f(X[0]).sum() => f.weight.fill_(3.0) --> same capture
t = teacher().weight; t.tau = 2.0 => t.sum() * t.tau => t.tau = 5.0
f = teacher() => f(X[0]).sum() => f.register_forward_hook(lambda *given: 2 * given[2])
f = teacher() => f(X[0]).sum()
  => HOOKS.append(register_module_forward_hook(lambda *given: 2 * given[2]))
f = nn.Sequential(nn.BatchNorm1d(2)).eval() => 1.0 + f[0].training => f.train()
f = Wrapper() => f(X[0]).sum() --> same capture
f, m, *held = functional(kind(nn.Module, forward=lambda self, x: x * self.beta));
  m.beta = 2.0 => f(*held, X[0]).sum() => m.beta = 3.0
f, m, *held = functional(kind(nn.Module, forward=lambda self, x: x * perhaps(self)))
  => f(*held, X[0]).sum() => m.beta = 3.0
f, m, *held = functional(kind(nn.Module, forward=lambda self, x: x * self.held[0]));
  m.held = [2.0] => f(*held, X[0]).sum() => m.held[0] = 3.0
f, m, *held = functional(nn.ReLU6) => f(*held, X[0]).sum() => m.max_val = 3.5
f, m, *held = functional(nn.ReLU) => f(*held, X[0]).sum()
  => m.register_forward_hook(lambda *given: 2 * given[2])
f = type("Twice", (Twice,), {}) => f.apply(X[0]).sum() => Twice.factor = 3.0
  --> constant
t = ones() => F.gelu(t).sum() => F.gelu = lambda x: 3 * x
f = teacher() => f(X[0]).sum() => F.linear = lambda x, weight, bias: 3 * x
  --> constant
held = [3.0]; t = ones(); F.gelu = lambda x: held[0] * x => F.gelu(t).sum()
  => held[0] = 7.0
=> 1.0 + (torch.get_default_dtype() == D) => torch.set_default_dtype(D)
=> 1.0 + (torch.get_float32_matmul_precision() == "highest")
  => torch.set_float32_matmul_precision("medium")
=> 1.0 + torch.are_deterministic_algorithms_enabled()
  => torch.use_deterministic_algorithms(True)
torch.use_deterministic_algorithms(True) => torch.get_deterministic_debug_mode()
  => torch.use_deterministic_algorithms(True, warn_only=True)
"""

ROWS = [row for row in TABLE.replace("\n  ", " ").splitlines() if row and row[0] != "#"]

# What programs use. They run in a copy of this module's names.

INSTALLED = "/lib/site-packages/package.py"
COUNT = itertools.count()
HOOKS = []


def attempt(read):
    try:
        return read()
    except (NameError, ImportError, AttributeError):
        return 2.0


def perhaps(thing):
    return getattr(thing, "beta", 2.0)


def first(held):
    return next(iter(held))


def kind(*bases, **names):
    """Return a class that a program may change."""
    return type("Own", bases, names)


def function(body):
    names = {}
    exec(f"def f():\n {body}", names)
    return names["f"]


def ones(**attributes):
    made = torch.ones(3, dtype=D)
    vars(made).update(attributes)
    return made


def module(name="state_a", **held):
    made = types.ModuleType(name)
    made.__file__ = os.path.abspath(f"{name}.py")
    vars(made).update(held)
    return made


def installed(name="state_b", **held):
    sys.modules[name] = module(name, **held)
    return sys.modules[name]


def installed_function():
    code = compile("lambda: (beta, count)[0]", INSTALLED, "eval")
    return eval(code, {"beta": 2.0, "count": COUNT})


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


def counts(thing):
    thing.beta += 1
    return thing.beta


def parts(table, order):
    rows = table.unbind(1)
    whole, rest = table.split([2, 1], 0)
    sums = (rows[0] * rows[1][order]).sum() + table[-2:, 1].sum() * whole[:, 1:].sum(1)
    return (sums[1] * rest).sum()


def functional(make):
    f, params, buffers = vgrad.make_functional_with_buffers(make())
    return f, dict(f.named_modules())[""], params, buffers


def teacher():
    return nn.Linear(2, 2).double().requires_grad_(False)


class Plain:
    def __init__(self, beta=2.0):
        self.beta = beta

    def value(self):
        return self.beta

    @property
    def double(self):
        return 2 * self.beta


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = teacher()

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        return self.inner.__call__(x)


class Twice(torch.autograd.Function):
    factor: ClassVar = 2.0
    generate_vmap_rule = True
    forward = staticmethod(lambda x: x * Twice.factor)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g * Twice.factor)


REPLACED = (F, "gelu"), (F, "linear"), (builtins, "SCALE_OF_ALL")


@pytest.fixture
def put_back(monkeypatch):
    """Put back all that a program may replace."""
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)
    state = torch.get_rng_state()
    with mock.patch.dict(os.environ):
        yield
    for name in [each for each in sys.modules if each.startswith("state_")]:
        del sys.modules[name]
    while HOOKS:
        HOOKS.pop().remove()
    torch.set_rng_state(state)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("row", ROWS, ids=[row[:99] for row in ROWS])
@pytest.mark.usefixtures("put_back")
def test_row(row):
    program, _, outcome = row.partition(" --> ")
    before, value, *change = program.split("=>")
    lines = before.strip() or "pass", f"yield lambda: {value}", *change
    names = dict(globals())
    exec("\n ".join(["def steps():", *(each.strip() for each in lines)]), names)
    steps = names["steps"]()
    read = next(steps)

    def loss(params, buffers, x):
        return (params["w"] @ x).square() * read()

    if not change and outcome != "same capture":
        transform = vgrad.per_sample_grad(loss, randomness="same", verify=False)
        compiled = vgrad.compile(transform, fallback="error")
        with pytest.raises(RuntimeError, match=outcome):
            [compiled(W, {}, X) for _ in range(2)]  # the first graph is compared
        return
    compiled = vgrad.compile(vgrad.per_sample_grad(loss))

    def checked():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vgrad.FallbackWarning)
            found = compiled(W, {}, X)["w"]
        expected = oracle.loss_gradients(loss, W, {}, (X,), len(X))["w"]
        assert torch.allclose(found, expected, rtol=oracle.EXACT, atol=oracle.EXACT)
        return found

    if outcome == "constant":
        old = [checked() for _ in range(3)][-1]  # the last one is compared
        next(steps, None)
        assert torch.equal(compiled(W, {}, X)["w"], old)
        text = "at its call 4 its replay does not repeat .* call .clear"
        with pytest.warns(vgrad.CompileWarning, match=text):
            assert not torch.equal(checked(), old)
        assert [each.backend for each in compiled.reports()] == ["eager"]
        compiled.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", vgrad.CompileWarning)
            checked(), checked()
        assert [each.calls for each in compiled.reports()] == [1]
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", vgrad.CompileWarning)
        before = [checked() for _ in range(2)][-1]
        next(steps, None)
        after = [checked() for _ in range(2)][-1]
    texts, reports = [str(each.message) for each in caught], compiled.reports()
    ran = [(each.backend, each.calls) for each in reports]
    if outcome == "same capture":
        assert (ran, texts) == ([("replay", 3)], [])
        return
    assert not torch.allclose(before, after), "the row changes nothing"
    if not outcome:
        assert (ran, texts) == ([("replay", 1)] * 2, []), reports[0].why
    else:
        assert ran[-1] == ("eager", 0)
        assert re.search(outcome, reports[-1].why)
        assert [bool(re.search(outcome, text)) for text in texts] == [True]

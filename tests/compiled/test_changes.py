"""One table of small programs: before, the value that a loss reads, a change of it.

A row has a name, an outcome and a program `before => value => change`, whose parts run
inside of one function; the value is a factor of the loss. The outcome is
`captured again` (where none is written), the `same capture`, or why the function runs
in eager mode. The gradients are those of plain autograd in each case, before and after.
A program without a change has state of its own: it is refused.
"""

# ruff: noqa: F401

import abc
import array
import builtins
import collections
import contextvars
import dataclasses
import datetime
import enum
import functools
import importlib
import io
import itertools
import math
import operator
import os
import random
import re
import sys
import time
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, SequentialSampler

import vgrad
from tests import oracle

pytestmark = pytest.mark.compiled

D = torch.float64
X = torch.tensor([[3.0, 4.0], [0.5, 1.0], [2.0, -1.0]], dtype=D)
W = {"w": torch.tensor([1.0, 2.0], dtype=D)}

TABLE = """
# Variables and functions.

a cell
  beta = 2.0 => beta => beta = 3.0
a cell that was empty
  => attempt(lambda: beta) => beta = 3.0
a cell that is emptied
  beta = 3.0 => attempt(lambda: beta) => del beta
a tuple in a cell
  beta = 2.0, (1,) => len(repr(beta)) => beta = 2.0, (True,)
the sign of zero
  beta = 0.0 => 2.0 + math.copysign(1.0, beta) => beta = -0.0
not a number: same capture
  thing = Plain(math.nan) => 1.0 + math.isnan(thing.beta) => thing.beta = float("nan")
a member of an enum
  Level = enum.Enum("Level", {"LOW": 2.0, "HIGH": 3.0}); beta = Level.LOW
  => beta.value => beta = Level.HIGH
a default
  f = lambda value=2.0: value => f() => f.__defaults__ = (3.0,)
a default of a keyword
  f = lambda *, beta=2.0: beta => f() => f.__kwdefaults__.update(beta=3.0)
code
  f = lambda: 2.0 => f() => f.__code__ = (lambda: 3.0).__code__
a partial
  held = [2.0]; f = functools.partial(sum, held) => f() => held[0] = 3.0
other arguments of a partial
  f = functools.partial(sum, [2.0]) => f() => f.__setstate__((sum, ([3.0],), {}, {}))
attributes of a partial
  f = functools.partial(sum) => perhaps(f) => f.beta = 3.0
a kind of partial: Own
  f = kind(functools.partial)(sum, [2.0]) => f()
a cached function
  thing = Plain(); f = functools.lru_cache(lambda: thing.beta) => f()
  => thing.beta = 7.0; f.cache_clear()
a global behind a cache
  global BETA; BETA = 2.0; f = functools.cache(lambda: BETA) => f()
  => BETA = 3.0; f.cache_clear()
a cached tensor: same capture
  f = functools.cache(lambda size: torch.full((size,), 2.0)) => f(2).sum() => pass
a cached tensor among the last: same capture
  f = functools.lru_cache(maxsize=4)(lambda size: torch.full((size,), 2.0))
  => f(2).sum() => pass
a function registered for a class
  f = functools.singledispatch(lambda thing: 2.0); thing = Plain() => f(thing)
  => f.register(Plain, lambda thing: 7.0)
a counter in a cell: changes values
  f = counter() => f()
a count: count
  count = itertools.count() => next(count)
a generator: generator
  numbers = (each for each in range(9)) => next(numbers)
an iterator: list_iterator
  numbers = iter([2.0] * 20) => next(numbers)
getters: same capture
  held = {"beta": 2.0}; get = operator.itemgetter("beta") => get(held) => pass

# Classes and objects.

a bound method
  thing = Plain(); f = thing.value => f() => thing.beta = 3.0
a property
  thing = Plain() => thing.double => thing.beta = 3.0
the closure of a property
  held = [2.0]; thing = kind(beta=property(lambda _: held[0]))() => thing.beta
  => held[0] = 3.0
a class method
  held = [2.0]; thing = kind(beta=classmethod(lambda _: held[0]))() => thing.beta()
  => held[0] = 3.0
a static method
  held = [2.0]; thing = kind(beta=staticmethod(lambda: held[0]))() => thing.beta()
  => held[0] = 3.0
a new attribute
  thing = kind()() => perhaps(thing) => thing.beta = 3.0
an attribute that hides getattr
  thing = kind(__getattr__=lambda *_: 2.0)() => thing.beta => thing.beta = 3.0
objects with any attribute: same capture
  thing = kind(__getattr__=lambda self, name: vars(self)["held"][name])()
  thing.held = {"beta": 2.0} => thing.beta => pass
a class attribute
  own = kind(beta=2.0); thing = own() => thing.beta => own.beta = 3.0
a special attribute of a class
  held = [2.0]; thing = kind(__scale__=held)() => thing.__scale__[0] => held[0] = 3.0
a special method replaced
  own = kind(__call__=lambda _: 2.0); thing = own() => thing()
  => own.__call__ = lambda _: 3.0
a descriptor
  beta = kind(__get__=lambda self, *_: self.beta, beta=2.0)()
  thing = kind(beta=beta)() => thing.beta => beta.beta = 3.0
another class
  other = kind(Plain, value=lambda self: 3 * self.beta); thing = Plain()
  => thing.value() => thing.__class__ = other
an attribute of a member of an enum
  A = enum.Enum("Mode", "A").A; A.weight = 2.0 => A.weight => A.weight = 3.0
an attribute of a member of numbers
  mode = enum.IntFlag("Mode", "A B"); mode.A.weight = 2.0
  => mode.A.weight * (mode.A | mode.B) => mode.A.weight = 3.0
slots
  thing = Slotted() => thing.beta => thing.beta = 3.0
private slots
  thing = Private() => thing.beta() => thing.set(3.0)
a weak reference
  thing = Plain(); ref = weakref.ref(thing) => ref().beta => thing.beta = 3.0
a cached property: same capture
  thing = kind(beta=functools.cached_property(lambda _: 2.0))() => thing.beta => pass
a class registered with an abstract one
  own = abc.ABCMeta("Abstract", (), {}); thing = Plain()
  => 2.0 + isinstance(thing, own) => own.register(Plain)
a class registered with one of collections
  own = kind(); thing = own(); abstract = collections.abc.Sequence
  => 2.0 + isinstance(thing, abstract) => abstract.register(own)
abstract classes: same capture
  thing = kind(abc.ABC, value=lambda _: 2.0)() => thing.value() => pass
unions and generics: same capture
  kinds = int | float, list[str] => 2.0 + isinstance(2, kinds[0]) => pass
a counter of an object: changes values
  thing = Plain() => counts(thing)
a stream: BytesIO
  stream = io.BytesIO() => 2.0 + stream.tell()
a context variable: ContextVar
  held = contextvars.ContextVar("held", default=2.0) => held.get() => held.set(3.0)
a compiled object: same capture
  thing = Plain(); thing.f = vgrad.compile(vgrad.per_sample_norm(lambda p, b, x: x))
  => thing.beta => pass
garbage: same capture
  => makes_garbage() => pass

# Containers.

a dictionary
  held = {"beta": 2.0} => held["beta"] => held["beta"] = 3.0
a named tuple
  held = [2.0]; thing = Named(held) => thing.held[0] => held[0] = 3.0
a key replaced
  held = {"a": None} => 2.0 + ("a" in held) => held.clear(); held.update(b=None)
the order of keys
  held = {"a": 2.0, "bc": 3.0} => len(first(held)) => held.update(a=held.pop("a"))
the factory of a dictionary
  held = defaultdict(lambda: 2.0) => held.copy()["a"]
  => held.default_factory = lambda: 3.0
attributes of a dictionary
  held = kind(dict)() => perhaps(held) => held.beta = 3.0
keys of a dictionary
  thing = Plain(); held = {thing: 1.0} => first(held).beta => thing.beta = 3.0
the sign of zero in a list
  held = [0.0] => 2.0 + math.copysign(1.0, held[0]) => held[0] = -0.0
a set
  held = {2.0} => sum(held) => held.add(1.0)
a deque
  held = deque([2.0]) => held[0] => held[0] = 3.0
a proxy of a dictionary
  held = {"beta": 2.0}; proxy = types.MappingProxyType(held) => proxy["beta"]
  => held.update(beta=3.0)
a method of a dictionary
  held = {"beta": 2.0}; get = held.get => get("beta") => held.update(beta=3.0)
a special method of a list
  held = [2.0]; length = held.__len__ => length() => held.append(3.0)
an array
  held = np.array([2.0, 5.0]) => float(held[0]) => held[0] = 3.0
a large array: 16392 bytes
  held = np.full(2**11 + 1, 2.0) => float(held[0])
an array of objects: numpy with 8
  held = np.array([2.0], dtype=object) => held[0]
a dictionary with values of its own
  thing = kind(dict, values=lambda self: [])(k=2.0) => thing["k"] => thing["k"] = 3.0
a list that shows other items
  thing = kind(list, __iter__=lambda self: iter(()))([[2.0]]) => thing[0][0]
  => thing[0][0] = 3.0
an iterator that code of a package has too: count
  f = installed_function() => f() + next(COUNT)

# Globals, builtins, modules and the environment.

a global
  global BETA; BETA = 2.0 => BETA => BETA = 3.0
a global that appears
  global BETA => attempt(lambda: BETA) => BETA = 3.0
a global that comes to hide a builtin
  => float(abs(-2.0)) => globals()["abs"] = lambda _: 7.0
a global by its name
  names = {"beta": 2.0}; f = eval("lambda: globals()['be' + 'ta']", names) => f()
  => names.update(beta=3.0)
globals that cannot be compared: generator
  names = {"beta": 2.0, "other": (each for each in "ab")}
  f = eval("lambda: globals()['beta']", names) => f() => names.update(beta=3.0)
a global in evaluated text
  names = {"beta": 2.0} => eval("beta", names) => names["beta"] = 3.0
globals of a module named like one of Python
  names = {"__name__": "profile", "__file__": "/mine/profile.py", "beta": 2.0}
  f = eval("lambda: beta", names) => f() => names["beta"] = 3.0
equal functions of two modules
  one = {"beta": 2.0}; other = {"beta": 2.0}
  f, g = (eval("lambda: beta", names) for names in (one, other))
  => f() * g() => other["beta"] = 3.0
another global: same capture
  held = module(beta=2.0, other=1) => held.beta => held.other = object()
a variable of another frame: _getframe
  held = [2.0]; f = lambda: sys._getframe(1).f_locals["hidden"]; g = lambda hidden: f()
  => g(held[0]) => held[0] = 3.0
a name in builtins
  vars(builtins)["SCALE_OF_ALL"] = 2.0 => SCALE_OF_ALL
  => vars(builtins)["SCALE_OF_ALL"] = 3.0
a builtin replaced
  => float(ascii(2)) => vars(builtins)["ascii"] = lambda _: 7
builtins of a function
  held = {"beta": 2.0}; f = eval("lambda: beta", {"__builtins__": held}) => f()
  => held["beta"] = 3.0
an attribute of a module
  held = module(beta=2.0) => held.beta => held.beta = 3.0
an attribute of a module with a computed name
  held = module(beta=2.0); name = "be" + "ta" => getattr(held, name) => held.beta = 3.0
an attribute of a module by a builtin in a cell
  held = module(beta=2.0); get = getattr; name = "be" + "ta" => get(held, name)
  => held.beta = 3.0
an attribute of a module by an attrgetter
  held = module(beta=2.0); get = operator.attrgetter("be" + "ta") => get(held)
  => held.beta = 3.0
an attribute of a module in a text
  held = module(beta=2.0); text = "{0.beta}" => float(text.format(held))
  => held.beta = 3.0
an attribute that a module gets
  held = module(); name = "be" + "ta" => getattr(held, name, 2.0) => held.beta = 3.0
the dictionary of a module
  held = module(beta=2.0); name = "be" + "ta" => vars(held)[name] => held.beta = 3.0
an attribute computed by a module
  thing = Plain(); held = module(__getattr__=lambda _: thing.beta) => held.beta
  => thing.beta = 3.0
an attribute of a module that the loss sets: changes values
  held = module(beta=1.0) => counts(held) and 2.0 - (held.beta < 0) => held.beta = -99.0
a count in a module: count
  held = module(beta=itertools.count()) => next(held.beta)
a module found in sys.modules: sys.modules
  held = installed(beta=2.0) => sys.modules["state_b"].beta => held.beta = 3.0
a module found by importlib: import_module
  held = installed(beta=2.0) => importlib.import_module("state_b").beta
  => held.beta = 3.0
a module found by import: __import__
  held = installed(beta=2.0) => __import__("state_b").beta => held.beta = 3.0
a module that the loss imports
  held = installed(beta=2.0) => imports() => held.beta = 3.0
a module that the loss imports, replaced
  installed(beta=2.0) => imports() => installed(beta=3.0)
a module that appears: captured again, or reads sys.modules where others have hooks
  => imports_name() => installed(beta=3.0)
a module that the loss imports beside many names
  held = installed(beta=2.0); many = "; ".join(f"'a'.a{n}" for n in range(300))
  code = f"def f():\\n if not f: {many}\\n import state_b\\n return state_b.beta"
  names = {}; exec(code, names) => names["f"]() => held.beta = 3.0
an import that would fail, and does not run: same capture
  names = {}; exec("def f():\\n if not f: from . import b\\n return 2.0", names)
  => names["f"]() => pass
a module in a package
  held = installed("state_c.state_b", beta=2.0); installed("state_c", state_b=held)
  => imports_from_a_package() => held.beta = 3.0
a module of an installed package: same capture
  held = module(__file__=INSTALLED, beta=COUNT) => 3.0 - bool(held.beta) => pass
a function of an installed package: same capture
  f = installed_function() => f() => pass
a class of an installed package: same capture
  installed(__file__=INSTALLED)
  thing = kind(__module__="state_b", beta=2.0, count=COUNT)() => thing.beta => pass
the environment
  os.environ["VGRAD_BETA"] = "2.0" => float(os.environ["VGRAD_BETA"])
  => os.environ["VGRAD_BETA"] = "3.0"
standard output: same capture
  => print("", end="", file=sys.stderr) or 2.0 => pass

# Time and random numbers.

the time: time
  => 1.0 + 0 * time.time()
the date: time
  => 1.0 + 0 * datetime.datetime.now().hour
a clock: time
  clock = time.perf_counter => 1.0 + 0 * clock()
a method named like a clock: same capture
  => 2.0 + datetime.datetime(2000, 1, 1, 3).time().hour => pass
a generator of torch: Generator
  generator = torch.Generator().manual_seed(1) => torch.rand((), generator=generator)
a generator of Python: Random
  generator = random.Random(1) => generator.random()
numbers of Python: draws random numbers
  random.seed(1) => random.random()
numbers of numpy: draws random numbers
  np.random.seed(1) => np.random.rand()
numbers of the system: draws random numbers
  => float(os.urandom(1)[0])
a seed: seed
  => torch.manual_seed(3) and torch.rand(())
the initial seed: seed or the state
  torch.manual_seed(1) => 1.0 + (torch.initial_seed() == 1) => torch.manual_seed(2)

# Tensors.

a tensor in place: same capture
  t = torch.tensor(2.0) => t => t.fill_(3.0)
parts of a tensor in place: same capture
  t = torch.arange(6.0).reshape(2, 3).t(); order = torch.tensor([2, 0, 1])
  => parts(t, order) => t.mul_(2.0); order.copy_(order.roll(1))
a tensor in another place
  held = {"t": torch.tensor(2.0)} => held["t"] => held.update(t=torch.tensor(3.0))
a tensor made of numbers: same capture
  => torch.tensor([2.0, 3.0]).sum() => pass
the shape of a tensor
  t = torch.ones(2) => t.sum() => t.data = torch.ones(3)
the dtype of a tensor
  t = torch.ones(()) => t.itemsize => t.data = torch.ones((), dtype=D)
whether a tensor requires grad
  t = ones() => 1.0 + t.requires_grad => t.requires_grad_()
whether a tensor is a leaf: reads `.(is_leaf|grad_fn)`
  t = ones().requires_grad_() => 1.0 + (t.is_leaf and t.grad_fn is None)
  => t.requires_grad_(False).mul_(ones().requires_grad_())
hooks of a tensor: reads `._backward_hooks`
  t = ones().requires_grad_() => 1.0 + bool(t._backward_hooks)
  => t.register_hook(lambda grad: grad)
grad of a tensor that appears: reads `.grad`
  t = ones().requires_grad_() => 1.0 + (t.grad is None) => t.grad = ones()
the version of a tensor: reads `._version`
  t = ones() => 1.0 + bool(t._version) => t.mul_(1)
a place in memory: the memory .*storage_offset
  x = X[1:] => 1.0 + x.storage_offset()
a tensor that the loss changes: writes
  t = torch.zeros(()) => t.add_(1.0)
an attribute of a tensor
  t = ones(tau=2.0) => t.sum() * t.tau => t.tau = 5.0
an attribute that a tensor gets
  t = ones() => getattr(t, "tau", 2.0) => t.tau = 5.0
an object in an attribute of a tensor
  t = ones(config=Plain()) => t.config.beta => t.config.beta = 5.0
a tensor in an attribute of a tensor
  t = ones(mask=ones()) => t.mask.sum() => t.mask = ones() * 2
the dictionary of a tensor
  t = ones(tau=2.0) => sum(vars(t).values()) => t.other = 3.0
an index that is a tensor: value of a tensor for a number
  epoch = torch.tensor(0); betas = torch.tensor([2.0, 3.0]) => betas[epoch]
  => epoch.fill_(1)
a number of an op that is a tensor: value of a tensor for a number
  slope = torch.tensor(0.1) => 1 + F.leaky_relu(-torch.ones(()), slope)
  => slope.fill_(0.5)
an index written to a literal: value of a tensor for a number
  epoch = torch.tensor(0); betas = torch.tensor([2.0, 3.0])
  => betas[torch.tensor(0).copy_(epoch)] => epoch.fill_(1)
an index that is a literal: same capture
  betas = torch.tensor([2.0, 3.0]) => betas[torch.tensor(1)] => pass
tensors in a list: hands values to Python
  beta = torch.tensor(2.0) => torch.tensor([beta, beta]).sum() => beta.fill_(3.0)
places that are a tensor: hands values to Python
  place = torch.tensor(1) => torch.arange(4.0).tensor_split(place)[0].sum() + 1
  => place.fill_(3)
the text of a tensor: hands values to Python
  beta = torch.tensor(2.0) => float(repr(beta)[7:-1]) => beta.fill_(3.0)

# Modules and functions of torch.

a criterion
  f = nn.HuberLoss(delta=0.5) => f(X[0], X[1]) => f.delta = 0.1
the weight of a criterion
  f = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0], dtype=D))
  => f(X[:2], torch.tensor([0, 1]))
  => f.register_buffer("weight", torch.tensor([2.0, 1.0], dtype=D))
a module beside the loss: same capture
  f = teacher() => f(X[0]).sum() => f.weight.fill_(3.0)
an attribute of a parameter beside the loss
  t = teacher().weight; t.tau = 2.0 => t.sum() * t.tau => t.tau = 5.0
a hook on a module beside the loss
  f = teacher() => f(X[0]).sum()
  => f.register_forward_hook(lambda *given: 2 * given[2])
a hook on all modules
  f = teacher() => f(X[0]).sum()
  => HOOKS.append(register_module_forward_hook(lambda *given: 2 * given[2]))
the mode of a module beside the loss
  f = nn.Sequential(nn.BatchNorm1d(2)).eval() => 1.0 + f[0].training => f.train()
methods that a trace replaces: same capture
  f = Wrapper() => f(X[0]).sum() => pass
a count in a module of torch: count
  f = nn.ReLU(); f.count = itertools.count() => next(f.count)
an array in a function that torch holds: array
  held = array.array("d", [2.0]); loader = DataLoader([0], collate_fn=lambda: held[0])
  => loader.collate_fn()
an iterator in an object of torch: same capture
  sampler = SequentialSampler([COUNT]) => float(len(sampler)) => pass
a function of autograd
  f = type("Twice", (Twice,), {}) => f.apply(X[0]).sum() => Twice.factor = 3.0
a function of torch
  t = ones() => F.gelu(t).sum() => F.gelu = lambda x: 3 * x
a function of torch below a layer
  f = teacher() => f(X[0]).sum() => F.linear = lambda x, weight, bias: 3 * x
the closure of a function in torch
  held = [3.0]; t = ones(); F.gelu = lambda x: held[0] * x => F.gelu(t).sum()
  => held[0] = 7.0
a function of Python
  => math.erf(4.0) => vars(math)["erf"] = lambda x: 7.0
forward of a layer
  f = nn.ReLU(); t = ones() => f(t).sum() => nn.ReLU.forward = lambda self, x: 3 * x
the call of all modules: does not repeat
  f = nn.ReLU(); t = ones() => f(t).sum() => nn.Module.__call__ = lambda self, x: 3 * x
a method of tensors
  t = ones() => t.erfc().sum() => torch.Tensor.erfc = lambda self: 3 * self
an operator of tensors
  t = ones() => (4.0**t).sum() => torch.Tensor.__rpow__ = lambda self, other: 7 * self
the default dtype
  => 1.0 + (torch.get_default_dtype() == D) => torch.set_default_dtype(D)
the precision of float32
  => 1.0 + (torch.get_float32_matmul_precision() == "highest")
  => torch.set_float32_matmul_precision("medium")
deterministic algorithms
  => 1.0 + torch.are_deterministic_algorithms_enabled()
  => torch.use_deterministic_algorithms(True)
warnings of deterministic algorithms
  torch.use_deterministic_algorithms(True) => torch.get_deterministic_debug_mode()
  => torch.use_deterministic_algorithms(True, warn_only=True)
"""

ROWS = {
    name: (outcome or "captured again", program)
    for name, outcome, program in re.findall(
        r"^(\w[^:\n]*)(?:: (.*))?\n((?:  .*\n)+)", TABLE, re.MULTILINE
    )
}

# What programs use. They run in a copy of this module's names.

INSTALLED = "/lib/site-packages/package.py"
COUNT = itertools.count()
HOOKS = []


def attempt(read):
    try:
        return read()
    except NameError:
        return 2.0


def perhaps(thing):
    return getattr(thing, "beta", 2.0)


def first(held):
    return next(iter(held))


def kind(*bases, **names):
    """Return a class that a program may change."""
    return type("Own", bases, names)


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


def imports():
    import state_b  # pyright: ignore[reportMissingImports]

    return state_b.beta


def imports_name():
    try:
        from state_b import beta  # pyright: ignore[reportMissingImports]
    except ImportError:
        return 2.0
    return beta


def imports_from_a_package():
    import state_c.state_b  # pyright: ignore[reportMissingImports]

    return state_c.state_b.beta


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


class Named(NamedTuple):
    held: list


@dataclasses.dataclass(slots=True)
class Slotted:
    beta: float = 2.0

    def __call__(self):
        return self.beta


class Private:
    __slots__ = ("__beta",)

    def __init__(self):
        self.set(2.0)

    def set(self, value):
        self.__beta = value

    def beta(self):
        return self.__beta


class Finalized:
    """Garbage that counts, whenever it is collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        next(COUNT)


def makes_garbage():
    Finalized()
    return 2.0


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


_REPLACED = {
    F: ("gelu", "linear"),
    math: ("erf",),
    nn.ReLU: ("forward",),
    nn.Module: ("__call__",),
    torch.Tensor: ("erfc", "__rpow__"),
    builtins: ("SCALE_OF_ALL", "ascii"),
}


@pytest.fixture
def put_back():
    """Put back all that a program may replace."""
    before = {holder: dict(vars(holder)) for holder in _REPLACED}
    environment, state = dict(os.environ), torch.get_rng_state()
    yield
    for holder, names in _REPLACED.items():
        for name in names:
            if name in before[holder]:
                setattr(holder, name, before[holder][name])
            elif name in vars(holder):
                delattr(holder, name)
    os.environ.clear()
    os.environ.update(environment)
    for name in [each for each in sys.modules if each.startswith("state_")]:
        del sys.modules[name]
    while HOOKS:
        HOOKS.pop().remove()
    torch.set_rng_state(state)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def steps_of(program):
    """Return an iterator: a function that returns the value, then the change."""
    lines = [line.strip() for line in program.splitlines()]
    text = "\n".join(lines).replace("\n=>", " =>")
    before, value, *change = (part.strip() for part in text.split("=>"))
    before = before.splitlines() or ["pass"]
    lines = [*before, f"yield lambda: {value}", *(change or ["pass"])]
    names = dict(globals())
    body = "".join(f"    {line}\n" for line in lines)
    exec(compile(f"def steps():\n{body}", __file__, "exec"), names)
    return names["steps"](), bool(change)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.usefixtures("put_back")
def test_row(name):
    outcome, program = ROWS[name]
    steps, changes = steps_of(program)
    read = next(steps)

    def loss(params, buffers, x):
        return (params["w"] @ x).square() * read()

    if not changes:
        transform = vgrad.per_sample_grad(loss, randomness="same")
        with pytest.raises(RuntimeError, match=outcome):
            vgrad.compile(transform, fallback="error")(W, {}, X)
        return
    compiled = vgrad.compile(vgrad.per_sample_grad(loss))

    def checked():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vgrad.FallbackWarning)
            found = compiled(W, {}, X)["w"]
        expected = oracle.loss_gradients(loss, W, {}, (X,), len(X))["w"]
        assert torch.allclose(found, expected, rtol=oracle.EXACT, atol=oracle.EXACT)
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", vgrad.CompileWarning)
        before = [checked() for _ in range(2)][-1]
        next(steps, None)
        after = [checked() for _ in range(2)][-1]
    texts = [str(each.message) for each in caught]
    reports = compiled.reports()
    ran = [(each.backend, each.calls) for each in reports]
    if outcome == "same capture":
        assert (ran, texts) == ([("replay", 3)], [])
        return
    assert not torch.allclose(before, after), "the row changes nothing"
    again, _, why = outcome.partition(", or ")
    if outcome == "captured again" or (why and ran[0][0] == "replay"):
        assert (ran, texts) == ([("replay", 1)] * 2, []), reports[0].why
    else:
        why = (why or again).partition(" where ")[0]
        assert ran[-1] == ("eager", 0)
        assert re.search(why, reports[-1].why)
        assert [bool(re.search(why, text)) for text in texts] == [True]

"""A graph is left as soon as anything changes that eager mode would see."""

import abc
import array
import collections
import dataclasses
import datetime
import enum
import functools
import io
import itertools
import math
import operator
import os
import random
import sys
import time
import types
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader

import vgrad
from tests import losses

X = torch.tensor([[3.0, 4.0], [0.0, 1.0], [2.0, -1.0]])

pytestmark = pytest.mark.compiled


def params():
    return {"w": torch.tensor([1.0, 2.0])}


def scaled(beta):
    """Return a loss that multiplies by what `beta()` returns."""

    def loss(params, buffers, x):
        return (params["w"] * x).sum() * beta()

    return loss


def grads(loss, **options):
    """Return gradients in eager mode, and those of a graph, as plain functions."""
    eager = vgrad.per_sample_grad(loss, **options)
    return eager, vgrad.compile(eager, verify=False, fallback="error")


def same(one, other):
    return all(map(torch.equal, *map(losses.pytree.tree_leaves, (one, other))))


# What a loss may close over. A case makes something, says how the loss reads it, and
# what changes it; `lead` returns what the loss closes over, if that is something else.


def beta_of(thing):
    return thing.beta


def perhaps(thing):
    return getattr(thing, "beta", 2.0)


def called(beta):
    return beta()


def called_beta(thing):
    return thing.beta()


def item(held):
    return held["beta"]


def first(held):
    return next(iter(held))


def setting(**values):
    return lambda thing: [setattr(thing, *each) for each in values.items()]


sets = setting(beta=3.0)


def updates(held):
    held.update(beta=3.0)


def puts(held):
    held[0] = 3.0


class Case(NamedTuple):
    make: Callable
    read: Callable
    change: Callable | None = None
    lead: Callable = lambda made: made
    why: str = ""  # a graph is refused

    def start(self):
        """Return a loss, and what changes something that it closes over."""
        made = self.make()
        thing, read, change = self.lead(made), self.read, self.change
        return scaled(lambda: read(thing)), lambda: change and change(made)


def cell(first, second, read=lambda beta: beta):
    """A variable of a function, which is set again; without a value it is None."""

    def make():
        def put(value):
            nonlocal beta
            beta = value
            if value is None:
                del beta

        def get():
            try:
                return read(beta)
            except NameError:
                return 1.0

        beta = None
        put(first)
        return get, lambda: put(second)

    return Case(make, called, lambda pair: pair[1](), lambda pair: pair[0])


def defaulting(value):
    def beta(value=value):
        return value

    return beta


class Plain:
    def __init__(self, beta=2.0):
        self.beta = beta

    def value(self):
        return self.beta

    @property
    def double(self):
        return 2 * self.beta


class Other(Plain):
    def value(self):
        return 3 * self.beta


class Named(NamedTuple):
    held: dict


class Level(enum.Enum):
    LOW = 2.0
    HIGH = 3.0


@dataclasses.dataclass
class Data:
    beta: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    beta: float = 2.0

    def __call__(self):
        return self.beta


class Both(Slotted):
    pass


class Private:
    __slots__ = ("__beta",)

    def __init__(self):
        self.set(2.0)

    def set(self, value):
        self.__beta = value

    def beta(self):
        return self.__beta


def derived(*bases, **names):
    """Return a class of its own, which a case may change."""
    return type("Own", bases, names)


def member(kind):
    """Return what makes a class whose objects read a dictionary by such a member."""
    return lambda held: derived(beta=kind(lambda *_: held["beta"]))()


def own():
    return derived(beta=2.0)


def held():
    return {"beta": 2.0}


def module(name="config_of_user", **held):
    made = types.ModuleType(name)
    vars(made).update(held)
    sys.modules[name] = made
    return made


def in_module(names):
    return eval("lambda: beta", names)


def configured():
    return module(beta=2.0)


def imported(_):
    import config_of_user  # pyright: ignore[reportMissingImports]

    return config_of_user.beta


def name_imported(_):
    from config_of_user import beta  # pyright: ignore[reportMissingImports]

    return beta


BETA = 2.0
HELD = {"beta": 2.0}
TABLE = np.array([2.0])
TENSOR = torch.tensor(2.0)


def helper():
    return 2.0


def nothing(*_):
    return None


def sets_environment(_):
    os.environ["VGRAD_BETA"] = "3.0"


def negates(held):
    held[0] = -held[0]


HOOKS = []


@pytest.fixture
def back(monkeypatch):
    """Put globals back."""
    for name in ("BETA", "TABLE", "TENSOR", "helper", "CALLS"):
        monkeypatch.setattr(sys.modules[__name__], name, globals()[name])
    monkeypatch.setitem(HELD, "beta", 2.0)
    monkeypatch.setitem(os.environ, "VGRAD_BETA", "2.0")
    monkeypatch.setitem(sys.modules, "config_of_user", types.ModuleType("none"))
    yield
    while HOOKS:
        HOOKS.pop().remove()


def teacher():
    return nn.Linear(2, 2).requires_grad_(False)


def taught(teacher):
    return teacher(X[0]).sum()


SEEN = {
    # Variables and functions.
    "a cell": cell(2.0, 3.0),
    "a cell that was empty": cell(None, 3.0),
    "a cell that is emptied": cell(3.0, None),
    "a tuple in a cell": cell(
        (2.0, (1,)), (2.0, (True,)), lambda beta: len(repr(beta))
    ),
    "the sign of zero": cell(0.0, -0.0, lambda beta: 2.0 + math.copysign(1.0, beta)),
    "the sign of zero in a list": Case(
        lambda: [0.0], lambda held: 2.0 + math.copysign(1.0, held[0]), negates
    ),
    "a member of an enum": cell(Level.LOW, Level.HIGH, lambda level: level.value),
    "a default": Case(lambda: defaulting(2.0), called, setting(__defaults__=(3.0,))),
    "a list as a default": Case(lambda: [2.0], lambda f: f()[0], puts, defaulting),
    "a default of a keyword": Case(
        lambda: lambda *, beta=2.0: beta, called, lambda f: updates(f.__kwdefaults__)
    ),
    "other defaults of keywords": Case(
        lambda: lambda *, beta=2.0: beta, called, setting(__kwdefaults__={"beta": 3.0})
    ),
    "code": Case(lambda: lambda: 2.0, called, setting(__code__=(lambda: 3.0).__code__)),
    "a new attribute of a function": Case(lambda: lambda: None, perhaps, sets),
    "a partial": Case(
        held, called, updates, lambda held: functools.partial(item, held)
    ),
    "attributes of a partial": Case(lambda: functools.partial(item), perhaps, sets),
    # Objects and classes.
    "a bound method": Case(Plain, called, sets, lambda thing: thing.value),
    "a property": Case(Plain, lambda thing: thing.double, sets),
    "a new attribute": Case(lambda: derived()(), perhaps, sets),
    "a class attribute": Case(own, beta_of, sets, called),
    "an inherited class attribute": Case(
        own, beta_of, sets, lambda base: derived(base)()
    ),
    "a class attribute that hides another": Case(
        lambda: derived(own()), beta_of, sets, called
    ),
    "a class for its names": Case(own, beta_of, sets),
    "a class in a class": Case(
        own, lambda config: config.Inner.beta, sets, lambda inner: derived(Inner=inner)
    ),
    "a static method": Case(held, called_beta, updates, member(staticmethod)),
    "a class method": Case(held, called_beta, updates, member(classmethod)),
    "what a property closes over": Case(held, beta_of, updates, member(property)),
    "a method replaced": Case(
        lambda: derived(beta=lambda _: 2.0),
        called_beta,
        setting(beta=lambda _: 3.0),
        called,
    ),
    "a special method replaced": Case(
        lambda: derived(__call__=lambda _: 2.0),
        called,
        setting(__call__=lambda _: 3.0),
        called,
    ),
    "another class": Case(Plain, lambda thing: thing.value(), setting(__class__=Other)),
    "a namespace": Case(lambda: types.SimpleNamespace(beta=2.0), beta_of, sets),
    "a dataclass": Case(Data, beta_of, sets),
    "slots": Case(Slotted, beta_of, sets),
    "slots of something callable": Case(Slotted, called, sets),
    "slots beside attributes": Case(Both, called, sets),
    "private slots": Case(Private, called_beta, lambda thing: thing.set(3.0)),
    "a weak reference": Case(Plain, lambda ref: ref().beta, sets, weakref.ref),
    # Containers.
    "a named tuple": Case(held, lambda thing: item(thing.held), updates, Named),
    "a key replaced": Case(
        lambda: {"a": None},
        lambda held: 2.0 if "a" in held else 3.0,
        lambda held: (held.clear(), held.update(b=None)),
    ),
    "the order of keys": Case(
        lambda: {"a": 2.0, "bc": 3.0},
        lambda held: len(first(held)),
        lambda held: held.update(a=held.pop("a")),
    ),
    "the order of an ordered dictionary": Case(
        lambda: collections.OrderedDict(a=2.0, bc=3.0),
        lambda held: len(first(held)),
        lambda held: held.move_to_end("a"),
    ),
    "attributes of a dictionary": Case(lambda: derived(dict)(), perhaps, sets),
    "attributes of a list": Case(lambda: derived(list)(), perhaps, sets),
    "attributes of a number": Case(lambda: derived(float)(2), perhaps, sets),
    "keys of a dictionary": Case(
        Plain, lambda held: first(held).beta, sets, lambda thing: {thing: 1.0}
    ),
    "a list in a list": Case(
        lambda: [2.0], lambda held: held[0][0], puts, lambda inner: [inner]
    ),
    "a longer list": Case(
        list, lambda held: 2.0 + len(held), lambda held: held.append(1)
    ),
    "a set": Case(lambda: {2.0}, sum, lambda held: held.add(1.0)),
    "the kind of a number in a set": Case(
        lambda: {1},
        lambda held: len(repr(held)),
        lambda held: (held.clear(), held.add(True)),
    ),
    "a deque": Case(lambda: collections.deque([2.0]), first, puts),
    "a proxy of a dictionary": Case(held, item, updates, types.MappingProxyType),
    "a method of a dictionary": Case(
        held, lambda get: get("beta"), updates, lambda held: held.get
    ),
    "a special method of a list": Case(
        lambda: [2.0], called, lambda held: held.append(3.0), lambda held: held.__len__
    ),
    "an array": Case(lambda: np.array([2.0, 5.0]), lambda held: float(held[0]), puts),
    # Globals, modules and the environment.
    "a global": Case(nothing, lambda _: BETA, lambda _: globals().update(BETA=3.0)),
    "a global dictionary": Case(lambda: HELD, lambda _: item(HELD), updates, nothing),
    "a global array": Case(
        nothing,
        lambda _: float(TABLE[0]),
        lambda _: globals().update(TABLE=np.array([3.0])),
    ),
    "a global tensor": Case(
        nothing, lambda _: TENSOR, lambda _: globals().update(TENSOR=torch.tensor(3.0))
    ),
    "a global function": Case(
        nothing, lambda _: helper(), lambda _: globals().update(helper=lambda: 3.0)
    ),
    "a global by its name": Case(
        held, called, updates, lambda names: eval("lambda: globals()['beta']", names)
    ),
    "a global behind a cache": Case(
        lambda: functools.cache(lambda: BETA),
        called,
        lambda beta: (globals().update(BETA=3.0), beta.cache_clear()),
    ),
    "a module": Case(configured, beta_of, sets),
    "a module in a module": Case(
        lambda: module("config_of_user.inner", beta=2.0),
        lambda config: config.inner.beta,
        sets,
        lambda inner: module(inner=inner),
    ),
    "a module as an attribute": Case(
        configured,
        lambda thing: thing.config.beta,
        sets,
        lambda config: types.SimpleNamespace(config=config),
    ),
    "a module imported by the loss": Case(configured, imported, sets, nothing),
    "a name imported by the loss": Case(configured, name_imported, sets, nothing),
    "a new name in a module": Case(module, perhaps, sets),
    "a name in a module, asked for as text": Case(configured, perhaps, sets),
    "a module named like one of Python": Case(
        lambda: {"__name__": "profile", "__file__": "/home/me/profile.py", "beta": 2.0},
        called,
        updates,
        in_module,
    ),
    "globals without a name": Case(held, called, updates, in_module),
    "equal functions of two modules": Case(
        held,
        lambda betas: betas[0]() * betas[1](),
        updates,
        lambda names: [*map(in_module, (held(), names))],
    ),
    "the environment": Case(
        nothing, lambda _: float(os.environ["VGRAD_BETA"]), sets_environment
    ),
    "getenv": Case(
        nothing, lambda _: float(os.getenv("VGRAD_BETA", "")), sets_environment
    ),
    # Tensors, and modules of torch.
    "a tensor in place": Case(
        lambda: torch.tensor(2.0), lambda beta: beta, lambda beta: beta.fill_(3.0)
    ),
    "a tensor in another place": Case(
        lambda: {"beta": torch.tensor(2.0)},
        item,
        lambda held: held.update(beta=torch.tensor(3.0)),
    ),
    "the shape of a tensor": Case(
        lambda: torch.ones(2), torch.sum, setting(data=torch.ones(3))
    ),
    "the shape of a tensor alone": Case(
        lambda: torch.ones(2), len, setting(data=torch.ones(3))
    ),
    "the dtype of a tensor": Case(
        lambda: torch.ones(()),
        lambda beta: beta.itemsize,
        setting(data=torch.ones(()).double()),
    ),
    "whether a tensor requires grad": Case(
        lambda: torch.ones(2),
        lambda beta: 1.0 + beta.requires_grad,
        lambda beta: beta.requires_grad_(),
    ),
    "a criterion": Case(
        lambda: nn.HuberLoss(delta=0.5),
        lambda criterion: criterion(X[0], X[1]),
        setting(delta=0.1),
    ),
    "the weight of a criterion": Case(
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
        lambda criterion: criterion(X[:2], torch.tensor([0, 1])),
        lambda criterion: criterion.register_buffer("weight", torch.tensor([2.0, 1.0])),
    ),
    "a module beside the loss": Case(
        teacher, taught, lambda teacher: teacher.weight.fill_(3.0)
    ),
    "a hook on a module beside the loss": Case(
        teacher,
        taught,
        lambda teacher: teacher.register_forward_hook(lambda *given: 2 * given[2]),
    ),
    "a hook on all modules": Case(
        teacher,
        taught,
        lambda _: HOOKS.append(
            register_module_forward_hook(lambda *given: 2 * given[2])
        ),
    ),
    "the mode of a module beside the loss": Case(
        lambda: nn.Sequential(nn.BatchNorm1d(2)).eval(),
        lambda teacher: 2.0 if teacher[0].training else 1.0,
        lambda teacher: teacher.train(),
    ),
}


def check_seen(loss, change):
    eager, compiled = grads(loss)
    before = eager(params(), {}, X)
    for _ in range(3):
        assert same(compiled(params(), {}, X), before)
    assert len(compiled.reports()) == 1
    change()
    after = eager(params(), {}, X)
    assert not same(after, before), "the case changes nothing"
    for _ in range(2):
        assert same(compiled(params(), {}, X), after)


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.usefixtures("back")
def test_a_change_is_seen(name):
    check_seen(*SEEN[name].start())


def test_a_change_of_a_function_of_autograd_is_seen():
    class Twice(torch.autograd.Function):
        factor, generate_vmap_rule = 2.0, True
        forward = staticmethod(lambda x: x * Twice.factor)
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: g * Twice.factor)

    check_seen(
        lambda params, buffers, x: Twice.apply(params["w"] * x).sum(),
        lambda: setattr(Twice, "factor", 3.0),
    )


class Abstract(abc.ABC):
    beta = 2.0

    @abc.abstractmethod
    def value(self): ...


class Concrete(Abstract):
    def value(self):
        return self.beta


class AnyAttribute:
    def __init__(self):
        self.held = held()

    def __getattr__(self, name):
        return vars(self)["held"][name]


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2).requires_grad_(False)

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        return self.inner.__call__(x)


class Cached:
    @functools.cached_property
    def beta(self):
        return 2.0


class Finalized:
    """Garbage that counts, whenever it is collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        next(COUNT)


COUNT = itertools.count()


def makes_garbage(_):
    Finalized()
    return 2.0


INSTALLED = "/lib/site-packages/package.py"


def installed_function():
    code = compile("lambda: (beta, count)[0]", INSTALLED, "eval")
    return eval(code, {"beta": 2.0, "count": COUNT})


def installed_class():
    module(__file__=INSTALLED)
    return derived(__module__="config_of_user", beta=2.0, count=COUNT)


def prints(_):
    print("", end="", file=sys.stderr)
    return 2.0


HARMLESS = {
    "the same number again": Case(
        lambda: Plain(0.5), beta_of, setting(beta=float("0.5"))
    ),
    "not a number": Case(
        lambda: Plain(math.nan),
        lambda thing: 1.0 if math.isnan(thing.beta) else 2.0,
        setting(beta=float("nan")),
    ),
    "another global": Case(
        lambda: module(beta=2.0, other=1), beta_of, setting(other=object())
    ),
    "abstract classes": Case(Concrete, lambda thing: thing.value()),
    "unions and generics": Case(
        lambda: (int | float, list[str]),
        lambda kinds: 2.0 if isinstance(2, kinds[0]) and kinds[1] else 3.0,
    ),
    "objects with any attribute": Case(AnyAttribute, beta_of),
    "methods that a trace replaces": Case(Wrapper, lambda wrapper: wrapper(X[0]).sum()),
    "getters": Case(lambda: operator.itemgetter("beta"), lambda get: get(HELD)),
    "a cached tensor": Case(
        lambda: functools.cache(lambda size: torch.full((size,), 2.0)),
        lambda beta: beta(2).sum(),
    ),
    "a cached tensor among the last": Case(
        lambda: functools.lru_cache(maxsize=4)(lambda size: torch.full((size,), 2.0)),
        lambda beta: beta(2).sum(),
    ),
    "a cached property": Case(Cached, beta_of),
    "a compiled object": Case(
        lambda: vgrad.compile(vgrad.per_sample_norm(scaled(lambda: 2.0))),
        beta_of,
        lead=lambda inner: types.SimpleNamespace(beta=2.0, inner=inner),
    ),
    "standard output": Case(nothing, prints),
    "a small array": Case(lambda: np.full(2**11, 2.0), lambda held: float(held[0])),
    "garbage": Case(nothing, makes_garbage),
    "a method named like a clock": Case(
        nothing, lambda _: 2.0 + datetime.datetime(2000, 1, 1, 3).time().hour
    ),
    "what an installed module remembers": Case(
        lambda: module(__file__=INSTALLED, beta=COUNT),
        lambda config: 2.0 if config.beta else 3.0,
    ),
    "what an installed function remembers": Case(installed_function, called),
    "what an installed class remembers": Case(installed_class, beta_of),
    "what an object of torch remembers": Case(
        lambda: torch.utils.data.SequentialSampler([COUNT]),
        lambda made: float(len(made)),
    ),
    "a tensor made of numbers": Case(nothing, lambda _: torch.tensor([2.0, 3.0]).sum()),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.usefixtures("back")
def test_what_changes_nothing_stays_captured(name):
    loss, change = HARMLESS[name].start()
    eager, compiled = grads(loss)
    for _ in range(3):
        assert same(compiled(params(), {}, X), eager(params(), {}, X))
        change()
    assert [each.calls for each in compiled.reports()] == [2]


CALLS = 0


def counts_globally(_):
    global CALLS
    CALLS += 1
    return CALLS


def counter():
    calls = 0

    def beta():
        nonlocal calls
        calls += 1
        return calls

    return beta


def counts(thing):
    thing.beta += 1
    return thing.beta


def with_count(thing):
    thing.count = itertools.count()
    return thing


def held_by_torch(read):
    """Put what reads a number into an object of a library."""
    return DataLoader([0], collate_fn=read)


def reader(beta):
    return lambda: beta[0]


def draws(generator):
    return generator.random()


def seeds(_):
    torch.manual_seed(3)
    return torch.rand(())


REFUSED = {
    "a counter": Case(
        held,
        lambda held: held.update(beta=held["beta"] + 1) or 2.0,
        why="changes values",
    ),
    "a counter in a cell": Case(counter, called, why="changes values"),
    "a counter in a global": Case(nothing, counts_globally, why="changes values"),
    "a counter of an object": Case(Plain, counts, why="changes values"),
    "a list that grows": Case(
        list, lambda held: held.append(1) or 2.0, why="changes values"
    ),
    "a count": Case(itertools.count, next, why="count"),
    "a count in a module": Case(
        lambda: module(beta=itertools.count()),
        lambda made: next(made.beta),
        why="count",
    ),
    "a count in a class": Case(
        lambda: derived(beta=itertools.count()), lambda own: next(own.beta), why="count"
    ),
    "a count in an object": Case(
        lambda: Plain(itertools.count()), lambda thing: next(thing.beta), why="count"
    ),
    "a count in a module of torch": Case(
        lambda: with_count(nn.ReLU()), lambda made: next(made.count), why="count"
    ),
    "an array in a function that torch holds": Case(
        lambda: held_by_torch(reader(array.array("d", [2.0]))),
        lambda loader: loader.collate_fn(),
        why="array",
    ),
    "an array in an object that torch holds": Case(
        lambda: held_by_torch(Plain(array.array("d", [2.0]))),
        lambda loader: loader.collate_fn.beta[0],
        why="array",
    ),
    "a kind of partial": Case(
        held,
        called,
        lead=lambda held: derived(functools.partial)(item, held),
        why="Own",
    ),
    "a stream": Case(io.BytesIO, lambda stream: 2.0 + stream.tell(), why="BytesIO"),
    "a large array": Case(
        lambda: np.full(2**11 + 1, 2.0), lambda held: float(held[0]), why="16392 bytes"
    ),
    "an array of objects": Case(
        lambda: np.array([2.0], dtype=object), lambda held: held[0], why="numpy with 8"
    ),
    "a generator": Case(lambda: (each for each in range(9)), next, why="generator"),
    "a generator of torch": Case(
        lambda: torch.Generator().manual_seed(1),
        lambda generator: torch.rand((), generator=generator),
        why="Generator",
    ),
    "a generator of numpy": Case(
        lambda: np.random.default_rng(1), draws, why="Generator"
    ),
    "a generator of Python": Case(lambda: random.Random(1), draws, why="Random"),
    "a method of a generator of Python": Case(
        lambda: random.Random(1).random, called, why="Random"
    ),
    "numbers of Python": Case(
        lambda: random.seed(1), lambda _: random.random(), why="draws random numbers"
    ),
    "numbers of numpy": Case(
        lambda: np.random.seed(1),
        lambda _: np.random.rand(),
        why="draws random numbers",
    ),
    "numbers of the system": Case(
        nothing, lambda _: float(os.urandom(1)[0]), why="draws random numbers"
    ),
    "a seed": Case(nothing, seeds, why="seed"),
    "a place in memory": Case(
        lambda: X[1:], lambda x: 1.0 + x.storage_offset(), why="memory .storage_offset"
    ),
    "the time": Case(nothing, lambda _: 1.0 + 0 * time.time(), why="time"),
    "the clock": Case(
        lambda: time.perf_counter, lambda clock: 1.0 + 0 * clock(), why="time"
    ),
    "a tensor that it changes": Case(
        lambda: torch.zeros(()), lambda calls: calls.add_(1.0), why="writes"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("back")
def test_what_no_graph_repeats_is_refused(name):
    loss, _ = REFUSED[name].start()
    _, compiled = grads(loss, randomness="same")
    with pytest.raises(RuntimeError, match=REFUSED[name].why):
        compiled(params(), {}, X)


# Arguments and switches.


def captures(compiled):
    return len(compiled.reports())


def check(both, *given, calls=2, note=""):
    """Demand the numbers of eager mode: of a capture, and of its graph."""
    eager, compiled = both
    for _ in range(calls):
        assert same(compiled(*given), eager(*given)), note


@pytest.fixture
def two():
    """A function of two tensors for each sample."""
    return grads(lambda p, b, x, y: (p["w"] * x * y).sum().square())


def test_two_tensors_that_were_one(two):
    for other in (X, X, X + 1, X):
        check(two, params(), {}, X, other, calls=1)
    assert captures(two[1]) == 2


@pytest.mark.parametrize("first", [False, True])
def test_a_tensor_that_was_also_an_argument(first):
    """The first parameters, to which the loss pulls later ones."""
    start = params()

    def loss(params, buffers, x):
        return (params["w"] * x).sum() + (params["w"] - start["w"]).square().sum()

    both, later = grads(loss), {"w": start["w"] + 1}
    for given in (start, later, later) if first else (later, start, later):
        check(both, given, {}, X, calls=1)


def test_numbers_in_the_batch():
    def loss(params, buffers, x, y):
        value = y["scale"]
        factor = math.copysign(3.0, value) if type(value) is float else 4
        return (params["w"] * x).sum() * (factor + isinstance(value, bool))

    both = grads(loss)
    for value in (1, True, 1.0, 0.0, -0.0, math.nan, float("nan")):
        check(both, params(), {}, X, {"scale": value}, calls=1, note=value)
    assert captures(both[1]) == 6


@pytest.mark.filterwarnings("ignore::vgrad.CompileWarning")
def test_a_loss_that_knows_an_argument():
    closed = X.clone()

    def loss(params, buffers, x):
        return (params["w"] * x).sum() * (3 if x is closed else 2)

    tx = vgrad.optim.sgd(0.1)
    step = vgrad.training.train_step(loss, tx)
    compiled = vgrad.compile(step)
    state = vgrad.training.TrainState.create(tx, params(), {})
    for x in (X, X, closed, X):
        found, expected = (f(state, x)[1] for f in (compiled, step))
        assert torch.equal(found["loss"], expected["loss"])
    reports = [each for each in compiled.reports() if each.name == "train_step"]
    assert [(each.backend, each.calls) for each in reports] == [
        ("replay", 2),
        ("eager", 0),
    ]


def test_methods_in_the_batch():
    def loss(params, buffers, x, factor):
        return (params["w"] * x).sum() * factor()

    tx = vgrad.optim.sgd(0.1)
    step = vgrad.training.train_step(loss, tx)
    compiled = vgrad.compile(step, fallback="error")
    state = vgrad.training.TrainState.create(tx, params(), {})
    for beta in (2.0, 2.0, 3.0):
        thing = Plain(beta)
        for _ in range(3):  # each time another object, of one method
            found, expected = (f(state, X, thing.value)[1] for f in (compiled, step))
            assert torch.equal(found["loss"], expected["loss"])
    reports = [each for each in compiled.reports() if each.name == "train_step"]
    assert [each.calls for each in reports] == [2, 2, 2]


TENSORS = {
    "the first": torch.clone,
    "another dtype": torch.Tensor.double,
    "other strides": lambda x: x.t().contiguous().t(),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "fewer samples": lambda x: x[:2],
    "a negated part": lambda x: torch.complex(x, x).conj().imag,
    "a parameter": nn.Parameter,
    "a view": lambda x: x.expand(1, *x.shape)[0],
}


def test_other_tensors(two):
    for name, change in TENSORS.items():
        x = change(X)
        check(two, params(), {}, x, x, note=name)


def test_grad_mode():
    """A result that can be differentiated again is so, whatever mode came first."""
    eager = vgrad.per_sample_grad(lambda p, b, x: (p["w"] * x).sum().square())
    compiled = vgrad.compile(eager, verify=False)
    given = {"w": params()["w"].requires_grad_()}, {}, X
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled):
            one, other = compiled(*given)["w"], eager(*given)["w"]
            assert one.requires_grad == other.requires_grad


SWITCHES = {
    torch.set_default_dtype: (torch.float64, torch.float32),
    torch.set_num_threads: (2, 1),
    torch.use_deterministic_algorithms: (True, False),
    torch.backends.mha.set_fastpath_enabled: (False, True),
    torch.backends.cuda.enable_flash_sdp: (False, True),
    torch.set_float32_matmul_precision: ("medium", "highest"),
    torch.set_default_device: ("cpu", None),
    functools.partial(torch.set_autocast_enabled, "cpu"): (True, False),
}


def test_a_switch_makes_another_capture(two):
    check(two, params(), {}, X, X)
    for number, (switch, (value, before)) in enumerate(SWITCHES.items()):
        try:
            switch(value)
            check(two, params(), {}, X, X, note=switch)
        finally:
            switch(before)
        assert [each.calls for each in two[1].reports()] == [1] * (number + 2), switch


def test_anomalies_are_looked_for_in_eager_mode(two):
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(RuntimeError, match="mode is on"):
            two[1](params(), {}, X, X)


@pytest.mark.parametrize("given", [np.ones(3), Plain()])
def test_arguments_that_cannot_be_compared(two, given):
    with pytest.raises(RuntimeError, match="an argument is a"):
        two[1](params(), {}, X, given)


# Models, rules and optimizers.


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.0)
        self.beta = 2.0
        self.config = types.SimpleNamespace(beta=2.0)

    def forward(self, x):
        beta = self.beta * self.config.beta * getattr(self, "extra", 1.0)
        return self.drop(self.linear(x)) * beta


MODELS = {
    "an attribute": sets,
    "an attribute of an attribute": lambda model: sets(model.config),
    "a new attribute": setting(extra=3.0),
    "an option of a layer": lambda model: setattr(model.drop, "p", 1.0),
    "a hook": lambda model: model.register_forward_hook(lambda *given: 2 * given[2]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_changes(name):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Scaled())
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    eager, compiled = grads(loss, randomness="same")
    before = eager(params, buffers, X, X)
    for _ in range(2):
        assert same(compiled(params, buffers, X, X), before)
    MODELS[name](next(iter(fmodel.named_modules()))[1])
    assert not same(compiled(params, buffers, X, X), before)
    # An fmodel undoes what was set, after the next call.
    check((eager, compiled), params, buffers, X, X)


def test_a_rule_replaced():
    def made(factor):
        def factors(x, weight):
            return {"weight": lambda g: vgrad.rules.Dense(factor["beta"] * g * x)}

        return factors

    op = torch.overrides.wrap_torch_function(lambda x, weight: (x, weight))(
        lambda x, weight: x * weight
    )
    held = {"beta": 1.0}
    vgrad.rules.rule(op, weights=("weight",))(made(held))
    eager = vgrad.per_sample_norm(lambda p, b, x: op(x, p["w"]).sum())
    both = eager, vgrad.compile(eager, verify=False, fallback="error")
    check(both, params(), {}, X)
    held["beta"] = 2.0
    check(both, params(), {}, X)
    vgrad.rules.rule(op, weights=("weight",), replace=True)(made({"beta": 3.0}))
    check(both, params(), {}, X)
    assert captures(both[1]) == 3


def test_a_schedule_that_changes():
    held = {"rate": 0.1}
    tx = vgrad.optim.sgd(lambda step: held["rate"] + 0 * step)
    step = vgrad.training.train_step(lambda p, b, x: (x * p["w"]).sum(), tx)
    compiled = vgrad.compile(step, verify=False, fallback="error")
    state = vgrad.training.TrainState.create(tx, params(), {})
    for rate in (0.1, 0.1, 0.2):
        held["rate"] = rate
        assert same(compiled(state, X)[0].params, step(state, X)[0].params)


def test_an_exception_leaves_nothing_behind():
    thing = Plain(None)

    def loss(params, buffers, x):
        if thing.beta is None:
            raise KeyError("beta")
        return (params["w"] * x).sum() * thing.beta

    both = grads(loss)
    for beta in (None, 2.0, 2.0, None, 2.0):
        thing.beta = beta
        if beta is None:
            with pytest.raises(KeyError, match="beta"):
                both[1](params(), {}, X)
        else:
            check(both, params(), {}, X, calls=1)
    assert captures(both[1]) == 1

"""A graph is left as soon as anything changes that eager mode would see."""

import abc
import collections
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import random
import sys
import time
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad

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
    one, other = (
        each["w"] if isinstance(each, dict) else each for each in (one, other)
    )
    return torch.equal(one, other)


# What a loss may close over. A case makes something, which changes later, and says how
# the loss reads it, and what changes it; `lead` makes of it what the loss closes over.


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


def sets(thing):
    thing.beta = 3.0


def replaces(thing):
    thing.beta = lambda *_: 3.0


def updates(held):
    held.update(beta=3.0)


def puts(held):
    held[0] = 3.0


def case(make, read, change=None, lead=lambda made: made):
    def build():
        made = make()
        thing = lead(made)
        return scaled(lambda: read(thing)), lambda: change and change(made)

    return build


def cell(first, second, read=lambda beta: beta):
    """A variable of the function around the loss that is set again."""

    def build():
        beta = first

        def change():
            nonlocal beta
            beta = second

        return scaled(lambda: read(beta)), change

    return build


def a_cell_without_value(*, bound):
    beta = 3.0

    def bind():
        nonlocal beta
        beta = 3.0

    def unbind():
        nonlocal beta
        del beta

    def read():
        try:
            return beta
        except NameError:
            return 1.0

    if not bound:
        unbind()
    return scaled(read), unbind if bound else bind


def a_function_of_autograd():
    class Twice(torch.autograd.Function):
        factor = 2.0
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * Twice.factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * Twice.factor

    def loss(params, buffers, x):
        return Twice.apply(params["w"] * x).sum()

    return loss, lambda: setattr(Twice, "factor", 3.0)


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


def own():
    return derived(beta=2.0)


def held():
    return {"beta": 2.0}


def module(name="config_of_user", **held):
    made = types.ModuleType(name)
    vars(made).update(held)
    sys.modules[name] = made
    return made


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


def set_global(name, value):
    globals()[name] = value


def sets_global(name, value):
    return lambda _: set_global(name, value)


def sets_environment(_):
    os.environ["VGRAD_BETA"] = "3.0"


def negates(held):
    held[0] = -held[0]


def becomes(new):
    """Let a tensor have other data."""
    return lambda tensor: setattr(tensor, "data", new)


@pytest.fixture
def back(monkeypatch):
    """Put globals back."""
    for name in ("BETA", "TABLE", "TENSOR", "helper", "CALLS"):
        monkeypatch.setattr(sys.modules[__name__], name, globals()[name])
    monkeypatch.setitem(HELD, "beta", 2.0)
    monkeypatch.setitem(os.environ, "VGRAD_BETA", "2.0")
    monkeypatch.setitem(sys.modules, "config_of_user", types.ModuleType("none"))


def teacher():
    return nn.Linear(2, 2).requires_grad_(False)


def taught(teacher):
    return teacher(X[0]).sum()


SEEN = {
    # Variables and functions.
    "a cell": cell(2.0, 3.0),
    "a cell that was empty": functools.partial(a_cell_without_value, bound=False),
    "a cell that is emptied": functools.partial(a_cell_without_value, bound=True),
    "a tuple in a cell": cell(
        (2.0, (1,)), (2.0, (True,)), lambda beta: len(repr(beta))
    ),
    "the sign of zero": cell(0.0, -0.0, lambda beta: 2.0 + math.copysign(1.0, beta)),
    "the sign of zero in a list": case(
        lambda: [0.0], lambda held: 2.0 + math.copysign(1.0, held[0]), negates
    ),
    "a member of an enum": cell(Level.LOW, Level.HIGH, lambda level: level.value),
    "a default": case(
        lambda: defaulting(2.0), called, lambda f: setattr(f, "__defaults__", (3.0,))
    ),
    "a list as a default": case(lambda: [2.0], lambda f: f()[0], puts, defaulting),
    "a default of a keyword": case(
        lambda: lambda *, beta=2.0: beta, called, lambda f: updates(f.__kwdefaults__)
    ),
    "other defaults of keywords": case(
        lambda: lambda *, beta=2.0: beta,
        called,
        lambda f: setattr(f, "__kwdefaults__", {"beta": 3.0}),
    ),
    "code": case(
        lambda: lambda: 2.0,
        called,
        lambda f: setattr(f, "__code__", (lambda: 3.0).__code__),
    ),
    "a new attribute of a function": case(lambda: lambda: None, perhaps, sets),
    "a partial": case(
        held, called, updates, lambda held: functools.partial(item, held)
    ),
    "attributes of a partial": case(lambda: functools.partial(item), perhaps, sets),
    "a function of autograd": a_function_of_autograd,
    # Objects and classes.
    "a bound method": case(Plain, called, sets, lambda thing: thing.value),
    "a property": case(Plain, lambda thing: thing.double, sets),
    "a new attribute": case(lambda: derived()(), perhaps, sets),
    "a class attribute": case(own, beta_of, sets, called),
    "an inherited class attribute": case(
        own, beta_of, sets, lambda base: derived(base)()
    ),
    "a class attribute that hides another": case(
        lambda: derived(own()), beta_of, sets, called
    ),
    "a class for its names": case(own, beta_of, sets),
    "a class in a class": case(
        own, lambda config: config.Inner.beta, sets, lambda inner: derived(Inner=inner)
    ),
    "a static method": case(
        held,
        called_beta,
        updates,
        lambda held: derived(beta=staticmethod(lambda: held["beta"])),
    ),
    "a class method": case(
        held,
        called,
        updates,
        lambda held: derived(beta=classmethod(lambda _: held["beta"])).beta,
    ),
    "what a property closes over": case(
        held,
        beta_of,
        updates,
        lambda held: derived(beta=property(lambda _: item(held)))(),
    ),
    "a method replaced": case(
        lambda: derived(beta=lambda _: 2.0), called_beta, replaces, called
    ),
    "a special method replaced": case(
        lambda: derived(__call__=lambda _: 2.0),
        called,
        lambda kind: setattr(kind, "__call__", lambda _: 3.0),
        called,
    ),
    "another class": case(
        Plain,
        lambda thing: thing.value(),
        lambda thing: setattr(thing, "__class__", Other),
    ),
    "a namespace": case(lambda: types.SimpleNamespace(beta=2.0), beta_of, sets),
    "a dataclass": case(Data, beta_of, sets),
    "slots": case(Slotted, beta_of, sets),
    "slots of something callable": case(Slotted, called, sets),
    "slots beside attributes": case(Both, called, sets),
    "private slots": case(Private, called_beta, lambda thing: thing.set(3.0)),
    "a weak reference": case(Plain, lambda ref: ref().beta, sets, weakref.ref),
    # Containers.
    "a key replaced": case(
        lambda: {"a": None},
        lambda held: 2.0 if "a" in held else 3.0,
        lambda held: (held.clear(), held.update(b=None)),
    ),
    "the order of keys": case(
        lambda: {"a": 2.0, "bc": 3.0},
        lambda held: len(first(held)),
        lambda held: held.update(a=held.pop("a")),
    ),
    "the order of an ordered dictionary": case(
        lambda: collections.OrderedDict(a=2.0, bc=3.0),
        lambda held: len(first(held)),
        lambda held: held.move_to_end("a"),
    ),
    "attributes of a dictionary": case(lambda: derived(dict)(), perhaps, sets),
    "attributes of a list": case(lambda: derived(list)(), perhaps, sets),
    "attributes of a number": case(lambda: derived(float)(2), perhaps, sets),
    "keys of a dictionary": case(
        Plain, lambda held: first(held).beta, sets, lambda thing: {thing: 1.0}
    ),
    "a list in a list": case(
        lambda: [2.0], lambda held: held[0][0], puts, lambda inner: [inner]
    ),
    "a longer list": case(
        list, lambda held: 2.0 + len(held), lambda held: held.append(1)
    ),
    "a set": case(lambda: {2.0}, sum, lambda held: held.add(1.0)),
    "the kind of a number in a set": case(
        lambda: {1},
        lambda held: len(repr(held)),
        lambda held: (held.clear(), held.add(True)),
    ),
    "a deque": case(lambda: collections.deque([2.0]), first, puts),
    "a proxy of a dictionary": case(held, item, updates, types.MappingProxyType),
    "a method of a dictionary": case(
        held, lambda get: get("beta"), updates, lambda held: held.get
    ),
    "a special method of a list": case(
        lambda: [2.0], called, lambda held: held.append(3.0), lambda held: held.__len__
    ),
    "an array": case(lambda: np.array([2.0, 5.0]), lambda held: float(held[0]), puts),
    # Globals, modules and the environment.
    "a global": case(nothing, lambda _: BETA, sets_global("BETA", 3.0)),
    "a global dictionary": case(lambda: HELD, lambda _: item(HELD), updates, nothing),
    "a global array": case(
        nothing, lambda _: float(TABLE[0]), sets_global("TABLE", np.array([3.0]))
    ),
    "a global tensor": case(
        nothing, lambda _: TENSOR, sets_global("TENSOR", torch.tensor(3.0))
    ),
    "a global function": case(
        nothing, lambda _: helper(), sets_global("helper", lambda: 3.0)
    ),
    "a global by its name": case(
        nothing, lambda _: globals()["BETA"], sets_global("BETA", 3.0)
    ),
    "a global behind a cache": case(
        lambda: functools.cache(lambda: BETA),
        called,
        lambda beta: (set_global("BETA", 3.0), beta.cache_clear()),
    ),
    "a module": case(configured, beta_of, sets),
    "a module in a module": case(
        lambda: module("config_of_user.inner", beta=2.0),
        lambda config: config.inner.beta,
        sets,
        lambda inner: module(inner=inner),
    ),
    "a module as an attribute": case(
        configured,
        lambda thing: thing.config.beta,
        sets,
        lambda config: types.SimpleNamespace(config=config),
    ),
    "a module imported by the loss": case(configured, imported, sets, nothing),
    "a name imported by the loss": case(configured, name_imported, sets, nothing),
    "a new name in a module": case(module, perhaps, sets),
    "a name in a module, asked for as text": case(configured, perhaps, sets),
    "a module named like one of Python": case(
        lambda: {"__name__": "profile", "__file__": "/home/me/profile.py", "beta": 2.0},
        called,
        updates,
        lambda names: eval("lambda: beta", names),
    ),
    "globals without a name": case(
        held, called, updates, lambda names: eval("lambda: beta", names)
    ),
    "equal functions of two modules": case(
        held,
        lambda betas: betas[0]() * betas[1](),
        updates,
        lambda names: [eval("lambda: beta", each) for each in (held(), names)],
    ),
    "the environment": case(
        nothing, lambda _: float(os.environ["VGRAD_BETA"]), sets_environment
    ),
    "getenv": case(
        nothing, lambda _: float(os.getenv("VGRAD_BETA", "")), sets_environment
    ),
    # Tensors, and modules of torch.
    "a tensor in place": case(
        lambda: torch.tensor(2.0), lambda beta: beta, lambda beta: beta.fill_(3.0)
    ),
    "a tensor in another place": case(
        lambda: {"beta": torch.tensor(2.0)},
        item,
        lambda held: held.update(beta=torch.tensor(3.0)),
    ),
    "the shape of a tensor": case(
        lambda: torch.ones(2), torch.sum, becomes(torch.ones(3))
    ),
    "the shape of a tensor alone": case(
        lambda: torch.ones(2), len, becomes(torch.ones(3))
    ),
    "the dtype of a tensor": case(
        lambda: torch.ones(()),
        lambda beta: beta.itemsize,
        becomes(torch.ones(()).double()),
    ),
    "whether a tensor requires grad": case(
        lambda: torch.ones(2),
        lambda beta: 1.0 + beta.requires_grad,
        lambda beta: beta.requires_grad_(),
    ),
    "a criterion": case(
        lambda: nn.HuberLoss(delta=0.5),
        lambda criterion: criterion(X[0], X[1]),
        lambda criterion: setattr(criterion, "delta", 0.1),
    ),
    "the weight of a criterion": case(
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
        lambda criterion: criterion(X[:2], torch.tensor([0, 1])),
        lambda criterion: criterion.register_buffer("weight", torch.tensor([2.0, 1.0])),
    ),
    "a module beside the loss": case(
        teacher, taught, lambda teacher: teacher.weight.fill_(3.0)
    ),
    "a hook on a module beside the loss": case(
        teacher,
        taught,
        lambda teacher: teacher.register_forward_hook(lambda *given: 2 * given[2]),
    ),
    "the mode of a module beside the loss": case(
        lambda: nn.Sequential(nn.BatchNorm1d(2)).eval(),
        lambda teacher: 2.0 if teacher[0].training else 1.0,
        lambda teacher: teacher.train(),
    ),
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.usefixtures("back")
def test_a_change_is_seen(name):
    loss, change = SEEN[name]()
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


class Cached:
    @functools.cached_property
    def beta(self):
        return 2.0


def prints(_):
    print("", end="", file=sys.stderr)
    return 2.0


HARMLESS = {
    "the same number again": case(
        lambda: Plain(0.5), beta_of, lambda thing: setattr(thing, "beta", float("0.5"))
    ),
    "not a number": case(
        lambda: Plain(math.nan),
        lambda thing: 1.0 if math.isnan(thing.beta) else 2.0,
        lambda thing: setattr(thing, "beta", float("nan")),
    ),
    "another global": case(
        lambda: module(beta=2.0, other=1),
        beta_of,
        lambda config: setattr(config, "other", object()),
    ),
    "abstract classes": case(Concrete, lambda thing: thing.value()),
    "unions and generics": case(
        lambda: (int | float, list[str]),
        lambda kinds: 2.0 if isinstance(2, kinds[0]) and kinds[1] else 3.0,
    ),
    "objects with any attribute": case(AnyAttribute, beta_of),
    "getters": case(lambda: operator.itemgetter("beta"), lambda get: get(HELD)),
    "a cached tensor": case(
        lambda: functools.cache(lambda size: torch.full((size,), 2.0)),
        lambda beta: beta(2).sum(),
    ),
    "a cached tensor among the last": case(
        lambda: functools.lru_cache(maxsize=4)(lambda size: torch.full((size,), 2.0)),
        lambda beta: beta(2).sum(),
    ),
    "a cached property": case(Cached, beta_of),
    "a compiled object": case(
        lambda: vgrad.compile(vgrad.per_sample_norm(scaled(lambda: 2.0))),
        beta_of,
        lead=lambda inner: types.SimpleNamespace(beta=2.0, inner=inner),
    ),
    "standard output": case(nothing, prints),
    "a tensor made of numbers": case(nothing, lambda _: torch.tensor([2.0, 3.0]).sum()),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.usefixtures("back")
def test_what_changes_nothing_stays_captured(name):
    loss, change = HARMLESS[name]()
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


def a_counter_in_a_cell():
    calls = 0

    def beta():
        nonlocal calls
        calls += 1
        return calls

    return scaled(beta), None


def counts(thing):
    thing.beta += 1
    return thing.beta


def seeds(_):
    torch.manual_seed(3)
    return torch.rand(())


REFUSED = {
    "a counter": (
        "changes values",
        case(held, lambda held: held.update(beta=held["beta"] + 1) or held["beta"]),
    ),
    "a counter in a cell": ("changes values", a_counter_in_a_cell),
    "a counter in a global": ("changes values", case(nothing, counts_globally)),
    "a counter of an object": ("changes values", case(Plain, counts)),
    "a list that grows": (
        "changes values",
        case(list, lambda held: held.append(1.0) or len(held)),
    ),
    "a count": ("count", case(itertools.count, next)),
    "a generator": ("generator", case(lambda: (each for each in range(9)), next)),
    "a generator of torch": (
        "Generator",
        case(
            lambda: torch.Generator().manual_seed(1),
            lambda generator: torch.rand((), generator=generator),
        ),
    ),
    "a generator of numpy": (
        "Generator",
        case(lambda: np.random.default_rng(1), lambda generator: generator.random()),
    ),
    "a generator of Python": (
        "Random",
        case(lambda: random.Random(1), lambda generator: generator.random()),
    ),
    "a method of a generator of Python": (
        "Random",
        case(lambda: random.Random(1).random, called),
    ),
    "numbers of Python": (
        "draws random numbers",
        case(lambda: random.seed(1), lambda _: random.random()),
    ),
    "numbers of numpy": (
        "draws random numbers",
        case(lambda: np.random.seed(1), lambda _: np.random.rand()),
    ),
    "numbers of the system": (
        "draws random numbers",
        case(nothing, lambda _: float(os.urandom(1)[0])),
    ),
    "a seed": ("seed", case(nothing, seeds)),
    "the time": ("time", case(nothing, lambda _: 1.0 + 0 * time.time())),
    "the clock": (
        "time",
        case(lambda: time.perf_counter, lambda clock: 1.0 + 0 * clock()),
    ),
    "a tensor that it changes": (
        "writes",
        case(lambda: torch.zeros(()), lambda calls: calls.add_(1.0)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("back")
def test_what_no_graph_repeats_is_refused(name):
    why, build = REFUSED[name]
    _, compiled = grads(build()[0], randomness="same")
    with pytest.raises(RuntimeError, match=why):
        compiled(params(), {}, X)


# Arguments and switches.


def captures(compiled):
    return len(compiled.reports())


@pytest.fixture
def norms():
    eager = vgrad.per_sample_norm(lambda p, b, x, y: (p["w"] * x * y).sum().square())
    return eager, vgrad.compile(eager, verify=False, fallback="error")


def test_two_tensors_that_were_one(norms):
    eager, compiled = norms
    for other in (X, X, X + 1, X):
        assert same(compiled(params(), {}, X, other), eager(params(), {}, X, other))
    assert captures(compiled) == 2


@pytest.mark.parametrize("first", [False, True])
def test_a_tensor_that_was_also_an_argument(first):
    """The first parameters, to which the loss pulls later ones."""
    start = params()

    def loss(params, buffers, x):
        return (params["w"] * x).sum() + (params["w"] - start["w"]).square().sum()

    eager = vgrad.per_sample_norm(loss)
    compiled = vgrad.compile(eager, verify=False, fallback="error")
    later = {"w": start["w"] + 1}
    for given in (start, later, later) if first else (later, start, later):
        assert same(compiled(given, {}, X), eager(given, {}, X))


def test_numbers_in_the_batch(norms):
    eager = vgrad.per_sample_norm(
        lambda p, b, x, y: (
            (p["w"] * x).sum() * (2 + np.copysign(1.0, y["scale"]))
            if type(y["scale"]) is float
            else (p["w"] * x).sum() * (1 + 3 * isinstance(y["scale"], bool))
        )
    )
    compiled = vgrad.compile(eager, verify=False, fallback="error")
    for value in (1, True, 1.0, 0.0, -0.0, float("nan"), float("nan")):
        given = params(), {}, X, {"scale": value}
        try:
            expected = eager(*given)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                compiled(*given)
            continue
        assert same(compiled(*given), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.t().contiguous().t(),
        lambda x: x.clone().requires_grad_(),
        lambda x: x[:2],
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: nn.Parameter(x),
        lambda x: x.expand(1, *x.shape)[0],
    ],
)
def test_other_tensors(norms, change):
    eager, compiled = norms
    compiled(params(), {}, X, X)
    x = change(X)
    for _ in range(2):
        assert same(compiled(params(), {}, x, x), eager(params(), {}, x, x))


def test_grad_mode():
    """A result that can be differentiated again is so, whatever mode came first."""
    eager = vgrad.per_sample_grad(lambda p, b, x: (p["w"] * x).sum().square())
    compiled = vgrad.compile(eager, verify=False)
    given = {"w": params()["w"].requires_grad_()}, {}, X
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled):
            one, other = compiled(*given)["w"], eager(*given)["w"]
            assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_num_threads(2),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_default_device("cpu"),
        lambda: torch.set_autocast_enabled("cpu", True),
    ],
)
def test_a_switch_makes_another_capture(norms, switch):
    eager, compiled = norms
    precision = torch.get_float32_matmul_precision()
    compiled(params(), {}, X, X)
    try:
        switch()
        for _ in range(2):
            expected = eager(params(), {}, X, X)
            assert same(compiled(params(), {}, X, X), expected)
        assert captures(compiled) == 2
        assert compiled.reports()[1].calls == 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.backends.mha.set_fastpath_enabled(True)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_device(None)
        torch.set_autocast_enabled("cpu", False)


def test_anomalies_are_looked_for_in_eager_mode(norms):
    _, compiled = norms
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(RuntimeError, match="mode is on"):
            compiled(params(), {}, X, X)


@pytest.mark.parametrize("given", [np.ones(3), Plain()])
def test_arguments_that_cannot_be_compared(norms, given):
    _, compiled = norms
    with pytest.raises(RuntimeError, match="an argument is a"):
        compiled(params(), {}, X, given)


# Models.


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


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "beta", 3.0),
        lambda model: setattr(model.config, "beta", 3.0),
        lambda model: setattr(model, "extra", 3.0),
        lambda model: setattr(model.drop, "p", 1.0),
        lambda model: model.register_forward_hook(lambda *given: 2 * given[2]),
    ],
)
def test_a_model_that_changes(change):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Scaled())
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    eager = vgrad.per_sample_norm(loss, randomness="same")
    compiled = vgrad.compile(eager, verify=False, fallback="error")
    before = eager(params, buffers, X, X)
    for _ in range(2):
        assert same(compiled(params, buffers, X, X), before)
    change(next(iter(fmodel.named_modules()))[1])
    assert not same(compiled(params, buffers, X, X), before)
    for _ in range(2):  # an fmodel undoes what was set, after the next call
        assert same(compiled(params, buffers, X, X), eager(params, buffers, X, X))


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
    compiled = vgrad.compile(eager, verify=False, fallback="error")

    def check():
        for _ in range(2):
            assert same(compiled(params(), {}, X), eager(params(), {}, X))

    check()
    held["beta"] = 2.0
    check()
    vgrad.rules.rule(op, weights=("weight",), replace=True)(made({"beta": 3.0}))
    check()
    assert captures(compiled) == 3


def test_a_schedule_that_changes():
    held = {"rate": 0.1}
    tx = vgrad.optim.sgd(lambda step: held["rate"] + 0 * step)
    loss = lambda params, buffers, x: (x * params["w"]).sum()  # noqa: E731
    step = vgrad.training.train_step(loss, tx)
    compiled = vgrad.compile(step, verify=False, fallback="error")
    state = vgrad.training.TrainState.create(tx, params(), {})
    for rate in (0.1, 0.1, 0.2):
        held["rate"] = rate
        expected = step(state, X)[0].params["w"]
        assert same(compiled(state, X)[0].params["w"], expected)


def test_an_exception_leaves_nothing_behind():
    thing = Plain(None)

    def loss(params, buffers, x):
        if thing.beta is None:
            raise KeyError("beta")
        return (params["w"] * x).sum() * thing.beta

    eager = vgrad.per_sample_norm(loss)
    compiled = vgrad.compile(eager, verify=False, fallback="error")
    for beta in (None, 2.0, 2.0, None, 2.0):
        thing.beta = beta
        if beta is None:
            with pytest.raises(KeyError, match="beta"):
                compiled(params(), {}, X)
        else:
            assert same(compiled(params(), {}, X), eager(params(), {}, X))
    assert captures(compiled) == 1

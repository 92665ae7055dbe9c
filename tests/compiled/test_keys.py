"""A graph is left as soon as anything changes that eager mode would see."""

import abc
import collections
import dataclasses
import enum
import functools
import itertools
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
        return (params["w"] * x).sum().square() * beta()

    return loss


def same(one, other):
    return torch.equal(one, other)


# What may change. Each case returns a loss and a function that changes something.

SEEN = []
HARMLESS = []
REFUSED = []


def seen(case):
    SEEN.append(case)
    return case


def harmless(case):
    HARMLESS.append(case)
    return case


def refused(why):
    def register(case):
        REFUSED.append(pytest.param(case, why, id=case.__name__))
        return case

    return register


def rows(change, loss, *arguments):
    """Check that a compiled function sees a change, and return the function."""
    eager = vgrad.per_sample_norm(loss)
    arguments = arguments or (params(), {}, X)
    compiled = vgrad.compile(eager, verify=False, fallback="error")
    before = eager(*arguments)
    for _ in range(3):
        assert same(compiled(*arguments), before)
    assert len(compiled.reports()) == 1
    change()
    after = eager(*arguments)
    assert not same(after, before), "the case changes nothing"
    for _ in range(2):
        assert same(compiled(*arguments), after)
    return compiled


@seen
def a_cell():
    beta = 2.0

    def change():
        nonlocal beta
        beta = 3.0

    return scaled(lambda: beta), change


@seen
def a_cell_that_was_empty():
    def loss(params, buffers, x):
        try:
            factor = beta
        except NameError:
            factor = 1.0
        return (params["w"] * x).sum() * factor

    def change():
        nonlocal beta
        beta = 3.0

    if False:
        beta = 0.0
    return loss, change


@seen
def a_cell_that_is_emptied():
    beta = 2.0

    def loss(params, buffers, x):
        try:
            factor = beta
        except NameError:
            factor = 1.0
        return (params["w"] * x).sum() * factor

    def change():
        nonlocal beta
        del beta

    return loss, change


@seen
def a_tuple_of_a_cell():
    beta = (2.0, (1,))

    def change():
        nonlocal beta
        beta = (2.0, (True,))

    return scaled(lambda: 2.0 if type(beta[1][0]) is int else 3.0), change


@seen
def the_sign_of_zero():
    beta = 0.0

    def change():
        nonlocal beta
        beta = -0.0

    return scaled(lambda: 2.0 + float(np.copysign(1.0, beta))), change


@seen
def the_sign_of_zero_in_a_dictionary():
    beta = {"x": 0.0}
    return (
        scaled(lambda: 2.0 + float(np.copysign(1.0, beta["x"]))),
        lambda: beta.update(x=-0.0),
    )


@seen
def defaults():
    def beta(value=2.0):
        return value

    def change():
        beta.__defaults__ = (3.0,)

    return scaled(beta), change


@seen
def a_default_list():
    held = [2.0]

    def beta(value=held):
        return value[0]

    return scaled(beta), lambda: held.__setitem__(0, 3.0)


@seen
def keyword_defaults():
    def beta(*, value=2.0):
        return value

    return scaled(beta), lambda: beta.__kwdefaults__.update(value=3.0)


@seen
def other_keyword_defaults():
    def beta(*, value=2.0):
        return value

    def change():
        beta.__kwdefaults__ = {"value": 3.0}

    return scaled(beta), change


@seen
def code():
    def beta():
        return 2.0

    def change():
        beta.__code__ = (lambda: 3.0).__code__

    return scaled(beta), change


@seen
def a_new_attribute_of_a_function():
    def beta():
        return getattr(beta, "value", 2.0)

    return scaled(beta), lambda: setattr(beta, "value", 3.0)


@seen
def a_partial():
    held = {"beta": 2.0}
    beta = functools.partial(lambda found: found["beta"], held)
    return scaled(beta), lambda: held.update(beta=3.0)


@seen
def attributes_of_a_partial():
    beta = functools.partial(lambda: beta.value)
    beta.value = 2.0
    return scaled(beta), lambda: setattr(beta, "value", 3.0)


class Plain:
    kind = 2.0

    def __init__(self, beta=2.0):
        self.beta = beta

    def value(self):
        return self.beta

    @property
    def double(self):
        return 2 * self.beta

    def of_class(self):
        return self.kind

    def optional(self):
        return getattr(self, "extra", 1.0)


class Child(Plain):
    pass


@seen
def a_bound_method():
    thing = Plain()
    return scaled(thing.value), lambda: setattr(thing, "beta", 3.0)


@seen
def a_property():
    thing = Plain()
    return scaled(lambda: thing.double), lambda: setattr(thing, "beta", 3.0)


@seen
def a_new_attribute():
    thing = Plain()
    return scaled(thing.optional), lambda: setattr(thing, "extra", 3.0)


@seen
def a_class_attribute():
    class Own(Plain):
        kind = 2.0

    thing = Own()
    return scaled(thing.of_class), lambda: setattr(Own, "kind", 3.0)


@seen
def an_inherited_class_attribute():
    class Base(Plain):
        kind = 2.0

    class Own(Base):
        pass

    thing = Own()
    return scaled(thing.of_class), lambda: setattr(Base, "kind", 3.0)


@seen
def a_class_attribute_that_hides_another():
    class Base(Plain):
        kind = 2.0

    class Own(Base):
        pass

    thing = Own()
    return scaled(thing.of_class), lambda: setattr(Own, "kind", 3.0)


@seen
def a_class_for_its_names():
    class Config:
        beta = 2.0

    return scaled(lambda: Config.beta), lambda: setattr(Config, "beta", 3.0)


@seen
def a_class_in_a_class():
    class Config:
        class Inner:
            beta = 2.0

    return scaled(lambda: Config.Inner.beta), lambda: setattr(Config.Inner, "beta", 3.0)


@seen
def a_static_method():
    held = {"beta": 2.0}

    class Config:
        @staticmethod
        def beta():
            return held["beta"]

    return scaled(lambda: Config.beta()), lambda: held.update(beta=3.0)


@seen
def a_class_method():
    held = {"beta": 2.0}

    class Config:
        @classmethod
        def beta(cls):
            return held["beta"]

    return scaled(Config.beta), lambda: held.update(beta=3.0)


@seen
def what_a_property_closes_over():
    held = {"beta": 2.0}

    class Config:
        beta = property(lambda self: held["beta"])

    config = Config()
    return scaled(lambda: config.beta), lambda: held.update(beta=3.0)


@seen
def a_method_replaced():
    class Own(Plain):
        def value(self):
            return 2.0

    thing = Own()
    return scaled(lambda: thing.value()), lambda: setattr(Own, "value", lambda _: 3.0)


@seen
def a_special_method_replaced():
    class Own:
        def __call__(self):
            return 2.0

    return scaled(Own()), lambda: setattr(Own, "__call__", lambda _: 3.0)


@seen
def another_class():
    class Other(Plain):
        def value(self):
            return 3.0

    thing = Plain()
    return scaled(lambda: thing.value()), lambda: setattr(thing, "__class__", Other)


@seen
def a_namespace():
    thing = types.SimpleNamespace(beta=2.0)
    return scaled(lambda: thing.beta), lambda: setattr(thing, "beta", 3.0)


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


@seen
def a_dataclass():
    thing = Data()
    return scaled(lambda: thing.beta), lambda: setattr(thing, "beta", 3.0)


@seen
def slots():
    thing = Slotted()
    return scaled(lambda: thing.beta), lambda: setattr(thing, "beta", 3.0)


@seen
def slots_of_something_callable():
    thing = Slotted()
    return scaled(thing), lambda: setattr(thing, "beta", 3.0)


@seen
def slots_beside_attributes():
    thing = Both()
    return scaled(thing), lambda: setattr(thing, "beta", 3.0)


@seen
def private_slots():
    class Own:
        __slots__ = ("__beta",)

        def set(self, value):
            self.__beta = value

        def value(self):
            return self.__beta

    thing = Own()
    thing.set(2.0)
    return scaled(thing.value), lambda: thing.set(3.0)


@seen
def a_key_replaced():
    held = {"a": None}
    return scaled(lambda: 2.0 if "a" in held else 3.0), lambda: (
        held.clear(),
        held.update(b=None),
    )


@seen
def the_order_of_keys():
    held = {"a": 2.0, "b": 3.0}

    def change():
        held["a"] = held.pop("a")

    return scaled(lambda: next(iter(held.values()))), change


@seen
def the_order_of_an_ordered_dictionary():
    held = collections.OrderedDict(a=2.0, b=3.0)
    return scaled(lambda: next(iter(held.values()))), lambda: held.move_to_end("a")


@seen
def attributes_of_a_dictionary():
    class Config(dict):
        pass

    held = Config()
    held.beta = 2.0
    return scaled(lambda: held.beta), lambda: setattr(held, "beta", 3.0)


@seen
def attributes_of_a_list():
    class Config(list):
        pass

    held = Config()
    held.beta = 2.0
    return scaled(lambda: held.beta), lambda: setattr(held, "beta", 3.0)


@seen
def keys_of_a_dictionary():
    held = {Plain(): 1.0}
    return (
        scaled(lambda: next(iter(held)).beta),
        lambda: setattr(next(iter(held)), "beta", 3.0),
    )


@seen
def a_list():
    held = [[2.0]]
    return scaled(lambda: held[0][0]), lambda: held[0].__setitem__(0, 3.0)


@seen
def a_longer_list():
    held = []
    return scaled(lambda: 2.0 + len(held)), lambda: held.append(1.0)


@seen
def a_set():
    held = {2.0}
    return scaled(lambda: sum(held)), lambda: held.add(1.0)


@seen
def the_kind_of_a_set():
    held = {1}
    return scaled(lambda: 2.0 + isinstance(next(iter(held)), bool)), lambda: (
        held.clear(),
        held.add(True),
    )


@seen
def a_deque():
    held = collections.deque([2.0])
    return scaled(lambda: held[0]), lambda: held.appendleft(3.0)


@seen
def a_proxy_of_a_dictionary():
    held = {"beta": 2.0}
    proxy = types.MappingProxyType(held)
    return scaled(lambda: proxy["beta"]), lambda: held.update(beta=3.0)


@seen
def a_method_of_a_dictionary():
    held = {"beta": 2.0}
    get = held.get
    return scaled(lambda: get("beta")), lambda: held.update(beta=3.0)


@seen
def a_special_method_of_a_list():
    held = [2.0]
    get = held.__len__
    return scaled(lambda: 1.0 + get()), lambda: held.append(3.0)


@seen
def an_array():
    held = np.array([2.0, 5.0])
    return scaled(lambda: float(held[0])), lambda: held.__setitem__(0, 3.0)


@seen
def a_weak_reference():
    thing = Plain()
    ref = weakref.ref(thing)
    return scaled(lambda: ref().beta), lambda: setattr(thing, "beta", 3.0)


class Level(enum.Enum):
    LOW = 2.0
    HIGH = 3.0


@seen
def a_member_of_an_enum():
    level = Level.LOW

    def change():
        nonlocal level
        level = Level.HIGH

    return scaled(lambda: level.value), change


@seen
def a_number_with_attributes():
    class Number(float):
        pass

    held = Number(2.0)
    held.beta = 2.0
    return scaled(lambda: held.beta), lambda: setattr(held, "beta", 3.0)


BETA = 2.0
HELD = {"beta": 2.0}
TABLE = np.array([2.0])
TENSOR = torch.tensor(2.0)


def helper():
    return 2.0


@pytest.fixture
def back(monkeypatch):
    """Put globals back."""
    for name in ("BETA", "TABLE", "TENSOR", "helper"):
        monkeypatch.setattr(sys.modules[__name__], name, globals()[name])
    monkeypatch.setitem(HELD, "beta", 2.0)


def set_global(name, value):
    globals()[name] = value


@seen
def a_global():
    return scaled(lambda: BETA), lambda: set_global("BETA", 3.0)


@seen
def a_global_dictionary():
    return scaled(lambda: HELD["beta"]), lambda: HELD.update(beta=3.0)


@seen
def a_global_array():
    return scaled(lambda: float(TABLE[0])), lambda: set_global("TABLE", np.array([3.0]))


@seen
def a_global_tensor():
    return scaled(lambda: TENSOR), lambda: set_global("TENSOR", torch.tensor(3.0))


@seen
def a_global_function():
    return scaled(lambda: helper()), lambda: set_global("helper", lambda: 3.0)


@seen
def a_global_by_its_name():
    return scaled(lambda: globals()["BETA"]), lambda: set_global("BETA", 3.0)


@seen
def a_global_behind_a_cache():
    @functools.cache
    def beta():
        return BETA

    def change():
        set_global("BETA", 3.0)
        beta.cache_clear()

    return scaled(beta), change


def module(name, **held):
    made = types.ModuleType(name)
    vars(made).update(held)
    sys.modules[name] = made
    return made


@seen
def an_attribute_of_a_module():
    config = module("config_of_user", beta=2.0)
    return scaled(lambda: config.beta), lambda: setattr(config, "beta", 3.0)


@seen
def an_attribute_of_a_module_in_a_module():
    inner = module("config_of_user.inner", beta=2.0)
    config = module("config_of_user", inner=inner)
    return scaled(lambda: config.inner.beta), lambda: setattr(inner, "beta", 3.0)


@seen
def a_module_imported_by_the_loss():
    module("config_of_user", beta=2.0)

    def beta():
        import config_of_user  # pyright: ignore[reportMissingImports]

        return config_of_user.beta

    return scaled(beta), lambda: setattr(sys.modules["config_of_user"], "beta", 3.0)


@seen
def a_name_imported_by_the_loss():
    module("config_of_user", beta=2.0)

    def beta():
        from config_of_user import beta  # pyright: ignore[reportMissingImports]

        return beta

    return scaled(beta), lambda: setattr(sys.modules["config_of_user"], "beta", 3.0)


@seen
def a_module_as_an_attribute():
    config = module("config_of_user", beta=2.0)
    thing = types.SimpleNamespace(config=config)
    return scaled(lambda: thing.config.beta), lambda: setattr(config, "beta", 3.0)


@seen
def a_module_asked_by_name():
    config = module("config_of_user", beta=2.0)
    return scaled(lambda: getattr(config, "beta")), lambda: setattr(  # noqa: B009
        config, "beta", 3.0
    )


@seen
def a_new_name_in_a_module():
    config = module("config_of_user")
    return scaled(lambda: getattr(config, "beta", 2.0)), lambda: setattr(
        config, "beta", 3.0
    )


@seen
def a_module_named_like_one_of_python():
    names = {"__name__": "profile", "__file__": "/home/me/profile.py", "BETA": 2.0}
    beta = eval("lambda: BETA", names)
    return scaled(beta), lambda: names.update(BETA=3.0)


@seen
def globals_without_a_name():
    names = {"BETA": 2.0}
    beta = eval("lambda: BETA", names)
    return scaled(beta), lambda: names.update(BETA=3.0)


@seen
def the_environment():
    os.environ["VGRAD_BETA"] = "2.0"
    return scaled(lambda: float(os.environ["VGRAD_BETA"])), lambda: os.environ.update(
        VGRAD_BETA="3.0"
    )


@seen
def getenv():
    os.environ["VGRAD_BETA"] = "2.0"
    return scaled(
        lambda: float(os.getenv("VGRAD_BETA", ""))
    ), lambda: os.environ.update(VGRAD_BETA="3.0")


@seen
def a_tensor_in_place():
    beta = torch.tensor(2.0)
    return scaled(lambda: beta), lambda: beta.fill_(3.0)


@seen
def a_tensor_in_another_place():
    held = {"beta": torch.tensor(2.0)}
    return scaled(lambda: held["beta"]), lambda: held.update(beta=torch.tensor(3.0))


@seen
def the_shape_of_a_tensor():
    beta = torch.ones(2)
    return scaled(lambda: beta.sum()), lambda: setattr(beta, "data", torch.ones(3))


@seen
def the_shape_of_a_tensor_alone():
    beta = torch.ones(2)
    return scaled(lambda: beta.shape[0]), lambda: setattr(beta, "data", torch.ones(3))


@seen
def the_dtype_of_a_tensor():
    beta = torch.ones(())
    return scaled(lambda: 1.0 + (beta.dtype == torch.float64)), lambda: setattr(
        beta, "data", torch.ones((), dtype=torch.float64)
    )


@seen
def whether_a_tensor_requires_grad():
    beta = torch.ones(2)
    return scaled(lambda: 1.0 + beta.requires_grad), lambda: beta.requires_grad_()


@seen
def a_criterion():
    criterion = nn.HuberLoss(delta=0.5)

    def loss(params, buffers, x):
        return criterion(params["w"] * x, x)

    return loss, lambda: setattr(criterion, "delta", 0.1)


@seen
def the_weight_of_a_criterion():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))

    def loss(params, buffers, x):
        logits = (params["w"] * x).expand(2, 2)
        return criterion(logits, torch.tensor([0, 1]))

    return loss, lambda: criterion.register_buffer("weight", torch.tensor([2.0, 1.0]))


@seen
def a_module_beside_the_loss():
    teacher = nn.Linear(2, 2).requires_grad_(False)

    def loss(params, buffers, x):
        return (params["w"] * x - teacher(x)).square().sum()

    return loss, lambda: teacher.weight.fill_(3.0)


@seen
def a_hook_on_a_module_beside_the_loss():
    teacher = nn.Linear(2, 2).requires_grad_(False)

    def loss(params, buffers, x):
        return (params["w"] * x - teacher(x)).square().sum()

    return loss, lambda: teacher.register_forward_hook(lambda *given: 2 * given[2])


@seen
def the_mode_of_a_module_beside_the_loss():
    teacher = nn.Sequential(nn.BatchNorm1d(2)).requires_grad_(False).eval()
    teacher[0].training = False

    def loss(params, buffers, x):
        factor = 2.0 if teacher[0].training else 1.0
        return (params["w"] * x).square().sum() * factor

    return loss, lambda: teacher.train()


@seen
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


@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.__name__)
@pytest.mark.usefixtures("back")
def test_a_change_is_seen(case):
    loss, change = case()
    rows(change, loss)


# What stays captured.


@harmless
def the_same_number_again():
    thing = Plain(0.5)
    return scaled(thing.value), lambda: setattr(thing, "beta", float("0.5"))


@harmless
def not_a_number():
    thing = Plain(float("nan"))
    loss = scaled(lambda: 1.0 if np.isnan(thing.beta) else 2.0)
    return loss, lambda: setattr(thing, "beta", float("nan"))


@harmless
def another_global():
    config = module("config_of_user", beta=2.0, other=1)
    return scaled(lambda: config.beta), lambda: setattr(config, "other", object())


@harmless
def abstract_classes():
    class Base(abc.ABC):
        beta = 2.0

        @abc.abstractmethod
        def value(self): ...

    class Own(Base):
        def value(self):
            return self.beta

    return scaled(Own().value), None


@harmless
def unions_and_generics():
    number, strings = int | float, list[str]

    def beta():
        assert strings
        return 2.0 if isinstance(2, number) else 3.0

    return scaled(beta), None


@harmless
def objects_with_any_attribute():
    class Config:
        def __init__(self):
            self.held = {"beta": 2.0}

        def __getattr__(self, name):
            return vars(self)["held"][name]

    config = Config()
    return scaled(lambda: config.beta), None


@harmless
def getters():
    get = operator.itemgetter("beta")
    return scaled(lambda: get(HELD)), None


@harmless
def a_cached_tensor():
    @functools.cache
    def beta(size):
        return torch.full((size,), 2.0)

    return scaled(lambda: beta(2).sum()), None


@harmless
def a_cached_tensor_among_the_last():
    @functools.lru_cache(maxsize=4)
    def beta(size):
        return torch.full((size,), 2.0)

    return scaled(lambda: beta(2).sum()), None


@harmless
def a_cached_property():
    class Own:
        @functools.cached_property
        def beta(self):
            return 2.0

    own = Own()
    return scaled(lambda: own.beta), None


@harmless
def a_compiled_object():
    inner = vgrad.compile(vgrad.per_sample_norm(scaled(lambda: 2.0)))
    thing = types.SimpleNamespace(beta=2.0, inner=inner)
    return scaled(lambda: thing.beta), None


@harmless
def standard_output():
    def beta():
        print("", end="", file=sys.stderr)
        return 2.0

    return scaled(beta), None


@harmless
def a_tensor_made_of_numbers():
    return scaled(lambda: torch.tensor([2.0, 3.0]).sum()), None


@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.__name__)
def test_what_changes_nothing_stays_captured(case):
    loss, change = case()
    eager = vgrad.per_sample_norm(loss)
    compiled = vgrad.compile(eager, fallback="error")
    for _ in range(3):
        assert same(compiled(params(), {}, X), eager(params(), {}, X))
        if change is not None:
            change()
    assert [each.calls for each in compiled.reports()] == [2]


# What no graph can repeat.


@refused("changes values")
def a_counter():
    held = {"calls": 0}

    def beta():
        held["calls"] += 1
        return 1.0 if held["calls"] < 4 else 2.0

    return scaled(beta)


@refused("changes values")
def a_counter_in_a_cell():
    calls = 0

    def beta():
        nonlocal calls
        calls += 1
        return 1.0 if calls < 4 else 2.0

    return scaled(beta)


CALLS = 0


@refused("changes values")
def a_counter_in_a_global():
    set_global("CALLS", 0)

    def beta():
        global CALLS
        CALLS += 1
        return 1.0 if CALLS < 4 else 2.0

    return scaled(beta)


@refused("changes values")
def a_counter_of_an_object():
    thing = Plain(0)

    def beta():
        thing.beta += 1
        return 1.0 if thing.beta < 4 else 2.0

    return scaled(beta)


@refused("changes values")
def a_list_that_grows():
    held = []

    def beta():
        held.append(1.0)
        return 1.0 if len(held) < 4 else 2.0

    return scaled(beta)


@refused("count")
def a_count():
    calls = itertools.count()
    return scaled(lambda: 1.0 if next(calls) < 3 else 2.0)


@refused("generator")
def a_generator():
    calls = (1.0 if each < 3 else 2.0 for each in range(100))
    return scaled(lambda: next(calls))


@refused("Generator")
def a_generator_of_torch():
    generator = torch.Generator().manual_seed(1)
    return scaled(lambda: torch.rand((), generator=generator))


@refused("Generator")
def a_generator_of_numpy():
    generator = np.random.default_rng(1)
    return scaled(lambda: generator.random())


@refused("Random")
def a_generator_of_python():
    generator = random.Random(1)
    return scaled(lambda: generator.random())


@refused("Random")
def a_method_of_a_generator_of_python():
    draw = random.Random(1).random
    return scaled(lambda: draw())


@refused("draws random numbers")
def numbers_of_python():
    random.seed(1)
    return scaled(lambda: random.random())


@refused("draws random numbers")
def numbers_of_numpy():
    np.random.seed(1)
    return scaled(lambda: np.random.rand())


@refused("seed")
def a_seed():
    def beta():
        torch.manual_seed(3)
        return torch.rand(())

    return scaled(beta)


@refused("time")
def the_time():
    return scaled(lambda: 1.0 + 0 * time.time())


@refused("time")
def the_clock():
    clock = time.perf_counter
    return scaled(lambda: 1.0 + 0 * clock())


@refused("writes")
def a_tensor_that_it_changes():
    calls = torch.zeros(())

    def beta():
        calls.add_(1.0)
        return calls

    return scaled(beta)


@pytest.mark.parametrize(("case", "why"), REFUSED)
def test_what_no_graph_repeats_is_refused(case, why):
    eager = vgrad.per_sample_norm(case(), randomness="same")
    compiled = vgrad.compile(eager, verify=False, fallback="error")
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

"""One table of state that Python code can read: before, a change of it, the outcome.

A row is a generator. It yields a function that a loss multiplies by; the code that
follows is the change. After it the numbers are those of plain autograd, whether the
function is captured again or runs in eager mode from the beginning.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import abc
import builtins
import collections
import contextvars
import dataclasses
import enum
import functools
import importlib
import math
import operator
import os
import re
import sys
import time
import types
import warnings
import weakref
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle

pytestmark = pytest.mark.compiled

D = torch.float64
X = torch.tensor([[3.0, 4.0], [0.5, 1.0], [2.0, -1.0]], dtype=D)
W = {"w": torch.tensor([1.0, 2.0], dtype=D)}

TABLE = {}
AGAIN = "captured again"


def row(outcome=AGAIN):
    """Register a row; an outcome but `AGAIN` is why the function runs in eager mode."""

    def registered(make):
        TABLE[make.__name__.replace("_", " ").strip()] = outcome, make
        return make

    return registered


def ones(**attributes):
    made = torch.ones(3, dtype=D)
    vars(made).update(attributes)
    return made


def module(name, **held):
    made = types.ModuleType(name)
    made.__file__ = os.path.abspath(f"{name}.py")
    vars(made).update(held)
    return made


class Plain:
    def __init__(self, beta=2.0):
        self.beta = beta


# Tensors.


@row()
def attribute_of_a_closed_tensor():
    held = ones(tau=2.0)
    yield lambda: held.sum() * held.tau
    held.tau = 5.0


@row()
def attribute_that_a_closed_tensor_gets():
    held = ones()
    yield lambda: getattr(held, "tau", 2.0)
    held.tau = 5.0


@row()
def attribute_that_a_closed_tensor_loses():
    held = ones(tau=5.0)
    yield lambda: getattr(held, "tau", 2.0)
    del held.tau


@row()
def attribute_of_a_tensor_in_containers():
    held = {"a": [(ones(tau=2.0),)]}
    yield lambda: held["a"][0][0].tau
    held["a"][0][0].tau = 5.0


@row()
def object_in_an_attribute_of_a_tensor():
    held = ones(config=Plain())
    yield lambda: held.config.beta
    held.config.beta = 5.0


@row()
def tensor_in_an_attribute_of_a_tensor():
    held = ones(mask=ones())
    yield lambda: held.mask.sum()
    held.mask = ones() * 2


@row()
def dictionary_of_a_tensor():
    held = ones(tau=2.0)
    yield lambda: sum(vars(held).values())
    held.other = 3.0


@row()
def attribute_of_a_buffer_beside_the_loss():
    held = nn.Module()
    held.register_buffer("b", ones(tau=2.0))
    yield lambda: held.b.sum() * held.b.tau
    held.b.tau = 5.0


@row()
def attribute_of_a_parameter_beside_the_loss():
    held = nn.Linear(2, 2).double().requires_grad_(False)
    held.weight.tau = 2.0
    yield lambda: held.weight.sum() * held.weight.tau
    held.weight.tau = 5.0


@row("reads `.grad`")
def grad_of_a_closed_tensor_appears():
    held = ones().requires_grad_()
    yield lambda: 1.0 if held.grad is None else 3.0
    held.grad = ones()


@row("reads `.grad`")
def grad_of_a_closed_tensor_is_replaced():
    held = ones().requires_grad_()
    held.grad = ones()
    yield lambda: held.grad.sum()
    held.grad = ones() * 2


@row("reads `.grad`")
def grad_of_a_closed_tensor_disappears():
    held = ones().requires_grad_()
    held.grad = ones()
    yield lambda: 1.0 if getattr(held, "gr" + "ad") is None else 3.0
    held.grad = None


@row("reads `._version`")
def version_of_a_closed_tensor():
    held = ones()
    yield lambda: 2.0 if held._version else 1.0
    held.mul_(1)


@row()
def whether_a_closed_tensor_requires_grad():
    held = ones()
    yield lambda: 2.0 if held.requires_grad else 1.0
    held.requires_grad_()


@row("reads `.(is_leaf|grad_fn)`")
def whether_a_closed_tensor_is_a_leaf():
    held = ones().requires_grad_()
    yield lambda: 2.0 if held.is_leaf and held.grad_fn is None else 1.0
    held.requires_grad_(False).mul_(ones().requires_grad_())


@row("reads `._backward_hooks`")
def hooks_of_a_closed_tensor():
    held = ones().requires_grad_()
    yield lambda: 2.0 if held._backward_hooks else 1.0
    held.register_hook(lambda grad: grad)


# Modules, imports, globals and builtins.


@row()
def attribute_of_a_module_with_a_computed_name():
    held, number = module("state_a", beta1=2.0), 1
    yield lambda: getattr(held, f"beta{number}")
    held.beta1 = 7.0


@row()
def attribute_of_a_module_by_an_attrgetter():
    held, get = module("state_a", beta=2.0), operator.attrgetter("be" + "ta")
    yield lambda: get(held)
    held.beta = 7.0


@row()
def attribute_of_a_module_by_a_partial():
    held = module("state_a", beta=2.0)
    yield functools.partial(getattr, held, "be" + "ta")
    held.beta = 7.0


@row()
def attribute_of_a_module_in_a_text():
    held, text = module("state_a", beta=2.0), "{0.beta}"
    yield lambda: float(text.format(held))
    held.beta = 7.0


@row()
def attribute_that_a_module_gets_with_a_computed_name():
    held, name = module("state_a"), "be" + "ta"
    yield lambda: getattr(held, name, 2.0)
    held.beta = 7.0


@row()
def list_in_a_module_with_a_computed_name():
    held, name = module("state_a", beta=[2.0]), "be" + "ta"
    yield lambda: getattr(held, name)[0]
    held.beta[0] = 7.0


@row()
def dictionary_of_a_module():
    held, name = module("state_a", beta=2.0), "be" + "ta"
    yield lambda: vars(held)[name]
    held.beta = 7.0


@row()
def attribute_computed_by_a_module():
    source = Plain()
    held = module("state_a")
    vars(held)["__getattr__"] = lambda name: source.beta
    yield lambda: held.beta
    source.beta = 7.0


@row("changes values")
def attribute_of_a_module_that_the_loss_sets():
    held = module("state_a", count=1.0)

    def count():
        held.count = held.count + 1.0
        return 2.0 if held.count > 0 else 1.0

    yield count
    held.count = -100.0


@row("sys.modules")
def module_found_in_sys_modules():
    sys.modules["state_b"] = held = module("state_b", beta=2.0)
    yield lambda: sys.modules["state_b"].beta
    held.beta = 7.0


@row()
def module_found_by_importlib():
    sys.modules["state_b"] = held = module("state_b", beta=2.0)
    yield lambda: importlib.import_module("state_b").beta
    held.beta = 7.0


@row()
def module_replaced_for_importlib():
    sys.modules["state_b"] = module("state_b", beta=2.0)
    yield lambda: importlib.import_module("state_b").beta
    sys.modules["state_b"] = module("state_b", beta=7.0)


@row("__import__")
def module_found_by_import():
    sys.modules["state_b"] = held = module("state_b", beta=2.0)
    yield lambda: __import__("state_b").beta
    held.beta = 7.0


@row()
def module_replaced_in_sys_modules():
    sys.modules["state_b"] = module("state_b", beta=2.0)

    def imported():
        import state_b  # pyright: ignore[reportMissingImports]

        return state_b.beta

    yield imported
    sys.modules["state_b"] = module("state_b", beta=7.0)


@row("reads sys.modules|AGAIN")  # eager where import hooks of others are in place
def module_that_appears():
    def imported():
        try:
            from state_b import beta  # pyright: ignore[reportMissingImports]
        except ImportError:
            return 2.0
        return beta

    yield imported
    sys.modules["state_b"] = module("state_b", beta=7.0)


@row()
def module_in_a_package():
    package = module("state_c", state_b=module("state_c.state_b", beta=2.0))
    sys.modules |= {"state_c": package, "state_c.state_b": package.state_b}

    def imported():
        import state_c.state_b  # pyright: ignore[reportMissingImports]

        return state_c.state_b.beta

    yield imported
    package.state_b.beta = 7.0


@row()
def global_that_comes_to_hide_a_builtin():
    yield lambda: float(abs(-2.0))
    globals()["abs"] = lambda _: 7.0


@row()
def global_that_appears():
    def read():
        try:
            return LATER  # pyright: ignore[reportUndefinedVariable]
        except NameError:
            return 2.0

    yield read
    globals()["LATER"] = 7.0


@row()
def name_in_builtins():
    vars(builtins)["SCALE_OF_ALL"] = 2.0
    yield lambda: SCALE_OF_ALL  # pyright: ignore[reportUndefinedVariable] # noqa: F821
    vars(builtins)["SCALE_OF_ALL"] = 7.0


@row()
def builtin_replaced():
    yield lambda: float(ascii(2))
    vars(builtins)["ascii"] = lambda _: 7


@row()
def builtins_of_a_function():
    names = {"__builtins__": {"beta": 2.0}}
    yield eval("lambda: beta", names)
    names["__builtins__"]["beta"] = 7.0


@row()
def global_with_a_computed_name():
    names = {"beta": 2.0, "__builtins__": builtins}
    yield eval("lambda: globals()['be' + 'ta']", names)
    names["beta"] = 7.0


@row("generator")
def globals_that_cannot_be_compared():
    names = {"beta": 2.0, "other": (each for each in "ab")}
    yield eval("lambda: globals()['be' + 'ta']", names)
    names["beta"] = 7.0


@row("_getframe")
def variable_of_another_frame():
    held = [2.0]

    def read():
        return sys._getframe(1).f_locals["hidden"]

    def around():
        hidden = held[0]
        return read() + 0 * hidden

    yield around
    held[0] = 7.0


@row()
def global_in_evaluated_text():
    names = {"beta": 2.0}
    yield lambda: eval("beta", names)
    names["beta"] = 7.0


@row()
def global_in_executed_text():
    names = {"beta": 2.0, "text": "found = beta"}

    def read():
        found = {}
        exec(names["text"], names, found)
        return found["found"]

    yield read
    names["beta"] = 7.0


# Classes and objects.


@row()
def attribute_of_a_member_of_an_enum():
    class Mode(enum.Enum):
        A = 1

    Mode.A.weight = 2.0
    member = Mode.A
    yield lambda: member.weight
    member.weight = 7.0


@row()
def attribute_of_a_member_of_numbers():
    class Mode(enum.IntFlag):
        A = 1
        B = 2

    Mode.A.weight = 2.0
    yield lambda: Mode.A.weight * (Mode.A | Mode.B)
    Mode.A.weight = 7.0


@row()
def class_registered_with_an_abstract_one():
    class Abstract(abc.ABC): ...  # noqa: B024

    class Other: ...

    other = Other()
    yield lambda: 7.0 if isinstance(other, Abstract) else 2.0
    Abstract.register(Other)


@row()
def class_registered_with_one_of_collections():
    class Other: ...

    other, abstract = Other(), collections.abc.Sequence
    yield lambda: 7.0 if isinstance(other, abstract) else 2.0
    abstract.register(Other)


@row()
def function_registered_for_a_class():
    read = functools.singledispatch(lambda thing: 2.0)
    thing = Plain()
    yield lambda: read(thing)
    read.register(Plain, lambda thing: 7.0)


@row()
def method_of_a_class_replaced():
    class Own:
        def beta(self):
            return 2.0

    thing = Own()
    yield lambda: thing.beta()
    Own.beta = lambda self: 7.0


@row()
def special_attribute_of_a_class():
    class Own:
        __scale__: ClassVar = [2.0]

    thing = Own()
    yield lambda: thing.__scale__[0]
    Own.__scale__[0] = 7.0


@row()
def descriptor_on_a_class():
    class Descriptor:
        beta = 2.0

        def __get__(self, instance, owner):
            return self.beta

    class Own:
        beta = Descriptor()

    thing = Own()
    yield lambda: thing.beta
    vars(Own)["beta"].beta = 7.0


@row()
def attribute_that_hides_getattr():
    class Own:
        def __getattr__(self, name):
            return 2.0

    thing = Own()
    yield lambda: thing.beta
    thing.beta = 7.0


@row()
def dictionary_of_an_object():
    thing, name = Plain(), "be" + "ta"
    yield lambda: thing.__dict__[name]
    thing.beta = 7.0


@row()
def fields_of_a_dataclass():
    @dataclasses.dataclass
    class Own:
        beta: float = dataclasses.field(default=2.0, metadata={"a": {"scale": 2.0}})

    metadata = dataclasses.fields(Own)[0].metadata
    yield lambda: dataclasses.fields(Own)[0].metadata["a"]["scale"]
    metadata["a"]["scale"] = 7.0


@row()
def object_in_a_named_tuple():
    class Own(NamedTuple):
        thing: Plain

    held = Own(Plain())
    yield lambda: held.thing.beta
    held.thing.beta = 7.0


@row()
def object_behind_a_weak_reference():
    thing = Plain()
    reference = weakref.ref(thing)
    yield lambda: reference().beta
    thing.beta = 7.0


@row()
def factory_of_a_dictionary():
    held = collections.defaultdict(lambda: 2.0)
    yield lambda: held.copy()["a"]
    held.default_factory = lambda: 7.0


@row("list_iterator")
def iterator():
    held = iter([2.0] * 20)
    yield lambda: next(held)
    held.__setstate__(5)
    held.__reduce__()[1][0][:] = [7.0] * 20


@row("ContextVar")
def context_variable():
    held = contextvars.ContextVar("held", default=2.0)
    yield lambda: held.get()
    held.set(7.0)


@row()
def cached_function_of_a_variable():
    held = Plain()
    read = functools.lru_cache(lambda: held.beta)
    yield read
    held.beta = 7.0
    read.cache_clear()


@row()
def variable_of_the_environment():
    os.environ["VGRAD_BETA"] = "2.0"
    yield lambda: float(os.environ.get("VGRAD_BETA", 1.0))
    del os.environ["VGRAD_BETA"]


@row("time")
def time_of_the_day():
    now = []
    yield lambda: 2.0 + 0 * time.localtime().tm_year + len(now)
    now.append(1)


@row()
def array_in_a_dictionary():
    held = {"a": np.array([2.0])}
    yield lambda: float(held["a"][0])
    held["a"][0] = 7.0


# Torch.


@row("seed or the state")
def initial_seed():
    torch.manual_seed(1)
    yield lambda: 2.0 if torch.initial_seed() == 1 else 7.0
    torch.manual_seed(2)


@row("seed or the state")
def initial_seed_of_the_generator():
    torch.manual_seed(1)
    yield lambda: 2.0 if torch.default_generator.initial_seed() == 1 else 7.0
    torch.manual_seed(2)


@row()
def function_of_torch_patched():
    held = torch.ones((), dtype=D)
    yield lambda: F.gelu(held)
    F.gelu = lambda x: 3 * x


@row()
def function_of_torch_patched_below_a_layer():
    held, x = nn.Linear(2, 1).double().requires_grad_(False), X[0]
    yield lambda: held(x).sum()
    F.linear = lambda x, weight, bias: 3 * x


@row()
def function_of_torch_patched_with_a_closure():
    held, scale = torch.ones((), dtype=D), [3.0]
    F.gelu = lambda x: scale[0] * x
    yield lambda: F.gelu(held)
    scale[0] = 7.0


@row()
def function_of_python_patched():
    yield lambda: math.erf(4.0)
    vars(math)["erf"] = lambda x: 7.0


@row()
def forward_of_a_layer_patched():
    layer, held = nn.ReLU(), torch.ones((), dtype=D)
    yield lambda: layer(held)
    nn.ReLU.forward = lambda self, x: 3 * x


@row()
def method_of_a_layer_patched():
    layer, x = nn.Conv1d(1, 1, 1).double().requires_grad_(False), X[None, :1]
    yield lambda: layer(x).sum()
    nn.Conv1d._conv_forward = lambda self, x, weight, bias: 3 * x


@row("does not repeat")
def call_of_all_modules_patched():
    layer, held = nn.ReLU(), torch.ones((), dtype=D)
    yield lambda: layer(held)
    nn.Module.__call__ = lambda self, x: 3 * x


@row()
def method_of_tensors_patched():
    held = torch.ones((), dtype=D)
    yield lambda: held.erfc()
    torch.Tensor.erfc = lambda self: 3 * self


@row()
def operator_of_tensors_patched():
    held = torch.ones((), dtype=D)
    yield lambda: 4.0**held
    torch.Tensor.__rpow__ = lambda self, other: 7 * self


@row()
def inherited_operator_of_tensors_patched():
    held = torch.ones((), dtype=D)
    yield lambda: (2 * held) % 3.0
    torch.Tensor.__mod__ = lambda self, other: 7 * self


@row()
def default_dtype():
    yield lambda: 2.0 if torch.get_default_dtype() == torch.float32 else 7.0
    torch.set_default_dtype(D)


@row()
def precision_of_float32():
    yield lambda: 2.0 if torch.get_float32_matmul_precision() == "highest" else 7.0
    torch.set_float32_matmul_precision("medium")


@row()
def deterministic_algorithms():
    yield lambda: 7.0 if torch.are_deterministic_algorithms_enabled() else 2.0
    torch.use_deterministic_algorithms(True)


@row()
def warnings_of_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    yield lambda: 2.0 if torch.get_deterministic_debug_mode() == 2 else 7.0
    torch.use_deterministic_algorithms(True, warn_only=True)


_NAMES = {
    F: ("gelu", "linear"),
    math: ("erf",),
    nn.ReLU: ("forward",),
    nn.Conv1d: ("_conv_forward",),
    nn.Module: ("__call__",),
    torch.Tensor: ("erfc", "__rpow__", "__mod__"),
    builtins: ("SCALE_OF_ALL", "ascii"),
    sys.modules[__name__]: ("abs", "LATER"),
}


@pytest.fixture
def put_back():
    """Put back all that a row may replace."""
    before = {each: dict(vars(each)) for each in _NAMES}
    environment, modules, state = (
        dict(os.environ),
        {*sys.modules},
        torch.get_rng_state(),
    )
    yield
    for holder, names in _NAMES.items():
        for name in names:
            if name in before[holder]:
                setattr(holder, name, before[holder][name])
            elif name in vars(holder):
                delattr(holder, name)
    os.environ.clear()
    os.environ.update(environment)
    for name in {*sys.modules} - modules:
        if name.startswith("state_"):
            del sys.modules[name]
    torch.set_rng_state(state)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.usefixtures("put_back")
def test_numbers_after_a_change(name):
    outcome, make = TABLE[name]
    steps = make()
    read = next(steps)

    def loss(params, buffers, x):
        return (params["w"] @ x).square() * read()

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
    assert not torch.allclose(before, after), "the row changes nothing"
    told = [each for each in caught if each.category is vgrad.CompileWarning]
    backends = [(each.backend, each.calls) for each in compiled.reports()]
    if outcome == AGAIN or ("AGAIN" in outcome and backends[0][0] == "replay"):
        assert backends == [("replay", 1)] * 2, compiled.reports()[0].why
        assert not told
    else:
        assert backends[-1] == ("eager", 0)
        assert re.search(outcome, compiled.reports()[-1].why)
        assert [re.search(outcome, str(each.message)) is None for each in told] == [0]

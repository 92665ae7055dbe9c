"""Models that do not run the same code are refused, and what differs is named."""

import copy
import functools
import random
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.ensemble.test_stacking import Tied, mlp, models
from tests.oracle import assert_exact
from vgrad.ensemble import axes, matching, member, stack

difference = matching.difference


class Holder(nn.Module):
    """A module with one more attribute."""

    def __init__(self, value):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.held = value

    def forward(self, x):
        return self.body(x)


def refused(models, message):
    with pytest.raises(ValueError, match=message):
        stack(models)


CHANGES = [  # of a model `m`: what was expected where, and what was got
    ("m[0] = nn.Linear(3, 5)", r"shape \(4, 3\)", "0.weight", "shape"),
    ("m[3].bfloat16()", "dtype torch.float32", "3.weight", "dtype torch.bfloat16"),
    ("m[3].to('meta')", "device cpu", "3.weight", "device meta"),
    (
        "m[0].weight.requires_grad_(False)",
        "requires_grad=True",
        "0.weight",
        "requires_grad=False",
    ),
    ("m[3] = nn.Linear(4, 2, bias=False)", "a parameter", "3.bias", "none"),
    ("m[0].new = nn.Parameter(torch.ones(1))", "none", "0.new", "a parameter"),
    ("buffer_instead(m[0])", "a parameter", "0.bias", "a buffer"),
    ("not_persistent(m[1])", "a buffer", "1.running_mean", ".* that is not pers"),
    ("m[1].eval()", "True", "1.training", "False"),
    ("m.append(nn.ReLU())", "none", "4", "a .*activation.ReLU"),
    ("m[2] = nn.Dropout1d(0.1)", "a .*Dropout", "2", "a .*Dropout1d"),
    (
        "m._modules = dict(reversed(m._modules.items()))",
        r"submodules in the order \['', '0', .*",
        None,
        r".*\['', '3', '2'",
    ),
    ("m[2].p = 0.5", "0.1", "2.p", "0.5"),
    ("m[1].eps = 1e-3", "1e-05", "1.eps", "0.001"),
    ("m[1].scale = 2.0", "nothing", "1.scale", "2.0"),
    ("del m[2].inplace", "False", "2.inplace", "nothing"),
    ("m[2].inplace = 0", "False", "2.inplace", "0"),
    (
        "m[3].register_forward_hook(lambda module, args, output: output * 2)",
        "nothing",
        r"3._forward_hooks\[0\]",
        "a tuple",
    ),
    ("parametrizations.orthogonal(m[0])", "a torch.*Linear", "0", "a parametrized"),
    ("m[2].forward = F.relu", "nothing", "2.forward", "relu"),
]


def buffer_instead(layer):
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)


def not_persistent(layer):
    layer.register_buffer("running_mean", torch.zeros(4), persistent=False)


SCOPE = {each.__name__: each for each in (torch, copy, functools, random)}
SCOPE |= {"F": F, "nn": nn, "parametrizations": parametrizations}
SCOPE |= {each.__name__: each for each in (buffer_instead, not_persistent)}


@pytest.mark.parametrize(("change", "expected", "place", "got"), CHANGES)
def test_what_differs_is_named_with_its_member(change, expected, place, got):
    three = models()
    exec(change, SCOPE, {"m": three[2]})
    place = "" if place is None else f"in '{place}' of "
    refused(three, f"expected {expected} ?{place}member 2 as in member 0, got {got}")


@pytest.mark.parametrize("change", [change for change, *_ in CHANGES])
def test_models_that_all_differ_in_the_same_way_are_alike(change):
    three = models()
    for each in three:
        exec(change, SCOPE, {"m": each})
    _, params, buffers = stack(three)
    assert axes.members(params, buffers) == 3


def test_another_class_is_named():
    refused(
        [mlp(), Tied()],
        "expected a .*Sequential in member 1 as in member 0, got a .*Ti",
    )


def test_a_class_that_was_made_anew_is_another_one():
    def build():
        class Local(nn.Linear):
            pass

        return Local(2, 2)

    refused([build(), build()], "Local in member 1 as .*, got another .*Local")


def test_other_ties_are_named():
    refused(
        [Tied(), Tied(tied=False)],
        "the tensor tied to 'a.weight' in 'b.weight' of member 1 .*of its own",
    )
    refused([Tied(tied=False), Tied()], "its own in 'b.weight' .* tied to 'a.weight'")


def test_other_ties_of_modules_are_named():
    def twice(tied):
        first = nn.Linear(2, 2)
        return nn.Sequential(first, first if tied else nn.Linear(2, 2))

    refused([twice(True), twice(False)], "the module tied to '0' in '1' of member 1")


class Config:
    """A plain object, compared by what it holds."""

    def __init__(self, size):
        self.size = size
        self.me = self


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("size",)

    def __init__(self, size):
        self.size = size


def scaled(factor):
    return lambda x: x * factor


def with_default(factor):
    return lambda x, factor=factor: x * factor


def seeded(seed):
    return torch.Generator().manual_seed(seed)


BODY = nn.Linear(2, 2)
LEAKY = "functools.partial(F.leaky_relu, negative_slope={})"
ATTRIBUTES = [  # of two models: what was expected where, and what was got
    ("3", "4", "", "3", "4"),
    ("1", "1.0", "", "1", "1.0"),
    ("None", "'a'", "", "None", "'a'"),
    ("(1, 2)", "(1, 3)", r"\[1\]", "2", "3"),
    ("[1]", "[1, 2]", r"\[1\]", "nothing", "2"),
    ("{'a': 1}", "{'a': 2}", r"\['a'\]", "1", "2"),
    ("{0: 1, 5: 1}", "{5: 1, 0: 1}", "", r".*the order \[0, 5\]", r"\[5, 0\]"),
    ("{(1, 2): 1}", "{(1, 3): 1}", r"\[0\]\[0\]\[1\]", "2", "3"),
    ("{1, 2}", "{1, 3}", r"\[2\]", "2", "nothing"),
    ("Config(1)", "Config(2)", ".size", "1", "2"),
    ("Slotted(1)", "Slotted(2)", r".__state__\[1\]\['size'\]", "1", "2"),
    ("torch.ones(2).numpy()", "torch.zeros(2).numpy()", ".__state__.*", ".*", ".*"),
    ("torch.ones(2)", "torch.zeros(2)", "", "the values", "others"),
    (
        "torch.ones(2)",
        "torch.ones(2).half()",
        "",
        "dtype torch.float32",
        "dtype torch.float16",
    ),
    ("torch.float32", "torch.float64", "", ".*", ".*"),
    ("F.relu", "F.gelu", ".*", ".*relu.*", ".*gelu"),
    ("F.relu", "F.elu", ".__code__", "the code of 'relu'", "the code of 'elu'"),
    ("scaled(1)", "scaled(2)", r".__closure__\[0\]", "1", "2"),
    ("with_default(1)", "with_default(2)", r".__defaults__\[0\]", "1", "2"),
    (LEAKY.format(0.1), LEAKY.format(0.2), r".*\['negative_slope'\]", "0.1", "0.2"),
    ("[nn.Dropout(0.1)]", "[nn.Dropout(0.2)]", r"\[0\].p", "0.1", "0.2"),
    (
        "[copy.deepcopy(BODY)]",
        "[nn.Linear(2, 2)]",
        r"\[0\].weight",
        "the values",
        "others",
    ),
    ("seeded(1)", "seeded(2)", ".__state__.*", ".*", ".*"),
    ("random.Random(1)", "random.Random(2)", ".__state__.*", ".*", ".*"),
]


def holding(text):
    return Holder(eval(text, globals() | SCOPE))


@pytest.mark.parametrize(("first", "other", "place", "expected", "got"), ATTRIBUTES)
def test_attributes_that_differ_are_named(first, other, place, expected, got):
    assert difference(holding(first), holding(first)) is None
    message = f"expected {expected} in 'held{place}' of member 1 .*, got {got}"
    refused([holding(first), holding(other)], message)


def test_not_a_number_is_like_itself():
    assert difference(Holder(float("nan")), Holder(float("nan"))) is None


def test_references_to_the_models_own_parts_are_compared_by_name():
    def pointing(at):
        model = Tied(tied=False)
        model.held = [getattr(model, at).weight, weakref.ref(getattr(model, at))]
        model.call = getattr(model, at).forward
        return model

    assert difference(pointing("a"), pointing("a")) is None
    refused(
        [pointing("a"), pointing("b")],
        r"what is at 'a.weight' in 'held\[0\]' of member 1 .* 'b.weight'",
    )


def test_functions_bound_to_the_models_are_compared_by_their_code():
    def doubled(factor):
        def forward(self, x):
            return self.body(x) * factor

        model = Holder(None)
        model.forward = types.MethodType(forward, model)
        return model

    assert difference(doubled(2), doubled(2)) is None
    refused(
        [doubled(2), doubled(3)],
        r"expected 2 in 'forward.__func__.__closure__\[0\]' of member 1",
    )


def test_hooks_are_alike_whatever_their_numbers():
    def watched():
        model = nn.Linear(2, 2)
        model.register_forward_hook(double)
        return model

    def double(module, args, output):
        return output * 2

    pair = [watched(), watched()]
    fmodel, params, buffers = stack(pair)
    x = torch.randn(4, 2)
    outputs = torch.vmap(fmodel, (0, 0, None))(params, buffers, x)
    assert_exact(outputs, torch.stack([each(x) for each in pair]), 1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
    ],
    ids=["weight", "spectral", "old weight", "old spectral", "pruned"],
)
def test_weights_computed_in_each_call_may_differ(wrap):
    torch.manual_seed(0)
    pair = [wrap(nn.Linear(3, 2)).eval() for _ in range(2)]
    fmodel, params, buffers = stack(pair)
    x = torch.randn(4, 3)
    for i, each in enumerate(pair):
        output = fmodel(member(params, i), member(buffers, i), x)
        assert_exact(output, each(x), 1e-6)

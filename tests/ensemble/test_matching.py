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


SCOPE = {"torch": torch, "nn": nn, "parametrizations": parametrizations}
SCOPE |= {"F": F, "copy": copy, "functools": functools, "random": random}
DIFFERENCES = {
    "m[0] = nn.Linear(3, 5)": (
        r"expected shape \(4, 3\) in '0.weight' of member 2 as in member 0, got"
    ),
    "m[3].to(torch.bfloat16)": (
        "expected dtype torch.float32 in '3.weight' of member 2 .* torch.bfloat16"
    ),
    "m[3].to('meta')": "device cpu in '3.weight' of member 2 .*, got device meta",
    "m[0].weight.requires_grad_(False)": (
        "requires_grad=True in '0.weight' of member 2 .*, got requires_grad=False"
    ),
    "m[3] = nn.Linear(4, 2, bias=False)": (
        "expected a parameter in '3.bias' of member 2 .*, got none"
    ),
    "m[0].register_parameter('extra', nn.Parameter(torch.ones(1)))": (
        "expected none in '0.extra' of member 2 .*, got a parameter"
    ),
    "bias = m[0].bias.detach(); del m[0].bias; m[0].register_buffer('bias', bias)": (
        "expected a parameter in '0.bias' of member 2 .*, got a buffer"
    ),
    "m[1].register_buffer('running_mean', torch.zeros(4), persistent=False)": (
        "a buffer in '1.running_mean' of member 2 .* that is not pers"
    ),
    "m[1].eval()": "expected True in '1.training' of member 2 .*, got False",
    "m.append(nn.ReLU())": r"none in '4' of member 2 .*, got a .*activation.ReLU",
    "m[2] = nn.Dropout1d(0.1)": "a .*Dropout in '2' of member 2 .*, got a .*Dropout1d",
    "m._modules = dict(reversed(m._modules.items()))": (
        r"submodules in the order \['', '0', .* member 2 .*\['', '3', '2'"
    ),
    "m[2].p = 0.5": "expected 0.1 in '2.p' of member 2 as in member 0, got 0.5",
    "m[1].eps = 1e-3": "expected 1e-05 in '1.eps' of member 2 as .*, got 0.001",
    "m[1].scale = 2.0": "expected nothing in '1.scale' of member 2 .*, got 2.0",
    "del m[2].inplace": "expected False in '2.inplace' of member 2 .*, got nothing",
    "m[2].inplace = 0": "expected False in '2.inplace' of member 2 .*, got 0",
    "m[3].register_forward_hook(lambda module, args, output: output * 2)": (
        r"expected nothing in '3._forward_hooks\[0\]' of member 2 .*, got a tuple"
    ),
    "parametrizations.orthogonal(m[0])": (
        "expected a torch.*Linear in '0' .*, got a parametrized torch"
    ),
    "m[2].forward = F.relu": "expected nothing in '2.forward' of member 2 .*, got relu",
}
"""Changes of a model `m`, and what says that one member had it and others had not."""


@pytest.mark.parametrize("change", DIFFERENCES)
def test_what_differs_is_named_with_its_member(change):
    three = models()
    exec(change, SCOPE, {"m": three[2]})
    refused(three, DIFFERENCES[change])


@pytest.mark.parametrize("change", DIFFERENCES)
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
ATTRIBUTES = [
    ("3", "4", "expected 3 in 'held' of member 1 .*, got 4"),
    ("1", "1.0", "expected 1 in 'held' .*, got 1.0"),
    ("None", "'a'", "expected None in 'held' .*, got 'a'"),
    ("(1, 2)", "(1, 3)", r"expected 2 in 'held\[1\]' .*got 3"),
    ("[1]", "[1, 2]", r"nothing in 'held\[1\]' .*got 2"),
    ("{'a': 1}", "{'a': 2}", r"1 in 'held\['a'\]' .*got 2"),
    (
        "{'a': 1, 'b': 1}",
        "{'b': 1, 'a': 1}",
        r"the order \['a', 'b'\] in 'held' .*got \['b', 'a'\]",
    ),
    ("{(1, 2): 1}", "{(1, 3): 1}", r"expected 2 in 'held\[0\]\[0\]\[1\]' .*got 3"),
    ("{1, 2}", "{1, 3}", r"expected 2 in 'held\[2\]' .*got nothing"),
    ("Config(1)", "Config(2)", "1 in 'held.size' .*got 2"),
    ("Slotted(1)", "Slotted(2)", r"'held.__state__\[1\]\['size'\]"),
    (
        "torch.arange(3).numpy()",
        "torch.ones(3, dtype=int).numpy()",
        "in 'held.__state__",
    ),
    (
        "torch.ones(2)",
        "torch.zeros(2)",
        "expected the values in 'held' of member 1 .*, got others",
    ),
    (
        "torch.ones(2)",
        "torch.ones(2).double()",
        "expected dtype torch.float32 in 'held' .*, got dtype torch.float64",
    ),
    ("torch.float32", "torch.float64", "in 'held' of member 1"),
    ("F.relu", "F.gelu", "relu.* in 'held.* got .*gelu"),
    (
        "F.relu",
        "F.elu",
        "expected the code of 'relu' in 'held.__code__' .*, got the code of 'elu'",
    ),
    ("scaled(1)", "scaled(2)", r"expected 1 in 'held.__closure__\[0\]' .*, got 2"),
    (
        "with_default(1)",
        "with_default(2)",
        r"expected 1 in 'held.__defaults__\[0\]' .*, got 2",
    ),
    (
        LEAKY.format(0.1),
        LEAKY.format(0.2),
        r"expected 0.1 in 'held.*\['negative_slope'\]' .*, got 0.2",
    ),
    (
        "[nn.Dropout(0.1)]",
        "[nn.Dropout(0.2)]",
        r"expected 0.1 in 'held\[0\].p' .*, got 0.2",
    ),
    (
        "[copy.deepcopy(BODY)]",
        "[nn.Linear(2, 2)]",
        r"expected the values in 'held\[0\].weight' .*, got others",
    ),
    ("seeded(1)", "seeded(2)", "in 'held.__state__"),
    ("random.Random(1)", "random.Random(2)", "in 'held.__state__"),
]


def holding(text):
    return Holder(eval(text, globals() | SCOPE))


@pytest.mark.parametrize(("first", "other", "message"), ATTRIBUTES)
def test_attributes_that_differ_are_named(first, other, message):
    assert difference(holding(first), holding(first)) is None
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

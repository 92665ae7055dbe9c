"""Models that do not run the same code are refused, and the difference is named."""

import copy  # noqa: F401
import functools  # noqa: F401
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: F401
from torch.nn.utils import parametrizations, prune

from tests.ensemble.test_stacking import Tied, mlp, models  # noqa: F401
from tests.oracle import assert_exact
from vgrad import stack
from vgrad.ensemble import member


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
    ("m[0] = nn.Linear(3, 5)", r"\(4, 3\)", "0.weight.shape", r"\(5, 3\)"),
    ("m[3].bfloat16()", "torch.float32", "3.weight.dtype", "torch.bfloat16"),
    ("m[3].to('meta')", "cpu", "3.weight.device", "meta"),
    ("m[0].weight.requires_grad_(False)", "True", "0.weight.requires_grad", "False"),
    ("m[3] = nn.Linear(4, 2, bias=False)", ".*Parameter", "3.bias", "None"),
    ("m[0].new = nn.Parameter(torch.ones(1))", "nothing", "0.new", ".*Parameter"),
    ("buffer_instead(m[0])", ".*Parameter", "0.bias", ".*Tensor"),
    ("m[1].eval()", "True", "1.training", "False"),
    ("m.append(nn.ReLU())", "nothing", "4", ".*activation.ReLU"),
    ("m[2] = nn.Dropout1d(0.1)", ".*Dropout", "2", ".*Dropout1d"),
    ("m._modules = dict(reversed(m._modules.items()))", "'0' before '3'", None,
     "another order"),
    ("m[2].p = 0.5", "0.1", "2.p", "0.5"),
    ("m[1].scale = 2.0", "nothing", "1.scale", "2.0"),
    ("del m[2].inplace", "False", "2.inplace", "nothing"),
    ("m[2].inplace = 0", "False", "2.inplace", "0"),
    ("m[0].weight.tag = 3", "nothing", "0.weight.tag", "3"),
    ("hooked(m[3])", "nothing", r"3._forward_hooks\[0\]", ".*double"),
    ("parametrizations.orthogonal(m[0])", ".*Linear", "0", ".*ParametrizedLinear"),
    ("m[2].forward = F.relu", "nothing", "2.forward", ".*relu"),
]  # fmt: skip


def double(module, args, output):
    return output * 2


def hooked(module):
    module.register_forward_hook(double)
    return module


def buffer_instead(layer):
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)


@pytest.mark.parametrize(("change", "expected", "place", "got"), CHANGES)
def test_differences_are_named_with_their_member(change, expected, place, got):
    three = models()
    exec(change, globals(), {"m": three[2]})
    place = "" if place is None else f"'{place}' of "
    refused(three, f"expected {expected} in {place}member 2 as in member 0, got {got}")
    for each in three[:2]:
        exec(change, globals(), {"m": each})
    _, params, buffers = stack(three)
    assert {len(value) for value in (params | buffers).values()} == {3}


def twice(tied):
    first = nn.Linear(2, 2)
    return nn.Sequential(first, first if tied else nn.Linear(2, 2))


def pointing(at):
    model = Tied(tied=False)
    vars(model)["held"] = [getattr(model, at).weight]
    model.call = getattr(model, at).forward
    return model


def doubled(factor):
    def forward(self, x):
        return self.body(x) * factor

    model = Holder(None)
    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ("mlp()", "Tied()", ".*Sequential in member 1 as in member 0, got .*Ti"),
        ("Tied()", "Tied(False)", "the part at 'one' in 'two' of .* torch.Tensor"),
        ("Tied(False)", "Tied()", "torch.Tensor in 'two' of .* the part at 'one'"),
        ("twice(True)", "twice(False)", "the part at '0' in '1' of member 1"),
        ("pointing('a')", "pointing('b')", "'a' in 'call.__self__' .* 'b'"),
        ("doubled(2)", "doubled(3)", r"2 in 'forward.__func__.factor' of"),
    ],
)
def test_models_that_differ_as_a_whole_are_refused(first, other, message):
    first, again, other = (eval(text) for text in (first, first, other))
    stack([first, again])
    refused([first, other], message)


class Config:
    """A plain object, compared by what it holds."""

    def __init__(self, size):
        self.size = size
        self.me = self


def scaled(factor):
    return lambda x: x * factor


BODY = nn.Linear(2, 2)
LEAKY = "functools.partial(F.leaky_relu, negative_slope={})"
ATTRIBUTES = [  # of two models: what was expected where, and what was got
    ("1", "1.0", "", "1", "1.0"),
    ("None", "'a'", "", "None", "'a'"),
    ("float('nan')", "1.0", "", "nan", "1.0"),
    ("(1, 2)", "(1, 3)", r"\[1\]", "2", "3"),
    ("[1]", "[1, 2]", r"\[1\]", "nothing", "2"),
    ("{'a': 1}", "{'a': 2}", r"\['a'\]", "1", "2"),
    ("{(1, 2): 1}", "{(1, 3): 1}", r"\[\(1, 2\)\]", "1", "nothing"),
    ("{1, 2}", "{1, 3}", r"\[1\]", "2", "3"),
    ("Config(1)", "Config(2)", ".size", "1", "2"),
    ("torch.ones(2)", "torch.zeros(2)", ".data", "these values", "others"),
    ("torch.ones(2)", "torch.ones(2).half()", ".dtype", ".*32", ".*16"),
    ("torch.float32", "torch.float64", "", ".*", ".*"),
    ("F.relu", "F.gelu", "", ".*relu", ".*gelu"),
    ("lambda x: x + 1", "lambda x: x + 2", ".__code__", "this code", "other code"),
    ("scaled(1)", "scaled(2)", ".factor", "1", "2"),
    ("lambda x, n=1: x * n", "lambda x, n=2: x * n", r".__defaults__.*", "1", "2"),
    (LEAKY.format(0.1), LEAKY.format(0.2), r".*\['negative_slope'\]", "0.1", "0.2"),
    ("[nn.Dropout(0.1)]", "[nn.Dropout(0.2)]", r"\[0\].p", "0.1", "0.2"),
    (
        "[copy.deepcopy(BODY)]",
        "[nn.Linear(2, 2)]",
        ".*weight.data",
        "these values",
        "others",
    ),
]


@pytest.mark.parametrize(("first", "other", "place", "expected", "got"), ATTRIBUTES)
def test_attributes_that_differ_are_named(first, other, place, expected, got):
    first, again, other = (
        Holder(eval(text, globals())) for text in (first, first, other)
    )
    stack([first, again])
    message = f"expected {expected} in .held{place}. of member 1 .*, got {got}"
    refused([first, other], message)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        hooked,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
    ],
    ids=["hook", "weight", "spectral", "old weight", "old spectral", "pruned"],
)
def test_hooks_and_weights_computed_in_each_call_may_differ(wrap):
    torch.manual_seed(0)
    pair = [wrap(nn.Linear(3, 2)).eval() for _ in range(2)]
    fmodel, params, buffers = stack(pair)
    x = torch.randn(4, 3)
    for i, each in enumerate(pair):
        output = fmodel(member(params, i), member(buffers, i), x)
        assert_exact(output, each(x), 1e-6)

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


def changed(change, build=mlp):
    """Return three models of which the last one was changed."""
    three = models(3, build)
    result = change(three[2])
    return [*three[:2], result if isinstance(result, nn.Module) else three[2]]


def widened(model):
    model[0] = nn.Linear(3, 5)


def half(model):
    model[3].to(torch.bfloat16)


def to_meta(model):
    model[3].to("meta")


def frozen(model):
    model[0].weight.requires_grad_(False)


def without_bias(model):
    model[3] = nn.Linear(4, 2, bias=False)


def one_more(model):
    model[0].register_parameter("extra", nn.Parameter(torch.ones(1)))


def buffer_instead(model):
    bias = model[0].bias.detach()
    del model[0].bias
    model[0].register_buffer("bias", bias)


def not_persistent(model):
    model[1].register_buffer("running_mean", torch.zeros(4), persistent=False)


def evaluated(model):
    model[1].eval()


def longer(model):
    model.append(nn.ReLU())


def replaced(model):
    model[2] = nn.Dropout1d(0.1)


def reordered(model):
    model._modules = dict(reversed(model._modules.items()))


def more_dropout(model):
    model[2].p = 0.5


def other_eps(model):
    model[1].eps = 1e-3


def one_attribute_more(model):
    model[1].scale = 2.0


def one_attribute_less(model):
    del model[2].inplace


def int_for_bool(model):
    model[2].inplace = 0


def hooked(model):
    model[3].register_forward_hook(lambda module, args, output: output * 2)


def parametrized(model):
    parametrizations.orthogonal(model[0])


def method_replaced(model):
    model[2].forward = F.relu


DIFFERENCES = {
    widened: r"expected shape \(4, 3\) in '0.weight' of member 2 as in member 0, got",
    half: "expected dtype torch.float32 in '3.weight' of member 2 .* torch.bfloat16",
    to_meta: "expected device cpu in '3.weight' of member 2 .*, got device meta",
    frozen: "requires_grad=True in '0.weight' of member 2 .*, got requires_grad=False",
    without_bias: "expected a parameter in '3.bias' of member 2 .*, got none",
    one_more: "expected none in '0.extra' of member 2 .*, got a parameter",
    buffer_instead: "expected a parameter in '0.bias' of member 2 .*, got a buffer",
    not_persistent: "a buffer in '1.running_mean' of member 2 .* that is not pers",
    evaluated: "expected True in '1.training' of member 2 .*, got False",
    longer: r"expected none in '4' of member 2 .*, got a .*activation.ReLU",
    replaced: r"expected a .*Dropout in '2' of member 2 .*, got a .*Dropout1d",
    reordered: r"submodules in the order \['', '0', .* member 2 .*\['', '3', '2'",
    more_dropout: "expected 0.1 in '2.p' of member 2 as in member 0, got 0.5",
    other_eps: "expected 1e-05 in '1.eps' of member 2 as in member 0, got 0.001",
    one_attribute_more: "expected nothing in '1.scale' of member 2 .*, got 2.0",
    one_attribute_less: "expected False in '2.inplace' of member 2 .*, got nothing",
    int_for_bool: "expected False in '2.inplace' of member 2 .*, got 0",
    hooked: r"expected nothing in '3._forward_hooks\[0\]' of member 2 .*, got a tuple",
    parametrized: "expected a torch.*Linear in '0' .*, got a parametrized torch",
    method_replaced: "expected nothing in '2.forward' of member 2 .*, got relu",
}


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_what_differs_is_named_with_its_member(change):
    refused(changed(change), DIFFERENCES[change])


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_models_that_all_differ_in_the_same_way_are_alike(change):
    three = models()
    for each in three:
        change(each)
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
    def function(x, factor=factor):
        return x * factor

    return function


def seeded(seed):
    return torch.Generator().manual_seed(seed)


BODY = nn.Linear(2, 2)

ATTRIBUTES = {
    "number": (lambda: 3, lambda: 4, "expected 3 in 'held' of member 1 .*, got 4"),
    "kind of number": (lambda: 1, lambda: 1.0, "expected 1 in 'held' .*, got 1.0"),
    "none": (lambda: None, lambda: "a", "expected None in 'held' .*, got 'a'"),
    "tuple": (lambda: (1, 2), lambda: (1, 3), r"expected 2 in 'held\[1\]' .*got 3"),
    "list": (lambda: [1], lambda: [1, 2], r"nothing in 'held\[1\]' .*got 2"),
    "dictionary": (lambda: {"a": 1}, lambda: {"a": 2}, r"1 in 'held\['a'\]' .*got 2"),
    "order": (
        lambda: {"a": 1, "b": 1},
        lambda: {"b": 1, "a": 1},
        r"the order \['a', 'b'\] in 'held' .*got \['b', 'a'\]",
    ),
    "other keys": (
        lambda: {(1, 2): 1},
        lambda: {(1, 3): 1},
        r"expected 2 in 'held\[0\]\[0\]\[1\]' .*got 3",
    ),
    "set": (lambda: {1, 2}, lambda: {1, 3}, r"expected 2 in 'held\[2\]' .*got nothing"),
    "object": (lambda: Config(1), lambda: Config(2), "1 in 'held.size' .*got 2"),
    "slots": (
        lambda: Slotted(1),
        lambda: Slotted(2),
        r"'held.__state__\[1\]\['size'\]",
    ),
    "array": (
        lambda: torch.arange(3).numpy(),
        lambda: torch.ones(3, dtype=int).numpy(),
        "in 'held.__state__",
    ),
    "tensor": (
        lambda: torch.ones(2),
        lambda: torch.zeros(2),
        "expected the values in 'held' of member 1 .*, got others",
    ),
    "tensor's dtype": (
        lambda: torch.ones(2),
        lambda: torch.ones(2).double(),
        "expected dtype torch.float32 in 'held' .*, got dtype torch.float64",
    ),
    "torch's names": (
        lambda: torch.float32,
        lambda: torch.float64,
        "in 'held' of member 1",
    ),
    "function": (lambda: F.relu, lambda: F.gelu, "relu.* in 'held.* got .*gelu"),
    "functions": (
        lambda: F.relu,
        lambda: F.elu,
        "expected the code of 'relu' in 'held.__code__' .*, got the code of 'elu'",
    ),
    "closure": (
        lambda: scaled(1),
        lambda: scaled(2),
        r"expected 1 in 'held.__closure__\[0\]' .*, got 2",
    ),
    "default": (
        lambda: with_default(1),
        lambda: with_default(2),
        r"expected 1 in 'held.__defaults__\[0\]' .*, got 2",
    ),
    "partial": (
        lambda: functools.partial(F.leaky_relu, negative_slope=0.1),
        lambda: functools.partial(F.leaky_relu, negative_slope=0.2),
        r"expected 0.1 in 'held.*\['negative_slope'\]' .*, got 0.2",
    ),
    "module out of sight": (
        lambda: [nn.Dropout(0.1)],
        lambda: [nn.Dropout(0.2)],
        r"expected 0.1 in 'held\[0\].p' .*, got 0.2",
    ),
    "weights out of sight": (
        lambda: [copy.deepcopy(BODY)],
        lambda: [nn.Linear(2, 2)],
        r"expected the values in 'held\[0\].weight' .*, got others",
    ),
    "generator": (lambda: seeded(1), lambda: seeded(2), "in 'held.__state__"),
    "random": (
        lambda: random.Random(1),
        lambda: random.Random(2),
        "in 'held.__state__",
    ),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_that_differ_are_named(kind):
    first, other, message = ATTRIBUTES[kind]
    refused([Holder(first()), Holder(other())], message)


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_built_twice_from_the_same_are_alike(kind):
    first, _, _ = ATTRIBUTES[kind]
    assert difference(Holder(first()), Holder(first())) is None


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

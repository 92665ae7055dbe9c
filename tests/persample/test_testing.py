"""A rule of one's own: registered with checks, and checked against plain autograd."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import (
    handle_torch_function,
    has_torch_function,
    wrap_torch_function,
)

import vgrad
from tests import losses, oracle
from vgrad import explain
from vgrad.ops import OPS, Dense, Norm, Outer, positions, rule
from vgrad.testing import check_rule

B = 4


@pytest.fixture(autouse=True)
def table():
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def product_forward(ctx, x, weight):
    ctx.save_for_backward(x, weight)
    return x @ weight.T


def product_backward(ctx, g):
    x, weight = ctx.saved_tensors
    return g @ weight, g.flatten(0, -2).T @ x.flatten(0, -2)


Product = losses.old_function(product_forward, product_backward)


def product(x, weight):
    if has_torch_function((x, weight)):
        return handle_torch_function(product, (x, weight), x, weight)
    return Product.apply(x, weight)


def right(x, weight):
    shape = weight.shape
    return {"weight": lambda g: Outer(positions(x), positions(g), shape)}


def loss(params, buffers, x):
    hidden = torch.tanh(F.linear(x, params["0.first"]))
    return product(hidden, params["1.weight"]).square().sum()


def values():
    params = {"0.first": torch.randn(5, 6), "1.weight": torch.randn(3, 5)}
    return params, {}, torch.randn(B, 2, 6)


def register(factors=right, **options):
    return rule(product, weights=("weight",), **options)(factors)


def test_a_right_rule_passes_and_changes_nothing_it_is_given():
    register()
    params, buffers, x = values()
    before = {name: value.clone() for name, value in params.items()}
    check_rule(loss, params, buffers, x)
    oracle.assert_exact(params, before, 0)
    assert all(not value.requires_grad for value in params.values())


def test_a_rule_runs_ops_that_no_transform_can():
    params, buffers, x = values()
    norms = vgrad.per_sample_norm(loss, strategy="recorded")
    with pytest.raises(vgrad.UnsupportedOp):
        norms(params, buffers, x)
    register()
    expected = vgrad.per_sample_norm(loss, strategy="loop")(params, buffers, x)
    torch.testing.assert_close(norms(params, buffers, x), expected)
    rows = explain(norms)(params, buffers, x).rows
    assert [row.op for row in rows] == ["linear", "product"]


class NormTwice(Dense):
    def with_norms(self):
        norms = 2 * super().with_norms()[1][0].value
        return self, [Norm(norms, (norms,), norms)]


class SumTwice(Dense):
    def weighted(self, weights):
        return 2 * super().weighted(weights)


class UpperTwice(Dense):
    def with_norms(self):
        (norm,) = super().with_norms()[1]
        return self, [norm._replace(upper=2 * norm.upper)]


def gradients(a, b):
    return (b.mT @ a)[:, 0]


GRADIENTS = "gradients of '1.weight' as plain autograd"
SHAPE = r"gradients of '1.weight' in the shape \(4, 3, 5\), got \(4, 3, 4\)"
WRONG = {
    "a factor too many": (lambda a, b, s: Outer(2 * a, b, s), GRADIENTS),
    "a position alone": (lambda a, b, s: Outer(a[:, :, :1], b[:, :, :1], s), GRADIENTS),
    "another sample": (lambda a, b, s: Outer(a.roll(1, 0), b, s), GRADIENTS),
    "another shape": (lambda a, b, s: Dense(gradients(a, b)[:, :, 1:]), SHAPE),
    "not a number": (
        lambda a, b, s: Outer(math.nan * a, b, s),
        "gradients of '1.weight' .* error of nan",
    ),
    "norms": (lambda a, b, s: NormTwice(gradients(a, b)), "norms of '1.weight'"),
    "sums": (lambda a, b, s: SumTwice(gradients(a, b)), "weighted sum of '1.weight'"),
    "bounds": (
        lambda a, b, s: UpperTwice(gradients(a, b)),
        "sum with clipping='flat' of '0.first'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_fails_by_name(name):
    make, message = WRONG[name]

    @register
    def wrong(x, weight):
        shape = weight.shape
        return {"weight": lambda g: make(positions(x), positions(g), shape)}

    with pytest.raises(AssertionError, match=message):
        check_rule(loss, *values())


def test_wrong_runs_and_rounding_fail():
    register(run=lambda x, weight: product(x.detach() + 2 * (x - x.detach()), weight))
    with pytest.raises(AssertionError, match="gradients of '0.first'"):
        check_rule(loss, *values())

    def linear(params, buffers, x):  # whose gradients do not depend on the output
        return product(x, params["w"]).sum()

    register(run=lambda x, weight: product(x, weight) + 1, replace=True)
    with pytest.raises(AssertionError, match="losses as plain autograd"):
        check_rule(linear, {"w": torch.randn(3, 6)}, {}, torch.randn(B, 2, 6))
    register(lambda x, weight: right((1 + 1e-6) * x, weight), replace=True)
    check_rule(loss, *values(), tolerance=1e-5)
    with pytest.raises(AssertionError, match=r"1\.0e-06, more than 1e-10"):
        check_rule(loss, *values())


def test_an_expansion_passes_only_if_it_is_meant():
    def scaled(params, buffers, x):
        return (F.linear(x, params["w"]) * params["scale"]).sin().sum()

    def batched(params, buffers, x):  # a call that the rule does not fit
        return F.linear(params["w"], x).sin().sum()

    given = {"w": torch.randn(3, 5), "scale": torch.randn(3)}, {}, torch.randn(B, 5)
    with pytest.raises(AssertionError, match="none fits the use of 'scale' by mul"):
        check_rule(scaled, *given)
    check_rule(scaled, *given, expanded=True)
    with pytest.raises(AssertionError, match="none fits the use of 'w' by linear"):
        check_rule(batched, {"w": torch.randn(2, 5)}, {}, torch.randn(B, 3, 5))


def test_a_rule_is_not_asked_about_an_argument_that_it_cannot_know():
    @wrap_torch_function(lambda x, weight, times=3.0: (x, weight))
    def scaled(x, weight, times=3.0):
        return x * weight * (1.0 if times is None else times)

    @rule(scaled, weights=("weight",))
    def scaled_rule(x, weight, times):
        return {"weight": lambda g: Dense(g * x if times is None else g * x * times)}

    def used(params, buffers, x, *times):
        return scaled(x, params["w"], *times).sum()

    params, x = {"w": torch.ones(3)}, torch.randn(B, 3)
    found = vgrad.per_sample_grad(used)(params, {}, x)["w"]
    torch.testing.assert_close(found, 3 * x)
    with pytest.raises(AssertionError, match="none fits the use of 'w' by scaled"):
        check_rule(used, params, {}, x)
    check_rule(lambda *given: used(*given, 2.0), params, {}, x)


@pytest.mark.parametrize("name", ["mlp", "tied", "padding_idx", "two_calls_and_unused"])
def test_whole_models_pass_with_their_buffers_and_any_tree_as_batch(name):
    case = losses.CASES[name]
    fmodel, params, buffers = vgrad.make_functional_with_buffers(case.model())
    check_rule(
        vgrad.sample_loss(fmodel, case.criterion), params, buffers, *case.batch(3)
    )


def test_a_batch_that_says_little_is_refused():
    register()
    params, buffers, x = values()
    with pytest.raises(ValueError, match="at least two samples"):
        check_rule(loss, params, buffers, x[:1])
    with pytest.raises(ValueError, match="got only zeros from plain autograd"):
        check_rule(loss, params, buffers, torch.zeros_like(x))
    with pytest.raises(ValueError, match="got infinity or NaN from plain autograd"):
        check_rule(loss, params, buffers, torch.full_like(x, math.nan))


def test_a_rule_that_leaves_a_weight_out_is_named():
    @wrap_torch_function(lambda x, weight, bias: (x, weight, bias))
    def affine(x, weight, bias):
        return x * weight + bias

    rule(affine, weights=("weight", "bias"))(
        lambda x, weight, bias: {"weight": lambda g: Dense(g * x)}
    )
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    compute = vgrad.per_sample_grad(
        lambda p, b, x: affine(x, p["w"], p["b"]).sum(), strategy="recorded"
    )
    with pytest.raises(TypeError, match=r"rule\(affine\).*none for 'bias'"):
        compute(params, {}, torch.ones(3, 2))


def new(x, weight):
    return product(x, weight)


def stars(weight, *rest):
    return None


def unplaced(x, *, weight):
    return None


NAMES = ("weight",)
REFUSED = [  # ops, weights and a rule, with the error
    ((product,), NAMES, right, ValueError, r"rule\(product\).* replace=True"),
    ((F.linear,), NAMES, right, ValueError, r"linear\): expected an op without"),
    ((new, F.linear), NAMES, right, ValueError, "replace=True"),
    ((new,), "weight", right, TypeError, r"\(weights='weight'\): expected a tuple"),
    ((new,), ("weight", "bias"), right, ValueError, "names .* 'weight', 'x', got bias"),
    ((new,), (), right, ValueError, r"weights=\(\).* got none"),
    ((new,), NAMES, stars, TypeError, r"got \*rest. Name each"),
    ((new,), NAMES, unplaced, TypeError, r"weight. Name each, and pass run="),
    ((), NAMES, right, TypeError, "expected at least one op"),
    (("linear",), NAMES, right, TypeError, r"'linear'\): .* function .* got a str"),
    (
        (nn.Linear(1, 1),),
        NAMES,
        right,
        TypeError,
        "a Linear. A module's op is the func",
    ),
    ((nn.Linear,), NAMES, right, TypeError, "got a type"),
    ((Product.apply,), NAMES, right, TypeError, r"apply\).* got a method of an"),
]


@pytest.mark.parametrize(("ops", "weights", "factors", "error", "message"), REFUSED)
def test_a_rule_that_cannot_work_is_refused(ops, weights, factors, error, message):
    register()
    before = dict(OPS)
    with pytest.raises(error, match=message):
        rule(*ops, weights=weights)(factors)
    assert before == OPS


def test_a_rule_may_be_replaced_shared_and_have_another_order_of_arguments():
    assert rule(product, new, weights=NAMES)(right) is right
    replaced = register(lambda x, weight: None, replace=True)
    assert OPS[product].rule.factors is replaced
    register(unplaced, run=product, replace=True)

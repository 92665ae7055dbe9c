"""autograd.Functions that vmap cannot run: sample by sample, they alone."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import assert_gradients, old_function, randn, written

ALONE = r"vmap cannot run {}\.apply, which runs sample by sample at .*\.py:\d+;"
quiet = pytest.mark.filterwarnings("ignore:.*vmap cannot run:vgrad.FallbackWarning")


def saving(function):
    def forward(ctx, x, *others):
        ctx.save_for_backward(x)
        return function(x, *others)

    return forward


def squared(ctx, grad):
    """Not the derivative: whatever leaves it out has other numbers."""
    return 3 * ctx.saved_tensors[0] * grad


square = old_function(saving(torch.square), squared).apply  # before any is watched


class Linear(Function):
    """Several inputs and outputs, and what is no tensor among both."""

    @staticmethod
    def forward(ctx, x, weight, bias, options, scale=2.0):
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.with_bias = scale, bias is not None
        y = scale * x @ weight.t()
        y = y + bias if bias is not None else y
        signs, unused = y.sign(), y * 2
        ctx.mark_non_differentiable(signs)
        ctx.set_materialize_grads(False)
        return y, signs, y.argmax(-1), 3, None, unused

    @staticmethod
    def backward(ctx, grad, *others):
        assert all(each is None for each in others)  # what nobody uses is not made up
        x, weight = ctx.saved_tensors
        bias = grad if ctx.with_bias else None
        of_weight = torch.outer(grad, x) if ctx.needs_input_grad[1] else None
        return ctx.scale * grad @ weight, ctx.scale * of_weight, bias, None, None


def masked(ctx, grad):
    grad = grad.clone()
    grad[ctx.saved_tensors[0].abs() > 1] = 0
    return grad


Sparing = old_function(  # reads values, and writes into its gradient by a mask
    saving(lambda x: x.sign() if x.sum() > 0 else x.round()), masked
)


class Unmapped(Function):
    """In the new style, without a vmap rule; by numpy."""

    @staticmethod
    def forward(x, y):
        return torch.from_numpy(x.detach().numpy() * y.detach().numpy())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return 2 * y * grad, x * grad


class Generated(Unmapped):
    generate_vmap_rule = True


class Shared(Unmapped):
    """Its own rule takes for granted that all samples share the second argument."""

    @staticmethod
    def vmap(info, in_dims, x, y):
        assert in_dims[1] is None
        return Shared.apply(x, y), in_dims[0]


Reversed = old_function(lambda ctx, x: x.view_as(x), lambda ctx, grad: -grad)


def positive(ctx, x, y):
    ctx.positive = bool(x.sum() > 0)
    return x + y


Partly = old_function(  # has a gradient for some samples only
    positive, lambda ctx, grad: ((grad if ctx.positive else None), grad)
)

LAYER = """
y, signs, which, three, nothing, _ = Linear.apply(x, w, b, ["o"])
assert (three, nothing, signs.requires_grad) == (3, None, False)
value = (three * y * signs).sum() + y.gather(0, which[None]).sin().sum()"""
CONSTANTS = """
with torch.no_grad(): target = square(F.linear(x, w))
value = (F.linear(square(x), w, b) - target).square().sum()"""
ACTIVATION = "square(F.linear(x, w, b)).sin().sum()"
LOSSES = [
    LAYER,
    CONSTANTS,
    ACTIVATION,
    "F.linear(x, square(w), square(square(b[1:2]))).sin().sum()",
    "square(b * square(F.linear(square(x), w))).sum()",
    "F.linear(x, Sparing.apply(w), b).sin().sum()",
    "(b * Sparing.apply(F.linear(x, w))).sum()",
    "F.linear(Reversed.apply(x * w[0]), Reversed.apply(w)).sin().sum()",
    "Partly.apply(F.linear(x, w), b).sin().sum()",
    "Linear.apply(x, w, None, [b, x])[0].tanh().sum()",
    "(square(shift) * F.linear(x, w)).sum()",
    "(Unmapped.apply(b, shift) * F.linear(x, w)).sum()",
    "square(x[:, None] * w.t()).sin().sum()",
]
for kind in ("Unmapped", "Generated", "Shared"):
    LOSSES.append(f"{kind}.apply(F.linear(x, w), b).sin().sum()")
    LOSSES.append(f"{kind}.apply(b * x.sum(), b.sin()).sin().sum()")


def given():
    params = {"w": randn(4, 3, seed=1), "b": randn(4, seed=2)}
    return params, {"shift": randn(4, seed=3)}, randn(5, 3, seed=4)


@quiet
@pytest.mark.parametrize("text", LOSSES)
def test_every_quantity_is_that_of_plain_autograd(text):
    params, buffers, x = given()
    options = {"buffers": buffers, "tolerance": 1e-12, "strategy": "recorded"}
    losses.assert_quantities(written(text, globals()), params, (x,), **options)


def shared(p, b, x):
    return Shared.apply(F.linear(x, p["w"]), p["b"]).sum()


def layer(p, b, x):
    return Linear.apply(x, p["w"], p["b"], ["o"])[0].sum()


@pytest.mark.parametrize(("loss", "function"), [(layer, "Linear"), (shared, "Shared")])
def test_one_warning_names_the_function_and_the_line_and_the_rest_is_recorded(
    loss, function
):
    params, buffers, x = given()
    line = loss.__code__.co_firstlineno + 1
    compute = vgrad.clipped_grad(loss, max_norm=1.0, chunk_size=2)
    with pytest.warns(vgrad.FallbackWarning, match=ALONE.format(function)) as caught:
        _ = [compute(params, buffers, x) for _ in range(2)]
    assert [each.filename for each in caught] == [__file__]
    assert f"{__file__}:{line};" in str(caught[0].message)
    with pytest.warns(vgrad.FallbackWarning, match=function):
        told = vgrad.explain(compute)(params, buffers, x)
    assert told.strategy == "recorded"
    assert function in {row.op for row in told.rows}


class NoisyBackward(losses.Noisy):
    generate_vmap_rule = False


def marks_dirty(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(2)


def same(ctx, x, mask):
    ctx.mark_non_differentiable(mask)
    return x * mask, mask


def scattered(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.zeros_like(x).masked_scatter(x > 0, grad)


Written = old_function(marks_dirty, lambda ctx, grad: 2 * grad)
Ragged = old_function(saving(lambda x: x[x > 0]), scattered)
Counted = old_function(
    lambda ctx, x: (x * 2, int((x > 0).sum())), lambda ctx, grad, _: 2 * grad
)
Same = old_function(same, lambda ctx, grad, _: (grad, None))


class Captured(Function):
    """Runs a function again in the backward pass, with parameters that it captures."""

    @staticmethod
    def forward(ctx, x, function, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ends = [x, *weights]
            output = ctx.function(x)
        found = torch.autograd.grad(output, ends, grad, allow_unused=True)
        return found[0], None, *found[1:]


RANDOM = "(losses.Unruled.apply(x) * w[0]).sum()"
REFUSED = {
    RANDOM: "no random numbers",
    "NoisyBackward.apply(x * w[0]).sum()": "no random numbers",
    "Written.apply(x * w[0]).sum()": "one written in",
    "Ragged.apply(x * w[0]).sum()": "of one shape",
    "y, n = Counted.apply(x * w[0]); value = n * y.sum()": "values that all",
    "y, kept = Same.apply(x * w[0], x); value = (y * kept).sum()": "memory of their",
    "Captured.apply(x, lambda y: (y * w[0]).sum(), w)": "a captured one",
    "h = x * w[1]; value = Captured.apply(w[0], lambda w: (w * h).sum())": "a captured",
    "torch.vmap(lambda y: Unmapped.apply(y, b[0]))(x * w[0]).sum()": "no transform of",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_add_up_is_refused_and_left_to_the_loop(text):
    loss, message = written(text, globals()), REFUSED[text]
    params, _, x = given()
    options = {"randomness": "different"} if "random" in message else {}
    before = torch.get_rng_state()
    for strategy, why in (("recorded", message), ("vmap", "a recorded pass")):
        compute = vgrad.per_sample_grad(loss, strategy=strategy, **options)
        with pytest.raises(vgrad.UnsupportedOp, match=rf"apply: .*{why}.*loop"):
            compute(params, {}, x)
        assert torch.equal(torch.get_rng_state(), before)
    if "vmap" in text:
        return
    expected = oracle.loss_gradients(loss, params, {}, (x,))
    torch.set_rng_state(before)
    with pytest.warns(vgrad.FallbackWarning, match=f"one sample after.*{message}"):
        assert_gradients(loss, params, (x,), expected=expected, **options)


def runs(ctx, x, function):
    ctx.save_for_backward(x)
    ctx.function = function
    return function(x)


def runs_again(ctx, grad):
    """Run a backward pass inside, which adds to `.grad`."""
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        torch.autograd.backward(ctx.function(x), grad)
    return x.grad, None


Reversible = old_function(runs, runs_again)


def reversible(p, b, x):
    return Reversible.apply(x * p["w"][0], lambda y: (F.linear(y, p["w"])).sin()).sum()


@pytest.mark.filterwarnings("ignore:.*a captured one:vgrad.FallbackWarning")
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_a_backward_pass_inside_of_another_counts(strategy):
    def plain(p, b, x):
        return F.linear(x * p["w"][0], p["w"]).sin().sum()

    params, _, x = given()
    params = {"w": params["w"]}
    expected = oracle.loss_gradients(plain, params, {}, (x,))
    options = {"expected": expected, "tolerance": 1e-12, "strategy": strategy}
    assert_gradients(reversible, params, (x,), **options)
    params["w"].requires_grad_()
    with torch.no_grad():
        assert_gradients(reversible, params, (x,), **options)
    assert params["w"].grad is None
    with pytest.raises(vgrad.UnsupportedOp, match=r"torch\.no_grad\(\)"):
        vgrad.per_sample_grad(reversible, strategy=strategy)(params, {}, x)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_layers_that_run_again_in_a_backward_pass_say_what_they_lack(strategy):
    def forward(self, x):
        self.scale = 2.0
        again = lambda x: self.layer(x) * self.scale  # noqa: E731
        return Reversible.apply(x * self.layer.weight[0], again)

    model = losses.Net(forward, layer=nn.Linear(3, 3), scale=None)
    loss, params, buffers = losses.of_model(model, F.mse_loss)
    x = randn(5, 3)
    with pytest.raises(Exception, match="outside of its call|NoneType") as caught:
        vgrad.per_sample_grad(loss, strategy=strategy)(params, buffers, x, x)
    assert "nothing but its context" in caught.value.__notes__[0]


class Spoiling(Unmapped):
    @staticmethod
    def vmap(info, in_dims, x, y):
        x.mul_(2)
        raise ValueError("spoiled")


@pytest.mark.parametrize(
    ("text", "strategy", "error", "message"),
    [
        (RANDOM, "auto", RuntimeError, 'randomness="error"'),
        (ACTIVATION, "vmap", vgrad.UnsupportedOp, "a recorded pass, and no transform"),
        # No calls follow a rule that has written.
        ("Spoiling.apply(x * w[0], x).sum()", "recorded", ValueError, "spoiled"),
    ],
)
def test_what_functions_cannot_do_is_refused(text, strategy, error, message):
    params, _, x = given()
    params["w"].requires_grad_()
    with pytest.raises(error, match=message):
        vgrad.per_sample_grad(written(text, globals()), strategy=strategy)(
            params, {}, x
        )


def product_forward(ctx, x, w):
    ctx.save_for_backward(x, w)
    return x @ w


def product_backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad.to(w.dtype) @ w.t(), x.t() @ grad.to(x.dtype)


Product = old_function(product_forward, product_backward)


class Ruled(Function):
    generate_vmap_rule = True
    backward = staticmethod(product_backward)

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


@quiet
@pytest.mark.parametrize(
    ("function", "strategy"),
    [(Product, "recorded"), (Ruled, "recorded"), (Ruled, "vmap")],
)
def test_autocast_reaches_the_insides_of_a_function(function, strategy):
    seen = []

    def loss(p, b, x):
        y = function.apply(x[None], p["w"])
        seen.append(y.dtype)
        return y.float().square().sum()

    params, x = {"w": randn(3, 2).float()}, randn(4, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (
            vgrad.per_sample_grad(loss, strategy=each)(params, {}, x)
            for each in (strategy, "loop")
        )
    assert {*seen} == {torch.bfloat16}
    oracle.assert_exact(found, expected, 0)


def test_torch_is_left_as_it_is_for_other_threads_and_after_errors():
    def check():
        with pytest.raises(RuntimeError, match="must override the setup_context"):
            torch.vmap(square)(torch.ones(2))

    def loss(p, b, x):
        with ThreadPoolExecutor() as pool:
            pool.submit(check).result()
        raise KeyError(square(x * p["w"][0]).sum())

    params, _, x = given()
    with pytest.raises(KeyError), warnings.catch_warnings():
        vgrad.per_sample_grad(loss, strategy="recorded")(params, {}, x)
    check()

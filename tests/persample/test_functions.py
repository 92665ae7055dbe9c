"""autograd.Functions that vmap cannot run: sample by sample, they alone."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import assert_gradients, new_function, old_function, randn, written
from tests.persample.test_losses import (
    ACTIVATION,
    Linear,
    Shared,
    Unmapped,  # noqa: F401, in texts
    by_numpy,
    of_both,
    square,
)

ALONE = r"vmap cannot run {}\.apply, which runs sample by sample at .*\.py:\d+;"


def given():
    params = {"w": randn(4, 3, seed=1), "b": randn(4, seed=2)}
    return params, {"shift": randn(4, seed=3)}, randn(5, 3, seed=4)


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


RANDOM = "(losses.Unruled.apply(x) * w[0]).sum()"
DRAWING = [RANDOM, "losses.NoisyAndUnruled.apply(x * w[0]).sum()"]
INSIDE = "torch.vmap(lambda y: Unmapped.apply(y, b[0]))(x * w[0]).sum()"


@pytest.mark.parametrize("text", [*DRAWING, INSIDE])
def test_what_does_not_add_up_is_refused_and_left_to_the_loop(text):
    loss, (params, _, x) = written(text, globals()), given()
    message = "no transform of" if text == INSIDE else "no random numbers"
    options = {} if text == INSIDE else {"randomness": "different"}
    before = torch.get_rng_state()
    for strategy, why in (("recorded", message), ("vmap", "a recorded pass")):
        compute = vgrad.per_sample_grad(loss, strategy=strategy, **options)
        with pytest.raises(vgrad.UnsupportedOp, match=rf"apply: .*{why}.*loop"):
            compute(params, {}, x)
        assert torch.equal(torch.get_rng_state(), before)
    if text == INSIDE:
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


def spoils(info, in_dims, x, y):
    x.mul_(2)
    raise ValueError("spoiled")


Spoiling = new_function("Spoiling", by_numpy, of_both, vmap=spoils)


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


def multiplies(ctx, x, w):
    ctx.save_for_backward(x, w)
    return x @ w


def of_matrices(ctx, grad):
    x, w = ctx.saved_tensors
    return grad.to(w.dtype) @ w.t(), x.t() @ grad.to(x.dtype)


Product = old_function(multiplies, of_matrices)
Ruled = new_function("Ruled", torch.matmul, of_matrices, generate_vmap_rule=True)


@pytest.mark.filterwarnings("ignore:.*vmap cannot run:vgrad.FallbackWarning")
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


class Gate(torch.autograd.Function):
    """A rectifier that returns no gradient if no unit is active."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (active,) = ctx.saved_tensors
        return g * active if active.any() else None


@pytest.mark.parametrize("strategy", ["auto", "recorded"])
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_a_backward_pass_that_stops_at_some_samples_is_not_recorded(strategy):
    """The hook would get zeros, and return NaN."""

    def loss(p, b, x):
        hidden = F.linear(x, p["w"], p["b"]) * 1
        hidden.register_hook(lambda g: None if g is None else g / g.norm())
        return Gate.apply(hidden).sum() + p["b"].square().sum()

    params, _, x = given()
    params, x = {"w": params["w"].abs(), "b": params["b"].abs() / 10}, x.abs()
    for rows in (x, torch.cat([x, -9 * x])):
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        if strategy == "recorded" and len(rows) > len(x):
            with pytest.raises(vgrad.UnsupportedOp, match="got None for some"):
                compute(params, {}, rows)
            continue
        expected = oracle.loss_gradients(loss, params, {}, (rows,), len(rows))
        oracle.assert_exact(compute(params, {}, rows), expected)

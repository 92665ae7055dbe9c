"""autograd.Functions that vmap cannot run: sample by sample, they alone."""

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import assert_gradients, randn

ALONE = r"vmap cannot run {}\.apply, which runs sample by sample at .*\.py:\d+;"
every_strategy = pytest.mark.parametrize("strategy", ["recorded", "vmap"])
quiet = pytest.mark.filterwarnings("ignore:.*vmap cannot run:vgrad.FallbackWarning")


def old(name, forward, backward):
    """Make a function in the old style, which no transform of torch.func runs."""
    methods = {"forward": forward, "backward": backward}
    methods = {key: staticmethod(each) for key, each in methods.items()}
    return type(name, (Function,), methods)


def saving(function):
    """Save the first argument."""

    def forward(ctx, x, *others):
        ctx.save_for_backward(x)
        return function(x, *others)

    return forward


Square = old(
    "Square",
    saving(torch.square),
    # Not the derivative: whatever leaves it out has other numbers.
    lambda ctx, grad: 3 * ctx.saved_tensors[0] * grad,
)
square = Square.apply  # before anything is watched


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


Sparing = old(  # reads values, and writes into its gradient by a mask
    "Sparing", saving(lambda x: x.sign() if x.sum() > 0 else x.round()), masked
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
    """Its generated rule stops at numpy."""

    generate_vmap_rule = True


class Shared(Unmapped):
    """Its own rule takes for granted that all samples share the second argument."""

    @staticmethod
    def vmap(info, in_dims, x, y):
        assert in_dims[1] is None
        return Shared.apply(x, y), in_dims[0]


Reversed = old(  # a view of its argument
    "Reversed", lambda ctx, x: x.view_as(x), lambda ctx, grad: -grad
)


class Partly(Function):
    """Has a gradient for some samples only."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.positive = bool(x.sum() > 0)
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return (grad if ctx.positive else None), grad


def layer(p, b, x):
    y, signs, which, three, nothing, _ = Linear.apply(x, p["w"], p["b"], ["o"])
    assert (three, nothing, signs.requires_grad) == (3, None, False)
    return (three * y * signs).sum() + y.gather(0, which[None]).sin().sum()


def tensors_in_lists(p, b, x):
    return Linear.apply(x, p["w"], None, [p["b"], x])[0].tanh().sum()


def constants(p, b, x):
    with torch.no_grad():
        target = square(F.linear(x, p["w"]))
    return (F.linear(square(x), p["w"], p["b"]) - target).square().sum()


LOSSES = {
    "an activation": lambda p, b, x: square(F.linear(x, p["w"], p["b"])).sin().sum(),
    "a layer": layer,
    "a parameter alone": lambda p, b, x: (
        F.linear(x, square(p["w"]), square(square(p["b"][1:2]))).sin().sum()
    ),
    "used often": lambda p, b, x: square(
        p["b"] * square(F.linear(square(x), p["w"]))
    ).sum(),
    "values, of parameters": lambda p, b, x: (
        F.linear(x, Sparing.apply(p["w"]), p["b"]).sin().sum()
    ),
    "values, of samples": lambda p, b, x: (
        p["b"] * Sparing.apply(F.linear(x, p["w"]))
    ).sum(),
    "a reversed gradient": lambda p, b, x: (
        F.linear(Reversed.apply(x * p["w"][0]), Reversed.apply(p["w"])).sin().sum()
    ),
    "some gradients": lambda p, b, x: (
        Partly.apply(F.linear(x, p["w"]), p["b"]).sin().sum()
    ),
    "lists": tensors_in_lists,
    "constants": constants,
    "buffers": lambda p, b, x: (square(b["shift"]) * F.linear(x, p["w"])).sum(),
    "a buffer and a parameter": lambda p, b, x: (
        Unmapped.apply(p["b"], b["shift"]) * F.linear(x, p["w"])
    ).sum(),
    "a batch axis behind": lambda p, b, x: square(x[:, None] * p["w"].t()).sin().sum(),
    **{
        f"{kind.__name__}, {what}": loss
        for kind in (Unmapped, Generated, Shared)
        for what, loss in {
            "two": lambda p, b, x, kind=kind: (
                kind.apply(F.linear(x, p["w"]), p["b"]).sin().sum()
            ),
            "one": lambda p, b, x, kind=kind: (
                kind.apply(p["b"] * x.sum(), p["b"].sin()).sin().sum()
            ),
        }.items()
    },
}


def given():
    params = {"w": randn(4, 3, seed=1), "b": randn(4, seed=2)}
    return params, {"shift": randn(4, seed=3)}, randn(5, 3, seed=4)


@quiet
@every_strategy
@pytest.mark.parametrize("name", LOSSES)
def test_every_quantity_is_that_of_plain_autograd(name, strategy):
    params, buffers, x = given()
    options = {"buffers": buffers, "tolerance": 1e-12, "strategy": strategy}
    losses.assert_quantities(LOSSES[name], params, (x,), **options)


@pytest.mark.parametrize("name", ["a layer", "Shared, two"])
def test_one_warning_names_the_function_and_the_line_and_the_rest_is_recorded(name):
    params, buffers, x = given()
    loss = LOSSES[name]
    function = "Linear" if name == "a layer" else "Shared"
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


def test_each_sample_has_a_call_and_a_context_of_its_own():
    seen = []

    class Noting(Function):
        @staticmethod
        def forward(ctx, x, weight):
            seen.append((x.clone(), type(x), x.requires_grad, ctx.needs_input_grad))
            ctx.row, ctx.weight = x, weight
            return (x * weight).sum()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.row.clone())
            return None, grad * ctx.row

    params, _, x = given()
    compute = vgrad.per_sample_grad(lambda p, b, x: Noting.apply(x, p["w"][0]))
    with pytest.warns(vgrad.FallbackWarning, match="Noting"):
        found = compute({"w": params["w"]}, {}, x)["w"]
    oracle.assert_exact(found[:, 0], x, 1e-12)
    forward, backward = seen[: len(x)], seen[len(x) :]
    for (row, *facts), expected in zip(forward, x, strict=True):
        assert torch.equal(row, expected)
        assert facts == [Tensor, False, (False, True)]
    assert len(backward) == len(x)
    assert {*map(tuple, torch.stack(backward).tolist())} == {*map(tuple, x.tolist())}


def with_noise(p, b, x):
    return (losses.Unruled.apply(x) * p["w"][0]).sum()


class NoisyBackward(losses.Noisy):
    generate_vmap_rule = False


def with_noise_in_the_backward_pass(p, b, x):
    return NoisyBackward.apply(x * p["w"][0]).sum()


def marks_dirty(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(2)


def same(ctx, x, mask):
    ctx.mark_non_differentiable(mask)
    return x * mask, mask


def scattered(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.zeros_like(x).masked_scatter(x > 0, grad)


Written = old("Written", marks_dirty, lambda ctx, grad: 2 * grad)
Ragged = old("Ragged", saving(lambda x: x[x > 0]), scattered)
Counted = old(
    "Counted",
    lambda ctx, x: (x * 2, int((x > 0).sum())),
    lambda ctx, grad, _: 2 * grad,
)
Same = old("Same", same, lambda ctx, grad, _: (grad, None))


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


def shares_memory(p, b, x):
    y, kept = Same.apply(x * p["w"][0], x)
    return (y * kept).sum()


REFUSED = {
    "random numbers": (with_noise, "no random numbers"),
    "random numbers, backward": (with_noise_in_the_backward_pass, "no random numbers"),
    "writes": (lambda p, b, x: Written.apply(x * p["w"][0]).sum(), "one written in"),
    "ragged": (lambda p, b, x: Ragged.apply(x * p["w"][0]).sum(), "of one shape"),
    "other values": (
        lambda p, b, x: (lambda y, n: n * y.sum())(*Counted.apply(x * p["w"][0])),
        "the same for all",
    ),
    "memory": (shares_memory, "memory of their own"),
    "captured": (
        lambda p, b, x: Captured.apply(x, lambda y: (y * p["w"][0]).sum(), p["w"]),
        "a captured one",
    ),
    "captured activation": (
        lambda p, b, x: (lambda h: Captured.apply(p["w"][0], lambda w: (w * h).sum()))(
            x * p["w"][1]
        ),
        "a captured one",
    ),
    "mapped by the loss": (
        lambda p, b, x: torch.vmap(lambda y: Unmapped.apply(y, p["b"][0]))(
            x * p["w"][0]
        ).sum(),
        "no transform of the loss's own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused_and_left_to_the_loop(name):
    loss, message = REFUSED[name]
    params, _, x = given()
    options = {"randomness": "different"} if "random" in name else {}
    before = torch.get_rng_state()
    for strategy in ("recorded", "vmap"):
        compute = vgrad.per_sample_grad(loss, strategy=strategy, **options)
        with pytest.raises(vgrad.UnsupportedOp, match=rf"apply: .*{message}.*loop"):
            compute(params, {}, x)
        assert torch.equal(torch.get_rng_state(), before)
    if name == "mapped by the loss":
        return
    expected = oracle.loss_gradients(loss, params, {}, (x,))
    torch.set_rng_state(before)
    with pytest.warns(vgrad.FallbackWarning, match=f"one sample after.*{message}"):
        assert_gradients(loss, params, (x,), expected=expected, **options)


class Reversible(Function):
    """Runs a backward pass of its own, which adds to `.grad`."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.function(x), grad)
        return x.grad, None


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


def spoils(p, b, x):
    return Spoiling.apply(x * p["w"][0], x).sum()


@pytest.mark.parametrize(
    ("loss", "strategy", "error", "message"),
    [
        (with_noise, "auto", RuntimeError, 'randomness="error"'),
        (LOSSES["an activation"], "vmap", vgrad.UnsupportedOp, "one derivative"),
        (spoils, "recorded", ValueError, "spoiled"),  # and no calls follow
    ],
)
def test_what_functions_cannot_do_is_refused(loss, strategy, error, message):
    params, _, x = given()
    params["w"].requires_grad_()
    with pytest.raises(error, match=message):
        vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, x)


def product_forward(ctx, x, w):
    ctx.save_for_backward(x, w)
    return x @ w


def product_backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad.to(w.dtype) @ w.t(), x.t() @ grad.to(x.dtype)


Product = old("Product", product_forward, product_backward)


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
def test_inside_a_module_whose_parameters_it_takes():
    model = losses.Net(
        lambda self, x: self.last(square(Product.apply(x, self.first.weight.t()))),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 2),
    ).double()
    batch = randn(5, 3), randn(5, 2, seed=1)
    expected = oracle.model_gradients(
        model, lambda m, x, y: F.mse_loss(m(x), y), batch, 5
    )
    loss, params, buffers = losses.of_model(model, F.mse_loss)
    assert_gradients(loss, params, batch, buffers=buffers, expected=expected)


@quiet
@every_strategy
@pytest.mark.parametrize("function", [Product, Ruled])
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
    within, errors = threading.Event(), []

    def other():
        within.wait()
        try:
            torch.vmap(square)(torch.ones(2))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()

    def loss(p, b, x):
        within.set()
        thread.join()
        raise KeyError(square(x * p["w"][0]).sum())

    params, _, x = given()
    with pytest.raises(KeyError), warnings.catch_warnings():
        vgrad.per_sample_grad(loss, strategy="recorded")(params, {}, x)
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.vmap(square)(torch.ones(2))
    assert "must override the setup_context" in errors[0]


@pytest.mark.filterwarnings("ignore")
def test_a_captured_step_runs_it_in_python():
    params, _, x = given()
    compute = vgrad.per_sample_grad(LOSSES["an activation"])
    step = vgrad.compile(compute)
    for each in (x, 2 * x):
        oracle.assert_exact(step(params, {}, each), compute(params, {}, each), 1e-12)

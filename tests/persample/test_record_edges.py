"""Losses that reach a parameter by unusual routes: exact, or refused with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import randn

X, W = randn(3, 4), randn(8, 5, seed=1)


def norms(loss, params, *batch, strategy="recorded"):
    return vgrad.per_sample_norm(loss, strategy=strategy)(params, {}, *batch)


def linear(params, buffers, x):
    return F.linear(x, params["w"]).square().sum()


def kernel():
    return randn(4, 3, 2, 2).to(memory_format=torch.channels_last)


SQUARES = {
    "of stride zero": lambda: torch.full((1, 1), 0.3).double().expand(4, 4),
    "of equal strides": lambda: W.reshape(-1)[:7].as_strided((4, 4), (1, 1)),
    "of swapped strides": lambda: W[:4, :4].t(),
}
ORDERS = {
    "permute": lambda w: w.permute(0, 1),
    "transpose": lambda w: w.transpose(0, 0),
    "swapaxes, there and back": lambda w: w.swapaxes(0, 1).swapaxes(-1, -2),
    "t": lambda w: w.t(),
    "permute, swapped": lambda w: torch.permute(w, dims=(-1, 0)),
}


@pytest.mark.parametrize(
    ("make", "order", "width"),
    [
        *((make, order, 4) for make in SQUARES.values() for order in ORDERS.values()),
        (kernel, lambda w: w.permute(0, 2, 3, 1).view(4, -1), 12),
    ],
)
def test_a_parameter_of_any_strides_is_reordered_where_the_loss_says_so(
    make, order, width
):
    def loss(params, buffers, x):
        return F.linear(x, order(params["w"])).sin().sum()

    params, x = {"w": make()}, randn(3, width)
    found = vgrad.per_sample_grad(loss, strategy="recorded")(params, {}, x)
    oracle.assert_exact(found, oracle.loss_gradients(loss, params, {}, (x,), 3), 1e-12)


@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap", "loop"])
def test_the_op_below_an_embedding_pads_in_every_sample(strategy):
    def loss(params, buffers, indices):
        return torch.embedding(params["w"], indices, 0).square().sum()

    indices = torch.tensor([[0, 1], [0, 2]])
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    found = compute({"w": torch.ones(3, 2)}, {}, indices)["w"]
    expected = torch.zeros(2, 3, 2)
    expected[0, 1] = expected[1, 2] = 2
    assert torch.equal(found, expected)


def renormed(params, buffers, x):
    w = params["w"]
    w.data = torch.renorm(w.data, 2, 0, 1.0)
    return (w @ x).square().sum()


def hooked(params, buffers, x):
    params["w"].register_hook(lambda grad: 2 * grad)
    return (params["w"] @ x).square().sum()


@pytest.mark.parametrize("loss", [renormed, hooked])
def test_writing_around_a_parameter_is_refused_and_runs_in_a_loop(loss):
    params = {"w": torch.full((2, 4), 10.0, dtype=torch.float64)}
    with pytest.raises(vgrad.UnsupportedOp, match='strategy="loop"'):
        norms(loss, params, X, strategy="recorded")
    # Each sample on its own: hooks stay on the tensor.
    alone = [oracle.loss_gradients(loss, params, {}, (row[None],), 1) for row in X]
    expected = torch.cat([oracle.norms(grads) for grads in alone])
    found = norms(loss, params, X, strategy="loop")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    if loss is renormed:
        with pytest.warns(vgrad.FallbackWarning, match="one sample after another"):
            found = norms(loss, params, X, strategy="auto")
    else:
        found = norms(loss, params, X, strategy="auto")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_backward_hooks_of_modules_are_refused_in_transforms_and_run_in_a_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    model[1].register_full_backward_hook(lambda module, into, out: (10 * into[0],))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    y = torch.zeros(3, 1, dtype=torch.float64)
    for strategy in ("recorded", "vmap"):
        with pytest.raises(RuntimeError, match="backward hooks"):
            norms(loss, params, X, y, strategy=strategy)
    with pytest.warns(vgrad.FallbackWarning, match="backward hooks"):
        found = vgrad.per_sample_grad(loss)(params, buffers, X, y)
    model.zero_grad()
    F.mse_loss(model(X[:1]), y[:1]).backward()
    torch.testing.assert_close(found["0.weight"][0], model[0].weight.grad)


def test_attention_refuses_what_torch_refuses():
    fmodel, params, _ = vgrad.make_functional_with_buffers(
        nn.MultiheadAttention(4, 2, batch_first=True).double()
    )

    def loss(params, buffers, x):
        out, _ = fmodel(params, buffers, *[x[None]] * 3, is_causal=True)
        return out.sum()

    x = X.reshape(1, 3, 4)
    for strategy in ("recorded", "loop"):
        with pytest.raises(RuntimeError, match="attn_mask"):
            norms(loss, params, x, strategy=strategy)


def test_autocast_leaves_norms_in_float64_alone():
    def loss(params, buffers, x):
        return F.layer_norm(x, (4,), params["w"]).sin().sum()

    params = {"w": torch.ones(4, dtype=torch.float64)}
    expected = norms(loss, params, X, strategy="loop")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = norms(loss, params, X)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_the_new_switches_of_precision_are_read():
    params, x = {"w": torch.ones(2, 3)}, torch.ones(4, 5, 3)
    expected = norms(linear, params, x, strategy="loop")
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        found = norms(linear, params, x)
    finally:
        matmul.fp32_precision = before
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_measuring_memory_puts_the_generator_back_after_an_error():
    def loss(params, buffers, x):
        torch.rand(1)
        raise ValueError("on purpose")

    state = torch.get_rng_state()
    compute = vgrad.per_sample_norm(loss, chunk_size="auto")
    with pytest.raises(ValueError, match="on purpose"):
        compute({"w": torch.ones(1)}, {}, torch.ones(2, 1))
    assert torch.equal(state, torch.get_rng_state())

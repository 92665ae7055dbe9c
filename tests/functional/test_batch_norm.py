import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle

D = torch.float64
FMODEL, PARAMS, BUFFERS = vgrad.make_functional_with_buffers(nn.BatchNorm1d(2))
TEXTS = [
    "FMODEL(PARAMS, BUFFERS, x)",
    "nn.BatchNorm1d(2, track_running_stats=False)(x)",
    "F.batch_norm(x, None, None, training=True)",
    "torch.batch_norm(x, *(None,) * 4, True, 0.1, 1e-5, False)",
    "torch.native_batch_norm(x, *(None,) * 4, True, 0.1, 1e-5)[0]",
    "torch.ops.aten.native_batch_norm(x, *(None,) * 4, True, 0.1, 1e-5)[0]",
]


def batch(size=3):
    return torch.randn(size, 2, 6, 6, dtype=D), torch.randint(3, (size,))


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("text", TEXTS)
def test_batch_statistics_are_refused_at_the_op(strategy, text):
    def loss(params, buffers, x):
        x = x[None] * params["scale"]
        return eval(text, globals() | {"x": x}).square().sum()

    for transform in (vgrad.per_sample_norm, partial(vgrad.clipped_grad, max_norm=1.0)):
        compute = transform(loss, strategy=strategy)
        with pytest.raises(ValueError, match=r"no per-sample gradient.*replace_batch"):
            compute({"scale": torch.ones(())}, {}, torch.randn(3, 2, 4))


class Standardised(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1, by batch norm of it."""

    def forward(self, x):
        rows = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(rows, None, None, self.bias, training=True)
        return F.conv2d(x, weight.view_as(self.weight))


@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
def test_statistics_of_a_weight_are_none_of_the_batch(strategy):
    model = nn.Sequential(Standardised(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)).to(D)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=D)))
    loss, *values = losses.of_model(model)
    given = batch()
    found = vgrad.per_sample_grad(loss, strategy=strategy)(*values, *given)
    run = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
    oracle.assert_exact(found, oracle.model_gradients(model, run, given, 3), 1e-12)
    with pytest.raises(ValueError, match="batch statistics"):
        vgrad.per_sample_grad(loss, strategy="loop")(*values, *given)


@pytest.mark.parametrize("chunk_size", [1, 2, None])
@pytest.mark.parametrize("strategy", losses.STRATEGIES)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_the_gradient_of_one_evaluated_sample_is_right(norm, strategy, chunk_size):
    """Plain autograd has it wrong on a CPU, but right for two copies of a sample."""

    def means(model, x):
        tokens = model(x).flatten(2).transpose(1, 2)  # hands a transposed gradient back
        return tokens.mean(1).pow(3).sum(1).mean()

    norm = norm(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm).to(D).eval()
    x = batch()[0]
    copies = torch.stack([x, x], 1)
    expected = oracle.model_gradients(
        model, lambda m, x: means(m, x.squeeze(0)), (copies,), 3
    )
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)

    def loss(params, buffers, x):
        return means(lambda x: fmodel(params, buffers, x), x[None])

    transform = vgrad.per_sample_grad(loss, strategy=strategy, chunk_size=chunk_size)
    oracle.assert_exact(transform(params, buffers, x), expected, 1e-12)


def test_replace_batch_norm_gives_a_copy_that_works():
    shared = nn.BatchNorm2d(4, dtype=D)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), shared, nn.ReLU(), nn.Conv2d(4, 4, 1), shared, nn.Flatten()
    )
    model.extend([nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)])
    shared.weight.data.normal_()
    replaced = vgrad.replace_batch_norm(model)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(replaced[1], nn.GroupNorm)
    assert replaced[4] is replaced[1]
    assert torch.equal(replaced[1].weight, shared.weight)
    loss, params, buffers = losses.of_model(replaced)
    losses.assert_quantities(loss, params, batch(), buffers=buffers, tolerance=1e-9)


def test_settings_of_the_layer_are_kept_and_no_group_has_a_single_number():
    for channels in (2, 3, 16, 32, 48, 64):
        norm = vgrad.replace_batch_norm(nn.BatchNorm2d(channels))
        assert channels // norm.num_groups >= 2
    assert vgrad.replace_batch_norm(nn.BatchNorm1d(16)).num_groups == 1
    layer = nn.BatchNorm2d(8, eps=0.1, affine=False).eval()
    norm = vgrad.replace_batch_norm(layer)
    assert (norm.eps, norm.affine, norm.training) == (0.1, False, False)
    layer = nn.BatchNorm2d(8, dtype=D).requires_grad_(False)
    weight = vgrad.replace_batch_norm(layer).weight
    assert (weight.dtype, weight.requires_grad) == (D, False)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_one_channel_without_positions_is_refused_as_its_outputs_would_be_equal(norm):
    model = nn.Sequential(nn.Linear(8, 1), norm(1))
    with pytest.raises(ValueError, match=r"two channels .* of one.*nn.Identity\(\) "):
        vgrad.replace_batch_norm(model)
    norm = vgrad.replace_batch_norm(nn.BatchNorm2d(1))  # of the pixels of a map
    x = torch.randn(2, 1, 3, 3)
    every, alone = x.var((2, 3), correction=0, keepdim=True), x.mean((2, 3), True)
    torch.testing.assert_close(norm(x), (x - alone) / (every + norm.eps).sqrt())


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm 1.0.31."""

    def __init__(self, channels, drop, act):
        super().__init__(channels)
        self.drop, self.act = drop, act

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def split(model):
    """Run the function of that name in the documents."""
    text = (Path(__file__).parents[2] / "docs" / "sharp_edges.md").read_text()
    [code] = re.findall(r"^def split.*?return module$", text, re.S | re.M)
    exec(code, names := {"torch": torch})
    return names["split"](model)


def test_a_recipe_of_the_documents_keeps_dropout_and_activation():
    first = BatchNormAct2d(4, nn.Identity(), nn.ReLU(inplace=True))
    second = BatchNormAct2d(4, nn.Dropout(1.0), nn.Sigmoid())
    model = nn.Sequential(nn.Conv2d(2, 4, 3), first, nn.Conv2d(4, 4, 3), second)
    model.extend([nn.Flatten(), nn.Linear(16, 3)]).to(D)
    for value in (*first.parameters(), *second.parameters()):
        value.data.normal_()
    replaced = vgrad.replace_batch_norm(split(model))
    x = torch.randn(3, 4, 5, 5, dtype=D)
    expected = F.group_norm(x, 2, first.weight, first.bias).relu()
    assert torch.equal(replaced[1](x), expected)
    assert (replaced[3](x) == 0.5).all()  # first dropped, then activated
    second.drop.p = 0.0
    loss, params, buffers = losses.of_model(vgrad.replace_batch_norm(model))
    losses.assert_quantities(loss, params, batch(), buffers=buffers, tolerance=1e-9)


def _hooked(register):
    layer = nn.BatchNorm2d(2)
    getattr(layer, register)(lambda module, *values: values[-1])
    return layer


def _patched():
    layer = nn.BatchNorm2d(2)
    layer.forward = lambda x: nn.BatchNorm2d.forward(layer, x).relu()
    return layer


class Called(nn.BatchNorm2d):
    def __call__(self, x):
        return super().__call__(x).relu()


MORE = {
    "of a class": lambda: BatchNormAct2d(2, nn.Identity(), nn.ReLU()),
    "of a call": lambda: Called(2),
    "of an object": _patched,
    "hook after": lambda: _hooked("register_forward_hook"),
    "hook before": lambda: _hooked("register_forward_pre_hook"),
    "hook on gradients": lambda: _hooked("register_full_backward_hook"),
}


@pytest.mark.parametrize("name", MORE)
def test_layers_that_do_more_are_refused(name):
    with pytest.raises(TypeError, match="does more. .* by hand, as .*sharp_edges"):
        vgrad.replace_batch_norm(nn.Sequential(MORE[name]()))


def test_lazy_layers_are_refused():
    with pytest.raises(TypeError, match="replace_batch_norm.*lazy"):
        vgrad.replace_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))

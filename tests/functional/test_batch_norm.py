import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle

STRATEGIES = ("vmap", "loop")


def batch(size=3):
    return torch.randn(size, 2, 6, 6), torch.randint(3, (size,))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("track", [True, False])
def test_batch_statistics_are_refused_at_the_op(strategy, track):
    model = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=track), nn.Flatten())
    model.append(nn.Linear(72, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    for transform in (vgrad.per_sample_grad, vgrad.per_sample_norm):
        with pytest.raises(
            ValueError, match=r"no per-sample gradient.*replace_batch_norm"
        ):
            transform(loss, strategy=strategy)(params, buffers, *batch())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "text",
    [
        "F.batch_norm(x, None, None, training=True)",
        "torch.batch_norm(x, *(None,) * 4, True, 0.1, 1e-5, False)",
        "torch.native_batch_norm(x, *(None,) * 4, True, 0.1, 1e-5)[0]",
        "torch.ops.aten.native_batch_norm(x, *(None,) * 4, True, 0.1, 1e-5)[0]",
    ],
)
def test_batch_statistics_are_refused_in_losses_written_by_hand(strategy, text):
    def loss(params, buffers, x):
        x = x[None] * params["scale"]
        return eval(text, globals() | {"x": x}).square().sum()

    compute = vgrad.clipped_grad(loss, max_norm=1.0, strategy=strategy)
    with pytest.raises(ValueError, match="batch statistics"):
        compute({"scale": torch.ones(())}, {}, torch.randn(3, 2, 4))


class Standardised(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1, by batch norm of it."""

    def forward(self, x):
        rows = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(rows, None, None, self.bias, training=True)
        return F.conv2d(x, weight.view_as(self.weight))


@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
def test_statistics_of_a_weight_are_none_of_the_batch(strategy):
    model = nn.Sequential(Standardised(2, 3, 3), nn.Flatten()).double()
    model.append(nn.Linear(48, 3, dtype=torch.float64))
    model.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x, y = batch()
    given = x.double(), y
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    found = vgrad.per_sample_grad(loss, strategy=strategy)(params, buffers, *given)
    expected = oracle.model_gradients(
        model, lambda m, x, y: F.cross_entropy(m(x), y), given, 3
    )
    oracle.assert_exact(found, expected, 1e-12)
    with pytest.raises(ValueError, match="batch statistics"):
        vgrad.per_sample_grad(loss, strategy="loop")(params, buffers, *given)


@pytest.mark.parametrize("chunk_size", [1, 2, None])
@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_the_gradient_of_one_evaluated_sample_is_right(norm, strategy, chunk_size):
    """Plain autograd has it wrong on a CPU, but right for two copies of a sample."""

    def means(model, x):
        tokens = model(x).flatten(2).transpose(1, 2)  # hands a transposed gradient back
        return tokens.mean(1).pow(3).sum(1).mean()

    norm = norm(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm).double().eval()
    x = batch()[0].double()
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
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(4)
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
    fmodel, params, buffers = vgrad.make_functional_with_buffers(replaced)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    x, y = batch()
    found = vgrad.per_sample_grad(loss)(params, buffers, x, y)
    expected = vgrad.per_sample_grad(loss, strategy="loop")(params, buffers, x, y)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4)
    assert bool(found["7.weight"].any())


def test_no_group_is_left_with_a_single_number():
    for channels in (1, 2, 3, 16, 32, 48, 64):
        norm = vgrad.replace_batch_norm(nn.BatchNorm2d(channels))
        assert channels == 1 or channels // norm.num_groups >= 2
    assert vgrad.replace_batch_norm(nn.BatchNorm1d(16)).num_groups == 1


def test_settings_of_the_layer_are_kept():
    layer = nn.BatchNorm2d(8, eps=0.1, affine=False, dtype=torch.float64).eval()
    norm = vgrad.replace_batch_norm(layer)
    assert (norm.eps, norm.affine, norm.training) == (0.1, False, False)
    layer = nn.BatchNorm2d(8, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    norm = vgrad.replace_batch_norm(layer)
    assert norm.weight.dtype == torch.float64
    assert not norm.weight.requires_grad


def test_evaluation_mode_is_not_refused():
    model = losses.batch_norm_evaluated()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    assert vgrad.per_sample_norm(loss)(params, buffers, *batch()).shape == (3,)


def test_layers_that_do_more_are_refused():
    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    hooked = nn.BatchNorm2d(2)
    hooked.register_forward_hook(lambda module, args, out: out + 1)
    for layer in (Activated(2), hooked):
        with pytest.raises(TypeError, match="does more. Replace it by hand"):
            vgrad.replace_batch_norm(nn.Sequential(layer))
    with pytest.raises(TypeError, match="replace_batch_norm.*lazy"):
        vgrad.replace_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))

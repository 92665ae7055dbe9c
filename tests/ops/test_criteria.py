"""Losses of classes by torch's own kernels, over the samples of a batch."""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle

SIZES = {"one": (), "some": (3,), "none of an image": (2, 2), "images": (2, 3, 2)}
OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 1},
    "weighted": {"weight": torch.tensor([0.5, 2.0, 0.0, 1.5], dtype=torch.float64)},
    "both": {"weight": torch.tensor([0.5, 2.0, 1.0, 1.5]).double(), "ignore_index": 2},
}
SMOOTHED = {"label_smoothing": 0.1}
"""For cross-entropy alone."""


def batch(sizes, kind, classes=4):
    """Return samples whose logits are `[N, C, ...]`, and targets of a kind."""
    torch.manual_seed(len(sizes))
    axis = min(1, len(sizes))
    logits = (*sizes[:axis], classes, *sizes[axis:])
    x = torch.randn(5, *logits, dtype=torch.float64)
    if kind == "classes":
        return x, torch.randint(classes, (5, *sizes))
    return x, torch.randn(5, *logits, dtype=torch.float64).softmax(1 + axis)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("op", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_every_reduction_is_that_of_one_sample(
    kind, op, sizes, name, smoothed, reduction
):
    if op is F.nll_loss and (smoothed or kind != "classes"):
        return
    if kind != "classes" and "ignore_index" in OPTIONS[name]:
        return  # which torch refuses
    options = {**OPTIONS[name], **(SMOOTHED if smoothed else {})}
    x, y = batch(sizes, kind)

    def loss(params, buffers, x, y):
        return op((params["w"] * x).tanh(), y, reduction=reduction, **options)

    params = {"w": torch.tensor(0.7, dtype=torch.float64)}
    check(loss, params, x, y)


def check(loss, params, x, y):
    expected = oracle.loss_gradients(loss, params, {}, (x, y))
    found = vgrad.per_sample_grad(loss, strategy="recorded")(params, {}, x, y)
    oracle.assert_exact(found, expected)
    values = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded")
    losses = torch.stack([loss(params, {}, *each) for each in zip(x, y, strict=True)])
    oracle.assert_exact(values(params, {}, x, y).losses, losses)


UNREDUCED = {
    "reduction": ((), {"reduction": "none"}),
    "reduce": ((), {"reduce": False}),
    "by place": ((None, None, -100, None, "none", 0.1), {}),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize(("args", "options"), UNREDUCED.values(), ids=UNREDUCED)
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_losses_without_a_reduction_are_those_of_the_positions(shape, args, options):
    x, y = batch(shape[:-1], "classes")

    def loss(params, buffers, x, y):
        losses = F.cross_entropy(params["w"] * x, y, *args, **options)
        return (losses * losses).sum()

    check(loss, {"w": torch.tensor(0.7, dtype=torch.float64)}, x, y)


@pytest.mark.parametrize("op", [F.cross_entropy, F.nll_loss])
def test_autocast_takes_the_losses_in_float32(op):
    x, y = batch((3,), "classes")
    params = {"w": torch.tensor(0.7)}

    def loss(params, buffers, x, y):
        return op((params["w"] * x).bfloat16(), y, ignore_index=1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        compute = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded")
        found = compute(params, {}, x.float(), y)
        pairs = zip(x.float(), y, strict=True)
        losses = torch.stack([loss(params, {}, *each) for each in pairs])
    assert found.losses.dtype == losses.dtype == torch.float32
    oracle.assert_exact(found.losses, losses, 1e-6)


def test_weights_of_each_sample_and_wrong_shapes_are_left_to_torch():
    x, y = batch((), "classes")
    weights, params = x.exp(), {"w": torch.tensor(0.7, dtype=torch.float64)}

    def own(params, buffers, x, y, weight):
        return F.cross_entropy(params["w"] * x, y, weight, reduction="sum")

    expected = oracle.loss_gradients(own, params, {}, (x, y, weights))
    found = vgrad.per_sample_grad(own)(params, {}, x, y, weights)
    oracle.assert_exact(found, expected)

    def wrong(params, buffers, x, y):
        return F.cross_entropy(params["w"] * x[None], y.expand(2))

    with pytest.raises(ValueError, match="batch_size"):
        vgrad.per_sample_grad(wrong)(params, {}, x, y)

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses

split = vgrad.make_functional_with_buffers
WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def of_labels(criterion, *shape):
    """The loss of one sample of random labels, and torch's own value of it."""
    scores = nn.LogSoftmax(1)
    fmodel, params, buffers = split(scores)
    loss = vgrad.sample_loss(fmodel, criterion)
    x, y = torch.randn(3, *shape), torch.randint(3, shape)
    return loss(params, buffers, x, y), criterion(scores(x[None]), y[None]).squeeze()


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_criteria_may_reduce_but_not_divide_by_the_weight_of_one_label(kind):
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(*of_labels(kind(reduction=reduction)))
    with pytest.raises(ValueError, match=rf'Pass {kind.__name__}.*reduction="sum"'):
        of_labels(kind(weight=WEIGHT))
    torch.testing.assert_close(*of_labels(kind(weight=WEIGHT, reduction="sum")))
    torch.testing.assert_close(*of_labels(kind(weight=WEIGHT), 4))  # a label each


def test_a_loss_of_several_numbers_is_refused():
    fmodel, params, buffers = split(nn.Linear(3, 4))
    each = nn.MSELoss(reduction="none")
    with pytest.raises(ValueError, match=r"sample_loss.*one number.*\(1, 4\)"):
        vgrad.sample_loss(fmodel, each)(params, buffers, torch.ones(3), torch.ones(4))
    x, y = torch.ones(2, 3), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"batch_loss.*Reduce it in the criterion"):
        vgrad.batch_loss(fmodel, each)(params, buffers, x, y)


def test_dictionaries_among_the_inputs_become_keyword_arguments():
    model = losses.TwoCalls()
    loss, *values = losses.of_model(model, dtype=torch.float32)
    x, scale, y = torch.randn(4), torch.rand(4), torch.tensor(1)
    expected = F.cross_entropy(model(x[None], scale=scale, twice=True), y[None])
    assert torch.equal(loss(*values, x, {"scale": scale, "twice": True}, y), expected)
    with pytest.raises(ValueError, match=r"once, got \['scale'\]"):
        loss(*values, x, {"scale": scale}, {"scale": scale}, y)


def test_a_target_may_be_a_tree():
    def criterion(output, target):
        assert target["mean"].shape == (1, 1)
        return F.gaussian_nll_loss(output, target["mean"], target["variance"])

    loss, *values = losses.of_model(nn.Linear(3, 1), criterion)
    target = {"mean": torch.zeros(1), "variance": torch.ones(1)}
    assert loss(*values, torch.ones(3, dtype=torch.float64), target).shape == ()


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.wrap = wrap

    def forward(self, x, labels):
        logits = self.head(x)
        return self.wrap(F.cross_entropy(logits, labels), logits)


Output = namedtuple("Output", "loss logits")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, logits: loss,
        lambda loss, logits: (loss, logits),
        lambda loss, logits: {"loss": loss, "logits": logits},
        lambda loss, logits: Output(loss, logits),
    ],
)
def test_models_may_return_their_own_loss(wrap):
    model = Returns(wrap)
    fmodel, params, buffers = split(model)
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    expected = F.cross_entropy(model.head(x), y)
    whole = vgrad.batch_loss(fmodel, None)(params, buffers, x, {"labels": y})
    assert torch.equal(whole, expected)
    single = vgrad.sample_loss(fmodel, None)
    found = [
        single(params, buffers, a, {"labels": b}) for a, b in zip(x, y, strict=True)
    ]
    torch.testing.assert_close(sum(found) / 5, expected)


def test_a_missing_target_or_loss_is_said():
    loss, *values = losses.of_model(nn.Linear(3, 2), dtype=torch.float32)
    with pytest.raises(ValueError, match="got 1 items.*criterion=None"):
        loss(*values, torch.ones(3))
    model = Returns(lambda loss, logits: {"logits": logits})
    loss, *values = losses.of_model(model, None, torch.float32)
    with pytest.raises(ValueError, match="NoneType. Does the model need labels"):
        loss(*values, torch.ones(3), torch.tensor(0))


def test_batch_loss_returns_the_buffers_that_the_forward_pass_left():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    fmodel, params, buffers = split(model)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    value, new = loss.with_buffers(params, buffers, x, y)
    assert torch.equal(value, loss(params, buffers, x, y))
    assert torch.equal(value, F.cross_entropy(model(x), y))
    assert torch.equal(new["0.running_mean"], model[0].running_mean)
    assert not buffers["0.running_mean"].any()


def test_a_criterion_may_write_into_its_target_and_changes_none():
    def criterion(output, target):
        return (output - target["y"].mul_(2)).square().mean()

    fmodel, params, buffers = split(nn.Linear(3, 4))
    x, target = torch.randn(2, 3), {"y": torch.ones(2, 4)}
    loss = vgrad.batch_loss(fmodel, criterion)
    expected = (fmodel(params, buffers, x) - 2).square().mean()
    torch.testing.assert_close(loss(params, buffers, x, target), expected)
    vgrad.sample_loss(fmodel, criterion)(params, buffers, x[0], {"y": target["y"][0]})
    tx = vgrad.optim.sgd(0.1)
    state = vgrad.training.TrainState.create(tx, params, buffers)
    vgrad.training.train_step(loss, tx)(state, x, target)
    assert torch.equal(target["y"], torch.ones(2, 4))

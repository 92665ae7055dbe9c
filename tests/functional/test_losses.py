from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_criteria_may_reduce_by_mean_by_sum_or_not_at_all(reduction):
    model = nn.Linear(3, 4)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, nn.CrossEntropyLoss(reduction=reduction))
    x, y = torch.randn(3), torch.tensor(2)
    expected = F.cross_entropy(model(x), y)
    torch.testing.assert_close(loss(params, buffers, x, y), expected)


def test_a_loss_of_several_numbers_is_refused():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(3, 4))
    loss = vgrad.sample_loss(fmodel, nn.MSELoss(reduction="none"))
    with pytest.raises(ValueError, match=r"sample_loss.*one number.*\(1, 4\)"):
        loss(params, buffers, torch.ones(3), torch.ones(4))
    whole = vgrad.batch_loss(fmodel, nn.MSELoss(reduction="none"))
    with pytest.raises(ValueError, match=r"batch_loss.*Reduce it in the criterion"):
        whole(params, buffers, torch.ones(2, 3), torch.ones(2, 4))


def of_labels(criterion, *shape):
    """The loss of one sample of random labels, and what torch makes of it."""
    scores = nn.LogSoftmax(1)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(scores)
    loss = vgrad.sample_loss(fmodel, criterion)
    torch.manual_seed(0)
    x, y = torch.randn(3, *shape), torch.randint(3, shape)
    return loss(params, buffers, x, y), criterion(scores(x[None]), y[None])


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_weights_that_a_mean_over_one_label_divides_by_are_refused(kind):
    weight = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=rf'Pass {kind.__name__}.*reduction="sum"'):
        of_labels(kind(weight=weight))
    torch.testing.assert_close(*of_labels(kind(weight=weight, reduction="sum")))
    torch.testing.assert_close(*of_labels(kind(weight=weight), 4))  # a label each
    torch.testing.assert_close(*of_labels(kind()))


def test_dictionaries_among_the_inputs_become_keyword_arguments():
    model = losses.TwoCalls()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    x, scale, y = torch.randn(4), torch.rand(4), torch.tensor(1)
    expected = F.cross_entropy(model(x[None], scale=scale, twice=True), y[None])
    found = loss(params, buffers, x, {"scale": scale, "twice": True}, y)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"once, got \['scale'\]"):
        loss(params, buffers, x, {"scale": scale}, {"scale": scale}, y)


def test_a_target_may_be_a_tree():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(3, 1))

    def criterion(output, target):
        assert target["mean"].shape == (1, 1)
        return F.gaussian_nll_loss(output, target["mean"], target["variance"])

    loss = vgrad.sample_loss(fmodel, criterion)
    target = {"mean": torch.zeros(1), "variance": torch.ones(1)}
    assert loss(params, buffers, torch.ones(3), target).shape == ()


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
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Returns(wrap))
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    expected = F.cross_entropy(
        F.linear(x, params["head.weight"], params["head.bias"]), y
    )
    whole = vgrad.batch_loss(fmodel, None)(params, buffers, x, {"labels": y})
    assert torch.equal(whole, expected)
    single = vgrad.sample_loss(fmodel, None)
    losses = torch.vmap(lambda a, b: single(params, buffers, a, {"labels": b}))(x, y)
    torch.testing.assert_close(losses.mean(), expected)


def test_a_missing_target_or_loss_is_said():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="got 1 items.*criterion=None"):
        vgrad.sample_loss(fmodel, F.cross_entropy)(params, buffers, torch.ones(3))
    model = Returns(lambda loss, logits: {"logits": logits})
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    with pytest.raises(ValueError, match="NoneType. Does the model need labels"):
        vgrad.batch_loss(fmodel, None)(
            params, buffers, torch.ones(1, 3), torch.zeros(1, dtype=torch.long)
        )


def test_batch_loss_returns_the_buffers_that_the_forward_pass_left():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
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

    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(3, 4))
    x, target = torch.randn(2, 3), {"y": torch.ones(2, 4)}
    loss = vgrad.batch_loss(fmodel, criterion)
    expected = (fmodel(params, buffers, x) - 2).square().mean()
    torch.testing.assert_close(loss(params, buffers, x, target), expected)
    vgrad.sample_loss(fmodel, criterion)(params, buffers, x[0], {"y": target["y"][0]})
    tx = vgrad.optim.sgd(0.1)
    state = vgrad.training.TrainState.create(tx, params, buffers)
    vgrad.training.train_step(loss, tx)(state, x, target)
    assert torch.equal(target["y"], torch.ones(2, 4))

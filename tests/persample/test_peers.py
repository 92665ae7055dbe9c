"""The README's comparison: what peers compute on cases of ours, where they are there.

`pip install ".[peers]"` brings Opacus; BackPACK goes in with
`pip install --no-deps backpack-for-pytorch einops unfoldNd`.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle

pytestmark = pytest.mark.filterwarnings("ignore")

EXACT, WRONG, RAISES = "exact", "wrong", "raises"


def called_by_keyword():
    return losses.Net(lambda self, x: self.layer(input=x), layer=nn.Linear(4, 3))


def tied_linear():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 3))


def broadcast_positions():
    model = losses.Net(
        lambda self, x: self.head((self.token(x) + self.position(self.ids)).flatten(1)),
        token=nn.Embedding(7, 4),
        position=nn.Embedding(3, 4),
        head=nn.Linear(12, 3),
    )
    model.register_buffer("ids", torch.arange(3)[None])
    return model


PADDED, FLATTENED = losses.CASES["padding_idx"], losses.CASES["flattened"]
CIRCULAR = losses.CASES["circular_conv"]
README = {  # a model, its batch, and what Opacus and BackPACK do
    "padding_idx": (PADDED.model, PADDED.batch, WRONG, RAISES),
    "circular padding": (CIRCULAR.model, CIRCULAR.batch, WRONG, WRONG),
    "tied weights": (tied_linear, losses.vectors(4), EXACT, WRONG),
    "broadcast positions": (broadcast_positions, losses.tokens(7, 3), RAISES, RAISES),
    "flattened rows": (FLATTENED.model, FLATTENED.batch, RAISES, RAISES),
    "keyword call": (called_by_keyword, losses.vectors(4), RAISES, RAISES),
}


def by_vgrad(model, x, y):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    return vgrad.per_sample_grad(loss)(params, buffers, x, y)


def by_opacus(model, x, y):
    module = pytest.importorskip("opacus.grad_sample", reason="Opacus is not installed")
    wrapped = module.GradSampleModule(model, loss_reduction="sum", strict=False)
    F.cross_entropy(wrapped(x), y, reduction="sum").backward()
    named = wrapped._module.named_parameters()
    return {name: parameter.grad_sample for name, parameter in named}


def by_backpack(model, x, y):
    backpack = pytest.importorskip("backpack", reason="BackPACK is not installed")
    wrapped = backpack.extend(model)
    criterion = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack.backpack(backpack.extensions.BatchGrad()):
        criterion(wrapped(x), y).backward()
    return {name: p.grad_batch for name, p in wrapped.named_parameters()}


def outcome(compute, model, x, y, expected):
    try:
        found = compute(copy.deepcopy(model), x, y)
        return EXACT if oracle.error(found, expected) < 1e-4 else WRONG
    except Exception:
        return RAISES


@pytest.mark.parametrize("name", README)
@pytest.mark.parametrize("peer", ["vgrad", "opacus", "backpack"])
def test_the_comparison_in_the_readme_is_true(name, peer):
    torch.manual_seed(1)
    build, make_batch, opacus, backpack = README[name]
    x, y = make_batch(3)
    if name == "padding_idx":
        x[0, 0] = 0
    model = build()

    expected = oracle.model_gradients(model, losses.CASES["mlp"].run, (x, y), 3)
    compute, claimed = {
        "vgrad": (by_vgrad, EXACT),
        "opacus": (by_opacus, opacus),
        "backpack": (by_backpack, backpack),
    }[peer]
    assert outcome(compute, model, x, y, expected) == claimed

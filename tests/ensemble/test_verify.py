"""Two members are compared with plain autograd on each, once per kind of tensors."""

import warnings

import pytest
import torch
from torch import nn

import vgrad
from vgrad import UnsupportedOp


def in_transforms() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


class TwoFaced(nn.Module):
    """Computes something else where one tensor stands for all members."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, x):
        scale = 2.0 if in_transforms() else 1.0
        return self.drop(self.linear(x)).tanh() * scale


class Honest(TwoFaced):
    def forward(self, x):
        return self.drop(self.linear(x)).tanh()


X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.ones(4, 2)


def stacked(kind, count=5):
    torch.manual_seed(0)
    models = [kind().eval() for _ in range(count)]
    return vgrad.stack(models)


def gradients(kind, **options):
    fmodel, params, buffers = stacked(kind)
    loss = vgrad.batch_loss(fmodel, nn.functional.mse_loss)
    return vgrad.ensemble_grad(loss, **options), params, buffers


def forward(kind, **options):
    fmodel, params, buffers = stacked(kind)
    return vgrad.ensemble_forward(fmodel, **options), params, buffers


FUNCTIONS = {
    "grad": lambda kind, **options: (
        lambda found: lambda: found[0](*found[1:], X, Y).grads["linear.weight"]
    )(gradients(kind, **options)),
    "forward": lambda kind, **options: (lambda found: lambda: found[0](*found[1:], X))(
        forward(kind, **options)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_auto_takes_the_loop_where_members_differ(name):
    right = FUNCTIONS[name](TwoFaced, strategy="loop")()
    call = FUNCTIONS[name](TwoFaced)
    with pytest.warns(vgrad.FallbackWarning, match="differ from plain autograd's"):
        assert torch.allclose(call(), right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            assert torch.allclose(call(), right)


@pytest.mark.parametrize("strategy", ["vmap", "hybrid"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_strategy_of_the_caller_raises_at_every_call(name, strategy):
    call = FUNCTIONS[name](TwoFaced, strategy=strategy)
    for _ in range(3):
        with pytest.raises(UnsupportedOp, match='other results.*strategy="loop"'):
            call()
    wrong = FUNCTIONS[name](TwoFaced, strategy=strategy, verify=False)()
    assert not torch.allclose(wrong, FUNCTIONS[name](TwoFaced, strategy="loop")())


@pytest.mark.parametrize("strategy", ["auto", "vmap", "hybrid"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_generators_do_not_depend_on_it(name, strategy):
    found = []
    for verify in (True, False):
        fmodel, params, buffers = vgrad.stack([Honest() for _ in range(3)])
        params = {name: torch.ones_like(each) / 3 for name, each in params.items()}
        options = {"strategy": strategy, "verify": verify}
        if name == "grad":
            loss = vgrad.batch_loss(fmodel, nn.functional.mse_loss)
            compute = vgrad.ensemble_grad(loss, **options)
        else:
            compute = vgrad.ensemble_forward(fmodel, **options)
        batch = (X, Y) if name == "grad" else (X,)
        torch.manual_seed(1)
        results = [compute(params, buffers, *batch) for _ in range(3)]
        tensors = [each.grads["linear.weight"] for each in results if name == "grad"]
        found.append([*(tensors or results), torch.rand(3)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_each_member_has_its_turn():
    seen = set()

    def loss(params, buffers, x):
        if not in_transforms():
            seen.add(float(params["w"]))
        return (params["w"] * x).sin().sum()

    params = {"w": torch.arange(7.0)}
    compute = vgrad.ensemble_grad(loss, strategy="hybrid")
    for _ in range(8):
        compute(params, {}, X)
    assert seen == {*map(float, range(7))}

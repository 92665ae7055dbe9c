"""Attributes that users put on parameters and buffers are there in every call."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import oracle

D = torch.float64
EXACT = {"rtol": oracle.EXACT, "atol": oracle.EXACT}
every_strategy = pytest.mark.parametrize(
    "strategy", ["auto", "recorded", "vmap", "loop"]
)


class Net(nn.Module):
    def __init__(self, tau=3.0):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3, dtype=D), nn.Linear(3, 2, dtype=D)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3, dtype=D))
        self.first.weight.tau = tau
        self.last.bias.tau = 2.0
        self.scale.tau = 0.5
        self.scale.mask = torch.tensor([1.0, 0.0, 2.0], dtype=D)
        self.scale.mask.tau = 4.0
        self.first.bias.held = {"partner": self.last.weight, "betas": [0.5]}
        self.again = False

    def inside(self, x):
        tau = getattr(self.first.weight, "tau", 1.0) * getattr(self.last.bias, "tau", 1)
        mask = getattr(self.scale, "mask", torch.ones(()))
        held = getattr(self.first.bias, "held", {"partner": 1.0, "betas": [1.0]})
        hidden = self.first(x) * mask * self.scale * getattr(self.scale, "tau", 1.0)
        hidden = hidden * tau * getattr(mask, "tau", 1.0) * held["betas"][0]
        return self.last(hidden) + F.linear(x[:, :3], held["partner"])

    def forward(self, x):
        if self.again:
            return checkpoint(self.inside, x, use_reentrant=False)
        return self.inside(x)


X, Y = torch.linspace(-1, 1, 20, dtype=D).view(5, 4), torch.ones(5, 2, dtype=D)


@pytest.fixture
def model():
    return Net()


def split(model):
    return vgrad.make_functional_with_buffers(model, disable_autograd_tracking=True)


def check(found, model):
    """Compare per-sample gradients with those of the module itself."""
    run = lambda module, x, y: F.mse_loss(module(x), y)  # noqa: E731
    for name, value in oracle.module_gradients(model, run, (X, Y), 5).items():
        torch.testing.assert_close(found[name], value, **EXACT)


def test_attributes_in_a_call(model):
    fmodel, params, buffers = split(model)
    torch.testing.assert_close(fmodel(params, buffers, X), model(X), **EXACT)
    new = {name: 2 * value for name, value in params.items()}
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1 + value.requires_grad)
    torch.testing.assert_close(fmodel(new, buffers, X), model(X), **EXACT)
    assert not any(vars(value) for value in (*new.values(), *buffers.values()))


COPIES = {
    "itself": lambda fmodel: fmodel,
    "in another mode": lambda fmodel: fmodel.eval().train(),
    "copied": copy.deepcopy,
    "pickled": lambda fmodel: pickle.loads(pickle.dumps(fmodel)),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "auto") for name in COPIES]
    + [("itself", name) for name in ("recorded", "vmap", "loop")],
)
def test_attributes_per_sample(model, strategy, name):
    model.again = strategy != "vmap"  # which takes no checkpoints
    fmodel, params, buffers = split(model)
    loss = vgrad.sample_loss(COPIES[name](fmodel), F.mse_loss)
    check(vgrad.per_sample_grad(loss, strategy=strategy)(params, buffers, X, Y), model)


def test_attributes_in_a_checkpoint_of_a_plain_call(model):
    model.again = True
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    F.mse_loss(fmodel(params, buffers, X), Y).backward()
    F.mse_loss(model(X), Y).backward()
    for name, value in params.items():
        torch.testing.assert_close(value.grad, model.get_parameter(name).grad, **EXACT)
        assert not vars(value)


def test_attributes_of_compiled_functions(model):
    fmodel, params, buffers = split(model)
    eager = vgrad.per_sample_grad(vgrad.sample_loss(fmodel, F.mse_loss))
    compiled = vgrad.compile(eager, fallback="error", verify=False)
    root = next(iter(fmodel.named_modules()))[1]
    for tau in (3.0, 3.0, 5.0):
        root.first.weight.tau = model.first.weight.tau = tau
        for transform in (compiled, eager, eager):
            check(transform(params, buffers, X, Y), model)
    assert [each.calls for each in compiled.reports()] == [1, 0]


def test_attributes_of_an_ensemble():
    models = [Net() for _ in range(3)]
    fmodel, params, buffers = vgrad.stack(models, disable_autograd_tracking=True)
    expected = torch.stack([each(X) for each in models])
    found = vgrad.ensemble_forward(fmodel)(params, buffers, X)
    torch.testing.assert_close(found, expected, **EXACT)
    members = vgrad.ensemble.unstack(fmodel, params, buffers)
    found = torch.stack([each(X) for each in members])
    torch.testing.assert_close(found, expected, **EXACT)
    for each in members:
        assert each.first.bias.held["partner"] is each.last.weight
    with pytest.raises(ValueError, match=r"3\.0 in 'first\.weight\.tau' of member 1"):
        vgrad.stack([Net(), Net(5.0)])


class Writing(nn.Linear):
    """Counts its calls in an attribute of a tensor."""

    def forward(self, x):
        self.weight.calls += 1
        if self.weight.calls > 5:
            raise KeyError("calls")
        return self.weight.calls * super().forward(x)


def test_attributes_that_a_forward_pass_sets_are_put_back():
    model, x = Writing(2, 1), torch.ones(1, 2)
    for calls in (1, 5):
        model.weight.calls = calls
        fmodel, params, buffers = split(model)
        for _ in range(3):
            if calls == 5:
                with pytest.raises(KeyError, match="calls"):
                    fmodel(params, buffers, x)
            else:
                found = fmodel(params, buffers, x)
                assert torch.equal(found, 2 * nn.Linear.forward(model, x))
            assert not any(map(vars, params.values()))
            assert model.weight.calls == calls


def scaled(params, buffers, x):
    tau = getattr(params["w"], "tau", 1.0) * getattr(buffers["b"], "tau", 1.0)
    return (params["w"] @ x).square() * tau * buffers["b"]


def given(**attributes):
    values = {"w": torch.ones(4, dtype=D)}, {"b": torch.ones((), dtype=D)}
    vars(values[0]["w"]).update(attributes)
    vars(values[1]["b"]).update(attributes)
    return values


@every_strategy
@pytest.mark.parametrize("grad", [False, True])
def test_attributes_of_arguments(strategy, grad):
    params, buffers = given(tau=3.0)
    buffers["b"].requires_grad_(grad)
    expected = oracle.loss_gradients(scaled, *given(), (X,), 5)["w"] * 9
    with torch.no_grad():
        found = vgrad.per_sample_grad(scaled, strategy=strategy)(params, buffers, X)
    torch.testing.assert_close(found["w"], expected, **EXACT)


def test_attributes_of_arguments_of_compiled_functions():
    """The last one is in a list, which the graph follows."""
    compiled = vgrad.compile(vgrad.per_sample_grad(scaled), fallback="error")
    expected = oracle.loss_gradients(scaled, *given(), (X,), 5)["w"]
    for tau in (None, 3.0, 3.0, 5.0, None, 5.0):
        attributes = {} if tau is None else {"tau": tau}
        for _ in range(2):
            found = compiled(*given(**attributes), X)["w"]
            torch.testing.assert_close(found, expected * (tau or 1.0) ** 2, **EXACT)
    assert [each.calls for each in compiled.reports()] == [3, 3, 3]

    def listed(params, buffers, x):
        return (params["w"] @ x).square() * params["w"].beta[0]

    compiled = vgrad.compile(vgrad.per_sample_grad(listed), fallback="error")
    params, _ = given(beta=[1.0])
    for params["w"].beta[0] in (2.0, 7.0, 7.0):
        found = compiled(params, {}, X)["w"]
        torch.testing.assert_close(found, params["w"].beta[0] * expected, **EXACT)

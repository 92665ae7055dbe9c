"""Calls that would break the guarantee raise where they are made."""

import copy
import os
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import vgrad
from vgrad import optim
from vgrad.dp import Plan, PrivateGradients, add_gaussian_noise, collate, secret_key
from vgrad.training import private_step, train_step

PLAN = Plan(
    dataset_size=20,
    sampling_rate=0.5,
    noise_multiplier=1.0,
    max_norm=1.0,
    steps=4,
    delta=1e-3,
)
DATA = TensorDataset(torch.ones(20, 3), torch.arange(20) % 2)


@pytest.fixture
def run():
    model = nn.Linear(3, 2)
    private = PrivateGradients(
        model, F.cross_entropy, DATA, plan=PLAN, key=secret_key(seed=0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, private, private.watch(optimizer)


def plain(model, x, y):
    F.cross_entropy(model(x), y).backward()


def test_a_batch_that_is_not_from_the_loader(run):
    _, private, _ = run
    for x, y in DataLoader(DATA, batch_size=10):
        with pytest.raises(RuntimeError, match="has just given, got one that is not f"):
            private.backward(x, y)
    batches = iter(private.loader)
    x, y = next(batches)
    with pytest.raises(ValueError, match=f"expected the {len(x)} samples .* got 20"):
        private.backward(*DATA[:])
    with pytest.raises(ValueError, match="neither drop samples nor add any"):
        private.backward(x[1:], y[1:])
    private.backward(x, y)
    with pytest.raises(RuntimeError, match="or the same one again"):
        private.backward(x, y)
    assert private.step == 1


@pytest.mark.parametrize("used", [0, 1])
def test_a_batch_that_is_skipped(run, used):
    """The first or the last batch of a pass."""
    _, private, optimizer = run
    batches = iter(private.loader)
    for _ in range(used):
        private.backward(*next(batches))
        optimizer.step()
    next(batches)
    with pytest.raises(RuntimeError, match="got the next one drawn without it"):
        next(batches, "the end of the pass")
    private.backward(*next(iter(private.loader)))
    assert private.step == used + 1


def test_a_batch_that_was_looked_at_comes_again(run):
    _, private, _ = run
    first = next(iter(private.loader))
    again = next(iter(private.loader))
    assert torch.equal(first[1], again[1])
    private.backward(*again)


def test_two_passes_at_a_time(run):
    _, private, _ = run
    first = iter(private.loader)
    private.backward(*next(first))
    next(iter(private.loader))
    with pytest.raises(RuntimeError, match="expected one pass at a time"):
        next(first)


def test_a_fork_that_would_repeat_the_noise(run, monkeypatch):
    model, private, _ = run
    batch = next(iter(private.loader))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="made it, got a fork of that, with the sam"):
        private.backward(*batch)
    assert model.weight.grad is None
    private.load_state_dict({**private.state_dict(), "key": secret_key()})
    private.backward(*next(iter(private.loader)))
    assert private.step == 1


def test_steps_past_the_plan(run):
    _, private, optimizer = run
    for _ in range(2):
        for batch in private.loader:
            private.backward(*batch)
            optimizer.step()
    assert len(private.loader) == 2
    with pytest.raises(RuntimeError, match="taken the 4 steps of its plan"):
        next(iter(private.loader))
    with pytest.raises(RuntimeError, match="or the same one again"):
        private.backward(*batch)


def test_a_step_without_backward(run):
    _, private, optimizer = run
    with pytest.raises(RuntimeError, match="before each step, got a step without"):
        optimizer.step()
    batches = iter(private.loader)
    private.backward(*next(batches))
    optimizer.step()
    batch = next(batches)
    with pytest.raises(RuntimeError, match="before each step, got a step without"):
        optimizer.step()
    private.backward(*batch)
    optimizer.step()
    with pytest.raises(RuntimeError, match="before each step, got a step without"):
        optimizer.step()


def unscale(model):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


FOREIGN = "expected the gradients as PrivateGradients wrote them, got another one for"


@pytest.mark.parametrize(
    "change",
    [
        lambda model, batch: plain(model, *batch),
        lambda model, batch: model.zero_grad(),
        lambda model, batch: (model.zero_grad(), plain(model, *batch)),
        lambda model, batch: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model, batch: unscale(model),
    ],
    ids=["added to", "cleared", "replaced", "clipped", "unscaled"],
)
@pytest.mark.parametrize("in_closure", [False, True])
def test_gradients_that_were_changed(run, change, in_closure):
    model, private, optimizer = run
    before = copy.deepcopy(model.state_dict())
    batch = next(iter(private.loader))
    private.backward(*batch)
    closure = [lambda: change(model, batch)] if in_closure else []
    if not in_closure:
        change(model, batch)
    with pytest.raises(RuntimeError, match=FOREIGN):
        optimizer.step(*closure)
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())


def test_the_norm_of_gradients_may_be_logged(run):
    model, private, optimizer = run
    private.backward(*next(iter(private.loader)))
    nn.utils.clip_grad_norm_(model.parameters(), torch.inf)  # as trainers do it
    optimizer.step()


def test_a_closure_may_call_backward(run):
    model, private, optimizer = run
    before = model.weight.detach().clone()
    for batch in private.loader:
        value = optimizer.step(lambda batch=batch: private.backward(*batch)["loss"])
        assert value.isfinite()
    optimizer = private.watch(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in private.loader:
        private.backward(*batch)
        optimizer.step(closure=lambda: None)
    assert private.step == 4
    assert not torch.equal(before, model.weight)


def test_plain_gradients_without_a_watch():
    model = nn.Linear(3, 2)
    private = PrivateGradients(model, F.cross_entropy, DATA, plan=PLAN)
    batch = next(iter(private.loader))
    plain(model, *batch)
    with pytest.raises(RuntimeError, match="expected no gradient .* 'weight'"):
        private.backward(*batch)
    model.zero_grad()
    private.backward(*batch)
    assert private.ready


def test_plain_gradients_between_the_parts_of_a_logical_batch():
    model = nn.Linear(3, 2)
    private = PrivateGradients(
        model, F.cross_entropy, DATA, plan=PLAN, physical_batch_size=1
    )
    batches = iter(private.loader)
    private.backward(*next(batches))
    batch = next(batches)
    plain(model, *batch)
    with pytest.raises(RuntimeError, match="expected no gradient .* 'weight'"):
        private.backward(*batch)
    model.zero_grad()
    private.backward(*batch)


def test_gradients_are_not_accumulated(run):
    _, private, optimizer = run
    batches = iter(private.loader)
    private.backward(*next(batches))
    batch = next(batches)
    with pytest.raises(RuntimeError, match="Switch gradient accumulation off"):
        private.backward(*batch)
    optimizer.step()
    private.backward(*batch)


@pytest.mark.parametrize("part", ["weight", "1"])
def test_the_module_is_another_one(part):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    private = PrivateGradients(model, F.cross_entropy, DATA, plan=PLAN)
    batch = next(iter(private.loader))
    if part == "weight":
        model[0].weight = nn.Parameter(torch.zeros(2, 3))
    else:
        model[1] = nn.ReLU()
    with pytest.raises(RuntimeError, match="modules and parameters that it had at fir"):
        private.backward(*batch)


@pytest.mark.parametrize(
    "change", [nn.Module.double, lambda model: model.bias.requires_grad_(True)]
)
def test_the_module_is_changed_within_a_logical_batch(change):
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    private = PrivateGradients(
        model, F.cross_entropy, DATA, plan=PLAN, physical_batch_size=1
    )
    batches = iter(private.loader)
    private.backward(*next(batches))
    x, y = next(batches)
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Do that between logical batches"):
            private.backward(x, y)


def test_what_raises_has_released_nothing(run):
    model, private, _ = run
    x, y = next(iter(private.loader))
    with pytest.raises(Exception, match="shapes cannot be multiplied"):
        private.backward(x[:, :2], y)
    assert private.step == 0
    assert not private.ready
    assert model.weight.grad is None
    private.backward(x, y)
    assert private.step == 1


def test_a_release_that_fails_can_be_repeated(run, monkeypatch):
    model, private, optimizer = run
    batch = next(batches := iter(private.loader))
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "add_noise", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private.backward(*batch)
        with pytest.raises(RuntimeError, match="got the next one drawn without it"):
            next(batches)
    assert private.step == 0
    assert model.weight.grad is None
    private.backward(*batch)
    optimizer.step()
    assert private.step == 1


def test_an_optimizer_takes_the_place_of_another(run):
    model, private, _ = run
    for _ in range(2):
        optimizer = private.watch(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in private.loader:
            private.backward(*batch)
            optimizer.step()
        del optimizer
    assert private.step == 4


def test_a_scaler_that_a_fused_optimizer_reads(run):
    model, private, _ = run
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    private.watch(optimizer)
    private.backward(*next(iter(private.loader)))
    with pytest.raises(RuntimeError, match="switch off gradient clipping and loss sca"):
        scaler.step(optimizer)


class Wrapped:
    """As trainers wrap an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_what_is_inside_a_wrapped_optimizer_is_watched(run):
    model, private, _ = run
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = Wrapped(Wrapped(inside))
    assert private.watch(wrapped) is wrapped
    with pytest.raises(RuntimeError, match="before each step, got a step without"):
        inside.step()


def test_an_optimizer_of_another_module(run):
    model, private, _ = run
    other = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="expected one of the module's own parameters"):
        private.watch(other)


def test_what_is_no_optimizer_of_torch(run):
    with pytest.raises(TypeError, match="expected a torch.optim.Optimizer, got a Line"):
        run[1].watch(nn.Linear(1, 1))


BUDGET = {"epsilon": 3.0, "delta": 1e-3, "epochs": 1, "batch_size": 2, "max_norm": 1.0}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("max_grad_norm", "max_norm."),
        ("noise_multiplier", "plan=Plan(noise_multiplier=...)."),
        ("target_epsilon", "epsilon."),
        ("target_delta", "delta."),
        ("module", "model."),
        ("data_loader", "the dataset of that."),
        ("max_physical_batch_size", "physical_batch_size."),
        ("sample_rate", "plan=Plan(sampling_rate=...)."),
        ("optimizer", "it to .watch(optimizer)."),
        ("maxnorm", "max_norm."),
        ("chunksize", "chunk_size."),
        ("num_worker", "num_workers."),
        ("zzz", ""),
    ],
)
def test_a_misspelt_option_is_named_with_the_right_one(name, right):
    message = f"PrivateGradients({name}=...): expected options of its own or of a "
    message += f"DataLoader, got {name!r}.{f' Pass {right}' if right else ''}"
    # In addition to the right option, and instead of it.
    for budget in (BUDGET, {n: x for n, x in BUDGET.items() if f"{n}." != right}):
        with pytest.raises(TypeError, match=re.escape(message) + "$"):
            PrivateGradients(
                nn.Linear(3, 2), F.cross_entropy, DATA, **budget, **{name: 1}
            )


SECRET = 123456.75
SECRETS = ("123456", "1.2346e+05", "1.23457e+05", "1234567")


@pytest.mark.parametrize(
    "call",
    [
        lambda data: collate(data, lambda samples: default_collate(samples * 2)),
        lambda data: collate(data, lambda samples: (samples, SECRET)),
        lambda data: collate(data, partial(default_collate, hidden=data[:])),
        lambda data: PrivateGradients(
            nn.Linear(3, 2), F.mse_loss, data, plan=PLAN, batch_sampler=data[0]
        ),
        lambda data: PLAN.sample(key=secret_key(seed=0), step=data[0][0]),
        lambda data: PLAN.epsilon(data[:3][1]),
        lambda data: Plan(data[0][0].numpy(), 0.5, 1.0, 1.0, 4, 1e-3),
        lambda data: add_gaussian_noise(
            {"w": data[0][0]},
            {"w": data[0][0]},
            noise_multiplier=1.0,
            key=secret_key(seed=0),
            step=0,
        ),
        lambda data: add_gaussian_noise(
            {"w": data[0][0]}, [data[0][1]], noise_multiplier=data[0][1], key=0, step=0
        ),
        lambda data: vgrad.clipped_grad(data[0][0], max_norm=1.0),
        lambda data: vgrad.clipped_grad(lambda: 0, max_norm=data[0][1]),
        lambda data: vgrad.clipped_grad(lambda: 0, max_norm=1.0, chunk_size=data[0][0]),
        lambda data: vgrad.per_sample_norm(lambda: 0, strategy=data[:3]),
        lambda data: vgrad.per_sample_norm(lambda: 0, loss_scale=data[0][1]),
        lambda data: private_step(lambda: 0, optim.sgd(0.1), PLAN)(*data[:3]),
        lambda data: train_step(lambda: 0, optim.sgd(0.1))(*data[:3]),
    ],
)
def test_no_error_shows_a_value_of_the_data(call):
    data = TensorDataset(torch.full((20, 3), SECRET), torch.full((20,), SECRET))
    with pytest.raises((TypeError, ValueError)) as caught:
        call(data)
    assert not any(secret in str(caught.value) for secret in SECRETS)

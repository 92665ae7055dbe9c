"""Calls that would break the guarantee raise where they are made."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from tests.dp import runs
from tests.dp.runs import first
from vgrad.dp import Plan, private_gradients, secret_key

DATA = TensorDataset(torch.ones(20, 3), torch.arange(20) % 2)


def started(model=None, **options):
    model = nn.Linear(3, 2) if model is None else model
    return model, runs.private(runs.plan(20, 0.5, noise=1.0), model, DATA, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def run():
    model, private = started()
    return model, private, private.watch(sgd(model))


def plain(model, x, y):
    F.cross_entropy(model(x), y).backward()


def refused(message):
    return pytest.raises(RuntimeError, match=message)


def test_a_batch_that_is_not_from_the_loader(run):
    _, private, _ = run
    for x, y in DataLoader(DATA, batch_size=10):
        with refused("has just given, got one that is not from it"):
            private.backward(x, y)
    x, y = first(private)
    with pytest.raises(ValueError, match=f"expected the {len(x)} samples .* got 20"):
        private.backward(*DATA[:])
    with pytest.raises(ValueError, match="neither drop samples nor add any"):
        private.backward(x[1:], y[1:])
    private.backward(x, y)
    with refused("or the same one again"):
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
    skipped = next(batches)
    with refused("got the next one drawn without it"):
        next(batches, "the end of the pass")
    again = first(private)
    assert torch.equal(again[1], skipped[1])
    private.backward(*again)
    assert private.step == used + 1


def test_two_passes_at_a_time(run):
    _, private, _ = run
    passes = iter(private.loader)
    private.backward(*next(passes))
    first(private)
    with refused("expected one pass at a time"):
        next(passes)


def test_several_processes_and_a_fork_that_would_repeat_the_noise(run, monkeypatch):
    model, private, _ = run
    batch = first(private)
    with monkeypatch.context() as patched, refused("expected one process, got 2"):
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        patched.setattr(torch.distributed, "get_world_size", lambda: 2)
        private.backward(*batch)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with refused("made it, got a fork of that, whose equal noise"):
        private.backward(*batch)
    assert model.weight.grad is None
    private.load_state_dict({**private.state_dict(), "key": secret_key()})
    private.backward(*first(private))
    assert private.step == 1


def test_steps_past_the_plan(run):
    model, private, _ = run
    for _ in range(2):
        optimizer = private.watch(sgd(model))  # takes the place of another
        for batch in private.loader:
            private.backward(*batch)
            optimizer.step()
        del optimizer
    assert private.step == 4
    assert len(private.loader) == 2
    with refused("taken the 4 steps of its plan"):
        first(private)
    with refused("or the same one again"):
        private.backward(*batch)


def test_a_step_without_backward(run):
    _, private, optimizer = run
    batches = iter(private.loader)
    for _ in range(2):
        with refused("before each step, got a step without"):
            optimizer.step()
        batch = next(batches)
        with refused("before each step, got a step without"):
            optimizer.step()
        private.backward(*batch)
        optimizer.step()


def scaler():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    return scaler


FOREIGN = "expected the gradients as PrivateGradients wrote them, got another one for"


@pytest.mark.parametrize(
    "change",
    [
        lambda model, batch: plain(model, *batch),
        lambda model, batch: model.zero_grad(),
        lambda model, batch: (model.zero_grad(), plain(model, *batch)),
        lambda model, batch: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model, batch: scaler().unscale_(sgd(model)),
    ],
    ids=["added to", "cleared", "replaced", "clipped", "unscaled"],
)
@pytest.mark.parametrize("in_closure", [False, True])
def test_gradients_that_were_changed(run, change, in_closure):
    model, private, optimizer = run
    before = copy.deepcopy(model.state_dict())
    batch = first(private)
    private.backward(*batch)
    closure = [lambda: change(model, batch)] if in_closure else []
    if not in_closure:
        change(model, batch)
    with refused(FOREIGN):
        optimizer.step(*closure)
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())


def test_a_scaler_that_a_fused_optimizer_reads(run):
    model, private, _ = run
    optimizer = private.watch(torch.optim.Adam(model.parameters(), fused=True))
    private.backward(*first(private))
    with refused(FOREIGN + ".*switch off gradient clipping and loss scaling"):
        scaler().step(optimizer)


def test_the_norm_of_gradients_may_be_logged(run):
    model, private, optimizer = run
    private.backward(*first(private))
    nn.utils.clip_grad_norm_(model.parameters(), torch.inf)  # as trainers do it
    optimizer.step()


def test_a_closure_may_call_backward(run):
    model, private, optimizer = run
    before = model.weight.detach().clone()
    for batch in private.loader:
        value = optimizer.step(lambda batch=batch: private.backward(*batch)["loss"])
        assert value.isfinite()
    optimizer = private.watch(sgd(model))
    for batch in private.loader:
        private.backward(*batch)
        optimizer.step(closure=lambda: None)
    assert private.step == 4
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("part", [0, 1])
def test_plain_gradients_without_a_watch(part):
    model, private = started(physical_batch_size=1)
    batches = iter(private.loader)
    for _ in range(part):
        private.backward(*next(batches))
    batch = next(batches)
    plain(model, *batch)
    with refused("expected no gradient .* 'weight'"):
        private.backward(*batch)
    model.zero_grad()
    private.backward(*batch)


def test_gradients_are_not_accumulated(run):
    _, private, optimizer = run
    batches = iter(private.loader)
    private.backward(*next(batches))
    batch = next(batches)
    with refused("Switch gradient accumulation off"):
        private.backward(*batch)
    optimizer.step()
    private.backward(*batch)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 3))),
        lambda model: setattr(model, "1", nn.ReLU()),
    ],
)
def test_the_module_is_another_one(change):
    model, private = started(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    batch = first(private)
    change(model)
    with refused("modules and parameters that it had at first"):
        private.backward(*batch)


@pytest.mark.parametrize(
    "change", [nn.Module.double, lambda model: model.bias.requires_grad_(True)]
)
def test_the_module_is_changed_within_a_logical_batch(change):
    model, private = started(physical_batch_size=1)
    model.bias.requires_grad_(False)
    batches = iter(private.loader)
    private.backward(*next(batches))
    batch = next(batches)
    change(model)
    for _ in range(2):
        with refused("Do that between logical batches"):
            private.backward(*batch)


def test_a_call_that_raises_has_released_nothing_and_can_be_repeated(run, monkeypatch):
    model, private, optimizer = run
    x, y = next(batches := iter(private.loader))
    with refused("shapes cannot be multiplied"):
        private.backward(x[:, :2], y)
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "step_noise", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private.backward(x, y)
        with refused("got the next one drawn without it"):
            next(batches)
    guard = private_gradients.GradGuard
    for place in ((private_gradients, "write_grads_"), (guard, "release")):
        whole = getattr(*place)
        with monkeypatch.context() as patched:
            patched.setattr(*place, lambda *args, whole=whole: (whole(*args), 1 / 0))
            with pytest.raises(ZeroDivisionError):
                private.backward(x, y)
        assert private.step == 0
        assert not private.ready
        assert model.weight.grad is None
    private.backward(x, y)
    optimizer.step()
    assert private.step == 1


def test_an_optimizer_inside_of_the_wrappers_of_trainers_is_watched(run):
    model, private, _ = run
    inside = sgd(model)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inside))
    assert private.watch(wrapped) is wrapped
    with refused("before each step, got a step without"):
        inside.step()


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "fused": lambda x: torch.optim.AdamW(x, fused=True),
    "adagrad": torch.optim.Adagrad,
    "muon": lambda x: torch.optim.Muon([p for p in x if p.ndim == 2]),
    "momentum": lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9),
    "as_torch": lambda x: vgrad.optim.as_torch(
        vgrad.optim.adam(1e-3), ((str(i), p) for i, p in enumerate(x))
    ),
}


def steps(private, optimizer, count):
    for _, batch in zip(range(count), private.loader, strict=False):
        private.model.zero_grad()
        private.backward(*batch)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_steps_that_are_not_counted(name):
    make = OPTIMIZERS[name]
    model, private = started()
    optimizer = private.watch(make(model.parameters()))
    steps(private, optimizer, 2)
    found = copy.deepcopy([x.state_dict() for x in (optimizer, private)])
    # A trainer restores the optimizer after `watch`, in the middle of a run too.
    model, again = started()
    resumed = again.watch(make(model.parameters()))
    resumed.load_state_dict(copy.deepcopy(found[0]))
    again.backward(*first(again))
    least = 1 if name in ("muon", "momentum") else 2
    message = rf"at most 0 steps, .* one of at least {least}, .*earlier_steps={least}\)"
    with refused(message):
        resumed.step()
    # With the state of both the run goes on.
    again.load_state_dict(found[1])
    steps(again, resumed, 1)
    assert again.step == 3
    if least == 2:  # from a state of four steps
        steps(private, optimizer, 2)
        resumed.load_state_dict(optimizer.state_dict())
        model.zero_grad()
        again.backward(*first(again))
        with refused("at most 3 steps, .* one of at least 4"):
            resumed.step()
    # Public steps are no steps of the plan.
    model, public = started()
    resumed = public.watch(make(model.parameters()))
    resumed.load_state_dict(copy.deepcopy(found[0]))
    assert public.watch(resumed, earlier_steps=least) is resumed
    steps(public, resumed, 2)


def test_an_optimizer_that_begins_with_a_state_has_taken_no_step():
    class Own(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                group["step"] = None
                for p in group["params"]:
                    self.state[p]["buffer"] = torch.zeros_like(p)

    model, private = started()
    steps(private, private.watch(Own(model.parameters())), 2)


def test_earlier_steps_are_a_count(run):
    _, private, optimizer = run
    with pytest.raises(ValueError, match=r"watch\(earlier_steps=-1\)"):
        private.watch(optimizer, earlier_steps=-1)


def test_batches_are_not_skipped_by_their_sampler(run):
    _, private, _ = run
    assert not hasattr(private.loader, "sampler")
    with pytest.raises(AttributeError, match=r"resumes by .*ignore_data_skip=True"):
        private.loader.sampler  # noqa: B018

"""Private gradients in a loop of torch, against a loop of plain autograd."""

import copy
import dataclasses
import io
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from tests import oracle, streams
from vgrad import optim
from vgrad.dp import Plan, PrivateGradients, secret_key
from vgrad.training import TrainState, private_step

KEY = secret_key(seed=0)
PLAN = Plan(
    dataset_size=30,
    sampling_rate=0.2,
    noise_multiplier=0.0,
    max_norm=0.5,
    steps=10,
    delta=1e-3,
)
NOISY = dataclasses.replace(PLAN, noise_multiplier=1.5)


class Tied(nn.Module):
    """Two layers of one weight, one frozen, dropout and a buffer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)
        self.head.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x + self.shift))))
        return self.head(self.drop(hidden))


def data(dtype=torch.float64):
    source = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(30, 4, dtype=dtype, generator=source)
    return TensorDataset(x, torch.randint(3, (30,), generator=source))


def start(model=None, plan=PLAN, dataset=None, momentum=0.9, **options):
    """Make a module, its private gradients, and an optimizer that is watched."""
    model = Tied().double() if model is None else model
    dataset = data() if dataset is None else dataset
    given = {"plan": plan, "key": KEY} | options
    private = PrivateGradients(model, F.cross_entropy, dataset, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    return model, private, private.watch(optimizer)


def epoch(private, optimizer):
    return [(private.backward(*batch), optimizer.step())[0] for batch in private.loader]


def grads(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rows(plan, step):
    own = streams.of_plan(KEY.tolist(), dataclasses.asdict(plan))
    return own, streams.batch(own, step, plan.dataset_size, plan.sampling_rate)


def clipped(model, plan, step):
    """What a loop of autograd over the samples of a step gives."""
    drawn = rows(plan, step)[1]
    found = oracle.model_gradients(
        model, lambda net, x, y: F.cross_entropy(net(x), y), data()[drawn], len(drawn)
    )
    total = oracle.clipped(found, plan.max_norm)
    return {name: each / plan.expected_batch_size for name, each in total.items()}


@pytest.mark.parametrize("physical", [None, 1, 4])
def test_a_run_is_that_of_a_loop_over_samples(physical):
    model, private, optimizer = start(physical_batch_size=physical)
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        epoch(private, optimizer)
    for step in range(PLAN.steps):
        expected = clipped(reference, PLAN, step)
        for name, each in reference.named_parameters():
            each.grad = expected.get(name)
        plain.step()
    oracle.assert_exact(values(model), values(reference))
    assert private.step == PLAN.steps


def test_the_noise_is_that_of_the_key_and_comes_once_for_a_logical_batch():
    sensitivity = NOISY.max_norm / NOISY.expected_batch_size
    model, private, optimizer = start(plan=NOISY, physical_batch_size=2)
    batches = iter(private.loader)
    for step in range(5):
        own, drawn = rows(NOISY, step)
        expected, before = clipped(model, NOISY, step), values(model)
        for part in range(0, len(drawn), 2):
            assert private.step == step
            private.backward(*next(batches))
            whole = part + 2 >= len(drawn)
            assert private.ready is whole
            assert bool(grads(model)) is whole
            oracle.assert_exact(values(model), before, tolerance=0)
            optimizer.step()
        for name, grad in grads(model).items():
            noise = streams.noise(
                own, step, name, grad.shape, multiplier=1.5, sensitivity=sensitivity
            )
            # The sum is rounded to a grid of at most 2^-16 deviations.
            gap = (grad - noise - expected[name]).abs().max()
            assert gap <= 2.0**-17 * 1.5 * sensitivity * (1 + 1e-9)


def test_the_releases_are_those_of_private_step():
    model = Tied(dropout=0.5)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    tx = optim.sgd(0.5)  # a power of two, which is exact in any order
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    step = private_step(loss, tx, NOISY, randomness="different")
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    dataset = data(torch.float32)
    found = []
    for indices in NOISY.sampler(state):
        state, metrics = step(state, *dataset[indices])
        found.append(metrics)
    _, private, optimizer = start(model, NOISY, dataset, momentum=0.0)
    own = epoch(private, optimizer) + epoch(private, optimizer)
    oracle.assert_exact(own, found, tolerance=0)
    oracle.assert_exact(
        {name: values(model)[name] for name in params}, state.params, tolerance=0
    )


def test_frozen_parameters_get_no_gradient_until_they_are_thawed():
    model, private, optimizer = start()
    batches = iter(private.loader)
    private.backward(*next(batches))
    assert model.head.bias.grad is None
    assert model.head.weight.grad.dtype == torch.float64
    optimizer.step()
    model.head.bias.requires_grad_(True)
    private.backward(*next(batches))
    assert model.head.bias.grad is not None
    oracle.assert_exact(grads(model), clipped(model, PLAN, 1))


def test_an_empty_batch_is_a_step_of_noise():
    plan = dataclasses.replace(NOISY, sampling_rate=1e-9, steps=2)
    model, private, optimizer = start(plan=plan)
    for x, y in private.loader:
        assert (x.shape, y.shape) == ((0, 4), (0,))
        metrics = private.backward(x, y)
        optimizer.step()
        assert metrics["samples"] == 0
        assert metrics["loss"].isnan()
        assert all(bool((each != 0).any()) for each in grads(model).values())
    assert private.step == 2


@pytest.mark.parametrize(("physical", "workers"), [(None, 0), (3, 0), (3, 2)])
def test_a_pass_is_an_epoch(physical, workers):
    plan = dataclasses.replace(PLAN, steps=12)
    expected = [rows(plan, step)[1] for step in range(12)]
    dataset = TensorDataset(torch.arange(30.0)[:, None], torch.zeros(30, 3))
    private = PrivateGradients(
        nn.Linear(1, 3),
        F.mse_loss,
        dataset,
        plan=plan,
        key=KEY,
        physical_batch_size=physical,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for logical in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]):
        length, found = len(private.loader), []
        for x, y in private.loader:
            found.append(x.flatten().long().tolist())
            private.backward(x, y)
        assert len(found) == length
        assert list(chain(*found)) == list(chain(*map(expected.__getitem__, logical)))
        assert private.step == logical[-1] + 1
        assert max(map(len, found)) <= (physical or 30)


def test_a_batch_is_collated_as_its_owner_says():
    dataset = [{"x": torch.full((2,), float(row)), "name": "a"} for row in range(30)]

    def stack(samples):
        return {"x": torch.stack([each["x"] for each in samples])}

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return {"loss": (self.weight * x).sum()}

    model = Own()
    private = PrivateGradients(
        model, None, dataset, plan=PLAN, key=KEY, collate_fn=stack
    )
    batch = next(iter(private.loader))
    private.backward(batch)
    drawn = rows(PLAN, 0)[1]
    assert batch["x"][:, 0].tolist() == drawn
    expected = sum(min(0.5 / 2**0.5, row) if row else 0 for row in drawn) / 6
    torch.testing.assert_close(model.weight.grad, torch.full((2,), expected))


def saved(private, model, optimizer):
    held = {"private": private, "model": model, "optimizer": optimizer}
    file = io.BytesIO()
    torch.save({name: each.state_dict() for name, each in held.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_run_that_is_resumed_in_an_epoch_repeats_its_releases():
    options = {"plan": NOISY, "physical_batch_size": 3}
    model, private, optimizer = start(Tied(0.5).double(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    checkpoint = None
    for number in range(2):
        for batch in private.loader:
            private.backward(*batch)
            optimizer.step()
            if private.step == 3 and private.ready:
                checkpoint = saved(private, model, optimizer)
        if number == 0:
            scheduler.step()
    again, resumed, optimizer = start(Tied(0.5).double(), **options, key=secret_key())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    again.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    resumed.load_state_dict(checkpoint["private"])
    assert resumed.step == 3
    epoch(resumed, optimizer)
    assert resumed.step == 5
    scheduler.step()
    epoch(resumed, optimizer)
    oracle.assert_exact(values(again), values(model), tolerance=0)


def test_a_state_goes_on_under_a_plan_with_more_steps_and_no_other():
    _, private, optimizer = start(plan=NOISY)
    epoch(private, optimizer)
    state = private.state_dict()
    longer = start(plan=dataclasses.replace(NOISY, steps=20, delta=1e-4))[1]
    longer.load_state_dict(state)
    assert next(iter(longer.loader))[0].shape == (len(rows(NOISY, 5)[1]), 4)
    with pytest.raises(ValueError, match=r"got one .* another, .* noise_multiplier=1"):
        start()[1].load_state_dict(state)
    shorter = dataclasses.replace(NOISY, steps=4)
    with pytest.raises(ValueError, match="expected at most the 4 steps of the plan"):
        start(plan=shorter)[1].load_state_dict(state)
    with pytest.raises(TypeError, match=r"\(plan\): expected a dictionary"):
        private.load_state_dict({**state, "plan": 3})
    with pytest.raises(ValueError, match=r"step=-1\): expected a whole number"):
        private.load_state_dict({**state, "step": -1})
    with pytest.raises(ValueError, match="expected the plan of a run in 'plan', got"):
        private.load_state_dict({**state, "plan": {"steps": 3}})
    del state["key"]
    message = (
        r"'key', 'step' and 'plan', as state_dict\(\) returns them, got 'plan', 's"
    )
    with pytest.raises(ValueError, match=message):
        private.load_state_dict(state)
    with pytest.raises(ValueError, match=r"got 'bias', 'weight'. The state of a modul"):
        private.load_state_dict(torch.nn.Linear(2, 1).state_dict())


def test_a_state_is_loaded_within_a_pass():
    model, private, _ = start(plan=NOISY)
    state = private.state_dict()
    batches = iter(private.loader)
    private.backward(*next(batches))
    first = grads(model)
    private.load_state_dict(state)
    state["key"].zero_()
    assert not private.ready
    with pytest.raises(RuntimeError, match="expected one pass at a time"):
        next(batches)
    model.zero_grad()
    private.backward(*next(iter(private.loader)))
    oracle.assert_exact(grads(model), first, tolerance=0)


def test_a_state_holds_nothing_but_plain_numbers():
    plan = dataclasses.replace(PLAN, sampling_rate=np.float64(0.2))
    model, private, optimizer = start(plan=plan)
    assert saved(private, model, optimizer)["private"]["plan"] == vars(PLAN)
    private.state_dict()["key"].zero_()
    assert torch.equal(private.key, secret_key(seed=0))


def test_epsilon_is_that_of_the_steps_taken():
    pytest.importorskip("dp_accounting")
    _, private, optimizer = start(plan=NOISY)
    assert private.epsilon() == 0
    epoch(private, optimizer)
    assert private.epsilon() == NOISY.epsilon(5)
    assert list(NOISY.sampler(private)) == [
        rows(NOISY, step)[1] for step in range(5, 10)
    ]


def test_a_budget_makes_the_plan():
    pytest.importorskip("dp_accounting")
    budget = {"epsilon": 2.0, "delta": 1e-3, "max_norm": 1.0}
    budget |= {"epochs": 2, "batch_size": 7}
    private = PrivateGradients(nn.Linear(4, 3), F.cross_entropy, data(), **budget)
    assert private.plan == Plan.for_epsilon(dataset_size=30, **budget)
    assert (private.plan.steps, len(private.loader)) == (8, 4)
    del budget["epochs"]
    with pytest.raises(ValueError, match="a plan in their place, got no epochs"):
        PrivateGradients(nn.Linear(4, 3), F.cross_entropy, data(), **budget)
    with pytest.raises(ValueError, match="a plan in their place, got both"):
        start(epsilon=3.0)


def test_mode_numbers_and_dtype_of_the_module_are_followed():
    model, private, optimizer = start(Tied(0.5))
    model.eval().double()
    batches = iter(private.loader)
    private.backward(*next(batches))
    oracle.assert_exact(grads(model), clipped(model, PLAN, 0))
    optimizer.step()
    model.train()
    model.drop.p = 0.0
    private.backward(*next(batches))
    oracle.assert_exact(grads(model), clipped(model, PLAN, 1))
    optimizer.step()
    model.drop.p = 1.0
    private.backward(*next(batches))
    assert not model.head.weight.grad.any()
    optimizer.step()
    model.drop.p = 0.0
    model.head.register_forward_hook(lambda module, args, output: 2 * output)
    private.backward(*next(batches))
    oracle.assert_exact(grads(model), clipped(model, PLAN, 3))


def test_each_part_of_a_logical_batch_drops_out_on_its_own():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 3))
    dataset = TensorDataset(torch.ones(30, 64), torch.zeros(30, dtype=torch.int64))
    private = start(model, PLAN, dataset, physical_batch_size=1)[1]
    losses = [
        float(private.backward(*batch)["loss"])
        for batch in islice(private.loader, len(rows(PLAN, 0)[1]))
    ]
    assert len(set(losses)) == len(losses)


def test_a_mode_is_followed_after_a_call_that_was_refused():
    model, private, optimizer = start(Tied(0.5).double())
    batches = iter(private.loader)
    private.backward(*next(batches))
    optimizer.step()
    batch = next(batches)
    model.eval()
    model.head.weight.grad = torch.zeros(3, 4).double()
    with pytest.raises(RuntimeError, match="expected no gradient"):
        private.backward(*batch)
    model.zero_grad()
    private.backward(*batch)
    oracle.assert_exact(grads(model), clipped(model, PLAN, 1))


def test_batch_statistics_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    _, private, _ = start(model.double())
    x, y = next(iter(private.loader))
    with pytest.raises(ValueError, match="replace_batch_norm"):
        private.backward(x, y)
    model.eval()
    private.backward(x, y)
    assert private.ready


def test_several_processes_are_refused(monkeypatch):
    _, private, _ = start()
    batch = next(iter(private.loader))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="expected one process, got 2"):
        private.backward(*batch)


def test_the_key_is_not_shown():
    _, private, _ = start()
    assert "tensor" not in repr(private)


STREAM = SimpleNamespace(__iter__=lambda self: iter(()))
WRONG = {
    "stream": ({"dataset": STREAM}, TypeError, "expected a data set with a length"),
    "loader": (
        {"dataset": DataLoader(data())},
        TypeError,
        "got a DataLoader. Of a DataLoader pass its `.dataset`",
    ),
    "criterion": ({"criterion": 3}, TypeError, "expected a function of output and tar"),
    "no plan": ({"plan": 3}, TypeError, "expected a vgrad.dp.Plan, got a int"),
    "other size": ({"dataset": list(range(29))}, ValueError, "for the 29 samples"),
    **{
        name: ({name: True}, ValueError, rf"\({name}=True\): expected options")
        for name in ("shuffle", "sampler", "batch_sampler", "drop_last", "in_order")
    },
    "physical": ({"physical_batch_size": 0}, ValueError, "physical_batch_size=0"),
    "key": ({"key": 3}, TypeError, "expected a key"),
    "strategy": ({"strategy": "quick"}, ValueError, "strategy='quick'"),
    "frozen": (
        {"model": nn.Linear(2, 2).requires_grad_(False)},
        ValueError,
        "expected a parameter that requires grad, got none",
    ),
    "not a module": ({"model": torch.tanh}, TypeError, "expected a plain torch.nn.Mod"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_at_once(name):
    given, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        PrivateGradients(
            **{
                "model": nn.Linear(4, 3),
                "criterion": F.cross_entropy,
                "dataset": data(),
                "plan": PLAN,
                **given,
            }
        )

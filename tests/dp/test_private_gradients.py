"""Private gradients in a loop of torch, against a loop of plain autograd."""

import dataclasses
import io
import math
from functools import partial
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests import oracle, streams
from tests.dp import runs
from tests.dp.runs import KEY, first, grads
from tests.losses import Net
from vgrad import optim
from vgrad.dp import Plan, PrivateGradients, secret_key
from vgrad.training import TrainState, private_step

PLAN = runs.plan(30, 0.2, 0.5, steps=10)
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


data = partial(runs.data, 30, 4)


def start(model=None, plan=PLAN, dataset=None, momentum=0.9, **options):
    """Make a module, its private gradients, and an optimizer that is watched."""
    model = Tied().double() if model is None else model
    dataset = data() if dataset is None else dataset
    private = runs.private(plan, model, dataset, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    return model, private, private.watch(optimizer)


def epoch(private, optimizer):
    return [(private.backward(*batch), optimizer.step())[0] for batch in private.loader]


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rows(plan, step):
    own = streams.of_plan(KEY.tolist(), dataclasses.asdict(plan))
    return own, streams.batch(own, step, plan.dataset_size, plan.sampling_rate)


def clipped(model, plan, step):
    """What a loop of autograd over the samples of a step gives."""
    drawn = rows(plan, step)[1]
    return runs.mean_of_loop(model, data()[drawn], plan)


@pytest.mark.parametrize("plan", [PLAN, NOISY])
@pytest.mark.parametrize("physical", [None, 1, 4])
def test_steps_are_those_of_a_loop_over_samples_with_the_noise_of_the_key(
    physical, plan
):
    sizes = {"multiplier": plan.noise_multiplier}
    sizes["sensitivity"] = plan.max_norm / plan.expected_batch_size
    # The sum is rounded to a grid of at most 2^-16 deviations.
    most = 2.0**-17 * math.prod(sizes.values()) + 1e-12
    model, private, optimizer = start(plan=plan, physical_batch_size=physical)
    batches = chain(*(private.loader for _ in range(2)))
    for step in range(plan.steps):
        own, drawn = rows(plan, step)
        expected, before = clipped(model, plan, step), values(model)
        size = physical or len(drawn)
        for part in range(0, len(drawn), size):
            assert private.step == step
            private.backward(*next(batches))
            assert private.ready is bool(grads(model)) is (part + size >= len(drawn))
            oracle.assert_exact(values(model), before, tolerance=0)
            optimizer.step()
        assert grads(model).keys() == expected.keys()
        for name, grad in grads(model).items():
            noise = streams.noise(own, step, name, grad.shape, **sizes)
            assert (grad - noise - expected[name]).abs().max() <= most
    assert private.step == plan.steps


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_batch_size": 5},
        {"sampling": "fixed_order", "neighbours": None, "sampling_rate": 8 / 30},
    ],
    ids=str,
)
def test_the_releases_are_those_of_private_step(fields):
    plan = dataclasses.replace(NOISY, **fields)
    model = Tied(dropout=0.5)
    loss, params, buffers = runs.functional(model)
    tx = optim.sgd(0.5)  # a power of two, which is exact in any order
    step = private_step(loss, tx, plan, randomness="different")
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    dataset = data(dtype=torch.float32)
    expected = []
    for indices in plan.sampler(state):
        state, metrics = step(state, *dataset[indices])
        expected.append(metrics)
    _, private, optimizer = start(model, plan, dataset, momentum=0.0)
    found = []
    while private.step < plan.steps:
        found += epoch(private, optimizer)
    oracle.assert_exact(found, expected, tolerance=0)
    params = {name: values(model)[name] for name in params}
    oracle.assert_exact(params, state.params, tolerance=0)


def test_frozen_parameters_get_no_gradient_until_they_are_thawed():
    model, private, optimizer = start()
    batches = iter(private.loader)
    private.backward(*next(batches))
    assert model.head.bias.grad is None
    assert model.head.weight.grad.dtype == torch.float64
    optimizer.step()
    model.head.bias.requires_grad_(True)
    private.backward(*next(batches))
    oracle.assert_exact(grads(model), clipped(model, PLAN, 1))
    assert "head.bias" in grads(model)


def test_an_empty_batch_is_a_step_of_noise():
    model, private, optimizer = start(plan=runs.plan(30, 1e-9, 0.5, 1.5, steps=2))
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
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    options["physical_batch_size"] = physical
    private = runs.private(plan, nn.Linear(1, 3), dataset, F.mse_loss, **options)
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

    model = Net(lambda self, x: {"loss": (self.w * x).sum()}, w=torch.ones(2))
    private = runs.private(PLAN, model, dataset, None, collate_fn=stack)
    batch, drawn = first(private), rows(PLAN, 0)[1]
    private.backward(batch)
    assert batch["x"][:, 0].tolist() == drawn
    expected = sum(min(0.5 / 2**0.5, row) if row else 0 for row in drawn) / 6
    torch.testing.assert_close(model.w.grad, torch.full((2,), expected))


def saved(**objects):
    file = io.BytesIO()
    torch.save({name: each.state_dict() for name, each in objects.items()}, file)
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
                checkpoint = saved(private=private, model=model, optimizer=optimizer)
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


def test_a_state_goes_on_under_a_plan_with_more_steps():
    _, private, optimizer = start(plan=NOISY)
    assert private.epsilon() == 0
    epoch(private, optimizer)
    assert private.epsilon() == NOISY.epsilon(5)
    left = [rows(NOISY, step)[1] for step in range(5, 10)]
    assert list(NOISY.sampler(private)) == left
    longer = start(plan=dataclasses.replace(NOISY, steps=20, delta=1e-4))[1]
    state = private.state_dict()
    longer.load_state_dict(state)
    assert first(longer)[0].shape == (len(left[0]), 4)


def test_a_state_is_loaded_within_a_pass():
    model, private, _ = start(plan=NOISY)
    state = private.state_dict()
    batches = iter(private.loader)
    private.backward(*next(batches))
    expected = grads(model)
    private.load_state_dict(state)
    state["key"].zero_()
    assert not private.ready
    with pytest.raises(RuntimeError, match="expected one pass at a time"):
        next(batches)
    model.zero_grad()
    private.backward(*first(private))
    oracle.assert_exact(grads(model), expected, tolerance=0)


def test_a_state_holds_nothing_but_plain_numbers():
    private = start(plan=dataclasses.replace(PLAN, sampling_rate=np.float64(0.2)))[1]
    assert saved(private=private)["private"]["plan"] == dataclasses.asdict(PLAN)
    private.state_dict()["key"].zero_()
    assert torch.equal(private.key, secret_key(seed=0))


def test_a_budget_makes_the_plan():
    budget = {"epsilon": 2.0, "delta": 1e-3, "max_norm": 1.0}
    budget |= {"epochs": 2, "batch_size": 7}
    private = PrivateGradients(nn.Linear(4, 3), F.cross_entropy, data(), **budget)
    assert private.plan == Plan.for_epsilon(dataset_size=30, **budget)
    assert (private.plan.steps, len(private.loader)) == (8, 4)


def test_mode_numbers_and_dtype_of_the_module_are_followed():
    model, private, optimizer = start(Tied(0.5))
    model.eval().double()
    batches = iter(private.loader)

    def step():
        private.backward(*next(batches))
        found = grads(model)
        optimizer.step()
        return found

    expected = clipped(model, PLAN, 0)
    oracle.assert_exact(step(), expected)
    model.train()
    model.drop.p = 0.0
    expected = clipped(model, PLAN, 1)
    oracle.assert_exact(step(), expected)
    model.drop.p = 1.0
    assert not step()["head.weight"].any()


@pytest.mark.parametrize("wanted", [torch.float32, None])
def test_gradients_have_the_dtype_that_a_parameter_wants(wanted):
    model, private, _ = start()
    for parameter in model.parameters():
        parameter.grad_dtype = wanted
    expected = clipped(model, PLAN, 0)
    private.backward(*next(iter(private.loader)))
    oracle.assert_exact(grads(model), expected, 1e-5)
    kinds = {x.grad.dtype for x in model.parameters() if x.requires_grad}
    assert kinds == {wanted or torch.float64}


def test_each_part_of_a_logical_batch_drops_out_on_its_own():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 3))
    dataset = TensorDataset(torch.ones(30, 64), torch.zeros(30, dtype=torch.int64))
    private = start(model, PLAN, dataset, physical_batch_size=1)[1]
    losses = [
        float(private.backward(*batch)["loss"])
        for batch in islice(private.loader, len(rows(PLAN, 0)[1]))
    ]
    assert len(set(losses)) == len(losses)


def test_batch_statistics_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    _, private, _ = start(model.double())
    batch = first(private)
    with pytest.raises(ValueError, match="replace_batch_norm"):
        private.backward(*batch)
    model.eval()
    private.backward(*batch)
    assert private.ready

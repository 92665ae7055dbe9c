"""Calls that are refused where they are made, and the messages that say why."""

import dataclasses
import math
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import vgrad
from tests.dp import runs
from tests.losses import product
from tests.tables import rows
from vgrad import Sensitivity, dp, optim
from vgrad.dp import (
    Plan,
    PoissonBatchSampler,
    PrivateGradients,
    add_gaussian_noise,
    collate,
    epsilon,
    noise_multiplier_for,
    sampling,
    secret_key,
)
from vgrad.training import TrainState, private_step, train_step

KEY = runs.KEY
PLAN = runs.plan(105, 0.1, 3.0, 2.0, steps=20, delta=1e-4)
BEFORE = runs.plan(60, 0.5, 1.0, 0.5, steps=5)
AFTER = runs.plan(60, 0.05, 1.0, 4.0, steps=10)
SPENT = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000, "delta": 1e-5}
BUDGET = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.5, "steps": 20}
NOISE = {"sums": {}, "sensitivity": Sensitivity(1.0), "noise_multiplier": 1.0}
NOISE |= {"key": KEY, "step": 0}
LINEAR, FROZEN = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
OTHER = torch.optim.SGD(LINEAR.parameters())
DRAW = {"dataset_size": 10, "sampling_rate": 0.5, "key": KEY}
DRAW_7 = DRAW | {"key": 7}
RATES = (0.0, -0.1, 1.1, math.nan)
RANGES = [
    (Plan, asdict(PLAN), {
        "dataset_size": (0, 10.0), "sampling_rate": (0.0, 1.0001), "delta": (0.0, 1.0),
        "noise_multiplier": (-0.1, math.inf), "max_norm": (0.0, math.inf, math.nan),
        "steps": (0, 1.5), "accountant": ("gdp", []),
        "sampling": ("once", ["poisson"])}),
    (PLAN.epsilon, {}, {"steps": (21, -1, 2.0, True)}),
    (epsilon, SPENT, {
        "sampling_rate": (0.0, 1.5), "noise_multiplier": (-1.0, math.inf),
        "steps": (-1, 1.5, 10**400), "delta": (0.0, 1.0), "accountant": ("gdp",)}),
    (noise_multiplier_for, BUDGET, {
        "epsilon": (0.0, math.inf), "delta": (1.0,), "sampling_rate": (0,),
        "steps": (0, 10**400), "accountant": ("gdp",)}),
    (sampling.poisson_sample, DRAW | {"step": 0}, {
        "sampling_rate": RATES, "dataset_size": (0, 2.0), "step": (-1,)}),
    (PoissonBatchSampler, DRAW | {"steps": 1}, {
        "sampling_rate": RATES, "dataset_size": (0, 2.0), "steps": (0,),
        "start": (-1,)}),
    (add_gaussian_noise, NOISE, {
        "noise_multiplier": (-1.0, math.nan, math.inf), "step": (-1, 1.5, True),
        "member": (-1, 1.5, True)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "usual", "name", "value"),
    [
        (function, usual, name, value)
        for function, usual, wrong in RANGES
        for name, values in wrong.items()
        for value in values
    ],
)
def test_numbers_out_of_range_are_refused(function, usual, name, value):
    among = ".*expected one of 'pld', 'rdp'" if name == "accountant" else ""
    with pytest.raises(ValueError, match=rf"{function.__name__}\({name}={among}"):
        function(**usual | {name: value})


def of_epsilon(**drawn):
    return Plan.for_epsilon(1.0, dataset_size=105, max_norm=1.0, delta=1e-4, **drawn)


def noised(value):
    return PLAN.add_noise({}, Sensitivity(value), key=KEY, step=0)


def added(**changed):
    return add_gaussian_noise(**NOISE | changed)


def data(size=30):
    return TensorDataset(torch.ones(size, 4), torch.arange(size) % 3)


def private(**changed):
    given = {"model": nn.Linear(4, 3), "criterion": F.cross_entropy}
    given |= {"dataset": data(), "plan": runs.plan(30, 0.2)} | changed
    return PrivateGradients(**given)


def loaded(**changed):
    run = private()
    run.load_state_dict(run.state_dict() | changed)


def guessed(high=40, low=40, **changed):
    given = {"included": torch.ones(high), "excluded": torch.zeros(low)}
    return dp.audit.one_run(**{**given, "guesses": (1, 1), "delta": 0} | changed)


def step_of_stacked():
    state = TrainState.create(optim.sgd(0.1), {"w": torch.zeros(8)}, {}, seed=1)
    state = state._replace(plan_digest=torch.stack([state.plan_digest] * 2))
    private_step(product, optim.sgd(0.1), BEFORE)(state, torch.ones(3, 8))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


WHOLE, LOADER = TensorDataset(torch.ones(4)), DataLoader(data())
BYTES = bytes(range(32))
FAR = BEFORE, 3
KEYS = r"key\): expected a key as vgrad\.dp\.secret_key\(\) draws one, or .*, got a "
# A call, and a pattern of what is said.
VALUES = r"""
    of_epsilon() | steps=None, batch_size=None, epochs=None\): expected either sampling_
    of_epsilon(sampling_rate=0.1, epochs=3) | steps=None, batch_size=None, epochs=3\): e
    of_epsilon(batch_size=10, epochs=3, steps=3) | steps=3, batch_size=10, epochs=3\): e
    of_epsilon(batch_size=106, epochs=3) | \(batch_size=106\): expected at most the 105
    of_epsilon(batch_size=10.0, epochs=3) | \(batch_size=10.0\): expected a whole
    of_epsilon(batch_size=10, epochs=0) | \(epochs=0\): expected a whole number >= 1
    noised(3.0) | max_norm / expected_batch_size = 0\.2857.*, got 3.0. Clip with
    noised(3.0 / 11) | max_norm / expected_batch_size = 0\.2857.*, got 0.27
    noised(3.0 / 10.5 * (1 + 1e-8)) | expected_batch_size = 0\.2857.*, got 0.28571428857
    noised(math.inf) | Plan.add_noise.*expected a finite sensitivity
    added(sensitivity=Sensitivity(math.inf)) | add_gaussian_noise.*expected a finite sen
    added(sensitivity=Sensitivity(1e-290)) | expected a standard deviation .*got 1e-290
    added(sensitivity=Sensitivity(1e290)) | expected a standard deviation .*got 1e\+290
    AFTER.after(BEFORE, 6) | steps=6\): expected at most the 5 steps of
    AFTER.after(*FAR).after(*FAR) | got one that follows another already
    replace(AFTER.after(*FAR), steps=3) | Plan\(steps=3, .*more than the 3 steps
    step_of_stacked() | plan_digest of uint8 \(32,\), got .*\(2, 32
    PoissonBatchSampler(100, 0.5, 3, key=KEY, start=4) | start=4, steps=3\): expected a
    noise_multiplier_for(epsilon=1.0, delta=1e-17, sampling_rate=0.5, steps=10) \
        | \(epsilon=1.0, delta=1e-17, sampling_rate=0.5, steps=10, .*some noise multipli
    noise_multiplier_for(epsilon=1.0, delta=0.05, sampling_rate=0.01, steps=2) \
        | delta=0.05, .*expected delta below 0.0199, the probability
    epsilon(sampling_rate=0.01, noise_multiplier=1e5, steps=10**12, delta=1e-3) \
        | epsilon\(steps=1000000000000, accountant="pld"\): .*accountant="rdp"
    private(dataset=list(range(29))) | for the 29 samples
    private(shuffle=True) | \(shuffle=True\): expected options of a DataLoader that do
    private(sampler=True) | \(sampler=True\): expected options
    private(batch_sampler=True) | \(batch_sampler=True\): expected options
    private(drop_last=True) | \(drop_last=True\): expected options
    private(in_order=True) | \(in_order=True\): expected options
    private(physical_batch_size=0) | physical_batch_size=0
    private(strategy="quick") | strategy='quick'
    private(model=FROZEN) | expected a parameter that requires grad, got none
    private(epsilon=3.0) | a plan in their place, got both
    private(plan=None, epsilon=2.0, delta=1e-3, max_norm=1.0, batch_size=7) \
        | a plan in their place, got no epochs
    loaded(step=2, plan=asdict(runs.plan(30, 0.2, noise=1.0))) \
        | load_state_dict\(state\): .* spent under another, .* noise_multiplier=1\.0
    loaded(step=5, plan=asdict(runs.plan(30, 0.2, steps=5))) | at most the 4 steps of
    loaded(step=-1) | load_state_dict\(state\)\(step=-1\): expected a whole number
    loaded(plan=3) | load_state_dict\(state\): expected the plan of a run in
    loaded(plan={"steps": 3}) | load_state_dict\(state\): expected the plan of a run in
    loaded(plan=dict(asdict(PLAN), discrete=True)) | Plan\(discrete=True\): exp.*Tra
    loaded(plan=dict(asdict(PLAN), rows={"threshold": 4.0})) \
        | expected the plan of a run in .plan., .*rows
    loaded(more=1) | 'step', 'plan' and 'route', as state_dict\(\) .*, got 'key', 'more'
    private().load_state_dict(LINEAR.state_dict()) | got 'bias', 'weight'. The state of
    private().watch(OTHER) | expected one of the module's own parameters
    dp.quantile_clip(quantile=-0.1) | quantile >= 0
    dp.quantile_clip(quantile=1.1) | at most 1
    dp.quantile_clip(rate=0) | rate > 0
    dp.quantile_clip(start=math.inf) | start=inf
    dp.quantile_clip(start=5, upper=4) | start between
    dp.quantile_clip(start=5, lower=6) | start between
    dp.quantile_clip(count_deviation=0.0) | count_deviation > 0
    dp.quantile_clip(lower=1e-31) | lower
    dp.quantile_clip(upper=1e31) | upper
    dp.quantile_clip().gradient_multiplier(1.0, 10.0) | multiplier < 2 .*Raise count_dev
    dp.group_clip({}) | a bound for a pattern
    dp.group_clip({"*": 0.0}) | bounds\['\*'\]=0.0
    dp.group_clip({"*": math.inf}) | bounds\['\*'\]=inf
    dp.group_clip({"*": 1.0}, deviations={"a": 1.0}) | 'a'
    dp.group_clip({"*": 1.0}, deviations="best") | 'equal'
    dp.group_clip({"a": 1, "b": 1}, deviations={"a": 1e-20, "b": 1e20}) \
        | norm \* deviations\['b'\]
    dp.Units([]) | got none
    dp.Units([[1], []]) | got one without
    dp.Units([1, 2], most_owners=1) | Leave most_owners out
    dp.Units([[1]], most_owners=0) | most_owners=0
    guessed(90, 3) | took part by fair coins, got 90 and 3. Draw a coin
    guessed(guesses=(50, 31)) | as many as the 80 scores, got 81
    guessed(guesses=(0, 0)) | got 0
    guessed(guesses=(-1, 5)) | guesses\[0\]=-1\): expected a whole number
    guessed(delta=1) | delta=1
    guessed(significance=0.6) | significance=0.6
    guessed(excluded=torch.zeros(40) / 0) | none of them NaN
    guessed(included=torch.ones(1, 40)) | in one dimension
    guessed(delta=1e-5).epsilon(1e-6) | expected delta=1e-05, at which the bound
    dp.audit.gaussian(torch.ones(29), torch.zeros(40)) | 30 scores .*got 29 and 40
"""
TYPES = r"""
    replace(PLAN, max_norm="1") | Plan\(max_norm='1'\): expected a number
    replace(AFTER, before=2.0) | Plan\(before\): expected a Plan, got a float
    AFTER.after(BEFORE.digest, 3) | Plan.after\(other\): .*got a Tensor
    PLAN.sampler(KEY) | Plan.sampler\(state\): expected a state with a key .*a Tensor
    PLAN.add_noise({}, 3.0 / 10.5, key=KEY, step=0) \
        | Plan.add_noise\(sensitivity=0.2857.*clipped_grad\(\.\.\.\)\.sensitivity
    added(sensitivity=1.0) | sensitivity=1.0\).*clipped_grad\(\.\.\.\)\.sensitivity
    added(sums={"a": torch.zeros(2).long()}) | sums\['a'\]\): expected .* torch.int64
    added(sums={"a": torch.zeros(2) + 0j}) | sums\['a'\]\): expected .* torch.complex64
    collate(WHOLE, lambda samples: ["name"] * len(samples)) \
        | one row for one sample, got a str. .* leave out names
    collate(WHOLE, lambda samples: torch.tensor(1.0)) | sample, got a .*float32 \(\)
    collate(WHOLE, lambda samples: torch.ones(7)) | sample, got a .*float32 \(7,\)
    private(dataset=Stream()) | expected a data set with a length .*got a Stream
    private(dataset=LOADER) | got a DataLoader. Of a DataLoader pass its `.dataset`
    private(criterion=3) | expected a function of output and tar
    private(plan=3) | expected a Plan, got a int
    private(model=torch.tanh) | expected a plain torch.nn.Mod
    private(max_grad_norm=1.0) | \(max_grad_norm=...\): expected .*docs/from_opacus.md
    private().watch(LINEAR) | expected a torch.optim.Optimizer, got a Line
    dp.group_clip(1.0) | a dictionary of bounds
    dp.group_clip({"*": "1"}) | expected a number
    dp.group_clip({1: 1.0}) | patterns that are strings
    dp.Units([1.5]) | got a float
    dp.Units([True]) | got a bool
"""
# No message shows a key in another form.
SECRET_KEYS = r"""
    added(key=torch.zeros(32)) | tensor of torch\.float32 \(32,\)\.$
    added(key=torch.zeros(16).byte()) | tensor of torch\.uint8 \(16,\)\.$
    added(key=BYTES) | bytes\.$
    added(key=torch.tensor(list(BYTES))) | tensor of torch\.int64 \(32,\)\.$
    sampling.poisson_sample(**DRAW_7, step=0) | int
    PoissonBatchSampler(**DRAW_7, steps=1) | int
    private(key=3) | int
"""
REFUSED = [(ValueError, *row) for row in rows(VALUES)]
REFUSED += [(TypeError, *row) for row in rows(TYPES)]
REFUSED += [(TypeError, call, KEYS + kind) for call, kind in rows(SECRET_KEYS)]


@pytest.mark.parametrize(("error", "call", "message"), REFUSED)
def test_bad_calls_are_refused(error, call, message):
    with pytest.raises(error, match=message):
        eval(call, globals())


SECRET = 123456.75
SECRETS = ("123456", "1.2346e+05", "1.23457e+05", "1234567")


@pytest.mark.parametrize(
    "call",
    [
        lambda data: collate(data, lambda samples: default_collate(samples * 2)),
        lambda data: collate(data, lambda samples: (samples, SECRET)),
        lambda data: collate(data, partial(default_collate, hidden=data[:])),
        lambda data: private(dataset=data, batch_sampler=data[0]),
        lambda data: PLAN.sample(key=KEY, step=data[0][0]),
        lambda data: PLAN.epsilon(data[:3][1]),
        lambda data: Plan(data[0][0].numpy(), 0.5, 1.0, 1.0, 4, 1e-3),
        lambda data: added(sums={"w": data[0][0]}, sensitivity={"w": data[0][0]}),
        lambda data: added(noise_multiplier=data[0][1], sensitivity=[data[0][1]]),
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


def test_a_missing_library_says_how_to_get_it(monkeypatch):
    for name in ("dp_accounting", "scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (partial(epsilon, **SPENT), partial(noise_multiplier_for, **BUDGET)):
        with pytest.raises(ImportError, match=r'pip install "vgrad\[dp\]"'):
            call()


def test_a_delta_above_one_over_the_samples_warns():
    with pytest.warns(UserWarning, match="at most 1 / dataset_size = 0.00952, got mor"):
        replace(PLAN, delta=0.01)
    replace(PLAN, delta=1 / 105)


def test_a_plan_cannot_be_changed_and_no_key_is_shown():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.noise_multiplier = 0.0
    assert "tensor" not in repr(private(key=secret_key()))


class Rotated(nn.Module):
    """A model with a complex parameter, or with its real view."""

    def __init__(self, real):
        super().__init__()
        w = torch.tensor([0.5 + 1j, -1 + 0.2j, 0.3j, 1.0])
        self.w = nn.Parameter(torch.view_as_real(w).clone() if real else w)

    def forward(self, x):
        w = self.w if self.w.is_complex() else torch.view_as_complex(self.w)
        return torch.view_as_real((x * w).cumsum(-1)[..., 1:].sum(-1))


@pytest.mark.parametrize("discrete", [False, "sum"])
@pytest.mark.parametrize("kind", ["private_step", "PrivateGradients"])
def test_complex_parameters_are_trained_as_real_views(kind, discrete):
    noise = 0.5 if discrete else 0.0
    plan = runs.plan(30, 0.5, noise=noise, discrete=discrete)
    x, y = data()[:10]

    def step(model):
        if kind == "private_step":
            loss, params, buffers = runs.functional(model)
            tx = optim.sgd(1.0)
            state = TrainState.create(tx, params, buffers)
            new, _ = private_step(loss, tx, plan)(state, x * 2, y % 2)
            return state.params["w"] - new.params["w"]
        run = runs.private(
            plan, model, TensorDataset(data()[:][0] * 2, data()[:][1] % 2)
        )
        run.backward(*runs.first(run))
        return model.w.grad

    with pytest.raises(
        TypeError, match=r"real parameters, got .*\['w'\]. Train .*as_real"
    ):
        step(Rotated(real=False))
    found = step(Rotated(real=True))
    if kind == "private_step" and discrete is False:
        loss, params, buffers = runs.functional(Rotated(real=False))
        clipped = vgrad.clipped_grad(loss, max_norm=1.0, normalize_by=15.0)
        right = clipped(params, buffers, x * 2, y % 2).grads["w"]
        assert torch.allclose(torch.view_as_complex(found), right, atol=1e-6)

"""Random numbers of private steps: one state and batch have one sum, and one noise."""

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.dp import runs
from tests.examples import examples
from vgrad import distributed, dp, optim
from vgrad.dp import noising
from vgrad.training import TrainState, private_step

KEY = dp.secret_key(seed=4)
PLAN = dp.Plan(30, 0.5, 1.0, 0.5, 3, 1e-3)
SGD = optim.sgd(1.0)


class Net(nn.Module):
    """Dropout, noise in the loss, dropout of attention, or between recurrent layers."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.body = kind, nn.Linear(6, 6)
        if kind == "recurrent":
            self.body = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
        elif kind == "attention":
            self.body = nn.MultiheadAttention(3, 1, dropout=0.4, batch_first=True)
        elif kind == "transformer":
            self.body = nn.TransformerEncoderLayer(3, 1, 4, 0.4, batch_first=True)
        self.head = nn.Linear({"recurrent": 8}.get(kind, 6), 3)

    def forward(self, x):
        parts, kind = x.view(-1, 2, 3), self.kind
        if kind == "recurrent":
            return self.head(self.body(parts)[0].flatten(1))
        if kind == "attention":
            return self.head(self.body(parts, parts, parts)[0].flatten(1))
        if kind == "transformer":
            return self.head(self.body(parts).flatten(1))
        if kind == "dropout":
            x = F.dropout(torch.tanh(self.body(F.dropout(x, 0.2))), 0.5)
        elif kind == "transposed":
            x = torch.tanh(self.body(F.dropout(x.view(-1, 2, 3).mT, 0.5).flatten(1)))
        elif kind == "uniform":
            x = torch.tanh(self.body(x)) * torch.rand_like(x)
        elif kind == "normal":
            x = torch.tanh(self.body(x + torch.randn_like(x)))
            x = x + torch.normal(0.0, 1.0, x.shape[1:], dtype=x.dtype)
        elif kind == "bernoulli":
            x = self.body(x) * torch.bernoulli(torch.sigmoid(x.detach()))
        elif kind == "gamma":
            x = self.body(x * torch._standard_gamma(x.detach().abs() + 1))
        return self.head(x)


KINDS = ["dropout", "uniform", "normal", "bernoulli", "attention", "recurrent"]
KINDS += ["transformer", "transposed"]


def first_step(loss, params, buffers, *, make=lambda step: step, plan=PLAN, **options):
    """Return the gradients of the first step, with their noise, by their update."""
    step = make(private_step(loss, SGD, plan, **{"randomness": "different"} | options))
    state = TrainState.create(SGD, params, buffers)._replace(key=KEY)
    batch = runs.data(30)[next(iter(plan.sampler(state)))]
    new, _ = step(state, *batch)
    if step.reports():  # it was captured
        new, _ = step(state, *batch)
    return {name: params[name] - new.params[name] for name in params}


def released(kind, **options):
    return first_step(*runs.functional(Net(kind).double()), **options)


def of_module(kind, **options):
    """Return the same of a module, whose batch may be split."""
    model = Net(kind).double()
    private = runs.private(PLAN, model, runs.data(30), key=KEY, **options)
    for batch in private.loader:
        private.backward(*batch)
        if private.ready:
            break
    return {n: p.detach() - (p.detach() - p.grad) for n, p in model.named_parameters()}


def same(found, expected):
    # Noise is rounded to a grid, on which other sums of float64 are the same numbers.
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


ALONE = [("bernoulli", "same")]
"""Numbers that all samples share depend on none of them: the loss runs in a loop."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_releases_the_same_bits(kind, randomness):
    draws = {"randomness": randomness}
    expected = released(kind, **draws)
    same(released(kind, chunk_size=4, **draws), expected)
    same(released(kind, strategy="loop", **draws), expected)
    same(of_module(kind, **draws), expected)
    same(of_module(kind, physical_batch_size=5, **draws), expected)
    if (kind, randomness) not in ALONE:
        same(released(kind, strategy="vmap", **draws), expected)
        same(released(kind, passes=2, **draws), expected)


@pytest.mark.slow
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_release_the_same_bits(kind, randomness):
    if (kind, randomness) in ALONE:
        pytest.skip("runs in a loop")
    expected = released(kind, randomness=randomness)
    for options in ({"strategy": "vmap"}, {"chunk_size": 4}):
        make = partial(vgrad.compile, fallback="error")
        found = released(kind, randomness=randomness, make=make, **options)
        same(found, expected)


@pytest.mark.slow
def test_compiled_code_draws_the_same_numbers():
    make = partial(vgrad.compile, backend="inductor", fallback="error")
    found = released("normal", make=make)
    oracle.assert_exact(found, released("normal"), 1e-6)


@examples(10)
@given(
    st.sampled_from(["dropout", "uniform", "attention"]),
    st.sampled_from(losses.STRATEGIES),
    st.integers(1, 16),
    st.integers(1, 16),
)
def test_any_split_releases_the_same_bits(kind, strategy, size, chunk_size):
    options = {"strategy": strategy, "chunk_size": chunk_size}
    found = of_module(kind, physical_batch_size=size, **options)
    same(found, released(kind))


def test_samples_and_steps_draw_their_own_numbers():
    def loss(params, buffers, x, y):
        return (F.dropout(torch.ones(200), 0.5) * params["w"]).sum()

    params = {"w": torch.ones(200)}
    for randomness, count in (("different", 200), ("same", 2)):
        plan = dp.Plan(30, 0.5, 0.0, 1e3, 2, 1e-3)
        step = private_step(loss, SGD, plan, randomness=randomness)
        state, kept = TrainState.create(SGD, params, {})._replace(key=KEY), []
        for _ in range(2):
            new, _ = step(state, *runs.data(30)[:8])
            kept.append(state.params["w"] - new.params["w"])
            state = new
        assert not torch.equal(*kept)
        assert all(count / 30 < len(each.unique()) <= count for each in kept)


OWN = torch.Generator()


def own(*shape):
    return torch.rand(*shape, generator=OWN)


REFUSED = {
    "a generator of its own": lambda w: own(400) * w + own(400) * w.square(),
    "draws of a backward pass": lambda w: losses.Noisy.apply(losses.Noisy.apply(w)),
    "Python's generator": lambda w: w * random.random(),
    "numpy's generator": lambda w: w * torch.from_numpy(np.random.rand(400)),
}
EXPECTED = "expected draws from torch's default generators"


def of_refused(program, seed=1, **options):
    """Return the first step along a loss that keys refuse, from seeded generators."""

    def loss(params, buffers, x, y):
        return REFUSED[program](params["w"]).sum()

    OWN.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return first_step(loss, {"w": torch.ones(400).double()}, {}, **options)["w"]


def differ(found, expected):
    # Both have independent noise, far above the sums.
    return 1.2 < (found - expected).std() / PLAN.deviation(0) < 1.7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", REFUSED)
def test_other_sums_have_other_noise_where_keys_refuse_a_loss(program):
    expected = of_refused(program)
    assert torch.equal(of_refused(program), expected)
    assert differ(of_refused(program, chunk_size=1), expected)
    assert differ(of_refused(program, strategy="loop"), expected)
    if "backward" not in program:  # states of generators that no step restores
        assert differ(of_refused(program, make=vgrad.compile), expected)
        assert differ(of_refused(program, seed=2), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_a_generator_of_the_loss_is_refused_where_random_numbers_are(strategy):
    options = {"strategy": strategy, "randomness": "error"}
    with pytest.raises(RuntimeError, match="expected a loss without random numbers"):
        of_refused("a generator of its own", **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", REFUSED)
def test_such_a_loss_has_no_correlated_noise_and_no_ranks(program):
    others = {"sampling": "fixed_order", "noise": noising.bisr(2), "neighbours": None}
    plan = dataclasses.replace(PLAN, **others)
    with pytest.raises(RuntimeError, match=EXPECTED):
        of_refused(program, plan=plan)
    with distributed.single_process_mesh("dp") as mesh:
        make = partial(distributed.data_parallel, mesh=mesh)
        with pytest.raises(RuntimeError, match=EXPECTED):
            of_refused(program, make=make)


def test_one_part_that_keys_refuse_decides_on_the_noise_of_a_module():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(400).double())

        def forward(self, x):
            scale = own(1) if x[0, 0] > 1 else 1.0
            return (self.w * scale * x[0, 0]).sum()[None]

    def gradient(size, seed):
        model, options = Drawing(), {"physical_batch_size": size, "key": KEY}
        run = runs.private(PLAN, model, runs.data(30), lambda o, y: o.sum(), **options)
        OWN.manual_seed(seed)
        for batch in run.loader:
            run.backward(*batch)
            if run.ready:
                return model.w.grad

    expected = gradient(4, 1)
    assert torch.equal(gradient(4, 1), expected)
    assert differ(gradient(4, 2), expected)


def test_a_loss_that_begins_to_draw_by_a_generator_is_noticed():
    turn = [0]

    def loss(params, buffers, x, y):
        turn[0] += 1
        return params["w"].sum() * (own(1)[0] if turn[0] > 3 else 1.0)

    params, found = {"w": torch.ones(400).double()}, []
    step = private_step(loss, SGD, PLAN, randomness="different", verify=False)
    state = TrainState.create(SGD, params, {})._replace(key=KEY)
    for _ in range(5):
        found.append(step(state, *runs.data(30)[:8])[0].params["w"])
    assert torch.equal(found[1], found[0])
    assert differ(found[4], found[0])


@pytest.mark.parametrize(
    ("run", "name"),
    [(released, "private_step"), (of_module, "PrivateGradients.backward")],
)
def test_errors_name_the_function_of_the_user(run, name):
    message = rf"^{name}: expected a loss without random numbers"
    with pytest.raises(RuntimeError, match=message):
        run("dropout", randomness="error")

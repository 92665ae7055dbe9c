"""Bounds that follow a quantile of norms, against TF Privacy's numbers."""

import json
import math
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle, streams
from tests.dp import runs
from tests.dp.runs import KEY
from tests.losses import every_strategy
from vgrad import clipped_grad, optim
from vgrad.dp import adaptive, quantile_clip
from vgrad.training import TrainState, load, private_step, save

EXPECTED = 2.0
"""Records of a step in TF's tests."""


def fraction(clip, bound, norms, expected=EXPECTED):
    """Return the part of norms below a bound, from a sum without noise."""
    counted = sum(0.5 if norm <= bound else -0.5 for norm in norms)
    return clip.fraction(torch.tensor(counted, dtype=torch.float64), expected)


# tensorflow/privacy 03035d5, quantile_adaptive_clip_sum_query_test.py.
ARITHMETIC = {
    "test_adaptation_target_zero": (10, 0, (8.5, 7.25), (9, 8, 7.5, 7, 7)),
    "test_adaptation_target_one": (0, 1, (1.5, 2.75), (1, 2, 2.5, 3, 3)),
}
GEOMETRIC = {
    "test_adaptation_target_zero_geometric": (
        *(16, 0, (5, 2.5)),
        (8, 4, 4 / math.sqrt(2), 2, 2),
    ),
    "test_adaptation_target_one_geometric": (
        *(0.5, 1, (1.5, 3)),
        (1, 2, 2 * math.sqrt(2), 4, 4),
    ),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_fractions_are_tfs(name):
    bound, quantile, norms, expected = ARITHMETIC[name]
    for right in expected:
        bound -= float(fraction(quantile_clip(), bound, norms)) - quantile
        assert bound == right


@pytest.mark.parametrize("name", GEOMETRIC)
def test_geometric_bounds_are_tfs(name):
    start, quantile, norms, expected = GEOMETRIC[name]
    clip = quantile_clip(quantile=quantile, rate=math.log(2), start=start)
    bound = torch.tensor(clip.start, dtype=torch.float64)
    for right in expected:
        bound = clip.after(bound, fraction(clip, bound, norms))
        assert bound.item() == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("start", [1.0, 10.0])
def test_the_bound_finds_the_median_as_tfs_does(start):
    """`test_adaptation_linspace`: within 0.25 of 5 after 40 steps."""
    norms = [number / 2 for number in range(21)]
    clip = quantile_clip(rate=1.0, start=start)
    bound = torch.tensor(start, dtype=torch.float64)
    for step in range(50):
        bound = clip.after(bound, fraction(clip, bound, norms, 21))
        if step > 40:
            assert abs(bound - 5) <= 0.25


def test_fractions_and_bounds_stay_between_their_ends():
    clip = quantile_clip(rate=1.0, start=2.0, lower=1.5, upper=3.0)
    counts = torch.tensor([-50.0, 0.0, 50.0], dtype=torch.float64)
    fractions = clip.fraction(counts, 10.0)
    assert fractions.tolist() == [0, 0.5, 1]
    start = torch.tensor(2.0, dtype=torch.float64)
    assert clip.after(start, fractions).tolist() == [3.0, 2.0, 1.5]


@pytest.mark.parametrize("multiplier", [0.0, 0.5, 1.0, 7.9])
def test_both_releases_together_have_the_multiplier_of_the_plan(multiplier):
    """Andrew et al., 1905.03871: z^-2 = z_g^-2 + (2 s_b)^-2."""
    clip = quantile_clip(count_deviation=4.0)
    own = clip.gradient_multiplier(multiplier, 100)
    if multiplier == 0:
        assert own == 0
        return
    # Gradients move by C and the count by 1/2, in deviations of each.
    assert math.hypot(1 / own, 0.5 / 4.0) == pytest.approx(1 / multiplier, rel=1e-12)


def test_the_count_has_a_twentieth_of_the_batch_by_default():
    assert quantile_clip().deviation(500.0) == 25
    assert quantile_clip(count_deviation=3).deviation(500.0) == 3


def test_a_clip_is_numbers_alone():
    clip = quantile_clip(quantile=0, start=2, count_deviation=7)
    again = adaptive.QuantileClip(**json.loads(json.dumps(asdict(clip))))
    assert again == clip == quantile_clip(quantile=0.0, start=2.0, count_deviation=7.0)
    assert adaptive.QuantileClip.of(asdict(clip)) == clip
    assert adaptive.QuantileClip.of({**clip.identity}) == clip
    assert [*clip.identity][-2:] == ["least", "most"]  # of plans that are saved


# A bound that is a tensor.


def clip_case(dtype=torch.float32):
    """Return a loss and tensors, of which some samples are large, tiny or infinite."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x = torch.randn(9, 6, dtype=dtype)
    x[1] *= 1e-12
    x[2] *= 1e17
    x[3] = torch.inf
    return *runs.functional(model, F.mse_loss), x, 2 * x[:, :3]


def tensor(number):
    return torch.tensor(number, dtype=torch.float64)


@every_strategy
@pytest.mark.parametrize(
    ("bound", "dtype"),
    [
        *((1e-8, torch.float32), (0.1, torch.float64)),
        *((3.7, torch.float32), (1e8, torch.float64)),
    ],
)
def test_a_tensor_bounds_as_the_number_does(bound, dtype, strategy):
    loss, *call = clip_case(dtype)
    for options in ({}, {"passes": 2}, {"chunk_size": 2}):
        options |= {"strategy": strategy, "normalize_by": 7.0}
        expected = clipped_grad(loss, max_norm=bound, **options)
        # The number does not count.
        found = clipped_grad(loss, max_norm=2.0, **options).with_max_norm(tensor(bound))
        # A number is divided by norms as the product with their reciprocals.
        rounding = 4 * torch.finfo(dtype).eps
        oracle.assert_exact(found(*call), expected(*call), tolerance=rounding)
        assert found.sensitivity.value == expected.sensitivity.value


def test_one_sample_never_adds_more_than_the_tensor():
    loss, params, buffers, x, y = clip_case()
    for bound in (1e-6, 0.3, 11.0):
        clipped = clipped_grad(loss, max_norm=1.0).with_max_norm(tensor(bound))
        for row in range(len(x)):
            sums = clipped(params, buffers, x[row : row + 1], y[row : row + 1]).grads
            total = torch.cat([each.double().flatten() for each in sums.values()])
            assert total.norm() <= bound * (1 + 1e-6)


@pytest.mark.parametrize(
    ("chunk_size", "batch_sizes", "calls"),
    [(None, None, 2), (None, [12], 2), (3, None, 8), (3, [6], 11)],
)
def test_one_graph_takes_every_bound(chunk_size, batch_sizes, calls):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    loss, params, buffers = runs.functional(model, F.mse_loss)
    call = params, buffers, torch.randn(9, 6), torch.randn(9, 3)
    plain = clipped_grad(loss, max_norm=1.0, chunk_size=chunk_size)
    compiled = vgrad.compile(plain, backend="replay", batch_sizes=batch_sizes)
    for bound in (0.1, 0.2, 5.0):
        expected = clipped_grad(loss, max_norm=bound)(*call)
        found = compiled.with_max_norm(tensor(bound))(*call)
        oracle.assert_exact(found.grads, expected.grads, tolerance=1e-6)
        assert found.clipped == expected.clipped
    [report] = compiled.reports()
    assert (report.backend, report.redos) == ("replay", 0)
    assert report.calls == calls


def test_other_bounds_and_clippings_are_refused():
    loss, *_ = clip_case()
    flat = clipped_grad(loss, max_norm=1.0)
    for wrong in (1.0, torch.tensor(1.0), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"without dimensions in float64.*A number"
        ):
            flat.with_max_norm(wrong)
    for kind in ("per_layer", "automatic"):
        other = clipped_grad(loss, max_norm=1.0, clipping=kind)
        with pytest.raises(ValueError, match=r'expected clipping="flat"'):
            other.with_max_norm(tensor(1.0))


# Steps whose bound adapts.

CLIP = quantile_clip(quantile=0.4, rate=0.7, start=0.3, count_deviation=2.0)
PLAN = runs.plan(30, 0.5, CLIP, noise=1.3, steps=8)
NOISELESS = runs.plan(30, 0.5, CLIP, noise=0.0, steps=8)


data, net = partial(runs.data, 30, 4), partial(runs.net, 4, 5)


def start_state(tx=None):
    loss, params, buffers = runs.functional(net())
    tx = tx or optim.sgd(0.25)
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    return loss, tx, state


def batches_of(plan, state):
    return [data()[rows] for rows in plan.sampler(state)]


def count_noise(plan, step):
    """Return the noise on a count, from a stream of its own."""
    own = streams.digest(plan._subkey(KEY).tolist(), ("count",), 32)
    sizes = {"multiplier": 2 * CLIP.count_deviation, "sensitivity": 0.5}
    return float(streams.noise(own, step, "count", (), **sizes))


def by_hand(plan, batches, lr=0.25):
    """Yield parameters and bounds of a run, by plain autograd and the paper."""
    model, bound = net(), CLIP.start
    z = plan.noise_multiplier
    own_z = (z**-2 - (2 * CLIP.count_deviation) ** -2) ** -0.5 if z else 0.0
    for step, batch in enumerate(batches):
        found = oracle.model_gradients(model, runs.loss, batch, len(batch[0]))
        norms, mean = oracle.norms(found), runs.mean(found, plan, bound)
        for name, parameter in model.named_parameters():
            grad = mean[name]
            if z:
                own = plan._subkey(KEY).tolist()
                sizes = {"multiplier": own_z, "sensitivity": bound / 15}
                grad = grad + streams.noise(
                    own, step, name, grad.shape, **sizes, tags=["unit"]
                )
            parameter.data -= lr * grad
        b = sum(0.5 if norm <= bound else -0.5 for norm in norms.tolist())
        b = round((b + count_noise(plan, step)) / GRID) * GRID
        b = b / plan.expected_batch_size + 0.5
        bound *= math.exp(-CLIP.rate * (min(max(b, 0), 1) - CLIP.quantile))
        yield {n: p.detach().clone() for n, p in model.named_parameters()}, bound


GRID = 2.0**-15
"""The grid of a count's noise: 2^-16 of its deviation."""


@pytest.mark.parametrize("noise", [0.0, 1.3])
def test_a_step_clips_to_the_bound_that_the_step_before_has_left(noise):
    plan = replace(PLAN, noise_multiplier=noise)
    loss, tx, state = start_state()
    batches = batches_of(plan, state)
    step = private_step(loss, tx, plan)
    assert state.max_norm == ()
    bounds, rounding = [], 1e-4 if noise else 1e-9
    for batch, (params, bound) in zip(batches, by_hand(plan, batches), strict=True):
        state, _ = step(state, *batch)
        assert state.max_norm.item() == pytest.approx(bound, rel=1e-9)
        oracle.assert_exact(state.params, params, tolerance=rounding)
        bounds.append(bound)
    assert len({*bounds}) == len(bounds)  # it moves at every step


@pytest.mark.parametrize("damaged", [math.nan, math.inf, 1e40, 0.0, -1.0])
def test_a_damaged_bound_is_brought_between_both_ends(damaged):
    plan = replace(PLAN, max_norm=replace(CLIP, lower=0.01, upper=2.0))
    loss, tx, state = start_state()
    first, second, *_ = batches_of(plan, state)
    step = private_step(loss, tx, plan)
    state, _ = step(state, *first)
    found = state._replace(max_norm=torch.tensor(damaged, dtype=torch.float64))
    after, _ = step(found, *second)
    end = 2.0 if damaged > 2 else 0.01
    expected = step(
        found._replace(max_norm=torch.full_like(found.max_norm, end)), *second
    )
    assert torch.equal(after.max_norm, expected[0].max_norm)
    oracle.assert_exact(after.params, expected[0].params, tolerance=0)


@pytest.mark.parametrize("size", [0, 10])
def test_an_empty_batch_moves_the_bound_and_samples_that_are_not_finite_are_large(size):
    """The true size is no divisor: Opacus divides by zero."""
    loss, tx, state = start_state()
    x, y = data().tensors
    state, metrics = private_step(loss, tx, NOISELESS)(
        state, torch.full_like(x[:size], torch.inf), y[:size]
    )
    assert metrics["nonfinite"] == size
    b = count_noise(NOISELESS, 0) - size / 2
    b = min(max(b / NOISELESS.expected_batch_size + 0.5, 0), 1)
    expected = CLIP.start * math.exp(-CLIP.rate * (b - CLIP.quantile))
    assert state.max_norm.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("physical", [None, 1, 4])
def test_private_gradients_have_the_bounds_of_private_step(physical):
    loss, tx, state = start_state()
    step, model = private_step(loss, tx, PLAN), net()
    private = runs.private(PLAN, model, data(), physical_batch_size=physical)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for batch in batches_of(PLAN, state):
        assert private.step == state.step
        if state.step:
            oracle.assert_exact(private.max_norm, state.max_norm)
        while private.step == state.step:
            for part in private.loader:
                private.backward(*part)
                if private.ready:
                    break
        optimizer.step()
        state, _ = step(state, *batch)
        found = {name: p.detach() for name, p in model.named_parameters()}
        oracle.assert_exact(found, state.params)


def test_a_run_goes_on_with_its_bound(tmp_path):
    loss, tx, start = start_state()
    step, state, states = private_step(loss, tx, PLAN), start, []
    batches = batches_of(PLAN, start)
    for batch in batches:
        states.append(state)
        state, _ = step(state, *batch)
    save(tmp_path / "run", states[3])
    again = load(tmp_path / "run", start)
    oracle.assert_exact(again.max_norm, states[3].max_norm, tolerance=0)
    for batch in batches[3:]:
        again, _ = step(again, *batch)
    oracle.assert_exact(again.params, state.params, tolerance=0)
    oracle.assert_exact(again.max_norm, state.max_norm, tolerance=0)
    with pytest.raises(ValueError, match="got one without"):
        step(states[3]._replace(max_norm=()), *batches[3])
    # In a loop of torch, too.
    private = runs.private(PLAN, net(), data())
    private.backward(*runs.first(private))
    kept = private.state_dict()
    kept["plan"] = json.loads(json.dumps(kept["plan"]))
    other = runs.private(PLAN, net(), data())
    other.load_state_dict(kept)
    oracle.assert_exact(other.max_norm, private.max_norm, tolerance=0)
    del kept["max_norm"]
    with pytest.raises(ValueError, match="got one without"):
        other.load_state_dict(kept)


def test_a_plan_after_another_starts_with_its_own_bound():
    loss, tx, state = start_state()
    batch = data()[:10]
    state, _ = private_step(loss, tx, PLAN)(state, *batch)
    other = runs.plan(30, 0.5, quantile_clip(start=2.5), noise=1.0, steps=3)
    then = other.after(PLAN, 1)
    after, _ = private_step(loss, tx, then)(state, *batch)
    fraction = after.max_norm.log() - math.log(2.5)
    assert abs(fraction) <= 0.2 * 0.5 + 1e-9
    fixed = runs.plan(30, 0.5, 0.7, noise=1.0, steps=3).after(PLAN, 1)
    after, _ = private_step(loss, tx, fixed)(state, *batch)
    assert after.max_norm == ()


@pytest.mark.parametrize(
    "backend", ["replay", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_captured_step_needs_one_graph_for_all_bounds(backend):
    plan = runs.plan(30, 0.5, CLIP, noise=1.3, steps=8, max_batch_size=20)
    loss, tx, state = start_state()
    plain = private_step(loss, tx, plan)
    compiled = vgrad.compile(private_step(loss, tx, plan), backend=backend)
    ours = theirs = state
    for batch in batches_of(plan, state):
        ours, _ = compiled(ours, *batch)
        theirs, _ = plain(theirs, *batch)
        oracle.assert_exact(ours.max_norm, theirs.max_norm, tolerance=1e-9)
        oracle.assert_exact(ours.params, theirs.params, tolerance=1e-4)
    names = [report.name for report in compiled.reports()]
    assert len(names) == len({*names}) == 2, compiled.explain(state)
    assert all(report.redos == 0 for report in compiled.reports())
    assert {report.backend for report in compiled.reports()} == {backend}


def test_the_noise_of_the_sum_has_the_larger_multiplier():
    """Both releases have the deviations that the account is for, at another bound."""
    plan = runs.plan(30, 0.5, CLIP, noise=1.3, steps=8)
    bound = tensor(0.8)
    clipped = clipped_grad(lambda p, b, x: p["w"] @ x, max_norm=1.0, normalize_by=15.0)
    sensitivity = clipped.with_max_norm(bound).sensitivity
    sums = {"w": torch.zeros(20_000)}
    place = {"key": KEY, "step": 3, "max_norm": bound}
    noise = plan.add_noise(sums, sensitivity, **place)["w"]
    expected = CLIP.gradient_multiplier(1.3, 15.0) * 0.8 / 15
    assert noise.std().item() == pytest.approx(expected, rel=0.02)
    drawn = torch.tensor([count_noise(plan, step) for step in range(800)])
    assert drawn.std().item() == pytest.approx(CLIP.count_deviation, rel=0.1)


def test_the_epsilon_is_that_of_one_gaussian_of_the_plan():
    fixed = runs.plan(30, 0.5, 0.3, noise=1.3, steps=8)
    assert PLAN.epsilon() == fixed.epsilon()
    assert not torch.equal(PLAN.digest, fixed.digest)
    assert not torch.equal(PLAN.sample(key=KEY, step=0), fixed.sample(key=KEY, step=0))


def test_sums_of_other_bounds_get_no_noise():
    bound = tensor(0.8)
    clipped = clipped_grad(lambda p, b, x: p["w"] @ x, max_norm=0.3, normalize_by=15.0)
    sums, place = {"w": torch.zeros(3)}, {"key": KEY, "step": 3}
    good = clipped.with_max_norm(bound).sensitivity
    PLAN.add_noise(sums, good, **place, max_norm=bound)
    divided = clipped_grad(lambda p, b, x: p["w"] @ x, max_norm=0.3)
    for sensitivity, max_norm in (
        (clipped.sensitivity, bound),
        (good, None),
        (good, tensor(0.7)),
        (divided.with_max_norm(bound).sensitivity, bound),
    ):
        with pytest.raises(ValueError, match=r"clipped to the max_norm of a state"):
            PLAN.add_noise(sums, sensitivity, **place, max_norm=max_norm)


def test_a_private_run_finds_the_median_of_its_norms():
    loss, tx, state = start_state(optim.sgd(0.0))
    clip = quantile_clip(start=20.0, count_deviation=3.0)
    plan = runs.plan(30, 1.0, clip, noise=1.0, steps=60)
    step = private_step(loss, tx, plan)
    batch = data().tensors
    found = oracle.model_gradients(net(), runs.loss, batch, 30)
    for _ in range(60):
        state, _ = step(state, *batch)
    norms = oracle.norms(found)
    below = (norms <= state.max_norm).double().mean()
    assert 0.3 < below < 0.7

"""Bounds from scores of canaries, and audits of steps, true ones and broken ones."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.dp import (
    Plan,
    PrivateGradients,
    audit,
    canaries,
    group_clip,
    noising,
    quantile_clip,
    secret_key,
)
from vgrad.factors import Sums
from vgrad.training import TrainState, private_step, train_step

SLOW = pytest.mark.slow


def normal_scores(shift, count):
    """Quantiles of a normal distribution, as the tests of JAX-Privacy take them."""
    places = np.linspace(0, 1, count, endpoint=False) + 1 / (2 * count)
    return norm.ppf(places) + shift


TABLE = {
    1: [(2.307, 2.561), (2.389, 2.554), (2.237, 2.324), (2.051, 2.105), (1.781, 1.814)],
    2: [(3.438, 4.139), (4.139, 4.837), (4.620, 5.041), (4.534, 4.755), (4.136, 4.244)],
    4: [(3.438, 4.139), (4.139, 4.837), (5.061, 5.755), (5.755, 6.449), (6.449, 7.143)],
}
"""Of formula (1) of arXiv 2305.08846 in NumPy: guesses in alone, and in and out."""


@pytest.mark.parametrize("shift", TABLE)
def test_one_run_has_the_numbers_of_the_formula(shift):
    scores = normal_scores(shift, 10_000), normal_scores(0, 10_000)
    for k, expected in zip((100, 200, 500, 1000, 2000), TABLE[shift], strict=True):
        for guesses, value in zip(((k, 0), (k, k)), expected, strict=True):
            bound = audit.one_run(*scores, guesses=guesses, delta=1e-6)
            assert bound.value == pytest.approx(value, abs=6e-4)
            assert bound.value <= bound.ceiling
            assert (bound.included, bound.excluded, bound.delta) == (10**4, 10**4, 1e-6)
            assert any("fair coin" in each for each in bound.assumes)
            # The truth is epsilon of the Gaussian mechanism.
            assert bound.value < audit.gaussian(*scores).epsilon(1e-6)


def hull_bound(method, shift):
    """The largest bound over the hull of the curve of errors, whose size divides."""
    high, low = normal_scores(shift, 10_000), normal_scores(0, 10_000)
    thresholds = np.append(np.unique(np.concatenate([high, low])), np.inf)
    missed, right = np.searchsorted(high, thresholds), np.searchsorted(low, thresholds)
    hull = []
    for point in zip(right, missed, strict=True):
        while len(hull) > 1:
            (a, b), (c, d) = hull[-2:]
            if (c - a) * (point[1] - b) - (d - b) * (point[0] - a) > 0:
                break
            hull.pop()
        hull.append(point)
    best = 0.0
    counts = [(int(20_000 - out - lost), int(10_000 - lost)) for out, lost in hull]
    for guessed, right in sorted(counts, key=lambda each: -each[1] / max(each[0], 1)):
        # Guesses that are right as often as under the best bound show no more.
        if guessed and right / guessed > 1 / (1 + math.exp(-best)):
            given = {"guesses": (guessed, 0), "significance": 0.05 / len(hull)}
            best = max(best, method(high, low, delta=1e-6, **given).value)
    return best, len(hull)


@pytest.mark.parametrize(
    ("shift", "vertices", "one_run", "one_run_fdp"),
    [
        (0, 2, 0, 0),
        pytest.param(4, 140, 4.395568, 9.133752, marks=SLOW),
    ],
)
def test_over_a_hull_they_have_the_numbers_of_jax_privacy(
    shift, vertices, one_run, one_run_fdp
):
    """`auditing_test.py::test_epsilon_one_run_close`; the sizes are our own."""
    expected = pytest.approx(one_run, rel=1e-5), vertices
    assert hull_bound(audit.one_run, shift) == expected
    expected = pytest.approx(one_run_fdp, rel=1e-5), vertices
    assert hull_bound(audit.one_run_fdp, shift) == expected


@pytest.mark.parametrize("delta", [0.0, 0.01])
def test_the_p_value_holds_for_a_mechanism_that_spends_all(delta):
    """Of randomized response that shows everything with probability delta."""
    epsilon, count, generator = 1.0, 200, np.random.default_rng(0)
    above, runs = 0, 400
    for _ in range(runs):
        coins = generator.random(count) < 0.5
        truth = generator.random(count) < 1 / (1 + math.exp(-epsilon))
        scores = np.where(truth, coins, ~coins).astype(float)
        shown = generator.random(count) < delta
        scores[shown] = np.where(coins[shown], 2.0, -1.0)
        scores += 1e-3 * generator.random(count)  # no ties
        bound = audit.one_run(
            scores[coins], scores[~coins], guesses=(40, 40), delta=delta
        )
        above += bound.value > epsilon
    assert above <= 0.05 * runs + 3 * math.sqrt(0.05 * runs)
    assert delta or above > 0


def test_equal_scores_and_no_right_guess_show_nothing():
    same = torch.zeros(100)
    bound = audit.one_run(same, same, guesses=(50, 50), delta=1e-5)
    assert (bound.value, bound.correct, bound.guessed) == (0.0, 0, 100)
    assert audit.one_run_fdp(same, same, guesses=(50, 50), delta=1e-5).value == 0.0
    assert audit.gaussian(same, same).value == 0.0
    assert audit.gaussian(same + 1, same).value == math.inf
    assert audit.clopper_pearson(same, same, threshold=0.0).value == 0.0


def test_guesses_are_the_ends_of_all_scores():
    bound = audit.one_run([3, 1, 0], [2, -1, -2], guesses=(3, 2), delta=0)
    assert (bound.guessed, bound.correct) == (5, 4)
    assert audit.one_run([5, 4], [3, 2], guesses=(2, 2), delta=0).correct == 4
    assert audit.one_run([2, 1], [4, 3], guesses=(4, 0), delta=0).correct == 2


def test_clopper_pearson_has_the_numbers_of_its_formula():
    """TF-Privacy, `epsilon_lower_bound_test.py`; JAX-Privacy, `auditing_test.py`."""
    sure = audit.clopper_pearson(
        np.ones(500), np.zeros(500), threshold=0.5, significance=0.01
    )
    assert sure.value == sure.ceiling == pytest.approx(4.54, abs=5e-3)
    assert any("independent" in each for each in sure.assumes)
    high, low = normal_scores(1, 300), normal_scores(0, 450)
    for threshold in (-1.0, 0.5, 2.0):
        bound = audit.clopper_pearson(
            high, low, threshold=threshold, significance=0.1, delta=0.01
        )
        errors = (high < threshold).sum(), (low >= threshold).sum()
        limits = [
            beta.ppf(0.95, k + 1, n - k)
            for k, n in zip(errors, (300, 450), strict=True)
        ]
        expected = math.log((0.99 - limits[0]) / limits[1])
        assert bound.value == pytest.approx(max(0, expected))
    assert audit.clopper_pearson([0.0], [0.0], threshold=0.5).value == 0


@pytest.mark.parametrize("mu", [0.0, 0.5, 3.0])
def test_gaussian_is_above_the_truth_as_often_as_it_says(mu):
    generator, runs = np.random.default_rng(1), 2000
    high = generator.normal(mu, 1, (runs, 200))
    low = generator.normal(0, 1, (runs, 180))
    bounds = [
        audit.gaussian(*each, significance=0.05).value
        for each in zip(high, low, strict=True)
    ]
    above = sum(bound > mu for bound in bounds)
    assert above == pytest.approx(0.05 * runs, abs=4 * math.sqrt(0.05 * runs))
    assert max(mu - 0.5, 0) <= np.median(bounds) <= mu


def test_a_bound_of_mu_is_one_of_epsilon():
    bound = audit.gaussian(normal_scores(1, 10**5), normal_scores(0, 10**5))
    assert any("Gaussian" in each for each in bound.assumes)
    expected = dp_accounting.get_epsilon_gaussian(1 / bound.value, 1e-5)
    assert bound.epsilon(1e-5) == pytest.approx(expected)
    assert audit.gaussian(torch.ones(40), torch.zeros(40)).epsilon(1e-5) == math.inf
    bound = audit.one_run([3.0] * 50, [0.0] * 50, guesses=(40, 40), delta=1e-5)
    assert bound.epsilon(1e-5) == bound.value


def test_a_bound_of_mu_needs_many_scores():
    assert audit.gaussian(torch.arange(30.0) + 99, torch.arange(30.0)).value > 0


# Audits of steps.


def digits_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def digits_plan(mu, **fields):
    """A claim of mu for the first two steps that an audit compares."""
    fields = {"max_norm": 0.7, "steps": 300, "delta": 1e-4} | fields
    plan = Plan(1200, 0.1, math.sqrt(2) / mu, **fields)
    if not plan.noise.correlated:
        return plan
    *_, claim = canaries.signal(plan.mechanism)  # participations make it less
    noise = plan.noise_multiplier * claim / mu
    return dataclasses.replace(plan, noise_multiplier=noise)


def digits_step(plan, *, route=lambda step: step, tx=None, **options):
    """The private step of a small model of digits, and a state."""
    fmodel, params, buffers = vgrad.make_functional_with_buffers(digits_net())
    loss, tx = vgrad.sample_loss(fmodel, F.cross_entropy), tx or optim.adamw(1e-3)
    step = route(private_step(loss, tx, plan, **options))
    return step, TrainState.create(tx, params, buffers, seed=1)


def audited(*, seed=0, batch=None, plan=None, **options):
    """Audit it with 1,200 canaries, at significance 0.01 and a claim of 0.5."""
    plan = digits_plan(0.5, **(plan or {}))
    step, state = digits_step(plan, **options)
    _, optimizer = step.tx.update(uneven(state.params), state.optimizer, state.params)
    given = {"canaries": 1200, "significance": 0.01, "seed": seed, "batch": batch}
    return plan.audit(step, state._replace(optimizer=optimizer), **given)


def uneven(params):
    """Gradients with entries of several sizes."""
    return {n: torch.arange(1.0, x.numel() + 1).view_as(x) for n, x in params.items()}


DATA = torch.eye(100, 64), torch.arange(100) % 10

GROUPS = group_clip(
    {"*.weight": 0.7, "*.bias": 2.0}, deviations={"*.weight": 1.0, "*.bias": 9.0}
)

PLANS = {
    "band_mf": {"noise": noising.band_mf(4)},
    "blt": {"noise": noising.blt(2)},
    "a bound that adapts": {"max_norm": quantile_clip(start=0.7)},
    "groups": {"max_norm": GROUPS},
    "largest batch": {"max_batch_size": 200},
    "units": {"samples_per_unit": 2},
    "integers": {"discrete": "sum"},
    "replaced samples": {"neighbours": "replace_one"},
}

ROUTES = {
    "eager": {},
    "compiled": {"route": vgrad.compile},
    "two passes": {"passes": 2, "chunk_size": 50},
    "vmap": {"strategy": "vmap", "chunk_size": "auto"},
    "loop": {"strategy": "loop"},
    "float16": {"policy": "mixed_float16"},
    "donated": {"donate": True},
    "scaled": {"tx": optim.scale_then_privatize(optim.adam(1e-3), eps=0.01)},
    "with samples": {"batch": DATA},
    **{name: {"plan": fields} for name, fields in PLANS.items()},
}


@pytest.mark.parametrize(
    "route",
    [pytest.param(n, marks=[SLOW] * (n in ("compiled", "loop"))) for n in ROUTES],
)
def test_a_true_step_stands_by_any_route_and_plan(route):
    result = audited(**ROUTES[route])
    assert result.claimed_mu == pytest.approx(0.5)
    assert 0.15 < result.mu.value < 0.5
    assert 0.1 < result.epsilon.value < result.claimed_epsilon
    assert not result.exceeded
    assert result.private == (route == "with samples")
    # Guesses show little at a delta of more.
    assert result.epsilon.delta == 0.01 / 1200 < 1e-4
    # The scores are distributed as claimed.
    for scores, mean in ((result.included, 0.5), (result.excluded, 0.0)):
        assert float(scores.mean()) == pytest.approx(mean, abs=0.15)
        assert float(scores.std()) == pytest.approx(1.0, abs=0.1)
    assert len(result.included) + len(result.excluded) == 1200
    assert "it stands at significance 0.01" in str(result)


@pytest.mark.large
def test_true_steps_exceed_the_claim_as_rarely_as_it_says():
    above = sum(audited(seed=seed).exceeded for seed in range(200))
    assert above <= 7  # by chance in one of 1,000 tests


def half_the_noise(monkeypatch):
    def half(*arguments, **numbers):
        noise = gaussian_noise(*arguments, **numbers)
        return dataclasses.replace(noise, deviation=noise.deviation / 2)

    gaussian_noise = vgrad.dp.plan.gaussian_noise
    monkeypatch.setattr("vgrad.dp.plan.gaussian_noise", half)


def no_division(monkeypatch):
    monkeypatch.setattr(Sums, "divide", lambda self, number: None)


def replayed_noise(monkeypatch):
    def one_step_back(*arguments, **options):
        state = load(*arguments, **options)
        return state._replace(step=state.step - 1)

    def one_step_back_in_a_loop(self):
        state = state_dict(self)
        return {**state, "step": state["step"] - 1}

    load, state_dict = vgrad.training.load, PrivateGradients.state_dict
    monkeypatch.setattr("vgrad.training.saved.load", one_step_back)
    monkeypatch.setattr(PrivateGradients, "state_dict", one_step_back_in_a_loop)


def one_parameter_through(monkeypatch):
    def columns(self, factors):
        weights = of_collector(self, factors)
        return weights | {"2.weight": torch.ones_like(weights["2.weight"])}

    of_collector = vgrad.persample.clipped._ClipCollector._columns
    monkeypatch.setattr("vgrad.persample.clipped._ClipCollector._columns", columns)


LIKE_OTHERS = "largest batch", "replaced samples"
"""Plans whose sums are those of plain ones."""

FAULTS = [half_the_noise, no_division, replayed_noise, one_parameter_through]
FAULTY = list(itertools.product(FAULTS, ["eager", "scaled", "with samples"]))
FAULTY += [(no_division, name) for name in PLANS if name not in ("blt", *LIKE_OTHERS)]
FAULTY += [pytest.param(plant, "compiled", marks=SLOW) for plant in FAULTS]


@pytest.mark.parametrize(("plant", "route"), FAULTY)
def test_a_planted_fault_exceeds_the_claim(plant, route, monkeypatch):
    plant(monkeypatch)
    result = audited(**ROUTES[route])
    assert result.exceeded
    assert result.mu.value > 0.6 > result.claimed_mu
    assert "it is exceeded" in str(result)


def test_scales_change_no_scores():
    """Directions are those of the gradients that are clipped."""
    plain, scaled = audited(), audited(**ROUTES["scaled"])
    torch.testing.assert_close(plain.included, scaled.included, atol=1e-3, rtol=0)
    torch.testing.assert_close(plain.excluded, scaled.excluded, atol=1e-3, rtol=0)


def test_an_audit_changes_nothing_and_runs_graphs_of_its_own(monkeypatch):
    calls, result = [], vgrad.compiled.backends.result

    def counted(run, graph, tensors):
        calls.append(graph)
        return result(run, graph, tensors)

    monkeypatch.setattr("vgrad.compiled.backends.result", counted)
    plan = digits_plan(0.5)
    step, state = digits_step(plan, route=vgrad.compile)
    batch = DATA[0][:9], DATA[1][:9]
    before = step(state, *batch)
    captures = step.reports()
    copies = {name: value.clone() for name, value in state.params.items()}
    calls.clear()
    plan.audit(step, state, canaries=240)
    # Of two steps: the clipped sum and the optimizer, captured or not before.
    assert len(calls) >= 4
    assert_exact(state.params, copies, 0)
    assert int(state.step) == 0
    assert step.reports() == captures
    assert_exact(step(state, *batch), before, 0)
    later = before[0]._replace(step=torch.tensor(299))
    assert not plan.audit(step, later, canaries=300, significance=1e-6).exceeded


def test_directions_are_nearly_orthogonal_and_of_all_kinds():
    _, state = digits_step(digits_plan(0.5))
    key, other = secret_key(seed=3), secret_key(seed=4)
    made = canaries.Canaries(state.params, 256, key)
    rows, loss = torch.arange(3, 256), made.loss(None, has_aux=False)
    batch = made.batch(rows, 0.7, None)
    grads = vgrad.per_sample_grad(loss)(state.params, {}, *batch)
    flat = torch.cat([each.flatten(1) for each in grads.values()], 1)
    norms = flat.norm(dim=1)
    torch.testing.assert_close(norms, 0.7 * made.norms[rows].float())
    directions = flat / norms[:, None]
    noise = {name: torch.randn_like(x) for name, x in state.params.items()}
    products = directions @ torch.cat([x.flatten() for x in noise.values()])
    scores = made.scores(rows, noise).float()
    torch.testing.assert_close(scores, products, atol=1e-5, rtol=0)
    products = (directions @ directions.T).fill_diagonal_(0)
    assert products.square().mean() < 0.03 / 2410  # of random ones 1 / 2410
    assert products.mean().abs() < 0.2 / 2410
    within = torch.stack([each.flatten(1).abs().sum(1) > 0 for each in grads.values()])
    one = made.groups["of one parameter"][rows]
    assert (within.sum(0) == torch.where(one, 1, 4)).all()
    assert 90 < int(made.coins.sum()) < 166
    assert all(80 < int((made.norms == bound).sum()) < 90 for bound in (1, 10, 10_000))
    coins = canaries.Canaries(state.params, 256, other).coins
    assert not torch.equal(made.coins, coins)
    assert "tensor" not in repr(made)


def test_directions_reach_the_bounds_of_all_groups():
    _, state = digits_step(digits_plan(0.5))
    units = GROUPS.scales(state.params), GROUPS.densities(state.params)
    made = canaries.Canaries(state.params, 12, secret_key(seed=3), *units)
    bounds = {"max_norm": GROUPS.bounds, "clipping": "per_layer"}
    clipped = vgrad.clipped_grad(made.loss(None, has_aux=False), **bounds)
    for row in torch.arange(12)[made.groups["of all parameters"]].split(1):
        batch = made.batch(row, GROUPS.norm, None)
        grads = clipped(state.params, {}, *batch).grads
        assert made.scores(row, grads).item() == pytest.approx(GROUPS.norm)


def test_a_small_model_takes_many_canaries():
    """In rounds of half as many as there are parameters."""
    plan = digits_plan(1.0)
    loss = lambda params, buffers, x: (params["w"] * x).sum()  # noqa: E731
    step = private_step(loss, optim.sgd(0.1), plan)
    state = TrainState.create(optim.sgd(0.1), {"w": torch.zeros(40)}, {})
    result = plan.audit(step, state, canaries=600, significance=0.01, seed=0)
    assert not result.exceeded
    assert 0.6 < result.mu.value < 1
    assert float(result.included.std()) == pytest.approx(1, abs=0.1)


def test_the_picture_shows_scores_and_bounds(monkeypatch):
    result = audited()
    scores, bounds = result.plot().axes
    assert len(scores.patches) == 80  # of histograms
    peaks = [x[y.argmax()] for x, y in (line.get_data() for line in scores.lines)]
    assert peaks == pytest.approx([result.claimed_mu, 0], abs=0.05)
    assert [bar.get_width() for bar in bounds.patches][::-1] == [
        bound.value for bound in result.groups.values()
    ]
    no_division(monkeypatch)
    assert audited().plot().axes[1].get_xscale() == "symlog"


def test_coins_and_noise_have_keys_of_their_own():
    """The same seed gives the same audit, and another one shares nothing with it."""
    first, again, other = (audited(seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.included, again.included)
    assert first.included.shape != other.included.shape
    assert "tensor" not in repr(first)


def test_a_plan_that_follows_another_is_audited_from_its_start():
    plan = digits_plan(0.5)
    then = dataclasses.replace(plan, noise_multiplier=4.0).after(plan, 7)
    options = {"canaries": 400, "significance": 1e-6}
    result = then.audit(*digits_step(then), **options)
    assert result.claimed_mu == pytest.approx(math.sqrt(2) / 4)
    assert not result.exceeded


@pytest.mark.parametrize(
    "scheme", [noising.band_mf(3), noising.bisr(2), noising.blt(2)]
)
def test_the_claim_with_correlated_noise_is_a_gaussian_mechanism(scheme):
    """Simulated: noise of steps is C^-1 Z, and a canary has its signs or is out."""
    plan = Plan(1200, 0.1, 2.0, 0.7, 40, 1e-4, noise=scheme)
    signs, weights, mu = canaries.signal(plan.mechanism)
    steps, fitted = len(signs), plan.fitted
    assert (signs[0], signs[-1], abs(signs).sum()) == (1, -1, 2)
    rows = np.arange(steps)
    inverse = np.where(
        rows[:, None] < rows, 0, fitted.inverse(steps)[rows[:, None] - rows]
    )
    draws = np.random.default_rng(0).normal(0, 1, (steps, 10**5))
    noise = 2.0 * fitted.sensitivity() * inverse @ draws
    deviations = [plan.deviation(step) * 120 / 0.7 for step in range(steps)]
    assert noise.std(1) == pytest.approx(deviations, rel=0.01)
    out = weights @ noise
    assert out.std() == pytest.approx(1, rel=0.01)
    assert weights @ signs == pytest.approx(mu)
    # No test of the steps is better than that, and separated steps have no larger mu.
    best = signs @ np.linalg.inv(np.cov(noise)) @ signs
    assert mu**2 == pytest.approx(best, rel=0.02)
    assert mu <= math.sqrt(2) / 2 + 1e-9 or plan.sampling == "fixed_order"


LOSS = lambda params, buffers, x: x.sum()  # noqa: E731


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"steps": 1}, {}, "two steps at least, .* and 1 steps"),
        ({"noise_multiplier": 0.0}, {}, "noise_multiplier of 0.0"),
        ({}, {"canaries": 50}, "canaries=50.*expected a whole number"),
        ({}, {"significance": 0.5}, "significance=0.5"),
        (
            {"noise": noising.band_mf(3), "sampling": None, "neighbours": None},
            {"batch": (torch.ones(5, 64),)},
            "expected independent noise, .* 'band_mf'",
        ),
    ],
)
def test_audits_that_show_nothing_are_refused(changes, options, message):
    plan = dataclasses.replace(digits_plan(0.5), **changes)
    with pytest.raises(ValueError, match=message):
        plan.audit(*digits_step(plan), **{"canaries": 200} | options)


@pytest.mark.parametrize("kind", ["another plan", "no plan", "nothing"])
def test_steps_of_another_plan_are_refused(kind):
    plan = digits_plan(0.5)
    step, state = digits_step(plan)
    plain = train_step(LOSS, optim.sgd(0.1))
    step = {"another plan": step, "no plan": plain, "nothing": None}[kind]
    other = dataclasses.replace(plan, noise_multiplier=9.0)
    with pytest.raises(TypeError, match=f"with this plan, .* {type(step).__name__}"):
        other.audit(step, state, canaries=200)


def digits_loop(plan=None, **options):
    """Private gradients of a module, at a claim of 0.5 for two steps."""
    data = TensorDataset(torch.randn(1200, 64), torch.randint(0, 10, (1200,)))
    plan = digits_plan(0.5, **(plan or {}))
    return PrivateGradients(digits_net(), F.cross_entropy, data, plan=plan, **options)


LOOPS = {
    "batches": {},
    "parts": {"physical_batch_size": 37, "chunk_size": 20},
    "parts of integers": {"physical_batch_size": 37, "plan": {"discrete": "sum"}},
    "a bound that adapts": {"plan": {"max_norm": quantile_clip(start=0.7)}},
    "groups": {"plan": {"max_norm": GROUPS}},
    "correlated noise": {"plan": {"noise": noising.band_mf(3)}},
    "units": {"plan": {"samples_per_unit": 2}, "units": torch.arange(1200)},
}


@pytest.mark.parametrize("kind", LOOPS)
def test_the_releases_of_a_loop_are_audited(kind):
    private = digits_loop(**LOOPS[kind])
    batch = next(iter(private.loader))
    before = {name: x.clone() for name, x in private.model.named_parameters()}
    result = private.audit(canaries=1200, significance=0.01, seed=3)
    assert result.claimed_mu == pytest.approx(0.5)
    assert 0.15 < result.mu.value < 0.5
    assert not result.exceeded
    assert_exact(dict(private.model.named_parameters()), before, 0)
    assert all(x.grad is None for x in private.model.parameters())
    private.backward(*batch)  # the audit has taken no step
    assert private.step == ("physical_batch_size" not in LOOPS[kind])


@pytest.mark.parametrize("plant", FAULTS)
def test_a_fault_planted_in_a_loop_exceeds_the_claim(plant, monkeypatch):
    plant(monkeypatch)
    private = digits_loop(physical_batch_size=50)
    result = private.audit(canaries=1200, significance=0.01, seed=3)
    assert result.exceeded
    assert result.mu.value > 0.6

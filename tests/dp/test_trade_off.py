"""Bounds of the power of attacks, against closed forms and against attacks."""

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from tests.dp import runs
from tests.dp.test_accounting import gaussian_delta
from vgrad.dp import Plan, accounting, noising, quantile_clip

RATES = [1e-9, 1e-6, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
IN_ORDER = {"sampling": "fixed_order"}
REPLACED = {"neighbours": "replace_one"}
FEW = {"dataset_size": 100, "max_norm": 1.0, "delta": 1e-5}


def correlated(scheme, steps=41, **others):
    return Plan(
        sampling_rate=0.1, noise_multiplier=2.0, steps=steps, noise=scheme, **FEW
    )


@pytest.mark.parametrize(
    ("plan", "mu"),
    [
        (runs.plan(100, 1.0, noise=2.0, steps=9), 1.5),
        (runs.plan(100, 1.0, noise=2.0, steps=9, **REPLACED), 3.0),
        (runs.plan(100, 0.1, noise=2.0, steps=41, **IN_ORDER), math.sqrt(5) / 2),
        (correlated(noising.blt(2)), 0.5),
        (runs.plan(100, 1.0, noise=0.05, steps=10**4), 2000.0),
        (runs.plan(100, 1.0, noise=1e-200), 2e200),
        (runs.plan(100, 1.0, noise=200.0, steps=1), 0.005),
        (runs.plan(100, 1.0, noise=0.0), math.inf),
    ],
)
def test_without_sampling_the_curve_is_the_one_of_a_gaussian_mechanism(plan, mu):
    assert plan.mu() == pytest.approx(mu, rel=1e-12)
    expected = [float(ndtr(ndtri(rate) + mu)) for rate in RATES]
    assert plan.true_positive_rates(RATES) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mu", [0.01, 0.1, 1.0, 5.0, 20.0])
def test_lines_are_close_above_a_gaussian_mechanism(mu):
    """All samples but one in 10^12 are in a batch, so there is no closed form."""
    bounds = accounting.TradeOff.of([accounting.Steps(1 - 1e-12, 1 / mu, 1)])
    assert bounds.exact is None
    assert mu * (1 - 1e-9) <= bounds.mu() <= 1.003 * mu
    for rate in RATES:
        exact = ndtr(ndtri(rate) + mu)
        assert exact * (1 - 1e-9) <= bounds.power(rate) <= min(1, 1.005 * exact)


def attacks(rate, noise, doublings, width):
    """Yield false and true positive rates of tests on the sum of rounded losses.

    The loss of a step increases with the noisy number, so its rounded values have the
    probabilities of intervals, with a sample and without it. A rounded sum is as good
    as the exact one, but for the rounding, and any test on it is an attack.
    """
    numbers = np.linspace(-9 * noise, 9 * noise + 1, 200_001)
    loss = np.log1p(rate * np.expm1((2 * numbers - 1) / (2 * noise**2)))
    bins = np.arange(math.floor(loss[0] / width), math.ceil(loss[-1] / width) + 1)
    ratios = (np.exp((bins[:-1] + 0.5) * width) - 1 + rate) / rate
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = noise**2 * np.log(np.maximum(ratios, 0)) + 0.5
    cuts = np.concatenate([[-np.inf], cuts, [np.inf]])

    def masses(mean):
        low, high = (cuts[:-1] - mean) / noise, (cuts[1:] - mean) / noise
        return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))

    absent, present = masses(0.0), masses(1.0)
    present = (1 - rate) * absent + rate * present
    for _ in range(doublings):
        absent, present = np.convolve(absent, absent), np.convolve(present, present)
    nothing = np.zeros(1)
    for first, then in ((absent[::-1], present[::-1]), (present, absent)):
        yield tuple(np.cumsum(np.concatenate([nothing, x])) for x in (first, then))


@pytest.mark.parametrize(
    ("rate", "noise", "doublings", "width"),
    [
        (0.1, 1.0, 0, 2e-3),
        (0.1, 1.0, 3, 4e-3),
        (0.5, 2.0, 3, 2e-3),
        (0.02, 0.7, 2, 4e-3),
    ],
)
def test_no_attack_on_sampled_steps_has_more_power_and_some_nearly_has_it(
    rate, noise, doublings, width
):
    plan = runs.plan(1000, rate, noise=noise, steps=2**doublings)
    bounds, best = accounting.TradeOff.of(plan.account(plan.steps)), 0.0
    nearest = dict.fromkeys(RATES, 0.0)
    for false, true in attacks(rate, noise, doublings, width):
        chosen = np.linspace(0, len(false) - 1, 400).astype(int)
        for alpha, power in zip(false[chosen], true[chosen], strict=True):
            assert power <= bounds.power(alpha) * (1 + 1e-9)
        inside = (false >= accounting.LEAST_RATE) & (false <= 0.5)
        gaps = ndtri(true[inside]) - ndtri(false[inside])
        best = max(best, float(gaps.max()))
        for alpha in RATES:  # a coin between two tests is a test
            nearest[alpha] = max(nearest[alpha], np.interp(alpha, false, true))
    assert best <= plan.mu() <= 1.01 * best
    for alpha, power in zip(RATES, plan.true_positive_rates(RATES), strict=True):
        assert nearest[alpha] <= power <= 1.01 * nearest[alpha], alpha


@pytest.mark.parametrize(
    "options",
    [
        {},
        REPLACED,
        {"neighbours": "zero_out"},
        {"max_batch_size": 30},
        {"noise": noising.band_mf(2)},
        {"sampling": "fixed_order", **REPLACED},
        {"neighbours": "fixed_graph", "samples_per_unit": 1},
        {"discrete": "sum"},
        {"accountant": "rdp"},
        {"max_norm": quantile_clip(quantile=0.5)},
    ],
    ids=str,
)
def test_the_curve_of_mu_is_above_the_one_of_the_accountant(options):
    run = {"sampling_rate": 0.2, "noise_multiplier": 1.5, "steps": 20, **FEW}
    plan = Plan(**{**run, **options})
    mu = plan.mu()
    for delta in (1e-7, 1e-5, 1e-3):
        tight = Plan(**{**run, **options, "accountant": "pld", "delta": delta})
        assert gaussian_delta(mu, tight.epsilon()) >= tight.delta * 0.995
    for rate, power in zip(RATES, plan.true_positive_rates(RATES), strict=True):
        assert rate <= power
        if rate <= 0.5:
            assert power <= ndtr(ndtri(rate) + mu) * (1 + 1e-9)


def test_steps_that_spend_nothing_and_steps_that_spend_all_have_their_curves():
    plan = runs.plan(100, 0.1, noise=1.0, steps=20, delta=1e-5)
    assert plan.mu(0) == 0.0
    assert plan.true_positive_rates(RATES, 0) == pytest.approx(RATES, rel=1e-12)
    assert plan.mu(1) < plan.mu(5) < plan.mu() < plan.mu(releases=2)
    assert plan.mu(10, releases=2) == plan.mu()
    silent = runs.plan(100, 0.1, noise=0.04, steps=20)
    assert silent.mu() == math.inf
    assert silent.true_positive_rates([1e-9]) == [1.0]
    long = runs.plan(100, 0.1, noise=1.0, steps=10**7)
    assert long.mu() == math.inf


def test_plans_before_are_in_the_curve():
    first, then = (runs.plan(100, 1.0, noise=s, steps=4) for s in (2.0, 4.0))
    assert then.after(first, 3).mu() == pytest.approx(math.sqrt(3 / 4 + 4 / 16))
    mixed = runs.plan(100, 0.1, noise=2.0).after(first, 1)
    assert 0.5 < mixed.mu() < math.sqrt(1 / 4 + 4 / 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda plan: plan.mu(5), "expected at most the 4 steps"),
        (lambda plan: plan.mu(-1), "expected a whole number >= 0"),
        (lambda plan: plan.mu(releases=0), "expected a whole number >= 1"),
        (lambda plan: plan.true_positive_rates([0]), r"expected 0 < rates\[0\] < 1"),
        (lambda plan: plan.true_positive_rates([0.1, 1]), r"expected 0 < rates\[1\]"),
        (lambda plan: plan.true_positive_rates([math.nan]), r"rates\[0\]=nan"),
        (lambda plan: plan.true_positive_rates(0.1), "expected a list of rates"),
        (lambda plan: plan.mu(releases=10**11), "which has a bound of epsilon alone"),
    ],
)
def test_numbers_without_a_curve_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(runs.plan(100, 0.1, noise=1.0))

"""Epsilon against closed forms, simulations and finer grids, and calibrated noise."""

import logging
import math
import sys

import dp_accounting
import numpy as np
import pytest
from scipy import optimize
from scipy.special import log_ndtr

from vgrad.dp import epsilon, noise_multiplier_for

SLOW = pytest.mark.slow
ACCOUNTANT = pytest.mark.parametrize("accountant", ["pld", "rdp"])
SLOW_RDP = pytest.mark.parametrize(
    "accountant", ["pld", pytest.param("rdp", marks=SLOW)]
)
RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def spent(rate, noise, steps, delta=1e-5, **options):
    run = {"sampling_rate": rate, "noise_multiplier": noise, "steps": steps}
    return epsilon(**run, delta=delta, **options)


def noise_for(target, rate, steps, delta=1e-5, **options):
    run = {"sampling_rate": rate, "steps": steps, "delta": delta}
    return noise_multiplier_for(epsilon=target, **run, **options)


def gaussian_delta(mu, spent):
    """Of the Gaussian mechanism, Balle and Wang, arXiv 1805.06530, theorem 8."""
    plus = math.exp(log_ndtr(mu / 2 - spent / mu))
    return plus - math.exp(spent + log_ndtr(-mu / 2 - spent / mu))


def root(function, low, high):
    return optimize.brentq(function, low, high, xtol=1e-13)


def gaussian_epsilon(noise_multiplier, steps, delta):
    mu = math.sqrt(steps) / noise_multiplier
    return root(lambda e: gaussian_delta(mu, e) - delta, 0, 1000)


@pytest.mark.parametrize(
    ("noise", "steps", "delta"),
    [(1.0, 1, 1e-5), (0.5, 3, 1e-6), (5.0, 10, 1e-5), (30.0, 1000, 1e-3)],
)
def test_without_sampling_epsilon_is_that_of_the_gaussian_mechanism(
    noise, steps, delta
):
    exact = gaussian_epsilon(noise, steps, delta)
    tight = spent(1.0, noise, steps, delta)
    loose = spent(1.0, noise, steps, delta, accountant="rdp")
    assert exact <= tight <= 1.001 * exact
    assert tight <= loose <= 1.25 * exact


@pytest.mark.parametrize("rate", [0.5, 0.1, 1e-3])
def test_one_sampled_step_has_its_closed_form(rate):
    # Removing a sample from the mixture: delta is rate times that of the Gaussian
    # mechanism at log(1 + (e^epsilon - 1) / rate).
    noise, delta = 0.8, 1e-5

    def excess(spent):
        inner = math.log1p(math.expm1(spent) / rate)
        return rate * gaussian_delta(1 / noise, inner) - delta

    exact = root(excess, 0, 100)
    assert exact <= spent(rate, noise, 1, delta) <= 1.001 * exact


def test_many_sampled_steps_agree_with_a_simulation_of_the_privacy_loss():
    rate, noise, steps, delta, trials = 0.2, 1.5, 30, 0.01, 200_000
    random = np.random.default_rng(0)
    losses = np.zeros(trials)
    for _ in range(steps):
        x = noise * random.standard_normal(trials) + (random.random(trials) < rate)
        losses += np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    exceeding = np.maximum(0, -np.expm1(spent(rate, noise, steps, delta) - losses))
    error = exceeding.std() / math.sqrt(trials)
    assert abs(exceeding.mean() - delta) < 4 * error
    assert error < delta / 50


@pytest.mark.parametrize(
    ("noise", "steps", "delta", "loose"),
    [
        # The library alone is too low: its composition by FFT has rounding errors of
        # the size of these deltas.
        (200 / 3, 10_000, 2e-11, 1.02),
        (44.7, 50_000, 2e-11, 1.02),
        (44.7, 50_000, 1e-10, 1.02),
        # These are composed at once.
        (2 * math.sqrt(10**6 + 7), 10**6 + 7, 1e-5, 1.001),
        (2e4, 10**8, 1e-5, 1.01),
        (2e5, 10**10, 1e-3, 1.4),
    ],
)
def test_epsilon_errs_on_the_safe_side_after_many_steps(noise, steps, delta, loose):
    exact = gaussian_epsilon(noise, steps, delta)
    assert exact <= spent(1.0, noise, steps, delta) <= loose * exact


@ACCOUNTANT
def test_epsilon_is_infinite_where_there_is_no_bound_and_zero_without_steps(accountant):
    for noise in (0, 0.0, 1e-300, 0.04):
        assert spent(0.01, noise, 1000, accountant=accountant) == math.inf
    assert spent(0.01, 1.0, 0, accountant=accountant) == 0.0
    # A delta within the rounding errors, and more steps than the grid can bound.
    bounded = accountant == "rdp"
    assert (spent(0.01, 1.0, 10**5, 1e-11, accountant=accountant) < math.inf) is bounded
    assert (spent(0.01, 1e5, 10**12, 1e-5, accountant=accountant) < 1) is bounded


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1000.0), (1e-3, 10.0), (0.5, 1e4)])
def test_epsilon_stays_tight_for_little_privacy_loss_per_step(rate, noise):
    # There the sum of losses is nearly normal, as if all samples were used with more
    # noise (central limit theorem, arXiv 1911.11607).
    expected = gaussian_epsilon(noise / rate, 1000, 1e-6)
    assert spent(rate, noise, 1000, 1e-6) == pytest.approx(expected, rel=0.1)


RUNS = [
    (0.01, 0.8, 1000, 1e-5),
    pytest.param(0.1, 0.4, 10, 1e-6, marks=SLOW),
    pytest.param(0.999, 2.0, 5, 1e-3, marks=SLOW),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), RUNS)
def test_the_grid_is_as_tight_as_a_fine_one_and_as_renyi(rate, noise, steps, delta):
    loose = spent(rate, noise, steps, delta, accountant="rdp")
    step = dp_accounting.GaussianDpEvent(noise)
    event = dp_accounting.PoissonSampledDpEvent(rate, step)
    fine = dp_accounting.pld.PLDAccountant(RELATION, 2e-4).compose(event, steps)
    found = spent(rate, noise, steps, delta)
    assert 0 < found <= min(loose, 1.001 * fine.get_epsilon(delta))


@pytest.mark.parametrize("noise", [pytest.param(0.05, marks=SLOW), 1e9, 1e300])
@pytest.mark.parametrize("rate", [1.0, 1e-8])
@pytest.mark.parametrize("steps", [1, 100_000])
def test_extreme_arguments_give_a_number_and_no_warning(noise, rate, steps):
    assert spent(rate, noise, steps, 1e-6) >= 0


@ACCOUNTANT
@pytest.mark.parametrize(
    ("target", "rate", "steps"),
    [pytest.param(3.0, 0.5, 200, marks=SLOW), (1.0, 0.1, 100), (0.05, 1.0, 1)],
)
def test_the_calibrated_noise_meets_the_target_and_hardly_more(
    accountant, target, rate, steps
):
    found = noise_for(target, rate, steps, accountant=accountant)
    assert spent(rate, found, steps, accountant=accountant) <= target
    assert spent(rate, found / 1.0002, steps, accountant=accountant) > target


@pytest.mark.parametrize("target", [10.0, 1.0, 0.1, 1e-9, 1e-300, 5e-324])
def test_the_calibrated_noise_of_one_step_is_that_of_the_gaussian_mechanism(target):
    exact = root(lambda s: gaussian_delta(1 / s, target) - 1e-5, 0.2, 1e6)
    assert exact <= noise_for(target, 1.0, 1) <= 1.001 * exact


@pytest.mark.parametrize("target", [1e6, 1e300, sys.float_info.max])
def test_a_very_large_budget_gets_the_least_noise(target):
    assert noise_for(target, 1.0, 1) == pytest.approx(0.05, rel=2e-4)


@SLOW
def test_the_calibrated_noise_meets_the_target_after_very_many_steps():
    # There epsilon does not fall everywhere when the noise grows, by rounding.
    found = noise_for(3.0, 0.5, 10**9)
    assert 2.98 < spent(0.5, found, 10**9) <= 3.0


# Logging: the library warns of orders that it leaves out.


@SLOW_RDP
def test_calibration_prints_nothing(accountant, capfd, monkeypatch):
    # As in a program that has not set up logging: there absl would set it up.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    noise_for(3.0, 0.5, 20, accountant=accountant)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == []


def test_other_messages_get_through_and_logging_is_restored(monkeypatch, caplog):
    def get_epsilon(accountant, delta):
        logging.getLogger("absl").warning("of someone else")
        raise KeyError("inside")

    spent(0.5, 1.0, 1000, accountant="rdp")
    assert caplog.records == []
    absl, root = logging.getLogger("absl"), logging.getLogger()
    before = (absl.level, list(absl.filters), list(root.handlers), np.geterr())
    monkeypatch.setattr(dp_accounting.rdp.RdpAccountant, "get_epsilon", get_epsilon)
    with pytest.raises(KeyError, match="inside"):
        spent(0.01, 1.0, 1000, accountant="rdp")
    assert caplog.messages == ["of someone else"]
    assert (absl.level, absl.filters, root.handlers, np.geterr()) == before
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=RELATION)
    event = dp_accounting.GaussianDpEvent(10.0)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, event))
    assert "failed to converge" in caplog.text

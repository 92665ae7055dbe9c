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
USUAL = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000, "delta": 1e-5}


def run(sampling_rate, noise_multiplier, steps, delta=1e-5):
    return dict(
        zip(USUAL, (sampling_rate, noise_multiplier, steps, delta), strict=True)
    )


def gaussian_delta(mu, spent):
    """Of the Gaussian mechanism, Balle and Wang, arXiv 1805.06530, theorem 8."""
    plus = math.exp(log_ndtr(mu / 2 - spent / mu))
    return plus - math.exp(spent + log_ndtr(-mu / 2 - spent / mu))


def gaussian_epsilon(noise_multiplier, steps, delta):
    mu = math.sqrt(steps) / noise_multiplier
    return optimize.brentq(lambda e: gaussian_delta(mu, e) - delta, 0, 1000, xtol=1e-13)


@pytest.mark.parametrize(
    ("noise", "steps", "delta"),
    [(1.0, 1, 1e-5), (0.5, 3, 1e-6), (5.0, 10, 1e-5), (30.0, 1000, 1e-3)],
)
def test_without_sampling_epsilon_is_that_of_the_gaussian_mechanism(
    noise, steps, delta
):
    exact = gaussian_epsilon(noise, steps, delta)
    tight = epsilon(**run(1.0, noise, steps, delta))
    assert exact <= tight <= 1.001 * exact
    loose = epsilon(**run(1.0, noise, steps, delta), accountant="rdp")
    assert tight <= loose <= 1.25 * exact


@pytest.mark.parametrize("rate", [0.5, 0.1, 1e-3])
def test_one_sampled_step_has_its_closed_form(rate):
    # Removing a sample from the mixture: delta is rate times that of the Gaussian
    # mechanism at log(1 + (e^epsilon - 1) / rate).
    noise, delta = 0.8, 1e-5

    def excess(spent):
        inner = math.log1p(math.expm1(spent) / rate)
        return rate * gaussian_delta(1 / noise, inner) - delta

    exact = optimize.brentq(excess, 0, 100, xtol=1e-13)
    found = epsilon(**run(rate, noise, 1, delta))
    assert exact <= found <= 1.001 * exact


def test_many_sampled_steps_agree_with_a_simulation_of_the_privacy_loss():
    rate, noise, steps, delta, trials = 0.2, 1.5, 30, 0.01, 200_000
    spent = epsilon(**run(rate, noise, steps, delta))
    random = np.random.default_rng(0)
    losses = np.zeros(trials)
    for _ in range(steps):
        x = noise * random.standard_normal(trials) + (random.random(trials) < rate)
        losses += np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    exceeding = np.maximum(0, -np.expm1(spent - losses))
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
    assert exact <= epsilon(**run(1.0, noise, steps, delta)) <= loose * exact


def test_more_steps_than_the_grid_can_bound_are_refused_with_a_way_out():
    many = run(0.01, 1e5, 10**12, 1e-3)
    match = r'epsilon\(steps=1000000000000, accountant="pld"\): .*accountant="rdp"'
    with pytest.raises(ValueError, match=match):
        epsilon(**many)
    assert 0 < epsilon(**many, accountant="rdp") < 1
    assert epsilon(**(many | {"delta": 1e-5})) == math.inf


def test_a_delta_within_the_rounding_errors_gets_no_finite_bound():
    tiny = run(0.01, 1.0, 100_000, 1e-11)
    assert epsilon(**tiny) == math.inf
    assert epsilon(**tiny, accountant="rdp") < math.inf


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1000.0), (1e-3, 10.0), (0.5, 1e4)])
def test_epsilon_stays_tight_for_little_privacy_loss_per_step(rate, noise):
    # There the sum of losses is nearly normal, as if all samples were used with more
    # noise (central limit theorem, arXiv 1911.11607).
    steps, delta = 1000, 1e-6
    found = epsilon(**run(rate, noise, steps, delta))
    assert found == pytest.approx(gaussian_epsilon(noise / rate, steps, delta), rel=0.1)


RUNS = [
    (0.01, 0.8, 1000, 1e-5),
    (0.5, 5.0, 200, 1e-5),
    pytest.param(0.1, 0.4, 10, 1e-6, marks=SLOW),
    pytest.param(1e-4, 0.7, 10_000, 1e-7, marks=SLOW),
    pytest.param(0.999, 2.0, 5, 1e-3, marks=SLOW),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), RUNS)
def test_the_grid_is_as_tight_as_a_fine_one_and_as_renyi(rate, noise, steps, delta):
    found = epsilon(**run(rate, noise, steps, delta))
    loose = epsilon(**run(rate, noise, steps, delta), accountant="rdp")
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    step = dp_accounting.GaussianDpEvent(noise)
    event = dp_accounting.PoissonSampledDpEvent(rate, step)
    fine = dp_accounting.pld.PLDAccountant(relation, 2e-4).compose(event, steps)
    assert 0 < found <= min(loose, 1.001 * fine.get_epsilon(delta))


@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=SLOW), "rdp"])
@pytest.mark.parametrize(
    ("name", "rising"),
    [
        ("steps", [1, 10, 1000]),
        ("sampling_rate", [1e-4, 0.01, 1.0]),
        ("noise_multiplier", [100.0, 1.0, 0.5]),
        ("delta", [1e-2, 1e-4, 1e-8]),
    ],
)
def test_epsilon_grows_with_less_privacy(accountant, name, rising):
    few = USUAL | {"steps": 100, "accountant": accountant}
    spent = [epsilon(**(few | {name: value})) for value in rising]
    assert spent == sorted(set(spent))


@ACCOUNTANT
def test_without_noise_epsilon_is_infinite_and_without_steps_zero(accountant):
    for noise in (0, 0.0, 1e-300, 0.04):
        silent = USUAL | {"noise_multiplier": noise}
        assert epsilon(**silent, accountant=accountant) == math.inf
    assert epsilon(**(USUAL | {"steps": 0}), accountant=accountant) == 0.0


@pytest.mark.parametrize("noise", [pytest.param(0.05, marks=SLOW), 1e9, 1e300])
@pytest.mark.parametrize("rate", [1.0, 1e-8])
@pytest.mark.parametrize("steps", [1, 100_000])
def test_extreme_arguments_give_a_number_and_no_warning(noise, rate, steps):
    assert epsilon(**run(rate, noise, steps, 1e-6)) >= 0


@ACCOUNTANT
@pytest.mark.parametrize(
    ("target", "rate", "steps"),
    [pytest.param(3.0, 0.5, 200, marks=SLOW), (1.0, 0.1, 100), (0.05, 1.0, 1)],
)
def test_the_calibrated_noise_meets_the_target_and_hardly_more(
    accountant, target, rate, steps
):
    asked = {"sampling_rate": rate, "steps": steps, "delta": 1e-5}
    asked |= {"accountant": accountant}
    found = noise_multiplier_for(epsilon=target, **asked)
    assert epsilon(noise_multiplier=found, **asked) <= target
    assert epsilon(noise_multiplier=found / 1.0002, **asked) > target


@pytest.mark.parametrize("target", [10.0, 1.0, 0.1, 1e-9, 1e-300, 5e-324])
def test_the_calibrated_noise_of_one_step_is_that_of_the_gaussian_mechanism(target):
    delta = 1e-5
    found = noise_multiplier_for(
        epsilon=target, delta=delta, sampling_rate=1.0, steps=1
    )
    exact = optimize.brentq(lambda s: gaussian_delta(1 / s, target) - delta, 0.2, 1e6)
    assert exact <= found <= 1.001 * exact


@pytest.mark.parametrize("target", [1e6, 1e300, sys.float_info.max])
def test_a_very_large_budget_gets_the_least_noise(target):
    found = noise_multiplier_for(epsilon=target, delta=1e-5, sampling_rate=1.0, steps=1)
    assert found == pytest.approx(0.05, rel=2e-4)


@SLOW
def test_the_calibrated_noise_meets_the_target_after_very_many_steps():
    # There epsilon does not fall everywhere when the noise grows, by rounding.
    many = {"sampling_rate": 0.5, "steps": 10**9, "delta": 1e-5}
    found = noise_multiplier_for(epsilon=3.0, **many)
    assert 2.98 < epsilon(noise_multiplier=found, **many) <= 3.0


def test_a_budget_out_of_reach_is_an_error_that_names_the_arguments():
    match = r"noise_multiplier_for\(epsilon=1.0, delta=1e-17, sampling_rate=0.5, steps"
    with pytest.raises(ValueError, match=match):
        noise_multiplier_for(epsilon=1.0, delta=1e-17, sampling_rate=0.5, steps=10)


def test_a_delta_that_allows_releasing_samples_is_an_error():
    with pytest.raises(
        ValueError, match="expected delta below 0.0199, the probability"
    ):
        noise_multiplier_for(epsilon=1.0, delta=0.05, sampling_rate=0.01, steps=2)


def warn_as_the_library_does():
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    event = dp_accounting.GaussianDpEvent(10.0)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, event))


BUDGET = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.5, "steps": 20}


@pytest.mark.parametrize("accountant", ["pld", pytest.param("rdp", marks=SLOW)])
def test_calibration_prints_nothing(accountant, capfd, monkeypatch):
    # As in a program that has not set up logging: there absl would set it up.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    noise_multiplier_for(**BUDGET, accountant=accountant)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == []


def test_nothing_is_logged_where_the_library_does(caplog):
    epsilon(**(USUAL | {"sampling_rate": 0.5}), accountant="rdp")
    assert caplog.records == []
    warn_as_the_library_does()
    assert "failed to converge" in caplog.text


def test_other_messages_get_through_and_logging_is_restored(monkeypatch, caplog):
    def get_epsilon(accountant, delta):
        logging.getLogger("absl").warning("of someone else")
        raise KeyError("inside")

    absl, root = logging.getLogger("absl"), logging.getLogger()
    before = (absl.level, list(absl.filters), list(root.handlers), np.geterr())
    monkeypatch.setattr(dp_accounting.rdp.RdpAccountant, "get_epsilon", get_epsilon)
    with pytest.raises(KeyError, match="inside"):
        epsilon(**USUAL, accountant="rdp")
    assert caplog.messages == ["of someone else"]
    assert (absl.level, absl.filters, root.handlers, np.geterr()) == before
    warn_as_the_library_does()
    assert "failed to converge" in caplog.text


def test_a_missing_library_says_how_to_get_it(monkeypatch):
    for name in ("dp_accounting", "scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "vgrad\[dp\]"'):
        epsilon(**USUAL)
    with pytest.raises(ImportError, match=r'pip install "vgrad\[dp\]"'):
        noise_multiplier_for(**BUDGET)


WRONG = {
    epsilon: {
        "sampling_rate": (0.0, 1.5),
        "noise_multiplier": (-1.0, math.inf),
        "steps": (-1, 1.5, 10**400),
        "delta": (0.0, 1.0),
        "accountant": ("gdp",),
    },
    noise_multiplier_for: {
        "epsilon": (0.0, math.inf),
        "delta": (1.0,),
        "sampling_rate": (0,),
        "steps": (0, 10**400),
        "accountant": ("gdp",),
    },
}


@pytest.mark.parametrize("function", WRONG)
def test_arguments_out_of_range_are_refused(function):
    usual = USUAL if function is epsilon else BUDGET
    for name, values in WRONG[function].items():
        among = ".*expected one of 'pld', 'rdp'" if name == "accountant" else ""
        for value in values:
            with pytest.raises(
                ValueError, match=rf"{function.__name__}\({name}={among}"
            ):
                function(**(usual | {name: value}))

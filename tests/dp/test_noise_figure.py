"""Errors of schemes at a budget, which the figure shows.

JP is google-deepmind/jax_privacy 8967688.
"""

import math

import numpy as np
import pytest

from vgrad.dp import Plan, noise_multiplier_for, noising

DIGITS = {"dataset_size": 1200, "sampling_rate": 0.1, "max_norm": 1.0, "steps": 300}
PLAN = Plan(noise_multiplier=1.0, delta=1e-4, **DIGITS)


def root_half(bands):
    """Return the first coefficients of the root of the prefix sums: 1, 1/2, 3/8, ..."""
    return [math.comb(2 * k, k) / 4**k for k in range(bands)]


def losses(schemes, epsilons, plan=PLAN):
    left, right = plan.plot_noise(schemes, epsilons=epsilons).axes
    rows = [line.get_ydata() for line in left.lines]
    for line, row in zip(right.lines, rows, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.divide(row, rows[0]))
    return np.array(rows)


def test_bands_beat_sampled_noise_at_a_large_epsilon_alone():
    schemes = [noising.independent(), noising.band_mf(2), noising.band_mf(4)]
    found = losses(schemes, [1, 16])
    # Of Poisson batches: the mean of t is 150.5, and the noise that of the accountant.
    for column, epsilon in enumerate((1.0, 16.0)):
        run = {"sampling_rate": 0.1, "steps": 300, "delta": 1e-4}
        noise = noise_multiplier_for(epsilon=epsilon, **run)
        assert math.isclose(found[0, column], noise * math.sqrt(150.5), rel_tol=1e-9)
    expected = [[69.10, 10.08], [69.72, 8.82], [71.75, 8.11]]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_coefficients_that_are_not_optimised_have_more_error():
    schemes = [noising.from_coefficients(root_half(bands)) for bands in (2, 4)]
    found = losses(schemes, [1.0])
    np.testing.assert_allclose(found[:, 0], [72.7, 77.2], rtol=1e-3)


def test_the_loss_is_the_error_of_the_noise_of_the_plan():
    plan = Plan.for_epsilon(4.0, delta=1e-4, noise=noising.blt(2), **DIGITS)
    deviations = [plan.deviation(step) for step in range(300)]
    matrix = np.linalg.inv(
        np.array([np.pad(plan.fitted.column(300 - t), (t, 0)) for t in range(300)]).T
    )
    scale = deviations[0] / np.linalg.norm(matrix[0])
    np.testing.assert_allclose(deviations, scale * np.linalg.norm(matrix, axis=1))
    sums = scale * np.linalg.norm(np.cumsum(matrix, axis=0), axis=1)
    expected = math.sqrt((sums**2).mean()) * plan.expected_batch_size
    assert math.isclose(losses([noising.blt(2)], [4.0])[0, 0], expected, rel_tol=1e-9)


def test_the_default_schemes_are_the_ones_that_the_rate_allows():
    few = {"dataset_size": 1001, "sampling_rate": 0.3, "max_norm": 2.0, "steps": 6}
    plan = Plan(noise_multiplier=1.0, delta=1e-4, **few)
    figure = plan.plot_noise(epsilons=[3.0])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "independent(): poisson, add_or_remove_one",
        "band_mf(2): cyclic_poisson, add_or_remove_one",
    ]
    plan = Plan(noise_multiplier=1.0, delta=1e-4, **{**few, "dataset_size": 1000})
    figure = plan.plot_noise(epsilons=[3.0])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[2:] == [
        "band_inv_mf(4): fixed_order, zero_out",
        "blt(2): fixed_order, zero_out",
    ]


def test_as_many_bands_as_batches_of_an_epoch_are_not_amplified():
    # JP test_helper_stddev_at_max_bands.
    run = {"dataset_size": 100, "sampling_rate": 0.1, "steps": 100, "delta": 1e-6}
    scheme = noising.from_coefficients(root_half(10))
    plans = [
        Plan.for_epsilon(2.0, max_norm=1.0, noise=scheme, sampling=sampling, **run)
        for sampling in ("cyclic_poisson", "fixed_order")
    ]
    one, other = (plan.deviation(99) for plan in plans)
    assert math.isclose(one, other, rel_tol=2e-4)


@pytest.mark.parametrize(("epsilon", "best"), [(20.0, 10), (0.1, 1)])
def test_a_large_budget_calls_for_many_bands(epsilon, best):
    # JP, its choice of bands for 1000 samples in batches of 100 for 100 steps.
    run = {"dataset_size": 1000, "sampling_rate": 0.1, "steps": 100, "delta": 1e-6}
    plan = Plan(noise_multiplier=1.0, max_norm=1.0, **run)
    bands = [1, 2, 5, 10]
    found = losses([noising.band_mf(b) for b in bands], [epsilon], plan)
    assert bands[int(found.argmin())] == best

"""Strategies against explicit matrices, enumerated patterns and published numbers.

JP is google-deepmind/jax_privacy 8967688, whose tests and functions give the numbers.
"""

import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.linalg import toeplitz

from vgrad.dp import Plan, noising

SLOW = pytest.mark.slow
SCHEMES = [
    noising.independent(),
    noising.bisr(4),
    noising.band_inv_mf(3),
    noising.band_mf(3),
    noising.blt(2),
    noising.from_coefficients([2.0, 1.0, -0.5]),
    noising.from_coefficients([1.0, 0.25, -0.5], inverse=True),
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.scheme)


def fit(scheme, steps, separation=None, participations=1):
    """Of one participation by default, at any distance."""
    separation = steps if separation is None else separation
    return scheme.fitted(steps, separation=separation, participations=participations)


def lower(column):
    return np.tril(toeplitz(column))


def patterns(n, separation, participations):
    """Yield the steps of every participation that is allowed."""
    for count in range(1, participations + 1):
        for steps in itertools.combinations(range(n), count):
            if all(b - a >= separation for a, b in itertools.pairwise(steps)):
                yield steps


def enumerated(matrix, separation, participations):
    """Return the sensitivity to signed contributions: |C u| is largest at a corner."""
    best = 0.0
    for steps in patterns(len(matrix), separation, participations):
        for signs in itertools.product([1, -1], repeat=len(steps)):
            best = max(best, np.linalg.norm(matrix[:, list(steps)] @ signs))
    return best


def noise(fitted, z):
    """Make the noise of each step from `z` by the filter, as its docstring says."""
    draws, feedback, decays, scales, _ = fitted.filter
    assert feedback == () or decays == ()
    x, buffers = [], np.zeros((len(decays), z.shape[1]))
    for t in range(len(z)):
        if feedback:
            past = sum(c * x[t - j] for j, c in enumerate(feedback) if 0 < j <= t)
            x.append((z[t] - past) / feedback[0])
        elif decays:
            x.append(z[t] - np.array(scales) @ buffers)
            buffers = np.array(decays)[:, None] * buffers + x[t]
        else:
            x.append(sum(k * z[t - j] for j, k in enumerate(draws) if j <= t))
    return np.array(x)


@every_scheme
def test_column_inverse_filter_and_errors_are_those_of_the_matrices(scheme):
    n = 12
    fitted = fit(scheme, n, 4, 2)
    strategy, inverse = lower(fitted.column(n)), lower(fitted.inverse(n))
    np.testing.assert_allclose(strategy @ inverse, np.eye(n), atol=1e-13)
    z = np.random.default_rng(0).normal(size=(n, 5))
    np.testing.assert_allclose(noise(fitted, z), np.linalg.solve(strategy, z))
    np.testing.assert_allclose(
        fitted.row_norms(n), np.linalg.norm(np.linalg.inv(strategy), axis=1)
    )
    of_sums = np.linalg.norm(np.tri(n) @ np.linalg.inv(strategy), axis=1)
    np.testing.assert_allclose(fitted.errors(n), of_sums**2)
    for kind, error in (("mean", (of_sums**2).mean()), ("max", (of_sums**2).max())):
        expected = fitted.sensitivity() * math.sqrt(error)
        assert math.isclose(fitted.root_loss(kind), expected)
    for few in (1, 2, 5):
        np.testing.assert_array_equal(fitted.column(few), fitted.column(n)[:few])
        np.testing.assert_array_equal(fitted.inverse(few), fitted.inverse(n)[:few])


@pytest.mark.parametrize(("separation", "participations"), [(1, 2), (2, 3), (3, 9)])
@every_scheme
def test_the_sensitivity_is_the_largest_of_all_patterns(
    scheme, separation, participations
):
    n = 7
    fitted = fit(scheme, n, separation, participations)
    for steps in (None, 1, 4):
        matrix = lower(fitted.column(steps or n))
        exact = enumerated(matrix, separation, min(participations, n))
        bound = fitted.sensitivity(steps)
        column = fitted.column(n)
        falls = (column >= 0).all() and (np.diff(column) <= 1e-15).all()
        banded = len(scheme.coefficients or column) <= separation
        if falls or banded:
            assert math.isclose(bound, exact, rel_tol=1e-12)
        assert exact * (1 - 1e-12) <= bound <= 1.6 * exact


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_of_any_coefficients_is_above_all_patterns(seed):
    random = np.random.default_rng(seed)
    column = random.normal(size=7) * random.choice([0.3, 1.0], size=7)
    separation, participations = int(random.integers(1, 4)), int(random.integers(1, 5))
    exact = enumerated(lower(column), separation, participations)
    place = {"separation": separation, "participations": participations}
    small = noising.column_sensitivity(column, **place)
    assert exact <= small * (1 + 1e-12) <= 1.5 * exact
    # Of so many steps no matrix is formed, and the bound is another one.
    large = noising.column_sensitivity(np.pad(column, (0, 600)), **place)
    assert exact <= large * (1 + 1e-12)


def test_a_pattern_is_chosen_for_each_row_of_a_matrix():
    # JP `sensitivity_test.py`.
    matrix = np.array([[1, 0, 0, 0], [2, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, -6.0]])
    of = noising.matrix_sensitivity
    assert math.isclose(of(matrix, 2, 2), math.sqrt(41))
    assert math.isclose(of(matrix, 4, 1), 6)
    assert math.isclose(enumerated(matrix, 2, 2), math.sqrt(41))


def test_participations_are_at_most_those_that_fit():
    # JP `sensitivity_test.py`, minsep_true_max_participations.
    fitted = [
        fit(noising.independent(), 5, separation, 9) for separation in range(1, 7)
    ]
    squares = [each.sensitivity() ** 2 for each in fitted]
    np.testing.assert_allclose(squares, [5, 3, 2, 2, 1, 1])
    np.testing.assert_allclose(fitted[1].sensitivity(2) ** 2, 1)


@pytest.mark.parametrize(
    ("separation", "participations", "square"), [(4, 3, 6.48), (1, 12, 80.56)]
)
def test_repeated_participations_add_shifted_columns(
    separation, participations, square
):
    # JP `toeplitz.minsep_sensitivity_squared`.
    scheme = noising.from_coefficients([1, 0.8, 0.6, 0.4])
    fitted = fit(scheme, 12, separation, participations)
    assert math.isclose(fitted.sensitivity() ** 2, square, rel_tol=1e-12)


def test_the_inverse_square_root_has_its_known_coefficients():
    # JP `toeplitz_test.py`.
    k = [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]
    fitted = fit(noising.bisr(5), 5)
    np.testing.assert_allclose(fitted.filter.draws, k, rtol=1e-15)
    c = fitted.column(5)
    np.testing.assert_allclose(c[1:] / c[:-1], [1 / 2, 3 / 4, 5 / 6, 7 / 8])
    np.testing.assert_allclose(lower(c) @ lower(c), np.tri(5), atol=1e-15)


OPTIMA = pytest.mark.parametrize(
    ("steps", "bands", "mean", "largest", "truncated", "identity"),
    [
        (16, 4, 1.93753, 2.436582, 1.941195, 2.915476),
        (256, 16, 3.637574, 4.744740, 3.858117, 11.335784),
    ],
)
"""JP `toeplitz.optimize_banded_toeplitz`, by mean and by max error, and its losses."""


@OPTIMA
def test_bands_have_the_least_losses(steps, bands, mean, largest, truncated, identity):
    fitted = fit(noising.band_mf(bands), steps)
    assert math.isclose(fitted.root_loss(), mean, rel_tol=1e-6)
    assert math.isclose(np.linalg.norm(fitted.filter.feedback), 1, rel_tol=1e-12)
    first = fit(noising.bisr(steps), steps).column(bands)
    of_first = fit(noising.from_coefficients(first), steps)
    assert math.isclose(of_first.root_loss(), truncated, rel_tol=1e-6)
    assert math.isclose(
        fit(noising.independent(), steps).root_loss(), identity, rel_tol=1e-6
    )

    def loss(tail):
        return fit(noising.from_coefficients([1, *tail]), steps).root_loss("max")

    least = optimize.minimize(loss, first[1:], options={"gtol": 1e-4}).fun
    assert math.isclose(least, largest, rel_tol=1e-6)


def test_two_buffers_are_those_of_the_reference():
    # JP `buffered_toeplitz_test.py`, test_optimize_single_participation_golden.
    fitted = fit(noising.blt(2), 100_000)
    of = {"rtol": 1e-5}
    np.testing.assert_allclose(fitted.filter.scales, [0.0122853238, 0.1878393665], **of)
    np.testing.assert_allclose(fitted.filter.decays, [0.9999528892, 0.9857068667], **of)
    assert math.isclose(fitted.root_loss("max"), 5.296747, rel_tol=1e-6)
    roots = np.sqrt(fitted.filter.scales)
    matrix = np.diag(fitted.filter.decays) - np.outer(roots, roots)
    decays = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(decays, [0.78640173, 0.99913333], rtol=1e-7)


@pytest.mark.parametrize(
    ("steps", "buffers", "ratio"),
    [
        (10, 1, 1.04),
        (100, 2, 1.03),
        (1000, 3, 1.03),
        (10_000, 3, 1.03),
        (100_000, 4, 1.03),
        pytest.param(10**6, 5, 1.05, marks=SLOW),
        pytest.param(10**7, 6, 1.06, marks=pytest.mark.large),
    ],
)
def test_buffers_come_close_to_the_least_loss(steps, buffers, ratio):
    # JP `buffered_toeplitz_test.py`. The least loss is at least 1 + log(steps) / pi,
    # up to a constant, arXiv 2404.16706.
    loss = fit(noising.blt(buffers), steps).root_loss("max")
    assert loss <= ratio * (1 + math.log(steps) / math.pi)


@pytest.mark.parametrize(("buffers", "loss"), [(1, 14.368), (2, 14.297), (3, 14.185)])
def test_buffers_are_optimised_for_several_participations(buffers, loss):
    # JP `buffered_toeplitz.optimize`; two buffers have a better optimum than its own.
    fitted = fit(noising.blt(buffers), 500, 50, 10)
    assert fitted.root_loss("max") < loss + 5e-4
    assert buffers == 2 or fitted.root_loss("max") > loss - 5e-4
    alone = fit(noising.independent(), 500, 50, 10)
    np.testing.assert_allclose(alone.root_loss("max"), 70.71, rtol=1e-4)


@pytest.mark.parametrize(("separation", "participations"), [(60, 1), (10, 6), (1, 60)])
@pytest.mark.parametrize("bands", [2, 4])
def test_no_near_inverse_bands_have_less_loss(bands, separation, participations):
    run = 60, separation, participations
    best = fit(noising.band_inv_mf(bands), *run)
    assert best.root_loss() <= fit(noising.bisr(bands), *run).root_loss()
    k, random = np.array(best.filter.draws), np.random.default_rng(0)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(10):
            other = np.append(1.0, k[1:] + size * random.normal(size=bands - 1))
            loss = fit(noising.from_coefficients(other, inverse=True), *run).root_loss()
            assert loss > best.root_loss() * (1 - 1e-3)


def test_any_steps_are_quick_and_need_no_matrix():
    for scheme in (
        noising.bisr(4),
        noising.band_inv_mf(4),
        noising.band_mf(4),
        noising.blt(3),
    ):
        fitted = fit(scheme, 100_000, 1000, 100)
        alone = fit(noising.independent(), 100_000, 1000, 100).root_loss()
        assert fitted.sensitivity() < 1000
        assert fitted.root_loss() < 0.51 * alone
        assert fitted.row_norms(100_000).shape == (100_000,)


@pytest.mark.parametrize(
    "scheme", [noising.band_mf(4), noising.band_inv_mf(4), noising.blt(2)]
)
def test_settled_coefficients_are_plain_and_are_not_optimised_again(scheme):
    run = {"separation": 5, "participations": 4}
    settled = scheme.optimal(20, **run)
    assert noising.bisr(4).optimal(20, **run) == noising.bisr(4)
    assert settled == replace(scheme, coefficients=settled.coefficients)
    assert settled.optimal(9, separation=1, participations=1) is settled
    assert settled.fitted(20, **run) == scheme.fitted(20, **run)
    assert noising.Noising(**json.loads(json.dumps(asdict(settled)))) == settled
    # With fewer steps than bands the last ones have no part.
    few = scheme.optimal(2, separation=1, participations=1)
    assert len(few.coefficients) == len(settled.coefficients)


@pytest.mark.parametrize(
    ("scheme", "sampling"),
    [
        (noising.band_mf(4), "cyclic_poisson"),
        (noising.band_mf(4), "fixed_order"),
        (noising.band_inv_mf(4), "fixed_order"),
        (noising.blt(1), "fixed_order"),
    ],
)
def test_the_identity_of_a_plan_has_the_coefficients(scheme, sampling):
    run = {"dataset_size": 40, "sampling_rate": 0.1, "noise_multiplier": 1.0}
    run |= {"max_norm": 1.0, "steps": 30, "delta": 1e-4, "sampling": sampling}
    plan = Plan(**run, noise=scheme)
    place = (4, 1) if sampling == "cyclic_poisson" else (10, 3)
    assert plan.noise.coefficients
    assert plan.fitted == fit(scheme, 30, *place)
    again = Plan(**json.loads(json.dumps(asdict(plan))))
    assert again == plan
    assert torch.equal(again.digest, plan.digest)
    # As another version of SciPy may find them: other noise of the same numbers z.
    first, *rest = plan.noise.coefficients
    other = replace(plan.noise, coefficients=(first * (1 - 1e-12), *rest))
    assert not torch.equal(replace(plan, noise=other).digest, plan.digest)


def test_one_band_is_independent_noise():
    for scheme in (
        noising.bisr(1),
        noising.band_inv_mf(1),
        noising.band_mf(1),
        noising.from_coefficients([1]),
    ):
        fitted = fit(scheme, 20, 5, 4)
        assert fitted.inverse(20).tolist() == [1.0, *[0.0] * 19]
        assert fitted.sensitivity() == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: noising.band_mf(0),
            r"Noising\(size=0\): expected a whole number >= 1",
        ),
        (
            lambda: noising.Noising("dense"),
            "scheme='dense'.*expected one of 'independent'",
        ),
        (
            lambda: noising.Noising("independent", 2),
            "expected 0 coefficients, got 0. Make it",
        ),
        (
            lambda: noising.Noising("blt", 2, (0.5, 0.4)),
            "expected 0 or 4 coefficients, got 2",
        ),
        (
            lambda: noising.Noising("bisr", 2, (1, -0.5)),
            "expected 0 coefficients, got 2",
        ),
        (
            lambda: noising.Noising("band_mf", 2, cache=True),
            "expected one of bisr, band_inv",
        ),
        (
            lambda: noising.from_coefficients([]),
            r"size=0\): expected a whole number >= 1",
        ),
        (
            lambda: noising.from_coefficients([0.0, 1]),
            "expected a first coefficient above",
        ),
        (lambda: noising.from_coefficients([1, math.nan]), r"coefficients\[1\]=nan"),
        (lambda: noising.Noising("blt", 1, (1.5, 0.1)), "decays of at most one"),
        (lambda: noising.Noising("blt", 1, (0.5, -0.1)), r"coefficients\[1\]=-0.1"),
        (
            lambda: fit(noising.bisr(2), 0),
            r"Noising.fitted\(steps=0\): expected a whole",
        ),
        (lambda: fit(noising.bisr(2), 5, 0), "separation=0"),
        (lambda: fit(noising.bisr(2), 5, 5, 0), "participations=0"),
        (lambda: fit(noising.bisr(2), 5).root_loss("last"), "kind='last'"),
        (lambda: fit(noising.bisr(2), 5).sensitivity(0), "steps=0"),
        (
            lambda: fit(noising.from_coefficients([0.001, 1]), 5000),
            "expected coefficients of",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Bounds from scores of canaries, and audits of steps, true ones and broken ones."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.stats import beta, norm

from vgrad.dp import audit


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
        (1, 386, 1.13346, 2.164749),
        (4, 140, 4.395568, 9.133752),
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


@pytest.mark.parametrize("delta", [0.0, 1e-4, 0.01])
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
    expected = dp_accounting.get_epsilon_gaussian(1 / bound.value, 1e-5)
    assert bound.epsilon(1e-5) == pytest.approx(expected)
    assert audit.gaussian(torch.ones(40), torch.zeros(40)).epsilon(1e-5) == math.inf
    bound = audit.one_run([3.0] * 50, [0.0] * 50, guesses=(40, 40), delta=1e-5)
    assert bound.epsilon(1e-5) == bound.value
    with pytest.raises(ValueError, match="expected delta=1e-05, at which the bound"):
        bound.epsilon(1e-6)


def test_results_carry_their_assumptions():
    scores = torch.ones(60), torch.zeros(60)
    run = audit.one_run(*scores, guesses=(9, 9), delta=1e-5)
    assert any("fair coin" in each for each in run.assumes)
    assert any("Gaussian" in each for each in audit.gaussian(*scores).assumes)
    pearson = audit.clopper_pearson(*scores, threshold=0.5)
    assert any("independent" in each for each in pearson.assumes)
    assert (run.included, run.excluded, run.delta) == (60, 60, 1e-5)


ONES, ZEROS = torch.ones(40), torch.zeros(40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: audit.one_run(torch.ones(90), ZEROS[:3], guesses=(1, 1), delta=0),
            "took part by fair coins, got 90 and 3. Draw a coin",
        ),
        (
            lambda: audit.one_run(ONES, ZEROS, guesses=(50, 31), delta=0),
            "as many as the 80 scores, got 81",
        ),
        (lambda: audit.one_run(ONES, ZEROS, guesses=(0, 0), delta=0), "got 0"),
        (
            lambda: audit.one_run(ONES, ZEROS, guesses=(-1, 5), delta=0),
            r"guesses\[0\]=-1\): expected a whole number",
        ),
        (lambda: audit.one_run(ONES, ZEROS, guesses=(1, 1), delta=1), "delta=1"),
        (lambda: audit.gaussian(ONES[:9], ZEROS), "expected 30 scores .*got 9 and 40"),
        (lambda: audit.gaussian(ONES, ZEROS / 0), "none of them NaN"),
        (lambda: audit.gaussian(ONES[None], ZEROS), "in one dimension"),
        (lambda: audit.gaussian(ONES, ZEROS, significance=0.6), "significance=0.6"),
    ],
)
def test_impossible_scores_and_guesses_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

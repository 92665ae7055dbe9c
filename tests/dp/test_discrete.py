"""Integer noise: its exact distribution, the integers of samples, and its account."""

import functools
import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from tests import streams
from vgrad.dp import chacha, discrete

ONE = 2**49
"""The probability of one, in steps of probabilities."""


def script(*parts):
    """Return a source of words that are written down."""
    words = iter(np.concatenate([np.asarray(part, np.uint64) for part in parts]))
    return lambda count: np.fromiter(itertools.islice(words, count), np.uint64, count)


def source(number=0):
    return discrete.Words(bytes([number] * 32), 0).take


# Probabilities, by words one by one.


@pytest.mark.parametrize("sides", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("x", [1, 12345, ONE // 2, ONE])
def test_an_event_has_its_probability_among_all_words(x, sides):
    """Of all words that share 49 bits, and of those that come after a die fell off."""
    dice, rest = np.arange(2**15, dtype=np.uint64), 2**15 % sides
    for bits in {0, x - 1, x, ONE - 1} - {ONE}:
        take = script((np.uint64(bits) << np.uint64(15)) + dice, [1] * rest)
        found = discrete.event(np.full(2**15, x), sides, take)
        assert found.sum() == (0 if bits >= x else 2**15 // sides + rest * (sides == 1))
    # Dice that fell off, as often as it takes.
    some = script([2**15 - 1], [2**15 - 1] * 3, [0])
    if rest:
        assert discrete.event(np.array([x]), sides, some).tolist() == [True]


HIT, MISS = [0], [2**64 - 1]


def test_a_chain_of_events_has_an_exponential_as_its_probability():
    probability = Fraction(0)
    x = Fraction(5, 8)
    for length in range(20):
        ends_here = x**length / math.factorial(length) * (1 - x / (length + 1))
        [found] = discrete.happens(np.array([5 * ONE // 8]), script(HIT * length, MISS))
        assert found == (length % 2 == 0)
        probability += ends_here * bool(found)
    assert abs(float(probability) - math.exp(-5 / 8)) < 1e-15


def test_events_of_several_chains_need_all_of_them():
    half = np.full(3, ONE // 2)
    take = script(MISS * 2, MISS * 2, MISS, HIT + MISS)
    # The first needs none, the second two, the third four and fails at the last.
    assert discrete.happens(half, take, np.array([0, 2, 4])).tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("bits", [64, 128])
def test_thresholds_are_probabilities_rounded_down(bits):
    with mpmath.workprec(400):
        weights = [mpmath.exp(-mpmath.mpf(v * v) / 2) for v in range(60)]
        for v, found in enumerate(discrete._thresholds(bits)):
            assert found == mpmath.floor(sum(weights[: v + 1]) / sum(weights) * 2**bits)
    assert v >= 10


def test_more_words_decide_where_one_does_not():
    table, more = discrete._thresholds(64), discrete._thresholds(128)
    # Words below, at and above the threshold between 1 and 2, and the largest one.
    words = [table[1] - 1, table[1], table[1], table[1], table[1] + 1, 2**64 - 1]
    last = more[1] - (table[1] << 64)
    some = script(words, [last - 1], [last + 1], [last], [0], [0])
    assert discrete.deviations(6, some).tolist() == [1, 1, 2, 1, 2, 9]


@functools.cache
def drawn(bits, count=2**19):
    return discrete.gaussian(count, source(bits), bits)


def law(bits):
    """Return integers and their probabilities, up to 4 deviations."""
    s = 2**bits
    whole = np.exp(-(np.arange(-60 * s, 60 * s + 1) ** 2) / (2 * s * s)).sum()
    values = np.arange(-4 * s, 4 * s + 1)
    return values, np.exp(-(values**2) / (2 * s * s)) / whole


@pytest.mark.parametrize("statistic", ["pearson", "log-likelihood"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_integers_have_exactly_their_probabilities(bits, statistic):
    """The likelihood ratio is the divergence of Kullback and Leibler of the counts."""
    values, expected = law(bits)
    counts = (drawn(bits) == values[:, None]).sum(1)
    counts = np.append(counts, drawn(bits).size - counts.sum())
    expected = np.append(expected, 1 - expected.sum()) * drawn(bits).size
    found = stats.power_divergence(counts, expected, lambda_=statistic)
    assert found.pvalue > 1e-3
    wider = stats.norm(0, 2**bits * 1.02)
    other = wider.cdf(values + 0.5) - wider.cdf(values - 0.5)
    other = np.append(other, 1 - other.sum()) * drawn(bits).size
    assert stats.power_divergence(counts, other, lambda_=statistic).pvalue < 1e-6


def test_the_variance_is_that_of_the_normal_or_below():
    values, expected = law(1)
    assert (values**2 * expected).sum() < 4
    error = 4 * math.sqrt(2 / drawn(24).size)
    assert abs(np.mean((drawn(24) / 2.0**24) ** 2) - 1) < 4 * error


def test_integers_on_a_fine_grid_are_nearly_normal_and_their_last_bits_are_fair():
    values = drawn(24)
    assert stats.kstest(values / 2.0**24, "norm").pvalue > 1e-3
    assert stats.chisquare(np.bincount(values & 63)).pvalue > 1e-3
    signs = values[1:] > 0, values[:-1] > 0
    assert abs(np.corrcoef(*signs)[0, 1]) < 4 / math.sqrt(values.size)


def test_words_are_those_of_the_cipher_in_order(monkeypatch):
    words, key = discrete.Words(bytes(range(32)), 7), bytes(range(32))
    parts = [words.take(count) for count in (3, 0, 100_000, 5, 40_000)]
    nonce = bytes(4) + (7).to_bytes(8, "little")
    expected = streams.chacha20(key, nonce, 0, 18_000).view(np.uint64).reshape(-1)
    assert np.array_equal(np.concatenate(parts), expected[:140_008])
    monkeypatch.setattr(chacha, "ciphers", None)
    again = discrete.Words(key, 7)
    assert np.array_equal(again.take(70_000), expected[:70_000])


# Integers of samples.


FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 3e38, 1e-45])


def squares(whole):
    return sum(int(x) ** 2 for part in whole.values() for x in part.reshape(-1))


@given(
    st.lists(FLOATS, min_size=1, max_size=30),
    st.floats(1e-30, 1e30),
    st.integers(200, 2**62),
)
def test_no_numbers_make_integers_above_the_bound(numbers, norm, most):
    grads = {"a": torch.tensor(numbers), "b": torch.tensor(0.25)}
    whole = discrete.integers(grads, norm, most)
    assert squares(whole) <= most
    assert {x.dtype for x in whole.values()} == {torch.int64}
    assert whole["b"].shape == ()


def test_a_clipped_gradient_is_rounded_and_not_clipped_again():
    torch.manual_seed(0)
    grads = {"a": torch.randn(100, 200), "b": torch.randn(7)}
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in grads.values()))
    whole = discrete.integers(grads, norm, discrete.bound(1.0))
    factor = (2**24 - math.sqrt(20_007) / 2) / norm
    for name, grad in grads.items():
        assert (whole[name] - grad.double() * factor).abs().max() <= 0.5
    assert math.isqrt(squares(whole)) > 2**24 * (1 - 1e-5)


@pytest.mark.parametrize("times", [1 + 1e-4, 3.0, 100.0])
def test_a_gradient_above_the_bound_keeps_its_direction(times):
    grads, most = {"a": torch.tensor([3.0, -4.0]) * times}, discrete.bound(1.0)
    whole = discrete.integers(grads, 5.0, most)["a"]
    assert 2**24 - 5 < math.isqrt(squares({"a": whole})) <= 2**24
    assert (whole[0] * 4 + whole[1] * 3).abs() <= 8


def test_sums_of_squares_are_exact_and_compared_exactly():
    whole = torch.tensor([2**31, -(2**31), 5, 2**30 - 1])
    high, low = discrete._squared(whole)
    exact = squares({"": whole})
    assert int(high) * 2**31 + int(low) == exact
    for most, fits in ((exact - 1, False), (exact, True), (exact + 2**31, True)):
        assert bool(discrete._at_most(high, low, most)) == fits


def test_the_bound_is_that_of_the_noise_multiplier_rounded_down():
    for noise in (1.0, 0.7, 3.3, 1e-2, 2.0**-7):
        most = discrete.bound(noise)
        assert most * Fraction(noise) ** 2 <= 4**24 < (most + 1) * Fraction(noise) ** 2


@pytest.mark.parametrize(
    ("grads", "most", "error", "message"),
    [
        ([1j], 2**40, TypeError, "real gradients, got complex ones of \\['a'\\]"),
        ([0.0] * 400, 300, ValueError, "norm above sqrt\\(400\\), got one of 17"),
    ],
)
def test_gradients_that_no_grid_holds_are_refused(grads, most, error, message):
    with pytest.raises(error, match=message):
        discrete.integers({"a": torch.tensor(grads)}, 1.0, most)


# The account.


def divergences(sigma, shift, rate, order):
    """Return both divergences of Poisson batches, by sums over all integers."""
    reach = int(12 * sigma + 20) + order * max(shift)
    axes = [np.arange(-reach, reach + 1.0)] * len(shift)
    grids = np.meshgrid(*axes, indexing="ij")

    def log_noise(center):
        parts = zip(grids, center, strict=True)
        return sum(-((x - c) ** 2) for x, c in parts) / (2 * sigma**2)

    whole = special.logsumexp(log_noise([0] * len(shift)))
    without, around = log_noise([0] * len(shift)) - whole, log_noise(shift) - whole
    mixed = np.logaddexp(math.log1p(-rate) + without, math.log(rate) + around)
    pairs = (mixed, without), (without, mixed)
    return [
        special.logsumexp(order * one - (order - 1) * two) / (order - 1)
        for one, two in pairs
    ]


def general_bound(noise, rate, order):
    """Bound the divergence for any mechanism (Zhu and Wang, ICML 2019, theorem 5)."""
    terms = [
        (order - 1) * math.log1p(-rate) + math.log(order * rate - rate + 1),
        *(
            math.log(special.comb(order, n) * (3 if n > 2 else 1))
            + n * math.log(rate)
            + (order - n) * math.log1p(-rate)
            + (n - 1) * n / (2 * noise**2)
            for n in range(2, order + 1)
        ),
    ]
    return special.logsumexp(terms) / (order - 1)


@pytest.mark.parametrize("shift", [(1,), (3,), (1, 2)])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_the_account_of_poisson_batches_is_no_less_than_a_sum_over_all_integers(
    sigma, shift
):
    noise = sigma / math.hypot(*shift)
    for rate, order in itertools.product([0.01, 0.3, 0.9], [2, 3, 6, 12]):
        [claimed] = discrete.divergence([order], rate, noise)
        added, removed = divergences(sigma, shift, rate, order)
        assert max(added, removed) <= claimed * (1 + 1e-9)
        assert added > claimed * 0.5 or sigma < 2
        assert claimed <= general_bound(noise, rate, order) * (1 + 1e-9)


@pytest.mark.parametrize("shift", [(1,), (3,), (1, 2)])
def test_the_account_without_sampling_is_exact_for_integers(shift):
    for sigma, order in itertools.product([0.7, 1.0, 4.0], [2, 3, 12]):
        [claimed] = discrete.divergence([order], 1.0, sigma / math.hypot(*shift))
        # A rate of one, up to rounding.
        found = divergences(sigma, shift, 1 - 1e-12, order)
        assert max(found) == pytest.approx(claimed, rel=1e-6)

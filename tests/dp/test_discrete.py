"""Integer noise: its exact distribution, the integers of samples, and its account."""

import functools
import itertools
import math
from fractions import Fraction

import dp_accounting
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests import streams
from tests.dp import runs
from vgrad import distributed, generators, optim
from vgrad.dp import accounting, chacha, discrete
from vgrad.training import TrainState, load, private_step, save

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
    found = discrete.happens(half, take, np.array([0, 2, 4]))
    assert found.tolist() == [True, True, False]


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


def test_integers_on_a_fine_grid_are_nearly_normal_and_their_last_bits_are_fair():
    values = drawn(24)
    assert stats.kstest(values / 2.0**24, "norm").pvalue > 1e-3
    assert stats.chisquare(np.bincount(values & 63)).pvalue > 1e-3
    assert abs(np.mean((values / 2.0**24) ** 2) - 1) < 6 / math.sqrt(values.size)
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


FLOATS = st.floats() | st.sampled_from([0.0, 1.0, -1.0, 2.0**33, 3e38, 1e-45])
MOST = st.integers(200, 2**62) | st.floats(2**-7, 1e3).map(discrete.bound)


def squares(whole):
    return sum(int(x) ** 2 for part in whole.values() for x in part.reshape(-1))


@given(st.lists(FLOATS, min_size=1, max_size=30), st.floats(1e-30, 1e30), MOST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_numbers_make_integers_above_the_bound(dtype, numbers, norm, most):
    grads = {"a": torch.tensor(numbers, dtype=dtype), "b": torch.tensor(0.25)}
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


@pytest.mark.parametrize("root", [0.0, 4.0**12, math.inf, math.nan])
def test_no_floating_point_number_decides(root, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.full_like(x, root))
    whole = discrete.integers({"a": torch.full((9,), 3.0)}, 1.0, 4**24)
    assert squares(whole) <= 4**24


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
        ([0.0] * 400, 300, ValueError, "norm above sqrt\\(400\\), got one of 17"),
    ],
)
def test_gradients_that_no_grid_holds_are_refused(grads, most, error, message):
    with pytest.raises(error, match=message):
        discrete.integers({"a": torch.tensor(grads)}, 1.0, most)


# The account.


def divergence(order, rate, noise):
    """Return the divergence of a step that plans account for."""
    accountant = dp_accounting.rdp.RdpAccountant([order])
    accountant.compose(accounting.Steps(rate, noise, 1, discrete=True).event())
    return accountant.rdp[0]


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


@pytest.mark.parametrize("shift", [(1,), (3,), (1, 2)])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_the_account_is_no_less_than_a_sum_over_all_integers(sigma, shift):
    noise = sigma / math.hypot(*shift)
    for rate, order in itertools.product([0.01, 0.3, 0.9, 1.0], [2, 3, 6, 12]):
        claimed = divergence(order, rate, noise)
        added, removed = divergences(sigma, shift, min(rate, 1 - 1e-12), order)
        assert max(added, removed) <= claimed * (1 + 1e-6)
        assert added > claimed * (0.5 if rate < 1 else 1 - 1e-6) or sigma < 1


@pytest.mark.parametrize("kind", ["poisson", "fixed_order"])
def test_a_plan_accounts_by_orders_with_a_proof(kind):
    given = {"noise": 2.0, "steps": 300, "delta": 1e-5}
    plan = runs.plan(1000, 0.1, discrete=True, sampling=kind, **given)
    assert plan.accountant == "rdp"
    plain = runs.plan(1000, 0.1, accountant="rdp", sampling=kind, **given)
    if kind == "poisson":
        expected = min(
            300 * divergence(order, 0.1, 2.0)
            + math.log1p(-1 / order)
            - math.log(1e-5 * order) / (order - 1)
            for order in [*range(2, 65), 128, 256, 512, 1024]
        )
        assert plan.epsilon() == pytest.approx(expected, rel=1e-12)
        assert plain.epsilon() <= plan.epsilon() < plain.epsilon() * 1.01
    else:  # without amplification other orders hold, too
        assert plan.epsilon() == plain.epsilon()
    some = {"dataset_size": 1000, "sampling_rate": 0.1, "steps": 300, "delta": 1e-5}
    some |= {"max_norm": 1.0, "discrete": True, "sampling": kind}
    least = type(plan).for_epsilon(plan.epsilon(), **some)
    assert least.noise_multiplier == pytest.approx(2.0, rel=1e-3)


def test_a_run_of_both_kinds_of_noise_is_accounted_for_by_whole_orders():
    given = {"noise": 2.0, "delta": 1e-4}
    first = runs.plan(100, 0.1, steps=20, discrete=True, **given)
    then = runs.plan(100, 0.1, steps=30, **given)
    both, turned = then.after(first, 20), first.after(then, 30)
    together = runs.plan(100, 0.1, steps=50, discrete=True, **given)
    assert both.epsilon() == turned.epsilon()
    assert both.epsilon() == pytest.approx(together.epsilon(), rel=1e-12)
    rounded = runs.plan(100, 0.1, steps=30, discrete="sum", **given)
    assert rounded.epsilon() == then.epsilon()
    digests = {tuple(each.digest.tolist()) for each in (first, then, rounded)}
    assert len(digests) == 3


REFUSED = [
    ({"neighbours": "replace_one"}, 'no account of these.*discrete="sum"'),
    ({"max_batch_size": 50}, 'no account of these.*discrete="sum"'),
    ({"noise": 0.0}, "noise_multiplier"),
    ({"noise": 2.0**-7}, "noise_multiplier"),
    ({"size": 2**50, "delta": 1e-16, "noise": 0.1}, "sums below 2\\^62.*larger noise"),
    ({"discrete": "no"}, "discrete"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_plans_without_an_account_are_refused(changes, message):
    given = {"size": 100, "rate": 0.1, "noise": 1.0, "discrete": True} | changes
    with pytest.raises(ValueError, match=message):
        runs.plan(**given)


@pytest.mark.parametrize("noise", [2.0**-6, 1e6])
def test_much_and_little_noise_have_a_grid(noise):
    plan = runs.plan(100, 0.1, noise=noise, discrete=True)
    assert plan.epsilon() == 0 if noise > 1 else math.isinf(plan.epsilon())


def test_there_is_no_event_of_discrete_noise():
    with pytest.raises(ValueError, match="Plan.epsilon accounts for it"):
        runs.plan(100, 0.1, noise=1.0, discrete=True).dp_event()


# Steps.


SAMPLES = 30
SGD = optim.sgd(0.1, momentum=0.9)


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    x, y = torch.randn(SAMPLES, 5, dtype=dtype), torch.arange(SAMPLES) % 3
    return model, loss, params, buffers, (x, y)


def noisy(kind=True, **changes):
    given = {"noise": 0.5, "steps": 6, "bound": 0.2} | changes
    return runs.plan(SAMPLES, 0.3, discrete=kind, **given)


def run(plan, state, loss, data, steps, change=lambda step: step, **options):
    """Take steps, and return the states after each."""
    step, states = change(private_step(loss, SGD, plan, **options)), [state]
    for rows in itertools.islice(plan.sampler(state), steps):
        state, _ = step(state, *(each[rows] for each in data))
        states.append(state)
    return states


def noised(plan, sums, **place):
    place = {"key": runs.KEY, "step": 0} | place
    sensitivity = vgrad.Sensitivity(0.2 / plan.expected_batch_size)
    return plan.add_noise(sums, sensitivity, **place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_adds_noise_to_the_sum_of_the_integers_of_samples(dtype):
    """Number by number: nothing but integers comes before the last product."""
    _, loss, params, buffers, data = problem(dtype)
    plan, tx = noisy(), optim.sgd(1.0)
    state = TrainState.create(tx, params, buffers, seed=3)
    rows = plan.sample(key=state.key, step=0)
    after, _ = private_step(loss, tx, plan)(state, *(each[rows] for each in data))
    clipped = vgrad.clipped_grad(loss, max_norm=0.2)
    key, deviation = plan._subkey(state.key), 0.5 * 0.2 / plan.expected_batch_size
    for name, value in params.items():
        total = torch.zeros(value.shape, dtype=torch.int64)
        for row in rows.tolist():
            one = clipped(params, buffers, *(each[[row]] for each in data))
            total += discrete.integers(one.grads, 0.2, 16 * 4**22 * 4)[name]
        tags = "discrete noise", 0, name, str([*value.shape]), deviation, 0
        words = discrete.Words(bytes(generators.fold_in(key, *tags).numpy()), 0)
        noise = discrete.gaussian(value.numel(), words.take)
        total += torch.from_numpy(noise).view(value.shape)
        grad = (total.double() * (deviation * 2.0**-24)).to(dtype)
        assert torch.equal(after.params[name], value - grad)


def test_a_discrete_step_is_near_a_gaussian_one_of_little_noise():
    _, loss, params, buffers, data = problem()
    begun, ends = TrainState.create(SGD, params, buffers, seed=3), []
    plans = [noisy(kind, noise=0.008) for kind in (False, True, "sum")]
    for plan in plans:
        step = private_step(loss, SGD, plan)
        ends.append(step(begun, *data)[0].params)
    for name, value in params.items():
        moved = [end[name] - value for end in ends]
        noise = 0.1 * plans[0].deviation(0)
        assert noise < 0.05 * moved[0].abs().max()
        for other in moved[1:]:
            assert 0 < (other - moved[0]).abs().max() < 8 * noise


def test_samples_that_are_not_finite_add_nothing_and_others_at_most_the_bound():
    _, loss, params, buffers, (x, y) = problem()
    x = x.clone()
    x[0], x[1, 2], x[2] = math.nan, math.inf, 1e30
    clipped = vgrad.clipped_grad(loss, max_norm=0.2, strategy="loop")
    sums = discrete.integer_sums(clipped, 0.5)
    for row in range(5):
        whole = sums(params, buffers, x[[row]], y[[row]]).grads
        assert (squares(whole) == 0) == (row < 2)
        assert squares(whole) <= discrete.bound(0.5)
    result = sums(params, buffers, x, y)
    assert result.nonfinite == 2
    assert {total.dtype for total in result.grads.values()} == {torch.int64}


@pytest.mark.parametrize("strategy", ["auto", "loop", "vmap"])
def test_a_sum_is_that_of_samples_one_by_one_in_any_order(strategy):
    """No sample's integers depend on the others, or on its place in memory."""
    _, loss, params, buffers, (x, y) = problem()
    clipped = vgrad.clipped_grad(loss, max_norm=0.2, strategy=strategy)
    sums = discrete.integer_sums(clipped, 0.5)
    whole = sums(params, buffers, x, y).grads
    moved = sums(params, buffers, x.flip(0), y.flip(0)).grads
    parts = [sums(params, buffers, x[n:][:7], y[n:][:7]).grads for n in range(0, 30, 7)]
    for name, total in whole.items():
        assert torch.equal(total, moved[name])
        assert torch.equal(total, sum(part[name] for part in parts))
    nothing = sums(params, buffers, x[:0], y[:0]).grads
    assert all(x.dtype == torch.int64 and not x.any() for x in nothing.values())


@pytest.mark.parametrize("kind", [True, "sum"])
def test_releases_repeat_after_loading_in_graphs_and_on_a_rank(kind, tmp_path):
    _, loss, params, buffers, data = problem()
    begun = TrainState.create(SGD, params, buffers, seed=3)
    states = run(noisy(kind), begun, loss, data, 6)
    save(tmp_path / "state", states[3])
    loaded = load(tmp_path / "state", begun)
    with pytest.raises(ValueError, match="under another"):
        run(noisy(False), loaded, loss, data, 1)
    with distributed.single_process_mesh("dp") as mesh:
        parallel = functools.partial(distributed.data_parallel, mesh=mesh)
        graphs = functools.partial(vgrad.compile, backend="replay")
        others = [run(noisy(kind), loaded, loss, data, 3)]
        for change in (graphs, parallel):
            others.append(run(noisy(kind), begun, loss, data, 6, change=change))
        for other in others:
            for one, again in zip(states[-len(other) :], other, strict=True):
                assert all(torch.equal(one.params[n], again.params[n]) for n in params)
        cut = TrainState.create(SGD, distributed.shard(params, mesh), buffers, seed=3)
        refused = "integers of a plan" if kind is True else "='sum', got a DTensor"
        with pytest.raises(TypeError, match=rf"{refused}.*gather\(params, mesh\)"):
            run(noisy(kind), cut, loss, data, 1, change=parallel)


def test_private_gradients_are_those_of_a_step_in_parts_of_any_size():
    model, loss, params, buffers, data = problem()
    begun = TrainState.create(optim.sgd(1.0), params, buffers, seed=3)
    plan = noisy()
    rows = plan.sample(key=begun.key, step=0)
    step = private_step(loss, optim.sgd(1.0), plan)
    after, _ = step(begun, *(each[rows] for each in data))
    for size in (None, 2, 5):
        options = {"key": begun.key, "physical_batch_size": size}
        private = runs.private(plan, model, TensorDataset(*data), **options)
        model.zero_grad()
        for batch in private.loader:
            private.backward(*batch)
            if private.ready:
                break
        for name, grad in runs.grads(model).items():
            assert torch.equal(params[name] - grad, after.params[name])


def test_noise_is_a_stream_of_its_own_for_each_place():
    plan = noisy("sum")
    sums = {"a": torch.zeros(70_000), "b": torch.zeros(70_000), "n": torch.tensor(0.0)}
    others = [noisy("sum", noise=0.7), noisy("sum", steps=7)]
    found = [noised(plan, sums, step=1), noised(plan, sums, member=1)]
    found += [noised(other, sums) for other in others]
    found = [*noised(plan, sums).values(), *(each["a"] for each in found)]
    assert torch.equal(found[0], found[-1])  # more steps change no noise
    flat = torch.stack([each for each in found[:-1] if each.ndim]).double()
    # Blocks of a tensor, too.
    parts = flat[:, :65_536].reshape(-1, 2**15)
    assert (torch.corrcoef(parts) - torch.eye(len(parts))).abs().max() < 5 / 2**7.5
    deviation = plan.deviation(0)
    assert abs(float(flat[0].std()) / deviation - 1) < 0.02
    sums = {"a": torch.full((70_000,), 0.3, dtype=torch.float64)}
    noise = noised(plan, sums)["a"]
    places = noise / (deviation * 2.0**-24)
    assert (places - places.round()).abs().max() < 1e-6
    assert abs(float(noise.mean()) - 0.3) < 5 * deviation / 70_000**0.5


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        (True, torch.float32, "integers, as private_step and PrivateGradients form"),
        (True, torch.int64, "integers, as private_step and PrivateGradients form"),
        ("sum", torch.int64, "real floating-point numbers.*got torch.int64"),
        ("sum", torch.complex64, "real floating-point numbers.*got torch.complex"),
    ],
)
def test_sums_of_another_kind_are_refused(kind, dtype, message):
    with pytest.raises(TypeError, match=message):
        noised(noisy(kind), {"a": torch.zeros(2, dtype=dtype)})


def test_sums_that_stay_numbers_keep_what_is_not_finite():
    plan = noisy("sum", noise=1.0)
    total = torch.tensor([math.inf, -math.inf, math.nan, 1e38, 0.5]).bfloat16()
    found = noised(plan, {"a": total})["a"]
    assert found.dtype == torch.float32
    assert torch.equal(found[:4].isfinite(), total[:4].isfinite())
    assert abs(found[4] - 0.5) < 6 * plan.deviation(0)

"""Discrete noise: its exact distribution, and its steps."""

import functools
import hashlib
import itertools
import json
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests import streams
from tests.dp import runs
from vgrad import distributed, generators, optim
from vgrad.dp import chacha, discrete
from vgrad.training import TrainState, load, private_step, save

MECHANISM = "Gaussian noise on clipped sums of Poisson batches"
ONE = 2**49
"""The probability of one, in steps of probabilities."""


def script(*parts):
    """Return a source of words that are written down."""
    words = iter(np.concatenate([np.asarray(part, np.uint64) for part in parts]))
    return lambda count: np.fromiter(itertools.islice(words, count), np.uint64, count)


def source(number=0):
    return discrete.Words(bytes([number] * 32), 0).draw


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
    parts = [words.draw(count) for count in (3, 0, 100_000, 5, 40_000)]
    nonce = bytes(4) + (7).to_bytes(8, "little")
    expected = streams.chacha20(key, nonce, 0, 18_000).view(np.uint64).reshape(-1)
    assert np.array_equal(np.concatenate(parts), expected[:140_008])
    monkeypatch.setattr(chacha, "ciphers", None)
    again = discrete.Words(key, 7)
    assert np.array_equal(again.draw(70_000), expected[:70_000])


# Plans.


def test_plans_account_for_it_as_for_other_noise():
    given = {"noise": 2.0, "steps": 30, "delta": 1e-4}
    plain = runs.plan(100, 0.1, **given)
    rounded = runs.plan(100, 0.1, discrete="sum", **given)
    assert rounded.epsilon() == plain.epsilon()
    assert not torch.equal(rounded.digest, plain.digest)
    with pytest.raises(ValueError, match="noise_multiplier"):
        runs.plan(100, 0.1, noise=0.0, discrete="sum")


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


def noisy(kind="sum", **changes):
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
def test_a_step_adds_integers_to_the_rounded_sum(dtype):
    """Number by number."""
    _, loss, params, buffers, data = problem(dtype)
    plan, tx = noisy(), optim.sgd(1.0)
    state = TrainState.create(tx, params, buffers, seed=3)
    rows = plan.sample(key=state.key, step=0)
    after, _ = private_step(loss, tx, plan)(state, *(each[rows] for each in data))
    clipped = vgrad.clipped_grad(loss, **plan.clipping)
    sums = clipped(params, buffers, *(each[rows] for each in data)).grads
    key, deviation = plan._subkey(state.key), 0.5 * 0.2 / plan.expected_batch_size
    for name, value in params.items():
        total = (sums[name].double() / (deviation * 2.0**-24)).round().long()
        tags = "discrete noise", 0, name, str([*value.shape]), deviation, 0
        words = discrete.Words(bytes(generators.fold_in(key, *tags).numpy()), 0)
        noise = discrete.gaussian(value.numel(), words.draw)
        total += torch.from_numpy(noise).view(value.shape)
        grad = (total.double() * (deviation * 2.0**-24)).to(dtype)
        assert torch.equal(after.params[name], value - grad)


def test_a_discrete_step_is_near_a_gaussian_one_of_little_noise():
    _, loss, params, buffers, data = problem()
    begun, ends = TrainState.create(SGD, params, buffers, seed=3), []
    plans = [noisy(kind, noise=0.008) for kind in (False, "sum")]
    for plan in plans:
        step = private_step(loss, SGD, plan)
        ends.append(step(begun, *data)[0].params)
    for name, value in params.items():
        moved, rounded = (end[name] - value for end in ends)
        noise = 0.1 * plans[0].deviation(0)
        assert noise < 0.05 * moved.abs().max()
        assert 0 < (rounded - moved).abs().max() < 8 * noise


def test_releases_repeat_after_loading_in_graphs_and_on_a_rank(tmp_path):
    _, loss, params, buffers, data = problem()
    begun = TrainState.create(SGD, params, buffers, seed=3)
    states = run(noisy(), begun, loss, data, 6)
    save(tmp_path / "state", states[3])
    loaded = load(tmp_path / "state", begun)
    with pytest.raises(ValueError, match="under another"):
        run(noisy(False), loaded, loss, data, 1)
    with distributed.single_process_mesh("dp") as mesh:
        parallel = functools.partial(distributed.data_parallel, mesh=mesh)
        graphs = functools.partial(vgrad.compile, backend="replay")
        others = [run(noisy(), loaded, loss, data, 3)]
        for change in (graphs, parallel):
            others.append(run(noisy(), begun, loss, data, 6, change=change))
        for other in others:
            for one, again in zip(states[-len(other) :], other, strict=True):
                assert all(torch.equal(one.params[n], again.params[n]) for n in params)
        cut = TrainState.create(SGD, distributed.shard(params, mesh), buffers, seed=3)
        refused = r"='sum', got a DTensor.*gather\(params, mesh\)"
        with pytest.raises(TypeError, match=refused):
            run(noisy(), cut, loss, data, 1, change=parallel)


def test_states_of_integers_of_samples_are_refused():
    _, loss, params, buffers, data = problem()
    fields = SAMPLES, 0.3, 0.5, 0.2, None, json.dumps({"discrete": True})
    text = json.dumps([MECHANISM, "ChaCha20", *fields]).encode()
    state = TrainState.create(SGD, params, buffers, seed=3)
    digest = torch.tensor([*hashlib.blake2b(text, digest_size=32).digest()])
    state = state._replace(plan_digest=digest.to(torch.uint8))
    message = r"state of Plan\(discrete=True\).*TrainState.create\(tx, state.params"
    for kind in ("sum", False):
        with pytest.raises(ValueError, match=message):
            run(noisy(kind), state, loss, data, 1)


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
            moved = params[name] - grad
            if size is None:
                assert torch.equal(moved, after.params[name])
            assert (moved - after.params[name]).abs().max() < 1e-6  # of 1e-2 of noise


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
    ("dtype", "message"),
    [
        (torch.int64, "real floating-point numbers.*got torch.int64"),
        (torch.complex64, "real floating-point numbers.*got torch.complex"),
    ],
)
def test_sums_of_another_kind_are_refused(dtype, message):
    with pytest.raises(TypeError, match=message):
        noised(noisy(), {"a": torch.zeros(2, dtype=dtype)})


def test_sums_that_stay_numbers_keep_what_is_not_finite():
    plan = noisy("sum", noise=1.0)
    total = torch.tensor([math.inf, -math.inf, math.nan, 1e38, 0.5]).bfloat16()
    found = noised(plan, {"a": total})["a"]
    assert found.dtype == torch.float32
    assert torch.equal(found[:4].isfinite(), total[:4].isfinite())
    assert abs(found[4] - 0.5) < 6 * plan.deviation(0)

"""The best of a random number of runs: the number, the account and the search."""

import io
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import optimize, stats

from vgrad import dp, optim, training
from vgrad.dp import selection
from vgrad.generators import secret_key

RUN = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
PLAN = dp.Plan(sampling_rate=0.1, noise_multiplier=2.0, steps=30, **RUN)
KEY = secret_key(seed=0)


def halting(mean, shape):
    """The parameter of the distribution, in floats, by the formulas of the paper."""

    def excess(h):
        if shape == 0:
            return (1 / h - 1) / math.log(1 / h) - mean
        return shape * (1 - h) / (h * (1 - h**shape)) - mean

    return optimize.brentq(excess, 1e-9, 1 - 1e-9, xtol=1e-15)


def probabilities(mean, shape, largest):
    """The chances of 1 to `largest` runs, by scipy's own distributions."""
    h, numbers = halting(mean, shape), np.arange(1, largest + 1)
    if shape == 0:
        return stats.logser(1 - h).pmf(numbers)
    untruncated = stats.nbinom(shape, h)
    return untruncated.pmf(numbers) / (1 - untruncated.pmf(0))


@pytest.mark.parametrize("shape", [0, 0.5, 1, 3])
@pytest.mark.parametrize("mean", [1.5, 8, 60])
def test_numbers_of_runs_follow_the_distribution(monkeypatch, mean, shape):
    chances = probabilities(mean, shape, 40)
    below = np.concatenate([[0.0], np.cumsum(chances)])
    for number in (1, 2, 3, 7, 20, 40):
        low, high = below[number - 1], below[number]
        for uniform in (low + 1e-9 * (high - low), (low + high) / 2, high - 1e-9):
            if high - low < 1e-6:
                continue
            bits = int(uniform * 2**128)
            monkeypatch.setattr(selection, "stream", lambda key, *tags, bits=bits: bits)
            best = dp.best_of(PLAN, score="public", mean=mean, shape=shape, key=KEY)
            assert best._number == number
    largest = int(1e5 if shape == 0 else 1e4)
    numbers = np.arange(1, largest + 1)
    assert (numbers * probabilities(mean, shape, largest)).sum() == pytest.approx(mean)


def test_the_number_is_secret_and_drawn_at_once():
    numbers = set()
    for _ in range(40):
        best = dp.best_of(PLAN, score="public", mean=20, shape=1)
        numbers.add(sum(best.add(0.0, None) is None for _ in best))
    assert len(numbers) > 10
    first, again = (dp.best_of(PLAN, score="public", key=KEY) for _ in range(2))
    assert first._number == again._number
    for text in (repr(first), str(first), repr(next(iter(first)))):
        assert "_number" not in text
        assert "tensor" not in text
    assert repr(first).endswith("score='public', mean=8.0, shape=1.0)")


def gaussian_rdp(orders):
    return np.asarray(orders) * 3 / (2 * 2.0**2)


def test_epsilon_is_that_of_the_theorem():
    """Theorem 2 of the paper, and the conversion of Canonne, Kamath and Steinke."""
    plan = dp.Plan(sampling_rate=1.0, noise_multiplier=2.0, steps=3, **RUN)
    orders = np.array(dp_accounting.rdp.RdpAccountant()._orders)
    orders = orders[orders > 1]
    for mean, shape in ((8, 1), (3, 0), (20, 0.5), (2, 4)):
        h, rdp = halting(mean, shape), gaussian_rdp(orders)
        second = ((1 - 1 / orders) * rdp + math.log(1 / h) / orders).min()
        total = rdp + (1 + shape) * second + math.log(mean) / (orders - 1)
        total = np.minimum.accumulate(total[::-1])[::-1]  # divergences grow with orders
        epsilons = total + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)
        best = dp.best_of(plan, score="public", mean=mean, shape=shape)
        assert best.epsilon() == pytest.approx(epsilons.min(), rel=1e-6)
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(best.dp_event())
        assert best.epsilon() == accountant.get_epsilon(1e-5)


def test_epsilon_is_above_the_closed_form():
    """Corollary 4 of the paper, at the best orders: a little below a grid of them."""
    rho, delta = 3 / (2 * 2.0**2), 1e-5
    plan = dp.Plan(sampling_rate=1.0, noise_multiplier=2.0, steps=3, **RUN)
    for mean, shape in ((8, 1), (3, 0), (20, 0.5)):
        h, orders = halting(mean, shape), np.linspace(1.05, 100, 10_000)
        rest = 2 * (1 + shape) * math.sqrt(rho * math.log(1 / h)) - shape * rho
        low = 2 * math.sqrt(rho * math.log(mean)) + rest
        high = rho * (orders - 1) + math.log(mean) / (orders - 1) + rest
        small = orders <= 1 + math.sqrt(math.log(mean) / rho)
        total = np.where(small, low, high)
        epsilons = total + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        best = dp.best_of(plan, score="public", mean=mean, shape=shape)
        assert epsilons.min() * (1 - 1e-3) < best.epsilon() < epsilons.min() * 1.05


def test_the_bound_holds_for_a_mechanism_that_is_computed_exactly():
    """Divergences of the best of runs, by the generating function of their number."""
    one, other = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.25, 0.35])
    orders = np.array([1.1, 1.5, 2, 3, 5, 10, 30, 100])

    def divergence(p, q, order):
        return math.log((p**order * q ** (1 - order)).sum()) / (order - 1)

    for mean, shape in ((8, 1), (3, 0.5), (20, 2)):
        h = halting(mean, shape)

        def released(p, h=h, shape=shape):
            x = np.concatenate([[0.0], np.cumsum(p)])
            return np.diff(((1 - (1 - h) * x) ** -shape - 1) / (h**-shape - 1))

        both = (one, other), (other, one)  # the theorem is about both directions
        single = [max(divergence(*pair, order) for pair in both) for order in orders]
        single = np.array(single)
        second = ((1 - 1 / orders) * single + math.log(1 / h) / orders).min()
        bounds = single + (1 + shape) * second + math.log(mean) / (orders - 1)
        for p, q in both:
            for order, bound in zip(orders, bounds, strict=True):
                spent = divergence(released(p), released(q), order)
                assert spent <= bound + 1e-12


def test_a_score_of_private_data_is_in_the_account():
    event = dp_accounting.GaussianDpEvent(3.0)
    public, private = (dp.best_of(PLAN, score=s) for s in ("public", event))
    one = replace(PLAN, accountant="rdp").epsilon()
    assert private.epsilon() > public.epsilon() > one
    accountant = dp_accounting.rdp.RdpAccountant()
    both = dp_accounting.ComposedDpEvent([PLAN.dp_event(), event])
    repeated = dp_accounting.dp_event.RepeatAndSelectDpEvent(both, 8, 1)
    assert private.epsilon() == accountant.compose(repeated).get_epsilon(1e-5)
    little = replace(PLAN, noise_multiplier=0.01)
    assert dp.best_of(little, score=event).epsilon() == math.inf


def keyed_by(seed, least=3):
    """A key by which there are some runs."""
    while True:
        key = secret_key(seed=seed)
        best = dp.best_of(PLAN, score="public", mean=6, key=key)
        if best._number >= least:
            return best, key
        seed += 1000


def test_runs_have_fresh_keys_and_the_first_best_one_is_kept():
    best, key = keyed_by(1)
    keys, scores = [key], [0.5, math.nan, 0.5, torch.tensor(0.25)]
    result = torch.zeros(2)
    for number, run in enumerate(best):
        keys.append(run.key)
        result += 1  # what was kept is a copy
        best.add(scores[min(number, 3)], {"number": number, "x": result})
    assert len({tuple(each.tolist()) for each in keys}) == len(keys)
    assert best.result()["number"] == 0
    assert best.result()["x"].tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="expected one of its runs, got more"):
        best.add(1.0, None)
    best, _ = keyed_by(2)
    for number, _ in enumerate(best):
        best.add(float("nan") if number == 0 else -math.inf, number)
    assert best.result() == 0
    runs = [selection.Run(secret_key(seed=seed)) for seed in range(300)]
    choices = [run.choice("abc") for run in runs]
    assert all(70 < choices.count(letter) < 130 for letter in "abc")


def test_a_search_that_is_cut_short_has_no_result():
    best, _ = keyed_by(3)
    with pytest.raises(RuntimeError, match="expected all runs, whose number was drawn"):
        best.result()
    for number, _ in enumerate(best):
        best.add(0.0, number)
        break
    with pytest.raises(RuntimeError, match=r"Go on with `for run in best`"):
        best.result()
    with pytest.raises(RuntimeError, match="expected one call of add"):
        list(best)
    for _ in best:
        best.add(1.0, "later")
    assert best.result() == "later"


def test_the_number_survives_a_resume():
    best, _ = keyed_by(4, least=5)
    keys = []
    for run in best:
        keys.append(run.key)
        best.add(0.0, None)
    half, _ = keyed_by(4, least=5)
    seen = []
    for run in half:
        seen.append(run.key)
        half.add(float(len(seen)), {"x": torch.ones(1) * len(seen)})
        if len(seen) == 2:
            break
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = dp.best_of(PLAN, score="public", mean=6)
    resumed.load_state_dict(state)
    for run in resumed:
        seen.append(run.key)
        resumed.add(0.0, None)
    assert [each.tolist() for each in seen] == [each.tolist() for each in keys]
    assert resumed.result()["x"].tolist() == [2.0]
    others = (
        dp.best_of(PLAN, score="public", mean=7),
        dp.best_of(PLAN, score="public", mean=6, shape=0),
        dp.best_of(replace(PLAN, steps=31), score="public", mean=6),
        dp.best_of(PLAN, score=dp_accounting.GaussianDpEvent(1.0), mean=6),
    )
    for other in others:
        with pytest.raises(ValueError, match="same plan, score, mean and shape"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="missing: 'key'"):
        resumed.load_state_dict({n: x for n, x in state.items() if n != "key"})


def test_private_runs_are_searched():
    """Each run trains privately with its own key, and the search finds the rate."""
    x, target = torch.randn(1000, 4), torch.tensor([1.0, -1.0, 2.0, 0.5])

    def loss(params, buffers, x, y):
        return (params["w"] @ x - y).square()

    best, _ = keyed_by(5, least=4)
    for run in best:
        tx = optim.sgd(run.choice([1e-6, 0.5]))
        step = training.private_step(loss, tx, PLAN)
        state = training.TrainState.create(tx, {"w": torch.zeros(4)}, {})
        state = state._replace(key=run.key)
        for rows in PLAN.sampler(state):
            state, _ = step(state, x[rows], x[rows] @ target)
        best.add(-(state.params["w"] - target).norm(), state.params)
    assert (best.result()["w"] - target).norm() < 0.5 * target.norm()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"plan": None}, TypeError, "expected a Plan, got a NoneType"),
        (
            {"plan": replace(PLAN, neighbours="replace_one")},
            ValueError,
            r"account by 'rdp', got one of \['pld'\]",
        ),
        ({"plan": PLAN.after(PLAN, 10)}, ValueError, "after 10 other steps"),
        ({"score": "private"}, ValueError, "expected 'public' or an event"),
        ({"score": None}, ValueError, "expected 'public' or an event"),
        ({"score": dp_accounting.UnsupportedDpEvent()}, ValueError, "account by 'rdp'"),
        ({"mean": 1}, ValueError, "1 < mean"),
        ({"mean": math.nan}, ValueError, "1 < mean"),
        ({"shape": -0.1}, ValueError, "shape >= 0"),
        ({"shape": math.inf}, ValueError, "shape < 1000"),
        ({"key": torch.zeros(3)}, TypeError, r"best_of\(key\)"),
    ],
)
def test_arguments_are_checked(arguments, error, words):
    with pytest.raises(error, match=words):
        dp.best_of(**{"plan": PLAN, "score": "public"} | arguments)


def test_the_score_is_asked_for():
    with pytest.raises(TypeError, match="score"):
        dp.best_of(PLAN)

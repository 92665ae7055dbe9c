"""Batches of plans that are no plain Poisson batches, and the accounts of them."""

import dataclasses
import itertools
import json
import math
import warnings
from types import SimpleNamespace
from typing import get_args

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats

import vgrad
from tests.dp.runs import KEY
from tests.dp.test_accounting import gaussian_epsilon
from tests.losses import product
from vgrad import dp, optim
from vgrad.dp import Plan, accounting, mechanisms, noising, sampling
from vgrad.training import TrainState, private_step

DATA = {"dataset_size": 40, "max_norm": 1.0, "delta": 1e-3}
RUN = {**DATA, "sampling_rate": 0.25, "noise_multiplier": 1.0, "steps": 4000}
TRUNCATED = Plan(**RUN, max_batch_size=11)
CYCLIC = Plan(**RUN, noise=noising.band_mf(4))
EQUAL = dataclasses.replace(CYCLIC, sampling="cyclic_equal", neighbours=None)
FIXED = Plan(**RUN | {"sampling_rate": 0.3}, noise=noising.bisr(4))
SPENDING = "sampling_rate", "noise_multiplier", "delta"
PLANS = TRUNCATED, CYCLIC, EQUAL, FIXED


def sampled(plan, steps):
    return [plan.sample(key=KEY, step=step).tolist() for step in range(steps)]


# Batches.


def test_a_truncated_batch_has_a_cut_binomial_size_and_each_sample_alike():
    batches = sampled(TRUNCATED, 4000)
    expected = stats.binom.pmf(np.arange(12), 40, 0.25)
    expected[11] = stats.binom.sf(10, 40, 0.25)
    often = expected > 2e-3
    counts = np.bincount([*map(len, batches)], minlength=12)
    assert len(counts) == 12
    model = expected[often] / expected[often].sum() * counts[often].sum()
    assert stats.chisquare(counts[often], model).pvalue > 1e-3
    full = [batch for batch in batches if len(batch) == 11]
    rows = np.bincount(np.concatenate(full), minlength=40)
    assert stats.chisquare(rows).pvalue > 1e-3
    assert all(batch == sorted(set(batch)) for batch in batches)


def test_a_batch_below_the_largest_is_the_one_without_a_largest():
    draw = {"key": KEY, "dataset_size": 40, "sampling_rate": 0.25}
    for step in range(50):
        whole = sampling.poisson_sample(**draw, step=step).tolist()
        cut = sampling.poisson_sample(**draw, step=step, max_batch_size=9).tolist()
        assert set(cut) <= set(whole)
        assert len(cut) == min(9, len(whole))


@pytest.mark.parametrize("plan", [CYCLIC, EQUAL])
def test_cyclic_batches_come_from_one_group_each(plan):
    # Rate 4 x 0.25 = 1: a batch is a whole group.
    batches = sampled(plan, 12)
    assert batches[:4] == batches[4:8] == batches[8:]
    assert sorted(row for batch in batches[:4] for row in batch) == [*range(40)]
    sizes = {*map(len, batches)}
    assert (sizes == {10}) is (plan is EQUAL)
    less = dataclasses.replace(plan, sampling_rate=0.125)
    counts = np.bincount([*itertools.chain(*sampled(less, 4000))], minlength=40)
    # 1,000 rounds with probability 0.5, for each sample.
    assert stats.chisquare(counts).pvalue > 1e-3
    assert counts.sum() == pytest.approx(4000 * 5, rel=0.02)
    for row in range(40):
        steps = [t for t, batch in enumerate(sampled(less, 200)) if row in batch]
        assert len({step % 4 for step in steps}) == 1


def test_groups_are_independent_draws_or_of_equal_sizes():
    drawn = sampling.random_groups(30_000, 3, key=KEY, equal=False)
    assert stats.chisquare(np.bincount(drawn)).pvalue > 1e-3
    pairs = 3 * drawn[::2] + drawn[1::2]
    assert stats.chisquare(np.bincount(pairs)).pvalue > 1e-3
    equal = sampling.random_groups(32, 3, key=KEY, equal=True)
    assert sorted(np.bincount(equal)) == [10, 11, 11]


def test_a_fixed_order_is_the_same_in_every_epoch_with_a_short_last_batch():
    assert (FIXED.expected_batch_size, FIXED.steps_per_epoch) == (12, 4)
    batches = sampled(FIXED, 12)
    assert [*map(len, batches[:4])] == [12, 12, 12, 4]
    assert batches[:4] == batches[4:8] == batches[8:]
    assert sorted(row for batch in batches[:4] for row in batch) == [*range(40)]
    assert batches[0] != [*range(12)]
    assert FIXED.largest_batch == 12


def at(step):
    return SimpleNamespace(key=KEY, step=torch.tensor(step))


@pytest.mark.parametrize("plan", PLANS)
def test_a_sampler_draws_the_batches_of_the_plan_once(plan):
    plan = dataclasses.replace(plan, steps=9)
    batches = sampled(plan, 9)
    sampler = plan.sampler(at(2))
    assert len(sampler) == 7
    assert list(sampler) == batches[2:]
    with pytest.raises(RuntimeError, match="expected one pass"):
        next(iter(sampler))
    assert plan.sampler(at(2)).digest == sampler.digest
    assert plan.sampler(at(3)).digest != sampler.digest


def test_a_plan_after_another_starts_its_groups_and_its_order_anew():
    for second in (CYCLIC, FIXED):
        first = Plan(**RUN | {"steps": 7}, neighbours=second.neighbours)
        both = second.after(first, 7)
        batches = [both.sample(key=KEY, step=step).tolist() for step in range(7, 15)]
        assert batches[:4] == batches[4:]
        assert not set(batches[0]) & set(batches[1])
        assert both.account(8) == first.account(7) + second.account(1)


def test_correlated_noise_that_was_left_early_keeps_its_identity_and_account():
    first = dataclasses.replace(FIXED, steps=12, noise_multiplier=2.0)
    both = first.after(first, 5)
    before = both.before
    assert (both.steps, before.steps, before.horizon) == (17, 5, 12)
    assert torch.equal(before.digest, first.digest)
    assert not torch.equal(both.digest, first.digest)
    assert before.epsilon() == first.epsilon(5)
    assert before.deviation(3) == both.deviation(3) == first.deviation(3)
    assert both.deviation(5) == first.deviation(0)
    assert both.account(17) == first.account(5) + first.account(12)
    assert both.account(4) == first.account(4)
    third = first.after(both, 9)
    assert third.account(21) == both.account(9) + first.account(12)
    assert Plan(**json.loads(json.dumps(dataclasses.asdict(third)))) == third
    for fields in ({"horizon": 11}, {"horizon": 12, "noise": noising.independent()}):
        with pytest.raises(ValueError, match="horizon"):
            dataclasses.replace(first, **fields)


def test_plans_that_differ_in_a_field_share_neither_batches_nor_identity():
    plain = Plan(**RUN, neighbours="zero_out")
    others = [
        Plan(**RUN),
        *PLANS,
        dataclasses.replace(TRUNCATED, max_batch_size=12),
        Plan(**RUN, samples_per_unit=2),
        Plan(**RUN, discrete="sum"),
        Plan(**RUN, neighbours="replace_one"),
        Plan(**RUN, sampling="fixed_order"),
        Plan(**RUN | {"max_norm": dp.quantile_clip(count_deviation=2.0)}),
        Plan(**RUN | {"max_norm": dp.quantile_clip(quantile=0.4, count_deviation=2.0)}),
        dataclasses.replace(CYCLIC, noise=noising.band_mf(3)),
        dataclasses.replace(CYCLIC, steps=3999),
        dataclasses.replace(CYCLIC, noise=noising.from_coefficients([1.0, 0.5])),
    ]
    assert len({bytes(p.digest.numpy()) for p in [plain, *others]}) == 1 + len(others)
    keys = [bytes(p._subkey(KEY).numpy()) for p in [plain, *others]]
    assert len({*keys}) == 1 + len(others)
    cached = Plan(**RUN | {"sampling_rate": 0.3}, noise=noising.bisr(4, cache=True))
    assert torch.equal(cached.digest, FIXED.digest)


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_survives_a_file(plan):
    text = json.dumps(dataclasses.asdict(plan))
    again = Plan(**json.loads(text))
    assert again == plan
    assert torch.equal(again.digest, plan.digest)
    adaptive = Plan(**RUN | {"max_norm": dp.quantile_clip(count_deviation=2.0)})
    assert Plan(**json.loads(json.dumps(dataclasses.asdict(adaptive)))) == adaptive


def test_a_compiled_step_of_truncated_batches_has_one_capture():
    plan = Plan(**RUN | {"sampling_rate": 0.2, "steps": 200}, max_batch_size=12)
    tx = optim.sgd(0.1)
    step = vgrad.compile(private_step(product, tx, plan), backend="replay")
    state = TrainState.create(tx, {"w": torch.zeros(8)}, {}, seed=1)
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    sizes = set()
    for rows in plan.sampler(state):
        state, metrics = step(state, data[rows])
        sizes.add(int(metrics["samples"]))
    explained = vgrad.explain(step)(state, data[:1])
    assert len(sizes) > 8
    assert len({capture.name for capture in explained.captures}) == 2
    assert len(explained.captures) == 2  # the sums, and the optimizer


# Accounts.


def test_truncated_steps_cost_as_measured():
    # dp_accounting's own test of two kinds of truncated steps.
    kinds = [
        accounting.Steps(0.5, 1.0, 3, (2, 4)),
        accounting.Steps(0.5, 1.0, 2, (2, 3)),
    ]
    spent = accounting.composed(kinds, 1e-6, "pld")
    assert spent == pytest.approx(17.904330, rel=1e-5)
    run = {"dataset_size": 50_000, "max_norm": 1.0, "delta": 1e-5}
    run |= {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 2000}
    expected = {None: 2.583852, 550: 5.598308, 600: 2.594}
    for most, epsilon in expected.items():
        found = Plan(**run, max_batch_size=most).epsilon()
        assert found == pytest.approx(epsilon, rel=5e-4), most
    rdp = Plan(**run, accountant="rdp").epsilon()
    assert rdp == pytest.approx(2.866458, rel=1e-6)
    cyclic = Plan(**run, noise=noising.band_mf(4)).epsilon()
    assert cyclic == pytest.approx(5.878524, rel=5e-4)


@pytest.mark.slow
def test_the_least_largest_batch_costs_at_most_one_per_cent():
    run = {"dataset_size": 50_000, "max_norm": 1.0, "delta": 1e-5}
    run |= {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 2000}
    automatic = Plan(**run, max_batch_size="auto")
    most = automatic.max_batch_size
    assert automatic.epsilon() <= 1.01 * Plan(**run).epsilon()
    less = dataclasses.replace(automatic, max_batch_size=most - 1)
    assert less.epsilon() > 1.01 * Plan(**run).epsilon()
    assert 580 < most <= 600


def released(x, samples, rate, most, other, own=None):
    """Return the density of a sum of truncated batches, plus normal noise.

    Of all samples but one, which has the gradient `own`, the gradient is `other`.
    """
    total = np.zeros_like(x)
    for count in range(samples + 1):
        kept = min(count, most)
        inside = 0.0 if own is None else kept / samples
        values = stats.norm.pdf(x, other * kept), 0.0
        if own is not None:
            values = values[0], stats.norm.pdf(x, other * (kept - 1) + own)
        mixture = (1 - inside) * values[0] + inside * values[1]
        total += stats.binom.pmf(count, samples, rate) * mixture
    return total


@pytest.mark.parametrize(("size", "rate", "most"), [(4, 0.5, 2), (6, 0.3, 3)])
@pytest.mark.parametrize("relation", ["add_or_remove_one", "zero_out"])
def test_the_account_of_truncated_batches_bounds_a_mechanism(
    size, rate, most, relation
):
    x = np.linspace(-15, 15, 60_001)
    kind = accounting.Steps(rate, 1.0, 1, (most, size), relation)
    bounds = {
        delta: accounting.composed([kind], delta, "pld") for delta in (0.05, 1e-4)
    }
    closest = 0.0
    for other in (-1.0, 1.0):
        for own in (-1.0, 1.0):
            one = released(x, size, rate, most, other, own)
            if relation == "zero_out":
                two = released(x, size, rate, most, other, 0.0)
            else:
                two = released(x, size - 1, rate, most, other)
            assert np.trapezoid(one, x) == pytest.approx(1)
            for delta, epsilon in bounds.items():
                for p, q in ((one, two), (two, one)):
                    excess = np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x)
                    assert excess <= delta * 1.001
                    closest = max(closest, excess / delta)
    assert closest > 0.02  # the bound is of this size


def test_a_fixed_order_is_not_amplified():
    plan = Plan(**RUN | {"steps": 10}, sampling="fixed_order")
    assert plan.neighbours == "zero_out"
    assert plan.epsilon() == pytest.approx(gaussian_epsilon(1.0, 3, 1e-3), rel=1e-3)
    assert plan.epsilon(4) == pytest.approx(gaussian_epsilon(1.0, 1, 1e-3), rel=1e-3)
    # A replaced sample moves the sums by twice as much.
    replaced = dataclasses.replace(plan, neighbours="replace_one")
    expected = gaussian_epsilon(0.5, 3, 1e-3)
    assert replaced.epsilon() == pytest.approx(expected, rel=1e-3)


def test_correlated_noise_in_a_fixed_order_is_one_gaussian_mechanism():
    plan = dataclasses.replace(FIXED, steps=10, noise_multiplier=2.0)
    fitted = plan.fitted
    assert (fitted.separation, fitted.participations) == (4, 3)
    whole, part = fitted.sensitivity(), fitted.sensitivity(5)
    for steps, multiplier in ((10, 2.0), (5, 2.0 * whole / part)):
        expected = gaussian_epsilon(multiplier, 1, 1e-3)
        assert plan.epsilon(steps) == pytest.approx(expected, rel=1e-3)
    rows = fitted.row_norms(10)
    for step in (0, 3, 9):
        expected = 2.0 * whole * rows[step] / 12
        assert plan.deviation(step) == pytest.approx(expected)
    with pytest.raises(ValueError, match="one of the 10 steps"):
        plan.deviation(10)


def test_cyclic_steps_have_the_account_of_their_rounds():
    plan = dataclasses.replace(CYCLIC, sampling_rate=0.05, steps=10)
    round_of = {"sampling_rate": 0.2, "noise_multiplier": 1.0, "delta": 1e-3}
    for steps, rounds in ((10, 3), (8, 2), (9, 3), (1, 1)):
        assert plan.epsilon(steps) == dp.epsilon(**round_of, steps=rounds)
    event = plan.dp_event()
    assert (event.count, event.event.sampling_probability) == (3, pytest.approx(0.2))
    equal = dataclasses.replace(
        plan, sampling="cyclic_equal", neighbours=None, max_batch_size=4
    )
    assert equal.neighbours == "zero_out"
    event = equal.dp_event().event
    assert (event.dataset_size, event.truncated_batch_size) == (10, 4)
    assert equal.epsilon() >= plan.epsilon()


RELATIONS = {
    "add_or_remove_one": "ADD_OR_REMOVE_ONE",
    "zero_out": "REPLACE_SPECIAL",
    "replace_one": "REPLACE_ONE",
}


@pytest.mark.parametrize("plan", [*PLANS, Plan(**RUN, neighbours="replace_one")])
def test_the_event_of_a_plan_has_its_epsilon_elsewhere(plan):
    plan = dataclasses.replace(plan, steps=8, noise_multiplier=3.0)
    relation = RELATIONS[plan.neighbours]
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation[relation]
    )
    for steps in (8, 3):
        accountant = type(accountant)(dp_accounting.NeighboringRelation[relation])
        accountant.compose(plan.dp_event(steps))
        expected = accountant.get_epsilon(1e-3)
        assert plan.epsilon(steps) == pytest.approx(expected, rel=2e-3)


def test_the_event_of_two_plans_is_composed():
    both = TRUNCATED.after(Plan(**RUN | {"steps": 3}), 3)
    first, second = both.dp_event(5).events
    assert (first.count, second.count) == (3, 2)
    assert both.dp_event(3).count == 3
    assert isinstance(both.dp_event(0), dp_accounting.NoOpDpEvent)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [30.0, 1e3, 1e6, 1e300])
@pytest.mark.parametrize("steps", [1, 100])
def test_epsilon_is_never_negative_however_much_noise_there_is(
    accountant, noise, steps
):
    for rate in (1e-6, 0.01, 1.0):
        run = {"sampling_rate": rate, "noise_multiplier": noise, "steps": steps}
        assert 0 <= dp.epsilon(**run, delta=1e-2, accountant=accountant) < 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = Plan(**RUN | {"noise_multiplier": noise}, max_batch_size=10)
        assert 0 <= plan.epsilon(1) < 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_batch_size": 110},
        {"max_batch_size": "auto"},
        {"noise": noising.bisr(4)},
        {"noise": noising.band_inv_mf(4)},
        {"noise": noising.blt(2)},
        {"noise": noising.band_mf(4)},
        {
            "noise": noising.band_mf(4),
            "sampling": "cyclic_equal",
            "max_batch_size": 120,
        },
        {"noise": noising.from_coefficients([1.0, 0.5, 0.2])},
        {"max_norm": dp.quantile_clip(count_deviation=2.0)},
        {"samples_per_unit": 2},
        {"sampling": "fixed_order"},
        {"neighbours": "replace_one"},
    ],
    ids=str,
)
def test_a_budget_is_kept_by_every_scheme(fields):
    fields = {"max_norm": 1.0} | fields
    plan = Plan.for_epsilon(
        3.0, dataset_size=1000, batch_size=100, epochs=5, delta=1e-4, **fields
    )
    assert plan.steps == 50
    assert 2.99 < plan.epsilon() <= 3.0


def test_numbers_of_other_types_make_the_same_plan():
    for same, value in ((False, 0), (False, np.False_), ("sum", np.str_("sum"))):
        plan, other = Plan(**RUN, discrete=same), Plan(**RUN, discrete=value)
        assert other.discrete is same
        assert torch.equal(other.digest, plan.digest)
        assert other.epsilon(9) == plan.epsilon(9)
    small = {name: np.float32(x) for name, x in RUN.items() if isinstance(x, float)}
    same = Plan(**RUN | {name: float(x) for name, x in small.items()})
    other = Plan(**RUN | small)
    assert other == same
    assert torch.equal(other.digest, same.digest)
    assert other.epsilon(9) == same.epsilon(9)
    steps = {name: small[name] for name in SPENDING} | {"steps": 9}
    assert dp.epsilon(**steps) == same.epsilon(9)
    clip = {"count_deviation": 2.0, "rate": 0.125}
    small = {name: np.float32(x) for name, x in clip.items()}
    assert dp.quantile_clip(**small) == dp.quantile_clip(**clip)
    plan = dataclasses.replace(FIXED, horizon=5000)
    other = dataclasses.replace(FIXED, horizon=np.int64(5000))
    assert torch.equal(other.digest, plan.digest)


# Refusals.

ADAPTS = {"max_norm": dp.quantile_clip(count_deviation=2.0)}
NOISES = {"discrete": {"discrete": "sum"}, "quantile_clip": ADAPTS}
NOISES |= {name: {"noise": noising.Noising(name, 2)} for name in ("bisr", "blt")}
NOISES["band_mf"] = {"noise": noising.from_coefficients([1.0, 0.5])}
NOISES["band_inv_mf"] = {"noise": noising.from_coefficients([1.0, -0.5], inverse=True)}
NOISES["independent"] = {}


@pytest.mark.parametrize("noise", mechanisms.NOISES)
@pytest.mark.parametrize("kind", mechanisms.MECHANISMS)
def test_plans_are_made_of_the_combinations_of_the_table_alone(kind, noise):
    run = RUN | {"steps": 8} | NOISES[noise] | {"sampling": kind.sampling}
    run |= {"max_batch_size": 9} if kind.truncated else {}
    for relation in get_args(accounting.Neighbours):
        for accountant in accounting.ACCOUNTANTS:
            run |= {"neighbours": relation, "accountant": accountant}
            run["samples_per_unit"] = 1 if relation == "fixed_graph" else None
            account = kind.account_for(relation)
            if noise in account.noises and accountant in account.accountants:
                plan = Plan(**run)
                assert type(plan.mechanism) is kind
                assert 0 < plan.epsilon(1) < math.inf
            else:
                with pytest.raises(ValueError, match="With all else as it is, take"):
                    Plan(**run)


@pytest.mark.parametrize("plan", [TRUNCATED, FIXED])
def test_a_step_refuses_a_batch_that_the_plan_never_draws(plan):
    step = private_step(product, optim.sgd(0.1), plan)
    params, most = {"w": torch.ones(3)}, plan.largest_batch
    state = TrainState.create(optim.sgd(0.1), params, {})
    step(state, torch.ones(most, 3))
    with pytest.raises(ValueError, match=f"at most the {most} samples"):
        step(state, torch.ones(most + 1, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": "balls_in_bins"}, "sampling 'poisson' or 'fixed_order'"),
        ({"sampling": "cyclic_poisson"}, "'fixed_order'; or noise 'band_mf'"),
        ({"noise": noising.bisr(2), "sampling": "poisson"}, "sampling 'fixed_order'"),
        ({"noise": noising.blt(2), "neighbours": "add_or_remove_one"}, "'zero_out'"),
        ({"noise": noising.band_mf(5)}, "at most 1 / 5"),
        (
            {"noise": noising.band_mf(4), "sampling": "cyclic_equal"}
            | {"neighbours": "add_or_remove_one"},
            "'zero_out'",
        ),
        (
            {"noise": noising.band_mf(4), "max_batch_size": 11},
            "take sampling 'cyclic_equal'; or noise",
        ),
        ({"sampling": "fixed_order", "max_batch_size": 11}, "'poisson'; or max"),
        ({"max_batch_size": 11, "neighbours": "replace_one"}, "'zero_out'"),
        ({"max_batch_size": 11, "accountant": "rdp"}, "accountant 'pld'"),
        ({"neighbours": "replace_one", "accountant": "rdp"}, "'pld'"),
        ({"neighbours": "fixed_graph"}, "samples_per_unit=1"),
        ({"neighbours": "fixed_graph", "samples_per_unit": 2}, "samples_per_unit=1"),
        ({"before": Plan(**RUN), "steps": 5000, "samples_per_unit": 2}, "of one kind"),
        ({"sampling": "fixed_order", "sampling_rate": 0.26}, "a whole number"),
        ({"discrete": "sum", "noise": noising.band_mf(4)}, "'band_mf and discrete'"),
        (ADAPTS | {"noise": noising.band_mf(4)}, "'band_mf and quantile_clip'"),
        (ADAPTS | {"discrete": "sum"}, "'discrete and quantile_clip'"),
        (ADAPTS | {"sampling": "fixed_order"}, "neighbours 'replace_one'"),
        (ADAPTS | {"noise_multiplier": 4.0}, r"< 2 \* count_deviation = 4"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"samples_per_unit": 0}, "samples_per_unit"),
        ({"discrete": "yes"}, "discrete"),
        ({"discrete": True}, 'or "sum", got True.*integers.*from its parameters'),
        ({"discrete": np.True_}, "got True"),
        ({"before": Plan(**RUN), "steps": 5000, "sampling": "fixed_order"}, "two rel"),
        ({"before": TRUNCATED, "steps": 5000, "accountant": "rdp"}, "alone bounds all"),
    ],
    ids=str,
)
def test_combinations_without_an_account_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan(**RUN | fields)
    with pytest.raises(TypeError, match=r"noising\.band_mf"):
        Plan(**RUN, noise="band_mf")

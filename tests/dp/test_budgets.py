"""Plans that are made for a budget: of noise, of steps, of batches, large and tiny."""

import dataclasses
import math

import pytest

from tests.dp import runs
from tests.dp.test_accounting import gaussian_epsilon
from vgrad.dp import Plan, accounting, noising, quantile_clip

SLOW = pytest.mark.slow
DATA = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
BEFORE = runs.plan(1000, 0.2, noise=4.0, steps=20, delta=1e-5)


def one_more(plan, **changed):
    return dataclasses.replace(plan, **changed).epsilon()


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 100},
        {"sampling_rate": 0.1, "accountant": "rdp"},
        {"sampling_rate": 0.1, "max_norm": quantile_clip()},
        {"batch_size": 100, "max_batch_size": 130},
        {"batch_size": 100, "neighbours": "replace_one"},
        {"batch_size": 100, "samples_per_unit": 3},
        pytest.param({"batch_size": 100, "before": BEFORE}, marks=SLOW),
    ],
    ids=str,
)
def test_with_noise_and_a_rate_a_plan_has_the_most_steps_of_a_budget(options):
    plan = Plan.for_epsilon(2.0, noise_multiplier=8.0, **DATA | options)
    assert (plan.noise_multiplier, plan.sampling_rate) == (8.0, 0.1)
    assert plan.epsilon() <= 2.0 < one_more(plan, steps=plan.steps + 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"accountant": "rdp"}, pytest.param({"max_batch_size": 400}, marks=SLOW)],
    ids=str,
)
def test_with_noise_and_steps_a_plan_has_the_largest_batches_of_a_budget(options):
    plan = Plan.for_epsilon(2.0, noise_multiplier=8.0, steps=200, **DATA | options)
    size = plan.expected_batch_size
    assert plan.steps == 200
    assert size == round(size, 9)
    more = one_more(plan, sampling_rate=(size + 1) / 1000)
    assert plan.epsilon() <= 2.0 < more


def test_batches_in_a_fixed_order_end_with_an_epoch():
    run = {"noise_multiplier": 5.0, "sampling": "fixed_order"}
    plan = Plan.for_epsilon(3.0, batch_size=100, **run, **DATA)
    assert plan.steps == 120
    assert gaussian_epsilon(5.0, 12, 1e-5) <= 3.0 < gaussian_epsilon(5.0, 13, 1e-5)
    plan = Plan.for_epsilon(3.0, steps=100, **run, **DATA)
    assert math.ceil(100 / plan.steps_per_epoch) == 12


def test_a_budget_for_releases_and_after_others_has_them_in_it():
    run = {"noise_multiplier": 8.0, "batch_size": 100}
    plan = Plan.for_epsilon(2.0, releases=4, **run, **DATA)
    assert plan.epsilon(releases=4) <= 2.0
    assert dataclasses.replace(plan, steps=plan.steps + 1).epsilon(releases=4) > 2.0
    run = {"sampling_rate": 0.1, "steps": 120, "before": BEFORE}
    plan = Plan.for_epsilon(2.0, **run, **DATA)
    assert 1.999 < plan.epsilon() <= 2.0
    assert plan.epsilon(20) == BEFORE.epsilon()


def test_all_of_a_data_set_is_the_largest_batch():
    plan = Plan.for_epsilon(1000.0, noise_multiplier=1.0, steps=100, **DATA)
    assert plan.sampling_rate == 1.0


@pytest.mark.parametrize("limit", [10, 1000, 10**9])
@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_the_search_finds_the_last_count_and_does_not_go_on(power, limit):
    asked = []

    def share(count):
        asked.append(count)
        return (count / limit) ** power

    found = accounting.largest_count(share, 10**10)
    assert found == limit if limit <= 1000 else limit * (1 - 2e-4) < found <= limit
    assert len(asked) < 60
    assert accounting.largest_count(lambda count: 2.0, 10) == 0
    assert accounting.largest_count(lambda count: 0.0, 10) == 10
    assert (
        accounting.largest_count(lambda count: math.inf if count > 7 else 0.0, 100) == 7
    )


NOISE = {"noise_multiplier": 5.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 100, "steps": 3}, "expected one of steps, sampling_rate and"),
        ({}, "expected one of steps, sampling_rate and batch_size"),
        ({"batch_size": 100, "epochs": 3}, "no epochs"),
        ({"steps": 100, "max_batch_size": "auto"}, "and no max_batch_size='auto'"),
        ({"batch_size": 100, "noise": noising.band_mf(4)}, "independent noise"),
        ({"batch_size": 0}, "batch_size=0.* expected a whole number >= 1"),
        ({"batch_size": 2000}, "expected a probability, at most 1"),
        ({"steps": 0}, "expected a whole number >= 1"),
        ({"batch_size": 100, "noise_multiplier": 0.0}, "for one step at least"),
        ({"steps": 9, "noise_multiplier": 0.05}, "for batches of one sample at least"),
        ({"sampling_rate": 1e-6, "noise_multiplier": 200.0}, "budget below 5000000000"),
        ({"batch_size": 100, "noise_multiplier": math.nan}, "noise_multiplier=nan"),
    ],
    ids=str,
)
def test_noise_with_numbers_that_do_not_make_a_plan_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Plan.for_epsilon(1.0, **DATA | NOISE | options)


@pytest.mark.parametrize("target", [0.01, 1000.0])
@pytest.mark.parametrize(
    "options",
    [
        {"sampling_rate": 0.1, "steps": 100},
        {"sampling_rate": 0.1, "steps": 100, "accountant": "rdp"},
        {"sampling_rate": 1.0, "steps": 10},
        {"sampling_rate": 0.1, "steps": 20, "noise": noising.band_mf(2)},
        pytest.param({"batch_size": 10, "noise_multiplier": 200.0}, marks=SLOW),
        pytest.param({"steps": 100, "noise_multiplier": 0.05}, marks=SLOW),
    ],
    ids=str,
)
def test_large_and_tiny_budgets_are_kept_or_refused_in_words(target, options):
    refused = "noise_multiplier" in options and (target < 1) == ("steps" in options)
    if refused:
        with pytest.raises(ValueError, match="expected a budget"):
            Plan.for_epsilon(target, **DATA | options)
    else:
        assert 0 < Plan.for_epsilon(target, **DATA | options).epsilon() <= target


def test_epsilon_has_a_bound_where_the_library_has_none():
    """Between 709 and 745, where exp(-epsilon) is not zero and hardly a number."""
    spent = runs.plan(100, 1.0, noise=math.sqrt(10) / 33.3, steps=10, delta=1e-6)
    assert gaussian_epsilon(math.sqrt(10) / 33.3, 10, 1e-6) <= spent.epsilon() == 750.0


def test_the_least_noise_is_found_at_once_where_it_is_enough():
    plan = Plan.for_epsilon(1000.0, sampling_rate=0.01, steps=1, **DATA)
    assert plan.noise_multiplier == 0.05

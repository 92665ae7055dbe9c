"""Releases of others, as events of dp_accounting, in the account of a plan."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
import torch

from tests.dp import runs
from tests.dp.test_accounting import gaussian_epsilon
from tests.losses import product
from vgrad import optim
from vgrad.dp import Plan
from vgrad.training import TrainState, private_step, release

GAUSSIAN = dp_accounting.GaussianDpEvent
COUNTS = "a histogram of the labels"
PLAN = runs.plan(60, 0.5, noise=4.0, steps=5, delta=1e-4)
FIRST = runs.plan(60, 0.2, noise=3.0, steps=10, delta=1e-4)
LAPLACE = dp_accounting.LaplaceDpEvent(5.0)


def sampled(rate, noise, count):
    one = dp_accounting.PoissonSampledDpEvent(rate, GAUSSIAN(noise))
    return dp_accounting.SelfComposedDpEvent(one, count)


def test_events_and_steps_are_one_account():
    full = runs.plan(60, 1.0, noise=4.0, steps=5, delta=1e-4)
    both = full.after(GAUSSIAN(2.0), words=COUNTS)
    mean = math.sqrt(1 / 4 + 5 / 16)
    exact = gaussian_epsilon(1 / mean, 1, 1e-4)
    assert exact <= both.epsilon() <= 1.001 * exact
    assert both.mu() == pytest.approx(mean)
    assert both.epsilon(0) == pytest.approx(gaussian_epsilon(2.0, 1, 1e-4), rel=1e-3)
    assert both.mu(0) == 0.5


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_of_others_count_as_the_plan_s_own(accountant):
    plan = dataclasses.replace(PLAN, accountant=accountant)
    event = dp_accounting.ComposedDpEvent(
        [
            sampled(0.5, 4.0, 2),
            dp_accounting.NoOpDpEvent(),
            sampled(0.5, 4.0, np.int64(1)),
        ]
    )
    longer = dataclasses.replace(plan, steps=8)
    assert plan.after(event, words=COUNTS).epsilon() == longer.epsilon()
    twice = plan.after(sampled(0.5, 4.0, 1), words="one").after(
        sampled(0.5, 4.0, 2), words="two"
    )
    assert [event.words for event in twice.events] == ["one", "two"]
    assert twice.epsilon() == longer.epsilon()
    # The event happened once, whatever is released together.
    five = dataclasses.replace(plan, steps=13)
    assert twice.epsilon(releases=2) == five.epsilon()
    assert twice.dp_event() == dp_accounting.ComposedDpEvent(
        [sampled(0.5, 4.0, 1).event, sampled(0.5, 4.0, 2), plan.dp_event()]
    )


def test_a_truncated_event_has_the_account_of_distributions_alone():
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(60, 0.5, 40, 4.0)
    plan = PLAN.after(event, words=COUNTS)
    assert plan.accountants == {"pld"}
    cut = dataclasses.replace(PLAN, max_batch_size=40, steps=1)
    assert plan.epsilon() == PLAN.after(cut, 1).epsilon()
    with pytest.raises(ValueError, match="expected 'pld'"):
        dataclasses.replace(PLAN, accountant="rdp").after(event, words=COUNTS)


def test_a_plan_with_events_is_made_again_from_plain_numbers():
    plan = PLAN.after(sampled(0.1, 2.0, 9), words=COUNTS).after(FIRST, 4)
    again = Plan(**json.loads(json.dumps(dataclasses.asdict(plan))))
    assert again == plan
    assert again.epsilon() == plan.epsilon()
    assert torch.equal(again.digest, plan.digest)


def test_events_stay_in_the_account_of_the_plans_that_follow():
    first = FIRST.after(GAUSSIAN(2.0), words=COUNTS)
    for steps in (0, 3):
        both = PLAN.after(first, steps)
        assert [event.words for event in both.all_events] == [COUNTS]
        expected = PLAN.after(FIRST, steps).after(GAUSSIAN(2.0), words=COUNTS)
        assert both.epsilon() == expected.epsilon() > PLAN.epsilon()
    # A plan between, under which no step was taken.
    between = runs.plan(60, 0.3, noise=3.0, delta=1e-4)
    between = between.after(GAUSSIAN(5.0), words="more").after(first, 3)
    both = PLAN.after(between, 3)
    assert {event.words for event in both.all_events} == {COUNTS, "more"}
    assert both.before == dataclasses.replace(first, steps=3)


def test_a_state_goes_on_under_a_plan_with_its_events_alone():
    plan, tx = PLAN.after(GAUSSIAN(2.0), words=COUNTS), optim.sgd(0.1)
    state = TrainState.create(tx, {"w": torch.zeros(8)}, {}, seed=1)
    state, _ = private_step(product, tx, plan)(state, torch.ones(3, 8))
    with pytest.raises(ValueError, match="expected a state whose private steps"):
        PLAN.sampler(state)
    renamed = PLAN.after(GAUSSIAN(2.0), words="other words")
    assert len(renamed.sampler(state)) == 4
    assert len(PLAN.after(plan, 1).sampler(state)) == 5


def test_the_claim_names_the_releases_of_others(tmp_path):
    tx, plan = optim.sgd(0.1), PLAN.after(GAUSSIAN(2.0), words=COUNTS)
    state = TrainState.create(tx, {"w": torch.zeros(8)}, {}, seed=1)
    state, _ = private_step(product, tx, plan)(state, torch.ones(3, 8))
    release(tmp_path / "model", state, plan)
    claim = json.loads((tmp_path / "model" / "privacy.json").read_text())
    account = [{"sampling_rate": 1.0, "noise_multiplier": 2.0, "steps": 1}]
    assert claim["events"] == [{"words": COUNTS, "account": account}]
    assert [term["steps"] for term in claim["account"]] == [1]
    assert claim["epsilon"] == plan.epsilon(1) > PLAN.epsilon(1)
    assert claim["mu"] == plan.mu(1)


def test_noise_is_found_beside_the_releases_of_others():
    events = PLAN.after(GAUSSIAN(2.0), words=COUNTS).events
    run = {"dataset_size": 60, "sampling_rate": 0.5, "max_norm": 1.0, "delta": 1e-4}
    run |= {"steps": 5, "events": events}
    plan = Plan.for_epsilon(3.0, **run)
    assert 2.999 < plan.epsilon() <= 3.0
    with pytest.raises(ValueError, match="expected a budget that some noise"):
        Plan.for_epsilon(0.5, **run)


NO_GAUSSIAN = "or a DpEvent of Gaussian releases"


@pytest.mark.parametrize(
    ("event", "words", "message"),
    [
        (5, COUNTS, f"{NO_GAUSSIAN}.* got a int"),
        (None, COUNTS, f"{NO_GAUSSIAN}.* got a NoneType"),
        (GAUSSIAN(1.0), None, "words=None.* expected words that name the releases"),
        (GAUSSIAN(1.0), " ", "expected words that name the releases"),
        (GAUSSIAN(-1.0), COUNTS, "noise_multiplier=-1.0"),
        (GAUSSIAN(math.nan), COUNTS, "noise_multiplier=nan"),
        (GAUSSIAN(torch.ones(2)), COUNTS, "noise_multiplier=.* expected a number"),
        (GAUSSIAN("1"), COUNTS, "noise_multiplier='1'"),
        (sampled(1.5, 1.0, 3), COUNTS, "sampling_rate=1.5"),
        (sampled(0.0, 1.0, 3), COUNTS, "sampling_rate=0.0"),
        (sampled(0.5, 1.0, 2.5), COUNTS, "count=2.5.* expected a whole number"),
        (sampled(0.5, 1.0, -1), COUNTS, "count=-1"),
        (dp_accounting.UnsupportedDpEvent(), COUNTS, NO_GAUSSIAN),
        (dp_accounting.NonPrivateDpEvent(), COUNTS, NO_GAUSSIAN),
        (dp_accounting.LaplaceDpEvent(5.0), COUNTS, f"{NO_GAUSSIAN}.* got a Laplace"),
        (dp_accounting.PoissonSampledDpEvent(0.5, LAPLACE), COUNTS, NO_GAUSSIAN),
    ],
    ids=str,
)
def test_events_without_an_account_are_refused(event, words, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PLAN.after(event, words=words)


def test_words_and_steps_belong_to_one_kind_each():
    with pytest.raises(ValueError, match="expected no steps beside an event"):
        PLAN.after(GAUSSIAN(1.0), 3, words=COUNTS)
    with pytest.raises(ValueError, match="and no words beside it"):
        PLAN.after(FIRST, 3, words=COUNTS)
    with pytest.raises(ValueError, match="expected the number of steps taken"):
        PLAN.after(FIRST)


@pytest.mark.parametrize("events", [5, [5], "a", {"a": GAUSSIAN(1.0)}])
def test_a_field_of_other_things_than_events_is_refused(events):
    with pytest.raises(TypeError, match="expected the events of another plan"):
        dataclasses.replace(PLAN, events=events)


def test_an_event_has_the_relation_of_the_plan():
    replaced = dataclasses.replace(PLAN, neighbours="replace_one")
    assert replaced.after(GAUSSIAN(9.0), words=COUNTS).mu(0) == 2 / 9
    later = PLAN.after(GAUSSIAN(9.0), words=COUNTS)
    assert dataclasses.replace(later, neighbours="replace_one").mu(0) == 2 / 9


def test_an_event_without_noise_has_an_infinite_epsilon():
    plan = PLAN.after(GAUSSIAN(0.0), words="the labels")
    assert (plan.epsilon(), plan.mu()) == (math.inf, math.inf)
    assert plan.true_positive_rates([0.01]) == [1.0]
    assert "epsilon   inf" in plan.summary()

"""The text of a plan: for a screen, and in one line."""

import dp_accounting
import pytest

from tests.dp import runs
from vgrad.dp import Plan, noising, quantile_clip

PLAN = runs.plan(1000, 0.1, noise=2.0, steps=50, delta=1e-5)


def lines(plan):
    return dict(line.split(None, 1) for line in plan.summary().splitlines())


def test_a_summary_has_the_numbers_of_the_plan():
    text, [power] = lines(PLAN), PLAN.true_positive_rates([1e-3])
    assert text["epsilon"] == f"{PLAN.epsilon():.3g} at delta 1e-05"
    assert text["mu"].split()[0] == f"{PLAN.mu():.3g}"
    assert f"at most {power:.3g} at" in text["power"]
    assert text["steps"] == "50, 10 in an epoch"
    assert text["batches"] == "Poisson batches, 100 of 1,000 samples on average"
    assert text["noise"] == "2 times a max_norm of 1, independent"


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"neighbours": "zero_out"}, "relation", "zero_out"),
        ({"samples_per_unit": 3}, "batches", "1,000 units of 3 samples at most"),
        ({"max_batch_size": 150}, "batches", "on average, at most 150"),
        ({"sampling": "fixed_order"}, "batches", "in a fixed order, 100 of"),
        ({"noise": noising.blt(2)}, "noise", "blt(2)"),
        ({"discrete": "sum"}, "noise", "discrete"),
        ({"bound": quantile_clip()}, "noise", "a max_norm of 1 at first"),
        ({"bound": {"*": 2.0}}, "noise", "a max_norm of 2, independent"),
        ({"noise_multiplier": 0.0}, "epsilon", "inf at"),
    ],
    ids=str,
)
def test_a_summary_names_all_that_is_particular(options, name, words):
    run = {"dataset_size": 1000, "sampling_rate": 0.1, "noise_multiplier": 2.0}
    run |= {"steps": 50, "delta": 1e-5, "max_norm": options.pop("bound", 1.0)}
    plan = Plan(**run | options)
    assert words in lines(plan)[name]
    assert len(plan.summary().splitlines()) <= 10


def test_a_summary_names_earlier_plans_and_the_releases_of_others():
    event = dp_accounting.GaussianDpEvent(10.0)
    both = PLAN.after(event, words="a histogram").after(PLAN, 7)
    text = lines(both)
    assert text["steps"].startswith("57")
    assert text["before"].startswith("7 of the steps, Plan(")
    assert text["others"] == "a histogram: GaussianDpEvent(noise_multiplier=10.0)"


def test_a_plan_is_shown_by_the_fields_that_make_it():
    assert repr(PLAN) == (
        "Plan(dataset_size=1000, sampling_rate=0.1, noise_multiplier=2.0, "
        "max_norm=1.0, steps=50, delta=1e-05, sampling='poisson', "
        "neighbours='add_or_remove_one')"
    )
    assert eval(repr(PLAN), {"Plan": Plan}) == PLAN
    run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "steps": 50, "delta": 1e-5}
    banded = Plan(1000, max_norm=1.0, noise=noising.band_mf(8), **run)
    assert "noise=band_mf(8)" in repr(banded)
    assert len(repr(banded)) < 220

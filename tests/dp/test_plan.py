import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch

from tests import streams
from vgrad import Sensitivity, clipped_grad
from vgrad.dp import Plan, epsilon, noise_multiplier_for, secret_key

RUN = {"noise_multiplier": 2.0, "steps": 20, "delta": 1e-4}
PLAN = Plan(dataset_size=105, sampling_rate=0.1, max_norm=3.0, **RUN)
KEY = secret_key(seed=0)


def state(step=0):
    return SimpleNamespace(key=KEY, step=torch.tensor(step))


def test_the_expected_batch_size_is_not_rounded():
    assert PLAN.expected_batch_size == 10.5


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_the_accountant(accountant):
    plan = dataclasses.replace(PLAN, accountant=accountant)
    run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "delta": 1e-4}
    for given, steps in ((None, 20), (0, 0), (1, 1), (20, 20)):
        expected = epsilon(**run, steps=steps, accountant=accountant)
        assert plan.epsilon(given) == expected


@pytest.mark.parametrize(
    "accountant", ["pld", pytest.param("rdp", marks=pytest.mark.slow)]
)
def test_a_plan_for_a_budget_keeps_it_to_the_last_step(accountant):
    run = {"sampling_rate": 0.1, "steps": 20, "delta": 1e-4, "accountant": accountant}
    plan = Plan.for_epsilon(1.0, dataset_size=105, max_norm=3.0, **run)
    noise = noise_multiplier_for(epsilon=1.0, **run)
    assert plan == Plan(dataset_size=105, noise_multiplier=noise, max_norm=3.0, **run)
    assert plan.epsilon(19) < plan.epsilon() <= 1.0
    assert plan.epsilon() > 0.999


def test_a_plan_may_be_said_in_epochs_and_batches():
    plan = Plan.for_epsilon(
        1.0, dataset_size=105, batch_size=25, epochs=3, max_norm=1.0, delta=1e-4
    )
    assert (plan.sampling_rate, plan.expected_batch_size) == (25 / 105, 25)
    assert plan.steps == 3 * 4


def test_an_epoch_has_as_many_steps_as_batches_fit_into_the_data():
    for size in range(1, 60):
        for batch in range(1, size + 1):
            plan = dataclasses.replace(
                PLAN, dataset_size=size, sampling_rate=batch / size
            )
            assert plan.steps_per_epoch == round(size / batch), (size, batch)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ({}, "epochs=None): expected either"),
        ({"sampling_rate": 0.1}, "steps=None, batch_size=None, epochs=None): expected"),
        ({"sampling_rate": 0.1, "epochs": 3}, "expected either sampling_rate and"),
        ({"batch_size": 10}, "batch_size=10, epochs=None): expected either"),
        (
            {"batch_size": 10, "epochs": 3, "steps": 3},
            "expected either sampling_rate and steps or batch_size and epochs",
        ),
        (
            {"batch_size": 106, "epochs": 3},
            "(batch_size=106): expected at most the 105",
        ),
        ({"batch_size": 10.0, "epochs": 3}, "(batch_size=10.0): expected a whole"),
        ({"batch_size": 10, "epochs": 0}, "(epochs=0): expected a whole number >= 1"),
    ],
)
def test_what_is_drawn_is_said_in_one_way(drawn, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan.for_epsilon(1.0, dataset_size=105, max_norm=1.0, delta=1e-4, **drawn)


def test_a_delta_above_one_over_the_samples_warns():
    with pytest.warns(UserWarning, match="at most 1 / dataset_size = 0.00952, got mor"):
        dataclasses.replace(PLAN, delta=0.01)
    dataclasses.replace(PLAN, delta=1 / 105)


@pytest.mark.parametrize(
    ("steps", "message"),
    [(21, "21): expected at most"), (-1, "-1)"), (2.0, "2.0)"), (True, "True)")],
)
def test_steps_that_are_not_planned_are_refused(steps, message):
    with pytest.raises(ValueError, match=re.escape(f"Plan.epsilon(steps={message}")):
        PLAN.epsilon(steps)


def test_the_sampler_draws_as_planned():
    own = streams.of_plan(KEY.tolist(), dataclasses.asdict(PLAN))
    expected = [streams.batch(own, step, 105, 0.1) for step in range(20)]
    sampler = PLAN.sampler(state())
    assert len(sampler) == 20
    assert list(sampler) == expected
    assert PLAN.sample(key=KEY, step=7).tolist() == expected[7]


def test_the_sampler_of_a_state_that_was_saved_goes_on():
    whole = list(PLAN.sampler(state()))
    assert list(PLAN.sampler(state(17))) == whole[17:]
    assert list(PLAN.sampler(state(20))) == []
    with pytest.raises(ValueError, match="expected a start of at most"):
        PLAN.sampler(state(21))


@pytest.mark.parametrize(
    "changed",
    [
        {"dataset_size": 106},
        {"sampling_rate": 0.2},
        {"noise_multiplier": 2.5},
        {"max_norm": 3.5},
    ],
    ids=str,
)
def test_plans_that_differ_share_neither_batches_nor_noise(changed):
    # A larger rate with the same numbers would draw a batch that holds the other one.
    other = dataclasses.replace(PLAN, **changed)
    batches = [list(each.sampler(state())) for each in (PLAN, other)]
    assert not any(first == second for first, second in zip(*batches, strict=True))
    sums, drawn = {"a": torch.zeros(10_000)}, []
    for each in (PLAN, other):
        sensitivity = Sensitivity(each.max_norm / each.expected_batch_size)
        drawn.append(each.add_noise(sums, sensitivity, key=KEY, step=0)["a"])
    found = float(torch.corrcoef(torch.stack(drawn))[0, 1])
    assert abs(found) < 0.05


def test_more_steps_leave_the_first_ones_as_they_were():
    longer = dataclasses.replace(PLAN, steps=30, delta=1e-6)
    assert list(longer.sampler(state()))[:20] == list(PLAN.sampler(state()))


def test_noise_has_the_planned_standard_deviation():
    sums = {"a": torch.zeros(1000, 100)}
    noise = PLAN.add_noise(sums, Sensitivity(3.0 / 10.5), key=KEY, step=0)["a"]
    expected = 2.0 * 3.0 / 10.5
    relative = float((noise.double() ** 2).mean()) / expected**2
    assert abs(relative - 1) < 3 * math.sqrt(2 / noise.numel())


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_clipped_sum_made_by_the_plan_fits_it(samples):
    def loss(params, buffers, x):
        return (params["w"] * x).sum()

    clipped = clipped_grad(
        loss, max_norm=PLAN.max_norm, normalize_by=PLAN.expected_batch_size
    )
    x = 100 * torch.randn(samples, 4)
    sums = clipped({"w": torch.ones(4)}, {}, x).grads
    noisy = PLAN.add_noise(sums, clipped.sensitivity, key=KEY, step=1)
    zeros = {"w": torch.zeros(4)}
    noise = PLAN.add_noise(zeros, clipped.sensitivity, key=KEY, step=1)
    torch.testing.assert_close(noisy["w"], sums["w"] + noise["w"])


OTHER = "max_norm / expected_batch_size = 0.2857"
SENSITIVITIES = {
    "not divided": (Sensitivity(3.0), ValueError, OTHER),
    "floored": (Sensitivity(3.0 / 10), ValueError, OTHER),
    "size drawn": (Sensitivity(3.0 / 11), ValueError, OTHER),
    "slightly off": (Sensitivity(3.0 / 10.5 * (1 + 1e-8)), ValueError, OTHER),
    "data set size": (Sensitivity(3.0 / 105), ValueError, OTHER),
    "infinite": (Sensitivity(math.inf), ValueError, "expected a finite sensitivity"),
    "bare": (3.0 / 10.5, TypeError, r"Plan.add_noise\(sensitivity=0.2857"),
}


@pytest.mark.parametrize("name", SENSITIVITIES)
def test_a_sensitivity_of_another_plan_is_refused(name):
    sensitivity, error, message = SENSITIVITIES[name]
    with pytest.raises(error, match=message):
        PLAN.add_noise({}, sensitivity, key=KEY, step=0)


def test_a_sensitivity_equal_up_to_rounding_is_accepted():
    value = 3.0 / 10.5 * (1 + 1e-10)
    result = PLAN.add_noise({"a": torch.zeros(1)}, Sensitivity(value), key=KEY, step=0)
    assert result["a"].isfinite().all()


WRONG = {
    "dataset_size": (0, 10.0),
    "sampling_rate": (0.0, 1.0001),
    "noise_multiplier": (-0.1, math.inf),
    "max_norm": (0.0, math.inf, math.nan),
    "steps": (0, 1.5),
    "delta": (0.0, 1.0),
    "accountant": ("gdp",),
}


@pytest.mark.parametrize("field", WRONG)
def test_fields_out_of_range_are_refused(field):
    for value in WRONG[field]:
        with pytest.raises(ValueError, match=rf"Plan\({field}="):
            dataclasses.replace(PLAN, **{field: value})


def test_one_step_on_one_sample_is_a_plan():
    assert dataclasses.replace(PLAN, dataset_size=1, steps=1).steps == 1


def test_a_field_that_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match=r"Plan\(max_norm='1'\): expected a number"):
        dataclasses.replace(PLAN, max_norm="1")


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.noise_multiplier = 0.0

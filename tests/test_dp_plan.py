import dataclasses
import math

import pytest
import torch

from vgrad.dp import Plan, epsilon, noise_multiplier_for
from vgrad.persample.clipping import clipped_grad
from vgrad.persample.sensitivity import Sensitivity

PLAN = Plan(
    dataset_size=105,
    sampling_rate=0.1,
    noise_multiplier=2.0,
    max_norm=3.0,
    steps=20,
    delta=1e-4,
)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_expected_batch_size_is_not_rounded():
    assert PLAN.expected_batch_size == 10.5


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("steps", [None, 0, 1, 20])
def test_epsilon_is_that_of_the_accountant(accountant, steps):
    plan = dataclasses.replace(PLAN, accountant=accountant)
    expected = epsilon(
        sampling_rate=0.1,
        noise_multiplier=2.0,
        steps=20 if steps is None else steps,
        delta=1e-4,
        accountant=accountant,
    )
    assert plan.epsilon(steps) == expected


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_plan_for_a_budget_keeps_it_to_the_last_step(accountant):
    run = {"sampling_rate": 0.1, "steps": 20, "delta": 1e-4, "accountant": accountant}
    plan = Plan.for_epsilon(1.0, dataset_size=105, max_norm=3.0, **run)
    noise = noise_multiplier_for(epsilon=1.0, **run)
    assert plan == Plan(dataset_size=105, noise_multiplier=noise, max_norm=3.0, **run)
    assert plan.epsilon(19) < plan.epsilon() <= 1.0
    assert plan.epsilon() > 0.999


def test_more_steps_than_planned_are_refused():
    with pytest.raises(ValueError, match=r"Plan.epsilon\(steps=21\): expected at most"):
        PLAN.epsilon(21)


@pytest.mark.parametrize("steps", [-1, 2.0, True])
def test_steps_that_are_not_whole_are_refused(steps):
    with pytest.raises(ValueError, match=r"Plan.epsilon\(steps="):
        PLAN.epsilon(steps)


def test_the_sampler_draws_as_planned():
    sampler = PLAN.sampler(source())
    fields = sampler.dataset_size, sampler.sampling_rate, sampler.steps
    assert fields == (105, 0.1, 20)
    assert len(list(sampler)) == 20


def test_noise_has_the_planned_standard_deviation():
    sums = {"a": torch.zeros(1000, 100)}
    noise = PLAN.add_noise(sums, Sensitivity(3.0 / 10.5), generator=source())["a"]
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
    x = 100 * torch.randn(samples, 4, generator=source())
    sums = clipped({"w": torch.ones(4)}, {}, x).grads
    noisy = PLAN.add_noise(sums, clipped.sensitivity, generator=source(1))
    zeros = {"w": torch.zeros(4)}
    noise = PLAN.add_noise(zeros, clipped.sensitivity, generator=source(1))
    torch.testing.assert_close(noisy["w"], sums["w"] + noise["w"])


@pytest.mark.parametrize(
    "value",
    [3.0, 3.0 / 10, 3.0 / 11, 3.0 / 10.5 * (1 + 1e-8), 3.0 / 105],
    ids=["not divided", "floored", "size drawn", "slightly off", "data set size"],
)
def test_a_sensitivity_of_another_plan_is_refused(value):
    with pytest.raises(ValueError, match=r"max_norm / expected_batch_size = 0.2857"):
        PLAN.add_noise({}, Sensitivity(value), generator=source())


def test_a_sensitivity_equal_up_to_rounding_is_accepted():
    value = 3.0 / 10.5 * (1 + 1e-10)
    result = PLAN.add_noise(
        {"a": torch.zeros(1)}, Sensitivity(value), generator=source()
    )
    assert result["a"].isfinite().all()


def test_a_bare_number_is_no_sensitivity():
    with pytest.raises(TypeError, match=r"Plan.add_noise\(sensitivity=0.2857"):
        PLAN.add_noise({}, 3.0 / 10.5, generator=source())


def test_an_infinite_sensitivity_is_refused():
    with pytest.raises(ValueError, match="expected a finite sensitivity"):
        PLAN.add_noise({}, Sensitivity(math.inf), generator=source())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset_size", 0),
        ("dataset_size", 10.0),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.0001),
        ("noise_multiplier", -0.1),
        ("noise_multiplier", math.inf),
        ("max_norm", 0.0),
        ("max_norm", math.inf),
        ("max_norm", math.nan),
        ("steps", 0),
        ("steps", 1.5),
        ("delta", 0.0),
        ("delta", 1.0),
        ("accountant", "gdp"),
    ],
)
def test_fields_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"Plan\({field}="):
        dataclasses.replace(PLAN, **{field: value})


def test_a_field_that_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match=r"Plan\(max_norm='1'\): expected a number"):
        dataclasses.replace(PLAN, max_norm="1")


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.noise_multiplier = 0.0

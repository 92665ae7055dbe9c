"""Plans, and plans that account for other ones before them."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests import streams
from vgrad import Sensitivity, clipped_grad, optim
from vgrad.dp import (
    Plan,
    PrivateGradients,
    epsilon,
    noise_multiplier_for,
    secret_key,
)
from vgrad.precision import StaticLossScale
from vgrad.training import TrainState, load, private_step, save, train_step

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


QUOTIENT = "max_norm / expected_batch_size = 0.2857"
SENSITIVITIES = {
    "not divided": (Sensitivity(3.0), ValueError, QUOTIENT),
    "floored": (Sensitivity(3.0 / 10), ValueError, QUOTIENT),
    "size drawn": (Sensitivity(3.0 / 11), ValueError, QUOTIENT),
    "slightly off": (Sensitivity(3.0 / 10.5 * (1 + 1e-8)), ValueError, QUOTIENT),
    "data set size": (Sensitivity(3.0 / 105), ValueError, QUOTIENT),
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


# Plans after other plans.

SMALL = {"dataset_size": 60, "max_norm": 1.0, "delta": 1e-3}
FIRST = Plan(sampling_rate=0.5, noise_multiplier=0.5, steps=5, **SMALL)
SECOND = Plan(sampling_rate=0.05, noise_multiplier=4.0, steps=10, **SMALL)
BOTH = SECOND.after(FIRST, 3)
THREE = FIRST.after(BOTH, 10)
DATA = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
TX = optim.sgd(0.1)
OTHER_PLAN = "expected a state whose private steps were taken under this plan, got"


def loss(params, buffers, x):
    return (params["w"] * x).sum()


def begun(**options):
    return TrainState.create(TX, {"w": torch.zeros(8)}, {}, seed=1, **options)


def trained(state, plan, steps, step=None, **options):
    """Take so many steps under a plan, on its own batches."""
    step = private_step(loss, TX, plan, **options) if step is None else step
    for rows, _ in zip(plan.sampler(state), range(steps), strict=False):
        state, _ = step(state, DATA[rows])
    return state


def test_a_state_has_the_identity_of_the_plan_after_its_first_private_step():
    state = begun()
    assert state.plan_digest.dtype == torch.uint8
    assert state.plan_digest.tolist() == [0] * 32
    plain, _ = train_step(lambda params, buffers, x: loss(params, {}, x).sum(), TX)(
        state, DATA
    )
    assert plain.plan_digest.tolist() == [0] * 32
    for _ in range(2):
        state = trained(state, FIRST, 1)
        assert torch.equal(state.plan_digest, FIRST.digest)
    assert torch.equal(state.fork().plan_digest, FIRST.digest)


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 9},
        {"delta": 1e-4},
        {"accountant": "rdp"},
        {"max_norm": 1},
        {"sampling_rate": np.float64(0.5)},
        {"dataset_size": np.int32(60)},
    ],
    ids=str,
)
def test_a_plan_with_other_steps_or_numbers_of_another_kind_is_the_same(changed):
    same = dataclasses.replace(FIRST, **changed)
    assert torch.equal(same.digest, FIRST.digest)
    assert int(trained(trained(begun(), FIRST, 2), same, 2).step) == 4
    json.dumps(dataclasses.asdict(same))


@pytest.mark.parametrize(
    "changed",
    [
        {"dataset_size": 61},
        {"sampling_rate": math.nextafter(0.5, 1)},
        {"noise_multiplier": 0.6},
        {"max_norm": 2.0},
    ],
    ids=str,
)
def test_another_plan_is_refused_before_anything_is_drawn(changed):
    state, other = trained(begun(), FIRST, 2), dataclasses.replace(FIRST, **changed)
    with pytest.raises(ValueError, match=rf"Plan.sampler\(state\): {OTHER_PLAN}"):
        other.sampler(state)
    for given in (state, state.fork()):
        with pytest.raises(
            ValueError, match=rf"private_step\(plan\)\(state\): {OTHER_PLAN}"
        ):
            private_step(loss, TX, other)(given, DATA[:3])
    assert int(trained(state, other.after(FIRST, 2), 1).step) == 3


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"strategy": "loop"}])
def test_a_plan_after_another_takes_its_state_and_counts_on(options):
    state = trained(begun(), FIRST, 3, **options)
    state = trained(state, BOTH, 7, **options)
    assert int(state.step) == 10
    assert torch.equal(state.plan_digest, BOTH.digest)
    state = trained(state, THREE, 10, **options)
    assert int(state.step) == THREE.steps == 3 + 7 + 5
    assert torch.equal(state.plan_digest, THREE.digest)
    for plan in (FIRST, SECOND, BOTH):
        with pytest.raises(ValueError, match=OTHER_PLAN):
            private_step(loss, TX, plan)(state, DATA[:3])
    with pytest.raises(RuntimeError, match="fewer than the 15 steps that the plan"):
        private_step(loss, TX, THREE)(state, DATA[:3])


@pytest.mark.slow
def test_compiled_steps_and_scaled_ones_look_at_the_plan():
    state, how = begun(loss_scale=StaticLossScale(2.0**4)), {"batch_sizes": [3]}
    first, second, both = (
        vgrad.compile(private_step(loss, TX, plan), backend="replay", **how)
        for plan in (FIRST, SECOND, BOTH)
    )
    for _ in range(3):
        state, _ = first(state, DATA[:3])
        assert torch.equal(state.plan_digest, FIRST.digest)
    with pytest.raises(ValueError, match=OTHER_PLAN):
        second(state, DATA[:3])
    state, _ = both(state, DATA[:3])
    assert torch.equal(state.plan_digest, BOTH.digest)
    assert first.reports()


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_number_of_steps_that_were_not_taken_is_refused(steps):
    state = trained(begun(), FIRST, steps)
    message = {
        0: "taken the 3 steps that .* counts, got one that has taken 0",
        2: "taken the 3 steps that .* counts, got one that has taken 2",
        4: "taken the 3 steps that .* counts, got one that has taken 4",
    }[steps]
    with pytest.raises(ValueError, match=message):
        BOTH.sampler(state)
    with pytest.raises(ValueError, match=message):
        private_step(loss, TX, BOTH)(state, DATA[:3])


def test_steps_that_were_not_private_are_no_plan_before():
    state = begun()._replace(step=torch.tensor(3))
    with pytest.raises(ValueError, match="got one that has spent under none"):
        BOTH.sampler(state)
    assert len(FIRST.sampler(state)) == 2  # they count, to be safe


def test_states_that_are_stacked_are_refused():
    stacked = torch.stack([begun().plan_digest] * 2)
    with pytest.raises(
        ValueError, match=r"plan_digest of uint8 \(32,\), got .*\(2, 32"
    ):
        private_step(loss, TX, FIRST)(begun()._replace(plan_digest=stacked), DATA[:3])


def test_no_steps_before_leave_a_plan_as_it_is():
    assert SECOND.after(FIRST, 0) is SECOND
    assert SECOND.after(FIRST, torch.tensor(3)) == BOTH
    # A state that BOTH was to take, and that took no step under it.
    assert SECOND.after(BOTH, 3) == BOTH
    assert SECOND.after(BOTH, 2) == SECOND.after(FIRST, 2)


def test_what_is_no_plan_before_is_refused():
    with pytest.raises(TypeError, match=r"Plan.after\(other\): .*got a Tensor"):
        SECOND.after(FIRST.digest, 3)
    with pytest.raises(ValueError, match=r"steps=6\): expected at most the 5 steps of"):
        SECOND.after(FIRST, 6)
    with pytest.raises(ValueError, match="got one that follows another already"):
        BOTH.after(FIRST, 3)
    with pytest.raises(
        TypeError, match=r"Plan\(before\): expected a Plan, got a float"
    ):
        dataclasses.replace(SECOND, before=2.0)
    with pytest.raises(ValueError, match=r"Plan\(steps=3, .*more than the 3 steps"):
        dataclasses.replace(BOTH, steps=3)


def test_a_plan_is_made_again_from_plain_numbers():
    for plan in (FIRST, BOTH, THREE):
        again = Plan(**json.loads(json.dumps(dataclasses.asdict(plan))))
        assert again == plan
        assert torch.equal(again.digest, plan.digest)


def exact(kinds, delta):
    """Epsilon at rate 1, where Gaussian mechanisms compose to one, in closed form."""
    mean = math.sqrt(sum(steps / noise**2 for noise, steps in kinds))

    def excess(found):
        first = special.ndtr(mean / 2 - found / mean)
        return first - math.exp(found) * special.ndtr(-mean / 2 - found / mean) - delta

    return optimize.brentq(excess, 0, 200)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_all_steps_in_one_account(accountant):
    run = {"dataset_size": 60, "sampling_rate": 1.0, "max_norm": 1.0, "delta": 1e-5}
    run["accountant"] = accountant
    plans = [Plan(noise_multiplier=s, steps=9, **run) for s in (3.0, 20.0, 7.0)]
    both = plans[1].after(plans[0], 4)
    three = plans[2].after(both, 10)
    room = 1.001 if accountant == "pld" else 1.15
    for steps, kinds in [
        (4, [(3.0, 4)]),
        (8, [(3.0, 4), (20.0, 4)]),
        (10, [(3.0, 4), (20.0, 6)]),
        (15, [(3.0, 4), (20.0, 6), (7.0, 5)]),
    ]:
        expected = exact(kinds, 1e-5)
        assert expected <= three.epsilon(steps) <= expected * room
    assert three.epsilon() == three.epsilon(19) > three.epsilon(18)
    assert three.epsilon(2) == plans[0].epsilon(2)
    assert both.epsilon(7) == three.epsilon(7)


def integral(kinds, delta):
    """Epsilon of one step of each of two kinds, by integrals of densities.

    The loss of each step is that of a mixture against a normal number; neighbours
    differ by a sample that was added or removed.
    """

    def log_ratio(x, rate, noise):
        return np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))

    def delta_of(found, sign):
        (q, s), (r, t) = kinds
        a, b = (np.linspace(-8 * w, 8 * w + 1, 801) for w in (s, t))

        def density(x, noise, mean):
            return np.exp(-((x - mean) ** 2) / 2 / noise**2) / noise / 2.5066282746

        def weights(x, rate, noise):
            mixed = (1 - rate) * density(x, noise, 0) + rate * density(x, noise, 1)
            return (mixed if sign > 0 else density(x, noise, 0)) * (x[1] - x[0])

        losses = log_ratio(a, q, s)[:, None] + log_ratio(b, r, t)[None]
        above = -np.expm1(np.minimum(found - sign * losses, 0))
        return float(weights(a, q, s) @ above @ weights(b, r, t))

    return max(
        optimize.brentq(
            lambda e, sign=sign: delta_of(e, sign) - delta, 0, 30, xtol=1e-3
        )
        for sign in (1, -1)
    )


def test_epsilon_of_sampled_steps_of_two_kinds_is_that_of_integrals():
    first = dataclasses.replace(FIRST, noise_multiplier=0.9, steps=1)
    both = dataclasses.replace(SECOND, noise_multiplier=1.4, steps=1).after(first, 1)
    expected = integral([(0.5, 0.9), (0.05, 1.4)], 1e-3)
    assert expected * 0.999 <= both.epsilon() <= expected * 1.002
    assert first.epsilon() < both.epsilon()


def test_epsilon_of_plans_of_one_kind_is_that_of_their_steps():
    same = FIRST.after(FIRST, 3)
    run = {"sampling_rate": 0.5, "noise_multiplier": 0.5, "delta": 1e-3}
    assert same.epsilon() == epsilon(**run, steps=8)
    assert dataclasses.replace(SECOND, noise_multiplier=0.0).after(
        FIRST, 3
    ).epsilon() == (math.inf)
    assert dataclasses.replace(FIRST, noise_multiplier=0.0, steps=9).after(
        SECOND, 3
    ).epsilon(3) == SECOND.epsilon(3)


def test_plans_with_another_past_share_neither_batches_nor_noise():
    key, sums = secret_key(seed=0), {"a": torch.zeros(10_000)}
    plans = [FIRST, FIRST.after(SECOND, 3), FIRST.after(SECOND, 2)]
    batches = [plan.sample(key=key, step=4).tolist() for plan in plans]
    assert batches[0] != batches[1] != batches[2] != batches[0]
    drawn = [
        plan.add_noise(sums, Sensitivity(1 / 30), key=key, step=4)["a"]
        for plan in plans
    ]
    found = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert float(found.abs().max()) < 0.05


def test_a_saved_state_says_what_it_has_spent(tmp_path):
    path = tmp_path / "state"
    save(path, trained(begun(), FIRST, 3))
    state = load(path, begun())
    assert torch.equal(state.plan_digest, FIRST.digest)
    with pytest.raises(ValueError, match=OTHER_PLAN):
        SECOND.sampler(state)
    assert len(BOTH.sampler(state)) == 10


def bridge(plan, **options):
    model = torch.nn.Linear(8, 3)
    data = TensorDataset(DATA, torch.arange(60) % 3)
    return PrivateGradients(
        model, F.cross_entropy, data, plan=plan, key=secret_key(seed=1), **options
    )


def taken(private, steps):
    for batch in private.loader:
        private.backward(*batch)
        if private.step == steps:
            return private
    return taken(private, steps)


@pytest.mark.parametrize("physical", [None, 7])
def test_private_gradients_go_on_under_a_plan_after_another(physical):
    private = taken(bridge(FIRST), 3)
    assert torch.equal(private.plan_digest, FIRST.digest)
    assert len(FIRST.sampler(private)) == 2
    with pytest.raises(ValueError, match=OTHER_PLAN):
        SECOND.sampler(private)
    state = private.state_dict()
    with pytest.raises(ValueError, match=rf"load_state_dict\(state\): {OTHER_PLAN}"):
        bridge(SECOND).load_state_dict(state)
    with pytest.raises(ValueError, match="2 steps that .* counts, got one that has ta"):
        bridge(SECOND.after(FIRST, 2)).load_state_dict(state)
    again = bridge(BOTH, physical_batch_size=physical)
    with pytest.raises(
        RuntimeError, match="taken the 3 steps that plan.after.*taken 0"
    ):
        iter(again.loader).__next__()
    again.load_state_dict(state)
    assert again.epsilon() == FIRST.epsilon(3)
    assert torch.equal(again.plan_digest, FIRST.digest)
    # A plan after another that took no step itself is that other one.
    bridge(SECOND.after(FIRST, 3)).load_state_dict(again.state_dict())
    again = taken(again, 5)
    assert torch.equal(again.plan_digest, BOTH.digest)
    assert again.epsilon() == BOTH.epsilon(5) > FIRST.epsilon(3)
    last = bridge(FIRST.after(BOTH, 5))
    last.load_state_dict(again.state_dict())
    assert taken(last, 10).step == last.plan.steps
    with pytest.raises(ValueError, match=OTHER_PLAN):
        bridge(BOTH).load_state_dict(last.state_dict())


def test_an_epoch_is_counted_from_the_first_step_of_a_plan():
    private, plan = taken(bridge(FIRST), 3), dataclasses.replace(FIRST, steps=4)
    again = bridge(dataclasses.replace(plan, sampling_rate=1 / 3).after(FIRST, 3))
    again.load_state_dict(private.state_dict())
    passes = []
    while again.step < again.plan.steps:
        for batch in again.loader:
            again.backward(*batch)
        passes.append(again.step)
    assert passes == [6, 7]


def test_a_state_that_has_spent_nothing_goes_on_under_any_plan():
    state = bridge(FIRST).state_dict()
    assert torch.equal(bridge(FIRST).plan_digest, begun().plan_digest)
    bridge(SECOND).load_state_dict(state)

"""Plans, and plans that account for other ones before them."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.utils.data import TensorDataset

import vgrad
from tests import streams
from tests.dp import runs
from tests.dp.runs import KEY
from tests.dp.test_accounting import gaussian_epsilon
from tests.losses import product
from vgrad import Sensitivity, clipped_grad, optim
from vgrad.dp import Plan, epsilon, noise_multiplier_for
from vgrad.precision import StaticLossScale
from vgrad.training import TrainState, load, private_step, save, train_step

PLAN = runs.plan(105, 0.1, 3.0, 2.0, steps=20, delta=1e-4)
every_accountant = pytest.mark.parametrize("accountant", ["pld", "rdp"])


def at(step=0):
    return SimpleNamespace(key=KEY, step=torch.tensor(step))


def noise(plan, size=10_000, **options):
    sums = {"a": torch.zeros(size)}
    sensitivity = Sensitivity(plan.max_norm / plan.expected_batch_size)
    return plan.add_noise(sums, sensitivity, **{"key": KEY, "step": 0} | options)["a"]


@every_accountant
def test_epsilon_is_that_of_the_accountant(accountant):
    plan = dataclasses.replace(PLAN, accountant=accountant)
    run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "delta": 1e-4}
    for count, steps in ((None, 20), (0, 0), (1, 1), (20, 20)):
        expected = epsilon(**run, steps=steps, accountant=accountant)
        assert plan.epsilon(count) == expected


@pytest.mark.parametrize(
    "accountant", ["pld", pytest.param("rdp", marks=pytest.mark.slow)]
)
def test_a_plan_for_a_budget_keeps_it_to_the_last_step(accountant):
    run = {"sampling_rate": 0.1, "steps": 20, "delta": 1e-4, "accountant": accountant}
    plan = Plan.for_epsilon(1.0, dataset_size=105, max_norm=3.0, **run)
    multiplier = noise_multiplier_for(epsilon=1.0, **run)
    data = {"dataset_size": 105, "max_norm": 3.0}
    assert plan == Plan(noise_multiplier=multiplier, **data, **run)
    assert plan.epsilon(19) < plan.epsilon() <= 1.0
    assert plan.epsilon() > 0.999
    data |= {"delta": 1e-4, "batch_size": 25, "epochs": 3}
    plan = Plan.for_epsilon(1.0, **data)
    assert (plan.sampling_rate, plan.expected_batch_size) == (25 / 105, 25)
    assert plan.steps == 3 * 4


def test_an_epoch_has_as_many_steps_as_batches_fit_into_the_data():
    for size in range(1, 60):
        for batch in range(1, size + 1):
            plan = runs.plan(size, batch / size)
            assert plan.steps_per_epoch == round(size / batch), (size, batch)


def test_the_sampler_draws_as_planned_from_the_step_of_a_state_on():
    own = streams.of_plan(KEY.tolist(), dataclasses.asdict(PLAN))
    expected = [streams.batch(own, step, 105, 0.1) for step in range(20)]
    for step in (0, 17, 20):
        sampler = PLAN.sampler(at(step))
        assert len(sampler) == 20 - step
        assert list(sampler) == expected[step:]
    assert PLAN.sample(key=KEY, step=7).tolist() == expected[7]
    longer = dataclasses.replace(PLAN, steps=30, delta=1e-6)
    assert list(longer.sampler(at()))[:20] == expected


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_clipped_sum_made_by_the_plan_fits_it(samples):
    bound = {"max_norm": 3.0, "normalize_by": PLAN.expected_batch_size}
    clipped = clipped_grad(product, **bound)
    sums = clipped({"w": torch.ones(4)}, {}, 100 * torch.randn(samples, 4)).grads
    drawn = {"key": KEY, "step": 1}
    assert PLAN.expected_batch_size == 10.5  # not rounded
    noisy = PLAN.add_noise(sums, clipped.sensitivity, **drawn)
    added = PLAN.add_noise({"w": torch.zeros(4)}, clipped.sensitivity, **drawn)
    torch.testing.assert_close(noisy["w"], sums["w"] + added["w"])
    rounded = Sensitivity(clipped.sensitivity.value * (1 + 1e-10))
    assert PLAN.add_noise(sums, rounded, **drawn)["w"].isfinite().all()


# Plans after other plans.

FIRST = runs.plan(60, 0.5, noise=0.5, steps=5)
SECOND = runs.plan(60, 0.05, noise=4.0, steps=10)
BOTH = SECOND.after(FIRST, 3)
THREE = FIRST.after(BOTH, 10)
DATA = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
TX = optim.sgd(0.1)
OTHER_PLAN = "expected a state whose private steps were taken under this plan, got"


def refused(message):
    return pytest.raises(ValueError, match=message)


def begun(**options):
    return TrainState.create(TX, {"w": torch.zeros(8)}, {}, seed=1, **options)


def trained(state, plan, steps, **options):
    """Take so many steps under a plan, on its own batches."""
    step = private_step(product, TX, plan, **options)
    for rows, _ in zip(plan.sampler(state), range(steps), strict=False):
        state, _ = step(state, DATA[rows])
    return state


def has_spent_under(state, plan):
    return torch.equal(state.plan_digest, plan.digest)


# A larger rate with the same numbers would draw a batch that holds the other one.
CHANGED = [
    {"dataset_size": 61},
    {"sampling_rate": math.nextafter(0.5, 1)},
    {"sampling_rate": 0.6},
    {"noise_multiplier": 0.6},
    {"max_norm": 2.0},
]
OTHERS = [dataclasses.replace(FIRST, **changed) for changed in CHANGED]
OTHERS += [FIRST.after(SECOND, 3), FIRST.after(SECOND, 2)]


def test_plans_that_differ_share_neither_batches_nor_noise():
    plans = [FIRST, *OTHERS]
    batches = [tuple(plan.sample(key=KEY, step=4).tolist()) for plan in plans]
    assert len({*batches}) == len(plans)
    found = torch.corrcoef(torch.stack([noise(plan) for plan in plans]))
    assert float((found - torch.eye(len(plans))).abs().max()) < 0.05


def test_a_state_has_the_identity_of_the_plan_after_its_first_private_step(tmp_path):
    state = begun()
    plain, _ = train_step(product, TX)(state, DATA)
    for each in (state, plain):
        assert each.plan_digest.dtype == torch.uint8
        assert each.plan_digest.tolist() == [0] * 32
    state = trained(trained(state, FIRST, 1), FIRST, 2)
    save(tmp_path / "state", state)
    for each in (state, state.fork(), load(tmp_path / "state", begun())):
        assert has_spent_under(each, FIRST)
        with refused(OTHER_PLAN):
            SECOND.sampler(each)
        assert len(BOTH.sampler(each)) == 10


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


@pytest.mark.parametrize("other", OTHERS[:5])
def test_another_plan_is_refused_before_anything_is_drawn(other):
    state = trained(begun(), FIRST, 2)
    with refused(rf"Plan.sampler\(state\): {OTHER_PLAN}"):
        other.sampler(state)
    for each in (state, state.fork()):
        with refused(rf"private_step\(plan\)\(state\): {OTHER_PLAN}"):
            private_step(product, TX, other)(each, DATA[:3])
    assert int(trained(state, other.after(FIRST, 2), 1).step) == 3


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"strategy": "loop"}])
def test_a_plan_after_another_takes_its_state_and_counts_on(options):
    state = trained(begun(), FIRST, 3, **options)
    for plan, steps in ((BOTH, 7), (THREE, 10)):
        state = trained(state, plan, steps, **options)
        assert has_spent_under(state, plan)
    assert int(state.step) == THREE.steps == 3 + 7 + 5
    for plan in (FIRST, SECOND, BOTH):
        with refused(OTHER_PLAN):
            private_step(product, TX, plan)(state, DATA[:3])
    with pytest.raises(RuntimeError, match="fewer than the 15 steps that the plan"):
        private_step(product, TX, THREE)(state, DATA[:3])


@pytest.mark.slow
def test_compiled_steps_and_scaled_ones_look_at_the_plan():
    state, how = begun(loss_scale=StaticLossScale(2.0**4)), {"batch_sizes": [3]}
    first, second, both = (
        vgrad.compile(private_step(product, TX, plan), backend="replay", **how)
        for plan in (FIRST, SECOND, BOTH)
    )
    for _ in range(3):
        state, _ = first(state, DATA[:3])
        assert has_spent_under(state, FIRST)
    with refused(OTHER_PLAN):
        second(state, DATA[:3])
    state, _ = both(state, DATA[:3])
    assert has_spent_under(state, BOTH)
    assert first.reports()


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_number_of_steps_that_were_not_taken_is_refused(steps):
    state = trained(begun(), FIRST, steps)
    message = f"taken the 3 steps that .* counts, got one that has taken {steps}"
    with refused(message):
        BOTH.sampler(state)
    with refused(message):
        private_step(product, TX, BOTH)(state, DATA[:3])


def test_steps_that_were_not_private_are_no_plan_before():
    state = begun()._replace(step=torch.tensor(3))
    with refused("got one that has spent under none"):
        BOTH.sampler(state)
    assert len(FIRST.sampler(state)) == 2  # they count, to be safe


def test_no_steps_before_leave_a_plan_as_it_is():
    assert SECOND.after(FIRST, 0) is SECOND
    assert SECOND.after(FIRST, torch.tensor(3)) == BOTH
    # A state that BOTH was to take, and that took no step under it.
    assert SECOND.after(BOTH, 3) == BOTH
    assert SECOND.after(BOTH, 2) == SECOND.after(FIRST, 2)


def test_a_plan_is_made_again_from_plain_numbers():
    for plan in (FIRST, BOTH, THREE):
        again = Plan(**json.loads(json.dumps(dataclasses.asdict(plan))))
        assert again == plan
        assert torch.equal(again.digest, plan.digest)


@every_accountant
def test_epsilon_is_that_of_all_steps_in_one_account(accountant):
    """At rate 1, where Gaussian mechanisms compose to one."""
    run = {"steps": 9, "delta": 1e-5, "accountant": accountant}
    plans = [runs.plan(60, 1.0, noise=s, **run) for s in (3.0, 20.0, 7.0)]
    both = plans[1].after(plans[0], 4)
    three = plans[2].after(both, 10)
    room = 1.001 if accountant == "pld" else 1.15
    for steps, kinds in [
        (4, [(3.0, 4)]),
        (8, [(3.0, 4), (20.0, 4)]),
        (10, [(3.0, 4), (20.0, 6)]),
        (15, [(3.0, 4), (20.0, 6), (7.0, 5)]),
    ]:
        mean = math.sqrt(sum(steps / noise**2 for noise, steps in kinds))
        expected = gaussian_epsilon(1 / mean, 1, 1e-5)
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
        return float(weights(a, q, s) @ above @ weights(b, r, t)) - delta

    return max(optimize.brentq(delta_of, 0, 30, (sign,), xtol=1e-3) for sign in (1, -1))


def test_epsilon_of_sampled_steps_of_two_kinds_is_that_of_integrals():
    first = dataclasses.replace(FIRST, noise_multiplier=0.9, steps=1)
    both = dataclasses.replace(SECOND, noise_multiplier=1.4, steps=1).after(first, 1)
    expected = integral([(0.5, 0.9), (0.05, 1.4)], 1e-3)
    assert expected * 0.999 <= both.epsilon() <= expected * 1.002
    assert first.epsilon() < both.epsilon()


def test_epsilon_of_plans_of_one_kind_is_that_of_their_steps():
    run = {"sampling_rate": 0.5, "noise_multiplier": 0.5, "delta": 1e-3}
    assert FIRST.after(FIRST, 3).epsilon() == epsilon(**run, steps=8)
    silent = dataclasses.replace(FIRST, noise_multiplier=0.0, steps=9)
    assert silent.after(FIRST, 3).epsilon() == math.inf
    assert silent.after(SECOND, 3).epsilon(3) == SECOND.epsilon(3)


def private(plan, **options):
    data = TensorDataset(DATA, torch.arange(60) % 3)
    return runs.private(plan, torch.nn.Linear(8, 3), data, **options)


def taken(run, steps):
    for batch in run.loader:
        run.backward(*batch)
        if run.step == steps:
            return run
    return taken(run, steps)


@pytest.mark.parametrize("physical", [None, 7])
def test_private_gradients_go_on_under_a_plan_after_another(physical):
    fresh = private(FIRST)
    assert torch.equal(fresh.plan_digest, begun().plan_digest)
    private(SECOND).load_state_dict(fresh.state_dict())  # which has spent nothing
    run = taken(fresh, 3)
    assert has_spent_under(run, FIRST)
    assert len(FIRST.sampler(run)) == 2
    with refused(OTHER_PLAN):
        SECOND.sampler(run)
    state = run.state_dict()
    with refused(rf"load_state_dict\(state\): {OTHER_PLAN}"):
        private(SECOND).load_state_dict(state)
    with refused("2 steps that .* counts, got one that has ta"):
        private(SECOND.after(FIRST, 2)).load_state_dict(state)
    again = private(BOTH, physical_batch_size=physical)
    with pytest.raises(RuntimeError, match="taken the 3 steps that plan.af.*taken 0"):
        runs.first(again)
    again.load_state_dict(state)
    assert again.epsilon() == FIRST.epsilon(3)
    assert has_spent_under(again, FIRST)
    # A plan after another that took no step itself is that other one.
    private(SECOND.after(FIRST, 3)).load_state_dict(again.state_dict())
    again = taken(again, 5)
    assert has_spent_under(again, BOTH)
    assert again.epsilon() == BOTH.epsilon(5) > FIRST.epsilon(3)
    last = private(FIRST.after(BOTH, 5))
    last.load_state_dict(again.state_dict())
    assert taken(last, 10).step == last.plan.steps
    with refused(OTHER_PLAN):
        private(BOTH).load_state_dict(last.state_dict())


def test_an_epoch_is_counted_from_the_first_step_of_a_plan():
    plan = dataclasses.replace(FIRST, sampling_rate=1 / 3, steps=4).after(FIRST, 3)
    run, passes = private(plan), []
    run.load_state_dict(taken(private(FIRST), 3).state_dict())
    while run.step < plan.steps:
        for batch in run.loader:
            run.backward(*batch)
        passes.append(run.step)
    assert passes == [6, 7]

"""Bounds and noise of groups of parameters, as one Gaussian release."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests import oracle
from tests.dp import runs
from tests.dp.runs import KEY
from vgrad import clipped_grad, dp, optim
from vgrad.dp import Plan, group_clip, noising
from vgrad.training import TrainState, private_step
from vgrad.tree import map_values

BOUNDS = {"0.*": 0.3, "2.weight": 0.05, "2.bias": 0.02}
CLIPS = [
    group_clip(BOUNDS),
    group_clip(BOUNDS, deviations="equal"),
    group_clip(BOUNDS, deviations={"0.*": 2.0, "2.weight": 0.5, "2.bias": 7.0}),
]
every_clip = pytest.mark.parametrize("clip", CLIPS, ids=["bounds", "equal", "numbers"])


def data():
    source = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, dtype=torch.float64, generator=source)
    return TensorDataset(x, torch.randint(3, (30,), generator=source))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def group_of(name):
    return "0.*" if name.startswith("0.") else name


def clipped_by_hand(x, y, scale):
    """Sum gradients of plain autograd, clipped in each group, over `scale`."""
    gradients = oracle.model_gradients(
        net(), lambda net, x, y: F.cross_entropy(net(x), y), (x, y), len(x)
    )
    total = {name: torch.zeros_like(each[0]) for name, each in gradients.items()}
    for row in range(len(x)):
        for pattern, bound in BOUNDS.items():
            own = {n: g[row] for n, g in gradients.items() if group_of(n) == pattern}
            norm = math.hypot(*(float(g.norm()) for g in own.values()))
            for name, g in own.items():
                total[name] += g * min(1.0, bound / norm) / scale
    return total


def stepped(plan, backend=None, **options):
    """Return the noisy gradients of a plan's first step, and its batch."""
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net())
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    tx = optim.sgd(1.0)
    step = private_step(loss, tx, plan, **options)
    if backend is not None:
        step = vgrad.compile(step, backend=backend)
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    batch = data()[next(iter(plan.sampler(state)))]
    old = (
        state if not options else state._replace(params=map_values(torch.clone, params))
    )
    new, _ = step(old, *batch)
    return {name: params[name] - new.params[name] for name in params}, batch


def plan_of(clip, noise=1.3, **fields):
    return runs.plan(30, 0.5, clip, noise=noise, **fields)


@every_clip
def test_sums_are_clipped_in_each_group(clip):
    plan = plan_of(clip, noise=0.0)
    found, batch = stepped(plan)
    expected = clipped_by_hand(*batch, plan.expected_batch_size)
    oracle.assert_exact(found, expected, tolerance=1e-12)


@every_clip
def test_the_same_release_by_every_route(clip):
    plan = plan_of(clip)
    expected, batch = stepped(plan)
    oracle.assert_exact(stepped(plan, "replay")[0], expected, tolerance=1e-9)
    model = net()
    private = runs.private(plan, model, data())
    private.backward(*runs.first(private))
    oracle.assert_exact(runs.grads(model), expected, tolerance=1e-9)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net())
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    clipped = clipped_grad(loss, **plan.clipping)
    sums = clipped(params, buffers, *batch).grads
    noisy = plan.add_noise(sums, clipped.sensitivity, key=KEY, step=0)
    oracle.assert_exact(noisy, expected, tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("donate", [False, True])
def test_a_compiler_makes_the_same_release(donate):
    plan = plan_of(CLIPS[2])
    found, _ = stepped(plan, "inductor", donate=donate)
    oracle.assert_exact(found, stepped(plan)[0], tolerance=1e-9)


@every_clip
@pytest.mark.parametrize("scheme", [noising.independent(), noising.band_mf(2)])
def test_noise_of_each_group_has_its_deviation(clip, scheme):
    plan = replace(plan_of(clip), noise=scheme, sampling=None)
    sums = {name: torch.zeros(40_000) for name, _ in net().named_parameters()}
    sensitivity = clipped_grad(lambda: 0, **plan.clipping).sensitivity
    place = {"key": KEY, "step": 0, "history": ()}
    noise = plan.step_noise(sensitivity, dp.noise.Streams(), **place)
    noisy, _ = noise.advanced(sums)  # in common units
    scales, deviations = plan.scales(sums), plan.deviation(0)
    for name, each in noisy.items():
        found = float((each / scales[name][0]).std())
        assert found == pytest.approx(deviations[group_of(name)], rel=0.02), name


@every_clip
def test_all_groups_are_one_release_with_the_multiplier_of_the_plan(clip):
    """Signals of Gaussian releases add up in squares (McMahan et al., 1812.06210)."""
    plan = plan_of(clip)
    size = plan.expected_batch_size
    parts = (BOUNDS[each] / size / x for each, x in plan.deviation(0).items())
    assert math.hypot(*parts) == pytest.approx(1 / plan.noise_multiplier, rel=1e-12)
    plain = replace(plan, max_norm=1.0)
    assert plan.epsilon() == plain.epsilon()


def test_equal_deviations_are_noise_of_the_norm_of_all_bounds():
    plan, equal = plan_of(CLIPS[1]), plan_of(math.hypot(*BOUNDS.values()))
    assert {*plan.deviation(0).values()} == {equal.deviation(0)}
    ratios = [x / BOUNDS[each] for each, x in plan_of(CLIPS[0]).deviation(0).items()]
    expected = [1.3 * math.sqrt(3) / plan.expected_batch_size] * 3
    assert ratios == pytest.approx(expected)


def test_a_clip_is_part_of_the_identity_and_goes_through_json():
    plans = [plan_of(clip) for clip in CLIPS] + [plan_of(CLIPS[1].total)]
    assert len({plan._identity for plan in plans}) == 4
    assert len({tuple(plan.sample(key=KEY, step=0).tolist()) for plan in plans}) == 4
    for plan in plans:
        again = Plan(**json.loads(json.dumps(asdict(plan))))
        assert (again, hash(again)) == (plan, hash(plan))
    assert plan_of(BOUNDS) == plan_of(group_clip(BOUNDS))
    assert plan_of(dict(reversed(BOUNDS.items()))).digest.tolist() == (
        plan_of(BOUNDS).digest.tolist()
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_of(BOUNDS).deviation(torch.tensor(0)), "one dev"),
        (lambda: stepped(plan_of({"0.*": 1.0})), "match none"),
        (lambda: stepped(plan_of({"*": 1.0, "3.*": 1.0})), "matches none"),
    ],
)
def test_other_groups_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sums_clipped_otherwise_to_the_same_total_are_refused():
    plan = plan_of({"0.*": 1.0, "2.*": 0.01})
    swapped = {"0.*": 0.01, "2.*": 1.0}
    for other in (
        {"max_norm": swapped},
        {"max_norm": plan.first_max_norm, "clipping": "flat"},
        {"rescale": True},
    ):
        clipped = clipped_grad(lambda: 0, **plan.clipping | other)
        with pytest.raises(ValueError, match=r"clipped_grad\(loss, \*\*plan.clipping"):
            plan.add_noise({}, clipped.sensitivity, key=KEY, step=0)


def test_optimizers_that_know_one_deviation_are_refused():
    plan = plan_of(BOUNDS)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net())
    tx = optim.scale_then_privatize(optim.sgd(1.0))
    step = private_step(vgrad.sample_loss(fmodel, F.cross_entropy), tx, plan)
    with pytest.raises(ValueError, match="noise of one deviation for"):
        step(TrainState.create(tx, params, buffers), *data()[:3])


def a_large_bound(monkeypatch):
    kind = type(clipped_grad(lambda: 0, max_norm=1.0).quantity.rule)
    parts = kind.parts

    def wrong(self, function, params):
        names, (first, second) = parts(self, function, params)
        return names, [first, 3 * second]

    monkeypatch.setattr(kind, "parts", wrong)


def little_noise(monkeypatch):
    def wrong(sums, scales):
        return {n: x / scales[n][0] / (1 + n.startswith("2.")) for n, x in sums.items()}

    monkeypatch.setattr("vgrad.dp.noise.unscaled", wrong)
    monkeypatch.setattr("vgrad.dp.private_gradients.scaled", twice)


def twice(sums, scales):
    return {n: x * scales[n][0] * (1 + n.startswith("2.")) for n, x in sums.items()}


@pytest.mark.parametrize("plant", [None, a_large_bound, little_noise])
def test_audits_of_groups_see_a_fault_in_one(plant, monkeypatch):
    if plant is not None:
        plant(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 20))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    clip = group_clip({"0.*": 0.5, "2.*": 0.05})
    plan, tx = Plan(1000, 0.1, 0.7, clip, 10, 1e-5), optim.sgd(0.1)
    step = private_step(vgrad.sample_loss(fmodel, F.cross_entropy), tx, plan)
    state = TrainState.create(tx, params, buffers)
    result = plan.audit(step, state, canaries=1000, seed=5)
    assert result.exceeded == (plant is not None)
    assert result.mu.value > 0.6 * result.claimed_mu

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import vgrad
from tests import losses, oracle
from vgrad.cli import checkpoint
from vgrad.precision import DynamicLossScale, NoOpLossScale, StaticLossScale
from vgrad.training import EnsembleState, TrainState, private_step, train_step


def plan(**changes):
    fields = {
        "dataset_size": 100,
        "sampling_rate": 0.08,
        "noise_multiplier": 1.0,
        "max_norm": 0.5,
        "steps": 5,
        "delta": 1e-5,
    }
    return vgrad.dp.Plan(**{**fields, **changes})


def build(name="mlp", seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    case = losses.CASES[name]
    model = case.model().to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x, y = case.batch(6)
    return model, fmodel, case.criterion, params, buffers, x.to(dtype), y


def private(tx=None, chosen=None, dtype=torch.float64, **options):
    """Build a private step of the small net and its first state, and a batch."""
    _, fmodel, criterion, params, buffers, x, y = build(dtype=dtype)
    tx, loss = tx or vgrad.optim.sgd(0.1), vgrad.sample_loss(fmodel, criterion)
    step = private_step(loss, tx, chosen or plan(), **options)
    return step, TrainState.create(tx, params, buffers, seed=3), x, y


def with_batch_norm(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    ).to(dtype)
    x, y = torch.randn(6, 5, dtype=dtype), torch.randint(3, (6,))
    return model, *vgrad.make_functional_with_buffers(model), x, y


def ordinary(tx=None, dtype=torch.float32, held=None, **options):
    """Build a step of a net with batch norm and its first state, and a batch."""
    _, fmodel, params, buffers, x, y = with_batch_norm(dtype)
    tx, loss = tx or vgrad.optim.sgd(0.1), vgrad.batch_loss(fmodel, F.cross_entropy)
    state = TrainState.create(tx, params, buffers, loss_scale=held)
    return train_step(loss, tx, **options), state, x, y


def test_a_train_step_equals_torch():
    tx, model = vgrad.optim.sgd(0.1, momentum=0.9), with_batch_norm(torch.float64)[0]
    step, state, x, y = ordinary(tx, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        state, metrics = step(state, x, y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"], loss.detach())
    assert int(state.step) == 4
    oracle.assert_exact({**state.params, **state.buffers}, model.state_dict())


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("scale", [None, StaticLossScale(2.0**12)])
def test_a_train_step_takes_the_mean_of_a_loss_of_one_sample(scale, donate):
    model, fmodel, criterion, params, buffers, x, y = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tx, loss = vgrad.optim.sgd(0.1, momentum=0.9), vgrad.sample_loss(fmodel, criterion)
    step = train_step(loss, tx, loss_scale=scale, donate=donate)
    own = {name: value.detach().clone() for name, value in params.items()}
    state = TrainState.create(tx, own, buffers)
    for _ in range(3):
        state, metrics = step(state, x, y)
        optimizer.zero_grad()
        value = sum(criterion(model(x[i : i + 1]), y[i : i + 1]) for i in range(6)) / 6
        value.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"], value.detach())
    oracle.assert_exact(state.params, dict(model.named_parameters()))


def test_a_mean_that_is_not_finite_is_skipped_under_a_scale():
    _, fmodel, criterion, params, buffers, x, y = build()
    tx, loss = vgrad.optim.sgd(0.1), vgrad.sample_loss(fmodel, criterion)
    start = TrainState.create(tx, params, buffers)
    step = train_step(loss, tx, loss_scale=StaticLossScale(2.0**12))
    x[3] = torch.inf
    state, metrics = step(start, x, y)
    assert metrics["skipped"] == 1
    oracle.assert_exact(state.params, start.params, 0)


def test_a_mean_over_samples_drops_for_each_of_them():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(2, 1))
    loss = vgrad.sample_loss(fmodel, lambda out, y: F.dropout(out * 0 + y, 0.5).mean())
    tx, given = vgrad.optim.sgd(0.1), (torch.ones(64, 2), torch.ones(64))
    state, step = TrainState.create(tx, params, buffers), train_step(loss, tx)
    _, metrics = step(state, *given)
    assert 0 < metrics["loss"] < 2  # one mask for all would give 0 or 2
    assert step(state, *given)[1]["loss"] == metrics["loss"]


def test_a_mean_over_samples_has_no_aux():
    loss = vgrad.sample_loss(None, F.mse_loss)
    with pytest.raises(TypeError, match="got one from sample_loss, which has no aux"):
        train_step(loss, vgrad.optim.sgd(0.1), has_aux=True)


def test_a_train_step_updates_buffers_and_draws_dropout_from_the_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    tx = vgrad.optim.sgd(0.1)
    step = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
    state = TrainState.create(tx, params, buffers)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    outside = torch.get_rng_state()
    one, _ = step(state, x, y)
    again, _ = step(state, x, y)
    following, _ = step(one, x, y)
    assert torch.equal(torch.get_rng_state(), outside)
    oracle.assert_exact(one, again, 0)
    moved = [
        two.params["2.weight"] - was.params["2.weight"]
        for was, two in ((state, one), (one, following))
    ]
    assert not torch.equal(*moved)
    assert int(one.buffers["0.num_batches_tracked"]) == 1
    assert not state.buffers["0.running_mean"].any()


def test_a_private_step_without_noise_is_clipped_sgd():
    step, start, x, y = private(chosen=plan(noise_multiplier=0.0))
    state, metrics = step(start, x, y)
    model, _, criterion, *_ = build()
    grads = oracle.model_gradients(model, losses.CASES["mlp"].run, (x, y), 6)
    expected = {
        name: start.params[name] - 0.1 * total / 8
        for name, total in oracle.clipped(grads, 0.5).items()
    }
    oracle.assert_exact(state.params, expected, 1e-12)
    assert int(metrics["samples"]) == 6
    torch.testing.assert_close(metrics["loss"], criterion(model(x), y).detach())


def test_noise_has_the_level_of_the_plan_and_is_drawn_once_a_step():
    def loss(params, buffers, x):
        return (params["w"] * x).sum() * 0

    chosen = plan(noise_multiplier=2.0, max_norm=0.5)
    tx = vgrad.optim.sgd(1.0)
    params = {"w": torch.zeros(200_000)}
    deviation = 2.0 * 0.5 / chosen.expected_batch_size
    for chunk_size in (None, 1):
        step = private_step(loss, tx, chosen, chunk_size=chunk_size)
        state = TrainState.create(tx, params, {}, seed=1)
        new, _ = step(state, torch.zeros(4, 1))
        found = float(new.params["w"].std())
        assert found == pytest.approx(deviation, rel=0.006)


def test_steps_do_not_depend_on_the_physical_batch():
    results = []
    for chunk_size in (None, 1, 4):
        step, state, x, y = private(vgrad.optim.adam(0.01), chunk_size=chunk_size)
        results.append(step(state, x, y)[0].params)
    for other in results[1:]:
        oracle.assert_exact(other, results[0], 1e-12)


def test_an_empty_batch_is_a_step_of_pure_noise():
    step, start, x, y = private()
    state, metrics = step(start, x[:0], y[:0])
    assert int(state.step) == 1
    assert int(metrics["samples"]) == 0
    for name, value in start.params.items():
        assert not torch.equal(state.params[name], value)


def test_a_run_cannot_outlast_its_plan():
    step, state, x, y = private(chosen=plan(steps=2))
    for _ in range(2):
        state, _ = step(state, x, y)
    with pytest.raises(RuntimeError, match="fewer than the 2 steps"):
        step(state, x, y)
    with pytest.raises(RuntimeError, match=r"fewer than the 2 steps .* got -1"):
        step(state._replace(step=torch.tensor(-1)), x, y)


def test_a_batch_larger_than_the_data_set_is_refused():
    step, state, x, y = private(chosen=plan(dataset_size=5))
    with pytest.raises(ValueError, match=r"at most the 5 samples .* got 6\."):
        step(state, x, y)
    step(state, x[:5], y[:5])


def test_keys_differ_between_runs_unless_a_seed_says_otherwise():
    tx = vgrad.optim.sgd(0.1)
    params = {"w": torch.zeros(3)}
    first, second = (TrainState.create(tx, params, {}) for _ in range(2))
    assert not torch.equal(first.key, second.key)
    first, second = (TrainState.create(tx, params, {}, seed=1) for _ in range(2))
    assert torch.equal(first.key, second.key)


def releases(state, chosen, *, steps=4):
    """Train on the plan's batches; return the batches and what each step released."""
    data = torch.arange(200.0).reshape(100, 2).sin()
    tx = vgrad.optim.sgd(1.0)
    step = private_step(lambda p, b, x: (p["w"] * x).sum(), tx, chosen)
    sampler = chosen.sampler(state)
    batches, released = [], []
    for indices in itertools.islice(sampler, steps):
        before = state.params["w"]
        state, _ = step(state, data[indices])
        batches.append(indices)
        released.append(state.params["w"] - before)
    return state, batches, released


def test_a_run_that_goes_on_repeats_batches_and_releases():
    tx = vgrad.optim.sgd(1.0)
    chosen = plan(steps=8)
    start = TrainState.create(tx, {"w": torch.zeros(2)}, {})
    saved, _, _ = releases(start, chosen, steps=3)
    lost = releases(saved, chosen)
    again = releases(pytree.tree_map(torch.clone, saved), chosen)
    assert lost[1] == again[1]
    assert all(map(torch.equal, lost[2], again[2]))
    assert len({tuple(each) for each in lost[1]}) == 4


@pytest.mark.parametrize("kind", [TrainState, EnsembleState])
def test_a_state_that_is_printed_does_not_show_its_key(kind):
    state = kind.create(vgrad.optim.sgd(0.1), {"w": torch.zeros(2)}, {})
    for text in (repr(state), str((state,)), f"{state}"):
        assert "key=<secret>" in text
        assert "uint8" not in text
        assert kind.__name__ in text
        assert "params={'w': tensor([0., 0.])}" in text


def test_runs_from_copies_of_one_state_need_a_fork():
    # Without one, the difference of two releases is the difference of clipped sums.
    tx, chosen = vgrad.optim.sgd(1.0), plan(noise_multiplier=100.0)
    params = {"w": torch.zeros(20_000, dtype=torch.float64)}
    step = private_step(lambda p, b, x: (p["w"] * x).sum(), tx, chosen)
    state = TrainState.create(tx, params, {})
    x = torch.ones(1, 20_000, dtype=torch.float64)
    clipped = 0.5 / 20_000**0.5 / chosen.expected_batch_size
    one, other = (step(state, each)[0].params["w"] for each in (x, x[:0]))
    grid = 2.0**-16 * 100 * 0.5 / chosen.expected_batch_size
    torch.testing.assert_close(other - one, clipped * x[0], rtol=0, atol=grid)
    forked = state.fork()
    assert not torch.equal(forked.key, state.key)
    oracle.assert_exact(forked._replace(key=state.key), state, 0)
    another = step(forked, x[:0])[0].params["w"]
    found = float(torch.corrcoef(torch.stack([one, another]))[0, 1])
    assert abs(found) < 5 / 20_000**0.5


def test_steps_continue_from_a_copied_state_with_the_same_numbers():
    step, state, x, y = private(vgrad.optim.adam(0.01))
    state, _ = step(state, x, y)
    kept = pytree.tree_map(torch.clone, copy.deepcopy(state))
    state, _ = step(state, x, y)
    resumed, _ = step(kept, x, y)
    oracle.assert_exact(state, resumed, 0)


@pytest.mark.parametrize("made", [private, ordinary])
def test_results_keep_no_graph(made):
    step, *given = made()
    leaves = pytree.tree_leaves(step(*given))
    assert not any(leaf.requires_grad for leaf in leaves)


def test_a_state_without_parameters_is_refused():
    with pytest.raises(ValueError, match="at least one parameter"):
        TrainState.create(vgrad.optim.sgd(0.1), {}, {})


# Policies and loss scales.


def changing(state):
    """Return what a skipped step must not touch, a copy."""
    return pytree.tree_map(torch.clone, tuple(state[:3]))


SCALES = {
    "dynamic": DynamicLossScale(2.0**12, period=3),
    "static": StaticLossScale(1234.567),
    "none": NoOpLossScale(),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scaled_steps_equal_torchs_grad_scaler(kind):
    model, scale = with_batch_norm()[0], SCALES[kind]
    step, state, x, y = ordinary(vgrad.optim.sgd(0.1, momentum=0.9), loss_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=float(scale.loss_scale),
        growth_interval=3 if kind == "dynamic" else 10**6,
        backoff_factor=0.5 if kind == "dynamic" else 1 - 1e-12,
        enabled=kind != "none",
    )
    trace = []
    for number in range(11):
        spoiled = kind != "none" and number in (2, 3, 8)
        batch = torch.full_like(x, torch.inf) if spoiled else x * (1 + number / 10)
        before = changing(state)
        statistics = copy.deepcopy(dict(model.named_buffers()))
        state, metrics = step(state, batch, y)
        assert int(state.step) == number + 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), y)
        scaler.scale(loss).backward()
        used = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if spoiled:  # torch has no one who puts buffers back
            for name, buffer in model.named_buffers():
                buffer.copy_(statistics[name])
            oracle.assert_exact(before, changing(state), 0)
        else:
            torch.testing.assert_close(metrics["loss"], loss.detach())
        if kind == "none":
            assert metrics.keys() == {"loss"}
            continue
        assert {value.dtype for value in metrics.values()} == {torch.float32}
        assert float(metrics["skipped"]) == spoiled
        assert float(metrics["loss_scale"]) == pytest.approx(used)
        trace.append(used)
    oracle.assert_exact({**state.params, **state.buffers}, model.state_dict(), 1e-5)
    if kind == "dynamic":
        powers = [12, 12, 12, 11, 10, 10, 10, 11, 11, 10, 10]
        assert trace == [2.0**power for power in powers]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", None])
def test_a_skipped_step_leaves_every_bit_and_halves_the_scale(policy):
    options = {"policy": policy, "loss_scale": DynamicLossScale(2.0**8)}
    step, state, x, y = ordinary(vgrad.optim.adamw(0.01), **options)
    state, metrics = step(state, x, y)
    assert float(metrics["skipped"]) == 0
    before = changing(state)
    for value in (torch.inf, torch.nan):
        spoiled = x.clone()
        spoiled[2, 1] = value
        skipped, metrics = step(state, spoiled, y)
        assert float(metrics["skipped"]) == 1
        assert float(metrics["loss_scale"]) == 2.0**8
        assert float(skipped.loss_scale.loss_scale) == 2.0**7
        assert int(skipped.loss_scale.counter) == 0
        oracle.assert_exact(before, changing(skipped), 0)
        assert int(skipped.step) == 2
    following, metrics = step(skipped, x, y)
    assert float(metrics["loss_scale"]) == 2.0**7
    assert oracle.error(changing(following), before) > 0


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "float64"]
)
@pytest.mark.parametrize("made", [private, ordinary])
def test_master_weights_and_all_else_that_lasts_stay_in_float32(made, policy):
    tx = vgrad.optim.adamw(0.01)
    step, start, x, y = made(tx, dtype=torch.float32, policy=policy)
    state, _ = step(start, x, y)
    state, metrics = step(state, x, y)
    dtypes = [pytree.tree_map(lambda t: t.dtype, s[:3]) for s in (start, state)]
    assert dtypes[0] == dtypes[1]
    assert {value.dtype for value in state.params.values()} == {torch.float32}
    wide = torch.float64 if policy == "float64" else torch.float32
    assert metrics["loss"].dtype == wide
    assert metrics["loss"].isfinite()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_running_statistics_stay_in_float32(policy):
    model = with_batch_norm()[0]
    step, state, x, y = ordinary(policy=policy)
    state, _ = step(state, x, y)
    model(x)
    for name, buffer in model.named_buffers():
        assert state.buffers[name].dtype == buffer.dtype
    oracle.assert_exact(state.buffers, dict(model.named_buffers()), 0.01)


def test_a_group_norm_has_the_backward_pass_of_its_kernel():
    """Which takes half the time and memory of the formula that has derivatives."""
    seen = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    tx = vgrad.optim.sgd(0.1)
    step = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
    state = TrainState.create(tx, params, buffers)
    with Kernels():
        step(state, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    assert torch.ops.aten.native_group_norm_backward in seen


def test_small_updates_are_kept_by_master_weights():
    def loss(params, buffers, x):
        return (params["w"] * x).mean()

    tx, params = vgrad.optim.sgd(2.0**-12), {"w": torch.ones(1)}
    step = train_step(loss, tx, policy="bfloat16")
    state = TrainState.create(tx, params, {})
    for _ in range(8):
        state, _ = step(state, torch.ones(4, 1))
    assert torch.equal(state.params["w"], torch.tensor([1 - 8 * 2.0**-12]))


def test_a_mixed_step_equals_eager_autocast():
    model = with_batch_norm()[0]
    step, state, x, y = ordinary(policy="mixed_bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        state, metrics = step(state, x, y)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = F.cross_entropy(model(x), y)
        value.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"], value.detach(), rtol=0.02, atol=0)
    oracle.assert_exact({**state.params, **state.buffers}, model.state_dict(), 5e-3)
    assert "loss_scale" not in metrics


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_float16_policies_scale_the_loss_by_default(policy):
    step, state, x, y = ordinary(policy=policy)
    assert isinstance(state.loss_scale, NoOpLossScale)
    state, metrics = step(state, x, y)
    assert isinstance(state.loss_scale, DynamicLossScale)
    assert float(metrics["loss_scale"]) == 2.0**15
    step, *given = private(dtype=torch.float32, policy=policy)
    state, _ = step(*given)
    assert isinstance(state.loss_scale, StaticLossScale)
    assert float(state.loss_scale.loss_scale) == 2.0**10


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16", "float32"])
def test_other_policies_do_not_scale_it(policy):
    step, *given = ordinary(policy=policy)
    state, metrics = step(*given)
    assert isinstance(state.loss_scale, NoOpLossScale)
    assert metrics.keys() == {"loss"}


@pytest.mark.parametrize("given", [None, DynamicLossScale()])
def test_a_scale_in_the_state_goes_before_that_of_the_step(given):
    step, state, x, y = ordinary(held=StaticLossScale(2.0**5), loss_scale=given)
    new, metrics = step(state, x, y)
    assert float(metrics["loss_scale"]) == 2.0**5
    assert isinstance(new.loss_scale, StaticLossScale)


def test_gradients_too_small_for_float16_train_with_a_scale_only():
    _, fmodel, _, params, buffers, x, y = build("mlp", dtype=torch.float32)
    tiny = vgrad.batch_loss(fmodel, lambda out, y: F.cross_entropy(out, y) * 1e-8)
    tx = vgrad.optim.sgd(1e6)
    moved = {}
    for scale in (NoOpLossScale(), StaticLossScale(2.0**20)):
        step = train_step(tiny, tx, policy="mixed_float16", loss_scale=scale)
        state, _ = step(TrainState.create(tx, params, buffers), x, y)
        moved[type(scale)] = state.params["0.weight"] - params["0.weight"].detach()
    step = train_step(tiny, tx, policy="float64")
    state, _ = step(TrainState.create(tx, params, buffers), x, y)
    expected = {"w": state.params["0.weight"] - params["0.weight"].detach()}
    oracle.assert_exact({"w": moved[StaticLossScale]}, expected, 5e-3)
    assert not moved[NoOpLossScale].any()


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_private_steps_clip_and_add_noise_without_knowing_the_scale(policy):
    states = {}
    for power in (0, 8, 10):
        options = {"policy": policy, "loss_scale": StaticLossScale(2.0**power)}
        step, start, x, y = private(dtype=torch.float32, **options)
        states[power], _ = step(start, x, y)
    for power in (0, 8):
        oracle.assert_exact(states[power].params, states[10].params, 1e-6)
    quiet, *_ = private(None, plan(noise_multiplier=0.0), torch.float32, **options)
    state, _ = quiet(start, x, y)
    model = build(dtype=torch.float32)[0]
    grads = oracle.model_gradients(model, losses.CASES["mlp"].run, (x, y), 6)
    for name, total in oracle.clipped(grads, 0.5).items():
        expected = start.params[name].detach() - 0.1 * total / 8
        tolerance = 1e-6 if policy is None else 2e-4
        torch.testing.assert_close(
            state.params[name], expected.float(), rtol=0, atol=tolerance
        )
        noise = states[8].params[name] - state.params[name]
        assert noise.std() == pytest.approx(0.1 * 0.5 / 8, rel=1.0)


def overflowing():
    """Return a loss of samples with factors, and a batch in which one is large."""

    def loss(params, buffers, x, factor):
        return F.linear(x, params["w"]).tanh().sum() * factor

    torch.manual_seed(0)
    params = {"w": torch.randn(3, 4)}
    factors = torch.tensor([1.0, 1.0, 1000.0, 1.0])
    return loss, params, torch.randn(4, 4) * 0.1, factors


def test_private_steps_are_never_skipped():
    loss, params, x, factors = overflowing()
    tx = vgrad.optim.sgd(1.0)
    quiet = plan(noise_multiplier=0.0)
    policy, scale = "mixed_float16", StaticLossScale(2.0**10)
    step = private_step(loss, tx, quiet, policy=policy, loss_scale=scale)
    state = TrainState.create(tx, params, {})
    keep = torch.tensor([0, 1, 3])
    mixed, metrics = step(state, x, factors)
    assert int(metrics["nonfinite"]) == 1
    assert int(metrics["samples"]) == 4
    assert int(mixed.step) == 1
    without, _ = step(state, x[keep], factors[keep])
    oracle.assert_exact(mixed.params, without.params, 1e-5)
    assert not torch.equal(mixed.params["w"], params["w"])
    alone, metrics = step(state, x[2:3], factors[2:3])
    assert int(metrics["nonfinite"]) == 1
    assert torch.equal(alone.params["w"], params["w"])
    noisy = private_step(loss, tx, plan(), policy=policy, loss_scale=scale)
    drawn, metrics = noisy(state, x[2:3], factors[2:3])
    assert int(metrics["nonfinite"]) == 1
    assert not torch.equal(drawn.params["w"], params["w"])
    assert drawn.params["w"].isfinite().all()


def test_a_dynamic_scale_backs_off_when_a_private_sample_overflows():
    loss, params, x, factors = overflowing()
    tx = vgrad.optim.sgd(1.0)
    scale = DynamicLossScale(2.0**10, period=2)
    step = private_step(
        loss, tx, plan(steps=9), policy="mixed_float16", loss_scale=scale
    )
    state, found = TrainState.create(tx, params, {}), []
    for number in range(8):
        given = factors if number < 6 else torch.ones(4)
        state, metrics = step(state, x, given)
        counted = int(metrics["nonfinite"])
        found.append((counted, float(state.loss_scale.loss_scale)))
    # The sample fits from some scale on; two steps later the scale grows again.
    expected, now, run = [], 2.0**10, 0
    for counted, _ in found:
        run = 0 if counted else run + 1
        now = now / 2 if counted else now * (2 if run == 2 else 1)
        run = run % 2
        expected.append((counted, now))
    assert found == expected
    assert found[0] == (1, 2.0**9)
    assert any(counted == 0 for counted, _ in found)
    empty, _ = step(TrainState.create(tx, params, {}), x[:0], factors[:0])
    assert float(empty.loss_scale.loss_scale) == 2.0**10


@pytest.mark.parametrize("kind", SCALES)
def test_a_state_with_a_scale_survives_trees_and_files(kind, tmp_path):
    step, state, x, y = ordinary(vgrad.optim.adamw(0.01), held=SCALES[kind])
    template = state
    for _ in range(2):
        state, _ = step(state, x, y)
    checkpoint.save_state(tmp_path, state, {})
    tensors, _ = checkpoint.read_state(tmp_path)
    copies = (
        pytree.tree_map(torch.clone, state),
        checkpoint.restored(template, tensors),
        copy.deepcopy(state),
    )
    expected, metrics = step(state, x, y)
    for other in copies:
        assert type(other) is TrainState
        assert type(other.loss_scale) is type(SCALES[kind])
        found, again = step(other, x, y)
        oracle.assert_exact(found, expected, 0)
        assert again == metrics
    if kind == "dynamic":  # the third finite step, so nothing of it was lost
        assert float(found.loss_scale.loss_scale) == 2.0**13
        assert found.loss_scale.period == 3


def test_what_is_no_scale_is_refused_by_steps():
    _, fmodel, params, buffers, *_ = with_batch_norm()
    tx = vgrad.optim.sgd(0.1)
    wrong = "expected a loss scale such as .* got a float"
    with pytest.raises(TypeError, match=rf"^train_step\(loss_scale=8.0\): {wrong}"):
        train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx, loss_scale=8.0)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    with pytest.raises(TypeError, match=rf"^private_step\(loss_scale=8.0\): {wrong}"):
        private_step(loss, tx, plan(), loss_scale=8.0)
    with pytest.raises(TypeError, match=rf"^TrainState.create\(loss_.*{wrong}"):
        TrainState.create(tx, params, buffers, loss_scale=8.0)
    with pytest.raises(TypeError, match="expected a string, got a dtype"):
        train_step(loss, tx, policy=torch.float16)
    with pytest.raises(ValueError, match="expected dtypes among"):
        private_step(loss, tx, plan(), policy="mixed_float8")


@pytest.mark.parametrize("around", ["nothing", "the data", "a step", "all"])
@pytest.mark.parametrize("members", [0, 2])
def test_inference_mode_changes_no_number(around, members):
    """Plain autograd records nothing there, and saves nothing that was made there."""

    def trained(around):
        torch.manual_seed(0)
        with torch.inference_mode(around == "all"):
            models = [nn.Linear(3, 2) for _ in range(max(members, 1))]
            split = vgrad.make_functional_with_buffers
            fmodel, *entries = vgrad.stack(models) if members else split(*models)
            with torch.inference_mode(around in ("the data", "all")):
                batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
            loss, tx = vgrad.batch_loss(fmodel, F.cross_entropy), vgrad.optim.sgd(0.1)
            kind = vgrad.training.EnsembleState if members else TrainState
            step = vgrad.training.ensemble_train_step if members else train_step
            state = kind.create(tx, *entries, seed=0)
            with torch.inference_mode(around in ("a step", "all")):
                return step(loss, tx)(state, *batch)[0].params

    oracle.assert_exact(trained(around), trained("nothing"), 0)

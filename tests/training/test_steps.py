"""A step is its parts: gradients in plain torch, clipping and noise, an optimizer."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import losses, oracle
from tests.losses import product
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.precision import DynamicLossScale, NoOpLossScale, StaticLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

E, B = 3, 6
KINDS = ["train", "samples", "private", "ensemble"]
every_kind = pytest.mark.parametrize("kind", KINDS)
MODELS = pytest.mark.parametrize("kind", ["train", "ensemble"])
SGD = optim.sgd(0.1)
plan = partial(losses.plan, max_norm=0.5, steps=12)


class Aux:
    """A loss with aux: twice its value, and a parameter."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, params, *rest):
        value = self.loss(params, *rest)
        return value, {"twice": 2 * value, "weight": params["0.weight"]}

    def with_buffers(self, params, *rest):
        value, new = self.loss.with_buffers(params, *rest)
        return (value, {"twice": 2 * value, "weight": params["0.weight"]}), new


def begun(kind, dtype=torch.float64, tx=SGD, held=None, chosen=None, **options):
    """Return models, a step, its first state, and ten batches."""
    torch.manual_seed(0)
    whole, many = kind in ("train", "ensemble"), kind == "ensemble"
    models = [
        nn.Sequential(
            nn.Linear(5, 8, bias=False),
            nn.BatchNorm1d(8) if whole else nn.Identity(),
            nn.Tanh(),
            nn.Linear(8, 3),
        ).to(dtype)
        for _ in range(E if many else 1)
    ]
    fmodel, params, buffers = (
        vgrad.stack(models) if many else vgrad.make_functional_with_buffers(*models)
    )
    loss = (vgrad.batch_loss if whole else vgrad.sample_loss)(fmodel, F.cross_entropy)
    loss = Aux(loss) if options.get("has_aux") else loss
    params = {name: value.detach().clone() for name, value in params.items()}
    if kind == "private":
        step = private_step(loss, tx, chosen or plan(), **options)
    elif many:
        step = ensemble_train_step(loss, tx, **{"in_dims": 0, **options})
    else:
        step = train_step(loss, tx, **options)
    create = EnsembleState.create if many else TrainState.create
    state = create(tx, params, buffers, seed=3, loss_scale=held)
    size = (10, len(models), B) if many else (10, B)
    return models, step, state, [*torch.randn(*size, 5, dtype=dtype)]


def targets(x):
    return torch.arange(x[..., 0].numel()).reshape(x.shape[:-1]) % 3


def set_gradients(kind, model, x, y, policy, key, number):
    """Set the gradients of a model by torch alone; return its loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=policy == "mixed_bfloat16"):
        value = F.cross_entropy(model(x), y)
    model.zero_grad()
    value.backward()
    if kind == "private":
        good = x.isfinite().all(1)
        run = losses.CASES["mlp"].run
        grads = oracle.model_gradients(model, run, (x[good], y[good]), int(good.sum()))
        loss = vgrad.sample_loss(None, F.cross_entropy)
        clipped = vgrad.clipped_grad(loss, max_norm=0.5, normalize_by=8.0)
        dtype = model[0].weight.dtype
        means = {n: (g / 8).to(dtype) for n, g in oracle.clipped(grads, 0.5).items()}
        means = plan().add_noise(means, clipped.sensitivity, key=key, step=number)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
    return value.detach()


DYNAMIC = DynamicLossScale(2.0**12, period=3)
SPOILED = {"loss_scale": DYNAMIC, "spoiled": (2, 3, 8)}
OPTIONS = {
    "plain": {},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "static scale": {"loss_scale": StaticLossScale(1234.567)},
    "skipped": SPOILED,
    "donated": {"donate": True},
    "donated, skipped": {"donate": True, **SPOILED},
    "aux": {"has_aux": True},
    "all": {"donate": True, "has_aux": True, **SPOILED},
    "chunks": {"chunk_size": 4},
    "compiled": {"compiled": True},
    "compiled, skipped": {"compiled": True, **SPOILED},
    "compiled, all": {"compiled": True, "donate": True, "has_aux": True, **SPOILED},
}


REFUSED = {("samples", name) for name in OPTIONS if "has_aux" in OPTIONS[name]}
REFUSED |= {(kind, "chunks") for kind in KINDS if kind != "private"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [pair for pair in itertools.product(KINDS, OPTIONS) if pair not in REFUSED],
)
def test_a_step_is_its_parts(kind, name):
    options = dict(OPTIONS[name])
    spoiled, compiled = options.pop("spoiled", ()), options.pop("compiled", False)
    policy, scale = options.get("policy"), options.get("loss_scale")
    dtype, tolerance = (torch.float32, 0.03) if policy else (torch.float64, 1e-10)
    tx = optim.sgd(0.1, momentum=0.9)
    models, step, state, data = begun(kind, dtype, tx, **options)
    step = vgrad.compile(step) if compiled else step
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    dtypes, powers, outside = _dtypes(state[:3]), [], torch.get_rng_state()
    for number, x in enumerate(data):
        y, bad = targets(x), number in spoiled
        if bad:
            x[(1, 2) if kind == "ensemble" else 2] = torch.inf
        old, place = state, state.params["0.weight"].data_ptr()
        before = pytree.tree_map(torch.clone, state)
        state, metrics = step(state, x, y)
        values, skipped = [], []
        for member, (model, optimizer) in enumerate(
            zip(models, optimizers, strict=True)
        ):
            mine = (x[member], y[member]) if kind == "ensemble" else (x, y)
            statistics = copy.deepcopy(dict(model.named_buffers()))
            value = set_gradients(kind, model, *mine, policy, before.key, number)
            values.append(value)
            skips = bad and kind != "private" and (kind != "ensemble" or member == 1)
            skipped.append(skips)
            if not skips:
                optimizer.step()
            for entry, buffer in model.named_buffers() if skips else ():
                buffer.copy_(statistics[entry])
        # Parameters, buffers, and the metrics.
        entries = [model.state_dict() for model in models]
        expected = pytree.tree_map(lambda *each: torch.stack(each), *entries)
        if kind != "ensemble":
            expected, values, skipped = entries[0], values[0], skipped[0]
        assert_exact({**state.params, **state.buffers}, dict(expected), tolerance)
        values = torch.stack(values) if kind == "ensemble" else values
        if not bad:
            assert_exact(metrics["loss"], values, tolerance)
        assert metrics["loss"].dtype == dtype
        if kind == "private":
            assert int(metrics["samples"]) == B
            assert int(metrics["nonfinite"]) == bad
        else:
            is_there = scale is not None or kind == "ensemble"
            assert ("skipped" in metrics) == is_there
            assert not is_there or metrics["skipped"].tolist() == skipped
            assert ("loss_scale" in metrics) == (scale is not None)
        if "has_aux" in options:
            twice, weight = metrics["aux"]["twice"], metrics["aux"]["weight"]
            if kind == "private":
                twice, weight = twice.mean(), weight[0]
            assert_exact(twice, 2 * metrics["loss"], 0 if kind == "train" else 1e-12)
            assert_exact(weight, before.params["0.weight"], 0)
        # The states: the old one is as it was, or written into.
        assert int(state.step) == number + 1
        assert _dtypes(state[:3]) == dtypes
        assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(state))
        in_place = "donate" in options and not (bad and kind != "private")
        if kind != "ensemble" or number <= 2:  # then counts of members differ
            assert (state.params["0.weight"].data_ptr() == place) == in_place
        assert bool(old.params) != in_place
        if not options.get("donate"):
            assert_exact(old, before, 0)
        if scale is DYNAMIC:
            powers.append(state.loss_scale.loss_scale.log2().tolist())
    assert torch.equal(torch.get_rng_state(), outside)
    if scale is DYNAMIC:
        seen = [12, 12, 11, 10, 10, 10, 11, 11, 10, 10]
        never = [12, 12, 13, 13, 13, 14, 14, 14, 15, 15]
        rows = zip(never, seen, never, strict=True)
        assert powers == (list(map(list, rows)) if kind == "ensemble" else seen)


def _dtypes(tree):
    return [leaf.dtype for leaf in pytree.tree_leaves(tree)]


@every_kind
@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "bfloat16", "float64"])
def test_the_state_keeps_its_dtypes_under_a_policy(kind, policy):
    """Float16 scales the loss by default; running statistics are torch's."""
    tx = optim.adamw(0.01)
    models, step, start, data = begun(kind, torch.float32, tx, policy=policy)
    state, metrics = step(start, data[0], targets(data[0]))
    assert _dtypes(state[:3]) == _dtypes(start[:3])
    assert metrics["loss"].dtype == {"float64": torch.float64}.get(
        policy, torch.float32
    )
    assert metrics["loss"].isfinite().all()
    default = StaticLossScale if kind == "private" else DynamicLossScale
    scaled = policy in ("mixed_float16", "float16")
    assert type(state.loss_scale) is (default if scaled else NoOpLossScale)
    if scaled:
        power = 10 if kind == "private" else 15
        assert (state.loss_scale.loss_scale == 2.0**power).all()
    if kind == "train":
        models[0](data[0])
        assert_exact(state.buffers, dict(models[0].named_buffers()), 0.02)


@every_kind
@pytest.mark.parametrize("given", [None, DynamicLossScale()])
def test_a_scale_in_the_state_goes_before_the_one_of_the_step(kind, given):
    held = StaticLossScale(2.0**5)
    _, step, state, data = begun(kind, held=held, loss_scale=given)
    new, _ = step(state, data[0], targets(data[0]))
    assert isinstance(new.loss_scale, StaticLossScale)
    assert (torch.as_tensor(new.loss_scale.loss_scale) == 2.0**5).all()


# Losses of one's own.

X = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)


def mean(params, buffers, x):
    return (params["w"] * x * buffers["factor"]).mean()


def dropped(params, buffers, x):
    return F.dropout(params["w"] * torch.arange(100), 0.5).mean() * x.mean()


class Counting:
    """A loss that changes a buffer."""

    def __call__(self, params, buffers, x):
        return mean(params, buffers, x)

    def with_buffers(self, params, buffers, x):
        return mean(params, buffers, x), {"factor": buffers["factor"] + 1}


def of_loss(kind, loss, params=None, buffers=None, tx=SGD, **options):
    """Return a step of a loss of dictionaries, and its first state."""
    double = torch.ones((), dtype=torch.float64)
    params = {"w": double.clone()} if params is None else params
    buffers = {"factor": 0.1 * double} if buffers is None else buffers
    if kind == "private":
        step = private_step(loss, tx, options.pop("chosen", plan()), **options)
        return step, TrainState.create(tx, params, buffers, seed=0)
    if kind == "train":
        return train_step(loss, tx, **options), TrainState.create(tx, params, buffers)
    many = [{n: torch.stack([v] * E) for n, v in x.items()} for x in (params, buffers)]
    return ensemble_train_step(loss, tx, **options), EnsembleState.create(tx, *many)


@MODELS
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("loss", [mean, Counting()])
def test_steps_take_losses_with_and_without_buffers(kind, policy, loss):
    """A plain function leaves every bit of the buffers, whatever a policy casts."""
    step, state = of_loss(kind, loss, policy=policy)
    new, _ = step(state, X)
    changed, tolerance = loss is not mean, 2e-2 if policy else 1e-12
    factor = state.buffers["factor"] + changed
    assert_exact(new.buffers["factor"], factor, tolerance if changed and policy else 0)
    moved = state.params["w"] - new.params["w"]
    assert_exact(moved, (X.mean() * 0.01).expand(moved.shape), tolerance)


@pytest.mark.parametrize("kind", ["train", "private", "ensemble"])
def test_random_numbers_come_from_the_state(kind):
    options = {"randomness": "different"} if kind != "train" else {}
    step, start = of_loss(kind, dropped, **options)
    x, outside = torch.ones(4, 2), torch.get_rng_state()
    one, first = step(start, x)
    _, again = step(start, x)
    _, second = step(one._replace(params=start.params), x)
    _, other = step(start.fork(), x)
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(first["loss"], again["loss"])
    assert not torch.equal(first["loss"], second["loss"])
    assert not torch.equal(first["loss"], other["loss"])
    if kind == "ensemble":  # of alike members
        assert len(first["loss"].unique()) == E


def test_a_mean_over_samples_drops_for_each_of_them():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(nn.Linear(2, 1))
    loss = vgrad.sample_loss(fmodel, lambda out, y: F.dropout(out * 0 + y, 0.5).mean())
    state = TrainState.create(SGD, params, buffers)
    _, metrics = train_step(loss, SGD)(state, torch.ones(64, 2), torch.ones(64))
    assert 0 < metrics["loss"] < 2  # one mask for all would give 0 or 2


@MODELS
def test_a_loss_that_is_a_parameter_is_not_written_into(kind):
    loss = lambda p, b: (p["w"], {"w": p["w"]})  # noqa: E731
    step, state = of_loss(kind, loss, donate=True, has_aux=True)
    before = state.params["w"].clone()
    _, metrics = step(state)
    assert torch.equal(metrics["loss"], before)


SHARED_MEMORY = {
    "kept": lambda p: {"own": p["w"]},
    "in part": lambda p: {"own": p["w"][:, 1:]},
    "made": lambda p: {"own": torch.zeros_like(p["w"])},
}


@pytest.mark.parametrize("name", SHARED_MEMORY)
@pytest.mark.parametrize("kind", ["train", "private", "ensemble"])
def test_buffers_in_the_memory_of_parameters_stay_as_they_were(kind, name):
    class Loss:
        def __call__(self, params, buffers, *batch):
            return params["w"].square().sum()

        def with_buffers(self, params, buffers, *batch):
            new = {"own": params["w"].detach()} if name == "made" else buffers
            return self(params, buffers), new

    make, create, loss = {
        "train": (train_step, TrainState.create, Loss()),
        "private": (private_step, TrainState.create, Loss().__call__),
        "ensemble": (ensemble_train_step, EnsembleState.create, Loss()),
    }[kind]
    chosen, batch = ((plan(),), (torch.ones(4, 2),)) if kind == "private" else ((), ())
    ends = []
    for donate in (False, True):
        params = {"w": torch.ones(2, 4, dtype=torch.float64)}
        state = create(SGD, params, SHARED_MEMORY[name](params), seed=0)
        state, _ = make(loss, SGD, *chosen, donate=donate)(state, *batch)
        ends.append((state.params, state.buffers))
    assert_exact(*ends, 1e-12)


@pytest.mark.parametrize("around", ["the data", "a step", "all"])
@MODELS
def test_inference_mode_changes_no_number(around, kind):
    """Plain autograd records nothing there, and saves nothing that was made there."""

    def trained(around):
        with torch.inference_mode(around == "all"):
            _, step, state, data = begun(kind)
        with torch.inference_mode(around in ("the data", "all")):
            x = data[0].clone()
        with torch.inference_mode(around in ("a step", "all")):
            return step(state, x, targets(x))[0].params

    assert_exact(trained(around), trained("nothing"), 0)


def test_a_group_norm_has_the_backward_pass_of_its_kernel():
    """Which takes half the time and memory of the formula that has derivatives."""
    model = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    step = train_step(vgrad.batch_loss(fmodel, F.cross_entropy), SGD)
    state = TrainState.create(SGD, params, buffers)
    with torch.profiler.profile(acc_events=True) as seen:
        step(state, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    assert "aten::native_group_norm_backward" in {
        each.key for each in seen.key_averages()
    }


def test_small_updates_are_kept_by_master_weights():
    loss = lambda p, b, x: (p["w"] * x).mean()  # noqa: E731
    tx, params = optim.sgd(2.0**-12), {"w": torch.ones(1)}
    step, state = of_loss("train", loss, params, tx=tx, policy="bfloat16")
    for _ in range(8):
        state, _ = step(state, torch.ones(4, 1))
    assert torch.equal(state.params["w"], torch.tensor([1 - 8 * 2.0**-12]))


def test_gradients_too_small_for_float16_train_with_a_scale_only():
    def tiny(params, buffers, x):
        return F.linear(x, params["w"]).tanh().float().mean() * 1e-8

    x, params, tx = torch.randn(6, 5), {"w": torch.randn(3, 5)}, optim.sgd(1e6)
    moved = {}
    for scale in (NoOpLossScale(), StaticLossScale(2.0**20), None):
        policy = "float64" if scale is None else "mixed_float16"
        options = {"policy": policy, "loss_scale": scale}
        step, state = of_loss("train", tiny, params, tx=tx, **options)
        moved[type(scale)] = step(state, x)[0].params["w"] - params["w"]
    assert_exact(moved[StaticLossScale], moved[type(None)], 5e-3)
    assert not moved[NoOpLossScale].any()


# Privacy.


def test_an_empty_batch_is_a_step_of_pure_noise():
    _, step, start, data = begun("private", has_aux=True)
    state, metrics = step(start, data[0][:0], targets(data[0])[:0])
    assert (int(state.step), int(metrics["samples"])) == (1, 0)
    assert metrics["aux"] is None
    for name, value in start.params.items():
        assert not torch.equal(state.params[name], value)


def test_a_batch_may_be_the_whole_data_set_and_no_more():
    _, step, state, (x, *_) = begun("private", chosen=plan(dataset_size=5))
    with pytest.raises(ValueError, match=r"at most the 5 samples .* got 6\."):
        step(state, x, targets(x))
    step(state, x[:5], targets(x[:5]))


def test_keys_differ_between_runs_unless_a_seed_says_otherwise():
    for seed in (None, 1):
        keys = [TrainState.create(SGD, {"w": X}, {}, seed=seed).key for _ in range(2)]
        assert torch.equal(*keys) == (seed is not None)


def test_a_run_that_goes_on_repeats_batches_and_releases():
    chosen, data = plan(), torch.arange(200.0).reshape(100, 2).sin()
    step = private_step(product, SGD, chosen)

    def run(state, steps):
        released = []
        for indices, _ in zip(chosen.sampler(state), range(steps), strict=False):
            state, _ = step(state, data[indices])
            released.append((indices, state.params["w"]))
        return state, released

    saved, _ = run(TrainState.create(SGD, {"w": torch.zeros(2)}, {}), 3)
    (_, lost), (_, again) = run(saved, 4), run(copy.deepcopy(saved), 4)
    assert [indices for indices, _ in lost] == [indices for indices, _ in again]
    assert_exact([w for _, w in lost], [w for _, w in again], 0)
    assert len({tuple(indices) for indices, _ in lost}) == 4


def test_runs_from_copies_of_one_state_need_a_fork():
    """Without one, the difference of two releases is the difference of clipped sums."""
    size = 20_000
    step, state = of_loss("private", product, {"w": torch.zeros(size)})
    forked = state.fork()
    assert_exact(forked._replace(key=state.key), state, 0)
    empty = torch.zeros(0, size)
    noise = [step(each, empty)[0].params["w"] for each in (state, state, forked)]
    assert torch.equal(*noise[:2])
    assert float(torch.corrcoef(torch.stack(noise))[0, 2].abs()) < 5 / size**0.5


@pytest.mark.parametrize("kind", [TrainState, EnsembleState])
def test_a_state_that_is_printed_does_not_show_its_key(kind):
    state = kind.create(SGD, {"w": torch.zeros(2)}, {})
    for text in (repr(state), str((state,)), f"{state}"):
        assert text.count("key=<secret>") == 1
        assert "uint8" not in text
        assert f"{kind.__name__}(params={{'w': tensor([0., 0.])}}" in text

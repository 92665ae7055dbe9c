"""Members trained together are what each of them becomes alone."""

import copy
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests.examples import examples
from tests.oracle import EXACT, assert_exact
from vgrad import optim
from vgrad.ensemble import for_members, share, stack
from vgrad.precision import DynamicLossScale, NoOpLossScale, StaticLossScale
from vgrad.training import (
    EarlyStopping,
    EnsembleState,
    TrainState,
    ensemble_train_step,
    train_step,
)
from vgrad.tree import load_state_dict, state_dict

E = 3


def mlp(p=0.0, bias=True):
    return nn.Sequential(
        nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3, bias=bias)
    ).double()


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 3),
    ).double()


def normed():
    """No bias in front of a norm: its gradient is rounding, which Adam amplifies."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 3),
    ).double()


class Encoder(nn.Module):
    """A transformer that reads tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)).mean(1))


def images(size):
    return torch.randn(*size, 2, 6, 6, dtype=torch.float64)


MODELS = {
    "mlp": (mlp, lambda size: torch.randn(*size, 4, dtype=torch.float64)),
    "cnn": (cnn, images),
    "normed": (normed, images),
    "encoder": (lambda: Encoder().double(), lambda size: torch.randint(9, (*size, 5))),
}


def build(name="mlp", count=E, own=False, make=None, batches=5):
    """Models, their stack, the loss and batches of five, the members' own or not."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    models = [(make or model)() for _ in range(count)]
    fmodel, params, buffers = stack(models)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    size = (count, 5) if own else (5,)
    data = [(inputs(size), torch.randint(3, size)) for _ in range(batches)]
    return models, loss, params, buffers, data


def begun(tx, name="mlp", own=False, make=None, shared=(), seed=None, **options):
    """Models, a step of all of them, its first state, and batches."""
    models, loss, params, buffers, data = build(name, own=own, make=make)
    if shared:
        params, buffers = share(params, buffers, shared)
    dims = 0 if own else None
    step = ensemble_train_step(loss, tx, in_dims=dims, shared=shared, **options)
    state = EnsembleState.create(tx, params, buffers, shared=shared, seed=seed)
    return models, step, state, data


def without_one(state):
    """Let the second member rest."""
    return state._replace(active=torch.tensor([True, False, True]))


double = partial(torch.tensor, dtype=torch.float64)
FIRST = ["0.*"]
ALL = pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])


def train(step, state, data, steps):
    """Run steps over the batches in turn; return the state and all losses `[T, E]`."""
    losses = []
    for number in range(steps):
        state, metrics = step(state, *data[number % len(data)])
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def alone(models, txs, data, steps, own=False, **options):
    """The separate runs: `train_step` for each model; states and losses `[T, E]`."""
    states, losses = [], []
    for member, (model, tx) in enumerate(zip(models, txs, strict=True)):
        fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        loss = vgrad.batch_loss(fmodel, F.cross_entropy)
        state = TrainState.create(tx, params, buffers, seed=options.get("seed"))
        rest = {key: value for key, value in options.items() if key != "seed"}
        mine = [(x[member], y[member]) for x, y in data] if own else data
        state, found = train(train_step(loss, tx, **rest), state, mine, steps)
        states.append(state)
        losses.append(found)
    return states, torch.stack(losses, 1)


def joined(trees):
    """Stack trees of tensors, one of each member."""
    return pytree.tree_map(lambda *each: torch.stack(each), *trees)


def of(trees, member):
    return pytree.tree_map(lambda leaf: leaf[member], trees)


def assert_members_are(state, states, tolerance=EXACT):
    expected = joined([tuple(each[:2]) for each in states])
    assert_exact(tuple(state[:2]), expected, tolerance)


def entries(model):
    """Return parameters and buffers of a module by name, without graph."""
    return {name: value.detach() for name, value in model.state_dict().items()}


RATES = [0.003, 0.01, 0.03]
BETAS = [(0.9, 0.999), (0.8, 0.99), (0.5, 0.9)]
DECAYS = [0.0, 0.1, 0.01]
ADAMS = for_members(optim.adam, lr=double(RATES))


@cache
def trained_by_torch(name, own, steps):
    """Each model in a loop with an optimizer of torch's own: modules and losses."""
    models, _, _, _, data = build(name, own=own)
    losses = []
    for member, model in enumerate(models):
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=RATES[member],
            betas=BETAS[member],
            weight_decay=DECAYS[member],
            eps=1e-5,  # the gradient of a bias of keys is rounding, to be kept small
        )
        losses.append([])
        for number in range(steps):
            x, y = data[number % len(data)]
            x, y = (x[member], y[member]) if own else (x, y)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    return models, torch.stack([torch.stack(each) for each in losses], 1)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "hybrid") for name in MODELS]
    + [("mlp", "vmap"), ("normed", "loop"), ("encoder", "loop")],
)
def test_fifty_steps_together_are_fifty_steps_of_torch_alone(name, strategy):
    own = name in ("mlp", "normed")
    tx = for_members(
        optim.adamw,
        lr=double(RATES),
        betas=tuple(double(BETAS).mT),
        weight_decay=double(DECAYS),
        eps=1e-5,
    )
    _, step, state, data = begun(tx, name, own, strategy=strategy)
    state, losses = train(step, state, data, 50)
    models, expected = trained_by_torch(name, own, 50)
    assert_exact(losses, expected)
    assert losses[-5:].mean() < losses[:5].mean()
    assert_exact({**state.params, **state.buffers}, joined(map(entries, models)))
    assert int(state.step) == 50


def clipped(lr, max_norm):
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.sgd(lr, momentum=0.9))


def matrices(lr, weight_decay):
    return optim.muon(lr, weight_decay=weight_decay, dtype=torch.float64)


def now_and_then(lr):
    return optim.multi_steps(optim.adam(lr), 2)


def unless_infinite(lr):
    return optim.apply_if_finite(optim.adam(lr), max_consecutive_errors=2)


def halving(lr):
    return optim.sgd(lambda count: lr * 0.5 ** (count // 3).double())


LR = {"lr": [0.01, 0.1, 0.02]}
OPTIMIZERS = {
    "sgd": (optim.sgd, {**LR, "momentum": [0.1, 0.9, 0.5], "weight_decay": DECAYS}),
    "nesterov": (
        partial(optim.sgd, nesterov=True),
        {**LR, "momentum": [0.8, 0.9, 0.5]},
    ),
    "adam": (optim.adam, {**LR, "eps": [1e-8, 1e-4, 1e-6]}),
    "adamw": (optim.adamw, {**LR, "betas": BETAS, "weight_decay": DECAYS}),
    "nadam": (optim.nadam, {**LR, "momentum_decay": [4e-3, 1e-2, 1e-3]}),
    "radam": (optim.radam, {**LR, "betas": BETAS}),
    "adamax": (optim.adamax, {**LR, "weight_decay": DECAYS}),
    "rmsprop": (optim.rmsprop, {**LR, "alpha": [0.9, 0.99, 0.8]}),
    "adagrad": (optim.adagrad, {**LR, "lr_decay": [0.3, 0.1, 0.01]}),
    "adadelta": (optim.adadelta, {"lr": [0.5, 1.0, 2.0], "rho": [0.9, 0.8, 0.95]}),
    "lion": (optim.lion, {"lr": [0.001, 0.01, 0.002], "weight_decay": DECAYS}),
    "lamb": (optim.lamb, {**LR, "weight_decay": DECAYS}),
    "lars": (optim.lars, {"lr": [1.0, 5.0, 2.0], "momentum": [0.9, 0.5, 0.8]}),
    "adafactor": (optim.adafactor, {**LR, "weight_decay": DECAYS}),
    "muon": (matrices, {**LR, "weight_decay": DECAYS}),
    "clipped": (clipped, {**LR, "max_norm": [0.01, 0.1, 10.0]}),
    "schedule": (halving, LR),
    "schedule free": (optim.schedule_free_adamw, {**LR, "weight_decay": DECAYS}),
    "every other step": (now_and_then, LR),
    "unless infinite": (unless_infinite, LR),
    "injected": (partial(optim.inject_hyperparams, optim.adam), LR),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_runs_for_each_member_by_itself(name):
    """Norms, counters and factors are those of one member, whatever the rates."""
    make, values = OPTIMIZERS[name]
    hyperparams = {
        key: tuple(double(value).mT) if key == "betas" else double(value)
        for key, value in values.items()
    }
    tx = for_members(make, **hyperparams)
    models, step, state, data = begun(tx, make=lambda: mlp(bias=name != "muon"))
    state, losses = train(step, state, data, 8)
    txs = [make(**{key: each[i] for key, each in values.items()}) for i in range(E)]
    states, expected = alone(models, txs, data, 8)
    assert_exact(losses, expected)
    assert_members_are(state, states)
    expected = joined([each.optimizer for each in states])
    assert_exact(state.optimizer.members, expected, 1e-9)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_transformation_of_one_member_serves_all(wrapped):
    one = optim.chain(optim.clip_by_global_norm(0.05), optim.adam(0.01))
    models, step, state, data = begun(for_members(one) if wrapped else one)
    state, losses = train(step, state, data, 8)
    states, expected = alone(models, [one] * E, data, 8)
    assert_exact(losses, expected)
    assert_members_are(state, states)


@given(
    members=st.integers(1, 4),
    shapes=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=3),
    missing=st.booleans(),
)
@examples(25)
def test_updates_of_any_shapes_are_those_of_one_member(members, shapes, missing):
    made = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=made, dtype=torch.float64)
    params = {str(i): random(members, *shape) for i, shape in enumerate(shapes)}
    grads = {name: random(*value.shape) for name, value in params.items()}
    if missing:
        params["none"], grads["none"] = random(members, 2), None
    rates = torch.linspace(0.1, 1.0, members, dtype=torch.float64)
    norms = torch.linspace(0.1, 2.0, members, dtype=torch.float64)
    tx = for_members(clipped, lr=rates, max_norm=norms)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert list(updates) == list(grads)
    assert not missing or updates["none"] is None
    for i in range(members):
        one = clipped(float(rates[i]), float(norms[i]))
        mine = {name: g if g is None else g[i] for name, g in grads.items()}
        own = one.init({name: value[i] for name, value in params.items()})
        for _ in range(2):
            expected, own = one.update(mine, own)
        for name, value in expected.items():
            if value is not None:
                assert_exact(updates[name][i], value, 1e-12)


def test_members_that_are_not_active_stay_as_they_are():
    models, step, state, data = begun(ADAMS, "normed")
    before, _ = train(step, state, data, 5)
    state, _ = train(step, without_one(before), data, 5)
    txs = [optim.adam(rate) for rate in RATES]
    states, _ = alone(models, txs, data, 10)
    halfway, _ = alone(models, txs, data, 5)
    states[1] = halfway[1]
    assert_members_are(state, states)
    assert_exact(of(tuple(state[:3]), 1), of(tuple(before[:3]), 1), 0)
    assert state.active.tolist() == [True, False, True]
    assert int(state.step) == 10


@pytest.mark.parametrize("strategy", ["loop", "hybrid"])
def test_a_step_that_is_not_finite_is_left_out_by_its_member_alone(strategy):
    models, step, state, data = begun(ADAMS, "normed", own=True, strategy=strategy)
    bad, skipped = [(x.clone(), y) for x, y in data], []
    bad[2][0][1, 0, 0, 0, 0] = float("nan")
    for batch in bad:
        state, metrics = step(state, *batch)
        skipped.append(metrics["skipped"].tolist())
    assert skipped == [[0, 0, 0]] * 2 + [[0, 1, 0]] + [[0, 0, 0]] * 2
    for member in range(E):
        mine = [(x[member : member + 1], y[member : member + 1]) for x, y in data]
        mine = [batch for i, batch in enumerate(mine) if member != 1 or i != 2]
        one = optim.adam(RATES[member])
        (expected,), _ = alone([models[member]], [one], mine, len(mine), own=True)
        assert_exact(of(tuple(state[:2]), member), tuple(expected[:2]))
    # A member that is not active is not skipped: it takes no step.
    _, metrics = step(without_one(state), *bad[2])
    assert metrics["skipped"].tolist() == [0, 0, 0]
    assert metrics["loss"].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("in_state", [False, True])
def test_every_member_has_a_loss_scale_of_its_own(in_state):
    models, loss, params, buffers, data = build(own=True)
    data = [(x.clone(), y) for x, y in data]
    data[1][0][0] = float("inf")
    data[3][0][2] = float("nan")
    scale = DynamicLossScale(2.0**10, period=2)
    txs, found = [optim.adam(rate) for rate in RATES], []
    of_step, of_state = (None, scale) if in_state else (scale, None)
    step = ensemble_train_step(loss, ADAMS, in_dims=0, loss_scale=of_step)
    state = EnsembleState.create(ADAMS, params, buffers, loss_scale=of_state)
    for batch in data:
        state, metrics = step(state, *batch)
        found.append((metrics["loss_scale"].tolist(), metrics["skipped"].tolist()))
    for member, (model, own) in enumerate(zip(models, txs, strict=True)):
        fmodel, mine, rest = vgrad.make_functional_with_buffers(model)
        one = train_step(
            vgrad.batch_loss(fmodel, F.cross_entropy), own, loss_scale=scale
        )
        single = TrainState.create(own, mine, rest)
        for (scales, skipped), (x, y) in zip(found, data, strict=True):
            single, metrics = one(single, x[member], y[member])
            assert metrics["loss_scale"] == scales[member]
            assert metrics["skipped"] == skipped[member]
        assert_exact(of(state.params, member), single.params)
        assert state.loss_scale.loss_scale[member] == single.loss_scale.loss_scale
        assert state.loss_scale.counter[member] == single.loss_scale.counter
    assert len(set(state.loss_scale.loss_scale.tolist())) > 1


def test_the_loss_scale_of_a_member_that_is_not_active_stays():
    scale = DynamicLossScale(2.0**10, period=1)
    _, step, state, data = begun(optim.sgd(0.1), own=True, loss_scale=scale)
    state, _ = step(without_one(state), *data[0])
    assert state.loss_scale.loss_scale.tolist() == [2.0**11, 2.0**10, 2.0**11]


def test_a_static_scale_changes_no_step():
    ends = []
    for scale in (None, StaticLossScale(2.0**8)):
        _, step, state, data = begun(optim.sgd(0.1), loss_scale=scale)
        ends.append(train(step, state, data, 5)[0].params)
    assert_exact(*ends, 1e-13)


@ALL
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_policy_leaves_master_weights_and_computes_as_each_member_alone(
    policy, strategy
):
    tx, options = optim.sgd(0.1), {"policy": policy, "strategy": strategy}
    models, step, state, data = begun(tx, make=lambda: mlp().float(), **options)
    data = [(x.float(), y) for x, y in data]
    state, losses = train(step, state, data, 10)
    states, expected = alone(models, [tx] * E, data, 10, policy=policy)
    exact, _ = alone(models, [tx] * E, data, 10)
    assert losses.dtype == torch.float32
    assert_exact(losses, expected, 2e-2)
    assert_members_are(state, states, 2e-2)
    assert all(value.dtype == torch.float32 for value in state.params.values())
    rounded = [
        not torch.equal(value[0], exact[0].params[name])
        for name, value in state.params.items()
    ]
    assert all(rounded)
    is_scaled = isinstance(state.loss_scale, DynamicLossScale)
    assert is_scaled == (policy == "mixed_float16")


def test_a_policy_keeps_the_dtypes_of_buffers():
    options = {"make": lambda: normed().float(), "policy": "mixed_bfloat16"}
    _, step, start, data = begun(optim.sgd(0.1), "normed", **options)
    state, _ = train(step, start, [(x.float(), y) for x, y in data], 2)
    for name, value in start.buffers.items():
        assert state.buffers[name].dtype == value.dtype
        assert state.buffers[name].shape == value.shape


def shared_by_torch(models, data, steps, make, active=(0, 1, 2)):
    """One optimizer of torch for all, of the sum of the members' losses."""
    for model in models[1:]:
        model[0] = models[0][0]
    unique = {id(p): p for i in active for p in models[i].parameters()}
    optimizer = make(list(unique.values()))
    for number in range(steps):
        x, y = data[number % len(data)]
        optimizer.zero_grad()
        sum(F.cross_entropy(models[i](x), y) for i in active).backward()
        optimizer.step()
    return models


def with_shared(models):
    """Return the entries of all models, those of the first layer from the first."""
    found = joined(map(entries, models))
    return {n: v[0] if n.startswith("0.") else v for n, v in found.items()}


@ALL
@pytest.mark.parametrize("name", ["mlp", "normed"])
def test_what_members_share_follows_the_sum_of_their_losses(name, strategy):
    tx, options = optim.adamw(0.01), {"strategy": strategy, "shared": FIRST}
    models, step, state, data = begun(tx, name, **options)
    state, _ = train(step, state, data, 20)
    make = partial(torch.optim.AdamW, lr=0.01)
    models = shared_by_torch(models, data, 20, make)
    assert_exact({**state.params, **state.buffers}, with_shared(models))


def test_what_members_share_may_have_an_optimizer_of_its_own():
    rates, trunk = [0.1, 0.2, 0.3], optim.sgd(0.05, momentum=0.9)
    tx = for_members(optim.sgd, lr=double(rates), shared=FIRST, shared_tx=trunk)
    models, step, state, data = begun(tx, shared=FIRST)
    state, _ = train(step, state, data, 10)

    def make(parameters):
        trunk = {id(each) for each in models[0][0].parameters()}
        first = [p for p in parameters if id(p) in trunk]
        heads = [list(model[3].parameters()) for model in models]
        groups = [{"params": first, "momentum": 0.9}]
        groups += [{"params": heads[i], "lr": rates[i]} for i in range(E)]
        return torch.optim.SGD(groups, lr=0.05)

    models = shared_by_torch(models, data, 10, make)
    assert_exact(state.params, with_shared(models))


@ALL
@pytest.mark.parametrize("bad", [False, True])
def test_members_that_are_not_active_give_nothing_to_what_is_shared(strategy, bad):
    """Not even a NaN, which zero times a loss would."""
    options = {"strategy": strategy, "shared": FIRST}
    models, step, start, data = begun(optim.sgd(0.1), **options)
    if bad:
        start.params["3.weight"] = start.params["3.weight"].clone()
        start.params["3.weight"][1] = float("nan")
    state = start = without_one(start)
    state, losses = train(step, state, data, 10)
    make = partial(torch.optim.SGD, lr=0.1)
    models = shared_by_torch(models, data, 10, make, active=(0, 2))
    for key, expected in with_shared(models).items():
        value, whole = state.params[key], key.startswith("0.")
        if not whole:
            assert_exact(value[1], start.params[key][1], 0)
        rows = slice(None) if whole else [0, 2]
        assert_exact(value[rows], expected[rows])
    assert losses.isnan().all(0).tolist() == [False, True, False]
    off = start._replace(active=torch.zeros(E, dtype=torch.bool))
    new, _ = step(off, *data[0])
    assert_exact(new.params, start.params, 0)


def test_a_shared_gradient_that_is_not_finite_is_left_out():
    _, step, state, data = begun(optim.adam(0.1), own=True, shared=FIRST)
    state, _ = step(state, *data[0])
    x, y = data[1][0].clone(), data[1][1]
    x[1] = float("nan")
    new, metrics = step(state, x, y)
    assert metrics["skipped"].tolist() == [0, 1, 0]
    assert_exact(new.optimizer.shared, state.optimizer.shared, 0)
    for key, value in state.params.items():
        if key.startswith("0."):
            assert_exact(new.params[key], value, 0)
        else:
            moved = (new.params[key] != value).flatten(1).any(1)
            assert moved.tolist() == [True, False, True]


class Positions(nn.Module):
    """A constant that all members share, and a trunk that is frozen."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("shift", torch.arange(4.0, dtype=torch.float64))

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)) + self.shift)


@ALL
@pytest.mark.parametrize("scaled", [False, True])
def test_shared_buffers_and_frozen_trunks_stay_without_a_member_axis(strategy, scaled):
    models, loss, params, buffers, data = build(make=Positions)
    patterns = ["trunk.*", "shift"]
    params, buffers = share(params, buffers, patterns)
    params, buffers = vgrad.freeze(params, buffers, ["trunk.*"])
    scale = StaticLossScale(4.0) if scaled else None
    tx = optim.adam(0.01)
    options = {"strategy": strategy, "shared": patterns, "loss_scale": scale}
    step = ensemble_train_step(loss, tx, **options)
    state = EnsembleState.create(tx, params, buffers, shared=patterns)
    state, losses = train(step, state, data, 5)
    assert_exact(state.buffers, buffers, 0)
    for model in models:
        model.trunk = models[0].trunk
        model.trunk.requires_grad_(False)
    states, expected = alone(models, [tx] * E, data, 5)
    assert_exact(losses, expected)
    assert_exact(state.params, joined([each.params for each in states]))


def test_a_state_is_a_tree_of_tensors_that_can_be_saved(tmp_path):
    _, loss, params, buffers, data = build(make=lambda: mlp(0.5))
    scale = DynamicLossScale(2.0**10, period=3)
    tx = for_members(optim.adamw, lr=double(RATES))
    step = ensemble_train_step(loss, tx)
    create = partial(EnsembleState.create, tx, loss_scale=scale)
    state = create(params, buffers, seed=3)
    state, _ = train(step, state, data, 4)
    state = state._replace(active=torch.tensor([True, True, False]))
    assert all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(state))
    torch.save(state_dict(state), tmp_path / "state.pt")
    others = {name: torch.zeros_like(value) for name, value in params.items()}
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again = load_state_dict(create(others, buffers, seed=8), saved)
    assert_exact(again, state, 0)
    one, losses = train(step, state, data, 4)
    two, same = train(step, again, data, 4)
    assert_exact((losses, one), (same, two), 0)


@pytest.mark.parametrize("strategy", ["loop", "hybrid"])
def test_random_numbers_come_from_the_state(strategy):
    tx, options = optim.sgd(0.1), {"make": lambda: mlp(0.5), "strategy": strategy}
    _, step, state, data = begun(tx, seed=1, **options)
    _, _, other, _ = begun(tx, seed=2, **options)
    outside = torch.get_rng_state()
    one, first = step(state, *data[0])
    _, again = step(state, *data[0])
    _, different = step(other, *data[0])
    _, second = step(one._replace(params=state.params), *data[0])
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(first["loss"], again["loss"])
    assert not torch.equal(first["loss"], different["loss"])
    assert not torch.equal(first["loss"], second["loss"])


def test_a_loop_with_the_same_randomness_draws_what_each_member_draws_alone():
    tx, options = optim.adam(0.01), {"strategy": "loop", "randomness": "same"}
    models, step, state, data = begun(tx, make=lambda: mlp(0.5), seed=5, **options)
    state, losses = train(step, state, data, 10)
    states, expected = alone(models, [tx] * E, data, 10, seed=5)
    assert_exact(losses, expected)
    assert_members_are(state, states)


def test_steps_change_nothing_that_they_are_given():
    _, loss, params, buffers, data = build("normed")
    tx = optim.adam(0.01)
    state = EnsembleState.create(tx, params, buffers)
    before = pytree.tree_map(torch.Tensor.clone, state)
    step = ensemble_train_step(loss, tx)
    step(state, *data[0])
    with pytest.raises((RuntimeError, ValueError), match="size|batch"):
        step(state, data[0][0], data[0][1][:2])
    assert_exact(state, before, 0)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(state))
    assert all(value.requires_grad for value in params.values())


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_a_loss_of_ones_own_is_enough(policy):
    def loss(params, buffers, x):
        return ((x @ params["w"]) - buffers["target"]).square().mean()

    params = {"w": torch.zeros(E, 4)}
    buffers = {"target": torch.tensor([1.0, 2.0, 3.0])}
    x = torch.ones(5, 4)
    tx = optim.sgd(0.1)
    step = ensemble_train_step(loss, tx, policy=policy)
    state, _ = step(EnsembleState.create(tx, params, buffers), x)
    expected = 0.2 * buffers["target"].unsqueeze(1).expand(E, 4)
    assert_exact(state.params["w"], expected, 1e-2 if policy else 1e-6)
    assert torch.equal(state.buffers["target"], buffers["target"])


@given(
    values=st.lists(
        st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, float("nan"), float("inf")])] * 3),
        max_size=8,
    ),
    patience=st.integers(1, 3),
    min_delta=st.sampled_from([0.0, 0.4]),
)
@examples(60)
def test_early_stopping_counts_values_that_are_no_better(values, patience, min_delta):
    stopping = EarlyStopping.create(3, patience=patience, min_delta=min_delta)
    best, waited = [float("inf")] * 3, [0] * 3
    for row in values:
        stopping = stopping.update(torch.tensor(row))
        for i, value in enumerate(row):
            if waited[i] < patience and value < best[i] - min_delta:
                best[i], waited[i] = value, 0
            else:
                waited[i] += 1
        assert stopping.active.tolist() == [each < patience for each in waited]
        assert stopping.best.tolist() == best
    assert all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(stopping))


def test_early_stopping_stops_members_one_by_one():
    rates = [0.1, 0.0, 0.2]
    models, step, state, data = begun(for_members(optim.sgd, lr=double(rates)))
    stopping = EarlyStopping.create(E, patience=2)
    for _ in range(6):
        state, metrics = step(state, *data[0])
        stopping = stopping.update(metrics["loss"])
        state = state._replace(active=stopping.active)
    assert state.active.tolist() == [True, False, True]
    states, _ = alone(models, [optim.sgd(rate) for rate in rates], data[:1], 6)
    assert_members_are(state, states)


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda tx: tx._replace(donated=None),
        lambda tx: type(tx)(*tx),
        lambda tx: tx._make(tx),
    ],
)
def test_an_optimizer_of_members_stays_one_however_it_is_copied(again):
    _, loss, params, buffers, data = build()
    whole, rest = vgrad.ensemble.share(params, buffers, ["0.*"])
    given = for_members(optim.sgd(0.1), shared=["0.*"])
    tx = again(given)
    assert (tx.init, tx.update) == (given.init, given.update)
    assert tx.shared == ("0.*",)
    state = EnsembleState.create(tx, whole, rest, shared=["0.*"])
    state, _ = ensemble_train_step(loss, tx, shared=["0.*"])(state, *data[0])
    assert state.params["0.weight"].shape == whole["0.weight"].shape
    init, update, *_ = tx
    assert (init, update) == given[:2]


def started(tx):
    return tx.init({"w": torch.ones(3, 2)})


def continued(members):
    """Go on with the state of so many members."""
    tx = for_members(optim.adam(0.1))
    state = tx.init({"w": torch.ones(members, 2)})
    tx.update({"w": torch.ones(3, 2)}, state)


def counted_in_python():
    """Update by an optimizer that returns a number of Python."""
    tx = optim.GradientTransformation(lambda params: (), lambda grads, *_: (grads, 1))
    for_members(tx).update({"w": torch.ones(3, 2)}, for_members(tx).init({}))


STOPPING = partial(EarlyStopping.create, 3, patience=1)
_, LOSS, PARAMS, BUFFERS, _ = build()
STEP, CREATE = partial(ensemble_train_step, LOSS), EnsembleState.create
SGD, STRING = optim.sgd(0.1), r"shared='0.\*'.*got a string"
OTHERS = for_members(SGD, shared=["3.*"])
WHOLE = share(PARAMS, BUFFERS, FIRST)


def scaled_and_shared():
    _, step, state, data = begun(SGD, shared=FIRST, loss_scale=StaticLossScale(2.0))
    step(state, *data[0])


REFUSED = [
    (lambda: STEP(SGD, loss_scale=8.0), TypeError,
     "ensemble_train_step.loss_scale=8.0.*float"),
    (lambda: CREATE(SGD, PARAMS, BUFFERS, loss_scale=8.0), TypeError,
     "TrainState.create.loss_scale=8.0"),
    (lambda: STEP(SGD, strategy="fast"), ValueError,
     "strategy='fast'.*expected one of"),
    (lambda: STEP(SGD, shared="0.*"), TypeError, STRING),
    (lambda: for_members(SGD, shared="0.*"), TypeError, STRING),
    (scaled_and_shared, ValueError, "expected one of the two, got both"),
    (lambda: STEP(for_members(SGD), shared=FIRST), ValueError,
     "expected the patterns of for_members"),
    (lambda: CREATE(for_members(SGD), *WHOLE, shared=FIRST), ValueError,
     "expected the patterns of for_members"),
    (lambda: STEP(OTHERS, shared=FIRST), ValueError, r"got others: \['3.*'\] there"),
    (lambda: CREATE(OTHERS, *WHOLE, shared=FIRST), ValueError,
     r"got others: \['3.*'\] there"),
    (lambda: CREATE(SGD, PARAMS, BUFFERS, shared=["typo"]), ValueError,
     r"create\('typo'\): .* matches a parameter or buffer, got none"),
    (lambda: for_members(optim.sgd(0.1), lr=torch.ones(3)), TypeError,
     "for_members.transformation, lr=.*is made"),
    (lambda: for_members(optim.sgd, lr=torch.ones(3), shared=FIRST), ValueError,
     "expected shared_tx, the transformation"),
    (lambda: started(for_members(optim.sgd, lr=torch.ones(2))), ValueError,
     "expected one number of members, got"),
    (lambda: started(for_members(optim.sgd, lr=-1.0)), ValueError, "lr=-1.0"),
    (lambda: continued(1), ValueError, r"as many members, got .* \[\[1\], \[3\]\]"),
    (counted_in_python, ValueError, "expected tensors in .* and state, got a int"),
    (lambda: STOPPING(patience=0), ValueError, "patience=0.*whole number >= 1"),
    (lambda: EarlyStopping.create(0, patience=1), ValueError,
     "members=0.*whole number >= 1"),
    (lambda: STOPPING(min_delta=-1), ValueError, "min_delta=-1.*>= 0"),
    (lambda: STOPPING().update(torch.ones(2)), ValueError,
     r"values of shape \(2,\).*one value a member"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_does_not_fit_members_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_state_starts_without_a_scale_and_with_all_members():
    _, _, state, _ = begun(optim.adam(0.1), "normed")
    assert isinstance(state.loss_scale, NoOpLossScale)
    assert state.active.tolist() == [True] * E
    assert int(state.step) == 0


def test_all_parameters_may_be_shared_where_buffers_are_not():
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double() for _ in range(E)
    ]
    fmodel, params, buffers = stack(models)
    names = list(params)
    params, buffers = share(params, buffers, names)
    tx, loss = optim.sgd(0.1, momentum=0.9), vgrad.batch_loss(fmodel, F.mse_loss)
    step = ensemble_train_step(loss, tx, in_dims=0, shared=names)
    state = EnsembleState.create(tx, params, buffers, shared=names)
    x = torch.randn(E, 5, 4, dtype=torch.float64)
    state, metrics = step(state, x, torch.zeros(E, 5, 3, dtype=torch.float64))
    assert metrics["loss"].shape == (E,)
    assert state.params["0.weight"].shape == (3, 4)
    assert not torch.equal(state.params["0.weight"], params["0.weight"])
    means = state.buffers["1.running_mean"]
    assert means.shape == (E, 3)
    assert not torch.equal(means[0], means[1])


def test_a_parameter_without_entries_trains_and_is_skipped():
    def loss(params, buffers, x):
        return (params["w"] @ x).sum() + params["empty"].sum()

    params = {"w": torch.ones(E, 2), "empty": torch.ones(E, 0)}
    tx = optim.sgd(0.1)
    state = EnsembleState.create(tx, params, {})
    x = torch.ones(E, 2)
    x[1] = torch.nan
    state, metrics = ensemble_train_step(loss, tx, in_dims=0)(state, x)
    assert metrics["skipped"].tolist() == [0, 1, 0]
    assert state.params["w"].isfinite().all()

"""Activation checkpoints in a loss: a part of it runs again in the backward pass."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import vgrad
from tests import losses, oracle
from tests.losses import randn
from vgrad.torch_private import modes

EXACT = 1e-12
checkpoint = partial(checkpointing.checkpoint, use_reentrant=False)
every_strategy = pytest.mark.parametrize("strategy", ["auto", "recorded", "loop"])
recorded_or_loop = pytest.mark.parametrize("strategy", ["recorded", "loop"])

W = {"w": randn(4, 4), "v": randn(4, 4, seed=1), "s": randn(4, seed=2)}
X = randn(6, 3, 4, seed=3)
BUFFERS = {"scale": torch.tensor(0.5, dtype=torch.float64)}


def linear(p, b, x):
    x = F.linear(x, p["w"])
    x = checkpoint(lambda x: F.linear(x.tanh(), p["v"], p["s"]).sin(), x)
    return x.square().sum()


def as_arguments(p, b, x):
    x = checkpoint(lambda x, w, s: F.linear(x, w).tanh() * s, x, p["w"], p["s"])
    return F.linear(x, p["v"]).square().sum()


def one_weight_everywhere(p, b, x):
    """Outside, in two regions, and twice in one of them."""
    x = F.linear(x, p["w"]).tanh()
    for _ in range(2):
        x = checkpoint(lambda x: F.linear(F.linear(x, p["w"]).sin(), p["w"]), x)
    return F.linear(x, p["w"]).square().sum()


def computed(p, b, x):
    """Of parameters alone, inside and outside of the region."""
    normed = p["w"] / p["w"].norm()

    def region(x):
        scaled = (p["v"] * p["s"]).t()
        return F.linear(F.linear(x, normed).tanh(), scaled) @ p["v"].t()

    return checkpoint(region, checkpoint(region, x)).square().sum()


def without_a_rule(p, b, x):
    return checkpoint(lambda x: torch.cdist(x, p["w"]).sin() * p["s"], x.sin()).sum()


def norms_and_attention(p, b, x):
    def region(x):
        x = F.layer_norm(x, (4,), p["s"], None)
        q, k = F.linear(x, p["w"]), F.linear(x, p["v"])
        return F.scaled_dot_product_attention(q, k, x)

    return checkpoint(region, x.tanh()).square().sum()


def several_outputs(p, b, x):
    def region(x, *, scale):
        y = F.linear(x, p["w"]).tanh()
        return {"y": y * scale, "rest": [y.detach(), 3, F.linear(x, p["v"])]}

    found = checkpoint(region, x, scale=2.0)
    return (found["y"] * found["rest"][2] * found["rest"][1]).sum()


def without_parameters(p, b, x):
    return checkpoint(lambda x: x.sin().exp(), F.linear(x, p["w"])).sum()


def of_a_constant(p, b, x):
    """Nothing that goes in requires grad."""
    return checkpoint(lambda x: F.linear(x, p["w"]).tanh(), x).square().sum()


def in_place(p, b, x):
    def region(x):
        y = F.linear(x, p["w"])
        return F.linear(y.mul_(2.0).relu_(), p["v"])

    return checkpoint(region, x).square().sum()


def to_the_end(p, b, x):
    with checkpointing.set_checkpoint_early_stop(False):
        return linear(p, b, x)


def asks(p, b, x):
    def region(x):
        return F.linear(x, p["w"] if x.sum() > 0 else p["v"]).tanh()

    return checkpoint(region, F.linear(x, p["w"])).square().sum()


def a_step_of_an_lstm(p, b, x):
    gates = torch.cat([p["w"], p["v"], p["w"].sin(), p["v"] * p["s"]])

    def region(x):
        return torch.lstm_cell(x, (x, x), gates, gates)[0]

    return checkpoint(region, x.tanh()).square().sum()


def has_inputs_require_grad(p, b, x):
    """As models do whose first layers are frozen."""
    constant = b["scale"] * 2
    for each in (x, constant):
        assert not each.requires_grad
        each.requires_grad_()
        assert each.requires_grad
    h = F.linear(x, p["w"]).requires_grad_(True)
    return checkpoint(lambda x: F.linear(x * constant, p["v"]).tanh(), h).sum()


LOSSES = {
    each.__name__: each
    for each in [
        *(linear, as_arguments, one_weight_everywhere, computed, without_a_rule),
        *(norms_and_attention, several_outputs, without_parameters, of_a_constant),
        *(in_place, to_the_end, asks, a_step_of_an_lstm, has_inputs_require_grad),
    ]
}


@pytest.mark.parametrize("name", LOSSES)
@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_every_quantity_is_that_of_a_loop(name, strategy, chunk_size):
    loss = LOSSES[name]
    params = {n: W[n] for n in W if not (n == "v" and loss is without_a_rule)}
    options = {"strategy": strategy, "chunk_size": chunk_size}
    given = {"buffers": BUFFERS, "tolerance": EXACT}
    losses.assert_quantities(loss, params, (X,), **given, **options)
    one, two = (
        vgrad.clipped_grad(loss, max_norm=1.0, passes=passes, **options)
        for passes in (1, 2)
    )
    oracle.assert_exact(two(params, BUFFERS, X), one(params, BUFFERS, X), 0)


class Net(nn.Module):
    """Blocks of several kinds, in regions or not."""

    def __init__(self, run=checkpoint, drop=0.0):
        super().__init__()
        self.run = run
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(drop), nn.Linear(8, 8)
            )
            for _ in range(2)
        )
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=drop)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.run(block, x)
        x = self.run(lambda x: self.recurrent(x)[0], x)
        x = self.run(lambda x: self.attention(x, x, x, need_weights=False)[0] + x, x)
        x = self.run(lambda x: self.convolution(x.mT).tanh().mT, x)
        return self.run(lambda x: self.head(x), x)


def straight(function, *args):
    return function(*args)


def split(*options, dtype=torch.float64):
    """Return a loss, its parameters and a batch; one seed, one model."""
    torch.manual_seed(0)
    model = Net(*options).to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(7, (5, 6), generator=generator)
    loss = vgrad.sample_loss(fmodel, lambda o, t: F.cross_entropy(o.mT, t))
    return model, loss, params, buffers, (batch, batch.roll(1, 1))


@every_strategy
def test_a_module_is_that_of_plain_autograd(strategy):
    model, loss, params, buffers, batch = split()
    expected = oracle.model_gradients(
        model, lambda m, x, y: F.cross_entropy(m(x).mT, y), batch, 5
    )
    found = vgrad.per_sample_grad(loss, strategy=strategy)(params, buffers, *batch)
    oracle.assert_exact(found, expected)
    clip = vgrad.clipped_grad(loss, max_norm=0.5, strategy=strategy, chunk_size=2)
    oracle.assert_exact(
        clip(params, buffers, *batch).grads, oracle.clipped(expected, 0.5)
    )


@recorded_or_loop
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_same_random_numbers_are_drawn_again(strategy, randomness, chunk_size):
    found = []
    options = {"strategy": strategy, "randomness": randomness}
    for run in (straight, checkpoint):
        _, loss, params, buffers, batch = split(run, 0.4)
        compute = vgrad.per_sample_grad(loss, chunk_size=chunk_size, **options)
        torch.manual_seed(7)
        found.append((compute(params, buffers, *batch), torch.rand(())))
    oracle.assert_exact(*found, EXACT)


@recorded_or_loop
def test_autocast_is_on_in_the_repetition(strategy):
    found = []
    for run in (straight, checkpoint):
        _, loss, params, buffers, batch = split(run, dtype=torch.float32)
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(compute(params, buffers, *batch))
    oracle.assert_exact(*found, 0)


def test_each_use_of_a_parameter_leaves_one_factor():
    told = []
    for run in (straight, checkpoint):
        _, loss, params, buffers, batch = split(run)
        norm = vgrad.per_sample_norm(loss)
        told.append(vgrad.explain(norm)(params, buffers, *batch))
    plain, again = told
    assert again.strategy == "recorded"
    assert again.rows == plain.rows


def test_what_lies_in_a_region_is_not_kept():
    def region(x):
        for _ in range(9):
            x = x.tanh()
        return x

    def peak(run):
        def loss(p, b, x):
            x = x * p["s"]
            for _ in range(9):
                x = run(region, x)
            return x.sum()

        with losses.Peak() as found:
            vgrad.per_sample_norm(loss, strategy="recorded")({"s": W["s"]}, {}, X)
        return found.most

    assert peak(checkpoint) < 0.5 * peak(straight)


@recorded_or_loop
def test_a_split_chunk_draws_outside_of_regions_only(strategy):
    def drops(p, b, x, inside):
        drop = partial(F.dropout, p=0.5)
        x = F.linear(x if inside else drop(x), p["w"])
        x = checkpoint(lambda x: F.linear(drop(x) if inside else x, p["v"]), x)
        return x.square().sum() * (2 if x.sum() > 0 else 3)

    compute = partial(vgrad.per_sample_grad, strategy=strategy, randomness="different")
    compute(partial(drops, inside=False))(W, {}, X)
    if strategy == "loop":
        compute(partial(drops, inside=True))(W, {}, X)
        return
    with pytest.raises(RuntimeError, match='an activation checkpoint.*"loop"'):
        compute(partial(drops, inside=True))(W, {}, X)


def packs(p, b, x):
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)
    with hooks:
        return F.linear(x, p["w"]).tanh().sum()


def nested(p, b, x):
    def outer(x):
        return checkpoint(lambda x: F.linear(x, p["w"]).tanh(), x.sin()).exp()

    return checkpoint(outer, F.linear(x, p["w"])).sum()


@pytest.mark.parametrize(
    ("loss", "message"), [(packs, "other hooks"), (nested, "one sample after another")]
)
def test_what_cannot_be_recorded_runs_in_a_loop(loss, message):
    with pytest.raises(vgrad.UnsupportedOp, match='strategy="loop"'):
        vgrad.per_sample_norm(loss, strategy="recorded")({"w": W["w"]}, {}, X)
    with pytest.warns(vgrad.FallbackWarning, match=message):
        losses.assert_quantities(loss, {"w": W["w"]}, (X,), strategy="auto")


def test_regions_inside_of_others_run_as_often_as_in_plain_torch():
    runs = []

    def nested(p, b, x):
        def inner(x):
            runs.append("inner")
            return F.linear(x, p["w"]).tanh()

        def outer(x):
            runs.append("outer")
            return checkpoint(inner, x.sin()).exp()

        return checkpoint(outer, F.linear(x, p["v"])).sum()

    used = {"w": W["w"], "v": W["v"]}
    leaves = {name: each.clone().requires_grad_() for name, each in used.items()}
    torch.autograd.grad(nested(leaves, {}, X[0]), [*leaves.values()])
    expected, runs = runs, []
    vgrad.per_sample_norm(nested, strategy="loop")(used, {}, X[:1])
    assert runs == expected


def test_a_transform_may_run_in_a_checkpoint_of_the_caller():
    leaf = W["w"].clone().requires_grad_()
    norms = vgrad.per_sample_norm(lambda p, b, x: F.linear(x, p["w"]).sin().sum())

    def penalty(w):
        return w.sin() * norms({"w": w.detach()}, {}, X).sum()

    (found,) = torch.autograd.grad(checkpoint(penalty, leaf).sum(), leaf)
    (expected,) = torch.autograd.grad(penalty(leaf).sum(), leaf)
    assert torch.equal(found, expected)


def two_layers(forward):
    net = losses.Net(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4), kept=None)
    net.register_buffer("calls", torch.zeros(()))
    return net.double()


def remembers(self, x):
    """Set in the forward pass a scale that the region reads in the backward pass."""
    self.kept = x.abs().amax()
    self.calls = self.calls + 1
    return checkpoint(lambda x: self.second(x.tanh() / self.kept), self.first(x))


def assert_grads(output, values, expected, module):
    """Compare gradients of two scalars, at values and at a module's parameters."""
    torch.testing.assert_close(
        torch.autograd.grad(output, [*values.values()]),
        torch.autograd.grad(expected, [*module.parameters()]),
        rtol=1e-12,
        atol=1e-15,
    )


def test_a_functional_model_has_its_values_again_in_the_backward_pass():
    model = two_layers(remembers)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    others = {n: (each + 1).detach().requires_grad_() for n, each in params.items()}
    x = randn(5, 4)
    for values in (params, others):
        reference = fmodel.to_module(values, buffers)
        with torch.no_grad():
            model.load_state_dict({**reference.state_dict()})
        output, new = fmodel.call_and_update(values, buffers, x)
        expected = reference(x).square().sum()
        assert_grads(output.square().sum(), values, expected, reference)
        assert new["calls"] == 1
    with pytest.raises(RuntimeError, match="outside of its call"):
        fmodel._skeleton.first(x)


def test_buffers_of_a_call_stay_as_they_are_when_a_region_repeats():
    norm = nn.BatchNorm1d(4).double()
    model = losses.Net(lambda self, x: checkpoint(self.inner, x), inner=norm)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x = randn(5, 4)
    output, new = fmodel.call_and_update(params, buffers, x)
    left = {name: each.clone() for name, each in new.items()}
    assert_grads(output.sin().sum(), params, norm(x).sin().sum(), norm)
    oracle.assert_exact(new, left, 0)
    assert new["inner.num_batches_tracked"] == 1


def test_two_calls_of_a_functional_model_repeat_with_values_of_their_own():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(two_layers(remembers))
    others = {name: each.detach() * 2 for name, each in params.items()}
    x = randn(5, 4)
    output = fmodel(params, buffers, x).sin() * fmodel(others, buffers, x + 1)
    module = fmodel.to_module(params, buffers)
    constant = fmodel.to_module(others, buffers)(x + 1).detach()
    assert_grads(output.sum(), params, (module(x).sin() * constant).sum(), module)


def test_selected_activations_are_kept():
    ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    keep = partial(checkpointing.create_selective_checkpoint_contexts, ops)

    def run(p, b, x):
        def region(x):
            return F.linear(F.linear(x, p["w"]).tanh(), p["v"], p["s"]).sin()

        return checkpoint(region, x.sin(), context_fn=keep).square().sum()

    with contextlib.suppress(vgrad.FallbackWarning):
        losses.assert_quantities(run, W, (X,), strategy="auto")


@pytest.mark.parametrize("leads", [False, True], ids=["apart", "reached"])
@every_strategy
def test_a_reentrant_checkpoint_is_refused(strategy, leads):
    def loss(p, b, x):
        x = F.linear(x, p["w"]) if leads else (x * 1.0).requires_grad_()
        run = partial(checkpointing.checkpoint, use_reentrant=True)
        return run(lambda x: F.linear(x, p["v"]), x).square().sum()

    params = {"w": W["w"], "v": W["v"]}
    with pytest.raises(vgrad.UnsupportedOp, match="Pass use_reentrant=False"):
        vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, X)


def without_a_backward_pass(p, b, x, run):
    run(x)
    return F.linear(x, p["w"]).square().sum()


def of_one_output_in_two(p, b, x, run):
    return run(x)[0].square().sum()


def that_fails(p, b, x, run):
    run(x)
    raise ValueError("failed")


@pytest.mark.parametrize(
    "loss", [without_a_backward_pass, of_one_output_in_two, that_fails]
)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_region_that_never_runs_again_is_freed(loss, passes):
    kept = []

    def whole(p, b, x):
        def region(x):
            return F.linear(x.sin(), p["v"]), F.linear(x.cos(), p["w"])

        def run(x):
            x = F.linear(x, p["w"]).tanh()
            with modes.without_modes():
                kept.append(StorageWeakRef(modes.unwrap_all(x).untyped_storage()))
            return checkpoint(region, x)

        return loss(p, b, x, run)

    clip = vgrad.clipped_grad(
        whole, max_norm=1.0, passes=passes, strategy="recorded", chunk_size=3
    )
    with contextlib.suppress(ValueError):
        clip(W, {}, X)
    assert kept
    assert all(each.expired() for each in kept)


def keeps(self, x):
    """Leave an activation when the forward pass ends."""
    self.kept = self.first(x).tanh()
    return checkpoint(lambda x: self.second(x).sin() * self.kept, self.kept)


def test_what_a_functional_model_leaves_is_freed_and_has_its_gradients():
    model, kept = two_layers(keeps), []
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    output = fmodel(params, buffers, X).square().sum()
    assert_grads(output, params, model(X).square().sum(), model)
    fmodel._skeleton.first.register_forward_hook(
        lambda module, inputs, output: kept.append(
            StorageWeakRef(inputs[0].untyped_storage())
        )
    )
    fmodel(params, buffers, X.clone())
    assert [each.expired() for each in kept] == [True]


def writes_inside(p, b, x):
    region = checkpoint(lambda x: F.linear(x.mul_(2.0), p["v"]), F.linear(x, p["w"]))
    return region.square().sum()


def writes_after(p, b, x):
    x = F.linear(x, p["w"])
    region = checkpoint(lambda x: F.linear(x, p["v"]).tanh(), x)
    x.mul_(2.0)
    return region.square().sum()


@pytest.mark.parametrize("loss", [writes_inside, writes_after])
def test_arguments_of_a_region_must_stay_as_they_are(loss):
    with pytest.raises(RuntimeError, match="arguments that stay as they are"):
        vgrad.per_sample_norm(loss, strategy="recorded")(W, {}, X)
    for strategy in ("auto", "loop"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            vgrad.per_sample_norm(loss, strategy=strategy)(W, {}, X)

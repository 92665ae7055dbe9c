"""Activation checkpoints in a loss: a part of it runs again in the backward pass."""

import contextlib
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import vgrad
from tests import losses, oracle
from tests.losses import randn

EXACT = 1e-12
checkpoint = partial(checkpointing.checkpoint, use_reentrant=False)
every_strategy = pytest.mark.parametrize("strategy", ["auto", "recorded", "loop"])
recorded_or_loop = pytest.mark.parametrize("strategy", ["recorded", "loop"])

W = {"w": randn(4, 4), "v": randn(4, 4, seed=1), "s": randn(4, seed=2)}
X = randn(6, 3, 4, seed=3)
BUFFERS = {"scale": torch.tensor(0.5, dtype=torch.float64)}


LINEAR = """
h = checkpoint(lambda x: F.linear(x.tanh(), v, s).sin(), F.linear(x, w))
value = h.square().sum()"""
LOSSES = {
    "linear": LINEAR,
    "to the end": f"with checkpointing.set_checkpoint_early_stop(False):"
    f"{LINEAR.replace(chr(10), chr(10) + '    ')}",
    "as arguments": """
h = checkpoint(lambda x, w, s: F.linear(x, w).tanh() * s, x, w, s)
value = F.linear(h, v).square().sum()""",
    "one weight outside, in two regions, and twice in one of them": """
h = F.linear(x, w).tanh()
for _ in range(2): h = checkpoint(lambda x: F.linear(F.linear(x, w).sin(), w), h)
value = F.linear(h, w).square().sum()""",
    "computed of parameters alone, inside and outside": """
normed = w / w.norm()
def region(x):
    return F.linear(F.linear(x, normed).tanh(), (v * s).t()) @ v.t()
value = checkpoint(region, checkpoint(region, x)).square().sum()""",
    "without a rule": """
value = checkpoint(lambda x: torch.cdist(x, w).sin() * s, x.sin()).sum()""",
    "norms and attention": """
def region(x):
    x = F.layer_norm(x, (4,), s, None)
    return F.scaled_dot_product_attention(F.linear(x, w), F.linear(x, v), x)
value = checkpoint(region, x.tanh()).square().sum()""",
    "several outputs": """
def region(x, *, scale):
    y = F.linear(x, w).tanh()
    return {"y": y * scale, "rest": [y.detach(), 3, F.linear(x, v)]}
found = checkpoint(region, x, scale=2.0)
value = (found["y"] * found["rest"][2] * found["rest"][1]).sum()""",
    "without parameters": "checkpoint(lambda x: x.sin().exp(), F.linear(x, w)).sum()",
    "of a constant": "checkpoint(lambda x: F.linear(x, w).tanh(), x).square().sum()",
    "in place": """
def region(x):
    return F.linear(F.linear(x, w).mul_(2.0).relu_(), v)
value = checkpoint(region, x).square().sum()""",
    "reads a value": """
region = lambda x: F.linear(x, w if x.sum() > 0 else v).tanh()
value = checkpoint(region, F.linear(x, w)).square().sum()""",
    "a step of an LSTM": """
gates = torch.cat([w, v, w.sin(), v * s])
value = checkpoint(lambda x: torch.lstm_cell(x, (x, x), gates, gates)[0], x.tanh())
value = value.square().sum()""",
    "inputs that require grad, as behind frozen layers": """
constant = scale * 2
for each in (x, constant):
    assert not each.requires_grad
    each.requires_grad_()
    assert each.requires_grad
h = F.linear(x, w).requires_grad_(True)
value = checkpoint(lambda x: F.linear(x * constant, v).tanh(), h).sum()""",
}


@pytest.mark.parametrize("name", LOSSES)
@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_every_quantity_is_that_of_a_loop(name, strategy, chunk_size):
    loss = losses.written(LOSSES[name], globals())
    params = {n: W[n] for n in W if not (n == "v" and name == "without a rule")}
    options = {"strategy": strategy, "chunk_size": chunk_size}
    given = {"buffers": BUFFERS, "tolerance": EXACT}
    losses.assert_quantities(loss, params, (X,), **given, **options)
    one, two = (
        vgrad.clipped_grad(loss, max_norm=1.0, passes=passes, **options)
        for passes in (1, 2)
    )
    oracle.assert_exact(two(params, BUFFERS, X), one(params, BUFFERS, X), 0)


class Net(nn.Module):
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
    torch.manual_seed(0)
    model = Net(*options).to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(7, (5, 6), generator=generator)
    loss = vgrad.sample_loss(fmodel, lambda o, t: F.cross_entropy(o.mT, t))
    return model, loss, params, buffers, (batch, batch.roll(1, 1))


@recorded_or_loop
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(
    ("autocast", "randomness"),
    [
        (None, "different"),
        (None, "same"),
        ("around the loss", "error"),
        ("in the loss", "error"),
    ],
)
def test_random_numbers_and_autocast_are_the_same_again(
    autocast, randomness, chunk_size, strategy
):
    def casts(place):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == place)

    found, rows = [], []
    options = {"strategy": strategy, "randomness": randomness}
    for run in (straight, checkpoint):
        drop, dtype = (0.0, torch.float32) if autocast else (0.4, torch.float64)
        _, of_sample, params, buffers, batch = split(run, drop, dtype=dtype)

        def loss(*args, of_sample=of_sample):
            with casts("in the loss") if autocast else nullcontext():
                return of_sample(*args)

        compute = vgrad.per_sample_grad(loss, chunk_size=chunk_size, **options)
        torch.manual_seed(7)
        with casts("around the loss"):
            found.append((compute(params, buffers, *batch), torch.rand(())))
        rows.append(vgrad.explain(compute)(params, buffers, *batch).rows)
    oracle.assert_exact(*found, 0 if autocast else EXACT)
    assert rows[0] == rows[1]  # one factor for each use


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


PACKS = """
hooks = torch.autograd.graph.saved_tensors_hooks
with hooks(lambda t: t * 1, lambda t: t): value = F.linear(x, w).tanh().sum()"""
NESTED = """
def outer(x):
    return checkpoint(lambda x: F.linear(x, w).tanh(), x.sin()).exp()
value = checkpoint(outer, F.linear(x, w)).sum()"""


@pytest.mark.parametrize(
    ("text", "message"), [(PACKS, "other hooks"), (NESTED, "one sample after another")]
)
def test_what_cannot_be_recorded_runs_in_a_loop(text, message):
    loss = losses.written(text, globals())
    with pytest.raises(vgrad.UnsupportedOp, match='strategy="loop"'):
        vgrad.per_sample_norm(loss, strategy="recorded")({"w": W["w"]}, {}, X)
    with pytest.warns(vgrad.FallbackWarning, match=message):
        losses.assert_quantities(loss, {"w": W["w"]}, (X,), strategy="auto")


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


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x, run: (run(x), F.linear(x, p["w"]).square().sum())[1],
        lambda p, x, run: run(x)[0].square().sum(),
        lambda p, x, run: run(x) and 1 // 0,
    ],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_region_that_never_runs_again_is_freed(loss, passes):
    def whole(p, b, x):
        def region(x):
            return F.linear(x.sin(), p["v"]), F.linear(x.cos(), p["w"])

        return loss(p, x, lambda x: checkpoint(region, F.linear(x, p["w"]).tanh()))

    options = {"strategy": "recorded", "chunk_size": 3, "passes": passes}
    clip, found = vgrad.clipped_grad(whole, max_norm=1.0, **options), None
    with losses.Peak() as peak, contextlib.suppress(ZeroDivisionError):
        found = clip(W, {}, X)
    gc.collect()
    assert peak.left(found, W, X) == 0


WRITES_INSIDE = """
h = checkpoint(lambda x: F.linear(x.mul_(2.0), v), F.linear(x, w))
value = h.square().sum()"""
WRITES_AFTER = """
h = F.linear(x, w)
region = checkpoint(lambda x: F.linear(x, v).tanh(), h)
h.mul_(2.0)
value = region.square().sum()"""


@pytest.mark.parametrize("text", [WRITES_INSIDE, WRITES_AFTER])
def test_arguments_of_a_region_must_stay_as_they_are(text):
    loss = losses.written(text, globals())
    for strategy in ("recorded", "auto", "loop"):
        own = "arguments that stay as they are"
        message = own if strategy == "recorded" else "modified by an inplace operation"
        with pytest.raises(RuntimeError, match=message):
            vgrad.per_sample_norm(loss, strategy=strategy)(W, {}, X)

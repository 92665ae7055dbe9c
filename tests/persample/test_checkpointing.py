"""Activation checkpoints in a loss, and clipped sums from two backward passes."""

import contextlib
import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import vgrad
from tests import losses, oracle
from tests.losses import every_clipping, randn
from vgrad.generators import sample_keys

checkpoint = partial(checkpointing.checkpoint, use_reentrant=False)
recorded_or_loop = pytest.mark.parametrize("strategy", ["recorded", "loop"])

W = {"w": randn(4, 4), "v": randn(4, 4, seed=1), "s": randn(4, seed=2)}
X = randn(6, 3, 4, seed=3)


def straight(function, *args):
    return function(*args)


def of_regions(run, drop, dtype, recurrent=nn.LSTM):
    """Return the loss of a net that runs in regions, its parameters and buffers."""

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + run(self.block, x)
        x = run(lambda x: self.recurrent(x)[0], x)
        x = run(lambda x: self.attention(x, x, x, need_weights=False)[0] + x, x)
        x = run(lambda x: self.convolution(x.mT).tanh().mT, x)
        return run(lambda x: F.linear(x, self.table.weight), x).mT

    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(drop))
    parts = dict(table=nn.Embedding(7, 8), block=block)
    parts["recurrent"] = recurrent(8, 8, batch_first=True)
    parts["attention"] = nn.MultiheadAttention(8, 2, drop, batch_first=True)
    parts["convolution"] = nn.Conv1d(8, 8, 3, padding=1)
    return losses.of_model(losses.Net(forward, **parts), dtype=dtype)


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

    found, rows, tokens = [], [], torch.arange(30).view(5, 6) % 7
    batch, options = (tokens, tokens.roll(1, 1)), {"strategy": strategy}
    options["randomness"] = randomness
    for run in (straight, checkpoint):
        drop, dtype = (0.0, torch.float32) if autocast else (0.4, torch.float64)
        # Some CPUs run no LSTM in bfloat16.
        recurrent = nn.GRU if autocast else nn.LSTM
        of_sample, params, buffers = of_regions(run, drop, dtype, recurrent)

        def loss(*args, of_sample=of_sample):
            with casts("in the loss") if autocast else nullcontext():
                return of_sample(*args)

        compute = vgrad.per_sample_grad(loss, chunk_size=chunk_size, **options)
        torch.manual_seed(7)
        with casts("around the loss"):
            found.append((compute(params, buffers, *batch), torch.rand(())))
        rows.append(vgrad.explain(compute)(params, buffers, *batch).rows)
    oracle.assert_exact(*found, 0 if autocast else oracle.EXACT)
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


@pytest.mark.parametrize("inside", [False, True])
def test_a_region_of_a_split_chunk_draws_the_same_again(inside):
    def drops(p, b, x):
        drop = partial(F.dropout, p=0.5)
        x = F.linear(x if inside else drop(x), p["w"])
        x = checkpoint(lambda x: F.linear(drop(x) if inside else x, p["v"]), x)
        return x.square().sum() * (2 if x.sum() > 0 else 3)

    found = []
    for keyed in (False, True):
        torch.manual_seed(0)
        strategy = "loop" if keyed else "recorded"
        compute = vgrad.per_sample_grad(
            drops, strategy=strategy, randomness="different"
        )
        if keyed:
            number = int(torch.randint(2**62, ()))
            compute = compute.keyed(sample_keys(number, 0, len(X)))
        found.append(compute(W, {}, X))
    oracle.assert_exact(*found, oracle.EXACT)


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
@pytest.mark.parametrize("strategy", ["auto", "recorded", "loop"])
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


PARAMS = {"w": randn(4, 3), "e": randn(5, 4, seed=1), "s": randn(4, seed=2)}


def tokens(p, b, x):
    h = F.linear(F.embedding(x, p["e"]), p["w"].t() * 1.0)
    h = F.linear(h, p["w"], p["s"]).tanh()
    return F.linear(h, p["e"]).logsumexp(-1).sum()


def assert_equal(loss: Callable, *given, mask=None, **options):
    """Compare two passes with one, and return what they find."""
    found = []
    for passes in (1, 2):
        torch.manual_seed(3)
        clip = vgrad.clipped_grad(loss, passes=passes, **options)
        found.append((clip(*given, mask=mask), torch.rand(4)))
    (one, after), (two, after_two) = found
    for a, b in zip(one[1:], two[1:], strict=True):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()
    oracle.assert_exact(two.grads, one.grads)
    assert torch.equal(after, after_two)
    return two


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "recorded") for name in losses.CASES), ("mlp", "loop"), ("tied", "loop")],
)
def test_the_sums_are_those_of_one_pass(name, strategy):
    loss, *_ = built = losses.build(name, 6)
    options = {"strategy": strategy, "chunk_size": 4, "randomness": "different"}
    norms = vgrad.per_sample_norm(loss, **options)(*built.given)
    options["max_norm"] = float(norms.median())
    for clipping in ("flat", "per_layer", "automatic"):
        assert_equal(loss, *built.given, clipping=clipping, **options)


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf, 1e30, 1e-30])
def test_samples_that_need_care_have_their_factors_kept(spoiled):
    x = randn(6, 3, 3, dtype=torch.float32)
    x[2] = spoiled
    params = {"w": randn(4, 3, dtype=torch.float32)}
    found = assert_equal(
        lambda p, b, x: F.linear(x, p["w"]).sum(), params, {}, x, max_norm=0.5
    )
    assert int(found.nonfinite) == (not spoiled < 1e15)


def test_no_factors_are_kept_between_the_passes():
    def loss(p, b, x):
        h = x
        for weight in p.values():
            h = checkpoint(lambda h, w: F.linear(h, w).tanh(), h, weight)
        return h.sum()

    params = {str(n): randn(50, 50, seed=n) for n in range(8)}
    peaks = []
    for passes in (1, 2):
        clip = vgrad.clipped_grad(loss, max_norm=1.0, passes=passes)
        with losses.Peak() as peak:
            clip(params, {}, randn(40, 10, 50))
        peaks.append(peak.most)
    assert peaks[1] < 0.75 * peaks[0]


def test_random_numbers_are_those_of_one_forward_pass():
    calls = []

    def loss(p, b, x):
        calls.append(1)
        return (F.dropout(p["w"] @ x, 0.5)).square().sum()

    options = {"max_norm": 1.0, "strategy": "recorded", "randomness": "different"}
    options |= {"verify": False}
    assert_equal(loss, {"w": PARAMS["w"]}, {}, randn(6, 3), **options)
    assert len(calls) == 2

    def repeated(p, b, x):
        drop = checkpoint(lambda h: F.dropout(h, 0.5), F.linear(x, p["a.w"]))
        return drop.square().sum()

    assert_equal(repeated, LARGE, {}, ROWS, max_norm=1.0, randomness="different")


class Changing:
    """A net whose checkpoint has other values each time that it runs.

    Its gradients are so large that each sample is clipped: the right sum is the same
    whatever the scale, as long as weights and gradients have one.
    """

    def __init__(self, scales: tuple[float, ...]):
        self.scales = scales
        self.calls = 0

    def inner(self, h, w):
        self.calls += 1
        scale = self.scales[self.calls % len(self.scales)]
        return F.linear(h.tanh() * torch.full_like(h, scale), w)

    def __call__(self, p, b, x):
        y = checkpoint(self.inner, F.linear(x, p["a.w"]), p["b.w"])
        return y.sum() * 1e3


LARGE = {"a.w": randn(4, 3, seed=5), "b.w": randn(5, 4, seed=6)}
ROWS = randn(7, 3, seed=7)
REDONE = "expected a loss of which two backward passes compute the same gradients"


def large(clipping):
    grads = oracle.loss_gradients(Changing((1.0,)), LARGE, {}, (ROWS,))
    if clipping != "per_layer":
        return oracle.clipped(grads, 1.0)
    return {n: oracle.clipped({n: grad}, 0.5**0.5)[n] for n, grad in grads.items()}


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"mask": True}], ids=str)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("scales", [(1, 10, 100, 1000), (1000, 100, 10, 1), (1, 1, 9)])
def test_weights_never_meet_gradients_of_another_pass(scales, clipping, options):
    mask = torch.arange(7) != 2 if options.get("mask") else None
    options = {"chunk_size": options.get("chunk_size"), "clipping": clipping}
    options |= {"verify": False}
    clip = vgrad.clipped_grad(Changing(scales), max_norm=1.0, passes=2, **options)
    with pytest.warns(vgrad.FallbackWarning, match=REDONE):
        found = clip(LARGE, {}, ROWS, mask=mask)
    if mask is None:
        oracle.assert_exact(found.grads, large(clipping), 1e-6)
    for row in ROWS[:2]:
        alone = clip(LARGE, {}, row[None]).grads.values()
        assert sum(float(each.square().sum()) for each in alone) <= (1 + 1e-6) ** 2


def test_automatic_weights_are_those_of_the_same_pass():
    options = {"max_norm": 1.0, "clipping": "automatic", "passes": 2}
    clip = vgrad.clipped_grad(Changing((1, 10, 100, 1000)), **options)
    with pytest.warns(vgrad.FallbackWarning, match=REDONE):
        found = clip(LARGE, {}, ROWS).grads
    oracle.assert_exact(found, large("flat"), 1e-4)  # but for 0.01 beside the norms


def drawing_anew(draw):
    def inner(w, x):
        y = F.linear(x, w).square()
        return F.dropout(y, 0.9) if draw == "dropout" else y * (torch.rand(()) < 0.5)

    def loss(p, b, x):
        return 1e3 * checkpoint(inner, p["w"], x, preserve_rng_state=False).sum()

    return loss


@pytest.mark.parametrize("draw", ["dropout", "rand"])
@pytest.mark.parametrize("randomness", ["different", "same"])
@every_clipping
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_checkpoints_that_draw_anew_keep_the_bound(draw, randomness, clipping):
    options = {"randomness": randomness, "clipping": clipping, "strategy": "recorded"}
    clip = vgrad.clipped_grad(drawing_anew(draw), max_norm=1.0, passes=2, **options)
    params, x = {"w": torch.ones(1, 1)}, torch.ones(1, 1)
    norms = [float(clip(params, {}, x).grads["w"].norm()) for _ in range(30)]
    assert max(norms) <= 1 + 1e-6
    assert len({round(norm, 3) for norm in norms}) == 2  # zeros, and what is clipped


@every_clipping
def test_a_layer_before_a_checkpoint_that_draws_anew_keeps_the_bound(clipping):
    def loss(p, b, x, y):
        h = F.linear(x, p["w"], p["s"])
        drop = lambda h: F.dropout(h, 0.8)  # noqa: E731
        return (checkpoint(drop, h, preserve_rng_state=False) * y).sum()

    options = {"randomness": "different", "strategy": "recorded", "passes": 2}
    clip = vgrad.clipped_grad(loss, max_norm=1e-2, clipping=clipping, **options)
    params = {"w": randn(8, 3).float(), "s": torch.zeros(8)}
    given = randn(1, 3, seed=1).float(), randn(1, 8, seed=2).float()
    with pytest.warns(vgrad.FallbackWarning, match="expected a loss of which two"):
        sums = [clip(params, {}, *given).grads for _ in range(20)]
    norms = [torch.stack([g.norm() for g in each.values()]).norm() for each in sums]
    assert max(norms) <= 1e-2 * (1 + 1e-6)


@pytest.mark.compiled
def test_captures_drop_sums_of_two_kinds_of_gradients():
    options = {"max_norm": 1.0, "passes": 2, "randomness": "different"}
    clip = vgrad.clipped_grad(drawing_anew("dropout"), **options)
    compute, params = vgrad.compile(clip), {"w": torch.ones(1, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [compute(params, {}, torch.ones(1, 1)).grads["w"] for _ in range(30)]
    assert max(float(each.norm()) for each in found) <= 1 + 1e-6

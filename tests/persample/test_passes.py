"""Clipped sums from two backward passes, which keep no factors in between."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses, oracle
from tests.losses import randn
from vgrad.training import TrainState, private_step

PARAMS = {"w": randn(4, 3), "e": randn(5, 4, seed=1), "s": randn(4, seed=2)}
TOKENS = torch.arange(24).reshape(8, 3) % 5
every_clipping = pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])


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
    oracle.assert_exact(two.grads, one.grads, 0)
    assert torch.equal(after, after_two)
    return two


@pytest.mark.parametrize("name", losses.CASES)
@pytest.mark.parametrize("strategy", ["recorded", "loop"])
def test_the_sums_are_those_of_one_pass(name, strategy):
    loss, *_ = built = losses.build(name, 6)
    options = {"strategy": strategy, "chunk_size": 4, "randomness": "different"}
    norms = vgrad.per_sample_norm(loss, **options)(*built.given)
    options["max_norm"] = float(norms.median())
    for clipping in ("flat", "per_layer", "automatic"):
        assert_equal(loss, *built.given, clipping=clipping, **options)


def test_a_mask_and_a_loss_scale_count():
    mask = torch.arange(8) % 3 > 0
    options = {"loss_scale": vgrad.precision.StaticLossScale(8.0), "mask": mask}
    found = assert_equal(tokens, PARAMS, {}, TOKENS, max_norm=1.0, **options)
    grads = oracle.loss_gradients(tokens, PARAMS, {}, (TOKENS,))
    kept = {name: grad[mask] for name, grad in grads.items()}
    oracle.assert_exact(found.grads, oracle.clipped(kept, 1.0))


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf, 1e30, 1e-30])
def test_samples_that_need_care_have_their_factors_kept(spoiled):
    x = randn(6, 3, 3, dtype=torch.float32)
    x[2] = spoiled
    params = {"w": randn(4, 3, dtype=torch.float32)}
    found = assert_equal(
        lambda p, b, x: F.linear(x, p["w"]).sum(), params, {}, x, max_norm=0.5
    )
    assert int(found.nonfinite) == (not torch.tensor(spoiled).isfinite())


def test_no_factors_are_kept_between_the_passes():
    def loss(p, b, x):
        h = x
        for weight in p.values():
            h = checkpoint(lambda h, w: F.linear(h, w).tanh(), h, weight, **ONCE)
        return h.sum()

    params = {str(n): randn(50, 50, seed=n) for n in range(8)}
    peaks = []
    for passes in (1, 2):
        clip = vgrad.clipped_grad(loss, max_norm=1.0, passes=passes)
        with losses.Peak() as peak:
            clip(params, {}, randn(40, 10, 50))
        peaks.append(peak.most)
    assert peaks[1] < 0.75 * peaks[0]


def test_a_private_step_of_two_passes_is_that_of_one():
    plan = losses.plan()
    tx, states = vgrad.optim.sgd(0.1), []
    for passes in (1, 2):
        state = TrainState.create(tx, PARAMS, {}, seed=0)
        step = private_step(tokens, tx, plan, passes=passes)
        states.append(step(step(state, TOKENS)[0], TOKENS)[0].params)
    oracle.assert_exact(*states, 0)


def test_random_numbers_are_those_of_one_forward_pass():
    calls = []

    def loss(p, b, x):
        calls.append(1)
        return (F.dropout(p["w"] @ x, 0.5)).square().sum()

    options = {"max_norm": 1.0, "strategy": "recorded", "randomness": "different"}
    assert_equal(loss, {"w": PARAMS["w"]}, {}, randn(6, 3), **options)
    assert len(calls) == 2

    def repeated(p, b, x):
        drop = checkpoint(lambda h: F.dropout(h, 0.5), F.linear(x, p["a.w"]), **ONCE)
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
        y = checkpoint(self.inner, F.linear(x, p["a.w"]), p["b.w"], **ONCE)
        return y.sum() * 1e3


ONCE = {"use_reentrant": False}
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
        return (
            1e3 * checkpoint(inner, p["w"], x, preserve_rng_state=False, **ONCE).sum()
        )

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
        return (checkpoint(drop, h, preserve_rng_state=False, **ONCE) * y).sum()

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

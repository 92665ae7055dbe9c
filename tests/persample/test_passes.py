"""Clipped sums from two backward passes, which keep no factors in between."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vgrad
from tests import cases, oracle
from tests.cases import randn
from vgrad.persample.engine import Twice
from vgrad.training import TrainState, private_step

PARAMS = {"w": randn(4, 3), "e": randn(5, 4, seed=1), "s": randn(4, seed=2)}
TOKENS = torch.arange(24).reshape(8, 3) % 5


def tokens(p, b, x):
    h = F.linear(F.embedding(x, p["e"]), p["w"].t() * 1.0)
    h = F.linear(h, p["w"], p["s"]).tanh()
    return F.linear(h, p["e"]).logsumexp(-1).sum()


def both(loss: Callable, *given, **options):
    """Return what one pass finds, and what two do."""
    found = []
    for passes in (1, 2):
        torch.manual_seed(3)
        clip = vgrad.clipped_grad(loss, passes=passes, **options)
        found.append(clip(*given))
    return found


def assert_equal(one, two):
    for a, b in zip(one[1:], two[1:], strict=True):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()
    for name, grad in one.grads.items():
        assert torch.equal(grad, two.grads[name]), name


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("strategy", ["recorded", "loop"])
def test_the_sums_are_those_of_one_pass(name, strategy):
    built = cases.build(name, 6)
    given = built.params, built.buffers, *built.batch
    options = {"strategy": strategy, "chunk_size": 4, "randomness": "different"}
    norms = vgrad.per_sample_norm(built.loss, **options)(*given)
    for clipping in ("flat", "per_layer", "automatic"):
        assert_equal(
            *both(
                built.loss,
                *given,
                max_norm=float(norms.median()),
                clipping=clipping,
                **options,
            )
        )


def test_a_mask_and_a_loss_scale_count():
    mask = torch.arange(8) % 3 > 0
    loss_scale = vgrad.precision.StaticLossScale(8.0)
    found = []
    for passes in (1, 2):
        clip = vgrad.clipped_grad(
            tokens, max_norm=1.0, passes=passes, loss_scale=loss_scale
        )
        found.append(clip(PARAMS, {}, TOKENS, mask=mask))
    assert_equal(*found)
    expected = oracle.loss_gradients(tokens, PARAMS, {}, (TOKENS,), 8)
    kept = {name: grad[mask] for name, grad in expected.items()}
    oracle.assert_exact(found[1].grads, oracle.clipped(kept, 1.0))


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf, 1e30, 1e-30])
def test_samples_that_need_care_have_their_factors_kept(spoiled):
    x = randn(6, 3, 3, dtype=torch.float32)
    x[2] = spoiled
    params = {"w": randn(4, 3, dtype=torch.float32)}

    def loss(p, b, x):
        return F.linear(x, p["w"]).sum()

    one, two = both(loss, params, {}, x, max_norm=0.5)
    assert_equal(one, two)
    assert int(two.nonfinite) == (not torch.tensor(spoiled).isfinite())


def test_nothing_is_kept_between_the_passes(monkeypatch):
    seen = []
    again = Twice.again

    def look(self: Twice) -> None:
        seen.append((sorted(self.norms), dict(self.factors)))
        again(self)

    monkeypatch.setattr(Twice, "again", look)
    clip = vgrad.clipped_grad(tokens, max_norm=1.0, passes=2, strategy="recorded")
    clip(PARAMS, {}, TOKENS)
    assert seen == [(["e", "s", "w"], {})]


def test_a_private_step_of_two_passes_is_that_of_one():
    plan = vgrad.dp.Plan(
        dataset_size=80,
        sampling_rate=0.1,
        noise_multiplier=1.0,
        max_norm=1.0,
        steps=9,
        delta=1e-3,
    )
    tx = vgrad.optim.sgd(0.1)
    states = []
    for passes in (1, 2):
        state = TrainState.create(tx, PARAMS, {}, seed=0)
        step = private_step(tokens, tx, plan, passes=passes)
        states.append(step(step(state, TOKENS)[0], TOKENS)[0])
    for name, each in states[0].params.items():
        assert torch.equal(each, states[1].params[name]), name


def test_other_numbers_of_passes_are_refused():
    with pytest.raises(ValueError, match="passes"):
        vgrad.clipped_grad(tokens, max_norm=1.0, passes=3)


def test_random_numbers_are_those_of_one_forward_pass():
    calls = []

    def loss(p: dict[str, Tensor], b: dict, x: Tensor) -> Tensor:
        calls.append(1)
        return (F.dropout(p["w"] @ x, 0.5)).square().sum()

    x, params = randn(6, 3), {"w": PARAMS["w"]}
    one, two = both(
        loss, params, {}, x, max_norm=1.0, strategy="recorded", randomness="different"
    )
    assert_equal(one, two)
    assert len(calls) == 2

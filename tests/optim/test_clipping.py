"""Clipping and noise against torch and against formulas."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.examples import examples
from tests.optim.problems import double, member, perceptron, random_tensors
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.optim import add_noise, clip_by_global_norm, global_norm

SHAPES = {"conv": (5, 3, 2, 2), "linear": (4, 3), "bias": (4,), "scale": ()}
THIN = {"row": (1, 6), "column": (6, 1), "one": (1, 1), "sequence": (3, 2, 4)}


def clipped_by_torch(function, grads, bound):
    leaves = {name: torch.zeros_like(g) for name, g in grads.items()}
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    function(list(leaves.values()), bound)
    return {name: leaf.grad for name, leaf in leaves.items()}


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=4),
    st.floats(0.01, 10.0) | st.sampled_from([1e-3, 100.0, math.inf]),
    st.sampled_from([1e-9, 1.0, 1e9]),
)
@examples(40)
def test_every_shape_is_clipped_as_torch_does(shapes, bound, factor):
    drawn = random_tensors(dict(zip("abcd", shapes, strict=False)), seed=len(shapes))
    grads = {name: factor * grad for name, grad in drawn.items()}
    norm = torch.nn.utils.get_total_norm(list(grads.values()))
    torch.testing.assert_close(global_norm(grads).double(), norm.double())
    for ours, theirs in [
        (clip_by_global_norm(bound), clip_grad_norm_),
        (optim.clip_by_value(bound), clip_grad_value_),
    ]:
        expected = clipped_by_torch(theirs, grads, bound) if grads else {}
        assert_exact(ours.update(grads, ())[0], expected, 1e-12)


@pytest.mark.parametrize(("first", "norm"), [
    (double([math.nan, 1.0]), math.nan),
    (double([math.inf, 1.0]), math.inf),
    (torch.tensor([3 + 4j], dtype=torch.complex128), 13.0),
])  # fmt: skip
def test_norms_that_are_not_finite_and_of_complex_numbers_are_as_in_torch(first, norm):
    grads = {"a": first, "b": double([12.0])}
    assert global_norm(grads).item() == pytest.approx(norm, rel=1e-15, nan_ok=True)
    found, _ = clip_by_global_norm(1.0).update(grads, ())
    assert_exact(found, clipped_by_torch(clip_grad_norm_, grads, 1.0), 1e-12)


def test_norms_are_summed_in_single_precision_and_none_counts_as_zero():
    # The square of 300 overflows a float16, and ones beyond 2048 of them are lost.
    grads = {"a": torch.full((1,), 300.0).half(), "b": torch.ones(10_000).half()}
    expected = math.sqrt(300.0**2 + 10_000)
    assert global_norm(grads).item() == pytest.approx(expected, rel=1e-6)
    assert global_norm(grads).dtype == torch.float32
    assert global_norm({"a": torch.ones(1), "b": double([1e-9])}).dtype == torch.float64
    assert global_norm({}).item() < 1e-18
    assert clip_by_global_norm(1.0).update({"w": None}, ())[0] == {"w": None}


@pytest.mark.parametrize("threshold", [0.2, 0.8, 3.0])
def test_blocks_are_clipped_by_their_root_mean_squares(threshold):
    grads = random_tensors(SHAPES, seed=2)
    found, _ = optim.clip_by_block_rms(threshold).update(grads, ())
    expected = {
        name: grad / max(1.0, math.sqrt(grad.square().mean().item()) / threshold)
        for name, grad in grads.items()
    }
    assert_exact(found, expected, 1e-12)

    def total(threshold):
        grads = {"w": torch.zeros(0, 3).double()}
        return optim.clip_by_block_rms(threshold).update(grads, ())[0]["w"].sum()

    assert torch.func.grad(total)(double(0.5)) == 0


@pytest.mark.parametrize("share", [0.01, 0.5, 10.0])
@pytest.mark.parametrize("eps", [1e-3, 1.0])
def test_each_unit_is_clipped_relative_to_its_parameters(share, eps):
    def units(value):  # rows of outputs, or the whole
        return [value] if sum(size > 1 for size in value.shape) <= 1 else list(value)

    grads, params = (random_tensors(SHAPES | THIN, seed=seed) for seed in (3, 4))
    grads["linear"][1] = 0.0
    params["linear"][2] = 0.0
    found, _ = optim.adaptive_grad_clip(share, eps=eps).update(grads, (), params)
    for name in grads:
        rows = zip(*(units(tree[name]) for tree in (found, grads, params)), strict=True)
        for clipped, g, p in rows:
            norm, bound = g.norm().item(), share * max(p.norm().item(), eps)
            expected = g * bound / norm if norm >= bound else g
            torch.testing.assert_close(clipped, expected, rtol=1e-12, atol=0)


def test_centred_gradients_have_units_of_mean_zero():
    grads = random_tensors(SHAPES, seed=5)
    found, _ = optim.centralize().update(grads, ())
    for name in ("conv", "linear"):
        rows = grads[name].flatten(1)
        expected = (rows - rows.mean(1, keepdim=True)).reshape(grads[name].shape)
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-15)
    assert all(torch.equal(found[name], grads[name]) for name in ("bias", "scale"))


def test_nans_become_zeros_and_are_reported_by_name():
    tx, inf = optim.zero_nans(), math.inf
    grads = {"a": double([math.nan, 1.0, inf]), "b": double([-inf]), "c": None}
    state = tx.init({name: torch.zeros(1) for name in grads})
    updates, state = tx.update(grads, state)
    assert updates["a"].tolist() == [0.0, 1.0, inf]
    assert updates["b"].tolist() == [-inf]
    assert updates["c"] is None
    flags = {name: bool(flag) for name, flag in state.slots["found"].items()}
    assert flags == {"a": True, "b": False, "c": False}
    for last, expected in ((None, True), (double([1.0]), False)):
        _, state = tx.update({**grads, "a": last}, state)
        assert bool(state.slots["found"]["a"]) == expected


# Noise.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_normal_and_its_variance_falls_as_in_the_paper(dtype):
    size = 100_003
    zeros = {"w": torch.zeros(size, dtype=dtype)}
    tx = add_noise(0.3, 0.55, seed=0)
    state = tx.init(zeros)
    for t in range(1, 4):
        updates, state = tx.update(zeros, state)
        draws = updates["w"].double().sort().values / math.sqrt(0.3 / t**0.55)
        # Kolmogorov's distance, whose 1e-6 quantile is 2.7 over the root of the size.
        uniform = torch.special.ndtr(draws)
        steps = torch.arange(size + 1, dtype=torch.float64) / size
        distance = torch.maximum(uniform - steps[:-1], steps[1:] - uniform).max()
        assert distance < 2.7 / math.sqrt(size)
        assert draws.std().item() == pytest.approx(1.0, rel=0.01)
        assert (draws**4).mean().item() == pytest.approx(3.0, rel=0.1)


def test_no_two_draws_are_correlated():
    params = {"a": torch.zeros(4096), "b": torch.zeros(64, 64)}
    tx = add_noise(1.0, 0.0, seed=torch.tensor(0))
    first, state = tx.update(params, tx.init(params))
    second, _ = tx.update(params, state)
    other, _ = tx.update(params, state._replace(slots={"seed": torch.tensor(1 << 40)}))
    rows = [u.flatten() for updates in (first, second, other) for u in updates.values()]
    quarters = torch.cat([row.reshape(4, 1024) for row in rows])
    correlation = torch.corrcoef(quarters) - torch.eye(len(quarters))
    assert correlation.abs().max() < 6 / math.sqrt(1024)


def test_noise_goes_on_from_the_state_alone_and_is_added():
    params, _ = perceptron()
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    tx = add_noise(1.0, 0.55, seed=5)
    _, state = tx.update(params, tx.init(params))
    restored = copy.deepcopy(state)
    expected = tx.update(params, state)
    assert_exact(add_noise(1.0, 0.55, seed=6).update(params, restored), expected, 0)
    drawn, _ = tx.update(zeros, state)
    assert_exact(expected[0], {key: params[key] + drawn[key] for key in params}, 1e-12)
    for eta in (0.0, double(0.0)):
        silent = add_noise(eta, 0.55, seed=5)
        assert_exact(silent.update(params, silent.init(params))[0], params, 0)


def test_members_with_seeds_of_their_own_have_noise_of_their_own():
    def init(seed, params):
        return add_noise(1.0, 0.5, seed=seed).init(params)

    zeros, tx = {"w": torch.zeros(3, 5).double()}, add_noise(1.0, 0.5, seed=9)
    state = torch.vmap(init)(torch.tensor([1, 2, 1]), zeros)
    updates, _ = torch.vmap(tx.update)(zeros, state)
    for index, seed in enumerate([1, 2, 1]):
        alone = member(zeros, index)
        assert_exact(
            member(updates, index), tx.update(alone, init(seed, alone))[0], 1e-12
        )
    assert not torch.equal(updates["w"][0], updates["w"][1])

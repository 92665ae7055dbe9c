import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.examples import examples
from tests.losses import STRATEGIES, build, every_strategy, product, squared
from vgrad import gradient_moments
from vgrad.persample.factors import Outer

NAMES = ("mlp", "cnn", "grouped_conv", "padding_idx", "tied", "bare_and_frozen")


def moments_of(x, **options):
    params = {"w": torch.ones(x.shape[1:], dtype=x.dtype)}
    return gradient_moments(product, **options)(params, {}, x)


def noise(expected):
    """Both estimates as their authors write them, from norms alone."""
    size = len(next(iter(expected.values())))
    each = oracle.norms(expected).square().mean()
    mean = oracle.norms({n: g.mean(0)[None] for n, g in expected.items()}).square()[0]
    return size / (size - 1) * (each - mean), (size * mean - each) / (size - 1)


@pytest.mark.parametrize(
    ("strategy", "chunk_size"),
    [("recorded", None), ("recorded", 2), ("vmap", 2), ("vmap", 3), ("loop", None)],
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 5])
def test_moments_equal_the_reference(name, size, strategy, chunk_size):
    loss, params, buffers, batch, expected = build(name, size)
    compute = gradient_moments(loss, strategy=strategy, chunk_size=chunk_size)
    found = compute(params, buffers, *batch)
    means = {n: g.mean(0) for n, g in expected.items()}
    variances = {n: g.var(0) for n, g in expected.items()}
    squares = {n: g.square().mean(0) for n, g in expected.items()}
    oracle.assert_exact(tuple(found[:3]), (means, variances, squares))
    trace, squared_norm = noise(expected)
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=0)
    close((found.trace, found.squared_norm), (trace, squared_norm))
    close(found.noise_scale, trace / squared_norm)
    for n, variance in variances.items():
        used = variance > 1e-12 * variance.max().clamp(min=1e-12)
        ratio = means[n].square() / variance
        torch.testing.assert_close(found.signal_to_noise[n][used], ratio[used])
    grads = vgrad.clipped_grad(loss, max_norm=1.0)(params, buffers, *batch)
    torch.testing.assert_close(found.losses, grads.losses)


def test_the_noise_scale_of_many_batches_is_a_ratio_of_averages():
    """Of batches of any sizes, in float32, against a float64 loop over samples."""
    average, traces, squares = vgrad.NoiseScale(), [], []
    assert bool(average.value.isnan())
    for size in (2, 5, 3):
        loss, params, buffers, batch, expected = build("mlp", size)
        params = {name: x.float() for name, x in params.items()}
        batch = [x.float() if x.is_floating_point() else x for x in batch]
        average = average.add(gradient_moments(loss)(params, buffers, *batch))
        assert not average.value.requires_grad  # else a log would keep all graphs
        trace, square = noise(expected)
        traces.append(trace)
        squares.append(square)
    expected = torch.stack(traces).mean() / torch.stack(squares).mean()
    torch.testing.assert_close(average.value, expected, rtol=1e-4, atol=0)
    ratios = torch.stack(traces) / torch.stack(squares)
    assert abs(ratios.mean() - expected) > 0.01 * expected  # what must not be done


def test_estimates_of_small_batches_are_right_on_average():
    """From batches of two the estimates come out as those of the whole set."""
    x = torch.randn(400, 3, dtype=torch.float64) + 1.0
    average, compute, params = vgrad.NoiseScale(), gradient_moments(product), {}
    params["w"] = torch.ones(3, dtype=torch.float64)
    for pair in x.split(2):
        average = average.add(compute(params, {}, pair))
    whole = moments_of(x)
    torch.testing.assert_close(average.trace / 200, whole.trace, rtol=0.1, atol=0)
    torch.testing.assert_close(average.value, whole.noise_scale, rtol=0.2, atol=0)


@every_strategy
def test_one_sample_has_a_mean_and_no_variance(strategy):
    loss, params, buffers, batch, expected = build("cnn", 1)
    found = gradient_moments(loss, strategy=strategy)(params, buffers, *batch)
    oracle.assert_exact(found.mean, {n: g[0] for n, g in expected.items()})
    squares = {n: g[0].square() for n, g in expected.items()}
    oracle.assert_exact(found.second_moment, squares)
    for undefined in (found.variance, found.signal_to_noise):
        assert all(bool(value.isnan().all()) for value in undefined.values())
    assert bool(found.noise_scale.isnan())
    assert bool(vgrad.NoiseScale().add(found).value.isnan())
    assert found.losses.shape == (1,)


def test_no_sample_has_no_moments_and_does_not_run_the_loss():
    def loss(params, buffers, x):
        raise AssertionError("the loss ran")

    params = {
        "w": torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True),
        "c": torch.ones(2, dtype=torch.complex64),
    }
    found = gradient_moments(loss)(params, {}, torch.ones(0, 2))
    assert found.mean["c"].dtype == torch.complex64
    for each in (found.mean, found.variance, found.second_moment):
        assert each["w"].dtype == torch.float32
        assert {n: v.shape for n, v in each.items()} == {"w": (2, 3), "c": (2,)}
        assert all(bool(value.isnan().all()) for value in each.values())
        assert not any(value.requires_grad for value in each.values())
    assert found.variance["c"].dtype == torch.float32
    assert bool(found.noise_scale.isnan())
    assert found.losses.shape == (0,)


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_deviations_from_a_large_mean_are_not_lost(strategy, chunk_size, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (1e3 + 1e-2 * torch.randn(64, 16, generator=generator)).to(dtype)
    found = moments_of(x, strategy=strategy, chunk_size=chunk_size)
    exact = x.double().var(0)
    assert 0 < float(exact.min()) < float(exact.max()) < 3e-4
    torch.testing.assert_close(found.variance["w"].double(), exact, rtol=1e-6, atol=0)
    ratio = x.double().mean(0).square() / exact
    torch.testing.assert_close(
        found.signal_to_noise["w"].double(), ratio, rtol=1e-6, atol=0
    )
    naive = x.square().mean(0) - x.mean(0).square()  # what must not be done
    if dtype == torch.float32:
        assert float(((naive.double() - exact) / exact).abs().max()) > 1


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e30, -3.0])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_equal_samples_have_no_variance(value, chunk_size):
    found = moments_of(torch.full((5, 3), value), chunk_size=chunk_size)
    assert torch.equal(found.mean["w"], torch.full((3,), value))
    assert torch.equal(found.variance["w"], torch.zeros(3))
    assert bool(found.signal_to_noise["w"].isinf().all())
    assert float(found.noise_scale) == 0


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_ratios_survive_squares_that_leave_the_range_of_float32(size):
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.randn(6, 4, generator=generator)
    found, plain = moments_of(x * size), moments_of(x)
    torch.testing.assert_close(found.noise_scale, plain.noise_scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        found.signal_to_noise, plain.signal_to_noise, rtol=1e-5, atol=0
    )


@examples(40)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    size=st.integers(2, 9),
    chunk_size=st.sampled_from([None, 1, 2, 5]),
    strategy=st.sampled_from(STRATEGIES),
    offset=st.sampled_from([0.0, 1.0, -1e6]),
)
def test_chunks_of_any_size_have_the_moments_of_the_whole(
    shape, size, chunk_size, strategy, offset
):
    generator = torch.Generator().manual_seed(size)
    x = offset + torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    found = moments_of(x, strategy=strategy, chunk_size=chunk_size)
    torch.testing.assert_close(found.mean["w"], x.mean(0), rtol=1e-12, atol=1e-12)

    def variance(x):
        return {"w": (x - x.mean(0)).square().sum(0) / (size - 1)}

    tolerance = 1e-12 + 8 * oracle.rounding(variance, x)
    oracle.assert_exact(found.variance, variance(x), tolerance)
    assert not bool((found.variance["w"] < 0).any())


def test_many_columns_are_widened_in_parts(monkeypatch):
    monkeypatch.setattr("vgrad.persample.engine.collectors._AT_ONCE", 10)
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    found = moments_of(x)
    torch.testing.assert_close(found.mean["w"], x.mean(0))
    torch.testing.assert_close(found.variance["w"], x.var(0))


def test_recorded_gradients_of_one_parameter_are_held_at_a_time(monkeypatch):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    refs, live = [], []
    original = Outer.grad

    def watched(self):
        found = original(self)
        live.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Outer, "grad", watched)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    gradient_moments(loss, strategy="recorded", chunk_size=2)(params, buffers, x, x)
    assert len(live) == 12
    assert max(live) == 0


def test_complex_parameters_have_real_variances():
    x = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    z = torch.view_as_complex(x)

    def loss(params, buffers, z):
        return (params["w"] * z).real.sum()

    params = {"w": torch.ones(3, dtype=torch.complex64)}
    for strategy in STRATEGIES:
        found = gradient_moments(loss, strategy=strategy)(params, {}, z)
        torch.testing.assert_close(found.mean["w"], z.conj().mean(0).resolve_conj())
        torch.testing.assert_close(found.variance["w"], x.var(0).sum(-1))
        squares = x.square().sum(-1).mean(0)
        torch.testing.assert_close(found.second_moment["w"], squares)
        assert found.noise_scale.dtype == torch.float32


@every_strategy
def test_moments_of_low_precision_are_float32(strategy):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = moments_of(x, strategy=strategy)
    for each in (*found[:3], found.signal_to_noise):
        assert each["w"].dtype == torch.float32
    torch.testing.assert_close(found.mean["w"], x.float().mean(0))
    torch.testing.assert_close(found.variance["w"], x.float().var(0))


@every_strategy
def test_a_sample_that_is_not_finite_spoils_its_parameters_alone(strategy):
    def loss(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"] * x[0]).sum()

    x = torch.tensor([[1.0, 2.0], [3.0, torch.nan], [5.0, 6.0]])
    params = {"a": torch.ones(2), "b": torch.ones(1)}
    found = gradient_moments(loss, strategy=strategy)(params, {}, x)
    torch.testing.assert_close(found.mean["b"], torch.tensor([3.0]))
    torch.testing.assert_close(
        found.variance["a"], torch.tensor([4.0, torch.nan]), equal_nan=True
    )
    assert bool(found.noise_scale.isnan())


def test_the_noise_scale_of_a_small_batch_may_be_negative():
    found = moments_of(torch.tensor([[1.0], [-1.0]]))
    assert float(found.noise_scale) == pytest.approx(2 / (0 - 1))


def test_moments_of_vmap_have_derivatives():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([[1.0, 1.0], [0.0, 3.0]])

    for chunk_size in (None, 1):
        compute = gradient_moments(squared, strategy="vmap", chunk_size=chunk_size)
        (found,) = torch.autograd.grad(compute({"w": w}, {}, x).variance["w"].sum(), w)
        gradient = torch.autograd.functional.jacobian(
            lambda w: (2 * w * x**2).var(0).sum(), w.detach()
        )
        torch.testing.assert_close(found, gradient)


def test_it_works_inside_transforms_and_inference_mode():
    members = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))

    def scale(w):
        return gradient_moments(squared, chunk_size=2)({"w": w}, {}, x).noise_scale

    alone = torch.stack([scale(w) for w in members])
    torch.testing.assert_close(torch.vmap(scale)(members), alone)
    with torch.inference_mode():
        torch.testing.assert_close(torch.stack([scale(w) for w in members]), alone)


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"gradient_moments\(strategy='fast'\)"):
        gradient_moments(product, strategy="fast")
    compute = gradient_moments(product)
    with pytest.raises(ValueError, match=r"gradient_moments.*one batch size"):
        compute({"w": torch.ones(2)}, {}, torch.ones(2, 2), torch.ones(3))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.examples import examples
from tests.losses import STRATEGIES, Peak, build, every_strategy, product
from vgrad import gradient_moments

close = torch.testing.assert_close


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def moments_of(x, **options):
    params = {"w": torch.ones(x.shape[1:], dtype=x.dtype)}
    return gradient_moments(product, **options)(params, {}, x)


def noise(expected):
    """Both estimates as their authors write them, from norms alone."""
    size = len(next(iter(expected.values())))
    each = oracle.norms(expected).square().mean()
    mean = oracle.norms({n: g.mean(0)[None] for n, g in expected.items()}).square()[0]
    return size / (size - 1) * (each - mean), (size * mean - each) / (size - 1)


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", ["mlp", "grouped_conv", "padding_idx", "tied"])
@pytest.mark.parametrize("size", [2, 5])
def test_estimates_of_the_noise_equal_the_reference(name, size, strategy, chunk_size):
    loss, params, buffers, batch, expected = build(name, size)
    compute = gradient_moments(loss, strategy=strategy, chunk_size=chunk_size)
    found = compute(params, buffers, *batch)
    trace, square = noise(expected)
    close((found.trace, found.squared_norm), (trace, square), rtol=1e-8, atol=0)
    close(found.noise_scale, trace / square, rtol=1e-8, atol=0)
    for n, grad in expected.items():
        variance = grad.var(0)
        used = variance > 1e-12 * variance.max().clamp(min=1e-12)
        close(
            found.signal_to_noise[n][used],
            (grad.mean(0).square() / variance)[used],
            rtol=1e-8,
            atol=0,
        )
    clip = vgrad.clipped_grad(loss, max_norm=1.0)
    close(found.losses, clip(params, buffers, *batch).losses)


def test_the_noise_scale_of_many_batches_is_a_ratio_of_averages():
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
    close(average.value, expected, rtol=1e-4, atol=0)
    ratios = torch.stack(traces) / torch.stack(squares)
    assert abs(ratios.mean() - expected) > 0.01 * expected  # what must not be done


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


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_deviations_from_a_large_mean_are_not_lost(strategy, chunk_size, dtype):
    x = (1e3 + 1e-2 * torch.randn(64, 16, generator=source())).to(dtype)
    found = moments_of(x, strategy=strategy, chunk_size=chunk_size)
    exact = x.double().var(0)
    assert 0 < float(exact.min()) < float(exact.max()) < 3e-4
    close(found.variance["w"].double(), exact, rtol=1e-6, atol=0)
    ratio = x.double().mean(0).square() / exact
    close(found.signal_to_noise["w"].double(), ratio, rtol=1e-6, atol=0)
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
    x = 1 + torch.randn(6, 4, generator=source())
    found, plain = moments_of(x * size), moments_of(x)
    for name in ("noise_scale", "signal_to_noise"):
        close(getattr(found, name), getattr(plain, name), rtol=1e-5, atol=0)


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
    x = torch.randn(size, *shape, generator=source(size), dtype=torch.float64) + offset
    found = moments_of(x, strategy=strategy, chunk_size=chunk_size)
    close(found.mean["w"], x.mean(0), rtol=1e-12, atol=1e-12)

    def variance(x):
        return {"w": (x - x.mean(0)).square().sum(0) / (size - 1)}

    tolerance = 1e-12 + 8 * oracle.rounding(variance, x)
    oracle.assert_exact(found.variance, variance(x), tolerance)
    assert not bool((found.variance["w"] < 0).any())


def test_recorded_gradients_of_one_parameter_are_held_at_a_time():
    peaks, x = [], torch.randn(64, 64)
    for layers in (2, 10):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
        fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        compute = gradient_moments(vgrad.sample_loss(fmodel, F.mse_loss))
        with Peak() as peak:
            compute(params, buffers, x, x)
        peaks.append(peak.most)
    one = 64 * 64 * 64 * 4  # bytes of the gradients of one parameter
    assert peaks[1] - peaks[0] < one


@every_strategy
def test_moments_of_low_precision_are_float32(strategy):
    x = torch.randn(5, 3, generator=source()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = moments_of(x, strategy=strategy)
    for each in (*found[:3], found.signal_to_noise):
        assert each["w"].dtype == torch.float32
    close(found.mean["w"], x.float().mean(0))
    close(found.variance["w"], x.float().var(0))


@every_strategy
def test_a_sample_that_is_not_finite_spoils_its_parameters_alone(strategy):
    def loss(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"] * x[0]).sum()

    x = torch.tensor([[1.0, 2.0], [3.0, torch.nan], [5.0, 6.0]])
    params = {"a": torch.ones(2), "b": torch.ones(1)}
    found = gradient_moments(loss, strategy=strategy)(params, {}, x)
    close(found.mean["b"], torch.tensor([3.0]))
    close(found.variance["a"], torch.tensor([4.0, torch.nan]), equal_nan=True)
    assert bool(found.noise_scale.isnan())


def test_the_noise_scale_of_a_small_batch_may_be_negative():
    found = moments_of(torch.tensor([[1.0], [-1.0]]))
    assert float(found.noise_scale) == pytest.approx(2 / (0 - 1))

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vgrad.dp import add_gaussian_noise, generator
from vgrad.persample.sensitivity import Sensitivity

MULTIPLIER, SENSITIVITY = 1.5, 0.4
SIGMA = MULTIPLIER * SENSITIVITY


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def noised(sums, seed=0, noise_multiplier=MULTIPLIER, sensitivity=SENSITIVITY):
    return add_gaussian_noise(
        sums,
        Sensitivity(sensitivity),
        noise_multiplier=noise_multiplier,
        generator=source(seed),
    )


def is_gaussian(values, sigma):
    return stats.kstest(values.double().numpy() / sigma, "norm").pvalue > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_gaussian_with_its_standard_deviation_and_no_other(dtype):
    noise = noised({"a": torch.zeros(50_000, dtype=dtype)})["a"]
    assert is_gaussian(noise, SIGMA)
    assert not is_gaussian(noise, SIGMA * 2 / 3)
    assert not is_gaussian(noise, SIGMA * 3 / 2)


def test_small_tensors_get_the_same_noise_as_large_ones():
    # torch draws fewer than 16 numbers in another way than more of them.
    sums = {str(index): torch.zeros(5) for index in range(4000)}
    noise = torch.cat(list(noised(sums).values()))
    assert is_gaussian(noise, SIGMA)
    assert not is_gaussian(noise, SIGMA * 0.9)


def test_the_variance_is_within_three_sigma_for_a_million_draws():
    noise = noised({"a": torch.zeros(1000, 1000)})["a"].double() / SIGMA
    assert abs(float(noise.mean())) < 3 / 1000
    assert abs(float((noise**2).mean()) - 1) < 3 * math.sqrt(2 / 1e6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_get_float32_noise(dtype):
    sums = {"a": torch.linspace(-1, 1, 50_000).to(dtype)}
    result = noised(sums)["a"]
    noise = result.double() - sums["a"].double()
    assert result.dtype == torch.float32
    assert is_gaussian(noise, SIGMA)
    # Drawn in half precision, the noise would have some thousand different values.
    assert len(noised({"a": torch.zeros(50_000, dtype=dtype)})["a"].unique()) > 40_000


def test_float64_sums_keep_their_dtype():
    assert noised({"a": torch.zeros(2, dtype=torch.float64)})["a"].dtype is (
        torch.float64
    )


def test_autocast_around_it_changes_nothing():
    sums = {"a": torch.ones(100)}
    expected = noised(sums)["a"]
    with torch.autocast("cpu", torch.bfloat16):
        result = noised(sums)["a"]
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_leaves_have_independent_noise():
    size = 100_000
    noise = noised({name: torch.zeros(size) for name in "abc"})
    for first, second in ("ab", "ac", "bc"):
        assert abs(correlation(noise[first], noise[second])) < 4 / math.sqrt(size)
        assert not torch.equal(noise[first][:100], noise[second][:100])


def test_steps_have_independent_noise():
    size, one = 100_000, source()
    sums = {"a": torch.zeros(size)}
    steps = [
        add_gaussian_noise(sums, Sensitivity(1.0), noise_multiplier=1.0, generator=one)
        for _ in range(3)
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        found = correlation(steps[first]["a"], steps[second]["a"])
        assert abs(found) < 4 / math.sqrt(size)


def test_noise_is_independent_of_what_it_is_added_to():
    values = torch.randn(1000, generator=source(1), dtype=torch.float64)
    plain = noised({"a": torch.zeros(1000, dtype=torch.float64)})["a"]
    torch.testing.assert_close(noised({"a": values})["a"], values + plain)


def test_the_order_and_the_names_of_the_dictionary_are_kept():
    result = noised({"b": torch.zeros(2, 3), "a": torch.zeros(())})
    assert list(result) == ["b", "a"]
    assert result["b"].shape == (2, 3)
    assert result["a"].shape == ()


SHAPES = st.lists(st.integers(0, 20), max_size=3)


@given(shapes=st.lists(SHAPES, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_every_entry_of_any_shape_gets_its_own_noise(shapes, seed):
    sums = {str(index): torch.zeros(shape) for index, shape in enumerate(shapes)}
    noise = noised(sums, seed)
    assert [list(value.shape) for value in noise.values()] == shapes
    drawn = torch.cat([torch.zeros(0), *(value.flatten() for value in noise.values())])
    # Among n float32 numbers some pairs agree by chance, far fewer than one in 10.
    assert len(drawn.unique()) >= 0.9 * len(drawn)
    assert bool((drawn.abs() < 7 * SIGMA).all())


def test_only_the_generator_changes():
    sums, one = {"a": torch.ones(5)}, source()
    before, global_state = one.get_state(), torch.get_rng_state()
    add_gaussian_noise(sums, Sensitivity(1.0), noise_multiplier=1.0, generator=one)
    assert torch.equal(sums["a"], torch.ones(5))
    assert not torch.equal(one.get_state(), before)
    assert torch.equal(torch.get_rng_state(), global_state)


def test_values_that_are_not_finite_stay_visible():
    result = noised({"a": torch.tensor([math.nan, math.inf, -math.inf, 0.0])})["a"]
    assert math.isnan(result[0])
    assert result[1:3].tolist() == [math.inf, -math.inf]
    assert result[3] != 0


def test_a_noise_multiplier_of_zero_adds_nothing_and_shares_nothing():
    sums = {"a": torch.randn(5, generator=source())}
    result = noised(sums, noise_multiplier=0)
    assert torch.equal(result["a"], sums["a"])
    assert result["a"].data_ptr() != sums["a"].data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_on_a_gpu_has_its_standard_deviation():
    result = add_gaussian_noise(
        {"a": torch.zeros(50_000, device="cuda")},
        Sensitivity(SENSITIVITY),
        noise_multiplier=MULTIPLIER,
        generator=generator("cuda", seed=0),
    )
    assert is_gaussian(result["a"].cpu(), SIGMA)


@pytest.mark.parametrize("bare", [1.0, torch.tensor(1.0), None])
def test_a_bare_number_is_no_sensitivity(bare):
    with pytest.raises(TypeError, match=r"clipped_grad\(\.\.\.\)\.sensitivity"):
        add_gaussian_noise({}, bare, noise_multiplier=1.0, generator=source())


def test_an_infinite_sensitivity_is_refused():
    with pytest.raises(ValueError, match="expected a finite sensitivity"):
        noised({}, sensitivity=math.inf)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_a_noise_multiplier_out_of_range_is_refused(multiplier):
    match = r"add_gaussian_noise\(noise_multiplier="
    with pytest.raises(ValueError, match=match):
        noised({}, noise_multiplier=multiplier)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_sums_that_are_not_real_floats_are_refused(dtype):
    with pytest.raises(TypeError, match=r"sums\['a'\]\): expected a tensor of real"):
        noised({"a": torch.zeros(2, dtype=dtype)})


def test_a_generator_on_another_device_is_refused():
    sums = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    with pytest.raises(ValueError, match=r"sums\['b'\].*generator's device cpu.*meta"):
        noised(sums)


def test_generators_without_a_seed_differ():
    states = [generator().get_state() for _ in range(5)]
    for index, state in enumerate(states):
        assert all(not torch.equal(state, other) for other in states[:index])


def test_generators_with_a_seed_agree_with_torch():
    drawn = torch.randn(100, generator=generator(seed=3))
    assert torch.equal(drawn, torch.randn(100, generator=source(3)))


def test_a_generator_without_a_seed_is_not_one_of_the_seeds_of_torch():
    # On the CPU torch keeps 32 bits of a seed: few enough to try them all.
    wide = torch.randn(100, generator=source(3 + 2**40))
    assert torch.equal(wide, torch.randn(100, generator=source(3)))
    made = generator()
    again = source(made.initial_seed())
    assert not torch.equal(
        torch.randn(100, generator=made), torch.randn(100, generator=again)
    )


def test_all_words_of_the_state_come_from_the_operating_system(monkeypatch):
    # The state is that of seed 5489, the reference seed of the Mersenne Twister, when
    # its words are put in by hand: they are where they should be, and all are used.
    words = [5489]
    for index in range(1, 624):
        last = words[-1]
        words.append((1812433253 * (last ^ (last >> 30)) + index) % 2**32)
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    monkeypatch.setattr("secrets.token_bytes", lambda size: packed[:size])
    drawn = torch.rand(1000, dtype=torch.float64, generator=generator())
    expected = torch.rand(1000, dtype=torch.float64, generator=source(5489))
    assert torch.equal(drawn, expected)


def test_noise_of_a_generator_without_a_seed_is_gaussian():
    result = add_gaussian_noise(
        {"a": torch.zeros(20_000)},
        Sensitivity(SENSITIVITY),
        noise_multiplier=MULTIPLIER,
        generator=generator(),
    )
    pvalue = stats.kstest(result["a"].double().numpy() / SIGMA, "norm").pvalue
    assert pvalue > 1e-9  # The seed is not fixed here.


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_a_seed_that_is_not_whole_is_refused(seed):
    with pytest.raises(ValueError, match=r"generator\(seed="):
        generator(seed=seed)

"""Noise on sums: its distribution, its streams, and its parts on ranks."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests import oracle, streams
from tests.dp.runs import KEY
from vgrad import Sensitivity
from vgrad.dp import add_gaussian_noise, secret_key
from vgrad.dp import noise as gaussian

BLOCK = gaussian._CUDA_BLOCK
MULTIPLIER, SENSITIVITY = 1.5, 0.4
SIGMA = MULTIPLIER * SENSITIVITY


def noised(sums, sensitivity=SENSITIVITY, **changed):
    given = {"noise_multiplier": MULTIPLIER, "key": KEY, "step": 0}
    return add_gaussian_noise(sums, Sensitivity(sensitivity), **(given | changed))


def is_gaussian(values, sigma):
    return stats.kstest(values.double().numpy() / sigma, "norm").pvalue > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# torch draws fewer than 16 numbers in another way than more of them.
@pytest.mark.parametrize(("count", "size"), [(1, 50_000), (4000, 5)])
def test_noise_is_gaussian_with_its_standard_deviation_and_no_other(count, size, dtype):
    sums = {str(index): torch.zeros(size, dtype=dtype) for index in range(count)}
    noise = torch.cat(list(noised(sums).values()))
    assert is_gaussian(noise, SIGMA)
    assert not is_gaussian(noise, SIGMA * 0.9)
    assert not is_gaussian(noise, SIGMA / 0.9)


@pytest.mark.slow
def test_the_tails_are_those_of_a_normal_number():
    count, found = 4_000_000, dict.fromkeys([3.0, 3.5, 4.0, 4.5, 5.0], 0)
    for step in range(10):
        noise = noised({"a": torch.zeros(count)}, step=step)["a"] / SIGMA
        for deviations in found:
            found[deviations] += int((noise > deviations).sum())
            found[deviations] += int((noise < -deviations).sum())
    for deviations, seen in found.items():
        low, high = stats.poisson(20 * count * stats.norm.sf(deviations)).interval(
            1 - 1e-6
        )
        assert low <= seen <= high


SHIFTS = torch.tensor([0.0, 1e-30, 0.3, -7.7, 1e4, 3e-9], dtype=torch.float64)
TOTALS = {
    "blocks": SHIFTS.repeat(25_000).float(),
    "wide": SHIFTS.repeat(12_000),
    "one": torch.tensor([0.25]),
    "transposed": torch.arange(12.0).view(3, 4).T,
    "number": torch.tensor(0.3, dtype=torch.float64),
    "empty": torch.zeros(2, 0),
    "half": torch.linspace(-9, 9, 7, dtype=torch.float16),
    "bfloat16": torch.linspace(-9, 9, 50_000, dtype=torch.bfloat16),
    "ends": torch.tensor([3.4e38, -3.4e38, 1e-45, math.inf, -math.inf, math.nan]),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sensitivity", [1e-270, 1e-30, SENSITIVITY, 1e38, 1e270])
def test_noise_is_drawn_in_float64_and_rounded_to_a_grid_once(sensitivity, threads):
    """On whatever sum, so that no sample is seen in the gaps between numbers."""
    leaves = {name: total.clone().requires_grad_() for name, total in TOTALS.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with_graph = noised(leaves, sensitivity=sensitivity, step=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what overflows
        plain = noised(TOTALS, sensitivity=sensitivity, step=3)
    torch.set_num_threads(before)
    sizes = {"multiplier": MULTIPLIER, "sensitivity": sensitivity}
    grid = 2.0 ** math.floor(math.log2(MULTIPLIER * sensitivity / 2**16))
    for name, total in TOTALS.items():
        drawn = streams.noise(KEY.tolist(), 3, name, total.shape, **sizes)
        exact = total.double() + drawn
        # Beyond, float64 has no finer numbers.
        fine = exact.abs() < 2.0**52 * grid
        expected = torch.where(fine, (exact / grid).round() * grid + 0.0, exact)
        expected = expected.to(torch.promote_types(total.dtype, torch.float32))
        oracle.assert_exact(plain[name], expected, 0)
        oracle.assert_exact(with_graph[name], expected, 0)
        assert not plain[name].requires_grad
        assert plain[name].is_contiguous()
        (grad,) = torch.autograd.grad(with_graph[name].sum(), leaves[name])
        assert torch.equal(grad, torch.ones_like(grad))


def test_all_blocks_of_a_stream_are_apart():
    # Counters that differ in their lowest word share 16 of 20 numbers.
    drawn = streams.filled(
        5 * streams.BLOCK,
        lambda source, n: source.standard_normal(n),
        KEY.tolist(),
        "a",
    )
    assert len(np.unique(drawn)) == len(drawn)
    parts = drawn.reshape(5, -1)
    for first, second in ((0, 1), (1, 2), (0, 4)):
        found = np.corrcoef(parts[first], parts[second])[0, 1]
        assert abs(found) < 5 / math.sqrt(streams.BLOCK)


@pytest.mark.parametrize(
    "around", [torch.autocast("cpu", torch.bfloat16), torch.device("meta")]
)
def test_a_context_around_it_changes_nothing(around):
    sums = {"a": torch.ones(100)}
    expected = noised(sums)
    with around:
        oracle.assert_exact(noised(sums), expected, 0)


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize(
    "other",
    [
        {"step": 1},
        {"member": 1},
        {"key": secret_key(seed=1)},
        {"noise_multiplier": 2 * MULTIPLIER},
        {"noise_multiplier": 2 * MULTIPLIER, "sensitivity": SENSITIVITY / 2},
        {"sensitivity": 2 * SENSITIVITY},
    ],
    ids=str,
)
def test_noise_of_anything_else_is_independent(other):
    sums = {name: torch.zeros(100_000) for name in "ab"}
    noise = noised(sums)
    for each in (noised(sums, **other)["a"], noise["b"]):
        assert abs(correlation(noise["a"], each)) < 5 / math.sqrt(100_000)
        assert not torch.equal(noise["a"][:100], each[:100])


def test_the_same_call_draws_the_same_noise_in_any_order():
    sums = {name: torch.randn(1000, dtype=torch.float64) for name in "ab"}
    found = noised(sums)
    assert list(found) == list(sums)
    oracle.assert_exact(noised({name: sums[name] for name in "ba"}), found, 0)


def test_nothing_changes():
    sums = {"a": torch.ones(5)}
    global_state, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    noised(sums)
    oracle.assert_exact(sums["a"], torch.ones(5), 0)
    oracle.assert_exact(KEY, secret_key(seed=0), 0)
    oracle.assert_exact(torch.get_rng_state(), global_state, 0)
    assert np.array_equal(np.random.get_state()[1], numpys)


def test_a_noise_multiplier_of_zero_adds_nothing_and_shares_nothing():
    total = torch.randn(5)
    result = noised({"a": total}, noise_multiplier=0)["a"]
    assert torch.equal(result, total)
    assert result.data_ptr() != total.data_ptr()
    total = placed(torch.randn(5, 2).half(), as_rank(1, (2,)), placements("0"))
    noisy = noised({"a": total}, noise_multiplier=0)["a"]
    assert noisy.placements == total.placements
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy.to_local(), total.to_local().float())


@pytest.mark.parametrize("members", [1, 3])
def test_places_in_the_stream_of_a_device_are_apart(members):
    sizes = {"a": 3 * BLOCK + 1, "b": 0, "c": 1, "d": BLOCK}
    sums = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    taken = []
    for member in range(members):
        source = gaussian._Normals(KEY, sums, member, 1.0)
        for name, size in sizes.items():
            start = source.starts[name]
            taken += range(start, start + math.ceil(size / BLOCK))
    assert sorted(taken) == list(range(members * 6))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_on_a_gpu_has_its_standard_deviation_and_repeats():
    sums = {
        "a": torch.zeros(50_000, device="cuda"),
        "b": torch.zeros(3 * BLOCK + 7, device="cuda"),
    }
    result, again = noised(sums), noised(sums)
    assert is_gaussian(result["a"].cpu(), SIGMA)
    assert is_gaussian(result["b"].cpu()[:: 2**5], SIGMA)
    assert all(torch.equal(result[name], again[name]) for name in sums)
    assert not torch.equal(result["a"], noised(sums, member=1)["a"])
    # Blocks that overlapped would repeat numbers of one another.
    blocks = result["b"][: 3 * BLOCK].view(3, -1)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert abs(correlation(blocks[first], blocks[second])) < 5 / BLOCK**0.5
    source = gaussian._Normals(KEY, sums, 0, 1.0)
    size = len(sums["b"])
    whole = source.of("b", sums["b"], gaussian.Part((size,), (0,), (size,)))
    assert len(whole.unique()) > 0.999 * len(whole)
    part = gaussian.Part((size,), (BLOCK - 5,), (2 * BLOCK,))
    found = source.of("b", sums["b"][: 2 * BLOCK], part)
    assert torch.equal(found, whole[BLOCK - 5 :][: 2 * BLOCK])


# Pairs of normal numbers, by the formula of Box and Muller.


def test_the_two_numbers_of_a_pair_are_normal_and_independent():
    blocks = [gaussian.draw(1, step, 2**16, 1.0).reshape(2, -1) for step in range(16)]
    first, second = noise = torch.from_numpy(np.concatenate(blocks, 1))
    size = noise.shape[1]
    # The mean and the variance of the first powers of a normal number.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        gaps = (noise**power).mean(1) - mean
        assert float(gaps.abs().max()) < 4 * math.sqrt(variance / size)
    for a in (first, first**2, first.abs() > 2):
        for b in (second, second**2, second.abs() > 2):
            assert abs(correlation(a.double(), b.double())) < 5 / math.sqrt(size)
    # Radius and angle are uniform, each in its way, and independent too.
    radius, angle = noise.norm(dim=0), torch.atan2(second, first)
    assert stats.kstest((-(radius**2) / 2).exp().numpy(), "uniform").pvalue > 0.001
    turns = (angle / (2 * math.pi) + 0.5).numpy()
    assert stats.kstest(turns, "uniform").pvalue > 0.001
    assert abs(correlation(radius, angle)) < 5 / math.sqrt(size)


class Given:
    """A generator whose numbers are given."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self, size=None, out=None):
        found = np.array([self.numbers.pop(0) for _ in range(size or len(out))])
        if out is not None:
            out[:] = found
        return found


def drawn(monkeypatch, count, deviation, *numbers):
    source = Given(*numbers)
    monkeypatch.setattr(gaussian.generators, "block", lambda stream, number: source)
    found = gaussian.draw(0, 0, count, deviation)
    assert not source.numbers
    return found


def test_small_numbers_under_the_logarithm_are_drawn_until_their_bits_count(
    monkeypatch,
):
    # Radii, then angles, then what is drawn again: two numbers, one of them twice.
    numbers = 0.5, 0.0, 2.0**-11, *[0.0] * 3, 2.0**-30, 0.75, 0.25
    found = drawn(monkeypatch, 6, 2.0, *numbers)
    expected = [0.5, 2.0**-20 * 0.25, 2.0**-10 * 0.75]
    assert np.allclose(found[:3], 2 * np.sqrt(-2 * np.log(expected)), rtol=1e-15)
    assert not found[3:].any()


@pytest.mark.parametrize("turn", [0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53])
@pytest.mark.parametrize("under", [2.0**-10, 1 - 2.0**-53])
def test_the_ends_of_what_is_uniform_give_numbers_on_the_circle(
    monkeypatch, turn, under
):
    """A right angle has no tangent."""
    radius, angle = math.sqrt(-2 * math.log(under)), 2 * math.pi * turn
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    found = drawn(monkeypatch, 2, 1.0, under, turn)
    assert np.allclose(found, expected, rtol=0, atol=1e-14)


# Parts of a tensor, and shards of a DTensor.


@st.composite
def cut(draw):
    """Draw a shape, and where each of its dimensions is cut; parts may be empty."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    cuts = [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape]
    edges = [[0, *sorted(c), n] for c, n in zip(cuts, shape, strict=True)]
    return tuple(shape), list(itertools.product(*map(itertools.pairwise, edges)))


@given(cut(), st.integers(1, 40))
def test_parts_take_their_own_numbers_of_every_block(case, size):
    shape, boxes = case
    total = math.prod(shape)
    whole = np.arange(total).reshape(shape)
    for box in boxes:
        low, high = [a for a, _ in box], [b for _, b in box]
        sizes = tuple(b - a for a, b in box)
        found = np.full(math.prod(sizes), -1)
        numbers = []
        part = gaussian.Part(shape, tuple(low), sizes)
        for share in gaussian.block_parts(part, size):
            block = np.arange(total)[share.number * size :][:size]
            assert share.count == len(block)
            found[share.entries] = block[share.places]
            numbers.append(share.number)
        expected = whole[tuple(map(slice, low, high))].reshape(-1)
        assert np.array_equal(found, expected)
        # No block is drawn twice, or for nothing.
        assert numbers == sorted(set((expected // size).tolist()))


@pytest.fixture(autouse=True)
def group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def as_rank(rank, sizes):
    """Be one rank of a mesh; what ranks send one another is lost."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    count = math.prod(sizes)
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    return init_device_mesh("cpu", sizes)


def placed(full, mesh, placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def placements(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = {"R": Replicate(), "P": Partial()}
    return [kinds.get(each) or Shard(int(each)) for each in text]


CASES = {
    "rows": ((3,), "0", (5, 7)),
    "columns": ((3,), "1", (5, 7)),
    "fewer rows than ranks": ((4,), "0", (2, 3)),
    "copies": ((3,), "R", (5, 7)),
    "rows and columns": ((2, 3), "01", (5, 7)),
    "columns, then rows": ((2, 3), "10", (5, 7)),
    "rows twice": ((2, 2), "00", (9, 2)),
    "rows of copies": ((2, 2), "R0", (9, 2)),
    "several blocks": ((3,), "0", (5, streams.BLOCK // 2)),
    "columns of several blocks": ((3,), "1", (5, streams.BLOCK // 2)),
    "kernels": ((2, 2), "13", (4, 6, 3, 3)),
    "none": ((2,), "0", (0, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("graph", [False, True])
def test_every_rank_adds_its_part_of_the_noise(name, graph):
    sizes, text, shape = CASES[name]
    generator = torch.Generator().manual_seed(0)
    full = {"a": torch.randn(shape, generator=generator), "b": torch.zeros(3)}
    expected = noised(full)["a"]
    found = torch.full(shape, math.nan)
    for rank in range(math.prod(sizes)):
        total = placed(full["a"], as_rank(rank, sizes), placements(text))
        if graph:
            total.requires_grad_()
        noisy = noised({"a": total, "b": full["b"]})["a"]
        assert noisy.requires_grad == graph
        assert noisy.placements == total.placements
        assert noisy.shape == total.shape
        assert noisy.stride() == total.stride()
        # The place of a part, as torch sees it: where it puts the numbers of the whole.
        order = torch.arange(float(math.prod(shape))).view(shape)
        place = placed(order, total.device_mesh, total.placements).to_local().long()
        found.view(-1)[place.flatten()] = noisy.to_local().detach().flatten()
        assert torch.equal(noisy.to_local(), expected.flatten()[place])
    assert torch.equal(found, expected)


def test_the_transpose_of_a_shard_gets_the_noise_of_its_shape():
    full = torch.randn(6, 4)
    total = placed(full, as_rank(1, (2,)), placements("0")).T
    noisy = noised({"a": total})["a"]
    assert noisy.placements == tuple(placements("1"))
    assert noisy.stride() == (6, 1)
    assert noisy.to_local().is_contiguous()
    assert torch.equal(noisy.to_local(), noised({"a": full.T})["a"][:, 3:])


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_terms_of_a_sum_are_refused(noise_multiplier):
    from torch.distributed.tensor import DTensor

    mesh = as_rank(0, (2, 2))
    total = DTensor.from_local(torch.ones(2), mesh, placements("0P"), run_check=False)
    with pytest.raises(TypeError, match=r"sums\['a'\]\): expected .*got \[Partial"):
        noised({"a": total}, noise_multiplier=noise_multiplier)

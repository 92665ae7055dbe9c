"""Noise on sums: its distribution, its streams, and its parts on ranks."""

import itertools
import math
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests import oracle, streams
from tests.dp.runs import KEY
from vgrad import Sensitivity, generators
from vgrad.dp import add_gaussian_noise, chacha, secret_key
from vgrad.dp import noise as gaussian

MULTIPLIER, SENSITIVITY = 1.5, 0.4
SIGMA = MULTIPLIER * SENSITIVITY


def noised(sums, sensitivity=SENSITIVITY, **changed):
    given = {"noise_multiplier": MULTIPLIER, "key": KEY, "step": 0}
    return add_gaussian_noise(sums, Sensitivity(sensitivity), **(given | changed))


def is_gaussian(values, sigma):
    return stats.kstest(values.double().numpy() / sigma, "norm").pvalue > 0.001


# torch draws fewer than 16 numbers in another way than more of them.
@pytest.mark.parametrize(("count", "size"), [(1, 50_000), (4000, 5)])
def test_noise_is_gaussian_with_its_standard_deviation_and_no_other(count, size):
    sums = {str(index): torch.zeros(size) for index in range(count)}
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


# Words of the cipher, and where they are drawn.


def tensor(text):
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.int32)


COUNTING, ZERO = bytes(range(32)).hex(), bytes(32).hex()
VECTORS = {
    "2.4.2": (
        COUNTING,
        "000000000000004a00000000",
        1,
        """
        224f51f3401bd9e12fde276fb8631ded8c131f823d2c06e27e4fcaec9ef3cf78
        8a3b0aa372600a92b57974cded2b9334794cba40c63e34cdea212c4cf07d41b7
        69a6749f3f630f4122cafe28ec4dc47e26d4346d70b98c73f3e9c53ac40c5945
        398b6eda1a832c89c167eacd901d7e2bf363""",
    ),
    "A.1, 1 and 2": (
        ZERO,
        "00" * 12,
        0,
        """
        76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7
        da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586
        9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed
        29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f""",
    ),
    "A.1, 3": (
        ZERO[:-2] + "01",
        "00" * 12,
        1,
        """
        3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a
        8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0""",
    ),
    "A.1, 4": (
        "00ff" + ZERO[4:],
        "00" * 12,
        2,
        """
        72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca
        13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096""",
    ),
    "A.1, 5": (
        ZERO,
        "000000000000000000000002",
        0,
        """
        c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7
        8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d""",
    ),
}


def by_openssl(key, nonce, tile):
    words = torch.empty((1, 2, gaussian.TILE // 2), dtype=torch.int64)
    step = int.from_bytes(bytes.fromhex(nonce)[4:], "little")
    if chacha._encryptor(bytes(32), bytes(16)) is None:
        pytest.skip("cryptography, or the cipher of its OpenSSL, is not installed")
    chacha.fill(words, bytes.fromhex(key), step, tile)
    return words


def by_tensors(key, nonce, tile, unrolled=False):
    nonces, tiles = tensor(nonce).view(1, 3), torch.tensor([tile])
    keys = tensor(key).view(1, 8)
    return chacha.keystream(keys, nonces, tiles, unrolled=unrolled)[0]


def unrolled(*place):
    return by_tensors(*place, unrolled=True)


@pytest.mark.parametrize("draw", [by_openssl, by_tensors, unrolled])
@pytest.mark.parametrize("name", VECTORS)
def test_words_are_those_of_rfc_8439(name, draw):
    key, nonce, block, expected = VECTORS[name]
    expected = bytes.fromhex("".join(expected.split()))
    words = draw(key, nonce, 0).numpy().tobytes()
    assert words[64 * block :][: len(expected)] == expected
    reference = streams.chacha20(bytes.fromhex(key), bytes.fromhex(nonce), 0, 64)
    assert words == reference.tobytes()


@pytest.mark.parametrize("draw", [by_openssl, by_tensors, unrolled])
def test_the_last_tile_of_a_key_has_the_last_blocks(draw):
    key, nonce = KEY.numpy().tobytes(), bytes(4) + bytes(range(250, 256)) + b"ab"
    last = streams.chacha20(key, nonce, 2**32 - 64, 64)
    assert draw(key.hex(), nonce.hex(), 2**26 - 1).numpy().tobytes() == last.tobytes()


def test_tensors_draw_several_steps_and_streams_at_once():
    keys = torch.stack([tensor(COUNTING), tensor(ZERO), tensor(ZERO)])
    steps, tiles = torch.tensor([7, 2**40]), torch.tensor([3, 0, 2**26 - 1])
    drawn = chacha.keystream(keys, chacha.nonces(steps), tiles)
    for i, step in enumerate(steps.tolist()):
        for j, tile in enumerate(tiles.tolist()):
            nonce = (bytes(4) + step.to_bytes(8, "little")).hex()
            key = keys[j].numpy().tobytes().hex()
            assert torch.equal(drawn[i, j], by_openssl(key, nonce, tile)[0])


@pytest.mark.parametrize("package", [True, False])
@pytest.mark.parametrize("step", [0, 3, 2**63 - 1])
def test_without_openssl_tensors_draw_the_same(monkeypatch, package, step):
    sums = {"a": torch.randn(1000), "b": torch.randn(70_000), "c": torch.zeros(0)}
    expected = noised(sums, step=step)
    if package:  # whose OpenSSL is one for FIPS

        def cipher(*_):
            raise chacha.UnsupportedAlgorithm("")

        monkeypatch.setattr(chacha.ciphers, "Cipher", cipher)
    else:
        monkeypatch.setattr(chacha, "ciphers", None)
    oracle.assert_exact(noised(sums, step=step), expected, 0)


def test_a_tensor_past_the_last_block_of_a_key_takes_another_key():
    size = 2**35 + 3 * gaussian.TILE  # 2^32 blocks and some more
    start = 2**35 - 1000
    part = gaussian.Part((0, "a"), (size,), (start,), (2000,))
    noise = gaussian.gaussian_noise("f", Sensitivity(0.5), **AT)
    layout = gaussian._Layout(noise, {"a": part}, torch.device("cpu"), 2**15)
    drawn = torch.zeros(2000, dtype=torch.float64)
    for number, group in enumerate(layout.groups):
        normals = gaussian.normals(layout.words(number, 5)).view(-1)
        for piece in group:
            drawn[piece.entries] = normals[piece.places(drawn.device)]
            assert isinstance(piece.places(), slice)  # no places are formed
    place = ["noise", 0, "a", f"[{size}]", 2.0, 1.0]
    first, second = (streams.digest(KEY.tolist(), [*place, i], 32) for i in (0, 1))
    nonce = bytes(4) + (5).to_bytes(8, "little")
    words = [streams.chacha20(first, nonce, 2**32 - 128, 128)]
    words += [streams.chacha20(second, nonce, 0, 192)]
    expected = streams.normal(np.concatenate(words)).reshape(-1)[1024 - 1000 :][:2000]
    assert np.allclose(drawn, expected, rtol=0, atol=1e-14)


AT = {"key": KEY, "step": 5, "noise_multiplier": 2.0}


def test_no_two_streams_share_a_key():
    """Nor key and nonce: the nonce is the step, and nothing else."""
    keys = set()
    numbers = itertools.product((0.5, 1.0), (0.25, 0.5), (KEY, secret_key(seed=1)))
    runs = {(m, s, tuple(key.tolist())) for m, s, key in numbers}
    shapes = [(), (0,), (1,), (12,), (1, 2), (2, 1), (3, 4), (4, 3), (12, 1), (1, 12)]
    names = ["a", "b", "0", "a, 1", "[1]", "", "\ud800", "a\0"]
    count = 0
    for multiplier, sensitivity, key in sorted(runs):
        numbers = {"noise_multiplier": multiplier, "step": 0}
        key = torch.tensor(key, dtype=torch.uint8)
        noise = gaussian.gaussian_noise(
            "f", Sensitivity(sensitivity), key=key, **numbers
        )
        for entry, shape in itertools.product(
            itertools.product((0, 1, 11), names), shapes
        ):
            part = gaussian.Part(entry, shape, (0,) * len(shape), shape)
            layout = gaussian._Layout(noise, {entry: part}, torch.device("cpu"), 2**15)
            for piece in itertools.chain(*layout.groups):
                keys.add(piece.key)
                count += 1
    assert len(keys) == count == 8 * 24 * 9  # no key of a tensor without numbers
    others = [("batch", 0), ("loss", 0), ("noise", 0), ("noise", 0, "a")]
    for key in (KEY, secret_key(seed=1)):
        for tags in others:
            assert generators.fold_in(key, *tags).numpy().tobytes() not in keys


def test_a_run_makes_its_keys_once(monkeypatch):
    made, fold_in = [], generators.fold_in
    monkeypatch.setattr(
        generators, "fold_in", lambda *tags: made.append(tags) or fold_in(*tags)
    )
    held, sums = gaussian.Streams(), {"a": torch.zeros(7), "b": torch.zeros(3, 2)}

    def noise(step, key=KEY):
        options = {"noise_multiplier": MULTIPLIER, "key": key, "streams": held}
        return gaussian.gaussian_noise(
            "f", Sensitivity(SENSITIVITY), step=step, **options
        )

    for step in range(3):
        oracle.assert_exact(noise(step).added(sums), noised(sums, step=step), 0)
    assert len(made) == 2 + 3 * 2  # those of a call alone are not held
    other = secret_key(seed=1)
    oracle.assert_exact(noise(0, other).added(sums), noised(sums, key=other), 0)
    assert not pickle.loads(pickle.dumps(held))._layouts  # no secrets
    assert "key" not in repr(noise(0))


def test_a_graph_draws_the_words_of_a_long_sum():
    sums = {"a": torch.zeros(7), "b": torch.zeros(2**19 + 600)}
    options = {"noise_multiplier": MULTIPLIER, "key": KEY, "step": 3}
    noise = gaussian.gaussian_noise("f", Sensitivity(1.0), **options)
    oracle.assert_exact(noise.drawn(sums).advanced(sums)[0], noise.added(sums), 0)


def test_threads_may_share_a_run():
    held, sums = gaussian.Streams(), {"a": torch.zeros(200_000)}

    def at(step, streams):
        options = {"noise_multiplier": MULTIPLIER, "key": KEY, "streams": streams}
        return gaussian.gaussian_noise("f", Sensitivity(1.0), step=step, **options)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda step: at(step, held).added(sums), range(24)))
    for step, each in enumerate(found):
        oracle.assert_exact(each, at(step, gaussian.Streams()).added(sums), 0)


# Pairs of normal numbers, by the formula of Box and Muller.


def words(first, second):
    pair = torch.tensor([first, second], dtype=torch.uint64).view(torch.int64)
    return pair.view(2, 1)


def made(words, host):
    if not host:
        return torch.stack([*gaussian.normals(words)[:, 0]])
    memory = gaussian.Memory.of(1)
    memory.words.copy_(words)
    return gaussian.normals_of_host(memory.words, memory)[0, :, 0]


def test_the_two_numbers_of_a_pair_are_normal_and_independent():
    sums = {"a": torch.zeros(2**20, dtype=torch.float64)}
    noise = noised(sums, noise_multiplier=2.0, sensitivity=0.5)["a"]
    first, second = noise = noise.view(-1, 2, 256).movedim(1, 0).reshape(2, -1)
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


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("sign", [0, 2**63])
@pytest.mark.parametrize(
    ("first", "last", "radius"),
    [
        (0, 2**11 - 1, 2.0**-74),
        (0, 2**11 - 2, 2.0**-73),
        (0, 0, 2.0**-63),
        (1, 5, 2.0**-63 * (1 + (2**11 - 5) / 2**11)),
        (2**40 + 1, 77, 2.0**-63 * (2**40 + 1 + (2**11 - 77) / 2**11)),
        (2**62, 0, 0.5),
        (2**63 - 1, 0, 1.0),
    ],
)
def test_a_number_near_zero_has_bits_of_the_other_word(first, last, radius, sign, host):
    cosine, sine = made(words(sign + first, last), host)
    assert float(cosine) == pytest.approx(math.sqrt(-2 * math.log(radius)), rel=1e-15)
    assert float(sine) == 0


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    "turn", [0, 2**50, 2**51, 2**52 - 1, 2**52, 3 * 2**51, 2**53 - 1]
)
@pytest.mark.parametrize("under", [2**52, 2**63 - 2**11])
def test_the_ends_of_uniform_numbers_give_numbers_on_the_circle(turn, under, host):
    """A right angle has no tangent."""
    radius = math.sqrt(-2 * math.log((under + 1) * 2.0**-63))
    angle = 2 * math.pi * turn * 2.0**-53
    found = made(words(under, turn << 11), host)
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    assert np.allclose(found, expected, rtol=0, atol=2e-14)


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
        blocks = []
        part = gaussian.Part((0, "a"), shape, tuple(low), sizes)
        for block, entries in gaussian.overlaps(part, size):
            places = gaussian.places_of(part, np.arange(entries.start, entries.stop))
            assert set(places // size) == {block}
            found[entries] = places
            blocks.append(block)
        expected = whole[tuple(map(slice, low, high))].reshape(-1)
        assert np.array_equal(found, expected)
        # No block is drawn twice, or for nothing.
        assert blocks == sorted(set((expected // size).tolist()))


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
    "several blocks": ((3,), "0", (5, 2**14)),
    "columns of several blocks": ((3,), "1", (5, 2**14)),
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


def test_a_missing_package_is_named_once():
    code = "import sys; sys.modules['cryptography'] = None; import vgrad.dp, vgrad.cli"
    run = [sys.executable, "-W", "default", "-c", code]
    found = subprocess.run(run, capture_output=True, text=True, check=True).stderr
    assert found.count("UserWarning: vgrad.dp: expected the package cryptography") == 1
    assert "Run pip install cryptography." in found

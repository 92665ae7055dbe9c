import numpy as np
import pytest
import torch

from tests import streams
from vgrad import generators
from vgrad.generators import fold_in, secret_key, stream, torch_seed


def test_keys_come_from_the_operating_system(monkeypatch):
    keys = [secret_key() for _ in range(5)]
    assert all(key.dtype == torch.uint8 and key.shape == (32,) for key in keys)
    assert len({bytes(key.tolist()) for key in keys}) == 5
    monkeypatch.setattr("secrets.token_bytes", lambda size: bytes(range(size)))
    assert secret_key().tolist() == list(range(32))


def test_keys_of_a_seed_are_hashes_of_seed_and_member():
    keys = [secret_key(seed=seed, member=i) for seed in range(3) for i in range(3)]
    keys.append(secret_key(seed=2**40))
    assert len({bytes(key.tolist()) for key in keys}) == 10
    expected = streams.digest([], ["seed", 1, 2], 32)
    assert secret_key(seed=1, member=2).tolist() == expected


@pytest.mark.parametrize("name", ["seed", "member"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_seed_that_is_not_whole_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"secret_key\({name}="):
        secret_key(**{name: value})


PLACES = [(), ("a",), ("a", 1), ("a", "1"), ("a1",), ("a", 1.0), (1, "a"), ('a", "b',)]
PLACES += [("a", "b"), ("a", "b", ""), ("\U0001f600",), ("\ud83d\ude00",)]


def test_no_two_places_share_a_stream():
    key = secret_key(seed=0)
    found = {stream(key, *place) for place in PLACES}
    found |= {stream(secret_key(seed=1), *place) for place in PLACES}
    found |= {stream(fold_in(key, "a"), *place) for place in PLACES}
    assert len(found) == 3 * len(PLACES)
    assert all(0 < each < 2**128 for each in found)


def test_streams_are_keyed_hashes():
    key = secret_key(seed=0)
    expected = streams.digest(key.tolist(), ["noise", 3], 16)
    assert stream(key, "noise", 3) == int.from_bytes(bytes(expected), "little")
    assert fold_in(key, 0.5, 2).tolist() == streams.digest(key.tolist(), [0.5, 2], 32)


def test_the_same_numbers_come_block_by_block():
    draws = generators.drawn(
        lambda source, out: source.standard_normal(out=out), 7, 3 * 2**16 + 5
    )
    for number, count in enumerate([2**16] * 3 + [5]):
        start = number * 2**16
        expected = generators.block(7, number).standard_normal(count)
        assert np.array_equal(draws[start : start + count], expected)


def test_seeds_of_torch_repeat_for_a_place_and_differ_between_them():
    key = secret_key(seed=0)
    places = [("loss", 1), ("loss", 2), ("batch", 1)]
    found = [torch_seed(key, *place) for place in places]
    assert len(set(found)) == 3
    assert found == [torch_seed(key, *place) for place in places]
    expected = streams.digest(key.tolist(), ["loss", 1], 16)[:8]
    assert found[0] == int.from_bytes(bytes(expected), "little")
    assert all(2**48 < each < 2**64 for each in found)


def test_a_key_is_refused_by_what_it_is():
    with pytest.raises(TypeError, match=r"got a tensor of torch\.float32 \(32,\)"):
        stream(torch.zeros(32), "a")
    with pytest.raises(TypeError, match="got a int"):
        fold_in(5, "a")


def test_keys_of_samples_are_those_of_splitmix():
    # The first numbers of https://prng.di.unimi.it/splitmix64.c from the seed 0.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = generators.sample_keys(0, 0, 3).tolist()
    assert [each % 2**64 for each in found] == known


def test_streams_of_samples_differ_by_sample_and_place():
    keys = generators.sample_keys(0, 0, 100)
    found = torch.stack([generators.fold_in(keys, place) for place in range(50)])
    assert len(found.unique()) == 5000
    numbers = generators.random_bits(found[0], 1000)
    assert len(numbers.unique()) == 100_000
    assert torch.equal(generators.random_bits(found[0, 3:5], 70), numbers[3:5, :70])
    assert torch.equal(keys, generators.sample_keys(0, 0, 100))  # left as they were

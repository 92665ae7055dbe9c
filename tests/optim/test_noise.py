"""Noise: its generator, its distribution, and what it follows from."""

import copy
import math

import pytest
import torch

from tests.optim.problems import double, perceptron
from tests.oracle import assert_exact
from vgrad.optim import add_noise, clipping


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2,
         [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)  # fmt: skip
def test_the_generator_gives_the_known_answers_of_its_authors(counter, key, expected):
    words = clipping.philox(
        tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key)
    )
    assert [int(word) for word in words] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_normal(dtype):
    size = 100_003
    zeros = {"w": torch.zeros(size, dtype=dtype)}
    tx = add_noise(1.0, 0.0, seed=0)
    draws = tx.update(zeros, tx.init(zeros))[0]["w"].double().sort().values
    # Kolmogorov's distance, whose 1e-6 quantile is 2.7 over the root of the size.
    uniform = torch.special.ndtr(draws)
    steps = torch.arange(size + 1, dtype=torch.float64) / size
    distance = torch.maximum(uniform - steps[:-1], steps[1:] - uniform).max()
    assert distance < 2.7 / math.sqrt(size)
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


def test_the_variance_falls_as_in_the_paper():
    params = {"w": torch.zeros(20_000)}
    tx = add_noise(0.3, 0.55, seed=5)
    state = tx.init(params)
    for t in range(1, 6):
        updates, state = tx.update(params, state)
        expected = math.sqrt(0.3 / t**0.55)
        assert updates["w"].std().item() == pytest.approx(expected, rel=0.03)


def test_noise_goes_on_from_the_state_alone():
    params, _ = perceptron()
    tx = add_noise(1.0, 0.55, seed=5)
    _, state = tx.update(params, tx.init(params))
    restored = copy.deepcopy(state)
    expected = tx.update(params, state)
    assert_exact(add_noise(1.0, 0.55, seed=6).update(params, restored), expected, 0)
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    drawn, _ = tx.update(zeros, state)
    assert_exact(expected[0], {key: params[key] + drawn[key] for key in params}, 1e-12)


def test_members_with_seeds_of_their_own_have_noise_of_their_own():
    zeros = {"w": torch.zeros(3, 5, dtype=torch.float64)}
    seeds = torch.tensor([1, 2, 1])

    def init(seed, params):
        return add_noise(1.0, 0.5, seed=seed).init(params)

    state = torch.vmap(init)(seeds, zeros)
    tx = add_noise(1.0, 0.5, seed=9)
    updates, _ = torch.vmap(tx.update)(zeros, state)
    for member, seed in enumerate(seeds.tolist()):
        alone = {"w": torch.zeros(5, dtype=torch.float64)}
        expected, _ = tx.update(alone, init(seed, alone))
        assert_exact({"w": updates["w"][member]}, expected, 1e-12)
    assert not torch.equal(updates["w"][0], updates["w"][1])


def test_no_variance_is_no_noise_exactly():
    params, _ = perceptron()
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    for eta in (0.0, double(0.0)):
        tx = add_noise(eta, 0.55, seed=5)
        assert_exact(tx.update(zeros, tx.init(zeros))[0], zeros, 0)
        assert_exact(tx.update(params, tx.init(params))[0], params, 0)

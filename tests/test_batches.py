import pytest
import torch

import vgrad
from vgrad import batches
from vgrad.persample.engine import Problem, saved_bytes

PARAMS = {"w": torch.ones(1000)}


def loss(params, buffers, x):
    return (params["w"] * x).exp().sum()


def test_a_chunk_takes_what_fits_into_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(
        batches, "_free_bytes", lambda device: 2 * 100 * (12_000 + 2_000)
    )
    assert batches.fitting(PARAMS, 1_000, torch.device("cpu")) == 100
    monkeypatch.setattr(batches, "_free_bytes", lambda device: 0)
    assert batches.fitting(PARAMS, 1_000, torch.device("cpu")) == 1


def test_the_free_memory_of_this_machine_is_plausible():
    assert 2**24 < batches._free_bytes(torch.device("cpu")) < 2**50


def test_automatic_chunks_follow_the_memory(monkeypatch):
    x = torch.zeros(10, 1)
    per_sample = 3 * 4_000 + 2 * 4_004
    monkeypatch.setattr(batches, "_free_bytes", lambda device: 2 * 4 * per_sample)
    seen = []
    original = batches.chunks
    monkeypatch.setattr(
        batches, "chunks", lambda size, step: seen.append(step) or original(size, step)
    )
    vgrad.clipped_grad(loss, max_norm=1.0, chunk_size="auto")(PARAMS, {}, x)
    assert seen == [4]


def test_the_bytes_kept_for_the_backward_pass_are_counted():
    problem = Problem("test", loss).on(PARAMS, {}, (torch.zeros(3, 1),))
    # exp keeps its result, and the product keeps x for the gradient of w.
    assert saved_bytes(problem) == 4_000 + 4


def test_measuring_memory_draws_no_random_numbers():
    def drops(params, buffers, x):
        return (torch.nn.functional.dropout(x, 0.5) * params["w"]).sum()

    state = torch.get_rng_state()
    x = torch.ones(3, 1000)
    options = {"randomness": "different", "chunk_size": "auto"}
    found = vgrad.per_sample_grad(drops, **options)(PARAMS, {}, x)["w"]
    torch.set_rng_state(state)
    plain = vgrad.per_sample_grad(drops, randomness="different")(PARAMS, {}, x)["w"]
    assert torch.equal(found, plain)


def test_automatic_chunks_are_refused_inside_transforms():
    compute = vgrad.per_sample_norm(loss, chunk_size="auto")
    x = torch.zeros(2, 3, 1)
    with pytest.raises(ValueError, match='chunk_size="auto".*expected a number'):
        torch.vmap(lambda x: compute(PARAMS, {}, x))(x)

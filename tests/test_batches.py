from collections import UserDict
from types import MappingProxyType

import pytest
import torch
from torch.nn import functional as F

import vgrad
from vgrad import batches, training
from vgrad.persample.engine import Call, Inputs, saved_bytes

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
    problem = Call("test", loss).on(Inputs(PARAMS, {}, (torch.zeros(3, 1),)))
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


class Scaled(torch.nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale.unsqueeze(-1)


FMODEL, WEIGHTS, BUFFERS = vgrad.make_functional_with_buffers(Scaled(3, 2))
ONE, ALL = (
    make(FMODEL, F.cross_entropy) for make in (vgrad.sample_loss, vgrad.batch_loss)
)
STACKED, MEMBERS, SHARED = vgrad.stack([Scaled(3, 2), Scaled(3, 2)])
TX = vgrad.optim.sgd(0.1)
STATE = training.TrainState.create(TX, WEIGHTS, BUFFERS)


def weighted(batch):
    return vgrad.weighted_grad(ONE)(torch.ones(4), WEIGHTS, BUFFERS, *batch)


def ensemble(batch):
    members = vgrad.batch_loss(STACKED, F.cross_entropy)
    return vgrad.ensemble_grad(members)(MEMBERS, SHARED, *batch).grads


READERS = {
    **{
        strategy: lambda batch, s=strategy: vgrad.per_sample_grad(ONE, strategy=s)(
            WEIGHTS, BUFFERS, *batch
        )
        for strategy in ("recorded", "vmap", "loop")
    },
    "weighted_grad": weighted,
    "ensemble_grad": ensemble,
    "step of a batch": lambda batch: training.train_step(ALL, TX)(STATE, *batch)[0][0],
    "step of samples": lambda batch: training.train_step(ONE, TX)(STATE, *batch)[0][0],
    "batch loss": lambda batch: {"value": ALL(WEIGHTS, BUFFERS, *batch)},
    "compiled": lambda batch: (
        vgrad.compile(vgrad.clipped_grad(ONE, max_norm=1.0), backend="replay")(
            WEIGHTS, BUFFERS, *batch
        ).grads
    ),
}


@pytest.mark.parametrize("kind", [UserDict, MappingProxyType])
@pytest.mark.parametrize("reader", READERS)
def test_any_mapping_is_read_as_a_dictionary(reader, kind):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 3), "scale": torch.rand(4)}
    target = torch.randint(0, 2, (4,))
    expected = READERS[reader]((inputs, target))
    found = READERS[reader]((kind(inputs), target))
    assert {n: v.tolist() for n, v in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }

"""What a rank holds of parameters that are cut among ranks."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import vgrad
from tests.distributed.nets import Language
from tests.distributed.processes import Processes, mesh_of
from tests.losses import Peak
from vgrad import optim
from vgrad.distributed import data_parallel, shard


def next_tokens(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _bytes(size, sizes, passes):
    mesh, _ = mesh_of(size)
    torch.manual_seed(0)
    fmodel, params, _ = vgrad.make_functional_with_buffers(Language(*sizes, heads=4))
    loss = vgrad.sample_loss(fmodel, next_tokens)
    tokens = torch.randint(sizes[0], (1, sizes[-1]))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded", passes=passes)
    clipped = data_parallel(clipped, mesh)
    one = 4 * sum(value.nbytes for value in params.values())  # with sums and moments
    tx = optim.adamw(1e-3)
    params = shard({name: value.detach() for name, value in params.items()}, mesh)
    with Peak() as counted, torch.no_grad():
        counted.count([value.to_local() for value in params.values()])
        state = tx.init(params)
        for _ in range(2):
            grads = clipped(params, {}, tokens, tokens)
            params, state = optim.step(tx, grads.grads, state, params, donate=True)
        assert all(isinstance(value, DTensor) for value in params.values())
        counted.count(torch.zeros(()))
    return counted.now / one, counted.most / one


def _check(processes, sizes):
    for passes in (1, 2):
        for rest, peak in processes.run(_bytes, 4, sizes, passes):
            assert rest <= 0.26
            assert peak <= 0.42


def test_memory_is_that_of_the_parts_and_of_one_parameter(ranks):
    _check(ranks(4), (2043, 128, 3, 4))


@pytest.mark.large
def test_so_it_is_for_gpt2_small():
    processes = Processes(4, timeout=600)
    try:
        _check(processes, (50257, 768, 12, 16))
    finally:
        processes.stop()

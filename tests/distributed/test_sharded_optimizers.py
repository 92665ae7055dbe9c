"""Optimizers on parameters that are cut among ranks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import oracle
from vgrad import optim
from vgrad.distributed import gather, shard
from vgrad.tree import tensors

OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "asgd": lambda: optim.asgd(0.1),
    "adamw": lambda: optim.adamw(lambda step: 0.1 / (1 + step), amsgrad=True),
    "adadelta": lambda: optim.adadelta(0.1),
    "adagrad": lambda: optim.adagrad(0.1),
    "rmsprop": lambda: optim.rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": lambda: optim.rprop(0.1),
    "lion": lambda: optim.lion(0.1),
    "lamb": lambda: optim.lamb(0.1),
    "lars": lambda: optim.lars(0.1),
    "adafactor": lambda: optim.adafactor(0.1),
    "adamax": lambda: optim.adamax(0.1),
    "nadam": lambda: optim.nadam(0.1),
    "radam": lambda: optim.radam(0.1),
    "schedule_free": lambda: optim.schedule_free_adamw(0.1),
    "lookahead": lambda: optim.lookahead(optim.sgd(0.1)),
    "multi_steps": lambda: optim.multi_steps(optim.adam(0.1), 2),
    "clipped": lambda: optim.chain(
        optim.zero_nans(),
        optim.clip_by_value(0.9),
        optim.adaptive_grad_clip(0.05),
        optim.centralize(),
        optim.clip_by_block_rms(0.5),
        optim.clip_by_global_norm(0.01),
        optim.sgd(0.1),
        optim.ema_parameters(0.9),
    ),
    "muon": lambda: optim.partition(
        {
            "matrix": optim.muon(0.1),
            "*": optim.apply_if_finite(optim.adam(0.1), max_consecutive_errors=1),
        },
    ),
}


def _gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    grads = {n: torch.randn(p.shape, generator=generator) for n, p in params.items()}
    grads["vector"][0] = torch.nan if step == 1 else 0.0
    return grads


def _whole(tree):
    found = [t for t in tensors(tree) if isinstance(t, DTensor)]
    placed = {t.placements for t in found}
    assert placed <= {(Shard(0),), (Replicate(),)}, placed
    leaves = tensors(tree)
    named = {str(number): each for number, each in enumerate(leaves)}
    return gather(named, found[0].device_mesh) if found else named


def _trained(size, name):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    whole = {
        "matrix": torch.randn(5, 4),
        "images": torch.randn(8, 3, 2, 2),
        "vector": torch.randn(3),
        "one": torch.randn(1),
        "scale": torch.tensor(0.7),
    }
    parts = shard(whole, mesh)
    tx = OPTIMIZERS[name]()
    state, state_of_parts = tx.init(whole), tx.init(parts)
    for step in range(3):
        grads = _gradients(whole, step)
        with torch.no_grad():
            donate = step == 2
            whole, state = optim.step(tx, grads, state, whole, donate=donate)
            grads = shard(grads, mesh)
            parts, state_of_parts = optim.step(
                tx, grads, state_of_parts, parts, donate=donate
            )
    oracle.assert_exact(gather(parts, mesh), whole, 1e-6)
    found = _whole(state_of_parts)
    exact = {str(number): each for number, each in enumerate(tensors(state))}
    oracle.assert_exact(found, exact, 1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_steps_of_one_process(ranks, name):
    ranks(4).run(_trained, 4, name)

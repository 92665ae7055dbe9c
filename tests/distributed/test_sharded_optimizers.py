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
    "noisy": lambda: optim.chain(optim.add_noise(0.1, 0.55, seed=3), optim.adam(0.1)),
    "injected": lambda: optim.inject_hyperparams(optim.adafactor, lr=0.1),
    "muon": lambda: optim.partition(
        {
            "matri*": optim.muon(0.1),
            "*": optim.apply_if_finite(optim.adam(0.1), max_consecutive_errors=1),
        }
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
        "matrix of one row": torch.randn(1, 6),
        "matrix of none": torch.randn(0, 3),
        "images": torch.randn(8, 3, 2, 2),
        "image": torch.randn(1, 3, 2, 2),
        "vector": torch.randn(3),
        "one": torch.randn(1),
        "scale": torch.tensor(0.7),
    }
    parts = shard(whole, mesh)
    places = {each: part.placements for each, part in parts.items()}
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
        assert {each: part.placements for each, part in parts.items()} == places
    oracle.assert_exact(gather(parts, mesh), whole, 1e-6)
    found = _whole(state_of_parts)
    exact = {str(number): each for number, each in enumerate(tensors(state))}
    oracle.assert_exact(found, exact, 1e-6)


def _noised(size, dtype):
    """Return what noise adds to sharded gradients, and to whole ones; in two steps."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    shapes = {"a": (5, 4), "row": (1, 6), "zero": (0, 3), "one": (3,), "scale": ()}
    whole = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    parts, tx = shard(whole, mesh), optim.add_noise(0.1, 0.55, seed=3)
    state, own = tx.init(whole), tx.init(parts)
    for _ in range(2):
        expected, state = tx.update(whole, state)
        found, own = tx.update(parts, own)
    assert all(found[name].placements == parts[name].placements for name in parts)
    found = gather(found, mesh)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_same_bits_on_any_number_of_ranks(ranks, dtype):
    """Tensors that come along, and the number of ranks, change none."""
    first, *others = (
        found for size in (2, 4) for found in ranks(size).run(_noised, size, dtype)
    )
    for found in others:
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_steps_of_one_process(ranks, name):
    ranks(4).run(_trained, 4, name)

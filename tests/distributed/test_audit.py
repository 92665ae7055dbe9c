"""Audits of a private step of all ranks, and of one without noise on a rank."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import optim
from vgrad.distributed import data_parallel, shard
from vgrad.dp import Plan, noising
from vgrad.training import TrainState, private_step


def audited(mesh, kind, broken=None):
    """Audit the step of digits at mu 2, on ranks or in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    more = {"noise": noising.band_mf(3)} if kind == "banded" else {}
    plan, tx = Plan(1200, 0.2, math.sqrt(2) / 2, 1.0, 9, 1e-4, **more), optim.sgd(0.1)
    tx = optim.scale_then_privatize(tx) if kind == "scaled" else tx
    step = private_step(loss, tx, plan)
    step = step if kind == "one" else data_parallel(step, mesh)
    step = vgrad.compile(step) if kind == "compiled" else step
    uneven = {n: torch.arange(1.0, x.numel() + 1).view_as(x) for n, x in params.items()}
    if kind in ("sharded", "banded", "scaled"):
        params, uneven = shard(params, mesh), shard(uneven, mesh)
    state = TrainState.create(tx, params, buffers, seed=1)
    state = state._replace(optimizer=tx.update(uneven, state.optimizer)[1])
    if mesh.get_rank() == broken:
        gaussian_noise = vgrad.dp.plan.gaussian_noise

        def silent(*arguments, **numbers):
            noise = gaussian_noise(*arguments, **numbers)
            return dataclasses.replace(noise, multiplier=0.0)

        vgrad.dp.plan.gaussian_noise = silent
    try:
        result = plan.audit(step, state, canaries=1200, significance=0.01, seed=2)
    finally:
        if mesh.get_rank() == broken:
            vgrad.dp.plan.gaussian_noise = gaussian_noise
    return result


@pytest.mark.parametrize(
    "kind",
    [
        "whole",
        *(
            pytest.param(k, marks=pytest.mark.more)
            for k in ("compiled", "banded", "scaled")
        ),
    ],
)
def test_an_audit_on_ranks_is_one_of_all_of_them(ranks, kind):
    results = ranks(2).on_mesh(audited, kind)
    [plain, _] = ranks(2).on_mesh(audited, "one")
    for result in results:
        assert not result.exceeded
        assert 0.65 < result.mu.value / result.claimed_mu < 1
        assert torch.equal(result.included, results[0].included)
        if kind in ("whole", "compiled"):  # else canaries are others
            torch.testing.assert_close(
                result.included, plain.included, atol=1e-3, rtol=0
            )


def test_a_rank_without_noise_is_seen_in_its_shard(ranks):
    fine = ranks(4).on_mesh(audited, "sharded")[0]
    assert not fine.exceeded
    broken = ranks(4).on_mesh(partial(audited, broken=2), "sharded")[0]
    assert broken.exceeded
    assert broken.claimed_mu == pytest.approx(2)
    bounds = {name: each.value for name, each in broken.groups.items()}
    assert broken.mu.value == bounds["of shard 2"] > 4
    assert max(bounds[f"of shard {n}"] for n in (0, 1, 3)) < 2

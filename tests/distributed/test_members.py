"""Ensembles whose members are cut among ranks: as if all were in one place."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import vgrad
from vgrad.distributed import (
    all_members,
    alone,
    member_parallel,
    member_range,
    own_members,
)
from vgrad.ensemble import (
    ensemble_clipped_grad,
    ensemble_forward,
    ensemble_grad,
    for_members,
    share,
)
from vgrad.training import (
    EnsembleState,
    ensemble_train_step,
)
from vgrad.tree import state_dict

E, B = 5, 6


def mesh_of(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("members",))


def net(drop=0.0):
    norm = nn.BatchNorm1d(4)
    # A bias would have gradients that are rounding alone, which Adam makes large.
    first = nn.Linear(3, 4, bias=False)
    return nn.Sequential(first, norm, nn.Dropout(drop), nn.Linear(4, 2))


def ensemble(drop=0.0, shared=()):
    """Return a function of one member, and all of them in float64."""
    made = vgrad.init_ensemble(lambda: net(drop).double(), E, seed=1)
    return made[0], *(share(*made[1:], shared) if shared else made[1:])


def batch():
    source = torch.Generator().manual_seed(3)
    x = torch.randn(E, B, 3, generator=source, dtype=torch.float64)
    return x, torch.randn(B, 2, generator=source, dtype=torch.float64)


def same(found, expected, tolerance=1e-12):
    found, expected = state_dict(found), state_dict(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True
        )


def trained(mesh, drop, shared, options, *, steps=5, compiled=False):
    """Take steps on a mesh; without one, in one place by the plain step."""
    fmodel, params, buffers = ensemble(drop, shared)
    own = (lambda x: own_members(x, mesh)) if mesh else lambda x: x
    rates = own(torch.linspace(0.01, 0.2, E, dtype=torch.float64))
    common = vgrad.optim.sgd(0.1, momentum=0.5) if shared else None
    tx = for_members(vgrad.optim.adam, lr=rates, shared=shared, shared_tx=common)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    step = ensemble_train_step(loss, tx, in_dims=(0, None), shared=shared, **options)
    # The state of the optimizer needs the rates of all members to begin with.
    whole = for_members(
        vgrad.optim.adam,
        lr=torch.linspace(0.01, 0.2, E, dtype=torch.float64),
        shared=shared,
        shared_tx=common,
    )
    state = EnsembleState.create(whole, params, buffers, shared=shared, seed=7)
    active = torch.tensor([True, True, False, True, True])
    state = state._replace(active=active)
    x, y = batch()
    if mesh:
        state = own_members(state, mesh, shared=shared)
        step = member_parallel(step, mesh, members=E)
    step = vgrad.compile(step, fallback="error") if compiled else step
    losses = []
    for turn in range(steps):
        state, metrics = step(state, own(x + turn), y)
        losses.append(metrics["loss"])
    found = {"state": state, "loss": torch.stack(losses, 1)}
    return all_members(found, mesh, shared=shared) if mesh else found


SHARED = ("0.weight", "1.bias")
CASES = {
    "members alone": ((0.0, (), {}), None),
    "donated": ((0.0, (), {"donate": True}), None),
    "a part shared": ((0.0, SHARED, {}), None),
    "one mask": ((0.5, (), {"randomness": "same", "strategy": "hybrid"}), None),
    "masks": ((0.5, (), {}), "alone"),
    "masks in a loop": ((0.5, SHARED, {"strategy": "loop"}), "alone"),
}


def _trained(size, cases):
    return {name: trained(mesh_of(size), *case) for name, (case, _) in cases.items()}


def test_steps_are_those_of_one_process(some):
    results = some.run(_trained, some.size, CASES)
    for name, (case, place) in CASES.items():
        if place == "alone":
            with alone("members") as mesh:
                expected = trained(mesh, *case)
        else:
            expected = trained(None, *case)
        for found in results:
            same(found[name], expected)
    masks = results[0]["masks"]["state"].params, trained(None, 0.5, (), {})["state"]
    assert not torch.equal(masks[0]["0.weight"], masks[1].params["0.weight"])


def _functions(mesh, drop):
    """Call each function in training mode, with masks."""
    fmodel, params, buffers = ensemble(drop, SHARED)
    which = own_members((params, buffers), mesh, shared=SHARED)
    x, y = batch()
    own = own_members(x, mesh)
    torch.manual_seed(11)  # that of the first rank counts
    options = {"in_dims": 0, "shared": SHARED, "randomness": "different"}
    forward = ensemble_forward(fmodel, **options)
    forward = member_parallel(forward, mesh, members=E)
    output = forward(*which, own), forward(*which, own)
    left = forward.with_buffers(*which, own)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    options["in_dims"] = (0, None)
    gradient = member_parallel(ensemble_grad(loss, **options), mesh, members=E)
    grads = gradient(*which, own, y)
    drawn = torch.rand(3) if mesh.get_local_rank() == 0 else torch.zeros(3)
    plain = vgrad.sample_loss(lambda p, b, x: F.dropout(x @ p["w"], drop), F.mse_loss)
    clipped = ensemble_clipped_grad(
        plain, max_norm=1.0, in_dims=(0, None), randomness="different"
    )
    w = own_members(torch.ones(E, 3, 2, dtype=torch.float64), mesh)
    sums = member_parallel(clipped, mesh, members=E)({"w": w}, {}, own, y)
    start = member_range(E, mesh).start
    key = torch.arange(32, dtype=torch.uint8)
    noised = clipped.add_noise(
        sums.grads, noise_multiplier=1.0, key=key, step=0, first=start
    )
    lists = output, left[0], grads.losses, sums.norms, noised
    names = [name for name in {**params, **buffers} if name in SHARED]
    entries = [grads.grads, grads.buffers, left[1]]
    mine = [{n: x for n, x in each.items() if n not in names} for each in entries]
    common = {name: grads.grads[name] for name in names}
    return all_members((lists, mine), mesh), common, drawn


def _called(size):
    return _functions(mesh_of(size), 0.5)


def test_functions_are_those_of_one_process(some):
    with alone("members") as mesh:
        expected = _functions(mesh, 0.5)
    (first, second), *_ = expected[0][0]
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    for rank, found in enumerate(some.run(_called, some.size)):
        same(found[:2], expected[:2])
        assert rank or torch.equal(found[2], expected[2])

"""Two ranks on the device compute what one process computes on the host."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.accelerator import device, ranks
from tests.distributed.processes import Processes
from tests.golden import calls
from vgrad.distributed import (
    data_parallel,
    gather,
    gather_members,
    local_batches,
    shard,
    shard_members,
    single_process_mesh,
)

pytestmark = pytest.mark.more
STARTS_PROCESSES = True
"""Of its own, from the process of pytest."""

begun = partial(calls.begun, tx=vgrad.optim.adamw(1e-2), evaluated=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    processes = Processes(2)
    path = str(tmp_path_factory.mktemp("ranks") / "store")
    processes.run(ranks.join, path)
    yield processes
    processes.stop()


def moved(where, tree):
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(where), tree)


def functional():
    """Without dropout: ranks draw from keys of samples, one process does not."""
    model = calls.net().eval()
    return vgrad.make_functional_with_buffers(model, disable_autograd_tracking=True)


def quantity(name, mesh, place):
    fmodel, params, buffers = functional()
    loss = calls.of_sample(fmodel)
    transform = calls.QUANTITIES[name](loss, chunk_size=2)
    batch, weights = calls.data(), calls.WEIGHTS
    if mesh is not None:
        transform = data_parallel(transform, mesh)
        own = slice(0, 2) if mesh.get_local_rank("dp") == 0 else slice(2, None)
        batch, weights = tuple(part[own] for part in batch), weights[own]
    given = (params, buffers, *batch)
    given = (weights, *given) if name == "weighted" else given
    result = transform(*place(given))
    return result._replace(signal_to_noise={}) if name == "moments" else result


def private(mesh, place, shards=False):
    def placed(entries):
        params, buffers = place(entries)
        sharded = shards and mesh is not None
        return shard(params, mesh) if sharded else params, buffers

    step, state = begun("private", place=placed, randomness="error")
    batches = vgrad.dp.Plan(**calls.PLAN).sampler(state)
    if mesh is not None:
        step, batches = data_parallel(step, mesh), local_batches(batches, mesh)
    everything = calls.data(calls.SIZE)
    for _, rows in zip(range(3), batches, strict=False):
        state, _ = step(state, *place(tuple(part[rows] for part in everything)))
    return gather(state.params, mesh)


def plain(mesh, place):
    step, state = begun("samples", place=place)
    batch = calls.data()
    if mesh is not None:
        step = data_parallel(step, mesh)
        own = slice(0, 2) if mesh.get_local_rank("dp") == 0 else slice(2, None)
        batch = tuple(part[own] for part in batch)
    for _ in range(2):
        state, _ = step(state, *place(batch))
    return state.params


def members(mesh, place):
    step, state = begun("members", place=place)
    if mesh is not None:
        state = shard_members(state, mesh, axis="dp")
    for _ in range(2):
        state, _ = step(state, *place(calls.data()))
    if mesh is not None:
        state = gather_members(state, mesh, axis="dp")
    return state.params


CASES = {
    name: partial(quantity, name)
    for name in calls.QUANTITIES
    if name not in ("gram", "clipped, two passes")
}
CASES |= {
    "private steps": private,
    "private steps, sharded": partial(private, shards=True),
    "plain steps": plain,
    "members": members,
}


def on_ranks(name):
    mesh = init_device_mesh(device.NAME, (2,), mesh_dim_names=("dp",))
    found = CASES[name](mesh, partial(moved, device.NAME))
    kinds = {x.device.type for x in pytree.tree_leaves(found) if hasattr(x, "device")}
    return kinds, moved("cpu", found)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two, name):
    expected = CASES[name](None, partial(moved, "cpu"))
    for kinds, found in two.run(on_ranks, name):
        assert kinds == {device.NAME}
        oracle.assert_exact(found, expected, 1e-9)


def counted():
    mesh = init_device_mesh(device.NAME, (2,), mesh_dim_names=("dp",))
    fmodel, params, buffers = functional()
    compute = data_parallel(
        vgrad.clipped_grad(calls.of_sample(fmodel), max_norm=0.5), mesh
    )
    given = moved(device.NAME, (params, buffers, *calls.data()))
    counts = device.count(lambda: compute(*given))
    copies = [*counts.lines("to_host"), *counts.lines("to_device")]
    return counts.waits, [line.split(":")[0] for line in copies]


def test_a_call_copies_what_ranks_agree_on_alone(two):
    for waits, files in two.run(counted):
        assert waits <= 1
        assert set(files) == {"ranks.py"}


def alone():
    torch.distributed.destroy_process_group()
    with single_process_mesh("dp", device=device.NAME) as mesh:
        found = private(mesh, partial(moved, device.NAME))
        return mesh.device_type, moved("cpu", found)


def test_a_mesh_of_one_process(two):
    """The last test of these ranks, whose group has ended."""
    expected = private(None, partial(moved, "cpu"))
    for kind, found in two.run(alone):
        assert kind == device.NAME
        oracle.assert_exact(found, expected, 1e-9)

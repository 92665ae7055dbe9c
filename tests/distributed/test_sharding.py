"""Parameters cut among ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import vgrad
from tests import oracle
from vgrad.distributed import RankError, Ranks, gather, shard, sharding
from vgrad.persample.engine import Inputs


def a_mesh(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def tensors():
    """All sorts: even, uneven, fewer rows than ranks, none, no dimensions."""
    torch.manual_seed(0)
    return {
        "even": torch.randn(8, 3),
        "uneven": torch.randn(5, 2, 2, dtype=torch.float64),
        "short": torch.randn(1, dtype=torch.bfloat16),
        "transposed": torch.randn(3, 4).t(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


def _there_and_back(size):
    mesh, plain = a_mesh(size), tensors()
    parts = shard(plain, mesh)
    held = sum(each.to_local().numel() for each in parts.values())
    for name, part in parts.items():
        assert part.shape == plain[name].shape
        assert torch.equal(part.full_tensor(), plain[name])
    back = gather(parts, mesh)
    oracle.assert_exact(back, plain, 0)
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "dp"))
    oracle.assert_exact(gather(shard(plain, two), mesh), plain, 0)
    return held


def test_tensors_of_all_sorts_are_cut_and_put_together(some):
    held = some.run(_there_and_back, some.size)
    cut = sum(each.numel() for each in tensors().values()) - 1
    assert sum(held) == cut + some.size


def _refused(size):
    mesh, plain = a_mesh(size), tensors()
    with pytest.raises(RankError, match="same tensors on all ranks"):
        shard({"w": torch.full((2,), float(mesh.get_rank()))}, mesh)
    with pytest.raises(ValueError, match="names of the mesh's axes"):
        shard(plain, mesh, data="tp")
    with pytest.raises(TypeError, match="ordinary tensors, got a DTensor in 'even'"):
        shard(shard(plain, mesh), mesh)
    norms = vgrad.per_sample_norm(lambda params, buffers, x: x.sum())
    ranks, x = Ranks.of("test", mesh, "dp"), [torch.ones(2)]
    columns = shard(plain, mesh)["even"].redistribute(placements=[Shard(1)])
    with pytest.raises(ValueError, match=r"cut along their first .* got 'even'"):
        sharding.sharded_call(norms, ranks, Inputs({"even": columns}, {}, x))
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "dp"))
    other = DTensor.from_local(plain["even"], two, [Replicate(), Replicate()])
    params = {"a": shard(plain, mesh)["even"], "b": other}
    with pytest.raises(ValueError, match="one mesh with one axis, got 'b'"):
        sharding.sharded_call(norms, ranks, Inputs(params, {}, x))
    assert gather(plain, mesh) == plain


def test_what_is_cut_in_another_way_is_refused(ranks):
    ranks(2).run(_refused, 2)


def _fully_sharded(size):
    mesh = a_mesh(size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    _, plain, _ = vgrad.make_functional_with_buffers(model)
    plain = {name: value.detach().clone() for name, value in plain.items()}
    own = shard(plain, mesh)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    theirs = {name: value.detach() for name, value in model.named_parameters()}
    assert theirs.keys() == own.keys() == model.state_dict().keys()
    oracle.assert_exact(gather(theirs, mesh), plain, 0)
    for name, value in own.items():
        assert torch.equal(value.to_local(), theirs[name].to_local())
    model.load_state_dict({name: 2 * value for name, value in own.items()})
    oracle.assert_exact(
        gather(dict(model.named_parameters()), mesh),
        {name: 2 * value for name, value in plain.items()},
        0,
    )


def test_parameters_come_from_fully_sharded_modules_and_go_back(some):
    some.run(_fully_sharded, some.size)

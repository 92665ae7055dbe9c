"""Per-sample transforms of parameters that are cut among ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import oracle
from tests.distributed import nets
from vgrad.distributed import RankError, Ranks, gather, shard, sharding
from vgrad.persample.engine import Inputs

PARTS = {2: (3, 4), 4: (2, 0, 4, 1)}


def here(size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    return mesh, Ranks.of("test", mesh, "dp")


def own(ranks, value):
    """Return the part of a rank."""
    sizes = PARTS[ranks.size]
    start = sum(sizes[: ranks.rank])
    return value[start : start + sizes[ranks.rank]]


def check(size, loss, params, buffers, batch, *, tolerance=1e-12, **options):
    """Compare with one process."""
    mesh, ranks = here(size)
    clipped = vgrad.clipped_grad(loss, **{"max_norm": 0.5, **options})
    parts = shard(params, mesh), shard(buffers, mesh)
    inputs = Inputs(*parts, [own(ranks, each) for each in batch])
    found = sharding.sharded_call(clipped, ranks, inputs)
    exact = clipped(params, buffers, *batch)
    for name, value in found.grads.items():
        assert value.placements == parts[0][name].placements
        assert value.to_local().shape == parts[0][name].to_local().shape
    assert found.clipped == exact.clipped
    assert found.nonfinite == exact.nonfinite
    oracle.assert_exact(gather(found.grads, mesh), exact.grads, tolerance)
    oracle.assert_exact(found.norms, own(ranks, exact.norms), tolerance)
    oracle.assert_exact(found.losses, own(ranks, exact.losses), tolerance)
    return clipped


OPTIONS = (
    {"strategy": "recorded"},
    {"strategy": "recorded", "chunk_size": 3},
    {"strategy": "recorded", "passes": 2, "chunk_size": "auto"},
    {"clipping": "per_layer"},
    {"strategy": "vmap"},
    {"strategy": "loop"},
)


def _nets(size, name):
    for options in OPTIONS:
        if name != "lstm" or options.get("strategy") != "vmap":
            check(size, *nets.problem(name, torch.float64), **options)
    check(size, *nets.problem(name), tolerance=1e-6, strategy="recorded")


@pytest.mark.parametrize("name", nets.MODELS)
def test_clipped_sums_are_those_of_one_process(some, name):
    some.run(_nets, some.size, name)


class Odd(nn.Module):
    """Uses parameters in all sorts of ways."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 6)
        self.frozen.requires_grad_(False)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 5))
        self.inner = nn.Linear(5, 5)
        self.packed = nn.Parameter(torch.randn(5, 9))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        x = self.normed(self.frozen(x).tanh())
        x = checkpoint(self.inner, x, use_reentrant=False)
        first, second, third = self.packed.chunk(3, dim=1)
        y = x @ first + self.scale * (x @ second) + F.softplus(third[:, 1:]).sum()
        return y + torch.einsum("bi,ij->bj", x, third).sin()


def _odd(size):
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Odd().double())
    assert "frozen.weight" in buffers
    params = {name: value.detach() for name, value in params.items()}
    buffers = {name: value.detach() for name, value in buffers.items()}
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    batch = 3 * torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    check(size, loss, params, buffers, batch, strategy="recorded")

    # Samples that are not finite, and some that only care can sum.
    batch[0][0] = torch.inf
    params["packed"] = params["packed"].float()
    params = {name: value.float() for name, value in params.items()}
    buffers = {name: value.float() for name, value in buffers.items()}
    batch = batch[0].float(), batch[1]
    check(size, loss, params, buffers, batch, tolerance=1e-6, strategy="recorded")
    linear = {"w": torch.randn(5, 4), "b": torch.zeros(5), "v": torch.randn(3, 5)}

    def product(params, buffers, x):
        x = F.linear(x, params["w"], params["b"])
        return F.linear(x, params["v"]).sum()

    x = torch.randn(7, 4) * torch.tensor([1, 1, 1e17, 1, 1, 1e-20, 1])[:, None]
    for passes in (1, 2):
        options = {"strategy": "recorded", "passes": passes, "tolerance": 1e-6}
        check(size, product, linear, {}, (x,), **options)


def test_parameters_may_be_used_in_any_way(some):
    some.run(_odd, some.size)


def _quantities(size):
    mesh, ranks = here(size)
    loss, params, _, batch = nets.problem("mlp", torch.float64)
    parts = shard(params, mesh)
    parts["2.bias"] = parts["2.bias"].redistribute(placements=[Replicate()])
    mask, weights = torch.rand(7) < 0.7, torch.randn(7)
    mask, weights = (
        ranks.joined(own(ranks, mask), PARTS[size]),
        ranks.joined(own(ranks, weights), PARTS[size]),
    )
    given = parts, {}, [own(ranks, each) for each in batch], own(ranks, mask)
    for strategy in ("recorded", "loop"):
        total = vgrad.weighted_grad(loss, strategy=strategy)
        found = sharding.sharded_call(total, ranks, Inputs(*given, own(ranks, weights)))
        exact = total(weights, params, {}, *batch, mask=mask)
        oracle.assert_exact(gather(found, mesh), exact, 1e-12)
        assert found["2.bias"].placements == (Replicate(),)
        norms = vgrad.per_sample_norm(loss, strategy=strategy)
        exact = norms(params, {}, *batch)
        oracle.assert_exact(
            sharding.sharded_call(norms, ranks, Inputs(*given)),
            own(ranks, exact)[own(ranks, mask)],
        )
    none = [each[:0] for each in batch]
    found = sharding.sharded_call(
        vgrad.clipped_grad(loss, max_norm=1.0), ranks, Inputs(parts, {}, none)
    )
    oracle.assert_exact(
        gather(found.grads, mesh), {n: 0 * p for n, p in params.items()}
    )
    with pytest.raises(TypeError, match="expected a sum over samples or a list"):
        sharding.sharded_call(
            vgrad.gradient_moments(loss), ranks, Inputs(parts, {}, batch)
        )
    with pytest.raises(TypeError, match="expected a DTensor in '0.weight', got a Ten"):
        sharding.sharded_call(norms, ranks, Inputs(params, {}, batch))


def test_other_sums_and_lists(some):
    some.run(_quantities, some.size)


def _routed(size, strategy):
    mesh, ranks = here(size)
    torch.manual_seed(0)
    params = {f"expert.{n}": torch.randn(4, 4) for n in range(2)}
    x = torch.randn(7, 4)
    chosen = f"expert.{ranks.rank % 2}"

    def loss(params, buffers, x):
        return (x @ params[chosen]).square().sum()

    clipped = vgrad.clipped_grad(loss, max_norm=1.0, strategy=strategy)
    given = ranks, Inputs(shard(params, mesh), {}, [own(ranks, x)])
    if strategy == "recorded":
        with pytest.raises(RankError, match=r"got rank 0 at .*use of expert.0, 1 at "):
            sharding.sharded_call(clipped, *given)
        return
    with pytest.warns(vgrad.FallbackWarning, match="all parameters are gathered"):
        found = gather(sharding.sharded_call(clipped, *given).grads, mesh)
    exact = clipped(params, {}, own(ranks, x)).grads
    oracle.assert_exact(found, ranks.summed("test", exact), 1e-6)


@pytest.mark.parametrize("strategy", ["recorded", "auto"])
def test_ranks_that_use_other_parameters_never_mix_them(some, strategy):
    some.run(_routed, some.size, strategy)


def _failing(size):
    mesh, ranks = here(size)
    loss, params, buffers, batch = nets.problem("mlp")
    parts, batch = shard(params, mesh), [own(ranks, each) for each in batch]

    def fails(params, buffers, x, y):
        if ranks.rank == 1:
            raise ValueError("expected good data")
        return loss(params, buffers, x, y)

    def late(params, buffers, x, y):
        found = loss(params, buffers, x, y)
        if ranks.rank == 1:
            found.register_hook(lambda g: 1 / 0)
        return found

    def full(params, buffers, x, y):
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("no memory: expected good data")
        return loss(params, buffers, x, y)

    for each in (fails, late, full):
        for strategy in ("recorded", "auto", "loop"):
            clipped = vgrad.clipped_grad(each, max_norm=1.0, strategy=strategy)
            if ranks.rank == 1:
                with pytest.raises(Exception, match="expected good data|division|hook"):
                    sharding.sharded_call(clipped, ranks, Inputs(parts, buffers, batch))
            else:
                with pytest.raises(RankError, match="rank 1 stopped with"):
                    sharding.sharded_call(clipped, ranks, Inputs(parts, buffers, batch))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0)
    return sharding.sharded_call(clipped, ranks, Inputs(parts, buffers, batch)).clipped


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_an_error_of_one_rank_is_one_on_all(ranks):
    ranks(2).run(_failing, 2)

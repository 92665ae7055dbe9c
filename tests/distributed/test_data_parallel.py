"""Transforms of all ranks give the result of one process for the whole batch."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import wrap_torch_function
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import oracle
from tests.distributed.nets import NETS, problem
from tests.distributed.processes import mesh_of
from vgrad import distributed
from vgrad.distributed import (
    RankError,
    data_parallel,
    gather,
    shard,
    single_process_mesh,
)
from vgrad.dp import PoissonBatchSampler, secret_key
from vgrad.tree import map_tensors, tree_leaves

CUTS = {
    1: [(7,), (0,)],
    2: [(3, 4), (0, 7), (7, 0), (0, 0)],
    4: [(2, 1, 0, 4), (0, 0, 7, 0)],
}
"""How many samples each rank has."""

CLIPPED = partial(vgrad.clipped_grad, max_norm=0.5)
TRANSFORMS = {
    "clipped": partial(CLIPPED, normalize_by=3.0),
    "layers": partial(CLIPPED, clipping="per_layer", chunk_size=3),
    "twice": partial(CLIPPED, passes=2),
    "norms": vgrad.per_sample_norm,
    "grads": partial(vgrad.per_sample_grad, strategy="vmap"),
    "projection": partial(vgrad.per_sample_projection, dim=8, seed=1),
    "moments": partial(vgrad.gradient_moments, chunk_size=3),
}
SHARDED = (
    {"strategy": "recorded"},
    {"strategy": "recorded", "chunk_size": 3},
    {"strategy": "recorded", "passes": 2, "chunk_size": "auto"},
    {"clipping": "per_layer"},
    {"strategy": "vmap"},
    {"strategy": "loop"},
)
"""Options of clipped sums of parameters in shards."""


def own(rank, sizes):
    """Return the part of the whole batch that this rank has."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def errors(result, expected):
    """Return the largest error in units of the largest number of a tensor."""
    kinds = ([leaf.dtype for leaf in tree_leaves(each)] for each in (result, expected))
    assert next(kinds) == next(kinds)
    return oracle.error(result, expected)


def sharded(params, mesh):
    """Cut parameters; the last bias stays whole on every rank."""
    parts = shard(params, mesh)
    if "2.bias" in parts:
        parts["2.bias"] = parts["2.bias"].redistribute(placements=[Replicate()])
    return parts


def error_of(
    mesh, transform, given, sizes, *, shards=False, weights=None, mask=None, plain=None
):
    """Call a transform on all ranks and in one process; return how far they differ."""
    params, buffers, *batch = given

    def called(transform, entries, rows):
        first = [] if weights is None else [weights[rows]]
        options = {} if mask is None else {"mask": mask[rows]}
        return transform(*first, *entries, *(each[rows] for each in batch), **options)

    parts = (sharded(params, mesh), shard(buffers, mesh)) if shards else given[:2]
    rank = mesh.get_local_rank("dp")
    found = called(data_parallel(transform, mesh), parts, own(rank, sizes))
    if shards:
        sums = found.grads if hasattr(found, "grads") else found
        for name in sums if isinstance(sums, dict) else ():
            assert sums[name].placements == parts[0][name].placements
            local = sums[name].to_local(), parts[0][name].to_local()
            assert local[0].shape == local[1].shape
        found = map_tensors(
            lambda x: x.full_tensor() if isinstance(x, DTensor) else x, found
        )
    whole = called(plain or transform, given[:2], slice(0, sum(sizes)))
    if hasattr(whole, "signal_to_noise"):
        # Biases of keys have no gradient: a ratio of rounding errors.
        found, whole = (each._replace(signal_to_noise={}) for each in (found, whole))
    return errors(found, whole)


def _of_all(size, name):
    (mesh, rank), worst = mesh_of(size), {}
    for dtype, limit in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        loss, params, buffers, batch = problem(name, dtype)
        cases = [
            (TRANSFORMS[kind](loss), sizes, False)
            for kind in (TRANSFORMS if name == "mlp" else ["clipped", "moments"])
            for sizes in CUTS[size]
        ]
        for options in SHARDED if dtype == torch.float64 else SHARDED[:1]:
            if name != "lstm" or options.get("strategy") != "vmap":
                clipped = vgrad.clipped_grad(loss, max_norm=0.5, **options)
                cases.append((clipped, CUTS[size][0], True))
        for number, (transform, sizes, shards) in enumerate(cases):
            given = params, buffers, *batch
            error = error_of(mesh, transform, given, sizes, shards=shards)
            if not error < limit:
                worst[number, dtype, sizes] = error
    part = own(rank, CUTS[size][0])
    clipped = data_parallel(TRANSFORMS["clipped"](loss), mesh)
    return worst, clipped(params, buffers, *(each[part] for each in batch)).grads


@pytest.mark.parametrize("name", NETS)
def test_every_transform_is_that_of_the_whole_batch(some, name):
    """With all parameters on every rank, and in shards."""
    (_, first), *_ = results = some.run(_of_all, some.size, name)
    for worst, grads in results:
        assert worst == {}
        oracle.assert_exact(grads, first, 0)


def _masked(size):
    (mesh, rank), sizes = mesh_of(size), CUTS[size][0]
    loss, params, buffers, batch = problem("mlp")
    given, mask = (params, buffers, *batch), torch.arange(7) % 3 != 1
    weights, weighted = torch.arange(7.0) - 2, vgrad.weighted_grad(loss)

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"twice": 2 * x}

    traced = vgrad.clipped_grad(with_aux, max_norm=0.5, has_aux=True)
    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    worst = [error_of(mesh, traced, given, sizes, mask=mask)]
    for shards, strategy in itertools.product((False, True), ("recorded", "loop")):
        options = {"shards": shards, "mask": mask}
        total = vgrad.weighted_grad(loss, strategy=strategy)
        worst.append(error_of(mesh, total, given, sizes, weights=weights, **options))
        norms = vgrad.per_sample_norm(loss, strategy=strategy)
        worst.append(error_of(mesh, norms, given, sizes, **options))
    worst.append(error_of(mesh, clipped, given, size * [0], shards=True))
    assert data_parallel(weighted, mesh).options.function == "weighted_grad"
    parallel = data_parallel(clipped, mesh)
    assert parallel.sensitivity == clipped.sensitivity
    scaled = clipped.with_loss_scale(vgrad.precision.StaticLossScale(8.0))
    worst.append(error_of(mesh, scaled, given, sizes, plain=clipped))
    local = [each[own(rank, sizes)] for each in given[2:]]
    moments = data_parallel(vgrad.gradient_moments(loss), mesh)
    with pytest.raises(TypeError, match="expected a sum over samples or a list"):
        moments(shard(params, mesh), {}, *local)
    params = {name: value.requires_grad_() for name, value in params.items()}
    for strategy in ("recorded", "vmap"):
        norms = vgrad.per_sample_norm(loss, strategy=strategy)
        norms = data_parallel(norms, mesh)(params, buffers, *local)
        with pytest.raises(RuntimeError, match="expected a result that is not diff"):
            norms.sum().backward()
    return worst


def test_masks_aux_weights_and_scales(some):
    for worst in some.run(_masked, some.size):
        assert max(worst) < 2e-6, worst


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
    (mesh, _), sizes, worst = mesh_of(size), CUTS[size][0], []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        fmodel, *entries = vgrad.make_functional_with_buffers(Odd().to(dtype))
        params, buffers = map_tensors(torch.Tensor.detach, tuple(entries))
        assert "frozen.weight" in buffers
        loss = vgrad.sample_loss(fmodel, F.cross_entropy)
        x, y = 3 * torch.randn(7, 4, dtype=dtype), torch.randint(3, (7,))
        if dtype == torch.float32:
            x[0] = torch.inf  # of no gradient that is finite
        clipped = vgrad.clipped_grad(loss, max_norm=0.5, strategy="recorded")
        given = params, buffers, x, y
        worst.append(error_of(mesh, clipped, given, sizes, shards=True))

    def product(params, buffers, x):
        x = F.linear(x, params["w"], params["b"])
        return F.linear(x, params["v"]).sum()

    # Samples that only care can sum.
    linear = {"w": torch.randn(5, 4), "b": torch.zeros(5), "v": torch.randn(3, 5)}
    x = torch.randn(7, 4) * torch.tensor([1, 1, 1e17, 1, 1, 1e-20, 1])[:, None]
    for passes in (1, 2):
        options = {"strategy": "recorded", "passes": passes}
        clipped = vgrad.clipped_grad(product, max_norm=0.5, **options)
        worst.append(error_of(mesh, clipped, (linear, {}, x), sizes, shards=True))
    return worst


def test_parameters_in_shards_may_be_used_in_any_way(some):
    for first, *worst in some.run(_odd, some.size):
        assert first < 1e-12
        assert max(worst) < 2e-6


def _routed(size, strategy):
    (mesh, rank), sizes = mesh_of(size), CUTS[size][0]
    torch.manual_seed(0)
    params = {f"expert.{n}": torch.randn(4, 4) for n in range(2)}
    x = torch.randn(7, 4)
    place = itertools.repeat(rank % 2)  # plain numbers are compared over ranks

    def routed(which):
        return lambda p, b, x: (x @ p[f"expert.{next(which)}"]).square().sum()

    clipped = vgrad.clipped_grad(routed(place), max_norm=1.0, strategy=strategy)
    given = shard(params, mesh), {}, x[own(rank, sizes)]
    if strategy == "recorded":
        with pytest.raises(RankError, match=r"got rank 0 at .*use of expert.0, 1 at "):
            data_parallel(clipped, mesh)(*given)
        return
    with pytest.warns(vgrad.FallbackWarning, match="all parameters are gathered"):
        found = gather(data_parallel(clipped, mesh)(*given).grads, mesh)
    expected = {name: torch.zeros(4, 4) for name in params}
    for other in range(size):
        clipped = vgrad.clipped_grad(routed(itertools.repeat(other % 2)), max_norm=1.0)
        for name, value in clipped(params, {}, x[own(other, sizes)]).grads.items():
            expected[name] += value
    assert errors(found, expected) < 1e-6


@pytest.mark.parametrize("strategy", ["recorded", "auto"])
def test_ranks_that_use_other_parameters_never_mix_them(some, strategy):
    some.run(_routed, some.size, strategy)


def _compiled(size):
    (mesh, rank), worst = mesh_of(size), []
    loss, params, buffers, (x, y) = problem("mlp")
    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    options = {"batch_sizes": [4 * size]}
    orders = (
        data_parallel(vgrad.compile(clipped, **options), mesh),
        vgrad.compile(data_parallel(clipped, mesh), **options),
    )
    for sizes in CUTS[size]:
        part, total = own(rank, sizes), sum(sizes)
        exact = clipped(params, buffers, x[:total], y[:total])
        for compute in orders * 2:
            assert compute.sensitivity == clipped.sensitivity
            result = compute(params, buffers, x[part], y[part])
            worst.append(errors(result, exact))
    reports = [report for compute in orders for report in compute.reports()]
    return worst, [report.calls for report in reports]


@pytest.mark.compiled
def test_graphs_run_between_collectives(some):
    results = some.run(_compiled, some.size)
    for worst, _ in results:
        assert max(worst) < 2e-6, worst
    busiest = max((calls for _, calls in results), key=sum)
    assert len(busiest) == 2
    assert min(busiest) > 2


DRAWING = {
    "clipped": {"chunk_size": 2},
    "loop": {"strategy": "loop"},
    "twice": {"passes": 2, "chunk_size": 3},
    "compiled": {},
    "same": {"randomness": "same"},
}


def _drawn(mesh, sizes):
    """Return clipped sums of a net with dropout, weighted ones, and the masks."""
    loss, params, buffers, (x, y) = problem("mlp")

    def masked(params, buffers, x, y):
        mask = F.dropout(torch.ones(64), 0.5)
        return loss(params, buffers, x * mask[:4] + torch.randn(4), y), mask

    rank = mesh.get_local_rank("dp")
    torch.manual_seed(5 + rank)  # the first rank's counts
    part, results = own(rank, sizes), {}
    local = params, buffers, x[part], y[part]
    for name, options in DRAWING.items():
        options = {"randomness": "different", "has_aux": True, **options}
        transform = vgrad.clipped_grad(masked, max_norm=0.5, **options)
        if name == "compiled":
            transform = vgrad.compile(transform, batch_sizes=[4 * mesh.size()])
        results[name] = data_parallel(transform, mesh)(*local)
    weighted = vgrad.weighted_grad(masked, randomness="different", has_aux=True)
    weights = torch.arange(7.0)[part]
    results["weighted"] = data_parallel(weighted, mesh)(weights, *local)
    return results


def _of_seeds(mesh):
    return [_drawn(mesh, sizes) for sizes in CUTS[mesh.size()]]


@pytest.mark.filterwarnings("ignore:.*runs in eager mode")
def test_a_sample_draws_the_same_on_any_rank(some):
    with single_process_mesh("dp") as mesh:
        expected = {total: _drawn(mesh, (total,)) for total in (7, 0)}
    for ranks in some.on_mesh(_of_seeds):
        for sizes, results in zip(CUTS[some.size], ranks, strict=True):
            for name, (value, masks) in results.items():
                one, known = expected[sum(sizes)][name]
                assert (masks is None and known is None) or torch.equal(masks, known)
                assert errors(value, one) < 1e-6, (name, sizes)
                differ = 1 if name == "same" else sum(sizes)
                assert masks is None or len(masks.unique(dim=0)) == differ, name


def _of_kinds(size):
    (mesh, rank), worst = mesh_of(size), []
    loss, params, buffers, (x, y) = problem("mlp", torch.bfloat16)
    given, weights = (params, buffers, x, y), torch.arange(7.0) - 2

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"x": x, "labels": (y, (y > 1).float())}

    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    weighted = vgrad.weighted_grad(with_aux, has_aux=True)
    for sizes in CUTS[size]:
        worst.append(error_of(mesh, clipped, given, sizes))
        if sum(sizes):
            worst.append(error_of(mesh, weighted, given, sizes, weights=weights))
    traced = data_parallel(vgrad.clipped_grad(with_aux, max_norm=1, has_aux=True), mesh)
    few = 3 * min(rank, 1)
    none = torch.zeros(few, dtype=torch.bool)
    _, aux = traced(params, buffers, x[:few], y[:few], mask=none)
    assert aux["x"].shape == (0, 4)

    def reading(params, buffers, x):
        return params["w"] * x.sum(), x

    norms = vgrad.per_sample_norm(reading, strategy="vmap", has_aux=True)
    one, parallel = {"w": torch.tensor(2.0)}, data_parallel(norms, mesh)
    with pytest.raises(RankError, match="of the same dtypes and trailing shapes"):
        parallel(one, {}, torch.ones(2, 3 + rank))
    with pytest.raises(RuntimeError, match="call outside of torch.func's transforms"):
        torch.func.jvp(lambda p: parallel(p, {}, torch.ones(2, 3))[0], (one,), (one,))
    return worst


def test_a_rank_without_samples_has_lists_of_the_others_kinds(some):
    for worst in some.run(_of_kinds, some.size):
        assert max(worst) < 0.02, worst


# Errors of one rank.


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error), str(error)


@wrap_torch_function(lambda x, weight: (x, weight))
def scaled(x, weight):
    return x * weight


class Unsummed(vgrad.ops.Dense):
    def weighted(self, weights):
        raise ArithmeticError("no such luck")


def _one_is_wrong(size):
    mesh, rank = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    norms = data_parallel(vgrad.per_sample_norm(loss), mesh)

    def fails(kind, late=False):
        def failing(params, buffers, x, y):
            found = loss(params, buffers, x, y)
            if mesh.get_local_rank("dp") == 1:  # plain numbers are compared over ranks
                if not late:
                    raise kind("no such luck")
                found.register_hook(lambda grad: 1 / 0)
            return found

        return failing

    def clipped(loss, strategy="auto"):
        options = {"max_norm": 0.5, "strategy": strategy}
        return data_parallel(vgrad.clipped_grad(loss, **options), mesh)

    texts = {
        "sizes": raised(lambda: clipped(loss)(params, buffers, x[: 3 + rank], y[:3])),
        "place": raised(lambda: (norms, clipped(loss))[rank](params, buffers, x, y)),
    }
    losses = {"loss": fails(ArithmeticError), "memory": fails(torch.OutOfMemoryError)}
    losses["hook"] = fails(None, late=True)
    for name, strategy in itertools.product(losses, ("recorded", "auto", "loop")):
        wrong = clipped(losses[name], strategy)
        for form, entries in (("whole", params), ("shards", shard(params, mesh))):
            found = raised(lambda: wrong(entries, buffers, x, y))  # noqa: B023
            texts[f"{name}, {strategy}, {form}"] = found

    # An error between two sums, of which the first is on its way.
    factor = (vgrad.ops.Dense, Unsummed)[rank]
    vgrad.ops.rule(scaled, weights=("weight",))(
        lambda x, weight: {"weight": lambda g: factor(g * x)}
    )
    linear = {"first": torch.ones(4), "second": torch.ones(4, 4)}
    wrong = clipped(lambda p, b, x: F.linear(scaled(x, p["first"]), p["second"]).sum())
    texts["loss, later"] = raised(lambda: wrong(linear, {}, x))
    fine = clipped(loss)(params, buffers, x, y)  # they go on together
    return texts, errors(fine.losses[:7], fine.losses[-7:])


STOPPED = {
    "sizes": (ValueError, "rank 1 stopped with ValueError: clipped_grad(params"),
    "place": (RankError, "expected all ranks at the same place"),
    "loss": (ArithmeticError, "rank 1 stopped with ArithmeticError: no such luck"),
    "memory": (torch.OutOfMemoryError, "rank 1 stopped with OutOfMemoryError: no su"),
    # A loss with hooks is not recorded.
    "hook": ((ZeroDivisionError, vgrad.UnsupportedOp), "rank 1 stopped with "),
}


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_what_fails_on_one_rank_fails_on_all(ranks):
    (first, difference), (second, _) = ranks(2).run(_one_is_wrong, 2)
    assert difference == 0
    assert first.keys() == second.keys()
    for name, (kind, text) in first.items():
        expected, message = STOPPED[name.partition(",")[0]]
        if name.endswith("whole"):  # on a probe
            expected, message = RankError, "loss: expected the same number on all"
        assert issubclass(second[name][0], expected), name
        assert kind is RankError, name
        assert message in text, name


def _compared(size):
    mesh, _ = mesh_of(size)
    loss, params, buffers, batch = problem("mlp")

    def two_faced(*given):
        inside = torch._C._functorch.maybe_current_level() is not None
        return loss(*given) * (3.0 if inside else 1.0)

    wrong = data_parallel(vgrad.clipped_grad(two_faced, max_norm=0.5), mesh)
    return raised(lambda: wrong(params, buffers, *batch))


def test_the_samples_of_each_rank_are_compared_with_plain_autograd(ranks):
    for kind, text in ranks(2).run(_compared, 2):
        assert issubclass(kind, vgrad.UnsupportedOp | RankError)
        assert "agree with plain autograd" in text


# Batches.


def _refused(size):
    mesh, rank = mesh_of(size)
    loss, *_ = problem("mlp")
    with pytest.raises(TypeError, match="got products of pairs"):
        data_parallel(vgrad.per_sample_gram(loss), mesh)
    with pytest.raises(TypeError, match="expected the result of a per-sample transf"):
        data_parallel(loss, mesh)
    for seeds, steps, name in [((0, 1), (3, 3), "draws"), ((0, 0), (3, 4), "batches")]:
        key = secret_key(seed=seeds[rank])
        sampler = PoissonBatchSampler(10, 0.5, steps=steps[rank], key=key)
        with pytest.raises(RankError, match=f"the same {name} on all ranks"):
            distributed.local_batches(sampler, mesh)
    sampler = PoissonBatchSampler(10, 0.5, steps=3, key=secret_key(seed=0))
    for ranges in [
        (range(6), range(5, 10)),
        (range(4), range(5, 10)),
        (range(4), range(4, 9)),
        (range(1, 4), range(4, 10)),
        (range(10), None),
    ]:
        with pytest.raises(ValueError, match=r"make up range\(0, 10\), each"):
            distributed.local_batches(sampler, mesh, own=ranges[rank])
    for ranges in [(range(10), range(10, 10)), (range(5, 10), range(5))]:
        distributed.local_batches(sampler, mesh, own=ranges[rank])
    mine = range(0, 10, 2) if rank else range(10)
    expected = (ValueError, "range of indices that") if rank else (RankError, "rank 1")
    with pytest.raises(expected[0], match=expected[1]):
        distributed.local_batches(sampler, mesh, own=mine)


def test_samplers_that_would_count_a_sample_twice_are_refused(ranks):
    ranks(2).run(_refused, 2)


def _parts(size, batches):
    mesh, rank = mesh_of(size)
    cut = distributed.local_batches(batches, mesh)
    held = range(5 * rank, 5 * rank + 5) if rank < size - 1 else range(5 * rank, 99)
    streamed = distributed.local_batches(batches, mesh, own=held)
    assert len(cut) == len(streamed) == len(batches)
    return list(cut), [[held.start + index for index in part] for part in streamed]


def test_batches_are_cut_without_rest_and_without_overlap(some):
    batches = [[], [3], [0, 2, 4, 5, 9, 11, 40], list(range(50)), [98]]
    results = some.run(_parts, some.size, batches)
    for place, batch in enumerate(batches):
        for kind in range(2):
            parts = [result[kind][place] for result in results]
            assert [*itertools.chain(*parts)] == batch
        sizes = [len(result[0][place]) for result in results]
        assert max(sizes) - min(sizes) <= 1, batch


def _of_a_function(size):
    (mesh, rank), worst = mesh_of(size), []
    torch.manual_seed(0)
    params, x = {"w": torch.randn(3)}, torch.randn(7, 3)

    def moments(params, buffers, x):
        return {"a": (params["w"] * x, x.square().sum()), "b": torch.fft.fft(x)}

    compute = vgrad.clipped_sum(moments, max_norm=0.5, chunk_size=2)
    for each in (compute, vgrad.compile(compute)):
        parallel = data_parallel(each, mesh)
        assert parallel.sensitivity == compute.sensitivity
        for sizes in CUTS[size]:
            result = parallel(params, {}, x[own(rank, sizes)])
            whole = compute(params, {}, x[: sum(sizes)])
            worst.append(errors(result, whole))
    part = x[own(rank, CUTS[size][0])]

    def fails(params, buffers, x, rank=rank):
        return torch.linalg.cholesky(x.diag()) if rank else x.diag()

    with pytest.raises(RankError if not rank else torch.linalg.LinAlgError):
        data_parallel(vgrad.clipped_sum(fails, max_norm=1.0), mesh)({}, {}, -part.abs())
    others = vgrad.clipped_sum(lambda p, b, x, by=rank: by * x, max_norm=1.0)
    with pytest.raises(RankError, match="expected the same number on all ranks"):
        data_parallel(others, mesh)({}, {}, part)
    with pytest.raises(TypeError, match="got a DTensor in 'params.w'"):
        data_parallel(compute, mesh)(shard(params, mesh), {}, part)
    draws = vgrad.clipped_sum(
        lambda p, b, x: F.dropout(x, 0.5), max_norm=9.0, randomness="different"
    )
    drawn = []
    for sizes in CUTS[size][:2]:
        torch.manual_seed(rank)
        drawn.append(data_parallel(draws, mesh)({}, {}, x[own(rank, sizes)]))
    worst.append(errors(*drawn))
    return worst


def test_sums_of_any_function_are_of_all_ranks(some):
    for worst in some.run(_of_a_function, some.size):
        assert max(worst) < 2e-6, worst

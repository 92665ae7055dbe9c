"""Transforms of all ranks give the result of one process for the whole batch."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests.distributed.nets import MODELS, problem
from tests.distributed.processes import mesh_of
from vgrad import distributed
from vgrad import ranks as collectives
from vgrad.distributed import (
    RankError,
    Ranks,
    data_parallel,
    gather,
    shard,
    sharding,
    single_process_mesh,
)
from vgrad.dp import PoissonBatchSampler, secret_key
from vgrad.persample.engine import Inputs
from vgrad.tree import tree_leaves

CUTS = {
    1: [(7,), (0,)],
    2: [(3, 4), (0, 7), (7, 0), (0, 0)],
    4: [(2, 1, 0, 4), (0, 0, 7, 0)],
}
"""How many samples each rank has."""

TRANSFORMS = {
    "clipped": lambda loss: vgrad.clipped_grad(loss, max_norm=0.5, normalize_by=3.0),
    "layers": lambda loss: vgrad.clipped_grad(
        loss, max_norm=0.5, clipping="per_layer", chunk_size=3
    ),
    "twice": lambda loss: vgrad.clipped_grad(loss, max_norm=0.5, passes=2),
    "norms": vgrad.per_sample_norm,
    "grads": lambda loss: vgrad.per_sample_grad(loss, strategy="vmap"),
    "projection": lambda loss: vgrad.per_sample_projection(loss, dim=8, seed=1),
    "moments": lambda loss: vgrad.gradient_moments(loss, chunk_size=3),
}


def own(rank, sizes):
    """Return the part of the whole batch that this rank has."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def errors(result, expected):
    """Return the largest error in units of the largest number of each tensor."""
    worst = 0.0
    for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.numel() and not torch.equal(one.isnan(), other.isnan()):
            return float("inf")
        one, other = one.nan_to_num(), other.nan_to_num()
        if one.numel():
            scale = other.abs().max().clamp(min=1e-30)
            worst = max(worst, ((one - other).abs().max() / scale).item())
    return worst


def _of_all(size, name):
    (mesh, rank), worst = mesh_of(size), {}
    for dtype in (torch.float32, torch.float64):
        loss, params, buffers, (x, y) = problem(name, dtype)
        limit = 2e-6 if dtype == torch.float32 else 1e-12
        for kind in TRANSFORMS if name == "mlp" else ["clipped", "moments"]:
            transform = TRANSFORMS[kind](loss)
            for sizes in CUTS[size]:
                part, total = own(rank, sizes), sum(sizes)
                parallel = data_parallel(transform, mesh)
                result = parallel(params, buffers, x[part], y[part])
                expected = transform(params, buffers, x[:total], y[:total])
                if kind == "moments" and name == "language":
                    # Biases of keys have no gradient: a ratio of rounding errors.
                    result, expected = (
                        each._replace(signal_to_noise={}) for each in (result, expected)
                    )
                if not (error := errors(result, expected)) < limit:
                    worst[kind, dtype, sizes] = error
    clipped = data_parallel(TRANSFORMS["clipped"](loss), mesh)
    part = own(rank, CUTS[size][0])
    return worst, clipped(params, buffers, x[part], y[part]).grads


@pytest.mark.parametrize("name", MODELS)
def test_every_transform_is_that_of_the_whole_batch(some, name):
    (_, first), *_ = results = some.run(_of_all, some.size, name)
    for worst, grads in results:
        assert worst == {}
        assert all(torch.equal(first[name], grads[name]) for name in first)


def _masked(size):
    mesh, rank = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    mask, part = torch.arange(7) % 3 != 1, own(rank, CUTS[size][0])
    whole, local = (params, buffers, x, y), (params, buffers, x[part], y[part])

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"twice": 2 * x}

    clipped = vgrad.clipped_grad(with_aux, max_norm=0.5, has_aux=True)
    result = data_parallel(clipped, mesh)(*local, mask=mask[part])
    worst = [errors(result, clipped(*whole, mask=mask))]
    weights, weighted = torch.arange(7.0) - 2, vgrad.weighted_grad(loss)
    result = data_parallel(weighted, mesh)(weights[part], *local)
    worst.append(errors(result, weighted(weights, *whole)))
    assert data_parallel(weighted, mesh).options.function == "weighted_grad"
    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    parallel = data_parallel(clipped, mesh)
    assert parallel.sensitivity == clipped.sensitivity
    scaled = parallel.with_loss_scale(vgrad.precision.StaticLossScale(8.0))
    worst.append(errors(scaled(*local), clipped(*whole)))
    params = {name: value.requires_grad_() for name, value in params.items()}
    for strategy in ("recorded", "vmap"):
        norms = vgrad.per_sample_norm(loss, strategy=strategy)
        norms = data_parallel(norms, mesh)(params, *local[1:])
        with pytest.raises(RuntimeError, match="expected a result that is not diff"):
            norms.sum().backward()
    return worst


def test_masks_aux_weights_and_scales(some):
    for worst in some.run(_masked, some.size):
        assert max(worst) < 2e-6, worst


def _compiled(size):
    (mesh, rank), worst = mesh_of(size), []
    loss, params, buffers, (x, y) = problem("mlp")
    clipped, options = (
        vgrad.clipped_grad(loss, max_norm=0.5),
        {"batch_sizes": [4 * size]},
    )
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


def _of_seeds(size):
    return [_drawn(mesh_of(size)[0], sizes) for sizes in CUTS[size]]


@pytest.mark.filterwarnings("ignore:.*runs in eager mode")
def test_a_sample_draws_the_same_on_any_rank(some):
    with single_process_mesh("dp") as mesh:
        expected = {total: _drawn(mesh, (total,)) for total in (7, 0)}
    for ranks in some.run(_of_seeds, some.size):
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

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"x": x, "labels": (y, y > 1)}

    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    weighted = vgrad.weighted_grad(with_aux, has_aux=True)
    weights = torch.arange(7.0) - 2
    for sizes in CUTS[size]:
        part, whole = own(rank, sizes), slice(0, sum(sizes))
        local = params, buffers, x[part], y[part]
        all_of_it = params, buffers, x[whole], y[whole]
        result = data_parallel(clipped, mesh)(*local)
        worst.append(errors(result, clipped(*all_of_it)))
        result, aux = data_parallel(weighted, mesh)(weights[part], *local)
        expected = weighted(weights[whole], *all_of_it)
        worst.append(errors(result, expected[0]))
        assert not sum(sizes) or torch.equal(aux["labels"][1], expected[1]["labels"][1])
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


def _one_is_wrong(size):
    mesh, rank = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    clipped = data_parallel(vgrad.clipped_grad(loss, max_norm=0.5), mesh)
    norms = data_parallel(vgrad.per_sample_norm(loss), mesh)
    moments = data_parallel(vgrad.gradient_moments(loss), mesh)

    def failing(params, buffers, x, y):
        if mesh.get_local_rank("dp") == 1:  # plain numbers are compared over ranks
            raise ArithmeticError("no such luck")
        return loss(params, buffers, x, y)

    wrong = data_parallel(vgrad.clipped_grad(failing, max_norm=0.5), mesh)
    texts = {
        "sizes": raised(lambda: clipped(params, buffers, x[: 3 + rank], y[:3])),
        "loss": raised(lambda: wrong(params, buffers, x, y)),
        "place": raised(lambda: (norms, clipped)[rank](params, buffers, x, y)),
    }
    finished = collectives.Summing.finished
    for last in (1, 3):  # between two sums, and after all of them
        calls = []

        def missing(self, tensors, calls=calls, last=last):
            calls.append(finished(self, tensors))
            return {} if rank and len(calls) == last else calls[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives.Summing, "finished", missing)
            texts[last] = raised(lambda: moments(params, buffers, x, y))
    joined, calls = torch.cat, []

    def no_room(tensors):
        calls.append(None)
        if rank and len(calls) == 2:
            raise MemoryError("no room")
        return joined(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_BUCKET", 1)
        patch.setattr(collectives, "torch", SimpleNamespace(**vars(torch)))
        collectives.torch.cat = no_room
        texts["bucket"] = raised(lambda: clipped(params, buffers, x, y))
    fine = clipped(params, buffers, x, y)  # they go on together
    return texts, errors(fine.losses[:7], fine.losses[-7:])


STOPPED = {
    "sizes": (ValueError, "rank 1 stopped with ValueError: clipped_grad(params"),
    "loss": (ArithmeticError, "rank 1 stopped with ArithmeticError: no such luck"),
    "place": (RankError, "expected all ranks at the same place"),
    1: (KeyError, "rank 1 stopped with KeyError"),
    3: (KeyError, "rank 1 stopped with KeyError"),
    "bucket": (MemoryError, "rank 1 stopped with MemoryError: no room"),
}


def test_what_fails_on_one_rank_fails_on_all(ranks):
    (first, difference), (second, _) = ranks(2).run(_one_is_wrong, 2)
    assert difference == 0
    assert first.keys() == second.keys() == STOPPED.keys()
    for name, (kind, text) in STOPPED.items():
        assert second[name][0] is kind
        assert first[name][0] is RankError
        assert text in first[name][1]


def _as_formed(size, broken=False):
    """Return errors of sums in tiny buckets, and whether one was sent early."""
    (mesh, rank), results = mesh_of(size), []
    rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
    reduce, give = torch.distributed.all_reduce, collectives.Summing.give
    for strategy, spoilt in itertools.product(("recorded", "vmap", "loop"), (0, 1)):
        loss, params, buffers, (x, y) = problem("mlp", torch.float64, 8)
        x[5] = torch.inf if spoilt else x[5]
        clipped, events = vgrad.clipped_grad(loss, max_norm=0.5, strategy=strategy), []

        def sending(*arguments, events=events, **options):
            events.append("sent")
            return reduce(*arguments, **options)

        def giving(self, name, value, events=events):
            events.append("formed")
            if broken and rank and events.count("formed") == 2:
                raise ValueError("out of order")
            give(self, name, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", sending)
            patch.setattr(collectives.Summing, "give", giving)
            patch.setattr(collectives, "_BUCKET", 1)
            parallel = data_parallel(clipped, mesh)
            if broken:
                return raised(lambda: parallel(params, buffers, x[rows], y[rows]))  # noqa: B023
            sums = parallel(params, buffers, x[rows], y[rows])
        last = len(events) - events[::-1].index("formed") - 1
        error = errors(sums, clipped(params, buffers, x, y))
        results.append((error, events.index("sent") < last))
    return results


def test_sums_travel_while_others_are_formed(some):
    first, second, *_ = some.run(_as_formed, some.size, True)
    assert second == (ValueError, "out of order")
    assert first[0] is RankError
    assert "rank 1 stopped with ValueError: out of order" in first[1]
    for results in some.run(_as_formed, some.size):  # in step again
        for error, early in results:
            assert error < 1e-12
            assert early


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


class _Changing:
    """A net whose checkpoint has other values each time that it runs, on some ranks."""

    def __init__(self, scales):
        self.scales = itertools.cycle(scales)  # plain numbers are compared over ranks

    def inner(self, h, w):
        scale = next(self.scales)
        return F.linear(h.tanh() * torch.full_like(h, scale), w)

    def __call__(self, params, buffers, x):
        h = F.linear(x, params["a"])
        return checkpoint(self.inner, h, params["b"], use_reentrant=False).sum() * 1e3


def _changing(size):
    mesh, rank = mesh_of(size)
    ranks, worst = Ranks.of("test", mesh, "dp"), []
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 3), "b": torch.randn(5, 4)}
    x = torch.randn(2 * size, 3)
    part = x[2 * rank : 2 * rank + 2]
    expected = vgrad.clipped_grad(_Changing((1,)), max_norm=0.5)(params, {}, x).grads
    for scales in ((1,), (1, 10, 100, 1000)):
        loss = _Changing((1,) if rank else scales)
        clip = vgrad.clipped_grad(loss, max_norm=0.5, passes=2, strategy="recorded")
        sums = data_parallel(clip, mesh)(params, {}, part).grads
        worst.append(errors(sums, expected))
        sums = sharding.sharded_call(
            clip, ranks, Inputs(shard(params, mesh), {}, (part,))
        )
        worst.append(errors(gather(sums.grads, mesh), expected))
    return worst


def test_ranks_drop_sums_of_two_kinds_of_gradients(some):
    for worst in some.run(_changing, some.size):
        assert max(worst) < 2e-6, worst

"""Transforms of all ranks give what one process does for the whole batch."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests.distributed.nets import MODELS, problem
from vgrad import distributed
from vgrad import ranks as collectives
from vgrad.distributed import (
    RankError,
    Ranks,
    alone,
    data_parallel,
    gather,
    shard,
    sharded,
)
from vgrad.dp import PoissonBatchSampler, secret_key
from vgrad.tree import tree_leaves

CUTS = {2: [(3, 4), (0, 7), (7, 0), (0, 0)], 4: [(2, 1, 0, 4), (0, 0, 7, 0)]}
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


def mesh_of(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def own(mesh, sizes):
    """Return the part of the whole batch that this rank has."""
    rank = mesh.get_local_rank("dp")
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def errors(found, expected):
    """Return the largest error in units of the largest number, for each tensor."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    worst = 0.0
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.numel() and not torch.equal(one.isnan(), other.isnan()):
            return float("inf")
        one, other = one.nan_to_num(), other.nan_to_num()
        if one.numel():
            scale = other.abs().max().clamp(min=1e-30)
            worst = max(worst, ((one - other).abs().max() / scale).item())
    return worst


def _of_all(size, name, dtype, kinds):
    mesh = mesh_of(size)
    loss, params, buffers, (x, y) = problem(name, dtype)
    worst = {}
    for kind in kinds:
        transform = TRANSFORMS[kind](loss)
        for sizes in CUTS[size]:
            part, total = own(mesh, sizes), sum(sizes)
            found = data_parallel(transform, mesh)(params, buffers, x[part], y[part])
            expected = transform(params, buffers, x[:total], y[:total])
            if kind == "moments" and name == "language":
                # Biases of keys have no gradient: a ratio of rounding errors.
                found, expected = (
                    each._replace(signal_to_noise={}) for each in (found, expected)
                )
            worst[kind, sizes] = errors(found, expected)
    return worst


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_transform_is_that_of_the_whole_batch(some, name, dtype):
    kinds = list(TRANSFORMS) if name == "mlp" else ["clipped", "moments"]
    limit = 2e-6 if dtype == torch.float32 else 1e-12
    for found in some.run(_of_all, some.size, name, dtype, kinds):
        assert {key: error for key, error in found.items() if not error < limit} == {}


def _bits(size):
    mesh = mesh_of(size)
    loss, params, buffers, (x, y) = problem("cnn")
    part = own(mesh, CUTS[size][0])
    clipped = data_parallel(vgrad.clipped_grad(loss, max_norm=0.5), mesh)
    return clipped(params, buffers, x[part], y[part]).grads


def test_all_ranks_get_the_same_bits(some):
    first, *others = some.run(_bits, some.size)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def _masked(size):
    mesh = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    mask = torch.arange(7) % 3 != 1
    part = own(mesh, CUTS[size][0])

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"twice": 2 * x}

    clipped = vgrad.clipped_grad(with_aux, max_norm=0.5, has_aux=True)
    one = clipped(params, buffers, x, y, mask=mask)
    given = (params, buffers, x[part], y[part])
    found = data_parallel(clipped, mesh)(*given, mask=mask[part])
    worst = [errors(found, one)]
    weights = torch.arange(7.0) - 2
    weighted = vgrad.weighted_grad(loss)
    found = data_parallel(weighted, mesh)(weights[part], *given)
    worst.append(errors(found, weighted(weights, params, buffers, x, y)))
    scaled = data_parallel(weighted, mesh).options.function
    assert scaled == "weighted_grad"
    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    assert data_parallel(clipped, mesh).sensitivity == clipped.sensitivity
    scale = vgrad.precision.StaticLossScale(8.0)
    found = data_parallel(clipped, mesh).with_loss_scale(scale)(*given)
    worst.append(errors(found, clipped(params, buffers, x, y)))
    return worst


def test_masks_aux_weights_and_scales(some):
    for worst in some.run(_masked, some.size):
        assert max(worst) < 2e-6, worst


def _compiled(size):
    mesh = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    compiled = vgrad.compile(clipped, batch_sizes=[4 * size])
    worst = []
    for sizes in CUTS[size]:
        part, total = own(mesh, sizes), sum(sizes)
        for _ in range(2):
            found = data_parallel(compiled, mesh)(params, buffers, x[part], y[part])
            worst.append(errors(found, clipped(params, buffers, x[:total], y[:total])))
    (report,) = data_parallel(compiled, mesh).reports() or [None]
    return worst, report and report.calls


@pytest.mark.compiled
def test_graphs_run_between_collectives(some):
    results = some.run(_compiled, some.size)
    for worst, _ in results:
        assert max(worst) < 2e-6, worst
    assert max(calls or 0 for _, calls in results) > 2


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

    torch.manual_seed(5 + mesh.get_local_rank("dp"))  # that of the first rank counts
    part, found = own(mesh, sizes), {}
    given = params, buffers, x[part], y[part]
    for name, options in DRAWING.items():
        options = {"randomness": "different", "has_aux": True, **options}
        transform = vgrad.clipped_grad(masked, max_norm=0.5, **options)
        if name == "compiled":
            transform = vgrad.compile(transform, batch_sizes=[4 * mesh.size()])
        found[name] = data_parallel(transform, mesh)(*given)
    weighted = vgrad.weighted_grad(masked, randomness="different", has_aux=True)
    weights = torch.arange(7.0)[part]
    found["weighted"] = data_parallel(weighted, mesh)(weights, *given)
    return found


def _of_seeds(size):
    return [_drawn(mesh_of(size), sizes) for sizes in CUTS[size]]


@pytest.mark.filterwarnings("ignore:.*runs in eager mode")
def test_a_sample_draws_the_same_on_any_rank(some):
    with alone("dp") as mesh:
        expected = {total: _drawn(mesh, (total,)) for total in (7, 0)}
    for result in some.run(_of_seeds, some.size):
        for sizes, found in zip(CUTS[some.size], result, strict=True):
            for name, (value, masks) in found.items():
                one, known = expected[sum(sizes)][name]
                assert (masks is None and known is None) or torch.equal(masks, known)
                assert errors(value, one) < 1e-6, (name, sizes)
                differ = 1 if name == "same" else sum(sizes)
                assert masks is None or len(masks.unique(dim=0)) == differ, name


def _constants(size):
    mesh = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    params = {name: value.requires_grad_() for name, value in params.items()}
    part = own(mesh, CUTS[size][0])
    for strategy in ("recorded", "vmap"):
        norms = vgrad.per_sample_norm(loss, strategy=strategy)
        found = data_parallel(norms, mesh)(params, buffers, x[part], y[part])
        with pytest.raises(RuntimeError, match="expected a result that is not diff"):
            found.sum().backward()


def test_results_are_constants_that_say_so(ranks):
    ranks(2).run(_constants, 2)


def _one_is_wrong(size):
    mesh = mesh_of(size)
    loss, params, buffers, (x, y) = problem("mlp")
    clipped = data_parallel(vgrad.clipped_grad(loss, max_norm=0.5), mesh)
    told = []

    def failing(params, buffers, x, y):
        if mesh.get_local_rank("dp") == 1:
            raise ArithmeticError("no such luck")
        return loss(params, buffers, x, y)

    wrong = data_parallel(vgrad.clipped_grad(failing, max_norm=0.5), mesh)
    calls = [
        lambda rank: clipped(params, buffers, x[: 3 + rank], y[:3]),
        lambda rank: wrong(params, buffers, x, y),
        lambda rank: (
            clipped if rank else data_parallel(vgrad.per_sample_norm(loss), mesh)
        )(params, buffers, x, y),
    ]
    for call in calls:
        try:
            call(mesh.get_local_rank("dp"))
        except Exception as error:
            told.append((type(error), str(error)))
    # They go on together.
    fine = clipped(params, buffers, x, y)
    return told, errors(fine.losses[:7], fine.losses[-7:])


def test_what_fails_on_one_rank_fails_on_all(ranks):
    first, second = ranks(2).run(_one_is_wrong, 2)
    assert first[1] == second[1] == 0
    (sizes, luck, place), (sizes_1, luck_1, place_1) = first[0], second[0]
    assert sizes[0] is luck[0] is place[0] is place_1[0] is RankError
    assert [sizes_1[0], luck_1[0]] == [ValueError, ArithmeticError]
    assert "rank 1 stopped with ValueError: clipped_grad(params" in sizes[1]
    assert "rank 1 stopped with ArithmeticError: no such luck" in luck[1]
    assert "expected all ranks at the same place" in place[1]


def _of_kinds(size):
    mesh = mesh_of(size)
    rank = mesh.get_local_rank("dp")
    loss, params, buffers, (x, y) = problem("mlp", torch.bfloat16)

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"x": x, "labels": (y, y > 1)}

    worst = []
    clipped = vgrad.clipped_grad(loss, max_norm=0.5)
    weighted = vgrad.weighted_grad(with_aux, has_aux=True)
    weights = torch.arange(7.0) - 2
    for sizes in CUTS[size]:
        part, total = own(mesh, sizes), sum(sizes)
        given, whole = (params, buffers, x[part], y[part]), slice(0, total)
        found = data_parallel(clipped, mesh)(*given)
        worst.append(errors(found, clipped(params, buffers, x[whole], y[whole])))
        found, aux = data_parallel(weighted, mesh)(weights[part], *given)
        expected = weighted(weights[whole], params, buffers, x[whole], y[whole])
        worst.append(errors(found, expected[0]))
        assert total == 0 or torch.equal(aux["labels"][1], expected[1]["labels"][1])
    traced = data_parallel(vgrad.clipped_grad(with_aux, max_norm=1, has_aux=True), mesh)
    few = 3 * min(rank, 1)
    none = torch.zeros(few, dtype=torch.bool)
    _, aux = traced(params, buffers, x[:few], y[:few], mask=none)
    assert aux["x"].shape == (0, 4)

    def reading(params, buffers, x):
        return params["w"] * x.sum(), x

    norms = vgrad.per_sample_norm(reading, strategy="vmap", has_aux=True)
    one = {"w": torch.tensor(2.0)}
    with pytest.raises(RankError, match="of the same dtypes and trailing shapes"):
        data_parallel(norms, mesh)(one, {}, torch.ones(2, 3 + rank))
    parallel = data_parallel(norms, mesh)
    with pytest.raises(RuntimeError, match="call outside of torch.func's transforms"):
        torch.func.jvp(lambda p: parallel(p, {}, torch.ones(2, 3))[0], (one,), (one,))
    return worst


def test_a_rank_without_samples_has_lists_of_the_others_kinds(some):
    for worst in some.run(_of_kinds, some.size):
        assert max(worst) < 0.02, worst


def _late(size):
    mesh = mesh_of(size)
    rank = mesh.get_local_rank("dp")
    loss, params, buffers, (x, y) = problem("mlp")
    moments = data_parallel(vgrad.gradient_moments(loss), mesh)
    finished, told = collectives.Summing.finished, []
    for last in (1, 3):  # between two sums, and after all of them
        calls = []

        def failing(self, tensors, calls=calls, last=last):
            found = finished(self, tensors)
            calls.append(found)
            if rank and len(calls) == last:
                return {}  # in which sums are missing
            return found

        collectives.Summing.finished = failing
        try:
            moments(params, buffers, x, y)
        except Exception as error:
            told.append((type(error), str(error)))
        finally:
            collectives.Summing.finished = finished
    return told


def test_what_fails_after_sums_fails_on_all(ranks):
    first, second = ranks(2).run(_late, 2)
    assert [kind for kind, _ in second] == [KeyError, KeyError]
    assert [kind for kind, _ in first] == [RankError, RankError]
    assert all("rank 1 stopped with KeyError" in text for _, text in first)


def _as_formed(size, strategy, spoilt, broken):
    """Return the error of a sum in tiny buckets, and in which order things happened."""
    mesh = mesh_of(size)
    rank, events = mesh.get_local_rank("dp"), []
    loss, params, buffers, (x, y) = problem("mlp", torch.float64, 8)
    if spoilt:
        x[5] = torch.inf
    clipped = vgrad.clipped_grad(loss, max_norm=0.5, strategy=strategy)
    part = slice(rank * 8 // size, (rank + 1) * 8 // size)
    reduce, give = torch.distributed.all_reduce, collectives.Summing.give
    room = collectives._BUCKET

    def sending(*given, **options):
        events.append("sent")
        return reduce(*given, **options)

    def giving(self, name, value):
        events.append("formed")
        if broken and rank and events.count("formed") == 2:
            raise ValueError("out of order")
        give(self, name, value)

    torch.distributed.all_reduce, collectives.Summing.give = sending, giving
    collectives._BUCKET = 1
    try:
        found = data_parallel(clipped, mesh)(params, buffers, x[part], y[part])
    except Exception as error:
        return type(error), str(error)
    finally:
        torch.distributed.all_reduce, collectives.Summing.give = reduce, give
        collectives._BUCKET = room
    last = len(events) - events[::-1].index("formed") - 1
    return errors(found, clipped(params, buffers, x, y)), events.index("sent") < last


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_sums_travel_while_others_are_formed(some, strategy, spoilt):
    for error, early in some.run(_as_formed, some.size, strategy, spoilt, False):
        assert error < 1e-12
        assert early


def test_what_fails_between_sums_fails_on_all(ranks):
    first, second = ranks(2).run(_as_formed, 2, "recorded", False, True)
    assert second == (ValueError, "out of order")
    assert first[0] is RankError
    assert "rank 1 stopped with ValueError: out of order" in first[1]
    first, _ = ranks(2).run(_as_formed, 2, "recorded", False, False)  # in step again
    assert first[0] < 1e-12


def _no_room(size):
    """Let a bucket of one rank fail before it travels."""
    mesh = mesh_of(size)
    rank, joined, calls = mesh.get_local_rank("dp"), torch.cat, []
    loss, params, buffers, (x, y) = problem("mlp")
    clipped = data_parallel(vgrad.clipped_grad(loss, max_norm=0.5), mesh)
    room = collectives._BUCKET

    def failing(tensors):
        calls.append(None)
        if rank and len(calls) == 2:
            raise MemoryError("no room")
        return joined(tensors)

    collectives._BUCKET = 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "torch", SimpleNamespace(**vars(torch)))
        collectives.torch.cat = failing
        try:
            clipped(params, buffers, x, y)
        except Exception as error:
            told = type(error), str(error)
        finally:
            collectives._BUCKET = room
    return told, clipped(params, buffers, x, y).losses.shape


def test_a_bucket_that_fails_leaves_the_ranks_in_step(ranks):
    (first, shape), (second, _) = ranks(2).run(_no_room, 2)
    assert second == (MemoryError, "no room")
    assert first[0] is RankError
    assert "rank 1 stopped with MemoryError: no room" in first[1]
    assert shape == (14,)


def _refused():
    mesh = mesh_of(2)
    loss, *_ = problem("mlp")
    with pytest.raises(TypeError, match="got products of pairs"):
        data_parallel(vgrad.per_sample_gram(loss), mesh)
    with pytest.raises(TypeError, match="expected what a per-sample transform"):
        data_parallel(loss, mesh)
    with pytest.raises(ValueError, match="expected the range of indices"):
        distributed.local_batches([[0]], mesh, own=range(0, 4, 2))


def _samplers():
    mesh = mesh_of(2)
    rank = mesh.get_local_rank("dp")
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
    own = range(0, 10, 2) if rank else range(10)
    expected = (ValueError, "range of indices that") if rank else (RankError, "rank 1")
    with pytest.raises(expected[0], match=expected[1]):
        distributed.local_batches(sampler, mesh, own=own)


def test_samplers_that_would_count_a_sample_twice_are_refused(ranks):
    ranks(2).run(_samplers)


def test_what_is_no_transform_is_refused(ranks):
    ranks(2).run(_refused)


def _parts(size, batches):
    mesh = mesh_of(size)
    rank = mesh.get_local_rank("dp")
    cut = distributed.local_batches(batches, mesh)
    held = range(5 * rank, 5 * rank + 5) if rank < size - 1 else range(5 * rank, 99)
    streamed = distributed.local_batches(batches, mesh, own=held)
    assert len(cut) == len(streamed) == len(batches)
    return list(cut), [[held.start + each for each in part] for part in streamed]


def test_batches_are_cut_without_rest_and_without_overlap(some):
    batches = [[], [3], [0, 2, 4, 5, 9, 11, 40], list(range(50)), [98]]
    results = some.run(_parts, some.size, batches)
    for kind in range(2):
        joined = [
            [index for result in results for index in result[kind][place]]
            for place in range(len(batches))
        ]
        assert joined == batches
    for place, batch in enumerate(batches):
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
    mesh = mesh_of(size)
    ranks = Ranks.of("test", mesh, "dp")
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 3), "b": torch.randn(5, 4)}
    x = torch.randn(2 * size, 3)
    part = x[2 * ranks.rank : 2 * ranks.rank + 2]
    expected = vgrad.clipped_grad(_Changing((1,)), max_norm=0.5)(params, {}, x).grads
    worst = []
    for scales in ((1,), (1, 10, 100, 1000)):
        scales = scales if ranks.rank == 0 else (1,)
        clip = vgrad.clipped_grad(
            _Changing(scales), max_norm=0.5, passes=2, strategy="recorded"
        )
        worst.append(
            errors(data_parallel(clip, mesh)(params, {}, part).grads, expected)
        )
        found = sharded.sharded_call(clip, ranks, shard(params, mesh), {}, (part,))
        worst.append(errors(gather(found.grads, mesh), expected))
    return worst


def test_ranks_drop_sums_of_two_kinds_of_gradients(some):
    for worst in some.run(_changing, some.size):
        assert max(worst) < 2e-6, worst

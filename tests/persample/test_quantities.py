"""The contract of all quantities, however they are executed, and their options."""

import functools
import itertools
import math
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.losses import (
    STRATEGIES,
    assert_gradients,
    assert_quantities,
    every_clipping,
    every_strategy,
    product,
    randn,
    squared,
)
from vgrad import explain, tree
from vgrad.generators import sample_keys
from vgrad.persample.engine import STRATEGIES as TABLE
from vgrad.precision import DynamicLossScale, NoOpLossScale, StaticLossScale

SIZE = 7
MASK = torch.tensor([True, False, True, True, False, True, False])
DIFFERENTIABLE = ("vmap", "loop")
INF = float("inf")
EXECUTORS = {
    "auto": {},
    "recorded, chunked": {"strategy": "recorded", "chunk_size": 3},
    "chunks of one": {"strategy": "recorded", "chunk_size": 1},
    "chunks that fit": {"chunk_size": "auto"},
    "vmap": {"strategy": "vmap"},
    "vmap, chunked": {"strategy": "vmap", "chunk_size": 3},
    "loop": {"strategy": "loop"},
    "keyed": {"randomness": "different"},
    "scaled": {"loss_scale": StaticLossScale(1234.567)},
    "scaled, chunked": {"loss_scale": DynamicLossScale(2.0**16), "chunk_size": 2},
    "scaled, vmap": {"loss_scale": StaticLossScale(2.0**-6), "strategy": "vmap"},
    "scaled, loop": {"loss_scale": StaticLossScale(1234.567), "strategy": "loop"},
    "not scaled": {"loss_scale": NoOpLossScale()},
    "replay": {},
}
FULL, OTHERS = ("mlp", "tied"), ("recorded, chunked", "vmap, chunked")
every_quantity = pytest.mark.parametrize("name", problems.TRANSFORMS)
every_way = pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
built = functools.cache(losses.build)


@functools.cache
def directions(name, shape, dim=5, kind="rademacher", seed=3):
    """Directions of one parameter, [k, P], as projections of unit vectors."""
    size = math.prod(shape)
    units = torch.eye(size, dtype=torch.float64).view(size, *shape)
    compute = vgrad.per_sample_projection(product_of_all, dim, seed=seed, kind=kind)
    found = compute({name: torch.zeros(shape).double()}, {}, {name: units})
    return (found[name] if isinstance(dim, tuple) else found).T


def product_of_all(params, buffers, sample):
    return sum((params[name] * value).sum() for name, value in sample.items())


def flat(grad):
    return grad.reshape(len(grad), math.prod(grad.shape[1:]))


def gram(grads, others):
    return sum(flat(g) @ flat(others[n]).T for n, g in grads.items())


def projected(grads, seed=3):
    return sum(
        flat(g) @ directions(n, g.shape[1:], seed=seed).T for n, g in grads.items()
    )


def clipped_sum(grads, kind, bound=0.7):
    norms = oracle.norms(grads)
    if kind == "flat":
        return oracle.clipped(grads, bound), int((norms > bound).sum())
    if kind == "automatic":
        sums = oracle.weighted(grads, bound / (norms + 0.01))
        return sums, int((norms > bound).sum())
    layers, sums = {}, {}
    for name, grad in grads.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = grad
    share = bound / len(layers) ** 0.5
    for layer in layers.values():
        sums |= oracle.clipped(layer, share)
    above = [oracle.norms(layer) > share for layer in layers.values()]
    return sums, int(torch.stack(above).any(0).sum())


def expected(name, grads, keep):
    whole, grads = grads, {n: grad[keep] for n, grad in grads.items()}
    if name in problems.CLIPPED:
        sums, clipped = clipped_sum(grads, name)
        if name == "per_layer":  # which is normalized by 3
            sums = {each: value / 3 for each, value in sums.items()}
        return {"grads": sums, "norms": oracle.norms(grads), "clipped": clipped}
    weights = torch.linspace(-1, 2, len(keep), dtype=torch.float64)[keep]
    return {
        "grad": lambda: grads,
        "norm": lambda: oracle.norms(grads),
        "norm of parameters": lambda: {n: oracle.norms({n: grads[n]}) for n in grads},
        "gram": lambda: gram(grads, grads),
        "gram, cross": lambda: gram(grads, {n: g[:3] for n, g in whole.items()}),
        "projection": lambda: projected(grads),
        "weighted": lambda: oracle.weighted(grads, weights),
        "moments": lambda: {
            "mean": {n: g.mean(0) for n, g in grads.items()},
            "variance": {n: g.var(0) for n, g in grads.items()},
            "second_moment": {n: g.square().mean(0) for n, g in grads.items()},
        },
    }[name]()


def assert_expected(name, found, grads, keep, tolerance=oracle.EXACT):
    exact = expected(name, grads, keep)
    assert not any(leaf.requires_grad for leaf in tree.tensors(found))
    if name in problems.CLIPPED:
        assert int(found.nonfinite) == 0
        assert found.losses.shape == found.norms.shape
        found = found._replace(clipped=int(found.clipped))
    oracle.assert_exact(parts(found, exact), exact, tolerance)


def parts(found, exact):
    if hasattr(found, "_asdict"):
        return {name: getattr(found, name) for name in exact}
    return found


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize(
    ("executor", "net", "masked"),
    [
        *itertools.product(EXECUTORS, FULL, [False]),
        *itertools.product(EXECUTORS, ["mlp"], [True]),
        *itertools.product(["auto", "recorded, chunked"], losses.HARD, [True, False]),
        *itertools.product(OTHERS, losses.CASES, [False]),
        *itertools.product(["scaled"], ("cnn", "bare_and_frozen"), [False]),
    ],
)
@every_quantity
def test_a_quantity_is_that_of_the_samples_that_count(name, executor, net, masked):
    case = built(net, SIZE)
    compute = problems.TRANSFORMS[name](case.loss, **EXECUTORS[executor])
    if executor == "keyed" and name != "gram, cross":
        compute = compute.keyed(sample_keys(1, 0, SIZE))
    elif executor == "replay":
        compute = vgrad.compile(compute)
        problems.call(name, compute, case.given, MASK if masked else None)
    found = problems.call(name, compute, case.given, MASK if masked else None)
    keep = MASK if masked else torch.ones(SIZE, dtype=torch.bool)
    assert_expected(name, found, case.expected, keep)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@every_strategy
@pytest.mark.parametrize("name", losses.CASES)
def test_every_quantity_equals_the_reference(name, strategy):
    """In float32; in float64 those of the table above do."""
    loss, params, buffers, batch, exact = losses.build(name, 5, torch.float32)
    chunk_size = 2 if strategy == "vmap" else None
    options = {"strategy": strategy, "chunk_size": chunk_size}
    options |= {"buffers": buffers, "expected": exact, "tolerance": 2e-5}
    assert_quantities(loss, params, batch, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("condition", [1.0, 1e4])
def test_the_tolerance_for_rounding_grows_with_the_condition_alone(condition, dtype):
    found = oracle.rounding(
        lambda x: {"y": x - (1 - 1 / condition)}, torch.ones(20), dtype=dtype
    )
    assert 0.4 < found / (condition * torch.finfo(dtype).eps) < 1.001


@every_way
@every_quantity
@pytest.mark.parametrize("empty", ["batch", "mask"])
def test_an_empty_batch_gives_zeros_without_running_the_loss(empty, name, strategy):
    def loss(params, buffers, *sample):
        raise AssertionError("the loss ran")

    params = problems.sites_params(torch.bfloat16)
    params["c"] = torch.ones(2, dtype=torch.complex64)
    batch, mask = problems.sites_batch(3, "nan", dtype=torch.bfloat16), None
    if empty == "batch":
        batch = losses.rows(batch, slice(0))
    else:
        loss, mask = problems.sites, torch.zeros(3) > 0
    compute = problems.TRANSFORMS[name](loss, strategy=strategy)
    found = problems.call(name, compute, (params, {}, *batch), mask)
    none, zero = torch.zeros(0), torch.tensor(0)
    sums = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in params.items()}
    sums["c"] = torch.zeros(2, dtype=torch.complex64)
    nan = {n: torch.full_like(value, torch.nan) for n, value in sums.items()}
    reals = {n: value.abs() for n, value in nan.items()}
    clipped = {"grads": sums, "norms": none, "nonfinite": zero, "clipped": zero}
    exact = dict.fromkeys(problems.CLIPPED, clipped) | {
        "grad": {n: p[None][:0] for n, p in params.items()},
        "norm": none,
        "norm of parameters": dict.fromkeys(params, none),
        "gram": torch.zeros(0, 0),
        "gram, cross": torch.zeros(0, 0 if mask is None else 3),
        "projection": torch.zeros(0, 5),
        "weighted": sums,
        "moments": {"mean": nan, "variance": reals, "second_moment": reals}
        | {"noise_scale": torch.tensor(torch.nan)},
    }
    found = parts(found, exact[name])
    oracle.assert_exact(found, exact[name])
    dtypes, exact = (
        [leaf.dtype for leaf in tree.tensors(each)] for each in (found, exact[name])
    )
    assert dtypes == exact


@every_way
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", problems.HAS_AUX)
def test_aux_is_stacked_over_samples(name, masked, strategy):
    def loss(params, buffers, x, g):
        return problems.sites(params, buffers, x, g), {"sum": x.sum(), "g": g}

    mask, keep = (MASK, MASK) if masked else (None, slice(None))
    params, _, x, g = given = problems.sites_params(), {}, *problems.sites_batch(SIZE)
    options = {"strategy": strategy, "chunk_size": 3, "has_aux": True}
    compute = problems.TRANSFORMS[name](loss, **options)
    found, aux = problems.call(name, compute, given, mask)
    oracle.assert_exact(aux["g"], g[keep], 0)
    torch.testing.assert_close(aux["sum"], x[keep].sum((1, 2)))
    if name in problems.CLIPPED:
        rows = [problems.sites(params, {}, *row) for row in zip(x, g, strict=True)]
        torch.testing.assert_close(found.losses, torch.stack(rows)[keep])
    assert problems.call(name, compute, (params, {}, x[:0], g[:0]))[1] is None


@pytest.mark.parametrize(
    ("strategy", "chunk_size"),
    [("auto", None), ("recorded", 4), ("vmap", 4), ("loop", None)],
)
@every_quantity
@pytest.mark.parametrize("planted", problems.PLANTED)
def test_samples_left_out_change_no_bit_whatever_they_hold(
    planted, chunk_size, name, strategy
):
    options = {"strategy": strategy, "chunk_size": chunk_size}
    compute = problems.TRANSFORMS[name](problems.sites, **options)
    batches = problems.sites_batch(7), problems.sites_batch(7, planted, planted)
    params, mask = problems.sites_params(), torch.arange(7) < 5
    plain, found = (
        problems.call(name, compute, (params, {}, *batch), mask) for batch in batches
    )
    if name.startswith("gram"):
        # Where one sample is far out of range, products of a chunk are in float64.
        oracle.assert_exact(found, plain, 1e-6)
        return
    if name in problems.CLIPPED:
        # Sums over fewer rows may be rounded in another order.
        oracle.assert_exact(found.grads, plain.grads, 1e-6)
        found, plain = (each._replace(grads={}) for each in (found, plain))
    oracle.assert_exact(found, plain, 0)


NO_MASKS = [
    (torch.tensor([2, 1, 1]), r"boolean .* got torch.int64 \(3,\)"),
    (torch.ones(3), r"boolean .* got torch.float32 \(3,\)"),
    (torch.ones(2) > 0, r"shape \(3,\), .* got torch.bool \(2,\)"),
    (torch.ones(3, 1) > 0, r"shape \(3,\), .* got torch.bool \(3, 1\)"),
    ([True, False, True], "got list"),
]


@pytest.mark.parametrize(
    ("name", "mask", "text"),
    [(name, *NO_MASKS[0]) for name in problems.TRANSFORMS]
    + [("flat", *each) for each in NO_MASKS[1:]],
)
def test_what_is_no_mask_of_the_batch_is_refused(name, mask, text):
    compute = problems.TRANSFORMS[name](problems.sites)
    given = problems.sites_params(), {}, *problems.sites_batch(3)
    match = rf"{compute.options.function}\(.*mask.*{text}"
    with pytest.raises(ValueError, match=match):
        problems.call(name, compute, given, mask)


@every_way
@every_quantity
@pytest.mark.parametrize("randomness", ["different", "same", "keys"])
def test_dropout_draws_the_same_for_every_quantity(randomness, name, strategy):
    """From a seed or from keys, and under a mask the numbers of the whole batch."""
    loss, params, buffers, draw = problems.built("dropout", torch.float64)
    options = {"strategy": strategy, "randomness": randomness}
    keys, mask, keep = None, MASK, MASK
    if randomness == "keys":
        options |= {"randomness": "different", "chunk_size": 4}
        keys, mask, keep = sample_keys(11, 3, SIZE), None, ~MASK | MASK
    given, states = (params, buffers, *draw(SIZE)), []

    def seeded(name, mask=None):
        torch.manual_seed(5)
        compute = problems.TRANSFORMS[name](loss, **options).keyed(keys)
        found = problems.call(name, compute, given, mask)
        states.append(torch.get_rng_state())
        return found

    if name != "gram, cross":
        assert_expected(name, seeded(name, mask), seeded("grad"), keep)
    elif mask is not None:
        oracle.assert_exact(seeded(name, mask), seeded(name)[keep])
    else:
        with pytest.raises(ValueError, match=r"per_sample_gram\(cross, keys\)"):
            seeded(name)
        return
    assert torch.equal(*states)


def test_counts_are_of_the_samples_that_count_in_whatever_order_they_ran():
    def branching(params, buffers, x):
        loss = (params["w"] * x).sum()
        return 2 * loss if x[0] > 0 else loss

    x = torch.tensor([[-1.0, 1.0], [1.0, torch.nan], [-1.0, 2.0]])
    mask = torch.tensor([True, True, False])
    clipped = vgrad.clipped_grad(branching, max_norm=0.5)
    for rows in ([0, 1, 2], [2, 1, 0]):
        found = clipped({"w": torch.ones(2)}, {}, x[rows], mask=mask[rows])
        assert (int(found.nonfinite), int(found.clipped)) == (1, 1)


def linear_loss(params, buffers, x):
    return (params["w"] * x).sum() + params["b"] * x[0]


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "cnn", "flattened"])
def test_the_bound_holds_under_autocast_and_in_low_precision(name, dtype, strategy):
    case = losses.CASES[name]
    loss, params, buffers = losses.of_model(
        case.model(), lambda out, y: 100 * case.criterion(out, y), dtype
    )
    x, y = case.batch(3)
    compute = vgrad.clipped_grad(loss, max_norm=0.1, strategy=strategy)
    for row in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            one = x[row : row + 1].to(dtype), y[row : row + 1]
            grads = compute(params, buffers, *one).grads.values()
        assert all(value.dtype == torch.float32 for value in grads)
        norm = torch.cat([value.double().flatten() for value in grads]).norm()
        assert float(norm) == pytest.approx(0.1, rel=1e-6)


@every_strategy
def test_under_the_autocast_of_the_caller_no_cast_weight_outlives_its_call(strategy):
    seen = []

    def loss(params, buffers, x):
        product = x @ params["w"]
        seen.append(product.dtype)
        return product.float().square().sum()

    params, x = {"w": torch.randn(3, 2, requires_grad=True)}, torch.randn(2, 4, 3)
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    with torch.autocast("cpu", torch.bfloat16):
        _ = x @ params["w"]
        first, second = (compute(params, {}, x)["w"] for _ in range(2))
        assert torch.is_autocast_cache_enabled()
    assert set(seen) == {torch.bfloat16}
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert bool(second.any())


def test_memory_of_a_chunked_sum_does_not_grow_with_the_batch():
    params = {"w": torch.zeros(100_000)}
    options = {"chunk_size": 4, "verify": False}
    compute = vgrad.clipped_grad(product, max_norm=1.0, **options)
    peaks = []
    for size in (16, 64):
        with losses.Peak() as peak:
            compute(params, {}, torch.ones(size, 1))
        peaks.append(peak.most)
    assert 4 * 400_000 <= peaks[0] <= peaks[1] < 1.01 * peaks[0]


def reading(params, buffers, x):
    h = F.linear(x, params["w"])
    return h.square().sum() if x.sum() > 0 else h.sin().sum()


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
@pytest.mark.parametrize("ways", [(), ("mask",), ("parts",), ("mask", "parts"), "aux"])
def test_gradients_of_chunks_are_written_into_one_result(strategy, ways):
    params = {n: randn(200, 100, seed=k) for k, n in enumerate("wabc")}
    x = randn(24, 100, seed=4).abs() * torch.arange(-11, 13).sign()[:, None]
    x = x if "parts" in ways else x.abs()
    mask = torch.arange(24) % 5 != 2

    def loss(params, buffers, x):
        value = sum(reading({"w": each}, buffers, x) for each in params.values())
        return (value, {"x": x[:2]}) if ways == "aux" else value

    options = {"strategy": strategy, "has_aux": ways == "aux"}
    given = {"mask": mask} if "mask" in ways else {}
    compute = vgrad.per_sample_grad(loss, chunk_size=4, **options)
    with losses.Peak() as peak:
        found = compute(params, {}, x, **given)
    exact = vgrad.per_sample_grad(loss, **options)(params, {}, x, **given)
    oracle.assert_exact(found, exact)
    size = 24 * sum(each.nbytes for each in params.values())
    assert peak.most < (1.5 if strategy == "recorded" else 1.7) * size


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_chunks_can_be_differentiated(inside):
    x = randn(5, 3, seed=4)
    params = {"w": randn(2, 3).requires_grad_(not inside)}
    compute = vgrad.per_sample_grad(reading, chunk_size=2, strategy="vmap")

    def total(params):
        return compute(params, {}, x)["w"].square().sum()

    def plain(w):
        runs = [torch.func.grad(reading)({"w": w}, {}, each)["w"] for each in x]
        return torch.stack(runs).square().sum()

    (expected,) = torch.autograd.grad(
        plain(w := params["w"].detach().requires_grad_()), w
    )
    if inside:
        found = torch.func.grad(total)(params)["w"]
    else:
        (found,) = torch.autograd.grad(total(params), params["w"])
    oracle.assert_exact(found, expected)


@every_strategy
def test_a_loss_may_change_its_sample_but_not_its_parameters(strategy):
    def changes_sample(params, buffers, x):
        return (params["w"] * x.mul_(2)).sum()

    x = torch.ones(3, 2)
    compute = vgrad.per_sample_grad(changes_sample, strategy=strategy)
    assert torch.equal(compute(ONES, {}, x)["w"], torch.full((3, 2), 2.0))
    assert torch.equal(x, torch.ones(3, 2))


WRITES = [  # test_functional has more of them, in forward passes
    "n.add_(1)",
    "k.__ior__(1)",
    "k.__ilshift__(1)",
    "F.embedding(torch.tensor([0]), w, max_norm=0.01)",
    "w.t()[0].zero_()",
    "torch.sin(w, out=w)",
    "F.relu(w, inplace=True)",
    "torch._foreach_mul_([w], 2.0)",
]


@pytest.mark.parametrize("requires_grad", [False, True])
@every_strategy
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_loss_that_writes_into_what_it_is_given_is_refused(
    write, strategy, requires_grad
):
    def loss(params, buffers, x):
        with torch.set_grad_enabled(write.startswith(("n.", "k.", "F.embedding"))):
            eval(write, globals() | params | buffers)
        return (params["w"] @ x).sin().sum()

    params = {"w": torch.full((2, 3), 0.9, requires_grad=requires_grad)}
    buffers, x = {"n": torch.zeros(()), "k": torch.tensor(2)}, torch.randn(4, 3)
    refused = "changes nothing it is given, got a write|writes in place into a tensor"
    for compute in (
        vgrad.per_sample_norm(loss, strategy=strategy),
        vgrad.clipped_grad(loss, max_norm=1.0, strategy=strategy, chunk_size="auto"),
        explain(vgrad.per_sample_norm(loss, strategy=strategy)),
    ):
        with pytest.raises(RuntimeError, match=refused):
            compute(params, buffers, x)


def test_a_write_into_a_parameter_that_has_the_name_of_a_buffer_is_seen():
    def loss(params, buffers, x):
        return (params["w"].detach().add_(1) * params["w"] * x).sum()

    given = {"w": torch.ones(3)}, {"w": torch.ones(3)}, torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="changes nothing it is given"):
        vgrad.per_sample_norm(loss, strategy="loop")(*given)


def leaves(name, compute, w, x):
    found = tree.tensors(problems.call(name, compute, ({"w": w}, {}, x)))
    return tuple(each for each in found if each.dtype.is_floating_point)


@pytest.mark.parametrize("strategy", DIFFERENTIABLE)
@pytest.mark.parametrize("chunk_size", [None, 2])
@every_quantity
def test_results_can_be_differentiated_where_inputs_require_grad(
    name, chunk_size, strategy
):
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    x, options = losses.randn(3, 2), {"strategy": strategy, "chunk_size": chunk_size}
    compute = problems.TRANSFORMS[name](
        lambda p, b, x: (p["w"] * x).sum() ** 3, **options
    )
    assert torch.autograd.gradcheck(lambda w: leaves(name, compute, w, x), (w,))


@every_quantity
def test_it_works_inside_transforms_and_inference_mode(name):
    members, x = losses.randn(2, 2), losses.randn(3, 2, seed=1)
    compute = problems.TRANSFORMS[name](squared, chunk_size=2)
    alone = [leaves(name, compute, w, x) for w in members]
    mapped = torch.vmap(lambda w: leaves(name, compute, w, x))(members)
    torch.testing.assert_close(
        mapped, tuple(map(torch.stack, zip(*alone, strict=True)))
    )
    with torch.inference_mode():
        again = [leaves(name, compute, w, x) for w in members]
    torch.testing.assert_close(again, alone)
    fresh = problems.TRANSFORMS[name](squared)  # whose first call is inside of one
    mapped = torch.vmap(lambda w: leaves(name, fresh, w, x))(members)
    torch.testing.assert_close(tuple(each[0] for each in mapped), alone[0])


@every_way
@pytest.mark.parametrize("name", [n for n in problems.TRANSFORMS if n != "projection"])
def test_complex_parameters_count_as_pairs_of_real_ones(name, strategy):
    def loss(params, buffers, x):
        w = params["w"]
        w = w if w.is_complex() else torch.view_as_complex(w)
        return (w * torch.view_as_complex(x)).abs().pow(3).sum()

    compute = problems.TRANSFORMS[name](loss, strategy=strategy)
    pairs, x = losses.randn(3, 2), losses.randn(SIZE, 3, 2, seed=1)
    exact = problems.call(name, compute, ({"w": pairs}, {}, x))
    given = {"w": torch.view_as_complex(pairs)}, {}, x
    found = problems.call(name, compute, given)
    if name == "moments":
        fields = ("variance", "second_moment")
        exact = {each: getattr(exact, each)["w"].sum(-1) for each in fields}
        found = {each: getattr(found, each)["w"] for each in fields}
    for one, other in zip(tree.tensors(found), tree.tensors(exact), strict=True):
        one = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 2])
@every_way
def test_weighted_sums_are_differentiated_by_their_weights_or_refuse(
    strategy, chunk_size, also
):
    def loss(params, buffers, x):  # the second parameter has no rule, the third no use
        return (F.linear(x, params["w"]) * params["v"]).sin().sum()

    shapes = {"w": (2, 3), "v": (2,), "none": (1,)}
    params = {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    x = torch.randn(5, 3, dtype=torch.float64)
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True)
    exact = oracle.loss_gradients(loss, params, {}, (x,))
    if also:
        params = {name: value.requires_grad_() for name, value in params.items()}
    compute = vgrad.weighted_grad(loss, strategy=strategy, chunk_size=chunk_size)
    total = compute(weights, params, {}, x)
    oracle.assert_exact(total, oracle.weighted(exact, weights), 1e-12)
    for name, value in total.items():
        # Only together with something else would a constant go unnoticed.
        mixed = value.sum() + weights.sum()
        if strategy in DIFFERENTIABLE:
            (found,) = torch.autograd.grad(mixed, weights, retain_graph=True)
            torch.testing.assert_close(found, 1 + exact[name].flatten(1).sum(1))
        else:
            with pytest.raises(RuntimeError, match='without a graph.*strategy="vmap"'):
                torch.autograd.grad(mixed, weights)
    with torch.no_grad():
        total = compute(weights, params, {}, x)
    assert not any(value.requires_grad for value in total.values())
    gradient = torch.func.grad(
        lambda weights: compute(weights, params, {}, x)["w"][0, 0]
    )
    if strategy != "recorded":
        torch.testing.assert_close(gradient(weights.detach()), exact["w"][:, 0, 0])


@every_strategy
def test_results_are_no_function_of_a_loss_scale(strategy):
    scale = torch.tensor(8.0, requires_grad=True)
    own = types.SimpleNamespace(loss_scale=scale)
    compute = vgrad.per_sample_grad(squared, strategy=strategy, loss_scale=own)
    grads = compute(ONES, {}, X)
    assert torch.equal(grads["w"], torch.full((3, 2), 2.0))
    assert not grads["w"].requires_grad


def drops(params, buffers, x):
    return (params["w"] * F.dropout(x, 0.5)).sum()


def test_a_loop_draws_the_masks_that_the_loss_would_draw_by_itself():
    params, x = {"w": torch.ones(64)}, torch.ones(4, 64)
    compute = vgrad.per_sample_grad(drops, strategy="loop", randomness="different")
    torch.manual_seed(3)
    found = compute(params, {}, x)["w"]
    torch.manual_seed(3)
    rows = [torch.func.grad(drops)(params, {}, row)["w"] for row in x]
    assert torch.equal(found, torch.stack(rows))


@every_clipping
def test_a_rescaled_sum_is_the_sum_over_the_bound(clipping):
    params, x = {"w": torch.ones(2), "b": torch.zeros(())}, torch.randn(5, 2)
    options = {"max_norm": 0.25, "normalize_by": 8.0, "clipping": clipping}
    plain = vgrad.clipped_grad(linear_loss, **options)
    rescaled = vgrad.clipped_grad(linear_loss, **options, rescale=True)
    assert plain.sensitivity == vgrad.Sensitivity(0.25 / 8)
    assert plain.sensitivity.neighbours == "add_or_remove_one"
    assert rescaled.sensitivity == vgrad.Sensitivity(0.125)
    found, exact = (each(params, {}, x) for each in (rescaled, plain))
    for name, value in exact.grads.items():
        torch.testing.assert_close(found.grads[name], value * 4, rtol=1e-7, atol=0)
    assert torch.equal(found.norms, exact.norms)


@every_quantity
def test_transforms_can_be_pickled(name):
    transform = problems.TRANSFORMS[name](product)
    again = pickle.loads(pickle.dumps(transform))
    given = ONES, {}, torch.randn(3, 2)
    found, exact = (
        tree.tensors(problems.call(name, each, given)) for each in (again, transform)
    )
    assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True))


def test_parameters_of_several_dtypes_go_together():
    def loss(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"].float() * x).sum()

    params = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    x = torch.randn(3, 2)
    assert vgrad.per_sample_grad(loss)(params, {}, x)["b"].dtype == torch.bfloat16
    result = vgrad.clipped_grad(loss, max_norm=0.1)(params, {}, x)
    assert result.grads["b"].dtype == result.norms.dtype == torch.float32


clip, grad, norm = vgrad.clipped_grad, vgrad.per_sample_grad, vgrad.per_sample_norm
moments, project = vgrad.gradient_moments, vgrad.per_sample_projection
AUTOMATIC = {"max_norm": INF, "clipping": "automatic"}
BY_LAYER = {"max_norm": {"a.*": 1.0, "b.*": 1e-40}, "clipping": "per_layer"}
SMALL = {"max_norm": 2e-30, "normalize_by": 4}
PATTERNS = r"groups\['a'\]='w'\): expected a list or tuple of patterns.*\['w'\]"
LEAST = r"\): expected 1e-30 <"  # bounds that float32 can keep
BAD = [
    (clip, {"max_norm": 0}, ValueError, r"=0\): expected max_norm > 0"),
    (clip, {"max_norm": "1"}, TypeError, "max_norm='1'.*a number"),
    (clip, {"max_norm": 1, "normalize_by": -1}, ValueError, "normalize_by=-1"),
    (clip, {"max_norm": INF, "rescale": True}, ValueError, "max_norm=inf.*< 1e"),
    (clip, {"max_norm": 1, "passes": 3}, ValueError, "passes"),
    (clip, {"max_norm": 1e-31}, ValueError, r"\(max_norm=1e-31" + LEAST),
    (clip, {"max_norm": 1e31}, ValueError, "max_norm=1e[+]31" + LEAST),
    (clip, SMALL, ValueError, "normalize_by=5e-31"),
    (clip, AUTOMATIC, ValueError, r"\(max_norm=inf" + LEAST),
    (clip, BY_LAYER, ValueError, r"max_norm\['b.\*'\]=1e-40" + LEAST),
    (grad, {"chunk_size": 0}, ValueError, "chunk_size=0"),
    (grad, {"chunk_size": "some"}, ValueError, "'some'.*'auto'"),
    (grad, {"randomness": "all"}, ValueError, "randomness='all'.*'different'"),
    (grad, {"strategy": "fast"}, ValueError, ".*".join(map(repr, TABLE))),
    (moments, {"strategy": "fast"}, ValueError, r"moments\(strategy='fast'\)"),
    (norm, {"loss": 3}, TypeError, "loss=3.*sample_loss"),
    (norm, {"groups": {"a": "w"}}, TypeError, PATTERNS),
    (norm, {"groups": "module"}, ValueError, "groups='module'"),
    (norm, {"groups": {}}, ValueError, r"groups={}\): expected a group at least"),
    (norm, {"groups": {"a": []}}, ValueError, "and a pattern in each"),
    (project, {"dim": 0, "seed": 0}, ValueError, r"dim=0\): expected.* number >= 1"),
    (project, {"dim": 2, "seed": -1}, ValueError, r"seed=-1\): .* number >= 0"),
    (project, {"dim": 2, "seed": 0.5}, ValueError, r"seed=0.5\): expected a whole"),
    (project, {"dim": 2, "seed": 0, "kind": "a"}, ValueError, "'rademacher', 'gau"),
    (project, {"dim": 2}, TypeError, "seed"),  # never chosen for the caller
]


@pytest.mark.parametrize(("make", "options", "error", "message"), BAD)
def test_bad_arguments_are_named(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**{"loss": linear_loss, **options})


def test_groups_are_apart_and_match():
    params, x = {"w": torch.ones(2), "b": torch.zeros(())}, torch.ones(3, 2)

    def norms(groups):
        return vgrad.per_sample_norm(linear_loss, groups=groups)(params, {}, x)

    torch.testing.assert_close(norms({"both": ["b", "w"]})["both"], norms(None))
    with pytest.raises(ValueError, match="'c' matches none of"):
        norms({"a": ["w", "c"]})
    with pytest.raises(ValueError, match="'w' is in 'a' and 'all'"):
        norms({"a": ["w"], "all": ["*"]})


X, ONES = torch.ones(3, 2), {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("params", "buffers", "batch", "error", "message"),
    [
        (ONES, {}, (X, torch.ones(4)), ValueError, r"sizes \[3, 4\]"),
        (ONES, {}, (torch.ones(()),), ValueError, "without dimensions"),
        (ONES, {}, (3, None), ValueError, "no tensor"),
        (ONES, {}, (X.numpy(),), TypeError, "ndarray"),
        (ONES, None, (X,), TypeError, "buffers.*expected a dictionary"),
        (ONES, (X,), (X,), TypeError, "buffers.*expected a dictionary"),
        ({}, {}, (X,), ValueError, "at least one parameter"),
        ({"w": X.long()}, {}, (X,), ValueError, "int64 in 'w'. Move it to the buffers"),
        ({"w": [1.0]}, {}, (X,), TypeError, "tensor in 'w', got a list"),
    ],
)
def test_bad_inputs_are_named(params, buffers, batch, error, message):
    with pytest.raises(error, match=message):
        vgrad.per_sample_grad(linear_loss)(params, buffers, *batch)


def test_a_nonfinite_sample_adds_nothing_inside_a_transform_either():
    compute = vgrad.clipped_grad(product, max_norm=1.0)
    x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [0.1, 0.2]])
    mapped = torch.vmap(lambda w: compute({"w": w}, {}, x).grads["w"])(torch.ones(1, 2))
    torch.testing.assert_close(mapped[0], compute(ONES, {}, x).grads["w"])


@every_strategy
def test_gradients_are_partial_where_a_parameter_is_reached_twice(strategy):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([[3.0, 4.0], [5.0, 6.0]])

    def anchored(params, buffers, x):
        return product(params, buffers, x) + (params["w"] * buffers["anchor"]).sum()

    compute = vgrad.per_sample_grad(anchored, strategy=strategy)
    torch.testing.assert_close(compute({"w": w}, {"anchor": w}, x)["w"], x + w)
    compute = vgrad.per_sample_grad(product, strategy=strategy)
    torch.testing.assert_close(compute({"w": w}, {}, x * w)["w"], x * w)

    def both(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"] ** 2).sum()

    grads = vgrad.per_sample_grad(both, strategy=strategy)({"a": w, "b": w}, {}, x)
    torch.testing.assert_close(grads["a"], x)
    torch.testing.assert_close(grads["b"], (2 * w).expand(2, 2))


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_loss_may_bind_names_anew_in_its_dictionaries(strategy, chunk_size):
    def plain(params, buffers, x):
        return (F.normalize(params["w"], dim=0) * x).sum() * buffers["n"]

    def loss(params, buffers, x):
        params["w"] = F.normalize(params["w"], dim=0)
        value = product(params, buffers, x) * buffers["n"]
        buffers["n"] = buffers["n"] + x.sum()
        return value

    x = torch.randn(4, 2, dtype=torch.float64)
    params = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    buffers = {"n": torch.tensor(3.0, dtype=torch.float64)}
    exact = oracle.loss_gradients(plain, params, buffers, (x,))
    options = {"strategy": strategy, "chunk_size": chunk_size, "tolerance": 1e-12}
    assert_gradients(loss, params, (x,), buffers=buffers, expected=exact, **options)
    assert float(buffers["n"]) == 3


@pytest.mark.parametrize("strategy", DIFFERENTIABLE)
@pytest.mark.parametrize("size", [1.0, 1e-26, 1e26])
def test_second_derivatives_survive_a_sample_without_gradient(strategy, size):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]]) * size**0.5
    norms = vgrad.per_sample_norm(squared, strategy=strategy)({"w": w}, {}, x)
    (found,) = torch.autograd.grad(norms.sum(), w)
    exact = 2 * size * w.detach() / w.detach().norm()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)
    clipped = vgrad.clipped_grad(squared, max_norm=1.0, strategy=strategy)
    (found,) = torch.autograd.grad(clipped({"w": w}, {}, x).grads["w"].sum(), w)
    assert bool(found.isfinite().all())


WRONG = {
    "complex": (lambda p, b, x: product(p, b, x) * (1 + 1j), "real tensor.*complex64"),
    "whole": (lambda p, b, x: (p["w"] > x).sum(), "real tensor.*int64"),
    "shape": (lambda p, b, x: p["w"] * x, r"without dimensions.*torch.float32 \(2,\)"),
    "pair": (lambda p, b, x: (product(p, b, x), x), "has_aux=True a pair.*tuple"),
    "no aux": (product, r"returns \(scalar, aux\), got a Tensor"),
    "aux": (lambda p, b, x: (product(p, b, x), {"n": 3}), "aux, got a int"),
}


@every_strategy
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_returns_something_else_is_refused(name, strategy):
    loss, message = WRONG[name]
    compute = vgrad.per_sample_grad(loss, strategy=strategy, has_aux="aux" in name)
    with pytest.raises(TypeError if name == "aux" else ValueError, match=message):
        compute(ONES, {}, X)


def test_weights_keep_their_digits():
    weights, one = torch.tensor([2**24 + 1]), torch.ones(1, 1, dtype=torch.float64)
    total = vgrad.weighted_grad(product)(weights, {"w": one[0]}, {}, one)["w"]
    assert float(total) == 2**24 + 1
    for weights, message in [
        (torch.ones(1) * 1j, "one real weight a sample"),
        (torch.ones(2), r"shape \(1,\), got \(2,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            vgrad.weighted_grad(product)(weights, {"w": one[0]}, {}, one)


def test_rows_of_a_result_share_no_memory():
    def loss(params, buffers, x):
        return params["u"].sum() + (params["w"] * x).sum()

    grads = vgrad.per_sample_grad(loss)({"u": torch.ones(2), **ONES}, {}, X)
    grads["u"][0] = 7
    assert torch.equal(grads["u"][1], torch.ones(2))


def test_sparse_gradients_are_made_dense_by_the_loop():
    model = nn.Sequential(
        nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(4, 3)
    )
    loss, params, buffers = losses.of_model(model, dtype=torch.float32)
    batch = torch.tensor([[1, 1], [0, 3]]), torch.tensor([0, 2])
    compute = vgrad.clipped_grad(loss, max_norm=0.1, strategy="loop")
    found = compute(params, buffers, *batch).grads
    model[0].sparse = False
    exact = oracle.model_gradients(model, losses.CASES["mlp"].run, batch, 2)
    oracle.assert_exact(found, oracle.clipped(exact, 0.1), 1e-5)

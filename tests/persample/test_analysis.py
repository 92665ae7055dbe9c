"""Products, projections and moments: properties of each, beside the contract."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.examples import examples
from tests.losses import STRATEGIES, Peak, build, every_strategy, product, rows
from tests.persample.test_quantities import directions, gram
from tests.persample.test_quantities import product_of_all as inner
from vgrad import gradient_moments, per_sample_gram, per_sample_projection

close = torch.testing.assert_close


def products(grads):
    return gram(grads, grads)


@pytest.mark.parametrize(
    "groups", ["parameter", "layer", {"a": ["0.*"], "b": ["2.weight"]}]
)
def test_groups_have_gram_matrices_of_their_own(groups):
    loss, params, buffers, batch, expected = build("padding_idx", 4)
    found = per_sample_gram(loss, groups=groups)(params, buffers, *batch)
    norms = vgrad.per_sample_norm(loss, groups=groups)(params, buffers, *batch)
    assert found.keys() == norms.keys()
    for group in found:
        oracle.assert_exact(found[group].diagonal(), norms[group].square())
    cross = per_sample_gram(loss, groups=groups)(params, buffers, *batch, cross=batch)
    for group in found:
        oracle.assert_exact(cross[group], found[group])
    if not isinstance(groups, dict):
        oracle.assert_exact(sum(found.values()), products(expected))
    with pytest.raises(ValueError, match="per_sample_gram.*matches none"):
        per_sample_gram(loss, groups={"a": ["x"]})(params, buffers, *batch)


def test_the_two_batches_may_have_sequences_of_different_length():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, lambda out, y: F.cross_entropy(out.mean(1), y))
    long = torch.randint(9, (3, 7)), torch.randint(3, (3,))
    short = torch.randint(9, (4, 2)), torch.randint(3, (4,))
    left, right = (
        vgrad.per_sample_grad(loss)(params, buffers, *batch) for batch in (long, short)
    )
    for strategy in STRATEGIES:
        compute = per_sample_gram(loss, strategy=strategy, chunk_size=3)
        found = compute(params, buffers, *long, cross=short)
        oracle.assert_exact(found, gram(left, right))


def test_a_second_batch_must_be_a_tuple():
    gram, params, x = per_sample_gram(inner), {"w": torch.ones(2)}, torch.ones(2, 2)
    with pytest.raises(TypeError, match=r"cross.*\(x, y\), got a Tensor"):
        gram(params, {}, {"w": x}, cross=x)
    with pytest.raises(ValueError, match="one batch size, got no tensor"):
        gram(params, {}, {"w": x}, cross=())


@pytest.mark.parametrize(
    ("strategy", "chunk_size"), [("recorded", None), ("recorded", 2), ("vmap", None)]
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "padding_idx", "tied"])
def test_a_sample_that_is_not_finite_spoils_its_own_entries_alone(
    name, strategy, chunk_size
):
    loss, params, buffers, batch, expected = build(name, 5)

    def scaled(params, buffers, *sample):
        *sample, factor = sample
        return loss(params, buffers, *sample) * factor

    options = {"strategy": strategy, "chunk_size": chunk_size}
    factors = torch.tensor([1.0, torch.inf, 1.0, 1.0, torch.nan]).double()
    fine = factors.isfinite()
    exact = products(expected)
    gram = per_sample_gram(scaled, groups="parameter", **options)
    for second in ({}, {"cross": (*batch, factors)}):
        found = gram(params, buffers, *batch, factors, **second)
        for each in found.values():
            assert torch.equal(each.isfinite(), fine[:, None] & fine)
        oracle.assert_exact(sum(found.values())[fine][:, fine], exact[fine][:, fine])
    project = per_sample_projection(scaled, 6, seed=0, **options)
    found = project(params, buffers, *batch, factors)
    assert torch.equal(found.isfinite(), fine[:, None].expand(5, 6))
    plain = per_sample_projection(loss, 6, seed=0, **options)
    oracle.assert_exact(found[fine], plain(params, buffers, *batch)[fine])


@every_strategy
def test_rows_that_are_not_finite_show_where_no_index_is_common(strategy):
    def loss(params, buffers, index, factor):
        return (F.embedding(index, params["w"]) * factor).sum()

    params, index = {"w": torch.ones(5, 2)}, torch.tensor([[0, 1], [2, 3], [3, 3]])
    factors = torch.tensor([torch.inf, 1.0, 1.0])
    found = per_sample_gram(loss, strategy=strategy)(params, {}, index, factors)
    assert not bool(found[0].isfinite().any() | found[:, 0].isfinite().any())
    close(found[1:, 1:], torch.tensor([[4.0, 4.0], [4.0, 8.0]]))


@every_strategy
def test_results_of_low_precision_are_float32_and_ignore_autocast(strategy):
    torch.manual_seed(0)
    model = nn.Linear(6, 3).bfloat16()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    batch = torch.randn(4, 6).bfloat16(), torch.randint(3, (4,))
    grads = vgrad.per_sample_grad(loss, strategy=strategy)(params, buffers, *batch)
    exact = products({name: g.detach().double() for name, g in grads.items()})
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            gram = per_sample_gram(loss, strategy=strategy)
            found = gram(params, buffers, *batch)
            cross = gram(params, buffers, *batch, cross=batch)
            project = per_sample_projection(loss, 50, seed=0, strategy=strategy)
            sketch = project(params, buffers, *batch)
        assert found.dtype == sketch.dtype == torch.float32
        # Recorded gradients of one position are products that were never rounded.
        oracle.assert_exact(found, exact, 1e-2)
        oracle.assert_exact(cross, exact, 1e-2)
        oracle.assert_exact(found, cross.double(), 1e-6)


@every_strategy
def test_projections_of_complex_parameters_keep_their_products(strategy):
    def loss(params, buffers, x):
        return (params["w"] * x).abs().square().sum()

    params = {"w": torch.view_as_complex(torch.randn(2, 3, 2))}
    x, options = torch.view_as_complex(torch.randn(2, 3, 2)), {"strategy": strategy}
    exact = per_sample_gram(loss, **options)(params, {}, x)
    assert torch.equal(exact, exact.T)
    sketch = per_sample_projection(loss, 40_000, seed=0, **options)(params, {}, x)
    oracle.assert_exact(sketch @ sketch.T, exact.double(), 0.1)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_directions_depend_on_seed_name_and_shape_alone(kind):
    loss, params, buffers, batch, _ = build("mlp", 5)
    options = {"seed": 2, "kind": kind}
    whole = per_sample_projection(loss, 9, **options)(params, buffers, *batch)
    assert torch.equal(
        whole, per_sample_projection(loss, 9, **options)(params, buffers, *batch)
    )
    part = per_sample_projection(loss, 9, **options)
    oracle.assert_exact(
        part(params, buffers, *rows(batch, slice(1, 3))), whole[1:3], 1e-12
    )
    backwards = dict(reversed(params.items()))
    oracle.assert_exact(part(backwards, buffers, *batch), whole, 1e-12)
    single = {name: value.float() for name, value in params.items()}
    x, y = batch
    oracle.assert_exact(part(single, buffers, x.float(), y), whole, 1e-5)
    frozen, constant = vgrad.freeze(params, buffers, ["0.*"])
    other, rest = vgrad.freeze(params, buffers, ["2.*"])
    split = part(frozen, constant, *batch) + part(other, rest, *batch)
    oracle.assert_exact(split, whole, 1e-12)

    shape = (4, 3)
    found = directions("w", shape, 6, kind, seed=0)
    assert torch.equal(found, directions("w", shape, 6, kind, seed=0))
    for name, seed in (("v", 0), ("w", 1)):
        assert not torch.equal(found, directions(name, shape, 6, kind, seed=seed))
    for shape in ((4, 3), (3, 4)):
        each = directions("w", shape, 6, kind, seed=0).view(6, *shape)
        assert torch.linalg.matrix_rank(each).tolist() == [1] * 6
    if kind == "rademacher":
        close(found.abs() * 6**0.5, torch.ones_like(found))


def test_directions_stay_the_same_from_run_to_run():
    found = directions("w", (6,), 2, "rademacher", seed=0).sign().long()
    assert found.tolist() == [[-1, -1, 1, 1, -1, 1], [-1, 1, -1, -1, 1, -1]]


def test_seeds_that_share_their_low_bits_have_other_directions():
    a, b = (directions("w", (8,), 4, "gaussian", seed=s) for s in (5, 5 + 2**32))
    assert not torch.equal(a, b)


def spread(g, h, *, structured):
    """Variance of one direction's product for normal numbers, as documented."""
    whole = [torch.cat([part.flatten() for part in each]) for each in (g, h)]
    left, right = whole
    found = left.square().sum() * right.square().sum() + (left @ right) ** 2
    if structured:
        a, b = g[0], h[0]
        squares = (a.T @ b).square().sum() + (a @ b.T).square().sum()
        found = found + 2 * (squares + (a @ b.T @ a @ b.T).trace())
    return float(found)


GENERATOR = torch.Generator().manual_seed(0)
RANK_ONE = torch.outer(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 0.3]))
PAIRS = {
    "rank one": (RANK_ONE, torch.zeros(2), RANK_ONE, torch.zeros(2)),
    "any": tuple(torch.randn(s, generator=GENERATOR) for s in ((3, 2), (2,)) * 2),
    "identity": (torch.eye(3, 2), torch.ones(2), torch.eye(3, 2), -torch.ones(2)),
}


def project_pair(pair, dim, *, flat=False, **options):
    """Return the products of each direction with two gradients of `w` and `b`."""
    a, b, c, d = (each.double() for each in PAIRS[pair])
    batch = {"w": torch.stack([a, c]), "b": torch.stack([b, d])}
    batch = {n: value.flatten(1) for n, value in batch.items()} if flat else batch
    params = {name: torch.zeros_like(value[0]) for name, value in batch.items()}
    left, right = per_sample_projection(inner, dim, **options)(params, {}, batch)
    return left * right * dim


@pytest.mark.parametrize("pair", PAIRS)
def test_products_of_normal_projections_have_the_mean_and_variance_documented(pair):
    a, b, c, d = (each.double() for each in PAIRS[pair])
    options = {"dim": 400_000, "seed": 11, "kind": "gaussian"}
    each = project_pair(pair, **options)
    exact = (a * c).sum() + (b * d).sum()
    variance = spread((a, b), (c, d), structured=True)
    plain = spread((a, b), (c, d), structured=False)
    assert abs(float(each.mean() - exact)) < 5 * (variance / len(each)) ** 0.5
    assert float(each.var()) == pytest.approx(variance, rel=0.15)
    assert plain <= variance <= 4 * plain * (1 + 1e-12)
    if pair == "rank one":
        assert variance == pytest.approx(4 * plain)
    # Against directions without structure, which the same parameters get when flat.
    each = project_pair(pair, flat=True, **options)
    assert float(each.var()) == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("pair", PAIRS)
def test_products_of_signed_projections_vary_as_all_signs_together(pair):
    a, b, c, d = (each.double() for each in PAIRS[pair])
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=7))).double()
    u, v, s = signs[:, :3], signs[:, 3:5], signs[:, 5:]
    left = torch.einsum("ko,oi,ki->k", u, a, v) + s @ b
    right = torch.einsum("ko,oi,ki->k", u, c, v) + s @ d
    exact, variance = (left * right).mean(), (left * right).var(correction=0)
    close(exact, (a * c).sum() + (b * d).sum())
    assert float(variance) <= spread((a, b), (c, d), structured=True)
    each, room = project_pair(pair, 200_000, seed=12), (variance / 200_000) ** 0.5
    assert abs(float(each.mean() - exact)) < 5 * float(room) + 1e-9
    assert float(each.var()) == pytest.approx(float(variance), rel=0.05, abs=1e-9)


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", ["mlp", "cnn", "padding_idx", "tied", "grouped_conv"])
def test_pairs_project_both_sides_of_each_parameter(name, strategy, chunk_size):
    loss, params, buffers, batch, expected = build(name, 5)
    options = {"seed": 1, "strategy": strategy, "chunk_size": chunk_size}
    for dim in ((2, 3), (3, 500), (500, 500)):
        project = per_sample_projection(loss, dim, **options)
        found = project(params, buffers, *batch)
        for each, grad in expected.items():
            o, i = len(grad[0]), grad[0].numel() // len(grad[0])
            matrix = grad.ndim > 2
            size = min(dim[0], o) * min(dim[1], i) if matrix else min(math.prod(dim), o)
            assert found[each].shape == (5, size)
            if size == o * i:  # nothing to project: the gradient itself
                oracle.assert_exact(found[each], grad.flatten(1))
        empty = project(params, buffers, *rows(batch, slice(0)))
        assert {n: x.shape[1:] for n, x in empty.items()} == {
            n: x.shape[1:] for n, x in found.items()
        }
    one = per_sample_projection(loss, (2, 3), seed=1, strategy="loop")
    found = per_sample_projection(loss, (2, 3), **options)(params, buffers, *batch)
    oracle.assert_exact(found, one(params, buffers, *batch))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_directions_of_pairs_are_outer_products_that_keep_inner_products(kind):
    shape, options = (5, 2, 4), {"kind": kind}
    total, count, names = 0.0, 3000, [f"w{number}" for number in range(30)]
    params = dict.fromkeys(names, torch.zeros(shape, dtype=torch.float64))
    batch = dict.fromkeys(names, torch.eye(40, dtype=torch.float64).view(40, *shape))
    for seed in range(count // len(names)):
        project = per_sample_projection(inner, (3, 4), seed=seed, **options)
        total = total + sum(x @ x.T for x in project(params, {}, batch).values())
    # The mean of P^T P is the identity; each entry has a variance of 9 at most.
    assert float((total / count - torch.eye(40)).abs().max()) < 5 * 3 / count**0.5
    each = directions("w", shape, (3, 4), seed=0, **options).view(3, 4, 5, 8)
    sides = each.transpose(1, 2).reshape(15, 32)
    assert int(torch.linalg.matrix_rank(sides, rtol=1e-5)) == 1
    if kind == "rademacher":
        assert each.abs().unique().numel() == 1
        assert float(each.abs().max()) == pytest.approx(1 / 12**0.5)
    kept = directions("w", shape, (5, 4), seed=0, **options).view(5, 4, 5, 8)
    assert torch.equal(kept.abs().sum((1, 3)) > 0, torch.eye(5) > 0)


def test_a_pair_must_be_two_whole_numbers():
    for dim, part in (
        (0, "dim=0"),
        ((2, 0), r"dim\[1\]=0"),
        ((1, 2, 3), r"dim=\[1, 2, 3"),
    ):
        with pytest.raises(ValueError, match=rf"per_sample_projection\({part}"):
            per_sample_projection(inner, dim, seed=0)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def moments_of(x, **options):
    params = {"w": torch.ones(x.shape[1:], dtype=x.dtype)}
    return gradient_moments(product, **options)(params, {}, x)


def noise(expected):
    """Both estimates as their authors write them, from norms alone."""
    size = len(next(iter(expected.values())))
    each = oracle.norms(expected).square().mean()
    mean = oracle.norms({n: g.mean(0)[None] for n, g in expected.items()}).square()[0]
    return size / (size - 1) * (each - mean), (size * mean - each) / (size - 1)


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", ["mlp", "grouped_conv", "padding_idx", "tied"])
@pytest.mark.parametrize("size", [2, 5])
def test_estimates_of_the_noise_equal_the_reference(name, size, strategy, chunk_size):
    loss, params, buffers, batch, expected = build(name, size)
    compute = gradient_moments(loss, strategy=strategy, chunk_size=chunk_size)
    found = compute(params, buffers, *batch)
    trace, square = noise(expected)
    close((found.trace, found.squared_norm), (trace, square), rtol=1e-8, atol=0)
    close(found.noise_scale, trace / square, rtol=1e-8, atol=0)
    for n, grad in expected.items():
        variance = grad.var(0)
        used = variance > 1e-12 * variance.max().clamp(min=1e-12)
        close(
            found.signal_to_noise[n][used],
            (grad.mean(0).square() / variance)[used],
            rtol=1e-8,
            atol=0,
        )
    clip = vgrad.clipped_grad(loss, max_norm=1.0)
    close(found.losses, clip(params, buffers, *batch).losses)


def test_the_noise_scale_of_many_batches_is_a_ratio_of_averages():
    average, traces, squares = vgrad.NoiseScale(), [], []
    assert bool(average.value.isnan())
    for size in (2, 5, 3):
        loss, params, buffers, batch, expected = build("mlp", size)
        params = {name: x.float() for name, x in params.items()}
        batch = [x.float() if x.is_floating_point() else x for x in batch]
        average = average.add(gradient_moments(loss)(params, buffers, *batch))
        assert not average.value.requires_grad  # else a log would keep all graphs
        trace, square = noise(expected)
        traces.append(trace)
        squares.append(square)
    expected = torch.stack(traces).mean() / torch.stack(squares).mean()
    close(average.value, expected, rtol=1e-4, atol=0)
    ratios = torch.stack(traces) / torch.stack(squares)
    assert abs(ratios.mean() - expected) > 0.01 * expected  # what must not be done


@every_strategy
def test_one_sample_has_a_mean_and_no_variance(strategy):
    loss, params, buffers, batch, expected = build("cnn", 1)
    found = gradient_moments(loss, strategy=strategy)(params, buffers, *batch)
    oracle.assert_exact(found.mean, {n: g[0] for n, g in expected.items()})
    squares = {n: g[0].square() for n, g in expected.items()}
    oracle.assert_exact(found.second_moment, squares)
    for undefined in (found.variance, found.signal_to_noise):
        assert all(bool(value.isnan().all()) for value in undefined.values())
    assert bool(found.noise_scale.isnan())
    assert bool(vgrad.NoiseScale().add(found).value.isnan())
    assert found.losses.shape == (1,)


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_deviations_from_a_large_mean_are_not_lost(strategy, chunk_size, dtype):
    x = (1e3 + 1e-2 * torch.randn(64, 16, generator=source())).to(dtype)
    found = moments_of(x, strategy=strategy, chunk_size=chunk_size)
    exact = x.double().var(0)
    assert 0 < float(exact.min()) < float(exact.max()) < 3e-4
    close(found.variance["w"].double(), exact, rtol=1e-6, atol=0)
    ratio = x.double().mean(0).square() / exact
    close(found.signal_to_noise["w"].double(), ratio, rtol=1e-6, atol=0)
    naive = x.square().mean(0) - x.mean(0).square()  # what must not be done
    if dtype == torch.float32:
        assert float(((naive.double() - exact) / exact).abs().max()) > 1


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e30, -3.0])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_equal_samples_have_no_variance(value, chunk_size):
    found = moments_of(torch.full((5, 3), value), chunk_size=chunk_size)
    assert torch.equal(found.mean["w"], torch.full((3,), value))
    assert torch.equal(found.variance["w"], torch.zeros(3))
    assert bool(found.signal_to_noise["w"].isinf().all())
    assert float(found.noise_scale) == 0


def outer(params, buffers, x, y):
    return (F.linear(x, params["w"]) * y).sum()


def sides(size, dtype):
    x, y = (torch.randn(size, n, generator=source(n)).to(dtype) for n in (5, 4))
    large, small = (1e-25, 1e25) if dtype == torch.float32 else (1e-130, 1e140)
    even = (torch.arange(size, dtype=dtype) % 2 == 0).to(dtype)[:, None]
    signs = (2 * even - 1).expand_as(x)
    return {
        "ordinary": (x, y),
        "rectified": (x.relu(), y.relu()),
        "ten deviations from zero": (1 + 0.1 * x, 1 + 0.1 * y),
        "a hundred": (100 + x, 1 + 0.001 * y),
        "equal": (x[:1].expand(size, 5), y[:1].expand(size, 4)),
        "equal products": (x[:1] * (1 + y[:, :1].abs()), y[:1] / (1 + y[:, :1].abs())),
        "small": (x * 1e-12, y * 1e-12),
        "far apart": (x * large, y * small),
        "far apart by sample": (
            x * (even * large * 100 + (1 - even)),
            y * (even * (small / 1e12) + (1 - even) * 1e-10),
        ),
        "opposite": (signs * 2.0**-40, torch.full_like(y, 2.0**-40)),
        "one is not finite": (x, y.clone().index_fill(0, torch.tensor([1]), torch.nan)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 33])
@pytest.mark.parametrize("size", [3, 12, 70])
@pytest.mark.parametrize("name", sides(3, torch.float32))
def test_moments_of_products_keep_their_digits(name, size, chunk_size, masked, dtype):
    x, y = sides(size, dtype)[name]
    mask = torch.arange(size) % 3 != 1 if masked else torch.ones(size).bool()
    given = {"mask": mask} if masked else {}
    params = {"w": torch.ones(4, 5, dtype=dtype)}
    found = gradient_moments(outer, chunk_size=chunk_size)(params, {}, x, y, **given)
    grads = (y.double()[:, :, None] * x.double()[:, None])[mask]
    exact, mean = grads.var(0), grads.mean(0)
    rtol = 1e-5 if dtype == torch.float32 else 1e-9
    if name == "a hundred":  # of which gradients that are formed round some
        rtol *= 100
    if name == "equal":
        assert not found.variance["w"].any()
    elif name == "equal products":
        eps = torch.finfo(dtype).eps
        assert bool((found.variance["w"] <= (2 * eps * mean).square()).all())
    else:
        for values, expected in [
            (found.variance, exact),
            (found.second_moment, grads.square().mean(0)),
        ]:
            room = {"rtol": rtol, "atol": 0, "equal_nan": True}
            close(values["w"].double(), expected.to(dtype).double(), **room)
        ratio = found.signal_to_noise["w"].double().sqrt()
        close(ratio, mean.abs() / exact.sqrt(), rtol=rtol, atol=rtol, equal_nan=True)
        close(found.trace, exact.sum(), rtol=rtol, atol=0, equal_nan=True)
    close(found.mean["w"].double(), mean, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "embedding_bag"])
@pytest.mark.parametrize("autocast", [False, True])
def test_moments_of_many_samples_equal_the_reference(name, autocast):
    loss, params, buffers, batch, expected = build(name, 40)
    if autocast:
        params = {n: each.float() for n, each in params.items()}
        batch = [x.float() if x.is_floating_point() else x for x in batch]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = gradient_moments(loss)(params, buffers, *batch)
        if autocast:
            expected = vgrad.per_sample_grad(loss, strategy="loop")
            expected = expected(params, buffers, *batch)
    variance = {n: g.double().var(0) for n, g in expected.items()}
    tolerance = 0.02 if autocast else oracle.EXACT
    found = {n: each.double() for n, each in found.variance.items()}
    oracle.assert_exact(found, variance, tolerance)


@pytest.mark.parametrize(("positions", "formed"), [(1, 10), (2, 50)])
def test_gradients_of_few_samples_are_formed_at_a_time(positions, formed):
    x, params = torch.randn(64, positions, 512), {"w": torch.randn(512, 512)}
    compute = gradient_moments(lambda p, b, x: F.linear(x, p["w"]).square().sum())
    with Peak() as peak:
        compute(params, {}, x)
    assert peak.most < formed * params["w"].nbytes  # where all are 64


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_ratios_survive_squares_that_leave_the_range_of_float32(size):
    x = 1 + torch.randn(6, 4, generator=source())
    found, plain = moments_of(x * size), moments_of(x)
    for name in ("noise_scale", "signal_to_noise"):
        close(getattr(found, name), getattr(plain, name), rtol=1e-5, atol=0)


@examples(40)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    size=st.integers(2, 9),
    chunk_size=st.sampled_from([None, 1, 2, 5]),
    strategy=st.sampled_from(STRATEGIES),
    offset=st.sampled_from([0.0, 1.0, -1e6]),
)
def test_chunks_of_any_size_have_the_moments_of_the_whole(
    shape, size, chunk_size, strategy, offset
):
    x = torch.randn(size, *shape, generator=source(size), dtype=torch.float64) + offset
    found = moments_of(x, strategy=strategy, chunk_size=chunk_size)
    close(found.mean["w"], x.mean(0), rtol=1e-12, atol=1e-12)

    def variance(x):
        return {"w": (x - x.mean(0)).square().sum(0) / (size - 1)}

    tolerance = 1e-12 + 8 * oracle.rounding(variance, x)
    oracle.assert_exact(found.variance, variance(x), tolerance)
    assert not bool((found.variance["w"] < 0).any())


def test_recorded_gradients_of_one_parameter_are_held_at_a_time():
    peaks, x = [], torch.randn(64, 64)
    for layers in (2, 10):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
        fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        compute = gradient_moments(vgrad.sample_loss(fmodel, F.mse_loss))
        with Peak() as peak:
            compute(params, buffers, x, x)
        peaks.append(peak.most)
    one = 64 * 64 * 64 * 4  # bytes of the gradients of one parameter
    assert peaks[1] - peaks[0] < one


@every_strategy
def test_moments_of_low_precision_are_float32(strategy):
    x = torch.randn(5, 3, generator=source()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = moments_of(x, strategy=strategy)
    for each in (*found[:3], found.signal_to_noise):
        assert each["w"].dtype == torch.float32
    close(found.mean["w"], x.float().mean(0))
    close(found.variance["w"], x.float().var(0))


@every_strategy
def test_a_sample_that_is_not_finite_spoils_its_parameters_alone(strategy):
    def loss(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"] * x[0]).sum()

    x = torch.tensor([[1.0, 2.0], [3.0, torch.nan], [5.0, 6.0]])
    params = {"a": torch.ones(2), "b": torch.ones(1)}
    found = gradient_moments(loss, strategy=strategy)(params, {}, x)
    close(found.mean["b"], torch.tensor([3.0]))
    close(found.variance["a"], torch.tensor([4.0, torch.nan]), equal_nan=True)
    assert bool(found.noise_scale.isnan())


def test_the_noise_scale_of_a_small_batch_may_be_negative():
    found = moments_of(torch.tensor([[1.0], [-1.0]]))
    assert float(found.noise_scale) == pytest.approx(2 / (0 - 1))

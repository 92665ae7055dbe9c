"""No sample adds more than its bound, whatever its size, and none in range is lost.

Inputs and gradients at the outputs have sizes of their own, from the smallest numbers
of float32 to the largest, so that a gradient of ordinary size may be made of numbers at
either end of the range. Beyond 1e15 a sample counts as not finite, and adds zero.
"""

import contextlib

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.examples import examples
from tests.losses import (
    STRATEGIES,
    clipped,
    clipped_lengths,
    every_strategy,
    length,
    norms,
    plan,
    singles,
)
from vgrad.ensemble import ensemble_clipped_grad
from vgrad.precision import StaticLossScale
from vgrad.training import TrainState, private_step

SLOW = [
    name if name == "recorded" else pytest.param(name, marks=pytest.mark.slow)
    for name in STRATEGIES
]
HALF = {torch.float16: 65504.0, torch.bfloat16: 3.3e38}
LARGEST = 3.4e38
"""Of float32."""


def linear(w, x, g):
    return (F.linear(x, w) * g).sum()


def convolved(w, x, g):
    return (F.conv1d(x, w, padding=1) * g).sum()


def grouped(w, x, g):
    return (F.conv1d(x, w, groups=2) * g).sum()


def looked_up(w, x, g):
    index = torch.arange(g.shape[0], device=w.device) * 3 % len(w)
    return (F.embedding(index, w) * g).sum()


def tied(w, x, g):
    return linear(w, x, g) + looked_up(w, x, g.mT[:3])


def twice(w, x, g):
    return linear(w, x[:1], g[:1]) + linear(w, x[1:].tanh(), g[1:])


def in_parts(w, x, g):
    return linear(w[:2], x, g[:, :2]) + linear(w[2:], x, g[:, 2:])


def normalised(w, x, g):
    # Squares of what is normalised would be infinite in float32.
    return (F.layer_norm(x.sign(), x.shape[-1:], w) * g).sum()


OPS = {  # and shapes of w, x and g
    "linear": (linear, (4, 3), (1, 3), (1, 4)),
    "linear, products": (linear, (4, 3), (2, 3), (2, 4)),
    "linear, many products": (linear, (64, 64), (30, 64), (30, 64)),
    "linear, direct": (linear, (2, 3), (40, 3), (40, 2)),
    "linear, wide": (linear, (3, 12), (1, 12), (1, 3)),
    "conv, products": (convolved, (6, 6, 3), (6, 4), (6, 4)),
    "conv, offsets": (convolved, (2, 2, 3), (2, 9), (2, 9)),
    "conv, groups": (convolved, (2, 1, 3), (1, 300), (2, 300)),
    "conv of groups": (grouped, (4, 2, 1), (4, 2), (4, 2)),
    "embedding": (looked_up, (4, 3), (1,), (3, 3)),
    "tied": (tied, (4, 3), (3, 3), (3, 4)),
    "twice": (twice, (4, 3), (2, 3), (2, 4)),
    "in parts": (in_parts, (4, 3), (1, 3), (1, 4)),
    "transposed": (lambda w, x, g: (x @ w.t() * g).sum(), (4, 3), (2, 3), (2, 4)),
    "elementwise": (lambda w, x, g: ((w * x) * g).sum(), (4,), (4,), (4,)),
    "normalised": (normalised, (4,), (2, 4), (2, 4)),
}
CLIPPING = {
    "flat": lambda bound: {"clipping": "flat", "max_norm": bound},
    "per_layer": lambda bound: {"clipping": "per_layer", "max_norm": bound},
    "dictionary": lambda bound: {
        "clipping": "per_layer",
        "max_norm": {"a.*": 0.6 * bound, "b.*": 0.8 * bound},
    },
    "automatic": lambda bound: {"clipping": "automatic", "max_norm": bound},
}


@contextlib.contextmanager
def flushed(on):
    """Take denormal numbers for zero: here, and not in threads that already run."""
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def sized(shape, sizes, dtype, generator):
    """Random numbers of each sample's size, none of them beyond its dtype."""
    numbers = torch.randn(len(sizes), *shape, generator=generator, dtype=torch.float64)
    numbers = numbers.clamp(-3, 3) / 3 + 0.2 * numbers.sign()
    column = torch.tensor(sizes, dtype=torch.float64).view(-1, *(1,) * len(shape))
    most = HALF.get(dtype, LARGEST)
    return (numbers * column).clamp(-most, most).to(dtype)


def made(name, sizes, dtype, seed=0):
    """Return a loss, its parameters, and a batch; sizes are of x, of g and of h."""
    op, weight, x, g = OPS[name]
    generator = torch.Generator().manual_seed(seed)
    columns = list(zip(*sizes, strict=True))
    batch = [
        sized(shape, column, dtype, generator)
        for shape, column in zip((x, g, (2,)), columns, strict=True)
    ]
    params = {"a.w": torch.zeros(weight, dtype=dtype)}
    params["b.w"] = torch.zeros(2, dtype=dtype)  # in a layer of its own

    def loss(params, buffers, x, g, h):
        return op(params["a.w"], x, g) + (params["b.w"] * h).sum()

    return loss, params, batch


def factors(exact, name, bound):
    """What the documented formulas multiply gradients {name: [B, ...]} by."""
    lengths = {each: oracle.norms({each: grad}) for each, grad in exact.items()}
    whole = torch.stack(list(lengths.values())).square().sum(0).sqrt()
    if name == "flat":
        return dict.fromkeys(exact, (bound / whole).clamp(max=1))
    if name == "automatic":
        return dict.fromkeys(exact, bound / (whole + 0.01))
    shares = {"per_layer": (0.5**0.5, 0.5**0.5), "dictionary": (0.6, 0.8)}[name]
    return {
        each: (share * bound / lengths[each]).clamp(max=1)
        for each, share in zip(exact, shares, strict=True)
    }


def flat(grads):
    return torch.cat([grad.detach().double().flatten() for grad in grads.values()])


def largest(loss, params, batch):
    """Largest number, or sum of absolute terms, that a backward pass meets, [B]."""
    positive = [each.double().abs() for each in batch]
    grads = oracle.loss_gradients(loss, params, {}, positive)
    met = [each.flatten(1).amax(1) for each in (*positive, *grads.values())]
    return torch.stack(met).amax(0).clamp(min=1)


def in_range(met, weights, bound):
    """Mark samples whose numbers up to `met` [B] are well within the range."""
    weights, least = torch.stack([*weights.values()]), bound / 2
    fits = (met < min(1e13, 1e23 * least)) & (weights.amin(0) > 1e-29)
    return fits & (weights.amax(0) * met.square() < 1e26)


EXPONENTS = st.one_of(
    st.sampled_from([-38.0, -20.0, 0.0, 20.0, 37.0, 38.4]),
    st.floats(-38, 12),
    st.floats(-38, 38.5),
)
WEIGHTS = st.one_of(st.sampled_from([-30.0, 0.0, 20.0, 30.0]), st.floats(-30, 30))


@pytest.mark.parametrize("strategy", SLOW)
@examples(60)
@given(
    name=st.sampled_from(list(OPS)),
    kind=st.sampled_from(list(CLIPPING)),
    dtype=st.sampled_from(
        [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ),
    exponents=st.lists(
        st.tuples(EXPONENTS, EXPONENTS, EXPONENTS), min_size=1, max_size=3
    ),
    bound=st.sampled_from([1e-25, 1e-6, 1e-2, 1.0, 1e25]),
    scale=st.sampled_from([None, None, 2.0**-120, 2.0**-10, 2.0**16, 2.0**120]),
    flush=st.booleans(),
)
def test_a_sample_of_any_size_is_clipped(
    strategy, name, kind, dtype, exponents, bound, scale, flush
):
    sizes = [[10.0**each for each in row] for row in exponents]
    loss, params, batch = made(name, sizes, dtype)
    exact = oracle.loss_gradients(loss, params, {}, batch)
    weights = factors(exact, kind, bound)
    met = largest(loss, params, batch) * max(scale or 1.0, 1 / (scale or 1.0))
    fits = (met < HALF.get(dtype, LARGEST) / 4) & in_range(met, weights, bound)
    compute = vgrad.clipped_grad(
        loss,
        strategy=strategy,
        loss_scale=None if scale is None else StaticLossScale(scale),
        **CLIPPING[kind](bound),
    )
    with flushed(flush):
        alone = [compute(params, {}, *sample) for sample in singles(batch)]
        whole = compute(params, {}, *batch)
    for row, one in enumerate(alone):
        found = flat(one.grads)
        assert float(found.norm()) <= bound * (1 + 1e-6)
        if int(one.nonfinite):
            assert not bool(found.any())
            assert not bool(fits[row])
            assert not bool(one.norms < torch.inf)
        elif dtype not in HALF and scale is None and not flush:
            expected = flat({n: weights[n][row] * exact[n][row] for n in exact})
            # A gradient in float32 loses one of its smallest numbers for each term.
            edge = (1 + sum(float(each[row]) for each in weights.values())) * 1e-42
            # Norms from products are rounded up where their terms cancel.
            room = 2e-5 if name == "linear, many products" else 3e-6
            assert float((found - expected).norm()) < room * bound + edge
            norm = flat({n: exact[n][row] for n in exact}).norm()
            if 1e-37 < float(norm) < LARGEST / 2:
                assert abs(float(one.norms / norm) - 1) < 1e-6
    total = torch.stack([flat(each.grads) for each in alone]).sum(0)
    if not flush:  # how much is flushed depends on what runs side by side
        assert float((flat(whole.grads) - total).norm()) <= 2e-6 * bound * len(sizes)
    assert float(flat(whole.grads).norm()) <= (1 + 1e-6) * bound * len(sizes)
    assert int(whole.nonfinite) == sum(int(each.nonfinite) for each in alone)


@pytest.mark.parametrize("strategy", SLOW)
@examples(40)
@given(
    name=st.sampled_from(list(OPS)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64]),
    rows=st.lists(
        st.tuples(EXPONENTS, EXPONENTS, EXPONENTS, WEIGHTS),
        min_size=1,
        max_size=3,
    ),
)
def test_quantities_are_right_as_far_as_float32_goes(strategy, name, dtype, rows):
    *sizes, large = zip(*((10.0**each for each in row) for row in rows), strict=True)
    loss, params, batch = made(name, list(zip(*sizes, strict=True)), dtype)
    weights = torch.tensor(large, dtype=dtype)
    assume(bool((largest(loss, params, batch) < LARGEST / 4).all()))
    exact = oracle.loss_gradients(loss, params, {}, batch)
    options = {"strategy": strategy}
    grads = vgrad.per_sample_grad(loss, **options)(params, {}, *batch)
    found = norms(loss, params, *batch, groups="parameter", **options)
    total = vgrad.weighted_grad(loss, **options)(weights, params, {}, *batch)
    for each, grad in exact.items():
        norm = oracle.norms({each: grad})
        gap = oracle.norms({each: grads[each].double() - grad})
        assert bool((gap < 1e-6 * norm + 1e-42).all())
        # Infinite is what the dtype of a norm cannot hold.
        near = (found[each] - norm).abs() <= 1e-6 * norm + 1e-42
        assert bool((near | (found[each] == norm.to(dtype))).all())
        added = float((weights.double().abs() * norm).sum())
        met = largest(loss, params, batch)
        if bool(((met < 1e13) & (met * weights.abs() < LARGEST / 4)).all()):
            gap = total[each].double() - oracle.weighted(exact, weights)[each]
            # What is lost is a small part of the sum, or of 1e-22.
            edge = 1e-42 * float(weights.abs().max())
            assert float(gap.norm()) < 2e-6 * (added + 1e-22) + edge


SMALL = [(1e-38, 1e-38, 1e-38), (0.0, 1.0, 1e-44), (1e12, 1e-38, 0.0), (0.0, 0.0, 0.0)]
LARGE = [(1e16, 1.0, 1.0), (1.0, 1e20, 1.0), (1e37, 1e37, 1.0), (1.0, 1.0, 1e18)]
BALANCED = [(1e25, 1e-25, 1.0), (1e-30, 1e30, 1.0)]


@every_strategy
@pytest.mark.parametrize("name", OPS)
def test_small_and_zero_gradients_are_ordinary(name, strategy):
    loss, params, batch = made(name, SMALL, torch.float32)
    if name == "normalised":  # whose inputs are signs
        batch[0] = batch[0] + 1.0
    exact = oracle.loss_gradients(loss, params, {}, batch)
    found = clipped(loss, 1.0, params, *batch, strategy=strategy)
    assert int(found.nonfinite) == 0
    total = flat(oracle.weighted(exact, factors(exact, "flat", 1.0)["a.w"]))
    assert (
        float((flat(found.grads) - total).norm()) < 1e-6 * float(total.norm()) + 1e-42
    )


@every_strategy
@pytest.mark.parametrize("kind", CLIPPING)
@pytest.mark.parametrize("name", OPS)
def test_samples_out_of_range_add_zero_and_are_counted(name, kind, strategy):
    sizes = [(1.0, 1.0, 1.0), *LARGE, *BALANCED, (0.1, 2.0, 0.5)]
    loss, params, batch = made(name, sizes, torch.float32)
    compute = vgrad.clipped_grad(loss, strategy=strategy, **CLIPPING[kind](0.1))
    rest = compute(params, {}, *(each[[0, -1]] for each in batch))
    assert int(rest.nonfinite) == 0
    mask = torch.ones(len(sizes), dtype=torch.bool)
    mask[5] = False
    functions = [compute]
    if name == "linear" and strategy != "loop":  # which no graph has
        functions.append(vgrad.compile(compute, backend="replay"))
    for function in functions:
        found = function(params, {}, *batch, mask=mask)
        kept = found.norms < torch.inf
        assert kept[[0, -1]].all()
        assert int(found.nonfinite) == int((~kept).sum()) > 0
        if strategy == "recorded" and name in ("linear", "conv, products", "tied"):
            assert not kept[1:-1].any()
            oracle.assert_exact(found.grads, rest.grads, 1e-6)
        # Other forms have gradients alone, whatever numbers these are made of.
        alone = [compute(params, {}, *one) for one in singles(batch)]
        alone = [each for each, counts in zip(alone, mask, strict=True) if counts]
        assert int(found.nonfinite) == sum(int(each.nonfinite) for each in alone)
        total = torch.stack([flat(each.grads) for each in alone]).sum(0)
        assert float((flat(found.grads) - total).norm()) < 1e-6


@pytest.mark.parametrize("name", ["linear, many products", "conv, products", "tied"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_room_for_rounding_is_not_more_than_rounding_needs(name, size):
    loss, params, batch = made(name, [(size, size, 0.0)], torch.float32)
    batch = [each.abs() for each in batch]
    for bound in (1e-4, 0.1):
        bound = bound * size**2
        (found,) = clipped_lengths(loss, params, batch, bound, strategy="recorded")
        assert bound * (1 - 2e-6) < found <= bound * (1 + 1e-6)


@pytest.mark.parametrize("positions", [4, 16, 64])
@pytest.mark.parametrize("sizes", [(256, 256), (1024, 512), (4096, 512)])
def test_features_that_are_all_equal_round_alike(sizes, positions):
    """Positions cancel, and no error of a sum over features averages out."""
    inputs, outputs = sizes
    clipped = vgrad.clipped_grad(losses.linear, max_norm=0.7, strategy="recorded")
    params = {"w": torch.zeros(outputs, inputs)}
    for apart in (2**-4, 2**-5, 2**-6, 2**-8):
        signs = torch.ones(positions, 1)
        signs[::2] = -1 - apart
        x, g = 1 + torch.randn(2, 1, 1, 1).abs()
        x, g = x.expand(1, positions, inputs), (g * signs).expand(1, -1, outputs)
        grad = clipped(params, {}, x, g).grads["w"]
        assert grad.double().norm() <= 0.7 * (1 + 1e-6)


@pytest.mark.parametrize("apart", [2**-10, 2**-14])
def test_norms_are_right_where_positions_cancel(apart):
    """Though products of positions have rounding errors as large as what is left."""
    params = {"w": torch.zeros(256, 256)}
    x, g = 1 + torch.randn(2, 3, 1, 256).abs()
    signs = torch.tensor([1.0, -1 - apart, 1 + apart, -1])[:, None]
    # The last position differs, so that something is left of two of them.
    batch = x.expand(-1, 4, -1), g * signs * torch.tensor([1, 1, 1, 1 + apart])[:, None]
    exact = oracle.norms(oracle.loss_gradients(losses.linear, params, {}, batch))
    found = norms(losses.linear, params, *batch, strategy="recorded")
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0)


def test_a_sample_that_is_not_finite_spoils_a_weighted_sum_and_no_other():
    loss, params, batch = made("linear", [(1.0, 1.0, 1.0)] * 2, torch.float32)
    batch[0][0, 0, 0] = torch.inf
    for weights in (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])):
        total = vgrad.weighted_grad(loss, strategy="recorded")
        found = total(weights, params, {}, *batch)
        assert not bool(found["a.w"][:, 0].isfinite().any())
        assert bool(found["a.w"][:, 1:].isfinite().all())
        assert bool(found["b.w"].isfinite().all())


def test_products_on_the_edge_of_zero_are_not_left_out_of_a_norm():
    # The square of the first position's input is zero in float32, and its term is not.
    x = torch.zeros(1, 2, 3)
    g = torch.zeros(1, 2, 4)
    x[0, 0], g[0, 0, 0] = 1e-23, 4e14
    x[0, 1, 0], g[0, 1, 1] = 1.0, 1e-9
    loss, params, _ = made("linear, products", [(1.0, 1.0, 1.0)], torch.float32)
    exact = (g[0].double().mT @ x[0].double()).norm()
    batch = x, g, torch.zeros(1, 2)
    norm = norms(loss, params, *batch, strategy="recorded")
    assert abs(float(norm / exact) - 1) < 1e-6
    found = clipped_lengths(loss, params, batch, 1e-10, strategy="recorded")
    assert found.tolist() == pytest.approx([1e-10], rel=1e-6)


@pytest.mark.parametrize("op", ["linear", "conv"])
def test_the_bound_holds_where_long_sums_of_denormal_products_are_flushed(op):
    # Each product of two numbers is zero then; 2^18 of them together would count.
    x, g = torch.zeros(1, 2, 2**18), torch.zeros(1, 2, 2)
    x[0, 0], g[0, 0, 0] = 9e-21, 9e14
    x[0, 1, 0], g[0, 1, 1] = 1.0, 1.0

    def loss(params, buffers, x, g):
        if op == "linear":
            return (F.linear(x, params["w"]) * g).sum()
        return (F.conv1d(x.mT, params["w"][..., None]) * g.mT).sum()

    params = {"w": torch.zeros(2, 2**18)}
    with flushed(True):
        found = clipped(loss, 1e-3, params, x, g, strategy="recorded").grads
    assert length(found) <= 1e-3 * (1 + 1e-6)


def test_gradients_below_float16_are_clipped_as_their_factors_say():
    # Formed in float16 they were zero, so that nothing was left to clip.
    x, g = (torch.full((1, 2, 3), 2e-6), torch.full((1, 2, 4), 3e-6))
    loss, params, _ = made("linear, products", [(1.0, 1.0, 1.0)], torch.float16)
    batch = x.half(), g.half(), torch.zeros(1, 2).half()
    (found,) = clipped_lengths(loss, params, batch, 1e-13, strategy="recorded")
    assert 0 < found <= 1e-13 * (1 + 1e-6)


@pytest.mark.parametrize("name", OPS)
def test_inner_products_are_right_or_not_finite(name):
    rows = [(1e30, 1e-30, 1.0), (1.0, 1.0, 1.0), (1e37, 0.0, 1.0), (1e-22, 1e18, 1.0)]
    rows += [(1e18, 1e-22, 1.0), (1e-15, 1e9, 1.0), (1e9, 1e-15, 1.0), (10, 2, 0)]
    loss, params, batch = made(name, rows, torch.float32)
    exact = oracle.loss_gradients(loss, params, {}, batch)
    whole = torch.cat([grad.flatten(1) for grad in exact.values()], dim=1)
    lengths, given = whole.norm(dim=1), (params, {}, *batch)
    cross = tuple(each[2:] for each in batch)
    compute = vgrad.per_sample_gram(loss, strategy="recorded")
    score = vgrad.attribution.influence
    for found, columns in (
        (compute(*given), slice(None)),
        (compute(*given, cross=cross), slice(2, None)),
        (
            score(loss, params, {}, cross, [batch], strategy="recorded").T,
            slice(2, None),
        ),
    ):
        gap = (found - (whole @ whole.T)[:, columns]).abs()
        room = 1e-6 * lengths[:, None] * lengths[columns]
        assert bool(((gap < room) | ~found.isfinite()).all())
        assert bool(found[1].isfinite()[-3:].all())


@pytest.mark.parametrize("name", ["linear, direct", "linear, products", "normalised"])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_bound_holds_for_small_and_large_loss_scales(scale, name):
    loss, params, batch = made(name, [(1.0, 1.0, 1.0), (0.1, 3.0, 1.0)], torch.float32)
    for bound in (1e-6, 1e-3):
        options = {"strategy": "recorded", "loss_scale": StaticLossScale(scale)}
        for found in clipped_lengths(loss, params, batch, bound, **options):
            assert bound * (1 - 1e-4) < found <= bound * (1 + 1e-6)


def test_members_of_an_ensemble_keep_their_bounds():
    sizes = [(3e38, 1.0, 1.0), (1e-38, 3e38, 1e-30), (1.0, 1.0, 1.0), (1e12, 1.0, 1.0)]
    loss, params, batch = made("linear", sizes, torch.float32)
    params = {name: torch.stack([value] * 2) for name, value in params.items()}
    compute = ensemble_clipped_grad(loss, max_norm=[1e-6, 1e-2])
    for row, sample in enumerate(singles(batch)):
        found = compute(params, {}, *sample)
        assert found.nonfinite.tolist() == [row < 2] * 2
        for member, bound in enumerate((1e-6, 1e-2)):
            one = {name: grad[member] for name, grad in found.grads.items()}
            expected = 0.0 if row < 2 else bound
            assert length(one) == pytest.approx(expected, rel=1e-6)


@every_strategy
def test_a_private_step_moves_no_further_for_a_sample_of_any_size(strategy):
    options = dict(dataset_size=4, sampling_rate=0.5, noise_multiplier=1e-3)
    private = plan(**options, max_norm=1e-4, steps=1, delta=0.1)
    sizes = [(1.0, 1.0, 1.0), (1e13, 1.0, 1.0), (1e-12, 1e13, 1e-30)]
    sizes += [(3e38, 1.0, 1.0), (1.0, 1e18, 1.0)]
    loss, params, batch = made("linear", sizes, torch.float32)
    tx = vgrad.optim.sgd(1.0)
    step = private_step(loss, tx, private, strategy=strategy)
    state = TrainState.create(tx, params, {})

    def moved(rows):
        after, metrics = step(state, *(each[rows] for each in batch))
        assert int(metrics["nonfinite"]) == int(rows[-1] > 2)
        return flat(after.params)

    for row in (1, 2, 3, 4):
        # The noise is the same in both, so that the difference is what a sample adds.
        distance = float((moved([0, row]) - moved([0])).norm())
        assert distance == pytest.approx(1e-4 / 2 if row < 3 else 0.0, rel=1e-5)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@every_strategy
def test_an_infinite_bound_clips_nothing(strategy, clipping):
    def loss(params, buffers, x):
        return F.linear(x, params["a.w"]).sum() + (params["b"] * x).sum()

    params = {"a.w": torch.ones(2, 3), "b": torch.ones(3)}
    x = torch.tensor([[1.0, 2.0, 3.0], [1e10, -1.0, 0.0], [torch.inf, 0.0, 0.0]])
    options = {"clipping": clipping, "strategy": strategy}
    found = clipped(loss, float("inf"), params, x, **options)
    expected = x[:2].sum(0)
    assert torch.equal(found.grads["b"], expected)
    assert torch.equal(found.grads["a.w"], expected.expand(2, 3))
    assert int(found.clipped) == 0
    assert int(found.nonfinite) == 1


def moved(compute, params, *batch):
    whole = compute(params, {}, *batch).grads["w"].double()
    return whole - compute(params, {}, *(each[1:] for each in batch)).grads["w"]


@pytest.mark.parametrize(("chunk_size", "share"), [(None, 4), (64, 1)])
def test_what_rounding_adds_to_the_sensitivity_is_what_the_text_says(chunk_size, share):
    torch.manual_seed(0)
    size, w = 8192, torch.randn(10, 20)
    x, g = torch.rand(size, 20) + 0.1, torch.rand(size, 10) + 0.1
    compute = vgrad.clipped_grad(losses.linear, max_norm=1.0, chunk_size=chunk_size)
    alone = torch.outer(g[0].double(), x[0].double())
    alone /= alone.norm().clamp(min=1)
    error = float((moved(compute, {"w": w}, x, g) - alone).norm())
    assert error < share * size * 2**-24


@pytest.mark.parametrize(
    "options",
    [{"chunk_size": 1, "verify": False}, {"strategy": "loop"}],
    ids=["chunk_size", "loop"],
)
@pytest.mark.parametrize("size", [2, 9])
def test_samples_by_themselves_do_not_depend_on_each_other(options, size):
    # Gradients of nothing but rounding errors, which other kernels round otherwise.
    def loss(params, buffers, x):
        return F.layer_norm(F.linear(x, params["w"]), (32,)).sum() * 1e6

    torch.manual_seed(0)
    compute = vgrad.clipped_grad(loss, max_norm=1e-2, **options)
    for _ in range(4):
        params = {"w": torch.randn(32, 64) / 8}
        added = moved(compute, params, torch.randn(size, 64))
        assert float(added.norm()) <= 1e-2 * (1 + 1e-5)

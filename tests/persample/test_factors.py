"""Factors alone, norms and sums in float32, and how often a step reads values."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import vgrad
from tests import losses, oracle
from tests.examples import examples
from tests.losses import every_clipping
from tests.oracle import assert_exact
from vgrad.factors import (
    Conv,
    Dense,
    Outer,
    Rows,
    base,
    combined,
    costs,
    norms,
    products,
    reductions,
)
from vgrad.precision import StaticLossScale


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def numbers(high, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator)


def joint(factor):
    found = norms.recomputed(norms.computed({"": factor.with_norms()[1]}))
    made = norms.Joint(found, [[""]], factor.grad().dtype)
    return made.value[0], made.upper[0]


def rows_gradients(factor):
    grads = factor.outputs.new_zeros(factor.size, *factor.shape)
    for sample in range(factor.size):
        for index, row in zip(
            factor.index[sample], factor.outputs[sample], strict=True
        ):
            grads[sample, index] += row
    return grads


@pytest.mark.parametrize("few", [128, 1])
def test_rows_that_cancel_leave_what_is_left(few):
    """In float32, where the square of the sum would be lost in those of its terms."""
    index = torch.tensor([[5, 2, 5, 5], [1, 4, 1, 4], [3, 3, 0, 0]])
    big = normal(3, 7).float() * 1e6
    rest = normal(3, 7, seed=1).float() * 1e-3
    outputs = torch.stack([big, rest, -big, rest], dim=1)
    outputs[1, 3] = -outputs[1, 1]
    factor = Rows(index, outputs, torch.Size([9, 7]))
    exact = joint(Dense(rows_gradients(factor.double())))[0]
    with mock.patch.object(costs, "FEW_LOOKUPS", few):
        value, upper = joint(factor)
    assert exact[1] == 0
    assert_exact(value, exact)
    assert bool((upper >= exact).all())


@pytest.mark.parametrize("positions", [1, 4, 200])
@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_wide_rows_neither_overflow_nor_underflow(positions, scale):
    index, outputs = numbers(3, 4, positions), normal(4, positions, 2)
    factor = Rows(index, outputs, torch.Size([3, 2]))
    found, *_ = joint(Rows(index, outputs * scale, factor.shape))
    assert_exact(found / scale, joint(factor)[0])


@pytest.mark.parametrize("wide", [True, False])
def test_many_equal_rows_do_not_drift(wide):
    factor = Rows(
        torch.zeros(50, 600).long(), torch.full((50, 600, 3), 0.1), torch.Size([5, 3])
    )
    weights = torch.ones(50)
    exact = factor.double().weighted(weights).float()
    with mock.patch.object(costs, "wide_table", return_value=wide):
        assert_exact(factor.weighted(weights), exact, 1e-7)


APART = {  # two views of a matrix [4, 3], and whether they have no number in common
    "rows": (lambda w: w[:2], lambda w: w[2:], True),
    "common rows": (lambda w: w[:3], lambda w: w[2:], False),
    "columns": (lambda w: w[:, :1], lambda w: w[:, 1:], True),
    "every second row": (lambda w: w[::2], lambda w: w[1::2].flatten(), True),
    "every second column": (lambda w: w[:, ::2], lambda w: w[:, 1], True),
    "a common column": (lambda w: w[:, ::2], lambda w: w[1:, 2], False),
    "a transpose": (lambda w: w.t()[:2], lambda w: w[:, 2:], True),
    "the whole": (lambda w: w, lambda w: w.t()[2:], False),
    "no rows": (lambda w: w[:0], lambda w: w, True),
    "a copy": (lambda w: w.t().reshape(-1)[:4], lambda w: w[:, 1:], True),
    "a copy in common": (lambda w: w.t().reshape(-1)[:5], lambda w: w[:, 1:], False),
}


@pytest.mark.parametrize("name", APART)
def test_views_of_one_parameter_are_apart_or_not(name):
    *views, apart = APART[name]
    assert combined.disjoint(views, torch.zeros(4, 3)) is apart


@pytest.mark.parametrize(
    ("channels", "width", "kernel", "groups", "plain", "form"),
    [
        (3, 64, 7, 1, True, "alone"),
        (3, 64, 7, 1, False, "windows"),
        (8, 64, 7, 1, True, "groups"),  # as many as a block of channels
        (3, 64, 7, 3, True, "groups"),
        (3, 32, 3, 1, True, "groups"),  # too little for a call of its own
    ],
)
def test_few_channels_of_large_images_take_a_convolution_each(
    channels, width, kernel, groups, plain, form
):
    pixels, weight = (width + kernel - 1) ** 2, (48, channels // groups, kernel, kernel)
    assert costs.conv_form(pixels, width**2, weight, groups, plain) == form


def test_gradients_of_large_depthwise_kernels_do_not_drift():
    inputs, outputs = torch.full((2, 3, 70, 70), 0.1), torch.full((2, 3, 64, 64), 0.1)
    geometry = (1, 1), (0,) * 4, (1, 1), 3
    factor = Conv(inputs, outputs, torch.Size([3, 1, 7, 7]), *geometry)
    assert factor.form == "swapped"
    assert_exact(factor.grad(), factor.double().grad().float(), 2e-6)


class Own(Dense):
    """A factor with an attribute that the package may not know."""

    def __init__(self, g, more):
        super().__init__(g)
        self.more = more


def test_an_owned_factor_shares_no_memory_whatever_its_kind():
    g = normal(3, 2)
    for more, kind in ((None, Own), (lambda: g, Dense)):
        mine = base.owned(Own(g, more))
        assert type(mine) is kind
        assert torch.equal(mine.grad(), g)
        assert mine.grad().data_ptr() != g.data_ptr()
    assert base.owned(Dense(g), g).grad() is g
    outputs = base.Positions(g[:, None, None])
    outer = Outer(normal(3, 1, 1, 4), outputs.tensor, torch.Size((2, 4)), outputs)
    assert base.owned(outer).shared is None
    assert base.owned(outer, g).shared is outputs


def joint_norms(*grads):
    return reductions.together(torch.stack(list(map(reductions.row_norms, grads)), 1))


def exact_norms(*grads):
    squares = [grad.double().reshape(len(grad), -1).square().sum(1) for grad in grads]
    return torch.stack(squares).sum(0).sqrt()


@pytest.mark.parametrize("numbers", [1, 255, 256, 257, 100_000, 3_000_000])
@pytest.mark.parametrize("draw", [torch.randn, lambda *shape: torch.full(shape, 0.1)])
def test_norms_of_many_numbers_do_not_drift(numbers, draw):
    grad = draw(2, numbers)
    assert_close(joint_norms(grad), exact_norms(grad), rtol=2e-7, atol=0)


@examples(60)
@given(
    exponent=st.integers(-38, 38),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    ),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=3),
)
def test_norms_are_right_for_any_finite_gradient(exponent, dtype, shapes):
    generator = torch.Generator().manual_seed(exponent + 100)
    random = {"generator": generator, "dtype": torch.float64}
    grads = [torch.rand(3, *shape, **random) * 10.0**exponent for shape in shapes]
    grads = [torch.nan_to_num(grad.to(dtype)) for grad in grads]
    assert_close(joint_norms(*grads), exact_norms(*grads), rtol=2e-7, atol=0)


@pytest.mark.parametrize("numbers", [300, 200_000])
@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38, 1e-44])
def test_norms_are_right_or_infinite(value, numbers):
    grad = torch.full((2, numbers), value)
    grad[1] = 1.0
    found, exact = joint_norms(grad), exact_norms(grad)
    if value > 1e18 and numbers > reductions._SMALL:
        exact[0] = torch.inf
    assert_close(found, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_many_samples_are_float32_and_do_not_drift(size, dtype):
    grad, weights = torch.full((size, 3), 0.1, dtype=dtype), torch.full((size,), 1.001)
    found = reductions.weighted_rows(grad, weights)
    exact = (grad.double() * weights.double()[:, None]).sum(0)
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_products_are_wider_where_torch_may_round_factors():
    a = torch.randn(4, 3)
    assert products.exact(a)[0].dtype == torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert products.exact(a)[0].dtype == torch.float64
        # On a host it rounds to bfloat16, where numbers of bfloat16 stay as they are.
        for dtype in (torch.bfloat16, torch.float16):
            half = a.to(dtype)
            found = products.times(half, half.T)
            kept = torch.float32 if dtype == torch.bfloat16 else torch.float64
            assert found.dtype == kept
            assert_close(
                found.double(), half.double() @ half.double().T, rtol=1e-6, atol=1e-6
            )
        weights = torch.rand(4) + 0.5
        found = reductions.weighted_rows(a, weights)
        assert_close(found, (weights.double() @ a.double()).float())
    finally:
        torch.set_float32_matmul_precision(before)


READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")
"""Ops whose results Python sees, for which a GPU would have to wait."""


def counted(compute, *given):
    with losses.Ops() as ops:
        found = compute(*given)
    return found, ops.count(*READS)


def language():
    options = {"dropout": 0.0, "batch_first": True}
    layers = (nn.TransformerEncoderLayer(8, 2, 16, **options) for _ in range(3))
    return losses.Net(
        lambda self, tokens: self.layers(self.table(tokens)) @ self.table.weight.T,
        table=nn.Embedding(11, 8),
        layers=nn.Sequential(*layers),
    )


@pytest.mark.parametrize("loss_scale", [None, StaticLossScale(2.0**10)])
@every_clipping
def test_a_step_of_a_transformer_reads_one_value(clipping, loss_scale):
    model = language()
    loss, *given = losses.of_model(model, losses.next_token, torch.float32)
    given += [torch.randint(11, (4, 6))] * 2
    options = {"clipping": clipping, "loss_scale": loss_scale, "verify": False}
    compute = vgrad.clipped_grad(loss, max_norm=0.1, **options)
    compute(*given)
    assert counted(compute, *given)[1] == 1


def all_uses(params, buffers, x, g):
    """A loss in which parameters are used in all the ways that may leave doubts."""
    total = (F.linear(x, params["a.weight"]) * g).sum()
    total = total + (F.linear(x[0], params["b.weight"], params["b.bias"]) * g[0]).sum()
    first, second = params["c.weight"].chunk(2)
    total = total + (F.linear(x, first) * g[:, :3]).sum()
    total = total + (F.linear(x, second) * g[:, 3:]).sum()
    tied = params["d.weight"]
    total = total + (F.linear(x, tied) * g).sum()
    total = total + (F.embedding(torch.arange(4), tied) * g[:, :5]).sum()
    return total + (F.conv1d(x.T, params["e.weight"], padding=1) * g.T).sum()


SHAPES = {"a.weight": (6, 5), "b.weight": (6, 5), "b.bias": (6,), "c.weight": (6, 5)}
SHAPES |= {"d.weight": (6, 5), "e.weight": (6, 5, 3)}


def planted(x, g):
    """Make samples that are zero, cancel, are tiny, out of range, and no number."""
    g[1] = 0
    x[2, 1:], g[2, 1:] = x[2, :1], g[2, :1] * -(1 + 1e-5) / 3
    g[3] *= 1e-32
    x[4] *= 1e19
    x[5], g[5] = x[5] * 1e22, g[5] * 1e-22
    x[6, 0, 0] = torch.nan
    x[7] = 0


@pytest.mark.parametrize("small", [0, 2**16])
@every_clipping
def test_doubts_of_all_parameters_are_mended(clipping, small, monkeypatch):
    monkeypatch.setattr("vgrad.factors.reductions._SMALL", small)
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    x, g = (losses.randn(9, 4, n, dtype=torch.float32, seed=n) for n in (5, 6))
    compute = vgrad.clipped_grad(all_uses, max_norm=0.5, clipping=clipping)
    _, ordinary = counted(compute, params, {}, x, g)
    planted(x, g)
    found, reads = counted(compute, params, {}, x, g)
    assert reads > ordinary
    norms = oracle.norms(oracle.loss_gradients(all_uses, params, {}, (x, g)))
    assert int(found.nonfinite) == 3
    keep = torch.tensor([n not in (4, 5, 6) for n in range(9)])
    assert found.norms[4:6].isinf().all()
    assert_close(found.norms[keep].double(), norms[keep], rtol=2e-6, atol=0)
    single = [compute(params, {}, x[n : n + 1], g[n : n + 1]).grads for n in range(9)]
    total = {name: sum(each[name].double() for each in single) for name in params}
    assert oracle.error(found.grads, total) < 2e-6


def test_norms_of_zeros_form_no_gradients():
    params, x = {"w": torch.zeros(300, 300)}, torch.zeros(6, 4, 300)
    compute = vgrad.per_sample_norm(
        lambda p, b, x: F.linear(x, p["w"]).sum(), verify=False
    )
    with losses.Peak() as peak:
        found = compute(params, {}, x)
    assert not bool(found.any())
    assert peak.most < 300 * 300 * 8  # bytes of one in float64


def test_weights_are_rounded_down_by_less_than_one_step():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(10_000, generator=generator, dtype=torch.float64) * 100
    edges = [1.0, 2.0**-60, 2.0**-100, 1e-30, 1 + 2**-23, 1 - 2**-24, 1 - 2**-25]
    edges += [torch.finfo(torch.float32).tiny, 1 - 2**-53, 0.0, torch.inf]
    wide = torch.cat([2**-sizes, torch.tensor(edges, dtype=torch.float64)])
    found = reductions.normal_rounded_down(wide, torch.float32)
    assert found.dtype == torch.float32
    assert bool((found.double() <= wide).all())
    assert bool((torch.nextafter(found, found + torch.inf).double() > wide)[:-1].all())
    assert torch.equal(found, reductions.rounded_down(wide, torch.float32))
    assert found[-len(edges)] == 1
    assert reductions.normal_rounded_down(wide, torch.float64) is wide


def many_parts(params, buffers, x, y):
    """Use small parameters, without dimensions and half ones among them."""
    h = F.layer_norm(x, (6,), params["a"], params["b"]) * params["s"]
    h = F.linear(h, params["w"], params["c"]).tanh()
    h = F.linear(h, params["v"], params["d"].to(x.dtype)) + F.linear(h, params["u"])
    return (h * y).sum()


PARTS = {"a": (6,), "b": (6,), "s": (), "w": (5, 6), "c": (5,), "d": (4,)}
PARTS |= {"v": (4, 5), "u": (4, 5), "unused": (3,)}


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("limit", [0, 2**30])
@every_clipping
def test_small_parts_are_measured_and_summed_together(
    clipping, limit, size, monkeypatch
):
    monkeypatch.setattr(costs, "_GATHERED", limit)
    params = {name: losses.randn(*shape, seed=3) for name, shape in PARTS.items()}
    batch = losses.randn(size, 4, 6, seed=1), losses.randn(size, 4, 4, seed=2)
    losses.assert_quantities(many_parts, params, batch, strategy="recorded")
    grads = oracle.loss_gradients(many_parts, params, {}, batch)
    compute = vgrad.clipped_grad(many_parts, max_norm=0.5, clipping=clipping)
    found = compute(params, {}, *batch)
    for strategy in losses.STRATEGIES:
        other = vgrad.clipped_grad(
            many_parts, max_norm=0.5, clipping=clipping, strategy=strategy
        )
        assert_exact(other(params, {}, *batch).grads, found.grads)
    groups = {"some": ["a", "s", "v"], "rest": ["b", "w", "c", "d", "u", "unused"]}
    norms = vgrad.per_sample_norm(many_parts, groups=groups)(params, {}, *batch)
    for group, names in groups.items():
        own = oracle.norms({name: grads[name] for name in names})
        assert_exact(norms[group], own)
    halves = params | {"d": params["d"].bfloat16()}
    grads = oracle.loss_gradients(many_parts, halves, {}, batch)
    compute = vgrad.clipped_grad(many_parts, max_norm=1e3, clipping="flat")
    found = compute(halves, {}, *batch).grads
    assert_close(found["d"].double(), grads["d"].double().sum(0), rtol=2e-2, atol=1e-3)

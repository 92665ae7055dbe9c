"""Norms and sums in float32, against float64, and how often a step reads values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import vgrad
from tests import losses, oracle
from tests.examples import examples
from vgrad.factors import reductions
from vgrad.precision import StaticLossScale


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
def test_squares_neither_overflow_nor_underflow(value, numbers):
    grad = torch.full((2, numbers), value)
    grad[1] = 1.0
    assert_close(joint_norms(grad), exact_norms(grad), rtol=1e-6, atol=0)


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
    assert reductions.products(a)[0].dtype == torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert reductions.products(a)[0].dtype == torch.float64
    finally:
        torch.set_float32_matmul_precision(before)


class Reads(TorchDispatchMode):
    """Counts ops whose results Python sees, for which a GPU would have to wait."""

    KINDS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__.startswith(self.KINDS)
        return func(*args, **(kwargs or {}))


def counted(compute, *given):
    with Reads() as reads:
        found = compute(*given)
    return found, reads.count


def language():
    options = {"dropout": 0.0, "batch_first": True}
    layers = (nn.TransformerEncoderLayer(8, 2, 16, **options) for _ in range(3))
    return losses.Net(
        lambda self, tokens: self.layers(self.table(tokens)) @ self.table.weight.T,
        table=nn.Embedding(11, 8),
        layers=nn.Sequential(*layers),
    )


every_clipping = pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])


@pytest.mark.parametrize("loss_scale", [None, StaticLossScale(2.0**10)])
@every_clipping
def test_a_step_of_a_transformer_reads_one_value(clipping, loss_scale):
    model = language()
    loss, *given = losses.of_model(model, losses.next_token, torch.float32)
    given += [torch.randint(11, (4, 6))] * 2
    options = {"clipping": clipping, "loss_scale": loss_scale}
    compute = vgrad.clipped_grad(loss, max_norm=0.1, **options)
    compute(*given)
    assert counted(compute, *given)[1] == 1


def joint(params, buffers, x, g):
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
    """Make samples that are zero, cancel, are tiny, huge and of both, and no number."""
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
    compute = vgrad.clipped_grad(joint, max_norm=0.5, clipping=clipping)
    _, ordinary = counted(compute, params, {}, x, g)
    planted(x, g)
    found, reads = counted(compute, params, {}, x, g)
    assert reads > ordinary
    norms = oracle.norms(oracle.loss_gradients(joint, params, {}, (x, g)))
    assert int(found.nonfinite) == 1
    keep = norms.isfinite()
    assert_close(found.norms[keep].double(), norms[keep], rtol=2e-6, atol=0)
    single = [compute(params, {}, x[n : n + 1], g[n : n + 1]).grads for n in range(9)]
    total = {name: sum(each[name].double() for each in single) for name in params}
    assert oracle.error(found.grads, total) < 2e-6


def test_norms_of_zeros_form_no_gradients():
    params, x = {"w": torch.zeros(300, 300)}, torch.zeros(6, 4, 300)
    compute = vgrad.per_sample_norm(lambda p, b, x: F.linear(x, p["w"]).sum())
    with losses.Peak() as peak:
        found = compute(params, {}, x)
    assert not bool(found.any())
    assert peak.most < 300 * 300 * 8  # bytes of one in float64

"""Norms and sums in float32, against the same in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import vgrad
from tests.examples import examples
from tests.oracle import assert_exact
from vgrad.persample.engine import Settled
from vgrad.persample.factors import Dense, Norm, Sums, reductions

NAN, INF = float("nan"), float("inf")


def joint_norms(*grads):
    """Norms over several gradients."""
    return Norm.joint([Norm.exactly(reductions.row_norms(g)) for g in grads]).value


def exact_norms(*grads):
    squares = [grad.double().reshape(len(grad), -1).square().sum(1) for grad in grads]
    return torch.stack(squares).sum(0).sqrt()


def clipped_sum(grad, weights, keep=None):
    """Sum what is to be kept of one parameter's gradients."""
    settled = Settled()
    settled.take("a", Dense(grad))
    with torch.autocast("cpu", enabled=False):
        return settled.weighted({"a": weights}, keep)["a"]


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


def test_double_norms_do_not_overflow_either():
    grad = torch.tensor([[3e200, 4e200], [3e-200, 4e-200], [0, 0]], dtype=torch.float64)
    exact = torch.tensor([5e200, 5e-200, 0.0], dtype=torch.float64)
    assert_close(joint_norms(grad), exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_norm_of_a_nonfinite_gradient_is_not_finite(value):
    grad = torch.ones(3, 300)
    grad[1, 7] = value
    found = joint_norms(grad, torch.ones(3, 2))
    assert found.isfinite().tolist() == [True, False, True]


def test_norms_inside_a_transform_equal_those_outside():
    grad = torch.randn(4, 3, 300)
    mapped = torch.vmap(joint_norms)(grad)
    alone = torch.stack([joint_norms(each) for each in grad])
    assert_close(mapped, alone, rtol=2e-7, atol=0)


def test_sums_leave_out_what_is_not_kept():
    grad = torch.randn(3, 40)
    grad[1] = INF
    keep, weights = torch.tensor([True, False, True]), torch.tensor([0.5, NAN, 2.0])
    exact = (0.5 * grad[0].double() + 2 * grad[2].double()).float()
    finite = torch.where(keep, weights, 1)
    mapped = torch.vmap(lambda g: clipped_sum(g, finite, keep))(grad[None])[0]
    for found in (clipped_sum(grad, weights, keep), mapped):
        assert_close(found, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_many_samples_are_float32_and_do_not_drift(size, dtype):
    grad, weights = torch.full((size, 3), 0.1, dtype=dtype), torch.full((size,), 1.001)
    found = reductions.weighted_rows(grad, weights)
    exact = (grad.double() * weights.double()[:, None]).sum(0)
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_chunks_are_added_in_double_precision_and_rounded_once():
    parts = Sums()
    for _ in range(1000):
        parts.add({"a": torch.tensor([0.1])})
    parts.divide(10.0)
    exact = torch.tensor([0.1]).double() * 100
    assert_exact(parts.rounded({"a": torch.zeros(1)}), {"a": exact.float()}, 0)


def test_products_are_wider_where_torch_may_round_factors():
    a = torch.randn(4, 3)
    assert reductions.products(a)[0].dtype == torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert reductions.products(a)[0].dtype == torch.float64
    finally:
        torch.set_float32_matmul_precision(before)


def test_complex_parameters_have_real_norms():
    def loss(params, buffers, x):
        return (params["w"] * x).abs().square().sum()

    params = {"w": torch.tensor([1 + 1j, 2 - 1j])}
    x = torch.tensor([[1 + 0j, 2 + 1j], [0j, 1j]])
    grads = vgrad.per_sample_grad(loss)(params, {}, x)["w"]
    norms = vgrad.per_sample_norm(loss)(params, {}, x)
    assert norms.dtype == torch.float32
    assert_close(norms, torch.linalg.vector_norm(grads, dim=1))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0)(params, {}, x)
    assert clipped.grads["w"].dtype == torch.complex64

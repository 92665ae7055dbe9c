import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vgrad
from tests.examples import examples
from vgrad.persample.engine import Settled
from vgrad.persample.factors import Dense, Norm, Sums, reductions, sums


def joint_norms(grads):
    """Norms over all of a dictionary of gradients."""
    norms = [Norm.exactly(reductions.row_norms(grad)) for grad in grads.values()]
    return Norm.joint(norms).value


def clipped_sum(grad, weights, keep=None):
    """Sum what is to be kept of one parameter's gradients."""
    settled = Settled()
    settled.take("a", Dense(grad))
    with torch.autocast("cpu", enabled=False):
        return settled.weighted({"a": weights}, keep)["a"]


@pytest.mark.parametrize("numbers", [1, 255, 256, 257, 100_000, 3_000_000])
@pytest.mark.parametrize("kind", ["normal", "constant"])
def test_norms_of_many_numbers_do_not_drift(numbers, kind):
    generator = torch.Generator().manual_seed(0)
    grad = torch.full((2, numbers), 0.1)
    if kind == "normal":
        grad = torch.randn(2, numbers, generator=generator)
    exact = torch.linalg.vector_norm(grad.double(), dim=1)
    found = joint_norms({"a": grad})
    assert float(((found - exact) / exact).abs().max()) < 2e-7


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
    grads = {
        str(number): (
            torch.rand(3, *shape, generator=generator, dtype=torch.float64)
            * 10.0**exponent
        ).to(dtype)
        for number, shape in enumerate(shapes)
    }
    grads = {name: torch.nan_to_num(grad) for name, grad in grads.items()}
    squares = [grad.double().reshape(3, -1).square().sum(1) for grad in grads.values()]
    exact = torch.stack(squares).sum(0).sqrt()
    torch.testing.assert_close(joint_norms(grads), exact, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("numbers", [300, 200_000])
@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38, 1e-44])
def test_squares_neither_overflow_nor_underflow(value, numbers):
    grad = torch.full((2, numbers), value)
    grad[1] = 1.0
    found = joint_norms({"a": grad})
    exact = torch.linalg.vector_norm(grad.double(), dim=1)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0.0)


def test_double_norms_do_not_overflow_either():
    grad = torch.tensor(
        [[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0]], dtype=torch.float64
    )
    found = joint_norms({"a": grad})
    exact = torch.tensor([5e200, 5e-200, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_norm_of_a_nonfinite_gradient_is_not_finite(value):
    grad = torch.ones(3, 300)
    grad[1, 7] = value
    found = joint_norms({"a": grad, "b": torch.ones(3, 2)})
    assert found.isfinite().tolist() == [True, False, True]


def test_norms_inside_a_transform_equal_those_outside():
    grad = torch.randn(4, 3, 300)
    mapped = torch.vmap(lambda each: joint_norms({"a": each}))(grad)
    alone = torch.stack([joint_norms({"a": each}) for each in grad])
    torch.testing.assert_close(mapped, alone, rtol=2e-7, atol=0.0)


def test_sums_leave_out_what_is_not_kept():
    grad = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    grad[1] = torch.inf
    keep = torch.tensor([True, False, True])
    weights = torch.tensor([0.5, torch.nan, 2.0])
    exact = (0.5 * grad[0].double() + 2 * grad[2].double()).float()
    eager = clipped_sum(grad, weights, keep)
    finite = torch.where(keep, weights, 1)
    mapped = torch.vmap(lambda g: clipped_sum(g, finite, keep))(grad[None])[0]
    for found in (eager, mapped):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 5000])
def test_sums_over_many_samples_do_not_drift(size):
    grad = torch.full((size, 3), 0.1)
    weights = torch.full((size,), 1.001)
    found = sums.weighted_rows(grad, weights)
    exact = (grad.double() * weights.double()[:, None]).sum(0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_chunks_are_added_in_double_precision_and_rounded_once():
    parts = Sums()
    for _ in range(1000):
        parts.add({"a": torch.tensor([0.1])})
    parts.divide(10.0)
    found = parts.rounded({"a": torch.zeros(1)})["a"]
    exact = torch.tensor([0.1]).double() * 100
    assert torch.equal(found, exact.float())


def test_sums_of_low_precision_gradients_are_rounded_to_float32():
    grads = torch.full((1000, 2), 1.0, dtype=torch.bfloat16)
    found = sums.weighted_rows(grads, torch.full((1000,), 1.001))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((2,), 1001.0), rtol=1e-6, atol=0)


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

    w = torch.tensor([1 + 1j, 2 - 1j])
    x = torch.tensor([[1 + 0j, 2 + 1j], [0j, 1j]])
    grads = vgrad.per_sample_grad(loss)({"w": w}, {}, x)["w"]
    norms = vgrad.per_sample_norm(loss)({"w": w}, {}, x)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, torch.linalg.vector_norm(grads, dim=1))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0)({"w": w}, {}, x)
    assert clipped.grads["w"].dtype == torch.complex64

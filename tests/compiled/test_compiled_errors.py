"""How compiled code is compared with eager mode, by code that is wrong on purpose."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from vgrad.compiled import verification
from vgrad.conditions import Unrepeatable
from vgrad.torch_private import tracing

pytestmark = pytest.mark.compiled

PARAMS = {"w": losses.randn(40, 5, dtype=torch.float32), "steps": torch.tensor(3)}
BATCH = losses.randn(6, 5, dtype=torch.float32)
FAR = torch.tensor([0.5, 0.5])
NEAR = torch.tensor([1 + 2**-23, 1.0])
ROUNDED = torch.tensor([1 + 2**-12, 1 - 2**-12 + 2**-24])  # to 1 in float32 alone


def eager(params, x, kink):
    """Return sums whose size depends on the side of 1 on which a product is."""
    hidden = (x @ params["w"].T).tanh() * (1 + (kink[0] * kink[1] > 1))
    return {"w": hidden.T @ x, "sum": hidden.sum(0), "steps": params["steps"] + 1}


def faulty(fault):
    def compiled(*arguments):
        return fault({name: x.clone() for name, x in eager(*arguments).items()})

    return compiled


def scaled(found):
    return {**found, "w": found["w"] * (1 + 1e-4)}


def moved_rows(found):
    return {**found, "w": found["w"].roll(1, 0)}


def without_a_term(found):
    found["sum"] -= 1e-4 * found["sum"].abs().amax()
    return found


def not_finite(found):
    found["sum"][2] = torch.nan
    return found


def not_counted(found):
    return {**found, "steps": found["steps"] - 1}


def doubtful(found):
    return None


def fails(found):
    raise AssertionError("expected size 3\nat dim 0")


FAULTS = {
    scaled: "compiled code is off by",
    moved_rows: "compiled code is off by",
    without_a_term: "compiled code is off by",
    not_finite: "compiled code is finite elsewhere",
    not_counted: "does not repeat the numbers",
    doubtful: "compiled code doubts samples",
    fails: "compiled code fails: AssertionError: expected size 3$",
}


@pytest.mark.parametrize("kink", [FAR, NEAR, ROUNDED])
@pytest.mark.parametrize(("fault", "text"), FAULTS.items())
def test_wrong_code_is_refused(fault, text, kink):
    with pytest.raises(Unrepeatable, match=text):
        verification.close(faulty(fault), eager, (PARAMS, BATCH, kink), draws=False)


@pytest.mark.parametrize("kink", [FAR, NEAR, ROUNDED])
def test_a_number_within_rounding_of_a_jump_may_fall_on_either_side(kink):
    def compiled(params, x, kink):
        return eager(params, x, kink * (1 - 2**-22))

    arguments = PARAMS, BATCH, kink
    same = torch.equal(compiled(*arguments)["w"], eager(*arguments)["w"])
    assert same == (kink is not NEAR)
    verification.close(compiled, eager, arguments, draws=False)


@pytest.mark.parametrize(("by", "text"), [(5e-4, None), (2e-3, "off by"), (0, None)])
def test_random_results_are_compared_with_each_other(by, text):
    def noisy(*arguments):
        draw = torch.rand(5, generator=torch.Generator().manual_seed(0))
        return eager(*arguments)["w"] * draw

    def compiled(*arguments):
        return noisy(*arguments) * (1 + by)

    with pytest.raises(Unrepeatable, match=text) if text else nullcontext():
        verification.close(compiled, noisy, (PARAMS, BATCH, FAR), draws=True)


def test_a_function_need_not_be_defined_at_the_points_close_by():
    edge = torch.tensor([[1.0, 1 - 2**-20], [1 - 2**-20, 1.0]])
    factor = torch.linalg.cholesky
    verification.close(factor, factor, (edge,), draws=False)
    with pytest.raises(Unrepeatable, match="off by"):
        verification.close(lambda x: 1.01 * factor(x), factor, (edge,), draws=False)


def test_a_function_must_run_in_float64():
    def single(x):
        return x @ torch.ones(5)

    with pytest.raises(Unrepeatable, match="does not run in float64.* verify=False"):
        verification.close(single, single, (BATCH,), draws=False)


def test_the_points_close_by_are_ordinary_arguments():
    shared = BATCH[:, :1].relu().expand(6, 5)
    every_other = torch.zeros(6, 10)[:, ::2].copy_(BATCH)
    numbers = torch.arange(3), torch.tensor(True), torch.zeros(0, 2)
    points = []

    def first_sum(*arguments):
        return arguments[0].sum()

    def compiled(*arguments):
        points.append(arguments)
        return first_sum(*arguments)

    given = shared, shared, every_other, BATCH.half(), *numbers
    verification.close(compiled, first_sum, given, draws=False)
    first, *others = points
    assert all(each is other for each, other in zip(first, given, strict=True))
    assert len(others) >= 2
    for point in others:
        assert point[0] is point[1]
        for one, other in zip(point, given, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.stride() == other.stride()
            assert torch.equal(one == 0, other == 0)
            assert (one * one <= other * other).all()
        rounding = torch.finfo(torch.float32).eps
        moved = (1 - point[2] / every_other) / rounding
        assert 100 < moved.mean() < 3000
    assert not torch.equal(others[0][2], others[1][2])


def test_what_is_wrong_is_replayed(monkeypatch):
    def compiled(graph, inputs, **options):
        def run(*tensors):
            first, *others = graph.forward(*tensors)
            return [first * (1 + 1e-4), *others]

        return run

    monkeypatch.setattr(tracing, "compiled", compiled)

    def loss(params, buffers, x):
        return (params["w"] @ x).square()

    transform = vgrad.per_sample_norm(loss)
    given = {"w": torch.ones(5)}, {}, BATCH
    found = vgrad.compile(transform, backend="inductor")
    text = r"compile\(per_sample_norm\): replays, since compiled code is off by"
    with pytest.warns(vgrad.CompileWarning, match=text):
        oracle.assert_exact(found(*given), transform(*given), 0)
    (report,) = found.reports()
    assert report.backend == "replay"
    unchecked = vgrad.compile(transform, backend="inductor", verify=False)
    assert not torch.equal(unchecked(*given), transform(*given))
    assert unchecked.reports()[0].backend == "inductor"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch._prims_common:FutureWarning")
def test_inductor_is_as_exact_as_eager_mode_around_convolutions():
    torch.manual_seed(0)
    features = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16)
    pooled = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*features, *pooled, nn.Linear(16, 3))
    loss, params, buffers = losses.of_model(net, F.cross_entropy, torch.float32)
    batch = torch.randn(8, 3, 16, 16), torch.randint(3, (8,))
    transform = vgrad.clipped_grad(loss, max_norm=1.0)
    compiled = vgrad.compile(transform, backend="inductor", fallback="error")
    found = compiled(params, buffers, *batch)
    assert compiled.reports()[0].backend == "inductor"
    grads = oracle.loss_gradients(loss, params, buffers, batch, 8)
    oracle.assert_exact(found.grads, oracle.clipped(grads, 1.0), 1e-6)

"""Checks of graphs before they are trusted and later, by code that is wrong."""

import shutil
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from vgrad import optim
from vgrad.compiled import backends, verification
from vgrad.conditions import Unrepeatable
from vgrad.torch_private import tracing
from vgrad.training import TrainState, private_step

pytestmark = pytest.mark.compiled

STEP = 2.0**-20
"""Between neighbours of 8 in float32."""

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [1.0, 0.0], False),
        ([1.0, 0.0], [1.0, NAN], False),
        ([1.0, 2.0], [1.0, 2.0 + 2**-22], False),
        ([INF], [INF], True),
        ([INF], [torch.finfo(torch.float32).max], False),
    ],
)
def test_a_replay_repeats_all_numbers(found, expected, same):
    found, expected = ({"x": torch.tensor(each)} for each in (found, expected))
    text = "does not repeat the numbers of eager"
    with nullcontext() if same else pytest.raises(Unrepeatable, match=text):
        verification.same_bits(found, expected)


@pytest.mark.parametrize("off", [1e-7, 1e-3])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_kernels_may_add_up_in_another_order(monkeypatch, off, strict, host):
    """Not at first on the host, and not where torch demands all bits of a replay."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: host))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: strict)
    x = torch.tensor([1.0, 3.0])

    def eager(x):
        return x / 3

    given = eager(x) * (1 + off), eager(x), eager, (x,)
    fine = off < 1e-6 and not strict
    with nullcontext() if fine else pytest.raises(Unrepeatable):
        verification.replays(*given, first=not host)


def test_a_host_repeats_all_bits():
    x = torch.tensor([1.0, 3.0])
    with pytest.raises(Unrepeatable, match="does not repeat the numbers of eager"):
        verification.replays(x * (1 + 1e-7), x, lambda x: x, (x,))


# Rounding.


EIGHT = torch.tensor([8.0, 1.0])
OFF_BY = "is off by .* more than .* explains"
PAIRS = {
    "exact": (EIGHT, EIGHT, EIGHT, None),
    "roundings of the largest": (EIGHT + 500 * STEP, EIGHT, EIGHT, None),
    "too many": (EIGHT + 520 * STEP, EIGHT, EIGHT, OFF_BY),
    "of one": (EIGHT + torch.tensor([0, 520 * STEP]), EIGHT, EIGHT, OFF_BY),
    "the least precise": (EIGHT * 1.09, EIGHT, EIGHT.bfloat16(), None),
    "more than the least precise": (EIGHT * 1.11, EIGHT, EIGHT.bfloat16(), OFF_BY),
    "complex numbers": (EIGHT * (1 + 1e-5j), EIGHT * (1 + 0j), EIGHT * (1 + 0j), None),
    "complex, off": (EIGHT * (1 + 1e-4j), EIGHT * (1 + 0j), EIGHT * (1 + 0j), OFF_BY),
    "nothing": (torch.ones(0), torch.ones(0), torch.ones(0), None),
    "the same is not finite": ([INF, NAN], [NAN, -INF], [1.0, 1.0], None),
    "finite elsewhere": ([INF, 1.0], [1.0, 1.0], [1.0, 1.0], "off by inf"),
    "whole numbers": ([3], [3], [3], None),
    "other whole numbers": ([1, 2], [1, 3], [1, 3], "off by inf"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_compiled_code_may_be_off_by_roundings_of_the_largest_number(name):
    found, expected, x = map(torch.as_tensor, PAIRS[name][:3])
    text = PAIRS[name][3]
    with pytest.raises(Unrepeatable, match=text) if text else nullcontext():
        verification.close(found, expected, lambda x: expected, (x,))


# Functions, at several points.


PARAMS = {"w": losses.randn(40, 5, dtype=torch.float32), "steps": torch.tensor(3)}
BATCH = losses.randn(6, 5, dtype=torch.float32)
FAR = torch.tensor([0.5, 0.5])
NEAR = torch.tensor([1 + 2**-23, 1.0])


def eager(params, x, kink):
    """Return sums whose size depends on the side of 1 on which a product is."""
    hidden = (x @ params["w"].T).tanh() * (1 + (kink[0] * kink[1] > 1))
    return {"w": hidden.T @ x, "sum": hidden.sum(0), "steps": params["steps"] + 1}


FAULTS = {
    "scaled": lambda f: {**f, "w": f["w"] * (1 + 2e-4)},
    "moved rows": lambda f: {**f, "w": f["w"].roll(1, 0)},
    "without a term": lambda f: {**f, "sum": f["sum"] - 2e-4 * f["sum"].abs().amax()},
    "not finite": lambda f: {**f, "sum": f["sum"].where(f["sum"] > 0, torch.nan)},
    "not counted": lambda f: {**f, "steps": f["steps"] - 1},
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_code_is_refused(name):
    arguments = PARAMS, BATCH, FAR
    right = eager(*arguments)
    with pytest.raises(Unrepeatable, match="compiled code is off by"):
        verification.close(FAULTS[name](right), right, eager, arguments)


@pytest.mark.parametrize("kink", [FAR, NEAR])
def test_a_number_within_rounding_of_a_jump_may_fall_on_either_side(kink):
    found, right = eager(PARAMS, BATCH, kink * (1 - 2**-22)), eager(PARAMS, BATCH, kink)
    assert torch.equal(found["w"], right["w"]) == (kink is FAR)
    verification.close(found, right, eager, (PARAMS, BATCH, kink))


def test_a_gradient_of_rounding_errors_may_be_another_one():
    x = BATCH * 1e3

    def noise(x):
        return (x - x.mean(1, keepdim=True)).sum(1)

    found = (x.double() - x.double().mean(1, keepdim=True)).sum(1).float()
    verification.close(found, noise(x), noise, (x,))
    with pytest.raises(Unrepeatable, match="off by"):
        verification.close(found + 1, noise(x), noise, (x,))


def test_a_function_need_not_be_defined_at_the_points_close_by():
    edge = torch.tensor([[1.0, 1 - 2**-20], [1 - 2**-20, 1.0]])
    factor = torch.linalg.cholesky
    verification.close(factor(edge), factor(edge), factor, (edge,))
    with pytest.raises(Unrepeatable, match="off by"):
        verification.close(1.01 * factor(edge), factor(edge), factor, (edge,))


def test_the_points_close_by_are_ordinary_arguments():
    shared = BATCH[:, :1].relu().expand(6, 5)
    every_other = torch.zeros(6, 10)[:, ::2].copy_(BATCH)
    numbers = torch.arange(3), torch.tensor(True), torch.zeros(0, 2)
    given = shared, shared, every_other, BATCH.half(), *numbers
    points = [verification._moved(given, number) for number in (1, 2)]
    for point in points:
        assert point[0] is point[1]
        for one, other in zip(point, given, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.stride() == other.stride()
            assert torch.equal(one == 0, other == 0)
            assert (one * one <= other * other).all()
        rounding = torch.finfo(torch.float32).eps
        moved = (1 - point[2] / every_other) / rounding
        assert 5 < moved.mean() < 11
    assert not torch.equal(points[0][2], points[1][2])


# Backends.


def test_wrong_code_is_replayed(monkeypatch):
    def compiled(graph, inputs, **options):
        def run(*tensors):
            first, *others = graph.forward(*tensors)
            return [first * (1 + 1e-4), *others]

        return run

    monkeypatch.setattr(tracing, "compiled", compiled)
    transform = vgrad.per_sample_norm(lambda p, b, x: (p["w"] @ x).square())
    given = {"w": torch.ones(5)}, {}, BATCH
    found = vgrad.compile(transform, backend="inductor")
    text = r"compile\(per_sample_norm\): replays, since compiled code is off by"
    found(*given)
    with pytest.warns(vgrad.CompileWarning, match=text):
        oracle.assert_exact(found(*given), transform(*given), 0)
    (report,) = found.reports()
    assert report.backend == "replay"
    unchecked = vgrad.compile(transform, backend="inductor", verify=False)
    unchecked(*given)
    assert not torch.equal(unchecked(*given), transform(*given))
    assert unchecked.reports()[0].backend == "inductor"


# Later calls.


NORM = vgrad.per_sample_norm(lambda p, b, x: (p["w"] @ x).square())
GIVEN = {"w": torch.ones(5)}, {}, BATCH


@pytest.mark.parametrize("verify", [True, False])
def test_calls_of_powers_of_two_are_compared(monkeypatch, verify):
    compared, replays = [], verification.replays
    compiled = vgrad.compile(NORM, fallback="error", verify=verify)

    def counted(*given, **own):
        compared.append(sum(each.calls for each in compiled.reports()))
        replays(*given, **own)

    monkeypatch.setattr(verification, "replays", counted)
    for _ in range(11):
        oracle.assert_exact(compiled(*GIVEN), NORM(*GIVEN), 0)
    assert compared == ([1, 2, 4, 8] if verify else [])


def test_compiled_code_that_is_wrong_later_is_dropped(monkeypatch):
    calls = []

    def compiled(graph, inputs, **options):
        def run(*tensors):
            first, *others = graph.forward(*tensors)
            calls.append(first)
            return [first * (1 + 1e-4 * (len(calls) > 1)), *others]

        return run

    monkeypatch.setattr(tracing, "compiled", compiled)
    found = vgrad.compile(NORM, backend="inductor")
    found(*GIVEN)
    found(*GIVEN)
    text = "runs in eager mode, since at its call 2 compiled code is off by"
    with pytest.warns(vgrad.CompileWarning, match=text):
        oracle.assert_exact(found(*GIVEN), NORM(*GIVEN), 0)
    assert [each.backend for each in found.reports()] == ["eager"]


def test_a_private_step_raises_before_it_releases_anything():
    held = SimpleNamespace(beta=2.0)
    name = "beta"

    def loss(params, buffers, x):
        return (params["w"] @ x).sigmoid() * getattr(held, name)

    tx = optim.sgd(0.1)
    step = private_step(loss, tx, problems.plan())
    compiled = vgrad.compile(step, batch_sizes=[6])
    state = TrainState.create(tx, {"w": torch.ones(5)}, {}, seed=1)
    for _ in range(2):
        compiled(state, BATCH)
    held.beta = 0.1
    text = r"compile\(private_step\): expected a graph that agrees .* but at its call 2"
    with pytest.raises(RuntimeError, match=text):
        compiled(state, BATCH)
    compiled.clear()
    for _ in range(3):
        oracle.assert_exact(compiled(state, BATCH), step(state, BATCH), 0)


@pytest.mark.parametrize(("taken", "backend"), [(1, "inductor"), (4, "replay")])
def test_the_faster_backend_is_taken(monkeypatch, taken, backend):
    """The first run of compiled code is slow, and does not count."""
    now, runs = [0.0], []

    def taking(*milliseconds):
        left = list(milliseconds)

        def run():
            now[0] += left.pop(0) / 1e3
            runs.append(run)
            return [torch.tensor(False)]

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    replay, compiled = taking(3, 3, 3, 3, 3), taking(90, *[taken] * 4)
    both = {"replay": replay, "inductor": compiled}
    found = backends.fastest(SimpleNamespace(closed=[], result=list), [], both)
    assert found == (backend, f"replay took 3 ms, inductor took {taken} ms")
    assert runs == [replay, compiled] * 5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
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

"""Graphs that a device records: what goes in and out, and what is refused.

On a CPU a recording stands in that runs the graph in the memory it was made in. The
same calls are repeated on a GPU, where there is one.
"""

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from vgrad import optim, tree
from vgrad.compiled import backends, graph
from vgrad.conditions import Unrepeatable
from vgrad.persample.engine import Inputs
from vgrad.training import TrainState, private_step, train_step

pytestmark = pytest.mark.compiled
slow = pytest.mark.slow


class InPlace:
    """Runs a function in the same memory each time, as a recording does."""

    device = "cpu"
    launches = 0

    def __init__(self, run, inputs):
        self._run, self._inputs = run, inputs
        self.outputs = [each.clone() for each in run(*inputs)]

    def launch(self):
        type(self).launches += 1
        for own, found in zip(self.outputs, self._run(*self._inputs), strict=True):
            own.copy_(found)

    def turn(self):
        return nullcontext()


@pytest.fixture(params=losses.DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(backends, "OnCuda", InPlace)
        monkeypatch.setattr(InPlace, "launches", 0)
    return request.param


def built(name, device, p=0.0):
    loss, params, buffers, draw = problems.built(name, torch.float32)
    if p:
        model, criterion = problems.mlp(p).to(device), F.cross_entropy
        loss, params, buffers = losses.of_model(model, criterion, torch.float32)
    params, buffers = tree.to_device((params, buffers), device)
    return loss, params, buffers, lambda size: tree.to_device(draw(size), device)


def recorded(function, **options):
    return vgrad.compile(function, backend="cudagraph", fallback="error", **options)


def is_recorded(compiled):
    reports = compiled.reports()
    assert {each.backend for each in reports} == {"cudagraph"}, reports
    return reports


def transforms(*quick):
    return pytest.mark.parametrize(
        "name",
        [
            name if name in quick else pytest.param(name, marks=slow)
            for name in problems.TRANSFORMS
        ],
    )


@transforms("flat", "gram, cross")
@pytest.mark.parametrize("net", ["mlp", pytest.param("lstm", marks=slow)])
def test_numbers_are_those_of_eager_mode(device, net, name):
    loss, params, buffers, draw = built(net, device)
    compiled = problems.same_quantities(
        name,
        loss,
        [(params, buffers, *draw(5)) for _ in range(4)],
        backend="cudagraph",
    )
    assert [each.calls for each in is_recorded(compiled)] == [3]


def test_later_calls_do_not_change_results(device):
    loss, params, buffers, draw = built("mlp", device)
    compiled = recorded(vgrad.clipped_grad(loss, max_norm=1.0))
    compiled(params, buffers, *draw(4))
    first = compiled(params, buffers, *draw(4))
    kept = tree.copied(first)
    compiled(params, buffers, *draw(4))
    oracle.assert_exact(first, kept, 0)
    assert is_recorded(compiled)[0].calls == 2


def test_inputs_may_lie_in_memory_in_any_way(device):
    loss, params, buffers, draw = built("mlp", device)
    x, y = draw(12)
    wide = torch.stack([x, -x], dim=-1)
    given = [wide[::2, ..., 0], wide[1::2, ..., 1], wide[:6, ..., 0]]
    given += [x[:1].expand(6, *x.shape[1:]), x[3:4].expand(6, *x.shape[1:])]
    eager = vgrad.per_sample_grad(loss)
    compiled = recorded(eager)
    for each in [*given, *given]:
        found = compiled(params, buffers, each, y[:6])
        oracle.assert_exact(found, eager(params, buffers, each, y[:6]), 0)
    # The third differs from the first in its strides; the last two share one capture.
    assert sum(each.calls for each in is_recorded(compiled)) == 10 - 3


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_go_on_from_launch_to_launch(device, randomness):
    loss, params, buffers, draw = built("mlp", device, p=0.5)
    eager = vgrad.clipped_grad(loss, max_norm=0.7, randomness=randomness)
    compiled, batch = recorded(eager), draw(6)
    results = []
    for compute in (compiled, eager):
        torch.manual_seed(5)
        results.append([compute(params, buffers, *batch).grads for _ in range(4)])
    oracle.assert_exact(*results, 0)
    first, second, *_ = results[0]
    assert not torch.equal(first["0.weight"], second["0.weight"])
    is_recorded(compiled)


@pytest.mark.parametrize("planted", problems.PLANTED)
def test_doubtful_samples_are_computed_again(device, planted):
    eager = vgrad.clipped_grad(problems.sites, max_norm=0.7)
    compiled = recorded(eager)
    params = tree.to_device(problems.sites_params(), device)
    for number, kind in enumerate([None, None, planted, None]):
        batch = problems.sites_batch(6, *([kind] if kind else []), seed=number)
        given = params, {}, *tree.to_device(batch, device)
        oracle.assert_exact(compiled(*given), eager(*given), 0)
    assert [(each.calls, each.redos) for each in is_recorded(compiled)] == [(3, 1)]


def test_a_private_step_is_recorded_as_a_whole(device):
    loss, params, buffers, draw = built("mlp", device, p=0.3)
    plan = problems.plan(dataset_size=64, sampling_rate=0.2, steps=12)
    data, tx = draw(64), optim.adam(1e-2)
    step = private_step(loss, tx, plan, randomness="different")
    start = TrainState.create(tx, params, buffers, seed=1)
    batches = [[each[rows] for each in data] for rows in plan.sampler(start)]
    # A replay fills up the same batches.
    compiled, replay = recorded(step), vgrad.compile(step)
    found, expected = (problems.taken(f, start, batches) for f in (compiled, replay))
    oracle.assert_exact(found[-1][0].params, expected[-1][0].params, 0)
    reports = is_recorded(compiled)
    assert {each.name for each in reports} >= {"clipped_grad", "optim.step"}
    assert all(each.calls for each in reports if each.name == "optim.step")


def test_threads_take_turns(device):
    loss, params, buffers, draw = built("mlp", device)
    eager = vgrad.per_sample_grad(loss)
    compiled = recorded(eager)
    batches = [draw(4) for _ in range(4)]
    compiled(params, buffers, *batches[0])
    expected = [eager(params, buffers, *batch) for batch in batches]
    found = [[] for _ in batches]

    def run(number):
        for _ in range(20):
            found[number].append(compiled(params, buffers, *batches[number]))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(batches))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for results, right in zip(found, expected, strict=True):
        assert len(results) == 20
        for each in results:
            oracle.assert_exact(each, right, 0)


def test_without_a_gpu_the_graph_is_replayed():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    loss, params, buffers, draw = built("mlp", "cpu")
    eager = vgrad.per_sample_norm(loss)
    compiled = recorded(eager)
    batch = draw(4)
    with pytest.warns(vgrad.CompileWarning, match="replays, since .*tensors are on"):
        compiled(params, buffers, *batch)
    found = compiled(params, buffers, *batch)
    oracle.assert_exact(found, eager(params, buffers, *batch), 0)
    assert compiled.reports()[0].backend == "replay"


def test_a_recording_that_fails_or_differs_makes_room_for_a_replay(monkeypatch):
    class Fails(InPlace):
        def __init__(self, run, inputs):
            raise RuntimeError("CUDA error: operation not permitted\nand so on")

    class Differs(InPlace):
        def launch(self):
            super().launch()
            self.outputs[0].add_(1)

    loss, params, buffers, draw = built("mlp", "cpu")
    batch, eager = draw(4), vgrad.per_sample_grad(loss)
    for kind, why in ((Fails, "operation not permitted"), (Differs, "does not repeat")):
        monkeypatch.setattr(backends, "OnCuda", kind)
        compiled = recorded(eager)
        with pytest.warns(vgrad.CompileWarning, match=f"replays, since .*{why}"):
            compiled(params, buffers, *batch)
        found = compiled(params, buffers, *batch)
        oracle.assert_exact(found, eager(params, buffers, *batch), 0)
        assert compiled.reports()[0].backend == "replay"


@pytest.mark.parametrize("fastest", ["replay", "cudagraph"])
def test_auto_tries_recordings_on_a_gpu_alone(device, monkeypatch, fastest):
    def no_compiler(graph, tensors):
        raise Unrepeatable("there is no compiler")

    def timed(graph, tensors, runs):
        assert [*runs] == ["replay", "cudagraph"]
        return fastest, "timed"

    monkeypatch.setattr(backends, "compiled", no_compiler)
    monkeypatch.setattr(backends, "fastest", timed)
    loss, params, buffers, draw = built("mlp", device)
    eager, batch = vgrad.per_sample_norm(loss), draw(4)
    compiled = vgrad.compile(eager, backend="auto")
    with pytest.warns(
        vgrad.CompileWarning, match="does without inductor, since there is"
    ):
        compiled(params, buffers, *batch)
    found = compiled(params, buffers, *batch)
    oracle.assert_exact(found, eager(params, buffers, *batch), 0)
    (report,) = compiled.reports()
    assert (report.backend, report.why) == (fastest, "timed")


def on_meta(function, *arguments):
    """Check a graph of tensors on another device than the CPU, without such a one."""
    given = tree.map_tensors(lambda each: each.to("meta"), arguments)
    module = graph.captured(function, given).module
    backends.check_recordable(module, tree.tensors(given), "meta")


@transforms("flat", "norm", "grad", "moments", "weighted")
@pytest.mark.parametrize(
    "net", ["mlp", *(pytest.param(n, marks=slow) for n in ("cnn", "lstm", "tied"))]
)
def test_no_transform_waits_for_the_cpu(net, name):
    loss, params, buffers, draw = problems.built(net, torch.float32)
    transform = problems.TRANSFORMS[name](loss)
    weights = torch.ones(5) if name == "weighted" else None
    inputs = Inputs(params, buffers, tuple(draw(5)), None, weights)
    on_meta(transform.run, inputs)


@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.lion, optim.muon])
def test_no_optimizer_waits_for_the_cpu(make):
    params = {"w": torch.ones(3, 4), "b": torch.ones(2, 2)}
    tx = make(0.1)
    on_meta(optim.step, tx, params, tx.init(params), params)


def test_a_train_step_does_not_wait_for_the_cpu():
    params = {"w": torch.ones(3)}
    step = train_step(lambda p, b, x: (x @ p["w"]).square().mean(), optim.sgd(0.1))
    state = TrainState.create(optim.sgd(0.1), params, {})
    seen = []

    def run(function, *arguments):
        on_meta(function, *arguments)
        seen.append(function)
        return function(*arguments)

    replace(step, execute=run)(state, torch.ones(4, 3))
    assert len(seen) == 2


REFUSED = {
    "an argument on another device": (
        lambda x, y: x + y,
        lambda: (torch.ones(2, device="meta"), torch.ones(())),
        "are on .*cpu.*meta",
    ),
    "no argument": (lambda: torch.ones(2), lambda: (), "are on none"),
    "random numbers of the CPU": (
        lambda x: torch.rand(2).sum() + x.new_zeros(2),
        lambda: (torch.ones(2, device="meta"),),
        "rand.* computes on cpu",
    ),
    "a write": (
        lambda x: x.add_(1) * 2,
        lambda: (torch.ones(2, device="meta"),),
        "writes into an argument",
    ),
    "a write into a part": (
        lambda x: torch.neg(x[0], out=x.view(1, 4)[0, 1:3].unbind()[0]),
        lambda: (torch.ones(4, device="meta"),),
        "writes into an argument",
    ),
    "a conjugate": (
        lambda x: x * 2,
        lambda: (torch.ones(2, dtype=torch.complex64, device="meta").conj(),),
        "conjugate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, given, why = REFUSED[name]
    given = given()
    module = graph.captured(function, given).module
    with pytest.raises(Unrepeatable, match=why):
        backends.check_recordable(module, list(given), "meta")


def test_numbers_that_a_function_writes_out_stay_on_the_cpu():
    def function(x):
        return x.sum(), torch.arange(3).sum() * 2

    x = torch.ones(2, device="meta")
    backends.check_recordable(graph.captured(function, (x,)).module, [x], "meta")

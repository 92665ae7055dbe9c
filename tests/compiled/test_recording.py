"""Graphs that a device records: what goes in and out, and what is refused.

On a CPU a recording stands in that runs the graph in the memory it was made in. The
same calls are repeated on a GPU, where there is one.
"""

import threading
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

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


def in_place(run, memory):
    """Return a function that writes into the same results each time."""
    outputs = [each.clone() for each in run(*memory)]

    def launch(*given):
        assert all(one is other for one, other in zip(given, memory, strict=True))
        for own, result in zip(outputs, run(*memory), strict=True):
            own.copy_(result)
        return outputs

    return launch


def stand_in(monkeypatch, record=in_place):
    """Put another function in the place of torch's that records CUDA graphs."""
    stand_ins = {"make_graphed_callables": record, "device": lambda _: nullcontext()}
    for name in ("Event", "current_stream"):
        stand_ins[name] = Mock()
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cpu, name, value, raising=False)


@pytest.fixture(params=losses.DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        stand_in(monkeypatch)
    return request.param


def built(device, name="mlp"):
    loss, params, buffers, draw = problems.built(name, torch.float32)
    params, buffers = tree.to_device((params, buffers), device)
    return loss, params, buffers, lambda size: tree.to_device(draw(size), device)


def recorded(function, **options):
    return vgrad.compile(function, backend="cudagraph", fallback="error", **options)


def is_recorded(compiled):
    reports = compiled.reports()
    assert {each.backend for each in reports} == {"cudagraph"}, reports
    return reports


@pytest.mark.parametrize(
    ("net", "name"),
    [("mlp", "flat"), ("mlp", "gram, cross"), pytest.param("lstm", "flat", marks=slow)],
)
def test_numbers_are_those_of_eager_mode(device, net, name):
    loss, params, buffers, draw = built(device, net)
    calls = [(params, buffers, *draw(5)) for _ in range(4)]
    compiled = problems.same_quantities(name, loss, calls, backend="cudagraph")
    assert [each.calls for each in is_recorded(compiled)] == [3]


def test_an_ensemble_is_recorded_and_results_stay_as_they_are(device):
    fmodel, params, buffers = vgrad.stack([problems.mlp().to(device) for _ in range(2)])
    eager = vgrad.ensemble_forward(fmodel)
    compiled = recorded(eager)
    batches = [torch.randn(4, 5).to(device) for _ in range(4)]
    results = [compiled(params, buffers, x) for x in batches]
    for found, x in zip(results, batches, strict=True):
        oracle.assert_exact(found, eager(params, buffers, x), 0)
    assert is_recorded(compiled)[0].calls == 3


def test_inputs_may_lie_in_memory_in_any_way(device):
    loss, params, buffers, draw = built(device)
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
    loss, params, buffers, draw = built(device, "dropout")
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


def test_a_private_step_is_recorded_as_a_whole(device):
    loss, params, buffers, draw = built(device, "dropout")
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
    assert {each.name for each in reports} >= {"private_step", "optim.step"}
    assert all(each.calls for each in reports if each.name == "optim.step")


def test_threads_take_turns(device):
    loss, params, buffers, draw = built(device)
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


def fails(run, memory):
    raise RuntimeError("CUDA error: operation not permitted\nand so on")


def differs(run, memory):
    def launch(*given):
        first, *others = run(*given)
        return [first + 1, *others]

    return launch


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "tensors are on"),
        (fails, "operation not permitted"),
        (differs, "does not repeat"),
    ],
)
def test_where_no_recording_is_right_the_graph_is_replayed(monkeypatch, record, why):
    if record is not None:
        stand_in(monkeypatch, record)
    loss, params, buffers, draw = built("cpu")
    batch, eager = draw(4), vgrad.per_sample_grad(loss)
    compiled = recorded(eager)
    with pytest.warns(vgrad.CompileWarning, match=f"replays, since .*{why}"):
        found = [compiled(params, buffers, *batch) for _ in range(3)][-1]
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
    loss, params, buffers, draw = built(device)
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


# Graphs on a device without kernels, as if it recorded them.


META = torch.ones(4, device="meta")
REFUSED = {
    "another device": (
        lambda x, y: x + y,
        (META, torch.ones(())),
        "are on .*cpu.*meta",
    ),
    "no argument": (lambda: torch.ones(2), (), "are on none"),
    "random numbers of the CPU": (
        lambda x: torch.rand(2).sum() + x.new_zeros(2),
        (META,),
        "rand.* draws on cpu",
    ),
    "a write": (lambda x: x.add_(1) * 2, (META,), "writes into an argument"),
    "a write into a part": (
        lambda x: torch.neg(x[0], out=x.view(1, 4)[0, 1:3].unbind()[0]),
        (META,),
        "writes into an argument",
    ),
    "a conjugate": (lambda x: x * 2, (META.to(torch.complex64).conj(),), "conjugate"),
    "constants of the CPU": (
        lambda x: (x.sum(), torch.arange(3).sum() * 2),
        (META,),
        None,
    ),
}


@pytest.fixture
def check(monkeypatch):
    monkeypatch.setattr(backends, "records_graphs", lambda device: True)

    def check(function, *arguments):
        found = graph.captured(function, arguments)
        backends.check_recordable(found, tree.tensors(arguments))
        fixed = set()  # ops on constants alone
        for node in found.module.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                if fixed.issuperset(node.all_input_nodes):
                    fixed.add(node)
                elif node in found.places:
                    assert found.places[node].device.type == "meta"

    return check


def on_meta(arguments):
    return tree.map_tensors(lambda each: each.to("meta"), arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_that_a_recording_would_not_repeat_are_refused(check, name):
    function, arguments, why = REFUSED[name]
    with pytest.raises(Unrepeatable, match=why) if why else nullcontext():
        check(function, *arguments)


@pytest.mark.parametrize("net", ["mlp", pytest.param("tied", marks=slow)])
@pytest.mark.parametrize("name", ["flat", "norm", "grad", "moments", "weighted"])
def test_no_transform_waits_for_the_cpu(check, net, name):
    loss, params, buffers, draw = problems.built(net, torch.float32)
    weights = torch.ones(5) if name == "weighted" else None
    inputs = Inputs(params, buffers, tuple(draw(5)), None, weights)
    check(problems.TRANSFORMS[name](loss).run, on_meta(inputs))


@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.lion, optim.muon])
def test_no_optimizer_waits_for_the_cpu(check, make):
    params = {"w": torch.ones(3, 4), "b": torch.ones(2, 2)}
    tx = make(0.1)
    check(optim.step, tx, *on_meta((params, tx.init(params), params)))


def test_a_train_step_does_not_wait_for_the_cpu(check):
    params = {"w": torch.ones(3)}
    step = train_step(lambda p, b, x: (x @ p["w"]).square().mean(), optim.sgd(0.1))
    state = TrainState.create(optim.sgd(0.1), params, {})
    seen = []

    def run(function, *arguments):
        check(function, *on_meta(arguments))
        seen.append(function)
        return function(*arguments)

    replace(step, execute=run)(state, torch.ones(4, 3))
    assert len(seen) == 2

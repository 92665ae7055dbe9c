"""What is captured, what is not, and what is said about it."""

import argparse
import cProfile
import gc
import random
import re
import shutil
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.compiled.problems import ran, same_calls
from vgrad import optim
from vgrad.compiled import CaptureReport, choices
from vgrad.training import TrainState, ensemble_train_step, private_step, train_step

slow = pytest.mark.slow
aside = slow, pytest.mark.compiled
"""Marks of what takes long and runs by `make compiled` alone."""

# Torch warns of itself while Inductor runs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common:FutureWarning"),
]
PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0])}
HERE = re.escape(__file__)


def batch(size=4, seed=0):
    return losses.randn(size, 3, seed=seed, dtype=torch.float32)


def total(params, x):
    return (params["w"] * x).square().sum()


def picks(params, buffers, x):
    return total(params, x[x.abs().sum(1).nonzero().flatten()])


LOOKS = {
    "item": ("item", lambda p, b, x: total(p, x) * x[0, 0].item()),
    "tolist": ("tolist", lambda p, b, x: total(p, x) * x[0].tolist()[0]),
    "bool": ("__bool__", lambda p, b, x: total(p, x if x.sum() > 0 else -x)),
    "float": ("__float__", lambda p, b, x: total(p, x) * float(x[0, 0])),
    "int": ("__int__", lambda p, b, x: total(p, x) * int(x[0, 0] * 5)),
    "equal": ("equal", lambda p, b, x: total(p, x) * (1 + torch.equal(x, x))),
}
OTHERS = {
    "random": (
        "it draws random numbers from Python or numpy",
        lambda p, b, x: total(p, x) * random.random(),
    ),
    "numpy's random": (
        "it draws random numbers from Python or numpy",
        lambda p, b, x: total(p, x) * float(np.random.rand()),
    ),
    "nonzero": ("depends on values", picks),
    "a mask": ("depends on values", lambda p, b, x: total(p, x[x[:, 0] > 0])),
    "seeds": (
        "it sets the seed or the state of a generator",
        lambda p, b, x: (torch.manual_seed(3), total(p, x * torch.rand(3)))[1],
    ),
}
REASONS = {
    **{
        name: (rf"{op} hands values to Python {HERE}:\d+: .*lambda", f)
        for name, (op, f) in LOOKS.items()
    },
    **OTHERS,
}


def seeded(run, *given):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return run(*given)


@pytest.mark.parametrize("name", REASONS)
def test_what_looks_at_values_runs_in_eager_mode_with_one_warning(name):
    reason, loss = REASONS[name]
    tx = optim.sgd(0.1)
    step, state = train_step(loss, tx), TrainState.create(tx, PARAMS, {}, seed=1)
    compiled = vgrad.compile(step)
    with pytest.warns(vgrad.CompileWarning, match=f"eager mode, since .*{reason}") as w:
        found = seeded(compiled, state, batch())
    assert len(w) == 1
    oracle.assert_exact(found, seeded(step, state, batch()), 0)
    for seed in (1, 2):
        found = seeded(compiled, state, batch(seed=seed))
        oracle.assert_exact(found, seeded(step, state, batch(seed=seed)), 0)
    first, second = compiled.reports()  # the optimizer is captured nevertheless
    assert (first.backend, first.calls) == ("eager", 0)
    assert re.search(reason, first.why)
    assert second.backend == "replay"
    strict = vgrad.compile(step, fallback="error")
    text = f"eager mode, since .*{reason}.* or pass fallback=.eager."
    with pytest.raises(RuntimeError, match=text):
        seeded(strict, state, batch())


class Looks(torch.nn.Module):
    """Hands its input to numpy, which runs where no transform is on."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum(1) * float(self.look(x)[0, 0])


@pytest.mark.parametrize(
    ("op", "look"), [("numpy", torch.Tensor.numpy), ("__array__", np.asarray)]
)
def test_a_model_that_hands_its_input_to_numpy_is_not_captured(op, look):
    fmodel, params, buffers = vgrad.stack([Looks(look), Looks(look)])
    eager = vgrad.ensemble_forward(fmodel, strategy="loop")
    compiled = vgrad.compile(eager)
    text = rf"runs in eager mode, since {op} hands values to Python {HERE}:\d+: "
    with pytest.warns(vgrad.CompileWarning, match=text):
        compiled(params, buffers, batch())
    for seed in range(2):
        given = params, buffers, batch(seed=seed)
        oracle.assert_exact(compiled(*given), eager(*given), 0)


def test_a_loss_of_one_sample_that_looks_at_buffers_is_not_captured():
    def loss(params, buffers, x):
        return total(params, x) * buffers["scale"].item()

    compiled = vgrad.compile(vgrad.per_sample_norm(loss))
    text = rf"compile\(per_sample_norm\): .*item hands values to Python {HERE}:\d+: "
    with pytest.warns(vgrad.CompileWarning, match=text):
        compiled(PARAMS, {"scale": torch.tensor(2.0)}, batch())
    for scale in (2.0, 3.0):
        buffers = {"scale": torch.tensor(scale)}
        expected = vgrad.per_sample_norm(loss)(PARAMS, buffers, batch())
        oracle.assert_exact(compiled(PARAMS, buffers, batch()), expected, 0)


def squared(params, buffers, x):
    return total(params, x)


def test_a_loop_runs_any_python():
    eager = vgrad.clipped_grad(squared, max_norm=1.0, strategy="loop")
    compiled = vgrad.compile(eager)
    text = r'compile\(clipped_grad\): runs in eager mode, since strategy="loop" runs'
    with pytest.warns(vgrad.CompileWarning, match=text) as caught:
        found = [compiled(PARAMS, {}, batch()) for _ in range(2)]
    assert len(caught) == 1
    for each in found:
        oracle.assert_exact(each, eager(PARAMS, {}, batch()), 0)
    assert compiled.reports() == ()
    with pytest.raises(RuntimeError, match=r'strategy="loop" .*fallback="eager"'):
        vgrad.compile(eager, fallback="error")(PARAMS, {}, batch())


def test_inside_of_transforms_and_modes_eager_mode_runs():
    eager = vgrad.per_sample_norm(squared)
    compiled = vgrad.compile(eager)
    x = torch.stack([batch(seed=n) for n in range(3)])
    compiled(PARAMS, {}, x[0])
    text = "a transform of torch.func or a mode is on around it"
    with pytest.warns(vgrad.CompileWarning, match=text):
        found = torch.vmap(lambda each: compiled(PARAMS, {}, each))(x)
    with FlopCounterMode(display=False):  # warned of already
        oracle.assert_exact(compiled(PARAMS, {}, x[1]), eager(PARAMS, {}, x[1]), 0)
    torch.testing.assert_close(found[1], eager(PARAMS, {}, x[1]))
    compiled(PARAMS, {}, x[1])
    ran(compiled, calls=1)
    strict = vgrad.compile(eager, fallback="error")
    with pytest.raises(RuntimeError, match=text):
        torch.vmap(lambda each: strict(PARAMS, {}, each))(x)


def test_there_are_sixteen_captures_at_most():
    eager = vgrad.per_sample_grad(squared)
    compiled = vgrad.compile(eager, verify=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(1, 17):
            compiled(PARAMS, {}, batch(size))
    text = r"compile\(per_sample_grad\): .* there are 16 captures already"
    with pytest.warns(vgrad.CompileWarning, match=text):
        compiled(PARAMS, {}, batch(17))
    for size in (17, 18):  # warned of already
        given = PARAMS, {}, batch(size)
        oracle.assert_exact(compiled(*given), eager(*given), 0)
    compiled(PARAMS, {}, batch(5))
    assert [each.calls for each in compiled.reports()] == [0] * 4 + [1] + [0] * 11


def test_reports_say_what_ran():
    compiled = vgrad.compile(vgrad.clipped_grad(squared, max_norm=1.0))
    assert compiled.reports() == ()
    for size in (4, 4, 4, 5):
        compiled(PARAMS, {}, batch(size))
    four, five = compiled.reports()
    assert replace(four, build_seconds=0.0, nodes=0, key="") == CaptureReport(
        "clipped_grad", four.kind, "replay", "as asked for", calls=2
    )
    assert four.nodes > 5
    assert four.build_seconds > 0
    assert (five.calls, five.backend) == (0, "replay")
    assert four.kind != five.kind
    other = vgrad.compile(vgrad.clipped_grad(squared, max_norm=1.0))
    other(PARAMS, {}, batch(4))
    assert other.reports()[0].kind == four.kind  # so that choices can be kept


def test_choices_are_repeated():
    compiled = vgrad.compile(vgrad.per_sample_norm(squared))
    compiled(PARAMS, {}, batch())
    (report,) = compiled.reports()
    given_up = CaptureReport("clipped_grad", "0a1b", "eager", "it is slow")
    kept = choices([report, given_up])
    assert kept == {report.kind: "replay"}
    again = vgrad.compile(vgrad.per_sample_norm(squared), backend=kept)
    for _ in range(2):
        again(PARAMS, {}, batch())
    (found,) = again.reports()
    assert (found.backend, found.why, found.calls) == ("replay", "as chosen before", 1)


def test_attributes_are_those_of_the_transform():
    eager = vgrad.clipped_grad(squared, max_norm=2.0, normalize_by=4.0)
    compiled = vgrad.compile(eager)
    assert compiled.sensitivity == eager.sensitivity
    assert compiled.options is eager.options
    with pytest.raises(AttributeError, match="nothing"):
        _ = compiled.nothing


STEP = train_step(squared, optim.sgd(0.1))
FMODEL = vgrad.stack([torch.nn.Linear(2, 1)] * 2)[0]
WRONG = {
    "a loss": (lambda: vgrad.compile(squared), TypeError, "expected what a per-sample"),
    "a module": (
        lambda: vgrad.compile(torch.nn.Linear(2, 2)),
        TypeError,
        r"compile\(transform\): .* got a Linear",
    ),
    "a backend": (
        lambda: vgrad.compile(STEP, backend="nvcc"),
        ValueError,
        r"compile\(backend='nvcc'\): expected one of .*replay.*cudagraph.*auto",
    ),
    "a fallback": (
        lambda: vgrad.compile(STEP, fallback="warn"),
        ValueError,
        r"compile\(fallback='warn'\): expected one of .*eager.*error",
    ),
    "sizes of a train step": (
        lambda: vgrad.compile(STEP, batch_sizes=[4]),
        ValueError,
        r"compile\(TrainStep, batch_sizes=\[4\]\): .* whole batch would average",
    ),
    "sizes of an ensemble's step": (
        lambda: vgrad.compile(
            ensemble_train_step(squared, optim.sgd(0.1)), batch_sizes=[4]
        ),
        ValueError,
        r"compile\(EnsembleStep, batch_sizes=\[4\]\): expected a per-sample transform",
    ),
    "sizes of a gradient": (
        lambda: vgrad.compile(vgrad.ensemble_grad(squared), batch_sizes=[4]),
        ValueError,
        r"compile\(EnsembleGradFn, batch_sizes",
    ),
    "sizes of a forward pass": (
        lambda: vgrad.compile(vgrad.ensemble_forward(FMODEL), batch_sizes=[4]),
        ValueError,
        r"compile\(EnsembleForward, batch_sizes",
    ),
    "no sizes": (
        lambda: vgrad.compile(vgrad.per_sample_norm(squared), batch_sizes=[]),
        ValueError,
        r"compile\(batch_sizes=\[\]\): expected at least one size in a list",
    ),
    "one size": (
        lambda: vgrad.compile(vgrad.per_sample_norm(squared), batch_sizes=4),
        ValueError,
        r"compile\(batch_sizes=4\): expected at least one size in a list",
    ),
    "a size of zero": (
        lambda: vgrad.compile(vgrad.per_sample_norm(squared), batch_sizes=[4, 0]),
        ValueError,
        r"compile\(batch_sizes=0\): expected",
    ),
    "half a sample": (
        lambda: vgrad.compile(vgrad.per_sample_norm(squared), batch_sizes=[4.5]),
        (TypeError, ValueError),
        r"compile\(batch_sizes=4.5\): expected",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compiled_is_refused(name):
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        make()


CALLS = {
    "no batch": (lambda run: run(PARAMS, {}), ValueError, "no tensor"),
    "no params": (lambda run: run({}, {}, batch()), ValueError, "at least one param"),
    "sizes": (lambda run: run(PARAMS, {}, batch(), batch(3)), ValueError, "sizes"),
    "a list": (lambda run: run([], {}, batch()), TypeError, "params"),
    "too few": (lambda run: run(PARAMS), TypeError, "missing"),
    "an option": (lambda run: run(PARAMS, {}, batch(), cross=()), TypeError, "cross"),
    "a mask": (
        lambda run: run(PARAMS, {}, batch(), mask=torch.ones(4)),
        ValueError,
        "boolean",
    ),
}


@pytest.mark.parametrize("batch_sizes", [None, [5]])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_raise_what_the_transform_raises(name, batch_sizes):
    run, kind, text = CALLS[name]
    transform = vgrad.per_sample_norm(squared)
    compiled = vgrad.compile(transform, batch_sizes=batch_sizes)
    compiled(PARAMS, {}, batch())
    for each in (transform, compiled):
        with pytest.raises(kind, match=text):
            run(each)


def test_errors_of_the_loss_come_through_and_leave_no_capture():
    def loss(params, buffers, x):
        if len(x) == 2:
            raise KeyError("mine")
        return total(params, x)

    compiled = vgrad.compile(vgrad.per_sample_norm(loss), fallback="error")
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            compiled({"w": torch.ones(2)}, {}, torch.ones(4, 2))
    assert compiled.reports() == ()
    before = losses.state_of_torch()
    same_calls(compiled, vgrad.per_sample_norm(loss), [(PARAMS, {}, batch())] * 3)
    torch.manual_seed(0)
    assert losses.state_of_torch()[:-1] == before[:-1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["grad", "flat"])
def test_results_are_constants(name, first):
    params = {"w": PARAMS["w"].clone().requires_grad_()}
    compiled = vgrad.compile(problems.TRANSFORMS[name](squared), fallback="error")
    with torch.set_grad_enabled(first):
        compiled(params, {}, batch())
    for _ in range(2):
        found = compiled(params, {}, batch())
        found = found["w"] if name == "grad" else found.grads["w"]
        with pytest.raises(RuntimeError, match="not differentiated again"):
            (found.sum() + params["w"].sum()).backward()
    with torch.no_grad():
        found = compiled(params, {}, batch())
    assert not any(x.requires_grad for x in losses.pytree.tree_leaves(found))


def test_inference_mode():
    eager = vgrad.clipped_grad(squared, max_norm=1.0)
    compiled = vgrad.compile(eager, fallback="error")
    with torch.inference_mode():
        given = {n: p.clone() for n, p in PARAMS.items()}, {}, batch()
        same_calls(compiled, eager, [given] * 3)
    same_calls(compiled, eager, [(PARAMS, {}, batch())] * 3)


def test_closed_over_tensors_are_read_and_values_are_compared():
    config = argparse.Namespace(beta=1.0, shift=torch.zeros(3))

    def loss(params, buffers, x):
        return total(params, x + config.shift) * config.beta

    eager = vgrad.clipped_grad(loss, max_norm=0.5)
    compiled = vgrad.compile(eager, fallback="error")

    def check():
        expected = eager(PARAMS, {}, batch())
        oracle.assert_exact(compiled(PARAMS, {}, batch()), expected, 0)

    for _ in range(2):
        check()
    config.shift += 1  # in place: the same tensor, read again
    check()
    assert [each.calls for each in compiled.reports()] == [2]
    config.shift = torch.full((3,), 5.0)
    check()
    for beta in (2.0, 3.0):
        config.beta = beta
        check()
        check()
    config.beta = 1
    check()
    assert len(compiled.reports()) == 5


def test_parts_of_a_closed_over_tensor_are_parts_of_it_at_each_call():
    table, order = torch.arange(6.0).reshape(2, 3).t(), torch.tensor([2, 0, 1])

    def loss(params, buffers, x):
        x = params["w"] * x
        first, second = table.unbind(1)
        whole, rest = table.split([2, 1], 0)
        left = (x * first).sum() + (x[:2] * table[-2:, 1]).sum() + x[order][0]
        right = (x[:2] * whole[:, 1:].sum(1)).sum() + (x[0] * rest).sum()
        return left * right + (x * second[order]).sum()

    eager = vgrad.per_sample_grad(loss)
    compiled = vgrad.compile(eager, fallback="error")
    for _ in range(3):
        oracle.assert_exact(
            compiled(PARAMS, {}, batch()), eager(PARAMS, {}, batch()), 0
        )
        table.mul_(2.0)
        order.copy_(order.roll(1))
    ran(compiled, calls=2)


def test_a_profiler_goes_on_after_a_capture():
    compiled = vgrad.compile(vgrad.per_sample_norm(squared), fallback="error")
    with cProfile.Profile() as profile:
        compiled(PARAMS, {}, batch(4))
        total(PARAMS, batch())
    names = [getattr(each.code, "co_name", "") for each in profile.getstats()]
    assert "total" in names
    around, before = lambda *_: None, sys.getprofile()
    sys.setprofile(around)
    try:
        compiled(PARAMS, {}, batch(5))
        assert sys.getprofile() is around
        assert gc.isenabled()
    finally:
        sys.setprofile(before)


SIZES = [4, 6]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=slow if n in ("flat", "gram, cross", "weighted") else aside
        )
        for n in problems.TRANSFORMS
    ],
)
def test_batches_of_any_size_are_filled_up_or_split(name):
    loss, params, buffers, draw = problems.built("mlp", torch.float64)
    make = problems.TRANSFORMS[name]
    compiled = vgrad.compile(make(loss), batch_sizes=SIZES, fallback="error")
    for size in (3, 4, 5, 6, 2, 7, 13, 12, 1, 16):
        given = params, buffers, *draw(size)
        if name == "gram, cross" and size == 1:
            continue
        found = problems.call(name, compiled, given)
        oracle.assert_exact(found, problems.call(name, make(loss), given))
    if not name.startswith("gram"):
        # Each size may be that of a whole batch, and that of a part.
        assert len(compiled.reports()) <= 2 * len(SIZES)
    assert all(each.redos == 0 for each in compiled.reports())


@slow
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_masks_of_batches_that_are_filled_up(chunk_size):
    loss, params, buffers, draw = problems.built("mlp", torch.float64)
    eager = vgrad.clipped_grad(loss, max_norm=0.5, chunk_size=chunk_size)
    compiled = vgrad.compile(eager, batch_sizes=SIZES, fallback="error")
    for size in (3, 4, 5, 9, 13):
        given, mask = (params, buffers, *draw(size)), torch.arange(size) % 3 > 0
        oracle.assert_exact(compiled(*given, mask=mask), eager(*given, mask=mask))
    assert len(compiled.reports()) <= 4


@pytest.mark.parametrize(
    "name", ["weighted", *(pytest.param(n, marks=aside) for n in ("flat", "grad"))]
)
def test_weights_and_aux_have_no_entry_for_what_was_filled_in(name):
    def loss(params, buffers, sample):
        value = problems.sites(params, buffers, *sample["xs"])
        return value, {"first": sample["xs"][0], "loss": value}

    params, make = problems.sites_params(torch.float64), problems.TRANSFORMS[name]
    eager = make(loss, has_aux=True)
    compiled = vgrad.compile(eager, batch_sizes=SIZES, fallback="error")
    for size in (3, 5, 8):
        sample = {"xs": list(problems.sites_batch(size, dtype=torch.float64))}
        given = params, {}, sample
        found, aux = problems.call(name, compiled, given)
        expected, exact = problems.call(name, eager, given)
        oracle.assert_exact(found, expected)
        oracle.assert_exact(aux, exact)
        assert len(aux["first"]) == size
        mask = torch.arange(size) > 0
        _, aux = problems.call(name, compiled, given, mask)
        assert torch.equal(aux["first"], sample["xs"][0][mask])
    if name == "weighted":
        with pytest.raises(
            ValueError, match=r"weighted_grad.*shape \(3,\), got \(2,\)"
        ):
            compiled(torch.ones(2), params, {}, {"xs": list(problems.sites_batch(3))})


def test_a_batch_is_filled_up_with_copies_that_count_nothing():
    x = batch(3)
    x[0] = torch.nan  # of which the copies are
    eager = vgrad.clipped_grad(lambda p, b, x: total(p, x), max_norm=0.5)
    compiled = vgrad.compile(eager, batch_sizes=[8], fallback="error")
    for _ in range(2):
        found = compiled(PARAMS, {}, x)
        assert int(found.nonfinite) == 1
        assert found.norms.shape == (3,)
        oracle.assert_exact(found.grads, eager(PARAMS, {}, x).grads, 1e-6)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler"
)


@slow
@needs_compiler
def test_inductor_is_right_and_redoes_what_is_doubtful():
    params = problems.sites_params()
    eager = vgrad.clipped_grad(problems.sites, max_norm=0.7)
    compiled = vgrad.compile(eager, backend="inductor", fallback="error")
    for seed, kinds in enumerate([[], [], ["nan"], [], ["cancelling"], []]):
        x, g = problems.sites_batch(6, *kinds, seed=seed)
        found = compiled(params, {}, x, g)
        fine = x.isfinite().all(2).all(1)
        grads = oracle.loss_gradients(
            problems.sites, params, {}, (x[fine], g[fine]), int(fine.sum())
        )
        oracle.assert_exact(found.grads, oracle.clipped(grads, 0.7), 5e-6)
        assert int(found.nonfinite) == int((~fine).sum())
    (report,) = compiled.reports()
    assert (report.backend, report.calls, report.redos) == ("inductor", 5, 2)


@slow
@pytest.mark.compiled
@needs_compiler
def test_inductor_counts_the_limit_of_a_private_step():
    plan = vgrad.dp.Plan(
        dataset_size=20,
        sampling_rate=0.4,
        noise_multiplier=0.8,
        max_norm=0.5,
        steps=3,
        delta=1e-5,
    )
    tx = optim.sgd(0.1)
    step = private_step(problems.sites, tx, plan)
    compiled = vgrad.compile(step, backend="inductor", batch_sizes=[6])
    state = other = TrainState.create(tx, problems.sites_params(), {}, seed=1)
    for seed in range(3):
        batch = problems.sites_batch(5, seed=seed)
        state, _ = compiled(state, *batch)
        other, _ = step(other, *batch)
    oracle.assert_exact(state.params, other.params, 1e-5)
    with pytest.raises(RuntimeError, match="fewer than the 3 steps .* got 3"):
        compiled(state, *batch)


@slow
@pytest.mark.compiled
@needs_compiler
def test_inductor_draws_the_dropout_of_eager_mode():
    loss, params, buffers, draw = problems.built("dropout")
    eager = vgrad.clipped_grad(loss, max_norm=0.7, randomness="different")
    compiled = vgrad.compile(eager, backend="inductor", fallback="error")
    for seed in range(3):
        given = params, buffers, *draw(5)
        torch.manual_seed(seed)
        found, after = compiled(*given), torch.get_rng_state()
        torch.manual_seed(seed)
        oracle.assert_exact(found, eager(*given), 1e-5)
        assert torch.equal(torch.get_rng_state(), after)


@slow
@needs_compiler
def test_auto_says_what_it_took():
    eager = vgrad.per_sample_norm(squared)
    compiled = vgrad.compile(eager, backend="auto", fallback="error")
    for seed in range(2):
        given = PARAMS, {}, batch(seed=seed)
        oracle.assert_exact(compiled(*given), eager(*given), 1e-6)
    (report,) = compiled.reports()
    assert report.backend in ("replay", "inductor")
    assert re.fullmatch(r"replay took \S+ ms, inductor took \S+ ms", report.why)
    again = vgrad.compile(eager, backend=choices([report]), fallback="error")
    again(PARAMS, {}, batch())
    assert again.reports()[0].backend == report.backend


@slow
def test_without_a_compiler_the_graph_is_replayed(monkeypatch):
    def loss(params, buffers, x):
        return (params["w"] * x).tan().sum()  # in no cache of compiled code

    import torch._inductor.config as config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    eager = vgrad.per_sample_norm(loss)
    compiled = vgrad.compile(eager, backend="inductor")
    text = r"compile\(per_sample_norm\): replays, since Inductor fails"
    with pytest.warns(vgrad.CompileWarning, match=text):
        compiled(PARAMS, {}, batch())
    oracle.assert_exact(compiled(PARAMS, {}, batch()), eager(PARAMS, {}, batch()), 0)
    (report,) = compiled.reports()
    assert (report.backend, report.calls) == ("replay", 1)
    assert report.why.startswith("Inductor fails")


def test_explain_shows_captures_and_what_eager_mode_does():
    loss, params, buffers, draw = problems.built("mlp", torch.float32)
    transform = vgrad.clipped_grad(loss, max_norm=1.0)
    compiled = vgrad.compile(transform)
    batch = draw(6)
    explain = vgrad.explain(compiled)
    assert str(explain(params, buffers, *batch)).startswith("no captures yet\n")
    for size in (6, 6, 4):
        compiled(params, buffers, *(each[:size] for each in batch))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        compiled(params, buffers, *batch)
    found = explain(params, buffers, *batch)
    assert found.captures == compiled.reports()
    assert found.eager == vgrad.explain(transform)(params, buffers, *batch)
    keys = [each.key for each in found.captures]
    threads = f"{torch.get_num_threads()} threads"
    sizes = "float32 [8, 5], float32 [8], float32 [3, 8], float32 [3], "
    assert keys[0] == f"{sizes}float32 [6, 5], int64 [6]; {threads}"
    assert keys[1] == f"{sizes}float32 [4, 5], int64 [4]; {threads}"
    assert keys[2] == f"{keys[0]}; autocast of cpu to bfloat16; inference mode"
    head, first, *_ = str(found).splitlines()
    titles = ["capture", "backend", "nodes", "build", "calls", "redos", "key", "why"]
    assert head.split() == titles
    assert "3 others, float32 [3], float32 [6, 5], int64 [6]; " in first
    assert str(found).endswith(str(found.eager))


def test_explain_shows_why_eager_mode_stays():
    def loss(params, buffers, x):
        return params["w"].sum() * x.tolist()[0] if x.sum() else params["w"].sum()

    batch = {"w": torch.ones(2)}, {}, torch.ones(3, 1)
    compiled = vgrad.compile(vgrad.per_sample_norm(loss))
    with pytest.warns(vgrad.CompileWarning, match="runs in eager mode"):
        compiled(*batch)
    (report,) = vgrad.explain(compiled)(*batch).captures
    assert report.backend == "eager"
    assert report.why in str(vgrad.explain(compiled)(*batch))
    assert "tolist" in report.why


def test_explain_of_steps_and_of_ensembles():
    tx = optim.sgd(0.1)
    step = vgrad.compile(train_step(squared, tx))
    state = TrainState.create(tx, {"w": torch.ones(2)}, {})
    x = torch.ones(3, 2)
    step(state, x)
    found = vgrad.explain(step)(state, x)
    assert found.eager is None
    assert {each.name for each in found.captures} == {"train_step", "optim.step"}
    forward = vgrad.compile(vgrad.ensemble_forward(FMODEL))
    members = vgrad.stack([torch.nn.Linear(2, 1)] * 2)[1:]
    forward(*members, x)
    found = vgrad.explain(forward)(*members, x)
    assert [each.name for each in found.captures] == ["ensemble_forward"]
    assert found.eager.members == 2

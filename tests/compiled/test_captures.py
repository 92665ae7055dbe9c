"""Arguments and surroundings of captures, calls that run in eager mode, reports."""

import functools
import math
import re
import shutil
import types
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.compiled.problems import ran, same_calls, same_quantities
from vgrad import optim
from vgrad.compiled import CaptureReport, captures, choices
from vgrad.training import TrainState, ensemble_train_step, private_step, train_step

slow = pytest.mark.slow
aside = slow, pytest.mark.compiled
"""Marks of tests that take long and run by `make compiled` alone."""

# Torch warns of itself while Inductor runs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common:FutureWarning"),
]
PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0])}
HERE = re.escape(__file__)
SGD = optim.sgd(0.1)


def batch(size=4, seed=0):
    return losses.randn(size, 3, seed=seed, dtype=torch.float32)


X = batch()


def total(params, x):
    return (params["w"] * x).square().sum()


def squared(params, buffers, x):
    return total(params, x)


def of_two(params, buffers, x, y):
    return (params["w"] * x * y).sum().square()


def captured(loss, **options):
    """Return gradients in eager mode, and captured."""
    eager = vgrad.per_sample_grad(loss, **options)
    return eager, vgrad.compile(eager, verify=False, fallback="error")


def check_all(both, calls):
    """Demand the numbers of eager mode."""
    eager, compiled = both
    for given in calls:
        oracle.assert_exact(compiled(*given), eager(*given), 0)


def check(both, *given):
    """Demand the numbers of eager mode: of a capture, and of its graph."""
    check_all(both, [given] * 2)


def calls_of(compiled, name=None):
    return [each.calls for each in compiled.reports() if name in (None, each.name)]


# Arguments and switches.


def reads_numbers(params, buffers, x, y):
    value = y["scale"]
    factor = math.copysign(3.0, value) if type(value) is float else 4
    return total(params, x) * (factor + isinstance(value, bool))


def pulled(params, buffers, x, start=PARAMS):
    """The loss has the first parameters, to which it pulls later ones."""
    return total(params, x) + (params["w"] - start["w"]).square().sum()


LATER = {"w": PARAMS["w"] + 1}
NUMBERS = (1, True, 1.0, 0.0, -0.0, math.nan, float("nan"))
ARGUMENTS = {
    "two tensors that were one": (
        of_two,
        [(PARAMS, {}, X, other) for other in (X, X, X + 1, X)],
        [2, 0],
    ),
    "numbers": (
        reads_numbers,
        [(PARAMS, {}, X, {"scale": value}) for value in NUMBERS],
        [0, 0, 0, 0, 0, 1],
    ),
    "a closed tensor first": (
        pulled,
        [(each, {}, X) for each in (PARAMS, LATER, LATER)],
        [2],
    ),
    "a closed tensor later": (
        pulled,
        [(each, {}, X) for each in (LATER, PARAMS, LATER)],
        [2],
    ),
    "other tensors": (
        of_two,
        [
            (PARAMS, {}, x, x)
            for x in (
                *(X, X.clone(), X.double(), X.t().contiguous().t(), X[:2]),
                *(X.clone().requires_grad_(), torch.complex(X, X).conj().imag),
                *(nn.Parameter(X), X.expand(1, *X.shape)[0]),
            )
        ],
        [2, 0, 0, 0, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    loss, calls, counts = ARGUMENTS[name]
    both = captured(loss)
    check_all(both, calls)
    assert calls_of(both[1]) == counts


def test_methods_in_the_batch():
    def loss(params, buffers, x, factor):
        return total(params, x) * factor()

    class Thing:
        def __init__(self, beta):
            self.beta = beta

        def value(self):
            return self.beta

    step = train_step(loss, SGD)
    compiled = vgrad.compile(step, fallback="error")
    state = TrainState.create(SGD, PARAMS, {})
    for beta in (2.0, 2.0, 3.0):
        thing = Thing(beta)
        for _ in range(3):  # each time another object, of one method
            found, expected = (each(state, X, thing.value) for each in (compiled, step))
            oracle.assert_exact(found, expected, 0)
    assert calls_of(compiled, "train_step") == [2, 2, 2]


def test_grad_mode():
    """A result that can be differentiated again is so, whatever mode came first."""
    eager, compiled = captured(squared)
    given = {"w": PARAMS["w"].clone().requires_grad_()}, {}, X
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled):
            one, other = compiled(*given)["w"], eager(*given)["w"]
            assert one.requires_grad == other.requires_grad


SWITCHES = {
    torch.set_num_threads: (2, 1),
    torch.backends.mha.set_fastpath_enabled: (False, True),
    torch.backends.cuda.enable_flash_sdp: (False, True),
    torch.set_default_device: ("cpu", None),
    functools.partial(torch.set_autocast_enabled, "cpu"): (True, False),
}


def test_a_switch_makes_another_capture():
    both = captured(of_two)
    check(both, PARAMS, {}, X, X)
    for number, (switch, (value, before)) in enumerate(SWITCHES.items()):
        try:
            switch(value)
            check(both, PARAMS, {}, X, X)
        finally:
            switch(before)
        assert calls_of(both[1]) == [1] * (number + 2), switch


def test_arguments_that_cannot_be_compared():
    step = vgrad.compile(train_step(of_two, SGD), fallback="error")
    with pytest.raises(RuntimeError, match="an argument is a types.SimpleNamespace"):
        step(TrainState.create(SGD, PARAMS, {}), X, types.SimpleNamespace())


def test_inference_mode():
    both = captured(squared)
    with torch.inference_mode():
        check(both, {n: p.clone() for n, p in PARAMS.items()}, {}, batch())
    check(both, PARAMS, {}, batch())
    assert calls_of(both[1]) == [1, 1]


# Models, rules, optimizers and exceptions.


def test_a_rule_replaced():
    def made(factor):
        def factors(x, weight):
            return {"weight": lambda g: vgrad.ops.Dense(factor * g * x)}

        return factors

    op = torch.overrides.wrap_torch_function(lambda x, weight: (x, weight))(
        lambda x, weight: x * weight
    )
    vgrad.ops.rule(op, weights=("weight",))(made(1.0))
    loss = lambda p, b, x: op(x, p["w"]).sum()  # noqa: E731
    eager = vgrad.per_sample_norm(loss, verify=False)
    both = eager, vgrad.compile(eager, verify=False, fallback="error")
    check(both, PARAMS, {}, X)
    vgrad.ops.rule(op, weights=("weight",), replace=True)(made(3.0))
    check(both, PARAMS, {}, X)
    assert calls_of(both[1]) == [1, 1]


def test_a_schedule_that_changes():
    held = {"rate": 0.1}
    tx = optim.sgd(lambda step: held["rate"] + 0 * step)
    step = train_step(squared, tx)
    compiled = vgrad.compile(step, verify=False, fallback="error")
    state = TrainState.create(tx, PARAMS, {})
    for rate in (0.1, 0.1, 0.2):
        held["rate"] = rate
        oracle.assert_exact(compiled(state, X)[0], step(state, X)[0], 0)


@pytest.mark.parametrize("first", [True, False])
def test_errors_of_the_loss_come_through_and_leave_nothing_behind(first):
    held = {"beta": 2.0}

    def loss(params, buffers, x):
        if held["beta"] is None:
            raise KeyError("mine")
        return total(params, x) * held["beta"]

    both, before = captured(loss), losses.state_of_torch()
    for fails in (first, False, False, True, False):
        held["beta"] = None if fails else 2.0
        if fails:
            with pytest.raises(KeyError, match="mine"):
                both[1](PARAMS, {}, X)
        else:
            check_all(both, [(PARAMS, {}, X)])
    assert calls_of(both[1]) == [3 - first]
    assert losses.state_of_torch()[:-1] == before[:-1]


# Calls that run in eager mode.


def read(op):
    return rf"{op} hands values to Python {HERE}:\d+"


REASONS = {
    "item": (read("item"), lambda p, b, x: total(p, x) * x[0, 0].item()),
    "bool": (read("__bool__"), lambda p, b, x: total(p, x if x.sum() > 0 else -x)),
    "equal": (read("equal"), lambda p, b, x: total(p, x) * (1 + torch.equal(x, x))),
    "nonzero": ("depends on values", lambda p, b, x: total(p, x[x.sum(1).nonzero()])),
    "a mask": ("depends on values", lambda p, b, x: total(p, x[x[:, 0] > 0])),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_loss_that_reads_values_runs_in_eager_mode_with_one_warning(name):
    reason, loss = REASONS[name]
    step, state = train_step(loss, SGD), TrainState.create(SGD, PARAMS, {}, seed=1)
    compiled, strict = vgrad.compile(step), vgrad.compile(step, fallback="error")
    calls = [(state, batch(seed=seed)) for seed in range(3)]
    text = f"eager mode, since .*{reason}"
    with pytest.warns(vgrad.CompileWarning, match=text) as caught:
        check_all((step, compiled), calls)
    assert len(caught) == 1
    first, second = compiled.reports()  # the optimizer is captured nevertheless
    assert (first.backend, first.calls) == ("eager", 0)
    assert re.search(reason, first.why)
    assert second.backend == "replay"
    with pytest.raises(RuntimeError, match=f"{text}.* or pass fallback=.eager."):
        strict(*calls[0])


class Looks(torch.nn.Module):
    """Hands its input to numpy, which runs where no transform is on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum(1) * float(np.asarray(x)[0, 0])


def test_a_model_that_hands_its_input_to_numpy_is_not_captured():
    fmodel, params, buffers = vgrad.stack([Looks(), Looks()])
    eager = vgrad.ensemble_forward(fmodel, strategy="loop")
    compiled = vgrad.compile(eager)
    text = rf"runs in eager mode, since __array__ hands values to Python {HERE}:\d+"
    calls = [(params, buffers, batch(seed=seed)) for seed in range(3)]
    with pytest.warns(vgrad.CompileWarning, match=text):
        check_all((eager, compiled), calls)


def test_a_loop_runs_any_python():
    eager = vgrad.clipped_grad(squared, max_norm=1.0, strategy="loop")
    compiled = vgrad.compile(eager)
    text = r'compile\(clipped_grad\): runs in eager mode, since strategy="loop" runs'
    with pytest.warns(vgrad.CompileWarning, match=text) as caught:
        check((eager, compiled), PARAMS, {}, batch())
    assert len(caught) == 1
    assert compiled.reports() == ()
    with pytest.raises(RuntimeError, match=r'strategy="loop" .*fallback="eager"'):
        vgrad.compile(eager, fallback="error")(PARAMS, {}, batch())


def test_inside_of_transforms_and_modes_eager_mode_runs():
    eager = vgrad.per_sample_norm(squared)
    compiled, strict = vgrad.compile(eager), vgrad.compile(eager, fallback="error")
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
    with pytest.raises(RuntimeError, match=text):
        torch.vmap(lambda each: strict(PARAMS, {}, each))(x)
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(RuntimeError, match="mode is on"):
            strict(PARAMS, {}, x[0])


def test_captures_are_forgotten():
    step = train_step(squared, SGD)
    state = TrainState.create(SGD, PARAMS, {})
    for eager, given in (
        (vgrad.per_sample_grad(squared), (PARAMS, {}, X)),
        (step, (state, X)),
        (vgrad.ensemble_forward(FMODEL), (*MEMBERS, X)),
    ):
        compiled = vgrad.compile(eager, fallback="error")
        for each in (eager, compiled):
            each(*given)
            each.clear()
            assert each.reports() == ()
        check((eager, compiled), *given)
        assert set(calls_of(compiled)) == {1}


def test_there_are_sixteen_captures_at_most():
    eager = vgrad.per_sample_grad(squared)
    compiled = vgrad.compile(eager, verify=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(1, 17):
            compiled(PARAMS, {}, batch(size))
    text = r"compile\(per_sample_grad\): .* there are 16 captures already"
    with pytest.warns(vgrad.CompileWarning, match=text) as caught:
        check_all((eager, compiled), [(PARAMS, {}, batch(n)) for n in (17, 17, 18)])
    assert len(caught) == 1
    compiled(PARAMS, {}, batch(5))
    assert calls_of(compiled) == [0] * 4 + [1] + [0] * 11


# Errors.


STEP = train_step(squared, SGD)
NORM = vgrad.per_sample_norm(squared)
FMODEL, *MEMBERS = vgrad.stack([torch.nn.Linear(3, 1)] * 2)
WRONG = [
    (squared, {}, TypeError, "expected a per-sample"),
    (nn.Linear(2, 2), {}, TypeError, r"compile\(transform\): .* got a Linear"),
    (STEP, {"backend": "nvcc"}, ValueError, r"='nvcc'\): expected one of .*auto"),
    (STEP, {"fallback": "warn"}, ValueError, r"='warn'\): expected one of .*error"),
    (STEP, [4], ValueError, r"train_step, batch_sizes=\[4\]\): .* would average"),
    (ensemble_train_step(squared, SGD), [4], ValueError, "e_train_step, batch_sizes="),
    (vgrad.ensemble_grad(squared), [4], ValueError, "ensemble_grad, batch_sizes"),
    (vgrad.ensemble_forward(FMODEL), [4], ValueError, "ensemble_forward, batch_sizes"),
    (NORM, [], ValueError, r"batch_sizes=\[\]\): expected at least one size in a list"),
    (NORM, {"batch_sizes": 4}, ValueError, r"batch_sizes=4\): expected at least one"),
    (NORM, [4, 0], ValueError, r"batch_sizes=0\): expected"),
    (NORM, [4.5], (TypeError, ValueError), r"batch_sizes=4.5\): expected"),
]


@pytest.mark.parametrize(("transform", "options", "kind", "text"), WRONG)
def test_wrong_options(transform, options, kind, text):
    options = {"batch_sizes": options} if isinstance(options, list) else options
    with pytest.raises(kind, match=rf"^compile\(.*{text}|{text}"):
        vgrad.compile(transform, **options)


CALLS = {
    "no batch": (lambda run: run(PARAMS, {}), ValueError, "no tensor"),
    "no params": (lambda run: run({}, {}, X), ValueError, "at least one param"),
    "sizes": (lambda run: run(PARAMS, {}, X, X[:3]), ValueError, "sizes"),
    "a list": (lambda run: run([], {}, X), TypeError, "params"),
    "too few": (lambda run: run(PARAMS), TypeError, "missing"),
    "an option": (lambda run: run(PARAMS, {}, X, cross=()), TypeError, "cross"),
    "a mask": (lambda run: run(PARAMS, {}, X, mask=X[:, 0]), ValueError, "boolean"),
}


@pytest.mark.parametrize("batch_sizes", [None, [5]])
def test_wrong_calls_raise_the_error_of_the_transform(batch_sizes):
    compiled = vgrad.compile(NORM, batch_sizes=batch_sizes)
    compiled(PARAMS, {}, batch())
    for run, kind, text in CALLS.values():
        for each in (NORM, compiled):
            with pytest.raises(kind, match=text):
                run(each)


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


# Batches that are filled up.


SIZES = [4, 6]


@pytest.mark.parametrize(
    ("dataset_size", "sampling_rate", "sizes"),
    [
        (10_000, 0.01, (91, 105, 120, 140)),  # of mean 100 and deviation 9.95
        (4, 0.5, (1, 3, 4)),  # no more than there are
        (10, 0.05, (1, 2, 4)),  # one at least
    ],
)
def test_sizes_are_deviations_around_the_mean(dataset_size, sampling_rate, sizes):
    plan = problems.plan(dataset_size=dataset_size, sampling_rate=sampling_rate)
    assert captures.sizes_of_plan(plan) == sizes


def test_a_batch_is_filled_up_to_the_next_size_and_split_beyond_the_last():
    assert captures.checked_sizes([6, 1, 6]) == (1, 6)
    sizes = {1: 4, 4: 4, 5: 6, 6: 6, 7: 10, 11: 12, 12: 12, 13: 16, 17: 18}
    assert {size: captures.padded_size(size, (4, 6)) for size in sizes} == sizes


FILLED = {name: {} for name in problems.TRANSFORMS}
FILLED |= {f"{name}, aux": {"has_aux": True} for name in ("weighted", "flat", "grad")}
FILLED["flat, chunks"] = {"chunk_size": 3}
MARKS = {"weighted, aux": (), "flat": slow, "gram, cross": slow, "weighted": slow}
MARKS |= {"flat, chunks": slow}


@pytest.mark.parametrize(
    "row", [pytest.param(n, marks=MARKS.get(n, aside)) for n in FILLED]
)
def test_batches_of_any_size_are_filled_up_or_split(row):
    """Copies have no entry in lists, in aux, and where a mask leaves samples out."""
    name, options = row.removesuffix(", aux").removesuffix(", chunks"), FILLED[row]
    loss, params, buffers, draw = problems.built("mlp", torch.float64)
    plain = loss
    if "has_aux" in options:
        loss = lambda p, b, x, y: (plain(p, b, x, y), {"x": x, "y": [y]})  # noqa: E731
    eager = problems.TRANSFORMS[name](loss, **options)
    compiled = vgrad.compile(eager, batch_sizes=SIZES, fallback="error")
    for size in (3, 4, 5, 6, 2, 7, 13, 12, 1, 16):
        given, mask = (params, buffers, *draw(size)), torch.arange(size) % 3 > 0
        if name == "gram, cross" and size == 1:
            continue
        for chosen in (None, mask):
            found = problems.call(name, compiled, given, chosen)
            oracle.assert_exact(found, problems.call(name, eager, given, chosen))
    if not name.startswith("gram"):
        # Each size may be that of a whole batch, and that of a part.
        assert len(compiled.reports()) <= 2 * len(SIZES)
    assert all(each.redos == 0 for each in compiled.reports())
    if name == "weighted":
        text = r"weighted_grad.*shape \(3,\), got \(2,\)"
        with pytest.raises(ValueError, match=text):
            compiled(torch.ones(2), params, buffers, *draw(3))


def test_a_batch_is_filled_up_with_copies_that_count_nothing():
    x = batch(3)
    x[0] = torch.nan  # of which the copies are
    eager = vgrad.clipped_grad(squared, max_norm=0.5)
    compiled = vgrad.compile(eager, batch_sizes=[8], fallback="error")
    for _ in range(2):
        found = compiled(PARAMS, {}, x)
        assert int(found.nonfinite) == 1
        assert found.norms.shape == (3,)
        oracle.assert_exact(found.grads, eager(PARAMS, {}, x).grads, 1e-6)


# Compiled code.


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
def test_inductor_leaves_what_is_not_finite_in_inner_products():
    loss = lambda p, b, index, w: (F.embedding(index, p["w"]) * w).sum()  # noqa: E731
    params, index = {"w": torch.randn(7, 3)}, torch.randint(7, (5, 4))
    eager = vgrad.per_sample_gram(loss)
    compiled = vgrad.compile(eager, backend="inductor", fallback="error")
    for number in (0.0, 1.0, torch.nan, torch.inf):
        weights = torch.ones(5, 4, 3)
        weights[2, 1, 1] = number
        expected = eager(params, {}, index, weights)
        oracle.assert_exact(compiled(params, {}, index, weights), expected, 1e-5)
    assert compiled.reports()[0].backend == "inductor"


@slow
@pytest.mark.compiled
@needs_compiler
def test_inductor_counts_the_limit_of_a_private_step():
    step = private_step(problems.sites, SGD, problems.plan(steps=3))
    compiled = vgrad.compile(step, backend="inductor", batch_sizes=[6])
    start = TrainState.create(SGD, problems.sites_params(), {}, seed=1)
    batches = [problems.sites_batch(5, seed=seed) for seed in range(3)]
    found, expected = (problems.taken(f, start, batches) for f in (compiled, step))
    oracle.assert_exact(found[-1][0].params, expected[-1][0].params, 1e-5)
    with pytest.raises(RuntimeError, match="fewer than the 3 steps .* got 3"):
        compiled(found[-1][0], *batches[0])


@slow
@needs_compiler
def test_inductor_takes_losses_that_close_over_tensors():
    weight, bank = torch.tensor([1.0, 2.0, 3.0]), types.SimpleNamespace(rows=batch(3))

    def loss(params, buffers, x, y):
        logits = bank.rows @ (params["w"] * x)
        return F.cross_entropy(logits, y, weight=weight, reduction="sum")

    eager = vgrad.clipped_grad(loss, max_norm=0.5)
    compiled = vgrad.compile(eager, backend="inductor", fallback="error")
    for factor in (1.0, 1.0, 3.0):
        weight.mul_(factor)
        given = PARAMS, {}, X, torch.tensor([0, 1, 2, 0])
        oracle.assert_exact(compiled(*given), eager(*given), 1e-5)
    (report,) = compiled.reports()
    assert (report.backend, report.calls) == ("inductor", 2)


def dropping():
    loss, params, buffers, draw = problems.built("dropout")
    eager = vgrad.clipped_grad(loss, max_norm=0.7, randomness="different")
    return eager, [(params, buffers, *draw(5))] * 3


def members():
    eager = vgrad.ensemble_grad(vgrad.batch_loss(FMODEL, F.mse_loss))
    return eager, [(*MEMBERS, batch(seed=n), batch(seed=n)[:, :1]) for n in range(3)]


@slow
@pytest.mark.compiled
@needs_compiler
@pytest.mark.parametrize("make", [dropping, members])
def test_inductor_draws_dropout_and_runs_ensembles(make):
    eager, calls = make()
    compiled = vgrad.compile(eager, backend="inductor", fallback="error")
    same_calls(compiled, eager, calls, tolerance=1e-5)
    assert compiled.reports()[0].backend == "inductor"


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
def test_without_a_compiler_the_graph_is_replayed():
    def loss(params, buffers, x):
        return (params["w"] * x).tan().sum()  # in no cache of compiled code

    import torch._inductor.config as config

    changes = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    eager = vgrad.per_sample_norm(loss)
    compiled = vgrad.compile(eager, backend="inductor")
    text = r"compile\(per_sample_norm\): replays, since Inductor fails"
    with config.patch(changes):  # monkeypatch would remove what it puts back
        with pytest.warns(vgrad.CompileWarning, match=text):
            check((eager, compiled), PARAMS, {}, batch())
    (report,) = compiled.reports()
    assert (report.backend, report.calls) == ("replay", 1)
    assert report.why.startswith("Inductor fails")


@pytest.mark.parametrize(("kind", "backend"), [(nn.LSTM, "inductor"), (nn.GRU, "auto")])
def test_inductor_is_refused_for_the_steps_of_recurrent_nets(kind, backend):
    net = kind(3, 4, batch_first=True)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net)

    def loss(params, buffers, x):
        return fmodel(params, buffers, x[None])[0].square().sum()

    eager, x = vgrad.per_sample_norm(loss), losses.randn(4, 17, 3).float()
    compiled = vgrad.compile(eager, backend=backend)
    text = r"replays, since 6[89] ops write into one tensor, .*would need minutes"
    with pytest.warns(vgrad.CompileWarning, match=text):
        check((eager, compiled), params, buffers, x)
    (report,) = compiled.reports()
    assert (report.backend, report.calls) == ("replay", 1)


# Reports.


def test_attributes_are_those_of_the_transform():
    eager = vgrad.clipped_grad(squared, max_norm=2.0, normalize_by=4.0)
    compiled = vgrad.compile(eager)
    assert compiled.sensitivity == eager.sensitivity
    assert compiled.quantity is eager.quantity
    assert replace(compiled.options, singly=True) == eager.options
    with pytest.raises(AttributeError, match="nothing"):
        _ = compiled.nothing


def test_reports_and_choices_that_are_repeated():
    calls = [(PARAMS, {}, batch(size)) for size in (4, 4, 4, 5)]
    four, five = same_quantities("flat", squared, calls).reports()
    assert replace(four, build_seconds=0.0, nodes=0, key="") == CaptureReport(
        "clipped_grad", four.kind, "replay", "as asked for", calls=2
    )
    assert four.nodes > 5
    assert four.build_seconds > 0
    assert (five.calls, five.backend) == (0, "replay")
    assert four.kind != five.kind
    kept = choices([four, CaptureReport("clipped_grad", "0a1b", "eager", "it is slow")])
    assert kept == {four.kind: "replay"}
    again = vgrad.compile(vgrad.clipped_grad(squared, max_norm=0.7), backend=kept)
    for given in calls[:2]:
        again(*given)
    (report,) = again.reports()
    assert (report.kind, report.why, report.calls) == (four.kind, "as chosen before", 1)


def test_explain_shows_captures_and_eager_mode():
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
    assert keys[0] == "torch.float32 [3], torch.float32 [6, 5], torch.int64 [6]"
    assert keys[1] == "torch.float32 [3], torch.float32 [4, 5], torch.int64 [4]"
    assert keys[2] == keys[0]  # under autocast
    head, first, *_ = str(found).splitlines()
    titles = ["capture", "backend", "nodes", "build", "calls", "redos", "key", "why"]
    assert head.split() == titles
    assert keys[0] in first
    assert str(found).endswith(str(found.eager))


def test_explain_of_steps_and_of_ensembles():
    step, state = vgrad.compile(STEP), TrainState.create(SGD, PARAMS, {})
    step(state, X)
    found = vgrad.explain(step)(state, X)
    assert found.eager is None
    assert {each.name for each in found.captures} == {"train_step", "optim.step"}
    forward = vgrad.compile(vgrad.ensemble_forward(FMODEL))
    forward(*MEMBERS, X)
    found = vgrad.explain(forward)(*MEMBERS, X)
    assert [each.name for each in found.captures] == ["ensemble_forward"]
    assert found.eager.members == 2

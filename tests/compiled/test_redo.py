"""Results that a graph cannot trust are computed again, in eager mode."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.compiled.problems import same_calls, same_quantities, sites_batch
from vgrad import optim
from vgrad.compiled import backends, graph
from vgrad.conditions import occurs
from vgrad.training import TrainState, private_step

pytestmark = pytest.mark.compiled
slow = pytest.mark.slow
PARAMS = problems.sites_params()
ALL = tuple(problems.PLANTED)
REDONE = {
    "grad": (),
    "norm": ALL,
    "norm of parameters": ALL,
    "gram": (),
    "gram, cross": (),
    "projection": (),
    "weighted": (),
    "flat": ALL,
    "per_layer": ALL,
    "automatic": ALL,
    "moments": (),
}
"""The samples that each transform cannot trust; gradients that are formed are exact."""


def transforms(*quick):
    """Parametrize transforms; those not named are slow together."""
    marked = [n if n in quick else pytest.param(n, marks=slow) for n in REDONE]
    return pytest.mark.parametrize("name", marked)


def batches(*planted):
    """Return arguments: a batch for each of these, of ordinary samples for None."""
    return [
        (PARAMS, {}, *sites_batch(6, *([each] if each else []), seed=number))
        for number, each in enumerate(planted)
    ]


@transforms("flat", "gram", "weighted")
@pytest.mark.parametrize("chunk_size", [None, pytest.param(3, marks=slow)])
def test_bad_samples_in_later_calls_have_the_results_of_eager_mode(chunk_size, name):
    planted = [None, None]
    for each in ALL:  # no three in a row
        planted += [None, each] if each in REDONE[name] else [each]
    calls = batches(*planted, None)
    compiled = same_quantities(name, problems.sites, calls, chunk_size=chunk_size)
    redos = sum(each.redos for each in compiled.reports())
    if chunk_size is None:
        problems.ran(compiled, len(calls) - 1, len(REDONE[name]))
    else:
        assert bool(redos) == bool(REDONE[name])


def test_one_condition_of_several_drops_a_result():
    def function(x):
        return [x + 1 for bound in (1, 2) if not occurs(x > bound)]

    module = graph.captured(function, (torch.zeros(2),)).module
    flags = [bool(module(torch.full((2,), x))[-1]) for x in (0.0, 1.5, 3.0)]
    assert flags == [False, True, True]


@pytest.mark.parametrize("name", problems.CLIPPED)
def test_the_bound_holds_for_bad_samples(name):
    transform = problems.TRANSFORMS[name](problems.sites)
    compiled = vgrad.compile(transform, fallback="error")
    bound = compiled.sensitivity.value * (1 + 1e-6)
    for number in range(2):
        compiled(PARAMS, {}, *sites_batch(1, seed=number))
    for number, planted in enumerate(ALL):
        for kinds in ((planted,), ()):
            found = compiled(PARAMS, {}, *sites_batch(1, *kinds, seed=number))
            flat = torch.cat([g.double().flatten() for g in found.grads.values()])
            assert float(flat.norm()) <= bound
            bad = kinds and planted in ("nan", "inf", "huge")
            assert int(found.nonfinite) == bool(bad)
            assert bool(flat.any()) != bool(bad)
    (report,) = compiled.reports()
    assert report.redos == len(ALL)


def test_the_first_call_of_all_may_be_bad():
    kinds = [["cancelling", "nan"], [], ["nan"], []]
    calls = [(PARAMS, {}, *sites_batch(4, *k, seed=n)) for n, k in enumerate(kinds)]
    problems.ran(same_quantities("flat", problems.sites, calls), calls=3, redos=1)


def test_the_first_result_that_is_not_dropped_is_compared(monkeypatch):
    results = iter([None, None, torch.zeros(6)])
    monkeypatch.setattr(backends, "result", lambda *given: next(results))
    eager = vgrad.per_sample_norm(problems.sites)
    compiled, calls = vgrad.compile(eager), batches(*[None] * 4)
    found = [compiled(*given) for given in calls[:3]]
    with pytest.warns(vgrad.CompileWarning, match="its replay does not repeat"):
        found.append(compiled(*calls[3]))
    oracle.assert_exact(found, [eager(*given) for given in calls], 0)


@pytest.mark.parametrize("name", ["norm", "flat"])
def test_three_in_a_row_are_given_up_with_one_warning(name):
    eager = problems.TRANSFORMS[name](problems.sites)
    compiled = vgrad.compile(eager)
    strict = vgrad.compile(eager, fallback="error")
    good, bad = batches(None, REDONE[name][0])
    for each in (compiled, strict):
        problems.call(name, each, good)

    def check(*calls):
        for given in calls:
            found = problems.call(name, compiled, given)
            oracle.assert_exact(found, problems.call(name, eager, given), 0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(bad, bad, good, bad, bad)
    with pytest.warns(vgrad.CompileWarning) as caught:
        check(bad, bad, good)
    (warning,) = caught
    text = "3 calls in a row had doubtful samples"
    assert f"eager mode, since {text}" in str(warning.message)
    (report,) = compiled.reports()
    assert (report.backend, report.calls, report.redos) == ("eager", 6, 5)
    assert text in report.why
    for _ in range(2):
        problems.call(name, strict, bad)
    with pytest.raises(RuntimeError, match=text):
        problems.call(name, strict, bad)


class Adapted(torch.nn.Module):
    """A layer with a low-rank update whose second factor starts at zero."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(6, 2, bias=False)
        self.up = torch.nn.Linear(2, 6, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return (x + self.up(self.down(x))).mean(1)


@transforms("flat", "weighted")
def test_the_first_step_of_a_low_rank_update_redoes_nothing(name):
    loss, params, buffers = losses.of_model(Adapted(), F.cross_entropy, torch.float32)
    calls = [
        (params, buffers, losses.randn(5, 4, 6, seed=n, dtype=torch.float32), y)
        for n, y in enumerate(torch.randint(6, (3, 5)))
    ]
    problems.ran(same_quantities(name, loss, calls), calls=2)


@pytest.mark.parametrize("name", ["norm", "per_layer"])
def test_a_loss_that_saturates_is_given_up(name):
    loss = lambda *given: problems.sites(*given[:-1]) * given[-1]  # noqa: E731
    eager = problems.TRANSFORMS[name](loss)
    compiled = vgrad.compile(eager)
    calls = [
        (*each, torch.full((6,), on))
        for each, on in zip(batches(*[None] * 6), [1.0] * 2 + [0.0] * 4, strict=True)
    ]
    with pytest.warns(vgrad.CompileWarning, match="3 calls in a row had doubtful"):
        found = [compiled(*given) for given in calls]
    oracle.assert_exact(found, [eager(*given) for given in calls], 0)
    (report,) = compiled.reports()
    assert (report.backend, report.calls, report.redos) == ("eager", 4, 3)


@slow
def test_ordinary_training_redoes_next_to_nothing():
    loss, params, buffers, draw = problems.built("tied")
    chosen = problems.plan(dataset_size=100, steps=1000, noise_multiplier=0.1)
    tx = optim.adam(1e-2)
    step = vgrad.compile(private_step(loss, tx, chosen), batch_sizes=[16])
    state, data = TrainState.create(tx, params, buffers, seed=1), draw(100)
    for index in chosen.sampler(state):
        state, _ = step(state, *(x[list(index)] for x in data))
    reports = [each for each in step.reports() if each.name == "private_step"]
    assert sum(each.calls for each in reports) > 900
    assert sum(each.redos for each in reports) <= 10


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_a_redo_draws_what_eager_mode_draws(randomness):
    def loss(params, buffers, x, g):
        return problems.sites(params, buffers, F.dropout(x, 0.5), g)

    eager = vgrad.clipped_grad(loss, max_norm=0.7, randomness=randomness)
    compiled = vgrad.compile(eager, fallback="error")
    # The generator's state is compared too.
    same_calls(compiled, eager, batches(None, None, "nan", None, "inf"))
    problems.ran(compiled, calls=4, redos=2)


@pytest.mark.parametrize(
    "planted", [n if n == "nan" else pytest.param(n, marks=slow) for n in ALL]
)
@pytest.mark.parametrize("donate", [pytest.param(False, marks=slow), True])
def test_a_private_step_releases_what_eager_mode_releases(donate, planted):
    tx = optim.adam(1e-2)
    compiled, _ = problems.same_steps(
        lambda: private_step(problems.sites, tx, problems.plan(), donate=donate),
        lambda: TrainState.create(tx, problems.sites_params(), {}, seed=1),
        [given[2:] for given in batches(None, None, planted, None, planted)],
        batch_sizes=[6],
    )
    report = compiled.reports()[0]
    assert (report.name, report.calls, report.redos) == ("private_step", 4, 2)


def test_a_private_step_counts_the_limit_and_takes_empty_batches():
    tx, chosen = optim.sgd(0.1), problems.plan(steps=3)
    step = private_step(problems.sites, tx, chosen)
    compiled = vgrad.compile(step, batch_sizes=[4], fallback="error")
    start = TrainState.create(tx, PARAMS, {}, seed=1)
    sizes = [sites_batch(size, seed=size) for size in (4, 0, 4)]
    found, expected = (problems.taken(each, start, sizes) for each in (compiled, step))
    oracle.assert_exact(found, expected, 0)
    with pytest.raises(RuntimeError, match="fewer than the 3 steps .* got 3"):
        compiled(found[-1][0], *sizes[0])
    with pytest.raises(ValueError, match="at most the 20 samples .* got 21"):
        compiled(start, *sites_batch(21))


@pytest.mark.parametrize("name", REDONE)
@pytest.mark.parametrize("batch_sizes", [None, [4]])
def test_an_empty_batch_runs_no_loss(batch_sizes, name):
    def loss(params, buffers, x, g):
        raise AssertionError

    given, compute = (PARAMS, {}, *sites_batch(0)), problems.TRANSFORMS[name](loss)
    compiled = vgrad.compile(compute, batch_sizes=batch_sizes, fallback="error")
    if name == "gram, cross":
        assert compiled(*given, cross=given[2:]).shape == (0, 0)
        return
    found = problems.call(name, compiled, given)
    oracle.assert_exact(found, problems.call(name, compute, given), 0)
    assert compiled.reports() == ()

"""Results that a graph cannot trust are computed again, in eager mode."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.compiled.problems import same_calls
from vgrad import optim
from vgrad.precision import StaticLossScale
from vgrad.training import TrainState, private_step, train_step

pytestmark = pytest.mark.compiled
slow = pytest.mark.slow
PLAIN = problems.TRANSFORMS


def transforms(*quick):
    """Parametrize all transforms; those not named are slow together."""
    marked = [
        name if name in quick else pytest.param(name, marks=slow) for name in PLAIN
    ]
    return pytest.mark.parametrize("name", marked)


REDONE = {
    "grad": (),
    "norm": tuple(problems.PLANTED),
    "norm of parameters": tuple(problems.PLANTED),
    "gram": ("inf", "huge"),
    "gram, cross": ("inf", "huge"),
    "projection": (),
    "weighted": ("nan", "inf", "huge"),
    "flat": tuple(problems.PLANTED),
    "per_layer": tuple(problems.PLANTED),
    "automatic": tuple(problems.PLANTED),
    "moments": (),
}
"""What each transform cannot trust; gradients that are formed need no second look."""


@transforms("flat", "gram", "weighted")
@pytest.mark.parametrize("chunk_size", [None, pytest.param(3, marks=slow)])
def test_bad_samples_in_later_calls_have_the_results_of_eager_mode(chunk_size, name):
    params = problems.sites_params()
    options = {"chunk_size": chunk_size}
    eager = PLAIN[name](problems.sites, **options)
    compiled = vgrad.compile(eager, fallback="error")
    expected, total = 0, 0
    kinds = [None, None, *problems.PLANTED, None]
    for number, planted in enumerate(kinds):
        if chunk_size is None and planted in REDONE[name]:
            # An ordinary call in between, or three in a row would be too many.
            batch = problems.sites_batch(6, seed=50 + number)
            same_calls(
                lambda *given: problems.call(name, compiled, given),
                lambda *given: problems.call(name, eager, given),
                [(params, {}, *batch)],
            )
            total += 1
        batch = problems.sites_batch(6, *([planted] if planted else []), seed=number)
        given = params, {}, *batch
        found = problems.call(name, compiled, given)
        oracle.assert_exact(found, problems.call(name, eager, given), 0)
        total += 1
        expected += planted in REDONE[name]
        if chunk_size is None:
            (report,) = compiled.reports()
            assert report.redos == expected, planted
            assert report.calls == total - 1
            assert report.backend == "replay"
    if chunk_size is not None and REDONE[name]:
        assert sum(each.redos for each in compiled.reports()) > 0


@pytest.mark.parametrize("name", problems.CLIPPED)
def test_the_bound_holds_for_bad_samples(name):
    params = problems.sites_params()
    compiled = vgrad.compile(PLAIN[name](problems.sites), fallback="error")
    bound = compiled.sensitivity.value * (1 + 1e-6)
    for number in range(2):
        compiled(params, {}, *problems.sites_batch(1, seed=number))
    for number, planted in enumerate(problems.PLANTED):
        for kinds in ((planted,), ()):
            batch = problems.sites_batch(1, *kinds, seed=number)
            found = compiled(params, {}, *batch)
            flat = torch.cat([g.double().flatten() for g in found.grads.values()])
            assert float(flat.norm()) <= bound
            bad = kinds and planted in ("nan", "inf")
            assert int(found.nonfinite) == bool(bad)
            assert bool(flat.any()) != bool(bad)
    (report,) = compiled.reports()
    assert report.redos == len(problems.PLANTED)


@pytest.mark.parametrize("name", ["flat"])
def test_the_first_call_of_all_may_be_bad(name):
    params = problems.sites_params()
    eager = PLAIN[name](problems.sites)
    compiled = vgrad.compile(eager, fallback="error")
    calls = [
        (params, {}, *problems.sites_batch(4, *kinds, seed=seed))
        for seed, kinds in enumerate([["cancelling", "nan"], [], ["nan"], []])
    ]
    same_calls(compiled, eager, calls)
    (report,) = compiled.reports()
    # The second call is compared with eager mode, as the first could not be.
    assert (report.backend, report.calls, report.redos) == ("replay", 2, 1)


@transforms("gram", "weighted", "flat")
def test_three_in_a_row_are_given_up_with_one_warning(name):
    if not REDONE[name]:
        pytest.skip("trusts all samples")
    params, planted = problems.sites_params(), REDONE[name][0]
    eager = PLAIN[name](problems.sites)
    compiled = vgrad.compile(eager)
    problems.call(name, compiled, (params, {}, *problems.sites_batch(4)))
    bad = (params, {}, *problems.sites_batch(4, planted))
    good = (params, {}, *problems.sites_batch(4, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (bad, bad, good, bad, bad):
            found = problems.call(name, compiled, given)
            oracle.assert_exact(found, problems.call(name, eager, given), 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in (bad, bad, good):
            found = problems.call(name, compiled, given)
            oracle.assert_exact(found, problems.call(name, eager, given), 0)
    (warning,) = caught
    assert warning.category is vgrad.CompileWarning
    assert "eager mode, since 3 calls in a row had doubtful" in str(warning.message)
    (report,) = compiled.reports()
    assert (report.backend, report.calls, report.redos) == ("eager", 6, 5)
    assert "in a row" in report.why


def test_three_in_a_row_raise_where_eager_mode_is_refused():
    params = problems.sites_params()
    compiled = vgrad.compile(PLAIN["flat"](problems.sites), fallback="error")
    compiled(params, {}, *problems.sites_batch(4))
    bad = (params, {}, *problems.sites_batch(4, "nan"))
    for _ in range(2):
        compiled(*bad)
    with pytest.raises(RuntimeError, match="3 calls in a row had doubtful samples"):
        compiled(*bad)


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
    eager = PLAIN[name](loss)
    compiled = vgrad.compile(eager, fallback="error")
    calls = [
        (params, buffers, losses.randn(5, 4, 6, seed=n, dtype=torch.float32), y)
        for n, y in enumerate(torch.randint(6, (3, 5)))
    ]
    same_calls(
        lambda *given: problems.call(name, compiled, given),
        lambda *given: problems.call(name, eager, given),
        calls,
    )
    problems.ran(compiled, calls=2)


@transforms("norm", "per_layer")
def test_a_loss_that_is_saturated_redoes_nothing(name):
    def loss(params, buffers, x, g):
        return F.relu(problems.sites(params, buffers, x, g) - 1e4)

    params = problems.sites_params()
    eager = PLAIN[name](loss)
    compiled = vgrad.compile(eager, fallback="error")
    calls = [(params, {}, *problems.sites_batch(4, seed=n)) for n in range(3)]
    same_calls(
        lambda *given: problems.call(name, compiled, given),
        lambda *given: problems.call(name, eager, given),
        calls,
    )
    problems.ran(compiled, calls=2)


@slow
def test_ordinary_training_redoes_next_to_nothing():
    loss, params, buffers, draw = problems.built("tied")
    chosen = plan(dataset_size=100, steps=1000, noise_multiplier=0.1)
    tx = optim.adam(1e-2)
    step = vgrad.compile(private_step(loss, tx, chosen), batch_sizes=[16])
    state, data = TrainState.create(tx, params, buffers, seed=1), draw(100)
    for index in chosen.sampler(state):
        state, _ = step(state, *(x[list(index)] for x in data))
    reports = [each for each in step.reports() if each.name == "clipped_grad"]
    assert sum(each.calls for each in reports) > 900
    assert sum(each.redos for each in reports) <= 10


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_a_redo_draws_what_eager_mode_draws(randomness):
    def loss(params, buffers, x, g):
        return problems.sites(params, buffers, F.dropout(x, 0.5), g)

    params = problems.sites_params()
    eager = vgrad.clipped_grad(loss, max_norm=0.7, randomness=randomness)
    compiled = vgrad.compile(eager, fallback="error")
    calls = [
        (params, {}, *problems.sites_batch(5, *kinds, seed=seed))
        for seed, kinds in enumerate([[], [], ["nan"], [], ["inf", "cancelling"]])
    ]
    same_calls(compiled, eager, calls)  # compares the generator's state too
    problems.ran(compiled, calls=4, redos=2)


def plan(**changes):
    fields = {
        "dataset_size": 20,
        "sampling_rate": 0.4,
        "noise_multiplier": 0.8,
        "max_norm": 0.5,
        "steps": 6,
        "delta": 1e-5,
    }
    return vgrad.dp.Plan(**{**fields, **changes})


@pytest.mark.parametrize(
    "planted",
    [n if n == "nan" else pytest.param(n, marks=slow) for n in problems.PLANTED],
)
@pytest.mark.parametrize("donate", [pytest.param(False, marks=slow), True])
def test_a_private_step_releases_what_eager_mode_releases(donate, planted):
    tx, chosen = optim.adam(1e-2), plan()
    step = private_step(problems.sites, tx, chosen, donate=donate)
    compiled = vgrad.compile(step, batch_sizes=[5], fallback="error")
    batches = [
        problems.sites_batch(5, *kinds, seed=seed)
        for seed, kinds in enumerate([[], [], [planted], [], [planted]])
    ]

    def taken(step):
        state, found = TrainState.create(tx, problems.sites_params(), {}, seed=1), []
        for batch in batches:
            state, metrics = step(state, *batch)
            # A donated state is written into by the next step.
            found.append(losses.pytree.tree_map(torch.clone, (state, metrics)))
        return found

    oracle.assert_exact(taken(compiled), taken(step), 0)
    report = compiled.reports()[0]
    assert (report.name, report.calls, report.redos) == ("clipped_grad", 4, 2)


def test_a_private_step_counts_the_limit_and_takes_empty_batches():
    tx, chosen = optim.sgd(0.1), plan(steps=3)
    step = private_step(problems.sites, tx, chosen)
    compiled = vgrad.compile(step, batch_sizes=[4], fallback="error")
    state = other = TrainState.create(tx, problems.sites_params(), {}, seed=1)
    batches = [problems.sites_batch(size, seed=size) for size in (4, 0, 4)]
    for batch in batches:
        state, metrics = compiled(state, *batch)
        other, expected = step(other, *batch)
        oracle.assert_exact((state, metrics), (other, expected), 0)
    with pytest.raises(RuntimeError, match="fewer than the 3 steps .* got 3"):
        compiled(state, *batches[0])
    large = problems.sites_batch(21)
    first = TrainState.create(tx, problems.sites_params(), {}, seed=1)
    with pytest.raises(ValueError, match="at most the 20 samples .* got 21"):
        compiled(first, *large)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("batch_sizes", [None, [4]])
def test_an_empty_batch_runs_no_loss(batch_sizes, name):
    def loss(params, buffers, x, g):
        raise AssertionError

    params, batch = problems.sites_params(), problems.sites_batch(0)
    compute = PLAIN[name](loss)
    if name == "gram, cross":
        compiled = vgrad.compile(compute, batch_sizes=batch_sizes, fallback="error")
        found = compiled(params, {}, *batch, cross=batch)
        assert found.shape == (0, 0)
        return
    compiled = vgrad.compile(compute, batch_sizes=batch_sizes, fallback="error")
    found = problems.call(name, compiled, (params, {}, *batch))
    oracle.assert_exact(found, problems.call(name, compute, (params, {}, *batch)), 0)
    assert compiled.reports() == ()


def test_a_skipped_train_step_is_no_redo():
    loss = problems.sites_batch_loss
    tx = optim.sgd(0.1)
    make = lambda: train_step(loss, tx, loss_scale=StaticLossScale(4.0))  # noqa: E731
    compiled = vgrad.compile(make(), fallback="error")
    state = TrainState.create(tx, problems.sites_params(), {}, seed=1)
    for seed, kinds in enumerate([[], ["nan"], []]):
        batch = problems.sites_batch(4, *kinds, seed=seed)
        found, expected = compiled(state, *batch), make()(state, *batch)
        oracle.assert_exact(found, expected, 0)
        state = found[0]
    assert [each.redos for each in compiled.reports()] == [0, 0]


def test_a_step_that_has_run_is_not_visible_where_its_flag_is_up():
    """Noise is added once, to what eager mode computes: the state moves once."""
    tx, chosen = optim.sgd(1.0), plan(noise_multiplier=0.0)
    step = private_step(problems.sites, tx, chosen)
    compiled = vgrad.compile(step, batch_sizes=[3], fallback="error")
    state = TrainState.create(tx, problems.sites_params(), {}, seed=1)
    before = {n: p.clone() for n, p in state.params.items()}
    for seed in range(2):
        compiled(state, *problems.sites_batch(3, seed=seed))
    batch = problems.sites_batch(3, "nan", "nan", "nan")
    new, metrics = compiled(state, *batch)
    oracle.assert_exact(new.params, before, 0)
    assert int(metrics["nonfinite"]) == 3

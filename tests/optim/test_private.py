"""Optimizers for private training, against loops over samples in float64."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.dp.runs import KEY, plan
from tests.optim.problems import double
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.dp import Plan, noising, quantile_clip
from vgrad.training import TrainState, private_step

SIZE, DATA, BOUND = 6, 12, 10.0


def test_a_deviation_that_changes_is_averaged_as_the_squares_are():
    grads = torch.randn(20, 50, dtype=torch.float64)
    deviations = torch.rand(20, dtype=torch.float64)
    tx = optim.adam_bc(0.1, deviation=lambda count: deviations[count], betas=(0.9, 0.8))
    params = {"w": torch.zeros(50, dtype=torch.float64)}
    state, m, v, n = tx.init(params), 0.0, 0.0, 0.0
    for t, (g, deviation) in enumerate(zip(grads, deviations, strict=True), start=1):
        updates, state = tx.update({"w": g}, state, params)
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * (g**2 - deviation**2)
        n = 0.8 * n + 0.2 * deviation**2
        size = (v / (1 - 0.8**t)).clamp(min=0.1 * n / (1 - 0.8**t)).sqrt()
        assert_exact(updates["w"], -0.1 * m / (1 - 0.9**t) / size, 1e-12)


def test_noise_moves_the_steps_of_adam_bc_neither_up_nor_down():
    generator, params = torch.Generator().manual_seed(0), {"w": torch.zeros(2000)}
    kinds = {"adam": optim.adam(1.0), "bc": optim.adam_bc(1.0, deviation=0.1)}
    states, sizes = {name: tx.init(params) for name, tx in kinds.items()}, {}
    for _ in range(1000):
        noise = 0.1 * torch.randn(2000, generator=generator)
        for name, tx in kinds.items():
            updates, states[name] = tx.update({"w": 0.05 + noise}, states[name], params)
            sizes[name] = -float(updates["w"].mean())
    # A step without noise has size one; one entry deviates by about a half here.
    assert abs(sizes["bc"] - 1) < 0.04
    assert abs(sizes["adam"] - 0.05 / math.hypot(0.05, 0.1)) < 0.02


def replayed(step):
    return vgrad.compile(step, backend="replay")


def test_a_private_step_sets_the_deviation_of_its_noise(problem):
    run = plan(DATA, SIZE / DATA, bound=BOUND, noise=0.7)
    exact = 0.7 * BOUND / SIZE
    assert run.deviation(0) == run.deviation(torch.tensor(0)) == exact

    def trained(deviation, tx=lambda tx: tx, **options):
        of_noise = tx(optim.adam_bc(0.1, deviation=deviation, betas=(0.5, 0.5)))
        state, _ = private_run(run, problem, of_noise, **options)
        return state.params

    params, state = problem[1], None
    tx = optim.adam_bc(0.1, deviation=exact, betas=(0.5, 0.5))
    state = tx.init(params)
    for step in range(4):
        start = TrainState.create(optim.sgd(1.0), params, problem[2])
        start = start._replace(key=KEY, step=torch.tensor(step))
        after, _ = private_step(problem[0], optim.sgd(1.0), run)(start, *problem[3])
        grads = {name: p - after.params[name] for name, p in params.items()}
        params, state = optim.step(tx, grads, state, params)
    for deviation in (run.deviation, exact, 123.0, lambda count: 123.0):
        assert_exact(trained(deviation), params, 1e-9)
    assert_exact(trained(run.deviation, wrap=replayed), params, 1e-9)
    waiting = partial(optim.multi_steps, steps=1)
    assert_exact(trained(run.deviation, tx=waiting), params, 1e-9)
    outside = optim.adam_bc(0.1, deviation=run.deviation)
    state = outside.update(grads, outside.init(params))[1]
    assert float(state[1].slots["noise_sq"]) == pytest.approx(exact**2 / 1000)


@pytest.mark.parametrize("wrap", [lambda step: step, replayed])
def test_a_bound_that_adapts_sets_the_deviation_of_each_step(problem, wrap):
    clip = quantile_clip(start=BOUND, rate=0.5, count_deviation=2.0)
    run = Plan(DATA, SIZE / DATA, 0.7, clip, 4, 1e-3)
    multiplier = (0.7**-2 - 4.0**-2) ** -0.5
    tx = optim.adam_bc(0.1, deviation=run.deviation, betas=(0.5, 0.5))
    loss, params, buffers, batch, _ = problem
    step = wrap(private_step(loss, tx, run))
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    bound, expected, seen = BOUND, 0.0, []
    for _ in range(4):
        state, _ = step(state, *batch)
        expected = 0.5 * expected + 0.5 * (multiplier * bound / SIZE) ** 2
        found = float(state.optimizer[1].slots["noise_sq"])
        assert found == pytest.approx(expected, rel=1e-12)
        bound = float(state.max_norm)
        seen.append(bound)
    assert len({*seen, BOUND}) == 5


def test_scaled_gradients_move_a_bound_that_adapts(problem):
    clip = quantile_clip(start=BOUND, rate=0.5, count_deviation=4.0)
    run = Plan(DATA, SIZE / DATA, 1e-3, clip, 4, 1e-3)
    state, _ = private_run(run, problem, scaled(optim.sgd(0.1)), steps=1)
    loss, _, buffers, batch, _ = problem
    step = private_step(loss, scaled(optim.sgd(0.1)), run)
    _, metrics = step(state, *batch)
    each = oracle.loss_gradients(loss, state.params, buffers, batch)
    scales = optim.private.scales_of(state.optimizer)
    each = {name: math.prod(scales[name]) * g for name, g in each.items()}
    assert metrics["clipped"] == (oracle.norms(each) > state.max_norm).sum()


def test_correlated_noise_is_refused(problem):
    run = Plan(DATA, SIZE / DATA, 1.0, 1.0, 4, 1e-3, noise=noising.bisr(2))
    for tx in (optim.adam_bc(deviation=1.0), scaled(optim.sgd(0.1))):
        with pytest.raises(ValueError, match="noise of one deviation for"):
            private_run(run, problem, optim.chain(tx), steps=1)
    with pytest.raises(ValueError, match=r"Plan.deviation\(.*independent noise.* bisr"):
        run.deviation(torch.tensor(0))


def test_one_deviation_for_entries_in_other_units_is_refused():
    params = {"w": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"scale_then_privatize\(adam_bc.*Take adam"):
        scaled(optim.adam_bc(deviation=1.0)).init(params)


# Gradients in other units.


class Net(nn.Module):
    """All kinds of factors: rows, positions, a tied head, kernels, parts, nothing."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.tied = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 3, 2)
        self.head = nn.Linear(3, 5)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        a, b = self.table(tokens), self.tied(tokens)
        x = self.norm(self.attention(a, b, b)[0])
        y = self.head(self.conv(x.mT).mT.tanh())
        return (y[:, 0] + F.linear(x, self.tied.weight).mean(1)) / 3


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    net = Net().double()
    function, params, buffers = vgrad.make_functional_with_buffers(net)
    tokens, targets = torch.randint(5, (SIZE, 7)), torch.randint(5, (SIZE,))
    loss = vgrad.sample_loss(function, F.cross_entropy)
    return loss, params, buffers, (tokens, targets), net


def square_root_scales(moments, eps=0.01):
    """The scales as full tensors, of means of squares that are full tensors."""
    squares, total, count = {}, 0.0, 0
    for name, v in moments.items():
        if v.ndim >= 2:
            row, column = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
            squares[name] = row, column, row.mean(-2, keepdim=True)
        else:
            squares[name] = v, None, None
        total, count = total + float(v.sum()), count + v.numel()
    scales = {}
    for name, (row, column, mean) in squares.items():
        first, least = row / (total / count), eps**2 if column is None else eps
        scale = first.clamp(min=least) ** -0.5
        if column is not None:
            scale = scale * (column / mean).clamp(min=eps) ** -0.5
        scales[name] = scale
    return scales


def reference(run, problem, tx, steps):
    """Materialise, scale, clip, sum, add noise, divide by the scales, step."""
    loss, params, buffers, batch, _ = problem
    state, moments, sizes = tx.init(params), None, []
    for step in range(steps):
        scales = {name: torch.ones_like(p) for name, p in params.items()}
        if moments is not None:
            scales = square_root_scales(moments)
        each = oracle.loss_gradients(loss, params, buffers, batch)
        each = {name: g * scales[name] for name, g in each.items()}
        norms = oracle.norms(each)
        sizes.append(norms)
        factors = (run.max_norm / norms).clamp(max=1) / run.expected_batch_size
        sums = {n: torch.einsum("b,b...", factors, g) for n, g in each.items()}
        bound = vgrad.Sensitivity(run.max_norm / run.expected_batch_size)
        zeros = {name: torch.zeros_like(total) for name, total in sums.items()}
        noise = run.add_noise(zeros, bound, key=KEY, step=step)
        grads = {n: (total + noise[n]) / scales[n] for n, total in sums.items()}
        moments = {
            n: 0.9 * (0.0 if moments is None else moments[n]) + 0.1 * g**2
            for n, g in grads.items()
        }
        params, state = optim.step(tx, grads, state, params)
    return params, sizes


def private_run(run, problem, tx, steps=4, wrap=lambda step: step, **options):
    loss, params, buffers, batch, _ = problem
    step = wrap(private_step(loss, tx, run, **options))
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    metrics = []
    for _ in range(steps):
        state, each = step(state, *batch)
        metrics.append(each)
    return state, metrics


def scaled(inner):
    return optim.scale_then_privatize(inner, decay=0.9, eps=0.01)


WAYS = {
    "recorded": dict(strategy="recorded"),
    "vmap": dict(strategy="vmap"),
    "loop": dict(strategy="loop"),
    "two passes": dict(strategy="recorded", passes=2),
    "chunks": dict(chunk_size=4),
    "loss scale": dict(loss_scale=vgrad.precision.StaticLossScale(2.0**10)),
    "replayed": dict(wrap=replayed),
    "replayed in chunks": dict(wrap=replayed, chunk_size=4),
    "in buckets": dict(
        wrap=lambda step: vgrad.compile(step, backend="replay", batch_sizes=[8])
    ),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_private_steps_scale_clip_add_up_and_divide(problem, options):
    run, adam = plan(DATA, SIZE / DATA, bound=BOUND), optim.adam(0.02)
    expected, norms = reference(run, problem, adam, 4)
    state, metrics = private_run(run, problem, scaled(adam), **options)
    for found, each in zip(metrics, norms, strict=True):
        assert found["clipped"] == (each > BOUND).sum()
    assert {int(each["clipped"]) for each in metrics} - {0, SIZE}
    assert_exact(state.params, expected, 1e-9)


COMPILED = pytest.param(
    lambda step: vgrad.compile(step, backend="inductor"),
    marks=[pytest.mark.slow, pytest.mark.compiled],
)


@pytest.mark.filterwarnings("ignore:.*replays, since compiled code is off")
@pytest.mark.parametrize("wrap", [lambda step: step, replayed, COMPILED])
def test_noise_is_added_between_the_scales(problem, wrap):
    run, sgd = plan(DATA, SIZE / DATA, bound=BOUND, noise=0.2), optim.sgd(0.1)
    expected, _ = reference(run, problem, sgd, 4)
    state, _ = private_run(run, problem, scaled(sgd), wrap=wrap)
    rounding = 4 * 0.1 * 2**-16 * 0.2 * BOUND / SIZE  # to the grid of the noise
    for name, value in state.params.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=20 * rounding)
    plain, _ = private_run(run, problem, sgd)
    moved = max(float((plain.params[n] - x).abs().max()) for n, x in expected.items())
    assert moved > 1000 * rounding


def test_discrete_noise_goes_between_the_scales_too(problem):
    loss, _, buffers, batch, _ = problem
    run = Plan(DATA, SIZE / DATA, 0.01, BOUND, 4, 1e-3, discrete="sum")
    state, _ = private_run(run, problem, scaled(optim.sgd(1.0)), steps=1)
    after, metrics = private_step(loss, scaled(optim.sgd(1.0)), run)(state, *batch)
    each = oracle.loss_gradients(loss, state.params, buffers, batch)
    scales = optim.private.scales_of(state.optimizer)
    each = {name: math.prod(scales[name]) * g for name, g in each.items()}
    norms = oracle.norms(each)
    assert 0 < metrics["clipped"] == (norms > BOUND).sum()
    factors = (BOUND / norms).clamp(max=1) / SIZE
    for name, g in each.items():
        grad = state.params[name] - after.params[name]
        noise = math.prod(scales[name]) * grad - torch.einsum("b,b...", factors, g)
        assert noise.abs().max() < 6 * run.deviation(1)


@pytest.mark.parametrize("inner", [optim.adam(0.1), optim.sgd(0.1, momentum=0.9)])
def test_without_clipping_and_noise_steps_are_those_of_the_inner_one(problem, inner):
    run = plan(DATA, SIZE / DATA, bound=1e9)
    plain, _ = private_run(run, problem, inner)
    state, _ = private_run(run, problem, scaled(inner))
    assert_exact(state.params, plain.params, 1e-10)


def test_wrappers_around_it_are_seen(problem):
    run, adam = plan(DATA, SIZE / DATA, bound=BOUND), optim.adam(0.02)
    state, _ = private_run(run, problem, scaled(adam))
    tx = optim.chain(optim.zero_nans(), optim.lookahead(scaled(adam), sync_period=9))
    wrapped, _ = private_run(run, problem, tx)
    assert_exact(wrapped.params, state.params, 1e-12)
    parts = optim.partition({"table.*": optim.sgd(0.1), "*": scaled(adam)})
    state, _ = private_run(run, problem, parts, steps=1)
    assert "table.weight" not in optim.private.scales_of(state.optimizer)


def test_it_is_no_optimizer_of_torch():
    module = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"as_torch\(scale_then_privatize.*private_st"):
        optim.as_torch(scaled(optim.sgd(0.1)), module.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_adds_no_more_than_its_bound_in_units_of_the_scales(problem, dtype):
    loss, params, buffers, batch, _ = problem
    params = {name: p.to(dtype) for name, p in params.items()}
    tx = scaled(optim.sgd(1.0))
    grads = {n: torch.randn_like(p) * 10.0 ** torch.randint(-4, 4, p.shape)
             for n, p in params.items()}  # fmt: skip
    state = tx.update(grads, tx.init(params), params)[1]
    clipped = vgrad.clipped_grad(loss, max_norm=0.3).with_scales(
        optim.private.scales_of(state)
    )
    for row in range(SIZE):
        one = clipped(params, buffers, *(each[row : row + 1] for each in batch))
        length = math.hypot(*(float(g.double().norm()) for g in one.grads.values()))
        assert length <= 0.3 * (1 + 1e-6)


def scales_after(tx, grads):
    """The products of the scales that follow from a first gradient."""
    params = {name: torch.zeros_like(g) for name, g in grads.items()}
    state = tx.update(grads, tx.init(params), params)[1]
    return {n: math.prod(by) for n, by in optim.private.scales_of(state).items()}


def test_scales_keep_the_norm_of_the_mean_gradient():
    outer = torch.outer(double([1.0, 2, 3, 1]), double([0.5, 2, 1]))
    grads = {"w": outer, "b": double([0.5, 1.0, 1.5])}
    scales = scales_after(scaled(optim.sgd(1.0)), grads)
    products = {name: scales[name] * g for name, g in grads.items()}
    assert_exact(optim.global_norm(products), optim.global_norm(grads), 1e-12)


def test_scales_stay_below_the_limit_and_are_one_before_a_gradient():
    tx = optim.scale_then_privatize(optim.sgd(1.0), eps=0.1)
    grads = {"w": torch.zeros(4, 3), "b": torch.tensor([1.0, 0.0])}
    grads["w"][0, 0] = 1.0
    scales = scales_after(tx, grads)
    assert float(scales["b"].max()) == float(scales["w"].max()) == pytest.approx(10.0)
    for scale in scales_after(tx, {n: 0 * g for n, g in grads.items()}).values():
        assert_exact(scale, torch.ones_like(scale), 0)


def test_limits_and_decays_out_of_range_are_refused():
    for options in (dict(eps=0.0), dict(eps=1.1), dict(decay=1.0), dict(decay=-0.1)):
        with pytest.raises(ValueError, match=r"scale_then_privatize\(.*expected 0 <"):
            optim.scale_then_privatize(optim.sgd(1.0), **options)

"""Programs that read values, with checkpoints and with distributions.

Each runs on batches of other values, and has the gradients of plain autograd in
float64. The table says which are captured, and why the others are not.
"""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import distributions
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as with_checkpoints

import vgrad
from tests import oracle
from tests.compiled import problems
from tests.losses import randn
from vgrad import optim
from vgrad.compiled import graph
from vgrad.conditions import Unrepeatable
from vgrad.training import TrainState, private_step

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning"),
]
slow = pytest.mark.slow
checkpoint = partial(with_checkpoints, use_reentrant=False)

PARAMS = {"w": randn(4, 4), "v": randn(4, 4, seed=1), "s": randn(4, seed=2)}


def batch(seed, size=8):
    """Return positions [B, 3, 4], a mask [B, 3] of prefixes, and a number [B]."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randint(3, (size,), generator=generator)
    number[:3] = torch.arange(3)
    return randn(size, 3, 4, seed=seed), torch.arange(3) <= number[:, None], number


# Samples that take different branches, which run in eager mode, part by part.


def branch(p, b, x, mask, number):
    y = x @ p["w"]
    y = y.tanh() if y.sum() > 0 else y @ p["v"]
    return (y * p["s"]).square().sum()


def full_mask(p, b, x, mask, number):
    scores = (x @ p["w"]) @ (x @ p["v"]).mT
    if not mask.all():
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ x * p["s"]).sum().square()


def expert(p, b, x, mask, number):
    weight = [p["w"], p["v"], p["w"] @ p["v"]][number.item()]
    return ((x @ weight).tanh() * p["s"]).sum()


def early_exit(p, b, x, mask, number):
    for weight in (p["w"], p["v"], p["w"] + 1):
        x = (x @ weight).tanh()
        if x.mean() > 0.05:
            break
    return (x * p["s"]).sum()


def length(p, b, x, mask, number):
    y = (x[: int(mask.sum())] @ p["w"]).detach()
    memory = y.view(-1)
    if memory.sum() > 0:
        y.mul_(-1).sub_(1)  # between two reads of the same memory
    factor = 2 if memory.sum() > 0 else 3
    return ((x @ p["w"]).relu() @ p["s"]).logsumexp(0) * factor


def two_questions(p, b, x, mask, number):
    y = x @ p["w"]
    if number > 0:
        y = y * (2 if y[0, 0] > 0 else p["s"])
    return (y @ p["v"]).square().sum() + p["s"].sum()


def until(p, b, x, mask, number):
    y, steps = x, 0
    while bool(y.norm() > 2.0) and steps < 4:
        y, steps = y * 0.5 + (y @ p["w"]).tanh() * 0.1, steps + 1
    return (y * p["s"]).sum() * (steps + 1)


def selection(p, b, x, mask, number):
    return ((x[mask] @ p["w"]).tanh() * p["s"]).mean()


def in_a_list(p, b, x, mask, number):
    kept = [x[i] for i, each in enumerate(mask.tolist()) if each]
    return (torch.stack(kept) @ p["w"] * p["s"]).sum()


def drawn_branch(p, b, x, mask, number):
    return (F.dropout(x @ p["w"] if number > 0 else x, 0.5) * p["s"]).sum()


def compared(p, b, x, mask, number):
    return (x @ p["w"]).sum() * (2 if torch.equal(number, mask.sum()) else p["s"].sum())


# Checkpoints.


def block(p, x):
    return (x @ p["w"]).tanh() @ p["v"]


def chain(p, b, x, mask, number):
    for _ in range(3):
        x = x + checkpoint(lambda x: block(p, x), x).sin()
    return (x * p["s"]).sum()


def nested(p, b, x, mask, number):
    def inner(x):
        return checkpoint(lambda x: block(p, x), x).tanh() @ p["w"]

    return (checkpoint(inner, x) * p["s"]).sum()


def dropped(p, b, x, mask, number):
    x = F.dropout(x, 0.2)
    for _ in range(2):
        x = x + checkpoint(lambda x: F.dropout(block(p, x), 0.5), x)
    return (F.dropout(x, 0.2) * p["s"]).sum().square()


def noisy(p, b, x, mask, number):
    def run(x):
        return (x + torch.randn_like(x)) @ p["w"] * torch.rand(4, dtype=x.dtype)

    return (checkpoint(run, x).tanh() * p["s"]).sum()


def written(p, b, x, mask, number):
    def run(x):
        return (x @ p["w"]).exp() * torch.empty_like(x).bernoulli_(0.5).mul_(2)

    return (checkpoint(run, x) * p["s"]).sum()


def checkpointed_branch(p, b, x, mask, number):
    run = lambda x: block(p, x) if number > 0 else (x @ p["v"]).exp()  # noqa: E731
    return (checkpoint(run, x) * p["s"]).sum()


def new_numbers(p, b, x, mask, number):
    run = lambda x: F.dropout(block(p, x), 0.5)  # noqa: E731
    return (checkpoint(run, x, preserve_rng_state=False) * p["s"]).sum()


# Distributions.


def normal(p, b, x, mask, number):
    found = distributions.Normal(x @ p["s"], p["v"][0, 0].exp())
    return -found.log_prob(x[:, 0]).sum()


def categorical(p, b, x, mask, number):
    return -distributions.Categorical(logits=x[0] @ p["w"]).log_prob(number)


def bernoulli(p, b, x, mask, number):
    found = distributions.Bernoulli((x @ p["s"]).sigmoid())
    return -found.log_prob(mask.to(x.dtype)).sum() - found.entropy().sum()


def beta(p, b, x, mask, number):
    found = distributions.Beta((x @ p["s"]).exp(), (x @ p["w"][0]).exp())
    return -found.log_prob(x[:, 0].sigmoid()).sum()


def gaussian(p, b, x, mask, number):
    scale = p["w"].tril(-1) + p["s"].exp().diag()
    found = distributions.MultivariateNormal(p["v"][0], scale_tril=scale)
    return -found.log_prob(x[0])


def mixture(p, b, x, mask, number):
    parts = distributions.Independent(distributions.Normal(p["w"], p["v"].exp()), 1)
    weights = distributions.Categorical(logits=p["s"])
    return -distributions.MixtureSameFamily(weights, parts).log_prob(x).sum()


def reparametrised(p, b, x, mask, number):
    found = distributions.Normal(x @ p["w"], p["s"].exp())
    return (found.rsample() @ p["v"]).square().sum()


def policy(p, b, x, mask, number):
    found = distributions.Categorical(logits=x @ p["w"])
    with torch.no_grad():
        action = found.sample()
    return -(found.log_prob(action) * x[:, 0]).sum()


class Program(NamedTuple):
    loss: Callable
    refused: str = ""  # why
    draws: bool = False
    quick: bool = False


APART = (
    r"compile\(per_sample_grad\): .* samples take different branches, and run part by"
)
PROGRAMS = {
    "branches": [
        *(Program(branch, APART), Program(full_mask, APART, quick=True)),
        *(Program(expert, APART), Program(early_exit, APART), Program(length, APART)),
        *(Program(two_questions, APART), Program(until, APART)),
        *(Program(selection, APART), Program(in_a_list, APART)),
        Program(drawn_branch, APART, draws=True, quick=True),
        Program(compared, "equal hands values to Python"),
    ],
    "checkpoints": [
        *(Program(chain, quick=True), Program(dropped, draws=True, quick=True)),
        *(Program(noisy, draws=True), Program(written, draws=True)),
        *(Program(checkpointed_branch, APART), Program(new_numbers, draws=True)),
        Program(nested, "got activation checkpointing"),
    ],
    "distributions": [
        *(Program(normal, quick=True), Program(categorical), Program(bernoulli)),
        *(Program(beta), Program(gaussian), Program(mixture)),
        *(Program(reparametrised, draws=True), Program(policy, draws=True, quick=True)),
    ],
}
ALL = [each for programs in PROGRAMS.values() for each in programs]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=each.loss.__name__, marks=() if each.quick else slow)
        for each in ALL
    ],
)
def test_gradients_are_those_of_plain_autograd_whatever_samples_answer(program):
    loss = program.loss
    eager = vgrad.per_sample_grad(
        loss, randomness="different" if program.draws else "error"
    )
    compiled, warned = vgrad.compile(eager), contextlib.nullcontext()
    if program.refused:
        warned = pytest.warns(vgrad.CompileWarning, match=program.refused)
    with warned:
        for seed in (0, 1, 2, 1):
            before = calls(compiled)
            torch.manual_seed(seed)
            found, state = compiled(PARAMS, {}, *batch(seed)), torch.get_rng_state()
            torch.manual_seed(seed)
            expected = (eager if program.draws else partial(oracled, loss))(
                PARAMS, {}, *batch(seed)
            )
            oracle.assert_exact(found, expected, 0 if program.draws else oracle.EXACT)
            if program.draws:
                assert torch.equal(torch.get_rng_state(), state)
    assert not any(each.redos for each in compiled.reports())
    assert (calls(compiled) > before) == (not program.refused)


def calls(compiled):
    return sum(each.calls for each in compiled.reports())


def oracled(loss, params, buffers, *given):
    return oracle.loss_gradients(loss, params, buffers, given)


def test_a_private_step_on_poisson_batches_whose_samples_differ():
    plan = problems.plan(dataset_size=30, steps=8)
    data, tx = batch(0, 30), optim.sgd(0.1)
    step = private_step(two_questions, tx, plan)
    start = TrainState.create(tx, PARAMS, {}, seed=1)
    batches = [tuple(x[list(rows)] for x in data) for rows in plan.sampler(start)]
    compiled = vgrad.compile(step, batch_sizes=[16])
    with pytest.warns(vgrad.CompileWarning, match="private_step.* take different"):
        found, expected = (problems.taken(f, start, batches) for f in (compiled, step))
    oracle.assert_exact(found, expected)
    with pytest.raises(RuntimeError, match="take different branches"):
        vgrad.compile(step, batch_sizes=[16], fallback="error")(start, *batches[0])


def test_samples_that_differ_later_drop_results():
    eager = vgrad.per_sample_grad(full_mask)
    compiled = vgrad.compile(eager, fallback="error")
    x, _, _ = batch(0)
    rows = 8, 8, 5, 8, 5, 8, 5
    for row in rows:
        given = PARAMS, {}, x, torch.arange(8)[:, None].expand(8, 3) < row, x
        oracle.assert_exact(compiled(*given), eager(*given))
    [report] = compiled.reports()
    assert (report.calls, report.redos) == (6, 3)


ROWS = (8, 8, 5, 5, 5, 5, 5)


def test_samples_that_differ_from_then_on_are_given_up():
    eager = vgrad.per_sample_grad(full_mask)
    compiled = vgrad.compile(eager)
    x, _, _ = batch(0)
    calls = [
        (PARAMS, {}, x, torch.arange(8)[:, None].expand(8, 3) < n, x) for n in ROWS
    ]
    with pytest.warns(vgrad.CompileWarning, match="take different"):
        found = [compiled(*given) for given in calls]
    oracle.assert_exact(found, [eager(*given) for given in calls])
    assert compiled.reports()[0].backend == "eager"


def by_number(p, b, x, mask, number):
    return ((x @ p["w"]).square() * p["s"]).sum() * (number.item() + 1)


def closed(p, b, x, mask, number, held={"lists": False}):  # noqa: B006
    if held["lists"]:
        return branch(p, b, x * sum(mask.tolist()), mask, number)
    return branch(p, b, x if number > 0 else -x, mask, number)


def shared(p, b, x, mask, number):
    return ((x @ p["w"] if p["s"][0] > 0 else x @ p["v"]) * p["s"]).square().sum()


def fails_for_others(p, b, x, mask, number):
    if number > 0:
        x = x * F.embedding(number - 1, p["w"])
        x = x if x.sum() > 0 else -x
    return (x @ p["v"]).square().sum() + p["s"].sum()


def nan(p, b, x, mask, number):
    return (x @ p["w"] * p["s"]).sum() + (0 * number / number).item()


@pytest.mark.parametrize("loss", [by_number, closed, shared, fails_for_others, nan])
@pytest.mark.filterwarnings("ignore::vgrad.CompileWarning")
def test_special_reads(loss, monkeypatch):
    eager = vgrad.per_sample_grad(loss)
    compiled = vgrad.compile(eager)
    for seed in range(5):
        params, given = dict(PARAMS), batch(seed)
        if loss is by_number:
            given = (*given[:2], torch.arange(8) + 8 * seed % 24)
        if loss is closed:
            monkeypatch.setitem(closed.__defaults__[0], "lists", seed > 2)
        if loss is shared and seed > 2:
            params["s"] = -PARAMS["s"]
        found = compiled(params, {}, *given)
        oracle.assert_exact(found, eager(params, {}, *given))
        assert math.isfinite(float(found["w"].sum()))


# States of the generators that a function restores.


def restored(first, second, after=True):
    def function(x):
        state = torch.get_rng_state()
        one = first(x)
        changed = one.clone()
        one.add_(1)
        later = torch.get_rng_state()
        for _ in range(2):
            torch.set_rng_state(state)
            two = second(x)
            again = two.clone()
            two.add_(1)
        if after:
            torch.set_rng_state(later)
        return changed, again

    return function


STATES = {
    "another op": restored(torch.rand_like, torch.randn_like),
    "another input": restored(torch.poisson, lambda x: torch.poisson(x + 1)),
    "another probability": restored(
        lambda x: torch.bernoulli(x, 0.2), lambda x: torch.bernoulli(x, 0.7)
    ),
    "put back": restored(torch.rand_like, torch.neg, after=False),
    "a seed": lambda x: (torch.manual_seed(1), torch.rand_like(x))[1],
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_generators_that_no_graph_repeats(name):
    with pytest.raises(Unrepeatable, match="second time|seeds torch's generators"):
        graph.captured(STATES[name], (torch.ones(3),))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.poisson, torch.bernoulli])
def test_a_state_that_is_restored_gives_the_same_numbers(draw):
    module = graph.captured(restored(draw, draw), (torch.full((50,), 0.5),)).module
    for _ in range(2):
        one, two, _ = module(torch.full((50,), 0.5))
        assert torch.equal(one, two)

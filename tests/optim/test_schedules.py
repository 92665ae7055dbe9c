"""Schedules against `torch.optim.lr_scheduler`, and under the transforms."""

import re
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tests.examples import examples
from tests.optim.problems import double, member, stacked
from tests.oracle import assert_exact
from vgrad.optim import schedules

tried = examples(40)
constant, exponential, join = schedules.constant, schedules.exponential, schedules.join
exact = partial(assert_exact, tolerance=1e-12)
"""Which compares to 1e-12 of the largest rate."""


# The numbers of torch.optim.lr_scheduler.


def torch_curve(make, lr, steps):
    """The rates that a scheduler of torch gives its optimizer."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler = make(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    while len(rates) < steps:
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return double(rates)


LENGTHS = st.integers(1, 40)
RATES = st.floats(1e-4, 10.0)
FACTORS = st.floats(0.01, 1.0)
SHARES = st.floats(0.0, 1.0)
MINIMA = st.floats(0.0, 1e-4)
MODES = st.sampled_from(["triangular", "triangular2", "exp_range"])
UNMOVED = dict(cycle_momentum=False)
# A scheduler of torch, its word for `steps`, options of any size and some options.
TABLE = {
    "constant": (lr_scheduler.ConstantLR, "total_iters",
                 dict(steps=LENGTHS, factor=FACTORS), dict(steps=5)),
    "linear": (lr_scheduler.LinearLR, "total_iters",
               dict(steps=LENGTHS, start_factor=FACTORS, end_factor=SHARES),
               dict(steps=5)),
    "polynomial": (lr_scheduler.PolynomialLR, "total_iters",
                   dict(steps=LENGTHS, power=st.floats(0.0, 3.0)), dict(steps=5)),
    "exponential": (lr_scheduler.ExponentialLR, "", dict(gamma=FACTORS),
                    dict(gamma=0.5)),
    "step": (lr_scheduler.StepLR, "", dict(step_size=LENGTHS, gamma=FACTORS),
             dict(step_size=5)),
    "multi_step": (lr_scheduler.MultiStepLR, "",
                   dict(milestones=st.lists(LENGTHS, max_size=4), gamma=FACTORS),
                   dict(milestones=[2, 6])),
    "cosine": (lr_scheduler.CosineAnnealingLR, "T_max",
               dict(steps=LENGTHS, eta_min=MINIMA), dict(steps=5)),
    "cosine_with_restarts": (
        lr_scheduler.CosineAnnealingWarmRestarts, "T_0",
        dict(steps=LENGTHS, T_mult=st.integers(1, 3), eta_min=MINIMA), dict(steps=5)),
    "cyclic": (partial(lr_scheduler.CyclicLR, **UNMOVED), "",
               dict(max_lr=RATES, step_size_up=LENGTHS, mode=MODES, gamma=FACTORS,
                    step_size_down=st.none() | LENGTHS),
               dict(max_lr=0.7)),
    "one_cycle": (partial(lr_scheduler.OneCycleLR, **UNMOVED), "total_steps",
                  dict(steps=LENGTHS, pct_start=SHARES, three_phase=st.booleans(),
                       anneal_strategy=st.sampled_from(["cos", "linear"]),
                       div_factor=st.floats(1.0, 100.0),
                       final_div_factor=st.floats(1.0, 1e5)),
                  dict(steps=12)),
}  # fmt: skip
MAINS = [name for name in TABLE if name not in ("cyclic", "one_cycle")]


def pair(name, lr, options):
    """Our schedule, and a function from an optimizer to torch's scheduler."""
    theirs, word, *_ = TABLE[name]
    renamed = {word if k == "steps" else k: v for k, v in options.items()}
    first = (lr,) if name in ("cyclic", "one_cycle") else ()
    ours = getattr(schedules, name)(lr, **options)
    return ours, lambda optimizer: theirs(optimizer, *first, **renamed)


def drawn(data, name):
    lr, options = data.draw(RATES), data.draw(st.fixed_dictionaries(TABLE[name][2]))
    return lr, options, *pair(name, lr, options)


@pytest.mark.parametrize("name", [*MAINS, "cyclic"])
@given(st.data())
@tried
def test_every_step_agrees_with_torch_to_the_end_and_beyond(name, data):
    lr, _, ours, theirs = drawn(data, name)
    exact(ours(torch.arange(90)), torch_curve(theirs, lr, 90))


@given(st.data())
@examples(150)
def test_one_cycle_agrees_with_torch_and_then_stays(data):
    lr, options, ours, theirs = drawn(data, "one_cycle")
    steps = options["steps"]
    # There torch divides by the zero steps of its first phase.
    assume(options["pct_start"] * steps != 1)
    found = ours(torch.arange(steps + 50))
    exact(found[:steps], torch_curve(theirs, lr, steps))
    assert torch.equal(found[steps:], found[steps - 1].expand(50))


def test_a_first_phase_of_no_steps_begins_at_the_rate_of_the_start():
    found = schedules.one_cycle(1.0, 4, pct_start=0.25)(torch.arange(4))
    exact(found, schedules.one_cycle(1.0, 4, pct_start=0.25 + 1e-13)(torch.arange(4)))
    exact(found[:1], double([1 / 25]))


@pytest.mark.parametrize("name", MAINS)
@given(st.data())
@examples(20)
def test_a_warmup_agrees_with_a_linear_rate_in_sequence(name, data):
    steps, start = data.draw(LENGTHS), data.draw(FACTORS)
    lr, _, ours, theirs = drawn(data, name)
    rises_to = min(1.0, ours(torch.zeros(1)).item() / lr)  # torch takes no 1 + 1e-16

    def sequence(optimizer):
        rise = lr_scheduler.LinearLR(
            optimizer, start * rises_to, rises_to, total_iters=steps
        )
        parts = [rise, theirs(optimizer)]
        return lr_scheduler.SequentialLR(optimizer, parts, [steps])

    found = schedules.warmup(ours, steps, start_factor=start)
    exact(found(torch.arange(90)), torch_curve(sequence, lr, 90))


@given(
    st.lists(st.sampled_from(MAINS), min_size=1, max_size=4),
    st.sets(st.integers(1, 40), min_size=3, max_size=3),
)
@tried
def test_joined_schedules_agree_with_a_sequence(names, places):
    boundaries = sorted(places)[: len(names) - 1]
    ours, theirs = zip(*(pair(n, 0.3, TABLE[n][3]) for n in names), strict=True)

    def sequence(optimizer):
        parts = [make(optimizer) for make in theirs]
        return lr_scheduler.SequentialLR(optimizer, parts, boundaries)

    exact(join(ours, boundaries)(torch.arange(60)), torch_curve(sequence, 0.3, 60))


@given(st.lists(RATES, min_size=1, max_size=5), st.data())
@tried
def test_piecewise_constant_counts_the_boundaries_passed(values, data):
    size = len(values) - 1
    places = sorted(data.draw(st.sets(LENGTHS, min_size=size, max_size=size)))
    found = schedules.piecewise_constant(values, places)(torch.arange(50))
    expected = [values[sum(p <= count for p in places)] for count in range(50)]
    assert found.tolist() == expected
    assert constant(0.3)(torch.arange(3)).tolist() == [0.3, 0.3, 0.3]


def test_restarts_of_long_runs_are_at_the_exact_step():
    period = 10**4
    for T_mult in (1, 2, 3, 10):
        rate = schedules.cosine_with_restarts(1.0, period, T_mult=T_mult)
        starts = [sum(period * T_mult**k for k in range(n)) for n in range(1, 9)]
        assert torch.equal(rate(torch.tensor(starts)), torch.ones(8).double())
        assert (rate(torch.tensor(starts) - 1) < 1e-6).all()


# Every schedule with arguments by name, so that each may become a tensor.

COSINE = dict(lr=0.5, steps=3, eta_min=0.01)
CYCLE = dict(base_lr=0.1, max_lr=0.9, step_size_up=3, step_size_down=2)
ONCE = dict(max_lr=0.5, steps=9, pct_start=0.37, div_factor=5.0, final_div_factor=9.0)
LINE = dict(lr=0.5, steps=5, start_factor=0.2, end_factor=0.9)
EVERY = {
    "constant": (constant, dict(lr=0.5, steps=5, factor=0.4)),
    "linear": (schedules.linear, LINE),
    "polynomial": (schedules.polynomial, dict(lr=0.5, steps=5, power=0.5)),
    "exponential": (exponential, dict(lr=0.5, gamma=0.7)),
    "step": (schedules.step, dict(lr=0.5, step_size=3, gamma=0.5)),
    "multi_step": (
        lambda lr, a, b, gamma: schedules.multi_step(lr, [b, a], gamma=gamma),
        dict(lr=0.5, a=2, b=5, gamma=0.5)),
    "cosine": (schedules.cosine, COSINE),
    "cosine_with_restarts": (schedules.cosine_with_restarts, COSINE),
    "cosine_with_restarts, longer": (
        partial(schedules.cosine_with_restarts, T_mult=2), COSINE),
    "cyclic": (schedules.cyclic, CYCLE),
    "cyclic, halved": (partial(schedules.cyclic, mode="triangular2"), CYCLE),
    "cyclic, decaying": (
        partial(schedules.cyclic, mode="exp_range"), CYCLE | dict(gamma=0.9)),
    "one_cycle": (schedules.one_cycle, ONCE),
    "one_cycle, of lines": (
        partial(schedules.one_cycle, anneal_strategy="linear", three_phase=True), ONCE),
    "piecewise_constant": (
        lambda a, b, c, at, then: schedules.piecewise_constant([a, b, c], [at, then]),
        dict(a=0.5, b=0.1, c=0.3, at=2, then=5)),
    "join": (
        lambda gamma, at, **line: join(
            [exponential(line["lr"], gamma), schedules.linear(**line)], [at]),
        dict(lr=0.5, gamma=0.6, steps=4, start_factor=0.2, at=3)),
    "warmup": (
        lambda first, start_factor, **curve: schedules.warmup(
            schedules.cosine(**curve), first, start_factor=start_factor),
        dict(lr=0.5, first=3, steps=5, start_factor=0.2, eta_min=0.01)),
}  # fmt: skip
every = pytest.mark.parametrize(("make", "options"), EVERY.values(), ids=EVERY)


def test_every_exported_schedule_is_in_the_list():
    assert {name.split(",")[0] for name in EVERY} == set(schedules.__all__)


def as_tensors(options, dtype=torch.float64):
    """The arguments as tensors: lengths of int64, all others of a dtype."""
    return {
        key: torch.tensor(value, dtype=torch.int64 if type(value) is int else dtype)
        for key, value in options.items()
    }


@every
def test_counts_of_every_shape_give_the_whole_curve_and_no_value_is_read(make, options):
    rate, counts = make(**options), torch.arange(24)
    one_by_one = torch.stack([rate(count) for count in counts])
    assert one_by_one.dtype == torch.float64
    for shape in [(24,), (4, 6), (2, 3, 4), (24, 1)]:
        exact(rate(counts.reshape(shape)), one_by_one.reshape(shape))
    assert rate(counts[:0]).shape == (0,)
    exact(rate(counts.int()), one_by_one)
    exact(torch.stack([rate(count) for count in range(24)]), one_by_one)
    assert torch.equal(counts, torch.arange(24))
    on_meta = {key: t.to("meta") for key, t in as_tensors(options).items()}
    for arguments in (options, on_meta):
        rate = make(**arguments)(counts[0].to("meta"))
        assert (rate.device.type, rate.shape) == ("meta", ())


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_members_under_vmap_have_their_own_rates_and_lengths(make, options, dtype):
    members = [
        as_tensors(
            {k: v + i if type(v) is int else v / (1 + i) for k, v in options.items()},
            dtype,
        )
        for i in range(3)
    ]
    many, counts = stacked(members), torch.arange(24)
    found = torch.vmap(lambda values: make(**values)(counts))(many)
    own_count = torch.vmap(lambda values, count: make(**values)(count))
    last = own_count(many, torch.tensor([4, 5, 6]))
    for index, tensors in enumerate(members):
        alone = make(**{key: value.item() for key, value in tensors.items()})
        assert torch.equal(make(**tensors)(counts), alone(counts))
        exact(member(found, index), alone(counts))
        exact(last[index], alone(torch.tensor(4 + index)))


@every
def test_gradients_are_those_of_finite_differences(make, options):
    names = [key for key, value in options.items() if type(value) is float]
    values = [double(options[key]).requires_grad_() for key in names]

    def curve(*values):
        named = dict(zip(names, values, strict=True))
        return make(**options | named)(torch.arange(24))

    assert torch.autograd.gradcheck(curve, values)


@every
@pytest.mark.parametrize("zero", [False, True])
def test_gradients_stay_finite_for_lengths_too_and_where_rates_are_zero(
    make, options, zero
):
    kept = {"div_factor", "final_div_factor", "pct_start"}
    values = {
        key: double(value * (not zero or type(value) is int or key in kept))
        for key, value in options.items()
    }
    leaves = [value.requires_grad_() for value in values.values()]
    total = make(**values)(torch.arange(24)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [grad for grad in grads if grad is not None]
    assert grads
    assert all(grad.isfinite() for grad in grads)


@pytest.mark.parametrize(("name", "argument", "expected"), [
    ("constant", dict(lr=-1.0), "lr >= 0."),
    ("constant", dict(lr=float("inf")), "a finite number."),
    ("constant", dict(steps=-1), "a whole number >= 0."),
    ("linear", dict(steps=0), "a whole number >= 1."),
    ("linear", dict(steps=2.5), "a whole number >= 1."),
    ("linear", dict(end_factor=-0.5), "end_factor >= 0."),
    ("polynomial", dict(power=-1.0), "power >= 0."),
    ("step", dict(step_size=True), "a whole number >= 1."),
    ("cosine", dict(eta_min=float("nan")), "eta_min >= 0."),
    ("cosine_with_restarts", dict(T_mult=1.5), "a whole number >= 1."),
    ("cyclic", dict(step_size_down=0), "a whole number >= 1."),
    ("cyclic", dict(mode="square"), "one of 'triangular', 'triangular2', 'exp_range'."),
    ("one_cycle", dict(pct_start=1.5), "pct_start <= 1."),
    ("one_cycle", dict(div_factor=0.0), "div_factor > 0."),
    ("one_cycle", dict(anneal_strategy="sine"), "one of 'cos', 'linear'."),
])  # fmt: skip
def test_arguments_out_of_range_are_named(name, argument, expected):
    make, options = EVERY[name]
    ((key, value),) = argument.items()
    message = f"{name}({key}={value!r}): expected {expected}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options | argument)

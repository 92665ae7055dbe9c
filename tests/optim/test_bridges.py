"""Runs that move between `torch.optim` and this package, step for step."""

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

from tests.optim.optimizers import COUNTED, OPTIONS, TORCH, UNCOUNTED
from tests.optim.problems import (
    go_on,
    leaves_of,
    matrices,
    perceptron,
    train,
    values,
)
from tests.oracle import assert_exact
from vgrad.optim import adam, from_torch, interop, step, to_torch

CASES = [(TORCH[name][1], o) for name, options in OPTIONS.items() for o in options] + [
    (optim.SGD, dict(lr=1e-3, momentum=0.9, maximize=True, weight_decay=0.1)),
    (optim.Adam, dict(lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.Adamax, dict(lr=2e-3, weight_decay=0.1, maximize=True)),
    (optim.ASGD, dict(lr=1e-3, lambd=0.1, t0=3.0, weight_decay=0.1)),
]
every = pytest.mark.parametrize(("kind", "options"), CASES)


@pytest.fixture(autouse=True)
def _double_by_default():
    """Make torch keep its scalar states, and their rounding, in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(kind, **options):
    """Parameters and a loss, which goes up where an optimizer maximizes."""
    make = matrices if kind is optim.Muon else perceptron
    return make(sign=-1.0 if options.get("maximize") else 1.0)


def begun(kind, options, steps=7):
    """Return an optimizer of torch in the middle of a run, with all of the run."""
    start, loss = problem(kind, **options)
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    go_on(optimizer, leaves, loss, steps)
    return optimizer, leaves, loss


def assert_alike(tx, state, optimizer, leaves, loss, steps, tolerance=1e-12):
    """Go on with both, and return the state that ours then has."""
    found, state = train(tx, values(leaves), loss, steps, state)
    go_on(optimizer, leaves, loss, steps)
    assert_exact(found, values(leaves), tolerance)
    return state


def entries(optimizer, leaves):
    """Copy the state of torch, in one order of names."""
    return {
        name: copy.deepcopy(dict(sorted(optimizer.state[leaf].items())))
        for name, leaf in leaves.items()
    }


def test_every_optimizer_of_torch_that_exists_here_is_known():
    classes = {value for value in vars(optim).values() if inspect.isclass(value)}
    missing = classes - set(interop.OPTIMIZERS)
    assert missing == {optim.Optimizer, optim.SparseAdam, optim.LBFGS}
    assert {kind for kind, _ in CASES} == set(interop.OPTIMIZERS)


# From torch.


@pytest.mark.parametrize("steps", [0, 7])
@every
def test_a_run_of_torch_goes_on_with_the_same_numbers(kind, options, steps):
    optimizer, leaves, loss = begun(kind, options, steps)
    tx, state = from_torch(optimizer)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(state))
    before, kept = values(leaves), copy.deepcopy(state)
    if steps == 0:
        assert_exact(state, tx.init(before), 0)
    assert_alike(tx, state, optimizer, leaves, loss, 7 * steps + 1)
    assert not torch.equal(leaves["0.weight"], before["0.weight"])
    assert_exact(state, kept, 0)


def test_groups_become_a_partition_by_name_each_with_its_own_numbers_and_count():
    start, loss = perceptron()
    leaves = leaves_of(start)
    weights = [(name, leaves[name]) for name in ("0.weight", "1.weight")]
    bias = [("0.bias", leaves["0.bias"])]
    first = {"params": weights, "lr": 0.02}
    second = {"params": bias, "weight_decay": 0.0, "amsgrad": True, "betas": (0.5, 0.9)}
    optimizer = optim.AdamW([dict(first)], lr=0.01)
    go_on(optimizer, leaves, loss, 3)
    optimizer.add_param_group(dict(second))
    go_on(optimizer, leaves, loss, 4)
    tx, state = from_torch(optimizer)
    state = assert_alike(tx, state, optimizer, leaves, loss, 50)

    other = optim.AdamW([dict(first), dict(second)], lr=0.01)
    to_torch(state, other)
    steps = [int(other.state[leaf]["step"]) for leaf in leaves.values()]
    assert steps == [57, 54, 57]
    assert_alike(tx, state, other, leaves, loss, 5)


def test_names_may_come_from_a_dictionary_and_then_hold():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    named = dict(model.named_parameters())
    slot = from_torch(optimizer, named)[1][1].slots["exp_avg"]
    assert_exact(slot, {n: optimizer.state[p]["exp_avg"] for n, p in named.items()}, 0)
    own = optim.Adam([(f"own.{name}", p) for name, p in named.items()])
    part = optim.Adam(model[0].parameters())  # of which `named` holds more
    for arguments, expected in [
        ((own,), [f"own.{name}" for name in named]),
        ((own, named), list(named)),
        ((part, named), ["0.weight", "0.bias"]),
    ]:
        assert list(from_torch(*arguments)[1][1].slots["exp_avg"]) == expected


@pytest.mark.parametrize("kind", [optim.Adam, optim.Adagrad])
def test_frozen_parameters_without_steps_are_left_out(kind):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    everything = dict(model.named_parameters())
    trained = {name: everything[name] for name in ("1.weight", "1.bias")}
    optimizer = kind([{"params": layer.parameters()} for layer in model])
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = entries(optimizer, trained)
    for names in (everything, trained):
        tx, state = from_torch(optimizer, names)
        step(tx, trained, state, trained)
        with pytest.raises(ValueError, match=r"unexpected: '0.bias', '0.weight'"):
            step(tx, everything, state, everything)
        to_torch(state, optimizer, names)
    assert_exact(entries(optimizer, trained), before, 0)


@pytest.mark.parametrize(("name", "options"), UNCOUNTED + COUNTED)
def test_only_where_steps_do_not_count_a_parameter_may_have_missed_some(name, options):
    optimizer, leaves, loss = begun(TORCH[name][1], options, steps=0)
    loss({**leaves, "0.bias": leaves["0.bias"].detach()}).backward()
    optimizer.step()
    if (name, options) in UNCOUNTED:
        assert_alike(*from_torch(optimizer), optimizer, leaves, loss, 5)
        return
    message = r"equally many steps, got fewer than 1 of '0.bias'. Put these"
    with pytest.raises(ValueError, match=message):
        from_torch(optimizer)


def test_the_rate_is_that_of_now_and_tensors_are_numbers():
    start, loss = perceptron()
    leaves, rate = leaves_of(start), torch.tensor([0.05])
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    optimizer = optim.Adam(list(leaves.items()), lr=rate, betas=betas)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    go_on(optimizer, leaves, loss, 2)
    schedule.step()
    tx, state = from_torch(optimizer)
    assert tx.donated is not None
    found, _ = train(tx, values(leaves), loss, 20, state)
    rate.fill_(100.0)
    expected, _ = train(adam(0.025, betas=(0.8, 0.9)), values(leaves), loss, 20, state)
    assert_exact(found, expected, 1e-12)


def test_bfloat16_states_come_in_float32_and_go_back_as_they_were():
    leaves = {"w": nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.bfloat16))}
    optimizer = optim.Adam(leaves.items(), lr=0.1)
    leaves["w"].grad = torch.ones_like(leaves["w"])
    optimizer.step()
    before = entries(optimizer, leaves)
    tx, state = from_torch(optimizer)
    assert_exact(pytree.tree_map(torch.zeros_like, state), tx.init(leaves), 0)
    to_torch(state, optimizer)
    assert_exact(entries(optimizer, leaves), before, 0)


# To torch.


@pytest.mark.parametrize("steps", [0, 7])
@every
def test_a_round_trip_is_exact(kind, options, steps):
    optimizer, leaves, loss = begun(kind, options, steps)
    before = entries(optimizer, leaves)
    _, state = from_torch(optimizer)
    twins = leaves_of(leaves)
    other = kind(list(twins.values()), **options)
    to_torch(state, other, twins)
    found = entries(other, twins)
    if steps:
        to_torch(state, optimizer)
        assert_exact(entries(optimizer, leaves), before, 0)
        assert_exact(from_torch(other, twins)[1], state, 0)
        if kind in (optim.Adadelta, optim.RMSprop, optim.Rprop, optim.Adagrad):
            for entry in (*before.values(), *found.values()):
                del entry["step"]  # which is not read
        assert_exact(found, before, 0)
    go_on(optimizer, leaves, loss, 5)
    go_on(other, twins, loss, 5)
    assert_exact(values(leaves), values(twins), 0)


@every
def test_a_run_moves_back_to_torch(kind, options):
    start, loss = problem(kind, **options)
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    tx, fresh = from_torch(optimizer)
    params, state = train(tx, start, loss, 6, fresh)
    for name, leaf in leaves.items():
        leaf.data.copy_(params[name])
    to_torch(state, optimizer)
    assert_alike(tx, state, optimizer, leaves, loss, 30)


@pytest.mark.parametrize(("kind", "options", "tolerance"), [
    (optim.NAdam, dict(foreach=True), 1e-5),
    (optim.NAdam, dict(foreach=False), 1e-5),
    (optim.Adam, dict(fused=True), 1e-9),
])  # fmt: skip
def test_numbers_are_kept_as_torch_keeps_them(kind, options, tolerance):
    torch.set_default_dtype(torch.float32)
    optimizer, leaves, loss = begun(kind, options, steps=3)
    before = entries(optimizer, leaves)
    tx, state = from_torch(optimizer)
    to_torch(state, optimizer)
    assert_exact(entries(optimizer, leaves), before, 0)
    assert_alike(tx, state, optimizer, leaves, loss, 5, tolerance)


def test_after_an_error_nothing_has_changed():
    start, loss = perceptron()
    leaves = leaves_of(start)
    groups = [{"params": [pair], "momentum": 0.9} for pair in leaves.items()]
    optimizer = optim.SGD(groups)
    go_on(optimizer, leaves, loss, 2)
    before = entries(optimizer, leaves)
    _, state = from_torch(optimizer)
    *others, ((), last, ()) = state
    short = last._replace(slots={"momentum_buffer": {"1.weight": torch.ones(3)}})
    broken = (*others, ((), short, ()))
    with pytest.raises(ValueError, match=r"to_torch\(state\): expected shape"):
        to_torch(broken, optimizer)
    with pytest.raises(ValueError, match=r"to_torch\(state\): expected the names"):
        to_torch(state[:-1], optimizer)
    assert_exact(entries(optimizer, leaves), before, 0)


# What is refused.


class Own(optim.Adam):
    pass


MODEL, FROZEN = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
NAMED, NAMELESS = dict(MODEL.named_parameters()), optim.Adam(MODEL.parameters())
COMPLEX = nn.Parameter(torch.ones(2, dtype=torch.complex64))
REFUSED = [
    *(
        (kind(MODEL.parameters()), NAMED, TypeError,
         rf"\(optimizer of class {kind.__name__}\): expected one of SGD, Ad")
        for kind in (optim.LBFGS, optim.SparseAdam, Own)
    ),
    (NAMELESS, None, ValueError, r"\(params=None\): expected the names of the param.*,"
     " got an"),
    (NAMELESS, list(MODEL.parameters()), TypeError, r"\(params\): expected a dictio"),
    (NAMELESS, {"weight": MODEL.weight}, ValueError, r"\(params\): expected one name .*"
     r" got no name for one of shape \(1,\) in group 0"),
    (optim.Adam([("a", MODEL.bias), ("a", MODEL.weight)]), None, ValueError,
     "got 'a' a second time"),
    (optim.Adam(FROZEN.named_parameters()), None, ValueError,
     "parameters that require gradients, got none"),
    (optim.Adam(NAMED.items(), differentiable=True), None, ValueError,
     "with differentiable=True.: expected False"),
]  # fmt: skip


@pytest.mark.parametrize("move", [from_torch, partial(to_torch, ())])
@pytest.mark.parametrize(("optimizer", "params", "error", "message"), REFUSED)
def test_what_does_not_move_is_refused(move, optimizer, params, error, message):
    name = "from_torch" if move is from_torch else "to_torch"
    with pytest.raises(error, match=f"{name}.*{message}"):
        move(optimizer, params)


def test_complex_parameters_and_options_that_changed_are_refused():
    with pytest.raises(TypeError, match="expected real floating-point parameters"):
        from_torch(optim.Adam([("w", COMPLEX)]))
    optimizer, leaves, _ = begun(optim.Adam, {})
    optimizer.param_groups[0]["amsgrad"] = True
    message = r"expected 'max_exp_avg_sq' of shape \(4, 3\) in .*'0.weight', got none"
    with pytest.raises(ValueError, match=message):
        from_torch(optimizer)
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.state[leaves["0.bias"]]["exp_avg"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"of shape \(4,\) in .*'0.bias', got \(3,\)"):
        from_torch(optimizer)


def test_asgd_moves_once_its_last_rate_is_in_force():
    optimizer, leaves, loss = begun(optim.ASGD, dict(lr=1e-3))
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(ValueError, match=r"\(ASGD, lr=0.0001\): expected the rate"):
        from_torch(optimizer)
    go_on(optimizer, leaves, loss, 1)
    assert_alike(*from_torch(optimizer), optimizer, leaves, loss, 5)

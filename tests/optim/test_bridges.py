"""Runs that move between `torch.optim` and this package, step for step."""

import copy
import inspect
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

from tests.optim.problems import (
    assert_close,
    assert_same_tree,
    gradients,
    perceptron,
    random_gradients,
    train,
)
from vgrad.optim import (
    adam,
    adamw,
    as_torch,
    asgd,
    averaged_parameters,
    chain,
    clip_by_global_norm,
    ema_parameters,
    from_torch,
    inject_hyperparams,
    lion,
    lookahead,
    partition,
    schedule_free_adamw,
    sgd,
    step,
    to_torch,
)
from vgrad.optim.interop.counterparts import OPTIMIZERS
from vgrad.tree import state_dict

CASES = [
    (optim.SGD, dict(lr=1e-3, weight_decay=0.1)),
    (optim.SGD, dict(lr=1e-3, momentum=0.9, maximize=True)),
    (optim.SGD, dict(lr=1e-3, momentum=0.9, dampening=0.5)),
    (optim.SGD, dict(lr=1e-3, momentum=0.5, nesterov=True)),
    (optim.Adam, dict(lr=1e-2)),
    (optim.Adam, dict(lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True)),
    (optim.Adam, dict(lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.AdamW, dict(lr=1e-2, betas=(0.8, 0.9), eps=1e-6)),
    (optim.AdamW, dict(lr=1e-2, amsgrad=True)),
    (optim.NAdam, dict(lr=2e-3, momentum_decay=0.1)),
    (optim.NAdam, dict(lr=2e-3, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.RAdam, dict(lr=1e-3, weight_decay=0.1)),
    (optim.RAdam, dict(lr=1e-3, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.Adamax, dict(lr=2e-3, weight_decay=0.1, maximize=True)),
    (optim.Adagrad, dict(lr=1e-2)),
    (optim.Adagrad, dict(lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.5)),
    (optim.Adadelta, dict(lr=1.0, rho=0.8)),
    (optim.RMSprop, dict(lr=1e-3)),
    (optim.RMSprop, dict(lr=1e-3, momentum=0.9, centered=True, weight_decay=0.1)),
    (optim.Rprop, dict(lr=1e-2, etas=(0.3, 1.5), step_sizes=(1e-4, 0.02))),
    (optim.ASGD, dict(lr=1e-3, lambd=0.1, t0=3.0, weight_decay=0.1)),
    (optim.Adafactor, dict(lr=1e-2, weight_decay=0.1)),
    (optim.Muon, dict(lr=1e-2, adjust_lr_fn="match_rms_adamw")),
]
# One of each form of state, for what needs no more.
FEW = [case for case in CASES if "weight_decay" in case[1] or case[0] is optim.Muon]


@pytest.fixture(autouse=True)
def _double_by_default():
    """Make torch keep its scalar states, and their rounding, in float64."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


def problem(kind, **options):
    """Parameters and a loss, which goes up where an optimizer maximizes."""
    start, loss = perceptron()
    if kind is optim.Muon:
        bias = start.pop("0.bias")
        return start, lambda params: loss({**params, "0.bias": bias})
    sign = -1.0 if options.get("maximize") else 1.0
    return start, lambda params: sign * loss(params)


def leaves_of(params):
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def values(leaves):
    return {name: p.detach().clone() for name, p in leaves.items()}


def go_on(optimizer, leaves, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(leaves).backward()
        optimizer.step()


def go_on_with(tx, state, params, loss, steps):
    for _ in range(steps):
        params, state = step(tx, gradients(loss, params), state, params)
    return params, state


def begun(kind, options, steps=7):
    """Return an optimizer of torch in the middle of a run, with all of the run."""
    start, loss = problem(kind, **options)
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    go_on(optimizer, leaves, loss, steps)
    return optimizer, leaves, loss


def entries(optimizer, leaves):
    """What torch holds, in one order of names."""
    return {
        name: dict(sorted(optimizer.state[leaf].items()))
        for name, leaf in leaves.items()
    }


def test_every_optimizer_of_torch_that_exists_here_is_known():
    classes = {value for value in vars(optim).values() if inspect.isclass(value)}
    missing = classes - set(OPTIMIZERS)
    assert missing == {optim.Optimizer, optim.SparseAdam, optim.LBFGS}
    assert {kind for kind, _ in CASES} == set(OPTIMIZERS)


# From torch.


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_run_of_torch_goes_on_with_the_same_numbers(kind, options):
    optimizer, leaves, loss = begun(kind, options)
    tx, state = from_torch(optimizer)
    params = values(leaves)
    found, _ = go_on_with(tx, state, params, loss, 50)
    go_on(optimizer, leaves, loss, 50)
    assert not torch.equal(found["0.weight"], params["0.weight"])
    assert_close(found, values(leaves))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_an_optimizer_that_has_not_stepped_gives_a_fresh_state(kind, options):
    start, loss = problem(kind, **options)
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    tx, state = from_torch(optimizer)
    assert_same_tree(state, tx.init(start))
    found, _ = go_on_with(tx, state, start, loss, 10)
    go_on(optimizer, leaves, loss, 10)
    assert_close(found, values(leaves))


@pytest.mark.parametrize(("kind", "options"), FEW)
def test_states_are_copies_without_a_graph(kind, options):
    optimizer, leaves, loss = begun(kind, options)
    _, state = from_torch(optimizer)
    before = copy.deepcopy(state)
    go_on(optimizer, leaves, loss, 2)
    assert_same_tree(state, before)
    _, fresh = from_torch(kind(list(leaves.items()), **options))
    assert not any(each.requires_grad for each in pytree.tree_leaves((state, fresh)))


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
    found, state = go_on_with(tx, state, values(leaves), loss, 50)
    go_on(optimizer, leaves, loss, 50)
    assert_close(found, values(leaves))

    other = optim.AdamW([dict(first), dict(second)], lr=0.01)
    to_torch(state, other)
    steps = [int(other.state[leaf]["step"]) for leaf in leaves.values()]
    assert steps == [57, 54, 57]
    found, _ = go_on_with(tx, state, values(leaves), loss, 5)
    go_on(other, leaves, loss, 5)
    assert_close(found, values(leaves))


def test_names_may_come_from_a_dictionary_and_then_hold():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    named = dict(model.named_parameters())
    _, state = from_torch(optimizer, named)
    assert list(state[1].mean) == list(named)
    for name, param in named.items():
        assert torch.equal(state[1].mean[name], optimizer.state[param]["exp_avg"])
    own = optim.Adam([(f"own.{name}", p) for name, p in named.items()])
    assert list(from_torch(own)[1][1].mean) == [f"own.{name}" for name in named]
    assert list(from_torch(own, named)[1][1].mean) == list(named)
    # Names of parameters that the optimizer does not have are no harm.
    part = optim.Adam(model[0].parameters())
    assert list(from_torch(part, named)[1][1].mean) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("kind", [optim.Adam, optim.Adagrad])
def test_frozen_parameters_without_steps_are_left_out(kind):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    everything = dict(model.named_parameters())
    trained = {name: everything[name] for name in ("1.weight", "1.bias")}
    optimizer = kind(
        [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    )
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = {name: dict(optimizer.state[p]) for name, p in trained.items()}
    for names in (everything, trained):
        tx, state = from_torch(optimizer, names)
        step(tx, trained, state, trained)
        with pytest.raises(ValueError, match=r"unexpected: '0.bias', '0.weight'"):
            step(tx, everything, state, everything)
        to_torch(state, optimizer, names)
    for name, param in trained.items():
        assert_same_tree(dict(optimizer.state[param]), before[name])


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD, optim.RMSprop, optim.Rprop])
def test_none_gradients_after_the_move_leave_a_parameter_alone(kind):
    options = dict(lr=1e-2)
    if kind is optim.SGD:
        options["momentum"] = 0.9
    optimizer, leaves, _ = begun(kind, options)
    tx, state = from_torch(optimizer)
    params = values(leaves)
    grads = random_gradients(params, seed=3) | {"0.bias": None}
    for name, leaf in leaves.items():
        leaf.grad = grads[name]
    for _ in range(3):
        params, state = step(tx, grads, state, params)
        optimizer.step()
    assert_close(params, values(leaves))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, dict(lr=1e-2, momentum=0.9)),
        (optim.RMSprop, dict(lr=1e-2, momentum=0.9, centered=True)),
        (optim.Adadelta, {}),
        (optim.Rprop, {}),
        (optim.Adagrad, {}),
    ],
)
def test_where_steps_do_not_count_a_parameter_may_have_missed_some(kind, options):
    start, loss = perceptron()
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    loss({**leaves, "0.bias": start["0.bias"]}).backward()
    optimizer.step()
    tx, state = from_torch(optimizer)
    found, _ = go_on_with(tx, state, values(leaves), loss, 5)
    go_on(optimizer, leaves, loss, 5)
    assert_close(found, values(leaves))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, dict(momentum=0.9, dampening=0.5)),
        (optim.Adam, {}),
        (optim.RAdam, {}),
        (optim.Adagrad, dict(lr_decay=0.1)),
        (optim.ASGD, {}),
        (optim.Adafactor, {}),
    ],
)
def test_where_steps_count_unequal_ones_are_refused(kind, options):
    start, loss = perceptron()
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    loss({**leaves, "0.bias": start["0.bias"]}).backward()
    optimizer.step()
    message = r"equally many steps, got 0 of '0.bias' and 1 of others. Put .*: '0.bias'"
    with pytest.raises(ValueError, match=message):
        from_torch(optimizer)


def test_the_rate_is_that_of_now_and_tensors_are_numbers():
    start, loss = perceptron()
    leaves = leaves_of(start)
    rate = torch.tensor([0.05])
    optimizer = optim.Adam(
        list(leaves.items()), lr=rate, betas=(torch.tensor(0.8), torch.tensor(0.9))
    )
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    go_on(optimizer, leaves, loss, 2)
    schedule.step()
    tx, state = from_torch(optimizer)
    assert tx.donated is not None
    found, _ = go_on_with(tx, state, values(leaves), loss, 20)
    rate.fill_(100.0)
    expected, _ = go_on_with(
        adam(0.025, betas=(0.8, 0.9)), state, values(leaves), loss, 20
    )
    assert_close(found, expected)


def test_bfloat16_states_come_in_float32_and_go_back_as_they_were():
    leaf = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.bfloat16))
    optimizer = optim.Adam([("w", leaf)], lr=0.1)
    leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[leaf])
    tx, state = from_torch(optimizer)
    fresh = tx.init({"w": leaf})
    assert_same_tree(pytree.tree_map(torch.zeros_like, state), fresh)
    to_torch(state, optimizer)
    assert_same_tree(optimizer.state[leaf], before)


def test_the_transformation_runs_under_compile_and_vmap():
    start, loss = perceptron()
    leaves = leaves_of(start)
    groups = [
        {"params": [(name, leaf)], "lr": 0.01 * number}
        for number, (name, leaf) in enumerate(leaves.items(), start=1)
    ]
    optimizer = optim.AdamW(groups)
    go_on(optimizer, leaves, loss, 3)
    tx, state = from_torch(optimizer)
    params = values(leaves)
    grads = gradients(loss, params)
    expected, _ = step(tx, grads, state, params)
    compiled = torch.compile(
        lambda *args: step(tx, *args), backend="eager", fullgraph=True
    )
    assert_close(compiled(grads, state, params)[0], expected)
    mapped = torch.vmap(lambda *args: step(tx, *args))
    twice = pytree.tree_map(
        lambda leaf: torch.stack([leaf, leaf]), (grads, state, params)
    )
    found, _ = mapped(*twice)
    assert_close({name: p[1] for name, p in found.items()}, expected)


# To torch.


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_round_trip_is_exact(kind, options):
    optimizer, leaves, loss = begun(kind, options)
    before = copy.deepcopy(entries(optimizer, leaves))
    _, state = from_torch(optimizer)
    to_torch(state, optimizer)
    assert_same_tree(entries(optimizer, leaves), before)

    twins = leaves_of(leaves)
    other = kind(list(twins.items()), **options)
    to_torch(state, other)
    assert_same_tree(from_torch(other)[1], state)
    unread = {optim.Adadelta, optim.RMSprop, optim.Rprop, optim.Adagrad}
    found = entries(other, twins)
    for name, entry in before.items():
        assert entry.keys() == found[name].keys()
        for key, value in entry.items():
            if key != "step" or kind not in unread:
                assert_same_tree(found[name][key], value)
    go_on(optimizer, leaves, loss, 5)
    go_on(other, twins, loss, 5)
    for name, leaf in leaves.items():
        assert torch.equal(leaf, twins[name])


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_run_moves_back_to_torch(kind, options):
    start, loss = problem(kind, **options)
    tx, fresh = from_torch(kind(list(leaves_of(start).items()), **options))
    params, state = go_on_with(tx, fresh, start, loss, 6)
    leaves = leaves_of(params)
    optimizer = kind(list(leaves.values()), **options)
    to_torch(state, optimizer, leaves)
    expected, _ = go_on_with(tx, state, params, loss, 30)
    go_on(optimizer, leaves, loss, 30)
    assert_close(values(leaves), expected)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_fresh_state_moves_too(kind, options):
    start, loss = problem(kind, **options)
    leaves = leaves_of(start)
    optimizer = kind(list(leaves.items()), **options)
    to_torch(from_torch(optimizer)[1], optimizer)
    go_on(optimizer, leaves, loss, 5)
    twins = leaves_of(start)
    go_on(kind(list(twins.items()), **options), twins, loss, 5)
    for name, leaf in leaves.items():
        assert torch.equal(leaf, twins[name])


def test_numbers_are_kept_as_torch_keeps_them():
    torch.set_default_dtype(torch.float32)
    for options in (dict(foreach=True), dict(foreach=False)):
        start, loss = perceptron()
        leaves = leaves_of(start)
        optimizer = optim.NAdam(list(leaves.items()), **options)
        go_on(optimizer, leaves, loss, 3)
        before = copy.deepcopy(entries(optimizer, leaves))
        to_torch(from_torch(optimizer)[1], optimizer)
        assert_same_tree(entries(optimizer, leaves), before)
        assert before["0.bias"]["mu_product"].dtype == torch.float32
        go_on(optimizer, leaves, loss, 1)


def test_fused_optimizers_keep_the_step_in_float32():
    start, loss = perceptron()
    leaves = leaves_of(start)
    optimizer = optim.Adam(list(leaves.items()), fused=True)
    go_on(optimizer, leaves, loss, 3)
    before = copy.deepcopy(entries(optimizer, leaves))
    tx, state = from_torch(optimizer)
    to_torch(state, optimizer)
    assert_same_tree(entries(optimizer, leaves), before)
    found, _ = go_on_with(tx, state, values(leaves), loss, 5)
    go_on(optimizer, leaves, loss, 5)
    assert_close(found, values(leaves), rtol=1e-9)


def test_after_an_error_nothing_has_changed():
    start, loss = perceptron()
    leaves = leaves_of(start)
    groups = [{"params": [pair], "momentum": 0.9} for pair in leaves.items()]
    optimizer = optim.SGD(groups)
    go_on(optimizer, leaves, loss, 2)
    before = copy.deepcopy(entries(optimizer, leaves))
    _, state = from_torch(optimizer)
    *others, ((), last, ()) = state
    short = last._replace(momentum={"1.weight": torch.ones(3)})
    broken = (*others, ((), short, ()))
    with pytest.raises(ValueError, match=r"to_torch\(state\): expected shape"):
        to_torch(broken, optimizer)
    with pytest.raises(ValueError, match=r"to_torch\(state\): expected the names"):
        to_torch(state[:-1], optimizer)
    assert_same_tree(entries(optimizer, leaves), before)


# What is refused.


class Own(optim.Adam):
    pass


def linear_groups(kind=optim.Adam, **options):
    model = nn.Linear(2, 1)
    return kind(model.named_parameters(), **options), model


@pytest.mark.parametrize("move", ["from_torch", "to_torch"])
@pytest.mark.parametrize("kind", [optim.LBFGS, optim.SparseAdam, Own])
def test_other_optimizers_are_refused(move, kind):
    optimizer, model = linear_groups(kind)
    message = rf"{move}\(optimizer of class {kind.__name__}\): expected one of SGD, Ad"
    with pytest.raises(TypeError, match=message):
        call(move, optimizer, dict(model.named_parameters()))


def call(move, optimizer, params=None):
    if move == "from_torch":
        return from_torch(optimizer, params)
    return to_torch((), optimizer, params)


@pytest.mark.parametrize("move", ["from_torch", "to_torch"])
def test_parameters_need_one_name_each(move):
    model = nn.Linear(2, 1)
    optimizer = optim.Adam(model.parameters())
    message = rf"{move}\(params=None\): expected the names of the parameters, got an"
    with pytest.raises(ValueError, match=message):
        call(move, optimizer)
    with pytest.raises(TypeError, match=rf"{move}\(params\): expected a dictionary"):
        call(move, optimizer, list(model.parameters()))
    message = rf"{move}\(params\): expected one name .* got no name for one of shape "
    with pytest.raises(ValueError, match=message + r"\(1,\) in group 0"):
        call(move, optimizer, {"weight": model.weight})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = optim.Adam([("a", model.bias), ("a", model.bias)])
    with pytest.raises(ValueError, match="got 'a' a second time"):
        call(move, optimizer)


@pytest.mark.parametrize("move", ["from_torch", "to_torch"])
def test_frozen_models_and_differentiable_optimizers_are_refused(move):
    optimizer, model = linear_groups()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="parameters that require gradients, got none"):
        call(move, optimizer)
    optimizer, _ = linear_groups(differentiable=True)
    with pytest.raises(ValueError, match="with differentiable=True.: expected False"):
        call(move, optimizer)


def test_complex_parameters_are_refused():
    optimizer = optim.Adam([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])
    with pytest.raises(TypeError, match="expected real floating-point parameters"):
        from_torch(optimizer)


def test_options_that_changed_are_refused():
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
    tx, state = from_torch(optimizer)
    found, _ = go_on_with(tx, state, values(leaves), loss, 5)
    go_on(optimizer, leaves, loss, 5)
    assert_close(found, values(leaves))


# As an optimizer of torch.

TRANSFORMATIONS = {
    "sgd": sgd(1e-3, momentum=0.9, nesterov=True),
    "adam": adam(1e-2, weight_decay=0.1),
    "amsgrad": adamw(1e-2, amsgrad=True),
    "scheduled": adamw(lambda count: 0.01 / (1 + count.double())),
    "lion": lion(1e-3),
    "clipped": chain(clip_by_global_norm(0.1), adam(1e-2)),
    "injected": inject_hyperparams(adamw, lr=1e-2, betas=(0.8, 0.9)),
    "partition": partition({"*.bias": sgd(0.1), "*": adam(1e-2)}),
    "lookahead": lookahead(sgd(1e-2), sync_period=2),
    "averaged": chain(adam(1e-2), ema_parameters(0.9)),
    "asgd": asgd(1e-3, t0=0.0),
    "schedule_free": schedule_free_adamw(1e-2),
}


def assert_same_saved(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert_same_tree(found["state"], expected["state"])


def saved(optimizer):
    """A state dictionary that went through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_steps_as_an_optimizer_of_torch(name):
    start, loss = perceptron()
    leaves = leaves_of(start)
    optimizer = as_torch(TRANSFORMATIONS[name], leaves)
    go_on(optimizer, leaves, loss, 20)
    # The parameters have been written in place: they are still the optimizer's own.
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, leaves.values(), strict=True))
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in held)
    expected, state = train(TRANSFORMATIONS[name], start, loss, 20)
    assert_close(values(leaves), expected)
    found = optimizer.state_dict()["state"]
    wanted = state_dict(state)
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_adapted_optimizer_resumes_bit_for_bit_from_a_file(name):
    start, loss = perceptron()
    leaves = leaves_of(start)
    optimizer = as_torch(TRANSFORMATIONS[name], leaves.items())
    assert optimizer.state_dict()["state"] == {}
    # As accelerate does when it prepares an optimizer.
    optimizer.load_state_dict(saved(optimizer))
    go_on(optimizer, leaves, loss, 5)
    twins, kept = leaves_of(leaves), saved(optimizer)
    alive = optimizer.state_dict()
    other = as_torch(TRANSFORMATIONS[name], twins)
    other.load_state_dict(alive)
    go_on(optimizer, leaves, loss, 5)
    go_on(other, twins, loss, 5)
    # Later steps have not changed what was returned before.
    assert_same_saved(alive, kept)
    assert_same_tree(values(twins), values(leaves))
    assert_same_saved(other.state_dict(), optimizer.state_dict())


def test_the_state_is_made_of_the_parameters_of_the_first_step():
    model = nn.Linear(2, 1)
    optimizer = as_torch(chain(sgd(0.5), ema_parameters(0.5)), model.named_parameters())
    loaded = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    model.load_state_dict(loaded)
    optimizer.step()
    assert averaged_parameters(optimizer._tree)["bias"] == 1.0


def test_a_module_trains_with_a_closure_and_parameters_without_gradient_stay():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = as_torch(adam(0.1, weight_decay=0.1), model.named_parameters())
    before = values(dict(model.named_parameters()))

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        value = model[1](torch.ones(3)).sum()
        value.backward()
        return value

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert optimizer.step() is None
    after = dict(model.named_parameters())
    moved = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert moved == {"1.weight", "1.bias"}


def test_bfloat16_parameters_round_once():
    leaf = nn.Parameter(torch.linspace(-3, 3, 32).bfloat16())
    tx, start = adam(0.1), {"w": leaf.detach().clone()}
    optimizer = as_torch(tx, {"w": leaf})
    leaf.grad = torch.linspace(1, 2, 32).bfloat16()
    expected, _ = step(tx, {"w": leaf.grad}, tx.init(start), start)
    optimizer.step()
    assert torch.equal(leaf, expected["w"])


def test_a_loss_scaler_of_torch_skips_and_makes_steps():
    leaf = nn.Parameter(torch.ones(2))
    optimizer = as_torch(sgd(0.5), {"w": leaf})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(leaf.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert leaf.tolist() == [0.5, 0.5]
    leaf.grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert leaf.tolist() == [0.5, 0.5]


# Schedulers of torch.

SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=30),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
}
MAKERS = {
    "sgd": (partial(sgd, nesterov=True), optim.SGD, dict(lr=1e-2, momentum=0.9)),
    "adamw": (adamw, optim.AdamW, dict(lr=1e-2, betas=(0.8, 0.9))),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_of_torch_move_injected_hyperparameters(name, scheduler):
    make, kind, options = MAKERS[name]
    start, loss = perceptron()
    ours, theirs = leaves_of(start), leaves_of(start)
    fixed = {"nesterov": True} if kind is optim.SGD else {}
    pairs = [
        (as_torch(inject_hyperparams(make, **options), ours), ours),
        (kind(theirs.values(), **options, **fixed), theirs),
    ]
    rates = []
    for optimizer, leaves in pairs:
        group = optimizer.param_groups[0]
        assert {key: group[key] for key in options} == options
        schedule = SCHEDULERS[scheduler](optimizer)
        for _ in range(20):
            go_on(optimizer, leaves, loss, 1)
            schedule.step()
            rates.append([group[key] for key in options])
    assert rates[:20] == rates[20:]
    assert rates[0] != rates[19]
    assert_close(values(ours), values(theirs))


def test_a_plateau_of_torch_lowers_the_rate():
    tx = inject_hyperparams(sgd, lr=0.5)
    optimizer = as_torch(tx, {"w": nn.Parameter(torch.ones(1))})
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(3):
        schedule.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_scheduled_run_resumes_from_files():
    def made(leaves):
        tx = inject_hyperparams(adam, lr=1e-2, betas=(0.9, 0.99))
        optimizer = as_torch(tx, leaves)
        return optimizer, SCHEDULERS["OneCycleLR"](optimizer)

    def both(optimizer, schedule, leaves, steps):
        for _ in range(steps):
            go_on(optimizer, leaves, loss, 1)
            schedule.step()

    start, loss = perceptron()
    leaves = leaves_of(start)
    optimizer, schedule = made(leaves)
    both(optimizer, schedule, leaves, 7)
    twins = leaves_of(leaves)
    other, again = made(twins)
    other.load_state_dict(saved(optimizer))
    again.load_state_dict(schedule.state_dict())
    both(optimizer, schedule, leaves, 7)
    both(other, again, twins, 7)
    assert_same_tree(values(twins), values(leaves))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    "tx",
    [
        adam(1e-2),
        inject_hyperparams(adam, lr=lambda count: 0.1, betas=(0.9, 0.99)),
        chain(inject_hyperparams(adam, lr=1e-2)),
    ],
)
def test_schedulers_refuse_where_there_is_no_rate_to_set(tx, scheduler):
    optimizer = as_torch(tx, {"w": nn.Parameter(torch.ones(1))})
    assert "lr" not in optimizer.param_groups[0]
    with pytest.raises((KeyError, ValueError), match="lr|cycle_momentum"):
        SCHEDULERS[scheduler](optimizer)


def test_schedules_of_the_transformation_run_and_cannot_be_overruled():
    tx = inject_hyperparams(sgd, lr=lambda count: 0.5 ** count.double(), momentum=0.9)
    leaf = nn.Parameter(torch.zeros(1))
    optimizer = as_torch(tx, {"w": leaf})
    assert optimizer.param_groups[0]["momentum"] == 0.9
    for momentum in (0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        leaf.grad = torch.ones(1)
        optimizer.step()
    assert leaf.item() == -1.0 - 0.5 * 1.5
    optimizer.param_groups[0]["lr"] = 0.1
    message = r"expected no 'lr' in param_groups, got 0.1, which the transformation"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert leaf.item() == -1.75


# What an adapted optimizer refuses.


def test_a_rate_set_by_hand_that_nothing_reads_is_refused():
    optimizer = as_torch(adam(), {"w": nn.Parameter(torch.ones(1))})
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match=r"as_torch.*step: expected no 'lr'.*inject"):
        optimizer.step()


def test_parameters_come_in_pairs_under_names_of_their_own():
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match="pairs of a name and a parameter, got a Param"):
        as_torch(adam(), model.parameters())
    pairs = [("a", model.weight), ("a", model.bias)]
    with pytest.raises(ValueError, match="got one name for several"):
        as_torch(adam(), pairs)


def test_groups_cannot_be_added():
    optimizer = as_torch(adam(), {"w": nn.Parameter(torch.ones(1))})
    with pytest.raises(ValueError, match=r"add_param_group: expected one group"):
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(1)))]})


def test_sparse_gradients_are_refused_before_anything_changes():
    model = nn.Embedding(4, 2, sparse=True)
    before = model.weight.detach().clone()
    optimizer = as_torch(adam(), model.named_parameters())
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients, got a sparse one in 'wei"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_states_of_others_are_refused_and_change_nothing():
    leaves = {"w": nn.Parameter(torch.ones(2))}
    optimizer = as_torch(adam(0.1), leaves)
    other = as_torch(sgd(0.1, momentum=0.9), leaves)
    for each in (optimizer, other):
        leaves["w"].grad = torch.ones(2)
        each.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="load_state_dict: expected the names"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_saved(optimizer.state_dict(), before)


def test_a_copy_of_an_adapted_optimizer_is_one_of_its_own():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = as_torch(adam(0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other, copied = copy.deepcopy((model, optimizer))
    before = model.weight.clone()
    other(torch.ones(1, 2)).sum().backward()  # copies come without gradients
    copied.step()
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert torch.equal(model.weight, other.weight)
    assert not torch.equal(model.weight, before)


def test_parameters_that_share_memory_without_being_one_are_refused():
    encoder, decoder = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    decoder.weight.data = encoder.weight.data
    named = {"encoder": encoder.weight, "decoder": decoder.weight}
    with pytest.raises(ValueError, match="memory of their own.*'encoder'.*'decoder'"):
        as_torch(sgd(0.1), named)


def test_parameters_without_memory_share_none():
    model = nn.Linear(2, 2, device="meta")
    assert len(as_torch(sgd(0.1), model.named_parameters()).param_groups) == 1

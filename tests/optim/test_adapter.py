"""Transformations as optimizers of `torch.optim`, with its schedulers and files."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from tests.optim.optimizers import COUNTED, TORCH, UNCOUNTED
from tests.optim.problems import go_on, leaves_of, perceptron, train, values
from tests.oracle import assert_exact
from vgrad import optim as ours
from vgrad.optim import (
    adam,
    adamw,
    as_torch,
    asgd,
    averaged_parameters,
    chain,
    clip_by_global_norm,
    ema_parameters,
    inject_hyperparams,
    lion,
    lookahead,
    partition,
    schedule_free_adamw,
    sgd,
    state_dict,
)

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
    assert_exact(values(leaves), expected, 1e-12)
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
    assert_exact(alive, kept, 0)
    assert_exact(values(twins), values(leaves), 0)
    assert_exact(other.state_dict(), optimizer.state_dict(), 0)


def test_the_state_is_made_of_the_parameters_of_the_first_step():
    model = nn.Linear(2, 1)
    optimizer = as_torch(chain(sgd(0.5), ema_parameters(0.5)), model.named_parameters())
    loaded = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    model.load_state_dict(loaded)
    model.bias.grad = torch.zeros(1)
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
    tx = inject_hyperparams(make, **options)
    expected = kind(theirs.values(), **options, **fixed)
    rates = []
    for optimizer, leaves in ((as_torch(tx, ours), ours), (expected, theirs)):
        group = optimizer.param_groups[0]
        assert {key: group[key] for key in options} == options
        schedule = SCHEDULERS[scheduler](optimizer)
        for count in range(20):
            if count == 10 and optimizer is not expected:
                kept, former = saved(optimizer), schedule.state_dict()
                optimizer = as_torch(tx, leaves)
                schedule = SCHEDULERS[scheduler](optimizer)
                optimizer.load_state_dict(kept)
                schedule.load_state_dict(former)
            go_on(optimizer, leaves, loss, 1)
            schedule.step()
            rates.append([optimizer.param_groups[0][key] for key in options])
    assert rates[:20] == rates[20:]
    assert rates[0] != rates[19]
    assert_exact(values(ours), values(theirs), 1e-12)


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

MODEL = nn.Linear(2, 2)
FLAT = torch.arange(12.0)
SHARED = {"encoder": MODEL.weight, "decoder": nn.Parameter(MODEL.weight.data)}


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (MODEL.parameters(), TypeError, "pairs of a name and a parameter, got a Param"),
        ([("a", p) for p in MODEL.parameters()], ValueError, "one name for several"),
        (SHARED, ValueError, "memory of their own.*'encoder'.*'decoder'"),
        (
            {"a": FLAT[:8], "c": FLAT[8:], "b": FLAT[2:4]},
            ValueError,
            "of their own, got 'a' and 'b', where",
        ),
        ({"a": FLAT[::2], "b": FLAT[3:6]}, ValueError, "own, got 'a' and 'b', where"),
        ({"a": FLAT[:1].expand(3)}, ValueError, "of their own, got 'a', where"),
        ({"a": FLAT.as_strided((3, 3), (1, 1))}, ValueError, "own, got 'a', where"),
        (
            {"a": FLAT[:8], "b": FLAT[4:].view(torch.float64)},
            ValueError,
            "got 'a' and 'b', where",
        ),
    ],
)
def test_parameters_come_in_pairs_under_names_and_in_memory_of_their_own(
    params, error, message
):
    with pytest.raises(error, match=message):
        as_torch(adam(), params)


def test_other_groups_and_rates_that_nothing_reads_are_refused():
    optimizer = as_torch(adam(), {"w": nn.Parameter(torch.ones(1))})
    with pytest.raises(ValueError, match=r"add_param_group: expected one group"):
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(1)))]})
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match=r"as_torch.*step: expected no 'lr'.*inject"):
        optimizer.step()


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
    assert_exact(optimizer.state_dict(), before, 0)


def test_a_copy_of_an_adapted_optimizer_is_one_of_its_own():
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


def test_parameters_without_memory_share_none():
    model = nn.Linear(2, 2, device="meta")
    assert len(as_torch(sgd(0.1), model.named_parameters()).param_groups) == 1


@pytest.mark.parametrize("tx", [sgd(0.5), lion(0.5)])
def test_parts_of_one_memory_that_do_not_overlap_are_stepped_there(tx):
    flat = torch.zeros(3, 8)
    params = {"even": flat[:, :5:2], "odd": flat[:, 1:4:2], "rest": flat[:, 5:].t()}
    optimizer = as_torch(tx, params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(flat, torch.full((3, 8), -0.5))


# Parameters that are trained later. Reference: the optimizers of torch.

LATER = [{"a"}, {"a"}, {"a", "b"}, {"a", "b"}]
GONE = [{"a", "b"}, {"a", "b"}, {"a"}, {"a"}]
BACK = [{"a", "b"}, {"a"}, {"a", "b"}, {"b"}]
NEVER = [{"a"}, {"a"}, set(), {"a"}, {"a"}]


def stepped(optimizer, leaves, plan):
    for number, names in enumerate(plan):
        for name, leaf in leaves.items():
            grad = torch.linspace(-1, 2, 6).double().view(2, 3) * (number + 1)
            leaf.grad = grad if name in names else None
        optimizer.step()


def both(name, options):
    """Return our optimizer and that of torch, each with its parameters."""
    make, kind = TORCH[name]
    start = {key: torch.ones(2, 3, dtype=torch.float64) for key in "ab"}
    mine, theirs = leaves_of(start), leaves_of(start)
    tx = make(0.1, **options)
    return (as_torch(tx, mine), mine), (kind(theirs.values(), 0.1, **options), theirs)


@pytest.mark.parametrize(("name", "options"), COUNTED)
@pytest.mark.parametrize("plan", [GONE, NEVER], ids=["gone", "never"])
def test_parameters_that_stay_behind_stay(name, options, plan):
    pairs = both(name, options)
    for optimizer, leaves in pairs:
        stepped(optimizer, leaves, plan)
    # NAdam and ASGD of torch keep numbers in float32.
    assert_exact(values(pairs[0][1]), values(pairs[1][1]), 1e-6)


@pytest.mark.parametrize(("name", "options"), COUNTED)
@pytest.mark.parametrize("plan", [LATER, BACK], ids=["later", "back"])
def test_counts_that_torch_has_for_each_parameter_are_refused(name, options, plan):
    (optimizer, leaves), _ = both(name, options)
    first = next(n for n in range(1, 4) if "b" not in plan[n - 1] and "b" in plan[n])
    stepped(optimizer, leaves, plan[:first])
    before = values(leaves)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"step: expected gradients .* of 'b': torch"
        ):
            stepped(optimizer, leaves, plan[first : first + 1])
    assert_exact(values(leaves), before, 0)


@pytest.mark.parametrize(("name", "options"), UNCOUNTED)
@pytest.mark.parametrize("plan", [LATER, GONE, BACK, NEVER])
def test_a_parameter_may_come_and_go_where_steps_are_not_counted(name, options, plan):
    pairs = both(name, options)
    for optimizer, leaves in pairs:
        stepped(optimizer, leaves, plan)
    assert_exact(values(pairs[0][1]), values(pairs[1][1]), 1e-12)


@pytest.mark.parametrize(
    ("tx", "refused"),
    [
        (lookahead(sgd(0.1, momentum=0.9)), False),
        (sgd(lambda count: 0.1 / (1 + count.double()), momentum=0.9), False),
        (lion(lambda count: 0.1 / (1 + count.double())), False),
        (ours.chain(sgd(0.1, momentum=0.9), ema_parameters(0.9)), False),
        (inject_hyperparams(sgd, lr=0.1, momentum=0.9), False),
        (ours.multi_steps(sgd(0.1, momentum=0.9), 3), False),
        (ours.multi_steps(sgd(0.1, momentum=0.9, dampening=0.5), 3), True),
        (ours.multi_steps(adam(0.1), 2), True),
        (inject_hyperparams(adam, lr=0.1), True),
        (partition({"a": sgd(0.1), "*": adam(0.1)}), True),
        (lookahead(ours.masked(adam(0.1), ["b"])), True),
    ],
)
def test_counts_are_found_inside_of_other_transformations(tx, refused):
    leaves = leaves_of({name: torch.ones(2, 3).double() for name in "ab"})
    optimizer = as_torch(tx, leaves)
    stepped(optimizer, leaves, [{"a"}])
    if not refused:
        return stepped(optimizer, leaves, [{"a", "b"}])
    with pytest.raises(ValueError, match="torch counts the steps of each parameter"):
        stepped(optimizer, leaves, [{"a", "b"}])


def test_parameters_that_are_behind_are_those_of_a_file_and_of_a_copy():
    (optimizer, leaves), _ = both("adam", {})
    stepped(optimizer, leaves, [{"a"}])
    copied = copy.deepcopy(optimizer)
    held = dict(zip("ab", copied.param_groups[0]["params"], strict=True))
    other = as_torch(adam(0.1), leaves)
    other.load_state_dict(saved(optimizer))
    for each, own in ((copied, held), (other, leaves)):
        assert each.param_groups[0]["behind"] == ["b"]
        with pytest.raises(
            ValueError, match="torch counts the steps of each parameter"
        ):
            stepped(each, own, [{"a", "b"}])
    earlier = saved(optimizer)
    del earlier["param_groups"][0]["behind"]
    other.load_state_dict(earlier)
    stepped(other, leaves, [{"a"}])

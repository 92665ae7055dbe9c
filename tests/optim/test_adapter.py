"""Transformations as optimizers of `torch.optim`, with its schedulers and files."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.optim.optimizers import COUNTED, TORCH, UNCOUNTED, each
from tests.optim.problems import go_on, leaves_of, perceptron, train, values
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.optim import adam, as_torch, chain, lion, sgd


def saved(optimizer):
    """A state dictionary that went through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def one(value=1.0):
    return {"w": nn.Parameter(torch.full((2,), value))}


@each(adapts=True)
def test_a_transformation_steps_and_resumes_as_an_optimizer_of_torch(case):
    (start, loss), tx = case.problem(), case.tx()
    leaves = leaves_of(start)
    optimizer = as_torch(tx, leaves.items())
    assert optimizer.state_dict()["state"] == {}
    # As accelerate does when it prepares an optimizer.
    optimizer.load_state_dict(saved(optimizer))
    go_on(optimizer, leaves, loss, 10)
    # The parameters have been written in place: they are still the optimizer's own.
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, leaves.values(), strict=True))
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in held)
    twins, kept, alive = leaves_of(leaves), saved(optimizer), optimizer.state_dict()
    other = as_torch(tx, twins)
    other.load_state_dict(alive)
    go_on(optimizer, leaves, loss, 10)
    go_on(other, twins, loss, 10)
    # Later steps have not changed the dictionary that was returned before.
    assert_exact(alive, kept, 0)
    assert_exact(values(twins), values(leaves), 0)
    assert_exact(other.state_dict(), optimizer.state_dict(), 0)
    expected, state = train(tx, start, loss, 20)
    assert_exact(values(leaves), expected, 1e-12)
    assert_exact(optimizer.state_dict()["state"], optim.state_dict(state), 1e-9)


def test_the_state_is_made_of_the_parameters_of_the_first_step():
    tx, model = chain(sgd(0.5), optim.ema_parameters(0.5)), nn.Linear(2, 1)
    optimizer = as_torch(tx, model.named_parameters())
    loaded = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    model.load_state_dict(loaded)
    model.bias.grad = torch.zeros(1)
    optimizer.step()
    state = optim.load_state_dict(tx.init(loaded), optimizer.state_dict()["state"])
    assert optim.averaged_parameters(state)["bias"] == 1.0


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


# Schedulers of torch.

SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=30),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
}
every_scheduler = pytest.mark.parametrize(
    "scheduler", SCHEDULERS.values(), ids=SCHEDULERS
)


@every_scheduler
@pytest.mark.parametrize(("name", "options", "fixed"), [
    ("sgd", dict(lr=1e-2, momentum=0.9), dict(nesterov=True)),
    ("adamw", dict(lr=1e-2, betas=(0.8, 0.9)), {}),
])  # fmt: skip
def test_schedulers_of_torch_move_injected_hyperparameters(
    name, options, fixed, scheduler
):
    make, kind = TORCH[name]
    start, loss = perceptron()
    ours, theirs = leaves_of(start), leaves_of(start)
    tx = optim.inject_hyperparams(partial(make, **fixed), **options)
    expected = kind(theirs.values(), **options, **fixed)
    rates = []
    for optimizer, leaves in ((as_torch(tx, ours), ours), (expected, theirs)):
        group = optimizer.param_groups[0]
        assert {key: group[key] for key in options} == options
        schedule = scheduler(optimizer)
        for count in range(20):
            if count == 10 and optimizer is not expected:
                kept, former = saved(optimizer), schedule.state_dict()
                optimizer = as_torch(tx, leaves)
                schedule = scheduler(optimizer)
                optimizer.load_state_dict(kept)
                schedule.load_state_dict(former)
            go_on(optimizer, leaves, loss, 1)
            schedule.step()
            rates.append([optimizer.param_groups[0][key] for key in options])
    assert rates[:20] == rates[20:]
    assert rates[0] != rates[19]
    assert_exact(values(ours), values(theirs), 1e-12)


def test_schedules_of_the_transformation_run_and_cannot_be_overruled():
    tx = optim.inject_hyperparams(
        sgd, lr=lambda count: 0.5 ** count.double(), momentum=0.9
    )
    leaves = one(0.0)
    optimizer = as_torch(tx, leaves)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    leaves["w"].grad = torch.ones(2)
    for momentum in (0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
    expected = [-1.0 - 0.5 * 1.5] * 2
    assert leaves["w"].tolist() == expected
    optimizer.param_groups[0]["lr"] = 0.1
    message = r"expected no 'lr' in param_groups, got 0.1, which the transformation"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert leaves["w"].tolist() == expected


# What an adapted optimizer refuses.

MODEL = nn.Linear(2, 2)
FLAT = torch.arange(12.0)
MEMORY = "of their own, got 'a' and 'b', where"


@pytest.mark.parametrize(("params", "error", "message"), [
    (MODEL.parameters(), TypeError, "pairs of a name and a parameter, got a Param"),
    ([("a", p) for p in MODEL.parameters()], ValueError, "one name for several"),
    ({"a": MODEL.weight, "b": nn.Parameter(MODEL.weight.data)}, ValueError, MEMORY),
    ({"a": FLAT[:8], "c": FLAT[8:], "b": FLAT[2:4]}, ValueError, MEMORY),
    ({"a": FLAT[::2], "b": FLAT[3:6]}, ValueError, MEMORY),
    ({"a": FLAT[:1].expand(3)}, ValueError, "of their own, got 'a', where"),
    ({"a": FLAT.as_strided((3, 3), (1, 1))}, ValueError, "own, got 'a', where"),
    ({"a": FLAT[:8], "b": FLAT[4:].view(torch.float64)}, ValueError, MEMORY),
])  # fmt: skip
def test_parameters_come_in_pairs_under_names_and_in_memory_of_their_own(
    params, error, message
):
    with pytest.raises(error, match=message):
        as_torch(adam(), params)


def test_other_groups_sparse_gradients_and_states_of_others_are_refused():
    optimizer = as_torch(adam(), one())
    with pytest.raises(ValueError, match=r"add_param_group: expected one group"):
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(1)))]})

    model = nn.Embedding(4, 2, sparse=True)
    before = model.weight.detach().clone()
    sparse = as_torch(adam(), model.named_parameters())
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients, got a sparse one in 'wei"):
        sparse.step()
    assert torch.equal(model.weight, before)

    leaves = one()
    leaves["w"].grad = torch.ones(2)
    mine, other = as_torch(adam(0.1), leaves), as_torch(sgd(0.1, momentum=0.9), leaves)
    mine.step()
    other.step()
    before = mine.state_dict()
    with pytest.raises(ValueError, match="load_state_dict: expected the names"):
        mine.load_state_dict(other.state_dict())
    assert_exact(mine.state_dict(), before, 0)


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


@pytest.mark.parametrize("tx", [sgd(0.5), lion(0.5)])
def test_parts_of_one_memory_that_do_not_overlap_are_stepped_there(tx):
    meta = nn.Linear(2, 2, device="meta")  # whose parameters share none
    assert len(as_torch(tx, meta.named_parameters()).param_groups) == 1
    flat = torch.zeros(3, 8)
    params = {"even": flat[:, :5:2], "odd": flat[:, 1:4:2], "rest": flat[:, 5:].t()}
    optimizer = as_torch(tx, params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(flat, torch.full((3, 8), -0.5))


# Parameters that are trained later. Reference: the optimizers of torch.

PLANS = {
    "later": [{"a"}, {"a"}, {"a", "b"}, {"a", "b"}],
    "gone": [{"a", "b"}, {"a", "b"}, {"a"}, {"a"}],
    "back": [{"a", "b"}, {"a"}, {"a", "b"}, {"b"}],
    "never": [{"a"}, {"a"}, set(), {"a"}, {"a"}],
}
MESSAGE = r"step: expected gradients .* of 'b': torch counts the steps of each param"


def pair():
    return leaves_of({key: torch.ones(2, 3, dtype=torch.float64) for key in "ab"})


def stepped(optimizer, leaves, plan):
    for number, names in enumerate(plan):
        for name, leaf in leaves.items():
            grad = torch.linspace(-1, 2, 6).double().view(2, 3) * (number + 1)
            leaf.grad = grad if name in names else None
        optimizer.step()


@pytest.mark.parametrize(("name", "options", "plan", "tolerance"), [
    *((*row, plan, 1e-12) for row in UNCOUNTED for plan in PLANS),
    # NAdam and ASGD of torch keep numbers in float32.
    *((*row, plan, 1e-6) for row in COUNTED for plan in ("gone", "never")),
])  # fmt: skip
def test_parameters_stay_behind_or_come_and_go_where_steps_are_not_counted(
    name, options, plan, tolerance
):
    make, kind = TORCH[name]
    mine, theirs = pair(), pair()
    stepped(as_torch(make(0.1, **options), mine), mine, PLANS[plan])
    stepped(kind(theirs.values(), 0.1, **options), theirs, PLANS[plan])
    assert_exact(values(mine), values(theirs), tolerance)


@pytest.mark.parametrize(("name", "options"), COUNTED)
@pytest.mark.parametrize("plan", ["later", "back"])
def test_counts_that_torch_has_for_each_parameter_are_refused(name, options, plan):
    leaves = pair()
    optimizer = as_torch(TORCH[name][0](0.1, **options), leaves)
    stepped(optimizer, leaves, PLANS[plan][:2])
    before = values(leaves)
    for _ in range(2):
        with pytest.raises(ValueError, match=MESSAGE):
            stepped(optimizer, leaves, PLANS[plan][2:3])
    assert_exact(values(leaves), before, 0)


@pytest.mark.parametrize(("tx", "refused"), [
    (optim.lookahead(sgd(0.1, momentum=0.9)), False),
    (sgd(lambda count: 0.1 / (1 + count.double()), momentum=0.9), False),
    (lion(lambda count: 0.1 / (1 + count.double())), False),
    (chain(sgd(0.1, momentum=0.9), optim.ema_parameters(0.9)), False),
    (optim.inject_hyperparams(sgd, lr=0.1, momentum=0.9), False),
    (optim.multi_steps(sgd(0.1, momentum=0.9), 3), False),
    (optim.multi_steps(sgd(0.1, momentum=0.9, dampening=0.5), 3), True),
    (optim.multi_steps(adam(0.1), 2), True),
    (optim.inject_hyperparams(adam, lr=0.1), True),
    (optim.partition({"a": sgd(0.1), "*": adam(0.1)}), True),
    (optim.lookahead(optim.masked(adam(0.1), ["b"])), True),
])  # fmt: skip
def test_transformations_around_others_have_their_counts(tx, refused):
    assert tx.counted is refused


def test_parameters_that_are_behind_are_those_of_a_file_and_of_a_copy():
    leaves = pair()
    optimizer, other = as_torch(adam(0.1), leaves), as_torch(adam(0.1), leaves)
    stepped(optimizer, leaves, [{"a"}])
    copied = copy.deepcopy(optimizer)
    held = dict(zip("ab", copied.param_groups[0]["params"], strict=True))
    other.load_state_dict(saved(optimizer))
    for twin, own in ((copied, held), (other, leaves)):
        assert twin.param_groups[0]["behind"] == ["b"]
        with pytest.raises(ValueError, match=MESSAGE):
            stepped(twin, own, [{"a", "b"}])
    earlier = saved(optimizer)
    del earlier["param_groups"][0]["behind"]
    other.load_state_dict(earlier)
    stepped(other, leaves, [{"a"}])

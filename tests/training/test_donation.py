"""Optimizers of members that may write into the memory of their arguments."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.optim.problems import double
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.ensemble import for_members
from vgrad.training import EnsembleState, ensemble_train_step

E, B = 3, 4


OPTIMIZERS = {
    "sgd": for_members(optim.sgd, lr=0.1, momentum=0.9),
    "adam": for_members(optim.adam(0.01, weight_decay=0.1)),
    "adamw, schedule": optim.adamw(optim.schedules.linear(0.01, 10)),
    "adamw, rates": for_members(optim.adamw, lr=double([0.01, 0.02, 0.05])),
    "adam, betas": for_members(
        optim.adam, lr=0.01, betas=(double([0.9, 0.8, 0.7]), 0.99)
    ),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1)),
}
IN_PLACE = [("sgd", 5), ("adam", 5), ("adamw, rates", 3000)]


def run(name, hidden, *, donate, spoiled):
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        for _ in range(E)
    ]
    fmodel, params, buffers = vgrad.stack(models)
    loss, tx = vgrad.batch_loss(fmodel, F.cross_entropy), OPTIMIZERS[name]
    state = EnsembleState.create(tx, params, buffers, seed=0)
    step = ensemble_train_step(loss, tx, in_dims=(0, None), donate=donate)
    y, skipped, places = torch.arange(B) % 3, torch.zeros(E), set()
    for number, x in enumerate(torch.randn(10, B, 4, dtype=torch.float64)):
        x = x.expand(E, B, 4).clone()
        if number == spoiled:
            x[1] = torch.nan
        state, metrics = step(state, x, y)
        skipped += metrics["skipped"]
        places.add(state.params["0.weight"].data_ptr())
    assert skipped.tolist() == [0, spoiled is not None, 0]
    if spoiled is None and (name, hidden) in IN_PLACE:
        assert (len(places) == 1) == donate
    return state.params, state.optimizer


@pytest.mark.parametrize("spoiled", [None, 4], ids=["finite", "spoiled"])
@pytest.mark.parametrize(
    ("name", "hidden"),
    [*((name, 5) for name in OPTIMIZERS), ("adamw, rates", 3000), ("clipped", 3000)],
)
def test_a_donated_run_has_the_numbers_of_a_pure_one(name, hidden, spoiled):
    """After a skipped step the members' counts differ, and each is stepped alone."""
    pure, donated = (
        run(name, hidden, donate=donate, spoiled=spoiled) for donate in (False, True)
    )
    assert_exact(donated, pure, 1e-11)


SIZE = 30_000  # of members that are large enough for a kernel call each


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (optim.adam, {"eps": torch.tensor([1e-8, 0.0])}),
        *(
            (optim.sgd, {"momentum": momentum, "dampening": dampening})
            for momentum in (0.9, *torch.tensor([[0.9, 0.0], [0.0, 0.9], [0.0, 0.0]]))
            for dampening in torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.5, 0.0]])
            if isinstance(momentum, torch.Tensor) or dampening.any()
        ),
    ],
)
def test_members_that_no_kernel_takes_are_stepped_once_too(make, numbers):
    tx, ends = for_members(make, lr=0.1, **numbers), []
    start = torch.randn(2, SIZE)
    for donate in (False, True):
        params = {"w": start.clone()}
        state = tx.init(params)
        for number in range(3):
            grads = {"w": start * (number + 1)}
            params, state = optim.step(tx, grads, state, params, donate=donate)
        ends.append((params, state.members))
    assert_exact(ends[1], ends[0], 1e-6)


RATES = for_members(optim.sgd, lr=double([0.1, 1.0]))


def donated_step(tx, params, grads=None):
    grads = grads or {name: torch.ones_like(value) for name, value in params.items()}
    return optim.step(tx, grads, tx.init(params), params, donate=True)[0]


def test_members_that_share_memory_are_not_stepped_in_place():
    start = torch.zeros(SIZE)
    stepped = donated_step(RATES, {"w": start.expand(2, SIZE)})["w"]
    assert stepped[:, 0].tolist() == pytest.approx([-0.1, -1.0])
    assert not start.any()


def test_gradients_in_the_memory_of_other_members_are_read_in_time():
    start = torch.arange(2.0 * SIZE, dtype=torch.float64).view(2, -1)
    expected = start - double([[0.1], [1.0]]) * start.flip(0)
    # The gradient of the second member is the first one's parameter.
    whole = torch.stack([start[1], start[0], start[1]])
    stepped = donated_step(RATES, {"w": whole[1:]}, {"w": whole[:2]})
    assert_exact(stepped["w"], expected, 1e-12)


def test_rates_that_are_learned_keep_their_graph():
    rates = torch.tensor([0.1, 1.0], requires_grad=True)
    tx = for_members(optim.sgd, lr=rates)
    assert donated_step(tx, {"w": torch.zeros(2, SIZE)})["w"].requires_grad


def half(momentum):
    if momentum == 0.5:
        raise ValueError("half")
    return optim.sgd(0.1, momentum=momentum)


def overlapping():
    """Each member alone is in memory of its own, but the second one of `a` is not."""
    flat = torch.arange(3.0 * SIZE)
    return {"a": flat[: 2 * SIZE].view(2, -1), "b": flat[SIZE:].view(2, -1)}


MOMENTUM = for_members(optim.sgd, lr=0.1, momentum=0.9)
REFUSED = {
    "an optimizer that cannot be made": (
        for_members(half, momentum=torch.tensor([0.9, 0.5])), "half"
    ),
    "fewer": (for_members(optim.sgd, lr=torch.ones(1)), "2 members as in .w.*hyperp"),
    "more": (for_members(optim.sgd, lr=torch.ones(11)), "2 members as in .w.*hyperp"),
    "overlap": (MOMENTUM, "'a' and 'b', which overlap"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_step_leaves_all_members_as_they_were(name):
    tx, message = REFUSED[name]
    params = overlapping() if name == "overlap" else {"w": torch.zeros(2, SIZE)}
    before = {name: value.clone() for name, value in params.items()}
    grads = {name: torch.ones_like(value) for name, value in params.items()}
    state = MOMENTUM.init(params)
    for donate in (False, True)[name not in ("fewer", "more") :]:
        with pytest.raises(ValueError, match=message):
            optim.step(tx, grads, state, params, donate=donate)
    assert_exact(params, before, 0)

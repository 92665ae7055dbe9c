"""Steps of all members that may write into what they are given."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.training import EnsembleState, ensemble_train_step

E, B = 3, 4
RATES = torch.tensor([0.01, 0.02, 0.05], dtype=torch.float64)

MAKERS = {
    "sgd": lambda: vgrad.for_members(optim.sgd, lr=0.1, momentum=0.9),
    "adam": lambda: vgrad.for_members(optim.adam(0.01, weight_decay=0.1)),
    "adamw, schedule": lambda: optim.adamw(optim.schedules.linear(0.01, 10)),
    "adamw, rates": lambda: vgrad.for_members(optim.adamw, lr=RATES),
    "adam, betas": lambda: vgrad.for_members(
        optim.adam, lr=0.01, betas=(torch.tensor([0.9, 0.8, 0.7]).double(), 0.99)
    ),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1)),
}


def problem(hidden):
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        for _ in range(E)
    ]
    fmodel, params, buffers = vgrad.stack(models)
    x = torch.randn(10, B, 4, dtype=torch.float64)
    return vgrad.batch_loss(fmodel, F.cross_entropy), params, buffers, x


def run(name, hidden, *, donate, spoiled=None):
    loss, params, buffers, x = problem(hidden)
    tx = MAKERS[name]()
    state = EnsembleState.create(tx, params, buffers, seed=0)
    step = ensemble_train_step(loss, tx, in_dims=(0, None), donate=donate)
    y, skipped, places = torch.arange(B) % 3, 0, []
    for number, batch in enumerate(x):
        given = batch.expand(E, B, 4).clone()
        if number == spoiled:
            given[1] = torch.nan
        state, metrics = step(state, given, y)
        skipped += metrics["skipped"]
        places.append(state.params["0.weight"].data_ptr())
    return state, skipped, places


@pytest.mark.parametrize("spoiled", [None, 4], ids=["finite", "spoiled"])
@pytest.mark.parametrize("hidden", [5, 3000], ids=["small", "large"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_donated_run_has_the_numbers_of_a_pure_one(name, hidden, spoiled):
    """After a skipped step the members' counts differ, and each is stepped alone."""
    pure, skipped, _ = run(name, hidden, donate=False, spoiled=spoiled)
    found, also_skipped, _ = run(name, hidden, donate=True, spoiled=spoiled)
    assert skipped.tolist() == also_skipped.tolist() == [0, spoiled is not None, 0]
    expected = pure.params, pure.optimizer
    assert_exact((found.params, found.optimizer), expected, 1e-11)


@pytest.mark.parametrize(
    ("name", "hidden"), [("sgd", 5), ("adam", 5), ("adamw, rates", 3000)]
)
def test_parameters_stay_where_they_are(name, hidden):
    assert len(set(run(name, hidden, donate=True)[2])) == 1
    assert len(set(run(name, hidden, donate=False)[2])) > 1


def test_a_state_that_was_given_away_is_empty():
    loss, params, buffers, x = problem(5)
    tx = optim.adam(0.1)
    state = EnsembleState.create(tx, params, buffers, seed=0)
    step = ensemble_train_step(loss, tx, donate=True)
    step(state, x[0], torch.arange(B) % 3)
    assert not state.params
    with pytest.raises(ValueError, match="expected at least one parameter, got none"):
        step(state, x[0], torch.arange(B) % 3)


LARGE = (2, 150, 150)


def one_step(tx, params, *, donate):
    given = {"w": params.clone() if params.is_contiguous() else params}
    grads = {"w": torch.ones(LARGE)}
    return optim.step(tx, grads, tx.init(given), given, donate=donate)[0]["w"]


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
    tx, runs = vgrad.for_members(make, lr=0.1, **numbers), []
    start = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))
    for donate in (False, True):
        params = {"w": start.clone()}
        state = tx.init(params)
        for number in range(3):
            grads = {"w": start * (number + 1)}
            params, state = optim.step(tx, grads, state, params, donate=donate)
        runs.append((params, state.members))
    assert_exact(runs[1], runs[0], 1e-6)


def test_members_that_share_memory_are_not_stepped_in_place():
    start = torch.zeros(LARGE[1:])
    tx = vgrad.for_members(optim.sgd, lr=torch.tensor([0.1, 1.0]))
    found = one_step(tx, start.expand(LARGE), donate=True)
    assert found[:, 0, 0].tolist() == pytest.approx([-0.1, -1.0])
    assert not start.any()


def test_an_optimizer_that_cannot_be_made_leaves_all_members_alone():
    def make(momentum):
        if momentum == 0.5:
            raise ValueError("half")
        return optim.sgd(0.1, momentum=momentum)

    tx = vgrad.for_members(make, momentum=torch.tensor([0.9, 0.5]))
    params = {"w": torch.zeros(LARGE)}
    state = vgrad.for_members(optim.sgd, lr=0.1, momentum=0.9).init(params)
    with pytest.raises(ValueError, match="half"):
        optim.step(tx, {"w": torch.ones(LARGE)}, state, params, donate=True)
    assert not params["w"].any()


def test_rates_that_are_learned_keep_their_graph():
    rates = torch.tensor([0.1, 1.0], requires_grad=True)
    tx = vgrad.for_members(optim.sgd, lr=rates)
    assert one_step(tx, torch.zeros(LARGE), donate=True).requires_grad


def test_a_donated_step_counts_the_members_like_a_pure_one():
    params = {"w": torch.ones(10, 20_000)}
    tx = vgrad.for_members(optim.sgd, lr=0.1, momentum=0.9)
    state = tx.init(params)
    for count in (1, 11):
        wrong = vgrad.for_members(optim.sgd, lr=torch.full((count,), 0.1), momentum=0.9)
        for donate in (False, True):
            with pytest.raises(ValueError, match="expected one number of members"):
                optim.step(wrong, params, state, params, donate=donate)
    assert torch.equal(params["w"], torch.ones(10, 20_000))


def test_members_inside_of_another_transformation_are_refused():
    params = {"w": torch.ones(3, 3, 2)}
    tx = optim.chain(vgrad.for_members(optim.clip_by_global_norm(1.0)), optim.sgd(0.1))
    with pytest.raises(ValueError, match="a single member.*Wrap the whole"):
        vgrad.for_members(tx).init(params)


def test_parameters_without_members_and_gradients_are_named_or_passed_over():
    tx = vgrad.for_members(optim.sgd, lr=torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match="member axis in 'w', got a scalar"):
        tx.init({"w": torch.tensor(1.0)})
    state = tx.init({"w": torch.ones(2)})
    assert tx.update({"w": None}, state)[0] == {"w": None}


@pytest.mark.parametrize("members", [False, True])
def test_metrics_that_are_parameters_stay_as_they_were(members):
    kind = vgrad.training.EnsembleState if members else vgrad.training.TrainState
    make = vgrad.training.ensemble_train_step if members else vgrad.training.train_step
    tx = vgrad.optim.sgd(0.1)
    loss = lambda p, b: (p["w"], {"w": p["w"]})  # noqa: E731
    state = kind.create(tx, {"w": torch.full((2,) if members else (), 3.0)}, {})
    before = state.params["w"].clone()
    _, metrics = make(loss, tx, donate=True, has_aux=True)(state)
    assert torch.equal(metrics["loss"], before)
    assert torch.equal(metrics["aux"]["w"], before)


SIZE = 30_000  # of members that are large enough for a kernel call each


def test_members_that_overlap_are_refused_before_one_is_stepped():
    """Each member alone is in memory of its own, but the second one of `a` is not."""
    flat = torch.arange(3.0 * SIZE, dtype=torch.float64)
    params = {"a": flat[: 2 * SIZE].view(2, -1), "b": flat[SIZE:].view(2, -1)}
    tx = vgrad.for_members(optim.sgd, lr=torch.tensor([0.1, 0.2]).double())
    grads, kept = {n: torch.ones_like(p) for n, p in params.items()}, flat.clone()
    with pytest.raises(ValueError, match="'a' and 'b', which overlap"):
        optim.step(tx, grads, tx.init(params), params, donate=True)
    assert torch.equal(flat, kept)


def test_gradients_in_the_memory_of_other_members_are_read_in_time():
    tx = vgrad.for_members(optim.sgd, lr=torch.tensor([0.1, 0.2]).double())
    start = torch.arange(2.0 * SIZE, dtype=torch.float64).view(2, -1)
    expected = start - torch.tensor([[0.1], [0.2]]).double() * start.flip(0)
    # The gradient of the second member is the first one's parameter.
    whole = torch.stack([start[1], start[0], start[1]])
    params, grads = {"w": whole[1:]}, {"w": whole[:2]}
    found, _ = optim.step(tx, grads, tx.init(params), params, donate=True)
    assert_exact(found["w"], expected, 1e-12)


BUFFERS = {
    "kept": lambda p: {"own": p["w"]},
    "in part": lambda p: {"own": p["w"][:, 1:]},
    "made": lambda p: {"own": torch.zeros_like(p["w"])},
}


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("kind", ["plain", "private", "members"])
def test_buffers_in_the_memory_of_parameters_stay_as_they_were(kind, name):
    class Loss:
        def __call__(self, params, buffers, *batch):
            return params["w"].square().sum()

        def with_buffers(self, params, buffers, *batch):
            new = {"own": params["w"].detach()} if name == "made" else buffers
            return self(params, buffers), new

    shape = (2, 4)  # of two members, or of one model
    params = {"w": torch.ones(shape, dtype=torch.float64)}
    make, batch = {
        "plain": (vgrad.training.train_step, ()),
        "private": (private, (torch.ones(4, 2, 4),)),
        "members": (ensemble_train_step, ()),
    }[kind]
    state_of = EnsembleState if kind == "members" else vgrad.training.TrainState
    found = []
    for donate in (False, True):
        own = {"w": params["w"].clone()}
        buffers = BUFFERS[name](own)
        tx = optim.sgd(0.1)
        state = state_of.create(tx, own, buffers, seed=0)
        state, _ = make(Loss(), tx, donate=donate)(state, *batch)
        found.append((state.params, state.buffers))
    assert_exact(found[1], found[0], 1e-12)


def private(loss, tx, *, donate):
    plan = vgrad.dp.Plan(
        dataset_size=8,
        sampling_rate=0.5,
        noise_multiplier=1.0,
        max_norm=1.0,
        steps=3,
        delta=1e-5,
    )

    def of_sample(params, buffers, x):
        return (params["w"] * x).sum()

    return vgrad.training.private_step(of_sample, tx, plan, donate=donate)


def test_aux_of_a_private_step_stays_as_it_was():
    tx = optim.sgd(0.1)
    found = []

    def loss(params, buffers, x):
        return (params["w"] * x).sum(), {"w": params["w"]}

    plan = private(loss, tx, donate=True).plan
    for donate in (False, True):
        step = vgrad.training.private_step(loss, tx, plan, donate=donate, has_aux=True)
        params = {"w": torch.ones(3)}
        state = vgrad.training.TrainState.create(tx, params, {}, seed=0)
        _, metrics = step(state, torch.ones(4, 3))
        found.append(metrics["aux"])
    assert_exact(found[1], found[0], 0)

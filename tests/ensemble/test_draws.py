"""Random numbers of members that follow from a key of each."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests.losses import Dropping, Noisy, rows
from tests.oracle import assert_exact
from vgrad.ensemble import (
    ensemble_clipped_grad,
    ensemble_forward,
    ensemble_grad,
    ensemble_per_sample_grad,
)
from vgrad.generators import sample_keys

E = 4
KEYS = sample_keys(9, 0, E)
PARTS = (slice(0, 1), slice(1, 4))


class Turned(Dropping):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return F.dropout(x.movedim(in_dims[0], -1), 0.5), x.ndim - 1


def twice(x):
    return F.dropout(F.dropout(x.sin()).exp())


OPS = {
    "dropout": F.dropout,
    "normal": lambda x: torch.randn(4, 4) + torch.normal(x, 1.0),
    "by chances": lambda x: (
        torch.bernoulli(x.sigmoid()) + torch.multinomial(x[0].softmax(-1), 2).sum()
    ),
    "one sample after another": lambda x: torch.poisson(x * 5) + torch.randint(9, (4,)),
    "a checkpoint": lambda x: F.dropout(
        checkpoint(twice, F.dropout(x), use_reentrant=False)
    ),
    "branches": lambda x: F.dropout(x) * (2 if torch.rand(()) < 0.5 else torch.rand(4)),
    "a function": Dropping.apply,
    "a function with a rule": Turned.apply,
    "an order of its own": lambda x: x[torch.randperm(4)],
}
ALONE = {"a function", "a function with a rule", "an order of its own"}
"""What runs member by member, whatever the strategy."""


def problem(op):
    """Return a loss whose gradient shows what an op drew, and what one after it did."""

    def loss(params, buffers, x):
        first = op(x * params["b"])
        return (first * params["w"]).sum() + (F.dropout(x) * params["v"]).sum()

    ones = torch.ones(E, 4, 4)  # as many members as anything else
    x = torch.rand(E, 4, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    return loss, {"w": ones, "v": ones, "b": torch.ones(E)}, x


@pytest.mark.filterwarnings("ignore:.*(member after another|in groups)")
@pytest.mark.parametrize("name", OPS)
def test_a_member_draws_the_same_in_every_group_and_strategy(name):
    loss, params, x = problem(OPS[name])
    state, found = torch.get_rng_state(), {}
    for strategy in ("loop", "auto", "vmap", "hybrid"):
        gradient = ensemble_grad(loss, in_dims=0, strategy=strategy)
        try:
            found[strategy] = gradient.keyed(KEYS)(params, {}, x).grads
        except NotImplementedError:
            assert name in ALONE, strategy
            continue
        for part in PARTS:
            own = gradient.keyed(KEYS[part])(rows(params, part), {}, x[part]).grads
            for key, value in own.items():
                torch.testing.assert_close(value, found[strategy][key][part])
    for strategy, grads in found.items():
        for key, value in found["loop"].items():
            torch.testing.assert_close(grads[key], value, msg=strategy)
    assert torch.equal(torch.get_rng_state(), state)
    shown = [repr(each.tolist()) for each in found["loop"]["v"]]
    assert len({*shown}) == E
    other = ensemble_grad(loss, in_dims=0).keyed(KEYS + 1)(params, {}, x).grads
    assert not torch.allclose(other["v"], found["loop"]["v"])


def test_members_that_begin_to_draw_draw_by_their_keys():
    def loss(params, buffers, x):
        x = F.dropout(x) if params["w"].sum() > 0 else x
        return (x * params["w"] * params["common"]).sum()

    params, x = {"w": torch.ones(E, 9), "common": torch.ones(9)}, torch.ones(9)
    options = {"strategy": "loop", "shared": ["common"]}
    first, later = (ensemble_grad(loss, **options).keyed(KEYS) for _ in range(2))
    expected = first(params, {}, x).grads
    assert expected["w"].eq(0).any()
    for _ in range(2):  # which draws nothing
        later({**params, "w": -params["w"]}, {}, x)
    state = torch.get_rng_state()
    for _ in range(2):
        assert_exact(later(params, {}, x).grads, expected, 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("strategy", ["loop", "vmap", "hybrid"])
@pytest.mark.parametrize("randomness", ["keys", "different", "same"])
def test_a_checkpoint_sees_the_same_numbers_again(randomness, strategy):
    found = []
    for run in (twice, lambda x: checkpoint(twice, x, use_reentrant=False)):
        loss, params, x = problem(lambda x, run=run: run(F.dropout(run(x))))
        options = {"randomness": "same"} if randomness == "same" else {}
        gradient = ensemble_grad(loss, in_dims=0, strategy=strategy, **options)
        gradient = gradient.keyed(KEYS) if randomness == "keys" else gradient
        torch.manual_seed(3)
        found.append(gradient(params, {}, x).grads)
    assert_exact(*found, 1e-6)


def test_a_checkpoint_inside_of_another_is_refused():
    def nested(x):
        outer = lambda x: checkpoint(torch.sin, x, use_reentrant=False)  # noqa: E731
        return checkpoint(outer, x, use_reentrant=False)

    loss, params, x = problem(nested)
    with pytest.raises(vgrad.UnsupportedOp, match='inside of another.*"loop"'):
        ensemble_grad(loss, in_dims=0, strategy="vmap")(params, {}, x)


OWN = torch.Generator()
REFUSED = {
    "a generator": (
        lambda x: torch.rand(4, 4, generator=OWN) * x,
        "torch.Generator of the loss's own",
    ),
    "a backward pass": (Noisy.apply, "some that a backward pass"),
    "a re-entrant checkpoint": (
        lambda x: checkpoint(twice, x.requires_grad_(), use_reentrant=True),
        "use_reentrant=False",
    ),
}


@pytest.mark.filterwarnings("ignore:.*member after another")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_what_keys_cannot_stand_for_is_refused(name, strategy):
    op, what = REFUSED[name]
    loss, params, x = problem(op)
    gradient = ensemble_grad(loss, in_dims=0, strategy=strategy).keyed(KEYS)
    with pytest.raises(RuntimeError, match=what):
        gradient(params, {}, x)


@pytest.mark.parametrize("strategy", ["loop", "hybrid"])
def test_chunks_draw_other_numbers(strategy):
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(50, 50))
    fmodel, params, _ = vgrad.stack([model] * E)
    forward = ensemble_forward(fmodel, in_dims=0, strategy=strategy, chunk_size=2)
    masks = forward.keyed(KEYS)(params, {}, torch.ones(E, 6, 50))
    flat = masks.flatten(0, 1)
    assert len(flat.unique(dim=0)) == len(flat)
    part = rows(params, slice(1, E))
    own = forward.keyed(KEYS[1:])(part, {}, torch.ones(3, 6, 50))
    torch.testing.assert_close(own, masks[1:])


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("make", [ensemble_per_sample_grad, ensemble_clipped_grad])
def test_samples_of_a_member_draw_what_follows_from_its_key(make, randomness):
    def loss(params, buffers, x):
        return (F.dropout(F.dropout(x, 0.1)) * params["w"]).sum()

    options = {} if make is ensemble_per_sample_grad else {"max_norm": 1.0}
    x, found = torch.ones(5, 30), {}
    for strategy in ("recorded", "vmap", "loop"):
        transform = make(loss, randomness=randomness, strategy=strategy, **options)
        result = transform.keyed(KEYS)({"w": torch.ones(E, 30)}, {}, x)
        found[strategy] = getattr(result, "grads", result)["w"]
        own = transform.keyed(KEYS[1:])({"w": torch.ones(E - 1, 30)}, {}, x)
        own = getattr(own, "grads", own)["w"]
        torch.testing.assert_close(own, found[strategy][1:])
        with pytest.raises(ValueError, match="expected one key a member"):
            transform.keyed(KEYS)({"w": torch.ones(E - 1, 30)}, {}, x)
    if randomness == "different":
        torch.testing.assert_close(found["vmap"], found["recorded"])
        torch.testing.assert_close(found["loop"], found["recorded"])
    drawn = found["recorded"].flatten(0, -2)
    count = E if randomness == "same" else len(drawn)
    assert len(drawn.unique(dim=0)) == count

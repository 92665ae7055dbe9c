"""Scores are judged by models that are trained again, and by labels that are wrong."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.attribution import lds, mislabelled_auc, retrain

SUBSETS = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0]]) == 1
SCORES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.3, 0.4]])
OUTPUTS = torch.tensor([[0.3, 0.3], [0.4, 0.4], [0.5, 0.3]])


def test_rank_correlations_are_those_of_dattri():
    assert lds(SCORES, SUBSETS, OUTPUTS).tolist() == pytest.approx([1, 0.8660254])


DECAY, RATE, STEPS, SEED = 0.1, 0.05, 7, 3


def decayed(params):
    return DECAY / 2 * sum(value.square().sum() for value in params)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("frozen", [[], ["0.weight"]])
def test_retrained_members_equal_models_trained_one_by_one(batch_size, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3).double(), torch.randint(2, (8,))
    subsets = torch.rand(4, 8) < 0.5
    subsets[0] = torch.arange(8) == 5  # in most batches none of its samples
    fmodel, *parts = vgrad.make_functional_with_buffers(model)
    parts = vgrad.freeze(*parts, frozen)
    cross_entropy = vgrad.sample_loss(fmodel, F.cross_entropy)

    def loss(params, buffers, x, y):
        return cross_entropy(params, buffers, x, y) + decayed(params.values())

    tx = vgrad.optim.adam(RATE)
    options = {"steps": STEPS, "batch_size": batch_size, "seed": SEED}
    start = copy.deepcopy(parts[0])
    found = retrain(loss, tx, *parts, (x, y), subsets, **options)
    alone = retrain(loss, tx, *parts, (x, y), subsets[:1], **options)
    for name, value in start.items():
        assert torch.equal(value, parts[0][name])
        torch.testing.assert_close(alone[name], found[name][:1])

    source = torch.Generator().manual_seed(SEED)
    order = [torch.randperm(8, generator=source) for _ in range(STEPS)]
    rows = [part for each in order for part in each.split(batch_size or 8)][:STEPS]
    for member, subset in enumerate(subsets):
        own = copy.deepcopy(model)
        trained = {n: p for n, p in own.named_parameters() if n not in frozen}
        optimizer = torch.optim.Adam(trained.values(), RATE)
        for at in rows:
            if len(at := at[subset[at]]):
                optimizer.zero_grad()
                value = F.cross_entropy(own(x[at]), y[at]) + decayed(trained.values())
                value.backward()
                optimizer.step()
        assert found.keys() == trained.keys()
        for name, value in trained.items():
            torch.testing.assert_close(found[name][member], value.detach())


@pytest.mark.parametrize("cut", [[0, 2, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_members_that_draw_may_be_retrained_part_by_part(batch_size, cut):
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 2)).double()
    fmodel, *parts = vgrad.make_functional_with_buffers(model)
    batch = torch.randn(8, 3).double(), torch.randint(2, (8,))
    given = vgrad.sample_loss(fmodel, F.cross_entropy), vgrad.optim.sgd(0.1), *parts
    options = {"steps": 4, "batch_size": batch_size, "seed": 0}
    subsets = torch.rand(4, 8) < 0.6
    subsets[:, 0], subsets[3] = True, subsets[0]
    found = retrain(*given, batch, subsets, **options)
    some = [
        retrain(*given, batch, subsets[at:end], **options)
        for at, end in itertools.pairwise(cut)
    ]
    for name, value in found.items():
        joined = torch.cat([each[name] for each in some])
        torch.testing.assert_close(joined, value)
        torch.testing.assert_close(value[3], value[0])  # of the same subset
        assert not torch.allclose(value[1], value[0])


def test_samples_of_a_retrained_member_draw_their_own_numbers():
    def loss(params, buffers, x):
        return (F.dropout(params["w"], 0.5) * x).sum()

    start, every = {"w": torch.zeros(50)}, torch.ones(1, 4) == 1
    given = loss, vgrad.optim.sgd(1.0), start, {}, (torch.ones(4),), every
    shares = -retrain(*given, steps=1, seed=0)["w"] * 4 / 2  # kept, of four samples
    assert {*shares.flatten().tolist()} == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_texts_of_a_batch_are_the_same_for_all_samples():
    def loss(params, buffers, sample, names, y):
        assert (names, sample["mode"]) == ([*"abcd"], "square")
        return (params["w"] * sample["x"] - y).square()

    x, y = torch.randn(2, 4)
    batch = {"x": x, "mode": "square"}, [*"abcd"], y
    own = {"w": torch.zeros(())}, {}
    options = {"steps": 3, "batch_size": 2, "seed": 0}
    tx = vgrad.optim.sgd(0.1)
    found = retrain(loss, tx, *own, batch, SUBSETS, **options)
    plain = lambda p, b, x, y: (p["w"] * x - y).square()  # noqa: E731
    expected = retrain(plain, tx, *own, (x, y), SUBSETS, **options)
    assert torch.equal(found["w"], expected["w"])


def test_the_area_is_a_share_of_pairs_with_half_of_the_ties():
    torch.manual_seed(0)
    scores, wrong = torch.randint(6, (30,)).double(), torch.rand(30) < 0.3
    pairs = scores[wrong][:, None] - scores[~wrong]
    share = ((pairs > 0).double() + (pairs == 0).double() / 2).mean()
    assert mislabelled_auc(scores, wrong) == pytest.approx(float(share))


def trained(subsets=SUBSETS, start=1.0, **options):
    def loss(params, buffers, x):
        return (params["w"] * x).square()

    options = {"steps": 2, "seed": 0} | options
    params, batch = {"w": torch.tensor(start)}, (torch.ones(4),)
    return retrain(loss, vgrad.optim.sgd(0.1), params, {}, batch, subsets, **options)


NAN, NONE = torch.tensor([torch.nan]), torch.zeros_like(SUBSETS)
ERRORS = {
    r"lds\(scores\): .* \(2, 4\), got .* \(2, 3\)": lambda: lds(
        SCORES[:, 1:], SUBSETS, OUTPUTS
    ),
    r"lds\(outputs\): .* \(3, 2\), got .* \(2, 3\)": lambda: lds(
        SCORES, SUBSETS, OUTPUTS.T
    ),
    r"lds\(subsets\): .* boolean tensor \[S, N\], got .* torch.int32": lambda: lds(
        SCORES, SUBSETS.int(), OUTPUTS
    ),
    r"lds\(subsets\): .* sample at least in each row": lambda: lds(
        SCORES, NONE, OUTPUTS
    ),
    r"lds\(outputs\): .* finite numbers, got 6 that": lambda: lds(
        SCORES, SUBSETS, OUTPUTS * NAN
    ),
    r"lds\(scores\): .* for all 3 at query 1": lambda: lds(
        SCORES * torch.tensor([[1.0], [0.0]]), SUBSETS, OUTPUTS
    ),
    r"lds\(scores\): .* for all 3 at query 0": lambda: lds(
        SCORES, SUBSETS[[0, 0, 0]], OUTPUTS
    ),
    r"lds\(outputs\): .* for all 3 at query 0": lambda: lds(
        SCORES, SUBSETS, torch.ones(3, 2)
    ),
    r"retrain\(subsets\): .* each of the 4 samples .* got 3": lambda: trained(
        SUBSETS[:, :3]
    ),
    r"retrain\(subsets\): .* boolean tensor": lambda: trained(SUBSETS[0]),
    r"retrain\(subsets\): .* sample at least in each row": lambda: trained(NONE),
    r"retrain\(batch_size=0\)": lambda: trained(batch_size=0),
    r"retrain\(steps=0\)": lambda: trained(steps=0),
    r"finite gradients, got others in 2 of 2 steps of subset 0": lambda: trained(
        start=torch.nan
    ),
    r"retrain\(loss\): .* without dimensions": lambda: trained(start=[1.0]),
    r"mislabelled_auc\(mislabelled\): .* sample at least": lambda: mislabelled_auc(
        SCORES[0], NONE[0]
    ),
    r"mislabelled_auc\(mislabelled\): .* got 4 that are": lambda: mislabelled_auc(
        SCORES[0], ~NONE[0]
    ),
    r"mislabelled_auc\(scores\): .* \(4,\), got .* \(2, 4\)": lambda: mislabelled_auc(
        SCORES, SUBSETS[0]
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_wrong_arguments_are_refused(message):
    with pytest.raises((ValueError, FloatingPointError), match=message):
        ERRORS[message]()

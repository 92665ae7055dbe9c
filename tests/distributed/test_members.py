"""Ensembles whose members are cut among ranks: as if all were in one place."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.distributed import (
    gather_members,
    member_range,
    shard_members,
    single_process_mesh,
)
from vgrad.ensemble import (
    for_members,
    predict,
    share,
    take,
)
from vgrad.training import EarlyStopping, EnsembleState, ensemble_train_step, load, save
from vgrad.tree import map_tensors, state_dict

E, B = 5, 6


def net(drop=0.0):
    norm = nn.BatchNorm1d(4)
    # A bias would have gradients that are rounding alone, which Adam makes large.
    first = nn.Linear(3, 4, bias=False)
    return nn.Sequential(first, norm, nn.Dropout(drop), nn.Linear(4, 2))


def ensemble(drop=0.0, shared=()):
    """Return a function of one member, and all of them in float64."""
    made = vgrad.stack(lambda: net(drop).double(), seeds=range(E))
    return made[0], *(share(*made[1:], shared) if shared else made[1:])


def batch():
    source = torch.Generator().manual_seed(3)
    x = torch.randn(E, B, 3, generator=source, dtype=torch.float64)
    return x, torch.randn(B, 2, generator=source, dtype=torch.float64)


def same(found, expected, tolerance=1e-12):
    found, expected = state_dict(found), state_dict(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True
        )


def on_ranks(ranks, function, *arguments):
    """Call a function of a mesh on all ranks; also return what one process does."""
    with single_process_mesh("members") as mesh:
        expected = function(mesh, *arguments)
    return ranks.on_mesh(function, *arguments, axis="members"), expected


def _there_and_back(mesh):
    source = torch.Generator().manual_seed(0)
    for count in {mesh.size(), 5}:
        tree = {
            "flags": torch.rand(count, generator=source) < 0.5,
            "half": torch.randn(count, 3, generator=source).bfloat16(),
            "none": torch.ones(count, 0, 2),
            "turned": torch.randn(2, count, generator=source).T.requires_grad_(),
            "pair": (torch.randn(count, dtype=torch.complex128, generator=source),),
        }
        own = shard_members(tree, mesh)
        which = member_range(count, mesh)
        assert own["half"].equal(tree["half"][which.start : which.stop])
        assert own["turned"].is_leaf
        same(gather_members(own, mesh), tree, 0)
        assert gather_members(own, mesh)["turned"].requires_grad
    return which


def test_trees_are_cut_and_gathered(some):
    found, alone = on_ranks(some, _there_and_back)
    assert [number for which in found for number in which] == [*alone] == [*range(5)]


RATES = torch.linspace(0.01, 0.2, E, dtype=torch.float64)


def trained(mesh, **options):
    """Take steps on a mesh; without one, in one place."""
    fmodel, params, buffers = ensemble()
    own = (lambda x: shard_members(x, mesh)) if mesh else lambda x: x
    adam = partial(for_members, vgrad.optim.adam)
    loss, tx = vgrad.batch_loss(fmodel, F.mse_loss), adam(lr=own(RATES))
    step = ensemble_train_step(loss, tx, in_dims=(0, None), **options)
    # The state of the optimizer needs the rates of all members to begin with.
    state = EnsembleState.create(adam(lr=RATES), params, buffers, seed=7)
    state = own(state._replace(active=torch.tensor([True, True, False, True, True])))
    x, y = batch()
    x, losses = own(x), []
    for turn in range(5):
        state, metrics = step(state, x + turn, y)
        losses.append(metrics["loss"])
    result = {"state": state, "loss": torch.stack(losses, 1)}
    return gather_members(result, mesh) if mesh else result


@pytest.mark.parametrize("options", [{}, {"donate": True}], ids=str)
def test_steps_are_those_of_one_process(some, options):
    results, alone = on_ranks(some, partial(trained, **options))
    plain = trained(None, **options)
    for found in (*results, alone):
        same(found, plain)


def _masks(mesh):
    """Return what each of four equal members loses by its mask."""
    torch.manual_seed(0)
    fmodel, *entries = vgrad.stack([net(0.5).double()] * 4)
    loss, tx = vgrad.batch_loss(fmodel, F.mse_loss), vgrad.optim.sgd(0.1)
    whole = EnsembleState.create(tx, *entries, seed=1)
    step = ensemble_train_step(loss, tx, randomness="different")
    x, y = batch()
    state, metrics = step(shard_members(whole, mesh), x[0], y)
    assert torch.equal(gather_members(state, mesh).key, whole.key)
    return gather_members(metrics["loss"], mesh)


def test_members_of_other_ranks_draw_other_masks(ranks):
    for losses in ranks(2).on_mesh(_masks, axis="members"):
        assert len({*losses.tolist()}) == 4


def _predicted(mesh, dtype, chunk_size):
    fmodel, params, buffers = ensemble()
    inputs = batch()[0].flatten(0, 1).to(dtype)
    whole = map_tensors(
        lambda x: x.to(dtype) if x.is_floating_point() else x, (params, buffers)
    )
    options = {"chunk_size": chunk_size, "strategy": "vmap"}
    levels = {"quantiles": [0.0, 0.3, 1.0]}
    given, options["mesh"] = shard_members(whole, mesh) if mesh else whole, mesh
    classes, values = predict, partial(predict, kind="value")
    one_nan = inputs.index_fill(0, torch.tensor([2]), torch.nan)
    found = [classes(fmodel, *given, x, **options) for x in (inputs, one_nan)]
    numbers = values(fmodel, *given, inputs, **options, **levels)
    alike = map_tensors(lambda x: x[:1].expand(x.shape).contiguous(), whole)
    given = shard_members(alike, mesh) if mesh else alike
    agreeing = classes(fmodel, *given, inputs, **options)
    return found, numbers, values(fmodel, *given, inputs, **options), agreeing


@pytest.mark.parametrize(
    ("dtype", "chunk_size", "tolerance"),
    [(torch.float64, None, 1e-12), (torch.float32, 7, 1e-6)],
)
def test_predictions_are_those_of_one_process(some, dtype, chunk_size, tolerance):
    expected = _predicted(None, dtype, chunk_size)
    for found in some.on_mesh(_predicted, dtype, chunk_size, axis="members"):
        same(found, expected, tolerance)
        _, _, agreeing, classes = found
        assert not agreeing.variance.any()
        assert not classes.variance.any()
        assert not classes.disagreement.any()


def _run(mesh, path, ends):
    """Go on from the state of two steps if there is one; else take them and save."""
    fmodel, params, buffers = ensemble()
    tx, scale = vgrad.optim.adam(0.1), vgrad.precision.DynamicLossScale()
    whole = EnsembleState.create(tx, params, buffers, seed=2, loss_scale=scale)
    step = ensemble_train_step(
        vgrad.batch_loss(fmodel, F.mse_loss), tx, strategy="hybrid"
    )
    x, y = batch()
    state = shard_members(load(path, whole) if path.exists() else whole, mesh)
    torch.distributed.barrier()
    for _ in range(ends - int(state.step)):
        state, _ = step(state, x[0], y)
    gathered = gather_members(state, mesh)
    if mesh.get_local_rank() == 0 and not path.exists():
        save(path, gathered)
    torch.distributed.barrier()
    same(shard_members(gathered, mesh), state, 0)
    return gathered


def test_another_number_of_ranks_goes_on(ranks, tmp_path):
    ranks(2).on_mesh(_run, tmp_path / "state", 2, axis="members")
    with single_process_mesh("members") as mesh:
        expected = _run(mesh, tmp_path / "whole", 4)
    for state in ranks(4).on_mesh(_run, tmp_path / "state", 4, axis="members"):
        same(state, expected)


def _taken(mesh):
    """Copy members among those of all ranks, and stop some of them."""
    fmodel, params, buffers = ensemble()
    stopping = EarlyStopping.create(E, patience=1).update(torch.ones(E))
    stopping = stopping.update(torch.tensor([2.0, 1.0, 0.5, 0.5, 2.0]))
    tx, (x, y) = vgrad.optim.adam(0.1), batch()
    whole = EnsembleState.create(tx, params, buffers, seed=2)
    step = ensemble_train_step(vgrad.batch_loss(fmodel, F.mse_loss), tx)
    for indices in ([4, 0, 4, 3, 1], range(E)):
        state, _ = step(shard_members(whole, mesh), x[0], y)
        whole = take(gather_members(state, mesh), indices)
    with pytest.raises(ValueError, match="gather_members comes before"):
        take(state, [E])
    active = gather_members(shard_members(stopping, mesh), mesh).active
    return whole, active


def test_members_are_taken_from_all_ranks(some):
    results, alone = on_ranks(some, _taken)
    for whole in results:
        same(whole, alone)


SHARED = ("0.weight", "1.bias")


def raised(call):
    """Return the error of a call, which fails on every rank."""
    with pytest.raises((ValueError, RuntimeError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


FEW = "ValueError: .*a member or more for each of the 2 ranks, got 1"
REFUSED = [
    FEW,
    FEW,
    r"RankError: .*the same members on all ranks, got \[2, 3\]",
    r"RankError: .*rank 1 stopped with ValueError.* got shape \(\d,\)",
    "ValueError: shard_members.* on the first axis of 'tensor ",
    "ValueError: .*expected an entry with a member axis, got none",
    "ValueError: .*a pattern that matches a parameter or buffer",
    "RankError: .*expected the same shared on all ranks",
    "RankError: .*expected the same shared on all ranks",
    "RankError: .*expected the same tensors on all ranks",
    r"RankError: .*same samples on all ranks.*6, 2\], .*5, 2\]",
    "RankError: predict: rank 1 stopped with",
]


def _refused(mesh):
    size, rank = mesh.size(), mesh.get_local_rank()
    fmodel, params, buffers = ensemble(shared=SHARED)
    tx, (x, _) = vgrad.optim.sgd(0.1), batch()

    def started(shared, entries):
        state = EnsembleState.create(tx, *entries, shared=shared, seed=2)
        return shard_members(state, mesh, shared=shared)

    state = started(SHARED, (params, buffers))
    bad = x[:, :, : 3 - rank]  # the first rank's fits
    predicted = partial(
        predict, fmodel, state.params, state.buffers, mesh=mesh, shared=SHARED
    )
    ahead = state._replace(step=torch.tensor(rank))
    differing = {"a": torch.ones(2), "b": torch.tensor(rank)}
    fives = [torch.ones(5), torch.ones(5 + rank)]
    calls = [
        lambda: shard_members(torch.ones(size - 1), mesh),
        lambda: member_range(size - 1, mesh),
        lambda: shard_members(torch.ones(size + rank), mesh),
        lambda: shard_members(fives, mesh),
        lambda: shard_members(torch.tensor(1.0), mesh),
        lambda: shard_members({}, mesh),
        lambda: shard_members(params, mesh, shared=["9.weight"]),
        lambda: gather_members(differing, mesh, shared=["b"]),
        lambda: gather_members(ahead, mesh, shared=SHARED),
        lambda: gather_members(torch.ones(2, 1 + rank), mesh),
        lambda: predicted(x[0, rank:]),
        lambda: predicted(bad[0]),
    ]
    return [raised(call) for call in calls]


def test_what_does_not_fit_is_refused_on_all_ranks(ranks):
    first, second = ranks(2).on_mesh(_refused, axis="members")
    assert len(second) == len(REFUSED)
    for pattern, text in zip(REFUSED, first, strict=True):
        assert re.match(pattern, text, re.DOTALL), text

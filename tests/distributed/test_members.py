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
    member_parallel,
    member_range,
    shard_members,
    single_process_mesh,
)
from vgrad.ensemble import (
    ensemble_clipped_grad,
    ensemble_forward,
    ensemble_grad,
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


def trained(mesh, drop, shared, options, *, steps=5, order=("parallel",)):
    """Take steps on a mesh; without one, in one place by the plain step."""
    fmodel, params, buffers = ensemble(drop, shared)
    own = (lambda x: shard_members(x, mesh)) if mesh else lambda x: x
    common = vgrad.optim.sgd(0.1, momentum=0.5) if shared else None
    adam = partial(for_members, vgrad.optim.adam, shared=shared, shared_tx=common)
    loss, tx = vgrad.batch_loss(fmodel, F.mse_loss), adam(lr=own(RATES))
    step = ensemble_train_step(loss, tx, in_dims=(0, None), shared=shared, **options)
    # The state of the optimizer needs the rates of all members to begin with.
    state = EnsembleState.create(adam(lr=RATES), params, buffers, shared=shared, seed=7)
    state = state._replace(active=torch.tensor([True, True, False, True, True]))
    x, y = batch()
    x, losses = own(x), []
    if mesh:
        state = shard_members(state, mesh, shared=shared)
        changes = {
            "parallel": lambda step: member_parallel(step, mesh, members=E),
            "compiled": lambda step: vgrad.compile(step, fallback="error"),
        }
        for name in order:
            step = changes[name](step)
    for turn in range(steps):
        state, metrics = step(state, x + turn, y)
        losses.append(metrics["loss"])
    result = {"state": state, "loss": torch.stack(losses, 1)}
    return gather_members(result, mesh, shared=shared) if mesh else result


SHARED = ("0.weight", "1.bias")
CASES = {
    "members alone": ((0.0, (), {}), None),
    "donated": ((0.0, (), {"donate": True}), None),
    "a part shared": ((0.0, SHARED, {}), None),
    "one mask": ((0.5, (), {"randomness": "same", "strategy": "hybrid"}), None),
    "masks": ((0.5, (), {}), "alone"),
    "masks in a loop": ((0.5, SHARED, {"strategy": "loop"}), "alone"),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(some, name):
    case, place = CASES[name]
    results, alone = on_ranks(some, trained, *case)
    plain = trained(None, *case)
    for found in results:
        same(found, alone if place == "alone" else plain)
    if place == "alone":  # which draws other masks
        weights = (each["state"].params["0.weight"] for each in (alone, plain))
        assert not torch.equal(*weights)


def _functions(mesh, drop):
    """Call each function in training mode, with masks."""
    fmodel, params, buffers = ensemble(drop, SHARED)
    which = shard_members((params, buffers), mesh, shared=SHARED)
    x, y = batch()
    own = shard_members(x, mesh)
    torch.manual_seed(11)  # that of the first rank counts
    options = {"in_dims": 0, "shared": SHARED, "randomness": "different"}
    forward = ensemble_forward(fmodel, **options)
    forward = member_parallel(forward, mesh, members=E)
    output = forward(*which, own), forward(*which, own)
    left = forward.with_buffers(*which, own)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    options["in_dims"] = (0, None)
    gradient = member_parallel(ensemble_grad(loss, **options), mesh, members=E)
    grads = gradient(*which, own, y)
    drawn = torch.rand(3) if mesh.get_local_rank() == 0 else torch.zeros(3)
    plain = vgrad.sample_loss(lambda p, b, x: F.dropout(x @ p["w"], drop), F.mse_loss)
    clipped = ensemble_clipped_grad(
        plain, max_norm=1.0, in_dims=(0, None), randomness="different"
    )
    w = shard_members(torch.ones(E, 3, 2, dtype=torch.float64), mesh)
    sums = member_parallel(clipped, mesh, members=E)({"w": w}, {}, own, y)
    start = member_range(E, mesh).start
    key = torch.arange(32, dtype=torch.uint8)
    noised = clipped.add_noise(
        sums.grads, noise_multiplier=1.0, key=key, step=0, first=start
    )
    lists = output, left[0], grads.losses, sums.norms, noised
    names = [name for name in {**params, **buffers} if name in SHARED]
    entries = [grads.grads, grads.buffers, left[1]]
    mine = [{n: x for n, x in each.items() if n not in names} for each in entries]
    common = {name: grads.grads[name] for name in names}
    return gather_members((lists, mine), mesh), common, drawn


def test_functions_are_those_of_one_process(some):
    results, expected = on_ranks(some, _functions, 0.5)
    (first, second), *_ = expected[0][0]
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    for rank, found in enumerate(results):
        same(found[:2], expected[:2])
        assert rank or torch.equal(found[2], expected[2])


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
    fmodel, params, buffers = ensemble(0.5)
    tx, scale = vgrad.optim.adam(0.1), vgrad.precision.DynamicLossScale()
    whole = EnsembleState.create(tx, params, buffers, seed=2, loss_scale=scale)
    step = ensemble_train_step(
        vgrad.batch_loss(fmodel, F.mse_loss), tx, strategy="hybrid"
    )
    step, (x, y) = member_parallel(step, mesh, members=E), batch()
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
    """Copy members among those of all ranks, between two steps."""
    fmodel, params, buffers = ensemble(0.5, SHARED)
    tx, chosen, (x, y) = vgrad.optim.adam(0.1), [4, 0, 4, 3, 1], batch()
    whole = EnsembleState.create(tx, params, buffers, shared=SHARED, seed=2)
    step = ensemble_train_step(vgrad.batch_loss(fmodel, F.mse_loss), tx, shared=SHARED)
    step = member_parallel(step, mesh, members=E)
    for indices in (chosen, range(E)):
        state, _ = step(shard_members(whole, mesh, shared=SHARED), x[0], y)
        whole = take(gather_members(state, mesh, shared=SHARED), indices, shared=SHARED)
    with pytest.raises(ValueError, match="gather_members comes before"):
        take(state, [E], shared=SHARED)
    return whole


def test_members_are_taken_from_all_ranks(some):
    results, alone = on_ranks(some, _taken)
    for whole in results:
        same(whole, alone)


def _stopped(mesh):
    """Members stop one by one, until those of a rank are all stopped and not finite."""
    fmodel, params, buffers = ensemble(shared=SHARED)
    tx = vgrad.optim.sgd(0.1)
    state = EnsembleState.create(tx, params, buffers, shared=SHARED, seed=2)
    stopping = EarlyStopping.create(E, patience=1)
    worse = torch.tensor([2.0, 1.0, 1.0, 1.0, 2.0])
    for values in (torch.ones(E), worse - 0.5):
        stopping = stopping.update(values)
    stopping, state = (
        shard_members(stopping, mesh),
        shard_members(state._replace(active=stopping.active), mesh, shared=SHARED),
    )
    assert torch.equal(stopping.active, state.active)
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    step = ensemble_train_step(loss, tx, in_dims=(0, None), shared=SHARED)
    step = member_parallel(step, mesh, members=E)
    x, y = batch()
    x[~gather_members(state.active, mesh)] = torch.nan
    first, _ = step(state, shard_members(x, mesh), y)
    x[1] = torch.inf
    second, metrics = step(first, shard_members(x, mesh), y)
    assert "0.weight" in SHARED
    moved = [
        bool((a.params["0.weight"] != b.params["0.weight"]).any())
        for a, b in ((state, first), (first, second))
    ]
    everyone = gather_members((first.active, metrics["skipped"]), mesh)
    return moved, everyone, bool(first.params["0.weight"].isfinite().all())


def test_members_that_stopped_move_nothing_that_is_shared(some):
    active = torch.tensor([False, True, True, True, False])
    for moved, everyone, finite in some.on_mesh(_stopped, axis="members"):
        assert (moved, finite) == ([True, False], True)
        assert everyone[0].tolist() == active.tolist()
        assert everyone[1].tolist() == [0, 1, 0, 0, 0]


def _compiled(mesh):
    options = {"randomness": "different", "strategy": "hybrid"}
    plain = trained(mesh, 0.0, SHARED, options, steps=3)
    first, last = ("compiled", "parallel"), ("parallel", "compiled")
    for order in (first, last):
        same(trained(mesh, 0.0, SHARED, options, steps=3, order=order), plain)
    fmodel, *entries = ensemble(shared=SHARED)
    loss, (x, y) = vgrad.batch_loss(fmodel, F.mse_loss), batch()
    gradient = ensemble_grad(loss, in_dims=(0, None), shared=SHARED, **options)
    compiled = partial(vgrad.compile, fallback="error")
    parallel = partial(member_parallel, mesh=mesh, members=E)
    entries, x = shard_members((*entries,), mesh, shared=SHARED), shard_members(x, mesh)
    expected = parallel(gradient)(*entries, x, y)
    for function in (compiled(parallel(gradient)), parallel(compiled(gradient))):
        for _ in range(2):
            same(function(*entries, x, y), expected)
        assert [report.calls for report in function.reports()] == [1]
    drawn = trained(mesh, 0.5, (), options, steps=1, order=last)
    return drawn["loss"]


def test_compiled_steps_and_functions_are_those_of_eager_mode(ranks):
    first, second = ranks(2).on_mesh(_compiled, axis="members")
    assert torch.equal(first, second)


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
    "RankError: .*expected the same tensors on all ranks",
    r"RankError: .*same samples on all ranks.*6, 2\], .*5, 2\]",
    "RankError: predict: rank 1 stopped with",
    "RankError: ensemble_train_step: rank 1 stopped with",
    "RankError: .*expected the same buffers on all ranks",
    r"RankError: .*the same step on all ranks, got \[0, 1\]",
    "ValueError: member_parallel: expected the 2 members of rank 0, got 5",
]


def _refused(mesh):
    size, rank = mesh.size(), mesh.get_local_rank()
    fmodel, params, buffers = ensemble(shared=SHARED)
    loss, tx, (x, y) = (
        vgrad.batch_loss(fmodel, F.mse_loss),
        vgrad.optim.sgd(0.1),
        batch(),
    )

    def started(shared, entries):
        state = EnsembleState.create(tx, *entries, shared=shared, seed=2)
        return shard_members(state, mesh, shared=shared)

    def stepping(shared, state, x):
        step = ensemble_train_step(loss, tx, in_dims=(0, None), shared=shared)
        step = member_parallel(step, mesh, members=E)
        return step(state, shard_members(x.contiguous(), mesh), y)

    state, common = started(SHARED, (params, buffers)), (*SHARED, "1.running_mean")
    with_buffer = started(common, share(*ensemble()[1:], common))
    bad = x[:, :, : 3 - rank]  # the first rank's fits
    alike = (x[:1] + rank).expand(E, B, 3)  # each member of a rank leaves the same
    predicted = partial(
        predict, fmodel, state.params, state.buffers, mesh=mesh, shared=SHARED
    )
    differing = {"a": torch.ones(2), "b": torch.tensor(rank)}
    fives = [torch.ones(5), torch.ones(5 + rank)]
    ahead = state._replace(step=torch.tensor(rank))
    few = member_parallel(ensemble_train_step(loss, tx), mesh, members=2 * size)
    whole = EnsembleState.create(tx, *ensemble()[1:], seed=1)
    with pytest.raises(TypeError, match="the result of ensemble_train_step, ensemble"):
        member_parallel(fmodel, mesh, members=E)
    calls = [
        lambda: shard_members(torch.ones(size - 1), mesh),
        lambda: member_range(size - 1, mesh),
        lambda: shard_members(torch.ones(size + rank), mesh),
        lambda: shard_members(fives, mesh),
        lambda: shard_members(torch.tensor(1.0), mesh),
        lambda: shard_members({}, mesh),
        lambda: shard_members(params, mesh, shared=["9.weight"]),
        lambda: gather_members(differing, mesh, shared=["b"]),
        lambda: gather_members(torch.ones(2, 1 + rank), mesh),
        lambda: predicted(x[0, rank:]),
        lambda: predicted(bad[0]),
        lambda: stepping(SHARED, state, bad),
        lambda: stepping(common, with_buffer, alike),
        lambda: stepping(SHARED, ahead, x),
        lambda: few(whole, x[0], y),
    ]
    return [raised(call) for call in calls]


def test_what_does_not_fit_is_refused_on_all_ranks(ranks):
    first, second = ranks(2).on_mesh(_refused, axis="members")
    assert len(second) == len(REFUSED)
    for pattern, text in zip(REFUSED, first, strict=True):
        assert re.match(pattern, text, re.DOTALL), text

"""Outputs of all members in one call: axes, chunks, shared entries, ways to run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests.ensemble.test_contract import CASES, STRATEGIES, build, every_strategy
from tests.examples import examples
from tests.losses import Case, Net, randn, vectors
from tests.oracle import assert_exact
from vgrad.ensemble import ensemble_forward, execution, share, stack
from vgrad.precision import policy_for

MLP = CASES["mlp"]
DROPPING = Case(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)), vectors(5))
E, X, OWN = 3, randn(6, 5), randn(3, 6, 5, seed=1)


def of_members(models, rows=None):
    """Stack the outputs of the models, by default for `X`."""
    rows = [X] * len(models) if rows is None else rows
    return torch.stack([model(x) for model, x in zip(models, rows, strict=True)])


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_items_and_results_may_be_trees_with_axes_of_their_own(strategy, chunk_size):
    def run(self, x, other, scale=None, twice=False):
        hidden = self.layer(x) * scale
        hidden = self.layer(hidden) if twice else hidden
        return {"out": hidden + other, "pair": (hidden, x * 2)}

    case = Case(lambda: Net(run, layer=nn.Linear(5, 5)), vectors(5))
    models, fmodel, params, buffers = build(case, E)
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def function(params, buffers, x, other, options):
        return fmodel(params, buffers, x, other, **options)

    for dims, options in (
        ((0, None, 0), {"scale": scales, "twice": True}),
        ((0, None, None), {"scale": scales[0], "twice": False}),
    ):
        forward = ensemble_forward(
            function, in_dims=dims, strategy=strategy, chunk_size=chunk_size
        )
        outputs = forward(params, buffers, OWN, X, options)
        for member, model in enumerate(models):
            scale = options["scale"] if dims[2] is None else scales[member]
            expected = model(OWN[member], X, scale, options["twice"])
            own = pytree.tree_map(lambda leaf, i=member: leaf[i], outputs)
            assert_exact(own, expected, 1e-12)


@examples(80)
@given(
    size=st.integers(0, 7),
    chunk_size=st.none() | st.integers(1, 9),
    axis=st.sampled_from([None, 0, 1, 2, -1]),
    strategy=st.sampled_from(STRATEGIES),
)
def test_batches_are_of_all_or_along_any_axis_and_in_chunks(
    size, chunk_size, axis, strategy
):
    models, fmodel, params, buffers = build(MLP, E)
    x = randn(size, 5) if axis is None else randn(E, size, 5)
    options = {"in_dims": axis, "strategy": strategy, "chunk_size": chunk_size}
    given = x if axis is None else x.movedim(0, axis)
    outputs = ensemble_forward(fmodel, **options)(params, buffers, given)
    assert_exact(outputs, of_members(models, [x] * E if axis is None else x), 1e-12)


def offset():
    """Has a constant, a counter and a running value."""

    def forward(self, x):
        output = self.layer(x) + self.constant
        self.count = self.count + 1
        self.running = self.running + output.detach().mean(0)
        return output

    model = Net(forward, layer=nn.Linear(5, 5))
    model.register_buffer("constant", torch.arange(5.0))
    model.register_buffer("count", torch.tensor(0))
    model.register_buffer("running", torch.zeros(5))
    return model


@every_strategy
def test_shared_entries_have_no_member_axis_before_and_after(strategy):
    models, fmodel, params, buffers = build(Case(offset, vectors(5)), E)
    patterns = ["layer.bias", "con*", "count"]
    given = share(params, buffers, patterns)
    forward = ensemble_forward(fmodel, strategy=strategy, shared=patterns)
    outputs, new = forward.with_buffers(*given, X)
    for model in models[1:]:
        model.layer.bias = models[0].layer.bias
    assert_exact(outputs, of_members(models), 1e-12)
    running = torch.stack([each.running for each in models])
    expected = {"constant": models[0].constant, "count": torch.tensor(1)}
    assert_exact(new, expected | {"running": running}, 1e-12)
    given = share(params, buffers, ["running"])
    forward = ensemble_forward(fmodel, strategy=strategy, shared=["running"])
    assert forward(*given, X).shape == (E, 6, 5)
    with pytest.raises(ValueError, match="one value in the buffer 'running', which"):
        forward.with_buffers(*given, X)


@pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])
def test_randomness_is_whether_members_share_a_mask(strategy):
    _, _, params, buffers = build(MLP, E)
    drop = lambda params, buffers, x: F.dropout(x, 0.5)  # noqa: E731
    x = torch.ones(50, 4, dtype=torch.float64)
    masks = ensemble_forward(drop, strategy=strategy)(params, buffers, x)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == E
    options = {"strategy": strategy, "randomness": "same"}
    same = ensemble_forward(drop, **options)(params, buffers, x)
    assert all(torch.equal(mask, same[0]) for mask in same)
    assert 0 < (same[0] == 0).double().mean() < 1
    refusing = ensemble_forward(drop, strategy=strategy, randomness="error")
    with pytest.raises(RuntimeError, match='randomness="error". Pass'):
        refusing(params, buffers, x)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_a_loop_draws_the_masks_that_the_models_would(randomness):
    models, fmodel, params, buffers = build(DROPPING, E)
    torch.manual_seed(3)
    expected = []
    for model in models:
        if randomness == "same":
            torch.manual_seed(3)
        expected.append(model(X))
    torch.manual_seed(3)
    forward = ensemble_forward(fmodel, strategy="loop", randomness=randomness)
    assert_exact(forward(params, buffers, X), torch.stack(expected), 1e-12)


@every_strategy
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_a_policy_and_autocast_compute_as_the_models_under_them(strategy, name):
    case = CASES[name]
    models, fmodel, params, buffers = build(case, E, dtype=torch.float32)
    x = case.batch(5)[0]
    forward = ensemble_forward(fmodel, strategy=strategy)
    exact = forward(params, buffers, x)
    assert_exact(exact, torch.stack([model(x) for model in models]), 1e-5)
    mixed = policy_for(fmodel, "mixed_bfloat16")
    outputs = ensemble_forward(mixed, strategy=strategy)(params, buffers, x)
    expected = []
    for model in models:
        function, *entries = vgrad.make_functional_with_buffers(model)
        expected.append(policy_for(function, "mixed_bfloat16")(*entries, x))
    assert outputs.dtype == torch.float32
    assert_exact(outputs, torch.stack(expected), 3e-2)
    with vgrad.autocast("cpu", dtype=torch.bfloat16):
        narrow = forward(params, buffers, x)
        expected = torch.stack([model(x) for model in models])
    assert narrow.dtype == expected.dtype == torch.bfloat16
    assert_exact(narrow.float(), expected.float(), 3e-2)
    assert not torch.equal(outputs, exact)
    assert not torch.equal(narrow.float(), exact)


def selecting(self, x):
    out = self.layer(x)
    return out.clone().index_put((out > 0).nonzero(as_tuple=True), out.sum())


def test_shapes_that_depend_on_values_run_in_a_loop():
    case = Case(lambda: Net(selecting, layer=nn.Linear(5, 2)), vectors(5))
    models, fmodel, params, buffers = build(case, E)
    expected = of_members(models)
    for strategy in ("vmap", "hybrid"):
        with pytest.raises(vgrad.UnsupportedOp, match='Use strategy="loop"'):
            ensemble_forward(fmodel, strategy=strategy)(params, buffers, X)
    forward = ensemble_forward(fmodel, strategy="loop")
    assert_exact(forward(params, buffers, X), expected, 1e-12)


def chosen(models, x):
    fmodel, params, buffers = stack(models)
    return ensemble_forward(fmodel).explain(params, buffers, x)


def test_the_strategy_follows_the_work_of_one_member():
    convolutions = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    )
    explained = chosen([convolutions] * 5, torch.randn(4, 2, 6, 6))
    assert (explained.strategy, explained.members) == ("hybrid", 5)
    assert [op for op, _ in explained.forms] == ["conv2d", "conv2d"]
    assert "leave a CPU waiting" in explained.why
    # 4 * side**2 outputs of each of two convolutions, of five members
    side = int((execution.CONVOLVED * 1e6 / (2 * 4 * 5)) ** 0.5) + 10
    rows = int(execution.BUSY * 1e6 / (2 * 64 * 64)) + 10
    for models, x, why in (
        ([convolutions] * 5, torch.randn(1, 2, side, side), "outputs of convolutions"),
        ([nn.Linear(64, 64)] * 5, torch.ones(rows, 64), "keep a CPU busy"),
        ([nn.Linear(4, 4)] * 4, torch.ones(5, 4), "up to 4 members"),
        ([nn.Linear(4, 4)], torch.ones(5, 4), "there is one member"),
    ):
        explained = chosen(models, x)
        assert explained.strategy == "loop"
        assert why in explained.why

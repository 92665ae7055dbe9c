"""All members in one call give what each of them gives alone."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests.examples import examples
from tests.losses import randn
from tests.oracle import assert_exact
from vgrad.ensemble import ensemble_forward, execution, share, stack
from vgrad.precision import policy_for

STRATEGIES = ["vmap", "loop", "hybrid", "auto"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def mlp(p=0.0):
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3)
    ).double()


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 3),
    ).double()


def normed():
    return nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def attention():
    return nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64
    )


MODELS = {
    "mlp": (mlp, (5, 4)),
    "cnn": (cnn, (5, 2, 6, 6)),
    "normed": (normed, (5, 4)),
    "attention": (attention, (5, 3, 8)),
}


X = randn(5, 4)


def build(make=mlp, count=3, seed=0):
    torch.manual_seed(seed)
    models = [make() for _ in range(count)]
    return models, *stack(models)


def assert_alone(found, models, *inputs, tolerance=1e-12):
    """Compare with what the models return for these inputs, one after the other."""
    expected = torch.stack([each(*inputs) for each in models])
    assert_exact(found, expected, tolerance)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("evaluated", [False, True])
@strategies
def test_outputs_are_those_of_the_models(name, evaluated, strategy):
    make, shape = MODELS[name]
    models, fmodel, params, buffers = build(make)
    if evaluated:
        models, fmodel = [each.eval() for each in models], fmodel.eval()
    x = torch.randn(shape, dtype=torch.float64)
    found = ensemble_forward(fmodel, strategy=strategy)(params, buffers, x)
    assert_alone(found, models, x)


def test_functorchs_ensemble_of_mlps():
    """The case of functorch: each member its own batch, or all of them one."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)
    )
    models, fmodel, params, buffers = build(make, 10)
    data = torch.randn(10, 8, 1, 28, 28).flatten(2)
    own = ensemble_forward(fmodel, in_dims=0)(params, buffers, data)
    alone = torch.stack([each(x) for each, x in zip(models, data, strict=True)])
    assert_exact(own, alone, 1e-5)
    same = ensemble_forward(fmodel)(params, buffers, data[0])
    assert_alone(same, models, data[0], tolerance=1e-5)


@strategies
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_each_member_may_have_its_own_batch_on_any_axis(strategy, axis):
    models, fmodel, params, buffers = build()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = torch.stack([each(row) for each, row in zip(models, x, strict=True)])
    forward = ensemble_forward(fmodel, in_dims=axis, strategy=strategy)
    assert_exact(forward(params, buffers, x.movedim(0, axis)), expected, 1e-12)


class Keywords(nn.Module):
    """Takes two inputs, options that are no tensors, and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, other, scale=None, twice=False):
        hidden = self.layer(x) * scale
        hidden = self.layer(hidden) if twice else hidden
        return {"out": hidden + other, "pair": (hidden, x * 2)}


@strategies
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_items_and_results_may_be_trees_with_axes_of_their_own(strategy, chunk_size):
    models, fmodel, params, buffers = build(Keywords)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    other = torch.randn(5, 4, dtype=torch.float64)
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
        found = forward(params, buffers, x, other, options)
        for member, model in enumerate(models):
            scale = options["scale"] if dims[2] is None else scales[member]
            expected = model(x[member], other, scale, options["twice"])
            own = pytree.tree_map(lambda leaf, i=member: leaf[i], found)
            assert_exact(own, expected, 1e-12)


@given(
    size=st.integers(0, 7),
    chunk_size=st.integers(1, 9),
    own=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
)
@examples(40)
def test_chunks_change_nothing(size, chunk_size, own, strategy):
    models, fmodel, params, buffers = build()
    x = torch.randn(*([3] if own else []), size, 4, dtype=torch.float64)
    options = {"in_dims": 0 if own else None, "strategy": strategy}
    found = ensemble_forward(fmodel, chunk_size=chunk_size, **options)(
        params, buffers, x
    )
    rows = x if own else [x] * 3
    expected = torch.stack([each(row) for each, row in zip(models, rows, strict=True)])
    assert_exact(found, expected, 1e-12)


def test_members_may_be_chunked_along_another_axis():
    models, fmodel, params, buffers = build()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    found = ensemble_forward(fmodel, in_dims=1, chunk_size=2)(params, buffers, x)
    expected = torch.stack([each(x[:, i]) for i, each in enumerate(models)])
    assert_exact(found, expected, 1e-12)


@strategies
def test_buffers_come_back_as_each_member_left_them(strategy):
    models, fmodel, params, buffers = build(normed)
    before = {name: value.clone() for name, value in buffers.items()}
    forward = ensemble_forward(fmodel, strategy=strategy)
    output, new = forward.with_buffers(params, buffers, X)
    output, new = forward.with_buffers(params, new, 2 * X)
    for each in models:
        each(X)
    assert_alone(output, models, 2 * X)
    for name, value in new.items():
        assert_exact(
            value, torch.stack([each.get_buffer(name) for each in models]), 1e-12
        )
    assert_exact(buffers, before, 0)


class Offset(nn.Module):
    """Has a constant, a counter and a running value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("constant", torch.arange(4.0, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("running", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        output = self.layer(x) + self.constant
        self.count = self.count + 1
        self.running = self.running + output.detach().mean(0)
        return output


@strategies
def test_shared_entries_have_no_member_axis_before_and_after(strategy):
    models, fmodel, params, buffers = build(Offset)
    patterns = ["layer.bias", "con*", "count"]
    params, buffers = share(params, buffers, patterns)
    forward = ensemble_forward(fmodel, strategy=strategy, shared=patterns)
    output, new = forward.with_buffers(params, buffers, X)
    for model in models[1:]:
        model.layer.bias = models[0].layer.bias
    assert_alone(output, models, X)
    assert {name: value.shape for name, value in new.items()} == {
        "constant": (4,),
        "count": (),
        "running": (3, 4),
    }
    assert new["count"] == 1
    assert_exact(new["running"], torch.stack([each.running for each in models]), 1e-12)


@strategies
def test_members_that_leave_several_values_in_a_shared_buffer_are_refused(strategy):
    _, fmodel, params, buffers = build(Offset)
    params, buffers = share(params, buffers, ["running"])
    forward = ensemble_forward(fmodel, strategy=strategy, shared=["running"])
    assert forward(params, buffers, X).shape == (3, 5, 4)
    with pytest.raises(ValueError, match="one value in the buffer 'running', which"):
        forward.with_buffers(params, buffers, X)


@pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])
def test_randomness_says_whether_members_share_a_mask(strategy):
    _, _, params, buffers = build(count=4)
    drop = lambda params, buffers, x: F.dropout(x, 0.5)  # noqa: E731
    x = torch.ones(50, 4, dtype=torch.float64)
    torch.manual_seed(0)
    masks = ensemble_forward(drop, strategy=strategy)(params, buffers, x)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 4
    options = {"strategy": strategy, "randomness": "same"}
    same = ensemble_forward(drop, **options)(params, buffers, x)
    assert all(torch.equal(mask, same[0]) for mask in same)
    assert 0 < (same[0] == 0).double().mean() < 1
    with pytest.raises(RuntimeError, match='randomness="error". Pass'):
        ensemble_forward(drop, strategy=strategy, randomness="error")(
            params, buffers, x
        )


@pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])
def test_where_nothing_is_random_randomness_error_passes(strategy):
    models, fmodel, params, buffers = build()
    forward = ensemble_forward(fmodel.eval(), strategy=strategy, randomness="error")
    assert_alone(forward(params, buffers, X), models, X)


def test_a_loop_draws_the_masks_that_the_models_would():
    models, fmodel, params, buffers = build(lambda: mlp(0.5))
    torch.manual_seed(3)
    expected = torch.stack([each(X) for each in models])
    torch.manual_seed(3)
    found = ensemble_forward(fmodel, strategy="loop")(params, buffers, X)
    assert_exact(found, expected, 1e-12)
    expected = []
    for each in models:
        torch.manual_seed(3)
        expected.append(each(X))
    torch.manual_seed(3)
    options = {"strategy": "loop", "randomness": "same"}
    found = ensemble_forward(fmodel, **options)(params, buffers, X)
    assert_exact(found, torch.stack(expected), 1e-12)


@pytest.mark.parametrize("strategy", ["auto", "vmap", "hybrid"])
def test_choosing_and_explaining_draw_no_random_numbers(strategy):
    _, fmodel, params, buffers = build(lambda: mlp(0.5))
    known = "hybrid" if strategy == "auto" else strategy
    torch.manual_seed(5)
    expected = ensemble_forward(fmodel, strategy=known)(params, buffers, X)
    for explained in (False, True):
        torch.manual_seed(5)
        forward = ensemble_forward(fmodel, strategy=strategy)
        if explained:
            forward.explain(params, buffers, X)
        assert torch.equal(forward(params, buffers, X), expected)


@strategies
def test_outputs_can_be_differentiated_by_the_parameters(strategy):
    models, fmodel, params, buffers = build(cnn)
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    forward = ensemble_forward(fmodel, strategy=strategy)
    forward(params, buffers, x).pow(2).sum().backward()
    torch.stack([each(x) for each in models]).pow(2).sum().backward()
    for name, value in params.items():
        expected = torch.stack([each.get_parameter(name).grad for each in models])
        assert_exact(value.grad, expected, 1e-10)


@strategies
@pytest.mark.parametrize("name", ["mlp", "cnn", "attention"])
def test_a_policy_computes_as_the_models_alone_under_it(strategy, name):
    make, shape = MODELS[name]
    models, fmodel, params, buffers = build(lambda: make().float())
    x = torch.randn(shape)
    mixed = policy_for(fmodel, "mixed_bfloat16")
    found = ensemble_forward(mixed, strategy=strategy)(params, buffers, x)
    assert found.dtype == torch.float32
    for member, model in enumerate(models):
        own, alone, rest = vgrad.make_functional_with_buffers(model)
        expected = policy_for(own, "mixed_bfloat16")(alone, rest, x)
        exact = model(x)
        assert_exact(found[member], expected, 3e-2)
        assert not torch.equal(found[member], exact)


@strategies
def test_autocast_computes_in_bfloat16(strategy):
    models, fmodel, params, buffers = build(lambda: cnn().float())
    x = torch.randn(5, 2, 6, 6)
    forward = ensemble_forward(fmodel, strategy=strategy)
    with vgrad.autocast("cpu", dtype=torch.bfloat16):
        found = forward(params, buffers, x)
        expected = torch.stack([each(x) for each in models])
    assert found.dtype == expected.dtype == torch.bfloat16
    assert_exact(found.float(), expected.float(), 3e-2)
    outside = forward(params, buffers, x)
    assert_alone(outside, models, x, tolerance=1e-5)


class Failing(nn.Module):
    """Raises in the middle of a forward pass that changes buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.fails = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        return self.fails(self.norm(x))


@strategies
def test_a_forward_pass_that_raises_changes_nothing(strategy):
    _, fmodel, params, buffers = build(Failing)
    before = {name: value.clone() for name, value in {**params, **buffers}.items()}
    same = X.clone()
    forward = ensemble_forward(fmodel, strategy=strategy)
    for call in (forward, forward.with_buffers):
        with pytest.raises(RuntimeError, match="shape|size|dim"):
            call(params, buffers, X)
    assert_exact(({**params, **buffers}, X), (before, same), 0)


def test_dictionaries_of_another_class_are_fine():
    models, fmodel, params, buffers = build(normed)
    found = ensemble_forward(fmodel, strategy="hybrid").with_buffers(
        OrderedDict(params), OrderedDict(buffers), X
    )[0]
    assert_alone(found, models, X)


def test_what_has_shapes_that_depend_on_values_runs_in_a_loop():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x):
            out = self.layer(x)
            return out.clone().index_put((out > 0).nonzero(as_tuple=True), out.sum())

    models, fmodel, params, buffers = build(Chosen)
    for strategy in ("vmap", "hybrid"):
        with pytest.raises(vgrad.UnsupportedOp, match='Use strategy="loop"'):
            ensemble_forward(fmodel, strategy=strategy)(params, buffers, X)
    assert_alone(
        ensemble_forward(fmodel, strategy="loop")(params, buffers, X), models, X
    )
    forward = ensemble_forward(fmodel)
    with pytest.warns(
        vgrad.FallbackWarning, match=r"one member after another.*test_forward.py:\d+: "
    ):
        assert_alone(forward(params, buffers, X), models, X)
    assert_alone(forward(params, buffers, X), models, X)  # and no warning
    found = forward.explain(params, buffers, X)
    assert found.strategy == "loop"
    assert f"{__file__}:" in found.why


def test_batch_statistics_of_a_chunk_are_refused():
    models, fmodel, params, buffers = build(normed)
    for strategy in STRATEGIES:
        options = {"chunk_size": 2, "strategy": strategy}
        with pytest.raises(ValueError, match="batch statistics"):
            ensemble_forward(fmodel, **options)(params, buffers, X)
        found = ensemble_forward(fmodel.eval(), **options)(params, buffers, X)
        assert_exact(found, torch.stack([each.eval()(X) for each in models]), 1e-12)


def test_the_strategy_follows_the_work_of_one_member():
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    _, fmodel, params, buffers = build(cnn)
    explained = ensemble_forward(fmodel).explain(params, buffers, x)
    assert (explained.strategy, explained.members) == ("hybrid", 3)
    assert [op for op, _ in explained.forms] == ["conv2d", "conv2d", "linear"]
    assert "leave a CPU waiting" in explained.why
    # 2 * B * O * I * 9 * side**2 operations in each of two convolutions
    side = int((execution.CONVOLVED * 1e6 / (2 * 2 * 4 * 9)) ** 0.5) + 10
    images = torch.randn(1, 2, side, side, dtype=torch.float64)
    convolutions = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    ).double()
    fmodel, params, buffers = stack([convolutions] * 2)
    explained = ensemble_forward(fmodel).explain(params, buffers, images)
    assert explained.strategy == "loop"
    assert "are convolutions" in explained.why
    rows = int(execution.BUSY * 1e6 / (2 * 64 * 64)) + 10
    fmodel, params, buffers = stack([nn.Linear(64, 64)] * 2)
    explained = ensemble_forward(fmodel).explain(params, buffers, torch.ones(rows, 64))
    assert explained.strategy == "loop"
    assert "keep a CPU busy" in explained.why
    fmodel, params, buffers = stack([nn.Linear(4, 4)])
    explained = ensemble_forward(fmodel).explain(params, buffers, torch.ones(5, 4))
    assert (explained.strategy, explained.why) == ("loop", "there is one member")


def test_an_explanation_is_a_table():
    _, fmodel, params, buffers = build()
    text = str(ensemble_forward(fmodel, strategy="hybrid").explain(params, buffers, X))
    title, empty, header, *rows = text.splitlines()
    assert title == (
        'ensemble_forward of 3 members, strategy hybrid: as strategy="hybrid" says'
    )
    assert empty == ""
    assert header.split() == ["op", "form"]
    assert [row.split() for row in rows] == [["linear", "baddbmm"]] * 2
    for strategy in ("loop", "vmap"):
        forward = ensemble_forward(fmodel, strategy=strategy)
        assert len(str(forward.explain(params, buffers, X)).splitlines()) == 1


def test_inside_of_a_transform_members_run_at_once():
    models, fmodel, params, buffers = build()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for strategy in STRATEGIES:
        forward = ensemble_forward(fmodel, strategy=strategy)
        found = torch.vmap(lambda x: forward(params, buffers, x))(x)  # noqa: B023
        expected = [torch.stack([each(row) for each in models]) for row in x]
        assert_exact(found, torch.stack(expected), 1e-12)


@pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])
def test_models_that_return_more_than_tensors_are_refused(strategy):
    _, fmodel, params, buffers = build()

    def with_none(params, buffers, x):
        return fmodel(params, buffers, x), None

    with pytest.raises(TypeError, match="NoneType"):
        ensemble_forward(with_none, strategy=strategy)(params, buffers, X)


@strategies
def test_models_of_buffers_alone_run(strategy):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.randn(4))

        def forward(self, x):
            return x * self.scale

    models = [Scale(), Scale()]
    fmodel, params, buffers = vgrad.stack(models)
    x = torch.randn(5, 4)
    found = ensemble_forward(fmodel, strategy=strategy)(params, buffers, x)
    assert not params
    assert_alone(found, models, x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "fast"}, ValueError, "strategy='fast'.*one of 'auto', 'vmap'"),
        ({"randomness": "none"}, ValueError, "randomness='none'.*one of 'error'"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0.*whole number >= 1"),
        ({"shared": "0.*"}, TypeError, r"shared='0.\*'.*Write \['0.\*'\]"),
        ({"in_dims": (0, 0)}, ValueError, r"in_dims=\(0, 0\).*each of the 1 items"),
        ({"in_dims": 0}, ValueError, "3 members along axis 0 of item 0.*5, 4"),
        ({"in_dims": 2}, ValueError, "3 members along axis 2 of item 0"),
        ({"shared": ["typo"]}, ValueError, "a parameter or buffer, got none"),
    ],
)
def test_bad_options_are_refused_with_what_was_expected(options, error, message):
    _, fmodel, params, buffers = build()
    with pytest.raises(error, match=message):
        ensemble_forward(fmodel, **options)(params, buffers, X)


def test_bad_arguments_are_refused_with_what_was_expected():
    _, fmodel, params, buffers = build()
    with pytest.raises(ValueError, match="expected 3 members in '0.bias'"):
        ensemble_forward(fmodel)({**params, "0.bias": params["0.bias"][:2]}, {}, X)
    with pytest.raises(ValueError, match=r"chunk_size=2\).with_buffers.*None"):
        ensemble_forward(fmodel, chunk_size=2).with_buffers(params, buffers, X)
    pair = ensemble_forward(lambda params, buffers, x, y: x, chunk_size=2)
    with pytest.raises(ValueError, match=r"batches of one size, got \[4, 5\]"):
        pair(params, buffers, X, X[:4])
    with pytest.raises(TypeError, match="params.*dictionary"):
        ensemble_forward(fmodel)(list(params.values()), buffers, X)


@pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])
def test_all_entries_may_stand_among_the_parameters(strategy):
    fmodel, params, buffers = vgrad.stack([nn.BatchNorm1d(3) for _ in range(2)])
    forward = vgrad.ensemble_forward(fmodel, strategy=strategy)
    x = torch.randn(4, 3)
    out, new = forward.with_buffers({**params, **buffers}, {}, x)
    expected, left = forward.with_buffers(params, buffers, x)
    assert_exact((out, new), (expected, left), 0)

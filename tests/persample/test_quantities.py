import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import STRATEGIES, build, every_strategy, product, squared
from vgrad import explain, tree
from vgrad.persample.engine import STRATEGIES as TABLE

DIFFERENTIABLE = ("vmap", "loop")
INF = float("inf")


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@every_strategy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", losses.CASES)
def test_every_quantity_equals_the_reference(name, dtype, strategy):
    loss, params, buffers, batch, expected = build(name, 5, dtype)
    losses.assert_quantities(
        loss,
        params,
        batch,
        buffers=buffers,
        expected=expected,
        tolerance=losses.CASES[name].tolerance[dtype],
        strategy=strategy,
        chunk_size=2 if strategy == "vmap" else None,
    )


def test_a_planted_wrong_rule_fails_the_comparison():
    loss, params, buffers, batch, expected = build("padding_idx", 4)
    table = expected["0.weight"]
    wrong = {**expected, "0.weight": table + 1e-6 * torch.ones_like(table)}
    grads = vgrad.per_sample_grad(loss)(params, buffers, *batch)
    oracle.assert_exact(grads, expected)
    assert oracle.error(grads, wrong) > 1e-7
    model = losses.CASES["padding_idx"].model().double()
    model[0].padding_idx = None  # what a peer computes: the padding row has a gradient
    model.load_state_dict({name: value.detach() for name, value in params.items()})
    wrong = oracle.model_gradients(model, losses.CASES["padding_idx"].run, batch, 4)
    assert oracle.error(grads, wrong) > 1e-3


@every_strategy
@pytest.mark.parametrize(
    "name", ["mlp", "batch_norm_evaluated", "embedding_bag", "tied"]
)
def test_an_empty_batch_gives_zeros_without_running_the_loss(name, strategy):
    case = losses.CASES[name]
    _, params, buffers = vgrad.make_functional_with_buffers(case.model())
    batch = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf[:0], case.batch(2)
    )

    def loss(params, buffers, *sample):
        raise AssertionError("the loss ran")

    options = {"strategy": strategy}
    grads = vgrad.per_sample_grad(loss, **options)(params, buffers, *batch)
    assert {n: g.shape for n, g in grads.items()} == {
        n: (0, *p.shape) for n, p in params.items()
    }
    assert vgrad.per_sample_norm(loss, **options)(params, buffers, *batch).shape == (0,)
    weights = torch.ones(0)
    total = vgrad.weighted_grad(loss, **options)(weights, params, buffers, *batch)
    clipped = vgrad.clipped_grad(loss, max_norm=1.0, **options)(params, buffers, *batch)
    for sums in (total, clipped.grads):
        assert {n: s.shape for n, s in sums.items()} == {
            n: p.shape for n, p in params.items()
        }
        assert not any(bool(s.any()) for s in sums.values())
    assert clipped.losses.shape == clipped.norms.shape == (0,)
    assert int(clipped.nonfinite) == int(clipped.clipped) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("condition", [1.0, 1e4])
def test_the_tolerance_for_rounding_grows_with_the_condition_alone(condition, dtype):
    def near_zero(x):
        return {"y": x - (1 - 1 / condition)}

    found = oracle.rounding(near_zero, torch.ones(20), dtype=dtype)
    assert 0.4 < found / (condition * torch.finfo(dtype).eps) < 1.001


def linear_loss(params, buffers, x):
    return (params["w"] * x).sum() + params["b"] * x[0]


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "cnn", "flattened"])
def test_the_bound_holds_under_autocast_and_in_low_precision(name, dtype, strategy):
    torch.manual_seed(0)
    case = losses.CASES[name]
    model = case.model().to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x, y = case.batch(3)
    loss = vgrad.sample_loss(fmodel, lambda out, y: 100 * case.criterion(out, y))
    compute = vgrad.clipped_grad(loss, max_norm=0.1, strategy=strategy)
    for row in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            result = compute(
                params, buffers, x[row : row + 1].to(dtype), y[row : row + 1]
            )
        assert all(value.dtype == torch.float32 for value in result.grads.values())
        squares = [v.detach().double().square().sum() for v in result.grads.values()]
        assert float(sum(squares)) ** 0.5 <= 0.1 * (1 + 1e-6)
        assert float(sum(squares)) ** 0.5 >= 0.1 * (1 - 1e-6)


@every_strategy
def test_under_the_autocast_of_the_caller_no_cast_weight_outlives_its_call(strategy):
    seen = []

    def loss(params, buffers, x):
        product = x @ params["w"]
        seen.append(product.dtype)
        return product.float().square().sum()

    params, x = {"w": torch.randn(3, 2, requires_grad=True)}, torch.randn(2, 4, 3)
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    with torch.autocast("cpu", torch.bfloat16):
        _ = x @ params["w"]
        first, second = (compute(params, {}, x)["w"] for _ in range(2))
        assert torch.is_autocast_cache_enabled()
    assert set(seen) == {torch.bfloat16}
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert bool(second.any())


@every_strategy
def test_aux_is_stacked_over_samples(strategy):
    def loss(params, buffers, x):
        value = (params["w"] * x).sum()
        return value, {"half": value / 2, "x": x}

    params, x = {"w": torch.ones(2)}, torch.randn(5, 2)
    options = {"strategy": strategy, "chunk_size": 2, "has_aux": True}
    weights = torch.ones(5)
    for result, aux in (
        vgrad.per_sample_grad(loss, **options)(params, {}, x),
        vgrad.per_sample_norm(loss, **options)(params, {}, x),
        vgrad.weighted_grad(loss, **options)(weights, params, {}, x),
        vgrad.clipped_grad(loss, max_norm=1.0, **options)(params, {}, x),
        vgrad.per_sample_projection(loss, 3, seed=0, **options)(params, {}, x),
    ):
        assert result is not None
        assert torch.equal(aux["x"], x)
        torch.testing.assert_close(aux["half"], x.sum(1) / 2)
    assert vgrad.per_sample_norm(loss, **options)(params, {}, x[:0])[1] is None


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 100, "auto"])
def test_results_do_not_depend_on_the_chunk_size(chunk_size):
    loss, params, buffers, batch, _ = build("cnn", 5)
    compute = vgrad.clipped_grad(loss, max_norm=0.5, chunk_size=chunk_size)
    whole = vgrad.clipped_grad(loss, max_norm=0.5)(params, buffers, *batch)
    found = compute(params, buffers, *batch)
    oracle.assert_exact(found.grads, whole.grads, 1e-12)
    torch.testing.assert_close(found.norms, whole.norms)
    grads = vgrad.per_sample_grad(loss, chunk_size=chunk_size)(params, buffers, *batch)
    assert grads["0.weight"].shape[0] == 5


def test_the_order_of_samples_does_not_matter():
    loss, params, buffers, (x, y), _ = build("mlp", 5)
    compute = vgrad.clipped_grad(loss, max_norm=0.5)
    order = torch.tensor([3, 1, 4, 0, 2])
    one, other = (
        compute(params, buffers, x, y),
        compute(params, buffers, x[order], y[order]),
    )
    oracle.assert_exact(one.grads, other.grads, 1e-12)
    torch.testing.assert_close(one.norms[order], other.norms)


def test_memory_of_a_chunked_sum_does_not_grow_with_the_batch(monkeypatch):
    live, weak = [], []
    original = vgrad.persample.factors.reductions.row_norms

    def watched(grad):
        weak.append(weakref.ref(grad))
        live.append(sum(ref() is not None for ref in weak))
        return original(grad)

    monkeypatch.setattr("vgrad.persample.factors.reductions.row_norms", watched)
    compute = vgrad.clipped_grad(product, max_norm=1.0, chunk_size=4)
    compute({"w": torch.zeros(100_000)}, {}, torch.ones(64, 1))
    assert live == [1] * 16


@every_strategy
def test_a_loss_may_change_its_sample_but_not_its_parameters(strategy):
    def changes_sample(params, buffers, x):
        return (params["w"] * x.mul_(2)).sum()

    x = torch.ones(3, 2)
    params = {"w": torch.ones(2)}
    grads = vgrad.per_sample_grad(changes_sample, strategy=strategy)(params, {}, x)
    assert torch.equal(grads["w"], torch.full((3, 2), 2.0))
    assert torch.equal(x, torch.ones(3, 2))


WRITES = [
    "n.add_(1)",
    "F.embedding(torch.tensor([0]), w, max_norm=0.01)",
    "w.clamp_(0, 0.5)",
    "w.t()[0].zero_()",
    "w.data.clamp_(0, 0.5)",
    "w.detach().view(-1).mul_(2)",
    "w.__setitem__(0, 1.0)",
    "torch.sin(w, out=w)",
    "F.relu(w, inplace=True)",
    "torch._foreach_mul_([w], 2.0)",
    "torch.ops.aten.mul_.Tensor(w, w)",
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize("write", WRITES)
def test_a_loss_that_writes_into_what_it_is_given_has_not_done_so(
    write, strategy, requires_grad
):
    def loss(params, buffers, x):
        with torch.set_grad_enabled(write.startswith(("n.", "F.embedding"))):
            eval(write, globals() | params | buffers)
        return (params["w"] @ x).sin().sum()

    params = {"w": torch.full((2, 3), 0.9, requires_grad=requires_grad)}
    buffers, x = {"n": torch.zeros(())}, torch.randn(4, 3)
    saved = [each.clone() for each in (params["w"], buffers["n"], x)]
    refused = "changes nothing it is given, got|`data` under vmap"
    for compute in (
        vgrad.per_sample_norm(loss, strategy=strategy),
        vgrad.clipped_grad(loss, max_norm=1.0, strategy=strategy, chunk_size="auto"),
        explain(vgrad.per_sample_norm(loss, strategy=strategy)),
    ):
        with pytest.raises(RuntimeError, match=refused):
            compute(params, buffers, x)
    for each, before in zip((params["w"], buffers["n"], x), saved, strict=True):
        assert torch.equal(each, before)


@pytest.mark.parametrize("strategy", DIFFERENTIABLE)
def test_results_can_be_differentiated_where_inputs_require_grad(strategy):
    def loss(params, buffers, x):
        return (params["w"] * x).sum() ** 3

    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 2, dtype=torch.float64)
    compute = vgrad.per_sample_norm(loss, strategy=strategy)
    assert torch.autograd.gradcheck(lambda w: compute({"w": w}, {}, x), (w,))
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    total = vgrad.weighted_grad(loss, strategy=strategy)(weights, {"w": w}, {}, x)
    total["w"].sum().backward()
    grads = vgrad.per_sample_grad(loss, strategy=strategy)({"w": w}, {}, x)["w"]
    torch.testing.assert_close(weights.grad, grads.sum(1).detach())


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_weighted_sums_are_differentiated_by_their_weights_or_refuse(
    strategy, chunk_size, also
):
    def loss(params, buffers, x):  # the second parameter has no rule, the third no use
        return (F.linear(x, params["w"]) * params["v"]).sin().sum()

    torch.manual_seed(0)
    shapes = {"w": (2, 3), "v": (2,), "none": (1,)}
    params = {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    x = torch.randn(5, 3, dtype=torch.float64)
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True)
    exact = oracle.loss_gradients(loss, params, {}, (x,), 5)
    if also:
        params = {name: value.requires_grad_() for name, value in params.items()}
    compute = vgrad.weighted_grad(loss, strategy=strategy, chunk_size=chunk_size)
    total = compute(weights, params, {}, x)
    oracle.assert_exact(total, oracle.weighted(exact, weights), 1e-12)
    for name, value in total.items():
        # Only together with something else would a constant go unnoticed.
        mixed = value.sum() + weights.sum()
        if strategy in DIFFERENTIABLE:
            (found,) = torch.autograd.grad(mixed, weights, retain_graph=True)
            torch.testing.assert_close(found, 1 + exact[name].flatten(1).sum(1))
        else:
            with pytest.raises(RuntimeError, match='was recorded.*strategy="vmap"'):
                torch.autograd.grad(mixed, weights)
    with torch.no_grad():
        total = compute(weights, params, {}, x)
    assert not any(value.requires_grad for value in total.values())
    gradient = torch.func.grad(
        lambda weights: compute(weights, params, {}, x)["w"][0, 0]
    )
    if strategy != "recorded":
        torch.testing.assert_close(gradient(weights.detach()), exact["w"][:, 0, 0])


@every_strategy
def test_results_are_no_function_of_a_loss_scale(strategy):
    scale = torch.tensor(8.0, requires_grad=True)
    compute = vgrad.per_sample_grad(
        squared,
        strategy=strategy,
        loss_scale=types.SimpleNamespace(loss_scale=scale),  # a scale of one's own
    )
    grads = compute({"w": torch.ones(2)}, {}, torch.ones(3, 2))
    assert torch.equal(grads["w"], torch.full((3, 2), 2.0))
    assert not grads["w"].requires_grad


@pytest.mark.parametrize("strategy", DIFFERENTIABLE)
def test_transforms_of_torch_func_go_around(strategy):
    loss, params, buffers, (x, y), _ = build("mlp", 3)
    params = {name: value.detach() for name, value in params.items()}
    compute = vgrad.clipped_grad(loss, max_norm=0.5, strategy=strategy)
    stacked = {name: torch.stack([value, value * 2]) for name, value in params.items()}
    members = torch.vmap(compute, in_dims=(0, None, None, None))(stacked, buffers, x, y)
    alone = compute({n: value * 2 for n, value in params.items()}, buffers, x, y)
    oracle.assert_exact(
        {name: value[1] for name, value in members.grads.items()}, alone.grads
    )
    torch.testing.assert_close(members.norms[1], alone.norms)


def drops(params, buffers, x):
    return (params["w"] * F.dropout(x, 0.5)).sum()


@every_strategy
def test_randomness_is_refused_drawn_per_sample_or_shared(strategy):
    params, x = {"w": torch.ones(64)}, torch.ones(4, 64)

    def masks(randomness, chunk_size=None):
        options = {"strategy": strategy, "chunk_size": chunk_size}
        compute = vgrad.per_sample_grad(drops, randomness=randomness, **options)
        return compute(params, {}, x)["w"]

    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match='randomness="different"'):
        masks("error")
    assert torch.equal(torch.get_rng_state(), state)
    different = masks("different")
    assert not torch.equal(different[0], different[1])
    for chunk_size in (None, 3):
        same = masks("same", chunk_size)
        assert all(torch.equal(same[0], row) for row in same)


def test_a_loop_draws_the_masks_that_the_loss_would_draw_by_itself():
    params, x = {"w": torch.ones(64)}, torch.ones(4, 64)
    compute = vgrad.per_sample_grad(drops, strategy="loop", randomness="different")
    torch.manual_seed(3)
    found = compute(params, {}, x)["w"]
    torch.manual_seed(3)
    expected = [torch.func.grad(drops)(params, {}, row)["w"] for row in x]
    assert torch.equal(found, torch.stack(expected))


def test_the_sensitivity_is_the_bound_over_the_divisor():
    compute = vgrad.clipped_grad(linear_loss, max_norm=2.0, normalize_by=8.0)
    assert compute.sensitivity == vgrad.Sensitivity(0.25)
    assert compute.sensitivity.neighbours == "add_or_remove_one"


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_a_rescaled_sum_is_the_sum_over_the_bound(clipping):
    params, x = {"w": torch.ones(2), "b": torch.zeros(())}, torch.randn(5, 2)
    options = {"max_norm": 0.25, "normalize_by": 8.0, "clipping": clipping}
    plain = vgrad.clipped_grad(linear_loss, **options)
    rescaled = vgrad.clipped_grad(linear_loss, **options, rescale=True)
    assert rescaled.sensitivity == vgrad.Sensitivity(0.125)
    found, expected = (each(params, {}, x) for each in (rescaled, plain))
    for name, value in expected.grads.items():
        torch.testing.assert_close(found.grads[name], value * 4, rtol=1e-7, atol=0)
    assert torch.equal(found.norms, expected.norms)


def pickled_loss(params, buffers, x):
    return (params["w"] * x).square().sum()


@pytest.mark.parametrize(
    "transform",
    [
        *(vgrad.per_sample_grad(pickled_loss), vgrad.per_sample_gram(pickled_loss)),
        vgrad.per_sample_norm(pickled_loss, groups="layer"),
        vgrad.per_sample_projection(pickled_loss, dim=4, seed=0),
        vgrad.clipped_grad(pickled_loss, max_norm=1.0),
        vgrad.gradient_moments(pickled_loss),
    ],
    ids=lambda transform: transform.options.function,
)
def test_transforms_can_be_pickled(transform):
    given = {"w": torch.ones(2)}, {}, torch.randn(3, 2)
    again = pickle.loads(pickle.dumps(transform))
    found, expected = again(*given), transform(*given)
    for one, other in zip(tree.tensors(found), tree.tensors(expected), strict=True):
        assert torch.equal(one, other)


def test_parameters_of_several_dtypes_go_together():
    def loss(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"].float() * x).sum()

    params = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    x = torch.randn(3, 2)
    grads = vgrad.per_sample_grad(loss)(params, {}, x)
    assert grads["b"].dtype == torch.bfloat16
    result = vgrad.clipped_grad(loss, max_norm=0.1)(params, {}, x)
    assert result.grads["b"].dtype == result.norms.dtype == torch.float32


clip, grad, norm = vgrad.clipped_grad, vgrad.per_sample_grad, vgrad.per_sample_norm
PATTERNS = r"groups\['a'\]='w'\): expected a list or tuple of patterns.*\['w'\]"


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (clip, {"max_norm": 0}, ValueError, "=0\\): expected max_norm > 0"),
        (clip, {"max_norm": "1"}, TypeError, "max_norm='1'.*a number"),
        (clip, {"max_norm": 1, "normalize_by": -1}, ValueError, "normalize_by=-1"),
        (clip, {"max_norm": INF, "rescale": True}, ValueError, "max_norm=inf.*< 1e"),
        (grad, {"chunk_size": 0}, ValueError, "chunk_size=0"),
        (grad, {"chunk_size": "some"}, ValueError, "'some'.*'auto'"),
        (grad, {"randomness": "all"}, ValueError, "randomness='all'.*'different'"),
        (norm, {"loss": 3}, TypeError, "loss=3.*sample_loss"),
        (norm, {"groups": {"a": "w"}}, TypeError, PATTERNS),
        (norm, {"groups": "module"}, ValueError, "groups='module'"),
    ],
)
def test_bad_arguments_are_named(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**{"loss": linear_loss, **options})


def test_groups_are_apart_and_match():
    params, x = {"w": torch.ones(2), "b": torch.zeros(())}, torch.ones(3, 2)

    def norms(groups):
        return vgrad.per_sample_norm(linear_loss, groups=groups)(params, {}, x)

    torch.testing.assert_close(norms({"both": ["b", "w"]})["both"], norms(None))
    with pytest.raises(ValueError, match="'c' matches none of"):
        norms({"a": ["w", "c"]})
    with pytest.raises(ValueError, match="'w' is in 'a' and 'all'"):
        norms({"a": ["w"], "all": ["*"]})


def test_the_error_lists_the_strategies_there_are():
    with pytest.raises(ValueError, match="strategy='fast'") as caught:
        vgrad.per_sample_grad(linear_loss, strategy="fast")
    assert all(repr(name) in str(caught.value) for name in ("auto", *TABLE))


X, ONES = torch.ones(3, 2), {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("params", "buffers", "batch", "error", "message"),
    [
        (ONES, {}, (X, torch.ones(4)), ValueError, r"sizes \[3, 4\]"),
        (ONES, {}, (torch.ones(()),), ValueError, "without dimensions"),
        (ONES, {}, (3, None), ValueError, "no tensor"),
        (ONES, {}, (X.numpy(),), TypeError, "ndarray"),
        (ONES, None, (X,), TypeError, "buffers.*expected a dictionary"),
        (ONES, (X,), (X,), TypeError, "buffers.*expected a dictionary"),
        ({}, {}, (X,), ValueError, "at least one parameter"),
        ({"w": X.long()}, {}, (X,), ValueError, "int64 in 'w'. Move it to the buffers"),
        ({"w": [1.0]}, {}, (X,), TypeError, "tensor in 'w', got a list"),
    ],
)
def test_bad_inputs_are_named(params, buffers, batch, error, message):
    with pytest.raises(error, match=message):
        vgrad.per_sample_grad(linear_loss)(params, buffers, *batch)


def test_a_module_of_double_size_takes_a_frozen_part_as_constant():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    trained, constant = vgrad.freeze(params, buffers, ["0.*"])
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    x, y = torch.randn(3, 4).double(), torch.randint(3, (3,))
    grads = vgrad.per_sample_grad(loss)(trained, constant, x, y)
    expected = oracle.model_gradients(model, losses.CASES["mlp"].run, (x, y), 3)
    assert grads.keys() == {"1.weight", "1.bias"}
    oracle.assert_exact(grads, {name: expected[name] for name in grads})


def test_a_nonfinite_sample_adds_nothing_inside_a_transform_either():
    compute = vgrad.clipped_grad(product, max_norm=1.0)
    x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [0.1, 0.2]])
    eager = compute({"w": torch.ones(2)}, {}, x).grads["w"]
    mapped = torch.vmap(lambda w: compute({"w": w}, {}, x).grads["w"])(torch.ones(1, 2))
    torch.testing.assert_close(mapped[0], eager)


@every_strategy
def test_gradients_are_partial_where_a_parameter_is_reached_twice(strategy):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([[3.0, 4.0], [5.0, 6.0]])

    def anchored(params, buffers, x):
        return product(params, buffers, x) + (params["w"] * buffers["anchor"]).sum()

    compute = vgrad.per_sample_grad(anchored, strategy=strategy)
    torch.testing.assert_close(compute({"w": w}, {"anchor": w}, x)["w"], x + w)
    compute = vgrad.per_sample_grad(product, strategy=strategy)
    torch.testing.assert_close(compute({"w": w}, {}, x * w)["w"], x * w)

    def both(params, buffers, x):
        return (params["a"] * x).sum() + (params["b"] ** 2).sum()

    grads = vgrad.per_sample_grad(both, strategy=strategy)({"a": w, "b": w}, {}, x)
    torch.testing.assert_close(grads["a"], x)
    torch.testing.assert_close(grads["b"], (2 * w).expand(2, 2))


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_loss_may_bind_names_anew_in_its_dictionaries(strategy, chunk_size):
    def loss(params, buffers, x):
        params["w"] = F.normalize(params["w"], dim=0)
        value = product(params, buffers, x) * buffers["n"]
        buffers["n"] = buffers["n"] + x.sum()
        return value

    x = torch.randn(4, 2, dtype=torch.float64)
    params = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    buffers = {"n": torch.tensor(3.0, dtype=torch.float64)}
    options = {"strategy": strategy, "chunk_size": chunk_size}
    grads = vgrad.per_sample_grad(loss, **options)(params, buffers, x)
    expected = oracle.loss_gradients(
        lambda p, b, x: product({"w": F.normalize(p["w"], dim=0)}, b, x) * b["n"],
        params,
        buffers,
        (x,),
        4,
    )
    oracle.assert_exact(grads, expected, 1e-12)
    assert float(buffers["n"]) == 3


def test_one_sample_moves_a_long_sum_by_no_more_than_the_sensitivity():
    compute = vgrad.clipped_grad(product, max_norm=1.0)
    pair = torch.tensor([[-(0.5 + 2**-12)], [0.5]]).repeat(2000, 1)
    rest = torch.cat([torch.ones(4095, 1), torch.tensor([[0.25]]), pair])
    params = {"w": torch.ones(1)}
    one = compute(params, {}, torch.cat([torch.ones(1, 1), rest])).grads["w"]
    other = compute(params, {}, rest).grads["w"]
    # The results themselves are float32, near 4000: half a unit there is 1.2e-4.
    assert abs(float(one - other)) <= compute.sensitivity.value + 5e-4


def test_long_sums_do_not_drift():
    weights = torch.full((100_000,), 0.1)
    x = torch.ones(100_000, 1)
    total = vgrad.weighted_grad(product)(weights, {"w": torch.ones(1)}, {}, x)["w"]
    assert float(total) == pytest.approx(100_000 * float(weights[0]), rel=1e-6)


@pytest.mark.parametrize("strategy", DIFFERENTIABLE)
@pytest.mark.parametrize("size", [1.0, 1e-26, 1e26])
def test_second_derivatives_survive_a_sample_without_gradient(strategy, size):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]]) * size**0.5
    norms = vgrad.per_sample_norm(squared, strategy=strategy)({"w": w}, {}, x)
    (found,) = torch.autograd.grad(norms.sum(), w)
    expected = 2 * size * w.detach() / w.detach().norm()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    clipped = vgrad.clipped_grad(squared, max_norm=1.0, strategy=strategy)(
        {"w": w}, {}, x
    )
    (found,) = torch.autograd.grad(clipped.grads["w"].sum(), w)
    assert bool(found.isfinite().all())


@pytest.mark.filterwarnings("ignore")  # torch's own, about how linearize traces
@pytest.mark.parametrize("strategy", DIFFERENTIABLE)
def test_forward_mode_sees_the_result(strategy):
    def mean_norm(w):
        return vgrad.per_sample_norm(squared, strategy=strategy)({"w": w}, {}, x).mean()

    x = torch.ones(2, 2)
    _, tangent = torch.func.linearize(mean_norm, torch.tensor([1.0, 2.0]))
    expected = torch.autograd.functional.jacobian(mean_norm, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(tangent(torch.tensor([1.0, 0.0])), expected[0])


WRONG = {
    "complex": (lambda p, b, x: product(p, b, x) * (1 + 1j), "real tensor.*complex64"),
    "whole": (lambda p, b, x: (p["w"] > x).sum(), "real tensor.*int64"),
    "shape": (lambda p, b, x: p["w"] * x, r"without dimensions.*torch.float32 \(2,\)"),
    "pair": (lambda p, b, x: (product(p, b, x), x), "has_aux=True a pair.*tuple"),
    "no aux": (product, r"returns \(scalar, aux\), got a Tensor"),
    "aux": (lambda p, b, x: (product(p, b, x), {"n": 3}), "aux, got a int"),
}


@every_strategy
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_returns_something_else_is_refused(name, strategy):
    loss, message = WRONG[name]
    compute = vgrad.per_sample_grad(loss, strategy=strategy, has_aux="aux" in name)
    with pytest.raises(TypeError if name == "aux" else ValueError, match=message):
        compute({"w": torch.ones(2)}, {}, torch.ones(3, 2))


def test_weights_keep_their_digits():
    weights = torch.tensor([2**24 + 1])
    params = {"w": torch.ones(1, dtype=torch.float64)}
    x = torch.ones(1, 1, dtype=torch.float64)
    total = vgrad.weighted_grad(product)(weights, params, {}, x)["w"]
    assert float(total) == 2**24 + 1
    for weights, message in [
        (torch.ones(1) * 1j, "one real weight a sample"),
        (torch.ones(2), r"shape \(1,\), got \(2,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            vgrad.weighted_grad(product)(weights, params, {}, x)


def test_rows_of_a_result_share_no_memory():
    def loss(params, buffers, x):
        return params["u"].sum() + (params["w"] * x).sum()

    params = {"u": torch.ones(2), "w": torch.ones(2)}
    grads = vgrad.per_sample_grad(loss)(params, {}, torch.ones(3, 2))
    grads["u"][0] = 7
    assert torch.equal(grads["u"][1], torch.ones(2))


def test_sparse_gradients_are_made_dense_by_the_loop():
    model = nn.Sequential(
        nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(4, 3)
    )
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    batch = torch.tensor([[1, 1], [0, 3]]), torch.tensor([0, 2])
    dense = losses.CASES["mlp"].run
    model[0].sparse = False
    expected = oracle.model_gradients(model, dense, batch, 2)
    compute = vgrad.clipped_grad(loss, max_norm=0.1, strategy="loop")
    found = compute(params, buffers, *batch).grads
    oracle.assert_exact(found, oracle.clipped(expected, 0.1), 1e-5)

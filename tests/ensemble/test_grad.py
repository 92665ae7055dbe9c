"""Gradients of all members are those of each member's own backward pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.examples import examples
from tests.oracle import assert_exact
from tests.persample.test_record import Rounded
from vgrad.ensemble import EnsembleGrads, ensemble_grad, share, stack

STRATEGIES = ["vmap", "loop", "hybrid", "auto"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


class Pairs(nn.Module):
    """An embedding that pads, an LSTM and attention of its outputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(self.attend(hidden, hidden, hidden)[0].mean(1))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def cnn():
    """No bias in front of the norm: its gradient is rounding."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 3),
    ).double()


MODELS = {
    "mlp": (mlp, lambda *size: torch.randn(*size, 4, dtype=torch.float64)),
    "cnn": (cnn, lambda *size: torch.randn(*size, 2, 6, 6, dtype=torch.float64)),
    "pairs": (
        lambda: Pairs().double(),
        lambda *size: torch.randint(7, (*size, 5)),
    ),
}


def build(name="mlp", count=3, seed=0):
    torch.manual_seed(seed)
    make, batch = MODELS[name]
    models = [make() for _ in range(count)]
    fmodel, params, buffers = stack(models)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    return models, loss, params, buffers, batch


def reference(models, batches, weights=None):
    """Losses and gradients by plain autograd, one model after the other."""
    losses, grads = [], []
    for number, (model, (x, y)) in enumerate(zip(models, batches, strict=True)):
        loss = F.cross_entropy(model(x), y)
        weight = 1.0 if weights is None else weights[number]
        named = dict(model.named_parameters())
        found = torch.autograd.grad(weight * loss, list(named.values()))
        losses.append(loss.detach())
        grads.append(dict(zip(named, found, strict=True)))
    joined = {name: torch.stack([each[name] for each in grads]) for name in grads[0]}
    return torch.stack(losses), joined


def assert_right(result, models, batches, weights=None):
    losses, grads = reference(models, batches, weights)
    assert_exact((result.losses, result.grads), (losses, grads))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("own", [False, True])
@strategies
def test_all_strategies_give_the_gradients_of_plain_autograd(name, own, strategy):
    models, loss, params, buffers, batch = build(name)
    size = (3, 5) if own else (5,)
    x, y = batch(*size), torch.randint(3, size)
    compute = ensemble_grad(loss, in_dims=0 if own else None, strategy=strategy)
    result = compute(params, buffers, x, y)
    batches = list(zip(x, y, strict=True)) if own else [(x, y)] * 3
    assert_right(result, models, batches)
    for name, value in result.buffers.items():
        assert_exact(value, torch.stack([each.get_buffer(name) for each in models]))
    leaves = [*result.grads.values(), result.losses, *result.buffers.values()]
    assert not any(leaf.requires_grad for leaf in leaves)
    assert all(value.grad is None for value in params.values())


@given(
    members=st.integers(1, 4),
    rows=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    bias=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
)
@examples(30)
def test_any_sizes_are_right(members, rows, widths, bias, strategy):
    torch.manual_seed(0)
    inner, outer = widths
    models = [
        nn.Sequential(
            nn.Linear(3, inner, bias=bias), nn.Tanh(), nn.Linear(inner, outer)
        ).double()
        for _ in range(members)
    ]
    fmodel, params, buffers = stack(models)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    x = torch.randn(rows, 3, dtype=torch.float64)
    y = torch.randint(outer, (rows,))
    result = ensemble_grad(loss, strategy=strategy)(params, buffers, x, y)
    assert_right(result, models, [(x, y)] * members)


@strategies
def test_shared_gradients_are_sums_over_the_members(strategy):
    models, loss, params, buffers, batch = build("cnn")
    patterns = ["0.*", "5.weight"]
    params, buffers = share(params, buffers, patterns)
    for model in models[1:]:
        model[0].load_state_dict(models[0][0].state_dict())
        model[5].weight.data.copy_(models[0][5].weight)
    x, y = batch(5), torch.randint(3, (5,))
    compute = ensemble_grad(loss, strategy=strategy, shared=patterns)
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    result = compute(params, buffers, x, y, loss_scale=weights)
    _, grads = reference(models, [(x, y)] * 3, weights)
    for name in ("0.weight", "5.weight"):
        grads[name] = grads[name].sum(0)
    assert_exact(result.grads, grads)


@strategies
def test_all_parameters_may_be_shared_where_buffers_are_not(strategy):
    models, loss, params, buffers, batch = build("cnn")
    names = list(params)
    params, buffers = share(params, buffers, names)
    x, y = batch(5), torch.randint(3, (5,))
    compute = ensemble_grad(loss, strategy=strategy, shared=names)
    _, grads = reference([models[0]], [(x, y)])
    result = compute(params, buffers, x, y)
    assert_exact(result.grads, {name: 3 * grad[0] for name, grad in grads.items()})


@strategies
def test_the_loss_scale_is_in_the_gradients_and_not_in_the_losses(strategy):
    models, loss, params, buffers, batch = build()
    x, y = batch(5), torch.randint(3, (5,))
    compute = ensemble_grad(loss, strategy=strategy)
    for scale in (8.0, 0.1, torch.tensor(8.0), torch.tensor([0.0, 1.0, 2.0**15])):
        weights = torch.as_tensor(scale, dtype=torch.float64).expand(3)
        result = compute(params, buffers, x, y, loss_scale=scale)
        assert_right(result, models, [(x, y)] * 3, weights)
        assert {grad.dtype for grad in result.grads.values()} == {torch.float64}
    with pytest.raises(ValueError, match="shape \\(2,\\).*one for each of the 3 mem"):
        compute(params, buffers, x, y, loss_scale=torch.ones(2))
    with pytest.raises(ValueError, match="shape \\(2, 3\\)"):
        compute(params, buffers, x, y, loss_scale=torch.ones(2, 3))


def quadratic(params, buffers, x):
    return ((params["w"] * x).sum(-1) - buffers["target"]).square().mean()


def tensors(count=3):
    made = torch.Generator().manual_seed(1)
    params = {"w": torch.randn(count, 4, dtype=torch.float64, generator=made)}
    buffers = {"target": torch.randn(count, dtype=torch.float64, generator=made)}
    return params, buffers, torch.randn(5, 4, dtype=torch.float64, generator=made)


def by_hand(params, buffers, x):
    residual = params["w"] @ x.mT - buffers["target"].unsqueeze(1)
    return 2 * (residual.unsqueeze(2) * x).mean(1)


@strategies
def test_a_loss_of_ones_own_needs_no_buffers_to_return(strategy):
    params, buffers, x = tensors()
    result = ensemble_grad(quadratic, strategy=strategy)(params, buffers, x)
    assert_exact(result.grads["w"], by_hand(params, buffers, x))
    assert isinstance(result, EnsembleGrads)
    assert_exact(result.buffers, buffers, 0)
    shared = {"target": buffers["target"][0]}
    compute = ensemble_grad(quadratic, strategy=strategy, shared=["target"])
    result = compute(params, shared, x)
    assert result.buffers["target"].shape == ()
    expanded = {"target": shared["target"].expand(3)}
    assert_exact(result.grads["w"], by_hand(params, expanded, x))


@strategies
def test_parameters_that_a_loss_does_not_use_have_zero_gradients(strategy):
    params, buffers, x = tensors()
    params["unused"] = torch.ones(3, 2, dtype=torch.float64)
    result = ensemble_grad(quadratic, strategy=strategy)(params, buffers, x)
    expected = {"w": by_hand(params, buffers, x), "unused": 0 * params["unused"]}
    assert_exact(result.grads, expected)


@strategies
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_member(strategy, bad):
    models, loss, params, buffers, batch = build("cnn")
    params = {name: value.detach().clone() for name, value in params.items()}
    params["5.weight"][1] = bad
    x, y = batch(5), torch.randint(3, (5,))
    result = ensemble_grad(loss, strategy=strategy)(params, buffers, x, y)
    losses, grads = reference(models, [(x, y)] * 3)
    others = [0, 2]
    assert result.losses.isfinite().tolist() == [True, False, True]
    assert_exact(result.losses[others], losses[others])
    for name, grad in grads.items():
        assert_exact(result.grads[name][others], grad[others])
    assert not result.grads["5.bias"][1].isfinite().any()


@strategies
def test_gradients_can_be_differentiated_inside_of_torch_func(strategy):
    """A loss after a step, differentiated by what came before it."""
    params, buffers, x = tensors()

    def after(start):
        compute = ensemble_grad(quadratic, strategy=strategy)
        grads = compute(start, buffers, x).grads
        return (start["w"] - 0.1 * grads["w"]).pow(3).sum()

    def expected(start):
        return (start["w"] - 0.1 * by_hand(start, buffers, x)).pow(3).sum()

    found = torch.func.grad(after)(params)["w"]
    assert_exact(found, torch.func.grad(expected)(params)["w"])


@strategies
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_second_derivatives_of_models_are_right(strategy, name):
    models, loss, params, buffers, batch = build(name)
    params = {key: value.detach() for key, value in params.items()}
    x, y = batch(5), torch.randint(3, (5,))

    def norm(params):
        result = ensemble_grad(loss, strategy=strategy)(params, buffers, x, y)
        return sum(grad.square().sum() for grad in result.grads.values())

    found = torch.func.grad(norm)(params)
    for member, model in enumerate(models):
        named = dict(model.named_parameters())
        value = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(value, list(named.values()), create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        expected = torch.autograd.grad(total, list(named.values()))
        for key, grad in zip(named, expected, strict=True):
            assert_exact(found[key][member], grad, 1e-9)


@strategies
def test_members_may_be_mapped_once_more(strategy):
    """Several ensembles at once: a sweep."""
    params, buffers, x = tensors()
    sweep = torch.stack([params["w"], 2 * params["w"]])
    compute = ensemble_grad(quadratic, strategy=strategy)
    found = torch.vmap(lambda w: compute({"w": w}, buffers, x).grads["w"])(sweep)
    for each, grad in zip(sweep, found, strict=True):
        assert_exact(grad, by_hand({"w": each}, buffers, x))


@strategies
def test_a_gradient_penalty_inside_of_the_loss_is_right(strategy):
    models, _, params, buffers, batch = build()
    fmodel, _, _ = stack(models)
    x = batch(5)

    def penalty(params, buffers, x):
        slopes = torch.func.grad(lambda x: fmodel(params, buffers, x).sum())(x)
        return slopes.square().sum()

    result = ensemble_grad(penalty, strategy=strategy)(params, buffers, x)
    for member, model in enumerate(models):
        leaf = x.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        total = slopes.square().sum()
        assert_exact(result.losses[member], total.detach())
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(
            total, list(named.values()), allow_unused=True, materialize_grads=True
        )
        for key, grad in zip(named, grads, strict=True):
            assert_exact(result.grads[key][member], grad)


def test_a_loss_that_calls_autograd_runs_in_a_loop_and_is_refused_elsewhere():
    params, buffers, x = tensors()

    def penalty(params, buffers, x):
        leaf = x.detach().requires_grad_()
        value = (params["w"] * leaf).pow(2).sum()
        (slopes,) = torch.autograd.grad(value, leaf, create_graph=True)
        return slopes.pow(2).sum()

    with torch.no_grad():
        result = ensemble_grad(penalty, strategy="loop")(params, buffers, x)
    # slopes = 2 w^2 x, so the loss is 4 w^4 x^2
    expected = 16 * params["w"] ** 3 * x.square().sum(0)
    assert_exact(result.grads["w"], expected)
    for strategy in ("vmap", "hybrid"):
        with pytest.raises(vgrad.UnsupportedOp, match='autograd.*strategy="loop"'):
            ensemble_grad(penalty, strategy=strategy)(params, buffers, x)
    with pytest.warns(
        vgrad.FallbackWarning, match="one member after another.*autograd"
    ):
        result = ensemble_grad(penalty)(params, buffers, x)
    assert_exact(result.grads["w"], expected)


@pytest.mark.parametrize("strategy", ["vmap", "loop", "hybrid"])
def test_members_draw_their_own_random_numbers(strategy):
    def loss(params, buffers, x):
        return (params["w"] * F.dropout(x, 0.5)).sum()

    params, buffers, _ = tensors()
    x = torch.ones(20, 4, dtype=torch.float64)
    torch.manual_seed(0)
    grads = ensemble_grad(loss, strategy=strategy)(params, buffers, x).grads["w"]
    assert len({tuple(each.tolist()) for each in grads}) == 3
    options = {"strategy": strategy, "randomness": "same"}
    grads = ensemble_grad(loss, **options)(params, buffers, x).grads["w"]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    with pytest.raises(RuntimeError, match='randomness="error"'):
        ensemble_grad(loss, strategy=strategy, randomness="error")(params, buffers, x)


@strategies
def test_under_autocast_gradients_have_the_dtype_of_the_parameters(strategy):
    models, loss, params, buffers, batch = build()
    params = {name: value.detach().float() for name, value in params.items()}
    x, y = batch(64).float(), torch.randint(3, (64,))
    compute = ensemble_grad(loss, strategy=strategy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compute(params, buffers, x, y)
    losses, grads = reference(models, [(x.double(), y)] * 3)
    assert_exact(result.losses, losses, 2e-2)
    for name, grad in grads.items():
        assert result.grads[name].dtype == torch.float32
        gap = (result.grads[name].double() - grad).norm() / grad.norm()
        assert 1e-5 < gap < 2e-2


@strategies
def test_nothing_that_was_given_changes(strategy):
    _, loss, params, buffers, batch = build("cnn")
    x, y = batch(5), torch.randint(3, (5,))
    given = [*params.values(), *buffers.values(), x, y]
    before = [value.detach().clone() for value in given]
    ensemble_grad(loss, strategy=strategy)(params, buffers, x, y)
    with pytest.raises((RuntimeError, ValueError), match="size|batch"):
        ensemble_grad(loss, strategy=strategy)(params, buffers, x, y[:3])
    assert all(map(torch.equal, given, before))


def test_the_loops_gradients_have_memory_of_their_own():
    """Frozen members are expanded views: gradients must not be."""
    params, buffers, x = tensors()
    params = {"w": params["w"][0].expand(3, 4)}
    result = ensemble_grad(quadratic, strategy="loop")(params, buffers, x)
    assert_exact(result.grads["w"], by_hand(params, buffers, x))
    assert result.grads["w"].is_contiguous()


def test_the_choice_is_explained():
    _, loss, params, buffers, batch = build("cnn")
    x, y = batch(5), torch.randint(3, (5,))
    explained = ensemble_grad(loss).explain(params, buffers, x, y)
    assert explained.function == "ensemble_grad"
    assert explained.strategy == "hybrid"
    assert ("linear", "baddbmm") in explained.forms
    title = str(explained).splitlines()[0]
    assert title.startswith("ensemble_grad of 3 members, strategy hybrid: the ")


def test_bad_arguments_are_refused_with_what_was_expected():
    with pytest.raises(TypeError, match="loss='no'.*expected a function loss"):
        ensemble_grad("no")
    with pytest.raises(ValueError, match="strategy='fast'.*one of"):
        ensemble_grad(quadratic, strategy="fast")
    with pytest.raises(ValueError, match="randomness='x'.*one of"):
        ensemble_grad(quadratic, randomness="x")
    with pytest.raises(TypeError, match="shared='w'.*list or tuple"):
        ensemble_grad(quadratic, shared="w")
    params, buffers, x = tensors()
    with pytest.raises(ValueError, match=r"in_dims=\(0,\).*3 members along axis 0"):
        ensemble_grad(quadratic, in_dims=0)(params, buffers, x)


@strategies
def test_complex_members_have_the_gradients_of_their_own_backward_pass(strategy):
    torch.manual_seed(0)
    kind = torch.complex128
    models = [
        nn.Sequential(nn.Linear(3, 2, dtype=kind), nn.Linear(2, 2, dtype=kind))
        for _ in range(3)
    ]
    fmodel, params, buffers = stack(models)
    x = torch.randn(5, 3, dtype=kind)

    def loss(params, buffers, x):
        return fmodel(params, buffers, x).abs().square().sum()

    found = ensemble_grad(loss, strategy=strategy)(params, buffers, x).grads
    for index, model in enumerate(models):
        model(x).abs().square().sum().backward()
        for name, param in model.named_parameters():
            assert_exact(found[name][index], param.grad)


@strategies
def test_a_loss_may_change_the_containers_it_is_given(strategy):
    fmodel, params, buffers = stack([mlp() for _ in range(3)])
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))

    def scaled(params, buffers, batch):
        batch["x"] = batch["x"] / 2
        return F.cross_entropy(fmodel(params, buffers, batch["x"]), batch.pop("y"))

    batch = {"x": x, "y": y}
    found = ensemble_grad(scaled, strategy=strategy)(params, buffers, batch)
    plain = vgrad.batch_loss(fmodel, F.cross_entropy)
    expected = ensemble_grad(plain, strategy="loop")(params, buffers, x / 2, y)
    assert batch.keys() == {"x", "y"}
    assert batch["x"] is x
    assert_exact(found, expected)


@strategies
def test_a_loss_may_map_over_samples_under_an_autocast_of_its_own(strategy):
    torch.manual_seed(0)
    fmodel, params, buffers = stack([nn.Linear(4, 3) for _ in range(3)])
    x, dtypes = torch.randn(5, 4), set()

    def loss(params, buffers, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = torch.vmap(lambda row: fmodel(params, buffers, row))(x)
        dtypes.add(rows.dtype)
        return rows.float().sum()

    ensemble_grad(loss, strategy=strategy)(params, buffers, x)
    assert dtypes == {torch.bfloat16}


@strategies
def test_a_loss_may_return_more_buffers_than_there_were(strategy):
    class Counting:
        def __call__(self, params, buffers, x):
            return self.with_buffers(params, buffers, x)[0]

        def with_buffers(self, params, buffers, x):
            total = params["w"].sum() * x.sum()
            return total, {**buffers, "total": total.detach()}

    params = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    found = ensemble_grad(Counting(), strategy=strategy)(params, {}, torch.ones(2))
    assert found.buffers["total"].tolist() == [6, 14]


def test_a_loss_of_one_sample_is_refused():
    loss = vgrad.sample_loss(stack([mlp()])[0], F.cross_entropy)
    with pytest.raises(TypeError, match="whole batch.*of a sample.*batch_loss"):
        ensemble_grad(loss)
    with pytest.raises(TypeError, match="whole batch.*of a sample.*batch_loss"):
        vgrad.training.ensemble_train_step(
            loss, vgrad.optim.sgd(0.1), policy="mixed_bfloat16"
        )


WRITES = [
    "w.clamp_(0, 0.1)",
    "w.detach().t()[0].zero_()",
    "b.add_(1)",
    "x.mul_(2)",
    "F.batch_norm(x, b, b, training=True)",
]


@pytest.mark.parametrize("shared", [(), ("*",)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("write", WRITES)
@strategies
def test_a_loss_that_writes_into_what_it_is_given_has_not_done_so(
    strategy, write, own, shared
):
    def loss(params, buffers, x):
        with torch.no_grad():
            eval(write, globals() | params | buffers | {"x": x})
        return (x @ params["w"] + params["v"] + buffers["b"].sum()).sum()

    params = {"w": torch.ones(3, 2, 2), "v": torch.ones(3, 2)}
    buffers = {"b": torch.ones(3, 2)}
    if shared:
        params["w"], buffers["b"] = torch.ones(2, 2), torch.ones(2)
        shared = ("w", "b")
    x = torch.ones(3, 4, 2) if own else torch.ones(4, 2)
    options = {"strategy": strategy, "shared": shared, "in_dims": 0 if own else None}
    compute = ensemble_grad(loss, **options)
    with pytest.raises(RuntimeError, match="ensemble: .* nothing it is given, got"):
        compute(params, buffers, x)
    for each in (*params.values(), *buffers.values(), x):
        assert torch.equal(each, torch.ones_like(each))


def test_functions_whose_vmap_leaves_their_backward_out_are_refused():
    def loss(p, b, x):
        return Rounded.apply(x * p["w"]).sum()

    params, x = {"w": torch.rand(3, 4)}, torch.rand(4)
    for strategy in ("vmap", "hybrid"):
        with pytest.raises(vgrad.UnsupportedOp, match="whose vmap calls apply"):
            vgrad.ensemble_grad(loss, strategy=strategy)(params, {}, x)
    found = vgrad.ensemble_grad(loss, strategy="loop")(params, {}, x).grads["w"]
    assert_exact(found, 3 * x.expand(3, 4), 1e-6)

"""Gradients of all members: shared ones, scales, transforms around and inside."""

import pytest
import torch
from torch import nn
from torch.autograd import graph

import vgrad
from tests.ensemble.test_contract import (
    CASES,
    MEMBERS,
    batch_of,
    build,
    every_strategy,
    gradients,
)
from tests.losses import Case, randn, vectors
from tests.oracle import assert_exact
from tests.persample.test_losses import Rounded
from vgrad.ensemble import EnsembleGrads, ensemble_forward, ensemble_grad, share

EXACT, NORMED, MLP = 1e-10, CASES["normed"], CASES["mlp"]
at_once = pytest.mark.parametrize("strategy", ["vmap", "hybrid"])


def prepared(case):
    models, fmodel, params, buffers = build(case)
    params = {name: value.detach() for name, value in params.items()}
    loss = vgrad.batch_loss(fmodel, case.criterion)
    return models, loss, params, buffers, batch_of(case)


PATTERNS = {"normed": ["0.*", "5.weight"], "counts": ["last.*"]}


@every_strategy
@pytest.mark.parametrize("name", PATTERNS)
def test_shared_gradients_are_sums_over_the_members(name, strategy):
    case = CASES[name]
    models, loss, params, buffers, batch = prepared(case)
    whole, weights = set(), torch.tensor([0.5, 1.0, 3.0, 2.0], dtype=torch.float64)
    for patterns in (PATTERNS[name], list(params)):  # all, where buffers are not
        given = share(params, buffers, patterns)
        whole |= {n for n, value in given[0].items() if value is not params[n]}
        first = dict(models[0].named_parameters())
        for model in models[1:]:
            for key in whole:
                model.get_parameter(key).data.copy_(first[key])
        compute = ensemble_grad(loss, strategy=strategy, shared=patterns)
        result = compute(*given, *batch, loss_scale=weights)
        expected, _ = gradients(models, case.run, [batch] * MEMBERS, weights)
        expected |= {n: expected[n].sum(0) for n in whole}
        assert_exact(result.grads, expected, EXACT)


def quadratic(params, buffers, x):
    return ((params["w"] * x).sum(-1) - buffers["target"]).square().mean()


PARAMS, BUFFERS = {"w": randn(3, 4)}, {"target": randn(3, seed=1)}
X = randn(5, 4, seed=2)


def by_hand(params, buffers, x):
    residual = params["w"] @ x.mT - buffers["target"].unsqueeze(1)
    return 2 * (residual.unsqueeze(2) * x).mean(1)


@every_strategy
def test_a_loss_on_dictionaries_needs_no_buffers_to_return(strategy):
    params = PARAMS | {"unused": torch.ones(3, 2, dtype=torch.float64)}
    compute = ensemble_grad(quadratic, strategy=strategy)
    expected = {"w": by_hand(PARAMS, BUFFERS, X), "unused": 0 * params["unused"]}
    for _ in range(2):  # the second time it is known which gradients are zero
        result = compute(params, BUFFERS, X)
        assert_exact(result.grads, expected)
    assert isinstance(result, EnsembleGrads)
    assert_exact(result.buffers, BUFFERS, 0)
    shared = {"target": BUFFERS["target"][0]}
    compute = ensemble_grad(quadratic, strategy=strategy, shared=["target"])
    frozen = {"w": PARAMS["w"][0].expand(3, 4)}  # no view of it may be a gradient
    result = compute(frozen, shared, X)
    assert result.buffers["target"].shape == ()
    expanded = {"target": shared["target"].expand(3)}
    assert_exact(result.grads["w"], by_hand(frozen, expanded, X))
    assert result.grads["w"].is_contiguous()


@every_strategy
@pytest.mark.parametrize("case", [MLP, NORMED], ids=["mlp", "normed"])
def test_second_derivatives_of_models_are_right(strategy, case):
    models, loss, params, buffers, batch = prepared(case)

    def norm(params):
        result = ensemble_grad(loss, strategy=strategy)(params, buffers, *batch)
        return sum(grad.square().sum() for grad in result.grads.values())

    def penalty(model, *batch):
        value = case.run(model, *batch)
        grads = torch.autograd.grad(value, [*model.parameters()], create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    expected, _ = gradients(models, penalty, [batch] * MEMBERS)
    assert_exact(torch.func.grad(norm)(params), expected, 1e-9)


@every_strategy
def test_a_gradient_penalty_inside_of_the_loss_is_right(strategy):
    models, fmodel, params, buffers = build(MLP)
    x = batch_of(MLP)[0]

    def penalty(params, buffers, x):
        slopes = torch.func.grad(lambda x: fmodel(params, buffers, x).sin().sum())(x)
        return slopes.square().sum()

    def plain(model, x):
        leaf = x.clone().requires_grad_()
        value = model(leaf).sin().sum()
        (slopes,) = torch.autograd.grad(value, leaf, create_graph=True)
        return slopes.square().sum()

    result = ensemble_grad(penalty, strategy=strategy)(params, buffers, x)
    expected = gradients(models, plain, [(x,)] * MEMBERS)
    assert_exact((result.grads, result.losses), expected, EXACT)


def test_a_loss_that_calls_autograd_runs_in_a_loop_and_is_refused_elsewhere():
    def penalty(params, buffers, x):
        leaf = x.detach().requires_grad_()
        value = (params["w"] * leaf).pow(2).sum()
        (slopes,) = torch.autograd.grad(value, leaf, create_graph=True)
        return slopes.pow(2).sum()

    with torch.no_grad():
        result = ensemble_grad(penalty, strategy="loop")(PARAMS, BUFFERS, X)
    # slopes = 2 w^2 x, so the loss is 4 w^4 x^2
    expected = 16 * PARAMS["w"] ** 3 * X.square().sum(0)
    assert_exact(result.grads["w"], expected)
    for strategy in ("vmap", "hybrid"):
        with pytest.raises(vgrad.UnsupportedOp, match='autograd.*strategy="loop"'):
            ensemble_grad(penalty, strategy=strategy)(PARAMS, BUFFERS, X)
    message = "one member after another.*autograd"
    with pytest.warns(vgrad.FallbackWarning, match=message):
        result = ensemble_grad(penalty)(PARAMS, BUFFERS, X)
    assert_exact(result.grads["w"], expected)


@pytest.mark.skipif(not hasattr(graph, "node_creation_hook"), reason="torch < 2.14")
def test_hooks_on_the_creation_of_nodes_run_in_a_loop_and_are_refused_elsewhere():
    def made(node):
        node.register_prehook(lambda grads: tuple(g / g.norm() for g in grads))

    def loss(params, buffers, x):
        with graph.node_creation_hook(made):
            return (params["w"] * x).sin().square().sum()

    expected = []
    for w in PARAMS["w"].detach():
        value = loss({"w": w.requires_grad_()}, {}, X)
        expected += torch.autograd.grad(value, w)
    expected = torch.stack(expected)
    for strategy in ("vmap", "hybrid"):
        with pytest.raises(vgrad.UnsupportedOp, match='tensors or nodes.*"loop"'):
            ensemble_grad(loss, strategy=strategy)(PARAMS, BUFFERS, X)
    with pytest.warns(vgrad.FallbackWarning, match="one member after another"):
        found = ensemble_grad(loss)(PARAMS, BUFFERS, X)
    assert_exact(found.grads["w"], expected)
    forward = ensemble_forward(lambda params, buffers, x: params["w"] * x)
    for function in (ensemble_grad(loss, strategy="loop"), forward):
        with graph.node_creation_hook(made):
            with pytest.raises(RuntimeError, match="no node_creation_hook around"):
                function(PARAMS, BUFFERS, X)
        function(PARAMS, BUFFERS, X)


@every_strategy
def test_under_autocast_gradients_have_the_dtype_of_the_parameters(strategy):
    layers = lambda: (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))  # noqa: E731
    smooth = Case(lambda: nn.Sequential(*layers()), vectors(4))
    models, loss, params, buffers, _ = prepared(smooth)
    params = {name: value.float() for name, value in params.items()}
    x, y = batch_of(smooth, 64)
    compute = ensemble_grad(loss, strategy=strategy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compute(params, buffers, x.float(), y)
    grads, losses = gradients(models, smooth.run, [(x, y)] * MEMBERS)
    assert_exact(result.losses, losses, 2e-2)
    for name, grad in grads.items():
        assert result.grads[name].dtype == torch.float32
        gap = (result.grads[name].double() - grad).norm() / grad.norm()
        assert 1e-5 < gap < 2e-2


WRITES = [
    "w.clamp_(0, 0.1)",
    "w.detach().t()[0].zero_()",
    "b.add_(1)",
    "x.mul_(2)",
]


@pytest.mark.parametrize("shared", [(), ("w", "b")])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("write", WRITES)
@every_strategy
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_write_into_an_argument_is_refused(strategy, write, own, shared):
    def loss(params, buffers, x):
        with torch.no_grad():
            eval(write, globals() | params | buffers | {"x": x})
        return (x @ params["w"] + params["v"] + buffers["b"].sum()).sum()

    params = {"w": torch.ones(3, 2, 2), "v": torch.ones(3, 2)}
    buffers = {"b": torch.ones(3, 2)}
    if shared:
        params["w"], buffers["b"] = torch.ones(2, 2), torch.ones(2)
    x = torch.ones(3, 4, 2) if own else torch.ones(4, 2)
    options = {"strategy": strategy, "shared": shared, "in_dims": 0 if own else None}
    compute = ensemble_grad(loss, **options)
    refused = "ensemble: .* nothing it is given, got (a write|one that has written)|"
    refused += "writes in place into a"
    with pytest.raises(RuntimeError, match=refused):
        compute(params, buffers, x)


@at_once
def test_functions_whose_vmap_leaves_their_backward_out_are_refused(strategy):
    loss = lambda params, buffers, x: Rounded.apply(x * params["w"]).sum()  # noqa: E731
    with pytest.raises(vgrad.UnsupportedOp, match="whose vmap calls apply"):
        ensemble_grad(loss, strategy=strategy)(PARAMS, {}, X)
    grads = ensemble_grad(loss, strategy="loop")(PARAMS, {}, X).grads["w"]
    assert_exact(grads, (3 * X.sum(0)).expand(3, 4), 1e-6)

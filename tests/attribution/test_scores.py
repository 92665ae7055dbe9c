"""Scores against a float64 loop of plain autograd with dense solves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle, tables
from tests.losses import Peak, build, every_strategy, rows
from vgrad import attribution, curvature

CASES = ["mlp", "cnn", "transformer", "tied", "padding_idx", "two_calls_and_unused"]


class Matrix:
    """A dense curvature matrix, which solves for vectors."""

    def __init__(self, grads):
        self.matrix = grads.T @ grads / len(grads)

    def inverse(self, damping):
        return torch.linalg.inv(self.matrix + damping * torch.eye(len(self.matrix)))

    def solve(self, vector, *, damping):
        solved = flattened(vector) @ self.inverse(damping)
        parts = solved.split([each[0].numel() for each in vector.values()], 1)
        pairs = zip(vector.items(), parts, strict=True)
        return {name: part.reshape(each.shape) for (name, each), part in pairs}


def flattened(grads):
    return torch.cat([each.reshape(len(each), -1) for each in grads.values()], 1)


class Problem:
    """A case, its first three samples as queries and the others in two batches."""

    def __init__(self, name):
        built = build(name, 9)
        self.loss, self.params, self.buffers, *_ = built
        self.given = self.loss, self.params, self.buffers
        self.queries, *self.batches = (
            rows(built.batch, part) for part in torch.arange(9).tensor_split([3, 5])
        )
        self.grads = built.expected
        self.flat = flattened(self.grads)
        self.query, self.train = self.flat[:3], self.flat[3:]
        self.matrix = Matrix(self.train)

    def influence(self, **options):
        return attribution.influence(*self.given, self.queries, self.batches, **options)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_dense_solves(name):
    case = Problem(name)
    inverse = case.matrix.inverse(0.1)
    exact = case.query @ inverse @ case.train.T
    damped = {"curvature": case.matrix, "damping": 0.1}
    oracle.assert_exact(case.influence(**damped), exact, 1e-8)
    oracle.assert_exact(case.influence(), case.query @ case.train.T)
    own = attribution.self_influence(*case.given, case.batches, **damped)
    oracle.assert_exact(own, (case.train @ inverse * case.train).sum(1), 1e-8)
    layers = case.influence(groups="parameter", **damped)
    assert layers.keys() == case.params.keys()
    oracle.assert_exact(sum(layers.values()), exact, 1e-8)


@pytest.mark.parametrize("name", ["cnn", "tied", "padding_idx"])
def test_parts_of_the_samples_make_the_whole(name, monkeypatch):
    for place in ("base", "rows"):
        monkeypatch.setattr(f"vgrad.factors.{place}._AT_ONCE", 1)
    case = Problem(name)
    damped = {"curvature": case.matrix, "damping": 0.1}
    exact = case.query @ case.matrix.inverse(0.1) @ case.train.T
    oracle.assert_exact(case.influence(**damped), exact, 1e-8)


@every_strategy
def test_strategies_chunks_and_options_agree(strategy):
    case = Problem("cnn")
    options = {"strategy": strategy, "chunk_size": 2}
    exact = case.query @ case.train.T
    oracle.assert_exact(case.influence(**options), exact)
    best = case.influence(top=4, **options)
    values, indices = exact.topk(4)
    oracle.assert_exact(best.values, values)
    assert torch.equal(best.indices, indices)
    assert case.influence(top=10).values.shape == (3, 6)
    worst = case.influence(measurement=case.loss, top=2, **options)
    assert torch.equal(worst.indices, exact.topk(2, largest=False).indices)
    oracle.assert_exact(worst.values, -exact.topk(2, largest=False).values)


def test_low_ranks_are_the_nearest():
    case = Problem("transformer")
    damped = {"curvature": case.matrix, "damping": 0.1}
    whole = case.query @ case.matrix.inverse(0.1)
    exact, at = 0.0, 0
    for grad in case.grads.values():
        part = whole[:, at : at + grad[0].numel()]
        if grad.ndim > 2:
            left, values, right = torch.linalg.svd(
                part.view(3, grad.shape[1], -1), full_matrices=False
            )
            values[:, 2:] = 0
            part = (left * values[:, None]) @ right
        exact = exact + part.flatten(1) @ grad[3:].flatten(1).T
        at += grad[0].numel()
    oracle.assert_exact(case.influence(rank=2, **damped), exact, 1e-8)
    oracle.assert_exact(case.influence(rank=100), case.query @ case.train.T)


def test_positions_add_up_and_each_is_its_own():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net.double())

    def loss(params, buffers, x, weights):
        return (
            F.cross_entropy(fmodel(params, buffers, x), x % 3, reduction="none")
            @ weights
        )

    x = torch.randint(7, (5, 4))
    ones, queries = torch.ones(5, 4).double(), (x[:2], torch.ones(2, 4).double())
    given = loss, params, buffers, queries
    groups = {"all": ["*.weight"]}
    found = attribution.influence(*given, [(x, ones)], groups=groups, per_position=True)
    whole = attribution.influence(*given, [(x, ones)], groups=groups)
    options = {"groups": groups, "per_position": True}
    options |= {"loss_scale": vgrad.precision.StaticLossScale(64.0)}
    scaled = attribution.influence(*given, [(x, ones)], **options)
    oracle.assert_exact(scaled, found)
    assert found["all"].shape == (2, 5, 4)
    oracle.assert_exact(found["all"].sum(2), whole["all"])
    for t in range(4):  # no layer mixes positions, so a loss of one has its gradients
        one = torch.zeros_like(ones)
        one[:, t] = 1
        part = attribution.influence(*given, [(x, one)], groups=groups)
        oracle.assert_exact(found["all"][..., t], part["all"])

    def pooled(params, buffers, x, y):
        hidden = F.linear(params["a.weight"][x], params["b.weight"])
        return F.linear(hidden.tanh().mean(0), params["c.weight"])[y]

    weights = {f"{n}.weight": torch.randn(3, 3).double() for n in "abc"}
    batch = torch.randint(3, (5, 4)), torch.randint(3, (5,))
    with pytest.raises(ValueError, match=r"got 'b\.weight', with 4"):  # c comes first
        attribution.influence(pooled, weights, {}, batch, [batch], per_position=True)
    for options in ({}, {"strategy": "vmap", "groups": groups}):
        with pytest.raises(ValueError, match=r"per_position.* got '\d.(bias|weight)'"):
            attribution.influence(*given, [(x, ones)], per_position=True, **options)


def test_kronecker_factors_are_solved_as_dense_blocks():
    torch.manual_seed(0)
    case = Problem("mlp")
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    fmodel, _, _ = vgrad.make_functional_with_buffers(net)
    matrix = curvature.ggn(fmodel, "categorical")
    inputs = [batch[:1] for batch in case.batches]
    shared = matrix, case.params, case.buffers, inputs
    blocks = curvature.ekfac(*shared)
    dense = {}
    for name, block in blocks.blocks.items():
        basis = torch.kron(block.left, block.right)
        inverse = basis @ (1 / (block.values.flatten() + 0.1)).diag() @ basis.T
        flat = case.grads[name].flatten(1)
        dense[name] = flat @ inverse @ flat.T
    exact = sum(dense.values())
    damped = {"curvature": blocks, "damping": 0.1}
    oracle.assert_exact(case.influence(**damped), exact[:3, 3:])
    own = attribution.self_influence(*case.given, case.batches, **damped)
    oracle.assert_exact(own, exact.diagonal()[3:])
    product = curvature.vector_product(*shared)
    slow = curvature.iterative(product, case.params, tolerance=1e-10)
    whole = case.influence(curvature=curvature.full(*shared), damping=0.1)
    oracle.assert_exact(case.influence(curvature=slow, damping=0.1), whole, 1e-7)


def test_no_gradients_of_the_samples_are_stored():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    fmodel, *state = vgrad.make_functional_with_buffers(
        net, disable_autograd_tracking=True
    )
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    batch = torch.randn(1024, 64), torch.randint(64, (1024,))
    queries = batch[0][:4], batch[1][:4]
    fisher = curvature.empirical_fisher(fmodel, "categorical")
    damped = {"curvature": curvature.kfac(fisher, *state, [batch]), "damping": 0.1}
    gradients = 4 * 1024 * sum(each.numel() for each in state[0].values())
    with Peak() as peak:
        attribution.influence(loss, *state, queries, [batch], **damped)
        attribution.self_influence(loss, *state, [batch], **damped)
    assert peak.most < gradients / 4


def test_scores_hold_no_graph():
    """One of each batch would stay in memory, as its parameters require grad."""
    _, fmodel, params, buffers, batch = classifier()
    assert params["0.weight"].requires_grad
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    for strategy in ("recorded", "vmap"):
        given = params, buffers, batch, [batch]
        options = {"dim": 8, "seed": 0, "ridge": 1.0, "strategy": strategy}
        found = attribution.influence(loss, *given, strategy=strategy)
        own = attribution.self_influence(
            loss, params, buffers, [batch], strategy=strategy
        )
        for each in (found, own, attribution.trak(fmodel, *given, **options)):
            assert type(each.grad_fn).__name__ == "_ConstantBackward"
            with pytest.raises(RuntimeError, match="computed without a graph"):
                each.sum().backward()


def test_influence_is_the_effect_of_leaving_a_sample_out():
    torch.manual_seed(0)
    x, y = torch.randn(200, 3).double(), torch.randn(200, 1).double()
    decay, size = 0.1, len(x)

    def fitted(keep):
        # One sample less of a sum over N, so that the loss keeps its scale.
        a = x[keep].T @ x[keep] / size + decay * torch.eye(3)
        return torch.linalg.solve(a, x[keep].T @ y[keep] / size).T

    everything = torch.arange(size)
    params = {"weight": fitted(everything)}
    fmodel, _, buffers = vgrad.make_functional_with_buffers(nn.Linear(3, 1, bias=False))
    loss = vgrad.sample_loss(fmodel, lambda out, y: (out - y).square().sum() / 2)
    query = x[:5] + 1, y[:5] - 1
    matrix = curvature.full(curvature.ggn(fmodel, "gaussian"), params, buffers, [(x,)])
    found = attribution.influence(
        loss, params, buffers, query, [(x, y)], curvature=matrix, damping=decay
    )

    def losses(weight):
        return (query[0] @ weight.T - query[1]).square().sum(1) / 2

    change = torch.stack(
        [losses(fitted(everything[everything != n])) for n in range(size)], 1
    ) - losses(params["weight"]).unsqueeze(1)
    assert (found / size - change).abs().max() < 0.1 * change.abs().max()
    clear = change.abs() > 0.05 * change.abs().max()
    assert torch.equal(found.sign()[clear], change.sign()[clear])


def classifier():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batch = torch.randn(12, 4).double(), torch.randint(3, (12,))
    return net, *vgrad.make_functional_with_buffers(net), batch


def test_trak_is_its_formula():
    net, fmodel, params, buffers, (x, y) = classifier()

    def run(model, x, y):
        p = model(x).softmax(1)[0, y]
        return p.log() - (1 - p).log()

    exact = oracle.model_gradients(net, run, (x, y), 12)
    measure = attribution.margin(fmodel)
    oracle.assert_exact(
        vgrad.per_sample_grad(measure)(params, buffers, x, y), exact, 1e-8
    )
    other = {name: value + 0.1 for name, value in params.items()}
    kernels, weights = [], []
    for some in (params, other):
        phi = vgrad.per_sample_projection(measure, 8, seed=0)(some, buffers, x, y)
        kernel = phi.T @ phi + 0.5 * torch.eye(8)
        kernels.append(phi[:2] @ torch.linalg.inv(kernel) @ phi.T)
        p = fmodel(some, buffers, x).softmax(1).gather(1, y[:, None])[:, 0]
        weights.append(1 - p)
    options = {"dim": 8, "seed": 0, "ridge": 0.5}
    batches, queries = [(x[:5], y[:5]), (x[5:], y[5:])], (x[:2], y[:2])
    given = buffers, queries, batches
    found = attribution.trak(fmodel, params, *given, **options)
    oracle.assert_exact(found, kernels[0] * weights[0], 1e-8)
    found = attribution.trak(fmodel, [params, other], *given, **options, chunk_size=3)
    exact = (kernels[0] + kernels[1]) * (weights[0] + weights[1]) / 4
    oracle.assert_exact(found, exact, 1e-8)
    for some, states in (([params] * 2, [buffers]), ([], buffers)):
        with pytest.raises(ValueError, match=r"trak\(params, buffers\): .* as many"):
            attribution.trak(fmodel, some, states, *given[1:], **options)
    x[7] = torch.nan  # would be taken for a singular kernel
    with pytest.raises(ValueError, match=r"trak\(batches\): .* of sample 7"):
        attribution.trak(fmodel, params, *given, **options)
    x[7] = 0
    with pytest.raises(ValueError, match=r"trak\(ridge\).*singular"):
        attribution.trak(fmodel, params, *given, dim=64, seed=0, ridge=0.0)


def test_a_store_stands_for_the_batches(tmp_path):
    case = Problem("mlp")
    project = vgrad.per_sample_projection(case.loss, (100, 100), seed=0)  # the whole
    for batch in case.batches:
        store = attribution.Store.write(tmp_path, project, *case.given[1:], [batch])
    given = *case.given, case.queries
    exact = case.query @ case.train.T
    oracle.assert_exact(attribution.influence(*given, store), exact)
    best = attribution.influence(*given, store, measurement=case.loss, top=2)
    assert torch.equal(best.indices, exact.topk(2, largest=False).indices)
    fisher = store.empirical_fisher()
    damped = {"curvature": fisher, "damping": 0.1}
    exact = 0.0  # a block for each parameter
    for each in case.grads.values():
        flat = each.flatten(1)
        block = Matrix(flat[3:]).inverse(0.1)
        exact = exact + flat[:3] @ block @ flat[3:].T
    oracle.assert_exact(attribution.influence(*given, store, **damped), exact, 1e-8)
    of_weights = {"curvature": case.matrix, "damping": 0.1}
    with pytest.raises(ValueError, match="for a store one of its.*of the parameters"):
        attribution.influence(*given, store, **of_weights)
    for compute in (
        lambda: case.influence(**damped),
        lambda: attribution.self_influence(*case.given, case.batches, **damped),
    ):
        with pytest.raises(ValueError, match=r"influence\(curvature\): .* OfFeatures"):
            compute()
    for groups in ("layer", {"": ["0.*"]}):
        with pytest.raises(ValueError, match=r"influence\(store\): expected neither"):
            attribution.influence(*given, store, groups=groups)
    other = {name: value + 1 for name, value in case.params.items()}
    with pytest.raises(ValueError, match=r"Store\.check"):
        attribution.influence(case.loss, other, case.buffers, case.queries, store)


def test_a_matrix_of_other_shapes_is_refused():
    # (4, 5) and (5, 4) have as many numbers, which were taken in another order.
    matrices = []
    for sizes in ((4, 5), (5, 4)):
        fmodel, params, buffers = vgrad.make_functional_with_buffers(
            nn.Linear(*sizes, bias=False).double()
        )
        x = torch.randn(6, sizes[0]).double()
        given = curvature.ggn(fmodel, "gaussian"), params, buffers, [(x,)]
        matrices.append(curvature.ekfac(*given))
        product = curvature.vector_product(*given)
        matrices.append(curvature.iterative(product, params))
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    batch = x, torch.randn(6, 4).double()
    of_batch = loss, params, buffers, batch, [batch]
    for other, own in zip(matrices[:2], matrices[2:], strict=True):
        attribution.influence(*of_batch, curvature=own, damping=0.1)
        with pytest.raises(ValueError, match=r"in 'weight'.*got \(6, 4, 5\)"):
            attribution.influence(*of_batch, curvature=other, damping=0.1)
        if isinstance(other, curvature.Kronecker):
            with pytest.raises(ValueError, match=r"in 'weight'.*got \(4, 5\)"):
                attribution.self_influence(
                    *of_batch[:3], [batch], curvature=other, damping=0.1
                )


BAD = r"""
influence(*given, x, [batch]) | influence\(batches\): expected tuples
influence(*given, batch, []) | influence\(batches\): expected a batch
influence(*given, batch, [batch], top=1, per_position=True) | neither top nor rank
influence(*given, batch, [batch], damping=0.1) | damping=0.1\): expected a curvature
self_influence(*given, [batch], damping=0.1) | damping=0.1\): expected a curvature
influence(*given, batch, [batch], top=0) | influence\(top=0\)
influence(*given, batch, [batch], chunks=2) | influence\(chunks=\.\.\.\)
self_influence(*given, [batch], curvature=blocks, damping=0.0) | lost in the rounding
margin(fmodel)(params, buffers, x[:1], y[0]) | margin\(fmodel\): expected logits
"""


@pytest.mark.parametrize(("call", "words"), tables.rows(BAD))
def test_wrong_arguments_are_refused(call, words):
    _, fmodel, params, buffers, (x, y) = classifier()
    given = vgrad.sample_loss(fmodel, F.cross_entropy), params, buffers
    ggn = curvature.ggn(fmodel, "categorical")
    scope = {"blocks": curvature.kfac(ggn, params, buffers, [(x,)]), "given": given}
    scope |= {"fmodel": fmodel, "params": params, "buffers": buffers}
    with pytest.raises((TypeError, ValueError), match=words):
        eval(call, vars(attribution) | scope | {"x": x, "y": y, "batch": (x, y)})


@every_strategy
def test_targets_of_margins_are_classes(strategy):
    _, fmodel, params, buffers, (x, y) = classifier()
    margins = vgrad.per_sample_grad(attribution.margin(fmodel), strategy=strategy)
    for target in (y - 100, y + 1, y.double(), y[:, None]):  # some of them are right
        with pytest.raises(ValueError, match="expected a class from 0 to 2 as the"):
            margins(params, buffers, x, target)


@pytest.mark.parametrize("matrix", ["ekfac", curvature.ekfac, 3.0])
def test_what_solves_for_nothing_is_refused(matrix):
    _, fmodel, params, buffers, batch = classifier()
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    given = loss, params, buffers
    options = {"curvature": matrix, "damping": 1.0}
    message = r"influence\(curvature\): expected a matrix of the parameters for batches"
    with pytest.raises(ValueError, match=rf"^{message}, as vgrad.curvature.ekfac\("):
        attribution.influence(*given, batch, [batch], **options)
    with pytest.raises(ValueError, match=rf"^self_{message}"):
        attribution.self_influence(*given, [batch], **options)

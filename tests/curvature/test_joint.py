"""Kronecker factors of weights with their biases, against dense ones in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.curvature.test_curvature import (
    EXACT,
    Averaged,
    assembled,
    dense,
    flat,
    jacobian,
    like,
    problem,
    samples,
)
from vgrad import attribution, curvature

JOINT = {"separate_weight_and_bias": False}
every_method = pytest.mark.parametrize("method", [curvature.kfac, curvature.ekfac])


def places(params, names):
    """Where the numbers of parameters are in a vector, [O, I + 1] for two of them."""
    numbers = torch.arange(sum(each.numel() for each in params.values()))
    found = [like(params, numbers)[name] for name in names]
    return torch.cat([each.reshape(len(each), -1) for each in found], 1).flatten()


def sides(module, x):
    """Inputs with a one [T, I + 1], and Jacobians [K, T, O] at outputs, by layer."""
    seen = []

    def keep(layer, args, output):
        inputs = args[0]
        if isinstance(layer, nn.Conv2d):
            inputs = F.unfold(inputs, layer.kernel_size).mT
        seen.append((inputs.detach().flatten(0, -2), output))

    layers = [e for e in module.modules() if isinstance(e, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    output = module(x)
    for hook in hooks:
        hook.remove()
    outputs = [each for _, each in seen]
    grads = [
        torch.autograd.grad(number, outputs, retain_graph=True)
        for number in output.flatten()
    ]
    for place, (inputs, _) in enumerate(seen):
        g = torch.stack([each[place] for each in grads])
        g = g.flatten(3).mT if g.ndim == 5 else g
        yield F.pad(inputs, (0, 1), value=1.0), g.reshape(len(g), -1, g.shape[-1])


def blocks(module, batches, method, reduce):
    """The block of each layer, [P, P]."""
    rows = [[*sides(module, x)] for x in samples(batches)]
    for layer in zip(*rows, strict=True):
        a, g = (torch.stack(each) for each in zip(*layer, strict=True))
        whole = torch.einsum("nkto,nti->nkoi", g, a).flatten(2)
        if reduce:
            a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
        left = torch.einsum("nkto,nktp->op", g, g) / len(g)
        right = torch.einsum("nti,ntj->ij", a, a) / len(a) / a.shape[1]
        if method is curvature.kfac:
            yield torch.kron(left, right)
            continue
        basis = torch.kron(*(torch.linalg.eigh(each)[1] for each in (left, right)))
        values = (whole @ basis).square().sum(1).mean(0)
        yield basis * values @ basis.mT


@pytest.mark.parametrize(
    ("method", "name", "sharing"),
    [
        (curvature.kfac, "mlp", "expand"),
        (curvature.kfac, "cnn", "reduce"),
        (curvature.ekfac, "cnn", "expand"),
        (curvature.ekfac, "positions", "reduce"),
    ],
)
def test_a_bias_is_a_column_for_an_input_of_one(method, name, sharing):
    if name == "positions":
        torch.manual_seed(0)
        module = nn.Sequential(Averaged(nn.Linear(3, 2)), nn.Tanh(), nn.Linear(2, 2))
        given = vgrad.make_functional_with_buffers(module.double())
        batches = [(torch.randn(size, 4, 3).double(),) for size in (3, 2)]
    else:
        module, given, batches = problem(name)
    fmodel, params, buffers = given
    matrix = curvature.ggn(fmodel, "gaussian")
    options = {"weight_sharing": sharing, "chunk_size": 2, **JOINT}
    found = method(matrix, params, buffers, batches, **options)
    names = [(n, n.replace("weight", "bias")) for n in params if "weight" in n]
    size = sum(each.numel() for each in params.values())
    exact = torch.zeros(size, size, dtype=torch.float64)
    own = blocks(module, batches, method, sharing == "reduce")
    for pair, block in zip(names, own, strict=True):
        where = places(params, pair)
        exact[where[:, None], where] = block
        values = torch.linalg.eigvalsh(block)
        oracle.assert_exact(
            found.eigenvalues()[pair[0]].sort().values, values.clamp(min=0), 1e-8
        )
    assert [*found.eigenvalues()] == [weight for weight, _ in names]
    oracle.assert_exact(assembled(found.product, params), exact, 1e-9)
    damped = exact + 0.1 * torch.eye(size).double()
    vector = torch.randn(3, size, dtype=torch.float64)
    many = [like(params, each) for each in vector]
    stacked = {n: torch.stack([each[n] for each in many]) for n in reversed(params)}
    solved = found.solve(stacked, damping=0.1)
    assert [*solved] == [*reversed(params)]
    solved = torch.cat([solved[n].flatten(1) for n in params], 1)
    oracle.assert_exact(solved, torch.linalg.solve(damped, vector.mT).mT, 1e-8)
    oracle.assert_exact(found.logdet(damping=0.1), torch.logdet(damped), 1e-8)
    oracle.assert_exact(found.trace(), exact.trace())


@every_method
@pytest.mark.parametrize("name", ["deep linear", "one output", "shared"])
def test_joint_blocks_are_exact_for_linear_nets(method, name):
    torch.manual_seed(1)
    module = nn.Sequential(*EXACT[name]).double()
    shared = (2, 4) if name == "shared" else ()
    batches = [
        (torch.randn(n, *shared, module[0].in_features).double(),) for n in (2, 5)
    ]
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    given = curvature.ggn(fmodel, "gaussian"), params, buffers, batches
    found = assembled(method(*given, **JOINT).product, params)
    exact = dense(module, batches, "gaussian")
    for layer in range(len(module)):
        where = places(params, [f"{layer}.weight", f"{layer}.bias"])
        whole = found[where[:, None], where], exact[where[:, None], where]
        oracle.assert_exact(*whole, 1e-9)


class Uses(nn.Module):
    """A layer of two or more inputs, with a use of its weight or bias beside it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 3)
        self.other = nn.Parameter(torch.randn(3))

    def forward(self, x):
        weight, bias = self.layer.weight, self.layer.bias
        beside = {
            "again": lambda: F.linear(x.sin(), weight, bias),
            "another bias": lambda: F.linear(x.sin(), weight, self.other),
            "without a bias": lambda: F.linear(x.sin(), weight),
            "bias alone": lambda: bias * x,
            "bias in some": lambda: torch.where(x > 1, bias, 0),
        }
        if self.kind == "moved":
            return F.linear(x, weight, bias[[1, 2, 0]])
        if self.kind == "transposed":
            return torch.addmm(bias, x, weight)
        if self.kind == "weight in some" and x.max() > 1:
            return x * bias
        return self.layer(x) + beside.get(self.kind, lambda: 0)()


SEPARATE = (
    *("another bias", "without a bias", "bias alone", "bias in some"),
    *("moved", "transposed", "weight in some"),
)


@every_method
@pytest.mark.parametrize("kind", ["nothing", "again", *SEPARATE])
def test_a_bias_with_other_gradients_stays_separate(method, kind):
    torch.manual_seed(0)
    module = Uses(kind).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    x = torch.randn(6, 3).double().clamp(max=1)
    x[3, 0] = 2.0  # where a bias has one more use, in one sample of one batch
    batches = [(part,) for part in x.split((2, 1, 1, 2))]
    given = curvature.ggn(fmodel, "gaussian"), params, buffers, batches
    found = method(*given, **JOINT)
    assert ("layer.bias" in found.blocks) == (kind in SEPARATE)
    if kind in SEPARATE:
        separate = method(*given)
        oracle.assert_exact(flat(found.product(params)), flat(separate.product(params)))
    assert found.shapes == {name: each.shape for name, each in params.items()}


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")  # of attention in vmap
@pytest.mark.parametrize(
    ("name", "joint"),
    [
        ("grouped", ["2.weight"]),
        ("lstm", ["layer.weight_ih_l0", "layer.weight_hh_l0", "head.weight"]),
        ("attention", ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]),
        ("norm", ["1.weight"]),
        ("tied", []),
    ],
)
def test_layers_of_torch_whose_biases_are_columns(name, joint):
    _, (fmodel, params, buffers), batches = problem(name)
    given = curvature.ggn(fmodel, "gaussian"), params, buffers, batches
    if name == "attention":
        joint = [f"layer.{each}" for each in joint]
        joint += ["layer.linear1.weight", "layer.linear2.weight", "head.weight"]
    found = curvature.ekfac(*given, **JOINT)
    assert [n for n, each in found.blocks.items() if each.names] == joint
    oracle.assert_exact(found.trace(), curvature.ekfac(*given).trace())
    stored = curvature.kfac(*given, strategy="vmap", **JOINT)  # has no products
    assert [*stored.blocks] == [*params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_keeps_no_bias_apart(dtype):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AvgPool2d(36)
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2)).to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    x = torch.randn(40, 1, 40, 40).to(dtype)
    matrix = curvature.fisher(fmodel, "gaussian", seed=0)
    found = curvature.kfac(matrix, params, buffers, [(x,)], **JOINT)
    assert [*found.blocks] == ["0.weight", "2.weight", "5.weight"]


@pytest.mark.parametrize("name", ["cnn", "bias in some"])
def test_scores_and_posteriors_of_joint_blocks(name):
    if name == "cnn":
        module, (fmodel, params, buffers), [(x,), (asked,)] = problem(name)
    else:  # a bias that is a column for the batches, and not for what follows
        torch.manual_seed(0)
        module, x = Uses(name).double(), torch.randn(4, 3).double().clamp(max=1)
        fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
        asked = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]]).double()
    ggn = curvature.ggn(fmodel, "categorical")
    blocks = curvature.ekfac(ggn, params, buffers, [(x,)], **JOINT)
    assert not any("bias" in each for each in blocks.blocks if "other" not in each)
    damped = assembled(blocks.product, params)
    data = [(x, torch.arange(len(x)) % 2)]
    given = fmodel, "categorical", params, buffers, data
    posterior = curvature.laplace(*given, structure=blocks, prior_precision=0.5)
    precision = len(x) * damped + 0.5 * torch.eye(len(damped)).double()
    for row, found in enumerate(posterior.covariance(asked)):
        jac, _ = jacobian(module, asked[row : row + 1])
        oracle.assert_exact(found, jac @ torch.linalg.solve(precision, jac.T), 1e-9)
    evidence = posterior.log_marginal_likelihood()
    whole = -F.cross_entropy(module(x), data[0][1], reduction="sum").detach()
    logdet = torch.logdet(precision / 0.5)
    exact = whole - (logdet + 0.5 * flat(params).square().sum()) / 2
    oracle.assert_exact(evidence, exact, 1e-9)
    drawn = posterior.sample(2000, seed=0)
    rows = torch.cat([(drawn[n] - params[n]).flatten(1) for n in params], 1)
    kernel = rows @ precision @ rows.mT / len(precision)
    assert abs(float(kernel.diagonal().mean()) - 1) < 0.05
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    queries = asked, torch.arange(len(asked)) % 2
    given = loss, params, buffers
    options = {"curvature": blocks, "damping": 0.1}
    grads = [vgrad.per_sample_grad(loss)(params, buffers, *b) for b in (queries, *data)]
    asked, seen = (
        torch.cat([e.flatten(1) for e in each.values()], 1) for each in grads
    )
    inverse = torch.linalg.inv(damped + 0.1 * torch.eye(len(damped)).double())
    scores = attribution.influence(*given, queries, data, **options)
    oracle.assert_exact(scores, asked @ inverse @ seen.mT, 1e-9)
    for strategy in ("recorded", "vmap"):
        own = attribution.self_influence(
            *given, [queries], strategy=strategy, **options
        )
        oracle.assert_exact(own, (asked @ inverse @ asked.mT).diagonal(), 1e-9)

"""Calls of the curvature that are refused, and the words in which that is said."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

import vgrad
from tests.curvature.test_curvature import problem
from tests.tables import rows
from vgrad import curvature
from vgrad.distributed import single_process_mesh

split = vgrad.make_functional_with_buffers
MODULE, (FMODEL, PARAMS, BUFFERS), BATCHES = problem("mlp")
(X,), GIVEN = BATCHES[0], (PARAMS, BUFFERS)
Y = X.argmax(1)
GGN, GAUSSIAN = (curvature.ggn(FMODEL, name) for name in ("categorical", "gaussian"))
FISHER = curvature.empirical_fisher(FMODEL, "categorical")
DATA = [(x, torch.arange(len(x)) % 3) for (x,) in BATCHES]
COMPLEX = {name: each.to(torch.complex128) for name, each in PARAMS.items()}
CONV, TABLE = (
    split(nn.Conv1d(2, 3, 1)),
    split(nn.Embedding(3, 2, scale_grad_by_freq=True)),
)
OF_CONV = [(torch.ones(2, 2, 2), torch.ones(2, 2, 3))]
TURNED = PARAMS | {"0.weight": PARAMS["0.weight"].mT}
FLAT = PARAMS | {"0.weight": PARAMS["0.weight"].flatten()}
UNEVEN = {name: torch.stack([each, each]) for name, each in PARAMS.items()}
UNEVEN["2.bias"] = PARAMS["2.bias"]
UNBIASED = {name: each for name, each in PARAMS.items() if name != "0.bias"}
ONE, NONE = torch.ones(1, 4).double(), (None, None)
FAR, ZEROED = X.index_fill(0, torch.tensor(0), 1e200), dict(PARAMS)
ZEROED["0.weight"] = 0 * PARAMS["0.weight"]


class OverTheBatch(nn.Module):
    """A recurrent net that takes samples for steps: the first one is as if alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.RNN(2, 2)

    def forward(self, x):
        return self.layer(x)[0]


class Own(nn.Module):
    """A large parameter that no layer uses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(70, 70))

    def forward(self, x):
        return (self.weight.sin() * x[:, None, :]).sum(2)


def of(criterion, **options):
    return vgrad.sample_loss(FMODEL, criterion, **options)


def gaussian(*layers, width):
    """Return the matrix of some layers and its arguments, of four samples."""
    fmodel, *given = split(nn.Sequential(*layers))
    return curvature.ggn(fmodel, "gaussian"), *given, [(torch.randn(4, width),)]


def behind(layer):
    return gaussian(nn.Linear(3, 2), layer, width=3)


def hessian(layer):
    fmodel, params, buffers = split(nn.Sequential(nn.Linear(3, 2), layer))
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    batches = [(torch.randn(4, 3), torch.ones(4, 2))]
    return curvature.hessian_vector_product(loss, params, buffers, batches)(params)


def product(batches=BATCHES, params=PARAMS):
    return curvature.vector_product(GGN, params, BUFFERS, batches)


def twice(function, vector):
    return function(vector), function(vector)


def project(**changes):
    sides = dict.fromkeys(PARAMS, NONE) | changes
    targets = torch.zeros(len(X), 3).double()
    return vgrad.per_sample_projection(of(F.mse_loss), sides)(*GIVEN, X, targets)


def blocks(**options):
    return curvature.kfac(GAUSSIAN, *GIVEN, BATCHES, **options)


def joint():
    return blocks(separate_weight_and_bias=False)


def posterior(likelihood="categorical", data=DATA, params=PARAMS, **options):
    return curvature.laplace(FMODEL, likelihood, params, BUFFERS, data, **options)


BAD_CALLS = rows(r"""
    ggn(of(F.mse_loss), "gaussian") | no likelihood beside it
    fisher(of(F.mse_loss, augmentations=2), seed=0) | without augmentations
    ggn(MODULE, "categorical") | ggn\(fmodel\): expected a functional model
    ggn(FMODEL, "poisson") | likelihood='poisson'.*expected one of
    ggn(TABLE[0], "gaussian") | scale_grad_by_freq=True
    diagonal(GGN, *GIVEN, []) | diagonal\(batches\): expected a batch
    twice(product(iter(BATCHES)), PARAMS) | an iterator is used up
    product()({"w": torch.ones(1)}) | product\(vector\): expected the name
    trace(GGN, *GIVEN, BATCHES[0]) | trace\(batches\): expected tuples
    trace(GGN, *GIVEN, [(X[:0],)]) | sample at least in each batch, got an empty
    trace(GGN, *GIVEN, BATCHES, size=3) | expected options
    trace(FISHER, *GIVEN, [(X, torch.tensor([0, -1, 1]))]) | expected classes from 0
    trace(FISHER, *GIVEN, [(X, torch.ones(3))]) | expected classes of int64 \(3,\), got
    trace(empirical_fisher(CONV[0], "gaussian"), *CONV[1:], OF_CONV) \
        | outputs' shape \(2, 3, 2\), got .* \(2, 2, 3\)
    kfac(GGN, COMPLEX, BUFFERS, BATCHES) | \(params\): expected real parameters
    product(params=COMPLEX)(PARAMS) | \(params\): expected real parameters
    trace(*behind(nn.BatchNorm1d(2))) | treats every sample by itself
    trace(*behind(OverTheBatch())) | depend on the batch
    trace(*behind(nn.Dropout(1e-6))) | draws random numbers
    hessian(nn.Dropout(1e-6)) | draws random numbers
    kfac(GAUSSIAN, ZEROED, BUFFERS, [(FAR,)]) \
        | kfac\(batches\): .* finite, got others of '0.weight'
    full(GAUSSIAN, ZEROED, BUFFERS, [(FAR,)]) \
        | full\(batches\): .* finite, got others of 'a parameter'
    kfac(*gaussian(Own(), width=70)) | got '0.weight' of shape \(70, 70\).*freeze
    full(*gaussian(nn.Linear(200, 100), width=200)) | got 20100, .* 3.01 GiB. Use kfac
    full(GAUSSIAN, *GIVEN, BATCHES[:1]).solve(PARAMS, damping=0.0) \
        | Full.solve\(damping=0.0\): .* 'the matrix'

    Kronecker({}, {}).sides((1, 0)) | Kronecker.sides\(dim\[1\]=0\)
    joint().sides((1, 1)) | expected separate_w.*'0.bias', '0.weight'
    joint().product(UNBIASED) | missing: '0.bias'
    joint().product(TURNED) | Kronecker\(vector\): expected shape
    joint().product(FLAT) | Kronecker\(vector\): expected shape
    blocks().product(FLAT) | Kronecker\(vector\): expected shape
    blocks().solve(TURNED, damping=1.0) | expected shape .* in '0.weight', or
    ekfac(GAUSSIAN, *GIVEN, BATCHES).solve(TURNED, damping=1.0) | expected shape .* in
    full(GAUSSIAN, *GIVEN, BATCHES).solve(TURNED, damping=1.0) | expected shape .* in
    iterative(product(), PARAMS).solve(TURNED, damping=1.0) | expected shape .* in '0.w
    blocks().solve(UNEVEN, damping=1.0) \
        | or several such vectors in front
    project(other=NONE) | sides\): .* unexpected: 'other'
    project(**{"0.weight": (ONE, None)}) \
        | \[k, 5\] on the left of '0.weight', got shape \(1, 4\)
    project(**{"0.weight": (None, ONE[:, :3])}) | \[k, 4\] on the right of '0.weight'
    project(**{"0.weight": (None, ONE[0])}) \
        | \[k, 4\] on the right of '0.weight', got shape \(4,\)
    project(**{"0.bias": (None, ONE)}) | \[k, 0\] on the right of '0.bias'
    vgrad.per_sample_projection(of(F.mse_loss), {"a": NONE}, seed=0) | seed=0.*none for

    posterior(noise=0.5) | expected noise of a Gaussian likelihood
    posterior(prior_precision={"0.bias": 1.0}) | missing: '0.weight', '2
    posterior(prior_precision={**dict.fromkeys(PARAMS, 1.0), "0.bias": -1}) \
        | laplace\(0.bias=-1\): expected 0 <
    posterior("poisson") | laplace\(likelihood='poisson'.*expected one of
    posterior(structure="dense") | structure='dense'.*expected one of
    posterior(structure=Kronecker({}, {})) | laplace\(structure\): .* missing
    posterior(data=BATCHES) | laplace\(fmodel\): expected batches .* target
    posterior("gaussian") | laplace\(batches\): .* outputs' shape
    posterior(data=[(x, y + 7) for x, y in DATA]) | laplace\(batches\): expected classes
    posterior(data=[]) | laplace\(batches\): expected a batch at least, got none
    posterior(data=iter(DATA), structure="ekfac") | an iterator is used up
    replace(posterior(structure="full"), prior_precision=dict.fromkeys(PARAMS, 1.0)) \
        | expected a number, since
    posterior().sample(0, seed=0) | count=0
    posterior().draw(X, count=1, seed=-1) | Laplace.draw\(seed=-1
    posterior().log_likelihood([]) | log_likelihood\(batches\): expected a
    posterior(strategy="fast") | ^laplace\(strategy='fast'\)
    posterior(chunk_size=0, structure="ekfac") | ^laplace\(chunk_size=0\)
    posterior(loss_scale=2.0, structure="full") | ^laplace\(loss_scale=2.0\)
    posterior(prior=1.0, structure="diagonal") | ^laplace\(prior=.*prior_precision,
    posterior(params=[]) | ^laplace\(params\): expected a dictionary
    laplace(MODULE, "gaussian", *GIVEN, DATA) \
        | ^laplace\(fmodel\): expected a functional model
""")
BAD_CALLS += [
    [f"ggn(of({criterion}))", r"ggn\(loss\): expected a sample_loss of"]
    for criterion in (
        *("F.l1_loss", "nn.MSELoss(reduction='none')", "None"),
        *("nn.CrossEntropyLoss(label_smoothing=0.1)", "lambda x, y: F.mse_loss(x, y)"),
        "nn.CrossEntropyLoss(torch.ones(3))",
    )
]
BAD_CALLS += [
    [f"posterior({name}={value})", rf"laplace\({name}=.*expected 0 <"]
    for name in ("prior_precision", "temperature", "noise")
    for value in ("-1.0", "0.0", "math.inf")
]
BAD_CALLS += [
    [f"{call}({matrix}, *GIVEN, [{batch}])", rf"^{name}\(fmodel\): expected {message}"]
    for call in ("kfac", "diagonal", "trace", "applied")
    for matrix, name, batch, message in (
        ("GGN", "ggn", "(X, Y)", r"batches .*\(\*inputs,\) that the model"),
        ("GGN", "ggn", "({'z': X},)", "batches .*unexpected keyword .*'z'"),
        ("FISHER", "empirical_fisher", "(X,)", "batches .*without a target"),
        ("FISHER", "empirical_fisher", "(X, Y, Y)", "batches .*got .*int64"),
    )
]


def applied(*given):
    return curvature.vector_product(*given)(given[1])


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_calls_are_refused(call, message):
    names = vars(curvature) | {"math": math, "replace": replace} | globals()
    with pytest.raises((TypeError, ValueError), match=message):
        eval(call, names)


def test_dtensors_are_refused():
    found = blocks()
    with single_process_mesh("dp") as mesh:
        parts = {
            name: distribute_tensor(value.detach(), mesh, [Shard(0)])
            for name, value in PARAMS.items()
        }
        text = r"expected ordinary tensors, got a DTensor in '0.weight'. Pass"
        solve = lambda vector: found.solve(vector, damping=1.0)  # noqa: E731
        for name in ("kfac", "diagonal", "trace", "full"):
            with pytest.raises(TypeError, match=rf"{name}\(params\): {text}"):
                getattr(curvature, name)(GGN, parts, BUFFERS, BATCHES)
        for name, call in (("product", product()), ("Kronecker", solve)):
            with pytest.raises(TypeError, match=rf"{name}\(vector\): {text}"):
                call(parts)

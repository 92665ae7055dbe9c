"""Laplace posteriors against dense formulas of plain autograd in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.curvature.test_curvature import (
    CONSTANT,
    assembled,
    dense,
    flat,
    jacobian,
    problem,
    samples,
)
from vgrad import curvature
from vgrad.ensemble import EnsemblePrediction, ValuePrediction, predict

PRIOR, TEMPERATURE, NOISE = 0.3, 2.0, 0.5


def with_targets(module, batches, likelihood):
    def target(x):
        output = module(x).detach()
        if likelihood == "gaussian":
            return torch.randn_like(output)
        return torch.randint(output.shape[1], (len(x), *output.shape[2:]))

    return [(x, target(x)) for (x,) in batches]


def posterior(name, structure, likelihood, **options):
    """Return a module, its data, their Laplace and the dense precision."""
    module, (fmodel, params, buffers), batches = problem(name)
    data = with_targets(module, batches, likelihood)
    noise = NOISE if likelihood == "gaussian" else 1.0
    found = curvature.laplace(
        fmodel,
        likelihood,
        params,
        buffers,
        data,
        structure=structure,
        prior_precision=PRIOR,
        temperature=TEMPERATURE,
        noise=noise,
        **options,
    )
    if structure in ("kfac", "ekfac"):
        method = getattr(curvature, structure)
        matrix = method(curvature.ggn(fmodel, likelihood), params, buffers, batches)
        matrix = assembled(matrix.product, params)
    else:
        matrix = dense(module, batches, likelihood)
        matrix = matrix.diagonal().diag() if structure == "diagonal" else matrix
    prior = PRIOR * torch.eye(len(matrix)).double()
    return module, data, found, matrix * 5 / (TEMPERATURE * noise**2) + prior


def log_likelihood(module, data, likelihood, temperature=TEMPERATURE):
    total = 0.0
    for x, y in data:
        output = module(x).detach()
        if likelihood == "gaussian":
            total -= (output - y).square().sum() / (2 * NOISE**2 * temperature)
            total -= output.numel() * math.log(NOISE * math.sqrt(2 * math.pi))
        else:
            total -= F.cross_entropy(output, y, reduction="sum") / temperature
    return total


CASES = [
    ("mlp", "kfac", "categorical"),
    ("mlp", "ekfac", "gaussian"),
    ("mlp", "diagonal", "gaussian"),
    ("mlp", "full", "categorical"),
    ("cnn", "ekfac", "categorical"),
    ("cnn", "diagonal", "categorical"),
    ("grouped", "kfac", "gaussian"),
    ("segmentation", "kfac", "categorical"),
    ("lstm", "kfac", "gaussian"),
    ("attention", "ekfac", "categorical"),
    ("norm", "kfac", "gaussian"),
    ("scaled", "kfac", "categorical"),
    ("scaled", "diagonal", "gaussian"),
    ("scaled", "full", "gaussian"),
    ("twice", "kfac", "categorical"),
    ("tied", "ekfac", "gaussian"),
    ("tied", "full", "gaussian"),
    ("words", "kfac", "categorical"),
]


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")  # of attention in vmap
@pytest.mark.parametrize(("name", "structure", "likelihood"), CASES)
def test_covariances_and_evidence_are_those_of_the_dense_precision(
    name, structure, likelihood
):
    module, data, found, precision = posterior(name, structure, likelihood)
    inverse = torch.linalg.inv(precision)
    x = data[0][0]
    exact = torch.stack(
        [
            jac @ inverse @ jac.T
            for jac, _ in (jacobian(module, x) for x in samples(data[:1]))
        ]
    )
    oracle.assert_exact(found.covariance(x), exact, 1e-8)
    mode = flat(found.params)
    evidence = log_likelihood(module, data, likelihood)
    evidence -= PRIOR / 2 * mode.square().sum()
    evidence -= torch.linalg.slogdet(precision)[1] / 2
    evidence += len(mode) / 2 * math.log(PRIOR)
    oracle.assert_exact(found.log_marginal_likelihood(), evidence, 1e-8)


@pytest.mark.parametrize(
    "options", [{"chunk_size": 2}, {"strategy": "vmap"}, {"strategy": "loop"}]
)
@pytest.mark.parametrize("structure", ["kfac", "full"])
def test_options_change_no_covariance(structure, options):
    _, data, found, _ = posterior("cnn", structure, "categorical")
    x = data[0][0]
    oracle.assert_exact(found.covariance(x, **options), found.covariance(x), 1e-8)
    _, _, other, _ = posterior("cnn", structure, "categorical", chunk_size=2)
    oracle.assert_exact(other.covariance(x), found.covariance(x), 1e-8)


PEERS = {
    ("categorical", "full"): (-7.742825176704084, 7.734621256870392, 0.22386738592),
    ("categorical", "diagonal"): (-11.360683428928919, 9.807186438917148, 0.52733998),
    ("categorical", "kfac"): (-9.16238300933472, 8.576016199797207, 0.35955988415),
    ("gaussian", "full"): (-38.73340836176138, 0.37764988258636273, 0.56295049105),
    ("gaussian", "diagonal"): (-59.54180751065785, 1.0643099266202825, 1.41668096858),
    ("gaussian", "kfac"): (-49.33130847183208, 0.888207298137392, 1.0170818),
}
"""Evidence, a variance and the fitted prior by laplace-torch 0.3 and BackPACK 1.7.1."""


@pytest.mark.parametrize(("likelihood", "structure"), PEERS)
def test_numbers_are_those_of_laplace_torch(likelihood, structure):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for place, value in enumerate(module.parameters()):
            numbers = torch.arange(value.numel()).double() + place
            value.copy_(numbers.sin().view_as(value))
    x = torch.arange(21.0).double().cos().view(7, 3)
    y = torch.arange(7) % 2
    if likelihood == "gaussian":
        y = torch.arange(14.0).double().sin().view(7, 2)
    found = curvature.laplace(
        vgrad.make_functional_with_buffers(module)[0],
        likelihood,
        dict(module.named_parameters()),
        {},
        [(x[:3], y[:3]), (x[3:], y[3:])] if structure != "kfac" else [(x, y)],
        structure=structure,
        prior_precision=PRIOR,
        temperature=TEMPERATURE,
        noise=NOISE if likelihood == "gaussian" else 1.0,
    )
    evidence, variance, prior = PEERS[likelihood, structure]
    assert float(found.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-10)
    assert float(found.covariance(x[:2])[0, 0, 0]) == pytest.approx(variance, rel=1e-10)
    pytest.importorskip("scipy")
    assert found.fit_prior().prior_precision == pytest.approx(prior, rel=1e-6)
    if (likelihood, structure) == ("categorical", "kfac"):
        probabilities = found.predict(x[:2])[:, 0].tolist()
        assert probabilities == pytest.approx([0.7258, 0.7041], abs=5e-5)
        each = found.fit_prior(groups="parameter").prior_precision
        layers = [0.28019005624, 0.45049545061, 0.33831843882, 0.84161057534]
        assert list(each.values()) == pytest.approx(layers, rel=1e-8)


def regression():
    """Bayesian linear regression, for which the approximation is exact."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3).double(), torch.randn(6, 1).double()
    kernel = NOISE**2 * torch.eye(6).double() + x @ x.T / PRIOR
    inverse = torch.linalg.inv(x.T @ x / NOISE**2 + PRIOR * torch.eye(3).double())
    params = {"weight": (inverse @ x.T @ y / NOISE**2).T}
    model = nn.Linear(3, 1, bias=False).double()
    fmodel, _, _ = vgrad.make_functional_with_buffers(model)
    parts = list(zip(x.split(4), y.split(4), strict=True))
    found = curvature.laplace(
        fmodel,
        "gaussian",
        params,
        {},
        parts,
        structure="full",
        prior_precision=PRIOR,
        noise=NOISE,
    )
    return found, x, y, kernel, inverse


def test_a_linear_model_has_the_evidence_and_predictions_of_its_process():
    found, x, y, kernel, _ = regression()
    zeros = torch.zeros(6).double()
    exact = torch.distributions.MultivariateNormal(zeros, kernel).log_prob(y[:, 0])
    oracle.assert_exact(found.log_marginal_likelihood(), exact, 1e-8)
    new = torch.randn(2, 3).double()
    cross = new @ x.T / PRIOR
    solved = torch.linalg.solve(kernel, torch.cat([y, cross.T], 1))
    prediction = found.predict(new)
    oracle.assert_exact(prediction.mean, cross @ solved[:, :1], 1e-8)
    variance = (new.square().sum(1) / PRIOR + NOISE**2) - (cross * solved[:, 1:].T).sum(
        1
    )
    oracle.assert_exact(prediction.covariance[:, 0, 0], variance, 1e-8)
    target = torch.randn(2).double()
    normal = torch.distributions.Normal(prediction.mean[:, 0], variance.sqrt())
    density = found.log_likelihood([(new[:1], target[:1]), (new[1:], target[1:, None])])
    oracle.assert_exact(density, normal.log_prob(target).mean(), 1e-8)


def test_draws_have_the_covariances():
    found, x, _, _, inverse = regression()
    state = torch.get_rng_state()
    drawn = found.sample(20_000, seed=1)["weight"]
    assert torch.equal(drawn, found.sample(20_000, seed=1)["weight"])
    assert not torch.equal(drawn, found.sample(20_000, seed=2)["weight"])
    assert torch.equal(state, torch.get_rng_state())
    assert drawn.shape == (20_000, 1, 3)
    oracle.assert_exact(drawn[:, 0].T.cov(), inverse, 0.03)
    outputs = found.draw(x, count=20_000, seed=1)
    assert outputs.shape == (20_000, 6, 1)
    oracle.assert_exact(outputs.var(0)[:, 0], found.covariance(x)[:, 0, 0], 0.03)
    oracle.assert_exact(outputs.mean(0), found.predict(x).mean, 0.03)
    members = predict(found.fmodel, {"weight": drawn}, {}, x, kind="value")
    linear = ValuePrediction.from_outputs(outputs)
    oracle.assert_exact(members.variance, linear.variance, 0.05)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_members_of_blocks_have_the_covariance_of_the_posterior(structure):
    _, _, found, precision = posterior("twice", structure, "categorical")
    drawn = found.sample(20_000, seed=0)
    assert {type(each.grad_fn).__name__ for each in drawn.values()} == {CONSTANT}
    apart = [(drawn[n] - value).flatten(1) for n, value in found.params.items()]
    oracle.assert_exact(torch.cat(apart, 1).T.cov(), torch.linalg.inv(precision), 0.03)


def test_the_links_are_the_probit_and_monte_carlo():
    _, data, found, _ = posterior("segmentation", "kfac", "categorical")
    x, y = data[0]
    mean = found.fmodel(found.params, found.buffers, x)
    variance = found.covariance(x).diagonal(dim1=1, dim2=2).view_as(mean)
    exact = (mean / (1 + math.pi * variance / 8).sqrt()).softmax(1)
    oracle.assert_exact(found.predict(x), exact)
    logs = exact.log().gather(1, y[:, None]).sum((1, 2, 3)).mean()
    oracle.assert_exact(found.log_likelihood(data[:1]), logs)
    _, data, found, _ = posterior("words", "full", "categorical")
    x = data[0][0]
    drawn = EnsemblePrediction.from_logits(found.draw(x, count=20_000, seed=0))
    mean = found.fmodel(found.params, found.buffers, x)
    apart = mean[:, 0] - mean[:, 1]
    cov = found.covariance(x)
    deviation = (cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1]).sqrt()
    nodes = torch.linspace(-8, 8, 1001).double()
    weights = (-nodes.square() / 2).exp()
    values = (apart[:, None] + deviation[:, None] * nodes).sigmoid()
    integral = (values * weights).sum(1) / weights.sum()
    oracle.assert_exact(drawn.mean[:, 0], integral, 0.03)


def test_the_prior_with_the_largest_evidence_is_found():
    pytest.importorskip("scipy")
    _, _, found, _ = posterior("mlp", "ekfac", "categorical")
    best = found.fit_prior()
    evidence = best.log_marginal_likelihood()
    for prior in torch.logspace(-4, 4, 41).tolist():
        other = replace(found, prior_precision=prior).log_marginal_likelihood()
        assert other <= evidence
    layers = best.fit_prior(groups="layer")
    assert layers.log_marginal_likelihood() > evidence
    kept = best.fit_prior(groups={"head": ["2.*"]}).prior_precision
    assert kept["0.weight"] == best.prior_precision
    assert kept["2.bias"] == kept["2.weight"] != best.prior_precision
    zero = {n: torch.zeros_like(value) for n, value in found.params.items()}
    with pytest.raises(ValueError, match=r"fit_prior\(groups\): expected parameters"):
        replace(found, params=zero).fit_prior()


def test_the_last_layer_is_the_posterior_of_others_frozen():
    module, (fmodel, params, buffers), batches = problem("mlp")
    data = with_targets(module, batches, "categorical")
    head, frozen = vgrad.freeze(params, buffers, ["0.*"])
    given = fmodel, "categorical", head, frozen, data
    found = curvature.laplace(*given, structure="full", prior_precision=PRIOR)
    size = sum(each.numel() for each in head.values())
    precision = 5 * dense(module, batches, "categorical")[-size:, -size:]
    inverse = torch.linalg.inv(precision + PRIOR * torch.eye(size).double())
    rows = [jacobian(module, x)[0][:, -size:] for x in samples(data[:1])]
    exact = torch.stack([jac @ inverse @ jac.T for jac in rows])
    oracle.assert_exact(found.covariance(data[0][0]), exact, 1e-8)
    matrix = curvature.full(curvature.ggn(fmodel, "categorical"), head, frozen, batches)
    same = curvature.laplace(*given, structure=matrix, prior_precision=PRIOR)
    oracle.assert_exact(same.covariance(data[0][0]), exact, 1e-8)

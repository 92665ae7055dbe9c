"""The comparison of EK-FAC and diagonals in docs/comparison.md, where peers are there.

`python -m bench.attribution --help` says how they are installed.
"""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import attribution
from bench import attribution_peers as peers
from tests import losses

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]

EXACT, WRONG, RAISES = "exact", "wrong", "raises"


def linear(width):
    return nn.Linear(6, width, bias=False)


def called_twice():
    def run(self, x):
        return self.head(self.layer(self.layer(x).tanh()).tanh())

    return losses.Net(run, layer=linear(6), head=linear(3))


def two_of_one_weight():
    first, second = linear(6), linear(6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), linear(3))


def by_function():
    def run(self, x):
        return self.head(F.linear(self.layer(x).tanh(), self.layer.weight).tanh())

    return losses.Net(run, layer=linear(6), head=linear(3))


def normalised():
    return nn.Sequential(linear(6), nn.LayerNorm(6), nn.Tanh(), linear(3))


# A model, then kronfluence, it with shared parameters, dattri, curvlinops and ASDL.
MODELS = {
    "one position": (None, EXACT, EXACT, WRONG, EXACT, EXACT),
    "sequences": (None, EXACT, EXACT, RAISES, EXACT, WRONG),
    "a layer called twice": (called_twice, WRONG, WRONG, WRONG, WRONG, WRONG),
    "two layers of one weight": (two_of_one_weight, WRONG, WRONG, WRONG, WRONG, RAISES),
    "a weight in F.linear": (by_function, WRONG, WRONG, WRONG, WRONG, WRONG),
    "normalisation": (normalised, WRONG, WRONG, None, RAISES, EXACT),
}


def problem(name):
    build = MODELS[name][0]
    if build is None:
        net = "transformer" if name == "sequences" else "perceptron"
        return attribution.SMALL[net].problem(torch.float64)
    size = attribution.SMALL["perceptron"]._replace(build=build)
    return size.problem(torch.float64)


def by_kronfluence(shared):
    def build(p):
        analysis = peers.Kronfluence(p, "ekfac")
        analysis.factors.has_shared_parameters = shared
        analysis.fit()
        return analysis.score

    return build


def dense_diagonal(p):
    return lambda: attribution.dense_ggn(p).diagonal()


FITTED = peers.vgrad_kronecker("ekfac", empirical=True)
PEERS = {  # a package, what it computes, and the same by vgrad or by dense matrices
    "kronfluence": ("kronfluence", by_kronfluence(False), peers.vgrad_ekfac_scores),
    "shared": ("kronfluence", by_kronfluence(True), peers.vgrad_ekfac_scores),
    "dattri": ("dattri", peers.dattri_fit, FITTED),
    "curvlinops": (
        "curvlinops",
        peers.curvlinops_kronecker("EKFACLinearOperator", "empirical"),
        FITTED,
    ),
    "asdl": ("asdl", peers.laplace_diagonal("AsdlGGN"), dense_diagonal),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("peer", PEERS)
def test_the_comparison_in_the_docs_is_true(name, peer):
    package, compute, reference = PEERS[peer]
    pytest.importorskip(package, reason=f"{package} is not installed")
    claimed = MODELS[name][1 + list(PEERS).index(peer)]
    p = problem(name)
    expected = peers.joined(reference(p)(), 0)
    try:
        found = peers.joined(compute(p)(), 0)
        same = found.shape == expected.shape
        exact = same and attribution.relative(found, expected) < 1e-6
        outcome = EXACT if exact else WRONG
    except Exception:
        outcome = RAISES
    assert claimed in (outcome, None)


def test_eigenvectors_of_dattri_are_transposed(monkeypatch):
    pytest.importorskip("dattri", reason="dattri is not installed")
    fisher = importlib.import_module("dattri.func.fisher")
    estimate = fisher.estimate_eigenvector

    def transposed(*args):
        pairs = estimate(*args).items()
        return {n: tuple(each.T.contiguous() for each in pair) for n, pair in pairs}

    monkeypatch.setattr(fisher, "estimate_eigenvector", transposed)
    row, size = attribution.ROWS["ekfac"], attribution.SMALL["perceptron"]
    assert attribution.refusal(row, "dattri", size) is None

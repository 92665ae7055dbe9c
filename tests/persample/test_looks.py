"""Values that a step looks at: once for all parameters, and more only in doubt."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import vgrad
from tests import losses, oracle
from vgrad.precision import StaticLossScale

CLIPPING = ("flat", "per_layer", "automatic")


class Looks(TorchDispatchMode):
    """Counts ops whose results Python sees, for which a GPU would have to wait."""

    KINDS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__.startswith(self.KINDS)
        return func(*args, **(kwargs or {}))


def counted(compute, *given):
    with Looks() as looks:
        found = compute(*given)
    return found, looks.count


class Language(nn.Module):
    """Three layers with fused projections, norms, a table and a tied head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
                for _ in range(3)
            )
        )

    def forward(self, tokens):
        return self.layers(self.table(tokens)) @ self.table.weight.T


@pytest.mark.parametrize("scale", [None, 2.0**10])
@pytest.mark.parametrize("clipping", CLIPPING)
def test_a_step_of_a_transformer_looks_once(clipping, scale):
    loss, params, buffers = losses.of_model(
        Language(), losses.next_token, torch.float32
    )
    tokens = torch.randint(11, (4, 6))
    compute = vgrad.clipped_grad(
        loss,
        max_norm=0.1,
        clipping=clipping,
        loss_scale=None if scale is None else StaticLossScale(scale),
    )
    compute(params, buffers, tokens, tokens)
    _, looks = counted(compute, params, buffers, tokens, tokens)
    assert looks == 1


def joint(params, buffers, x, g):
    """A loss in which parameters are used in all the ways that may leave doubts."""
    total = (F.linear(x, params["a.weight"]) * g).sum()
    total = total + (F.linear(x[0], params["b.weight"], params["b.bias"]) * g[0]).sum()
    first, second = params["c.weight"].chunk(2)
    total = total + (F.linear(x, first) * g[:, :3]).sum()
    total = total + (F.linear(x, second) * g[:, 3:]).sum()
    tied = params["d.weight"]
    total = total + (F.linear(x, tied) * g).sum()
    total = total + (F.embedding(torch.arange(4), tied) * g[:, :5]).sum()
    return total + (F.conv1d(x.T, params["e.weight"], padding=1) * g.T).sum()


SHAPES = {"a.weight": (6, 5), "b.weight": (6, 5), "b.bias": (6,), "c.weight": (6, 5)}
SHAPES |= {"d.weight": (6, 5), "e.weight": (6, 5, 3)}


def planted(x, g):
    """Make samples that are zero, cancel, are tiny, huge and of both, and no number."""
    g[1] = 0
    x[2, 1:], g[2, 1:] = x[2, :1], g[2, :1] * -(1 + 1e-5) / 3
    g[3] *= 1e-32
    x[4] *= 1e19
    x[5], g[5] = x[5] * 1e22, g[5] * 1e-22
    x[6, 0, 0] = torch.nan
    x[7] = 0


@pytest.mark.parametrize("small", [0, 2**16])
@pytest.mark.parametrize("clipping", CLIPPING)
def test_doubts_of_all_parameters_are_mended(clipping, small, monkeypatch):
    monkeypatch.setattr("vgrad.persample.factors.reductions._SMALL", small)
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    x, g = (losses.randn(9, 4, n, dtype=torch.float32, seed=n) for n in (5, 6))
    compute = vgrad.clipped_grad(joint, max_norm=0.5, clipping=clipping)
    _, ordinary = counted(compute, params, {}, x, g)
    planted(x, g)
    found, looks = counted(compute, params, {}, x, g)
    assert looks > ordinary
    exact = oracle.loss_gradients(joint, params, {}, (x, g), 9)
    norms = oracle.norms(exact)
    assert int(found.nonfinite) == 1
    keep = norms.isfinite()
    torch.testing.assert_close(
        found.norms[keep].double(), norms[keep], rtol=2e-6, atol=0
    )
    single = [compute(params, {}, x[n : n + 1], g[n : n + 1]).grads for n in range(9)]
    total = {name: sum(each[name].double() for each in single) for name in params}
    assert oracle.error(found.grads, total) < 2e-6


@pytest.mark.parametrize("sample", [1, 7])
def test_samples_without_a_gradient_form_none(sample, monkeypatch):
    """Zeros are in doubt only until one has seen that nothing else was multiplied."""
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    x, g = (losses.randn(9, 4, n, dtype=torch.float32, seed=n) for n in (5, 6))
    (g if sample == 1 else x)[sample] = 0
    formed = []
    monkeypatch.setattr(
        vgrad.persample.factors.Outer, "double", lambda self: formed.append(self)
    )
    compute = vgrad.clipped_grad(joint, max_norm=0.5)
    norms = compute(params, {}, x, g).norms
    exact = oracle.norms(oracle.loss_gradients(joint, params, {}, (x, g), 9))
    torch.testing.assert_close(norms.double(), exact, rtol=1e-6, atol=0)
    assert not formed

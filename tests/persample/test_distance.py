"""One sample moves a clipped sum by its bound at most, on every route.

The sum with and without a sample of any size is measured, with random numbers by the
keys of samples, and by a function that has seen nothing before, as after a resume.
"""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import every_strategy
from vgrad import tree
from vgrad.generators import sample_keys

BOUND, SIZE = 0.5, 5
KEYS = sample_keys(3, 0, SIZE)

pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def distance(compute, fresh, params, buffers, batch):
    """Measure how far the last sample of a batch moves the sum, and its norm."""
    rest = tree.map_tensors(lambda x: x[:-1], batch)
    first = compute.keyed(KEYS)(params, buffers, *batch)
    second = fresh.keyed(KEYS[:-1])(params, buffers, *rest)
    gaps = (first.grads[name] - second.grads[name] for name in params)
    return oracle.norms({str(n): x[None].double() for n, x in enumerate(gaps)}), first


def check(loss, params, buffers, batch, **options):
    options = {"max_norm": BOUND, "randomness": "different", **options}
    makes = [vgrad.clipped_grad(loss, **options) for _ in range(2)]
    for size in (1.0, 1e3, 1e9):

        def grown(x, size=size):
            if not x.is_floating_point():
                return x
            return torch.cat([x[:-1], size * x[-1:]])

        found, whole = distance(*makes, params, buffers, tree.map_tensors(grown, batch))
        room = 1e-9 if whole.norms.dtype == torch.float64 else 1e-5
        assert float(found) <= BOUND * (1 + 1e-6) + room, size


@pytest.mark.parametrize("name", losses.CASES)
def test_one_sample_moves_the_sum_by_its_bound_at_most(name):
    loss, params, buffers, batch, _ = losses.build(name, SIZE)
    check(loss, params, buffers, batch)


def dropped(params, buffers, x):
    """Drop numbers, and take another branch for some of the samples that are left."""
    hidden = F.dropout(x @ params["w"], 0.4).tanh()
    if hidden.sum() > 0:
        hidden = F.dropout(hidden @ params["v"], 0.4)
    return hidden.square().sum() + F.dropout(x, 0.5) @ params["b"]


def saved(params, buffers, x):
    """Save tensors by hooks that change large values of some samples."""
    changes = lambda x: torch.where(x.abs() > 1e6, 0.5 * x, x)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, changes):
        return ((x @ params["w"]).tanh() @ params["v"]).square().sum() + params["b"][0]


def hooked(params, buffers, x):
    hidden = x @ params["w"]
    hidden.register_hook(lambda grad: grad * (1 + grad.detach().abs().sum()))
    return (hidden @ params["v"]).sin().sum() + params["b"].sum()


def inner(params, buffers, x):
    z = x.clone().requires_grad_()
    energy = (z @ params["w"]).square().sum() + z @ params["b"]
    (force,) = torch.autograd.grad(energy, z, create_graph=True)
    return force.square().sum() + (x @ params["w"] @ params["v"]).sum()


HOSTILE = {"dropout": dropped, "saved": saved, "hooks": hooked, "inner": inner}


@every_strategy
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_losses_keep_the_bound_on_the_routes_that_run_them(
    name, dtype, chunk_size, strategy
):
    params = {
        "w": losses.randn(3, 4, dtype=dtype),
        "v": losses.randn(4, 4, seed=1, dtype=dtype),
        "b": losses.randn(3, seed=2, dtype=dtype),
    }
    x = losses.randn(SIZE, 3, seed=4, dtype=dtype)
    options = {"chunk_size": chunk_size, "strategy": strategy}
    try:
        check(HOSTILE[name], params, {}, (x,), **options)
    except vgrad.UnsupportedOp:
        assert strategy != "loop"
    options["strategy"] = "auto"
    check(HOSTILE[name], params, {}, (x,), **options)

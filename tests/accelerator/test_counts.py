"""A steady call copies nothing between the memories, and waits at most once."""

import itertools
from functools import partial

import pytest
import torch

import vgrad
from tests.accelerator import device
from tests.accelerator.test_equal import CASES, HERE, PACKED, built, moved, table
from tests.golden import calls

READS_VALUES = {"branches", *PACKED}
WAITS = {"clipped, two passes": 2}
"""Of quantities that take more than one."""


@pytest.mark.parametrize("name", [n for n in CASES if n not in READS_VALUES])
def test_quantities(name):
    loss, params, buffers, batch = built(name, torch.float32)
    given = moved(HERE, (params, buffers, *batch))
    weights = torch.linspace(-1, 2, 5, device=HERE)
    for kind, strategy in table(("recorded",)):
        compute = calls.QUANTITIES[kind](loss, strategy=strategy)
        arguments = (weights, *given) if kind == "weighted" else given
        counts = device.count(lambda: compute(*arguments))  # noqa: B023
        assert_steady(counts, WAITS.get(kind, 1))


def assert_steady(counts, waits=1):
    assert counts.waits <= waits, counts.table("wait")
    assert not counts.to_host, counts.table("to_host")
    assert not counts.to_device, counts.table("to_device")


OPTIMIZERS = {
    "sgd": vgrad.optim.sgd(0.1, momentum=0.9),
    "adamw": vgrad.optim.adamw(1e-2),
    "scheduled": vgrad.optim.adam(vgrad.optim.schedules.cosine(0.1, 9)),
    "lion": vgrad.optim.lion(1e-2),
}
KINDS = ["batches", "samples", "private", "members"]
OPTIONS = [{}, {"donate": True}, {"policy": "mixed_float16"}]


@pytest.mark.parametrize(
    ("kind", "optimizer", "options"),
    [
        *itertools.product(KINDS, ["adamw"], OPTIONS),
        *itertools.product(["batches"], OPTIMIZERS, OPTIONS[:2]),
    ],
)
def test_steps(kind, optimizer, options):
    placed = {"place": partial(moved, HERE), "dtype": torch.float32}
    step, state = calls.begun(kind, OPTIMIZERS[optimizer], **placed, **options)
    x, y = calls.data()
    batch = moved(HERE, (x.float(), y))
    for _ in range(2):
        state, _ = step(state, *batch)
    with device.counted() as counts:
        step(state, *batch)
    assert_steady(counts)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_directions_of_projections_are_drawn_where_the_gradients_are(kind):
    loss, params, buffers, batch = built("cnn", torch.float32)
    given = moved(HERE, (params, buffers, *batch))
    options = {"seed": 0, "kind": kind, "verify": False}
    compute = vgrad.per_sample_projection(loss, 3, **options)
    with device.counted() as counts:
        found = compute(*given)
    assert_steady(counts)
    again = vgrad.per_sample_projection(loss, 3, seed=0, kind=kind)
    expected = again(params, buffers, *batch)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)

from collections import UserDict
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses
from vgrad import curvature, devices, training
from vgrad.attribution import influence

PARAMS = {"w": torch.ones(1000)}


def loss(params, buffers, x):
    return (params["w"] * x).exp().sum()


def test_automatic_chunks_fit_into_half_of_the_free_memory(monkeypatch):
    assert 2**24 < devices.free_bytes(torch.device("cpu")) < 2**50
    # exp keeps its result, and the product keeps x for the gradient of w.
    per_sample = 3 * 4_000 + 2 * (4_000 + 4)
    clip = vgrad.clipped_grad(loss, max_norm=1.0, chunk_size="auto")
    for number in (4, 0):
        memory = 2 * number * per_sample
        monkeypatch.setattr(devices, "free_bytes", lambda device, m=memory: m)
        found = vgrad.explain(clip)(PARAMS, {}, torch.zeros(10, 1))
        assert found.samples == max(number, 1)


def test_measuring_memory_draws_no_random_numbers():
    def drops(params, buffers, x):
        return (torch.nn.functional.dropout(x, 0.5) * params["w"]).sum()

    state = torch.get_rng_state()
    x = torch.ones(3, 1000)
    options = {"randomness": "different", "chunk_size": "auto"}
    found = vgrad.per_sample_grad(drops, **options)(PARAMS, {}, x)["w"]
    torch.set_rng_state(state)
    plain = vgrad.per_sample_grad(drops, randomness="different")(PARAMS, {}, x)["w"]
    assert torch.equal(found, plain)


def test_automatic_chunks_are_refused_inside_transforms():
    compute = vgrad.per_sample_norm(loss, chunk_size="auto")
    x = torch.zeros(2, 3, 1)
    with pytest.raises(ValueError, match='chunk_size="auto".*expected a number'):
        torch.vmap(lambda x: compute(PARAMS, {}, x))(x)


NAMES = [*"abcd"]


class Scaled(torch.nn.Linear):
    def forward(self, x, scale, names=NAMES):
        assert names == NAMES
        return super().forward(x) * scale.unsqueeze(-1)


FMODEL, WEIGHTS, BUFFERS = vgrad.make_functional_with_buffers(Scaled(3, 2))
ONE, ALL = (
    make(FMODEL, F.cross_entropy) for make in (vgrad.sample_loss, vgrad.batch_loss)
)
STACKED, MEMBERS, SHARED = vgrad.stack([Scaled(3, 2), Scaled(3, 2)])
TX = vgrad.optim.sgd(0.1)
STATE = training.TrainState.create(TX, WEIGHTS, BUFFERS)


OF_MEMBERS = vgrad.batch_loss(STACKED, F.cross_entropy)
FISHER = curvature.empirical_fisher(ONE)
PRIVATE = training.private_step(ONE, TX, losses.plan())
CLIP = vgrad.compile(vgrad.clipped_grad(ONE, max_norm=1.0), backend="replay")
GIVEN = WEIGHTS, BUFFERS
READERS = {
    "recorded": vgrad.per_sample_grad(ONE, strategy="recorded"),
    "vmap": vgrad.per_sample_grad(ONE, strategy="vmap"),
    "loop": vgrad.per_sample_grad(ONE, strategy="loop"),
    "weighted_grad": partial(vgrad.weighted_grad(ONE), torch.ones(4)),
    "ensemble_grad": lambda p, b, *batch: (
        vgrad.ensemble_grad(OF_MEMBERS)(MEMBERS, SHARED, *batch).grads
    ),
    "step of a batch": lambda p, b, *x: training.train_step(ALL, TX)(STATE, *x)[0][0],
    "step of samples": lambda p, b, *x: training.train_step(ONE, TX)(STATE, *x)[0][0],
    "batch loss": lambda *given: {"value": ALL(*given)},
    "compiled": lambda *given: CLIP(*given).grads,
    "parts": vgrad.per_sample_grad(ONE, chunk_size=3),
    "gram": lambda *given: {"": vgrad.per_sample_gram(ONE)(*given)},
    "moments": lambda *given: vgrad.gradient_moments(ONE)(*given).mean,
    "private step": lambda p, b, *x: PRIVATE(STATE, *x)[0][0],
    "diagonal": lambda p, b, *x: curvature.diagonal(FISHER, p, b, [x]),
    "product": lambda p, b, *x: curvature.vector_product(FISHER, p, b, [x])(p),
    "Hessian": lambda p, b, *x: curvature.hessian_vector_product(ALL, p, b, [x])(p),
    "influence": lambda p, b, *x: {"": influence(ONE, p, b, x, [x])},
}


@pytest.mark.parametrize("kind", [UserDict, MappingProxyType])
@pytest.mark.parametrize("reader", READERS)
def test_any_mapping_is_read_as_a_dictionary(reader, kind):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 3), "scale": torch.rand(4)}
    target = torch.randint(0, 2, (4,))
    expected = READERS[reader](*GIVEN, inputs, target)
    found = READERS[reader](*GIVEN, kind(inputs), target)
    assert {n: v.tolist() for n, v in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def given(**more):
    inputs = {"x": torch.randn(4, 3), "scale": torch.rand(4)}
    return (inputs | more, torch.randint(0, 2, (4,)))


OF_BATCHES = {"ensemble_grad", "step of a batch", "batch loss"}
"""Readers that hand a batch on as it is."""


@pytest.mark.parametrize("reader", [name for name in READERS if name not in OF_BATCHES])
@pytest.mark.parametrize("value", [b"a", 1j, object(), np.arange(4)])
@pytest.mark.filterwarnings("ignore:compile.*eager mode")
def test_objects_of_a_collate_function_are_refused_with_a_way_out(reader, value):
    with pytest.raises(TypeError, match=r"got a \w+. .*leave it out in .*collate_fn"):
        READERS[reader](*GIVEN, *given(names=[value] * 4))

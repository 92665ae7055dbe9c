"""The models of the main job."""

import sys

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.cli.runs import net
from vgrad.cli import models

SHAPE = models.Shape(channels=2, height=9, width=7, classes=5)


@pytest.fixture
def factory(module):
    return lambda source: module("mine", source)


@pytest.mark.parametrize("name", models.MODELS)
def test_gradients_of_single_samples_are_those_of_batches_of_one(name):
    model = models.build(name, SHAPE, seed=0).double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    source = torch.Generator().manual_seed(0)
    x, y = torch.rand(3, 2, 9, 7, generator=source), torch.tensor([0, 4, 2])
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    grads = vgrad.per_sample_grad(loss)(params, buffers, x.double(), y)
    expected = oracle.model_gradients(
        model, lambda model, x, y: F.cross_entropy(model(x), y), (x, y), 3
    )
    oracle.assert_exact(grads, expected)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_alone_fixes_the_weights_and_torchs_generator_stays(name):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = models.build(name, SHAPE, seed=0).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    again = models.build(name, SHAPE, seed=0).state_dict()
    other = models.build(name, SHAPE, seed=1).state_dict()
    oracle.assert_exact(again, first, 0)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_images_too_small_to_pool_are_refused(name):
    with pytest.raises(ValueError, match=r"pixels, got 1 x 7\. Use --model mlp"):
        models.build(name, SHAPE._replace(height=1), seed=0)


@pytest.mark.parametrize("name", models.MODELS)
def test_an_outline_is_the_model_without_its_values(name):
    model, outline = models.build(name, SHAPE, seed=0), models.outline(name, SHAPE)
    expected = {key: value.shape for key, value in model.state_dict().items()}
    assert {k: v.shape for k, v in outline.state_dict().items()} == expected
    assert all(value.is_meta for value in outline.state_dict().values())


@pytest.mark.parametrize("name", models.MODELS)
def test_a_net_that_would_fill_the_memory_is_refused(name):
    large = SHAPE._replace(height=2**13, width=2**13, classes=2**16)
    with pytest.raises(ValueError, match=f"--model {name}: expected images and class"):
        models.build(name, large, seed=0)


def test_a_factory_is_found_where_the_user_is_and_told_the_sizes(factory):
    spec = factory(net())
    before = list(sys.path)
    model = models.build(spec, SHAPE, seed=0)
    assert model(torch.zeros(3, 2, 9, 7)).shape == (3, 5)
    assert sys.path == before


def test_what_is_no_model_is_refused(factory):
    for spec in ("lenet", "mine:", ":make", "no_such_module:make"):
        with pytest.raises(ValueError, match="expected one of cnn, mlp, resnet or a"):
            models.build(spec, SHAPE, seed=0)
    spec = factory("def make(**sizes):\n    return 1 / 0\n")
    with pytest.raises(ValueError, match="got ZeroDivisionError: division by zero"):
        models.build(spec, SHAPE, seed=0)
    with pytest.raises(ValueError, match="AttributeError: module 'mine' has no"):
        models.build("mine:other", SHAPE, seed=0)


def test_a_factory_has_to_return_a_module(factory):
    spec = factory("def make(**sizes):\n    return 3\n")
    with pytest.raises(TypeError, match=r"returns a torch\.nn\.Module, got a int"):
        models.build(spec, SHAPE, seed=0)


def test_the_source_of_a_factory_is_told_apart(factory):
    digests = [models.source_digest("cnn")]
    for text in (net(), net(), net() + "# changed\n"):
        spec = factory(text)
        models.build(spec, SHAPE, seed=0)
        digests.append(models.source_digest(spec))
    assert digests[0] is None
    assert digests[1] == digests[2] != digests[3]

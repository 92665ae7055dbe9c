"""The models of the main job."""

import sys

import pytest
import torch

from tests import oracle
from tests.cli.runs import net
from vgrad.cli import models

SHAPE = models.Shape(channels=2, height=9, width=7, classes=5)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_alone_fixes_the_weights_and_torchs_generator_stays(name):
    before = torch.get_rng_state()
    first = models.build(name, SHAPE, seed=0).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    again = models.build(name, SHAPE, seed=0).state_dict()
    other = models.build(name, SHAPE, seed=1).state_dict()
    oracle.assert_exact(again, first, 0)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_a_factory_is_found_where_the_user_is_and_gets_the_sizes(module):
    before, digests = list(sys.path), [models.source_digest("cnn")]
    for text in (net(), net(), net() + "# changed\n"):
        spec = module("mine", text)
        scores = models.build(spec, SHAPE, seed=0)(torch.zeros(3, 2, 9, 7))
        assert scores.shape == (3, 5)
        assert sys.path == before
        digests.append(models.source_digest(spec))
    assert digests[0] is None
    assert digests[1] == digests[2] != digests[3]


SMALL = {"height": 1}
MINE = "def make(**sizes):\n    return 1 / 0\ndef three(**sizes):\n    return 3\n"


@pytest.mark.parametrize(
    ("spec", "changed", "message"),
    [
        ("cnn", SMALL, "got 1 x 7. Use --model mlp"),
        ("resnet", SMALL, "got 1 x 7. Use --model mlp"),
        ("lenet", {}, "expected one of cnn, mlp, resnet or a factory"),
        ("mine:", {}, "got ValueError: no such name"),
        (":make", {}, "got ValueError: no such name"),
        ("no_such_module:make", {}, "got ModuleNotFoundError"),
        ("mine:make", {}, "got ZeroDivisionError: division by zero"),
        ("mine:other", {}, "AttributeError: module 'mine' has no"),
        ("mine:three", {}, "returns a torch.nn.Module, got a int"),
    ],
)
def test_refusals(module, spec, changed, message):
    module("mine", MINE)
    with pytest.raises((ValueError, TypeError), match=message):
        models.build(spec, SHAPE._replace(**changed), seed=0)

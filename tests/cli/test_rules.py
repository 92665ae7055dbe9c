import numpy as np
import pytest
import torch

from tests import oracle
from tests.cli.runs import error
from vgrad.__main__ import main
from vgrad.persample.rules import RULES
from vgrad.torch_private import modes

MODEL = '''
from torch import nn
from torch.overrides import wrap_torch_function

from vgrad.persample.rules import Dense, rule


@wrap_torch_function(lambda x, weight: (x, weight))
def gate(x, weight):
    return x * weight


@rule(gate, weights=("weight",))
def gate_rule(x, weight):
    """`out = x * weight`."""
    return {"weight": lambda g: Dense((g * x).flatten(1, -2).sum(1))}


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return gate(x, self.weight)


def make(*, channels, height, width, classes):
    return nn.Sequential(
        nn.Flatten(),
        Gate(width),
        nn.Dropout(),
        nn.Linear(width, classes),
    )
'''


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("six") / "images.npz"
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.arange(6) % 3
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    return str(path)


@pytest.fixture
def factory(module):
    """Write a module whose rule is gone again after the test."""
    before = dict(RULES)
    yield module("gated_model", MODEL)
    RULES.clear()
    RULES.update(before)


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_table_has_a_line_for_each_op_with_weights_and_factors(capsys):
    assert main(["rules"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert cells(head) == ["op", "weights", "factors", "what"]
    found = {cells(line)[0]: cells(line)[1:] for line in lines}
    assert len(found) == len(lines)
    assert found["F.linear"][:2] == ["weight, bias", "Dense, Outer"]
    assert found["F.conv2d"][:2] == ["weight, bias", "Conv, Dense, Outer"]
    assert found["F.embedding"][:2] == ["weight", "Rows"]
    assert found["F.layer_norm"][:2] == ["weight, bias", "Dense"]
    assert "F.scaled_dot_product_attention" in found
    assert "Tensor.matmul" in found
    # What rules are made of is nothing that a loss calls.
    assert not any(name.startswith("vgrad.") for name in found)


def test_every_op_that_has_a_rule_is_named_once():
    names = [modes.op_name(op, full=True) for op in RULES]
    assert len(set(names)) == len(names)


def test_a_model_is_explained_after_the_table(images, capsys):
    assert main(["rules", "--model", "mlp", "--data", images]) == 0
    table, _, explained = capsys.readouterr().out.partition("\n\n")
    assert table.startswith("op")
    assert explained.startswith("clipped_grad of 6 samples, strategy recorded")
    assert ["1.weight", "linear", "Outer", "both sides"] in [
        cells(line)[:4] for line in explained.splitlines()
    ]


def test_rules_of_a_factory_count_and_random_layers_may_draw(images, factory, capsys):
    before = torch.get_rng_state()
    assert main(["rules", "--model", factory, "--data", images]) == 0
    found = [cells(line) for line in capsys.readouterr().out.splitlines()]
    assert ["gated_model.gate", "weight", "Dense", "`out = x * weight`."] in found
    assert ["1.weight", "gate", "Dense", "gradients", "96", "has a rule"] in found
    oracle.assert_exact(torch.get_rng_state(), before, 0)


def test_the_products_of_a_model_come_last_where_they_are_asked_for(images, capsys):
    given = ["rules", "--model", "mlp", "--data", images]
    assert main(given) == 0
    before = capsys.readouterr().out
    assert main([*given, "--alignment"]) == 0
    after = capsys.readouterr().out
    assert after.startswith(before)
    lines = after.removeprefix(before).splitlines()
    # 6 samples of 4 pixels, 64 hidden units and 3 classes.
    assert ["1.weight", "linear", "6", "64", "4", "1", "3,072"] in [
        cells(line)[:7] for line in lines
    ]
    assert lines[-1] == "pad 3.weight from 3 to 8 rows"


BAD = {
    "alignment of nothing": (["--alignment"], "expected a model, got none"),
    "no such model": (["--model", "lenet"], "expected one of cnn, mlp, resnet"),
    "no such data": (["--model", "mlp", "--data", "none.npz"], "expected a file"),
    "a model for other images": (["--model", "wrong_model:make"], "got RuntimeError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line(images, capsys, module, name):
    source = "def make(**shape):\n    return torch.nn.Linear(99, 3)\n"
    module("wrong_model", source)
    given, message = BAD[name]
    assert message in error(capsys, "rules", "--data", images, *given)

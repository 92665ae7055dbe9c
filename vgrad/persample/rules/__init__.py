"""Rules: the factors that ops with parameters leave for the backward pass.

Each file has the rules of one family of ops; importing the room fills `RULES`. The
author of a rule registers it with `rule`, and makes a factor for each of its weights.

* `rule`: register a function as the rule of some ops
* `lowered`: register another form of some ops, for recorded passes
* `RULES`: the table of all rules
* `Rule`, `Lowering`, `Maker`, `Recording`: the types of its entries
* `Outer`, `Conv`, `Rows`, `Dense`: factors; the last holds the gradients themselves
* `Factor`: the methods of a factor of your own
* `Norm`, `Probes`: the types of its results and arguments
* `positions`, `over_positions`: view a tensor by positions, and sum over them
"""

from vgrad.factors import Conv, Dense, Factor, Norm, Outer, Probes, Rows
from vgrad.persample.rules import convolution as convolution
from vgrad.persample.rules import layers as layers
from vgrad.persample.rules.products import over_positions, positions
from vgrad.persample.rules.table import (
    RULES,
    Lowering,
    Maker,
    Recording,
    Rule,
    lowered,
    rule,
)

__all__ = [
    "RULES",
    "Conv",
    "Dense",
    "Factor",
    "Lowering",
    "Maker",
    "Norm",
    "Outer",
    "Probes",
    "Recording",
    "Rows",
    "Rule",
    "lowered",
    "over_positions",
    "positions",
    "rule",
]


def __dir__() -> list[str]:
    return __all__

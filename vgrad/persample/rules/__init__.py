"""Rules: the factors that ops with parameters leave for the backward pass.

Each file has the rules of one family of ops; importing the room fills `RULES`. The
author of a rule registers it with `rule`, and makes a factor for each of its weights.

* `rule`: register a function as the rule of some ops
* `lowered`: register another form of some ops, for recorded passes
* `RULES`: the table of all rules
* `Outer`, `Conv`, `Rows`, `Dense`: factors; the last holds the gradients themselves
* `Factor`: the methods of a factor of your own
* `positions`, `over_positions`: view a tensor by positions, and sum over them
"""

from typing import TYPE_CHECKING

from vgrad.persample.factors import Conv, Dense, Factor, Outer, Rows
from vgrad.persample.rules import convolution as convolution
from vgrad.persample.rules import layers as layers
from vgrad.persample.rules.products import over_positions, positions
from vgrad.persample.rules.table import RULES, lowered, rule
from vgrad.renamed import raising

__all__ = [
    "RULES",
    "Conv",
    "Dense",
    "Factor",
    "Outer",
    "Rows",
    "lowered",
    "over_positions",
    "positions",
    "rule",
]


if not TYPE_CHECKING:  # which sees no other names
    __getattr__ = raising(__name__)


def __dir__() -> list[str]:
    return __all__

"""Ops: one record per op that runs otherwise than torch alone would run it.

Each file has the records of one family; importing the room fills `OPS`. The author of
an op makes a rule with `rule`: the factors that its weights leave for the backward
pass. Other forms of an op go into the same record by `register`.

* `rule`: register a function as the rule of some ops
* `register`: fill other fields of the records of some ops
* `OPS`: all records, by op
* `Op`, `Rule`, `Read`, `Kind`: a record, and types of its fields
* `Outer`, `Conv`, `Rows`, `Dense`: factors; the last holds the gradients themselves
* `Factor`: the methods of a factor of your own
* `Norm`, `Probes`: the types of its results and arguments
* `positions`, `over_positions`: view a tensor by positions, and sum over them
"""

from vgrad.factors import Conv, Dense, Factor, Norm, Outer, Probes, Rows
from vgrad.ops import attention as attention
from vgrad.ops import conv as conv
from vgrad.ops import criteria as criteria
from vgrad.ops import embedding as embedding
from vgrad.ops import experts as experts
from vgrad.ops import indexing as indexing
from vgrad.ops import norm as norm
from vgrad.ops import recurrent as recurrent
from vgrad.ops.linear import over_positions, positions
from vgrad.ops.record import OPS, Kind, Op, Read, Rule, register, rule

__all__ = [
    "OPS",
    "Conv",
    "Dense",
    "Factor",
    "Kind",
    "Norm",
    "Op",
    "Outer",
    "Probes",
    "Read",
    "Rows",
    "Rule",
    "over_positions",
    "positions",
    "register",
    "rule",
]


def __dir__() -> list[str]:
    return __all__

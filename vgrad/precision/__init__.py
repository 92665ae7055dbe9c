"""Mixed precision that works inside `grad` and `vmap`.

* `autocast`: `torch.autocast` that also holds under the transforms of `torch.func`
* `AutocastMode`: the function mode behind it
* `Policy`: the dtypes of parameters, computation and outputs
* `policy_for`: run a functional model under a policy, or one for each module
* `PolicyModel`: what that returns
* `loss_under`: run a loss under a policy
* `cast_floating`, `cast_to_full`, `cast_to_half`: cast the floating tensors of a tree
* `StaticLossScale`: a loss scale that stays
* `DynamicLossScale`: one that shrinks after overflow, and grows again
* `NoOpLossScale`: no scaling
* `LossScale`: what a step needs of one
* `all_finite`: tell whether the tensors of a tree are finite
* `select_tree`: choose between two trees by a tensor
* `alignment_report`: list matrix products whose sizes tensor cores cannot use
* `AlignmentReport`: what that finds
* `KINDS`, `Kind`: what autocast does around each op
"""

from vgrad.precision.alignment import AlignmentReport, alignment_report
from vgrad.precision.autocasting import AutocastMode, autocast
from vgrad.precision.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from vgrad.precision.modules import PolicyModel, loss_under, policy_for
from vgrad.precision.ops import KINDS, Kind
from vgrad.precision.policy import Policy, cast_floating, cast_to_full, cast_to_half
from vgrad.precision.skipping import all_finite, select_tree

__all__ = [
    "KINDS",
    "AlignmentReport",
    "AutocastMode",
    "DynamicLossScale",
    "Kind",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "PolicyModel",
    "StaticLossScale",
    "alignment_report",
    "all_finite",
    "autocast",
    "cast_floating",
    "cast_to_full",
    "cast_to_half",
    "loss_under",
    "policy_for",
    "select_tree",
]


def __dir__() -> list[str]:
    return __all__

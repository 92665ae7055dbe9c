"""Mixed precision that works inside `grad` and `vmap`.

`autocast`, which is `torch.autocast` that also holds under the transforms of
`torch.func`, is a name of `vgrad` itself.

* `KINDS`: the treatment of each op under autocast
* `Policy`: the dtypes of parameters, computation and outputs
* `policy_for`: run a functional model under a policy, or one policy per module
* `loss_under`: run a loss under a policy
* `StaticLossScale`: a constant loss scale
* `DynamicLossScale`: a scale that shrinks after overflow, and grows again
* `NoOpLossScale`: no scaling
* `LossScale`: the interface of loss scales
* `all_finite`: return whether the tensors of a tree are finite
* `select_tree`: choose between two trees by a tensor
* `alignment_report`: list matrix products whose sizes tensor cores cannot use
"""

from vgrad.precision.alignment import alignment_report
from vgrad.precision.autocasting import KINDS
from vgrad.precision.autocasting import autocast as autocast
from vgrad.precision.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)
from vgrad.precision.modules import loss_under, policy_for
from vgrad.precision.policy import Policy

__all__ = [
    "KINDS",
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "alignment_report",
    "all_finite",
    "loss_under",
    "policy_for",
    "select_tree",
]


def __dir__() -> list[str]:
    return __all__

"""Ensembles: many models trained and evaluated as one.

`stack`, `init_ensemble`, `combine_state_for_ensemble`, `ensemble_forward`,
`ensemble_grad` and `for_members` are names of `vgrad` itself.

Making and taking apart:

* `unstack`: the members as modules of their own
* `member`: the entries of one member, as views
* `member_seed`: the seed of one member
* `share`: let all members use one tensor for some entries
* `group`: stack the models that are alike, and put the groups behind one call
* `ModelGroups`: what `group` makes

Running and training:

* `EnsembleGrads`: what that returns
* `ensemble_per_sample_grad`: the gradient of every sample for every member
* `ensemble_clipped_grad`: the sum of clipped gradients of every member
* `MembersState`: its state
* `bootstrap_indices`: draw samples with replacement for each member
* `fold_indices`: split samples for cross-validation

Predicting:

* `predict`: probabilities and uncertainty, an `EnsemblePrediction`
* `predict_values`: mean, variance and quantiles, a `ValuePrediction`
* `class_prediction`, `value_prediction`: the same of outputs that are there already
* `calibration`: calibration error, Brier score and likelihood, a `Calibration`
* `reliability`: confidence and accuracy in each bin, a `Reliability`
* `EnsemblePrediction`, `ValuePrediction`, `Calibration`, `Reliability`: the results
"""

from typing import TYPE_CHECKING

from vgrad.ensemble.calibration import (
    Calibration,
    Reliability,
    calibration,
    reliability,
)
from vgrad.ensemble.forward import ensemble_forward as ensemble_forward
from vgrad.ensemble.gradients import EnsembleGrads
from vgrad.ensemble.gradients import ensemble_grad as ensemble_grad
from vgrad.ensemble.groups import ModelGroups, group
from vgrad.ensemble.optimizer import MembersState
from vgrad.ensemble.optimizer import for_members as for_members
from vgrad.ensemble.per_sample import ensemble_clipped_grad, ensemble_per_sample_grad
from vgrad.ensemble.prediction import (
    EnsemblePrediction,
    ValuePrediction,
    class_prediction,
    predict,
    predict_values,
    value_prediction,
)
from vgrad.ensemble.resampling import bootstrap_indices, fold_indices
from vgrad.ensemble.stacking import (
    combine_state_for_ensemble as combine_state_for_ensemble,
)
from vgrad.ensemble.stacking import (
    init_ensemble as init_ensemble,
)
from vgrad.ensemble.stacking import (
    member,
    member_seed,
    share,
    unstack,
)
from vgrad.ensemble.stacking import (
    stack as stack,
)
from vgrad.renamed import raising

__all__ = [
    "Calibration",
    "EnsembleGrads",
    "EnsemblePrediction",
    "MembersState",
    "ModelGroups",
    "Reliability",
    "ValuePrediction",
    "bootstrap_indices",
    "calibration",
    "class_prediction",
    "ensemble_clipped_grad",
    "ensemble_per_sample_grad",
    "fold_indices",
    "group",
    "member",
    "member_seed",
    "predict",
    "predict_values",
    "reliability",
    "share",
    "unstack",
    "value_prediction",
]

if not TYPE_CHECKING:  # which sees no other names
    __getattr__ = raising(__name__)


def __dir__() -> list[str]:
    return __all__

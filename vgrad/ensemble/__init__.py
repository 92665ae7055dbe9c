"""Ensembles: many models trained and evaluated as one.

Making and taking apart:

* `stack`, `combine_state_for_ensemble`: stack models that are alike, `[E, *shape]`
* `init_ensemble`: stack models made by a factory, each from its own random numbers
* `unstack`: the members as modules of their own
* `member`: the entries of one member, as views
* `member_seed`: the seed of one member
* `share`: let all members use one tensor for some entries
* `group`: stack the models that are alike, and put the groups behind one call
* `ModelGroups`: what `group` makes

Running and training:

* `ensemble_forward`: run all members, `[E, B, ...]`
* `ensemble_grad`: differentiate every member's loss
* `EnsembleGrads`: what that returns
* `ensemble_per_sample_grad`: the gradient of every sample for every member
* `ensemble_clipped_grad`: the sum of clipped gradients of every member
* `for_members`: run an optimizer for every member by itself
* `MembersState`: its state
* `bootstrap_indices`: draw samples with replacement for each member
* `fold_indices`: split samples for cross-validation
* `EnsembleExplanation`: which strategy runs, and how

Predicting:

* `predict`: probabilities and uncertainty, an `EnsemblePrediction`
* `predict_values`: mean, variance and quantiles, a `ValuePrediction`
* `class_prediction`, `value_prediction`: the same of outputs that are there already
* `calibration`: calibration error, Brier score and likelihood, a `Calibration`
* `reliability`: confidence and accuracy in each bin, a `Reliability`
* `EnsemblePrediction`, `ValuePrediction`, `Calibration`, `Reliability`: the results
"""

from vgrad.ensemble.calibration import (
    Calibration,
    Reliability,
    calibration,
    reliability,
)
from vgrad.ensemble.choice import EnsembleExplanation
from vgrad.ensemble.forward import ensemble_forward
from vgrad.ensemble.gradients import EnsembleGrads, ensemble_grad
from vgrad.ensemble.groups import ModelGroups, group
from vgrad.ensemble.optimizer import MembersState, for_members
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
    combine_state_for_ensemble,
    init_ensemble,
    member,
    member_seed,
    share,
    stack,
    unstack,
)

__all__ = [
    "Calibration",
    "EnsembleExplanation",
    "EnsembleGrads",
    "EnsemblePrediction",
    "MembersState",
    "ModelGroups",
    "Reliability",
    "ValuePrediction",
    "bootstrap_indices",
    "calibration",
    "class_prediction",
    "combine_state_for_ensemble",
    "ensemble_clipped_grad",
    "ensemble_forward",
    "ensemble_grad",
    "ensemble_per_sample_grad",
    "fold_indices",
    "for_members",
    "group",
    "init_ensemble",
    "member",
    "member_seed",
    "predict",
    "predict_values",
    "reliability",
    "share",
    "stack",
    "unstack",
    "value_prediction",
]


def __dir__() -> list[str]:
    return __all__

"""Ensembles: many models trained and evaluated as one.

`stack`, `combine_state_for_ensemble`, `ensemble_forward`, `ensemble_grad` and
`for_members` are names of `vgrad` itself. Running statistics of batch norm are buffers
with a member axis, and members rest in a step of `vgrad.training` where
`EnsembleState.active` is false.

Making and taking apart:

* `unstack`: the members as modules of their own
* `member`: the entries of one member, as views
* `member_seed`: the seed of one member
* `share`: let all members use one tensor for some entries
* `take`: copy members of a state, for successive halving and populations
* `rank_one`: members that share weights up to factors of rank one: BatchEnsemble, TabM
* `group`: stack the models that are alike, and put the groups behind one call

Running and training:

* `EnsembleGrads`: the result of `ensemble_grad`
* `ensemble_per_sample_grad`: the gradient of every sample for every member
* `ensemble_clipped_grad`: the sum of clipped gradients of every member
* `bootstrap_indices`: draw samples with replacement for each member
* `fold_indices`: split samples for cross-validation

Predicting:

* `predict`: predictions and their uncertainty, on one process or over ranks
* `EnsemblePrediction`, `ValuePrediction`: the results, of classes and of values
"""

from vgrad.ensemble.gradients import (
    EnsembleGrads,
    ensemble_clipped_grad,
    ensemble_per_sample_grad,
)
from vgrad.ensemble.gradients import ensemble_grad as ensemble_grad
from vgrad.ensemble.members import take
from vgrad.ensemble.optimizer import for_members as for_members
from vgrad.ensemble.prediction import EnsemblePrediction, ValuePrediction, predict
from vgrad.ensemble.prediction import ensemble_forward as ensemble_forward
from vgrad.ensemble.rank_one import rank_one
from vgrad.ensemble.resampling import bootstrap_indices, fold_indices
from vgrad.ensemble.stacking import (
    combine_state_for_ensemble as combine_state_for_ensemble,
)
from vgrad.ensemble.stacking import group, member, member_seed, share, unstack
from vgrad.ensemble.stacking import stack as stack

__all__ = [
    "EnsembleGrads",
    "EnsemblePrediction",
    "ValuePrediction",
    "bootstrap_indices",
    "ensemble_clipped_grad",
    "ensemble_per_sample_grad",
    "fold_indices",
    "group",
    "member",
    "member_seed",
    "predict",
    "rank_one",
    "share",
    "take",
    "unstack",
]


def __dir__() -> list[str]:
    return __all__

"""Ensembles: many models trained and evaluated as one."""

from vgrad.ensemble.calibration import Calibration as Calibration
from vgrad.ensemble.calibration import Reliability as Reliability
from vgrad.ensemble.calibration import calibration as calibration
from vgrad.ensemble.calibration import reliability as reliability
from vgrad.ensemble.choice import EnsembleExplanation as EnsembleExplanation
from vgrad.ensemble.forward import ensemble_forward as ensemble_forward
from vgrad.ensemble.gradients import EnsembleGrads as EnsembleGrads
from vgrad.ensemble.gradients import ensemble_grad as ensemble_grad
from vgrad.ensemble.groups import ModelGroups as ModelGroups
from vgrad.ensemble.groups import group as group
from vgrad.ensemble.optimizer import MembersState as MembersState
from vgrad.ensemble.optimizer import for_members as for_members
from vgrad.ensemble.per_sample import ensemble_clipped_grad as ensemble_clipped_grad
from vgrad.ensemble.per_sample import (
    ensemble_per_sample_grad as ensemble_per_sample_grad,
)
from vgrad.ensemble.prediction import EnsemblePrediction as EnsemblePrediction
from vgrad.ensemble.prediction import ValuePrediction as ValuePrediction
from vgrad.ensemble.prediction import class_prediction as class_prediction
from vgrad.ensemble.prediction import predict as predict
from vgrad.ensemble.prediction import predict_values as predict_values
from vgrad.ensemble.prediction import value_prediction as value_prediction
from vgrad.ensemble.resampling import bootstrap_indices as bootstrap_indices
from vgrad.ensemble.resampling import fold_indices as fold_indices
from vgrad.ensemble.stacking import (
    combine_state_for_ensemble as combine_state_for_ensemble,
)
from vgrad.ensemble.stacking import init_ensemble as init_ensemble
from vgrad.ensemble.stacking import member as member
from vgrad.ensemble.stacking import member_seed as member_seed
from vgrad.ensemble.stacking import share as share
from vgrad.ensemble.stacking import stack as stack
from vgrad.ensemble.stacking import unstack as unstack
from vgrad.ensemble.store import load_ensemble as load_ensemble
from vgrad.ensemble.store import load_member as load_member
from vgrad.ensemble.store import save_ensemble as save_ensemble

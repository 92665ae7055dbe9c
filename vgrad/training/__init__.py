"""Training steps as pure functions of a state: plain, private, of an ensemble."""

from vgrad.training.cross_validation import CrossValidation as CrossValidation
from vgrad.training.cross_validation import FoldEpoch as FoldEpoch
from vgrad.training.cross_validation import cross_validate as cross_validate
from vgrad.training.early_stopping import EarlyStopping as EarlyStopping
from vgrad.training.ensemble import EnsembleState as EnsembleState
from vgrad.training.ensemble import ensemble_train_step as ensemble_train_step
from vgrad.training.plain import train_step as train_step
from vgrad.training.private import private_step as private_step
from vgrad.training.saved_states import load_state as load_state
from vgrad.training.saved_states import save_state as save_state
from vgrad.training.state import TrainState as TrainState

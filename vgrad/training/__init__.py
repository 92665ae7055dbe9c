"""Training steps as pure functions of a state: plain, private, of an ensemble."""

from vgrad.training.early_stopping import EarlyStopping as EarlyStopping
from vgrad.training.ensemble import EnsembleState as EnsembleState
from vgrad.training.ensemble import ensemble_train_step as ensemble_train_step
from vgrad.training.plain import train_step as train_step
from vgrad.training.private import private_step as private_step
from vgrad.training.state import TrainState as TrainState

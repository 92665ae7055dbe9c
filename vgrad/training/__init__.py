"""Training steps as pure functions of a state: plain, private, of an ensemble.

* `train_step`: gradient of a batch loss, optimizer, new buffers
* `private_step`: DP-SGD: clip every sample, sum, add noise once, optimizer
* `ensemble_train_step`: one step of all members
* `TrainState`, `EnsembleState`: all that a step changes
* `save`, `load`: a state, or another tree of tensors, in a folder
* `release`: parameters and buffers in files for others, with the claim of privacy
* `EarlyStopping`: which members no longer improve
"""

from vgrad.training.early_stopping import EarlyStopping
from vgrad.training.released import release
from vgrad.training.saved import load, save
from vgrad.training.state import EnsembleState, TrainState
from vgrad.training.steps import ensemble_train_step, private_step, train_step

__all__ = [
    "EarlyStopping",
    "EnsembleState",
    "TrainState",
    "ensemble_train_step",
    "load",
    "private_step",
    "release",
    "save",
    "train_step",
]


def __dir__() -> list[str]:
    return __all__

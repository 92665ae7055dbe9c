"""The states of the transformations: named tuples whose leaves are tensors.

Each documents its fields. A chain's state is the tuple of those of its parts.
"""

from vgrad.optim.averaging import AverageState, EmaState, LookaheadState
from vgrad.optim.clipping import ZeroNansState
from vgrad.optim.hyperparams import HyperparamsState
from vgrad.optim.methods.adafactor import FactoredState
from vgrad.optim.methods.adam import AdamState, AmsgradState
from vgrad.optim.methods.adaptive import AdadeltaState, RmsState, RssState, StddevState
from vgrad.optim.methods.lion import LionState
from vgrad.optim.methods.muon import MuonState
from vgrad.optim.methods.nadam_radam_adamax import AdamaxState, NadamState
from vgrad.optim.methods.rprop import RpropState
from vgrad.optim.methods.schedule_free import ScheduleFreeState, SquareState
from vgrad.optim.methods.sgd import TraceState
from vgrad.optim.noise import NoiseState
from vgrad.optim.schedules.plateau import PlateauState
from vgrad.optim.transforms import ScheduleState
from vgrad.optim.wrappers import ApplyIfFiniteState, MultiStepsState

__all__ = [
    "AdadeltaState",
    "AdamState",
    "AdamaxState",
    "AmsgradState",
    "ApplyIfFiniteState",
    "AverageState",
    "EmaState",
    "FactoredState",
    "HyperparamsState",
    "LionState",
    "LookaheadState",
    "MultiStepsState",
    "MuonState",
    "NadamState",
    "NoiseState",
    "PlateauState",
    "RmsState",
    "RpropState",
    "RssState",
    "ScheduleFreeState",
    "ScheduleState",
    "SquareState",
    "StddevState",
    "TraceState",
    "ZeroNansState",
]


def __dir__() -> list[str]:
    return __all__

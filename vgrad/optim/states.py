"""The states of the transformations: named tuples whose leaves are tensors.

Each documents its fields. A chain's state is the tuple of those of its parts.
"""

from vgrad.optim.averaging import AverageState as AverageState
from vgrad.optim.averaging import EmaState as EmaState
from vgrad.optim.averaging import LookaheadState as LookaheadState
from vgrad.optim.clipping import ZeroNansState as ZeroNansState
from vgrad.optim.hyperparams import HyperparamsState as HyperparamsState
from vgrad.optim.methods.adafactor import FactoredState as FactoredState
from vgrad.optim.methods.adam import AdamState as AdamState
from vgrad.optim.methods.adam import AmsgradState as AmsgradState
from vgrad.optim.methods.adaptive import AdadeltaState as AdadeltaState
from vgrad.optim.methods.adaptive import RmsState as RmsState
from vgrad.optim.methods.adaptive import RssState as RssState
from vgrad.optim.methods.adaptive import StddevState as StddevState
from vgrad.optim.methods.lion import LionState as LionState
from vgrad.optim.methods.muon import MuonState as MuonState
from vgrad.optim.methods.nadam_radam_adamax import AdamaxState as AdamaxState
from vgrad.optim.methods.nadam_radam_adamax import NadamState as NadamState
from vgrad.optim.methods.rprop import RpropState as RpropState
from vgrad.optim.methods.schedule_free import ScheduleFreeState as ScheduleFreeState
from vgrad.optim.methods.schedule_free import SquareState as SquareState
from vgrad.optim.methods.sgd import TraceState as TraceState
from vgrad.optim.noise import NoiseState as NoiseState
from vgrad.optim.schedules.plateau import PlateauState as PlateauState
from vgrad.optim.transforms import ScheduleState as ScheduleState
from vgrad.optim.wrappers import ApplyIfFiniteState as ApplyIfFiniteState
from vgrad.optim.wrappers import MultiStepsState as MultiStepsState

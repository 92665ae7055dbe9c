"""How a loss is run so that every use of a parameter leaves a factor."""

from vgrad.persample.engine.calls import Call as Call
from vgrad.persample.engine.calls import at_a_time as at_a_time
from vgrad.persample.engine.calls import constant as constant
from vgrad.persample.engine.calls import joined as joined
from vgrad.persample.engine.collectors import Collector as Collector
from vgrad.persample.engine.collectors import Factors as Factors
from vgrad.persample.engine.collectors import Gradients as Gradients
from vgrad.persample.engine.collectors import Moments as Moments
from vgrad.persample.engine.collectors import Norms as Norms
from vgrad.persample.engine.collectors import Projections as Projections
from vgrad.persample.engine.collectors import Settled as Settled
from vgrad.persample.engine.collectors import Weighted as Weighted
from vgrad.persample.engine.grouping import Groups as Groups
from vgrad.persample.engine.grouping import check_groups as check_groups
from vgrad.persample.engine.grouping import members as members
from vgrad.persample.engine.guard import Fallbacks as Fallbacks
from vgrad.persample.engine.guard import FallbackWarning as FallbackWarning
from vgrad.persample.engine.guard import LossGuard as LossGuard
from vgrad.persample.engine.guard import UnsupportedOp as UnsupportedOp
from vgrad.persample.engine.ladder import STRATEGIES as STRATEGIES
from vgrad.persample.engine.problem import Problem as Problem
from vgrad.persample.engine.problem import Randomness as Randomness
from vgrad.persample.engine.strategies import Chunk as Chunk
from vgrad.persample.engine.strategies import saved_bytes as saved_bytes
from vgrad.persample.engine.transform import Quantity as Quantity
from vgrad.persample.engine.transform import Transform as Transform

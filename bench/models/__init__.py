"""The models on which contenders are compared, and their batches."""

from bench.models.inputs import Batch as Batch
from bench.models.settings import COUNTED as COUNTED
from bench.models.settings import FULL_SIZE as FULL_SIZE
from bench.models.settings import MODELLED as MODELLED
from bench.models.settings import SETTINGS as SETTINGS
from bench.models.settings import STEP_BY_STEP as STEP_BY_STEP
from bench.models.settings import TIMED as TIMED
from bench.models.settings import Problem as Problem
from bench.models.settings import Setting as Setting
from bench.models.tokens import Positions as Positions

"""Optimizers as pairs of pure functions: optax's form, the numbers of torch.optim."""

from .base import GradientTransformation as GradientTransformation
from .base import apply_updates as apply_updates
from .base import chain as chain
from .base import step as step
from .optimizers import adam as adam
from .optimizers import adamw as adamw
from .optimizers import sgd as sgd
from .transforms import AdamState as AdamState
from .transforms import ScheduleState as ScheduleState
from .transforms import TraceState as TraceState
from .transforms import add_decayed_weights as add_decayed_weights
from .transforms import scale_by_adam as scale_by_adam
from .transforms import scale_by_learning_rate as scale_by_learning_rate
from .transforms import trace as trace

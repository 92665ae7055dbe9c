"""Per-sample gradients and model ensembles at the price of one backward pass."""

from torch.func import functional_call as functional_call
from torch.func import grad as grad
from torch.func import grad_and_value as grad_and_value
from torch.func import hessian as hessian
from torch.func import jacfwd as jacfwd
from torch.func import jacrev as jacrev
from torch.func import jvp as jvp
from torch.func import linearize as linearize
from torch.func import vjp as vjp
from torch.func import vmap as vmap

from . import dp as dp
from . import optim as optim
from . import training as training
from . import typing as typing
from .batch_norm import replace_batch_norm as replace_batch_norm
from .functional import FunctionalModel as FunctionalModel
from .functional import make_functional as make_functional
from .functional import make_functional_with_buffers as make_functional_with_buffers
from .job.checkpoint import load as load
from .losses import batch_loss as batch_loss
from .losses import sample_loss as sample_loss
from .persample.guard import FallbackWarning as FallbackWarning
from .persample.guard import UnsupportedOp as UnsupportedOp
from .persample.quantities import ClippedGrad as ClippedGrad
from .persample.quantities import clipped_grad as clipped_grad
from .persample.quantities import per_sample_grad as per_sample_grad
from .persample.quantities import per_sample_norm as per_sample_norm
from .persample.quantities import weighted_grad as weighted_grad
from .persample.sensitivity import Sensitivity as Sensitivity
from .tree import freeze as freeze
from .tree import to_device as to_device
from .writing import write_grads_ as write_grads_

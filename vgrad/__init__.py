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

from vgrad import compiled as compiled
from vgrad import dp as dp
from vgrad import ensemble as ensemble
from vgrad import optim as optim
from vgrad import precision as precision
from vgrad import testing as testing
from vgrad import training as training
from vgrad import typing as typing
from vgrad.cli.checkpoint import load as load
from vgrad.compiled import CompileWarning as CompileWarning
from vgrad.compiled import compile as compile
from vgrad.ensemble import combine_state_for_ensemble as combine_state_for_ensemble
from vgrad.ensemble import ensemble_forward as ensemble_forward
from vgrad.ensemble import ensemble_grad as ensemble_grad
from vgrad.ensemble import for_members as for_members
from vgrad.ensemble import init_ensemble as init_ensemble
from vgrad.ensemble import stack as stack
from vgrad.functional.batch_norm import replace_batch_norm as replace_batch_norm
from vgrad.functional.freezing import freeze as freeze
from vgrad.functional.losses import batch_loss as batch_loss
from vgrad.functional.losses import sample_loss as sample_loss
from vgrad.functional.model import FunctionalModel as FunctionalModel
from vgrad.functional.model import make_functional as make_functional
from vgrad.functional.model import (
    make_functional_with_buffers as make_functional_with_buffers,
)
from vgrad.functional.writing import write_grads_ as write_grads_
from vgrad.persample import ClippedGrad as ClippedGrad
from vgrad.persample import Explanation as Explanation
from vgrad.persample import GradientMoments as GradientMoments
from vgrad.persample import clipped_grad as clipped_grad
from vgrad.persample import gradient_moments as gradient_moments
from vgrad.persample import per_sample_grad as per_sample_grad
from vgrad.persample import per_sample_gram as per_sample_gram
from vgrad.persample import per_sample_norm as per_sample_norm
from vgrad.persample import per_sample_projection as per_sample_projection
from vgrad.persample import rules as rules
from vgrad.persample import weighted_grad as weighted_grad
from vgrad.persample.engine import FallbackWarning as FallbackWarning
from vgrad.persample.engine import UnsupportedOp as UnsupportedOp
from vgrad.persample.explain import explain as explain
from vgrad.precision import autocast as autocast
from vgrad.sensitivity import Sensitivity as Sensitivity
from vgrad.tree import to_device as to_device

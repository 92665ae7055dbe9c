"""Optimizers as pairs of pure functions: optax's form, the numbers of torch.optim.

What holds for all of them, unless they say otherwise:

* Arguments, defaults and numbers are those of `torch.optim`, where it has the method.
* Every number may also be a tensor without dimensions, which `torch.vmap` can batch and
  gradients can flow to. Its value is then not checked. `lr` may also be a schedule, as
  `scale_by_learning_rate` takes it.
* A negative number raises a ValueError, as does a beta that is not below one. `init` of
  methods with moments raises a TypeError if a parameter is complex or integer; `update`
  of those that need the parameters raises a ValueError if they are not given.
* Arithmetic and state are in `promote_types(dtype, float32)`, where `torch.optim` stays
  in the dtype of the parameter. Bias corrections are computed in float64.
* An entry whose gradients were all zero has an update of zero, for `eps=0` too, where
  `torch.optim` gives NaN. Gradients through the update stay finite there.
* `maximize` turns the gradients around; weight decay remains a decay.
* Step counters belong to the optimizer, not to each parameter. A parameter whose
  gradient is None misses a step, but bias corrections and dampening count it.
"""

from vgrad.optim import schedules as schedules
from vgrad.optim import states as states
from vgrad.optim.averaging import averaged_parameters as averaged_parameters
from vgrad.optim.averaging import ema as ema
from vgrad.optim.averaging import ema_parameters as ema_parameters
from vgrad.optim.averaging import lookahead as lookahead
from vgrad.optim.averaging import polyak_average as polyak_average
from vgrad.optim.base import GradientTransformation as GradientTransformation
from vgrad.optim.base import apply_updates as apply_updates
from vgrad.optim.base import chain as chain
from vgrad.optim.base import step as step
from vgrad.optim.clipping import adaptive_grad_clip as adaptive_grad_clip
from vgrad.optim.clipping import centralize as centralize
from vgrad.optim.clipping import clip_by_block_rms as clip_by_block_rms
from vgrad.optim.clipping import clip_by_global_norm as clip_by_global_norm
from vgrad.optim.clipping import clip_by_value as clip_by_value
from vgrad.optim.clipping import global_norm as global_norm
from vgrad.optim.clipping import zero_nans as zero_nans
from vgrad.optim.grouping import keep as keep
from vgrad.optim.grouping import masked as masked
from vgrad.optim.grouping import partition as partition
from vgrad.optim.hyperparams import inject_hyperparams as inject_hyperparams
from vgrad.optim.hyperparams import with_hyperparams as with_hyperparams
from vgrad.optim.interop.as_torch import as_torch as as_torch
from vgrad.optim.interop.from_torch import from_torch as from_torch
from vgrad.optim.interop.to_torch import to_torch as to_torch
from vgrad.optim.methods.adafactor import adafactor as adafactor
from vgrad.optim.methods.adafactor import scale_by_factored_rms as scale_by_factored_rms
from vgrad.optim.methods.adam import adam as adam
from vgrad.optim.methods.adam import adamw as adamw
from vgrad.optim.methods.adam import scale_by_adam as scale_by_adam
from vgrad.optim.methods.adam import scale_by_amsgrad as scale_by_amsgrad
from vgrad.optim.methods.adaptive import adadelta as adadelta
from vgrad.optim.methods.adaptive import adagrad as adagrad
from vgrad.optim.methods.adaptive import rmsprop as rmsprop
from vgrad.optim.methods.adaptive import scale_by_adadelta as scale_by_adadelta
from vgrad.optim.methods.adaptive import scale_by_rms as scale_by_rms
from vgrad.optim.methods.adaptive import scale_by_rss as scale_by_rss
from vgrad.optim.methods.adaptive import scale_by_stddev as scale_by_stddev
from vgrad.optim.methods.lars_lamb import lamb as lamb
from vgrad.optim.methods.lars_lamb import lars as lars
from vgrad.optim.methods.lars_lamb import scale_by_trust_ratio as scale_by_trust_ratio
from vgrad.optim.methods.lion import lion as lion
from vgrad.optim.methods.lion import scale_by_lion as scale_by_lion
from vgrad.optim.methods.muon import muon as muon
from vgrad.optim.methods.muon import orthogonalize as orthogonalize
from vgrad.optim.methods.nadam_radam_adamax import adamax as adamax
from vgrad.optim.methods.nadam_radam_adamax import nadam as nadam
from vgrad.optim.methods.nadam_radam_adamax import radam as radam
from vgrad.optim.methods.nadam_radam_adamax import scale_by_adamax as scale_by_adamax
from vgrad.optim.methods.nadam_radam_adamax import scale_by_nadam as scale_by_nadam
from vgrad.optim.methods.nadam_radam_adamax import scale_by_radam as scale_by_radam
from vgrad.optim.methods.rprop import rprop as rprop
from vgrad.optim.methods.rprop import scale_by_rprop as scale_by_rprop
from vgrad.optim.methods.schedule_free import (
    evaluation_parameters as evaluation_parameters,
)
from vgrad.optim.methods.schedule_free import schedule_free as schedule_free
from vgrad.optim.methods.schedule_free import schedule_free_adamw as schedule_free_adamw
from vgrad.optim.methods.schedule_free import schedule_free_sgd as schedule_free_sgd
from vgrad.optim.methods.sgd import asgd as asgd
from vgrad.optim.methods.sgd import sgd as sgd
from vgrad.optim.methods.sgd import trace as trace
from vgrad.optim.noise import add_noise as add_noise
from vgrad.optim.schedules.plateau import reduce_on_plateau as reduce_on_plateau
from vgrad.optim.transforms import add_decayed_weights as add_decayed_weights
from vgrad.optim.transforms import scale as scale
from vgrad.optim.transforms import scale_by_learning_rate as scale_by_learning_rate
from vgrad.optim.transforms import scale_by_schedule as scale_by_schedule
from vgrad.optim.wrappers import apply_if_finite as apply_if_finite
from vgrad.optim.wrappers import multi_steps as multi_steps
from vgrad.tree import load_state_dict as load_state_dict
from vgrad.tree import state_dict as state_dict

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
  gradient is None misses a step, but bias corrections and dampening count it. Where
  that matters, `as_torch` refuses a gradient of such a parameter later on.

What an optimizer is, and how it is used:

* `GradientTransformation`: two pure functions, `init` and `update`
* `step`: update and apply
* `apply_updates`: add updates to parameters
* `chain`: apply transformations one after the other
* `state_dict`, `load_state_dict`: a state as tensors by name, and back
* `inject_hyperparams`, `with_hyperparams`: keep numbers in the state, and set them
* `partition`: give each group of parameters its own transformation
* `masked`, `keep`: change the selected parameters only, or all others
* `as_torch`: make a `torch.optim.Optimizer` that steps by a transformation
* `from_torch`, `to_torch`: go on from an optimizer of `torch.optim`, or in one
* `schedules`: rates that change from step to step
* `states`: the states of the transformations

Optimizers:

* `sgd`: along the gradient or, with momentum, along its decaying sum
* `asgd`: with a decaying rate, and the average of the parameters
* `adam`: along the mean gradient over the root of its mean square
* `adamw`: `adam` with weight decay apart from the moments
* `adamax`: over the decaying maximum of the gradient's size
* `nadam`: `adam` with the momentum of Nesterov
* `radam`: `adam` once the mean square is reliable
* `adagrad`: over the root of the sum of all squares
* `adadelta`: scaled to the size of earlier steps
* `rmsprop`: over the root of the mean square
* `rprop`: by the sign of the gradient, with a step size for each entry
* `lion`: by the sign of a mix of the gradient and the mean of those before
* `lars`: `sgd` by a share of the norm of each parameter
* `lamb`: `adamw` by a share of the norm of each parameter
* `muon`: along the mean gradient of each matrix, made orthogonal
* `adafactor`: by a share of the size of each parameter, with almost no state
* `schedule_free`: average the iterates instead of momentum and a falling rate
* `schedule_free_sgd`, `schedule_free_adamw`: optimizers made so
* `evaluation_parameters`: the parameters at which to evaluate them

Around an optimizer:

* `clip_by_global_norm`: shrink all gradients where their common norm is too large
* `clip_by_value`: clip every entry
* `clip_by_block_rms`: divide each tensor whose root mean square is too large
* `adaptive_grad_clip`: clip each unit relative to its parameters
* `centralize`: subtract the mean of each unit
* `zero_nans`: replace NaN by zero
* `global_norm`: the norm of all tensors together
* `add_noise`: Gaussian noise of falling variance
* `add_decayed_weights`: add the parameters, times a factor
* `ema`: the exponential moving average of gradients
* `ema_parameters`, `polyak_average`: keep an average of the parameters
* `averaged_parameters`: read it
* `lookahead`: let fast weights run ahead, and return part of the way
* `apply_if_finite`: leave out steps whose gradients are not finite
* `multi_steps`: one step of the mean gradient of several calls
* `reduce_on_plateau`: lower the rate when a value stagnates

Parts of optimizers:

* `scale`: times a factor
* `scale_by_learning_rate`: turn gradients into updates that descend
* `scale_by_schedule`: times a factor that changes
* `trace`: the decaying sum of gradients, as in `sgd`
* `scale_by_adam`, `scale_by_amsgrad`, `scale_by_nadam`, `scale_by_radam`,
  `scale_by_adamax`, `scale_by_adadelta`, `scale_by_rms`, `scale_by_rss`,
  `scale_by_lion`, `scale_by_rprop`, `scale_by_factored_rms`: of the optimizers above
* `scale_by_stddev`: over the standard deviation of the gradients
* `scale_by_trust_ratio`: by a share of the size of the parameter
* `orthogonalize`: set all singular values of each matrix to about one
"""

from vgrad.optim import schedules, states
from vgrad.optim.averaging import (
    averaged_parameters,
    ema,
    ema_parameters,
    lookahead,
    polyak_average,
)
from vgrad.optim.base import GradientTransformation, apply_updates, chain, step
from vgrad.optim.clipping import (
    adaptive_grad_clip,
    centralize,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    zero_nans,
)
from vgrad.optim.grouping import keep, masked, partition
from vgrad.optim.hyperparams import inject_hyperparams, with_hyperparams
from vgrad.optim.interop.as_torch import as_torch
from vgrad.optim.interop.from_torch import from_torch
from vgrad.optim.interop.to_torch import to_torch
from vgrad.optim.methods.adafactor import adafactor, scale_by_factored_rms
from vgrad.optim.methods.adam import adam, adamw, scale_by_adam, scale_by_amsgrad
from vgrad.optim.methods.adaptive import (
    adadelta,
    adagrad,
    rmsprop,
    scale_by_adadelta,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
)
from vgrad.optim.methods.lars_lamb import lamb, lars, scale_by_trust_ratio
from vgrad.optim.methods.lion import lion, scale_by_lion
from vgrad.optim.methods.muon import muon, orthogonalize
from vgrad.optim.methods.nadam_radam_adamax import (
    adamax,
    nadam,
    radam,
    scale_by_adamax,
    scale_by_nadam,
    scale_by_radam,
)
from vgrad.optim.methods.rprop import rprop, scale_by_rprop
from vgrad.optim.methods.schedule_free import (
    evaluation_parameters,
    schedule_free,
    schedule_free_adamw,
    schedule_free_sgd,
)
from vgrad.optim.methods.sgd import asgd, sgd, trace
from vgrad.optim.noise import add_noise
from vgrad.optim.schedules.plateau import reduce_on_plateau
from vgrad.optim.transforms import (
    add_decayed_weights,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
)
from vgrad.optim.wrappers import apply_if_finite, multi_steps
from vgrad.tree import load_state_dict, state_dict

__all__ = [
    "GradientTransformation",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adaptive_grad_clip",
    "add_decayed_weights",
    "add_noise",
    "apply_if_finite",
    "apply_updates",
    "as_torch",
    "asgd",
    "averaged_parameters",
    "centralize",
    "chain",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "ema",
    "ema_parameters",
    "evaluation_parameters",
    "from_torch",
    "global_norm",
    "inject_hyperparams",
    "keep",
    "lamb",
    "lars",
    "lion",
    "load_state_dict",
    "lookahead",
    "masked",
    "multi_steps",
    "muon",
    "nadam",
    "orthogonalize",
    "partition",
    "polyak_average",
    "radam",
    "reduce_on_plateau",
    "rmsprop",
    "rprop",
    "scale",
    "scale_by_adadelta",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_amsgrad",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_nadam",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rprop",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "schedules",
    "sgd",
    "state_dict",
    "states",
    "step",
    "to_torch",
    "trace",
    "with_hyperparams",
    "zero_nans",
]


def __dir__() -> list[str]:
    return __all__

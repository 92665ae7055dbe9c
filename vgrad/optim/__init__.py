"""Optimizers as pairs of pure functions: optax's form, the numbers of torch.optim.

An optimizer is made as `tx = adamw(1e-3)`. After `state = tx.init(params)`, a step is
`params, state = step(tx, grads, state, params)`. This holds for all of them, unless
documented otherwise:

* Arguments, defaults and numbers are as in `torch.optim`, where it has the method.
* Every number may also be a tensor without dimensions, which `torch.vmap` can batch and
  gradients can flow to. Its value is then not checked. `lr` may also be a schedule.
* A negative number raises a ValueError, as does a beta that is not below one. `init` of
  methods with moments raises a TypeError if a parameter is complex or integer.
* Arithmetic and state are in `promote_types(dtype, float32)`, where `torch.optim` stays
  in the dtype of the parameter. Bias corrections are computed in float64.
* An entry whose gradients were all zero has an update of zero, for `eps=0` too, and
  gradients through the update are finite there.
* `maximize` turns the gradients around; weight decay remains a decay.
* A parameter whose gradient is None has an update of None and keeps its state, but the
  count of steps belongs to the optimizer and goes on.
* The state is a `State(count, slots)`, whose slots have torch's names, or a tuple of
  them; transformations around others have named tuples of their own.

Around all of them:

* `GradientTransformation`, `State`: two pure functions; their state
* `step`, `apply_updates`: update and apply; add updates to parameters
* `chain`: apply transformations one after the other
* `state_dict`, `load_state_dict`: a state as tensors by name, and back
* `inject_hyperparams`, `with_hyperparams`: keep numbers in the state, and set them
* `partition`, `masked`, `set_to_zero`: by groups; only the selected ones; the others
* `as_torch`, `from_torch`, `to_torch`: make an optimizer of torch, read and write one
* `schedules`: rates that change from step to step

Optimizers:

* `sgd`, `asgd`, `adam`, `adamw`, `adamax`, `nadam`, `radam`, `adagrad`, `adadelta`,
  `rmsprop`, `rprop`, `muon`, `adafactor`: as in `torch.optim`
* `lion`, `lars`, `lamb`: by signs, and by shares of the norms of parameters
* `schedule_free`, `schedule_free_sgd`, `schedule_free_adamw`,
  `evaluation_parameters`: averages instead of momentum; the parameters to evaluate

Around an optimizer:

* `clip_by_global_norm`, `clip_by_value`, `clip_by_block_rms`,
  `adaptive_grad_clip`: clip all by one norm, or entries, or tensors, or units
* `global_norm`, `centralize`, `zero_nans`, `add_noise`, `ema`: of gradients
* `ema_parameters`, `polyak_average`, `averaged_parameters`: averages of parameters
* `lookahead`, `apply_if_finite`, `multi_steps`, `reduce_on_plateau`: around optimizers

Parts of optimizers:

* `scale`, `scale_by_learning_rate`: times a factor, a number or a schedule
* `add_decayed_weights`, `trace`: plus the parameters; the decaying sum of gradients
* `scale_by_adam`, `scale_by_trust_ratio`, `orthogonalize`: the directions of `adam`,
  and the steps of `lars` and `muon`; other directions come from an optimizer with a
  rate of one: `chain(lion(1.0), scale(-1.0))`
"""

from typing import TYPE_CHECKING

from vgrad.optim import schedules
from vgrad.optim.averaging import (
    apply_if_finite,
    averaged_parameters,
    ema,
    ema_parameters,
    evaluation_parameters,
    lookahead,
    multi_steps,
    polyak_average,
    schedule_free,
    schedule_free_adamw,
    schedule_free_sgd,
)
from vgrad.optim.base import GradientTransformation, State, apply_updates, chain, step
from vgrad.optim.hyperparams import (
    inject_hyperparams,
    reduce_on_plateau,
    with_hyperparams,
)
from vgrad.optim.interop import as_torch, from_torch, to_torch
from vgrad.optim.methods import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    asgd,
    lamb,
    lars,
    lion,
    muon,
    nadam,
    orthogonalize,
    radam,
    rmsprop,
    rprop,
    scale_by_adam,
    scale_by_trust_ratio,
    sgd,
    trace,
)
from vgrad.optim.transforms import (
    adaptive_grad_clip,
    add_decayed_weights,
    add_noise,
    centralize,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    masked,
    partition,
    scale,
    scale_by_learning_rate,
    set_to_zero,
    zero_nans,
)
from vgrad.renamed import raising
from vgrad.tree import load_state_dict, state_dict

__all__ = [
    "GradientTransformation",
    "State",
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
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "schedules",
    "set_to_zero",
    "sgd",
    "state_dict",
    "step",
    "to_torch",
    "trace",
    "with_hyperparams",
    "zero_nans",
]

if not TYPE_CHECKING:  # which sees no other names
    __getattr__ = raising(__name__)


def __dir__() -> list[str]:
    return __all__

"""Optimizers as pairs of pure functions: optax's form, the numbers of torch.optim.

`state = tx.init(params)` of `tx = adamw(1e-3)`, then for each step
`params, state = step(tx, grads, state, params)`. The page on optimizers has the rules
that hold for all of them.

* `GradientTransformation`, `State`: two pure functions; their state
* `step`, `apply_updates`: update and apply; add updates to parameters
* `chain`: apply transformations one after the other
* `state_dict`, `load_state_dict`: a state as tensors by name, and back
* `inject_hyperparams`, `with_hyperparams`: keep numbers in the state, and set them
* `partition`, `masked`, `set_to_zero`: by groups; only the selected ones; the others
* `as_torch`: make an optimizer of torch
* `schedules`: rates that change from step to step
* `sgd`, `asgd`, `adam`, `adamw`, `adamax`, `nadam`, `radam`, `adagrad`, `adadelta`,
  `rmsprop`, `rprop`, `muon`, `adafactor`: as in `torch.optim`
* `lion`, `lars`, `lamb`: by signs, and by shares of the norms of parameters
* `adam_bc`, `scale_then_privatize`: for gradients with the noise of a private step
* `schedule_free`, `schedule_free_sgd`, `schedule_free_adamw`,
  `evaluation_parameters`: averages instead of momentum; the parameters to evaluate
* `clip_by_global_norm`, `clip_by_value`, `clip_by_block_rms`,
  `adaptive_grad_clip`: clip all by one norm, or entries, or tensors, or units
* `global_norm`, `centralize`, `zero_nans`, `add_noise`, `ema`: of gradients
* `ema_parameters`, `polyak_average`, `averaged_parameters`: averages of parameters
* `lookahead`, `apply_if_finite`, `multi_steps`, `reduce_on_plateau`: around optimizers
* `scale`, `scale_by_learning_rate`: times a factor, a number or a schedule
* `add_decayed_weights`, `trace`: plus the parameters; the decaying sum of gradients
* `scale_by_adam`, `scale_by_trust_ratio`, `orthogonalize`: the directions of `adam`,
  and the steps of `lars` and `muon`
"""

from vgrad.optim import methods, private, schedules, transforms
from vgrad.optim.base import GradientTransformation, State, apply_updates, chain, step
from vgrad.optim.interop import as_torch
from vgrad.optim.methods import *  # noqa: F403
from vgrad.optim.private import *  # noqa: F403
from vgrad.optim.transforms import *  # noqa: F403
from vgrad.tree import load_state_dict, state_dict

__all__ = [
    "GradientTransformation",
    "State",
    "apply_updates",
    "as_torch",
    "chain",
    "load_state_dict",
    "schedules",
    "state_dict",
    "step",
]
__all__ += methods.__all__
__all__ += private.__all__
__all__ += transforms.__all__


def __dir__() -> list[str]:
    return __all__

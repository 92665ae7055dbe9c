"""Rates that change from step to step: the schedules of `torch.optim.lr_scheduler`.

A schedule is a function of the number of steps taken so far, an int64 tensor that is
zero at the first step. It returns the rate, entry by entry and in float64, so that
`cosine(0.1, 100)(torch.arange(200))` is the whole curve. Optimizers take one as `lr`.

The argument `lr` is the rate that torch reads from its optimizer, and lengths are
called `steps` where torch says `total_iters`, `T_max`, `T_0` or `total_steps`. Only
`constant` has a default for it, which makes the rate constant from the start. All other
names, defaults and numbers are those of torch. `LambdaLR` and `ChainedScheduler` have
no counterpart: every function of the count is a schedule, and so is a product of two.
Neither has `cycle_momentum`: `inject_hyperparams` takes a schedule for the momentum.

Every number may also be a tensor without dimensions, which `torch.vmap` can batch and
gradients can flow to. Its value is then not checked; lengths have to be whole. Rates
and factors that are negative or infinite raise a ValueError, as do lengths and
milestones that are not whole numbers of at least one.

* `constant`: `lr * factor` for the first steps, then `lr`
* `linear`: along a line between two rates
* `exponential`: times `gamma` at every step
* `step`: times `gamma` every few steps
* `multi_step`: times `gamma` at every milestone
* `polynomial`: to zero like a power
* `cosine`: between `lr` and `eta_min`, which is reached after `steps` steps
* `cosine_with_restarts`: the same over and over, each time longer
* `cyclic`: up and down along lines
* `one_cycle`: up to `max_lr`, then far below the start
* `warmup`: along a line to where a schedule starts
* `join`: one schedule after the other
* `piecewise_constant`: one value between each two boundaries
"""

from vgrad.optim.schedules.cycles import cosine_with_restarts, cyclic, one_cycle
from vgrad.optim.schedules.decays import (
    constant,
    cosine,
    exponential,
    linear,
    multi_step,
    polynomial,
    step,
)
from vgrad.optim.schedules.joined import join, piecewise_constant, warmup

__all__ = [
    "constant",
    "cosine",
    "cosine_with_restarts",
    "cyclic",
    "exponential",
    "join",
    "linear",
    "multi_step",
    "one_cycle",
    "piecewise_constant",
    "polynomial",
    "step",
    "warmup",
]


def __dir__() -> list[str]:
    return __all__

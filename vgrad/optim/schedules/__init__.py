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
"""

from vgrad.optim.schedules.cycles import cosine_with_restarts as cosine_with_restarts
from vgrad.optim.schedules.cycles import cyclic as cyclic
from vgrad.optim.schedules.cycles import one_cycle as one_cycle
from vgrad.optim.schedules.decays import constant as constant
from vgrad.optim.schedules.decays import cosine as cosine
from vgrad.optim.schedules.decays import exponential as exponential
from vgrad.optim.schedules.decays import linear as linear
from vgrad.optim.schedules.decays import multi_step as multi_step
from vgrad.optim.schedules.decays import polynomial as polynomial
from vgrad.optim.schedules.decays import step as step
from vgrad.optim.schedules.joined import join as join
from vgrad.optim.schedules.joined import piecewise_constant as piecewise_constant
from vgrad.optim.schedules.joined import warmup as warmup

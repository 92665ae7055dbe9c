"""Differential privacy: Poisson batches, Gaussian noise and their accounting.

* `Plan`: the numbers that the sampler, the noise and the accountant of one run share
* `PrivateGradients`: DP-SGD for a loop with a module and an optimizer of torch
* `best_of`: release the best of a random number of runs, for tuning with a budget
* `epsilon`: bound the epsilon that steps of DP-SGD have spent
* `noise_multiplier_for`: find the smallest noise multiplier that stays in a budget
* `PoissonBatchSampler`: Poisson batches of indices for a `DataLoader`
* `collate`: make a collate function that handles empty batches
* `Units`: the persons or groups that the samples of a data set belong to
* `unit_loss`: make the loss of a unit, the mean over its samples
* `unit_loader`: load batches of whole units
* `quantile_clip`: let the bound of a plan follow a quantile of the norms
* `group_clip`: bounds and noise of their own for groups of parameters
* `add_gaussian_noise`: add noise to a sum, scaled by its sensitivity
* `secret_key`: draw a key from the operating system
* `noising`: schemes of noise that is correlated over steps
* `audit`: lower bounds of the privacy that a mechanism spends

A mechanism, with its sampler, its account and what goes with it, is one class of
`dp/mechanisms.py`.
"""

from vgrad.dp import audit, noising
from vgrad.dp.accounting import epsilon, noise_multiplier_for
from vgrad.dp.adaptive import quantile_clip
from vgrad.dp.group_clip import group_clip
from vgrad.dp.noise import add_gaussian_noise
from vgrad.dp.plan import Plan
from vgrad.dp.private_gradients import PrivateGradients
from vgrad.dp.sampling import PoissonBatchSampler, collate
from vgrad.dp.selection import best_of
from vgrad.dp.units import Units, unit_loader, unit_loss
from vgrad.generators import secret_key

__all__ = [
    "Plan",
    "PoissonBatchSampler",
    "PrivateGradients",
    "Units",
    "add_gaussian_noise",
    "audit",
    "best_of",
    "collate",
    "epsilon",
    "group_clip",
    "noise_multiplier_for",
    "noising",
    "quantile_clip",
    "secret_key",
    "unit_loader",
    "unit_loss",
]


def __dir__() -> list[str]:
    return __all__

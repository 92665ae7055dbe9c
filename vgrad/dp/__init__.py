"""Differential privacy: Poisson batches, Gaussian noise and their accounting."""

from typing import TYPE_CHECKING

from vgrad.dp.accounting import epsilon, noise_multiplier_for
from vgrad.dp.noise import add_gaussian_noise
from vgrad.dp.plan import Plan
from vgrad.dp.private_gradients import PrivateGradients
from vgrad.dp.sampling import PoissonBatchSampler, collate
from vgrad.generators import secret_key
from vgrad.renamed import raising

__all__ = [
    "Plan",
    "PoissonBatchSampler",
    "PrivateGradients",
    "add_gaussian_noise",
    "collate",
    "epsilon",
    "noise_multiplier_for",
    "secret_key",
]


if not TYPE_CHECKING:  # which sees no other names
    __getattr__ = raising(__name__)


def __dir__() -> list[str]:
    return __all__

"""Differential privacy: Poisson batches, Gaussian noise and their accounting."""

from vgrad.dp.accounting import epsilon as epsilon
from vgrad.dp.accounting import noise_multiplier_for as noise_multiplier_for
from vgrad.dp.bridge import PrivateGradients as PrivateGradients
from vgrad.dp.noise import add_gaussian_noise as add_gaussian_noise
from vgrad.dp.plan import Plan as Plan
from vgrad.dp.sampling import PoissonBatchSampler as PoissonBatchSampler
from vgrad.dp.sampling import collate as collate
from vgrad.dp.sampling import poisson_sample as poisson_sample
from vgrad.generators import secret_key as secret_key

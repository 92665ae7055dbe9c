"""Differential privacy: Poisson batches, Gaussian noise and their accounting."""

from vgrad.generators import secret_key as secret_key

from .accounting import epsilon as epsilon
from .accounting import noise_multiplier_for as noise_multiplier_for
from .noise import add_gaussian_noise as add_gaussian_noise
from .plan import Plan as Plan
from .sampling import PoissonBatchSampler as PoissonBatchSampler
from .sampling import collate as collate
from .sampling import poisson_sample as poisson_sample

"""Bounds of norms that follow a quantile of the norms, learned from a noisy count.

Beside the sum of gradients clipped to C, a step releases how many samples have a norm
of at most C: the sum of b_i - 1/2, b_i being one or zero. A sample moves that sum by
1/2 and the gradients by C, so both are one Gaussian release: with the deviations s_b
and z_g C it has the multiplier z of the plan where z^-2 = z_g^-2 + (2 s_b)^-2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.batches import Sensitivity
from vgrad.dp.noise import gaussian_noise
from vgrad.persample.clipped import LEAST, MOST, ClippedGrad
from vgrad.typing import Tree

_OLD = {"lower": "least", "upper": "most"}
"""Names of fields in saved plans, in their digests and in seeds of their noise."""


@dataclass(frozen=True)
class QuantileClip:
    """A bound that follows a quantile of norms; `dp.quantile_clip` makes it."""

    quantile: float
    rate: float
    start: float
    count_deviation: float | None
    lower: float
    upper: float

    def __post_init__(self) -> None:
        function = "quantile_clip"
        fields = {name: x for name, x in vars(self).items() if x is not None}
        numbers = dict(zip(fields, checks.finite(function, **fields), strict=True))
        checks.non_negative(function, quantile=numbers.pop("quantile"))
        checks.positive(function, **numbers)
        if self.quantile > 1:
            raise ValueError(
                f"{function}(quantile={self.quantile!r}): expected at most 1. A "
                f"quantile of 0.5 is the median."
            )
        checks.between(function, LEAST, MOST, lower=self.lower, upper=self.upper)
        if not self.lower <= self.start <= self.upper:
            raise ValueError(
                f"{function}(start={self.start}, lower={self.lower}, "
                f"upper={self.upper}): expected a start between the two ends. Pass "
                f"others."
            )
        # Clips of equal numbers are equal.
        self.__dict__.update({name: float(x) for name, x in fields.items()})

    @property
    def identity(self) -> dict[str, Any]:
        """The fields by the names that identities of plans have had from the start."""
        return {_OLD.get(name, name): value for name, value in vars(self).items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "QuantileClip | None":
        """Read fields of a saved plan, under their names or the old ones, if any."""
        new = {old: name for name, old in _OLD.items()}
        values = {new.get(name, name): value for name, value in values.items()}
        fits = values.keys() == cls.__dataclass_fields__.keys()
        return cls(**values) if fits else None

    def deviation(self, expected_batch_size: float) -> float:
        """Return the deviation of the noise on the count."""
        if self.count_deviation is None:
            return expected_batch_size / 20
        return self.count_deviation

    def gradient_multiplier(
        self, noise_multiplier: float, expected_batch_size: float
    ) -> float:
        """Return the multiplier of the noise on gradients alone."""
        limit = 2 * self.deviation(expected_batch_size)
        if not noise_multiplier < limit:
            raise ValueError(
                f"Plan(max_norm=quantile_clip(count_deviation="
                f"{self.count_deviation})): expected noise_multiplier < 2 * "
                f"count_deviation = {limit:.4g}, since the count spends a part of the "
                f"budget, got {noise_multiplier:.4g}. Raise count_deviation, or take "
                f"larger batches."
            )
        # (z^-2 - (2 s_b)^-2)^(-1/2), for z = 0 too.
        return noise_multiplier / math.sqrt(1 - (noise_multiplier / limit) ** 2)

    def bound(self, max_norm: Tree, device: torch.device, *, first: bool) -> Tensor:
        """Return the bound of a step, float64 `[]`: `start`, or the one of a state."""
        if first:  # no copy from the host, for which a device would wait
            return torch.full((), self.start, dtype=torch.float64, device=device)
        if not isinstance(max_norm, Tensor):
            raise ValueError(
                "max_norm: expected a state with the bound that the step before has "
                "left in it, since the plan's bound adapts, got one without. Keep all "
                "fields of a state together."
            )
        # Between both ends also where a state was damaged, and without a wait.
        return max_norm.nan_to_num(self.lower).clamp(self.lower, self.upper).to(device)

    def following(
        self,
        bound: Tensor,
        count: Tensor,
        expected_batch_size: float,
        **place: Any,
    ) -> Tensor:
        """Return the bound of the next step, from the sum of b_i - 1/2 and its noise.

        Cost: some forty small kernels on a device, and no wait.
        """
        # A sample moves the sum by 1/2.
        place["noise_multiplier"] = 2 * self.deviation(expected_batch_size)
        noise = gaussian_noise("quantile_clip", Sensitivity(0.5), **place)
        noisy = noise.added({"count": count})["count"]
        return self.after(bound, self.fraction(noisy, expected_batch_size))

    def fraction(self, count: Tensor, expected_batch_size: float) -> Tensor:
        """Return the part of norms below the bound, from the noisy sum of b_i - 1/2."""
        return (count / expected_batch_size + 0.5).clamp(0, 1)

    def after(self, bound: Tensor, fraction: Tensor) -> Tensor:
        """Return the bound of the next step, float64 `[]`."""
        step = (-self.rate * (fraction.double() - self.quantile)).exp()
        return (bound * step).clamp(self.lower, self.upper)


def count_below(result: ClippedGrad) -> Tensor:
    """Return the sum of b_i - 1/2 over a batch, float64 `[]`."""
    above = result.clipped + result.nonfinite
    return len(result.losses) / 2 - above.double()


def quantile_clip(
    *,
    quantile: float = 0.5,
    rate: float = 0.2,
    start: float = 1.0,
    count_deviation: float | None = None,
    lower: float = 1e-6,
    upper: float = 1e6,
) -> QuantileClip:
    """Make a bound C for `Plan(max_norm=...)` that follows a quantile of the norms.

    Each step counts how many of its samples have a norm of at most C, adds Gaussian
    noise of deviation `count_deviation` to the sum of b_i - 1/2, and divides by the
    expected batch size: b is that plus 1/2, between 0 and 1. The next step clips to
    `C exp(-rate (b - quantile))`, between `lower` and `upper`. All of it is one release
    with the gradients, at the plan's noise multiplier z: their own multiplier is
    `(z^-2 - (2 count_deviation)^-2)^(-1/2)`, which has to exist. Costs one number.

    Args:
        count_deviation: by default the expected batch size / 20, never the true one.

    Raises:
        ValueError: a number is outside its range.

    Reference: Andrew et al., arXiv 1905.03871.

    Example:
        >>> from vgrad import dp
        >>> clip = dp.quantile_clip(quantile=0.5, start=1.0)
        >>> clip.after(torch.tensor(1.0), torch.tensor(0.5))
        tensor(1., dtype=torch.float64)
    """
    return QuantileClip(quantile, rate, start, count_deviation, lower, upper)

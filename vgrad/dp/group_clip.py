"""Bounds and noise of their own for groups of parameters, as one Gaussian release.

The gradient of a sample is clipped in each group k, to C_k. Divided by r_k, the
deviations of the noise up to a common number, it has a norm of at most
m = sqrt(sum_k (C_k / r_k)^2), and the noise on all of it one deviation z m. So the
multiplier is z, and group k gets noise of deviation z m r_k.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vgrad import checks
from vgrad.dp.adaptive import QuantileClip
from vgrad.persample.clipped import LEAST, MOST
from vgrad.persample.engine import members
from vgrad.typing import Params

Deviations = Literal["bounds", "equal"] | Mapping[str, float]


@dataclass(frozen=True)
class GroupClip:
    """Bounds of groups and relative deviations; `dp.group_clip` makes it."""

    bounds: dict[str, float]
    deviations: dict[str, float]

    def __post_init__(self) -> None:
        checks.patterns("group_clip", bounds=[*self.bounds])
        checks.names("group_clip(deviations)", self.bounds, self.deviations)
        for kind, numbers in vars(self).items():
            if not numbers:
                raise ValueError(
                    f"group_clip({kind}={{}}): expected a bound for a pattern of names "
                    f"at least, got none."
                )
            named = {f"{kind}[{pattern!r}]": x for pattern, x in numbers.items()}
            checks.between("group_clip", LEAST, MOST, **named)
            floats = {pattern: float(x) for pattern, x in numbers.items()}
            self.__dict__[kind] = floats  # clips of equal numbers are equal
        sizes = {"bounds / deviations": self.norm}
        for pattern, x in self.deviations.items():  # of noise, which must not overflow
            sizes[f"norm * deviations[{pattern!r}]"] = self.norm * x
        checks.between("group_clip", LEAST, MOST, **sizes)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.bounds.items())))

    @property
    def total(self) -> float:
        """The largest norm of a clipped gradient."""
        return math.hypot(*self.bounds.values())

    @property
    def norm(self) -> float:
        """The largest norm of a clipped gradient, divided by the deviations."""
        parts = (x / self.deviations[pattern] for pattern, x in self.bounds.items())
        return math.hypot(*parts)

    def scales(self, params: Params) -> dict[str, tuple[Any]]:
        """Return by name the numbers that make the noise one of all parameters."""
        patterns = self._patterns(params).items()
        return {name: (1 / self.deviations[pattern],) for name, pattern in patterns}

    def densities(self, params: Params) -> dict[str, float]:
        """Return by name the mean square of entries of the largest scaled gradient."""
        patterns, sizes = self._patterns(params), Counter[str]()
        for name, group in patterns.items():
            sizes[group] += params[name].numel()
        norms = {group: x / self.deviations[group] for group, x in self.bounds.items()}
        return {n: norms[group] ** 2 / sizes[group] for n, group in patterns.items()}

    def _patterns(self, params: Params) -> dict[str, str]:
        groups = {pattern: [pattern] for pattern in self.bounds}
        matched = members("Plan(max_norm=group_clip(...))", groups, params)
        missing = params.keys() - {name for names in matched.values() for name in names}
        if missing:
            raise ValueError(
                f"Plan(max_norm=group_clip({self.bounds})): expected every parameter "
                f"to match a pattern, but {checks.listed(missing)} match none."
            )
        return {name: pattern for pattern, names in matched.items() for name in names}


def scaled(sums: Params, scales: Mapping[str, Sequence[Any]]) -> Params:
    """Multiply sums by numbers, one of each."""
    return {n: x * scales[n][0] if n in scales else x for n, x in sums.items()}


def group_clip(
    bounds: Mapping[str, float], *, deviations: Deviations = "bounds"
) -> GroupClip:
    """Make bounds of groups for `Plan(max_norm=...)`, with noise for each group.

    `bounds` are by shell-style patterns of parameters' names, of which each matches
    exactly one. The gradient of a sample is clipped in each group k to its bound C_k,
    as by `clipped_grad(clipping="per_layer")`. Noise has in group k a deviation of
    `noise_multiplier * m * r_k / expected_batch_size`, with
    `m = sqrt(sum_k (C_k / r_k)^2)`: all groups are one Gaussian release with the
    plan's noise multiplier. `deviations` are the ratios r_k:

    * `"bounds"`: as the bounds, so that K groups have noise of `sqrt(K) C_k` each;
    * `"equal"`: the same for all numbers, of `sqrt(sum_k C_k^2)`;
    * numbers by the same patterns. The noise of all P_k numbers together is least for
      the root of C_k over the root of P_k.

    Raises:
        ValueError: a number is not between 1e-30 and 1e30, or patterns differ.

    Reference: McMahan et al., A General Approach to Adding Differential Privacy to
    Iterative Training Procedures, arXiv 1812.06210.

    Example:
        >>> from vgrad import dp
        >>> clip = dp.group_clip({"*.weight": 1.0, "*.bias": 0.1})
        >>> run = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000}
        >>> plan = dp.Plan(dataset_size=100, max_norm=clip, delta=1e-6, **run)
        >>> {name: round(x, 3) for name, x in plan.deviation(0).items()}
        {'*.weight': 1.414, '*.bias': 0.141}
    """
    if not isinstance(bounds, Mapping):
        raise TypeError(
            f"group_clip(bounds={checks.shown(bounds)}): expected a dictionary of "
            f"bounds by patterns of names, got a {type(bounds).__name__}."
        )
    if isinstance(deviations, Mapping):
        return GroupClip({**bounds}, {**deviations})
    checks.choice("group_clip", ("bounds", "equal"), deviations=deviations)
    same = dict.fromkeys(bounds, 1.0)
    return GroupClip({**bounds}, {**bounds} if deviations == "bounds" else same)


def clip_of(fields: Mapping[str, object]) -> QuantileClip | GroupClip:
    """Return the clip of a dictionary: bounds by pattern, or as `asdict` writes it."""
    if (clip := QuantileClip.of(fields)) is not None:
        return clip
    if fields.keys() == GroupClip.__dataclass_fields__.keys():
        return GroupClip(**fields)  # pyright: ignore[reportArgumentType]
    return group_clip(fields)  # pyright: ignore[reportArgumentType]

"""By what factor a sample's gradient is clipped, and what becomes of each sample."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.persample.engine.grouping import members
from vgrad.persample.factors import Norm
from vgrad.persample.factors.sums import ordinary, rounded_down
from vgrad.typing import Clipping, Params

_GAMMA = 0.01
"""What automatic clipping adds to a norm, as its authors do."""

LEAST, MOST = 1e-30, 1e30
"""Between these a sum in float32 keeps a bound."""

_FAR = 1e25
"""This many bounds times the smallest float32 are nothing next to the bound."""

Parts = list[tuple[list[str], float]]
"""Names of parameters that are clipped together, and their bound."""


def check_bounds(
    named: Mapping[str, float], normalize_by: float, clipping: Clipping
) -> None:
    """Refuse bounds that a sum in float32 cannot keep, for want of digits or range.

    An infinite one is no bound.
    """
    for name, bound in named.items():
        checks.positive("clipped_grad", **{name: bound})
        if clipping != "automatic" and math.isinf(bound):
            continue
        sizes = {name: bound, f"{name} / normalize_by": bound / normalize_by}
        checks.between("clipped_grad", LEAST, MOST, **sizes)


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped."""

    kind: Clipping
    max_norm: float | Mapping[str, float]

    @property
    def total(self) -> float:
        """The largest norm of a clipped gradient."""
        if isinstance(self.max_norm, Mapping):
            return math.hypot(*self.max_norm.values())
        return self.max_norm

    def parts(self, params: Params) -> Parts:
        """Return the names of parameters that are clipped together, and the bound."""
        if isinstance(self.max_norm, Mapping):
            groups = {pattern: [pattern] for pattern in self.max_norm}
            found = members("clipped_grad", groups, params)
            covered = {name for names in found.values() for name in names}
            if missing := sorted(params.keys() - covered):
                raise ValueError(
                    f"clipped_grad(max_norm={dict(self.max_norm)!r}): expected every "
                    f"parameter to match a pattern, but {missing} match none."
                )
            return [(found[each], self.max_norm[each]) for each in found]
        if self.kind != "per_layer":
            return [(list(params), self.max_norm)]
        layers = members("clipped_grad", "layer", params)
        bound = self.max_norm / math.sqrt(len(layers))
        return [(names, bound) for names in layers.values()]

    def factors(self, norms: Tensor, bound: float) -> Tensor:
        """Factors [B] in float64; those that have few digits are zero."""
        if self.kind == "automatic":
            exact = bound / (norms + _GAMMA)
        else:
            exact = (bound / norms).clamp(max=1)
        return torch.where(exact < torch.finfo(exact.dtype).tiny, 0.0, exact)

    def decide(
        self,
        norms: Mapping[str, Norm],
        parts: Parts,
        dtype: torch.dtype,
        mask: Tensor | None = None,
    ) -> "Decision":
        """Say from the norms what becomes of each sample; weights are of `dtype`."""
        joint = [Norm.joint([norms[name] for name in names]) for names, _ in parts]
        keep = torch.stack([each.upper for each in joint]).isfinite().all(0)
        above, simple = torch.zeros_like(keep), torch.ones_like(keep)
        weights: dict[str, Tensor] = {}
        for (names, bound), norm in zip(parts, joint, strict=True):
            factors = self.factors(torch.where(keep, norm.upper, 1), bound)
            if mask is not None:
                factors = torch.where(mask, factors, 0.0)
            # Rounded down, so that no product is above the bound.
            rounded = rounded_down(factors, dtype)
            weights.update(dict.fromkeys(names, rounded))
            above |= keep & (norm.value > bound)
            # A product with a number on the edge of zero must not count either.
            simple &= ordinary(norm.reach, factors) & (norm.reach <= bound * _FAR)
        if mask is not None:
            above &= mask
        return Decision(Norm.joint(joint).value, weights, keep, above, simple)


class Decision(NamedTuple):
    """What becomes of B samples."""

    norms: Tensor
    weights: dict[str, Tensor]  # by which each parameter's gradients are multiplied
    keep: Tensor  # which are finite, so that they count
    above: Tensor  # which of these have a norm above a bound
    simple: Tensor  # which can be summed from factors, far from the ends of float32

    @property
    def plain(self) -> Tensor:
        """Which need nothing but their weights."""
        return self.keep & self.simple

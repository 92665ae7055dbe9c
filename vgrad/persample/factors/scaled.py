"""Gradients of a loss that was multiplied by a scale before its backward pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vgrad.persample.factors.base import Factor, Probes
from vgrad.persample.factors.combined import Compound
from vgrad.persample.factors.reductions import Norm
from vgrad.tree import wide


@dataclass(frozen=True)
class Scaled(Compound):
    """The gradients of `factor`, divided by `scale`, in float32 or wider.

    Nothing is divided before it is that wide, so what the scale saved is not lost.
    """

    factor: Factor
    scale: Tensor

    @property
    def parts(self) -> tuple[Factor]:
        """The scaled gradients alone."""
        return (self.factor,)

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.factor.shape

    def grad(self) -> Tensor:
        """Return the gradients."""
        grad = self.factor.grad()
        return grad.to(wide(grad.dtype)) / self.scale

    def norm(self) -> Norm:
        """Return their norms."""
        return self._unscaled(self.factor.norm())

    def settled(self) -> tuple[Factor, Norm]:
        """Settle on a form of the scaled gradients."""
        factor, norm = self.factor.settled()
        return self._of(factor), self._unscaled(norm)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sum the scaled gradients, and divide: the sum may be wider than weights."""
        return self.factor.weighted(weights) / self.scale

    def gram(self, other: Factor) -> Tensor:
        """Inner products; both have a scale."""
        if not isinstance(other, Scaled):
            return super().gram(other)
        return self.factor.gram(other.factor) / self.scale / other.scale

    def project(self, probes: Probes) -> Tensor:
        """Project the scaled gradients, and divide."""
        return self.factor.project(probes) / self.scale

    def _of(self, *parts: Any) -> Factor:
        return Scaled(parts[0], self.scale)

    def _unscaled(self, norm: Norm) -> Norm:
        # One over the scale is multiplied as well, by the sum and by what it has lost.
        reach = torch.maximum(norm.reach, norm.reach.clamp(min=1) / self.scale)
        return Norm(norm.value / self.scale, norm.upper / self.scale, reach)

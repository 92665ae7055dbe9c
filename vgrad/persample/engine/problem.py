"""One call of a per-sample transform: what it was given, and how its loss is run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vgrad import batches
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import Fallbacks
from vgrad.persample.factors.base import Factor
from vgrad.persample.factors.scaled import Scaled
from vgrad.precision.autocasting import AutocastMode
from vgrad.precision.loss_scale import LossScale
from vgrad.tree import tree_leaves
from vgrad.typing import Buffers, LossFn, Params, Tree

Randomness = Literal["error", "different", "same"]


@dataclass(frozen=True)
class Problem:
    """One call of a per-sample transform.

    Attributes:
        function: the transform's name, for errors.
        collect: makes what the factors of a chunk are handed to.
        others: tensors that the result depends on, though the loss does not.
        unreached: sets of parameters to which no graph leads from a sample's loss, as
            one sample on its own has shown.
    """

    function: str
    loss: LossFn
    params: Params
    buffers: Buffers
    batch: batches.Batch
    randomness: Randomness
    has_aux: bool
    fallbacks: Fallbacks
    collect: Callable[[], Collector]
    loss_scale: LossScale | None = None
    others: tuple[Tensor, ...] = ()
    unreached: set[frozenset[str]] = field(default_factory=set)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that were given."""
        leaves = [leaf for leaf in self.batch.leaves if isinstance(leaf, Tensor)]
        return [*self.params.values(), *self.buffers.values(), *leaves]

    @property
    def differentiable(self) -> bool:
        """Whether the caller can differentiate the gradients once more."""
        wanted = any(tensor.requires_grad for tensor in self.tensors)
        return torch.is_grad_enabled() and wanted

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The tensors by which the caller can differentiate the result."""
        given = (*self.tensors, *self.others) if torch.is_grad_enabled() else ()
        return tuple(tensor for tensor in given if tensor.requires_grad)

    def cotangent(self, losses: Tensor) -> Tensor:
        """Return what losses are multiplied by before the backward pass."""
        ones = torch.ones_like(losses)
        return ones if self.loss_scale is None else ones * self._scale(losses.dtype)

    def unscaled(self, factor: Factor) -> Factor:
        """Take the scale of the losses out of what the backward pass found."""
        if self.loss_scale is None:
            return factor
        return Scaled(factor, self._scale(torch.float32))

    def _scale(self, dtype: torch.dtype) -> Tensor:
        device = next(iter(self.params.values())).device
        scale = self.loss_scale.loss_scale if self.loss_scale else 1.0
        # What a loss of any dtype can be multiplied by without rounding. It is divided
        # by again, so results are no function of it.
        scale = torch.as_tensor(scale, device=device).detach().to(torch.bfloat16)
        return scale.to(dtype)

    def run_loss(
        self,
        params: Params,
        tensors: tuple[Tensor, ...],
        watch: AbstractContextManager,
    ) -> tuple[Tensor, Tree]:
        """Return `(scalar, aux)` of one sample, a copy, which the loss may change."""
        sample = self.batch.sample(tuple(tensor.clone() for tensor in tensors))
        with watch, AutocastMode(params.values()):
            # Dictionaries of its own, in which the loss may bind names anew.
            result = self.loss(dict(params), dict(self.buffers), *sample)
        if self.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(
                f"{self.function}(loss, has_aux=True): expected a loss that returns "
                f"(scalar, aux), got a {type(result).__name__}."
            )
        value, aux = result if self.has_aux else (result, ())
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            tensor = isinstance(value, Tensor)
            got = f"{value.dtype} {tuple(value.shape)}" if tensor else type(value)
            raise ValueError(
                f"{self.function}(loss): expected a loss that returns a real tensor "
                f"without dimensions (with has_aux=True a pair of it and aux), got "
                f"{got}."
            )
        for leaf in tree_leaves(aux):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{self.function}(loss, has_aux=True): expected tensors in aux, "
                    f"got a {type(leaf).__name__}."
                )
        return value, aux
